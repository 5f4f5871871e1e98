"""Images of lines with their texts, as the model takes them; the files are read by `lines`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.errors import DataError
from polymix.models.htr_vt import STRIDE
from polymix.tasks.handwriting import lines as reading
from polymix.tasks.handwriting.layout import ENOUGH, Margins, margins_of
from polymix.tasks.handwriting.lines import Line, pages_of, read_lines
from polymix.tasks.handwriting.recipe import HandwritingRecipe
from polymix.tasks.handwriting.script import write_data_set

LAYOUTS = tuple(reading.LAYOUTS)
KEPT = 1 << 29  # bytes of images that are kept in memory; the others are read again
WHITE = 255
LEAST_SHARE = 0.5  # of its width that a line keeps; `check` lists lines that are squeezed more
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
        self._kept: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, place: int) -> Sample:
        page = self.pages[place]
        pixels = self._kept.get(place)
        if pixels is None:
            pixels = self._read(page)
            if len(self._kept) * pixels.nbytes < KEPT:
                self._kept[place] = pixels
        hidden, start = [], 0
        for line in page:
            hidden += [start + at for at in line.hidden]
            start += len(line.text) + 1
        return Sample(as_tensor(pixels), " ".join(line.text for line in page), tuple(hidden), len(page))

    def _read(self, page: Page) -> np.ndarray:
        return join([fitted(grey(line), self.recipe) for line in page], self.recipe)

    def keep_all(self) -> Pages:
        """Read all images now, because their files are about to go; returns itself."""
        self._kept = {place: self._read(page) for place, page in enumerate(self.pages)}
        return self


@dataclass
class Lines:
    """The lines of a run, and the alphabet: class c of the model is characters[c - 1]."""

    name: str
    characters: str
    train: Pages
    test: Pages
    valid: Pages | None = None  # lines to choose by
    margins: Margins | None = None  # of the training's lines, above and below; known to loaded models alone

    def summary(self) -> dict[str, Any]:
        few = (fitted(grey(page[0]), self.train.recipe) for page in self.train.pages[:ENOUGH])
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
        unknown = [character for character in text if character not in self.characters]
        if unknown:
            got = f"the character {unknown[0]!r} in {text[:40]!r}" + (f" ({entry})" if entry else "")
            raise DataError("--data", got, f"the model's: {self.characters!r}", "Train on texts that have it.")
        return [self.characters.index(character) + 1 for character in text]

    def fingerprint(self) -> list[Any]:
        lines = [(line.image.name, line.text) for page in self.train.pages for line in page]
        return [len(lines), hash_of(lines)]


def hash_of(lines: Sequence[tuple[str, str]]) -> int:
    """A checksum of names and texts."""
    return zlib.crc32("\n".join(f"{name}\t{text}" for name, text in lines).encode())


def made(folder: Path, seed: int = 0, **options: Any) -> None:
    """Writes cheques in the layout "htr-vt". Options: train_lines, test_lines, height, width."""
    defaults = HandwritingRecipe()
    wanted = {
        name: options.get(name, getattr(defaults, name)) for name in ("train_lines", "test_lines", "height", "width")
    }
    counts = {"train": wanted["train_lines"], "test": wanted["test_lines"], "val": wanted["test_lines"]}
    write_data_set(folder, counts, height=wanted["height"], width=wanted["width"], seed=seed)


def check(folder: str | Path, layout: str | None = None, recipe: HandwritingRecipe | None = None) -> list[str]:
    """Every problem of a data set: of its lists, images that cannot be read, and lines that do not fit the recipe."""
    recipe = recipe or HandwritingRecipe()
    try:
        found = read_lines(folder, layout, strict=False, err=recipe.err, lists=recipe.lists)
    except DataError as error:
        return [str(error)]
    problems = list(found.problems)
    for line in {(line.image, line.box): line for split in found.lines.values() for line in split}.values():
        try:
            pixels = grey(line)
        except DataError as error:
            problems.append(str(error))
            continue
        share = recipe.width / (pixels.shape[1] * recipe.height / pixels.shape[0])
        if share < LEAST_SHARE:
            problems.append(str(_squeezed(line, share, recipe)))
    for page in pages_of(found.lines["train"], recipe.lines):
        try:
            _check_length(page, recipe)
        except DataError as error:
            problems.append(str(error))
    return problems


def _squeezed(line: Line, share: float, recipe: HandwritingRecipe) -> DataError:
    got = f"{line.image.name}, which is squeezed to {share:.0%} of its width ({line.entry})"
    allowed = f"lines that fit {recipe.width} pixels at height={recipe.height}"
    return DataError("--data", got, allowed, f"Raise width to {STRIDE * math.ceil(recipe.width / share / STRIDE)}.")


def _tell_squeezed(pages: Sequence[Page], recipe: HandwritingRecipe, say: Callable[[str], None]) -> None:
    """Says how many lines are wider than the model takes, and which is the widest. Reads the images' headers alone."""
    shares = {}
    for line in (line for page in pages for line in page):
        wide, high = _size(line)
        shares[line] = recipe.width * high / (wide * recipe.height)
    wider = {line: share for line, share in shares.items() if share < 1}
    if wider:
        widest = min(wider, key=lambda line: wider[line])
        most = _squeezed(widest, wider[widest], recipe)
        say(f"{len(wider):,} of {len(shares):,} lines are wider than width={recipe.width}. {most}")


