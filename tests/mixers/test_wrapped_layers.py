"""A linear layer that a library wraps, as LoRA does, takes part as wrapped, whichever implementation runs."""

import copy

import pytest
import torch
from torch import nn

from polymix.structured import Dense
from tests.helpers import build, close, tokens

CASES = {
    "padre": {"grid": (5, 7), "degree": 3, "kernel_size": 3}, "pom": {}, "qt": {"heads": 2}, "poly_nl": {"reduction": 2},
    "poly_sa": {"positions": "mean"}, "softmax": {}, "linear_floor": {},
}  # fmt: skip


class LowRank(nn.Module):
    """What LoRA's layers are: the layer itself, kept as `base_layer`, and a product of two thin maps beside it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.down = nn.Parameter(0.3 * torch.randn(2, self.in_features, dtype=base_layer.weight.dtype))
        self.up = nn.Parameter(0.3 * torch.randn(self.out_features, 2, dtype=base_layer.weight.dtype))

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("impl", ["eager", "auto"])
@pytest.mark.parametrize("name", list(CASES))
def test_a_wrapped_layer_is_not_passed_by(name, impl):
    mixer = build(name, 12, impl=impl, **CASES[name]).double()
    x, layers = tokens(2, 35, 12), [key for key, part in mixer.named_modules() if isinstance(part, Dense)]
    assert layers
    for key in layers:
        wrapped, merged = copy.deepcopy(mixer), copy.deepcopy(mixer)
        owner, _, last = key.rpartition(".")
        layer = LowRank(wrapped.get_submodule(key))
        wrapped.get_submodule(owner)._modules[last] = layer
        with torch.no_grad():
            merged.get_submodule(key).weight += layer.up @ layer.down
        leaves = (layer.up, layer.base_layer.weight)
        y = wrapped(x)
        close(y, merged(x), 1e-12)
        assert all(grad.any() for grad in torch.autograd.grad(y.square().sum(), leaves)), f"{key} does not learn"
        with torch.no_grad():
            close(wrapped.float()(x.float()).double(), merged(x), 1e-4)
