"""Synthetic lines: cheques in pen-plotter script, with the amount in words and in figures, one of them under a blot.

What a blot hides stands elsewhere on the line, so only a model whose tokens see each other can read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polymix.extras import needs
from polymix.train.data.pictures import write_png

FONTS = ("scripts", "cursive", "futural", "rowmans", "timesi", "timesr")  # Hershey's, with all ASCII characters
TOP, BOTTOM = -16, 24  # of a glyph's box, in the fonts' units; the capitals' top is -12, the base line 9
UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NAMES = ("Abbot", "Brown", "Clark", "Dale", "Evans", "Foley", "Grant", "Hall", "Irvin", "Jones", "King", "Lamb")
HIDDEN_FILE = "hidden.tsv"  # name of an image, first place in the text under the blot, first place after it
PURPOSES = ("rent", "hay", "coal", "wine", "tea", "cloth", "iron", "corn")


@dataclass(frozen=True)
class Written:
    """A line: grey values (H, W), the text, and the places in it that the blot covers."""

    image: np.ndarray
    text: str
    hidden: tuple[int, ...]


def cheque(generator: np.random.Generator) -> tuple[str, tuple[range, range]]:
    """A text such as "Dale forty seven for tea 47", and where the amount stands in it: in words, in figures."""
    tens, unit = int(generator.integers(len(TENS))), int(generator.integers(len(UNITS)))
    words, figures = f"{TENS[tens]} {UNITS[unit]}", f"{tens + 2}{unit + 1}"
    name, purpose = NAMES[generator.integers(len(NAMES))], PURPOSES[generator.integers(len(PURPOSES))]
    start = len(name) + 1
    text = f"{name} {words} for {purpose} {figures}"
    return text, (range(start, start + len(words)), range(len(text) - len(figures), len(text)))


def write_line(
    text: str, generator: np.random.Generator, *, height: int, width: int, hide: Sequence[int] = ()
) -> Written:
    """Writes a text in one of the fonts with random slant, size, waves, pen and jitter; blots the places `hide`."""
    from PIL import Image, ImageDraw

    fine = 2  # drawn at twice the size
    glyphs = _font(FONTS[generator.integers(len(FONTS))])
    slant, wave, phase = generator.uniform(-0.15, 0.35), generator.uniform(0, 1.5), generator.uniform(0, 2 * math.pi)
    spacing = generator.uniform(-1.0, 1.5)
    cursor, strokes, extents = 0.0, [], []
    for character in text:
        advance, lines = glyphs[character]
        extents.append((cursor, cursor + advance))
        strokes += [[(x + cursor, y) for x, y in line] for line in lines]
        cursor += advance + spacing
    high = fine * height
    scale = min(high / (BOTTOM - TOP), fine * (width - 8) / cursor) * generator.uniform(0.85, 1.0)
    left = generator.uniform(2, 6) * fine
    middle = (high - scale * (BOTTOM - TOP)) / 2

    def place(x: float, y: float) -> tuple[float, float]:
        drift = wave * math.sin(x / 60 + phase) + generator.normal(0, 0.25)
        return left + scale * (x - slant * (y - 9) + generator.normal(0, 0.25)), middle + scale * (y - TOP + drift)

    paper = Image.new("L", (fine * width, high), int(generator.integers(225, 256)))
    draw, ink, pen = ImageDraw.Draw(paper), int(generator.integers(0, 90)), generator.uniform(0.9, 2.4) * scale
    for stroke in strokes:
        draw.line([place(x, y) for x, y in stroke], fill=ink, width=max(round(pen), 1), joint="curve")
    if hide:
        _blot(draw, left + scale * extents[min(hide)][0], left + scale * extents[max(hide)][1], high, ink, generator)
    small = paper.resize((width, height), Image.Resampling.BOX)
    noise = generator.normal(0, 4, (height, width))
    return Written(np.clip(np.asarray(small) + noise, 0, 255).astype(np.uint8), text, tuple(hide))


def _blot(draw: Any, left: float, right: float, high: int, ink: int, generator: np.random.Generator) -> None:
    """A spot of ink from left to right that nothing shows through, with a ragged edge."""
    draw.rectangle((left, 0.12 * high, right, 0.88 * high), fill=ink)
    for x in np.arange(left, right, high / 12):
        for y in (0.12 * high, 0.88 * high):
            radius = generator.uniform(0.03, 0.1) * high
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)


def synthetic(
    folder: Path, seed: int = 0, train: int = 4000, test: int = 400, height: int = 32, width: int = 256
) -> None:
    """Write cheques as HTR-VT keeps lines: SPLIT.ln, lines/NAME.png, lines/NAME.txt; and hidden.tsv beside them.

    Args:
        train, test: lines of the splits; val has as many as test. height, width: of a line in pixels.
    """
    (folder / "lines").mkdir(parents=True, exist_ok=True)
    hidden: list[str] = []
    for place, (split, count) in enumerate({"train": train, "test": test, "val": test}.items()):
        generator = np.random.default_rng([seed, place])
        names = [f"{split}-{number:05d}.png" for number in range(count)]
        for name in names:
            text, amounts = cheque(generator)
            written = write_line(text, generator, height=height, width=width, hide=amounts[generator.integers(2)])
            write_png(folder / "lines" / name, torch.from_numpy(written.image))
            (folder / "lines" / name).with_suffix(".txt").write_text(text + "\n", "utf-8")
            hidden.append(f"{name}\t{min(written.hidden)}\t{max(written.hidden) + 1}")
        (folder / f"{split}.ln").write_text("\n".join(names) + "\n", "utf-8")
    (folder / HIDDEN_FILE).write_text("\n".join(hidden) + "\n", "utf-8")


def hidden_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The places in the text that the blot covers, by the name of the image."""
    rows = (row.split("\t") for row in (folder / HIDDEN_FILE).read_text("utf-8").splitlines())
    return {name: tuple(range(int(first), int(after))) for name, first, after in rows}


@cache
def _font(name: str) -> dict[str, tuple[float, list[list[tuple[float, float]]]]]:
    """For each ASCII character its advance and its strokes, from x = 0."""
    with needs("handwriting"):
        from HersheyFonts import HersheyFonts
    fonts = HersheyFonts()
    fonts.load_default_font(name)
    glyphs = {}
    for code in range(32, 127):
        (glyph,) = fonts.glyphs_for_text(chr(code))
        strokes = [[(x - glyph.left_offset, y) for x, y in stroke] for stroke in glyph.strokes]
        glyphs[chr(code)] = (float(glyph.char_width), [stroke for stroke in strokes if len(stroke) > 1])
    return glyphs
