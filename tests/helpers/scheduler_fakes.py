"""Scheduler test doubles: a device that checks every cell, a vocabulary, and an oracle of outputs."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from logitless.engine.batch import BLOCK_SIZE, DeviceFailed, StepFailed, StepResult, UBatch
from logitless.engine.kv_cache.block_pool import window_pool_size
from logitless.engine.kv_cache.slot_files import CacheKind
from logitless.engine.media.media_encoder import MediaEncoder
from logitless.engine.requests import CompletionRequest, Event, Failed, Finished, Token
from logitless.engine.runner.hidden_rows import HiddenRows
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.settings import NgramSizes, SpeculationSettings
from logitless.engine.speculation.speculator import Speculator
from logitless.graph.execution.expert_cache import CacheMemory
from logitless.models.media.prompt_media import Tile
from tests.helpers.scheduler_checks import chain, check_all

PIECES = [b"</s>", *(bytes([c]) for c in b"abcdefgh \n"), b"ab", b"cd\n", "é".encode()[:1], "é".encode()[1:], b"\n  x"]
EOG = 0
N_VOCAB = len(PIECES)
POISON = 99  # a token that the device cannot compute
SHORT = NgramSizes(n=1, m=5)  # n-grams that occur in these texts
SPECULATION = SpeculationSettings(
    simple=SHORT, map_k=SHORT, map_k4v=NgramSizes(n=2, m=1), mod_n_match=2, mod_n_min=1, mod_n_max=9
)


class FakeVocab:
    eog_ids = frozenset({EOG})
    suppressed_ids: tuple[int, ...] = ()
    n_vocab = N_VOCAB
    add_bos = False

    def piece(self, id: int, *, special: bool = True) -> bytes:
        return b"" if id == EOG and not special else PIECES[id]


def next_id(content: int) -> int:
    """The next token; an end token about once in sixty."""
    mixed = zlib.crc32(b"next", content)
    return EOG if mixed % 61 == 0 else 1 + (mixed >> 8) % (N_VOCAB - 1)


class FakeSampler:
    """RowSampler whose packed word is the token id."""

    stateful = False
    problem = ""
    ended = False
    ready = True
    n_candidates = 0
    on_host = False
    left = None

    def __init__(self, params: SamplingParams, n_ctx: int) -> None:
        self.seed, self.rng_used = params.seed, params.rng_used
        self.n_ctx = n_ctx
        self.history: list[int] = []

    def begin(self, prompt: list[int]) -> None:
        assert not self.history
        self.history += prompt

    def feeds(self) -> Any:
        return self

    def draft_feeds(self, draft: list[int]) -> list[Any]:
        return [self] * (1 + len(draft))

    def feeds_after(self, draft: list[int], n_dist: int, n_xtc: int) -> Any:
        return self

    ids = ()  # per-row outputs of a draft

    def accept(self, word: int) -> int:
        self.history.append(word)
        return word

    def choose(self, word: int, n_left: int, ids: list[int], p: Any) -> int:
        raise AssertionError("no candidates are wanted")

    def force(self, id: int) -> None:
        self.history.append(id)


Cell = tuple[int, int] | None  # position, content


class FakePages:
    """KV pages of such cells; for a sliding window, or full attention (0)."""

    nbytes = BLOCK_SIZE * 16

    def __init__(self, n: int, window: int = 0) -> None:
        self.n, self.window = n, window
        self.cells: list[Cell] = [None] * (n * BLOCK_SIZE)
        self.tables: dict[int, list[int]] = {}
        self.n_read = 0

    def copy(self, copies: list[tuple[int, int]]) -> None:
        assert not {to for _, to in copies} & {source for source, _ in copies}
        assert len({to for _, to in copies}) == len(copies)
        for source, to in copies:
            self.cells[to * BLOCK_SIZE : (to + 1) * BLOCK_SIZE] = self.cells[
                source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE
            ]

    def lose(self) -> None:
        self.cells, self.tables = [None] * len(self.cells), {}

    def read(self, block: int) -> Any:
        self.n_read += 1
        cells = self.cells[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
        return np.array([cell or (-1, -1) for cell in cells], np.int64).reshape(-1).view(np.uint8)

    def write(self, block: int, data: Any) -> None:
        cells = data.view(np.int64).reshape(BLOCK_SIZE, 2).tolist()
        self.cells[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [(p, c) if p >= 0 else None for p, c in cells]

    def content(self, slot: int, pos: int) -> int:
        if pos < 0:
            return 0
        cell = self.cells[self.tables[slot][pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE]
        assert cell is not None
        assert cell[0] == pos, f"slot {slot} sees position {cell[0]} at {pos}"
        return cell[1]


class FakeStates:
    """Recurrent state rows: number of tokens, and their content."""

    nbytes = 100

    def __init__(self, n: int) -> None:
        self.n = n
        self.rows: list[tuple[int, int] | None] = [(0, 0)] + [None] * (n - 1)

    def lose(self) -> None:
        self.rows[1:] = [None] * (self.n - 1)

    def read(self, row: int, into: Any = None) -> Any:
        state = self.rows[row]
        assert into is None
        assert state is not None
        return np.resize(np.array(state, np.int64).view(np.uint8), self.nbytes)

    def write(self, row: int, data: Any) -> None:
        assert row > 0
        self.rows[row] = tuple(data[:16].view(np.int64).tolist())


class FakeEngine:
    """Device whose KV cells hold (position, content); checks that a sequence sees its own history."""

    pages_kind = FakePages

    def __init__(self, n_blocks: int, states: FakeStates | None = None, window_kv: FakePages | None = None) -> None:
        self.full_kv, self.states, self.window_kv = self.pages_kind(n_blocks), states, window_kv
        self.batches: list[UBatch] = []
        self.broken: AssertionError | None = None
        self.fails: Callable[[UBatch], bool] = lambda batch: POISON in batch.tokens
        self.lost = False  # the next step loses the device and its memory
        self.rerouted: Mapping[str, str] = {}
        self.expert_memory, self.exceeds_memory = CacheMemory(0), False
        self.hidden: HiddenRows | None = None
        self.media: MediaEncoder | None = None
        self.part_sizes: Mapping[int, float] = {}
        self.part_seconds = 1.0  # predicted seconds of each part

    def step(self, batch: UBatch) -> StepResult:
        try:
            return self._step(batch)
        except AssertionError as error:  # the scheduler would take it for a device error
            self.broken = error
            raise

    def encode_media(self, tiles: list[Tile]) -> Iterator[float]:
        assert self.media is not None
        yield from self.media.encode(tiles)

    def run_in_parts(self, batch: UBatch) -> Iterator[float]:
        try:
            yield from self._parts(batch)
        except AssertionError as error:
            self.broken = error
            raise

    def _parts(self, batch: UBatch) -> Iterator[float]:
        """Parts of five tokens."""
        assert len(set(batch.slot)) == 1
        assert not batch.out
        assert len(batch.tokens) <= max(self.part_sizes)
        self._enter(batch)
        self.batches.append(batch)
        contents: list[int] = []
        for first in range(0, len(batch.tokens), 5):
            yield self.part_seconds
            contents += self._fill(batch, range(first, min(first + 5, len(batch.tokens))))
        self._leave(batch, contents)

    def _step(self, batch: UBatch) -> StepResult:
        self._enter(batch)
        self.batches.append(batch)
        contents = self._fill(batch, range(len(batch.tokens)))
        self._leave(batch, contents)
        return self._result(batch, contents)

    def _enter(self, batch: UBatch) -> None:
        n = len(batch.tokens)
        assert 0 < n == len(batch.pos) == len(batch.slot) == len(batch.slot_mapping) == len(set(batch.slot_mapping))
        assert len(batch.out) == len(batch.rows) == len(batch.targets)
        full_kv, window_kv = self.full_kv, self.window_kv
        full_kv.tables.update({slot: list(table) for slot, table in batch.tables.items()})
        full_kv.copy(batch.copies)
        if window_kv is not None:
            window_kv.tables.update({slot: list(table) for slot, table in batch.window_tables.items()})
            window_kv.copy(batch.window_copies)
            assert n == len(set(batch.window_slot_mapping))
        else:
            assert not batch.window_slot_mapping
            assert not batch.window_tables
            assert not batch.window_copies
        if self.lost:
            self.lost = False
            full_kv.lose()
            if window_kv is not None:
                window_kv.lose()
            if self.states is not None:
                self.states.lose()
            raise DeviceFailed("it fell off the bus")
        if self.fails(batch):
            for cell in batch.slot_mapping:  # a failed step may leave anything where it would write
                full_kv.cells[cell] = (-1, 0)
            for cell in batch.window_slot_mapping:
                window_kv.cells[cell] = (-1, 0)  # type: ignore[union-attr]
            for row in batch.end:
                if row >= 0:
                    self.states.rows[row] = (-1, 0)  # type: ignore[union-attr]
            raise StepFailed("out of luck")

    def _fill(self, batch: UBatch, tokens: range) -> list[int]:
        """Write the cells of some of the batch's tokens."""
        full_kv, contents = self.full_kv, []
        for i in tokens:
            token, pos, slot, cell = batch.tokens[i], batch.pos[i], batch.slot[i], batch.slot_mapping[i]
            assert cell == full_kv.tables[slot][pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE
            full_kv.cells[cell] = pos, chain(full_kv.content(slot, pos - 1), token)
            contents.append(full_kv.content(slot, pos))
        return contents

    def _leave(self, batch: UBatch, contents: list[int]) -> None:
        if self.window_kv is not None:
            self._look_around(batch, self.window_kv)
        if self.states is not None:
            self._remember(batch, contents, self.states.rows)

    def _result(self, batch: UBatch, contents: list[int]) -> StepResult:
        ids = np.array([next_id(contents[i]) for i in batch.out], np.uint32)
        targets = [id if target < 0 else target for id, target in zip(ids.tolist(), batch.targets, strict=True)]
        logprobs = top_ids = probs = None
        if batch.n_top:
            row = np.arange(batch.n_top, dtype=np.float32)
            logprobs = np.array([-np.float32(target) - row for target in targets], np.float32)
            top_ids = np.tile(np.arange(1, batch.n_top, dtype=np.int32), (len(ids), 1))
        if batch.n_probs:
            ranks = np.tile(np.arange(batch.n_probs, dtype=np.int32), (len(ids), 1))
            kept = np.where(ranks < 2, np.float32(0.5), np.float32(0))
            probs = np.full(len(ids), 2, np.int32), np.full(len(ids), 0.5, np.float32), ranks, kept
        return StepResult(ids, logprobs, top_ids, probs, bytes_read=4 * len(ids))

    def _look_around(self, batch: UBatch, window_kv: FakePages) -> None:
        """Sliding-window cells agree with the full ones as far as the window reaches."""
        for pos, slot, cell in zip(batch.pos, batch.slot, batch.window_slot_mapping, strict=True):
            assert cell == window_kv.tables[slot][pos // BLOCK_SIZE] * BLOCK_SIZE + pos % BLOCK_SIZE
            window_kv.cells[cell] = pos, self.full_kv.content(slot, pos)
        for pos, slot in zip(batch.pos, batch.slot, strict=True):
            for p in range(max(0, pos - window_kv.window + 1), pos + 1):
                assert window_kv.content(slot, p) == self.full_kv.content(slot, p)

    def _remember(self, batch: UBatch, contents: list[int], rows: list[tuple[int, int] | None]) -> None:
        """State rows agree with the cells."""
        n, read = len(batch.tokens), {row for row in batch.begin if row >= 0}
        written = [row for row in batch.end if row >= 0]
        assert len(batch.begin) == len(batch.end) == n
        assert len(set(written)) == len(written)
        assert not read & set(written)
        assert 0 not in written
        after: tuple[int, int] | None = None
        for i, (begin, end) in enumerate(zip(batch.begin, batch.end, strict=True)):
            before = rows[begin] if begin >= 0 else after
            assert before is not None
            assert before[0] == batch.pos[i], f"a state of {before[0]} tokens at {batch.pos[i]}"
            assert begin >= 0 or batch.slot[i] == batch.slot[i - 1]
            after = before[0] + 1, chain(before[1], batch.tokens[i])
            assert after[1] == contents[i]
            if end >= 0:
                rows[end] = after

    moves_cells = True
    start_token = -1
    mrope = False

    def sampler_state(self, slot: int) -> tuple[float, ...]:
        raise AssertionError("no sampler has a state")

    @property
    def cache_kind(self) -> CacheKind:
        auxiliary = self.window_kv or self.states
        window = 0 if self.window_kv is None else self.window_kv.window
        return CacheKind(
            "fake", "f16", "f16", BLOCK_SIZE, BLOCK_SIZE * 16, 0 if auxiliary is None else auxiliary.nbytes, window
        )

    def move_cells(self, moves: list[tuple[int, int, int]]) -> None:
        """Move cells a few at a time: all are read before any is written. Moved content changes."""
        for start in range(0, len(moves), 5):
            part = [(self.full_kv.cells[source], to, turn) for source, to, turn in moves[start : start + 5]]
            for cell, to, turn in part:
                assert cell is not None
                p, content = cell
                self.full_kv.cells[to] = (p + turn, moved(content) if turn else content)


def prompt(n: int, salt: int = 0) -> list[int]:
    """n tokens that start differently for each salt."""
    return [1 + (i * i + 7 * salt + i // 3) % (N_VOCAB - 1) for i in range(n)]


class Answer:
    """Events of one request, assembled as a client does."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def tokens(self) -> list[Token]:
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events[-1:]
        assert not any(isinstance(event, Finished | Failed) for event in self.events[:-1])
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.finished.text

    def outcome(self) -> tuple[list[int], str, str, str, bool]:
        end = self.finished
        return self.ids, self.text, end.stop_type, end.stopping_word, end.truncated


def moved(content: int) -> int:
    """Content of a cell that was moved to another position."""
    return zlib.crc32(b"moved", content)


def oracle(request: CompletionRequest, n_ctx: int, *, shift: bool = False) -> tuple[list[int], str, str, str, bool]:
    """Output of a request alone, from the definition."""
    tokens = list(request.prompt)
    content = 0
    cells: list[int] = []
    truncated = False
    for token in tokens:
        content = chain(content, token)
        cells.append(content)
    ids: list[int] = []
    data = b""
    if request.n_predict == 0:
        return ids, "", "limit", "", False
    while True:
        id = next_id(content)
        ids.append(id)
        if id == EOG and not request.ignore_eos:
            return ids, data.decode("utf-8", "replace"), "eos", "", truncated
        data += PIECES[id] if id != EOG else b""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        found = [(text.find(stop), stop) for stop in request.stop if stop in text]
        if found:
            at, word = min(found, key=lambda pair: pair[0])
            return ids, text[:at], "word", word, truncated
        if len(cells) + 1 >= n_ctx and not shift:
            return ids, data.decode("utf-8", "replace"), "limit", "", True
        if len(ids) == request.n_predict:
            return ids, data.decode("utf-8", "replace"), "limit", "", truncated
        # context shift as in llama-server: keep n_keep, drop half of the rest
        if len(cells) + 1 >= n_ctx:
            keep = len(request.prompt) if request.n_keep < 0 else request.n_keep
            keep = max(0, min(keep, n_ctx - 4, len(cells) - 1))
            left = len(cells) - keep
            discard = max(1, min(request.n_discard or left // 2, left))
            cells = cells[:keep] + [moved(c) for c in cells[keep + discard :]]
            truncated = True
        content = chain(cells[-1] if cells else 0, id)
        cells.append(content)


def plain(prompt: tuple[int, ...], n: int) -> list[int]:
    """The n tokens after a prompt, for any drafts."""
    return oracle(CompletionRequest(prompt, n_predict=n, ignore_eos=True), 1024)[0]


class Bench:
    """A scheduler on the fakes, and what its clients received."""

    def __init__(
        self,
        *,
        n_slots: int = 4,
        n_ctx: int = 1024,
        n_states: int = 0,
        window: tuple[int, int] | None = None,
        engine: type[FakeEngine] = FakeEngine,
        **options: Any,
    ) -> None:
        """A bench. `window`: sliding window of some layers, and how many such windows the cache
        keeps.
        """
        self.time = 0.0
        window_kv = None
        if window is not None:
            window_kv = FakePages(
                window_pool_size(window[0], n_slots, options.get("n_ubatch", 512), window[1]), window[0]
            )
        self.engine = engine(0, FakeStates(n_states) if n_states else None, window_kv)
        self.scheduler = Scheduler(
            self.engine,
            FakeVocab(),  # type: ignore[arg-type]
            SchedulerConfig(n_slots=n_slots, n_ctx=n_ctx, **options),
            clock=self._clock,
            make_sampler=FakeSampler,
            speculator=Speculator(SPECULATION),
        )
        self.engine.full_kv.__init__(self.scheduler.cache.pool.n_blocks)  # type: ignore[misc]
        self.answers: dict[Sequence, Answer] = {}

    def _clock(self) -> float:
        self.time += 1 / 1024
        return self.time

    def submit(self, prompt: Iterable[int], client: str = "", **fields: Any) -> Sequence:
        seq = self.scheduler.submit(CompletionRequest(tuple(prompt), **fields), client)
        self.answers[seq] = Answer()
        return seq

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            for seq, event in self.scheduler.step():
                assert not any(isinstance(old, Finished | Failed) for old in self.answers[seq].events)
                self.answers[seq].events.append(event)
            if self.engine.broken is not None:
                raise self.engine.broken
            check_all(self.scheduler, self.engine)

    def drain(self, n_most: int = 5000) -> None:
        while not self.scheduler.idle:
            n_most -= 1
            assert n_most, "does not end"
            self.step()

    def run(self, prompt: Iterable[int], **fields: Any) -> Answer:
        seq = self.submit(prompt, **fields)
        self.drain()
        return self.answers[seq]


def asked(bench: Bench, tokens: list[int], n_predict: int = 3, **fields: Any) -> int:
    """Cached tokens of a prompt; checks the output."""
    seq = bench.submit(tokens, n_predict=n_predict, ignore_eos=True, **fields)
    bench.drain()
    answer = bench.answers[seq]
    assert answer.outcome() == oracle(seq.request, bench.scheduler.slots[0].n_ctx)
    return answer.finished.n_cached
