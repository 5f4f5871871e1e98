"""Non-local, squeeze-excite, global context, ProdPoly, TESA and LatentGNN from their equations and their matrices."""

import itertools
import sys

import pytest
import torch
import torch._dynamo.testing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.errors import CapabilityError, MissingExtraError, OptionError, ShapeError
from tests.helpers import build, close, tokens, visible

TOL = 1e-12
N, D = 12, 8
PAD = torch.tensor([[True] * 7 + [False] * 5, [False] * 4 + [True] * 8, [False] * N])
SEGMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 4, [5] * N, [1, 0, 0, 1, 2, 2, 1, 0, 2, 9, 9, 1]])
POOLED = {  # every mixer that pools tokens, for the laws of padding
    "non_local": {}, "non_local-dot": {"form": "dot_product", "residual": True}, "se": {"add_maxpool": True},
    "se-effective": {"form": "effective"}, "gc": {"rd_ratio": 0.5, "fuse_add": True},
    "gc-mean": {"rd_ratio": 0.5, "use_attn": False}, "latent_gnn": {"latent": 4, "reduction": 2},
    "latent_gnn-relu": {"latent": 4, "reduction": 2, "affinity": "relu", "graph": "learned"},
    "prodpoly": {"degree": 3},
}  # fmt: skip


def plus(x, bias):
    return x if bias is None else x + bias


def letters_of(mixer, n=N, **kw):
    return mixer.matrices(n, dtype=torch.float64, **kw)


def every(**options):
    """Every combination of the options, each a list."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def weighted_softmax(logits, see):
    """Row softmax over what is seen, by its definition; a row that sees nothing is zero."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp() * see
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def non_local(mixer, x, context=None, **see):
    context = x if context is None else context
    m, config = letters_of(mixer), mixer.config
    t, p, g = (plus(s @ m[f"W_{k}"], m[f"b_{k}"]) for k, s in (("t", x), ("p", context), ("g", context)))
    may = visible(x.shape[0], x.shape[1], context.shape[1], **see)
    logits = t @ p.mT * (x.shape[-1] ** -0.5 if config.use_scale else 1.0)
    if config.form == "softmax":
        y = weighted_softmax(logits, may) @ g
    else:
        y = (logits * may) @ g / may.sum(-1, keepdim=True).clamp_min(1)
    z = plus(y @ m["W_z"], m["b_z"])
    z = z if m["gain"] is None else z * m["gain"] + m["shift"]
    return x + z if config.residual else z


@pytest.mark.parametrize("options", every(
    form=["softmax", "dot_product"], use_scale=[True, False], residual=[True, False], bias=[True, False], rd_channels=[None, 5],
))  # fmt: skip
def test_non_local(options):
    mixer = build("non_local", D, **options)
    x, context = tokens(3, N, D), tokens(3, 5, D, seed=1)
    close(mixer(x), non_local(mixer, x), TOL)
    close(mixer(x, mask=PAD), non_local(mixer, x, mask=PAD), TOL)
    close(mixer(x, causal=True), non_local(mixer, x, causal=1), TOL)
    close(mixer(x, context), non_local(mixer, x, context), TOL)
    close(mixer(x, context, mask=PAD[:, 3:8]), non_local(mixer, x, context, mask=PAD[:, 3:8]), TOL)
    close(mixer(x, causal=True, mask=PAD), non_local(mixer, x, causal=1, mask=PAD), TOL)


@pytest.mark.parametrize("causal", [None, 1, 3])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("mask", [None, PAD, tokens(3, N, N, seed=5) > 0])
def test_non_local_softmax_takes_every_mask(causal, segments, mask):
    mixer, x = build("non_local", D), tokens(3, N, D)
    y = mixer(x, mask=mask, causal=causal, segments=segments)
    close(y, non_local(mixer, x, mask=mask, causal=causal or 0, segments=segments), TOL)


@pytest.mark.parametrize("form", ["softmax", "dot_product"])
def test_non_local_batch_norm(form):
    """In evaluation an affine map a channel, as `matrices` says; the averages of a batch leave no room for masks."""
    mixer = build("non_local", D, norm="batch", form=form)
    with torch.no_grad():
        for _ in range(3):
            mixer(3 * tokens(4, N, D))
    x = tokens(3, N, D)
    close(mixer.eval()(x), non_local(mixer, x), TOL)
    for call in ({"mask": PAD}, {"causal": True}, {"segments": SEGMENTS}):
        with pytest.raises(CapabilityError, match="other options"):
            mixer(x, **call)
    with pytest.raises(CapabilityError):
        mixer.prefill(x)


