"""Masked language models of antibodies and of chemical reactions, distilled on texts that they draw themselves."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import polymix
from polymix.measure import Stopwatch
from polymix.train.distill import Samples, accuracy, perplexity
from polymix.train.distill.batches import logits_of
from pretrained_steps.packages import ANTIBERTY, RXNFP, RXNMAPPER, Package, fetched
from pretrained_steps.rows import Rows
from pretrained_steps.texts import padded

ATTENTION, MIXER = "attention", "qt"
MASKED, MASKS, HELD_BACK, SHORTEST = (
    0.15,
    8,
    6,
    20,
)  # masks of each real text; batches; tokens of a reaction that counts
DRAWN, ROUNDS, RATE, TUNING_RATE = 50, 16, 6e-3, 5e-4
CHAINS = (  # variable domains as published: trastuzumab and adalimumab, heavy and light
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
)
SMILES = re.compile(
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)  # the tokens of rxnfp


class Host(NamedTuple):
    """A model, the tokens that it reads, and real texts. tokens: of the shortest and longest text that is drawn."""

    model: nn.Module
    vocabulary: list[str]
    real: list[list[str]]
    tokens: tuple[int, int]
    batch: int

    @property
    def tokenizer(self) -> SimpleNamespace:
        mask, first, last, unknown, padding = map(self.vocabulary.index, ("[MASK]", "[CLS]", "[SEP]", "[UNK]", "[PAD]"))
        unused = [at for at, word in enumerate(self.vocabulary) if word.startswith("[unused")]
        special = [mask, first, last, unknown, padding, *unused]
        return SimpleNamespace(mask_token_id=mask, cls_token_id=first, sep_token_id=last, all_special_ids=special)

    def ids(self) -> list[list[int]]:
        """The real texts in tokens."""
        signs = self.tokenizer
        return [[signs.cls_token_id, *map(self.vocabulary.index, text), signs.sep_token_id] for text in self.real]


def built(folder: Path, name: str, family: str, head: str = "ForMaskedLM") -> nn.Module:
    """The model of a folder with config.json and pytorch_model.bin, of which tensors alone are read."""
    import transformers

    settings = json.loads((folder / name / "config.json").read_text())
    unlike = {"id2label", "label2id"} if "num_labels" in settings else set()  # an older form that names two of them
    config = getattr(transformers, f"{family}Config")(**{key: settings[key] for key in {*settings} - unlike})
    model = getattr(transformers, f"{family}{head}")(config)
    weights = torch.load(folder / name / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing = [key for key in model.load_state_dict(weights, strict=False).missing_keys if "position_ids" not in key]
    tied = {"cls.predictions.decoder.bias", "predictions.decoder.bias"}
    assert not {*missing} - tied, f"{name} lacks {missing}"
    model.tie_weights()
    return model.eval()


def reactions(folders: Sequence[Path], vocabulary: Sequence[str]) -> list[list[str]]:
    """The reactions that stand in the packages' tests and descriptions, without those of a few atoms."""
    tokens_of: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted([*folder.rglob("test_*.py"), *folder.rglob("METADATA")]):
            for text in re.findall(r'"([^" ]+>>[^" ]+)"', path.read_text("utf8")):
                tokens = SMILES.findall(text)
                known = "".join(tokens) == text and set(tokens) <= set(vocabulary) and not re.search(r":\d+\]", text)
                if known and len(tokens) >= SHORTEST:
                    tokens_of[text] = tokens
    return list(tokens_of.values())


def antiberty(folder: Path) -> tuple[Host, list[Package]]:
    place = fetched(ANTIBERTY, folder) / "antiberty" / "trained_models"
    vocabulary = (place / "vocab.txt").read_text().split()
    about = next(place.parents[1].glob("*.dist-info")) / "METADATA"
    printed = list(re.findall(r'"([A-Z]{90,})"', about.read_text("utf8")))
    real = [list(chain) for chain in dict.fromkeys((*CHAINS, *printed))]
    return Host(built(place, "AntiBERTy_md_smooth", "Bert"), vocabulary, real, (100, 130), 8), [ANTIBERTY]


def _reacting(folder: Path, package: Package, name: str, family: str) -> tuple[Host, list[Package]]:
    packages = [RXNFP, RXNMAPPER]
    places = [fetched(each, folder) for each in packages]
    place = next(places[packages.index(package)].rglob(name))
    vocabulary = (place / "vocab.txt").read_text().split()
    host = Host(built(place.parent, name, family), vocabulary, reactions(places, vocabulary), (32, 96), 16)
    return host, packages


def rxnfp(folder: Path) -> tuple[Host, list[Package]]:
    return _reacting(folder, RXNFP, "bert_pretrained", "Bert")


def rxnmapper(folder: Path) -> tuple[Host, list[Package]]:
    return _reacting(folder, RXNMAPPER, "albert_heads_8_uspto_all_1310k", "Albert")


