"""How a text goes on: the options, checked before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polymix.errors import OptionError, check_int, check_number


@dataclass(frozen=True)
class Settings:
    """How a text goes on.

    Args:
        max_new_tokens: at most so many; None: 100, or as many as the model's positions leave.
        temperature: 0 takes the likeliest token each time; None: 0.8, with beams 0.
        top_k, top_p: draw among so many of the likeliest tokens, among those that have p together; None: among all.
        beams: that many texts are followed at once, and the likeliest is kept.
        num: texts for a prompt.
        seed: of what is drawn.
        stream: print to standard output, word by word.
    Raises:
        OptionError: for what is out of range, or made meaningless by another option.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    beams: int = 1
    num: int = 1
    seed: int = 0
    stream: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 1), ("beams", 1), ("num", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least)
        check_number("temperature", self.heat, 0.0, math.inf, "a number of at least 0", 0.8)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError("top_p", self.top_p, "a share of at most 1, and more than 0", "Pass top_p=0.9, say.")
        for name in ("top_k", "top_p"):
            if not self.heat and getattr(self, name) is not None:
                got = f"{getattr(self, name)} where nothing is drawn: the temperature is 0"
                raise OptionError(name, got, "none", "Leave it out, or pass a temperature, such as 0.8.")
        if self.num > (self.beams if self.beams > 1 or not self.heat else self.num):
            got = f"{self.num} with {self.beams} beams at temperature {self.heat:g}"
            raise OptionError("num", got, "at most as many as beams, or drawn ones", "Pass beams, or a temperature.")
        for name in ("beams", "num"):
            if self.stream and getattr(self, name) > 1:
                got = f"{getattr(self, name)} with stream"
                raise OptionError(name, got, "1: a stream is one text, never taken back", "Leave one of the two out.")

    @property
    def heat(self) -> float:
        """The temperature that is meant."""
        return self.temperature if self.temperature is not None else 0.8 if self.beams == 1 else 0.0
