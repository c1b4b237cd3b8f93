"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graph.backend import Backend

REPO_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Models, vocabularies and expected outputs made with llama.cpp, which lie beside the checkout, not in it."""
    path = REPO_ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no shared test data at {path}")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
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
def open_device(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Backend]]:
    """Opens a device by name, once a session; skips the test where the machine has none."""
    from backends.errors import DeviceError
    from server.engine import open_backends

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
