"""What a vision transformer loses on Fashion-MNIST by a conversion, and what distillation wins back.

    apt-get install dataset-fashion-mnist
    python benchmarks/fashion.py benchmarks/results/pretrained/fashion-mnist.json [--plans …] [--steps …]

The teacher has DeiT-Tiny's 12 layers and 3 heads, on patches of 7 × 7 pixels; --dim 192 is DeiT-Tiny's width. It is
trained once, by the recipe below, into --folder. Then each plan is converted and distilled by `polymix.distill` with
its defaults: half of the steps are imitation, half fine-tuning, each step on 64 training pictures. Measured on all
10,000 test pictures: the accuracy, and the share on which the answer is the teacher's. Each row is saved when it is
there, and the teacher's training has checkpoints; run the command again to continue.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import polymix
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import ResultsError
from polymix.measure import Stopwatch, manifest
from polymix.train.data.idx import FASHION
from polymix.train.data.images import ImageData, load_own
from polymix.train.run import train
from polymix.train.saved import SavedRun

RECIPE = ClassifyRecipe(
    data=FASHION, mixer="softmax:heads=3", image_size=28, patch_size=7, dim=96, depth=12, batch_size=64, epochs=2.5,
    learning_rate=6e-4, warmup=0.1, precision="bfloat16", evaluate_every=None, checkpoint_every=250, log_every=50,
)  # fmt: skip
BATCH, BUDGET = 64, 100
MIXERS = ("qt", "pom", "padre", "poly_nl", "poly_sa", "linear", "linear_floor")
HYBRIDS = {"1:3": "3 of 12", "1:1": "6 of 12", "3:1": "9 of 12"}  # with the mixer in so many layers
PLANS: dict[str, dict[str, str]] = {  # by the name of the row
    **{mixer: {"plan": mixer} for mixer in MIXERS},
    **{f"{mixer} in {layers}": {"plan": plan, "mixer": mixer}
       for plan, layers in HYBRIDS.items() for mixer in MIXERS[:-1]},
}  # fmt: skip


def taught(recipe: ClassifyRecipe, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The teacher, trained if it is not there, and what is known of its training."""
    run = folder / f"fashion-{recipe.dim}-{recipe.epochs:g}"
    note = folder / f"{run.name}.json"
    try:
        saved = SavedRun.of(run)
    except ResultsError:
        watch = Stopwatch("processor")
        train(recipe, run, resume=True, say=lambda line: print(line, flush=True))
        save({"seconds": round(watch.seconds())}, note)  # of the last part, if it was interrupted
        saved = SavedRun.of(run)
    model = saved.load().eval()
    known = json.loads(note.read_text()) if note.exists() else {}
    size = sum(p.numel() for p in model.parameters())
    return model, {**known, "parameters": size, "recipe": recipe.model_dump(exclude_defaults=True)}


@torch.no_grad()
def answers(model: nn.Module, images: Tensor, size: int = 500) -> Tensor:
    """The class of each picture, in the precision of the training."""
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cat([model(part).argmax(-1) for part in images.split(size)])


def share(hits: Tensor) -> float:
    return int(hits.sum()) / len(hits)


def recovered(teacher: nn.Module, plan: str, steps: int, images: Tensor, labels: Tensor) -> tuple[nn.Module, Any]:
    """A converted copy after so many steps of distillation, and what is known of them."""
    torch.manual_seed(0)
    report = polymix.convert(teacher, **PLANS[plan], input=images[:8], copy=True)
    row: dict[str, Any] = {"plan": plan, "steps": steps, "seconds": 0.0}
    if steps:
        each = steps // 2
        batches = [*zip(images[: each * BATCH].split(BATCH), labels[: each * BATCH].split(BATCH), strict=True)]
        watch = Stopwatch("processor")
        done = polymix.distill(report, batches, precision="bfloat16")
        row |= {"seconds": round(watch.seconds(), 1), "kept": done.kept}
    return report.model.eval(), row


def pictures(data: ImageData) -> tuple[Tensor, Tensor]:
    """The training pictures as inputs in one random order, and their labels."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    return data.normalise(data.train.images[order]), data.train.labels[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache" / "polymix-evidence", help="of the teacher"
    )
    parser.add_argument("--dim", type=int, default=RECIPE.dim, help="of the teacher; default: %(default)s")
    parser.add_argument("--epochs", type=float, default=RECIPE.epochs, help="of its training; default: %(default)s")
    parser.add_argument("--plans", default=",".join(MIXERS), help=f"of {', '.join(PLANS)}; default: %(default)s")
    parser.add_argument("--steps", default=str(BUDGET), help="of distillation; a row for each, and one as converted")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    with sdpa_kernel(SDPBackend.MATH):  # for 16 tokens its backward pass takes a fraction of the fused one's time
        teacher, about = taught(RECIPE.changed(dim=options.dim, epochs=options.epochs), options.folder)
        data = load_own(FASHION, RECIPE.image_size)
        train_images, train_labels = pictures(data)
        tests, labels = data.normalise(data.test.images), data.test.labels
        original = answers(teacher, tests)
        about["accuracy"] = share(original == labels)
        print(about, flush=True)
        rows = content["rows"]
        if rows and content["teacher"]["recipe"] != about["recipe"]:
            parser.error(f"{options.out} has the rows of another teacher: {content['teacher']['recipe']}")
        done = {(row["plan"], row["steps"]) for row in rows}
        for plan in options.plans.split(","):
            for steps in (0, *map(int, options.steps.split(","))):
                if (plan, steps) in done:
                    continue
                model, row = recovered(teacher, plan, steps, train_images, train_labels)
                found = answers(model, tests)
                row["accuracy"] = share(found == labels)
                row["same_answer"] = share(found == original)
                rows.append(row)
                print(row, flush=True)
                content = {"machine": manifest("cpu", options.threads), "teacher": about, "test": len(labels),
                           "batch": BATCH, "rows": rows}  # fmt: skip
                save(content, options.out)


if __name__ == "__main__":
    main()
