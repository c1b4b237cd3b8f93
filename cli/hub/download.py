"""Download of one file: resumed, checked by SHA-256, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from logitless.cli.flags.flags import CliError
from logitless.cli.hub.public import open_url
from logitless.cli.progress import StatusLine

CHUNK = 1 << 20
TRIES = 3  # in a row without any bytes
TIMEOUT = 60.0  # seconds of silence
WINDOW, REDRAW = 5.0, 0.2  # seconds: that the speed is of, and between two lines on a terminal


class Refused(CliError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(CliError):
    """No answer came."""


class DownloadProgress(Protocol):
    """Receiver of a download's progress."""

    def show(self, have: int, size: int | None) -> None:
        """`have` bytes of `size` are there; None: the size is unknown."""

    def end(self) -> None:
        """The file is there."""


ProgressOf = Callable[[str], DownloadProgress]  # of the file's name


def fetch(  # noqa: PLR0913  (facts of one file)
    url: str,
    path: Path,
    *,
    name: str,
    headers: Mapping[str, str] | None = None,
    version: str = "",
    size: int | None = None,
    sha256: str = "",
    progress: ProgressOf | None = None,
    public_only: bool = False,
) -> None:
    """Download to `path`. Errors are CliErrors that call the file `name`; a partial file stays for the next try.

    `headers` go to the URL's own host only. `version` names the content: a part of another version is not gone on with,
    and without one every try begins anew. `sha256` in hex, "" where it is not known.
    `public_only`: neither the URL nor a redirect may lead to this machine or a local network."""
    part = path.with_name(f"{path.name}.{hashlib.sha256(version.encode()).hexdigest()[:12]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out, _alone(out):
            if path.exists() and not _is_same_file(out, part):  # another process finished it meanwhile
                return
            if not version:
                out.truncate(0)
            source = partial(_open, url, dict(headers or {}), public_only=public_only)
            _fill(source, out, name, size, (progress or _Progress)(name))
            if sha256 and _digest(part) != sha256.lower():
                os.unlink(part)
                raise CliError(f"{name}: the download does not have the checksum {sha256}; try again")
            os.replace(part, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CliError(f"{name}: no space left for it in {path.parent}") from None
        raise CliError(f"{name}: cannot be written to {path.parent}: {error.strerror or error}") from None


@contextlib.contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """Wait until no other process writes to this file."""
    with contextlib.suppress(ImportError, OSError):  # Windows, and file systems without locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def forget_part(part: Path) -> None:
    """Delete the partial file of an interrupted download, not of a running one."""
    with contextlib.suppress(OSError), part.open("ab") as file:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()


def _is_same_file(open_file: IO[bytes], path: Path) -> bool:
    """True if the path still names the open file; a process that finishes renames it."""
    try:
        return os.path.samestat(os.fstat(open_file.fileno()), path.stat())
    except OSError:
        return False


def _fill(
    source: Callable[[int], Any], out: IO[bytes], name: str, size: int | None, progress: DownloadProgress
) -> None:
    """Download the missing bytes, in as many requests as it takes. `source`: the reply from a byte on."""
    n_idle = 0
    while True:
        have = out.seek(0, os.SEEK_END)
        if size is not None and have > size:
            have = out.truncate(0)
        if size is not None and have == size:
            break
        reason = ""
        try:
            with source(have) as reply:
                if reply.status != 206 and have:  # the server ignores Range
                    out.truncate(0)
                    have = 0
                size = _total(reply, have, size)
                if size is not None:
                    _check_space(Path(out.name).parent, name, size - have)
                progress.show(have, size)
                while data := reply.read(CHUNK):
                    out.write(data)
                    progress.show(out.tell(), size)
        except urllib.error.HTTPError as error:
            error.close()  # it is the reply, and holds the connection
            if error.code != 416:
                raise Refused(f"{name}: the server answers {error.code} {error.reason}", error.code) from None
            out.truncate(0)  # the file has changed and is shorter now
            size, reason = None, "416"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        out.flush()
        now = out.seek(0, os.SEEK_END)
        if now == size or (size is None and not reason):
            break
        n_idle = 0 if now > have else n_idle + 1
        if n_idle == TRIES:
            raise Unreachable(f"{name}: the download ended at {now} bytes: {reason or 'the connection was closed'}")
    progress.end()


def _open(url: str, headers: Mapping[str, str], start: int, *, public_only: bool) -> Any:
    if not url.startswith(("http://", "https://")):  # a redirect may lead anywhere
        raise urllib.error.URLError("it is not at an http:// or https:// address")
    request = urllib.request.Request(url, headers={"User-Agent": "logitless", "Accept-Encoding": "identity"})
    for key, value in headers.items():
        request.add_unredirected_header(key, value)  # no token for redirect targets
    if start:
        request.add_header("Range", f"bytes={start}-")
    return open_url(request, TIMEOUT, public_only=public_only)


def _total(reply: Any, have: int, size: int | None) -> int | None:
    """The file's size; None: unknown."""
    length = reply.headers.get("Content-Length", "")
    return have + int(length) if length.isdecimal() else size


def _check_space(folder: Path, name: str, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CliError(f"{name}: {_mb(needed)} are needed in {folder}, and {_mb(free)} are free")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mb(nbytes: float) -> str:
    if nbytes >= 1e10:
        return f"{nbytes / 1e9:.1f} GB"
    return (
        f"{nbytes / 1e6:.0f} MB"
        if nbytes >= 1e7
        else f"{nbytes / 1e6:.1f} MB"
        if nbytes >= 1e5
        else f"{nbytes:.0f} bytes"
    )


class _Progress:
    """On a terminal a line with speed and remaining time; elsewhere a line when it begins and one when it ends."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock, self._line = name, clock, StatusLine()
        self._terminal = sys.stderr.isatty()
        self._drawn = float("-inf")
        self._past: deque[tuple[float, int]] = deque()  # (time, bytes) of the last seconds
        self._received, self._have, self._began = 0, 0, 0.0

    def show(self, have: int, size: int | None) -> None:
        now, total = self._clock(), f" of {_mb(size)}" if size else ""
        if not self._past and not self._terminal:
            print(f"downloading {self._name}{total}", file=sys.stderr, flush=True)
        if not self._past:
            self._began, self._have = now, have
        if have < self._have:  # it begins anew
            self._past.clear()
            self._have = have
        self._received += have - self._have
        self._have = have
        self._past.append((now, have))
        while now - self._past[0][0] > WINDOW:
            self._past.popleft()
        if self._terminal and now - self._drawn > REDRAW:
            self._drawn = now
            self._line.show(f"downloading {self._name}", f": {_mb(have)}{total}{self._pace(size)}")

    def _pace(self, size: int | None) -> str:
        """Speed of the last seconds, and the time that the rest takes at it."""
        (then, before), (now, have) = self._past[0], self._past[-1]
        if now - then < 1:
            return ""
        speed = (have - before) / (now - then)
        left = f", {duration((size - have) / speed)} left" if size and speed > 0 else ""
        return f", {_mb(speed)}/s{left}"

    def end(self) -> None:
        if not self._past:
            return
        seconds = self._clock() - self._began
        pace = f" at {_mb(self._received / seconds)}/s" if seconds >= 1 else ""
        text = f"downloaded {self._name}: {_mb(self._have)} in {duration(seconds)}{pace}"
        if self._terminal:
            self._line.end(text)
        else:
            print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """5 s, 3 min 20 s or 2 h 5 min."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{s} s"
