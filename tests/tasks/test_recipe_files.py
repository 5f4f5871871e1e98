"""Recipes in JSON and YAML: the same options as a Python recipe and --set, nothing run, nothing ignored."""

import json
from dataclasses import replace

import pytest

from polymix.cli import main
from polymix.errors import OptionError
from polymix.tasks.classify import ImageRecipe
from polymix.tasks.recall import RecallRecipe
from polymix.tasks.recipe import LARGEST, load_recipe, own_tasks
from polymix.tasks.text import TextRecipe

pytest.importorskip("yaml", reason="untested: YAML recipes, for which PyYAML is needed (the train extra)")


def write(folder, text, suffix=".yaml"):
    path = folder / f"recipe{suffix}"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


@pytest.mark.parametrize(("content", "recipe"), [
    ({"task": "classify"}, ImageRecipe()),
    ({"task": "classify", "mixer": "padre:degree=3", "steps": 20, "betas": [0.9, 0.99], "class_token": True},
     ImageRecipe(mixer="padre:degree=3", steps=20, betas=(0.9, 0.99), class_token=True)),
    ({"task": "text", "steps": 7, "tokenizer": None, "mixers": ["pom:degree=3", "local"], "num_layers": 2},
     TextRecipe(steps=7, options={"mixers": ("pom:degree=3", "local"), "num_layers": 2})),
    ({"task": "text", "options": {"num_layers": 2}, "prompts": ["A"]},
     TextRecipe(options={"num_layers": 2}, prompts=("A",))),
    ({"task": "recall", "sizes": [4, 8], "mixers": ["pom"]}, RecallRecipe(sizes=(4, 8), mixers=("pom",))),
])  # fmt: skip
@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml", ".YAML"])
def test_the_options_are_those_of_a_python_recipe(tmp_path, content, recipe, suffix):
    assert load_recipe(write(tmp_path, content, suffix)) == recipe  # JSON is YAML too


def test_text_in_a_file_is_read_as_set_reads_it(tmp_path):
    """YAML takes 1e-3 for text."""
    path = write(tmp_path, "task: classify\nlearning_rate: 1e-3\nbetas: 0.9,0.99\ndata: 2024\nlogger: none\n".replace(
        "data: 2024", 'data: "2024"'))  # fmt: skip
    words = ["learning_rate=1e-3", "betas=0.9,0.99", "logger=none"]
    assert load_recipe(path) == replace(ImageRecipe().changed(words), data="2024")
    assert load_recipe(path).learning_rate == 1e-3 and load_recipe(path).data == "2024"


def test_set_changes_a_recipe_of_a_file(tmp_path):
    recipe = load_recipe(write(tmp_path, "task: text\nsteps: 5\nnum_layers: 2\n")).changed(["steps=7", "num_layers=3"])
    assert recipe.steps == 7 and recipe.options == {"num_layers": 3}


def test_every_task_can_be_named(tmp_path):
    assert {"classify", "recall", "text"} <= set(own_tasks())
    for task in own_tasks():
        recipe = load_recipe(write(tmp_path, {"task": task}))
        assert type(recipe).__module__ == own_tasks()[task]


@pytest.mark.parametrize(("text", "words"), [
    ("", "NoneType instead of options by name"), ("- task", "list instead of"), ("1: 2", "options by name"),
    ("steps: 5", "expected task: boxes3d, classify"), ("task: nope", "task 'nope'"), ("task: [text]", "expected task"),
    ("task: os.path", "use a Python file"), ("task: ../images", "expected task"),
    ("task: text\nsteps: 5\nsteps: 6", "steps twice"), ('{"task": "text", "task": "classify"}', "task twice"),
    ("task: classify\nstepz: 5", "`stepz`: expected steps"),
    ("task: text\nsteps: many", "`steps`"), ("task: text\nsteps: {a: 1}", "`steps`"), ("task: text\nsteps: 1.5", "`steps`"),
    ("task: classify\nclass_token: 1", "`class_token`"), ("task: text\nbetas: [1, 2]", "`betas`"),
    ("task: text\ndata: 2024-01-01", "not JSON serializable"), ("task: text\nsteps: !!python/object/apply:os.getcwd []", "cannot be read"),
    ("task: &t text\ncolumn: *t", "aliases"), ("task: text\n  steps: 5\n bad", "cannot be read"), ("{" * 3000, "too deep"),
    ("task: text\n\x00", "cannot be read"), ("#" + "x" * LARGEST, "at most"),
])  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, text, words):
    for suffix in (".yaml", ".json"):
        if suffix == ".json" and not text.startswith("{"):
            continue
        with pytest.raises(OptionError) as error:
            load_recipe(write(tmp_path, text, suffix)).changed([])
        assert words in str(error.value) or (suffix == ".json" and "cannot be read" in str(error.value))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"recipe\.json, which cannot be read"):
        load_recipe(path)


def test_train_takes_one(tmp_path, capsys):
    path = write(tmp_path, "task: classify\nsteps: 2\ndim: 8\ndepth: 1\nimage_size: 8\n")
    with pytest.raises(SystemExit) as status:
        main(["train", str(path), "--set", "mixer=poly_nl", "--out", str(tmp_path / "out"), "--threads", "1"])
    assert not status.value.code, capsys.readouterr().err
    settings = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]
    assert (settings["steps"], settings["dim"], settings["mixer"]) == (2, 8, "poly_nl")
