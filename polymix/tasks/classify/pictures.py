"""Read picture files of all usual formats, upright and in bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import MissingExtraError

FORMATS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
HEIC = {".heic", ".heif"}  # read by pillow-heif
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError)  # what Pillow raises on broken files


@cache
def _register_heic() -> None:
    """Let Pillow read HEIC."""
    try:
        import pillow_heif
    except ImportError as error:
        raise ValueError("HEIC needs another package: pip install pillow-heif") from error
    pillow_heif.register_heif_opener()


def read_picture(path: Path) -> Any:
    """The picture in a file as an upright RGB image of Pillow. Transparency becomes white.

    Raises OSError, ValueError, SyntaxError or EOFError for a file that cannot be read.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", "no such package", "pip install 'polymix[train]'") from error
    if path.suffix.lower() in HEIC:
        _register_heic()
    try:
        opened = Image.open(path)
    except Image.DecompressionBombError as error:
        raise ValueError(f"over {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, more than Pillow reads") from error
    except UnidentifiedImageError as error:  # its message repeats the path
        raise ValueError("no picture that Pillow can read") from error
    with opened as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "F" or upright.mode.startswith("I"):
            upright = _as_bytes(upright)
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")


def as_tensor(image: Any) -> Tensor:
    """An RGB image of Pillow as (3, H, W) bytes."""
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.reshape(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def fitted(picture: Any, size: int) -> Tensor:
    """The middle square of an RGB picture as (3, size, size) bytes."""
    from PIL import Image, ImageOps

    return as_tensor(ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR))


def _read(path: Path, size: int) -> Tensor:
    """The image in a file as (3, size, size) bytes."""
    return fitted(read_picture(path), size)


def _as_bytes(image: Any) -> Any:
    """A grey image of 16 or 32 bits or of floats as bytes; Pillow's own conversion cuts off at 255, which is white.

    16 bits: by their whole range. Floats in [0, 1]: by that range. Others: from the smallest to the largest value, or
    as they are where these fit into a byte.
    """
    sixteen = image.mode.startswith("I;16")
    image = image if image.mode in ("I", "F") else image.convert("I")
    low, high = image.getextrema()
    if image.mode == "F":
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (0, 255) if low >= 0 and high <= 255 else (low, high)
    elif sixteen or (low >= 0 and 255 < high <= 65535):  # older versions of Pillow read 16 bits as 32
        low, high = 0, 65535
    elif low >= 0 and high <= 255:
        low, high = 0, 255
    scale = 255 / ((high - low) or 1)
    return image.convert("F").point(lambda value: value * scale + -low * scale).convert("L")
