"""A mixer that starts from the weights of the attention it replaces, where the algebra has a place for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polymix.convert.attention import Attention, Projection, Twin
from polymix.mixers import PadreMixer, PolyNlMixer, PomMixer, SoftmaxMixer, TokenMixer
from polymix.mixers.heads import Heads
from polymix.structured.compose import Prefixed
from polymix.structured.conv import DepthwiseConv
from polymix.structured.dense import Dense

Sources = dict[str, tuple[str, ...]]  # a mixer's parameter: the attention's parameters that it comes from


@torch.no_grad()
def inherit(mixer: TokenMixer, attention: Attention) -> Sources:
    """Start `mixer` from the attention's maps; returns which parameter came from which. The rest stays fresh.

    softmax, local, qt, poly_sa, linear and others with W_q, W_k, W_v, W_o: all four, W_q times what the host's scale of
        the logits is above d^-½; softmax its relative bias too
    padre: B_d = W_v W_o, A_d a local mean, and what Y_d is multiplied with near one: values, mixed locally, gated
        gently
    pom: the first D rows of W_h are W_v, the first D columns of W_o the attention's
    poly_nl: W_1 = W_k, W_2 = W_v, W_3 = W_o (without a reduction)
    xca, relu_linear: everything, from a layer that is one
    """
    if attention.twin is not None and attention.twin.name == mixer.name:
        return _twin(mixer, attention, attention.twin)
    if isinstance(mixer, PadreMixer):
        return _padre(mixer, attention)
    if isinstance(mixer, PomMixer):
        return _pom(mixer, attention)
    if isinstance(mixer, PolyNlMixer):
        return _poly_nl(mixer, attention)
    found = _heads(mixer, attention)
    if isinstance(mixer, SoftmaxMixer) and mixer.table is not None and attention.relative is not None:
        mixer.table.copy_(attention.relative.weight)
        found["table"] = attention.relative.keys
    return found


def _twin(mixer: TokenMixer, attention: Attention, twin: Twin) -> Sources:
    """Nothing where the mixer was built with other options than the layer's."""
    state, own = twin.build().state_dict(), mixer.state_dict()
    if {key: t.shape for key, t in state.items()} != {key: t.shape for key, t in own.items()}:
        return {}
    mixer.load_state_dict(state)
    found: Sources = {}
    for name, _ in mixer.named_parameters():
        key = name.partition(".")[2]
        parts = tuple(part for part in (*attention.keys, *attention.drops) if part.partition("[")[0] == key)
        found[name] = parts or ((key,) if key in twin.keys else ())
    return found


