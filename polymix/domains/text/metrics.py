"""How good a language model is: its loss on held-out text, and bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.domains.text.data import TextData
from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.tokenizer import count_bytes
from polymix.domains.text.tokens import Batch, cut, padded, pieces
from polymix.train.evaluation import evaluating
from polymix.train.task import IGNORED, Process


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a batch in nats, summed over its targets."""
    others = {name: batch[name] for name in ("segment_ids", "position_ids") if name in batch}
    logits = model(input_ids=batch["input_ids"], use_cache=False, **others).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


@dataclass(frozen=True)
class HeldOut:
    """Held-out windows (count, context + 1), and the bytes of the text that their targets stand for."""

    batches: tuple[Batch, ...]
    targets: int
    bytes: int | None  # None: without a tokenizer

    @staticmethod
    def of(data: TextData, recipe: TextRecipe) -> HeldOut:
        """The first `evaluate_tokens` held-out tokens in order, each a target once."""
        tokens, context = data.val, min(recipe.context, len(data.val) - 1)
        if recipe.packing == "padded" and data.end is not None:
            starts, lengths = pieces(tokens, data.end, context)
            count = max(1, int(((lengths - 1).cumsum(0) <= recipe.evaluate_tokens).sum()))
            whole = padded(tokens, starts[:count], lengths[:count], data.end, context)
        else:
            count = max(1, min(len(tokens) - 1, recipe.evaluate_tokens) // context)
            rows = torch.stack([tokens[i * context : (i + 1) * context + 1] for i in range(count)])
            whole = cut(rows, data.end if recipe.packing == "segments" else None)
        size = max(1, recipe.batch_size // recipe.accumulate)
        batches = tuple({k: v[i : i + size] for k, v in whole.items()} for i in range(0, count, size))
        targets = whole["targets"].flatten()
        known = None if data.tokenizer is None else count_bytes(data.tokenizer, _runs(targets, data.end))
        return HeldOut(batches, int((targets != IGNORED).sum()), known)


def _runs(targets: Tensor, end: int | None) -> list[list[int]]:
    """Stretches of targets between ends of text and positions that are not targets."""
    border = targets == IGNORED if end is None else (targets == IGNORED) | (targets == end)
    edges = [-1, *border.nonzero().flatten().tolist(), len(targets)]
    return [targets[a + 1 : b].tolist() for a, b in pairwise(edges) if b > a + 1]


def evaluate(model: nn.Module, held: HeldOut, process: Process) -> dict[str, float]:
    """Held-out loss, perplexity and bits per byte. Each process computes a part."""
    device, rank, world = process.device, process.rank, process.world
    nats = torch.zeros((), dtype=torch.float64, device="cpu" if str(device) == "mps" else device)
    with evaluating(model):
        for start in range(0, len(held.batches), world):  # as many for each: sharded weights are gathered together
            mine = start + rank
            batch = held.batches[min(mine, len(held.batches) - 1)]
            loss = summed_loss(model, process.local({name: part.to(device) for name, part in batch.items()}))
            nats += loss.to(nats) if mine < len(held.batches) else 0.0
    whole = process.total(nats).item()
    mean = whole / max(held.targets, 1)
    figures = {"val_loss": mean, "perplexity": math.exp(mean) if mean < 700 else math.inf}
    return figures if not held.bytes else {**figures, "bits_per_byte": whole / math.log(2) / held.bytes}
