"""timm's attention whose weights are no softmax of Q Kᵀ alone: ConViT, CoaT, MobileViT 2 and VOLO."""

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, OptionError
from tests.convert.checks import answer, converts, near, refuses, undoes
from tests.convert.timm_hosts import timm

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
BIAS = ("position_bias",)


def convit():
    options = {"embed_dim": 16, "depth": 2, "local_up_to_layer": 1, "num_heads": 4}
    return timm.create_model("convit_tiny", img_size=64, patch_size=16, num_classes=3, **options)


def coat():
    options = {"embed_dims": (16,) * 4, "serial_depths": (1,) * 4, "parallel_depth": 1, "num_heads": 8}
    return timm.create_model("coat_tiny", img_size=64, num_classes=3, **options)


def mobilevit():
    return timm.create_model("mobilevitv2_050", num_classes=3)


def volo():
    from timm.models.volo import VOLO

    options = {"embed_dims": (16, 32, 32, 32), "num_heads": (2,) * 4, "stem_hidden_dim": 8, "post_layers": ("ca",)}
    return VOLO(layers=(1, 1, 0, 0), img_size=64, num_classes=3, **options)


HOSTS = {  # what a conversion loses by name, the layers, and what they start from
    convit: (BIAS, ["blocks.0.attn"], "v.weight"),
    coat: (BIAS, ["serial_blocks1.0.factoratt_crpe", "parallel_blocks.0.factoratt_crpe4"], "qkv.weight[value]"),
    mobilevit: ((), ["stages.2.1.transformer.0.attn"], "qkv_proj.weight[key]"),
    volo: ((), ["network.0.0.attn"], "v.weight"),
}


@pytest.mark.parametrize("mixer", ["pom", "qt"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_mixer_takes_the_place_of_other_weights(host, mixer):
    lost, names, values = HOSTS[host]
    if lost:
        refuses(host(), mixer, OptionError, "position_bias", input=IMAGES)
    plan = dict.fromkeys(names, mixer)
    report = converts(host(), plan, IMAGES, input=IMAGES, drop=lost)
    if mixer == "qt" and host in (mobilevit, volo):  # without queries and keys to start from, its one map is new
        values = "out_proj.weight" if host is mobilevit else "proj.weight"
    for layer in (layer for layer in report.layers if layer.now):
        assert values in [key for keys in layer.inherited.values() for key in keys], f"{values} was not taken over"
    undoes(host().eval(), plan, IMAGES, input=IMAGES, drop=lost)


@pytest.mark.parametrize(("host", "prefix"), [(convit, 0), (coat, 1), (volo, 0)])
def test_the_grid_is_the_layers_own(host, prefix):
    """Of images of the size that the model was built for; CoaT's class tokens stand before it, ConViT's join later."""
    lost, names, _ = HOSTS[host]
    model = host().eval()
    report = polymix.convert(model, dict.fromkeys(names, "padre"), input=IMAGES, drop=lost)
    for name in names:
        adapter = report.adapters[name]
        assert adapter.prefix == prefix and adapter.grid[0] == adapter.grid[1]
    assert answer(model, IMAGES)[0].shape == (2, 3)


def test_mobilevit_mixes_each_position_of_a_patch_by_itself():
    model = mobilevit().eval()
    name = HOSTS[mobilevit][1][0]
    adapter = polymix.convert(model, {name: "pom"}, input=IMAGES).adapters[name]
    x = torch.randn(2, adapter.mixer.dim, 4, 9)
    near([adapter(x)[:, :, 2].transpose(1, 2)], [adapter.mixer(x[:, :, 2].transpose(1, 2))])
    cross = adapter(x, x.flip(-1)) if adapter.mixer.capabilities.cross else None
    assert cross is None or cross.shape == x.shape


def test_what_mixes_by_matrices_of_one_size_or_by_convolution_is_refused_by_name():
    model = timm.create_model("bat_resnext26ts", num_classes=3)
    refuses(model, "qt", (CapabilityError, OptionError), "matrices for a map of one size", input=IMAGES)
