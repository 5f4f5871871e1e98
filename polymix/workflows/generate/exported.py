"""A language model that `polymix export` wrote, run by ONNX Runtime behind the methods of a model of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymix.errors import CapabilityError, DataError, PolymixError
from polymix.export.language import FOLDER as TOKENIZER
from polymix.export.language import LANGUAGE, about_language
from polymix.export.manifest import MANIFEST, onnx_session, read_manifest, run_session
from polymix.mixers.cache import state_layer

from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel  # isort: skip
from transformers.modeling_outputs import CausalLMOutputWithPast  # isort: skip

CURE = "Export the model's folder with polymix export --model FOLDER --target onnx."


class ExportedConfig(PretrainedConfig):
    """What transformers asks of a config: one layer, which holds the state of the whole model."""

    model_type = "polymix-exported"

    def __init__(self, **options: Any) -> None:
        self.num_hidden_layers = 1
        super().__init__(**options)


class ExportedLanguageModel(PreTrainedModel, GenerationMixin):
    """prefill.onnx and step.onnx of a folder as a causal model, for its `generate`. It has no weights in PyTorch.

    vocabulary: number of tokens that it knows. positions: the most tokens of a text; None: any number.

    Raises DataError: the folder lacks one of the two files, or they cannot be loaded.
    """

    config_class: Any = ExportedConfig
    main_input_name = "input_ids"
    _supports_cache_class = True
    _is_stateful = True  # no assisted generation: a state cannot drop tokens

    def __init__(self, folder: Path) -> None:
        info = about_language(folder)
        super().__init__(ExportedConfig())
        self.vocabulary, self.positions = info.vocabulary, info.positions
        self.generation_config.update(eos_token_id=info.ends or None, bos_token_id=None, pad_token_id=None)
        sessions = []
        for name in ("prefill", "step"):
            path = folder / "onnx" / f"{name}.onnx"
            try:
                sessions.append(onnx_session(path))
            except PolymixError:
                raise
            except Exception as error:  # ONNX Runtime has its own
                got = f"{path}, which ONNX Runtime cannot load"
                raise DataError("folder", got, "prefill.onnx and step.onnx of a language model", CURE) from error
        self.prefill, self.step = sessions

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **other: Any
    ) -> CausalLMOutputWithPast:
        """The logits (B, 1, V) of the token after input_ids (B, N), and the state after them.

        Raises CapabilityError: prompts of different lengths in one call.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise CapabilityError("attention_mask", "padding", "prompts of one length", "Pass them one by one.")
        cache = DynamicCache() if past_key_values is None else past_key_values
        layer = state_layer(cache, 0)
        if layer.state is None:
            result = _call(self.prefill, {"input_ids": input_ids})
            logits, layer.state = result.pop("logits"), result
            layer.seen = input_ids.shape[1]
        else:
            for token in input_ids.split(1, dim=1):
                result = _call(self.step, {"input_ids": token, "position": torch.tensor([layer.seen]), **layer.state})
                logits = result.pop("logits")
                layer.state = {name.removeprefix("next_"): value for name, value in result.items()}
                layer.seen += 1
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)


def _call(session: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a session by name. Inputs that its graph does not read are left out."""
    outputs = run_session(session, {name: np.ascontiguousarray(value.numpy()) for name, value in values.items()})
    return {name: torch.from_numpy(value) for name, value in outputs.items()}


def is_export(folder: Path) -> bool:
    """Whether `polymix export` wrote a folder."""
    return (folder / MANIFEST).is_file()


def load_exported(folder: Path) -> ExportedLanguageModel:
    """The language model of an exported folder.

    Raises DataError: the folder holds another model, or no float ONNX files. MissingExtraError: there is no ONNX
    Runtime.
    """
    content = read_manifest(folder)
    paths = {entry["path"] for entry in content["files"]}
    if LANGUAGE not in content or not {"onnx/prefill.onnx", "onnx/step.onnx"} <= paths:
        files = ", ".join(sorted(paths)) or "no files"
        raise DataError("folder", f"{folder} with {files}", "onnx/prefill.onnx and onnx/step.onnx", CURE)
    return ExportedLanguageModel(folder).eval()


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """A tokenizer's files by their paths in an export."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return {f"{TOKENIZER}/{path.name}": path.read_bytes() for path in sorted(Path(scratch).iterdir())}
