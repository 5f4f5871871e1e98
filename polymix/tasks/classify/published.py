"""The published trainings of the papers' hosts on ImageNet and CIFAR-100, as options of `ImageRecipe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_CLIP = 1e6  # larger than any norm: published without clipping

# DeiT's own training. AdamW at 5e-4 for 512 images; 1e-5 is a hundredth of the highest rate at 1,024 images.
DEIT: Mapping[str, Any] = {
    "host": "deit_tiny_patch16_224", "image_size": 224, "epochs": 300.0, "batch_size": 1024, "optimizer": "adamw",
    "learning_rate": 5e-4, "learning_rate_for": 512, "weight_decay": 0.05, "betas": (0.9, 0.999), "clip": NO_CLIP,
    "warmup": 5 / 300, "schedule": "cosine", "final": 0.01, "label_smoothing": 0.1, "loss": "cross_entropy",
    "augment": True, "auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0, "switch": 0.5,
    "erasing": 0.25, "repeats": 3, "drop_path": 0.1, "ema": 0.99996, "crop": 0.875, "interpolation": "bicubic",
    "evaluate_every": 1251, "checkpoint_every": 1251, "log_every": 50,
}  # fmt: skip
# XCiT takes DeiT's training, for 400 epochs.
XCIT: Mapping[str, Any] = {**DEIT, "host": "xcit_nano_12_p16_224", "epochs": 400.0, "warmup": 5 / 400}
# On CIFAR-100 six blocks, whatever the width (Poly-SA, Section 5.2). The size of the images is not given.
XCIT_CIFAR: Mapping[str, Any] = {**XCIT, "host_depth": 6, "evaluate_every": 500, "checkpoint_every": 500}
# Goyal et al., at 256 images.
RESNET50: Mapping[str, Any] = {
    "host": "resnet50", "mixer": "poly_nl", "image_size": 224, "epochs": 90.0, "batch_size": 256, "optimizer": "sgd",
    "momentum": 0.9, "learning_rate": 0.1, "learning_rate_for": 256, "weight_decay": 1e-4, "clip": NO_CLIP,
    "warmup": 0.0, "schedule": "steps", "milestones": (30 / 90, 60 / 90, 80 / 90), "label_smoothing": 0.0,
    "loss": "cross_entropy", "augment": True, "crop": 0.875, "interpolation": "bilinear",
    "evaluate_every": 5005, "checkpoint_every": 5005, "log_every": 50,
}  # fmt: skip
# EfficientViT's own training: 20 epochs of warm-up before 300. AdamW at 2.5e-4 for 128 images; here on eight devices.
EFFICIENTVIT: Mapping[str, Any] = {
    "host": "efficientvit_b1", "mixer": "qt", "image_size": 224, "epochs": 320.0, "batch_size": 1024,
    "optimizer": "adamw", "learning_rate": 2.5e-4, "learning_rate_for": 128, "weight_decay": 0.1,
    "betas": (0.9, 0.999), "clip": 2.0, "warmup": 20 / 320, "schedule": "cosine", "final": 0.0,
    "label_smoothing": 0.1, "loss": "bce", "augment": True, "auto_augment": "rand-m3-n1", "mixup": 0.1, "cutmix": 0.1,
    "switch": 0.5, "sizes": (128, 160, 192, 224), "drop_path": 0.05, "ema": 0.9998, "norm_images": 16_000,
    "crop": 0.875, "interpolation": "bicubic", "evaluate_every": 1251, "checkpoint_every": 1251, "log_every": 50,
}  # fmt: skip
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deit": DEIT, "xcit": XCIT, "xcit_cifar": XCIT_CIFAR, "resnet50": RESNET50, "efficientvit": EFFICIENTVIT,
}  # fmt: skip

_DEIT_BY_SIZE = {
    "softmax": (0.722, 0.798, 0.818), "padre:2": (0.745, 0.804, 0.814), "padre:3": (0.765, 0.805),
}  # fmt: skip
_XCIT_CIFAR = {"keep": (0.7172, 0.7616, 0.8189, 0.8153), "poly_sa": (0.7127, 0.7556, 0.8121, 0.8070)}
_XCIT = {"keep": (0.6830, 0.7566, 0.8211, 0.8252), "poly_sa": (0.6852, 0.7521, 0.8150, 0.8219)}
_SIZES = ("tiny", "small", "base")
_XCIT_SIZES = ("nano_12", "tiny_12", "small_12", "medium_24")


def accuracy(host: str, mixer: str, degree: int | None, classes: int, depth: int | None) -> tuple[float, str] | None:
    """The top-1 accuracy that a paper reports for a host with a mixer, and its table; None if no paper has it.

    Args:
        mixer: its name; "keep" for the host as it is. degree: of PADRe.
        classes: 1000 for ImageNet, 100 for CIFAR-100. depth: host_depth of the recipe.
    """
    key = f"{mixer}:{degree}" if mixer == "padre" else mixer
    for size, names in (("deit", _SIZES), ("xcit", _XCIT_SIZES)):
        for place, name in enumerate(names):
            if size == "deit" and host == f"deit_{name}_patch16_224" and classes == 1000:
                row = _DEIT_BY_SIZE.get("softmax" if key == "keep" else key, ())
                return (row[place], "PADRe, Table 2: ImageNet") if place < len(row) else None
            if size == "xcit" and host == f"xcit_{name}_p16_224":
                if classes == 1000 and depth is None and key in _XCIT:
                    return _XCIT[key][place], "Poly-SA, Table 4a: ImageNet"
                if classes == 100 and depth == 6 and key in _XCIT_CIFAR:
                    return _XCIT_CIFAR[key][place], "Poly-SA, Table 4b: CIFAR-100"
    if host == "resnet50" and classes == 1000 and key in ("keep", "poly_nl"):
        return (0.7562 if key == "keep" else 0.7630), "Poly-NL, Table 1a: ImageNet"
    return None
