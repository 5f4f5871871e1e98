"""Forward-mode derivatives and torch.func, for every mixer: against central differences."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.contracts.mixer_cases import CASES
from tests.helpers import build, close, tokens

X, TANGENT = tokens(2, 12, 12), tokens(2, 12, 12, seed=1)
REAL = torch.ones(2, 12, dtype=torch.bool)
REAL[0, 8:] = False
CASES = {**CASES, "pom-authors": ("pom", {"activation": "clamped_leaky_relu", "gate": "hardsigmoid"})}
MIXERS = {key: build(name, 12, **options) for key, (name, options) in CASES.items()}


def ways(mixer):
    yield {}
    if mixer.capabilities.has("padding"):
        yield {"mask": REAL}
    if mixer.capabilities.causal:
        yield {"causal": True}


def difference(function, x, tangent):
    """The Jacobian times a tangent, by central differences."""
    step = 1e-6 * tangent
    return (function(x + step) - function(x - step)) / 2e-6


def gradient(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


@pytest.mark.parametrize("key", list(CASES))
def test_jvp(key):
    mixer = MIXERS[key]
    for options in ways(mixer):
        expected = difference(lambda x, options=options: mixer(x, **options), X, TANGENT).detach()
        y, product = torch.func.jvp(lambda x, options=options: mixer(x, **options), (X,), (TANGENT,))
        close(y, mixer(X, **options), 1e-11)
        close(product, expected, 1e-6)
        with forward_ad.dual_level():
            dual = mixer(forward_ad.make_dual(X, TANGENT), **options)
            close(forward_ad.unpack_dual(dual).tangent, product, 1e-11)


@pytest.mark.parametrize("key", list(CASES))
def test_second_derivatives_forward_over_reverse(key):
    """What torch.func.hessian is made of: the gradient's Jacobian times a tangent."""
    mixer = MIXERS[key]

    def loss(x):
        return mixer(x).square().sum()

    product = torch.func.jvp(torch.func.grad(loss), (X,), (TANGENT,))[1]
    close(product, difference(lambda x: gradient(loss, x), X, TANGENT), 1e-6)


@pytest.mark.parametrize("name", ["softmax", "padre", "pom", "qt", "mamba"])
def test_hessian(name):
    mixer = build(name, 4)
    x = X[:1, :3, :4]

    def loss(x):
        return mixer(x).square().sum()

    expected = [difference(lambda x: gradient(loss, x), x, basis.view_as(x)) for basis in torch.eye(12, dtype=x.dtype)]
    close(torch.func.hessian(loss)(x), torch.stack(expected).view(*x.shape, *x.shape), 1e-6)
