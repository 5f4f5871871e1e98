"""Names that moved still work, and the warning names the new one at the line that uses the old one."""

import importlib
import sys
import warnings

import pytest
import torch

from polymix.renamed import MODULES, renamed

NAMES = [  # those that pages, recipes or released code showed
    ("polymix.mixers.base", "Polynomial", "polymix.mixers.mixer"),
    ("polymix.bench.machine", "manifest", "polymix.measure.machine"),
    ("polymix.compare.conversion.language", "repackage", "polymix.workflows.convert.language"),
]


@pytest.mark.parametrize(("old", "name", "new"), NAMES)
def test_an_old_module_hands_on_to_the_new_one(old, name, new):
    for module in [module for module in sys.modules if module in MODULES]:
        del sys.modules[module]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(f"from {old} import {name}", "theirs.py", "exec"), space := {})
    assert space[name] is getattr(importlib.import_module(new), name)
    said = [(str(each.message), each.filename) for each in caught if each.category is DeprecationWarning]
    assert said == [(f"{old} is now called {new}; the old name will be removed.", "theirs.py")]


@pytest.mark.parametrize("old", MODULES)
def test_every_old_module_is_gone_and_its_new_one_is_there(old):
    """A file under the old name would hide the alias."""
    assert importlib.util.find_spec(old).loader.__class__.__name__ == "_OldModules"
    assert importlib.util.find_spec(MODULES[old])


def test_an_old_attribute_and_one_that_never_was():
    find = renamed(__name__, OLD_NAMES="NAMES")
    with pytest.warns(DeprecationWarning, match=r"OLD_NAMES is now called tests.test_renamed.NAMES"):
        assert find("OLD_NAMES") is NAMES
    with pytest.raises(AttributeError, match="never"):
        find("never")


@pytest.mark.parametrize(("old", "new", "arguments"), [
    ("pooled_spread", "gate_tokens", (torch.randn(2, 5, 3, 4), torch.randn(2, 3, 4), None)),
    ("qt_ask", "qt_query", (torch.randn(2, 3, 5, 4), torch.randn(2, 3, 15, 5), None, "full", 2)),
])  # fmt: skip
def test_an_old_operator_is_the_new_one_with_its_gradients(old, new, arguments):
    """Graphs that were exported before hold the old names."""
    leaves = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]
    wanted = getattr(torch.ops.polymix, new)(*leaves, "eager")
    with pytest.warns(DeprecationWarning, match=f"polymix.{old} is now called torch.ops.polymix.{new}"):
        found = getattr(torch.ops.polymix, old)(*leaves, "eager")
    assert torch.equal(found, wanted)
    tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
    for one, other in zip(*(torch.autograd.grad(y.sum(), tensors) for y in (found, wanted)), strict=True):
        assert torch.equal(one, other)
