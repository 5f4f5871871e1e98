"""The kernels in C against the definition in float64, on sizes that fill no vector, tile or strip; and their building."""

import ctypes
import logging
import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymix
from polymix.errors import CapabilityError
from polymix.ops.native import build
from polymix.ops.padre import _step
from tests.helpers import poisoned, tokens

NATIVE = build.why_not()
needs_it = pytest.mark.skipif(NATIVE is not None, reason=f"untested: kernels in C: {NATIVE}")
SHAPES = {  # batch, grid, kernel, channels, causal
    "one place": (1, (1,), (1,), 1, False), "short": (2, (5,), (3,), 17, False), "causal": (2, (37,), (4,), 16, True),
    "causal, longer kernel than tokens": (1, (3,), (8,), 5, True), "long": (1, (1500,), (7,), 20, False),
    "kernel beyond the grid": (2, (3, 2), (11, 11), 33, False), "11 x 11": (3, (14, 14), (11, 11), 48, False),
    "13 x 3": (1, (20, 9), (13, 3), 16, False), "1 x 9": (2, (6, 31), (1, 9), 31, False), "flat": (1, (1, 40), (5, 5), 4, False),
    "many strips": (1, (120, 75), (11, 11), 18, False), "wide": (1, (4, 700), (3, 5), 16, False), "no sample": (0, (4, 4), (3, 3), 16, False),
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", list(SHAPES))


def arguments(batch, grid, kernel, dim, causal, dtype=torch.float32, bias=True, y=True):
    n = int(torch.tensor(grid).prod())
    x = tokens(batch, n + (kernel[0] - 1 if causal else 0), dim).to(dtype)
    weight = tokens(dim, 1, *kernel, seed=1).to(dtype)
    return (x, weight, tokens(dim, seed=2).to(dtype) if bias else None, tokens(batch, n, dim, seed=3).to(dtype) if y else None,
            list(grid), causal, 1)  # fmt: skip


def derivatives(args, impl, rounded=torch.float32):
    """Output and gradients, of a cotangent that is a number of the type `rounded`."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = torch.ops.polymix.padre_step(*leaves, impl)
    cotangent = tokens(*out.shape, seed=4).to(rounded).to(out.dtype)
    return [out, *torch.autograd.grad(out, [a for a in leaves if isinstance(a, torch.Tensor)], cotangent)]


def doubled(args):
    return tuple(a.double() if isinstance(a, torch.Tensor) else a for a in args)


def off(ours, wanted):
    if wanted.numel() == 0:
        return 0.0
    return ((ours.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


@pytest.fixture
def fresh_memory_is_nan(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@needs_it
@every_shape
@pytest.mark.parametrize("given", [(True, True), (False, False), (True, False), (False, True)])
def test_the_step_and_its_gradients(shape, given, fresh_memory_is_nan):
    args = arguments(*SHAPES[shape], bias=given[0], y=given[1])
    for ours, wanted in zip(derivatives(args, "native"), derivatives(doubled(args), "eager"), strict=True):
        assert (ours.shape, ours.dtype) == (wanted.shape, torch.float32)
        assert off(ours, wanted) < 3e-6, "sums in float32 of products in float32"


@needs_it
@every_shape
def test_bf16_is_rounded_once(shape):
    args = arguments(*SHAPES[shape], dtype=torch.bfloat16)
    found = (derivatives(given, impl, torch.bfloat16) for given, impl in ((args, "native"), (doubled(args), "eager")))
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == torch.bfloat16
        largest = wanted.abs().max().item() if wanted.numel() else 1.0
        assert torch.allclose(ours.double(), wanted, rtol=2**-8, atol=1e-5 * largest)


@needs_it
def test_bf16_keeps_what_is_not_finite():
    args = arguments(1, (3, 4), (1, 1), 16, False, dtype=torch.bfloat16, bias=False, y=False)
    args[1].fill_(1.0)
    for value in (float("nan"), float("inf"), -float("inf"), 3.3895e38, 1e-40, 0.0):
        args[0].fill_(value)
        assert torch.allclose(torch.ops.polymix.padre_step(*args, "native"), args[0], equal_nan=True), value


@needs_it
@given(
    batch=st.integers(1, 3), grid=st.lists(st.integers(1, 19), min_size=1, max_size=2), dim=st.integers(1, 40),
    half=st.lists(st.integers(0, 6), min_size=2, max_size=2), causal=st.booleans(), even=st.integers(0, 1),
)  # fmt: skip
def test_any_shape(batch, grid, dim, half, causal, even):
    causal = causal and len(grid) == 1
    kernel = tuple(2 * k + 1 for k in half[: len(grid)])
    kernel = (kernel[0] + even,) if causal else kernel
    args = arguments(batch, tuple(grid), kernel, dim, causal)
    for ours, wanted in zip(derivatives(args, "native"), derivatives(doubled(args), "eager"), strict=True):
        assert off(ours, wanted) < 3e-6


@needs_it
def test_any_layout_of_the_tokens():
    """Transposed, cut out of something wider, every other token, one sample for all: no copy may be forgotten."""
    args = arguments(2, (5, 7), (3, 3), 24, False)
    wanted = derivatives(doubled(args), "eager")

    def wide(x):
        return torch.cat((x, x, x), -1)[..., 24:48]

    def sparse(x):
        return x.repeat_interleave(2, 1)[:, ::2]

    def turned(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(x):  # begins where no vector does
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    for change in (wide, sparse, turned, shifted):
        given = (change(args[0]), *args[1:3], change(args[3]), *args[4:])
        assert all(off(a, b) < 3e-6 for a, b in zip(derivatives(given, "native"), wanted, strict=True)), change.__name__
    one = (args[0][:1].expand(3, -1, -1), *args[1:3], args[3][:1].expand(3, -1, -1), *args[4:])
    out = torch.ops.polymix.padre_step(*one, "native")
    assert all(torch.equal(out[0], sample) for sample in out)


@needs_it
def test_the_same_bits_whatever_the_threads():
    args = arguments(*SHAPES["many strips"])
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            found.append(derivatives(args, "native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_it
def test_the_output_may_take_the_place_of_y():
    from polymix.ops.native.padre import step

    x, weight, bias, y, *_ = arguments(*SHAPES["many strips"])
    wanted = step(x, weight, bias, y, (120, 75))
    assert step(x, weight, bias, y, (120, 75), out=y) is y and torch.equal(y, wanted)


@needs_it
def test_a_sum_over_many_samples_that_cancel():
    """The weight's gradient in float64 between strips: 2,000 samples of large gradients, of which little is left."""
    x, grad = torch.ones(2000, 4, 16), torch.full((2000, 4, 16), 1e4)
    grad[1::2] *= -1
    grad[0] += 1.0
    from polymix.ops.native.padre import step_backward

    _, weight, bias, _ = step_backward(grad, x, torch.ones(16, 1, 1, 1), torch.ones(16), None, (2, 2))
    assert torch.allclose(weight.flatten(), torch.full((16,), 4.0)) and torch.allclose(bias, torch.full((16,), 4.0))


@needs_it
@pytest.mark.skipif(platform.machine() != "x86_64", reason="untested: narrower vectors of x86")
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3"])
def test_processors_with_narrower_vectors(architecture, nothing_built, monkeypatch):
    """Four or eight floats at once, with half the registers; such machines as this one run their code too."""
    monkeypatch.setattr(build, "FLAGS", (f"-march={architecture}", *(f for f in build.FLAGS if "-march" not in f)))
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            args = arguments(*SHAPES[shape], dtype=dtype)
            found = (derivatives(given, impl, dtype) for given, impl in ((args, "native"), (doubled(args), "eager")))
            for ours, wanted in zip(*found, strict=True):
                assert off(ours, wanted) < (3e-6 if dtype == torch.float32 else 2**-8), shape


# Its building


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """A cache of its own, and no library found yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    build._found.cache_clear()
    yield tmp_path
    build._found.cache_clear()


@pytest.mark.skipif(
    sys.platform != "linux" or not build._compiler() or not hasattr(ctypes.CDLL(None), "GOMP_parallel")
    or os.environ.get(build.SWITCH) == "0",
    reason="untested: that the kernels build, for which Linux, a compiler and GNU OpenMP are needed",
)  # fmt: skip
def test_where_there_is_a_compiler_they_build():
    """Were the C at fault, all that needs the kernels would be skipped, and nothing else would fail."""
    assert NATIVE is None and build.why_not() is None


@needs_it
def test_nothing_is_compiled_for_a_call_that_they_are_not_for(nothing_built):
    mixer, x = polymix.create_mixer("padre", 16), torch.randn(1, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in polymix.explain(mixer, x)[0].why
    assert not list(nothing_built.rglob("*.so"))


@needs_it
def test_it_is_compiled_once_and_said(nothing_built, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "polymix")
    assert build.why_not() is None and len(caplog.records) == 1
    (library,) = (nothing_built / "cache" / "polymix").iterdir()
    assert str(library) in caplog.text and library.suffix == ".so", "nothing but the library is left"
    build._found.cache_clear()
    monkeypatch.setattr(build, "_run", lambda *command: pytest.fail("it was compiled again"))
    assert build.why_not() is None and len(caplog.records) == 1


@needs_it
def test_a_compiler_may_be_a_command_with_options(nothing_built, monkeypatch):
    monkeypatch.setenv("CC", f"env {build._compiler()[0]} -g0")
    assert build.why_not() is None


@needs_it
def test_without_a_home_it_is_kept_elsewhere(nothing_built, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(build.os.path, "expanduser", lambda path: path)
    assert build.why_not() is None and list((nothing_built / "temporary").rglob("*.so"))


@needs_it
def test_another_processor_or_source_has_a_library_of_its_own(nothing_built, monkeypatch):
    build.why_not()
    build._found.cache_clear()
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert build.why_not() is None
    assert len(list((nothing_built / "cache" / "polymix").iterdir())) == 2


@needs_it
def test_where_the_cache_cannot_be_written_it_goes_elsewhere(nothing_built, monkeypatch):
    (nothing_built / "cache").write_text("a file where the folder should be")
    assert build.why_not() is None
    assert list((nothing_built / "temporary").rglob("*.so"))


def script(tmp_path, body):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="untested: building in C, which is done on Linux")
@pytest.mark.parametrize(("body", "said"), [
    ("echo 'no such flag: -march' >&2; exit 3", "no such flag: -march"), ("exit 3", "status 3"),
    ('for last; do :; done; echo "no library" > "$last"', "cannot be loaded"), ("sleep 60", "more than 0.2 s"),
])  # fmt: skip
def test_a_compiler_that_fails_is_a_reason_and_plain_pytorch_runs(nothing_built, monkeypatch, body, said):
    monkeypatch.setenv("CC", script(nothing_built, body))
    if "sleep" in body:
        monkeypatch.setattr(build, "PATIENCE", 0.2)
    x, mixer = torch.randn(1, 35, 16), polymix.create_mixer("padre", 16, grid=(5, 7))
    (choice,) = polymix.explain(mixer, x)
    assert choice.impl == "eager" and said in choice.why, choice
    with pytest.raises(CapabilityError, match="native"):
        polymix.create_mixer("padre", 16, grid=(5, 7), impl="native")(x)
    assert mixer(x).shape == x.shape
    assert not list(nothing_built.rglob("*.so")), "something broken was kept"


@pytest.mark.parametrize(("change", "said"), [
    (lambda patch: patch.setattr(build.sys, "platform", "win32"), "not on win32"),
    (lambda patch: (patch.delenv("CC", raising=False), patch.setattr(build.shutil, "which", lambda name: None)), "no C compiler"),
    (lambda patch: patch.setenv("CC", "/nowhere/cc -O1"), "/nowhere/cc could not be run"),
    (lambda patch: patch.setattr(build.ctypes, "CDLL", lambda name: object()), "GNU OpenMP"), (lambda patch: patch.setenv("POLYMIX_NATIVE", "0"), "POLYMIX_NATIVE=0"),
])  # fmt: skip
def test_why_there_is_none(nothing_built, monkeypatch, change, said):
    monkeypatch.setattr(build.sys, "platform", "linux")
    change(monkeypatch)
    assert said in build.why_not()


@needs_it
def test_memory_that_is_not_there_is_an_error(monkeypatch):
    class Full:
        @staticmethod
        def depthwise(*args):
            return 1

    monkeypatch.setattr(build, "_found", lambda: Full)
    with pytest.raises(MemoryError, match="depthwise"):
        build.call("depthwise")


def test_a_graph_that_comes_where_there_is_none_says_so(monkeypatch):
    monkeypatch.setattr(build, "_found", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="depthwise has no kernel here: no compiler"):
        torch.ops.polymix.padre_step(*arguments(*SHAPES["short"]), "native")


@needs_it
def test_importing_compiles_nothing(tmp_path):
    code = "import polymix, torch; polymix.create_mixer('padre', 16)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert not any(tmp_path.iterdir())


def test_the_definition_is_what_the_kernels_are_held_to():
    args = doubled(arguments(1, (4, 4), (3, 3), 4, False))
    assert torch.equal(torch.ops.polymix.padre_step(*args, "eager"), _step(*args))
