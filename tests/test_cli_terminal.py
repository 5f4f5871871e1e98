"""What the commands print: at 60 columns, in plain numbers, and help without waiting for PyTorch."""

import json
import re
import subprocess
import sys

import pytest

import polymix
from polymix.cli import VERBS, main
from polymix.workflows.compare.tables import data_line
from polymix.workflows.compare.verdict import answer
from tests.workflows.bench.content import content as bench_content
from tests.workflows.bench.content import row as bench_row
from tests.workflows.compare.content import make
from tests.workflows.test_pages import comparison

LONG = "padre:degree=3:token=monarch:blocks=8"


def run(capsys, monkeypatch, *arguments, columns=60):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, arguments)))
    return stop.value.code or 0, *capsys.readouterr()


def readable(text, columns, *names):
    """No line is longer than the terminal, names are whole, and numbers are written out."""
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    for name in names:
        assert any(name in line for line in lines), f"{name} is broken over lines:\n{text}"
    assert not re.search(r"\de\+\d", text), text
    assert not re.search(r"\b1 (threads|seeds|tokens|epochs|images)\b", text), text
    assert not [line for line in lines if re.fullmatch(r"\s*[a-z]\s*", line)], "a name with one letter a line"


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_list_and_show_fit(capsys, monkeypatch, columns):
    status, out, _ = run(capsys, monkeypatch, "list", columns=columns)
    assert status == 0
    readable(out, columns, "linear_floor", "conv2former")
    assert columns < 80 or len(out.splitlines()) < 2 * len(polymix.list_mixers()) + 10
    status, out, _ = run(capsys, monkeypatch, "show", "padre", "degree=3", "n=64", "--threads", "1", columns=columns)
    assert status == 0
    readable(out, columns, "floor, 1 thread", "parameters")


@pytest.mark.parametrize("columns", [60, 80])
def test_compare_s_table_fits(capsys, monkeypatch, tmp_path, columns):
    content = comparison()

    class Stub:
        def __init__(self):
            self.content = content

    monkeypatch.setattr("polymix.workflows.compare.run.compare", lambda *a, **k: Stub())
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, monkeypatch, "compare", "--out", "out", columns=columns)
    assert status == 0
    readable(out, columns, "linear_floor", LONG if columns == 60 else "pom")
    assert "The largest class, b, has 95.0 %" in " ".join(out.split()), "the share of the majority beside accuracies"
    assert "2 classes: a, b" in " ".join(out.split())


@pytest.mark.parametrize("columns", [60, 80])
def test_bench_s_tables_fit_and_it_compares_its_own_folders(capsys, monkeypatch, tmp_path, columns):
    for name, factor in (("a", 1), ("b", 2)):
        rows = [
            bench_row(mixer, factor * s, tokens=n) for mixer in (LONG, "pom") for n, s in ((256, 0.0012), (4096, 1.2))
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(bench_content(*rows)))
    monkeypatch.chdir(tmp_path)
    folders = run(capsys, monkeypatch, "bench", "--compare", "a", "b", columns=columns)
    assert folders[0] == 1, "a regression"
    assert "slower" in folders[1]
    readable(folders[1], columns, LONG if columns == 60 else "pom")
    files = run(capsys, monkeypatch, "bench", "--compare", "a/results.json", "b/results.json", columns=columns)
    assert files[0] == 1
    assert files[1].replace("/results.json", "").split() == folders[1].split()


def test_bench_prints_its_results_in_60_columns(capsys, monkeypatch, tmp_path):
    class Stub:
        content = bench_content(bench_row(LONG, 0.0012), bench_row("pom", 80.2, pass_="training"))

    monkeypatch.setattr("polymix.workflows.bench.run.bench", lambda *a, **k: Stub())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    status, out, _ = run(capsys, monkeypatch, "bench", "--out", "out", "--mixers", "pom")
    assert status == 0
    readable(out, 60, LONG)
    assert "80,200" in out, "no 8.02e+04"


def test_recommend_prints_in_60_columns(capsys, monkeypatch):
    arguments = ("--shape", "64x16", "--mixers", f"pom,{LONG}", "--seconds", "0.1", "--threads", "1")
    status, out, _ = run(capsys, monkeypatch, "recommend", *arguments)
    assert status == 0
    readable(out, 60, LONG)
    assert "attention" in out


def test_lens_prints_in_60_columns(capsys, monkeypatch):
    status, out, _ = run(capsys, monkeypatch, "lens", "pom", "dim=4", "shape=1x4x4")
    if status:
        status, out, _ = run(capsys, monkeypatch, "lens", "pom", "dim=4")
    assert status == 0
    readable(out, 60, "degree")


@pytest.mark.parametrize("verb", ["compare", "bench", "recommend"])
def test_a_device_that_is_missing_is_one_short_line(capsys, monkeypatch, tmp_path, verb):
    """PyTorch's own message lists fifty dispatch keys."""
    monkeypatch.chdir(tmp_path)
    words = ("--shape", "64x16") if verb == "recommend" else ()
    status, out, err = run(capsys, monkeypatch, verb, "--device", "mps", *words)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "device" in err and "'mps'" in err and len(err) < 200


LOADED = """
import sys, runpy
sys.orig_argv = [sys.executable, {command}, *{words}]
sys.argv = ["polymix", *{words}]
try:
    runpy.run_module("polymix", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = [name for name in ("torch", "numpy", "matplotlib", "lightning", "jinja2") if name in sys.modules]
print("LOADED", *heavy)
"""


@pytest.mark.parametrize("words", [["--help"], ["bench", "-h"], [], ["--version"]])
@pytest.mark.parametrize("command", ['"/usr/bin/polymix"', '"-m", "polymix"', '"-m", "polymix.cli"'])
def test_help_does_not_load_torch(words, command):
    """Loading PyTorch takes seconds; help is printed before."""
    if command != '"/usr/bin/polymix"' and words != ["--help"]:
        pytest.skip("one way to ask is enough for the other ways to start")
    code = LOADED.format(command=command, words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED", "modules that help does not need"


def test_every_name_of_the_package_is_there():
    assert not [name for name in polymix.__all__ if getattr(polymix, name, None) is None]


def test_every_verb_s_help_fits_60_columns(capsys, monkeypatch):
    for verb in VERBS:
        status, out, _ = run(capsys, monkeypatch, verb, "--help")
        assert status == 0 and "Usage" in out


def test_the_data_line_of_few_and_of_many_classes():
    content = make({"softmax": [0.9]}, {"softmax": [1, 2, 3, 4]})
    content["answer"] = answer(content)
    assert data_line(content["data"]).endswith("2 classes: a, b. The largest class, b, has 50.0 % of the test samples.")
    many = {**content["data"], "classes": [f"c{i}" for i in range(99)], "majority": {"name": "c1", "share": 0.5}}
    assert "c11 …" in data_line(many) and "50.0 %" in data_line(many)
