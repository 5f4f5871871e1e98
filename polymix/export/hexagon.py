"""Files for the tensor processor of Qualcomm's chips (Hexagon, HTP): in integers throughout, compiled, and emulated.

Package: onnxruntime-qnn (the extra `qnn`), which holds Qualcomm's graph compiler and an emulator of the processor. The
emulator gives the processor's numbers. Its times and cycles are those of this machine and say nothing of a chip's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polymix.errors import CapabilityError, MissingExtraError, OptionError, one_line
from polymix.export import int8
from polymix.export.graph import Graph, quiet, write_onnx
from polymix.export.manifest import CONTEXT, QNN_PROVIDER, Arrays, qnn_session, system_library
from polymix.export.onnx_graphs import attribute, count_of, read_by, shapes_of
from polymix.export.qnn_binary import OnChip, on_chip
from polymix.measure import Stopwatch

DEFAULT_CHIP = "snapdragon-8-gen-3"
NORMS = (
    "LayerNormalization",
    "InstanceNormalization",
    "GroupNormalization",
)  # the compiler takes unsigned weights alone
STRENGTHS = (0.0, 0.5, 1.0)
RUN_ON_PHONE = (
    "ONNX Runtime for Android with its QNN execution provider opens the file that ends in -context.onnx, beside the "
    ".bin, with the provider option backend_path=libQnnHtp.so. qnn-net-run of Qualcomm's SDK runs the .bin: "
    "qnn-net-run --backend libQnnHtp.so --retrieve_context FILE.bin --input_list inputs.txt"
)


@dataclass(frozen=True)
class Chip:
    """A chip with a Hexagon tensor processor.

    number: Qualcomm's of the model ("soc_model"). architecture: of the processor ("htp_arch"). memory: on the processor
    beside its vector units (VTCM), in MiB.
    """

    model: str
    number: int
    architecture: int
    memory: int

    def options(self) -> dict[str, str]:
        """As the compiler takes them; without the last one it reserves half of the processor's memory on some chips."""
        return {"soc_model": str(self.number), "htp_arch": str(self.architecture), "vtcm_mb": str(self.memory)}


CHIPS = {
    "snapdragon-888": Chip("SM8350", 30, 68, 4),
    "snapdragon-8-gen-1": Chip("SM8450", 36, 69, 8),
    "snapdragon-8-plus-gen-1": Chip("SM8475", 42, 69, 8),
    "snapdragon-8-gen-2": Chip("SM8550", 43, 73, 8),
    "snapdragon-8-gen-3": Chip("SM8650", 57, 75, 8),
    "snapdragon-8-elite": Chip("SM8750", 69, 79, 8),
    "snapdragon-8-elite-gen-5": Chip("SM8850", 87, 81, 8),
    "snapdragon-x-elite": Chip("SC8380XP", 60, 73, 8),
    "sa8295": Chip("SA8295", 39, 68, 8),
    "sa8255": Chip("SA8255", 52, 73, 8),
}


def chip_of(name: str) -> tuple[str, Chip]:
    """A chip by its name, its model (SM8650) or Qualcomm's number of it (57). Raises OptionError: it is unknown."""
    key = name.strip().lower().replace(" ", "-")
    for known, chip in CHIPS.items():
        if key in (known, chip.model.lower(), str(chip.number)):
            return known, chip
    allowed = ", ".join(f"{known} ({chip.model}, {chip.number})" for known, chip in CHIPS.items())
    raise OptionError("soc", repr(name), f"one of {allowed}", "Choose one of these, by name, model or number.")


def write_graph(graph: Graph, path: Path) -> None:
    """Write a graph of fixed sizes as a float32 ONNX file that the compiler gets right once it is quantised."""
    import onnx

    write_onnx(graph, path)
    model = onnx.load(path, load_external_data=False)
    if part_batch_norms(model):
        onnx.save(model, str(path))