def _size(line: Line) -> tuple[int, int]:
    """Width and height of a line in pixels. Raises DataError for a file that is no image."""
    if line.box is not None:
        return line.box[2] - line.box[0], line.box[3] - line.box[1]
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(line.image) as file:
            return file.size
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise _no_image(line, error) from error


def _no_image(line: Line, error: Exception) -> DataError:
    got = f"{line.image.name}, which cannot be read ({line.entry}: {error})"
    return DataError("--data", got, "an image", "Replace the file, or remove the entry.")


def load(recipe: HandwritingRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> Lines:
    """The lines of a recipe: its folder's, or made cheques, which `folder` keeps."""
    if recipe.data is None:
        source = folder / f"cheques-{recipe.train_lines}-{recipe.test_lines}-{recipe.height}x{recipe.width}"
        if not (source / "hidden.tsv").exists():  # written last
            say(f"Writing {recipe.train_lines + recipe.test_lines:,} cheques to {source}")
            made(source, 0, train_lines=recipe.train_lines, test_lines=recipe.test_lines, height=recipe.height,
                 width=recipe.width)  # fmt: skip
        lines = _with_hidden(source, read_lines(source, "htr-vt").lines)
        name = "made cheques"
    else:
        lines, name = read_lines(recipe.data, recipe.layout, err=recipe.err, lists=recipe.lists).lines, str(recipe.data)
    characters = "".join(sorted({c for part in lines.values() for line in part for c in line.text} | {" "}))
    train, test, valid = (Pages(pages_of(lines[split], recipe.lines), recipe) for split in ("train", "test", "val"))
    for page in train.pages:
        _check_length(page, recipe)
    if recipe.data is not None:
        _tell_squeezed([*train.pages, *test.pages], recipe, say)
    return Lines(name, characters, train, test, None if lines["val"] == lines["test"] else valid)


def validation(recipe: HandwritingRecipe, data: Lines) -> Lines:
    """The lines of the split val in place of the test's. Raises DataError where the data has one of the two alone."""
    if data.valid is None:
        got = f"{data.name} without lines in both val and test"
        raise DataError("--data", got, "lines to choose by with keep='best'", "Pass --set keep=last.")
    return replace(data, test=data.valid)


def for_evaluation(
    recipe: HandwritingRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> Lines:
    """The lines of a recipe with the alphabet of a trained model; whole: all lines instead of the test lines."""
    with TemporaryDirectory(prefix="polymix-cheques-") as scratch:
        data = load(recipe, Path(scratch), say)
        pages = [*data.train.pages, *data.test.pages] if whole else data.test.pages
        known = Lines(data.name, str(summary["characters"]), data.train, Pages(pages[:limit], recipe))
        for page in known.test.pages:
            for line in page:
                known.encode(line.text, line.entry)
        return replace(known, test=known.test.keep_all()) if recipe.data is None else known


def from_summary(recipe: HandwritingRecipe, summary: Mapping[str, Any]) -> Lines:
    """The alphabet and the margins without lines."""
    empty, margins = Pages([], recipe), summary.get("margins")
    return Lines(str(summary["name"]), str(summary["characters"]), empty, empty, None, margins and tuple(margins))


def grey(line: Line) -> np.ndarray:
    """The grey values (H, W) of a line, uint8. Raises DataError for a file that is no image."""
    from PIL import Image, ImageDraw, UnidentifiedImageError

    try:
        with Image.open(line.image) as file:
            image = file if line.box is None else file.crop(line.box)
            if image.mode.startswith("I") or image.mode == "F":  # 16-bit: PIL would clip it
                values = np.asarray(image, dtype=np.float64)
                low, high = float(values.min()), float(values.max())
                return ((values - low) / ((high - low) or 1.0) * WHITE).astype(np.uint8)
            pixels = np.asarray(image.convert("L"))
    except (OSError, UnidentifiedImageError, ValueError) as error:
        raise _no_image(line, error) from error
    if not pixels.size:
        raise DataError("--data", f"{line.image.name} without pixels ({line.entry})", "an image", "Correct its box.")
    if line.outline and line.box:
        inside = Image.new("1", pixels.shape[::-1])
        ImageDraw.Draw(inside).polygon([(x - line.box[0], y - line.box[1]) for x, y in line.outline], fill=1)
        pixels = np.where(np.asarray(inside), pixels, WHITE).astype(np.uint8)
    return pixels


def fitted(pixels: np.ndarray, recipe: HandwritingRecipe) -> np.ndarray:
    """A line scaled to the height with its ratio, and squeezed where it is wider than the width."""
    from PIL import Image

    high, wide = pixels.shape
    width = min(max(round(wide * recipe.height / high), 1), recipe.width)
    if (high, wide) == (recipe.height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, recipe.height), Image.Resampling.BILINEAR))


