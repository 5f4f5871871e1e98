"""Small models of timm: the shared Attention in its families, EVA, BEiT, XCiT, MetaFormer, EfficientViT."""

import pytest
import torch

from polymix.compat import cure_torchvision

cure_torchvision()
timm = pytest.importorskip("timm", reason="untested: models of timm (the extra vision)")

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def vit(**options):
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **{**SMALL, **options})


def deit_distilled():
    return timm.create_model("deit_tiny_distilled_patch16_224", pretrained=False, **SMALL)


def pit(**options):
    from timm.models.pit import PoolingVisionTransformer

    stages = {"base_dims": (8, 8), "depth": (1, 1), "heads": (2, 2), "mlp_ratio": 2}
    return PoolingVisionTransformer(img_size=32, patch_size=8, stride=4, num_classes=3, **stages, **options)


def crossvit():
    from timm.models.crossvit import CrossVit

    return CrossVit(
        img_size=32, img_scale=(1.0, 0.75), patch_size=(8, 12), embed_dim=(16, 32), depth=((1, 1, 0),),
        num_heads=(2, 2), mlp_ratio=(2, 2, 1), num_classes=3,
    )  # fmt: skip


def csat():
    from timm.models.csatv2 import CSATv2

    return CSATv2(num_classes=3, dims=(8, 8, 16, 32), depths=(1, 1, 2, 2), transformer_depths=(0, 0, 1, 1))


def eva(**options):
    from timm.models.eva import Eva

    return Eva(**SMALL, global_pool="token", **options)


def beit(**options):
    from timm.models.beit import Beit

    return Beit(**SMALL, global_pool="token", **options)


def xcit():
    return timm.create_model("xcit_nano_12_p16_224", **{**SMALL, "patch_size": 16, "img_size": 64})


def caformer():
    from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv

    return MetaFormer(
        depths=(1, 2), dims=(8, 16), token_mixers=[SepConv, Attention], head_dim=8, num_classes=3,
        norm_layers=[LayerNorm2dNoBias, LayerNormNoBias],
    )  # fmt: skip


def efficientvit(**options):
    from timm.models.efficientvit_mit import EfficientVit

    sizes = {"widths": (8, 8, 8, 16, 32), "depths": (1, 1, 1, 2, 1), "head_dim": 8, "head_widths": (16, 16)}
    model = EfficientVit(num_classes=3, **sizes, **options)
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.normal_(0.0, 0.1)
            part.running_var.uniform_(0.01, 2.0)
    return model


XCIT_IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
HOSTS = {
    "vit": (vit, IMAGES), "deit, two tokens in front": (deit_distilled, IMAGES), "pit": (pit, IMAGES),
    "pit, two tokens in front": (lambda: pit(distilled=True), IMAGES), "crossvit": (crossvit, IMAGES),
    "registers": (lambda: vit(reg_tokens=3), IMAGES),
    "no class token": (lambda: vit(class_token=False, global_pool="avg"), IMAGES),
    "caformer": (caformer, IMAGES), "beit": (beit, IMAGES),
    "eva, one map": (lambda: eva(use_rot_pos_emb=False), IMAGES),
    "eva, three maps": (lambda: eva(use_rot_pos_emb=False, qkv_fused=False), IMAGES),
    "eva, the other class": (lambda: eva(use_rot_pos_emb=False, attn_type="rope"), IMAGES),
}  # fmt: skip


def inside(model, layer, images):
    """What a layer was given and gave in a run."""
    seen = []
    hook = model.get_submodule(layer).register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    model(images)
    hook.remove()
    return seen[0]
