"""An adapter from outside the package, for a library that polymix has never heard of, as docs/convert/adapters.md shows."""

import sys
from pathlib import Path

import pytest
import torch

import polymix
from polymix.convert import Adapter, AttentionSpec, adapter, linear, thirds
from tests.convert.checks import MIXERS, converts, refuses, same_as_host, undoes

LIBRARY = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, padding=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if padding is None else padding[:, None, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Attention(16, 2) for _ in range(depth))

    def forward(self, x, padding=None):
        for layer in self.layers:
            x = x + layer(x, padding)
        return x
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library in a file, and an adapter that names its class without importing it."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "toy_library.py").write_text(LIBRARY)

    @polymix.register_adapter("toy_library.Attention")
    class ToyAdapter(Adapter):
        @classmethod
        def describe(cls, module, host):
            query, key, value = thirds(linear(module, "qkv"))
            return AttentionSpec(
                dim=module.out.in_features, heads=module.heads, query=query, key=key, value=value,
                out=linear(module, "out"), any_length=True,
            )  # fmt: skip

        def forward(self, x, padding=None):
            return self.mix(x, mask=padding)

    assert "toy_library" not in sys.modules, "to register an adapter does not import the library"
    sys.path.insert(0, str(folder))
    import toy_library

    yield toy_library
    sys.path.remove(str(folder))
    del sys.modules["toy_library"]
    del adapter._ADAPTERS["toy_library.Attention"]


def inputs():
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, 6:] = False
    return {"x": torch.randn(2, 9, 16), "padding": padding}


def test_softmax_gives_the_librarys_output_with_its_masks(library):
    example = inputs()
    same_as_host(library.Model(), example, of=lambda y: y[example["padding"]])


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name not in ("padre", "poly_sa")])
def test_mixers_take_its_place(library, mixer):
    converts(library.Model(), mixer, inputs())
    undoes(library.Model(), mixer, inputs())


def test_what_the_host_asks_is_checked_first(library):
    """Lengths vary, by the spec; and with an input its masks are known."""
    refuses(library.Model(), "padre:token=dense", polymix.errors.PolymixError, "layers.0 .Attention.")
    refuses(library.Model(), "conv2former", polymix.errors.PolymixError, "layers.0 .Attention.", input=inputs())


def test_it_is_saved_with_the_function_that_builds_it(library, tmp_path):
    model, given = polymix.convert(library.Model(), "pom").model.eval(), inputs()
    polymix.save_pretrained(model, tmp_path, host={"call": "toy_library:Model", "kwargs": {"depth": 2}})
    loaded = polymix.load_pretrained(tmp_path, trust=True)
    assert torch.equal(loaded(**given), model(**given))


def test_the_page_says_how():
    """What this file does stands on the page."""
    page = (Path(__file__).parents[2] / "docs/convert/adapters.md").read_text("utf-8")
    for name in ("Adapter", "AttentionSpec", "describe", "self.mix", "register_adapter", "linear", "thirds", '"call"'):
        assert name in page


def test_an_adapter_is_seen_when_it_is_registered_after_a_conversion(monkeypatch):
    """What has been looked up is not remembered: neither for a class nor for the classes that it inherits from."""
    monkeypatch.setattr(adapter, "_ADAPTERS", dict(adapter._ADAPTERS))
    late = type("Late", (torch.nn.MultiheadAttention,), {"forward": lambda self, x: x})
    heir = type("Heir", (late,), {})
    model = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2), heir(8, 2)])
    assert set(polymix.convert(model, "pom").adapters) == {"0"}
    theirs = type("Theirs", (Adapter,), {})
    polymix.register_adapter(late)(theirs)
    assert adapter.adapter_for(model[1]) is theirs
