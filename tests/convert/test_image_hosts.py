"""Hybrids of convolutions and attention, image encoders inside larger models: EdgeNeXt, EfficientFormer, FastViT, SAM,
CLIP and LLaVA, tiny but real."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import OptionError, PolymixError
from tests.convert.checks import accounts, answer, converts, identical, near, refuses, same_as_host, stirred, undoes
from tests.helpers import slow_but

cure_torchvision()
timm = pytest.importorskip("timm", reason="untested: models of timm (the extra vision)")
transformers = pytest.importorskip("transformers", reason="untested: models of transformers (the extra text)")


class Host(NamedTuple):
    """build: the model. inputs: what it is called with. layers: the names of its attention. twin: the mixer that computes
    the same, if there is one. discards: what every other mixer drops. recipe: for `save_pretrained`, where timm has none."""

    build: Callable[[], Any]
    inputs: Callable[[], Any]
    layers: list[str]
    twin: str | None = "softmax"
    discards: tuple[str, ...] = ()
    recipe: str | None = None

    @property
    def drop(self):
        """What a conversion has to name."""
        return ("position_bias",) if "position_bias" in self.discards else ()


def images(*size, channels=3):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))


def edgenext():
    return timm.create_model("edgenext_xx_small", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2),
                             num_classes=3, global_block_counts=(0, 1, 1, 0))  # fmt: skip


def efficientformer():
    return timm.create_model("efficientformer_l1", depths=(1, 1, 1, 2), embed_dims=(8, 8, 16, 24), num_classes=3)


def fastvit():
    return timm.create_model("fastvit_sa12", layers=(1, 1, 1, 2), embed_dims=(8, 16, 32, 64), num_classes=3)


def timm_swiftformer():
    return timm.create_model("swiftformer_xs", layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 24), num_classes=3)


def swiftformer():
    config = transformers.SwiftFormerConfig(image_size=64, embed_dims=[8, 8, 16, 24], depths=[1, 1, 1, 1],
                                            drop_path_rate=0.0, drop_mlp_rate=0.0, drop_conv_encoder_rate=0.0)  # fmt: skip
    return transformers.SwiftFormerModel(config)


def mlp_mixer(kind="MixerBlock"):
    from timm.models import mlp_mixer as of

    norm = {"norm_layer": of.Affine, "mlp_ratio": 4} if kind == "ResBlock" else {}
    return of.MlpMixer(img_size=64, patch_size=16, embed_dim=16, num_blocks=2, num_classes=3,
                       block_layer=getattr(of, kind), **norm)  # fmt: skip


def resmlp():
    return mlp_mixer("ResBlock")


def convnext(**options):
    return timm.create_model("convnext_tiny", depths=(1, 1, 1, 2), dims=(8, 8, 16, 16), num_classes=3, **options)


def timm_sam():
    return timm.create_model("samvit_base_patch16", img_size=64, patch_size=8, embed_dim=16, depth=2, num_heads=2,
                             window_size=3, global_attn_indexes=(1,), neck_chans=8, num_classes=3)  # fmt: skip


def vision():
    return transformers.SamVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8, mlp_dim=24, window_size=3,
        global_attn_indexes=[1], output_channels=8,
    )  # fmt: skip


def sam():
    return transformers.SamVisionModel(vision())


def clip_config():
    return transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=8,
        projection_dim=8,
    )  # fmt: skip


def clip():
    return transformers.CLIPVisionModel(clip_config())


def llava():
    text = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=clip_config(), text_config=text, image_token_index=39,
                                      vision_feature_layer=-1, vision_feature_select_strategy="full")  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def photo_and_text():
    ids = torch.randint(39, (2, 14), generator=torch.Generator().manual_seed(0))
    ids[:, 2:12] = 39  # the class token and nine patches
    return {"input_ids": ids, "pixel_values": images(24, 24), "use_cache": False}


LLAVA = [
    f"model.{part}.{i}.self_attn" for part in ("vision_tower.encoder.layers", "language_model.layers") for i in (0, 1)
]
EDGE = ["stages.1.blocks.0.xca", "stages.2.blocks.0.xca"]
NEXT = [*(f"stages.{i}.blocks.0" for i in range(4)), "stages.3.blocks.1"]
REL = ("rel_pos_h", "rel_pos_w", "position_bias")
HOSTS = {
    "EdgeNeXt": Host(edgenext, lambda: images(64, 96), EDGE, "xca"),
    "EfficientFormer": Host(efficientformer, lambda: images(224, 224), ["stages.3.blocks.2.token_mixer"], None,
                            ("attention_biases", "position_bias")),
    "FastViT": Host(fastvit, lambda: images(64, 128), [f"stages.3.blocks.{i}.token_mixer" for i in (0, 1)]),
    "SwiftFormer of timm": Host(timm_swiftformer, lambda: images(64, 96),
                                [f"stages.{i}.blocks.0.attn" for i in range(4)], "additive"),
    "SwiftFormer": Host(swiftformer, lambda: {"pixel_values": images(64, 96)},
                        [f"encoder.network.{2 * i}.blocks.0.attn" for i in range(4)], "additive", ("w_g",)),
    "MLP-Mixer": Host(mlp_mixer, lambda: images(64, 64), ["blocks.0", "blocks.1"], None, ("mlp_tokens.fc1.weight",),
                      "tests.convert.test_image_hosts:mlp_mixer"),
    "ResMLP": Host(resmlp, lambda: images(64, 64), ["blocks.0", "blocks.1"], None, ("linear_tokens.weight",),
                   "tests.convert.test_image_hosts:resmlp"),
    "ConvNeXt": Host(convnext, lambda: images(64, 96), NEXT,
                     None, ("conv_dw.weight",)),
    "ConvNeXt, channels first": Host(lambda: convnext(conv_mlp=True), lambda: images(64, 96),
                                     NEXT, None),
    "SAM of timm": Host(timm_sam, lambda: images(64, 64), [f"blocks.{i}.attn" for i in (0, 1)], "softmax", REL),
    "SAM": Host(sam, lambda: {"pixel_values": images(64, 64)},
                [f"vision_encoder.layers.{i}.attn" for i in (0, 1)], "softmax", REL),
    "CLIP": Host(clip, lambda: {"pixel_values": images(24, 24)}, [f"encoder.layers.{i}.self_attn" for i in (0, 1)]),
    "LLaVA": Host(llava, photo_and_text, LLAVA),
}  # fmt: skip


@pytest.fixture(params=HOSTS)
def host(request):
    return HOSTS[request.param]


def replaced(report):
    return [layer.name for layer in report.layers if layer.now]


def without_positions(model):
    """Relative positions of zero: what SAM starts from, and all that softmax mixers can equal."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "rel_pos" in name:
                p.zero_()
    return model


