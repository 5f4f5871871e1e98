"""QT with the multi-scale branches of EfficientViT, recomputed from `matrices()` in float64."""

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, OptionError, ShapeError
from tests.helpers import build, close, tokens

PAD = torch.tensor([[True] * 7 + [False] * 5, [False, True] * 6])


def expected(mixer, x, mask, grid):
    """Each head of each scale by pairs: similarities, then a weighted mean of the values, then W_o."""
    m = mixer.matrices(x.shape[1], grid=grid, dtype=torch.float64)
    heads, d = mixer.heads, mixer.dim // mixer.heads
    qkv = torch.cat([x @ m[f"W_{c}"] + m[f"b_{c}"] for c in "qkv"], -1) * mask[..., None]
    copies = [qkv]
    for conv, b, mix, c in zip(m["M"], m["b_M"], m["W_M"], m["c_M"], strict=True):
        copies.append((torch.einsum("cij,bjc->bic", conv, qkv) + b) @ mix + c)
    outputs = []
    for s, copy in enumerate(copies):
        q, k, v = (part.unflatten(-1, (heads, d)).transpose(1, 2) for part in copy.chunk(3, dim=-1))
        logits = q @ k.transpose(-1, -2) / d**0.5
        if mixer.config.form == "full":
            weight = 1 + logits + logits.square() / 2
        else:
            alpha, beta, gamma = (
                m[name][s * heads : (s + 1) * heads, None, None].square() for name in ("alpha", "beta", "gamma")
            )
            weight = gamma + 2 * beta * logits + alpha * (q.square() @ k.square().transpose(-1, -2))
        weight = weight * mask[:, None, None]
        least = 1e-3 * mask.sum(1, dtype=torch.float64)[:, None, None, None]
        outputs.append(((weight @ v) / weight.sum(-1, keepdim=True).clamp_min(least)).transpose(1, 2).flatten(-2))
    return torch.cat(outputs, -1) @ m["W_o"] + m["b_o"]


@pytest.mark.parametrize("form", ["compact", "full"])
@pytest.mark.parametrize("place", [{"grid": (3, 4)}, {"grid": (2, 5), "num_prefix_tokens": 2}])
@pytest.mark.parametrize("mask", [None, PAD])
def test_the_equation(form, place, mask):
    mixer = build("qt", 12, heads=2, form=form, scales=(3, 5), **place)
    with torch.no_grad():
        mixer.multi_scale.branches[0][0].weight.mul_(3)  # far enough from zero to show
    x = tokens(2, 12, 12)
    seen = torch.ones(2, 12, dtype=torch.bool) if mask is None else mask
    y, wanted = mixer(x, mask=mask), expected(mixer, x, seen, place["grid"])
    close(y * seen[..., None], wanted * seen[..., None], 1e-11)


def test_every_part_of_the_branches_learns():
    mixer, x = build("qt", 12, heads=2, scales=(3,)), tokens(2, 12, 12)
    mixer(x, grid=(3, 4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.multi_scale.parameters())


def test_what_scales_rule_out():
    mixer, x = build("qt", 12, heads=2, scales=(3,)), tokens(2, 12, 12)
    with pytest.raises(ShapeError, match="grid"):
        mixer(x)
    with pytest.raises(ShapeError, match="grid"):
        mixer.cost(12)
    with pytest.raises(CapabilityError, match="causal"):
        mixer(x, grid=(3, 4), causal=True)
    with pytest.raises(CapabilityError, match="context"):
        mixer(x, x, grid=(3, 4))
    with pytest.raises(CapabilityError, match="prefill"):
        mixer.prefill(x)
    for options in ({"scales": (4,)}, {"scales": 5}, {"grid": (3, 4)}, {"scales": (3,), "impl": "native"},
                    {"scales": (), "num_prefix_tokens": 1}, {"scales": (3,), "impl": "blocked"}):  # fmt: skip
        with pytest.raises(OptionError):
            polymix.create_mixer("qt", 12, **options)


def test_without_scales_it_is_the_mixer_it_was():
    """None and () are the same weights and capabilities, and positions do not matter."""
    open_, none = build("qt", 12, heads=2), build("qt", 12, heads=2, scales=())
    assert list(open_.state_dict()) == list(none.state_dict())
    assert open_.capabilities == none.capabilities and not open_.capabilities.grids and open_.capabilities.causal
    assert not open_.config.needs_grid and open_.config.for_grid((3, 4), 1) is open_.config
