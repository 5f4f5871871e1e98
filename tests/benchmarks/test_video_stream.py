"""benchmarks/video_stream.py: its attention with a cache is the model's attention, and its results."""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_attention_with_a_cache_is_the_attention_of_the_whole_clip(monkeypatch):
    """Else the times are of something else."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from video_stream import Cached, host

    model = host("softmax", 32, 16, 2).double()
    clip = torch.randn(1, 4, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        cached = Cached(model, 4)
        steps = torch.stack([cached.step(clip[:, frame], frame) for frame in range(4)], 1)
        assert (steps - model(clip)).abs().max() < 1e-12


def test_a_small_run_times_both_by_the_clock_of_the_processor(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import video_stream

    options = ["--side", "32", "--dim", "16", "--depth", "1", "--frames", "1,4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["video_stream.py", str(tmp_path / "out.json"), *options])
    video_stream.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["mixer"], row["frames"]) for row in rows] == [("pom", 1), ("softmax", 1), ("pom", 4), ("softmax", 4)]
    assert all(row["clock"] == "processor" and row["seconds"] > 0 for row in rows)
    kept = {(row["mixer"], row["frames"]): row["kept_bytes"] for row in rows}
    assert kept["softmax", 4] == 2 * 3 * 4 * 16 * 4 and kept["pom", 4] == 32 * 4 + 8, (
        "keys and values; a sum and a count"
    )


def test_the_results_have_long_streams():
    rows = json.loads((ROOT / "benchmarks" / "results" / "video-stream.json").read_text("utf-8"))["rows"]
    seconds = {(row["mixer"], row["frames"]): row["seconds"] for row in rows}
    assert seconds["pom", 512] < seconds["softmax", 512]
