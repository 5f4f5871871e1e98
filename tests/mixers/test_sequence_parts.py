"""Parts of a sequence can be summarised apart: merged summaries are the state of the whole, whatever the cuts.

If this fails, processes that share a sequence hand a wrong state to each other.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymix import create_mixer, list_mixers
from polymix.errors import CapabilityError
from polymix.mixers.registry import mixer_class
from polymix.mixers.states import Place
from tests.contracts.mixer_cases import CASES

DIM = 12
SPLITS = {
    **dict.fromkeys(("pom", "qt", "linear", "mala", "nala", "pola", "performer", "power", "hla", "hydra", "poly_nl",
                     "poly_sa"), "sum"),
    "mamba": "scan",
    **dict.fromkeys(("padre", "local", "conv2former", "linear_floor"), "halo"),
    "hyena": "channels", "softmax": "gather",
}  # fmt: skip
SUMS = {
    **{name: CASES[name] for name in (
        "pom", "pom-groups", "pom-rotary", "pom-decay", "qt", "qt-full", "linear", "linear-relu", "linear-degree-3",
        "performer", "performer-relu", "power", "hydra", "mamba-small", "poly_nl", "poly_nl-4", "poly_sa-mean")},
    "pom-2d": ("pom", {"rotary": "2d", "grid": None}),
    "poly_sa-learned": ("poly_sa", {"heads": 3, "grid": (9,), "num_prefix_tokens": 1}),
}  # fmt: skip


def build(case):
    name, options = SUMS[case]
    torch.manual_seed(0)
    return create_mixer(name, DIM, dtype=torch.float64, **{k: v for k, v in options.items() if v is not None})


def test_each_mixer_says_how_it_splits():
    assert {name: mixer_class(name).capabilities.sequence for name in list_mixers()} == {
        name: SPLITS.get(name) for name in list_mixers()
    }
    for name, options in (("pom", {"decay": 3}), ("power", {"gate": True})):
        assert create_mixer(name, 12, **options).capabilities.sequence == "scan"
    for name, options in (("qt", {"scales": (3,)}), ("padre", {"token": "toeplitz:length=8", "causal": True}),
                          ("padre", {"num_prefix_tokens": 1, "grid": (3, 4)}), ("mamba", {"bidirectional": True}),
                          ("poly_sa", {"grid": (3, 4), "head_mixing": "depthwise"})):  # fmt: skip
        assert create_mixer(name, 12, **options).capabilities.sequence is None


def test_a_mixer_without_sums_says_so():
    mixer = create_mixer("softmax", 12)
    with pytest.raises(CapabilityError, match="states of the parts of a sequence"):
        mixer.summary(torch.zeros(1, 2, 12))


@st.composite
def cuts(draw):
    """The ends of the parts of a sequence of at most 20 tokens, and a seed."""
    return sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=4))), draw(st.integers(0, 2**16))


def parts_of(mixer, x, mask, ends, grid):
    """Each part's tokens, mask, place, and the state whose windows it continues from."""
    for first, last in zip([0, *ends], ends, strict=False):
        part = slice(first, last)
        start = None
        if mixer.memory and first:
            start = mixer.prefill(x[:, :first], mask=None if mask is None else mask[:, :first])[1]
        before = torch.full((len(x),), first) if mask is None else mask[:, :first].sum(1)
        yield x[:, part], None if mask is None else mask[:, part], Place(first, x.shape[1], before, grid), start


@pytest.mark.parametrize("case", SUMS)
@given(cuts(), st.booleans())
def test_merged_parts_are_the_whole(case, cut, padded):
    (ends, seed), mixer = cut, build(case)
    torch.manual_seed(seed)
    n, grid, options = ends[-1], None, {}
    learned = case == "poly_sa-learned"
    if learned:
        n, ends, grid = n + 1, [*ends, ends[-1] + 1], (n,)
    if case == "pom-2d":
        n, ends, grid = 2 * n, [2 * end for end in ends], (n, 2)
    if learned or grid:
        options["grid"] = grid
    x = torch.randn(2, n, DIM, dtype=torch.float64)
    mask = torch.rand(2, n) < 0.7 if padded and not learned else None
    parts = list(parts_of(mixer, x, mask, ends, grid))
    summaries = [mixer.summary(*part) for part in parts]
    left, right = summaries[0], summaries[-1]
    for summary in summaries[1:]:
        left = left.merge(summary)
    for summary in reversed(summaries[:-1]):
        right = summary.merge(right)
    whole = mixer.summary(x, mask, Place(0, n, torch.zeros(2, dtype=torch.int64), grid))
    for merged in (left, right):
        torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)
    if mixer.capabilities.recurrent:
        torch.testing.assert_close(tuple(left.state), tuple(mixer.prefill(x, mask=mask)[1]), rtol=1e-12, atol=1e-12)
    if mixer.capabilities.sequence == "sum":
        y = torch.cat([mixer.read_state(x, left.state, mask, place) for x, mask, place, _ in parts], dim=1)
        real = slice(None) if mask is None else mask
        torch.testing.assert_close(y[real], mixer(x, mask=mask, **options)[real], rtol=1e-12, atol=1e-12)
