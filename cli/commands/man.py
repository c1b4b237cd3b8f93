"""`logitless man`: the manual page logitless(1), made from the commands' flags, in roff's man macros."""

from __future__ import annotations

from types import SimpleNamespace

from logitless.cli.flags.flags import WORKS
from logitless.cli.flags.help import explanation, names

_HEAD = """\
.TH LOGITLESS 1 "" "{version}" "User Commands"
.SH NAME
logitless \\- serve and fine-tune a GGUF model over OpenAI's API
.SH SYNOPSIS
.B logitless
[\\fICOMMAND\\fR] [\\fIflags\\fR]
.SH DESCRIPTION
Loads one GGUF model on one tensor graph, serves it over the APIs of OpenAI, Anthropic, Ollama and
llama-server, and fine-tunes it, on the CPU, OpenCL and Vulkan.
Flags without a command mean
.BR serve .
.SH COMMANDS
"""
_TAIL = """\
.SH ENVIRONMENT
Many flags have a variable, which their explanation names; the command line wins.
.TP
.B LOGITLESS_CACHE
Folder of compiled kernels; by default
.I ~/.cache/logitless
.TP
.B LOGITLESS_CPU_BF16
1: activations are rounded to bf16 before they meet bf16 weights.
.TP
.B LOGITLESS_ISA
Kernel variant of the CPU: avx512_vnni, avx_vnni, avx2, neon_i8mm, neon_dot or plain.
.SH EXIT STATUS
0: done. 1: failed. 2: wrong command line. 130: interrupted.
"""


def run(options: SimpleNamespace) -> int:
    print(page(), end="")
    return 0


def page() -> str:
    """The page's source."""
    from logitless.cli.command_table import COMMANDS
    from logitless.cli.main import version

    parts = [_HEAD.format(version=_escaped(version()))]
    for command in COMMANDS:
        usage = f"logitless {command.name} {command.usage}".strip()
        parts.append(f".SS {_escaped(usage)}\n{_line(command.summary)}\n")
        for group in command.groups:
            for flag in group.flags:
                if flag.status == WORKS:
                    parts.append(f".TP\n\\fB{_escaped(names(flag))}\\fR\n{_line(explanation(flag))}\n")
    return "".join([*parts, _TAIL])


def _escaped(text: str) -> str:
    plain = text.replace("\\", "\\e").replace("-", "\\-")
    return "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in plain)


def _line(text: str) -> str:
    """A line of text. One that begins with a dot or a quote would be a macro."""
    escaped = _escaped(text)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
