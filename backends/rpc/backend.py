"""RPC client: a backend whose memory and programs are on a server."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from logitless.backends.errors import DeviceError, DeviceLost
from logitless.backends.rpc.protocol import MAGIC, NODE, Header, Link, ProtocolError, attributes, encode, leaf, version
from logitless.graph.backend import Backend, Bytes, Kind, Location
from logitless.graph.execution.partition import TRANSFER
from logitless.graph.order import rebuild, toposort
from logitless.graph.tensor import Tensor
from logitless.graph.testing.conformance import register_all

API_KEY, CA_FILE = "LOGITLESS_RPC_API_KEY", "LOGITLESS_RPC_CA_FILE"  # of the environment
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 300.0  # kernels may have to be compiled there


def address(name: str) -> tuple[str, int]:
    """Host and port of `rpc:HOST:PORT`."""
    host, _, port = name.removeprefix("rpc:").rpartition(":")
    return host.strip("[]"), int(port)


def _connect(name: str) -> socket.socket:
    """A connection to the server, over TLS if there is a file of authorities to trust. OSError."""
    host, port = address(name)
    sock = socket.create_connection((host, port), CONNECT_SECONDS)
    if not (authorities := os.environ.get(CA_FILE)):
        return sock
    import ssl

    try:
        return ssl.create_default_context(cafile=authorities).wrap_socket(sock, server_hostname=host)
    except OSError as error:
        sock.close()
        if isinstance(error, FileNotFoundError):
            raise OSError(f"{CA_FILE}: {authorities}: there is no such file") from None
        raise OSError(f"TLS: {getattr(error, 'verify_message', '') or error}") from None


class RemoteHandle:
    """An object on the server, freed there with the next message after this handle is collected."""

    __slots__ = ("__weakref__", "id", "nbytes")

    def __init__(self, id: int, freed: list[int], nbytes: int = 0) -> None:
        self.id, self.nbytes = id, nbytes
        weakref.finalize(self, freed.append, id).atexit = False


OTHER_SERVER = "it answers, but not as `logitless rpc-server` does"


class RemoteBackend(Backend):
    """The device `rpc:HOST:PORT`. DeviceError without a server of the same version."""

    def __init__(self, name: str) -> None:
        register_all()  # the ops of nodes that come back say what they overwrite
        self.name = name
        self._freed: list[int] = []
        self._next = 0
        self._supported: dict[str, bool] = {}
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._lock = threading.RLock()  # plans are made on another thread than they run on
        try:
            sock = _connect(name)
            self._link = Link(sock, CONNECT_SECONDS)
            try:
                sock.sendall(MAGIC)
                hello, _ = self._request({"do": "hello", "version": version(), "key": os.environ.get(API_KEY, "")})
                self.alignment, self.memory_bytes = int(hello["alignment"]), int(hello["memory_bytes"])
            except BaseException:
                sock.close()
                raise
            sock.settimeout(ANSWER_SECONDS)
        except OSError as error:
            if isinstance(error.__cause__, ProtocolError):
                raise DeviceError(f"device {name!r} is not available: {OTHER_SERVER}") from None
            why = error.strerror or str(error).removeprefix(f"{name}: ")
            raise DeviceError(f"device {name!r} is not available: {why}") from None
        except (KeyError, TypeError, ValueError):
            raise DeviceError(f"device {name!r} is not available: {OTHER_SERVER}") from None

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, header: Header, body: Bytes | None = None) -> None:
        """Send a message without an answer; its failure comes with the next answer."""
        with self._lock:
            if self._freed:
                n = len(self._freed)
                header["free"] = self._freed[:n]
                del self._freed[:n]
            try:
                self._link.send(header, body)
            except (OSError, ProtocolError) as error:
                raise DeviceLost(f"{self.name}: {error}") from error

    def _request(self, header: Header, body: Bytes | None = None) -> tuple[Header, Bytes]:
        with self._lock:
            self._send(header, body)
            try:
                answer, n = self._link.receive()
                data = self._link.body(n)
            except (OSError, EOFError, ProtocolError, MemoryError) as error:
                raise DeviceLost(f"{self.name}: {error}") from error
        if "error" in answer:
            line = f"{self.name}: {answer.get('message')}"
            raise MemoryError(line) if answer["error"] == "memory" else DeviceLost(line)
        return answer, data

    def _id(self) -> int:
        self._next += 1
        return self._next

    # --- the Backend protocol ---------------------------------------------------------------------

    def supports(self, t: Tensor) -> bool:
        nodes = [*map(leaf, t.src), t]
        index = {s: i for i, s in enumerate((*t.src, t))}
        wire = [*encode(nodes[:-1], {}), *encode([t], index)]
        for entry in wire:
            entry[-1] = ""  # support does not depend on names
        key = repr(wire)
        if key not in self._supported:
            self._supported[key] = bool(self._request({"do": "supports", "graph": wire})[0]["supported"])
        return self._supported[key]

    def self_test(self, kinds: Sequence[Kind]) -> dict[str, str]:
        """Self-test ops on the server (backends/self_test.py), which refuses the ops that fail."""
        failures: dict[str, str] = self._request({"do": "self_test", "kinds": kinds})[0]["failures"]
        if failures:
            self._supported.clear()
        return failures

    def rewrite(self, t: Tensor) -> Tensor:
        return t  # `fuse` rewrites all nodes

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        """Have the server rewrite and fuse its nodes; its new nodes replace them here."""
        order = toposort(fetches)
        own = {t for t in order if not t.is_leaf and t.op != TRANSFER and mine(t)}
        if not own:
            return fetches
        read = {s for t in order if t not in own for s in t.src} | set(fetches)
        near = own | {s for t in order if t in own for s in t.src}
        sent = [t for t in order if t in near]
        index = {t: i for i, t in enumerate(sent)}
        results = [i for i, t in enumerate(sent) if t in own & read]
        wire = encode([t if t in own else leaf(t) for t in sent], index)
        answer, _ = self._request({"do": "fuse", "graph": wire, "results": results})
        graph, nodes, new_index = answer["id"], answer["nodes"], dict(zip(results, answer["results"], strict=True))
        # old node → new node; one that replaces several may read weights of all of them
        replacement = {t: t for t in order if t.is_leaf}
        new: dict[int, Tensor] = {}  # by the server's index

        def build(last: int) -> Tensor:
            stack = [last]
            while stack:
                n = stack[-1]
                op, src, shape, dtype, attrs, name = nodes[n]
                missing = [s for s in src if s not in new]
                if n in new:  # an earlier reader had it built
                    pass
                elif op == "given":
                    new[n] = replacement[sent[attrs["index"]]]
                elif missing:
                    stack += missing
                    continue
                elif op == "const":
                    new[n] = Tensor(op, (), (), dtype, attrs)
                else:
                    known = {**attributes(attrs), NODE: (graph, n)}
                    new[n] = Tensor(op, tuple(new[s] for s in src), tuple(shape), dtype, known, name)
                stack.pop()
            return new[last]

        def replace(t: Tensor, node: Tensor) -> Tensor:
            if t in own and (i := index[t]) in new_index:
                node = build(new_index[i])
                if (node.shape, node.dtype) != (t.shape, t.dtype):
                    raise DeviceLost(f"{self.name}: expected {t!r}, got {node!r}")
            return node

        rebuild(order, replace, replacement)
        return tuple(replacement[f] for f in fetches)

    def alloc(self, nbytes: int, *, feeds: bool = False) -> RemoteHandle:
        handle = RemoteHandle(self._id(), self._freed, nbytes)
        self._request({"do": "alloc", "id": handle.id, "nbytes": nbytes, "feeds": feeds})
        return handle

    def constant_nbytes(self, t: Tensor) -> int:
        key = t.dtype, t.shape
        if key not in self._sizes:
            self._sizes[key] = int(self._request({"do": "size", "graph": encode([t], {})})[0]["nbytes"])
        return self._sizes[key]

    def load(self, t: Tensor, raw: Bytes) -> RemoteHandle:
        handle = RemoteHandle(self._id(), self._freed, len(raw))
        self._request({"do": "load", "id": handle.id, "graph": encode([t], {})}, raw)
        return handle

    def upload(self, location: Location, data: Bytes) -> None:
        self._send({"do": "upload", "at": _at(location)}, data)

    def download(self, location: Location, nbytes: int) -> Bytes:
        _, data = self._request({"do": "download", "at": _at(location), "nbytes": nbytes})
        if len(data) != nbytes:
            raise DeviceLost(f"{self.name}: expected {nbytes} bytes, got {len(data)}")
        return data

    def wait(self) -> None:
        self._request({"do": "wait"})

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> RemoteProgram:
        places = [[t.attrs[NODE][1], _at(locate(t)), [_at(locate(s)) for s in t.src]] for t in nodes]
        handle = RemoteHandle(self._id(), self._freed)
        self._request({"do": "compile", "id": handle.id, "graph": nodes[0].attrs[NODE][0], "nodes": places})
        return RemoteProgram(self, handle)

    def run(self, handle: RemoteHandle) -> None:
        self._send({"do": "run", "id": handle.id})

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._link.sock.close()


class RemoteProgram:
    """A program on the server."""

    def __init__(self, backend: RemoteBackend, handle: RemoteHandle) -> None:
        self._backend, self._handle = backend, handle

    def run(self) -> None:
        self._backend.run(self._handle)


def _at(location: Location) -> tuple[int, int]:
    return location.buffer.id, location.offset
