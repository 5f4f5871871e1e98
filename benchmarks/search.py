"""What `polymix search` finds on three kinds of models, beside fixed rules, and how true its predictions are.

    pip install -c constraints.txt ".[evidence]"
    python benchmarks/search.py benchmarks/results/search.json [--hosts vit,minilm,gpt] [--seeds 3] [--folder …]

vit: a ViT of 6 layers and 64 channels with 144 tokens, trained here on scikit-learn's digits; gpt: a GPT-2 of 6 layers
and 96 channels on the bytes of the Brown corpus, trained here; minilm: all-MiniLM-L6-v2 on Brown's sentences, timed at
512 tokens. MiniLM and Brown are fetched as by pretrained.py, and skipped where they cannot be. A seed decides fresh
weights, the order of the data, and what is held back. Each row is saved when it is there; run the command again to
continue. Seconds are the processor's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pretrained_steps.minilm import LONGEST, encoder
from pretrained_steps.packages import BROWN, MINILM, AbsentError, fetched
from pretrained_steps.texts import SimilarLengths, padded, sentences
from saving import save
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polymix
from polymix.compat import cure_torchvision
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.measure import Stopwatch, manifest
from polymix.models import VisionTransformer
from polymix.train.data.images import load_digits
from polymix.train.in_memory import train_in_memory

BUDGET, MIXERS = 0.7, ("qt", "pom", "padre:degree=2", "padre:degree=3", "keep")
WINDOW, GPT_STEPS, GPT_BATCH, GPT_RATE = 256, 300, 8, 2e-3


class Host(NamedTuple):
    """A trained model, data to search on, and the input that it is timed on (None: a batch of the data)."""

    model: nn.Module
    data: Any
    example: Any = None


def vit(folder: Path) -> Host:
    data = load_digits(24)
    shape = {"image_size": 24, "patch_size": 2, "dim": 64, "depth": 6, "classes": 10, "channels": 1, "mlp_ratio": 2}
    task = ClassifyTask(ClassifyRecipe(image_size=24, epochs=6, learning_rate=2e-3))
    model = train_in_memory(task, data, lambda: VisionTransformer(polymix.SoftmaxConfig(heads=4), **shape)).model
    images = data.normalise(data.test.images)  # which the model has not seen
    return Host(model.eval(), DataLoader(images, 16, shuffle=True))


def minilm(folder: Path) -> Host:
    model, tokenizer = encoder(fetched(MINILM, folder))
    encodings = tokenizer.encode_batch(sentences(fetched(BROWN, folder))[0][:2000])
    rows = [each.ids if len(each.ids) <= LONGEST else [*each.ids[: LONGEST - 1], each.ids[-1]] for each in encodings]
    loader = DataLoader(rows, batch_sampler=SimilarLengths([*map(len, rows)], 16), collate_fn=padded)
    ids = torch.randint(1000, 30000, (1, 512), generator=torch.Generator().manual_seed(0))
    return Host(model, loader, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def gpt(folder: Path) -> Host:
    import transformers

    train, test = (windows("\n".join(part)) for part in sentences(fetched(BROWN, folder)))
    torch.manual_seed(0)
    config: Any = transformers.GPT2Config(
        vocab_size=256, n_embd=96, n_layer=6, n_head=4, n_positions=WINDOW, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), GPT_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, GPT_RATE, GPT_STEPS, pct_start=0.1)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    for step in range(GPT_STEPS):
        ids = train[order[torch.arange(step * GPT_BATCH, (step + 1) * GPT_BATCH) % len(train)]]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"  gpt: loss {loss.item():.3f} nats a byte", flush=True)
    rows = [{"input_ids": row} for row in test[:1000]]
    return Host(model.eval(), DataLoader(rows, GPT_BATCH, shuffle=True))


def windows(text: str) -> Tensor:
    """Bytes in windows (n, WINDOW)."""
    ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return ids[: len(ids) // WINDOW * WINDOW].unflatten(0, (-1, WINDOW))


HOSTS: dict[str, Callable[[Path], Host]] = {"vit": vit, "minilm": minilm, "gpt": gpt}


def searched(host: Host, seed: int, budget: float) -> dict[str, Any]:
    """One search, and its processor seconds."""
    watch = Stopwatch("processor")
    answer = polymix.search(
        host.model, host.data, budget=budget, mixers=MIXERS, input=host.example, seed=seed, say=print, seconds=20.0
    )
    seconds = watch.seconds()
    print(answer, flush=True)
    content = answer.content
    parts = ("damage", "refused", "times", "damages", "front", "points", "rules", "headline", "notes")
    return {"seed": seed, "budget": budget, "seconds": round(seconds, 1), **{name: content[name] for name in parts}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "polymix-evidence", help="for packages")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    cure_torchvision()  # transformers imports it
    torch.set_num_threads(options.threads)
    content = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    done = {(row["host"], row["seed"]) for row in content["rows"]}
    for name in options.hosts.split(","):
        make = cache(HOSTS[name])
        try:
            for seed in range(options.seeds):
                if (name, seed) not in done:
                    content["rows"].append({"host": name, **searched(make(options.folder), seed, options.budget)})
                    save({"machine": manifest("cpu", options.threads), "rows": content["rows"]}, options.out)
        except AbsentError as error:
            print(f"Skipped: {error}.")


if __name__ == "__main__":
    main()
