"""`polymix convert`: what the folder of a conversion may hold before."""

import json

from tests.workflows.convert.test_command import place  # noqa: F401  # a fixture


def test_nothing_that_is_there_is_lost(fails, place):  # noqa: F811
    (place / "out").mkdir()
    (place / "out" / "model.safetensors").write_text("years of work")
    fails("--model", "mine.py:vit", named="model.safetensors")
    fails("--model", "mine.py:vit", "--resume", named="model.safetensors")
    fails("--model", "mine.py:vit", "--out", "mine.py", named="a file")
    (place / "out" / "results.json").write_text(json.dumps({"schema": "polymix.compare/1"}))
    fails("--model", "mine.py:vit", "--resume", named="polymix.compare/1")
    assert (place / "out" / "model.safetensors").read_text() == "years of work"


def test_a_hidden_file_is_no_content(run, place):  # noqa: F811
    (place / "out" / ".git").mkdir(parents=True)
    assert run("--model", "mine.py:vit", "--plan", "qt")[0] == 0
