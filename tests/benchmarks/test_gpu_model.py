"""The GPU kernels compiled without a GPU: they fit the cards, spill nothing, use tensor cores where a product is and read
16 bytes at once; what is counted in them is what they do; and a digest tells whether they ran as they are.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import slow_but

pytest.importorskip("triton", reason="untested: GPU kernels compiled without a GPU, for which Triton is needed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    counted = importlib.import_module("gpu_steps.counted").counted
    digests = importlib.import_module("gpu_steps.digests")

CARDS = ("A100", "H100", "B200", "MI300X")
STACK_OF_ANY = 512  # bytes of a thread in local memory, in launches of odd widths
SHARED = {"A100": 163 << 10, "H100": 227 << 10, "B200": 227 << 10, "MI300X": 64 << 10}  # bytes that a program may have
TOKENS, DIM, HEADS = 256, 192, 3
LAUNCHES = {"padre": 60, "pom": 110, "pooled": 60, "qt": 180}  # more than these of the kernels' tests are different
KERNEL = re.compile(r"^def (_\w+_kernel)\(", re.MULTILINE)
KERNELS = {name for file in digests.OPS.rglob("triton*.py") for name in KERNEL.findall(file.read_text())}
# Rows of d + 1 sums do not begin at multiples of 16 bytes, and the entries of a feature are picked by their indices.
NARROW = {"_running_kernel", "_moments_kernel", "_query_kernel", "_pull_kernel"}
PRODUCTS = {"_powers_kernel", "_inside_kernel", "_inside_backward_kernel", *NARROW} - {"_running_kernel"}


def _outside(*command, **environment):
    """In a process of its own: under the interpreter, as which this one imported Triton, nothing is compiled."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, *command], check=True, env=inherited | environment, cwd=BENCHMARKS.parent,
                   capture_output=True)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("compiled") / "rows.json"
    _outside(str(BENCHMARKS / "gpu_model.py"), str(out), "--cards", ",".join(CARDS), "--tokens", str(TOKENS))
    return json.loads(out.read_text())["rows"]


def _fits(what, kernel, card, stack):
    assert kernel["stack"] <= stack, f"{what} keeps {kernel['stack']} bytes of each thread in memory"
    assert kernel["shared"] <= SHARED[card], f"{what} needs more shared memory than a program may have"
    assert kernel["occupancy"] > 0, f"{what} cannot be resident"


@pytest.mark.parametrize("card", slow_but((), CARDS, ("H100", "MI300X")))
def test_kernels_compile_for_a_card_that_is_not_here(rows, card):
    kernels = [(row, kernel) for row in rows if row["card"] == card for kernel in row["kernels"]]
    assert {kernel["kernel"] for _, kernel in kernels} == KERNELS, "a kernel was never launched"
    for row, kernel in kernels:
        what = f"{row['op']} {row['dtype']} {row['pass']} on {card}: {kernel['kernel']}"
        _fits(what, kernel, card, 0)
        assert kernel["spills"] == 0, f"{what} keeps values of a thread in memory for want of registers"
        products = kernel["kernel"] in PRODUCTS
        assert bool(kernel["products"]) == products, f"{what}: tensor cores are for products, and for these alone"
        if kernel["kernel"] not in NARROW:
            widest = 8 if card == "MI300X" and row["op"].startswith("padre") else 16
            assert max(map(int, kernel["loads"])) >= widest, f"{what} reads its tokens in small pieces"
        assert row["bound_seconds"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("amd", [False, True])
@pytest.mark.parametrize("op", LAUNCHES)
def test_every_launch_of_the_kernels_tests_compiles(tmp_path, op, amd):
    """Odd widths, strides, masks, segments, orders: whatever the tests run under the interpreter is compiled, too."""
    launches, out = tmp_path / "launches", tmp_path / "rows.json"
    options = ["-p", "tests.benchmarks.launches", "-q", "-n", "0", "-m", "slow and not exhaustive"]
    environment = {"LAUNCHES": str(launches), **({"AMD": "1"} if amd else {})}
    _outside("-m", "pytest", *options, f"tests/ops/{op}/test_triton.py", **environment)
    cards = ("MI300X",) if amd else CARDS[:3]
    _outside(str(BENCHMARKS / "gpu_model.py"), str(out), "--cards", ",".join(cards), "--launches", str(launches))
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) > LAUNCHES[op] * len(cards), "launches were not written down"
    own = {name for file in digests.OPS.glob(f"{op}/triton*.py") for name in KERNEL.findall(file.read_text())}
    assert {row["kernel"] for row in rows} == own, "the tests launch not every kernel"
    for row in rows:
        _fits(f"{row['kernel']} with {row['launch']} on {row['card']}", row, row["card"], STACK_OF_ANY)


