"""A batch without anything to learn: every weight still gets a gradient, as with several processes each must."""

from types import SimpleNamespace

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.domains.depth.recipe import DepthRecipe
from polymix.domains.depth.task import DepthTask
from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.detect.task import DetectTask
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.task import Detect3dTask
from polymix.domains.faces.recipe import FacesRecipe
from polymix.domains.faces.task import FacesTask
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.domains.handwriting.task import HandwritingTask
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.domains.instances.task import InstancesTask
from polymix.domains.satellite.pastis import VOID as NO_CROP
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.satellite.task import SatelliteTask
from polymix.domains.segment.layouts import IGNORED
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.domains.segment.task import SegmentTask
from polymix.domains.segment3d.layouts import VOID
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.domains.segment3d.task import Segment3dTask
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.domains.timeseries.task import TimeseriesTask
from polymix.train.registry import OWN_RECIPES
from tests.helpers import slow_but

cure_torchvision()
CLASSES = 3
DATA = SimpleNamespace(  # what the builders of the hosts read of their data
    classes=("a", "b", "c"),
    characters="ab",
    padded=False,
    features=4,
    groups=lambda: [2, 1],
    variables=("value",),
    centre=0.0,
    train=(),
)
EVERY_SAMPLE_HAS_A_TARGET = {"classify", "generation", "jigsaw", "recall", "text", "video", "speech"}


def target(side, count):
    """A picture with `count` objects, and with a crowd."""
    boxes = torch.tensor([[4.0, 4.0, side - 8.0, side - 8.0]]).repeat(count + 1, 1)
    masks = torch.zeros(count + 1, side, side, dtype=torch.bool)
    masks[:, 4 : side - 8, 4 : side - 8] = True
    return {
        "boxes": boxes, "labels": torch.zeros(count + 1, dtype=torch.int64), "masks": masks,
        "iscrowd": torch.tensor([False] * count + [True]), "size": torch.tensor([side, side]),
    }  # fmt: skip


def pictures(recipe, filled):
    side = recipe.image_size
    images = torch.randint(0, 255, (2, 3, side, side), dtype=torch.uint8)
    return images, [target(side, filled) for _ in range(2)]


def labels_of(filled, empty, *shape):
    return torch.randint(0, CLASSES, shape) if filled else torch.full(shape, empty)


def detect(filled, **options):
    recipe = DetectRecipe.tiny().changed(**options)
    return DetectTask(recipe), pictures(recipe, filled)


def detr(host):
    options = {"backbone": "test_resnet", "image_size": 64, "dim": 16, "heads": 2, "feedforward": 16, "queries": 5}
    return lambda filled: detect(filled, host=host, depth=1, **options)


def instances(filled):
    recipe = InstancesRecipe.tiny()
    return InstancesTask(recipe), pictures(recipe, filled)


def faces(filled):
    recipe = FacesRecipe.tiny()
    return FacesTask(recipe), pictures(recipe, filled)


def segment(filled):
    recipe = SegmentRecipe.tiny()
    side = recipe.crop
    labels = labels_of(filled, IGNORED, 2, side, side).byte()
    return SegmentTask(recipe), (torch.zeros(2, 3, side, side), labels, torch.tensor(float(filled)))


def satellite(filled):
    recipe = SatelliteRecipe.tiny()
    task, side = SatelliteTask(recipe), recipe.window
    series, days = torch.randn(2, 4, 10, side, side), torch.arange(4).repeat(2, 1)
    return task, (series, days, torch.ones(2, 4, dtype=torch.bool), labels_of(filled, NO_CROP, 2, side, side), [])


def segment3d(filled):
    grid = torch.randint(0, 8, (40, 3)).unique(dim=0)
    batch = torch.randn(len(grid), 4), grid, torch.tensor([0, len(grid)]), labels_of(filled, VOID, len(grid)), 40
    return Segment3dTask(Segment3dRecipe.tiny()), batch


def detect3d(filled):
    points = torch.rand(400, 5) * torch.tensor([8.0, 8.0, 1.0, 1.0, 0.0])
    boxes = torch.tensor([[4.0, 4.0, 0.5, 2.0, 1.0, 1.0, 0.3, 0.0, 0.0]]).repeat(filled, 1)
    return Detect3dTask(Detect3dRecipe.tiny()), (
        points, torch.tensor([0, 400]), [(boxes, torch.zeros(len(boxes), dtype=torch.int64))]
    )  # fmt: skip


def handwriting(filled):
    recipe = HandwritingRecipe.tiny()
    lengths = torch.tensor([2, 1]) * filled
    images = torch.rand(2, 1, recipe.height, recipe.width)
    return HandwritingTask(recipe), {"images": images, "labels": torch.ones(int(lengths.sum()), dtype=torch.int64),
                                     "lengths": lengths}  # fmt: skip


def timeseries(filled):
    """A future of which nothing was observed, as at the end of a sensor's life."""
    recipe = TimeseriesRecipe.tiny()
    observed = torch.ones(2, 1, recipe.context + recipe.horizon, dtype=torch.bool)
    observed[..., recipe.context :] = bool(filled)
    values = torch.randn(2, 1, recipe.context + recipe.horizon)
    calendar = torch.zeros(2, recipe.context + recipe.horizon, 6)
    return TimeseriesTask(recipe), (values, observed, calendar, torch.ones(2, 1))


def depth(filled, **options):
    """A picture of which no pixel's depth is known."""
    recipe = DepthRecipe.tiny().changed(**options)
    side = recipe.height
    views = torch.randint(0, 255, (2, 1, 3, side, side), dtype=torch.uint8)
    return DepthTask(recipe), (views, torch.full((2, 1, side, side), float(filled)), torch.zeros(2, 1, 0, 6))


TASKS = {
    "detect": detect, "detr": detr("detr"), "conditional_detr": detr("conditional_detr"), "instances": instances,
    "faces": faces, "segment": segment, "satellite": satellite, "segment3d": segment3d, "detect3d": detect3d,
    "handwriting": handwriting, "timeseries": timeseries, "depth": depth,
    "dpt": lambda filled: depth(filled, host="dpt", depth=4),
    "glpn": lambda filled: depth(filled, host="glpn", patch=None, height=64, width=64),
}  # fmt: skip


def test_every_domain_is_here():
    assert set(OWN_RECIPES) <= set(TASKS) | EVERY_SAMPLE_HAS_A_TARGET, "say whether its batches can be empty"


@pytest.mark.parametrize("name", slow_but([name for name in TASKS if name != "instances"], TASKS))
def test_a_batch_without_targets_gives_every_weight_a_gradient(name):
    def learning(filled):
        """The loss of a batch, and the weights that get a finite gradient from it."""
        torch.manual_seed(0)
        task, batch = TASKS[name](filled)
        model = task.build(DATA).train()
        loss = task.loss(model, batch)
        loss.backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        assert all(grad.isfinite().all() for grad in grads.values())
        return loss.item(), set(grads)

    loss, weights = learning(0)
    assert loss == loss and loss < float("inf")
    assert weights == learning(1)[1], "weights that a batch without targets does not touch"
