"""Which mixers export to ONNX, in which modes, and how near ONNX Runtime's numbers are to PyTorch's.

    pip install -c constraints.txt ".[export]"
    python benchmarks/onnx_export.py benchmarks/results/onnx.json

Each mixer (32 channels, 64 tokens, float32, default options, a grid where needed) is exported in each mode that it
has and run with other batch sizes and, where these are free, other numbers of tokens. The file is written after each
mixer; the same command continues.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnxruntime
import onnxscript
import torch
from saving import save

import polymix
from polymix.errors import PolymixError
from polymix.export.modes import mixer_graphs, modes_of
from polymix.export.write import export_graphs

DIM, TOKENS = 32, 64
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


def attempt(mixer: polymix.TokenMixer, mode: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        try:
            content = export_graphs(mixer_graphs(mixer, TOKENS, modes=(mode,)), Path(folder) / "out")
        except PolymixError as refusal:
            return {"mode": mode, "works": False, "error": None, "free": [], "reason": str(refusal).replace(folder, "")}
    error = max(entry["error"] for entry in content["files"])
    return {"mode": mode, "works": True, "error": error, "free": content["files"][0]["free"], "reason": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    path = parser.parse_args().out
    packages = {"torch": torch, "onnx": onnx, "onnxscript": onnxscript, "onnxruntime": onnxruntime}
    content: dict[str, Any] = {"versions": {name: it.__version__ for name, it in packages.items()}, "rows": []}
    if path.exists():
        content = json.loads(path.read_text("utf-8"))
    rows = {row["mixer"]: row for row in content["rows"]}
    for name in polymix.list_mixers():
        mixer, options = build(name)
        row = rows.setdefault(name, {"mixer": name, "options": options, "modes": []})
        done = {each["mode"] for each in row["modes"]}
        for mode in [mode for mode in modes_of(mixer) if mode not in done]:
            row["modes"].append(attempt(mixer, mode))
            content["rows"] = list(rows.values())
            save(content, path)
            print(name, row["modes"][-1], flush=True)


if __name__ == "__main__":
    main()
