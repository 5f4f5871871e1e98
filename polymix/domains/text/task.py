"""Text as a task: a causal language model learns by cross-entropy over all targets of a step."""

from __future__ import annotations

import math
import shlex
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapters.libraries import local_files
from polymix.convert.saving.files import CONFIG, TRANSFORMERS_ENTRY
from polymix.convert.saving.files import WEIGHTS as SAFE_WEIGHTS
from polymix.domains.text import data as reading
from polymix.domains.text import metrics as measuring
from polymix.domains.text.data import VOCAB, TextData
from polymix.domains.text.model import build_model, check_split, load_model, model_config
from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.tokens import Batch, Documents, Windows, parts_of_steps
from polymix.errors import PolymixError, ResultsError
from polymix.files import read_json, write_files
from polymix.limits import check_memory, check_model
from polymix.ops.shared.masks import positions
from polymix.train.counted import CountedTask
from polymix.train.data.sampling import Slices
from polymix.train.initial import FoundWeights, check_header, unreadable
from polymix.train.task import IGNORED, Metric, Process

NO_LIMIT = 2**62  # tokens
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer that transformers can read."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def _is_of_transformers(folder: Path) -> bool:
    """Whether a folder has a model of transformers' own classes or of polymix's language models."""
    config = read_json(folder / CONFIG, ResultsError, "init", "a config") if (folder / CONFIG).is_file() else None
    return isinstance(config, dict) and config.get("model_type") not in (None, TRANSFORMERS_ENTRY)


