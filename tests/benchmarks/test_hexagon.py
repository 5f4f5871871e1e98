"""benchmarks/hexagon.py: each case is kept, a failure is a row, and a second run continues."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("onnxruntime_qnn", reason="untested: Hexagon, for which onnxruntime-qnn is needed (the qnn extra)")


@pytest.mark.slow
def test_cases_are_kept_and_failures_are_rows(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hexagon

    out = tmp_path / "out.json"

    def run(*mixers):
        arguments = ["hexagon.py", str(out), "--tokens", "16", "--limit", "120", "--mixers", *mixers]
        monkeypatch.setattr(sys, "argv", arguments)
        hexagon.main()
        return json.loads(out.read_text())["rows"]

    padre, wrong = run("padre", "padre:degree=-1")
    assert (
        padre["works"] and padre["bytes"] > 10_000 and padre["error"] < 0.1 and padre["largest_activation"] >= 16 * 192
    )
    assert not wrong["works"] and "degree" in wrong["reason"]
    again = run("padre", "pom")
    assert again[0] == padre and [row["mixer"] for row in again] == ["padre", "padre:degree=-1", "pom"]
