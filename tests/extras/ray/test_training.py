"""Data-parallel training on Ray, by hand: `pytest --ray tests/extras/ray/test_training.py` (three minutes)."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

N_STEPS = 8
Kill = Callable[[int, int], None]  # with the pid of the command, and the step that has ended


@pytest.fixture(params=["--lora-out", "-o"])
def trained(request: pytest.FixtureRequest, shared_data: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Run of `finetune`, or with `workers` of `ray finetune`: the hashes of its result and its checkpoint."""
    if not request.config.getoption("--ray"):
        pytest.skip("--ray is not given")
    model = shared_data / "models" / "stories260K.gguf"

    def run(workers: int = 1, *, n_steps: int = N_STEPS, resume: bool = False, kill: Kill | None = None) -> list[str]:
        words = ["ray", "finetune", "--address", "local"] if workers > 1 else ["finetune"]
        files = [tmp_path / "result.gguf", tmp_path / "checkpoint.gguf"]
        command = [sys.executable, "-m", "logitless", *words, "-m", str(model), "--file", str(ROOT / "README.md")]
        command += f"-c 64 -b 2 --grad-acc 5 --save-every 0 -t 1 --warmup 2 --adam-iter {n_steps}".split()
        command += ["--workers", str(workers), request.param, str(files[0]), "--checkpoint-out", str(files[1])]
        command += ["--checkpoint-in", str(files[1])] if resume else []
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            told = ""
            for line in process.stderr:
                told += line
                if kill is not None and "iter=" in line:
                    kill(process.pid, int(line.partition("iter=")[2].partition("/")[0]))
        assert process.returncode == 0, told
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]

    return run


def actors(ancestor: int) -> list[int]:
    """Process ids of the workers below a process."""
    parents, named = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if b"ray::_Worker" in (path / "cmdline").read_bytes():
                named.append(int(path.name))

    def below(pid: int) -> bool:
        return pid == ancestor or (pid in parents and below(parents[pid]))

    return [pid for pid in named if below(pid)]


def test_any_number_of_actors_ends_with_the_bytes_of_one_process(trained: Callable[..., list[str]]) -> None:
    alone = trained()
    assert trained(2) == alone
    assert trained(3) == alone


def test_a_killed_actor_changes_no_byte(trained: Callable[..., list[str]]) -> None:
    step, killed = random.randrange(1, N_STEPS), []

    def kill(pid: int, done: int) -> None:
        if done == step and not killed:
            killed.append(random.choice(actors(pid)))
            os.kill(killed[0], signal.SIGKILL)

    alone = trained()
    assert trained(3, kill=kill) == alone, f"step {step}"
    assert killed


def test_a_checkpoint_goes_on_with_another_number_of_actors(trained: Callable[..., list[str]]) -> None:
    alone = trained()
    trained(3, n_steps=4)
    assert trained(2, resume=True) == alone
