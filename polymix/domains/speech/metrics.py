"""How well a model hears: error rates of words and characters, or of BEST-RQ the share of codes; pictures of clips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from polymix.domains.speech.conformer import Conformer, StreamState
from polymix.domains.speech.data import Batch, SpeechData
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.errors import DataError
from polymix.files import output_names
from polymix.train.data.audio import HOP, LogMel, read
from polymix.train.data.ctc import ReadText, ctc_losses, decoder_of, words_of
from polymix.train.data.drawing import draw_spoken, pieces
from polymix.train.data.edits import error_rates
from polymix.train.data.splits import spread
from polymix.train.data.transcribed import find_audio
from polymix.train.task import Process

DRAWN = 4  # clips of a picture
STEP_TOKENS = 250  # of a stream that are computed at once


def code_losses(logits: Tensor, codes: Tensor, hidden: Tensor) -> Tensor:
    """(B): the mean cross-entropy of each clip's codes (B, N) where they are hidden, which they are somewhere."""
    losses = cross_entropy(logits.float().transpose(1, 2), codes, reduction="none")
    return (losses * hidden).sum(1) / hidden.sum(1)


def outputs(
    model: nn.Module, data: SpeechData, recipe: SpeechRecipe, process: Process
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """Batches of test clips with their logits and how many tokens each clip has."""
    if not len(data.test):
        raise DataError("data", "data without test clips", "one or more", "Add some.")
    for places in torch.arange(len(data.test)).split(recipe.part_size):
        batch = data.collate([data.test[place] for place in places.tolist()])
        batch = tree_map(lambda part: part if part is None else part.to(process.device), batch)
        yield batch, model(*batch[:2], *batch[4:]), -(-batch.frames // recipe.subsample)


def measure(model: nn.Module, data: SpeechData, recipe: SpeechRecipe, process: Process) -> dict[str, float]:
    """wer, cer and val_loss; of the codes of hidden tokens accuracy, val_loss, and the commonest code's share."""
    if recipe.goal == "best_rq":
        return _measure_codes(model, data, recipe, process)
    heard, losses = transcribed(model, data, recipe, process)
    rates = error_rates([text.text for text in heard], [clip.text for clip in data.test.clips])
    return {**rates, "val_loss": losses.mean().item()}


def transcribed(
    model: nn.Module, data: SpeechData, recipe: SpeechRecipe, process: Process
) -> tuple[list[ReadText], Tensor]:
    """What is heard in each test clip, and the clips' losses (n)."""
    decode, losses = decoder_of(recipe, data.characters), []
    heard: list[ReadText] = []
    for batch, logits, tokens in outputs(model, data, recipe, process):
        losses.append(ctc_losses(logits, tokens, batch.labels, batch.lengths))
        heard += [decode(row[None, :count])[0] for row, count in zip(logits, tokens.tolist(), strict=True)]
    return heard, torch.cat(losses)


def _measure_codes(model: nn.Module, data: SpeechData, recipe: SpeechRecipe, process: Process) -> dict[str, float]:
    losses, right, counts = [], 0, torch.zeros(recipe.codes, dtype=torch.long)
    for batch, logits, _ in outputs(model, data, recipe, process):
        codes, hidden = codes_of(model, batch)
        losses.append(code_losses(logits, codes, hidden))
        right += int((logits.argmax(2) == codes)[hidden].sum())
        counts += codes[hidden].cpu().bincount(minlength=recipe.codes)
    total = max(1, int(counts.sum()))
    loss = torch.cat(losses).mean().item()
    return {"accuracy": right / total, "val_loss": loss, "majority": int(counts.max()) / total}


def codes_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The code of each token of a batch (B, N), and which are hidden. What is behind a clip's end counts as zeros."""
    real = torch.arange(batch.features.shape[1], device=batch.frames.device) < batch.frames[:, None]
    hidden = torch.zeros_like(batch.frames[:, None]).bool() if batch.hidden is None else batch.hidden
    return model.quantizer(model.normed(batch.features) * real[..., None]), hidden


def draw(model: nn.Module, data: SpeechData, recipe: SpeechRecipe, folder: Path) -> list[Path]:
    """clips.png: test clips with the words that were heard, and the truth where it is another. None of BEST-RQ."""
    if recipe.goal == "best_rq":
        return []
    few = data.test.chosen(spread(len(data.test), DRAWN))
    device, rows = next(model.parameters()).device, []
    heard, _ = transcribed(model, replace(data, test=few), recipe, Process(device))
    for place, result in enumerate(heard):
        features, true = few[place].features, few.clips[place].text
        title = true if result.text == true else f"{result.text or '(nothing)'}     (true: {true})"
        rows.append((features, words_of(result, HOP * recipe.subsample), title, result.text == true))
    draw_spoken(folder / "clips.png", rows)
    return [folder / "clips.png"]


def predict(
    model: Any, data: SpeechData, recipe: SpeechRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """For each file, or each file of audio in a folder, its text, its words with their seconds, and a picture."""
    decode, rows = decoder_of(recipe, data.characters), []
    paths = [path for file in files for path in (find_audio(file) if file.is_dir() else [file])]
    for path, name in zip(paths, output_names(paths), strict=True):
        features = LogMel(recipe.rate, recipe.bands)(read(path, recipe.rate))
        heard = decode(listen(model, features[None].to(process.device), recipe))[0]
        words, picture = words_of(heard, HOP * recipe.subsample), folder / f"{name}-heard.png"
        draw_spoken(picture, pieces(features, words, heard.text))
        rows.append({"file": str(path), "text": heard.text, "picture": picture.name, "words": words})
    return rows


def listen(model: Conformer, features: Tensor, recipe: SpeechRecipe) -> Tensor:
    """The logits of one clip (1, T, bands): as a stream of steps where the model has a state, or of all at once."""
    if not recipe.causal or not model.streams:
        return model(features)
    parts: list[Tensor] = []
    state: StreamState | None = None
    for part in features.split(STEP_TOKENS * recipe.subsample, 1):
        spare = -part.shape[1] % recipe.subsample  # the last token hears no frame after its first
        logits, state = model.step(nn.functional.pad(part, (0, 0, 0, spare)), state)
        parts.append(logits)
    return torch.cat(parts, 1)
