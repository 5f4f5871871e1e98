"""The report and the pictures say what the results say."""

from pathlib import Path

import pytest

from polymix.measure.roofline import Ceiling
from polymix.workflows.bench.report import next_commands, write_report
from polymix.workflows.bench.tables import markdown, table, views
from tests.workflows.bench.content import SETTINGS, content, row

ROWS = (
    row("softmax", 2e-3, attention=1.0, tokens=256), row("pom", 1e-3, attention=2.0, tokens=256, floor=8e-4),
    row("softmax", 80e-3, attention=1.0), row("pom", 10e-3, attention=8.0, floor=8e-3),
    row("<b>", stopped="took 11 s & more"), row("pom", 36e-3, floor=8e-3, pass_="training"),
    row("softmax", stopped="cannot", pass_="step"), row("pom", 1e-4, floor=1, pass_="step") | {"floor_ratio": None, "state_bytes": 1536},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.draws
def test_report_is_one_file_that_needs_nothing_else(tmp_path):
    html = write_report(content(*ROWS), tmp_path).read_text()
    assert html.count("<svg role=") == 4, "two pictures, each wide and for a phone"
    assert "http" not in html
    assert "&lt;b&gt;, forward, 4,096 tokens, float32: took 11 s &amp; more" in html, "names must be escaped"
    assert "Not finished" not in html
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latency.png", "report.html", "roofline.png"]


def test_report_when_everything_stopped_or_nothing_finished(tmp_path):
    html = write_report(content(row(stopped="no"), row("softmax", stopped="no"), finished=False), tmp_path).read_text()
    assert "Not finished" in html
    html = write_report({**content(finished=False), "ceilings": []}, tmp_path).read_text()
    assert "Not finished" in html


def test_tables():
    tables = {title.split(",")[0]: rows for title, rows in views(content(*ROWS))}
    assert list(tables) == ["forward", "training", "step"]
    headings, lines = table(tables["forward"])
    shown = [dict(zip(headings, line, strict=True)) for line in lines]
    pom = next(its for its in shown if its["mixer"] == "pom" and its["tokens"] == "4,096")
    assert pom == {"mixer": "pom", "tokens": "4,096", "ms": "10", "±%": "1", "÷ floor": "1.25", "attn ÷ it": "8.00",
                   "% FLOP/s": "10", "% bytes/s": "1", "peak MiB": "1.0", "resident MiB": "2.0"}  # fmt: skip
    assert shown[-1]["ms"] == "stopped"
    headings, lines = table(tables["step"])
    assert dict(zip(headings, lines[1], strict=True))["state KiB"] == "1.5"
    narrow, lines = table(tables["forward"], narrow=True)
    widths = [
        max(len(part) for cell in column for part in cell.split("\n")) for column in zip(narrow, *lines, strict=True)
    ]
    assert sum(widths) + 2 * len(widths) <= 72, "a terminal of 80 characters has room for the longer names of mixers"


def test_markdown():
    lines = markdown(content(*ROWS)).splitlines()
    assert "float32, 2 threads, 192 channels, batch 1; a cpu" in lines[0]
    assert lines[2].startswith("| mixer | ms at 4,096 | ÷ floor | attention ÷ it at 256 | attention ÷ it at 4,096 |")
    assert "| pom | 10 | 1.25 | 2.00 | 8.00 | 1.50 | 1.0 |" in lines
    assert len({line.count("|") for line in lines[2:]}) == 1, "every line of a table has its columns"


def test_roof():
    ceiling = Ceiling("float32", 2, 100.0, 10.0)
    assert [ceiling.roof(x) for x in (1, 10, 100)] == [10.0, 100.0, 100.0]


def test_the_command_for_longer_inputs_measures_the_same_otherwise():
    """It kept the mixers alone: a look at bfloat16 on a GPU was followed up in float32 on the CPU."""
    settings = {**SETTINGS, "quick": True, "tokens": [256], "seconds": 0.05, "dims": [64, 192], "dtypes": ["bfloat16"],
                "device": "cuda:1"}  # fmt: skip
    command = next_commands({"settings": settings, "finished": True}, Path("my out"))[0][1]
    asked = "--mixers 'pom,<b>' --dims 64,192 --dtypes bfloat16 --passes forward --device cuda:1"
    assert command == f"polymix bench {asked} --out 'my out'-full"
