"""The GPU kernels compiled without a GPU: they fit the cards, spill nothing, and use tensor cores where a product is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="untested: GPU kernels compiled without a GPU, for which Triton is needed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STACK = 512  # bytes of a thread; the worst kernels had 4,136


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """In a process of its own: under the interpreter, as which this one imported Triton, nothing is compiled."""
    out = tmp_path_factory.mktemp("compiled") / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(BENCHMARKS / "gpu_model.py"), str(out), "--cards", "H100", "--tokens", "256"]
    subprocess.run(command, check=True, env=environment, cwd=BENCHMARKS.parent, capture_output=True)
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
def test_kernels_compile_for_a_card_that_is_not_here(rows):
    kernels = [(row, kernel) for row in rows for kernel in row["kernels"]]
    assert len({kernel["kernel"] for _, kernel in kernels}) >= 13, "a kernel was never launched"
    for row, kernel in kernels:
        what = f"{row['op']} {row['dtype']} {row['pass']}: {kernel['kernel']}"
        assert kernel["stack"] <= STACK, f"{what} keeps {kernel['stack']} bytes of each thread in memory"
        assert kernel["shared"] <= 227 << 10, f"{what} needs more shared memory than a program may have"
        assert kernel["occupancy"] > 0, f"{what} cannot be resident"
        products = row["op"].startswith("qt") and kernel["kernel"] != "_running_kernel"
        assert bool(kernel["products"]) == products, f"{what}: tensor cores are for products, and for these alone"
        if not row["op"].startswith("qt"):
            assert max(map(int, kernel["loads"])) == 16, f"{what} reads its tokens in small pieces"
        assert row["bound_seconds"] > 0
