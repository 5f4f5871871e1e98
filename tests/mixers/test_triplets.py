"""Which triplets of input entries reach an output, read off third derivatives (Poly-NL, Sec. 4).

Non-local attention and Poly-NL, self-attention's product and Poly-SA reach the same: x_(a,·) x_(e,·) x_(e,·), one factor
from the output's own position a, two from one other position e.
"""

import itertools

import pytest
import torch

from tests.helpers import build, tokens

N, C = 3, 2


def triplets(function):
    """{output position: position triples (sorted) with a non-zero third derivative at a random point}."""
    x = tokens(N, C)
    jacrev = torch.func.jacrev
    third = jacrev(jacrev(jacrev(function)))(x)  # (N, C, N, C, N, C, N, C)
    reach = third.abs().sum((1, 3, 5, 7)) > 1e-9
    return {a: {tuple(sorted(t)) for t in itertools.product(range(N), repeat=3) if reach[(a, *t)]} for a in range(N)}


def non_local(x):
    """Y = X W_f Xᵀ X W_g (Eq. 6)."""
    return x @ tokens(C, C, seed=1) @ x.t() @ x @ tokens(C, C, seed=2)


def attention_product(x):
    """Q Kᵀ V, self-attention without its softmax (Eq. 12)."""
    q, k, v = (x @ tokens(C, C, seed=s) for s in (1, 2, 3))
    return q @ k.t() @ v


def mixer(name, **options):
    built = build(name, C, bias=False, **options)
    return lambda x: built(x[None])[0]


EXPECTED = {a: {tuple(sorted((a, e, e))) for e in range(N)} for a in range(N)}


@pytest.mark.parametrize("function", [
    non_local, mixer("poly_nl"), attention_product, mixer("poly_sa", heads=1, grid=(N,), sigma="identity"),
    mixer("poly_sa", heads=2, positions="mean", sigma="identity"),
], ids=["non-local", "poly_nl", "attention", "poly_sa", "poly_sa-mean"])  # fmt: skip
def test_the_same_triplets(function):
    assert triplets(function) == EXPECTED


def test_the_second_order_ablation_reaches_none():
    assert all(not found for found in triplets(mixer("poly_nl", order=2)).values())


def test_poly_sa_with_one_head_and_a_mean_is_a_diagonal_of_attention_s_product():
    """Q Diag(Kᵀ V) / N (Poly-SA, Eq. 15 and 16), where attention without its softmax is Q Kᵀ V."""
    built, x = build("poly_sa", C, heads=1, positions="mean", sigma="identity", bias=False), tokens(N, C)
    m = built.matrices(N)
    q, k, v = (x @ m[name] for name in ("W_q", "W_k", "W_v"))
    expected = q @ torch.diag(torch.diagonal(k.t() @ v)) / N @ m["W_o"]
    torch.testing.assert_close(built(x[None])[0], expected)


def test_share_of_all_triplets():
    """N of the N³ position triplets of an output: less than 0.025 % at N = 64."""
    assert all(len(found) == N for found in EXPECTED.values())
    assert pytest.approx(0.0244, abs=1e-4) == 100 * 64 / 64**3
