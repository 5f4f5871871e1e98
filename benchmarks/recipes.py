"""Three small experiments that the papers of polynomial mixers leave open: triplets, orders, degree against GELU.

    python benchmarks/recipes.py benchmarks/results/recipes.json [--only triplets,orders,degree] [--data …]

triplets: Poly-NL learns digits as four tokens of four channels. `lens.interactions` ranks its triplets, a dense
`lens.PolynomialLayer` keeps some of them by a mask, and learns on; the controls are as many at random. The same from a
layer that has learned all triplets.
orders: Poly-NL's orders 2 and 3 alone, as one sum, and with a weight β of each order that learns apart.
degree: PADRe of degrees 1 to 4 in one block whose MLP has a GELU, a square or nothing between its layers.
Digits of scikit-learn, and `polymix compare`'s scenes of four, of which one points at another. Accuracy is on test
images; the mean of all seeds is printed. One thread; seconds are the processor's.
"""

import argparse
import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from polynomial_degrees import BATCH, RATE, Batches, TokenHost, hits, train
from saving import read, save
from torch import Tensor, nn

import polymix
from polymix import lens
from polymix.domains.classify.data import load_scenes
from polymix.measure import manifest
from polymix.measure.clock import Stopwatch
from polymix.train.data.images import load_digits

SEEDS, EPOCHS = (0,), {"digits": 12, "scenes": 6}
SCENES = 3000  # of training
TOKENS = CHANNELS = 4  # of the triplets: quarters of a digit
SHARES = (1.0, 0.25, 0.05)  # of the triplets that stay
LEARNING = 3  # epochs with a mask


def images_of(name: str) -> tuple[Batches, Batches]:
    loaded = load_digits(8) if name == "digits" else load_scenes()
    train_images, labels = loaded.normalise(loaded.train.images[:SCENES]), loaded.train.labels[:SCENES]
    data = list(zip(train_images.split(BATCH), labels.split(BATCH), strict=True))
    return data, [(loaded.normalise(loaded.test.images), loaded.test.labels)]


class Quarters(nn.Module):
    """Digits as 4 tokens, the quarters, of 4 channels, means of 2 × 2 pixels; a layer, a residual, a linear head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(TOKENS * CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        small = nn.functional.avg_pool2d(x, 2).unflatten(2, (2, 2)).unflatten(4, (2, 2))  # (B, 1, 2, 2, 2, 2)
        tokens = small.permute(0, 2, 4, 3, 5, 1).reshape(len(x), TOKENS, CHANNELS)
        return self.head((tokens + self.layer(tokens)).flatten(1))


def chosen(found: lens.Interactions, count: int, generator: torch.Generator | None = None) -> Tensor:
    """The mask of W^[3] of the strongest triplets, or of as many of those that reach an output at random."""
    rank = found.strength * found.reach
    if generator is not None:
        rank = torch.rand(rank.shape, generator=generator, dtype=rank.dtype) * found.reach
    size = TOKENS * CHANNELS
    places = rank.flatten().topk(count).indices
    rows, outputs = places // size, places % size
    mask = torch.zeros(size, size, size, size, dtype=torch.bool)
    for order in itertools.permutations(range(3)):
        mask[(outputs, *found.entries[rows][:, order].T)] = True
    return mask.reshape([TOKENS, CHANNELS] * 4)


def triplets(seed: int, _: list[str]) -> Iterator[dict[str, Any]]:
    data, test = images_of("digits")
    torch.manual_seed(seed)
    first = train(Quarters(polymix.create_mixer("poly_nl", dim=CHANNELS)), data, RATE, EPOCHS["digits"], seed)
    own = copy.deepcopy(first)
    own.layer = lens.PolynomialLayer.fit(first.layer, tokens=TOKENS).float()  # the same numbers, as dense weights
    whole = train(copy.deepcopy(own), data, RATE, LEARNING, seed)
    most = 0
    for name, model in (("poly_nl", own), ("all triplets", whole)):
        found = lens.interactions(model.layer, 3, shape=(1, TOKENS, CHANNELS))
        reached = int(found.reach.sum())
        most = most or reached
        weights = [lens.WeightTensor(int(order), part.weights().detach().double())
                   for order, part in model.layer.parts.items()]  # fmt: skip
        for share in SHARES:
            for control in (False, True) if share < 1 or name != "poly_nl" else (False,):
                count = round(share * most)
                mask = chosen(found, count, torch.Generator().manual_seed(seed) if control else None)
                pruned = copy.deepcopy(model)
                pruned.layer = lens.PolynomialLayer.fit(weights, masks={3: mask}).float()
                row = {"from": name, "at_random": control, "triplets": count, "reached": reached,
                       "before": hits(model, test), "pruned": hits(pruned, test)}  # fmt: skip
                yield {**row, "learned": hits(train(pruned, data, RATE, LEARNING, seed), test)}


class Apart(nn.Module):
    """The sum of Poly-NL's orders, each with a weight β of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.orders = nn.ModuleList(polymix.create_mixer("poly_nl", dim=dim, order=order) for order in (2, 3))

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.orders[0](x, **call) + self.orders[1](x, **call)


def host(source: str, mixer: Any) -> nn.Module:
    return TokenHost(mixer, *((8, 2) if source == "digits" else (16, 4)))


def orders(seed: int, sources: list[str]) -> Iterator[dict[str, Any]]:
    for source in sources:
        data, test = images_of(source)
        for order in (2, 3, "2+3", "apart"):
            torch.manual_seed(seed)
            model = host(source, polymix.PolyNlConfig(order=2 if order == "apart" else order))
            if order == "apart":
                model.block.mixer = Apart(model.block.mixer.dim)
            train(model, data, RATE, EPOCHS[source], seed)
            betas = [round(part.beta.item(), 3) for part in model.modules() if hasattr(part, "beta")]
            yield {"data": source, "order": order, "accuracy": hits(model, test), "betas": betas}


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"GELU": nn.GELU, "square": Square, "none": nn.Identity}


def degree(seed: int, sources: list[str]) -> Iterator[dict[str, Any]]:
    for source in sources:
        data, test = images_of(source)
        for name, build in ACTIVATIONS.items():
            for power in (1, 2, 3, 4):
                torch.manual_seed(seed)
                model = host(source, polymix.PadreConfig(kernel_size=3, degree=power))
                for part in list(model.modules()):
                    for key, child in part.named_children():
                        if isinstance(child, nn.GELU):
                            setattr(part, key, build())
                accuracy = hits(train(model, data, RATE, EPOCHS[source], seed), test)
                yield {"data": source, "activation": name, "degree": power, "accuracy": accuracy}


PARTS = {"triplets": triplets, "orders": orders, "degree": degree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--data", default=",".join(EPOCHS), help="of orders and degree; default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content = read(arguments.out, {"machine": manifest("cpu", 1), "epochs": EPOCHS, "learning": LEARNING, "parts": {}})
    for name in arguments.only.split(","):
        watch = Stopwatch("processor")
        seeds = [list(PARTS[name](seed, arguments.data.split(","))) for seed in SEEDS]
        rows = []
        for same in zip(*seeds, strict=True):
            row = dict(same[0])
            for key in ("before", "pruned", "learned", "accuracy", "reached"):
                if key in row:
                    row[key] = fmean(other[key] for other in same)
            rows.append(row | ({"betas": [other["betas"] for other in same]} if "betas" in row else {}))
            print(rows[-1], flush=True)
        content["parts"][name] = {"rows": rows, "seconds": watch.seconds(), "clock": watch.clock}
        save(content, arguments.out)


if __name__ == "__main__":
    main()
