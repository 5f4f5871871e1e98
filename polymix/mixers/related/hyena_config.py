"""Options of Hyena."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.mixers.config import MixerConfig

_IMPLICIT = ("filter_width", "filter_depth", "emb_dim", "frequency", "shift")


@dataclass(frozen=True, kw_only=True)
class HyenaConfig(MixerConfig):
    """Options of Hyena.

    Args:
        order: gates; order - 1 long convolutions lie between them.
        filter: "implicit", taps from a small network of the position, or "explicit", taps learned one by one.
        length: implicit: the longest sequence, to which positions and decay are scaled. explicit: taps of a filter.
        kernel_size: taps of the short convolution after the input projection.
        decay: rates of the taps' decay over `length`, of the first and of the last channel; with explicit taps of
            their init alone.
        filter_width, filter_depth: of the network, and how many inner layers. emb_dim: odd, 2 bands + 1 positions.
        frequency: of its sine, at init. shift: what the decay ends at.
    """

    name: ClassVar[str] = "hyena"
    output: ClassVar[str] = "gates with long convolutions between them"
    cost_formula: ClassVar[str] = "(order + 2) N D² + 3 (order + 1) N D + O(N log N) D (order - 1)"
    sees: ClassVar[str] = "the past"
    order: int = 2
    filter: str = "implicit"
    length: int = 1024
    kernel_size: int = 3
    decay: tuple[float, float] = (math.log(100) / 1.5, math.log(100) / 0.3)
    filter_width: int = 64
    filter_depth: int = 2
    emb_dim: int = 3
    frequency: float = 1.0
    shift: float = 0.0

    @property
    def causal_by_build(self) -> bool:
        return True

    def check(self) -> None:
        check_int("order", self.order, 2)
        check_choice("filter", self.filter, ("implicit", "explicit"))
        check_int("length", self.length, 1)
        check_int("kernel_size", self.kernel_size, 1)
        rates = self.decay if isinstance(self.decay, (tuple, list)) else ()
        if len(rates) != 2 or not all(isinstance(rate, (int, float)) and rate >= 0 for rate in rates):
            raise OptionError("decay", repr(self.decay), "two rates of at least 0", "Pass decay=(3, 15), say.")
        check_int("filter_width", self.filter_width, 1)
        check_int("filter_depth", self.filter_depth, 0)
        check_int("emb_dim", self.emb_dim, 3)
        if self.emb_dim % 2 == 0:
            raise OptionError("emb_dim", self.emb_dim, "an odd number of at least 3", "A time, cosines and sines.")
        check_number("frequency", self.frequency, -math.inf, math.inf, "a number", 1.0)
        check_number("shift", self.shift, -math.inf, math.inf, "a number", 0.0)
        if self.filter == "explicit":
            for option in fields(self):
                if option.name in _IMPLICIT and getattr(self, option.name) != option.default:
                    got = f"{getattr(self, option.name)!r} with filter='explicit'"
                    raise OptionError(option.name, got, "that with filter='implicit'", "Explicit taps have no network.")
