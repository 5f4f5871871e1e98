"""Readers of boxes and masks: what they read, and every mistake named with its file and entry."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.cli import main
from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.errors import DataError
from polymix.train.data.boxes import coco, data, masks, voc
from polymix.train.data.boxes.annotations import AnnotatedPictures
from polymix.train.data.pictures import as_image, read_picture, turn
from polymix.train.data.problems import Problems
from tests.domains.box_files import coco_json, entry, photo, rectangle, write_coco, write_voc


def test_coco_polygons_both_codes_gaps_and_crowds(tmp_path):
    problems = Problems()
    train, test, classes = data.read(write_coco(tmp_path), None, problems)
    assert not problems and classes == ("car", "toothbrush")
    assert [picture.number for picture in train] == [7, 30] and len(test) == 2
    first, second = (picture.target(masks=True) if i == 0 else picture for i, picture in enumerate(train))
    assert first["labels"].tolist() == [0, 1] and first["boxes"].tolist() == [[4, 2, 14, 10], [2, 3, 4, 8]]
    assert torch.equal(first["masks"], torch.stack((rectangle(16, 24, 2, 4, 10, 14), rectangle(16, 24, 3, 2, 8, 4))))
    assert second.target()["iscrowd"].tolist() == [True, False]
    assert torch.equal(masks.decode(second.objects[0].shape, 16, 24), rectangle(16, 24, 3, 2, 8, 4))
    assert AnnotatedPictures(train, classes)[0][0].shape == (3, 16, 24)


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # pycocotools with NumPy 2
def test_codes_are_pycocotools():
    mask_module = pytest.importorskip("pycocotools.mask", reason="untested: RLE against pycocotools")
    g = torch.Generator().manual_seed(0)
    for density in (0.0, 0.02, 0.5, 1.0):
        mask = torch.rand(37, 53, generator=g) < density
        theirs = mask_module.encode(np.asfortranarray(mask.to(torch.uint8).numpy()))
        ours = masks.encode(mask)
        assert ours["counts"] == theirs["counts"].decode() and ours["size"] == list(theirs["size"])
        assert torch.equal(masks.decode(ours, 37, 53), mask)
    polygon = [3.0, 4.5, 40.2, 2.0, 50.0, 30.0, 20.0, 35.0, 25.0, 15.0]
    theirs = torch.tensor(mask_module.decode(mask_module.merge(mask_module.frPyObjects([polygon], 37, 53)))).bool()
    assert torch.equal(masks.decode([polygon], 37, 53), theirs)


def test_voc_corners_count_from_one_and_belong_to_the_box(tmp_path):
    problems = Problems()
    train, test, classes = voc.read(write_voc(tmp_path), problems)
    assert not problems and classes == ("cat", "dog") and test[0].file.name == "x2.jpg"
    target = train[0].target()
    assert target["boxes"].tolist() == [[4, 2, 14, 10]] * 2 and target["iscrowd"].tolist() == [False, True]


MISTAKES = {  # what is changed in train's json: what the message names
    "box without area": ({"annotations": entry(0, bbox=[4, 2, 0, 8])}, "annotation 1 of a.png: a box of no area: 0 × 8"),
    "box outside": ({"annotations": entry(0, bbox=[20, 2, 9, 8])}, "annotation 1 of a.png: a box outside the picture"),
    "box of three": ({"annotations": entry(0, bbox=[20, 2, 9])}, "annotation 1 of a.png: bbox"),
    "category": ({"annotations": entry(1, category_id=4)}, "annotation 2: there is no category 4"),
    "image": ({"annotations": entry(1, image_id=8)}, "annotation 2: there is no image 8"),
    "size of the RLE": ({"annotations": entry(2, segmentation={"size": [24, 16], "counts": "S15;0m9"})},
                        "annotation 3 of b.png: an RLE of 24 × 16 in a picture of 16 × 24"),
    "sum of the RLE": ({"annotations": entry(2, segmentation={"size": [16, 24], "counts": [4, 4]})},
                       "annotation 3 of b.png: an RLE of 8 pixels"),
    "letters of the RLE": ({"annotations": entry(2, segmentation={"size": [16, 24], "counts": "S1~"})}, "another letter"),
    "polygon": ({"annotations": entry(0, segmentation=[[4, 2, 14, 2]])}, "annotation 1 of a.png: a polygon of fewer"),
    "file": ({"images": [{"id": 7, "file_name": "no.png"}, {"id": 30, "file_name": "b.png"}]},
             "no.png, which cannot be read (there is no such file)"),
    "one id twice": ({"images": [{"id": 7, "file_name": n} for n in ("a.png", "b.png")]},
                     "image 7, b.png: another image has this id"),
    "size": ({"images": [{"id": 7, "file_name": "a.png", "width": 25, "height": 16}, {"id": 30, "file_name": "b.png"}]},
             "instances_train2017.json, image 7: is 24 × 16 pixels, and 25 × 16"),
}  # fmt: skip


OF_MASKS = {"size of the RLE", "sum of the RLE", "letters of the RLE", "polygon"}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_named_before_training_and_can_be_skipped(name, tmp_path):
    changes, text = MISTAKES[name]
    folder, of_mask = write_coco(tmp_path, **changes), name in OF_MASKS
    recipe = (InstancesRecipe if of_mask else DetectRecipe)(data=str(folder), image_size=64)
    with pytest.raises(DataError) as caught:
        data.load(recipe, tmp_path / "scratch", print)
    assert text in str(caught.value) and str(folder / "annotations" / "instances_train2017.json") in str(caught.value)
    assert any(text in line for line in data.check(folder, masks=of_mask))
    said = []
    loaded = data.load(recipe.changed(broken="skip"), tmp_path / "scratch", said.append)
    assert len(loaded.train) >= 1 and "Left out" in said[0]
    if of_mask:
        boxes = data.load(DetectRecipe(data=str(folder)), tmp_path / "scratch", print)
        assert len(boxes.train) == 2 and data.check(folder) == [], "detection does not read masks"


def test_of_two_files_the_one_that_is_wrong_is_named_with_its_path(tmp_path):
    """Roboflow's two files have one name."""
    for part in ("train", "valid"):
        for name in ("a.png", "b.png"):
            photo(tmp_path / part / name)
        (tmp_path / part / "_annotations.coco.json").write_text(json.dumps(coco_json()))
    recipe, source = DetectRecipe(data=str(tmp_path), image_size=64), tmp_path / "valid" / "_annotations.coco.json"
    data.load(recipe, tmp_path / "scratch", print)
    missing = [{"id": 7, "file_name": "no.png"}, {"id": 30, "file_name": "b.png"}]
    for content in (
        "{",
        json.dumps(coco_json(images=missing)),
        json.dumps(coco_json(categories=[{"id": 3, "name": "a"}])),
    ):
        source.write_text(content)
        with pytest.raises(DataError) as caught:
            data.load(recipe, tmp_path / "scratch", print)
        assert str(source) in str(caught.value)
        assert any(str(source) in line for line in data.check(tmp_path))


