"""Whole models before and after conversion, plain and under `polymix.optimize`: forward, float32.

    python benchmarks/whole_models.py benchmarks/results/whole-models.json [--only deit_tiny-224,gpt2-4096-pom]

Every piece times the model with attention and with one or all mixers, each plain, optimized and compiled
(torch.compile, fixed shapes), in turn; the fastest of up to 20 rounds counts. Pieces are merged into the file, so that
each can have the machine to itself for less than a minute, compilation aside: --prepare compiles beforehand, into
PyTorch's cache, and --more adds rounds to pieces that the file has. Each model's row also has its floor, which is the
time of its bare products and convolutions, and what else the time goes to.
"""

# ruff: noqa: E402  the import path is set first

import argparse
import copy
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the package need not be installed

import torch
from saving import save
from torch import nn
from whole_model_steps.floor import floor_of, least_seconds, products_of
from whole_model_steps.profile import parts_of

import polymix
from polymix.compat import cure_torchvision
from polymix.measure import manifest
from polymix.measure.clock import CLOCKS, check_clock

cure_torchvision()
import timm
import transformers

ATTENTION = "attention"
DEIT = ("padre", "pom", "qt", "poly_nl", "poly_sa", "linear_floor")
GPT2 = ("pom", "qt", "padre")
ALL_LOGITS = " all logits"  # of language models; else only those of the last token, as generation takes of a prompt
BATCH = " batch"
CASES = {f"deit_tiny-{size}": ("deit_tiny", size, DEIT) for size in (224, 512, 1024)} | {
    f"gpt2-{tokens}-{mixer}": ("gpt2", tokens, (mixer,)) for tokens in (1024, 4096) for mixer in GPT2
} | {f"gpt2-4096-{mixer}-logits": ("gpt2" + ALL_LOGITS, 4096, (mixer,)) for mixer in GPT2} | {
    "deit_tiny-224-batch": ("deit_tiny" + BATCH, 224, DEIT)}  # fmt: skip
SECONDS = 30.0  # of all timed rounds of a piece


def deit_tiny(size: int) -> tuple[nn.Module, dict[str, Any], str, int]:
    model = timm.create_model("deit_tiny_patch16_224", img_size=size)
    return model, {"x": torch.randn(1, 3, size, size)}, f"{size}²", (size // 16) ** 2 + 1


def deit_tiny_batch(size: int) -> tuple[nn.Module, dict[str, Any], str, int]:
    model, inputs, told, tokens = deit_tiny(size)
    return model, {"x": inputs["x"].repeat(8, 1, 1, 1)}, f"8 × {told}", tokens


def gpt2(tokens: int) -> tuple[nn.Module, dict[str, Any], str, int]:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=tokens))
    inputs = {"input_ids": torch.randint(50257, (1, tokens)), "use_cache": False, "logits_to_keep": 1}
    return model, inputs, f"{tokens:,} tokens", tokens


def gpt2_all_logits(tokens: int) -> tuple[nn.Module, dict[str, Any], str, int]:
    model, inputs, told, tokens = gpt2(tokens)
    return model, inputs | {"logits_to_keep": 0}, f"{told},{ALL_LOGITS}", tokens


MODELS = {
    "deit_tiny": deit_tiny,
    "deit_tiny" + BATCH: deit_tiny_batch,
    "gpt2": gpt2,
    "gpt2" + ALL_LOGITS: gpt2_all_logits,
}


@torch.inference_mode()
def run(model: nn.Module, given: dict[str, Any]) -> Any:
    return model(**given)


def measure(name: str, size: int, mixers: tuple[str, ...], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one piece: attention, then the mixers. No rows where its models are only to be compiled."""
    torch.manual_seed(0)
    torch.compiler.reset()  # PyTorch compiles a function eight times at most, and then calls it uncompiled
    model, inputs, told, tokens = MODELS[name](size)
    models = {ATTENTION: model.eval()}
    for mixer in mixers:
        models[mixer] = polymix.convert(model, mixer, copy=True).model.eval()
    calls = {(mixer, "plain"): partial(run, part, inputs) for mixer, part in models.items()}
    for mixer, part in models.items():
        calls[mixer, "optimized"] = partial(run, polymix.optimize(copy.deepcopy(part)), inputs)
        if options.compiled:
            calls[mixer, "compiled"] = partial(run, torch.compile(copy.deepcopy(part), dynamic=False), inputs)
            calls[mixer, "compiled"]()  # compiles, or reads what an earlier run has compiled
    if options.prepare:
        return []
    times = least_seconds(calls, SECONDS, options.clock)
    rows = []
    for mixer, part in models.items():
        plain, optimized = (times[mixer, how] for how in ("plain", "optimized"))
        ops = products_of(polymix.convert(model, "softmax", copy=True).model.eval() if mixer == ATTENTION else part,
                          inputs)  # fmt: skip
        rows.append({
            "model": name.removesuffix(ALL_LOGITS).removesuffix(BATCH), "input": told, "tokens": tokens, "mixer": mixer,
            "plain": plain, "optimized": optimized,
            "attention": times[ATTENTION, "plain"], "attention_optimized": times[ATTENTION, "optimized"],
            **({"compiled": times[mixer, "compiled"]} if options.compiled else {}),
            "floor": floor_of(ops, options.clock), "parts": parts_of(calls[mixer, "optimized"]), "clock": options.clock,
        })  # fmt: skip
        both = times[ATTENTION, "optimized"] / optimized
        print(f"{name}, {told}, {mixer}: {times[ATTENTION, 'plain'] / plain:.2f} × attention; optimized "
              f"{times[ATTENTION, 'plain'] / optimized:.2f} × ({both:.2f} × attention optimized), "
              f"{optimized / rows[-1]['floor']:.2f} floors", flush=True)  # fmt: skip
    return rows


def fastest(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a piece after another run: the least of each time, since other work on the machine only adds."""
    times = ("plain", "optimized", "compiled", "attention", "attention_optimized", "floor")
    return [{**new, **{key: min(new[key], old[key]) for key in times if key in new and key in old},
             "parts": min(new["parts"], old["parts"], key=lambda parts: sum(parts.values()))}
            for new, old in zip(rows, before, strict=True)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help=f"some of {', '.join(CASES)}, separated by commas")
    parser.add_argument("--prepare", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--more", action="store_true", help="add rounds to the pieces of the file")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false", help="leave compiled models out")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: beside other work, with --threads 1"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    check_clock(options.clock, threads=options.threads)
    chosen = options.only.split(",") if options.only else list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"--only: expected some of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    machine = manifest("cpu", options.threads)
    machine |= {"timm": timm.__version__, "transformers": transformers.__version__}
    pieces: dict[str, Any] = {}
    if options.only and options.out.is_file():
        before = json.loads(options.out.read_text("utf-8"))
        pieces = before.get("pieces", {}) if before["machine"] == machine else {}
    for piece in chosen:
        rows = measure(*CASES[piece], options)
        if options.prepare:
            continue
        pieces[piece] = fastest(rows, pieces[piece]) if options.more and piece in pieces else rows
        ordered = {name: pieces[name] for name in CASES if name in pieces}
        save({"machine": machine, "pieces": ordered}, options.out)


if __name__ == "__main__":
    main()
