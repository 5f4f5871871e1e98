"""How much accuracy distillation recovers: a small vision transformer on the digits, converted and distilled.

    python benchmarks/recovery.py benchmarks/results/recovery.json [--mixers padre,qt,pom] [--seeds 1] [--threads 1]

For each mixer: the accuracy after conversion, after its layers have imitated attention, and after fine-tuning, next to
the same model trained from scratch for as many epochs. Run the same command again to continue an interrupted run.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch.utils.data import DataLoader, TensorDataset

import polymix
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.measure import manifest
from polymix.mixers.spec import parse_mixer
from polymix.models import VisionTransformer
from polymix.train.data.images import load_digits
from polymix.train.in_memory import train_in_memory

HOST = {"image_size": 16, "patch_size": 2, "dim": 48, "depth": 4, "classes": 10, "channels": 1}
TEACHER, IMITATE, TUNE = 30, 12, 12  # epochs
MIXERS = "padre,padre-3,qt,pom,poly_nl,poly_sa,linear,hydra"


def host(mixer: polymix.MixerConfig) -> VisionTransformer:
    return VisionTransformer(mixer, **HOST)


def train(mixer: polymix.MixerConfig, data: Any, epochs: int, seed: int) -> tuple[VisionTransformer, float]:
    """A model trained from scratch, and its accuracy."""
    task = ClassifyTask(ClassifyRecipe(image_size=HOST["image_size"], epochs=epochs, seed=seed))
    trained = train_in_memory(task, data, lambda: host(mixer))
    return trained.model, trained.details(task, data)["metrics"]["accuracy"]


def recover(label: str, model: VisionTransformer, data: Any, seed: int) -> dict[str, Any]:
    images, labels = data.normalise(data.train.images), data.train.labels
    loader = DataLoader(TensorDataset(images, labels), 64, shuffle=True)
    test = DataLoader(TensorDataset(data.normalise(data.test.images), data.test.labels), 256)
    torch.manual_seed(seed)
    report = polymix.convert(model, label, input=images[:64], copy=True)
    done = polymix.distill(
        report, loader, val=test, imitate_epochs=IMITATE, epochs=TUNE, imitate_lr=5e-3, learning_rate=3e-4, seed=seed
    )
    errors = [layer.error for layer in report.layers]
    _, scratch = train(parse_mixer(label)[1], data, IMITATE + TUNE, seed)
    return {"mixer": label, "seed": seed, "errors": errors, "imitation": done.imitation, **done.accuracy,
            "scratch": scratch}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixers", default=MIXERS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = load_digits(HOST["image_size"])
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for seed in range(options.seeds):
        teacher = None
        for label in options.mixers.split(","):
            if any((row["mixer"], row["seed"]) == (label, seed) for row in rows):
                continue
            if teacher is None:
                teacher, accuracy = train(polymix.SoftmaxConfig(heads=3), data, TEACHER, seed)
                print(f"softmax, seed {seed}: {accuracy:.2%}", flush=True)
            rows.append(recover(label, teacher, data, seed))
            row = rows[-1]
            stages = "before", "converted", "imitated", "distilled", "scratch"
            print(label, *(f"{stage} {row[stage]:.2%}" for stage in stages), flush=True)
            content = {"machine": manifest("cpu", options.threads), "host": HOST, "rows": rows,
                       "epochs": {"teacher": TEACHER, "imitate": IMITATE, "fine-tune": TUNE}}  # fmt: skip
            save(content, options.out)


if __name__ == "__main__":
    main()
