"""What a vision transformer loses on Fashion-MNIST by a conversion, and what distillation wins back.

    apt-get install dataset-fashion-mnist
    python benchmarks/fashion.py benchmarks/results/pretrained/fashion-mnist.json [--plans …] [--steps …] [--device …]

The teacher has DeiT-Tiny's 12 layers and 3 heads, on patches of 7 × 7 pixels; --dim 192 is DeiT-Tiny's width. It is
trained once, by the recipe below, into --folder. With --image-size 224 --patch 16, DeiT-Tiny's own geometry, or
--patch 32, pictures are enlarged inside the model, which starts from that teacher's weights, resized, and is tuned for
--tune passes. Then each plan is converted and distilled by `polymix.distill` with its defaults: half of the steps are
imitation, half fine-tuning, each step on 64 training pictures. Measured on all 10,000 test pictures: the accuracy, and
the share on which the answer is the teacher's. Each row is saved when it is there, and the first teacher's training has
checkpoints; run the command again to continue. Once the teacher is there (--plans none), --part 0/4 to --part 3/4 side
by side share a GPU and write the same file. Seconds are the processor's on a CPU, and those that pass on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from saving import locked, part_of, read, save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import interpolate

import polymix
from polymix.convert.weights import resample_positions
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.errors import ResultsError, one_line
from polymix.measure import Stopwatch, manifest
from polymix.models import VisionTransformer
from polymix.train.data.idx import FASHION
from polymix.train.data.images import ImageData, load_own
from polymix.train.in_memory import train_in_memory
from polymix.train.initial import WEIGHTS
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


TUNING = RECIPE.changed(epochs=0.25, learning_rate=3e-4)  # of a teacher for enlarged pictures


def stopwatch(device: str) -> Stopwatch:
    """Beside other work on a CPU the processor's time alone says something."""
    return Stopwatch("processor") if device == "cpu" else Stopwatch(device=device)


