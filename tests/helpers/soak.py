"""Soak test: random clients against a server with scarce resources, killed now and then.

It covers shared prefixes, cancels, disconnects, priorities, slots saved and restored, and cache
reuse. It passes when every complete text equals that of the same request alone (except with cache
reuse), no request starves, and pages, slots and memory are released. The kills come in the first
half, so that one life is long."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.helpers.paths import MODELS, ROOT

MODEL = MODELS / "stories260K.gguf"
N_CTX = 384
STORIES = ("Once upon a time there was a little girl who had a dog and a ball. ", "The sun was warm and the boy ")
SAMPLERS: list[dict[str, Any]] = [{"temperature": 0}, {}, {"mirostat": 2}, {"repeat_penalty": 1.2}, {"n_probs": 2}]
FLAGS = f"-c {N_CTX} -np 6 -kvu -ub 48 --cache-ram 2 --context-shift --metrics -t 1".split()


def bodies() -> list[dict[str, Any]]:
    """Twenty requests with prompts that share prefixes in many ways."""
    requests = []
    for i in range(20):
        prompt = STORIES[i % 2] * (1 + i % 4) + "She said " * (i % 3)
        n = (8, 30, 90, 150)[i % 4]
        requests.append({"prompt": prompt, "n_predict": n, "seed": i, "return_tokens": True, **SAMPLERS[i % 5]})
    return requests


class Server:
    """A server that can be killed and restarted."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.command = [sys.executable, "-m", "tests.helpers.soak_server", "serve", "-m", str(MODEL), *flags]
        self.notes = folder / "notes"
        self.start()

    def start(self) -> None:
        environ = {**os.environ, "SOAK_NOTES": str(self.notes)}
        command = [*self.command, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environ, text=True, cwd=ROOT)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if match := re.search(r"listening on (http://\S+)", line):
                self.url = match[1]
                break
        else:
            raise RuntimeError("the server ended")
        self._reading = threading.Thread(target=self.process.stderr.read, daemon=True)  # a full pipe would stop it
        self._reading.start()
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=60).close()
                return
            except urllib.error.HTTPError as error:
                error.close()
                if self.process.poll() is not None:
                    raise RuntimeError("the server ended") from error

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def memory(self) -> float:
        """Memory of the process in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+)", text)
        assert match is not None
        return int(match[1]) / 1024


class Soak:
    def __init__(self, server: Server, expected: list[Any], seed: int, pause: float) -> None:
        self.server, self.expected, self.bodies = server, expected, bodies()
        self.random = random.Random(seed)
        self.pause = pause
        self.counts: Counter[str] = Counter()
        self.longest: dict[str, float] = {}  # longest response times in seconds
        self.wrong: list[str] = []
        self.memory: list[list[float]] = [[]]
        self.down = False  # the server is being killed
        self.life = 0

    async def run(self, seconds: float, n_clients: int, n_kills: int) -> None:
        self.end = time.monotonic() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            clients = [asyncio.create_task(self.client(session)) for _ in range(n_clients)]
            for _ in range(n_kills):
                await self.live(seconds / 2 / n_kills)
                await self.kill(session)
            await self.live(self.end - time.monotonic())
            await asyncio.gather(*clients)
            await self.rest(session)

    async def live(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(0.5)
            self.memory[-1].append(self.server.memory())

    async def kill(self, session: aiohttp.ClientSession) -> None:
        """Kill with SIGKILL; the next server continues from a slot file."""
        self.down = True
        self.life += 1
        await asyncio.to_thread(self.server.kill)
        await asyncio.to_thread(self.server.start)
        self.memory.append([])
        self.down = False
        self.counts["kills"] += 1
        async with session.post(f"{self.server.url}/slots/0?action=restore", json={"filename": "slot"}) as reply:
            self.expect(reply.status in (200, 404, 503), f"restore after a kill: {reply.status}")

    async def client(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self.end:
            if self.down:
                await asyncio.sleep(0.05)
                continue
            life = self.life
            try:
                await self.one(session)
            except (aiohttp.ClientError, asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
                self.expect(self.down or life != self.life, f"lost without a kill: {error!r}")
                self.counts["lost in a kill"] += 1
            await asyncio.sleep(self.random.uniform(0, 2 * self.pause))

    async def one(self, session: aiohttp.ClientSession) -> None:
        r = self.random
        kinds = ("whole", "stream", "leave", "abort", "slot", "reuse", "look", "bad")
        kind = r.choices(kinds, (30, 30, 12, 8, 8, 6, 6, 6))[0]
        i = r.randrange(len(self.bodies))
        body = {**self.bodies[i], "priority": r.choice((0, 0, 0, -1, 1)), "user": r.choice("ab")}
        if r.random() < 0.2:
            body["id_slot"] = r.randrange(6)
        self.counts[kind] += 1
        began = time.monotonic()
        await self.ask(session, kind, i, body)
        name = "a slot's action" if kind == "slot" else f"priority {body['priority']}"
        self.longest[name] = max(self.longest.get(name, 0), time.monotonic() - began)

    async def ask(self, session: aiohttp.ClientSession, kind: str, i: int, body: dict[str, Any]) -> None:
        r, url = self.random, self.server.url
        if kind == "slot":
            action = r.choice(("save", "restore", "erase"))
            path = f"{url}/slots/{r.randrange(6)}?action={action}"
            async with session.post(path, json={"filename": "slot"}) as reply:
                self.expect(reply.status in (200, 404, 503), f"{action}: {reply.status} {await reply.text()}")
        elif kind == "reuse":
            body |= {"prompt": body["prompt"][r.randrange(40) :], "n_cache_reuse": 4}
            async with session.post(f"{url}/completion", json=body) as reply:
                answer = await reply.json()
                self.expect(reply.status == 200 and bool(answer.get("stop")), f"reuse: {str(answer)[:300]}")
        elif kind == "look":
            async with session.get(url + r.choice(("/slots", "/metrics", "/props"))) as reply:
                self.expect(reply.status == 200, f"look: {reply.status}")
        elif kind == "bad":
            async with session.post(f"{url}/completion", json={"prompt": "x" * 9000}) as reply:
                self.expect(reply.status == 400, f"too long: {reply.status}")
        elif kind == "whole":
            async with session.post(f"{url}/completion", json=body) as reply:
                answer = await reply.json()
                self.judge(i, (answer.get("content"), answer.get("tokens")), answer)
        elif kind == "abort":
            with_timeout = aiohttp.ClientTimeout(total=r.uniform(0.001, 0.2))
            try:
                async with session.post(f"{url}/completion", json=body, timeout=with_timeout) as reply:
                    await reply.read()
            except TimeoutError:
                self.counts["aborted"] += 1
        else:
            await self.stream(session, i, body, r.randrange(1, 20) if kind == "leave" else -1)

    async def stream(self, session: aiohttp.ClientSession, i: int, body: dict[str, Any], leave_after: int) -> None:
        text, tokens, ended = "", [], False
        async with session.post(f"{self.server.url}/completion", json={**body, "stream": True}) as reply:
            async for line in reply.content:
                if line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        self.expect(False, f"an error in a stream: {chunk}")
                        return
                    text += chunk["content"]
                    tokens += [] if chunk["stop"] else chunk["tokens"]
                    ended = ended or chunk["stop"]
                    leave_after -= 1
                    if leave_after == 0:
                        reply.close()
                        return
        if not ended:
            raise aiohttp.ClientPayloadError("the stream has no end")
        self.judge(i, (text, tokens), chunk)

    def judge(self, i: int, got: object, answer: object) -> None:
        self.counts["texts compared"] += 1
        self.expect(got == self.expected[i], f"request {i}: {str(answer)[:300]}")

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    async def rest(self, session: aiohttp.ClientSession) -> None:
        """Wait until everything is idle again."""
        for _ in range(200):
            async with session.get(f"{self.server.url}/metrics") as reply:
                match = dict(re.findall(r"^\w+:(\w+) (\S+)$", await reply.text(), re.M))
            if float(match["requests_processing"]) == float(match["requests_deferred"]) == 0:
                break
            await asyncio.sleep(0.05)
        self.expect(float(match["requests_processing"]) == 0, "a slot is still busy")
        self.expect(float(match["requests_deferred"]) == 0, "a request still waits")
        self.expect(match["kv_pages_used"] == match["kv_pages_cached"], "a page has no owner")
        for name in ("preemptions_total", "recomputed_tokens_total", "host_pages_restored_total"):
            self.counts[name] = int(float(match[name]))


async def alone(url: str) -> list[Any]:
    """Output of each request from an otherwise idle server."""
    expected = []
    async with aiohttp.ClientSession() as session:
        for body in bodies():
            async with session.post(f"{url}/completion", json={**body, "cache_prompt": False}) as reply:
                answer = await reply.json()
                expected.append((answer["content"], answer["tokens"]))
    return expected


def soak(seconds: float, n_clients: int, n_kills: int, seed: int, pause: float = 0) -> tuple[Soak, str]:
    """Run the soak test; returns its figures as text.

    `pause`: mean seconds between two requests of a client.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = Server(folder, *FLAGS, "-np", "1")
        expected = asyncio.run(alone(first.url))
        first.kill()
        server = Server(folder, *FLAGS, "--slot-save-path", name)
        run = Soak(server, expected, seed, pause)
        try:
            asyncio.run(run.run(seconds, n_clients, n_kills))
            run.expect(server.process.poll() is None, "the server has ended")
        finally:
            server.kill()
        lines = [line.split() for line in server.notes.read_text().splitlines()] if server.notes.exists() else []
    steps, ms = sorted(int(a) for a, _ in lines), sorted(float(b) for _, b in lines)
    figures = [f"{seconds:.0f} s, {n_clients} clients: " + ", ".join(f"{k} {v}" for k, v in run.counts.items())]
    figures.append("longest answers: " + ", ".join(f"{k} {v:.1f} s" for k, v in sorted(run.longest.items())))
    if lines:
        at = int(0.99 * (len(lines) - 1))
        figures.append(f"{len(lines)} disconnects: free after {steps[at]} steps and {ms[at]:.1f} ms (p99)")
        run.expect(steps[at] <= 1, "a slot was not free after a step")
    for life in run.memory:
        if len(life) > 20:
            at = [f"{life[i * (len(life) - 1) // 4]:.0f}" for i in range(5)]
            figures.append(f"memory of a life of {len(life) / 2:.0f} s: {', '.join(at)} MiB")
            run.expect(life[-1] < life[len(life) // 2] + 8, "memory grows")
    return run, "\n".join(figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kills", type=int, default=None, help="default: one every two minutes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not MODEL.exists():
        print(f"soak: there is no {MODEL}", file=sys.stderr)
        return 1
    kills = max(1, int(options.seconds / 120)) if options.kills is None else options.kills
    run, figures = soak(options.seconds, options.clients, kills, options.seed)
    print(figures)
    for line in run.wrong[:20]:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
