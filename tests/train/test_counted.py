"""Losses that are means over pixels or objects: slices with different numbers of them teach what the whole batch does."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from polymix.train.counted import CountedTask, over
from polymix.train.data.sampling import Seeded
from polymix.train.in_memory import train_in_memory
from polymix.train.recipe import Recipe
from polymix.train.registry import OWN_RECIPES, named_recipe, task_class
from polymix.train.task import Data, Metric

COUNTED = [name for name in sorted(OWN_RECIPES) if issubclass(task_class(named_recipe(name)), CountedTask)]
# Lovász-softmax is no sum: each slice has its own. The windows of a text are no samples.
CASES = [
    *(name for name in COUNTED if name not in ("text", "segment3d")), "segment3d lovasz=0", "detect host=detr",
    "detect host=conditional_detr", "timeseries goal=anomalies",
]  # fmt: skip


def parts_of(data, recipe, borders):
    """The samples of a batch, in slices that end at the borders."""
    samples = [Seeded(data.train, 0)[place, place % len(data.train)] for place in range(recipe.batch_size)]
    return [data.collate(samples[low:high]) for low, high in zip((0, *borders), (*borders, None), strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_slices_is_the_loss_of_the_whole_batch(case, tmp_path):
    """Three samples in one slice, one in the other: by their own counts, those of the small slice would weigh more."""
    name, *words = case.split()
    recipe = named_recipe(name).preset("tiny").changed(batch_size=4, **dict(word.split("=") for word in words))
    task = task_class(recipe)(recipe)
    data = task.load(tmp_path)
    torch.manual_seed(0)
    model = task.build(data).eval()
    (whole,), parts = parts_of(data, recipe, ()), parts_of(data, recipe, (3,))
    with torch.no_grad():
        counts = [task.counts(model, part).float() for part in parts]
        assert not torch.equal(*counts), "slices that are alike would not tell"
        slices = torch.stack([over(task.sums(model, part), sum(counts) / 2) for part in parts])
        torch.testing.assert_close(slices.mean(), task.loss(model, whole), rtol=1e-5, atol=0)


class Halves(CountedTask[Recipe, Data]):
    """The mean square of x over the rows that count, of which some slices have none."""

    name, metrics = "halves", (Metric("error", "lower"),)

    def load(self, folder):
        data = Data()
        generator = torch.Generator().manual_seed(0)
        data.train = TensorDataset(torch.randn(8, 3, generator=generator), torch.arange(8) < 3)
        return data

    def build(self, data):
        return nn.Linear(3, 1)

    def counts(self, model, batch):
        return batch[1].sum()[None]

    def sums(self, model, batch):
        return (model(batch[0])[:, 0].square() * batch[1]).sum()[None]

    def measure(self, model, data, process):
        return {"error": 0.0}


@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_accumulated_slices_learn_what_one_batch_does(accumulate):
    """Losses and weights, with slices that have nothing to count: the engine hands each slice the step's counts."""
    runs = [train_in_memory(Halves(Recipe(batch_size=8, steps=3, learning_rate=0.1, accumulate=parts)))
            for parts in (1, accumulate)]  # fmt: skip
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    for one, other in zip(*(run.model.parameters() for run in runs), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_counted_nowhere_is_divided_by_nothing():
    assert over(torch.tensor([6.0, 0.0]), torch.tensor([3, 0])) == 2
