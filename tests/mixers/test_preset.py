"""preset="paper", the experiments, and "equations", as printed: by one word, wherever a mixer is named."""

import inspect

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import OptionError
from polymix.mixers import config_class
from polymix.mixers.spec import mixer_config, parse_mixer
from tests.helpers import close, tokens

WITH = [name for name in polymix.list_mixers() if config_class(name).forms]
WITHOUT = [name for name in polymix.list_mixers() if not config_class(name).forms]
GRID = {"poly_sa": {"grid": (3, 4)}, "tesa": {"grid": (3, 4)}}
FORMS = [(name, form) for name in WITH for form in ("paper", "equations")]


def test_which_mixers_have_forms_of_a_paper():
    assert {"padre", "pom", "qt", "poly_nl", "poly_sa"} <= set(WITH)
    for name in WITH:
        known, forms = config_class(name)(), config_class(name).forms
        assert set(forms) == {"paper", "equations"}, name
        assert any(getattr(known, option) != value for option, value in forms["equations"].items()), name


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_it_means_the_same_in_every_place(name, form):
    kind = config_class(name)
    config = kind(preset=form)
    assert all(getattr(config, option) == value for option, value in kind.forms[form].items())
    assert parse_mixer(f"{name}:preset={form}")[1] == config
    assert mixer_config(config.to_dict()) == config
    assert kind().changed(preset=form) == config
    assert inspect.signature(kind).parameters["preset"].default is None
    built = polymix.create_mixer(name, 12, preset=form, **GRID.get(name, {}))
    assert built.config == config.changed(**GRID.get(name, {}))


@pytest.mark.parametrize("name", WITH)
def test_equations_have_no_biases(name):
    built = polymix.create_mixer(name, 12, preset="equations", **GRID.get(name, {}))
    assert not any(part.endswith("bias") for part, _ in built.named_parameters() if "filter" not in part)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_changing_the_form_leaves_nothing_of_the_old_one(name, form):
    """`changed(preset=...)` once kept the name alone; and "equations" would have stayed behind in "paper"."""
    kind = config_class(name)
    for other in (None, "paper", "equations"):
        assert kind(preset=other).changed(preset=form) == kind(preset=form)
        assert kind(preset=form).changed(preset=other) == kind(preset=other)


@pytest.mark.parametrize("name", WITH)
def test_options_beside_it_win(name):
    config = config_class(name)(preset="equations", bias=True)
    assert config.bias
    assert config.changed(dropout=0.1).bias
    assert config_class(name)().changed(preset="equations", bias=True) == config
    assert mixer_config(config.to_dict()).bias
    assert parse_mixer(f"{name}:preset=equations:bias=true")[1].bias


def test_the_experiments_of_the_papers():
    """PADRe, Sec. 4.1: biases by the last convolutions; Poly-NL, Sec. 5.1.2: reductions of 4, 2 and 8."""
    biased = [
        part for part, _ in polymix.create_mixer("padre", 12, preset="paper").named_parameters() if "bias" in part
    ]
    assert biased and not [
        part for part, _ in polymix.create_mixer("padre", 12, preset="equations").named_parameters() if "bias" in part
    ]
    assert polymix.create_mixer("poly_nl", 64, preset="paper").proj.weight.shape == (16, 16)
    block = polymix.create_mixer("non_local", 1024, preset="paper", device="meta")
    assert 2.0e6 < sum(p.numel() for p in block.parameters()) < 2.2e6, "2.1 M in Table 1a"


def test_the_non_local_block_by_its_equation():
    """Poly-NL, Eq. 6 and 7: X W_f Xᵀ X W_g, with W_f = W_t W_pᵀ."""
    mixer, x = polymix.create_mixer("non_local", 8, preset="equations", dtype=torch.float64), tokens(2, 9, 8)
    m = mixer.matrices(9)
    close(mixer(x), x @ m["W_t"] @ (x @ m["W_p"]).mT @ (x @ m["W_g"]), 1e-12)


def test_the_block_of_pom_by_its_equation():
    """PoM, Eq. 3: X + PoM(X) + FF(X + PoM(X)), with the PoM of Eq. 2."""
    block, x = polymix.PolyMorpher(8, norm=None, preset="equations", dtype=torch.float64), tokens(2, 9, 8)
    m = block.mixer.matrices(9)
    h = torch.nn.functional.gelu(x @ m["W_h"])
    total = sum((m["alpha"][:, p] * h ** (p + 1)).sum(1, keepdim=True) for p in range(2))
    y = x + (torch.sigmoid(x @ m["W_s"]) * total) @ m["W_o"]
    close(block(x), y + block.mlp(y), 1e-12)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_mixer_without_one_says_so(name):
    with pytest.raises(OptionError, match="preset"):
        config_class(name)(preset="paper")


def test_in_a_conversion_and_in_a_language_model():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 1)
    polymix.convert(model, "pom:preset=equations")
    (mixer,) = (part for part in model.modules() if isinstance(part, polymix.TokenMixer))
    assert (mixer.config.bias, mixer.config.reduction) == (False, "sum")
    from polymix.models.language import PolymixGPTConfig

    sizes = {"vocab_size": 11, "hidden_size": 12, "num_layers": 1, "num_heads": 2}
    (config,) = PolymixGPTConfig(**sizes, mixers=["pom:preset=equations"]).layer_configs()
    assert (config.bias, config.reduction) == (False, "sum")
    (config,) = PolymixGPTConfig(**sizes, mixers=["pom:preset=equations:bias=true"]).layer_configs()
    assert config.bias


def test_pom_of_the_paper_by_its_equation():
    """Eq. 1 and 2 as printed: W_o [σ(W_s X) ⊙ Σ_j Σ_p α_p ⊙ h(W_h x_j)^p]."""
    mixer, x = polymix.create_mixer("pom", 8, preset="equations", degree=3, dtype=torch.float64), tokens(2, 9, 8)
    m = mixer.matrices(9)
    h = torch.nn.functional.gelu(x @ m["W_h"])
    total = sum((m["alpha"][:, p] * h ** (p + 1)).sum(1, keepdim=True) for p in range(3))
    close(mixer(x), (torch.sigmoid(x @ m["W_s"]) * total) @ m["W_o"], 1e-12)
