"""RPC: texts like those of a local device, lost connections, and hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trustme

from logitless import AsyncLLM, RequestError, SamplingParams
from logitless.backends import self_test
from logitless.backends.cpu.backend import CPUBackend
from logitless.backends.errors import DeviceError, DeviceLost
from logitless.backends.rpc import server as rpc
from logitless.backends.rpc.backend import RemoteBackend
from logitless.backends.rpc.indices import bounds_of, holds, parts_of
from logitless.backends.rpc.protocol import MAGIC, encode, version
from logitless.cli import main
from logitless.cli.setup.server import tls_context
from logitless.engine.batch import DeviceFailed
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.runner.placement import PlacementOptions
from logitless.graph.backend import Backend, Location
from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.causal_attention import causal_attention
from logitless.graph.ops.attention.paged_attention import attention, chunk_ends, store_k
from logitless.graph.ops.elementwise import silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear_attention import causal_conv
from logitless.graph.ops.moe import expert_gather, expert_linear, expert_order, expert_rows, expert_scatter, top_experts
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.training.loss import cross_entropy
from logitless.graph.tensor import Tensor, feed, variable
from logitless.graph.testing.conformance import OK, run
from logitless.server.auth import ApiKeys
from tests.conformance.test_placements import continued
from tests.engine.runner.test_several_devices import Wrong, nodes
from tests.helpers.fuzz import examples
from tests.helpers.numpy_backend import NumpyBackend
from tests.helpers.op_cases import cases

MIB = 1 << 20


class Lender:
    """A server in this process: `name` is its device's."""

    def __init__(
        self, open_backend: Callable[[], Backend], nbytes: int = 64 * MIB, door: rpc.Door | None = None
    ) -> None:
        self.budget = rpc.Budget(nbytes)
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.name = f"rpc:127.0.0.1:{self.sock.getsockname()[1]}"
        self.thread = threading.Thread(target=rpc.listen, args=(self.sock, open_backend, self.budget, door))
        self.thread.start()

    def close(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.thread.join()


@pytest.fixture
def lend() -> Iterator[Callable[..., Lender]]:
    lenders: list[Lender] = []

    def start(open_backend: Callable[[], Any] = lambda: CPUBackend(1), **options: Any) -> Lender:
        lenders.append(Lender(open_backend, **options))
        return lenders[-1]

    yield start
    for lender in lenders:
        lender.close()


@pytest.mark.parametrize("n_layers", [None, 3], ids=["all", "some"])
def test_rpc_device_matches_llama_cpp_and_falls_back_when_the_server_dies(
    lend: Callable[..., Lender], shared_data: Path, n_layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current run fails; later ones use the remaining devices."""
    links: list[socket.socket] = []
    serve = rpc.serve
    monkeypatch.setattr(rpc, "serve", lambda sock, *rest: (links.append(sock), serve(sock, *rest))[1])
    lender = lend()
    expected = json.loads((shared_data / "expected" / "stories260K.gguf.json").read_text())
    options = RunnerOptions(
        n_ctx=256,
        n_slots=1,
        n_ubatch=16,
        type_k="f32",
        type_v="f32",
        threads=1,
        devices=(lender.name,),
        placement=PlacementOptions(n_layers),
    )
    engine = ModelRunner(shared_data / "models" / "stories260K.gguf", options)
    engine.load()
    placement, _ = engine.measure()
    assert {s.backend for s in placement.segments} == ({0, 1} if n_layers else {0})
    assert continued(engine, expected["prompt_ids"], 24) == expected["greedy_ids"][:24]
    links[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(DeviceFailed, match=f"^{lender.name}: "):
        continued(engine, expected["prompt_ids"], 1)
    assert engine.devices == ("cpu",)
    assert continued(engine, expected["prompt_ids"], 6) == expected["greedy_ids"][:6]
    assert engine.lost_remotes == [lender.name]
    assert not engine.take_up_returned()  # begins a try
    engine._lost.join()
    assert engine.take_up_returned()
    assert engine.devices == (lender.name,)
    assert engine.lost_remotes == []
    assert continued(engine, expected["prompt_ids"], 6) == expected["greedy_ids"][:6]
    engine.close()


def test_rpc_devices_that_return_are_taken_up_after_sleep_and_others_left_out(
    lend: Callable[..., Lender], shared_data: Path
) -> None:
    lender, away = lend(), "rpc:127.0.0.1:1"
    options = RunnerOptions(64, n_slots=1, n_ubatch=16, type_k="f32", type_v="f32", threads=1, devices=(lender.name,))
    engine = ModelRunner(shared_data / "models" / "stories260K.gguf", options)
    for wanted, expected in (((away,), ("cpu",)), ((away, lender.name), (lender.name,))):
        engine.devices = ("cpu",)  # as after a loss
        engine.options = replace(options, devices=wanted)
        engine.sleep()
        engine.wake()
        assert engine.devices == expected
        assert engine.lost_remotes == [away]
        assert not engine.take_up_returned()
        engine._lost.join()
        assert not engine.take_up_returned()
        assert len(continued(engine, [1, 2, 3], 2)) == 2
    engine.close()


async def test_rpc_device_that_returns_is_taken_up_while_the_engine_is_idle(
    lend: Callable[..., Lender], shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is forgotten, and texts are as before; meanwhile the CPU writes them."""
    links: list[socket.socket] = []
    serve = rpc.serve
    monkeypatch.setattr(rpc, "serve", lambda sock, *rest: (links.append(sock), serve(sock, *rest))[1])
    monkeypatch.setattr("logitless.engine.async_engine.LOST_SECONDS", 0.01)
    lender, returned = lend(), threading.Event()
    log = logging.getLogger("logitless.engine")
    listener = SimpleNamespace(level=0, handle=lambda r: "have returned" in r.getMessage() and returned.set())
    monkeypatch.setattr(log, "handlers", [*log.handlers, listener])
    greedy = SamplingParams(temperature=0, max_tokens=8)
    model = shared_data / "models" / "stories260K.gguf"
    options = {"cache_type_k": "f32", "cache_type_v": "f32", "ubatch_size": 16, "parallel": 1}
    async with AsyncLLM(model, device=lender.name, ctx_size=64, threads=1, **options) as llm:
        before = await llm.complete(["Once upon a time"], greedy)
        links[0].shutdown(socket.SHUT_RDWR)
        with pytest.raises(RequestError, match="the device was lost"):
            await llm.complete(["Once upon a time"], greedy)
        assert (await llm.complete(["Once upon a time"], greedy))[0].token_ids == before[0].token_ids
        assert await asyncio.to_thread(returned.wait, 60)
        after = await llm.complete(["Once upon a time"], greedy)
        engine = await llm.service.ask(lambda _: llm.service.served.engine)
        assert engine.devices == (lender.name,)
        assert after[0].token_ids == before[0].token_ids
        assert after[0].cached_tokens == 0


def test_rpc_device_is_self_tested_on_the_server(lend: Callable[..., Lender]) -> None:
    backend, tried = RemoteBackend(lend(lambda: Wrong("silu")).name), nodes()
    assert all(map(backend.supports, tried))
    why = self_test.run_self_test(backend, tried)
    assert set(why) == {"silu", "softmax"}
    assert "the driver has no idea" in why["softmax"]
    assert [backend.supports(t) for t in tried] == [False, True, False]
    backend.close()


WITH_INDICES = [
    "get_rows", "add_rows", "add_rows_to", "expert_gather", "expert_scatter", "expert_weights", "expert_rows",
    "expert_sum", "expert_linear", "expert_matmul", "expert_products", "causal_conv", "causal_conv_update",
    "linear_attention", "linear_attention_update", "cross_entropy", "cross_entropy_back", "log_probs", "sample",
    "causal_attention", "full_attention",
]  # fmt: skip


@pytest.mark.parametrize("op", ["linear_parts", "attention", "store_k", "slice_rows", "adamw_step", *WITH_INDICES])
def test_ops_on_the_server_match_the_reference(
    op: str, lend: Callable[..., Lender], request: pytest.FixtureRequest
) -> None:
    """The cases of conformance, with guarded memory on the server."""
    backend = RemoteBackend(lend().name)
    outcomes = [run(problem, [backend]) for problem in cases(request, op)]
    assert outcomes
    assert [o.detail for o in outcomes if o.status != OK] == []
    backend.close()


def test_server_memory_is_limited_and_freed(lend: Callable[..., Lender]) -> None:
    lender = lend(NumpyBackend, nbytes=MIB)
    first, second = RemoteBackend(lender.name), RemoteBackend(lender.name)
    assert first.memory_bytes == MIB
    held = first.alloc(900_000)
    with pytest.raises(MemoryError, match="200000 bytes wanted, 148576 of 1048576 left"):
        second.alloc(200_000)
    weight = variable("w", (300_000,), constant=True)
    with pytest.raises(MemoryError, match="bytes wanted"):
        second.load(weight, np.zeros(1_200_000, np.uint8))
    del held
    first.wait()  # any message tells what nobody has any more
    kept = second.alloc(200_000)
    second.upload(Location(kept, 8), np.arange(16, dtype=np.uint8))
    assert second.download(Location(kept, 12), 8).tolist() == list(range(4, 12))
    first.close()
    second.close()


def said_to(lender: Lender, *sent: bytes) -> bytes:
    """All that the server answers before it closes."""
    host, port = lender.sock.getsockname()
    answer = b""
    with socket.create_connection((host, port), 20) as sock, contextlib.suppress(OSError):
        sock.sendall(b"".join(sent))
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(1 << 16):
            answer += part
    return answer


def frame(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<IQ", len(text), len(body)) + text + body


HELLO = MAGIC + frame({"do": "hello", "version": version()})
X = ["feed", [], [2, 3], "f32", {}, "x"]
ROOM = frame({"do": "alloc", "id": 1, "nbytes": 8})


WEIGHT = ["variable", [], [2], "f32", {"constant": True}, "w"]
LOADED = frame({"do": "load", "id": 1, "graph": [WEIGHT]}, bytes(8))


def graph(*nodes: list[Any], do: str = "supports", **more: Any) -> bytes:
    return HELLO + frame({"do": do, "graph": nodes, **more})


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "the client does not speak this protocol"),
        (b"logit", "the connection was closed"),
        (MAGIC + b"\xff" * 40, "the header has 4294967295 bytes"),
        (MAGIC + frame(b"[" * 100_000), "the header is not JSON"),
        (MAGIC + frame([1]), "the header is not a JSON object"),
        (MAGIC + frame({"do": "alloc"}), "the first message is not hello"),
        (MAGIC + frame({"do": "hello", "version": "0"}), "the client is another version"),
        (HELLO + frame({"do": "exec"}), "'exec': KeyError"),
        (HELLO + frame({"do": ["run"]}), "KeyError"),
        (HELLO + frame({"do": "run", "id": 7}), "'run': KeyError"),
        (HELLO + frame({"do": "alloc", "id": 1, "nbytes": -1}), "'alloc': ValueError"),
        (HELLO + ROOM + frame({"do": "upload", "at": [1, 4]}, bytes(8)), "8 bytes at 4 of 8"),
        (HELLO + ROOM + frame({"do": "download", "at": [1, -4], "nbytes": 4}), "4 bytes at -4 of 8"),
        (HELLO + LOADED + frame({"do": "upload", "at": [1, 0]}, bytes(8)), "holds another weight, or none"),
        (HELLO + LOADED + frame({"do": "download", "at": [1, 0], "nbytes": 8}), "holds another weight, or none"),
        (graph(X, ["silu", [1], [2, 3], "f32", {}, ""]), "no such node"),
        (graph(X, ["silu", [0], [2, 4], "f32", {}, ""]), "does not match"),
        (graph(X, ["__import__", [0], [2, 3], "f32", {}, ""]), "KeyError"),
        (graph(["feed", [], [2, -3], "f32", {}, "x"]), "unknown type or bad shape"),
        (graph(["variable", [], [9], "f32", {"constant": True}, "w"], do="load", id=1), "got 0"),
        (graph(X, do="fuse", results=[5]), "IndexError"),
        (HELLO + frame({"do": "compile", "id": 1, "graph": 3, "nodes": []}), "'compile': KeyError"),
    ],
)
def test_bad_messages_end_the_connection(
    sent: bytes, line: str, lend: Callable[..., Lender], caplog: pytest.LogCaptureFixture
) -> None:
    lender = lend(NumpyBackend, nbytes=MIB)
    with caplog.at_level(logging.INFO, "logitless.rpc"):
        said_to(lender, sent)
        good = RemoteBackend(lender.name)  # it serves the next one
        assert good.supports(silu(feed("x", (2, 3))))
        closed(lender)
        good.close()
    lines = [r.getMessage() for r in caplog.records if "closed: " in r.getMessage()]
    # a client of the test before may be closed only now
    assert any(line in said for said in lines)
    assert not any("\n" in said for said in lines)


