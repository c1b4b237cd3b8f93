"""Fine-tuned models beside their base: lower loss on unseen text, and unchanged answers of the base.

Jobs' models answer by their names, in the same batches as the base model."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import ClientFactory, Server, ServerFactory
from tests.integration.test_fine_tuning import upload, wait

FLAGS = ("--alias", "base", "--admin-api-key", "admin", "-c", "1024", "-t", "1", "-ctk", "f32", "-ctv", "f32")


def rows(path: Path, n: int, length: int = 100) -> list[dict[str, str]]:
    """n pieces of a text, one after the other."""
    text = path.read_text()[: n * length]
    return [{"text": text[i : i + length]} for i in range(0, len(text), length)]


def loss(server: Server, texts: list[dict[str, str]], model: str = "base") -> float:
    """Mean over all tokens of these texts, as the job's validation counts."""
    found = server.post("/v1/score", {"input": texts, "model": model})["data"]
    return float(sum(row["loss"] * row["n_counted"] for row in found) / sum(row["n_counted"] for row in found))


def answer(server: Server, expected: dict[str, Any], model: str = "base") -> list[int]:
    """The greedy continuation of the recorded prompt."""
    ids: list[int] = server.post("/completion", request(expected, model))["tokens"]
    return ids


def request(expected: dict[str, Any], model: str) -> dict[str, Any]:
    return {"model": model, "prompt": expected["prompt"], "n_predict": 24, "temperature": 0, "return_tokens": True}


def during(api: openai.OpenAI, job: str, ask: Callable[[], Any]) -> list[Any]:
    """What `ask` says again and again while the job runs."""
    found = []
    while api.fine_tuning.jobs.retrieve(job).status in ("queued", "running"):
        found.append(ask())
    return found


ADAPTER = {"lora_r": 8, "learning_rate_multiplier": 10}
WHOLE = {"full": True, "learning_rate_multiplier": 100}
NAME = "stories260K.gguf"


@pytest.mark.long
def test_jobs_lower_held_out_loss_and_the_base_stays(
    serve_here: ServerFactory, connect: ClientFactory, shared_data: Path, tmp_path: Path
) -> None:
    """Two epochs of wikitext lower the perplexity of what they trained on."""
    expected = json.loads((shared_data / "expected" / f"{NAME}.json").read_text())
    flags = (*FLAGS, "--data-dir", str(tmp_path), "--slot-save-path", str(tmp_path))
    server = serve_here(shared_data / "models" / NAME, *flags)
    api = connect(f"{server.url}/v1", "admin")
    pieces = rows(shared_data / "corpora" / "wikitext-2-test.noblank.txt", 40)
    training, held_out = pieces[:32], pieces[32:]
    files = {"training_file": upload(api, training), "validation_file": upload(api, held_out)}
    golden = answer(server, expected)
    assert golden == expected["greedy_ids"][:24]
    before, unseen = loss(server, held_out), loss(server, training)
    common = {"n_epochs": 2, "batch_size": 4, "context_length": 128}
    models = ["base"]
    for more in (ADAPTER, WHOLE):
        job = api.fine_tuning.jobs.create(model="base", seed=1, hyperparameters={**common, **more}, **files)
        with ThreadPoolExecutor(3) as pool:
            auxiliary = pool.submit(during, api, job.id, lambda: answer(server, expected))
            events = wait(api, server.url, job.id)
            told = auxiliary.result()
        done = api.fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded", done.error
        assert done.fine_tuned_model is not None
        assert told
        assert all(ids == golden for ids in told)
        after = [e["data"]["full_valid_loss"] for e in events if "full_valid_loss" in e["data"]]
        first = next(e["data"]["step"] for e in events if "full_valid_loss" in e["data"])
        assert after[-1] < before - 1
        models += [done.fine_tuned_model, f"{done.fine_tuned_model}@{first}"]
        scored = [loss(server, held_out, model) for model in models[-2:]]
        assert scored == pytest.approx([after[-1], after[0]], rel=1e-9)
        assert loss(server, training, done.fine_tuned_model) < unseen - 1  # nats: perplexity falls to 37 %
    alone = [answer(server, expected, model) for model in models]
    assert alone[0] == golden
    assert len({str(ids) for ids in alone}) > 2
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda model: answer(server, expected, model), models * 2))
    assert together == alone * 2
    listed = {adapter["model"] for adapter in server.get("/lora-adapters")}
    assert set(models[1:3]) <= listed
    assert not listed & set(models[3:])
    whole = models[-1]
    saved = server.post("/completion", {**request(expected, whole), "id_slot": 0})
    server.post("/slots/0?action=save", {"filename": "whole"}, "admin")
    server.stop()
    again = serve_here(shared_data / "models" / NAME, *flags)
    again.post("/slots/0?action=restore", {"filename": "whole"}, "admin")
    restored = again.post("/completion", {**request(expected, whole), "id_slot": 0})
    assert restored["tokens"] == saved["tokens"]
    assert restored["timings"]["cache_n"] == restored["tokens_evaluated"] - 1
    assert (
        again.post("/completion", {**request(expected, "base"), "id_slot": 0})["timings"]["cache_n"] == 0
    )  # not computed by the base
    bare = serve_here(shared_data / "models" / NAME, *FLAGS, "--slot-save-path", str(tmp_path))
    with pytest.raises(urllib.error.HTTPError, match="400"):
        bare.post("/slots/0?action=restore", {"filename": "whole"}, "admin")
