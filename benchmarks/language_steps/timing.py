"""Tokens a second in training, milliseconds a token in decoding, and memory, each model in a process of its own.

python -m language_steps.timing MODEL THREADS QUICK TRAINING [TOKENS …]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from language_steps.models import BATCH, CONTEXT, MODELS, VOCAB, config
from polymix.measure import repeated
from polymix.mixers.cache import StateLayer
from polymix.models.language import PolymixGPTForCausalLM

from transformers import DynamicCache  # isort: skip

CHUNK = 8192  # tokens of a prompt that are read at once


def measure(label: str, threads: int, quick: bool, training: bool, before: Sequence[int]) -> dict[str, Any]:
    """In a process of its own, so that the peak of memory is this model's."""
    words = [label, str(threads), str(int(quick)), str(int(training)), *map(str, before)]
    command = [sys.executable, "-m", "language_steps.timing", *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def per_second(label: str, quick: bool) -> float:
    """Tokens a second of forward and backward."""
    torch.manual_seed(0)
    model = PolymixGPTForCausalLM(config(MODELS[label], quick)).train()
    ids = torch.randint(VOCAB, (2 if quick else BATCH, CONTEXT))
    timing = repeated(lambda: model(ids, labels=ids, use_cache=False).loss.backward(), least=7, most=7, warm_up=1)
    return ids.numel() / timing.median


def cache_bytes(cache: DynamicCache) -> int:
    """The bytes of all states, keys and values."""
    held = [layer.state if isinstance(layer, StateLayer) else (layer.keys, layer.values) for layer in cache.layers]
    return sum(part.nbytes for part in tree_leaves(held) if isinstance(part, torch.Tensor))


@torch.no_grad()
def decode(label: str, tokens: int, quick: bool) -> tuple[float, int]:
    """Milliseconds of one token after so many, and the bytes of the cache.

    Attention's keys and values are filled in: what they hold does not matter to the time, and reading a long text by
    attention would take hours.
    """
    torch.manual_seed(0)
    times = 5 if quick else 15 if tokens > 100_000 else 40
    model = PolymixGPTForCausalLM(config(MODELS[label], quick, tokens + times + 1)).eval()
    cache = DynamicCache()
    if label == "softmax":
        heads, wide = model.config.num_heads, model.config.hidden_size // model.config.num_heads
        for layer in range(model.config.num_layers):
            cache.update(torch.randn(1, heads, tokens, wide), torch.randn(1, heads, tokens, wide), layer)
    else:
        for start in range(0, tokens, CHUNK):
            ids = torch.randint(VOCAB, (1, min(CHUNK, tokens - start)))
            model(ids, past_key_values=cache, logits_to_keep=1)
    size = cache_bytes(cache)
    timing = repeated(lambda: model(torch.randint(VOCAB, (1, 1)), past_key_values=cache), least=times, most=times,
                      warm_up=1)  # fmt: skip
    return timing.milliseconds().median, size


def report(label: str, threads: int, quick: bool, training: bool, before: Sequence[int]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    said: dict[str, Any] = {"clock": "wall"}
    if training:
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said["tokens_per_second"] = per_second(label, quick)
        said["training_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
    for tokens in before:
        said[f"decode_ms_{tokens}"], said[f"cache_bytes_{tokens}"] = decode(label, tokens, quick)
    return said


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    threads, quick, training, *before = map(int, numbers)
    print(json.dumps(report(name, threads, bool(quick), bool(training), before)))