def _heads(mixer: TokenMixer, attention: Attention) -> Sources:
    found: Sources = {}
    maps = [part for part in (attention.query, attention.key, attention.value) if part is not None]
    qkv, proj = getattr(mixer, "qkv", None), getattr(mixer, "proj", None)
    if isinstance(qkv, Heads) and [part.weight.shape[0] for part in maps] == [mixer.dim] * 3:
        usual = (attention.dim // attention.heads) ** -0.5
        gains = ((attention.scale or usual) / usual, 1.0, 1.0)
        for i, (part, gain) in enumerate(zip(maps, gains, strict=True)):
            rows = slice(i * mixer.dim, (i + 1) * mixer.dim)
            _add(found, "qkv.qkv", _copy(part, qkv.qkv.weight[rows], _rows(qkv.qkv.bias, rows), gain))
    if isinstance(proj, Dense) and attention.out is not None and proj.weight.shape == attention.out.weight.shape:
        _add(found, "proj", _copy(attention.out, proj.weight, proj.bias))
    return found


def _padre(mixer: PadreMixer, attention: Attention) -> Sources:
    """Not in another basis, with several inputs, or without the maps that it takes: dense B_d and D, biases."""
    value, out, degree = attention.value, attention.out, mixer.config.degree
    last = mixer.B["a"].linear(degree - 1) if not mixer.needs_context else None
    if value is None or out is None or last is None or mixer.config.basis != "monomial" or last[1] is None:
        return {}
    bias = None if value.bias is None else out.weight @ value.bias
    bias = out.bias if bias is None or out.bias is None else bias + out.bias
    both = Projection(out.weight @ value.weight, bias, (*value.keys, *out.keys))
    if both.weight.shape != last[0].shape:
        return {}
    found: Sources = {}
    _add(found, "B.a.maps", _copy(both, *last))
    _smooth(mixer.A[degree - 1])
    if degree > 1:  # the gate C_{d-1} (Z_{d-1} D_{d-1}) + b_C
        gate = mixer.C[degree - 2] if mixer.C[degree - 2].bias is not None else mixer.D[degree - 2]
        mixer.D[degree - 2].scale_(0.25)
        gate.bias.fill_(1.0)
    return found


def _smooth(part: nn.Module) -> None:
    """A depthwise kernel that is a local mean: a bump a quarter of the kernel wide; in a causal one, its later half."""
    part = part.inner if isinstance(part, Prefixed) else part
    if isinstance(part, DepthwiseConv):
        bump = torch.ones((), dtype=part.weight.dtype, device=part.weight.device)
        for size in part.kernel:
            centre = size - 1 if part.site.causal else size // 2
            place = torch.arange(size, dtype=bump.dtype, device=bump.device) - centre
            bump = bump[..., None] * (-0.5 * (place / max(size / 4, 0.5)).square()).exp()
        part.weight.copy_((bump / bump.sum()).expand_as(part.weight))


def _pom(mixer: PomMixer, attention: Attention) -> Sources:
    found: Sources = {}
    value, out, d = attention.value, attention.out, mixer.dim
    if value is not None and mixer.config.groups == 1 and value.weight.shape[0] <= mixer.inner:
        rows = slice(0, value.weight.shape[0])
        _add(found, "poly", _copy(value, mixer.poly.weight[rows], _rows(mixer.poly.bias, rows)))
    if out is not None and out.weight.shape[0] == d and out.weight.shape[1] <= mixer.inner:
        _add(found, "proj", _copy(out, mixer.proj.weight[:, : out.weight.shape[1]], mixer.proj.bias))
    return found


def _poly_nl(mixer: PolyNlMixer, attention: Attention) -> Sources:
    found: Sources = {}
    parts = {"W_1": attention.key, "W_2": attention.value}
    for i, name in enumerate(mixer.parts):
        part, rows = parts.get(name), slice(i * mixer.dim, (i + 1) * mixer.dim)
        if part is not None and mixer.into is None and part.weight.shape[0] == mixer.dim:
            _add(found, "product", _copy(part, mixer.product.weight[rows], _rows(mixer.product.bias, rows)))
    if attention.out is not None and mixer.into is None and attention.out.weight.shape == mixer.proj.weight.shape:
        _add(found, "proj", _copy(attention.out, mixer.proj.weight, mixer.proj.bias))
    return found


def _rows(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]


def _copy(part: Projection, weight: Tensor, bias: Tensor | None, gain: float = 1.0) -> Sources:
    """Fill weight and bias, a bias that the attention lacks with zeros; what each came from."""
    of_bias = ["bias" in key.rpartition(".")[2] for key in part.keys]
    weights, biases = ([k for k, of in zip(part.keys, of_bias, strict=True) if of is which] for which in (False, True))
    weight.copy_(gain * part.weight)
    if bias is None:
        return {"weight": tuple(weights)}
    if part.bias is None:
        bias.zero_()
    else:
        bias.copy_(gain * part.bias)
    return {"weight": tuple(weights), "bias": tuple(biases)}


def _add(found: Sources, prefix: str, sources: Sources) -> None:
    for name, keys in sources.items():
        key = f"{prefix}.{name}"
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), *keys)))


@torch.no_grad()
def match(mixer: TokenMixer, ours: Tensor, theirs: Tensor) -> float | None:
    """Give a mixer's output, in its weights, the statistics of the attention's on the same input (…, D).

    Each channel's mean and the deviations' size where it ends in a linear map with a bias, else the size of the whole.
    Returns what the output was multiplied with; None, and nothing done, where no weight can do that.
    """
    ours, theirs = ours.flatten(0, -2).double(), theirs.flatten(0, -2).double()
    last = _last(mixer)
    if last is None:
        factor = _size(theirs) / _size(ours)
        return factor if isinstance(mixer, PadreMixer) and _scale_padre(mixer, factor) else None
    if last.bias is None:
        factor = _size(theirs) / _size(ours)
    else:
        means = ours.mean(0), theirs.mean(0)
        factor = _size(theirs - means[1]) / _size(ours - means[0])
        last.bias.copy_(factor * (last.bias - means[0].to(last.bias)) + means[1].to(last.bias))
    last.weight.mul_(factor)
    return factor


def _size(x: Tensor) -> float:
    return x.square().mean().clamp_min(1e-30).sqrt().item()


def _last(mixer: TokenMixer) -> nn.Linear | None:
    """The linear map that ends a mixer."""
    last = getattr(mixer, "out", None) or getattr(mixer, "proj", None)
    plain = isinstance(last, nn.Linear) and not (isinstance(mixer, PolyNlMixer) and bool(mixer.alpha != 0))
    return last if plain else None


def _scale_padre(mixer: PadreMixer, factor: float) -> bool:
    """Every Z_i is linear in Y_1, b_D and b_C together; L is added once."""
    if mixer.config.basis != "monomial" or mixer.config.normalize is not None or mixer.needs_context:
        return False
    first = mixer.B["a"].linear(0)
    if first is None:
        return False
    below = (*mixer.C[: mixer.config.degree - 1], *mixer.D[: mixer.config.degree - 1])
    biases = [first[1], mixer.A[0].bias, mixer.L, *(part.bias for part in below)]
    for part in (first[0], *biases):
        if part is not None:
            part.mul_(factor)
    return True
