"""Readers of depth: small real files of every layout, and each mistake of a user as one sentence with its file."""

import struct

import numpy
import pytest
import torch
from PIL import Image

from polymix.domains.depth import data
from polymix.domains.depth.layouts import LAYOUTS, layout_of, read_depth
from polymix.domains.depth.recipe import DepthRecipe
from polymix.errors import DataError
from polymix.train.data.cameras import read_matrix
from polymix.train.run import train

TINY = DepthRecipe.tiny().changed(control=False)
METRES = numpy.linspace(1, 5, 24 * 32).reshape(24, 32)
POSE = "1 0 0 0.5\n0 1 0 0\n0 0 1 0\n0 0 0 1\n"
LENS = "20 0 16\n0 20 12\n0 0 1\n"


def picture(path, size=(32, 24), value=90):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 40, 200)).save(path)


def deep(path, metres=METRES, steps=1000):
    """A PNG of 16 bits, with so many steps a metre."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((metres * steps).round().astype(numpy.uint16)).save(path)


def frame(path, metres=METRES):
    """As ViSP has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, columns = metres.shape
    path.write_bytes(struct.pack("<II", rows, columns) + metres.round().astype("<u2").tobytes())


def folders(root, count=4, poses=False):
    for place in range(count):
        picture(root / "images" / f"{place}.png")
        deep(root / "depth" / f"{place}.png")
        if poses:
            (root / "poses").mkdir(exist_ok=True)
            (root / "poses" / f"{place}.txt").write_text(POSE)
    if poses:
        (root / "intrinsics.txt").write_text(LENS)
    return root


def nyu(root):
    for part, scene in (("sync", "kitchen_0001"), ("official_splits/test", "bedroom")):
        for place in range(2):
            picture(root / part / scene / f"rgb_{place:05d}.jpg")
            deep(root / part / scene / f"sync_depth_{place:05d}.png")
    return root


def kitti(root):
    for part, drive in (("train", "2011_09_26_drive_0001_sync"), ("val", "2011_09_26_drive_0002_sync")):
        for place in range(2):
            picture(root / "raw" / drive[:10] / drive / "image_02" / "data" / f"{place:010d}.png")
            deep(root / part / drive / "proj_depth" / "groundtruth" / "image_02" / f"{place:010d}.png", steps=256)
    return root


def visp(root):
    for place in range(3):
        Image.new("L", (32, 24), 9).save(root / f"image_{place:04d}.pgm")
        frame(root / f"depth_image_{place:04d}.bin", 1000 * METRES)
        (root / "simu" / "Images").mkdir(parents=True, exist_ok=True)
        Image.new("L", (32, 24), 9).save(root / "simu" / "Images" / f"Image_{place:04d}.pgm")
        frame(root / "simu" / "Depth" / f"Depth_{place:04d}.bin", 1000 * METRES)
    return root


WRITERS = {"folders": folders, "nyu": nyu, "kitti": kitti, "visp": visp}


