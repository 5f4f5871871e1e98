"""Export from the command line: what becomes a graph, and what it is run on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polymix.errors import DataError, OptionError, PolymixError, check_int
from polymix.export.graph import Graph, about
from polymix.export.hexagon import DEFAULT_CHIP
from polymix.export.int8 import SCHEMES
from polymix.export.manifest import write_manifest
from polymix.export.modes import MODES, mixer_graphs, modes_of
from polymix.export.write import export_graphs
from polymix.files import output_folder, read_json
from polymix.mixers.spec import parse_mixer
from polymix.numbers import figure
from polymix.results import RESULTS
from polymix.workflows.convert.images import DIGITS
from polymix.workflows.convert.inputs import random_input
from polymix.workflows.convert.sources import load_model
from polymix.workflows.exported_runs import BATCH, image_calibration, measured, trained_graph

SUFFIXES = (".npy", ".npz")
MAX_PICTURES = 512  # that are read to calibrate with


@dataclass(frozen=True)
class Settings:
    """What is exported; see `polymix export --help`."""

    models: Sequence[str] = ()
    mixer: str | None = None
    dim: int | None = None
    tokens: int | None = None
    modes: Sequence[str] = ("self",)
    weights: str | None = None
    classes: int | None = None
    image_size: int | None = None
    data: str | None = None
    seed: int = 0
    trust: bool = False
    schemes: Sequence[str] = SCHEMES
    soc: str = DEFAULT_CHIP
    max_error: float | None = None
    runtime: str | None = None

    def __post_init__(self) -> None:
        if bool(self.models) == (self.mixer is not None):
            got = "--model and --mixer" if self.models else "neither --model nor --mixer"
            raise OptionError("--model", got, "one of the two", "For example, --mixer pom --dim 64 --tokens 256.")
        alone = {"--dim": self.dim is not None, "--modes": tuple(self.modes) != ("self",)}
        if self.models:
            for option, is_set in alone.items():
                if is_set:
                    raise OptionError(option, "a value with --model", "none: a model has its own", "Leave it out.")
        else:
            for option, value in (("--dim", self.dim), ("--tokens", self.tokens)):
                if value is None:
                    raise OptionError(option, "none with --mixer", "a number", f"Pass {option} 64, say.")
                check_int(option, value, 1)
            others = {"--weights": self.weights, "--classes": self.classes, "--image-size": self.image_size}
            for option, other in others.items():
                if other is not None:
                    raise OptionError(option, "a value with --mixer", "none: it is for models", "Leave it out.")


def run(settings: Settings, out: Path, targets: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Export, and say what was written. Raises what `polymix.export.export` raises."""
    if settings.data is not None and not {"int8", "qnn"} & set(targets):
        got = f"a value with --target {','.join(targets)}"
        raise OptionError("--data", got, "the target int8 or qnn", "Leave it out, or add one of these.")
    with output_folder(out, renamed=True):
        return _run(settings, out, targets, say)


