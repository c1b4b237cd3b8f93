"""MCP server for tests in plain JSON-RPC, which starts at once and misbehaves: it hangs, dies or floods."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__)
TOOLS = ("search", "add", "hang", "die", "flood", "pid", "many")
FLOODS = {
    "messages": b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}\n' * 100,
    "garbage": b"no message\n" * 1000,
    "line": b"x" * (1 << 16),
}


def send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def flood(piece: bytes) -> None:
    while True:
        os.write(1, piece)


def call(id: int, name: str, arguments: dict[str, Any]) -> None:
    if name == "hang":
        return
    if name == "die":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    text = {
        "search": f"Nothing is known of {arguments.get('query')}.",
        "add": str(arguments.get("a", 0) + arguments.get("b", 0)),
        "pid": str(os.getpid()),
    }.get(name, "")
    send({"id": id, "result": {"content": [{"type": "text", "text": text}]}})
    if name == "flood":
        threading.Thread(target=flood, args=(FLOODS[arguments["kind"]],), daemon=True).start()


def answer(message: dict[str, Any]) -> None:
    id, method, params = message.get("id"), message.get("method"), message.get("params", {})
    if method == "initialize":
        about = {"protocolVersion": params["protocolVersion"], "serverInfo": {"name": "bad", "version": "1"}}
        send({"id": id, "result": {**about, "capabilities": {"tools": {}}}})
    elif method == "tools/list":
        nothing = {"properties": {}, "additionalProperties": False}
        listed = [
            {"name": name, "inputSchema": {"type": "object"} | (nothing if name == "pid" else {})} for name in TOOLS
        ]
        send({"id": id, "result": {"tools": listed}})
    elif method == "tools/call":
        call(message["id"], params["name"], params.get("arguments") or {})
    elif id is not None:
        send({"id": id, "error": {"code": -32601, "message": "Method not found"}})


if __name__ == "__main__":
    for line in sys.stdin:
        answer(json.loads(line))
