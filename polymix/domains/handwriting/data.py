"""Images of lines with their texts, as the model takes them; the files are read by `lines`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.handwriting.cutting import MARGIN_LINES, Margins, margins_of
from polymix.domains.handwriting.lines import Line, Reading, pages_of, read_lines
from polymix.domains.handwriting.recipe import STRIDE, HandwritingRecipe
from polymix.domains.handwriting.synthetic import hidden_of, synthetic
from polymix.errors import DataError
from polymix.train.data.ctc import encoded, tokens_needed
from polymix.train.data.pictures import TURNED, open_picture, read_header, resized, turn_box
from polymix.train.data.problems import Problems
from polymix.train.data.synthetic import cached
from polymix.train.task import Data, Say, silent

CACHE_BYTES = 1 << 29  # of images that stay in memory; the others are read again
WHITE = 255
MIN_WIDTH_SHARE = 0.5  # of its width that a line keeps; --check lists lines that are squeezed more
Page = tuple[Line, ...]


@dataclass(frozen=True)
class Sample:
    """A line, or lines of a page side by side. hidden: places in the text whose ink is covered."""

    image: Tensor  # (1, height, W), 0 to 1
    text: str
    hidden: tuple[int, ...]
    lines: int = 1


class Pages(Dataset[Sample]):
    """Pages of lines as samples. Images are scaled to the height, joined and padded with white on the right."""

    def __init__(self, pages: Sequence[Page], recipe: HandwritingRecipe) -> None:
        self.pages, self.recipe = list(pages), recipe
        self._cache: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, place: int) -> Sample:
        page = self.pages[place]
        pixels = self._cache.get(place)
        if pixels is None:
            pixels = self._read(page)
            if len(self._cache) * pixels.nbytes < CACHE_BYTES:
                self._cache[place] = pixels
        hidden, start = [], 0
        for line in page:
            hidden += [start + at for at in line.hidden]
            start += len(line.text) + 1
        return Sample(paper_of(pixels), " ".join(line.text for line in page), tuple(hidden), len(page))

    def _read(self, page: Page) -> np.ndarray:
        return join([fitted(grey(line), self.recipe) for line in page], self.recipe)

    def keep_all(self) -> Pages:
        """Read all images now, because their files are about to go; returns itself."""
        self._cache = {place: self._read(page) for place, page in enumerate(self.pages)}
        return self


@dataclass(frozen=True)
class HandwritingData(Data):
    """The lines of a run, and the alphabet: class c of the model is characters[c - 1]."""

    name: str
    characters: str
    train: Pages
    test: Pages
    valid: Pages | None = None  # lines to choose by
    margins: Margins | None = None  # of the training's lines, above and below; known to loaded models alone

    def summary(self) -> dict[str, Any]:
        few = (fitted(grey(page[0]), self.train.recipe) for page in self.train.pages[:MARGIN_LINES])
        return {"name": self.name, "characters": self.characters, "train": len(self.train), "test": len(self.test),
                "margins": margins_of(few)}  # fmt: skip

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """A batch: images (B, 1, H, W), all labels in a row, and how many each line has."""
        labels = [self.encode(sample.text) for sample in samples]
        return {
            "images": torch.stack([sample.image for sample in samples]),
            "labels": torch.tensor([label for line in labels for label in line], dtype=torch.long),
            "lengths": torch.tensor([len(line) for line in labels]),
            "texts": [sample.text for sample in samples],
            "hidden": [sample.hidden for sample in samples],
            "lines": sum(sample.lines for sample in samples),
        }

    def encode(self, text: str, entry: str = "") -> list[int]:
        """The class of each character. Raises DataError for one that the model does not know, naming the entry."""
        return encoded(text, self.characters, entry)

    def fingerprint(self) -> list[Any]:
        lines = [f"{line.image.name}\t{line.text}" for page in self.train.pages for line in page]
        return [len(lines), zlib.crc32("\n".join(lines).encode("utf-8", "surrogateescape"))]


def problems_of(recipe: HandwritingRecipe, source: str, say: Say = silent) -> list[str]:
    """Every problem of the data: of lists and texts, images that cannot be read, and lines that do not fit.

    say: is told of what could be meant otherwise.
    """
    try:
        reading = read_lines(source, recipe.layout, err=recipe.err, lists=recipe.lists)
    except DataError as error:
        return [str(error)]
    problems = reading.problems
    for line in {(line.image, line.box): line for split in reading.lines.values() for line in split}.values():
        with problems.noting():
            high, wide = grey(line).shape
            if line.box is not None and read_header(line.image).fits_both(line.size):
                problems.note(line.image, TURNED)
            share = recipe.width * high / (wide * recipe.height)
            if share < MIN_WIDTH_SHARE:
                problems.add(line.entry, "", squeezed(line, share, recipe))
    _check_lengths(pages_of(reading.lines["train"], recipe.lines), recipe, problems)
    problems.tell(say)
    return problems.lines


def squeezed(line: Line, share: float, recipe: HandwritingRecipe) -> str:
    """What is said of a line that keeps a share of its width."""
    width = STRIDE * math.ceil(recipe.width / share / STRIDE)
    return f"{line.image.name} is squeezed to {share:.0%} of its width; width={width} would hold it"


def _report_squeezed(reading: Reading, recipe: HandwritingRecipe, say: Callable[[str], None]) -> None:
    """Says how many lines are wider than the model takes, and which is the widest. Reads the images' headers alone."""
    shares = {}
    for line in dict.fromkeys((*reading.lines["train"], *reading.lines["test"])):
        with reading.problems.noting():
            wide, high = _size(line)
            shares[line] = recipe.width * high / (wide * recipe.height)
    wider = {line: share for line, share in shares.items() if share < 1}
    if wider:
        widest = min(wider, key=lambda line: wider[line])
        say(f"{len(wider):,} of {len(shares):,} lines are wider than width={recipe.width}. The widest, {widest.entry}: "
            f"{squeezed(widest, wider[widest], recipe)}.")  # fmt: skip


