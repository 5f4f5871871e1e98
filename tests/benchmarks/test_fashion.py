"""benchmarks/fashion.py: one teacher for all rows, which are saved one by one and continued."""

import json
import sys
from pathlib import Path

import pytest
import torch

from polymix.train.data import idx
from tests.domains.idx_files import CLASSES, write_idx

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fashion

    monkeypatch.setattr(idx, "INSTALLED", write_idx(tmp_path / "set", (28, 28)))
    tiny = fashion.RECIPE.changed(dim=12, depth=4, batch_size=4, epochs=2.0)
    monkeypatch.setattr(fashion, "RECIPE", tiny)
    monkeypatch.setattr(fashion, "BATCH", 2)
    monkeypatch.chdir(tmp_path)

    def run(plans, steps="4", *others):
        words = ["out.json", "--folder", "kept", "--plans", plans, "--steps", steps, *others]
        monkeypatch.setattr(sys, "argv", ["fashion.py", *words])
        fashion.main()
        return json.loads(Path("out.json").read_text())

    return run


@pytest.mark.slow
def test_rows_are_of_one_teacher_and_are_not_made_twice(script):
    first = script("qt")
    weights = Path("kept/fashion-12-2/model.pt").stat().st_mtime_ns
    second = script("qt,pom in 6 of 12", "4,8")
    assert second["rows"][:2] == first["rows"] and second["teacher"] == first["teacher"]
    assert Path("kept/fashion-12-2/model.pt").stat().st_mtime_ns == weights, "the teacher was trained again"
    made = [(row["plan"], row["steps"]) for row in second["rows"]]
    assert made == [("qt", 0), ("qt", 4), ("qt", 8), *(("pom in 6 of 12", steps) for steps in (0, 4, 8))]
    assert second["test"] == CLASSES and all(row["accuracy"] * CLASSES % 1 == 0 for row in second["rows"])


@pytest.mark.slow
def test_parts_share_the_plans_of_a_teacher_in_half_precision(script, tmp_path):
    with pytest.raises(FileNotFoundError):
        script("none", "4", "--half", "--data", str(tmp_path / "set"))
    weights = torch.load("kept/fashion-12-2/model.pt", weights_only=True)
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    for part in ("0/2", "1/2"):
        content = script("qt,padre,linear", "4", "--part", part)
    made = [(row["plan"], row["steps"]) for row in content["rows"]]
    assert made == [("qt", 0), ("qt", 4), ("linear", 0), ("linear", 4), ("padre", 0), ("padre", 4)]
    assert content["teacher"]["recipe"]["data"] == "fashion-mnist", "a path of one machine"


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others(script, monkeypatch):
    import fashion

    made = fashion.recovered
    monkeypatch.setattr(
        fashion, "recovered", lambda teacher, plan, *more: made(teacher, {"qt": 1}.get(plan, plan), *more)
    )
    with pytest.raises(SystemExit, match="qt, 4 steps: KeyError: 1"):
        script("qt,linear")
    assert [row["plan"] for row in json.loads(Path("out.json").read_text())["rows"]] == ["linear", "linear"]


@pytest.mark.slow
def test_rows_of_two_teachers_are_not_mixed(script, capsys):
    script("qt")
    with pytest.raises(SystemExit):
        script("pom", "4", "--dim", "24")
    assert "another teacher" in capsys.readouterr().err


@pytest.mark.slow
def test_a_teacher_for_enlarged_pictures_is_tuned_once(script, capsys):

    first = script("qt", "4", "--image-size", "56", "--patch", "7", "--tune", "2")
    teacher = first["teacher"]
    assert teacher["recipe"]["image_size"] == 56 and teacher["tuning"]["passes"] == 2
    file = Path("kept/fashion-12-56-7-2.pt")
    made = file.stat().st_mtime_ns
    second = script("qt,pom", "4", "--image-size", "56", "--patch", "7", "--tune", "2")
    assert file.stat().st_mtime_ns == made, "the teacher was tuned again"
    assert second["rows"][:2] == first["rows"] and [row["plan"] for row in second["rows"]] == ["qt"] * 2 + ["pom"] * 2
    with pytest.raises(SystemExit):
        script("qt")
    assert "another teacher" in capsys.readouterr().err, "rows of two sizes were mixed"


def test_enlarged_in_the_same_proportion_a_teacher_answers_as_before(script):
    import fashion

    torch.manual_seed(0)
    teacher = fashion.ClassifyTask(fashion.RECIPE)._model(1, 10).eval()
    with torch.no_grad():  # a patch map that sees no detail, and so loses none
        teacher.embed.weight[:] = teacher.embed.weight.mean((2, 3), keepdim=True)
    images = torch.rand(3, 1, 4, 4).repeat_interleave(7, 2).repeat_interleave(7, 3)  # a colour for each patch
    larger = fashion.resized(teacher, 56, 14).eval()
    larger[0] = torch.nn.Upsample(scale_factor=2)  # without the blur between colours
    assert torch.allclose(larger(images), teacher(images), atol=1e-5), "the patch map or the positions were changed"
    assert fashion.resized(teacher, 56, 7)[1].position.shape[1] == 64


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--image-size", "224", "--patch", "15"], "a multiple of the patch"),
        (["--image-size", "21"], "at least 28"),
        (["--patch", "0"], "a multiple of the patch"),
        (["--tune", "1"], "leave it out"),
        (["--patch", "14", "--tune", "0"], "more than 0"),
        (["--patch", "14", "--tune", "nan"], "more than 0"),
    ],
)
def test_sizes_that_do_not_combine_are_refused_before_anything_is_read(script, capsys, options, named):
    with pytest.raises(SystemExit):
        script("qt", "4", *options)
    assert named in capsys.readouterr().err
    assert not Path("kept").exists()
