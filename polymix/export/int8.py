"""ONNX files with 8-bit weights: static quantisation, calibrated on data, and a report of the errors layer by layer.

`quantise` is shared by the targets: for each it tries kinds of ranges and strengths of equal ranges (`equalise`), and
keeps what is nearest to float32 on the data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from polymix.errors import CapabilityError, OptionError
from polymix.export.equalise import equalised
from polymix.export.graph import quiet
from polymix.export.manifest import Arrays, distance, onnx_session, run_session
from polymix.export.onnx_graphs import attribute
from polymix.export.wide import PRODUCTS, Group, fewest, product_groups
from polymix.files import disk_error, write_whole

METHODS = ("minmax", "percentile", "entropy")
PERCENTILE = 99.99
IMPROVEMENT = 0.95  # of the error so far, from which another way of quantising is taken
ACTIVATIONS = {"a8w8": "QInt8", "a16w8": "QUInt16"}
SCHEMES = tuple(ACTIVATIONS)
REPORT = "report.json"


def check_schemes(schemes: Sequence[str]) -> Sequence[str]:
    """Raises OptionError: a scheme is unknown, twice there, or there is none."""
    if not schemes or len(set(schemes)) != len(schemes) or not set(schemes) <= set(SCHEMES):
        raise OptionError("schemes", repr(tuple(schemes)), f"some of {', '.join(SCHEMES)}", "Choose one or both.")
    return schemes


class Quantiser(Protocol):
    """Writes a quantised copy of a float32 file, with ranges by one of METHODS; the tensors `wide` get 16 bits."""

    def __call__(
        self, model: Path, out: Path, data: Sequence[Arrays], scheme: str, method: str, wide: Collection[str] = ()
    ) -> None: ...


def quantise(
    model: Path, out: Path, data: Sequence[Arrays], scheme: str, write: Quantiser | None = None,
    strengths: Sequence[float | None] = (None, 0.5, 1.0), limit: float | None = None,
    groups: Callable[[Any, str], Iterable[Group]] = product_groups,
) -> dict[str, Any]:  # fmt: skip
    """Write `model` quantised to `out`; returns the report.

    Tried are the strengths of equal ranges with the ranges of the extremes, then other ranges with the best strength.
    What is tried later replaces what was tried earlier if its error is smaller by a twentieth. With a limit, as few
    tensors as keep it get 16 bits after that.

    Args:
        model: a float32 ONNX file. data: its inputs by name, one dict for each call. scheme: "a8w8" or "a16w8", the
            bits of activations and weights. write: None: `quantised_products`. strengths: of `equalised`; None: the
            graph as it is. limit: of the error. groups: of tensors that may get 16 bits.

    Raises:
        CapabilityError: the graph has no product with constant weights, or cannot be quantised.
    """
    import onnx

    loaded = onnx.load(model, load_external_data=False)
    if not {node.op_type for node in loaded.graph.node}.intersection(PRODUCTS):
        raise CapabilityError("targets", "int8 for a graph without products", "a model with weights", "Leave int8 out.")
    if any(part.data_location == onnx.TensorProto.EXTERNAL for part in loaded.graph.initializer):
        strengths = (None,)  # weights in files of their own stay as they are
    expected = _outputs(model, data)
    report: dict[str, Any] = {"scheme": scheme}
    tried: list[dict[str, Any]] = []
    failure: Exception | None = None
    quantiser = write or quantised_products
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "quantised.onnx"
        for method in METHODS:
            first = method == METHODS[0]
            for strength in strengths if first else (report.get("equalised"),):
                source = model if strength is None else Path(scratch) / f"{strength}.onnx"
                try:
                    if strength is not None and not source.exists():
                        onnx.save(equalised(loaded, partial(extremes, data), strength), str(source))
                    quantiser(source, path, data, scheme, method)
                    outputs = _outputs(path, data)
                except Exception as error:  # whatever the quantiser or the runtime raises
                    failure = error
                    continue
                tried.append({"equalised": strength, "ranges": method, "error": _worst(outputs, expected)})
                if tried[-1]["error"] < IMPROVEMENT * report.get("error", math.inf):
                    write_whole(out, path.read_bytes())
                    best = source
                    report |= tried[-1]
        if not tried:
            assert failure is not None
            raise _failure(model.stem, scheme, failure) from failure
        if limit is not None and report["error"] > limit:

            def error_of(wide: Collection[str]) -> float:
                quantiser(best, path, data, scheme, report["ranges"], wide)
                return _worst(_outputs(path, data), expected)

            named = list(groups(onnx.load(best), scheme))
            with _failing(model.stem, scheme):
                wide = fewest(named, error_of, limit)
                report |= {"error": error_of(wide), "in_16_bits": sorted(wide)}
            write_whole(out, path.read_bytes())
        report["layers"] = list(_layers(best, out, data[0]))
        if (agreement := _agreement(_outputs(out, data), expected)) is not None:
            report["same_answer"] = agreement
    sizes = {"bytes": out.stat().st_size, "float_bytes": model.stat().st_size, "samples": len(data)}
    return {**report, "tried": tried, **sizes}


@contextlib.contextmanager
def _failing(name: str, scheme: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the quantiser or the runtime raises
        raise _failure(name, scheme, error) from error


def _failure(name: str, scheme: str, error: Exception) -> CapabilityError | OSError:
    if (number := disk_error(error)) is not None:
        return OSError(number, os.strerror(number))
    got = f"{name} in {scheme}, on which the quantiser fails ({type(error).__name__}: {error})"
    return CapabilityError("targets", got[:400], "a graph that can be quantised", "Leave int8 out.")


def write_report(path: Path, reports: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(reports, indent=1) + "\n")


def quantised_products(
    model: Path, out: Path, data: Sequence[Arrays], scheme: str, method: str, wide: Collection[str] = ()
) -> None:
    """Quantise the inputs and weights of products (MatMul, Gemm, convolutions), weights per output channel.

    What lies between them stays in float32: a Hadamard product of two projections has heavy tails, which a range of 8
    bits either cuts or resolves badly.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    overrides = {name: [{"quant_type": QuantType.QUInt16}] for name in wide}
    if wide:
        axes = weight_axes(model)
        overrides |= {name: [{"quant_type": QuantType.QInt16, "symmetric": True, "axis": axes[name]}]
                      for name in wide if name in axes}  # fmt: skip
    options: dict[str, Any] = {
        "TensorQuantOverrides": overrides,
        "UseQDQContribOps": False,  # standard operators, also for 16 bits
        "OpTypesToExcludeOutputQuantization": list(PRODUCTS),
        "QDQOpTypePerChannelSupportToAxis": {"MatMul": 1},
        **({"CalibPercentile": PERCENTILE} if method == "percentile" else {}),
    }
    with quiet():
        quantize_static(
            str(model), str(out), reader(data), quant_format=QuantFormat.QDQ, per_channel=True,
            op_types_to_quantize=list(PRODUCTS), activation_type=getattr(QuantType, ACTIVATIONS[scheme]),
            weight_type=QuantType.QInt8, calibrate_method=calibration(method), extra_options=options,
        )  # fmt: skip