def test_damaged_messages_do_no_harm(lend: Callable[..., Lender]) -> None:
    """Messages are changed, doubled and left out at random; memory is freed each time."""
    lender = lend(NumpyBackend, nbytes=MIB)
    x, rng = feed("x", (2, 3)), random.Random(4)
    y = silu(x)
    wire = encode([x, y], {x: 0, y: 1})
    good = [
        frame({"do": "alloc", "id": 1, "nbytes": 64}),
        frame({"do": "upload", "at": [1, 0]}, bytes(24)),
        frame({"do": "fuse", "graph": wire, "results": [1]}),
        frame({"do": "compile", "id": 2, "graph": 1, "nodes": [[1, [1, 32], [[1, 0]]]]}),
        frame({"do": "run", "id": 2}),
        frame({"do": "download", "at": [1, 32], "nbytes": 24}),
    ]
    assert said_to(lender, HELLO, *good).endswith(bytes(24))  # silu(0) is 0
    table, ids = feed("table", (2, 3)), feed("ids", (4,), "i32")
    wire = encode([table, ids, get_rows(table, ids)], {table: 0, ids: 1})
    good += [
        frame({"do": "alloc", "id": 3, "nbytes": 16, "feeds": True}),
        frame({"do": "upload", "at": [3, 0]}, np.array([1, 0, 1, 0], np.int32).tobytes()),
        frame({"do": "alloc", "id": 4, "nbytes": 48}),
        frame({"do": "fuse", "graph": wire, "results": [2]}),
        frame({"do": "compile", "id": 5, "graph": 2, "nodes": [[2, [4, 0], [[1, 0], [3, 0]]]]}),
        frame({"do": "run", "id": 5}),
        frame({"do": "download", "at": [4, 0], "nbytes": 48}),
    ]
    assert said_to(lender, HELLO, *good).endswith(bytes(48))
    for _ in range(examples(150)):
        bad = list(good)
        i = rng.randrange(len(bad))
        data = bytearray(bad[i])
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        bad[i] = bytes(data) if rng.random() < 0.8 else bad[i] * rng.randrange(3)
        said_to(lender, HELLO, *bad)
    last = RemoteBackend(lender.name)
    last.alloc(MIB - 1000)
    last.close()


