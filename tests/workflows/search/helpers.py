"""Tiny trained models, and times that are the same on every machine."""

import pytest
import torch
from torch import nn

from polymix.compat import cure_torchvision

cure_torchvision()
MS = {"keep": 10.0, "qt": 4.0, "pom": 3.0, "padre-2": 6.0, "padre-3": 7.0, "slow": 20.0}


def fixed_times(candidates, seconds, device, done):
    """A row for each layer and candidate, as `layer_times` makes them. Nothing is timed."""
    return [
        {"layer": name, "mixer": label, "ms": MS[label], "low_ms": MS[label], "high_ms": MS[label], "runs": 3, "clock": "wall"}
        for name in candidates.layers
        for label in ("keep", *candidates.labels(name))
    ]  # fmt: skip


def louder(model):
    """The model with outputs that differ between inputs, as those of a trained one do."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.mul_(12 if any(part in name for part in ("head", "qkv", "query", "key", "c_attn")) else 4)
    return model.eval()


def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "num_heads": 2, "depth": 4, "num_classes": 5}
    return louder(timm.create_model("vit_tiny_patch16_224", **sizes))


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return louder(transformers.BertModel(config, add_pooling_layer=False))


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    return louder(transformers.GPT2LMHeadModel(config))


def encoder():
    """Three layers of torch.nn."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return louder(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


def images(count=8, size=16):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 16, 16, generator=draw) for _ in range(count)]


def texts(count=8, size=16, tokens=12):
    draw = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        lengths = torch.randint(tokens // 2, tokens + 1, (size, 1), generator=draw)
        ids = torch.randint(1, 50, (size, tokens), generator=draw)
        batches.append({"input_ids": ids, "attention_mask": (torch.arange(tokens) < lengths).long()})
    return batches


def windows(count=8, size=16, tokens=12):
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(50, (size, tokens), generator=draw)} for _ in range(count)]
