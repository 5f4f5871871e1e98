"""What a run of any task leaves: the page for people, and the same as Markdown."""

import json
from contextlib import suppress

import pytest
from matplotlib.figure import Figure
from PIL import Image

from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import OptionError
from polymix.pages import COLOURS
from polymix.train import run as running
from polymix.train.data.drawing import INK, save_figure
from polymix.train.registry import chosen_recipe
from polymix.train.report import Journal, curve, table, write_report
from polymix.train.saved import SavedRun
from polymix.train.task import Metric
from tests.browser import PAPER, needs_browser, opened

ABOUT = {
    "describe": "Two <classes>.",
    "usage": ["import torch"],
    "next": [("Go on:", "polymix compare --data 'my photos'")],
}
UNITS = {"accuracy": "%", "val_loss": ""}
ROW = {
    "mixer": "pom", "seed": 0, "metrics": {"accuracy": 0.9375}, "directions": {"accuracy": "up"}, "units": UNITS,
    "parameters": 1234, "unit": "images", "training_per_second": 1.0, "inference_per_second": 1.0, "peak_bytes": None,
    "paper": None,
}  # fmt: skip
CONTENT = {
    "rows": [ROW],
    "task": "images",
    "parameters": 1234,
    "about": ABOUT,
    "pictures": ["confusion.png"],
    "settings": {"steps": 1, "batch_size": 64, "precision": "float32", "device": "cpu"},
}
ROWS = [
    {"step": 1, "loss": 2.5, "images_per_second": 900}, {"step": 1, "accuracy": 0.8125, "val_loss": 12345.6},
    {"step": 2, "loss": 1.5, "images_per_second": 1000}, {"step": 2, "accuracy": 0.9375, "val_loss": 0.5, "samples": ["<b> & ``` one"]},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    figure = Figure(figsize=(5, 4))
    figure.subplots().plot([1, 2])
    figure.savefig(tmp_path / "confusion.png", dpi=130)
    write_report(tmp_path, CONTENT, ROWS)
    return tmp_path


def test_the_page_and_the_markdown_say_the_same(folder):
    page, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    for text in ("93.8 %", "81.2 %", "12,346", "1 step of 64 samples", "1,234 parameters"):
        assert text in page and text in markdown, text
    for text in (
        "Two &lt;classes&gt;.",
        "&lt;b&gt; &amp;",
        "polymix compare --data &#39;my photos&#39;",
        "<h2>Confusion</h2>",
    ):
        assert text in page, text
    assert "![curves](curves.png)" in markdown and (folder / "curves.png").exists()
    assert page.count("data:image/png;base64,") == 1 and "http" not in page, "the page needs no other file"


def test_the_title_names_the_mixer_and_there_is_one_speed(tmp_path):
    """The median above is that of the table: two numbers for one thing were the upper and the mean of two values."""
    content = {**CONTENT, "pictures": [], "rows": [{**CONTENT["rows"][0], "mixer": "pom:degree=3"}]}
    write_report(tmp_path, content, ROWS)
    page = (tmp_path / "report.html").read_text()
    assert "<h1>Images with pom:degree=3, 1,234 parameters</h1>" in page
    assert "950 images per second in training (median)" in page


def test_a_share_is_in_per_cent_under_any_name(tmp_path):
    """top_5 was 0.93 in the report and 93 % in `polymix evaluate`: each had a rule of its own."""
    metrics, printed = (Metric("top_5", "higher", "%"), Metric("top", "higher")), []
    measured = {"step": 1, "top_5": 0.9375, "validation_top_5": 0.5, "top_1": 0.25}
    Journal(tmp_path / "metrics.jsonl", 0, printed.append, True, metrics)({**measured, "loss": 2.5})
    assert printed == ["step 1  top_5 93.8 %  validation_top_5 50.0 %  top_1 0.25  loss 2.5"]
    units = {"top_5": "%", "validation_top_5": "%", "top_1": ""}
    row = {**ROW, "metrics": {"top_5": 0.9375, "top_1": 0.25}, "directions": {}, "units": units}
    row["paper"] = {"top_5": 0.875, "source": "Table 1"}
    assert {"93.8 %", "0.25", "top 5 87.5 % (Table 1)"} <= set(table([row])[1])
    write_report(tmp_path, {**CONTENT, "pictures": [], "rows": [row]}, [measured])
    assert (tmp_path / "report.md").read_text().count("93.8 %") == 2, "over steps and over mixers"
    assert curve([measured], units, False).axes[1].get_title() == "validation top 5 on held-out data, %"


def test_accuracies_are_drawn_in_per_cent():
    assert curve(ROWS, UNITS, False).axes[1].lines[0].get_ydata().tolist() == [81.25, 93.75]
    assert "%" in curve(ROWS, UNITS, True).axes[1].get_title()


def test_the_axis_of_one_value_begins_at_zero():
    """It used to reach from 0.110 to 0.122."""
    assert curve([{"step": 1, "loss": 2.5}, {"step": 1, "AP": 0.116}], {}, False).axes[1].get_ylim() == (0, 0.232)


@pytest.mark.parametrize(("steps", "rows"), [(60, 10), (3, 3), (1, 1)])
def test_a_short_run_has_a_curve_too(tmp_path, steps, rows):
    """A run of 60 steps used to have a row at step 50 and one at its end."""
    recipe = ClassifyRecipe.tiny().changed(steps=steps, log_every=50, evaluate_every=60, control=False)
    running.train(recipe, tmp_path)
    assert sum('"loss"' in line for line in (tmp_path / "metrics.jsonl").read_text().splitlines()) == rows
    assert recipe.changed(steps=5000).steps_between_rows == 50


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, [2, 4, 6, 8, 10, 12, 14]), ({"evaluate_every": None}, [14]), ({"evaluate_every": 5}, [5, 10, 14])],
)
def test_a_short_run_is_measured_on_its_way_too(tmp_path, options, steps):
    """It used to be measured at its end alone: a point in the report in place of a curve."""
    recipe = ClassifyRecipe.tiny().changed(**{"steps": 14, "evaluate_every": 100, "control": False, **options})
    running.train(recipe, tmp_path)
    evaluations = json.loads((tmp_path / "results.json").read_text())["evaluations"]
    assert [row["step"] for row in evaluations] == steps


