"""Each mixer equals its equation, recomputed in float64 from `matrices()`: a wrong formula or mask shows here."""

import itertools

import pytest
import torch

from polymix.errors import OptionError
from tests import references as reference
from tests.helpers import attention_from_matrices, build, close, padre_from_matrices, pom_from_matrices, tokens, visible

TOL = 1e-12
PAD = torch.tensor([[True] * 7 + [False] * 3, [False] * 4 + [True] * 6, [False] * 10])
HOLES = torch.tensor([[True, False, True, True, False, True, True, True, False, True]] * 3)
SEGMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 2, [5] * 10, [1, 0, 0, 1, 2, 2, 1, 0, 2, 9]])


def masks(batch, m, n):
    dense = torch.rand(batch, m, n, generator=torch.Generator().manual_seed(3)) > 0.5
    dense[0, 0] = False  # a query that sees nothing
    return dense


@pytest.mark.parametrize("degree", range(1, 9))
@pytest.mark.parametrize("preset", ["paper", "full"])
@pytest.mark.parametrize("bias", [True, False])
def test_padre_degrees(degree, preset, bias):
    mixer = build("padre", 6, degree=degree, preset=preset, grid=(4, 3), kernel_size=3, bias=bias)
    x = tokens(2, 12, 6)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize(("grid", "kernel"), [((13,), 11), ((1,), 11), ((5, 7), 11), ((3, 9), (3, 5)), ((2, 3, 4), 3),
                                              ((1, 1, 1), 3), ((1, 63), 11)])  # fmt: skip
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_padre_grids_and_prefix(grid, kernel, prefix):
    mixer = build("padre", 10, degree=3, grid=grid, kernel_size=kernel, num_prefix_tokens=prefix)
    x = tokens(2, prefix + torch.Size(grid).numel(), 10)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize("weight", ["ones", "channel", "full"])
@pytest.mark.parametrize("constant", [None, "channel", "full"])
@pytest.mark.parametrize("normalize", [None, "rms", "layer"])
@pytest.mark.parametrize("heads", [1, 3])
def test_padre_options_combine(weight, constant, normalize, heads):
    mixer = build("padre", 12, degree=3, grid=(3, 4), kernel_size=3, weight=weight, constant=constant, heads=heads,
                  normalize=normalize, terms=(1, 3), num_prefix_tokens=1)  # fmt: skip
    x = tokens(2, 13, 12)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)
    assert not mixer.matrices(13)["W"][1].any(), "a degree outside `terms` must have weight zero"


@pytest.mark.parametrize("names", [
    {"A": "depthwise", "C": "identity"}, {"A": ("identity", "depthwise", "identity")}, {"B": "identity"},
    {"B": ("dense", "identity", "dense"), "D": ("identity", "dense")},
    {"A": "identity", "C": ("depthwise", "identity")},
])  # fmt: skip
@pytest.mark.parametrize("heads", [1, 2])
def test_padre_structures(names, heads):
    mixer = build("padre", 8, degree=3, grid=(9,), kernel_size=5, heads=heads, **names)
    x = tokens(2, 9, 8)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize("n", [1, 2, 63, 100])
@pytest.mark.parametrize("kernel", [1, 4, 11])
@pytest.mark.parametrize("weight", ["channel", "full"])
def test_padre_causal(n, kernel, weight):
    mixer = build("padre", 6, degree=3, causal=True, kernel_size=kernel, weight=weight, grid=(n,), normalize="rms")
    x = tokens(2, n, 6)
    close(mixer(x), padre_from_matrices(mixer, x), TOL)


@pytest.mark.parametrize("grid", [(10,), (5, 2)])
def test_padre_another_size_than_built_for(grid):
    mixer = build("padre", 6, degree=3, grid=(4,) * len(grid), kernel_size=3)
    x = tokens(2, 10, 6)
    close(mixer(x, grid=grid), padre_from_matrices(mixer, x, grid=grid), TOL)


