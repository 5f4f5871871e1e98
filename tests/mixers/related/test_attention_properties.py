"""What the linear-attention family declares and promises: degree, cost, gradients, one graph for every length, hosts."""

import pytest
import torch

from polymix.mixers import config_class
from polymix.mixers.mixer import Polynomial
from polymix.models import VisionTransformer
from tests.helpers import close, slow_but, tokens
from tests.mixers.compiled import graphs
from tests.mixers.related.attention import CAUSAL, FORMS, PAD, make

DECLARED = {key: Polynomial() for key in FORMS} | {
    "linear-3": Polynomial(3), "castling-3": Polynomial(3), "power-3": Polynomial(7), "power": Polynomial(rational=(9, 8)),
    "power-4": Polynomial(rational=(25, 24)), "hla": Polynomial(5),
}  # fmt: skip


@pytest.mark.parametrize("key", slow_but(("linear",), CAUSAL, ("performer", "power", "hla", "mala", "pola")))
def test_causal_compiles_without_breaks(key):
    torch._dynamo.reset()
    mixer, x = make(key).float(), tokens(2, 40, 12, dtype=torch.float32).requires_grad_()
    y = torch.compile(mixer, fullgraph=True, backend="aot_eager")(x, causal=True)
    close(y, mixer(x, causal=True), 1e-5)
    (ours,), (plain,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(mixer(x, causal=True).sum(), x)
    close(ours, plain, 1e-4)


@pytest.mark.parametrize(
    "key",
    slow_but(
        ("linear",),
        ["linear", "efficient", "hydra", "sima", "castling", "relu_linear-free", "xca", "performer", "additive"],
        ("castling", "xca", "additive"),
    ),
)
def test_compiles_with_masks_and_any_length(key):
    masks = [torch.arange(n).expand(2, n) < n - 3 for n in (13, 150, 40)]
    calls = [(tokens(*mask.shape, 12, dtype=torch.float32), {"mask": mask}) for mask in masks]
    assert len(set(graphs(make(key).float(), calls))) == 1, "a new length must not compile again"


@pytest.mark.parametrize("token", [True, False])
def test_scales_in_a_vision_transformer(token):
    """The host's grid and class token reach the branches, and every parameter learns."""
    config = config_class("relu_linear")(scales=(3,))
    host = VisionTransformer(config, image_size=16, patch_size=4, dim=12, depth=1, class_token=token, classes=3)
    host(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in host.parameters())


@pytest.mark.parametrize("key", list(FORMS))
def test_declared_polynomial(key):
    """The (degree + 1)-th difference along a line vanishes where a degree is declared, and some tenth one does not elsewhere."""
    mixer = make(key)
    assert mixer.polynomial == DECLARED[key]
    start, way = tokens(1, 12, 12), tokens(1, 12, 12, seed=1)
    y = torch.stack([mixer(start + t * way) for t in torch.linspace(-1, 1, 12, dtype=torch.float64)])
    degree = mixer.polynomial.degree
    for _ in range(degree + 1 if degree else 10):
        y = y.diff(dim=0)
    assert y.abs().max() < 1e-9 if degree else y.abs().max() > 1e-4


def test_homogeneity_is_declared_where_it_holds():
    x = tokens(1, 12, 12)
    for key, degree, holds in (("linear-3", 3, True), ("castling-3", 3, False), ("power-3", 7, True), ("hla", 5, True)):
        mixer = make(key, bias=False)
        assert mixer.polynomial == Polynomial(degree, homogeneous=holds)
        gap = (mixer(1.7 * x) - 1.7**degree * mixer(x)).abs().max()
        assert (gap < 1e-9) == holds


@pytest.mark.parametrize("key", ["sima-class", "castling-sparse", "focused-sr", "focused-p", "relu_linear-prefix",
                                 "relu_linear-scales"])  # fmt: skip
def test_cost_of_the_further_forms(key):
    from torch.utils.flop_counter import FlopCounterMode

    mixer = make(key)
    with FlopCounterMode(display=False) as counter:
        mixer(tokens(1, 12, 12))
    assert mixer.cost(12).flops == counter.get_total_flops()


@pytest.mark.parametrize("key", ["sima-class", "castling-sparse", "castling-sparse-3", "focused-sr", "focused-p", "relu_linear-prefix",
                                 "linear-mean"])  # fmt: skip
def test_gradients_of_the_further_forms(key):
    mixer, x = make(key), 0.5 * tokens(2, 12, 12).requires_grad_()
    assert torch.autograd.gradcheck(mixer, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(mixer, (0.5 * tokens(1, 12, 12).requires_grad_(),), fast_mode=True)
    mixer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mixer.parameters())


@pytest.mark.parametrize("form", ["relu_linear", "relu_linear-scales"])
@pytest.mark.parametrize("train", [True, False])
def test_gradients_through_batch_norm(form, train):
    """With a cotangent that the norm's mean does not take out."""
    mixer, x = make(form).train(train), tokens(2, 12, 12).requires_grad_()
    weight = tokens(2, 12, 12, seed=3)
    assert torch.autograd.gradcheck(lambda x: mixer(x) * weight, (x,), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: mixer(x, mask=PAD[:2]) * weight * PAD[:2, :, None], (x,), fast_mode=True)
