"""CenterPoint's head: outputs, targets, loss and gradients of OpenPCDet's, groups of unequal counts, NMS by group."""

import math

import pytest
import torch

from polymix.domains.detect3d.center_head import (
    CenterHead,
    center_counts,
    center_losses,
    center_targets,
    decode,
    peak_radius,
)
from polymix.domains.detect3d.data import Detect3dData, balanced
from polymix.domains.detect3d.extent import Extent
from polymix.domains.detect3d.frames import Frame, Objects
from polymix.domains.detect3d.nuscenes import CLASSES, GROUPS
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.rotated import circle_nms
from polymix.domains.detect3d.task import Detect3dTask
from polymix.errors import OptionError
from polymix.train.counted import over
from tests.helpers import Golden, close

GOLDEN = Golden("hosts/center_point")
HEAD = GOLDEN.meta["head"]
EXTENT = Extent.of(HEAD["space"], HEAD["voxel"])


@pytest.fixture(scope="module")
def run():
    """The published head with recorded weights in training: its output, targets, loss, and itself with gradients."""
    head = CenterHead(6, HEAD["groups"], HEAD["dim"], HEAD["convolutions"]).double().train()
    assert not head.load_state_dict(GOLDEN.part("head", "state"), strict=False).unexpected_keys
    inputs = GOLDEN.part("head", "in")
    x = inputs["x"].requires_grad_()
    place = (sum(HEAD["groups"]), EXTENT, HEAD["stride"], True)
    targets = [center_targets(inputs[f"boxes{i}"], inputs[f"labels{i}"], *place) for i in (0, 1)]
    output = head(x)
    # `center_losses` computes in float32 whatever the type: as float64 it is compared to rounding.
    float_, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    try:
        sums = center_losses(output, targets, head.group_of)
    finally:
        torch.Tensor.float = float_
    scans = [(inputs[f"boxes{i}"], inputs[f"labels{i}"]) for i in (0, 1)]
    loss = over(sums, center_counts(scans, EXTENT, HEAD["stride"], head.group_of))
    loss.backward()
    return head, x, output, targets, loss


def test_it_computes_what_openpcdets_head_does(run):
    """Five branches a group, and the ten numbers in our order: a network of one branch had other weights."""
    head, _, output, _, _ = run
    theirs = GOLDEN.part("head", "out")
    close(output["heat"], theirs["heat"], 1e-7)
    close(output["boxes"], theirs["boxes"], 1e-7)
    assert list(head.boxes[0]) == ["offset", "height", "size", "turn", "velocity"]


def test_the_targets_have_the_published_radii(run):
    """With long boxes, whose peaks CenterPoint's code makes wider than the overlap asks for."""
    close(torch.stack([target[0] for target in run[3]]), GOLDEN.part("head", "out")["targets"], 1e-7)
    theirs = GOLDEN.part("radius", "out")["radius"]
    mine = [peak_radius(length, width, legacy=True) for length, width in GOLDEN.part("radius", "in")["sizes"].tolist()]
    close(torch.tensor(mine, dtype=torch.float64), theirs, 1e-12)


def test_each_group_is_divided_by_its_own_objects(run):
    """Loss and gradients with 15, 4 and 2 objects in three groups: divided by all of them, rare groups hardly count."""
    head, x, _, _, loss = run
    close(loss, GOLDEN.part("head", "out")["loss"], 1e-6)
    close(x.grad, GOLDEN.part("head", "grad_in")["x"], 1e-5)
    theirs = GOLDEN.part("head", "grad")
    for name, parameter in head.named_parameters():
        close(parameter.grad, theirs[name], 1e-5)


def test_two_objects_on_one_cell_are_one_centre_and_two_boxes():
    """As the heat map has them; boxes outside the map are neither."""
    x, y = EXTENT.low[0] + 1.0, EXTENT.low[1] + 1.0
    boxes = torch.ones(4, 9)
    boxes[:, :2] = torch.tensor([[x, y], [x + 0.01, y], [x, y], [x - 9, y]])
    labels = torch.tensor([0, 0, 1, 2])
    assert center_counts([(boxes, labels)], EXTENT, 2, (0, 0, 1)).tolist() == [2, 0, 3, 0]
    heat = center_targets(boxes, labels, 3, EXTENT, 2)[0]
    assert (heat == 1).sum((1, 2)).tolist() == [1, 1, 0]


def test_a_group_without_objects_counts_and_is_finite():
    """Its heat maps must fall everywhere; the count is at least one."""
    empty = (torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64))
    targets = [center_targets(*empty, 3, EXTENT, 2)]
    output = {"heat": torch.zeros(1, 3, 16, 20), "boxes": torch.zeros(1, 2, 10, 16, 20)}
    loss = over(center_losses(output, targets, (0, 0, 1)), center_counts([empty], EXTENT, 2, (0, 0, 1)))
    torch.testing.assert_close(loss, torch.tensor(3 * 320 * 0.25 * math.log(2)))


