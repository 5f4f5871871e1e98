"""The default data of `polymix compare`: scenes whose label no patch shows."""

import pytest
import torch

from polymix.errors import OptionError
from polymix.tasks.classify import load_digits
from polymix.tasks.classify.scenes import load_scenes
from polymix.workflows.compare.run import Settings


@pytest.fixture(scope="module")
def scenes():
    return load_scenes()


def cells(images):
    """(N, 4, 64): the digits of each scene."""
    return images.unfold(2, 8, 8).unfold(3, 8, 8).reshape(len(images), 4, 64)


def known(images, digits):
    """The label of each image, found among the digits; -1 where it is none of them."""
    table = {tuple(row.tolist()): int(label) for row, label in zip(digits[0].flatten(1), digits[1], strict=True)}
    return torch.tensor([table.get(tuple(row.tolist()), -1) for row in images])


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_label_is_the_digit_that_the_first_one_points_at(scenes, split):
    images, labels = (part[:200] for part in getattr(scenes, split))
    shown = known(cells(images).flatten(0, 1), getattr(load_digits(), split)).reshape(-1, 4)
    assert (shown >= 0).all(), "a digit that is not of this split"
    assert set(shown[:, 0].tolist()) == {1, 2, 3}
    assert torch.equal(shown.gather(1, shown[:, :1])[:, 0], labels)


def test_no_digit_of_a_test_scene_is_in_a_training_scene(scenes):
    training = {tuple(row.tolist()) for row in cells(scenes.train[0]).flatten(0, 1)}
    assert not [row for row in cells(scenes.test[0]).flatten(0, 1) if tuple(row.tolist()) in training]


def test_scenes_are_the_same_in_every_run_and_classes_are_balanced(scenes):
    assert torch.equal(load_scenes().train[0], scenes.train[0])
    shares = torch.bincount(scenes.train[1]) / len(scenes.train[1])
    assert len(shares) == 10 and (shares - 0.1).abs().max() < 0.02


def test_what_depends_on_the_data():
    scenes, digits, folder = (Settings(data=data) for data in (None, "digits", "photos"))
    assert [(s.size, s.patch, s.passes) for s in (scenes, digits, folder)] == [(16, 4, 6), (8, 2, 30), (32, 4, 30)]
    assert Settings(epochs=3).passes == 3 and digits.to_dict()["data"] == "digits"
    with pytest.raises(OptionError, match=r"--image-size.*16.*--data digits"):
        Settings(image_size=32).check()
