"""What a training on text is asked to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.tasks.trainer import PRECISION, check_device

PACKINGS = ("stream", "segments")
STRATEGIES = ("auto", "ddp", "fsdp")
FREE = (
    "log_every",
    "checkpoint_every",
    "prompts",
    "sample_tokens",
    "device",
    "strategy",
    "model",
    "options",
    "data",
)  # decide no loss, or are told by what they come to


@dataclass(frozen=True)
class TextRecipe:
    """A language model, its text, and how it is trained: AdamW, linear warm-up, cosine decay.

    Args:
        model: "gpt", "llama", the name of a preset, or any causal config of transformers.
        options: what to change in it, such as {"mixers": ["pom", "local"], "num_layers": 4}.
        data: a text file, a parquet file, a folder of either, `.bin` token shards; None: the prose of Python's library.
        column: of parquet, with the text.
        held_out: share of the documents that is kept for validation.
        tokenizer: tokenizer.json or a folder of transformers; None: a byte-level BPE is trained.
        vocab: its size, 4096 where nothing is said; of `.bin` shards, how many tokens there are.
        end_of_text: the token between the documents of `.bin` shards; without it they are one stream.
        context: tokens that the model sees at once.
        packing: "stream": documents behind one another; "segments": so that none sees another.
        batch_size: sequences a step, of all processes together; accumulate: parts that a step is computed in.
        steps, learning_rate, warmup (share of the steps), final (learning rate at the end, of the highest),
        weight_decay, clip (norm of the gradients), betas: of AdamW.
        ema: decay of averaged weights, which are then evaluated and saved; 0: none.
        precision: "float32" or "bfloat16". checkpointing: gradients by computing blocks again.
        seed: of weights, order and dropout. device: "cpu", "cuda" …
        strategy: "auto", "ddp" or "fsdp"; with several processes under torchrun.
        log_every, evaluate_every, checkpoint_every: steps. evaluate_tokens: of the held-out text, at most.
        prompts, sample_tokens: what the model is asked to continue at each evaluation, and how far.
    """

    model: Any = "gpt"
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    column: str = "text"
    held_out: float = 0.05
    tokenizer: str | None = None
    vocab: int | None = None
    end_of_text: int | None = None
    context: int = 256
    packing: str = "stream"
    batch_size: int = 16
    accumulate: int = 1
    steps: int = 400
    learning_rate: float = 2e-3
    warmup: float = 0.1
    final: float = 0.1
    weight_decay: float = 0.1
    betas: Sequence[float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0
    precision: str = "float32"
    checkpointing: bool = False
    seed: int = 0
    device: str = "cpu"
    strategy: str = "auto"
    log_every: int = 10
    evaluate_every: int = 100
    checkpoint_every: int = 100
    evaluate_tokens: int = 65536
    prompts: Sequence[str] = ("The ", "Return the ")
    sample_tokens: int = 40

    def __post_init__(self) -> None:
        for name in ("context", "batch_size", "accumulate", "steps", "log_every", "evaluate_every", "checkpoint_every",
                     "evaluate_tokens"):  # fmt: skip
            check_int(name, getattr(self, name), 1)
        for name in ("sample_tokens", "seed"):
            check_int(name, getattr(self, name), 0)
        for name, low, high, allowed, usual in (
            ("held_out", 1e-6, 1.0, "a share above 0 and below 1", 0.05), ("warmup", 0.0, 1.0, "a share below 1", 0.1),
            ("final", 0.0, 1.0 + 1e-9, "a share of at most 1", 0.1), ("ema", 0.0, 1.0, "0, or a decay below 1", 0.999),
            ("learning_rate", 1e-12, math.inf, "a number above 0", 1e-3), ("clip", 1e-12, math.inf, "above 0", 1.0),
            ("weight_decay", 0.0, math.inf, "a number of at least 0", 0.1),
        ):  # fmt: skip
            check_number(name, getattr(self, name), low, high, allowed, usual)
        if isinstance(self.betas, str) or len(self.betas) != 2:
            raise OptionError("betas", repr(self.betas), "two numbers", "Pass betas=(0.9, 0.95), say.")
        for beta in self.betas:
            check_number("betas", beta, 0.0, 1.0, "two numbers in [0, 1)", 0.9)
        check_choice("packing", self.packing, PACKINGS)
        check_choice("precision", self.precision, [name for name in PRECISION if name != "float16"])
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("checkpointing", self.checkpointing, (True, False))
        for name in ("vocab", "end_of_text"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0 if name == "end_of_text" else 1)
        if isinstance(self.prompts, str) or not all(isinstance(text, str) and text for text in self.prompts):
            raise OptionError("prompts", repr(self.prompts), "texts, none of them empty", 'Pass ("The ",), say.')
        if not isinstance(self.options, Mapping):
            raise OptionError("options", repr(self.options), "a dict", 'Pass {"num_layers": 4}, say.')
        check_device(self.device)
        if self.batch_size % self.accumulate:
            got = f"{self.accumulate} with batch_size={self.batch_size}"
            raise OptionError("accumulate", got, "a divisor of the batch", "Change one of the two.")
        if "vocab_size" in self.options:
            raise OptionError("vocab_size", self.options["vocab_size"], "nothing: the tokenizer's", "Set vocab.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; a config object by its own dict."""
        model = self.model if isinstance(self.model, str) else self.model.to_dict()
        plain = {**asdict(replace(self, model="")), "model": model, "options": dict(self.options)}
        return json.loads(json.dumps(plain, default=str))

    def decisive(self) -> dict[str, Any]:
        """What a run can be resumed with alone."""
        return {name: value for name, value in self.to_dict().items() if name not in FREE}
