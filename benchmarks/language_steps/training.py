"""What a model learns in the study's budget, and what it is worth at longer contexts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from language_steps.models import BATCH, CONTEXT, RATE, SIZE, STEPS, VOCAB, WINDOWS, config
from polymix.convert.adapters.libraries import load_whole
from polymix.domains.text.data import load
from polymix.domains.text.metrics import HeldOut, evaluate
from polymix.domains.text.recipe import TextRecipe
from polymix.models.language import PolymixGPTForCausalLM
from polymix.train.run import train as train_run
from polymix.train.task import IGNORED, Process


def recipe_of(options: Mapping[str, Any], quick: bool, seed: int, context: int = CONTEXT) -> TextRecipe:
    """The training of `config(options, quick)` at a context, with BATCH · CONTEXT tokens a step."""
    chosen, steps = config(options, quick), 4 if quick else STEPS
    others = {name: value for name, value in options.items() if name != "mixers"}
    sizes = {name: getattr(chosen, name) for name in (*SIZE, "intermediate_size", "positions")}
    return TextRecipe(
        mixer=",".join(options["mixers"]), options={**others, **sizes, "max_position_embeddings": context},
        context=context, batch_size=BATCH * CONTEXT // context, steps=steps, vocab=VOCAB, seed=seed,
        learning_rate=RATE, prompts=(), control=False, evaluate_every=steps, checkpoint_every=steps,
    )  # fmt: skip


def train(
    options: Mapping[str, Any], quick: bool, seed: int, windows: bool = False, context: int = CONTEXT
) -> dict[str, Any]:
    """Its held-out loss; with `windows` that at each length of WINDOWS."""
    recipe = recipe_of(options, quick, seed, context)
    with tempfile.TemporaryDirectory() as folder:
        last = train_run(recipe, folder)
        if windows:
            return {f"loss_{context}": loss_at(Path(folder), recipe, context) for context in WINDOWS}
    return {"loss": last["val_loss"], "bits_per_byte": last["bits_per_byte"], "train_loss": last["loss"]}


def loss_at(folder: Path, recipe: TextRecipe, context: int) -> float:
    """On the second half of held-out windows of `context` tokens: as much text is behind each, wherever it stands."""
    asked = recipe.changed(context=context, batch_size=max(1, recipe.batch_size * CONTEXT // context))
    held = HeldOut.of(load(recipe, folder / "data"), asked)
    for batch in held.batches:
        batch["targets"] = batch["targets"].clone()  # a view of what the inputs are a view of
        batch["targets"][:, : context // 2] = IGNORED
    count = sum(int((batch["targets"] != IGNORED).sum()) for batch in held.batches)
    model, _ = load_whole(PolymixGPTForCausalLM, folder, "folder")
    return evaluate(model, replace(held, targets=count), Process())["val_loss"]
