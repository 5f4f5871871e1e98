"""What the rows of a task's results.json process per second of a processor: training steps and inference.

    python benchmarks/task_speeds.py satellite benchmarks/results/tasks/satellite/results.json [--rounds 7]
        [--set goal=anomalies]

Models of the default recipe, but for `--set`, with fresh weights and the mixers of the file's rows, on batches of the
default data. All rows are timed in turn, on one thread, by the processor's time, which other work on the machine
changes less than the clock's; the median of the rounds counts. A training step is forward, backward and the optimizer.
The file is changed in place.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from saving import save

from polymix.measure import in_turn
from polymix.train.registry import named_recipe, options_of, task_class
from polymix.train.task import Task

FEW = {
    "satellite": {"synthetic_train": 24, "synthetic_test": 4},
    "handwriting": {"synthetic_train": 64, "synthetic_test": 8},
    "jigsaw": {},
    "faces": {"scenes": 16, "test_scenes": 2},
    "instances": {"scenes": 16, "test_scenes": 2},
    "detect": {"scenes": 64, "test_scenes": 8},
    "segment": {"scenes": 64, "test_scenes": 8},
    "segment3d": {"scans": 2, "test_scans": 1},
    "detect3d": {"scenes": 6, "test_scenes": 1},
    "video": {"synthetic_train": 64, "synthetic_test": 8},
    "speech": {"synthetic_train": 64, "synthetic_test": 8},
    "depth": {"synthetic_train": 64, "synthetic_test": 8},
    "timeseries": {"synthetic_series": 128},
    "generation": {},
}
BY_CHANCE = ("instances",)  # what its inference costs depends on what fresh weights find
NOTE = "Speeds: processor time of one thread (`python benchmarks/task_speeds.py {}`)."


def calls(task: Task[Any, Any], data: Any) -> tuple[float, dict[str, Callable[[], Any]]]:
    """How many units a batch has, and a training step and an inference on it."""
    model = task.build(data)
    batch = data.collate([data.train[place] for place in range(task.recipe.batch_size)])
    optimizer = task.optimizer(model)

    def training() -> None:
        model.train()
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()

    def inference() -> None:
        model.eval()
        with torch.inference_mode():
            task.infer(model, batch)

    timed = {"training_per_second": training}
    if task.name not in BY_CHANCE:
        timed["inference_per_second"] = inference
    return task.size(batch), timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=FEW)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="of the recipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = json.loads(options.results.read_text("utf-8"))
    recipe = named_recipe(options.task, {**FEW[options.task], **options_of(options.set, {})})
    every: dict[tuple[int, str], Callable[[], Any]] = {}
    sizes: dict[int, float] = {}
    with TemporaryDirectory() as folder:
        data = task_class(recipe)(recipe).load(Path(folder))
        for place, row in enumerate(content["rows"]):
            mixer, _, plan = row["mixer"].partition(" (")
            its = recipe.changed(mixer=mixer, plan=plan.rstrip(")") or None)
            sizes[place], timed = calls(task_class(its)(its), data)
            every.update({(place, name): call for name, call in timed.items()})
        times = in_turn(every, options.rounds, warm_up=1, clock="processor")
    for (place, name), timing in times.items():
        content["rows"][place] |= {name: round(sizes[place] / timing.median, 2), "clock": timing.clock}
    for row in content["rows"]:
        print(f"{row['mixer']:<40}", row["training_per_second"], row["inference_per_second"], f"{row['unit']}/s")
    command = " ".join((options.task, "…", *(f"--set {pair}" for pair in options.set)))
    save({**content, "speeds": NOTE.format(command)}, options.results)


if __name__ == "__main__":
    main()
