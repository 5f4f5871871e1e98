"""Hosts that polymix.timm names with their mixer, such as qt_vit_b1."""

from __future__ import annotations

from typing import Any

from polymix.train.recipe import wrong


def registered(host: Any) -> tuple[str, str, bool] | None:
    """The mixer, timm's name of the host and whether parameters are matched, of a name of polymix.timm; else None."""
    if not isinstance(host, str):
        return None
    from polymix.timm import names  # which needs timm

    return names().get(host)


def with_its_mixer(options: dict[str, Any], option: str, found: tuple[str, str, bool]) -> dict[str, Any]:
    """The options of a recipe whose `option` names a host of polymix.timm: with timm's name of it, and its mixer."""
    mixer, host, _ = found
    if options.get("mixer", mixer) != mixer:
        got = f"{options['mixer']!r} with {option}={options[option]}"
        raise wrong("mixer", got, repr(mixer), f"Use {option}={host} for another mixer.")
    return {**options, "mixer": mixer, option: host}
