"""benchmarks/language.py: what its rows say is what is trained."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from language_steps import models, training

    return models, training


def test_every_model_is_trained_with_the_config_that_its_row_counts(steps):
    """Rows were trained without positions, and counted and compared as if they had learned ones."""
    from polymix.domains.text.model import model_config

    models, training = steps
    for label, options in models.MODELS.items():
        wanted = models.config(options, quick=False)
        for context in (models.CONTEXT, *models.OTHERS):
            recipe = training.recipe_of(options, False, 0, context)
            assert not recipe.wants_control, "the study has its own, one for all models"
            built = model_config(recipe, models.VOCAB)
            assert built.max_position_embeddings == context
            names = (*models.SIZE, "intermediate_size", "positions", "mixers", "short_conv", "vocab_size")
            assert {name: getattr(built, name) for name in names} == {name: getattr(wanted, name) for name in names}, (
                label
            )


def test_the_losses_that_the_page_names_are_means_of_the_file():
    """Outside of its tables the page names losses by hand; new seeds change them."""
    page = (ROOT / "docs/research/language.md").read_text("utf-8")
    named = set(
        re.findall(r"(?<![\w.,-])[345]\.\d\d(?!\w)", re.sub(r"^\|.*$|\]\([^)]*\)", "", page, flags=re.MULTILINE))
    )
    rows, losses = json.loads((ROOT / "benchmarks/results/language.json").read_text("utf-8"))["rows"], {}
    for row in rows:
        if row["kind"] == "train":
            losses.setdefault(row["model"], []).append(row["loss"])
    assert named and named <= {f"{fmean(found):.2f}" for found in losses.values()}
