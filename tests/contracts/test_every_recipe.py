"""What every domain's recipe promises: options that say what they are, presets that are whole, other data."""

import contextlib
import json
import math
import re
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from polymix.errors import IdleOptionError, OptionError
from polymix.train.option_effects import has_effect
from polymix.train.option_words import default_of, shape_of
from polymix.train.recipe import Recipe, table
from polymix.train.registry import OWN_RECIPES, domain_of, named_recipe, recipe_class, task_class
from polymix.train.run import check_recipe


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_a_domain_is_found_by_its_name_alone_and_in_a_file(domain, tmp_path):
    assert domain_of(named_recipe(domain)) == domain
    (tmp_path / "r.json").write_text(json.dumps({"task": domain}))
    assert type(named_recipe(tmp_path / "r.json")) is recipe_class(domain)


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_every_default_run_has_a_control_and_a_host_that_keeps_its_attention_none(domain):
    recipe = named_recipe(domain)
    assert recipe.wants_control and not recipe.for_control().wants_control
    assert not recipe.changed(mixer="linear_floor:bias=false").wants_control, "it would stand beside itself"
    if domain in ("classify", "segment"):
        host = {"classify": "deit_tiny_patch16_224", "segment": "segformer"}[domain]
        kept = recipe.changed(mixer="keep", host=host)
        assert not kept.wants_control and kept.changed(control=True).wants_control


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_other_data_leave_behind_what_fits_the_training_s_alone(domain):
    """A trained model is measured on other data: no option of the training's data stands in the way."""
    kind = recipe_class(domain)
    names = (*kind.sources, *kind.fits_source, *kind.reading, *kind.after_training, *kind.in_pictures)
    assert set(names) <= set(kind.model_fields) and len(set(names)) == len(names)
    if domain == "recall":
        return  # its data are synthetic
    defaults = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    for name in kind.sources[1:]:
        assert kind(**{name: "mine", "images": "there"}).after({"data": "other"}).source == "other"
    before = kind(data="mine", steps=3).after({"data": "other"})
    assert (before.data, before.source, before.steps) == ("other", "other", 3)
    assert all(getattr(before, name) == defaults[name] for name in kind.fits_source)


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_a_choice_of_the_default_data_is_refused_with_data_of_ones_own(domain):
    """It would have no effect, unseen. A trained model may go on to other data nevertheless."""
    kind, shapes = recipe_class(domain), recipe_class(domain).model_json_schema()["properties"]
    choices = {name: shapes[name]["enum"] for name, _, _, meaning in table(kind)
               if name in kind.of_default or ("the default data" in meaning and "enum" in shapes[name])}  # fmt: skip
    assert set(choices) == set(kind.of_default)
    for name, values in choices.items():
        default = kind.model_fields[name].default
        other = next(value for value in values if value != default)
        with pytest.raises(OptionError, match="without data") as caught:
            check_recipe(kind(data="x", **{name: other}))
        assert caught.value.argument == name
        assert getattr(kind(**{name: other}).after({"data": "x"}), name) == default


CANDIDATES = (
    True,
    False,
    None,
    0,
    3,
    32,
    0.25,
    0.0,
    (),
    (0.25,),
    (0.25, 0.5),
    (3,),
    ("mine",),
    "mine",
    {"model_type": "gpt2"},
)
BESIDE = [(domain, *entry) for domain in OWN_RECIPES for entry in recipe_class(domain).only_beside]


def a_value(kind, name, fits):
    """A value that the option takes by itself and that fits."""
    field = kind.model_fields[name]
    takes = TypeAdapter(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation)
    shape = shape_of(kind, name)
    words = [word for part in shape.get("anyOf", [shape]) for word in part.get("enum", ())]
    for value in (*words, *CANDIDATES, kind.without_mixer):
        with contextlib.suppress(ValidationError):
            if fits(value) and takes.validate_python(value, strict=True) == value:
                return value
    raise AssertionError(f"no candidate for {name}")


