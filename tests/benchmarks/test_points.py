"""benchmarks/points.py: every cell is measured, or left out with a reason."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import points

    options = ["--mixers", "softmax,padre", "--points", "40,100", "--windows", "16,0", "--dim", "8", "--heads", "2",
               "--rounds", "1", "--threads", "1", "--longest", "1e-9", "--clouds", "1,4", "--curve-points", "100"]  # fmt: skip
    monkeypatch.setattr(points, "SPLIT", 96)
    monkeypatch.setattr(sys, "argv", ["points.py", str(tmp_path / "out.json"), *options])
    points.main()
    content = json.loads((tmp_path / "out.json").read_text())
    rows = content["rows"]
    assert [(row["mixer"], row["window"], row["points"]) for row in rows] == [
        (mixer, window, n) for mixer in ("softmax", "padre") for window in (16, 0) for n in (40, 100)
    ]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows if row["points"] == 40)
    assert all(row["left_out"].startswith("about") for row in rows if row["points"] == 100)
    assert [(row["mixer"], row["clouds"]) for row in content["clouds"]] == [("padre", 1), ("padre", 4)]
    assert {row["clock"] for row in rows if "seconds" in row} == {"wall"}
    assert {row["clock"] for row in content["clouds"]} == {"processor"}
    assert set(content["curves"]) == {"z_order", "hilbert"} and min(content["curves"].values()) > 0
