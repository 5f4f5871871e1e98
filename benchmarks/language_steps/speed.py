"""Tokens a second of the papers' language models and their twins with attention: prefill, decoding and training.

python -m language_steps.speed MODEL DTYPE BATCH THREADS QUICK CONTEXT …     a batch of 0 stands for training

A step of decoding reads every weight and the state once. `read_ms` is the time of reading as many bytes in the same
process, in turn with the steps: of `decode_ms` over `read_ms` the aim is at most 1.3.

No cell takes longer than a minute. States of fixed size hold what a short text leaves, and attention's keys and values
random numbers: neither changes the time. A prefill is timed by its chunks: as the cost of a chunk grows linearly with
the tokens before it, the mean of the first and the last chunk of a context is that of all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from language_steps.timing import cache_bytes
from polymix.measure import once, repeated
from polymix.mixers.cache import StateLayer
from polymix.models.language import preset

from transformers import AutoModelForCausalLM, DynamicCache  # isort: skip

MODELS = ("gppom2-s", "gppom2-s-hybrid", "gpt2-s", "mamba-s", "llama-300m-padre", "llama-300m")
TWINS = {"gppom2-s": "gpt2-s", "gppom2-s-hybrid": "gpt2-s", "mamba-s": "gpt2-s", "llama-300m-padre": "llama-300m"}
DTYPES, BATCHES, CONTEXTS, TRAINED = ("float32", "bfloat16"), (1, 16), (1024, 4096, 16384, 32768), (1024, 4096)
CHUNK = 512  # tokens of all sequences together in a chunk of the prefill
LARGEST = 5e9  # bytes of a cache: a larger one is left out
TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "vocab_size": 300, "intermediate_size": 96}


def jobs(quick: bool) -> list[tuple[str, str, int, tuple[int, ...]]]:
    """Model, dtype, batch and contexts of every process; batch 0 for training."""
    decoded = [(m, d, b, CONTEXTS) for b in BATCHES for d in DTYPES for m in MODELS]
    trained = [(m, "float32", 0, (n,)) for n in TRAINED for m in MODELS]
    alone, several = decoded[: len(decoded) // 2], decoded[len(decoded) // 2 :]
    return [decoded[0], trained[0]] if quick else [*alone, *trained[:3], *several, *trained[3:]]


def measure(
    model: str, dtype: str, batch: int, contexts: Sequence[int], threads: int, quick: bool
) -> list[dict[str, Any]]:
    """One row for each context. In a process of its own, so that none finds the memory of another."""
    words = [model, dtype, *map(str, (batch, threads, int(quick), *contexts))]
    command = [sys.executable, "-m", "language_steps.speed", *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return [{"context": n, "left_out": f"exit status {done.returncode}"} for n in contexts]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def build(name: str, dtype: str, positions: int, quick: bool) -> Any:
    torch.manual_seed(0)
    config = preset(name, max_position_embeddings=positions, **(TINY if quick else {}))
    return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))


def read_bytes(model: Any) -> int:
    """The bytes of the weights that a step reads: tied ones once; of tables of embeddings only a row a token."""
    tables = {id(model.get_input_embeddings().weight)} - {id(model.lm_head.weight)}
    tables |= set() if model.model.position is None else {id(model.model.position.weight)}
    return sum({id(p): p.nbytes for p in model.parameters() if id(p) not in tables}.values())


def attention_bytes(config: Any, batch: int, context: int, size: int) -> int:
    grows = sum(layer.cache_grows for layer in config.layer_configs())
    return 2 * grows * batch * context * config.hidden_size * size


def filled(model: Any, batch: int, tokens: int) -> Any:
    """A cache as if `tokens` tokens had been read."""
    config, cache = model.config, DynamicCache()
    model(torch.randint(config.vocab_size, (batch, min(tokens, 160 if batch == 1 else 16))), past_key_values=cache,
          logits_to_keep=1)  # fmt: skip
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            layer.seen = tokens
        elif (more := tokens - layer.get_seq_length()) > 0:
            like = layer.keys
            layer.update(*(torch.randn(batch, like.shape[1], more, like.shape[3]).to(like.dtype) for _ in range(2)))
    return cache


@torch.inference_mode()
def decode(name: str, dtype: str, batch: int, contexts: Sequence[int], quick: bool) -> Iterator[dict[str, Any]]:
    model = build(name, dtype, max(contexts) + 64, quick).eval()
    size, vocabulary, chunk = model.dtype.itemsize, model.config.vocab_size, max(1, CHUNK // batch)

    def read(cache: Any) -> None:
        model(torch.randint(vocabulary, (batch, chunk)), past_key_values=cache, logits_to_keep=1)

    first = repeated(lambda: read(DynamicCache()), most=1, warm_up=1).least
    for context in contexts:
        grown = attention_bytes(model.config, batch, context, size)
        if grown > LARGEST:
            yield {"context": context, "left_out": f"keys and values of {grown / 1e9:.0f} GB"}
            continue
        cache = filled(model, batch, context - chunk)
        last = once(partial(read, cache))
        state = cache_bytes(cache)
        total, ids = read_bytes(model) + state, torch.randint(vocabulary, (batch, 1))
        pairs = beside_reading(partial(model, ids, past_key_values=cache), total)
        step, read_s = (median(one) for one in zip(*pairs, strict=True))
        yield {
            "context": context, "prefill_tokens_per_second": 2 * batch * chunk / (first + last), "chunk": chunk,
            "decode_ms": 1e3 * step, "decode_low_ms": 1e3 * min(one for one, _ in pairs),
            "decode_tokens_per_second": batch / step, "read_ms": 1e3 * read_s, "bytes": total, "state_bytes": state,
            "over_read": median(one / two for one, two in pairs), "clock": "wall",
        }  # fmt: skip


def beside_reading(step: Callable[[], Any], total: int) -> list[tuple[float, float]]:
    """The seconds of a step and of reading `total` bytes, in turn, so that what else the machine does slows both."""
    memory = torch.ones(total // 4)
    one, other = (partial(repeated, call, most=1, warm_up=1) for call in (step, memory.sum))
    return [(one().median, other().median) for _ in range(8)]


def train(name: str, tokens: int, quick: bool) -> dict[str, Any]:
    """Tokens a second of forward, backward and AdamW on one sequence; the first step alone where it is long."""
    if tokens > 1024 and preset(name).hidden_size > 768 and not quick:
        return {"context": tokens, "left_out": "a step takes more than a minute"}
    model = build(name, "float32", tokens, quick).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(model.config.vocab_size, (1, tokens))

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = once(step)
    if taken <= 10:
        taken = repeated(step, most=1, warm_up=1).median
    return {"context": tokens, "training_tokens_per_second": tokens / taken, "clock": "wall"}


if __name__ == "__main__":
    name, dtype, *numbers = sys.argv[1:]
    batch, threads, quick, *contexts = map(int, numbers)
    torch.set_num_threads(threads)
    rows = decode(name, dtype, batch, contexts, bool(quick)) if batch else [train(name, contexts[0], bool(quick))]
    for row in rows:
        print(json.dumps(row), flush=True)
