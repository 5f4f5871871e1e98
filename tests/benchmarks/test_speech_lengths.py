"""benchmarks/speech_lengths.py: a small run measures both mixers, by the processor's clock."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run_measures_time_and_memory_of_both(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speech_lengths

    options = ["--seconds", "1,2", "--dim", "16", "--depth", "1"]
    monkeypatch.setattr(sys, "argv", ["speech_lengths.py", str(tmp_path / "out.json"), *options])
    speech_lengths.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["mixer"], row["tokens"]) for row in rows] == [
        ("pom", 25), ("softmax", 25), ("pom", 50), ("softmax", 50),
    ]  # fmt: skip
    for row in rows:
        assert row["clock"] == "processor" and row["training_s"] > 0 and row["inference_s"] > 0
        assert row["training_bytes"] > row["inference_bytes"] > 0, "a training step keeps what the backward pass needs"
