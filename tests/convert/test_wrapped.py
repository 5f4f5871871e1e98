"""Models inside torch.compile, nn.DataParallel and averaging, in any order: loaded, saved, exported and traced."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.saving.unwrapping import bare, unwrapped
from polymix.errors import ShapeError

cure_torchvision()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


ORDERS = ["".join(parts) for count in range(4) for parts in itertools.product(("module.", "_orig_mod."), repeat=count)]


@pytest.mark.parametrize("prefix", ORDERS)
def test_prefixes_in_any_order(tmp_path, prefix):
    source, model = encoder(), encoder()
    torch.save({prefix + key: value for key, value in source.state_dict().items()}, tmp_path / "weights.pth")
    polymix.load_weights(model, tmp_path / "weights.pth")
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), model.parameters(), strict=True))


def test_wrappers_of_blocks_and_averages():
    weights = {
        "module.layers.0._orig_mod.norm.weight": torch.ones(1),
        "module.head._fsdp_wrapped_module.bias": torch.ones(1),
    }
    assert set(bare({**weights, "n_averaged": torch.ones(())})) == {"layers.0.norm.weight", "head.bias"}
    assert set(bare({"module.a": torch.ones(1), "b": torch.ones(1)})) == {"module.a", "b"}, "a part with that name"


WRAPPERS = {"parallel": nn.DataParallel, "compiled": torch.compile, "averaged": AveragedModel}


@pytest.mark.parametrize(
    ("outer", "inner"), [pair for pair in itertools.product(WRAPPERS, repeat=2) if set(pair) != {"compiled"}]
)
def test_the_model_inside(outer, inner):
    model = nn.Linear(2, 2)
    wrapped = WRAPPERS[outer](WRAPPERS[inner](model))
    assert type(unwrapped(wrapped)) is nn.Linear
    assert "averaged" in (outer, inner) or unwrapped(wrapped) is model


def test_a_wrapped_model_is_saved_and_loaded_as_the_one_inside(tmp_path):
    timm = pytest.importorskip("timm", reason="untested: models of timm (the extra vision)")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=3)
    polymix.convert(model.eval(), "pom")
    polymix.save_pretrained(nn.DataParallel(torch.compile(model)), tmp_path)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(polymix.load_pretrained(tmp_path)(images), model(images))
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "weights.pth")
    polymix.load_weights(torch.compile(model), tmp_path / "weights.pth")


@pytest.mark.parametrize("mixer", ["pom", "padre"])
def test_torch_fx_traces_around_mixers(mixer):
    features = pytest.importorskip(
        "torchvision.models.feature_extraction", reason="untested: torch.fx, for torchvision"
    )
    timm = pytest.importorskip("timm", reason="untested: models of timm (the extra vision)")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=3)
    polymix.convert(model.eval(), mixer)
    leaves = {"leaf_modules": [polymix.Adapter]}
    traced = features.create_feature_extractor(model, ["norm"], tracer_kwargs=leaves)
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(traced(images)["norm"], model.forward_features(images))


def test_torch_fx_is_told_of_inserted_mixers():
    class Stem(nn.Module):  # torch.fx takes modules of torch.nn as they are, with their hooks
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x):
            return self.conv(x)

    model = nn.Sequential(Stem(), nn.ReLU())
    polymix.insert(model, "0", "pom", where="after", input=torch.randn(1, 3, 4, 4))
    with pytest.raises(ShapeError, match=r"leaf_modules=\[polymix\.Adapter\]"):
        torch.fx.symbolic_trace(model)


def test_half_a_folder_is_exported_in_float32(tmp_path):
    pytest.importorskip("onnxruntime", reason="untested: ONNX files (the extra onnx)")
    timm = pytest.importorskip("timm", reason="untested: models of timm (the extra vision)")
    from polymix.workflows.export import Settings, model_of

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=3)
    polymix.save_pretrained(model.eval().half(), tmp_path / "half")
    (graph,) = model_of(str(tmp_path / "half"), Settings(models=(str(tmp_path / "half"),)))
    assert {p.dtype for p in graph.model.parameters()} == {torch.float32}
