"""Jobs that learn from rewards, through the official client."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.commands import command
from tests.integration.conftest import ClientFactory, ServerFactory
from tests.integration.test_fine_tuning import wait

PROMPTS = [
    {"prompt": text, "word": "Lily"}
    for text in (
        "Once upon a time, there was a little girl named",
        "One day, a girl named",
        "There was a girl. Her name was",
        "The girl was called",
        "She was named",
        "The name of the girl was",
        "Tom met a girl named",
        "His sister was",
    )
]
NAMES: Any = {
    "type": "string_check", "name": "named", "operation": "like",
    "input": "{{ sample.output_text }}", "reference": "{{ item.word }}",
}  # fmt: skip
GIVEN: Any = {
    "n_epochs": 6, "batch_size": 8, "n_samples": 8, "n_updates": 2, "max_completion_tokens": 4, "beta": 0.01,
    "learning_rate_multiplier": 2, "eval_interval": 4,
}  # fmt: skip


def upload(api: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    return api.files.create(file=("rows.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="fine-tune").id


def method(grader: Any, **hyperparameters: Any) -> Any:
    given = {**GIVEN, **hyperparameters}
    return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": given}}


def test_rewards_are_learned_from_jobs(
    serve_here: ServerFactory, connect: ClientFactory, shared_data: Path, tmp_path: Path
) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("--alias", "stories", "-t", "1", "-c", "512", "--data-dir", str(tmp_path), "--allow-graders", "python")
    server = serve_here(model, *flags)
    api = connect(f"{server.url}/v1", "none")
    ask: Any = {"model": "stories", "prompt": "Once", "max_tokens": 40, "temperature": 1, "seed": 7}
    before = api.completions.create(**ask).choices[0].text
    files: Any = {"training_file": upload(api, PROMPTS), "validation_file": upload(api, PROMPTS[:2])}
    job = api.fine_tuning.jobs.create(model="stories", method=method(NAMES), seed=1, **files)
    assert api.completions.create(**ask).choices[0].text == before  # while it samples and learns
    events = wait(api, server.url, job.id)
    done = api.fine_tuning.jobs.retrieve(job.id)
    assert done.status == "succeeded", done.error
    assert done.method is not None
    assert done.method.reinforcement is not None
    assert done.method.reinforcement.hyperparameters is not None
    assert done.method.reinforcement.hyperparameters.eval_interval == 4
    steps = [e["data"] for e in events if "train_mean_reward" in e["data"]]
    assert [m["step"] for m in steps] == list(range(1, 13))
    assert [m["train_ratio"] for m in steps[::2]] == [1.0] * 6  # on-policy: exactly
    assert all(m["train_ratio"] != 1 and m["train_kl"] > 0 for m in steps[1::2][1:])
    assert steps[-1]["train_mean_reward"] > steps[0]["train_mean_reward"] + 0.2
    valid = [e["data"] for e in events if "full_valid_mean_reward" in e["data"]]
    assert [m["step"] for m in valid] == [4, 8, 12]
    head = api.files.content(done.result_files[0]).text.splitlines()[0].split(",")
    assert {"train_mean_reward", "valid_mean_reward", "train_kl"} <= set(head)
    assert api.completions.create(**ask).choices[0].text == before
    _faults(api, server.url, files["training_file"])


def _faults(api: openai.OpenAI, url: str, prompts: str) -> None:
    """Graders that fail, and jobs that cannot be."""

    def python(body: str) -> Any:
        return {"type": "python", "name": "p", "source": f"def grade(sample, item):\n    {body}"}

    few: Any = {"n_epochs": 1, "batch_size": 8, "n_updates": 1, "beta": 0, "n_samples": 2}
    some = python("return float('nan') if item['prompt'].startswith('O') else len(sample['output_text'])")
    job = api.fine_tuning.jobs.create(model="stories", training_file=prompts, method=method(some, **few))
    messages = [e["message"] for e in wait(api, url, job.id)]
    assert api.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
    assert "4 of 16 answers could not be graded: the reward is nan; they are left out" in messages
    for grader, told in (
        (python("return 1 / 0"), "16 of 16 answers could not be graded: p: ZeroDivisionError"),
        ({**NAMES, "reference": "{{ item.none }}"}, "16 of 16 answers could not be graded: there is no item.none"),
    ):
        job = api.fine_tuning.jobs.create(model="stories", training_file=prompts, method=method(grader, **few))
        wait(api, url, job.id)
        failed = api.fine_tuning.jobs.retrieve(job.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert told in str(failed.error.message)
    for given, told in (
        (method({"type": "endpoint", "url": "http://127.0.0.1:1"}), "start with --allow-graders endpoint"),
        (method({**NAMES, "operation": "gt"}), "field 'method.reinforcement.grader.operation': must be one of"),
        (method(NAMES, gamma=1), "field 'hyperparameters.gamma': is of simpo, and the method is reinforcement"),
        (method(NAMES, context_length=8), "field 'hyperparameters.context_length': is of supervised"),
        (method(NAMES, loss_type="ppo"), "field 'hyperparameters.loss_type': must be one of grpo, dr_grpo"),
        ({"type": "reinforcement"}, "field 'method.reinforcement.grader': is required"),
        (
            {"type": "dpo", "dpo": {"hyperparameters": {"n_samples": 2}}},
            "'hyperparameters.n_samples': is of reinforcem",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            api.fine_tuning.jobs.create(model="stories", training_file=prompts, method=given)
        assert told in str(error.value)
    supervised = api.fine_tuning.jobs.create(model="stories", training_file=prompts)
    wait(api, url, supervised.id)
    assert "reinforcement alone learns from prompts" in str(api.fine_tuning.jobs.retrieve(supervised.id).error)
    answered = upload(api, [{"prompt": "a", "completion": "b"}])
    job = api.fine_tuning.jobs.create(model="stories", training_file=answered, method=method(NAMES, **few))
    wait(api, url, job.id)
    assert "reinforcement learns from prompts" in str(api.fine_tuning.jobs.retrieve(job.id).error)
    url_part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    seen = upload(api, [{"messages": [{"role": "user", "content": [url_part]}]}])
    job = api.fine_tuning.jobs.create(model="stories", training_file=seen, method=method(NAMES, **few))
    wait(api, url, job.id)
    assert "has images; reinforcement learns from prompts of text" in str(api.fine_tuning.jobs.retrieve(job.id).error)


def test_rewards_are_learned_on_the_command_line(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    (tmp_path / "grader.json").write_text(json.dumps(NAMES))

    def run(*flags: str) -> tuple[int, str]:
        words = ("finetune", "-m", str(shared_data / "models" / "stories260K.gguf"), "--file", "rows.jsonl", "-t", "1")
        words = (*words, "--lora-out", "a.gguf", "--method", "reinforcement", "--max-completion-tokens", "4", *flags)
        with contextlib.chdir(tmp_path):
            done = command(*words)
        return done.returncode, done.stderr.decode()

    learning = ("--grader", "grader.json", "-b", "6", "--n-samples", "4", "--warmup", "0", "--beta", "0.01",
                "--checkpoint-out", "k.gguf", "--checkpoint-in", "k.gguf", "--save-every", "1")  # fmt: skip
    code, told = run(*learning, "--adam-iter", "4", "--plot", "c.svg")
    assert code == 0, told
    assert "4 iterations are done: 4 steps, 16 samples" in told
    assert "mean reward" in (tmp_path / "c.svg").read_text()
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "k.gguf").unlink()
    for n in ("2", "4"):
        assert run(*learning, "--adam-iter", n)[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() == whole
    for flags, reason in (
        ((), "--grader FILE is required"),
        (("--grader", "rows.jsonl"), "--grader rows.jsonl: is no JSON"),
        (("--grader", "grader.json", "--ctx-size", "64"), "--ctx-size is of supervised"),
        (("--grader", "grader.json", "--method", "dpo"), "is of reinforcement, and the method is dpo"),
        (("--grader", "grader.json", "--max-completion-tokens", "3000"), "exceed the context of 2048"),
    ):
        code, told = run(*flags)
        assert code != 0
        assert reason in told
