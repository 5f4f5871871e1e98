"""The file of a model: written whole or not at all, read only where it is ours and whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import MissingExtraError, OptionError, ResultsError

WEIGHTS, CONFIG, FORMAT = "model.safetensors", "config.json", 1
OURS = "what polymix.save_pretrained wrote"


def load_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError("safetensors", "no such package", "pip install 'polymix[text]'") from error
    return safetensors


def once(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is written, each tensor once; and the other names of those that have several."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[Any, str] = {}
    stored: set[int] = set()
    for name, value in state.items():
        whole = isinstance(value, Tensor) and type(value.data) is Tensor and value.layout == torch.strided
        if not whole or value.is_meta:
            got = f"{name}, a {type(value).__name__}{' on meta' if whole else ''}"
            raise OptionError(
                "model", got, "weights that are whole, dense tensors", "Gather or materialise them first."
            )
        if names.setdefault(id(value), name) != name:
            tied[name] = names[id(value)]
            continue
        value = value.detach().contiguous()
        place = value.untyped_storage().data_ptr()
        kept[name] = value.clone() if place in stored else value  # one that shares memory, but is not the same
        stored.add(place)
    return kept, tied


def write(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Weights and config in one file, which is a model by itself; and the config again, to read."""
    save_file, said = load_safetensors().torch.save_file, json.dumps(content, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS, lambda file: save_file(tensors, file, metadata={"format": "pt", "polymix": said}))
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    _replace(folder / CONFIG, lambda file: file.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside `path`, under a hidden name, and rename once all is on the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        write(Path(name))
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of a folder, once they are known to be ours and whole."""
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
            said = (opened.metadata() or {}).get("polymix")
            content = None if said is None else json.loads(said)
            tensors = {} if content is None else {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise damaged(file, f"a file that is cut off or no safetensors file ({error})") from error
    if not isinstance(content, dict):
        cure = "Load it with the library that wrote it, then polymix.convert the model."
        raise ResultsError(str(file), "weights without polymix's config", OURS, cure)
    if not isinstance(content.get("format"), int) or content["format"] > FORMAT:
        cure = "pip install -U polymix."
        raise ResultsError(str(file), f"format {content.get('format')!r}", f"format {FORMAT} or older", cure)
    return content, tensors


def damaged(file: Path, got: str) -> ResultsError:
    return ResultsError(str(file), got, OURS, "Fetch or save it again.")
