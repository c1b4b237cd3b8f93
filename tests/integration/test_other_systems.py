"""Imports on systems without the modules of POSIX."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
for name in ("resource", "fcntl", "pwd", "grp", "termios", "pty"):
    sys.modules[name] = None
for name in ("sysconf", "getloadavg", "sched_getaffinity", "sched_setaffinity", "O_CLOEXEC"):
    delattr(os, name)
import logitless.llm, logitless.trainer, logitless.server.app, logitless.server.listen
import logitless.cli.main, logitless.cli.commands.serve, logitless.cli.commands.machine.doctor
import logitless.cli.commands.planning.plan, logitless.cli.commands.training.finetune
"""


def test_imports_without_modules_of_posix_succeed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
