"""The options of a training on recall and copying: a whole run, and the schedule for a model that you build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int
from polymix.tasks.recall.data import Copying, Recall, Task
from polymix.tasks.recipe import TaskRecipe

TASKS = {"recall": Recall, "copying": Copying}


@dataclass(frozen=True)
class RecallRecipe(TaskRecipe):
    """A small language model that learns to recall or to copy. `TaskRecipe` has the options that all tasks share.

    Args:
        task: "recall" or "copying".
        sizes: numbers of pairs to recall, or of tokens to copy. They take turns, a size per step.
        vocab: size of the vocabulary.
        tokens: in a step; takes the place of batch_size.
        mixers: the mixer of each layer, or a pattern that is repeated.
        num_layers, hidden_size, num_heads: of the model. positions: "none", "learned" or "rotary".
        short_conv: taps of a causal convolution before each mixer but attention.
        answers: how many answers an evaluation counts, for each size.
    """

    steps: int = 1500
    learning_rate: float = 3e-3
    evaluate_every: int = 125
    checkpoint_every: int = 125
    task: str = "recall"
    sizes: Sequence[int] = (4, 8, 16)
    vocab: int = 256
    tokens: int = 2048
    mixers: Sequence[str] = ("padre:degree=1:channel=identity:kernel_size=3", "pom")
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 2
    positions: str = "none"
    short_conv: int = 0
    answers: int = 2048

    trains_control: ClassVar[bool] = False  # chance is known: the report draws it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task", self.task, TASKS)
        check_int("tokens", self.tokens, 1)
        check_int("answers", self.answers, 1)
        if self.data is not None:
            raise OptionError("data", self.data, "None: the data is made", "Set sizes and vocab instead.")
        if not isinstance(self.sizes, (tuple, list)) or not self.sizes:
            raise OptionError("sizes", repr(self.sizes), "a list of numbers", "Pass sizes=(4, 8), say.")
        self.tasks()

    def with_mixer(self, mixer: str) -> RecallRecipe:
        """This recipe with another mixer in all layers."""
        return replace(self, mixers=(mixer,))

    @property
    def mixer_name(self) -> str:
        """The mixers of the layers, with commas."""
        return ",".join(self.mixers)

    def tasks(self) -> list[Task]:
        """A task of each size."""
        return [TASKS[self.task](size, self.vocab) for size in self.sizes]


@dataclass(frozen=True)
class Schedule:
    """How `train` trains a model: AdamW, warm-up and cosine decay, clipped gradients; the tasks take turns.

    Args:
        steps: how many at most. The training ends sooner if all tasks reach 99 % twice in a row.
        tokens: in a step.
        learning_rate: the highest one. warmup: share of the steps in which it rises.
        weight_decay: of AdamW.
        every: steps between two measurements.
    """

    steps: int = 1500
    tokens: int = 2048
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.1
    every: int = 125

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "every"):
            check_int(name, getattr(self, name), 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
