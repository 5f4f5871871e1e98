"""Parts of attention that change which tokens it sees, and how well: a conversion drops them only by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from polymix.convert.heads import LOGITS
from polymix.convert.spec import AttentionSpec
from polymix.errors import OptionError
from polymix.mixers import MixerConfig
from polymix.mixers.config import HeadsConfig
from polymix.mixers.inheritance import Sources

T = TypeVar("T")
DROPS: Mapping[str, str] = {  # the values of `convert(drop=)`, each with what it stands for
    "position_bias": "biases on attention's logits by the distance of two tokens: ALiBi, or a relative table",
    "soft_cap": "a soft cap on attention's logits",
    "talking_heads": "maps by which heads exchange logits or weights",
    "sinks": "logits or keys of no token, which take a part of attention's weight",
    "rotary": "rotary angles of a type that mixers do not have, such as scaled ones",
    "qk_norm": "norms of queries and keys",
    "gate": "a gate on what attention answers, or a norm of it, before the output map",
}
_BETWEEN_MAPS = ("qk_norm", "gate")  # only what starts from the layer's own maps misses them


def check_names(drop: Any) -> tuple[str, ...]:
    """The option `drop` as a tuple. Raises OptionError for what is no part that can be dropped."""
    names = () if drop is None else tuple(drop) if isinstance(drop, Collection) and not isinstance(drop, str) else drop
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name in DROPS for name in names):
        raise OptionError("drop", repr(drop), f"names out of {', '.join(DROPS)}", 'Such as drop=("position_bias",).')
    return names


def with_losses(attention: AttentionSpec, config: MixerConfig) -> AttentionSpec:
    """The spec with what acts on its logits among its `drops`, if this mixer does not keep that."""
    if config.keeps_bias or not attention.on_logits:
        return attention
    return replace(attention, drops={**attention.drops, **dict.fromkeys(attention.on_logits, LOGITS)})


def needed(attention: AttentionSpec, config: MixerConfig, sources: Sources) -> dict[str, str]:
    """What has to be named before this mixer replaces a layer, each with the reason.

    Mixers other than attention have no rotary angles of the host's, scaled or not: those go without being named. So
    do norms and gates between the layer's maps, where a mixer does not start from its queries and keys.
    """
    names = {name: why for name, why in attention.drops.items() if name in DROPS}
    used = {key for keys in sources.values() for key in keys}
    maps = [part for part in (attention.query, attention.key) if part is not None and used.intersection(part.keys)]
    if len(maps) < 2 or not isinstance(config, HeadsConfig):
        names = {name: why for name, why in names.items() if name not in _BETWEEN_MAPS}
    if not config.is_attention or config.rotary_base is not None:
        names.pop("rotary", None)
    return names


def check_named(
    drop: Collection[str], attention: AttentionSpec, config: MixerConfig, sources: Sources | None = None
) -> None:
    """Raise OptionError where a layer would lose a part that `drop` does not name. sources: what the mixer inherits."""
    lost = {name: why for name, why in needed(attention, config, sources or {}).items() if name not in drop}
    if lost:
        names = list(dict.fromkeys((*drop, *lost)))
        got = f"{config.name}, which drops {'; '.join(f'{name}: {why}' for name, why in lost.items())}"
        cure = f"Pass drop=({', '.join(map(repr, names))},) (--drop {','.join(names)}), or keep the layer."
        raise OptionError("drop", got, "each part that is lost to be named", cure)


def check_used(drop: Iterable[str], layers: Collection[AttentionSpec]) -> None:
    """Raise OptionError for a name that no converted layer has."""
    for name in drop:
        if not any(name in layer.drops or name in layer.on_logits for layer in layers):
            got = f"{name!r}, which no converted layer has"
            raise OptionError("drop", got, "parts of these layers", "Leave it out.")


def naming_drops(convert: Callable[..., T]) -> T:
    """What `convert(drop=)` returns, or does, with those parts named for which it asks."""
    drop: tuple[str, ...] = ()
    while True:
        try:
            return convert(drop=drop)
        except OptionError as error:
            asked = tuple(name for name in DROPS if repr(name) in error.cure and name not in drop)
            if not error.argument.endswith("drop") or not asked:
                raise
            drop += asked
