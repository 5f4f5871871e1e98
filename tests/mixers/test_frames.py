"""How much of the package a call crosses: what runs at every step of a model can be read in few files."""

import sys
from pathlib import Path

import pytest
import torch

import polymix
from polymix.mixers.mixer import TokenMixer

ROOT = str(Path(polymix.__file__).parent)
INNER = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


def crossed(call):
    """The files and functions of the package that a second call crosses."""
    functions = set()

    def look(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in INNER:
            functions.add((code.co_filename, code.co_name))

    with torch.no_grad():
        call()
        sys.setprofile(look)
        try:
            call()
        finally:
            sys.setprofile(None)
    return {file for file, _ in functions}, functions


@pytest.mark.parametrize("impl", ["eager", "native"])
def test_padre_crosses_seven_files(impl):
    """Native PADRe once crossed 14 files and 49 functions: its loop stood in another implementation's room."""
    mixer, x = polymix.create_mixer("padre", 192, grid=(14, 14), impl=impl).eval(), torch.randn(1, 196, 192)
    if impl == "native" and (reason := polymix.ops.native.library.why_not()):
        pytest.skip(f"untested: the C kernels ({reason})")
    files, functions = crossed(lambda: mixer(x))
    assert len(files) <= 7 and len(functions) <= 25, sorted(functions)


def test_a_step_of_pom_is_no_prefill(monkeypatch):
    mixer, x = polymix.create_mixer("pom", 64).eval(), torch.randn(1, 5, 64)
    _, state = mixer.prefill(x[:, :4])
    monkeypatch.setattr(TokenMixer, "prefill", None)
    files, functions = crossed(lambda: mixer.step(x[:, 4], state))
    assert len(files) <= 10 and len(functions) <= 27, sorted(functions)