def _run(settings: Settings, out: Path, targets: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    graphs = mixer_of(settings) if settings.mixer is not None else models_of(settings)
    data = None  # the graphs calibrate by themselves
    if settings.data is not None and (graphs[0].calibration is None or _holds_arrays(settings.data)):
        data = read_data(Path(settings.data), graphs[0].inputs)
    content = export_graphs(
        graphs, out, targets, data=data, schemes=settings.schemes, max_error=settings.max_error, soc=settings.soc,
        runtime=settings.runtime,
        **_of_language(settings, graphs[0]),
    )  # fmt: skip
    for entry in {entry["path"]: entry for entry in content["files"]}.values():
        free = f", free: {', '.join(entry['free'])}" if entry["free"] else ""
        say(f"{out / entry['path']}  {entry['bytes'] / 1e6:.2f} MB, error {entry['error']:.1e}{free}")
    if {"int8", "qnn"} & set(targets):
        _measure(settings, graphs, out, content, say)
    say(f"All files were run and compared. Again, anywhere: python -m polymix.export.check {out}")
    if "web" in content:
        if not content["web"]["ran_in_node"]:
            say("Node.js is not installed: nothing ran in WebAssembly yet. The page compares its models when opened.")
        say(f"The page: python -m http.server --directory {out / 'web'}, then http://localhost:8000")
    return content


def _of_language(settings: Settings, graph: Graph) -> dict[str, Any]:
    """What `polymix generate` needs of a single language model beside its graphs; empty for other models."""
    folder = Path(settings.models[0]) if len(settings.models) == 1 else None
    if folder is None or not folder.is_dir() or not _is_language_model(folder):
        return {}
    from polymix.export.language import tell_language
    from polymix.workflows.generate.exported import tokenizer_files
    from polymix.workflows.generate.folder import load_tokenizer

    model: Any = graph.model.model
    info = tell_language(model)
    try:
        return {"info": info, "beside": tokenizer_files(load_tokenizer(folder))}
    except DataError:  # a model of token ids alone, which a program can still run
        return {"info": info}


def _measure(
    settings: Settings, graphs: Sequence[Graph], out: Path, content: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Add to the manifest, and say, what quantised files reach on held-out data, next to PyTorch."""
    rows = []
    for model, graph in zip(settings.models, graphs, strict=False):
        folder = Path(model)
        data = None if settings.data is None or _holds_arrays(settings.data) else settings.data
        known = folder.is_dir() and (_is_run(folder) or (data is not None and _has_classes(data)))
        if not known or _is_language_model(folder):
            continue
        entries = [entry for entry in content["files"] if Path(entry["path"]).name.startswith(f"{graph.name}-")]
        try:
            measurements = measured(folder, data, out, entries)
        except PolymixError as error:
            say(f"{model} was not measured: {error}")
            continue
        rows += [{"model": model, **row} for row in measurements]
        for row in measurements:
            figures = ", ".join(f"{name} {figure(value)}" for name, value in row["metrics"].items())
            say(f"{'PyTorch' if row['path'] is None else out / row['path']}: {figures}")
    if rows:
        content["measured"] = rows
        write_manifest(out, {key: value for key, value in content.items() if key != "out"})


def _holds_arrays(data: str) -> bool:
    """Whether these are a graph's inputs themselves. They have no labels, so nothing is measured on them."""
    return Path(data).suffix in SUFFIXES


def _has_classes(data: str) -> bool:
    """Whether these are the digits, idx files, or a folder of images with one sub-folder per class."""
    from polymix.train.data import idx
    from polymix.train.data.pictures import find_pictures

    if data == DIGITS:
        return True
    folder = idx.located(data)
    inside = [part for part in folder.iterdir() if part.is_dir()] if folder.is_dir() else []
    return idx.recognise(folder) is not None or any(find_pictures(each) for each in inside)


def mixer_of(settings: Settings) -> list[Graph]:
    """The graphs of --mixer, with random weights."""
    assert settings.mixer is not None and settings.dim is not None and settings.tokens is not None
    label, config = parse_mixer(settings.mixer, standalone=True)
    mixer = config.build(settings.dim).eval()
    modes = modes_of(mixer) if tuple(settings.modes) == ("all",) else settings.modes
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise OptionError("--modes", repr(unknown[0]), f"all, or some of {', '.join(MODES)}", "Choose among these.")
    return mixer_graphs(mixer, settings.tokens, modes=modes, source=label, seed=settings.seed)


def models_of(settings: Settings) -> list[Graph]:
    """The graphs of all --model options. Several models are called by the last part of their names.

    Raises OptionError: two would have the same name, or --data would have to fit several models.
    """
    if len(settings.models) == 1:
        return model_of(settings.models[0], settings)
    if settings.data is not None:
        raise OptionError("--data", f"one file with {len(settings.models)} models", "one model", "Export each alone.")
    graphs = []
    for model in settings.models:
        stem = re.sub(
            r"[^\w.-]+", "-", Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2]
        )
        own = model_of(model, settings)
        graphs += [replace(graph, name=stem if len(own) == 1 else f"{stem}-{graph.name}") for graph in own]
    names = [graph.name for graph in graphs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError("--model", f"two models named {twice[0]}", "different names", "Rename one of the folders.")
    return graphs


def model_of(name: str, settings: Settings) -> list[Graph]:
    """The graph of a model, and inputs for it: a sample of a task's own data, or random images or token ids.

    A language model of polymix becomes two, which carry its state.
    """
    folder = Path(name)
    if folder.is_dir() and _is_language_model(folder):
        from polymix.export.language import language_graphs, load_language_model

        return language_graphs(load_language_model(folder), name, seed=settings.seed)
    if folder.is_dir() and _is_run(folder):
        data = None if settings.data is None or _holds_arrays(settings.data) else settings.data
        from polymix.train.saved import SavedRun

        return [trained_graph(SavedRun.of(folder), data)]
    if name == DIGITS and not folder.exists():
        cure = f"Train it: polymix train classify --out {DIGITS}."
        raise OptionError("--model", f"{DIGITS}, which is no folder here", "a trained model", cure)
    source = load_model(name, settings.weights, classes=settings.classes, size=settings.image_size,
                        trust=settings.trust).with_weights("--model")  # fmt: skip
    model = source.model.eval()
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        model.float()  # exact; a folder's type is for training and for GPUs
    size = None if source.input is not None else settings.image_size
    inputs = (
        source.input
        if source.input is not None
        else random_input(model, batch=BATCH, size=size, tokens=settings.tokens)
    )
    graph = Graph.of(_tensors_alone(model), inputs, **about(model, name))
    if settings.data is not None and _has_classes(settings.data):
        calibrate = partial(image_calibration, source, settings.data, settings.image_size)
        return [replace(graph, calibration=calibrate)]
    return [graph]


def _is_language_model(folder: Path) -> bool:
    return str(_content(folder / "config.json").get("model_type", "")).startswith("polymix-")


def _is_run(folder: Path) -> bool:
    if not (folder / RESULTS).is_file():
        return False
    from polymix.train.report import SCHEMA

    return _content(folder / RESULTS).get("schema") == SCHEMA


def _content(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    content = read_json(path, DataError, "--model", "a folder of polymix") if path.is_file() else {}
    return content if isinstance(content, Mapping) else {}


class _TensorsAlone(nn.Module):
    """A model of transformers without its cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return {
            name: value for name, value in self.model(**inputs, use_cache=False).items() if isinstance(value, Tensor)
        }


def _tensors_alone(model: nn.Module) -> nn.Module:
    generates = callable(getattr(model, "generate", None)) and getattr(model, "main_input_name", "") == "input_ids"
    return _TensorsAlone(model).eval() if generates else model


def read_data(path: Path, inputs: Mapping[str, Tensor]) -> list[dict[str, np.ndarray]]:
    """Data to calibrate with: .npy for the first input, .npz by the inputs' names, or a folder of images.

    Raises:
        DataError: it cannot be read, has one sample, holds NaN, or does not fit the graph's inputs.
    """
    first, example = next(iter(inputs.items()))
    if path.is_dir():
        arrays = {first: _images(path, tuple(example.shape))}
    elif path.suffix in SUFFIXES and path.is_file():
        try:
            loaded = np.load(path, allow_pickle=False)
            arrays = {first: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        except Exception as error:  # numpy's, zipfile's and zlib's own
            raise DataError(
                "--data", f"{path}, which cannot be read ({error})", ".npy or .npz", "Save it anew."
            ) from error
    else:
        raise DataError("--data", str(path), ".npy, .npz or a folder of images", "Check the path.")
    if set(arrays) != set(inputs):
        got, expected = ", ".join(arrays) or "no arrays", ", ".join(inputs)
        raise DataError("--data", f"{path} with {got}", f"arrays named {expected}", "Rename them.")
    for name, array in arrays.items():
        expected_shape = tuple(inputs[name].shape[1:])
        if array.ndim != inputs[name].ndim or tuple(array.shape[1:]) != expected_shape:
            allowed = f"samples of shape {expected_shape} for {name}"
            raise DataError("--data", f"{path} with {name} of shape {array.shape}", allowed, "Reshape them.")
        if len(array) < 2:
            raise DataError("--data", f"{path} with {len(array)} sample", "at least two", "Use a few hundred.")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError("--data", f"{path} with NaN or infinite values in {name}", "finite values", "Mend them.")
    if len({len(array) for array in arrays.values()}) > 1:
        raise DataError("--data", f"{path} with different numbers of samples", "as many in each array", "Cut them.")
    kinds = {name: np.dtype(str(value.dtype).removeprefix("torch.")) for name, value in inputs.items()}
    count = min(len(array) for array in arrays.values())
    size = len(example)
    return [
        {name: array[start : start + size].astype(kinds[name]) for name, array in arrays.items()}
        for start in range(0, count - size + 1, size)
    ] or [{name: np.resize(array, (size, *array.shape[1:])).astype(kinds[name]) for name, array in arrays.items()}]


def _images(folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    from polymix.train.data.pictures import find_pictures, read_grey, read_picture, resized

    paths = find_pictures(folder)
    if len(shape) != 4 or not paths:
        got = f"{folder}, a folder {'for inputs that are no images' if paths else 'without images'}"
        raise DataError("--data", got, "a folder of images for an image model, or .npy", "Check the path.")
    _, channels, height, width = shape
    read = (lambda path: read_grey(path)[None]) if channels == 1 else read_picture
    pictures = (resized(read(path), height, width) for path in paths[:MAX_PICTURES])
    return np.stack([(picture.float() / 127.5 - 1).numpy() for picture in pictures])
