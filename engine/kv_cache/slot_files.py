"""Slots in files: written whole or not at all, and believed only when every byte is what was written.

16 bytes    "logitless slot" and two zeros
u32, u32    version of this format, bytes of the header
header      JSON: what the cells were made by, with which adapters, and how many there are
i32 × n     the tokens
bytes       the pages, as the device keeps them
bytes       what the next token takes besides: of layers with a window, where these have other pages, those that it
            sees, or the states of layers that keep such
32 bytes    BLAKE2b of all before
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from errno import ENOENT
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from logitless.engine.errors import InvalidRequest, NotFound, ServerFault, unkept
from logitless.engine.kv_cache.block_pool import n_pages_for, window_pages

MAGIC = b"logitless slot\0\0"
VERSION = 2  # 1 knew no adapters
DIGEST = 32
MAX_HEADER = 1 << 16
MAX_TOKENS = 1 << 30
TEMPORARY = ".slot-"  # what a file is called until it is whole
STALE = 3600  # seconds after which such a file was left behind by a process that died


@dataclass(frozen=True)
class CacheKind:
    """What cells must have in common to be of use to each other."""

    model: str  # see logitless.models.weights.fingerprint
    type_k: str
    type_v: str
    page: int  # cells
    page_nbytes: int
    beside_nbytes: int = 0  # of a page of layers with a window, where these have other pages, or of states
    window: int = 0  # what such layers see; 0: it is states

    def n_beside(self, n_tokens: int) -> int:
        """How many it takes to go on after n tokens."""
        if not self.beside_nbytes:
            return 0
        return len(window_pages(n_tokens, self.window)) if self.window else min(1, n_tokens)


AdapterNames = tuple[tuple[str, float], ...]  # (what its numbers hash to, its scale) of each


@dataclass(frozen=True)
class SlotState:
    """The leading tokens of a slot whose keys and values are known, the pages that hold them, and what there is
    besides (logitless.engine.kv_cache.offload)."""

    tokens: list[int]
    pages: list[npt.NDArray[np.uint8]]
    adapters: AdapterNames = ()
    beside: list[npt.NDArray[np.uint8]] = field(default_factory=list)


def file_name(name: str) -> str:
    """A name inside the folder of slots, or 400."""
    bad = any(ord(c) < 32 or ord(c) == 127 or c in '/\\:*?"<>|' for c in name)
    if bad or not name or name.startswith(".") or name.endswith((" ", ".")) or len(os.fsencode(name)) > 255:
        raise InvalidRequest("field 'filename': must be the name of a file, without folders and special characters")
    return name


def save(folder: Path, name: str, kind: CacheKind, state: SlotState) -> int:
    """Write a slot; returns the file's size. On any error the file that was there before is still there."""
    path = folder / file_name(name)
    temporary = ""
    try:
        _sweep(folder)
        handle, temporary = tempfile.mkstemp(".tmp", TEMPORARY, folder)
        with os.fdopen(handle, "wb") as file:
            digest = blake2b(digest_size=DIGEST)
            for part in _parts(kind, state):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
        _sync_folder(folder)
        return size
    except OSError as error:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        raise unkept(f"cannot write slot file '{name}'", error) from None


def load(folder: Path, name: str, kind: CacheKind, n_ctx: int) -> tuple[SlotState, int]:
    """A slot that `save` wrote, and the file's size. Every reason not to believe it is a 4xx."""
    path = folder / file_name(name)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe has no end to wait for
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"slot file '{name}' is not a file")
            return _read(file, name, status.st_size, kind, n_ctx), status.st_size
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == ENOENT:
            raise NotFound(f"there is no slot file '{name}'") from None
        if isinstance(error, IsADirectoryError):
            raise InvalidRequest(f"slot file '{name}' is not a file") from None
        raise ServerFault(f"cannot read slot file '{name}': {reason}") from None