@pytest.mark.slow
def test_a_run_is_finished_when_its_control_is_and_its_model_can_be_used_before(tmp_path, monkeypatch):
    def state():
        content = json.loads((tmp_path / "results.json").read_text())
        return content["finished"], [row["mixer"] for row in content["rows"]]

    one_model, states = running._train, []

    def second_is_stopped(task, *arguments):
        states.extend([state()] if task.recipe.mixer == "linear_floor" else [])
        if states:
            raise KeyboardInterrupt
        return one_model(task, *arguments)

    recipe = ClassifyRecipe.tiny().changed(control=True)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(running, "_train", second_is_stopped)
        running.train(recipe, tmp_path)
    assert states == [(False, ["pom"])] and SavedRun.of(tmp_path).recipe == recipe
    speeds = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    running.train(recipe, tmp_path, resume=True)
    assert state() == (True, ["pom", "linear_floor"])
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0] == speeds, "what was measured stays"


@pytest.mark.parametrize(
    "place", [{"device": "cuda:63"}, {"strategy": "fsdp"}, {"precision": "float16"}, {"logger": "wandb"}], ids=str
)
def test_a_model_is_loaded_elsewhere_than_it_was_trained(tmp_path, place):
    """A run of a GPU could be neither evaluated nor used on a machine without one."""
    running.train(ClassifyRecipe.tiny(), tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    content["settings"] |= place
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert next(SavedRun.of(tmp_path).load().parameters()).device.type == "cpu"


@pytest.mark.draws
def test_pictures_have_no_ground_and_ink_that_both_modes_show(tmp_path):
    """Under a dark page they used to be a white sheet."""
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots(1, 2)
    axes[0].set_title("a title")
    axes[1].imshow([[0.0, 1.0]])
    inside = axes[1].text(0, 0, "inside", color="black")
    save_figure(tmp_path / "sheet.png", figure)
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.mode == "RGBA" and image.getpixel((1, 1))[3] == 0
        opaque = {colour[:3] for _, colour in image.getcolors(1 << 20) if colour[3] == 255}
    assert tuple(bytes.fromhex(INK[1:])) in opaque and axes[0].title.get_color() == INK
    assert inside.get_color() == "black", "it stands on the picture"

    def light(colour):  # relative luminance, as WCAG has it
        parts = [value / 255 for value in bytes.fromhex(colour[1:])]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05

    for ground in COLOURS["paper"]:
        dark, bright = sorted((light(INK), light(ground)))
        assert bright / dark > 3.5


@pytest.mark.slow
@needs_browser
@pytest.mark.draws
def test_in_a_browser(folder):
    with opened(folder / "report.html", folder / "profile") as page:
        for view in (
            {"width": 1200},
            {"width": 1200, "dark": True},
            {"width": 400},
            {"width": PAPER, "media": "print"},
        ):
            seen = page.see(**view)
            assert not seen["overflow"] and not seen["faint"] and not seen["small"], (view, seen)
            assert seen["columns"][:4] == ["step", "accuracy", "val loss", "mixer"] and seen["charts"] == 1
        page.see(width=400)
        assert page.evaluate('document.querySelector(".sheet img").width') > 400, (
            "names in it can be read, and it scrolls"
        )
        shadow = "[...document.querySelectorAll('.scroll')].every(e => getComputedStyle(e).backgroundImage.includes('gradient'))"
        assert page.evaluate(shadow), "a table that is cut at the edge of a phone shows that it goes on"


def test_a_control_that_the_host_cannot_have_is_left_out_unless_it_was_asked_for(tmp_path):
    """DLinear has no patches, of which the context is no multiple: its own training goes on."""
    recipe = chosen_recipe("timeseries", preset="tiny", options={"mixer": "dlinear", "context": 50, "steps": 1})
    with pytest.raises(OptionError, match=r"(?s)`control`.*linear_floor.*multiple of the patch"):
        running.train(recipe.changed(control=True), tmp_path / "asked")
    said = []
    running.train(recipe, tmp_path / "out", say=said.append)
    assert any(line.startswith("No control is trained: `context`") for line in said)
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["finished"] and [row["mixer"] for row in content["rows"]] == ["dlinear"]
