"""Recipes in TOML, JSON and YAML: the same options as a Python recipe and --set, nothing run, nothing ignored."""

import json

import pytest

from polymix.cli import main
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.recall.recipe import RecallRecipe
from polymix.domains.text.recipe import TextRecipe
from polymix.errors import OptionError
from polymix.train.recipe_files import MAX_BYTES
from polymix.train.registry import chosen_recipe, named_recipe

pytest.importorskip("yaml", reason="untested: YAML recipes, for which PyYAML is needed (the train extra)")


def write(folder, text, suffix=".yaml"):
    path = folder / f"recipe{suffix}"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


@pytest.mark.parametrize(("content", "recipe"), [
    ({"task": "classify"}, ClassifyRecipe()),
    ({"task": "classify", "mixer": "padre:degree=3", "steps": 20, "betas": [0.9, 0.99], "class_token": True},
     ClassifyRecipe(mixer="padre:degree=3", steps=20, betas=(0.9, 0.99), class_token=True)),
    ({"task": "text", "steps": 7, "tokenizer": None, "mixers": ["pom:degree=3", "local"], "num_layers": 2},
     TextRecipe(steps=7, options={"mixers": ["pom:degree=3", "local"], "num_layers": 2})),
    ({"task": "text", "options": {"num_layers": 2}, "prompts": ["A"]},
     TextRecipe(options={"num_layers": 2}, prompts=("A",))),
    ({"task": "recall", "sizes": [4, 8], "mixer": "pom"}, RecallRecipe(sizes=(4, 8), mixer="pom")),
])  # fmt: skip
@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml", ".YAML"])
def test_the_options_are_those_of_a_python_recipe(tmp_path, content, recipe, suffix):
    assert named_recipe(write(tmp_path, content, suffix)) == recipe  # JSON is YAML too


def test_toml_too(tmp_path):
    path = write(tmp_path, 'task = "recall"\nsizes = [4, 8]\nlearning_rate = 1e-3\n', ".toml")
    assert named_recipe(path) == RecallRecipe(sizes=(4, 8), learning_rate=1e-3)


def test_text_in_a_file_is_read_as_set_reads_it(tmp_path):
    """YAML takes 1e-3 for text."""
    path = write(tmp_path, 'task: classify\nlearning_rate: 1e-3\nbetas: 0.9,0.99\ndata: "2024"\nlogger: none\n')
    recipe = named_recipe(path)
    assert recipe == ClassifyRecipe().changed(learning_rate="1e-3", betas="0.9,0.99", logger="none", data="2024")
    assert recipe.learning_rate == 1e-3 and recipe.data == "2024" and recipe.logger is None


def test_flags_change_a_recipe_of_a_file_and_a_file_changes_a_preset(tmp_path):
    path = write(tmp_path, "task: text\nsteps: 5\nnum_layers: 2\n")
    recipe = chosen_recipe(path, options={"steps": "7", "num_layers": "3"})
    assert recipe.steps == 7 and recipe.options == {"num_layers": 3}
    config = write(tmp_path, "steps = 6\ndim = 16\n", ".toml")
    recipe = chosen_recipe("satellite", preset="tiny", config=config, options={"dim": "24"})
    assert (recipe.steps, recipe.dim, recipe.heads) == (6, 24, 2), "the preset, then the file, then the flags"


@pytest.mark.parametrize(("text", "words"), [
    ("", "NoneType instead of options by name"), ("- task", "list instead of"), ("1: 2", "options by name"),
    ("steps: 5", "without a task"), ("task: nope", "got 'nope'"), ("task: [text]", "expected one of classify"),
    ("task: os.path", "got 'os.path'"), ("task: ../images", "expected one of classify"),
    ("task: text\nsteps: 5\nsteps: 6", "steps twice"), ('{"task": "text", "task": "classify"}', "task twice"),
    ("task: classify\nstepz: 5", "`stepz` is an unknown option. Choose from steps"),
    ("task: text\nsteps: many", "`steps`"), ("task: text\nsteps: {a: 1}", "`steps`"), ("task: text\nsteps: 1.5", "`steps`"),
    ("task: classify\nclass_token: 3", "`class_token`"), ("task: text\nbetas: [1, 2]", "`betas`"),
    ("task: text\ndata: 2024-01-01", "not JSON serializable"), ("task: text\nsteps: !!python/object/apply:os.getcwd []", "cannot be read"),
    ("task: &t text\ncolumn: *t", "aliases"), ("task: text\n  steps: 5\n bad", "cannot be read"), ("{" * 3000, "too deep"),
    ("task: text\n\x00", "cannot be read"), ("#" + "x" * MAX_BYTES, "at most"),
])  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, text, words):
    for suffix in (".yaml", ".json"):
        if suffix == ".json" and not text.startswith("{"):
            continue
        with pytest.raises(OptionError) as error:
            named_recipe(write(tmp_path, text, suffix))
        assert words in str(error.value) or (suffix == ".json" and "cannot be read" in str(error.value))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"recipe\.json, which cannot be read"):
        named_recipe(path)


def test_train_takes_one(tmp_path, capsys):
    path = write(tmp_path, "task: classify\nsteps: 2\ndim: 8\ndepth: 1\nimage_size: 8\n")
    with pytest.raises(SystemExit) as status:
        main(["train", str(path), "--set", "mixer=poly_nl", "--out", str(tmp_path / "out"), "--threads", "1"])
    assert not status.value.code, capsys.readouterr().err
    settings = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]
    assert (settings["steps"], settings["dim"], settings["mixer"]) == (2, 8, "poly_nl")
