"""COCO's format as tools really write it: what a task does not read may be missing, empty or wrong."""

import json

import pytest
import torch
from PIL import Image

from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.errors import DataError
from polymix.train.data.boxes import coco, data
from polymix.train.data.problems import Problems
from tests.domains.box_files import coco_json, entry, photo, write_coco


def changed(**changes):
    """All annotations of `coco_json` with the same changes; ... removes a key."""
    rows = [{**row, **changes} for row in coco_json()["annotations"]]
    return {"annotations": [{key: value for key, value in row.items() if value is not ...} for row in rows]}


def boxes_of(folder, recipe=DetectRecipe):
    read = data.load(recipe(data=str(folder), image_size=64), folder / "scratch", print)
    return [picture.target()["boxes"].tolist() for picture in read.train.pictures.pictures]


USUAL = [[[4, 2, 14, 10], [2, 3, 4, 8]], [[2, 3, 4, 8], [0, 0, 24, 16]]]
REAL = {
    "empty polygon": changed(segmentation=[[]]), "two points": changed(segmentation=[[1, 2, 3, 4]]),
    "null": changed(segmentation=None), "no shapes": changed(segmentation=...), "no crowds": changed(iscrowd=...),
    "no areas": changed(area=...), "null areas": changed(area=None), "no ids": changed(id=...),
    "text for crowds": changed(iscrowd="0"), "an RLE of another size": changed(segmentation={"size": [1, 1], "counts": [1]}),
    "boxes of text": {"annotations": [{**row, "bbox": list(map(str, row["bbox"]))} for row in coco_json()["annotations"]]},
    "float ids": {"annotations": [{**row, "image_id": float(row["image_id"]), "category_id": str(row["category_id"])}
                                  for row in coco_json()["annotations"]]},
    "ids of text": {"images": [{**row, "id": str(row["id"])} for row in coco_json()["images"]]},
    "sizes of text": {"images": [{**row, "width": "24", "height": 16.0} for row in coco_json()["images"]]},
    "no sizes": {"images": [{**row, "width": 0, "height": 0} for row in coco_json()["images"]]},
    "paths of Windows": {"images": [{**row, "file_name": f"C:\\set\\{row['file_name']}"} for row in coco_json()["images"]]},
    "paths of another machine": {"images": [{**row, "file_name": f"/set/{row['file_name']}"} for row in coco_json()["images"]]},
    "info": {"info": {}, "licenses": []},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_detection_reads_what_tools_write(tmp_path, name):
    folder = write_coco(tmp_path, **REAL[name])
    assert boxes_of(folder) == USUAL and data.check(folder) == []


def test_an_id_that_is_a_list_is_named(tmp_path):
    rows = entry(0, category_id=[3])
    (line,) = data.check(write_coco(tmp_path, annotations=rows))
    assert "annotation 1: there is no category [3]" in line


def test_a_byte_order_mark_is_read(tmp_path):
    folder = write_coco(tmp_path)
    file = folder / "annotations" / "instances_train2017.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert boxes_of(folder) == USUAL


def test_a_crowd_of_text_and_an_area_of_zero(tmp_path):
    folder = write_coco(tmp_path, annotations=entry(0, iscrowd="1", area=0))
    target = data.load(DetectRecipe(data=str(folder)), tmp_path, print).train.pictures.pictures[0].target()
    assert target["iscrowd"].tolist() == [True, False] and target["area"].tolist() == [80, 10]


def test_a_box_that_is_missing_is_that_of_the_shape(tmp_path):
    assert boxes_of(write_coco(tmp_path, annotations=entry(0, bbox=None))) == USUAL


def test_categories_without_or_with_equal_names(tmp_path):
    categories = [{"id": 90, "name": "car"}, {"id": 3, "name": "car"}, {"id": "5"}]
    write_coco(tmp_path, categories=categories)
    file = tmp_path / "annotations/instances_train2017.json"
    assert coco.read(file, tmp_path / "train2017", Problems())[1] == ("car", "5", "car (2)")


def test_polygons_without_area_beside_a_sound_one_are_left_out_of_the_mask(tmp_path):
    sound = [4, 2, 14, 2, 14, 10, 4, 10]
    masks = []
    for place, shape in enumerate(([sound], [sound, [], [1, 1, 2, 2]], sound)):
        rows = [row for row in entry(0, segmentation=shape) if row["id"] < 3]
        folder = write_coco(tmp_path / str(place), annotations=rows)
        val = folder / "annotations/instances_val2017.json"
        val.write_text(json.dumps(coco_json(annotations=rows)))
        read = data.load(InstancesRecipe(data=str(folder), image_size=64), tmp_path, print)
        masks.append(read.train.pictures[0][1]["masks"][0])
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2]) and masks[0].any()


def test_instances_say_which_objects_have_no_mask(tmp_path):
    folder = write_coco(tmp_path, annotations=entry(0, segmentation=[[]]))
    with pytest.raises(DataError, match=r"annotation 1 of a\.png: a polygon of fewer than three points"):
        boxes_of(folder, InstancesRecipe)


def test_roboflows_folders(tmp_path):
    for split in ("train", "valid"):
        for name in ("a.png", "b.png"):
            photo(tmp_path / split / name)
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(coco_json()))
    assert boxes_of(tmp_path) == USUAL and data.check(tmp_path) == []


@pytest.mark.parametrize(
    ("orientation", "size", "noted"), [(6, (16, 16), 2), (3, (24, 16), 2), (6, (24, 16), 0), (1, (16, 16), 0)]
)
def test_what_exif_turns_and_the_size_cannot_tell_is_noted(tmp_path, orientation, size, noted):
    """Boxes then belong to the picture as it is shown, in training, evaluation and prediction alike."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / "annotations").mkdir(exist_ok=True)
        Image.new("RGB", size).save(tmp_path / split / "a.jpg", exif=exif)
        row = {"id": 1, "file_name": "a.jpg", "width": size[0], "height": size[1]}
        annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 8, 4]}
        content = {"images": [row], "annotations": [annotation], "categories": [{"id": 1, "name": "bar"}]}
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    said = []
    assert data.check(tmp_path, say=said.append) == []
    read = data.load(DetectRecipe(data=str(tmp_path)), tmp_path, said.append)
    notes = [line for line in said if "EXIF turns the picture" in line]
    assert len(notes) == noted and all("a.jpg and 1 more" in line for line in notes)
    turned = [12, 0, 16, 8] if (orientation, size) == (6, (24, 16)) else [0, 0, 8, 4]
    assert read.train.pictures.pictures[0].target()["boxes"].tolist() == [turned]
