"""`scripts/bench-http`: streams that begin together, on one server after the other.

The client is one thread with one selector that parses only each stream's last event: it shares the machine with the
servers, and what it takes they do not have.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

VOCABULARY = 5000  # prompts are of ids below: every model has them


@dataclass
class Stream:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    times: list[float] = field(default_factory=list)  # of arrivals that had an event

    def n_tokens(self) -> int:
        """As the server counts them: it may send two in one event, and none while a character is incomplete."""
        if not self.received.startswith(b"HTTP/1.1 200"):
            sys.exit(f"bench-http: {self.received[:200].decode(errors='replace')}")
        last = self.received[self.received.rindex(b"data: {") + 6 :].split(b"\n", 1)[0]
        return int(json.loads(last)["tokens_predicted"])


@dataclass(frozen=True)
class Round:
    tokens_s: float
    first: list[float]  # seconds to the first token of each stream
    gaps: list[float]


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port or 80))


def message(url: str, turn: int, index: int, n_prompt: int, n_gen: int) -> bytes:
    """Prompts differ from each other, and so do those of each turn: nothing is found in a cache."""
    prompt = [(7919 * (index + 1) + 31 * j + 331 * turn) % VOCABULARY + 300 for j in range(n_prompt)]
    return request_of(
        url, {"prompt": prompt, "n_predict": n_gen, "cache_prompt": False, "seed": index, "temperature": 0.8}
    )


def request_of(url: str, body: dict[str, object]) -> bytes:
    """A streamed completion as it is sent."""
    raw = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def begin(connection: socket.socket, request: bytes) -> Stream:
    connection.sendall(request)
    connection.setblocking(False)
    return Stream(connection)


def receive(selector: selectors.BaseSelector) -> None:
    """What has arrived for any of the selector's streams, after waiting for some; one that ended leaves."""
    for key, _ in selector.select():
        stream: Stream = key.data
        part = stream.socket.recv(1 << 16)
        if not part:
            selector.unregister(stream.socket)
            stream.socket.close()
        elif b"data: " in part:
            stream.times.append(time.perf_counter())
        stream.received += part


def measure(url: str, turn: int, options: argparse.Namespace) -> Round:
    began = time.perf_counter()
    messages = (message(url, turn, i, options.prompt, options.gen) for i in range(options.streams))
    streams = [begin(connect(url), request) for request in messages]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            receive(selector)
    seconds = time.perf_counter() - began
    gaps = [b - a for stream in streams for a, b in zip(stream.times, stream.times[1:], strict=False)]
    n_tokens = sum(stream.n_tokens() for stream in streams)
    return Round(n_tokens / seconds, sorted(stream.times[0] - began for stream in streams), sorted(gaps))


def part(values: list[float], share: float) -> float:
    """The value that so large a share of the sorted values do not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description="streams that begin together, on servers by turns")
    parser.add_argument("url", nargs="+", help="http://host:port of a server that runs")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--gen", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=3, help="after one that does not count")
    options = parser.parse_args()
    rounds: dict[str, list[Round]] = {url: [] for url in options.url}
    for turn in range(options.turns + 1):
        for url, seen in rounds.items():
            found = measure(url, turn, options)
            if turn:
                seen.append(found)
    print(
        "| server | tokens/s | of each turn | first token, median and p95, s | gaps p99 and greatest, ms |\n"
        + "|---" * 5
        + "|"
    )
    for url, seen in rounds.items():
        first = sorted(t for found in seen for t in found.first)
        gaps = sorted(t for found in seen for t in found.gaps)
        each = ", ".join(f"{found.tokens_s:.0f}" for found in seen)
        print(
            f"| {url} | {statistics.median(found.tokens_s for found in seen):.0f} | {each} "
            f"| {part(first, 0.5):.2f}, {part(first, 0.95):.2f} | {1e3 * part(gaps, 0.99):.0f}, {1e3 * gaps[-1]:.0f} |"
        )


if __name__ == "__main__":
    main()
