"""Picture files of every kind that people have, each with the colours that a viewer shows."""

import numpy
import torch
from PIL import Image

RAMP = (24, 32)  # height and width of every picture as it is shown


def grey_ramp():
    """Grey values (24, 32) from 0 to 255."""
    return numpy.linspace(0, 255, RAMP[0] * RAMP[1]).round().astype(numpy.uint8).reshape(RAMP)


def colour():
    """A picture in which top and left can be told from bottom and right."""
    rows, columns = numpy.mgrid[0 : RAMP[0], 0 : RAMP[1]]
    values = numpy.stack((rows * 8, columns * 6, 200 - rows * 2), -1).astype(numpy.uint8)
    return Image.fromarray(values)


def _tensor(image):
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1)


def _grey(values):
    return torch.from_numpy(numpy.array(values)).expand(3, *RAMP)


def ink_on_transparent_paper():
    """A red line; all else is transparent, and black below that."""
    values = numpy.zeros((*RAMP, 4), dtype=numpy.uint8)
    values[10:14] = (200, 0, 0, 255)
    shown = numpy.full((*RAMP, 3), 255, dtype=numpy.uint8)
    shown[10:14] = (200, 0, 0)
    return Image.fromarray(values), Image.fromarray(shown)


def write_kinds(folder):
    """Files by kind: (path, bytes (3, 24, 32) as they are shown, and by how much a reader may differ)."""
    ramp, picture = grey_ramp(), colour()
    clear, on_white = ink_on_transparent_paper()
    files = {}

    def add(kind, suffix, image, shown, tolerance=0, **options):
        path = folder / f"{kind}{suffix}"
        image.save(path, **options)
        files[kind] = (path, shown, tolerance)

    add("rgb", ".png", picture, _tensor(picture))
    add("grey", ".png", Image.fromarray(ramp), _grey(ramp))
    add("16-bit", ".png", Image.fromarray(ramp.astype(numpy.uint16) * 257), _grey(ramp), 1)
    add("32-bit", ".tif", Image.fromarray(ramp.astype(numpy.int32) * 70_000), _grey(ramp), 1)
    add("float", ".tif", Image.fromarray(ramp.astype(numpy.float32) / 255), _grey(ramp), 1)
    quantised = picture.quantize(64)
    add("palette", ".png", quantised, _tensor(quantised))
    add("one-bit", ".png", Image.fromarray(ramp > 127), _grey(numpy.where(ramp > 127, 255, 0).astype(numpy.uint8)))
    add("alpha", ".png", clear, _tensor(on_white))
    add("alpha-palette", ".gif", clear, _tensor(on_white))
    grey_alpha = numpy.stack((numpy.zeros_like(ramp), ramp), -1)
    add("grey-alpha", ".png", Image.fromarray(grey_alpha, "LA"), _grey(255 - ramp), 1)
    add("cmyk", ".tif", picture.convert("CMYK"), _tensor(picture), 2)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its left side
    add("exif", ".png", picture.transpose(Image.Transpose.ROTATE_90), _tensor(picture), exif=exif)
    return files


KINDS = (
    "rgb", "grey", "16-bit", "32-bit", "float", "palette", "one-bit", "alpha", "alpha-palette", "grey-alpha", "cmyk",
    "exif",
)  # fmt: skip
