"""Fleet on Ray for tests by hand: deployed by the command line, with a client, and the processes of its actors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI


@contextmanager
def fleet(config: dict[str, Any], folder: Path, port: int) -> Iterator[OpenAI]:
    """A client of the fleet that a configuration describes."""
    (folder / "fleet.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "logitless", "ray", "deploy", str(folder / "fleet.yaml"), "--address", "local"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
    try:
        until(lambda: b"is served below" in (folder / "log").read_bytes() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def until(holds: Callable[[], object]) -> None:
    """Wait until something outside of this process holds."""
    tick = threading.Event()
    while not holds():
        tick.wait(0.1)


def actors(name: bytes) -> list[int]:
    """Process ids of the actors whose title has a name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if name in path.read_bytes():
                found.append(int(path.parent.name))
    return found
