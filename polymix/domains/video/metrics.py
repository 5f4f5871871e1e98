"""How good a model of clips is, and pictures of clips with its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polymix.domains.video.data import Clips, VideoData
from polymix.domains.video.reading import read
from polymix.domains.video.recipe import VideoRecipe
from polymix.errors import DataError, shortened
from polymix.files import output_names
from polymix.numbers import percent
from polymix.train.data import classified
from polymix.train.data.drawing import INK, WRONG, save_figure, show
from polymix.train.data.splits import spread
from polymix.train.task import Process

DRAWN = 6  # clips of a picture
DRAWN_FRAMES = 8  # of each
WINDOWS = 16  # of a video that `predict` reads


def outputs(model: nn.Module, clips: Clips, recipe: VideoRecipe, process: Process) -> Tensor:
    """What the model says at the end of each clip: (n, classes), or frames (n, C, S, S)."""
    if not len(clips):
        raise DataError("data", "data without test clips", "one or more", "Add some.")
    parts = []
    for places in torch.arange(len(clips)).split(4 * recipe.batch_size):
        batch = torch.stack([clips[int(place)][0] for place in places]).to(process.device)
        parts.append(model(batch[:, : recipe.frames])[:, -1].float().cpu())
    return torch.cat(parts)


def measure(model: nn.Module, data: VideoData, recipe: VideoRecipe, process: Process) -> dict[str, float]:
    """accuracy and val_loss of classes; of next frames psnr, and psnr_copy of the last frame seen in their place."""
    said = outputs(model, data.test, recipe, process)
    if recipe.target == "class":
        return classified.measure(said, torch.tensor(data.test.labels))
    ends = torch.stack([data.test[place][0][-2:] for place in range(len(data.test))])
    last, truth = data.pixels(ends).unbind(1)
    return {"psnr": psnr(data.pixels(said).clamp(0, 1), truth), "psnr_copy": psnr(last, truth)}


def psnr(frames: Tensor, truth: Tensor) -> float:
    """Peak signal to noise in dB, −10 log₁₀ of the mean squared error of values from 0 to 1; at most 100."""
    return -10 * math.log10(max(mse_loss(frames.double(), truth.double()).item(), 1e-10))


def details(model: nn.Module, data: VideoData, recipe: VideoRecipe, process: Process) -> dict[str, Any]:
    """`measure` for `polymix evaluate`; of classes also their accuracy, and each clip's answer."""
    if recipe.target != "class":
        return {"metrics": measure(model, data, recipe, process), "count": len(data.test)}
    logits, labels = outputs(model, data.test, recipe, process), torch.tensor(data.test.labels)
    each = {"predictions": logits.argmax(1).tolist(), "labels": data.test.labels, "count": len(labels)}
    return {**classified.scores(logits, labels, data.classes, "clips"), **each}


def draw(model: nn.Module, data: VideoData, recipe: VideoRecipe, folder: Path) -> list[Path]:
    """samples.png, clips with their class or next frame and the model's; of classes also confusion.png."""
    few = data.test.chosen(spread(len(data.test), DRAWN))
    said, rows = outputs(model, few, recipe, Process()), []
    for (clip, label), answer in zip((few[place] for place in range(len(few))), said, strict=True):
        if recipe.target == "class":
            true, name = (shortened(data.classes[k], classified.MAX_LETTERS) for k in (label, int(answer.argmax())))
            rows.append((data.pixels(clip), true if true == name else f"{true}, not {name}", true == name))
        else:
            rows.append((data.pixels(torch.cat((clip, answer[None]))), "… and its last frame as predicted", True))
    path = folder / "samples.png"
    draw_clips(path, rows)
    if recipe.target != "class":
        return [path]
    answers = outputs(model, data.test, recipe, Process()).argmax(1)
    return [path, classified.draw_confusion(answers, torch.tensor(data.test.labels), data.classes, folder)]


def draw_clips(path: Path, rows: Sequence[tuple[Tensor, str, bool]]) -> None:
    """A row for each clip (T, C, S, S) of values from 0 to 1: its frames from left to right, and what is said of it.

    Of long clips, evenly spaced frames and the last two; the third part of a row is whether what is said is right.
    """
    from matplotlib.figure import Figure

    columns = min(DRAWN_FRAMES + 1, max(len(clip) for clip, _, _ in rows))
    figure = Figure(figsize=(0.85 * columns, 1.15 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for axes, (clip, text, right) in zip(grid, rows, strict=True):
        places = [*spread(len(clip) - 2, columns - 2), len(clip) - 2, len(clip) - 1]
        for place in axes:
            place.set_axis_off()
        for place, frame in zip(axes, places, strict=False):
            show(place, clip[frame])
        axes[0].set_title(text, loc="left", fontsize=9, color=INK if right else WRONG)
    save_figure(path, figure)


def predict(
    model: nn.Module, data: VideoData, recipe: VideoRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """For each video its class, by the mean of at most 16 windows, or the frame that follows its end; and a picture.

    "windows" has the class of each window and the frame at which it ends.
    """
    window = (recipe.frames - 1) * recipe.stride + 1
    rows = []
    for file, name in zip(files, output_names(files), strict=True):
        video = read(file, recipe.image_size)[0]
        if len(video) < window:
            got = f"{file} of {len(video)} frames"
            raise DataError("files", got, f"{window} frames or more, as the model takes", "Use a longer video.")
        ends = [window + place for place in spread(len(video) - window + 1, WINDOWS)]
        ends = [len(video)] if recipe.target != "class" else ends
        inputs = torch.stack([data.train.cut(video[end - window : end], 0) for end in ends])
        said = model(inputs.to(process.device))[:, -1].float().cpu()
        path = folder / f"{name}-seen.png"
        if recipe.target == "class":
            shares = said.softmax(1)
            answer = classified.likeliest(shares.mean(0), data.classes)
            parts = [
                {"end": end, "label": data.classes[int(row.argmax())]} for end, row in zip(ends, shares, strict=True)
            ]
            text = f"{answer['label']}  {percent(answer['probability'])}"
            draw_clips(path, [(data.pixels(inputs[len(inputs) // 2]), text, True)])
            rows.append({"file": str(file), "picture": path.name, **answer, "windows": parts})
        else:
            clip = torch.cat((inputs[0], said))
            draw_clips(path, [(data.pixels(clip), "… and the frame after it, as predicted", True)])
            rows.append({"file": str(file), "picture": path.name, "answer": f"the frame after {len(video):,} frames"})
    return rows
