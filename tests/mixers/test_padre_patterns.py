"""Several patterns of inputs in one PADRe (App. A.1), and the rational form's constants and terms (Eq. 18-20)."""

import pytest
import torch

import polymix
from polymix import errors
from polymix.mixers.padre_contexts import read_patterns
from tests import references as reference
from tests.helpers import build, close, padre_from_matrices, tokens
from tests.mixers.test_padre_whole import ignores_padding_of_a_context

TOL = 1e-11


def by_definition(mixer, x, contexts):
    """The sum over the patterns, each a PADRe of its own by the reference."""
    m, c = mixer.matrices(x.shape[1]), mixer.config
    shared = {name: m[name] for name in ("C", "D", "b_C", "b_D")}
    total = 0 if m["L"] is None else m["L"]
    for pattern, own in zip(c.pattern, m["patterns"], strict=True):
        options = {
            "normalize": c.normalize,
            "heads": c.heads,
            "basis": c.basis,
            "contexts": contexts,
            "pattern": pattern,
        }
        total = total + reference.padre(x, **own, **shared, L=None, **options)
    return total if m["V"] is None else total @ m["V"]


@pytest.mark.parametrize("options", [
    {}, {"weight": "channel", "constant": "channel", "terms": (1, 3)}, {"basis": "legendre", "normalize": "rms", "heads": 2},
    {"C": "depthwise:kernel=3", "D": "dense", "num_prefix_tokens": 1}, {"weight": "full", "constant": "full"},
    {"A": "dense", "B": ("dense", "monarch", "dense"), "out_dim": 4},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("pattern", [("aab", "abb"), ("aab", "bba", "abc"), ("abc",), ("cab", "abc")], ids=str)
def test_several_patterns_are_added(pattern, options):
    lengths = (7, 4)[: len(set("".join(pattern))) - 1]
    mixer = build("padre", 8, degree=3, pattern=pattern, grid=(12,), context_tokens=lengths, **options)
    x = tokens(2, 12 + options.get("num_prefix_tokens", 0), 8)
    contexts = tuple(tokens(2, n, 8, seed=n) for n in lengths)
    context = contexts if len(contexts) > 1 else contexts[0]
    if len(pattern) == 1:
        alone = build("padre", 8, degree=3, pattern=pattern[0], grid=(12,), context_tokens=lengths, **options)
        close(mixer(x, context), alone(x, context), 0)
        return
    close(mixer(x, context), by_definition(mixer, x, contexts), TOL)
    mixer(x, context).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for name, p in mixer.named_parameters() if not name.endswith("bias"))


def test_two_patterns_by_hand():
    """Y_1 of x and Y_3 of the context belong to both patterns; Y_2 is another one in each."""
    options = {"degree": 3, "terms": (3,), "kernel_size": 3, "bias": False}
    mixer = build("padre", 6, pattern=("aab", "abb"), **options)
    assert read_patterns(("aab", "abb"), 3) == ("aabb", (0, 1, 1, 2), ((0, 1, 3), (0, 2, 3)))
    x, b = tokens(2, 9, 6), tokens(2, 5, 6, seed=3)
    one, two = mixer.matrices(9)["patterns"]
    y1 = x @ one["B"][0]
    y2a = torch.einsum("dmn,bnd->bmd", one["A"][1], x @ one["B"][1])
    y2b, y3 = ((b @ own["B"][i]).mean(1, keepdim=True) for own, i in ((two, 1), (one, 2)))
    close(mixer(x, b), y1 * (y2a + y2b) * y3, TOL)
    single = build("padre", 6, pattern="aab", **options)
    assert mixer.cost(9).parameters == single.cost(9).parameters + 36, "one more B: Y_2 of the context"


def test_padding_of_several_patterns():
    ignores_padding_of_a_context(build("padre", 6, degree=3, pattern=("aab", "abb")))


def test_the_degree_and_the_start_of_several_patterns():
    mixer = build("padre", 6, degree=3, pattern=("aab", "abb"), terms=(3,), bias=False)
    x, b = tokens(2, 9, 6), tokens(2, 5, 6, seed=3)
    assert (mixer.polynomial.degree, mixer.polynomial.homogeneous) == (2, False)
    same = build("padre", 6, degree=3, pattern=("aab", "baa"), terms=(3,), bias=False)
    assert (same.polynomial.degree, same.polynomial.homogeneous) == (2, True)
    close(same(2 * x, b), 4 * same(x, b), TOL)
    spread = [polymix.create_mixer("padre", 64, degree=3, pattern=p)(torch.randn(8, 50, 64), torch.randn(8, 50, 64)).std()
              for p in ("aab", ("aab", "aba"))]  # fmt: skip
    assert 0.3 < spread[1] / spread[0] < 3, "as large as one pattern's"


def test_patterns_on_the_command_line_and_in_json():
    from polymix.mixers.spec import mixer_config, parse_mixer

    for text in ("padre:degree=3:pattern=aab/abb", "padre:degree=3:pattern=aab,abb"):
        config = parse_mixer(text)[1]
        assert config.pattern == ("aab", "abb")
        assert mixer_config({**config.to_dict(), "pattern": ["aab", "abb"]}) == config


@pytest.mark.parametrize(("options", "word"), [
    ({"pattern": ("aab", "aab")}, "different patterns"), ({"pattern": ("aab", "aaa")}, "single input"),
    ({"pattern": ("aab", "ab")}, "3 letters"), ({"pattern": ("aac", "aac")}, "3 letters"), ({"pattern": ()}, "3 letters"),
    ({"pattern": ("aab", 3)}, "3 letters"), ({"pattern": ("aabc", "abbc"), "denominator": 1}, "one mixer for each"),
])  # fmt: skip
def test_patterns_that_are_refused(options, word):
    with pytest.raises(errors.OptionError, match=word):
        polymix.create_mixer("padre", 8, degree=3, **options)


# The rational form


@pytest.mark.parametrize("constant", ["channel", "full"])
def test_the_constant_of_the_denominator_is_as_large_as_the_numerators(constant):
    """Eq. 19 has P for every token and channel; a constant for each token moves that token alone."""
    mixer = build("padre", 6, degree=2, denominator=2, grid=(7,), kernel_size=3, constant=constant, eps=1.0)
    assert mixer.S.shape == mixer.L.shape == ((7, 6) if constant == "full" else (6,))
    x = tokens(2, 7, 6)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)
    before = mixer(x)
    with torch.no_grad():
        mixer.S.data[2] += 1.0
    moved = (mixer(x) - before).abs().amax(0) > 1e-12
    expected = torch.zeros(7, 6, dtype=torch.bool)
    (expected if constant == "full" else expected.t())[2] = True
    assert torch.equal(moved, expected)


