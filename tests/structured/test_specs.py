"""What a spec may say: names, options, what a structure cannot do, composition; prefix tokens."""

import pytest
import torch

from polymix import errors
from polymix.structured import BlockDiagonal, Prefixed, Site, create_map, list_maps, token_map
from tests.helpers import close, jitter, tokens
from tests.structured.cases import DIM, F64, TOL, N, of, site


def test_names():
    assert {"identity", "dense", "diagonal", "block_diagonal", "low_rank", "banded", "sparse", "depthwise", "circulant",
            "toeplitz", "monarch", "mean", "rank_one"} == set(list_maps())  # fmt: skip
    assert type(create_map("block-diagonal:blocks=2", site())) is BlockDiagonal
    assert type(create_map("Low-Rank", site())).kind == "low_rank"
    assert type(create_map("rank-1", site())).kind == "rank_one"
    assert type(create_map("mean_pooling", site())).kind == "mean"


@pytest.mark.parametrize(("spec", "kind", "word"), [
    ("monarc", errors.UnknownNameError, "monarch"), ("monarch:block=2", errors.OptionError, "blocks=…"),
    ("monarch:blocks=5", errors.OptionError, "divisor"), ("low_rank:rank=0", errors.OptionError, "rank"),
    ("depthwise:kernel=4", errors.OptionError, "odd"), ("toeplitz^2", errors.OptionError, "^T"),
    ("", errors.OptionError, "name of a structure"), ("dense+", errors.OptionError, "name of a structure"),
    ("mean:length=3", errors.OptionError, "no options"), ("circulant:filter=learned", errors.OptionError, "implicit"),
    ("sparse:density=2", errors.OptionError, "density"), ("depthwise:kernel=3x3", errors.OptionError, "kernel"),
])  # fmt: skip
def test_errors_name_what_is_allowed(spec, kind, word):
    with pytest.raises(kind, match=word.replace("^", r"\^")):
        create_map(spec, site())


@pytest.mark.parametrize("spec", ["circulant", "monarch", "toeplitz^T", "diagonal+circulant", "mean@monarch"])
def test_maps_without_a_causal_form_say_so(spec):
    with pytest.raises(errors.OptionError, match="causal"):
        create_map(spec, site(causal=True))


@pytest.mark.parametrize("spec", ["identity", "depthwise", "monarch", "circulant", "toeplitz", "banded", "diagonal"])
def test_maps_of_one_length_say_so(spec):
    with pytest.raises(errors.OptionError, match="one length"):
        create_map(spec, Site("token", DIM, 10, 6))


@pytest.mark.parametrize("spec", ["dense", "monarch", "diagonal", "low_rank", "toeplitz:filter=explicit"])
def test_weights_that_belong_to_positions_need_a_length(spec):
    with pytest.raises(errors.OptionError, match=r"grid|length"):
        create_map(spec, Site("token", DIM))


def test_sparse_pattern_is_the_seed_s_and_in_the_state_dict():
    a, b, c = (create_map(f"sparse:seed={seed}", site()) for seed in (1, 1, 2))
    assert torch.equal(a.rows, b.rows)
    assert not (a.rows.shape == c.rows.shape and torch.equal(a.rows, c.rows) and torch.equal(a.columns, c.columns))
    assert {"rows", "columns"} <= a.state_dict().keys()


@pytest.mark.parametrize(
    "spec", ["depthwise:kernel=3", "toeplitz", "low_rank:rank=2", "mean", "identity", "circulant+mean"]
)
def test_prefix_tokens(spec):
    """Outside a map over positions; tokens among tokens for the others."""
    layer = jitter(token_map(spec, site(), prefix=2, bias=True, **F64))
    assert isinstance(layer, Prefixed) == any(kind in spec for kind in ("depthwise", "toeplitz", "circulant"))
    x = tokens(2, N + 2, DIM)
    close(layer(x), of("token", layer.dense(N + 2), x, layer.bias), TOL)
