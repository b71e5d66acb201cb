"""`Printer`: tokens on standard output as they come, as text or as ids."""

from problems.dsv4_forward.generate.decoding import Told
from problems.dsv4_forward.generate.text import Tokenizer


class Printer:
    """Prints the tokens of the first prompt that is not done as they come, and keeps those of later ones until then.

    Of several prompts each is printed behind a line with its number. Text is on separate lines, ids have commas.
    """

    def __init__(self, count: int, tokenizer: Tokenizer | None) -> None:
        """count: of prompts; tokenizer: None to print ids."""
        self._count, self._shown = count, 0
        self._pieces = [tokenizer.pieces() for _ in range(count)] if tokenizer else []
        self._waiting = [""] * count
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._head()

    def take(self, told: Told) -> None:
        """Print the token, or keep it."""
        self._waiting[told.prompt] += self._shape(told)
        if told.reason:
            self._done.add(told.prompt)
        self._flush()
        while self._shown in self._done:
            print(flush=True)
            self._shown += 1
            if self._shown < self._count:
                self._head()
                self._flush()

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
