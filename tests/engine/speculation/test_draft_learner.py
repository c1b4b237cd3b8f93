"""A draft head that learns from its verifier (--spec-learn): acceptance, bits, files, preemption."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.loading.open_model import open_model
from logitless.engine.loading.options import ModelOptions, OptionConflict
from logitless.engine.requests import CompletionRequest, Token
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.speculation.draft_learner import N_BATCH, DraftLearner
from logitless.engine.speculation.draft_vocabulary import DraftVocabulary
from logitless.engine.speculation.head_file import CHECK_NBYTES, MAGIC
from logitless.engine.speculation.settings import SpeculationParams
from logitless.models.drafters.draft_head import PREFIX, TRAINING
from tests.helpers.architecture_specs import ENCODERS
from tests.helpers.paths import MODELS
from tests.helpers.reference_model import write

MODEL = MODELS / "stories260K.gguf"
LEARN, OFF = SpeculationParams(("draft-learn",)), SpeculationParams()


class Bench:
    """A model that learns; its learner runs when a test says so."""

    def __init__(self, *, adapts: bool = False, model: Path = MODEL) -> None:
        options = ModelOptions(spec_learn=True, spec_draft_adapt=adapts, ctx_size=512, parallel=3, device="cpu")
        self.loaded = open_model(model, options).load()
        assert self.loaded.learner is not None
        assert self.loaded.engine is not None
        self.learner: DraftLearner = self.loaded.learner
        self.engine, self.scheduler = self.loaded.engine, self.loaded.scheduler
        self.prompt = tuple(self.loaded.tokenizer.encode("Once upon a time there was a girl"))

    def run(self, speculation: SpeculationParams = LEARN, n: int = 100, seeds: tuple[int, ...] = (-1,), **more: Any):
        """Tokens of each seed (-1: greedy), and the share of draft tokens that were accepted."""
        stats = self.scheduler.stats
        before, seqs = (stats.draft_tokens, stats.draft_tokens_accepted), []
        for seed in seeds:
            sampling = SamplingParams(temperature=0.0 if seed < 0 else 0.9, seed=max(0, seed))
            request = CompletionRequest(self.prompt, sampling, n, ignore_eos=True, speculation=speculation, **more)
            seqs.append(self.scheduler.submit(request))
        texts: dict[Any, list[int]] = {seq: [] for seq in seqs}
        while not self.scheduler.idle:
            for seq, event in self.scheduler.step():
                if isinstance(event, Token):
                    texts[seq].append(event.id)
        n_drafted = stats.draft_tokens - before[0]
        return list(texts.values()), (stats.draft_tokens_accepted - before[1]) / max(1, n_drafted)

    def learn(self, *, waits: bool = False) -> None:
        """Train on what there is; `waits`: a request does."""
        self.learner.wait()
        self.learner.run(float("inf"), lambda: waits)

    def close(self) -> None:
        self.learner.close()
        self.engine.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder's part with draft heads; kernels stay where they are."""
    monkeypatch.setattr("logitless.engine.loading.open_model.cache_folder", lambda: tmp_path)
    return tmp_path / "draft-heads"


@pytest.fixture
def bench(cache: Path) -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_vocabulary_full_replaces_the_longest_unused() -> None:
    ids = [0, 1, 2, 3]
    vocabulary = DraftVocabulary(ids)
    assert vocabulary.use([3, 0]) == []
    assert vocabulary.use([9, 3, 8]) == [2, 1]
    assert ids == [0, 8, 9, 3]
    assert vocabulary.use([7]) == [0]
    assert [id in vocabulary for id in (0, 7, 8)] == [False, True, True]
    assert vocabulary.columns([7, 9, 0]) == [0, 2, -1]
    assert vocabulary.index(8) == 1


def test_repeated_text_learnt_raises_acceptance_and_restart_finds_it(cache: Path) -> None:
    bench = Bench()
    (want,), none = bench.run(OFF)
    (text,), before = bench.run()
    assert (text, none) == (want, 0.0)
    assert before < 0.05
    for _ in range(5):
        bench.learn()
        (text,), rate = bench.run()
        assert text == want
    assert rate > 0.5
    n_steps, accuracy = bench.learner.n_steps, bench.learner.accuracy
    assert 100 < n_steps < 6 * 8 * len(want) / N_BATCH + N_BATCH
    seeds = (1, 2, 3)
    assert bench.run(OFF, seeds=seeds)[0] == bench.run(seeds=seeds)[0]
    bench.close()
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o77 == 0
    again = Bench()
    assert (again.learner.n_steps, again.learner.accuracy) == (n_steps, accuracy)
    (text,), found = again.run()
    assert text == want
    assert found > 0.5
    again.close()


