"""RPC server: each client has buffers and programs on a backend of its own.

Messages are checked; nothing that a client sends is executed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logitless.backends.errors import DeviceError
from logitless.backends.registry import open_backends
from logitless.backends.rpc.indices import NOT_LENT, SAME, Region, bounds_of, holds, parts_of
from logitless.backends.rpc.protocol import MAGIC, Header, Link, ProtocolError, attributes, encode, version
from logitless.backends.self_test import self_test_kinds
from logitless.graph.backend import Backend, Buffer, Bytes, Location, Program
from logitless.graph.dtype import DTYPES
from logitless.graph.indices import Bounds, Ranges
from logitless.graph.op import OPS, writes_of
from logitless.graph.order import rebuild, toposort
from logitless.graph.tensor import Tensor, const, variable
from logitless.graph.testing.conformance import register_all

if TYPE_CHECKING:
    import ssl

HOST_SHARE = 0.9  # of the host's memory, where the device has none of its own
log = logging.getLogger("logitless.rpc")
MAX_CLIENTS = 16
MAX_GREETINGS = 64  # connections that have not said hello; the oldest makes room for the next
HELLO_SECONDS = 10.0  # for all of a hello, TLS included
STALL_SECONDS = 60.0  # between two parts of a message
MAX_PROGRAMS = 1 << 16
MAX_GRAPHS = 8  # kept for a client to compile parts of
WeightType = tuple[str, tuple[int, ...]]  # type and shape of a weight
Answer = tuple[Header, Bytes | None]
_BAD_MESSAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class Budget:
    """Bytes of the device that all clients together may allocate."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._left, self._lock = nbytes, nbytes, threading.Lock()

    def take(self, nbytes: int) -> None:
        """Reserve bytes, or give them back (negative). MemoryError when too few are left."""
        with self._lock:
            if nbytes > self._left:
                raise MemoryError(f"{nbytes} bytes wanted, {self._left} of {self.nbytes} left")
            self._left -= nbytes


@dataclass(frozen=True)
class ClientBuffer:
    """A client's buffer. `kind`: type and shape of the weight in it, which is neither written nor read."""

    buffer: Buffer
    nbytes: int
    reserved: int
    kind: WeightType | None
    feeds: bool = False  # only the client writes to it, unless a program does (Client._written)


class Door:
    """The entrance: for clients with a key, over TLS if there is a context, as many as have a place.

    A connection takes a place once it has said hello, so silent connections hold none."""

    def __init__(self, knows: Callable[[str], bool] = lambda _: True, tls: ssl.SSLContext | None = None) -> None:
        """`knows`: True for a key that opens."""
        self.knows, self.tls = knows, tls
        self.places = threading.BoundedSemaphore(MAX_CLIENTS)
        self._greeting: dict[socket.socket, socket.socket] = {}  # in order of arrival, with a second handle
        self._lock = threading.Lock()

    def arrived(self, connection: socket.socket) -> None:
        """Count a connection that has not said hello; end the oldest if there are too many."""
        with self._lock:
            self._greeting[connection] = connection.dup()  # TLS takes the first away
            if len(self._greeting) > MAX_GREETINGS:
                with self._greeting.pop(next(iter(self._greeting))) as oldest, contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def greeted(self, connection: socket.socket) -> None:
        """Count it no longer: it has said hello, or has gone."""
        with self._lock:
            if (handle := self._greeting.pop(connection, None)) is not None:
                handle.close()


def lent_device(name: str, threads: int, host_nbytes: int) -> tuple[Callable[[], Backend], Budget]:
    """A function that opens a device for a client, and the memory of all clients. DeviceError: it is missing.

    `threads`: of the CPU, 0 for every core. `host_nbytes`: the host's memory, of which a device
    without memory of its own lends a share."""

    def open_backend() -> Backend:
        first, *others = open_backends((name,), threads)
        for other in others:
            other.close()
        return first

    backend = open_backend()
    budget = Budget(int(backend.memory_bytes or HOST_SHARE * host_nbytes))
    backend.close()
    return open_backend, budget


