"""Plans: which layers get which mixer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from polymix.errors import OptionError, nearest_first
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer

KEEP = "keep"
_RATIO, _ENDS = re.compile(r"(\d+):(\d+)"), re.compile(r"all-but-(first|last)-(\d+)")
ALLOWED = (
    'a mixer\'s name or config, "1:1" and the like (mixers : attention), "all-but-last-2", "all-but-first-1", a dict '
    'of layer names or globs to mixers or "keep", or what polymix.recommend returned'
)
Plan = dict[str, MixerConfig | None]  # None: keep


def resolve(
    plan: Any, layers: Sequence[str], mixer: str | MixerConfig = "padre", included: Sequence[str] | None = None
) -> Plan:
    """The mixer config for each layer, or None to keep its attention.

    layers: names in the model's order. mixer: what a pattern such as "1:1" inserts. included: the layers that a plan
    without names is for; None: all. Raises OptionError where the plan does not fit the layers.
    """
    if not isinstance(plan, MixerConfig) and callable(getattr(plan, "plan", None)):
        plan = plan.plan()
    if isinstance(plan, Mapping):
        return _by_name(plan, layers)
    settled: Plan = dict.fromkeys(layers)
    layers = layers if included is None else included
    if pattern := pattern_of(plan):
        config = config_of(mixer, "mixer")
        swaps = zip(layers, _places(pattern, len(layers)), strict=True)
        return settled | {name: config if swap else None for name, swap in swaps}
    return settled | dict.fromkeys(layers, config_of(plan, "plan"))


def pattern_of(plan: Any) -> re.Match[str] | None:
    """The match of a pattern such as "1:1" or "all-but-last-2"; None for any other plan."""
    return (_RATIO.fullmatch(plan) or _ENDS.fullmatch(plan)) if isinstance(plan, str) else None


def config_of(mixer: Any, argument: str) -> MixerConfig:
    """A mixer config, from a config or from text such as "padre:degree=3"."""
    if isinstance(mixer, MixerConfig):
        return mixer
    if isinstance(mixer, str):
        return parse_mixer(mixer)[1]
    raise OptionError(argument, repr(mixer), ALLOWED, "")


def _places(pattern: re.Match[str], count: int) -> list[bool]:
    """Whether each of `count` layers is replaced."""
    if pattern.re is _RATIO:
        replaced_count, kept_count = map(int, pattern.groups())
        if not replaced_count or not kept_count:
            raise OptionError(
                "plan", pattern[0], "two numbers of at least 1", "To replace all layers, pass a mixer alone."
            )
        return [place % (replaced_count + kept_count) < replaced_count for place in range(count)]
    end, kept_count = pattern[1], int(pattern[2])
    if kept_count >= count:
        raise OptionError("plan", pattern[0], f"a pattern that keeps fewer than all {count} layers", "Keep fewer.")
    first, last = (kept_count, count) if end == "first" else (0, count - kept_count)
    return [first <= place < last for place in range(count)]


def _by_name(plan: Mapping[Any, Any], layers: Sequence[str]) -> Plan:
    """A plan by layer names and globs. Other layers are kept; a full name overrides a glob; globs may not overlap."""
    settled: Plan = dict.fromkeys(layers)
    claimed: dict[str, str] = {}
    for key, mixer in plan.items():
        matches = [key] if key in settled else [name for name in layers if fnmatchcase(name, str(key))]
        if not matches:
            nearest = ", ".join(nearest_first(str(key), layers))
            raise OptionError(
                "plan", f"{key!r}, which matches no attention layer", nearest, "The closest names come first."
            )
        config = None if isinstance(mixer, str) and mixer == KEEP else config_of(mixer, f"plan[{key!r}]")
        for name in matches:
            if name in plan and name != key:
                continue
            if name in claimed:
                got = f"{claimed[name]!r} and {key!r}, which both match {name}"
                raise OptionError("plan", got, "one glob per layer", f"Narrow one, or add {name!r} itself.")
            settled[name], claimed[name] = config, key
    return settled


def parse_plan(text: str) -> str | dict[str, str]:
    """A plan from the command line.

    "padre:degree=3", "1:1" and "recommend" stay text; "blocks.*.attn=padre:degree=3,blocks.11.attn=keep" is a dict. A
    layer name or glob ends at the first "=", and has no colon.
    """
    if "," not in text and not _layer(text):
        return text.strip()
    plan: dict[str, str] = {}
    for part in text.split(","):
        layer, mixer = _layer(part), part.partition("=")[2].strip()
        if not layer or not mixer:
            allowed = "layer=mixer, such as blocks.*.attn=padre:degree=3 or blocks.11.attn=keep"
            raise OptionError("--plan", repr(part), allowed, "Separate them by commas.")
        if layer in plan:
            raise OptionError("--plan", f"{layer} twice", "each layer or glob once", "Drop one of them.")
        plan[layer] = mixer
    return plan


def _layer(part: str) -> str:
    layer, sign, _ = part.partition("=")
    return layer.strip() if sign and ":" not in layer else ""
