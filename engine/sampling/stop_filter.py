"""Stop filter: detokenizes sampled ids and buffers text that may become a stop string."""

from __future__ import annotations

from logitless.models.tokenizer import StreamDecoder


class StopFilter:
    """Text of one generation.

    The results of `push` and `finish`, concatenated, are the answer's text. The text has whole
    characters only, no stop string unless `keep_stop`, and ends before a line with too little
    indentation (`n_indent`). A stop string counts where it ends after the first `min_tokens`
    tokens."""

    __slots__ = ("_buffer", "_detokenizer", "_indent", "_keep_stop", "_n_indent", "_n_left", "_plain", "_stop", "ended")

    def __init__(
        self,
        pieces: StreamDecoder,
        stop: tuple[str, ...] = (),
        n_indent: int = 0,
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = pieces
        self._stop = tuple(text for text in stop if text)
        self._keep_stop = keep_stop
        self._n_left = min_tokens  # tokens whose text ends at no stop string
        self._n_indent = n_indent
        self._plain = not self._stop and n_indent <= 0
        self._buffer = ""  # buffered text that may become a stop string
        self._indent = -1  # blanks at the start of this line so far; -1: not at the start of one
        self.ended = False  # a stop string matched, or a line had too little indentation

    def push(self, id: int) -> tuple[str, str | None]:
        """Detokenize a token; returns (text to send now, stop string that matched or None)."""
        text = self._detokenizer.push(id)
        if self._plain or self.ended:
            return text, None
        early, self._n_left = self._n_left > 0, self._n_left - 1
        return self._filter(text, early) if text else ("", None)

    def finish(self) -> str:
        """Return the buffered text at an end without a stop string."""
        if self.ended:
            return ""
        text, _ = self._filter(self._detokenizer.flush(), self._n_left > 0)
        if not self.ended:
            text += self._indented(self._buffer)
        self.ended = True
        return text

    def _filter(self, text: str, early: bool) -> tuple[str, str | None]:
        n_held, text = len(self._buffer), self._buffer + text
        stop_string: str | None = None
        end = len(text)
        for stop in () if early else self._stop:  # the earliest wins, then the first listed
            at = text.find(stop, max(0, n_held + 1 - len(stop)), end + len(stop) - 1)
            if at >= 0 and (stop_string is None or at < end):
                stop_string, end = stop, at
        if stop_string is None:
            end -= max((_overlap(text, stop) for stop in self._stop), default=0)
        elif self._keep_stop:
            end += len(stop_string)
        self._buffer = text[end:]
        text_out = self._indented(text[:end])
        if self.ended:
            return text_out, None
        self.ended = stop_string is not None
        return text_out, stop_string

    def _indented(self, text: str) -> str:
        """Text up to the first line, after the first one, that begins with fewer than n_indent blanks."""
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
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
