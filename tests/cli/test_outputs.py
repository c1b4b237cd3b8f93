"""Output files of commands: writable, and not the same as an input."""

from __future__ import annotations

from pathlib import Path

import pytest

from logitless.cli.flags.flags import CliError
from logitless.cli.outputs import check_output


def test_a_part_of_the_split_model_that_is_read_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m-00001-of-00003.gguf"
    with pytest.raises(CliError, match="is the file of -m"):
        check_output(tmp_path / "m-00002-of-00003.gguf", "-o", [("-m", model)])
    check_output(tmp_path / "m-00002-of-00004.gguf", "-o", [("-m", model)])
    check_output(tmp_path / "n-00001-of-00003.gguf", "-o", [("-m", model)])


def test_a_name_that_is_too_long_to_be_written_is_refused(tmp_path: Path) -> None:
    """The file is written under a longer one first."""
    with pytest.raises(CliError, match="cannot be written: File name too long"):
        check_output(tmp_path / ("n" * 250), "-o")
    check_output(tmp_path / ("n" * 200), "-o")
    assert not list(tmp_path.iterdir())
