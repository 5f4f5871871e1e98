"""Every mixer in converted models: it runs, comes back from a file, or is refused with the reason."""

import json
from functools import partial

import pytest
import torch
from torch import nn

import polymix
from polymix.convert.drops import naming_drops
from polymix.convert.model_recipes import decode, encode
from polymix.errors import CapabilityError, OptionError, PolymixError
from polymix.mixers import config_class
from tests.convert.checks import answer, refuses, stirred
from tests.convert.saving_cases import images, own, round_trip
from tests.convert.timm_hosts import IMAGES, timm, vit

VARIANTS = [*polymix.list_mixers(), "pom:rotary=1d", "pom:rotary=2d", "pom:decay=true", "softmax:rotary=1e4",
            "padre:causal=true", "mamba:bidirectional=true", "hyena:bidirectional=true", "tesa:heads=2"]  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), torch.randn(1, 12, 16)


def pyramid():
    options = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "num_classes": 3}
    return timm.create_model("swin_tiny_patch4_window7_224", **options).eval(), IMAGES[:1]


HOSTS = {
    "encoder": encoder, "class token": lambda: (vit(depth=1).eval(), IMAGES[:1]), "shifted windows": pyramid,
    "no class token": lambda: (vit(depth=1, class_token=False, global_pool="avg").eval(), IMAGES[:1]),
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_every_mixer_is_refused_or_runs(host):
    ran = []
    for plan in VARIANTS:
        model, x = HOSTS[host]()
        try:
            naming_drops(partial(polymix.convert, model, plan))
        except PolymixError:
            continue
        try:
            with torch.no_grad():
                ran.append((plan, model(x).isfinite().all()))
        except PolymixError as error:
            pytest.fail(f"convert takes {plan}, and no call runs: {error}")
    assert len(ran) > 10 and all(finite for _, finite in ran)


@pytest.mark.parametrize(("prefix", "options"), [
    (1, {}), (4, {"class_token": False, "reg_tokens": 4, "global_pool": "avg"}), (5, {"reg_tokens": 4}),
])  # fmt: skip
def test_rows_and_columns_begin_after_class_token_and_registers(prefix, options):
    model = polymix.convert(vit(**options), "pom:rotary=2d").model
    mixers = [module for module in model.modules() if isinstance(module, polymix.PoM)]
    assert {mixer.config.num_prefix_tokens for mixer in mixers} == {prefix}
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_rows_and_columns_need_a_grid():
    refuses(encoder()[0], "pom:rotary=2d", OptionError, "Pass grid=")
    model = polymix.convert(encoder()[0], "pom:rotary=2d", grid=(3, 4)).model
    assert model(torch.randn(1, 12, 16)).shape == (1, 12, 16)


@pytest.mark.parametrize("mixer", ["local", "mamba", "hyena", "padre:causal=true"])
def test_a_causal_mixer_needs_a_causal_host(mixer):
    model, x = encoder()
    refuses(model, mixer, CapabilityError, "is causal, where calls without a causal mask see all tokens")
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    for options in ({"causal": True}, {"input": (x, mask)}):
        report = polymix.convert(model, mixer, copy=True, **options)
        assert report.model(x, mask).isfinite().all()


@pytest.mark.parametrize("name", polymix.list_mixers())
def test_every_config_survives_json(name):
    config = config_class(name)()
    assert decode(json.loads(json.dumps(encode(config)))) == config


@pytest.mark.slow
@pytest.mark.parametrize("name", polymix.list_mixers())
def test_every_mixer_comes_back_from_a_file(tmp_path, name):
    """With whatever it keeps beside its parameters, such as random features."""
    model = own(class_token=False)
    try:
        polymix.convert(model, name)
    except PolymixError as error:
        pytest.skip(f"untested: {name} in this host: {error}")
    model = stirred(model)
    loaded = round_trip(model, tmp_path)
    assert torch.equal(answer(loaded, images())[0], answer(model, images())[0])
