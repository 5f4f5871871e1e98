"""DETR as a host of `detect`: the published numbers, its loss, padding, batch norm, and runs on a tiny COCO folder."""

import json
from types import SimpleNamespace

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.domains.detect import task
from polymix.domains.detect.detr import detr_counts, detr_losses, find_objects, inputs
from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.detect.task import DetectTask
from polymix.errors import CapabilityError, OptionError
from polymix.train.counted import over
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.domains.box_files import write_coco

cure_torchvision()
pytest.importorskip("transformers", reason="untested: DETR")
pytest.importorskip("timm", reason="untested: DETR")
pytest.importorskip("scipy", reason="untested: DETR's matching")

SMALL = [
    "backbone=test_resnet", "image_size=64", "dim=16", "heads=2", "feedforward=16", "queries=5",
    "batch_size=2", "control=False",
]  # fmt: skip


def small(*words):
    options = dict(word.split("=", 1) for word in (*SMALL, "depth=1", "steps=2", *words))  # the last counts
    return DetectRecipe.paper().changed(**options)


def built(recipe, classes):
    return DetectTask(recipe).build(SimpleNamespace(classes=range(classes)))


def check(recipe):
    DetectTask(recipe).check()


def test_the_papers_preset_has_the_papers_numbers():
    with torch.device("meta"):
        model = built(DetectRecipe.paper().changed(mixer="softmax", init="weights"), 91)
    config, recipe = model.config, DetectRecipe.paper()
    assert (config.d_model, config.encoder_layers, config.decoder_layers, config.num_queries) == (256, 6, 6, 100)
    assert (config.encoder_attention_heads, config.encoder_ffn_dim, config.dropout) == (8, 2048, 0.1)
    assert (config.class_cost, config.bbox_cost, config.giou_cost, config.eos_coefficient) == (1, 5, 2, 0.1)
    assert (config.bbox_loss_coefficient, config.giou_loss_coefficient, config.auxiliary_loss) == (5, 2, True)
    assert (recipe.learning_rate, recipe.backbone_learning_rate, recipe.weight_decay) == (1e-4, 1e-5, 1e-4)
    assert (recipe.clip, recipe.epochs, recipe.drop_at * recipe.epochs, recipe.batch_size) == (0.1, 300, 200, 16)
    assert model.class_labels_classifier.out_features == 92
    assert recipe.flip and recipe.crops and list(recipe.short_sides) == [*range(480, 801, 32)]
    assert (recipe.sizes["short"], recipe.sizes["long"], recipe.image_size) == (800, 1333, 1344)


def test_the_papers_ap_is_beside_detr_on_coco_alone(tmp_path, monkeypatch):
    write_coco(tmp_path)
    recipe = DetectRecipe.paper().changed(data=str(tmp_path), mixer="softmax")
    assert DetectTask(recipe).published() is None, "a folder with COCO's names, which is not COCO"
    monkeypatch.setattr(task, "is_coco_2017", lambda folder: folder is not None)
    published = DetectTask(recipe).published()
    assert published["AP"] == 0.406 and DetectTask(recipe.changed(mixer="padre:degree=2")).published()["AP"] == 0.402
    assert DetectTask(recipe.changed(mixer="pom")).published() is DetectTask(DetectRecipe()).published() is None
    for other in ({"stride": 16}, {"match_parameters": True, "mixer": "padre:degree=2"}):
        assert DetectTask(recipe.changed(**other)).published() is None, "another host, or a mixer of another width"
    assert (
        DetectTask(recipe.changed(plan="1:1")).published()
        is DetectTask(recipe.changed(backbone="resnet18")).published()
        is None
    )


@pytest.mark.parametrize("host", ["detr", "conditional_detr"])
def test_mixers_are_where_they_were_asked_for_and_strides_count_tokens(host):
    model = built(small(f"host={host}", "mixer=pom", "stride=16"), 3)
    layers = {name: type(part).__name__ for name, part in model.named_modules() if name.endswith("_attn")}
    assert any("PoM" in kind or "Adapter" in kind for name, kind in layers.items() if ".encoder." in name)
    assert not any("PoM" in kind or "Adapter" in kind for name, kind in layers.items() if ".decoder." in name)
    tokens = []
    for stride in (32, 16):
        model = built(small(f"host={host}", "mixer=pom", f"stride={stride}"), 3).eval()
        with torch.no_grad():
            output = model(**inputs(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), torch.tensor([[64, 64]])))
        tokens.append(output.encoder_last_hidden_state.shape[1])
    assert tokens == [4, 16]


def encoder_and_decoder(model):
    """The kinds of mixers in the encoder, and of what is in the decoder."""
    layers = {"encoder": [], "decoder": [], "cross": []}
    for name, part in model.named_modules():
        if name.endswith(("self_attn", "encoder_attn")):
            kind = type(getattr(part, "mixer", part)).__name__
            layers["cross" if name.endswith("encoder_attn") else name.split(".")[1]].append(kind)
    return layers


