"""What every training can be told, and recipes as people write them: a Python file, and words such as steps=200."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from polymix._io import check_device, load_python, parse_options
from polymix.errors import OptionError, check_choice, check_int, check_number, check_seed, nearest_first

PRECISIONS = ("float32", "bfloat16")
STRATEGIES = ("auto", "ddp", "fsdp")
R = TypeVar("R", bound="TaskRecipe")


@dataclass(frozen=True)
class TaskRecipe:
    """The options that all tasks share. A task's own recipe is a frozen dataclass that adds to them.

    Training is AdamW with a linear warm-up and a cosine decay.

    Args:
        data: the path that --data gives; None: the task's default data.
        batch_size: samples per step, over all processes.
        accumulate: the parts in which a step is computed, to save memory.
        steps: how many there are.
        learning_rate: the highest one.
        warmup: share of the steps in which the learning rate rises.
        final: learning rate of the last step, as a share of the highest.
        weight_decay, betas: of AdamW. Vectors, such as biases, do not decay.
        clip: largest norm of the gradient.
        ema: decay of averaged weights, which are then evaluated and saved; 0: none.
        precision: "float32" or "bfloat16".
        checkpointing: compute blocks a second time in the backward pass, to save memory.
        seed: of the weights, the order of the data, and dropout.
        device: "cpu", "cuda", "cuda:1" or "mps".
        strategy: "auto", "ddp" or "fsdp"; the last two for several processes under torchrun.
        workers: processes that load data.
        log_every, evaluate_every, checkpoint_every: in steps.
    Raises:
        OptionError: an option is out of range.
    """

    data: str | None = None
    batch_size: int = 32
    accumulate: int = 1
    steps: int = 1000
    learning_rate: float = 1e-3
    warmup: float = 0.1
    final: float = 0.1
    weight_decay: float = 0.05
    betas: Sequence[float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0
    precision: str = "float32"
    checkpointing: bool = False
    seed: int = 0
    device: str = "cpu"
    strategy: str = "auto"
    workers: int = 0
    log_every: int = 10
    evaluate_every: int = 100
    checkpoint_every: int = 100

    # Options that a resumed run may change, because they do not change the result, or because the data tells.
    changeable: ClassVar[tuple[str, ...]] = (
        "data", "device", "strategy", "workers", "log_every", "checkpoint_every",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "steps", "log_every", "evaluate_every", "checkpoint_every"):
            check_int(name, getattr(self, name), 1)
        check_seed("seed", self.seed)
        check_int("workers", self.workers, 0, 1024)
        for name, low, high, allowed, usual in (
            ("warmup", 0.0, 1.0, "a share below 1", 0.1), ("final", 0.0, 1.0 + 1e-9, "a share of at most 1", 0.1),
            ("ema", 0.0, 1.0, "0, or a decay below 1", 0.999), ("clip", 1e-12, math.inf, "a number above 0", 1.0),
            ("learning_rate", 1e-12, math.inf, "a number above 0", 1e-3),
            ("weight_decay", 0.0, math.inf, "a number of at least 0", 0.1),
        ):  # fmt: skip
            check_number(name, getattr(self, name), low, high, allowed, usual)
        betas = self.betas if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
            raise OptionError("betas", repr(self.betas), "two numbers in [0, 1)", "Pass betas=(0.9, 0.95), say.")
        if self.data is not None and not (isinstance(self.data, (str, PathLike)) and str(self.data)):
            raise OptionError("data", repr(self.data), "the path of a file or a folder, or None", "Pass data=None.")
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("checkpointing", self.checkpointing, (True, False))
        check_device(self.device, kinds=("cpu", "cuda", "mps"), touch=False)
        if self.batch_size % self.accumulate:
            got = f"{self.accumulate} with batch_size={self.batch_size}"
            raise OptionError("accumulate", got, "a divisor of the batch size", "Change one of the two.")

    @property
    def part_size(self) -> int:
        """Samples that are computed at once in one process."""
        return self.batch_size // self.accumulate

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them."""
        return json.loads(json.dumps(asdict(self), default=str))

    def decisive(self) -> dict[str, Any]:
        """The options that a resumed run must not change."""
        return {name: value for name, value in self.to_dict().items() if name not in self.changeable}

    def changed(self: R, words: Sequence[str]) -> R:
        """This recipe with other options, such as ["steps=200", "betas=0.9,0.99"].

        Raises OptionError for a word that is not option=value, an unknown option or a value out of range.
        """
        own = {field.name: str(field.type) for field in fields(self)}
        if any(word.partition("=")[0] == "data" for word in words):
            raise OptionError(
                "data", "it as an option of the recipe", "--data PATH", "Pass --data instead of --set data=."
            )
        options = parse_options(words, {**self.other_options(), **own})
        others = {name: options.pop(name) for name in list(options) if name not in own}
        return replace(self.with_others(others) if others else self, **options)

    def other_options(self) -> dict[str, str]:
        """Annotations of options that `changed` takes beside the recipe's own, by name."""
        return {}

    def with_others(self: R, options: Mapping[str, Any]) -> R:
        """This recipe with options that are not its own fields. A task whose recipe takes some overrides this."""
        name = next(iter(options))
        known = nearest_first(name, (field.name for field in fields(self)))
        allowed = ", ".join(known[:8]) + " …"
        raise OptionError(name, "an unknown option", allowed, f"help({type(self).__qualname__}) lists all.")


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with polymix, by name: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    files = [*package.parent.glob("recipes/*.py"), *package.glob("recipes/*.py")]
    return {path.stem: path for path in sorted(files) if "\nrecipe = " in path.read_text("utf-8")}


def load_recipe(path: str | Path) -> TaskRecipe:
    """The `recipe` that a Python file sets; the file is run. A name, such as "text", is a recipe of polymix's own."""
    path = shipped_recipes().get(str(path), Path(path))
    if not path.is_file():
        known = ", ".join(shipped_recipes())
        raise OptionError("recipe", str(path), f"a Python file, or one of {known}", "Try polymix train text.")
    recipe = getattr(load_python(path, "recipe"), "recipe", None)
    if not isinstance(recipe, TaskRecipe):
        got = f"{path}, in which it is {type(recipe).__name__}"
        raise OptionError(
            "recipe", got, "a file that sets recipe, such as recipe = TextRecipe()", "See CONTRIBUTING.md."
        )
    return recipe
