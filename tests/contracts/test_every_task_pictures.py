"""One picture of every kind in every domain that reads pictures, in training and in prediction.

A 16-bit picture used to be grey for one domain and white for four others. Here a data set whose files are of all kinds,
and one whose files are plain PNG with the pixels that the reader reads, must be the same to a domain.
"""

import json
import shutil

import numpy
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

from polymix.errors import DataError
from polymix.train.data.pictures import read_picture, write_png
from polymix.train.data.sampling import seed_all
from polymix.train.evaluation import evaluating
from polymix.train.registry import named_recipe, task_class
from polymix.train.task import Process
from tests.helpers import slow_but
from tests.train.data.picture_files import KINDS, RAMP, write_kinds

WIDER_SUFFIXES = (".png", ".jpg")  # in WIDER FACE's lists


def copy(file, folder, stem):
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.copy(file, folder / f"{stem}{file.suffix}")


def classify(folder, files):
    for split in ("train", "val"):
        for name in ("a", "b"):
            for place, file in enumerate(files):
                copy(file, folder / split / name, f"{place:02d}")
    return {"data": folder, "image_size": 16, "stream": True}


def generation(folder, files):
    for place, file in enumerate([files[0], *files, files[0]]):  # every fifth is for the test
        copy(file, folder, f"{place:02d}")
    return {"data": folder, "layout": "pictures", "image_size": 16, "conditional": False}


def detect(folder, files):
    (folder / "annotations").mkdir(parents=True)
    height, width = RAMP
    for split in ("train", "val"):
        names = [copy(file, folder / f"{split}2017", f"{place:02d}").name for place, file in enumerate(files)]
        content = {
            "images": [{"id": i, "file_name": name, "width": width, "height": height} for i, name in enumerate(names)],
            "categories": [{"id": 1, "name": "thing"}],
            "annotations": [
                {"id": i, "image_id": i, "category_id": 1, "bbox": [4, 2, 10, 8], "area": 80, "iscrowd": 0,
                 "segmentation": [[4, 2, 14, 2, 14, 10, 4, 10]]} for i in range(len(names))
            ],
        }  # fmt: skip
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return {"data": folder, "image_size": 64}


def segment(folder, files):
    labels = (numpy.arange(RAMP[0] * RAMP[1]).reshape(RAMP) % 3).astype(numpy.uint8)
    for split in ("train", "val"):
        (folder / split / "labels").mkdir(parents=True)
        for place, file in enumerate(files):
            copy(file, folder / split / "images", f"{place:02d}")
            Image.fromarray(labels).save(folder / split / "labels" / f"{place:02d}.png")
    return {"data": folder, "crop": 32}


def faces(folder, files):
    for split in ("train", "val"):
        names = [copy(file, folder / f"WIDER_{split}" / "images" / "0--A", f"{place:02d}").name
                 for place, file in enumerate(files) if file.suffix in WIDER_SUFFIXES]  # fmt: skip
        rows = [f"0--A/{name}\n1\n4 2 10 8 0 0 0 0 0 0\n" for name in names]
        (folder / "wider_face_split").mkdir(exist_ok=True)
        (folder / "wider_face_split" / f"wider_face_{split}_bbx_gt.txt").write_text("".join(rows))
    return {"data": folder, "image_size": 64, "channels": 8}


def jigsaw(folder, files):
    for split in ("train", "val"):
        for place, file in enumerate(files):
            copy(file, folder / split, f"{place:02d}")
    return {"data": folder, "piece_size": 8, "test_puzzles": 4}


def handwriting(folder, files):
    rows = [f"{copy(file, folder, f'{split}-{place:02d}').name}\tab\t{split}\n"
            for split in ("train", "val", "test") for place, file in enumerate(files)]  # fmt: skip
    (folder / "lines.tsv").write_text("".join(rows))
    return {"data": folder, "width": 64}