def part_batch_norms(model: Any) -> int:
    """Write each batch norm as what it is after training, a product and a sum for each channel; returns how many.

    The compiler folds mean, variance, weight and bias into integers of its own, which for some values are far off: the
    processor's output then has little to do with the file's (relative errors of 0.7 and more in its emulator).
    """
    from onnx import helper, numpy_helper

    shapes, values = shapes_of(model), {part.name: part for part in model.graph.initializer}
    nodes, count = [], 0
    for node in model.graph.node:
        if node.op_type != "BatchNormalization" or not set(node.input[1:]) <= set(values):
            nodes.append(node)
            continue
        weight, bias, mean, variance = (numpy_helper.to_array(values[name]).astype(float) for name in node.input[1:])
        factor = weight / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        (output, *_), count = node.output, count + 1
        axes = (-1, *(1 for _ in shapes[node.input[0]][2:]))
        for name, constant in ((f"{output}.factor", factor), (f"{output}.shift", bias - mean * factor)):
            model.graph.initializer.append(numpy_helper.from_array(constant.astype(np.float32).reshape(axes), name))
        nodes.append(
            helper.make_node("Mul", [node.input[0], f"{output}.factor"], [f"{output}.scaled"], f"{node.name}.factor")
        )
        nodes.append(helper.make_node("Add", [f"{output}.scaled", f"{output}.shift"], [output], f"{node.name}.shift"))
    used = {name for node in nodes for name in read_by(node)}
    kept = [part for part in model.graph.initializer if part.name in used]
    if count:
        del model.graph.node[:], model.graph.initializer[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(kept)
    return count


def quantised_wholly(
    model: Path, out: Path, data: Sequence[Arrays], scheme: str, method: str, wide: Collection[str] = ()
) -> None:
    """Quantise every operator: activations with a range for each tensor, weights of products for each channel."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    overrides: dict[str, list[dict[str, Any]]] = {name: [{"quant_type": QuantType.QUInt16}] for name in wide}
    graph = onnx.load(model).graph
    ranks = {part.name: len(part.dims) for part in graph.initializer}
    for name, axis in int8.weight_axes(model).items():
        if ranks[name] == 2:  # of convolutions the quantiser knows the axis
            kind = {"quant_type": QuantType.QInt16} if name in wide else {"quant_type": QuantType.QInt8, "axis": axis}
            overrides[name] = [{"symmetric": True, **kind}]  # in 16 bits the compiler takes one range for all
    for node in graph.node:
        name = node.input[1] if len(node.input) > 1 else ""
        if node.op_type in NORMS and name in ranks:
            overrides[name] = [{"quant_type": QuantType.QUInt8, "symmetric": False}]
    bits = QuantType.QUInt8 if scheme == "a8w8" else QuantType.QUInt16
    with quiet():
        config = get_qnn_qdq_config(
            model, int8.reader(data), int8.calibration(method), activation_type=bits, weight_type=QuantType.QInt8,
            per_channel=True, init_overrides=overrides,
        )  # fmt: skip
        quantize(str(model), str(out), config)


@dataclass(frozen=True)
class Compiled:
    """What the compiler left: a small ONNX file that names the binary, the binary, and how long it took in seconds.

    memory: of the graph on the chip; None: the binary does not say.
    """

    context: Path
    binary: Path
    seconds: float
    memory: OnChip | None = None


def compile_context(model: Path, chip: Chip) -> Compiled:
    """Compile a wholly quantised file for a chip; the files lie beside it, under its name.

    Raises:
        CapabilityError: an operator would fall back to the CPU (the first is named), or the compiler fails.
        MissingExtraError: the packages are missing.
    """
    context = model.with_name(model.stem + CONTEXT)
    options = {"ep.context_enable": "1", "ep.context_file_path": str(context), "ep.context_embed_mode": "0"}
    context.unlink(missing_ok=True)  # the compiler refuses to replace it
    watch = Stopwatch()
    try:
        qnn_session(model, {**options, "session.disable_cpu_ep_fallback": "1"}, chip.options())
    except MissingExtraError:
        raise
    except Exception as error:  # the runtime's own kinds
        first = _first_on_cpu(model, chip)
        why = (
            f"with {first}, which would run on the CPU"
            if first
            else f"on which its compiler fails ({one_line(error)[:200]})"
        )
        cure = "Change the model there, or leave qnn out."
        raise CapabilityError("targets", f"qnn for {model.stem} {why}", f"a graph for {chip.model}", cure) from error
    seconds = watch.seconds()
    (binary,) = context.parent.glob(f"{context.stem}*.bin")
    return Compiled(context, binary, seconds, on_chip(binary, system_library()))


def _first_on_cpu(model: Path, chip: Chip) -> str | None:
    """The first operator that the compiler leaves to the CPU, other than the graph's own inputs and outputs."""
    try:
        session = qnn_session(model, {"session.record_ep_graph_assignment_info": "1"}, chip.options())
    except Exception:  # the compiler fails on the whole
        return None
    left = {node.name for part in session.get_provider_graph_assignment_info() if part.ep_name != QNN_PROVIDER
            for node in part.get_nodes()}  # fmt: skip
    import onnx

    for node in onnx.load(model, load_external_data=False).graph.node:
        if node.name in left and node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            return f"{node.op_type} ({node.name})"
    return None


def operators(model: Path) -> dict[str, int]:
    """How many of each operator a quantised file holds, without those that convert to integers and back."""
    import onnx

    counts = Counter(node.op_type for node in onnx.load(model, load_external_data=False).graph.node)
    return {
        name: counts[name] for name in sorted(counts) if name not in ("QuantizeLinear", "DequantizeLinear", "Constant")
    }


def largest_activation(model: Path) -> int:
    """The values of the largest tensor between two operators: what must lie in the chip's memory, or be moved there."""
    import onnx

    loaded = onnx.load(model, load_external_data=False)
    constants = {part.name for part in loaded.graph.initializer}
    return max(count_of(shape) or 0 for name, shape in shapes_of(loaded).items() if name not in constants)
