"""What the tests of the mixers that pool tokens share: sizes, masks, forms, and a softmax by its definition."""

import itertools

import torch

TOL = 1e-12
N, D = 12, 8
PAD = torch.tensor([[True] * 7 + [False] * 5, [False] * 4 + [True] * 8, [False] * N])
SEGMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 4, [5] * N, [1, 0, 0, 1, 2, 2, 1, 0, 2, 9, 9, 1]])
POOLED = {  # every mixer that pools tokens, for the laws of padding
    "non_local": {}, "non_local-dot": {"form": "dot_product", "residual": True}, "se": {"add_maxpool": True},
    "se-effective": {"form": "effective"}, "gc": {"rd_ratio": 0.5, "fuse_add": True},
    "gc-mean": {"rd_ratio": 0.5, "use_attn": False}, "latent_gnn": {"latent": 4, "reduction": 2},
    "latent_gnn-relu": {"latent": 4, "reduction": 2, "affinity": "relu", "graph": "learned"},
    "prodpoly": {"degree": 3},
}  # fmt: skip


def letters_of(mixer, n=N, **kw):
    return mixer.matrices(n, dtype=torch.float64, **kw)


def every(**options):
    """Every combination of the options, each a list."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def weighted_softmax(logits, see):
    """Row softmax over what is seen, by its definition; a row that sees nothing is zero."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp() * see
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
