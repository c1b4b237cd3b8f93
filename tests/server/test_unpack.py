"""Unread and compressed request bodies: refused, drained, decompressed in bounds."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.server import listen
from logitless.server.bodies import unpack
from logitless.server.config import ServerConfig
from logitless.server.listen import listen as run
from tests.router.test_router_app import made
from tests.server.test_listen import ended
from tests.server.test_service import serving

BOMB = bytes(1 << 22)
PACKED = {"gzip": 31, "deflate": 15, "bare deflate": -15}  # zlib's wbits
CODINGS = ["gzip", "deflate", "bare deflate", "br", "zstd"]
SETTINGS: dict[str, Any] = {"port": 0, "api_keys": ("key",), "admin_api_key": "admin", "max_body": 1 << 20}
KEY = "Authorization: Bearer key\r\n"
ANSWERED = [  # method, path, headers, status: all before the body is read
    ("POST", "/v1/completions", "", 401),
    ("POST", "/v1/completions", "Origin: http://elsewhere\r\nX-Api-Key: wrong\r\n", 401),
    ("POST", "/v1/files", "Content-Type: multipart/form-data; boundary=b\r\n", 401),
    ("POST", "/v1/messages", "", 401),
    ("GET", "/v1/stream/x", "", 401),
    ("POST", "/lora-adapters", KEY, 403),
    ("POST", "/nope", KEY, 404),
    ("PUT", "/v1/completions", KEY, 405),
    ("POST", "/v1/completions", "Expect: miracles\r\n", 417),
    ("OPTIONS", "/v1/completions", "Origin: http://elsewhere\r\n", 200),
    ("GET", "/health", "", 200),
    ("GET", "/v1/models", KEY, 200),
]


def packed(data: bytes, coding: str) -> bytes:
    """The data in this coding; of those that no one here can unpack, something else."""
    if coding not in PACKED:
        return b"\x28\xb5\x2f\xfd" + bytes(1000)
    pack = zlib.compressobj(wbits=PACKED[coding])
    return pack.compress(data) + pack.flush()


def request(method: str, path: str, headers: str = "", body: bytes = b"", coding: str = "") -> bytes:
    if coding:
        headers += f"Content-Encoding: {coding.removeprefix('bare ')}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def chunked(method: str, path: str, headers: str, body: bytes, coding: str) -> bytes:
    head = request(method, path, headers, b"", coding).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunks = [body[i : i + 700] for i in range(0, len(body), 700)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])


class Connection:
    """One connection, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def reply(self) -> tuple[int, str, Any]:
        """(status, headers, JSON or None) of the next answer."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.partition("Content-Length: ")[2].partition("\r\n")[0] or 0)
            body = await self.reader.readexactly(length)
        return int(head.split()[1]), head, json.loads(body) if body else None

    async def closed(self) -> bool:
        """True if the server ends the connection without another answer."""
        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):
                return await self.reader.read() == b""
            return True


Address = str


@asynccontextmanager
async def connection(url: Address) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def routing(caplog: pytest.LogCaptureFixture) -> tuple[asyncio.Task[None], Address]:
    """A router as the command line runs it, and its address from the log."""
    caplog.set_level("INFO", "logitless")
    fleet, router = made(**SETTINGS)

    async def forever(_: str) -> None:
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(run(router.app(), ServerConfig(**SETTINGS), forever, fleet.close))
    while "listening on " not in caplog.text:
        assert not task.done(), task.exception()
        await asyncio.wait([task], timeout=0.01)
    return task, caplog.text.split("listening on ")[1].split()[0]


@pytest.fixture(params=["server", "router"])
async def url(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Address]:
    started = serving(ServerConfig(**SETTINGS), caplog) if request.param == "server" else routing(caplog)
    task, address = await started
    yield address
    await ended(task)


class Spy:
    """zlib's objects that unpack, their threads, and how many bytes they gave."""

    def __init__(self) -> None:
        self.n_begun, self.n_bytes, self.threads = 0, 0, set[int]()

    def begin(self, make: Any, **kwargs: Any) -> Any:
        self.n_begun += 1
        spy, inner = self, make(**kwargs)

        class Spied:
            def decompress(self, data: bytes, max_length: int = 0) -> bytes:
                given: bytes = inner.decompress(data, max_length)
                spy.n_bytes += len(given)
                spy.threads.add(threading.get_ident())
                return given

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        return Spied()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy, make = Spy(), zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda wbits=15: spy.begin(make, wbits=wbits))
    return spy


