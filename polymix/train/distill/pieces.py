"""Long sequences in pieces: each carries on from the state of the one before, through the model's ordinary cache.

Gradients stay inside a piece (truncated backpropagation), and a piece is computed again in the backward pass, so that
the activations of one piece alone are held at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.convert.adapters.libraries import load_library
from polymix.convert.replacement import Replacement
from polymix.errors import CapabilityError, DataError, OptionError
from polymix.train.distill.batches import Forward, foretells, logits_of
from polymix.train.task import IGNORED


def check_pieces(report: Replacement, batch: Any, piece: int, loss: str) -> None:
    """Raise an error unless the converted model carries a state from piece to piece."""
    name = type(report.model).__name__
    if not foretells(report.model, batch) or not isinstance(batch.get("input_ids"), Tensor):
        got = f"{piece} for {name}"
        raise OptionError("piece", got, "a language model, and dicts with input_ids", "Leave it out.")
    if loss != "logits":
        raise OptionError("piece", f"{piece} with loss={loss!r}", "loss='logits'", "Leave one of the two out.")
    for place, adapter in report.adapters.items():
        if not (adapter.causal and adapter.mixer.capabilities.recurrent):
            got = f"{piece} for {place}, whose {adapter.mixer.name} carries no state"
            raise CapabilityError("piece", got, "recurrent mixers, such as pom, qt and linear", "Leave it out.")


def fresh_cache(model: Any) -> Any:
    """An empty cache of transformers for a model."""
    kind = load_library("transformers").DynamicCache
    try:
        return kind(config=model.config)
    except TypeError:  # before transformers 4.56
        return kind()


def carried(cache: Any) -> Any:
    """A cache with the same states, detached; what is later put into it does not change the first."""
    new = copy.copy(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in new.layers:
        for name, value in vars(layer).items():
            setattr(layer, name, tree_map_only(Tensor, Tensor.detach, value))
    return new


def cut(model: nn.Module, batch: Mapping[str, Any], piece: int, forward: Forward) -> Iterator[dict[str, Any]]:
    """A batch of sequences (B, N) as batches of at most `piece` tokens, in order. Masks reach back to the beginning.

    Labels are those of the next token, also at the end of a piece; the last token has none where they are shifted here.
    """
    ids, labels = batch["input_ids"], batch.get("labels")
    if labels is not None and forward is logits_of and foretells(model, batch):
        labels = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), 1)
    others = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    length = ids.shape[1]
    for name, value in others.items():
        if isinstance(value, Tensor) and value.shape[:2] != ids.shape:
            got = f"{name} of shape {tuple(value.shape)}"
            raise DataError("piece", got, "batches of token ids, masks and labels (B, N)", "Leave piece out.")
    for start in range(0, length, piece):
        end = min(start + piece, length)
        part: dict[str, Any] = {"input_ids": ids[:, start:end]}
        for name, value in others.items():
            first = 0 if name == "attention_mask" else start
            part[name] = value[:, first:end] if isinstance(value, Tensor) else value
        if labels is not None:
            part["labels"] = labels[:, start:end]
        yield part


def as_they_are(model: nn.Module, batch: Any) -> Tensor:
    """`logits_of` for batches whose labels are shifted already."""
    return logits_of(model, batch)