def test_a_quotient_is_a_peak_that_no_polynomial_comes_near():
    """1 / (x² + 0.01) from two products, against polynomials fitted on [-1, 1], as docs/padre.md has it."""
    mixer = polymix.create_mixer("padre", 1, degree=1, denominator=1, A="identity", eps=0.01, dtype=torch.float64)
    x = torch.linspace(-1, 1, 201, dtype=torch.float64)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        mixer.B["a"].maps.bias.view(-1)[0] = mixer.B["a"].maps.weight.view(-1)[1] = mixer.Q[0, 0] = 1
        peak = mixer(x.view(1, -1, 1)).flatten()
    close(peak, 1 / (x * x + 0.01), 1e-12)
    for degree, error in ((8, 0.39), (16, 0.17)):
        powers = torch.cos(torch.arange(degree + 1) * torch.acos(x)[:, None])  # Chebyshev's, which are well conditioned
        fit = powers @ torch.linalg.lstsq(powers, peak[:, None]).solution
        assert ((fit[:, 0] - peak).abs().max() / peak.max()).item() == pytest.approx(error, abs=0.006)


def test_a_rational_numerator_starts_at_degree_one():
    """Eq. 18 sums from j = 1; the polynomial's sum starts at 2, as the residual connection is the first term."""
    options = {"grid": (7,), "kernel_size": 3, "weight": "channel"}
    assert build("padre", 6, degree=3, denominator=1, **options).terms == (1, 2, 3)
    assert build("padre", 6, degree=3, **options).terms == (2, 3)
    mixer, x = build("padre", 6, degree=2, denominator=1, **options), tokens(2, 7, 6)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)
    m = mixer.matrices(7)
    assert m["W"][0].any()


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("preset", ["paper", "full"])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_rational_form_costs_exactly_twice(degree, preset, heads):
    """App. A.2: numerator and denominator of the same degree."""
    options = {"degree": degree, "preset": preset, "heads": heads, "grid": (6, 7), "kernel_size": 3}
    plain, rational = (
        polymix.create_mixer("padre", 12, **options, **more).cost(42) for more in ({}, {"denominator": degree})
    )
    assert rational.multiply_adds == 2 * plain.multiply_adds