def _parts(kind: CacheKind, state: SlotState) -> Iterator[bytes | memoryview]:
    header = json.dumps({**asdict(kind), "adapters": state.adapters, "n_tokens": len(state.tokens)}).encode()
    yield MAGIC + struct.pack("<II", VERSION, len(header)) + header
    yield np.array(state.tokens, "<i4").tobytes()
    yield from (page.data for page in (*state.pages, *state.beside))


def _read(file: BinaryIO, name: str, size: int, kind: CacheKind, n_ctx: int) -> SlotState:
    start = file.read(len(MAGIC) + 8)
    if not start.startswith(MAGIC):
        raise InvalidRequest(f"'{name}' is not a slot file of this server")
    if len(start) < len(MAGIC) + 8:
        raise InvalidRequest(f"slot file '{name}' is truncated")
    version, n_header = struct.unpack("<II", start[len(MAGIC) :])
    if version != VERSION:
        raise InvalidRequest(f"slot file '{name}' has version {version}, this server reads {VERSION}")
    raw = file.read(min(n_header, MAX_HEADER))
    n_tokens, adapters = _check_header(raw, n_header, name, kind)
    sizes = [kind.page_nbytes] * n_pages_for(n_tokens)
    n_pages = len(sizes)
    sizes += [kind.beside_nbytes] * kind.n_beside(n_tokens)
    expected = len(start) + len(raw) + 4 * n_tokens + sum(sizes) + DIGEST
    if size != expected:
        what = "is truncated" if size < expected else "is damaged"
        raise InvalidRequest(f"slot file '{name}' {what}: it has {size} bytes, and should have {expected}")
    if n_tokens > n_ctx:
        raise InvalidRequest(f"slot file '{name}' has {n_tokens} tokens, a slot of this server {n_ctx}")
    digest = blake2b(start + raw, digest_size=DIGEST)
    tokens = file.read(4 * n_tokens)
    digest.update(tokens)
    pages = []
    for nbytes in sizes:
        page = np.frombuffer(file.read(nbytes), np.uint8)
        digest.update(page.data)
        pages.append(page)
    if file.read(DIGEST) != digest.digest():
        raise InvalidRequest(f"slot file '{name}' is damaged: its checksum is wrong")
    return SlotState(np.frombuffer(tokens, "<i4").tolist(), pages[:n_pages], adapters, pages[n_pages:])


def _check_header(raw: bytes, n_header: int, name: str, kind: CacheKind) -> tuple[int, AdapterNames]:
    """The number of tokens and the adapters, if the file's cells are of the server's own kind."""
    try:
        header = json.loads(raw) if len(raw) == n_header else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InvalidRequest(f"slot file '{name}' is damaged: its header cannot be read")
    if header.get("model") != kind.model:
        raise InvalidRequest(f"slot file '{name}' was saved with another model")
    for key in fields(kind):
        found, wanted = header.get(key.name, 0), getattr(kind, key.name)  # older files name nothing besides
        if found != wanted:
            raise InvalidRequest(
                f"slot file '{name}' was saved with {key.name} {str(found)[:32]}, this server has {wanted}"
            )
    n_tokens, adapters = header.get("n_tokens"), _adapters(header.get("adapters"))
    if type(n_tokens) is not int or not 0 <= n_tokens <= MAX_TOKENS or adapters is None:
        raise InvalidRequest(f"slot file '{name}' is damaged: its header cannot be read")
    return n_tokens, adapters


def _adapters(listed: object) -> AdapterNames | None:
    names: list[tuple[str, float]] = []
    for item in listed if isinstance(listed, list) else (None,):
        if not (isinstance(item, list) and [type(part) for part in item] == [str, float] and math.isfinite(item[1])):
            return None
        names.append((item[0], item[1]))
    return tuple(names)


def _sweep(folder: Path) -> None:
    """Remove what a process left behind that died while it wrote."""
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the new name durable too, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
