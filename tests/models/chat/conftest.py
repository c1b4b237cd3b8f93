"""Fixtures of the tests of chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from logitless.models import tokenizer
from logitless.models.gguf.file import GGUFFile
from logitless.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def vocabulary(shared_data: Path) -> Tokenizer:
    with GGUFFile.open(shared_data / "models" / "stories260K.gguf") as gguf:
        return tokenizer.from_metadata(gguf.metadata)
