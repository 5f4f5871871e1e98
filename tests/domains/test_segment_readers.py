"""Segmentation: the four layouts as they lie on disk, and the mistakes of users in them."""

import numpy
import pytest
import torch
from PIL import Image

from polymix.cli import main
from polymix.domains.segment.data import list_problems, load, read
from polymix.domains.segment.layouts import CITYSCAPES, IGNORED, VOC
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.domains.segment.synthetic import synthetic
from polymix.errors import DataError
from polymix.train.data import scenes
from polymix.train.data.problems import Problems
from tests.train.data.picture_files import KINDS, write_kinds

SIDE = 6


def save(path, values, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(numpy.asarray(values, dtype=numpy.uint8))
    image = image if mode is None else image.convert(mode)
    image.save(path)
    return path


def picture(path, width=SIDE, mode=None):
    return save(path, numpy.full((SIDE, width, 3), 90), mode)


def halves(left, right):
    labels = numpy.full((SIDE, SIDE), left)
    labels[:, SIDE // 2 :] = right
    return labels


def ade20k(folder):
    for split in ("training", "validation"):
        for name, pair in (("a", (0, 3)), ("b", (150, 1))):
            picture(folder / "images" / split / f"{name}.jpg")
            save(folder / "annotations" / split / f"{name}.png", halves(*pair))


def cityscapes(folder):
    for split in ("train", "val"):
        picture(folder / "leftImg8bit" / split / "ulm" / "ulm_0_1_leftImg8bit.png")
        save(folder / "gtFine" / split / "ulm" / "ulm_0_1_gtFine_labelTrainIds.png", halves(18, 255))
        save(folder / "gtFine" / split / "ulm" / "ulm_0_1_gtFine_labelIds.png", halves(33, 40))
        picture(folder / "leftImg8bit" / split / "bonn" / "bonn_0_1_leftImg8bit.png")
        save(folder / "gtFine" / split / "bonn" / "bonn_0_1_gtFine_labelTrainIds.png", halves(0, 1))


def voc(folder):
    for name, pair in (("x", (0, 20)), ("y", (255, 1))):
        picture(folder / "JPEGImages" / f"{name}.jpg")
        path = folder / "SegmentationClass" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(halves(*pair).astype(numpy.uint8), "P")
        image.putpalette([value for place in range(256) for value in (place, 255 - place, 7)])
        image.save(path)
    lists = folder / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("x\ny\n")
    (lists / "val.txt").write_text("y\n\n")


def folders(folder):
    for split in ("train", "val"):
        picture(folder / split / "images" / "sub" / "p.webp")
        save(folder / split / "labels" / "sub" / "p.png", halves(0, 2))


def images_first(folder):
    for split in ("train", "val"):
        picture(folder / "images" / split / "p.png")
        save(folder / "labels" / split / "p.png", halves(1, 0))
    (folder / "classes.txt").write_text("sky\nsea\n")


@pytest.mark.parametrize(("write", "pairs", "classes", "labels"), [
    (ade20k, (2, 2), 150, (IGNORED, 2)), (cityscapes, (2, 2), 19, (0, 1)), (voc, (2, 1), 21, (0, 20)),
    (folders, (1, 1), 3, (0, 2)), (images_first, (1, 1), 2, (1, 0)),
])  # fmt: skip
def test_each_layout_is_recognised_and_read(tmp_path, write, pairs, classes, labels):
    write(tmp_path)
    data = load(SegmentRecipe(data=str(tmp_path), crop=8), tmp_path, print)
    assert (len(data.train), len(data.test)) == pairs and len(data.classes) == classes
    pixels, found = data.train.pairs[0]
    assert found.tolist() == halves(*labels).tolist() and pixels.shape == (3, SIDE, SIDE)
    assert list_problems(tmp_path) == []


def test_the_classes_have_names(tmp_path):
    for write, names in ((cityscapes, CITYSCAPES), (voc, VOC), (images_first, ("sky", "sea"))):
        write(tmp_path / write.__name__)
        assert read(tmp_path / write.__name__, None, None, Problems())[2] == names
    ade20k(tmp_path / "ade")
    (tmp_path / "ade" / "objectInfo150.txt").write_text("Idx\tRatio\tTrain\tVal\tStuff\tName\n" + "".join(
        f"{k}\t0.1\t9\t9\t1\tclass{k}, other\n" for k in range(1, 151)))  # fmt: skip
    assert read(tmp_path / "ade", None, None, Problems())[2][149] == "class150"


def test_a_picture_turned_by_its_exif_fits_its_labels(tmp_path):
    folders(tmp_path)
    file = tmp_path / "train" / "images" / "sub" / "p.webp"
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(numpy.zeros((SIDE, 9, 3), dtype=numpy.uint8)).save(file.with_suffix(".jpg"), exif=exif)
    file.unlink()
    save(tmp_path / "train" / "labels" / "sub" / "p.png", numpy.arange(9 * SIDE).reshape(9, SIDE) % 3)
    assert list_problems(tmp_path) == []
    data = load(SegmentRecipe(data=str(tmp_path), crop=8), tmp_path, print)
    assert data.train.pairs[0][0].shape == (3, 9, SIDE)


def sixteen(path):
    Image.fromarray(numpy.full((SIDE, SIDE), 300, dtype=numpy.uint16)).save(path)


def jpeg(folder):
    (folder / "train/labels/sub/p.png").unlink()
    save(folder / "train/labels/sub/p.jpg", halves(0, 1))


def other_label(value):
    return lambda folder: save(folder / "train/labels/sub/p.png", halves(0, value))


def remove(name):
    import shutil

    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def all_ignored(folder):
    save(folder / "val/labels/sub/p.png", halves(255, 255))


def one_class(folder):
    for split in ("train", "val"):
        save(folder / split / "labels/sub/p.png", halves(1, 255))


MISTAKES = [
    (lambda f: picture(f / "train/images/sub/p.webp", 7), "p.webp: is 7 × 6 pixels, and 6 × 6 in"),
    (other_label(9), "p.png: label 9 at row 0, column 3: is not a label from 0 to 3 of 4 classes, nor 255"),
    (remove("train/labels/sub/p.png"), "p.webp: has no label map"), (remove("val"), "val/images: there is no such folder"),
    (remove("train/images/sub/p.webp"), "has no picture"), (remove("train/labels"), "the pictures have no annotations"),
    (lambda f: picture(f / "train/labels/sub/p.png"), "p.png, which is a colour picture (RGB) instead of a label map"),
    (lambda f: sixteen(f / "train/labels/sub/p.png"), "p.png, which has more than 8 bits a pixel instead of a label map"),
    (jpeg, "p.jpg, which is a JPEG, which changes labels"), (all_ignored, "the test pictures: have no label that counts"),
    (one_class, "the training pictures: have one class, 1"),
    (lambda f: (f / "train/labels/sub/p.png").write_bytes(b"no"), "p.png, which cannot be read"),
    (lambda f: (f / "classes.txt").write_text("sky\n"), "classes.txt: names 1 class; two or more"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_picture_is_read_as_it_is_shown(tmp_path, kind):
    """Pictures of 16 bits used to be refused, and to be white in `predict`."""
    (tmp_path / "kinds").mkdir()
    file, expected, tolerance = write_kinds(tmp_path / "kinds")[kind]
    for split in ("train", "val"):
        (tmp_path / split / "images").mkdir(parents=True)
        (tmp_path / split / "images" / f"p{file.suffix}").write_bytes(file.read_bytes())
        labels = numpy.arange(expected.shape[1] * expected.shape[2]).reshape(expected.shape[1:]) % 3
        save(tmp_path / split / "labels" / "p.png", labels)
    assert list_problems(tmp_path) == []
    pixels, truth = load(SegmentRecipe(data=str(tmp_path), crop=8), tmp_path, print).train.pairs[0]
    assert (pixels.int() - expected.int()).abs().max() <= tolerance and truth.shape == expected.shape[1:]


def test_label_maps_of_stored_pixels_are_turned_with_their_picture(tmp_path):
    folders(tmp_path)
    file = tmp_path / "train" / "images" / "sub" / "p.webp"
    exif = Image.Exif()
    exif[274] = 6
    stored = numpy.arange(9 * SIDE).reshape(SIDE, 9) % 3
    Image.fromarray((stored * 80).astype(numpy.uint8)).save(file.with_suffix(".png"), exif=exif)
    file.unlink()
    save(tmp_path / "train" / "labels" / "sub" / "p.png", stored)
    pixels, labels = load(SegmentRecipe(data=str(tmp_path), crop=8), tmp_path, print).train.pairs[0]
    assert pixels.shape == (3, 9, SIDE) and torch.equal(pixels[0], labels * 80)


@pytest.mark.parametrize(("orientation", "noted"), [(3, True), (1, False)])
def test_a_half_turn_that_sizes_cannot_tell_is_noted(tmp_path, orientation, noted):
    folders(tmp_path)
    exif = Image.Exif()
    exif[274] = orientation
    for split in ("train", "val"):
        Image.new("RGB", (SIDE, SIDE)).save(tmp_path / split / "images/sub/p.webp", exif=exif)
    said = []
    assert list_problems(tmp_path, say=said.append) == []
    assert [line.startswith("Note: EXIF turns the picture") for line in said] == [True] * noted


@pytest.mark.parametrize(("spoil", "named"), MISTAKES, ids=[named[:30] for _, named in MISTAKES])
def test_mistakes_are_named_by_file_before_training_and_listed(tmp_path, spoil, named):
    folders(tmp_path)
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    spoil(tmp_path)
    assert any(named in problem for problem in list_problems(tmp_path)), list_problems(tmp_path)
    with pytest.raises(DataError) as told:
        load(SegmentRecipe(data=str(tmp_path), crop=8), tmp_path, print)
    assert named in str(told.value) and len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(("write", "spoil", "named"), [
    (cityscapes, remove("gtFine/train/ulm/ulm_0_1_gtFine_labelTrainIds.png"), "has only labelIds"),
    (voc, remove("ImageSets/Segmentation/val.txt"), "val.txt: there is no such file"),
    (voc, remove("JPEGImages/y.jpg"), "train.txt: line 2"), (voc, remove("SegmentationClass/x.png"), "has no label map"),
    (ade20k, lambda f: save(f / "annotations/training/a.png", halves(0, 151)), "label 151 at row 0, column 3"),
    (ade20k, remove("images/validation"), "images/validation: there is no such folder"),
])  # fmt: skip
def test_mistakes_of_the_other_layouts(tmp_path, write, spoil, named):
    write(tmp_path)
    spoil(tmp_path)
    assert any(named in problem for problem in list_problems(tmp_path)), list_problems(tmp_path)


def test_check_lists_all_mistakes_on_the_command_line(tmp_path, capsys):
    ade20k(tmp_path)
    save(tmp_path / "annotations/training/a.png", halves(0, 151))
    (tmp_path / "annotations/validation/b.png").unlink()
    (tmp_path / "images/training/b.jpg").write_bytes((tmp_path / "images/training/b.jpg").read_bytes()[:200])
    with pytest.raises(SystemExit) as stop:
        main(["train", "segment", "--data", str(tmp_path), "--check"])
    text = capsys.readouterr().out
    assert stop.value.code == 1 and "3 problems" in text
    for named in ("label 151", "b.jpg: has no label map", "training/b.jpg"):
        assert named in text
    with pytest.raises(DataError, match="without the folders of a known layout"):
        load(SegmentRecipe(data=str(tmp_path / "images")), tmp_path, print)


def test_the_default_data_is_read_by_the_reader_of_ade20k(tmp_path):
    synthetic(tmp_path, 5, question="what", count=3, tests=2, size=48)
    problems = Problems()
    train, test, names = read(tmp_path, "ade20k", None, problems)
    assert not problems and (len(train), len(test)) == (3, 2) and names[-1] == "9"
    scene = next(iter(scenes.make(1, seed=5, question="what", size=48, sides=(16, 16), snap=8)))
    data = load(SegmentRecipe(data=str(tmp_path), crop=48), tmp_path, print)
    pixels, labels = data.train.pairs[0]
    assert torch.equal(pixels, scene["image"])
    for mask, digit in zip(scene["masks"], scene["digits"], strict=True):
        assert labels[mask].eq(names.index(str(int(digit)))).all()
    assert labels[~scene["masks"].any(0)].eq(IGNORED).all()
    for mask in scene["masks"]:
        assert mask.nonzero().amin(0).div(8, rounding_mode="floor").mul(8).add(16).ge(mask.nonzero().amax(0)).all()


def test_the_default_data_of_a_seed_and_question_are_written_once(tmp_path):
    tiny = SegmentRecipe.tiny()
    first = load(tiny, tmp_path, print).train.pairs.pairs[0].picture
    written = first.stat().st_mtime_ns
    others = [load(tiny.changed(**options), tmp_path, print) for options in ({"seed": 1}, {"question": "which"})]
    assert len({first.parent, *(data.train.pairs.pairs[0].picture.parent for data in others)}) == 3
    assert others[1].classes == ("smallest", "middle", "largest")
    again = load(tiny, tmp_path, print).train.pairs.pairs[0].picture
    assert again == first and again.stat().st_mtime_ns == written
