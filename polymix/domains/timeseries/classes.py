"""Classes of series as a task: a transformer over patches or variables, whose tokens' mean a linear layer reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from polymix.domains.timeseries.hosts import Classifier
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import OptionError
from polymix.files import output_names
from polymix.numbers import percent
from polymix.train.data.problems import Problems
from polymix.train.data.series.archives import CLASS_FILES, Labelled, read_classes
from polymix.train.data.series.classes import ClassData, controls, prepared, share
from polymix.train.data.series.drawing import draw_classes
from polymix.train.data.series.files import read_file
from polymix.train.data.series.synthetic import write_marked
from polymix.train.data.splits import spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Metric, Process, Task

TEST_SHARE = 4  # of the default data, a quarter of the training series is the number of those of the test
DRAWN = 8


class ClassTask(Task[TimeseriesRecipe, ClassData]):
    """A model of values, observed (B, V, C) -> logits (B, classes)."""

    name = "timeseries"
    metrics = (Metric("accuracy", "higher", "%"), Metric("val_loss", "lower"))
    unit = "series"
    fresh = ("head",)
    predicts: ClassVar[bool] = True
    answers: ClassVar[bool] = True

    def check(self) -> None:
        recipe = self.recipe
        if recipe.keep == "best" and not recipe.validation_share:
            raise OptionError(
                "keep", "'best' with validation_share=0", "'last', without a part to choose by", "Pass it."
            )
        self._build(2, 2 * recipe.patch, 2)

    def problems(self, source: str) -> list[str]:
        problems = Problems()
        with problems.noting():
            parts = read_classes(source, problems)
            if not problems:
                self._prepared(source, parts)
        return problems.lines

    def load(self, folder: Path) -> ClassData:
        recipe, problems = self.recipe, Problems()
        if recipe.data is not None:
            parts = read_classes(recipe.data, problems)
            problems.settle(say=self.say)
            return self._prepared(recipe.data, parts)
        count = recipe.synthetic_series
        sizes = (count, max(4, count // TEST_SHARE))
        source = cached(folder, "marked", {"seed": recipe.seed, "sizes": list(sizes)},
                        lambda place: write_marked(place, recipe.seed, *sizes))  # fmt: skip
        return self._prepared("synthetic", read_classes(str(source), problems))

    def _prepared(self, source: str, parts: tuple[list[Labelled], list[Labelled]]) -> ClassData:
        recipe = self.recipe
        shares = (recipe.validation_share, recipe.test_share)
        return prepared(source, *parts, recipe.patch, shares)

    def build(self, data: ClassData) -> nn.Module:
        return self._build(len(data.centre), data.length, len(data.classes))

    def _build(self, variables: int, length: int, classes: int) -> Classifier:
        recipe = self.recipe
        mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None)
        return Classifier(recipe, list(mixers.values()), variables, length, classes)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        values, observed, labels = batch
        return cross_entropy(model(values, observed), labels)

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch[:2])

    def validation(self, data: ClassData) -> ClassData:
        return replace(data, test=data.validation)

    def _logits(self, model: nn.Module, samples: TensorDataset, process: Process) -> Tensor:
        parts = zip(*(part.split(4 * self.recipe.batch_size) for part in samples.tensors[:2]), strict=True)
        return torch.cat([model(*(part.to(process.device) for part in pair)).float().cpu() for pair in parts])

    def measure(self, model: nn.Module, data: ClassData, process: Process) -> dict[str, float]:
        """accuracy and cross-entropy, and of controls accuracy_majority, accuracy_nearest and accuracy_linear."""
        logits, labels = self._logits(model, data.test, process), data.test.tensors[2]
        result = {"accuracy": share(logits.argmax(1), labels), "val_loss": float(cross_entropy(logits, labels))}
        return {**result, **(controls(data) if len(data.train) else {})}

    def details(self, model: nn.Module, data: ClassData, process: Process) -> dict[str, Any]:
        answers = self._logits(model, data.test, process).argmax(1).tolist()
        return {"metrics": self.measure(model, data, process), "count": len(data.test), "unit": "series",
                "labels": data.test.tensors[2].tolist(), "predictions": answers}  # fmt: skip

    def draw(self, model: nn.Module, data: ClassData, folder: Path) -> list[Path]:
        places = spread(len(data.test), DRAWN)
        some = TensorDataset(*(part[places] for part in data.test.tensors))
        answers, panels = self._logits(model, some, Process()).argmax(1).tolist(), []
        for answer, values, observed, label in zip(answers, *some.tensors, strict=True):
            true = data.classes[int(label)]
            title = true if answer == int(label) else f"{true}, not {data.classes[answer]}"
            panels.append((title, answer == int(label), values.where(observed, torch.nan)))
        draw_classes(folder / "classes.png", panels)
        return [folder / "classes.png"]

    def describe(self, data: ClassData) -> str:
        shape = f"{len(data.centre)} × {data.length:,}"
        counts = f"{len(data.train):,} series for training, {len(data.test):,} for the test"
        return f"{self.recipe.mixer_name} tells {len(data.classes)} classes of {data.name}: {counts}, of up to {shape}."

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        what = f"patches of {recipe.patch} steps" if recipe.host == "patch" else "variables"
        return f"transformer over {what}, mean of tokens, {recipe.depth} blocks of {recipe.dim} channels"

    def usage(self, data: ClassData, folder: Path) -> list[str]:
        load_it = f"model = SavedRun.of({str(folder)!r}).load()  # values, observed (B, V, C) -> logits (B, classes)"
        return ["from polymix.train.saved import SavedRun", "", load_it]

    def from_summary(self, summary: Mapping[str, Any]) -> ClassData:
        return ClassData.of(summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> ClassData | None:
        """The test part or, with `whole`, all series, prepared as the training's; without data those of `load`."""
        if self.recipe.data is None:
            return None
        problems = Problems()
        train, test = read_classes(self.recipe.data, problems)
        problems.settle(say=self.say)
        rows = [*train, *test] if whole or not test else test
        data = ClassData.of(summary)
        return replace(data, test=data.samples([rows[place] for place in spread(len(rows), limit or len(rows))]))

    def predict(
        self, model: nn.Module, data: ClassData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        """For each file the class of each of its series with its probability, and a picture of some.

        A table is one series; a .ts file, or one of UCR's, has one in each row, whose own class is not looked at.
        """
        rows = []
        for file, name in zip(files, output_names(files), strict=True):
            if file.suffix.lower() in CLASS_FILES:
                problems = Problems()
                series = [values for part in read_classes(str(file), problems) for values, _ in part]
                problems.settle()
            else:
                series = [one.values for one in read_file(file)]
            samples = data.samples([(values, "") for values in series])
            best = self._logits(model, samples, process).softmax(1).max(1)
            answers = [{"label": data.classes[place], "probability": share}
                       for share, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)]  # fmt: skip
            path, seen = folder / f"{name}-classes.png", samples.tensors[0].where(samples.tensors[1], torch.nan)
            titles = [f"{one['label']}  {percent(one['probability'])}" for one in answers[:DRAWN]]
            draw_classes(path, [(title, True, values) for title, values in zip(titles, seen, strict=False)])
            rows.append({"file": str(file), "picture": path.name, **answers[0], "series": answers})
        return rows
