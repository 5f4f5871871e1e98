"""timm's models converted, but for Swin: the shared Attention in its families, EVA, BEiT, XCiT, MetaFormer, EfficientViT."""

from copy import deepcopy

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, MaskError, OptionError
from tests.convert.checks import (
    MIXERS,
    answer,
    checkpoints,
    converts,
    gradients,
    identical,
    ignores,
    near,
    refuses,
    same_as_host,
    stirred,
    survives,
    undoes,
)  # fmt: skip
from tests.convert.timm_hosts import (
    HOSTS,
    IMAGES,
    SMALL,
    XCIT_IMAGES,
    beit,
    caformer,
    csat,
    efficientvit,
    eva,
    inside,
    timm,
    vit,
    xcit,
)
from tests.helpers import close


@pytest.mark.parametrize("name", HOSTS)
def test_softmax_is_the_host(name):
    build, images = HOSTS[name]
    same_as_host(build(), images, input=images)


@pytest.mark.parametrize("mixer", ["local", "mamba", "pom"])
def test_a_causal_mixer_in_a_layer_that_sees_all_is_said(mixer):
    """It is converted, as Mamba is used for pictures, but nobody should have to find out."""
    report = polymix.convert(vit(class_token=False, global_pool="avg"), mixer)
    assert ("later_tokens" in report.layers[0].dropped) == ("is causal: no token" in str(report)) == (mixer != "pom")


LEARN = [("vit", mixer) for mixer in MIXERS] + [
    ("deit, two tokens in front", "padre"),
    ("pit", "padre"),
    ("caformer", "poly_sa"),
]


@pytest.mark.parametrize(("name", "mixer"), LEARN)
def test_mixers_learn(name, mixer):
    build, images = HOSTS[name]
    converts(build(), mixer, images, input=images)


