"""The table of all domains marks wins and losses alike, and says nothing of differences that chance makes."""

import importlib.util
import json
from pathlib import Path

import pytest

from polymix.domains.timeseries.recipe import DLINEAR

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def overview():
    spec = importlib.util.spec_from_file_location("docs_of_domains", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.overview


def domain(overview, up=True, **runs):
    named = {name: values if isinstance(values, list) else [values] for name, values in runs.items()}
    speeds = {name: len(named) for name in named}
    return overview._domain("here", "here.md", "score", up, named, speeds)


@pytest.mark.parametrize(("up", "value", "marks"), [
    (True, 0.9, " ▲"), (True, 0.82, ""), (True, 0.7, " ▼"), (True, 0.4, " ▼ ○"), (True, 0.3, " ▼ ○"),
    (False, 0.9, " ▼ ○"), (False, 0.3, " ▲"),
])  # fmt: skip
def test_a_mixer_is_marked_against_attention_and_against_the_control(overview, up, value, marks):
    it = domain(overview, up, softmax=0.8, pom=value, linear_floor=0.41 if up else 0.9)
    assert it.marks("pom") == marks and it.cell("pom") == f"{value:.3f}{marks}" and it.speed("pom") == "1.00 ×"


def test_a_difference_within_the_range_over_the_seeds_is_none(overview):
    """Of either of the two: a third mixer that varies hides no difference."""
    it = domain(overview, softmax=[0.80, 0.80], pom=[0.70, 0.88], padre=[0.77, 0.78], linear_floor=[0.2, 0.2])
    cells = [it.cell(name).replace("\u00a0", " ") for name in ("pom", "padre")]
    assert cells == ["0.790 ± 0.090", "0.775 ± 0.005 ▼"]
    assert it.seeds() == "2" and domain(overview, softmax=[0.8, 0.8, 0.9], pom=[0.7]).seeds() == "1 to 3"


@pytest.mark.parametrize(("runs", "sentence"), [
    ({"softmax": 0.8, "pom": 0.9, "padre": 0.4, "linear_floor": 0.4},
     "mixing decides; better than attention: `pom`; worse: `padre`; not clearly better than the control: `padre`."),
    ({"softmax": 0.8, "pom": 0.81, "linear_floor": 0.79},
     "attention is level with the control; no mixer is clearly better; level: `pom`; not clearly better than the control: `pom`."),
    ({"softmax": 0.5, "pom": 0.9, "linear_floor": 0.6},
     "attention is behind the control; better than it: `pom`; better than attention: `pom`."),
    ({"softmax": 0.5, "pom": 0.4}, "no control was trained; worse: `pom`."),
])  # fmt: skip
def test_the_sentence_names_every_mixer(overview, runs, sentence):
    assert overview._verdict(domain(overview, **runs)) == sentence


def test_every_domain_with_results_has_a_row_and_each_run_stands_on_a_mixer_s_page(overview):
    names = {it.name for it in overview.all_domains()}
    folders = {path.parent.name for path in (ROOT / "benchmarks/results/tasks").glob("*/results.json")}
    assert folders - {"generation-by-class"} <= names
    for it in overview.all_domains():
        local = {overview.FLOOR} if it.name in overview.LOCAL else set()  # their control is another mixer
        for mixer in set(it.scores) - {overview.NO_BLOCK, DLINEAR} - local:  # what is no mixer
            name = overview.base(mixer.partition(" (")[0])
            page = (ROOT / f"docs/mixers/{name}.md").read_text("utf-8")
            assert f"[{it.name}]" in page and f"`{mixer}`" in page, f"{it.name} is missing on the page of {name}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results/tasks").glob("*/results.json")), ids=lambda p: p.parent.name
)
def test_no_figure_of_a_paper_stands_beside_a_run_on_default_data(path):
    assert all(row["paper"] is None for row in json.loads(path.read_text("utf-8"))["rows"])
