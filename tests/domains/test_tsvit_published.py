"""TSViT as its authors' code computes it, with recorded weights: days, logits, gradients; and its fresh weights."""

import pytest
import torch

from polymix.domains.satellite.data import SatelliteData, legacy_days
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.satellite.task import SatelliteTask
from polymix.domains.satellite.tsvit import TSViT
from polymix.mixers import SoftmaxConfig
from tests.helpers import Golden, close, same_gradients

GOLDEN = Golden("hosts/tsvit")
THEIRS = GOLDEN.meta["tsvit"]


def model(legacy_layout):
    host = TSViT(
        SoftmaxConfig(), classes=THEIRS["num_classes"], bands=THEIRS["num_channels"] - 1,
        image_size=THEIRS["img_res"], patch=THEIRS["patch_size"], dim=THEIRS["dim"], heads=THEIRS["heads"],
        temporal_depth=THEIRS["temporal_depth"], spatial_depth=THEIRS["spatial_depth"], mlp_ratio=THEIRS["scale_dim"],
        mask_padding=False, legacy_layout=legacy_layout,
    ).double()  # fmt: skip
    host.load_state_dict(GOLDEN.part("tsvit", "state"))
    return host


def test_it_computes_what_the_authors_code_does():
    """Days from 1 to 365 as that code reads them back, padded dates in row 0 of the embedding, pixels in its layout."""
    inputs, host = GOLDEN.part("tsvit", "in"), model(legacy_layout=True)
    assert torch.equal(legacy_days(inputs["days"]), inputs["read"])
    images = inputs["images"].requires_grad_()
    output = host(images, legacy_days(inputs["days"]), inputs["days"] > 0)
    close(output, GOLDEN.part("tsvit", "out")["logits"], 1e-12)
    (output * inputs["cot"]).sum().backward()
    close(images.grad, GOLDEN.part("tsvit", "grad_in")["images"], 1e-11)
    same_gradients(host, GOLDEN.part("tsvit", "grad"), 1e-11)


def test_its_layout_is_the_map_of_pixels_in_another_order():
    inputs = GOLDEN.part("tsvit", "in")
    arguments = inputs["images"], inputs["read"]
    right, legacy = model(legacy_layout=False)(*arguments), model(legacy_layout=True)(*arguments)
    patches = right.unflatten(3, (3, 2)).unflatten(2, (3, 2)).transpose(3, 4)
    torch.testing.assert_close(patches.flatten(2), legacy.flatten(2))


@pytest.mark.parametrize(("start", "attention", "mlp"), [("published", 3**-0.5, 3**-0.5), ("own", 1.0, 1.0)])
def test_fresh_weights_are_pytorchs_where_the_preset_asks(start, attention, mlp):
    """Standard deviations over 1 / √inputs: as published all linear layers are U(±1 / √inputs)."""
    torch.manual_seed(0)
    data = SatelliteData("test", ("a", "b"), (), (), torch.zeros(10), torch.ones(10))
    recipe = SatelliteRecipe(dim=64, temporal_depth=1, spatial_depth=1, mixer="softmax", host_init=start)
    host = SatelliteTask(recipe).build(data)
    for block in (host.temporal[0], host.spatial[0]):
        qkv, first, second = block.mixer.qkv.qkv, block.mlp[0], block.mlp[3]
        assert qkv.weight.std().item() * 8 == pytest.approx(attention, rel=0.05) and qkv.bias is None
        for layer in (first, second):
            assert layer.weight.std().item() * layer.in_features**0.5 == pytest.approx(mlp, rel=0.05)
    assert torch.equal(host.day.weight[:, 0], torch.zeros(64)), "sines stay as they were put in"
