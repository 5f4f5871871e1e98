"""The forms of the linear-attention family, and each mechanism's equation in float64 from `matrices()`."""

import math

import torch
import torch.nn.functional as F

from tests.helpers import build, plus, visible

TOL = 1e-12
PAD = torch.tensor([[True] * 7 + [False] * 5, [False, True] * 6, [True] * 12])
NAMES = (
    "linear",
    "efficient",
    "hydra",
    "sima",
    "castling",
    "focused",
    "relu_linear",
    "xca",
    "performer",
    "additive",
    "power",
    "mala",
    "nala",
    "pola",
    "rala",
)
FORMS = {
    "linear": {"heads": 2}, "linear-relu": {"heads": 3, "feature_map": "relu"},
    "linear-mean": {"heads": 2, "normalize": False}, "linear-3": {"heads": 3, "feature_map": "identity", "normalize": False},
    "efficient": {"heads": 2}, "efficient-reduced": {"heads": 2, "reduction": 3}, "hydra": {}, "sima": {"heads": 3}, "sima-class": {"heads": 2, "class_attention": True},
    "castling": {"heads": 2, "kernel_size": 5}, "castling-3": {"heads": 2, "normalize": False},
    "castling-sparse": {"heads": 3, "sparse_reg": True, "kernel_size": 1},
    "castling-sparse-3": {"heads": 1, "sparse_reg": True, "normalize": False},
    "focused": {"heads": 2, "grid": (3, 4)}, "focused-p": {"heads": 1, "grid": (5, 2), "num_prefix_tokens": 2, "kernel_size": 3},
    "focused-sr": {"heads": 2, "grid": (2, 6), "sr_ratio": 2, "focusing_factor": 1.5},
    "relu_linear": {"heads": 2}, "relu_linear-free": {"heads": 3, "norm": None, "eps": 1e-3},
    "relu_linear-scales": {"heads": 2, "scales": (3, 5), "grid": (4, 3)},
    "relu_linear-prefix": {"heads": 2, "scales": (3,), "grid": (2, 5), "num_prefix_tokens": 2, "norm": None},
    "xca": {"heads": 2}, "performer": {"heads": 2, "features": 5}, "performer-relu": {"heads": 3, "kernel": "relu"},
    "additive": {}, "additive-ones": {"weights": "ones"}, "power": {"heads": 2}, "power-4": {"heads": 3, "degree": 4},
    "power-3": {"heads": 2, "degree": 3, "normalize": False}, "power-gate": {"heads": 3, "gate": True},
    "hla": {"heads": 2}, "mala": {"heads": 2}, "mala-gate": {"heads": 3, "gate": True}, "nala": {"heads": 1},
    "pola": {"heads": 2}, "pola-free": {"heads": 3, "gate": False, "alpha": 0.5}, "rala": {"heads": 2},
    "rala-free": {"heads": 3, "gate": False},
}  # fmt: skip
CAUSAL = [
    key
    for key in FORMS
    if key.split("-")[0] in ("linear", "hydra", "performer", "power", "hla", "mala", "nala", "pola")
]
CROSS = [
    *(key for key in CAUSAL if key not in ("power-gate", "hla")),
    "efficient",
    "efficient-reduced",
    "sima",
    "rala",
    "rala-free",
]
MASKED = [key for key in FORMS if key != "focused-sr"]


def make(key, **extra):
    mixer = build(key.split("-")[0], 12, **{**FORMS[key], **extra})
    return mixer.eval()  # BatchNorm then is a map of each token


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
    parts = []
    for part in scales:
        q, k, v = (t.unflatten(-1, (mixer.heads, -1)).transpose(1, 2) for t in part.chunk(3, -1))
        similarity = q.clamp_min(0) @ k.clamp_min(0).transpose(-1, -2)
        bottom = weighted(similarity, torch.ones_like(v[..., :1]), see) + mixer.config.eps
        parts.append((weighted(similarity, v, see) / bottom).transpose(1, 2).flatten(-2))
    y = plus(torch.cat(parts, -1) @ m["W_o"], m["b_o"])
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


def power(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    similarity = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5) ** mixer.config.degree
    count = see[:, None].to(x.dtype)
    if mixer.config.gate:  # the product of the gates of the real tokens between j and i
        logs = (x @ m["W_g"] + m["b_g"]).sigmoid().log().transpose(1, 2).masked_fill(~see[:, None, -1], 0.0)
        between = torch.stack([(logs.cumsum(-1)[..., [i]] - logs.cumsum(-1)).exp() for i in range(x.shape[1])], 2)
        similarity, count = similarity * between, count * between
    top, count = weighted(similarity, v, see), count.sum(-1, keepdim=True).clamp_min(1)
    if not mixer.config.normalize:
        return join(m, top / count)
    return join(m, top / (weighted(similarity, torch.ones_like(v[..., :1]), see) + 1e-6 * count))


