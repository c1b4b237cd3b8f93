"""`logitless completion`: completion scripts for bash, zsh and fish, made from the commands' flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import LATER, Flag, UsageError
from logitless.engine.loading.values import Choice

if TYPE_CHECKING:
    from logitless.cli.command import Command

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS = ("FILE", "FILE:SCALE", "FILE.svg|png"), ("FOLDER", "DIR")  # metavars


def script(words: Sequence[str], commands: Sequence[Command]) -> str:
    """The script for the shell that `words` name. UsageError: they name none."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise UsageError(f"completion: give one shell of {', '.join(SHELLS)}")
    if words[0] == "fish":
        return _fish(commands)
    bash = _bash(commands)
    return f"autoload -Uz bashcompinit && bashcompinit\n{bash}" if words[0] == "zsh" else bash


def _flags(command: Command) -> list[Flag]:
    return [f for group in command.groups for f in group.flags if f.status != LATER]


def _choices(f: Flag) -> tuple[str, ...]:
    return f.kind.allowed if isinstance(f.kind, Choice) else f.optional


def _words(command: Command, commands: Sequence[Command]) -> tuple[str, ...]:
    """Words that may follow a command's name: the second word of other commands, or a shell."""
    if command.name == "completion":
        return SHELLS
    return tuple(c.name.split()[1] for c in commands if c.name.startswith(f"{command.name} "))


def _bash(commands: Sequence[Command]) -> str:
    """Two tables: the flags of each command, and the words or paths that a flag takes."""
    flags, values = [], []
    for command in commands:
        names = [*_words(command, commands), *(n for f in _flags(command) for n in (*f.all_names, *f.off_names))]
        flags.append(f"    {shlex.quote(command.name)}) words={shlex.quote(' '.join(names))} ;;")
        for f in _flags(command):
            action = ""
            if choices := _choices(f):
                action = f"words={shlex.quote(' '.join(choices))}"
            elif f.takes_value:
                action = f"path={_path_kind(f)}"
            if action:
                patterns = "|".join(shlex.quote(f"{command.name} {name}") for name in f.all_names)
                values.append(f"    {patterns}) {action} ;;")
    starts = " ".join(sorted({command.name.split()[0] for command in commands}))
    return _BASH.format(starts=starts, pairs=_pairs(commands), flags="\n".join(flags), values="\n".join(values))


def _path_kind(f: Flag) -> str:
    return "file" if f.metavar in FILES else "directory" if f.metavar in FOLDERS else "none"


def _pairs(commands: Iterable[Command]) -> str:
    """Commands of two words, as patterns."""
    return "|".join(shlex.quote(command.name) for command in commands if " " in command.name)


_BASH = """\
_logitless() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=serve words="" path=""
  if [ "$COMP_CWORD" -gt 1 ] && [[ ${{COMP_WORDS[1]}} != -* ]]; then
    command=${{COMP_WORDS[1]}}
    case "$command ${{COMP_WORDS[2]}}" in {pairs}) command+=" ${{COMP_WORDS[2]}}" ;; esac
  fi
  case "$command $previous" in
{values}
  esac
  if [ -z "$words$path" ]; then
    case "$command" in
{flags}
    esac
    if [ "$COMP_CWORD" = 1 ]; then words+=" {starts}"; fi
  fi
  COMPREPLY=()
  case "$path" in
    none) ;;
    file | directory) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -A "$path" -- "$current")) ;;
    *) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
  esac
}}
complete -F _logitless logitless
"""


def _fish(commands: Sequence[Command]) -> str:
    pairs = " ".join(shlex.quote(command.name) for command in commands if " " in command.name)
    lines = [_FISH.format(pairs=pairs)]
    for command in commands:
        here = f"complete -c logitless -n {shlex.quote(f'__logitless_is {shlex.quote(command.name)}')}"
        if " " not in command.name:
            lines.append(
                f"complete -c logitless -n __logitless_is_first -a {command.name} -d {_quoted(command.summary)}"
            )
        lines += [f"{here} -a {word}" for word in _words(command, commands)]
        lines += [f"{here} {_fish_flag(f)}" for f in _flags(command)]
    return "\n".join(lines) + "\n"


_FISH = """\
complete -c logitless -f
function __logitless_is_first
  test (count (commandline -opc)) = 1
end
function __logitless_is
  set -l words (commandline -opc)[2..] serve ''
  string match -q -- '-*' $words[1]; and set -p words serve
  contains -- "$words[1] $words[2]" {pairs}; and set words[1] "$words[1] $words[2]"
  test "$words[1]" = "$argv[1]"
end"""


def _quoted(text: str) -> str:
    """A text as fish reads it, in which a backslash escapes."""
    return shlex.quote(text.replace("\\", "\\\\"))


def _fish_flag(f: Flag) -> str:
    parts = []
    for name in (*f.all_names, *f.off_names):
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        parts.append(f"{kind} {name.lstrip('-')}")
    if choices := _choices(f):
        parts.append(f"-x -a {shlex.quote(' '.join(choices))}")
    elif f.takes_value:
        kinds = {"file": "-r -F", "directory": "-x -a '(__fish_complete_directories)'"}
        parts.append(kinds.get(_path_kind(f), "-x"))
    if f.help:
        parts.append(f"-d {_quoted(f.help.split('; ')[0])}")
    return " ".join(parts)
