"""One picture of every kind through the one reader."""

import io
import struct
import warnings

import numpy
import pytest
import torch
from PIL import Image

from polymix.errors import DataError
from polymix.train.data import pictures
from polymix.train.data.pictures import (
    Header,
    as_image,
    middle_square,
    read_grey,
    read_header,
    read_labels,
    read_picture,
    resized,
    turn,
    turn_box,
)
from tests.train.data.picture_files import KINDS, RAMP, colour, write_kinds


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_as_it_is_shown(kind, tmp_path):
    file, expected, tolerance = write_kinds(tmp_path)[kind]
    read = read_picture(file)
    assert read.dtype == torch.uint8 and read.is_contiguous() and read.shape == expected.shape
    assert (read.int() - expected.int()).abs().max() <= tolerance, f"{kind} is read as other colours"
    grey = read_grey(file)
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    assert (grey.float() - (expected.float() * weights).sum(0)).abs().max() <= tolerance + 1
    header = read_header(file)
    assert (header.height, header.width) == tuple(expected.shape[1:])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_turns_pixels_masks_and_boxes_alike(orientation, tmp_path):
    stored = torch.zeros(3, 10, 16, dtype=torch.uint8)
    stored[:, 2:5, 3:9] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    as_image(stored).save(tmp_path / "a.png", exif=exif)
    shown = read_picture(tmp_path / "a.png")
    assert torch.equal(turn(stored, orientation), shown)
    x1, y1, x2, y2 = turn_box((3, 2, 9, 5), orientation, shown.shape[2], shown.shape[1])
    expected = torch.zeros_like(shown)
    expected[:, y1:y2, x1:x2] = 255
    assert torch.equal(expected, shown), "a box is turned otherwise than its picture"
    assert read_header(tmp_path / "a.png") == (shown.shape[2], shown.shape[1], orientation)


def test_annotations_are_in_shown_pixels_unless_their_size_says_otherwise():
    turned = Header(10, 16, 6)
    assert turned.turn_for(None) == turned.turn_for((10, 16)) == 1
    assert turned.turn_for((16, 10)) == 6, "the size of the stored pixels"
    assert turned.turn_for((16, 16)) is None
    assert Header(10, 16, 1).turn_for((16, 10)) is None, "nothing says that it is turned"
    assert Header(10, 10, 6).turn_for((10, 10)) == 1, "a square: as it is shown"


def test_damaged_and_missing_files_are_one_sentence(tmp_path):
    whole = io.BytesIO()
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=numpy.uint8)).save(whole, "PNG")
    content = whole.getvalue()
    spoiled = {
        "short.png": content[: len(content) // 2], "header.png": content[:20], "empty.jpg": b"", "text.jpg": b"hello",
        "size.png": content[:16] + struct.pack(">I", 0) + content[20:],
        "tiff.tif": b"II*\0" + bytes(range(1, 200)),
    }  # fmt: skip
    for name, data in spoiled.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}, which cannot be read \(.+\)") as error:
            read_picture(tmp_path / name)
        assert "\n" not in str(error.value)
    for read in (read_picture, read_grey, read_labels, read_header):
        with pytest.raises(DataError, match=r"none.png, which cannot be read \(there is no such file\)"):
            read(tmp_path / "none.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DataError, match=r"folder.png, which cannot be read"):
        read_picture(tmp_path / "folder.png")


def test_floats_that_are_no_numbers_are_refused(tmp_path):
    Image.fromarray(numpy.array([[0.5, numpy.nan]], numpy.float32)).save(tmp_path / "nan.tif")
    with pytest.raises(DataError, match="infinite or no numbers"):
        read_picture(tmp_path / "nan.tif")


def test_a_huge_picture_is_one_sentence_and_a_large_one_no_warning(tmp_path, monkeypatch):
    Image.new("L", (100, 60)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for read in (read_picture, read_header, read_labels):
        with pytest.raises(DataError, match=r"huge.png, which cannot be read \(over 2,000 pixels"):
            read(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_picture(tmp_path / "huge.png").shape == (3, 60, 100)


def test_heic_names_its_package(tmp_path, monkeypatch):
    heif = pytest.importorskip("pillow_heif", reason="untested: HEIC, without pillow-heif")
    heif.from_pillow(Image.new("RGB", (40, 30), (250, 10, 10))).save(tmp_path / "phone.HEIC", quality=-1)
    pixels = read_picture(tmp_path / "phone.HEIC").float()
    assert pixels.shape == (3, 30, 40) and (pixels.mean((1, 2)) - torch.tensor([250.0, 10, 10])).abs().max() < 6
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    pictures._register_heic.cache_clear()
    with pytest.raises(DataError, match=r"phone.HEIC.*pip install pillow-heif"):
        read_picture(tmp_path / "phone.HEIC")


def test_a_binary_file_is_read_and_named(tmp_path):
    file = io.BytesIO()
    colour().save(file, "PNG")
    assert read_picture(io.BytesIO(file.getvalue())).shape == (3, *RAMP)
    with pytest.raises(DataError, match=r"part 3 of a.zip, which cannot be read"):
        read_picture(io.BytesIO(b"no"), name="part 3 of a.zip")


def test_label_maps_are_numbers_and_nothing_else(tmp_path):
    numbers = (numpy.arange(12).reshape(3, 4) % 5).astype(numpy.uint8)
    palette = Image.fromarray(numbers, "P")
    palette.putpalette([9, 8, 7] * 256)
    palette.save(tmp_path / "p.png")
    Image.fromarray(numbers).save(tmp_path / "l.png")
    Image.fromarray(numbers > 2).save(tmp_path / "one.png")
    assert read_labels(tmp_path / "p.png").tolist() == read_labels(tmp_path / "l.png").tolist() == numbers.tolist()
    assert read_labels(tmp_path / "one.png").tolist() == (numbers > 2).astype(int).tolist()
    Image.fromarray(numbers).save(tmp_path / "j.jpg")
    Image.fromarray(numbers).convert("RGB").save(tmp_path / "rgb.png")
    Image.fromarray(numbers.astype(numpy.uint16)).save(tmp_path / "deep.png")
    for name, text in (("j.jpg", "is a JPEG"), ("rgb.png", "is a colour picture"), ("deep.png", "more than 8 bits")):
        with pytest.raises(DataError, match=f"{name}, which .*{text}"):
            read_labels(tmp_path / name)


def test_resizing_is_that_of_torchvision_and_the_square_is_the_middle():
    from polymix.train.data.vision import torchvision

    functional = torchvision("transforms.v2.functional")
    pixels = torch.randint(0, 256, (3, 31, 47), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for size in ((16, 16), (64, 20), (31, 47)):
        assert torch.equal(resized(pixels, *size), functional.resize(pixels, list(size), antialias=True))
    striped = torch.zeros(3, 20, 60, dtype=torch.uint8)
    striped[:, :, 20:40] = 200
    assert (middle_square(striped, 8) == 200).all()