def problems(folder, **options):
    return data.list_problems(TINY.changed(data=str(folder), **options), str(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognised_and_read_in_its_unit(layout, tmp_path):
    """Metres of 1 to 5 in all of them, and in ViSP's what the file says."""
    folder = WRITERS[layout](tmp_path)
    assert layout_of(folder, None) == layout and problems(folder) == []
    made = data.load(TINY.changed(data=str(folder), height=24, width=32), tmp_path, print)
    _, depth, rays = made.train[0]
    unit = 1000 if layout == "visp" else 1
    torch.testing.assert_close(depth[0], torch.tensor(METRES * unit).float(), atol=unit / 500, rtol=0)
    assert rays.shape == (1, 0, 6)
    assert (len(made.train), len(made.test)) == {"folders": (3, 1), "visp": (5, 1)}.get(layout, (2, 2))
    if layout == "kitti":
        assert "0002_sync" in str(made.test.scenes[0][0].picture), "val is for the test"


@pytest.mark.parametrize("kind", ["png", "npy", "npy of integers", "bin", "tiff"])
def test_depth_files_of_every_kind_are_the_same_metres(kind, tmp_path):
    file = tmp_path / f"a.{kind.split()[0]}"
    if kind == "png":
        deep(file)
    elif kind == "npy":
        numpy.save(file, METRES)
    elif kind == "npy of integers":
        numpy.save(file, (1000 * METRES).round().astype(numpy.uint16))
    elif kind == "bin":
        frame(file, 1000 * METRES)
    else:
        Image.fromarray(METRES.astype(numpy.float32)).save(file)
    torch.testing.assert_close(read_depth(file, None), torch.tensor(METRES).float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(read_depth(file, 2.0) / read_depth(file, 1.0), torch.full((24, 32), 2.0))


def test_zeros_and_depths_out_of_bounds_do_not_count(tmp_path):
    metres = METRES.copy()
    metres[:, :16] = 0
    for place in range(4):
        picture(tmp_path / "images" / f"{place}.png")
        deep(tmp_path / "depth" / f"{place}.png", metres)
    recipe = TINY.changed(data=str(tmp_path), height=24, width=32, min_depth=2.0, max_depth=4.0)
    depth = data.load(recipe, tmp_path, print).train[0][1][0]
    assert (depth[:, :16] == 0).all() and depth[depth > 0].min() >= 2 and depth.max() <= 4


def test_pictures_and_depth_are_cut_from_the_same_middle(tmp_path):
    metres = numpy.tile(numpy.arange(1.0, 33.0), (24, 1))
    for place in range(2):
        picture(tmp_path / "images" / f"{place}.png")
        deep(tmp_path / "depth" / f"{place}.png", metres)
    depth = data.load(TINY.changed(data=str(tmp_path), height=24, width=24, patch=8), tmp_path, print).train[0][1][0]
    torch.testing.assert_close(depth[0], torch.arange(5.0, 29.0))


def test_views_of_a_scene_are_one_sample_and_intrinsics_follow_the_cut(tmp_path):
    root = folders(tmp_path / "data", 5, poses=True)
    recipe = TINY.changed(data=str(root), cameras=2, height=12, width=12, patch=4)
    notes = []
    made = data.load(recipe, tmp_path, notes.append)
    assert len(made.train) == len(made.test) == 1 and any("left out" in note for note in notes)
    matrix = data.intrinsics_of(made.train.scenes[0][0], recipe)
    torch.testing.assert_close(matrix, torch.tensor([[10.0, 0, 6], [0, 10, 6], [0, 0, 1]]))
    rays = made.train[0][2]
    torch.testing.assert_close(rays[0, 4], torch.tensor([0.0, 0, 0, 0, 0, 1])), "straight ahead in the middle"
    made = data.load(recipe.changed(cameras=1), tmp_path, notes.append)
    assert len(made.train) == 4


def test_parts_named_train_and_test_are_kept_and_scenes_stay_whole(tmp_path):
    folders(tmp_path / "train", 3)
    folders(tmp_path / "val", 2)
    made = data.load(TINY.changed(data=str(tmp_path)), tmp_path, print)
    assert (len(made.train), len(made.test)) == (3, 2)


def eight_bits(path):
    Image.new("L", (32, 24), 200).save(path)


def wrong(values):
    def write(path):
        metres = METRES.copy()
        metres[3, 5] = values
        path.unlink()
        numpy.save(path.with_suffix(".npy"), metres)

    return write


MISTAKES = {
    "no depth file": ("images/9.png", picture, "images/9.png: has no depth file"),
    "no picture": ("depth/9.png", deep, "depth/9.png: has no picture"),
    "8 bits": ("depth/1.png", eight_bits, "depth/1.png, a picture of 8 bits"),
    "colours": ("depth/1.png", picture, "depth/1.png, a picture of 8 bits"),
    "another size": ("depth/1.png", lambda path: deep(path, METRES[:20]), "images/1.png, which is 32 × 24 pixels, and 32 × 20"),
    "all zeros": ("depth/1.png", lambda path: deep(path, 0 * METRES), "depth/1.png without a valid pixel"),
    "NaN": ("depth/1.png", wrong(numpy.nan), "depth/1.npy, row 3, column 5: the depth nan"),
    "negative": ("depth/1.png", wrong(-1.0), "depth/1.npy, row 3, column 5: the depth -1.0"),
    "damaged depth": ("depth/1.png", lambda path: path.write_bytes(b"x"), "depth/1.png, which cannot be read"),
    "damaged picture": ("images/1.png", lambda path: path.write_bytes(b"x"), "images/1.png, which cannot be read"),
    "three axes": ("depth/1.png", lambda path: (path.unlink(), numpy.save(path.with_suffix(".npy"), METRES[None])), "(1, 24, 32)"),
    "no pose": ("poses/1.txt", lambda path: path.unlink(), "images/1.png without pose"),
    "a damaged pose": ("poses/1.txt", lambda path: path.write_text(LENS), "poses/1.txt, which holds no pose"),
    "no rotation": ("poses/1.txt", lambda path: path.write_text(POSE.replace("1 0 0 0.5", "2 0 0 0.5")), "holds no pose"),
    "words": ("poses/1.txt", lambda path: path.write_text("a b"), "poses/1.txt, which holds no pose"),
    "no intrinsics": ("intrinsics.txt", lambda path: path.unlink(), "images/0.png without intrinsics"),
    "damaged intrinsics": ("intrinsics.txt", lambda path: path.write_text("0 0 1\n0 0 1\n0 0 1"), "holds no intrinsics"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_its_file_in_check_and_in_training(name, tmp_path):
    file, write, sentence = MISTAKES[name]
    folder = folders(tmp_path / "data", poses=True)
    write(folder / file)
    lines = problems(folder, cameras=2)
    assert any(sentence in line for line in lines) and all("\n" not in line for line in lines), lines
    with pytest.raises(DataError) as error:
        train(TINY.changed(data=str(folder), cameras=2), tmp_path / "run")
    assert len(str(error.value).splitlines()) == 1
    if "pose" in name or "intrinsics" in name or name in ("no rotation", "words"):
        assert problems(folder) == [], "one camera needs neither"


def test_frames_that_are_cut_off_and_folders_of_no_layout(tmp_path):
    frame(tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-3])
    for content in (None, b"", b"\1\0\0\0", struct.pack("<II", 0, 0)):
        if content is not None:
            (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.bin"):
            read_depth(tmp_path / "a.bin", None)
    (tmp_path / "empty").mkdir()
    assert "of no known layout" in problems(tmp_path / "empty")[0]
    assert "no folder" in problems(tmp_path / "nowhere")[0]
    folders(tmp_path / "one", 1)
    assert "with 1 samples" in problems(tmp_path / "one")[0]
    assert "a scene of 1 views" in problems(folders(tmp_path / "three", 1, poses=True), cameras=3)[0]


@pytest.mark.parametrize("layout", ["nyu", "kitti", "visp"])
def test_a_depth_file_without_its_picture_is_named(layout, tmp_path):
    folder = WRITERS[layout](tmp_path)
    kinds = {"nyu": "rgb_00000.jpg", "kitti": "image_02/data/0000000000.png", "visp": "mage_0000.pgm"}
    lost = next(path for path in sorted(folder.rglob("*")) if str(path).endswith(kinds[layout]))
    lost.unlink()
    (line,) = problems(folder)
    assert "has no picture" in line


@pytest.mark.parametrize("separator", [" ", ", ", "\t"])
def test_matrices_are_read_with_any_separator(separator, tmp_path):
    (tmp_path / "a.txt").write_text(POSE.replace(" ", separator))
    assert read_matrix(tmp_path / "a.txt", "pose", tmp_path)[0].tolist() == [1, 0, 0, 0.5]
    (tmp_path / "b.txt").write_text("[[9, 0, 4, 0], [0, 8, 3, 0], [0, 0, 1, 0], [0, 0, 0, 1]]")
    assert read_matrix(tmp_path / "b.txt", "intrinsics", tmp_path).tolist() == [[9, 0, 4], [0, 8, 3], [0, 0, 1]]
