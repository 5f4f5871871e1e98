"""The one reader of picture files, for training, evaluation and prediction in every domain.

Pictures are read as every viewer shows them: turned and mirrored as their EXIF says, transparent parts white, CMYK and
palettes as the colours that they stand for, grey values of more than 8 bits scaled to bytes.

Coordinates (boxes, polygons, masks, label maps) are in the pixels of the picture as it is shown. Where the width and
height that come with annotations fit only the pixels as they are stored, before EXIF turns them, the annotations are
turned along with the picture: `Header.turn_for` decides, `turn` and `turn_box` do it. Where the size fits both, as of
square pictures and half turns, coordinates are those of the picture as it is shown, which `TURNED` tells the user.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polymix.errors import DataError, MissingExtraError, one_line
from polymix.extras import needs
from polymix.files import regular

HEIC = frozenset({".heic", ".heif"})
SUFFIXES = frozenset({
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", *HEIC
})  # fmt: skip
ORIENTATION_TAG = 0x0112  # of EXIF
TURNED = "EXIF turns the picture, and annotations are taken to be of it as it is shown; their size fits both"
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations whose width and height are exchanged
LABEL_MODES = {"1", "L", "P"}  # Pillow's modes with one number of at most 8 bits a pixel


def find_pictures(folder: Path) -> list[Path]:
    """The picture files in a folder and below it, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


@contextmanager
def opened(source: Path | IO[bytes], name: str = "") -> Iterator[Any]:
    """An image file as Pillow opens it, with every failure as one sentence.

    Args:
        source: a path, or a binary file, for which `name` is what errors call it.
    Raises:
        DataError: it is missing, damaged, larger than Pillow reads (`Image.MAX_IMAGE_PIXELS`) or no picture; also for
            what the block raises while it decodes.
        MissingExtraError: Pillow is missing.
    """
    with needs("train"):
        from PIL import Image, UnidentifiedImageError
    try:
        if isinstance(source, Path) and source.suffix.lower() in HEIC:
            _register_heic()
        with warnings.catch_warnings():
            # Large pictures are read without a word, and those of twice that size refused.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(regular(source) if isinstance(source, Path) else source)
        with image:
            yield image
    except DataError:
        raise
    except Exception as error:  # on damaged files decoders raise what they like, struct.error and KeyError too
        if isinstance(error, Image.DecompressionBombError):
            reason = f"over {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, more than Pillow reads"
        elif isinstance(error, UnidentifiedImageError):  # its message repeats the path
            reason = "no picture that Pillow knows"
        elif isinstance(error, FileNotFoundError):
            reason = "there is no such file"
        else:
            reason = " ".join(str(error).split()) or one_line(error)
        got = f"{name or source}, which cannot be read ({reason})"
        raise DataError("picture", got, "a picture file", "Repair or remove it.") from error


@cache
def _register_heic() -> None:
    """Let Pillow read HEIC, the photographs of phones."""
    try:
        import pillow_heif
    except ImportError as error:
        raise ValueError(str(MissingExtraError("pillow-heif", why="HEIC is read with it."))) from error
    pillow_heif.register_heif_opener()


def open_picture(source: Path | IO[bytes], mode: str = "RGB", name: str = "") -> Any:
    """A picture as Pillow's image in mode "RGB" or "L" (grey), as it is shown. Raises DataError, as `opened` does."""
    with opened(source, name) as image:
        from PIL import Image, ImageOps

        upright = ImageOps.exif_transpose(image)
        if upright.mode == "F" or upright.mode.startswith("I"):
            return _as_bytes(upright).convert(mode)
        if upright.has_transparency_data:
            # Ink on transparent paper must not become black on black.
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert(mode)


def read_picture(source: Path | IO[bytes], name: str = "") -> Tensor:
    """A picture as it is shown: bytes (3, height, width). Raises DataError, as `opened` does."""
    return as_tensor(open_picture(source, "RGB", name))


def read_grey(source: Path | IO[bytes], name: str = "") -> Tensor:
    """The grey values of a picture as it is shown: bytes (height, width). Raises DataError, as `opened` does."""
    return as_tensor(open_picture(source, "L", name))


