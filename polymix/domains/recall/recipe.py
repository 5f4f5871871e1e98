"""The options of a training on recall and copying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from polymix.train.recipe import (
    CheckpointEvery,
    Count,
    EvaluateEvery,
    LearningRate,
    Mixer,
    Natural,
    Recipe,
    Steps,
    wrong,
)

R = TypeVar("R", bound="RecallRecipe")


class RecallRecipe(Recipe):
    """A small language model that learns to recall or to copy. Its data are synthetic; every sequence is new."""

    task: ClassVar[str] = "polymix.domains.recall.task:RecallTask"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "evaluate_every": 4, "sizes": (4,), "vocab": 16, "tokens": 64, "hidden_size": 16,
                 "answers": 32, "log_every": 1},
    }  # fmt: skip

    steps: Steps = 1500
    learning_rate: LearningRate = 3e-3
    evaluate_every: EvaluateEvery = 125
    checkpoint_every: CheckpointEvery = 125
    mixer: Mixer = Field(
        "padre:degree=1:channel=identity:kernel_size=3,pom",
        description="mixer of each layer, or a pattern with commas that is repeated",
    )
    question: Literal["recall", "copying"] = Field("recall", description="what is asked: values of keys, or all tokens")
    sizes: tuple[Count, ...] = Field(
        (4, 8, 16),
        min_length=1,
        description="pairs to recall, or tokens to copy; the sizes take turns by step",
    )
    vocab: Count = Field(256, description="size of the vocabulary")
    tokens: Count = Field(2048, description="tokens of a step, in place of batch_size")
    num_layers: Count = Field(2, description="layers of the model")
    hidden_size: Count = Field(64, description="channels of the model")
    num_heads: Count = Field(2, description="heads of mixers that leave them open")
    positions: Literal["none", "learned", "rotary"] = Field("none", description="positions of the model")
    short_conv: Natural = Field(0, description="taps of a causal convolution before each mixer but attention; 0: none")
    answers: Count = Field(2048, description="answers that an evaluation counts, for each size")
    enough: float | None = Field(
        None, gt=0, le=1, description="stop once every size has this accuracy in two evaluations in a row"
    )

    @model_validator(mode="after")
    def _data_are_synthetic(self) -> RecallRecipe:
        if self.data is not None:
            raise wrong("data", self.data, "None: the data are synthetic", "Set sizes and vocab instead.")
        return self

    def for_control(self: R, **options: Any) -> R:
        return super().for_control(short_conv=0, **options)  # a convolution mixes too

    @property
    def mixers(self) -> tuple[str, ...]:
        """The pattern of mixers."""
        return tuple(self.mixer.split(","))

    def to_questions(self) -> list[Any]:
        """A question of each size. Raises OptionError where one does not fit the vocabulary."""
        from polymix.domains.recall.data import Copying, Recall

        kind = {"recall": Recall, "copying": Copying}[self.question]
        return [kind(size, self.vocab) for size in self.sizes]
