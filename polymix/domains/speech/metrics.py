"""How well a model hears: error rates of words and characters, or of BEST-RQ the share of codes; pictures of clips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss
from torch.utils._pytree import tree_map

from polymix.domains.speech.conformer import Conformer, StreamState
from polymix.domains.speech.data import Batch, SpeechData
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.errors import DataError, shortened
from polymix.files import output_names
from polymix.train.data.audio import AUDIO, HOP, LogMel, read
from polymix.train.data.ctc import BLANK, ReadText, decoder_of
from polymix.train.data.drawing import INK, WRONG, save_figure
from polymix.train.data.edits import distance
from polymix.train.data.splits import natural, spread
from polymix.train.task import Process

DRAWN, MAX_TITLE = 4, 90  # clips of a picture; characters above one
STEP_TOKENS = 250  # of a stream that are computed at once
Word = dict[str, Any]


def ctc_losses(logits: Tensor, batch: Batch, tokens: Tensor) -> Tensor:
    """(B): the loss of each clip, divided by its number of characters."""
    logs = logits.float().log_softmax(-1).transpose(0, 1)
    losses = ctc_loss(logs, batch.labels, tokens.cpu(), batch.lengths.cpu(), BLANK, "none", zero_infinity=True)
    return losses / batch.lengths.to(losses).clamp_min(1)


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
    """wer, cer and loss; of BEST-RQ accuracy and loss of the hidden tokens' codes, and the commonest code's share."""
    if recipe.goal == "best_rq":
        return _measure_codes(model, data, recipe, process)
    decode, heard, losses = decoder_of(recipe, data.characters), [], []
    for batch, logits, tokens in outputs(model, data, recipe, process):
        losses.append(ctc_losses(logits, batch, tokens))
        heard += [decode(row[None, :count])[0].text for row, count in zip(logits, tokens.tolist(), strict=True)]
    return {**error_rates(heard, [clip.text for clip in data.test.clips]), "loss": torch.cat(losses).mean().item()}


def error_rates(heard: Sequence[str], true: Sequence[str]) -> dict[str, float]:
    """wer and cer: edits from all texts to all that is true, as shares of its words and of its characters."""
    pairs = list(zip(heard, true, strict=True))
    words = sum(distance(text.split(), truth.split()) for text, truth in pairs)
    characters = sum(distance(text, truth) for text, truth in pairs)
    return {"wer": words / max(1, sum(len(truth.split()) for truth in true)),
            "cer": characters / max(1, sum(map(len, true)))}  # fmt: skip


def _measure_codes(model: nn.Module, data: SpeechData, recipe: SpeechRecipe, process: Process) -> dict[str, float]:
    losses, right, counts = [], 0, torch.zeros(recipe.codes, dtype=torch.long)
    for batch, logits, _ in outputs(model, data, recipe, process):
        codes, hidden = codes_of(model, batch)
        losses.append(code_losses(logits, codes, hidden))
        right += int((logits.argmax(2) == codes)[hidden].sum())
        counts += codes[hidden].cpu().bincount(minlength=recipe.codes)
    total = max(1, int(counts.sum()))
    return {"accuracy": right / total, "loss": torch.cat(losses).mean().item(), "majority": int(counts.max()) / total}


def codes_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The code of each token of a batch (B, N), and which are hidden."""
    hidden = torch.zeros_like(batch.frames[:, None]).bool() if batch.hidden is None else batch.hidden
    return model.quantizer(model.normed(batch.features)), hidden


def words_of(heard: ReadText, recipe: SpeechRecipe) -> list[Word]:
    """Each word with the seconds of its first and last character, and the least probability of one of them."""
    words: list[Word] = []
    place = 0
    for text in heard.text.split(" "):
        spots, chances = heard.places[place : place + len(text)], heard.certain[place : place + len(text)]
        place += len(text) + 1
        if text:
            start, end = (HOP * recipe.subsample * token for token in (spots[0][0], spots[-1][1] + 1))
            words.append({"word": text, "from": round(start, 3), "to": round(end, 3), "probability": min(chances)})
    return words


def draw(model: nn.Module, data: SpeechData, recipe: SpeechRecipe, folder: Path) -> list[Path]:
    """clips.png: test clips with the words that were heard, and the truth where it is another. None of BEST-RQ."""
    if recipe.goal == "best_rq":
        return []
    few = data.test.chosen(spread(len(data.test), DRAWN))
    decode, rows = decoder_of(recipe, data.characters), []
    results = outputs(model, replace(data, test=few), recipe, Process(next(model.parameters()).device))
    heard = [decode(row[None, :count])[0] for _, logits, tokens in results for row, count in zip(logits, tokens)]  # noqa: B905
    for place, result in enumerate(heard):
        features, true = few[place].features, few.clips[place].text
        title = true if result.text == true else f"{result.text or '(nothing)'}     (true: {true})"
        rows.append((features, words_of(result, recipe), title, result.text == true))
    draw_clips(folder / "clips.png", rows)
    return [folder / "clips.png"]


def draw_clips(path: Path, rows: Sequence[tuple[Tensor, Sequence[Word], str, bool]]) -> None:
    """A row for each clip: its features (frames, bands), low bands below, and each word where it was heard."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.9 * len(rows)), layout="constrained")
    for axes, (features, words, title, right) in zip(
        figure.subplots(len(rows), squeeze=False)[:, 0], rows, strict=True
    ):
        seconds, bands = HOP * len(features), features.shape[1]
        axes.imshow(features.T.numpy(), origin="lower", aspect="auto", cmap="magma", extent=(0, seconds, 0, bands))
        for word in words:
            axes.axvspan(word["from"], word["to"], color="white", alpha=0.25, lw=0)
            middle = (word["from"] + word["to"]) / 2
            axes.text(middle, 0.93 * bands, word["word"], color="white", fontsize=8, ha="center", va="top")
        axes.set_title(shortened(title, MAX_TITLE), fontsize=9, loc="left", color=INK if right else WRONG)
        axes.set_yticks([])
    axes.set_xlabel("seconds")
    save_figure(path, figure)


def predict(
    model: Any, data: SpeechData, recipe: SpeechRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """For each file, or each file of audio in a folder, its text, its words with their seconds, and a picture."""
    decode, rows = decoder_of(recipe, data.characters), []
    paths = [path for file in files for path in (_audio_in(file) if file.is_dir() else [file])]
    for path, name in zip(paths, output_names(paths), strict=True):
        features = LogMel(recipe.rate, recipe.bands)(read(path, recipe.rate))
        heard = decode(listen(model, features[None].to(process.device), recipe))[0]
        words, picture = words_of(heard, recipe), folder / f"{name}-heard.png"
        draw_clips(picture, [(features, words, heard.text, True)])
        rows.append({"file": str(path), "text": heard.text, "picture": picture.name, "words": words})
    return rows


def _audio_in(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in AUDIO)
    found = sorted(paths, key=lambda path: natural(str(path)))
    if not found:
        raise DataError("files", f"{folder} without audio", f"files such as {', '.join(sorted(AUDIO))}", "Check it.")
    return found


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