def read_labels(file: Path, colours: Sequence[Sequence[int]] = ()) -> Tensor:
    """The numbers in a label map as it is shown: bytes (height, width); of a palette, the places and not the colours.

    colours: (red, green, blue) of each number, for a label map that is a picture in these.

    Raises DataError, as `opened` does, and for a file that is no label map: a JPEG, other colours, or more than 8 bits.
    """
    with opened(file) as image:
        from PIL import ImageOps

        if colours and image.format != "JPEG" and image.mode in ("RGB", "RGBA"):
            return _numbers_of(numpy.array(ImageOps.exif_transpose(image).convert("RGB")), colours, file)
        if image.format == "JPEG":
            reason = "is a JPEG, which changes labels; save label maps as PNG"
        elif image.mode not in LABEL_MODES:
            deep = image.mode[0] in "IF"
            what = "has more than 8 bits a pixel" if deep else f"is a colour picture ({image.mode})"
            reason = f"{what} instead of a label map: one number from 0 to 255 for each pixel"
        else:
            return torch.from_numpy(numpy.array(ImageOps.exif_transpose(image), dtype=numpy.uint8))
        raise DataError("data", f"{file}, which {reason}", "a label map", "Remove or repair it.")


def _numbers_of(pixels: Any, colours: Sequence[Sequence[int]], file: Path) -> Tensor:
    """The number of each pixel's colour. Raises DataError for a colour that has none."""
    keys = pixels.astype(numpy.int32) @ numpy.array([1 << 16, 1 << 8, 1], dtype=numpy.int32)
    labels = numpy.full(keys.shape, -1, dtype=numpy.int16)
    for number, (red, green, blue) in enumerate(colours):
        labels[keys == (red << 16 | green << 8 | blue)] = number
    if (labels < 0).any():
        row, column = numpy.argwhere(labels < 0)[0].tolist()
        got = f"{file}, row {row}, column {column}: the colour {pixels[row, column].tolist()}"
        raise DataError("data", got, "a colour of the list of classes", "Correct the label map or the list.")
    return torch.from_numpy(labels.astype(numpy.uint8))


def read_numbers(source: Path | IO[bytes], name: str = "") -> Tensor:
    """The numbers in a picture of one channel, of up to 32 bits, as they are stored: int32 (height, width).

    Raises DataError, as `opened` does.
    """
    with opened(source, name) as image:
        return torch.from_numpy(numpy.array(image).astype(numpy.int32))


def read_deep(file: Path, what: str) -> Any:
    """The numbers of more than 8 bits in a picture of one channel, as they are stored: an array (height, width).

    Raises DataError, as `opened` does, and for 8 bits. what: they are, for the error.
    """
    with opened(file) as image:
        if image.mode[0] not in "IF":
            got = f"{file}, a picture of 8 bits a channel ({image.mode})"
            raise DataError("data", got, f"{what} in 16 bits", "Save it as a PNG of 16 bits, or as .npy.")
        return numpy.array(image)


def _as_bytes(image: Any) -> Any:
    """A grey image of 16 or 32 bits or of floats as bytes; Pillow's own conversion cuts off at 255, which is white.

    16 bits: by their whole range. Floats in [0, 1]: by that range. Others: from the smallest to the largest value, or
    as they are where these fit into a byte.
    """
    from PIL import Image

    values = numpy.asarray(image, dtype=numpy.float64)
    if not numpy.isfinite(values).all():
        raise ValueError("it has values that are infinite or no numbers")
    low, high = float(values.min()), float(values.max())
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif image.mode.startswith("I;16") or (image.mode == "I" and low >= 0 and 255 < high <= 65535):
        low, high = 0.0, 65535.0  # older versions of Pillow read 16 bits as 32
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    scaled = (values - low) * (255 / ((high - low) or 1.0))
    return Image.fromarray(scaled.round().clip(0, 255).astype(numpy.uint8))


class Header(NamedTuple):
    """What a picture file says before it is decoded: width and height as it is shown, and its EXIF orientation."""

    width: int
    height: int
    orientation: int

    def turn_for(self, size: tuple[int, int] | None) -> int | None:
        """How annotations made for pictures of `size` (width, height) are to be turned: an EXIF orientation.

        1, not at all, where the size is that of the picture as it is shown, or None; the picture's own orientation
        where it is that of the stored pixels alone; None where it is neither.
        """
        if size in (None, (self.width, self.height)):
            return 1
        stored = self.orientation in QUARTER_TURNS and size == (self.height, self.width)
        return self.orientation if stored else None

    def fits_both(self, size: tuple[int, int] | None) -> bool:
        """Whether annotations of `size` fit the stored pixels as well as the picture as it is shown, which differ."""
        sides = (self.width, self.height)
        stored = sides[::-1] if self.orientation in QUARTER_TURNS else sides
        return self.orientation != 1 and size in (None, sides) and size in (None, stored)


