"""onnxruntime-web, npm's package of ONNX Runtime as WebAssembly: where it is, and what of it a page needs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polymix.errors import CapabilityError, DataError, MissingExtraError, one_line
from polymix.export.manifest import Arrays

PACKAGE = "onnxruntime-web"
# Files of the package by their names beside the page. The script is called .js because some servers do not know .mjs.
SCRIPT, BINARY, ABOUT = "ort.js", "ort-wasm-simd-threaded.wasm", f"{PACKAGE}.json"
FILES = {SCRIPT: "dist/ort.wasm.bundle.min.mjs", BINARY: "dist/ort-wasm-simd-threaded.wasm", ABOUT: "package.json"}
RUNNER = Path(__file__).parent / "run_in_node.mjs"
TIME_LIMIT = 600  # seconds for all files in Node.js


def find_runtime(folder: str | Path | None = None) -> Path:
    """The folder of npm's onnxruntime-web.

    Args:
        folder: the package, or a folder that it was installed in; None: node_modules of the current folder or of one
            above it, as Node.js looks for packages.
    Raises:
        MissingExtraError: it is not there, or too old.
    """
    if folder is None:
        here = Path.cwd()
        places = [parent / "node_modules" / PACKAGE for parent in (here, *here.parents)]
    else:
        places = [Path(folder), Path(folder) / PACKAGE, Path(folder) / "node_modules" / PACKAGE]
    package = next((place for place in places if (place / "dist").is_dir()), None)
    why, install = "The web page runs on it; --runtime names its folder.", f"npm install {PACKAGE}"
    if package is None:
        state = f"is not in {'node_modules here or above' if folder is None else folder}"
        raise MissingExtraError(PACKAGE, why=why, state=state, install=install)
    if lacking := [name for name in FILES.values() if not (package / name).is_file()]:
        state = f"in {package} lacks {lacking[0]}, which 1.20 or newer has"
        raise MissingExtraError(PACKAGE, why=why, state=state, install=install)
    return package


def copy_runtime(package: Path, folder: Path) -> str:
    """Copy what a page needs of the package into a new folder; returns the package's version."""
    folder.mkdir()
    for name, source in FILES.items():
        shutil.copyfile(package / source, folder / name)
    try:
        return str(json.loads((folder / ABOUT).read_text("utf-8"))["version"])
    except (ValueError, KeyError, TypeError) as error:
        got = f"{package / 'package.json'} ({one_line(error)})"
        raise DataError(
            "runtime", got, f"the package.json of {PACKAGE}", f"Run npm install {PACKAGE} again."
        ) from error


def node() -> str | None:
    """The path of Node.js; None if it is not installed."""
    return shutil.which("node")


def run_in_node(runtime: Path, jobs: Sequence[Mapping[str, Any]], scratch: Path) -> list[str | None]:
    """Run ONNX files by onnxruntime-web in Node.js, in one process.

    Args:
        runtime: a folder that `copy_runtime` filled, of a package that you trust: its script is run.
        jobs: "model", the path of a file; "inputs" and "outputs", paths of .npy files by the graph's names. The outputs
            are written.
        scratch: an empty folder for the process.
    Returns:
        For each job the runtime's error in one line, or None.
    Raises:
        CapabilityError: Node.js fails altogether.
    """
    program = node()
    assert program is not None, "the caller has looked"
    # Node.js takes a .js file for a module by the package.json beside it.
    for name in (SCRIPT, BINARY):
        shutil.copyfile(runtime / name, scratch / name)
    shutil.copyfile(Path(__file__).parent / "page" / "npy.js", scratch / "npy.js")
    shutil.copyfile(RUNNER, scratch / "run.js")
    (scratch / "package.json").write_text('{"type": "module"}')
    (scratch / "jobs.json").write_text(json.dumps(list(jobs)))
    try:
        done = subprocess.run(
            [program, scratch / "run.js"], capture_output=True, timeout=TIME_LIMIT, check=True, text=True
        )
        errors = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()[-1:]
        got = f"Node.js, which fails ({said[0][:200] if said else one_line(error)[:200]})"
        raise CapabilityError("runtime", got, f"{PACKAGE} to run in it", "Install Node.js 18 or newer.") from error
    return [None if text is None else " ".join(str(text).split())[:200] for text in errors]


def as_files(arrays: Arrays, stem: Path) -> dict[str, str]:
    """Write arrays as .npy files that start with `stem`; returns the files by the arrays' names.

    Raises CapabilityError: an array has a type that pages cannot hold.
    """
    import numpy as np

    paths = {}
    for place, (name, array) in enumerate(arrays.items()):
        if array.dtype.str not in TYPES:
            got = f"{name} as {array.dtype}"
            raise CapabilityError("model", got, f"one of {', '.join(TYPES.values())}", "Cast it in the model.")
        path = stem.with_name(f"{stem.name}-{place}.npy")
        np.save(path, np.ascontiguousarray(array))
        paths[name] = str(path)
    return paths


# What npy.js reads and writes: types of numpy, and what they are called.
TYPES = {"<f4": "float32", "<f8": "float64", "<i8": "int64", "<i4": "int32", "|u1": "uint8", "|i1": "int8",
         "|b1": "bool"}  # fmt: skip
