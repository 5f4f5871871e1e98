"""Which mixers torch.onnx.export can export, and whether ONNX Runtime then gives the same numbers.

    pip install onnx onnxscript onnxruntime
    python benchmarks/onnx_export.py benchmarks/results/onnx.json

Each mixer (32 channels, 64 tokens, float32, with its default options and a grid where it needs one) is exported
with `dynamo=True` and a free batch size, and run with another one. Then the same with a free number of tokens.
The file is written after each mixer; the same command continues.
"""

import argparse
import contextlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

import polymix
from polymix._io import one_line, write_whole
from polymix.errors import PolymixError

DIM, TOKENS, OTHER_TOKENS = 32, 64, 49
CLOSE = 1e-4  # relative to the largest output
REQUIRED: tuple[dict[str, Any], ...] = ({}, {"grid": (8, 8)}, {"length": TOKENS})


def build(name: str) -> tuple[polymix.TokenMixer, dict[str, Any]]:
    """A mixer, and the options that it needs for 64 tokens."""
    for options in REQUIRED:
        try:
            torch.manual_seed(0)
            mixer = polymix.create_mixer(name, DIM, **options).eval()
            with torch.no_grad():
                mixer(torch.randn(1, TOKENS, DIM))
        except PolymixError:
            continue
        return mixer, options
    raise SystemExit(f"{name} needs options that this script does not know")


def difference(mixer: polymix.TokenMixer, free: dict[int, str], other: torch.Tensor) -> float:
    """The largest difference between ONNX Runtime and PyTorch on `other`, relative to the largest output."""
    import onnxruntime

    axes = {axis: torch.export.Dim(name, min=2, max=4096) for axis, name in free.items()}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
        program = torch.onnx.export(
            mixer, (torch.randn(2, TOKENS, DIM),), dynamo=True, verbose=False, dynamic_shapes={"x": axes}
        )
        wanted = mixer(other)
    content = io.BytesIO()
    program.save(content)
    session = onnxruntime.InferenceSession(content.getvalue(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    return float((torch.from_numpy(given) - wanted).abs().max() / wanted.abs().max())


def attempt(mixer: polymix.TokenMixer, free: dict[int, str], other: torch.Tensor) -> dict[str, Any]:
    try:
        error = difference(mixer, free, other)
    except Exception as failure:  # whatever the exporter raises
        root: BaseException = failure
        while root.__cause__ is not None:
            root = root.__cause__
        return {"works": False, "error": None, "reason": one_line(root)[:160]}
    return {"works": error < CLOSE, "error": error, "reason": "" if error < CLOSE else "other numbers"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    path = parser.parse_args().out
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import onnx
    import onnxruntime
    import onnxscript

    packages = {"torch": torch, "onnx": onnx, "onnxscript": onnxscript, "onnxruntime": onnxruntime}
    content: dict[str, Any] = {"versions": {name: it.__version__ for name, it in packages.items()}, "rows": []}
    if path.exists():
        content = json.loads(path.read_text("utf-8"))
    for name in polymix.list_mixers():
        if name in {row["mixer"] for row in content["rows"]}:
            continue
        mixer, options = build(name)
        row = {"mixer": name, "options": options, "batch": attempt(mixer, {0: "batch"}, torch.randn(3, TOKENS, DIM))}
        tokens = None
        if mixer.capabilities.any_length and "grid" not in options and row["batch"]["works"]:
            tokens = attempt(mixer, {0: "batch", 1: "tokens"}, torch.randn(3, OTHER_TOKENS, DIM))
        content["rows"].append({**row, "tokens": tokens})
        write_whole(path, json.dumps(content, indent=1) + "\n")
        print(name, content["rows"][-1], flush=True)


if __name__ == "__main__":
    main()
