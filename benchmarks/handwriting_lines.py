"""Lines of handwriting per second: HTR-VT with attention and with mixers, at 1, 8 and 16 lines in an image.

    python benchmarks/handwriting_lines.py benchmarks/results/tasks/handwriting/lines.json [--threads 2] [--dim 768]
        [--lines 1,8,16] [--only softmax,pom] [--batch 1] [--seconds 20] [--device cpu]

The host has its published sizes (dim 768, 4 blocks, 6 heads, height 64); a line is 512 pixels or 128 tokens. Lines of a
page stand side by side, as in the paper's LAM-Mul. Forward passes without gradients, fresh weights. The mixers of a
cell are timed in turn, for about --seconds in all. Peak memory is that of one pass beyond weights and input.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.measure import manifest, peak_memory
from polymix.measure.timing import interleaved_within
from polymix.mixers.spec import parse_mixer
from polymix.models.htr_vt import STRIDE, HtrVt

HEADS, DEPTH, CLASSES, WIDTH = 6, 4, 90, 512
ATTENTION = f"softmax:heads={HEADS}"
MODELS = {  # PoM, Table 2, and others: the mixers of two blocks, which alternate
    "softmax": (ATTENTION, ATTENTION), "pom": ("pom", "pom"), "hybrid": ("pom", ATTENTION), "padre": ("padre", "padre"),
    "qt": ("qt", "qt"), "linear_floor": ("linear_floor", "linear_floor"),
}  # fmt: skip
PAPER = {"softmax": 598, "pom": 675, "hybrid": 637}  # lines per second on LAM-Mul, on a GPU


def host(name: str, dim: int, tokens: int, device: str) -> HtrVt:
    configs = [parse_mixer(MODELS[name][place % 2])[1] for place in range(DEPTH)]
    return HtrVt(configs, classes=CLASSES, dim=dim, tokens=tokens).eval().to(device)


@torch.inference_mode()
def read(model: HtrVt, images: torch.Tensor) -> None:
    model(images)


def cell(names: list[str], options: argparse.Namespace, lines: int) -> list[dict[str, Any]]:
    """A row for each model at so many lines in an image."""
    wide = lines * WIDTH
    images = torch.rand(options.batch, 1, 64, wide, device=options.device)
    models = {name: host(name, options.dim, wide // STRIDE, options.device) for name in names}
    calls = {name: partial(read, model, images) for name, model in models.items()}
    times = interleaved_within(calls, options.seconds, options.device)
    return [
        {
            "model": name, "lines": lines, "tokens": wide // STRIDE, "batch": options.batch,
            "parameters": sum(parameter.numel() for parameter in models[name].parameters()),
            "seconds": time.median,
            "lines_per_second": round(lines * options.batch / time.median, 2),
            "peak_bytes": peak_memory(calls[name], options.device),
        }
        for name, time in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lines", default="1,8,16")
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--only: expected some of {', '.join(MODELS)}, got {unknown[0]}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for lines in map(int, options.lines.split(",")):
        for row in cell(names, options, lines):
            speed = f"{row['lines_per_second']:8.2f} lines/s"
            print(f"{lines:3} lines  {row['model']:<13}{speed}  {row['peak_bytes']:,} bytes", flush=True)
            rows.append(row)
        about = {"machine": manifest(options.device, options.threads), "dim": options.dim, "paper": PAPER}
        save({**about, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
