"""Batches as models take them, logits as models return them, and the losses of both stages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from polymix.convert.tracing import tensors, without_fast_path
from polymix.errors import DataError
from polymix.train.task import IGNORED

LOSSES = ("logits", "squares", "features")
Forward = Callable[[nn.Module, Any], Tensor]
_FORMS = "tensors, (inputs, labels), or dicts of keyword arguments with or without `labels`"


def plain(batch: Any) -> Any:
    """A batch as a dict, tuple or tensor; other mappings become dicts."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def moved(batch: Any, device: torch.device | str) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device), plain(batch))


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch: a dict without its labels, or the first of (inputs, labels)."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in ("labels", "label")}
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch, (inputs, labels) or a dict with `labels`; None if it has none."""
    if isinstance(batch, Mapping):
        return batch.get("labels", batch.get("label"))
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def run(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch without its labels. No cache is built."""
    inputs = inputs_of(batch)
    if not isinstance(inputs, Mapping):
        return model(inputs)
    caches = "use_cache" in inspect.signature(model.forward).parameters
    return model(**({"use_cache": False, **inputs} if caches else inputs))


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    """(…, classes) of a model that returns a tensor, a tuple that begins with one, or an output with `logits`."""
    output = run(model, batch)
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    if not isinstance(logits, Tensor):
        got, allowed = f"a model that returns {type(output).__name__}", "a tensor, a tuple or an output with logits"
        raise DataError("forward", got, allowed, "Pass forward=, a function of (model, batch) that returns logits.")
    return logits


def features_of(model: nn.Module, batch: Any) -> Tensor:
    """The last features of a model: what `forward_features` returns, or `last_hidden_state`, or its first tensor.

    Features (B, N, D) of tokens that the batch's attention_mask hides are left out.
    """
    inputs, hidden = inputs_of(batch), batch.get("attention_mask") if isinstance(batch, Mapping) else None
    own = getattr(model, "forward_features", None)
    output = own(inputs) if callable(own) and not isinstance(inputs, Mapping) else run(model, batch)
    last = getattr(output, "last_hidden_state", output)
    parts = tensors(dict(last) if isinstance(last, Mapping) else last)  # outputs of some libraries are unknown dicts
    if not parts:
        got, allowed = f"a model that returns {type(output).__name__}", "a tensor, or an output with tensors"
        raise DataError("forward", got, allowed, "Pass forward=, a function of (model, batch) that returns features.")
    features = parts[0]
    if isinstance(hidden, Tensor) and features.ndim == 3 and hidden.shape == features.shape[:2]:
        return features[hidden.bool()]
    return features


def with_features(model: nn.Module, data: Any, forward: Forward, device: torch.device | str) -> list[Any]:
    """Batches whose labels are a model's features, on the CPU: what another model's features are measured by."""
    answered = []
    with torch.no_grad(), without_fast_path():
        for batch in data:
            inputs = inputs_of(plain(batch))
            truth = forward(model.to(device), moved(inputs, device)).float().cpu()
            answered.append({**inputs, "labels": truth} if isinstance(inputs, Mapping) else (inputs, truth))
    return answered


class Answer(NamedTuple):
    """A model's answers to a batch as rows: logits (n, classes), labels, and which rows count."""

    logits: Tensor
    labels: Tensor | None  # (n) classes, or (n, classes) probabilities
    real: Tensor  # (n)

    def label_loss(self) -> Tensor:
        """Cross-entropy with the labels."""
        assert self.labels is not None
        losses = F.cross_entropy(self.logits, self.labels, ignore_index=IGNORED, reduction="none")
        return self._mean(losses)

    def teacher_loss(self, teacher: Answer, temperature: float) -> Tensor:
        """T² · KL(teacher ‖ student) at temperature T."""
        ours, theirs = ((each.logits / temperature).log_softmax(-1) for each in (self, teacher))
        return temperature**2 * self._mean(F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1))

    def _mean(self, losses: Tensor) -> Tensor:
        return losses.where(self.real, 0.0).sum() / self.real.sum().clamp_min(1)


class Values(NamedTuple):
    """A model's answers that are numbers and not logits, and labels of the same shape. Both losses are mean squares."""

    values: Tensor
    labels: Tensor | None

    def label_loss(self) -> Tensor:
        assert self.labels is not None
        return (self.values - self.labels.float()).square().mean()

    def teacher_loss(self, teacher: Values, temperature: float) -> Tensor:
        return (self.values - teacher.values).square().mean()


