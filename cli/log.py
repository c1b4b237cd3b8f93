"""Log of the server: to the terminal and to --log-file."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import TextIOWrapper
from types import SimpleNamespace
from typing import Any

from logitless.cli.flags.flags import CliError
from logitless.models.atomic_write import open_private


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


@dataclass(frozen=True)
class LineStyle:
    """The parts of a line of the log (--log-timestamps, --log-prefix, --log-colors), and the least level."""

    level: int = logging.INFO
    time: bool = True
    prefix: bool = True
    colors: bool = False

    @classmethod
    def of(cls, options: SimpleNamespace) -> LineStyle:
        """The style of lines for the terminal."""
        stream = sys.stdout if options.log_jsonl else sys.stderr
        colored = options.log_colors == "on" or (options.log_colors == "auto" and stream.isatty())
        level = logging.DEBUG if options.verbose else _LEVELS[min(options.verbosity, len(_LEVELS) - 1)]
        return cls(level, options.log_timestamps, options.log_prefix, colored)

    def line(self, clock: str, level: str, logger: str, text: str) -> str:
        """A line of text of its parts."""
        if self.prefix and self.colors and level in _COLORS:
            text = f"\x1b[{_COLORS[level]}m{level}\x1b[0m {logger}: {text}"
        elif self.prefix:
            text = f"{level} {logger}: {text}"
        return f"{clock} {text}" if self.time else text

    def members(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Members of a line of JSON, without those that the flags leave out."""
        left_out = {*(() if self.time else ("time",)), *(() if self.prefix else ("level", "logger"))}
        return {name: value for name, value in fields.items() if name not in left_out}

    def passes(self, level: str) -> bool:
        """True if lines of this level are told."""
        return int(getattr(logging, level.upper(), logging.CRITICAL)) >= self.level

    def relayed(self, line: str) -> str | None:
        """A line of another process's log in this style; None: it is left out."""
        if match := _LINE.fullmatch(line):
            return self.line(*match.groups()) if self.passes(match[2]) else None
        return line if self.level <= logging.CRITICAL else None


_LEVELS = (logging.CRITICAL + 1, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)  # of --verbosity
_COLORS = {"DEBUG": 36, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) ([\w.]+): (.*)")


class _JSON(logging.Formatter):
    """A record as a line of JSON; what it says beside its text are further members."""

    def __init__(self, style: LineStyle) -> None:
        super().__init__()
        self._parts = style

    def format(self, record: logging.LogRecord) -> str:
        fields = self._parts.members(
            {
                "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
                **getattr(record, "fields", {}),
            }
        )
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _Text(logging.Formatter):
    """A record as a line of text. The clock's text is made once a second."""

    _stamp: tuple[int, str] = (-1, "")

    def __init__(self, style: LineStyle) -> None:
        super().__init__(style.line("%(asctime)s", "%(levelname)s", "%(name)s", "%(message)s"))
        self._parts = style

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return self._parts.line(self.formatTime(record), record.levelname, record.name, record.getMessage())

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        stamp = self._stamp  # as of one moment: any thread may log
        if stamp[0] != second:
            stamp = self._stamp = second, time.strftime(self.default_time_format, time.localtime(second))
        return f"{stamp[1]},{int(record.msecs):03d}"


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


def say_ignored(options: SimpleNamespace) -> None:
    """Name the flags that are accepted and change nothing, in one line."""
    if options.notices:
        logging.getLogger("logitless.cli").warning("without effect here: %s", ", ".join(dict.fromkeys(options.notices)))


def start_log(options: SimpleNamespace) -> None:
    """Start logging to the terminal and --log-file."""
    style = LineStyle.of(options)
    layout = _JSON if options.log_jsonl or options.log_format == "json" else _Text
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout if options.log_jsonl else None)]
    handlers[0].setFormatter(layout(style))
    if options.log_file:
        try:
            handlers.append(LogFile(options.log_file, encoding="utf-8"))
        except OSError as error:
            raise CliError(f"--log-file {options.log_file}: {error.strerror}") from None
        handlers[1].setFormatter(layout(replace(style, colors=False)))
    logging.getLogger("logitless").handlers.clear()
    # what no line shows, and takes a third of a record's time
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=max(style.level, logging.WARNING), handlers=handlers)
    logging.getLogger("logitless").setLevel(style.level)
    if options.log_disable:
        logging.disable()
