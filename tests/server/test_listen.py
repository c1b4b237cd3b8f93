"""HTTP listener: HTTPS, a shared port, a path prefix, and body sizes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
import pytest
import trustme
from cryptography.hazmat.primitives import serialization as pem

from logitless.cli.flags.flags import CliError, UsageError, parse
from logitless.cli.flags.options import SERVING
from logitless.cli.setup import server as setup
from logitless.cli.setup.server import tls_context
from logitless.server import listen, sockets
from logitless.server.config import ServerConfig
from tests.helpers.http_fakes import FakeScheduler
from tests.server.test_service import serving


def options(*argv: str) -> SimpleNamespace:
    return parse(SERVING.flags, argv, {})


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and the certificate of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    key, certificate = folder / "key.pem", folder / "cert.pem"
    issued.private_key_pem.write_to_path(key)
    for chained in issued.cert_chain_pems:
        chained.write_to_path(certificate, append=True)
    return key, certificate


async def test_https(authority: trustme.CA, files: tuple[Path, Path], caplog: pytest.LogCaptureFixture):
    context = tls_context(options("--ssl-key-file", str(files[0]), "--ssl-cert-file", str(files[1])))
    task, url = await serving(ServerConfig(port=0, tls=context), caplog)
    assert url.startswith("https://127.0.0.1:")
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(trusting)
    async with aiohttp.ClientSession() as http:
        async with http.post(url + "/completion", json={"prompt": "say:safe"}, ssl=trusting) as reply:
            assert (reply.status, (await reply.json())["content"]) == (200, "safe")
        async with http.post(url + "/completion", json={"prompt": "say:x", "stream": True}, ssl=trusting) as reply:
            assert b'"stop":true' in await reply.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):  # another authority's
            await http.get(url, ssl=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await http.get(url.replace("https", "http"))
        async with http.get(url + "/health", ssl=trusting) as reply:
            assert reply.status == 200
    await ended(task)
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_bad_key_or_certificate_is_refused(files: tuple[Path, Path], tmp_path: Path):
    key, certificate = map(str, files)
    assert tls_context(options()) is None
    (other := tmp_path / "other.pem").write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    (garbage := tmp_path / "garbage.pem").write_bytes(b"\x00" * 100)
    loaded = pem.load_pem_private_key(files[0].read_bytes(), None)
    secret = pem.BestAvailableEncryption(b"secret")
    (locked := tmp_path / "locked.pem").write_bytes(
        loaded.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, secret)
    )
    for argv, wrong in (
        (("--ssl-key-file", key), "--ssl-cert-file is needed too"),
        (("--ssl-cert-file", certificate), "--ssl-key-file is needed too"),
        (("--ssl-cert-file", certificate, "--ssl-key-file", str(other)), "mismatch"),
        (("--ssl-cert-file", str(garbage), "--ssl-key-file", key), "no PEM"),
        (("--ssl-cert-file", certificate, "--ssl-key-file", str(garbage)), "no PEM"),
        (("--ssl-cert-file", certificate, "--ssl-key-file", str(locked)), "no PEM, or the key has a password"),
    ):
        with pytest.raises(CliError, match=wrong):
            tls_context(options(*argv))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pem"):
        tls_context(options("--ssl-cert-file", certificate, "--ssl-key-file", str(tmp_path / "nowhere.pem")))


async def test_two_servers_on_one_port(caplog: pytest.LogCaptureFixture):
    assert setup.reuse_port(options("--reuse-port"))
    assert not setup.reuse_port(options())
    first, url = await serving(ServerConfig(port=0, reuse_port=True), caplog)
    port = int(url.rsplit(":", 1)[1])
    caplog.clear()
    second, same = await serving(ServerConfig(port=port, reuse_port=True), caplog)
    assert same == url
    await ended(first)
    await ended(second)


def test_a_prefix_is_a_path():
    assert [setup.api_prefix(p) for p in ("", "/", "api", "/api/v2")] == ["", "/", "/api", "/api/v2"]
    for prefix in ("/{x}", "/a b", "/?", "/\n", "/ü"):
        with pytest.raises(CliError, match="--api-prefix"):
            setup.api_prefix(prefix)


def test_a_size_is_a_number_of_mib():
    assert options().max_request_size == 64
    for size in ("0", "1.5", "2000000", "64M"):
        with pytest.raises(UsageError, match="--max-request-size"):
            options("--max-request-size", size)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["another protocol", "no header", "a length below zero", "two lengths"],
)
async def test_bytes_that_are_no_http_get_an_error_object(sent: bytes, caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # it closes the connection
    assert head.split()[1] == b"400"
    assert b"\r\nContent-Type: application/json" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("this is no HTTP request: ")
    assert "\n" not in error["message"]
    writer.close()
    await writer.wait_closed()
    await ended(task)


async def test_unknown_expectation_is_417(caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog)
    async with aiohttp.ClientSession() as http:
        for method, path in (("POST", "/completion"), ("GET", "/nope"), ("PUT", "/completion")):
            headers = {"Expect": "miracles", "Origin": url}
            async with http.request(method, url + path, headers=headers, data=b'{"prompt": "say:a"}') as reply:
                assert (reply.status, reply.content_type) == (417, "application/json")
                assert reply.headers["Access-Control-Allow-Origin"] == url
                assert (await reply.json())["error"] == {
                    "code": 417,
                    "message": "header 'Expect': can only be 100-continue",
                    "type": "invalid_request_error",
                }
        async with http.post(url + "/completion", json={"prompt": "say:a"}, expect100=True) as reply:
            assert (reply.status, (await reply.json())["content"]) == (200, "a")
        async with http.options(url + "/completion", headers={"Origin": "http://here"}) as reply:
            assert reply.status == 200
    await ended(task)


# -- addresses


async def answers(url: str, connector: aiohttp.BaseConnector | None = None) -> int:
    async with aiohttp.ClientSession(connector=connector) as http, http.get(url) as reply:
        return reply.status


async def test_the_unspecified_ipv6_address_takes_ipv4_as_well(caplog: pytest.LogCaptureFixture):
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    task, url = await serving(ServerConfig(host="::", port=0), caplog)
    port = urlsplit(url).port
    for host in ("127.0.0.1", "[::1]"):
        assert await answers(f"http://{host}:{port}/health") == 200
    await ended(task)


async def test_an_address_in_brackets(caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(host="[::1]", port=0), caplog)
    assert url.startswith("http://[::1]:")
    assert await answers(f"{url}/health") == 200
    await ended(task)


async def test_several_hosts(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    path = tmp_path / "s.sock"
    task, _ = await serving(ServerConfig(host=f"127.0.0.1, ::1,{path}", port=0), caplog)
    urls = caplog.text.split("listening on ")[1].splitlines()[0].split(", ")
    assert [urlsplit(url).port for url in urls[:1]] == [urlsplit(url).port for url in urls[1:2]]
    assert urls[2] == f"unix:{path}"
    for url in urls[:2]:
        assert await answers(f"{url}/health") == 200
    assert await answers("http://host/health", aiohttp.UnixConnector(str(path))) == 200
    await ended(task)
    assert not path.exists()


async def test_a_socket_left_behind_is_replaced_and_one_in_use_is_not(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    task, url = await serving(ServerConfig(host=str(path)), caplog)
    assert url == f"unix:{path}"
    with pytest.raises(OSError, match="in use"):
        sockets.bind(str(path), 0)
    assert await answers("http://host/health", aiohttp.UnixConnector(str(path))) == 200
    await ended(task)
    path.write_text("a file of somebody")
    with pytest.raises(OSError, match="in use"):
        sockets.bind(f"127.0.0.1,{path}", 0)
    assert path.read_text() == "a file of somebody"


# -- connections that hold up nobody


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_an_idle_connection_ends(sent: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listen, "IDLE_SECONDS", 0.1)
    task, url = await serving(ServerConfig(port=0), caplog)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(sent)
    async with asyncio.timeout(10):
        assert (b" 200 " in await reader.read()) == sent.endswith(b"\r\n\r\n")
    writer.transport.abort()
    await ended(task)


async def test_no_file_descriptors_are_left(caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog)
    full = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
    }
    for _ in range(200):
        asyncio.get_running_loop().call_exception_handler(full)
    assert await answers(f"{url}/health") == 200
    await ended(task)
    told = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert told == ["no connection can be accepted: Too many open files"]
    assert asyncio.get_running_loop().get_exception_handler() is None


async def test_a_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture):
    task, url = await serving(ServerConfig(port=0), caplog)
    body = json.dumps({"prompt": "x", "stream": True, "n_predict": 500}).encode()
    for n in range(len(body) - 2, len(body) + 1):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:n]
        )
        await writer.drain()
        assert await answers(f"{url}/health") == 200
        writer.transport.abort()
    assert await answers(f"{url}/health") == 200
    await ended(task)
    assert {record.levelname for record in caplog.records} == {"INFO"}


ENDLESS = """
import asyncio, logging, sys
from aiohttp import web
from logitless.server import listen
from logitless.server.config import ServerConfig

