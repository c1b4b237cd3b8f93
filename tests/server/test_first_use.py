"""First use of a request struct: msgspec builds its decoder in one thread only."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from msgspec import Struct

from logitless.engine.sampling.params import Param
from logitless.frontend import fields


class Body(Struct, frozen=True, kw_only=True):
    """A body that no request has had yet."""

    n: Annotated[int, Param("a number")] = 0


def test_the_first_use_of_a_struct_is_one_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    convert, threads = fields.convert, 4
    ready, alone = threading.Barrier(threads), list[bool]()

    def watched(given: Mapping[str, Any], kind: type[Body]) -> Body:
        if kind not in fields._used:
            alone.append(fields._first_use.locked())
        return convert(given, kind)

    found: list[int] = []

    def read(n: int) -> None:
        ready.wait()
        found.append(fields.read(Body, {"n": n}).n)

    monkeypatch.setattr(fields, "convert", watched)
    readers = [threading.Thread(target=read, args=(n,)) for n in range(threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert alone == [True]  # one use before the decoder is there, under the lock
    assert sorted(found) == list(range(threads))
