"""Theorem 3.2 of PoM, executed: PolyMorphers of growing size fitted to continuous maps of sequences.

    python benchmarks/universality.py benchmarks/results/universality.json [--plot docs/images/universality.png]

Two maps of four tokens of two channels are fitted on random points of a cube, one that any order of the tokens leaves
as it is and one that does not; each with learned positions and without. The blocks are those of Eq. 3, without norms.
Without positions a PolyMorpher is equivariant, and no equivariant map is closer to f in d_2 than the mean of f over all
orders of the tokens: that distance is the floor. One thread; the seconds are processor time.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from saving import read, save
from torch import Tensor, nn

from polymix import PolyMorpher, lens
from polymix.measure import manifest
from polymix.measure.clock import Stopwatch

N, C = 4, 2
SIZES = ((1, 1), (1, 4), (1, 16), (2, 4), (2, 16), (4, 16))  # blocks, width of the hidden layers over C
STEPS, BATCH, RATE = 800, 256, 5e-3


def equivariant(x: Tensor) -> Tensor:
    """sin of each token times the token's distance from the mean: it does not ask for the order."""
    return torch.sin(3 * x) * (x - x.mean(-2, keepdim=True)).norm(dim=-1, keepdim=True)


def ordered(x: Tensor) -> Tensor:
    """sin of the sum of all tokens up to this one: it asks for the order."""
    return torch.sin(2 * x.cumsum(-2))


MAPS = {"equivariant": equivariant, "ordered": ordered}


def symmetrized(f: Any) -> Any:
    """The equivariant map that is nearest to f in d_2: the mean of P⁻¹ f(P X) over all orders P of the tokens."""
    orders = [torch.tensor(order) for order in itertools.permutations(range(N))]
    return lambda x: sum(f(x[..., order, :])[..., order.argsort(), :] for order in orders) / len(orders)


class Model(nn.Module):
    """PolyMorphers on tokens plus positions, all as wide as a token (Theorem 3.2)."""

    def __init__(self, depth: int, width: int, positions: bool) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(N, C)) if positions else None
        self.blocks = nn.Sequential(
            *(PolyMorpher(C, norm=None, mlp_ratio=width, expand=width) for _ in range(depth))
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x if self.place is None else x + self.place)


def run(name: str, depth: int, width: int, positions: bool, steps: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    f, model, watch = MAPS[name], Model(depth, width, positions), Stopwatch("processor")
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    for _ in range(steps):
        x = torch.rand(BATCH, N, C)
        loss = (model(x) - f(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    distances = {f"d_{p:g}": lens.distance(model, f, p=p, shape=(1, N, C)).value for p in (1, 2, torch.inf)}
    return {
        "map": name, "depth": depth, "width": width, "positions": positions, **distances,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": watch.seconds(), "clock": "processor",
    }  # fmt: skip


def plot(content: dict[str, Any], path: Path) -> None:
    """d_2 by number of parameters, for each map."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2, sharey=True), MAPS, strict=True):
        for positions, colour in ((True, "#0072b2"), (False, "#d55e00")):
            rows = [row for row in content["rows"] if (row["map"], row["positions"]) == (name, positions)]
            label = "learned positions" if positions else "no positions"
            axis.plot(
                [row["parameters"] for row in rows], [row["d_2"] for row in rows], "o-", color=colour, label=label
            )
        floor = content["floors"][name]
        if floor > 1e-9:
            axis.axhline(floor, color="#9a9a9a", linestyle=":", label="the nearest equivariant map")
        axis.set(xscale="log", yscale="log", xlabel="parameters", title=f"{name} map")
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
        if name == "equivariant":
            axis.set_ylabel("d_2 to the map")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = (1, N, C)
    floors = {name: lens.distance(f, symmetrized(f), shape=shape).value for name, f in MAPS.items()}
    setting = {"steps": arguments.steps, "floors": floors}
    content = read(arguments.out, {"machine": manifest("cpu", 1), **setting, "rows": []})
    there = {(row["map"], row["depth"], row["width"], row["positions"]) for row in content["rows"]}
    for name, positions, (depth, width) in itertools.product(MAPS, (True, False), SIZES):
        if (name, depth, width, positions) in there:
            continue
        row = run(name, depth, width, positions, arguments.steps)
        content["rows"].append(row)
        save(content, arguments.out)
        print(f"{name:12} {depth} blocks of {width:2}, positions {positions!s:5}: d_2 {row['d_2']:.4f}, "
              f"d_inf {row['d_inf']:.3f}, {row['seconds']:.1f} s", flush=True)  # fmt: skip
    if arguments.plot:
        plot(content, arguments.plot)


if __name__ == "__main__":
    main()
