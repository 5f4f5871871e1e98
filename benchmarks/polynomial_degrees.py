"""What does a whole network lose as a polynomial or a quotient, and how much of it does distilling bring back?

    python benchmarks/polynomial_degrees.py benchmarks/results/polynomial-degrees.json [--data digits,scenes,fashion]

Three hosts with batch norms learn to name images: convolutions, and token mixers (`padre`, `poly_nl`) between linear
layers. `polymix.polynomialize` fits their activations on a third of the training images, at several degrees, and
`polymix.distill` trains each polynomial on all of them with the host as its teacher. The control is the host, trained
for as many passes more at the same rate. A study of quotients (--part forms) compares N, N / R and N / (R² + ε), with
coefficients that learn, and counts poles. The distilled networks are quantised in 8 bits throughout (a8w8), as
`polymix export --target qnn` does, and measured in the emulator of Qualcomm's processor and, the same file, on the CPU.
Accuracy is on test images, which chose nothing. One thread, one seed; seconds are the processor's. Rows are saved when
they are there; the same command continues.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numpy.polynomial.chebyshev import chebroots
from saving import read, save
from torch import Tensor, nn

import polymix
from polymix.domains.classify.data import load_scenes
from polymix.errors import CapabilityError, OptionError, one_line
from polymix.export import hexagon, int8
from polymix.export.graph import Graph
from polymix.export.manifest import load
from polymix.export.wide import operator_groups
from polymix.export.write import one_sample
from polymix.measure import manifest
from polymix.measure.clock import Stopwatch
from polymix.polynomials.activations import RationalActivation
from polymix.train.data.idx import FASHION
from polymix.train.data.images import ImageData, load_digits, load_own
from polymix.train.distill import accuracy
from polymix.train.distill.batches import logits_of

DEGREES = (2, 3, 5, 7)
FORMS: dict[str, dict[str, Any]] = {
    "N": {}, "N / (R² + ε), R of degree 1": {"denominator": 1}, "N / R, R of degree 2": {"denominator": 2, "eps": 0.0},
    "N / R, R of degree 1": {"denominator": 1, "eps": 0.0},
}  # fmt: skip
PATCH, DIM, SEED = 2, 32, 0
BATCH, RATE = 64, 3e-3  # of the hosts
DISTILLING = {"epochs": 3, "learning_rate": 1e-3, "rest_rate": 1.0, "seed": SEED}
CALIBRATION, EMULATED = 128, 1000  # images of training for ranges; of test, at most, in the emulator


class Source(NamedTuple):
    """Images of so many pixels a side: how many are trained on, for how many passes, and how many are tests."""

    load: Callable[[], ImageData]
    side: int
    images: int
    epochs: int
    tests: int | None = None


DATA = {
    "digits": Source(lambda: load_digits(8), 8, 1438, 12), "scenes": Source(load_scenes, 16, 6000, 12),
    "fashion": Source(lambda: load_own(FASHION, 8), 8, 1600, 12, 2000),
}  # fmt: skip
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

    def __init__(self, mixer: Any, side: int, patch: int = PATCH) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, DIM))
        self.block = polymix.MixerBlock(DIM, mixer, mlp_ratio=2, norm=None)
        self.block.norm1, self.block.norm2 = TokenNorm(DIM), TokenNorm(DIM)
        self.head = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.block(tokens).mean(1))


def convolutions(side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * (side // 2) ** 2, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 10),
    )  # fmt: skip


HOSTS = {
    "convolutions": convolutions,
    "padre": lambda side: TokenHost(polymix.PadreConfig(kernel_size=3, degree=2), side),
    "poly_nl": lambda side: TokenHost(polymix.PolyNlConfig(), side),
}


def train(model: nn.Module, data: Batches, rate: float, epochs: int, seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    images, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    optimizer = torch.optim.AdamW(model.train().parameters(), rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def hits(model: nn.Module, test: Batches) -> float:
    return accuracy(model, test, logits_of, "cpu")


def poles(model: nn.Module) -> int:
    """How many of the activations have a real pole in the range that they were fitted on."""
    count = 0
    for part in model.modules():
        if isinstance(part, RationalActivation) and not part.eps:
            roots = chebroots(part.denominators.detach().double().numpy())
            count += any(abs(root.imag) < 1e-9 and abs(root.real) <= 1 for root in roots)
    return count


def changed(host: nn.Module, data: Batches, test: Batches, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the host as a polynomial or quotient, distilled, and what is known of it."""
    watch, model = Stopwatch("processor"), copy.deepcopy(host)
    report = polymix.polynomialize(model, data[: len(data) // 3], **options)
    fitted, before = hits(model, test), poles(model)
    try:
        polymix.distill(report, data, **DISTILLING)
        distilled: float | None = hits(model, test)
    except OptionError as error:  # a loss that is not finite
        distilled, report.kept = None, one_line(error)
    row = {"error": report.error, "fitted": fitted, "distilled": distilled, "kept": report.kept,
           "poles": [before, poles(model)], "activations": len(report.activations),
           "seconds": watch.seconds(), "clock": watch.clock}  # fmt: skip
    return model, row


def integers(model: nn.Module, data: Batches, test: Batches) -> dict[str, Any]:
    """Accuracy on the first test images: in float32, in integers on the CPU, and in the emulator."""
    images, labels = test[0][0][:EMULATED], test[0][1][:EMULATED]
    graph = one_sample(Graph.of(model, images[:1]))
    (name,) = graph.inputs
    ranges = [{name: image[None].numpy()} for image in torch.cat([batch for batch, _ in data])[:CALIBRATION]]

    def share(call: Callable[[dict[str, Any]], Any]) -> float:
        outputs = [next(iter(call({name: image[None].numpy()}).values())).argmax() for image in images]
        return float((torch.tensor(outputs) == labels).float().mean())

    row: dict[str, Any] = {"images": len(images), "float": hits(model, [(images, labels)])}
    with TemporaryDirectory() as folder:
        path, quantised = Path(folder) / "model.onnx", Path(folder) / "a8w8.onnx"
        try:
            hexagon.write_graph(graph, path)
            known = int8.quantise(path, quantised, ranges, "a8w8", hexagon.quantised_wholly, hexagon.STRENGTHS, None,
                                  operator_groups)  # fmt: skip
            compiled = hexagon.compile_context(quantised, hexagon.CHIPS[hexagon.DEFAULT_CHIP])
        except CapabilityError as error:
            return {**row, "refused": one_line(error)}
        return {**row, "error": known["error"], "cpu": share(load("onnx", quantised, 1)),
                "emulator": share(load("qnn", compiled.context))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--part", default="degrees,forms", help="which, in this order; default: %(default)s")
    parser.add_argument("--integers", default="convolutions", help="networks to quantise; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {"distilling": DISTILLING, "epochs": {name: source.epochs for name, source in DATA.items()}}
    new = {"machine": manifest("cpu", arguments.threads), "settings": settings, "images": {}, "rows": []}
    content = read(arguments.out, new) | {"settings": settings}
    there = {(row["data"], row["host"], row["form"], row["degree"], row["part"]) for row in content["rows"]}

    def add(row: dict[str, Any]) -> None:
        content["rows"].append(row)
        save(content, arguments.out)
        print(row, flush=True)

    for source in arguments.data.split(","):
        loaded, side, count, epochs = (found := DATA[source]).load(), found.side, found.images, found.epochs
        chosen = torch.randperm(len(loaded.train), generator=torch.Generator().manual_seed(SEED))[:count]
        images, labels = loaded.normalise(loaded.train.images[chosen]), loaded.train.labels[chosen]
        data = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
        test = [(loaded.normalise(loaded.test.images[: found.tests]), loaded.test.labels[: found.tests])]
        content["images"][source] = [len(images), len(test[0][1])]
        for name, build in HOSTS.items():
            torch.manual_seed(SEED)
            host = train(build(side), data, RATE, epochs)
            for part in arguments.part.split(","):
                cases: list[tuple[str, int | None]] = [(form, 3) for form in FORMS]
                if part != "forms":
                    cases = [("host", None), *(("N", degree) for degree in DEGREES), ("N / (R² + ε), R of degree 1", 3)]
                for form, degree in cases:
                    key = {"data": source, "host": name, "form": form, "degree": degree}
                    if (*key.values(), part) in there:
                        continue
                    key["part"] = part
                    if degree is None:
                        model = train(copy.deepcopy(host), data, DISTILLING["learning_rate"], DISTILLING["epochs"])
                        row = {"fitted": hits(host, test), "distilled": hits(model, test)}
                    else:
                        options = {**FORMS[form], "degree": degree, "learned": part == "forms"}
                        model, row = changed(host, data, test, **options)
                    if part == "degrees" and name in arguments.integers.split(","):
                        row["integers"] = integers(model, data, test)
                    add({**key, **row})


if __name__ == "__main__":
    main()
