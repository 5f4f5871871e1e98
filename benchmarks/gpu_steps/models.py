"""Step models: DeiT-Small and GPT-2, whole, with their attention and converted; forward without gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

import polymix
from gpu_steps.bench import DTYPES, Bench, Jobs, Row, reason, timing
from polymix.compat import cure_torchvision

Host = Callable[[bool], tuple[nn.Module, tuple[int, ...]]]
BATCHES = (1, 16)


def _deit(dry: bool) -> tuple[nn.Module, tuple[int, ...]]:
    cure_torchvision()
    import timm

    size: dict[str, Any] = {"img_size": 32, "depth": 1} if dry else {}
    side = 32 if dry else 224
    return timm.create_model("deit_small_patch16_224", **size), (3, side, side)


def _gpt2(dry: bool) -> tuple[nn.Module, tuple[int, ...]]:
    cure_torchvision()
    import transformers

    size: dict[str, Any] = {"n_layer": 1, "n_embd": 48, "n_head": 3, "vocab_size": 99} if dry else {}
    tokens = 16 if dry else 4096
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=tokens, **size)), (tokens,)


HOSTS: dict[str, tuple[Host, tuple[str, ...]]] = {
    "deit_small": (_deit, ("padre", "pom", "qt", "poly_nl")), "gpt2": (_gpt2, ("padre", "pom", "qt")),
}  # fmt: skip


def jobs(bench: Bench) -> Jobs:
    for host, dtype, batch in product(HOSTS, DTYPES, BATCHES[:1] if bench.dry else BATCHES):
        yield f"models {host} {dtype} {batch}", partial(_measure, bench, host, dtype, batch)


def _measure(bench: Bench, host: str, dtype: str, batch: int) -> list[Row]:
    """A row for attention, which PyTorch computes by its fastest backend, and one for each mixer, timed in turn."""
    build, mixers = HOSTS[host]
    where: Row = {"host": host, "dtype": dtype, "batch": batch}
    try:
        model, shape = build(bench.dry)
    except ImportError as error:
        return [{**where, "mixer": "attention", "seconds": None, "ratio": None, "stopped": reason(error)}]
    kind = {"device": bench.device, "dtype": getattr(torch, dtype)}
    model = model.eval()
    words = len(shape) == 1
    example = torch.randint(50, (batch, *shape), device=bench.device) if words else torch.randn(batch, *shape, **kind)
    calls: dict[str, Callable[[], Any]] = {}
    stopped: dict[str, str] = {}
    for mixer in ("attention", *mixers):
        try:
            one = deepcopy(model) if mixer == "attention" else polymix.convert(model, mixer, copy=True).model.eval()
            call = partial(_run, one.to(**kind), example)
            call()
            calls[mixer] = call
        except Exception as error:  # any failure becomes its result
            stopped[mixer] = reason(error)
    runs = bench.clock(calls, bench.sizes.seconds)
    before, rows = runs.get("attention"), []
    for mixer in ("attention", *mixers):
        row: Row = {**where, "mixer": mixer, "seconds": None, "ratio": None, "stopped": stopped.get(mixer)}
        if mixer in runs:
            row |= {**timing(runs[mixer]), "ratio": before.median / runs[mixer].median if before else None}
        rows.append(row)
    return rows


@torch.inference_mode()
def _run(model: nn.Module, given: torch.Tensor) -> Any:
    return model(given)
