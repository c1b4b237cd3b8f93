"""Default number of threads on planted machines: SMT, efficiency cores, quotas of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from logitless.backends import cores, system_files
from logitless.cli.commands.machine import doctor

CPU = "sys/devices/system/cpu/cpu"
V1, V2 = "sys/fs/cgroup/cpu,cpuacct/", "sys/fs/cgroup/"
DOCKER = "4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab\n"
Files = dict[str, str]


def speeds(file: str, *groups: tuple[int, int]) -> Files:
    """A file of each processor: (how many, value), one group after the other."""
    values = [value for n, value in groups for _ in range(n)]
    return {f"{CPU}{cpu}/{file}": str(value) for cpu, value in enumerate(values)}


def pairs(n: int, distance: int) -> Files:
    """SMT: each of the first `n` processors has a sibling at this distance."""
    lists = {cpu: f"{cpu % distance},{cpu % distance + distance}" for cpu in range(2 * n)}
    return {f"{CPU}{cpu}/topology/thread_siblings_list": text for cpu, text in lists.items()}


ADJACENT = {f"{CPU}{cpu}/topology/thread_siblings_list": f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(4)}
METEOR_LAKE = {  # two P cores with two threads each, four E cores, two at low power
    **ADJACENT,
    **speeds("cpufreq/cpuinfo_max_freq", (4, 4_800_000), (4, 3_800_000), (2, 2_500_000)),
    "sys/devices/cpu_core/cpus": "0-3",
    "sys/devices/cpu_atom/cpus": "4-9",
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_files, "ROOT", tmp_path)
    for function in (cores._cores, cores.fast_cpus, cores.siblings):
        function.cache_clear()


@pytest.mark.parametrize(
    ("files", "usable", "threads"),
    [
        pytest.param({}, range(4), 4, id="nothing-known"),
        pytest.param(pairs(4, 4), range(8), 4, id="SMT"),
        pytest.param(pairs(4, 4), (0, 4, 5), 2, id="SMT-in-a-cpuset"),
        pytest.param(METEOR_LAKE, range(10), 6, id="hybrid"),
        pytest.param(METEOR_LAKE, (8, 9), 2, id="only-slow-cores"),
        pytest.param(speeds("cpufreq/cpuinfo_max_freq", (8, 57), (8, 33)), range(16), 16, id="dense-cores"),
        pytest.param(speeds("cpu_capacity", (4, 1024), (4, 250)), range(8), 4, id="little-cores"),
        pytest.param(speeds("cpu_capacity", (1, 1024), (3, 860), (4, 420)), range(8), 8, id="middle-cores"),
        pytest.param({V2 + "cpu.max": "150000 100000"}, range(8), 2, id="1.5-cpus"),
        pytest.param({V2 + "cpu.max": "125000 100000"}, range(8), 1, id="1.25-cpus"),
        pytest.param({V2 + "cpu.max": "20000 100000"}, range(8), 1, id="0.2-cpus"),
        pytest.param({V2 + "cpu.max": "1600000 100000"}, range(8), 8, id="more-than-the-machine"),
        pytest.param({V2 + "cpu.max": "max 100000"}, range(8), 8, id="no-limit"),
        pytest.param({**pairs(2, 2), V2 + "cpu.max": "350000 100000"}, range(4), 2, id="quota-and-SMT"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a.slice/b.service",
                V2 + "a.slice/cpu.max": "200000 100000",
                V2 + "a.slice/b.service/cpu.max": "max 100000",
            },
            range(8),
            2,
            id="quota-of-a-slice",
        ),
        pytest.param(
            {"proc/self/cgroup": DOCKER, V1 + "cpu.cfs_quota_us": "150000", V1 + "cpu.cfs_period_us": "50000"},
            range(8),
            3,
            id="version-1-in-a-container",
        ),
        pytest.param(
            {"proc/self/cgroup": DOCKER, V1 + "docker/ab/cpu.cfs_quota_us": "-1", V1 + "cpu.cfs_period_us": "100000"},
            range(8),
            8,
            id="version-1-without-limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a\udcff\n", V2 + "a\udcff/cpu.max": "200000 100000"},
            range(8),
            2,
            id="group-of-bytes",
        ),
        pytest.param({"proc/self/cgroup": "odd", V2 + "cpu.max": "200000 100000"}, range(8), 2, id="odd-group"),
        pytest.param({"proc/self/cgroup": "0::a\0b\n1:cpu:/\0"}, range(8), 8, id="group-of-no-path"),
        pytest.param({V2 + "cpu.max": "9" * 5000 + " 100000"}, range(8), 8, id="odd-quota"),
        pytest.param(
            {
                f"{CPU}0/topology/thread_siblings_list": "odd",
                f"{CPU}1/topology/thread_siblings_list": "0-",
                f"{CPU}2/topology/thread_siblings_list": "0-99999999999",
                "sys/devices/cpu_atom/cpus": "\udcff",
            },
            range(4),
            4,
            id="odd-lists",
        ),
    ],
)
def test_default_threads_fit_the_machine(
    plant: None, tmp_path: Path, files: Files, usable: range | tuple[int, ...], threads: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", errors="surrogateescape")
    assert cores._cores(frozenset(usable)) == threads


def test_doctor_names_quota_and_memory_nodes(plant: None, tmp_path: Path) -> None:
    files = {V2 + "cpu.max": "150000 100000"}
    files |= {f"sys/devices/system/node/node{i}/cpulist": text for i, text in enumerate(("0-3", "4-7", ""))}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    texts = [finding.text for finding in doctor._processor()]
    assert any("allows 1.50 cores" in text for text in texts)
    assert any(text.startswith("2 NUMA nodes") for text in texts)


def test_a_list_of_processors_is_read() -> None:
    assert cores.cpu_list("0-2,8\n") == {0, 1, 2, 8}
    assert cores.cpu_list("\n") == set()
