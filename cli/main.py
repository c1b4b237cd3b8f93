"""The console script `logitless`: finds the command, reads its flags, and turns every failure into one line.

Exit codes: 0 done, 1 it could not be done, 2 the command line is wrong, 130 interrupted. Imports nothing heavy itself:
a command's module is imported only when that command runs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from logitless.cli.command import Command
from logitless.cli.command_table import COMMANDS
from logitless.cli.flags.flags import CliError, UsageError, parse, unknown
from logitless.cli.log import say_ignored, say_warnings
from logitless.engine.loading.options import OptionConflict, OptionError

_HELP = ("-h", "--help", "--help-all", "--usage")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the last garbage collection of the process took 0.25 s
        atexit.register(gc.freeze)
    _open_streams()
    try:
        return _dispatch(words)
    except CliError as error:
        return _fail(str(error), error.code)
    except OptionError as error:
        return _fail(str(error), CliError.code if isinstance(error, OptionConflict) else UsageError.code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 141
    except MemoryError as error:
        return _fail(f"out of memory{f' ({error})' if str(error) else ''}", 1)
    except Exception as error:
        return _fail(_explain(error, verbose="-v" in words or "--verbose" in words), 1)


def _open_streams() -> None:
    """Open standard streams that the parent closed, else the first socket would become standard input."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for as long as we run)
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        lossless = out.errors == "surrogateescape" and out.encoding.lower() == "utf-8"
        if out.errors in ("strict", "surrogateescape") and not lossless:
            out.reconfigure(errors="replace")  # a character that the terminal lacks must not fail


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("help", *_HELP):
        print(overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(version())
        return 0
    name = "serve" if words[0].startswith("-") else words.pop(0)  # a llama-server command line works as it is
    if words and f"{name} {words[0]}" in (c.name for c in COMMANDS):
        name += f" {words.pop(0)}"
    command = next((c for c in COMMANDS if c.name == name), None)
    group = [c for c in COMMANDS if c.name.startswith(f"{name} ")] if command is None else []
    if group and (not words or {*_HELP} & {*words}):
        print(overview(name, group))
        return 0 if words else 2
    if group:
        raise UsageError(f"unknown command: {name} {words[0]}; there are {', '.join(c.name for c in group)}")
    if command is None:
        line = unknown("--" + name, [f"--{c.name}" for c in COMMANDS]).replace("--", "").replace("flag", "command")
        raise UsageError(f"{line}; `logitless --help` lists them")
    if name == "completion" and not {*_HELP, "--version"} & {*words}:
        from logitless.cli.commands import completion

        print(completion.script(words, COMMANDS))
        return 0
    groups = command.groups
    if {*_HELP} & {*words}:
        from logitless.cli.flags import help

        usage, everything = f"{command.name} {command.usage}", "--help-all" in words
        print(help.of_command(usage, command.summary, groups, everything=everything))
        return 0
    if "--version" in words:
        print(version())
        return 0
    flags = [f for g in groups for f in g.flags]
    options = parse(flags, words, os.environ, command.words)
    say_warnings()
    if name != "serve":  # which logs it
        say_ignored(options)
    code: int = importlib.import_module(command.module).run(options)
    sys.stdout.flush()
    return code


def overview(group: str = "", commands: Sequence[Command] = COMMANDS) -> str:
    """The commands with their summaries: all of them, or those whose name begins with the group's."""
    from logitless.cli.flags import help

    rows = help.table(((c.name, c.summary) for c in commands), width=17)
    if group:
        return f"usage: logitless {group} COMMAND [flags]\n\nCommands:\n{rows}"
    summary = help.wrapped("Serves a GGUF model over OpenAI's API, with sampling on the device.")
    flags = help.table((("-h, --help", "Show this and leave."), ("--version", "Show the version and leave.")), width=17)
    return f"usage: logitless COMMAND [flags]\n\n{summary}\n\nCommands:\n{rows}\n\nFlags:\n{flags}\n\n" + help.wrapped(
        "`logitless COMMAND --help` shows a command's flags, --help-all the rare ones too. Flags without a "
        "command mean `serve`."
    )


def version() -> str:
    from importlib import metadata

    try:
        return f"logitless {metadata.version('logitless')}"
    except metadata.PackageNotFoundError:
        return "logitless (from source)"


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print("logitless: " + " ".join(message.split()), file=sys.stderr)
    return code


def _explain(error: Exception, verbose: bool) -> str:
    """One line about an exception; of an internal error with its place in the code."""
    from logitless.backends.errors import DeviceError
    from logitless.engine.errors import RequestError
    from logitless.models.errors import ModelFileError

    if isinstance(error, DeviceError | ModelFileError | RequestError):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"internal error: {type(error).__name__}: {error}{where}"


if __name__ == "__main__":
    sys.exit(main())
