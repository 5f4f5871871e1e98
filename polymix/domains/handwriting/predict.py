"""Reads images of writing: the lines of a page one after another, each in pieces where it is wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from polymix.domains.handwriting.cutting import cut_lines, pieces
from polymix.domains.handwriting.data import WHITE, HandwritingData, fitted, grey, join, paper_of
from polymix.domains.handwriting.lines import Line
from polymix.domains.handwriting.recipe import STRIDE, HandwritingRecipe
from polymix.files import output_names
from polymix.train.data.ctc import ReadText, decoder_of
from polymix.train.data.drawing import save_figure
from polymix.train.task import Process


def predict(
    model: nn.Module,
    data: HandwritingData,
    recipe: HandwritingRecipe,
    files: Sequence[Path],
    folder: Path,
    process: Process,
) -> list[dict[str, Any]]:
    """Reads an image per file: a line, a wide line in pieces, or several lines below each other.

    Each row has "file", "text" with a line feed between lines, "picture", "lines": the rows of pixels in which each was
    found, and "characters": the character, its line, its columns in the image, and the probability there.
    """
    rows, decode = [], decoder_of(recipe, data.characters)

    def read(piece: np.ndarray) -> ReadText:
        image = paper_of(join([piece], recipe))[None].to(process.device)
        return decode(model(image))[0]

    for path, name in zip(files, output_names(files), strict=True):
        pixels = grey(Line(path, "", entry=path.name))
        ways = [
            [(cut, *_read_line(cut.pixels, recipe, read)) for cut in way] for way in cut_lines(pixels, data.margins)
        ]
        best = max(ways, key=_certainty)
        lines = [{"text": text, "top": cut.top, "bottom": cut.bottom} for cut, text, _ in best]
        characters = [{"line": place, **entry} for place, (_, _, its) in enumerate(best) for entry in its]
        picture = folder / f"{name}-read.png"
        _draw(pixels, lines, characters, picture)
        text = "\n".join(text for _, text, _ in best)
        rows.append({"file": str(path), "text": text, "picture": picture.name, "lines": lines,
                     "characters": characters})  # fmt: skip
    return rows


def _certainty(lines: Sequence[tuple[Any, str, Sequence[dict[str, Any]]]]) -> float:
    """The mean probability of the characters that were read."""
    chances = [entry["probability"] for _, _, characters in lines for entry in characters]
    return float(np.mean(chances)) if chances else 0.0


def _read_line(
    pixels: np.ndarray, recipe: HandwritingRecipe, read: Callable[[np.ndarray], ReadText]
) -> tuple[str, list[dict[str, Any]]]:
    """The text of a line, and where each of its characters stands. One piece at a time is in memory."""
    text, characters, start = "", [], 0
    limit = max(int(recipe.lines * recipe.width * pixels.shape[0] / recipe.height), 1)
    for piece in pieces(pixels, limit):
        fit = fitted(piece, recipe)
        result = read(fit)
        scale = piece.shape[1] / fit.shape[1]  # pixels of the image per pixel of the model
        text += (" " if text and result.text else "") + result.text
        for character, (first, last), chance in zip(result.text, result.places, result.certain, strict=True):
            places = [start + round(at * STRIDE * scale) for at in (first, last + 1)]
            places = [min(places[0], pixels.shape[1] - 1), min(places[1], pixels.shape[1])]  # not in the padding
            characters.append({"character": character, "from": places[0], "to": places[1],
                               "probability": round(chance, 4)})  # fmt: skip
        start += piece.shape[1]
    return text, characters


def _draw(
    pixels: np.ndarray, lines: Sequence[dict[str, Any]], characters: Sequence[dict[str, Any]], path: Path
) -> None:
    """Each line with its characters under the places where they were read; pale where the model is not sure."""
    from matplotlib.figure import Figure

    high = max(line["bottom"] - line["top"] for line in lines)
    wide = min(max(pixels.shape[1] / high * 0.9, 4.0), 40.0)
    figure = Figure(figsize=(wide, 1.8 * len(lines)), layout="constrained")
    for place, (axes, line) in enumerate(zip(figure.subplots(len(lines), squeeze=False)[:, 0], lines, strict=True)):
        part = pixels[line["top"] : line["bottom"]]
        axes.imshow(part, cmap="gray", vmin=0, vmax=WHITE, aspect="auto")
        for entry in characters:
            if entry["line"] != place:
                continue
            axes.axvspan(entry["from"], entry["to"], color="tab:blue", alpha=0.12)
            axes.text((entry["from"] + entry["to"]) / 2, 1.02 * len(part), entry["character"], ha="center", va="top",
                      fontsize=9, alpha=0.3 + 0.7 * entry["probability"])  # fmt: skip
        axes.set_ylim(1.35 * len(part), 0)
        axes.set_title(line["text"], fontsize=9, loc="left")
        axes.axis("off")
    save_figure(path, figure, dpi=110)
