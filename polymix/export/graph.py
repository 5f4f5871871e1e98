"""A PyTorch model as an ONNX file: names and free axes that a person can read, standard operators alone."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polymix import __version__
from polymix.errors import CapabilityError, InputError, MissingExtraError, OptionError, ShapeError, one_line
from polymix.export.manifest import Arrays, onnx_session, run_session, write_output_names
from polymix.extras import check_installed
from polymix.files import disk_error, write_whole
from polymix.mixers import TokenMixer
from polymix.ops.related import delta_rule, selective_scan

if TYPE_CHECKING:
    from polymix.export.web.drawing import Drawing

OPSET = 21
MAX_AXIS = 1 << 20  # of a free axis
MAX_INLINE_BYTES = 1_800_000_000  # larger weights lie in a file beside the graph: protobuf ends at 2 GiB
STANDARD = ("", "ai.onnx")
CUTS = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Split")
Axes = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Graph:
    """What becomes one file.

    Args:
        name: of the file. model: in evaluation mode. inputs: by name, in the order of the model's arguments.
        free: axes that may have other sizes: {"x": {0: "batch", 1: "tokens"}}. The last of them are fixed one after
            another where the model does not allow them to vary.
        about: metadata for the file.
        named: pass the inputs by name, not by place.
        drawing: how a drawing becomes an image for a classifier, for the canvas of the target "web".
        calibration: returns inputs by name to calibrate int8 and qnn with; None: `inputs` are all that there is.
    """

    name: str
    model: nn.Module
    inputs: dict[str, Tensor]
    free: Axes = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    named: bool = True
    drawing: Drawing | None = None
    calibration: Callable[[], Sequence[Arrays]] | None = None

    @staticmethod
    def of(model: nn.Module, inputs: Any, name: str = "model", **about: Any) -> Graph:
        """The graph of a call model(inputs), model(*inputs) or model(**inputs), with a free batch.

        Raises ShapeError: an input is not a tensor.
        """
        named = isinstance(inputs, Mapping)
        if named:
            values = dict(inputs)
        else:
            arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
            names = [p.name for p in inspect.signature(model.forward).parameters.values()
                     if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]  # fmt: skip
            names += [f"input_{place}" for place in range(len(names), len(arguments))]
            values = dict(zip(names, arguments, strict=False))
        for key, value in values.items():
            if not isinstance(value, Tensor):
                raise ShapeError(key, type(value).__name__, "a tensor", "Bind other arguments with a wrapping module.")
        first = next(iter(values.values()), None)
        if first is None:
            raise ShapeError("inputs", "none", "at least one tensor", "Pass what the model is called with.")
        batch = first.shape[0] if first.ndim else 0
        free = {key: {0: "batch"} for key, value in values.items() if batch and value.ndim and len(value) == batch}
        return Graph(name, model, values, free, about, named)

    def call(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's outputs by name, without gradients. Raises InputError: it fails on these inputs."""
        try:
            with torch.no_grad():
                return outputs_of(self.model(**inputs) if self.named else self.model(*inputs.values()))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError) as error:
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            got = f"{shapes}, on which {type(self.model).__name__} fails ({one_line(error)[:200]})"
            raise InputError("inputs", got, "what the model takes", "Pass other inputs.") from error

    def other_inputs(self, free: Axes) -> Iterator[dict[str, Tensor]]:
        """Inputs with other sizes of the free axes: one sample fewer or more, and half of the tokens."""
        axes = {name for axis in free.values() for name in axis.values()}
        if "batch" in axes:
            yield self._resized(free, "batch", lambda size: size + 1)
            yield self._resized(free, "batch", lambda size: 1)
        for name in sorted(axes - {"batch"}):
            yield self._resized(free, name, lambda size: size // 2 + 1)

    def _resized(self, free: Axes, axis_name: str, size: Callable[[int], int]) -> dict[str, Tensor]:
        values = dict(self.inputs)
        for key, axes in free.items():
            for axis, name in axes.items():
                if name == axis_name:
                    length = values[key].shape[axis]
                    places = torch.arange(size(length), device=values[key].device) % length
                    values[key] = values[key].index_select(axis, places)
        return values


def about(model: nn.Module, source: str | None) -> dict[str, Any]:
    """Metadata of a file: version, source, and the config of a mixer."""
    said: dict[str, Any] = {"polymix_version": __version__, "source": source or type(model).__name__}
    if isinstance(model, TokenMixer):
        said["config"] = model.config.to_dict()
        said["source"] = source or f"mixer {model.name}"
    return said


def outputs_of(result: Any) -> dict[str, Tensor]:
    """A model's result as tensors by name: "output", the names of a dict or of transformers' outputs, or output_0 …"""
    if isinstance(result, Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, Tensor)}
    if isinstance(result, (tuple, list)) and all(isinstance(value, Tensor) for value in result):
        names = getattr(result, "_fields", [f"output_{place}" for place in range(len(result))])
        return dict(zip(names, result, strict=True))
    what = type(result).__name__
    raise CapabilityError("model", f"one that returns a {what}", "tensors, by place or name", "Wrap it in a module.")


