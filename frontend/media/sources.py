"""Sources of a request's media beside its body: addresses, files of a folder, uploaded files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from logitless.frontend.fields import bad_request
from logitless.models.vision.images import FileError, path_of, read_below, read_file


class Unfetched(Exception):
    """The request names addresses: it can be parsed when `sources` has their contents."""

    def __init__(self, sources: MediaSources) -> None:
        super().__init__("addresses must be fetched first")
        self.sources = sources


@dataclass(eq=False)
class MediaSources:
    """Media that one request may name. `fetched` has them by their addresses, or why they cannot be had;
    `missing` the addresses that were asked for in vain."""

    urls: bool = False  # --media-urls
    folder: str = ""  # --media-path
    upload: Callable[[str], Path] | None = None  # the file of an id; FileError: the client has no such file
    fetched: dict[str, bytes | Exception] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def address(self, name: str, url: str, kind: str) -> bytes:
        """The image or other `kind` of file at an address in the field `name`; b"" until it was fetched."""
        scheme, _, rest = url.partition(":")
        try:
            if scheme.lower() == "file":
                if not self.folder:
                    bad_request(name, "names a file: this server was started without --media-path")
                return read_below(self.folder, path_of(rest), "file of --media-path")
            if scheme.lower() not in ("http", "https"):
                bad_request(name, "must be a data URI, base64, or an http://, https:// or file:// address")
            if not self.urls:
                bad_request(name, "names an address: this server fetches none, it was started without --media-urls")
            result = self.fetched.get(url)
            if isinstance(result, Exception):
                raise FileError(f"cannot be fetched: {result}")
        except FileError as error:
            bad_request(name, f"the {kind} {error}")
        if result is None:
            self.missing.append(url)
        return result or b""

    def uploaded(self, name: str, id: str) -> bytes:
        """The content of a file of POST /v1/files, whose id stands in the field `name`."""
        if self.upload is None:
            bad_request(name, "names an uploaded file: this server was started without --data-dir")
        try:
            return read_file(self.upload(id))
        except FileError as error:
            bad_request(name, f"the file {error}")
