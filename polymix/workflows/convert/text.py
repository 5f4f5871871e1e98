"""Text of the user's, as one language model takes it: windows of its own tokens."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from polymix.errors import DataError, OptionError, PolymixError
from polymix.tasks.distill.batches import foretells
from polymix.tasks.text.data import TextData, load
from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.text.tokens import Tokens
from polymix.workflows.convert.data import result
from polymix.workflows.convert.inputs import check_call, longest
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source

HELD_BACK = 65536  # tokens at most, since they are gone through after every stage
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
_OPTIONS = {"context": "--tokens", "tokenizer": "--model"}  # as the command has them; --data the others


class Text:
    """A text file, or a folder of them, in windows of `tokens` tokens of the model's own tokenizer.

    A part of the documents, of a single one its tail, is held back for the perplexity.
    """

    batch, metric = 4, "perplexity"

    def __init__(self, data: str, source: Source, settings: Settings) -> None:
        model: Any = source.model
        if not foretells(model, {}):
            got = f"text for {type(model).__name__}, which foretells no next token"
            raise OptionError("--data", got, "none", "Distil it from Python, with batches of yours: polymix.distill.")
        if settings.image_size is not None:
            raise OptionError("--image-size", settings.image_size, "none for a model of text", "Pass --tokens.")
        if source.folder is None or not any((source.folder / name).is_file() for name in _TOKENIZERS):
            got = f"{settings.model}, which has no tokenizer to read {data} with"
            cure = "tokenizer.save_pretrained(FOLDER) puts it there; polymix.distill takes batches of yours."
            raise OptionError("--model", got, f"a folder with one of {', '.join(_TOKENIZERS)}", cure)
        self.data, self.tokens = Path(data), longest(model, settings.tokens)
        folder = Path(mkdtemp(prefix="polymix-text-"))  # of tokens, which are read from there
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.text = _prepared(self.data, source.folder, self.tokens, folder / "text")
        for tokens in (self.text.train, self.text.val):
            try:
                tokens.check(model.config.vocab_size)
            except DataError as error:
                got = f"a tokenizer of {self.text.vocab} tokens for an embedding of {model.config.vocab_size}"
                raise OptionError("--model", got, "a tokenizer of its own", "Put the right one there.") from error
        size = min(self.tokens, len(self.text.val))
        self.train = Windows(self.text.train, self.tokens)
        self.test = Windows(self.text.val.part(0, min(len(self.text.val), max(size, HELD_BACK))), size)

    @property
    def size(self) -> str:
        return f"{len(self.train):,} windows of {self.tokens:,} tokens"

    def given(self, model: nn.Module, batch: int, device: str) -> dict[str, Tensor]:
        first = torch.stack([self.train[i] for i in range(min(batch, len(self.train)))])
        found = {"input_ids": first.to(device)}
        check_call(model, found)
        return found

    def loaders(self, batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        return (
            DataLoader(self.train, batch, shuffle=True, collate_fn=_together),
            DataLoader(self.test, batch, collate_fn=_together),
        )

    def told(self) -> list[str]:
        held = len(self.test) * self.test.size
        return [
            f"Data: {self.data.name}, {len(self.train) * self.tokens:,} tokens for training and {held:,} for the "
            f"perplexity, which is e to the mean loss in nats a token, in windows of {self.tokens:,}."
        ]

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        held = f"{self.data.name}, {len(self.test) * self.test.size:,} tokens held back"
        return result("text-generation", title, (self.data.name.replace(" ", "-"), held), self.metric, value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.data.name, "train": len(self.train) * self.tokens, "test": len(self.test) * self.test.size,
            "tokens": self.tokens, "vocab": self.text.vocab,
        }  # fmt: skip


class Windows(Dataset[Tensor]):
    """Tokens cut into pieces of `size`; what is left over at the end plays no part."""

    def __init__(self, tokens: Tokens, size: int) -> None:
        self.tokens, self.size = tokens, size

    def __len__(self) -> int:
        return len(self.tokens) // self.size

    def __getitem__(self, place: int) -> Tensor:
        return self.tokens[place * self.size : (place + 1) * self.size]


def _together(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def _prepared(data: Path, tokenizer: Path, tokens: int, folder: Path) -> TextData:
    try:
        return load(TextRecipe(data=str(data), tokenizer=str(tokenizer), context=tokens), folder)
    except PolymixError as error:
        option = _OPTIONS.get(error.argument, "--data")
        raise type(error)(option, error.got, error.allowed, error.cure) from error
