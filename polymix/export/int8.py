"""ONNX files with 8-bit weights: static quantisation, calibrated on data, and a report of the errors layer by layer."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polymix._io import write_whole
from polymix.errors import CapabilityError
from polymix.export.manifest import Arrays, distance, onnx_session, run_session

PRODUCTS = ("MatMul", "Conv", "Gemm", "ConvTranspose")
METHODS = ("minmax", "percentile", "entropy")
PERCENTILE = 99.99
ACTIVATIONS = {"a8w8": "QInt8", "a16w8": "QUInt16"}
REPORT = "report.json"


def quantise(model: Path, out: Path, data: Sequence[Arrays], scheme: str) -> dict[str, Any]:
    """Write `model` with quantised products to `out`; returns the report.

    Inputs and weights of products (MatMul, Gemm, convolutions) are quantised, weights per output channel with a range
    that is symmetric. What lies between them stays in float32: a Hadamard product of two projections has heavy tails,
    which a range of 8 bits either cuts or resolves badly. The ranges of the inputs are those of three methods in turn;
    the one with the smallest error on the data is kept.

    Args:
        model: a float32 ONNX file. data: its inputs by name, one dict for each call. scheme: "a8w8" or "a16w8", the
            bits of activations and weights.

    Raises:
        CapabilityError: the graph has no product with constant weights, or cannot be quantised.
    """
    import onnx

    types = {node.op_type for node in onnx.load(model, load_external_data=False).graph.node}
    if not types.intersection(PRODUCTS):
        raise CapabilityError("targets", "int8 for a graph without products", "a model with weights", "Leave int8 out.")
    wanted = _outputs(model, data)
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for method in METHODS:
            path = Path(scratch) / f"{method}.onnx"
            try:
                _quantised(model, path, data, scheme, method)
                errors[method] = _worst(_outputs(path, data), wanted)
            except Exception as error:  # whatever the quantiser or the runtime raises
                failure = error
                continue
            if errors[method] <= min(errors.values()):
                best = path.read_bytes()
        if not errors:
            got = f"{model.stem} in {scheme}, on which the quantiser fails ({type(failure).__name__}: {failure})"
            raise CapabilityError("targets", got[:400], "a graph that can be quantised", "Leave int8 out.") from failure
        write_whole(out, best)
    chosen = min(errors, key=errors.__getitem__)
    report = {
        "scheme": scheme, "ranges": chosen, "error": errors[chosen], "error_by_ranges": errors,
        "bytes": out.stat().st_size, "float_bytes": model.stat().st_size, "samples": len(data),
        "layers": list(_layers(model, out, data[0])),
    }  # fmt: skip
    if (agreement := _agreement(_outputs(out, data), wanted)) is not None:
        report["same_answer"] = agreement
    return report


def write_report(path: Path, reports: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(reports, indent=1) + "\n")


def _quantised(model: Path, out: Path, data: Sequence[Arrays], scheme: str, method: str) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(data)

        def get_next(self) -> Arrays | None:
            return next(self.left, None)

    methods = {"minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile,
               "entropy": CalibrationMethod.Entropy}  # fmt: skip
    options: dict[str, Any] = {
        "UseQDQContribOps": False,  # standard operators, also for 16 bits
        "OpTypesToExcludeOutputQuantization": list(PRODUCTS),
        "QDQOpTypePerChannelSupportToAxis": {"MatMul": 1},
        **({"CalibPercentile": PERCENTILE} if method == "percentile" else {}),
    }
    with _quiet():
        quantize_static(
            str(model), str(out), Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
            op_types_to_quantize=list(PRODUCTS), activation_type=getattr(QuantType, ACTIVATIONS[scheme]),
            weight_type=QuantType.QInt8, calibrate_method=methods[method], extra_options=options,
        )  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the quantiser's own output."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _outputs(path: Path, data: Sequence[Arrays]) -> list[Arrays]:
    session = onnx_session(path)
    return [run_session(session, inputs) for inputs in data]


def _worst(given: Sequence[Arrays], wanted: Sequence[Arrays]) -> float:
    return max(distance(left, right) for left, right in zip(given, wanted, strict=True))


def _agreement(given: Sequence[Arrays], wanted: Sequence[Arrays]) -> float | None:
    """The share of samples with the same largest output; None for other outputs than one row of numbers a sample."""
    name = next(iter(wanted[0]))
    if wanted[0][name].ndim != 2 or wanted[0][name].shape[1] < 2:
        return None
    pairs = zip(given, wanted, strict=True)
    same = [left[name].argmax(1) == right[name].argmax(1) for left, right in pairs]
    return float(np.concatenate(same).mean())


def _layers(model: Path, quantised: Path, inputs: Arrays) -> Iterator[dict[str, Any]]:
    """The error of each product's output, in the order of the graph."""
    import onnx

    graph = onnx.load(model).graph
    names = {node.output[0]: node.op_type for node in graph.node if node.op_type in PRODUCTS}
    found = [_with_outputs(path, names, inputs) for path in (model, quantised)]
    for name, kind in names.items():
        if name in found[0] and name in found[1]:
            yield {"name": name, "operator": kind, "error": distance({name: found[1][name]}, {name: found[0][name]})}


def _with_outputs(path: Path, names: Mapping[str, str], inputs: Arrays) -> Arrays:
    import onnx

    model = onnx.load(path)
    present = {output for node in model.graph.node for output in node.output}
    outputs = {output.name for output in model.graph.output}
    for name in names:
        if name in present - outputs:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "outputs.onnx"
        onnx.save(model, str(whole), save_as_external_data=False)
        return run_session(onnx_session(whole), inputs)
