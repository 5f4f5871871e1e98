"""The two files of a saved model: the weights, with the config in their header, and a copy of the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix._io import one_line, write_whole
from polymix.errors import MissingExtraError, OptionError, ResultsError

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", 1
TIMM_ENTRY = "polymix_converted"  # the name in timm that loads the folder; see polymix.convert.timm_models
SAVED = "a file that polymix.save_pretrained wrote"


def load_safetensors() -> Any:
    """The safetensors package. Raises MissingExtraError where it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError("safetensors", "no such package", "pip install safetensors") from error
    return safetensors


def without_ties(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, each once; and for each further name of a tied tensor, the name it is written under."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[Any, str] = {}
    stored: set[int] = set()
    for name, value in state.items():
        dense = isinstance(value, Tensor) and type(value.data) is Tensor and value.layout == torch.strided
        if not dense or value.is_meta:
            got = f"{name}, a {type(value).__name__}{' on meta' if dense else ''}"
            raise OptionError("model", got, "dense tensors that are in memory", "Gather or materialise them first.")
        if names.setdefault(id(value), name) != name:
            tied[name] = names[id(value)]
            continue
        value = value.detach().contiguous()
        place = value.untyped_storage().data_ptr()
        kept[name] = value.clone() if place in stored else value  # another view of the same memory
        stored.add(place)
    return kept, tied


def write(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the weights, with the config in their header, and the config again as a file of its own."""
    if find_spec("numpy") is None:
        raise MissingExtraError("numpy", "no such package", "pip install numpy")  # safetensors saves with it
    save_file, header = load_safetensors().torch.save_file, json.dumps(content, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "polymix": header}
    write_whole(folder / WEIGHTS, lambda file: save_file(tensors, file, metadata=metadata))
    write_whole(folder / CONFIG, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of a folder. Raises an error where they are missing, damaged or not polymix's."""
    safetensors = load_safetensors()
    if not folder.is_dir():
        got = f"{folder}, which is {'a file' if folder.exists() else 'not there'}"
        raise OptionError("folder", got, "a folder that polymix.save_pretrained wrote", "Check the path.")
    file = folder / WEIGHTS
    if not file.is_file():
        cure = "Fetch the whole folder; config.json alone has no weights."
        raise ResultsError(str(folder), f"a folder without {WEIGHTS}", "one that polymix.save_pretrained wrote", cure)
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            header = (opened.metadata() or {}).get("polymix")
            content = None if header is None else json.loads(header)
            tensors = {} if content is None else {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise damaged(file, f"a file that is cut off or no safetensors file ({one_line(error)[:200]})") from error
    if not isinstance(content, dict):
        cure = "Load it with the library that wrote it, then call polymix.convert on the model."
        raise ResultsError(str(file), "weights without polymix's config", SAVED, cure)
    if not isinstance(content.get("format"), int) or content["format"] > FORMAT:
        cure = "pip install -U polymix."
        raise ResultsError(str(file), f"format {content.get('format')!r}", f"format {FORMAT} or older", cure)
    return content, tensors


def damaged(file: Path, got: str) -> ResultsError:
    """The error for a file that cannot be used."""
    return ResultsError(str(file), got, SAVED, "Fetch or save it again.")
