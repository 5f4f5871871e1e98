"""Export a model to one or more targets: write, run, compare; all files at once, or none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix import __version__
from polymix.errors import CapabilityError, OptionError, ParityError, ShapeError
from polymix.export import hexagon, int8
from polymix.export.graph import MAX_INLINE_BYTES, Axes, Graph, about, check_exportable, write_onnx, write_package
from polymix.export.manifest import CHECKS, MANIFEST, OUTPUT_NAMES, Arrays, check, write_arrays, write_manifest
from polymix.export.wide import operator_groups
from polymix.extras import check_installed
from polymix.files import PART, output_folder, writing
from polymix.mixers import TokenMixer

Shared = dict[str, tuple[Path, Axes]]  # by the graph's name: its float ONNX file, and the axes that are free in it
TOLERANCE = 1e-5  # of the float32 targets
FAILED = "-failed"


@dataclass(frozen=True)
class Written:
    """A file that a target left.

    free: axes that may vary. notes: more for its entry in the manifest. data: what it is checked with; None: the
    graph's own inputs. case: a name for these data.
    """

    path: Path
    tolerance: float = TOLERANCE
    free: Axes | None = None
    notes: Mapping[str, Any] | None = None
    data: Arrays | None = None
    case: str = "data"


@dataclass(frozen=True)
class Options:
    """What some targets need: data to calibrate with, schemes of quantisation, their error, and the chip of `qnn`."""

    data: Sequence[Arrays] | None = None
    schemes: Sequence[str] = int8.SCHEMES
    soc: str = hexagon.DEFAULT_CHIP
    max_error: float | None = None


def export(
    model: nn.Module, inputs: Any, out: str | Path, targets: Sequence[str] = ("onnx",), *, source: str | None = None,
    data: Sequence[Arrays] | None = None, schemes: Sequence[str] = int8.SCHEMES, max_error: float | None = None,
    soc: str = hexagon.DEFAULT_CHIP, runtime: str | Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Export a mixer or a model, run each file, and compare it with PyTorch.

    Args:
        model: in evaluation mode, with float32 weights.
        inputs: what it is called with: a tensor, a tuple of tensors, or tensors by name.
        out: a new folder: a folder for each target, the checks' arrays and manifest.json.
        targets: "onnx", "int8", "qnn", "openvino", "aoti", "executorch", "web".
        source: where the model comes from, for the metadata; None: its class.
        data: inputs by name to calibrate int8 and qnn with; None: `inputs`.
        schemes: of int8 and qnn: "a8w8", "a16w8", bits of activations and weights.
        max_error: of int8 and qnn: products (of qnn: operators) get 16 bits, as few as it takes, until the error on the
            data is at most this; see docs/export/int8.md. None: 0.05 in a8w8 and 0.01 in a16w8 for a mixer alone, and
            no limit for other models.
        soc: the chip of qnn, by name, model or Qualcomm's number: "snapdragon-8-gen-3", "SM8650", "57".
        runtime: for web, the folder of npm's onnxruntime-web; None: node_modules here or above.

    Returns:
        What manifest.json holds.

    Raises:
        OptionError: a target is unknown, the folder is not empty, or the model is not ready. ShapeError: an input is no
        tensor, or holds NaN. InputError: the model fails on the inputs. CapabilityError: it cannot be exported.
        ParityError: a file gives other numbers; the files then lie in `out`-failed. MissingExtraError: a target's
        packages are missing.
    """
    return export_graphs(
        [Graph.of(model, inputs, **about(model, source))], out, targets, data=data, schemes=schemes,
        max_error=max_error, soc=soc, runtime=runtime,
    )  # fmt: skip


