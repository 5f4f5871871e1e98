"""A results file names its machine, and a device that cannot be used is a mistake."""

import pytest
import torch

import polymix
from polymix.devices import check_device
from polymix.measure import manifest


def test_manifest_names_the_machine():
    machine = manifest("cpu", 2)
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 2
    assert machine["cpu"]
    assert machine["gpu"] is None


@pytest.mark.parametrize("device", ["meta", "cuda:97", "gpu"])
def test_devices_that_cannot_be_used(device):
    with pytest.raises(polymix.errors.OptionError, match="--device"):
        check_device(device, "--device")
