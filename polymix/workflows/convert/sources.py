"""Models as people name them: timm/NAME, a folder, file.py:function. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from polymix._io import call_function
from polymix.convert import load_pretrained
from polymix.convert.adapters.libraries import load_library, no_bars
from polymix.errors import OptionError, PolymixError
from polymix.workflows.convert.named import SIZES, named
from polymix.workflows.convert.weights import fill, read_state

ALLOWED = "timm/NAME, torchvision/NAME, a folder that polymix, transformers or timm saved, or file.py:function"


class Source(NamedTuple):
    """A model; what it may be called with, None: not known; whether its weights are trained ones, as far as is known;
    the folder that it was in; weights of that folder which have no place in it."""

    model: nn.Module
    input: Any = None
    trained: bool = True
    folder: Path | None = None
    unused: tuple[str, ...] = ()


def load_model(
    name: str, weights: str | None = None, *, classes: int | None = None, size: int | None = None, trust: bool = False
) -> Source:
    """The model that `name` names, with the state dict in the file `weights`.

    classes, size: of head and images of a model by name. trust: whether code may run that a folder of polymix names.
    """
    state = {} if weights is None else read_state(Path(weights))
    library, _, rest = name.partition("/")
    try:
        if ".py:" in name:
            source = _function(name)
        elif Path(name).is_dir():
            source = _folder(Path(name), trust)._replace(folder=Path(name))
        elif library in SIZES and rest:
            source = Source(named(library, rest, state, classes=classes, size=size), trained=False)
        else:
            cure = "A file of weights is for --weights." if Path(name).is_file() else "Try timm/deit_tiny_patch16_224."
            raise OptionError("--model", repr(name), ALLOWED, cure)
    except PolymixError as error:
        if error.argument == "trust":
            raise OptionError("--trust", error.got, error.allowed, "Read that code; then --trust runs it.") from error
        if error.argument not in ("NAME", "folder"):
            raise
        raise type(error)("--model", error.got, error.allowed, error.cure) from error
    if weights is None:
        return source
    fill(source.model, state, weights)
    return source._replace(trained=True)


def _function(name: str) -> Source:
    built = call_function(name, {})
    parts = built if isinstance(built, tuple) else (built, None)
    if len(parts) != 2 or not isinstance(parts[0], nn.Module):
        got = f"{name}, which returns {type(built).__name__}"
        raise OptionError("--model", got, "a function that returns a model, or (model, input)", "")
    return Source(*parts)  # whoever built it knows whether it is trained


def _folder(folder: Path, trust: bool) -> Source:
    """What polymix, timm or transformers saved there."""
    config = folder / "config.json"
    try:
        content = json.loads(config.read_text("utf-8"))
        architecture, kinds = content.get("architecture"), content.get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise OptionError("--model", f"{folder}, whose config.json cannot be read ({error})", ALLOWED, "") from error
    if content.get("library_name") == "polymix":
        return Source(load_pretrained(folder, trust=trust))
    kept = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    try:
        if architecture is not None:
            options = {"pretrained": kept, "num_classes": content.get("num_classes")}
            return Source(load_library("timm").create_model(f"local-dir:{folder.resolve()}", **options), trained=kept)
        if kinds:
            return _transformers(folder, kinds[0], kept)
    except PolymixError:
        raise
    except Exception as error:  # whatever a library makes of a damaged folder
        got = f"{folder}, which fails with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OptionError("--model", got, ALLOWED, "Fetch or save it again.") from error
    raise OptionError("--model", f"{folder}, whose config.json names no architecture", ALLOWED, "")


def _transformers(folder: Path, architecture: str, kept: bool) -> Source:
    transformers = load_library("transformers")
    kind: Any = getattr(transformers, architecture, None)
    if kind is None:
        got = f"{folder}, of the architecture {architecture}"
        raise OptionError("--model", got, "one that transformers has", "Code of a folder's own is not run.")
    with quiet():
        if not kept:
            return Source(kind(kind.config_class.from_pretrained(folder)), trained=False)
        model, found = kind.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    lost = sorted(found["missing_keys"]) + [f"{key} of another shape" for key, *_ in found["mismatched_keys"]]
    if lost:
        got = f"{folder}, whose weights lack {len(lost)} of {architecture}'s, such as {lost[0]}"
        raise OptionError("--model", got, "all of them", "Save the model again with save_pretrained.")
    return Source(model, unused=tuple(sorted(found["unexpected_keys"])))


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its bars and tables of keys, for which there is an error of ours."""
    logging: Any = load_library("transformers").utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(level)
