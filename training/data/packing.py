"""Packing: fixed-length samples of tokens with labels, and the weight of each label."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from logitless.models.errors import shown
from logitless.training.config import TrainingConfig
from logitless.training.data.run_media import PlacedMedia, TokenMedia
from logitless.training.data.tokenize_rows import I32, Example
from logitless.training.errors import TrainingError

RUN_TOKENS = 128  # tokens of a device run, at least one window: a server's requests wait for it
SPREAD = 1.25  # tokens of a window for a whole batch, times those of an average one
MOST_NAMES = 8  # of fields in a line
E = TypeVar("E")  # an example: one token row, or several


@dataclass(frozen=True)
class Sample:
    """T tokens of one or several sequences, which do not see each other. `starts`: where each
    begins; `rows`: the number of each in its dataset, −1 for padding."""

    tokens: I32  # (T,)
    labels: I32  # (T,): the token after each
    weights: npt.NDArray[np.float32]  # (T,): factor of the label's loss: 1 where it counts, else 0
    starts: tuple[int, ...] = (0,)
    rows: tuple[int, ...] = (-1,)
    media: tuple[PlacedMedia, ...] = ()

    def rows_of_tokens(self) -> npt.NDArray[np.int64]:
        """(T,): the number of the sequence that each token is of."""
        return np.repeat(np.array(self.rows, np.int64), np.diff([*self.starts, len(self.tokens)]))


class Dataset(Protocol):
    """Samples by index. `sample(i, rng)` may draw from rng (random offsets); equal draws give equal samples."""

    n_tokens: int  # T

    def __len__(self) -> int: ...

    def sample(self, i: int, rng: np.random.Generator) -> Sample: ...

    @property
    def begins(self) -> I32: ...

    @property
    def sizes(self) -> I32: ...

    @property
    def ends(self) -> I32:
        """Ends of the samples' tokens; samples that end before another begins share no tokens."""
        ...