def test_adaptive_drafts_are_none_before_the_head_has_learnt(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(adapts=True)
    step, runs = bench.engine.step, [0]

    def counted(batch: UBatch) -> StepResult:
        runs[0] += 1
        return step(batch)

    monkeypatch.setattr(bench.engine, "step", counted)
    monkeypatch.setattr(bench.scheduler, "clock", lambda: float(runs[0]))  # each run takes a second
    for _ in range(3):
        bench.run()
    n_drafted = bench.scheduler.stats.draft_tokens
    assert 6 <= n_drafted < 40  # each length is timed a few times; then one token in 64 steps
    bench.close()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda content: content[:-5] + b"\0" + content[-4:], "it is damaged"),
        (lambda content: content[: len(content) // 2], "it is damaged"),
        (lambda content: b"", "it is no draft head"),
        (lambda content: content.replace(b" 1\n", b" 0\n", 1), "it has another format"),
    ],
)
def test_file_wrong_is_ignored_with_one_line(
    change: Any, line: str, bench: Bench, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, values = bench.learner.file, bench.engine.draft_head
    assert values is not None
    values.params["keep"] += 1
    content = file.content()
    file.write(content)
    values.params["keep"] -= 1
    assert file.path.read_bytes().startswith(MAGIC)
    file.path.write_bytes(change(content))
    file.load()
    assert [record.getMessage().partition("ignored, ")[2] for record in caplog.records] == [f"{line}; it learns anew"]
    assert not values.params["keep"].any()
    file.path.write_bytes(content)
    file.load()
    assert (values.params["keep"] == 1).all()


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("up", lambda up: up[:3], "it has other shapes"),
        ("keep", lambda keep: keep.astype(str), "it has other shapes"),
        ("progress", lambda _: np.array(1.0), "it has other shapes"),
        ("up", lambda _: None, "it is damaged"),
        ("ids", lambda ids: ids // 2, "it has values that no head has"),
        ("keep", lambda keep: keep * np.float32(np.nan), "it has values that no head has"),
        ("progress", lambda progress: progress * np.inf, "it has values that no head has"),
        ("progress", lambda _: np.array([1, np.nan]), "it has values that no head has"),
    ],
)
def test_file_of_other_values_is_ignored(
    name: str, value: Any, line: str, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    file, values = bench.learner.file, bench.engine.draft_head
    assert values is not None
    values.n_steps, values.accuracy = 7, 0.5
    with np.load(BytesIO(file.content()[len(MAGIC) + CHECK_NBYTES :])) as archive:
        arrays = dict(archive)
    if (changed := value(arrays.pop(name))) is not None:
        arrays[name] = changed
    np.savez(payload := BytesIO(), **arrays)
    file.write(MAGIC + sha256(payload.getvalue()).digest() + payload.getvalue())
    file.load()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"ignored, {line}; it learns anew")
    assert not values.params["keep"].any()


def test_full_disk_is_one_line_and_costs_no_answer(
    bench: Bench, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for _ in range(2):
            bench.run(n=60)
            bench.learn()
            bench.learner.save(wait=True)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.endswith("not written: No space left on device")
    assert list(cache.iterdir()) == []
    bench.run(n=60)
    bench.learn()
    bench.learner.save(wait=True)  # there is room again
    assert len(list(cache.iterdir())) == 1


def test_save_serialises_the_head_on_a_thread_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content = bench.learner.file, bench.learner.file.content
    names: list[str] = []

    def recorded() -> bytes:
        names.append(threading.current_thread().name)
        return content()

    monkeypatch.setattr(file, "content", recorded)
    assert bench.engine.draft_head is not None
    bench.engine.draft_head.n_steps += 1
    bench.learner.save(wait=True)
    assert names == ["draft-head-file"]
    assert file.path.exists()


def test_request_or_end_stops_a_step_between_its_parts(bench: Bench, cache: Path) -> None:
    bench.run(n=60)
    bench.learn(waits=True)
    assert bench.learner.ready
    assert bench.learner.n_steps == 0
    (text,), _ = bench.run(n=60)  # in the middle of the step
    assert text == bench.run(OFF, n=60)[0][0]
    bench.learn()
    n_steps = bench.learner.n_steps
    assert n_steps > 0
    bench.run(n=60)
    bench.learn(waits=True)
    bench.learner.close()
    assert bench.learner.n_steps == n_steps
    bench.learner.file.load()
    assert bench.learner.n_steps == n_steps
    (file,) = cache.iterdir()
    assert file == bench.learner.file.path


def test_text_with_a_salt_is_not_learnt(bench: Bench) -> None:
    bench.run(cache_salt="mine")
    bench.learn()
    assert bench.learner.n_steps == 0
    assert not bench.learner.ready


def test_diverged_head_goes_back_to_the_last_that_drafts(bench: Bench) -> None:
    bench.run(n=60)
    bench.learn()
    name = f"{PREFIX}.keep"
    published = bench.engine.session.read(name)
    assert published.any()
    bench.engine.session.write(f"{name}{TRAINING}", np.full(published.shape, np.nan, np.float32))
    bench.run(n=60)
    bench.learn()
    now = bench.engine.session.read(name)
    assert np.isfinite(now).all()
    assert not np.array_equal(now, published)  # it learns on


def test_sleep_forgets_examples_and_keeps_the_head(bench: Bench) -> None:
    (want,), _ = bench.run()
    assert bench.loaded.sleep is not None
    bench.learn(waits=True)
    assert bench.learner.ready  # within a step
    bench.loaded.sleep.begin()
    assert not bench.learner.ready
    bench.loaded.sleep.use()
    bench.run()
    for _ in range(4):
        bench.learn()
        bench.run()
    bench.loaded.sleep.begin()
    assert not bench.learner.ready
    bench.loaded.sleep.use()
    (text,), rate = bench.run()
    assert text == want
    assert rate > 0.3
    bench.learn()
    assert bench.learner.n_steps > 100


def test_model_that_makes_vectors_is_refused(tmp_path: Path) -> None:
    write(path := tmp_path / "m.gguf", replace(ENCODERS["neo-bert"], n_vocab=512, vocabulary=True))
    with pytest.raises(OptionConflict, match=r"^--spec-learn: the model makes vectors of texts, it does not write$"):
        open_model(path, ModelOptions(spec_learn=True))


def test_head_beside_another_model_that_drafts_is_refused() -> None:
    options = ModelOptions(spec_learn=True, spec_type="draft-mtp")
    with pytest.raises(OptionConflict, match=r"^--spec-learn: draft-mtp drafts already; n-grams can go before it$"):
        open_model(MODEL, options)
    open_model(MODEL, ModelOptions(spec_learn=True, spec_type="ngram-simple"))
