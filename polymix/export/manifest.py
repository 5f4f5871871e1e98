"""manifest.json: the files of an export, what each is given and must return; and the runtimes that run them.

Nothing here needs PyTorch, so that an export can be checked on the machine where it will be used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from polymix.errors import DataError, MissingExtraError, one_line
from polymix.extras import needs
from polymix.files import read_json, write_whole

MANIFEST, CHECKS, SCHEMA = "manifest.json", "check", "polymix.export/1"
QNN_PROVIDER, CONTEXT = (
    "QNNExecutionProvider",
    "-context.onnx",
)  # of Qualcomm's runtime; the end of a compiled file's name
OUTPUT_NAMES = "output_names"  # of an entry whose file does not name its outputs: the path of a file that does
Arrays = dict[str, np.ndarray]
Loaded = Callable[[Mapping[str, np.ndarray]], Arrays]


@dataclass(frozen=True)
class Checked:
    """How a file did.

    path, target: of the file. error: the largest difference to the expected outputs, relative to the largest of them,
    or for quantised files the distance relative to the length; None if it was not run. tolerance: the most that is
    allowed. reason: why it was not run, or how it failed.
    """

    path: str
    target: str
    error: float | None
    tolerance: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.path}: not run, {self.reason}"
        how = "as expected" if self.passed else self.reason or "other numbers"
        return f"{self.path}: {how} (error {self.error:.1e}, at most {self.tolerance:.0e})"


def check(folder: str | Path) -> list[Checked]:
    """Run every file of an export on the inputs that came with it, and compare its outputs with those expected.

    Returns:
        One result for each file and each set of inputs. A file whose runtime is not installed has the error None.

    Raises:
        DataError: there is no manifest, or it cannot be read, or names files that are not there.
    """
    folder = Path(folder)
    results = []
    for entry in read_manifest(folder)["files"]:
        path, target, tolerance = str(entry["path"]), str(entry["target"]), float(entry["tolerance"])
        try:
            outputs = run(target, folder / path, read_arrays(folder / entry["inputs"]))
        except MissingExtraError as missing:
            results.append(Checked(path, target, None, tolerance, str(missing)))
            continue
        except Exception as failure:  # whatever a runtime raises
            results.append(Checked(path, target, float("inf"), tolerance, one_line(failure)))
            continue
        measure = MEASURES[entry.get("measure", "largest")]
        results.append(Checked(path, target, measure(outputs, read_arrays(folder / entry["outputs"])), tolerance))
    return results


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of manifest.json. Raises DataError: it is missing or damaged, or names files that are not there."""
    cure = "Name the folder that polymix export wrote."
    content = read_json(folder / MANIFEST, DataError, "folder", f"a folder with {MANIFEST}", cure)
    try:
        names = [str(entry[key]) for entry in content["files"] for key in ("path", "inputs", "outputs")]
        names += [str(entry[OUTPUT_NAMES]) for entry in content["files"] if OUTPUT_NAMES in entry]
        [(entry["target"], float(entry["tolerance"])) for entry in content["files"]]
    except (KeyError, TypeError, ValueError) as error:
        got = f"{folder / MANIFEST}, which lacks something ({one_line(error)})"
        raise DataError("folder", got, f"the {MANIFEST} of an export", "Export again.") from error
    for name in names:
        if not (folder / name).exists():
            raise DataError("folder", f"{folder} without {name}", "all files of the export", "Copy the whole folder.")
    return dict(content)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    write_whole(folder / MANIFEST, json.dumps({"schema": SCHEMA, **content}, indent=1) + "\n")


def read_arrays(path: Path) -> Arrays:
    """The arrays of a file by numpy. Raises DataError: it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # numpy, zipfile and zlib each have their own
        raise DataError("folder", f"{path} ({one_line(error)})", "arrays of numpy", "Copy the file again.") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    def save(part: Path) -> None:
        with open(part, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub sees its own options here

    write_whole(path, save)


def difference(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference of an output, relative to the largest value of that output; inf for other shapes."""
    worst = 0.0
    for name, right in expected.items():
        left = outputs.get(name)
        if left is None or left.shape != right.shape:
            return float("inf")
        left, right = left.astype(np.float64), right.astype(np.float64)
        if not np.array_equal(np.isnan(left), np.isnan(right)):
            return float("inf")
        same = left == right  # covers infinities
        apart = np.where(same, 0.0, np.abs(np.nan_to_num(left) - np.nan_to_num(right)))
        finite = np.abs(right[np.isfinite(right)])
        scale = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
        worst = max(worst, float(apart.max(initial=0.0)) / scale)
    return worst


