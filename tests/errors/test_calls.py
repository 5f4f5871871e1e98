"""Calls of a mixer, all at once and token by token: each is checked before anything is computed."""

import pytest
import torch

import polymix
from polymix import errors
from polymix.errors import CapabilityError, MaskError, ShapeError, StateError
from tests.errors.helpers import ANY, CAUSAL, FLAT, FULL, GRID, IDS, MEAN, PAD, PREFIX, SEEN, NoCompute, X, says, x

CALLS = {
    # tokens
    "x-no-tensor": ("pom", {}, {"x": [1.0]}, ShapeError, "x", ["list", "(B, N, 8)", "dim=8"]),
    "x-axes": ("pom", {}, {"x": x(12, 8)}, ShapeError, "x", ["(12, 8)", "(B, N, 8)"]),
    "x-width": ("padre", {}, {"x": x(2, 12, 7)}, ShapeError, "x", ["(2, 12, 7)", "(B, N, 8)", "built with dim=8"]),
    "x-empty": ("pom", {}, {"x": x(2, 0, 8)}, ShapeError, "x", ["(2, 0, 8)", "N ≥ 1"]),
    "x-dtype": ("qt", {}, {"x": x(2, 12, 8, dtype=torch.float64)}, ShapeError, "x", ["float64", ".to(dtype)"]),
    "x-integers": ("pom", {}, {"x": IDS[..., None].expand(2, 12, 8)}, ShapeError, "x", ["int64", "float32"]),
    "x-device": ("pom", {}, {"x": X.to("meta")}, ShapeError, "x", ["meta", "cpu", ".to(device)"]),
    "map-width": ("poly_nl", {}, {"x": x(2, 7, 3, 4)}, ShapeError, "x", ["(2, 12, 7)", "(B, N, 8)"]),
    "prefix-all": ("padre", PREFIX, {"x": x(2, 3, 8)}, ShapeError, "x", ["(2, 3, 8)", "more than num_prefix_tokens=3"]),
    "prefix-more": ("poly_sa", {**PREFIX, "grid": (4,)}, {"x": x(2, 2, 8)}, ShapeError, "x", ["num_prefix_tokens=3"]),
    # context
    "context-axes": ("pom", {}, {"context": x(12, 8)}, ShapeError, "context", ["(12, 8)", "(B, N, 8)"]),
    "context-width": ("softmax", {}, {"context": x(2, 5, 6)}, ShapeError, "context", ["(2, 5, 6)", "(B, N, 8)"]),
    "context-empty": ("qt", {}, {"context": x(2, 0, 8)}, ShapeError, "context", ["(2, 0, 8)", "N ≥ 1"]),
    "context-batch": ("qt", {}, {"context": x(3, 5, 8)}, ShapeError, "context", ["(3, 5, 8)", "(2, M, 8)"]),
    "context-dtype": ("pom", {}, {"context": X.half()}, ShapeError, "context", ["float16", "float32"]),
    "context-device": ("pom", {}, {"context": X.to("meta")}, ShapeError, "context", ["meta", "cpu"]),
    # masks
    "mask-float": ("pom", {}, {"mask": PAD.float()}, MaskError, "mask", ["float32", "True = takes part", "> 0"]),
    "mask-integers": ("qt", {}, {"mask": IDS}, MaskError, "mask", ["int64", "boolean"]),
    "mask-no-tensor": ("pom", {}, {"mask": [True] * 12}, MaskError, "mask", ["list", "boolean"]),
    "mask-batch": ("pom", {}, {"mask": PAD[:1]}, MaskError, "mask", ["(1, 12)", "(2, 12)", "(2, 12, 12)", "Expand"]),
    "mask-length": ("poly_nl", {}, {"mask": PAD[:, 1:]}, MaskError, "mask", ["(2, 11)", "(2, 12)"]),
    "mask-axes": ("softmax", {}, {"mask": SEEN[:, None]}, MaskError, "mask", ["(2, 1, 12, 12)", "(2, 12, 12)"]),
    "mask-context": ("pom", {}, {"context": x(2, 5, 8), "mask": PAD}, MaskError, "mask", ["(2, 5)", "(2, 12, 5)"]),
    "mask-device": ("pom", {}, {"mask": PAD.to("meta")}, ANY, "mask", ["meta", "cpu"]),
    # segments
    "segments-float": ("pom", {}, {"segments": IDS.float()}, MaskError, "segments", ["float32", "integer ids (2, 12)"]),
    "segments-bool": ("softmax", {}, {"segments": PAD}, MaskError, "segments", ["bool", "integer ids (2, 12)"]),
    "segments-shape": ("pom", {}, {"segments": IDS[:, 1:]}, MaskError, "segments", ["(2, 11)", "one id per token"]),
    "segments-list": ("pom", {}, {"segments": [0] * 12}, MaskError, "segments", ["list", "integer ids"]),
    "segments-one": ("pom", {}, {"context": x(2, 5, 8), "segments": IDS}, MaskError, "segments", ["Tensor", "a pair"]),
    "segments-pair": ("pom", {}, {"segments": (IDS, IDS)}, MaskError, "segments", ["tuple", "one tensor without"]),
    "segments-second": ("pom", {}, {"context": x(2, 5, 8), "segments": (IDS, IDS)}, MaskError, "segments", ["(2, 5)"]),
    "segments-device": ("pom", {}, {"segments": IDS.to("meta")}, ANY, "segments", ["meta", "cpu"]),
    # causal
    "causal-word": ("pom", {}, {"causal": "yes"}, MaskError, "causal", ["'yes'", "block length"]),
    "causal-negative": ("qt", {}, {"causal": -1}, MaskError, "causal", ["-1", "block length"]),
    "causal-float": ("softmax", {}, {"causal": 1.0}, MaskError, "causal", ["1.0", "block length"]),
    "causal-context": ("pom", {}, {"context": X, **CAUSAL}, MaskError, "causal", ["separate context"]),
    "causal-off": ("padre", CAUSAL, {"causal": False}, MaskError, "causal", ["False", "built causal", "causal=False"]),
    "causal-blocks": ("padre", CAUSAL, {"causal": 3}, MaskError, "causal", ["3", "built causal"]),
    # grids
    "grid-of-n": ("padre", GRID, {"x": x(2, 13, 8)}, ShapeError, "grid", ["(3, 4) = 12 tokens for 13", "Pass grid="]),
    "grid-of-sa": ("poly_sa", GRID, {"x": x(2, 13, 8)}, ShapeError, "grid", ["12 tokens for 13"]),
    "grid-wrong": ("padre", GRID, {"grid": (5, 3)}, ShapeError, "grid", ["(5, 3) = 15 tokens for 12", "grid of 12"]),
    "grid-prefix": ("padre", {**GRID, **PREFIX}, {}, ShapeError, "grid", ["12 tokens for 9", "prefix"]),
    "grid-axes": ("padre", GRID, {"grid": (12,)}, ShapeError, "grid", ["(12,)", "2 axes", "other grid"]),
    "grid-3-axes": ("poly_sa", GRID, {"grid": (1, 3, 4)}, ShapeError, "grid", ["(1, 3, 4)", "2 axes"]),
    "grid-float": ("padre", GRID, {"grid": (3.0, 4)}, ShapeError, "grid", ["(3.0, 4)"]),
    "grid-number": ("padre", GRID, {"grid": 12}, ShapeError, "grid", ["12", "2 axes"]),
    "grid-negative": ("padre", GRID, {"grid": (-3, -4)}, ShapeError, "grid", ["(-3, -4)"]),
    "grid-missing": ("pom", FLAT, {}, ShapeError, "grid", ["None", "(H, W)", 'rotary="2d"']),
    "grid-rotary": ("pom", FLAT, {"grid": (5, 3)}, ShapeError, "grid", ["(5, 3) = 15 tokens for 12"]),
    "grid-full": ("padre", FULL, {"grid": (4, 3)}, ShapeError, "grid", ["(4, 3)", "(3, 4)", 'weight="channel"']),
    "grid-full-1d": ("padre", {**FULL, "grid": (9,)}, {}, ShapeError, "grid", ["(12,)", "(9,)", "built for"]),
    # what a mixer cannot do; the message names those that can
    "no-arbitrary-floor": ("linear_floor", {}, {"mask": SEEN}, CapabilityError, "mask", ["mask of shape", "pom, softmax"]),
    "no-mask-learned": ("poly_sa", GRID, {"mask": PAD}, CapabilityError, "mask", ["mask", "pom", "other options"]),
    "no-arbitrary": ("qt", {}, {"mask": SEEN}, CapabilityError, "mask", ["mask of shape (2, 12, 12)", "pom, softmax"]),
    "no-arbitrary-nl": ("poly_nl", {}, {"mask": SEEN}, CapabilityError, "mask", ["mask", "pom, softmax"]),
    "no-context": ("padre", {}, {"context": X}, CapabilityError, "context", ["context", "pom, qt, softmax"]),
    "no-context-2d": ("pom", FLAT, {"context": X, **GRID}, CapabilityError, "context", ["context", "qt, softmax"]),
    "no-causal": ("poly_nl", {}, CAUSAL, CapabilityError, "causal", ["causal", "padre, pom, qt, softmax"]),
    "no-causal-padre": ("padre", {}, CAUSAL, CapabilityError, "causal", ["causal", "pom, qt, softmax", "other options"]),
    "no-blocks": ("qt", {}, {"causal": 3}, CapabilityError, "causal", ["causal", "blocks of 3", "pom, softmax"]),
    "no-segments": ("qt", {}, {"segments": IDS}, CapabilityError, "segments", ["segments", "pom, softmax"]),
    "no-segments-2d": ("pom", FLAT, {"segments": IDS, **GRID}, CapabilityError, "segments", ["segments", "other options"]),
    "no-grid": ("qt", {}, GRID, CapabilityError, "grid", ["grid=(3, 4)", "padre, poly_sa, pom"]),
    "no-grid-pom": ("pom", {}, GRID, CapabilityError, "grid", ["grid=(3, 4)", "padre, poly_sa", "other options"]),
    "no-grid-mean": ("poly_sa", MEAN, GRID, CapabilityError, "grid", ["grid=(3, 4)", "padre, pom", "other options"]),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CALLS))
