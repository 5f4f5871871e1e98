"""What a run of any task leaves: the page for people, and the same as Markdown."""

import pytest
from matplotlib.figure import Figure

from polymix.tasks.report import curve, write_report
from tests.browser import PAPER, needs_browser, opened

ABOUT = {
    "describe": "Two <classes>.",
    "usage": ["import torch"],
    "next": [("Go on:", "polymix compare --data 'my photos'")],
}
CONTENT = {
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


def test_accuracies_are_drawn_in_per_cent():
    assert curve(ROWS, False).axes[1].lines[0].get_ydata().tolist() == [81.25, 93.75]
    assert "%" in curve(ROWS, True).axes[1].get_title()


@needs_browser
def test_in_a_browser(folder):
    with opened(folder / "report.html", folder / "profile") as page:
        for view in (
            {"width": 1200},
            {"width": 1200, "dark": True},
            {"width": 400},
            {"width": PAPER, "media": "print"},
        ):
            found = page.see(**view)
            assert not found["overflow"] and not found["faint"] and not found["small"], (view, found)
            assert found["columns"] == ["step", "accuracy", "val loss"] and found["charts"] == 1
