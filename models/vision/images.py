"""Image files by data URI, path or upload, and their decoding to 8-bit RGB, upright."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TGA")  # PPM: PNM of all kinds; TGA, without a mark, last
MAX_PIXELS = 64 << 20  # a larger image is refused before it is decoded
MAX_DECODED = 24 << 20  # of those; a JPEG file is decoded at half of its size, or less, beyond
STRIP = 256  # lines of a transparent image that are put on white at once
MAX_SCANS = 64  # of a JPEG file; the usual progressive ones have about ten
MAX_SLOW = 2 << 20  # bytes of a file that Pillow decodes in Python (some of PNM and BMP): they take a second
MAX_BYTES: Final = 20 << 20  # of one image that is only named
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w=.+-]+)*),", re.ASCII)
_SCAN = b"\xff\xda"  # before each scan of a JPEG file, and nowhere in one


class ImageError(ValueError):
    """An image that cannot be used; the text is one line without the image's name."""


def decode_image(data: bytes) -> Image:
    """The first frame of an image file, turned as its EXIF data say, on white where it is
    transparent. ImageError: it is none of FORMATS, broken, or too large."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"has {width} x {height} pixels, at most {MAX_PIXELS} are possible")
            if image.format == "JPEG" and data.count(_SCAN) > MAX_SCANS:  # each may take as long as an image
                raise ImageError(f"has more than {MAX_SCANS} scans")
            if image.mode == "F":  # floats of any range
                raise UnidentifiedImageError
            if len(data) > MAX_SLOW and any(tile.codec_name in Image.DECODERS for tile in image.tile):
                reason = f"has {len(data)} bytes in an encoding that is slow to read"
                raise ImageError(f"{reason}, at most {MAX_SLOW} are possible")
            if width * height > MAX_DECODED and image.draft(None, (width // 2, height // 2)) is None:
                raise ImageError(
                    f"has {width} x {height} pixels, at most {MAX_DECODED} are possible, but in a JPEG file"
                )
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"is no image of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise any error on a broken file
        raise ImageError(f"cannot be decoded: {' '.join(str(error).split())[:200] or type(error).__name__}") from None


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey
        return image.point(lambda x: x / 256).convert("L").convert("RGB")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        whole = Image.new("RGB", image.size)
        for top in range(0, image.height, STRIP):
            strip = image.crop((0, top, image.width, min(image.height, top + STRIP)))
            strip.info = image.info  # a palette's transparency
            rgba = strip.convert("RGBA")
            whole.paste(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"), (0, top))
        return whole
    return image if image.mode == "RGB" else image.convert("RGB")


# -- files


class FileError(Exception):
    """An image that cannot be had; the text is one line without the image's name."""


def data_of(text: str) -> bytes | None:
    """The bytes of a data URI; None: the text is none. FileError: they are not base64."""
    match = _DATA.match(text)
    if match is None:
        return None
    if not match[2].endswith(";base64"):
        raise FileError("must be a data URI in base64")
    return from_base64(text[match.end() :])


def from_base64(text: str) -> bytes:
    """The bytes of base64. FileError: it is none, or empty."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FileError("is not valid base64") from None
    if not data:
        raise FileError("is empty")
    return data


def read_below(folder: str | Path, path: str, kind: str) -> bytes:
    """The content of a file below the folder: `path` is its absolute path, or begins at the folder.
    FileError: it is no `kind`.

    Links count by where they lead. The file is opened part by part from the folder on, without
    links, so that one made in the meantime leads nowhere."""
    root, escape = os.path.realpath(folder), FileError(f"is no {kind}")
    if "\0" in path:
        raise escape
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
            kind_of_open = os.O_NONBLOCK if i == len(parts) - 1 else os.O_DIRECTORY
            try:
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind_of_open, dir_fd=place)
            finally:
                os.close(place)
            place = inner
        return _content(place)
    except (OSError, ValueError):
        raise escape from None


def read_file(path: Path) -> bytes:
    """The content of a file. FileError: it cannot be read, or is too large."""
    try:
        return _content(os.open(path, os.O_RDONLY))
    except OSError:
        raise FileError("cannot be read") from None


def path_of(address: str) -> str:
    """The path of a file's address after `file:`."""
    address = address.partition("?")[0].partition("#")[0]
    path = address.removeprefix("//")
    if address.startswith("//") and path.lower().startswith("localhost/"):
        path = path[len("localhost") :]
    return unquote(path)


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root.rstrip(os.sep) + os.sep)


def _content(descriptor: int) -> bytes:
    """The bytes of an open file, which it closes. OSError: it is none; FileError: it is too large."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise FileError(f"has more than {MAX_BYTES} bytes")
    return data
