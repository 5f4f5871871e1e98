"""DETR as a host of `detect`: the published numbers, its loss, padding, batch norm, and runs on a tiny COCO folder."""

import json

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.errors import OptionError
from polymix.tasks import runner
from polymix.tasks.detect.detr import detr_loss, find_objects, inputs
from polymix.tasks.detect.model import _model
from polymix.tasks.detect.recipe import DetectRecipe
from polymix.tasks.saved import SavedRun
from tests.tasks.box_files import write_coco

cure_torchvision()
pytest.importorskip("transformers", reason="untested: DETR")
pytest.importorskip("timm", reason="untested: DETR")
pytest.importorskip("scipy", reason="untested: DETR's matching")

SMALL = [
    "backbone=test_resnet", "image_size=64", "dim=16", "heads=2", "feedforward=16", "queries=5",
    "batch_size=2", "control=False",
]  # fmt: skip


def small(*words):
    return DetectRecipe().preset("paper").with_options({"depth": 1}).changed([*SMALL, "steps=2", *words])


def test_the_papers_preset_has_the_papers_numbers():
    with torch.device("meta"):
        model = _model(DetectRecipe.paper().changed(["mixer=softmax", "init=weights"]), 91)
    config, recipe = model.config, DetectRecipe.paper()
    assert (config.d_model, config.encoder_layers, config.decoder_layers, config.num_queries) == (256, 6, 6, 100)
    assert (config.encoder_attention_heads, config.encoder_ffn_dim, config.dropout) == (8, 2048, 0.1)
    assert (config.class_cost, config.bbox_cost, config.giou_cost, config.eos_coefficient) == (1, 5, 2, 0.1)
    assert (config.bbox_loss_coefficient, config.giou_loss_coefficient, config.auxiliary_loss) == (5, 2, True)
    assert (recipe.learning_rate, recipe.backbone_learning_rate, recipe.weight_decay) == (1e-4, 1e-5, 1e-4)
    assert (recipe.clip, recipe.epochs, recipe.drop_at * recipe.epochs, recipe.batch_size) == (0.1, 300, 200, 16)
    assert model.class_labels_classifier.out_features == 92


@pytest.mark.slow
@pytest.mark.parametrize("host", ["detr", "conditional_detr"])
def test_mixers_are_where_they_were_asked_for_and_strides_count_tokens(host):
    model = _model(small(f"host={host}", "mixer=pom", "stride=16"), 3)
    layers = {name: type(part).__name__ for name, part in model.named_modules() if name.endswith("_attn")}
    assert any("PoM" in kind or "Adapter" in kind for name, kind in layers.items() if ".encoder." in name)
    assert not any("PoM" in kind or "Adapter" in kind for name, kind in layers.items() if ".decoder." in name)
    tokens = []
    for stride in (32, 16):
        model = _model(small(f"host={host}", "mixer=pom", f"stride={stride}"), 3).eval()
        with torch.no_grad():
            found = model(**inputs(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), torch.tensor([[64, 64]])))
        tokens.append(found.encoder_last_hidden_state.shape[1])
    assert tokens == [4, 16]


def test_batch_norm_learns_from_fresh_weights_and_is_frozen_with_init():
    fresh, given = _model(small(), 3), _model(small("init=weights"), 3)
    kinds = [{type(part).__name__ for part in model.modules() if "BatchNorm" in type(part).__name__}
             for model in (fresh, given)]  # fmt: skip
    assert kinds == [{"BatchNorm2d"}, {"DetrFrozenBatchNorm2d"}]
    assert all(p.requires_grad for p in fresh.parameters())
    assert not all(p.requires_grad for p in given.parameters())


def test_the_loss_has_a_term_after_every_layer_and_leaves_crowds_out():
    torch.manual_seed(0)
    model = _model(small("depth=2", "mixer=softmax"), 3).eval()
    images = torch.randint(0, 255, (1, 3, 64, 64), dtype=torch.uint8)
    boxes = torch.tensor([[4.0, 8, 24, 32], [0, 0, 9, 9]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2]), "iscrowd": torch.tensor([False, True]),
              "size": torch.tensor([64, 32])}  # fmt: skip
    alone = {**target, "boxes": boxes[:1], "labels": torch.tensor([1]), "iscrowd": torch.tensor([False])}
    with torch.no_grad():
        whole = detr_loss(model, images, [target])
        assert torch.equal(whole, detr_loss(model, images, [alone]))
        model.config.auxiliary_loss = False
        assert 0 < detr_loss(model, images, [target]) < whole


def test_padding_changes_no_box():
    torch.manual_seed(0)
    model = _model(small("mixer=softmax", "init=weights"), 3).eval()
    images = torch.randint(0, 255, (1, 3, 64, 64), dtype=torch.uint8)
    other = images.clone()
    other[..., 32:] = 7
    with torch.no_grad():
        first, second = (find_objects(model, x, torch.tensor([[64, 32]]))[0] for x in (images, other))
    assert torch.equal(first["boxes"], second["boxes"]) and first["boxes"][:, 0].max() <= 32 < images.shape[-1]


@pytest.mark.slow
def test_a_run_on_a_coco_folder_trains_and_measures(tmp_path):
    write_coco(tmp_path / "data")
    recipe = small("mixer=pom", "precision=bfloat16", "ema=0.9", "accumulate=2").changed([f"data={tmp_path / 'data'}"])
    runner.train(recipe, tmp_path / "run")
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    assert row["host"] == "DETR, test_resnet, 1 + 1 layers, stride 32" and 0 <= row["metrics"]["AP"] <= 1
    assert "metrics" in SavedRun.of(tmp_path / "run").measure()


def test_options_that_no_host_has():
    for words, text in ((["stride=16"], "stride"), (["queries=5"], "host=detr"), (["host=detr", "heads=7"], "divisor"),
                        (["host=detr", "stride=8"], "32"), (["host=yolo"], "dense"), (["host=detr", "final=0.5"], "drop_at")):  # fmt: skip
        with pytest.raises(OptionError, match=text):
            DetectRecipe().changed(words)
