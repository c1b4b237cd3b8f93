"""API keys: of the command line, and of a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable

log = logging.getLogger("logitless.keys")
MAX_BYTES = 1 << 20  # of a key file


class ApiKeys:
    """API keys of a server. A key file is read again when it changes (one stat a request): no signal is needed.

    A file that cannot be read, or that has no key any more, changes nothing: an editor may be writing it. Replacing it
    by renaming is seen at once and whole. Raises OSError and ValueError for the first reading."""

    def __init__(self, keys: Iterable[str], path: str = "") -> None:
        self._fixed = _digests(keys)
        self._path = path
        self.exist = bool(self._fixed or path)  # whether there are keys at all
        self._version: tuple[int, ...] = ()
        self._of_file: list[bytes] = []
        if path:
            self._version = self._now()
            self._of_file = _digests(read_keys(path))

    def __bool__(self) -> bool:
        return self.exist

    @property
    def several(self) -> bool:
        """True if there are at least two keys."""
        self._look()
        return len({*self._fixed, *self._of_file}) > 1

    def match(self, key: str) -> bool:
        """True if this is a key, in constant time for texts of one length."""
        self._look()
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in (*self._fixed, *self._of_file)]  # all of them
        return any(matches)

    def _look(self) -> None:
        if not self._path:
            return
        version = self._now()
        if version == self._version:
            return
        self._version = version
        try:
            self._of_file = _digests(read_keys(self._path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            log.warning("the keys stay as they were: --api-key-file %s: %s", self._path, reason)
        else:
            log.info("the key file has changed: %d keys", len(self._of_file))

    def _now(self) -> tuple[int, ...]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


def read_keys(path: str) -> list[str]:
    """One key a line; blank lines and lines that begin with # are ignored. ValueError: there is none."""
    with open(path, "rb") as f:
        raw = f.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    try:
        lines = raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise ValueError("has no key")
    return keys


def same(key: str, known: str) -> bool:
    """True if two keys are equal, in constant time for any lengths."""
    return hmac.compare_digest(_digest(key), _digest(known))


def owner_of(key: str) -> str:
    """The name under which the key's owner is kept; the key cannot be found from it."""
    return _digest(key).hex()[:32] if key else ""


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [_digest(key) for key in keys]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
