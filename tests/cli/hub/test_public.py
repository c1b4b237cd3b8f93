"""Downloads that a client names: refused for this machine and its networks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.cli.hub import download, model_source
from logitless.cli.hub.public import NotPublic
from logitless.training.graders import public


@pytest.mark.parametrize(
    ("url", "private"),
    [
        ("http://localhost/m", True),
        ("http://127.1/m", True),
        ("http://2130706433/m", True),
        ("http://0x7f.1/m", True),
        ("http://[::1]:80/m", True),
        ("http://u:p@127.0.0.1/m", True),
        ("http://8.8.8.8/m", False),
        ("http://nowhere.invalid/m", False),  # not known
    ],
)
def test_hosts_are_judged_by_what_they_resolve_to(url: str, private: bool) -> None:
    assert public.is_private(url) is private


@pytest.fixture
def site() -> Iterator[Any]:
    """A server at 127.0.0.1 and 127.0.0.2 with one file; /to/URL leads elsewhere."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            seen.append(f"{self.headers['Host']}{self.path}")
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path[4:])
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"GGUF")

        do_HEAD = do_GET

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield SimpleNamespace(port=server.server_address[1], seen=seen)
        server.shutdown()


@pytest.fixture
def one_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "is_public", lambda address: address == "127.0.0.1")


def test_a_redirect_into_a_network_is_refused(site: Any, one_is_public: None, tmp_path: Path) -> None:
    near, far = f"http://127.0.0.2:{site.port}/m", f"http://127.0.0.1:{site.port}"
    for url in (near, f"{far}/to/{near}", f"{far}/to/{far}/to/{near}", f"{far}/to/ftp://127.0.0.2:{site.port}/m"):
        with pytest.raises(NotPublic, match=r"127\.0\.0\.2 is at 127\.0\.0\.2.*--allow-private-addresses"):
            download.fetch(url, tmp_path / "m", name="m", public_only=True)
    assert not any(seen.startswith("127.0.0.2") for seen in site.seen)
    assert not (tmp_path / "m").exists()
    download.fetch(f"{far}/to/{far}/m", tmp_path / "m", name="m", public_only=True)
    assert (tmp_path / "m").read_bytes() == b"GGUF"
    download.fetch(f"{far}/to/{near}", tmp_path / "n", name="n")
    assert (tmp_path / "n").read_bytes() == b"GGUF"


def test_a_name_that_changes_after_it_was_judged(site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(public, "_addresses", lambda url: ["8.8.8.8"])
    with pytest.raises(NotPublic):
        download.fetch(f"http://localhost:{site.port}/m", tmp_path / "m", name="m", public_only=True)
    assert site.seen == []


def options(address: str, **more: bool) -> SimpleNamespace:
    return SimpleNamespace(hf_repo=None, hf_file=None, model=None, model_url=address, offline=False, **more)


def test_private_address_is_open_to_the_user_alone(
    site: Any, one_is_public: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    near, far = f"http://127.0.0.2:{site.port}", f"http://127.0.0.1:{site.port}"
    assert model_source.find(options(f"{near}/m"))  # the user's own
    assert model_source.find(options(f"{near}/to/{near}/m"))
    with pytest.raises(NotPublic):
        model_source.find(options(f"{far}/to/{near}/m"))
    assert model_source.find(options(f"{far}/to/{near}/m", allow_private_addresses=True))
    with pytest.raises(NotPublic):  # a client's
        model_source.find(options(f"{near}/m", public_only=True))
    assert model_source.find(options(f"{near}/n", public_only=True, allow_private_addresses=True))
    monkeypatch.setenv("HF_ENDPOINT", near)
    assert model_source.find(options(f"{near}/k", public_only=True))
