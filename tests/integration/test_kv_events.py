"""KV events of a real model at a subscriber, and the refusals of the flags."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from logitless import LLM, SamplingParams
from logitless.engine.loading.open_model import demo_model, open_model
from logitless.engine.loading.options import ModelOptions, OptionConflict, OptionError


def test_a_subscriber_hears_of_a_prompts_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    context = zmq.Context()
    try:
        sub = context.socket(zmq.SUB)
        sub.subscribe(b"")
        sub.rcvtimeo = 20_000
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        endpoints: dict[str, Any] = {
            "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
            "kv_events_replay_endpoint": "tcp://127.0.0.1:*",
        }
        with LLM(demo_model(), ctx_size=256, parallel=1, threads=1, **endpoints) as llm:
            starts, stored = [], []
            while not stored:  # the first ones may come before the connection
                tokens = llm.tokenize(f"ROMEO: {len(starts)} " * 9)
                starts.append(tokens[:16])
                llm.generate([tokens], SamplingParams(max_tokens=1))
                while sub.poll(100):
                    topic, _, payload = sub.recv_multipart()
                    stored += [
                        event for event in msgspec.msgpack.decode(payload)[1] if event[:3:2] == ["BlockStored", None]
                    ]
            assert topic == b"kv@10.0.0.7@shakespeare"
            assert stored[-1][3][:16] in starts
            assert stored[0][4:7] == [16, None, "GPU"]
    finally:
        context.destroy(linger=0)


def test_flags_that_go_nowhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"^--kv-events-endpoint: '5557' is not tcp://HOST:PORT or ipc://PATH$"):
        ModelOptions(kv_events_endpoint="5557")
    for name in ("replay_endpoint", "topic"):
        with pytest.raises(OptionConflict, match=rf"^--kv-events-{name.replace('_', '-')}: needs --kv-events-endpoint"):
            open_model(demo_model(), ModelOptions(**{f"kv_events_{name}": "tcp://*:1"}))
    monkeypatch.setattr("logitless.engine.loading.open_model.find_spec", lambda name: None)
    with pytest.raises(OptionConflict, match=r"needs pyzmq: pip install 'logitless\[kv-events\]'$"):
        open_model(demo_model(), ModelOptions(kv_events_endpoint="tcp://*:5557"))


def test_an_address_that_cannot_be_used_is_an_error_of_its_flag() -> None:
    model = open_model(demo_model(), ModelOptions(ctx_size=64, threads=1, kv_events_endpoint="ipc:///nowhere/at/all"))
    with pytest.raises(OptionConflict, match=r"^--kv-events-endpoint ipc:///nowhere/at/all: No such file"):
        model.load()