@pytest.mark.parametrize(("host", "decoder", "cross"), [
    ("detr", "softmax", "pom"), ("detr", "padre", "qt"), ("detr", "linear", "linear"), ("detr", "pom", None),
    ("conditional_detr", "qt", None),
])  # fmt: skip
def test_mixers_of_the_decoder_train(host, decoder, cross):
    words = [f"host={host}", f"decoder_mixer={decoder}", *([f"cross_mixer={cross}"] if cross else [])]
    model = built(small("mixer=padre", *words), 3)
    kinds = encoder_and_decoder(model)
    assert kinds["encoder"] == ["PadreMixer"] and "Detr" not in kinds["decoder"][0]
    assert ("Detr" in kinds["cross"][0]) == (cross is None)
    images = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[4.0, 8, 24, 32]])
    target = {"boxes": boxes, "labels": torch.tensor([1]), "iscrowd": torch.tensor([False]),
              "size": torch.tensor([64, 48])}  # fmt: skip
    detr_losses(model, images, [target, {**target, "size": torch.tensor([40, 64])}]).sum().backward()
    for name in ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"):
        moved = [p.grad is not None and bool(p.grad.abs().sum() > 0)
                 for p in model.model.get_submodule(name).parameters()]  # fmt: skip
        assert any(moved), name
    with torch.no_grad():
        assert len(find_objects(model.eval(), images, torch.tensor([[64, 48], [40, 64]]))[1]["boxes"]) > 0


def test_cross_attention_that_no_mixer_can_replace_is_refused_by_name():
    with pytest.raises(CapabilityError, match="side by side"):
        check(small("host=conditional_detr", "cross_mixer=pom"))
    with pytest.raises(CapabilityError, match="separate context"):
        check(small("cross_mixer=padre"))


def test_a_plan_is_for_the_encoder():
    kinds = encoder_and_decoder(built(small("depth=2", "mixer=pom", "plan=1:1"), 3))
    assert kinds["encoder"][0] == "PomMixer" and "Detr" in kinds["encoder"][1] and "Detr" in kinds["decoder"][0]
    named = built(small("depth=2", "mixer=pom", "plan=*.1.self_attn=qt,*.0.*=keep"), 3)
    assert encoder_and_decoder(named)["encoder"][1] == "QtMixer" and "Detr" in encoder_and_decoder(named)["encoder"][0]
    with pytest.raises(OptionError, match="encoder"):
        check(small("depth=2", "plan=model.decoder.layers.0.self_attn=pom"))


def test_batch_norm_learns_from_fresh_weights_and_is_frozen_with_init():
    fresh, given = built(small(), 3), built(small("init=weights"), 3)
    kinds = [{type(part).__name__ for part in model.modules() if "BatchNorm" in type(part).__name__}
             for model in (fresh, given)]  # fmt: skip
    assert kinds == [{"BatchNorm2d"}, {"DetrFrozenBatchNorm2d"}]
    assert all(p.requires_grad for p in fresh.parameters())
    assert not all(p.requires_grad for p in given.parameters())


def test_the_loss_has_a_term_after_every_layer_and_leaves_crowds_out():
    torch.manual_seed(0)
    model = built(small("depth=2", "mixer=softmax"), 3).eval()
    images = torch.randint(0, 255, (1, 3, 64, 64), dtype=torch.uint8)
    boxes = torch.tensor([[4.0, 8, 24, 32], [0, 0, 9, 9]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2]), "iscrowd": torch.tensor([False, True]),
              "size": torch.tensor([64, 32])}  # fmt: skip
    alone = {**target, "boxes": boxes[:1], "labels": torch.tensor([1]), "iscrowd": torch.tensor([False])}
    with torch.no_grad():
        whole = detr_losses(model, images, [target])
        assert torch.equal(whole, detr_losses(model, images, [alone]))
        assert torch.equal(detr_counts(model, [target]), detr_counts(model, [alone]))
        box = torch.tensor([[14 / 32, 20 / 64, 20 / 32, 24 / 64]])
        labels = [{"boxes": box, "class_labels": alone["labels"]}]
        published = model(**inputs(images, target["size"][None]), labels=labels).loss
        torch.testing.assert_close(over(whole, detr_counts(model, [target])), published)
        model.config.auxiliary_loss = False
        assert (whole > (last := detr_losses(model, images, [target]))).all() and (last > 0).all()


