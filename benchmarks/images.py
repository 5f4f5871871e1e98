"""SiT by resolution: time and memory of a training step and of a sampling step, attention and mixers.

    python benchmarks/images.py benchmarks/results/images.json

The model takes latents of side √(4 · tokens), as those of Stable Diffusion's autoencoder: 256, 4,096 and 16,384 tokens
are images of 256², 1024² and 2048² pixels. A sampling step is one evaluation, without guidance, for one image; a
training step is a forward and a backward pass of flow matching and an update by AdamW. Memory is the most that
PyTorch's allocations hold at once, beyond the weights and the optimizer's state. A step that would take more than
--longest seconds is left out; its time is foretold from the last one, in proportion to the tokens, which is too little
for attention.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.measure import manifest
from polymix.measure.timing import once, out_of_memory, peak_memory
from polymix.mixers.spec import parse_mixer
from polymix.models.flow import Flow
from polymix.models.sit import SIZES, SiT

MIXERS = ("softmax", "pom", "qt", "padre", "poly_nl", "poly_sa", "linear", "linear_floor")
TOKENS = (256, 4096, 16_384)
STEPS = ("sampling", "training")


def step(kind: str, name: str, size: str, tokens: int, device: str) -> tuple[Callable[[], object], int]:
    """A training step or a sampling step, and the model's number of parameters."""
    torch.manual_seed(0)
    side = 2 * math.isqrt(tokens)
    with torch.device(device):
        model = SiT.of_size(size, parse_mixer(name)[1], image_size=side)
        images, times, labels = torch.randn(1, 4, side, side), torch.full((1,), 0.5), torch.tensor([3])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if kind == "sampling":
        model.eval()

        def sample() -> None:
            with torch.inference_mode():
                model(images, times, labels)

        return sample, parameters
    flow, optimizer = Flow(), torch.optim.AdamW(model.parameters(), 1e-4)

    def train() -> None:
        optimizer.zero_grad()
        flow.loss(model, images, labels).backward()
        optimizer.step()

    return train, parameters


def cell(kind: str, name: str, size: str, tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """Seconds of a step, the median of some after a warm-up, and the bytes that it holds."""
    call, parameters = step(kind, name, size, tokens, device)
    call()  # which warms up, and makes the optimizer's state
    peak = peak_memory(call, device)
    times = [once(call, device) for _ in range(rounds)]
    return {"parameters": parameters, "seconds": statistics.median(times), "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="squares of whole numbers")
    parser.add_argument("--size", default="S", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds of a step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows: list[dict[str, Any]] = []
    for kind in STEPS:
        for name in given.mixers.split(","):
            before: tuple[int, float] | None = None
            for tokens in map(int, given.tokens.split(",")):
                row: dict[str, Any] = {"step": kind, "mixer": name, "tokens": tokens}
                foretold = before[1] * tokens / before[0] if before else 0.0
                if foretold > given.longest:
                    row["left_out"] = f"over {foretold:.0f} s"
                else:
                    try:
                        row.update(cell(kind, name, given.size, tokens, given.device, given.rounds))
                        before = tokens, row["seconds"]
                    except (MemoryError, RuntimeError) as error:
                        if not out_of_memory(error):
                            raise
                        row["left_out"] = "out of memory"
                rows.append(row)
                print(row, flush=True)
    settings = {"size": given.size, "rounds": given.rounds, "longest": given.longest, "busy": given.busy}
    save({"machine": manifest(given.device, given.threads), "settings": settings, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
