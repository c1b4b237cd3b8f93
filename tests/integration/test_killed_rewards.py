"""Reinforcement jobs that are killed while they sample and while a grader works end with the same bytes."""

from __future__ import annotations

import json
import signal
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import ClientFactory, Server, ServerFactory
from tests.integration.test_fine_tuning import tensors, wait
from tests.integration.test_reinforcement_jobs import PROMPTS, upload

N_ANSWERS = 16  # of a batch


class GraderServer(ThreadingHTTPServer):
    """Grades answers by their texts; after the first `n_left` it answers nothing."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.n_left, self.held, self.released = 1 << 30, threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: GraderServer

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.n_left -= 1
        if self.server.n_left < 0:
            self.server.held.set()
            self.server.released.wait()
            return
        reward = zlib.crc32(given["sample"]["output_text"].encode()) % 5
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": reward}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def grader() -> Iterator[GraderServer]:
    server = GraderServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
def test_a_job_killed_anywhere_ends_with_the_same_bytes(
    serve: ServerFactory, connect: ClientFactory, shared_data: Path, tmp_path: Path, grader: GraderServer
) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("--alias", "stories", "-t", "1", "-c", "512", "--data-dir", str(tmp_path), "--allow-graders", "endpoint")
    flags += ("--allow-private-addresses",)

    def start() -> tuple[Server, openai.OpenAI]:
        server = serve(model, *flags)
        return server, connect(f"{server.url}/v1", "none")

    def kill(server: Server) -> None:
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

    server, api = start()
    file = upload(api, PROMPTS[:4])
    method: Any = {
        "type": "reinforcement",
        "reinforcement": {
            "grader": {"type": "endpoint", "url": f"http://127.0.0.1:{grader.server_port}"},
            "hyperparameters": {"n_epochs": 4, "batch_size": 4, "n_samples": 4, "max_completion_tokens": 48},
        },
    }
    ends = []
    for killed in (False, True):
        grader.n_left = N_ANSWERS + 5 if killed else 1 << 30
        job = api.fine_tuning.jobs.create(model="stories", training_file=file, method=method, seed=3)
        if killed:
            assert grader.held.wait(60)  # the second batch is being graded
            kill(server)
            grader.n_left = 1 << 30
            server, api = start()
            wait(api, server.url, job.id, until="Step 2/")
            while not any(slot["is_processing"] for slot in server.get("/slots")):
                assert api.fine_tuning.jobs.retrieve(job.id).status == "running"
            kill(server)  # the third batch, or the fourth, is being sampled
            server, api = start()
        events = wait(api, server.url, job.id)
        done = api.fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded", done.error
        steps = [e["data"] for e in events if "train_mean_reward" in e["data"]]
        assert [m["step"] for m in steps] == [1, 2, 3, 4]
        ends.append((steps, tensors(tmp_path / "checkpoints" / f"{job.id}.gguf")))
    (first, whole), (second, resumed) = ends
    assert first == second
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)
