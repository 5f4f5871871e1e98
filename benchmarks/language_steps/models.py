"""The models of the study: the paper's forms, then what we add, all with the parameters of the one with attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polymix.models.language import PolymixGPTConfig, matched

SIZE = {"hidden_size": 192, "num_layers": 4, "num_heads": 3}
QUICK = {"hidden_size": 48, "num_layers": 2, "num_heads": 3}
CONTEXT, BATCH, STEPS, VOCAB, RATE = 512, 4, 400, 1024, 2e-3
POSITIONS = "none"  # of models that do not say otherwise: causal mixers know order
MODELS: Mapping[str, dict[str, Any]] = {
    "softmax": {"mixers": ["softmax"]},
    "local": {"mixers": ["local"]},
    "pom": {"mixers": ["pom"]},
    "pom k=3": {"mixers": ["pom:degree=3"]},
    "pom k=5": {"mixers": ["pom:degree=5"]},
    "pom+local": {"mixers": ["pom", "local"]},
    "pom+local k=3": {"mixers": ["pom:degree=3", "local"]},
    "pom+local k=5": {"mixers": ["pom:degree=5", "local"]},
    "padre": {"mixers": ["padre"]},
    "qt": {"mixers": ["qt"]},
    "linear": {"mixers": ["linear"]},
    "mamba": {"mixers": ["mamba"]},
    "performer": {"mixers": ["performer"]},  # PoM's Table 6: its training diverged there
    "nothing": {"mixers": ["local:window=1"]},  # a token sees itself alone
    "pom, decay": {"mixers": ["pom:decay=8"]},
    "pom+local, decay, conv": {"mixers": ["pom:decay=8", "local"], "short_conv": 4},
    "softmax, rotary": {"mixers": ["softmax"], "positions": "rotary"},
    "pom, rotary": {"mixers": ["pom"], "positions": "rotary"},
    "pom+local, rotary": {"mixers": ["pom", "local"], "positions": "rotary"},
    "softmax, learned": {"mixers": ["softmax"], "positions": "learned"},
    "local, learned": {"mixers": ["local"], "positions": "learned"},
    "pom, learned": {"mixers": ["pom"], "positions": "learned"},
    "pom k=3, learned": {"mixers": ["pom:degree=3"], "positions": "learned"},
    "pom+local, learned": {"mixers": ["pom", "local"], "positions": "learned"},
    "padre, learned": {"mixers": ["padre"], "positions": "learned"},
    "qt, learned": {"mixers": ["qt"], "positions": "learned"},
    "mamba, learned": {"mixers": ["mamba"], "positions": "learned"},
    "pom, conv, learned": {"mixers": ["pom"], "short_conv": 4, "positions": "learned"},
    "pom, decay, learned": {"mixers": ["pom:decay=8"], "positions": "learned"},
    "pom, decay, conv, learned": {"mixers": ["pom:decay=8"], "short_conv": 4, "positions": "learned"},
    "pom+local, decay, conv, learned": {"mixers": ["pom:decay=8", "local"], "short_conv": 4, "positions": "learned"},
}
# Those of them that are read at contexts they were not trained for: without learned positions.
LENGTHS = ("softmax, rotary", "pom, rotary", "pom+local, rotary", "pom+local, decay, conv")
WINDOWS = (128, 256, 512, 1024, 2048, 4096)
# Those that are trained at other contexts too, on as many tokens: does a longer one need a higher degree?
DEGREES = ("pom", "pom k=3", "pom k=5")
OTHERS = (128, 2048)
# Those whose next token is timed at every length, not at two alone.
DECODED = ("pom", "pom+local", "softmax")
BEFORE = (1_000, 10_000, 100_000, 1_000_000)


def config(options: Mapping[str, Any], quick: bool, positions: int = CONTEXT) -> PolymixGPTConfig:
    """A model's config; its feed-forward is that for CONTEXT positions, however many it has."""
    size = {"vocab_size": VOCAB, **(QUICK if quick else SIZE), "positions": POSITIONS, **options}
    hidden = matched(PolymixGPTConfig(max_position_embeddings=CONTEXT, **size)).intermediate_size
    return PolymixGPTConfig(max_position_embeddings=positions, intermediate_size=hidden, **size)
