"""Whole models before and after conversion: DeiT-Tiny by image size, GPT-2 by length; forward, batch 1, this machine.

    python benchmarks/whole_models.py benchmarks/results/whole-models.json [--threads 2]

Attention and mixers are timed in turn. Calls that take too long for that are timed once.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.measure import manifest
from polymix.measure.timing import interleaved_within

cure_torchvision()
import timm  # noqa: E402
import transformers  # noqa: E402

MIXERS = {"deit_tiny": ("padre", "pom", "qt", "poly_nl"), "gpt2": ("pom", "qt", "padre")}


def deit(size: int) -> tuple[nn.Module, dict[str, Any], str]:
    model = timm.create_model("deit_tiny_patch16_224", img_size=size)
    return model, {"x": torch.randn(1, 3, size, size)}, f"{size}²"


def gpt2(tokens: int) -> tuple[nn.Module, dict[str, Any], str]:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=tokens))
    given = {"input_ids": torch.randint(50257, (1, tokens)), "use_cache": False, "logits_to_keep": 1}
    return model, given, f"{tokens:,} tokens"


CASES: list[tuple[str, Callable[[int], Any], int, int]] = [
    *(("deit_tiny", deit, size, (size // 16) ** 2 + 1) for size in (224, 512, 1024)),
    *(("gpt2", gpt2, tokens, tokens) for tokens in (1024, 4096, 16384)),
]


@torch.inference_mode()
def run(model: nn.Module, given: dict[str, Any]) -> Any:
    return model(**given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for name, build, size, tokens in CASES:
        torch.manual_seed(0)
        model, inputs, told = build(size)
        calls = {"attention": partial(run, model.eval(), inputs)}
        for mixer in MIXERS[name]:
            calls[mixer] = partial(run, polymix.convert(model, mixer, copy=True).model.eval(), inputs)
        times = interleaved_within(calls, 5.0, "cpu")
        before = times.get("attention")
        for mixer in MIXERS[name]:
            after = times.get(mixer)
            rows.append({"model": name, "input": told, "tokens": tokens, "mixer": mixer,
                         "before": before and before.median, "after": after and after.median})  # fmt: skip
            gain = before.median / after.median if before and after else 0
            print(f"{name}, {told}, {mixer}: {gain:.2f} ×", flush=True)
        content = {"machine": manifest("cpu", given.threads), "rows": rows}
        save(content, given.out)


if __name__ == "__main__":
    main()