def distance(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The Euclidean distance of an output from what is expected, relative to its length; the largest of all outputs."""
    worst = 0.0
    for name, right in expected.items():
        left = outputs.get(name)
        if left is None or left.shape != right.shape:
            return float("inf")
        length = float(np.linalg.norm(right.astype(np.float64))) or 1.0
        apart = float(np.linalg.norm(left.astype(np.float64) - right.astype(np.float64))) / length
        worst = max(worst, apart if np.isfinite(apart) else float("inf"))
    return worst


MEASURES = {"largest": difference, "distance": distance}  # by an entry's "measure"


# ---- runtimes, by target


def run(target: str, path: Path, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """The outputs of a file by name. Raises MissingExtraError: the runtime of this target is not installed."""
    return load(target, path)(inputs)


def load(target: str, path: Path, threads: int | None = None) -> Loaded:
    """A file in its runtime, to be called with inputs by name any number of times; it returns the outputs by name.

    Args:
        threads: of ONNX Runtime and OpenVINO; None: their own choice. The other runtimes have one pool for a process.

    Raises MissingExtraError: the runtime of this target is not installed.
    """
    if target not in RUNTIMES:
        state = f"has no runtime for {target}, which {', '.join(RUNTIMES)} have"
        raise MissingExtraError("polymix", state=state, install="git pull, in a clone of polymix")
    return RUNTIMES[target](path, threads)


def onnx_session(path: Path, threads: int | None = None) -> Any:
    """A session of ONNX Runtime on the CPU. Raises MissingExtraError: it is not installed."""
    with needs("export"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised anyway
    # Where a processor adds products of 8 bits in 16, as AVX2 does without VNNI, large sums would be cut off.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, inputs: Mapping[str, np.ndarray]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    feed = {part.name: inputs[part.name] for part in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


def _onnxruntime(path: Path, threads: int | None) -> Loaded:
    return functools.partial(run_session, onnx_session(path, threads))


def _openvino(path: Path, threads: int | None) -> Loaded:
    with needs("openvino"):
        import openvino
    options = {"INFERENCE_PRECISION_HINT": "f32", **({} if threads is None else {"INFERENCE_NUM_THREADS": threads})}
    model = openvino.compile_model(str(path), "CPU", options)

    def call(inputs: Mapping[str, np.ndarray]) -> Arrays:
        results = model({part.any_name: inputs[part.any_name] for part in model.inputs})
        return {part.any_name: np.array(results[part]) for part in model.outputs}

    return call


def _aoti(path: Path, threads: int | None) -> Loaded:
    with needs(why="It is this package's runtime in Python; C++ loads it without."):
        import torch
    package: Any = torch._inductor.aoti_load_package(str(path))
    names = _output_names(path)

    def call(inputs: Mapping[str, np.ndarray]) -> Arrays:
        result = package(*(torch.from_numpy(array) for array in inputs.values()))
        return _named(names, result if isinstance(result, (tuple, list)) else (result,))

    return call


def _named(names: Iterable[str], outputs: Iterable[Any]) -> Arrays:
    """PyTorch's tensors as arrays that the next call does not overwrite."""
    return {name: output.detach().numpy().copy() for name, output in zip(names, outputs, strict=True)}


def _output_names(path: Path) -> list[str]:
    """What `write_output_names` left beside a file."""
    return [str(name) for name in json.loads(path.with_suffix(".json").read_text("utf-8"))["outputs"]]


def write_output_names(path: Path, names: Iterable[str]) -> None:
    """Beside a file whose format has no names for outputs."""
    write_whole(path.with_suffix(".json"), json.dumps({"outputs": list(names)}) + "\n")


def qnn_session(path: Path, entries: Mapping[str, str], chip: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A session with Qualcomm's compiler and the emulator of its tensor processor.

    Args:
        entries: of the session's configuration. chip: the provider's options for a chip, to compile for it.

    Raises MissingExtraError: onnxruntime-qnn is not installed.
    """
    backend = _qnn_backend()
    import onnxruntime

    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == QNN_PROVIDER][:1]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised anyway
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    options.add_provider_for_devices(devices, {"backend_path": backend, **chip})
    with quiet_library(1):
        return onnxruntime.InferenceSession(str(path), sess_options=options)


@functools.cache
def _qnn_backend() -> str:
    """Make Qualcomm's library known to ONNX Runtime, once a process; returns the path of the processor's backend."""
    with needs("export,qnn", "Qualcomm's compiler and emulator are for Linux on x86-64."):
        import onnxruntime
        import onnxruntime_qnn
    onnxruntime.register_execution_provider_library(QNN_PROVIDER, onnxruntime_qnn.get_library_path())
    return str(onnxruntime_qnn.get_qnn_htp_path())


def system_library() -> Path:
    """Qualcomm's library that reads what its compiler wrote, of the package onnxruntime-qnn."""
    import onnxruntime_qnn

    return Path(onnxruntime_qnn.get_library_path()).with_name("libQnnSystem.so")


@contextlib.contextmanager
def quiet_library(*streams: int) -> Iterator[None]:
    """Without what a library writes itself to these streams (1: standard output, 2: errors) when it starts."""
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [(stream, os.dup(stream)) for stream in streams]
    with open(os.devnull, "wb") as nowhere:
        for stream in streams:
            os.dup2(nowhere.fileno(), stream)
        try:
            yield
        finally:
            for stream, own in copies:
                os.dup2(own, stream)
                os.close(own)


def _qnn(path: Path, threads: int | None) -> Loaded:
    """A compiled file in the emulator, the quantised file from which it was compiled on the CPU."""
    if not path.name.endswith(CONTEXT):
        return _onnxruntime(path, threads)
    return functools.partial(run_session, qnn_session(path, {"session.disable_cpu_ep_fallback": "1"}))


def _executorch(path: Path, threads: int | None) -> Loaded:
    with needs("mobile"), quiet_library(2):  # it speaks of the processor, and its dependencies of themselves
        import torch
        from executorch.runtime import Runtime, Verification
    with quiet_library(2):
        method = Runtime.get().load_program(path, verification=Verification.Minimal).load_method("forward")
    names = _output_names(path)

    def call(inputs: Mapping[str, np.ndarray]) -> Arrays:
        return _named(names, method.execute([torch.from_numpy(np.ascontiguousarray(a)) for a in inputs.values()]))

    return call


RUNTIMES: dict[str, Callable[[Path, int | None], Loaded]] = {
    "onnx": _onnxruntime, "int8": _onnxruntime, "qnn": _qnn, "openvino": _openvino, "aoti": _aoti,
    "executorch": _executorch,
    "web": _onnxruntime,  # not by the folder's own script: checking a folder runs no code of it
}  # fmt: skip
