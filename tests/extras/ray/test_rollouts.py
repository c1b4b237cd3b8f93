"""Rollouts of a reinforcement job by all replicas, by hand: `pytest --ray tests/extras/ray/test_rollouts.py`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from logitless.models.gguf.file import GGUFFile
from tests.helpers.ray_fleet import actors, fleet, until

PORT = 18_470
PROMPTS = [{"prompt": f"Once upon a time there was a {name}"} for name in ("cat", "dog", "girl", "boy", "bird", "king")]
GRADER = {
    "type": "text_similarity", "name": "close", "evaluation_metric": "fuzzy_match",
    "input": "{{ sample.output_text }}", "reference": "who lived in a big house.",
}  # fmt: skip
METHOD = {
    "n_epochs": 2, "batch_size": 3, "n_samples": 8, "n_updates": 2, "max_completion_tokens": 160, "beta": 0.01,
}  # fmt: skip
Start = Callable[[int], OpenAI]


@pytest.fixture
def start(request: pytest.FixtureRequest, shared_data: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a fleet of so many replicas, after the end of the last one."""
    if not request.config.getoption("--ray"):
        pytest.skip("--ray is not given")
    with ExitStack() as stack:

        def run(n: int) -> OpenAI:
            stack.close()
            model = {
                "model": str(shared_data / "models" / "stories260K.gguf"),
                "replicas": {"min": n, "max": max(n, 2)} if n == 1 else n,
                "num_cpus": 0.5,
                "options": {"parallel": 8, "ctx_size": 4096, "threads": 1},
            }
            return stack.enter_context(fleet({"models": [model], "data_dir": str(tmp_path / "jobs")}, tmp_path, PORT))

        yield run


def begin(client: OpenAI) -> str:
    rows = "\n".join(map(json.dumps, PROMPTS)).encode()
    file = client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": METHOD}}
    return client.fine_tuning.jobs.create(model="stories260K", training_file=file.id, method=method, seed=1).id


def messages(client: OpenAI, job: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job, limit=100)]


def finish(client: OpenAI, job: str, folder: Path) -> tuple[list[str], int]:
    """Digests of the checkpoint's tensors and the adapter's; the number of answers of other replicas."""
    until(lambda: client.fine_tuning.jobs.retrieve(job).status in ("succeeded", "failed"))
    told = messages(client, job)
    assert client.fine_tuning.jobs.retrieve(job).status == "succeeded", told
    shared = next(m for text in told if (m := re.match(r"(\d+) of \d+ answers were sampled by other replicas", text)))
    paths = [folder / "jobs" / "checkpoints" / f"{job}{suffix}.gguf" for suffix in ("", "@8")]
    return [digest(path) for path in paths], int(shared[1])


def digest(path: Path) -> str:
    """Of the tensors; the file has the job's id as well."""
    result = hashlib.sha256()
    with GGUFFile.open(path) as gguf:
        for name in sorted(gguf.tensors):
            result.update(name.encode() + bytes(gguf.bytes_of(name)))
    return result.hexdigest()


def test_any_number_of_replicas_ends_with_the_same_bytes(start: Start, tmp_path: Path) -> None:
    ends, shared = {}, {}
    for n in (1, 2, 3):
        client = start(n)
        began = time.monotonic()
        ends[n], shared[n] = finish(client, begin(client), tmp_path)
        print(f"{n} replicas: {time.monotonic() - began:.1f} s, {shared[n]} of 96 by others, {ends[n]}")
    assert ends[1] == ends[2] == ends[3]
    assert shared[1] == 0
    assert shared[2] > 0
    assert shared[3] > 0


def test_a_killed_replica_changes_no_byte(start: Start, tmp_path: Path) -> None:
    client = start(1)
    alone, _ = finish(client, begin(client), tmp_path)
    client = start(3)
    for helper in (True, False):
        job = begin(client)
        until(lambda: any("Step 2/" in text for text in messages(client, job)))  # noqa: B023
        replicas = actors(b"ServeReplica:logitless:stories260K")
        trainer = next(pid for pid in replicas if _has_lock(pid))
        victim = next(pid for pid in replicas if (pid == trainer) != helper)
        os.kill(victim, signal.SIGKILL)
        end, shared = finish(client, job, tmp_path)
        print(f"killed {'a helper' if helper else 'the trainer'}: {shared} of 96 by others")
        assert end == alone


def _has_lock(pid: int) -> bool:
    """True for the process that runs the jobs."""
    return any(f" {pid} " in line for line in Path("/proc/locks").read_text().splitlines())
