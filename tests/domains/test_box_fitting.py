"""Pictures with boxes, resized, mirrored, cropped and varied as DETR does; boxes and masks always meet the pixels."""

import pytest
import torch

from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.train.data.boxes import fitting
from polymix.train.data.boxes.data import load
from polymix.train.data.boxes.fitting import Variation, crop, fit, mirror
from tests.domains.box_files import write_coco


def marked(height, width, *boxes):
    """A black picture whose objects are white, with boxes, masks and areas."""
    pixels, masks = torch.zeros(3, height, width, dtype=torch.uint8), torch.zeros(len(boxes), height, width).bool()
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        pixels[:, y1:y2, x1:x2] = 255
        mask[y1:y2, x1:x2] = True
    corners = torch.tensor(boxes).float().view(-1, 4)
    return pixels, {"boxes": corners, "labels": torch.arange(len(boxes)), "masks": masks,
                    "iscrowd": torch.zeros(len(boxes)).bool(),
                    "area": (corners[:, 2:] - corners[:, :2]).prod(1)}  # fmt: skip


def shown(pixels):
    """The box around what is white."""
    rows, columns = (pixels[0] > 127).nonzero().unbind(1)
    return [columns.min().item(), rows.min().item(), columns.max().item() + 1, rows.max().item() + 1]


def test_the_short_and_the_long_side_are_the_published_ones():
    for height, width, size in ((480, 640, (800, 1067)), (300, 900, (444, 1333)), (900, 300, (1333, 444))):
        none = {"boxes": torch.zeros(0, 4), "area": torch.zeros(0)}
        image, target = fit(torch.zeros(3, height, width, dtype=torch.uint8), none, 1344, 800, 1333)
        assert tuple(target["size"].tolist()) == size and image.shape == (3, 1344, 1344)


def test_a_mirrored_picture_keeps_its_objects():
    pixels, target = marked(20, 30, (3, 4, 10, 12))
    mirrored, moved = mirror(pixels, target)
    assert moved["boxes"].tolist() == [[20, 4, 27, 12]] and shown(mirrored) == [20, 4, 27, 12]
    assert torch.equal(moved["masks"][0], mirrored[0] > 127)


def test_a_crop_cuts_boxes_and_leaves_lost_objects_out():
    pixels, target = marked(40, 60, (5, 5, 25, 25), (50, 30, 58, 38))
    cropped, inside = crop(pixels, target, (10, 0, 40, 30))
    assert inside["boxes"].tolist() == [[0, 5, 15, 25]] == [shown(cropped)] and inside["labels"].tolist() == [0]
    assert inside["area"].item() == pytest.approx(300) and torch.equal(inside["masks"][0], cropped[0] > 127)
    assert not len(crop(pixels, target, (30, 0, 45, 20))[1]["boxes"])


def test_variations_are_those_of_detr_and_boxes_follow_them(monkeypatch):
    monkeypatch.setattr(fitting, "CROP_FROM", (40, 50, 60))
    monkeypatch.setattr(fitting, "CROP_SIDES", (38, 60))
    pixels, target = marked(40, 60, (20, 12, 40, 28))
    variation = Variation(flip=True, shorts=(48, 64, 80), crops=True)
    torch.manual_seed(0)
    seen, sides, mirrored = [], set(), 0
    for _ in range(120):
        image, varied, short = variation.apply(pixels, target)
        height, width = image.shape[1:]
        seen.append((height, width))
        sides.add(short)
        if len(varied["boxes"]):
            box = torch.tensor(shown(image)).float()
            assert (box - varied["boxes"][0]).abs().max() <= 1 and varied["masks"].shape[1:] == image.shape[1:]
        _, final = fit(image, varied, 120, short, 133)
        assert min(final["size"]) == short or max(final["size"]) == 120
    whole = [size for size in seen if size == (40, 60)]
    assert 40 < len(whole) < 80 and sides == {48, 64, 80}, "half of the pictures are cropped"
    assert all(38 <= side <= 60 for size in seen for side in size)
    left, target_left = marked(40, 60, (2, 12, 20, 28))
    only = Variation(flip=True)
    mirrored = sum(only.apply(left, target_left)[1]["boxes"][0, 0].item() > 30 for _ in range(60))
    assert 15 < mirrored < 45


@pytest.mark.parametrize("kind", [DetectRecipe, InstancesRecipe])
def test_training_pictures_vary_and_test_pictures_do_not(kind, tmp_path):
    write_coco(tmp_path / "data")
    recipe = kind(data=str(tmp_path / "data"), broken="skip", flip=True, short_sides=(24, 32), long_side=40)
    data = load(recipe, tmp_path, print)
    torch.manual_seed(0)
    sizes = {tuple(data.train[0][1]["size"].tolist()) for _ in range(30)}
    places = {data.train[0][1]["boxes"][0, 0].item() > 15 for _ in range(30)}
    assert sizes == {(24, 36), (27, 40)} and places == {True, False}, "27 × 40: the long side is at most 40"
    still = [data.test[0] for _ in range(5)]
    assert all(torch.equal(image, still[0][0]) for image, _ in still) and still[0][1]["size"].tolist() == [27, 40]
    plain = load(kind(data=str(tmp_path / "data"), broken="skip"), tmp_path, print)
    assert plain.train.memory is not None and data.train.memory is None
