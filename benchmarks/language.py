"""The PolyMorpher study, small: language models that differ in their mixers alone, on the prose of Python's library.

    python benchmarks/language.py benchmarks/results/language.json [--plot docs/images/language.png]
        [--only train|time|length] [--models "pom;softmax"] [--quick]

Every model has the parameters of the one with attention (the feed-forward makes up for what a mixer has more) and the
same text, steps and learning rate, which were tuned for none of them. Training, timing and the loss at longer contexts
than were trained, of models without learned positions, are rows of their own: losses do not depend on what else the
machine does, times do. A run that was interrupted goes on where it stopped.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from polymix.bench import manifest
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM, matched, parameters

from transformers import DynamicCache  # isort: skip

SIZE = {"hidden_size": 192, "num_layers": 4, "num_heads": 3}
CONTEXT, BATCH, STEPS, VOCAB = 512, 4, 400, 1024
MODELS: dict[str, dict[str, Any]] = {  # the paper's forms, then what we add
    "softmax": {"mixers": ["softmax"]},
    "local": {"mixers": ["local"]},
    "pom": {"mixers": ["pom"]},
    "pom k=3": {"mixers": ["pom:degree=3"]},
    "pom+local": {"mixers": ["pom", "local"]},
    "padre": {"mixers": ["padre"]},
    "qt": {"mixers": ["qt"]},
    "mamba": {"mixers": ["mamba"]},
    "pom, conv": {"mixers": ["pom"], "short_conv": 4},
    "pom, decay": {"mixers": ["pom:decay=8"]},
    "pom, decay, conv": {"mixers": ["pom:decay=8"], "short_conv": 4},
    "pom+local, decay, conv": {"mixers": ["pom:decay=8", "local"], "short_conv": 4},
}
LENGTHS: dict[str, dict[str, Any]] = {
    "softmax, rotary": {"mixers": ["softmax"], "positions": "rotary"},
    "pom, rotary": {"mixers": ["pom"], "positions": "rotary"},
    "pom+local, rotary": {"mixers": ["pom", "local"], "positions": "rotary"},
    "pom+local, decay, conv": {"mixers": ["pom:decay=8", "local"], "short_conv": 4, "positions": "none"},
}
LONGER = (512, 1024, 2048, 4096)


def config(label: str, quick: bool, positions: int = CONTEXT, of: dict[str, Any] = MODELS) -> PolymixGPTConfig:
    size = {"hidden_size": 48, "num_layers": 2, "num_heads": 3} if quick else SIZE
    made = PolymixGPTConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, **size, **of[label])
    hidden = matched(made).intermediate_size
    return PolymixGPTConfig(
        vocab_size=VOCAB, max_position_embeddings=positions, intermediate_size=hidden, **size, **of[label]
    )


def train(label: str, quick: bool, seed: int, longer: bool = False) -> dict[str, Any]:
    from polymix.tasks.text import TextRecipe, train_text

    of = LENGTHS if longer else MODELS
    chosen = config(label, quick, of=of)
    options = {"intermediate_size": chosen.intermediate_size, "max_position_embeddings": CONTEXT, **of[label]}
    for name in SIZE:
        options[name] = getattr(chosen, name)
    steps = 4 if quick else STEPS
    recipe = TextRecipe(
        options=options, context=CONTEXT, batch_size=BATCH, steps=steps, vocab=VOCAB, seed=seed, prompts=(),
        evaluate_every=steps, checkpoint_every=steps, learning_rate=2e-3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        last = train_text(recipe, folder)
        if longer:
            return {f"loss_{context}": loss_at(Path(folder), recipe, context) for context in LONGER}
    return {"loss": last["val_loss"], "bits_per_byte": last["bits_per_byte"], "train_loss": last["loss"]}


def loss_at(folder: Path, recipe: Any, context: int) -> float:
    """On the second half of held-out windows of `context` tokens: as much text is behind each, wherever it stands."""
    from dataclasses import replace

    from polymix.tasks.text.evaluate import Held, evaluate
    from polymix.tasks.text.prepare import prepare

    asked = replace(recipe, context=context, batch_size=max(1, recipe.batch_size * CONTEXT // context))
    held = Held.of(prepare(recipe, folder / "data"), asked)
    for batch in held.batches:
        batch["targets"] = batch["targets"].clone()  # a view of what the inputs are a view of
        batch["targets"][:, : context // 2] = -100
    count = sum(int((batch["targets"] != -100).sum()) for batch in held.batches)
    model = PolymixGPTForCausalLM.from_pretrained(folder)
    said = evaluate(model, replace(held, targets=count), "cpu", 0, 1, lambda value: value)
    return said["val_loss"]


def per_second(label: str, quick: bool) -> float:
    """Tokens a second of forward and backward, the median of several."""
    torch.manual_seed(0)
    model = PolymixGPTForCausalLM(config(label, quick)).train()
    ids = torch.randint(VOCAB, (2 if quick else BATCH, CONTEXT))
    times = []
    for _ in range(3 if quick else 8):
        start = time.perf_counter()
        model(ids, labels=ids, use_cache=False).loss.backward()
        times.append(time.perf_counter() - start)
    return ids.numel() / sorted(times[1:])[len(times[1:]) // 2]


@torch.no_grad()
def decode(label: str, tokens: int, quick: bool) -> tuple[float, int]:
    """Milliseconds of one token after so many, the median, and the bytes of the cache.

    Attention's keys and values are filled in: what they hold does not matter to the time, and reading a long text by
    attention would take hours.
    """
    torch.manual_seed(0)
    model = PolymixGPTForCausalLM(config(label, quick, tokens + 64)).eval()
    cache = DynamicCache()
    for start in range(0, tokens, 8192):
        if label == "softmax":
            heads, wide = model.config.num_heads, model.config.hidden_size // model.config.num_heads
            for layer in range(model.config.num_layers):
                part = torch.randn(1, heads, min(8192, tokens - start), wide)
                cache.update(part, part, layer)
        else:
            ids = torch.randint(VOCAB, (1, min(8192, tokens - start)))
            model(ids, past_key_values=cache, logits_to_keep=1)
    size = cache_bytes(cache)
    times = []
    for _ in range(5 if quick else 40):
        start_ = time.perf_counter()
        model(torch.randint(VOCAB, (1, 1)), past_key_values=cache)
        times.append(time.perf_counter() - start_)
    return 1e3 * sorted(times)[len(times) // 2], size


def cache_bytes(cache: Any) -> int:
    from torch.utils._pytree import tree_leaves

    held = [(layer.keys, layer.values) if layer.keys is not None else layer.state for layer in cache.layers]
    return sum(part.nbytes for part in tree_leaves(held) if isinstance(part, torch.Tensor))


def measure(label: str, quick: bool) -> dict[str, Any]:
    """In a process of its own, so that the peak is this model's."""
    code = f"import language; language.report({label!r}, {quick})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def report(label: str, quick: bool) -> None:
    """What `measure` reads."""
    torch.set_num_threads(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said: dict[str, Any] = {"tokens_per_second": per_second(label, quick)}
    said["training_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for tokens in (1000, 4000) if quick else (1_000, 100_000):
        ms, size = decode(label, tokens, quick)
        said[f"decode_ms_{tokens}"], said[f"cache_bytes_{tokens}"] = ms, size
    print(json.dumps(said))


def plot(content: dict[str, Any], path: Path) -> None:
    """Held-out loss of each model, and the time of a token by what came before."""
    from matplotlib.figure import Figure

    trained = sorted(
        (row for row in content["rows"] if row["kind"] == "train" and not row["seed"]), key=lambda row: row["loss"]
    )
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    best = min(row["loss"] for row in trained)
    for place, row in enumerate(reversed(trained)):
        left.plot([row["loss"]], [place], "o", color="black" if row["model"] == "softmax" else "C0")
        left.annotate(
            f"{row['loss']:.3f}", (row["loss"], place), xytext=(6, -3), textcoords="offset points", fontsize=8
        )
    left.set_yticks(range(len(trained)), [row["model"] for row in reversed(trained)])
    left.set(xlabel="held-out loss, nats a token", title="Same parameters, steps and text")
    left.set_xlim(best - 0.05, trained[-1]["loss"] + 0.12)
    for row in content["rows"]:
        key = "decode_ms_"
        points = sorted((int(k.removeprefix(key)), v) for k, v in row.items() if k.startswith(key))
        if row["kind"] == "time" and len(points) > 1:
            style = {"color": "black"} if row["model"] == "softmax" else {}
            right.plot(*zip(*points, strict=True), marker="o", label=row["model"], **style)
    right.set(xlabel="tokens before", ylabel="ms a token", xscale="log", yscale="log", title="Decoding")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", help="Separated by ;")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=("train", "time", "length"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="Tiny models and 4 steps: to see that it runs.")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    for kind in ("train", "time", "length"):
        if given.only not in (None, kind):
            continue
        of = LENGTHS if kind == "length" else MODELS
        for seed in range(1 if kind == "time" else given.seeds):
            for label in given.models.split(";") if given.models else of:
                key = {"model": label, "kind": kind, "seed": seed}
                if any(key.items() <= row.items() for row in rows):
                    continue
                if kind == "time":
                    found = measure(label, given.quick)
                else:
                    found = train(label, given.quick, seed, longer=kind == "length")
                rows.append({**key, "parameters": parameters(config(label, given.quick, of=of)), **found})
                print(rows[-1], flush=True)
                content = {
                    "machine": manifest("cpu", given.threads), "size": SIZE, "context": CONTEXT, "batch": BATCH,
                    "steps": STEPS, "vocab": VOCAB, "rows": rows,
                }  # fmt: skip
                part = given.out.with_suffix(".part")
                part.write_text(json.dumps(content, indent=1) + "\n")
                part.replace(given.out)
    if given.plot:
        plot(json.loads(given.out.read_text()), given.plot)


if __name__ == "__main__":
    main()