def test_other_categories_name_both_files(tmp_path):
    folder = write_coco(tmp_path)
    files = [folder / "annotations" / f"instances_{part}2017.json" for part in ("train", "val")]
    content = json.loads(files[0].read_text())
    files[0].write_text(json.dumps({**content, "categories": [{"id": 99, "name": "z"}, *content["categories"]]}))
    with pytest.raises(DataError) as caught:
        data.load(DetectRecipe(data=str(folder), image_size=64), tmp_path / "scratch", print)
    assert all(str(file) in str(caught.value) for file in files)


def test_a_name_without_annotations_is_named_with_its_list(tmp_path):
    folder = write_voc(tmp_path)
    names = folder / "ImageSets" / "Main" / "train.txt"
    names.write_text(f"{names.read_text()}nowhere\n")
    with pytest.raises(DataError, match=r"nowhere\.xml: line \d+ of .*ImageSets/Main/train\.txt"):
        data.load(DetectRecipe(data=str(folder), image_size=64), tmp_path / "scratch", print)


def test_check_lists_all_mistakes(tmp_path):
    rows = entry(0, bbox=[0, 0, 0, 0])
    rows[1]["category_id"] = 5
    assert len(data.check(write_coco(tmp_path, annotations=rows))) == 2
    assert data.check(write_coco(tmp_path)) == []


def test_check_decodes_pictures_and_goes_on_after_a_file_that_it_cannot_read(tmp_path):
    rows = entry(3, bbox=[0, 0, 0, 0])
    folder = write_coco(tmp_path, annotations=rows)
    cut = folder / "val2017" / "a.jpg"
    photo(cut)
    cut.write_bytes(cut.read_bytes()[:-8])
    val = folder / "annotations" / "instances_val2017.json"
    val.write_text(json.dumps(coco_json(images=[{"id": 7, "file_name": "a.jpg"}, {"id": 30, "file_name": "b.png"}])))
    box, ends = data.check(folder)
    assert "instances_train2017.json: annotation 4 of b.png: a box of no area" in box and f"{cut}, which cannot" in ends
    train = folder / "annotations" / "instances_train2017.json"
    train.write_text("{")
    first, second = data.check(folder)
    assert "instances_train2017.json" in first and str(cut) in second, "val is checked without train"
    train.unlink()
    assert len(data.check(folder)) == 2


def test_check_takes_one_json_beside_one_folder(tmp_path, capsys):
    for name in ("a.png", "b.png"):
        photo(tmp_path / "pictures" / name)
    source = tmp_path / "some.json"
    source.write_text(json.dumps(coco_json(annotations=entry(0, category_id=4))))

    def checked(domain):
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    "train",
                    domain,
                    "--set",
                    f"annotations={source}",
                    "--set",
                    f"images={tmp_path / 'pictures'}",
                    "--check",
                ]
            )
        return stop.value.code, capsys.readouterr().out

    code, told = checked("detect")
    assert code == 1 and "annotation 1: there is no category 4" in told and f"1 problem in {source}" in told
    code, told = checked("instances")
    assert "there is no category 4" in told and "b.png: 1 of 2 objects: has no segmentation" in told


