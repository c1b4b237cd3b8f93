"""Damaged model files: refused in one line or loaded, in bounded memory, without a crash."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.graph.execution.session import Session
from logitless.models.chat.template import from_metadata as template_of
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.synthetic.model import synthesize
from logitless.models.tokenizer import from_metadata
from logitless.models.weights.weights import check_weights
from tests.helpers.fuzz import examples
from tests.helpers.numpy_backend import NumpyBackend

NUMBERS = [0, 1, 2, 7, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
MOST_GROWTH = 400 << 20  # bytes of memory over what the process had


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[int]]:
    """A sound file, and where interesting things lie in it: what looks like a count, a type or a
    key."""
    path = tmp_path_factory.mktemp("fuzz") / "good.gguf"
    synthesize(path, "tiny", "Q8_0")
    data = path.read_bytes()
    names = [b"llama.", b"general.", b"tokenizer.ggml.", b"blk.", b"output", b"token_embd"]
    places = [at for name in names for at in found(data, name)]
    return path, data, sorted({place + shift for place in places for shift in (-8, -4, 0)} | set(range(0, 24, 4)))


def found(data: bytes, name: bytes) -> list[int]:
    places, at = [], data.find(name)
    while at >= 0 and len(places) < 60:
        places.append(at)
        at = data.find(name, at + 1)
    return places


def load(path: Path) -> None:
    """All that a start does with a file, up to the first step."""
    with GGUFFile.open(path) as gguf:
        h = hparams_of(gguf)
        tokenizer = from_metadata(gguf.metadata)
        check_weights(gguf, h)
        render = template_of(gguf.metadata, tokenizer).render
        render([{"role": "user", "content": "hello"}])
        session = Session([NumpyBackend()])
        model = define_model(session, gguf, h, 32)
        assert model is not None
        for name in gguf.tensors:
            gguf.bytes_of(name)
        tokenizer.encode("hello world")
        tokenizer.pieces(range(tokenizer.n_vocab))


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files(good: tuple[Path, bytes, list[int]], data: st.DataObject) -> None:
    path, raw, places = good
    bad = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(places) | st.integers(0, len(raw) // 2))
        if data.draw(st.booleans()):
            at += data.draw(st.integers(0, 40))
        kind = data.draw(st.integers(0, 4))
        if kind == 0:
            bad[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == 1:
            bad[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(NUMBERS)))
        elif kind == 2:
            bad[at : at + 4] = struct.pack("<I", data.draw(st.sampled_from(NUMBERS)) & 0xFFFFFFFF)
        elif kind == 3:
            del bad[at : at + data.draw(st.integers(1, 64))]
        else:
            del bad[max(0, at) :]
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(bytes(bad))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load(damaged)
    except ValueError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 1000
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MOST_GROWTH
