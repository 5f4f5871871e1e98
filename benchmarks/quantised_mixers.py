"""The error of each mixer in 8 bits, alone: by itself, and with as many tensors in 16 bits as a limit takes.

    pip install -c constraints.txt ".[export,qnn]"
    python benchmarks/quantised_mixers.py benchmarks/results/export/mixers.json

Fresh weights, 256 tokens on a grid of 16 x 16, 64 channels, calibrated on two random inputs. The limits are 0.05 in
a8w8 and 0.01 in a16w8. Files of int8 run in ONNX Runtime, those of qnn in Qualcomm's emulator. Finished rows are kept.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from saving import save

from polymix.errors import CapabilityError
from polymix.export import hexagon, int8
from polymix.export.graph import write_onnx
from polymix.export.manifest import distance, run
from polymix.export.modes import mixer_graphs
from polymix.export.wide import operator_groups
from polymix.export.write import one_sample
from polymix.mixers.spec import parse_mixer

MIXERS = ("padre:grid=16x16", "padre:degree=3:grid=16x16", "pom", "qt", "poly_sa:grid=16x16", "poly_nl", "linear",
          "softmax")  # fmt: skip
DIM, TOKENS, LIMITS = 64, 256, {"a8w8": 0.05, "a16w8": 0.01}


def rows_of(spec: str, target: str) -> list[dict[str, Any]]:
    """A row for each scheme: the error without and with a limit, and how many tensors got 16 bits."""
    torch.manual_seed(0)
    (graph,) = mixer_graphs(parse_mixer(spec, standalone=True)[1].build(DIM).eval(), TOKENS)
    both = [{"x": part.numpy()} for part in graph.inputs["x"].split(1)]
    graph = one_sample(graph) if target == "qnn" else graph
    data = both if target == "qnn" else [{"x": graph.inputs["x"].numpy()}]
    how: dict[str, Any] = (
        {"write": hexagon.quantised_wholly, "strengths": hexagon.STRENGTHS, "groups": operator_groups}
        if target == "qnn" else {}
    )  # fmt: skip
    expected = {name: value.numpy() for name, value in graph.call(graph.inputs).items()}
    rows = []
    with TemporaryDirectory() as scratch:
        model, out = Path(scratch) / "model.onnx", Path(scratch) / "quantised.onnx"
        write_onnx(graph, model)
        for scheme, limit in LIMITS.items():
            row: dict[str, Any] = {"mixer": spec, "target": target, "scheme": scheme, "limit": limit}
            for key, kept in (("error", None), ("limited", limit)):
                report = int8.quantise(model, out, data, scheme, limit=kept, **how)
                row[key], row["in_16_bits"] = report["error"], len(report.get("in_16_bits", ()))
                row[f"{key}_bytes"] = report["bytes"]
                if target == "qnn":
                    try:
                        context = hexagon.compile_context(out, hexagon.CHIPS[hexagon.DEFAULT_CHIP]).context
                        row[f"{key}_emulated"] = distance(run("qnn", context, data[0]), expected)
                    except CapabilityError as refused:
                        row[f"{key}_refused"] = str(refused)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {"rows": []}
    done = {(row["mixer"], row["target"]) for row in content["rows"]}
    for target in ("int8", "qnn"):
        for mixer in MIXERS:
            if (mixer, target) not in done:
                content["rows"] += rows_of(mixer, target)
                print(*content["rows"][-2:], sep="\n", flush=True)
                save(content, options.out)


if __name__ == "__main__":
    main()
