"""The presets of scans and satellite series, held to the authors' configurations: numbers typed from their files."""

import math

import pytest
import torch

from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.train.option_effects import has_effect
from polymix.train.registry import task_class

# Pointcept/Pointcept d74c646: configs/nuscenes/semseg-pt-v3m1-0-base.py, with configs/_base_/default_runtime.py.
PTV3_NUSCENES = {
    "batch_size": 12, "mix": 0.8, "depths": (2, 2, 2, 6, 2), "channels": (32, 64, 128, 256, 512),
    "heads": (2, 4, 8, 16, 32), "window": 1024, "decoder_depths": (2, 2, 2, 2), "decoder_channels": (64, 64, 128, 256),
    "decoder_heads": (4, 4, 8, 16), "orders": ("z", "z-trans", "hilbert", "hilbert-trans"), "shuffle": True,
    "drop_path": 0.3, "cpe": True, "lovasz": 1.0, "epochs": 50.0, "learning_rate": 0.002, "weight_decay": 0.005,
    "block_rate": 0.0002 / 0.002, "warmup": 0.04, "final": 1 / (10 * 100), "one_cycle": True, "betas": (0.9, 0.999),
    "clip": None, "decay": "all", "keep": "best", "ema": 0.0,
    "turn": True, "turned": 0.5, "tilt": 0.0, "scale": 0.1, "flip": True, "jitter": 0.005, "elastic": False,
    "drop": False, "colour": False, "voxel": 0.05, "random_points": True, "crop": 0, "coordinates": "metres",
    # Its code, pointcept/models/point_transformer_v3/point_transformer_v3m1_base.py.
    "legacy_unpooling": True, "fit_curves": True, "host_init": "published", "whole": 0,
    "evaluate_every": math.ceil(19_130 / 12),  # of SemanticKITTI's training scans, once an epoch
}  # fmt: skip
# configs/scannet/semseg-pt-v3m1-0-base.py of the same.
PTV3_SCANNET = {
    **PTV3_NUSCENES, "epochs": 800.0, "learning_rate": 0.006, "weight_decay": 0.05, "block_rate": 0.0006 / 0.006,
    "warmup": 0.05, "final": 1 / (10 * 1000), "tilt": math.pi / 64, "elastic": True, "drop": True, "colour": True,
    "voxel": 0.02, "crop": 102_400, "coordinates": "none",
    "evaluate_every": 1201 * (800 // 100) // 12,  # eval_epoch = 100: eight times over 1,201 scenes
}  # fmt: skip
# michaeltrs/DeepSatModels 782f736: configs/PASTIS24/TSViT_fold1.yaml.
TSVIT = {
    "window": 24, "dates": 60, "patch": 2, "dim": 128, "temporal_depth": 4, "spatial_depth": 4, "heads": 4,
    "batch_size": 16, "epochs": 100.0, "warmup": 10 / 100, "learning_rate": 1e-3, "final": 5e-6 / 1e-3,
    "weight_decay": 0.0, "evaluate_every": 2000, "fold": 1,
    # Its code: train_and_eval/segmentation_training_transf.py, utils/lr_scheduler.py, data/PASTIS24/data_transforms.py.
    "cosine_from": "start", "betas": (0.9, 0.999), "clip": None, "decay": "all", "keep": "best", "ema": 0.0,
    "days": "random", "mask_padding": False, "legacy_series": True, "legacy_layout": True, "host_init": "published",
    "match_parameters": False,
}  # fmt: skip
# Haiyang-W/DSVT 8cfc2a6: tools/cfgs/dsvt_models/dsvt_plain_1f_onestage_nusences.yaml (z two metres lower there, in the
# LiDAR's frame), tools/cfgs/dataset_configs/nuscenes_dataset.yaml, tools/train_utils/optimization/__init__.py.
DSVT = {
    "space": (-54.0, -54.0, -3.0, 54.0, 54.0, 5.0), "voxel": (0.3, 0.3, 8.0), "flip": True, "scale": 0.1, "move": 0.5,
    "encoder": (128, 128), "set_size": 90, "blocks": 4, "window": (30, 30), "heads": 8, "hidden": 256,
    "depths": (1, 2, 2), "strides": (1, 2, 2), "channels": (128, 128, 256), "level_dim": 128, "stride": 2,
    "batch_size": 32, "epochs": 20.0, "learning_rate": 0.005, "weight_decay": 0.05, "decay": "all",
    "betas": (0.9, 0.99), "warmup": 0.4, "final": 1 / (10 * 1e4), "one_cycle": True, "clip": 35.0, "clip_by": "norm",
    "sweeps": 10,
    "balanced": True, "keep": "last", "ema": 0.0, "legacy_positions": True, "host_init": "published",
    # tianweiy/CenterPoint 3cf7d87: configs/nusc/pp/nusc_centerpoint_pp_02voxel_two_pfn_10sweep.py, for the head; radii
    # of nusc_centerpoint_pp_02voxel_two_pfn_10sweep_circular_nms.py, whose numbers are squares.
    "head_dim": 64, "convolutions": 2, "legacy_radius": True, "least": 0.1, "most": 500, "nms": "rotated",
    "overlap": 0.2,
    "evaluate_every": round(123_580 / 32),  # of the balanced list of the training keyframes, once an epoch
}  # fmt: skip
PRESETS = {
    "segment3d paper": (Segment3dRecipe, "paper", PTV3_NUSCENES),
    "segment3d rooms": (Segment3dRecipe, "rooms", PTV3_SCANNET),
    "satellite paper": (SatelliteRecipe, "paper", TSVIT), "detect3d paper": (Detect3dRecipe, "paper", DSVT),
}  # fmt: skip
# Options that say where and on what a run computes or what pictures show, and of the default data.
FREE = {"data", "layout", "plan", "init", "control", "accumulate", "steps", "precision", "checkpointing", "seed",
        "device", "strategy", "sequence_parallel", "workers", "log_every", "logger", "allow_pickle", "classes", "piece",
        "question", "scenes", "test_scenes", "scans", "test_scans", "synthetic_train", "synthetic_test", "threshold",
        "match_parameters"}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_is_the_published_one(name):
    kind, preset, published = PRESETS[name]
    recipe = kind().preset(preset)
    for option, value in published.items():
        near = isinstance(value, (float, tuple)) and option != "orders"
        assert getattr(recipe, option) == (pytest.approx(value) if near else value), option
    assert recipe.checkpoint_every == recipe.evaluate_every
    if kind is Detect3dRecipe:
        assert math.radians(recipe.turn) == pytest.approx(0.78539816)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_every_number(name):
    """A default that is not named would change what is called a paper's experiment."""
    kind, preset, published = PRESETS[name]
    named = set(kind.presets[preset])
    recipe = kind().preset(preset)
    beside = ((getattr(recipe, other), values, names) for other, values, names in kind.only_beside)
    idle = {name for value, values, names in beside if not has_effect(value, values) for name in names}
    assert set(kind.model_fields) - named - FREE - idle == set()
    assert named - set(published) <= {"mixer", "checkpoint_every", "turn"}, "and the test holds each of them"


@pytest.mark.parametrize("kind", [Segment3dRecipe, SatelliteRecipe, Detect3dRecipe, HandwritingRecipe])
def test_all_weights_decay_as_published(kind):
    """Biases and norms too: AdamW(model.parameters()) of TSViT and Pointcept, SAM(model.parameters()) of HTR-VT,
    bn_wd=True of OpenPCDet."""
    paper = kind.paper().changed(weight_decay=0.3)
    groups = (
        task_class(paper)(paper)
        .optimizer(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
        .param_groups
    )
    assert sum(len(group["params"]) for group in groups) == 4
    assert {group["weight_decay"] for group in groups} == {0.3}
