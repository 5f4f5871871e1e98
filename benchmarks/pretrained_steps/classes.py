"""Two of rxnfp's models that read reactions: one predicts classes, the other's states are fingerprints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import polymix
from pretrained_steps.masked import ATTENTION, built, drawn, imitated, plans, rxnfp
from pretrained_steps.minilm import agreement
from pretrained_steps.packages import RXNFP, fetched
from pretrained_steps.rows import Rows

MODELS = {"bert_ft_10k_25s": "ForSequenceClassification", "bert_ft": "Model"}  # by the name of the folder


@torch.no_grad()
def answers(model: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    """(texts, classes) logits, or (texts, channels) fingerprints of length 1: the states of the first sign."""
    outputs = [model(input_ids=ids) for ids in texts]
    logits = [getattr(output, "logits", None) for output in outputs]
    if logits[0] is not None:
        return torch.cat(logits)
    return normalize(torch.cat([output.last_hidden_state[:, 0] for output in outputs]), dim=-1)


def compared(ours: Tensor, theirs: Tensor, classes: bool) -> float:
    """How many texts are given the original's class; or the rank correlation of the fingerprints' similarities."""
    if classes:
        return float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return agreement(theirs, ours)["rank_correlation"]


def whole(batch: dict[str, Tensor]) -> Tensor:
    """A text with the tokens that stand where it was masked."""
    return torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])


def run(given: argparse.Namespace) -> None:
    """On texts that the masked model draws, since these two predict no tokens."""
    host, packages = rxnfp(given.folder)
    own = [whole(batch) for batch in drawn(host, "rxnfp", given)]
    texts = {"self": own, "real": [torch.tensor([ids]) for ids in host.ids()]}
    place = next(fetched(RXNFP, given.folder).rglob(next(iter(MODELS)))).parent
    counts = {name: sum(map(len, part)) for name, part in texts.items()}
    rows = Rows(given, packages, {"texts": counts, "batch": host.batch})
    chosen = given.plans.split(",") if given.plans else list(plans(host))
    for name, head in MODELS.items():
        teacher: Any = built(place, name, "Bert", head)
        theirs = {kind: answers(teacher, part) for kind, part in texts.items()}
        classes = head != "Model"
        if {"model": name, "plan": ATTENTION} not in rows:
            given_classes = {kind: len({*part.argmax(-1).tolist()}) for kind, part in theirs.items()}
            rows.add({"model": name, "plan": ATTENTION, **({"classes": given_classes} if classes else {})})
        for plan, layers in plans(host._replace(model=teacher)).items():
            for steps in given.steps if plan in chosen else ():
                key = {"model": name, "plan": plan, "steps": steps, "seed": given.seed}
                if key not in rows:
                    torch.manual_seed(given.seed)
                    report = polymix.convert(teacher, layers, input={"input_ids": own[0]}, copy=True)
                    row = imitated(report, drawn(host, "rxnfp", given, "self"), given, steps) if steps else {}
                    ours = {kind: answers(report.model.eval(), part) for kind, part in texts.items()}
                    rows.add({**key, **row, **{kind: compared(ours[kind], theirs[kind], classes) for kind in texts}})
