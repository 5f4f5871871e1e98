"""What a mixer's state can hold: associative recall by number of pairs, and copying by length.

    python benchmarks/recall.py benchmarks/results/recall.json [--plot docs/images/recall.png] [--only "softmax;pom"]
        [--tasks recall,copying] [--seeds 1] [--threads 2] [--quick]

Every model is small and has two layers: a convolution over three tokens, which joins the tokens of a pair, and the
mixer that must remember the pairs (hybrids add `local` attention or softmax). Or it has the same mixer twice, with or
without a short convolution. A model learns all sizes of a task at once. Run the same command again to continue an
interrupted run. `--quick` only checks that everything runs.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from saving import save

from polymix.domains.recall.metrics import state_size
from polymix.domains.recall.recipe import RecallRecipe
from polymix.domains.recall.task import RecallTask
from polymix.errors import DivergedError
from polymix.measure import manifest
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM, parameters
from polymix.train.in_memory import train_in_memory

SIZES = (4, 8, 16, 32, 64)  # pairs to recall, or tokens to copy
RATES = (3e-3, 1e-3)
SHIFT = "padre:degree=1:channel=identity:kernel_size=3"
PLACES = {"positions": "learned"}  # elsewhere the convolution knows order
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"mixers": [SHIFT, "softmax"]},
    "pom, k = 2": {"mixers": [SHIFT, "pom"]},
    "pom, k = 3": {"mixers": [SHIFT, "pom:degree=3"]},
    "pom, k = 2, expand 1": {"mixers": [SHIFT, "pom:expand=1"]},
    "pom, k = 2, expand 4": {"mixers": [SHIFT, "pom:expand=4"]},
    "pom, k = 2, then local, window 32": {"mixers": [SHIFT, "pom", "local:window=32"], "num_layers": 3},
    "pom, k = 2, then softmax": {"mixers": [SHIFT, "pom", "softmax"], "num_layers": 3},
    "local, window 32": {"mixers": [SHIFT, "local:window=32"]},
    "hydra": {"mixers": [SHIFT, "hydra"]},
    "nothing": {"mixers": [SHIFT, "local:window=1"]},  # after the convolution no token sees another
    "padre, degree 2": {"mixers": [SHIFT, "padre-2"]},
    "linear": {"mixers": [SHIFT, "linear"]},
    "qt": {"mixers": [SHIFT, "qt"]},
    "mamba": {"mixers": [SHIFT, "mamba"]},
    "pom in both layers": {"mixers": ["pom"], **PLACES},
    "pom in both layers, short_conv 4": {"mixers": ["pom"], "short_conv": 4, **PLACES},
    "softmax in both layers": {"mixers": ["softmax"], **PLACES},
}
COPYING = ("softmax", "pom, k = 2", "pom in both layers, short_conv 4", "linear")
TASKS = ("recall", "copying")
ENOUGH = 0.99  # reached at every size twice in a row, this accuracy ends a training
HOST: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "positions": "none",
    "max_position_embeddings": 256,
}  # fmt: skip


def run(name: str, label: str, recipe: RecallRecipe, seed: int) -> dict[str, Any]:
    recipe = recipe.changed(question=name, seed=seed)
    questions = recipe.to_questions()
    config = PolymixGPTConfig(**{**HOST, **MODELS[label]})
    ends: dict[str, Any] = {"accuracy": None, "steps": None, "seconds": None, "loss": None}
    try:
        fitted = train_in_memory(RecallTask(recipe), build=lambda: PolymixGPTForCausalLM(config))
    except DivergedError:
        states = [state_size(PolymixGPTForCausalLM(config), question) for question in questions]
    else:
        states = [state_size(fitted.model, question) for question in questions]
        accuracies = [fitted.latest[f"accuracy_{size}"] for size in recipe.sizes]
        ends = {"accuracy": accuracies, "steps": fitted.steps, "seconds": fitted.seconds, "loss": fitted.losses[-1]}
    return {"task": name, "model": label, "seed": seed, "learning_rate": recipe.learning_rate, **MODELS[label],
            "parameters": parameters(config), "sizes": recipe.sizes,
            "tokens": [question.length for question in questions], "state": states, **ends}  # fmt: skip


def mark_best(rows: list[dict[str, Any]]) -> None:
    """For each task and model the rows of one learning rate, with the highest mean accuracy over sizes and seeds."""
    found: dict[Any, dict[float, list[float]]] = {}
    for row in rows:
        rates = found.setdefault((row["task"], row["model"]), {})
        rates.setdefault(row["learning_rate"], []).append(sum(row["accuracy"] or ()))
    for row in rows:
        rates = found[row["task"], row["model"]]
        row["best"] = row["learning_rate"] == max(rates, key=lambda rate: fmean(rates[rate]))


def plot(content: dict[str, Any], path: Path) -> None:
    """Accuracy by number of pairs, and at a middle one by the numbers that the layers keep."""
    from matplotlib.figure import Figure

    rows = [row for row in content["rows"] if row["best"] and row["task"] == "recall" and row["accuracy"]]
    sizes = rows[0]["sizes"]
    middle = len(sizes) // 2
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, label in enumerate(MODELS):
        its = [row for row in rows if row["model"] == label]
        if not its:
            continue
        mean = torch.tensor([row["accuracy"] for row in its]).mean(0).tolist()
        colour = {"softmax": "black", "nothing": "tan"}.get(label, f"C{place % 10}")
        style = {"color": colour, "marker": "o" if place < 10 else "s", "markersize": 5}
        left.plot(sizes, mean, label=label, **style)
        right.plot([sum(its[0]["state"][middle])], [mean[middle]], linestyle="none", **style)
    left.plot(sizes, [1 / size for size in sizes], color="grey", linestyle=":", label="a guess among the values seen")
    left.set(xlabel="pairs", ylabel="accuracy", xscale="log", title="Recall by number of pairs", ylim=(-0.03, 1.03))
    left.set_xticks(sizes, [str(size) for size in sizes])
    right.set(
        xlabel="numbers kept, all layers", xscale="log", title=f"{sizes[middle]} pairs, by what is kept",
        ylim=(-0.03, 1.03),
    )  # fmt: skip
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    for axis in (left, right):
        axis.minorticks_off()
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", default="", help="parts of the labels of the models to run, separated by ;")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = RecallRecipe(sizes=SIZES, steps=800, enough=ENOUGH)
    if arguments.quick:
        recipe = RecallRecipe(sizes=SIZES[:2], steps=6, tokens=256, evaluate_every=3, enough=ENOUGH)
    names = ("steps", "tokens", "weight_decay", "warmup")
    options = {**{name: getattr(recipe, name) for name in names}, "every": recipe.evaluate_every}
    setting = {"host": HOST, "recipe": {**options, "learning_rate": list(RATES)}}
    content = json.loads(arguments.out.read_text()) if arguments.out.exists() else {**setting, "rows": []}
    if any(content[key] != value for key, value in setting.items()):
        parser.error(f"{arguments.out} is of another setting (--quick?): name another file")
    rows = content["rows"]
    asked = [(rate, seed, name, label) for rate in RATES for seed in range(arguments.seeds)
             for name in arguments.tasks.split(",") for label in (MODELS if name == "recall" else COPYING)
             if not arguments.only or any(part in label for part in arguments.only.split(";"))]  # fmt: skip
    there = {(row["learning_rate"], row["seed"], row["task"], row["model"]) for row in rows}
    for rate, seed, name, label in asked:
        if (rate, seed, name, label) in there:
            continue
        row = run(name, label, recipe.changed(learning_rate=rate), seed)
        rows.append(row)
        mark_best(rows)
        accuracies = "diverged" if row["accuracy"] is None else " ".join(f"{part:.1%}" for part in row["accuracy"])
        print(f"{name:8}{label:35}{rate:<7g}{accuracies}  state {row['state'][-1]}  {row['steps']} steps, "
              f"{row['seconds'] or 0:.0f} s", flush=True)  # fmt: skip
        content = {"machine": manifest("cpu", arguments.threads), **setting, "rows": rows}
        save(content, arguments.out)
    if arguments.plot:
        plot(content, arguments.plot)


if __name__ == "__main__":
    main()