class StridedSamples:
    """Samples of T tokens of one long text, one every `stride`; a label is the next token."""

    def __init__(self, tokens: I32, n_tokens: int, stride: int = 0, name: str = "the text") -> None:
        stride = stride or max(1, n_tokens // 2)
        if len(tokens) < n_tokens + 1:
            raise TrainingError(
                f"{name}: has {len(tokens)} tokens, fewer than the {n_tokens + 1} that one sample of {n_tokens} needs"
            )
        self.tokens, self.n_tokens = tokens, n_tokens
        self.begins = np.arange(0, len(tokens) - n_tokens, stride, dtype=np.int32)
        self.sizes = np.full(len(self.begins), n_tokens, np.int32)

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def ends(self) -> I32:
        return self.begins + self.sizes

    def sample(self, i: int, rng: np.random.Generator) -> Sample:
        a, n = int(self.begins[i]), self.n_tokens
        return Sample(self.tokens[a : a + n], self.tokens[a + 1 : a + n + 1], np.ones(n, np.float32))


@dataclass
class Beyond:
    """Examples that are longer than the context, and their tokens beyond it."""

    n_examples: int = 0  # of this kind, short ones among them
    n_cut: int = 0
    n_longest: int = 0  # tokens
    n_tokens: int = 0
    n_media_tokens: int = 0

    def line(self, kind: str, n_context: int, fate: str) -> str:
        media = f", {self.n_media_tokens} of them of images," if self.n_media_tokens else ""
        return (
            f"{self.n_cut} of {self.n_examples} {kind} are longer than the context of {n_context} tokens "
            f"(the longest has {self.n_longest}): {self.n_tokens} tokens beyond it{media} {fate}"
        )


class _Pieces(ABC, Generic[E]):
    """Tokenized examples, in pieces of at most T tokens and a label; one with images has one piece.

    Memory: five bytes a token, of rows with images up to 24 more; an example is kept only until its
    tokens are stored."""

    _BEYOND = "do not see the beginning"  # the tokens beyond the context
    alignment = 1  # tokens: sequences of a window begin at multiples of it

    def __init__(self, examples: Iterable[E], n_tokens: int, name: str) -> None:
        self.n_tokens = n_tokens
        tokens, learn = array("i"), bytearray()  # of all pieces
        bounds, rows = array("q", [0]), array("q", [0])  # start of each piece; first piece of each example
        self._media: dict[int, TokenMedia] = {}  # of pieces
        self.n_examples = self.n_dropped = 0
        self.beyond, self.beyond_media = Beyond(), Beyond()  # of texts alone, of examples with images
        self.unused: dict[str, None] = {}  # names of fields, as an ordered set
        self.n_omitting, self.omitted = 0, ""  # examples without the generation prompt's end; the first one's
        for example in examples:
            self.n_examples += 1
            own_rows = self._rows_of(example)
            beyond = self.beyond_media if any(row.media for row in own_rows) else self.beyond
            longest = max(len(row.tokens) for row in own_rows)
            beyond.n_examples += 1
            if omitted := next((row.omitted for row in own_rows if row.omitted), ""):
                self.n_omitting += 1
                self.omitted = self.omitted or omitted
            self.unused |= dict.fromkeys(name for row in own_rows for name in row.unused)
            beyond.n_cut += longest > n_tokens + 1
            beyond.n_longest = max(beyond.n_longest, longest)
            for piece in self._cut(example, beyond):
                if piece.media is not None:
                    self._media[len(bounds) - 1] = piece.media.cut(len(piece.tokens) - 1)
                tokens.frombytes(piece.tokens.tobytes())
                learn += piece.learn.tobytes()
                bounds.append(len(tokens))
            if len(bounds) - 1 > rows[-1]:
                rows.append(len(bounds) - 1)
            else:
                self.n_dropped += 1
        if len(rows) == 1:
            raise TrainingError(f"{name}: has no token to learn")
        self._tokens, self._learn = np.frombuffer(tokens, np.int32), np.frombuffer(learn, np.bool_)
        self._bounds, self._rows = np.frombuffer(bounds, np.int64), np.frombuffer(rows, np.int64)

    @abstractmethod
    def _rows_of(self, example: E) -> tuple[Example, ...]:
        """The token rows of an example."""

    @abstractmethod
    def _cut(self, example: E, beyond: Beyond) -> Iterator[Example]:
        """Pieces of an example with tokens to learn; none: it is dropped. Counts tokens `beyond` the context."""

    def _beginning(self, row: Example) -> Example:
        """The part of a row that a window has room for, with whole images alone."""
        n = self.n_tokens + 1
        return row.cut(n if row.media is None else row.media.end(self.n_tokens))

    @property
    def losses(self) -> list[str]:
        """Lines about the examples that are not learned as they are or are asked for: cut ones, dropped
        ones, and those whose prompt ends otherwise than a request's."""
        lines = []
        if self.beyond.n_cut:
            lines.append(self.beyond.line("examples", self.n_tokens, self._BEYOND))
        if self.beyond_media.n_cut:
            lines.append(self.beyond_media.line("examples with images", self.n_tokens, "are left out"))
        if self.n_dropped:
            lines.append(f"{self.n_dropped} of {self.n_examples} examples have no token to learn and are dropped")
        if self.unused:
            names = ", ".join(shown(name) for name in [*self.unused][:MOST_NAMES])
            more = f" and {len(self.unused) - MOST_NAMES} more" if len(self.unused) > MOST_NAMES else ""
            lines.append(f"fields of rows that nothing is made of: {names}{more}")
        if self.n_omitting:
            lines.append(
                f"{self.n_omitting} of {self.n_examples} examples are learned without {shown(self.omitted)}, which "
                "the chat template's generation prompt has before an answer: requests will have it"
            )
        return lines

    @property
    def sizes(self) -> I32:
        return (np.diff(self._bounds[self._rows]) - np.diff(self._rows)).astype(np.int32)

    @property
    def begins(self) -> I32:
        sizes = self.sizes
        return np.cumsum(sizes, dtype=np.int32) - sizes

    @property
    def ends(self) -> I32:
        return self.begins + self.sizes

    def joined(self, other: Self) -> Self:
        """These samples, then the other dataset's."""
        both = copy(self)
        both._tokens = np.concatenate([self._tokens, other._tokens])
        both._learn = np.concatenate([self._learn, other._learn])
        both._bounds = np.concatenate([self._bounds, other._bounds[1:] + self._bounds[-1]])
        both._rows = np.concatenate([self._rows, other._rows[1:] + self._rows[-1]])
        n = len(self._bounds) - 1
        both._media = self._media | {n + i: media for i, media in other._media.items()}
        return both

    def __len__(self) -> int:
        return len(self._rows) - 1

    @property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each piece without its last, which is a label alone."""
        return np.diff(self._bounds) - 1

    def _aligned(self, n: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-n // self.alignment) * self.alignment

    def _window(self, pieces: Iterable[int]) -> Sample:
        """These pieces one after another. They do not see each other, so each has the loss that it has alone."""
        tokens, labels = np.zeros(self.n_tokens, np.int32), np.zeros(self.n_tokens, np.int32)
        weights = np.zeros(self.n_tokens, np.float32)
        starts: list[int] = []
        rows: list[int] = []
        placed: list[PlacedMedia] = []
        at = 0
        for i in pieces:
            a, b = int(self._bounds[i]), int(self._bounds[i + 1])
            n = b - a - 1
            tokens[at : at + n], labels[at : at + n] = self._tokens[a : b - 1], self._tokens[a + 1 : b]
            weights[at : at + n] = self._learn[a + 1 : b]
            starts.append(at)
            rows.append(i)
            if i in self._media:
                placed.append((at, self._media[i]))
            at += -(-n // self.alignment) * self.alignment
        if at < self.n_tokens:
            starts.append(at)  # padding is its own sequence
            rows.append(-1)
        return Sample(tokens, labels, weights, tuple(starts), tuple(rows), tuple(placed))


class _Cut(_Pieces[Example]):
    """Examples of one row, cut into pieces where they are longer than T tokens; of one with images
    there is the beginning alone."""

    def _rows_of(self, example: Example) -> tuple[Example, ...]:
        return (example,)

    def _cut(self, example: Example, beyond: Beyond) -> Iterator[Example]:
        n = self.n_tokens
        if example.media is not None:
            pieces = [self._beginning(example)]
            _count(beyond, example, pieces[0])
        else:
            beyond.n_tokens += max(0, len(example.tokens) - (n + 1))
            starts = range(0, max(1, len(example.tokens) - 1), n)
            pieces = [Example(example.tokens[a : a + n + 1], example.learn[a : a + n + 1]) for a in starts]
        yield from (piece for piece in pieces if len(piece.tokens) > 1 and piece.learn[1:].any())


class PackedExamples(_Cut):
    """Samples of T tokens, with several examples where they fit, in their order."""

    def __init__(
        self, examples: Iterable[Example], n_tokens: int, *, pack: bool = True, name: str = "the data"
    ) -> None:
        super().__init__(examples, n_tokens, name)
        rows, room = array("q"), 0
        for i, n in enumerate(self._lengths.tolist()):
            if n > room or not pack:
                rows.append(i)
                room = n_tokens
            room -= n
        rows.append(len(self._bounds) - 1)
        self._rows = np.frombuffer(rows, np.int64)

    def sample(self, i: int, rng: np.random.Generator) -> Sample:
        return self._window(range(int(self._rows[i]), int(self._rows[i + 1])))


class ByExample(_Pieces[E]):
    """Examples by index, which are packed into windows of T tokens batch by batch."""

    def __init__(self, examples: Iterable[E], n_tokens: int, *, name: str = "the data") -> None:
        super().__init__(examples, n_tokens, name)

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return int(self._lengths.max())

    def in_windows(self, n_tokens: int) -> Self:
        """The same pieces for windows of another length, at least the longest piece's."""
        other = copy(self)
        other.n_tokens = n_tokens
        return other

    def pack(self, indices: I32) -> list[list[int]]:
        """Pieces of each window for a batch of examples: the longest piece first, each into the
        fullest window that has room for it."""
        pieces = [i for k in indices.tolist() for i in range(int(self._rows[k]), int(self._rows[k + 1]))]
        lengths = self._aligned(self._lengths)
        windows: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # (free tokens, window), sorted
        for i in sorted(pieces, key=lambda i: -int(lengths[i])):
            n = int(lengths[i])
            at = bisect_left(rooms, (n, -1))
            room, w = rooms.pop(at) if at < len(rooms) else (self.n_tokens, len(windows))
            if w == len(windows):
                windows.append([])
            windows[w].append(i)
            if room > n:
                insort(rooms, (room - n, w))
        return windows

    def window(self, pieces: Iterable[int]) -> Sample:
        """One window of `pack`."""
        return self._window(pieces)

    def most_windows(self, n: int) -> int:
        """A bound: no batch of n examples takes more windows."""
        sizes = np.sort(self.sizes)[::-1][:n]
        most = int(sizes.sum(dtype=np.int64))
        pieces = int(np.sort(np.diff(self._rows))[::-1][:n].sum())
        return 1 if most <= self.n_tokens else min(pieces, 2 * most // self.n_tokens + 1)

    def lay(self, indices: I32, batch_size: int) -> tuple[Self, int, int]:
        """(these examples in windows for batches of `batch_size` of `indices`, windows of a device
        run, device runs of a step at most).

        A batch of few tokens gets shorter windows than the context, because padding costs as much
        as tokens do."""
        sizes = sorted(self.sizes[indices].tolist(), reverse=True)
        typical = math.ceil(SPREAD * batch_size * sum(sizes) / len(sizes))
        most = min(sum(sizes[:batch_size]), typical)
        laid = self.in_windows(min(self.n_tokens, -(-max(self.longest, most) // 16) * 16))
        n_windows = laid.most_windows(batch_size)
        n_batch = min(n_windows, max(1, RUN_TOKENS // laid.n_tokens))
        return laid, n_batch, math.ceil(n_windows / n_batch)


class Examples(_Cut, ByExample[Example]):
    """Examples of one row."""


class Groups(ByExample[tuple[Example, ...]]):
    """Examples of several token rows, which are compared: a row longer than T tokens loses its end,
    and an example with a row that has nothing to learn is dropped."""

    _BEYOND = "are left out"

    def __init__(
        self, groups: Iterable[tuple[Example, ...]], n_tokens: int, *, name: str = "the data", alignment: int = 1
    ) -> None:
        self._values = array("f")
        self.alignment = alignment
        super().__init__(groups, n_tokens, name=name)
        self.values = np.array(self._values, np.float64)  # (rows,): how each was judged

    def _rows_of(self, example: tuple[Example, ...]) -> tuple[Example, ...]:
        return example

    def _cut(self, example: tuple[Example, ...], beyond: Beyond) -> Iterator[Example]:
        pieces = [self._beginning(row) for row in example]
        if not all(piece.learn[1:].any() for piece in pieces):
            return
        for row, piece in zip(example, pieces, strict=True):
            _count(beyond, row, piece)
            self._values.append(row.value)
            yield piece

    def joined(self, other: Self) -> Self:
        both = super().joined(other)
        both.values = np.concatenate([self.values, other.values])
        return both


def _count(beyond: Beyond, row: Example, piece: Example) -> None:
    """Count a row's tokens that its piece has not."""
    n = len(piece.tokens)
    beyond.n_tokens += len(row.tokens) - n
    if row.media is not None:
        beyond.n_media_tokens += int((row.media.rows[n:] != 0).sum())


class TextSamples:
    """Samples of a text, one of T tokens each: BOS, the sample, then EOS padding or the samples after it."""

    def __init__(
        self, tokens: I32, begins: Sequence[int], sizes: Sequence[int], n_tokens: int, bos: int, eos: int,
        options: TrainingConfig | None = None,
    ) -> None:  # fmt: skip
        if not len(begins):
            raise TrainingError("the text has no sample")
        self.tokens, self.n_tokens, self.bos, self.eos = tokens, n_tokens, bos, eos
        self.begins, self.sizes = np.array(begins, np.int32), np.array(sizes, np.int32)
        self.options = options or TrainingConfig()

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def ends(self) -> I32:
        return self.begins + self.sizes + (self.n_tokens if self.options.fill_with_next_samples else 0)

    def sample(self, i: int, rng: np.random.Generator) -> Sample:
        o, n = self.options, self.n_tokens
        labels = np.empty(n, np.int32)
        offset = int(rng.integers(0, max(1, int(self.sizes[i])))) if o.sample_random_offsets else 0
        eos_due, bos_due = o.separate_with_eos, o.separate_with_bos
        for k in range(n):
            token = self.eos
            if offset >= self.sizes[i] and o.fill_with_next_samples:
                if eos_due:
                    eos_due = False
                elif bos_due:
                    bos_due, token = False, self.bos
                else:
                    eos_due, bos_due = o.separate_with_eos, o.separate_with_bos
                    offset, i = 0, (i + 1) % len(self)
            if offset < self.sizes[i]:
                token = int(self.tokens[self.begins[i] + offset])
                offset += 1
            labels[k] = token
        tokens = np.concatenate([[self.bos], labels[:-1]]).astype(np.int32)
        return Sample(tokens, labels, np.ones(n, np.float32))


def find_samples(
    text: str, start: str, n_tokens: int, *, include_start: bool = False, overlapping: bool = False
) -> list[tuple[int, int]]:
    """(begin, end) in characters of every sample: the text after each occurrence of `start`.

    A sample ends where the next begins; `overlapping` ones have the length of the longest, or T. A
    text without the pattern is one sample."""
    samples = []
    at = text.find(start)
    while at >= 0:
        samples.append(at)
        at = text.find(start, at + len(start))
    if not samples:
        return [(0, len(text))]
    begins = [at if include_start else at + len(start) for at in samples]
    ends = [*samples[1:], len(text)]
    if overlapping:
        longest = max(n_tokens, *(end - begin for begin, end in zip(begins, ends, strict=True)))
        ends = [min(len(text), begin + longest) for begin in begins]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if end > begin]
