"""Image decoding: PNG, JPEG, WebP, GIF and BMP → 8-bit RGB, upright."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20  # a larger image is refused before it is decoded
MAX_SCANS = 64  # of a JPEG file; the usual progressive ones have about ten
MAX_ASPECT = 200  # longer side over the shorter one
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
            if max(width, height) > MAX_ASPECT * min(width, height):
                raise ImageError(f"has {width} x {height} pixels, of which one side is {MAX_ASPECT} times the other")
            if image.format == "JPEG" and data.count(_SCAN) > MAX_SCANS:  # each may take as long as an image
                raise ImageError(f"has more than {MAX_SCANS} scans")
            image.load()
            return _rgb(ImageOps.exif_transpose(image) or image)
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
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
