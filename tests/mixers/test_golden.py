"""Outputs and gradients of public implementations, in float64."""

import pytest
import torch

import polymix
from tests.helpers import Golden, close

POM, ROPE, MHA = Golden("pom"), Golden("pom_rope"), Golden("softmax_gpt2_mha")
# The authors' incremental state counts calls, not tokens: only one-token chunks could agree, and none is recorded.
POM_CASES = [case for case in POM.meta if not case.startswith("state3") and case != "pad2d_weighted"]


def pom_from(golden, case, **extra):
    options = {key: golden.meta[case]["constructor"][key] for key in ("degree", "expand", "n_groups", "n_sel_heads")}
    return polymix.PoM.from_reference(golden.part(case, "w"), **options, **extra)


def call(mixer, golden, case):
    inputs = {key: value.clone() for key, value in golden.part(case, "in").items()}
    mask = inputs.pop("mask", None)
    leaves = {key: value.requires_grad_() for key, value in inputs.items()}
    options = {"causal": True} if "causal" in golden.meta[case]["call"] else {}
    if mask is not None:
        options["mask"] = mask > 0
    return leaves, mixer(*leaves.values(), **options)


def gradients(mixer, golden, case):
    """Gradients of our parameters under the authors' names."""
    grads = {name: p.grad for name, p in mixer.named_parameters()}
    ours = {"po_coeff": grads["alpha"], "ag_proj.weight": grads["proj.weight"], "ag_proj.bias": grads["proj.bias"]}
    if golden.meta[case]["constructor"]["n_groups"] > 1:
        ours["po_proj.weight"] = grads["poly.weight"].reshape(-1, grads["poly.weight"].shape[-1], 1)
        ours |= {"se_proj.weight": grads["gate.weight"], "se_proj.bias": grads["gate.bias"]}
    else:
        ours["qc_proj.weight"] = torch.cat((grads["poly.weight"], grads["gate.weight"]))
        ours["se_bias"] = grads["gate.bias"]
    return ours


def check(golden, case, mixer, tol, tol_grad):
    leaves, y = call(mixer, golden, case)
    close(y, golden.part(case, "out")["y"], tol)
    (y * golden.part(case, "cot")["y"]).sum().backward()
    for key, value in golden.part(case, "grad/in").items():
        close(leaves[key].grad, value, tol_grad)
    ours = gradients(mixer, golden, case)
    for key, value in golden.part(case, "grad/w").items():
        close(ours[key], value, tol_grad)


@pytest.mark.parametrize("case", POM_CASES)
def test_pom(case):
    check(POM, case, pom_from(POM, case), 1e-9, 1e-7)


@pytest.mark.parametrize("case", list(ROPE.meta))
def test_pom_rotary(case):
    """The authors' tables are float32; ours are exact, so agreement ends at their rounding."""
    check(ROPE, case, pom_from(ROPE, case, rotary="1d"), 3e-7, 3e-6)


def test_their_incremental_state_is_wrong_and_ours_is_not():
    """The authors' state is a mean of chunk means, wrong for unequal chunks; ours equals the causal forward."""
    mixer = pom_from(POM, "state3_unequal")
    x = POM.part("state3_unequal", "in")["x"]
    theirs = POM.part("state3_unequal", "out")["y"]
    whole = mixer(x, causal=True)
    chunks, state = [], None
    for chunk in x.split((4, 3, 2), dim=1):
        y, state = mixer.prefill(chunk, state)
        chunks.append(y)
    close(torch.cat(chunks, 1), whole, 1e-12)
    assert (theirs - whole).abs().max() / whole.abs().max() > 0.05


@pytest.mark.parametrize(("change", "named"), [
    ({"n_groups": 2}, "po_proj.weight"), ({"expand": 3}, "expand"), ({"degree": 3}, "degree"),
    ({"n_sel_heads": 4}, "n_sel_heads"),
])  # fmt: skip
def test_a_state_dict_that_does_not_fit_says_where(change, named):
    options = {
        key: POM.meta["self_sel0"]["constructor"][key] for key in ("degree", "expand", "n_groups", "n_sel_heads")
    }
    with pytest.raises(polymix.errors.OptionError, match=named):
        polymix.PoM.from_reference(POM.part("self_sel0", "w"), **{**options, **change})


def softmax_from(case):
    """Our softmax with the weights of the case, GPT-2's (transposed) or nn.MultiheadAttention's."""
    w = MHA.part(case, "w")
    mixer = polymix.create_mixer("softmax", 8, heads=2, dtype=torch.float64)
    gpt = "c_attn.weight" in w
    mixer.load_state_dict({
        "qkv.qkv.weight": w["c_attn.weight"].t() if gpt else w["in_proj_weight"],
        "qkv.qkv.bias": w["c_attn.bias"] if gpt else w["in_proj_bias"],
        "proj.weight": w["c_proj.weight"].t() if gpt else w["out_proj.weight"],
        "proj.bias": w["c_proj.bias"] if gpt else w["out_proj.bias"],
    })  # fmt: skip
    return mixer, gpt


@pytest.mark.parametrize("case", list(MHA.meta))
def test_softmax(case):
    mixer, gpt = softmax_from(case)
    inputs = MHA.part(case, "in")
    x = inputs["x"].clone().requires_grad_()
    options = {}
    if "causal" in case:
        options["causal"] = True
    if "key_padding_mask" in inputs:
        options["mask"] = ~inputs["key_padding_mask"]
    y = mixer(x, **options)
    close(y, MHA.part(case, "out")["y"], 1e-9)
    (y * MHA.part(case, "cot")["y"]).sum().backward()
    close(x.grad, MHA.part(case, "grad/in")["x"], 1e-8)
    theirs = MHA.part(case, "grad/w")
    grads = {name: p.grad for name, p in mixer.named_parameters()}
    names = ("c_attn", "c_proj") if gpt else ("in_proj", "out_proj")
    sign = "_" if not gpt else "."
    for ours, name in (("qkv.qkv", names[0] + sign), ("proj", names[1] + ".")):
        weight = grads[f"{ours}.weight"]
        close(weight.t() if gpt else weight, theirs[f"{name}weight"], 1e-8)
        close(grads[f"{ours}.bias"], theirs[f"{name}bias"], 1e-8)
