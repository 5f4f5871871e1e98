"""Random calls of the C kernels under the address and undefined-behaviour sanitizers, with fresh memory full of NaN."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polymix.ops.native import compile, library
from tests.helpers import slow_but

LEVEL = next((level for level in ("x86-64-v3", "armv8-a") if level in library.usable_levels()), None)
# A small budget: threads share accumulators in most cases.
OPTIONS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DBUDGET=20000")


def runtime(name):
    """The path of gcc's library `name`, or None."""
    if shutil.which("gcc") is None:
        return None
    path = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return path if Path(path).is_absolute() else None


RUNTIMES = [runtime("libasan.so"), runtime("libubsan.so")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        LEVEL is None or None in RUNTIMES, reason="untested: kernels under sanitizers, which gcc brings"
    ),
]


def build(folder, monkeypatch, *options):
    monkeypatch.setenv("CC", "gcc")
    (path,) = compile.build(folder, {LEVEL: (*compile.levels()[LEVEL], *OPTIONS, *options)})
    return path


def run(path, cases):
    environment = {
        **os.environ, "LD_PRELOAD": ":".join(RUNTIMES), "PYTHONPATH": str(compile.OPS.parents[1]),
        # Every byte that is allocated becomes 255, which makes a float NaN.
        "ASAN_OPTIONS": "detect_leaks=0:symbolize=0:malloc_fill_byte=255:max_malloc_fill_size=1073741824",
        "UBSAN_OPTIONS": "halt_on_error=1", "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.ops.native.random_calls", str(path), str(cases)]
    root = Path(__file__).parents[3]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)


@pytest.mark.parametrize("count", slow_but((), [800, 3000], [800]))
@pytest.mark.parametrize("options", [(), ("-DEMULATE_TILES",)], ids=["vectors", "emulated tiles"])
def test_random_calls(tmp_path, monkeypatch, options, count):
    """Tiles read and write sixteen rows at once, so also what follows the last one."""
    result = run(build(tmp_path / "libraries", monkeypatch, *options), count)
    assert result.returncode == 0 and result.stdout.strip() == f"{count}", result.stderr[-4000:]


def test_a_planted_error_is_found(tmp_path, monkeypatch):
    """Rooms that are too small, so that the test above is known to see something."""
    file, right, wrong = "native/product.h", "return ROWS * pitch_of(width) +", "return ROWS / 2 * pitch_of(width) +"
    shutil.copytree(compile.OPS, tmp_path / "ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    source = tmp_path / "ops" / file
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, wrong, 1))
    with monkeypatch.context() as patch:
        patch.setattr(compile, "OPS", tmp_path / "ops")
        patch.setattr(compile, "HEADERS", tmp_path / "ops" / "native")
        path = build(tmp_path / "libraries", patch)
    result = run(path, 40)
    assert result.returncode != 0
    assert "use-after-poison" in result.stderr, result.stderr[-4000:]