@pytest.mark.parametrize("mask", [PAD, HOLES])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"num_prefix_tokens": 2}, {"normalize": "layer"}])
def test_padre_padding_is_as_if_it_were_not_there(mask, options):
    mixer = build("padre", 6, degree=3, kernel_size=5, **options)
    if "num_prefix_tokens" in options:
        mask = mask.clone()
        mask[:, :2] = True
    x = tokens(3, 10, 6)
    y = mixer(x, mask=mask)
    for b in range(3):
        keep = mask[b]
        assert not y[b, ~keep].any()
        if keep.sum() > options.get("num_prefix_tokens", 0):
            alone = x[b : b + 1, keep]
            close(y[b : b + 1, keep], padre_from_matrices(mixer, alone), TOL)


def test_padre_padding_on_a_grid_is_the_edge_of_the_grid():
    mixer = build("padre", 6, degree=3, grid=(3, 4), kernel_size=3)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1:, :3] = True
    x = tokens(1, 12, 6)
    small = x[:, mask.flatten()]
    close(mixer(x, mask=mask.flatten()[None])[:, mask.flatten()], padre_from_matrices(mixer, small, grid=(2, 3)), TOL)


SEEN = [
    {}, {"mask": PAD}, {"mask": HOLES}, {"mask": masks(3, 10, 10)}, {"causal": 1}, {"causal": 1, "mask": PAD},
    {"causal": 1, "mask": masks(3, 10, 10)}, {"causal": 3}, {"causal": 4, "mask": PAD}, {"causal": 4, "mask": HOLES},
    {"causal": 3, "mask": masks(3, 10, 10)},
    {"segments": SEGMENTS}, {"segments": SEGMENTS, "mask": HOLES}, {"segments": SEGMENTS, "causal": 1},
    {"segments": SEGMENTS, "causal": 2, "mask": HOLES}, {"segments": SEGMENTS, "mask": masks(3, 10, 10)},
    {"segments": SEGMENTS, "causal": 1, "mask": PAD}, {"segments": SEGMENTS, "causal": 3},
]  # fmt: skip


@pytest.mark.parametrize("see", SEEN, ids=lambda see: "-".join(see) + str(see.get("causal", "")))
@pytest.mark.parametrize("options", [
    {"degree": 1}, {"degree": 2, "activation": "relu", "gate": "hardsigmoid"},
    {"degree": 3, "reduction": "sum", "groups": 2, "selection_heads": 4, "activation": "identity", "gate": "identity"},
    {"degree": 5, "rotary": "1d", "activation": "clamped_leaky_relu", "bias": False},
    {"degree": 2, "rotary": "1d", "selection_heads": 4, "expand": 1.5},
])  # fmt: skip
def test_pom_masks_and_options(see, options):
    mixer = build("pom", 8, **options)
    x = tokens(3, 10, 8)
    close(mixer(x, **see), pom_from_matrices(mixer, x, **see), TOL)


@pytest.mark.parametrize("see", [
    {}, {"mask": PAD}, {"mask": masks(3, 5, 10)}, {"segments": (SEGMENTS[:, :5], SEGMENTS)},
    {"segments": (SEGMENTS[:, 5:], SEGMENTS), "mask": HOLES},
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"rotary": "1d", "degree": 3}, {"groups": 4, "selection_heads": 2}])
def test_pom_cross(see, options):
    mixer = build("pom", 8, **options)
    x, context = tokens(3, 5, 8), tokens(3, 10, 8, seed=2)
    close(mixer(x, context, **see), pom_from_matrices(mixer, x, context, **see), TOL)


@pytest.mark.parametrize("see", [{}, {"mask": PAD}, {"causal": 1}, {"mask": masks(3, 10, 10)}])
@pytest.mark.parametrize("selection_heads", [None, 4])
@pytest.mark.parametrize(("prefix", "grid"), [(0, (2, 5)), (1, (3, 3)), (4, (2, 3))])
def test_pom_rotary_2d(see, selection_heads, prefix, grid):
    """Class tokens and registers have no row and no column, and are not rotated."""
    mixer = build("pom", 8, rotary="2d", selection_heads=selection_heads, num_prefix_tokens=prefix)
    x = tokens(3, 10, 8)
    close(mixer(x, grid=grid, **see), pom_from_matrices(mixer, x, grid=grid, **see), TOL)