LAYOUTS = {
    "classify": classify, "detect": detect, "faces": faces, "generation": generation, "handwriting": handwriting,
    "instances": detect, "jigsaw": jigsaw, "segment": segment,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """For each kind the file, and its twin: a plain PNG of the pixels that the reader reads."""
    folder = tmp_path_factory.mktemp("kinds")
    kinds = [write_kinds(folder)[kind][0] for kind in KINDS]
    twins = []
    (folder / "twins").mkdir()
    for kind in kinds:
        twins.append(folder / "twins" / f"{kind.stem}.png")
        write_png(twins[-1], read_picture(kind))
    return kinds, twins


def task_of(domain, folder, files):
    options = LAYOUTS[domain](folder, files)
    recipe = named_recipe(domain)
    recipe = recipe.preset("tiny") if "tiny" in recipe.presets else recipe
    return task_class(recipe)(recipe.changed(**options))


def samples(part):
    """Samples of a part of the data, each drawn with a seed of its own: all, or as many as meet every picture."""
    for place in range(min(len(part), 4 * len(KINDS))):
        seed_all(place)
        yield [leaf for leaf in tree_leaves(part[place]) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("domain", slow_but([domain for domain in LAYOUTS if domain != "instances"], LAYOUTS))
@pytest.mark.draws
def test_training_reads_every_kind_as_prediction_does(domain, files, tmp_path):
    pairs = zip(*files, strict=True)
    if domain == "faces":
        pairs = (pair for pair in pairs if pair[0].suffix in WIDER_SUFFIXES)
    if domain == "instances":  # a second each
        pairs = (pair for pair in pairs if pair[0].stem in ("16-bit", "exif"))
    kinds, twins = zip(*pairs, strict=True)
    tasks = [task_of(domain, tmp_path / name, part) for name, part in (("kinds", kinds), ("twins", twins))]
    data = [task.load(tmp_path / "scratch") for task in tasks]
    pairs = list(zip(samples(data[0].train), samples(data[1].train), strict=True))
    assert len(pairs) >= len(kinds) - len(kinds) // 5 - 1
    for place, (own, twin) in enumerate(pairs):
        assert all(torch.equal(a, b) for a, b in zip(own, twin, strict=True)), f"training picture {place}"
    if not tasks[0].predicts:
        return
    torch.manual_seed(0)
    model = tasks[0].build(data[0])
    with evaluating(model):
        rows = []
        for name, part in (("kinds", kinds), ("twins", twins)):
            (tmp_path / "out" / name).mkdir(parents=True)
            rows.append(tasks[0].predict(model, data[0], part, tmp_path / "out" / name, Process()))
    for own, twin in zip(*rows, strict=True):
        drawn = [read_picture(tmp_path / "out" / name / row["picture"])
                 for name, row in (("kinds", own), ("twins", twin))]  # fmt: skip
        assert torch.equal(*drawn), f"{own['file']} is drawn as another picture"
        assert {**own, "file": ""} == {**twin, "file": ""}, "another answer"


@pytest.mark.parametrize("domain", LAYOUTS)
def test_a_damaged_and_a_huge_picture_are_one_sentence_that_names_the_file(domain, files, tmp_path, monkeypatch):
    twins = files[1]
    task = task_of(domain, tmp_path / "data", twins)
    data = task.load(tmp_path / "scratch")
    damaged, huge = tmp_path / "damaged.png", tmp_path / "huge.png"
    damaged.write_bytes(twins[0].read_bytes()[:-40])
    Image.new("L", (200, 150)).save(huge)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    if task.predicts:
        model = task.build(data)
        for file, reason in ((damaged, ""), (huge, "over 20,000 pixels")):
            with evaluating(model), pytest.raises(DataError, match=rf"{file.name}.* cannot be read \(.*{reason}"):
                task.predict(model, data, [file], tmp_path, Process())
    shutil.copy(
        damaged, next(path for path in sorted((tmp_path / "data").rglob("*.png")) if "labels" not in path.parts)
    )
    problems = task.problems(str(tmp_path / "data"))
    assert len(problems) == 1 and ".png" in problems[0] and "cannot be read" in problems[0], problems
