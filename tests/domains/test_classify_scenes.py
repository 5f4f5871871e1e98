"""Digit scenes, the default data of `polymix compare`: no patch shows the label."""

import pytest
import torch

from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.scenes import scenes
from polymix.domains.classify.task import ClassifyTask
from polymix.errors import OptionError
from polymix.train.data.labelled import digits

SPLITS = ("train", "test")


@pytest.fixture(scope="module")
def parts():
    """Images and labels of each split."""
    return dict(zip(SPLITS, scenes(), strict=True))


def cells(images):
    """(N, 4, 64): the digits of each scene."""
    return images.unfold(2, 8, 8).unfold(3, 8, 8).reshape(len(images), 4, 64)


def known(images, part):
    """The label of each image, found among the digits; -1 where it is none of them."""
    table = {tuple(row.tolist()): int(label) for row, label in zip(part[0].flatten(1), part[1], strict=True)}
    return torch.tensor([table.get(tuple(row.tolist()), -1) for row in images])


@pytest.mark.parametrize("split", SPLITS)
def test_the_label_is_the_digit_that_the_first_one_points_at(parts, split):
    images, labels = (part[:200] for part in parts[split])
    values = known(cells(images).flatten(0, 1), digits()[SPLITS.index(split)]).reshape(-1, 4)
    assert (values >= 0).all(), "a digit that is not of this split"
    assert set(values[:, 0].tolist()) == {1, 2, 3}
    assert torch.equal(values.gather(1, values[:, :1])[:, 0], labels)


def test_no_digit_of_a_test_scene_is_in_a_training_scene(parts):
    training = {tuple(row.tolist()) for row in cells(parts["train"][0]).flatten(0, 1)}
    assert not [row for row in cells(parts["test"][0]).flatten(0, 1) if tuple(row.tolist()) in training]


def test_scenes_of_a_seed_are_the_same_in_every_run_and_classes_are_balanced(parts):
    images, labels = parts["train"]
    assert torch.equal(scenes()[0][0], images)
    shares = torch.bincount(labels) / len(labels)
    assert len(shares) == 10 and (shares - 0.1).abs().max() < 0.02


def test_what_a_comparison_takes_depends_on_the_data():
    sizes = []
    for place in (None, "digits", "fashion-mnist", "photos"):
        options = ClassifyRecipe.for_comparison(place, {}, quick=False)
        sizes.append((options["image_size"], options["patch_size"], options["epochs"], options["data"]))
    assert sizes == [(16, 4, 9, None), (8, 2, 30, None), (28, 4, 1, "fashion-mnist"), (32, 4, 30, "photos")]
    assert ClassifyRecipe(default_data="scenes").image_size == 16
    with pytest.raises(OptionError, match=r"`image_size`.*16, the size of the scenes"):
        ClassifyTask(ClassifyRecipe(default_data="scenes", image_size=32)).check()
