"""The model that `polymix convert` leaves in its folder, and what else belongs there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from polymix.convert import save_pretrained
from polymix.convert.saving.files import CONFIG
from polymix.errors import OptionError
from polymix.workflows.convert.inputs import has_twin
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import quiet
from polymix.workflows.results import write_atomically

_COMPANIONS = (
    "preprocessor_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "spiece.*",
)  # fmt: skip
_TOKENIZERS = {"gpt2": "GPT2Tokenizer", "llama": "LlamaTokenizer"}  # which its folder may leave to the model's kind


class Saver(NamedTuple):
    """Writes a converted model to `out`: as one of `polymix.models.language`, or as polymix keeps any host."""

    out: Path
    settings: Settings
    language: bool

    @classmethod
    def of(cls, host: nn.Module, settings: Settings, out: Path) -> Saver:
        """GPT-2 and Llama become models of ours, unless their host is to be kept."""
        if settings.keep_host and not has_twin(host):
            got = f"it for {type(host).__name__}, which is kept in any case"
            raise OptionError("--keep-host", got, "GPT2LMHeadModel and LlamaForCausalLM", "Leave it out.")
        return cls(out, settings, has_twin(host) and not settings.keep_host)

    def save(self, model: nn.Module, metadata: Mapping[str, Any]) -> str | None:
        """Returns the code of the user's that builds the model, where no library does."""
        if self.language:
            from polymix.workflows.convert.language import repackage

            whole = repackage(model)
            self.out.mkdir(parents=True, exist_ok=True)
            with quiet(), TemporaryDirectory(dir=self.out, prefix=".model.") as part:  # a kill leaves the old one whole
                whole.save_pretrained(part)
                for file in Path(part).iterdir():
                    file.chmod(0o644)
                    os.replace(file, self.out / file.name)
            return None
        try:
            save_pretrained(model, self.out, metadata=metadata)
        except OptionError:
            if ".py:" not in self.settings.model:
                raise
            save_pretrained(model, self.out, host=self.settings.model, metadata=metadata)
        code: str | None = json.loads((self.out / CONFIG).read_text("utf-8"))["host"].get("call")
        return code

    def accompany(self, folder: Path | None, model: nn.Module) -> None:
        """Copies of what stood beside the weights: the processor of images, the tokenizer."""
        files = () if folder is None else (file for pattern in _COMPANIONS for file in folder.glob(pattern))
        copied = [Path(shutil.copy2(file, self.out)).name for file in files if file.is_file()]
        if self.language and {"tokenizer.json", "tokenizer.model", "vocab.json"}.intersection(copied):
            config = self.out / "tokenizer_config.json"
            said = json.loads(config.read_text("utf-8")) if config.exists() else {}
            if "tokenizer_class" not in said:
                kind = _TOKENIZERS[str(getattr(model.config, "model_type"))]  # noqa: B009
                write_atomically(config, json.dumps({**said, "tokenizer_class": kind}, indent=2) + "\n")

    def loading(self, code: str | None) -> str:
        """How the model is loaded, in a sentence."""
        if self.language:
            return (
                f'AutoModelForCausalLM.from_pretrained("{self.out}") of transformers loads it, once '
                "polymix.models.language is imported or with trust_remote_code=True."
            )
        return f'polymix.load_pretrained("{self.out}"{", trust=True" if code else ""}) loads it.'
