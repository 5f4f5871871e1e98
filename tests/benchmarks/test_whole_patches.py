"""benchmarks/whole_patches.py: what it counts, and its results."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_small_run_counts_the_ground_once(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import whole_patches

    options = ["--mixers", "softmax,pom", "--side", "28", "--dates", "2", "--dim", "8", "--depth", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["whole_patches.py", str(tmp_path / "out.json"), *options, "--threads", "1"])
    whole_patches.main()
    content = json.loads((tmp_path / "out.json").read_text())
    assert [row["mixer"] for row in content["rows"]] == ["softmax", "pom"] and not content["settings"]["busy"]
    for row in content["rows"]:
        assert list(row["seconds"]) == ["144 places", "196 places", "whole patch", "windows"]
        assert all(value > 0 for value in (*row["seconds"].values(), *row["peak_bytes"].values()))
        for case in ("whole patch", "windows"):
            assert row[f"km2_per_second {case}"] == pytest.approx(28**2 * 1e-4 / row["seconds"][case])


def test_the_results_have_whole_patches_of_pastis_for_attention_and_mixers():
    content = json.loads((ROOT / "benchmarks" / "results" / "whole-patches.json").read_text("utf-8"))
    assert content["settings"]["side"] == 128 and content["settings"]["dim"] == 128
    rows = {row["mixer"]: row["seconds"]["4096 places"] for row in content["rows"]}
    assert {"softmax", "pom", "qt"} <= set(rows) and max(rows["pom"], rows["qt"]) < rows["softmax"]