HOSTS: dict[str, Callable[[Path], tuple[Host, list[Package]]]] = {
    "antiberty": antiberty, "rxnfp": rxnfp, "rxnmapper": rxnmapper,
}  # fmt: skip


def masked(host: Host) -> list[dict[str, Tensor]]:
    """Each real text several times, with 15 % of its tokens masked by chance, which are the labels."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for row in host.ids():
        batch = padded([row] * MASKS)
        hidden = torch.rand(batch["input_ids"].shape, generator=draw) < MASKED
        hidden[:, [0, -1]] = False
        labels = batch["input_ids"].masked_fill(~hidden, -100)
        batches.append(
            {"input_ids": batch["input_ids"].masked_fill(hidden, host.tokenizer.mask_token_id), "labels": labels}
        )
    return batches


def measured(model: nn.Module, sets: dict[str, list[dict[str, Tensor]]]) -> dict[str, dict[str, float]]:
    """Loss in nats and accuracy of the masked tokens, by set."""
    return {
        name: {
            "loss": math.log(perplexity(model, batches, logits_of, "cpu")),
            "accuracy": accuracy(model, batches, logits_of, "cpu"),
        }
        for name, batches in sets.items()
    }  # fmt: skip


def chance(batches: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """What the frequencies of the tokens alone give on a set, taken from the set itself."""
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    shares = torch.bincount(labels[labels >= 0]).double()
    shares = shares[shares > 0] / shares.sum()
    return {"loss": float(-(shares * shares.log()).sum()), "accuracy": float(shares.max())}


def plans(host: Host) -> dict[str, Any]:
    """Layers to convert: the middle one, every second one, all; only all where layers share their weights."""
    ids = {"input_ids": torch.tensor(host.ids()[:1])}
    names = list(polymix.convert(host.model, MIXER, input=ids, copy=True).adapters)
    every = {f"all {len(names)}": dict.fromkeys(names, MIXER)}
    if len(names) == 1:
        return {"all, which share their weights": dict.fromkeys(names, MIXER)}
    return {
        "1": {names[len(names) // 2]: MIXER},
        f"every second of {len(names)}": dict.fromkeys(names[1::2], MIXER),
        **every,
    }


def drawn(host: Host, name: str, given: argparse.Namespace, kind: str = "") -> list[dict[str, Tensor]]:
    """Texts of a kind to train on, or, without one, others that the model draws, with the tokens it predicts."""
    options = {"batch_size": host.batch, "tokens": host.tokens, "rounds": ROUNDS, "tokenizer": host.tokenizer}
    data = Samples(kind=kind, batches=DRAWN, **options) if kind else Samples(batches=HELD_BACK, **options)
    file = given.folder / f"{f'samples-{name}-{kind}' if kind else f'held-out-{name}'}-{given.seed}.ckpt"
    return data.draw(host.model, given.seed + (not kind), labels=not kind, file=file)


def imitated(report: polymix.ConversionReport, data: Any, given: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Distil in place, in so many steps of imitation. What a row says of it."""
    watch = Stopwatch("processor")
    done = polymix.distill(
        report, data, imitate_epochs=steps // DRAWN, epochs=given.epochs, imitate_lr=RATE, learning_rate=TUNING_RATE,
        weight_decay=0.01, seed=given.seed,
    )  # fmt: skip
    row = {"epochs": given.epochs, "kept": done.kept, "held_back": done.held_back}
    return {**row, "imitation": done.imitation[-1], "seconds": round(watch.seconds(), 1)}


def run(given: argparse.Namespace) -> None:
    host, packages = HOSTS[given.model](given.folder)
    held_out = drawn(host, given.model, given)
    sets = {"self": held_out, "real": masked(host)}
    labels = {name: sum(int((batch["labels"] >= 0).sum()) for batch in batches) for name, batches in sets.items()}
    about = {
        "mixer": MIXER, "real": len(host.real), "labels": labels, "batch": host.batch, "tokens": host.tokens,
        "rounds": ROUNDS, "drawn": DRAWN, "chance": {name: chance(batches) for name, batches in sets.items()},
    }  # fmt: skip
    rows = Rows(given, packages, about)
    if {"plan": ATTENTION} not in rows:
        rows.add({"plan": ATTENTION, **measured(host.model, sets)})
    for name, plan in plans(host).items():
        if given.plans and name not in given.plans.split(","):
            continue
        kinds = given.kinds.split(",")
        for kind, steps in dict.fromkeys((kind if steps else "none", steps) for steps in given.steps for kind in kinds):
            key = {"plan": name, "data": kind, "steps": steps, "seed": given.seed}
            if key in rows:
                continue
            torch.manual_seed(given.seed)
            report = polymix.convert(host.model, plan, input={"input_ids": held_out[0]["input_ids"]}, copy=True)
            row: dict[str, Any] = {}
            if steps:
                watch = Stopwatch("processor")
                data = drawn(host, given.model, given, kind)
                row["drawing_seconds"] = round(watch.seconds(), 1)
                row |= imitated(report, data, given, steps)
            rows.add({**key, **row, **measured(report.model.eval(), sets)})
