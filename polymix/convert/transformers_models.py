"""Saved models by transformers' Auto classes: importing this module makes converted models known to them.

import transformers, polymix.convert.transformers_models

model = transformers.AutoModelForCausalLM.from_pretrained("folder")  # or "you/llama-qt"
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from polymix.convert.adapters.libraries import load_library
from polymix.convert.saving import load_pretrained
from polymix.convert.saving.files import CONFIG, TRANSFORMERS_ENTRY, WEIGHTS
from polymix.errors import OptionError

__all__ = ["ConvertedConfig", "ConvertedModel"]

_TRANSFORMERS: Any = load_library("transformers")
_AUTO: Any = load_library("transformers.models.auto.modeling_auto")
_OF_A_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
# What the Auto classes and pipelines pass by themselves, and what changes nothing in a loaded model.
_WITHOUT_EFFECT = {
    "_from_auto", "_from_pipeline", "_commit_hash", "adapter_kwargs", "low_cpu_mem_usage", "trust_remote_code",
    "use_safetensors",
}  # fmt: skip
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # values of `device_map` for several devices


class ConvertedConfig(_TRANSFORMERS.PretrainedConfig):
    """The config.json that `polymix.save_pretrained` wrote. A loaded model has its host's own config."""

    model_type = TRANSFORMERS_ENTRY

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """The config, and with `return_unused_kwargs` the options too: none of them changes it but its name."""
        returns_both = options.pop("return_unused_kwargs", False)
        config = cls()
        config.name_or_path = options.pop("name_or_path", "")
        return (config, options) if returns_both else config


class ConvertedModel:
    """What an Auto class calls for a saved conversion; each has a subclass with its name as `auto`."""

    auto: ClassVar[str] = ""

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *args: Any, config: Any = None, dtype: Any = None, torch_dtype: Any = None,
        device_map: Any = None, subfolder: str = "", **options: Any,
    ) -> nn.Module:  # fmt: skip
        """The model in evaluation mode, built with its mixers and its saved weights.

        AutoModel takes the model without its head, as it does of transformers' own checkpoints.

        Args:
            folder: where `polymix.save_pretrained` saved it, or a repository of the Hub with that folder's files.
            config: as the Auto class passes it.
            dtype, torch_dtype: type of the weights; None or "auto": as they were saved.
            device_map: one device for the whole model, such as "cuda:0" or {"": 0}; None: the CPU.
            options: those of a download, such as `revision` and `token`.
        Raises:
            OptionError: other options, or a model that the Auto class does not load. ResultsError: as
                `polymix.load_pretrained`.
        """
        for name, value in options.items():
            if name not in {*_OF_A_DOWNLOAD, *_WITHOUT_EFFECT} and value is not None:
                cure = "Load it, then change the model or its config."
                raise OptionError(name, value, "no such option: the model is built as it was saved", cure)
        kind = dtype if dtype is not None else torch_dtype
        device = _device(device_map)
        place = Path(folder)
        if not place.is_dir():
            how = {name: options[name] for name in _OF_A_DOWNLOAD if name in options}
            files = [f"{subfolder}/{name}" if subfolder else name for name in (WEIGHTS, CONFIG)]
            place = Path(load_library("huggingface_hub").snapshot_download(str(folder), allow_patterns=files, **how))
        model = load_pretrained(place / subfolder, device=device, dtype=None if kind == "auto" else kind)
        for part in (model, getattr(model, "base_model", model)):
            if cls.auto in loaders(part):
                return part
        others = " or ".join(loaders(model)) or "polymix.load_pretrained"
        got = f"{folder}, a {type(model).__name__}"
        raise OptionError("folder", got, f"a model of {cls.auto}", f"Load it with {others}.")

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> nn.Module:
        """Called by the Auto class's `from_config`. Raises OptionError: the config alone has no mixers."""
        raise OptionError("config", "that of a saved conversion", "its folder", f"Call {cls.auto}.from_pretrained.")


def _device(device_map: Any) -> Any:
    """The one device of a `device_map`."""
    named = device_map[""] if isinstance(device_map, dict) and list(device_map) == [""] else device_map
    if isinstance(named, int) and not isinstance(named, bool):
        return f"cuda:{named}"
    if named is None or isinstance(named, torch.device) or (isinstance(named, str) and named not in _SPREAD):
        return named
    cure = 'Pass "cuda:0", or move the model after loading.'
    raise OptionError("device_map", repr(device_map), "one device", cure)


def auto_classes() -> Iterator[Any]:
    """The Auto classes of this transformers for models."""
    for name in dir(_AUTO):
        kind = getattr(_AUTO, name)
        if (
            name.startswith("AutoModel")
            and isinstance(kind, type)
            and getattr(kind, "_model_mapping", None) is not None
        ):
            yield kind


def loaders(model: Any) -> list[str]:
    """The names of the Auto classes that load models of this class."""
    names = []
    for auto in auto_classes():
        mapping, config = auto._model_mapping, type(model.config)
        kinds = mapping.get(config, ())
        if type(model) in (kinds if isinstance(kinds, (tuple, list)) else (kinds,)):
            names.append(auto.__name__)
    return names


_TRANSFORMERS.AutoConfig.register(TRANSFORMERS_ENTRY, ConvertedConfig, exist_ok=True)
for _auto in auto_classes():
    _loader = type(f"Converted{_auto.__name__}", (ConvertedModel,), {"auto": _auto.__name__})
    _auto.register(ConvertedConfig, _loader, exist_ok=True)