def weight_axes(model: Path) -> dict[str, int]:
    """The axes of the output channels of the weights of products, by the weights' names."""
    import onnx

    graph = onnx.load(model).graph
    ranks = {part.name: len(part.dims) for part in graph.initializer}
    axes = {}
    for node in graph.node:
        name = node.input[1] if len(node.input) > 1 else ""
        if name not in ranks or node.op_type not in PRODUCTS:
            continue
        if node.op_type in ("MatMul", "Gemm"):
            if ranks[name] == 2:
                axes[name] = 0 if attribute(node, "transB", 0) else 1
        else:
            axes[name] = int(node.op_type == "ConvTranspose")
    return axes


def reader(data: Sequence[Arrays]) -> Any:
    """The data as the quantiser reads them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(data)

        def get_next(self) -> Arrays | None:
            return next(self.left, None)

    return Reader()


def calibration(method: str) -> Any:
    """The quantiser's name for one of METHODS."""
    from onnxruntime.quantization import CalibrationMethod

    return {"minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile,
            "entropy": CalibrationMethod.Entropy}[method]  # fmt: skip


def _outputs(path: Path, data: Sequence[Arrays]) -> list[Arrays]:
    session = onnx_session(path)
    return [run_session(session, inputs) for inputs in data]


def _worst(outputs: Sequence[Arrays], expected: Sequence[Arrays]) -> float:
    return max(distance(left, right) for left, right in zip(outputs, expected, strict=True))


def _agreement(outputs: Sequence[Arrays], expected: Sequence[Arrays]) -> float | None:
    """The share of samples with the same largest output; None for other outputs than one row of numbers a sample."""
    name = next(iter(expected[0]))
    if expected[0][name].ndim != 2 or expected[0][name].shape[1] < 2:
        return None
    pairs = zip(outputs, expected, strict=True)
    same = [left[name].argmax(1) == right[name].argmax(1) for left, right in pairs]
    return float(np.concatenate(same).mean())


def _layers(model: Path, quantised: Path, inputs: Arrays) -> Iterator[dict[str, Any]]:
    """The error of each product's output that both graphs have with the same values, in the order of the graph."""
    import onnx

    graph = onnx.load(model).graph
    names = {node.output[0]: node.op_type for node in graph.node if node.op_type in PRODUCTS}
    tensors = [_tensors(onnx.load(path), names, inputs) for path in (model, quantised)]
    for name, kind in names.items():
        if name in tensors[0] and name in tensors[1]:
            yield {
                "name": name,
                "operator": kind,
                "error": distance({name: tensors[1][name]}, {name: tensors[0][name]}),
            }


def extremes(data: Sequence[Arrays], model: Any, axes: Mapping[str, int]) -> Arrays:
    """The largest absolute value of each channel of some tensors on the data; axes: of the channels, from the end."""
    largest: Arrays = {}
    for inputs in data:
        for name, array in _tensors(model, axes, inputs).items():
            if name in axes:
                others = tuple(axis for axis in range(array.ndim) if axis != array.ndim + axes[name])
                peaks = np.abs(array).max(axis=others)
                largest[name] = np.maximum(largest[name], peaks) if name in largest else peaks
    return largest


def _tensors(model: Any, names: Iterable[str], inputs: Arrays) -> Arrays:
    """A model's outputs and those of its inner tensors `names` that it has."""
    import onnx

    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    present = {output for node in whole.graph.node for output in node.output}
    outputs = {output.name for output in whole.graph.output}
    for name in names:
        if name in present - outputs:
            whole.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "outputs.onnx"
        onnx.save(whole, str(path), save_as_external_data=False)
        return run_session(onnx_session(path), inputs)
