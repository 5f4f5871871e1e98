"""Hosts that polymix.timm names with their mixer, such as qt_vit_b1."""

from __future__ import annotations

from typing import Any


def registered(host: Any) -> tuple[str, str, bool] | None:
    """The mixer, timm's name of the host and whether parameters are matched, of a name of polymix.timm; else None."""
    if not isinstance(host, str):
        return None
    from polymix.timm import names  # which needs timm

    return names().get(host)
