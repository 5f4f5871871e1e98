"""How well puzzles are put together: pieces in place, whole puzzles, and neighbours; and pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.jigsaw.data import Puzzles, cut, joined, shuffled
from polymix.domains.jigsaw.recipe import JigsawRecipe
from polymix.files import output_names
from polymix.train.data.drawing import save_figure, save_picture
from polymix.train.data.pictures import middle_square, read_picture
from polymix.train.data.sampling import isolated_random_state
from polymix.train.task import Process

DRAWN_PUZZLES = 4
PREDICTED_SIDE = 320  # of a puzzle in a picture of `predict`, in pixels


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


def answers(model: nn.Module, pieces: Tensor, recipe: JigsawRecipe, process: Process) -> Tensor:
    """The place of each piece (puzzles, n²) by the model."""
    parts = pieces.split(4 * recipe.batch_size)
    return torch.cat([assign(model(part.to(process.device))) for part in parts])


def draw(model: nn.Module, data: Puzzles, recipe: JigsawRecipe, folder: Path) -> list[Path]:
    """puzzles.png: four test puzzles, shuffled, put together by the model, and as they were."""
    from matplotlib.figure import Figure

    count = min(DRAWN_PUZZLES, len(data.test[0]))
    pieces, places = (part[:count] for part in data.test)
    places_by_model = answers(model, pieces, recipe, Process())
    figure = Figure(figsize=(5, 1.7 * count), layout="constrained")
    cells = figure.subplots(count, 3, squeeze=False)
    for row, puzzle, answer, place in zip(cells, pieces, places_by_model, places, strict=True):
        right = int((answer == place).sum())
        titles = ("shuffled", f"put together, {right} of {len(place)} in place", "as it was")
        for axes, order, title in zip(row, (None, answer, place), titles, strict=True):
            axes.set_axis_off()
            axes.imshow(put(puzzle, order).permute(1, 2, 0).tolist())
            axes.set_title(title, fontsize=7)
    path = folder / "puzzles.png"
    save_figure(path, figure)
    return [path]


def put(pieces: Tensor, places: Tensor | None) -> Tensor:
    """The picture of pieces that are put into places; None: as they lie."""
    return joined(pieces if places is None else pieces[places.argsort()])


def predict(
    model: nn.Module, recipe: JigsawRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """Cut the middle square of each photograph into pieces, shuffle them by a fixed seed, and put them together.

    A picture shows the pieces shuffled and put together. Returns the scores and `places`, where each piece went.
    """
    rows = []
    for number, (file, name) in enumerate(zip(files, output_names(files), strict=True)):
        photograph = read_picture(file).float() / 255
        with isolated_random_state():
            torch.manual_seed(number)
            pieces, places = shuffled(middle_square(photograph, recipe.side), recipe.pieces)
        answer = answers(model, pieces[None], recipe, process)[0]
        side = PREDICTED_SIDE // recipe.pieces * recipe.pieces
        large = cut(middle_square(photograph, side), recipe.pieces)[places]
        both = torch.cat((put(large, None), torch.ones(3, large.shape[-1] * recipe.pieces, 8), put(large, answer)), 2)
        pixels = (255 * both).round().clamp(0, 255).to(torch.uint8)
        path = folder / f"{name}-solved.png"
        save_picture(path, pixels)
        rows.append({"file": str(file), "picture": path.name, **scores(answer[None], places[None]),
                      "places": answer.tolist(), "true_places": places.tolist()})  # fmt: skip
    return rows
