"""Positions that a host adds to queries and keys, but not to values: what a mixer in their place reads.

DETR and its relatives call attention(x + positions, x + positions, x). A mixer that has a map of its own for values can
do the same. Others have one input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from polymix.convert.spec import AttentionSpec
from polymix.errors import OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.registry import missing_capability

POSITIONS = ("all", "drop", "values")  # the values of `convert(positions=)`, besides None
MEANING = {
    "all": "added to values as well as queries and keys",
    "drop": "not read: keys, and in self-attention queries, are read from the values' input",
    "values": "as in the host: queries and keys have them, values do not",
}
_CURE = 'Pass positions="all" (values get them too) or "drop" (nothing gets them){}.'


def resolve_positions(
    option: str | None, mixer: TokenMixer, attention: AttentionSpec, default: str | None
) -> str | None:
    """What becomes of the positions in one layer; None where the host has none, or where it is not known yet.

    Args:
        option: the option of `convert`.
        mixer, attention: of the layer.
        default: the adapter's choice for mixers with one input; None: the user has to choose.
    Raises:
        CapabilityError: "values" for a mixer that cannot. OptionError: no choice where one is needed.
    """
    if attention.own_values is False:
        return None
    can = mixer.capabilities.values or mixer.needs_context
    if option == "values" and not can:
        raise missing_capability(mixer.name, "values", "positions", "values from another input than the keys")
    if option is not None:
        return option
    if mixer.capabilities.values and mixer.config.own_values:
        return "values"
    if default is None and attention.own_values:
        raise unsettled(mixer)
    return default


def unsettled(mixer: TokenMixer) -> OptionError:
    """The error for a mixer with one input in a host that computes values from another input than keys."""
    can = mixer.capabilities.values or mixer.needs_context
    got = f"None for {mixer.name}, in a host that computes values from another input than keys"
    own = ', or "values" (as in the host, by the map that starts from W_v)' if can else ""
    return OptionError("positions", got, " or ".join(map(repr, POSITIONS if can else POSITIONS[:2])), _CURE.format(own))


def arrange(
    mixer: TokenMixer, positions: str | None, x: Tensor, context: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Any, Tensor | None]:
    """What the mixer reads as x, as context and as values.

    x, context: with positions. values: without; None: as the keys. A mixer with a pattern of two inputs reads queries
    and values (with "all": keys); one with three reads queries, keys and values.
    """
    keys = x if context is None else context
    if values is None or values is keys:
        return x, (keys, keys) if context is not None and mixer.contexts == 2 else context, None
    if positions is None:
        raise unsettled(mixer)
    if positions == "drop":
        x, keys, values = values if context is None else x, values, values
    elif positions == "all":
        values = keys
    if mixer.needs_context:
        return x, values if mixer.contexts == 1 else (keys, values), None
    context = None if context is None else keys
    return x, context, None if values is keys else values


def check_used(positions: str | None, layers: Iterable[AttentionSpec]) -> None:
    """Raise OptionError for an explicit choice in a model where it has no effect."""
    if positions is not None and all(layer.own_values is False for layer in layers):
        got = f"{positions!r} for layers that compute keys and values from the same input"
        raise OptionError("positions", got, "None for this model", "Leave it out.")
