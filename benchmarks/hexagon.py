"""Which mixers Qualcomm's compiler takes for a Hexagon tensor processor, in what time, and how large the binaries are.

    pip install -c constraints.txt ".[export,qnn]"
    python benchmarks/hexagon.py benchmarks/results/export/hexagon.json [--plot docs/images/hexagon.png]

192 channels; 256, 1,024, 2,304 and 4,096 tokens, as PADRe measures on the Snapdragon 8 Gen 3 (Section 4.3), and
longer ones; fresh weights, everything in integers (a8w8). Each case has a process of its own. The compiler's time and
--limit are processor time, which other work on the machine does not change; "seconds" of a case are wall time. The
emulator runs up to --emulate tokens; its times would say nothing of the chip and are not kept. The file is written
after each case; the same command continues.
"""

import argparse
import json
import resource
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from math import isqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saving import save

from polymix.measure import Stopwatch

DIM, CHIP, LIMIT = 192, "snapdragon-8-gen-3", 300
PAPER = (256, 1024, 2304, 4096)  # PADRe, Section 4.3
TOKENS = (*PAPER, 8192, 16384)
MIXERS = (
    "softmax",
    "linear",
    "padre:grid={0}x{1}",
    "padre:degree=3:grid={0}x{1}",
    "padre:degree=4:grid={0}x{1}",
    "pom",
    "qt",
    "poly_sa:grid={0}x{1}",
    "poly_nl",
)


def grid_of(tokens: int) -> tuple[int, int]:
    """The sides of the grid that is nearest to a square."""
    side = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
    return side, tokens // side


def measure(spec: str, tokens: int, emulated: bool) -> dict[str, Any]:
    """Quantise, compile and perhaps emulate one mixer."""
    import onnx
    import torch

    from polymix.export import hexagon, int8
    from polymix.export.equalise import equalised
    from polymix.export.graph import Graph, write_onnx
    from polymix.export.manifest import distance, run
    from polymix.mixers.spec import parse_mixer

    torch.manual_seed(0)
    mixer = parse_mixer(spec, standalone=True)[1].build(DIM).eval()
    x = torch.randn(1, tokens, DIM)
    graph = Graph("model", mixer, {"x": x})
    with TemporaryDirectory() as folder:
        path, quantised = Path(folder) / "model.onnx", Path(folder) / "quantised.onnx"
        write_onnx(graph, path)
        data = [{"x": x.numpy()}]
        equal = Path(folder) / "equal.onnx"
        onnx.save(equalised(onnx.load(path), partial(int8.extremes, data)), str(equal))
        hexagon.quantised_wholly(equal, quantised, data, "a8w8", "minmax")
        print("compiling", file=sys.stderr, flush=True)
        watch = Stopwatch("processor")
        compiled = hexagon.compile_context(quantised, hexagon.CHIPS[CHIP])
        seconds = watch.seconds()
        result = {"largest_activation": hexagon.largest_activation(quantised), "compile_seconds": seconds,
                  "compile_clock": watch.clock,
                  "bytes": compiled.binary.stat().st_size,
                  "memory": None if compiled.memory is None else asdict(compiled.memory)}  # fmt: skip
        if emulated:
            outputs = run("qnn", compiled.context, data[0])
            result["error"] = distance(outputs, {key: value.numpy() for key, value in graph.call(graph.inputs).items()})
    return result


