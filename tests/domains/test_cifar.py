"""CIFAR-100 in the layouts of its authors, and checks of image folders."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.domains.classify import cifar, data
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import DataError

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
    recipe = ClassifyRecipe(data=str(binary), image_size=32)
    first = data.load(recipe)
    said = []
    second = data.load(ClassifyRecipe(data=str(python), image_size=32, allow_pickle=True), said.append)
    assert any("can run any code" in text for text in said)
    pixels, labels = contents("test")
    assert torch.equal(first.test.images[2, 1], torch.from_numpy(pixels)[2, 1024:2048].view(32, 32))
    assert first.test.labels.tolist() == labels and first.classes == second.classes and first.classes[9] == "class9"
    for mine, other in ((first.train, second.train), (first.test, second.test)):
        assert torch.equal(mine.images, other.images) and torch.equal(mine.labels, other.labels)
    small = data.load(ClassifyRecipe(data=str(binary), image_size=16))
    assert small.train.images.shape == (12, 3, 16, 16) and small.train.images.dtype == torch.uint8


def test_pickles_are_not_read_unasked(python):
    with pytest.raises(DataError, match="allow_pickle"):
        data.load(ClassifyRecipe(data=str(python)))


@pytest.mark.parametrize(("file", "content", "said"), [
    ("train.bin", b"\0" * 3000, "3,000 bytes"), ("train.bin", b"", "0 bytes"),
    ("test.bin", bytes([0, 200]) + b"\0" * 3072, "label 200 of image 0"), ("fine_label_names.txt", b"one two", "2 names"),
])  # fmt: skip
def test_damaged_files_are_named(binary, file, content, said):
    (binary / file).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        data.load(ClassifyRecipe(data=str(binary)))
    assert file in str(caught.value) and data.list_problems(binary) == [str(caught.value)]


def test_damaged_pickles_and_a_missing_file(python, binary):
    (python / "train").write_bytes(b"no pickle")
    assert "allow_pickle" in data.list_problems(python)[0], "checking must not run a pickle unasked"
    assert "train" in data.list_problems(python, allow_pickle=True)[0]
    (python / "train").write_bytes(pickle.dumps({"data": np.zeros((2, 7), np.uint8), "fine_labels": [0, 1]}))
    assert "(2, 7)" in data.list_problems(python, allow_pickle=True)[0]
    (binary / "test.bin").unlink()
    assert cifar.recognise(binary) is None
    with pytest.raises(DataError, match=r"without test\.bin"):
        data.load(ClassifyRecipe(data=str(binary), layout=cifar.BINARY))


def test_check_lists_every_problem_of_a_folder(tmp_path):
    for name in ("train/a", "train/b", "val/a", "val/c"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    (tmp_path / "train" / "a" / "broken.jpg").write_bytes(b"no picture")
    problems = data.list_problems(tmp_path)
    for part in ("broken.jpg", "no images of the class b", "no images of the class c"):
        assert sum(part in problem for problem in problems) == 1
    assert len(problems) == 3 and data.list_problems(tmp_path / "none")
