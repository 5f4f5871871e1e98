"""What a comparison is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polymix.errors import OptionError, check_choice, check_int
from polymix.mixers import MixerConfig
from polymix.mixers.spec import DEFAULT, parse_mixers

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """Everything that decides what `polymix compare` computes; a run can only be resumed with the same.

    Sizes that are None depend on the data: 8 pixels in patches of 2 for the digits, 32 in patches of 4 for --data.
    """

    data: str | None = None
    mixers: str = DEFAULT
    image_size: int | None = None
    patch_size: int | None = None
    epochs: int = 30
    seeds: int = 2
    device: str = "cpu"
    threads: int = 2
    dtype: str = "float32"
    tokens: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    dim: int = 192  # of the mixers alone, with `heads`: DeiT-Tiny's
    heads: int = 3
    host_dim: int = 64
    host_heads: int = 4
    host_depth: int = 3
    host_mlp_ratio: float = 2.0
    max_seconds: float = 10.0
    max_gib: float = 4.0
    quick: bool = False

    def check(self) -> dict[str, MixerConfig]:
        """The mixers by label, once everything has been found sound."""
        for name, low in (("epochs", 1), ("seeds", 1), ("threads", 1), ("dim", 1), ("heads", 1)):
            check_int(f"--{name}", getattr(self, name), low)
        for name in ("image_size", "patch_size"):
            if getattr(self, name) is not None:
                check_int("--" + name.replace("_", "-"), getattr(self, name), 1)
        check_choice("--dtype", self.dtype, DTYPES)
        if self.size % self.patch:
            raise OptionError(
                "--image-size", self.size, f"a multiple of --patch-size {self.patch}", "Change one of the two."
            )
        if not self.tokens or min(self.tokens) < 1 or len(set(self.tokens)) != len(self.tokens):
            raise OptionError("--tokens", self.tokens, "different counts of at least 1", "Try --tokens 64,256,1024.")
        if self.max_seconds <= 0 or self.max_gib <= 0:
            raise OptionError("--max-seconds, --max-gib", (self.max_seconds, self.max_gib), "budgets above 0", "")
        return parse_mixers(self.mixers)

    @property
    def size(self) -> int:
        return self.image_size or (8 if self.data is None else 32)

    @property
    def patch(self) -> int:
        return self.patch_size or (2 if self.data is None else 4)

    @property
    def host_tokens(self) -> int:
        return (self.size // self.patch) ** 2

    def quickened(self) -> Settings:
        """One seed, few epochs, a short sweep: a first look in about a minute."""
        return replace(
            self, quick=True, seeds=1, epochs=min(self.epochs, 8), tokens=tuple(n for n in self.tokens if n <= 1024)
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["data"] = None if self.data is None else str(Path(self.data).resolve())
        values["tokens"] = list(self.tokens)
        return values
