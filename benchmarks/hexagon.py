"""Which mixers Qualcomm's compiler takes for a Hexagon tensor processor, in what time, and how large the binaries are.

    pip install 'polymix[export,qnn]'
    python benchmarks/hexagon.py benchmarks/results/export/hexagon.json

192 channels and 1,024 to 16,384 tokens, as in PADRe's measurements on the Snapdragon 8 Gen 3; fresh weights, everything
in integers (a8w8). Each case has a process of its own, and --limit seconds. The emulator runs up to --emulate tokens;
its times would say nothing of the chip and are not kept. The file is written after each case; the same command
continues.
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saving import save

DIM, CHIP = 192, "snapdragon-8-gen-3"
TOKENS = (1024, 4096, 16384)
MIXERS = (
    "softmax",
    "linear",
    "padre",
    "padre:degree=3",
    "padre:degree=4",
    "pom",
    "qt",
    "poly_sa:grid={0}x{0}",
    "poly_nl",
)


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
        compiled = hexagon.compile_context(quantised, hexagon.CHIPS[CHIP])
        result = {"largest_activation": hexagon.largest_activation(quantised), "compile_seconds": compiled.seconds,
                  "bytes": compiled.binary.stat().st_size}  # fmt: skip
        if emulated:
            found = run("qnn", compiled.context, data[0])
            result["error"] = distance(found, {key: value.numpy() for key, value in graph.call(graph.inputs).items()})
    return result


def attempt(spec: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; why it failed, if it did."""
    command = [sys.executable, __file__, "-", "--case", spec, str(tokens), "--emulate", str(options.emulate)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=options.limit)
        end = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate()
        end = f"not done after {options.limit} s"
    seconds = time.perf_counter() - start
    if process.returncode == 0:
        return {"works": True, "seconds": seconds, **json.loads(printed.strip().splitlines()[-1])}
    lines = errors.strip().splitlines() or [""]
    stage = "compiling" if "compiling" in lines else "quantising"
    last = lines[-1] if lines[-1] not in ("", stage) else end
    return {"works": False, "reason": f"{stage}: {last[:300]}", "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--mixers", nargs="+", default=MIXERS)
    parser.add_argument("--limit", type=int, default=600, help="seconds for one case")
    parser.add_argument("--emulate", type=int, default=1024, help="tokens up to which the emulator runs")
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
            row = {"mixer": mixer, "tokens": tokens, **attempt(mixer.format(int(tokens**0.5)), tokens, options)}
            content["rows"].append(row)
            save(content, options.out)
            print(row, flush=True)


if __name__ == "__main__":
    main()
