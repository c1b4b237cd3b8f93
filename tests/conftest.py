"""Fixtures for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

from tests.helpers.fuzz import VARIABLE
from tests.helpers.hub_cache import HubCache, add_to_hub_cache

if TYPE_CHECKING:
    from logitless.graph.backend import Backend
    from tests.helpers.browser import Browser

REPO_ROOT = Path(__file__).resolve().parent.parent
# The same examples on every run, at any speed of the machine: a failure here fails everywhere.
# `scripts/fuzz-api` and `scripts/soak` explore further.
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("exploring", settings.get_profile("fixed"), derandomize=False)
settings.load_profile("fixed")
# Set before numpy is loaded, here and in the servers that tests start: its threads spin while
# waiting, on cores that the other worker needs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# OpenCL and Vulkan devices of tests are this processor, by PoCL and lavapipe. Their compilers take
# longer than the kernels that they optimise run here.
os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
os.environ.setdefault("GALLIVM_PERF", "nopt")
gc.disable()  # while modules are imported and tests collected, of which nothing is garbage

LONG = (  # files with the longest tests, which must not begin last
    "test_llama_cpp.py",
    "test_mtp_llama_cpp.py",
    "test_api_schema.py",
    "test_killed_rewards.py",
    "test_packaging.py",
    "test_gpu_attention.py",
    "test_vulkan.py",
    "test_llama_cpp_images.py",
    "test_worker.py",
    "test_fine_tuning.py",
    "test_ops.py",
    "test_page.py",
    "test_snippets.py",
    "test_router.py",
    "test_neon.py",
)
BY_HAND = ("--fuzz", "--image-table", "--long", "--lowest", "--peft", "--ray", "--real-models", "--trl")  # unbounded


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start long files first, so that no worker is left alone with one. Skip slow proofs without --long."""
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="a slow proof, by hand: --long"))
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """Exclude modules and tests from every later garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of models, vocabularies and llama.cpp outputs, beside the checkout."""
    path = REPO_ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no shared test data at {path}")
    return path


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """Adds files to a cache of huggingface-hub, which is this process's and that of the servers it starts. There are no
    other downloaded models."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    return partial(add_to_hub_cache, folder)


@pytest.fixture(scope="session")
def real_models(request: pytest.FixtureRequest) -> Path:
    """Folder of packages with real models (tests/helpers/real_models.py)."""
    if not (folder := request.config.getoption("--real-models")):
        pytest.skip("no --real-models FOLDER")
    return Path(folder)


def rewrite_assertions(config: pytest.Config) -> None:
    """Write the bytecode of all test modules, on two cores: each worker would rewrite all of them for 7 s.

    By forks and pytest's own functions: none that is public writes bytecode without running the module
    (`--collect-only` in two processes would import all of the package, too)."""
    paths = sorted([*REPO_ROOT.glob("tests/**/test_*.py"), *REPO_ROOT.glob("tests/**/conftest.py")])
    children = []
    for part in (paths[::2], paths[1::2]):
        if pid := os.fork():
            children.append(pid)
            continue
        with contextlib.suppress(Exception):  # pytest's own functions; without them the workers do it
            for path in part:
                pyc = rewrite.get_cache_dir(path) / (path.name[:-3] + rewrite.PYC_TAIL)
                if rewrite.try_makedirs(pyc.parent) and rewrite._read_pyc(path, pyc) is None:
                    digest, code = rewrite._rewrite_test(path, config)
                    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, pyc)
        os._exit(0)
    for pid in children:
        os.waitpid(pid, 0)


def compile_here() -> None:
    """Have no processes compile kernels for tests: each would import numba, and other workers use their cores."""
    from logitless.backends.cpu.compiler import jit

    pytest.MonkeyPatch().setattr(jit._workers, "submit", lambda names: None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: a slow proof whose claim a quicker test holds in small; --long runs it")
    compile_here()
    if config.getoption("numprocesses") and not hasattr(config, "workerinput") and not sys.dont_write_bytecode:
        rewrite_assertions(config)
    if any(map(config.getoption, BY_HAND)):
        config.option.timeout = 0
    if n := config.getoption("--fuzz"):
        os.environ[VARIABLE] = str(n)
        settings.load_profile("exploring")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-models",
        metavar="FOLDER",
        help="test with the models of packages (tests/integration/test_real_models.py)",
    )
    parser.addoption(
        "--fuzz",
        metavar="N",
        type=int,
        help="give bodies, uploads, templates, model files and RPC messages N times as many odd examples, other ones",
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="also run slow proofs (marked `long`), and compare 10,000 log-probabilities "
        "(tests/training/test_reinforcement.py), every weight type in every kernel (tests/helpers/op_cases.py)",
    )
    parser.addoption(
        "--lowest",
        action="store_true",
        help="install the lowest versions of all dependencies by uv, and serve (tests/test_packaging.py)",
    )
    parser.addoption(
        "--image-table",
        action="store_true",
        help="measure the table of docs/models.md (tests/models/vision/test_image_table.py)",
    )
    parser.addoption(
        "--peft", metavar="PYTHON", help="compare with peft and torch of this Python (tests/training/adapters)"
    )
    parser.addoption(
        "--trl",
        metavar="PYTHON",
        help="record trl's losses and gradients anew, by a Python that has it (tests/training/test_trl.py)",
    )
    parser.addoption(
        "--clients",
        metavar="PYTHON",
        action="append",
        default=[],
        help="an interpreter that has a client of tests/integration/test_clients.py; may be given again",
    )
    parser.addoption("--ray", action="store_true", help="test a fleet on Ray (tests/extras/ray/test_fleet.py)")
    parser.addoption(
        "--require-devices",
        action="store_true",
        help="fail, and do not skip, where OpenCL or Vulkan is not installed (as continuous integration does)",
    )
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="fail, and do not skip, where Chromium is not installed (as continuous integration does)",
    )


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """A headless Chromium, started once per session; skips the test where none is installed."""
    from tests.helpers.browser import Browser, executable

    program = executable()
    if program is None:
        told = "no Chromium is installed (scripts/install --browser)"
        pytest.fail(told) if request.config.getoption("--require-browser") else pytest.skip(told)
    started = Browser(program)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def open_device(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Backend]]:
    """Opens a device by name, once per session; skips the test without such a device."""
    from logitless.backends.errors import DeviceError
    from logitless.backends.registry import open_backends

    opened: dict[str, Backend] = {}

    def open_(name: str) -> Backend:
        if name not in opened:
            try:
                opened[name] = open_backends([name])[0]
            except DeviceError as error:
                if request.config.getoption("--require-devices"):
                    raise
                pytest.skip(str(error))
        return opened[name]

    yield open_
    for backend in opened.values():
        backend.close()