@pytest.mark.parametrize("see", SEEN, ids=lambda see: "-".join(see) + str(see.get("causal", "")))
@pytest.mark.parametrize("heads", [1, 4])
def test_softmax(see, heads):
    mixer = build("softmax", 8, heads=heads)
    x = tokens(3, 10, 8)
    close(mixer(x, **see), attention_from_matrices(mixer, x, **see), TOL)


@pytest.mark.parametrize("see", SEEN)
def test_softmax_relative(see):
    """The bias belongs to the offset of two places: gathered here place by place."""
    mixer = build("softmax", 8, heads=2, relative=True, grid=(2, 5))
    with torch.no_grad():
        mixer.table.normal_()
    bias = mixer.matrices(10)["bias"]
    for i in range(10):
        for j in range(10):
            row, column = i // 5 - j // 5 + 1, i % 5 - j % 5 + 4
            assert torch.equal(bias[:, i, j], mixer.table[row * 9 + column]), "another offset's bias"
    x = tokens(3, 10, 8)
    close(mixer(x, **see), attention_from_matrices(mixer, x, **see), TOL)


def test_softmax_rotary():
    """Pairs (k, k + d/2) of queries and keys turn by position · base^(-2k/d)."""
    mixer = build("softmax", 8, heads=2, rotary=100.0)
    x, turn = tokens(3, 10, 8), torch.zeros(10, 4, 4, dtype=torch.float64)
    for n in range(10):
        for k in range(2):
            angle = torch.tensor(n * 100.0 ** (-k / 2), dtype=torch.float64)
            turn[n, k, k] = turn[n, k + 2, k + 2] = angle.cos()
            turn[n, k + 2, k], turn[n, k, k + 2] = angle.sin(), -angle.sin()
    seen = torch.ones(3, 10, 10, dtype=torch.bool)
    close(mixer(x), reference.softmax(x, x, seen, 2, **mixer.matrices(10), turn=turn), TOL)


@pytest.mark.parametrize(("name", "see"), [
    ("qt", {}), ("qt", {"mask": PAD}), ("softmax", {}), ("softmax", {"mask": PAD}),
    ("softmax", {"mask": masks(3, 5, 10)}),
    ("softmax", {"segments": (SEGMENTS[:, :5], SEGMENTS)}),
])  # fmt: skip
def test_attention_cross(name, see):
    mixer = build(name, 8, heads=2)
    x, context = tokens(3, 5, 8), tokens(3, 10, 8, seed=2)
    close(mixer(x, context, **see), attention_from_matrices(mixer, x, context, **see), TOL)


@pytest.mark.parametrize(("form", "order"), list(itertools.product(["full", "compact"], [0, 1, 2])))
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    "see", [{}, {"mask": PAD}, {"causal": 1}, {"causal": 1, "mask": PAD}, {"causal": 1, "mask": HOLES}]
)
def test_qt(form, order, heads, see):
    mixer = build("qt", 12, form=form, order=order, heads=heads)
    x = tokens(3, 10, 12)
    close(mixer(x, **see), attention_from_matrices(mixer, x, **see), TOL)


@pytest.mark.parametrize("n", [1, 128, 129, 257])
def test_qt_causal_across_chunks(n):
    mixer = build("qt", 8, form="full", heads=2)
    x = tokens(1, n, 8)
    close(mixer(x, causal=True), attention_from_matrices(mixer, x, causal=1), TOL)


