"""PADRe with every structure, base and generalisation, against Eq. 1-7 and 11-20 recomputed from `matrices()`."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix import errors, lens
from tests.helpers import build, close, jitter, padre_from_matrices, tokens

TOL = 1e-11
BASES = ["monomial", "chebyshev", "legendre", "hermite"]
STRUCTURES = [
    "identity", "dense", "diagonal", "block_diagonal:blocks=2", "low_rank:rank=2", "rank_one", "banded:lower=2",
    "sparse:density=0.3", "depthwise:kernel=3:dilation=2", "circulant", "circulant:filter=implicit", "toeplitz",
    "toeplitz:filter=implicit", "monarch:blocks=2", "mean", "diagonal+low_rank:rank=1", "banded:lower=1@monarch^T",
]  # fmt: skip
CAUSAL = ["dense", "diagonal", "block_diagonal:blocks=2", "low_rank:rank=2", "rank_one", "banded:lower=2", "mean",
          "sparse:density=0.3", "depthwise:kernel=4:dilation=2", "toeplitz", "toeplitz:filter=implicit",
          "diagonal+mean@toeplitz:length=3"]  # fmt: skip


def safe(mixer):
    """Away from the zeros of the denominator, where a quotient is as ill-conditioned as it likes."""
    with torch.no_grad():
        mixer.S.fill_(3.0)
    return mixer


@pytest.mark.parametrize("denominator", [0, 2])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize(("side", "spec"), list(itertools.product(("token", "channel"), STRUCTURES)))
def test_every_structure_side_base_and_quotient(side, spec, basis, denominator):
    options = {side: spec}
    mixer = build("padre", 8, degree=3, grid=(12,), preset="full", basis=basis, denominator=denominator, **options)
    mixer = safe(mixer) if denominator else mixer
    x = 0.5 * tokens(2, 12, 8)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize("side", ["token", "channel"])
@pytest.mark.parametrize("spec", ["monarch", "low_rank:rank=2", "toeplitz", "depthwise:kernel=3", "mean"])
@pytest.mark.parametrize("options", [
    {"heads": 2}, {"num_prefix_tokens": 2}, {"normalize": "rms", "weight": "full"}, {"out_tokens": 5, "out_dim": 3},
    {"degree": 1}, {"degree": 5, "terms": (2, 5), "constant": "channel"}, {"bias": False, "denominator": 1},
    {"heads": 2, "num_prefix_tokens": 1, "denominator": 3, "weight": "channel", "out_tokens": 2, "basis": "legendre"},
], ids=str)  # fmt: skip
def test_structures_combine_with_the_rest(side, spec, options):
    options = {"degree": 3, "grid": (12,), side: spec, **options}
    mixer = build("padre", 8, **options)
    mixer = safe(mixer) if "denominator" in options else mixer
    x = 0.5 * tokens(2, 12 + options.get("num_prefix_tokens", 0), 8)
    y = mixer(x)
    close(y, padre_from_matrices(mixer, x), TOL)
    assert y.shape == (2, options.get("out_tokens", x.shape[1]), options.get("out_dim", 8))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(x[:1])
    cost = mixer.cost(x.shape[1])
    assert cost.counted_flops == counter.get_total_flops()
    assert cost.parameters == sum(p.numel() for p in mixer.parameters())


def test_a_structure_for_every_degree_and_letter():
    mixer = build("padre", 8, degree=3, grid=(3, 4), A=("identity", "circulant", "depthwise:kernel=3"),
                  B=("dense", "monarch", "diagonal"), C=("mean", "low_rank:rank=1"), D=("identity", "banded:lower=1"))  # fmt: skip
    x = tokens(2, 12, 8)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("spec", CAUSAL)
@pytest.mark.parametrize("basis", ["monomial", "hermite"])
def test_causal_where_every_token_map_is(spec, heads, basis):
    mixer = build("padre", 8, degree=3, grid=(12,), causal=True, token=spec, preset="full", heads=heads, basis=basis)
    x = tokens(2, 12, 8)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)
    short = mixer(x[:, :7])
    close(mixer(x)[:, :7], short, TOL)
    if not mixer.capabilities.recurrent:
        with pytest.raises(errors.CapabilityError):
            mixer.prefill(x)
        return
    state, out = None, []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        y, state = mixer.prefill(x[:, start:stop], state)
        out.append(y)
    close(torch.cat(out, 1), mixer(x), TOL)


def test_recurrent_is_what_it_says():
    able = {
        spec
        for spec in CAUSAL
        if polymix.create_mixer("padre", 8, grid=(12,), causal=True, token=spec).capabilities.recurrent
    }
    assert able == {"mean", "depthwise:kernel=4:dilation=2", "toeplitz"}


@pytest.mark.parametrize("spec", [spec for spec in STRUCTURES if "circulant" not in spec and "@" not in spec])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_takes_tokens_out(spec, causal):
    """Whatever stands in padding, and wherever it stands: the real tokens are mixed as if alone."""
    if causal and spec not in CAUSAL:
        return
    mixer = build("padre", 8, degree=3, grid=(12,), token=spec, causal=causal)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, 5] = mask[1, 9:] = False
    x = tokens(2, 12, 8)
    y = mixer(x.masked_fill(~mask[..., None], float("nan")), mask=mask)
    for b in range(2):
        close(y[b : b + 1, mask[b]], padre_from_matrices(mixer, x[b : b + 1, mask[b]]), TOL)
        assert not y[b, ~mask[b]].any()


def test_circles_have_no_place_for_padding():
    mixer = build("padre", 8, grid=(12,), token="circulant")
    with pytest.raises(errors.CapabilityError, match="mask"):
        mixer(tokens(2, 12, 8), mask=torch.ones(2, 12, dtype=torch.bool))


# Several inputs


@pytest.mark.parametrize("pattern", ["ab", "aab", "bba", "abc", "abcb"])
@pytest.mark.parametrize(
    "spec", ["mean", "dense", "low_rank:rank=2", "rank_one", "sparse:density=0.4", "depthwise@dense"]
)
@pytest.mark.parametrize("options", [{}, {"basis": "chebyshev", "normalize": "rms", "heads": 2},
                                     {"C": "depthwise", "D": "dense", "num_prefix_tokens": 1}], ids=str)  # fmt: skip
def test_patterns_of_several_inputs_of_different_lengths(pattern, spec, options):
    lengths = (7, 4)[: len(set(pattern)) - 1]
    A = tuple("depthwise:kernel=3" if letter == "a" else spec for letter in pattern)
    if "@" in spec:
        A = tuple("depthwise:kernel=3" if letter == "a" else "dense+mean" for letter in pattern)
    mixer = build("padre", 8, degree=len(pattern), pattern=pattern, grid=(12,), context_tokens=lengths, A=A, **options)
    x = tokens(2, 12 + options.get("num_prefix_tokens", 0), 8)
    contexts = tuple(tokens(2, n, 8, seed=n) for n in lengths)
    context = contexts if len(contexts) > 1 else contexts[0]
    close(mixer(x, context), padre_from_matrices(mixer, x, contexts=contexts), TOL)
    mixer(x, context).sum().backward()


def test_a_pattern_alone_is_equation_11():
    """Without C and D: Z_j = ⊙ Y_i, by hand from the matrices, the context averaged."""
    mixer = build("padre", 6, degree=3, pattern="aab", terms=(3,), kernel_size=3, bias=False)
    x, b = tokens(2, 9, 6), tokens(2, 5, 6, seed=3)
    m = mixer.matrices(9)
    y = [x @ m["B"][0], torch.einsum("dmn,bnd->bmd", m["A"][1], x @ m["B"][1]), (b @ m["B"][2]).mean(1, keepdim=True)]
    close(mixer(x, b), y[0] * y[1] * y[2], TOL)


def ignores_padding_of_a_context(mixer):
    x, b = tokens(2, 9, 6), tokens(2, 5, 6, seed=3)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    y = mixer(x, b.masked_fill(~mask[..., None], float("nan")), mask=mask)
    close(y[:1], mixer(x[:1], b[:1, :3]), TOL)
    close(y[1:], mixer(x[1:], b[1:]), TOL)


def test_rational_patterns_and_padding_of_contexts():
    ignores_padding_of_a_context(safe(build("padre", 6, degree=2, denominator=1, pattern="abb")))


def test_aligned_inputs_share_the_grid():
    """A map that keeps the length, a convolution, takes a context as long as x (colour beside depth)."""
    mixer = build("padre", 6, degree=2, pattern="ab", grid=(3, 4), A="depthwise:kernel=3")
    x, b = tokens(2, 12, 6), tokens(2, 12, 6, seed=3)
    close(mixer(x, b), padre_from_matrices(mixer, x, contexts=(b,)), TOL)
    with pytest.raises(errors.ShapeError, match="context"):
        mixer(x, b[:, :7])


@pytest.mark.parametrize(("options", "word"), [
    ({"pattern": "aa"}, "two of them different"), ({"pattern": "aab"}, "2 letters"), ({"pattern": "ac"}, "letters"),
    ({"pattern": "ab", "causal": True}, "order is defined within one input"), ({"context_tokens": 5}, "pattern"),
    ({"pattern": "ab", "context_tokens": (3, 4)}, "one number"), ({"pattern": "ab", "A": ("mean", "dense")}, "grid"),
    ({"token": "circulant", "causal": True, "grid": (9,)}, "causal"), ({"U": "dense"}, "out_tokens"),
    ({"out_tokens": 3}, "grid"), ({"out_tokens": 3, "causal": True, "grid": (9,)}, "causal"),
    ({"out_dim": 3, "V": "monarch"}, "one length"), ({"eps": 0.1}, "denominator"), ({"basis": "fourier"}, "legendre"),
    ({"denominator": 9}, "from 0 to 8"), ({"token": "dense"}, "grid"), ({"A": "dense", "C": "dense", "grid": (4,),
     "token": "mean"}, "token"), ({"token": "mean", "kernel_size": 3}, "kernel_size"), ({"channel": "monarck"}, "monarch"),
    ({"channel": "low_rank:rank=x"}, "rank"), ({"B": ("dense", "monarch", "dense")}, "2 of them"),
    ({"denominator": 1, "A": ("identity", "mean")}, "3 of them"),
])  # fmt: skip
def test_what_makes_no_sense_is_said(options, word):
    with pytest.raises(errors.PolymixError, match=word):
        polymix.create_mixer("padre", 8, **options)


def test_contexts_must_be_passed():
    mixer = build("padre", 6, degree=3, pattern="abc")
    x = tokens(2, 9, 6)
    for context in (None, x, (x,), (x, x, x)):
        with pytest.raises(errors.ShapeError, match="context"):
            mixer(x, context)
    with pytest.raises(errors.CapabilityError, match="context"):
        build("padre", 6, kernel_size=3)(x, x)


# Bases


@pytest.mark.parametrize(("basis", "family"), [
    ("chebyshev", np.polynomial.Chebyshev), ("legendre", np.polynomial.Legendre), ("hermite", np.polynomial.HermiteE),
    ("monomial", np.polynomial.Polynomial),
])  # fmt: skip
@pytest.mark.parametrize("degree", range(1, 9))
def test_with_identities_the_chain_is_the_basis_own_polynomial(basis, family, degree):
    mixer = polymix.create_mixer("padre", 3, degree=degree, basis=basis, A="identity", terms=(degree,), weight="channel",
                                 bias=False, dtype=torch.float64, **({"B": "identity"} if degree == 1 else
                                 {"B": "identity", "C": "identity", "D": "identity"}))  # fmt: skip
    with torch.no_grad():
        mixer.W.fill_(1.0)
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(1, 4, 3)
    want = family.basis(degree)(x.numpy())
    np.testing.assert_allclose(mixer(x).detach().numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("denominator", [0, 1, 3])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_host_can_start_from_the_init(basis, denominator, degree):
    """With learned weights the output is near attention's spread in every basis, quotients included."""
    torch.manual_seed(0)
    mixer = polymix.create_mixer("padre", 48, degree=degree, basis=basis, denominator=denominator, grid=(14, 14),
                                 weight="channel")  # fmt: skip
    with torch.no_grad():
        spread = mixer(tokens(4, 196, 48, dtype=torch.float32)).std().item()
    assert 0.125 / 5 < spread < 0.125 * 5


