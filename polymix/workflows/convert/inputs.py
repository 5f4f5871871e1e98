"""What the model is run on while it is converted and measured: the user's data, or random images or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polymix.convert.adapters.libraries import examples_of
from polymix.convert.context import longest
from polymix.convert.find import pixels
from polymix.convert.tracing import mode, run, tensors
from polymix.errors import OptionError

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
TOKENS, PIXELS = 512, 224  # where neither the user nor the model states them


class Data(Protocol):
    """The user's data, for one model.

    batch: inputs per call, by default. metric: name of the metric in `polymix.train.distill.metrics`. learning: options
    of `polymix.distill` that the data needs.
    """

    batch: int
    metric: str
    learning: Mapping[str, Any]

    @property
    def size(self) -> str:
        """How much there is to train on, in words."""

    def sample(self, model: nn.Module, batch: int, device: str) -> Any:
        """The input to calibrate and measure with. Raises OptionError where the model does not take it."""

    def loaders(self, batch: int) -> tuple[Any, Any]:
        """Batches for training, and batches that are held back."""

    def notes(self) -> list[str]:
        """Sentences about the data for the report."""

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        """Metadata for the model card: the task, and the result on the data that was held back."""

    def to_dict(self) -> dict[str, Any]: ...


def card_metadata(task: str, title: str, data: tuple[str, str], metric: str, value: float | None) -> dict[str, Any]:
    """Metadata for a model card with one result. data: the type and the name of the data set."""
    if value is None:
        return {}
    measured = {
        "task": {"type": task}, "dataset": dict(zip(("type", "name"), data, strict=True)),
        "metrics": [{"type": metric, "value": value}],
    }  # fmt: skip
    return {"pipeline_tag": task, "model-index": [{"name": title, "results": [measured]}]}


def random_input(model: nn.Module, *, batch: int = 1, size: int | None = None, tokens: int | None = None) -> Any:
    """Random token ids for a text model, random images for one that starts with a convolution of images.

    Models of sound, and of other inputs that transformers knows, get the smallest input that they take.
    """
    weight = next(model.parameters())
    if reads_text(model):
        if size is not None:
            raise OptionError("--image-size", size, "no image size for a text model", "Pass --tokens.")
        return random_tokens(model, batch, tokens, weight.device)
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is None:
        for option, value in (("--image-size", size), ("--tokens", tokens)):
            if value is not None:
                raise OptionError(option, value, "no such option for a model of neither text nor images", "")
        for example in examples_of(model):
            with suppress(OptionError):
                check_call(model, example)
                return example
        got = f"{type(model).__name__}, which reads neither text nor images"
        raise OptionError("--model", got, "file.py:function that returns (model, input)", "")
    if tokens is not None:
        raise OptionError("--tokens", tokens, "no tokens for an image model", "Pass --image-size.")
    height, width = (size, size) if size is not None else pixels(model) or (PIXELS, PIXELS)
    return torch.randn(batch, first.in_channels, height, width, device=weight.device, dtype=weight.dtype)


@torch.no_grad()
def check_call(model: nn.Module, inputs: Any) -> None:
    """Raise OptionError unless the model runs on the inputs."""
    try:
        with mode(model, False):
            run(model, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        what = ", ".join(str(tuple(part.shape)) for part in tensors(inputs))
        got = f"an input of shape {what}, on which {type(model).__name__} fails ({' '.join(str(error).split())[:200]})"
        cure = "Pass --image-size or --tokens, or return another input from the function."
        raise OptionError("--model", got, "an input that the model takes", cure) from error


def reads_text(model: Any) -> bool:
    """Whether a model reads token ids, as transformers states it."""
    return getattr(model, "main_input_name", None) == "input_ids" and hasattr(model, "config")


def has_language_model(model: nn.Module) -> bool:
    """Whether `polymix.models.language` has a class for this language model."""
    own = type(model).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM")
    return own and type(model).__module__.startswith("transformers.")


def random_tokens(model: Any, batch: int, tokens: int | None, device: torch.device) -> dict[str, Tensor]:
    """Random token ids."""
    size = (batch, sequence_length(model, tokens))
    return {"input_ids": torch.randint(model.config.vocab_size, size, device=device)}


def sequence_length(model: Any, tokens: int | None) -> int:
    """`tokens`, or by default 512 or the model's maximum."""
    most = longest(model) or TOKENS
    if tokens is not None and tokens > most:
        cure = f"polymix convert --context {tokens} gives a model more."
        raise OptionError("--tokens", tokens, f"at most {most}, the maximum of {type(model).__name__}", cure)
    return min(TOKENS, most) if tokens is None else tokens


def patch_size(model: Any) -> int | None:
    """The side of a square patch in pixels, as the config of a model of transformers states it."""
    stated = getattr(model.config, "patch_size", None)
    return stated if isinstance(stated, int) else None
