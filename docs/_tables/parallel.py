"""The tables of sequences that processes share: measured, on paper, and the proof under a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from .figures import RESULTS, load, table, where

MEASURED, PROOF = "parallel.json", "shared_sequence.json"
ABSENT = "Not measured yet."
DIM, OWN, RATE = 1024, 16384, 400e12  # channels; tokens of a GPU; operations a second of a GPU, assumed
GPUS, LINKS = (8, 64, 1024), (50, 400)  # links in GB/s
MIXERS = {  # spec and whether causal
    "pom": ("pom", False), "pom, causal": ("pom", True), "qt, causal": ("qt", True), "linear, causal": ("linear", True),
    "mamba": ("mamba", True), "padre-3, 1-D": ("padre-3", False), "padre-3, 2-D": ("padre-3", False),
    "local, window 128": ("local:window=128", True), "hyena": ("hyena:length=1024", True),
}  # fmt: skip


def measured() -> str:
    """Time and bytes of a layer, forward and backward."""
    if not (RESULTS / MEASURED).exists():
        return ABSENT
    from polymix.workflows.bench.parallel import HEADINGS
    from polymix.workflows.bench.parallel import table as lines

    content = load(MEASURED)
    settings = content["settings"]
    note = (f"{settings['processes']} processes over loopback (gloo), {settings['dim']} channels, batch "
            f"{settings['batch']}, float32, one thread each; {where(content['machine'])}.")  # fmt: skip
    return table(HEADINGS, lines(content["rows"])) + f"\n\n{note}"


def paper() -> str:
    """Bytes by the model, and what they take on links, beside the time to compute."""
    import torch

    from polymix.mixers.spec import parse_mixer
    from polymix.parallel.cost import ATTENTION, attention_bytes, mixer_bytes

    def row(name: str, gpus: int, sent: float, flops: float) -> list[str]:
        times = [f"{1e3 * sent / (link * 1e9):,.2f}" for link in LINKS]
        return [name, f"{gpus:,}", f"{gpus * OWN:,}", f"{sent / 1e6:,.2f}", *times, f"{1e3 * flops / RATE:,.2f}"]

    lines = []
    for name, (spec, causal) in MIXERS.items():
        config = parse_mixer(spec)[1].for_heads(DIM // 64)
        for gpus in GPUS:
            tokens = gpus * OWN
            side = 2 ** math.ceil(math.log2(tokens) / 2)
            grid = (tokens // side, side) if "2-D" in name else None
            placed = config if grid is None else config.for_grid(grid)
            mixer = (placed.for_order() if causal else placed).build(DIM, dtype=torch.bfloat16)
            sent = sum(mixer_bytes(mixer, gpus, tokens, causal=causal, grid=grid))
            flops = mixer.cost(OWN).flops if grid is None else mixer.cost(tokens, grid=grid).flops / gpus
            lines.append(row(name, gpus, sent, 3 * flops))
    for kind in ATTENTION:
        for gpus in GPUS:
            sent = sum(attention_bytes(kind, DIM, gpus, gpus * OWN, number=2, keeps=False))
            lines.append(row(f"attention, {kind}", gpus, sent, 3 * OWN * (8 * DIM**2 + 4 * gpus * OWN * DIM)))
    heads = ("layer", "GPUs", "tokens", "MB sent", *(f"ms at {link} GB/s" for link in LINKS), "ms of products")
    return table(heads, lines)


def proof() -> str:
    """What the run under a limit of memory came to."""
    if not (RESULTS / PROOF).exists():
        return ABSENT
    content = load(PROOF)
    under, last = f"{content['mib']:,} MiB", str(content["steps"])
    longest = f"trained; {content['own'] + content['grain']:,} need more memory"
    lines, losses = [[f"1 process, {under}", f"{content['own']:,}", longest]], content["losses"]
    three = f"4, one killed after step {content.get('killed_after')}; then 3, {content['more']:,} MiB each"
    names = {"one": "1 process, no limit", "four": f"4 processes, {under} each", "three": three}
    for key, steps in losses.items():
        lines.append([names[key], f"{4 * content['own']:,}", f"loss {steps[last]:.6f} at step {last}"])
    text = table(("processes, and the memory of each", "tokens of a sequence", "outcome"), lines)
    difference = max(abs(steps[step] - loss) for steps in losses.values() for step, loss in losses["one"].items())
    return text + f"\n\nThe largest difference of a step's loss to that of one process is {difference:.1e}."


TABLES: dict[str, Callable[[], str]] = {"parallel": measured, "parallel-paper": paper, "parallel-proof": proof}
