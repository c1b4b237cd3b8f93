"""From sampled ids to text that may be shown: whole characters, nothing of a stop text, no badly indented line."""

from __future__ import annotations

from typing import Protocol


class Pieces(Protocol):
    """Turns ids into text without splitting characters (logitless.models.tokenizer.StreamDecoder)."""

    def push(self, id: int, /) -> str: ...

    def flush(self) -> str: ...


class Decoder:
    """One generation's text. What `push` and `finish` return, put together, is the text of the answer."""

    __slots__ = ("_held", "_indent", "_n_indent", "_pieces", "_plain", "_stop", "ended")

    def __init__(self, pieces: Pieces, stop: tuple[str, ...] = (), n_indent: int = 0) -> None:
        self._pieces = pieces
        self._stop = tuple(text for text in stop if text)
        self._n_indent = n_indent
        self._plain = not self._stop and n_indent <= 0
        self._held = ""  # the beginning of what may become a stop text
        self._indent = -1  # blanks at the start of this line so far; -1: not at the start of one
        self.ended = False  # a stop text came, or a line with too little indentation

    def push(self, id: int) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop text that ends the generation here."""
        text = self._pieces.push(id)
        if self._plain or self.ended or not text:
            return text, None
        return self._filter(text)

    def finish(self) -> str:
        """What was held back, for an end that no stop text brought."""
        if self.ended:
            return ""
        text, _ = self._filter(self._pieces.flush())
        if not self.ended:
            text += self._indented(self._held)
        self.ended = True
        return text

    def _filter(self, text: str) -> tuple[str, str | None]:
        text = self._held + text
        found: str | None = None
        end = len(text)
        for stop in self._stop:  # the earliest wins, then the first listed
            at = text.find(stop, 0, end + len(stop) - 1)
            if at >= 0 and (found is None or at < end):
                found, end = stop, at
        if found is None:
            end -= max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[end:]
        shown = self._indented(text[:end])
        if self.ended:
            return shown, None
        self.ended = found is not None
        return shown, found

    def _indented(self, text: str) -> str:
        """The text up to the first line, after the first one, that begins with fewer than n_indent blanks."""
        if self._n_indent <= 0:
            return text
        for i, char in enumerate(text):
            if self._indent >= 0 and char in " \t":
                self._indent += 1
            elif 0 <= self._indent < self._n_indent:
                self.ended = True
                return text[:i]
            else:
                self._indent = 0 if char == "\n" else -1
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with; the whole stop does not count."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
