"""Models of transformers for detection and segmentation, tiny but real: each converts, or is refused with the reason."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, OptionError
from tests.convert import checks

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: detectors and segmenters, without transformers")
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
DECODER = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "num_queries": 5}
QUERIES = {"*decoder.layers.*.self_attn": "softmax"}


def image(*size):
    return {"pixel_values": torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))}


def yolos():
    return transformers.YolosForObjectDetection(
        transformers.YolosConfig(**VIT, image_size=[32, 48], patch_size=8, num_detection_tokens=3)
    )


def segformer():
    sizes = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    maps = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2]}
    drops = {"hidden_dropout_prob": 0.0, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    config = transformers.SegformerConfig(**sizes, **maps, **drops, decoder_hidden_size=8)
    return transformers.SegformerForSemanticSegmentation(config)


def siglip():
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VIT, image_size=32, patch_size=8))


def siglip_text():
    text = transformers.SiglipTextConfig(**VIT, vocab_size=40, max_position_embeddings=9)
    return transformers.SiglipTextModel(text)


def siglip2():
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**VIT, num_patches=16, patch_size=8))


def packed():
    """Images as SigLIP 2 takes them: rows of patches, which of them are real, and rows and columns of each image."""
    patches = torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 16, dtype=torch.long)
    return {"pixel_values": patches, "pixel_attention_mask": real, "spatial_shapes": torch.tensor([[4, 4], [4, 4]])}


def grounding_dino():
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    backbone = swin()
    backbone.out_features = ["stage2", "stage3", "stage4"]
    config = transformers.GroundingDinoConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        text_config={"model_type": "bert", **text, "vocab_size": 60}, encoder_layers=1, encoder_ffn_dim=24, dropout=0.0,
        encoder_attention_heads=2, **DECODER, num_feature_levels=4, max_text_len=16,
    )  # fmt: skip
    return transformers.GroundingDinoModel(config)


def eomt():
    config = transformers.EomtConfig(**VIT, image_size=32, patch_size=8, num_blocks=1, num_queries=3, mlp_ratio=2)
    return transformers.EomtForUniversalSegmentation(config)


def settled_eomt():
    """As at the end of its training, when nothing is hidden from queries any more."""
    model = eomt()
    model.attn_mask_probs.zero_()
    return model


def sam2():
    config = transformers.Sam2HieraDetConfig(
        hidden_size=8, image_size=[64, 64], blocks_per_stage=[1, 2, 1, 1], embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 2, 2, 2], window_size_per_stage=[4, 4, 4, 2], global_attention_blocks=[2],
        window_positional_embedding_background_size=[4, 4], num_query_pool_stages=3,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config)


def rt_detr(name="RTDetr"):
    backbone = transformers.RTDetrResNetConfig(**RESNET, out_features=["stage2", "stage3", "stage4"])
    config = getattr(transformers, f"{name}Config")(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[8, 16, 16], d_model=16, **DECODER,
        encoder_ffn_dim=24, encoder_attention_heads=2, num_denoising=0, dropout=0.0, anchor_image_size=None,
        decoder_in_channels=[16, 16, 16],
    )  # fmt: skip
    return getattr(transformers, f"{name}Model")(config)


def deformable_detr():
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32, **DECODER, encoder_layers=1,
        backbone_config=transformers.ResNetConfig(**RESNET, out_features=["stage3", "stage4"]), num_feature_levels=2,
        encoder_attention_heads=2, encoder_ffn_dim=24, dropout=0.0,
    )  # fmt: skip
    return transformers.DeformableDetrModel(config)


def swin():
    return transformers.SwinConfig(
        image_size=32, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def mask2former():
    config = transformers.Mask2FormerConfig(
        backbone_config=swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=24,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=24, num_queries=5, dropout=0.0,
    )  # fmt: skip
    return transformers.Mask2FormerForUniversalSegmentation(config)


def maskformer():
    decoder = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=16, **DECODER, dropout=0.0,
        backbone_config=transformers.ResNetConfig(**RESNET),
    )  # fmt: skip
    backbone = transformers.ResNetConfig(**RESNET, out_features=["stage1", "stage2", "stage3", "stage4"])
    config = transformers.MaskFormerConfig(
        backbone_config=backbone, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def upernet():
    config = transformers.UperNetConfig(backbone_config=swin(), hidden_size=8, auxiliary_channels=8)
    return transformers.UperNetForSemanticSegmentation(config)


def swin_v2():
    config = transformers.Swinv2Config(image_size=32, embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=4)
    return transformers.Swinv2Model(config)


HOSTS = {  # name: model, inputs, plan, number of converted layers
    "yolos": (yolos, lambda: image(32, 48), "softmax", 2),
    "segformer": (segformer, lambda: image(32, 48), "softmax", 2),
    "siglip": (siglip, lambda: image(32, 32), "softmax", 3),
    "siglip2": (siglip2, packed, "softmax", 3),
    "siglip_text": (siglip_text, lambda: {"input_ids": torch.arange(14).reshape(2, 7)}, "softmax", 2),
    "eomt": (eomt, lambda: image(32, 32), "softmax", 2),
    "sam2": (sam2, lambda: image(64, 64), "softmax", 2),
    "rt_detr": (rt_detr, lambda: image(64, 96), "softmax", 2),
    "rt_detr_v2": (lambda: rt_detr("RTDetrV2"), lambda: image(64, 96), "softmax", 2),
    "d_fine": (lambda: rt_detr("DFine"), lambda: image(64, 96), "softmax", 2),
    "deformable_detr": (deformable_detr, lambda: image(64, 96), "softmax", 1),
    "mask2former": (mask2former, lambda: image(64, 64), QUERIES, 1),
    "maskformer": (maskformer, lambda: image(64, 64), "softmax", 2),
    "upernet": (upernet, lambda: image(32, 32), "softmax", 4),
}


@pytest.mark.parametrize("name", HOSTS)
def test_softmax_is_the_host(name):
    build, inputs, plan, count = HOSTS[name]
    torch.manual_seed(0)
    report = checks.same_as_host(build(), inputs(), plan=plan)
    assert sum(layer.now is not None for layer in report.layers) == count


@pytest.mark.parametrize(
    ("build", "plan", "size"),
    [
        (yolos, "padre", (32, 48)), (yolos, "pom", (32, 48)), (segformer, "padre", (32, 48)), (segformer, "qt", (32, 48)),
        (siglip, {"encoder.*": "padre"}, (32, 32)), (eomt, "pom", (32, 32)), (sam2, "padre", (64, 64)),
        (rt_detr, {"*aifi*": "padre", "*decoder*": "qt"}, (64, 96)),
        (mask2former, {"*decoder.layers.*.self_attn": "poly_nl"}, (64, 64)),
    ],
)  # fmt: skip
def test_mixers_take_the_place_of_attention(build, plan, size):
    """Converted with an input, trained, undone; a mixer with a grid gets that of the feature map."""
    torch.manual_seed(0)
    model = build()
    report = checks.converts(model, plan, image(*size), input=image(*size))
    assert all(layer.now for layer in report.layers if layer.name in report.adapters)


def test_detection_tokens_stay_behind_the_patches():
    """A mixer that only adds what stands in front of the grid shows where YOLOS' tokens went."""
    report = polymix.convert(yolos(), "padre", input=image(32, 48))
    adapter = next(iter(report.adapters.values()))
    assert (adapter.prefix, adapter.grid) == (4, (4, 6))
    x, order = torch.randn(1, 28, 16), [0, 25, 26, 27, *range(1, 25)]
    expected = torch.empty_like(x)
    expected[:, order] = adapter.mixer(x[:, order])
    torch.testing.assert_close(adapter(x), expected)


