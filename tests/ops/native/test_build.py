"""The C kernels are compiled once and cached; if they cannot be compiled, there is a reason."""

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
    reason="untested: building the kernels, which needs Linux, a compiler and GNU OpenMP",
)  # fmt: skip
def test_they_build_if_there_is_a_compiler():
    """An error in the C code would otherwise only skip the kernels' tests."""
    assert NATIVE is None and build.why_not() is None


@needs_it
def test_an_unsupported_call_compiles_nothing(nothing_built):
    mixer, x = polymix.create_mixer("padre", 16), torch.randn(1, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in polymix.explain(mixer, x)[0].why
    assert not list(nothing_built.rglob("*.so"))


@needs_it
def test_it_is_compiled_and_logged_once(nothing_built, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "polymix")
    assert build.why_not() is None and len(caplog.records) == 1
    (library,) = (nothing_built / "cache" / "polymix").iterdir()
    assert str(library) in caplog.text and library.suffix == ".so", "the folder must hold only the library"
    build._library.cache_clear()
    monkeypatch.setattr(build, "_run", lambda *command: pytest.fail("it was compiled again"))
    assert build.why_not() is None and len(caplog.records) == 1


@needs_it
def test_a_compiler_may_be_a_command_with_options(nothing_built, monkeypatch):
    monkeypatch.setenv("CC", f"env {build._compiler()[0]} -g0")
    assert build.why_not() is None


@needs_it
def test_without_a_home_folder_the_library_is_in_the_temporary_folder(nothing_built, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(build.os.path, "expanduser", lambda path: path)
    assert build.why_not() is None and list((nothing_built / "temporary").rglob("*.so"))


@needs_it
def test_each_processor_has_its_own_library(nothing_built, monkeypatch):
    build.why_not()
    build._library.cache_clear()
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert build.why_not() is None
    assert len(list((nothing_built / "cache" / "polymix").iterdir())) == 2


@needs_it
def test_with_a_read_only_cache_the_library_is_in_the_temporary_folder(nothing_built, monkeypatch):
    (nothing_built / "cache").write_text("a file in place of the folder")
    assert build.why_not() is None
    assert list((nothing_built / "temporary").rglob("*.so"))


def script(tmp_path, body):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="untested: building the kernels, which needs Linux")
@pytest.mark.parametrize(("body", "reason"), [
    ("echo 'no such flag: -march' >&2; exit 3", "no such flag: -march"), ("exit 3", "status 3"),
    ('for last; do :; done; echo "no library" > "$last"', "cannot be loaded"), ("sleep 60", "more than 0.2 s"),
])  # fmt: skip
def test_if_the_compiler_fails_plain_pytorch_runs(nothing_built, monkeypatch, body, reason):
    monkeypatch.setenv("CC", script(nothing_built, body))
    if "sleep" in body:
        monkeypatch.setattr(build, "PATIENCE", 0.2)
    x, mixer = torch.randn(1, 35, 16), polymix.create_mixer("padre", 16, grid=(5, 7))
    (choice,) = polymix.explain(mixer, x)
    assert choice.impl == "eager" and reason in choice.why, choice
    with pytest.raises(CapabilityError, match="native"):
        polymix.create_mixer("padre", 16, grid=(5, 7), impl="native")(x)
    assert mixer(x).shape == x.shape
    assert not list(nothing_built.rglob("*.so")), "a broken library must be deleted"


@pytest.mark.parametrize(("change", "reason"), [
    (lambda patch: patch.setattr(build.sys, "platform", "win32"), "not on win32"),
    (lambda patch: (patch.delenv("CC", raising=False), patch.setattr(build.shutil, "which", lambda name: None)), "no C compiler"),
    (lambda patch: patch.setenv("CC", "/nowhere/cc -O1"), "/nowhere/cc could not be run"),
    (lambda patch: patch.setattr(build.ctypes, "CDLL", lambda name: object()), "GNU OpenMP"), (lambda patch: patch.setenv("POLYMIX_NATIVE", "0"), "POLYMIX_NATIVE=0"),
])  # fmt: skip
def test_why_there_is_no_library(nothing_built, monkeypatch, change, reason):
    monkeypatch.setattr(build.sys, "platform", "linux")
    change(monkeypatch)
    assert reason in build.why_not()


@needs_it
def test_too_little_memory_is_an_error(monkeypatch):
    class Full:
        @staticmethod
        def depthwise(*args):
            return 1

    monkeypatch.setattr(build, "_library", lambda: Full)
    with pytest.raises(MemoryError, match="depthwise"):
        build.call("depthwise")


def test_a_graph_with_kernels_raises_on_a_machine_without_them(monkeypatch):
    monkeypatch.setattr(build, "_library", lambda: "no compiler")
    with pytest.raises(RuntimeError, match="depthwise has no kernel here: no compiler"):
        torch.ops.polymix.padre_step(*arguments(*SHAPES["short"]), "native")


@needs_it
def test_importing_compiles_nothing(tmp_path):
    code = "import polymix, torch; polymix.create_mixer('padre', 16)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert not any(tmp_path.iterdir())
