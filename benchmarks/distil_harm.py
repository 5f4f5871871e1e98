"""Does distillation ever leave a worse model than the conversion did? Small hosts, mixers and lengths of training.

    python benchmarks/distil_harm.py benchmarks/results/distil-harm.json [--hosts …] [--threads 1]

Each host is trained here, converted in all layers, and distilled by `polymix.distill` with its defaults, for so many
steps of imitation and as many of fine-tuning. The stage is chosen on some held-out samples, and measured on others.
Run it again to continue.
"""

import argparse
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from context import BATCH, host, learned, sequences
from saving import save
from torch import Tensor, nn

import polymix
from polymix.compat import cure_torchvision
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.measure import Stopwatch, manifest
from polymix.models import VisionTransformer
from polymix.train.data.images import load_digits
from polymix.train.distill import accuracy, perplexity
from polymix.train.distill.batches import logits_of
from polymix.train.in_memory import train_in_memory

cure_torchvision()
import timm  # noqa: E402 (torchvision is cured first)
import transformers  # noqa: E402

STEPS, EPOCH = (6, 30, 200), 40  # batches of an epoch at the most
PLANS: dict[str, dict[str, str]] = {  # the last keeps half of the attention, so that little is lost
    "qt": {"plan": "qt"}, "pom": {"plan": "pom"}, "qt in every second layer": {"plan": "1:1", "mixer": "qt"},
}  # fmt: skip
WORDS, LONGEST, KINDS = 32, 32, 8


class Learned(NamedTuple):
    """A trained host, `EPOCH` batches of its training data or of the like, and samples to choose and to judge by."""

    model: nn.Module
    batches: list[Any]
    val: list[Any]
    test: list[Any]
    metric: Callable[..., float]
    drop: tuple[str, ...] = ()  # what attention loses


def vision(size: int, build: Callable[[], nn.Module], drop: tuple[str, ...] = ()) -> Learned:
    data = load_digits(size)
    task = ClassifyTask(ClassifyRecipe(image_size=size, epochs=20, learning_rate=2e-3))
    model = train_in_memory(task, data, build).model
    images, labels = data.normalise(data.train.images), data.train.labels
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = [(images[part], labels[part]) for part in order.split(32)[:EPOCH]]
    tests = data.normalise(data.test.images)
    val, test = ([(tests[start::2], data.test.labels[start::2])] for start in (0, 1))
    return Learned(model, batches, val, test, accuracy, drop)


def vit(size: int, dim: int, depth: int) -> nn.Module:
    shape = {"image_size": size, "patch_size": 2, "classes": 10, "channels": 1, "mlp_ratio": 2}
    return VisionTransformer(polymix.SoftmaxConfig(heads=4), dim=dim, depth=depth, **shape)


