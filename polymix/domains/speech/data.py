"""Clips for training: features and texts, or features with spans to be masked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from polymix.domains.speech import synthetic
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.errors import DataError
from polymix.limits import check_memory
from polymix.train.data.audio import HOP, LogMel, read, sample_count
from polymix.train.data.ctc import encoded, tokens_needed
from polymix.train.data.labelled import SPLIT_SEED
from polymix.train.data.problems import Problems
from polymix.train.data.sampling import number
from polymix.train.data.splits import spread
from polymix.train.data.synthetic import cached
from polymix.train.data.transcribed import Clip, Parts, find_clips, plain
from polymix.train.task import Data

CACHE_BYTES = 1 << 29  # of features that stay in memory; others are computed again
STATISTICS_CLIPS = 100  # of which mean and deviation of each band are taken


class Sample(NamedTuple):
    """Features (frames, bands) of a clip, its text, and of BEST-RQ which tokens are hidden, and by what noise."""

    features: Tensor
    text: str
    hidden: Tensor | None = None
    noise: Tensor | None = None


class Batch(NamedTuple):
    """Clips side by side, padded with zeros at the end; with labels one after another, or with what is hidden."""

    features: Tensor  # (B, frames, bands)
    frames: Tensor  # (B): of each clip
    labels: Tensor
    lengths: Tensor  # (B): labels of each clip
    hidden: Tensor | None = None  # (B, tokens)
    noise: Tensor | None = None  # as features


@dataclass(frozen=True)
class Clips(Dataset[Sample]):
    """Clips as samples. If `moves`, what BEST-RQ hides of a clip is new each time."""

    clips: Sequence[Clip]
    recipe: SpeechRecipe
    moves: bool = False
    cache: dict[Path, Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, place: int) -> Sample:
        clip, recipe = self.clips[place], self.recipe
        features = self.cache.get(clip.path)
        if features is None:
            features = LogMel(recipe.rate, recipe.bands)(read(clip.path, recipe.rate))
            if len(self.cache) * features.nbytes < CACHE_BYTES:
                self.cache[clip.path] = features
        if recipe.goal == "ctc":
            return Sample(features, clip.text)
        draw = None if self.moves else torch.Generator().manual_seed(number("hidden", place))
        noise = recipe.noise * torch.randn(features.shape, generator=draw)
        return Sample(features, "", hidden_tokens(len(features), recipe, draw), noise)

    def chosen(self, places: Sequence[int]) -> Clips:
        """Those at some places."""
        return replace(self, clips=[self.clips[place] for place in places])


def hidden_tokens(frames: int, recipe: SpeechRecipe, draw: torch.Generator | None) -> Tensor:
    """Which tokens of a clip are hidden: spans that start at a frame with a fixed chance, or one if there is none.

    A token is hidden whole or not at all; a span of S seconds hides S / (seconds of a token) tokens.
    """
    tokens, span = -(-frames // recipe.subsample), max(1, round(recipe.mask_seconds / (HOP * recipe.subsample)))
    chance = 1 - (1 - recipe.mask_start) ** recipe.subsample
    starts = torch.rand(tokens, generator=draw) < chance
    starts[int(torch.randint(tokens, (), generator=draw))] |= ~starts.any()
    return pad(starts, (span - 1, 0)).unfold(0, span, 1).any(1)


@dataclass(frozen=True)
class SpeechData(Data):
    """The clips of a run, and its alphabet: class c of the model is characters[c - 1]."""

    name: str
    characters: str
    train: Clips
    test: Clips
    valid: Clips | None = None  # to choose weights by

    def summary(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters, "train": len(self.train), "test": len(self.test)}

    def fingerprint(self) -> list[Any]:
        lines = "\n".join(f"{clip.path.name}\t{clip.text}" for clip in self.train.clips)
        return [len(self.train), zlib.crc32(lines.encode("utf-8", "surrogateescape"))]

    def collate(self, samples: Sequence[Sample]) -> Batch:
        labels = [torch.tensor(encoded(sample.text, self.characters), dtype=torch.long) for sample in samples]
        features = [sample.features for sample in samples]
        frames, lengths = (torch.tensor([len(part) for part in parts]) for parts in (features, labels))
        batch = Batch(pad_sequence(features, True), frames, torch.cat(labels), lengths)
        hidden = [sample.hidden for sample in samples if sample.hidden is not None]
        noise = [sample.noise for sample in samples if sample.noise is not None]
        if not hidden:
            return batch
        return batch._replace(hidden=pad_sequence(hidden, True), noise=pad_sequence(noise, True))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (bands) of some training clips."""
        few = [self.train[place].features for place in spread(len(self.train), STATISTICS_CLIPS)]
        frames = torch.cat(few).double()
        return frames.mean(0).float(), frames.std(0).clamp_min(1e-3).float()


