"""What a model is called with while it is converted and measured, where nobody gave an input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.find import image_size
from polymix.convert.tracing import mode, run, tensors
from polymix.errors import OptionError

TOKENS, PIXELS = 512, 224  # where neither the user nor the model says


def made_up(model: nn.Module, *, batch: int = 1, size: int | None = None, tokens: int | None = None) -> Any:
    """Token ids for a model of text, else random images."""
    weight = next(model.parameters())
    if reads_text(model):
        if size is not None:
            raise OptionError("--image-size", size, "none for a model of text", "Pass --tokens.")
        return text(model, batch, tokens, weight.device)
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is None:
        got = f"{type(model).__name__}, which says neither what images nor what text it reads"
        raise OptionError("--model", got, "file.py:function that returns (model, input)", "")
    if tokens is not None:
        raise OptionError("--tokens", tokens, "none for a model of images", "Pass --image-size.")
    height, width = (size, size) if size is not None else pixels(model) or (PIXELS, PIXELS)
    return torch.randn(batch, first.in_channels, height, width, device=weight.device, dtype=weight.dtype)


@torch.no_grad()
def check_call(model: nn.Module, given: Any) -> None:
    """OptionError unless the model takes the input."""
    try:
        with mode(model, False):
            run(model, given)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        what = ", ".join(str(tuple(part.shape)) for part in tensors(given))
        got = f"an input of {what}, which {type(model).__name__} refuses ({' '.join(str(error).split())[:200]})"
        cure = "Pass --image-size or --tokens, or return another input from the function."
        raise OptionError("--model", got, "one that it takes", cure) from error


def reads_text(model: Any) -> bool:
    """Whether token ids are its input, as transformers has it."""
    return getattr(model, "main_input_name", None) == "input_ids" and hasattr(model, "config")


def has_twin(model: nn.Module) -> bool:
    """Whether it is a language model that `polymix.models.language` has classes for."""
    own = type(model).__name__ in ("GPT2LMHeadModel", "LlamaForCausalLM")
    return own and type(model).__module__.startswith("transformers.")


def text(model: Any, batch: int, tokens: int | None, device: torch.device) -> dict[str, Tensor]:
    """Random ids below config.vocab_size."""
    size = (batch, longest(model, tokens))
    return {"input_ids": torch.randint(model.config.vocab_size, size, device=device)}


def longest(model: Any, tokens: int | None) -> int:
    """`tokens`, else 512 or as many as the model can take."""
    most = getattr(model.config, "max_position_embeddings", None) or TOKENS
    if tokens is not None and tokens > most:
        raise OptionError("--tokens", tokens, f"at most {most}, which {type(model).__name__} can take", "")
    return min(TOKENS, most) if tokens is None else tokens


def pixels(model: Any) -> tuple[int, int] | None:
    """The images that a model says it is for."""
    places = (model, getattr(model, "patch_embed", None), getattr(model, "config", None))
    known = next(filter(None, map(image_size, places)), None)
    said = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    return known or (None if said is None else (said[-2], said[-1]))
