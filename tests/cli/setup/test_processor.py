"""Processors of the process: --cpu-mask and --cpu-range, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.backends import host
from logitless.backends.errors import DeviceError
from logitless.cli.setup import processor
from tests.helpers.paths import ROOT

RUN = """
import os, sys
from logitless.cli.flags.flags import CliError, parse
from logitless.cli.flags.options import PROCESSOR
from logitless.cli.setup.processor import settle
try:
    settle(parse(PROCESSOR.flags, sys.argv[1:], {}))
    print(sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0))
except CliError as error:
    print(error)
"""


def answer(*words: str) -> str:
    got = subprocess.run([sys.executable, "-c", RUN, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert got.returncode == 0, got.stderr
    return got.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not Linux")
def test_a_mask_and_a_range_choose_the_processors() -> None:
    usable = sorted(os.sched_getaffinity(0))
    first, nice = usable[0], int(answer().rpartition(" ")[2])
    assert answer("-C", f"{1 << first:x}") == f"[{first}] {nice}"
    assert answer("-Cr", f"{first}-{first}", "-C", f"{sum(1 << cpu for cpu in usable):x}") == f"{usable} {nice}"
    assert answer() == f"{usable} {nice}"
    assert answer("--prio", "-1").endswith(" 5" if nice < 5 else str(nice))
    assert "may use none of them" in answer("-Cr", "4000-4090")


@pytest.mark.parametrize(("name", "value"), [("LOGITLESS_ISA", "foo"), ("LOGITLESS_CPU_BF16", "yes")])
def test_variables_of_other_kernels_end_the_start(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    for look in (host.isa, host.casts_to_bf16):
        look.cache_clear()
    try:
        with pytest.raises(DeviceError, match=rf"^{name}={value}: must be "):
            processor.settle(
                SimpleNamespace(load_mode="auto", numa=None, poll=50, cpu_mask=None, cpu_range=None, prio=0)
            )
    finally:
        for look in (host.isa, host.casts_to_bf16):
            look.cache_clear()


NODES_RUN = (
    """
import sys
from pathlib import Path
from logitless.backends import system_files
system_files.ROOT = Path(sys.argv.pop(1))
"""
    + RUN
)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not Linux")
def test_isolate_keeps_to_the_node_of_the_start(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    for i, cpus in enumerate((usable[::2], usable[1::2], [])):  # the last one has memory only
        node = tmp_path / "sys/devices/system/node" / f"node{i}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(",".join(map(str, cpus)) + "\n")

    def answer(*words: str) -> str:
        words = (sys.executable, "-c", NODES_RUN, str(tmp_path), *words)
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout

    chosen = answer("--numa", "isolate").partition("]")[0] + "]"
    assert chosen in ([str(usable[::2]), str(usable[1::2])] if len(usable) > 1 else [str(usable)])
    assert answer("--numa", "numactl").startswith(str(usable))
    if len(usable) > 1:
        assert answer("--numa", "distribute").startswith("--numa distribute: start with `numactl --interleave=all`")


LOCK = """
import sys
from logitless.cli.flags.flags import parse
from logitless.cli.flags.options import PROCESSOR
from logitless.cli.setup.processor import lock_memory
options = parse(PROCESSOR.flags, sys.argv[1:], {})
lock_memory(options, exceeded=True)  # by weights
print(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1])
lock_memory(options)
print(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="not Linux")
@pytest.mark.parametrize("words", [["--mlock"], ["-lm", "mlock"], ["-lm", "mmap+mlock"], ["-lm", "mmap"], []])
def test_memory_is_locked_where_the_system_allows_it(words: list[str]) -> None:
    got = subprocess.run([sys.executable, "-c", LOCK, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert got.returncode == 0, got.stderr
    exceeded, locked = map(int, got.stdout.split())
    assert exceeded == 0
    if "mlock" in " ".join(words):
        assert got.stderr.startswith("--mlock: nothing is locked, for the weights exceed memory\n")
        assert locked > 0 or got.stderr.count("--mlock: ") == 2
    else:
        assert (locked, got.stderr) == (0, "")