def test_non_local_at_the_default_width_is_timm_s():
    """r = D/8 rounded to a multiple of 8, at least 8."""
    assert [polymix.create_mixer("non_local", dim).inner for dim in (12, 71, 192)] == [8, 8, 24]
    assert polymix.create_mixer("non_local", 64, rd_ratio=0.5).inner == 32


def test_the_dot_product_form_is_linear_and_the_softmax_form_is_not():
    def cost(form, n):
        return polymix.create_mixer("non_local", 64, form=form, device="meta").cost(n).multiply_adds

    assert cost("dot_product", 4096) == 4 * cost("dot_product", 1024) == 4096 * (4 * 64 * 8 + 2 * 64)
    assert cost("softmax", 4096) == 4096 * 4 * 64 * 8 + 2 * 4096**2 * 8


def se(mixer, x, context=None, mask=None):
    m, config = letters_of(mixer), mixer.config
    context = x if context is None else context
    out = []
    for b in range(x.shape[0]):
        kept = context[b] if mask is None else context[b][mask[b]]
        s = kept.mean(0) if len(kept) else torch.zeros(D, dtype=torch.float64)
        if config.add_maxpool:
            s = (s + (kept.max(0).values if len(kept) else 0)) / 2
        s = plus(s @ m["W_1"], m["b_1"])
        if config.form == "effective":
            gate = (s / 6 + 0.5).clamp(0, 1)
        else:
            gate = 1 / (1 + (-plus(s.clamp_min(0) @ m["W_2"], m["b_2"])).exp())
        out.append(x[b] * gate)
    return torch.stack(out)


@pytest.mark.parametrize("options", [
    *every(add_maxpool=[True, False], bias=[True, False], rd_channels=[None, 3]),
    *every(form=["effective"], add_maxpool=[True, False], bias=[True, False]),
])  # fmt: skip
def test_se(options):
    mixer = build("se", D, **options)
    x, context = tokens(3, N, D), tokens(3, 5, D, seed=1)
    close(mixer(x), se(mixer, x), TOL)
    close(mixer(x, mask=PAD), se(mixer, x, mask=PAD), TOL)
    close(mixer(x, context, mask=PAD[:, 3:8]), se(mixer, x, context, PAD[:, 3:8]), TOL)


def gc(mixer, x, context=None, mask=None):
    m, config = letters_of(mixer), mixer.config
    context = x if context is None else context
    see = torch.ones(context.shape[:2]) if mask is None else mask
    logits = plus(context @ m["W_a"], m["b_a"])[..., 0] if config.use_attn else torch.zeros_like(context[..., 0])
    pooled = torch.einsum("bn,bnd->bd", weighted_softmax(logits, see), context)

    def mlp(part):
        s = plus(pooled @ part["W_1"], part["b_1"])
        s = s - s.mean(-1, keepdim=True)
        s = s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return plus((s * part["gain"] + part["shift"]).clamp_min(0) @ part["W_2"], part["b_2"])[:, None]

    y = x if config.fuse_scale or config.residual else torch.zeros_like(x)
    y = y if m["scale"] is None else y / (1 + (-mlp(m["scale"])).exp())
    return y if m["add"] is None else y + mlp(m["add"])


@pytest.mark.parametrize("options", [
    *every(use_attn=[True, False], fuse_add=[True, False], bias=[True, False]),
    *every(use_attn=[True, False], fuse_scale=[False], fuse_add=[True], residual=[True, False]),
])  # fmt: skip
def test_gc(options):
    mixer = build("gc", D, rd_ratio=0.5, **options)
    x, context = tokens(3, N, D), tokens(3, 5, D, seed=1)
    close(mixer(x), gc(mixer, x), TOL)
    close(mixer(x, mask=PAD), gc(mixer, x, mask=PAD), TOL)
    close(mixer(x, context, mask=PAD[:, 3:8]), gc(mixer, x, context, PAD[:, 3:8]), TOL)


@pytest.mark.parametrize(("name", "options"), [("se", {}), ("se", {"form": "effective"}), ("gc", {})])
def test_a_gate_starts_at_an_eighth(name, options):
    """So that x ⊙ gate starts as large as attention's output; without a bias there is nothing to start it with."""
    x = tokens(4, 196, 192, dtype=torch.float32)
    with torch.no_grad():
        share = (polymix.create_mixer(name, 192, **options)(x).std() / x.std()).item()
        plain = (polymix.create_mixer(name, 192, bias=False, **options)(x).std() / x.std()).item()
    assert share == pytest.approx(0.125, rel=0.5)
    assert plain == pytest.approx(0.5, rel=0.2)