def test_calls_are_checked_before_any_compute(case):
    name, options, arguments, kind, argument, words = CALLS[case]
    mixer, arguments = polymix.create_mixer(name, 8, **options), {"x": x(), **arguments}
    with NoCompute():
        says(lambda: mixer(**arguments), kind, argument, *words)


@pytest.mark.parametrize("name", ["softmax", "poly_nl", "poly_sa", "padre", "pom", "padre-full"])
@pytest.mark.parametrize("way", ["prefill", "step"])
def test_recurrence_where_there_is_none(name, way):
    options = {"poly_sa": GRID, "pom": FLAT, "padre-full": {"weight": "full", "grid": (12,), **CAUSAL}}.get(name, {})
    name = name.split("-")[0]
    mixer = polymix.create_mixer(name, 8, **options)
    others = [other for other in ("padre", "pom", "qt") if other != name]
    cure = "other options" if name in ("padre", "pom") else "Use one of those"
    with NoCompute():
        says(lambda: getattr(mixer, way)(X), CapabilityError, name, "prefill and step", ", ".join(others), cure)


RECURRENT = {"pom": {}, "qt": {}, "padre": CAUSAL}


@pytest.mark.parametrize("name", list(RECURRENT))
def test_prefill_and_step_check_their_tokens(name):
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    narrow, wide = x(2, 7), X.double()
    with NoCompute():
        says(lambda: mixer.step(X), ShapeError, "x_t", "(2, 12, 8)", "(B, 8) or (B, 1, 8)", "prefill for more tokens")
        says(lambda: mixer.step(X[0, 0]), ShapeError, "x_t", "(8,)", "(B, 8) or (B, 1, 8)")
        says(lambda: mixer.step(None), ShapeError, "x_t", "NoneType", "(B, 8) or (B, 1, 8)")
        says(lambda: mixer.step(X[:, 0], causal=0), MaskError, "causal", "0", "a block length of at least 1")
        says(lambda: mixer.step(narrow), ShapeError, "x", "(2, 1, 7)", "(B, N, 8)")
        says(lambda: mixer.prefill(wide), ShapeError, "x", "float64")
        says(lambda: mixer.prefill(X, mask=IDS), MaskError, "mask", "int64")
        says(lambda: mixer.prefill(X, mask=PAD[:, 1:]), MaskError, "mask", "(2, 11)")


