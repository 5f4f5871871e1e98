"""A torchvision built for CUDA beside a CPU-only torch: cured when broken, left alone when well or missing."""

import os
import subprocess
import sys

import pytest

# What PyPI's torchvision does on import when its binaries lack the operators.
BROKEN = """
import torch
torch.library.register_fake("torchvision::nms")(lambda dets, scores, threshold: dets)
torch.library.register_fake("torchvision::qnms")(lambda dets, scores, threshold: dets)
from . import ops
"""
WHOLE = "import torchvision; assert torchvision.ops.value == 1"
# As if it were not installed, whether it is here or not.
HIDDEN = "import importlib.util; importlib.util.find_spec = lambda name, package=None: None"
# By state: torchvision's source, what runs before and after the cure, and what the cure returns.
STATES = {
    "broken": (BROKEN, "", WHOLE, "True False"), "well": ("from . import ops", "", WHOLE, "False False"),
    "missing": (None, HIDDEN, "", "False False"), "failing": ("raise RuntimeError('something else')", "", "", None),
}  # fmt: skip
# A fork of one process for each state: they start before torchvision is imported, after torch is, which takes seconds.
FORKS = """
import os, sys
import torch
for folder, before, after in zip(*[iter(sys.argv[1:])] * 3):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.path.insert(0, folder)
    exec(before)
    from polymix.compat import cure_torchvision
    print(cure_torchvision(), cure_torchvision(), flush=True)
    exec(after)
    print("end", flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a process said in each state: standard output and error."""
    root, words = tmp_path_factory.mktemp("states"), []
    for state, (source, before, after, _) in STATES.items():
        (root / state).mkdir()
        if source is not None:
            (root / state / "torchvision").mkdir()
            (root / state / "torchvision" / "__init__.py").write_text(source)
            (root / state / "torchvision" / "ops.py").write_text("value = 1")
        words += [str(root / state), before, after]
    environment = {"PATH": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", FORKS, *words], check=True, env=environment)
    return {state: [(root / state / stream).read_text() for stream in ("out", "err")] for state in STATES}


@pytest.mark.parametrize("state", [state for state in STATES if state != "failing"])
def test_cure(said, state):
    output, error = said[state]
    assert output.split() == [*STATES[state][-1].split(), "end"], error


def test_another_failure_is_not_swallowed(said):
    assert "something else" in said["failing"][1]
