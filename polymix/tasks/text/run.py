"""A training on text from end to end: checks, tokens, model, training, and what is left in the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polymix.errors import ResultsError
from polymix.tasks.distill.order import number, seed_all
from polymix.tasks.text.learner import TextLearner
from polymix.tasks.text.metrics import Metrics
from polymix.tasks.text.model import build, model_config, save
from polymix.tasks.text.prepare import VOCAB, prepare
from polymix.tasks.text.processes import check_processes, first_of_all, processes, spread
from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.text.report import write_report
from polymix.tasks.trainer import PRECISION, ModelCheckpoint, Trainer, WholeFiles, isolate_rng, quiet, until_interrupted


def train_text(
    recipe: TextRecipe, out: str | Path, *, resume: bool = False, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train a language model and leave it in `out`, as transformers' Auto classes load it; its last numbers.

    Beside it: metrics.jsonl, report.md, checkpoint/last.ckpt, from which `resume` goes on to the same result, and
    data/, the tokens. Under torchrun, every process calls this.

    Raises:
        OptionError, DataError, ResultsError: before any compute; OptionError later where the loss is no longer finite,
            the last good checkpoint kept.
    """
    check_processes(recipe)
    model_config(recipe, recipe.vocab or VOCAB)  # what it refuses is told before any text is read
    out, (rank, world) = Path(out), processes()
    say = say if rank == 0 else lambda text: None
    last = out / "checkpoint" / "last.ckpt"
    if last.exists() and not resume:
        raise ResultsError("out", f"{out}, which has a checkpoint", "a folder without one", "Pass resume to go on.")
    settings = {**recipe.decisive(), "processes": world}
    found: dict[str, Any] = _read(last) if last.exists() else {"polymix": settings, "global_step": 0}
    _check(last, found["polymix"], settings)  # before the text that belongs to it may be overwritten
    prepared = first_of_all(lambda: prepare(recipe, out / "data", say))
    padding = None if prepared.tokenizer is None else prepared.tokenizer.pad_token_id
    config = model_config(recipe, prepared.vocab, prepared.end, padding)
    settings |= {f"model.{name}": value for name, value in config.to_diff_dict().items()} | {"text": prepared.mark()}
    settings, done = json.loads(json.dumps(settings, default=str)), int(found["global_step"])
    if done:
        _check(last, found["polymix"], settings)
    elif resume:
        say(f"No checkpoint in {out} to go on from: beginning anew")
    metrics = first_of_all(lambda: Metrics(out / "metrics.jsonl", done, say, writes=rank == 0))
    with isolate_rng():
        seed_all(number(recipe.seed, "weights"))
        learner = TextLearner(build(config), recipe, prepared, settings, metrics, say)
        say(f"{sum(p.numel() for p in learner.model.parameters()):,} parameters, {recipe.steps:,} steps from {done:,}")
        state = _fit(learner, last, done)
        if rank == 0:
            best = "model." if learner.average is None else "average."
            final = build(config)
            final.load_state_dict({k.removeprefix(best): v for k, v in state.items() if k.startswith(best)})
            save(final, prepared.tokenizer, out)
            write_report(out, recipe, final, prepared, metrics.rows())
            say(f"Model: {out}   Report: {out / 'report.md'}")
    return metrics.latest()


def _fit(learner: TextLearner, last: Path, done: int) -> dict[str, Any]:
    """Trained from its start or its last checkpoint; the state of the learner, whole, in the first process."""
    recipe = learner.recipe
    saving = ModelCheckpoint(
        last.parent, filename=last.stem, every_n_train_steps=recipe.checkpoint_every, enable_version_counter=False
    )
    with quiet():
        trainer = Trainer(
            **spread(recipe), max_steps=recipe.steps, precision=PRECISION[recipe.precision],
            accumulate_grad_batches=recipe.accumulate, logger=False, callbacks=[saving], plugins=[WholeFiles()],
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            num_sanity_val_steps=0, limit_val_batches=0,
        )  # fmt: skip
        until_interrupted(lambda: trainer.fit(learner, ckpt_path=last if done else None))
        if done < recipe.steps and recipe.steps % recipe.checkpoint_every:
            trainer.save_checkpoint(last)
        return trainer.strategy.lightning_module_state_dict()


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint, once it is known to be whole."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        dict(found["polymix"]), int(found["global_step"])
    except Exception as error:  # whatever torch.load says of a damaged file
        got = f"{path}, which cannot be read ({type(error).__name__}: {error})"
        raise ResultsError("resume", got, "a checkpoint of polymix train", "Delete it to begin anew.") from error
    return {name: found[name] for name in ("polymix", "global_step")}


def _check(path: Path, theirs: dict[str, Any], settings: dict[str, Any]) -> None:
    """ResultsError unless a checkpoint is of a run with the same settings."""
    for key, value in settings.items():
        if theirs.get(key) != value:
            cure = "Go on with what it began with, or another out."
            if key == "text":
                raise ResultsError("resume", f"{path}, of a run on other text", "the same data and column", cure)
            raise ResultsError("resume", f"{path}, of a run with {key}={theirs.get(key)}", f"{key}={value}", cure)
