"""The libraries whose models polymix converts, one line each, and how a library is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from polymix.compat import cure_torchvision
from polymix.errors import ResultsError
from polymix.extras import needs


class Library(NamedTuple):
    """A library of models.

    adapters: the module of `polymix.convert.adapters` that serves it. It registers its adapters and has two functions,
        `read_recipes(model)` and `build_model(recipe, kwargs)` (see `polymix.convert.model_recipes`). It may have two
        more: `any_adapter(module)`, for classes without an adapter of their own, and `examples(model)`, inputs.
    models: how the paths of its model classes begin.
    extra: of polymix, that brings it.
    by_config: whether a model's config says everything about it.
    """

    adapters: str
    models: str
    extra: str
    by_config: bool = False

    def load_adapters(self) -> ModuleType:
        """Import the adapters of this library, which does not import the library."""
        return _adapters(self.adapters)


@cache
def _adapters(name: str) -> ModuleType:
    """One look-up for all modules of a model: a conversion asks for each of them."""
    return importlib.import_module(f"polymix.convert.adapters.{name}")


LIBRARIES = {
    "torch": Library("torch_nn", "torch.nn.", ""),
    "timm": Library("timm", "timm.models.", "vision"),
    "transformers": Library("transformers", "transformers.models.", "text", by_config=True),
    "torchvision": Library("torchvision", "torchvision.models.", "detection"),
    "diffusers": Library("diffusers", "diffusers.models.", "diffusion", by_config=True),
    "polymix": Library("polymix_models", "polymix.", ""),
}
KERNEL = Library("kernel", "", "")  # layers of any library, or of none, that ask PyTorch for attention


@cache
def load_adapters_of(package: str) -> None:
    """Import the adapters of a library by the name of its package, once; do nothing for other packages."""
    if package in LIBRARIES:
        LIBRARIES[package].load_adapters()


def any_adapter(module: Any) -> Any:
    """The adapter of a layer whose class has none of its own, as its library finds it; None if there is none."""
    library = LIBRARIES.get(type(module).__module__.partition(".")[0])
    serve = None if library is None else getattr(library.load_adapters(), "any_adapter", None)
    return (serve or KERNEL.load_adapters().any_adapter)(module)


def examples_of(model: Any) -> Iterator[Any]:
    """Small inputs that a model may take, as its library can tell; the fullest first."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    library = LIBRARIES.get(type(model).__module__.partition(".")[0])
    make = None if library is None else getattr(library.load_adapters(), "examples", None)
    yield from () if make is None else make(model)


def library_of(kind: type) -> str | None:
    """The name of the library that a class of models belongs to; None where it is in none of them."""
    return next((name for name, lib in LIBRARIES.items() if kind.__module__.startswith(lib.models)), None)


def load_library(name: str) -> Any:
    """Import a library, or a module of it. Raises MissingExtraError where it is not installed."""
    library = LIBRARIES.get(name.partition(".")[0])
    cure_torchvision()
    with needs(library.extra if library else "", "The model comes from it."):
        return importlib.import_module(name)


def holds_weights(folder: Path) -> bool:
    """Whether a folder of timm, transformers or diffusers has weights, or an index that names files of them."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors*", "*.bin*"))


def load_whole(
    kind: Any, folder: Path, argument: str, *, trust: bool = False, **options: Any
) -> tuple[Any, tuple[str, ...]]:
    """A model of transformers or diffusers from a local folder, which must hold all of its weights.

    The libraries would fill what a file lacks with random numbers, and print a warning. Nothing is downloaded.

    Args:
        kind: a class of models, or an Auto class, of transformers or diffusers.
        argument: the name of the folder's argument in messages.
        trust: run code that the folder names.
        options: for `from_pretrained`.
    Returns:
        The model, and the tensors of the files that it has no place for.
    Raises:
        ResultsError: tensors are missing or have other shapes. What the library raises for other damage.
    """
    with quiet():
        model, info = kind.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=trust,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    other_shapes = [f"{key} of another shape" for key in sorted(key for key, *_ in info["mismatched_keys"])]
    lost = [*sorted(set(info["missing_keys"]) - {key for key, *_ in info["mismatched_keys"]}), *other_shapes]
    if lost:
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        got = f"{folder}, whose files lack {len(lost)} of the model's tensors: {names}"
        cure = "Fetch the folder again, or save the model again with save_pretrained."
        raise ResultsError(argument, got, f"all weights of a {type(model).__name__}", cure)
    return model, tuple(sorted(info["unexpected_keys"]))


@contextmanager
def local_files() -> Iterator[None]:
    """Read and write models of transformers without progress bars and without the network.

    A config may name a pretrained backbone, which transformers would download; any request raises instead.
    """
    logging: Any = load_library("transformers").utils.logging
    hub: Any = load_library("huggingface_hub.constants")
    progress_bars, offline = logging.is_progress_bar_enabled(), hub.HF_HUB_OFFLINE
    logging.disable_progress_bar()
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        if progress_bars:
            logging.enable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers, and use no network; polymix reports missing weights."""
    logging: Any = load_library("transformers").utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with local_files():
            yield
    finally:
        logging.set_verbosity(level)
