"""JSON bodies: the count of values before parsing, and agreement of both parsers."""

from __future__ import annotations

import json
import re
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.engine.errors import InvalidRequest, RequestError, TooLarge
from logitless.frontend import workers
from logitless.server.bodies import json_body
from logitless.server.bodies.json_body import json_value

STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
TEXT = st.text(alphabet='a",[{\\\u20ac\n:')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bodies count as large."""
    monkeypatch.setattr(json_body, "_QUICK", -1)


@settings(max_examples=40)
@given(value=JSON, piece=st.sampled_from([2, 4, 6, 32]), ascii=st.booleans())
def test_counted_values_are_those_outside_of_strings(value: Any, piece: int, ascii: bool):
    text = json.dumps(value, ensure_ascii=ascii)
    bare = STRING.sub("", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_PIECE", piece)
        assert json_body._n_values(text.encode()) == sum(map(bare.count, ",[{"))


def test_too_many_values(monkeypatch: pytest.MonkeyPatch, patient: None):
    monkeypatch.setattr(json_body, "MAX_VALUES", 1000)
    for text in (
        json.dumps(list(range(2000))),
        json.dumps({str(i): i for i in range(2000)}),
        "[" + "[]," * 2000 + "[]]",
        '{"x":' + "[" * 1001,
        "[" + "1," * 2000,  # it is counted before it turns out to be no JSON
    ):
        with pytest.raises(TooLarge, match="the body has more than 1000 values"):
            json_value(text.encode())
    commas = {"x": ',"[{' * 3000}
    assert json_value(json.dumps(commas).encode()) == commas
    assert json_value(json.dumps(list(range(999))).encode()) == list(range(999))


def result(raw: bytes) -> Any:
    try:
        return json_value(raw)
    except RequestError as error:
        return error.code, error.message


@settings(max_examples=40)
@given(raw=JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20) | TEXT.map(str.encode))
def test_both_parsers_agree(raw: bytes):
    quick = result(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_QUICK", -1)
        assert repr(result(raw)) == repr(quick)


@pytest.mark.parametrize(
    "raw",
    [
        b"[NaN]",
        b"[-Infinity]",
        b'["\\ud800"]',
        b'{"\\udc00":1}',
        b"[1,]",
        b'{"a" 1}',
        b"\xff",
        b"",
        b"[" * 9999 + b"]" * 9999,
        b"1" * 5000,
    ],
)
def test_both_refuse(raw: bytes, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidRequest) as quick:
        json_value(raw)
    monkeypatch.setattr(json_body, "_QUICK", -1)
    with pytest.raises(InvalidRequest) as patient:
        json_value(raw)
    assert patient.value.message == quick.value.message


def test_pairs_of_surrogates_and_a_byte_order_mark(patient: None):
    assert json_value(b'["\\ud83d\\ude00", "\\\\ud800"]') == ["\U0001f600", "\\ud800"]
    assert json_value(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_large_body_lets_others_run(patient: None, monkeypatch: pytest.MonkeyPatch):
    """In the middle of it, which the parser in C reads in one go."""
    raw = json.dumps({f"key {i}": 1 for i in range(2000)}).encode()
    values, inside, go_on = count(), threading.Event(), threading.Event()

    def check() -> None:
        if next(values) == 1000:
            inside.set()
            go_on.wait()

    monkeypatch.setattr(json_body, "check", check)
    reading = threading.Thread(target=json_value, args=(raw,))
    reading.start()
    assert inside.wait(60)
    go_on.set()
    reading.join()
    assert next(values) >= 2000


def test_a_large_body_is_given_up_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch, patient: None):
    monkeypatch.setattr(workers._running, "job", SimpleNamespace(unwanted=True), raising=False)
    for raw in (b'["a"]', b"[1]", b"[1.5]"):
        with pytest.raises(workers.ClientLeft):
            json_value(raw)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 5_000_000 + "😀",
        "é" + "a" * 5_000_000,
        "日本語" * 1_700_000,
        "\\u00e9" + "x" * 5_000_000,
        "ab\\n" * 2_000_000,
    ],
)
def test_a_large_text_is_read_as_json_reads_it(text: str):
    raw = f'{{"kéy": "{text}", "n": [1, "ö", "\\"é\\""]}}'.encode()
    assert json_value(raw) == json.loads(raw)
    with pytest.raises(InvalidRequest, match=r"not UTF-8 \(byte 9\)"):
        json_value(raw[:9] + b"\xff" + raw[9:])


@pytest.mark.parametrize("wide", ["😀", "\\ud83d\\ude00"])
def test_texts_that_one_character_widens_to_four_bytes_have_a_bound(wide: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_body, "MAX_TEXT_BYTES", 10_000_000)
    monkeypatch.setattr(json_body, "_LARGE", 1 << 19)
    text = "a" * 1_300_000
    assert json_value(f'["{text}{wide}"]'.encode()) == [text + "😀"]
    with pytest.raises(TooLarge, match="the texts of the body take more than 10000000 bytes"):
        json_value(f'["{text}{wide}", "{text}{wide}"]'.encode())
    assert json_value(f'["{text}{text}", "{wide}"]'.encode()) == [text + text, "😀"]
