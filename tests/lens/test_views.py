"""Receptive field, equivariance and contextual mapping on modules of which they are known."""

import pytest
import torch
import torch.nn.functional as F

import polymix
from polymix import lens
from polymix.lens.contextual_mapping import EQUAL_SUMS
from tests.helpers import build


def band(n, low, high):
    return torch.tensor([[low <= j - i <= high for j in range(n)] for i in range(n)])


def convolution(mode):
    conv = torch.nn.Conv1d(2, 2, 3, padding=1, padding_mode=mode)
    return lambda x: F.gelu(conv.double()(x.transpose(1, 2))).transpose(1, 2)


@pytest.mark.parametrize(("module", "options", "expected"), [
    (build("linear_floor", 4), {}, torch.eye(16).bool()), (build("softmax", 4), {}, torch.ones(16, 16).bool()),
    (build("pom", 4), {"causal": True}, band(16, -16, 0)), (build("padre", 4, kernel_size=3), {}, band(16, -1, 1)),
    (build("padre", 4, kernel_size=3, degree=3), {}, band(16, -2, 2)), (build("padre", 4, kernel_size=3, causal=True), {}, band(16, -2, 0)),
    (build("pom", 4), {"causal": 4}, torch.block_diag(*[torch.ones(4, 4)] * 4).bool() | band(16, -16, 0)),
    (lambda x: x.flip(1), {"shape": (1, 5, 2)}, torch.eye(5).bool().flip(0)),
    (lambda x: x.argmax(1, keepdim=True).expand_as(x), {"shape": (1, 4, 2), "draws": 12}, torch.ones(4, 4).bool()),
    (lambda x: x.mean(1), {"shape": (1, 5, 2)}, torch.ones(1, 5).bool()),
])  # fmt: skip
def test_receptive_field(module, options, expected):
    result = lens.receptive_field(module, **options)
    assert torch.equal(result.reach, expected)
    assert result.magnitude.shape == expected.shape
    assert not result.magnitude[~expected].any()


def test_its_magnitude_is_the_jacobian():
    weight = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    result = lens.receptive_field(lambda x: (weight @ x[0])[None], shape=(1, 3, 2))
    assert torch.allclose(result.magnitude, weight * 2**0.5)
    assert (result.causal, result.span) == (False, (3, 3))


def test_many_channels_are_sampled():
    wide = lens.receptive_field(lambda x: 3 * x, shape=(1, 3, 400))
    assert torch.allclose(wide.magnitude.diagonal() / (3 * 20), torch.ones(3, dtype=torch.float64), rtol=0.2)


def test_a_grid_and_its_prefix():
    result = lens.receptive_field(build("padre", 4, grid=(5, 6), kernel_size=3, num_prefix_tokens=1))
    assert (result.grid, result.prefix) == ((5, 6), 1), "small grids are taken whole"
    middle = result.reach[1:, 1:].reshape(5, 6, 5, 6)[2, 3]
    assert middle.nonzero().tolist() == [[i, j] for i in (1, 2, 3) for j in (2, 3, 4)]
    assert result.reach[0].all(), "the prefix token is mixed from the mean of the grid"
    assert "1" in str(result)


@pytest.mark.parametrize(("module", "options", "permutation", "circular", "interior"), [
    (build("softmax", 4), {}, True, True, None), (build("pom", 4), {}, True, True, None), (build("poly_nl", 4), {}, True, True, None),
    (build("linear_floor", 4), {}, True, True, True), (build("padre", 4, kernel_size=3), {}, False, False, True),
    (build("padre", 4, grid=(6, 7), kernel_size=3, degree=3), {}, False, False, True),
    (build("padre", 4, grid=(6, 7), kernel_size=3, num_prefix_tokens=2), {}, False, False, None),
    (build("padre", 4, kernel_size=4, causal=True), {}, False, False, True), (build("padre", 4, grid=(3, 3)), {}, False, False, None),
    (build("pom", 4), {"causal": True}, False, False, None), (build("poly_sa", 4, grid=(4, 4)), {}, False, False, None),
    (convolution("circular"), {"shape": (1, 9, 2)}, False, True, True), (convolution("zeros"), {"shape": (1, 9, 2)}, False, False, True),
    (lambda x: x * torch.linspace(1, 1 + 1e-8, 9, dtype=x.dtype).view(9, 1), {"shape": (1, 9, 2)}, False, False, False),
    (lambda x: x.flip(1), {"shape": (1, 9, 2)}, False, False, None),
])  # fmt: skip
def test_equivariance(module, options, permutation, circular, interior):
    result = lens.equivariance(module, **options)
    assert (result.permutation.holds, result.circular.holds) == (permutation, circular), str(result)
    if interior is not None or result.interior.holds is not None:
        assert result.interior.holds == interior or interior is None, str(result)
    if interior is None and permutation is True:
        assert result.interior.error is None, "every token reaches every other: there is no interior"


def test_the_grid_of_the_call():
    shifted = lens.equivariance(
        lambda x, grid: x + x.view(1, 4, 5, 2).roll(1, 2).view_as(x), shape=(1, 20, 2), grid=(4, 5)
    )
    assert shifted.grid == (4, 5)
    assert shifted.circular.holds
    assert not shifted.permutation.holds


