"""Starting a mixer from the weights of the attention it replaces, and matching its output to the attention's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polymix.convert.spec import AttentionSpec, EquivalentMixer
from polymix.mixers import TokenMixer
from polymix.mixers.inheritance import Sources


def inherit(mixer: TokenMixer, attention: AttentionSpec) -> Sources:
    """Copy the attention's weights into `mixer`; return which parameter came from which. The others are unchanged.

    The attention's equivalent mixer takes over everything; any other mixer what its own `inherit` has a use for.
    """
    if attention.equivalent is not None and attention.equivalent.name == mixer.name:
        return _all_weights(mixer, attention, attention.equivalent)
    return mixer.inherit(attention)


def _all_weights(mixer: TokenMixer, attention: AttentionSpec, equivalent: EquivalentMixer) -> Sources:
    """Copy all weights; none where the mixer was built with other options than the layer."""
    state, own = equivalent.build().state_dict(), mixer.state_dict()
    if {key: t.shape for key, t in state.items()} != {key: t.shape for key, t in own.items()}:
        return {}
    mixer.load_state_dict(state)
    if equivalent.sources is not None:
        return {name: equivalent.sources.get(name, ()) for name, _ in mixer.named_parameters()}
    sources: Sources = {}
    for name, _ in mixer.named_parameters():
        key = name.partition(".")[2]
        parts = tuple(part for part in (*attention.keys, *attention.drops) if part.partition("[")[0] == key)
        sources[name] = parts or ((key,) if key in equivalent.parameters else ())
    return sources


@torch.no_grad()
def match(mixer: TokenMixer, last: nn.Linear | None, ours: Tensor, theirs: Tensor) -> float | None:
    """Scale the mixer's last weights so that its output has the statistics of the attention's on the same input.

    With a final linear map with a bias: the mean of each channel and the size of the deviations. Else: the size of the
    output. Returns the factor; None, and nothing changed, where the mixer has no weight that scales its output.

    Args:
        last: the final linear map; None: there is none.
        ours, theirs: outputs (…, D) of the mixer and of the attention.
    """
    ours, theirs = ours.flatten(0, -2).double(), theirs.flatten(0, -2).double()
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