def export_graphs(
    graphs: Sequence[Graph], out: str | Path, targets: Sequence[str] = ("onnx",), *,
    data: Sequence[Arrays] | None = None, schemes: Sequence[str] = int8.SCHEMES, max_error: float | None = None,
    soc: str = hexagon.DEFAULT_CHIP,
    info: Mapping[str, Any] | None = None, runtime: str | Path | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """As `export`, for several graphs, each a file per target.

    info: more for the manifest. beside: more files by their paths in the folder, such as a tokenizer's.
    """
    for target in targets:
        if target not in WRITERS:
            raise OptionError("targets", repr(target), f"one of {', '.join(WRITERS)}", "Choose one of these.")
    if len(set(targets)) != len(targets) or not targets:
        raise OptionError("targets", repr(tuple(targets)), "different targets, at least one", "Try ('onnx',).")
    with output_folder(out, "out", renamed=True) as folder:
        return _export(graphs, folder, targets, data, schemes, max_error, soc, info or {}, runtime, beside or {})


def _export(
    graphs: Sequence[Graph], folder: Path, targets: Sequence[str], data: Sequence[Arrays] | None,
    schemes: Sequence[str], max_error: float | None, soc: str, info: Mapping[str, Any], runtime: str | Path | None,
    beside: Mapping[str, bytes],
) -> dict[str, Any]:  # fmt: skip
    """The checks that need no file, then all files in a hidden folder, which gets its name at the end."""
    if folder.exists() and any(folder.iterdir()):
        raise OptionError("out", f"{folder}, which is not empty", "a new folder", "Choose another name.")
    for target in targets:
        check_installed(*PACKAGES.get(target, ()), extra=f"export,{target}" if target in EXTRAS else "export")
    if max_error is not None and not (isinstance(max_error, (int, float)) and 0 < max_error < 1):
        raise OptionError("max_error", repr(max_error), "a number between 0 and 1", "Try 0.05.")
    options = Options(data, int8.check_schemes(schemes), hexagon.chip_of(soc)[0], max_error)
    for option, value, default, users in (
        ("schemes", tuple(schemes), int8.SCHEMES, ("int8", "qnn")), ("soc", soc, hexagon.DEFAULT_CHIP, ("qnn",)),
        ("max_error", max_error, None, ("int8", "qnn")),
    ):  # fmt: skip
        if value != default and not set(users) & set(targets):
            got = f"{value!r} without the target {' or '.join(users)}"
            raise OptionError(option, got, "none", f"Leave it out, or add {users[0]}.")
    names = [graph.name for graph in graphs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError("graphs", f"{twice[0]} twice", "graphs with different names", "Rename one of them.")
    package = _web_runtime(targets, runtime)
    for graph in graphs:
        check_exportable(graph.model)
        _check_inputs(graph)
    room = tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}.", suffix=PART)
    with room as scratch, writing(folder, Path(scratch)):
        made = Path(scratch) / folder.name
        (made / CHECKS).mkdir(parents=True)
        for place, file in beside.items():
            (made / place).parent.mkdir(parents=True, exist_ok=True)
            (made / place).write_bytes(file)
        entries: list[dict[str, Any]] = []
        shared: Shared = {}  # the float graph of each name, for targets that start from it
        for graph in graphs:
            for target in targets:
                (made / target).mkdir(exist_ok=True)
                entries += _entries(graph, target, made, shared, options)
        content = {"polymix": __version__, **info, "files": entries}
        site = None
        if package is not None:
            from polymix.export.web.site import TARGET, Site

            site = Site(made, graphs, package)
            entries += site.add_curves(lambda graph: _entries(graph, TARGET, made, shared, options))
            content[TARGET] = site.write(entries)
        write_manifest(made, content)
        results = check(made)
        for entry, result in zip(entries, results, strict=True):
            entry["error"] = result.error
        if site is not None:
            results += site.run(entries)
        write_manifest(made, content)
        wrong = [result for result in results if not result.passed]
        if wrong:
            failed = folder.with_name(folder.name + FAILED)
            if (failed / MANIFEST).exists():  # an earlier failure's
                shutil.rmtree(failed)
            made.rename(failed)
            more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ParityError("model", f"{wrong[0]}{more}", "PyTorch's numbers", f"The files are in {failed}.")
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    return {**content, "out": str(folder)}


def _check_inputs(graph: Graph) -> None:
    for name, value in graph.inputs.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ShapeError(name, "NaN or infinite values", "finite values", "Pass other inputs.")
        if value.dtype in (torch.bfloat16, torch.float16, torch.float64):
            raise ShapeError(name, str(value.dtype), "float32", "Pass inputs.float().")
    graph.call(graph.inputs)


def _entries(graph: Graph, target: str, made: Path, shared: Shared, options: Options) -> list[dict[str, Any]]:
    """Write a graph's files for one target, and the arrays that check them; returns their entries."""
    entries = []
    for written in WRITERS[target](graph, made / target, made, shared, options):
        path = written.path.relative_to(made)
        cases = [graph.inputs, *graph.other_inputs(written.free or {})]
        if written.data is not None:
            cases = [{name: torch.from_numpy(array) for name, array in written.data.items()}]
        for place, inputs in enumerate(cases):
            own = "" if written.data is None else f"-{written.case}"
            stem = f"{CHECKS}/{graph.name}{own}" + (f"-{place}" if place else "")
            _save_case(graph, inputs, made / f"{stem}-inputs.npz", made / f"{stem}-outputs.npz")
            entries.append({
                "path": path.as_posix(), "target": target, "inputs": f"{stem}-inputs.npz",
                "outputs": f"{stem}-outputs.npz", "tolerance": written.tolerance, "bytes": _bytes(written.path),
                "free": sorted({name for axes in (written.free or {}).values() for name in axes.values()}),
                **(written.notes or {}),
            })  # fmt: skip
    return entries


def _save_case(graph: Graph, inputs: Mapping[str, Tensor], inputs_path: Path, outputs_path: Path) -> None:
    if not outputs_path.exists():  # written for another target
        write_arrays(inputs_path, {name: value.detach().cpu().numpy() for name, value in inputs.items()})
        write_arrays(outputs_path, {name: value.cpu().numpy() for name, value in graph.call(inputs).items()})


def _bytes(path: Path) -> int:
    """Of a file and of what lies beside it under its name."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*"))


def float_graph(graph: Graph, made: Path, shared: Shared) -> tuple[Path, Axes]:
    """The float ONNX file of a graph for targets that start from it, and its free axes.

    It is that of the target "onnx", or one beside the export.
    """
    if graph.name not in shared:
        path = made.parent / f"{graph.name}.onnx"
        shared[graph.name] = path, write_onnx(graph, path)
    return shared[graph.name]


def _onnx(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    path = folder / f"{graph.name}.onnx"
    free = write_onnx(graph, path)
    shared[graph.name] = path, free
    return [Written(path, free=free, notes={"opset": 21})]


def _int8(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    model, _ = float_graph(graph, made, shared)
    data = options.data or _calibration(graph)
    reports, written = {}, []
    for scheme in options.schemes:
        path = folder / f"{graph.name}-{scheme}.onnx"
        limit, tolerance = _errors(graph, options, scheme)
        reports[scheme] = int8.quantise(model, path, data, scheme, limit=limit)
        notes = {"measure": "distance", "scheme": scheme}
        written.append(Written(path, tolerance, None, notes, data[0] if options.data else None))
    int8.write_report(folder / f"{graph.name}-{int8.REPORT}", reports)
    return written


def _calibration(graph: Graph) -> Sequence[Arrays]:
    """The graph's own data to calibrate with, where the user gives none."""
    own = {name: value.cpu().numpy() for name, value in graph.inputs.items()}
    return [own] if graph.calibration is None else graph.calibration()


def _openvino(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    """An ONNX file, which OpenVINO reads."""
    path = folder / f"{graph.name}.onnx"
    shutil.copyfile(float_graph(graph, made, shared)[0], path)
    return [Written(path)]


def _qnn(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    """For each scheme a wholly quantised file, which any ONNX runtime takes, and its binary for a chip."""
    name, chip = hexagon.chip_of(options.soc)
    single = one_sample(graph)
    model = made.parent / f"{graph.name}-single.onnx"  # the processor takes fixed sizes alone
    hexagon.write_graph(single, model)
    own = {key: value.cpu().numpy() for key, value in single.inputs.items()}
    batches = options.data or _calibration(graph)
    data = [sample for batch in batches for sample in samples_of(batch, own)]
    reports, written = {}, []
    for scheme in options.schemes:
        path = folder / f"{graph.name}-{scheme}.onnx"
        limit, tolerance = _errors(graph, options, scheme)
        reports[scheme] = int8.quantise(
            model, path, data, scheme, hexagon.quantised_wholly, hexagon.STRENGTHS, limit, operator_groups
        )
        compiled = hexagon.compile_context(path, chip)
        notes = {"measure": "distance", "scheme": scheme}
        said = {
            "chip": {"name": name, **asdict(chip)}, "quantised": path.relative_to(made).as_posix(),
            "binary": compiled.binary.relative_to(made).as_posix(), "binary_bytes": compiled.binary.stat().st_size,
            "compile_seconds": round(compiled.seconds, 2), "operators": hexagon.operators(path),
            "largest_activation": hexagon.largest_activation(path), "run": hexagon.RUN_ON_PHONE,
            "memory": None if compiled.memory is None else asdict(compiled.memory),
        }  # fmt: skip
        written.append(Written(path, tolerance, None, notes, data[0], "single"))
        written.append(Written(compiled.context, CHIP * tolerance, None, {**notes, **said}, data[0], "single"))
    int8.write_report(folder / f"{graph.name}-{int8.REPORT}", reports)
    return written


def _errors(graph: Graph, options: Options, scheme: str) -> tuple[float | None, float]:
    """The error beyond which tensors get 16 bits (None: none does), and that beyond which the export fails."""
    if options.max_error is not None:
        return options.max_error, options.max_error
    return MIXER_ERRORS[scheme] if isinstance(graph.model, TokenMixer) else (None, MODEL_ERRORS[scheme])


def one_sample(graph: Graph) -> Graph:
    """The graph with fixed sizes, and the first sample alone where the batch is free."""
    batched = {key for key, axes in graph.free.items() if axes.get(0) == "batch"}
    inputs = {key: value[:1] if key in batched else value for key, value in graph.inputs.items()}
    return replace(graph, inputs=inputs, free={})


def samples_of(batch: Arrays, like: Arrays) -> Iterator[Arrays]:
    """A batch in parts that have the sizes of `like`."""
    parts = {key: max(1, len(array) // max(1, len(like[key]))) if array.ndim else 1 for key, array in batch.items()}
    for place in range(min(parts.values())):
        yield {key: array[place * len(like[key]) : (place + 1) * len(like[key])] if array.ndim else array
               for key, array in batch.items()}  # fmt: skip


def _aoti(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    """A package of AOTInductor: machine code for this processor, which PyTorch's C++ runtime loads."""
    path = folder / f"{graph.name}.pt2"
    write_package(graph, path)
    return [Written(path, notes=_names_beside(path, made))]


def _executorch(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    """A program of ExecuTorch; the manifest says how many of its parts XNNPACK runs."""
    from polymix.export.executorch import write_program

    path = folder / f"{graph.name}.pte"
    parts = write_program(graph, path)
    return [Written(path, notes={"xnnpack_parts": parts, **_names_beside(path, made)})]


def _names_beside(path: Path, made: Path) -> dict[str, str]:
    """What the manifest says of a file whose outputs are named by another one beside it."""
    return {OUTPUT_NAMES: path.with_suffix(".json").relative_to(made).as_posix()}


def _web_runtime(targets: Sequence[str], runtime: str | Path | None) -> Path | None:
    """npm's onnxruntime-web for the target web; None for other targets."""
    if "web" in targets:
        from polymix.export.web.runtime import find_runtime

        return find_runtime(runtime)
    if runtime is not None:
        raise OptionError("runtime", f"{runtime} without the target web", "none", "Leave it out, or add web.")
    return None


def _web(graph: Graph, folder: Path, made: Path, shared: Shared, options: Options) -> list[Written]:
    """The ONNX file that the page loads; `polymix.export.web` writes the rest of the folder."""
    size = sum(value.nbytes for value in graph.model.state_dict().values())
    if size > MAX_INLINE_BYTES:
        got = f"{size / 1e9:.1f} GB of weights"
        raise CapabilityError(
            "model", got, f"at most {MAX_INLINE_BYTES / 1e9} GB in a browser", "Export a smaller model."
        )
    path = folder / "models" / f"{graph.name}.onnx"
    path.parent.mkdir(exist_ok=True)
    source, free = float_graph(graph, made, shared)
    shutil.copyfile(source, path)
    return [Written(path, free=free)]


# Of a mixer alone: the distance from which its products, which are few and soon tried, get 16 bits; and the largest
# that it may have. Of a whole model, in which errors add up layer by layer: the largest.
MIXER_ERRORS = {"a8w8": (0.05, 0.1), "a16w8": (0.01, 0.02)}
MODEL_ERRORS = {"a8w8": 0.3, "a16w8": 0.1}
CHIP = 2  # times as much after compiling: the processor rounds long sums and quotients, as of linear attention, more
Writer = Callable[[Graph, Path, Path, "Shared", Options], "list[Written]"]
WRITERS: dict[str, Writer] = {
    "onnx": _onnx, "int8": _int8, "qnn": _qnn, "openvino": _openvino, "aoti": _aoti, "executorch": _executorch,
    "web": _web,
}  # fmt: skip
_ONNX = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {"onnx": _ONNX, "int8": _ONNX, "qnn": (*_ONNX, "onnxruntime_qnn"), "openvino": (*_ONNX, "openvino"),
            "web": (*_ONNX, "jinja2")}  # fmt: skip
EXTRAS = ("qnn", "openvino")  # that are called as the target; the others are in "export"
