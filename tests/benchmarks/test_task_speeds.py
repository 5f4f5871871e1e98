"""benchmarks/task_speeds.py and benchmarks/handwriting_lines.py: what they time, and their results."""

import json
import sys
from pathlib import Path

import pytest

from polymix.errors import OptionError

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "benchmarks" / "results" / "tasks"


@pytest.fixture
def script(monkeypatch):
    def run(name, *arguments):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        __import__(name).main()

    return run


def test_speeds_take_the_place_of_those_in_the_file(script, tmp_path):
    rows = [{"mixer": name, "unit": "km2", "metrics": {"miou": 0.5}, "training_per_second": None,
             "inference_per_second": None} for name in ("pom", "pom (1:1)")]  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows, "machine": "x"}))
    script("task_speeds", "satellite", tmp_path / "results.json", "--rounds", "1")
    content = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert all(0 < row["training_per_second"] < row["inference_per_second"] for row in content["rows"])
    assert content["rows"][0]["metrics"] == {"miou": 0.5} and "processor time" in content["speeds"]
    assert all(row["clock"] == "processor" for row in content["rows"])


@pytest.mark.slow
def test_speeds_are_of_the_options_that_are_set(script, tmp_path):
    """Else the rows of anomalies would have the speeds of forecasts."""
    row = {"mixer": "pom", "unit": "windows", "metrics": {}}
    (tmp_path / "results.json").write_text(json.dumps({"rows": [row]}))
    options = ["--rounds", "1", "--set", "goal=anomalies", "--set", "dim=8"]
    script("task_speeds", "timeseries", tmp_path / "results.json", *options)
    content = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert content["rows"][0]["training_per_second"] > 0 and "--set goal=anomalies --set dim=8" in content["speeds"]
    with pytest.raises(OptionError, match="chance"):
        script("task_speeds", "timeseries", tmp_path / "results.json", "--set", "chance=1")


def test_lines_are_timed_in_several_calls(script, tmp_path):
    options = ["--dim", "24", "--only", "softmax,hybrid", "--rounds", "1", "--threads", "1", "--processor-time"]
    for lines in (2, 1):
        script("handwriting_lines", tmp_path / "lines.json", "--lines", lines, *options)
    content = json.loads((tmp_path / "lines.json").read_text("utf-8"))
    assert [(row["model"], row["lines"], row["tokens"]) for row in content["rows"]] == [
        ("softmax", 1, 128), ("hybrid", 1, 128), ("softmax", 2, 256), ("hybrid", 2, 256)]  # fmt: skip
    for row in content["rows"]:
        assert row["clock"] == "processor"
        assert row["lines_per_second"] == pytest.approx(
            row["lines"] / (row["stem_seconds"] + row["transformer_seconds"]), abs=1e-3
        )


@pytest.mark.parametrize("task", ["satellite", "handwriting"])
def test_the_tables_of_results_have_every_speed(task):
    rows = json.loads((TASKS / task / "results.json").read_text("utf-8"))["rows"]
    assert {"softmax", "pom", "linear_floor"} <= {row["mixer"] for row in rows}
    assert all(row["training_per_second"] and row["inference_per_second"] for row in rows)
