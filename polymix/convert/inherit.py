"""A mixer that starts from the weights and the statistics of the attention it replaces."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.convert.attention import Attention, Twin
from polymix.mixers import TokenMixer
from polymix.mixers.inheritance import Sources


def inherit(mixer: TokenMixer, attention: Attention) -> Sources:
    """Start `mixer` from the attention's maps; returns which parameter came from which. The rest stays fresh.

    A mixer that the layer already is takes everything; any other what its own `inherit` has a place for.
    """
    if attention.twin is not None and attention.twin.name == mixer.name:
        return _twin(mixer, attention, attention.twin)
    return mixer.inherit(attention)


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


@torch.no_grad()
def match(mixer: TokenMixer, ours: Tensor, theirs: Tensor) -> float | None:
    """Give a mixer's output, in its weights, the statistics of the attention's on the same input (…, D).

    Each channel's mean and the deviations' size where it ends in a linear map with a bias, else the size of the whole.
    Returns what the output was multiplied with; None, and nothing done, where no weight can do that.
    """
    ours, theirs = ours.flatten(0, -2).double(), theirs.flatten(0, -2).double()
    last = mixer.output_map()
    if last is None:
        factor = _size(theirs) / _size(ours)
        return factor if mixer.scale_output_(factor) else None
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
