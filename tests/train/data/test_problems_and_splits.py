"""One collector of what is wrong in data, even spreading, and what the test keeps."""

import pytest
import torch
from matplotlib.figure import Figure

from polymix.errors import DataError, MissingExtraError
from polymix.train.data.drawing import draw_annotated, draw_truth_and_prediction, grid_of, save_figure, with_objects
from polymix.train.data.pictures import read_picture
from polymix.train.data.problems import Problems
from polymix.train.data.splits import checksum_of, held_out, natural, spread


def test_a_problem_names_file_and_entry():
    problems = Problems()
    assert not problems
    problems.settle("refuse")
    problems.add("a.json", "image 3", "is missing")
    problems.add("b.png", "", "is empty")
    with problems.noting("line 4"):
        raise DataError("data", "c.png, which cannot be read (it is short)", "a picture", "")
    with pytest.raises(MissingExtraError), problems.noting():
        raise MissingExtraError("pillow")  # says nothing of the data
    assert problems.lines == ["a.json: image 3: is missing", "b.png: is empty",
                                  "line 4: c.png, which cannot be read (it is short)"]  # fmt: skip
    assert len(problems) == 3
    with pytest.raises(ZeroDivisionError), problems.noting():
        1 / 0  # noqa: B018 - a fault of ours is no problem of the data


def test_problems_are_refused_or_left_out():
    problems = Problems(["a.json: image 3: is missing", "b.png: is empty"])
    with pytest.raises(DataError, match=r"a.json: image 3: is missing \(1 more\).*--check"):
        problems.settle("refuse")
    said = []
    problems.settle("skip", said.append)
    assert said == ["Left out 2 entries, the first: a.json: image 3: is missing"]


def test_spread_and_held_out():
    assert spread(10, 4) == [0, 2, 5, 7] and spread(3, 9) == [0, 1, 2] and spread(0, 5) == []
    train, test = held_out(list("abcdefg"))
    assert test == ["a", "f"] and train == ["b", "c", "d", "e", "g"]
    assert sorted(["10.png", "9.png", "a2b10", "a2b9", "²", "1"], key=natural) == [
        "1",
        "9.png",
        "10.png",
        "a2b9",
        "a2b10",
        "²",
    ]


def test_a_checksum_tells_other_contents_and_another_order():
    assert checksum_of([b"1", b"2"]) == checksum_of([b"12"]) != checksum_of([b"2", b"1"])


@pytest.mark.draws
def test_boxes_and_masks_are_drawn_and_a_backward_box_is_no_error(tmp_path):
    pixels = torch.full((3, 40, 60), 90, dtype=torch.uint8)
    boxes = torch.tensor([[5.0, 6.0, 30.0, 20.0], [50.0, 39.0, 40.0, 30.0], [-9.0, -9.0, 99.0, 99.0]])
    masks = torch.zeros(3, 40, 60, dtype=torch.bool)
    masks[0, 25:30, 30:38] = True
    drawn = with_objects(pixels, boxes, ["cat 0.9", "dog 0.8", "cat 0.1"], masks)
    assert drawn.shape == (3, 240, 360), "enlarged by a whole number, so that names can be read"
    assert (drawn[:, 27 * 6, 34 * 6] != 90).any(), "the mask is not there"
    assert (drawn[:, 15 * 6, 5 * 6] != 90).any() and (drawn[:, 23 * 6, 20 * 6] == 90).all()
    assert torch.equal(with_objects(pixels, boxes[:0], [])[:, ::6, ::6], pixels)
    large = with_objects(torch.zeros(3, 1500, 3000, dtype=torch.uint8), boxes, ["a", "b", "c"])
    assert large.shape == (3, 512, 1024), "shrunk, so that names can be read"
    draw_annotated(tmp_path / "a.png", pixels, boxes, ["cat", "dog", "cat"], masks)
    assert read_picture(tmp_path / "a.png").shape == (3, 240, 360)
    objects = {"boxes": boxes, "labels": torch.tensor([0, 1, 0])}
    predicted = {**objects, "scores": torch.tensor([0.9, 0.8, 0.1])}
    draw_truth_and_prediction([(pixels, objects, predicted)], ["cat", "dog"], tmp_path / "b.png", 0.5)
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_a_grid_has_all_pictures_and_a_figure_is_written_whole(tmp_path):
    grid = grid_of(torch.zeros(5, 1, 4, 4), columns=3)
    assert grid.shape == (3, 9, 14) and grid[:, :4, :4].sum() == 0 and grid.max() == 1

    class Failing(Figure):
        def savefig(self, part, **options):
            part.write_bytes(b"half")
            raise OSError("no room")

    with pytest.raises(OSError):
        save_figure(tmp_path / "a.png", Failing())
    assert not list(tmp_path.iterdir())