def values(model: nn.Module, batch: Any, forward: Forward) -> Values:
    """A model's answers to a batch as numbers."""
    with without_fast_path():
        outputs, labels = forward(model, batch).float(), labels_of(batch)
    if labels is not None and (not isinstance(labels, Tensor) or labels.shape != outputs.shape):
        got = f"labels {tuple(getattr(labels, 'shape', ()))} for outputs {tuple(outputs.shape)}"
        raise DataError("data", got, "labels of the output's shape", "Leave them out to learn from the model alone.")
    return Values(outputs, labels)


def features(model: nn.Module, batch: Any, forward: Forward) -> Values:
    """A model's features, without labels: these say nothing of them."""
    with without_fast_path():
        return Values(forward(model, batch).float(), None)


def answer(model: nn.Module, batch: Any, forward: Forward) -> Answer:
    """A model's answers to a batch. Rows with label -100, or hidden by attention_mask without labels, do not count."""
    with without_fast_path():
        logits, labels = forward(model, batch).float(), labels_of(batch)
    hidden = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if labels is None:
        real = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        if isinstance(hidden, Tensor) and real.ndim == hidden.ndim == 2 and hidden.shape[1] >= real.shape[1]:
            real = hidden[:, -real.shape[1] :].bool()  # the mask of a piece reaches back to the beginning
        return Answer(logits.flatten(0, -2), None, real.flatten())
    whole = isinstance(labels, Tensor) and not labels.is_floating_point()
    if not isinstance(labels, Tensor) or labels.shape != (logits.shape[:-1] if whole else logits.shape):
        got = f"labels {tuple(getattr(labels, 'shape', ()))} for logits {tuple(logits.shape)}"
        allowed = "a class for each row of logits, or probabilities like the logits"
        cure = (
            "Pass forward=, a function of (model, batch) that returns logits (…, classes), or batches without labels."
        )
        raise DataError("data", got, allowed, cure)
    if whole and labels.device.type == "cpu" and labels.numel():  # to read them elsewhere would wait for the GPU
        wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= logits.shape[-1])
        if wrong.any():
            got = f"label {int(labels[wrong][0])} for {logits.shape[-1]} classes"
            allowed = f"classes from 0 to {logits.shape[-1] - 1}, or {IGNORED} for rows that do not count"
            raise DataError("data", got, allowed, "Correct the labels, or give the model a head for these classes.")
    if whole and logits.ndim == 3 and forward is logits_of and foretells(model, batch):
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.flatten() if whole else labels.flatten(0, -2)
    real = labels != IGNORED if whole else torch.ones(labels.shape[0], dtype=torch.bool, device=labels.device)
    return Answer(logits.flatten(0, -2), labels, real)


def answers_of(loss: str) -> Callable[[nn.Module, Any, Forward], Answer | Values]:
    """The function that reads a model's answers for one of LOSSES."""
    return {"squares": values, "features": features}.get(loss, answer)


def foretells(model: nn.Module, batch: Any) -> bool:
    """Whether a token's logits predict the next token: for language models of transformers, whose batches are dicts."""
    named = re.search("CausalLM|LMHeadModel|ConditionalGeneration", type(model).__name__)
    return isinstance(batch, Mapping) and named is not None and not reads_two(model)


def reads_two(model: nn.Module) -> bool:
    """Whether a model of transformers has an encoder and a decoder, each of which reads a text."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def first_of(data: Any, argument: str, least: int = 1) -> Any:
    """The first batch. DataError unless `data` can be iterated repeatedly, has a length, and has tensors."""
    try:
        count = -1 if isinstance(data, Iterator) or not hasattr(data, "__iter__") else len(data)
    except TypeError:  # a DataLoader of a stream
        count = -1
    if count < 1:
        got = type(data).__name__ + (" of length 0" if count == 0 else " without a length" if count else "")
        raise DataError(argument, got, "a DataLoader with a length, or a list of batches", "Wrap the data in one.")
    if count < least:
        raise DataError(argument, f"{count} batches", f"at least one for each of {least} devices", "Use fewer devices.")
    batch = plain(next(iter(data)))
    if isinstance(batch, (tuple, list)) and len(batch) > 2:
        raise DataError(argument, f"batches of {len(batch)} parts", _FORMS, "Name the parts in a dict: collate_fn=.")
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        raise DataError(argument, "batches without tensors", _FORMS, "Wrap the data set in a DataLoader.")
    return batch