@pytest.mark.parametrize(("mode", "suffix"), [("I;16", ".png"), ("CMYK", ".jpg")])
def test_files_of_other_colours_are_read_as_they_are_shown(mode, suffix, tmp_path):
    """16 bits used to become white where nobody looked, and were refused where somebody did."""
    folder = write_coco(tmp_path, images=[{"id": 7, "file_name": f"a{suffix}"}, {"id": 30, "file_name": "b.png"}],
                        annotations=coco_json()["annotations"][:2])  # fmt: skip
    photo(folder / "train2017" / f"a{suffix}", mode=mode)
    Image.new("I;16", (24, 16), 32896).save(folder / "train2017" / "a.png")
    assert data.check(folder) == []
    train = data.load(DetectRecipe(data=str(folder)), tmp_path, print).train
    pixels = train.pictures[0][0]
    if mode == "I;16":
        assert (pixels == 128).all()
    assert torch.equal(pixels, read_picture(folder / "train2017" / f"a{suffix}"))


def test_missing_parts(tmp_path):
    with pytest.raises(DataError, match="which is no folder"):
        data.load(DetectRecipe(data=str(tmp_path / "no")), tmp_path, print)
    folder = write_coco(tmp_path / "a", annotations=[])
    with pytest.raises(DataError, match="with no annotations"):
        data.load(DetectRecipe(data=str(folder)), tmp_path, print)
    (write_coco(tmp_path / "b") / "annotations" / "instances_val2017.json").unlink()
    folder = tmp_path / "b"
    with pytest.raises(DataError, match=r"instances_val\*.json.*annotations=FILE"):
        data.load(DetectRecipe(data=str(folder)), tmp_path, print)
    (folder / "annotations" / "instances_val2017.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        data.load(DetectRecipe(data=str(folder)), tmp_path, print)
    assert data.check(folder)


def test_one_json_beside_one_folder(tmp_path):
    content = coco_json(images=[{"id": i, "file_name": f"{i}.png"} for i in (7, 30, 31)])
    for i in (7, 30, 31):
        photo(tmp_path / "pictures" / f"{i}.png")
    (tmp_path / "some.json").write_text(json.dumps(content))
    recipe = DetectRecipe(annotations=tmp_path / "some.json", images=tmp_path / "pictures")
    loaded = data.load(recipe, tmp_path, print)
    assert (len(loaded.train), len(loaded.test)) == (2, 1) and loaded.classes == ("car", "toothbrush")


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("stored", [True, False])
def test_annotations_lie_on_a_turned_photograph(stored, orientation, tmp_path):
    """Whether their width and height are those of the stored pixels or of the picture as it is shown.

    Stored pixels used to be learnt lying, and predicted upright.
    """
    seen = torch.zeros(3, 16, 24, dtype=torch.uint8)  # as it is shown
    seen[:, 3:8, 2:4] = 255
    lying = turn(seen, {6: 8, 8: 6}.get(orientation, orientation))
    exif = Image.Exif()
    exif[274] = orientation
    as_image(lying).save(tmp_path / "a.png", exif=exif)
    mask = (lying if stored else seen)[0] > 0
    height, width = mask.shape
    code = masks.encode(mask)
    row = {"id": 1, "image_id": 7, "category_id": 3, "bbox": masks.box_of(code), "area": 10, "segmentation": code}
    x, y, w, h = row["bbox"]
    polygon = {**row, "id": 2, "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]]}
    content = coco_json(images=[{"id": 7, "file_name": "a.png", "width": width, "height": height}],
                        annotations=[row, polygon])  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(content))
    problems = Problems()
    (picture,), _ = coco.read(tmp_path / "a.json", tmp_path, problems)
    assert not problems and torch.equal(picture.pixels(), seen)
    target = picture.target(masks=True)
    assert target["boxes"].tolist() == [[2, 3, 4, 8]] * 2
    assert torch.equal(target["masks"], (seen[:1] > 0).expand(2, -1, -1))


def test_sizes_that_are_neither_stored_nor_shown_are_named(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (16, 24)).save(tmp_path / "a.jpg", exif=exif)
    content = coco_json(images=[{"id": 7, "file_name": "a.jpg", "width": 24, "height": 24}], annotations=entry(0)[:1])
    (tmp_path / "a.json").write_text(json.dumps(content))
    problems = Problems()
    coco.read(tmp_path / "a.json", tmp_path, problems)
    assert "is 24 × 16 pixels, and 24 × 24 in the annotations" in problems.lines[0]


@pytest.mark.parametrize("shape", [
    [[0.0, 0.0, 1e15, 0.0, 1e15, 1e15]], [[float("nan")] * 6], [["a"] * 6], [], 7, {"size": [16, 24], "counts": 7},
    {"size": [16, 24], "counts": [-4, 388]}, {"size": [16, 24], "counts": "44"},
])  # fmt: skip
def test_shapes_that_would_crash_a_library_are_refused(shape):
    with pytest.raises(ValueError, match=r"polygon|RLE"):
        masks.decode(shape, 16, 24)
