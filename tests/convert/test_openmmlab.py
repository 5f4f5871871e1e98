"""mmpretrain's attention, found by a call: written as there, because the library is not installed."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import OptionError
from tests.convert.checks import answer, converts, near, refuses, same_as_host, undoes

X = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))


class MultiheadAttention(nn.Module):
    """The maps, options and order of work of mmpretrain.models.utils.attention.MultiheadAttention."""

    def __init__(self, embed_dims=16, num_heads=2, use_layer_scale=False):
        super().__init__()
        self.num_heads, self.scale = num_heads, (embed_dims // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(embed_dims, 3 * embed_dims), nn.Linear(embed_dims, embed_dims)
        self.attn_drop, self.proj_drop, self.out_drop = nn.Dropout(0.0), nn.Dropout(0.0), nn.Dropout(0.0)
        self.gamma = nn.Parameter(torch.rand(embed_dims)) if use_layer_scale else 1.0

    def forward(self, x):
        batch, n, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        y = (weights @ v).transpose(1, 2).reshape(batch, n, dim)
        return self.out_drop(self.gamma * self.proj_drop(self.proj(y)))


class WindowMSA(MultiheadAttention):
    """Its windows of 4 × 4, with a bias between every two places."""

    def __init__(self):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(49, 2))
        y, x = torch.arange(16) // 4, torch.arange(16) % 4
        index = 7 * (y[:, None] - y + 3) + x[:, None] - x + 3
        self.register_buffer("relative_position_index", index)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        batch, n, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(16, 16, -1)
        logits = (q * self.scale) @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            logits = logits.view(batch // len(mask), len(mask), -1, n, n) + mask.unsqueeze(1).unsqueeze(0)
            logits = logits.view(-1, self.num_heads, n, n)
        return self.proj((self.softmax(logits) @ v).transpose(1, 2).reshape(batch, n, dim))


@pytest.mark.parametrize("scaled", [False, True])
def test_softmax_is_the_layer_and_mixers_take_its_place(scaled):
    model = nn.Sequential(MultiheadAttention(use_layer_scale=scaled), nn.LayerNorm(16), MultiheadAttention())
    same_as_host(model, X, input=X)
    for mixer in ("qt", "padre", "pom"):
        converts(model, mixer, X, input=X)
        undoes(model, mixer, X, input=X)


def test_windows_keep_their_biases_with_softmax_and_say_that_mixers_lose_them():
    model = nn.Sequential(WindowMSA())
    expected = answer(model, X)
    refuses(model, "qt", OptionError, "position_bias", input=X)
    report = polymix.convert(model, "softmax", input=X)
    near(answer(model, X), expected)
    report.undo()
    assert "position_bias" in polymix.convert(model, "qt", input=X, drop=("position_bias",)).layers[0].dropped
