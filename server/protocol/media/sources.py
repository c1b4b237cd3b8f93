"""Sources of a request's images beside its body: addresses, files of a folder, uploaded files."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from logitless.server.protocol.fields import bad_request

MAX_BYTES: Final = 20 << 20  # of one image that a request only names
PURPOSES = ("vision", "user_data")  # of uploaded files that may be images


class SourceError(Exception):
    """An image that cannot be had; the text is one line without the image's name."""


class Unfetched(Exception):
    """The request names addresses: it can be parsed when `sources` has their contents."""

    def __init__(self, sources: Sources) -> None:
        super().__init__("addresses must be fetched first")
        self.sources = sources


@dataclass(eq=False)
class Sources:
    """Images that one request may name. `fetched` has them by their addresses, or why they cannot be had;
    `missing` the addresses that were asked for in vain."""

    urls: bool = False  # --media-urls
    folder: str = ""  # --media-path
    upload: Callable[[str], Path] | None = None  # the file of an id; SourceError: the client has no such file
    fetched: dict[str, bytes | Exception] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def address(self, name: str, url: str) -> bytes:
        """The image at an address in the field `name`; b"" until it was fetched."""
        scheme, _, rest = url.partition(":")
        try:
            if scheme.lower() == "file":
                if not self.folder:
                    bad_request(name, "names a file: this server was started without --media-path")
                return read_below(self.folder, _path(rest))
            if scheme.lower() not in ("http", "https"):
                bad_request(name, "must be a data URI, base64, or an http://, https:// or file:// address")
            if not self.urls:
                bad_request(name, "names an address: this server fetches none, it was started without --media-urls")
            found = self.fetched.get(url)
            if isinstance(found, Exception):
                raise SourceError(f"cannot be fetched: {found}")
        except SourceError as error:
            bad_request(name, f"the image {error}")
        if found is None:
            self.missing.append(url)
        return found or b""

    def uploaded(self, name: str, id: str) -> bytes:
        """The content of a file of POST /v1/files, whose id stands in the field `name`."""
        if self.upload is None:
            bad_request(name, "names an uploaded file: this server was started without --data-dir")
        try:
            return _content(os.open(self.upload(id), os.O_RDONLY))
        except (SourceError, OSError) as error:
            bad_request(name, f"the file {error if isinstance(error, SourceError) else 'cannot be read'}")


def _path(rest: str) -> str:
    """The path of a file's address after `file:`."""
    rest = rest.partition("?")[0].partition("#")[0]
    path = rest.removeprefix("//")
    if rest.startswith("//") and path.lower().startswith("localhost/"):
        path = path[len("localhost") :]
    path = unquote(path)
    if "\0" in path:
        raise SourceError("is no file of --media-path")
    return path


def read_below(folder: str, path: str) -> bytes:
    """The content of a file below the folder: `path` is its absolute path, or begins at the folder.

    Links count by where they lead. The file is opened part by part from the folder on, without
    links, so that one made in the meantime leads nowhere.
    """
    root, escape = os.path.realpath(folder), SourceError("is no file of --media-path")
    tried = [path, f"{root}/{path}"] if os.path.isabs(path) else [f"{root}/{path}"]
    below = (os.path.relpath(real, root) for real in map(os.path.realpath, tried) if _is_below(real, root))
    parts = next((part.split(os.sep) for part in below), None)
    if parts is None:
        raise escape
    try:
        if os.open not in os.supports_dir_fd:  # Windows
            return _content(os.open(os.path.join(root, *parts), os.O_RDONLY))
        place = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        for i, part in enumerate(parts):
            kind = os.O_NONBLOCK if i == len(parts) - 1 else os.O_DIRECTORY
            try:
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=place)
            finally:
                os.close(place)
            place = inner
        return _content(place)
    except (OSError, ValueError):
        raise escape from None


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root.rstrip(os.sep) + os.sep)


def _content(descriptor: int) -> bytes:
    """The bytes of an open file, which it closes. OSError: it is none; SourceError: it is too large."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise SourceError(f"has more than {MAX_BYTES} bytes")
    return data
