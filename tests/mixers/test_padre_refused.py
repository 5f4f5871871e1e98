"""Options of PADRe that exclude each other are refused when the mixer is built."""

import pytest

import polymix
from polymix.errors import OptionError

REFUSED = {
    "a grid has no order": {"causal": True, "grid": (8, 8)},
    "prefix tokens have no place in an order": {"causal": True, "num_prefix_tokens": 1},
    "a circulant map has no causal form": {"causal": True, "token": "circulant", "grid": (64,)},
    "a transpose sees the future": {"causal": True, "token": "toeplitz:length=8^T"},
    "causal order is within one input": {"causal": True, "pattern": "ab"},
    "U would mix past and future": {"causal": True, "grid": (64,), "out_tokens": 4},
    "low_rank has weights per position and needs their number": {"token": "low_rank"},
    "so does a full W": {"weight": "full"},
    "a pattern needs two inputs": {"pattern": "aa"},
    "a quotient has one pattern": {"degree": 2, "denominator": 1, "pattern": ("aab", "abb")},
    "there is no context to have a length": {"context_tokens": 9},
    "there is no U to have a structure": {"U": "dense"},
    "degree 3 would be computed for nothing": {"degree": 3, "terms": (1, 2)},
    "there is no convolution": {"token": "mean", "kernel_size": 5},
    "there is no denominator": {"eps": 0.1},
    "no map is left to the preset": {"A": "mean", "C": "mean", "preset": "full"},
    "nothing would be learned": {"A": "identity", "B": "identity", "C": "identity", "D": "identity"},
    "an even kernel has no centre": {"kernel_size": 4},
    "a layer norm of one channel is zero": {"heads": 12, "normalize": "layer"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_options_that_exclude_each_other(why):
    with pytest.raises(OptionError):
        polymix.create_mixer("padre", dim=12, **REFUSED[why])
