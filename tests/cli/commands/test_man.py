"""`logitless man`: the manual page names every flag that works."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from logitless.cli.command_table import COMMANDS
from logitless.cli.flags.flags import WORKS
from logitless.cli.main import main


def test_page_has_every_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man"]) == 0
    page = capsys.readouterr().out.replace("\\-", "-")
    sections = re.split(r"^\.S[SH] ", page, flags=re.M)
    for command in COMMANDS:
        (body,) = [s for s in sections if s.startswith(f"logitless {command.name} {command.usage}".strip() + "\n")]
        for flag in (f for group in command.groups for f in group.flags if f.status == WORKS):
            assert re.search(rf"^\\fB.*{re.escape(flag.long)}\b", body, re.M), (command.name, flag.long)


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_formats_the_page_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    main(["man"])
    page = capsys.readouterr().out
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "serve and fine-tune a GGUF model" in done.stdout
