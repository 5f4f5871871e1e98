"""Lines of handwriting per second: HTR-VT with attention and with mixers, at 1, 8 and 16 lines in an image.

    python benchmarks/handwriting_lines.py benchmarks/results/tasks/handwriting/lines.json [--threads 2] [--dim 768]
        [--lines 1,8,16] [--only softmax,pom] [--batch 1] [--rounds 3] [--device cpu]

The host has its published sizes (dim 768, 4 blocks, 6 heads, height 64); a line is 512 pixels or 128 tokens. Lines of a
page stand side by side, as in the paper's LAM-Mul. As in the paper, all models have about the parameters of attention,
by the width of their MLPs. Forward passes without gradients, fresh weights. The stem's convolutions, which take most of
the time and are the same for all models, are timed once for each number of lines; the transformers of all models are
timed in turn, and lines per second follow from the sum. With --processor-time the processor's time of one thread
counts, which other work on the machine changes less. The median of the rounds counts. Peak memory is that of one pass
beyond weights and input.

Cells that the results file has already, measured on the same machine, are kept: several calls make one table.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.domains.handwriting.htr_vt import HtrVt
from polymix.domains.handwriting.recipe import STRIDE, HandwritingRecipe
from polymix.domains.handwriting.task import HandwritingTask
from polymix.errors import OptionError
from polymix.measure import check_clock, in_turn, manifest, peak_memory

MODELS = {  # PoM, Table 2, and others: the mixer, and the plan by which attention keeps blocks
    "softmax": ("softmax", None), "pom": ("pom", None), "hybrid": ("pom", "1:1"), "padre": ("padre", None),
    "qt": ("qt", None), "linear_floor": ("linear_floor", None),
}  # fmt: skip
STEM = "stem"
CLASSES = 90  # LAM's 89 characters, and the blank


def host(name: str, dim: int, lines: int) -> HtrVt:
    mixer, plan = MODELS[name]
    recipe = HandwritingRecipe.paper().changed(mixer=mixer, plan=plan, dim=dim, lines=lines, match_parameters=True)
    return HandwritingTask(recipe).sized(CLASSES).eval()


def cell(names: list[str], options: argparse.Namespace, lines: int) -> list[dict[str, Any]]:
    """A row for each model at so many lines in an image."""
    width = lines * HandwritingRecipe.paper().width
    images = torch.rand(options.batch, 1, 64, width, device=options.device)
    models = {name: host(name, options.dim, lines).to(options.device) for name in names}
    x = torch.randn(options.batch, width // STRIDE, options.dim, device=options.device)
    calls = {STEM: partial(models[names[0]].embed, images)}
    calls |= {name: partial(model.read, x) for name, model in models.items()}
    with torch.inference_mode():
        peaks = {name: peak_memory(call, options.device) for name, call in calls.items()}  # warms up, too
        times = in_turn(calls, options.rounds, device=options.device, clock=options.clock)
    seconds = {name: timing.median for name, timing in times.items()}
    return [
        {
            "model": name, "lines": lines, "tokens": width // STRIDE, "batch": options.batch, "rounds": options.rounds,
            "clock": options.clock,
            "parameters": sum(parameter.numel() for parameter in models[name].parameters()),
            "stem_seconds": seconds[STEM], "transformer_seconds": seconds[name],
            "lines_per_second": round(lines * options.batch / (seconds[STEM] + seconds[name]), 3),
            "stem_peak_bytes": peaks[STEM], "transformer_peak_bytes": peaks[name],
        }
        for name in names
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lines", default="1,8,16")
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processor-time", dest="clock", action="store_const", const="processor", default="wall",
                        help="of one thread, in place of the clock's")  # fmt: skip
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--only: expected some of {', '.join(MODELS)}, got {unknown[0]}")
    try:
        check_clock(options.clock, device=options.device, threads=options.threads, argument="--processor-time")
    except OptionError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    about = {"machine": manifest(options.device, options.threads), "dim": options.dim,
             "clock": options.clock}  # fmt: skip
    rows: list[dict[str, Any]] = []
    if options.out.exists() and (earlier := json.loads(options.out.read_text())) | {"rows": 0} == about | {"rows": 0}:
        rows = [row for row in earlier["rows"] if row["model"] in names]
    for lines in map(int, options.lines.split(",")):
        found = cell(names, options, lines)
        for row in found:
            parts = f"stem {row['stem_seconds']:.3f} s, transformer {row['transformer_seconds']:.3f} s"
            print(f"{lines:3} lines  {row['model']:<13}{row['lines_per_second']:8.2f} lines/s  {parts}", flush=True)
        rows = sorted((*(row for row in rows if row["lines"] != lines), *found), key=lambda row: row["lines"])
        save({**about, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
