"""Loading: the digits, and folders as people have them."""

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.errors import DataError
from polymix.tasks.images import data as images
from polymix.tasks.images import load_digits, load_folder


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
    assert (len(data.train[0]), len(data.test[0])) == (1438, 359)
    assert data.train[0].shape[1:] == (1, 8, 8)
    inputs = data.normalise(data.train[0])
    assert abs(inputs.mean().item()) < 0.05
    assert inputs.std().item() == pytest.approx(1, abs=0.05)
    again = load_digits()
    assert torch.equal(again.test[1], data.test[1]), "the split must not change from run to run"
    assert load_digits(16).image_size == 16


def test_folder_of_the_usual_formats_and_any_sizes(folder):
    data = load_folder(folder, 16)
    assert data.classes == ("cats", "dogs")
    assert data.train[0].dtype == torch.uint8
    assert data.train[0].shape[1:] == (3, 16, 16)
    assert len(data.train[0]) + len(data.test[0]) == 14
    assert set(data.test[1].tolist()) == {0, 1}
    assert not data.skipped


def test_unreadable_files_are_named_and_skipped(folder):
    (folder / "cats" / "broken.png").write_bytes(b"not an image")
    whole = (folder / "cats" / "0.png").read_bytes()
    (folder / "dogs" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dogs" / "empty.jpg").write_bytes(b"")
    (folder / "dogs" / "notes.txt").write_text("no image, and not meant to be one")
    data = load_folder(folder, 16)
    assert len(data.train[0]) + len(data.test[0]) == 14
    assert sorted(line.split(":")[0].rsplit("/", 1)[1] for line in data.skipped) == [
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
    every = torch.cat((data.train[0], data.test[0]))
    assert (every == 255).flatten(1).all(1).sum() == 1


def test_progress_is_told(folder):
    seen = []
    load_folder(folder, 8, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (14, 14)


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
