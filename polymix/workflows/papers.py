"""What the papers print about single mixers, to stand beside our own figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polymix.mixers import PomMixer, TokenMixer


@dataclass(frozen=True)
class Printed:
    """One printed figure, with the place where it is printed and what to know about it."""

    quantity: str
    value: str
    source: str
    note: str = ""


_TABLE_6 = "PADRe, Table 6 (4,096 tokens, 192 channels; 2 operations a multiply-add)"
_TABLE_1A = "Poly-NL, Table 1a (14 × 14 × 1,024, reduction 4; multiply-adds)"
_FIGURES: list[tuple[str, dict[str, Any], int, int, Printed]] = [
    ("padre", {"degree": 2}, 192, 4096, Printed("FLOPs", "1.10 G", _TABLE_6)),
    ("padre", {"degree": 3}, 192, 4096, Printed("FLOPs", "2.28 G", _TABLE_6)),
    ("padre", {"degree": 4}, 192, 4096, Printed("FLOPs", "3.27 G", _TABLE_6)),
    (
        "softmax", {}, 192, 4096,
        Printed("FLOPs", "1.31 G", _TABLE_6, "a known misprint: the arithmetic gives 7.05 G multiply-adds"),
    ),
    ("poly_nl", {"reduction": 4}, 1024, 196, Printed("FLOPs", "0.14 G", _TABLE_1A)),
    ("poly_nl", {"reduction": 4}, 1024, 196, Printed("parameters", "0.7 M", _TABLE_1A)),
]  # fmt: skip


def printed(mixer: TokenMixer, n: int) -> list[Printed]:
    """The papers' figures for a mixer of these options, width and length."""
    found = [
        figure
        for name, options, dim, tokens, figure in _FIGURES
        if (name, dim, tokens) == (mixer.name, mixer.dim, n)
        and all(getattr(mixer.config, option) == value for option, value in options.items())
        and getattr(mixer.config, "preset", "paper") == "paper"
    ]
    if isinstance(mixer, PomMixer):
        d, inner, k = mixer.dim, mixer.inner, mixer.config.degree
        count = 3 * n * d * inner + (k + 1) * n * inner
        found.append(Printed("multiplications", f"{count / 1e9:.3f} G", "PoM, Sec. 3.4: 3 n d D + (k + 1) n D"))
        source = "PoM, Eq. 11: fewer multiplications than attention from here on"
        found.append(Printed("crossover", f"{mixer.crossover():,.0f} tokens", source))
    return found
