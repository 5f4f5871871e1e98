"""Tensors and values that PyTorch itself would refuse in the middle of a call: refused before it, in our words."""

import warnings

import pytest
import torch

import polymix
from polymix.errors import MaskError, OptionError, ShapeError, UnknownNameError
from tests.contracts.mixer_cases import CASES
from tests.errors.helpers import IDS, PAD, NoCompute, X, says, x


def inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


with warnings.catch_warnings():  # that nested and CSR tensors are prototypes
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.zeros(12, 8), torch.zeros(10, 8)])
    NESTED_MASK = torch.nested.nested_tensor([PAD[0], PAD[1, :10]])
    JAGGED = torch.nested.nested_tensor([torch.zeros(12, 8), torch.zeros(10, 8)], layout=torch.jagged)
    CSR = X.to_sparse_csr()
MADE_FOR_INFERENCE = inference(X)
REFUSED = {
    "sparse": ({"x": X.to_sparse()}, ShapeError, "x", ["sparse_coo", "a dense tensor", ".to_dense()"]),
    "csr": ({"x": CSR}, ShapeError, "x", ["sparse_csr", ".to_dense()"]),
    "nested": ({"x": NESTED}, ShapeError, "x", ["a nested tensor", "mask="]),
    "jagged": ({"x": JAGGED}, ShapeError, "x", ["a nested tensor", "mask="]),
    "mkldnn": ({"x": X.to_mkldnn()}, ShapeError, "x", ["mkldnn", ".to_dense()"]),
    "inference": ({"x": MADE_FOR_INFERENCE}, ShapeError, "x", ["inference_mode", "torch.no_grad()", "clone"]),
    "complex": ({"x": X.to(torch.complex64)}, ShapeError, "x", ["complex64", "float32"]),
    "context-sparse": ({"x": X, "context": X.to_sparse()}, ShapeError, "context", ["sparse_coo", ".to_dense()"]),
    "context-nested": ({"x": X, "context": NESTED}, ShapeError, "context", ["a nested tensor"]),
    "context-inference": ({"x": X, "context": MADE_FOR_INFERENCE}, ShapeError, "context", ["inference_mode"]),
    "mask-sparse": ({"x": X, "mask": PAD.to_sparse()}, MaskError, "mask", ["sparse_coo", ".to_dense()"]),
    "mask-nested": ({"x": X, "mask": NESTED_MASK}, MaskError, "mask", ["a nested tensor", "a dense tensor"]),
    "segments-sparse": ({"x": X, "segments": IDS.to_sparse()}, MaskError, "segments", ["sparse_coo", ".to_dense()"]),
    "segments-three": ({"x": X, "segments": (IDS, IDS, IDS)}, MaskError, "segments", ["a tuple of 3", "one tensor"]),
    "segments-three-cross": (
        {"x": X, "context": X, "segments": (IDS, IDS, IDS)}, MaskError, "segments", ["a tuple of 3", "a pair"],
    ),
    "causal-huge": ({"x": X, "causal": 2**70}, MaskError, "causal", [str(2**70), "from 1 to 2147483647", "True"]),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
@pytest.mark.parametrize("before", [False, True], ids=["first", "after a good call"])
def test_calls(case, before):
    """After a good call of the same shapes too, when a cache holds the checks."""
    arguments, kind, argument, words = REFUSED[case]
    mixer = polymix.create_mixer("pom", 8)
    if before:
        mixer(X)
    with NoCompute():
        says(lambda: mixer(**arguments), kind, argument, *words)


def test_integers_under_autocast():
    mixer = polymix.create_mixer("pom", 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        says(lambda: mixer(IDS[..., None].expand(2, 12, 8)), ShapeError, "x", "int64", "float32")


def test_inference_tensors_where_nothing_is_trained():
    mixer = polymix.create_mixer("pom", 8)
    with torch.no_grad():
        mixer(MADE_FOR_INFERENCE)
    mixer.requires_grad_(False)(MADE_FOR_INFERENCE)


OPTIONS = {
    "matrices": (lambda: polymix.create_mixer("pom", 8).matrices(4, dtype="float64"), "dtype", ["'float64'", "torch.float32"]),
    "matrices-int": (lambda: polymix.create_mixer("pom", 8).matrices(4, dtype=torch.int8), "dtype", ["torch.int8"]),
    "cost": (lambda: polymix.create_mixer("pom", 8).cost(4, dtype="float32"), "dtype", ["'float32'", "torch.dtype"]),
    "create": (lambda: polymix.create_mixer("pom", 8, dtype="float32"), "dtype", ["'float32'", "torch.dtype"]),
    "create-int": (lambda: polymix.create_mixer("pom", 8, dtype=torch.int32), "dtype", ["torch.int32"]),
    "device": (lambda: polymix.create_mixer("pom", 8, device="gpu"), "device", ["'gpu'", "cuda:1"]),
    "device-list": (lambda: polymix.create_mixer("pom", 8, device=["cpu"]), "device", ["['cpu']", "cuda:1"]),
    "block": (lambda: polymix.MixerBlock(8, polymix.create_mixer("pom", 6)), "mixer", ["a pom of width 6", "dim=8"]),
}  # fmt: skip


@pytest.mark.parametrize("case", list(OPTIONS))
def test_options(case):
    call, argument, words = OPTIONS[case]
    says(call, OptionError, argument, *words)


@pytest.mark.parametrize("name", [["pom"], ("pom",), {"pom": 1}, 3, None], ids=repr)
def test_names(name):
    says(lambda: polymix.create_mixer(name, 8), UnknownNameError, "name", repr(name))


@pytest.mark.parametrize("case", ["pom", "linear_floor"])  # one check serves all mixers, causal or not
@pytest.mark.parametrize("causal", ["yes", -1, 1.0, 2**70])
def test_every_error_about_causal_says_what_to_do(case, causal):
    name, options = CASES[case]
    mixer = polymix.create_mixer(name, 12, **options)
    error = says(lambda: mixer(x(2, 12, 12), causal=causal), MaskError, "causal", repr(causal))
    assert error.cure
