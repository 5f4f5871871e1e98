"""Does an ONNX file have sums and products alone, as encrypted inference needs?"""

from __future__ import annotations

from pathlib import Path

from polymix.errors import CapabilityError
from polymix.extras import needs

# Nodes of ONNX that compute sums and products, or only move numbers.
_NODE_TYPES = """
    Add Sub Mul Neg Sum MatMul Gemm Conv Einsum ReduceMean ReduceSum GlobalAveragePool AveragePool Reshape Transpose
    Concat Slice Split Squeeze Unsqueeze Flatten Expand Constant ConstantOfShape Identity Shape Gather Cast Pad Tile
"""
ONNX = frozenset(_NODE_TYPES.split())


def check_onnx(path: str | Path) -> frozenset[str]:
    """The kinds of nodes of an ONNX file, which must be sums, products and moves. A constant may divide.

    Raises:
        CapabilityError: another node, which the error names.
    """
    with needs("export"):
        import onnx
    graph = onnx.load(str(path), load_external_data=False).graph
    nodes, constants = graph.node, {value.name for value in graph.initializer}
    for node in nodes:
        factor = node.op_type == "Div" and node.input[1] in constants
        if node.op_type not in ONNX and not factor:
            got = f"{node.name or 'a node'} of type {node.op_type}"
            raise CapabilityError("path", got, "additions and multiplications alone", "")
    return frozenset(node.op_type for node in nodes)
