"""Does PADRe saturate beyond degree 3, and does another basis or a normalised Y cure it?

    python benchmarks/degree_study.py --out benchmarks/results/degree-study

Trains the same vision transformer on scikit-learn's digits with PADRe of degree 1 to 8 in four bases, with and without
RMS normalisation of Y, with several seeds. Every W_i is learned, one number per channel. `--host tight`, the default,
leaves the work to the mixer: 16 tokens of 2 × 2 pixels, one block of 8 channels, an MLP of one unit. `--host roomy` has
two blocks of 32 channels and an MLP of 8 units, with which nearly every degree solves the digits.

Besides the score and losses it records how activations and gradients grow with the degree, before and after training:
the RMS of the mixers' outputs, their largest entry, and the norm of the loss's gradient over the mixers' parameters, on
the first samples.

`--host deep` has eight blocks of 16 channels; `--host text` is a language model with eight layers of 64 channels,
judged by its held-out loss. `--unclipped` leaves gradients as they are, and `--precisions bfloat16` computes in that
type: where high degrees could be unstable. `--only`, `--bases` and `--normalize` take some runs.

Each finished run is written before the next begins. The same command continues an interrupted study and draws the plot.
`--quick` takes degrees 1 to 3, one seed and two epochs.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from degree_hosts import HOSTS, Digits, Prose, Run
from saving import save
from torch import nn

import polymix
from polymix.errors import OptionError
from polymix.measure.machine import manifest
from polymix.train.in_memory import train_in_memory

BASES = ("monomial", "chebyshev", "legendre", "hermite")


def runs(
    degrees: Sequence[int], seeds: int, bases: Sequence[str], normals: Sequence[str | None], precisions: Sequence[str]
) -> Iterator[Run]:
    """Every run, a seed at a time; at degree 1 all bases are one."""
    for seed in range(seeds):
        for precision in precisions:
            for degree in degrees:
                for basis in bases if degree > 1 else bases[:1]:
                    for normalize in normals:
                        yield {"seed": seed, "degree": degree, "basis": basis, "normalize": normalize,
                               "precision": precision}  # fmt: skip


def growth(model: nn.Module, host: Digits | Prose, data: Any) -> Run:
    """Spread and largest entry of the mixers' outputs, and the gradient's norm over their parameters."""
    mixers = [module for module in model.modules() if isinstance(module, polymix.PadreMixer)]
    outputs: list[torch.Tensor] = []
    hooks = [mixer.register_forward_hook(lambda module, args, y: outputs.append(y.detach())) for mixer in mixers]
    model.train()
    model.zero_grad()
    host.loss(model, data).backward()
    for hook in hooks:
        hook.remove()
    grads = [p.grad.norm() for mixer in mixers for p in mixer.parameters() if p.grad is not None]
    found = {
        "rms": max(y.square().mean().sqrt().item() for y in outputs),
        "largest": max(y.abs().max().item() for y in outputs),
        "gradient": torch.stack(grads).norm().item(),
    }
    model.zero_grad()
    return found


def measure(run: Run, host: Digits | Prose, data: Any) -> Run:
    """A training's outcome; the host's score is None where it diverged. losses: of the first step of each epoch."""
    torch.manual_seed(run["seed"])
    before, task = growth(host.build(run, data), host, data), host.task(run)
    models: list[nn.Module] = []

    def one() -> nn.Module:
        models.append(host.build(run, data))
        return models[-1]

    outcome: Run = {host.score: None, "seconds": None, "losses": []}
    with suppress(OptionError):  # the loss is not finite
        trained = train_in_memory(task, data, one)
        each = math.ceil(1 / task.epoch(data, 1))
        score = trained.details(task, data)["metrics"][host.score]
        outcome = {host.score: score, "seconds": trained.seconds, "losses": trained.losses[::each]}
    return {
        **run, **outcome, "at_init": before, "trained": growth(models[0], host, data),
        "parameters": sum(p.numel() for p in models[0].parameters()),
    }  # fmt: skip


def written(row: Run) -> float | None:
    """Test accuracy in per cent, or the held-out loss; None: it diverged."""
    if "loss" in row:
        return row["loss"]
    return None if row["accuracy"] is None else 100 * row["accuracy"]


def table(rows: list[Run]) -> str:
    """The score, mean over seeds, a row a basis and normalisation, a column a degree."""
    digits = 3 if "loss" in rows[0] else 1
    degrees, first = sorted({row["degree"] for row in rows}), rows[0]["basis"]
    lines = ["| basis | Y | " + " | ".join(map(str, degrees)) + " |", "|---|---|" + "---|" * len(degrees)]
    for basis in BASES:
        for normalize in (None, "rms"):
            cells = []
            for degree in degrees:
                its = [row for row in rows if row["degree"] == degree and row["normalize"] == normalize
                       and row["basis"] == (basis if degree > 1 else first)]  # fmt: skip
                good = [score for row in its if (score := written(row)) is not None]
                cells.append((f"{sum(good) / len(good):.{digits}f}" if good else "–")
                             + (f" ({len(its) - len(good)} diverged)" if len(good) < len(its) else ""))  # fmt: skip
            if any(cell != "–" for cell in cells):
                lines.append(f"| {basis} | {normalize or 'as it is'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3)
    panels = (
        ("held-out loss" if "loss" in rows[0] else "test accuracy, %", written),
        ("gradient of the mixers at init", lambda row: row["at_init"]["gradient"]),
        ("largest output of a mixer, trained", lambda row: row["trained"]["largest"]),
    )
    for top, normalize in zip(axes, (None, "rms"), strict=True):
        for place, (axis, (label, value)) in enumerate(zip(top, panels, strict=True)):
            for basis, colour, marker in zip(BASES, ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), "os^D", strict=True):
                points: dict[int, list[float]] = {}
                for row in rows:
                    if row["normalize"] == normalize and (row["basis"] == basis or row["degree"] == 1):
                        number = value(row)
                        points.setdefault(row["degree"], []).extend([] if number is None else [number])
                degrees = sorted(degree for degree, number in points.items() if number)
                means = [sum(points[degree]) / len(points[degree]) for degree in degrees]
                axis.plot(degrees, means, color=colour, marker=marker, label=basis, markersize=4)
                axis.vlines(degrees, [min(points[d]) for d in degrees], [max(points[d]) for d in degrees],
                            color=colour, alpha=0.4)  # fmt: skip
            axis.set(xlabel="degree", title=f"{label}\nY {'as it is' if normalize is None else 'RMS-normalised'}")
            axis.grid(color="#e4e4e4")
            axis.spines[["top", "right"]].set_visible(False)
            if place:
                axis.set_yscale("log")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("degree-study"))
    parser.add_argument("--degrees", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--host", choices=HOSTS, default="tight")
    parser.add_argument("--only", type=int, nargs="+", help="these degrees alone")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=BASES)
    parser.add_argument("--normalize", nargs="+", choices=("none", "rms"), default=("none", "rms"))
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bfloat16", "float16"), default=("float32",))
    parser.add_argument("--unclipped", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.degrees, chosen.seeds, chosen.epochs = 3, 1, 0.01 if chosen.host == "text" else 2
    torch.set_num_threads(chosen.threads)
    chosen.out.mkdir(parents=True, exist_ok=True)
    kind, options = HOSTS[chosen.host]
    host = kind(options, epochs=chosen.epochs, **({"clip": None} if chosen.unclipped else {}))
    path, asked = chosen.out / "results.json", {"host": host.options, "recipe": host.recipe.to_dict()}
    content = {**asked, "machine": manifest("cpu", chosen.threads), "rows": []}
    if path.exists():
        content = json.loads(path.read_text())
        if any(content[key] != value for key, value in asked.items()):
            raise SystemExit(f"{path} holds a run with other settings: choose another --out")
    keys = ("seed", "degree", "basis", "normalize", "precision")
    done = {tuple(row.get(key, "float32") for key in keys) for row in content["rows"]}
    normals = [None if name == "none" else name for name in chosen.normalize]
    degrees = chosen.only or range(1, chosen.degrees + 1)
    with TemporaryDirectory() as folder:
        data = host.load(Path(folder))
        content |= host.without_model(data)
        for run in runs(degrees, chosen.seeds, chosen.bases, normals, chosen.precisions):
            if tuple(run.values()) in done:
                continue
            row = measure(run, host, data)
            content["rows"].append(row)
            save(content, path)
            print(f"{run}  {host.score} {row[host.score]}  {row['seconds']} s", flush=True)
    for precision in chosen.precisions:
        rows = [row for row in content["rows"] if row.get("precision", "float32") == precision]
        print(f"{precision}\n{table(rows)}")
    plot(content["rows"], chosen.out / "degree.png")


if __name__ == "__main__":
    main()