@pytest.mark.parametrize("mixer", ["softmax", "padre", "pom", "qt"])
def test_padding_changes_no_box(mixer):
    """Whatever stands in the padding, pixels or tokens; and the test sees it if the encoder or decoder does."""
    torch.manual_seed(0)
    model = built(small(f"mixer={mixer}", "init=weights", "image_size=128"), 3).eval()
    g = torch.Generator().manual_seed(0)
    images, sizes = torch.randint(0, 255, (2, 3, 128, 128), dtype=torch.uint8, generator=g), [[128, 128], [64, 32]]
    noise = 10 * torch.randn(16, 4, 4, generator=g)
    noise[:, :2, :1] = 0  # the two tokens of the second picture

    def run(images, tokens=None):
        hook = model.model.input_projection.register_forward_hook(
            lambda module, args, found: found if tokens is None else found + torch.stack((tokens * 0, tokens))
        )
        with torch.no_grad():
            found = model(**inputs(images, torch.tensor(sizes)))
        hook.remove()
        return found.encoder_last_hidden_state[1, [0, 4]], found.last_hidden_state[1], found.pred_boxes[1]

    def same(first, second):
        return [bool(torch.allclose(a, b, atol=1e-5)) for a, b in zip(first, second, strict=True)]

    other = images.clone()
    other[1, :, 64:] = other[1, :, :, 32:] = 7
    assert same(run(images), run(other)) == same(run(images), run(images, noise)) == [True, True, True]
    for part, name in ((model.model.encoder, "attention_mask"), (model.model.decoder, "encoder_attention_mask")):
        forward = part.forward
        part.forward = lambda *args, _f=forward, _n=name, **given: _f(*args, **{**given, _n: None})
        found = same(run(images), run(images, noise))
        part.forward = forward
        assert not found[1] and found[0] == (name == "encoder_attention_mask"), f"{name} is not needed"


def test_padding_that_no_picture_needs_is_cut_off():
    images = torch.randint(0, 255, (2, 3, 128, 128), dtype=torch.uint8)
    example = inputs(images, torch.tensor([[40, 96], [64, 30]]))
    assert example["pixel_values"].shape == (2, 3, 64, 96) and example["pixel_mask"].shape == (2, 64, 96)
    assert example["pixel_mask"][0].sum() == 40 * 96 and example["pixel_mask"][1].sum() == 64 * 30


def test_a_mixer_without_padding_is_refused_before_training():
    for words in (["mixer=poly_sa"], ["mixer=pom", "depth=2", "plan=*.1.self_attn=poly_sa"]):
        with pytest.raises(CapabilityError, match="padding"):
            check(small(*words, "data=photos"))
    check(small("mixer=poly_sa"))  # made scenes are squares


@pytest.mark.slow
def test_a_run_on_a_coco_folder_trains_and_measures(tmp_path):
    write_coco(tmp_path / "data")
    others = ("depth=2", "plan=1:1", "decoder_mixer=qt", "cross_mixer=linear", "image_size=128", "short_sides=64,96")
    recipe = small("mixer=pom", "precision=bfloat16", "ema=0.9", "accumulate=2", f"data={tmp_path / 'data'}", *others)
    assert recipe.flip and recipe.crops
    train(recipe, tmp_path / "run")
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    assert (
        row["host"] == "DETR, test_resnet, 2 + 2 layers, stride 32"
        and row["mixer"] == "pom (1:1)"
        and 0 <= row["metrics"]["AP"] <= 1
    )
    assert "metrics" in SavedRun.of(tmp_path / "run").measure()


def test_options_that_no_host_has():
    for options, text in (({"stride": "16"}, "stride"), ({"queries": "5"}, "host=detr"),
                          ({"host": "detr", "heads": "7"}, "divisor"), ({"host": "detr", "stride": "8"}, "32"),
                          ({"host": "yolo"}, "dense"), ({"host": "detr", "final": "0.5"}, "final.*host=detr")):  # fmt: skip
        with pytest.raises(OptionError, match=text):
            DetectRecipe().changed(**options)


@pytest.mark.parametrize(("options", "argument", "words"), [
    (["backbone=resnet999"], "backbone", "name of a model"), (["backbone=deit_tiny_patch16_224"], "backbone", "strides 16, 16, 16"),
    (["backbone=swin_tiny_patch4_window7_224"], "backbone", "images of one size"),
    (["backbone=efficientvit_b0", "stride=16"], "backbone", "output_stride=16"),
])  # fmt: skip
def test_a_backbone_is_checked_before_any_picture_is_read(options, argument, words):
    with pytest.raises(OptionError, match=words) as caught:
        check(small(*options))
    assert caught.value.argument == argument


def test_a_qt_vit_is_a_backbone_and_its_first_stage_is_frozen_with_weights():
    model = built(small("backbone=qt_vit_b0", "mixer=padre"), 3)
    names = {type(part).__name__ for part in model.modules()}
    assert {"QtMixer", "PadreMixer"} <= names, "QT in the backbone, padre in the encoder"
    images, sizes = torch.zeros(1, 3, 64, 96, dtype=torch.uint8), torch.tensor([[64, 96]])
    assert model.eval()(**inputs(images, sizes)).logits.shape == (1, 5, 4)
    with torch.device("meta"):
        frozen = built(small("backbone=efficientvit_b0", "init=weights"), 3)
    learns = {name.split("model.backbone.")[1].split(".")[1]: p.requires_grad
              for name, p in frozen.named_parameters() if ".backbone." in name}  # fmt: skip
    assert learns == {"stem_in_conv": False, "stem_res0": False, "stages_0": False, "stages_1": True, "stages_2": True,
                      "stages_3": True}  # fmt: skip
