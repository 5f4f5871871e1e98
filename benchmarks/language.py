"""A small version of the PolyMorpher study: language models that differ only in their mixers, on Python's own prose.

    python benchmarks/language.py benchmarks/results/language.json [--plot docs/images/language.png]
        [--only train|time|decode|length|contexts|speed] [--models "pom;softmax"] [--seeds 3] [--threads 2] [--quick]

Every model has as many parameters as the one with attention (the feed-forward compensates for the mixer) and the same
text, steps and learning rate, which were not tuned for any of them. Kinds of rows: `train`, the held-out loss; `time`,
speed and memory in training, and the time of a token after 1,000 and 100,000 others; `decode`, the same for three
models up to a million; `length`, the loss at shorter and longer contexts than in training, for models without learned
positions; `contexts`, the losses of `pom` of several degrees that were trained at a shorter and at a longer context.
`--only speed`, never run otherwise, measures the papers' models (language_steps/speed.py); its rows and their machine
are under "speed" in the file. A model and batch take less than a minute; no other starts
after --seconds.
Run the same command again to continue an interrupted run.
"""

# ruff: noqa: E402  the import path is set first

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the package need not be installed

import torch
from language_steps import speed
from language_steps.models import (
    BATCH,
    BEFORE,
    CONTEXT,
    DECODED,
    DEGREES,
    LENGTHS,
    MODELS,
    OTHERS,
    SIZE,
    STEPS,
    VOCAB,
    config,
)
from language_steps.picture import plot
from language_steps.timing import measure
from language_steps.training import train
from saving import save

from polymix.measure import Stopwatch, manifest
from polymix.models.language import parameters

KINDS = ("train", "time", "decode", "length", "contexts")
LOSSES = ("train", "length", "contexts")


def labels(kind: str) -> list[str]:
    return list({"decode": DECODED, "length": LENGTHS, "contexts": DEGREES}.get(kind, MODELS))


def find(kind: str, label: str, seed: int, threads: int, quick: bool) -> dict[str, Any]:
    options = MODELS[label]
    if kind == "contexts":
        found = {f"loss_{context}": train(options, quick, seed, context=context)["loss"] for context in OTHERS}
    elif kind in LOSSES:
        found = train(options, quick, seed, windows=kind == "length")
    else:
        before = BEFORE if kind == "decode" else (BEFORE[0], BEFORE[2])
        found = measure(label, threads, quick, kind == "time", (1000, 4000) if quick else before)
    return {"parameters": parameters(config(options, quick)), **found}


def measure_speed(content: dict[str, Any], given: argparse.Namespace) -> None:
    """Add the missing rows of "speed"; save after each. Rows of another machine are replaced."""
    watch, machine = Stopwatch(), manifest("cpu", given.threads)
    if content.get("speed", {}).get("machine") != machine:
        content["speed"] = {"machine": machine, "rows": []}
    rows = content["speed"]["rows"]
    for model, dtype, batch, contexts in speed.jobs(given.quick):
        what = {"model": model, "dtype": dtype, "batch": batch or 1, "kind": "decode" if batch else "training"}
        done = {row["context"] for row in rows if what.items() <= row.items()}
        contexts = tuple(n for n in contexts if n not in done)
        if not contexts or (given.models is not None and model not in given.models.split(";")):
            continue
        if watch.seconds() > given.seconds:
            return
        for row in speed.measure(model, dtype, batch, contexts, given.threads, given.quick):
            rows.append({**what, **row})
            print(rows[-1], flush=True)
        rows.sort(key=lambda row: (row["kind"], row["batch"], row["dtype"] != "float32",
                                   speed.MODELS.index(row["model"]), row["context"]))  # fmt: skip
        save(content, given.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", help="separated by ;")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=(*KINDS, "speed"))
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the losses (times have one)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="of --only speed: no cell starts after them")
    parser.add_argument("--quick", action="store_true", help="tiny models and 4 steps, to check the script")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = {"size": SIZE, "context": CONTEXT, "batch": BATCH, "steps": STEPS, "vocab": VOCAB, "quick": options.quick}
    content = json.loads(options.out.read_text()) if options.out.exists() else {**setting, "rows": []}
    if any(content[key] != value for key, value in setting.items()):
        parser.error(f"{options.out} has other settings (--quick?): choose another file")
    if options.only == "speed":
        measure_speed(content, options)
        return
    rows = content["rows"]
    asked = [(kind, label, seed) for seed in range(options.seeds) for kind in KINDS if options.only in (None, kind)
             for label in labels(kind) if options.models is None or label in options.models.split(";")
             if not seed or kind in LOSSES]  # fmt: skip
    for kind, label, seed in asked:
        if any((row["kind"], row["model"], row["seed"]) == (kind, label, seed) for row in rows):
            continue
        found = find(kind, label, seed, options.threads, options.quick)
        rows.append({"model": label, "kind": kind, "seed": seed, **found})
        print(rows[-1], flush=True)
        content = {"machine": manifest("cpu", options.threads), **content}  # of a file begun elsewhere its own
        save(content, options.out)
    if options.plot:
        plot(content, options.plot)


if __name__ == "__main__":
    main()
