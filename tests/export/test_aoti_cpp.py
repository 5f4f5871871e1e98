"""The C++ example that runs a package of AOTInductor, built and run."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import polymix

EXAMPLE = Path(__file__).parents[2] / "examples/aoti_cpp"
SHAPE = (2, 8, 16)


@pytest.mark.slow
def test_the_program_gives_the_numbers_of_pytorch(tmp_path):
    if not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("untested: the C++ example (cmake and a C++ compiler)")
    torch.manual_seed(0)
    mixer = polymix.create_mixer("pom", SHAPE[-1]).eval()
    polymix.export.export(mixer, torch.randn(SHAPE), tmp_path / "out", targets=("aoti",))
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", EXAMPLE, "-B", tmp_path / "build", prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    program, package = tmp_path / "build/run", tmp_path / "out/aoti/model.pt2"
    printed = subprocess.run([program, package, *map(str, SHAPE)], check=True, capture_output=True, text=True).stdout
    shape, numbers = printed.strip().rsplit("]", 1)
    first, total = map(float, numbers.split())
    with torch.no_grad():
        expected = mixer((torch.arange(256.0) * 0.001).reshape(SHAPE))
    assert shape == "[2, 8, 16"
    assert first == pytest.approx(expected.flatten()[0].item(), abs=1e-5 * expected.abs().max().item())
    assert total == pytest.approx(expected.double().sum().item(), abs=1e-5 * expected.abs().sum().item())
    wrong = subprocess.run([program, tmp_path / "none.pt2", "2"], capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stderr.startswith("run: ")
