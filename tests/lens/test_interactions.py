"""Which tuples reach an output: on monomials by hand, and the triplets of the Poly-NL paper, Sec. 4."""

import math

import pytest
import torch

from polymix import lens
from polymix.lens import Count
from tests.helpers import build, tokens

N, C = 3, 2


def test_monomials():
    def function(x):  # (1, 3, 2) -> (1, 2, 1)
        x = x[0]
        first = x[0, 0] * x[1, 1] * x[1, 1] + x[2, 0]
        return torch.stack((first, x[0, 1] ** 3)).view(1, 2, 1)

    expected = {
        1: ({((0, 0),), ((1, 1),), ((2, 0),)}, {((0, 1),)}),
        2: ({((0, 0), (1, 1)), ((1, 1), (1, 1))}, {((0, 1), (0, 1))}),
        3: ({((0, 0), (1, 1), (1, 1))}, {((0, 1),) * 3}),
        4: (set(), set()),
    }
    for order, (first, second) in expected.items():
        result = lens.interactions(function, order, shape=(1, 3, 2))
        assert result.of(0, 0).tuples == first
        assert result.of(1).tuples == second
    third = lens.interactions(function, 3, shape=(1, 3, 2), output=(0, 0))
    assert third.token_tuples == {(0, 1, 1)}
    assert third.channel_tuples == {(0, 1, 1)}
    assert third.counts == {
        "tokens": Count(1, math.comb(5, 3)), "channels": Count(1, 4), "tuples": Count(1, math.comb(8, 3)), "terms": Count(1, 216),
    }  # fmt: skip
    index = third.entries.tolist().index([0, 3, 3])  # ∂³/∂x₀₀∂x₁₁² of x₀₀ x₁₁² is 2
    assert third.strength[index, 0, 0].item() == pytest.approx(2)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_against_autograd(order):
    """The same zeros as the derivatives themselves, by nested Jacobians."""
    a, b = tokens(C, C, seed=1).triu(), tokens(C, C, seed=2).tril()

    def function(x):
        x = x.reshape(N, C)
        return (x @ a * (x @ b).roll(1, 0)) ** 2 * x[:, :1].tanh()

    nested = lambda x: function(x)[0]  # noqa: E731
    for _ in range(order):
        nested = torch.func.jacfwd(nested)
    table = nested(tokens(N * C, seed=4))
    result = lens.interactions(function, order, shape=(1, N, C))
    for channel in range(C):
        reach = table[channel].nonzero().tolist()
        assert result.of(0, channel).tuples == {tuple(sorted(divmod(i, C) for i in row)) for row in reach}


def non_local(x):
    """Y = X W_f Xᵀ X W_g (Eq. 6): the non-local block, its similarity linear."""
    x = x[0]
    return (x @ tokens(C, C, seed=1) @ x.t() @ x @ tokens(C, C, seed=2))[None]


def self_attention(x):
    """Q Kᵀ V (Eq. 12): self-attention, its similarity linear."""
    q, k, v = (x[0] @ tokens(C, C, seed=s) for s in (1, 2, 3))
    return (q @ k.t() @ v)[None]


def triplets(a):
    """x_(a,d) x_(e,f) x_(e,h) for all e, d, f, h."""
    return {
        tuple(sorted(((a, d), (e, f), (e, h)))) for e in range(N) for d in range(C) for f in range(C) for h in range(C)
    }


PL_022 = {"non-local": non_local, "poly_nl": build("poly_nl", C, bias=False)}
PL_023 = {
    "attention": self_attention,
    "poly_sa-mean": build("poly_sa", C, bias=False, heads=1, positions="mean", sigma="identity"),
    "poly_sa": build("poly_sa", C, bias=False, heads=1, grid=(N,), sigma="identity"),
}


@pytest.mark.parametrize("name", list(PL_022))
def test_poly_nl_reaches_the_triplets_of_the_non_local_block(name):
    """Entry by entry, token and channel, for every output (Eq. 8 and 10)."""
    result = lens.interactions(PL_022[name], 3, shape=(1, N, C))
    for a in range(N):
        for b in range(C):
            assert result.of(a, b).tuples == triplets(a)


@pytest.mark.parametrize("name", list(PL_023))
def test_poly_sa_reaches_the_triplets_of_self_attention(name):
    """The same positions x_(a,·) x_(e,·) x_(e,·). Of the channels attention pairs any d with the same f of q and k."""
    result = lens.interactions(PL_023[name], 3, shape=(1, N, C))
    for a in range(N):
        for b in range(C):
            assert result.of(a, b).token_tuples == {tuple(sorted((a, e, e))) for e in range(N)}
            assert result.of(a, b).tuples == triplets(a)


def test_poly_nl_without_w_2_reaches_none():
    result = lens.interactions(build("poly_nl", C, order=2), 3, shape=(1, N, C))
    assert not result.reach.any()
    assert result.counts["tuples"] == Count(0, math.comb(N * C + 2, 3))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("c", [1, 2])
def test_n_c_cubed_of_n_cubed_c_cubed(n, c):
    """As the Poly-NL paper counts them."""
    result = lens.interactions(build("poly_nl", c, bias=False), 3, shape=(1, n, c))
    assert result.counts["terms"] == Count(n * c**3, n**3 * c**3)
    assert result.counts["tokens"] == Count(n, math.comb(n + 2, 3))


def test_the_share_at_64_positions():
    """Less than 0.025 % at N = 8²: measured over all 64 positions, the derivative tensor of one channel."""
    count = lens.interactions(build("poly_nl", 1, bias=False), 3, shape=(1, 64, 1), draws=1, output=(9, 0)).counts[
        "terms"
    ]
    assert count == Count(64, 64**3)
    assert 100 * count.share == pytest.approx(0.0244, abs=1e-4)
    assert "0.0244 %" in str(count)


def test_a_causal_mixer_and_the_default_output():
    result = lens.interactions(build("pom", 2), 2, causal=True)
    assert result.output == (3, None), "the last token, which most reach"
    assert result.of(0).token_tuples == {(0, 0)}
    assert result.token_tuples == {(j, j) for j in range(4)} | {(j, 3) for j in range(4)}, (
        "its gate asks, each token tells"
    )


def test_softmax_at_every_order():
    """All of them: each weight depends on all tokens; order 4 too."""
    for order in (1, 2, 3, 4):
        result = lens.interactions(build("softmax", 1), order, shape=(1, 3, 1))
        assert result.counts["tokens"].share == 1, order


def test_kinks_count():
    """Of max(a, b), the second derivative vanishes almost everywhere, yet the two interact."""
    result = lens.interactions(lambda x: x.amax(-1, keepdim=True), 2, shape=(1, 2), draws=8)
    assert ((0, 0), (0, 1)) in result.tuples


@pytest.mark.parametrize(("order", "shape"), [(2, (1, 4, 2)), (3, (1, 3, 2)), (1, (6,)), (2, (1, 12, 2))])
@pytest.mark.draws
def test_the_picture(tmp_path, order, shape):
    result = lens.interactions(lambda x: x * x.roll(1, 0), order, shape=shape)
    assert result.plot(tmp_path / "new" / "picture.png").stat().st_size > 5_000
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["picture.png"]
    assert f"order {order}" in str(result)
