"""Loading the model to convert: by name, from a folder, or from file.py:function. polymix downloads nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix._io import call_function, one_line, read_json
from polymix.convert import load_pretrained
from polymix.convert.adapters.libraries import LIBRARIES, load_library, local_files
from polymix.convert.saving.files import load_safetensors
from polymix.convert.saving.rebuild import shape
from polymix.errors import OptionError, PolymixError, nearest_first
from polymix.limits import bounded, check_counts, check_model

ALLOWED = "timm/NAME, torchvision/NAME, a folder saved by polymix, transformers or timm, or file.py:function"
SIZES = {"timm": "img_size", "torchvision": "image_size"}  # the library's argument for the image size
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of nn.DataParallel and of torch.compile
_WEIGHTS = "a state dict, in a .safetensors file or written by torch.save"


class Source(NamedTuple):
    """A loaded model.

    input: an input of the model, if one came with it. trained: whether its weights are trained, as far as is known.
    folder: where it was loaded from. unused: weights in that folder that the model does not have.
    """

    model: nn.Module
    input: Any = None
    trained: bool = True
    folder: Path | None = None
    unused: tuple[str, ...] = ()


def load_model(
    name: str, weights: str | None = None, *, classes: int | None = None, size: int | None = None, trust: bool = False
) -> Source:
    """Load a model.

    Args:
        name: timm/NAME, torchvision/NAME, a folder, or file.py:function.
        weights: file with a state dict for it.
        classes, size: number of classes and image size of a model by name.
        trust: run the user code that a folder of polymix names.
    """
    state = {} if weights is None else read_state(Path(weights))
    library, _, rest = name.partition("/")
    try:
        if ".py:" in name:
            source = _function(name)
        elif Path(name).is_dir():
            source = _folder(Path(name), trust)._replace(folder=Path(name))
        elif library in SIZES and rest:
            source = Source(build_by_name(library, rest, state, classes=classes, size=size), trained=False)
        else:
            cure = "Pass a file of weights as --weights." if Path(name).is_file() else "Try timm/deit_tiny_patch16_224."
            raise OptionError("--model", repr(name), ALLOWED, cure)
    except PolymixError as error:
        if error.argument == "trust":
            raise OptionError(
                "--trust", error.got, error.allowed, "Read that code. If you trust it, pass --trust."
            ) from error
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
    return Source(*parts)  # the user knows whether it is trained


def _folder(folder: Path, trust: bool) -> Source:
    """The model that polymix, timm or transformers saved in a folder."""
    content = read_json(folder / "config.json", OptionError, "--model", ALLOWED, "Fetch or save it again.")
    if not isinstance(content, dict):
        got = f"{folder}, whose config.json holds a {type(content).__name__}"
        raise OptionError("--model", got, ALLOWED, "Fetch or save it again.")
    check_counts(content, "--model", str(folder))
    architecture, kinds = content.get("architecture"), content.get("architectures")
    for name, value, usual in (("architecture", architecture, str), ("architectures", kinds, list)):
        if value is not None and not (isinstance(value, usual) and all(isinstance(part, str) for part in value)):
            got = f"{folder}, whose config.json has {name}={str(value)[:60]!r}"
            raise OptionError(
                "--model", got, "a name" if usual is str else "a list of names", "Fetch or save it again."
            )
    if content.get("library_name") == "polymix":
        return Source(load_pretrained(folder, trust=trust))
    kept = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    try:
        if architecture is not None:
            return _timm(folder, content.get("num_classes"), kept)
        if kinds:
            return _transformers(folder, kinds[0], kept)
    except PolymixError:
        raise
    except Exception as error:  # whatever a library raises for a damaged folder
        got = f"{folder}, which fails with {one_line(error)[:300]}"
        raise OptionError("--model", got, ALLOWED, "Fetch or save it again.") from error
    raise OptionError("--model", f"{folder}, whose config.json names no architecture", ALLOWED, "")


def _timm(folder: Path, classes: Any, kept: bool) -> Source:
    """A folder that timm saved."""

    def build(pretrained: bool) -> nn.Module:
        create: Any = load_library("timm").create_model
        return create(f"local-dir:{folder.resolve()}", pretrained=pretrained, num_classes=classes)

    check_model(lambda: build(False), "--model", str(folder))
    with bounded("--model", str(folder)):
        return Source(build(kept), trained=kept)


def _transformers(folder: Path, architecture: str, kept: bool) -> Source:
    transformers = load_library("transformers")
    kind: Any = getattr(transformers, architecture, None)
    if kind is None:
        got = f"{folder}, of the architecture {architecture}"
        raise OptionError("--model", got, "an architecture of transformers", "Code in the folder is not run.")
    with quiet():
        config = kind.config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_model(lambda: kind(copy.deepcopy(config)), "--model", str(folder))
        if not kept:
            with bounded("--model", str(folder)):
                return Source(kind(config), trained=False)
        model, found = kind.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    lost = sorted(found["missing_keys"]) + [f"{key} of another shape" for key, *_ in found["mismatched_keys"]]
    if lost:
        got = f"{folder}, which lacks {len(lost)} of them, such as {lost[0]}"
        raise OptionError(
            "--model", got, f"all weights of {architecture}", "Save the model again with save_pretrained."
        )
    return Source(model, unused=tuple(sorted(found["unexpected_keys"])))


def build_by_name(
    library: str, name: str, state: Mapping[str, Tensor], *, classes: int | None = None, size: int | None = None
) -> nn.Module:
    """A model of timm or torchvision with untrained weights.

    size: of the images, where the model has that option. classes: of the head; with a `state`, as many as there.
    """
    models: Any = load_library("timm" if library == "timm" else "torchvision.models")
    if not (models.is_model(name) if library == "timm" else name in models.list_models()):
        known = ", ".join(nearest_first(name, models.list_models())[:5])
        raise OptionError("--model", f"{library}/{name}", f"a model of {library}, such as {known}", "")
    model = _built(library, name, None if state else classes, size)
    saved = classes_of(model, state)
    return model if saved is None else _built(library, name, saved, size)


def _built(library: str, name: str, classes: int | None, size: int | None) -> nn.Module:
    options = {} if classes is None else {"num_classes": classes}
    sized = options if size is None else {**options, SIZES[library]: size}
    build, recipe = LIBRARIES[library].load_adapters().build_model, {"library": library, "name": name}
    argument, what = (
        ("--model", f"{library}/{name}") if size is None else ("--image-size", f"{name} for {size:,} pixels")
    )

    def made(options: dict[str, Any]) -> Any:
        check_model(lambda: build(recipe, options), argument, what)
        with bounded(argument, what):
            return build(recipe, options)

    try:
        try:
            model = made(sized)
        except TypeError:  # it has no such option: it takes images of any size
            model = made(options)
    except PolymixError:
        raise
    except Exception as error:  # whatever a library raises for a tag or a size that does not exist
        got = f"{library}/{name}, which fails with {one_line(error)[:300]}"
        raise OptionError("--model", got, f"a model that {library} builds", "") from error
    assert isinstance(model, nn.Module)
    return model


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


# Files of weights


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, or under "state_dict" or "model" in it. No code in the file is run."""
    if not path.is_file():
        raise OptionError("--weights", path, "an existing file", "Check the path.")
    try:
        if path.suffix == ".safetensors":
            state: Any = load_safetensors().torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        got = f"{path}, which holds more than weights, or was not written by torch.save"
        cure = "Save model.state_dict()."
        raise OptionError("--weights", got, _WEIGHTS, cure) from error
    except Exception as error:  # whatever they raise for a damaged file
        got = f"{path}, which cannot be read ({' '.join(str(error).split('.')[0].split())})"
        raise OptionError("--weights", got, _WEIGHTS, "Fetch it again, or save model.state_dict().") from error
    for key in ("state_dict", "model"):
        state = state[key] if isinstance(state, Mapping) and isinstance(state.get(key), Mapping) else state
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise OptionError("--weights", f"{path}, which holds no state dict", _WEIGHTS, "Save model.state_dict().")
    for prefix in _WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


def classes_of(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes in a state dict, where it differs from the model's."""
    name, head = next(((n, p) for n, p in reversed([*model.named_modules()]) if isinstance(p, nn.Linear)), ("", None))
    saved = state.get(f"{name}.weight")
    other = head is not None and saved is not None and saved.ndim == 2 and len(saved) != head.out_features
    return len(saved) if other and saved is not None else None


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str) -> None:
    """Load a state dict into the model. Raises OptionError unless it has exactly the model's weights."""
    own = model.state_dict()
    missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    wrong = [key for key in own.keys() & state.keys() if shape(own[key]) != shape(state[key])]
    if missing or foreign or wrong:
        parts = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        parts += [f"{len(foreign)} unknown, such as {foreign[0]}"] if foreign else []
        parts += [f"{key} of shape {shape(state[key])} instead of {shape(own[key])}" for key in sorted(wrong)[:1]]
        got, allowed = f"{path}: {'; '.join(parts)}", f"the weights of this {type(model).__name__}"
        raise OptionError(
            "--weights", got, allowed, "Check --model. A converted model is a folder: pass that as --model."
        )
    model.load_state_dict(state)
