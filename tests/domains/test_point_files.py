"""Numbers of point clouds in the ranges that real files have: national grids, colours of 16 bits, intensities in bytes."""

import numpy
import pytest

from polymix.domains.detect3d import data as boxes
from polymix.domains.segment3d.data import check, load
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.errors import DataError
from polymix.train.data.scans.files import near, read_points

UTM = numpy.array([412345.0, 5412345.0, 300.0])
NEAR = numpy.random.default_rng(0).random((2000, 3)) * 20


def pointcept(folder, coordinates, **arrays):
    for part in ("train", "val"):
        scene = folder / part / "s0"
        scene.mkdir(parents=True)
        numpy.save(scene / "coord.npy", coordinates)
        for name, values in {"segment": (NEAR[:, 0] > 10).astype(numpy.int64), **arrays}.items():
            numpy.save(scene / f"{name}.npy", values)
    return folder


def points_in(folder):
    return load(Segment3dRecipe(data=str(folder)), folder, print).test[0].points


def millimetres(places):
    return (places * 1000).round().astype(numpy.int64)


@pytest.mark.parametrize("offset", [UTM, -UTM, [0, 5e6, 0]])
def test_centimetres_survive_in_a_national_grid(tmp_path, offset):
    far = points_in(pointcept(tmp_path / "far", NEAR + offset)).astype(float)
    here = points_in(pointcept(tmp_path / "near", NEAR)).astype(float)
    assert numpy.abs((far - far[0]) - (here - here[0]))[:, :3].max() < 1e-3
    assert check(tmp_path / "far") == []


def test_points_near_the_origin_are_not_moved():
    room = (NEAR - 10).astype(numpy.float32)
    assert numpy.array_equal(near(room), room)


def test_whole_millimetres_are_read_before_they_are_rounded():
    places = millimetres(NEAR + UTM) / 1000
    assert numpy.abs(numpy.ptp(near(places), axis=0) - numpy.ptp(places, axis=0)).max() < 1e-3


def test_coordinates_that_the_file_has_rounded_are_refused(tmp_path):
    folder = pointcept(tmp_path / "npy", (NEAR + UTM).astype(numpy.float32))
    assert all("5,412,34" in line and "float32 has steps of 0.5 m" in line for line in check(folder))
    assert len(check(folder)) == 2
    scan = tmp_path / "scan.bin"
    numpy.concatenate((NEAR + UTM, NEAR[:, :1] / 20), 1).astype(numpy.float32).tofile(scan)
    with pytest.raises(DataError, match="Subtract an offset in float64"):
        read_points(scan)


def test_one_stray_point_is_no_coarse_cloud(tmp_path):
    scan = tmp_path / "scan.bin"
    values = numpy.concatenate((NEAR, NEAR[:, :1] / 20), 1).astype(numpy.float32)
    values[3, 0] = 1e6
    values.tofile(scan)
    assert len(read_points(scan)) == len(NEAR)


BYTES = numpy.arange(2000 * 3).reshape(2000, 3) % 256


@pytest.mark.parametrize("colours", [
    BYTES.astype(numpy.uint8), BYTES.astype(numpy.float32), (BYTES * 257).astype(numpy.uint16), BYTES / 255,
    BYTES.astype(numpy.uint16),
], ids=["bytes", "floats of bytes", "16 bits", "shares", "bytes in 16 bits"])  # fmt: skip
def test_colours_of_every_range_are_the_same_colours(tmp_path, colours):
    points = points_in(pointcept(tmp_path, NEAR, color=colours))
    assert numpy.allclose(points[:, 3:6], BYTES / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize(("arrays", "said"), [
    ({"color": numpy.full((2000, 3), -3)}, "a colour of -3"),
    ({"color": numpy.full((2000, 3), 70_000)}, "a colour of 70000"),
    ({"color": numpy.full((2000, 3), "red")}, "instead of numbers"),
    ({"strength": numpy.full(2000, 183)}, "a remission of 183"),
    ({"segment": numpy.full(2000, 0.7)}, "label 0.7, which is no whole number"),
    ({"segment": numpy.full(2000, numpy.nan)}, "label nan, which is no whole number"),
])  # fmt: skip
def test_numbers_out_of_range_are_named(tmp_path, arrays, said):
    folder = pointcept(tmp_path, NEAR, **arrays)
    assert said in check(folder)[0]
    with pytest.raises(DataError, match=said.replace("-", "\\-")):
        points_in(folder)


def test_remissions_in_bytes_are_named_in_both_domains(tmp_path):
    for folder in ("sequences/00/velodyne", "sequences/08/velodyne", "training/velodyne"):
        (tmp_path / folder).mkdir(parents=True)
        values = numpy.concatenate((NEAR, NEAR[:, :1] * 12), 1).astype(numpy.float32)
        values.tofile(tmp_path / folder / "000000.bin")
    assert any("a remission of 239" in line for line in check(tmp_path))
    scan = tmp_path / "training/velodyne/000000.bin"
    with pytest.raises(DataError, match="such as 255"):
        boxes.kitti._points(scan)
