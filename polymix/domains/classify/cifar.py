"""CIFAR-100 as its authors publish it: `cifar-100-binary`, and `cifar-100-python`, which is pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import DataError, one_line
from polymix.files import read_text

SIDE, CLASSES, IMAGES = 32, 100, 60_000
ROW = 2 + 3 * SIDE**2  # bytes of an image: coarse label, fine label, pixels
BINARY, PYTHON = "cifar-100-binary", "cifar-100-python"
FILES = {BINARY: ("train.bin", "test.bin"), PYTHON: ("train", "test")}
NAMES = {BINARY: "fine_label_names.txt", PYTHON: "meta"}
Part = tuple[Tensor, Tensor]


def recognise(folder: Path) -> str | None:
    """The layout of a folder with CIFAR-100's own files; None for other folders."""
    return next((name for name, files in FILES.items() if all((folder / file).is_file() for file in files)), None)


def read(
    folder: Path, layout: str, allow_pickle: bool, say: Callable[[str], None] = lambda text: None
) -> tuple[tuple[str, ...], Part, Part]:
    """The classes, the training and the test images (N, 3, 32, 32) as bytes, with their fine labels.

    Args:
        layout: BINARY or PYTHON.
        allow_pickle: read pickles, which can run any code.
    Raises:
        DataError: a file is missing, of the wrong size or damaged, or it is pickled and `allow_pickle` is False.
    """
    for file in FILES[layout]:
        if not (folder / file).is_file():
            raise DataError("--data", f"{folder} without {file}", f"the files of {layout}", "Unpack the archive there.")
    if layout == BINARY:
        parts = [_binary(folder / file) for file in FILES[layout]]
        names = folder / NAMES[layout]
        words = read_text(names, errors="replace").split() if names.is_file() else []
    else:
        if not allow_pickle:
            cure = f"Use {BINARY}, or pass --set allow_pickle=True if you trust the files."
            raise DataError("allow_pickle", f"False for {folder / 'train'}, which is pickled", "True", cure)
        say(f"Unpickling {folder / 'train'}, which can run any code that is in it")
        parts = [_pickled(folder / file) for file in FILES[layout]]
        names = folder / NAMES[layout]
        stored = _unpickle(names).get("fine_label_names") if names.is_file() else None
        words = list(map(str, stored)) if isinstance(stored, (list, tuple)) else []
    if words and len(words) != CLASSES:
        raise DataError("--data", f"{names} with {len(words)} names", f"{CLASSES} names", "Unpack the archive again.")
    return tuple(words or map(str, range(CLASSES))), parts[0], parts[1]


def _binary(path: Path) -> Part:
    size = path.stat().st_size
    if not size or size % ROW:
        got = f"{path} of {size:,} bytes"
        raise DataError("--data", got, f"a multiple of {ROW:,}, the bytes of an image", "Unpack the archive again.")
    rows = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).reshape(-1, ROW)
    return _part(path, rows[:, 2:], rows[:, 1].long())


def _pickled(path: Path) -> Part:
    content = _unpickle(path)
    if "data" not in content or "fine_labels" not in content:
        raise DataError("--data", f"{path} without data and fine_labels", "a file of CIFAR-100", "")
    try:
        pixels, labels = (torch.as_tensor(content[name]) for name in ("data", "fine_labels"))
        return _part(path, pixels.to(torch.uint8), labels.long())
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        got = f"{path}, whose data and fine_labels are no arrays ({one_line(error)[:200]})"
        raise DataError("--data", got, "a file of CIFAR-100", "Unpack the archive again.") from error


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = pickle.load(file, encoding="latin1")
    except Exception as error:  # whatever pickle raises on a damaged file
        raise DataError("--data", f"{path} ({error})", "a pickle of CIFAR-100", "Unpack the archive again.") from error
    return content if isinstance(content, dict) else {}


def _part(path: Path, pixels: Tensor, labels: Tensor) -> Part:
    if pixels.ndim != 2 or pixels.shape[1] != 3 * SIDE**2 or len(pixels) != len(labels):
        got = f"{path} with pixels {tuple(pixels.shape)} and {len(labels)} labels"
        raise DataError("--data", got, f"(N, {3 * SIDE**2}) and N labels", "Unpack the archive again.")
    wrong = ((labels < 0) | (labels >= CLASSES)).nonzero()
    if len(wrong):
        place = int(wrong[0, 0])
        got = f"{path} with label {int(labels[place])} of image {place}"
        raise DataError("--data", got, f"labels below {CLASSES}", "Unpack the archive again.")
    return pixels.reshape(-1, 3, SIDE, SIDE).contiguous(), labels.clone()
