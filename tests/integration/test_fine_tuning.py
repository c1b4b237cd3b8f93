"""LoRA job through OpenAI's client: lower loss, survives a kill, leaves the base model unchanged."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from logitless.models.gguf.file import GGUFFile
from tests.integration.conftest import ClientFactory, ServerFactory

ROWS, HELD_OUT = (
    [
        {"prompt": "Once upon a time", "completion": f" there was a cat number {i} who sat on a red mat and sang."}
        for i in numbers
    ]
    for numbers in ([0, 1, 2, 3, 4, 5, 6, 7] * 2, (8, 9))
)
PROMPT = "Once upon a time"


def upload(api: openai.OpenAI, rows: list[dict[str, str]] = ROWS) -> str:
    return api.files.create(file=("rows.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="fine-tune").id


def wait(api: openai.OpenAI, url: str, job: str, until: str = "") -> list[dict[str, Any]]:
    """The job's events as they come, until one says this, or the job is over."""
    found: list[dict[str, Any]] = []
    events = f"{url}/v1/fine_tuning/jobs/{job}/events?stream=true"
    with api._client.stream("GET", events, headers=api.auth_headers, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                if until and until in found[-1]["message"]:
                    break
    return found


def tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with GGUFFile.open(path) as gguf:
        return {name: np.array(gguf.bytes_of(name)) for name in gguf.tensors}


def greedy(api: openai.OpenAI, model: str) -> str:
    return api.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text


def deleted(url: str, api: openai.OpenAI, nobody: openai.OpenAI, name: str) -> None:
    """A model, after a job that goes on from it."""
    more: Any = {"n_epochs": 1, "batch_size": 16, "learning_rate_multiplier": 0.01}
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": more}}
    job = api.fine_tuning.jobs.create(model=name, training_file=upload(api), method=method)
    first = next(e["data"]["train_loss"] for e in wait(api, url, job.id) if "train_loss" in e["data"])
    again = api.fine_tuning.jobs.retrieve(job.id)
    assert (again.model, again.status) == (name, "succeeded")
    assert again.method is not None
    assert again.method.supervised is not None
    assert again.method.supervised.hyperparameters is not None
    assert again.method.supervised.hyperparameters.batch_size == 16
    assert first < 1
    with pytest.raises((openai.AuthenticationError, openai.PermissionDeniedError)):
        nobody.models.delete(name)
    tuned = greedy(api, name)
    assert api.models.delete(name).model_dump() == {"id": name, "object": "model", "deleted": True}
    for ask in (api.models.delete, api.models.retrieve, lambda model: greedy(api, model)):
        with pytest.raises(openai.NotFoundError):
            ask(name)
    with pytest.raises(openai.NotFoundError, match="no fine-tuned model 'stories'"):
        api.models.delete("stories")
    assert again.fine_tuned_model is not None
    assert [m.id for m in api.models.list()] == ["stories", again.fine_tuned_model]
    assert greedy(api, again.fine_tuned_model) == tuned


def test_a_job_is_killed_resumed_and_used(
    serve: ServerFactory, serve_here: ServerFactory, connect: ClientFactory, shared_data: Path, tmp_path: Path
) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("--alias", "stories", "--admin-api-key", "admin", "-t", "1", "-c", "512", "--metrics", "--pooling", "mean")
    hyperparameters = {"n_epochs": 6, "batch_size": 2, "learning_rate_multiplier": 5.0, "context_length": 64}
    adapters = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        server = (serve if killed else serve_here)(model, *flags, "--data-dir", str(folder))
        api = connect(f"{server.url}/v1", "admin")
        before = greedy(api, "stories")
        job = api.fine_tuning.jobs.create(
            model="stories",
            training_file=upload(api),
            validation_file=upload(api, HELD_OUT),
            suffix="cat",
            seed=3,
            hyperparameters=hyperparameters,  # type: ignore[arg-type]
        )
        if killed:
            wait(api, server.url, job.id, until="Step 2/")
            assert api.fine_tuning.jobs.pause(job.id).status == "paused"
            assert api.fine_tuning.jobs.resume(job.id).status == "queued"
            wait(api, server.url, job.id, until="Checkpoint created")
            assert api.fine_tuning.jobs.retrieve(job.id).status == "running"
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            server = serve(model, *flags, "--data-dir", str(folder))
            api = connect(f"{server.url}/v1", "admin")
        events = wait(api, server.url, job.id)
        done = api.fine_tuning.jobs.retrieve(job.id)
        assert done.status == "succeeded", done.error
        assert done.fine_tuned_model is not None
        steps = [e["data"]["step"] for e in events if "train_loss" in e["data"]]
        assert steps == list(range(1, steps[-1] + 1))
        told = dict(line.rsplit(" ", 1) for line in server.get("/metrics").splitlines() if line[0] != "#")
        assert float(told["logitless:training_job_step"]) == float(told["logitless:training_job_steps"]) == steps[-1]
        assert (float(told["logitless:training_steps_total"]) < steps[-1]) == killed
        assert (
            float(told["logitless:training_loss"])
            == [e["data"] for e in events if "train_loss" in e["data"]][-1]["train_loss"]
        )
        held_out = [e["data"]["full_valid_loss"] for e in events if "full_valid_loss" in e["data"]]
        assert held_out[-1] < 1 < 3 < events[[e["type"] for e in events].index("metrics")]["data"]["train_loss"]
        tuned = greedy(api, done.fine_tuned_model)
        assert tuned.startswith(" there was a cat number")
        assert greedy(api, "stories") == before
        names = [c.fine_tuned_model_checkpoint for c in api.fine_tuning.jobs.checkpoints.list(job.id).data]
        assert names[0] == f"{done.fine_tuned_model}@{steps[-1]}"
        assert greedy(api, names[0]) == tuned
        vectors = [
            api.embeddings.create(model=name, input=PROMPT) for name in (done.fine_tuned_model, names[0], "base")
        ]
        assert [v.model for v in vectors] == [done.fine_tuned_model, names[0], "stories"]
        assert vectors[0].data[0].embedding == vectors[1].data[0].embedding != vectors[2].data[0].embedding
        assert [m.id for m in api.models.list()] == ["stories", done.fine_tuned_model]
        everything = {m.id for m in api.models.list(extra_query={"checkpoints": "true"})}
        assert everything == {"stories", *names, done.fine_tuned_model}
        assert api.models.retrieve(names[1]).id == names[1]
        adapters.append(tensors(folder / "checkpoints" / f"{job.id}@{steps[-1]}.gguf"))
        rest = tensors(folder / "checkpoints" / f"{job.id}.gguf")
        adapters[-1] |= {name: rest[name] for name in rest if name.startswith("optimizer")}
        if killed:
            deleted(server.url, api, connect(f"{server.url}/v1", "nobody"), done.fine_tuned_model)
        server.stop()
    assert adapters[0].keys() == adapters[1].keys()
    assert all(np.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def test_wrong_job_is_refused_at_creation(
    serve_here: ServerFactory, connect: ClientFactory, shared_data: Path, tmp_path: Path
) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("--alias", "stories", "--api-key", "user", "--admin-api-key", "admin", "-c", "512", "-t", "1")
    server = serve_here(model, *flags, "--data-dir", str(tmp_path))
    api, user, nobody = (connect(f"{server.url}/v1", key) for key in ("admin", "user", "nobody"))
    bad = {
        b'{"text": "a"}\n{"text": 1}': "line 2: field 'text' must be a string",
        b'{"text": "a"}\n\n{"text"': "line 3: is not valid JSON",
        b'{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}': "line 1: no message of the assistant",
        b'{"prompt": "a", "completion": ""}': "line 1: field 'completion' is empty",
        b"": "has no rows",
    }
    for content, told in bad.items():
        with pytest.raises(openai.BadRequestError, match=told):
            api.files.create(file=("bad.jsonl", content), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="'purpose'"):
        api.files.create(file=("a.jsonl", b'{"text": "a"}'), purpose="evals")
    with pytest.raises(openai.PermissionDeniedError, match="admin key"):
        upload(user)
    with pytest.raises(openai.AuthenticationError):
        upload(nobody)
    file = upload(api)
    assert api.files.retrieve(file).filename == "rows.jsonl"
    assert api.files.content(file).text.splitlines()[0] == json.dumps(ROWS[0])
    assert [[f.id for f in who.files.list()] for who in (api, user)] == [[file], []]  # it is the admin's

    def refused(**fields: Any) -> str:
        with pytest.raises(openai.BadRequestError) as error:
            api.fine_tuning.jobs.create(**({"model": "stories", "training_file": file} | fields))
        return str(error.value)

    assert "field 'model'" in refused(model="gpt-4")
    assert "field 'training_file': there is no file 'file-x'" in refused(training_file="file-x")
    assert "field 'hyperparameters.n_epochs'" in refused(hyperparameters={"n_epochs": 0})
    assert "field 'hyperparameters.rate': is not known" in refused(hyperparameters={"rate": 0})
    assert "field 'suffix'" in refused(suffix="a/b")
    assert "field 'integrations': expected an array, got a number" in refused(integrations=5)
    assert "field 'integrations': expected an array, got a string" in refused(integrations="x")
    assert "field 'integrations[0].type': is required" in refused(integrations=[{}])
    with pytest.raises(openai.NotFoundError):
        api.fine_tuning.jobs.retrieve("ftjob-x")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        user.completions.create(model="ft:stories:none:1", prompt=PROMPT, max_tokens=1)
    job = api.fine_tuning.jobs.create(model="stories260K", training_file=file, hyperparameters={"n_epochs": 500})
    with pytest.raises(openai.BadRequestError, match="is in use by"):
        api.files.delete(file)
    queued = api.fine_tuning.jobs.create(model=str(model), training_file=file, integrations=[])
    assert api.fine_tuning.jobs.pause(job.id).status == "paused"
    assert api.fine_tuning.jobs.resume(job.id).status == "queued"
    assert api.fine_tuning.jobs.cancel(queued.id).status == "cancelled"
    assert api.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        api.fine_tuning.jobs.resume(job.id)
    assert api.files.delete(file).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(file)
