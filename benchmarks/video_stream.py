"""Frames a second of a stream: PoM with a state of fixed size, and attention with a cache that grows.

    python benchmarks/video_stream.py benchmarks/results/video-stream.json

The host is that of the domain `video` at 224 × 224 pixels, patches of 16: 196 tokens a frame, 192 channels, one stream.
Attention's cache is allocated before, for all frames, and holds noise in place of the frames before: its time does not
depend on them. Both read the frame after so many frames; calls are made in turn, in processor time on one thread.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import Tensor

from polymix.domains.video.hosts import VideoTransformer
from polymix.domains.video.recipe import VideoRecipe
from polymix.measure import in_turn, manifest
from polymix.mixers.spec import parse_mixer
from polymix.ops.related.attention import softmax_attention

FRAMES = (1, 8, 32, 128, 512)  # of the stream, the timed one included


class Cached:
    """A causal model of frames with attention, which keeps the keys and values of all frames so far.

    model: with softmax in every block. frames: for which there is room.
    """

    def __init__(self, model: Any, frames: int) -> None:
        self.model, self.tokens = model, model.side**2
        heads = model.blocks[0].mixer.heads
        shape = (2, 1, heads, frames * self.tokens, model.embed.out_features // heads)
        self.caches = [torch.randn(shape, dtype=model.head.weight.dtype) for _ in model.blocks]

    def step(self, frame: Tensor, before: int) -> Tensor:
        """The output of the next frame (1, C, S, S), the one after `before` others."""
        start, end = before * self.tokens, (before + 1) * self.tokens
        tokens = self.model._tokens(frame[:, None], torch.tensor([before]))[:, 0]
        for block, cache in zip(self.model.blocks, self.caches, strict=True):
            x = block.norm1(tokens)
            query, *both = (part.transpose(1, 2) for part in block.mixer.qkv(x, x))
            cache[:, :, :, start:end] = torch.stack(both)
            seen = softmax_attention(query, *cache[:, :, :, :end], scale=query.shape[-1] ** -0.5)
            tokens = tokens + block.mixer.proj(seen.transpose(1, 2).flatten(-2))
            tokens = tokens + block.mlp(block.norm2(tokens))
        output: Tensor = self.model._output(tokens[:, None], frame[:, None])[:, 0]
        return output

    def bytes_of(self, frames: int) -> int:
        """Of the keys and values of so many frames."""
        return sum(cache.numel() // cache.shape[3] * frames * self.tokens * cache.itemsize for cache in self.caches)


def host(mixer: str, side: int, dim: int, depth: int) -> VideoTransformer:
    torch.manual_seed(0)
    recipe = VideoRecipe(causal="frame", image_size=side, patch=16, dim=dim, depth=depth, mlp_ratio=4.0)
    return VideoTransformer(recipe, [parse_mixer(mixer)[1]] * depth, 3, 10).eval()


def measure(side: int, dim: int, depth: int, frames: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for each mixer and length of the stream."""
    pom, attention = host("pom", side, dim, depth), Cached(host("softmax", side, dim, depth), max(frames))
    rows: list[dict[str, Any]] = []
    state, read = None, 0
    for count in frames:
        while read < count - 1:
            _, state = pom.step(torch.randn(1, 3, side, side), state)
            read += 1
        frame = torch.randn(1, 3, side, side)
        calls = {"pom": lambda frame=frame, state=state: pom.step(frame, state),
                 "softmax": lambda frame=frame, before=count - 1: attention.step(frame, before)}  # fmt: skip
        times = in_turn(calls, rounds, warm_up=1, clock="processor")
        parts = [] if state is None else [part for one in state.mixers for part in one]
        kept = {"pom": sum(part.numel() * part.itemsize for part in parts), "softmax": attention.bytes_of(count - 1)}
        for mixer, timing in times.items():
            rows.append({"mixer": mixer, "frames": count, "clock": "processor", "seconds": timing.median,
                         "kept_bytes": kept[mixer]})  # fmt: skip
            print(f"{mixer:8} frame {count:4} {1 / timing.median:7.1f} frames/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=224, help="of a frame in pixels")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--frames", default=",".join(map(str, FRAMES)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    frames = tuple(map(int, options.frames.split(",")))
    with torch.inference_mode():
        rows = measure(options.side, options.dim, options.depth, frames, options.rounds)
    settings = {"tokens": (options.side // 16) ** 2, "dim": options.dim, "depth": options.depth, "busy": options.busy}
    save({"machine": manifest("cpu", 1), "settings": settings, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