@pytest.mark.slow
def test_a_digest_changes_with_the_code_that_runs_and_with_no_other(tmp_path):
    ops = shutil.copytree(digests.OPS, tmp_path / "ops", ignore=shutil.ignore_patterns("*.c", "*.so"))
    before = digests.digests(ops)
    assert before == digests.digests(), "the folder's name is part of a digest"

    def changed(file, old, new):
        text = (ops / file).read_text()
        assert old in text
        (ops / file).write_text(text.replace(old, new, 1))
        after = digests.digests(ops)
        (ops / file).write_text(text)
        return {name for name in after if after[name] != before[name]}

    assert changed("pooled/triton.py", "TILE = 32", "TILE = 16") == {"pooled_product", "gate_tokens"}
    assert changed("pooled/triton.py", "TILE = 32  #", "TILE = 32  # rows,") == set(), "a comment runs nothing"
    assert changed("pom/triton.py", "Rotate the tile's", "Turn the tile's") == set(), "a docstring runs nothing"
    assert changed("shared/triton_functions.py", "1.0 - tail", "tail") == {"pom_pool", "pom_scan", "linear_powers"}
    assert changed("qt/triton_causal.py", "CHUNK = 128", "CHUNK = 64") == {"qt_causal"}


LOOP = """
module {
  tt.func public @kernel(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"), %out: !tt.ptr<bf16> loc("out"), %n: i32 loc("n")) {
    %c4 = arith.constant 4 : i32 loc(#loc1)
    %c0 = arith.constant 0 : i32 loc(#loc1)
    %zero = arith.constant dense<0.000000e+00> : tensor<4x8xf32> loc(#loc1)
    %pid = tt.get_program_id x : i32 loc(#loc2)
    %row = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32> loc(#loc2)
    %last = arith.addi %pid, %c4 : i32 loc(#loc2)
    %end = arith.minsi %last, %n : i32 loc(#loc2)
    %sum = scf.for %i = %pid to %end step %c4 iter_args(%carry = %zero) -> (tensor<4x8xf32>)  : i32 {
      %0 = tt.splat %i : i32 -> tensor<4xi32> loc(#loc3)
      %1 = arith.addi %0, %row : tensor<4xi32> loc(#loc3)
      %2 = tt.splat %n : i32 -> tensor<4xi32> loc(#loc3)
      %3 = arith.cmpi slt, %1, %2 : tensor<4xi32> loc(#loc3)
      %4 = tt.expand_dims %1 {axis = 1 : i32} : tensor<4xi32> -> tensor<4x1xi32> loc(#loc3)
      %5 = tt.broadcast %4 : tensor<4x1xi32> -> tensor<4x8xi32> loc(#loc3)
      %6 = tt.expand_dims %3 {axis = 1 : i32} : tensor<4xi1> -> tensor<4x1xi1> loc(#loc3)
      %7 = tt.broadcast %6 : tensor<4x1xi1> -> tensor<4x8xi1> loc(#loc3)
      %8 = tt.splat %x : !tt.ptr<f32> -> tensor<4x8x!tt.ptr<f32>> loc(#loc3)
      %9 = tt.addptr %8, %5 : tensor<4x8x!tt.ptr<f32>>, tensor<4x8xi32> loc(#loc3)
      %10 = tt.load %9, %7, %zero : tensor<4x8x!tt.ptr<f32>> loc(#loc4)
      %11 = arith.addf %carry, %10 : tensor<4x8xf32> loc(#loc5)
      scf.yield %11 : tensor<4x8xf32> loc(#loc6)
    } loc(#loc7)
    %12 = "tt.reduce"(%sum) <{axis = 1 : i32}> ({
    ^bb0(%a: f32 loc("a"), %b: f32 loc("b")):
      %13 = arith.addf %a, %b : f32 loc(#loc8)
      tt.reduce.return %13 : f32 loc(#loc8)
    }) : (tensor<4x8xf32>) -> tensor<4xf32> loc(#loc8)
    %14 = arith.truncf %12 : tensor<4xf32> to tensor<4xbf16> loc(#loc9)
    %15 = tt.splat %out : !tt.ptr<bf16> -> tensor<4x!tt.ptr<bf16>> loc(#loc9)
    %16 = tt.addptr %15, %row : tensor<4x!tt.ptr<bf16>>, tensor<4xi32> loc(#loc9)
    tt.store %16, %14 : tensor<4x!tt.ptr<bf16>> loc(#loc9)
    tt.return loc(#loc10)
  } loc(#loc)
} loc(#loc)
"""


