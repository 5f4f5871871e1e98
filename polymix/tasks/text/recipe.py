"""The options of a training on text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.tasks.recipe import TaskRecipe

FAMILIES = ("gpt", "llama")
PACKINGS = ("stream", "segments")


@dataclass(frozen=True)
class TextRecipe(TaskRecipe):
    """A language model, its text, and how it is trained. `TaskRecipe` has the options that all tasks share.

    Args:
        data: text files, parquet files or `.bin` token shards, or a folder of one kind; None: Python's own prose.
        model: "gpt", "llama", the name of a preset, or any causal config of transformers.
        options: changes to the model's config, such as {"mixers": ["pom", "local"], "num_layers": 4}.
        column: the parquet column with the text.
        held_out: share of the documents that is held out for validation.
        tokenizer: a tokenizer.json or a folder of transformers; None: a byte-level BPE is trained.
        vocab: size of the trained tokenizer (default 4096), or the vocabulary of `.bin` shards.
        end_of_text: the token between the documents of `.bin` shards; None: they are one stream.
        context: tokens that the model sees at once.
        packing: "stream" concatenates the documents; "segments" also keeps them from seeing each other.
        evaluate_tokens: the most held-out tokens that an evaluation uses.
        prompts: texts that the model continues at each evaluation; sample_tokens: for how many tokens.
    """

    batch_size: int = 16
    steps: int = 400
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    model: Any = "gpt"
    options: Mapping[str, Any] = field(default_factory=dict)
    column: str = "text"
    held_out: float = 0.05
    tokenizer: str | None = None
    vocab: int | None = None
    end_of_text: int | None = None
    context: int = 256
    packing: str = "stream"
    evaluate_tokens: int = 65536
    prompts: Sequence[str] = ("The ", "Return the ")
    sample_tokens: int = 40

    trains_control: ClassVar[bool] = False  # a language model that mixes nothing learns bigrams

    # The settings of the model's config stand for model and options.
    changeable: ClassVar[tuple[str, ...]] = (*TaskRecipe.changeable, "prompts", "sample_tokens", "model", "options")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context", "evaluate_tokens"):
            check_int(name, getattr(self, name), 1)
        check_int("sample_tokens", self.sample_tokens, 0)
        check_number("held_out", self.held_out, 1e-6, 1.0, "a share above 0 and below 1", 0.05)
        check_choice("packing", self.packing, PACKINGS)
        for name in ("vocab", "end_of_text"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0 if name == "end_of_text" else 1)
        prompts = self.prompts if isinstance(self.prompts, (tuple, list)) else (None,)
        if not all(isinstance(text, str) and text for text in prompts):
            raise OptionError(
                "prompts", repr(self.prompts), "a list of texts that are not empty", 'Pass ("The ",), say.'
            )
        if not isinstance(self.options, Mapping):
            raise OptionError("options", repr(self.options), "a dict", 'Pass {"num_layers": 4}, say.')
        if not isinstance(self.model, str) and not callable(getattr(self.model, "to_dict", None)):
            raise OptionError("model", repr(self.model), "a name, or a config of transformers", 'Pass "gpt", say.')
        if "vocab_size" in self.options:
            raise OptionError("options", f"vocab_size={self.options['vocab_size']}", "no vocab_size", "Set vocab.")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them. A config of transformers becomes its own dict."""
        model = self.model if isinstance(self.model, str) else self.model.to_dict()
        plain = {**asdict(replace(self, model="")), "model": model, "options": dict(self.options)}
        return json.loads(json.dumps(plain, default=str))

    def with_mixer(self, mixer: str) -> TextRecipe:
        """This recipe with another mixer in all layers of polymix's own models."""
        return self.with_options({"mixers": (mixer,)})

    @property
    def mixer_name(self) -> str:
        """The mixers of the layers, with commas; "model" where the model's own config decides them."""
        mixers = self.options.get("mixers", "model" if not isinstance(self.model, str) else ("pom",))
        return mixers if isinstance(mixers, str) else ",".join(map(str, mixers))

    def other_options(self) -> dict[str, str]:
        """Annotations of the options of polymix's own models."""
        from polymix.models.language import PolymixConfig

        parameters = inspect.signature(PolymixConfig.__init__).parameters
        return {name: str(parameter.annotation) for name, parameter in parameters.items()}

    def with_others(self, options: Mapping[str, Any]) -> TextRecipe:
        """What is not an option of the recipe is one of its model."""
        return replace(self, options={**self.options, **options})
