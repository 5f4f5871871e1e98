"""A case is checked against float64; its memory is measured in a process of its own, whatever happens there."""

import os
import signal
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import polymix
from polymix.convert.tracing import call_of
from polymix.measure.case import Setting, case_of, check, prepare
from polymix.measure.memory import MemoryProcess, measure_memory
from polymix.measure.shapes import Shape, near_square
from polymix.mixers import PomMixer, config_class


def setting(tokens=128, pass_="forward", dtype=torch.float32, batch=2):
    return Setting(Shape(tokens=tokens, dim=12, batch=batch, grid=near_square(tokens)), pass_, "cpu", dtype, threads=1)


def check_of(config, its):
    return check(prepare(config, its))


class Deadly:
    """A config whose mixer ends its process."""

    name: ClassVar[str] = "softmax"

    def for_grid(self, *_):
        return self

    def build(self, *_, **__):
        os.kill(os.getpid(), signal.SIGKILL)


class Fatal:
    """A config that ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (1,)


@pytest.fixture(scope="module")
def memory_of():
    with MemoryProcess() as process:
        yield lambda config, its, numbers=True: process.measure(config, its, check_numbers=numbers)


@pytest.mark.parametrize(
    "config", [config_class("relu_linear")(), config_class("latent_gnn")(norm="batch", reduction=1)]
)
def test_a_norm_at_the_end_does_not_cancel_the_gradient(config):
    """The sum of squares behind a batch norm is constant: its gradients were roundings, and the check failed."""
    assert check_of(config, setting(256, "training")) is None


def test_a_backward_pass_through_a_norm_is_no_pass_of_zeros():
    """The gradient of a sum, or of a sum of squares, after a layer norm is zero: a backward pass that costs nothing."""
    norm = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, elementwise_affine=False))
    x = torch.randn(2, 4, 8)
    case = case_of(norm, (x,), {}, "training")
    first, again = (case.outputs() for _ in range(2))
    assert first[1].abs().max() > 1e-3 and torch.equal(first[1], again[1]), "the same one each time"
    grads = call_of(norm, (x,), {}, True)()[1:]
    assert grads[0].abs().max() > 1e-3


@pytest.mark.slow
def test_memory_counts_output_and_intermediates_apart(memory_of):
    memory = memory_of(polymix.PomConfig(expand=4, impl="eager"), setting())  # in C it is held in blocks
    assert memory.failed is None
    assert memory.output_bytes == 4 * 2 * 128 * 12
    assert memory.peak_bytes >= 4 * 2 * 128 * 48, "the widest intermediate is held"
    assert memory.resident_bytes >= 0
    training = memory_of(polymix.PomConfig(expand=4), setting(pass_="training"))
    assert training.failed is None
    assert training.peak_bytes > memory.peak_bytes, "what the backward needs is held beside"


@pytest.mark.slow
def test_resident_growth_is_the_call_s_own(memory_of):
    """100 MiB in this process, or in a call before, are no other call's."""
    ballast = torch.ones(100 << 18)
    small = memory_of(polymix.PomConfig(), setting(), False)
    large = memory_of(polymix.PomConfig(), setting(tokens=1 << 16), False)
    again = memory_of(polymix.PomConfig(), setting(), False)
    assert large.resident_bytes >= large.output_bytes == 4 * 2 * 12 << 16
    assert max(small.resident_bytes, again.resident_bytes) < large.resident_bytes / 2
    assert ballast[0] == 1


def test_a_state_has_a_size_that_does_not_grow(memory_of):
    sizes = [memory_of(polymix.PomConfig(), setting(n, "step")).state_bytes for n in (16, 256)]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(("config", "group", "reason"), [
    (Deadly(), setting(), "ended by the system"), (polymix.PomConfig(), setting(tokens=1 << 30, batch=1 << 14), "out of memory"),
    (polymix.PolyNlConfig(), setting(pass_="step"), "prefill and step"), pytest.param(Fatal(), setting(), "ended from outside", marks=pytest.mark.slow),
    (polymix.QtConfig(heads=5), setting(), "OptionError"),
])  # fmt: skip
def test_whatever_goes_wrong_there_is_a_reason_here(memory_of, config, group, reason):
    assert reason in memory_of(config, group, False).failed
    assert memory_of(polymix.PomConfig(), setting(), False).failed is None, "the next is measured all the same"


def test_a_fold_is_never_made_up():
    folded = setting(pass_="folded", tokens=16)
    assert prepare(polymix.PadreConfig(), folded).mixer.folded, "it is folded before it is timed"
    assert check_of(polymix.PadreConfig(), folded) is None
    assert "something to fold" in measure_memory(polymix.PolyNlConfig(), folded, False).failed
    prepare(polymix.SoftmaxConfig(), folded).call()


@pytest.mark.parametrize("pass_", ["forward", "training", "step"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["padre", "pom", "qt"])
def test_right_code_passes_its_check(name, dtype, pass_):
    config = polymix.mixers.config_class(name)()
    assert check_of(config, setting(tokens=16, pass_=pass_, dtype=getattr(torch, dtype))) is None


@pytest.mark.slow
def test_wrong_code_does_not(monkeypatch):
    """An output that is off is seen in every pass; a gradient that is off in training."""
    mix = PomMixer.mix
    group = setting(16)

    def off(self, x, context, call):
        y = mix(self, x, context, call)
        return y if y.dtype == torch.float64 else y * 1.01

    def off_backward(self, x, context, call):
        y = mix(self, x, context, call)
        return y if y.dtype == torch.float64 else y * 1.01 - 0.01 * y.detach()

    monkeypatch.setattr(PomMixer, "mix", off)
    assert "failed its check" in check_of(polymix.PomConfig(), group)
    assert "failed its check" in measure_memory(polymix.PomConfig(), group, True).failed
    monkeypatch.setattr(PomMixer, "mix", off_backward)
    assert check_of(polymix.PomConfig(), group) is None
    assert "failed its check" in check_of(polymix.PomConfig(), replace(group, pass_="training"))
