"""`Printer`: tokens on standard output as they come, as text or as ids."""

from collections.abc import Sequence

from problems.dsv4_forward.generate.decoding import Told
from problems.dsv4_forward.generate.text import Tokenizer

STOP = "stop text"  # why a prompt gets no more tokens


class Printer:
    """Prints the tokens of the first prompt that is not done as they come, and keeps those of later ones until then.

    Of several prompts each is printed behind a line with its number. Text is on separate lines, ids have commas.
    """

    def __init__(self, count: int, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        """count: of prompts; tokenizer: None to print ids; stops: texts that end a prompt, and are not printed."""
        self._count, self._shown, self._stops = count, 0, stops
        self._held = [""] * count  # what may be the begin of a stop
        self._pieces = [tokenizer.pieces() for _ in range(count)] if tokenizer else []
        self._waiting = [""] * count
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._head()

    def take(self, told: Told) -> str:
        """Print the token, or keep it. Return why it is the prompt's last one, "" if it is not."""
        text, reason = self._held[told.prompt] + self._shape(told), told.reason
        if places := [text.index(stop) for stop in self._stops if stop in text]:
            text, reason = text[: min(places)], STOP
        begins = (len(text) - n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) if reason else min(begins, default=len(text))
        self._waiting[told.prompt] += text[:end]
        self._held[told.prompt] = text[end:]
        if reason:
            self._done.add(told.prompt)
        self._flush()
        while self._shown in self._done:
            print(flush=True)
            self._shown += 1
            if self._shown < self._count:
                self._head()
                self._flush()
        return reason

    def _shape(self, told: Told) -> str:
        if self._pieces:
            piece = "" if told.token is None else self._pieces[told.prompt].add(told.token)
            return piece + (self._pieces[told.prompt].end() if told.reason else "")
        if told.token is None:
            return ""
        comma = "," if told.prompt in self._begun else ""
        self._begun.add(told.prompt)
        return f"{comma}{told.token}"

    def _flush(self) -> None:
        if self._shown < self._count and self._waiting[self._shown]:
            print(self._waiting[self._shown], end="", flush=True)
            self._waiting[self._shown] = ""

    def _head(self) -> None:
        if self._count > 1:
            print(f"[{self._shown + 1} of {self._count}]", flush=True)
