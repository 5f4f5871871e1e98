"""Every registered mixer goes into the vision transformer in attention's place, or says why it cannot."""

import pytest
import torch

import polymix
from polymix import errors
from polymix.mixers import config_class
from polymix.models import VisionTransformer

# A causal mixer leaves a class token in front nothing to see.
NO_CLASS_TOKEN = {"hyena", "mamba", "local"}


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("name", polymix.list_mixers())
def test_forward_and_backward_in_a_host(name, class_token):
    def host():
        return VisionTransformer(config_class(name)(), image_size=8, patch_size=2, dim=12, depth=2, classes=3,
                                 channels=1, class_token=class_token)  # fmt: skip

    if class_token and name in NO_CLASS_TOKEN:
        with pytest.raises(errors.OptionError, match="class"):
            host()
        return
    model = host()
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
