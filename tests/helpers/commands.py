"""Commands, run in this process instead of one of their own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from subprocess import CompletedProcess
from unittest.mock import patch

from logitless.cli.main import main


def command(
    *words: str, stdin: bytes = b"", encoding: str = "utf-8", errors: str = "strict", **environ: str
) -> CompletedProcess[bytes]:
    """Exit code and output of `logitless` with these words; llama.cpp's variables are those of `environ` alone.
    `encoding` and `errors` are the terminal's."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = [io.TextIOWrapper(stream, encoding, errors, write_through=True) for stream in (out, err)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")} | environ
    with (
        patch.dict(os.environ, variables, clear=True),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
        _signals_and_log(),
    ):
        code = main(words)
    return CompletedProcess(["logitless", *words], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _signals_and_log() -> Iterator[None]:
    """Those of this process come back when the command is done."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers, loggers = [signal.getsignal(n) for n in numbers], [logging.getLogger(), logging.getLogger("logitless")]
    before = [(log, log.level, log.handlers[:]) for log in loggers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for log, level, lines in before:
            log.setLevel(level)
            log.handlers[:] = lines
