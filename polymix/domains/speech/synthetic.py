"""Synthetic speech whose spelling depends on the first word: "meat" and "meet" sound the same."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from polymix.train.data.audio import library, resampled
from polymix.train.data.espeak import RATE, spoken
from polymix.train.data.sampling import number

# What is spoken, as it is written after "kitchen" and after "novel". Each pair sounds the same in all VOICES.
TOPICS = ("kitchen", "novel")
HOMOPHONES = (
    ("flour", "flower"), ("steak", "stake"), ("meat", "meet"), ("pear", "pair"), ("bread", "bred"), ("thyme", "time"),
    ("leek", "leak"), ("beet", "beat"), ("berry", "bury"), ("dough", "doe"), ("mussel", "muscle"), ("roll", "role"),
)  # fmt: skip
WORDS = (*TOPICS, *(first for first, _ in HOMOPHONES))
VOICES = ("en", "en+f1", "en+m5", "en-US", "en-US+f2", "en-US+m3", "en-GB-scotland", "en-GB-x-rp+f3")
MANNERS = ((140, 35), (165, 60), (190, 45))  # words a minute, and pitch
SPOKEN = (2, 4)  # homophones of a clip
PAUSE, GAP = 0.4, (0.02, 0.1)  # seconds after the first word, beyond what the convolutions hear; after the others
SOUND = 0.1  # of the loudest samples, below which a word's ends are cut off
LEVEL = 0.3  # of a word's loudest sample, times 0.5 to 1
NOISE = 0.01  # standard deviation of the background, times 0.1 to 1
Bank = dict[tuple[int, int], list[Tensor]]  # spoken words by word and voice


def write(folder: Path, seed: int, rate: int, train: int, test: int) -> None:
    """train/ and test/ with NNNNN.flac and, with its text, NNNNN.txt."""
    bank = _bank(folder / "bank.npz", rate)
    for part, count in (("train", train), ("test", test)):
        draw = torch.Generator().manual_seed(number("speech", part, seed))
        (folder / part).mkdir()
        for place in range(count):
            wave, text = clip(bank, rate, draw)
            path = folder / part / f"{place:05d}.flac"
            library().write(str(path), wave.clamp(-1, 1).numpy(), rate, subtype="PCM_16")
            path.with_suffix(".txt").write_text(text + "\n", "utf-8")
    (folder / "bank.npz").unlink()


def _bank(path: Path, rate: int) -> Bank:
    """All words in all voices and manners, without silence at their ends; `path` is written."""
    bank: Bank = {}
    several = spoken(WORDS, VOICES, MANNERS, path)
    for (voice, _, word), samples in zip(product(range(len(VOICES)), MANNERS, range(len(WORDS))), several, strict=True):
        wave = torch.from_numpy(samples).float() / 2**15
        loud = (wave.abs() > SOUND * wave.abs().max()).nonzero()
        bank.setdefault((word, voice), []).append(resampled(wave[loud[0] : loud[-1] + 1], RATE, rate))
    return bank


def clip(bank: Bank, rate: int, draw: torch.Generator) -> tuple[Tensor, str]:
    """A topic and after a pause some homophones in one voice, with noise, and the text as the topic spells it."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    def share() -> float:
        return float(torch.rand((), generator=draw))

    topic, voice, count = integer(0, len(TOPICS)), integer(0, len(VOICES)), integer(SPOKEN[0], SPOKEN[1] + 1)
    chosen = torch.randperm(len(HOMOPHONES), generator=draw)[:count].tolist()
    parts = [torch.zeros(round(rate * GAP[1] * (1 + share())))]
    for place, word in enumerate((topic, *(len(TOPICS) + one for one in chosen))):
        spoken = bank[word, voice]
        wave = spoken[integer(0, len(spoken))]
        seconds = GAP[0] + (GAP[1] - GAP[0]) * share() + (PAUSE if place == 0 else 0)
        parts += [wave * (LEVEL * (0.5 + 0.5 * share()) / wave.abs().max()), torch.zeros(round(rate * seconds))]
    wave = torch.cat(parts)
    wave += NOISE * (0.1 + 0.9 * share()) * torch.randn(len(wave), generator=draw)
    return wave, " ".join((TOPICS[topic], *(HOMOPHONES[one][topic] for one in chosen)))
