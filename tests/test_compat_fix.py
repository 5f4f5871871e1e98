"""`polymix doctor --fix`: it mends an installed torchvision for every program, or changes nothing."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from polymix import compat

# torchvision in little: what is imported in which order, and what fails where its compiled operators do not load.
LIKE_TORCHVISION = {
    "__init__.py": "from . import extension\nfrom torchvision import _registrations, ops\n",
    "extension.py": "def _has_ops():\n    return False\n\n\ndef _assert_has_ops():\n    raise RuntimeError('no operators')\n",
    "_registrations.py": "import torch\nimport torchvision.extension\n"
    "torch.library.register_fake('torchvision::nms')(lambda dets, scores, threshold: dets)\n",
    "ops/__init__.py": "from . import boxes, roi_align\n",
    "ops/boxes.py": "import torch\nfrom torchvision.extension import _assert_has_ops\n\n"
    "def nms(*arguments):\n    _assert_has_ops()\n    return torch.ops.torchvision.nms(*arguments)\n",
    "ops/roi_align.py": "from torchvision.extension import _assert_has_ops, _has_ops\n",
}
NMS = """
import sys, torch, torchvision
boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 3.9], [8, 8, 9, 9]])
print(torchvision.ops.boxes.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist())
assert "polymix" not in sys.modules, "torchvision must work without polymix"
"""


def write(folder, files):
    """A package of these files, and what pip says of it."""
    for name, text in files.items():
        path = folder / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    about = folder / "torchvision-9.8.7.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 9.8.7\n")


def run(folder, *arguments):
    path = os.pathsep.join((str(folder), str(Path(compat.__file__).parents[1])))
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, check=False,
                          cwd=folder, env={**os.environ, "PYTHONPATH": path})  # fmt: skip


def fix(folder):
    return run(folder, "-m", "polymix", "doctor", "--fix")


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder from which this process would import torchvision."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.fixture(scope="module")
def mended(tmp_path_factory):
    """A folder that was broken and is mended: its files and the error before, and what the command said."""
    folder = tmp_path_factory.mktemp("mended")
    write(folder, LIKE_TORCHVISION)
    return folder, contents(folder), run(folder, "-c", NMS).stderr, fix(folder)


@pytest.mark.slow
def test_it_works_without_polymix_afterwards(mended):
    folder, before, failure, done = mended
    assert "operator torchvision::nms does not exist" in failure
    file = folder / "torchvision" / "extension.py"
    assert done.returncode == 0, done.stderr
    assert f"to the end of {file}" in done.stdout and "--no-deps torchvision==9.8.7" in done.stdout
    after = contents(folder)
    assert {path for path in after if after[path] != before.get(path)} == {file}, "one file, and none beside it"
    assert after[file].startswith(before[file]), "torchvision's own lines stay as they are"
    used = run(folder, "-c", NMS)
    assert used.returncode == 0, used.stderr
    assert used.stdout.strip() == "[1, 2]"
    again = fix(folder)
    assert again.returncode == 0 and "was mended before" in again.stdout and contents(folder) == after


@pytest.mark.slow
def test_torchvision_s_own_operators_are_used_where_they_load(mended, tmp_path):
    """The environment gets a torch that fits later: what was added must not stand in its way."""
    shutil.copytree(mended[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "torchvision" / "extension.py"
    theirs = "import torch\nlibrary = torch.library.Library('torchvision', 'DEF')\n"
    theirs += "library.define('nms(Tensor dets, Tensor scores, float threshold) -> Tensor')\n"
    theirs += "library.impl('nms', lambda dets, scores, threshold: torch.tensor([7]), 'CPU')\n"
    text = (
        file.read_text().replace("return False", "return True", 1).replace("raise RuntimeError('no operators')", "pass")
    )
    file.write_text(theirs + text)
    used = run(tmp_path, "-c", NMS)
    assert used.stdout.strip() == "[7]", used.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("files", "words"), [
    ({**LIKE_TORCHVISION, "_registrations.py": ""}, "9.8.7, which works"),
    ({**LIKE_TORCHVISION, "_registrations.py": "import nothing_of_the_kind"}, "fails with ModuleNotFoundError: No module"),
    ({"__init__.py": "raise RuntimeError('operator torchvision::nms does not exist')"}, "one that lacks operators alone"),
    # another operator too, which is not among those that are added
    ({**LIKE_TORCHVISION, "_registrations.py": LIKE_TORCHVISION["_registrations.py"].replace("::nms", "::deform")},
     "which then fails with RuntimeError: operator torchvision::deform"),
], ids=["works", "another failure", "no file", "not cured"])  # fmt: skip
def test_what_it_cannot_mend_stays_as_it_is(installed, monkeypatch, files, words):
    write(installed, files)
    monkeypatch.setenv("PYTHONPATH", str(installed))  # of the process that imports it alone
    before = contents(installed)
    with pytest.raises(compat.OptionError) as error:
        compat.mend_torchvision()
    assert words in str(error.value)
    assert contents(installed) == before


def test_a_refusal_is_one_line(installed, monkeypatch, capsys):
    from polymix.cli import main

    write(installed, LIKE_TORCHVISION)
    monkeypatch.setattr(compat, "_import_alone", lambda: None)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--fix"])
    err = capsys.readouterr().err
    assert (stop.value.code, err.count("\n")) == (2, 1) and "9.8.7, which works" in err


def test_a_file_that_cannot_be_written_is_one_sentence(installed, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    write(installed, LIKE_TORCHVISION)
    monkeypatch.setattr(compat, "_import_alone", lambda: "RuntimeError: operator torchvision::nms does not exist")
    monkeypatch.setattr(compat, "write_whole", full)
    with pytest.raises(compat.OptionError, match=r"extension\.py, which cannot be written \(No space left on device\)"):
        compat.mend_torchvision()


def test_without_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(compat.MissingExtraError, match="pip install torchvision;"):
        compat.mend_torchvision()


def test_it_is_not_combined_with_json(capsys):
    from polymix.cli import main

    with pytest.raises(SystemExit):
        main(["doctor", "--fix", "--json"])
    assert "--fix too" in capsys.readouterr().err


@pytest.mark.slow
def test_timm_and_transformers_with_the_installed_torchvision(tmp_path):
    """A copy of the torchvision of this environment, where it is one that fails."""
    spec = find_spec("torchvision")
    if spec is None or compat._import_alone() is None:
        pytest.skip("untested: a torchvision that is built for another PyTorch")
    shutil.copytree(Path(spec.origin).parent, tmp_path / "torchvision")
    done = fix(tmp_path)
    assert done.returncode == 0, done.stderr
    code = "import sys, torch, torchvision, timm, transformers, torchmetrics\n"
    code += "from torchvision.models.detection import maskrcnn_resnet50_fpn as build\n"
    code += "from transformers import AutoImageProcessor, CLIPModel\n"
    code += "model = build(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64).eval()\n"
    code += "print(sorted(model([torch.rand(3, 64, 64)])[0]), torchvision.__file__)\n"
    code += "assert 'polymix' not in sys.modules\n"
    used = run(tmp_path, "-c", code)
    assert used.returncode == 0, used.stderr
    assert "['boxes', 'labels', 'masks', 'scores']" in used.stdout and str(tmp_path) in used.stdout
