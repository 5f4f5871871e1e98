"""timm: ViT and its relatives, Swin, XCiT, the MetaFormers and EfficientViT."""

from polymix.convert.adapters.timm import maps, swin, vit

__all__ = ["maps", "swin", "vit"]
