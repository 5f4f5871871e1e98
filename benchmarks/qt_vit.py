"""QT-ViT against EfficientViT of the same sizes: latency, parameters, and accuracy on digit scenes; a Pareto picture.

    python benchmarks/qt_vit.py benchmarks/results/tasks/classify/qt-vit.json docs/images/qt-vit.png
    python benchmarks/qt_vit.py OUT.json OUT.png --epochs 0        # latency alone, a few minutes
    python benchmarks/qt_vit.py OUT.json OUT.png --rounds 0        # accuracy alone

Latency: one image of 224 × 224, float32, inference, all models in turn, the median. Accuracy: a model trained on
`polymix compare`'s scenes of four digits, enlarged to 64 × 64 pixels; the same schedule and seed for both. Both hosts
have many convolutions, which mix too: the figures show that both train, not which is better on ImageNet. An accuracy or
a latency that is not measured anew is kept from an earlier OUT.json. `--busy` says in the results that other work ran
on the machine.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch.nn.functional import interpolate

from polymix.measure import manifest
from polymix.measure.timing import once
from polymix.tasks.classify.scenes import load_scenes
from polymix.tasks.classify.training import Schedule, train
from polymix.timm import create

SIZES = ("b0", "b1", "b2", "b3", "l1", "l2")
MIXERS = {"keep": "EfficientViT", "qt": "QT-ViT"}
SIDE = 64  # of an enlarged scene, in pixels
# Top-1 on ImageNet of EfficientViT at 224 × 224, as its authors print it.
PRINTED = {("keep", "b1"): 0.794, ("keep", "b2"): 0.821, ("keep", "b3"): 0.835}


def host(mixer: str, size: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return create(mixer, f"efficientvit_{size}", **options)


def latencies(rows: list[dict[str, Any]], side: int, rounds: int) -> None:
    """Fill in the milliseconds of each row."""
    image = torch.randn(1, 3, side, side)
    models = [host(row["mixer"], row["size"]).eval() for row in rows]
    times: list[list[float]] = [[] for _ in rows]
    with torch.inference_mode():
        for model in models:
            model(image)
        for _ in range(rounds):
            for model, measured in zip(models, times, strict=True):
                measured.append(once(lambda model=model: model(image), "cpu"))
    for row, measured in zip(rows, times, strict=True):
        row["milliseconds"] = 1e3 * statistics.median(measured)


def accuracy(mixer: str, size: str, schedule: Schedule, images: int) -> float | None:
    """The share of test scenes that a trained model gets right; None if the training diverged."""
    data = load_scenes()
    train_set, test_set = (
        (interpolate(pixels[:count], size=SIDE, mode="bilinear"), labels[:count])
        for (pixels, labels), count in ((data.train, images), (data.test, images))
    )
    scenes = replace(data, train=train_set, test=test_set)
    build = lambda: host(mixer, size, num_classes=len(data.classes), in_chans=1, img_size=SIDE)  # noqa: E731
    return train(build, scenes, schedule, seed=0)[1].accuracy


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Latency and parameters of both families, and the accuracy where it was measured."""
    from matplotlib.figure import Figure

    from polymix.pages.plots import COLOURS

    trained = any(row["accuracy"] is not None for row in rows)
    figure = Figure(figsize=(9 if trained else 5, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 1 + trained, squeeze=False)[0]
    for (mixer, name), colour in zip(MIXERS.items(), COLOURS, strict=False):
        own = [row for row in rows if row["mixer"] == mixer]
        for axes, key in zip((left, *right), ("parameters", "accuracy"), strict=False):
            shown = [row for row in own if row.get("milliseconds") is not None and row.get(key) is not None]
            factor = 1e-6 if key == "parameters" else 100
            xs, ys = [row["milliseconds"] for row in shown], [factor * row[key] for row in shown]
            axes.plot(xs, ys, marker="o", color=colour, label=name, linestyle="-" if key == "parameters" else "none")
            for row, x, y in zip(shown, xs, ys, strict=True):
                axes.annotate(row["size"].upper(), (x, y), textcoords="offset points", fontsize=8, color=colour,
                              xytext=(6, 4) if mixer == "qt" else (-16, -10))  # fmt: skip
    left.set(xlabel="ms an image", ylabel="parameters, M", xscale="log", yscale="log")
    for axes in right:
        axes.set(xlabel="ms an image", ylabel="accuracy on digit scenes, %", xscale="log")
    left.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--sizes", default=",".join(SIZES), help="whose latency is measured")
    parser.add_argument("--trained", default="b0", help="sizes that are trained")
    parser.add_argument("--side", type=int, default=224, help="of the timed image, in pixels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=6000, help="training scenes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    content = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {"rows": []}
    before = {(row["mixer"], row["size"]): row for row in content["rows"]}
    rows = []
    for size in given.sizes.split(","):
        for mixer in MIXERS:
            with torch.device("meta"):
                parameters = sum(p.numel() for p in host(mixer, size).parameters())
            row = {"mixer": mixer, "size": size, "parameters": parameters, "imagenet": PRINTED.get((mixer, size))}
            rows.append({"milliseconds": None, "accuracy": None, **before.get((mixer, size), {}), **row})
    settings = content.get("settings", {})
    if given.rounds:
        latencies(rows, given.side, given.rounds)
        settings |= {"side": given.side, "rounds": given.rounds, "busy": given.busy}
    if given.epochs:
        schedule = Schedule(epochs=given.epochs)
        for row in rows:
            if row["size"] in given.trained.split(","):
                row["accuracy"] = accuracy(row["mixer"], row["size"], schedule, given.images)
                print(row["mixer"], row["size"], row["accuracy"], flush=True)
        settings |= {"scene": SIDE, "images": given.images, "schedule": schedule.to_dict()}
    save({"machine": manifest("cpu", given.threads), "settings": settings, "rows": rows}, given.out)
    draw(rows, given.picture)


if __name__ == "__main__":
    main()