def test_no_server_is_an_error_of_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(DeviceError, match=f"^device 'rpc:127.0.0.1:{port}' is not available: Connection refused$"):
        RemoteBackend(f"rpc:127.0.0.1:{port}")


def test_server_of_another_version_is_refused(lend: Callable[..., Lender], monkeypatch: pytest.MonkeyPatch) -> None:
    lender = lend(NumpyBackend)
    monkeypatch.setattr("logitless.backends.rpc.backend.version", lambda: "another")
    with pytest.raises(DeviceError, match=r"is not available: the server is another version of logitless$"):
        RemoteBackend(lender.name)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("rpc-server --device opencl:0,cpu", "--device opencl:0,cpu: one device of this machine"),
        ("rpc-server --ssl-key-file k", "--ssl-cert-file is needed too"),
        ("rpc-server --api-key ,", "--api-key: "),
        ("rpc-server --api-key-file /dev/null", "--api-key-file: /dev/null has no key"),
        ("rpc-server --host 256.0.0.1", "cannot listen on 256.0.0.1:50052: "),
        ("plan -m x --rpc nowhere", "--rpc: 'nowhere' is not a list of HOST:PORT"),
        ("plan -m x --rpc h:0", "--rpc: 'h:0' is not a list of HOST:PORT"),
        ("plan -m x --device rpc:h", "--device: 'rpc:h' is not a list of cpu, opencl:N, vulkan:N and rpc:HOST:PORT"),
    ],
)
def test_wrong_flags(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words.split()) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(f"logitless: {line}")
    assert "Unknown error" not in error
    assert error.count("\n") == 1


