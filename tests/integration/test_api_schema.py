"""Answers match /openapi.json: a few requests of every operation (scripts/fuzz-api makes more)."""

from __future__ import annotations

from typing import Any

import pytest
import requests

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


@pytest.mark.parametrize(
    "part",
    [
        b'Content-Disposition: form-data; name="a\x16\xc2\x88"\r\n\r\nx',
        b"Content-Disposition\r\n\r\nx",
        b'Content-Disposition: form-data; name="file"\r\nContent-Encoding: gzip\r\n\r\nno gzip',
        b'Content-Disposition: form-data; name="file"\r\nContent-Transfer-Encoding: base64\r\n\r\n!',
        b'Content-Disposition: form-data; name="file"\r\nContent-Length: 99999999999999\r\n\r\nx',
        b"X: " + b"y" * 100_000 + b"\r\n\r\nx",
    ],
)
def test_an_upload_in_a_broken_form(server: Any, part: bytes) -> None:
    body = b"--b\r\n" + part + b"\r\n--b--\r\n"
    reply = requests.post(
        f"{server.url}/v1/files", body, headers={"Content-Type": "multipart/form-data; boundary=b"}, timeout=60
    )
    assert reply.status_code == 400, reply.text
    assert "\n" not in reply.json()["error"]["message"]


def test_a_field_of_an_upload_that_goes_on_and_on(server: Any) -> None:
    form = {"purpose": (None, "x" * 200_000), "file": ("rows.jsonl", b"{}")}
    reply = requests.post(f"{server.url}/v1/files", files=form, timeout=60)
    assert (reply.status_code, reply.json()["error"]["message"]) == (413, "field 'purpose': is larger than 100 bytes")


def test_a_body_that_is_not_compressed_as_it_says(server: Any) -> None:
    for path in ("/lora-adapters", "/completion", "/v1/files"):
        kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
        headers = {"Content-Encoding": "gzip", "Content-Type": kind}
        reply = requests.post(server.url + path, b"no gzip", headers=headers, timeout=60)
        assert reply.status_code == 400, (path, reply.text)


def test_the_server_said_nothing_bad(server: Any) -> None:
    server.process.terminate()
    err = server.ended()
    assert " failed:" not in err, err[-3000:]
    assert server.process.returncode == 0
