"""A results file names its machine, and a device that cannot be used is a mistake."""

import pytest
import torch

import polymix
from polymix.devices import check_device
from polymix.measure import machine, manifest
from polymix.measure.timing import Timing
from polymix.workflows.show import show


def test_manifest_names_the_machine():
    machine = manifest("cpu", 2)
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 2
    assert machine["cpu"]
    assert machine["gpu"] is None


@pytest.mark.parametrize(
    ("load", "said"), [(1.0, ""), (2.0, ""), (7.4, "The machine is busy: 7.4 programs run or wait for 2 cores")]
)
def test_times_of_a_busy_machine_come_with_a_sentence(monkeypatch, load, said):
    """A call of half a second stood beside a floor of two milliseconds without a word."""
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert machine.busy().startswith(said) and bool(machine.busy()) == bool(said)
    monkeypatch.setattr(
        "polymix.workflows.show.interleaved", lambda calls, seconds: {name: Timing((0.01,)) for name in calls}
    )
    assert any("busy" in sentence for sentence in show("pom", ["n=16"]).sources) == bool(said)


@pytest.mark.parametrize("device", ["meta", "cuda:97", "gpu"])
def test_devices_that_cannot_be_used(device):
    with pytest.raises(polymix.errors.OptionError, match="--device"):
        check_device(device, "--device")
