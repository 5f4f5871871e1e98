"""Small data sets in the formats that people have: COCO's json, VOC's XML, WIDER FACE's lists."""

import json

import torch
from PIL import Image


def photo(path, size=(24, 16), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, 90 if mode in ("L", "I;16") else None).save(path)


def coco_json(**changes):
    """Two pictures, categories with a gap, a polygon, both kinds of RLE and a crowd; `changes` replace whole parts."""
    counts = [2 * 16 + 3, 5, 11, 5, 24 * 16 - 56]  # two columns of five pixels, at x 2 and 3, from y 3
    content = {
        "images": [{"id": 7, "file_name": "a.png", "width": 24, "height": 16},
                   {"id": 30, "file_name": "b.png", "width": 24, "height": 16}],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 3, "bbox": [4, 2, 10, 8], "area": 80, "iscrowd": 0,
             "segmentation": [[4, 2, 14, 2, 14, 10, 4, 10]]},
            {"id": 2, "image_id": 7, "category_id": 90, "bbox": [2, 3, 2, 5], "area": 10, "iscrowd": 0,
             "segmentation": {"size": [16, 24], "counts": counts}},
            {"id": 3, "image_id": 30, "category_id": 90, "bbox": [2, 3, 2, 5], "area": 10, "iscrowd": 1,
             "segmentation": {"size": [16, 24], "counts": "S15;0m9"}},
            {"id": 4, "image_id": 30, "category_id": 3, "bbox": [0, 0, 24, 16], "area": 384},
        ],
    }  # fmt: skip
    return {**content, **changes}


def write_coco(folder, **changes):
    """A folder in COCO's layout, with the same two pictures for train and val."""
    for split in ("train", "val"):
        for name in ("a.png", "b.png"):
            photo(folder / f"{split}2017" / name)
        (folder / "annotations").mkdir(exist_ok=True)
        content = coco_json(**(changes if split == "train" else {}))
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return folder


def entry(place, **changes):
    """The annotations of `coco_json` with one of them changed."""
    rows = coco_json()["annotations"]
    rows[place].update(changes)
    return rows


def write_voc(folder, box=(5, 3, 14, 10)):
    for name in ("x1", "x2"):
        photo(folder / "JPEGImages" / f"{name}.jpg")
        corners = "".join(f"<{key}>{v}</{key}>" for key, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        text = f"<annotation><filename>{name}.jpg</filename><size><width>24</width><height>16</height></size>"
        for label, difficult in (("cat", 0), ("dog", 1)):
            text += f"<object><name>{label}</name><difficult>{difficult}</difficult><bndbox>{corners}</bndbox></object>"
        (folder / "Annotations").mkdir(exist_ok=True)
        (folder / "Annotations" / f"{name}.xml").write_text(text + "</annotation>")
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("x1\n")
    (lists / "val.txt").write_text("x2  1\n")
    return folder


def rectangle(height, width, top, left, bottom, right):
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask
