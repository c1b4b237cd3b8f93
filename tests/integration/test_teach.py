"""Commands of docs/teach.md, typed as they stand, reach the page's figures (--long)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.test_docs import blocks, commands

PAGE = ROOT / "docs" / "teach.md"


@pytest.mark.long
def test_the_page_teaches(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stderr

    (tmp_path / "model.gguf").symlink_to(ROOT / "models" / "demo" / "shakespeare.gguf")
    run("-W", "error", "-c", blocks(PAGE, "python")[0])
    examples, preference, reward = (
        run("-m", "logitless", *words, "-t", "1") for words in commands(PAGE) if words[0] == "finetune"
    )
    assert "accuracy 100.0 %" in examples
    (accuracy,) = re.findall(r"accuracy (\S+) %", preference)
    assert float(accuracy) >= 90
    rewards = [float(x) for x in re.findall(r"iter=\d+/64 .*mean_reward=(\S+)", reward)]
    assert rewards[0] < 0.2
    assert sum(rewards[-8:]) / 8 > 0.9
    (valid,) = re.findall(r"logitless: mean reward \S+ → \S+, validation mean reward (\S+)", reward)
    assert "training loss" not in reward
    assert float(valid) > 0.9
    for name in ("examples", "preference", "reward"):
        assert (tmp_path / f"teach-{name}.svg").read_text() == (ROOT / "docs" / f"teach-{name}.svg").read_text()
