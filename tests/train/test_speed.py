"""What a finished run measures of its model's speed and memory."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from polymix.train import rows

TASK = SimpleNamespace(
    unit="clips", size=len, infer=lambda model, batch: model(batch), loss=lambda model, batch: model(batch).sum()
)
PLACE = SimpleNamespace(device="cpu", autocast=nullcontext)


def failing(message):
    def measure(*args, **kwargs):
        raise RuntimeError(message)

    return measure


@pytest.mark.parametrize("which", ["repeated", "peak_memory"])
def test_a_model_too_large_to_measure_in_one_process_is_no_failed_run(monkeypatch, which):
    """Four processes had shared a sequence and saved the model; then the run ended with status 2."""
    model = torch.nn.Linear(3, 2)
    monkeypatch.setattr(rows, which, failing("DefaultCPUAllocator: can't allocate memory: you tried 64 bytes"))
    found = rows.measure_speed(TASK, model, PLACE, torch.ones(4, 3))
    assert found["unit"] == "clips" and found["peak_bytes"] is None
    assert (found["inference_per_second"] is None) == (which == "repeated"), "what was measured before is kept"
    assert model.weight.grad is None


def test_other_errors_of_a_model_are_not_hidden(monkeypatch):
    monkeypatch.setattr(rows, "peak_memory", failing("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        rows.measure_speed(TASK, torch.nn.Linear(3, 2), PLACE, torch.ones(4, 3))
