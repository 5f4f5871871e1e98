"""Mixers that run the Triton kernels against their own eager code, with all gradients."""

import math

import pytest
import torch

from tests.helpers import build, tokens
from tests.mixers.impls.cases import CASES, make, of, padding

pytest.importorskip("triton", reason="untested: mixers on the Triton kernels, for which Triton is needed")

# Interpreted kernels are slow: one shape each.
PAD, SEGMENTS = padding(3, 11), torch.tensor([[0] * 4 + [2] * 7, [1, 0] * 5 + [1], [5] * 11])
CALLS = {
    "plain": {}, "causal": {"causal": True}, "blocks of 3": {"causal": 3}, "padding": {"mask": PAD},
    "padding, causal": {"mask": PAD, "causal": True}, "segments": {"segments": SEGMENTS},
    "padding, segments": {"mask": PAD, "segments": SEGMENTS, "causal": True},
    "cross": {"context": 1}, "cross, padding": {"context": 1, "mask": PAD},
}  # fmt: skip
EXTRA = {
    "pom rotary": ("pom", {"rotary": "1d", "selection_heads": 4}), "poly_nl order 2": ("poly_nl", {"order": 2}),
    "poly_nl order 2+3": ("poly_nl", {"order": "2+3", "reduction": 3}),
}  # fmt: skip
SMALL = {(5, 7): (2, 5), (2, 3, 5): (2, 3, 2), (35,): (11,), (35, 1): (11, 1)}
QT_CALLS = ("plain", "causal", "padding", "padding, causal", "cross, padding")
ONCE = ("pom: relu", "pom: clamped", "pom: identity", "qt: full 0", "qt: compact 1",
        "poly_sa: learned 2-D", "poly_sa: prefix", "poly_sa: depthwise")  # fmt: skip
TRITON = [
    *((case, call) for case in ("pom: 3", "pom rotary") for call in CALLS),
    *((case, call) for case in ("qt: compact 2", "qt: full 2") for call in QT_CALLS),
    *((case, call) for case in ("poly_nl: 2", "poly_nl order 2", "poly_nl order 2+3", "poly_sa: mean") for call in ("plain", "padding")),
    *(("poly_sa: mean", call) for call in ("cross", "cross, padding")),  # keys of their own
    *((case, "plain") for case in CASES if case.startswith("padre") and CASES[case][1].get("degree", 2) < 4),
    *((case, "plain") for case in ONCE),
]  # fmt: skip
# One call with each kernel; the others are slow.
FAST = {
    ("pom: 3", "padding, segments"), ("pom: 3", "cross, padding"), ("pom rotary", "padding, causal"),
    ("qt: compact 2", "padding, causal"), ("qt: full 2", "cross, padding"), ("poly_nl order 2+3", "padding"),
    ("poly_nl: 2", "plain"), ("poly_sa: mean", "padding"), ("poly_sa: mean", "cross, padding"),
    ("poly_sa: learned 2-D", "plain"), ("poly_sa: depthwise", "plain"),
    ("padre: 3", "plain"), ("pom: relu", "plain"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "call"), [pytest.param(*row, marks=() if row in FAST else pytest.mark.slow) for row in TRITON]
)
def test_triton_equals_eager_with_its_gradients(case, call):
    name, options = EXTRA.get(case) or CASES[case]
    options = {**options, **({"grid": SMALL[options["grid"]]} if "grid" in options else {})}
    if name == "padre" and "token" not in options:
        options = {"kernel_size": 3, **options}
    n = math.prod(options.get("grid", (11,))) + options.get("num_prefix_tokens", 0)
    mixer, kw = build(name, 12, **options), dict(CALLS[call])
    context = tokens(3, 11, 12, seed=5) if kw.pop("context", None) else None
    x = tokens(3, 7 if context is not None and mixer.capabilities.cross else n, 12)
    results = []
    for impl, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        other = of(mixer, impl).to(dtype)
        inputs = [u.to(dtype).detach().requires_grad_() for u in (x, context) if u is not None]
        y = other(*inputs, **kw)
        leaves = {"x": inputs[0], "context": inputs[-1], **dict(other.named_parameters())}
        results.append(
            {"output": y, **dict(zip(leaves, torch.autograd.grad(y.square().sum(), leaves.values()), strict=True))}
        )
    for part, expected in results[1].items():
        ours = results[0][part].double()
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * max(expected.abs().max().item(), 1e-3)), part


@pytest.mark.slow
def test_triton_same_bits_twice():
    for case in ("padre: 3", "pom: 3", "qt: compact 2", "poly_sa: mean", "poly_nl: 2"):
        mixer, x = of(make(case).float(), "triton"), tokens(2, 9, 12, dtype=torch.float32)
        runs = [torch.autograd.grad(mixer(x).square().sum(), list(mixer.parameters())) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), case
