"""The package in a fresh process: it needs torch alone, and loading it is little work."""

import json
import subprocess
import sys

import polymix
from tests.contracts.mixer_cases import CASES

BLOCKED = (
    "numpy", "timm", "transformers", "lightning", "pytorch_lightning", "torchmetrics", "triton", "torchvision",
    "matplotlib", "jinja2", "rich", "typer", "sklearn", "PIL", "onnx", "onnxscript", "onnxruntime", "safetensors",
)  # fmt: skip

USE = """
import json, sys
cases, blocked = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)  # what a missing package raises

sys.meta_path.insert(0, Blocked())
import torch
import polymix
assert not {"polymix.measure", "polymix.workflows.compare"} & set(sys.modules), "what measures is loaded on demand alone"

wraps = set()
for name, options in cases:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        mixer = polymix.create_mixer(name, 12, **options)
    except polymix.errors.MissingExtraError as error:
        wraps.add(name)
        assert "pip install" in str(error)
        continue
    x = torch.randn(2, 12, 12, requires_grad=True)
    y = mixer(x)
    y.square().sum().backward()
    assert y.shape == x.shape and x.grad.isfinite().all(), name
    if mixer.capabilities.recurrent:
        y, state = mixer.prefill(x)
        mixer.step(x[:, 0], state)
assert callable(polymix.recommend)
assert not [name for name in sys.modules if name.partition(".")[0] in blocked]
print("wraps", *sorted(wraps))
"""
# The mixers that are a layer of timm's or of transformers', and say so where those are missing.
WRAPPING = ["gc", "mamba", "non_local", "relu_linear", "se", "xca"]

WORK = """
import json, sys
import torch
before, finders, calls = set(sys.modules), list(sys.meta_path), 0
del sys.argv, sys.orig_argv  # what the package offers does not depend on who imports it

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
import polymix
sys.setprofile(None)
assert sys.meta_path == finders, "a hook"
print(json.dumps([calls, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def fresh(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_mixer_with_torch_alone():
    """Each is built, run forward, backward and recurrently while every optional library refuses to be imported."""
    assert {name for name, _ in CASES.values()} == set(polymix.list_mixers()), "a mixer without a case"
    out = fresh(USE, json.dumps(list(CASES.values())), json.dumps(BLOCKED))
    assert out.split() == ["wraps", *WRAPPING], "these alone may need more than torch"


def test_import_does_little():
    """A time depends on what else the machine does; calls do not: 64,000 of them are the 0.22 s of docs/speed.md."""
    calls, loaded = json.loads(fresh(WORK))
    assert loaded == ["polymix"], "a library that torch had not loaded"
    assert calls < 100_000, "the import has grown by half"
