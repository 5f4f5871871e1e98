"""DPT, which estimates depth, and PatchTST, which forecasts series: attention keeps its output, mixers run and learn."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: DPT and PatchTST")


def dpt():
    config = transformers.DPTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config), torch.randn(1, 3, 32, 32), "predicted_depth"


def patch_tst():
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2,
        num_hidden_layers=4, ffn_dim=32, prediction_length=4,
    )  # fmt: skip
    return transformers.PatchTSTForPrediction(config), torch.randn(3, 32, 2), "prediction_outputs"


@pytest.mark.parametrize("host", [dpt, patch_tst])
def test_attention_stays_and_mixers_take_its_place(host):
    torch.manual_seed(0)
    model, x, output = host()
    before = getattr(model.eval()(x), output)
    same = polymix.convert(model, "softmax", copy=True)
    torch.testing.assert_close(getattr(same.model(x), output), before)
    for mixer in ("padre", "pom"):
        report = polymix.convert(model, mixer, copy=True)
        assert sum(layer.now == mixer for layer in report.layers) == 4
        getattr(report.model(x), output).square().mean().backward()
        mixers = [part for part in report.model.modules() if isinstance(part, polymix.TokenMixer)]
        assert len(mixers) == 4 and all(p.grad is not None for part in mixers for p in part.parameters())
