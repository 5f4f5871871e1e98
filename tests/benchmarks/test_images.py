"""benchmarks/images.py: every step is measured, or left out with a reason."""

import json
import sys
from pathlib import Path

from polymix.domains.generation import sit

ROOT = Path(__file__).parents[2]


def test_a_small_run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setitem(sit.SIZES, "S", {"depth": 1, "dim": 16, "heads": 2})
    import images

    options = ["--mixers", "softmax,padre", "--tokens", "16,64", "--rounds", "1", "--threads", "1", "--longest", "1e-9"]
    monkeypatch.setattr(sys, "argv", ["images.py", str(tmp_path / "out.json"), *options])
    images.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["step"], row["mixer"], row["tokens"]) for row in rows] == [
        (step, mixer, tokens) for step in images.STEPS for mixer in ("softmax", "padre") for tokens in (16, 64)
    ]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows if row["tokens"] == 16)
    assert all(row["left_out"].startswith("over") for row in rows if row["tokens"] == 64)
    held = {row["step"]: row["peak_bytes"] for row in rows if row["mixer"] == "softmax" and row["tokens"] == 16}
    assert held["training"] > held["sampling"]  # the backward pass keeps what sampling drops