def noisy() -> nn.Module:
    """Batch norm before timm's ViT with dropout and stochastic depth: what behaves otherwise in training."""
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU())
    shape = {
        "img_size": 8,
        "patch_size": 2,
        "in_chans": 16,
        "num_classes": 10,
        "embed_dim": 64,
        "depth": 4,
        "num_heads": 4,
    }
    drops = {"drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.1}
    return nn.Sequential(stem, timm.models.VisionTransformer(**shape, **drops))


def swin() -> nn.Module:
    """Two stages, every second layer's windows shifted; the windows' bias of position is part of the host."""
    shape = {"img_size": 16, "patch_size": 2, "window_size": 4, "in_chans": 1, "num_classes": 10}
    return timm.models.SwinTransformer(**shape, embed_dim=32, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0)


def texts(size: int, seed: int) -> dict[str, Tensor]:
    """Words of random number; the class is the most frequent of the first KINDS words, or the first of several."""
    draw = torch.Generator().manual_seed(seed)
    ids = 1 + torch.randint(WORDS, (size, LONGEST), generator=draw)
    favourite = torch.randint(KINDS, (size, 1), generator=draw)
    ids = torch.where(torch.rand(ids.shape, generator=draw) < 0.15, 1 + favourite, ids)
    mask = torch.arange(LONGEST) < torch.randint(LONGEST // 4, LONGEST + 1, (size, 1), generator=draw)
    ids = torch.where(mask, ids, 0)
    counts = torch.stack([(ids == word).sum(1) for word in range(1, KINDS + 1)], 1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": counts.argmax(1)}


def bert() -> Learned:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS + 1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LONGEST, num_labels=KINDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 600)
    for step in range(600):
        model(**texts(64, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Learned(
        model.eval(),
        [texts(32, 10**6 + turn) for turn in range(EPOCH)],
        [texts(500, 2 * 10**6)],
        [texts(500, 3 * 10**6)],
        accuracy,
    )


def causal(kind: str) -> Learned:
    model = learned(host(kind), 300)
    batches = [sequences(BATCH, 128, 2 * 10**6 + turn) for turn in range(EPOCH)]
    return Learned(model, batches, [sequences(64, 128, 10**6)], [sequences(64, 128, 10**6 + 1)], perplexity)


HOSTS: dict[str, Callable[[], Learned]] = {
    "ViT 64 × 4, digits 8²": partial(vision, 8, partial(vit, 8, 64, 4)),
    "ViT 64 × 4, digits 16²": partial(vision, 16, partial(vit, 16, 64, 4)),
    "ViT 192 × 12, digits 8²": partial(vision, 8, partial(vit, 8, 192, 12)),
    "ViT 64 × 4, batch norm and dropout": partial(vision, 8, noisy),
    "Swin 32 and 64 × 2, digits 16²": partial(vision, 16, swin, ("position_bias",)),
    "BERT 64 × 4, padded": bert, "GPT-2 64 × 2": partial(causal, "GPT-2"), "Llama 64 × 2": partial(causal, "Llama"),
}  # fmt: skip


def judged(known: Learned, model: nn.Module) -> float:
    return known.metric(model.eval(), known.test, logits_of, "cpu")


def one(known: Learned, plan: str, steps: int, options: dict[str, float]) -> dict[str, Any]:
    """Convert and distil a copy; the results by stage, that of what is kept, and processor seconds."""
    batches = known.batches[: min(steps, EPOCH)]
    torch.manual_seed(0)
    report = polymix.convert(known.model, **PLANS[plan], input=_inputs(batches[0]), drop=known.drop, copy=True)
    before, converted = (judged(known, model) for model in (known.model, report.model))
    said: list[str] = []
    watch, epochs = Stopwatch("processor"), max(1, steps // len(batches))
    done = polymix.distill(
        report, batches, val=known.val, metric=known.metric, imitate_epochs=epochs, epochs=epochs, say=said.append,
        **options,
    )  # fmt: skip
    seconds = watch.seconds()
    result = judged(known, report.model)
    return {"before": before, "converted": converted, "result": result, "kept": done.kept,
            "warned": "WARNING" in said[-1], "seconds": round(seconds, 1)}  # fmt: skip


def _inputs(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value for name, value in batch.items() if name != "labels"}
    return batch[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hosts", default=",".join(str(at) for at in range(len(HOSTS))), help="by number, from 0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--options", default="{}", help="of polymix.distill, as JSON, beside its defaults")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    rows = content["rows"]
    done = {(row["host"], row["plan"], row["steps"]) for row in rows}
    for name in [list(HOSTS)[int(at)] for at in options.hosts.split(",")]:
        make = cache(HOSTS[name])
        for plan in PLANS:
            for steps in STEPS:
                if (name, plan, steps) in done:
                    continue
                result = one(make(), plan, steps, json.loads(options.options))
                rows.append({"host": name, "metric": make().metric.__name__, "plan": plan,
                             "steps": steps, **result})  # fmt: skip
                print(rows[-1], flush=True)
                save({"machine": manifest("cpu", options.threads), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
