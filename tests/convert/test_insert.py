"""`polymix.insert`: at the start the host computes what it did, under its own names; then the block learns."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import InputError, OptionError, ShapeError, UnknownNameError
from polymix.mixers import PadreConfig, PolyNlConfig
from tests.convert.checks import MIXERS, answer, gradients, identical, near, snapshot, survives, unchanged
from tests.helpers import jitter

cure_torchvision()
vision = pytest.importorskip("torchvision", reason="untested: models of torchvision").models

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))


def resnet(**options):
    """Stages of 8 to 64 channels, the third of two blocks."""
    model = vision.ResNet(vision.resnet.BasicBlock, [1, 1, 2, 1], num_classes=5, **options)
    narrow(model)
    return jitter(model, scale=0.05).eval()


def narrow(model):
    """An eighth of the channels everywhere."""
    for part in list(model.modules()):
        for key, child in list(part._modules.items()):
            if isinstance(child, nn.Conv2d):
                into = child.in_channels if child.in_channels == 3 else child.in_channels // 8
                size, stride, padding = child.kernel_size, child.stride, child.padding
                part._modules[key] = nn.Conv2d(into, child.out_channels // 8, size, stride, padding, bias=False)
            elif isinstance(child, nn.BatchNorm2d):
                part._modules[key] = nn.BatchNorm2d(child.num_features // 8)
    model.fc = nn.Linear(64, 5)


def encoder(layers=2):
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def opened(report):
    """The block away from its start, so that it plays a part."""
    with torch.no_grad():
        (report.block.mixer.beta if report.block.scale is None else report.block.scale).fill_(0.5)
    return report


# At the start


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("mixer", [*MIXERS, "softmax", "linear"])
def test_the_host_computes_what_it_did_to_the_bit(mixer, where):
    model = resnet()
    expected = answer(model, IMAGES)
    report = polymix.insert(model, "layer3.1", mixer, where=where, input=IMAGES)
    identical(answer(model, IMAGES), expected)
    assert not torch.equal(answer(opened(report).model, IMAGES)[0], expected[0]), "the block is not in the run"
    assert report.undo() is model
    identical(answer(model, IMAGES), expected)


@pytest.mark.parametrize("where", ["before", "after"])
def test_it_stands_where_it_was_put(where):
    model = resnet()
    seen = {}
    model.layer3[0].register_forward_hook(lambda m, args, y: seen.update(into=y))
    model.layer3[1].register_forward_hook(lambda m, args, y: seen.update(host=y))
    report = opened(polymix.insert(model, "layer3.1", "poly_nl", where=where, input=IMAGES))
    model.layer4.register_forward_pre_hook(lambda m, args: seen.update(out=args[0]))
    answer(model, IMAGES)
    block = report.block.mixer
    own = deepcopy(model.layer3[1])
    own._forward_hooks.clear(), own._forward_pre_hooks.clear()
    if where == "before":
        torch.testing.assert_close(seen["out"], own(seen["into"] + block(seen["into"])))
    else:
        plain = own(seen["into"])
        torch.testing.assert_close(seen["out"], plain + block(plain))


def test_names_of_the_host_s_weights_stay_so_that_checkpoints_load():
    model = resnet()
    checkpoint = deepcopy(model.state_dict())
    report = polymix.insert(model, "layer3.1", "poly_nl:reduction=4")
    new = set(model.state_dict()) - set(checkpoint)
    assert set(checkpoint) < set(model.state_dict())
    assert new == {f"layer3.1.inserted_before.mixer.{key}" for key in report.block.mixer.state_dict()}
    missing, unexpected = model.load_state_dict(checkpoint, strict=False)
    assert set(missing) == new and not unexpected
    assert [*model.layer3._modules] == ["0", "1"], "the order in a Sequential"


@pytest.mark.parametrize("mixer", ["poly_nl", "padre"])
def test_it_learns(mixer):
    report = polymix.insert(resnet(), "layer3.1", mixer, input=IMAGES)
    first = gradients(report.model, IMAGES)
    gate = "mixer.beta" if mixer == "poly_nl" else "scale"
    assert first[f"layer3.1.inserted_before.{gate}"].abs() > 0, "what is 0 at the start never leaves it"
    with torch.no_grad():
        for name, p in report.model.named_parameters():
            p -= 1e-3 * first[name].sign()
    grads = gradients(report.model, IMAGES)
    assert all(grads[f"layer3.1.inserted_before.{name}"].any() for name, _ in report.block.named_parameters())


@pytest.mark.parametrize(
    ("mixer", "where", "backend"), [("poly_nl:reduction=4", "before", "eager"), ("padre", "after", None)], ids=str
)
def test_it_survives_copies_files_autocast_and_compilation(mixer, where, backend):
    report = opened(polymix.insert(resnet(), "layer3.1", mixer, where=where, input=IMAGES))
    survives(report.model, IMAGES, backend=backend)
    twin = deepcopy(report.model)
    block = twin.layer3[1].get_submodule(f"inserted_{where}")
    with torch.no_grad():
        (block.mixer.beta if block.scale is None else block.scale).fill_(5.0)
    assert not torch.equal(answer(twin, IMAGES)[0], answer(report.model, IMAGES)[0]), "a copy runs its own block"


def test_a_whole_model_through_pickle(tmp_path):
    report = opened(polymix.insert(resnet(), "layer3.1", "poly_nl"))
    torch.save(report.model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    identical(answer(loaded, IMAGES), answer(report.model, IMAGES))


def test_exported():
    report = opened(polymix.insert(resnet(), "layer3.1", "poly_nl"))
    program = torch.export.export(report.model, (IMAGES,))
    near([program.module()(IMAGES)], answer(report.model, IMAGES))


def test_images_of_another_size():
    for mixer in ("padre", "poly_nl", "qt"):
        model = opened(polymix.insert(resnet(), "layer3.1", mixer, input=IMAGES)).model
        assert answer(model, torch.randn(1, 3, 48, 64))[0].shape == (1, 5)


# Undo and copies


def test_undo_leaves_nothing_behind():
    model = resnet()
    before = snapshot(model)
    report = polymix.insert(model, "layer3.1", "poly_nl")
    assert model.layer3[1].inserted_before is report.block
    report.undo()
    unchanged(before, snapshot(model))
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    with pytest.raises(OptionError, match="undone already"):
        report.undo()


def test_a_copy_leaves_the_model_alone():
    model = resnet()
    before = snapshot(model)
    report = polymix.insert(model, "layer3.1", "poly_nl", copy=True)
    unchanged(before, snapshot(model))
    assert report.model is not model and hasattr(report.model.layer3[1], "inserted_before")


def test_two_blocks_and_one_taken_out_again():
    model = resnet()
    first = opened(polymix.insert(model, "layer3.1", "poly_nl"))
    expected = answer(model, IMAGES)
    second = opened(polymix.insert(model, "layer3.1", "qt", where="after", input=IMAGES))
    assert not torch.equal(answer(model, IMAGES)[0], expected[0])
    second.undo()
    identical(answer(model, IMAGES), expected)
    with pytest.raises(OptionError, match="has a mixer before it already"):
        polymix.insert(model, "layer3.1", "qt")
    first.undo()
    polymix.insert(model, "layer3.1", "qt")


# Tokens


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("mixer", ["padre", "pom", "poly_nl"])
def test_into_tokens(mixer, where):
    model = encoder()
    expected = answer(model, X)
    report = polymix.insert(model, "layers.1", mixer, where=where, input=X)
    identical(answer(model, X), expected)
    assert report.layers[0].tokens == 9
    survives(opened(report).model, X, backend=None)


def test_into_tokens_of_images_on_their_grid():
    model = vision.VisionTransformer(12, 4, 2, 2, 16, 24, num_classes=5).eval()
    images = torch.randn(2, 3, 12, 12)
    report = polymix.insert(model, "encoder.layers.encoder_layer_1", "padre", input=images)
    config = report.block.mixer.config
    assert (config.grid, config.num_prefix_tokens) == ((3, 3), 1)
    answer(opened(report).model, images)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_an_error():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1).eval()
    polymix.insert(model, "layers.0", "pom", input=X)
    with pytest.raises(ShapeError, match=r"a nested tensor.*enable_nested_tensor=False"):
        answer(model, {"src": X, "src_key_padding_mask": torch.arange(9).expand(2, -1) > 6})


def test_before_a_module_that_is_called_by_keyword_and_after_one_that_returns_several():
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.last = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

        def forward(self, x):
            return self.last(input=self.attn(x, x, x)[0])

    model = Host().eval()
    expected = answer(model, X)
    after = polymix.insert(model, "attn", "pom", where="after", input=X)
    before = polymix.insert(model, "last", "pom")
    identical(answer(model, X), expected)
    for report in (after, before):
        output = answer(model, X)
        assert not torch.equal(answer(opened(report).model, X)[0], output[0])


def test_after_a_module_that_returns_a_dict():
    class Named(nn.Module):
        def forward(self, x):
            return {"y": x}

    model = nn.Sequential(nn.Linear(16, 16), Named()).eval()
    polymix.insert(model, "1", "pom", where="after", input=X)
    with pytest.raises(ShapeError, match="a dict"):
        answer(model, X)


# What the report says, and what the paper prints


def test_the_report():
    model = resnet()
    count = sum(p.numel() for p in model.parameters())
    report = polymix.insert(model, "layer3.1", PolyNlConfig(reduction=4), input=IMAGES)
    added = sum(p.numel() for p in report.block.parameters())
    assert report.parameters == (count, count + added)
    (layer,) = report.layers
    assert (layer.name, layer.now, layer.tokens, layer.parameters) == ("before layer3.1", "poly_nl", 4, (0, added))
    assert layer.flops == (0, report.block.mixer.cost(4).flops) and layer.options["reduction"] == 4
    assert "before layer3.1" in str(report) and f"{count:,} → {count + added:,}" in str(report)
    assert report.to_dict()["layers"][0]["now"] == "poly_nl"


def test_parameters_and_products_are_those_that_the_paper_prints():
    """Poly-NL, Table 1a: one block before the last of Res4 (torchvision's layer3), on 14 x 14 x 1024; fvcore counts
    multiply-adds."""
    printed = {
        "poly_nl:reduction=4": (0.7, 0.14),
        "non_local:rd_ratio=0.5": (2.1, None),
        "non_local:rd_ratio=0.5:projection=false": (2.1, 0.47),
        "latent_gnn:reduction=8": (0.6, 0.13),
        "efficient:reduction=8:heads=1": (0.5, 0.11),
    }
    with torch.device("meta"):
        model = vision.resnet50()
    for mixer, (millions, gigas) in printed.items():
        report = polymix.insert(model, "layer3.5", mixer)
        before, after = report.parameters
        assert before == 25_557_032 and round((after - before) / 1e6, 1) == millions
        assert gigas is None or round(report.block.mixer.cost(196).flops / 2e9, 2) == gigas
        report.undo()
    assert polymix.insert(model, "layer4.2", "poly_nl").block.mixer.dim == 2048


def test_tesa_has_the_table_s_cost_at_a_reduction_of_four():
    """1.0 M and 0.94 G of Table 1a. At the reduction of 2 that Sec. 5.1.2 names, it is 2.1 M and 3.3 G."""
    cost = [
        polymix.create_mixer("tesa", 1024, grid=(14, 14), bias=False, reduction=r, device="meta").cost(196)
        for r in (4, 2)
    ]
    assert [round(each.parameters / 1e6, 1) for each in cost] == [1.0, 2.1]
    assert round(cost[0].multiply_adds / 1e9, 2) == 0.94
    assert polymix.create_mixer("tesa", 64, grid=(4, 4), preset="paper").inner == 32


def test_the_non_local_block_of_the_table_has_no_output_map():
    """0.47 G and 2.1 M are W_θ and W_φ to 512 channels and W_g to all 1,024. With W_z it is 0.45 G at as many parameters."""
    build = polymix.create_mixer
    table, usual = (build("non_local", 1024, rd_ratio=0.5, projection=own, bias=False, device="meta").cost(196)
                    for own in (False, True))  # fmt: skip
    assert table.parameters == usual.parameters == 2 * 1024**2
    n, c = 196, 1024
    assert table.multiply_adds == n * 2 * c**2 + n**2 * (c // 2 + c) == 470_048_768
    assert usual.multiply_adds == n * 2 * c**2 + 2 * n**2 * (c // 2) == 450_379_776


def test_a_squeeze_and_excitation_block_is_inserted_as_it_is(tmp_path):
    """Without `residual`: x times its gate, not x + s · SE(x); saved and loaded alike."""
    model = resnet()
    report = polymix.insert(model, "layer3.1", "se", residual=False, input=IMAGES)
    x = torch.randn(2, report.block.mixer.dim, 5, 7)
    layer = report.block.mixer.layer
    gate = torch.sigmoid(layer.fc2(torch.relu(layer.fc1(x.mean((2, 3), keepdim=True)))))
    torch.testing.assert_close(report.block(x), x * gate)
    assert not [name for name, _ in report.block.named_parameters() if name == "scale"]
    report = polymix.insert(vision.resnet18(num_classes=5), "layer3.1", "se", residual=False, input=IMAGES)
    host = {"library": "torchvision", "name": "resnet18", "kwargs": {"num_classes": 5}}
    polymix.save_pretrained(report.model, tmp_path / "saved", host=host)
    loaded = polymix.load_pretrained(tmp_path / "saved")
    identical(answer(loaded, IMAGES), answer(report.model, IMAGES))
    with pytest.raises(OptionError, match="residual"):
        polymix.insert(resnet(), "layer3.1", "se", residual="no")
    assert polymix.insert(resnet(), "layer3.1", "se").block.residual is True


@pytest.mark.parametrize("mixer", ["poly_nl:reduction=4", "non_local"])
def test_the_factor_starts_where_it_is_put(mixer):
    report = polymix.insert(resnet(), "layer3.1", mixer, input=IMAGES, scale=1.0)
    block, x = report.block, torch.randn(2, report.block.mixer.dim, 5, 7)
    plain = deepcopy(block.mixer)  # whose own β is 1
    torch.testing.assert_close(block(x), x + plain(x.flatten(2).mT).mT.reshape(x.shape))
    for scale in ("1", float("nan"), float("inf"), True):
        with pytest.raises(OptionError, match="scale"):
            polymix.insert(resnet(), "layer3.1", mixer, input=IMAGES, scale=scale)
    with pytest.raises(OptionError, match="residual"):
        polymix.insert(resnet(), "layer3.1", mixer, input=IMAGES, scale=1.0, residual=False)


def test_mask_rcnn_of_the_paper():
    model = vision.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).eval()
    names = list(model.state_dict())
    images = torch.randn(1, 3, 64, 64)
    expected = answer(model.backbone, images)
    report = polymix.insert(model, "backbone.body.layer3.5", "poly_nl:reduction=4")
    identical(answer(model.backbone, images), expected)
    assert [name for name in model.state_dict() if "inserted" not in name] == names
    assert not torch.equal(answer(opened(report).model.backbone, images)[2], expected[2]), "level 3 passes through it"
    torch.testing.assert_close(report.undo().backbone(images)["3"], expected[3])


# Containers, and errors


def test_a_sequential_hands_down_to_its_ends():
    model = resnet()
    assert polymix.insert(model, "layer3", "poly_nl").layers[0].name == "before layer3.0"
    assert polymix.insert(model, "layer3", "qt", where="after", input=IMAGES).layers[0].name == "after layer3.1"


@pytest.mark.parametrize(
    ("at", "options", "kind", "match"),
    [
        ("layer3.7", {}, OptionError, "layer3.1.*is no module's name"),
        ("layer3.1", {"where": "around"}, OptionError, "where"),
        ("layer3.1", {"where": "after"}, OptionError, "after layer3.1 .*does not state the channels"),
        ("relu", {}, OptionError, "does not state the channels"),
        ("layer3.1", {"mixer": "padre"}, OptionError, "does not state the grid"),
        ("layer3.1", {"mixer": "poly_nl:reduction=7"}, OptionError, "before layer3.1 .*reduction"),
        ("layer3.1", {"mixer": PadreConfig(grid=(3, 3)), "input": IMAGES}, OptionError, "before layer3.1 .*grid"),
        ("layer3.1", {"mixer": "poly"}, UnknownNameError, "poly_nl"),
        ("avgpool", {"where": "after", "input": (IMAGES, IMAGES)}, InputError, "positional"),
        ("fc", {"input": IMAGES}, ShapeError, r"before fc .*\(2, 64\)"),
    ],
)
def test_errors_come_before_anything_is_changed(at, options, kind, match):
    model = resnet()
    before = snapshot(model)
    with pytest.raises(kind, match=match):
        polymix.insert(model, at, **{"mixer": "poly_nl", **options})
    unchanged(before, snapshot(model))
    assert not any(part._forward_hooks for part in model.modules())


def test_a_container_that_runs_its_children_itself_is_named_with_them():
    class Chain(nn.ModuleDict):
        def forward(self, x):
            for part in self.values():
                x = part(x)
            return x

    model = nn.Sequential(Chain({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)}))
    with pytest.raises(OptionError, match=r"expected .*0.a, 0.b.*got .*'0', a Chain"):
        polymix.insert(model, "0", "poly_nl")
    polymix.insert(model, "0.b", "poly_nl")


def test_a_module_that_the_run_does_not_call():
    model = nn.ModuleDict({"used": nn.Linear(16, 16), "idle": nn.Linear(16, 16)})
    model.forward = lambda x: model["used"](x)
    with pytest.raises(OptionError, match="module is not called"):
        polymix.insert(model, "idle", "poly_nl", input=X)


def test_channels_last_is_not_taken_for_a_feature_map():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x):
            return self.norm(x)

    model = nn.Sequential(Last())
    with pytest.raises(ShapeError, match=r"\(2, 3, 3, 16\) for 16 channels"):
        polymix.insert(model, "0", "poly_nl", input=torch.randn(2, 3, 3, 16))
