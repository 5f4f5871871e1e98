"""Generators, models that turn noise into images, in folders of polymix and of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from polymix.convert.adapters.libraries import holds_weights, library_of, load_library, load_whole, local_files
from polymix.errors import OptionError, PolymixError, one_line
from polymix.files import read_json, write_whole
from polymix.limits import bounded, check_model
from polymix.models.generator import GENERATOR, ImageGenerator

if TYPE_CHECKING:
    from polymix.train.generators import GeneratorTask

DOMAIN = "generation"  # which knows the generators of polymix


class Generator(NamedTuple):
    """A loaded generator, whether its weights are trained, and what it was trained on; None: nobody states it."""

    model: nn.Module
    trained: bool
    process: Any = None  # a Flow or a Diffusion


def generator_task() -> GeneratorTask[Any, Any]:
    """The task of the domain that knows generators."""
    from polymix.train.registry import task_of

    task: GeneratorTask[Any, Any] = task_of(DOMAIN)
    return task


def generates(model: Any) -> bool:
    """Whether a model predicts noise or velocities of images or latents."""
    return isinstance(model, ImageGenerator) or (
        library_of(type(model)) == "diffusers" and {"in_channels", "sample_size"} <= set(getattr(model, "config", {}))
    )


def load_generator(folder: Path, trust: bool, allowed: str) -> Generator | None:
    """The generator in a folder of `polymix train generation`, ImagesPipeline or diffusers; None for other folders.

    allowed: what a message says is expected.
    """
    if (folder / GENERATOR).is_file():
        model, process = generator_task().opened(folder, trust)
        return Generator(model, True, process)
    if not (folder / "config.json").is_file():
        if not (folder / "model_index.json").is_file():
            return None
        cure = f"Try {folder / 'transformer'}."
        raise OptionError("--model", f"{folder}, a pipeline of diffusers", "the folder of its transformer", cure)
    content = read_json(folder / "config.json", OptionError, "--model", allowed, "Fetch or save it again.")
    name = content.get("_class_name") if isinstance(content, dict) else None
    if not isinstance(name, str):
        return None
    library = load_library("diffusers")
    known = getattr(library, name, None)
    if not isinstance(known, type) or not issubclass(known, library.ModelMixin):
        raise OptionError("--model", f"{folder}, a {name}", "a model of diffusers", "Code in the folder is not run.")
    kind: Any = known
    has_weights = holds_weights(folder)
    try:
        with local_files(), bounded("--model", str(folder)):
            config = kind.load_config(folder, local_files_only=True)
            check_model(lambda: kind.from_config(config), "--model", str(folder))
            if not has_weights:
                return Generator(kind.from_config(config), False)
            return Generator(load_whole(kind, folder, "--model")[0], True)
    except PolymixError:
        raise
    except Exception as error:  # whatever the library raises for a damaged folder
        got = f"{folder}, which fails with {one_line(error)[:300]}"
        raise OptionError("--model", got, allowed, "Fetch or save it again.") from error


def keep_drawing(folder: Path | None, out: Path) -> None:
    """Copy how a generator of polymix draws, so that `polymix generate` works for the converted folder."""
    if folder is not None and (folder / GENERATOR).is_file():
        content = json.loads((folder / GENERATOR).read_text("utf-8"))
        content.pop("model", None)  # the converted model's config says how it is built
        write_whole(out / GENERATOR, json.dumps(content, indent=1) + "\n")
