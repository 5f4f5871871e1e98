"""What does a whole network lose as a polynomial, and how much of it does distilling bring back?

    python benchmarks/polynomial_degrees.py benchmarks/results/polynomial-degrees.json

Three hosts with batch norms learn scikit-learn's digits: convolutions, and token mixers (`padre`, `poly_nl`) between
linear layers. `polymix.polynomialize` fits their activations at several degrees on a third of the training images, and
`polymix.distill` trains each polynomial on all of them with the host as its teacher. Accuracy is on test images, which
chose nothing. One thread, one seed; the seconds are processor time.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from saving import save
from torch import Tensor, nn

import polymix
from polymix.measure import manifest
from polymix.measure.clock import Stopwatch
from polymix.train.data.images import load_digits
from polymix.train.distill import accuracy
from polymix.train.distill.batches import logits_of

DEGREES = (2, 3, 5, 7)
SIDE, PATCH, DIM, SEED = 8, 2, 32, 0
BATCH, EPOCHS, RATE = 64, 12, 3e-3  # of the hosts
DISTILLING = {"epochs": 3, "learning_rate": 1e-3, "rest_rate": 1.0, "seed": SEED}
Batches = list[tuple[Tensor, Tensor]]


class TokenNorm(nn.Module):
    """A batch norm of the channels of tokens (B, N, C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class TokenHost(nn.Module):
    """Patches, a block with batch norms where others have layer norms, the mean of all tokens, a linear head."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, DIM))
        self.block = polymix.MixerBlock(DIM, mixer, mlp_ratio=2, norm=None)
        self.block.norm1, self.block.norm2 = TokenNorm(DIM), TokenNorm(DIM)
        self.head = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.block(tokens).mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * (SIDE // 2) ** 2, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 10),
    )  # fmt: skip


HOSTS = {
    "convolutions": convolutions,
    "padre": lambda: TokenHost(polymix.PadreConfig(kernel_size=3, degree=2)),
    "poly_nl": lambda: TokenHost(polymix.PolyNlConfig()),
}


def trained(name: str, images: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(SEED)
    model = HOSTS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def run(name: str, host: nn.Module, degree: int, data: Batches, test: Batches) -> dict[str, Any]:
    watch, model = Stopwatch("processor"), copy.deepcopy(host)
    report = polymix.polynomialize(model, data[: len(data) // 3], degree=degree)
    fitted = accuracy(model, test, logits_of, "cpu")
    polymix.distill(report, data, **DISTILLING)
    return {
        "host": name, "degree": degree, "before": accuracy(host, test, logits_of, "cpu"),
        "error": report.error, "fitted": fitted, "distilled": accuracy(model, test, logits_of, "cpu"),
        "kept": report.kept, "seconds": watch.seconds(), "clock": "processor",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_digits(SIDE)
    images, labels = digits.normalise(digits.train.images), digits.train.labels
    data = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    test = [(digits.normalise(digits.test.images), digits.test.labels)]
    settings = {"epochs": EPOCHS, "distilling": DISTILLING, "images": [len(images), len(test[0][1])]}
    content: dict[str, Any] = {"machine": manifest("cpu", 1), "settings": settings, "rows": []}
    for name in HOSTS:
        host = trained(name, images, labels)
        for degree in DEGREES:
            row = run(name, host, degree, data, test)
            content["rows"].append(row)
            save(content, arguments.out)
            print(f"{name:12} degree {degree}: {row['before']:.3f} → {row['fitted']:.3f} → {row['distilled']:.3f}, "
                  f"{row['seconds']:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
