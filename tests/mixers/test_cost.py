"""`cost(n)` against what the papers print, in bytes, and what a counter sees of kernels in C."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.models import VisionTransformer


@pytest.mark.parametrize("name", ["padre", "pom", "qt", "poly_sa", "poly_nl"])
@pytest.mark.parametrize("training", [True, False])
def test_a_counter_sees_the_products_of_what_auto_would_run_in_c(name, training):
    """A kernel is one operator that no counter knows: an assessment would call the mixer free. Blocks make some of the
    products by sums, which are not counted."""
    options = {"positions": "mean"} if name == "poly_sa" else {}
    mixer = polymix.create_mixer(name, 12, **options)
    with torch.set_grad_enabled(training), FlopCounterMode(display=False) as counter:
        mixer(torch.randn(1, 20, 12))
    counted = mixer.cost(20).counted_flops
    assert counter.get_total_flops() == counted if training else counter.get_total_flops() >= 0.8 * counted


def test_bytes_count_every_operand_once():
    cost = polymix.create_mixer("linear_floor", 8, bias=False).cost(10)
    assert cost.bytes == 4 * (10 * 8 + 8 * 24 + 10 * 24 + 10 * 8 + 8 * 8 + 10 * 8)
    assert polymix.create_mixer("linear_floor", 8).cost(10, dtype=torch.bfloat16).bytes * 2 == cost.bytes


@pytest.mark.parametrize(("degree", "printed"), [(2, 1.10), (3, 2.28), (4, 3.27)])
def test_table_6(degree, printed):
    """PADRe Table 6, FLOPs in G at 4,096 tokens and 192 channels."""
    cost = polymix.create_mixer("padre", 192, degree=degree, grid=(64, 64)).cost(4096)
    assert cost.flops / 1e9 == pytest.approx(printed, rel=0.01)


DEIT = {"tiny": (192, 3, 5_717_416), "small": (384, 6, 22_050_664), "base": (768, 12, 86_567_656)}


@pytest.mark.parametrize(("size", "mixer", "millions"), [
    ("tiny", "softmax", 5), ("tiny", "padre-2", 5), ("tiny", "padre-3", 7), ("small", "softmax", 22),
    ("small", "padre-2", 20), ("small", "padre-3", 26), ("base", "softmax", 86), ("base", "padre-2", 80),
])  # fmt: skip
def test_table_2_parameters(size, mixer, millions):
    """PADRe Table 2: the parameters of DeiT-Tiny, -Small and -Base with each mixer put in, in whole millions."""
    dim, heads, softmax_count = DEIT[size]
    config = (
        polymix.SoftmaxConfig(heads=heads)
        if mixer == "softmax"
        else polymix.PadreConfig(degree=int(mixer[-1]), grid=(14, 14), num_prefix_tokens=1)
    )
    host = VisionTransformer(config, image_size=224, patch_size=16, dim=dim, depth=12, class_token=True, device="meta")
    count = sum(p.numel() for p in host.parameters())
    assert count // 1_000_000 == millions
    if mixer == "softmax":
        assert count == softmax_count, "the host must be DeiT to the last parameter"


def test_poly_nl_table_1a():
    """Poly-NL Table 1a at 14 × 14 × 1024, channel reduction 4: 0.14 G multiply-adds and 0.7 M parameters."""
    cost = polymix.create_mixer("poly_nl", 1024, reduction=4, bias=False, device="meta").cost(196)
    assert round(cost.multiply_adds / 1e9, 2) == 0.14
    assert round(cost.parameters / 1e6, 1) == 0.7
