"""Linear attentions of 2025 and 2026 against their authors' code in float64: outputs, gradients of inputs and weights.

Their blocks ran without rotation, convolution and positions, and NaLaFormer's up to its LayerNorm: see the golden files.
"""

import pytest
import torch

import polymix
from tests.helpers import Golden, close

FILES = {name: Golden(name) for name in ("mala", "nala", "pola", "rala")}
CASES = [(name, case) for name, golden in FILES.items() for case in golden.meta]
FUSED = {"mala": "qkvo", "rala": "qkvo", "nala": "qkvg", "pola": "qkvg"}  # queries, keys, values and gates in one map


def ours(name, w):
    """Their weights, or gradients of these, under our names."""
    flat = {key: value.flatten(1) if key.endswith("weight") else value for key, value in w.items()}
    out = {}
    for kind in ("weight", "bias"):
        fused = flat[f"{FUSED[name]}.{kind}"]
        out[f"qkv.qkv.{kind}"], gate = fused[:24], fused[24:]
        if name != "nala":
            out[f"gate.{kind}"], out[f"proj.{kind}"] = gate, flat[f"proj.{kind}"]
    if name == "pola":
        heads = w["power"].shape[1]
        out |= {"power": w["power"][0], "scale": w["scale"].reshape(heads, 1, -1)}
    return out


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs_and_gradients(name, case):
    golden, made = FILES[name], FILES[name].meta[case]["constructor"]
    options = {"gate": True} if name != "nala" else {}
    options |= {"alpha": made["alpha"]} if name == "pola" else {}
    mixer = polymix.create_mixer(name, 8, heads=made["num_heads"], dtype=torch.float64, **options)
    weights = ours(name, golden.part(case, "w"))
    if name == "nala":  # recorded in front of its norm and its output map
        weights |= {"proj.weight": torch.eye(8, dtype=torch.float64), "proj.bias": torch.zeros(8, dtype=torch.float64)}
    mixer.load_state_dict(weights)
    x = golden.part(case, "in")["x"].clone().requires_grad_()
    y = mixer(x)
    close(y, golden.part(case, "out")["y"], 1e-9)
    (y * golden.part(case, "cot")["y"]).sum().backward()
    close(x.grad, golden.part(case, "grad/in")["x"], 1e-8)
    grads = {key: p.grad for key, p in mixer.named_parameters()}
    for key, value in ours(name, golden.part(case, "grad/w")).items():
        close(grads[key], value, 1e-8)
