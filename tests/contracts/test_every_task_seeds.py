"""One seed means the same in every domain: it decides the synthetic data, and returns them whatever came between."""

import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from polymix.train.data.sampling import seed_all
from polymix.train.registry import OWN_RECIPES, named_recipe, task_class

REAL = {"classify", "generation", "jigsaw"}  # digits and photographs of libraries, the same for every seed
WITHOUT = {"text", "recall"}  # no default data; sequences that each step draws by its seed, and nothing is kept of


def loaded(domain, seed, folder):
    domain, *choice = domain.split()
    recipe = named_recipe(domain)
    recipe = recipe.preset("tiny") if "tiny" in recipe.presets else recipe
    recipe = recipe.changed(seed=seed, **dict(word.split("=") for word in choice))
    task = task_class(recipe)(recipe)
    return task.load(folder)


def sample(data):
    seed_all(0)
    return [leaf for leaf in tree_leaves(data.train[0]) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    "domain", [*sorted(set(OWN_RECIPES) - WITHOUT), "timeseries goal=anomalies", "timeseries goal=classes"]
)
def test_seed_0_then_1_then_0_gives_the_data_of_0(domain, tmp_path):
    first = loaded(domain, 0, tmp_path)
    before = sample(first)
    second, again = (loaded(domain, seed, tmp_path) for seed in (1, 0))
    contents = [json.dumps(data.fingerprint()) for data in (first, second, again)]
    assert contents[0] == contents[2], "the data of another seed"
    assert all(torch.equal(a, b) for a, b in zip(before, sample(first), strict=True)), (
        "the files of a run were replaced"
    )
    if domain in REAL:
        assert contents[0] == contents[1]
    else:
        assert contents[0] != contents[1], "the seed does not reach the data"
