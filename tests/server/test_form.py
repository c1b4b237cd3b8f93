"""Multipart forms: their parts as they arrive, and bounds of parts and headers."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import MultipartReader, StreamReader
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.engine.errors import InvalidRequest
from logitless.server.bodies.form import MAX_HEAD, MAX_PARTS, FormParts, form_fields

KIND = "multipart/form-data; boundary=b"
END = b"--b--\r\n"
NAMES = st.text("az09é€ =-_.'*", max_size=8)
Part = tuple[str, str | None, bytes]
CONTENTS = (st.sampled_from([b"", b"\r\n", b"--b", b"\r\n--", b"\r\r\n-x"]) | st.binary()).filter(
    lambda content: b"\r\n--b" not in b"\r\n" + content
)
PARTS = st.lists(st.tuples(NAMES, st.none() | NAMES.filter(bool), CONTENTS), max_size=5)


def encoded(parts: list[Part]) -> bytes:
    body = b""
    for name, filename, content in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        body += f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return body + END


@asynccontextmanager
async def arriving(body: bytes, sizes: list[int]) -> AsyncIterator[StreamReader]:
    """A body that arrives in pieces of these sizes, again and again."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.transport = asyncio.Transport()
    stream = StreamReader(protocol, 1 << 20, loop=loop)

    async def arrive() -> None:
        start = 0
        for size in itertools.cycle(sizes):
            if start >= len(body):
                break
            stream.feed_data(body[start : start + size])
            start += size
            await asyncio.sleep(0)
        stream.feed_eof()

    task = asyncio.create_task(arrive())
    yield stream
    await task


async def read(body: bytes, sizes: list[int]) -> list[Part]:
    async with arriving(body, sizes) as stream:
        parts, found = FormParts(KIND, stream), []
        while (part := await parts.next()) is not None:
            content = b""
            while piece := await parts.piece():
                content += piece
            found.append((str(part.name), part.filename, content))
    return found


async def by_aiohttp(body: bytes) -> list[Part]:
    async with arriving(body, [1 << 16]) as stream:
        parts: Any = MultipartReader({"Content-Type": KIND}, stream)
        found = []
        while (part := await parts.next()) is not None:
            found.append((part.name or "", part.filename, bytes(await part.read())))
    return found


@settings(max_examples=60, deadline=None)
@given(parts=PARTS.filter(bool), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_parts_are_aiohttps_however_they_arrive(parts: list[Part], sizes: list[int]) -> None:
    body = encoded(parts)
    found = asyncio.run(read(body, sizes))
    assert found == parts == asyncio.run(by_aiohttp(body))
    assert form_fields(KIND, body) == {name: content for name, _, content in parts}


def test_names_of_files() -> None:
    for said, name in (
        ("filename*=utf-8''%e2%82%ac.txt; filename=x", "€.txt"),
        (r'filename="a\"b\\c"', r'a"b\c'),
        ('filename="a; name=other"', "a; name=other"),
        ("filename=a.jsonl", "a.jsonl"),
    ):
        head = f'--b\r\nX: content-disposition:; name="x"\r\ncontent-disposition: form-data; {said}; name="f"\r\n\r\n'
        assert asyncio.run(read(head.encode() + b"1\r\n" + END, [7])) == [("f", name, b"1")]
        assert form_fields(KIND, head.encode() + b"1\r\n" + END) == {"f": b"1"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (encoded([("x", None, b"")] * (MAX_PARTS + 1)), f"it has more than {MAX_PARTS} parts"),
        (b"--b\r\n" + b"a: b\r\n" * MAX_HEAD + b"\r\n1\r\n" + END, "a part of it has no headers"),
        (b"\r\n--c" * MAX_HEAD + b"\r\n" + END, f"its first boundary is not within {MAX_HEAD} bytes"),
        (encoded([("x", None, b"1")])[:-6], "it does not end with its boundary"),
        (b"", "it does not end with its boundary"),
        (b"--b", "it does not end with its boundary"),
    ],
)
def test_a_form_of_many_parts_lines_or_headers_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^the body is not a multipart form: {re.escape(reason)}$"):
        asyncio.run(read(body, [1 << 14]))


def test_headers_are_read_once() -> None:
    """A header's text may look like the header's begin as often as it fits."""
    head = b"content-disposition:" * (MAX_HEAD // 20 - 1)
    body = (b"--b\r\n" + head + b"\r\n\r\n\r\n") * MAX_PARTS + END
    assert form_fields(KIND, body) == {}
