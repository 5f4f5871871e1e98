"""The floors of benchmarks/whole_models.py, and its results."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.models import VisionTransformer

ROOT = Path(__file__).parents[2]
CONTENT = json.loads((ROOT / "benchmarks" / "results" / "whole-models.json").read_text("utf-8"))
ROWS = [row for rows in CONTENT["pieces"].values() for row in rows]


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from whole_model_steps import floor, profile

    yield floor, profile
    for name in [name for name in sys.modules if name.startswith("whole_model_steps")]:
        del sys.modules[name]


@pytest.mark.parametrize("mixer", [polymix.SoftmaxConfig(heads=2), polymix.PomConfig()])
def test_a_floor_has_every_product_of_the_model(steps, mixer):
    model = VisionTransformer(mixer, image_size=16, patch_size=4, dim=16, depth=2, classes=3).eval()
    images = torch.randn(1, 3, 16, 16)
    ops = steps[0].products_of(model, {"images": images})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    mixing = sum(2 * count * op.multiply_adds for op, count in ops.items() if op.kind == "attention")
    products = sum(2 * count * op.multiply_adds for op, count in ops.items()) - mixing
    counted = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))
    assert products == pytest.approx(counted, rel=0.02)


def test_the_parts_of_a_call_add_up(steps):
    x = torch.randn(64, 64)
    parts = steps[1].parts_of(lambda: torch.nn.functional.gelu(x @ x))
    assert parts["products"] > 0 and parts["activations"] > 0 and parts["norms"] == 0


def test_the_results_say_where_they_come_from_and_are_whole():
    assert {"cpu", "threads", "torch", "timm", "transformers"} <= set(CONTENT["machine"])
    assert {row["mixer"] for row in ROWS} >= {"attention", "padre", "pom", "qt", "poly_nl"}
    for row in ROWS:
        assert min(row[key] for key in ("plain", "optimized", "attention", "attention_optimized", "floor")) > 0
