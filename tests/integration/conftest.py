"""Fixtures: a real server in a process of its own, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

ServerFactory = Callable[..., "Server"]
ClientFactory = Callable[..., "OpenAI"]


class Address:
    """A server's address, with requests to it."""

    url: str

    def wait_until_loaded(self) -> None:
        """/health answers 503 while the model loads; each look takes as long as the server holds it."""
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=60):
                    return
            except urllib.error.HTTPError as error:
                error.read()
                if error.code != 503:
                    raise
                self.check(error)
            except OSError as error:  # nobody listens
                self.check(error)
                raise

    def check(self, error: OSError) -> None:
        """RuntimeError: the server has ended."""

    def post(self, path: str, body: dict[str, Any], key: str = "none") -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text


class LocalServer(Address):
    """`logitless serve` on a thread of this process: it neither imports nor compiles anything twice.

    Its command line is that of the command; without its log, its signals and its exit code.
    """

    def __init__(self, model: Path | None, *flags: str) -> None:
        from logitless.cli.command_table import COMMANDS
        from logitless.cli.flags.flags import parse

        words = ["--port", "0", *flags, *([] if model is None else ["-m", str(model)])]
        words += [] if "-t" in flags else ["-t", "1"]
        command = next(c for c in COMMANDS if c.name == "serve")
        self._options = parse([f for g in command.groups for f in g.flags], words, os.environ, command.words)
        self._listens, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        self._listens.wait(60)
        self.check(OSError("no address"))
        self.wait_until_loaded()

    def _run(self) -> None:
        here, server, log = threading.get_ident(), self, logging.getLogger("logitless.http")

        class Lines(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                match = re.search(r"listening on (http://\S+)", record.getMessage())
                if match and threading.get_ident() == here:
                    server.url = match.group(1)
                    server._listens.set()

        handler, level, interval = Lines(), log.level, sys.getswitchinterval()
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._listens.set()
            log.removeHandler(handler)
            log.setLevel(level)
            sys.setswitchinterval(interval)

    async def _serve(self) -> None:
        from logitless.cli.commands import serve
        from logitless.cli.setup.model import find_draft_model, find_projector, named_model
        from logitless.engine.loading.open_model import demo_model

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        path = named_model(self._options) or demo_model()
        find_draft_model(self._options, path)
        find_projector(self._options, path)
        await serve._serve(self._options, path)

    def check(self, error: OSError) -> None:
        if not self._thread.is_alive() or self._error is not None:
            raise RuntimeError(f"the server ended: {self._error}") from error

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self._error is None, self._error


class Server(Address):
    """`logitless serve` as a child process; `url` is its address once the model is loaded.

    With one thread unless `flags` say otherwise: other tests run beside this one, and threads wait for each other.
    """

    def __init__(self, model: Path | None, *flags: str) -> None:
        command = [sys.executable, "-m", "logitless", "serve", "--port", "0", *flags]
        if model is not None:
            command += ["-m", str(model)]
        if "-t" not in flags:
            command += ["-t", "1"]
        told = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # a crash says where
        pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, env=told, **pipes)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:  # ends with the process, so a failed start cannot hang
            self.log.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found.group(1)
                break
        else:
            raise RuntimeError(f"the server ended: {''.join(self.log)}")
        self._said = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)  # a full pipe would stop the server
        self._reading.start()
        self.wait_until_loaded()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self._said:
                self.log.append(line)
                self._said.notify_all()

    def line(self, pattern: str) -> str:
        """The newest line of the log that matches, waited for."""
        with self._said:
            found: list[str] = []
            assert self._said.wait_for(lambda: found.extend(x for x in self.log if re.search(pattern, x)) or found, 60)
            return found[-1]

    def ended(self) -> str:
        """Wait for the end of the process; its log."""
        self.process.wait(20)
        self._reading.join(20)
        return "".join(self.log)

    def check(self, error: OSError) -> None:
        if not isinstance(error, urllib.error.HTTPError):
            self.process.kill()
        elif self.process.poll() is None:
            return
        raise RuntimeError(f"{error}: {self.ended()}, ended by {self.process.returncode}") from error

    def stop(self) -> int:
        self.process.terminate()
        self.ended()
        return self.process.returncode


@contextlib.contextmanager
def servers() -> Iterator[ServerFactory]:
    """A function that starts servers; they all end with the context."""
    started: list[Server] = []

    def start(model: Path | None, *flags: str) -> Server:
        started.append(Server(model, *flags))
        return started[-1]

    yield start
    crashed = [server.process for server in started if (server.process.poll() or 0) not in (0, -signal.SIGKILL)]
    for server in started:
        server.process.terminate()
    for server in started:
        told = server.ended()
        assert server.process.stderr is not None
        server.process.stderr.close()
        if server.process in crashed:
            print(f"a server ended by itself with {server.process.returncode}: {told}")


@contextlib.contextmanager
def local_servers() -> Iterator[Callable[..., LocalServer]]:
    """The same on threads of this process."""
    with contextlib.ExitStack() as started:

        def start(model: Path | None, *flags: str) -> LocalServer:
            server = LocalServer(model, *flags)
            started.callback(server.stop)
            return server

        yield start


@pytest.fixture
def connect() -> Iterator[ClientFactory]:
    """OpenAI's client of a server's address and key; its connections end with the test."""
    from openai import OpenAI

    with contextlib.ExitStack() as clients:

        def open_client(url: str, key: str = "none", **options: Any) -> OpenAI:
            return clients.enter_context(OpenAI(base_url=url, api_key=key, max_retries=0, **options))

        yield open_client


@pytest.fixture
def serve() -> Iterator[ServerFactory]:
    """Start servers; they end with the test."""
    with servers() as start:
        yield start


@pytest.fixture(scope="module")
def serve_module() -> Iterator[ServerFactory]:
    """The same, for servers that the tests of a file share."""
    with servers() as start:
        yield start


@pytest.fixture
def serve_here() -> Iterator[Callable[..., LocalServer]]:
    """Start servers in this process; they end with the test."""
    with local_servers() as start:
        yield start


@pytest.fixture(scope="module")
def serve_here_module() -> Iterator[Callable[..., LocalServer]]:
    """The same, for servers that the tests of a file share."""
    with local_servers() as start:
        yield start
