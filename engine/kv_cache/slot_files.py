"""Slot files: saved KV cache of a slot, written atomically and verified by checksum.

16 bytes       "logitless slot" and two zeros
u32, u32       format version, bytes of the header
header         JSON: cache kind, adapters, number of tokens
i32 × n        token ids
bytes          KV blocks in the device's layout
bytes          auxiliary state for the next token: blocks of the sliding-window KV group, or recurrent state
32 bytes       BLAKE2b of everything before"""

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
from logitless.engine.kv_cache.block_pool import blocks_in_window, n_blocks_for

MAGIC = b"logitless slot\0\0"
VERSION = 2  # version 1 had no adapters
DIGEST = 32
MAX_HEADER = 1 << 16
MAX_TOKENS = 1 << 30
TEMPORARY = ".slot-"  # prefix of files that are not complete
STALE = 3600  # seconds after which such a file counts as left behind


@dataclass(frozen=True)
class CacheKind:
    """Layout of KV blocks: files and caches of equal kind are interchangeable."""

    model: str  # see logitless.models.weights.fingerprint
    type_k: str
    type_v: str
    page: int  # tokens of a block
    page_nbytes: int
    beside_nbytes: int = 0  # of a block of the sliding-window KV group, or of a recurrent state
    window: int = 0  # positions of the sliding window; 0: the auxiliary state is recurrent

    def n_beside(self, n_tokens: int) -> int:
        """Number of auxiliary entries that resuming after `n` tokens needs."""
        if not self.beside_nbytes:
            return 0
        return len(blocks_in_window(n_tokens, self.window)) if self.window else min(1, n_tokens)


AdapterNames = tuple[tuple[str, float], ...]  # (digest of the adapter's weights, scale)


@dataclass(frozen=True)
class SlotFileState:
    """Saved slot: tokens, their KV blocks, adapters, and auxiliary state (offload.py)."""

    tokens: list[int]
    blocks: list[npt.NDArray[np.uint8]]
    adapters: AdapterNames = ()
    auxiliary: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    salt: str = ""  # of its requests, behind the owner
    owner: str = ""  # of the file; "": everybody


def file_name(name: str) -> str:
    """File name inside the slot folder. Raises InvalidRequest if it is not a plain name."""
    bad = any(ord(c) < 32 or ord(c) == 127 or c in '/\\:*?"<>|' for c in name)
    if bad or not name or name.startswith(".") or name.endswith((" ", ".")) or len(os.fsencode(name)) > 255:
        raise InvalidRequest("field 'filename': must be the name of a file, without folders and special characters")
    return name


def save(folder: Path, name: str, kind: CacheKind, state: SlotFileState) -> int:
    """Write a slot file and return its size in bytes. On any error the previous file stays."""
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


def load(folder: Path, name: str, kind: CacheKind, n_ctx: int) -> tuple[SlotFileState, int]:
    """Read a slot file; returns (state, size in bytes).

    Every mismatch raises a 4xx RequestError.
    """
    path = folder / file_name(name)
    try:
        # a pipe has no end to wait for
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
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


def owner_of(folder: Path, name: str) -> str | None:
    """The owner in a slot file's header; "" for a file that is none; None: there is no such file."""
    try:
        handle = os.open(folder / file_name(name), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            start = file.read(len(MAGIC) + 8)
            n_header = struct.unpack_from("<I", start, len(MAGIC) + 4)[0]
            header = json.loads(file.read(min(n_header, MAX_HEADER)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, struct.error, RecursionError):
        return ""
    return str(header.get("owner", "")) if isinstance(header, dict) else ""


def _parts(kind: CacheKind, state: SlotFileState) -> Iterator[bytes | memoryview]:
    more = {name: text for name, text in (("salt", state.salt), ("owner", state.owner)) if text}
    header = json.dumps({**asdict(kind), "adapters": state.adapters, "n_tokens": len(state.tokens), **more}).encode()
    yield MAGIC + struct.pack("<II", VERSION, len(header)) + header
    yield np.array(state.tokens, "<i4").tobytes()
    yield from (block.data for block in (*state.blocks, *state.auxiliary))


def _read(file: BinaryIO, name: str, size: int, kind: CacheKind, n_ctx: int) -> SlotFileState:
    start = file.read(len(MAGIC) + 8)
    if not start.startswith(MAGIC):
        raise InvalidRequest(f"'{name}' is not a slot file of this server")
    if len(start) < len(MAGIC) + 8:
        raise InvalidRequest(f"slot file '{name}' is truncated")
    version, n_header = struct.unpack("<II", start[len(MAGIC) :])
    if version != VERSION:
        raise InvalidRequest(f"slot file '{name}' has version {version}, this server reads {VERSION}")
    raw = file.read(min(n_header, MAX_HEADER))
    n_tokens, adapters, salt = _check_header(raw, n_header, name, kind)
    sizes = [kind.page_nbytes] * n_blocks_for(n_tokens)
    n_blocks = len(sizes)
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
    blocks = []
    for nbytes in sizes:
        block = np.frombuffer(file.read(nbytes), np.uint8)
        digest.update(block.data)
        blocks.append(block)
    if file.read(DIGEST) != digest.digest():
        raise InvalidRequest(f"slot file '{name}' is damaged: its checksum is wrong")
    return SlotFileState(np.frombuffer(tokens, "<i4").tolist(), blocks[:n_blocks], adapters, blocks[n_blocks:], salt)


def _check_header(raw: bytes, n_header: int, name: str, kind: CacheKind) -> tuple[int, AdapterNames, str]:
    """Number of tokens, adapters and cache salt of a header.

    Raises InvalidRequest if the cache kind differs.
    """
    try:
        header = json.loads(raw) if len(raw) == n_header else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise InvalidRequest(f"slot file '{name}' is damaged: its header cannot be read")
    if header.get("model") != kind.model:
        raise InvalidRequest(f"slot file '{name}' was saved with another model")
    for key in fields(kind):
        # older files have no auxiliary state
        value, expected = header.get(key.name, 0), getattr(kind, key.name)
        if value != expected:
            raise InvalidRequest(
                f"slot file '{name}' was saved with {key.name} {str(value)[:32]}, this server has {expected}"
            )
    n_tokens, adapters = header.get("n_tokens"), _adapters(header.get("adapters"))
    if type(n_tokens) is not int or not 0 <= n_tokens <= MAX_TOKENS or adapters is None:
        raise InvalidRequest(f"slot file '{name}' is damaged: its header cannot be read")
    return n_tokens, adapters, str(header.get("salt", ""))


def _adapters(listed: object) -> AdapterNames | None:
    names: list[tuple[str, float]] = []
    for item in listed if isinstance(listed, list) else (None,):
        if not (isinstance(item, list) and [type(part) for part in item] == [str, float] and math.isfinite(item[1])):
            return None
        names.append((item[0], item[1]))
    return tuple(names)


def _sweep(folder: Path) -> None:
    """Remove incomplete files of processes that died."""
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                path.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the folder, so that the new name is durable too, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
