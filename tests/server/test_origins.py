"""Origin checks: pages of other sites, DNS rebinding, forms, and odd slashes in paths."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest
from aiohttp.test_utils import make_mocked_request

from logitless.engine.errors import Forbidden
from logitless.server.auth import ApiKeys
from logitless.server.config import ServerConfig
from logitless.server.origins import Origins, check_origins, lets_any_page_in
from tests.helpers.http_fakes import running

BODY = {"prompt": "say:yes", "n_predict": 2}
EVIL = "https://evil.example"


async def ask(server: Any, headers: dict[str, str], method: str = "POST", path: str = "/completion") -> tuple[int, Any]:
    """Status and headers of an answer."""
    body = {"json": BODY} if method == "POST" else {}
    async with server.http.request(method, server.url + path, headers=headers, **body) as reply:
        await reply.read()
        return reply.status, reply.headers


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),  # curl, SDKs
        ("{url}", 200),
        (EVIL, 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
        ("https://127.0.0.1:{port}", 200),  # TLS of a proxy
        ("http://127.0.0.1:{port}.evil.example", 403),
        ("http://localhost", 403),
        ("ftp://127.0.0.1:{port}", 403),
        ("http://[", 403),
        ("http://127.0.0.1:99999999", 403),
        ("app://obsidian.md", 200),  # desktop apps: no web page can have their schemes
        ("tauri://localhost", 200),
        ("vscode-webview://1c2d", 200),
        ("vscode-file://vscode-app", 200),
        ("https://app", 403),
        ("apps://x", 403),
        ("file://", 403),
        ("", 200),
    ],
)
async def test_pages_that_may_call_a_server_without_keys(origin: str | None, status: int) -> None:
    async with running() as server:
        port = server.url.rpartition(":")[2]
        said = {} if origin is None else {"Origin": origin.format(url=server.url, port=port)}
        for method, path in (
            ("POST", "/completion"),
            ("POST", "/lora-adapters"),
            ("GET", "/props"),
            ("GET", "/health"),
        ):
            given, headers = await ask(server, said, method, path)
            assert (given == 403) is (status == 403), path
            assert headers.get("Access-Control-Allow-Origin") == (said.get("Origin") or None if status == 200 else None)
            assert headers["Vary"] == "Origin"
        if status == 403:
            preflight, headers = await ask(server, said, "OPTIONS")
            assert preflight == 200
            assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("patterns", "origin", "status"),
    [
        ("app://*", "app://-", 200),
        ("app://*", "tauri://localhost", 403),  # a list replaces the default
        ("http://localhost:*", "http://localhost:5173", 200),
        ("http://localhost:*", "http://localhost", 200),
        ("http://localhost:*", "https://localhost:5173", 403),
        ("http://localhost:*", "http://localhost:5173.evil.example", 403),
        ("http://localhost:*", "http://localhost.evil.example:80", 403),
        ("https://*.example.com", "https://chat.example.com", 200),
        ("https://*.example.com", "https://evil.example/.example.com", 403),
        ("*://chat.example.com", "http://chat.example.com", 200),
        ("https://a.example/, localhost", "https://a.example", 200),
        ("https://a.example/, localhost", "http://localhost:1", 200),
        ("https://axexample", "https://a.example", 403),
        ("null", "null", 200),
        ("*", EVIL, 200),
    ],
)
async def test_patterns_of_origins(patterns: str, origin: str, status: int) -> None:
    assert check_origins(patterns) == patterns
    async with running(cors_origins=patterns) as server:
        got, headers = await ask(server, {"Origin": origin}, "GET", "/props")
        assert got == status
        assert headers.get("Access-Control-Allow-Origin") == (origin if status == 200 else None)


@pytest.mark.parametrize("entry", ["example.com", "localhost:3000", "https://", "https://a/path", "http://a b", "?"])
def test_text_that_is_no_origin_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        check_origins(f"https://a.example,{entry}")


@pytest.mark.parametrize(
    ("text", "open_to_all"), [("*", True), ("https://*", True), ("*://*:*", True), ("app://*", False)]
)
def test_lists_that_let_any_page_in(text: str, open_to_all: bool) -> None:
    assert lets_any_page_in(text) == open_to_all


@pytest.mark.parametrize(
    ("site", "mode", "method", "refused"),
    [
        ("cross-site", "no-cors", "POST", True),
        ("cross-site", "navigate", "POST", True),  # a form
        ("same-site", "cors", "POST", True),
        ("cross-site", "no-cors", "GET", True),  # an image
        ("cross-site", "navigate", "GET", False),  # a link
        ("same-origin", "cors", "POST", False),
        ("none", "navigate", "GET", False),
    ],
)
async def test_fetch_metadata_of_foreign_page_is_refused(site: str, mode: str, method: str, refused: bool) -> None:
    async with running() as server:
        said = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
        status, _ = await ask(server, said, method, "/completion" if method == "POST" else "/props")
        assert status == (403 if refused else 200)


async def test_own_page_behind_a_proxy_that_changes_the_host() -> None:
    async with running(allowed_hosts=("chat.example.com",)) as server:
        own = {"Origin": "https://chat.example.com"}
        assert (await ask(server, own))[0] == 200
        assert (await ask(server, {"Origin": EVIL, "Host": "chat.example.com"}))[0] == 403
    async with running() as server:
        assert (await ask(server, {**own, "Sec-Fetch-Site": "same-origin"}))[0] == 200


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LocalHost:8080", True),
        ("localhost.:80", True),
        ("[::1]:8080", True),
        ("127.0.0.2", True),
        ("192.168.1.7:8080", True),  # no name: nobody can point it elsewhere
        ("app.localhost", True),
        ("host.docker.internal:8080", True),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("workstation", True),  # of the local network
        ("evil.", True),
        ("[::1", False),
        ("", True),
        ("a@localhost", True),
        ("localhost@evil.example", False),
        ("localhost:99999999", False),
    ],
)
async def test_names_of_a_server_without_keys(host: str, known: bool) -> None:
    async with running() as server:
        for method, path in (("POST", "/completion"), ("GET", "/props"), ("GET", "/"), ("GET", "/health")):
            status, _ = await ask(server, {"Host": host}, method, path)
            assert status == (200 if known else 403), path


async def test_more_names_and_any() -> None:
    async with running(allowed_hosts=("Chat.example.com",)) as server:
        assert (await ask(server, {"Host": "chat.example.com"}))[0] == 200
        status, _ = await ask(server, {"Host": "evil.example"})
        assert status == 403
    async with running(allowed_hosts=("*",)) as server:
        assert (await ask(server, {"Host": "evil.example"}))[0] == 200


async def test_a_key_keeps_pages_out_instead() -> None:
    async with running(api_keys=("k",)) as server:
        key = {"Authorization": "Bearer k"}
        status, headers = await ask(server, {**key, "Origin": EVIL, "Host": "chat.example.com"})
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, EVIL)
        assert (await ask(server, {"Origin": EVIL, "Host": "chat.example.com"}))[0] == 401


@pytest.mark.parametrize(
    ("kind", "more", "status"),
    [
        ("application/json", {}, 200),
        ("application/json; charset=utf-8", {}, 200),
        ("application/octet-stream", {}, 200),  # asks first, from a page
        ("application/x-www-form-urlencoded", {}, 200),  # curl -d
        ("application/x-www-form-urlencoded", {"Sec-Fetch-Site": "same-origin"}, 415),
        ("application/x-www-form-urlencoded", {"Origin": "{url}"}, 415),
        ("text/plain", {}, 415),
        ("Text/Plain;charset=UTF-8", {}, 415),
        ("multipart/form-data; boundary=x", {}, 415),
        (None, {}, 200),
        (None, {"Origin": "{url}"}, 415),
    ],
)
async def test_bodies_that_a_form_can_send(kind: str | None, more: dict[str, str], status: int) -> None:
    async with running() as server:
        headers = {name: text.format(url=server.url) for name, text in more.items()}
        body = b'{"prompt": "say:yes", "n_predict": 2}'
        for path in ("/completion", "/tokenize", "/v1/chat/completions"):
            skip = ["Content-Type"] if kind is None else None
            given = headers if kind is None else {**headers, "Content-Type": kind}
            async with server.http.post(server.url + path, data=body, headers=given, skip_auto_headers=skip) as reply:
                assert (reply.status == 415) is (status == 415)
                if status == 415:
                    assert "Content-Type" in (await reply.json())["error"]["message"]
                    assert "Accept-Encoding" not in reply.headers
    async with running(api_keys=("k",)) as server:
        headers = {"X-Api-Key": "k", "Content-Type": "text/plain"}
        async with server.http.post(server.url + "/completion", data=body, headers=headers) as reply:
            assert reply.status == 200


class Transport:
    """The server's end of a connection."""

    def __init__(self, address: Any) -> None:
        self.address = address

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.address if name == "sockname" else default