def prodpoly(mixer, x):
    m, kind = letters_of(mixer), mixer.config.decomposition
    if kind == "product":
        y = x
        for place, u in enumerate(m["U"]):
            y = y * plus(x @ u, None if m["b_U"] is None else m["b_U"][place])
        return y
    y = x @ m["U"][0]
    if kind == "nested":
        y = y if m["omega"] is None else y * m["omega"][0]
    for n, u in enumerate(m["U"][1:], start=1):
        if kind == "nested":
            y = (x @ u) * plus(y @ m["S"][n - 1], None if m["omega"] is None else m["omega"][n])
        else:
            y = (x @ u) * y + y
    return plus(y @ m["C"], m["b_C"])


@pytest.mark.parametrize("options", [
    *every(degree=[1, 2, 3, 8], decomposition=["coupled", "nested"], bias=[True, False], rank=[None, 5]),
    *every(degree=[2, 3, 8], decomposition=["product"], bias=[True, False]),
])  # fmt: skip
def test_prodpoly(options):
    """The recursion, the degree that it declares (by finite differences along a line), and its homogeneity."""
    mixer, x = build("prodpoly", D, **options), tokens(3, N, D)
    close(mixer(x), prodpoly(mixer, x), TOL)
    declared = mixer.polynomial
    degree = options["degree"]
    assert declared.degree == degree
    step = tokens(3, N, D, seed=2)
    values = torch.stack([mixer(x + t * step) for t in torch.linspace(-1, 1, degree + 3, dtype=torch.float64)])
    differences = [values]
    for _ in range(degree + 1):
        differences.append(differences[-1].diff(dim=0))
    assert differences[degree].abs().max() > 1e-6 * values.abs().max(), "the top degree is there"
    assert differences[degree + 1].abs().max() < 1e-9 * values.abs().max(), "and nothing is above it"
    homogeneous = torch.allclose(mixer(2 * x), 2.0**degree * mixer(x), rtol=1e-9, atol=1e-12)
    assert homogeneous == declared.homogeneous


@pytest.mark.parametrize("decomposition", ["coupled", "nested", "product"])
def test_prodpoly_lets_no_token_see_another(decomposition):
    mixer, x = build("prodpoly", D, decomposition=decomposition, degree=3), tokens(3, N, D)
    y = mixer(x)
    for call in ({"causal": True}, {"causal": 3}, {"mask": PAD}, {"segments": SEGMENTS}):
        assert torch.equal(mixer(x, **call), y)
    close(mixer(x[:, 4:5]), y[:, 4:5], TOL)
    with pytest.raises(CapabilityError):
        mixer(x, mask=torch.ones(3, N, N, dtype=torch.bool))


def test_prodpoly_s_product_form_is_the_second_term_of_poly_nl():
    """X W_p ⊙ X: with W_3 silenced, poly_nl's order "2+3" leaves β times it."""
    poly_nl = build("poly_nl", D, order="2+3")
    with torch.no_grad():
        for p in (poly_nl.proj.weight, poly_nl.proj.bias, poly_nl.alpha):
            p.zero_()
    mixer, x = build("prodpoly", D, decomposition="product"), tokens(2, N, D)
    with torch.no_grad():
        mixer.maps.weight.copy_(poly_nl.product.weight[-D:])
        mixer.maps.bias.copy_(poly_nl.product.bias[-D:])
    close(poly_nl.beta * mixer(x), poly_nl(x), TOL)


