"""Options written once: what they refuse, how they are said, and that every domain's are whole."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from polymix.errors import OptionError
from polymix.train.recipe import Recipe
from polymix.train.registry import chosen_recipe, options_of


@pytest.mark.parametrize(("options", "message"), [
    ({"steps": 0}, "`steps`: expected an integer of at least 1, got 0"),
    ({"steps": "4.5"}, "an integer of at least 1, got '4.5'"),
    ({"steps": True}, "True and False are no numbers"),
    ({"warmup": 1.0}, "a number of at least 0 and below 1"),
    ({"learning_rate": "nan"}, "a number above 0, got 'nan'"),
    ({"learning_rate": float("inf")}, "`learning_rate`"),
    ({"betas": "0.9"}, "`betas`: expected 2 values"),
    ({"betas": "0.9,1.5"}, "`betas`: expected 2 values"),
    ({"betas": (0.9, True)}, "no numbers"),
    ({"device": "tpu"}, "expected cpu, cuda, cuda:1 or mps"),
    ({"data": ""}, "`data`"),
    ({"seed": -1}, "`seed`: expected an integer of at least 0"),
    ({"precision": "float8"}, "float32, bfloat16, float16"),
    ({"batch_size": 5, "accumulate": 2}, "a divisor of batch_size=5"),
    ({"plan": "1:1"}, "this domain has no plans"),
    ({"lerning_rate": 1}, "`lerning_rate` is an unknown option. Choose from learning_rate."),
])  # fmt: skip
def test_an_option_that_is_wrong_is_one_line(options, message):
    with pytest.raises(OptionError) as error:
        Recipe(**options)
    assert message in str(error.value) and "\n" not in str(error.value) and "pydantic" not in str(error.value)


def test_a_default_that_is_refused_is_not_the_example_of_what_to_pass():
    class Wrong(Recipe):
        """An option whose default is out of its range."""

        length: int = Field(3, ge=4, description="values in a signal")

    with pytest.raises(OptionError, match=r"expected an integer of at least 4, got 3\.$"):
        Wrong()


def test_a_changed_recipe_is_checked_again_and_keeps_the_rest():
    recipe = Recipe(steps=7, epochs=2.0)
    assert recipe.changed(seed=3).epochs == 2.0
    assert recipe.changed(steps=9).epochs is None, "steps take the place of epochs"
    with pytest.raises(OptionError, match="`steps`"):
        recipe.changed(steps=-1)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.floats(), max_size=3),
)))  # fmt: skip
def test_any_value_makes_a_recipe_or_a_typed_error(options):
    """And what it makes is the same after a way through JSON."""
    try:
        recipe = Recipe(**options)
    except OptionError:
        return
    assert Recipe(**recipe.to_dict()) == recipe


def test_a_preset_that_does_not_exist_names_those_that_do():
    with pytest.raises(OptionError, match="expected tiny, paper"):
        chosen_recipe("satellite", preset="small")


def test_an_option_comes_once():
    assert options_of(["steps=3"], {"seed": "1", "data": None}) == {"steps": "3", "seed": "1"}
    for words, flags in ((["steps=3", "steps=4"], {}), (["steps=3"], {"steps": "4"}), (["steps"], {}), (["=3"], {})):
        with pytest.raises(OptionError):
            options_of(words, flags)
    with pytest.raises(OptionError, match="both epochs"):
        chosen_recipe("recall", options={"steps": "3", "epochs": "2"})


def test_help_and_mistakes_in_options_need_no_pytorch():
    code = (
        "import sys\nfrom polymix.cli import main\n"
        "for words in (['train', 'segment', '--help'], ['train', 'text', '--steps', '0']):\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        "assert not {'torch', 'timm', 'transformers', 'plotly', 'matplotlib'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--mixer" in run.stdout and "expected an integer of at least 1" in run.stderr
