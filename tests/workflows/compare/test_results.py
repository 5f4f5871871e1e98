"""Nothing that had finished is lost, and nothing foreign is believed."""

import json
from types import SimpleNamespace

import pytest

from polymix.errors import ResultsError
from polymix.files import write_whole
from polymix.workflows.compare.report import accuracy_against_latency, pareto, write_report
from polymix.workflows.compare.run import Results, _Comparison
from polymix.workflows.compare.tables import headings, rows, terminal_table
from polymix.workflows.compare.verdict import answer
from tests.workflows.compare.content import make, trained

SETTINGS, MACHINE = {"epochs": 3, "tokens": [64]}, make({}, {})["machine"]


def test_each_addition_is_on_disk(tmp_path):
    results = Results.open(tmp_path / "new", SETTINGS, MACHINE, resume=False)
    row = trained("pom", 0, 0.5)
    results.add("rows", [row])
    assert Results.load(tmp_path / "new" / "results.json")["rows"] == [row]
    (tmp_path / "new" / ".results.json.killed.part").write_text("half of a file, of a run that was killed")
    again = Results.open(tmp_path / "new", SETTINGS, MACHINE, resume=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.json"]
    assert again.content["rows"] == [row]


def test_resume_of_nothing_begins(tmp_path):
    assert Results.open(tmp_path, SETTINGS, MACHINE, resume=True).content["rows"] == []


def test_an_earlier_run_is_not_overwritten(tmp_path):
    Results.open(tmp_path, SETTINGS, MACHINE, resume=False)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(ResultsError, match="--resume"):
        Results.open(tmp_path, SETTINGS, MACHINE, resume=False)
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.parametrize(("settings", "machine", "named"), [
    ({**SETTINGS, "epochs": 4}, MACHINE, "epochs=4"), (SETTINGS, {**MACHINE, "threads": 8}, "threads=8"),
    ({"epochs": 3}, MACHINE, "tokens"),
])  # fmt: skip
def test_resume_needs_the_same_question_and_machine(tmp_path, settings, machine, named):
    Results.open(tmp_path, SETTINGS, MACHINE, resume=False)
    with pytest.raises(ResultsError, match=named):
        Results.open(tmp_path, settings, machine, resume=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other/1"}', '{"schema": "polymix.workflows.compare/2"}'])
def test_damaged_and_foreign_files(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ResultsError, match=r"results\.json"):
        Results.open(tmp_path, SETTINGS, MACHINE, resume=True)
    assert (tmp_path / "results.json").read_text() == text, "a file that is not understood is left alone"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_whole(path, "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"], "no half-written file stays behind"


def test_numbers_that_json_lacks_are_refused(tmp_path):
    results = Results.open(tmp_path, SETTINGS, MACHINE, resume=False)
    with pytest.raises(ValueError, match="JSON"):
        results.add("rows", [{"accuracy": float("nan")}])
    json.loads((tmp_path / "results.json").read_text())


def test_the_recipe_of_all_runs_is_computed_once(tmp_path, monkeypatch):
    computed = []
    recipe = SimpleNamespace(for_data=lambda epochs: computed.append(epochs) or SimpleNamespace(to_dict=dict))
    task = SimpleNamespace(epoch=lambda data, step: 1.0, load=lambda folder: None, grid=lambda: None,
                           describe=lambda data: "")  # fmt: skip
    monkeypatch.setattr(_Comparison, "task", lambda self, label, seed=0: task)
    asked = SimpleNamespace(recipe=recipe, labels=["pom"], configs={})
    comparison = _Comparison(None, asked, tmp_path, None, print)
    assert comparison.recipe is comparison.recipe
    comparison.describe(Results.open(tmp_path / "new", SETTINGS, MACHINE, resume=False))
    assert len(computed) == 1


CONTENT = make(
    {"softmax": [0.98, 0.97], "pom": [0.98, 0.975], "qt": [None, 0.9], "linear_floor": [0.60, 0.62]},
    {"softmax": [1, 2, 8, 100], "pom": [2, 3, 4, 5], "qt": [1, 1, 1, None], "linear_floor": [1, 1, 1, 1]},
)


def test_tables():
    table = {cells[0]: dict(zip(headings(CONTENT), cells, strict=True)) for cells in rows(CONTENT)}
    assert table["pom"]["alone at 1,024 tokens, ms"] == "5.00"
    assert table["pom"]["attention ÷ it"] == "20.00"
    assert table["pom"]["it ÷ its floor"] == "2.00"
    assert table["pom"]["accuracy ↑ (± half the range over seeds)"] == "97.8 ±0.3 %"
    assert table["qt"]["accuracy ↑ (± half the range over seeds)"] == "diverged"
    assert table["qt"]["alone at 1,024 tokens, ms"] == "stopped"
    assert table["softmax"]["faster than attention alone from, tokens"] == "–"
    heads, cells = terminal_table(CONTENT)
    assert all(len(row) == len(heads) for row in cells)
    lines = [
        max(len(line) for text in column for line in text.split("\n")) for column in zip(heads, *cells, strict=True)
    ]
    assert sum(lines) + 2 * len(lines) <= 80, "a terminal of 80 characters must show every column whole"


@pytest.mark.slow
@pytest.mark.draws
def test_report_is_one_file_that_needs_nothing_else(tmp_path):
    content = {**CONTENT, "answer": answer(CONTENT)}
    html = write_report(content, tmp_path).read_text()
    assert content["answer"]["headline"] in html
    assert html.count("<svg role=") == 6, "three pictures, each wide and for a phone"
    assert "http" not in html.replace("http-equiv", "")
    assert "&lt;broken&gt;.png: cut &amp; empty" in html, "names of files must be escaped"
    assert "qt, alone, 1,024 tokens: took 11 s" in html
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(files) == ["accuracy.png", "latency.png", "memory.png", "report.html", "report.md"]
    assert min(size for name, size in files.items() if name != "report.md") > 10_000


@pytest.mark.draws
@pytest.mark.parametrize("seeds", [1, 2])
def test_axis_of_the_accuracy_says_what_the_bars_are(seeds):
    accuracies = {mixer: [0.98, 0.97][:seeds] for mixer in ("softmax", "pom")}
    content = make(accuracies, {mixer: [1, 2, 3, 4] for mixer in accuracies}, seeds=seeds)
    (axes,) = accuracy_against_latency(content).axes
    label = axes.get_ylabel().split("\n")[0]
    assert label == "test accuracy, %" + " (bar: range over seeds)" * (seeds > 1)
    assert sum(bar.has_yerr for bar in axes.containers) == (2 if seeds > 1 else 0), "a bar without a range"
    (narrow,) = accuracy_against_latency(content, narrow=True).axes
    assert narrow.get_ylabel().split("\n")[0] == "test accuracy, %"


def test_pareto_front():
    points = {
        "slow": (9.0, 99.0),
        "fast": (1.0, 90.0),
        "beaten": (5.0, 89.0),
        "middle": (3.0, 95.0),
        "same": (3.0, 94.0),
    }
    assert pareto(points) == ["fast", "middle", "slow"]
