"""Graders over HTTP, through the official client's own paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import ClientFactory, ServerFactory

CHECK: Any = {
    "type": "string_check", "name": "exact", "operation": "eq",
    "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
}  # fmt: skip


def test_graders_are_tried_by_hand(serve_here: ServerFactory, connect: ClientFactory, shared_data: Path) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("--alias", "stories", "-c", "256", "--chat-template", "chatml", "--allow-graders", "python")
    server = serve_here(model, *flags)
    graders = connect(f"{server.url}/v1", "none").fine_tuning.alpha.graders
    assert graders.validate(grader=CHECK).grader is not None
    right = graders.run(grader=CHECK, model_sample="4", item={"answer": "4"})
    assert (right.reward, right.metadata.name, right.metadata.type) == (1, "exact", "string_check")
    assert not any(v for v in right.metadata.errors.to_dict().values())
    wrong = graders.run(grader=CHECK, model_sample="4", item={})
    assert wrong.reward == 0
    assert wrong.metadata.errors.invalid_variable_error
    source = "def grade(sample, item):\n    return len(sample['output_text']) / item['n']"
    python: Any = {"type": "python", "name": "length", "source": source}
    both: Any = {
        "type": "multi", "name": "both", "graders": {"a": CHECK, "b": python}, "calculate_output": "a + b",
    }  # fmt: skip
    found = graders.run(grader=both, model_sample="four", item={"answer": "four", "n": 8})
    assert (found.reward, found.sub_rewards) == (1.5, {"a": 1.0, "b": 0.5})
    failed = graders.run(grader=python, model_sample="four", item={"n": 0})
    assert failed.metadata.errors.python_grader_runtime_error
    assert "ZeroDivisionError" in str(failed.metadata.errors.python_grader_runtime_error_details)

    score: Any = {
        "type": "score_model", "name": "judge", "model": "stories", "range": [0, 10],
        "input": [{"role": "user", "content": "How good is {{ sample.output_text }}?"}],
        "sampling_params": {"temperature": 0, "max_completions_tokens": 24},
    }  # fmt: skip
    own = graders.run(grader=score, model_sample="it")
    assert 0 <= own.reward <= 10
    assert own.metadata.sampled_model_name == "stories" or own.metadata.errors.api_model_grader_parse_error
    other = graders.run(grader={**score, "model": "gpt"}, model_sample="it")
    assert "there is no model 'gpt' to ask" in str(other.metadata.errors.api_model_grader_server_error_details)
    for spec, told in (
        ({**CHECK, "operation": "gt"}, "field 'grader.operation': must be one of eq, ne, like, ilike"),
        ({"type": "endpoint", "url": "http://127.0.0.1:1"}, "start with --allow-graders endpoint"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            graders.validate(grader=spec)  # type: ignore[arg-type]
