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
