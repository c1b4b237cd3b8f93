"""Preference jobs (DPO and others) through OpenAI's client."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import ClientFactory, ServerFactory
from tests.integration.test_fine_tuning import tensors, wait

PAIRS = [
    {
        "input": {"messages": [{"role": "user", "content": f"Tell me of cat {i}."}]},
        "preferred_output": [{"role": "assistant", "content": "It sat."}],
        "non_preferred_output": [{"role": "assistant", "content": "It sat on a mat, and then it ran to the park."}],
    }
    for i in range(12)
]
JUDGED = [
    {"prompt": f"The cat {i}", "completion": " sat." if i % 2 else " ran to the big park.", "label": i % 2 == 1}
    for i in range(8)
]


def upload(api: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    return api.files.create(file=("rows.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="fine-tune").id


@pytest.mark.long
def test_preferences_are_learned_from_jobs(
    serve: ServerFactory, connect: ClientFactory, shared_data: Path, tmp_path: Path
) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("--alias", "stories", "--admin-api-key", "admin", "-t", "1", "-c", "512", "--chat-template", "chatml")
    flags = (*flags, "--data-dir", str(tmp_path))
    server = serve(model, *flags)
    api = connect(f"{server.url}/v1", "admin")
    before = api.completions.create(model="stories", prompt="Once", max_tokens=8, temperature=0).choices[0].text
    files: Any = {"training_file": upload(api, PAIRS), "validation_file": upload(api, PAIRS[:3])}
    given: Any = {
        "type": "dpo",
        "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 4, "batch_size": 4, "learning_rate_multiplier": 20}},
    }
    ends = []
    for killed in (False, True):
        job = api.fine_tuning.jobs.create(model="stories", method=given, seed=1, **files)
        assert job.method is not None
        assert job.method.type == "dpo"
        if killed:
            wait(api, server.url, job.id, until="Checkpoint created")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            server = serve(model, *flags)
            api = connect(f"{server.url}/v1", "admin")
        events = wait(api, server.url, job.id)
        done = api.fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded", done.error
        assert done.method is not None
        assert done.method.dpo is not None
        assert done.method.dpo.hyperparameters is not None
        assert done.method.dpo.hyperparameters.beta == 0.2
        steps = [e["data"] for e in events if "train_loss" in e["data"]]
        assert [m["step"] for m in steps] == list(range(1, 13))  # batches count pairs
        assert steps[0]["train_loss"] == pytest.approx(math.log(2), rel=1e-12)
        assert steps[-1]["train_loss"] < 0.3
        assert steps[-1]["train_reward_margin"] > 1 > steps[0]["train_reward_margin"] == 0
        assert "train_mean_token_accuracy" not in steps[0]
        valid = [e["data"] for e in events if "full_valid_loss" in e["data"]]
        assert len(valid) == 4
        assert valid[-1]["full_valid_reward_accuracy"] == 1
        assert sum("Reference log-probabilities" in e["message"] for e in events) == 1
        table = api.files.content(done.result_files[0]).text.splitlines()
        head = table[0].split(",")
        assert head[:4] == ["step", "train_loss", "train_accuracy", "valid_loss"]
        assert {"train_reward_margin", "train_reward_chosen", "valid_reward_accuracy"} <= set(head)
        assert float(table[1].split(",")[1]) == steps[0]["train_loss"]
        ends.append(tensors(tmp_path / "checkpoints" / f"{job.id}.gguf"))
    assert ends[0].keys() == ends[1].keys()
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    after = api.completions.create(model="stories", prompt="Once", max_tokens=8, temperature=0).choices[0].text
    assert before == after
    assert done.fine_tuned_model is not None
    _others(api, server.url, done.fine_tuned_model, files["training_file"])


def _others(api: openai.OpenAI, url: str, tuned: str, pairs: str) -> None:
    """Other methods, from the finetune too, and what is refused."""
    few: Any = {"n_epochs": 1, "batch_size": 8}
    kto: Any = {"type": "kto", "kto": {"hyperparameters": {**few, "undesirable_weight": 0.5}}}
    job = api.fine_tuning.jobs.create(model=tuned, training_file=upload(api, JUDGED), method=kto)
    events = wait(api, url, job.id)
    first = next(e["data"] for e in events if "train_loss" in e["data"])
    assert first["train_loss"] == pytest.approx(
        (0.5 + 0.25) / 2, rel=1e-12
    )  # the reference is the model it starts from
    assert {"train_reward_chosen", "train_reward_rejected", "train_kl"} <= first.keys()

    def refused(method: Any, **more: Any) -> str:
        with pytest.raises(openai.BadRequestError) as error:
            api.fine_tuning.jobs.create(model="stories", training_file=pairs, method=method, **more)
        return str(error.value)

    assert "field 'method.type': must be one of supervised, dpo, orpo, kto, simpo" in refused({"type": "ppo"})
    gamma = {"type": "dpo", "dpo": {"hyperparameters": {"gamma": 1}}}
    assert "field 'hyperparameters.gamma': is of simpo, and the method is dpo" in refused(gamma)
    assert "field 'hyperparameters.beta': is of dpo" in refused({"type": "supervised"}, hyperparameters={"beta": 1})
    assert "field 'hyperparameters.beta'" in refused({"type": "dpo", "dpo": {"hyperparameters": {"beta": -1}}})
    assert "field 'method.kto': is not of the type dpo" in refused({"type": "dpo", "kto": {"hyperparameters": {}}})
    supervised = api.fine_tuning.jobs.create(model="stories", training_file=pairs)
    wait(api, url, supervised.id)
    failed = api.fine_tuning.jobs.retrieve(supervised.id)
    assert failed.error is not None
    assert "line 1: is a pair of answers" in str(failed.error.message)
    assert failed.error.code == "invalid_training_file"
    mixed = [PAIRS[0], {"text": "a"}]
    with pytest.raises(openai.BadRequestError, match=r"line 2: is a text .'text'., and line 1 is a pair of answers"):
        upload(api, mixed)
