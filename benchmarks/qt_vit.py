"""QT-ViT against EfficientViT of the same sizes: latency, parameters, and accuracy on digit scenes; a Pareto picture.

    python benchmarks/qt_vit.py benchmarks/results/tasks/classify/qt-vit.json docs/images/qt-vit.png
    python benchmarks/qt_vit.py OUT.json OUT.png --epochs 0        # latency alone, a few minutes
    python benchmarks/qt_vit.py OUT.json OUT.png --rounds 0 --trained b0,b1

Latency: one image of 224 × 224, float32, inference, all models in turn, the median. Accuracy: models trained by
`polymix train classify --preset efficientvit`, the recipe of EfficientViT, with the changes in CHANGED, on the scenes
of four digits of `polymix compare`, enlarged to 32 × 32 pixels and written as CIFAR-100's binary files. Stage 3 has
2×2 tokens, one for each digit. Crops, mirror images and RandAugment are off, because a scene's label depends on its
places. Both hosts have many convolutions, which mix too: the figures show that both train, not which is better on
ImageNet. OUT.json is written after each model, and what is not measured anew is kept from it. `--busy`, for a machine
on which other work runs, counts the time of the processor instead.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from saving import save
from torch.nn.functional import interpolate

from polymix.domains.classify import cifar
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.scenes import scenes
from polymix.errors import OptionError
from polymix.measure import Stopwatch, check_clock, in_turn, manifest
from polymix.measure.clock import Clock
from polymix.timm import create
from polymix.train.registry import options_of
from polymix.train.run import train

SIZES = ("b0", "b1", "b2", "b3", "l1", "l2")
MIXERS = {"keep": "EfficientViT", "qt": "QT-ViT"}
# What differs from the published recipe: ImageNet, batches of 1,024 and 320 epochs.
CHANGED = (
    f"image_size={cifar.SIDE}", "sizes=none", "augment=False", "auto_augment=none", "crop=1.0",
    "interpolation=bilinear", "batch_size=32", "warmup=0.1", "norm_images=1000",
    "control=False", "log_every=50", "evaluate_every=none", "checkpoint_every=100000",
    "clip_by=norm", "drop_path_rises=False",
)  # fmt: skip
# B3 diverges at the rate of the others: after 750 steps at 6e-3 EfficientViT was at 79.6 %, QT-ViT at 16.0 %.
RATE, RATES = "6e-3", {"b3": "3e-3"}


def host(mixer: str, size: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return create(mixer, f"efficientvit_{size}", **options)


def latencies(rows: list[dict[str, Any]], side: int, rounds: int, clock: Clock) -> None:
    """Fill in the milliseconds of each row by a clock: that of the processor is changed less by other work."""
    image = torch.randn(1, 3, side, side)
    calls = {place: partial(host(row["mixer"], row["size"]).eval(), image) for place, row in enumerate(rows)}
    with torch.inference_mode():
        times = in_turn(calls, rounds, warm_up=1, clock=clock)
    for place, row in enumerate(rows):
        row |= {"milliseconds": times[place].milliseconds().median, "clock": clock}


def write_scenes(folder: Path, images: int) -> Path:
    """`images` training scenes of `polymix compare` and all test scenes, in the layout of cifar-100-binary."""
    parts = dict(zip(("train", "test"), scenes(), strict=True))
    for name, (pixels, labels) in parts.items():
        large = interpolate(pixels, size=cifar.SIDE, mode="bilinear") * (255 / parts["train"][0].max())
        bytes_of = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).flatten(1)
        fine = labels[:, None].to(torch.uint8)
        rows = torch.cat((torch.zeros_like(fine), fine, bytes_of), 1)[: images if name == "train" else None]
        (folder / f"{name}.bin").write_bytes(rows.numpy().tobytes())
    return folder


def accuracy(mixer: str, size: str, options: list[str], data: Path) -> dict[str, Any]:
    """The share of test scenes that a model gets right after a training by the recipe, and how long that took."""
    rate = RATES.get(size, RATE)
    words = [*options, f"learning_rate={rate}", f"host=efficientvit_{size}", f"mixer={mixer}"]
    recipe = ClassifyRecipe().preset("efficientvit").changed(**options_of(words, {"data": str(data)}))
    with TemporaryDirectory() as folder:
        watch = Stopwatch()
        train(recipe, Path(folder) / "run")
        (row,) = json.loads((Path(folder) / "run" / "results.json").read_text("utf-8"))["rows"]
    seconds = round(watch.seconds())
    return {"accuracy": row["metrics"]["accuracy"], "steps": row["steps"], "seconds": seconds}


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (x, y) than which no other one is as far to the left and as high, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Latency and parameters of both families, and the accuracy where it was measured, with its Pareto front."""
    from matplotlib.figure import Figure

    from polymix.pages.plots import COLOURS

    timed = [row for row in rows if row.get("milliseconds") is not None]
    trained = [row for row in timed if row.get("accuracy") is not None]
    figure = Figure(figsize=(9 if trained else 5, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 1 + bool(trained), squeeze=False, sharex=True)[0]
    for (mixer, name), colour in zip(MIXERS.items(), COLOURS, strict=False):
        for axes, key, factor, shown in (
            (left, "parameters", 1e-6, timed),
            *((a, "accuracy", 100, trained) for a in right),
        ):
            own = [
                (row["size"].upper(), row["milliseconds"], factor * row[key]) for row in shown if row["mixer"] == mixer
            ]
            axes.plot(*zip(*((x, y) for _, x, y in own), strict=True), marker="o", color=colour, label=name,
                      linestyle="-" if key == "parameters" else "none")  # fmt: skip
            for size, x, y in own:
                axes.annotate(size, (x, y), textcoords="offset points", fontsize=8, color=colour,
                              xytext=(7, -9) if mixer == "qt" else (-18, 4))  # fmt: skip
    left.set(xlabel="ms an image of 224 × 224", ylabel="parameters, M", xscale="log", yscale="log")
    left.set_xticks(_ticks([row["milliseconds"] for row in timed]))
    left.set_yticks(_ticks([row["parameters"] / 1e6 for row in timed]))
    for axis in (left.xaxis, left.yaxis, *(axes.xaxis for axes in right)):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    for axes in right:
        front = pareto([(row["milliseconds"], 100 * row["accuracy"]) for row in trained])
        axes.plot(*zip(*front, strict=True), color="grey", linewidth=1, zorder=0, label="Pareto front")
        axes.set(xlabel="ms an image of 224 × 224", ylabel="accuracy on digit scenes, %")
        axes.legend()
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _ticks(values: list[float]) -> list[float]:
    """1, 2, 5, 10, 20, … from below the least value to above the largest."""
    steps = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]
    low = max(step for step in steps if step <= min(values))
    return [step for step in steps if low <= step <= 2 * max(values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--sizes", default=",".join(SIZES), help="whose latency is measured")
    parser.add_argument("--trained", default="b0", help="sizes that are trained")
    parser.add_argument("--side", type=int, default=224, help="of the timed image, in pixels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=6000, help="training scenes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    clock: Clock = "processor" if options.busy else "wall"
    try:
        check_clock(clock, threads=options.threads, argument="--busy")
    except OptionError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    content = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {"rows": []}
    before = {(row["mixer"], row["size"]): row for row in content["rows"]}
    rows = []
    for size in options.sizes.split(","):
        for mixer in MIXERS:
            with torch.device("meta"):
                parameters = sum(p.numel() for p in host(mixer, size).parameters())
            row = {"mixer": mixer, "size": size, "parameters": parameters}
            rows.append({"milliseconds": None, "accuracy": None, **before.get((mixer, size), {}), **row})
    settings, machine = content.get("settings", {}), content.get("machine") or manifest("cpu", options.threads)
    if options.rounds:
        latencies(rows, options.side, options.rounds, clock)
        machine = manifest("cpu", options.threads)
        settings |= {"side": options.side, "rounds": options.rounds, "busy": options.busy}
    if options.epochs:
        settings |= {
            "images": options.images,
            "epochs": options.epochs,
            "changed": CHANGED,
            "rate": RATE,
            "rates": RATES,
        }
    save({"machine": machine, "settings": settings, "rows": rows}, options.out)
    with TemporaryDirectory() as folder:
        data = write_scenes(Path(folder), options.images) if options.epochs else Path(folder)
        for row in rows:
            if options.epochs and row["size"] in options.trained.split(","):
                row |= accuracy(row["mixer"], row["size"], [*CHANGED, f"epochs={options.epochs}"], data)
                print(row, flush=True)
                save({"machine": machine, "settings": settings, "rows": rows}, options.out)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