@pytest.mark.parametrize("coding", CODINGS)
async def test_nothing_is_unpacked_of_a_body_that_nobody_reads(url: Address, spy: Spy, coding: str):
    body = packed(BOMB, coding)
    for method, path, headers, status in ANSWERED:
        for frame in (request, chunked):
            async with connection(url) as client:  # and what comes behind it is answered
                client.writer.write(frame(method, path, headers, body, coding) + request("GET", "/health"))
                replies = [(await client.reply())[0] for _ in range(2)]
                assert replies == [status, 200], (method, path, frame)
                client.writer.write(frame(method, path, headers, body, coding)[: -len(body) // 2])
                assert (await client.reply())[0] == status
                client.writer.write(frame(method, path, headers, body, coding)[-len(body) // 2 :])
                client.writer.write(request("GET", "/health"))
                assert (await client.reply())[0] == 200, (method, path, frame)
    assert (spy.n_begun, spy.n_bytes) == (0, 0)


async def test_the_rest_of_a_body_is_read_within_bounds(url: Address, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listen, "LINGER_BYTES", 1 << 10)
    monkeypatch.setattr(listen, "LINGER_SECONDS", 3600)
    whole = request("POST", "/completion", body=bytes(1 << 20))
    async with connection(url) as client:
        client.writer.write(whole[: 1 << 16])
        status, head, _ = await client.reply()
        assert status == 401
        assert "\r\nConnection: close\r\n" in head  # it says so where it knows
        assert await client.closed()
    async with connection(url) as client:
        client.writer.write(chunked("POST", "/completion", "", bytes(1 << 16), "")[:-5])
        assert (await client.reply())[0] == 401
        assert await client.closed()
    monkeypatch.setattr(listen, "LINGER_SECONDS", 0.01)
    async with connection(url) as client:
        client.writer.write(request("POST", "/completion", body=b"{}")[:-1])
        assert (await client.reply())[0] == 401
        assert await client.closed()


@pytest.mark.parametrize("rest", [b"no chunk", b""], ids=["broken", "left"])
async def test_a_body_that_breaks_after_the_answer(
    url: Address, rest: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listen, "LINGER_SECONDS", 0.05)
    async with connection(url) as client:
        client.writer.write(chunked("POST", "/completion", "", b"x" * 700, "")[:-5])
        assert (await client.reply())[0] == 401
        client.writer.write(rest + b"\r\n") if rest else client.writer.close()
        assert b" 401 " not in await client.reader.read()
    async with connection(url) as client:
        client.writer.write(request("GET", "/health"))
        assert (await client.reply())[0] == 200
    assert not [record for record in caplog.records if record.levelname not in ("INFO", "DEBUG")]


async def test_another_protocol_is_not_waited_for(url: Address):
    headers = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    async with connection(url) as client:
        whole = request("POST", "/completion", headers, b"x")
        client.writer.write(whole[:-1])
        assert (await client.reply())[0] == 401
        client.writer.write(whole[-1:] + request("GET", "/health"))
        assert await client.closed()


async def test_a_long_url_is_said_to_be_one(url: Address):
    async with connection(url) as client:
        client.writer.write(request("GET", "/" + "x" * 20_000, KEY))
        status, _, answer = await client.reply()
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (414, 414, "invalid_request_error")
        assert answer["error"]["message"] == "the URL is longer than 8192 bytes"
        assert await client.closed()


LONG = "x" * 20_000


@pytest.mark.parametrize(
    ("rest", "status"),
    [(f"?{LONG} HTTP/1.1\r\n", 414), (f" HTTP/1.1\r\nX: {LONG}\r\n", 431), (" HTTP/9\r\n", 400)],
    ids=["url", "header", "version"],
)
async def test_a_request_that_cannot_be_read_gets_the_error_of_its_api(url: Address, rest: str, status: int):
    for path, members in (
        ("//v1/messages/", {"type", "error", "request_id"}),
        ("/v1/chat/completions", {"error"}),
        ("/api/chat", {"error"}),
    ):
        async with connection(url) as client:
            client.writer.write(f"POST {path}{rest}\r\n".encode())
            got, _, answer = await client.reply()
            assert got == status
            assert answer.keys() <= members
            assert answer.get("type") == ("error" if "type" in members else None)
            assert isinstance(answer["error"], str if path == "/api/chat" else dict)


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x" * 1000])
async def test_codings_that_are_refused(url: Address, coding: str):
    async with connection(url) as client:
        for body in (b'{"model": "a"}', packed(b"", "br")):
            client.writer.write(request("POST", "/completion", KEY, body, coding))
            status, head, answer = await client.reply()
            assert (status, answer["error"]["code"]) == (415, 415)
            assert "\r\nAccept-Encoding: gzip, deflate\r\n" in head
            assert answer["error"]["message"].startswith("header 'Content-Encoding': must be gzip or deflate, not '")
            assert len(answer["error"]["message"]) < 200


@pytest.mark.parametrize("coding", PACKED)
async def test_compressed_bodies_are_read(url: Address, spy: Spy, coding: str):
    body = json.dumps({"prompt": "say:" + "ab" * 50, "model": "nowhere"}).encode()
    raw = packed(body, coding)
    async with connection(url) as client:
        members = packed(body[:9], coding) + packed(b"", coding) + packed(body[9:], coding)
        for whole in (raw, members if coding == "gzip" else raw):
            for frame in (request, chunked):
                client.writer.write(frame("POST", "/completion", KEY, whole, coding))
                status, _, answer = await client.reply()
                if status == 200:
                    assert answer["content"] == "ab" * 50
                else:  # the router's, which has read the name
                    assert (status, answer["error"]["message"]) == (404, "model 'nowhere' not found")
        for broken in (raw[:-1], raw + raw[:5], b"garbage", raw + b"garbage", packed(b"", coding) * 20_000):
            client.writer.write(request("POST", "/completion", KEY, broken, coding))
            status, _, answer = await client.reply()
            name = coding.removeprefix("bare ")
            assert status == 400
            assert answer["error"]["message"] == f"the body is not {name}, as the header 'Content-Encoding' says"
        for nothing in (b"", body):
            client.writer.write(request("POST", "/completion", KEY, nothing, "Identity" if nothing else coding))
            assert (await client.reply())[0] in (200, 400, 404)
    assert threading.get_ident() not in spy.threads
    assert spy.n_begun


@pytest.mark.parametrize("coding", PACKED)
async def test_a_body_is_not_unpacked_beyond_its_limit(url: Address, spy: Spy, coding: str):
    empty = b"\x00\x00\x00\xff\xff"  # a block of deflate's
    endless = packed(b"", coding)[: {"gzip": 10, "deflate": 2}.get(coding, 0)] + empty * (1 << 18)
    async with connection(url) as client:
        for body in (packed(BOMB, coding), endless):
            client.writer.write(request("POST", "/completion", KEY, body, coding))
            status, _, answer = await client.reply()
            assert status == 413
            assert answer["error"]["message"] == f"the request is larger than {SETTINGS['max_body']} bytes"
        client.writer.write(request("GET", "/health"))
        assert (await client.reply())[0] == 200
    assert spy.n_bytes <= SETTINGS["max_body"] + unpack.PIECE


@given(st.sampled_from(sorted(PACKED)), st.lists(st.binary(max_size=40) | st.just(b"a" * 900), max_size=4), st.data())
def test_pieces_are_the_whole(coding: str, members: list[bytes], data: st.DataObject):
    members = members if coding == "gzip" else members[:1]
    raw = b"".join(packed(member, coding) for member in members)
    step, piece, window = (data.draw(st.integers(1, most)) for most in (len(raw) + 1, 1000, 100))
    inflate, pieces = unpack.Inflate(coding.removeprefix("bare ")), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpack, "PIECE", piece)
        patch.setattr(unpack, "_WINDOW", window)
        for i in range(0, len(raw), step):
            inflate.feed(raw[i : i + step])
            while not inflate.hungry:
                pieces.append(inflate.piece())
    assert b"".join(pieces) == b"".join(members)
    assert inflate.complete
    assert max(map(len, pieces), default=0) <= piece
