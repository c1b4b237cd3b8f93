"""Log of the server: to the terminal and to --log-file."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError
from logitless.models.gguf.atomic_write import open_private


class LogFile(logging.FileHandler):
    """Log file. The first write error (a full disk) is reported on stderr; later ones are not."""

    _reported = False

    def _open(self) -> TextIOWrapper:
        """A new file is the user's alone: it has names and times of requests."""
        os.close(open_private(self.baseFilename, os.O_WRONLY | os.O_CREAT))
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            with suppress(OSError):
                print(f"logitless: --log-file {self.baseFilename}: {error.strerror}", file=sys.stderr, flush=True)


class _JSON(logging.Formatter):
    """A record as a line of JSON; what it says beside its text are further members."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


class _Text(logging.Formatter):
    """A record as a line of text. The clock's text is made once a second."""

    _made: tuple[int, str] = (-1, "")

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name}: {record.getMessage()}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        made = self._made  # as of one moment: any thread may log
        if made[0] != second:
            made = self._made = second, time.strftime(self.default_time_format, time.localtime(second))
        return f"{made[1]},{int(record.msecs):03d}"


class _Line(logging.Handler):
    """Warnings as lines on stderr, as the command line's own."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(f"logitless: warning: {record.getMessage()}", file=sys.stderr, flush=True)


def say_warnings() -> None:
    """Show warnings of a command that keeps no log."""
    logger = logging.getLogger("logitless")
    if not logger.handlers:
        logger.addHandler(_Line(logging.WARNING))


def start_log(options: SimpleNamespace) -> None:
    """Start logging to the terminal and --log-file."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if options.log_file:
        try:
            handlers.append(LogFile(options.log_file, encoding="utf-8"))
        except OSError as error:
            raise CliError(f"--log-file {options.log_file}: {error.strerror}") from None
    logging.getLogger("logitless").handlers.clear()
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    formatter = _JSON() if options.log_format == "json" else _Text(layout)
    for handler in handlers:
        handler.setFormatter(formatter)
    # what no line shows, and takes a third of a record's time
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=logging.WARNING, handlers=handlers)
    logging.getLogger("logitless").setLevel(logging.DEBUG if options.verbose else logging.INFO)
    if options.log_disable:
        logging.disable()