def tesa(mixer, x, grid, real=None):
    """Each unfolding as a matrix whose columns are listed one by one, padding left out where it leaves no row."""
    m, config = letters_of(mixer, len(x[0]), grid=grid), mixer.config
    real, prefix = torch.ones(x.shape[:2], dtype=torch.bool) if real is None else real, config.num_prefix_tokens

    def attend(t, p, g, see, length):
        logits = t @ p.mT / max(int(length), 1) ** 0.5
        if config.form == "softmax":
            return weighted_softmax(logits, see[None].double()) @ g
        return (logits * see) @ g / see.sum().clamp_min(1)

    out = []
    for b in range(x.shape[0]):
        t, p, g = (plus(x[b] @ m[f"W_{k}"], m[f"b_{k}"]) * real[b, :, None] for k in "tpg")
        y = attend(t, p, g, real[b], g.shape[-1])
        here = real[b, prefix:].view(grid)
        rows, columns = here.any(1), here.any(0)
        for axis, exists, length in ((0, columns[None, :, None], rows.sum()), (1, rows[:, None, None], columns.sum())):
            t_, p_, g_ = (part[prefix:].view(*grid, -1).movedim(axis, -1) for part in (t, p, g))
            see = exists.expand(*grid, g.shape[-1]).movedim(axis, -1).flatten(0, 1)[:, 0]
            mixed = attend(*(part.flatten(0, 1) for part in (t_, p_, g_)), see, length)
            y[prefix:] += mixed.view(g_.shape).movedim(-1, axis).flatten(0, 1)
        out.append(plus(y @ m["W_z"], m["b_z"]))
    return torch.stack(out)


@pytest.mark.parametrize("options", every(form=["softmax", "dot_product"], bias=[True, False], reduction=[1, 3]))
@pytest.mark.parametrize("grid", [(3, 4), (12, 1), (1, 12)])
def test_tesa(options, grid):
    mixer, x = build("tesa", D, **options), tokens(3, N, D)
    close(mixer(x, grid=grid), tesa(mixer, x, grid), TOL)
    close(mixer(x, grid=grid, mask=PAD)[PAD], tesa(mixer, x, grid, PAD)[PAD], TOL)
    image = x.transpose(1, 2).unflatten(2, grid)
    close(mixer(image).flatten(2).transpose(1, 2), mixer(x, grid=grid), TOL)


@pytest.mark.parametrize("form", ["softmax", "dot_product"])
@pytest.mark.parametrize("prefix", [1, 3])
def test_tesa_with_a_prefix(form, prefix):
    """A class token is asked, and asks, as a position; the rows and columns of the grid know nothing of it."""
    mixer = build("tesa", D, form=form, grid=(3, 3), num_prefix_tokens=prefix)
    x = tokens(3, 9 + prefix, D)
    mask = torch.cat((torch.ones(3, prefix, dtype=torch.bool), PAD[:, :9]), 1)
    close(mixer(x), tesa(mixer, x, (3, 3)), TOL)
    close(mixer(x, mask=mask)[mask], tesa(mixer, x, (3, 3), mask)[mask], TOL)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        mixer(x[:1])
    assert mixer.cost(9 + prefix).flops == counter.get_total_flops()


@pytest.mark.parametrize("form", ["softmax", "dot_product"])
def test_tesa_of_a_padded_image_is_that_of_the_image(form):
    mixer, image = build("tesa", D, form=form), tokens(2, D, 3, 4)
    wide = torch.full((2, D, 5, 7), float("nan"), dtype=torch.float64)
    wide[:, :, 1:4, 2:6] = image
    mask = torch.zeros(2, 5, 7, dtype=torch.bool)
    mask[:, 1:4, 2:6] = True
    close(mixer(wide, mask=mask.flatten(1))[:, :, 1:4, 2:6], mixer(image), TOL)
    empty = mixer(wide, mask=torch.zeros(2, 35, dtype=torch.bool))
    close(empty, mixer.matrices(35, grid=(5, 7))["b_z"][:, None, None].expand_as(empty), TOL)


def test_tesa_is_not_permutation_equivariant():
    """Where tokens stand matters: they share a column with those of their own row and column of the grid."""
    mixer, x = build("tesa", D), tokens(1, N, D)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    assert (mixer(x[:, order], grid=(3, 4)) - mixer(x, grid=(3, 4))[:, order]).abs().max() > 1e-3


def test_tesa_needs_a_grid_and_says_so():
    mixer = build("tesa", D)
    for call in (lambda: mixer(tokens(1, N, D)), lambda: mixer.cost(N)):
        with pytest.raises(ShapeError, match="grid"):
            call()