def _size(line: Line) -> tuple[int, int]:
    """Width and height of a line in pixels. Raises DataError for a file that is no image."""
    box = upright(line).box
    if box is not None:
        return box[2] - box[0], box[3] - box[1]
    header = read_header(line.image, f"{line.image} ({line.entry})")
    return header.width, header.height


def load(recipe: HandwritingRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> HandwritingData:
    """The lines of a recipe: its folder's, or synthetic cheques, which `folder` keeps."""
    if recipe.data is None:
        settings = {"seed": recipe.seed, "train": recipe.synthetic_train, "test": recipe.synthetic_test,
                    "height": recipe.height, "width": recipe.width}  # fmt: skip
        source = cached(folder, "handwriting", settings, lambda place: synthetic(place, **settings))
        say(f"Synthetic cheques, in the layout of HTR-VT: {source}")
        reading, name = read_lines(source, "htr-vt"), "synthetic cheques"
        hidden = hidden_of(source)
        reading.lines = {split: [replace(line, hidden=hidden[line.image.name]) for line in part]
                         for split, part in reading.lines.items()}  # fmt: skip
    else:
        reading, name = read_lines(recipe.data, recipe.layout, err=recipe.err, lists=recipe.lists), recipe.data
    lines = reading.lines
    train, test, valid = (Pages(pages_of(lines[split], recipe.lines), recipe) for split in ("train", "test", "val"))
    _check_lengths(train.pages, recipe, reading.problems)
    if recipe.data is not None and not reading.problems:
        _report_squeezed(reading, recipe, say)
    reading.problems.settle()
    characters = "".join(sorted({c for part in lines.values() for line in part for c in line.text} | {" "}))
    return HandwritingData(name, characters, train, test, None if lines["val"] == lines["test"] else valid)


def validation(data: HandwritingData) -> HandwritingData:
    """The lines of the split val in place of the test's. Raises DataError where the data has one of the two alone."""
    if data.valid is None:
        got = f"{data.name} without lines in both val and test"
        raise DataError("data", got, "lines to choose by with keep='best'", "Pass --set keep=last.")
    return replace(data, test=data.valid)


def for_evaluation(
    recipe: HandwritingRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> HandwritingData:
    """The lines of a recipe with the alphabet of a trained model; whole: all lines instead of the test lines."""
    with TemporaryDirectory(prefix="polymix-cheques-") as scratch:
        data = load(recipe, Path(scratch), say)
        pages = [*data.train.pages, *data.test.pages] if whole else data.test.pages
        chosen = HandwritingData(data.name, str(summary["characters"]), data.train, Pages(pages[:limit], recipe))
        for page in chosen.test.pages:
            for line in page:
                chosen.encode(line.text, line.entry)
        return replace(chosen, test=chosen.test.keep_all()) if recipe.data is None else chosen


def from_summary(recipe: HandwritingRecipe, summary: Mapping[str, Any]) -> HandwritingData:
    """The alphabet and the margins without lines."""
    empty, margins = Pages([], recipe), summary.get("margins")
    return HandwritingData(
        str(summary["name"]), str(summary["characters"]), empty, empty, None, margins and tuple(margins)
    )


def upright(line: Line) -> Line:
    """A line of a page with box and outline in the pixels of the page as it is shown, which EXIF may have turned.

    Raises DataError: the page has another size than its file says.
    """
    if line.box is None or line.size is None:
        return line
    header = read_header(line.image, f"{line.image} ({line.entry})")
    orientation = header.turn_for(line.size)
    if orientation is None:
        got = f"{line.image} of {header.width} × {header.height} pixels ({line.entry})"
        allowed = "an image of {} × {} pixels, as its PAGE file says".format(*line.size)
        raise DataError("data", got, allowed, "Restore the image.")

    def turned(box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        x1, y1, x2, y2 = (int(side) for side in turn_box(box, orientation, header.width, header.height))
        return x1, y1, x2, y2

    outline = tuple(turned((x, y, x + 1, y + 1))[:2] for x, y in line.outline)
    return replace(line, box=turned(line.box), outline=outline)


def grey(line: Line) -> np.ndarray:
    """The grey values (H, W) of a line, uint8. Raises DataError for a file that is no image."""
    from PIL import Image, ImageDraw

    line = upright(line)
    image = open_picture(line.image, "L", f"{line.image} ({line.entry})")
    pixels = np.asarray(image if line.box is None else image.crop(line.box))
    if not pixels.size:
        raise DataError("data", f"{line.image.name} without pixels ({line.entry})", "an image", "Correct its box.")
    if line.outline and line.box:
        inside = Image.new("1", pixels.shape[::-1])
        ImageDraw.Draw(inside).polygon([(x - line.box[0], y - line.box[1]) for x, y in line.outline], fill=1)
        pixels = np.where(np.asarray(inside), pixels, WHITE).astype(np.uint8)
    return pixels


def fitted(pixels: np.ndarray, recipe: HandwritingRecipe) -> np.ndarray:
    """A line scaled to the height with its ratio, and squeezed where it is wider than the width."""
    high, wide = pixels.shape
    width = min(max(int(wide * recipe.height / high), 1), recipe.width)
    return resized(torch.tensor(pixels)[None], recipe.height, width, recipe.interpolation)[0].numpy()


def join(parts: Sequence[np.ndarray], recipe: HandwritingRecipe) -> np.ndarray:
    """Lines side by side, padded with white to the width of `recipe.lines` lines."""
    wide = recipe.lines * recipe.width
    paper = np.full((recipe.height, wide), WHITE, dtype=np.uint8)
    at = 0
    for part in parts:
        paper[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return paper


def paper_of(pixels: np.ndarray) -> Tensor:
    """(1, H, W) from 0 (ink) to 1 (paper)."""
    return torch.tensor(pixels)[None].float() / WHITE


def _check_lengths(pages: Sequence[Page], recipe: HandwritingRecipe, problems: Problems) -> None:
    """Notes the pages whose text needs more tokens than the lines have."""
    for page in pages:
        text = " ".join(line.text for line in page)
        tokens = tokens_needed(text)
        if tokens > recipe.tokens:
            problems.add(page[0].entry, "", f"a text of {len(text)} characters needs {tokens} tokens, and "
                         f"width={recipe.width} gives {recipe.tokens}: raise width to {STRIDE * tokens} or more, "
                         "or split the line")  # fmt: skip
