"""Made-up timings, and a made-up attention layer."""

from types import SimpleNamespace

from torch import nn

from polymix.measure.timing import Timing


def near(median, spread=0.02, runs=5):
    """A Timing around `median` seconds."""
    return Timing(tuple(median * (1 + spread * (i / (runs - 1) * 2 - 1)) for i in range(runs)))


def contender(name):
    """The contender behind a name of the harness, ("call", "pom"), or of a call that is timed by itself."""
    return name[1] if isinstance(name, tuple) else name


class SplitProjections(nn.Module):
    """Attention as transformers writes it: q_proj, k_proj, v_proj, and the heads in a config."""

    def __init__(self, causal=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.config, self.is_causal = SimpleNamespace(num_attention_heads=2), causal

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, past_key_values=None, **kwargs):
        source = hidden_states if key_value_states is None else key_value_states
        q, k, v = self.q_proj(hidden_states), self.k_proj(source), self.v_proj(source)
        if past_key_values is not None:
            past_key_values.append(k)
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, attention_mask)), None