def test_bytes_and_operations_are_those_of_a_count_by_hand():
    """Programs 0 … 7 with n = 6: those from 6 on run no loop, and program p reads min(4, 6 - p) rows of 8 equal places."""
    counts = counted(LOOP, {"n": 6}, (8,))
    rows = [4, 4, 4, 3, 2, 1, 0, 0]
    assert counts.read == 6 * 4, "x has six elements that are read, however often"
    assert counts.written == 4 * 2, "all programs write the same four elements of bfloat16"
    assert counts.requested == sum(rows) * 8 * 4 + 8 * 4 * 2
    assert counts.others == 6 * 4 * 8 + 8 * 4 * 7, "a tile of additions in six programs, and four sums of 8 in all"
    assert counts.products == {}


def test_a_kernel_whose_addresses_are_data_is_not_counted_wrongly():
    with pytest.raises(NotImplementedError, match="depends on data"):
        counted(LOOP.replace("tt.splat %i :", "tt.load %x :"), {"n": 6}, (8,))


@pytest.mark.slow
def test_counts_of_the_kernels_are_those_of_their_definitions(rows):
    def kernels(op, pass_="forward", card="A100"):
        (row,) = (r for r in rows if (r["op"], r["dtype"], r["pass"], r["card"]) == (op, "float32", pass_, card))
        return row["kernels"]

    (pooled,) = kernels("pooled_product")
    programs = pooled["programs"][0]
    assert pooled["counts"]["read"] == 4 * (2 * TOKENS * DIM + HEADS * TOKENS), "k, v and p_2, each once"
    assert pooled["counts"]["written"] == 4 * programs * DIM // HEADS, "a sum of each program"
    tiles = programs * (DIM // HEADS) * 31  # a sum of 32 tokens is 31 additions
    assert pooled["counts"]["others"] == 4 * TOKENS * DIM + tiles, "k v, p_2, its product with them, and the sum"
    (gated,) = kernels("gate_tokens")
    assert gated["counts"]["written"] == 4 * TOKENS * DIM

    multiplied = 3 * 2 * 2 * TOKENS * (DIM // HEADS) ** 2 * HEADS  # tf32x3; degrees 1 and 2; two per multiply-add
    mma = 2 * 16 * 8 * 8  # of one mma.sync.m16n8k8; there is no loop around them
    for pull in (kernel for kernel in kernels("qt compact", "training") if kernel["kernel"] == "_pull_kernel"):
        assert pull["counts"]["products"] == {"tf32x3": multiplied}
        assert pull["products"] * mma * pull["warps"] * pull["programs"][0] == multiplied, "PTX multiplies as often"
