"""What a model card says about using the model: its origin, its classes, and code that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.convert.adapters.libraries import library_of
from polymix.errors import install_extra
from polymix.extras import URL
from polymix.workflows.convert.images import Images, expected_statistics
from polymix.workflows.convert.inputs import Data
from polymix.workflows.convert.output import Saver
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source

_EXTRAS = {"timm": "vision", "transformers": "text", "diffusers": "diffusion"}
_MAX_LISTED = 20  # classes that the code writes out
_REPO, _ID = re.compile(r"[\w.-]+/[\w.-]+"), re.compile(r"[\w.-]+(/[\w.-]+)?")
_UNKNOWN = "unknown"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
_LANGUAGE = """import torch

import polymix.models.language  # or pass trust_remote_code=True
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")  # this folder, downloaded
"""
_GENERATE = """tokenizer = AutoTokenizer.from_pretrained("FOLDER")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0]))"""
_LOGITS = "print(model(torch.tensor([[1, 2, 3]])).logits.argmax(-1))"


class Usage(NamedTuple):
    """install: the line for a shell. code: loads the model from "FOLDER" and runs it. classes: their names."""

    install: str
    code: str
    classes: list[str]


def metadata(
    settings: Settings, source: Source, data: Data | None, title: str, value: float | None, saver: Saver
) -> dict[str, Any]:
    """Metadata for the head of the card: library, licence, origin, and the result on the data that was held back."""
    stated = _stated(source)
    fields: dict[str, Any] = {"license": settings.license or stated.get("license") or _UNKNOWN}
    base = settings.base_model or stated.get("base_model") or _origin(settings, source)
    if base is not None:
        fields["base_model"] = base
    if saver.language:
        fields |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    return {**fields, **({} if data is None else data.card(title, value))}


def usage(source: Source, host: nn.Module, data: Data | None, inputs: Any, saver: Saver, code: str | None) -> Usage:
    """How to install what the model needs, load it, prepare an input and run it. The folder is written already."""
    library = library_of(type(host)) or ""
    extra = "text" if saver.language else _EXTRAS.get(library, "")
    install = f"git clone {URL} && cd polymix && {install_extra(extra)}"
    install += " torchvision" if library == "torchvision" else ""
    if saver.language:
        has_tokenizer = any((saver.out / name).is_file() for name in _TOKENIZERS)
        return Usage(install, _LANGUAGE + (_GENERATE if has_tokenizer else _LOGITS), [])
    names = class_names(host, data)
    load = ["", f'model = polymix.load_pretrained("FOLDER"{", trust=True" if code else ""})  # this folder, downloaded']
    photo = _photo(source, data, inputs)
    if photo is None:
        lines = ["import torch", "", "import polymix", *load, *_random_call(inputs)]
        return Usage(install, "\n".join(lines), names)
    listed = 0 < len(names) <= _MAX_LISTED
    standard = [*(["import json"] if names and not listed else []), "from pathlib import Path", ""]
    if names:
        stored = 'json.loads(Path("FOLDER", "config.json").read_text())["metadata"]["classes"]'
        load.append(f"classes = {json.dumps(names, ensure_ascii=False) if listed else stored}")
    reader = f"from polymix.train.data.pictures import middle_square, {photo[0]}"
    lines = [*standard, "import torch", "", "import polymix", reader, *load, *photo[1:]]
    lines += ["with torch.no_grad():", "    output = model(images)", 'logits = getattr(output, "logits", output)']
    lines.append(f"print({'classes[logits.argmax(-1).item()]' if names else 'logits.argmax(-1).item()'})")
    return Usage(f"{install} pillow", "\n".join(lines), names)


def class_names(host: Any, data: Data | None) -> list[str]:
    """The names of the classes in the order of the model's outputs; empty where nobody states them."""
    if isinstance(data, Images):
        return list(data.to_dict()["classes"])
    stated = getattr(getattr(host, "config", None), "id2label", None) or {}
    names = [str(stated[i]) for i in range(len(stated)) if i in stated]
    return [] if not names or len(names) != len(stated) or names[0] == "LABEL_0" else names


def _photo(source: Source, data: Data | None, inputs: Any) -> list[str] | None:
    """Code that makes `images` from a file as the data was prepared; None where that is not known."""
    if isinstance(data, Images):
        size, channels, grey = data.data.image_size, data.channels, data.data.channels == 1
        mean, std = data.mean.flatten().tolist(), data.std.flatten().tolist()
        scale = "/ 255" if data.unit > 1 else "/ 255 * 16"  # scikit-learn's digits have 17 shades
    else:
        if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.shape[-1] != inputs.shape[-2]:
            return None
        size, channels, grey, scale = inputs.shape[-1], inputs.shape[1], False, "/ 255"
        known = expected_statistics(source, channels)
        if known is None or channels != 3:
            return None
        mean, std = ([float(value) for value in part] for part in known)
    read = 'read_grey(Path("photo.jpg"))[None]' if grey else 'read_picture(Path("photo.jpg"))'
    wide = f".expand(-1, {channels}, -1, -1)" if grey and channels > 1 else ""
    return [
        "read_grey" if grey else "read_picture",
        "",
        f"pixels = middle_square({read}, {size})[None]{wide}",
        f"mean, std = torch.tensor({_row(mean)}), torch.tensor({_row(std)})",
        f"images = (pixels {scale} - mean.reshape(1, -1, 1, 1)) / std.reshape(1, -1, 1, 1)",
    ]


def _row(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def _random_call(inputs: Any) -> list[str]:
    """Code that runs the model on a random input of the right form."""
    if isinstance(inputs, Mapping):
        arguments = [f"{name}={_random(value)}" for name, value in inputs.items() if isinstance(value, Tensor)]
    else:
        parts = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        arguments = [_random(part) for part in parts if isinstance(part, Tensor)]
    return ["with torch.no_grad():", f"    output = model({', '.join(arguments)})"] if arguments else []


def _random(value: Tensor) -> str:
    size = tuple(value.shape)
    if value.is_floating_point():
        return f"torch.randn{size}"
    if value.dtype == torch.bool:
        return f"torch.ones({size}, dtype=torch.bool)"
    return f"torch.randint({int(value.max()) + 1}, {size})"


def _stated(source: Source) -> dict[str, str]:
    """The licence and the base model that a folder's own model card or timm's config states."""
    stated: dict[str, str] = {}
    if source.folder is None:
        return stated
    trained = getattr(source.model, "pretrained_cfg", None) or {}
    if trained.get("license"):
        stated["license"] = str(trained["license"])
    card = source.folder / "README.md"
    if card.is_file():
        _, sign, rest = card.read_text("utf-8", errors="replace").partition("---\n")
        for line in rest.partition("\n---")[0].splitlines() if sign else ():
            key, _, value = line.partition(":")
            value = value.strip().strip("\"'")
            if key in ("license", "base_model") and _ID.fullmatch(value) and value != _UNKNOWN:
                stated[key] = value
    return stated


def _origin(settings: Settings, source: Source) -> str | None:
    """The repository of the original model, where its name or its config gives it away."""
    library, _, name = settings.model.partition("/")
    if source.folder is None:
        return settings.model if library == "timm" and "." in name and settings.weights is not None else None
    config = source.folder / "config.json"
    try:
        named = str(json.loads(config.read_text("utf-8")).get("_name_or_path") or "")
    except (OSError, ValueError, AttributeError):
        return None
    return named if _REPO.fullmatch(named) and not Path(named).exists() else None
