"""`convert(match="parameters")`: mixers as large as the attention that they replace."""

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.matching import matched
from polymix.errors import OptionError
from tests.convert.checks import accounts, answer, near, trains

cure_torchvision()
X = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))


def encoder(dim=32):
    layer = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_deit_with_pom_grows_by_a_thousandth_and_not_by_a_sixth():
    timm = pytest.importorskip("timm", reason="untested: models of timm, which is not installed")
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
        plain = polymix.convert(model, "pom", copy=True)
        report = polymix.convert(model, "pom", copy=True, match="parameters")
    assert plain.parameters == (5_717_416, 6_613_672)
    assert report.parameters == (5_717_416, 5_722_792)
    assert {layer.options["expand"] for layer in report.layers} == {256 / 192}
    assert {layer.parameters for layer in report.layers} == {(148_224, 148_672)}
    assert "5,717,416 → 5,722,792" in str(report)


def test_a_vit_of_transformers():
    transformers = pytest.importorskip("transformers", reason="untested: models of transformers")
    config = transformers.ViTConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96, image_size=16, patch_size=4
    )
    report = polymix.convert(transformers.ViTModel(config), "pom", match="parameters")
    before, after = report.parameters
    assert abs(after / before - 1) < 0.01 and count(report.model) == after


@pytest.mark.parametrize("mixer", [
    "pom", "pom:groups=4", "pom:selection_heads=6", "pom:rotary=1d", "pom:degree=4:bias=false", "qt", "softmax",
], ids=str)  # fmt: skip
def test_a_matched_model_trains_and_is_saved(mixer, tmp_path):
    report = polymix.convert(encoder(), mixer, match="parameters", input=X)
    for layer in report.layers:
        before, after = layer.parameters
        assert abs(after / before - 1) <= 0.05
    trains(report, X)
    accounts(report)
    polymix.save_pretrained(report.model, tmp_path, host={"call": "tests.convert.test_matching:encoder"})
    near(answer(polymix.load_pretrained(tmp_path, trust=True), X), answer(report.model, X), 0)


@pytest.mark.parametrize(("name", "options", "dim"), [
    ("pom", {}, 192), ("pom", {"groups": 3}, 192), ("pom", {"decay": 5}, 64), ("pom", {"rotary": "2d"}, 96),
    ("mamba", {"bidirectional": True}, 192), ("pom", {}, 7),
])  # fmt: skip
def test_no_other_width_is_nearer(name, options, dim):
    config = matched(
        type(polymix.create_mixer(name, 8 * 15, **options).config)(**options), dim, 4 * dim * dim + 4 * dim
    )
    target, width = 4 * dim * dim + 4 * dim, round(config.expand * dim)
    distance = abs(count(config.build(dim)) / target - 1)
    assert distance <= 0.05
    for other in (width - config.width_unit, width + config.width_unit):
        theirs = abs(count(config.with_width(other, dim).build(dim)) / target - 1)
        assert distance <= max(theirs, 0.01), "as near as any, or within 1 % at a multiple of 8"


def test_refusals():
    for mixer, words in {
        "poly_nl": r"match`: expected a mixer whose width is an option: .*pom \(expand\)",
        "padre:kernel_size=3": r"which has [\d,]+ where the attention has [\d,]+",
        "pom:expand=3": "'parameters' with expand=3",
    }.items():
        model = encoder()
        with pytest.raises(OptionError, match=words):
            polymix.convert(model, mixer, match="parameters", input=X)
        assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention), "nothing was changed"
    with pytest.raises(OptionError, match="`match`"):
        polymix.convert(encoder(), "pom", match="flops")


def test_parts_that_the_adapter_keeps_are_not_counted_twice():
    transformers = pytest.importorskip("transformers", reason="untested: models of transformers")
    sizes = {"vocab_size": 9, "num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 4}
    report = polymix.convert(transformers.BertModel(transformers.BertConfig(**sizes)), "pom", match="parameters")
    before, after = report.layers[0].parameters  # with the norm that the adapter copies
    assert abs(after / before - 1) < 0.01