class TextTask(CountedTask[TextRecipe, TextData]):
    """A causal language model. The loss is the mean over all targets of a step, however it is cut into slices."""

    name = "text"
    metrics = (
        Metric("val_loss", "lower"),
        Metric("perplexity", "lower"),
        Metric("bits_per_byte", "lower"),
    )
    unit = "tokens"
    splits = "tokens"

    def check(self) -> None:
        config = model_config(self.recipe, self.recipe.vocab or VOCAB)
        size = check_model(lambda: build_model(config), "recipe", "its model")
        check_memory("recipe", "its model with gradients and the optimizer's state", 4 * size)
        if self.recipe.sequence_parallel > 1:
            check_split(config, self.recipe.packing)

    def load(self, folder: Path) -> TextData:
        """The recipe's text; in the tokens of the model in `init`, unless the recipe names a tokenizer."""
        recipe, start = self.recipe, self.recipe.init
        if recipe.tokenizer is None and start is not None and has_tokenizer(Path(start)):
            recipe = self._in_tokens_of(Path(start))
        return reading.load(recipe, folder, self.say)

    def _in_tokens_of(self, folder: Path | None) -> TextRecipe:
        """The recipe with the tokenizer in a folder, if there is one, whose vocabulary is then as it is."""
        recipe = self.recipe
        tokenizer = str(folder) if folder is not None and has_tokenizer(folder) else recipe.tokenizer
        shards = reading.find_source(recipe.data, recipe.column).kind == "shards"
        return recipe.changed(tokenizer=tokenizer, vocab=recipe.vocab if shards else None)

    def build(self, data: TextData) -> nn.Module:
        padding = None if data.tokenizer is None else data.tokenizer.pad_token_id
        return build_model(model_config(self.recipe, data.vocab, data.end, padding))

    def _windows(self, data: TextData) -> Windows:
        recipe = self.recipe
        if recipe.packing == "padded" and data.end is not None:
            return Documents(data.train, recipe.context, recipe.batch_size, recipe.seed, data.end)
        end = data.end if recipe.packing == "segments" else None
        return Windows(data.train, recipe.context, recipe.batch_size, recipe.seed, end)

    def batches(self, data: TextData, slices: Slices) -> Iterator[Batch]:
        return parts_of_steps(self._windows(data), slices)

    def counts(self, model: nn.Module, batch: Batch) -> Tensor:
        return (batch["targets"] != IGNORED).sum()[None]

    def sums(self, model: nn.Module, batch: Batch) -> Tensor:
        return measuring.summed_loss(model, batch)[None]

    def local(self, batch: Batch, share: Callable[[Tensor], Tensor]) -> Batch:
        tokens = batch["input_ids"]
        places = positions(tokens.shape[1], None, batch.get("segment_ids"), tokens.device)
        whole = {**batch, "position_ids": places if places.ndim == 2 else places[None]}
        return {name: share(part) for name, part in whole.items()}

    def epoch(self, data: TextData, step: int) -> float:
        return self._windows(data).epoch(step)

    def size(self, batch: Batch) -> float:
        return batch["input_ids"].numel()

    def measure(self, model: nn.Module, data: TextData, process: Process) -> dict[str, float]:
        """Held-out loss in nats per token, perplexity, and bits per byte where there is a tokenizer."""
        return measuring.evaluate(model, measuring.HeldOut.of(data, self.recipe), process)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> TextData:
        """The recipe's text in the tokens of the trained model, measured whole unless there is a limit."""
        scratch = Path(mkdtemp(prefix="polymix-text-"))  # tokens are read from there
        try:
            data = reading.load(self._in_tokens_of(self.folder), scratch / "text", self.say)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        weakref.finalize(data.train, shutil.rmtree, scratch, ignore_errors=True)
        parts = (data.train, data.val) if whole else (data.val,)
        return replace(data, measured=parts, limit=NO_LIMIT if limit is None else limit)

    def details(self, model: Any, data: TextData, process: Process) -> dict[str, Any]:
        """The mean loss in nats over all tokens that `for_evaluation` chose, perplexity, and bits per byte."""
        for tokens in data.measured or (data.val,):
            tokens.check(model.config.vocab_size)
        left, parts = data.limit or self.recipe.evaluate_tokens, []
        for tokens in data.measured or (data.val,):
            if left > 0 and len(tokens) > 1:
                recipe = self.recipe.changed(evaluate_tokens=min(left, len(tokens)))
                parts.append(measuring.HeldOut.of(replace(data, val=tokens), recipe))
                left -= parts[-1].targets
        count = sum(part.targets for part in parts)
        nats = sum(part.targets * measuring.evaluate(model, part, process)["val_loss"] for part in parts)
        loss = nats / max(count, 1)
        figures = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if all(part.bytes for part in parts):
            figures["bits_per_byte"] = nats / math.log(2) / sum(part.bytes or 0 for part in parts)
        return {"metrics": figures, "count": count, "unit": "tokens"}

    def samples(self, model: Any, data: TextData, process: Process) -> list[str]:
        """How the model continues each prompt, always with the same random numbers."""
        recipe, texts = self.recipe, list[str]()
        for prompt in recipe.prompts if data.tokenizer is not None else ():
            ids = torch.tensor([data.tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=process.device)
            new = min(recipe.sample_tokens, recipe.context - ids.shape[1])
            if new > 0 and ids.numel():
                torch.manual_seed(recipe.seed)
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=True, top_k=50,
                    temperature=0.8, pad_token_id=data.tokenizer.pad_token_id,
                    remove_invalid_values=True,  # of a model that has diverged; its loss says so
                )  # fmt: skip
                texts.append(data.tokenizer.decode(out[0], skip_special_tokens=True))
        return texts

    def describe(self, data: TextData) -> str:
        return (
            f"A context of {self.recipe.context:,} tokens, a vocabulary of {data.vocab:,}. "
            f"{len(data.train):,} training tokens from {self.recipe.data or 'the Python library'}; "
            f"{len(data.val):,} held out."
        )

    def settings(self, model: Any) -> dict[str, Any]:
        """The options of the model's config."""
        options: dict[str, Any] = model.config.to_diff_dict()
        return options

    def save(self, model: Any, data: TextData, folder: Path) -> None:
        """As transformers' Auto classes load it, with its tokenizer."""

        def write(part: Path) -> None:
            model.save_pretrained(part)
            if data.tokenizer is not None:
                data.tokenizer.save_pretrained(part)

        with local_files():
            write_files(folder, write)

    def restore(self, data: TextData, folder: Path) -> nn.Module:
        return load_model(folder, "folder")

    def check_weights(self, folder: Path) -> None:
        if _is_of_transformers(folder):
            check_header(folder / SAFE_WEIGHTS, "init")
        else:
            super().check_weights(folder)

    def read_weights(self, folder: Path) -> FoundWeights:
        """Also of a folder that transformers wrote, as `save` does."""
        if not _is_of_transformers(folder):
            return super().read_weights(folder)
        try:
            return FoundWeights(load_model(folder, "init").state_dict())
        except PolymixError:
            raise
        except Exception as error:  # whatever transformers raises on a damaged folder
            raise unreadable(folder, error) from error

    def usage(self, data: TextData, folder: Path) -> list[str]:
        return [
            "import polymix.models.language  # makes the classes known to transformers",
            "from transformers import pipeline", "",
            f"print(pipeline('text-generation', {str(folder)!r})('The ')[0]['generated_text'])",
        ]  # fmt: skip

    def next_commands(self, data: TextData, folder: Path) -> list[tuple[str, str]]:
        command = f"polymix generate {shlex.quote(folder.name)} --prompt 'Once upon a time' --stream"
        return [("Let the model write, in the folder above this one:", command)]
