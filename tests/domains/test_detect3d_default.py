"""The default data and sizes of detect3d: whether a car is a truck can be told by mixing alone."""

import numpy
import pytest
import torch

from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.task import Detect3dTask
from polymix.train.data.sampling import seed_all
from tests.helpers import slow_but

DEFAULT = Detect3dRecipe(scenes=6, test_scenes=4, sweeps=1)  # six streets have cars and trucks
AWAY = 4.5  # metres from the middle of a car, across the street, to the nearest house


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return Detect3dTask(DEFAULT).load(tmp_path_factory.mktemp("drives"))


def test_intensities_are_those_of_the_file(data):
    """Shares from 0 to 1, as they once were, vanished beside metres in the encoder's batch norm: no mixer learned."""
    frame = data.test.frames[0]
    raw = numpy.fromfile(frame.path, dtype=numpy.float32).reshape(-1, 5)
    assert numpy.array_equal(frame.points()[:, 3], raw[:, 3]) and raw[:, 3].max() > 100


@pytest.mark.parametrize("mixer", slow_but(("pom", "linear_floor"), ["softmax", "pom", "padre", "linear_floor"]))
def test_houses_reach_cars_through_mixers_and_never_without(mixer, data):
    """In windows of 4.8 m, as they once were, no path led from the houses to half of the cars."""
    task = Detect3dTask(DEFAULT.changed(mixer=mixer))
    seed_all(0)
    model = task.build(data).eval()
    reached = []
    for points, boxes, _ in (data.test[place] for place in range(4)):
        points.requires_grad_()
        heat = model(points, torch.tensor([0, len(points)]))["heat"][0, 0]
        places = (boxes[:, :2] - boxes.new_tensor(model.extent.low[:2])) / boxes.new_tensor(model.extent.voxel[:2])
        for (x, y), box in zip(places.long().tolist(), boxes, strict=True):
            if box[3] > 2 and 0 <= x < heat.shape[1] and 0 <= y < heat.shape[0]:  # the size of a car
                (gradient,) = torch.autograd.grad(heat[y, x], points, retain_graph=True)
                outwards = (points[:, 1] - box[1]) * box[1].sign()
                reached.append(bool(gradient[(outwards > AWAY) & (points[:, 2] > 0.3), 3].any()))  # not the ground
    assert len(reached) > 10 and set(reached) == {mixer != "linear_floor"}