class Plain(nn.Module):
    """A graph's model with its inputs by place and its outputs as a tuple."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.model, self.names, self.named = graph.model, tuple(graph.inputs), graph.named

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self.names, values, strict=True))
        return tuple(outputs_of(self.model(**inputs) if self.named else self.model(*values)).values())


def check_exportable(model: nn.Module) -> None:
    """Raise a typed error for what no exporter takes: training mode, other types than float32, kernels by name."""
    if model.training:
        raise OptionError("model", "a model in training mode", "one in evaluation mode", "Call model.eval() first.")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise OptionError("model", f"{name} in {parameter.dtype}", "float32 weights", "Call model.float() first.")
    for name, module in model.named_modules():
        if isinstance(module, TokenMixer):
            chosen = module.config.__dict__.get("impl", "auto")
            if chosen not in ("auto", "eager"):
                cure = 'Build it with impl="auto".'
                raise OptionError("impl", f"{chosen!r} in {name or 'the mixer'}", "plain PyTorch in the graph", cure)


def write_onnx(graph: Graph, path: Path) -> Axes:
    """Write a graph's ONNX file; returns the axes that stayed free.

    Raises:
        CapabilityError: the exporter fails, or the graph would need operators that ONNX does not have.
        MissingExtraError: onnx or onnxscript is missing.
    """
    check_installed("onnx", "onnxscript", "onnxruntime", extra="export")
    failure: Exception | None = None
    # ONNX Runtime refuses some three-dimensional convolutions unless the exporter has rewritten the graph.
    for free, rewrite in itertools.product(_fewer(_accepted(graph)), (False, True)):
        try:
            program = _exported(graph, free, rewrite)
            _check_operators(graph, program)
            _save(graph, program, path)
            session = onnx_session(path)
            for inputs in (graph.inputs, *graph.other_inputs(free)):  # some runtimes fail on other sizes alone
                run_session(session, {name: value.numpy() for name, value in inputs.items()})
            return free
        except (CapabilityError, MissingExtraError):
            raise
        except Exception as error:  # whatever the exporter or the runtime raises
            failure = error
    assert failure is not None
    raise refusal(graph, failure) from failure


def _save(graph: Graph, program: Any, path: Path) -> None:
    about = {key: value if isinstance(value, str) else json.dumps(value) for key, value in graph.about.items()}
    program.model.metadata_props.update(about)
    if sum(value.nbytes for value in graph.model.state_dict().values()) > MAX_INLINE_BYTES:
        program.save(str(path), external_data=True)
    else:
        write_whole(path, lambda part: program.save(str(part), external_data=False))


def _accepted(graph: Graph) -> Axes:
    """The free axes of a graph without those in which the model itself takes one size alone."""
    names = dict.fromkeys(name for axes in graph.free.values() for name in axes.values())
    taken = []
    for name in names:
        only = {key: {axis: other for axis, other in axes.items() if other == name} for key, axes in graph.free.items()}
        with contextlib.suppress(InputError):
            for inputs in graph.other_inputs(only):
                graph.call(inputs)
            taken.append(name)
    return {key: {axis: name for axis, name in axes.items() if name in taken} for key, axes in graph.free.items()}


def write_package(graph: Graph, path: Path) -> None:
    """Write a graph as a package of AOTInductor, for the inputs' own sizes, with its outputs' names beside it.

    Raises CapabilityError: it does not compile, perhaps for want of a C++ compiler.
    """
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(Plain(graph).eval(), tuple(graph.inputs.values()))
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    except Exception as error:  # whatever the compiler raises
        raise refusal(graph, error) from error
    write_output_names(path, graph.call(graph.inputs))


def _fewer(free: Axes) -> Iterator[Axes]:
    """All free axes; then without their last name, and so on; then none."""
    names = list(dict.fromkeys(name for axes in free.values() for name in axes.values()))
    for count in range(len(names), -1, -1):
        free_names = names[:count]
        yield {key: {axis: name for axis, name in axes.items() if name in free_names} for key, axes in free.items()}


def _exported(graph: Graph, free: Axes, rewrite: bool) -> Any:
    from onnxscript import optimizer

    inputs = graph.inputs
    if any(axes.get(0) == "batch" and len(inputs[key]) == 1 for key, axes in free.items()):
        inputs = graph._resized(free, "batch", lambda size: 2)  # a size of one would be taken as fixed
    dims = {name: torch.export.Dim(name, min=1 if name == "batch" else 2, max=MAX_AXIS)
            for axes in free.values() for name in axes.values()}  # fmt: skip
    shapes = tuple({axis: dims[name] for axis, name in free.get(key, {}).items()} for key in inputs)
    names = list(graph.call(graph.inputs))
    with quiet(), torch.no_grad(), scans_as_loops():
        program = torch.onnx.export(
            Plain(graph).eval(), tuple(inputs.values()), dynamo=True, verbose=False, opset_version=OPSET,
            input_names=list(inputs), output_names=names, dynamic_shapes=(shapes,),
            custom_translation_table={torch.ops.aten.sort.stable: _stable_sort}, optimize=rewrite,
        )  # fmt: skip
        # The exporter's own rewriting takes an eps of 1e-15 for zero and drops it.
        assert program is not None
        optimizer.inline(program.model)
        optimizer.fold_constants(program.model, should_fold=_of_weights)
        optimizer.remove_unused_nodes(program.model)
        return program


def _of_weights(node: Any) -> bool | None:
    """Fold what only cuts weights or gives them another shape: they are quantised only if they are constants.

    Not where another operator reads the weights, as an embedding's, that would then be stored twice.
    """
    read = [reader for value in node.inputs[:1] for reader in value.consumers()]
    return True if all(each.op_type in CUTS for each in [node, *read]) else None


def _stable_sort(x: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """aten.sort as ONNX's TopK of all elements, which puts equal ones in their order."""
    from onnxscript import opset21 as op

    length = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    kind = x.dtype
    wide = op.Cast(x, to=7) if str(kind) in ("UINT8", "BOOL") else x  # TopK does not take bytes in every runtime
    values, places = op.TopK(wide, length, axis=dim, largest=int(descending), sorted=1)
    return (op.CastLike(values, x) if wide is not x else values), places


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's own progress and warnings: what matters becomes an error of polymix."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def scans_as_loops() -> Iterator[None]:
    """Trace the recurrences of Mamba and delta rules as PyTorch's scan, which becomes ONNX's Scan."""
    from torch._higher_order_ops.scan import scan

    def loop(a: Tensor, b: Tensor, start: Tensor, reverse: bool = False) -> Tensor:
        def step(h: Tensor, now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            after = now[0] * h + now[1]
            return after, after.clone()

        _, states = scan(step, start, (a.transpose(0, 1), b.transpose(0, 1)), dim=0, reverse=reverse)
        return states.transpose(0, 1)

    def matrix_loop(step: Tensor, gain: Tensor, start: Tensor) -> Tensor:
        def apply(S: Tensor, now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            after = now[0] @ S + now[1]
            return after, after.clone()

        _, states = scan(apply, start, (step.movedim(2, 0), gain.movedim(2, 0)), dim=0)
        return torch.cat((start.unsqueeze(2), states.movedim(0, 2)), 2)

    plain = selective_scan.linear_scan, delta_rule.matrix_scan
    selective_scan.linear_scan, delta_rule.matrix_scan = loop, matrix_loop
    try:
        yield
    finally:
        selective_scan.linear_scan, delta_rule.matrix_scan = plain


def refusal(graph: Graph, error: BaseException) -> CapabilityError | OSError:
    """The error for a graph that cannot be written: of the disk, or else of the model."""
    if (number := disk_error(error)) is not None:
        return OSError(number, os.strerror(number))
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    what = graph.model.name if isinstance(graph.model, TokenMixer) else type(graph.model).__name__
    got = f"{what} as {graph.name}, which cannot be exported ({one_line(root)[:200]})"
    return CapabilityError("model", got, "a model that PyTorch's exporter takes", "Try another mixer.")


def _check_operators(graph: Graph, program: Any) -> None:
    """Raise CapabilityError for an operator that ONNX does not have."""
    nodes = list(program.model.graph.all_nodes())
    for function in program.model.functions.values():
        nodes += list(function.all_nodes())
    own = {function[0] for function in program.model.functions}
    strange = sorted({f"{node.domain}::{node.op_type}" for node in nodes if node.domain not in STANDARD
                      and node.domain not in own})  # fmt: skip
    if strange:
        got = f"{type(graph.model).__name__} with {', '.join(strange)}"
        raise CapabilityError("model", got, "operators of ONNX", "Use mixers with impl='auto'.")
