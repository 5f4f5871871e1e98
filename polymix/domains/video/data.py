"""Clips for training: cut from videos in memory, with their class, normalised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.video import synthetic
from polymix.domains.video.reading import find_videos, read
from polymix.domains.video.recipe import VideoRecipe
from polymix.errors import DataError
from polymix.train.data.class_names import class_name
from polymix.train.data.images import STATISTICS_IMAGES, check_size
from polymix.train.data.labelled import SPLIT_SEED, check_classes, check_same, find_splits, stratified
from polymix.train.data.pictures import as_image
from polymix.train.data.problems import Problems
from polymix.train.data.splits import find_parts, spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Data

Video = tuple[Tensor, str]  # bytes (T, C, S, S), and the name of its class


@dataclass(frozen=True)
class Clips(Dataset[tuple[Tensor, int]]):
    """Clips (T, C, S, S) with their class: one of each video, from the middle, or if it `moves` from anywhere."""

    videos: Sequence[Tensor]
    labels: Sequence[int]
    recipe: VideoRecipe
    mean: Tensor  # (C, 1, 1), as std
    std: Tensor
    moves: bool = False

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        video = self.videos[place]
        spare = len(video) - self.recipe.span
        start = int(torch.randint(spare + 1, ())) if self.moves and spare else spare // 2
        return self.cut(video, start), self.labels[place]

    def cut(self, video: Tensor, start: int) -> Tensor:
        """A clip of a video, from a frame on, as the model's input: in colour or grey, as its training was."""
        clip = video[start : start + self.recipe.span : self.recipe.stride].float()
        clip = clip.mean(1, keepdim=True) if len(self.mean) == 1 else clip.expand(-1, len(self.mean), -1, -1)
        return (clip - self.mean) / self.std

    def chosen(self, places: Sequence[int]) -> Clips:
        """Those at some places."""
        return replace(self, videos=[self.videos[k] for k in places], labels=[self.labels[k] for k in places])


