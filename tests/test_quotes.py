"""What README and the pages quote from the papers is in published.toml: no figure of a paper is typed from memory."""

import re
from pathlib import Path

import pytest

from polymix.train.published import Claim, Layer, cells, of, papers

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
QUOTES = re.compile(
    r"\b(paper|papers|prints?|printed|published|reports|Tables?)\b|\b(PADRe|PoM|Poly-NL|Poly-SA|QT-ViT)'s\b"
)
PLACES = re.compile(
    r"\b(Tables?|Sections?|Sec\.|Eqs?\.|App\.|Supp\.|Fig\.|Lemma|Proposition)\s[A-Z]?\.?\d+(\.\d+)*\w?"
    r"((,| and|–|-)\s?\d+(\.\d+)*\w?)*",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<![\w.,-])\d{1,3}(?:,\d{3})+(?!\w|,\d)|(?<![\w.,-])\d+(?:\.\d+)?(?!\w)")
# Numbers that stand in such sentences and are no figures of a paper: ours, sizes, settings of the authors' code.
OURS: dict[str, set[float]] = {
    # counted
    "docs/convert/index.md": {0.04, 0.24, 0.35, 0.45, 1.04, 1.15, 1.23, 1.38, 1.44, 1.81, 3, 4, 4.2, 5.03, 8, 12, 15.67, 197},
    "docs/convert/timm.md": {224, 1000},  # pixels and classes
    "docs/convert/torchvision.md": {0.72},  # counted
    "docs/domains/depth.md": {2014},  # a year
    "docs/domains/detect.md": {800, 1333},  # pixels
    "docs/domains/detect3d.md": {255},  # of nuScenes' files
    "docs/domains/faces.md": {16, 406, 640},  # our settings
    "docs/domains/instances.md": {16, 26, 800},  # torchvision's reference
    "docs/domains/satellite.md": {1.657},  # counted
    "docs/domains/speech.md": {4.52, 11.33, 100, 960, 2603.00683},  # of another paper, which is linked there
    "docs/language/index.md": {200, 3170},  # counted
    "docs/research/default-data.md": {0.001, 0.0018},  # measured
    "docs/research/hexagon.md": {8},  # a Snapdragon
    "docs/research/kernels.md": {2.1, 8.4, 96, 192},  # counted
    "docs/research/published.md": {8, 16, 250, 227344},  # sizes of the authors' code
    "docs/research/scaling.md": {154_000},  # pictures
    "docs/speed.md": {1.2},  # measured
}  # fmt: skip


def sentences(page):
    """The sentences of a page, without code, links and tables; and not the table of all printed figures."""
    page = re.sub(
        r"```.*?```|<!-- table: (published|options|mixer)[\w-]* -->.*?<!-- /table -->", "", page, flags=re.DOTALL
    )
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#*] )", page):
        text = " ".join(paragraph.split())
        if not text.startswith("|"):
            text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
            yield from re.split(r"(?<=[.;!?])\s+(?=[A-Z0-9(\[*])", PLACES.sub(r"\1", text))


def figures(names):
    """All numbers that these papers print: as they stand in the file, in per cent, and in thousands."""
    found = set()
    for entry in (entry for name in names for entry in of(name)):
        if isinstance(entry, Claim):
            found |= set(entry.values)
        elif isinstance(entry, Layer):
            found |= {entry.tokens, entry.channels, *entry.figures.values()}
        else:
            shares = {round(100 * value, 6) for value in entry.metrics.values()}
            found |= {*entry.metrics.values(), *shares, *entry.cost.values()}
        found |= numbers(entry.note)
    return found


def numbers(text):
    return {float(number.replace(",", "")) for number in NUMBER.findall(text)}


def unknown(page):
    """The numbers of sentences that quote a paper and that no paper prints: of the papers that are named, if any are."""
    wrong = set()
    for sentence in sentences(page):
        if QUOTES.search(sentence):
            named = [name for name in papers() if re.search(rf"\b{name}\b", sentence)] or papers()
            wrong |= numbers(sentence) - figures(named)
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_quoted_figure_is_in_the_file(path):
    ours = OURS.get(str(path.relative_to(ROOT)), set())
    found = unknown(path.read_text("utf-8"))
    assert not found - ours, "quoted as a paper's, and in no row of published.toml"
    assert not ours - found, "no longer on the page: take it out of OURS"


@pytest.mark.parametrize(("text", "wrong"), [
    ("PoM's Table 5 has a FID of 17.6.", set()), ("PoM's Table 5 has a FID of 17.5.", {17.5}),
    ("The paper prints 0.28 G\nand 5.4 M.", set()), ("The paper prints 0.271 G.", {0.271}),
    ("PADRe's paper: 76.9 % at degree 4.", set()), ("PoM's paper: 76.9 %.", {76.9}),
    ("We measure 17.5. The paper prints 17.6.", set()), ("In Section 4.3 the paper measures 2,304 tokens.", set()),
    ("`--set steps=777` is as published.", set()),
], ids=str)  # fmt: skip
def test_an_invented_figure_is_found(text, wrong):
    assert unknown(text) == wrong


def test_no_row_of_the_table_is_without_figures():
    assert all(line[4] for paper in papers() for line in cells(of(paper)))
