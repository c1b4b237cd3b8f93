"""Answers match /openapi.json: a few requests of every operation (scripts/fuzz-api makes more)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import api_schema


@pytest.fixture(scope="module")
def server(serve_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return serve_module(None, "--demo", *api_schema.flags(tmp_path_factory.mktemp("schema")))


def test_answers_are_as_described(server: Any) -> None:
    found = api_schema.check(server.url, 1, aliases=False)
    assert found.wrong == {}
    answered = {place for place, statuses in found.statuses.items() if any(status < 300 for status in statuses)}
    assert len(found.statuses) > 45
    for method, *paths in (  # one of those that are the same
        ("POST", "/completion", "/completions"),
        ("POST", "/v1/chat/completions", "/chat/completions"),
        ("POST", "/v1/responses", "/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/api/show"),
        ("POST", "/api/generate"),
        ("POST", "/api/chat"),
        ("POST", "/api/embed"),
        ("GET", "/props"),
    ):
        assert answered & {f"{method} {path}" for path in paths}, found.statuses


def test_the_server_said_nothing_bad(server: Any) -> None:
    server.process.terminate()
    err = server.ended()
    assert " failed:" not in err, err[-3000:]
    assert server.process.returncode == 0
