"""What the mixers that pool tokens declare and promise: cost, padding, degree, one graph for every length, options."""

import sys

import pytest
import torch

import polymix
from polymix.errors import MissingExtraError, OptionError
from tests.helpers import build, close, slow_but, tokens
from tests.mixers.compiled import graphs
from tests.mixers.related.pooled import PAD, POOLED, TOL, D, N


@pytest.mark.parametrize(("name", "options", "flops", "parameters"), [
    ("latent_gnn", {"latent": 100, "kernels": 2, "reduction": 8}, 0.13, 0.6), ("tesa", {"reduction": 4}, 0.94, 1.0),
])  # fmt: skip
def test_poly_nl_table_1a(name, options, flops, parameters):
    """Poly-NL Table 1a at 14 × 14 × 1024: multiply-adds in G, parameters in M."""
    cost = polymix.create_mixer(name, 1024, bias=False, device="meta", **options).cost(
        196, grid=(14, 14) if name == "tesa" else None
    )
    assert round(cost.multiply_adds / 1e9, 2) == flops
    assert round(cost.parameters / 1e6, 1) == parameters


@pytest.mark.parametrize("case", list(POOLED))
def test_padding_is_as_if_it_were_not_there(case):
    mixer = build(case.split("-")[0], D, **POOLED[case])
    x = tokens(3, N, D)
    y = mixer(x, mask=PAD)
    for b in range(2):
        close(y[b : b + 1, PAD[b]], mixer(x[b : b + 1, PAD[b]]), 1e-11)
    assert y.isfinite().all(), "a row of padding alone is no NaN"


@pytest.mark.parametrize("case", [*POOLED, "tesa", "linear_floor"])
def test_feature_maps_come_back_as_feature_maps(case):
    mixer = build(case.split("-")[0], D, **POOLED.get(case, {}))
    image = tokens(2, D, 3, 4)
    grid = {"grid": (3, 4)} if case == "tesa" else {}
    y = mixer(image)
    assert y.shape == image.shape
    close(y.flatten(2).transpose(1, 2), mixer(image.flatten(2).transpose(1, 2), **grid), TOL)


@pytest.mark.parametrize(("name", "options", "named"), [
    ("non_local", {"form": "bat"}, "form"), ("non_local", {"norm": "layer"}, "norm"),
    ("non_local", {"rd_ratio": 0.5, "rd_channels": 4}, "rd_ratio"), ("non_local", {"rd_channels": 0}, "rd_channels"),
    ("se", {"form": "effective", "rd_ratio": 0.5}, "form"), ("se", {"rd_ratio": -1.0}, "rd_ratio"),
    ("gc", {"fuse_scale": False}, "fuse_scale"), ("gc", {"residual": True}, "residual"),
    ("prodpoly", {"degree": 9}, "degree"), ("prodpoly", {"degree": 1, "decomposition": "product"}, "degree"),
    ("prodpoly", {"rank": 3, "decomposition": "product"}, "rank"), ("prodpoly", {"decomposition": "ccp"}, "decomposition"),
    ("tesa", {"grid": (12,)}, "grid"), ("tesa", {"num_prefix_tokens": -1}, "num_prefix_tokens"), ("tesa", {"reduction": 0}, "reduction"), ("tesa", {"form": "dot"}, "form"),
    ("latent_gnn", {"graph": "none"}, "graph"), ("latent_gnn", {"latent": 0}, "latent"),
    ("latent_gnn", {"affinity": "l2"}, "affinity"), ("latent_gnn", {"kernels": 0}, "kernels"),
])  # fmt: skip
def test_options_that_make_no_sense(name, options, named):
    with pytest.raises(OptionError, match=f"`{named}`"):
        polymix.create_mixer(name, D, **options)


@pytest.mark.parametrize(("name", "options", "homogeneous"), [
    ("non_local", {"form": "dot_product", "bias": False}, True), ("non_local", {"form": "dot_product"}, False),
    ("non_local", {"form": "dot_product", "bias": False, "residual": True}, False),
    ("non_local", {"form": "dot_product", "bias": False, "norm": "batch"}, False),
    ("tesa", {"form": "dot_product", "bias": False, "grid": (3, 4)}, True),
    ("tesa", {"form": "dot_product", "grid": (3, 4)}, False),
])  # fmt: skip
def test_dot_products_are_polynomials_of_degree_3(name, options, homogeneous):
    mixer, x = build(name, D, **options).eval(), tokens(2, N, D)
    assert mixer.polynomial.degree == 3
    assert mixer.polynomial.homogeneous == homogeneous
    values = torch.stack([mixer(t * x) for t in range(-2, 4)])
    assert values.diff(3, dim=0).abs().max() > 1e-6 * values.abs().max()
    assert values.diff(4, dim=0).abs().max() < 1e-10 * values.abs().max()
    assert torch.allclose(mixer(2 * x), 8 * mixer(x), rtol=1e-9, atol=1e-12) == homogeneous


def test_what_is_no_polynomial_says_so():
    for name, options in (
        ("non_local", {}), ("se", {}), ("gc", {}), ("latent_gnn", {}), ("tesa", {}),
        ("non_local", {"form": "dot_product", "norm": "batch"}),  # while it trains
    ):  # fmt: skip
        declared = polymix.create_mixer(name, D, **options).polynomial
        assert declared.degree is None
        assert declared.rational is None


COMPILED = [
    ("non_local", {}, {"mask": True, "causal": True}), ("prodpoly", {}, {"causal": True}), ("tesa", {}, {"mask": True, "grid": True}),
    ("non_local", {"form": "dot_product"}, {"mask": True}), ("se", {"add_maxpool": True}, {"mask": True}),
    ("gc", {"rd_ratio": 0.5}, {"mask": True}), ("latent_gnn", {"latent": 4, "reduction": 2}, {"mask": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "call"), slow_but(COMPILED[:1], COMPILED))
def test_compile_with_masks_and_any_length(name, options, call):
    """One graph for every length, padding and all; a graph each for the grids of tesa."""
    calls = []
    for n in (15, 150, 45):
        given = {"mask": torch.arange(n).expand(2, n) < n - 3, "causal": True, "grid": (n // 5, 5)}
        calls.append((tokens(2, n, D, dtype=torch.float32), {key: given[key] for key in call}))
    count = graphs(build(name, D, **options).float(), calls, any_length=name != "tesa")
    assert len(set(count)) == 1 or name == "tesa", "a new length must not compile again"


@pytest.mark.parametrize("name", ["non_local", "se", "gc"])
def test_without_timm_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert name in polymix.list_mixers()
    with pytest.raises(MissingExtraError, match=r"\.\[vision\]"):
        polymix.create_mixer(name, D)
