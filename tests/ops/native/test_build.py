"""The kernels in C are compiled once, kept, and refused with a reason where they cannot be."""

import ctypes
import logging
import os
import subprocess
import sys

import pytest
import torch

import polymix
from polymix.errors import CapabilityError
from polymix.ops.native import build
from tests.ops.kernels import NATIVE, needs_it
from tests.ops.padre.test_native import SHAPES, arguments


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
    build._library.cache_clear()
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
    build._library.cache_clear()
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

    monkeypatch.setattr(build, "_library", lambda: Full)
    with pytest.raises(MemoryError, match="depthwise"):
        build.call("depthwise")


def test_a_graph_that_comes_where_there_is_none_says_so(monkeypatch):
    monkeypatch.setattr(build, "_library", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="depthwise has no kernel here: no compiler"):
        torch.ops.polymix.padre_step(*arguments(*SHAPES["short"]), "native")


@needs_it
def test_importing_compiles_nothing(tmp_path):
    code = "import polymix, torch; polymix.create_mixer('padre', 16)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert not any(tmp_path.iterdir())
