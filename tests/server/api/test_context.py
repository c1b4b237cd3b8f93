"""JSON serialization of answers."""

from __future__ import annotations

import math

from logitless.server.api.context import encode_json, sse


def test_a_text_that_utf8_lacks_and_a_number_that_json_lacks_are_replaced():
    assert encode_json({"file": "a\udcff.gguf", "n": [1.5, 2]}) == b'{"file":"a?.gguf","n":[1.5,2]}'
    assert encode_json([math.nan, math.inf, "é\n"]) == '[null,null,"é\\n"]'.encode()


def test_an_event_may_have_a_name():
    assert sse({"a": 1}) == b'data: {"a":1}\n\n'
    assert sse({"a": 1}, "ping") == b'event: ping\ndata: {"a":1}\n\n'
