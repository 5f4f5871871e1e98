"""transformers' CvT, whose queries, keys and values have convolutions of their own."""

import pytest
import torch

import polymix
from tests.convert import checks
from tests.convert.test_transformers_encoders import cvt, images

pytestmark = pytest.mark.slow  # with the other encoders


def test_cvt_mixes_every_size_on_its_own_grid():
    x = images(32, 48)
    report = polymix.convert(cvt(), "padre", input=x)
    assert [layer.options["grid"] for layer in report.layers] == [(8, 12), (4, 6), (4, 6)]
    seen = []
    mixer = report.adapters["encoder.stages.1.layers.0.attention"].mixer
    mixer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get("grid")), with_kwargs=True)
    for size in ((32, 48), (48, 32)):
        assert report.model(images(*size)).last_hidden_state.shape == (2, 32, size[0] // 8, size[1] // 8)
    assert seen == [None, (6, 4)]


@pytest.mark.parametrize(("mixer", "lost"), [
    ("softmax", set()), ("qt", set()), ("linear", set()), ("pom", {"key"}), ("poly_sa", set()), ("padre", {"key"}),
    ("mamba", {"query", "key"}),
])  # fmt: skip
def test_cvt_keeps_the_convolutions_that_the_mixer_has_an_input_for(mixer, lost):
    report = polymix.convert(cvt(), {"*.stages.0.*": mixer}, copy=True, input=images(32, 48))
    layer = report.layers[0]
    maps = {key.split(".")[1] for keys in layer.inherited.values() for key in keys if "convolution" in key}
    assert maps == {f"convolution_projection_{name}" for name in {"query", "key", "value"} - lost}
    assert {key.split(".")[1] for key in layer.dropped if "convolution" in key} == {
        f"convolution_projection_{name}" for name in lost
    }  # fmt: skip
    checks.accounts(report)


@pytest.mark.parametrize("mixer", ["qt", "linear", "pom", "poly_sa", "padre"])
def test_what_cvt_s_mixers_read(mixer):
    """By hand: the class token and each convolution's output, at all places or at those of its stride."""
    report = polymix.convert(checks.stirred(cvt()).eval(), mixer, copy=True, input=images(32, 48))
    name = "encoder.stages.1.layers.0.attention"
    adapter, inner = report.adapters[name], report.attentions[name].attention
    x = torch.randn(2, 25, 32)
    image = x[:, 1:].transpose(1, 2).unflatten(2, (4, 6))

    def read(part, stride):
        made = getattr(inner, f"convolution_projection_{part}").convolution_projection
        y = torch.nn.functional.conv2d(image, made.convolution.weight, None, stride, 1, groups=32)
        return torch.cat((x[:, :1], made.normalization(y).flatten(2).transpose(1, 2)), 1)

    with torch.no_grad():
        grid = {"grid": (4, 6)} if adapter.mixer.capabilities.grids else {}
        if mixer in ("qt", "linear"):
            expected = adapter.mixer(read("query", 1), read("key", 2), values=read("value", 2))
        elif mixer == "poly_sa":
            expected = adapter.mixer(read("query", 1), read("key", 1), values=read("value", 1), **grid)
        elif mixer == "pom":
            expected = adapter.mixer(read("query", 1), read("value", 2))
        else:
            expected = adapter.mixer(read("query", 1), values=read("value", 1), **grid)
        checks.near([adapter(x, 4, 6)], [expected])
