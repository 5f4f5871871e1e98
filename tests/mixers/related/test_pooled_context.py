"""Non-local, squeeze-excite and global context blocks from their equations and their matrices."""

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.lens import as_padre
from tests.helpers import build, close, plus, tokens, visible
from tests.mixers.related.pooled import PAD, SEGMENTS, TOL, D, N, every, letters_of, weighted_softmax


def non_local(mixer, x, context=None, **see):
    context = x if context is None else context
    m, config = letters_of(mixer), mixer.config
    t, p, g = (plus(s @ m[f"W_{k}"], m[f"b_{k}"]) for k, s in (("t", x), ("p", context), ("g", context)))
    may = visible(x.shape[0], x.shape[1], context.shape[1], **see)
    logits = t @ p.mT * (x.shape[-1] ** -0.5 if config.use_scale else 1.0)
    if config.form == "softmax":
        y = weighted_softmax(logits, may) @ g
    else:
        y = (logits * may) @ g
        y = y / may.sum(-1, keepdim=True).clamp_min(1) if config.reduction == "mean" else y
    z = plus(y @ m["W_z"], m["b_z"]) if config.projection else y
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


@pytest.mark.parametrize("options", [
    {"reduction": "sum"}, {"rd_channels": D, "projection": False, "norm": None},
    {"reduction": "sum", "projection": False, "rd_ratio": 1, "use_scale": False, "bias": False},
    {"form": "softmax", "projection": False, "rd_channels": 5}, {"projection": False, "rd_channels": 5},
], ids=str)  # fmt: skip
def test_non_local_without_its_extras(options):
    """No 1/N and no W_z; the last but one is Poly-NL's Eq. 6-7: X W_θ W_φᵀ Xᵀ X W_g, and X with `residual`."""
    options = {"form": "dot_product", **options}
    test_non_local(options)
    test_non_local({**options, "residual": True})
    if options["form"] == "dot_product":
        mixer, x = build("non_local", D, **options), tokens(2, N, D)
        first, state = mixer.prefill(x[:, :4])
        close(torch.cat((first, mixer.prefill(x[:, 4:], state)[0]), 1), mixer(x, causal=True), TOL)
        close(as_padre(mixer, N)(x), mixer(x), 1e-10)
    if not options.get("bias", True):
        mixer = build("non_local", D, **options)
        m = mixer.matrices(N)
        close(mixer(x), x @ m["W_t"] @ m["W_p"].mT @ x.mT @ x @ m["W_g"], TOL)
        assert len(list(mixer.parameters())) == 3


@pytest.mark.parametrize(("options", "argument"), [
    ({"reduction": "sum"}, "reduction"), ({"reduction": "max"}, "reduction"), ({"projection": 2}, "projection"),
])  # fmt: skip
def test_non_local_options(options, argument):
    with pytest.raises(OptionError, match=argument):
        build("non_local", D, **options)


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


def test_dot_product_sums_are_kept_wide():
    """16,385 equal tokens in float16: a sum in that type would be far beyond its range."""
    mixer = polymix.create_mixer("non_local", D, form="dot_product", bias=False, dtype=torch.float16)
    x = torch.full((1, 16385, D), 8.0, dtype=torch.float16)
    wide = mixer.double()(x.double())
    close(mixer.half()(x).double(), wide, 0.02)


def se(mixer, x, context=None, mask=None):
    m, config = letters_of(mixer), mixer.config
    context = x if context is None else context
    out = []
    for b in range(x.shape[0]):
        visible = context[b] if mask is None else context[b][mask[b]]
        s = visible.mean(0) if len(visible) else torch.zeros(D, dtype=torch.float64)
        if config.add_maxpool:
            s = (s + (visible.max(0).values if len(visible) else 0)) / 2
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