def attempt(spec: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; why it failed, if it did."""
    command = [sys.executable, __file__, "-", "--case", spec, str(tokens), "--emulate", str(options.emulate)]
    watch = Stopwatch()
    allowed = resource.RLIMIT_CPU, (options.limit, options.limit + 5)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=partial(resource.setrlimit, *allowed))  # fmt: skip
    printed, errors = process.communicate()
    late = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    end = f"not done after {options.limit} s" if late else f"exit status {process.returncode}"
    whole = {"seconds": watch.seconds(), "clock": watch.clock}
    if process.returncode == 0:
        return {"works": True, **whole, **json.loads(printed.strip().splitlines()[-1])}
    lines = errors.strip().splitlines() or [""]
    stage = "compiling" if "compiling" in lines else "quantising"
    last = lines[-1] if lines[-1] not in ("", stage) else end
    return {"works": False, "reason": f"{stage}: {last[:300]}", **whole}


def name_of(spec: str) -> str:
    """A mixer without its grid."""
    return spec.replace(":grid={0}x{1}", "")


def plot(content: dict[str, Any], path: Path) -> None:
    """The largest tensor, and the phone's memory that is needed beside the processor's own, against tokens."""
    from matplotlib.figure import Figure

    from polymix.pages import plots

    with plots.style():
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        names = list(dict.fromkeys(row["mixer"] for row in content["rows"]))
        for name, look in plots.looks([name_of(name) for name in names]).items():
            own = sorted(
                (row for row in content["rows"] if name_of(row["mixer"]) == name), key=lambda row: row["tokens"]
            )
            rows = [row for row in own if row["works"]]
            tokens = [row["tokens"] for row in rows]
            left.plot(tokens, [row["largest_activation"] / 2**20 for row in rows], label=name, **look)
            right.plot(tokens, [row["memory"]["spilled"] / 2**20 for row in rows], label=name, **look)
            for row in [row for row in own if not row["works"]]:
                # attention's scores are of all pairs of tokens; the tensors of the others are as long as the sequence
                last = rows[-1]["largest_activation"] / 2**20
                needed = last * (row["tokens"] / tokens[-1]) ** (2 if name == "softmax" else 1)
                left.plot([tokens[-1], row["tokens"]], [last, needed], linestyle=":", color=look["color"])
                left.plot(row["tokens"], needed, marker="x", markersize=12, markeredgewidth=3, color=look["color"])
                place = (-14, -4) if name == "softmax" else (4, -44)
                left.annotate(f"{name}: not compiled in {content['limit']} s", (row["tokens"], needed), ha="right",
                              xytext=place, textcoords="offset points", fontsize=9)  # fmt: skip
        left.axhline(8, color="grey", linestyle="--", linewidth=1)
        left.annotate("8 MiB on the chip", (4096, 8), xytext=(-25, 4), textcoords="offset points",
                      color="grey", fontsize=8)  # fmt: skip
        left.set_yscale("log")
        plots.plain_log(left.yaxis)
        for axes, said in ((left, "largest tensor, MiB"), (right, "moved to the phone's memory and back, MiB")):
            plots.token_axis(axes, TOKENS)
            axes.set_ylabel(said)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
        plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--mixers", nargs="+", default=MIXERS)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds of processor time for a case")
    parser.add_argument("--emulate", type=int, default=1024, help="tokens up to which the emulator runs")
    parser.add_argument("--plot", type=Path, help="draw the file's rows")
    parser.add_argument("--case", nargs=2, metavar=("MIXER", "TOKENS"), help="one case, printed as JSON")
    options = parser.parse_args()
    if options.case:
        spec, tokens = options.case[0], int(options.case[1])
        print(json.dumps(measure(spec, tokens, tokens <= options.emulate)))
        return
    content: dict[str, Any] = {"chip": CHIP, "dim": DIM, "limit": options.limit, "rows": []}
    if options.out.exists():
        content = json.loads(options.out.read_text("utf-8"))
    for tokens in options.tokens:
        for mixer in options.mixers:
            if (mixer, tokens) in {(row["mixer"], row["tokens"]) for row in content["rows"]}:
                continue
            row = {"mixer": mixer, "tokens": tokens, **attempt(mixer.format(*grid_of(tokens)), tokens, options)}
            content["rows"].append(row)
            save(content, options.out)
            print(row, flush=True)
    if options.plot:
        plot(content, options.plot)


if __name__ == "__main__":
    main()
