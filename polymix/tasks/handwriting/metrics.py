"""How well a model reads: error rates of characters and words, and of the characters that a blot covers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix._io import write_whole
from polymix.errors import MissingExtraError
from polymix.tasks.handwriting.data import Lines
from polymix.tasks.handwriting.decode import ReadText, decoder_of
from polymix.tasks.handwriting.predict import predict
from polymix.tasks.handwriting.recipe import HandwritingRecipe
from polymix.tasks.processes import Process

DIRECTIONS = {"cer": "down", "wer": "down", "cer_blotted": "down"}
# PoM, Table 2: LAM by lines, then with up to 16 lines side by side. CER, WER in percent.
PAPER = {
    (1, "softmax"): (2.8, 7.4), (1, "pom"): (3.2, 9.0), (1, "hybrid"): (2.8, 7.5),
    (16, "softmax"): (3.3, 9.3), (16, "pom"): (3.7, 10.9), (16, "hybrid"): (3.3, 9.3),
}  # fmt: skip
_APART = re.compile(r"""([\[\]{}/\\()"'&+*=<>?.;:,!\-—_€#%°])""")


def measure(model: nn.Module, data: Lines, recipe: HandwritingRecipe, process: Process) -> dict[str, float]:
    """Character and word error rates over the whole test set, and over the blotted characters where there are some."""
    pairs = list(_read(model, data, recipe, process))
    errors = words = blotted = 0
    for read, text, hidden in pairs:
        wrong = _wrong_places(read.text, text)
        errors += len(wrong[0]) + wrong[1]
        blotted += len(wrong[0] & set(hidden))
        words += _distance(apart(read.text), apart(text))
    hidden_count = sum(len(hidden) for _, _, hidden in pairs)
    rates = {
        "cer": errors / max(sum(len(text) for _, text, _ in pairs), 1),
        "wer": words / max(sum(len(apart(text)) for _, text, _ in pairs), 1),
    }
    return rates | ({"cer_blotted": blotted / hidden_count} if hidden_count else {})


def paper(recipe: HandwritingRecipe) -> dict[str, Any] | None:
    """The paper's error rates for this mixer, on LAM."""
    name = recipe.mixer.partition(":")[0]
    if recipe.plan:  # the paper has one, PoM in every second layer
        name = "hybrid" if (name, recipe.plan) == ("pom", "1:1") else ""
    figures = PAPER.get((recipe.lines, name))
    if figures is None:
        return None
    return {"cer": figures[0] / 100, "wer": figures[1] / 100, "source": "PoM, Table 2, LAM"}


def samples(model: nn.Module, data: Lines, recipe: HandwritingRecipe, process: Process) -> list[str]:
    """The first three test lines as the model reads them."""
    few = Lines(data.name, data.characters, data.train, type(data.test)(data.test.pages[:3], recipe))
    return [read.text for read, _, _ in _read(model, few, recipe, process)]


def describe(recipe: HandwritingRecipe, data: Lines) -> str:
    told = f"{len(data.train):,} training lines and {len(data.test):,} test lines of {data.name}."
    if recipe.data is None:
        told += (
            " The amount of a cheque stands twice and is blotted once, so the blotted characters can be read only by"
            " a model whose tokens see each other: cer_blotted."
        )
    return told


def draw(model: nn.Module, data: Lines, recipe: HandwritingRecipe, folder: Path) -> list[Path]:
    """lines.png: test lines with what was read under them, errors in red, and the truth where it differs."""
    from matplotlib.figure import Figure

    count = min(8, len(data.test))
    few = Lines(data.name, data.characters, data.train, type(data.test)(data.test.pages[:count], recipe))
    figure = Figure(figsize=(7, 0.85 * count), layout="constrained")
    device = next(model.parameters()).device
    rows = zip(figure.subplots(count, 1, squeeze=False)[:, 0], _read(model, few, recipe, Process(device)), strict=True)
    for place, (axes, (read, text, _)) in enumerate(rows):
        axes.imshow(few.test[place].image[0].numpy(), cmap="gray", vmin=0, vmax=1, aspect="auto")
        right = read.text == text
        told = read.text if right else f"{read.text}     (true: {text})"
        axes.set_title(told, fontsize=8, color="black" if right else "firebrick", loc="left")
        axes.axis("off")
    path = folder / "lines.png"
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))
    return [path]


def apart(text: str) -> list[str]:
    """Words, with punctuation marks as words of their own: how HTR-VT counts WER."""
    return _APART.sub(r" \1 ", text).split()


def _read(
    model: nn.Module, data: Lines, recipe: HandwritingRecipe, process: Process
) -> Iterator[tuple[ReadText, str, tuple[int, ...]]]:
    """Each test sample as it is read, its text and its hidden places."""
    decode, test = decoder_of(recipe, data.characters), data.test
    for start in range(0, len(test), recipe.batch_size):
        batch = [test[place] for place in range(start, min(start + recipe.batch_size, len(test)))]
        logits: Tensor = model(torch.stack([sample.image for sample in batch]).to(process.device))
        for read, sample in zip(decode(logits), batch, strict=True):
            yield read, sample.text, sample.hidden


def _distance(read: Sequence[str], true: Sequence[str]) -> int:
    return int(_levenshtein().distance(read, true))


def _wrong_places(read: str, true: str) -> tuple[set[int], int]:
    """The places of the truth that were left out or read as another character, and how many were put in."""
    changes = _levenshtein().editops(read, true)
    wrong = {change.dest_pos for change in changes if change.tag in ("replace", "insert")}  # insert: lacks in `read`
    return wrong, sum(change.tag == "delete" for change in changes)


def _levenshtein() -> Any:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise MissingExtraError("rapidfuzz", "no such package", "pip install 'polymix[handwriting]'") from error
    return Levenshtein


__all__ = ["DIRECTIONS", "apart", "describe", "draw", "measure", "paper", "predict", "samples"]
