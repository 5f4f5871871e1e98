"""What a model learns in the study's budget, and what it is worth at longer contexts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from language_steps.models import BATCH, CONTEXT, LONGER, RATE, SIZE, STEPS, VOCAB, config
from polymix.models.language import PolymixGPTForCausalLM
from polymix.tasks.processes import Process
from polymix.tasks.text import TextRecipe, train_text
from polymix.tasks.text.data import load
from polymix.tasks.text.metrics import HeldOut, evaluate


def train(options: Mapping[str, Any], quick: bool, seed: int, longer: bool = False) -> dict[str, Any]:
    """Its held-out loss; with `longer` that at each context of LONGER."""
    chosen = config(options, quick)
    steps = 4 if quick else STEPS
    recipe = TextRecipe(
        options={
            **options, **{name: getattr(chosen, name) for name in SIZE}, "max_position_embeddings": CONTEXT,
            "intermediate_size": chosen.intermediate_size,
        },
        context=CONTEXT, batch_size=BATCH, steps=steps, vocab=VOCAB, seed=seed, learning_rate=RATE, prompts=(),
        evaluate_every=steps, checkpoint_every=steps,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        last = train_text(recipe, folder)
        if longer:
            return {f"loss_{context}": loss_at(Path(folder), recipe, context) for context in LONGER}
    return {"loss": last["val_loss"], "bits_per_byte": last["bits_per_byte"], "train_loss": last["loss"]}


def loss_at(folder: Path, recipe: TextRecipe, context: int) -> float:
    """On the second half of held-out windows of `context` tokens: as much text is behind each, wherever it stands."""
    asked = replace(recipe, context=context, batch_size=max(1, recipe.batch_size * CONTEXT // context))
    held = HeldOut.of(load(recipe, folder / "data"), asked)
    for batch in held.batches:
        batch["targets"] = batch["targets"].clone()  # a view of what the inputs are a view of
        batch["targets"][:, : context // 2] = -100
    count = sum(int((batch["targets"] != -100).sum()) for batch in held.batches)
    model = PolymixGPTForCausalLM.from_pretrained(folder)
    return evaluate(model, replace(held, targets=count), Process())["val_loss"]