@pytest.mark.parametrize("order", [2, 3, "2+3"])
@pytest.mark.parametrize(("reduction", "inside"), [(1, True), (4, True), (4, False)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", [None, PAD])
def test_poly_nl(order, reduction, inside, bias, mask):
    mixer = build("poly_nl", 12, order=order, reduction=reduction, alpha_inside=inside, bias=bias)
    x = tokens(3, 10, 12)
    real = torch.ones(3, 10, dtype=torch.bool) if mask is None else mask
    expected = reference.poly_nl(x, real.double(), **mixer.matrices(10, dtype=torch.float64), inside=inside)
    close(mixer(x, mask=mask), expected, TOL)


def test_where_alpha_belongs_needs_a_bottleneck():
    with pytest.raises(OptionError, match="alpha_inside"):
        build("poly_nl", 12, alpha_inside=False)


def test_poly_nl_takes_feature_maps():
    mixer = build("poly_nl", 12, reduction=4)
    x = tokens(2, 12, 5, 3)
    flat = mixer(x.flatten(2).transpose(1, 2))
    close(mixer(x), flat.transpose(1, 2).reshape(2, 12, 5, 3), TOL)


@pytest.mark.parametrize("sigma", ["softmax", "sigmoid", "tanh", "identity"])
@pytest.mark.parametrize("options", [
    {"grid": (12,)}, {"grid": (3, 4)}, {"grid": (3, 4), "head_mixing": "depthwise"},
    {"grid": (3, 3), "num_prefix_tokens": 3},
    {"grid": (2, 4), "head_mixing": "depthwise", "num_prefix_tokens": 4},
    {"positions": "mean"}, {"positions": "mean", "grid": (2, 6), "head_mixing": "depthwise"},
])  # fmt: skip
@pytest.mark.parametrize("bias", [True, False])
def test_poly_sa(sigma, options, bias):
    mixer = build("poly_sa", 12, heads=3, sigma=sigma, bias=bias, **options)
    x = tokens(2, 12, 12)
    letters = mixer.matrices(12, dtype=torch.float64)
    close(mixer(x), reference.poly_sa(x, 3, **letters, kind=sigma), TOL)
    keys, values = tokens(2, 12, 12, seed=1), tokens(2, 12, 12, seed=2)
    for own in ({"keys": keys}, {"keys": keys, "values": values}, {"keys": x, "values": values}):
        expected = reference.poly_sa(x, 3, **letters, kind=sigma, **own)
        close(mixer(x, own["keys"], values=own.get("values")), expected, TOL)


@pytest.mark.parametrize(("built", "asked", "n"), [((6,), (11,), 11), ((3, 4), (5, 2), 10), ((3, 4), (6, 8), 48)])
def test_poly_sa_resampled(built, asked, n):
    mixer = build("poly_sa", 12, heads=3, grid=built, num_prefix_tokens=2)
    x = tokens(2, n + 2, 12)
    letters = mixer.matrices(n + 2, grid=asked, dtype=torch.float64)
    close(mixer(x, grid=asked), reference.poly_sa(x, 3, **letters), TOL)


def test_poly_sa_resampling_keeps_prefix_and_total():
    """Constant positions mean the same at every length: p_2 stays a mean, and the class token keeps its own weight."""
    import polymix

    mixer = polymix.create_mixer("poly_sa", 12, heads=3, grid=(4, 4), num_prefix_tokens=1, dtype=torch.float64)
    with torch.no_grad():
        mixer.p_1[:, 0] = 5.0
    letters = mixer.matrices(65, grid=(8, 8))
    assert torch.allclose(letters["p_2"].sum(1), torch.ones(3, dtype=torch.float64))
    assert (letters["p_1"][:, 0] == 5).all()
    assert torch.allclose(letters["p_1"][:, 1:], torch.ones(3, 64, dtype=torch.float64))


@pytest.mark.parametrize("mask", [PAD[:2], HOLES])
def test_poly_sa_mean_with_padding(mask):
    mixer = build("poly_sa", 12, heads=3, positions="mean")
    x = tokens(len(mask), 10, 12)
    letters = mixer.matrices(10, dtype=torch.float64)
    close(mixer(x, mask=mask), reference.poly_sa(x, 3, **letters, real=mask.double()), TOL)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_floor(bias):
    mixer = build("linear_floor", 12, bias=bias)
    x = tokens(2, 7, 12)
    close(mixer(x), reference.linear_floor(x, **mixer.matrices(7, dtype=torch.float64)), TOL)


def test_visibility_helper_counts_a_boundary_once():
    """PoM Eq. 8 counts a block's boundary twice; Eq. 7's mask, which the helper spells out, does not."""
    see = visible(1, 6, 6, causal=3)[0]
    assert see.sum(1).tolist() == [3, 3, 3, 6, 6, 6]
