"""How good drawn images are: a judge, the Fréchet distance in its features, precision and recall."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polymix.convert.saving.files import read_tensors
from polymix.files import write_whole
from polymix.train.data.sampling import isolated_random_state, number, seed_all
from polymix.train.data.splits import spread

FEATURES = 64
NEIGHBOURS = 3
TURNS = ("0°", "90°", "180°", "270°")  # what a judge learns of images without classes
BATCH = 64


class Judge(nn.Module):
    """A small convolutional network that names the class of images (B, C, S, S); its 64 features measure them.

    Where the images have no classes it names by how many quarter turns an image was turned.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        halvings = max(1, math.ceil(math.log2(max(size, 4) / 4)))
        widths = [32, *(min(64 << place, 256) for place in range(halvings))]
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1), nn.SiLU()]
        for narrow, wide in pairwise(widths):
            layers += [nn.Conv2d(narrow, wide, 3, 2, padding=1), nn.SiLU()]
        layers += [nn.Conv2d(widths[-1], 64, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(4 if size >= 4 else size)]
        self.body = nn.Sequential(*layers, nn.Flatten())
        self.last = nn.Linear(64 * min(size, 4) ** 2, FEATURES)
        self.head = nn.Linear(FEATURES, max(classes, 2) if classes > 1 else len(TURNS))
        self.turns = classes < 2

    def features(self, images: Tensor) -> Tensor:
        """(B, 64)."""
        return self.last(self.body(images))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        return self.head(nn.functional.silu(self.features(images)))


def batches(dataset: Any, places: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and classes at some places of a data set, a batch at a time."""
    for start in range(0, len(places), BATCH):
        samples = [dataset[place] for place in places[start : start + BATCH]]
        yield torch.stack([sample[0] for sample in samples]), torch.tensor([int(sample[1]) for sample in samples])


def train_judge(
    train: Any, test: Any, shape: tuple[int, int, int], classes: int, steps: int, file: Path,
    say: Callable[[str], None],
) -> tuple[Judge, float]:  # fmt: skip
    """A judge trained on real images, and its accuracy on test images; read from `file` if it holds just this judge.

    The judge depends on the images and on `steps` alone, not on the run's seed: all runs have the same one.
    """
    judge = Judge(shape[0], shape[1], classes)
    crc = zlib.crc32(repr((steps, shape, classes, len(train), len(test))).encode())
    for place in spread(len(train), 64):
        crc = zlib.crc32(train[place][0].numpy().tobytes(), crc)
    try:
        saved = read_tensors(file)
        if saved["of"] == crc:
            judge.load_state_dict(saved["state"])
            return judge.eval(), float(saved["accuracy"])
    except Exception:  # it is missing, or damaged in whatever way: it is trained anew
        judge = Judge(shape[0], shape[1], classes)
    with isolated_random_state(), torch.enable_grad():
        seed_all(number(0, "judge"))
        judge = Judge(shape[0], shape[1], classes)
        adam = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.01)
        falling = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, total_steps=steps + 1)
        for _ in range(steps):
            chosen = torch.randint(len(train), (BATCH,)).tolist()
            images, labels = _task(judge, *next(batches(train, chosen)))
            adam.zero_grad()
            cross_entropy(judge(images), labels).backward()
            adam.step()
            falling.step()
        judge.eval()
        right = total = 0
        with torch.no_grad():
            for images, labels in batches(test, spread(len(test), 10_000)):
                images, labels = _task(judge, images, labels)
                right += int((judge(images).argmax(1) == labels).sum())
                total += len(labels)
    accuracy = right / total
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, lambda part: torch.save({"of": crc, "state": judge.state_dict(), "accuracy": accuracy}, part))
    say(f"Judge: {accuracy:.1%} of {total:,} real test images right")
    return judge, accuracy


def _task(judge: Judge, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a judge learns of images: their classes, or their quarter turns."""
    if not judge.turns:
        return images, labels
    turns = torch.randint(len(TURNS), (len(images),))
    turned = [image.rot90(turn, (1, 2)) for image, turn in zip(images, turns.tolist(), strict=True)]
    return torch.stack(turned), turns


def frechet_distance(one: Tensor, two: Tensor) -> float:
    """|μ₁ − μ₂|² + tr(S₁ + S₂ − 2 (S₁ S₂)^½): the Fréchet distance of two sets of features (n, F) as normal ones.

    Computed in float64. Source: Heusel et al. 2017, Section 4.
    """
    one, two = one.double(), two.double()
    first, second = torch.cov(one.T), torch.cov(two.T)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ second @ root).clamp_min(0).sqrt().sum()
    distance = (one.mean(0) - two.mean(0)).square().sum() + first.trace() + second.trace() - 2 * mixed
    return max(distance.item(), 0.0)


def precision_and_recall(real: Tensor, drawn: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """The share of drawn features (n, F) that are near a real one, and of real ones that are near a drawn one.

    Near is at most as far as that feature's third neighbour in its own set. Source: Kynkäänniemi et al. 2019.
    """

    def near(of: Tensor, points: Tensor) -> float:
        radius = torch.cdist(of, of).kthvalue(neighbours + 1, 1).values  # the nearest is the point itself
        parts = [(torch.cdist(part, of) <= radius).any(1) for part in points.split(1000)]
        return torch.cat(parts).double().mean().item()

    return near(real, drawn), near(drawn, real)
