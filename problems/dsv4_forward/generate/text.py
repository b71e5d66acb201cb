"""Text and token ids: a checkpoint's tokenizer.json, its end tokens, and text piece by piece as tokens come."""

from pathlib import Path

from problems.dsv4_forward.checkpoint.checkpoint_names import CheckpointError
from problems.dsv4_forward.checkpoint.config_json import read_json


class Tokenizer:
    """A tokenizer.json, read by the package tokenizers. bos: a token that a text must begin with, None: none."""

    def __init__(self, file: Path, bos: int | None = None) -> None:
        """ValueError: no such file, or it cannot be read; the package is not there."""
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError("text needs the package tokenizers, which `make setup` installs") from error
        if not file.is_file():
            what = "is a directory, not a file" if file.is_dir() else "is not there"
            raise ValueError(f"{file} {what}: name a tokenizer.json with --tokenizer, or give ids with --prompt")
        try:
            self._held = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises this type itself
            raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
        self._file, self._bos = file, bos

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids, one or more. ValueError: it has none, or is no Unicode."""
        try:
            ids = self._held.encode(text).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"--text must be Unicode text, got {text!r}") from error
        if not ids:
            raise ValueError(f"--text must hold a token or more, got {text!r}")
        return ids if self._bos is None or ids[0] == self._bos else [self._bos, *ids]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` without special tokens; ids that the tokenizer does not know have none."""
        return self._held.decode(ids)

    def pieces(self) -> "Pieces":
        """Return the text of tokens to come."""
        return Pieces(self)


class Pieces:
    """The text of a row of tokens, piece by piece. Bytes of a character that is not complete yet are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import decoders

        self._tokenizer, self._decoder = tokenizer, decoders.DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._told = ""

    def add(self, token: int) -> str:
        """Return the text that is complete with this token, "" if it completes none."""
        self._ids.append(token)
        piece = self._decoder.step(self._tokenizer._held, token) or ""
        self._told += piece
        return piece

    def end(self) -> str:
        """Return what was held back: bytes that no character came of show as U+FFFD."""
        whole = self._tokenizer.decode(self._ids)
        return whole[len(self._told) :] if whole.startswith(self._told) else ""


def tokenizer(folder: Path | None, file: Path | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint's folder, or of `file` instead; one of the two is not None.

    A text begins with bos_token_id of config.json if the folder's tokenizer_config.json says add_bos_token. ValueError
    as Tokenizer, or a file of these is broken.
    """
    if folder is None:
        return Tokenizer(file)
    settings = folder / "tokenizer_config.json"
    bos = None
    if settings.exists() and read_json(settings).get("add_bos_token") is True:
        bos = read_json(folder / "config.json").get("bos_token_id")
        if type(bos) is not int or bos < 0:
            raise CheckpointError(folder / "config.json", [f"bos_token_id must be a token, got {bos!r}"])
    return Tokenizer(file or folder / "tokenizer.json", bos)


def chat(folder: Path, said: str) -> str:
    """Return the text of a conversation in which a user says this, up to where the answer begins.

    The template is a checkpoint's chat_template.jinja, or chat_template of its tokenizer_config.json. ValueError: it
    has none, or one that fails.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    known = read_json(settings) if settings.exists() else {}
    template = file.read_text() if file.exists() else known.get("chat_template")
    if not isinstance(template, str):
        raise ValueError(
            f"--chat: {folder} has no chat template: give the conversation as its model expects it, as --text"
        )
    # A special token is a text, or an object that holds it.
    special = {name: known.get(name) for name in ("bos_token", "eos_token")}
    special = {name: one.get("content") if isinstance(one, dict) else one for name, one in special.items()}
    try:
        made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
        messages = [{"role": "user", "content": said}]
        return made.render(messages=messages, add_generation_prompt=True, **special)
    except TemplateError as error:
        raise ValueError(f"--chat: the chat template of {folder} fails: {error}") from error


def end_tokens(folder: Path, vocab: int) -> frozenset[int]:
    """Return the tokens that end a text: eos_token_id of generation_config.json, or else of config.json; none if
    neither has it.

    CheckpointError: it is not a token or a list of tokens below `vocab`.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = read_json(file).get("eos_token_id") if file.exists() else None
        if found is None:
            continue
        listed = found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < vocab for token in listed):
            raise CheckpointError(file, [f"eos_token_id must be tokens below {vocab}, one or a list, got {found!r}"])
        return frozenset(listed)
    return frozenset()
