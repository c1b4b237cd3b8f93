"""Fleet on Ray, by hand: `pytest --ray tests/extras/ray/test_fleet.py` (needs the extra `ray`; two minutes)."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI

from tests.helpers.ray_fleet import actors, fleet, until

PORT = 18_460
ROWS = b'{"prompt": "Once", "completion": " upon a time there was a cat."}\n' * 8
TALE = "Once upon a time there was a little girl named Lily, who loved to play in the park with her friends. "


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: Any) -> Iterator[OpenAI]:
    """A client of two replicas of stories260K, and of a third one while the queue is long."""
    if not request.config.getoption("--ray"):
        pytest.skip("--ray is not given")
    folder = tmp_path_factory.mktemp("fleet")
    model = {
        "model": str(shared_data / "models" / "stories260K.gguf"),
        "replicas": {"min": 2, "max": 3, "upscale_delay": 1, "downscale_delay": 5},
        "num_cpus": 0.5,
        "options": {"parallel": 4, "ctx_size": 8192, "threads": 1, "context_shift": True},
    }
    with fleet({"models": [model], "data_dir": str(folder / "jobs")}, folder, PORT) as client:
        yield client


def replicas() -> list[int]:
    """Process ids of the model's replicas."""
    return actors(b"ServeReplica:logitless:stories260K")


def ticks(pid: int) -> int:
    """CPU time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has left
        return 0
    return int(fields[11]) + int(fields[12])


def streamed(client: OpenAI, prompt: str, n: int, **fields: Any) -> str:
    chunks = client.completions.create(
        model="stories260K", prompt=prompt, max_tokens=n, stream=True, temperature=0, **fields
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_streams_are_those_of_one_process(client: OpenAI) -> None:
    alone = streamed(client, TALE, 40)
    with ThreadPoolExecutor(16) as pool:
        assert {*pool.map(lambda _: streamed(client, TALE, 40), range(32))} == {alone}


def test_conversations_find_their_prefix_again(client: OpenAI) -> None:
    def converse(i: int) -> tuple[int, int]:
        """Reusable and reused tokens of a conversation's later turns."""
        text, before, reusable, reused = f"{i} {TALE * 20}", 0, 0, 0
        for turn in range(6):
            answer = client.completions.create(model="stories260K", prompt=text, max_tokens=12, temperature=0)
            timings: Any = answer.model_extra["timings"]  # type: ignore[index]
            if turn:
                reusable, reused = reusable + before, reused + timings["cache_n"]
            before = timings["cache_n"] + timings["prompt_n"]
            text += f"{answer.choices[0].text} {i} {turn} {TALE}"
        return reusable, reused

    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(converse, range(8)))
    reusable, reused = (sum(column) for column in zip(*rows, strict=True))
    print(f"reused {reused} of {reusable} tokens")
    assert reused >= 0.95 * reusable


def test_a_killed_replica_costs_only_its_streams(client: OpenAI) -> None:
    until(lambda: len(replicas()) == 2)
    before, victims = {pid: ticks(pid) for pid in replicas()}, list[int]()

    def kill() -> None:
        """Kill a replica with streams: one that leaves has none."""
        victims.append(max(before, key=lambda pid: ticks(pid) - before[pid]))
        os.kill(victims[0], signal.SIGKILL)

    begun = threading.Barrier(13, kill)

    def ask(i: int) -> str:
        try:
            chunks = client.completions.create(  # longer than all need to begin, on a busy machine
                model="stories260K", prompt=f"{i} {TALE}", max_tokens=9000, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(chunks))
            begun.wait()
            return f"{sum(1 for _ in chunks)} chunks"
        except APIError as error:
            return error.message

    def later(i: int) -> str:
        begun.wait()
        return streamed(client, f"{i} {TALE}", 20)

    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(ask, i) for i in range(8)]
        others = [pool.submit(later, i) for i in range(5)]
        told = [stream.result() for stream in streams]
        assert all(other.result() for other in others)
    lost = [text for text in told if "chunks" not in text]
    print(f"{len(lost)} of 8 streams lost: {set(lost)}")
    assert all("the replica ended while it answered" in text for text in lost)
    assert 0 < len(lost) < 8
    until(lambda: len(replicas()) >= 2 and victims[0] not in replicas())


def test_replicas_come_and_go_with_the_queue(client: OpenAI) -> None:
    until(lambda: len(replicas()) == 2)
    ended = threading.Event()

    def ask(i: int) -> int:
        n = 0
        while not ended.is_set():
            n += bool(streamed(client, f"{i} {TALE}", 60))
        return n

    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, i) for i in range(24)]
        until(lambda: len(replicas()) == 3 or any(each.done() for each in asked))
        assert len(replicas()) == 3
        ended.set()
        assert all(each.result() for each in asked)
    with ThreadPoolExecutor(1) as pool:
        ended.clear()
        one = pool.submit(ask, 0)
        until(lambda: len(replicas()) == 2 or one.done())
        ended.set()
        assert one.result()


def test_a_finetune_is_served_by_all_replicas(client: OpenAI) -> None:
    file = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="stories260K", training_file=file.id, hyperparameters={"n_epochs": 1, "batch_size": 4}
    )
    until(lambda: client.fine_tuning.jobs.retrieve(job.id).status in ("succeeded", "failed"))
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert name
    seen: list[set[str]] = []

    def listed() -> bool:
        """True if all of eight answers, which come from different replicas, name the model."""
        with ThreadPoolExecutor(8) as pool:
            seen[:] = pool.map(lambda _: {model.id for model in client.models.list()}, range(8))
        return all(name in names for names in seen)

    until(listed)
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(
            lambda i: client.completions.create(model=name, prompt="Once", max_tokens=8, temperature=0).choices[0].text,
            range(16),
        )
        assert len({*texts}) == 1
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health") as reply:
        assert json.load(reply) == {"status": "ok"}
