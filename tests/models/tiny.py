"""Language models small enough to test by the dozen, and how they are held against each other."""

from functools import cache

import pytest
import torch

from polymix.compat import cure_torchvision
from tests.helpers import jitter

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: transformers is not installed")

from polymix.models import language  # noqa: E402  # after the cure, and not without transformers

VOCAB = 61
SHAPES = {  # family, positions, taps of the short convolution
    "gpt": ("GPT", {"positions": "learned", "short_conv": 0}),
    "llama": ("Llama", {"positions": "rotary", "short_conv": 3}),
    "gpt-none": ("GPT", {"positions": "none", "short_conv": 3}),
    "llama-none": ("Llama", {"positions": "none", "short_conv": 0}),
}
MIXERS = {
    "pom": "pom", "pom-3": "pom:degree=3", "padre-2": "padre:kernel_size=3", "padre-3": "padre:degree=3:kernel_size=3",
    "qt": "qt", "mamba": "mamba", "linear": "linear", "hydra": "hydra", "performer": "performer",
    "hyena": "hyena:filter=explicit:length=5", "softmax": "softmax", "local": "local:window=4",
    "pom-local": ["pom", "local:window=4"], "pom-softmax": ["pom", "softmax"], "softmax-pom": ["softmax", "pom"],
}  # fmt: skip
STATES = {name: mixers for name, mixers in MIXERS.items() if "softmax" not in name}
IDS = torch.randint(1, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones(3, 12, dtype=torch.long)
LEFT[0, :3] = LEFT[2, :7] = 0


def config(mixers, shape="gpt", **options):
    family, given = SHAPES[shape]
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return getattr(language, f"Polymix{family}Config")(mixers=mixers, **{**sizes, **ends, **given, **options})


def fresh(mixers, shape="gpt", **options):
    """A model as it is at its init."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(mixers, shape, **options))


@cache
def tiny(name, shape="gpt"):
    """A model whose every parameter is away from its init, so that nothing hides; shared: do not change it."""
    return jitter(fresh(MIXERS[name], shape), scale=0.2).eval()


def error(got, wanted):
    """Largest difference relative to the largest entry."""
    assert got.shape == wanted.shape
    return ((got.double() - wanted.double()).abs().max() / wanted.abs().max()).item()


def alone(model, ids, mask):
    """Logits of each row without its padding."""
    return [model(row[real.bool()][None]).logits[0] for row, real in zip(ids, mask, strict=True)]