def taught(recipe: ClassifyRecipe, folder: Path, half: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """The teacher, trained if it is not there, and what is known of its training. half: its file is of float16."""
    run = folder / f"fashion-{recipe.dim}-{recipe.epochs:g}"
    note = folder / f"{run.name}.json"
    try:
        saved = SavedRun.of(run)
    except ResultsError:
        watch = stopwatch(recipe.device)
        train(recipe, run, resume=True, say=lambda line: print(line, flush=True))
        save({"seconds": round(watch.seconds())}, note)  # of the last part, if it was interrupted
        if half:
            weights = torch.load(run / WEIGHTS, weights_only=True)
            torch.save({name: weight.half() for name, weight in weights.items()}, run / WEIGHTS)
        saved = SavedRun.of(run)
    model = saved.load().eval()
    known = json.loads(note.read_text()) if note.exists() else {}
    size = sum(p.numel() for p in model.parameters())
    options = recipe.model_dump(exclude_defaults=True, exclude={"device"})
    return model, {**known, "parameters": size, "recipe": {**options, "data": FASHION}}


def resized(teacher: VisionTransformer, size: int, patch: int) -> nn.Sequential:
    """The teacher for pictures of another size and patches of another one, which enlarges its inputs itself."""
    model = VisionTransformer(**{**teacher.options, "image_size": size, "patch_size": patch})
    state = teacher.state_dict()
    kernel = state["embed.weight"]
    share = (kernel.shape[-1] / patch) ** 2
    state["embed.weight"] = (
        interpolate(kernel, size=(patch, patch), mode="bicubic", antialias=True) * share
    )  # of as many pixels
    positions = resample_positions("position", state["position"], tuple(model.position.shape))
    model.load_state_dict({**state, "position": positions})
    return nn.Sequential(nn.Upsample(size=(size, size), mode="bilinear"), model)


def tuned(
    teacher: VisionTransformer, data: ImageData, recipe: ClassifyRecipe, size: int, patch: int, folder: Path
) -> tuple[nn.Module, dict[str, Any]]:
    """The teacher, resized and trained on: from a file in the folder, or once into it. And what is known of that."""
    model = resized(teacher, size, patch)
    file = folder / f"fashion-{teacher.options['dim']}-{size}-{patch}-{recipe.epochs:g}.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
    else:
        watch = stopwatch(recipe.device)
        model = train_in_memory(ClassifyTask(recipe), data, lambda: model).model
        saved = {"state": model.state_dict(), "seconds": round(watch.seconds())}
        torch.save(saved, file)
    model.load_state_dict(saved["state"])
    return model.eval(), {"passes": recipe.epochs, "seconds": saved["seconds"]}


@torch.no_grad()
def answers(model: nn.Module, images: Tensor, device: str, size: int = 500) -> Tensor:
    """The class of each picture, in the precision of the training."""
    model.to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        found = torch.cat([model(part.to(device)).argmax(-1).cpu() for part in images.split(size)])
    model.to("cpu")
    return found


def share(hits: Tensor) -> float:
    return int(hits.sum()) / len(hits)


def recovered(
    teacher: nn.Module, plan: str, steps: int, images: Tensor, labels: Tensor, device: str
) -> tuple[nn.Module, dict[str, Any]]:
    """A converted copy after so many steps of distillation, and what is known of them."""
    torch.manual_seed(0)
    report = polymix.convert(teacher, **PLANS[plan], input=images[:8], copy=True)
    row: dict[str, Any] = {"plan": plan, "steps": steps, "seconds": 0.0}
    if steps:
        each = steps // 2
        batches = [*zip(images[: each * BATCH].split(BATCH), labels[: each * BATCH].split(BATCH), strict=True)]
        watch = stopwatch(device)
        done = polymix.distill(report, batches, precision="bfloat16", device=device)
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
    rate = "of its training, whose rate grows with the root; default: %(default)s"
    parser.add_argument("--batch", type=int, default=RECIPE.batch_size, help=rate)
    parser.add_argument("--image-size", type=int, default=RECIPE.image_size, help="enlarge to; default: %(default)s")
    parser.add_argument("--patch", type=int, default=RECIPE.patch_size, help="side, in pixels; default: %(default)s")
    passes = f"passes of the teacher's tuning at another size or patch; default: {TUNING.epochs:g}"
    parser.add_argument("--tune", type=float, help=passes)
    known = f"of {', '.join(PLANS)}; all; none: only the teacher; default: %(default)s"
    parser.add_argument("--plans", default=",".join(MIXERS), help=known)
    parser.add_argument("--steps", default=str(BUDGET), help="of distillation; a row for each, and one as converted")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default=FASHION, help="folder of Fashion-MNIST's idx files; default: %(default)s")
    parser.add_argument("--half", action="store_true", help="keep the weights of a teacher that is trained as float16")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th plan from the I-th on, beside other processes")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    size, patch = options.image_size, options.patch
    other = (size, patch) != (RECIPE.image_size, RECIPE.patch_size)
    if size < RECIPE.image_size or not 1 <= patch <= size or size % patch:
        need = f"a size of at least {RECIPE.image_size} that is a multiple of the patch"
        parser.error(f"--image-size {size} --patch {patch}: expected {need}")
    if options.tune is not None and not other:
        parser.error(
            "--tune is for another --image-size or --patch than the first teacher's: pass one, or leave it out"
        )
    if options.tune is not None and not options.tune > 0:
        parser.error(f"--tune {options.tune:g}: expected more than 0 passes")
    torch.set_num_threads(options.threads)
    recipe = RECIPE.changed(
        dim=options.dim, epochs=options.epochs, data=options.data, device=options.device, batch_size=options.batch,
        learning_rate=RECIPE.learning_rate * (options.batch / RECIPE.batch_size) ** 0.5,
    )  # fmt: skip
    plans = {"all": list(PLANS), "none": []}.get(options.plans, options.plans.split(","))
    counts = (0, *map(int, options.steps.split(",")))
    asked = [(plan, steps) for plan in part_of(plans, options.part) for steps in counts]
    # On a CPU, for 16 tokens, its backward pass takes a fraction of the fused one's time.
    with sdpa_kernel(SDPBackend.MATH) if options.device == "cpu" else nullcontext():
        teacher, about = taught(recipe, options.folder, options.half)
        data = load_own(options.data, RECIPE.image_size)
        if other:
            tuning = TUNING.changed(
                data=options.data, device=options.device, **({"epochs": options.tune} if options.tune else {})
            )
            teacher, about["tuning"] = tuned(teacher, data, tuning, size, patch, options.folder)
            about["recipe"] |= {"image_size": size, "patch_size": patch}
        train_images, train_labels = pictures(data)
        tests, labels = data.normalise(data.test.images), data.test.labels
        original = answers(teacher, tests, options.device)
        about["accuracy"] = share(original == labels)
        print(about, flush=True)
        content = {"machine": manifest(options.device, options.threads), "teacher": about, "test": len(labels),
                   "batch": BATCH, "rows": []}  # fmt: skip
        there = read(options.out, content)
        if there["rows"] and there["teacher"]["recipe"] != about["recipe"]:
            parser.error(f"{options.out} has the rows of another teacher: {there['teacher']['recipe']}")
        failed = ""
        done = {(row["plan"], row["steps"]) for row in there["rows"]}
        for plan, steps in (case for case in asked if case not in done):
            try:
                model, row = recovered(teacher, plan, steps, train_images, train_labels, options.device)
                chosen = answers(model, tests, options.device)
            except Exception as error:  # of a kernel, say: the other rows can still be had
                failed = f"{plan}, {steps} steps: {one_line(error)}"
                print(failed, flush=True)
                continue
            row["accuracy"] = share(chosen == labels)
            row["same_answer"] = share(chosen == original)
            print(row, flush=True)
            with locked(options.out):
                save({**content, "rows": [*read(options.out, content)["rows"], row]}, options.out)
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    main()
