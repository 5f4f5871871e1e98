"""The options of a training on text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_serializer, model_validator

from polymix.errors import IdleOptionError, shown
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    Count,
    LearningRate,
    Mixer,
    Natural,
    Place,
    Recipe,
    Steps,
    WeightDecay,
    wrong,
)

T = TypeVar("T", bound="TextRecipe")
FAMILIES = ("gpt", "llama")
MIXERS = "pom:decay=8,local"  # of the two families; a preset and a config have their own
SIZES: Mapping[str, Any] = {"positions": "none", "num_layers": 4, "hidden_size": 192, "num_heads": 3}  # likewise


def _has_mixers(model: Any) -> bool:
    """Whether the layers of a recipe's model are mixers: of all but a config of transformers' own."""
    kind = model.get("model_type") if isinstance(model, Mapping) else getattr(model, "model_type", None)
    return kind is None or kind in {f"polymix-{family}" for family in FAMILIES}


class TextRecipe(Recipe):
    """A language model, its text, and how it is trained.

    The data are text files, parquet files or .bin token shards, or a folder of one kind; without any, Python's own
    prose. What is no option here is one of the model's config, such as --set num_layers=4.
    """

    task: ClassVar[str] = "polymix.domains.text.task:TextTask"
    sequence_option: ClassVar[str | None] = "context"
    others: ClassVar[str | None] = "options"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "batch_size": 2, "context": 16, "vocab": 300, "mixer": "pom", "evaluate_tokens": 64,
                 "evaluate_every": 4, "sample_tokens": 4, "log_every": 1,
                 "options": {"num_layers": 1, "hidden_size": 16, "num_heads": 1}},
        # nanoGPT's training of GPT-2 (config/train_gpt2.py), on which PoM's is based: 491,520 tokens a step, here of
        # 2,048 a window and 15 billion in all (PoM, Section 4.1), with padding (Supplement B).
        # --set mixer=pom,local is the hybrid, --set mixer=softmax GPT2-S.
        "paper": {"model": "gppom2-s", "mixer": "pom", "context": 2048, "packing": "padded", "batch_size": 240,
                  "steps": 30_518, "learning_rate": 6e-4, "warmup": 2000 / 30_518, "final": 0.1, "weight_decay": 0.1,
                  "cosine_from": "warmup", "decay": "matrices", "betas": (0.9, 0.95), "clip": 1.0, "ema": 0.0,
                  "keep": "last", "precision": "bfloat16", "evaluate_every": 1000,
                  "evaluate_tokens": 2_457_600, "checkpoint_every": 1000,
                  "options": {"max_position_embeddings": 2048, "positions": "learned", "bias": False, "dropout": 0.0}},
    }  # fmt: skip
    only_beside: ClassVar[tuple[Beside, ...]] = (*Recipe.only_beside, ("model", _has_mixers, ("mixer",)))
    fits_source: ClassVar[tuple[str, ...]] = ("layout", "column", "end_of_text")
    reading: ClassVar[tuple[str, ...]] = ("held_out", "tokenizer", "vocab")
    # The settings of the model's config stand for mixer, model and options.
    changeable: ClassVar[tuple[str, ...]] = (
        *Recipe.changeable, "prompts", "sample_tokens", "mixer", "model", "options",
    )  # fmt: skip

    batch_size: BatchSize = 8
    steps: Steps = 600
    learning_rate: LearningRate = 2e-3
    weight_decay: WeightDecay = 0.1
    mixer: Mixer | None = Field(  # type: ignore[assignment]
        None,
        description=f"mixer of each layer, or a pattern with commas that is repeated; None: {MIXERS} in gpt and llama,"
        " and a preset's own",
    )
    model: Any = Field("gpt", description="gpt, llama, the name of a preset, or a causal config of transformers")
    options: dict[str, Any] = Field(default_factory=dict, description="changes to the model's config, by name")
    column: str = Field("text", description="the parquet column with the text")
    held_out: float = Field(0.05, gt=0, lt=1, description="share of the documents that is held out")
    tokenizer: Place | None = Field(
        None, description="tokenizer.json or a folder of transformers; None: a byte-level BPE is trained"
    )
    vocab: int | None = Field(
        None, ge=1, description="size of the trained tokenizer (None: 4096), or vocabulary of .bin shards"
    )
    end_of_text: int | None = Field(
        None, ge=0, description="token between the documents of .bin shards; None: they are one stream"
    )
    context: Count = Field(256, description="tokens that the model sees at once")
    packing: Literal["stream", "segments", "padded"] = Field(
        "stream",
        description="documents one after another; segments: they also do not see each other; padded: one a row",
    )
    evaluate_tokens: Count = Field(65536, description="the most held-out tokens that an evaluation uses")
    prompts: tuple[str, ...] = Field(("The ", "Return the "), description="texts that the model continues")
    sample_tokens: Natural = Field(40, description="tokens by which it continues them")

    @model_validator(mode="after")
    def _model_is_known(self) -> TextRecipe:
        if not all(self.prompts):
            raise wrong("prompts", repr(self.prompts), "texts that are not empty", 'Pass ("The ",), say.')
        named = isinstance(self.model, str) or (isinstance(self.model, Mapping) and "model_type" in self.model)
        if not named and not callable(getattr(self.model, "to_dict", None)):
            raise wrong("model", shown(self.model), "a name, or a config of transformers", 'Pass "gpt", say.')
        if self.control and not self.chooses_mixer:
            raise wrong("control", "True for a model whose layers are no mixers", "None or False", "Leave it out.")
        if "vocab_size" in self.options:
            raise wrong("options", f"vocab_size={self.options['vocab_size']}", "no vocab_size", "Set vocab.")
        if self.mixer is not None and "mixers" in self.options:
            got = f"{self.mixer} beside mixers, where it has no effect"
            raise wrong("mixer", got, "it left out", "Leave one of the two out.", IdleOptionError)
        return self

    @field_serializer("model", "options")
    def _as_json(self, value: Any) -> Any:
        """A config of transformers becomes its own dict."""
        plain = value.to_dict() if callable(getattr(value, "to_dict", None)) else value
        return json.loads(json.dumps(plain, default=str))

    @property
    def model_options(self) -> dict[str, Any]:
        """The changes to the model's config: sizes and mixers of a family unless others are given."""
        family = self.model in FAMILIES if isinstance(self.model, str) else False
        mixer = MIXERS if self.mixer is None and family else self.mixer
        mixers = {} if mixer is None else {"mixers": tuple(mixer.split(","))}
        return {**(SIZES if family else {}), **mixers, **self.options}

    @property
    def mixer_name(self) -> str:
        """The mixers of the layers, with commas; "model" where the model's own config decides them."""
        mixers = self.model_options.get("mixers", "model")
        return mixers if isinstance(mixers, str) else ",".join(map(str, mixers))

    @property
    def chooses_mixer(self) -> bool:
        return _has_mixers(self.model)

    def for_control(self: T, **options: Any) -> T:
        own = {name: value for name, value in self.options.items() if name != "mixers"}
        return super().for_control(options=own | {"short_conv": 0}, **options)  # a convolution mixes too

    @classmethod
    def types_of_others(cls) -> dict[str, str]:
        """The types of the options of polymix's own models."""
        from polymix.models.language import PolymixConfig

        parameters = inspect.signature(PolymixConfig.__init__).parameters
        return {name: str(parameter.annotation) for name, parameter in parameters.items()}