@pytest.mark.parametrize(("domain", "other", "values", "names"), BESIDE)
def test_an_option_without_effect_is_refused_and_gives_way_to_what_is_set_later(domain, other, values, names):
    """Else it would be set in vain, unseen; what a preset or an earlier call set stands in nobody's way."""
    kind = recipe_class(domain)
    without = a_value(kind, other, lambda value: not has_effect(value, values))
    for name in names:
        default = default_of(kind, name)
        options = {other: without, name: a_value(kind, name, lambda value, default=default: value != default)}
        for build in (lambda options: kind(**options), lambda options: kind().changed(**options)):
            with pytest.raises(IdleOptionError, match="has no effect") as caught:
                build(options)
            assert caught.value.argument in (name, other)  # the other one may have none either
        with contextlib.suppress(OptionError):  # such as a size that does not fit the other option
            assert getattr(kind.without_idle(options, keep=[other]), name) == default


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_a_shorter_run_is_measured_as_often_as_one_of_the_default_steps(domain):
    recipe = recipe_class(domain)()
    often = math.ceil(recipe.steps / recipe.steps_between_evaluations)
    for steps in (recipe.evaluate_every - 1, 40, 1):
        short = recipe.changed(steps=steps)
        assert steps / often <= short.steps_between_evaluations < steps / often + 1
    assert recipe.changed(evaluate_every=None).steps_between_evaluations == recipe.steps


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_the_cure_for_a_wrong_value_is_the_default_as_one_would_type_it(domain):
    """Also where a factory makes the default; an empty one is no example."""
    kind = recipe_class(domain)
    for name in kind.model_fields:
        with pytest.raises(OptionError) as error:
            kind(**{name: object()})
        default = getattr(kind(), name)
        example = re.search(rf"For example, pass {name}=(.*)\.$", error.value.cure)
        assert bool(error.value.cure) == (default not in (None, (), {})), str(error.value)
        assert example is None or getattr(kind(**{name: example[1]}), name) == default


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_every_option_of_a_domain_says_what_it_is(domain):
    kind = recipe_class(domain)
    names = [name for name, *_ in table(kind)]
    assert set(names) == set(kind.model_fields) and set(Recipe.model_fields) <= set(names)
    for name, type_, _, meaning in table(kind):
        assert meaning and not meaning.endswith("."), f"{domain}: {name} has no meaning"
        assert type_ != "another value" or name == "model", f"{domain}: {name} has no type"
    assert kind.__doc__ and kind.task.partition(":")[2]


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_every_preset_of_a_domain_is_a_recipe(domain):
    """The smoke test, which every domain has, of four steps at most."""
    kind = recipe_class(domain)
    for name in kind.presets:
        recipe = kind().preset(name)
        assert recipe.steps >= 1
    assert kind.tiny().steps <= 4


PUBLISHED = [(domain, name) for domain in OWN_RECIPES for name in recipe_class(domain).presets if name != "tiny"]
LEARNING = ("batch_size", "learning_rate", "warmup", "final", "weight_decay", "decay", "betas", "clip", "ema", "keep")


@pytest.mark.parametrize(("domain", "name"), PUBLISHED)
def test_a_published_preset_names_every_number_of_its_training(domain, name):
    """A default of the base recipe would get into the published settings unseen, as a clipped gradient once did."""
    preset = recipe_class(domain).presets[name]
    by_steps = {"milestones", "drop_at"} & set(preset)
    unused = ({"betas"} if preset.get("optimizer") == "sgd" else set()) | ({"final"} if by_steps else set())
    assert not set(LEARNING) - unused - set(preset)
    assert ("steps" in preset) != ("epochs" in preset)
    assert not preset["ema"] or {"ema_rise", "ema_buffers"} <= set(preset)
    cosine = not by_steps and not preset.get("one_cycle") and preset.get("schedule", "cosine") == "cosine"
    assert not cosine or "cosine_from" in preset
    kind = recipe_class(domain)
    assert all(option in preset for option in ("host_init", "momentum", "one_cycle") if option in kind.model_fields
               and (option != "momentum" or preset["optimizer"] == "sgd"))  # fmt: skip


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_no_figure_stands_beside_synthetic_data(domain):
    recipe = recipe_class(domain)()
    assert task_class(recipe)(recipe).published() is None
