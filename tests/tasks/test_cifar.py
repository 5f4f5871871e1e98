"""CIFAR-100 in the layouts of its authors, and checks of image folders."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.errors import DataError
from polymix.tasks.classify import cifar, data
from polymix.tasks.classify.recipe import ImageRecipe

ROWS = {"train": 12, "test": 4}


def contents(part):
    draw = np.random.default_rng(len(part))
    return draw.integers(0, 256, (ROWS[part], 3072), dtype=np.uint8), (np.arange(ROWS[part]) * 9 % 100).tolist()


@pytest.fixture
def binary(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for part in ROWS:
        pixels, labels = contents(part)
        rows = [bytes([0, label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)]
        (folder / f"{part}.bin").write_bytes(b"".join(rows))
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)) + "\n")
    return folder


@pytest.fixture
def python(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for part in ROWS:
        pixels, labels = contents(part)
        (folder / part).write_bytes(pickle.dumps({"data": pixels, "fine_labels": labels, "coarse_labels": labels}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class{i}" for i in range(100)]}))
    return folder


def test_both_layouts_give_the_same_images(binary, python):
    recipe = ImageRecipe(data=str(binary), image_size=32)
    first = data.load(recipe, binary).images
    said = []
    second = data.load(ImageRecipe(data=str(python), image_size=32, allow_pickle=True), python, said.append).images
    assert any("can run any code" in text for text in said)
    pixels, labels = contents("test")
    assert torch.equal(first.test[0][2, 1], torch.from_numpy(pixels)[2, 1024:2048].view(32, 32))
    assert first.test[1].tolist() == labels and first.classes == second.classes and first.classes[9] == "class9"
    for mine, other in zip((*first.train, *first.test), (*second.train, *second.test), strict=True):
        assert torch.equal(mine, other)
    small = data.load(ImageRecipe(data=str(binary), image_size=16), binary).images
    assert small.train[0].shape == (12, 3, 16, 16) and small.train[0].dtype == torch.uint8


def test_pickles_are_not_read_unasked(python):
    with pytest.raises(DataError, match="allow_pickle"):
        data.load(ImageRecipe(data=str(python)), python)


@pytest.mark.parametrize(("file", "content", "said"), [
    ("train.bin", b"\0" * 3000, "3,000 bytes"), ("train.bin", b"", "0 bytes"),
    ("test.bin", bytes([0, 200]) + b"\0" * 3072, "label 200 of image 0"), ("fine_label_names.txt", b"one two", "2 names"),
])  # fmt: skip
def test_damaged_files_are_named(binary, file, content, said):
    (binary / file).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        data.load(ImageRecipe(data=str(binary)), binary)
    assert file in str(caught.value) and data.check(binary) == [str(caught.value)]


def test_damaged_pickles_and_a_missing_file(python, binary):
    (python / "train").write_bytes(b"no pickle")
    assert "allow_pickle" in data.check(python)[0], "checking must not run a pickle unasked"
    assert "train" in data.check(python, allow_pickle=True)[0]
    (python / "train").write_bytes(pickle.dumps({"data": np.zeros((2, 7), np.uint8), "fine_labels": [0, 1]}))
    assert "(2, 7)" in data.check(python, allow_pickle=True)[0]
    (binary / "test.bin").unlink()
    assert cifar.recognise(binary) is None
    with pytest.raises(DataError, match=r"without test\.bin"):
        data.load(ImageRecipe(data=str(binary), layout=cifar.BINARY), binary)


def test_check_lists_every_problem_of_a_folder(tmp_path):
    for name in ("train/a", "train/b", "val/a", "val/c"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    (tmp_path / "train" / "a" / "broken.jpg").write_bytes(b"no picture")
    problems = data.check(tmp_path)
    for part in ("broken.jpg", "no images of the class b", "no images of the class c"):
        assert sum(part in problem for problem in problems) == 1
    assert len(problems) == 3 and data.check(tmp_path / "none")
