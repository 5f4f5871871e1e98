"""DPT and GLPN, which estimate depth, PatchTST and the time series transformer, which forecast: mixers run and learn."""

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


def glpn():
    config = transformers.GLPNConfig(
        depths=[1] * 4, hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2] * 4,
        sr_ratios=[4, 2, 1, 1], decoder_hidden_size=8,
    )  # fmt: skip
    return transformers.GLPNForDepthEstimation(config), {"pixel_values": torch.randn(1, 3, 64, 64)}, 4


def time_series():
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))}  # fmt: skip
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, d_model=16, **sizes
    )
    known, next_ = torch.randn(2, 10), torch.randn(2, 4)
    series = {"past_values": known, "past_time_features": known[..., None], "past_observed_mask": torch.ones(2, 10),
              "future_values": next_, "future_time_features": next_[..., None]}  # fmt: skip
    return transformers.TimeSeriesTransformerForPrediction(config), series, 3


@pytest.mark.parametrize("mixer", ["qt", "pom"])
@pytest.mark.parametrize("host", [glpn, time_series])
def test_hosts_without_an_adapter_of_their_own_convert_and_learn(host, mixer):
    """Both were refused once, as attention of no known class."""
    torch.manual_seed(0)
    model, inputs, layers = host()
    report = polymix.convert(model, mixer, input=inputs, copy=True)
    assert [layer.now for layer in report.layers] == [mixer] * layers
    before, after = (one.eval()(**inputs)[0] for one in (model, report.model))
    assert after.shape == before.shape and not torch.equal(after, before) and after.isfinite().all()
    after.square().mean().backward()
    mixers = [part for part in report.model.modules() if isinstance(part, polymix.TokenMixer)]
    assert len(mixers) == layers and all(any(p.grad is not None for p in part.parameters()) for part in mixers)
