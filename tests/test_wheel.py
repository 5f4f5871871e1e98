"""A wheel, installed outside the checkout, does what the checkout does."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import polymix
from polymix.ops.native import compile, library
from polymix.train.registry import OWN_RECIPES
from tests.ops.kernels import needs_compiler

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="untested: a wheel, for which hatchling is needed (the extra dev)")
ROOT = Path(polymix.__file__).parents[1]
OWN = """
import torch
from torch import nn

def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 9, 16)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the tracked files: building compiles the kernels beside their sources."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and name.split("/")[0] in (
            "polymix",
            "pyproject.toml",
            "README.md",
            "LICENSE",
            "hatch_build.py",
        ):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, check=False, env=plain())
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("polymix-*.whl")
    return path


def plain():
    """This process's environment without the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Python of a new environment with the wheel, and with the packages of this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    # A line with a path shows its packages, and not the editable installation that it may hold.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / ("python.exe" if os.name == "nt" else "python")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index",
               "--ignore-installed", str(wheel)]  # fmt: skip
    done = subprocess.run(install, capture_output=True, text=True, check=False, env=plain())
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture
def run(python, tmp_path):
    def call(*arguments):
        done = subprocess.run([str(python), "-W", "ignore", *arguments], cwd=tmp_path, capture_output=True, text=True,
                              check=False, env=plain())  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_the_wheel_holds_the_package_alone(wheel):
    """No top-level folder beside it, such as recipes, in which files of others could be run."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"polymix", f"polymix-{polymix.__version__}.dist-info"}
    for kind in (".j2", ".c", ".h", "py.typed", ".mjs"):
        assert any(name.endswith(kind) for name in names), kind
    assert {"polymix/published.toml", *(f"polymix/domains/{domain}/recipe.py" for domain in OWN_RECIPES)} <= set(names)


def test_it_is_the_installed_one(run, python):
    place = run("-c", "import polymix; print(polymix.__file__)").strip()
    assert Path(place).is_relative_to(python.parents[1]), place
    code = "from importlib.metadata import distribution as d; print(*sorted(e.name for e in d('polymix').entry_points))"
    assert {"polymix", "segment", "recall", "detect3d"} <= set(run("-c", code).split())


def test_it_trains_and_predicts(run, tmp_path):
    from PIL import Image

    run("-m", "polymix", "train", "segment", "--preset", "tiny", "--steps", "1", "--control", "False", "--out", "run")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    assert "1 prediction:" in run("-m", "polymix", "predict", "run", "red.png", "--out", "predicted")
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "predicted" / "predictions.json").is_file()


def test_it_converts(run, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    run("-m", "polymix", "convert", "--model", "own.py:encoder", "--plan", "pom", "--seconds", "1", "--out", "new")
    code = "import polymix, torch; print(polymix.load_pretrained('new', trust=True)(torch.zeros(1, 9, 16)).shape)"
    assert "[1, 9, 16]" in run("-c", code)


@needs_compiler
def test_it_names_the_platform_of_its_kernels(wheel):
    assert "-py3-none-manylinux_2_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for level in compile.levels():
        assert any(compile.library_path(level).name in name for name in names), level


@needs_compiler
@pytest.mark.skipif(not library.usable_levels(), reason="untested: kernels of a wheel, which this processor cannot run")
def test_its_kernels_run_without_a_compiler(run, python, monkeypatch, tmp_path):
    """With nothing but its environment on PATH, and a home of its own."""
    for name in ("CC", library.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"C kernels: {python.parents[1]}" in run("-m", "polymix", "doctor")
    explain = (
        "import polymix, torch; print(polymix.explain(polymix.create_mixer('padre', 16), torch.randn(1, 600, 16)))"
    )
    assert "padre: native" in run("-c", explain), "the kernels of the wheel must be what runs"