def test_circles_are_those_of_centerpoint_with_radii_as_roots():
    """Its numbers are squares: taken as metres they would drop boxes far away."""
    inputs, theirs = GOLDEN.part("circle", "in"), GOLDEN.part("circle", "out")
    boxes = torch.cat((inputs["centres"], torch.ones(60, 5)), 1)
    for square in GOLDEN.meta["circle"]["squares"]:
        assert circle_nms(boxes, inputs["scores"], square**0.5).tolist() == theirs[f"keep_{square}"].tolist()


def two_beside_each_other(group_of):
    heat = torch.full((1, 3, 16, 20), -9.0)
    heat[0, 0, 5, 5], heat[0, 1, 5, 7], heat[0, 2, 5, 9] = 3.0, 2.0, 1.0
    boxes = torch.zeros(1, max(group_of) + 1, 10, 16, 20)
    boxes[:, :, 3] = math.log(6.0)
    return {"heat": heat, "boxes": boxes}


@pytest.mark.parametrize(("nms", "radius"), [("rotated", (1.0,)), ("circle", (1.5,))])
def test_boxes_of_one_group_drop_each_other_whatever_their_class(nms, radius):
    """Three boxes 1.2 m apart: of two in a group the better one stays, and the next group is another matter."""
    for group_of, labels in (((0, 0, 1), [0, 2]), ((0, 1, 2), [0, 1, 2])):
        (row,) = decode(two_beside_each_other(group_of), group_of, EXTENT, 2, nms=nms, radius=radius)
        assert row["labels"].tolist() == labels
    (row,) = decode(two_beside_each_other((0, 0, 1)), (0, 0, 1), EXTENT, 2, nms="circle", radius=(1.0, 9.0))
    assert row["labels"].tolist() == [0, 1, 2], "a radius for each group"
    (row,) = decode(two_beside_each_other((0, 0, 1)), (0, 0, 1), EXTENT, 2, radius=Detect3dRecipe.paper().radius)
    assert row["labels"].tolist() == [0, 2], "without circles their number does not matter"
    with pytest.raises(OptionError, match="one for each of 2 groups"):
        decode(two_beside_each_other((0, 0, 1)), (0, 0, 1), EXTENT, 2, nms="circle", radius=(1.0, 2.0, 3.0))


def data_of(names, layout="nuscenes"):
    return Detect3dData("test", layout, tuple(names), None, None)


def test_the_groups_of_nuscenes_are_centerpoints():
    """configs/nusc/pp/nusc_centerpoint_pp_02voxel_two_pfn_10sweep.py of tianweiy/CenterPoint 3cf7d87. The sizes were
    once applied to another order of the classes: trailer beside construction_vehicle."""
    assert GROUPS == (("car",), ("truck", "construction_vehicle"), ("bus", "trailer"), ("barrier",),
                      ("motorcycle", "bicycle"), ("pedestrian", "traffic_cone"))  # fmt: skip
    assert data_of(CLASSES).groups() == [1, 2, 2, 1, 2, 2]
    assert data_of(["car", "bus", "trailer", "traffic_cone"]).groups() == [1, 2, 1]
    assert data_of(["car", "cyclist"], "kitti").groups() == [1, 1]
    tiny = Detect3dRecipe.tiny()
    head = Detect3dTask(tiny).build(data_of(CLASSES)).head
    assert head.groups == (1, 2, 2, 1, 2, 2) and head.group_of == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5]
    radii = tuple(square**0.5 for square in (4.0, 12.0, 10.0, 1.0, 0.85, 0.175))  # of its configuration with circles
    assert Detect3dTask(tiny.changed(nms="circle", radius=radii)).build(data_of(CLASSES))
    with pytest.raises(OptionError, match="one for each of 2 groups"):
        Detect3dTask(tiny.changed(nms="circle", radius=radii)).build(data_of(["car", "bus"]))


def test_scans_are_drawn_so_that_each_class_is_in_as_many():
    """As BALANCED_RESAMPLING of OpenPCDet: the list is as long as there are pairs of a scan and a class in it."""
    import numpy

    def frame(*labels):
        count = len(labels)
        return Frame(None, "", None, Objects(numpy.zeros((count, 9)), numpy.array(labels), [""] * count,
                                             numpy.arange(count)))  # fmt: skip

    common, rare = frame(9, 0, 0), frame(9, 0, 3)  # a first box without points does not count
    drawn = balanced([common] * 30 + [rare] * 2, 0)
    assert len(drawn) == 2 * ((32 + 2) // 2)
    assert sum(one is rare for one in drawn) >= 17, "half of them are drawn for the rare class"
    again, other = balanced([common] * 30 + [rare] * 2, 0), balanced([common] * 30 + [rare] * 2, 1)
    assert [id(one) for one in again] == [id(one) for one in drawn] != [id(one) for one in other]
