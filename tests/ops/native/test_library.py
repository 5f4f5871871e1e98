"""The C kernels are compiled at installation and loaded by processor level; if they cannot run, there is a reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polymix
from polymix.errors import CapabilityError
from polymix.ops.native import compile, library
from tests.ops.kernels import COMPILES, NATIVE, needs_compiler, needs_it
from tests.ops.padre.test_native import SHAPES, arguments

V3 = (
    {"x86-64-v3": ("-march=x86-64-v3",)}
    if "x86-64-v3" in compile.levels()
    else dict(list(compile.levels().items())[:1])
)


@pytest.mark.skipif(not COMPILES or os.environ.get(library.SWITCH) == "0" or not library.usable_levels(),
                    reason="untested: that the kernels are built, which needs Linux and a compiler")  # fmt: skip
def test_the_kernels_are_built_if_there_is_a_compiler():
    """If this fails, run `polymix build-kernels`. Without it, missing kernels would only skip their tests."""
    assert NATIVE is None


@pytest.mark.slow
@needs_compiler
def test_a_build_leaves_only_one_complete_library_per_level(tmp_path):
    (tmp_path / "kernels-x86-64-v3-0123456789ab.so").write_text("of other sources")
    (tmp_path / "notes.txt").write_text("the user's own")
    built = compile.build(tmp_path, V3)
    assert [path.name for path in built] == [compile.library_path(next(iter(V3))).name]
    assert sorted(tmp_path.iterdir()) == sorted([*built, tmp_path / "notes.txt"])
    assert library._is_complete(built[0])


def compiler(tmp_path, body):
    path = tmp_path / "a compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="untested: building the kernels, which needs Linux")
@pytest.mark.parametrize(("body", "words"), [
    ("echo 'no such flag: -march' >&2; exit 3", "no such flag: -march"), ("exit 3", "exit status 3"),
    ("printf '\\377\\n' >&2; exit 1", "failed"), ("sleep 60", "took more than 0.2 s"),
])  # fmt: skip
def test_a_failing_compiler_is_named_and_leaves_no_files(tmp_path, monkeypatch, body, words):
    """For any output in any encoding."""
    monkeypatch.setenv("CC", str(compiler(tmp_path, body)))
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    monkeypatch.setattr(compile, "COMPILER_SECONDS", 0.2 if "sleep" in body else 600)
    with pytest.raises(compile.CompileError, match=f"a compiler.*{words}"):
        compile.build(tmp_path / "libraries")
    assert not list((tmp_path / "libraries").iterdir())


@pytest.mark.exhaustive
@needs_compiler
def test_the_next_compiler_is_tried(tmp_path, monkeypatch):
    """CC may be clang, which has another OpenMP."""
    monkeypatch.setenv("CC", str(compiler(tmp_path, "exit 1")))
    assert compile.build(tmp_path / "libraries", V3)


@needs_compiler
def test_a_compiler_that_does_not_know_amx_builds_the_other_levels(tmp_path, monkeypatch):
    """gcc before 11. What compiles stands in for the compiler: it writes a file and knows all other options."""
    body = """case "$*" in *-mamx*) echo "unrecognized option '-mamx-tile'" >&2; exit 1;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done"""
    monkeypatch.setenv("CC", str(compiler(tmp_path, body)))
    levels = compile.LEVELS["x86_64"]
    built = compile.build(tmp_path / "libraries", levels)
    assert built == [compile.library_path(level, tmp_path / "libraries") for level in levels if level != library.AMX]


@pytest.mark.parametrize(("value", "command"), [
    ("gcc -m64", ["gcc", "-m64"]), ("", None), ("'/opt/my gcc' -g0", ["/opt/my gcc", "-g0"]),
])  # fmt: skip
def test_values_of_CC(monkeypatch, value, command):
    monkeypatch.setenv("CC", value)
    monkeypatch.setattr(compile.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert compile.compilers() == [*([command] if command else []), ["/usr/bin/gcc"]]


def test_CC_may_be_a_path_with_a_space(tmp_path, monkeypatch):
    path = compiler(tmp_path, "exit 0")
    monkeypatch.setenv("CC", str(path))
    assert compile.compilers()[0] == [str(path)]


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    monkeypatch.setattr(compile, "levels", lambda: V3)
    with pytest.raises(compile.CompileError, match="install gcc"):
        compile.build(tmp_path)


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() == 0, reason="untested: a folder that root may write anyway")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "libraries").mkdir(mode=0o500)
    with pytest.raises(compile.CompileError, match="cannot write"):
        compile.build(tmp_path / "libraries", V3)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "compilers", lambda: [["cc"]])
    (tmp_path / "libraries").write_text("a file")
    with pytest.raises(compile.CompileError, match="cannot write to"):
        compile.build(tmp_path / "libraries", {"x86-64-v3": ()})
    assert (tmp_path / "libraries").read_text() == "a file"


# Loading


FLAGS = {
    library.AMX: library.FEATURES_OF_LEVEL[library.AMX],
    "x86-64-v4": library.FEATURES_OF_LEVEL["x86-64-v4"],
    "x86-64-v3": library.FEATURES_OF_LEVEL["x86-64-v3"],
    "x86-64": frozenset({"sse2"}),
}


@pytest.mark.parametrize(("processor", "levels"), [
    (library.AMX, [library.AMX, "x86-64-v4", "x86-64-v3"]), ("x86-64-v4", ["x86-64-v4", "x86-64-v3"]),
    ("x86-64-v3", ["x86-64-v3"]), ("x86-64", []),
])  # fmt: skip
def test_a_processor_uses_the_levels_that_it_can_run(monkeypatch, processor, levels):
    monkeypatch.setattr(compile, "levels", lambda: compile.LEVELS["x86_64"])
    monkeypatch.setattr(library, "processor_flags", lambda: FLAGS[processor])
    monkeypatch.setattr(library, "tiles_are_permitted", lambda: True)
    assert library.usable_levels() == levels


@pytest.mark.skipif(sys.platform != "linux", reason="untested: asking Linux for AMX's tiles")
def test_without_permission_amx_is_not_used(monkeypatch):
    """The first instruction on a tile would end the process. Where the system refuses, v4 runs."""
    asked = []

    class Refusing:
        def __init__(self, name):
            assert name is None

        def syscall(self, *values):
            asked.append(values)
            return -1

    monkeypatch.setattr(compile, "levels", lambda: compile.LEVELS["x86_64"])
    monkeypatch.setattr(library, "processor_flags", lambda: FLAGS[library.AMX])
    monkeypatch.setattr(library.ctypes, "CDLL", Refusing)
    library.tiles_are_permitted.cache_clear()
    try:
        assert library.usable_levels() == ["x86-64-v4", "x86-64-v3"]
    finally:
        library.tiles_are_permitted.cache_clear()
    assert asked == [(158, 0x1023, 18)]


@pytest.mark.parametrize(("level", "processor", "products"), [
    (library.AMX, {"amx_bf16", "avx512_bf16"}, True), ("x86-64-v4", {"avx512_bf16"}, True), ("x86-64-v4", set(), False),
    ("x86-64-v4", {"amx_bf16", "avx512_bf16"}, False), ("x86-64-v3", {"avx512_bf16"}, False), (None, {"avx512_bf16"}, False),
])  # fmt: skip
def test_only_kernels_with_the_fastest_bf16_products_of_the_processor_count(monkeypatch, level, processor, products):
    path = None if level is None else Path(f"kernels-{level}-0123456789ab.so")
    monkeypatch.setattr(library, "loaded", lambda: path)
    monkeypatch.setattr(library, "processor_flags", lambda: processor)
    assert library.loaded_level() == level and library.multiplies_bf16() == products


def explained():
    mixer = polymix.create_mixer("padre", 16, grid=(5, 7))
    return polymix.explain(mixer, torch.randn(1, 35, 16))[0]


@pytest.mark.parametrize(("change", "words"), [
    (lambda patch, folder: patch.setattr(compile.sys, "platform", "win32"), "no C kernels for win32"),
    (lambda patch, folder: patch.setattr(library.ctypes, "CDLL", lambda name: object()), "GNU OpenMP"),
    (lambda patch, folder: patch.setenv("POLYMIX_NATIVE", "0"), "POLYMIX_NATIVE=0"),
    (lambda patch, folder: patch.setenv("POLYMIX_NATIVE", "x86-64-v9"), "this processor runs"),
    (lambda patch, folder: patch.setattr(library, "processor_flags", frozenset), "need a processor with"),
    (lambda patch, folder: patch.setattr(library, "processor_flags", lambda: frozenset({"sse2", "avx"})), "need a processor with"),
    (lambda patch, folder: None, "not built; run `polymix build-kernels`"),
    (lambda patch, folder: (folder.mkdir(), (folder / "kernels-x86-64-v3-000000000000.so").write_text("")), "from other sources"),
    (lambda patch, folder: (folder.mkdir(), compile.library_path(library.usable_levels()[0]).write_text("cut")), "is cut off"),
])  # fmt: skip
def test_plain_pytorch_runs_without_kernels_and_explain_says_why(nothing_built, monkeypatch, change, words):
    if not library.usable_levels():
        pytest.skip("untested: the reasons on a processor without kernels")
    change(monkeypatch, nothing_built)
    choice = explained()
    assert choice.impl == "eager" and words in choice.why
    with pytest.raises(CapabilityError, match="native"):
        polymix.create_mixer("padre", 16, grid=(5, 7), impl="native")(torch.randn(1, 35, 16))


@needs_it
def test_a_truncated_library_is_not_loaded(nothing_built):
    """Mapping a truncated file kills the process (SIGBUS) instead of raising."""
    nothing_built.mkdir()
    path = compile.library_path(library.usable_levels()[0])
    whole = next(file for file in (compile.HEADERS / "libraries").glob(path.name)).read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert "is cut off" in library.why_not()


@pytest.mark.slow
@needs_it
def test_nothing_is_compiled_or_written_when_a_mixer_runs(tmp_path):
    """Without a compiler, a home folder or a temporary folder: the library is in the package."""
    code = ("import torch, polymix; m = polymix.create_mixer('padre', 16, impl='native', grid=(5, 7));"
            "m(torch.randn(1, 35, 16)).sum().backward()")  # fmt: skip
    environment = {**os.environ, "PATH": "", "HOME": "/nowhere", "TMPDIR": "/nowhere", "LC_ALL": "C", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    assert not any(tmp_path.iterdir())


@needs_it
def test_too_little_memory_is_an_error(monkeypatch):
    class Full:
        @staticmethod
        def depthwise(*args):
            return 1

    monkeypatch.setattr(library, "_library", lambda: Full)
    with pytest.raises(MemoryError, match="depthwise"):
        torch.ops.polymix.padre_step(*arguments(*SHAPES["short"]), "native")


def test_a_graph_with_kernels_raises_on_a_machine_without_them(monkeypatch):
    monkeypatch.setattr(library, "_library", lambda: "not built")
    with pytest.raises(RuntimeError, match="depthwise has no kernel here: not built"):
        torch.ops.polymix.padre_step(*arguments(*SHAPES["short"]), "native")