def listen(sock: socket.socket, open_backend: Callable[[], Backend], budget: Budget, door: Door | None = None) -> None:
    """Serve clients, each on a thread and a backend of its own, until the socket is closed."""
    register_all()
    door = door or Door()
    while True:
        try:
            connection, (host, port, *_) = sock.accept()
        except OSError:
            return
        door.arrived(connection)

        def serve_client(connection: socket.socket = connection, name: str = f"{host}:{port}") -> None:
            log.info("%s: closed: %s", name, serve(connection, name, open_backend, budget, door))

        threading.Thread(target=serve_client, name=f"rpc client {host}:{port}", daemon=True).start()


def serve(connection: socket.socket, name: str, open_backend: Callable[[], Backend], budget: Budget, door: Door) -> str:
    """Serve one client until it leaves; the reason why the connection ended."""
    arrived = connection
    try:
        try:
            if door.tls is not None:
                connection.settimeout(HELLO_SECONDS)
                connection = door.tls.wrap_socket(connection, server_side=True)
            link = _greet(connection, door)
        finally:
            door.greeted(arrived)
        if not door.places.acquire(blocking=False):
            link.send({"error": "full", "message": f"the server has {MAX_CLIENTS} clients already"})
            return f"refused: there are {MAX_CLIENTS} clients"
        try:
            return _serve(link, name, open_backend, budget)
        finally:
            door.places.release()
    except (OSError, EOFError, ProtocolError) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()


def _greet(connection: socket.socket, door: Door) -> Link:
    """The link of a client that may come in. ProtocolError, after it was answered: it may not."""
    until = time.monotonic() + HELLO_SECONDS
    link = Link(connection, HELLO_SECONDS)
    link.until = until
    if link.body(len(MAGIC)).tobytes() != MAGIC:
        raise ProtocolError("the client does not speak this protocol")
    header, n = link.receive()
    if header.get("do") != "hello" or n:
        raise ProtocolError("the first message is not hello")
    if not door.knows(str(header.get("key", ""))):
        link.send({"error": "key", "message": "the API key is missing or wrong (LOGITLESS_RPC_API_KEY)"})
        raise ProtocolError("the API key is missing or wrong")
    if header.get("version") != version():
        link.send({"error": "version", "message": "the server is another version of logitless"})
        raise ProtocolError("the client is another version")
    link.until, link.stall = None, STALL_SECONDS
    return link


def _serve(link: Link, name: str, open_backend: Callable[[], Backend], budget: Budget) -> str:
    try:
        client = Client(link, open_backend(), budget)
    except DeviceError as error:
        link.send({"error": "device", "message": str(error)})
        return str(error)
    try:
        own = client.backend
        link.send({"alignment": own.alignment, "memory_bytes": budget.nbytes})
        log.info("%s: connected", name)
        while True:
            client.step()
    finally:
        client.close()


