"""The published trainings of the papers' hosts on ImageNet and CIFAR-100, as options of `ClassifyRecipe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITHOUT_EMA: Mapping[str, Any] = {"ema": 0.0, "ema_rise": "steps", "ema_buffers": False}
# DeiT's own training. AdamW at 5e-4 for 512 images; 1e-5 is a hundredth of the highest rate at 1,024 images.
DEIT: Mapping[str, Any] = {
    "host": "deit_tiny_patch16_224", "image_size": 224, "epochs": 300.0, "batch_size": 1024, "optimizer": "adamw",
    "learning_rate": 5e-4, "learning_rate_for": 512, "weight_decay": 0.05, "decay": "matrices", "betas": (0.9, 0.999),
    "clip": None, "keep": "last", "host_init": "published", "warmup": 5 / 300, "schedule": "cosine", "final": 0.01,
    "cosine_from": "start", "label_smoothing": 0.1, "loss": "cross_entropy",
    "augment": True, "auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0, "switch": 0.5,
    "erasing": 0.25, "repeats": 3, "drop_path": 0.1, "ema": 0.99996, "ema_rise": "none",
    "ema_buffers": True, "crop": 0.875, "interpolation": "bicubic",
    "evaluate_every": 1251, "checkpoint_every": 1251, "log_every": 50,
}  # fmt: skip
# XCiT takes DeiT's training, for 400 epochs.
XCIT: Mapping[str, Any] = {**DEIT, "host": "xcit_nano_12_p16_224", "epochs": 400.0, "warmup": 5 / 400}
# On CIFAR-100 six blocks, whatever the width (Poly-SA, Section 5.2). The size of the images is not given.
XCIT_CIFAR: Mapping[str, Any] = {**XCIT, "host_depth": 6, "evaluate_every": 500, "checkpoint_every": 500}
# Swin's own training, with Poly-SA as Section 5.2.2 has it: AdamW at 5e-4 for 512 images, 20 epochs of warm-up.
SWIN: Mapping[str, Any] = {
    **DEIT, "host": "swin_tiny_patch4_window7_224", "mixer": "poly_sa:head_mixing=depthwise", "warmup": 20 / 300,
    "clip": 5.0, "drop_path": 0.2, "repeats": 1, **WITHOUT_EMA,
}  # fmt: skip
# PoolFormer's own training: AdamW at 1e-3 for 1,024 images.
METAFORMER: Mapping[str, Any] = {
    **DEIT, "host": "metaformer_s12", "mixer": "poly_sa:head_mixing=depthwise", "learning_rate": 1e-3,
    "learning_rate_for": 1024, "repeats": 1, **WITHOUT_EMA, "crop": 0.9,
}  # fmt: skip
# CvT's own training: AdamW at 2.5e-4 for 256 images, 2,048 images on eight devices, and 1e-5 at the end.
CVT: Mapping[str, Any] = {
    **DEIT, "host": "cvt_13", "mixer": "poly_sa", "batch_size": 2048, "learning_rate": 2.5e-4,
    "learning_rate_for": 256, "final": 1e-5 / 2e-3, "repeats": 1, **WITHOUT_EMA,
    "evaluate_every": 626, "checkpoint_every": 626,
}  # fmt: skip
# Goyal et al., at 256 images, with Poly-NL between maps to a quarter of the channels and back (Section 5.1.2).
RESNET50: Mapping[str, Any] = {
    "host": "resnet50", "mixer": "poly_nl:reduction=4", "image_size": 224, "epochs": 90.0, "batch_size": 256,
    "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1, "learning_rate_for": 256, "weight_decay": 1e-4,
    "decay": "matrices", "clip": None, "warmup": 0.0, "schedule": "steps", "milestones": (30 / 90, 60 / 90, 80 / 90),
    "label_smoothing": 0.0, "loss": "cross_entropy", "augment": True, "crop": 0.875, "interpolation": "bilinear",
    "ema": 0.0, "keep": "last", "host_init": "published",
    "evaluate_every": 5005, "checkpoint_every": 5005, "log_every": 50,
}  # fmt: skip
# EfficientViT's own training: 20 epochs of warm-up before 300. AdamW at 2.5e-4 for 128 images; here on eight devices.
EFFICIENTVIT: Mapping[str, Any] = {
    "host": "efficientvit_b1", "mixer": "qt", "image_size": 224, "epochs": 320.0, "batch_size": 1024,
    "optimizer": "adamw", "learning_rate": 2.5e-4, "learning_rate_for": 128, "weight_decay": 0.1, "decay": "matrices",
    "betas": (0.9, 0.999), "clip": 2.0, "clip_by": "value", "warmup": 20 / 320, "schedule": "cosine", "final": 0.0,
    "label_smoothing": 0.1, "loss": "bce", "augment": True, "auto_augment": "rand-m3-n1", "mixup": 0.1, "cutmix": 0.1,
    "switch": 0.5, "sizes": (128, 160, 192, 224), "drop_path": 0.05, "drop_path_rises": True, "ema": 0.9998,
    "ema_rise": "exponential", "ema_buffers": True, "norm_images": 16_000, "keep": "last", "host_init": "published",
    "cosine_from": "warmup", "crop": 0.95, "interpolation": "bicubic",
    "evaluate_every": 1251, "checkpoint_every": 1251, "log_every": 50,
}  # fmt: skip
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deit": DEIT, "xcit": XCIT, "xcit_cifar": XCIT_CIFAR, "swin": SWIN, "metaformer": METAFORMER, "cvt": CVT,
    "resnet50": RESNET50, "efficientvit": EFFICIENTVIT,
}  # fmt: skip
