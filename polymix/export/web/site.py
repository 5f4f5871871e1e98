"""The folder of the target "web": what a static server serves."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polymix import __version__
from polymix.errors import CapabilityError
from polymix.export.graph import Graph
from polymix.export.manifest import MEASURES, Checked, read_arrays
from polymix.export.web.latency import ATTENTION, TOKENS, Curve, curves
from polymix.export.web.runtime import as_files, copy_runtime, node, run_in_node
from polymix.files import write_whole
from polymix.pages import render

TARGET = "web"
PAGE = Path(__file__).parent / "page"
ARRAYS, RUNTIME = "checks", "ort"
TIMED_TOLERANCE = 1e-4  # of files that are only timed: ONNX Runtime's DFT of 576 points is 4e-5 off
Entries = list[dict[str, Any]]


@dataclass
class Site:
    """The web folder of an export.

    Args:
        made: the folder of the whole export. graphs: the models. package: npm's onnxruntime-web.
    """

    made: Path
    graphs: Sequence[Graph]
    package: Path
    curves: list[dict[str, Any]] = field(default_factory=list)
    version: str = ""

    @property
    def folder(self) -> Path:
        return self.made / TARGET

    def add_curves(self, write: Callable[[Graph], Entries]) -> Entries:
        """Write the mixers that the page times, each by `write`; returns their entries in the manifest."""
        entries: Entries = []
        for line in curves(graph.model for graph in self.graphs):
            label = "softmax attention" if line.attention else line.label
            by_tokens, note = ({}, f": {line.omitted}") if line.omitted else self._written(line, write)
            self.curves.append({
                "label": label, "attention": line.attention, "dim": line.dim,
                "files": {tokens: self._url(self.made / own[0]["path"]) for tokens, own in by_tokens.items()},
                "note": f"{label} is not measured{note}." if note else "",
            })  # fmt: skip
            entries += [{**entry, "tolerance": TIMED_TOLERANCE} for own in by_tokens.values() for entry in own]
        return entries

    def _written(self, line: Curve, write: Callable[[Graph], Entries]) -> tuple[dict[int, Entries], str]:
        """The entries of a curve's files by numbers of tokens, 0 for all; and which cannot be exported, in words."""
        by_tokens: dict[int, Entries] = {}
        for by_length in (False, True):
            for tokens, graph in line.graphs(by_length):
                try:
                    own = write(graph)
                except CapabilityError:
                    if tokens:
                        return by_tokens, f" from {tokens} tokens on: it cannot be exported for them"
                    break
                if not tokens and "tokens" not in own[0]["free"]:
                    for path in {entry[part] for entry in own for part in ("path", "inputs", "outputs")}:
                        (self.made / path).unlink()
                    break
                by_tokens[tokens] = own
            else:
                break
        return by_tokens, ""

    def write(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Write the page, its scripts, the runtime and the arrays that it compares; returns what the manifest says."""
        self.version = copy_runtime(self.package, self.folder / RUNTIME)
        for script in sorted(PAGE.glob("*.js")):
            shutil.copyfile(script, self.folder / script.name)
        (self.folder / ARRAYS).mkdir()
        models = [self._model(graph, entries) for graph in self.graphs]
        content = {"polymix": __version__, "models": models, "curves": self.curves, "tokens": TOKENS}
        write_whole(self.folder / "site.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        *first, last = (model["label"] for model in models)
        title = f"{', '.join(first)} and {last}" if first else last
        drawn = next((graph.drawing.classes for graph in self.graphs if graph.drawing is not None), ())
        digits = set(drawn) == set("0123456789")
        page = render("export/web/page/index.html.j2", title=title, runtime=self.version,
                      tolerance=max(model["tolerance"] for model in models),
                      hint="Draw a digit" if digits else "Draw here")  # fmt: skip
        write_whole(self.folder / "index.html", page)
        return {"runtime": f"onnxruntime-web {self.version}", "ran_in_node": node() is not None}

    def _model(self, graph: Graph, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        entry = next(entry for entry in entries
                     if entry["target"] == TARGET and Path(entry["path"]).stem == graph.name)  # fmt: skip
        files: dict[str, dict[str, str]] = {}
        for part in ("inputs", "outputs"):
            paths = as_files(read_arrays(self.made / entry[part]), self.folder / ARRAYS / f"{graph.name}-{part}")
            files[part] = {name: self._url(Path(path)) for name, path in paths.items()}
        single = "batch" in entry["free"] or len(next(iter(graph.inputs.values()))) == 1
        return {
            "name": graph.name, "label": self._label(graph), "file": self._url(self.made / entry["path"]),
            "bytes": entry["bytes"], "tolerance": entry["tolerance"], **files,
            "drawing": None if graph.drawing is None or not single else graph.drawing.to_dict(),
        }  # fmt: skip

    def _url(self, path: Path) -> str:
        return quote(path.relative_to(self.folder).as_posix())

    def _label(self, graph: Graph) -> str:
        """The model's mixer, with the file's name where there are several models of it; or where it comes from."""

        def plain(other: Graph) -> str:
            source = str(other.about.get("source") or other.name).rpartition("/")[2]  # not the folder's whole path
            return str(other.about.get("mixer") or source)

        same = sum(plain(other) == plain(graph) for other in self.graphs)
        label = "softmax attention" if plain(graph) == ATTENTION else plain(graph)
        return label if same == 1 else f"{label} ({graph.name})"

    def run(self, entries: Sequence[dict[str, Any]]) -> list[Checked]:
        """Run all of the site's files by its own runtime in Node.js, and compare; notes each error in its entry.

        Empty if Node.js is not installed: the page still compares the models when it is opened.
        """
        own = [entry for entry in entries if entry["target"] == TARGET]
        if node() is None:
            return []
        with tempfile.TemporaryDirectory() as scratch:
            program, arrays = Path(scratch) / "program", Path(scratch) / "arrays"
            program.mkdir()
            arrays.mkdir()
            jobs: list[dict[str, Any]] = []
            for place, entry in enumerate(own):
                inputs = as_files(read_arrays(self.made / entry["inputs"]), arrays / f"{place}-inputs")
                expected = as_files(read_arrays(self.made / entry["outputs"]), arrays / f"{place}-outputs")
                jobs.append(
                    {"model": str((self.made / entry["path"]).resolve()), "inputs": inputs, "outputs": expected}
                )
            failures = run_in_node(self.folder / RUNTIME, jobs, program)
            results = []
            for entry, job, failure in zip(own, jobs, failures, strict=True):
                path = f"{entry['path']} in WebAssembly"
                if failure is not None:
                    results.append(Checked(path, TARGET, float("inf"), entry["tolerance"], failure))
                    continue
                outputs = {name: _read(Path(output)) for name, output in job["outputs"].items()}
                error = MEASURES["largest"](outputs, read_arrays(self.made / entry["outputs"]))
                entry["error_in_webassembly"] = error
                results.append(Checked(path, TARGET, error, entry["tolerance"]))
        return results


def _read(path: Path) -> Any:
    import numpy as np

    return np.load(path, allow_pickle=False)
