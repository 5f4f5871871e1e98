"""What `polymix compare` is asked for, and the recipes and mixers that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polymix.convert.plan import pattern_of
from polymix.devices import DTYPES
from polymix.errors import OptionError, PolymixError, check_choice, check_int, check_number
from polymix.limits import LONGEST, check_memory
from polymix.mixers import MixerConfig
from polymix.mixers.spec import DEFAULT, parse_mixers
from polymix.train.recipe import CONTROL, Recipe
from polymix.train.registry import chosen_recipe, domains, named_recipe, options_of

CLASSIFY = "classify"  # the domain that is compared on by default
MIXERS = "softmax,pom,padre-2,qt,linear_floor"  # of domains whose trainings take longer
TOKENS = (64, 256, 1024, 4096, 16384)
QUICK_TOKENS = 1024  # the longest of a first look
# The command's option for a recipe's.
_FLAGS = {"image_size": "--image-size", "patch_size": "--patch-size", "epochs": "--epochs", "data": "--data",
          "layout": "--layout", "preset": "--preset", "device": "--device", "precision": "--dtype",
          "set": "--set"}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Everything that decides what `polymix compare` computes. A run can only be resumed with the same settings.

    Args:
        task: a domain or a recipe's file.
        data: as for `polymix train`; for classify None stands for scenes of digits, and "digits" for single ones.
        layout, preset, options: as for `polymix train`; options are words such as "steps=200".
        mixers: separated by commas; None: those of the domain. Attention and linear_floor are added if missing.
        image_size, patch_size, epochs: options of the recipe; None: as preset and domain have them.
        seeds: runs of each mixer; None: 2, or 1 of a first look.
        tokens: numbers of tokens at which mixers are timed; None: `TOKENS` for classify, none for other domains.
        dim, heads: of the mixers alone: DeiT-Tiny's sizes.
        max_seconds, max_gib: of a call, beyond which a mixer is stopped.
        quick: a first look in about a minute: fewer seeds, epochs and tokens.
    """

    task: str = CLASSIFY
    data: str | None = None
    layout: str | None = None
    preset: str | None = None
    options: Sequence[str] = ()
    mixers: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    epochs: float | None = None
    seeds: int | None = None
    device: str = "cpu"
    threads: int = 2
    dtype: str = "float32"
    tokens: tuple[int, ...] | None = None
    dim: int = 192
    heads: int = 3
    max_seconds: float = 10.0
    max_gib: float = 4.0
    quick: bool = False

    @property
    def runs(self) -> int:
        """Training runs of each mixer."""
        return self.seeds if self.seeds is not None else 1 if self.quick else 2

    def to_dict(self) -> dict[str, Any]:
        """As results.json has it."""
        values = {**asdict(self), "options": list(self.options), "seeds": self.runs}
        if self.data is not None and Path(self.data).exists():
            values["data"] = str(Path(self.data).resolve())
        return {**values, "tokens": None if self.tokens is None else list(self.tokens)}

    def check(self) -> Asked:
        """Find mistakes in the settings, before anything is computed. Returns what follows from them."""
        for name, value in (("seeds", self.runs), ("threads", self.threads), ("dim", self.dim), ("heads", self.heads)):
            check_int(f"--{name}", value, 1)
        for name in ("image_size", "patch_size"):
            if getattr(self, name) is not None:
                check_int(_FLAGS[name], getattr(self, name), 1)
        if self.epochs is not None:
            check_number("--epochs", self.epochs, 1e-9, 1e15, "a number above 0", 9)
        check_choice("--dtype", self.dtype, DTYPES)
        for name, usual in (("max_seconds", 10), ("max_gib", 4)):
            check_number("--" + name.replace("_", "-"), getattr(self, name), 1e-300, 1e15, "a number above 0", usual)
        with named_as_flags():
            recipe = self._recipe()
        if recipe.plan is not None and not pattern_of(recipe.plan):
            got = f"plan={recipe.plan}, which names its mixers itself"
            raise OptionError("--set", got, "a pattern such as plan=1:1", "Name the mixers by --mixers.")
        tokens = self._tokens(recipe)
        configs, labels = self._mixers(recipe)
        return Asked(recipe, labels, configs, tokens)

    def _recipe(self) -> Recipe:
        """The recipe of the first run, with whatever mixer."""
        sides = {"image_size": self.image_size, "patch_size": self.patch_size, "epochs": self.epochs}
        options = options_of(self.options, {"layout": self.layout, **sides})
        kind = type(named_recipe(self.task))
        for name in sides:
            if getattr(self, name) is not None and name not in kind.model_fields:
                got = f"{getattr(self, name)} for {self.task}, which has no such option"
                raise OptionError(name, got, "this option for a domain of images", "Leave it out.")
        taken = sorted({"mixer", "seed", "control", "data", "device", "precision"} & options.keys())
        if taken:
            cure = "Use --mixers, --seeds, --data, --device and --dtype."
            raise OptionError("set", f"{taken[0]}={options[taken[0]]}", "an option of the recipe alone", cure)
        own: Mapping[str, Any] = {} if self.data is None else {"data": self.data}
        if self.task in domains():
            own = kind.for_comparison(self.data, options, self.quick)
            own = own if self.preset is None else {name: own[name] for name in ("data", "default_data") if name in own}
        options = {**own, **options, "device": self.device, "precision": self.dtype, "control": False}
        return chosen_recipe(self.task, preset=self.preset, options=options)

    def _tokens(self, recipe: Recipe) -> tuple[int, ...]:
        """The numbers of tokens at which mixers are timed; none: they are not."""
        tokens = self.tokens
        if tokens is None:
            tokens = tuple(n for n in TOKENS if not self.quick or n <= QUICK_TOKENS) if recipe.times_lengths else ()
        elif not tokens or min(tokens) < 1 or len(set(tokens)) != len(tokens):
            raise OptionError("--tokens", tokens, "numbers from 1 up, each once", "Try --tokens 64,256,1024.")
        if tokens:
            longest = max(tokens)
            check_int("--tokens", longest, 1, LONGEST)
            what = f"a call with {longest:,} tokens of {self.dim} channels"
            check_memory("--tokens", what, 3 * 4 * longest * self.dim)
        return tuple(tokens)

    def _mixers(self, recipe: Recipe) -> tuple[dict[str, MixerConfig], list[str]]:
        """The mixers' configs by label, and all labels: also that of a host without a block."""
        text = self.mixers if self.mixers is not None else DEFAULT if recipe.times_lengths else MIXERS
        words = [word.strip() for word in text.split(",")]
        bare = [word for word in dict.fromkeys(words) if word == recipe.without_mixer]
        blocks = text if not bare else ",".join(word for word in words if word not in bare) or CONTROL
        configs = parse_mixers(blocks)
        if CONTROL not in configs:
            configs |= parse_mixers(CONTROL)
        return configs, [*bare, *configs]


@dataclass(frozen=True)
class Asked:
    """What follows from settings.

    Attributes:
        recipe: of the first run, with whatever mixer. labels: of the mixers. configs: of those that are blocks.
        tokens: at which mixers are timed.
    """

    recipe: Recipe
    labels: list[str]
    configs: dict[str, MixerConfig] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()

    def recipe_of(self, label: str, seed: int = 0) -> Recipe:
        """The recipe of one run."""
        recipe = self.recipe.for_control() if label == CONTROL else self.recipe.changed(mixer=label)
        return recipe.changed(seed=seed)


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Errors about a recipe's option name the command's option, where there is one."""
    try:
        yield
    except PolymixError as error:
        if error.argument not in _FLAGS:
            raise
        raise type(error)(_FLAGS[error.argument], error.got, error.allowed, error.cure) from error
