"""What a language model is worth: its loss on held-out text, bits per byte, and how it goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.text.packing import Batch, cut
from polymix.tasks.text.prepare import Prepared
from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.text.tokenizer import count_bytes
from polymix.tasks.trainer import isolate_rng


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Nats of all targets together."""
    others = {name: batch[name] for name in ("segment_ids",) if name in batch}
    logits = model(input_ids=batch["input_ids"], use_cache=False, **others).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


@dataclass(frozen=True)
class Held:
    """Held-out windows (count, context + 1), and the bytes of the text that is predicted in them."""

    batches: tuple[Batch, ...]
    targets: int
    bytes: int | None  # None: without a tokenizer nobody knows

    @staticmethod
    def of(prepared: Prepared, recipe: TextRecipe) -> Held:
        """Of the first `evaluate_tokens` held-out tokens, behind one another, each a target once."""
        tokens, context = prepared.val, min(recipe.context, len(prepared.val) - 1)
        count = max(1, min(len(tokens) - 1, recipe.evaluate_tokens) // context)
        rows = torch.stack([tokens[i * context : (i + 1) * context + 1] for i in range(count)])
        whole = cut(rows, prepared.end if recipe.packing == "segments" else None)
        size = max(1, recipe.batch_size // recipe.accumulate)
        batches = tuple({k: v[i : i + size] for k, v in whole.items()} for i in range(0, count, size))
        targets = whole["targets"].flatten()
        known = None if prepared.tokenizer is None else count_bytes(prepared.tokenizer, _runs(targets, prepared.end))
        return Held(batches, int((targets != IGNORED).sum()), known)


def _runs(targets: Tensor, end: int | None) -> list[list[int]]:
    """Stretches of targets without an end of text, or what is no target, in them."""
    border = targets == IGNORED if end is None else (targets == IGNORED) | (targets == end)
    edges = [-1, *border.nonzero().flatten().tolist(), len(targets)]
    return [targets[a + 1 : b].tolist() for a, b in pairwise(edges) if b > a + 1]


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients, and without a trace in the random numbers."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), isolate_rng():
            yield
    finally:
        model.train(training)


def evaluate(
    model: nn.Module, held: Held, device: Any, rank: int, world: int, total: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Loss in nats a token, perplexity, and bits a byte; each process computes a part, and `total` adds them up."""
    nats = torch.zeros((), dtype=torch.float64, device="cpu" if str(device) == "mps" else device)
    with resting(model):
        for start in range(0, len(held.batches), world):  # as many for each: sharded weights are gathered together
            mine = start + rank
            batch = held.batches[min(mine, len(held.batches) - 1)]
            loss = summed_loss(model, {name: part.to(device) for name, part in batch.items()})
            nats += loss.to(nats) if mine < len(held.batches) else 0.0
    whole = total(nats).item()
    mean = whole / max(held.targets, 1)
    said = {"val_loss": mean, "perplexity": math.exp(mean) if mean < 700 else math.inf}
    return said if not held.bytes else {**said, "bits_per_byte": whole / math.log(2) / held.bytes}


def samples(model: Any, tokenizer: Any, recipe: TextRecipe, device: Any) -> list[str]:
    """How the model goes on from each prompt, always with the same random numbers."""
    said = []
    with resting(model):
        for prompt in recipe.prompts:
            ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=device)
            new = min(recipe.sample_tokens, recipe.context - ids.shape[1])
            if new > 0 and ids.numel():
                torch.manual_seed(recipe.seed)
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=True, top_k=50,
                    temperature=0.8, pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
                said.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return said