def test_a_quotient_never_divides_by_zero():
    mixer = jitter(polymix.create_mixer("padre", 6, degree=2, denominator=2, kernel_size=3, dtype=torch.float64))
    with torch.no_grad():
        mixer.S.zero_()
    y = mixer(torch.zeros(1, 5, 6, dtype=torch.float64, requires_grad=True))
    assert y.isfinite().all()
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize(("degree", "denominator"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_the_plain_quotient(degree, denominator):
    """App. A.2, Eq. 20: N / D of degree [d/e], without the square and the ε that keep away its poles."""
    mixer = safe(build("padre", 6, degree=degree, denominator=denominator, grid=(3, 4), kernel_size=3, eps=0))
    x = 0.5 * tokens(2, 12, 6)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)
    assert mixer.polynomial.rational == (degree, denominator)
    assert lens.degree(build("padre", 2, degree=2, denominator=1, kernel_size=3, eps=0, grid=(4,))).rational == (2, 1)
    with pytest.raises(errors.OptionError, match="eps"):
        polymix.create_mixer("padre", 6, denominator=1, eps=-1.0)


def test_the_plain_quotient_has_poles():
    """One channel and one token: x B_1 / (Q x B_2 + S) changes its sign through infinity where the denominator is 0."""
    options = {"degree": 1, "denominator": 1, "A": "identity", "bias": False}
    mixer = build("padre", 1, **options, eps=0)
    m = mixer.matrices(1)
    pole = (-m["S"] / (m["Q"][0] * m["B"][1])).reshape(1, 1, 1)
    below, above = (mixer(pole * (1 + side * 1e-9)).item() for side in (-1, 1))
    assert below * above < 0 and min(abs(below), abs(above)) > 1e6
    guarded = build("padre", 1, **options, eps=1.0)
    guarded.load_state_dict(mixer.state_dict())
    assert guarded(pole).abs().item() <= abs(pole.item() * m["B"][0].item()) + 1e-12


@pytest.mark.parametrize("spec", [spec for spec in STRUCTURES if spec != "dense"])
def test_cost_grows_linearly_or_as_n_log_n(spec):
    """On the counted operations: every token structure but `dense` (block-diagonal and sparse with what they are told)."""
    if spec.startswith(("block", "sparse")):
        spec = {"b": "block_diagonal:blocks={}", "s": "banded:lower=3"}[spec[0]]
    if spec == "identity":
        return
    costs = []
    for n in (256, 1024, 4096):
        token = spec.format(n // 16).replace("monarch:blocks=2", "monarch")  # the divisor nearest to √N
        costs.append(
            polymix.create_mixer("padre", 8, degree=3, grid=(n,), token=token, device="meta").cost(n).multiply_adds
        )
    assert costs[2] <= 8.1 * costs[1] if "monarch" in spec else costs[2] <= 5 * costs[1]


# What must not get through, what must be refused


NANS = [
    {"grid": (3, 4), "denominator": 1}, {"grid": (3, 4), "degree": 3, "normalize": "layer"}, {"denominator": 2},
    {"grid": (3, 2, 2), "kernel_size": 3}, {"token": "toeplitz"}, {"token": "mean", "normalize": "rms"},
]  # fmt: skip


@pytest.mark.parametrize("options", NANS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_padding_reaches_no_gradient(options, value):
    mixer = build("padre", 8, **options)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 8:] = False
    x = tokens(2, 12, 8).masked_fill(~mask[..., None], value).requires_grad_()
    mixer(x, mask=mask).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_padding_of_x_and_of_contexts_in_a_pattern():
    """(mask of x, mask of b): neither reaches a real token or a gradient, and x's own padding gives zeros."""
    mixer = build("padre", 6, degree=3, pattern="aab", A=("depthwise:kernel=3", "identity", "mean"))
    x, b = tokens(2, 9, 6), tokens(2, 5, 6, seed=3)
    masks = torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    masks[0][:, 6:] = masks[1][:, 3:] = False
    dirty = [t.masked_fill(~m[..., None], float("nan")).requires_grad_() for t, m in zip((x, b), masks, strict=True)]
    y = mixer(*dirty, mask=masks)
    close(y[:, :6], mixer(x[:, :6], b[:, :3]), TOL)
    assert not y[:, 6:].any()
    y.sum().backward()
    assert all(t.grad.isfinite().all() for t in dirty)
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    with pytest.raises(errors.MaskError, match="one for each context"):
        mixer(x, b, mask=(masks[0], masks[1], None))


@pytest.mark.parametrize("token", ["toeplitz", "circulant:filter=implicit", "depthwise:kernel=3", "mean", "low_rank"])
@pytest.mark.parametrize("channel", ["dense", "depthwise:kernel=3", "circulant", "monarch"])
def test_an_empty_batch(token, channel):
    mixer = build("padre", 8, grid=(12,), token=token, channel=channel)
    x = tokens(0, 12, 8).requires_grad_()
    y = mixer(x)
    assert y.shape == x.shape
    y.sum().backward()


def test_a_new_length_is_one_graph_with_explicit_circulants_too():
    mixer = build("padre", 8, grid=(12,), token="circulant")
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(mixer, (tokens(2, 12, 8),), dynamic_shapes=({1: length},))
    for n in (5, 12, 30):
        close(program.module()(x := tokens(2, n, 8)), mixer(x), 1e-10)
        close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize("U", ["depthwise:kernel=3@mean", "diagonal@dense", "depthwise:kernel=3@dense"])
def test_products_that_resize(U):
    mixer = build("padre", 8, grid=(12,), out_tokens=20, U=U)
    x = tokens(1, 12, 8)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(x)
    assert mixer.cost(12).counted_flops == counter.get_total_flops()


@pytest.mark.parametrize(("options", "word"), [
    ({"degree": 1, "token": "mean", "channel": "identity", "bias": False}, "learned"),
    ({"pattern": "ab", "token": "toeplitz"}, "token"), ({"kernel_size": 5, "token": "depthwise:kernel=3"}, "kernel_size"),
    ({"A": ("identity", "mean"), "token": "dense", "grid": (4,)}, "token"),
    ({"channel": "low_rank:rank=2:rank=3"}, "once"), ({"terms": ([1], 2)}, "terms"), ({"terms": (2, True)}, "terms"),
    ({"pattern": "ba", "A": "monarch", "grid": (12,), "context_tokens": 7}, "as many as x"),
    ({"channel": "sparse:seed=99999999999999999999999"}, "seed"),
])  # fmt: skip
def test_what_plays_no_part_or_cannot_be_is_said(options, word):
    with pytest.raises(errors.OptionError, match=word):
        polymix.create_mixer("padre", 8, **options)


def test_matrices_and_costs_of_lengths_that_it_cannot_take():
    mixer = build("padre", 8, grid=(12,), token="dense")
    for call in (mixer.matrices, mixer.cost):
        with pytest.raises(errors.ShapeError, match="at most 12"):
            call(13)


def test_states_are_float32_at_least():
    mixer = build("padre", 8, causal=True, token="mean+depthwise:kernel=3")
    x = tokens(2, 5, 8)
    _, state = mixer.prefill(x)
    low = type(state)(tuple(part.to(torch.bfloat16) if part.is_floating_point() else part for part in state.windows))
    with pytest.raises(errors.StateError, match="float64"):
        mixer.prefill(x, low)


def test_all_bases_are_one_at_degree_1():
    assert build("padre", 8, degree=1, basis="hermite", bias=False).polynomial.homogeneous
