"""What a benchmark is asked to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from polymix.errors import OptionError, PolymixError, check_choice, check_int
from polymix.mixers import MixerConfig

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "folded", "training", "step")


@dataclass(frozen=True)
class Group:
    """What is timed in turn: every mixer and implementation under these."""

    tokens: int
    dim: int
    batch: int
    dtype: str
    pass_: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Group:
        """The group that a row of results belongs to."""
        return cls(**{field.name: row[field.name.rstrip("_")] for field in fields(cls)})


@dataclass(frozen=True)
class Settings:
    """Everything that decides what `polymix bench` measures; a run can only be resumed with the same."""

    mixers: str
    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    dims: tuple[int, ...] = (192,)
    batch: tuple[int, ...] = (1,)
    dtypes: tuple[str, ...] = ("float32",)
    passes: tuple[str, ...] = ("forward", "training")
    impls: tuple[str, ...] = ("auto",)
    threads: tuple[int, ...] = (2,)
    device: str = "cpu"
    seconds: float = 0.4
    max_seconds: float = 10.0
    max_gib: float = 4.0
    quick: bool = False

    def check(self, mixers: Mapping[str, MixerConfig]) -> None:
        """Find everything sound that can be found so before anything is measured."""
        for name in ("tokens", "dims", "batch", "threads", "dtypes", "passes", "impls"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise OptionError(f"--{name}", values, "different values, at least one", "Separate them by commas.")
            for value in values:
                if name in ("tokens", "dims", "batch", "threads"):
                    check_int(f"--{name}", value, 1)
        for dtype in self.dtypes:
            check_choice("--dtypes", dtype, DTYPES)
        for pass_ in self.passes:
            check_choice("--passes", pass_, PASSES)
        for name in ("seconds", "max_seconds", "max_gib"):
            if not getattr(self, name) > 0:
                raise OptionError("--" + name.replace("_", "-"), getattr(self, name), "a number above 0", "")
        for impl in self.impls:
            self._check_impl(impl, mixers)

    def _check_impl(self, impl: str, mixers: Mapping[str, MixerConfig]) -> None:
        """One mixer may lack an implementation, and its rows say so; a name that none of them has is a slip."""
        refused = None
        for config in mixers.values():
            try:
                with_impl(config, impl)
            except PolymixError as error:
                refused = error
            else:
                return
        if refused:
            raise OptionError("--impls", impl, "an implementation that a mixer has, such as auto", str(refused))

    def groups(self) -> Iterator[Group]:
        """In the order of measuring: for each setting the token counts upwards."""
        for threads, dtype, dim, batch, pass_, tokens in product(
            self.threads, self.dtypes, self.dims, self.batch, self.passes, sorted(self.tokens)
        ):
            yield Group(tokens, dim, batch, dtype, pass_, threads)

    def quickened(self) -> Settings:
        """The counts up to 1,024 and few rounds: whether it works, in well under a minute."""
        short = tuple(n for n in self.tokens if n <= 1024) or (min(self.tokens),)
        return replace(self, quick=True, tokens=short, seconds=min(self.seconds, 0.05))

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def with_impl(config: MixerConfig, impl: str) -> MixerConfig:
    """The config that runs `impl` and no other; "auto" leaves the choice as it is."""
    return config if impl == "auto" else config.changed(impl=impl)
