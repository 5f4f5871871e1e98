"""A cell is measured in a process of its own, whatever becomes of it there, and no number stands for wrong code."""

import os
import signal
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import polymix
from polymix.measure.case import prepare, wrong
from polymix.measure.memory import Apart, measure
from polymix.mixers import PomMixer
from polymix.workflows.bench.settings import Group

GROUP = Group(tokens=128, dim=12, batch=2, dtype="float32", pass_="forward", threads=1)


class Deadly:
    """A config whose mixer takes its process with it."""

    name: ClassVar[str] = "softmax"

    def build(self, *_, **__):
        os.kill(os.getpid(), signal.SIGKILL)


class Fatal:
    """A config that ends the process that reads it."""

    def __reduce__(self):
        return os._exit, (1,)


@pytest.fixture(scope="module")
def apart():
    with Apart() as process:
        yield process


def test_memory_counts_output_and_intermediates_apart(apart):
    memory = apart.measure(polymix.PomConfig(expand=4), GROUP, "cpu", check=True)
    assert memory.failed is None
    assert memory.output_bytes == 4 * 2 * 128 * 12
    assert memory.peak_bytes >= 4 * 2 * 128 * 48, "the widest intermediate is held"
    assert memory.resident_bytes >= 0
    training = apart.measure(polymix.PomConfig(expand=4), replace(GROUP, pass_="training"), "cpu", check=True)
    assert training.failed is None
    assert training.peak_bytes > memory.peak_bytes, "what the backward needs is held beside"


def test_resident_growth_is_the_call_s_own(apart):
    """100 MiB in this process, or in a call before, are no other call's."""
    ballast = torch.ones(100 << 18)
    small = apart.measure(polymix.PomConfig(), GROUP, "cpu", check=False)
    large = apart.measure(polymix.PomConfig(), replace(GROUP, tokens=1 << 16), "cpu", check=False)
    again = apart.measure(polymix.PomConfig(), GROUP, "cpu", check=False)
    assert large.resident_bytes >= large.output_bytes == 4 * 2 * 12 << 16
    assert max(small.resident_bytes, again.resident_bytes) < large.resident_bytes / 2
    assert ballast[0] == 1


def test_a_state_has_a_size_that_does_not_grow(apart):
    sizes = [
        apart.measure(polymix.PomConfig(), replace(GROUP, pass_="step", tokens=n), "cpu", check=True).state_bytes
        for n in (16, 256)
    ]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(("config", "group", "reason"), [
    (Deadly(), GROUP, "ended by the system"), (polymix.PomConfig(), replace(GROUP, tokens=1 << 44), "out of memory"),
    (polymix.PolyNlConfig(), replace(GROUP, pass_="step"), "prefill and step"), (Fatal(), GROUP, "ended from outside"),
    (polymix.QtConfig(heads=5), GROUP, "OptionError"),
])  # fmt: skip
def test_whatever_goes_wrong_there_is_a_reason_here(apart, config, group, reason):
    assert reason in apart.measure(config, group, "cpu", check=False).failed
    assert apart.measure(polymix.PomConfig(), GROUP, "cpu", check=False).failed is None, (
        "the next is measured all the same"
    )


def test_a_fold_is_never_made_up():
    folded = replace(GROUP, pass_="folded", tokens=16)
    assert prepare(polymix.PadreConfig(), folded, "cpu").mixer.folded, "it is folded before it is timed"
    assert wrong(polymix.PadreConfig(), folded, "cpu") is None
    assert "something to fold" in measure(polymix.PolyNlConfig(), folded, "cpu", False).failed
    prepare(polymix.SoftmaxConfig(), folded, "cpu").call()


@pytest.mark.parametrize("pass_", ["forward", "training", "step"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["padre", "pom", "qt"])
def test_right_code_passes_its_check(name, dtype, pass_):
    config = polymix.mixers.config_class(name)()
    assert wrong(config, replace(GROUP, tokens=16, pass_=pass_, dtype=dtype), "cpu") is None


def test_wrong_code_does_not(monkeypatch):
    """An output that is off is seen in every pass; a gradient that is off in training."""
    mix = PomMixer.mix
    group = replace(GROUP, tokens=16)

    def off(self, x, context, call):
        y = mix(self, x, context, call)
        return y if y.dtype == torch.float64 else y * 1.01

    def off_backward(self, x, context, call):
        y = mix(self, x, context, call)
        return y if y.dtype == torch.float64 else y * 1.01 - 0.01 * y.detach()

    monkeypatch.setattr(PomMixer, "mix", off)
    assert "failed its check" in wrong(polymix.PomConfig(), group, "cpu")
    assert "failed its check" in measure(polymix.PomConfig(), group, "cpu", True).failed
    monkeypatch.setattr(PomMixer, "mix", off_backward)
    assert wrong(polymix.PomConfig(), group, "cpu") is None
    assert "failed its check" in wrong(polymix.PomConfig(), replace(group, pass_="training"), "cpu")
