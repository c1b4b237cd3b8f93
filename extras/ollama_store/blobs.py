"""Uploaded files of Ollama's clients: named by their SHA-256, below --models-dir until no model has them."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from logitless.engine.errors import DiskFull, InvalidRequest, TooLarge, unkept
from logitless.extras.ollama_store.manifest import BLOBS
from logitless.frontend.workers import to_thread
from logitless.models.atomic_write import ABANDONED, open_private, settle
from logitless.server.bodies.room import STRIDE, in_time
from logitless.server.bodies.unpack import content as unpacked

RESERVE = 256 << 20  # bytes of the disk that no upload takes
PIECE = 4 << 20  # bytes that are hashed and written at once
UNUSED = 24 * 3600.0  # seconds until a file without a model is deleted
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


class Blobs:
    """The files of one folder. `most`: bytes of a file; 0: as many as the disk has."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder / BLOBS, most

    def path(self, digest: str) -> Path | None:
        """The file of a digest; None: it is not here. InvalidRequest: this is no digest."""
        path = self._folder / f"sha256-{_hex(digest)}"
        with suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                return path
        return None

    async def receive(self, request: web.Request, digest: str, silence: float) -> None:
        """Keep the request's body, whose SHA-256 is `digest`. An upload that ends early leaves nothing."""
        expected = _hex(digest)
        if await to_thread(lambda: self.path(digest)) is not None:
            return
        n_bytes = request.content_length or 0
        try:
            await to_thread(lambda: self._check(0, n_bytes))
            with self.unfinished() as path:
                if await self._write(request, path, silence) != expected:
                    raise InvalidRequest(f"the SHA-256 of the body is not {digest}")
                await to_thread(lambda: settle(path, self._folder / f"sha256-{expected}"))
        except OSError as error:
            raise unkept("the file cannot be kept", error) from None
        except (HttpProcessingError, web.RequestPayloadError):
            raise InvalidRequest("the body does not have the form that the request's headers promise") from None

    async def _write(self, request: web.Request, path: Path, silence: float) -> str:
        """The SHA-256 of the body, which goes to the file as it comes."""
        stream, digest, n = unpacked(request, self._most or 1 << 62), hashlib.sha256(), 0
        with open(path, "xb", opener=open_private) as file:

            def keep(piece: bytes) -> None:
                self._check(n, len(piece))
                digest.update(piece)
                file.write(piece)

            piece = bytearray()
            while chunk := await in_time(_stride(stream), silence):
                piece += chunk
                if len(piece) >= PIECE:
                    await to_thread(partial(keep, bytes(piece)))
                    n += len(piece)
                    piece.clear()
            await to_thread(partial(keep, bytes(piece)))
        return digest.hexdigest()

    def _check(self, n: int, more: int) -> None:
        """Raise where `more` bytes behind `n` have no room."""
        if self._most and n + more > self._most:
            raise TooLarge(f"the file is larger than {self._most} bytes (--max-blob-size)")
        self.check_room(more)

    def check_room(self, n_bytes: int) -> None:
        """DiskFull: the disk has no room for so many bytes."""
        free = shutil.disk_usage(self._folder.parent).free - RESERVE
        if n_bytes > free:
            raise DiskFull(f"the disk of --models-dir has room for {max(0, free)} bytes, not for {n_bytes}")

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A new path for a file or folder, which is deleted at the block's end if it has not been renamed.
        Leftovers of killed processes are deleted first. DiskFull, ServerFault: there is no folder."""
        if self._folder.is_symlink():
            raise InvalidRequest(f"{BLOBS} of --models-dir is a link, and links are not followed")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unkept("--models-dir cannot be written to", error) from None
        self._sweep()
        path = self._folder / f"{secrets.token_hex(8)}.part"
        try:
            yield path
        finally:
            discard(path)

    def _sweep(self) -> None:
        now = time.time()
        for path in self._folder.iterdir():
            with suppress(OSError):
                status = path.lstat()
                if path.suffix == ".part" and max(_times(path)) < now - ABANDONED:
                    discard(path)
                elif path.name.startswith("sha256-") and status.st_nlink == 1 and status.st_mtime < now - UNUSED:
                    path.unlink()

    def forget(self, files: list[os.stat_result]) -> None:
        """Delete the uploads that were these files of a deleted model, and are no other's."""
        gone = {(status.st_dev, status.st_ino) for status in files if status.st_nlink == 2}
        for path in self._folder.glob("sha256-*"):
            with suppress(OSError):
                status = path.lstat()
                if (status.st_dev, status.st_ino) in gone and status.st_nlink == 1:
                    path.unlink()


async def _stride(stream: StreamReader) -> bytes:
    """The next STRIDE bytes or more, fewer at the end."""
    data = bytearray()
    while len(data) < STRIDE and (chunk := await stream.readany()):
        data += chunk
    return bytes(data)


def discard(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _times(path: Path) -> list[float]:
    """Times of the last writes to the path, and to each file in it."""
    inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    return [part.lstat().st_mtime for part in (path, *inside)]


def _hex(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidRequest(f"{digest[:80]!r} is no digest: sha256: and 64 hexadecimal digits")
    return match[1]
