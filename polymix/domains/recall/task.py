"""Recall and copying as a task: a causal language model learns from the positions that have a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.domains.recall import metrics as measuring
from polymix.domains.recall.data import Batch, Questions, stream
from polymix.domains.recall.recipe import RecallRecipe
from polymix.limits import check_memory, check_model
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM
from polymix.train.data.sampling import Slices
from polymix.train.task import IGNORED, Metric, Process, Task


class RecallTask(Task[RecallRecipe, Questions]):
    """A model of tokens (B, N) that returns an output with logits (B, N, vocabulary)."""

    name = "recall"
    metrics = (Metric("accuracy", "higher", "%"),)
    unit = "tokens"

    def check(self) -> None:
        options = self.config()
        size = check_model(lambda: PolymixGPTForCausalLM(options), "recipe", "its model")
        check_memory("recipe", "its model with gradients and the optimizer's state", 4 * size)

    def config(self) -> PolymixGPTConfig:
        """The model's config."""
        recipe = self.recipe
        longest = max(question.length for question in recipe.to_questions())
        return PolymixGPTConfig(
            vocab_size=recipe.vocab, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers,
            num_heads=recipe.num_heads, mixers=list(recipe.mixers), positions=recipe.positions,
            short_conv=recipe.short_conv, max_position_embeddings=longest,
        )  # fmt: skip

    def load(self, folder: Path) -> Questions:
        return Questions(tuple(self.recipe.to_questions()))

    def build(self, data: Questions) -> nn.Module:
        return PolymixGPTForCausalLM(self.config())

    def batches(self, data: Questions, slices: Slices) -> Iterator[Batch]:
        return stream(data.questions, self.recipe.tokens, self.recipe.seed, slices)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy over the positions with a target."""
        asked = batch.targets != IGNORED
        return F.cross_entropy(model(batch.tokens).logits[asked].float(), batch.targets[asked])

    def epoch(self, data: Questions, step: int) -> float:
        return 0.0  # every sequence is new

    def size(self, batch: Batch) -> float:
        return batch.tokens.numel()

    def measure(self, model: nn.Module, data: Questions, process: Process) -> dict[str, float]:
        """Accuracy over all sizes, and for each size."""
        shares = self._accuracies(model, data)
        each = {f"accuracy_{size}": share for size, share in zip(self.recipe.sizes, shares, strict=True)}
        return {"accuracy": sum(shares) / len(shares), **each}

    def _accuracies(self, model: nn.Module, data: Questions) -> list[float]:
        recipe = self.recipe
        return [measuring.accuracy(model, question, seed=recipe.seed, answers=recipe.answers)
                for question in data.questions]  # fmt: skip

    def done_early(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        enough = self.recipe.enough
        sizes = [f"accuracy_{size}" for size in self.recipe.sizes]
        return enough is not None and len(rows) > 1 and all(row[size] >= enough for row in rows[-2:] for size in sizes)

    def draw(self, model: nn.Module, data: Questions, folder: Path) -> list[Path]:
        recipe = self.recipe
        return [measuring.draw(folder / "recall.png", recipe.question, recipe.sizes, self._accuracies(model, data))]

    def describe(self, data: Questions) -> str:
        recipe = self.recipe
        what = "pairs to recall" if recipe.question == "recall" else "tokens to copy"
        return f"{recipe.mixer}, on {', '.join(map(str, recipe.sizes))} {what}, a vocabulary of {recipe.vocab}."
