"""Sandbox of chat templates: processes that render the templates of model files and can be ended.

A template comes with a model's file, so anybody may have written it. It runs in a process of its
own with bounded processor time and memory. A template that exceeds a bound
ends its process and fails one request; the next request has a new process."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from logitless.models.chat.errors import ChatTemplateError, ExceededBounds

MAX_SECONDS = 5.0  # processor time of one rendering
MAX_BYTES = 1 << 30  # address space of a process
MAX_PROCESSES = 4
_LENGTH = struct.Struct("<Q")


class SandboxedRenderer:
    """A template that is rendered in another process. Raises ChatTemplateError if it is not valid Jinja."""

    def __init__(self, source: str) -> None:
        self._source = source
        _POOL.run(source, None)

    def __call__(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables. Raises ChatTemplateError, also if the template exceeds a bound."""
        return _POOL.run(self._source, variables)


class _Process:
    """One process, for one rendering at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "logitless.models.chat.sandbox"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def run(self, source: str, variables: Mapping[str, Any] | None) -> tuple[bool, str]:
        """(True, text) or (False, problem). Raises EOFError if the process has ended."""
        try:
            request = pickle.dumps((source, variables, MAX_SECONDS, MAX_BYTES))
        except RecursionError:
            return False, "the messages are nested too deeply"
        try:
            _send(self._stdin, request)
            reply = _receive(self._stdout)
        except OSError:
            reply = b""
        if not reply:
            raise EOFError
        is_text, text = json.loads(reply)
        return bool(is_text), str(text)

    def end(self) -> int:
        """End the process and return its exit status."""
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):  # it has ended with a request unread
                pipe.close()
        return self._process.wait()


class _Pool:
    """Processes that are started when they are needed, and kept."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)

    def run(self, source: str, variables: Mapping[str, Any] | None) -> str:
        with self._places:
            process = self._idle.pop() if self._idle else _Process()
            try:
                is_text, text = process.run(source, variables)
            except EOFError:
                raise ExceededBounds(_ended(process.end())) from None
            except BaseException:
                process.end()
                raise
            self._idle.append(process)
        if not is_text:
            raise ChatTemplateError(text)
        return text

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def forget(self) -> None:
        """Leave the processes to the parent: this is a forked child."""
        self.__init__()  # type: ignore[misc]


_POOL = _Pool()
atexit.register(_POOL.close)
os.register_at_fork(after_in_child=_POOL.forget)


def _ended(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"the chat template runs longer than {MAX_SECONDS:g} s"
    return f"the chat template ended its process (exit status {status})"


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    """The next message; empty at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return b""
    (n,) = _LENGTH.unpack(head)
    data = pipe.read(n)
    return data if len(data) == n else b""


def main() -> None:
    """Render the requests on standard input until it ends."""
    import functools
    import resource

    from logitless.models.chat.jinja import Renderer

    renderer = functools.lru_cache(maxsize=8)(Renderer)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while request := _receive(stdin):
        source, variables, seconds, n_bytes = pickle.loads(request)
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its default action ends the process
        try:
            render = renderer(source)
            reply = True, "" if variables is None else render(variables)
        except ChatTemplateError as error:
            reply = False, str(error)
        data = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(stdout, data)


if __name__ == "__main__":
    main()