@pytest.mark.parametrize(("name", "options", "call", "holds"), [
    ("pom", {}, {}, True), ("softmax", {}, {}, True), ("poly_nl", {}, {}, False), ("qt", {}, {}, False),
    ("pom", {"degree": 1, "activation": "identity"}, {}, False), ("pom", {"degree": 4, "activation": "identity"}, {}, False),
    ("pom", {"degree": 5, "activation": "identity"}, {}, True),  # five other tokens have no equal sums of five powers
    ("linear_floor", {}, {}, False), ("padre", {"kernel_size": 3}, {}, False), ("pom", {}, {"causal": True}, False),
    ("padre", {"grid": (3, 3), "kernel_size": 5}, {}, True),
])  # fmt: skip
def test_contextual_mapping(name, options, call, holds):
    """On the inputs tried PoM is one (Lemma 3.3), unless it reads the context by a polynomial of too low a degree."""
    result = lens.contextual_mapping(build(name, 6, **options), **call)
    assert result.holds == holds, str(result)
    assert (min(result.twins, result.alike) > result.tolerance) == holds, "the tokens that did not change tell"
    assert result.pairs == len(result.nearest) * (len(result.nearest) - 1) // 2
    assert result.min_distance == pytest.approx(min(result.nearest.min().item(), result.alike))


@pytest.mark.parametrize(("pair", "degree"), list(zip(EQUAL_SUMS, range(1, 6), strict=True)))
def test_equal_sums_of_powers(pair, degree):
    sums = [[sum(number**power for number in numbers) for numbers in pair] for power in range(1, degree + 2)]
    assert all(one == other for one, other in sums[:degree]) and sums[degree][0] != sums[degree][1]


@pytest.mark.parametrize("degree", [2, 5])
@pytest.mark.parametrize("name", ["pom", "softmax"])
def test_two_contexts_with_the_same_row_exist_at_every_degree(name, degree):
    """On all of R^(N × C) Lemma 3.3 holds for no fixed width: six tokens of four channels do not fit into a row of it."""
    mixer = build(name, 4, **({"degree": degree} if name == "pom" else {}))
    one, other = lens.contextual_mapping(mixer).collision
    assert torch.equal(one[-1], other[-1]) and (one - other).norm() > 0.1
    with torch.no_grad():
        rows = [mixer(context[None])[0, -1] for context in (one, other)]
    assert (rows[0] - rows[1]).norm() < 1e-12


@pytest.mark.parametrize(("options", "smallest"), [
    ({}, (1, 1)), ({"activation": "identity", "degree": 2}, (5, None)), ({"activation": "identity", "degree": 5}, (5, 1)),
])  # fmt: skip
def test_the_smallest_degree_and_width_for_the_inputs_tried(options, smallest):
    """Sums of powers up to 5 tell the contexts of five other tokens apart, if α is generic; GELU does at once."""
    result = lens.contextual_mapping(build("pom", 6, **options))
    assert result.smallest == smallest, str(result)
    assert result.collision is not None, "and still no degree is enough for all of R^(N × C)"
    assert lens.contextual_mapping(build("softmax", 6)).smallest is None


def perceptron(x):
    w = torch.arange(12.0, dtype=x.dtype).view(4, 3).sin()
    return F.gelu(x @ w.T) @ w


@pytest.mark.parametrize(("module", "options", "holds"), [
    (perceptron, {"shape": (1, 6, 3)}, False), (convolution("zeros"), {"shape": (1, 9, 2)}, False),
    (build("mamba", 4), {}, False), (build("mamba", 4, bidirectional=True), {}, True),
    (build("conv2former", 4, grid=(6,), kernel_size=11), {}, True),
], ids=["mlp", "cnn", "ssm", "ssm, both ways", "cnn of the whole grid"])  # fmt: skip
def test_which_networks_are_none_as_the_introduction_says(module, options, holds):
    """PoM, Sec. 1: "MLPs, CNNs, and SSMs do not exhibit it". An SSM both ways and a kernel as long as the sequence do."""
    result = lens.contextual_mapping(module, **options)
    assert result.holds == holds, str(result)
    assert (result.twins > result.tolerance) == holds, "the tokens that did not change tell"


def test_a_collision_that_is_known():
    """Where one token moves by as much as another moves back, a mean stays: the search finds such contexts."""
    result = lens.contextual_mapping(lambda x: x + x.mean(1, keepdim=True), shape=(1, 4, 3))
    one, other = result.collision
    assert not result.holds and result.alike == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(one.mean(0), other.mean(0))
    assert lens.contextual_mapping(torch.nn.Linear(3, 3), shape=(1, 1, 3)).collision is None, "there is no context"


def test_what_forgets_its_token_is_no_contextual_mapping():
    result = lens.contextual_mapping(lambda x: x.mean(1, keepdim=True).expand_as(x), shape=(1, 4, 3))
    assert not result.holds
    assert result.within == 0
    assert result.twins > 1e-3


@pytest.mark.slow
@pytest.mark.draws
def test_pictures(tmp_path):
    mixer = polymix.create_mixer("padre", 4, grid=(5, 5), kernel_size=3)
    looks = {
        "field": lens.receptive_field(mixer), "row": lens.receptive_field(build("pom", 4), causal=True), "moves": lens.equivariance(mixer),
        "rows": lens.contextual_mapping(mixer), "degree": lens.degree(mixer), "nan": lens.degree(torch.log, shape=(1, 3)),
        "zero": lens.receptive_field(lambda x: x * 0, shape=(1, 3, 2)),
    }  # fmt: skip
    for name, found in looks.items():
        assert found.plot(tmp_path / f"{name}.png").stat().st_size > 3_000
        assert str(found)
