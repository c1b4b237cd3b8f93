"""docs/verify.md: its loop gives the text of one request, greedy and sampled."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from tests.integration.conftest import ServerFactory

PAGE = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def loop(serve_here_module: ServerFactory) -> dict[str, Any]:
    """The names that the page's program defines, for a server of the demo."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    url = serve_here_module(None, "--demo", "-c", "512").url
    names: dict[str, Any] = {}
    exec(program.replace('"http://127.0.0.1:8080"', repr(url)).replace("print(", "text = ("), names)
    return names


def test_the_program_as_it_stands_prints_a_text(loop: dict[str, Any]) -> None:
    assert len(loop["text"]) >= 32


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 9, "repeat_penalty": 1.3}],
)
def test_a_loop_of_drafts_gives_the_text_of_one_request(loop: dict[str, Any], sampling: dict[str, Any]) -> None:
    prompt = "First Citizen:\nFirst Citizen:\n"
    whole = loop["post"]("/completion", prompt=prompt, n_predict=48, **sampling)
    assert loop["generate"](prompt, 48, **sampling) == whole["content"]
