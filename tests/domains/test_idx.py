"""Idx files, as MNIST and its relatives are published, and Fashion-MNIST by name."""

import gzip
import zlib

import pytest
import torch
from torch.testing import assert_close

from polymix import SoftmaxConfig
from polymix.cli import main
from polymix.domains.classify import data
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import DataError
from polymix.models import VisionTransformer
from polymix.train.data import idx
from polymix.workflows.convert.images import Images, class_folders
from polymix.workflows.convert.sources import Source
from polymix.workflows.export import _has_classes
from tests.domains.idx_files import arrays, packed, write_idx

PICTURES = "train-images-idx3-ubyte"


@pytest.fixture
def written(tmp_path):
    """Write a data set; see `write_idx`."""
    return lambda folder=tmp_path / "set", **options: write_idx(folder, **options)


def test_pictures_labels_and_the_official_split_are_read(written):
    folder = written(size=(6, 6))
    images = data.load(ClassifyRecipe(data=str(folder), image_size=6, patch_size=2))
    expected = arrays((6, 6))
    assert images.classes == ("0", "1", "2", "3") and images.channels == 1 and images.layout == "idx"
    for part, name in ((images.train, "train"), (images.test, "t10k")):
        assert torch.equal(part.images[:, 0], expected[f"{name}-images-idx3-ubyte"])
        assert part.labels.tolist() == expected[f"{name}-labels-idx1-ubyte"].tolist()
    assert data.list_problems(folder) == [] and idx.count(folder) == 12


@pytest.mark.parametrize("inside", [*idx.INSIDE])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_are_found_where_tools_leave_them(inside, zipped, written, tmp_path):
    written(tmp_path / "root" / inside, zipped=zipped)
    assert data.recognise(tmp_path / "root") == "idx" and idx.read(tmp_path / "root")[1][0].shape == (8, 1, 6, 5)
    assert data.recognise(tmp_path) == "folder"


def test_a_dot_may_stand_for_the_dash_and_pictures_need_not_be_squares(written):
    folder = written(size=(6, 4))
    for file in [*folder.iterdir()]:
        file.rename(folder / file.name.replace("-idx", ".idx"))
    images = data.load(ClassifyRecipe(data=str(folder), image_size=4))
    assert torch.equal(images.train.images[:, 0], arrays((6, 4))[PICTURES][:, 1:5])  # the middle, not squeezed


def test_pictures_too_many_for_memory_are_enlarged_when_used(written, monkeypatch):
    monkeypatch.setattr("polymix.train.data.images.MAX_BYTES", 12 * 3 * 12**2 - 1)
    folder = written(size=(6, 6))
    images = data.load(ClassifyRecipe(data=str(folder), image_size=12))
    assert images.streamed and images.train[0][0].shape == (3, 12, 12)
    assert_close(images.train[0][0].float().mean(), arrays((6, 6))[PICTURES][0].float().mean(), rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (PICTURES, b"", "begins with nothing"),
        (PICTURES, b"\x89PNG\r\n\x1a\n" + bytes(40), r"00 00 08 03.* begins with 89 50 4e 47"),
        (PICTURES, packed(torch.zeros(8, dtype=torch.uint8)), r"3 axes.* begins with 00 00 08 01"),
        (PICTURES, b"\x00\x00\x0d\x03" + bytes(60), "begins with 00 00 0d 03"),  # floats
        (PICTURES, b"\x00\x00\x08\x03\x00\x00", "begins with 00 00 08 03"),  # cut in the header
        (PICTURES, packed(torch.zeros(8, 6, 5, dtype=torch.uint8))[:-7], r"240, as the header says.* with 233 bytes"),
        (PICTURES, packed(torch.zeros(8, 6, 5, dtype=torch.uint8)) + b"1", "with more bytes"),
        (PICTURES, b"\x00\x00\x08\x03" + b"\xff" * 12, r"4294967295 × .* values"),
        (PICTURES, gzip.compress(packed(torch.zeros(8, 6, 5, dtype=torch.uint8)), mtime=0)[:-12], "cannot be read .EOFError"),
        (PICTURES, b"\x1f\x8b" + bytes(60), "cannot be read"),
        (PICTURES, packed(torch.zeros(7, 6, 5, dtype=torch.uint8)), "7 train-images and 8 train-labels"),
        (PICTURES, packed(torch.zeros(8, 3, 5, dtype=torch.uint8)), r"pictures of \(3, 5\) for training"),
        (PICTURES, packed(torch.zeros(0, 6, 5, dtype=torch.uint8)), "which is empty"),
        ("t10k-labels-idx1-ubyte", packed(torch.tensor([0, 1, 9, 2], dtype=torch.uint8)), "label 9 of picture 2"),
    ],
)  # fmt: skip
def test_damage_is_one_sentence_in_training_and_in_a_check(name, content, message, written):
    folder = written(others={name: content})
    with pytest.raises(DataError, match=message):
        data.load(ClassifyRecipe(data=str(folder), image_size=6))
    assert len(data.list_problems(folder)) == 1


@pytest.mark.parametrize("name", [name for name in arrays() if name != PICTURES])
def test_a_missing_file_is_named(name, written):
    folder = written()
    (folder / f"{name}.gz").unlink()
    with pytest.raises(DataError, match=f"without {name[:-11]}"):
        data.load(ClassifyRecipe(data=str(folder), image_size=6))


def test_fashion_mnist_by_name_is_the_installed_package_with_its_classes(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(idx, "INSTALLED", tmp_path / "absent")
    recipe = ClassifyRecipe(data=idx.FASHION, image_size=6)
    for attempt in (lambda: data.load(recipe), lambda: idx.located(idx.FASHION)):
        with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
            attempt()
    assert "apt-get install" in data.list_problems(idx.FASHION)[0]
    monkeypatch.setattr(idx, "INSTALLED", written())
    monkeypatch.setattr(idx, "FASHION_TEST", zlib.crc32(bytes([0, 1, 2, 3])))
    images = data.load(recipe)
    assert images.name == idx.FASHION and images.classes[:2] == ("T-shirt/top", "Trouser")
    assert idx.classes(idx.INSTALLED) == images.classes
    written(tmp_path / idx.FASHION, size=(8, 8))  # a folder of that name comes first
    assert idx.located(idx.FASHION) == tmp_path.__class__(idx.FASHION)


def test_conversion_and_export_read_them_too(written):
    torch.manual_seed(0)
    folder = str(written(size=(8, 8)))
    model = VisionTransformer(SoftmaxConfig(heads=1), image_size=8, patch_size=4, dim=4, depth=1, classes=4, channels=1)
    images = Images(folder, Source(model), None)
    (inputs, labels), *_ = images.loaders(8)[1]
    expected = arrays((8, 8))
    assert class_folders(folder) == ["0", "1", "2", "3"] and labels.tolist() == [0, 1, 2, 3]
    restored = images.inputs(images.data.test.images) * images.std + images.mean
    assert_close(restored[:, 0] * 255, expected["t10k-images-idx3-ubyte"].float())
    assert torch.equal(inputs, images.inputs(images.data.test.images)) and _has_classes(folder)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "classify"], ["train", "classify", "--check"], ["compare"],
        ["convert", "--model", "timm/vit_tiny_patch16_224", "--plan", "pom"],
    ],
)  # fmt: skip
def test_every_command_says_how_to_install_fashion_mnist(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(idx, "INSTALLED", tmp_path / "absent")
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--data", idx.FASHION, *(() if "--check" in words else ("--out", "out"))])
    printed = capsys.readouterr()
    assert stopped.value.code and "apt-get install dataset-fashion-mnist" in printed.out + printed.err
