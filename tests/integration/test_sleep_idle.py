"""Sleep mode (--sleep-idle-seconds) with a real model and draft model: memory freed, same answers after."""

from __future__ import annotations

import os
import shutil
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park"
BODY = {"prompt": PROMPT, "n_predict": 24, "seed": 7, "temperature": 0.7}


def wait_until_asleep(server: Any) -> None:
    deadline = time.monotonic() + 60
    while not server.get("/props")["is_sleeping"]:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.01)


def metric(server: Any, name: str) -> float:
    return next(float(line.split()[1]) for line in server.get("/metrics").splitlines() if line.startswith(name))


def engine_metrics(server: Any) -> list[str]:
    """Lines of /metrics about the engine: those of HTTP requests count the requests for /metrics, too."""
    return [line for line in server.get("/metrics").splitlines() if "logitless:requests_total" not in line]


def test_it_sleeps_wakes_and_says_the_same(serve_here: Any, shared_data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(shared_data / "models" / "stories260K.gguf", model)
    draft = shared_data / "models" / "stories260K-conv-Q4_0.gguf"
    server = serve_here(
        model, "--sleep-idle-seconds", "1", "--metrics", "--model-draft", str(draft), "--spec-type", "draft-simple"
    )
    first: dict[str, Any] = server.post("/completion", BODY)
    assert first["timings"]["draft_n_accepted"] > 0
    assert metric(server, "llamacpp:predicted_tokens_seconds") > 0
    awake = engine_metrics(server)
    assert metric(server, "llamacpp:predicted_tokens_seconds") == 0  # since the last look
    wait_until_asleep(server)
    assert engine_metrics(server) == awake
    again: dict[str, Any] = server.post("/completion", BODY)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] >= 16  # whole pages were in host memory meanwhile
    assert again["timings"]["draft_n_accepted"] > 0
    wait_until_asleep(server)
    raw = model.read_bytes()
    os.truncate(model, len(raw) + 1)  # the same file, but not what was loaded
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/completion", BODY)
    assert refused.value.code == 500
    assert "has changed since it was loaded" in refused.value.read().decode()
    other = tmp_path / "new.gguf"
    other.write_bytes(b"another model")
    os.replace(other, model)  # what was loaded is not in any folder any more, but it is still there
    assert server.post("/completion", BODY)["content"] == first["content"]
