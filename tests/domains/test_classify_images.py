"""Loading: the digits, and folders as people have them."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.errors import DataError
from polymix.train.data import images, pictures
from polymix.train.data.images import load_digits, load_folder
from polymix.train.data.labelled import find_images
from polymix.train.data.pictures import middle_square, read_picture


def picture(path, size=(20, 30), mode="RGB", value=None):
    generator = np.random.default_rng(abs(hash(path.name)) % 2**32 if value is None else value)
    channels = {"RGB": 3, "L": 1, "RGBA": 4, "P": 3}[mode]
    data = generator.integers(0, 256, (size[1], size[0], channels), dtype=np.uint8).squeeze()
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(data)
    (image.convert("P") if mode == "P" else image).save(path)


@pytest.fixture
def folder(tmp_path):
    for i, suffix in enumerate(("png", "jpg", "bmp", "gif", "webp", "tiff", "ppm")):
        picture(tmp_path / "cats" / f"{i}.{suffix}", size=(10 + i, 40 - i))
        picture(tmp_path / "dogs" / "deep" / f"{i}.{suffix}", mode="P" if suffix == "gif" else "RGB")
    return tmp_path


def test_digits():
    data = load_digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.train.images.shape[1:] == (1, 8, 8)
    inputs = data.normalise(data.train.images)
    assert abs(inputs.mean().item()) < 0.05
    assert inputs.std().item() == pytest.approx(1, abs=0.05)
    again = load_digits()
    assert torch.equal(again.test.labels, data.test.labels), "the split must not change from run to run"
    assert load_digits(16).image_size == 16


def test_folder_of_the_usual_formats_and_any_sizes(folder):
    data = load_folder(folder, 16)
    assert data.classes == ("cats", "dogs")
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.shape[1:] == (3, 16, 16)
    assert len(data.train) + len(data.test) == 14
    assert set(data.test.labels.tolist()) == {0, 1}
    assert not data.skipped


def test_unreadable_files_are_named_and_skipped(folder):
    (folder / "cats" / "broken.png").write_bytes(b"not an image")
    whole = (folder / "cats" / "0.png").read_bytes()
    (folder / "dogs" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dogs" / "empty.jpg").write_bytes(b"")
    (folder / "dogs" / "notes.txt").write_text("no image, and not meant to be one")
    data = load_folder(folder, 16)
    assert len(data.train) + len(data.test) == 14
    assert sorted(line.split(",")[0].rsplit("/", 1)[1] for line in data.skipped) == [
        "broken.png",
        "cut.png",
        "empty.jpg",
    ]


def test_grey_stays_grey_and_transparency_goes_on_white(tmp_path):
    for name in ("a", "b"):
        for i in range(3):
            picture(tmp_path / name / f"{i}.png", mode="L")
    assert load_folder(tmp_path, 8).channels == 1
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a" / "clear.png")
    for i in range(3):
        picture(tmp_path / "c" / f"{i}.png")
    data = load_folder(tmp_path, 8)
    assert data.channels == 3
    every = torch.cat((data.train.images, data.test.images))
    assert (every == 255).flatten(1).all(1).sum() == 1


def test_a_class_without_a_readable_image_is_left_out(folder):
    (folder / "ants").mkdir()
    for number in range(2):
        (folder / "ants" / f"{number}.png").write_bytes(b"not an image")
    data = load_folder(folder, 8)
    assert data.classes == ("cats", "dogs") and set(data.test.labels.tolist()) == {0, 1} and len(data.skipped) == 2


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="existing folder"):
        load_folder(tmp_path / "nowhere", 8)
    with pytest.raises(DataError, match="none"):
        load_folder(tmp_path, 8)
    for i in range(3):
        picture(tmp_path / "only" / f"{i}.png")
    with pytest.raises(DataError, match="only: 3"):
        load_folder(tmp_path, 8)
    picture(tmp_path / "single" / "0.png")
    with pytest.raises(DataError, match="single: 1"):
        load_folder(tmp_path, 8)
    picture(tmp_path / "single" / "1.png")
    assert load_folder(tmp_path, 8).classes == ("only", "single")
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="smaller --image-size"):
        load_folder(tmp_path, 8)


@pytest.mark.parametrize(("values", "dtype", "wanted", "suffix"), [
    ([[0, 16448], [32896, 65535]], np.uint16, [[0, 64], [128, 255]], "png"),
    ([[0, 16448], [32896, 65535]], np.uint16, [[0, 64], [128, 255]], "tiff"),
    ([[0, 100], [200, 255]], np.int32, [[0, 100], [200, 255]], "tiff"),
    ([[-1000, 0], [500, 1000]], np.int32, [[0, 127], [191, 255]], "tiff"),
    ([[0, 25700], [51400, 65535]], np.int32, [[0, 100], [200, 255]], "tiff"),
    ([[0.0, 0.25], [0.5, 1.0]], np.float32, [[0, 63], [127, 255]], "tiff"),
    ([[0.0, 100.0], [200.0, 255.0]], np.float32, [[0, 100], [200, 255]], "tiff"),
    ([[7.0, 7.0], [7.0, 7.0]], np.float32, [[7, 7], [7, 7]], "tiff"),
    ([[-3.0, -3.0], [-3.0, -3.0]], np.float32, [[0, 0], [0, 0]], "tiff"),
])  # fmt: skip
def test_grey_images_of_more_than_a_byte_keep_their_shades(tmp_path, values, dtype, wanted, suffix):
    """Converted by Pillow alone everything above 255 is white: every image of a 16-bit folder looked the same."""
    Image.fromarray(np.array(values, dtype)).save(tmp_path / f"grey.{suffix}")
    middle = middle_square(read_picture(tmp_path / f"grey.{suffix}"), 2)[0].tolist()
    assert np.abs(np.array(middle) - np.array(wanted)).max() <= 1


def test_photos_of_phones_are_read_where_the_package_is_there(folder, monkeypatch):
    heif = pytest.importorskip("pillow_heif", reason="untested: HEIC, without pillow-heif")
    heif.from_pillow(Image.new("RGB", (40, 30), (250, 10, 10))).save(folder / "cats" / "phone.HEIC", quality=-1)
    data = load_folder(folder, 16)
    assert len(data.train) + len(data.test) == 15 and not data.skipped
    both = torch.cat((data.train.images, data.test.images)).float().mean((2, 3))
    assert (both - torch.tensor([250.0, 10, 10])).abs().amax(1).min() < 6, "no image is the red one"
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    pictures._register_heic.cache_clear()
    (line,) = load_folder(folder, 16).skipped
    assert "phone.HEIC" in line and "pip install pillow-heif" in line


def test_a_huge_picture_is_skipped_and_named(folder, monkeypatch):
    """It used to end the run with a traceback (DecompressionBombError)."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    picture(folder / "cats" / "huge.png", size=(100, 60))
    data = load_folder(folder, 16)
    assert [line.split(",")[0].rsplit("/", 1)[1] for line in data.skipped] == ["huge.png"]
    assert "2,000 pixels" in data.skipped[0]


