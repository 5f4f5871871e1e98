"""Table 1 of PADRe: every mechanism that is a polynomial, or a quotient of two, equals its own PADRe."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import polymix
from polymix import errors
from polymix.lens import as_padre, degree
from tests.helpers import build, close, tokens

N, D = 8, 8
CONV = {"activation": "identity", "norm": None, "kernel_size": 3}
MIDDLE = {"bidirectional": True, "class_token": "middle", "num_prefix_tokens": 1}
LINEAR_POM = {"activation": "identity", "gate": "identity"}
EXACT = {  # name, options, what the call needs, number of chains, degree
    "linear_floor": ("linear_floor", {}, {}, 8, 1),
    "conv2former": ("conv2former", CONV, {"grid": (2, 4)}, 1, 2),
    "conv2former-1d": ("conv2former", {**CONV, "grid": (8,)}, {}, 1, 2),
    "hyena-2": ("hyena", {"order": 2, "length": 16}, {}, 1, 3),
    "hyena-3": ("hyena", {"order": 3, "length": 16}, {}, 1, 4),
    "hyena-both": ("hyena", {"order": 3, "length": 16, "bidirectional": True}, {}, 2, 4),
    "hyena-middle": ("hyena", {**MIDDLE, "filter": "explicit", "length": 5}, {}, 2, 3),
    "conv2former-prefix": ("conv2former", {**CONV, "grid": (2, 3), "num_prefix_tokens": 2}, {}, 1, 2),
    "hyena-4-explicit": ("hyena", {"order": 4, "filter": "explicit", "length": 5, "bias": False}, {}, 1, 5),
    "additive": ("additive", {}, {"x": True}, 2, 3),
    "additive-ones": ("additive", {"weights": "ones", "bias": False}, {"x": True}, 2, 2),
    "sima": ("sima", {"heads": 2}, {"x": True}, 4, 3),
    "castling": ("castling", {"heads": 2, "normalize": False, "kernel_size": 3}, {}, 5, 3),
    "poly_nl": ("poly_nl", {}, {}, 2, 3),
    "poly_nl-2": ("poly_nl", {"order": 2, "reduction": 2}, {}, 2, 2),
    "poly_nl-outside": ("poly_nl", {"reduction": 2, "alpha_inside": False}, {}, 2, 3),
    "poly_nl-2+3": ("poly_nl", {"order": "2+3", "reduction": 4}, {}, 3, 3),
    "poly_sa": ("poly_sa", {"heads": 2, "grid": (2, 4), "sigma": "identity"}, {}, 1, 3),
    "poly_sa-mean": ("poly_sa", {"heads": 4, "positions": "mean", "sigma": "identity"}, {}, 1, 3),
    "poly_sa-dw": ("poly_sa", {"grid": (2, 4), "sigma": "identity", "head_mixing": "depthwise"}, {}, 1, 3),
    "pom-1": ("pom", {**LINEAR_POM, "degree": 1, "bias": False}, {}, 1, 2),
    "pom-3": ("pom", {**LINEAR_POM, "degree": 3, "groups": 2, "selection_heads": 4}, {}, 3, 4),
    "pom-sum": ("pom", {**LINEAR_POM, "reduction": "sum", "expand": 0.5}, {}, 2, 3),
    "prodpoly-4": ("prodpoly", {"degree": 4}, {}, 1, 4),
    "prodpoly-nested": ("prodpoly", {"degree": 3, "decomposition": "nested", "rank": 5}, {}, 3, 3),
    "prodpoly-nested-plain": ("prodpoly", {"degree": 3, "decomposition": "nested", "bias": False}, {}, 1, 3),
    "prodpoly-product": ("prodpoly", {"degree": 3, "decomposition": "product"}, {}, 1, 3),
    "linear": ("linear", {"heads": 2, "feature_map": "identity", "normalize": False}, {}, 4, 3),
    "non_local": ("non_local", {"form": "dot_product", "rd_channels": 4, "norm": "batch"}, {}, 4, 3),
    "non_local-residual": ("non_local", {"form": "dot_product", "residual": True, "bias": False}, {}, 9, 3),
    "qt": ("qt", {"heads": 2, "form": "full"}, {}, 15, 5),
}


def case(key):
    name, options, call, chains, its_degree = EXACT[key]
    mixer = build(name, D, **options).eval()
    x = tokens(1, N, D)
    call = {"x": x} if "x" in call else call
    return mixer, as_padre(mixer, N, **call), x, {k: v for k, v in call.items() if k == "grid"}, chains, its_degree


@pytest.mark.parametrize("key", list(EXACT))
def test_exact_forms(key):
    """To 1e-10 in float64, of the degree that Table 1 gives, with as many chains as the algebra needs."""
    mixer, form, x, call, chains, its_degree = case(key)
    close(form(x), mixer(x, **call), 1e-10)
    assert form.exact
    assert form.error(x) < 1e-10
    assert len(form.chains) == chains
    assert form.degree == its_degree
    if "x" not in EXACT[key][2]:  # whose own norms are no polynomials: it is frozen at one input
        other = tokens(3, N, D, seed=5)
        close(form(other), mixer(other, **call), 1e-10)
        assert form.polynomial == mixer.polynomial


@pytest.mark.parametrize("key", ["conv2former", "hyena-2", "poly_nl-2", "pom-1", "sima", "castling", "qt"])
def test_the_form_is_of_the_degree_that_it_says(key):
    form = case(key)[1]
    result = degree(form, shape=(1, N, D))
    said = form.polynomial
    assert (result.degree, result.homogeneous, result.rational) == (said.degree, said.homogeneous, said.rational)


def test_frozen_norms_hold_at_their_input_alone():
    _, form, x, *_ = case("sima")
    assert form.error(2 * x) > 0.1


class TokenMixing(nn.Module):
    """ResMLP's: a dense map along the tokens, one for all channels."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(N, N)

    def forward(self, x):
        return self.map(x.transpose(1, 2)).transpose(1, 2)


