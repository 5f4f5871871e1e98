"""Options of the linear-attention family: grids, scales and norms of single mechanisms, and what is refused."""

import copy
import math
import sys

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, MissingExtraError, OptionError, ShapeError
from tests.helpers import build, close, tokens
from tests.mixers.related.attention import CAUSAL, CROSS, FORMS, NAMES, PAD, TOL, make


def test_dropout_of_class_attention_spares_what_passes_through():
    mixer, x = build("sima", 12, class_attention=True, dropout=0.9), tokens(4, 9, 12)
    y = mixer.train()(x)
    assert torch.equal(y[:, 1:], x[:, 1:])
    assert (y[:, 0] == 0).any()


@pytest.mark.parametrize("grid", [(6, 8), (2, 3)])
@pytest.mark.parametrize("key", ["focused", "focused-sr"])
def test_focused_serves_another_grid(key, grid):
    """Its code of the positions is resampled, so that a constant one stays what it was."""
    mixer = make(key)
    with torch.no_grad():
        mixer.positional_encoding.copy_(mixer.positional_encoding[:, :1].clone())
    fresh = build("focused", 12, **{**FORMS[key], "grid": grid}).eval()
    state = {
        **mixer.state_dict(),
        "positional_encoding": mixer.positional_encoding[:, :1].expand(fresh.positional_encoding.shape),
    }
    fresh.load_state_dict(state)
    x = tokens(2, math.prod(grid), 12)
    close(mixer(x, grid=grid), fresh(x), 1e-11)


def test_focusing_does_not_overflow_whatever_its_factor():
    mixer = build("focused", 12, grid=(3, 4), focusing_factor=60).float()
    assert mixer(1e3 * tokens(2, 12, 12, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"scales": (3,)}])
def test_relu_linear_takes_feature_maps(options):
    mixer, x = build("relu_linear", 12, heads=2, **options).eval(), tokens(2, 12, 4, 5)
    y = mixer(x)
    flat = mixer(x.flatten(2).transpose(1, 2), grid=(4, 5) if options else None)
    close(y, flat.transpose(1, 2).unflatten(2, (4, 5)), TOL)


def test_padding_stays_out_of_the_statistics_of_the_batch():
    mixer, x = make("relu_linear").train(), tokens(1, 12, 12)
    other = copy.deepcopy(mixer)
    mask = torch.arange(12)[None] < 9
    broken = x.masked_fill(~mask[..., None], float("nan"))
    close(mixer(broken, mask=mask)[:, :9], other(x[:, :9]), TOL)
    close(mixer.mla.proj.norm.running_var, other.mla.proj.norm.running_var, TOL)


def test_relu_linear_in_float64_is_float64():
    """timm's own forward casts to float32 on the way, and is off by its rounding."""
    mixer, x = build("relu_linear", 12, heads=2, eps=1e-5).eval(), tokens(2, 12, 12)
    theirs = mixer.mla(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    gap = (mixer(x) - theirs).abs().max()
    assert 1e-12 < gap < 1e-5


def test_without_timm_the_names_are_listed_and_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert {"relu_linear", "xca"} <= set(polymix.list_mixers())
    for name in ("relu_linear", "xca"):
        with pytest.raises(MissingExtraError, match=r"\.\[vision\]"):
            polymix.create_mixer(name, 12)


@pytest.mark.parametrize(("name", "options"), [
    ("linear", {"feature_map": "identity"}), ("linear", {"feature_map": "exp"}), ("linear", {"normalize": 1}),
    ("castling", {"kernel_size": 4}), ("castling", {"sparse_reg": None}), ("focused", {"grid": (3, 4), "kernel_size": 2}),
    ("focused", {}), ("focused", {"grid": (12,)}), ("focused", {"grid": (3, 4), "focusing_factor": 0.5}),
    ("focused", {"grid": (4, 4), "sr_ratio": 2, "num_prefix_tokens": 1}), ("relu_linear", {"scales": (4,)}),
    ("relu_linear", {"scales": 5}), ("relu_linear", {"grid": (3, 4)}), ("relu_linear", {"norm": "layer"}),
    ("relu_linear", {"eps": 0.0}), ("performer", {"features": 0}), ("performer", {"kernel": "exp"}),
    ("performer", {"seed": -1}), ("sima", {"class_attention": "yes"}), ("xca", {"heads": 5}), ("hydra", {"heads": 2}),
])  # fmt: skip
def test_options_that_make_no_sense(name, options):
    with pytest.raises(OptionError):
        polymix.create_mixer(name, 12, **options)


@pytest.mark.parametrize(("key", "call"), [
    *((key, {"causal": True}) for key in FORMS if key not in CAUSAL),
    *((key, {"context": tokens(2, 5, 12)}) for key in FORMS if key not in CROSS),
    ("focused-sr", {"mask": PAD[:2]}), *((name, {"mask": torch.ones(2, 12, 12, dtype=torch.bool)}) for name in NAMES),
])  # fmt: skip
def test_what_a_mechanism_cannot_do_is_refused(key, call):
    with pytest.raises(CapabilityError):
        make(key)(tokens(2, 12, 12), **call)


def test_scales_without_a_grid_say_so():
    with pytest.raises(ShapeError, match="rows and columns"):
        build("relu_linear", 12, scales=(3,))(tokens(2, 12, 12))
    with pytest.raises(ShapeError, match="sr_ratio"):
        build("focused", 12, grid=(4, 4), sr_ratio=2)(tokens(2, 5, 12), grid=(1, 5))
