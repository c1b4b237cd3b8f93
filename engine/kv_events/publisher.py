"""Publisher of KV events: a thread that sends them over ZMQ, and repeats them on request.

A message has three parts, as vLLM's: topic, sequence number (8 bytes, big endian), EventBatch. A
subscriber that sees a gap asks at the replay address for the batches from a number on."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from logitless.engine.kv_events.block_events import Event, EventBatch, merged

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("logitless.kv_events")
HIGH_WATER = 100_000  # messages that wait for a slow subscriber; later ones are lost to it
N_KEPT = 10_000  # batches that can be asked for again
MOST = 1024  # events of a batch
PATIENCE = 0.1  # seconds between looks for requests to repeat
END = (-1).to_bytes(8, "big", signed=True)  # sequence number after the last repeated batch


def default_topic(model: str, port: int = 0) -> str:
    """kv@<ip>:<port>@<model>, of a server, or kv@<ip>@<model>. The address is that of $POD_IP, or of this machine."""
    address = os.environ.get("POD_IP") or _own_address()
    return f"kv@{address}:{port}@{model}" if port else f"kv@{address}@{model}"


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class KVEventPublisher:
    """Thread that sends events. `publish` never waits, whatever subscribers do."""

    def __init__(self, endpoint: str, topic: str, replay_endpoint: str = "") -> None:
        """`endpoint`: tcp://*:PORT listens, tcp://HOST:PORT connects, as vLLM's. ValueError: an
        address cannot be used."""
        import zmq

        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._topic = topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=N_KEPT)
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, "--kv-events-endpoint", endpoint, binds=binds(endpoint))
            self._replay = None
            if replay_endpoint:
                self._replay = self._socket(zmq.ROUTER, "--kv-events-replay-endpoint", replay_endpoint, binds=True)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, event: Event) -> None:
        """Send an event soon."""
        self._events.put(event)

    def close(self) -> None:
        """Send what is left, and end."""
        self._events.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, flag: str, endpoint: str, *, binds: bool) -> zmq.Socket[bytes]:
        import zmq

        connection = self._context.socket(kind)
        connection.set_hwm(HIGH_WATER)
        try:
            if binds:
                connection.bind(endpoint)
            else:
                connection.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{flag} {endpoint}: {os.strerror(error.errno or 0)}") from None
        return connection

    def _run(self) -> None:
        n_sent, open_ended = 0, True
        while open_ended:
            if self._replay is not None:
                self._repeat(self._replay)
            events, open_ended = self._next()
            if not events:
                continue
            payload = msgspec.msgpack.encode(EventBatch(time.time(), merged(events), 0))
            number = n_sent.to_bytes(8, "big")
            n_sent += 1
            self._sent.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))  # a full socket drops it

    def _next(self) -> tuple[list[Event], bool]:
        """Events that wait, and False after the last ones."""
        events: list[Event] = []
        try:
            event = self._events.get(timeout=None if self._replay is None else PATIENCE)
            while event is not None:
                events.append(event)
                if len(events) == MOST:
                    break
                event = self._events.get_nowait()
            return events, event is not None
        except queue.Empty:
            return events, True

    def _repeat(self, replay: zmq.Socket[bytes]) -> None:
        """Answer requests for the batches from a sequence number on."""
        while replay.poll(0):
            client, *rest = replay.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != 8:
                log.warning("a request at --kv-events-replay-endpoint is not 8 bytes of a sequence number")
                continue
            for number, payload in self._sent:
                if number >= rest[1]:
                    replay.send_multipart((client, b"", number, payload))
            replay.send_multipart((client, b"", END, b""))


def binds(endpoint: str) -> bool:
    """True for an address to listen at, False for one to connect to: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
