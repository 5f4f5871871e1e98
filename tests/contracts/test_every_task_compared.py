"""`polymix compare --task` on every domain."""

import json

import pytest

from polymix.cli import main
from polymix.errors import OptionError
from polymix.train.registry import OWN_RECIPES
from polymix.workflows.compare.settings import Settings
from tests.domains.texts import folder as text_files

DOMAINS = sorted(OWN_RECIPES)


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_has_a_recipe_for_attention_each_mixer_and_the_floor(domain):
    asked = Settings(domain, mixers="pom", options=("steps=4",)).check()
    assert asked.labels == ["softmax", "pom", "linear_floor"]
    recipes = [asked.recipe_of(label) for label in asked.labels]
    assert {recipe.steps for recipe in recipes} == {4}
    assert not any(recipe.wants_control for recipe in recipes), "the floor is trained once"
    with pytest.raises(OptionError, match="Use --mixers, --seeds"):
        Settings(domain, options=("seed=3",)).check()


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_is_compared_and_resumed(domain, tmp_path, capsys):
    words = ["--set=steps=2", "--preset=tiny"]
    if domain == "classify":
        words += ["--tokens=16"]  # of its sweep of speeds, which no other domain has
    if domain == "text":
        words += [f"--data={text_files(tmp_path / 'texts')}", "--set=held_out=0.2"]
    arguments = ["compare", "--task", domain, "--mixers", "softmax,pom,linear_floor", "--seeds", "1", "--threads", "1",
                 "--out", str(tmp_path / "out"), *words]  # fmt: skip
    _finish(arguments)
    path = tmp_path / "out" / "results.json"
    content = json.loads(path.read_text())
    assert content["finished"] and not content["refused"]
    assert [(row["task"], row["seed"]) for row in content["rows"]] == [(domain, 0)] * 3
    assert len({row["mixer"] for row in content["rows"]}) == 3 and all(row["metrics"] for row in content["rows"])
    lost = content["rows"].pop()
    path.write_text(json.dumps({**content, "finished": False}))
    _finish([*arguments, "--resume"])
    again = json.loads(path.read_text())
    assert again["finished"] and again["rows"][:-1] == content["rows"]
    assert again["rows"][-1]["metrics"] == lost["metrics"]


def _finish(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert not stop.value.code