@pytest.mark.parametrize("mixer", slow_but(["padre:kernel_size=3"], ["padre:kernel_size=3", "qt:form=full", "poly_nl"]))
def test_named_layers_are_replaced_and_learn(host, mixer):
    inputs = host.inputs()
    model = host.build()
    report = converts(model, mixer, inputs, input=inputs, drop=host.drop)
    ordered = mixer != "poly_nl"  # which has no causal order
    assert replaced(report) == [layer for layer in host.layers if ordered or "language_model" not in layer]
    assert all(layer.error is not None for layer in report.layers if layer.now)
    assert all(set(host.discards) <= set(layer.dropped) for layer in report.layers if layer.now)


@pytest.mark.parametrize("host", [name for name, it in HOSTS.items() if it.twin is not None], indirect=True)
def test_the_twin_is_the_host(host):
    inputs, model = host.inputs(), without_positions(stirred(host.build()).eval())
    expected = answer(model, inputs)
    report = polymix.convert(model, host.twin, copy=True, input=inputs, drop=host.drop)
    near(answer(report.model, inputs), expected)
    assert replaced(report) == host.layers and all(layer.error < 1e-5 for layer in report.layers if layer.now)
    for layer in report.layers:
        assert not layer.now or (not layer.fresh and set(layer.dropped) <= set(host.discards))
    accounts(report)
    undoes(model, host.twin, inputs, input=inputs, drop=host.drop)


def test_saved_and_loaded(host, tmp_path):
    inputs = host.inputs()
    model = polymix.convert(host.build(), "padre:kernel_size=3", input=inputs, drop=host.drop).model
    expected = answer(model, inputs)
    polymix.save_pretrained(model, tmp_path, host=host.recipe)
    identical(answer(polymix.load_pretrained(tmp_path, trust=host.recipe is not None), inputs), expected)


@pytest.mark.parametrize("name", ["EdgeNeXt", "FastViT", "SAM of timm"])
def test_every_image_has_its_own_grid(name):
    """Maps that are wider than those at conversion: the mixer gets the grid of the call."""
    host, seen = HOSTS[name], []
    model = polymix.convert(host.build(), "padre:kernel_size=3", input=host.inputs(), drop=host.drop).model.eval()
    mixer = model.get_submodule(host.layers[-1]).mixer
    mixer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.get("grid")), with_kwargs=True)
    model(images(64, 192) if name != "SAM of timm" else images(64, 64))
    assert seen == [{"EdgeNeXt": (4, 12), "FastViT": (2, 6), "SAM of timm": None}[name]]