listen.END_SECONDS = float(sys.argv[1])
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

async def never(*_):
    await asyncio.get_running_loop().create_future()

asyncio.run(listen.listen(web.Application(), ServerConfig(port=0), never, never))
"""


@pytest.mark.parametrize(
    ("seconds", "n_signals", "status", "line"),
    [(60, 2, 128 + signal.SIGTERM, "ended by a second signal"), (0.01, 1, 1, "ended by force")],
)
def test_a_server_that_does_not_end_is_ended_by_force(seconds: float, n_signals: int, status: int, line: str):
    command = [sys.executable, "-c", ENDLESS, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for wanted in ("listening", "shutting down")[:n_signals]:
            assert wanted in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        assert line in process.stdout.read()
        assert process.wait(20) == status


async def test_a_signal_while_the_loop_is_far_behind_ends_the_server(caplog: pytest.LogCaptureFixture):
    task, _ = await serving(ServerConfig(port=0), caplog)
    loop = asyncio.get_running_loop()
    for _ in range(5000):  # asyncio's socket, by which threads and signals wake the loop, is full
        loop.call_soon_threadsafe(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        await task


async def test_sighup_reads_the_certificate_again_and_cuts_no_stream(
    authority: trustme.CA, files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    key, certificate = (tmp_path / path.name for path in files)
    key.write_bytes(files[0].read_bytes())
    certificate.write_bytes(files[1].read_bytes())
    flags = options("--ssl-key-file", str(key), "--ssl-cert-file", str(certificate))
    config = ServerConfig(port=0, tls=tls_context(flags), tls_files=(str(certificate), str(key)))
    gate = threading.Semaphore(0)
    task, url = await serving(config, caplog, FakeScheduler(gate=gate))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def serial() -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port, ssl=trusting)
        number: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        await writer.wait_closed()
        return number

    async def hung_up(line: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(5):
            while line not in caplog.text:
                await asyncio.sleep(0)

    body = {"prompt": "x", "n_predict": 2, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/completion", json=body, ssl=trusting) as stream:
        old = await serial()
        certificate.write_text("garbage")
        await hung_up("the certificate stays as it was")
        assert await serial() == old
        issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        await hung_up("the certificate was read again")
        assert await serial() != old
        gate.release(9)
        assert b'"stop":true' in await stream.read()
    await ended(task)
