"""The package in a fresh process: it needs torch alone, and it loads fast."""

import json
import subprocess
import sys

import polymix
from tests.mixers.cases import CASES

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
assert not {"polymix.bench", "polymix.compare"} & set(sys.modules), "what measures is loaded on demand alone"

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

TIME = """
import time
import torch
start = time.process_time()
import polymix
print(time.process_time() - start)
"""


def fresh(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_mixer_with_torch_alone():
    """Each is built, run forward, backward and recurrently while every optional library refuses to be imported."""
    assert {name for name, _ in CASES.values()} == set(polymix.list_mixers()), "a mixer without a case"
    out = fresh(USE, json.dumps(list(CASES.values())), json.dumps(BLOCKED))
    assert out.split() == ["wraps", *WRAPPING], "these alone may need more than torch"


def test_import_time():
    """Under 0.3 s of this process's own time beyond torch's; the best of three, since the machine may be busy."""
    assert min(float(fresh(TIME)) for _ in range(3)) < 0.3