@pytest.mark.parametrize(
    ("address", "host_is_judged", "origin_is_judged"),
    [
        (("127.0.0.1", 80), True, True),
        (("::1", 80, 0, 0), True, True),
        (("::ffff:127.0.0.1", 80, 0, 0), True, True),
        (("192.168.0.4", 80), False, False),
        (("fe80::1%eth0", 80, 0, 2), False, False),
        ("/run/x.sock", False, True),
    ],
)
def test_each_connection_is_judged_by_its_own_address(
    address: Any, host_is_judged: bool, origin_is_judged: bool
) -> None:
    origins = Origins(ServerConfig(host="::,/run/x.sock"), ApiKeys(()))

    def refused(headers: dict[str, str]) -> bool:
        request = make_mocked_request("POST", "/completion", headers=headers, transport=Transport(address))
        try:
            origins.check(request, "/completion")
        except Forbidden:
            return True
        return False

    assert refused({"Host": "evil.example"}) is host_is_judged
    assert refused({"Host": "127.0.0.1", "Origin": EVIL}) is origin_is_judged
    assert not refused({"Host": "127.0.0.1"})


@pytest.mark.parametrize(
    "path", ["//completion", "/completion/", "/completion//", "///completion", "//v1//completions/?x=//"]
)
async def test_odd_slashes_reach_the_route(path: str) -> None:
    async with running(api_prefix="/api") as server:
        for prefix in ("/api", "//api", "/api/"):
            async with server.http.post(server.url + prefix + path, json=BODY) as reply:
                assert reply.status == 200


