"""The user's text, prepared for one language model: windows of its own tokens."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from polymix.errors import DataError, OptionError, PolymixError
from polymix.workflows.convert.inputs import card_metadata, check_call, sequence_length
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source

MAX_HELD_BACK = 65536  # maximum number of tokens: they are evaluated after every stage
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
_OPTIONS = {"context": "--tokens", "tokenizer": "--model"}  # the command's option for an argument; others: --data


class Text:
    """A text file or a folder of text files, in windows of tokens of the model's own tokenizer.

    A part of the documents, or the end of a single one, is held back for the perplexity, or for the error of the
    features of a model that does not predict the next token.
    """

    batch, metric = 4, "perplexity"
    learning: Mapping[str, Any]

    def __init__(self, data: str, source: Source, settings: Settings) -> None:
        from polymix.train.distill.batches import foretells

        self.learning = {"forward": _next_tokens}
        model: Any = source.model
        if not foretells(model, {}):
            self.metric, self.learning = "relative_error", {}
            if not settings.aligns_features:
                got = f"text for {type(model).__name__}, which does not predict the next token"
                cure = (
                    "Pass --distill-epochs with --distill-loss features; or --data self, for a masked language model; "
                    "or use polymix.distill with your own batches."
                )
                raise OptionError("--data", got, "no data, or features to align", cure)
        if settings.image_size is not None:
            raise OptionError("--image-size", settings.image_size, "no image size for a text model", "Pass --tokens.")
        if source.folder is None or not any((source.folder / name).is_file() for name in TOKENIZERS):
            got = f"{settings.model}, which has no tokenizer for {data}"
            cure = "Save it there with tokenizer.save_pretrained(FOLDER), or call polymix.distill with your batches."
            raise OptionError("--model", got, f"a folder with one of {', '.join(TOKENIZERS)}", cure)
        self.data, self.tokens = Path(data), sequence_length(model, settings.length)
        folder = Path(mkdtemp(prefix="polymix-text-"))  # tokens are read from there
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.text = _prepared(self.data, source.folder, self.tokens, folder / "text")
        for tokens in (self.text.train, self.text.val):
            try:
                tokens.check(model.config.vocab_size)
            except DataError as error:
                got = f"a tokenizer with {self.text.vocab} tokens for an embedding of {model.config.vocab_size}"
                raise OptionError("--model", got, "the model's own tokenizer", "Put it in the folder.") from error
        size = min(self.tokens, len(self.text.val) - 1)
        self.train = Windows(self.text.train, self.tokens)
        self.test = Windows(self.text.val.part(0, min(len(self.text.val), max(size, MAX_HELD_BACK) + 1)), size)

    @property
    def size(self) -> str:
        return f"{len(self.train):,} windows of {self.tokens:,} tokens"

    def sample(self, model: nn.Module, batch: int, device: str) -> dict[str, Tensor]:
        first = torch.stack([self.train[i][:-1] for i in range(min(batch, len(self.train)))])
        inputs = {"input_ids": first.to(device)}
        check_call(model, inputs)
        return inputs

    def loaders(self, batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        return (
            DataLoader(self.train, batch, shuffle=True, collate_fn=_together),
            DataLoader(self.test, batch, collate_fn=_together),
        )

    def notes(self) -> list[str]:
        held = len(self.test) * self.test.size
        measured = "perplexity (e to the mean loss in nats per token)" if self.generates else "error of the features"
        return [
            f"Data: {self.data.name}, {len(self.train) * self.tokens:,} tokens for training and {held:,} for the "
            f"{measured}, in windows of {self.tokens:,}."
        ]

    @property
    def generates(self) -> bool:
        """Whether the model is one that writes texts."""
        return self.metric == "perplexity"

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        held = f"{self.data.name}, {len(self.test) * self.test.size:,} tokens held back"
        kind = "text-generation" if self.generates else "feature-extraction"
        return card_metadata(kind, title, (self.data.name.replace(" ", "-"), held), self.metric, value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.data.name, "train": len(self.train) * self.tokens, "test": len(self.test) * self.test.size,
            "tokens": self.tokens, "vocab": self.text.vocab,
        }  # fmt: skip


class Windows(Dataset[Tensor]):
    """Tokens in windows of `size` and the one that follows, each token a target once; a shorter rest is left out."""

    def __init__(self, tokens: Any, size: int) -> None:
        self.tokens, self.size = tokens, size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.size

    def __getitem__(self, place: int) -> Tensor:
        window: Tensor = self.tokens[place * self.size : (place + 1) * self.size + 1]
        return window


def _together(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def _next_tokens(model: nn.Module, batch: Any) -> Tensor:
    """The logits of the next tokens, which are the labels here: `polymix.distill` need not shift them."""
    from polymix.train.distill.batches import logits_of

    return logits_of(model, batch)


def _prepared(data: Path, tokenizer: Path, tokens: int, folder: Path) -> Any:
    """The data of the domain of text, in tokens of a folder's tokenizer."""
    from polymix.train.registry import task_of

    try:
        return task_of("text", data=str(data), tokenizer=str(tokenizer), context=tokens).load(folder)
    except PolymixError as error:
        option = _OPTIONS.get(error.argument, "--data")
        raise type(error)(option, error.got, error.allowed, error.cure) from error
