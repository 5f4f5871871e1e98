"""The memory that the kernels allocate for themselves is bounded for any number of threads; threads share accumulators."""

import json
import subprocess
import sys

import pytest
import torch

from polymix.ops.native import library
from polymix.ops.qt import qt_pool, qt_spread
from tests.helpers import slow_but
from tests.ops.kernels import needs_it, relative_error
from tests.ops.qt.test_native import pooling, spreading
from tests.ops.test_linear_maps import arguments, as_type
from tests.ops.test_linear_maps import derivatives as of_maps

pytestmark = needs_it
MIB = 1 << 20
NAMES = ("powers", "pairs", "gated", "scaled", "moments", "qt_pool", "qt_spread")


def case(name, n, dim):
    """An operator and its arguments for n tokens; dim² numbers in each weight."""
    if name == "qt_pool":
        return qt_pool, pooling(1, n, dim, dim // 32, 2)
    if name == "qt_spread":
        return qt_spread, spreading(1, n, dim, dim // 32, 2)
    return arguments(name, 1, n, dim, dim, dim)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def largest_scratch(name, n, dim, monkeypatch):
    """The largest buffer of a forward and a backward, in bytes. All sizes come from C; nothing is computed."""
    operator, args = case(name, n, dim)
    sizes, call = [], library.call

    def record(*values):
        call(*values)
        sizes.append(library.scratch_bytes())

    module = sys.modules[operator._kernel("native", "").__module__]
    with monkeypatch.context() as patch:
        patch.setattr(module, "call", record)
        of_maps(operator, as_type(args, torch.float32), "native")
    assert len(sizes) >= 2 and min(sizes) > 0
    return max(sizes)


# What each thread takes for itself, in blocks of 128 tokens; the tenths are rows on their way.
BLOCKS = {"powers": 3.1, "pairs": 4.2, "gated": 5.2, "scaled": 3.1, "moments": 1.1, "qt_pool": 5.3, "qt_spread": 8.9}


def block(dim):
    """The bytes of a block of 128 tokens; rows are padded to an odd number of vectors."""
    return 4 * 128 * (-(-dim // 16) * 16 + 16)


@pytest.mark.parametrize("name", NAMES)
def test_scratch_as_a_function_of_threads_and_channels(name, threads, monkeypatch):
    for dim in (32, 256, 768):
        sizes = {}
        for count in (1, 4, 64):
            threads(count)
            sizes[count] = largest_scratch(name, 512, dim, monkeypatch)
        weights = 4 * 10 * (dim + 16) * (dim + 64)  # packed forms of four maps, their gradients, and the moments of QT
        assert sizes[1] <= weights + 1.5 * BLOCKS[name] * block(dim) + MIB / 4, (dim, sizes)
        assert sizes[4] <= 4 * sizes[1], (dim, sizes)
        assert sizes[64] == sizes[4], "512 tokens are four blocks: more threads must not take more memory"


@pytest.mark.parametrize("name", slow_but(("moments", "powers", "qt_pool"), NAMES))
def test_accumulators_do_not_grow_with_the_threads(name, threads, monkeypatch):
    """Above 32 MiB of accumulators, another thread takes a few blocks of tokens, but no copy of the weights."""
    sizes = {}
    for count in (16, 24):
        threads(count)
        sizes[count] = largest_scratch(name, 24 * 128, 768, monkeypatch)
    assert (sizes[24] - sizes[16]) / 8 <= BLOCKS[name] * block(768), sizes


@pytest.mark.parametrize("name", slow_but(("moments", "powers"), NAMES))
def test_threads_that_share_an_accumulator_agree_and_repeat_themselves(name, threads):
    """A weight of 4 MiB: twelve threads share eight accumulators, or four."""
    operator, args = case(name, 1600, 1024)
    threads(12)
    first, second = (of_maps(operator, as_type(args, torch.float32), "native") for _ in range(2))
    expected = of_maps(operator, as_type(args, torch.float64), "eager")
    for ours, again, exact in zip(first, second, expected, strict=True):
        if ours is None:  # the bound of a denominator has no gradient
            continue
        assert torch.equal(ours, again), "there is a race"
        assert relative_error(ours, exact) < 2e-5


PEAK = """
import json, re, sys, torch, polymix

def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

mixer, x, peaks = polymix.create_mixer("pom", 1024, impl="native"), torch.randn(1, 512, 1024), []
for threads in (1, 1, 16, 64):
    torch.set_num_threads(threads)
    mixer.zero_grad()
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    mixer(x).sum().backward()
    peaks.append(memory("VmHWM") - before)
print(json.dumps(peaks[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="untested: the peak of the memory, which Linux reports")
def test_the_measured_peak_hardly_grows_with_the_threads():
    """PoM with 1,024 channels and 512 tokens: it was 71, 315 and 1,085 MiB with 1, 16 and 64 threads."""
    result = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    one, sixteen, many = json.loads(result.stdout)
    assert many < max(one, 40) + 90 and sixteen < max(one, 40) + 90, (one, sixteen, many)