async def test_odd_slashes_open_nothing() -> None:
    async with running(api_keys=("k",), admin_api_key="admin") as server:
        for path in ("//lora-adapters", "/lora-adapters/", "/v1//files", "/slots//0/?action=erase", "//props"):
            async with server.http.post(server.url + path, json=[], headers={"X-Api-Key": "k"}) as reply:
                assert reply.status == 403, path
            async with server.http.post(server.url + path, json=[]) as reply:
                assert reply.status == 401, path
        for path, status in (("//health", 200), ("/health/", 200), ("//slots", 401), ("//nowhere", 401)):
            assert (await server.get(path))[0] == status
        async with server.http.post(server.url + "//health", json={}) as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "GET,HEAD")


@pytest.mark.parametrize("name", ["X-Api-Key", "api-key", "Api-Key"])
async def test_headers_of_keys(name: str) -> None:
    async with running(api_keys=("k",)) as server:
        assert (await server.get("/props", headers={name: "k"}))[0] == 200
        assert (await server.get("/props", headers={name: "no"}))[0] == 401


async def test_azures_client() -> None:
    async with running(api_keys=("k",)) as server, aiohttp.ClientSession(headers={"api-key": "k"}) as http:
        url = server.url + "/v1//chat/completions/?api-version=2024-10-21"
        async with http.post(url, json={"messages": [{"role": "user", "content": "say:yes"}]}) as reply:
            assert (await reply.json())["choices"][0]["message"]["content"] == "yes"
        for place in ({"azure_endpoint": server.url}, {"base_url": f"{server.url}/v1"}):
            azure = openai.AsyncAzureOpenAI(api_key="k", api_version="2024-10-21", max_retries=0, **place)
            async with azure as client:
                said = await client.chat.completions.create(
                    model="gpt-4o", messages=[{"role": "user", "content": "say:yes"}]
                )
                assert said.choices[0].message.content == "yes"
                assert (await client.models.list()).data
        async with openai.AsyncOpenAI(api_key="k", base_url=f"{server.url}/openai/v1/") as client:
            assert (await client.models.list()).data


async def test_azures_paths_open_nothing() -> None:
    async with running(api_keys=("k",), admin_api_key="admin") as server:
        for path in ("/openai/files", "/openai/v1/files", "/openai/deployments/x/files", "/v1/deployments/x/files"):
            for headers, status in (({"X-Api-Key": "k"}, 403), ({}, 401)):
                async with server.http.post(server.url + path, json=[], headers=headers) as reply:
                    assert reply.status == status, path
        assert (await server.get("/openai", headers={"X-Api-Key": "k"}))[0] == 404