def test_a_class_with_a_single_image_is_named(folder):
    picture(folder / "birds" / "one.png")
    with pytest.raises(DataError, match=r"by class: birds: 1\."):
        load_folder(folder, 16)
    for name in ("birds", "dogs"):
        for path in sorted((folder / name).rglob("*.*")):
            path.unlink()
    with pytest.raises(DataError, match=r"by class: cats: 7\."):
        load_folder(folder, 16)


@pytest.mark.parametrize("names", [("train", "val"), ("Training", "test"), ("train", "validation", "test")])
def test_a_folder_of_train_and_val_keeps_its_classes_and_its_split(tmp_path, names):
    """ImageNet's layout used to be read as two classes, train and val, with 75 % accuracy for nothing."""
    for i, part in enumerate(names):
        for name in ("cats", "dogs"):
            for number in range(4 - i):
                picture(tmp_path / part / name / f"{number}.png", value=10 * i + number)
    data = load_folder(tmp_path, 8)
    assert data.classes == ("cats", "dogs")
    assert (len(data.train), len(data.test)) == (8, 6)
    held_out = middle_square(read_picture(tmp_path / names[1] / "cats" / "0.png"), 8)
    assert torch.equal(data.test.images[0], held_out) and data.test.labels.tolist() == [0] * 3 + [1] * 3
    assert list(find_images(tmp_path)) == ["cats", "dogs"]


def test_train_and_val_of_other_classes_are_an_error_and_a_class_may_be_called_train(tmp_path):
    for part, name in (("train", "cats"), ("train", "dogs"), ("val", "cats"), ("val", "birds")):
        for number in range(2):
            picture(tmp_path / part / name / f"{number}.png")
    with pytest.raises(DataError, match="birds, dogs in one of"):
        load_folder(tmp_path, 8)
    for name in ("train", "bus"):
        for number in range(3):
            picture(tmp_path / "vehicles" / name / f"{number}.png")
    assert load_folder(tmp_path / "vehicles", 8).classes == ("bus", "train")
