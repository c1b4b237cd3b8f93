"""What a command may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli.flags import CliError
from server.cli.outputs import check_output


def test_a_part_of_the_split_model_that_is_read_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m-00001-of-00003.gguf"
    with pytest.raises(CliError, match="is the file of -m"):
        check_output(tmp_path / "m-00002-of-00003.gguf", "-o", [("-m", model)])
    check_output(tmp_path / "m-00002-of-00004.gguf", "-o", [("-m", model)])
    check_output(tmp_path / "n-00001-of-00003.gguf", "-o", [("-m", model)])
