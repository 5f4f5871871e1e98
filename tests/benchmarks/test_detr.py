"""benchmarks/detr.py: sizes of the maps, and what is counted, by hand."""

import json
import sys
from pathlib import Path

import pytest

from polymix.compat import cure_torchvision

cure_torchvision()
pytest.importorskip("transformers", reason="untested: DETR")
pytest.importorskip("timm", reason="untested: DETR")
ROOT = Path(__file__).parents[2]


def test_a_small_run_counts_what_the_layers_take(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import detr

    assert [detr.grid_of(stride) for stride in (32, 16)] == [(25, 42), (50, 84)]
    monkeypatch.setattr(detr, "HEIGHT", 64)
    monkeypatch.setattr(detr, "WIDTH", 90)
    small = {"dim": 16, "heads": 2, "feedforward": 32, "backbone": "test_resnet", "depth": 2, "image_size": 96}
    monkeypatch.setattr(detr, "OPTIONS", small)
    options = ["--mixers", "softmax,poly_sa", "--strides", "32", "--seconds", "0.01", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["detr.py", str(tmp_path / "out.json"), *options])
    detr.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    n, d, hidden, layers = 6, 16, 32, 2
    attention, mlp, norms = 4 * (d * d + d), 2 * d * hidden + d + hidden, 4 * d
    assert [row["mixer"] for row in rows] == ["softmax", "poly_sa"] and rows[0]["tokens"] == n
    assert rows[0]["mixer_parameters"] * 1e6 == pytest.approx(layers * attention)
    assert rows[0]["parameters"] * 1e6 == pytest.approx(layers * (attention + mlp + norms))
    mixing = layers * (4 * n * d * d + 2 * n * n * d)
    assert rows[0]["mixer_multiply_adds"] * 1e9 == pytest.approx(mixing)
    assert rows[0]["multiply_adds"] * 1e9 == pytest.approx(mixing + layers * 2 * n * d * hidden)
    assert all(row["peak_bytes"] > 0 and row["seconds"] > 0 for row in rows)
    assert rows[0]["printed"]["AP"] == 40.6 and rows[1]["printed"] is None
