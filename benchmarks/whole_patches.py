"""TSViT on whole patches of PASTIS at once, with attention and with mixers: memory, and km² per second of inference.

    python benchmarks/whole_patches.py benchmarks/results/whole-patches.json

Sizes as published: patches of 2 × 2 pixels, 128 channels, 4 temporal and 4 spatial blocks, 19 classes, up to 60 dates.
128 × 128 pixels are then 4,096 places, which the spatial encoder sees together; the usual windows of 24 × 24 pixels are
144 places each, and 36 of them cover the patch. km² are of the ground, 100 m² a pixel: where windows overlap, the pixel
counts once. Memory is the most that PyTorch's allocations hold at once, beyond input and weights.

Every call is timed alone, all mixers in turn, and the median counts. `--busy` says in the results that other work ran
on the machine.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.domains.satellite.task import KM2
from polymix.domains.satellite.tsvit import TSViT
from polymix.measure import in_turn, manifest, peak_memory
from polymix.mixers.spec import parse_mixer
from polymix.train.data.label_maps import windows

MIXERS = ("softmax", "pom", "qt", "padre")
WINDOW, BATCH = 24, 6  # of a window in pixels; windows at once
Calls = dict[str, Callable[[], Any]]


def calls(model: TSViT, side: int, dates: int) -> Calls:
    """The spatial encoder over the places of squares of 24, 64 and 128 pixels, and a patch whole and by windows."""
    images = torch.randn(1, dates, model.bands, side, side)
    days = torch.linspace(0, 364, dates).long()[None]
    width = model.position.shape[2]

    def places(pixels: int) -> Callable[[], Any]:
        grid = (pixels // model.patch,) * 2
        tokens = torch.randn(model.classes, grid[0] * grid[1], width)
        return lambda: model.along_places(tokens, grid)

    def by_windows() -> None:
        squares = [images[..., y : y + WINDOW, x : x + WINDOW]
                   for y in windows(side, WINDOW) for x in windows(side, WINDOW)]  # fmt: skip
        for at in range(0, len(squares), BATCH):
            part = torch.cat(squares[at : at + BATCH])
            model(part, days.expand(len(part), -1))

    sizes = [pixels for pixels in (WINDOW, side // 2, side) if pixels >= WINDOW]
    spatial = {f"{(pixels // model.patch) ** 2} places": places(pixels) for pixels in sizes}
    return {**spatial, "whole patch": lambda: model(images, days), "windows": by_windows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--side", type=int, default=128, help="of a patch in pixels, even")
    parser.add_argument("--dates", type=int, default=60)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="temporal blocks, and spatial ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    every: dict[str, Calls] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in options.mixers.split(","):
        torch.manual_seed(0)
        model = TSViT(
            parse_mixer(name)[1], dim=options.dim, temporal_depth=options.depth, spatial_depth=options.depth,
            image_size=options.side,
        ).eval()  # fmt: skip
        every[name] = calls(model, options.side, options.dates)
        with torch.inference_mode():
            model(torch.randn(1, 2, model.bands, WINDOW, WINDOW), torch.zeros(1, 2, dtype=torch.int64))  # warm up
        parameters = sum(parameter.numel() for parameter in model.parameters())
        rows[name] = {"mixer": name, "parameters": parameters, "clock": "wall", "seconds": {},
                      "peak_bytes": {}}  # fmt: skip
    km2 = options.side**2 * KM2
    with torch.inference_mode():
        for case in next(iter(every.values())):
            for name in every:
                rows[name]["peak_bytes"][case] = peak_memory(every[name][case])
            times = in_turn({name: its[case] for name, its in every.items()}, options.rounds)
            for name, row in rows.items():
                row["seconds"][case] = times[name].median
                if case in ("whole patch", "windows"):
                    row[f"km2_per_second {case}"] = km2 / row["seconds"][case]
                print(f"{case:12} {name:8} {row['seconds'][case]:8.3f} s {row['peak_bytes'][case] / 2**20:8.0f} MiB",
                      flush=True)  # fmt: skip
    settings = {
        "side": options.side,
        "dates": options.dates,
        "dim": options.dim,
        "depth": options.depth,
        "busy": options.busy,
    }
    save({"machine": manifest("cpu", options.threads), "settings": settings, "rows": list(rows.values())}, options.out)


if __name__ == "__main__":
    main()
