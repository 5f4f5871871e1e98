"""A torchvision built for CUDA beside a CPU-only torch: cured when broken, left alone when well or missing."""

import subprocess
import sys
import textwrap

import pytest

# What PyPI's torchvision does on import when its binaries lack the operators.
BROKEN = """
import torch
torch.library.register_fake("torchvision::nms")(lambda dets, scores, threshold: dets)
torch.library.register_fake("torchvision::qnms")(lambda dets, scores, threshold: dets)
from . import ops
"""
STATES = {
    "broken": (BROKEN, "True"),
    "well": ("from . import ops", "False"),
    "missing": (None, "False"),
}


@pytest.mark.parametrize("state", list(STATES))
def test_cure(tmp_path, state):
    source, expected = STATES[state]
    block = ""
    if source is None:  # as if it were not installed, whether it is here or not
        block = "import importlib.util\nimportlib.util.find_spec = lambda name, package=None: None\n"
    else:
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text(source)
        (package / "ops.py").write_text("value = 1")
    code = block + textwrap.dedent("""
        from polymix.compat import cure_torchvision
        print(cure_torchvision(), cure_torchvision())
    """)
    if source is not None:
        code += "import torchvision\nassert torchvision.ops.value == 1\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected, "False"]


def test_another_failure_is_not_swallowed(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('something else')")
    code = "from polymix.compat import cure_torchvision; cure_torchvision()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "PATH": ""}
    )
    assert "something else" in done.stderr