@pytest.mark.parametrize("name", list(RECURRENT))
@pytest.mark.parametrize("shape", [(2, 12, 12), (12, 12, 12)])
def test_prefill_takes_padding_alone(name, shape):
    """An arbitrary mask has no meaning for a running state; (12, 12, 12) would even broadcast."""
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    with pytest.raises(errors.MaskError, match=r"mask.*\(B, N\), True"):
        mixer.prefill(x(shape[0], 12, 8), mask=torch.ones(shape, dtype=torch.bool))


STATES = {
    "pom": ("PomState", lambda: polymix.create_mixer("pom", 8, expand=3), "(2, 24)"),
    "qt": ("QtState", lambda: polymix.create_mixer("qt", 8, heads=2), "(2, 2, 9, 5)"),
    "padre": ("PadreState", lambda: polymix.create_mixer("padre", 8, kernel_size=3, causal=True), "(2, 2, 8)"),
}


@pytest.mark.parametrize("name", list(RECURRENT))
def test_states_of_another_mixer_or_batch(name):
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    kind, other, _ = STATES[name]
    foreign = [polymix.create_mixer(n, 8, **RECURRENT[n]).prefill(X)[1] for n in RECURRENT if n != name]
    for state in (*foreign, other().prefill(X)[1], mixer.prefill(x(3, 12, 8))[1], (1, 2), "state", {}):
        with NoCompute():
            for call in (lambda s=state: mixer.prefill(X, s), lambda s=state: mixer.step(X[:, 0], s)):
                says(call, StateError, "state", type(state).__name__, f"a {kind}", "prefill or step of this mixer")


@pytest.mark.parametrize("name", list(RECURRENT))
def test_a_state_of_another_shape_says_which(name):
    """The type alone explains nothing where both sides are the same type."""
    mixer, (_, other, shape) = polymix.create_mixer(name, 8, **RECURRENT[name]), STATES[name]
    says(lambda: mixer.prefill(X, other().prefill(X)[1]), StateError, "state", shape)


@pytest.mark.parametrize("name", list(RECURRENT))
def test_a_state_on_another_device(name):
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    _, state = mixer.prefill(X)
    away = type(state)(*(tuple(w.to("meta") for w in p) if isinstance(p, tuple) else p.to("meta") for p in state))
    says(lambda: mixer.prefill(X, away), ANY, "state", "meta")


def test_autocast_takes_other_float_types():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert polymix.create_mixer("pom", 8)(x().bfloat16()).shape == (2, 12, 8)