def latent_gnn(mixer, x, context=None, mask=None):
    m, config = letters_of(mixer), mixer.config
    context, d = x if context is None else context, config.latent
    see = torch.ones(context.shape[:2]) if mask is None else mask
    v, r = plus(context @ m["W_v"], m["b_v"]), plus(x @ m["W_r"], m["b_r"])
    parts = []
    for s in range(config.kernels):
        mine = slice(s * d, (s + 1) * d)
        psi = plus(v @ m["W_psi"][:, mine], None if m["b_psi"] is None else m["b_psi"][mine])
        phi = plus(r @ m["W_phi"][:, mine], None if m["b_phi"] is None else m["b_phi"][mine])
        if config.affinity == "softmax":
            psi, phi = weighted_softmax(psi.mT, see[:, None]).mT, phi.softmax(-1)
        else:
            psi = psi.clamp_min(0) * see[..., None]
            psi = psi / psi.sum(1, keepdim=True).clamp_min(1e-6)
            phi = phi.clamp_min(0) / phi.clamp_min(0).sum(-1, keepdim=True).clamp_min(1e-6)
        nodes = psi.mT @ v
        if config.graph == "learned":
            messages = m["A"][s] @ nodes
        else:
            unit = nodes / nodes.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            messages = (unit @ unit.mT).softmax(-1) @ nodes
        parts.append(phi @ messages)
    return plus(torch.cat(parts, -1) @ m["W_o"], m["b_o"])


@pytest.mark.parametrize("options", every(
    graph=["learned", "similarity"], affinity=["softmax", "relu"], kernels=[1, 3], bias=[True, False], reduction=[1, 3],
))  # fmt: skip
def test_latent_gnn(options):
    mixer = build("latent_gnn", D, latent=5, **options)
    x, context = tokens(3, N, D), tokens(3, 5, D, seed=1)
    close(mixer(x), latent_gnn(mixer, x), TOL)
    close(mixer(x, context), latent_gnn(mixer, x, context), TOL)
    mask = PAD.clone()
    close(mixer(x, mask=mask)[:2], latent_gnn(mixer, x, mask=mask.double())[:2], TOL)
    empty = mixer(x, mask=mask)[2]
    b_o = mixer.matrices(N)["b_o"]
    close(empty + 1, (torch.zeros_like(empty) if b_o is None else b_o.expand_as(empty)) + 1, TOL)


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
@pytest.mark.parametrize("value", [float("nan"), 1e12])
def test_whatever_padding_holds_stays_there(case, value):
    mixer = build(case.split("-")[0], D, **POOLED[case])
    x, real = tokens(3, N, D), PAD[:, :, None]
    y = mixer(x, mask=PAD)
    close(mixer(x.masked_fill(~real, value), mask=PAD)[PAD], y[PAD], TOL)
    for b in range(2):
        close(y[b : b + 1, PAD[b]], mixer(x[b : b + 1, PAD[b]]), 1e-11)
    assert y.isfinite().all(), "a row of padding alone is no NaN"


@pytest.mark.parametrize("case", [*POOLED, "tesa"])
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


@pytest.mark.parametrize(("name", "options", "call"), [
    ("non_local", {}, {"mask": True, "causal": True}), ("non_local", {"form": "dot_product"}, {"mask": True}),
    ("se", {"add_maxpool": True}, {"mask": True}), ("gc", {"rd_ratio": 0.5}, {"mask": True}),
    ("latent_gnn", {"latent": 4, "reduction": 2}, {"mask": True}), ("prodpoly", {}, {"causal": True}),
    ("tesa", {}, {"mask": True, "grid": True}),
])  # fmt: skip
def test_compile_with_masks_and_any_length(name, options, call):
    """One graph for every length, padding and all; a graph each for the grids of tesa."""
    torch._dynamo.reset()
    mixer = build(name, D, **options).float()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in (15, 150, 45):
        x = tokens(2, n, D, dtype=torch.float32)
        given = {
            "mask": torch.arange(n).expand(2, n) < n - 3, "causal": True, "grid": (n // 5, 5),
        }  # fmt: skip
        given = {key: given[key] for key in call}
        close(compiled(x, **given), mixer(x, **given), 1e-5)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1 or name == "tesa", "a new length must not compile again"


@pytest.mark.parametrize("name", ["non_local", "se", "gc"])
def test_without_timm_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert name in polymix.list_mixers()
    with pytest.raises(MissingExtraError, match=r"polymix\[vision\]"):
        polymix.create_mixer(name, D)


def test_dot_product_sums_are_kept_wide():
    """16,385 equal tokens in float16: a sum in that type would be far beyond its range."""
    mixer = polymix.create_mixer("non_local", D, form="dot_product", bias=False, dtype=torch.float16)
    x = torch.full((1, 16385, D), 8.0, dtype=torch.float16)
    wide = mixer.double()(x.double())
    close(mixer.half()(x).double(), wide, 0.02)
