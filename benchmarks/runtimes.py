"""Exported mixers on a CPU: how exact, and how fast beside PyTorch and beside attention exported the same way.

    pip install -c constraints.txt ".[train,export,openvino,mobile]"
    python benchmarks/runtimes.py benchmarks/results/export/runtimes.json [--quick] [--no-times] [--files FOLDER]

64 channels, one sequence, float32 (8 bits: a8w8), one thread: threads that wait for work would slow the next call. A
cell is a runtime at a number of tokens; all mixers, in it and in PyTorch with polymix's own kernels, are timed in turn,
from arrays of numpy to arrays of numpy. The file is written after each cell, and the same command continues it. A
runtime that is not installed is skipped. --quick tries the script on few tokens. --no-times leaves the times null, for
a machine that is busy; the command without it fills them in. --files keeps the exported files in a folder, so that the
second command takes times only.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from saving import save
from torch import nn

import polymix
from polymix import export
from polymix.errors import CapabilityError, MissingExtraError, ParityError
from polymix.export.manifest import MANIFEST, Arrays, load, read_manifest
from polymix.measure import interleaved
from polymix.measure import manifest as machine

DIM, THREADS = 64, 1
MIXERS = ("softmax", "padre", "pom", "qt")
TOKENS, SECONDS = (256, 4096), 2.0  # seconds for each call of a cell
QUICK_TOKENS, QUICK_SECONDS = (16, 64), 0.02
RUNTIMES = {  # the target and the package
    "ONNX Runtime": ("onnx", "onnxruntime"),
    "ONNX Runtime, 8 bits": ("int8", "onnxruntime"),
    "OpenVINO": ("openvino", "openvino"),
    "AOTInductor": ("aoti", "torch"),
    "ExecuTorch": ("executorch", "executorch"),
}


def built(name: str, tokens: int) -> nn.Module:
    """A mixer with fresh weights, padre on a square grid."""
    torch.manual_seed(0)
    side = math.isqrt(tokens)
    return polymix.create_mixer(name, DIM, **({"grid": (side, side)} if name == "padre" else {})).eval()


def in_pytorch(mixer: nn.Module, inputs: Arrays) -> np.ndarray:
    with torch.inference_mode():
        return np.asarray(mixer(torch.from_numpy(inputs["x"])))


def use_one_thread() -> None:
    """In PyTorch, and in ExecuTorch if it is installed; the other runtimes are told when they load a file."""
    torch.set_num_threads(THREADS)
    try:
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    except ImportError:
        return
    _unsafe_reset_threadpool(THREADS)


def exported(mixer: nn.Module, x: np.ndarray, out: Path, target: str) -> list[dict[str, Any]]:
    """The manifest's files of an export, which is made unless `out` is there."""
    if (out / MANIFEST).is_file():
        return list(read_manifest(out)["files"])
    return list(export.export(mixer, torch.from_numpy(x), out, (target,))["files"])


def cell(runtime: str, tokens: int, seconds: float | None, kept: Path | None = None) -> list[dict[str, Any]]:
    """A row for each mixer: its relative error and median milliseconds, or why it is refused.

    seconds: None: no times. kept: a folder for the exported files; None: they are thrown away.

    Raises MissingExtraError: the runtime is not installed.
    """
    target, package = RUNTIMES[runtime]
    x = np.random.default_rng(0).standard_normal((1, tokens, DIM), np.float32)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if kept is None else kept / f"{target}-{tokens}"
        for name in MIXERS:
            mixer, out = built(name, tokens), folder / name
            row = rows[name] = {"runtime": runtime, "tokens": tokens, "mixer": name}
            try:
                files = [file for file in exported(mixer, x, out, target) if file.get("scheme") != "a16w8"]
            except (CapabilityError, ParityError) as refused:
                row["reason"] = str(refused)
                continue
            row |= {"version": version(package), "error": max(file["error"] for file in files),
                    "ms": None, "pytorch_ms": None}  # fmt: skip
            calls[name, "ms"] = partial(load(target, out / files[0]["path"], THREADS), {"x": x})
            calls[name, "pytorch_ms"] = partial(in_pytorch, mixer, {"x": x})
        if seconds is not None:
            for (name, what), timing in interleaved(calls, seconds=seconds).items():
                rows[name][what] = timing.milliseconds().median
    return list(rows.values())


def done(rows: list[dict[str, Any]], timed: bool) -> bool:
    """Whether these are the rows of a whole cell, with their times if they are wanted."""
    return bool(rows) and not (timed and any("ms" in row and row["ms"] is None for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--files", type=Path, help="keep the exported files here")
    options = parser.parse_args()
    use_one_thread()
    content: dict[str, Any] = {"machine": machine("cpu", THREADS), "dim": DIM, "quick": options.quick, "rows": []}
    if options.out.exists():
        results = json.loads(options.out.read_text("utf-8"))
        if {**results, "rows": []} != content:
            parser.error(f"{options.out} is from another machine, PyTorch or --quick. Name a new file.")
        content = results
    timed = None if options.no_times else QUICK_SECONDS if options.quick else SECONDS
    for runtime in RUNTIMES:
        for tokens in QUICK_TOKENS if options.quick else TOKENS:
            old = [row for row in content["rows"] if (row["runtime"], row["tokens"]) == (runtime, tokens)]
            if done(old, timed is not None):
                continue
            try:
                rows = cell(runtime, tokens, timed, options.files)
            except MissingExtraError as missing:
                print(f"{runtime}: skipped. {missing}", flush=True)
                break
            content["rows"] = [row for row in content["rows"] if row not in old] + rows
            save(content, options.out)
            for row in rows:
                print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
