"""Publisher of KV events: live subscribers, and repeats of past batches on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from logitless.engine.kv_events.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from logitless.engine.kv_events.publisher import KVEventPublisher, binds, default_topic

TOPIC = "kv@10.0.0.7:8080@stories"
WAIT = 10_000  # milliseconds
STORED = BlockStored([7], None, list(range(16)), 16, None, "GPU", None)


@contextmanager
def sockets(*kinds: int) -> Iterator[list[Any]]:
    """Sockets of a subscriber; each waits for at most WAIT."""
    context = zmq.Context()
    made = [context.socket(kind) for kind in kinds]
    for socket in made:
        socket.rcvtimeo = WAIT
    try:
        yield made
    finally:
        context.destroy(linger=0)


def repeated(dealer: Any, first: int) -> list[tuple[int, Any]]:
    """Batches from a number on, and their numbers."""
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    batches = []
    while True:
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            assert payload == b""
            return batches
        batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def test_a_subscriber_gets_every_batch(tmp_path: Any) -> None:
    """Live ones over TCP, and those before its subscription on request."""
    replay_at = f"ipc://{tmp_path}/replay"
    with sockets(zmq.SUB, zmq.DEALER) as (sub, dealer):
        sub.subscribe(b"kv@")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        publisher = KVEventPublisher(f"tcp://127.0.0.1:{port}", TOPIC, replay_at)
        n = 0
        while not sub.poll(50):  # until it is connected, messages go nowhere
            publisher.publish(STORED)
            n += 1
        publisher.publish(BlockRemoved([7], "GPU"))
        publisher.publish(AllBlocksCleared())
        events, numbers = [], []
        while ["AllBlocksCleared"] not in events:
            topic, number, payload = sub.recv_multipart()
            assert topic == TOPIC.encode()
            assert len(number) == 8
            ts, batch, rank = msgspec.msgpack.decode(payload)
            assert (type(ts), rank) == (float, 0)
            numbers.append(int.from_bytes(number, "big"))
            events += batch
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert events[0] == ["BlockStored", [7], None, list(range(16)), 16, None, "GPU", None, None]
        assert events[-2:] == [["BlockRemoved", [7], "GPU"], ["AllBlocksCleared"]]
        dealer.connect(replay_at)
        batches = repeated(dealer, 0)
        assert [number for number, _ in batches] == list(range(numbers[-1] + 1))
        assert sum(len(batch[1]) for _, batch in batches) == n + 2
        assert repeated(dealer, numbers[-1]) == batches[-1:]
        dealer.send_multipart((b"", b"short"))  # is ignored
        assert repeated(dealer, numbers[-1] + 1) == []
        publisher.close()


def test_publishing_without_subscribers_waits_for_nobody(tmp_path: Any) -> None:
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", TOPIC)
    for _ in range(5000):
        publisher.publish(STORED)
    publisher.close()  # sends what is left, to nobody
    assert not publisher._thread.is_alive()


def test_an_address_in_use_is_named() -> None:
    with sockets(zmq.PUB) as (other,):
        port = other.bind_to_random_port("tcp://*")
        with pytest.raises(ValueError, match=rf"^--kv-events-endpoint tcp://\*:{port}: Address already in use$"):
            KVEventPublisher(f"tcp://*:{port}", TOPIC)


def test_addresses_are_bound_or_connected_as_in_vllm() -> None:
    assert [binds(a) for a in ("tcp://*:5557", "tcp://[::]:5557", "ipc:///run/kv", "tcp://router:5557")] == [
        True,
        True,
        True,
        False,
    ]


def test_the_topic_names_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    assert default_topic("qwen", 8080) == "kv@10.1.2.3:8080@qwen"
    monkeypatch.delenv("POD_IP")
    _, address, model = default_topic("qwen").split("@")
    assert model == "qwen"
    assert address.count(".") == 3