def join(parts: Sequence[np.ndarray], recipe: HandwritingRecipe) -> np.ndarray:
    """Lines side by side, padded with white to the width of `recipe.lines` lines."""
    wide = recipe.lines * recipe.width
    paper = np.full((recipe.height, wide), WHITE, dtype=np.uint8)
    at = 0
    for part in parts:
        paper[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return paper


def as_tensor(pixels: np.ndarray) -> Tensor:
    """(1, H, W) from 0 (ink) to 1 (paper)."""
    return torch.from_numpy(np.ascontiguousarray(pixels))[None].float() / WHITE


def _check_length(page: Page, recipe: HandwritingRecipe) -> None:
    """CTC needs a token for each character, and one between equal neighbours."""
    text = " ".join(line.text for line in page)
    needed = sum(1 + (len(list(run)) - 1) * 2 for _, run in groupby(text))
    if needed > recipe.tokens:
        got = f"a text of {len(text)} characters ({page[0].entry}), which needs {needed} tokens"
        cure = f"Raise width to {STRIDE * needed} or more, or split the line."
        raise DataError("--data", got, f"at most {recipe.tokens} tokens with width={recipe.width}", cure)


def _with_hidden(folder: Path, lines: dict[str, list[Line]]) -> dict[str, list[Line]]:
    """Adds which characters are blotted, as hidden.tsv says."""
    rows = (row.split("\t") for row in (folder / "hidden.tsv").read_text("utf-8").splitlines())
    hidden = {name: tuple(range(int(first), int(after))) for name, first, after in rows}
    return {split: [replace(line, hidden=hidden[line.image.name]) for line in part] for split, part in lines.items()}
