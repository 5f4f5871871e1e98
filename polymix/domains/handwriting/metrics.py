"""How well a model reads: error rates of characters and words, and of the characters that a blot covers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from polymix.domains.handwriting.data import HandwritingData, Pages
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.train.data.ctc import ReadText, decoder_of
from polymix.train.data.drawing import INK, WRONG, save_figure
from polymix.train.data.edits import distance, wrong_places
from polymix.train.task import Process

DRAWN_LINES = 8
SAMPLES = 3  # test lines in the journal
_PUNCTUATION = re.compile(r"""([\[\]{}/\\()"'&+*=<>?.;:,!\-—_€#%°])""")


def measure(model: nn.Module, data: HandwritingData, recipe: HandwritingRecipe, process: Process) -> dict[str, float]:
    """Character and word error rates over the whole test set, and over the blotted characters where there are some."""
    pairs = list(read(model, data, recipe, process))
    errors = words = blotted = 0
    for result, text, hidden in pairs:
        wrong, added = wrong_places(result.text, text)
        errors += len(wrong) + added
        blotted += len(wrong & set(hidden))
        words += distance(apart(result.text), apart(text))
    hidden_count = sum(len(hidden) for _, _, hidden in pairs)
    rates = {
        "cer": errors / max(sum(len(text) for _, text, _ in pairs), 1),
        "wer": words / max(sum(len(apart(text)) for _, text, _ in pairs), 1),
    }
    return rates | ({"cer_blotted": blotted / hidden_count} if hidden_count else {})


def first_lines(data: HandwritingData, count: int) -> HandwritingData:
    """The data with so many test lines alone."""
    return replace(data, test=Pages(data.test.pages[:count], data.test.recipe))


def draw(model: nn.Module, data: HandwritingData, recipe: HandwritingRecipe, folder: Path) -> list[Path]:
    """lines.png: test lines with what was read under them, errors in red, and the truth where it differs."""
    from matplotlib.figure import Figure

    few = first_lines(data, DRAWN_LINES)
    figure = Figure(figsize=(7, 0.85 * len(few.test)), layout="constrained")
    device = next(model.parameters()).device
    results = read(model, few, recipe, Process(device))
    rows = zip(figure.subplots(len(few.test), 1, squeeze=False)[:, 0], results, strict=True)
    for place, (axes, (result, text, _)) in enumerate(rows):
        axes.imshow(few.test[place].image[0].numpy(), cmap="gray", vmin=0, vmax=1, aspect="auto")
        right = result.text == text
        title = result.text if right else f"{result.text}     (true: {text})"
        axes.set_title(title, fontsize=8, color=INK if right else WRONG, loc="left")
        axes.axis("off")
    path = folder / "lines.png"
    save_figure(path, figure)
    return [path]


def apart(text: str) -> list[str]:
    """Words, with punctuation marks as words of their own: how HTR-VT counts WER."""
    return _PUNCTUATION.sub(r" \1 ", text).split()


def read(
    model: nn.Module, data: HandwritingData, recipe: HandwritingRecipe, process: Process
) -> Iterator[tuple[ReadText, str, tuple[int, ...]]]:
    """Each test sample as it is read, its text and its hidden places."""
    decode, test, size = decoder_of(recipe, data.characters), data.test, recipe.part_size
    for start in range(0, len(test), size):
        batch = [test[place] for place in range(start, min(start + size, len(test)))]
        logits: Tensor = model(torch.stack([sample.image for sample in batch]).to(process.device))
        for result, sample in zip(decode(logits), batch, strict=True):
            yield result, sample.text, sample.hidden
