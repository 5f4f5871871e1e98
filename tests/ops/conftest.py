import ctypes
import gc
import platform

import pytest
import torch

from polymix.ops.native import compile, library
from tests.helpers import poisoned, slow_but
from tests.ops.native import emulation


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """Fill torch.empty with NaN, so that elements that no program writes stay NaN."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture
def fresh_memory_is_nan(monkeypatch):
    """Fill all memory that torch allocates with NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def with_threads():
    """Run with each of the given numbers of threads."""
    before = torch.get_num_threads()

    def each(*counts):
        for count in counts:
            torch.set_num_threads(count)
            yield count
        torch.set_num_threads(before)

    yield each
    torch.set_num_threads(before)


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """An empty folder for the libraries, and none loaded yet."""
    monkeypatch.setattr(compile, "LIBRARIES", tmp_path / "libraries")
    library._library.cache_clear()
    yield tmp_path / "libraries"
    library._library.cache_clear()


INSTALLED = ("x86-64-v3", "x86-64-v4", library.AMX)  # the others are built by their first test, which takes seconds
TILES = "emulated-tiles"  # the code for AMX, whose instructions C emulates
OTHERS = {"x86-64": ("-march=x86-64",), TILES: ("-march=x86-64-v3", "-DEMULATE_TILES")}


@pytest.fixture(params=slow_but(INSTALLED, (*OTHERS, *INSTALLED, "armv8-a")))
def vectors(request, monkeypatch, tmp_path_factory):
    """Use kernels for vectors of 4, 8 and 16 floats and for tiles, whichever this machine would load, and for tiles and for
    aarch64 in an emulation.
    """
    level = request.param
    if level == "armv8-a" and platform.machine() != "aarch64":
        if missing := emulation.missing():
            pytest.skip(f"untested: kernels for aarch64, which need {missing}")
        program = emulation.build(tmp_path_factory.getbasetemp().parent / "kernels" / level)
        monkeypatch.setattr(library, "_library", lambda: emulation.Emulated(program))
        gc.freeze()  # the emulation looks for tensors among the objects made from here on
        yield level
        gc.unfreeze()
        return
    needed = "x86-64-v3" if level == TILES else level
    if platform.machine() != "x86_64" or needed not in ("x86-64", *library.usable_levels()):
        pytest.skip(f"untested: kernels for {level}, which this processor cannot run")
    folder = tmp_path_factory.getbasetemp().parent / "kernels" / level  # shared by the workers: built once
    path = compile.library_path(level)  # as it is installed
    path = path if path.is_file() else compile.library_path(level, folder)
    if not path.is_file():
        compile.build(folder, {level: OTHERS.get(level) or compile.levels()[level]})
    loaded = ctypes.CDLL(str(path))
    monkeypatch.setattr(library, "_library", lambda: loaded)
    yield level
