"""Saving the model that `polymix convert` made, with the tokenizer and image processor it came with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from polymix.convert import save_pretrained
from polymix.convert.adapters.libraries import quiet
from polymix.convert.saving.files import CONFIG
from polymix.errors import OptionError
from polymix.files import write_files, write_whole
from polymix.workflows.convert.generators import keep_drawing
from polymix.workflows.convert.inputs import has_language_model
from polymix.workflows.convert.settings import Settings

_COMPANIONS = (
    "preprocessor_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "spiece.*",
)  # fmt: skip
_TOKENIZERS = {"gpt2": "GPT2Tokenizer", "llama": "LlamaTokenizer"}  # by model type, for folders that do not state it


class Saver(NamedTuple):
    """Saves a converted model to `out`: as a model of `polymix.models.language`, or with `polymix.save_pretrained`."""

    out: Path
    settings: Settings
    language: bool

    @classmethod
    def of(cls, host: nn.Module, settings: Settings, out: Path) -> Saver:
        """GPT-2 and Llama become models of `polymix.models.language`, unless --keep-host is set."""
        if settings.keep_host and not has_language_model(host):
            got = f"it for {type(host).__name__}"
            allowed = "this option for GPT2LMHeadModel and LlamaForCausalLM; other models always keep their class"
            raise OptionError("--keep-host", got, allowed, "Leave it out.")
        return cls(out, settings, has_language_model(host) and not settings.keep_host)

    def save(self, model: nn.Module, metadata: Mapping[str, Any]) -> str | None:
        """Save the model; return the user code that builds it, if there is such code."""
        if self.language:
            from polymix.workflows.convert.language import repackage

            whole = repackage(model)
            with quiet():  # an interrupted run leaves the old files whole
                write_files(self.out, whole.save_pretrained)
            return None
        try:
            save_pretrained(model, self.out, metadata=metadata)
        except OptionError:
            if ".py:" not in self.settings.model:
                raise
            save_pretrained(model, self.out, host=self.settings.model, metadata=metadata)
        code: str | None = json.loads((self.out / CONFIG).read_text("utf-8"))["host"].get("call")
        return code

    def accompany(self, folder: Path | None, model: Any) -> None:
        """Copy the image processor, the tokenizer and how a generator draws from the model's folder."""
        keep_drawing(folder, self.out)
        companions = () if folder is None else (file for pattern in _COMPANIONS for file in folder.glob(pattern))
        copied = [file.name for file in companions if file.is_file()]
        for name in copied:
            write_whole(self.out / name, partial(shutil.copyfile, Path(folder or "", name)))
        if self.settings.context is not None and any(name.startswith(("tokenizer", "vocab")) for name in copied):
            self._tokenizer_config(model_max_length=self.settings.context)
        if self.language and {"tokenizer.json", "tokenizer.model", "vocab.json"}.intersection(copied):
            self._tokenizer_config({"tokenizer_class": _TOKENIZERS[str(model.config.model_type)]})

    def _tokenizer_config(self, usual: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Set values in the tokenizer's config, and the usual ones where it has none."""
        config = self.out / "tokenizer_config.json"
        content = json.loads(config.read_text("utf-8")) if config.exists() else {}
        new = {**content, **{key: value for key, value in (usual or {}).items() if key not in content}, **settings}
        if new != content:
            write_whole(config, json.dumps(new, indent=2) + "\n")

    def loading(self, code: str | None) -> str:
        """A sentence that says how to load the model."""
        if self.language:
            return (
                f'Load it with AutoModelForCausalLM.from_pretrained("{self.out}") of transformers, after importing '
                "polymix.models.language or with trust_remote_code=True."
            )
        return f'Load it with polymix.load_pretrained("{self.out}"{", trust=True" if code else ""}).'
