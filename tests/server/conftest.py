"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.helpers.chat_fakes import HERMES_LIKE, chatting
from tests.helpers.http_fakes import Running


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    """A server of a model with Hermes' tools; `says` tells what it answers."""
    async with chatting(HERMES_LIKE) as started:
        yield started
