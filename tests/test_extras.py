"""Extras: the core runs without their folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from logitless.cli.command_table import COMMANDS
from logitless.server.routes import ROUTES
from tests.helpers.paths import ROOT

REPORT = """
import json, sys
import logitless.router.app
from logitless import LLM, SamplingParams
from logitless.cli.command_table import COMMANDS
from logitless.server.routes import routes
with LLM(threads=1) as llm:
    text = llm.chat([{"role": "user", "content": "Good"}], SamplingParams(temperature=0, max_tokens=4)).text
extras = [m for m in sys.modules if m.startswith("logitless.extras")]
print(json.dumps({"commands": [c.name for c in COMMANDS], "routes": [r.path for r in routes()], "text": text,
                  "extras": extras}))
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy without extras."""
    (tmp_path / "logitless").mkdir()
    for path in (ROOT / "logitless").iterdir():
        if path.name not in ("extras", "__pycache__"):
            (tmp_path / "logitless" / path.name).symlink_to(path.resolve())
    return tmp_path


def test_core_without_extras_serves_a_chat_with_its_own_routes_and_commands(core: Path) -> None:
    done = subprocess.run([sys.executable, "-c", REPORT], cwd=core, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["extras"] == []
    assert report["text"] != ""
    assert set(report["routes"]) == {route.path for route in ROUTES} - {"/predict"}
    assert {command.name for command in COMMANDS} - set(report["commands"]) == {"ray deploy", "ray finetune"}