class Client:
    """One client's memory, programs and graphs. `step` handles one message."""

    def __init__(self, link: Link, backend: Backend, budget: Budget) -> None:
        self.link, self.backend, self._budget = link, backend, budget
        self._memory: dict[int, ClientBuffer] = {}
        self._programs: dict[int, tuple[Program, list[Region]]] = {}
        self._graphs: dict[int, tuple[list[Tensor], dict[Tensor, Ranges]]] = {}
        self._indices: dict[int, dict[tuple[int, int, Bounds], Region]] = {}  # by the memory's id
        self._written: set[int] = set()  # memory of feeds to which a program writes
        self._n_graphs = 0
        self._unread = 0  # bytes of the current message
        # error of a message without an answer, for the next answer
        self._failed: Header | None = None

    def close(self) -> None:
        self._programs.clear()
        self._free(list(self._memory))
        self.backend.close()

    def step(self) -> None:
        """Handle one message. ProtocolError for a bad one, after the client was answered."""
        header, self._unread = self.link.receive()
        do = header.get("do")
        answer: tuple[Header, Bytes | None] | None = None
        try:
            work = _COMMANDS[str(do)]
            self._free(header.get("free", []))
            if self._failed is None:
                answer = work(self, header)
        except MemoryError as error:
            self._failed = {"error": "memory", "message": str(error) or "out of memory"}
        except _BAD_MESSAGE as error:
            why = f"{str(do)[:20]!r}: {type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
            self.link.send({"error": "refused", "message": why})
            raise ProtocolError(why) from None
        while self._unread:  # body of a message that was not handled
            self._body(min(self._unread, 1 << 20))
        if do in ("upload", "run"):
            return
        if self._failed is not None or answer is None:
            self.link.send(self._failed or {})
            self._failed = None
        else:
            self.link.send(*answer)

    def _body(self, n: int) -> Bytes:
        if n > self._unread:
            raise ValueError(f"{n} bytes expected, {self._unread} left in the message")
        self._unread -= n
        return self.link.body(n)

    # --- memory -----------------------------------------------------------------------------------

    def _keep(
        self, header: Header, nbytes: int, reserved: int, make: Callable[[], Buffer], kind: WeightType | None
    ) -> None:
        id = int(header["id"])
        if id in self._memory or nbytes < 0:
            raise ValueError("the id is taken, or the size negative")
        self._budget.take(reserved)
        try:
            self._memory[id] = ClientBuffer(make(), nbytes, reserved, kind, bool(header.get("feeds")))
        except BaseException:
            self._budget.take(-reserved)
            raise

    def _free(self, ids: list[int]) -> None:
        for id in ids:
            self._programs.pop(id, None)
            self._indices.pop(id, None)
            self._written.discard(id)
            if (memory := self._memory.pop(id, None)) is not None:
                self._budget.take(-memory.reserved)

    def _alloc(self, header: Header) -> Answer:
        n, feeds = int(header["nbytes"]), bool(header.get("feeds"))
        self._keep(header, n, n, lambda: self.backend.alloc(n, feeds=feeds), None)
        return {}, None

    def _weight(self, header: Header) -> Tensor:
        (t,) = decode(header["graph"])
        if t.op != "variable" or not t.attrs["constant"]:
            raise ValueError("not a weight")
        return t

    def _takes(self, t: Tensor) -> int:
        """Bytes of a weight; a backend in host memory keeps those of the file as well."""
        return self.backend.constant_nbytes(t) + (0 if self.backend.memory_bytes else t.nbytes)

    def _size(self, header: Header) -> Answer:
        return {"nbytes": self._takes(self._weight(header))}, None

    def _load(self, header: Header) -> Answer:
        t = self._weight(header)
        if self._unread != t.nbytes:
            raise ValueError(f"{t!r}: expected {t.nbytes} bytes, got {self._unread}")
        self._keep(
            header, t.nbytes, self._takes(t), lambda: self.backend.load(t, self._body(t.nbytes)), (t.dtype, t.shape)
        )
        return {}, None

    def _location(self, at: list[int], nbytes: int, weight: Tensor | None = None) -> Location:
        memory, offset = self._memory[at[0]], int(at[1])
        if memory.kind != (None if weight is None else (weight.dtype, weight.shape)):
            raise ValueError("the buffer holds another weight, or none")
        if offset < 0 or nbytes < 0 or offset + nbytes > memory.nbytes or offset % 4:
            raise ValueError(f"{nbytes} bytes at {offset} of {memory.nbytes}")
        return Location(memory.buffer, offset)

    def _upload(self, header: Header) -> Answer:
        location = self._location(header["at"], self._unread)
        data = self._body(self._unread)
        for region in self._indices.get(header["at"][0], {}).values():
            region.check(location.offset, data)
        self.backend.upload(location, data)
        return {}, None

    def _download(self, header: Header) -> Answer:
        n = int(header["nbytes"])
        return {}, self.backend.download(self._location(header["at"], n), n)

    def _wait(self, _: Header) -> Answer:
        self.backend.wait()
        return {}, None

    # --- graphs -----------------------------------------------------------------------------------

    def _supports(self, header: Header) -> Answer:
        t = decode(header["graph"])[-1]
        return {"supported": t.op not in NOT_LENT and self.backend.supports(t)}, None

    def _self_test(self, header: Header) -> Answer:
        kinds = {(str(op), tuple(map(str, dtypes))) for op, dtypes in header["kinds"]}
        return {"failures": self_test_kinds(self.backend, (kind for kind in kinds if kind[0] in OPS))}, None

    def _fuse(self, header: Header) -> Answer:
        nodes_sent = decode(header["graph"])
        if lacking := next((t.op for t in nodes_sent if t.op in NOT_LENT), ""):
            raise ValueError(f"{lacking} is not lent")
        replacement = rebuild(nodes_sent, lambda t, node: t if t.is_leaf else self.backend.rewrite(node))
        results = [replacement[nodes_sent[i]] for i in header["results"]]
        results = list(self.backend.fuse(results, lambda t: not t.is_leaf))
        order = toposort(results)
        index = {t: i for i, t in enumerate(order)}
        nodes = encode(order, index)
        for i, t in enumerate(nodes_sent):
            if t.is_leaf and t in index:
                nodes[index[t]] = ["given", [], t.shape, t.dtype, {"index": i}, ""]
        self._n_graphs += 1
        self._graphs[self._n_graphs] = order, bounds_of(nodes_sent)
        self._graphs.pop(self._n_graphs - MAX_GRAPHS, None)
        return {"id": self._n_graphs, "nodes": nodes, "results": [index[t] for t in results]}, None

    def _compile(self, header: Header) -> Answer:
        (order, bounds), nodes, locations = self._graphs[header["graph"]], [], dict[Tensor, Location]()
        regions: list[Region] = []
        written: list[tuple[int, int, int, Tensor]] = []  # memory, start, end, result: of the nodes so far
        for n, to, sources in header["nodes"]:
            t = order[_index(n, order)]
            if t.is_leaf:
                raise ValueError("a leaf cannot be compiled")
            for s, at in ((t, to), *zip(t.src, sources, strict=True)):
                weight = s if s.op == "variable" and s.attrs["constant"] else None
                locations[s] = self._location(at, 0 if weight is not None else s.nbytes, weight)
                for start, size, of in parts_of(s, bounds) if s is not t else ():
                    first = int(at[1]) + start
                    over = (w for m, a, b, w in reversed(written) if m == at[0] and a < first + size and first < b)
                    writer = next(over, None)
                    if writer is not None and not holds(writer, s):
                        raise ValueError(f"the indices that {t.op} takes are overwritten by {writer.op}")
                    if writer is None:  # they are the client's own values
                        key = first, size, of
                        known = self._indices.setdefault(at[0], {})
                        regions.append(known.setdefault(key, Region(at[0], *key)))
            if t.op not in SAME:
                changed = [(to, t), *((sources[i], t.src[i]) for i in writes_of(t))]
                written += [(at[0], int(at[1]), int(at[1]) + of.nbytes, t) for at, of in changed]
                self._written.update(at[0] for at, _ in changed)
            nodes.append(t)
        self.backend.prepare(nodes)
        if len(self._programs) >= MAX_PROGRAMS:
            raise MemoryError(f"the client has {MAX_PROGRAMS} programs already")
        self._programs[int(header["id"])] = self.backend.compile(nodes, lambda t: locations[t]), regions
        return {}, None

    def _run(self, header: Header) -> Answer:
        program, regions = self._programs[header["id"]]
        for region in regions:
            memory = self._memory[region.memory]
            if not (region.checked and memory.feeds) or region.memory in self._written:
                data = self.backend.download(Location(memory.buffer, region.offset), region.nbytes)
                region.check(region.offset, data)
        program.run()
        return {}, None


