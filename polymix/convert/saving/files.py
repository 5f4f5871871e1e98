"""The two files of a saved model: the weights, with the config in their header, and a copy of the config."""

from __future__ import annotations

import argparse
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from polymix.convert.weight_files import load_safetensors
from polymix.errors import OptionError, ResultsError, one_line
from polymix.extras import check_installed
from polymix.files import regular, write_whole

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", 1
TIMM_ENTRY = "polymix_converted"  # the name in timm that loads the folder; see polymix.convert.timm_models
TRANSFORMERS_ENTRY = "polymix_converted"  # the model type in transformers; see polymix.convert.transformers_models
SAVED = "a file that polymix.save_pretrained wrote"


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """What torch.save wrote into a file, of tensors and plain values alone: no code in the file is run.

    mmap: leave the numbers on disk until they are used.
    Raises OSError, which says what is wrong with the file, without PyTorch's advice on files that are trusted.
    """
    try:
        regular(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # options, which timm and DeiT store; data
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except UnpicklingError as error:
        reason = "it holds more than tensors and plain values, or torch.save did not write it"
        raise OSError(errno.EINVAL, reason, str(path)) from error
    except Exception as error:  # whatever PyTorch raises for a damaged file
        raise OSError(errno.EINVAL, "it is damaged, or torch.save did not write it", str(path)) from error


def without_ties(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, each once; and for each further name of a tied tensor, the name it is written under."""
    tensors: dict[str, Tensor] = {}
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
        tensors[name] = value.clone() if place in stored else value  # another view of the same memory
        stored.add(place)
    return tensors, tied


def write(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the weights, with the config in their header, and the config again as a file of its own."""
    check_installed("numpy", why="safetensors saves with it.")
    save_file, header = load_safetensors().torch.save_file, json.dumps(content, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "polymix": header}

    def save(file: Path) -> None:
        save_file(tensors, file, metadata=metadata)
        _in_order(file)

    write_whole(folder / WEIGHTS, save)
    write_whole(folder / CONFIG, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _in_order(file: Path) -> None:
    """Sort the metadata in a safetensors header, whose order is random otherwise: equal models are equal files."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(content) == size:  # always, as the library writes JSON the same way
            opened.seek(8)
            opened.write(content)


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
        cure = "Install a newer polymix: git pull in its clone, then install it as before."
        raise ResultsError(str(file), f"format {content.get('format')!r}", f"format {FORMAT} or older", cure)
    return content, tensors


def damaged(file: Path, got: str) -> ResultsError:
    """The error for a file that cannot be used."""
    return ResultsError(str(file), got, SAVED, "Fetch or save it again.")
