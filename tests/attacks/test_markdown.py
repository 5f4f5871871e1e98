"""Names of the user's files and classes in Markdown: they are shown, and are no HTML, heading, link or cell."""

import re

import pytest

from polymix.cli import main
from polymix.pages import fenced, markdown, table_line
from tests.domains.box_files import photo

EVIL = "<img src=x onerror=alert(1)> [a](http:x) ![b](c) `d` | $e_$ e\n# f"


def dangers(text):
    """What of EVIL would be more than text."""
    return [word for word in ("<img", "\n# f", " [a](", "![b]") if word in text] + re.findall(r"[^\\]\| \$", text)


def test_a_name_is_shown_and_does_nothing():
    assert dangers(EVIL) and not dangers(markdown(EVIL)) and "\n" not in markdown(EVIL)
    assert markdown("vit_tiny, 93.8 % (1.5 ×)") == "vit_tiny, 93.8 % (1.5 ×)", "plain names stay as they are"
    assert markdown("# a") == "\\# a" and table_line(["a|b", 1]) == "| a\\|b | 1 |"


def test_code_cannot_end_its_block():
    assert fenced("a\n```\n# b", "python") == "````python\na\n```\n# b\n````"


def command(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    assert not stop.value.code


@pytest.mark.slow
@pytest.mark.draws
def test_classes_with_such_names_in_the_report_and_the_model_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, name in enumerate((EVIL.replace("/", ""), "b", "c")):
        for number in range(6):
            photo(tmp_path / "data" / name / f"{number}-{place}.png", (8, 8))
    command("train", "classify", "--data", "data", "--image-size", 8, "--patch-size", 4, "--dim", 16, "--depth", 1, "--steps", 2,
            "--batch-size", 4, "--control", "False", "--out", "run", "--mixer", "softmax")  # fmt: skip
    command("convert", "--model", "model.py:build", "--data", "data", "--seconds", "0.01", "--lengths", 1, "--image-size", 8,
            "--out", "card")  # fmt: skip
    for file in ("run/report.md", "card/README.md"):
        text = (tmp_path / file).read_text()
        outside = re.sub(r"(?ms)^```+python.*?^```+$", "", text)
        assert not dangers(outside), outside
    assert "onerror" in (tmp_path / "card" / "README.md").read_text()


@pytest.fixture(autouse=True)
def model(tmp_path):
    (tmp_path / "model.py").write_text(
        "from polymix import SoftmaxConfig\nfrom polymix.models import VisionTransformer\n\n\ndef build():\n    import torch\n\n"
        "    model = VisionTransformer(SoftmaxConfig(heads=2), image_size=8, patch_size=4, dim=8, depth=1, classes=3)\n"
        "    return model, torch.randn(2, 3, 8, 8)\n"
    )