def decode(wire: list[Any]) -> list[Tensor]:
    """Decode nodes by their ops' constructors, which check every shape."""
    nodes: list[Tensor] = []
    for op, src, shape, dtype, attrs, name in wire:
        shape = tuple(shape)
        if dtype not in DTYPES or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
            raise ValueError("unknown type or bad shape")
        if op == "feed":
            t = Tensor("feed", (), shape, dtype)
        elif op == "variable":
            t = variable(str(name), shape, dtype, constant=bool(attrs["constant"]))
        elif op == "const":
            t = const(float(attrs["value"]), dtype)
        else:
            t = OPS[op](*(nodes[_index(i, nodes)] for i in src), name=str(name), **attributes(attrs))
        if (t.shape, t.dtype) != (shape, dtype):
            raise ValueError(f"{t!r} does not match {dtype}{list(shape)}")
        nodes.append(t)
    return nodes


def _index(i: Any, of: list[Tensor]) -> int:
    if type(i) is not int or not 0 <= i < len(of):
        raise IndexError("no such node")
    return i


_COMMANDS: dict[str, Callable[[Client, Header], Answer]] = {
    "alloc": Client._alloc,
    "size": Client._size,
    "load": Client._load,
    "upload": Client._upload,
    "download": Client._download,
    "supports": Client._supports,
    "self_test": Client._self_test,
    "fuse": Client._fuse,
    "compile": Client._compile,
    "run": Client._run,
    "wait": Client._wait,
}
