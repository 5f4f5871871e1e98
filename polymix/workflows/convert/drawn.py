"""Text that a language model draws itself, or random tokens, as the training data of its conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.convert.context import longest
from polymix.errors import OptionError, PolymixError, one_line
from polymix.workflows.convert.inputs import NO_OPTIONS, check_call
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source
from polymix.workflows.convert.text import TOKENIZERS

if TYPE_CHECKING:
    from polymix.train.distill.samples import Samples

TEXTS, HELD_BACK = 4096, 8  # texts to learn from; batches for the perplexity
_OPTIONS = {"tokenizer": "--model", "tokens": "--tokens"}  # the command's option for an argument; others: --data


class Drawn:
    """Texts that the original model draws itself, or random tokens. The perplexity is on what the model draws."""

    batch, metric = 16, "perplexity"
    learning: Mapping[str, Any] = NO_OPTIONS

    def __init__(self, kind: str, source: Source, settings: Settings) -> None:
        from polymix.train.distill.samples import LONGEST, SPREAD, Samples

        model: Any = source.model
        if settings.image_size is not None:
            raise OptionError("--image-size", settings.image_size, "no image size for a text model", "Pass --tokens.")
        high, most = settings.length, longest(model)
        if high is None:
            high = min(LONGEST, most or LONGEST)
        self.masked = "MaskedLM" in type(model).__name__
        self.texts, self.seed = settings.samples or TEXTS, settings.seed
        lengths = max(4, high // SPREAD), max(4, high)
        self.samples = Samples(kind=kind, tokens=lengths, tokenizer=_tokenizer(source) if self.masked else None)
        self.held_back: list[dict[str, Tensor]] = []

    @property
    def size(self) -> str:
        what = "texts that the model draws itself" if self.samples.kind == "self" else "texts of random tokens"
        return f"{self.texts:,} {what}"

    def sample(self, model: nn.Module, batch: int, device: str) -> dict[str, Tensor]:
        """A text to convert with; and, as the model is not converted yet, those that are held back are drawn."""
        few = replace(self.samples, batches=HELD_BACK, batch_size=batch)
        try:
            self.held_back = few.draw(model, self.seed + 1, labels=True)
        except PolymixError as error:
            option = _OPTIONS.get(error.argument, "--data")
            raise type(error)(option, error.got, error.allowed, error.cure) from error
        longer = max(self.held_back, key=lambda drawn: drawn["input_ids"].shape[1])
        inputs = tree_map_only(Tensor, lambda ids: ids.to(device), {"input_ids": longer["input_ids"]})
        check_call(model, inputs)
        return dict(inputs)

    def loaders(self, batch: int) -> tuple[Samples, list[dict[str, Tensor]]]:
        return replace(self.samples, batches=-(-self.texts // batch), batch_size=batch), self.held_back

    def notes(self) -> list[str]:
        short, long = self.samples.tokens or (0, 0)
        places = "masked tokens" if self.masked else "tokens"
        return [
            f"Data: {self.size}, of {short:,} to {long:,} tokens; no text was used. The perplexity is of the {places} "
            "that the original model draws in other such texts, so that none is lower than its own, but by chance."
        ]

    def card(self, title: str, value: float | None) -> dict[str, Any]:
        return {"pipeline_tag": "fill-mask" if self.masked else "text-generation"}

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.samples.kind, "train": self.texts, "tokens": list(self.samples.tokens or ())}


def _tokenizer(source: Source) -> Any:
    """The tokenizer of a model's folder; None where there is none."""
    if source.folder is None or not any((source.folder / name).is_file() for name in TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the library raises on a damaged file
        got = f"{source.folder}, whose tokenizer cannot be loaded ({one_line(error)[:200]})"
        raise OptionError("--model", got, "a folder of transformers with its tokenizer", "Save it again.") from error
