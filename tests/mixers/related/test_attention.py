"""Each mechanism of the linear-attention family equals its equation, recomputed in float64 from `matrices()`."""

import copy
import math
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import polymix
import polymix.mixers.related  # registers the mechanisms
from polymix.errors import CapabilityError, MissingExtraError, OptionError, ShapeError, StateError
from polymix.mixers import config_class
from polymix.mixers.base import Polynomial
from polymix.models import VisionTransformer
from tests.helpers import build, close, tokens, visible

TOL = 1e-12
PAD = torch.tensor([[True] * 7 + [False] * 5, [False, True] * 6, [True] * 12])
NAMES = ("linear", "efficient", "hydra", "sima", "castling", "focused", "relu_linear", "xca", "performer")
FORMS = {
    "linear": {"heads": 2}, "linear-relu": {"heads": 3, "feature_map": "relu"},
    "linear-mean": {"heads": 2, "normalize": False}, "linear-3": {"heads": 3, "feature_map": "identity", "normalize": False},
    "efficient": {"heads": 2}, "hydra": {}, "sima": {"heads": 3}, "sima-class": {"heads": 2, "class_attention": True},
    "castling": {"heads": 2, "kernel_size": 5}, "castling-3": {"heads": 2, "normalize": False},
    "castling-sparse": {"heads": 3, "sparse_reg": True, "kernel_size": 1},
    "castling-sparse-3": {"heads": 1, "sparse_reg": True, "normalize": False},
    "focused": {"heads": 2, "grid": (3, 4)}, "focused-p": {"heads": 1, "grid": (5, 2), "num_prefix_tokens": 2, "kernel_size": 3},
    "focused-sr": {"heads": 2, "grid": (2, 6), "sr_ratio": 2, "focusing_factor": 1.5},
    "relu_linear": {"heads": 2}, "relu_linear-free": {"heads": 3, "norm": None, "eps": 1e-3},
    "relu_linear-scales": {"heads": 2, "scales": (3, 5), "grid": (4, 3)},
    "relu_linear-prefix": {"heads": 2, "scales": (3,), "grid": (2, 5), "num_prefix_tokens": 2, "norm": None},
    "xca": {"heads": 2}, "performer": {"heads": 2, "features": 5}, "performer-relu": {"heads": 3, "kernel": "relu"},
}  # fmt: skip
CAUSAL = [key for key in FORMS if key.split("-")[0] in ("linear", "hydra", "performer")]
CROSS = [key for key in FORMS if key.split("-")[0] in ("linear", "hydra", "performer", "efficient") or key == "sima"]
MASKED = [key for key in FORMS if key != "focused-sr"]


def make(key, **extra):
    mixer = build(key.split("-")[0], 12, **{**FORMS[key], **extra})
    return mixer.eval()  # BatchNorm then is a map of each token


def plus(x, bias):
    return x if bias is None else x + bias


def project(m, x, context, heads):
    """q, k, v (B, heads, N, d)."""
    parts = (plus(t @ m[f"W_{c}"], m[f"b_{c}"]) for c, t in zip("qkv", (x, context, context), strict=True))
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts]


def join(m, y):
    return plus(y.transpose(1, 2).flatten(-2) @ m["W_o"], m["b_o"])


def weighted(similarity, v, see):
    """Σ_j s_ij v_j over the visible j."""
    return (similarity * see[:, None]) @ v


