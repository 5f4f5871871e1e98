"""How the mechanisms of PADRe's Table 1, and some others, are written as sums of chains."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.errors import CapabilityError, OptionError, check_choice, check_int
from polymix.lens.chains import F64, Chain, FormArguments, PadreForm, register_form, shift
from polymix.mixers import PolyNlMixer, PolySaMixer, PomMixer, QtMixer, SoftmaxMixer, TokenMixer
from polymix.mixers.related import (
    AdditiveMixer,
    CastlingMixer,
    Conv2FormerMixer,
    HyenaMixer,
    LinearMixer,
    MambaMixer,
    NonLocalMixer,
    ProdPolyMixer,
    SimaMixer,
)
from polymix.ops.related.selective_scan import selective_scan


def _needs(mixer: TokenMixer, **options: Any) -> None:
    for name, value in options.items():
        if getattr(mixer.config, name) != value:
            got = f"{mixer.name} with {name}={getattr(mixer.config, name)!r}"
            raise CapabilityError(
                "mixer", got, f"{name}={value!r}, which makes it a polynomial", f"Build it with {name}={value!r}."
            )


def _times(bias: Tensor | None, matrix: Tensor) -> Tensor | None:
    return None if bias is None else bias @ matrix


def _pooled_products(q: Any, k: Any, v: Any, heads: int, pool: Tensor, gain: float = 1.0) -> list[Chain]:
    """Q (pool of Kᵀ V) as Σ_r (pool (V ⊙ K P_r)) ⊙ Q P_r, one chain per shift r. q, k, v are (matrix, bias)."""
    dim = v[0].shape[1]
    chains = []
    for r in range(dim // heads):
        p = shift(dim, heads, r)
        chains.append(Chain(B=[v[0], k[0] @ p, q[0] @ p], b=[v[1], _times(k[1], p), _times(q[1], p)],
                            C=[None, pool], gain=gain))  # fmt: skip
    return chains


def _qkv(m: dict[str, Any]) -> list[tuple[Tensor, Tensor | None]]:
    return [(m[f"W_{name}"], m[f"b_{name}"]) for name in "qkv"]


@register_form(SimaMixer, "x")
def _sima(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, class_attention=False)
    if options.x is None:
        raise OptionError("x", None, "the input at which SimA's norms are frozen", "Pass x= of shape (1, n, D).")
    norms = [norm[0].cpu() for norm in mixer.norms(options.x.to(F64))]
    q, k = ((w / norm, None if b is None else b / norm) for (w, b), norm in zip(_qkv(m)[:2], norms, strict=True))
    chains = _pooled_products(q, k, _qkv(m)[2], mixer.heads, torch.ones(n, n, dtype=F64))
    return PadreForm(chains, m["W_o"], m["b_o"], of="sima with norms frozen at x")


@register_form(AdditiveMixer, "x")
def _additive(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    """With the norms frozen at x, scaling tokens is a map of tokens; g is a pooled product, as in Poly-NL."""
    if options.x is None:
        raise OptionError("x", None, "the input at which the norms are frozen", "Pass x= of shape (1, n, D).")
    x, dim = options.x.to(F64)[0], mixer.dim
    rows = [x @ m[f"W_{name}"] + (0.0 if m[f"b_{name}"] is None else m[f"b_{name}"]) for name in "qk"]
    A_q, A_k = (torch.diag(1 / row.norm(dim=-1)) for row in rows)
    query, key = ((m[f"W_{name}"], m[f"b_{name}"]) for name in "qk")
    pool, learned = torch.ones(n, n, dtype=F64), m["w"] is not None
    B, b, A, C, gain = [query[0]], [query[1]], [A_q], [], 1.0
    if learned:
        to = (m["w"] * dim**-0.5)[:, None].expand(dim, dim)  # a_i in every channel
        gain = 1 / (A_q @ rows[0] @ to)[:, 0].norm().item()
        B, b, A, C = [query[0] @ to, *B], [_times(query[1], to), *b], [A_q, *A], [None]
    cubic = Chain(B=[*B, key[0]], b=[*b, key[1]], A=[*A, A_k], C=[*C, pool], gain=gain)
    plain = Chain(B=[query[0]], b=[query[1]], A=[A_q])
    bias = m["b_o"] if m["b_p"] is None else m["b_p"] @ m["W_o"] + m["b_o"]
    chains = [_placed(cubic, 0, 2 * dim), _placed(plain, dim, 2 * dim)]
    return PadreForm(chains, torch.cat((m["W_p"] @ m["W_o"], m["W_o"])), bias, of="additive with norms frozen at x")


@register_form(LinearMixer)
def _linear_attention(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, feature_map="identity", normalize=False)
    mean = torch.full((n, n), 1 / n, dtype=F64)
    q, k, v = _qkv(m)
    chains = _pooled_products(q, k, v, mixer.heads, mean, (mixer.dim // mixer.heads) ** -0.5)
    return PadreForm(chains, m["W_o"], m["b_o"])


def _widened(pair: tuple[Tensor, Tensor | None], width: int) -> tuple[Tensor, Tensor | None]:
    """A map and its bias with zero channels up to `width`."""
    weight, bias = pair
    more = (0, width - weight.shape[1])
    return F.pad(weight, more), None if bias is None else F.pad(bias, more)


@register_form(NonLocalMixer)
def _non_local(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, form="dot_product")
    mean = torch.full((n, n), 1 / n if mixer.config.reduction == "mean" else 1.0, dtype=F64)
    width = m["W_g"].shape[1]
    t, p, g = (_widened((m[f"W_{name}"], m[f"b_{name}"]), width) for name in "tpg")
    chains = _pooled_products(t, p, g, 1, mean, mixer.scale)
    V, bias = torch.eye(width, dtype=F64) if m["W_z"] is None else m["W_z"], m["b_z"]
    if m["gain"] is not None:
        V = V * m["gain"]
        bias = m["shift"] if bias is None else bias * m["gain"] + m["shift"]
    if mixer.config.residual:
        eye = torch.eye(mixer.dim, dtype=F64)
        chains = [_placed(chain, 0, width + mixer.dim) for chain in chains]
        chains.append(_placed(Chain(B=[eye]), width, width + mixer.dim))
        V = torch.cat((V, eye))
    return PadreForm(chains, V, bias)


@register_form(CastlingMixer)
def _castling(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, normalize=False, sparse_reg=False)
    q, k, v = _qkv(m)
    cubic = _pooled_products(q, k, v, mixer.heads, torch.ones(n, n, dtype=F64), 1 / math.pi)
    linear = Chain(B=[v[0]], b=[v[1]], A=[0.5 * torch.eye(n, dtype=F64) + m["M"]])
    return PadreForm([*cubic, linear], m["W_o"], m["b_o"])


@register_form(Conv2FormerMixer)
def _conv2former(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, activation="identity", norm=None)
    chain = Chain(B=[m["W_2"], m["W_1"]], b=[m["b_2"], m["b_1"]], A=[None, m["A"]], c=[None, m["b_A"]])
    return PadreForm([chain], m["W_3"], m["b_3"])


@register_form(HyenaMixer)
def _hyena(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    order = mixer.config.order
    maps = m["W_in"].chunk(order + 1, dim=1)
    biases = (None,) * (order + 1) if m["b_in"] is None else m["b_in"].chunk(order + 1)
    turn = [order, *range(order - 1, -1, -1)]  # v, x_{order-1}, …, x_0

    def branch(m: dict[str, Any], place: Tensor) -> Chain:
        """place: the token at each step of the scan."""
        after = (None,) * (order + 1) if m["b_short"] is None else m["b_short"].chunk(order + 1)
        back = place.argsort()
        short = m["T"][:, back][:, :, back].chunk(order + 1)
        return Chain(B=[maps[i] for i in turn], b=[biases[i] for i in turn], A=[short[i] for i in turn],
                     c=[after[i] for i in turn], C=[None, *(h[:, back][:, :, back] for h in m["H"])])  # fmt: skip

    p = mixer.config.num_prefix_tokens
    half = (n - p) // 2
    place = torch.cat((p + torch.arange(half), torch.arange(p), torch.arange(p + half, n)))
    chains = [branch(m, place)] + ([branch(m["back"], place.flip(0))] if "back" in m else [])
    return PadreForm(chains, m["W_out"], m["b_out"])


@register_form(PolyNlMixer)
def _poly_nl(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    dim, mean = mixer.dim, torch.full((n, n), 1 / n, dtype=F64)
    eye = torch.eye(dim, dtype=F64)
    into, b_in = m.get("W_in", eye), m.get("b_in")
    out, beta, inside = m.get("W_out"), m["beta"], "W_out" in m and mixer.config.alpha_inside

    def through(w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        bias = _times(b_in, w)
        return into @ w, bias if b is None else b if bias is None else bias + b

    def after(w: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """β (Y w + b) W_out + β b_out, for Y before W_3 or beside it."""
        w = torch.eye(into.shape[1], dtype=F64) if w is None else w
        w = beta * (w if out is None else w @ out)
        b = b if out is None or b is None else b @ out
        return w, None if b is None else beta * b

    pairs = [through(m["W_1"], m["b_1"])] + ([] if m["W_2"] is None else [through(m["W_2"], m["b_2"])])
    last, bias = after(m["W_3"], m["b_3"])
    if m.get("b_out") is not None:
        b_out = m["b_out"] if inside else beta * m["b_out"]
        bias = b_out if bias is None else bias + b_out
    # All chains share V. So each gets channels of its own, and V has the maps of all of them, one below the other.
    width = last.shape[0]
    cubic = Chain(B=[*(w for w, _ in pairs), into], b=[*(b for _, b in pairs), b_in],
                  C=[*(None,) * (len(pairs) - 1), mean])  # fmt: skip
    linear = Chain(B=[into], b=[b_in]) if inside else Chain(B=[eye])
    dim = linear.B[0].shape[1]
    direct = m["alpha"] * (m["W_out"] if inside else eye)
    blocks, chains = [last, direct], [_placed(cubic, 0, width + dim), None]
    if "W_p" in m:
        blocks.append(after(None, None)[0])
        width_p = blocks[2].shape[0]
        square = Chain(B=[through(m["W_p"], m["b_p"])[0], into], b=[through(m["W_p"], m["b_p"])[1], b_in])
        chains = [_placed(cubic, 0, width + dim + width_p), None, _placed(square, width + dim, width + dim + width_p)]
    total = sum(block.shape[0] for block in blocks)
    chains[1] = _placed(linear, width, total)
    return PadreForm([chain for chain in chains if chain is not None], torch.cat(blocks), bias)


def _placed(chain: Chain, start: int, total: int) -> Chain:
    """The chain widened to `total` channels: its own begin at `start`, the others are zero."""

    def padded(t: Tensor | None) -> Tensor | None:
        return None if t is None else F.pad(t, (start, total - start - t.shape[-1]))

    maps = [F.pad(w, (start, total - start - w.shape[1])) for w in chain.B]
    return Chain(B=maps, b=[padded(b) for b in chain.b], A=chain.A, C=chain.C, c=[padded(c) for c in chain.c],
                 gain=chain.gain)  # fmt: skip


@register_form(PolySaMixer)
def _poly_sa(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, sigma="identity")
    each = torch.einsum("hm,hn->hmn", m["p_1"], m["p_2"]).repeat_interleave(mixer.dim // mixer.heads, dim=0)
    q, k, v = _qkv(m)
    chain = Chain(B=[k[0], v[0], q[0]], b=[k[1], v[1], q[1]], C=[None, each])
    if m["W_o"].ndim == 3:
        return PadreForm([chain], None, m["b_o"], U=m["W_o"])
    return PadreForm([chain], m["W_o"], m["b_o"])


@register_form(PomMixer)
def _pom(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, activation="identity", gate="identity", rotary=None)
    pool = torch.full((n, n), 1 / n if mixer.config.reduction == "mean" else 1.0, dtype=F64)
    width = m["alpha"].shape[0]
    copies = width // m["W_s"].shape[1]
    gate = m["W_s"].repeat_interleave(copies, dim=1)
    b_gate = None if m["b_s"] is None else m["b_s"].repeat_interleave(copies)
    chains = []
    for p in range(1, m["alpha"].shape[1] + 1):
        weighted = m["W_h"] * m["alpha"][:, p - 1]  # α_p on one of the p factors
        b = None if m["b_h"] is None else m["b_h"] * m["alpha"][:, p - 1]
        chains.append(Chain(B=[weighted, *[m["W_h"]] * (p - 1), gate], b=[b, *[m["b_h"]] * (p - 1), b_gate],
                            C=[*(None,) * (p - 1), pool]))  # fmt: skip
    return PadreForm(chains, m["W_o"], m["b_o"])


@register_form(ProdPolyMixer)
def _prodpoly(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    if mixer.config.decomposition == "product":
        eye = torch.eye(mixer.dim, dtype=F64)
        return PadreForm([Chain(B=[eye, *m["U"]], b=[None, *(m["b_U"] or ())])])
    if mixer.config.decomposition == "nested":
        U, S, omega = m["U"], m["S"], m["omega"]
        if omega is None:
            return PadreForm([Chain(B=U, D=S)], m["C"], m["b_C"])
        # Each ω_n starts a chain of its own, which continues with the later factors.
        chains = [Chain(B=[U[i] * omega[i], *U[i + 1 :]], D=S[i:]) for i in range(len(U))]
        return PadreForm(chains, m["C"], m["b_C"])
    ones = torch.ones(m["U"][0].shape[1], dtype=F64)  # (z U_n) ⊙ x + x = (z U_n + 1) ⊙ x
    biases = [None, *[ones] * (len(m["U"]) - 1)]
    return PadreForm([Chain(B=m["U"], b=biases)], m["C"], m["b_C"])


@register_form(QtMixer)
def _qt(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    _needs(mixer, form="full")
    if mixer.config.scales:
        got = f"qt with scales={mixer.config.scales}"
        raise CapabilityError("mixer", got, "scales=()", "Build it without scales.")
    return _taylor(mixer, m, n, mixer.config.order, "the mixer", exact=mixer.config.order != 1)


@register_form(SoftmaxMixer, "order")
def _softmax(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    order = 2 if options.order is None else options.order
    check_int("order", order, 0)
    return _taylor(mixer, m, n, order, f"softmax attention, exp to order {order}", exact=False)


def _taylor(mixer: Any, m: dict[str, Any], n: int, last: int, of: str, *, exact: bool) -> PadreForm:
    """Attention with exp(s) truncated after s^last: Σ_α (Q^α Kᵀ^α) V / α! over the same sum without V.

    α runs over the monomials of a head's channels.
    """
    heads, (q, k, v) = mixer.heads, _qkv(m)
    d, pool = mixer.dim // heads, torch.ones(n, n, dtype=F64)

    def spread(pair: tuple[Tensor, Tensor | None], i: int) -> tuple[Tensor, Tensor | None]:
        """Channel i of every head, copied to all channels of that head."""
        to = torch.block_diag(*[F.one_hot(torch.tensor(i), d).to(F64)[:, None].expand(d, d)] * heads)
        return pair[0] @ to, _times(pair[1], to)

    above: list[Chain] = [Chain(B=[v[0]], b=[v[1]], A=[pool])]
    below: list[Chain] = []
    for length in range(1, last + 1):
        for monomial in itertools.combinations_with_replacement(range(d), length):
            gain = d ** (-length / 2) / math.prod(math.factorial(c) for c in Counter(monomial).values())
            keys, queries = ([spread(pair, i) for i in monomial] for pair in (k, q))
            for chains, first in ((above, [v]), (below, [])):
                parts = [*first, *keys, *queries]
                steps = [None] * (len(first) + length - 1) + [pool] + [None] * (length - 1)
                chains.append(Chain(B=[w for w, _ in parts], b=[b for _, b in parts], C=steps, gain=gain))
    V, bias = m["W_o"], m["b_o"]
    return PadreForm(above, V, bias, below=below, constant=float(n), heads=heads, of=of, exact=exact)


@register_form(MambaMixer, "x", "decay")
def _mamba(mixer: Any, m: dict[str, Any], n: int, options: FormArguments) -> PadreForm:
    check_choice("decay", options.decay, ("exact", "linear"))
    if mixer.config.bidirectional:
        cure = "Build it with bidirectional=False: each direction has a form of its own."
        raise CapabilityError("mixer", "mamba with bidirectional=True", "mamba with one direction", cure)
    A = m["A"]
    width, states = A.shape

    def inputs(x: Tensor) -> Tensor:
        u = (x @ m["W_in"])[..., :width] + (0.0 if m["b_in"] is None else m["b_in"][:width])
        u = torch.einsum("dmn,bnd->bmd", m["T"], u)
        return F.silu(u if m["b_conv"] is None else u + m["b_conv"])

    def steps(u: Tensor) -> Tensor:
        return F.softplus(u @ m["W_Delta1"] @ m["W_Delta2"] + m["b_Delta"])

    def target(u: Tensor) -> Tensor:
        return selective_scan(u, steps(u), A, u @ m["W_B"], u @ m["W_C"], m["D"])[0]

    u = torch.zeros(1, n, width, dtype=F64) if options.x is None else inputs(options.x.to(F64))
    frozen = steps(u)[0]  # (N, E)
    scaled = frozen[:, :, None] * A
    log = scaled if options.decay == "exact" else torch.log((1 + scaled).clamp_min(1e-300))
    total = log.cumsum(0)  # (N, E, S); the decay from s to t is the product of the steps after s
    ratio = (total[:, None] - total[None]).permute(2, 3, 0, 1)  # (E, S, t, s)
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    decay = torch.where(seen, ratio, -torch.inf).exp() * frozen.t()[:, None, None, :]
    eye, one = torch.eye(width, dtype=F64), torch.ones(1, width, dtype=F64)
    chains = [Chain(B=[eye, m["W_B"][:, [s]] @ one, m["W_C"][:, [s]] @ one], C=[None, decay[:, s]])
              for s in range(states)]  # fmt: skip
    chains.append(Chain(B=[torch.diag(m["D"])]))
    where = "for no input" if options.x is None else "at x"
    of = f"the selective scan with Δ frozen at its value {where}, decay {options.decay}"
    return PadreForm(chains, of=of, exact=False, target=target, inputs=inputs)