def test_segformer_reads_fewer_places_where_a_mixer_reads_a_context():
    report = polymix.convert(segformer(), {"*stages.0*": "qt", "*stages.1*": "qt"}, input=image(32, 48))
    first, second = report.adapters.values()
    assert hasattr(first, "sequence_reduction") and not hasattr(second, "sequence_reduction")
    lengths = []
    first.mixer.register_forward_pre_hook(lambda _, args: lengths.append((args[0].shape[1], args[1].shape[1])))
    first(torch.randn(1, 96, 8), 8, 12)
    assert lengths == [(96, 24)]
    alone = polymix.convert(segformer(), "padre", input=image(32, 48)).layers[0]
    assert "mixes all places" in alone.dropped["sequence_reduction.sequence_reduction.weight"]


def test_eomt_hides_places_from_queries_until_it_is_trained():
    """Then mixers that know no such masks run too, with the queries in front of the grid in the last block."""
    with pytest.raises(CapabilityError, match="mask"):
        polymix.convert(eomt(), "padre", input=image(32, 32))
    report = polymix.convert(settled_eomt(), "padre", input=image(32, 32))
    assert [adapter.prefix for adapter in report.adapters.values()] == [5, 8]
    assert report.model.eval()(**image(32, 32)).masks_queries_logits.isfinite().all()


@pytest.mark.parametrize(
    ("build", "plan", "why"),
    [
        (deformable_detr, {"*encoder_attn": "qt"}, "places that each query chooses"),
        (rt_detr, {"*encoder_attn": "qt"}, "places that each query chooses"),
        (grounding_dino, {"*encoder_attn": "qt"}, "places that each query chooses"),
        (mask2former, {"*pixel_level_module.decoder*self_attn": "qt"}, "places that each query chooses"),
        (swin_v2, {"*attention": "qt"}, "cosines"),
        (sam2, {"*blocks.1.attn": "qt"}, "pools its queries"),
    ],
)
def test_what_cannot_be_converted_says_why(build, plan, why):
    with pytest.raises((CapabilityError, OptionError), match=why):
        polymix.convert(build(), plan)


def test_a_report_says_why_attention_is_kept():
    report = polymix.convert(deformable_detr(), "qt", input=image(64, 96))
    classes = {name.partition(" ")[2] for name in report.left_out}
    assert classes == {"(DeformableDetrMultiscaleDeformableAttention)"}
    assert "places that each query chooses" in report.refusals["DeformableDetrMultiscaleDeformableAttention"]
    assert "DeformableDetrMultiscaleDeformableAttention is kept: deformable attention" in str(report)


def test_segformer_of_another_release_is_refused_by_its_version():
    """Where attention lacks what this adapter reads, the message names the release that is installed."""
    model = segformer()
    for module in model.modules():
        if type(module).__name__ == "SegformerAttention":
            del module.sequence_reduction_ratio
    with pytest.raises(OptionError, match=rf"SegFormer of transformers {transformers.__version__}.*pip install -U"):
        polymix.convert(model, "qt")
