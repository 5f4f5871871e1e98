"""ProdPoly, TESA and LatentGNN from their equations and their matrices."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix.errors import CapabilityError, OptionError, ShapeError
from tests.helpers import build, close, plus, tokens
from tests.mixers.related.pooled import PAD, SEGMENTS, TOL, D, N, every, letters_of, weighted_softmax


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


@pytest.mark.parametrize(
    "options", [{}, {"graph": "learned", "affinity": "relu"}, {"bias": False, "kernels": 3}], ids=str
)
def test_latent_gnn_with_batch_norms(options):
    """In evaluation each norm is part of its map; in training it takes the batch's own statistics."""
    mixer = build("latent_gnn", D, latent=5, norm="batch", **options)
    with torch.no_grad():
        for seed in range(3):
            mixer(2 * tokens(4, N, D, seed=seed) + 1)
    x, context = tokens(3, N, D), tokens(3, 5, D, seed=1)
    close(mixer.eval()(x), latent_gnn(mixer, x), TOL)
    close(mixer(x, context), latent_gnn(mixer, x, context), TOL)
    with pytest.raises(CapabilityError, match="other options"):
        mixer(x, mask=PAD)
    mixer.train()
    before = mixer.norms["write"].running_mean.clone()
    mixer(x).square().sum().backward()
    assert not torch.equal(mixer.norms["write"].running_mean, before)
    close(mixer.norms["proj"](torch.randn(50, D).double()).std(0), mixer.norms["proj"].weight.abs(), 0.05)
    assert len(mixer.norms) == 5
    with pytest.raises(OptionError, match="norm"):
        build("latent_gnn", D, norm="layer")
