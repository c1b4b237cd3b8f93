"""API keys of the command line and of a file that changes while the server runs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.cli.flags.flags import CliError, UsageError, parse
from logitless.cli.flags.options import SERVING
from logitless.cli.setup.server import api_key_file
from logitless.server.auth import ApiKeys, read_keys
from tests.helpers.http_fakes import running


def replace(path: Path, content: bytes) -> None:
    """As a careful editor does it: a new file takes the old one's place."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


def keys_of(*argv: str, **environ: str) -> SimpleNamespace:
    return parse(SERVING.flags, argv, environ)


def test_keys_are_given_in_lists_and_again():
    assert keys_of("--api-key", "a,b", "--api-key", "c").api_key == ["a", "b", "c"]
    assert keys_of(LLAMA_API_KEY="a, b").api_key == ["a", "b"]
    for argv, environ in ((("--api-key", ","), {}), (("--api-key=",), {}), ((), {"LLAMA_API_KEY": " "})):
        with pytest.raises(UsageError, match="must have a key"):
            keys_of(*argv, **environ)


def test_every_key_is_compared_whole_whatever_is_given(monkeypatch: pytest.MonkeyPatch):
    """Time tells nothing: digests of one length, and all of them, also when the first is right."""
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("logitless.server.auth.hmac.compare_digest", compare)
    keys = ApiKeys(["first", "s", "third"])
    for given, opens in (("first", True), ("third", True), ("", False), ("x" * 10_000, False), ("é", False)):
        compared.clear()
        assert keys.match(given) == opens
        assert len(compared) == 3
        assert len(set(compared)) == 1


def test_a_file_of_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_bytes("\ufeff# ours\r\n\r\n  one \r\n#two\r\nzw#ö,lf\r\n".encode())
    assert read_keys(str(path)) == ["one", "zw#ö,lf"]
    assert api_key_file(str(path)) == str(path)
    assert api_key_file(None) == ""
    for content, wrong in (
        (b"# none\n\n", "has no key"),
        (b"a\n\xff\n", "byte 2 is not UTF-8"),
        (b"x" * 2**21, "larger"),
    ):
        path.write_bytes(content)
        with pytest.raises(CliError, match=f"--api-key-file: {path} .*{wrong}"):
            api_key_file(str(path))


def test_a_file_that_goes_bad_opens_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "keys"
    path.write_bytes(b"secret-one\n")
    keys = ApiKeys(("given",), str(path))
    assert keys
    assert not ApiKeys(())
    for content in (b"", b"# nobody\n", b"\xff\xfe", b"x" * 2**21, b"secret-one\nsecret-two\n"):
        replace(path, content)
        assert [keys.match(key) for key in ("given", "secret-one", "", "given,secret-one")] == [
            True,
            True,
            False,
            False,
        ]
    assert keys.match("secret-two")
    path.unlink()
    assert keys.match("secret-two")
    assert not keys.match("secret-three")
    replace(path, b"secret-three\n")
    assert [keys.match(key) for key in ("given", "secret-two", "secret-three")] == [True, False, True]
    assert [record.levelname for record in caplog.records].count("WARNING") == 5  # each is told once
    assert "secret" not in caplog.text


def test_key_twice_is_one_key(tmp_path: Path) -> None:
    """In the list, in the file, or in both: prefixes of prompts stay shared, as with one key."""
    path = tmp_path / "keys"
    path.write_bytes(b"a\na\n")
    assert not ApiKeys(["a", "a"]).several
    assert not ApiKeys(["a"], str(path)).several
    assert ApiKeys(["b"], str(path)).several


async def test_changes_of_the_server_need_the_admin_key():
    async with running(api_keys=("user",), admin_api_key="chief") as server:

        async def status(key: str, method: str, path: str) -> int:
            async with server.http.request(method, server.url + path, headers={"X-Api-Key": key}) as reply:
                return reply.status

        job = "/v1/fine_tuning/jobs"
        changes = [("POST", "/v1/files"), ("DELETE", "/v1/files/f"), ("POST", job)]
        changes += [("POST", f"{job}/j/{what}") for what in ("cancel", "pause", "resume")]
        changes += [("POST", "/lora-adapters"), ("POST", "/slots/0?action=save"), ("POST", "/props")]
        changes += [("POST", f"/api/{what}") for what in ("pull", "copy", "create", "blobs/sha256:0")]
        changes += [("DELETE", "/api/delete")]
        for method, path in changes:
            assert [await status(key, method, path) for key in ("", "nobody", "user")] == [401, 401, 403], path
            assert await status("chief", method, path) not in (401, 403), path
        answers = {
            "completions",
            "control",
            "input_tokens",
            "responses",
            "messages",
            "count_tokens",
            "infill",
            "verify",
        }
        answers |= {"completion", "embeddings", "embedding", "rerank", "reranking", "tokenize", "detokenize", "score"}
        answers |= {"batches", "apply-template", "stream", "lookup", "chat", "show", "generate", "embed"}
        answers |= {"conversations", "render", "transcriptions", "translations"}
        for method, path in server.routes:  # whatever is neither must have been thought of
            if method not in ("GET", "HEAD") and not answers & set(path.split("/")):
                assert await status("user", method, path.replace("{id}", "0")) == 403, path
        for path in ("/v1/files", job, "/lora-adapters", "/slots", "/props"):
            assert await status("user", "GET", path) not in (401, 403)


async def test_a_server_takes_up_new_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_bytes(b"old\n")
    async with running(api_key_file=str(path), admin_api_key="chief") as server:

        async def status(key: str, method: str = "get", path: str = "/props") -> int:
            async with server.http.request(method, server.url + path, headers={"X-Api-Key": key}) as reply:
                return reply.status

        assert [await status(key) for key in ("old", "new", "", "chief")] == [200, 401, 401, 200]
        replace(path, b"new\nnewer\n")
        assert [await status(key) for key in ("old", "new", "newer", "chief")] == [401, 200, 200, 200]
        assert await status("new", "post", "/v1/files") == 403
        assert await status("old", "post", "/v1/files") == 401
        assert "security" in (await server.get("/openapi.json", headers={"X-Api-Key": "new"}))[1]
