"""DETR's encoder on a picture of 800 × 1333: time, memory, parameters and multiply-adds, attention and mixers.

    python benchmarks/detr.py benchmarks/results/detr.json

The six encoder layers of `polymix train detect --preset paper` (256 channels, 8 heads, MLPs of 2,048), without
gradients, on one map: 25 × 42 tokens at stride 32, 50 × 84 at stride 16. Mixers take turns, so that a change of the
machine's speed meets all of them. Memory is the most that PyTorch's allocations hold at once, beyond input and weights.
Multiply-adds are counted on the meta device; PyTorch's counter sees matrix products and convolutions.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix.compat import cure_torchvision
from polymix.domains.detect.detr import build_detr
from polymix.domains.detect.recipe import DetectRecipe
from polymix.measure import manifest
from polymix.measure.timing import interleaved, peak_memory
from polymix.train import published

cure_torchvision()

MIXERS = ("softmax", "padre", "pom", "qt", "poly_sa")
HEIGHT, WIDTH = 800, 1333
STRIDES = (32, 16)
OPTIONS: dict[str, Any] = {}  # of the recipe, beside the preset
CLASSES = 91  # as COCO's ids
NOTE = (
    'The paper counts "the encoder part". Its figures fit neither our encoder nor its attention alone: 6.3 M of the '
    "parameters are in the MLPs."
)


def printed(mixer: str) -> dict[str, float] | None:
    """PADRe's Table 3: AP on COCO in %, parameters in millions and FLOPs in 10⁹ of "the encoder part"."""
    names = (mixer, f"{mixer}:degree=2")
    for row in published.rows(host="DETR, resnet50"):
        if row.mixer in names:
            return {"AP": round(100 * row.metrics["AP"], 1), "parameters": row.cost["encoder_parameters_M"],
                    "multiply_adds": row.cost["encoder_flops_G"]}  # fmt: skip
    return None


def grid_of(stride: int) -> tuple[int, int]:
    """Rows and columns of tokens: sides are rounded up, as the backbone's padded convolutions do."""
    return -(-HEIGHT // stride), -(-WIDTH // stride)


def encoder_of(mixer: str) -> Any:
    """DETR with a mixer in its encoder, in evaluation."""
    return build_detr(DetectRecipe.paper().changed(mixer=mixer, **OPTIONS), CLASSES).eval()


def call(model: Any, grid: tuple[int, int], device: str = "cpu") -> Tensor:
    """The encoder's output for one map, as the model calls it."""
    shape = torch.Size((1, model.config.d_model, *grid))
    x = torch.empty(shape, device=device).normal_().flatten(2).transpose(1, 2)
    places = model.model.position_embedding(shape=shape, device=torch.device(device), dtype=x.dtype)
    found: Tensor = model.model.encoder(
        inputs_embeds=x, attention_mask=None, spatial_position_embeddings=places.flatten(2).transpose(1, 2)
    ).last_hidden_state
    return found


def count(parts: list[nn.Module]) -> float:
    """Parameters in millions."""
    return sum(p.numel() for part in parts for p in part.parameters()) / 1e6


def counted(mixer: str, grid: tuple[int, int]) -> dict[str, float]:
    """Parameters in millions and multiply-adds in 10⁹, of the encoder and of its attention or mixers alone."""
    with torch.device("meta"):
        model = encoder_of(mixer)
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        call(model, grid, "meta")
    found = {name: sum(operations.values()) / 2e9 for name, operations in counter.get_flop_counts().items()}
    layers = [layer.self_attn for layer in model.model.encoder.layers]
    return {
        "parameters": count([model.model.encoder]), "mixer_parameters": count(layers),
        "multiply_adds": found["Global"],
        "mixer_multiply_adds": sum(value for name, value in found.items() if name.endswith(".self_attn")),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--strides", default=",".join(map(str, STRIDES)))
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing for each mixer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    mixers, rows = options.mixers.split(","), []
    models = {mixer: encoder_of(mixer) for mixer in mixers}
    for stride in map(int, options.strides.split(",")):
        grid = grid_of(stride)
        with torch.inference_mode():
            peaks = {mixer: peak_memory(partial(call, model, grid)) for mixer, model in models.items()}
            calls = {mixer: partial(call, model, grid) for mixer, model in models.items()}
            times = interleaved(calls, seconds=options.seconds)
        for mixer in mixers:
            row: dict[str, Any] = {"mixer": mixer, "stride": stride, "tokens": grid[0] * grid[1]}
            row |= {
                "clock": times[mixer].clock,
                "seconds": times[mixer].median,
                "low": times[mixer].low,
                "high": times[mixer].high,
            }
            row |= {"peak_bytes": peaks[mixer], **counted(mixer, grid)}
            row["printed"] = printed(mixer) if stride == STRIDES[0] else None
            rows.append(row)
            print(row, flush=True)
    settings = {"height": HEIGHT, "width": WIDTH, "seconds": options.seconds, "busy": options.busy}
    save({"machine": manifest("cpu", options.threads), "settings": settings, "note": NOTE, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
