"""Mixers and models as files that run without PyTorch, each of them run and compared before it is kept.

polymix.export.export(model, inputs, "out", targets=("onnx", "int8"))
polymix.export.check("out")        # wherever the files are: it needs numpy and the runtime, not PyTorch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polymix.export.manifest import Checked, check

if TYPE_CHECKING:
    from polymix.export.graph import Graph as Graph
    from polymix.export.write import export as export
    from polymix.export.write import export_graphs as export_graphs

__all__ = ["Checked", "Graph", "check", "export", "export_graphs"]


def __getattr__(name: str) -> Any:
    """What needs PyTorch is loaded when it is first asked for."""
    if name == "Graph":
        from polymix.export.graph import Graph

        return Graph
    if name in ("export", "export_graphs"):
        from polymix.export import write

        return getattr(write, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