# --- strangers ------------------------------------------------------------------------------------


def run_unchecked(session: Session, y: Tensor, feeds: dict[str, Any]) -> list[Any]:
    """Run a graph as a client that does not check indices itself."""
    plan = session.plan(lambda: [y])
    for name, array in plan.input_buffers.items():
        array[...] = feeds[name]
    return plan.run(None)


def attended(backend: RemoteBackend, **wrong: int) -> list[float]:
    """Attention over pages of the server, with one of its indices as given."""
    session = Session([backend])
    cache_k, cache_v = session.define("k", (4, 1, 8, 16)), session.define("v", (4, 1, 16, 8))
    q, tables = feed("q", (2, 1, 8)), feed("tables", (2, 3), "i32")
    slot, pos, cells = feed("slot", (2,), "i32"), feed("pos", (2,), "i32"), feed("cells", (2,), "i32")
    stored = store_k(cache_k, q, cells)
    y = attention(q, stored, cache_v, tables, slot, pos, scale=1.0)
    values: dict[str, Any] = {
        "q": np.ones((2, 1, 8), np.float32),
        "tables": np.array([[0, 1, 2], [3, 1, 0]], np.int32),
        "slot": np.array([0, 1], np.int32),
        "pos": np.array([47, 3], np.int32),
        "cells": np.array([0, 48], np.int32),
    }
    for name, index in wrong.items():
        values[name].reshape(-1)[1] = index
    (result,) = run_unchecked(session, y, values)
    return [float(x) for x in np.asarray(result).reshape(-1)]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tables": i} for i in (4, -2, 2**31 - 1, -(2**31))),
        *({"slot": i} for i in (2, -2)),
        *({"pos": i} for i in (48, 2**30)),
        *({"cells": i} for i in (64, -2, 2**31 - 1)),
    ],
)
def test_indices_beyond_the_cache_end_their_client_alone(
    wrong: dict[str, int], lend: Callable[..., Lender], caplog: pytest.LogCaptureFixture
) -> None:
    lender = lend(NumpyBackend, nbytes=MIB)
    good, bad = RemoteBackend(lender.name), RemoteBackend(lender.name)
    expected = attended(good)
    (value,) = wrong.values()
    with caplog.at_level(logging.INFO, "logitless.rpc"):
        with pytest.raises(DeviceLost):
            attended(bad, **wrong)
        assert attended(good) == expected
        closed(lender)
    told = next(r.getMessage() for r in caplog.records if "ValueError" in r.getMessage())
    assert re.search(rf"the index {value} is not between -1 and \d+$", told)
    good.close()
    bad.close()


