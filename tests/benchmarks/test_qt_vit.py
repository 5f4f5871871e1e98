"""benchmarks/qt_vit.py: both families are measured, and what is not measured anew is kept."""

import json
import sys
from pathlib import Path

import pytest

from polymix.compat import cure_torchvision

ROOT = Path(__file__).parents[2]
cure_torchvision()
pytest.importorskip("timm", reason="untested: EfficientViT, without timm")


@pytest.mark.slow
@pytest.mark.draws
def test_both_families_are_timed_trained_and_drawn(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import qt_vit

    def run(*options):
        out, picture = tmp_path / "out.json", tmp_path / "out.png"
        monkeypatch.setattr(
            sys, "argv", ["qt_vit.py", str(out), str(picture), "--sizes", "b0", "--threads", "1", *options]
        )
        qt_vit.main()
        assert picture.stat().st_size > 5000
        return json.loads(out.read_text())

    first = run("--rounds", "1", "--side", "64", "--epochs", "0", "--busy")
    assert [row["mixer"] for row in first["rows"]] == ["keep", "qt"] and first["settings"]["busy"]
    assert all(row["milliseconds"] > 0 and row["accuracy"] is None for row in first["rows"])
    second = run("--rounds", "0", "--epochs", "1", "--images", "64")
    assert [row["milliseconds"] for row in second["rows"]] == [row["milliseconds"] for row in first["rows"]]
    assert all(0 <= row["accuracy"] <= 1 for row in second["rows"])