class Pooling(nn.Module):
    """PoolFormer's: the mean of a neighbourhood less the token itself."""

    def forward(self, x):
        return nn.functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1, count_include_pad=False).transpose(1, 2) - x


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(("module", "chains"), [(TokenMixing, 1), (Pooling, 1), (Convolution, D)])
def test_linear_token_mixing_is_degree_1(module, chains):
    torch.manual_seed(0)
    module = module().double()
    form = as_padre(module, N, dim=D)
    x = tokens(2, N, D)
    close(form(x), module(x), 1e-10)
    assert (form.degree, len(form.chains)) == (1, chains)


def test_padre_is_itself():
    mixer = polymix.create_mixer("padre", D, denominator=1)
    assert as_padre(mixer, N) is mixer


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_softmax_by_taylor(heads):
    """The error falls with every order, and is what the series leaves, where the logits are small."""
    torch.manual_seed(0)
    mixer = polymix.create_mixer("softmax", D, heads=heads, dtype=torch.float64)
    with torch.no_grad():
        mixer.qkv.qkv.weight[:D] *= 0.3
    x = tokens(1, N, D)
    orders = range(5 if D // heads <= 4 else 4)
    errors_ = [as_padre(mixer, N, order=order).error(x) for order in orders]
    assert all(b < a for a, b in itertools.pairwise(errors_))
    q, k, _ = (part.transpose(1, 2) for part in mixer.qkv(x, x))
    reach = (q @ k.transpose(-1, -2)).abs().max().item() / math.sqrt(D // heads)
    for order, error in zip(orders, errors_, strict=True):
        assert error < 4 * reach ** (order + 1) / math.factorial(order + 1) * math.exp(2 * reach)
    assert as_padre(mixer, N, order=2).polynomial.rational == (4 * heads + 1, 4 * heads)
    assert not as_padre(mixer, N, order=2).exact


def mamba(shift):
    mixer = build("mamba", 4, state_size=3)
    with torch.no_grad():
        mixer.layer.dt_proj.bias += shift
    return mixer


def test_mamba_frozen_at_its_input_is_exact_and_its_linear_decay_errs_by_a_power():
    """Held at the input's own Δ the scan is a polynomial of degree 3; exp(Δ A) ≈ 1 + Δ A then errs by Δ² of what the
    state gives, which is itself of order Δ beside D ⊙ u: by Δ³ of the whole."""
    x, found = tokens(1, N, 4), []
    for shift in (-4.0, -6.0, -8.0):
        mixer = mamba(shift)
        assert as_padre(mixer, N, x=x).error(x) < 1e-10
        largest = mixer.time_steps(x).max().item()
        found.append((largest, as_padre(mixer, N, x=x, decay="linear").error(x)))
    (a, e_a), *_, (c, e_c) = found
    assert math.log(e_a / e_c) / math.log(a / c) == pytest.approx(3, abs=0.2)


def test_mamba_without_input_is_a_polynomial_and_errs_by_what_delta_moves():
    x, mixer = tokens(1, N, 4), mamba(-6.0)
    form = as_padre(mixer, N)
    assert form.polynomial.degree == 3
    assert 0 < form.error(x) < 1
    with torch.no_grad():
        mixer.layer.dt_proj.weight.zero_()  # Δ is then the same for every input
    assert as_padre(mixer, N).error(x) < 1e-10


def test_a_quotient_whose_guard_acts_is_not_called_exact():
    assert not as_padre(build("qt", D, heads=2, form="full", order=1), N).exact


def test_a_form_is_of_one_number_of_tokens():
    form = as_padre(build("poly_nl", D), N)
    for x in (tokens(1, 5, D), tokens(1, N, D + 1), [1]):
        with pytest.raises(errors.ShapeError, match="one number of tokens"):
            form(x)


@pytest.mark.parametrize(("make", "options", "word"), [
    (lambda: build("padre", D), {"order": 3}, "softmax"), (lambda: build("padre", D), {"decay": "bogus"}, "mamba"),
    (lambda: build("padre", D, grid=(4,), weight="full"), {}, "built for"), (lambda: nn.Linear(D, D), {"dim": D, "order": 1},
     "softmax"), (lambda: build("linear_floor", D), {"dim": 99}, "no TokenMixer"), (lambda: nn.Linear(D, D), {"dim": D,
     "grid": (2, 4)}, "grid"), (lambda: build("sima", D), {"x": [1]}, "list"),
    (lambda: nn.MultiheadAttention(D, 2), {"dim": D}, "one tensor"),
    (lambda: build("conv2former", D), {"grid": (2, 4)}, "activation='identity'"),
    (lambda: build("poly_sa", D, grid=(2, 4)), {}, "sigma='identity'"), (lambda: build("pom", D), {}, "activation"),
    (lambda: build("castling", D), {}, "normalize=False"), (lambda: build("qt", D), {}, "form='full'"),
    (lambda: build("sima", D), {}, "frozen"), (lambda: build("sima", D), {"x": tokens(2, N, D)}, "Pass one input"),
    (lambda: build("xca", D), {}, "neither"), (lambda: build("tesa", D, form="dot_product", grid=(2, 4)), {}, "not among"),
    (lambda: build("linear", D), {}, "feature_map='identity'"), (lambda: build("non_local", D), {}, "dot_product"), (lambda: build("pom", D, **LINEAR_POM), {"order": 3}, "softmax"),
    (lambda: nn.GELU(), {"dim": D}, "neither"), (lambda: nn.Identity(), {}, "dim"),
    (lambda: build("softmax", D), {"decay": "linear"}, "mamba"), (lambda: build("softmax", D), {"order": -1}, "order"),
    (lambda: nn.Linear(D, D + 1), {"dim": D}, "tokens"),
])  # fmt: skip
def test_what_is_none_says_so(make, options, word):
    with pytest.raises(errors.PolymixError, match=word):
        as_padre(make(), N, **options)


@pytest.mark.parametrize("filter", ["implicit", "explicit"])
def test_the_coefficients_of_hyena_are_those_of_its_chain(filter):
    """η_m of Eq. 48, by its loops over tokens, against the third derivatives of the Toeplitz chain.

    Eq. 50 as printed, a product of separate sums, holds for one convolution; with more, each sum stands inside the next.
    """
    n, width = 4, 2
    mixer = build("hyena", width, order=2, filter=filter, length=n, bias=False)
    form, m = as_padre(mixer, n), mixer.matrices(n)
    (chain,) = form.chains
    size = n * width
    projections = []  # P^j of the flattened input, for x^0 = v, x^1, x^2 = the last gate: (n, width, size)
    for part in (2, 1, 0):
        own = slice(part * width, (part + 1) * width)
        to = torch.einsum("cts,ec->tcse", m["T"][own], m["W_in"][:, own])
        projections.append(to.reshape(n, width, size))
    taps = [torch.eye(n).double().expand(width, n, n), m["H"][0]]  # h^1 is left to the short convolution
    eta = torch.zeros(n, width, size, size, size, dtype=torch.float64)
    for t2, t1, t0 in itertools.product(range(n), repeat=3):
        for c in range(width):
            gain = taps[1][c, t2, t1] * taps[0][c, t1, t0]
            rows = (projections[0][t0, c], projections[1][t1, c], projections[2][t2, c])
            eta[t2, c] += gain * torch.einsum("i,j,k->ijk", *rows)

    def flat(chi):
        return chain(chi.view(1, n, width))[0]

    third = torch.func.jacfwd(torch.func.jacfwd(torch.func.jacfwd(flat)))(torch.zeros(size, dtype=torch.float64))
    symmetric = sum(eta.permute(0, 1, *(2 + i for i in order)) for order in itertools.permutations(range(3)))
    close(third, symmetric, 1e-12)
    chi = tokens(size)
    close(mixer(chi.view(1, n, width))[0], torch.einsum("tcijk,i,j,k->tc", eta, chi, chi, chi) @ m["W_out"], 1e-12)


class TokenMlp(nn.Module):
    """MLP-Mixer's token mixing: two dense maps along the tokens with an activation between them."""

    def __init__(self, activation):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(N, 2 * N), activation, nn.Linear(2 * N, N))

    def forward(self, x):
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


def test_mlp_mixer_is_no_padre_and_res_mlp_is():
    """Degree 1 holds for a linear layer along the tokens, and for two of them; a GELU between them ends it."""
    with pytest.raises(errors.CapabilityError, match="nonlinear"):
        as_padre(TokenMlp(nn.GELU()), N, dim=D)
    for linear in (TokenMixing(), TokenMlp(nn.Identity())):
        assert as_padre(linear.double(), N, dim=D).degree == 1
    published = json.loads((Path(__file__).parents[2] / "benchmarks/results/table-1.json").read_text())["exact"]
    assert any(row["mechanism"] == "ResMLP, token mixing" for row in published)
    assert not any("MLP-Mixer" in row["mechanism"] for row in published)
