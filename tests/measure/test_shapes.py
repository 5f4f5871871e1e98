"""Shapes as people write them, and the grids that they are given."""

import pytest

from polymix.errors import OptionError
from polymix.measure.shapes import near_square, shape_of, shapes_of
from polymix.workflows.recommend import Shape, parse_shape


def test_near_square():
    assert [near_square(n) for n in (1, 12, 16, 17, 16384)] == [(1, 1), (3, 4), (4, 4), (1, 17), (128, 128)]


def test_shapes_as_people_write_them():
    assert shapes_of((16, 8), 3) == [Shape(tokens=16, dim=8, batch=3)]
    assert shapes_of([(2, 16, 8), {"tokens": 9, "dim": 8, "heads": 2}], 1) == [
        Shape(tokens=16, dim=8, batch=2), Shape(tokens=9, dim=8, heads=2)]  # fmt: skip
    assert shape_of(parse_shape("2x16x8:heads=2:grid=4x4"), 1) == Shape(tokens=16, dim=8, heads=2, batch=2, grid=(4, 4))
    assert shape_of({"tokens": 9, "dim": 8, "cross": True}, 1).cross == 9


@pytest.mark.parametrize(
    ("tokens", "grid", "prefix"), [(196, (14, 14), 0), (197, (14, 14), 1), (128, (8, 16), 0), (211, (211,), 0)]
)
def test_a_grid_nobody_named_is_assumed_and_said(tokens, grid, prefix):
    shape = Shape(tokens=tokens, dim=8).placed()
    assert (shape.grid, shape.prefix, shape.assumed) == (grid, prefix, True)
    assert ("assumed" in str(shape)) is (len(grid) > 1)


def test_longer_keeps_form_and_prefix():
    shape = Shape(tokens=17, dim=8, grid=(4, 4))
    assert (shape.longer(4.0).grid, shape.longer(4.0).tokens) == ((8, 8), 65)
    assert Shape(tokens=64, dim=8, causal=True).placed().longer(0.25).tokens == 16


def test_a_bad_shape_on_the_command_line():
    with pytest.raises(OptionError, match="--shape"):
        parse_shape("4096")
