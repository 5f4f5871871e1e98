"""What the rows of a task's results.json process per second of a processor: training steps and inference.

    python benchmarks/task_speeds.py fields benchmarks/results/tasks/fields/results.json [--rounds 7]

Models of the default recipe with fresh weights and the mixers of the file's rows, on batches of the default data. All
rows are timed in turn, on one thread, by the processor's time, which other work on the machine changes less than the
clock's; the median of the rounds counts. A training step is forward, backward and the optimizer. The file is changed
in place.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from saving import save

from polymix.tasks.recipe import TaskRecipe, recipe_of
from polymix.tasks.runner import Task, silent

FEW = {"fields": {"made_train": 24, "made_test": 4}, "handwriting": {"train_lines": 64, "test_lines": 8}}
NOTE = "Speeds: processor time of one thread (`python benchmarks/task_speeds.py {} …`)."


def calls(task: Task, recipe: TaskRecipe, data: Any) -> tuple[float, dict[str, Callable[[], Any]]]:
    """How many units a batch has, and a training step and an inference on it."""
    learner = task.learner.Learner(task.model.build(recipe, data), recipe, data)
    batch = data.collate([data.train[place] for place in range(recipe.batch_size)])
    optimizer = learner.optimizers_and_schedule()["optimizer"]

    def training() -> None:
        learner.model.train()
        optimizer.zero_grad()
        learner.loss(batch).backward()
        optimizer.step()

    def inference() -> None:
        learner.model.eval()
        with torch.inference_mode():
            learner.infer(batch)

    return learner.size(batch), {"training_per_second": training, "inference_per_second": inference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=FEW)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = json.loads(options.results.read_text("utf-8"))
    recipe = recipe_of(options.task, FEW[options.task], options.results)
    task = Task.of(recipe)
    times: dict[tuple[int, str], list[float]] = {}
    sizes, every = {}, {}
    with TemporaryDirectory() as folder:
        data = task.data.load(recipe, Path(folder), silent)
        for place, row in enumerate(content["rows"]):
            mixer, _, plan = row["mixer"].partition(" (")
            asked = replace(recipe.with_mixer(mixer), plan=plan.rstrip(")") or None)
            sizes[place], found = calls(task, asked, data)
            every.update({(place, name): call for name, call in found.items()})
        for call in every.values():
            call()
        for _ in range(options.rounds):
            for key, call in every.items():
                start = time.process_time()
                call()
                times.setdefault(key, []).append(time.process_time() - start)
    for (place, name), seconds in times.items():
        content["rows"][place][name] = round(sizes[place] / statistics.median(seconds), 2)
    for row in content["rows"]:
        print(f"{row['mixer']:<26}{row['training_per_second']:9.2f}{row['inference_per_second']:9.2f} {row['unit']}/s")
    save({**content, "speeds": NOTE.format(options.task)}, options.results)


if __name__ == "__main__":
    main()
