"""Mixers in Swin's shifted windows, in timm, torchvision and transformers: each region alone, by a slow definition."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.windows import Shifted
from polymix.errors import CapabilityError, OptionError
from tests.convert.checks import converts, near, refuses, same_as_host, stirred, survives, undoes

cure_torchvision()
BIAS = ("position_bias",)
WINDOW, SHIFT = (4, 4), (2, 2)
MIXERS = ["padre:kernel_size=3", "qt", "poly_sa", "poly_sa:positions=mean", "poly_nl", "pom", "pom:rotary=2d", "linear",
          "prodpoly", "xca", "conv2former:kernel_size=3"]  # fmt: skip


def timm_swin(size=32, **options):
    timm = pytest.importorskip("timm", reason="untested: timm (the extra vision)")
    small = {"patch_size": 4, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 4, "num_classes": 3}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=size, drop_path_rate=0.0, **{**small, **options})


def torchvision_swin():
    vision = pytest.importorskip("torchvision", reason="untested: torchvision").models
    return vision.SwinTransformer([4, 4], 16, [2], [2], [4, 4], num_classes=3, stochastic_depth_prob=0.0)


def transformers_swin(size=32):
    transformers = pytest.importorskip("transformers", reason="untested: transformers")
    config = transformers.SwinConfig(
        image_size=size, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, drop_path_rate=0.0
    )
    return transformers.SwinModel(config)


HOSTS = {"timm": timm_swin, "torchvision": torchvision_swin, "transformers": transformers_swin}
LAYERS = {"timm": "layers.0.blocks.1.attn", "torchvision": "features.1.1.attn",
          "transformers": "encoder.layers.0.blocks.1.attention"}  # fmt: skip


def images(*size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def region_by_region(mixer, x, padded_first):
    """A shifted layer on a map (B, H, W, D), by regions of the shifted map: a region is a set of tokens in one window
    that were neighbours before the shift. Each is mixed alone, in a call of its own."""
    height, width = x.shape[1:3]
    rows, columns = -(-height // 4), -(-width // 4)
    full = x.new_zeros(x.shape[0], 4 * rows, 4 * columns, x.shape[3])
    if padded_first:
        full[:, :height, :width] = x
        full = full.roll((-2, -2), (1, 2))
    else:
        full[:, :height, :width] = x.roll((-2, -2), (1, 2))
    out = torch.empty_like(full)
    edges = [(4 * i, 4 * i + 4) for i in range(rows - 1)] + [(4 * rows - 4, 4 * rows - 2), (4 * rows - 2, 4 * rows)]
    across = [(4 * i, 4 * i + 4) for i in range(columns - 1)]
    across += [(4 * columns - 4, 4 * columns - 2), (4 * columns - 2, 4 * columns)]
    for top, bottom in edges:
        for left, right in across:
            part = full[:, top:bottom, left:right]
            grid = {"grid": tuple(part.shape[1:3])} if mixer.capabilities.grids else {}
            out[:, top:bottom, left:right] = mixer(part.flatten(1, 2), **grid).view(part.shape)
    if padded_first:
        return out.roll((2, 2), (1, 2))[:, :height, :width]
    return out[:, :height, :width].roll((2, 2), (1, 2))


def layer_on_map(library, model, x):
    """The converted layer, with all that its host does around it: shift, padding, windows and masks."""
    adapter = model.get_submodule(LAYERS[library])
    if library == "torchvision":
        return adapter(x)
    block = model.get_submodule(LAYERS[library].rpartition(".")[0])
    adapter.current_grid = tuple(x.shape[1:3])
    if library == "timm":
        block.dynamic_mask = True
        return block._attn(x)
    block.layernorm_before, block.mlp = torch.nn.Identity(), torch.nn.Identity()
    block.layernorm_after = torch.nn.Identity()
    y = block(x.flatten(1, 2), x.shape[1:3])[0].view(x.shape)  # 2 (x + attention): the rest of the layer adds itself
    return y / 2 - x


@pytest.mark.parametrize("library", HOSTS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_each_region_is_mixed_alone(library, mixer):
    model = polymix.convert(stirred(HOSTS[library]()).double().eval(), mixer, drop=BIAS).model
    adapter = model.get_submodule(LAYERS[library])
    for size in ((8, 8), (6, 11), (12, 5)):
        x = torch.randn(2, *size, 16, dtype=torch.float64)
        with torch.no_grad():
            expected = region_by_region(adapter.mixer, x, library != "timm")
            near([layer_on_map(library, model, x)], [expected], 1e-11)


def test_regions_as_ids_and_as_rectangles_are_the_same():
    ids = Shifted(WINDOW, SHIFT).regions((8, 12), torch.device("cpu"))
    assert ids.shape == (6, 16) and [len(row.unique()) for row in ids] == [1, 1, 2, 2, 2, 4]
    assert Shifted(WINDOW, (0, 2)).regions((8, 8), torch.device("cpu"))[3].unique().tolist() == [0, 1]
    places = torch.arange(6 * 16.0).view(6, 16, 1)
    seen = Shifted(WINDOW, SHIFT).mix_regions(places, (8, 12), lambda part, grid: part.amin(1, keepdim=True) + 0 * part)
    same = ids[:, :, None] == ids[:, None]
    lowest = torch.stack([places[i, :, 0].expand(16, 16).masked_fill(~same[i], 1e9).amin(1) for i in range(6)])
    assert torch.equal(seen[..., 0], lowest)


@pytest.mark.parametrize("library", HOSTS)
@pytest.mark.parametrize("mixer", ["padre", "poly_sa:positions=mean", "softmax"])
def test_whole_models_learn(library, mixer):
    report = converts(HOSTS[library](), mixer, images(32, 32), input=images(32, 32), drop=BIAS)
    assert {layer.now for layer in report.layers} == {mixer.partition(":")[0]}


@pytest.mark.parametrize("library", HOSTS)
def test_softmax_is_the_host(library):
    same_as_host(HOSTS[library](), images(32, 32), input=images(32, 32))
    same_as_host(HOSTS[library](), images(32, 32))


@pytest.mark.parametrize("library", HOSTS)
def test_copies_bfloat16_compile_and_undo(library):
    model = stirred(HOSTS[library]())
    undoes(model, "poly_nl", images(32, 32), input=images(32, 32), drop=BIAS)
    survives(
        polymix.convert(model, "poly_nl", drop=BIAS).model,
        images(32, 32),
        backend="eager" if library == "timm" else None,
    )


@pytest.mark.parametrize("library", HOSTS)
def test_a_mixer_tied_to_one_size_is_refused_in_shifted_windows(library):
    tied = polymix.PadreConfig(weight="full", grid=WINDOW)
    refuses(HOSTS[library](), {LAYERS[library]: tied}, CapabilityError, 'windows="merge"', drop=BIAS)
    polymix.convert(HOSTS[library](), {LAYERS[library].replace("1.att", "0.att"): tied}, drop=BIAS)


def test_merged_windows_of_transformers_see_the_map():
    for mixer in ("padre:kernel_size=3", "poly_sa"):
        report = converts(transformers_swin(), mixer, images(32, 32), windows="merge", input=images(32, 32), drop=BIAS)
        assert [layer.tokens for layer in report.layers] == [64, 64, 16, 16]
    model = polymix.convert(
        stirred(transformers_swin()).double().eval(), "padre:kernel_size=3", windows="merge", drop=BIAS
    ).model
    mixer, x = model.get_submodule(LAYERS["transformers"]).mixer, torch.randn(2, 6, 11, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = mixer(x.flatten(1, 2), grid=(6, 11)).view(x.shape)
        near([layer_on_map("transformers", model, x)], [expected], 1e-11)


@pytest.mark.parametrize("size", [(32, 48), (40, 56)])
def test_images_of_another_size_in_transformers(size):
    """Each stage takes the size of its map from the stage before, also where it fills no whole windows."""
    report = polymix.convert(stirred(transformers_swin()).eval(), "padre:kernel_size=3", drop=BIAS)
    report.model(images(*size), interpolate_pos_encoding=True)
    rows, columns = size[0] // 4, size[1] // 4
    grids = [part.current_grid for part in report.adapters.values()]
    assert grids == [(rows, columns)] * 2 + [(-(-rows // 2), -(-columns // 2))] * 2


def test_a_shift_that_changes_after_the_conversion_is_an_error():
    model = polymix.convert(timm_swin(16, window_size=4), "poly_nl", drop=BIAS).model
    model.set_input_size((32, 32), window_size=4)
    with pytest.raises(OptionError, match=r"shift_size.*convert it again"):
        model(images(32, 32))
