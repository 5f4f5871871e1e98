"""SiT by resolution: time and memory of a training step and of a sampling step, attention and mixers.

    python benchmarks/images.py benchmarks/results/images.json [--plot docs/images/resolution.png]

The model takes latents of side √(4 · tokens), as those of Stable Diffusion's autoencoder: 256, 4,096 and 16,384 tokens
are images of 256², 1024² and 2048² pixels. A sampling step is one evaluation, without guidance, for one image; a
training step is a forward and a backward pass of flow matching and an update by AdamW. Memory is the most that
PyTorch's allocations hold at once, beyond the weights and the optimizer's state. Multiply-adds are counted by formula,
of all blocks of the size, whatever --depth; a training step is counted three times. A step that would take more than
--longest seconds is left out; its time is foretold from the last one, in proportion to the tokens, which is too little
for attention. Rows of earlier runs with the same settings stay in the file, so the table can be measured in pieces
(--mixers, --steps); --plot alone, with --mixers "", draws what is there.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.domains.generation.flow import Flow
from polymix.domains.generation.settings import SIZES
from polymix.domains.generation.sit import SiT
from polymix.errors import OptionError
from polymix.measure import Stopwatch, check_clock, manifest, peak_memory, repeated
from polymix.measure.clock import CLOCKS
from polymix.measure.timing import Timing, out_of_memory
from polymix.mixers.spec import parse_mixer

MIXERS = ("softmax", "pom", "qt", "padre", "poly_nl", "poly_sa", "linear", "linear_floor")
TOKENS = (256, 4096, 16_384)
STEPS = ("sampling", "training")
SLOW, FEW = 1.0, 1024  # seconds of a call that is not repeated; tokens of one that is fast
STYLES = {"softmax": {"color": "black", "linewidth": 2.5}, "linear_floor": {"color": "grey", "linestyle": ":"}}


def step(kind: str, name: str, tokens: int, given: argparse.Namespace) -> tuple[Callable[[], object], dict[str, int]]:
    """A training step or a sampling step, the model's number of parameters, and multiply-adds of the whole size."""
    torch.manual_seed(0)
    side = 2 * math.isqrt(tokens)
    with torch.device(given.device):
        cut = {} if given.depth is None else {"depth": given.depth}
        model = SiT.of_size(given.size, parse_mixer(name)[1], image_size=side, **cut)
        images, times, labels = torch.randn(1, 4, side, side), torch.full((1,), 0.5), torch.tensor([3])
    counts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    mixer = model.blocks[0].mixer
    grid = (side // 2, side // 2) if mixer.capabilities.grids else None
    block = mixer.cost(tokens, grid=grid).multiply_adds + tokens * sum(
        part.weight.numel() for part in model.blocks[0].mlp if hasattr(part, "weight")
    )
    counts["multiply_adds"] = SIZES[given.size]["depth"] * block * (3 if kind == "training" else 1)
    if kind == "sampling":
        model.eval()

        def sample() -> None:
            with torch.inference_mode():
                model(images, times, labels)

        return sample, counts
    flow, optimizer = Flow(), torch.optim.AdamW(model.parameters(), 1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which makes the optimizer's state, no part of the step's memory

    def train() -> None:
        optimizer.zero_grad()
        flow.loss(model, images, labels).backward()
        optimizer.step()

    return train, counts


def cell(kind: str, name: str, tokens: int, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step and the bytes that it holds.

    The call whose memory is recorded warms up; the time is the median of others, or of this one where it is slow.
    """
    device = given.device
    call, counts = step(kind, name, tokens, given)
    if tokens <= FEW:
        peak_memory(call, device)  # which loads kernels and the profiler
    watch = Stopwatch(given.clock, device)
    peak = peak_memory(call, device)
    timing = Timing((watch.seconds(),), given.clock)
    if timing.median < SLOW and not given.memory:
        timing = repeated(call, least=given.rounds, most=given.rounds, device=device, clock=given.clock)
    seconds = None if given.memory else timing.median
    return {**counts, "seconds": seconds, "clock": timing.clock, "peak_bytes": peak}


def earlier(path: Path, machine: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run with the same settings on the same machine; none if there is no such run."""
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content["rows"] if content and (content["machine"], content["settings"]) == (machine, settings) else []


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Work, time and memory against the number of tokens, a line for each mixer."""
    from matplotlib.figure import Figure

    panels = [
        ("sampling", "multiply_adds", 1e-9, "G multiply-adds of a sampling step, all blocks"),
        ("sampling", "seconds", 1, "seconds of a sampling step"),
        ("training", "seconds", 1, "seconds of a training step"),
        ("training", "peak_bytes", 2**-20, "MiB of a training step"),
    ]  # fmt: skip
    panels = [panel for panel in panels if any(row.get(panel[1]) is not None for row in rows)]
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    for axis, (kind, value, factor, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for place, name in enumerate(MIXERS):
            if not any(row["mixer"] == name for row in rows):
                continue
            its = [row for row in rows if (row["step"], row["mixer"]) == (kind, name) and row.get(value)]
            axis.plot(
                [row["tokens"] for row in its], [factor * row[value] for row in its], marker="o", markersize=4,
                label="attention" if name == "softmax" else name, **STYLES.get(name, {"color": f"C{place}"}),
            )  # fmt: skip
        axis.set(xlabel="tokens", title=title, xscale="log", yscale="log")
        axis.title.set_fontsize(10)
        axis.set_xticks(TOKENS, [f"{tokens:,}" for tokens in TOKENS])
        axis.minorticks_off()
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def measure(kind: str, name: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens."""
    before: tuple[int, float] | None = None
    for tokens in map(int, given.tokens.split(",")):
        row: dict[str, Any] = {"step": kind, "mixer": name, "tokens": tokens}
        foretold = before[1] * tokens / before[0] if before and before[1] else 0.0
        if foretold > given.longest:
            row["left_out"] = f"over {foretold:.0f} s"
        else:
            try:
                row.update(cell(kind, name, tokens, given))
                before = tokens, row["seconds"]
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                row["left_out"] = "out of memory"
        print(row, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="squares of whole numbers")
    parser.add_argument("--size", default="S", choices=SIZES)
    parser.add_argument("--depth", type=int, help="blocks; default: those of the size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds of a step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="processor: of one thread, for a busy machine")
    parser.add_argument("--memory", action="store_true", help="record memory alone: other work disturbs times")
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    try:
        check_clock(options.clock, device=options.device, threads=options.threads, argument="--clock")
    except OptionError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    machine = manifest(options.device, options.threads)
    settings = {name: getattr(options, name) for name in ("size", "depth", "rounds", "longest", "clock", "busy")}
    rows = {(row["step"], row["mixer"], row["tokens"]): row for row in earlier(options.out, machine, settings)}
    for name in filter(None, options.mixers.split(",")):
        for kind in options.steps.split(","):
            for row in measure(kind, name, options):
                rows[kind, name, row["tokens"]] = row
                ordered = sorted(
                    rows.values(), key=lambda row: (STEPS.index(row["step"]), order(row["mixer"]), row["tokens"])
                )
                save({"machine": machine, "settings": settings, "rows": ordered}, options.out)
    if options.plot:
        plot(list(json.loads(options.out.read_text("utf-8"))["rows"]), options.plot)


def order(name: str) -> int:
    """The place of a mixer in the table; others come last."""
    return MIXERS.index(name) if name in MIXERS else len(MIXERS)


if __name__ == "__main__":
    main()
