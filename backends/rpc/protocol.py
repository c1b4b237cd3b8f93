"""RPC wire format: frames of a JSON header and raw bytes; graphs are lists of nodes.

A connection begins with MAGIC from the client. A frame is the lengths of both parts, the header and
the bytes."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from logitless.graph.backend import Bytes
from logitless.graph.tensor import LEAVES, Tensor

MAGIC = b"logitless rpc 1\n"
MAX_HEADER = 8 << 20
_LENGTHS = struct.Struct("<IQ")
Header = dict[str, Any]


class ProtocolError(Exception):
    """A message violates the protocol."""


class Link:
    """One end of a connection."""

    def __init__(self, sock: socket.socket, timeout: float | None) -> None:
        """`timeout`: seconds to wait for the other end; None: forever."""
        self.sock = sock
        self.until: float | None = None  # deadline of all that is received, by time.monotonic
        self.stall: float | None = None  # seconds between two parts of a message; the next may take any time
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # a dead peer is noticed within 20 s
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, header: Header, body: Bytes | None = None) -> None:
        """Send one frame. ProtocolError for a header that is too long, OSError for a lost peer."""
        text = json.dumps(header, separators=(",", ":"), default=_plain).encode()
        if len(text) > MAX_HEADER:
            raise ProtocolError(f"the header has {len(text)} bytes, at most {MAX_HEADER} are allowed")
        data = memoryview(b"") if body is None else np.ascontiguousarray(body).data.cast("B")
        head = _LENGTHS.pack(len(text), len(data)) + text
        if len(data) < 1 << 16:
            self.sock.sendall(head + bytes(data))
        else:
            self.sock.sendall(head)
            self.sock.sendall(data)

    def receive(self) -> tuple[Header, int]:
        """Receive a header; the length of the bytes after it, which `body` receives.

        EOFError when the connection was closed, ProtocolError for a damaged header."""
        if self.stall is not None:
            self.sock.settimeout(None)
        start = self.body(1).tobytes()
        if self.stall is not None:
            self.sock.settimeout(self.stall)
        n_header, n_body = _LENGTHS.unpack(start + self.body(_LENGTHS.size - 1).tobytes())
        if n_header > MAX_HEADER:
            raise ProtocolError(f"the header has {n_header} bytes, at most {MAX_HEADER} are allowed")
        try:
            header = json.loads(self.body(n_header).tobytes())
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise ProtocolError("the header is not a JSON object")
        return header, n_body

    def body(self, n: int) -> Bytes:
        """Receive n bytes. EOFError when the connection was closed."""
        data = np.empty(n, np.uint8)
        view, at = data.data, 0
        while at < n:
            if self.until is not None:
                self.sock.settimeout(max(1e-3, self.until - time.monotonic()))
            got = self.sock.recv_into(view[at:], min(n - at, 1 << 20))
            if not got:
                raise EOFError("the connection was closed")
            at += got
        return data


def _plain(value: Any) -> Any:
    """Convert numpy scalars for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def encode(nodes: Sequence[Tensor], index: Mapping[Tensor, int]) -> list[list[Any]]:
    """Encode nodes as (op, indices of sources, shape, type, attributes, name)."""
    return [
        [t.op, [index[s] for s in t.src], t.shape, t.dtype, {k: v for k, v in t.attrs.items() if k != NODE}, t.name]
        for t in nodes
    ]


NODE = "node"  # attribute of a node that a server made: (graph, index) there


def attributes(decoded: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of an op from JSON: lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in decoded.items()}


def leaf(t: Tensor) -> Tensor:
    """The leaf that stands for a source on the server: itself, or a feed of its shape."""
    return t if t.op in LEAVES else Tensor("feed", (), t.shape, t.dtype)


@cache
def version() -> str:
    """A digest of the sources of ops and backends, which must be equal at both ends."""
    digest = hashlib.sha256(MAGIC)
    root = Path(__file__).resolve().parents[2]
    for folder in ("graph", "backends"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