def hla(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    a = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 * see[:, None]
    real = see[:, None].to(x.dtype)
    pairs = weighted(real @ real.transpose(-1, -2), torch.ones_like(v[..., :1]), see)
    return join(m, weighted(a @ a.transpose(-1, -2), v, see) / pairs.clamp_min(1))


def gated(m, x, y):
    """What W_o reads, times the gates of x where there are any."""
    y = y.transpose(1, 2).flatten(-2)
    return plus((y * (x @ m["W_g"] + m["b_g"]) if "W_g" in m else y) @ m["W_o"], m["b_o"])


def mala(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    s = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2) / q.shape[-1] ** 0.5 * see[:, None]
    n = see[:, None].sum(-1, keepdim=True).clamp_min(1)
    z = s.sum(-1, keepdim=True) / n
    return gated(m, x, weighted((s * (1 + 1 / (z + 1e-6)) - z) / n, v, see))


def mean_weights(q, k, v, see):
    """Linear attention of features: weights q·k over their sum, with 1e-6 for each visible key."""
    s = q @ k.transpose(-1, -2)
    return weighted(s, v, see) / (
        weighted(s, torch.ones_like(v[..., :1]), see) + 1e-6 * see[:, None].sum(-1, keepdim=True).clamp_min(1)
    )


def nala(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    size = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + size.tanh())
    q, k = ([(t * sign).clamp_min(0) ** p for sign in (1, -1)] for t, p in ((q / size, power), (k, 3)))
    return join(m, mean_weights(torch.cat(q, -1), torch.cat(k, -1), v, see))


def pola(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    scale, power = ((1 + m["scale"].exp()).log()[:, None], 1 + mixer.config.alpha * m["power"].sigmoid()[:, None])
    (plus_q, minus_q), (plus_k, minus_k) = (
        [(t * sign / scale).clamp_min(0) ** power for sign in (1, -1)] for t in (q, k)
    )
    k, half = torch.cat((plus_k, minus_k), -1), v.shape[-1] // 2
    same = mean_weights(torch.cat((plus_q, minus_q), -1), k, v[..., :half], see)
    return gated(m, x, torch.cat((same, mean_weights(torch.cat((minus_q, plus_q), -1), k, v[..., half:], see)), -1))


def rala(mixer, m, x, context, see):
    q, k, v = project(m, x, context, mixer.heads)
    q, k, real = F.elu(q) + 1, F.elu(k) + 1, see[:, 0].to(x.dtype)
    own = real if context is x else torch.ones(x.shape[:2], dtype=x.dtype)
    mean = torch.einsum("bhnd,bn->bhd", q, own) / own.sum(1).clamp_min(1)[:, None, None]
    weight = torch.einsum("bhd,bhnd->bhn", mean, k / q.shape[-1] ** 0.5).exp() * real[:, None]
    n = real.sum(1)[:, None, None]
    alpha = n * weight / weight.sum(-1, keepdim=True).clamp_min(1e-300)
    return gated(m, x, mean_weights(q, alpha[..., None] * k, v, see))


def additive(mixer, m, x, context, see):
    q, k = (plus(x @ m[f"W_{c}"], m[f"b_{c}"]) for c in "qk")
    q, k = (t / t.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12) for t in (q, k))
    alpha = see[:, 0].to(x.dtype)
    if m["w"] is not None:
        alpha = alpha * (q @ m["w"]) / 12**0.5
        alpha = alpha / alpha.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
    pooled = torch.einsum("bn,bnd->bd", alpha, q)[:, None]
    return plus((plus((pooled * k) @ m["W_p"], m["b_p"]) + q) @ m["W_o"], m["b_o"])


def expected(mixer, x, context=None, **see):
    context = x if context is None else context
    if mixer.config.causal_by_build:
        see["causal"] = 1
    may = visible(x.shape[0], x.shape[1], context.shape[1], **see)
    letters = mixer.matrices(
        x.shape[1], grid=mixer.config.grid if "grid" in mixer.config.to_dict() else None, dtype=torch.float64
    )
    return globals()[mixer.name](mixer, letters, x, context, may)
