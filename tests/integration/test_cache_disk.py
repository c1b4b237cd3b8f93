"""Prompts on disk through the port: a restarted server goes on from them with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import command
from tests.helpers.paths import MODELS

STORY = "Once upon a time there was a little girl who lived in a house near the forest and she had a dog. " * 4
REST = {"n_predict": 20, "seed": 3, "temperature": 1.0, "n_probs": 3, "return_tokens": True, "ignore_eos": True}


@pytest.mark.parametrize("name", ["stories260K.gguf", "arch-gemma3-F32.gguf"])
def test_a_prompt_is_found_after_a_restart(serve_here: Any, tmp_path: Path, name: str) -> None:
    model = MODELS / name
    if not model.exists():
        pytest.skip(f"no {name} beside the checkout")
    flags = ["-c", "512", "-np", "1", "--metrics", "--cache-disk", str(tmp_path / "new"), "--cache-disk-size", "64"]
    first = serve_here(model, *flags)
    expected = first.post("/completion", {"prompt": STORY, **REST})
    first.stop()
    second = serve_here(model, *flags)
    again = second.post("/completion", {"prompt": STORY, **REST})
    assert again["timings"]["cache_n"] >= expected["timings"]["prompt_n"] // 16 * 16 - 16 > 64
    for key in ("content", "tokens", "completion_probabilities"):
        assert again[key] == expected[key]
    metrics = dict(line.rsplit(" ", 1) for line in second.get("/metrics").splitlines() if line[:1] not in ("#", ""))
    counts = {key.partition(":disk_")[2]: float(n) for key, n in metrics.items() if ":disk_" in key}
    assert counts["pages_restored_total"] * 100 < counts["bytes_read_total"] <= counts["cache_bytes"]


def test_flags_that_do_not_fit_are_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for flags, reason in (
        (["--cache-disk-size", "9"], "--cache-disk-size: needs --cache-disk"),
        (["--cache-disk", "d", "--no-cache-idle-slots"], "--cache-disk: keeps prompts of idle slots, which --no-cac"),
        (["--cache-disk", ""], "--cache-disk: '' names no folder"),
        (["--cache-disk", "d", "--cache-disk-size", "0"], "--cache-disk-size: '0' is not a whole number from 1"),
        (["--cache-disk", str(tmp_path / "file" / "d")], "Not a directory"),
    ):
        done = command("serve", *flags)
        assert done.returncode != 0
        assert reason in done.stderr.decode()
        assert "Traceback" not in done.stderr.decode()
