"""preset="paper": the options of the printed equations, by one word, wherever a mixer is named."""

import inspect

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import OptionError
from polymix.mixers import config_class
from polymix.mixers.spec import mixer_config, parse_mixer
from tests.helpers import close, tokens

WITH = [name for name in polymix.list_mixers() if config_class(name).paper]
WITHOUT = [name for name in polymix.list_mixers() if not config_class(name).paper]
GRID = {"poly_sa": {"grid": (3, 4)}, "tesa": {"grid": (3, 4)}}


def test_which_mixers_have_a_paper_form():
    assert {"padre", "pom", "qt", "poly_nl", "poly_sa"} <= set(WITH)
    for name in WITH:
        known = config_class(name)()
        assert any(getattr(known, option) != value for option, value in config_class(name).paper.items()), name


@pytest.mark.parametrize("name", WITH)
def test_it_means_the_same_in_every_place(name):
    kind = config_class(name)
    config = kind(preset="paper")
    assert all(getattr(config, option) == value for option, value in kind.paper.items())
    assert parse_mixer(f"{name}:preset=paper")[1] == config
    assert mixer_config(config.to_dict()) == config
    assert kind().changed(preset="paper", **kind.paper) == config
    assert inspect.signature(kind).parameters["preset"].default is None
    built = polymix.create_mixer(name, 12, preset="paper", **GRID.get(name, {}))
    assert built.config == config.changed(**GRID.get(name, {}))
    assert not any(part.endswith("bias") for part, _ in built.named_parameters() if "filter" not in part)


@pytest.mark.parametrize("name", WITH)
def test_options_beside_it_win(name):
    config = config_class(name)(preset="paper", bias=True)
    assert config.bias
    assert config.changed(dropout=0.1).bias
    assert mixer_config(config.to_dict()).bias
    assert parse_mixer(f"{name}:preset=paper:bias=true")[1].bias


@pytest.mark.parametrize("name", WITHOUT)
def test_a_mixer_without_one_says_so(name):
    with pytest.raises(OptionError, match="preset"):
        config_class(name)(preset="paper")


def test_in_a_conversion_and_in_a_language_model():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 1)
    polymix.convert(model, "pom:preset=paper")
    (mixer,) = (part for part in model.modules() if isinstance(part, polymix.TokenMixer))
    assert (mixer.config.bias, mixer.config.reduction) == (False, "sum")
    from polymix.models.language import PolymixGPTConfig

    sizes = {"vocab_size": 11, "hidden_size": 12, "num_layers": 1, "num_heads": 2}
    (config,) = PolymixGPTConfig(**sizes, mixers=["pom:preset=paper"]).layer_configs()
    assert (config.bias, config.reduction) == (False, "sum")
    (config,) = PolymixGPTConfig(**sizes, mixers=["pom:preset=paper:bias=true"]).layer_configs()
    assert config.bias


def test_pom_of_the_paper_by_its_equation():
    """Eq. 1 and 2 as printed: W_o [σ(W_s X) ⊙ Σ_j Σ_p α_p ⊙ h(W_h x_j)^p]."""
    mixer, x = polymix.create_mixer("pom", 8, preset="paper", degree=3, dtype=torch.float64), tokens(2, 9, 8)
    m = mixer.matrices(9)
    h = torch.nn.functional.gelu(x @ m["W_h"])
    total = sum((m["alpha"][:, p] * h ** (p + 1)).sum(1, keepdim=True) for p in range(3))
    close(mixer(x), (torch.sigmoid(x @ m["W_s"]) * total) @ m["W_o"], 1e-12)