@pytest.mark.parametrize(
    ("name", "grids"),
    [
        ("vit", {(4, 4)}), ("registers", {(4, 4)}), ("pit", {(7, 7), (4, 4)}), ("crossvit", {(4, 4), (2, 2)}),
        ("csatv2", {(2, 2), (1, 1)}), ("caformer", {(4, 4)}),
    ],
)  # fmt: skip
def test_a_mixer_with_places_gets_the_hosts_grid(name, grids):
    build, images = HOSTS.get(name, (csat, XCIT_IMAGES))
    model, options = build(), {}
    if name in ("csatv2", "caformer"):  # only a run shows it
        refuses(model, "padre", OptionError, "Pass grid=, or input=")
        options["input"] = images
    report = polymix.convert(model, "padre", **options)
    assert {adapter.mixer.config.grid for adapter in report.adapters.values()} == grids
    prefix = {"registers": 4, "csatv2": 0, "caformer": 0}.get(name, 1)
    assert {adapter.mixer.config.num_prefix_tokens for adapter in report.adapters.values()} == {prefix}
    report.model(images)
    seen = {adapter.current_grid for adapter in report.adapters.values()} - {None}  # CrossViT's images have one size
    assert seen == (set() if name == "crossvit" else grids)


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (40, 24), (16, 64), (64, 8)])
def test_vit_of_any_image_size_mixes_on_the_grid_of_the_call(size):
    report = polymix.convert(stirred(vit(dynamic_img_size=True)).eval(), "padre:kernel_size=3")
    model = deepcopy(report.model)  # with hooks of its own
    adapter = model.blocks[1].attn
    images = torch.randn(2, 3, *size)
    tokens, given = inside(model, "blocks.1.attn", images)
    grid = (size[0] // 8, size[1] // 8)
    identical([given], [adapter.mixer(tokens, grid=grid)])
    assert adapter.current_grid == grid and report.adapters["blocks.1.attn"].current_grid is None, (
        "the copy's grid went to the original"
    )


def test_vit_of_any_image_size_is_calibrated_at_the_size_of_the_input():
    images = torch.randn(2, 3, 24, 40)
    report = polymix.convert(stirred(vit(dynamic_img_size=True)), "padre", input=images)
    assert all(layer.error is not None for layer in report.layers)
    survives(report.model, images)


def test_gradients_of_other_sizes_and_under_checkpointing():
    report = polymix.convert(stirred(vit(dynamic_img_size=True)), "padre")
    for size in ((24, 40), (32, 32)):
        checkpoints(report, torch.randn(2, 3, *size), lambda model: model.set_grad_checkpointing(True))
        report.model.set_grad_checkpointing(False)


def test_a_backward_after_images_of_another_size_is_right_under_checkpointing():
    model = polymix.convert(stirred(vit(dynamic_img_size=True)), "padre").model
    large, small = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 16, 16)

    def together(enable):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        (model(large).sum() + model(small).sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for got, expected in zip(together(True), together(False), strict=True):
        close(got, expected, 1e-5)


def test_a_size_set_after_the_conversion_is_the_grid():
    model = polymix.convert(vit(), "padre").model
    model.set_input_size((16, 64))
    model(torch.randn(1, 3, 16, 64))
    assert model.blocks[0].attn.current_grid == (2, 8)


def test_a_mixer_tied_to_a_size_is_refused_where_sizes_vary():
    whole = polymix.PadreConfig(weight="full", grid=(4, 4))
    refuses(vit(dynamic_img_size=True), whole, CapabilityError, "since the host's inputs vary")
    converts(vit(), whole, IMAGES)
    converts(vit(), "padre:weight=full:constant=full", IMAGES)  # the grid is the host's
    refuses(vit(), polymix.PadreConfig(weight="full", grid=(2, 2)), OptionError, r"the host's grid \(4, 4\)")


def test_dropped_patches_stand_on_no_grid():
    refuses(vit(patch_drop_rate=0.5), "padre", OptionError, "drops tokens")
    converts(vit(patch_drop_rate=0.5), "pom", IMAGES)


def test_what_the_attention_does_besides_is_listed():
    from timm.layers import LayerNorm

    report = polymix.convert(vit(qk_norm=True, scale_attn_norm=True, attn_drop_rate=0.1), "pom")
    dropped = report.layers[0].dropped
    assert {"q_norm.weight", "k_norm.bias", "norm.weight", "attn_drop"} <= set(dropped)
    gated = timm.layers.Attention(
        16, 2, gated=True, qk_norm=True, norm_layer=lambda size, **kw: LayerNorm(size, affine=False, **kw)
    )
    assert {"gate.weight", "gate", "qk_norm"} <= set(polymix.convert(gated, "pom").layers[0].dropped)
    assert "rotary" in polymix.convert(eva(use_rot_pos_emb=True), "pom").layers[0].dropped
    for kind, name in (("rel_pos", "relative_position_bias_table"), ("shared_rel_pos", "shared_rel_pos_bias")):
        report = polymix.convert(beit(**{f"use_{kind}_bias": True}), "qt", drop=("position_bias",))
        assert set(report.layers[0].dropped) == {name, "position_bias"}


@pytest.mark.parametrize("mixer", ["softmax", "pom"])
def test_positions_in_the_logits_are_lost_by_name_alone(mixer):
    """Softmax mixers have no biases of BEiT's kind, nor EVA's angles in weights of their own."""
    refuses(beit(use_rel_pos_bias=True), mixer, OptionError, r"--drop position_bias")
    if mixer == "softmax":
        refuses(eva(use_rot_pos_emb=True), mixer, OptionError, r"--drop rotary", init="fresh")
    polymix.convert(eva(use_rot_pos_emb=True), mixer, drop=("rotary",), init="fresh")


def test_rotary_eva_and_biased_beit_learn():
    for model in (eva(use_rot_pos_emb=True), beit(use_rel_pos_bias=True)):
        for mixer in ("padre", "qt"):
            drop = () if model.blocks[0].attn.__class__.__name__ == "EvaAttention" else ("position_bias",)
            converts(model, mixer, IMAGES, input=IMAGES, drop=drop)


def test_another_width_out_is_refused():
    refuses(timm.layers.Attention(16, 2, dim_out=32), "pom", OptionError, "16 output channels")


def test_heads_of_another_width_start_fresh():
    class Narrow(timm.layers.Attention):  # served too: its forward is Attention's
        def __init__(self, dim, **options):
            super().__init__(dim, attn_head_dim=4, **options)

    report = converts(vit(attn_layer=Narrow), "poly_sa", IMAGES)
    assert "qkv.qkv.weight" in report.layers[0].fresh and "qkv.weight[query]" in report.layers[0].dropped


# masks


REAL = torch.tensor([[True] * 17, [True] * 11 + [False] * 6])


def padded(image_fill):
    """Images whose last patches, the padding, hold something else."""
    images = IMAGES.clone()
    images[1, :, 16:, 16:], images[1, :, 24:] = image_fill, image_fill
    return images


MASKS = {
    "additive": torch.zeros(2, 1, 1, 17).masked_fill(~REAL[:, None, None], -torch.inf),
    "boolean": REAL[:, None, None],
    "all pairs": REAL[:, None, None].expand(2, 1, 17, 17),
    "one a head": REAL[:, None, None].expand(2, 2, 17, 17),
}


@pytest.mark.parametrize("kind", MASKS)
def test_padding_is_honoured(kind):
    inputs, other = ({"x": padded(fill), "attn_mask": MASKS[kind]} for fill in (0.5, -3.0))
    same_as_host(vit(), inputs)
    for mixer in ("padre", "pom", "qt", "poly_nl"):
        model = polymix.convert(stirred(vit()), mixer, input=inputs).model
        ignores(model, inputs, other)
        with pytest.raises(AssertionError):  # what stood there does matter without a mask
            ignores(model, {"x": inputs["x"]}, {"x": other["x"]})


def test_order_and_other_masks():
    some = (torch.rand(17, 17) > 0.4) | torch.eye(17, dtype=torch.bool)
    for given in ({"is_causal": True}, {"attn_mask": some}, {"attn_mask": some.expand(2, 1, 17, 17)}):
        inputs = {"x": IMAGES, **given}
        same_as_host(vit(), inputs)
        same_as_host(vit(), inputs, input=inputs)
        converts(vit(), "pom", inputs, input=inputs)
        refuses(vit(), "poly_nl", CapabilityError, "poly_nl cannot do", input=inputs)
        with pytest.raises(CapabilityError, match="poly_nl cannot do"):
            polymix.convert(vit(), "poly_nl").model(**inputs)


def test_masks_that_no_mixer_can_follow():
    model = polymix.convert(vit(), "pom").model
    for mask, match in (
        (torch.rand(17, 17), "do more than hide"), (torch.rand(2, 2, 17, 17) > 0.5, "differs between heads"),
    ):  # fmt: skip
        with pytest.raises(MaskError, match=match):
            model(IMAGES, attn_mask=mask)
    with pytest.raises(MaskError, match="one of the two"):
        model(IMAGES, attn_mask=torch.ones(17, 17, dtype=torch.bool), is_causal=True)


def naflex(fill=0.0):
    """Two images of 3 × 4 and 2 × 3 patches, the second one padded."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, 4), (2, 3))
    batch = {
        "patches": torch.randn(2, 12, 192, generator=generator), "patch_coord": torch.zeros(2, 12, 2, dtype=torch.long),
        "patch_valid": torch.zeros(2, 12, dtype=torch.bool),
    }  # fmt: skip
    for i, (rows, columns) in enumerate(sizes):
        n = rows * columns
        batch["patch_coord"][i, :n] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        batch["patch_valid"][i, :n] = True
        batch["patches"][i, n:] = fill
    return (batch,)


def test_images_of_several_sizes_in_a_batch():
    model = timm.create_model(
        "naflexvit_base_patch16_gap", embed_dim=16, depth=2, num_heads=2, num_classes=3, patch_size=8
    )
    same_as_host(model, naflex(), input=naflex())
    for mixer in ("pom", "qt", "poly_nl"):
        report = converts(model, mixer, naflex(), input=naflex())
        ignores(report.model, naflex(), naflex(5.0))
    refuses(model, "padre", OptionError, "a grid per image")


# what holds for all


def lone(name):
    """An attention layer alone, and what it is called with."""
    from timm.models import beit, efficientvit_mit, metaformer, xcit

    tokens = torch.randn(2, 9, 16)
    if name == "LiteMLA":
        return efficientvit_mit.LiteMLA(16, 16, dim=8), torch.randn(2, 16, 3, 4)
    if name == "AttentionRope":
        return timm.layers.AttentionRope(16, 2), (tokens, torch.randn(8, 16))
    classes = {"Attention": timm.layers.Attention, "XCA": xcit.XCA, "beit": beit.Attention}
    return (metaformer.Attention(16, head_dim=8) if name == "metaformer" else classes[name](16, 2)), tokens


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        ("Attention", "pom"), ("AttentionRope", "qt"), ("beit", "qt"), ("metaformer", "poly_nl"), ("XCA", "xca"),
        ("LiteMLA", "qt"),
    ],
)  # fmt: skip
def test_copies_bfloat16_and_compile(name, mixer):
    layer, inputs = lone(name)
    survives(polymix.convert(stirred(layer), mixer, input=inputs).model, inputs)


@pytest.mark.parametrize(
    ("build", "mixer", "images"),
    [(vit, "padre", IMAGES), (xcit, "xca", XCIT_IMAGES), (caformer, "pom", IMAGES), (efficientvit, "relu_linear", XCIT_IMAGES)],
)  # fmt: skip
def test_undo(build, mixer, images):
    model = build()
    undoes(model, mixer, images, input=images)
    assert not any(part._forward_hooks for part in model.modules()), "undo left hooks behind"


@pytest.mark.parametrize("build", [xcit, caformer])
def test_checkpointing(build):
    images = XCIT_IMAGES if build is xcit else IMAGES
    checkpoints(
        polymix.convert(stirred(build()), "padre", input=images), images, lambda model: model.set_grad_checkpointing()
    )


def test_features_of_a_converted_model():
    """timm's own ways around `forward` call the adapters too."""
    model = stirred(vit(dynamic_img_size=True)).eval()
    expected = [y.clone() for y in model.forward_intermediates(IMAGES, intermediates_only=True)]
    converted = polymix.convert(model, "softmax").model
    near(converted.forward_intermediates(IMAGES, intermediates_only=True), expected)
    wrapped = timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=(1,), **SMALL)
    report = polymix.convert(wrapped, "padre")
    assert report.adapters["model.blocks.0.attn"].mixer.config.grid == (4, 4) and answer(report.model, IMAGES)


def test_both_modes_and_a_dropout_of_the_output():
    model = vit(proj_drop_rate=0.5)
    report = polymix.convert(model, "padre")
    assert report.adapters["blocks.0.attn"].mixer.config.dropout == 0.5
    identical(answer(report.model, IMAGES), answer(report.model, IMAGES))
    assert gradients(report.model, IMAGES)


def test_explain_takes_a_report_and_the_size_that_the_model_declares():
    """`explain(convert(model, …))` says what runs in every layer, without an input."""
    model = vit()
    model.default_cfg = {**model.default_cfg, "input_size": (3, *IMAGES.shape[-2:])}
    said = polymix.explain(polymix.convert(model, "poly_nl"))
    assert [row.mixer for row in said] == ["poly_nl"] * len(model.blocks)
    assert [row.layer for row in said] == [row.layer for row in polymix.explain(model, IMAGES)]
