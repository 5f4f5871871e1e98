"""How well puzzles are put together: pieces in place, whole puzzles, and neighbours; and pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix._io import write_whole
from polymix.errors import DataError
from polymix.numbers import percent
from polymix.tasks.classify.pictures import UNREADABLE, as_tensor, read_picture
from polymix.tasks.jigsaw.data import Puzzles, cut, joined, scaled, shuffled
from polymix.tasks.jigsaw.recipe import JigsawRecipe
from polymix.tasks.processes import Process

DIRECTIONS = {"in_place": "up", "solved": "up", "neighbours": "up"}
SHOWN = 320  # side of a puzzle in a picture of `predict`, in pixels


def assign(logits: Tensor) -> Tensor:
    """The place of each piece (B, n²) that makes the sum of log-probabilities largest, each place taken once."""
    from scipy.optimize import linear_sum_assignment

    scores = logits.float().log_softmax(-1).cpu()
    return torch.stack([torch.as_tensor(linear_sum_assignment(rows.numpy(), maximize=True)[1]) for rows in scores])


def scores(answers: Tensor, places: Tensor) -> dict[str, float]:
    """How good answers (B, n²) are, given the true places.

    in_place: share of the pieces. solved: share of the puzzles in which all pieces are in place. neighbours: of all
    pairs that belong side by side or one above the other, the share that were put so, in whatever place.
    """
    right = answers == places
    side = round(places.shape[1] ** 0.5)
    where = torch.empty_like(places).scatter_(1, places, answers)  # true place -> place of the answer
    rows, columns = (part.unflatten(1, (side, side)) for part in (where // side, where % side))
    beside = (rows[:, :, 1:] == rows[:, :, :-1]) & (columns[:, :, 1:] == columns[:, :, :-1] + 1)
    above = (columns[:, 1:] == columns[:, :-1]) & (rows[:, 1:] == rows[:, :-1] + 1)
    pairs = torch.cat((beside.flatten(1), above.flatten(1)), dim=1)
    return {"in_place": right.double().mean().item(), "solved": right.all(1).double().mean().item(),
            "neighbours": pairs.double().mean().item()}  # fmt: skip


def measure(model: nn.Module, data: Puzzles, recipe: JigsawRecipe, process: Process) -> dict[str, float]:
    """`scores` on puzzles of photographs that the training did not see."""
    return scores(_answers(model, data.test[0], recipe, process), data.test[1])


def _answers(model: nn.Module, pieces: Tensor, recipe: JigsawRecipe, process: Process) -> Tensor:
    parts = pieces.split(4 * recipe.batch_size)
    return torch.cat([assign(model(part.to(process.device))) for part in parts])


def draw(model: nn.Module, data: Puzzles, recipe: JigsawRecipe, folder: Path) -> list[Path]:
    """puzzles.png: four test puzzles, shuffled, put together by the model, and as they were."""
    from matplotlib.figure import Figure

    count = min(4, len(data.test[0]))
    pieces, places = (part[:count] for part in data.test)
    answers = _answers(model, pieces, recipe, Process())
    figure = Figure(figsize=(5, 1.7 * count), layout="constrained")
    cells = figure.subplots(count, 3, squeeze=False)
    for row, given, answer, place in zip(cells, pieces, answers, places, strict=True):
        right = int((answer == place).sum())
        titles = ("shuffled", f"put together, {right} of {len(place)} in place", "as it was")
        for axes, order, title in zip(row, (None, answer, place), titles, strict=True):
            axes.set_axis_off()
            axes.imshow(_put(given, order).permute(1, 2, 0).tolist())
            axes.set_title(title, fontsize=7)
    path = folder / "puzzles.png"
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))
    return [path]


def _put(pieces: Tensor, places: Tensor | None) -> Tensor:
    """The picture of pieces that are put into places; None: as they lie."""
    return joined(pieces if places is None else pieces[places.argsort()])


def predict(
    model: nn.Module, data: Puzzles, recipe: JigsawRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """Cut the middle square of each photograph into pieces, shuffle them by a fixed seed, and put them together.

    A picture shows the pieces shuffled and put together. Returns the scores and `places`, where each piece went.
    """
    from PIL import Image

    found = []
    for number, file in enumerate(files):
        try:
            photograph = as_tensor(read_picture(file)).float() / 255
        except UNREADABLE as error:
            raise DataError("files", f"{file} ({error})", "a picture that Pillow can read", "") from error
        shorter = min(photograph.shape[1:])
        top, left = ((length - shorter) // 2 for length in photograph.shape[1:])
        square = photograph[:, top : top + shorter, left : left + shorter]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            pieces, places = shuffled(scaled(square, recipe.side), recipe.pieces)
        answer = _answers(model, pieces[None], recipe, process)[0]
        large = cut(scaled(square, SHOWN // recipe.pieces * recipe.pieces), recipe.pieces)[places]
        both = torch.cat((_put(large, None), torch.ones(3, large.shape[-1] * recipe.pieces, 8), _put(large, answer)), 2)
        pixels = (255 * both).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()
        image = Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), bytes(pixels.flatten().tolist()))
        path = folder / f"{number:03d}-{file.stem}.png"
        write_whole(path, partial(image.save, format="PNG"))
        found.append({"file": str(file), "picture": path.name, **scores(answer[None], places[None]),
                      "places": answer.tolist(), "true_places": places.tolist()})  # fmt: skip
    return found


def describe(recipe: JigsawRecipe, data: Puzzles) -> str:
    """What was trained on what, for the report."""
    number, size = recipe.pieces**2, recipe.piece_size
    return (
        f"{recipe.mixer_name} puts {number} shuffled pieces of {size} × {size} pixels in place: {len(data.names[0])} "
        f"photographs for training, {len(data.test[0]):,} puzzles of {len(data.names[1])} others for the test. By "
        f"chance {percent(1 / number)} of the pieces are in place."
    )