def linear(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    phi = {"elu+1": lambda t: F.elu(t) + 1, "relu": F.relu, "identity": lambda t: t}[mixer.config.feature_map]
    similarity, count = phi(q) @ phi(k).transpose(-1, -2), see.sum(-1, dtype=x.dtype)[:, None, :, None]
    top = weighted(similarity, v, see)
    if not mixer.config.normalize:
        return join(m, top / (count.clamp_min(1) * (12 // mixer.heads) ** 0.5))
    return join(m, top / (weighted(similarity, torch.ones_like(v[..., :1]), see) + 1e-6 * count.clamp_min(1)))


def efficient(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    real = see[:, :1].transpose(1, 2)[:, None]  # (B, 1, N, 1)
    weight = k.exp() * real
    rho_k = weight / weight.sum(2, keepdim=True).clamp_min(1e-300)
    rho_q = q.exp() / q.exp().sum(-1, keepdim=True)
    return join(m, rho_q @ rho_k.transpose(-1, -2) @ v)


def hydra(mixer, m, x, context, see):
    q, k, v = (part[:, 0] for part in project(m, x, context, 1))
    q, k = (part / part.square().sum(-1, keepdim=True).sqrt() for part in (q, k))
    return join(m, (q * (see.to(q.dtype) @ (k * v)))[:, None])


def sima(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    real = see[:, :1].transpose(1, 2)[:, None]
    own = real if context is x else torch.ones(1, dtype=torch.bool)
    q, k = (t * w / (t * w).abs().sum(2, keepdim=True).clamp_min(1e-12) for t, w in ((q, own), (k, real)))
    y = join(m, weighted(q @ k.transpose(-1, -2), v, see))
    return torch.cat((y[:, :1], x[:, 1:]), dim=1) if mixer.config.class_attention else y


def castling(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    config, real = mixer.config, see[:, :1].transpose(1, 2)[:, None].to(x.dtype)

    def unit(t):
        return t / t.norm(dim=-1, keepdim=True).clamp_min(1e-300) if config.normalize else t

    t = v / 2 + weighted(unit(q) @ unit(k).transpose(-1, -2), v, see) / math.pi
    if config.sparse_reg:
        weight = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).exp() * see[:, None]
        a = weight / weight.sum(-1, keepdim=True).clamp_min(1e-300)
        t = t + (a * (a > 0.02)) @ v
    t = (unit(t) * real).transpose(1, 2).flatten(-2)
    v = v.transpose(1, 2).flatten(-2)
    branch = torch.zeros_like(v)
    for b in range(len(x)):  # the convolution over the real tokens alone
        keep = see[b, 0]
        n = int(keep.sum())
        if n:
            branch[b, keep] = torch.einsum("dmn,nd->md", mixer.matrices(n, dtype=torch.float64)["M"], v[b, keep])
    return plus((t + branch) @ m["W_o"], m["b_o"])


def focused(mixer, m, x, context, see):
    config, p = mixer.config, mixer.config.num_prefix_tokens
    if config.sr_ratio > 1:
        s, (rows, columns) = config.sr_ratio, config.grid
        patches = (
            x.reshape(len(x), rows // s, s, columns // s, s, 12).permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
        )
        reduced = plus(patches @ m["W_s"].flatten(1).t(), m["b_s"])
        reduced = reduced - reduced.mean(-1, keepdim=True)
        context = plus(reduced / (reduced.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m["gain"], m["shift"])
        see = torch.ones(len(x), x.shape[1], context.shape[1], dtype=torch.bool)
    q, k, v = (part.transpose(1, 2).flatten(-2) for part in project(m, x, context, mixer.heads))

    def phi(t):
        u = (t.clamp_min(0) + 1e-6) / (1 + m["scale"].exp()).log()
        power = u**config.focusing_factor
        return (power / power.norm(dim=-1, keepdim=True) * u.norm(dim=-1, keepdim=True)).unflatten(
            -1, (mixer.heads, -1)
        )

    similarity = torch.einsum("bmhd,bnhd->bhmn", phi(q), phi(k + m["P"]))
    heads = v.unflatten(-1, (mixer.heads, -1)).transpose(1, 2)
    bottom = weighted(similarity, torch.ones_like(heads[..., :1]), see) + 1e-6 * see.sum(-1, dtype=x.dtype)[
        :, None, :, None
    ].clamp_min(1)
    y = (weighted(similarity, heads, see) / bottom).transpose(1, 2).flatten(-2)
    if config.sr_ratio > 1:  # linear interpolation along the flattened keys
        place = ((torch.arange(12, dtype=x.dtype) + 0.5) * v.shape[1] / 12 - 0.5).clamp_min(0)
        low = place.floor().long()
        high = (low + 1).clamp_max(v.shape[1] - 1)
        v = v[:, low] * (1 - (place - low))[:, None] + v[:, high] * (place - low)[:, None]
    else:
        v = v * see[:, :1].transpose(1, 2)
    branch = torch.einsum("dmn,bnd->bmd", m["M"], v)
    branch[:, p:] = plus(branch[:, p:], m["b_M"])
    return plus((y + branch) @ m["W_o"], m["b_o"])


def relu_linear(mixer, m, x, context, see):
    real = see[:, :1].transpose(1, 2)
    base = torch.cat([plus(x @ m[f"W_{c}"], m[f"b_{c}"]) for c in "qkv"], -1) * real
    scales = [base]
    for conv, b, mix, c in zip(m["M"], m["b_M"], m["W_M"], m["c_M"], strict=True):
        scales.append(plus(plus(torch.einsum("dmn,bnd->bmd", conv, base), b) @ mix, c))
    found = []
    for part in scales:
        q, k, v = (t.unflatten(-1, (mixer.heads, -1)).transpose(1, 2) for t in part.chunk(3, -1))
        similarity = q.clamp_min(0) @ k.clamp_min(0).transpose(-1, -2)
        bottom = weighted(similarity, torch.ones_like(v[..., :1]), see) + mixer.config.eps
        found.append((weighted(similarity, v, see) / bottom).transpose(1, 2).flatten(-2))
    y = plus(torch.cat(found, -1) @ m["W_o"], m["b_o"])
    return y if m["gain"] is None else (y - m["mean"]) / (m["var"] + 1e-5).sqrt() * m["gain"] + m["shift"]


def xca(mixer, m, x, context, see):
    real = see[:, :1].transpose(1, 2)[:, None]
    q, k, v = (part * real for part in project(m, x, context, mixer.heads))
    q, k = (part / part.square().sum(2, keepdim=True).sqrt().clamp_min(1e-12) for part in (q, k))
    logits = torch.einsum("bhnc,bhne->bhce", q, k) * m["tau"][:, None, None]
    return join(m, torch.einsum("bhce,bhne->bhnc", logits.exp() / logits.exp().sum(-1, keepdim=True), v))


def performer(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)

    def phi(t):
        t = t / t.shape[-1] ** 0.25
        if mixer.config.kernel == "relu":
            return (t @ m["omega"].t()).clamp_min(0) + 1e-3
        return (t @ m["omega"].t() - t.square().sum(-1, keepdim=True) / 2).exp()

    similarity = phi(q) @ phi(k).transpose(-1, -2)
    bottom = weighted(similarity, torch.ones_like(v[..., :1]), see)
    return join(m, torch.where(bottom > 0, weighted(similarity, v, see) / bottom.clamp_min(1e-300), 0.0))


def expected(mixer, x, context=None, **see):
    context = x if context is None else context
    may = visible(x.shape[0], x.shape[1], context.shape[1], **see)
    letters = mixer.matrices(
        x.shape[1], grid=mixer.config.grid if "grid" in mixer.config.to_dict() else None, dtype=torch.float64
    )
    return globals()[mixer.name](mixer, letters, x, context, may)


@pytest.mark.parametrize("key", list(FORMS))
@pytest.mark.parametrize("bias", [True, False])
def test_from_matrices(key, bias):
    mixer, x = make(key, bias=bias), tokens(2, 12, 12)
    if mixer.config.to_dict().get("norm") == "batch":
        mixer.train()(tokens(2, 12, 12, seed=4))  # statistics of its own
        mixer.eval()
    close(mixer(x), expected(mixer, x), TOL)


@pytest.mark.parametrize("key", MASKED)
def test_padding(key):
    """Padding takes no part, whatever it holds: real tokens get what the equation over the real tokens says."""
    mixer, x, mask = make(key), tokens(3, 12, 12), PAD
    if mixer.config.to_dict().get("num_prefix_tokens") or key == "sima-class":
        mask = mask.clone()
        mask[:, :2] = True
    y = expected(mixer, x, mask=mask)
    for value in (0.0, 1e12, float("inf"), float("nan")):
        close(mixer(x.masked_fill(~mask[..., None], value), mask=mask)[mask], y[mask], 1e-10)


@pytest.mark.parametrize("key", [key for key in MASKED if "focused" not in key and "scales" not in key and "prefix" not in key
                                 and key != "sima-class"])  # fmt: skip
def test_padding_is_as_if_it_were_not_there(key):
    """Where no grid gives padding a place, a row equals its real tokens alone."""
    mixer, x = make(key), tokens(3, 12, 12)
    y = mixer(x, mask=PAD)
    for b in range(3):
        close(y[b, PAD[b]], mixer(x[b : b + 1, PAD[b]])[0], 1e-11)


@pytest.mark.parametrize("key", MASKED)
def test_a_row_of_padding_alone_is_zero_in_the_mixed_part(key):
    mixer, x, mask = make(key), tokens(2, 12, 12), torch.tensor([[True] * 12, [False] * 12])
    y = mixer(x, mask=mask)
    close(y[0], mixer(x[:1])[0], 1e-11)
    close(y[1], expected(mixer, x[1:], mask=mask[1:])[0], 1e-11)
    if mixer.name not in ("focused", "relu_linear", "sima"):  # a bias of the convolution, a norm, what passes through
        close(y[1], mixer.matrices(12)["b_o"].expand(12, 12), 1e-11)


@pytest.mark.parametrize("key", CAUSAL)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 130, 300])
@pytest.mark.parametrize("mask", [False, True])
def test_causal(key, n, mask):
    """Over several chunks, and for the Performer over groups of blocks, with padding anywhere."""
    mixer, x = make(key), tokens(2, n, 12)
    see = (
        {"causal": 1, "mask": torch.rand(2, n, generator=torch.Generator().manual_seed(5)) > 0.3}
        if mask
        else {"causal": 1}
    )
    real = see.get("mask", torch.ones(2, n, dtype=torch.bool))
    y = mixer(x, causal=True, mask=see.get("mask"))
    if real.any():
        close(y[real], expected(mixer, x, **see)[real], 1e-11)
    state, parts = None, []
    for piece, its in zip(x.split(37, 1), real.split(37, 1), strict=True):
        part, state = mixer.prefill(piece, state, mask=its)
        parts.append(part)
    close(torch.cat(parts, 1)[real], y[real], 1e-11)


@pytest.mark.parametrize("key", CROSS)
@pytest.mark.parametrize("mask", [False, True])
def test_cross(key, mask):
    mixer, x, context = make(key), tokens(3, 5, 12), tokens(3, 12, 12, seed=1)
    see = {"mask": PAD} if mask else {}
    close(mixer(x, context, **see), expected(mixer, x, context, **see), 1e-11)


@pytest.mark.parametrize("key", CAUSAL)
def test_a_huge_or_broken_future_token_does_not_move_the_past(key):
    mixer = make(key).float()
    x = tokens(1, 300, 12, dtype=torch.float32)
    for value in (1e3, float("nan")):
        loud = x.clone()
        loud[:, 280] *= value
        assert torch.equal(mixer(loud, causal=True)[:, :256], mixer(x, causal=True)[:, :256])


@pytest.mark.parametrize("key", CAUSAL)
def test_states(key):
    """A state owns no more than it shows, carries the gradient, and one that does not fit is named."""
    mixer, x = make(key), tokens(2, 40, 12)
    _, state = mixer.prefill(x)
    assert all(part.untyped_storage().nbytes() == part.numel() * part.element_size() for part in state)
    for wrong in (tuple(state), type(state)(*(part[..., :1] for part in state)), (1, 2), "state"):
        with pytest.raises(StateError):
            mixer.prefill(x, wrong)

    def run(x):
        mask = torch.tensor([[True] * 7, [False, True, True, False, True, True, False]])
        _, state = mixer.prefill(x[:, :4], mask=mask[:, :4])
        return mixer.prefill(x[:, 4:], state, mask=mask[:, 4:])[0]

    assert torch.autograd.gradcheck(run, (0.3 * tokens(2, 7, 12).requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("key", CAUSAL)
def test_causal_compiles_without_breaks(key):
    torch._dynamo.reset()
    mixer, x = make(key).float(), tokens(2, 40, 12, dtype=torch.float32).requires_grad_()
    y = torch.compile(mixer, fullgraph=True, backend="aot_eager")(x, causal=True)
    close(y, mixer(x, causal=True), 1e-5)
    (ours,), (plain,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(mixer(x, causal=True).sum(), x)
    close(ours, plain, 1e-4)


@pytest.mark.parametrize(
    "key", ["linear", "efficient", "hydra", "sima", "castling", "relu_linear-free", "xca", "performer"]
)
def test_compiles_with_masks_and_any_length(key):
    torch._dynamo.reset()
    mixer = make(key).float()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, graphs = torch.compile(mixer, fullgraph=True, dynamic=True, backend=counter), []
    for n in (13, 150, 40):
        x, mask = tokens(2, n, 12, dtype=torch.float32), torch.arange(n).expand(2, n) < n - 3
        close(compiled(x, mask=mask), mixer(x, mask=mask), 1e-5)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1, "a new length must not compile again"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("token", [True, False])
def test_in_a_vision_transformer(name, token):
    """The host's grid and class token reach those that want them, and every parameter learns."""
    config = config_class(name)(**({"scales": (3,)} if name == "relu_linear" else {}))
    host = VisionTransformer(config, image_size=16, patch_size=4, dim=12, depth=1, class_token=token, classes=3)
    host(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in host.parameters())


DECLARED = {
    "linear-3": Polynomial(3), "castling-3": Polynomial(3), **{key: Polynomial() for key in FORMS if key not in ("linear-3", "castling-3")},
}  # fmt: skip


@pytest.mark.parametrize("key", list(FORMS))
def test_declared_polynomial(key):
    """The (degree + 1)-th difference along a line vanishes where a degree is declared, and some tenth one does not elsewhere."""
    mixer = make(key)
    assert mixer.polynomial == DECLARED[key]
    start, way = tokens(1, 12, 12), tokens(1, 12, 12, seed=1)
    y = torch.stack([mixer(start + t * way) for t in torch.linspace(-1, 1, 12, dtype=torch.float64)])
    for _ in range(4):
        y = y.diff(dim=0)
    if mixer.polynomial.degree == 3:
        assert y.abs().max() < 1e-9
    else:
        for _ in range(6):
            y = y.diff(dim=0)
        assert y.abs().max() > 1e-4


def test_homogeneity_is_declared_where_it_holds():
    x = tokens(1, 12, 12)
    for key, degree in (("linear-3", True), ("castling-3", False)):
        mixer = make(key, bias=False)
        assert mixer.polynomial == Polynomial(3, homogeneous=degree)
        gap = (mixer(1.7 * x) - 1.7**3 * mixer(x)).abs().max()
        assert (gap < 1e-9) == degree


def test_norms_of_sima_freeze_it_to_a_polynomial():
    """With q and k divided by the norms of one input, the mixer there is Q̂ (K̂ᵀ V)."""
    mixer, x = make("sima"), tokens(2, 12, 12)
    q_norm, k_norm = mixer.norms(x)
    assert q_norm.shape == k_norm.shape == (2, 12)
    m = mixer.matrices(12, dtype=torch.float64)
    q, k, v = (part.transpose(1, 2).flatten(-2) for part in project(m, x, x, mixer.heads))
    q, k = ((t / norm[:, None]).unflatten(-1, (3, 4)).transpose(1, 2) for t, norm in ((q, q_norm), (k, k_norm)))
    close(mixer(x), join(m, q @ (k.transpose(-1, -2) @ v.unflatten(-1, (3, 4)).transpose(1, 2))), TOL)


def test_dropout_of_class_attention_spares_what_passes_through():
    mixer, x = build("sima", 12, class_attention=True, dropout=0.9), tokens(4, 9, 12)
    y = mixer.train()(x)
    assert torch.equal(y[:, 1:], x[:, 1:])
    assert (y[:, 0] == 0).any()


@pytest.mark.parametrize("key", ["sima-class", "castling-sparse", "focused-sr", "focused-p", "relu_linear-prefix",
                                 "relu_linear-scales"])  # fmt: skip
def test_cost_of_the_further_forms(key):
    from torch.utils.flop_counter import FlopCounterMode

    mixer = make(key)
    with FlopCounterMode(display=False) as counter:
        mixer(tokens(1, 12, 12))
    assert mixer.cost(12).flops == counter.get_total_flops()


@pytest.mark.parametrize("key", ["sima-class", "castling-sparse", "castling-sparse-3", "focused-sr", "focused-p", "relu_linear-prefix",
                                 "linear-mean"])  # fmt: skip
def test_gradients_of_the_further_forms(key):
    mixer, x = make(key), 0.5 * tokens(2, 12, 12).requires_grad_()
    assert torch.autograd.gradcheck(mixer, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(mixer, (0.5 * tokens(1, 12, 12).requires_grad_(),), fast_mode=True)
    mixer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mixer.parameters())


# --- focused


@pytest.mark.parametrize("grid", [(6, 8), (2, 3)])
@pytest.mark.parametrize("key", ["focused", "focused-sr"])
def test_focused_serves_another_grid(key, grid):
    """Its code of the positions is resampled, so that a constant one stays what it was."""
    mixer = make(key)
    with torch.no_grad():
        mixer.positional_encoding.copy_(mixer.positional_encoding[:, :1].clone())
    fresh = build("focused", 12, **{**FORMS[key], "grid": grid}).eval()
    state = {
        **mixer.state_dict(),
        "positional_encoding": mixer.positional_encoding[:, :1].expand(fresh.positional_encoding.shape),
    }
    fresh.load_state_dict(state)
    x = tokens(2, math.prod(grid), 12)
    close(mixer(x, grid=grid), fresh(x), 1e-11)


def test_focusing_does_not_overflow_whatever_its_factor():
    mixer = build("focused", 12, grid=(3, 4), focusing_factor=60).float()
    assert mixer(1e3 * tokens(2, 12, 12, dtype=torch.float32)).isfinite().all()


# --- relu_linear


@pytest.mark.parametrize("options", [{}, {"scales": (3,)}])
def test_relu_linear_takes_feature_maps(options):
    mixer, x = build("relu_linear", 12, heads=2, **options).eval(), tokens(2, 12, 4, 5)
    y = mixer(x)
    flat = mixer(x.flatten(2).transpose(1, 2), grid=(4, 5) if options else None)
    close(y, flat.transpose(1, 2).unflatten(2, (4, 5)), TOL)


@pytest.mark.parametrize("form", ["relu_linear", "relu_linear-scales"])
@pytest.mark.parametrize("train", [True, False])
def test_gradients_through_batch_norm(form, train):
    """With a cotangent that the norm's mean does not take out."""
    mixer, x = make(form).train(train), tokens(2, 12, 12).requires_grad_()
    weight = tokens(2, 12, 12, seed=3)
    assert torch.autograd.gradcheck(lambda x: mixer(x) * weight, (x,), fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: mixer(x, mask=PAD[:2]) * weight * PAD[:2, :, None], (x,), fast_mode=True)


def test_padding_stays_out_of_the_statistics_of_the_batch():
    mixer, x = make("relu_linear").train(), tokens(1, 12, 12)
    other = copy.deepcopy(mixer)
    mask = torch.arange(12)[None] < 9
    broken = x.masked_fill(~mask[..., None], float("nan"))
    close(mixer(broken, mask=mask)[:, :9], other(x[:, :9]), TOL)
    close(mixer.mla.proj.norm.running_var, other.mla.proj.norm.running_var, TOL)


def test_relu_linear_in_float64_is_float64():
    """timm's own forward casts to float32 on the way, and is off by its rounding."""
    mixer, x = build("relu_linear", 12, heads=2, eps=1e-5).eval(), tokens(2, 12, 12)
    theirs = mixer.mla(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    gap = (mixer(x) - theirs).abs().max()
    assert 1e-12 < gap < 1e-5


def test_without_timm_the_names_are_listed_and_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert {"relu_linear", "xca"} <= set(polymix.list_mixers())
    for name in ("relu_linear", "xca"):
        with pytest.raises(MissingExtraError, match="polymix\\[vision\\]"):
            polymix.create_mixer(name, 12)


# --- errors


@pytest.mark.parametrize(("name", "options"), [
    ("linear", {"feature_map": "identity"}), ("linear", {"feature_map": "exp"}), ("linear", {"normalize": 1}),
    ("castling", {"kernel_size": 4}), ("castling", {"sparse_reg": None}), ("focused", {"grid": (3, 4), "kernel_size": 2}),
    ("focused", {}), ("focused", {"grid": (12,)}), ("focused", {"grid": (3, 4), "focusing_factor": 0.5}),
    ("focused", {"grid": (4, 4), "sr_ratio": 2, "num_prefix_tokens": 1}), ("relu_linear", {"scales": (4,)}),
    ("relu_linear", {"scales": 5}), ("relu_linear", {"grid": (3, 4)}), ("relu_linear", {"norm": "layer"}),
    ("relu_linear", {"eps": 0.0}), ("performer", {"features": 0}), ("performer", {"kernel": "exp"}),
    ("performer", {"seed": -1}), ("sima", {"class_attention": "yes"}), ("xca", {"heads": 5}), ("hydra", {"heads": 2}),
])  # fmt: skip
def test_options_that_make_no_sense(name, options):
    with pytest.raises(OptionError):
        polymix.create_mixer(name, 12, **options)


@pytest.mark.parametrize(("key", "call"), [
    *((key, {"causal": True}) for key in FORMS if key not in CAUSAL),
    *((key, {"context": tokens(2, 5, 12)}) for key in FORMS if key not in CROSS),
    ("focused-sr", {"mask": PAD[:2]}), *((name, {"mask": torch.ones(2, 12, 12, dtype=torch.bool)}) for name in NAMES),
])  # fmt: skip
def test_what_a_mechanism_cannot_do_is_refused(key, call):
    with pytest.raises(CapabilityError):
        make(key)(tokens(2, 12, 12), **call)


def test_scales_without_a_grid_say_so():
    with pytest.raises(ShapeError, match="rows and columns"):
        build("relu_linear", 12, scales=(3,))(tokens(2, 12, 12))
    with pytest.raises(ShapeError, match="sr_ratio"):
        build("focused", 12, grid=(4, 4), sr_ratio=2)(tokens(2, 5, 12), grid=(1, 5))
