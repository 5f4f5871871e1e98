"""A longer context: the loss far beyond the old limit, and memory and time of a token there.

    python benchmarks/context.py benchmarks/results/context.json [--threads 1] [--quick]

Each sequence has words of its own frequencies, drawn anew. The more of it a model has read and kept, the better it
foretells the next word, and what the best guess would lose is known. A small host of transformers learns the task at
OLD tokens, is converted with `context=FAR`, and is distilled on equally many tokens, in short or in long sequences.
"""

from __future__ import annotations

import argparse
import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.context import extended
from polymix.measure import Stopwatch, manifest
from polymix.train.distill.pieces import fresh_cache

cure_torchvision()
import transformers  # noqa: E402 (torchvision is cured first)

OLD, NEW, FAR = 128, 1024, 2048
WORDS, SPREAD = 32, 0.3
EDGES = (0, 64, 128, 256, 512, 1024, 2048)
STEPS, BATCH, RATE = 500, 16, 1e-2
TUNING = 96  # steps of distillation, each on as many tokens
LENGTHS = (128, 1024, 8192)  # tokens before the one that is timed
SIZES: dict[str, Any] = {"vocab_size": WORDS + 1, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
PLANS = {"qt": "qt", "pom": "pom", "qt, then the host's attention": {"*.0.*": "qt"}}


def host(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "GPT-2":
        config: Any = transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=2, n_positions=OLD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZES
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=OLD, **SIZES,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sequences(size: int, length: int, seed: int) -> dict[str, Tensor]:
    """Words drawn from frequencies that are drawn anew for each sequence, from a Dirichlet distribution."""
    draw = torch.Generator().manual_seed(seed)
    shapes = torch.full((size, WORDS), SPREAD)
    frequencies = torch._sample_dirichlet(shapes, generator=draw)
    ids = 1 + torch.multinomial(frequencies, length, True, generator=draw)
    return {"input_ids": ids, "labels": ids}


def learned(model: nn.Module, steps: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        loss = model(**sequences(BATCH, OLD, step), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step}: {loss.item():.3f}", flush=True)
    return model.eval()


def ranges(losses: Tensor) -> list[float | None]:
    """The mean of losses (B, N - 1) of the second token on, in each range of positions; None beyond the last."""
    length = losses.shape[1] + 1
    return [
        losses[:, max(low - 1, 0) : high - 1].mean().item() if high <= length else None for low, high in pairwise(EDGES)
    ]


@torch.no_grad()
def by_position(model: Any, length: int = FAR) -> list[float | None]:
    """The loss in nats a token in each range of positions; None beyond what the model takes."""
    batch = sequences(32, length, 10**6)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    return ranges(nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none"))


def best() -> list[float | None]:
    """The lowest expected loss: a count of what was seen, (n_w + SPREAD) / (n + WORDS · SPREAD)."""
    ids = sequences(32, FAR, 10**6)["input_ids"] - 1
    seen = nn.functional.one_hot(ids, WORDS).cumsum(1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    before = torch.arange(1, FAR)
    return ranges(-((seen + SPREAD) / (before + WORDS * SPREAD)).log())


def distilled(report: Any, length: int, steps: int, piece: int | None) -> float:
    """Train as many tokens at one length or another; returns the seconds of the processor."""
    data = [sequences(BATCH * OLD // length, length, 2 * 10**6 + i) for i in range(steps)]
    watch = Stopwatch("processor")
    polymix.distill(report, data, imitate_epochs=1, epochs=1, learning_rate=1e-3, piece=piece, say=lambda line: None)
    return watch.seconds()


@torch.no_grad()
def a_token(model: Any, before: int) -> dict[str, float]:
    """Bytes of the cache after `before` tokens, and milliseconds of the processor for one more."""
    cache, ids = fresh_cache(model), sequences(1, before + 12, 0)["input_ids"]
    for start in range(0, before, 1024):
        model(input_ids=ids[:, start : min(start + 1024, before)], past_key_values=cache, use_cache=True)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in tree_leaves(vars(layer))
               if isinstance(t, Tensor))  # fmt: skip
    times = []
    for place in range(before, before + 12):
        watch = Stopwatch("processor")
        model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
        times.append(watch.seconds())
    return {"tokens": before, "bytes": held, "ms": 1e3 * sorted(times)[len(times) // 2]}


def rows_of(kind: str, steps: int, tuning: int) -> list[dict[str, Any]]:
    watch = Stopwatch("processor")
    teacher = learned(host(kind), steps)
    rows: list[dict[str, Any]] = []
    if kind == "GPT-2":  # which fails after its last position; rotary angles "continue" as they are
        row = {"host": kind, "model": "host", "trained": OLD, "loss": by_position(teacher, OLD)}
        rows.append({**row, "seconds": watch.seconds()})
    choices = ("interpolate", "repeat", "none") if kind == "GPT-2" else ("continue", "interpolate")
    for positions in choices:
        longer = copy.deepcopy(teacher)
        extended(longer, FAR, positions)
        rows.append({"host": kind, "model": "host", "positions": positions, "loss": by_position(longer)})
    for name in PLANS if kind == "GPT-2" else ("qt",):
        for length, piece in ((OLD, None), (NEW, OLD)):
            report = polymix.convert(copy.deepcopy(teacher), PLANS[name], context=FAR, positions=choices[0])
            seconds = distilled(report, length, tuning, piece)
            loss = by_position(report.model.eval())
            rows.append(
                {"host": kind, "model": name, "positions": choices[0], "trained": length, "piece": piece, "loss": loss,
                 "seconds": seconds}
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def speeds() -> list[dict[str, Any]]:
    rows = []
    for name in ("host", *PLANS):
        model = host("GPT-2").eval()
        if name == "host":
            extended(model, max(LENGTHS) + 64, None)
        else:
            polymix.convert(model, PLANS[name], context=max(LENGTHS) + 64)
        rows += [{"model": name, **a_token(model, before)} for before in LENGTHS]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps, tuning = (3, 8) if options.quick else (STEPS, TUNING)
    rows = [row for kind in ("GPT-2", "Llama") for row in rows_of(kind, steps, tuning)]
    setting = {
        "old": OLD,
        "new": NEW,
        "far": FAR,
        "words": WORDS,
        "spread": SPREAD,
        "edges": EDGES,
        "steps": steps,
        "tuning": tuning,
    }
    content = {**setting, "best": best(), "rows": rows, "speed": speeds()}
    save({**content, "machine": manifest("cpu", options.threads)}, options.out)


if __name__ == "__main__":
    main()