@dataclass(frozen=True)
class VideoData(Data):
    """Clips for training and for the test, and the names of their classes."""

    name: str
    classes: tuple[str, ...]
    train: Clips
    test: Clips

    @property
    def channels(self) -> int:
        """Of a frame."""
        return len(self.train.mean)

    def pixels(self, frames: Tensor) -> Tensor:
        """Inputs (…, C, S, S) as values from 0 to 1 again."""
        return (frames * self.train.std.to(frames) + self.train.mean.to(frames)) / 255

    def thumbnail(self, place: int) -> bytes:
        """The middle frame of a test clip as a PNG file."""
        video, file = self.test.videos[place], BytesIO()
        as_image(video[len(video) // 2].expand(3, -1, -1)).save(file, "PNG")
        return file.getvalue()

    def summary(self) -> dict[str, Any]:
        """What results.json keeps: enough to build the model and to prepare other videos."""
        return {
            "name": self.name, "classes": list(self.classes), "train": len(self.train), "test": len(self.test),
            "mean": self.train.mean.flatten().tolist(), "std": self.train.std.flatten().tolist(),
        }  # fmt: skip


def load(recipe: VideoRecipe, folder: Path, say: Callable[[str], None]) -> VideoData:
    """The clips of a recipe's data, or synthetic ones, which are written to `folder` as arrays.

    Raises DataError: the first problem of all.
    """
    name, source = str(recipe.data), Path(recipe.data or "")
    if recipe.data is None:
        settings = {"seed": recipe.seed, "frames": recipe.span, "train": recipe.synthetic_train,
                    "test": recipe.synthetic_test}  # fmt: skip
        name = f"synthetic clips, {recipe.synthetic}"
        source = cached(folder, recipe.synthetic, settings,
                        lambda place: synthetic.write(place, recipe.synthetic, **settings))  # fmt: skip
    problems = Problems()
    train, test = _parts(recipe, source, problems)
    problems.settle(say=say)
    classes = tuple(sorted({name for _, name in train}))
    every = [video for video, _ in (*train, *test)]
    channels = max(video.shape[1] for video in every)
    sample = torch.stack([train[k][0][0].expand(channels, -1, -1) for k in spread(len(train), STATISTICS_IMAGES)])
    mean, std = (part[:, None, None] for part in (sample.float().mean((0, 2, 3)), sample.float().std((0, 2, 3))))

    def clips(part: Sequence[Video], moves: bool) -> Clips:
        labels = [classes.index(name) for _, name in part]
        return Clips([video for video, _ in part], labels, recipe, mean, std.clamp_min(1), moves)

    return VideoData(name, classes, clips(train, True), clips(test, False))


def list_problems(recipe: VideoRecipe, source: str) -> list[str]:
    """Every problem of a folder of clips, in sentences; decodes all of them."""
    problems = Problems()
    with problems.noting():
        _parts(recipe, Path(source), problems)
    return problems.lines


def _parts(recipe: VideoRecipe, folder: Path, problems: Problems) -> tuple[list[Video], list[Video]]:
    """Training and test videos. What cannot be read is noted, and not returned."""
    training, held_out = find_splits(folder) if recipe.target == "class" else find_parts(folder, "a folder of clips")
    train, test = (_videos(recipe, part, problems) for part in (training, held_out))
    if problems:
        return train, test
    if recipe.target == "class":
        names = [name for _, name in train]
        check_classes({name: names.count(name) for name in set(names)})
        if held_out is not None:
            check_same(set(names), {name for _, name in test}, training, held_out)
    if held_out is None:
        if len(train) < 2:
            raise DataError("data", f"{folder} with {len(train)} clips", "two or more", "Cut long videos into several.")
        names = sorted({name for _, name in train})
        parts = stratified(torch.tensor([names.index(name) for _, name in train]))
        return [train[k] for k in parts[0]], [train[k] for k in parts[1]]
    if not train or not test:
        raise DataError("data", f"{folder} without clips in {training if not train else held_out}", "some", "Add some.")
    return train, test


def _videos(recipe: VideoRecipe, folder: Path | None, problems: Problems) -> list[Video]:
    videos: list[Video] = []
    frames = 0
    for path in () if folder is None else find_videos(folder):
        parts = path.relative_to(folder or path).parts
        if recipe.target == "class" and len(parts) < 2 and path.is_file():
            problems.add(path, "", "a clip that lies in no folder of a class")
            continue
        name = class_name(parts[0]) if recipe.target == "class" else ""
        with problems.noting():
            for place, video in enumerate(read(path, recipe.image_size)):
                if len(video) < recipe.span:
                    entry = f"clip {place + 1}" if path.is_file() else ""
                    problems.add(path, entry, f"{len(video)} frames; a clip has {recipe.span}: see frames and stride")
                    break
                frames += len(video)
                check_size(frames, recipe.image_size)
                videos.append((video, name))
    return videos


def from_summary(recipe: VideoRecipe, summary: Mapping[str, Any]) -> VideoData:
    """The data of a trained model without its clips."""
    mean, std = (torch.tensor(summary[name])[:, None, None] for name in ("mean", "std"))
    none = Clips((), (), recipe, mean, std)
    return VideoData(str(summary["name"]), tuple(summary["classes"]), none, none)


def known_as(data: VideoData, summary: Mapping[str, Any], recipe: VideoRecipe) -> VideoData:
    """Clips as a trained model knows them: by its classes, mean and deviation.

    Raises DataError for a class that the model does not know.
    """
    trained = from_summary(recipe, summary)
    odd = [name for name in data.classes if name not in trained.classes]
    if odd and recipe.target == "class":
        allowed = f"the model's classes: {', '.join(trained.classes[:20])}"
        raise DataError("data", f"the class {odd[0]!r} in {data.name}", allowed, "Rename its folder.")

    def known(part: Clips) -> Clips:
        labels = part.labels if odd else [trained.classes.index(data.classes[label]) for label in part.labels]
        return replace(part, labels=labels, mean=trained.train.mean, std=trained.train.std)

    return replace(data, classes=trained.classes, train=known(data.train), test=known(data.test))


def restricted(data: VideoData, whole: bool, limit: int | None) -> VideoData:
    """Measured on all clips instead of those held out, and on at most `limit`, drawn by a fixed seed."""
    test = data.test
    if whole:
        videos, labels = [*data.train.videos, *test.videos], [*data.train.labels, *test.labels]
        test = replace(test, videos=videos, labels=labels)
    if limit is not None and limit < len(test):
        test = test.chosen(
            torch.randperm(len(test), generator=torch.Generator().manual_seed(SPLIT_SEED))[:limit].tolist()
        )
    return replace(data, test=test)
