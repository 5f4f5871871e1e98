"""Limits of foreign configs: what no machine can build is refused before it is built, and what libraries save is not."""

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from polymix.errors import OptionError
from polymix.limits import LAYERS, LIMITS, LONGEST, bounded, check_counts, too_large


@pytest.mark.parametrize(("content", "name"), [
    ({"num_hidden_layers": LAYERS + 1}, "num_hidden_layers"), ({"model_args": {"depths": [2, 10**9]}}, "depths"),
    ({"text_config": {"hidden_size": 10**9}}, "hidden_size"), ({"vocab_size": 10**30}, "vocab_size"),
    ({"n_positions": LONGEST + 1}, "n_positions"), ({"layers_per_block": 10**5}, "layers_per_block"),
    ({"num_heads": -(10**9)}, "num_heads"),
])  # fmt: skip
def test_a_count_that_cannot_be_meant_is_named_with_its_limit(content, name):
    with pytest.raises(OptionError, match=f"{name} of at most {LIMITS[name]:,}") as error:
        check_counts(content, "folder", "a folder")
    assert error.value.argument == "folder" and "a folder" in error.value.got


def test_keys_that_are_no_counts_are_not_limited():
    """Ids, bases of rotary positions and other keys of a stranger may have any value."""
    check_counts(
        {"rope_theta": 10**12, "id2label": {"0": "a"}, "my_layers": 10**30, "depth_scale": 10**9}, "folder", "x"
    )
    check_counts(
        {"num_hidden_layers": LAYERS, "vocab_size": LONGEST, "depth": True, "hidden_size": None}, "folder", "x"
    )


@pytest.mark.parametrize("build", [
    lambda: torch.empty(2**40, 2**40), lambda: torch.empty(10**30), lambda: torch.full((10**30,), 1), lambda: [0] * 10**30,
    lambda: nn.Linear(10**30, 4), lambda: nn.Linear(2**40, 2**40), lambda: torch.ones(1).expand(2**62, 2**62).numel(),
    lambda: torch.empty(-3), lambda: np.zeros(10**30), lambda: np.zeros((2**40, 2**40)), lambda: torch.arange(10**30), lambda: torch.tensor(10**30),
])  # fmt: skip
def test_whatever_pytorch_and_numpy_say_of_a_size_they_cannot_allocate_is_recognised(build):
    with pytest.raises(Exception) as error:
        build()
    assert too_large(error.value), error.value
    with pytest.raises(OptionError, match="cannot be allocated"), bounded("model", "a model"):
        build()


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("token id out of range"),
    TypeError("memory() takes no arguments"), IndexError("index out of range in self"),
])  # fmt: skip
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    assert not too_large(error)
    with pytest.raises(type(error)), bounded("model", "a model"):
        raise error


def arguments(package):
    """The names of all arguments of all __init__ methods in a package's models."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    nodes = (node for path in Path(folder, "models").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return {argument.arg for function in functions for argument in (*function.args.args, *function.args.kwonlyargs)}


def names(content):
    """All keys of a config, also of those within."""
    parts = list(content.values()) if isinstance(content, dict) else content
    inner = [names(part) for part in parts if isinstance(part, (dict, list, tuple))]
    return set(content if isinstance(content, dict) else ()).union(*inner)


@pytest.mark.slow
def test_the_limits_are_of_keys_that_libraries_have_and_none_refuses_a_default():
    transformers = pytest.importorskip("transformers", reason="untested: the configs of transformers")
    if missing := [package for package in ("timm", "diffusers") if importlib.util.find_spec(package) is None]:
        pytest.skip(f"untested: the keys of {', '.join(missing)}")
    known = arguments("timm") | arguments("diffusers")
    for kind in transformers.CONFIG_MAPPING:
        try:
            content = transformers.CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # a config that cannot be made without arguments, or without a package
            continue
        check_counts(content, "folder", kind)
        known |= names(content)
    assert not sorted(set(LIMITS) - known), "keys that no library has"