def load(recipe: SpeechRecipe, folder: Path, say: Callable[[str], None]) -> SpeechData:
    """The clips of a recipe's data, or synthetic ones, which `folder` keeps. Raises DataError: the first problem."""
    name, source, layout = str(recipe.data), Path(recipe.data or ""), recipe.layout
    if recipe.data is None:
        settings = {"seed": recipe.seed, "rate": recipe.rate, "train": recipe.synthetic_train,
                    "test": recipe.synthetic_test}  # fmt: skip
        name, layout = "synthetic homophones", "folder"
        source = cached(folder, "speech", settings, lambda place: synthetic.write(place, **settings))
    problems = Problems()
    parts = _parts(recipe, source, layout, problems)
    problems.settle(say=say)
    if not parts["train"] or not parts["test"]:
        got = f"{name} with {len(parts['train'])} training and {len(parts['test'])} test clips"
        raise DataError("data", got, "some of both", "Add some.")
    characters = "".join(sorted({letter for part in parts.values() for clip in part for letter in clip.text} | {" "}))
    valid = Clips(parts["val"], recipe) if parts["val"] else None
    return SpeechData(name, characters, Clips(parts["train"], recipe, True), Clips(parts["test"], recipe), valid)


def list_problems(recipe: SpeechRecipe, source: str) -> list[str]:
    """Every problem of a folder of clips, in sentences; decodes all of them."""
    problems = Problems()
    with problems.noting():
        parts = _parts(recipe, Path(source), recipe.layout, problems)
        for clip in (clip for part in parts.values() for clip in part):
            with problems.noting():
                read(clip.path, recipe.rate)
    return problems.lines


def _parts(recipe: SpeechRecipe, source: Path, layout: str | None, problems: Problems) -> Parts:
    """The clips by part, with texts as the model writes them. What cannot be used is noted, and not returned."""
    parts: Parts = {}
    longest = 1
    for name, part in find_clips(source, layout, recipe.goal == "ctc", problems).items():
        parts[name] = []
        for clip in part:
            with problems.noting():
                frames = LogMel(recipe.rate, recipe.bands).frames(sample_count(clip.path, recipe.rate))
                text = plain(clip.text) if recipe.plain_text else clip.text
                tokens, needed = -(-frames // recipe.subsample), tokens_needed(text)
                if recipe.goal == "ctc" and not text:
                    problems.add(clip.entry, "", f"{clip.text!r}, a text without letters")
                elif needed > tokens:
                    what = f"a text of {len(text)} characters, for which {frames * HOP:.1f} s are too short"
                    problems.add(clip.entry, "", f"{what}: it needs {needed} tokens, and they are {tokens}")
                else:
                    parts[name].append(replace(clip, text=text))
                    longest = max(longest, frames)
    what = f"{recipe.part_size:,} clips of {longest * HOP:,.0f} s"
    width = recipe.stem * recipe.bands + recipe.dim * recipe.depth * (2 + recipe.mlp_ratio)
    check_memory("batch_size", what, 4 * recipe.part_size * longest * width, cure="Use fewer, or cut clips.")
    return parts


def from_summary(recipe: SpeechRecipe, summary: Mapping[str, Any]) -> SpeechData:
    """The alphabet of a trained model without clips."""
    none = Clips((), recipe)
    return SpeechData(str(summary["name"]), str(summary["characters"]), none, none)


def for_evaluation(
    recipe: SpeechRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> SpeechData:
    """The test clips, or all, with the alphabet of a trained model, and at most `limit`, drawn by a fixed seed.

    Raises DataError for a text with a character that the model does not know.
    """
    problems = Problems()
    parts = _parts(recipe, Path(str(recipe.data)), recipe.layout, problems)
    problems.settle(say=say)
    clips = [clip for name, part in parts.items() for clip in part if whole or name == "test"]
    if limit is not None and limit < len(clips):
        places = torch.randperm(len(clips), generator=torch.Generator().manual_seed(SPLIT_SEED))[:limit]
        clips = [clips[place] for place in places.tolist()]
    for clip in clips:
        encoded(clip.text, str(summary["characters"]), clip.entry)
    empty = from_summary(recipe, summary)
    return replace(empty, name=str(recipe.data), train=Clips(parts["train"], recipe), test=Clips(clips, recipe))