E, T = 4, 3
BEYOND: dict[str, tuple[Callable[[Callable[..., Any]], Any], dict[str, Any], list[int]]] = {
    "experts": (
        lambda f: expert_gather(f("x", (T, E)), f("i", (T, 2), "i32")), {"i": [[0, 1], [2, 3], [3, 0]]}, [E, -1]
    ),
    "rows of experts": (
        lambda f: expert_scatter(f("x", (T, 2)), f("i", (T, 2), "i32"), n=E), {"i": [[0, 1], [2, 3], [3, 0]]}, [E, -1]
    ),
    "order": (
        lambda f: expert_linear(f("x", (E, 32)), f("w", (2 * 8, 32)), f("i", (3, E), "i32"), n=2),
        {"i": [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 1]]},
        [E, -1],
    ),
    "sorted ids": (lambda f: expert_rows(f("x", (T, 8)), expert_order(f("i", (T, 2), "i32"), n=E)), {"i": [[0, 1]] * 3},
                   [E, -1, 2**31 - 1]),
    "part of ids": (
        lambda f: get_rows(f("x", (E, 8)), reshape(slice_rows(f("i", (3, 2), "i32"), start=0, stop=2), shape=(4,))),
        {"i": [[0, 1]] * 3},
        [E, -1],
    ),
    "states": (
        lambda f: causal_conv(f("x", (T, 8)), f("w", (8, 1, 3)), f("s", (2, 2, 8)), f("i", (T,), "i32")),
        {"i": [0, -1, 1]},
        [2, -2],
    ),
    "targets": (lambda f: cross_entropy(f("x", (T, 8)), f("i", (T,), "i32")), {"i": [0, 7, -100]}, [8, 2**31 - 1]),
    "packed texts": (
        lambda f: causal_attention(
            f("q", (4, 1, 8)), f("k", (4, 1, 8)), f("v", (4, 1, 8)), f("i", (4,), "i32"), length=4, scale=1.0
        ),
        {"i": [0, 0, 0, 0]},
        [4, -1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BEYOND)
def test_indices_of_other_ops_are_checked(
    kind: str, lend: Callable[..., Lender], caplog: pytest.LogCaptureFixture
) -> None:
    build, values, beyond = BEYOND[kind]
    lender, feeds = lend(NumpyBackend, nbytes=MIB), {}
    backend = RemoteBackend(lender.name)

    def fed(name: str, shape: tuple[int, ...], dtype: str = "f32") -> Any:
        feeds[name] = np.ones(shape, np.float32) if name not in values else np.array(values[name], np.int32)
        return feed(name, shape, dtype)

    y = build(fed)
    session = Session([backend])
    assert np.isfinite(np.asarray(session.compute([y], feeds)[0])).all()
    (name,) = values
    for index in beyond:
        feeds[name].reshape(-1)[1] = index
        lost = RemoteBackend(lender.name)
        caplog.clear()
        with caplog.at_level(logging.INFO, "logitless.rpc"):
            with pytest.raises(DeviceLost):
                run_unchecked(Session([lost]), y, feeds)
            closed(lender)
        assert f"the index {index} is not between" in caplog.text
        lost.close()
    backend.close()


def test_indices_that_a_program_overwrites_are_refused() -> None:
    """A client says where results lie: its experts' ids may not be what another node has written there."""
    ids = top_experts(feed("x", (T, E)), n=2)
    assert holds(ids, ids)
    assert holds(reshape(ids, shape=(2, T)), ids)
    assert not holds(feed("x", (T, 2)), ids)
    assert not holds(top_experts(feed("x", (T, E + 1)), n=2), ids)
    assert parts_of(ids, {}) == [(0, T * 2 * 4, (0, E))]
    with pytest.raises(ValueError, match="the indices that expert_gather takes from top_experts may be out"):
        bounds_of([ids, expert_gather(feed("y", (T, E - 1)), ids)])


@pytest.mark.parametrize(("limit", "window"), [(32, 8), (33, 8), (32, 7), (32, 0)])
def test_the_ends_of_chunks_are_bounded_as_positions_are(limit: int, window: int) -> None:
    """Those of other tables, or of wider chunks than the window, are refused."""
    pos = feed("pos", (T,), "i32")
    ends = chunk_ends(pos, size=8, limit=limit)
    q, k, v = feed("q", (T, 2, 4)), feed("k", (5, 2, 4, 16)), feed("v", (5, 2, 16, 4))
    tables, slot = feed("tables", (1, 2), "i32"), feed("slot", (T,), "i32")
    nodes = [ends, attention(q, k, v, tables, slot, ends, scale=1.0, window=window)]
    if (limit, window) != (32, 8):
        with pytest.raises(ValueError, match="the indices that attention takes from chunk_ends may be out"):
            bounds_of(nodes)
        return
    assert bounds_of(nodes)[pos] == ((-1, 32),)


def closed(lender: Lender) -> None:
    """Wait until the server has ended all connections but the one that asks."""
    while sum(thread.name.startswith("rpc client") for thread in threading.enumerate()) > 1:
        with contextlib.suppress(DeviceError):
            RemoteBackend(lender.name).close()


def test_connections_that_say_nothing_hold_no_place(
    lend: Callable[..., Lender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_CLIENTS", 2)
    monkeypatch.setattr(rpc, "MAX_GREETINGS", 8)
    lender = lend(NumpyBackend, nbytes=MIB)
    silent = [socket.create_connection(lender.sock.getsockname()) for _ in range(20)]
    for sock in silent[::2]:
        with contextlib.suppress(OSError):
            sock.sendall(MAGIC[:5])
    first, second = RemoteBackend(lender.name), RemoteBackend(lender.name)
    with pytest.raises(DeviceError, match="the server has 2 clients already"):
        RemoteBackend(lender.name)
    assert silent[0].recv(1) == b""  # the oldest has made room
    first.close()
    for _ in range(1000):
        with contextlib.suppress(DeviceError):
            RemoteBackend(lender.name).close()
            break
    else:
        raise AssertionError("the place of a client that left is not free")
    second.close()
    for sock in silent:
        sock.close()


@pytest.mark.parametrize("name", ["HELLO_SECONDS", "STALL_SECONDS"])
def test_a_message_that_stops_in_the_middle_ends(
    name: str, lend: Callable[..., Lender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, name, 0.05)
    lender = lend(NumpyBackend, nbytes=MIB)
    with socket.create_connection(lender.sock.getsockname(), 20) as sock:
        if name == "HELLO_SECONDS":
            sock.sendall(MAGIC)
        else:
            sock.sendall(HELLO + ROOM[:5])
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass  # ends when the server hangs up


@pytest.mark.parametrize("secure", [False, True])
def test_keys_and_tls(
    secure: bool, lend: Callable[..., Lender], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tls = None
    if secure:
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
        files = {"ssl_key_file": str(tmp_path / "key"), "ssl_cert_file": str(tmp_path / "cert")}
        issued.private_key_pem.write_to_path(files["ssl_key_file"])
        issued.cert_chain_pems[0].write_to_path(files["ssl_cert_file"])
        authority.cert_pem.write_to_path(str(tmp_path / "ca"))
        tls = tls_context(SimpleNamespace(**files))
    lender = lend(NumpyBackend, nbytes=MIB, door=rpc.Door(ApiKeys(["sesame"]).match, tls))
    if secure:
        with pytest.raises(DeviceError):  # it speaks no TLS
            RemoteBackend(lender.name)
        monkeypatch.setenv("LOGITLESS_RPC_CA_FILE", str(tmp_path / "none"))
        with pytest.raises(DeviceError, match=r"LOGITLESS_RPC_CA_FILE: .*none: there is no such file"):
            RemoteBackend(lender.name)
        monkeypatch.setenv("LOGITLESS_RPC_CA_FILE", str(tmp_path / "ca"))
    for key in (None, "", "sesam", "sesame "):
        monkeypatch.delenv("LOGITLESS_RPC_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("LOGITLESS_RPC_API_KEY", key)
        with pytest.raises(DeviceError, match="the API key is missing or wrong"):
            RemoteBackend(lender.name)
    monkeypatch.setenv("LOGITLESS_RPC_API_KEY", "sesame")
    backend = RemoteBackend(lender.name)
    assert attended(backend) == attended(backend)
    backend.close()
