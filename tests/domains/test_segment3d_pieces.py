"""Scans in pieces: every point once, a bounded size, and the classes of the whole scan away from the cuts."""

import numpy
import pytest
import torch

from polymix.domains.segment3d.metrics import predict_points
from polymix.domains.segment3d.pieces import pieces_of
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.domains.segment3d.task import Segment3dTask
from polymix.train.evaluation import evaluating
from polymix.train.task import Process


@pytest.mark.parametrize("places", [
    numpy.random.default_rng(0).integers(0, 30, (5000, 3)),
    numpy.zeros((1000, 3), int),
    numpy.concatenate((numpy.zeros((900, 3), int), numpy.ones((100, 3), int))),
], ids=["spread", "one place", "two places"])  # fmt: skip
def test_every_point_is_in_one_piece_and_pieces_are_bounded(places):
    pieces = list(pieces_of(places, 128, 2))
    assert sorted(numpy.concatenate([own for own, _ in pieces]).tolist()) == list(range(len(places)))
    assert all(0 < len(own) <= 128 and len(around) <= 128 for own, around in pieces)
    assert all(not set(own.tolist()) & set(around.tolist()) for own, around in pieces)


def test_the_rim_is_what_lies_within_its_width():
    places = numpy.random.default_rng(1).integers(0, 100, (2000, 3))
    for own, around in pieces_of(places, 1500, 5):  # two pieces
        low, high = places[own].min(0), places[own].max(0)
        inside = ((places > low - 5) & (places < high + 5)).all(1)
        assert set(numpy.flatnonzero(inside)) - set(own.tolist()) <= set(around.tolist())
        assert ((places[around] >= low - 5) & (places[around] <= high + 5)).all() and len(around) > 50


def test_pieces_have_the_classes_of_the_whole_scan(tmp_path):
    """With a rim wider than what the model sees, almost all classes are the same; without the middle they would not."""
    options = {"mixer": "linear_floor", "depths": (1, 1), "channels": (8, 8), "heads": (2, 2), "decoder_depths": (1,),
               "decoder_channels": (8,), "decoder_heads": (2,), "scans": 1, "test_scans": 1}  # fmt: skip
    recipe = Segment3dRecipe(**options)
    task = Segment3dTask(recipe)
    data = task.load(tmp_path)
    torch.manual_seed(0)
    model = task.build(data)
    points, _ = data.test.read(0)
    with evaluating(model):
        whole = predict_points(model, points, recipe, Process())
        parts = predict_points(model, points, Segment3dRecipe(**options, piece=6000), Process())
    assert len(whole.unique()) > 2 and float((whole == parts).double().mean()) > 0.99
