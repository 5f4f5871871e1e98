"""Loading the model to convert: by name, from a folder, or from file.py:function. polymix downloads nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from polymix.convert import Adapter, load_pretrained
from polymix.convert.adapters.libraries import (
    LIBRARIES,
    holds_weights,
    library_of,
    load_library,
    load_whole,
    quiet,
)
from polymix.convert.find import pixels
from polymix.convert.model_recipes import decode
from polymix.convert.weights import LoadedWeights, fill, head_of, read_state, saved_classes
from polymix.errors import OptionError, PolymixError, ResultsError, nearest_first, one_line
from polymix.files import call_function, read_json
from polymix.limits import bounded, check_counts, check_model
from polymix.workflows.convert.generators import load_generator
from polymix.workflows.convert.inputs import patch_size, reads_text

ALLOWED = "timm/NAME, torchvision/NAME, a folder of polymix, transformers, timm or diffusers, or file.py:function"
_CLASSIFIER = "ForImageClassification"
SIZES = {"timm": "img_size", "torchvision": "image_size"}  # the library's argument for the image size


class Source(NamedTuple):
    """A loaded model.

    input: an input of the model, if one came with it. trained: whether its weights are trained, as far as is known.
    folder: where it was loaded from. unused: weights in that folder that the model does not have. loaded: what was
    changed to fit the weights to the classes and the image size. process: what a generator of polymix was trained on.
    """

    model: nn.Module
    input: Any = None
    trained: bool = True
    folder: Path | None = None
    unused: tuple[str, ...] = ()
    loaded: LoadedWeights = LoadedWeights()
    process: Any = None  # a Flow or a Diffusion

    def with_weights(self, argument: str) -> Source:
        """This model, unless it came from a folder without weights: it would be used as if it were trained.

        Raises:
            ResultsError: there are none. `argument` named the folder.
        """
        if self.folder is not None and not self.trained:
            raise ResultsError(argument, f"{self.folder}, which holds no weights", "a folder with the model's weights",
                               "Fetch the whole folder: config.json alone is an architecture.")  # fmt: skip
        return self


def load_model(
    name: str, weights: str | None = None, *, classes: int | None = None, size: int | None = None, trust: bool = False
) -> Source:
    """Load a model.

    Args:
        name: timm/NAME, torchvision/NAME, a folder, or file.py:function.
        weights: file with a state dict for it.
        classes, size: number of classes and image size of a model by name. With weights for others the head is new,
            and learned positions are interpolated.
        trust: run the user code that a folder of polymix names.
    """
    state, key = ({}, "") if weights is None else read_state(Path(weights))
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
    loaded = fill(source.model, state, weights, adapt=not reads_text(source.model), key=key)
    return source._replace(trained=True, loaded=loaded)


def refit(
    source: Source, classes: int | None, size: int | None, labels: Sequence[str] | None = None, *, asked: bool = False
) -> Source:
    """The image classifier of a folder of timm or transformers for other classes or another image size.

    Its head becomes new where the number of classes differs, and its learned positions are interpolated. Other models
    are returned as they are.

    Raises:
        OptionError: `asked`, the user's explicit number of classes, cannot be had from this model.
    """
    model, head = source.model, head_of(source.model)
    own = None if head is None else head[1].out_features
    library = library_of(type(model))
    known = library == "timm" or (library == "transformers" and _CLASSIFIER in type(model).__name__)
    if source.folder is None or not known or any(isinstance(part, Adapter) for part in model.modules()):
        if asked and classes != own:
            got = f"{classes} for {type(model).__name__}" + ("" if own is None else f" with {own}")
            cure = "Leave it out. First give the model another head: in your function, or before its conversion."
            raise OptionError("--classes", got, "a model by name, or an image classifier in a folder", cure)
        return source
    classes = None if classes == own else classes
    size = None if size is None or pixels(model) in (None, (size, size)) else size
    if classes is None and size is None:
        return source
    if library == "transformers":
        other = _transformers_for(model, classes, size, labels)
    else:
        other = _timm_for(model, classes, size)
    loaded = fill(other, model.state_dict(), str(source.folder), adapt=True, argument="--model")
    return source._replace(model=other, loaded=loaded)


def _transformers_for(model: Any, classes: int | None, size: int | None, labels: Sequence[str] | None) -> Any:
    config = copy.deepcopy(model.config)
    patch = patch_size(model)
    if size is not None:
        if patch is not None and size % patch:
            allowed = f"a multiple of the patch size, {patch}"
            raise OptionError("--image-size", size, allowed, f"Try {max(1, round(size / patch)) * patch}.")
        config.image_size = size
    if classes is not None:
        names = labels or [f"LABEL_{i}" for i in range(classes)]
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in enumerate(names)}
    with quiet():
        return type(model)(config)


def _timm_for(model: Any, classes: int | None, size: int | None) -> Any:
    adapters = LIBRARIES["timm"].load_adapters()
    recipe = next(adapters.read_recipes(model))
    kwargs = decode(recipe["kwargs"])
    stated = dict(model.pretrained_cfg)
    if classes is not None:
        kwargs["num_classes"] = stated["num_classes"] = classes
    if size is not None:
        kwargs["img_size"], stated["input_size"] = size, (stated.get("input_size", (3,))[0], size, size)
    try:
        other = adapters.build_model(recipe, kwargs)
    except Exception as error:  # whatever timm raises for a size
        got = f"{size} for {recipe['name']}, which fails with {one_line(error)[:300]}"
        raise OptionError("--image-size", got, "a size that the model can be built for", "") from error
    other.pretrained_cfg = stated
    return other


def _function(name: str) -> Source:
    built = call_function(name, {})
    parts = built if isinstance(built, tuple) else (built, None)
    if len(parts) != 2 or not isinstance(parts[0], nn.Module):
        got = f"{name}, which returns {type(built).__name__}"
        raise OptionError("--model", got, "a function that returns a model, or (model, input)", "")
    return Source(*parts)  # the user knows whether it is trained


def _folder(folder: Path, trust: bool) -> Source:
    """The model that polymix, timm, transformers or diffusers saved in a folder."""
    generator = load_generator(folder, trust, ALLOWED)
    if generator is not None:
        return Source(generator.model, trained=generator.trained, process=generator.process)
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
    has_weights = holds_weights(folder)
    try:
        if architecture is not None:
            return _timm(folder, content.get("num_classes"), has_weights)
        if kinds:
            return _transformers(folder, kinds[0], has_weights)
    except PolymixError:
        raise
    except Exception as error:  # whatever a library raises for a damaged folder
        got = f"{folder}, which fails with {one_line(error)[:300]}"
        raise OptionError("--model", got, ALLOWED, "Fetch or save it again.") from error
    raise OptionError("--model", f"{folder}, whose config.json names no architecture", ALLOWED, "")


def _timm(folder: Path, classes: Any, has_weights: bool) -> Source:
    """A folder that timm saved."""

    def build(pretrained: bool) -> nn.Module:
        create: Any = load_library("timm").create_model
        return create(f"local-dir:{folder.resolve()}", pretrained=pretrained, num_classes=classes)

    check_model(lambda: build(False), "--model", str(folder))
    with bounded("--model", str(folder)):
        return Source(build(has_weights), trained=has_weights)


def _transformers(folder: Path, architecture: str, has_weights: bool) -> Source:
    transformers = load_library("transformers")
    kind: Any = getattr(transformers, architecture, None)
    if kind is None:
        got = f"{folder}, of the architecture {architecture}"
        raise OptionError("--model", got, "an architecture of transformers", "Code in the folder is not run.")
    with quiet():
        config = kind.config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_model(lambda: kind(copy.deepcopy(config)), "--model", str(folder))
        if not has_weights:
            with bounded("--model", str(folder)):
                return Source(kind(config), trained=False)
        model, unused = load_whole(kind, folder, "--model")
    return Source(model, unused=unused)


def build_by_name(
    library: str, name: str, state: Mapping[str, Tensor], *, classes: int | None = None, size: int | None = None
) -> nn.Module:
    """A model of timm, also of those that polymix.timm adds, or of torchvision, with untrained weights.

    size: of the images, where the model has that option. classes: of the head; None: as many as in `state`.
    """
    models: Any = load_library("timm" if library == "timm" else "torchvision.models")
    if library == "timm":
        import polymix.timm  # noqa: F401  registers padre2_deit_tiny_patch16_224 …
    if not (models.is_model(name) if library == "timm" else name in models.list_models()):
        known = ", ".join(nearest_first(name, models.list_models())[:5])
        raise OptionError("--model", f"{library}/{name}", f"a model of {library}, such as {known}", "")
    model = _built(library, name, classes, size)
    saved = None if classes is not None else saved_classes(model, state)
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
