"""`scripts/bench-routes`: the time of one small request to each route, on two servers by turns.

Requests go over one connection a server, one at a time, in turns of one request each: what else
the machine does meets both servers alike. A route's figure is the median of a round; the table has
the median ratio of the rounds. The servers run with the same small model, so that what a route
costs beside the model shows."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

TEXT = "Once upon a time there was a little girl"
ASKED = [{"role": "user", "content": TEXT}]
ROUTES: dict[str, tuple[str, dict[str, object] | None]] = {
    "health": ("/health", None),
    "models": ("/v1/models", None),
    "tokenize": ("/tokenize", {"content": TEXT}),
    "detokenize": ("/detokenize", {"tokens": [403, 407, 261, 378, 400, 401]}),
    "completion": ("/completion", {"prompt": TEXT, "n_predict": 1}),
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1}),
    "chat-streamed": ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 8, "stream": True}),
    "messages": ("/v1/messages", {"messages": ASKED, "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 1}),
    "embeddings": ("/v1/embeddings", {"input": TEXT}),
    "apply-template": ("/apply-template", {"messages": ASKED}),
}


class Client:
    """One connection, which stays open."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host = address.netloc
        self._socket = socket.create_connection((address.hostname, address.port or 80), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def message(self, path: str, body: dict[str, object] | None) -> bytes:
        raw = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
        return f"{head}\r\n".encode() + raw

    def seconds(self, message: bytes) -> float:
        """Until the answer's last byte."""
        began = time.perf_counter()
        self._socket.sendall(message)
        answer = bytearray()
        while not self._is_whole(answer):
            piece = self._socket.recv(1 << 16)
            if not piece:
                sys.exit("bench-routes: the server has closed the connection")
            answer += piece
        elapsed = time.perf_counter() - began
        if not answer.startswith(b"HTTP/1.1 200"):
            sys.exit(f"bench-routes: {bytes(message[:60])!r}: {answer[:400].decode(errors='replace')}")
        return elapsed

    @staticmethod
    def _is_whole(answer: bytearray) -> bool:
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(answer[:end]).lower()
        if b"transfer-encoding: chunked" in head:
            return answer.endswith(b"\r\n0\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
        return len(answer) >= end + 4 + length


def medians(requests: list[Callable[[], float]], n: int) -> list[float]:
    """The median seconds of each, called by turns."""
    times: list[list[float]] = [[] for _ in requests]
    for turn in range(n):
        for i in range(len(requests)):
            which = (i + turn) % len(requests)  # each one is first as often
            times[which].append(requests[which]())
    return [statistics.median(each) for each in times]


def main() -> None:
    parser = argparse.ArgumentParser(description="small requests to each route, on two servers by turns")
    parser.add_argument("before", help="http://host:port of a server that runs")
    parser.add_argument("after", help="the other one")
    parser.add_argument("--routes", default=",".join(ROUTES), help="of them, by name, with commas between them")
    parser.add_argument("--requests", type=int, default=200, help="to each server and route in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    clients = [Client(options.before), Client(options.after)]
    print("| route | before, ms | after, ms | ratio | of each round |\n" + "|---" * 5 + "|")
    for name in options.routes.split(","):
        path, body = ROUTES[name]
        calls = [partial(client.seconds, client.message(path, body)) for client in clients]
        medians(calls, 20)  # warm
        rounds = [medians(calls, options.requests) for _ in range(options.rounds)]
        ratios = sorted(after / before for before, after in rounds)
        before, after = (min(times) for times in zip(*rounds, strict=True))
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {1e3 * before:.2f} | {1e3 * after:.2f} | {statistics.median(ratios):.2f} | {each} |")


if __name__ == "__main__":
    main()
