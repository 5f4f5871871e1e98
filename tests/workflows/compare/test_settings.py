"""What `polymix compare` trains on images, by the data."""

import pytest

from polymix.errors import OptionError
from polymix.train.run import check_recipe
from polymix.workflows.compare.settings import Settings, named_as_flags


def recipe(**options):
    return Settings(**options).check().recipe


def test_what_depends_on_the_data():
    recipes = [recipe(data=data) for data in (None, "digits", "photos")]
    assert [(s.image_size, s.patch_size, s.epochs) for s in recipes] == [(16, 4, 9), (8, 2, 30), (32, 4, 30)]
    assert [(s.dim, s.depth, s.heads, s.mlp_ratio) for s in recipes] == [(64, 3, 4, 2.0)] * 3
    assert recipe(epochs=3).epochs == 3 and Settings(data="digits").to_dict()["data"] == "digits"
    assert recipe(quick=True).epochs == 2 and recipe(quick=True, options=("steps=5",)).steps == 5
    assert recipe(data="digits", preset="tiny").default_data == "digits"
    with pytest.raises(OptionError, match=r"--image-size.*16.*[Dd]igits"), named_as_flags():
        check_recipe(recipe(image_size=32))


def test_options_that_do_not_fit_are_errors():
    with pytest.raises(OptionError, match="--image-size"):
        Settings(task="recall", image_size=8).check()
    with pytest.raises(OptionError, match="--epochs"):
        Settings(epochs=2, options=("steps=5",)).check()
    with pytest.raises(OptionError, match="--mixers"):
        Settings(options=("mixer=pom",)).check()
    assert Settings(task="recall").check().tokens == () and Settings(task="recall", tokens=(4,)).check().tokens == (4,)


@pytest.mark.parametrize("plan", ["blocks.0=pom", "pom"])
def test_a_plan_that_names_its_mixers_is_refused(plan):
    """Attention would have had pom in it, and been compared as attention."""
    with pytest.raises(OptionError, match=r"--set.*names its mixers.*--mixers"):
        Settings(options=(f"plan={plan}",)).check()


def test_a_plan_does_not_leave_the_control_its_attention():
    """With plan=1:1 half of its blocks were attention, and "a model without any token mixing" was level with it."""
    asked = Settings(options=("plan=1:1",), mixers="pom").check()
    recipes = {label: asked.recipe_of(label, seed=4) for label in asked.labels}
    assert {label: (its.mixer, its.plan, its.seed) for label, its in recipes.items()} == {
        "softmax": ("softmax", "1:1", 4), "pom": ("pom", "1:1", 4), "linear_floor": ("linear_floor", None, 4),
    }  # fmt: skip
