"""Grading of rollouts: graders that hang, and a job that fails by one while requests are answered."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless import LLM, SamplingParams
from logitless.engine.finetuning.sampled_answers import N_THREADS, AnswerReader, grading
from logitless.errors import TrainingError
from logitless.models import tokenizer
from logitless.models.chat.template import ChatTemplate
from logitless.training.graders import remote
from logitless.training.graders.grade import Grade, GradedSample, GradeFault, Surroundings
from logitless.training.scratch import byte_vocabulary

ANSWERS = [(np.array([40 + i], np.int32), {"number": i}) for i in range(60)]


class Slow:
    """A grader whose time runs out for some answers, by their number."""

    name, kind = "slow", "endpoint"

    def __init__(self, hangs: Any) -> None:
        self.hangs, self.asked = hangs, 0

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        self.asked += 1
        if self.hangs(item["number"]):
            raise GradeFault("it took too long", timed_out=True)
        return Grade(1.0)


class Kept:
    """A grader that keeps the samples that it gets."""

    name, kind = "kept", "python"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        self.rows.append(sample.row)
        return Grade(1.0)


def test_graders_see_the_calls_of_a_rows_tools(shared_data: Path) -> None:
    source = (shared_data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    words = tokenizer.from_metadata({name: key.value for name, key in byte_vocabulary()[0].items()}, path="bytes")
    template, kept = ChatTemplate(source, bos_token="", eos_token="<|im_end|>"), Kept()
    text = 'So: <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    tokens = np.array(words.encode(text, add_special=False), np.int32)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    grade = grading(kept, AnswerReader(words, template), n_threads=1)
    assert [g.reward for g in grade([(tokens, {"tools": tools}), (tokens, {})])] == [1, 1]
    called, plain = kept.rows
    (call,) = called["output_tools"]
    assert called["output_text"].strip() == "So:"
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 2}
    assert (plain["output_text"], plain["output_tools"]) == (text, [])


@pytest.mark.parametrize(
    ("hangs", "asked", "n_faults"),
    [(lambda i: True, 2 * N_THREADS, 60), (lambda i: i % 2, 60, 30)],
    ids=["always", "now and then"],
)
def test_a_grader_that_hangs_is_not_asked_for_every_answer(hangs: Any, asked: int, n_faults: int) -> None:
    words = tokenizer.from_metadata({name: key.value for name, key in byte_vocabulary()[0].items()}, path="bytes")
    grader = Slow(hangs)
    grades = grading(grader, AnswerReader(words, None))(ANSWERS)
    assert grader.asked <= asked
    assert sum(grade.problem == "it took too long" for grade in grades) == n_faults
    assert sum(grade.reward for grade in grades) == 60 - n_faults


def test_a_job_whose_endpoint_hangs_fails_and_the_server_goes_on(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.Endpoint, "SECONDS", 0.3)
    monkeypatch.setattr("logitless.async_llm.AsyncLLM._around", lambda _: Surroundings(frozenset({"endpoint"})))
    greedy = SamplingParams(max_tokens=4, temperature=0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,  # takes connections, and says nothing
        LLM(shared_data / "models" / "stories260K.gguf", threads=1, ctx_size=256) as llm,
    ):
        before = llm.generate("Once upon", greedy).text
        spec = {"type": "endpoint", "url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        rows = [{"prompt": f"Once {i}"} for i in range(8)]
        job = llm.finetune(rows, method="reinforcement", grader=spec, n_samples=4, max_completion_tokens=2, n_epochs=1)
        told = []
        for event in job.events():
            told.append(event["message"])
            assert llm.generate("Once upon", greedy).text == before
        with pytest.raises(TrainingError, match=r"32 of 32 answers could not be graded: http.* took more than 0\.3"):
            job.wait()
        assert told[-1].startswith("The job failed: 32 of 32 answers could not be graded")
        assert llm.generate("Once upon", greedy).text == before