def read_header(file: Path, name: str = "") -> Header:
    """Size and orientation of a picture file, without decoding it. Raises DataError, as `opened` does."""
    with opened(file, name) as image:
        width, height = image.size
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
    orientation = orientation if orientation in range(1, 9) else 1
    return Header(*((height, width) if orientation in QUARTER_TURNS else (width, height)), orientation)


def turn(values: Tensor, orientation: int) -> Tensor:
    """Values (…, height, width) in stored pixels, such as masks, as an EXIF orientation from 1 to 8 shows them."""
    if orientation in QUARTER_TURNS:
        values = values.transpose(-1, -2)
    flipped = {2: (-1,), 3: (-1, -2), 4: (-2,), 6: (-1,), 7: (-1, -2), 8: (-2,)}.get(orientation, ())
    return values.flip(flipped) if flipped else values


def turn_box(
    box: tuple[float, float, float, float], orientation: int, width: int, height: int
) -> tuple[float, float, float, float]:
    """A box x1, y1, x2, y2 in stored pixels, in those that an EXIF orientation shows. width, height: as shown."""
    x1, y1, x2, y2 = box
    if orientation in QUARTER_TURNS:
        x1, y1, x2, y2 = y1, x1, y2, x2
    if orientation in (2, 3, 6, 7):
        x1, x2 = width - x2, width - x1
    if orientation in (3, 4, 7, 8):
        y1, y2 = height - y2, height - y1
    return x1, y1, x2, y2


def as_tensor(image: Any) -> Tensor:
    """Pillow's image as bytes: (3, height, width) in mode "RGB", (height, width) in mode "L".

    torchvision's `pil_to_tensor` does the same; importing it takes a second of every start.
    """
    values = torch.from_numpy(numpy.array(image))
    return values.permute(2, 0, 1).contiguous() if values.ndim == 3 else values


def as_image(pixels: Tensor) -> Any:
    """Bytes (3, height, width), (1, height, width) or (height, width) as Pillow's image: the inverse of `as_tensor`."""
    from PIL import Image

    pixels = pixels[0] if pixels.ndim == 3 and len(pixels) == 1 else pixels
    values = pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels
    return Image.fromarray(values.contiguous().numpy())


def write_png(path: Path, pixels: Tensor, compression: int = 1) -> None:
    """Write bytes, shaped as `as_image` takes them, as a PNG file, whatever the suffix. compression: zlib's, 0 to 9."""
    as_image(pixels).save(path, format="PNG", compress_level=compression)


def resized(pixels: Tensor, height: int, width: int, mode: str = "bilinear") -> Tensor:
    """A picture (C, H, W), or several (N, C, H, W), of bytes or floats in another size, as torchvision's `resize`.

    mode: "bilinear" or "bicubic"; antialiased where it shrinks.
    """
    if pixels.shape[-2:] == (height, width):
        return pixels
    several = pixels if pixels.ndim == 4 else pixels[None]
    several = interpolate(several, size=(height, width), mode=mode, antialias=True)
    return several if pixels.ndim == 4 else several[0]


def middle_part(size: Sequence[int], shape: Sequence[int]) -> tuple[slice, slice]:
    """Rows and columns of the largest part in the middle of a picture whose sides have the proportions of `shape`.

    size, shape: height and width.
    """
    height, width = size
    tall, wide = min(height, max(1, width * shape[0] // shape[1])), min(width, max(1, height * shape[1] // shape[0]))
    top, left = (height - tall) // 2, (width - wide) // 2
    return slice(top, top + tall), slice(left, left + wide)


def middle(pixels: Tensor, height: int, width: int) -> Tensor:
    """The largest part in the middle of a picture (C, H, W), or of several (N, C, H, W), that fits this size, in it."""
    rows, columns = middle_part(pixels.shape[-2:], (height, width))
    return resized(pixels[..., rows, columns], height, width)


def middle_square(pixels: Tensor, size: int) -> Tensor:
    """`middle`, a square of `size` pixels a side."""
    return middle(pixels, size, size)
