"""Converted models on disk: one file of weights that says itself how the model is built, and a copy of that to read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert import model_recipes as hosts
from polymix.convert.differences import difference, differences, restore, shape
from polymix.convert.files import FORMAT, WEIGHTS, damaged, load_safetensors, once, read, write
from polymix.convert.plain import decode, encode
from polymix.convert.rebuild import layers, rebuild
from polymix.errors import OptionError, PolymixError, ResultsError


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, host: Any = None, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write a model, converted or not, so that `load_pretrained(folder)` alone brings it back, bit for bit.

    `model.safetensors` has the weights and, in its header, all that builds the model; it is written beside and renamed,
    so that a full disk or a kill leaves the file of before whole. `config.json` is a copy of the header, to read.

    Args:
        model: its host is of timm, transformers, torchvision, diffusers or polymix, or `host` says how it is built.
        folder: made if it is not there.
        host: how the host, before its conversion, is built, where the model does not tell:
            {"library": "timm", "name": "vit_tiny_patch16_224", "kwargs": {"depth": 6}};
            {"library": "torchvision", "class": "torchvision.models.VisionTransformer", "kwargs": {…}};
            {"call": "package.module:function", "kwargs": {…}}, or "file.py:function", for anything else.
        metadata: what else should be kept with it, as JSON can hold it: accuracies, data, `report.to_dict()`.
    Raises:
        OptionError: the host built by its recipe is not the model's; nothing is written.
    """
    load_safetensors()
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # under torch.compile
    if folder.exists() and not folder.is_dir():
        raise OptionError("folder", f"{folder}, which is a file", "a folder, there or not", "Choose another name.")
    content, buffers = _describe(model, folder, host)
    try:
        content["metadata"] = encode(json.loads(json.dumps(dict(metadata or {}))))
    except (TypeError, ValueError) as error:
        raise OptionError("metadata", f"what JSON cannot hold ({error})", "numbers, words, lists, dicts", "") from error
    tensors, content["tied"] = once({**model.state_dict(keep_vars=True), **buffers})
    write(folder, content, tensors)


def load_pretrained(
    folder: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    trust: bool = False,
) -> nn.Module:  # fmt: skip
    """The model that `save_pretrained` wrote to a folder, in evaluation.

    Args:
        device, dtype: where to put it, and as what; None: the CPU, and each weight in the type it was saved in.
        trust: whether code may run that is neither polymix's nor a known library's: a host saved with {"call": …}.
    Raises:
        OptionError: there is no such folder, or `trust` is needed.
        ResultsError: the folder's files are damaged, foreign, newer than this polymix, or do not fit the host that the
            libraries installed here build.
    """
    folder = Path(folder)
    content, tensors = read(folder)
    try:
        model = rebuild(content, folder, trust)
        _fill(model, content, tensors, folder)
    except OptionError as error:
        if error.cure:
            raise
        raise OptionError(error.argument, error.got, error.allowed, _saved_with(content)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"a config that builds nothing ({type(error).__name__}: {error})") from error
    placed = model if device is None and dtype is None else model.to(device=device, dtype=dtype)
    return placed.eval()


def _describe(model: nn.Module, folder: Path, host: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config by the first recipe that builds this model, and the buffers that it does not build."""
    recipes = [hosts.normal(host, folder)] if host is not None else hosts.candidates(model, folder)
    first: PolymixError | None = None
    for recipe in recipes:
        content = {"format": FORMAT, "library_name": "polymix", "host": recipe, "layers": layers(model)}
        try:
            attributes, buffers = differences(model, rebuild(content, folder, True))
        except PolymixError as error:
            first = first or error
            continue
        content["attributes"] = encode(attributes)
        content["buffers"], content["versions"] = list(buffers), _versions(recipe)
        return content, buffers
    got = f"None for a {type(model).__name__} of {type(model).__module__}, which does not tell how it is built"
    raise first or OptionError("host", got, hosts.FORMS, "Say how the host, before its conversion, is built.")


def _versions(recipe: Mapping[str, Any]) -> dict[str, str]:
    names = ("polymix", "torch", recipe.get("library", "torch"))
    return {name: str(sys.modules[name].__version__) for name in names}


def _saved_with(content: Mapping[str, Any]) -> str:
    return f"It was saved with {', '.join(f'{name} {version}' for name, version in content['versions'].items())}."


def _fill(model: nn.Module, content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """Weights in, strictly: all that the model has, none that it has not, in their own types, tied as they were."""
    restore(model, decode(content["attributes"]), {name: tensors.pop(name) for name in content["buffers"]})
    own = model.state_dict(keep_vars=True)
    found = difference(
        {key: shape(tensors[content["tied"].get(key, key)]) for key in (*tensors, *content["tied"])},
        {key: shape(value) for key, value in own.items()},
    )
    if found:
        raise ResultsError(
            str(folder / WEIGHTS), f"a host whose {found}", "the host that was saved", _saved_with(content)
        )
    weights: dict[str, Tensor] = {
        key: nn.Parameter(value, own[key].requires_grad) if isinstance(own[key], nn.Parameter) else value
        for key, value in tensors.items()
    }
    own.update({key: weights[content["tied"].get(key, key)] for key in own})
    model.load_state_dict(own, assign=True)
