"""CONTRIBUTING.md is true: its paths exist, and what it tells a contributor to write works from outside the package."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import polymix
from polymix.mixers import registry

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@pytest.fixture
def forgotten_mixers():
    """The registry as it was, after the test."""
    polymix.list_mixers()  # registers the mixers that are imported later
    before = dict(registry._CONFIGS)
    yield
    registry._CONFIGS.clear()
    registry._CONFIGS.update(before)


def test_every_path_on_the_page_exists():
    paths = [path for path in re.findall(r"`([\w.]*/[\w./]+)`", PAGE) if not path.startswith("_")]
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "polymix" / path).exists()]
    assert len(paths) > 8
    assert not missing


def test_the_mixer_on_the_page_has_what_every_mixer_has(forgotten_mixers):
    """One file from outside: built by name, masked, converted to, explained, costed by its own formula."""
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "TokenMixer" in block)
    exec(compile(block, "CONTRIBUTING.md", "exec"), {"__name__": "theirs"})

    torch.manual_seed(0)
    mixer = polymix.create_mixer("mean", dim=16).double()
    x, real = torch.randn(2, 5, 16, dtype=torch.float64), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    W, b = mixer.matrices(5)["W"], mixer.matrices(5)["b"]
    for row, tokens in enumerate((5, 3)):
        seen = x[row, :tokens]
        torch.testing.assert_close(mixer(x, mask=real)[row, :tokens], (seen + seen.mean(0)) @ W + b)
    assert mixer.cost(5).multiply_adds == 5 * 16**2
    assert "mean" in polymix.list_mixers() and "Cost: N D²" in type(mixer).__doc__
    with pytest.raises(polymix.errors.CapabilityError, match="causal"):
        mixer(x, causal=True)
    assert [line.impl for line in polymix.explain(mixer, x)] == ["eager"]

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)
    report = polymix.convert(model, "mean")
    assert [part.name for part in model.modules() if isinstance(part, polymix.TokenMixer)] == ["mean"]
    report.undo()
    assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention)
