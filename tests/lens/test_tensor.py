"""W^[d] of polynomial modules, and what Poly-NL and Poly-SA say about it (Sec. 3 and 4)."""

import itertools

import pytest
import torch

import polymix
from polymix import lens
from polymix.errors import OptionError, ShapeError
from tests.helpers import build, close, tokens

N, C = 3, 2
W_f, W_g = tokens(C, C, seed=1), tokens(C, C, seed=2)


def non_local(x):
    """Y = X W_f Xᵀ X W_g (Eq. 7)."""
    return x @ W_f @ x.mT @ x @ W_g


def symmetric(weights):
    """The mean of a W^[3] over all orders of its factors."""
    orders = itertools.permutations([(2, 3), (4, 5), (6, 7)])
    return sum(weights.permute(0, 1, *sum(order, ())) for order in orders) / 6


def test_non_local_is_zero_where_c_is_not_a_and_g_is_not_e():
    """W^[3] of the non-local block is w_f(d, f) w_g(h, b) where c = a and g = e, and zero elsewhere (after Eq. 8)."""
    same = torch.eye(N, dtype=torch.float64)
    paper = torch.einsum("ac,eg,df,hb->abcdefgh", same, same, W_f, W_g)
    found = lens.tensor(non_local, 3, shape=(1, N, C))
    assert found.weights.shape == (N, C) * 4 and found.weights.ndim == 2 * (3 + 1)
    close(found.weights, symmetric(paper), 1e-12)
    allowed = symmetric(torch.einsum("ac,eg,d,f,h,b->abcdefgh", same, same, *torch.ones(4, C, dtype=torch.float64)))
    assert not found.weights[allowed == 0].any(), "a product without two equal tokens and the output's own"
    assert found.sparsity.reached == int((allowed > 0).sum())


def test_a_factorised_block_has_the_ranks_and_the_sharing_of_its_factors():
    """With W_g of rank 1 the output's channels have rank 1; one pair of maps serves all N² pairs of tokens."""
    thin = tokens(C, 1, seed=3) @ tokens(1, C, seed=4)
    found = lens.tensor(lambda x: x @ W_f @ x.mT @ x @ thin, 3, shape=(1, N, C))
    assert found.ranks == (N, 1, *(N, C) * 3)
    assert found.symmetries == {"tokens": True, "shifts": True, "channels": False}
    assert found.distinct < found.sparsity.reached / N
    assert "W^[3], 3 × 2 × 3 × 2" in str(found) and "tokens, shifts" in str(found)


@pytest.mark.parametrize("module", [
    non_local, build("poly_nl", C, bias=False), build("poly_sa", C, heads=1, grid=(N,), sigma="identity", bias=False),
], ids=["non-local", "poly_nl", "poly_sa"])  # fmt: skip
def test_the_same_triplets(module):
    """All of them reach x_(a,·) x_(e,·) x_(e,·) and nothing else (Sec. 4.2 and 4.3)."""
    found = lens.tensor(module, 3, shape=(1, N, C))
    assert found.positions == tuple(frozenset(tuple(sorted((a, e, e))) for e in range(N)) for a in range(N))


def test_weights_are_counted_as_the_paper_does():
    """(N C)^(D + 1): about 10²¹ for 196 tokens of 1,024 channels at D = 3 (Sec. 3.2)."""
    assert lens.tensor(non_local, 3, shape=(1, N, C)).sparsity.possible == (N * C) ** (3 + 1)
    with pytest.raises(ShapeError, match=r"1\.6e\+21 weights"):
        lens.tensor(polymix.create_mixer("poly_nl", 1024), 3, tokens=196)


@pytest.mark.parametrize(("name", "options"), [
    ("padre", {"degree": 3, "grid": (3,), "kernel_size": 3}), ("poly_nl", {"order": "2+3"}),
    ("linear", {"heads": 1, "feature_map": "identity", "normalize": False}),
])  # fmt: skip
def test_the_orders_add_up_to_the_module(name, options):
    """Σ_d W^[d] ∏ X = f(X), the constant and the lower orders that biases bring included (Eq. 1)."""
    mixer, x = build(name, C, **options), tokens(N, C, seed=5)
    parts = [lens.tensor(mixer, order, tokens=N)(x) for order in range(4)]
    close(sum(parts), mixer(x[None])[0], 1e-11)
    assert not lens.tensor(mixer, 4, tokens=N).mask.any(), "beyond its degree all weights are zero"


def test_what_has_no_such_tensor_is_refused():
    with pytest.raises(OptionError, match="neither a polynomial"):
        lens.tensor(torch.sin, 3, shape=(1, N, C))
    with pytest.raises(OptionError, match="no mixer"):
        lens.tensor(non_local, 3, tokens=N)
    with pytest.raises(OptionError, match="order"):
        lens.tensor(non_local, 9, shape=(1, N, C))
