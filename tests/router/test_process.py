"""Child process readiness, by the lines of its log."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from logitless.router.fleet import StartFailed
from logitless.router.process import ServerProcess

LISTENING, LOADED = "logitless: listening on http://127.0.0.1:4711", "logitless: model loaded in 0.1 s"


def child_saying(*lines: str) -> ServerProcess:
    """A child whose log is these lines, and which has ended then."""
    log = asyncio.StreamReader()
    log.feed_data("".join(f"{line}\n" for line in lines).encode())
    log.feed_eof()

    async def wait() -> int:
        return 3

    return ServerProcess(SimpleNamespace(stderr=log, wait=wait), "key", lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("lines", [(LISTENING, LOADED), (LOADED, "compiled 1 in 1 s", LISTENING)])
async def test_ready_when_it_listens_and_has_its_model(lines: tuple[str, ...]) -> None:
    child = child_saying(*lines)
    await child._ready
    assert child.url == "http://127.0.0.1:4711"
    assert await child.ended() == 3


@pytest.mark.parametrize("lines", [(LISTENING, "no memory"), (LOADED, "no memory"), ("no memory",)])
async def test_one_that_ends_before_has_failed_with_its_last_words(lines: tuple[str, ...]) -> None:
    child = child_saying(*lines)
    with pytest.raises(StartFailed, match="no memory"):
        await child._ready
