"""The client: a backend whose memory and programs are on a server."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from logitless.backends.errors import DeviceError, DeviceLost
from logitless.backends.rpc.protocol import MAGIC, NODE, Header, Link, ProtocolError, attributes, encode, leaf, version
from logitless.graph.backend import Backend, Bytes, Kind, Location
from logitless.graph.execution.partition import TRANSFER
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, with_sources
from logitless.graph.testing.conformance import register_all

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 300.0  # kernels may have to be compiled there


def address(name: str) -> tuple[str, int]:
    """Host and port of `rpc:HOST:PORT`."""
    host, _, port = name.removeprefix("rpc:").rpartition(":")
    return host.strip("[]"), int(port)


class Held:
    """Something on the server. When nobody has it any more the next message says so: a finaliser may run anywhere."""

    __slots__ = ("__weakref__", "id", "nbytes")

    def __init__(self, id: int, gone: list[int], nbytes: int = 0) -> None:
        self.id, self.nbytes = id, nbytes
        weakref.finalize(self, gone.append, id).atexit = False


class RemoteBackend(Backend):
    """`rpc:HOST:PORT`. DeviceError when nobody is there, or who is there is another version."""

    def __init__(self, name: str) -> None:
        register_all()  # of whatever comes back it must be known what is overwritten
        self.name = name
        self._gone: list[int] = []
        self._next = 0
        self._supported: dict[str, bool] = {}
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._one_at_a_time = threading.RLock()  # plans are thought out on another thread than they are run
        try:
            sock = socket.create_connection(address(name), CONNECT_SECONDS)
            self._link = Link(sock, CONNECT_SECONDS)
            try:
                sock.sendall(MAGIC)
                hello, _ = self._ask({"do": "hello", "version": version()})
                self.alignment, self.memory_bytes = int(hello["alignment"]), int(hello["memory_bytes"])
            except BaseException:
                sock.close()
                raise
            sock.settimeout(ANSWER_SECONDS)
        except OSError as error:
            why = error.strerror or str(error).removeprefix(f"{name}: ")
            raise DeviceError(f"device {name!r} is not available: {why}") from None
        except (KeyError, TypeError, ValueError):
            raise DeviceError(f"device {name!r} is not available: it answers, but not as a server of devices") from None

    # --- messages ----------------------------------------------------------------------------------------------------

    def _tell(self, header: Header, body: Bytes | None = None) -> None:
        """Send what has no answer; if it fails there, the next answer says so."""
        with self._one_at_a_time:
            if self._gone:
                n = len(self._gone)
                header["free"] = self._gone[:n]
                del self._gone[:n]
            try:
                self._link.send(header, body)
            except (OSError, ProtocolError) as error:
                raise DeviceLost(f"{self.name}: {error}") from error

    def _ask(self, header: Header, body: Bytes | None = None) -> tuple[Header, Bytes]:
        with self._one_at_a_time:
            self._tell(header, body)
            try:
                answer, n = self._link.receive()
                found = self._link.body(n)
            except (OSError, EOFError, ProtocolError, MemoryError) as error:
                raise DeviceLost(f"{self.name}: {error}") from error
        if "error" in answer:
            line = f"{self.name}: {answer.get('message')}"
            raise MemoryError(line) if answer["error"] == "memory" else DeviceLost(line)
        return answer, found

    def _id(self) -> int:
        self._next += 1
        return self._next

    # --- what a backend is asked -------------------------------------------------------------------------------------

    def supports(self, t: Tensor) -> bool:
        nodes = [*map(leaf, t.src), t]
        index = {s: i for i, s in enumerate((*t.src, t))}
        wire = [*encode(nodes[:-1], {}), *encode([t], index)]
        for entry in wire:
            entry[-1] = ""  # names make no difference
        key = repr(wire)
        if key not in self._supported:
            self._supported[key] = bool(self._ask({"do": "supports", "graph": wire})[0]["supported"])
        return self._supported[key]

    def self_test(self, kinds: Sequence[Kind]) -> dict[str, str]:
        """Have the server try ops on its device (backends/self_test.py): what is wrong, and how; it then refuses
        them.
        """
        wrong: dict[str, str] = self._ask({"do": "self_test", "kinds": kinds})[0]["wrong"]
        if wrong:
            self._supported.clear()
        return wrong

    def rewrite(self, t: Tensor) -> Tensor:
        return t  # with all others, in `fuse`

    def fuse(self, fetches: Sequence[Tensor], mine: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        """The server's nodes in the place of these: rewritten and fused as its device wants them."""
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
        answer, _ = self._ask({"do": "fuse", "graph": wire, "results": results})
        graph, nodes, made_of = answer["id"], answer["nodes"], dict(zip(results, answer["results"], strict=True))
        # By what was before. A node in the place of several may read the weights of all where the first of them stood.
        made: dict[Tensor, Tensor] = {t: t for t in order if t.is_leaf}
        new: dict[int, Tensor] = {}  # by the server's number

        def build(last: int) -> Tensor:
            stack = [last]
            while stack:
                n = stack[-1]
                op, src, shape, dtype, attrs, name = nodes[n]
                missing = [s for s in src if s not in new]
                if n in new:  # two nodes read it, and the first to be made had it made
                    pass
                elif op == "given":
                    new[n] = made[sent[attrs["index"]]]
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

        for t in order:
            if t.is_leaf:
                continue
            if t not in own:
                made[t] = with_sources(t, tuple(made[s] for s in t.src))
            elif (i := index[t]) in made_of:
                made[t] = build(made_of[i])
                if (made[t].shape, made[t].dtype) != (t.shape, t.dtype):
                    raise DeviceLost(f"{self.name}: {made[t]!r} came for {t!r}")
        return tuple(made[f] for f in fetches)

    def alloc(self, nbytes: int, *, feeds: bool = False) -> Held:
        held = Held(self._id(), self._gone, nbytes)
        self._ask({"do": "alloc", "id": held.id, "nbytes": nbytes, "feeds": feeds})
        return held

    def constant_nbytes(self, t: Tensor) -> int:
        key = t.dtype, t.shape
        if key not in self._sizes:
            self._sizes[key] = int(self._ask({"do": "size", "graph": encode([t], {})})[0]["nbytes"])
        return self._sizes[key]

    def load(self, t: Tensor, raw: Bytes) -> Held:
        held = Held(self._id(), self._gone, len(raw))
        self._ask({"do": "load", "id": held.id, "graph": encode([t], {})}, raw)
        return held

    def upload(self, location: Location, data: Bytes) -> None:
        self._tell({"do": "upload", "at": _at(location)}, data)

    def download(self, location: Location, nbytes: int) -> Bytes:
        _, found = self._ask({"do": "download", "at": _at(location), "nbytes": nbytes})
        if len(found) != nbytes:
            raise DeviceLost(f"{self.name}: {len(found)} bytes came for {nbytes}")
        return found

    def wait(self) -> None:
        self._ask({"do": "wait"})

    def compile(self, nodes: Sequence[Tensor], locate: Callable[[Tensor], Location]) -> RemoteProgram:
        places = [[t.attrs[NODE][1], _at(locate(t)), [_at(locate(s)) for s in t.src]] for t in nodes]
        held = Held(self._id(), self._gone)
        self._ask({"do": "compile", "id": held.id, "graph": nodes[0].attrs[NODE][0], "nodes": places})
        return RemoteProgram(self, held)

    def run(self, held: Held) -> None:
        self._tell({"do": "run", "id": held.id})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.sock.close()


class RemoteProgram:
    """A program on the server."""

    def __init__(self, backend: RemoteBackend, held: Held) -> None:
        self._backend, self._held = backend, held

    def run(self) -> None:
        self._backend.run(self._held)


def _at(location: Location) -> tuple[int, int]:
    return location.buffer.id, location.offset
