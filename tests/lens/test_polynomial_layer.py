"""The layer of Poly-NL's Eq. 1, fitted to modules and tensors in each of its forms."""

import pytest
import torch

from polymix import lens
from polymix.errors import OptionError, ShapeError
from polymix.lens import PolynomialLayer
from tests.helpers import build, close, slow_but, tokens

N, C = 3, 2
EXACT = [{"form": "dense"}, {"form": "tucker"}, {"form": "block_sparse"}]


@pytest.mark.parametrize("options", slow_but(EXACT[:1], EXACT), ids=lambda options: options["form"])
@pytest.mark.parametrize(("name", "mixer"), [
    ("poly_nl", {"order": "2+3"}), ("padre", {"degree": 3, "grid": (N,), "kernel_size": 3}),
    ("poly_sa", {"heads": 1, "grid": (N,), "sigma": "identity"}),
])  # fmt: skip
def test_a_layer_is_the_module_it_was_fitted_to(name, mixer, options):
    """Every order with its biases, as Eq. 1 says; a batch as single sequences."""
    module, x = build(name, C, **mixer), tokens(4, N, C, seed=1)
    layer = PolynomialLayer.fit(module, tokens=N, **options)
    close(layer(x), module(x), 1e-9)
    assert max(layer.errors.values()) < 1e-9 and sorted(layer.errors) == [0, 1, 2, 3]
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_the_products_of_a_tensor_are_found():
    """A sum of two products of vectors is fitted by two, and by one is not."""
    factors = [tokens(size, 2, seed=place) for place, size in enumerate((N, C) * 3)]
    weights = lens.WeightTensor(2, torch.einsum("ar,br,cr,dr,er,fr->abcdef", *factors))
    two, one = (PolynomialLayer.fit(weights, form="cp", rank=rank) for rank in (2, 1))
    assert two.errors[2] < 1e-6 < 1e-2 < one.errors[2]
    x = tokens(3, N, C, seed=9)
    close(two(x), torch.stack([weights(part) for part in x]), 1e-5)
    assert two.stored[2] == 2 * 3 * (N + C) < weights.weights.numel()


def test_tucker_cuts_the_ranks_that_it_is_told():
    weights = lens.tensor(build("poly_nl", C, bias=False), 3, tokens=N)
    whole, cut = PolynomialLayer.fit(weights, form="tucker"), PolynomialLayer.fit(weights, form="tucker", rank=1)
    assert tuple(whole.parts["3"].core.shape) == weights.ranks
    assert whole.errors[3] < 1e-9 < 0.1 < cut.errors[3] < 1


def test_the_largest_blocks_stay():
    """Of a diagonal of two blocks, half of the blocks that are not zero keep the larger."""
    given = torch.block_diag(torch.full((2, 2), 3.0), torch.ones(2, 2)).double().reshape(4, 1, 4, 1)
    weights = lens.WeightTensor(1, given.expand(4, 2, 4, 2).contiguous())
    layer = PolynomialLayer.fit(weights, form="block_sparse", block=2, keep=0.25)
    assert layer.stored[1] == 2**4
    assert torch.equal(layer.parts["1"].weights()[:2, :, :2], weights.weights[:2, :, :2])
    assert layer.errors[1] == pytest.approx((1 / 10) ** 0.5)


def test_a_mask_stays_in_training():
    module = build("poly_nl", C, bias=False)
    weights = lens.tensor(module, 3, tokens=N)
    mask = torch.rand(weights.weights.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    layer = PolynomialLayer.fit(weights, masks={3: mask})
    layer(tokens(2, N, C)).square().sum().backward()
    with torch.no_grad():
        layer.parts["3"].values -= layer.parts["3"].values.grad
    assert not layer.parts["3"].weights()[~mask].any()


@pytest.mark.parametrize(("source", "options", "error"), [
    (torch.sin, {"shape": (1, N, C)}, OptionError), (torch.square, {"shape": (1, N, C), "form": "svd"}, OptionError),
    (torch.square, {"shape": (1, N, C), "form": "cp"}, OptionError),
    (torch.square, {"shape": (1, N, C), "form": "block_sparse", "block": 2}, OptionError),
    (torch.square, {"shape": (1, N, C), "masks": {2: torch.ones(1, dtype=torch.bool)}}, ShapeError), ([], {}, OptionError),
    ([1, 2], {}, OptionError),
])  # fmt: skip
def test_what_it_cannot_fit_is_refused(source, options, error):
    with pytest.raises(error):
        PolynomialLayer.fit(source, **options)