@pytest.mark.parametrize("name", ["SAM of timm", "SAM"])
def test_sam_s_windows_kept_and_merged(name):
    host = HOSTS[name]
    inputs = host.inputs()
    report = polymix.convert(host.build(), "poly_sa", copy=True, drop=host.drop)
    grids = [part.mixer.config.grid for part in report.adapters.values()]
    assert grids == [(3, 3), (8, 8)], "the first layer has windows of 3 × 3, the second sees the map"
    merged = converts(host.build(), "poly_sa", inputs, windows="merge", input=inputs, drop=host.drop)
    assert [part.mixer.config.grid for part in merged.adapters.values()] == [(8, 8), (8, 8)]
    adapter = merged.adapters[host.layers[0]]
    map_ = torch.randn(2, 8, 8, 16)
    padded = torch.nn.functional.pad(map_, (0, 0, 0, 1, 0, 1))
    windows = padded.unflatten(2, (3, 3)).unflatten(1, (3, 3)).transpose(2, 3).reshape(-1, 3, 3, 16)
    adapter.current_grid = (8, 8)
    y = adapter(windows)
    y = y[0] if isinstance(y, tuple) else y
    whole = y.unflatten(0, (2, 3, 3)).transpose(2, 3).reshape(2, 9, 9, 16)[:, :8, :8]
    near([whole], [adapter.mixer(map_.flatten(1, 2), grid=(8, 8)).unflatten(1, (8, 8))])


class Exact(torch.nn.Module):
    """In the mixer's place: the token mixer that the block had."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, context=None, grid=None, **options):
        if isinstance(self.part, torch.nn.Conv2d):
            return self.part(x.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
        return self.part(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("name", ["MLP-Mixer", "ResMLP", "ConvNeXt", "ConvNeXt, channels first"])
def test_the_rest_of_the_block_is_as_it_was(name):
    """With the token mixer itself in the mixer's place, the model is the same."""
    host = HOSTS[name]
    model, inputs = stirred(host.build()).eval(), host.inputs()
    expected = answer(model, inputs)
    report = polymix.convert(model, "padre:kernel_size=3", copy=True, input=inputs, drop=host.drop)
    for layer, block in report.adapters.items():
        own = Exact(report.attentions[layer].get_submodule(block.replaced_part))
        own.capabilities, own.config = block.mixer.capabilities, block.mixer.config
        block.mixer = own
        if isinstance(own.part, torch.nn.Conv2d):
            block.grid_options = lambda x, grid=None: {"grid": grid}
    near(answer(report.model, inputs), expected)
    undoes(model, "pom", inputs, input=inputs)


def test_flops_of_token_mixers():
    layer = polymix.convert(mlp_mixer(), "poly_nl").layers[0]
    assert layer.flops[0] == 2 * 2 * 16 * 16 * 8, "two products of 16 channels, 16 tokens and 8 hidden values"
    assert polymix.convert(resmlp(), "poly_nl").layers[0].flops[0] == 2 * 16 * 16 * 16
    layer = polymix.convert(convnext(), "poly_nl").layers[0]
    assert layer.flops[0] == 2 * 56 * 56 * 49 * 8


def test_a_convnext_block_that_changes_its_map_is_refused():
    from timm.models.convnext import ConvNeXtBlock

    refuses(ConvNeXtBlock(8, 16), "pom", OptionError, "changes the size or the channels")


@pytest.mark.parametrize("mixer", ["pom", "qt"])
def test_a_plan_without_names_converts_llava_in_both_parts(mixer):
    """Images in any order, text in causal order; it learns in both, and writes as it reads, with a cache or without."""
    model, inputs = llava().eval(), photo_and_text()
    report = polymix.convert(model, mixer, input=inputs)
    assert replaced(report) == LLAVA
    assert [bool(part.causal) for part in report.adapters.values()] == [False, False, True, True]
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad is not None for part in report.adapters.values() for p in part.mixer.parameters())
    written = [model.generate(**{**inputs, "use_cache": cached}, max_new_tokens=5, do_sample=False)
               for cached in (True, False)]  # fmt: skip
    assert written[0].shape == (2, 19) and torch.equal(*written)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(3)}
    after = [model(**given).logits[:, 12:] for given in (inputs, other)]
    assert not torch.allclose(*after), "the text does not see the image"


def test_a_mixer_without_causal_order_is_for_llava_s_images_alone():
    model = llava()
    report = polymix.convert(model, "poly_nl", copy=True)
    assert replaced(report) == LLAVA[:2]
    assert "causal" in str(report) and "LlamaAttention" in str(report), "why the text's layers are kept"
    with pytest.raises(PolymixError, match="causal"):
        polymix.convert(model, {"*language_model*": "poly_nl"}, copy=True)
    pattern = polymix.convert(model, "1:1", mixer="pom", copy=True)
    assert replaced(pattern) == [LLAVA[0], LLAVA[2]]
    asked = converts(model, {"*language_model*": "qt"}, photo_and_text())
    assert replaced(asked) == LLAVA[2:]
    alone = transformers.LlamaModel(model.config.text_config)
    assert len(replaced(polymix.convert(alone, "qt"))) == 2, "a language model by itself converts as before"


def test_clip_s_text_encoder_reads_in_order():
    config = transformers.CLIPTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=12, eos_token_id=2, projection_dim=8,
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(3, 40, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    same_as_host(transformers.CLIPTextModel(config), inputs, input=inputs)
    same_as_host(transformers.CLIPTextModel(config), {"input_ids": inputs["input_ids"]})
    report = polymix.convert(transformers.CLIPTextModel(config), "qt")
    assert all(part.causal for part in report.adapters.values())
