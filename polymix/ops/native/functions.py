"""What the C functions take: the table of their arguments, by which `library.call` checks each array before C gets it.

C trusts what it is told: of a tensor of another dtype or size it would read, or overwrite, the memory behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

_ROWS, _OUT = "tokens x: batch, tokens, dim", "tokens y: batch, tokens, out"
_MASK, _HEADS, _MOMENTS = "mask? mask: batch, tokens", "floats? p: heads, tokens", (
    "batch, heads, 1 + degree * (dim // heads), dim // heads + 1")  # fmt: skip
_X_GRAD = "tokens? grad_x: batch, tokens, dim"
# The arguments of each function, in order. A pointer is "kind name: shape", or "kind? name: shape" if it may be NULL;
# everything else is a number, or `s`, the struct of sizes, whose fields stand in the shapes. The kinds:
#     values   an array of the dtype of the call, which is bfloat16 if `bf16` is set, else float32
#     floats, counts, mask          arrays of float32, int64 and booleans
#     tokens, heads                 a tensor with contiguous channels, for the structs Tokens and Heads: an address and
#                                   the other strides; in the dtype of the call
#     linear, map                   a contiguous weight (out, size) and a contiguous bias (out) or None, for the struct
#                                   Linear. linear: in float32, but the weight in bfloat16 if `s.pairs` is set; map: in
#                                   the dtype of the call
#     taps                          the struct Taps
FUNCTIONS: Mapping[str, str] = {
    "linear_gated": f"{_ROWS}; linear w: width, dim; floats gate: batch, width; {_HEADS}; linear? last: out, width;"
    "tokens y: batch, tokens, out if last else width; s",
    "linear_gated_backward": f"tokens grad: batch, tokens, out if last else width; {_ROWS}; linear w: width, dim;"
    f"floats gate: batch, width; {_HEADS}; linear? last: out, width; {_X_GRAD}; floats? grad_w: width, dim;"
    "floats? grad_b: width; floats grad_gate: batch, width; floats? grad_p: batch, heads, tokens;"
    "floats? grad_last: out, width; floats? grad_last_b: out; s",
    "depthwise": "tokens x: batch, h * w, dim; floats? shift: dim; tokens? scale: batch, h * w, dim;"
    "taps weight: dim, kh, kw; floats? bias: dim; tokens? times: batch, oh * ow, dim; tokens y: batch, oh * ow, dim; s",
    "depthwise_weight": "tokens x: batch, h * w, dim; tokens grad: batch, oh * ow, dim;"
    "tokens? scale: batch, oh * ow, dim; taps? weight: dim, kh, kw; floats? bias: dim; s",
    "linear_powers": f"{_ROWS}; linear w: width, dim; {_MASK}; floats sums: batch, degree, width; s",
    "linear_powers_backward": f"floats grad: batch, degree, width; {_ROWS}; linear w: width, dim; {_MASK}; {_X_GRAD};"
    "floats? grad_w: width, dim; floats? grad_b: width; s",
    "pom_pooled": f"{_ROWS}; linear poly: width, dim; linear gate: width, dim; linear proj: out, width;"
    f"floats alpha: width, degree; {_MASK}; {_OUT}; gating; mean; s",
    "pom_causal": f"{_ROWS}; linear poly: width, dim; linear gate: width, dim; linear proj: out, width;"
    f"floats alpha: degree, width; {_MASK}; floats? start: batch, width; counts? seen: batch;"
    f"floats? end: batch, width; {_OUT}; gating; mean; s",
    "linear_pairs": f"{_ROWS}; linear w: 2 * width, dim; {_HEADS}; {_MASK}; floats sums: batch, width; s",
    "linear_pairs_backward": f"floats grad: batch, width; {_ROWS}; linear w: 2 * width, dim; {_HEADS}; {_MASK};"
    f"{_X_GRAD}; floats? grad_w: 2 * width, dim; floats? grad_b: 2 * width; floats? grad_p: batch, heads, tokens; s",
    "moments": f"{_ROWS}; {_MASK}; floats count: batch; floats centre: batch, dim; floats moment: batch, dim, dim; s",
    "centres": f"{_ROWS}; {_MASK}; floats count: batch; floats centre: batch, dim; floats rest: batch, dim; s",
    "moments_backward": f"{_ROWS}; {_MASK}; floats centre: batch, dim; floats a: batch, dim, dim; floats c: batch, dim;"
    "tokens y: batch, tokens, dim; s",
    "linear_scaled": f"{_ROWS}; floats scale: batch, dim; linear w: out, dim; floats? rest: 1; {_OUT}; s",
    "linear_scaled_backward": f"tokens grad: batch, tokens, out; {_ROWS}; floats scale: batch, dim;"
    f"linear w: out, dim; floats? rest: 1; {_X_GRAD}; floats? grad_scale: batch, dim; floats? grad_w: out, dim;"
    "floats? grad_b: out; floats? grad_rest: threads; s",
    "qt_pool": f"{_ROWS}; linear w: 2 * dim, dim; {_MASK}; floats sums: {_MOMENTS}; s",
    "qt_pool_backward": f"floats grad: {_MOMENTS}; {_ROWS}; linear w: 2 * dim, dim; {_MASK}; {_X_GRAD};"
    "floats? grad_w: 2 * dim, dim; floats? grad_b: 2 * dim; s",
    "qt_spread": f"{_ROWS}; linear w: dim, dim; floats moments: {_MOMENTS}; floats bounds: batch;"
    f"linear last: out, dim; {_OUT}; s",
    "qt_spread_backward": f"tokens grad: batch, tokens, out; {_ROWS}; linear w: dim, dim; floats moments: {_MOMENTS};"
    f"floats bounds: batch; linear last: out, dim; {_X_GRAD}; floats? grad_w: dim, dim; floats? grad_b: dim;"
    f"floats grad_m: {_MOMENTS}; floats? grad_last: out, dim; floats? grad_last_b: out; s",
    "qt_whole": f"{_ROWS}; linear w: 3 * dim, dim; floats scale: 3, heads; {_MASK}; floats bounds: batch;"
    f"linear last: out, dim; {_OUT}; s",
    "qt_causal": f"{_ROWS}; linear w: 3 * dim, dim; floats scale: heads, 3; {_MASK}; floats bounds: batch, tokens;"
    f"floats? start: {_MOMENTS}; floats? end: {_MOMENTS}; linear last: out, dim; {_OUT}; s",
    "decode_attention": "heads q: batch, heads, 1, width; heads k: batch, heads, tokens, width;"
    "heads v: batch, heads, tokens, width; mask? mask: batch if mask_stride else 1, tokens;"
    "heads y: batch, heads, 1, width; s",
    "decode_convolution": "values x: rows, width; floats window: rows, dilation * (taps - 1), width;"
    "values w: width, taps; values y: rows, width; floats next: rows, dilation * (taps - 1), width;"
    "rows; width; taps; dilation; bf16; threads",
    "decode_pom": "values x: rows, poly.size; map poly: poly.out, poly.size; map gate: poly.out, poly.size;"
    "map proj: proj.out, poly.out; values alpha: poly.out, degree; floats before: rows, poly.out;"
    "counts count: rows; floats after: rows, poly.out; values gated: rows, poly.out; values y: rows, proj.out; s",
    "decode_linear": "values x: rows, size; values w: out, size; values? bias: out; values? factor: rows, out;"
    "values y: rows, out; rows; size; out; kind; bf16; threads",
    "decode_feed_forward": "values x: rows, up.size; map up: up.out, up.size; map? gate: up.out, up.size;"
    "map down: down.out, up.out; values hidden: rows, up.out; values y: rows, down.out; rows; kind; bf16; threads",
    "decode_rms_norm": "values x: rows, width; values w: width; values y: rows, width; rows; width; eps; bf16",
}
_DTYPES = {"floats": torch.float32, "linear": torch.float32, "taps": torch.float32, "counts": torch.int64,
           "mask": torch.bool}  # of the kinds that do not have the dtype of the call  # fmt: skip
STRIDED, LINEAR = ("tokens", "heads"), ("linear", "map")
_STRUCTS = (*STRIDED, *LINEAR, "taps")


class Pointer(NamedTuple):
    """A pointer argument. dtype: None for that of the call."""

    position: int
    name: str
    kind: str
    dtype: torch.dtype | None
    optional: bool


class Function(NamedTuple):
    """The pointers of a function; `sizes` takes its arguments, and returns `bf16`, `pairs` and each array's size, or
    shape.
    """

    pointers: tuple[Pointer, ...]
    sizes: Callable[..., tuple[Any, ...]]


@cache
def read(function: str) -> Function:
    """Read an entry of FUNCTIONS."""
    text = FUNCTIONS[function].replace(".out", "[0].shape[0]").replace(".size", "[0].shape[1]")  # of linear maps
    parts = [part.strip() for part in text.split(";")]
    names = [part.partition(":")[0].split()[-1] for part in parts]
    kinds = {i: part.split()[0] for i, part in enumerate(parts) if ":" in part}
    pointers = tuple(Pointer(i, names[i], kind.rstrip("?"), _DTYPES.get(kind.rstrip("?")), kind.endswith("?"))
                     for i, kind in kinds.items())  # fmt: skip

    def field(name: re.Match[str]) -> str:
        return name[0] if name[0] in (*names, "if", "else") else f"s.{name[0]}"

    shapes, identifier = [], r"(?<![.])\b[a-z_][a-z_0-9]*"
    for i, pointer in zip(kinds, pointers, strict=True):
        sizes = [f"({size})" for size in re.sub(identifier, field, parts[i].partition(":")[2]).split(",")]
        shapes.append(f"({', '.join(sizes)})" if pointer.kind in _STRUCTS else " * ".join(sizes))
    bf16 = "bf16" if "bf16" in names else "s.bf16"
    pairs = "s.pairs" if any(pointer.kind == "linear" for pointer in pointers) else "0"
    return Function(pointers, eval(f"lambda {', '.join(names)}: ({bf16}, {pairs}, {', '.join(shapes)})"))
