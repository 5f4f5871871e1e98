"""Step ops: every op against the time that its bytes take to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_steps.bench import DTYPES, Bench, Jobs, Row, foreseen, reason, timing
from gpu_steps.ceilings import copied, multiplied
from polymix.measure.case import disagreement
from polymix.measure.shapes import near_square
from polymix.ops.padre import padre_step
from polymix.ops.pom import linear_powers, pom_pool, pom_scan
from polymix.ops.pom.eager import weigh
from polymix.ops.pooled import gate_tokens, pooled_product
from polymix.ops.qt import feature_size, qt_causal, qt_moments, qt_query
from polymix.ops.shared.causal_sums import CHUNK

PASSES = ("forward", "training")
TARGET, FROM = 0.8, 16384  # share of the copy's bytes/s, from so many tokens on
OF_PRODUCTS = 0.6  # share of the products' FLOP/s, where arithmetic on tensor cores takes longer than the copy
SLOW = "padre_step 11×11"  # under the interpreter
Normal = Callable[..., Tensor]  # a shape -> random numbers


@dataclass(frozen=True)
class Case:
    """An op as it is timed.

    Args:
        tests: the file with its kernel's tests.
        make: (normal, batch, n, dim, heads) -> its tensors.
        run: (impl, n, *tensors) -> its output.
        flops: (dim, heads) -> operations of a forward per token.
        tensor_cores: whether its half-precision form may use tensor cores, through tf32.
    """

    tests: str
    make: Callable[[Normal, int, int, int, int], Sequence[Tensor]]
    run: Callable[..., Tensor]
    flops: Callable[[int, int], float]
    tensor_cores: bool = False


def _pom(normal: Normal, b: int, n: int, dim: int, heads: int) -> Sequence[Tensor]:
    return normal(b, n, 2 * dim), normal(2 * dim, 2)


def _product(normal: Normal, b: int, n: int, dim: int, heads: int) -> Sequence[Tensor]:
    return normal(b, n, dim), normal(2 * dim, dim) / dim**0.5, normal(2 * dim), normal(2 * dim, 2)


def _padre(k: int, normal: Normal, b: int, n: int, dim: int, heads: int) -> Sequence[Tensor]:
    return normal(b, n, dim), normal(dim, 1, k, k) / k, normal(dim), normal(b, n, dim)


def _per_head(count: int, normal: Normal, b: int, n: int, dim: int, heads: int) -> list[Tensor]:
    """Views into one product of all, as a mixer has them: (B, h, N, d) each."""
    return list(normal(b, n, count, heads, dim // heads).permute(2, 0, 3, 1, 4).unbind(0))


def _qt(form: str, normal: Normal, b: int, n: int, dim: int, heads: int) -> Sequence[Tensor]:
    q, k, v = _per_head(3, normal, b, n, dim, heads)
    return (q, k, v) if form == "full" else (q, k, v, 1 + normal(3, heads, 1, 1) / 8)


def _pooled(normal: Normal, b: int, n: int, dim: int, heads: int) -> Sequence[Tensor]:
    k, v = (part.transpose(1, 2) for part in _per_head(2, normal, b, n, dim, heads))
    return k, v, normal(heads, n)


def _gated(normal: Normal, b: int, n: int, dim: int, heads: int) -> Sequence[Tensor]:
    return normal(b, n, heads, dim // heads), normal(b, heads, dim // heads).float(), normal(heads, n)


def _run_pom(op: Any, impl: str, n: int, h: Tensor, alpha: Tensor) -> Tensor:
    between = (None,) * (3 if op is pom_pool else 4)  # start of a running sum, mask, cos, sin
    places = () if op is pom_pool else (None, None)
    return op(h, alpha, *between, *places, "gelu", 1, impl=impl)


def _run_two_passes(impl: str, n: int, x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    return _run_pom(pom_pool, impl, n, F.linear(x, weight, bias), alpha)


def _run_one_pass(impl: str, n: int, x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    return weigh(linear_powers(x, weight, bias, None, "gelu", 2, impl=impl), alpha)


def _run_padre(impl: str, n: int, *tensors: Tensor) -> Tensor:
    return padre_step(*tensors, list(near_square(n)), False, 1, impl=impl)


def _run_qt(form: str, impl: str, n: int, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None = None) -> Tensor:
    moments = qt_moments(k, v, scale, None, form, 2, impl=impl)
    return qt_query(q, moments, scale, form, 2, impl=impl)


def _run_causal(form: str, impl: str, n: int, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None = None) -> Tensor:
    return qt_causal(q, k, v, scale, None, None, form, 2, impl=impl)[0]


def _padre_flops(k: int, dim: int, heads: int) -> float:
    return (2.0 * k * k + 2) * dim


def _qt_flops(form: str, chunk: int, dim: int, heads: int) -> float:
    d = dim // heads
    return 2.0 * heads * (2 * feature_size(d, form, 2) + chunk) * (d + 1)


CASES = {
    "pom_pool": Case("pom/test_triton.py", _pom, partial(_run_pom, pom_pool), lambda dim, heads: 8.0 * dim),
    "pom_scan": Case("pom/test_triton.py", _pom, partial(_run_pom, pom_scan), lambda dim, heads: 10.0 * dim),
    **{
        f"product and pom_pool, {passes} pass{'' if passes == 'one' else 'es'}": Case(
            "pom/test_triton.py", _product, run, lambda dim, heads: 4.0 * dim * dim + 8.0 * dim, True
        )
        for passes, run in (("two", _run_two_passes), ("one", _run_one_pass))
    },
    **{
        f"padre_step {k}×{k}": Case(
            "padre/test_triton.py", partial(_padre, k), _run_padre, partial(_padre_flops, k)
        )
        for k in (3, 11)
    },
    **{
        f"qt {form}": Case(
            "qt/test_triton.py", partial(_qt, form), partial(_run_qt, form), partial(_qt_flops, form, 0), True
        )
        for form in ("compact", "full")
    },
    **{
        f"qt_causal {form}": Case(
            "qt/test_triton.py", partial(_qt, form), partial(_run_causal, form), partial(_qt_flops, form, CHUNK), True
        )
        for form in ("compact", "full")
    },
    "pooled_product": Case(
        "pooled/test_triton.py", _pooled, lambda impl, n, k, v, p: pooled_product(k, v, p, None, impl=impl),
        lambda dim, heads: 3.0 * dim,
    ),
    "gate_tokens": Case(
        "pooled/test_triton.py", _gated, lambda impl, n, q, gate, p: gate_tokens(q, gate, p, impl=impl),
        lambda dim, heads: 2.0 * dim,
    ),
}  # fmt: skip


def jobs(bench: Bench) -> Jobs:
    sizes = bench.sizes
    cases = {name: case for name, case in CASES.items() if name != SLOW or not bench.dry}
    for dtype, (name, case) in product(DTYPES, cases.items()):
        if bench.finished(case.tests):  # what has no verdict yet waits for another call
            yield f"op {name} {dtype}", partial(_check, bench, name, dtype)
    for batch, dtype, pass_, n, (name, case) in product(sizes.batch, DTYPES, PASSES, sizes.tokens, cases.items()):
        if bench.finished(case.tests):
            yield f"op {name} {dtype} {pass_} {batch}×{n}", partial(_measure, bench, name, dtype, pass_, batch, n)


def prepared(bench: Bench, case: Case, dtype: str, batch: int, n: int) -> list[Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device, dtype=getattr(torch, dtype))

    made = case.make(normal, batch, n, bench.sizes.dim, bench.sizes.heads)
    return [part.requires_grad_() for part in made]


def call(
    case: Case, pass_: str, n: int, tensors: Sequence[Tensor], grad: Tensor | None = None, impl: str = "triton"
) -> list[Tensor]:
    """The output and, in training, the gradients of the tensors."""
    if pass_ == "forward":
        with torch.inference_mode():
            return [case.run(impl, n, *tensors)]
    out = case.run(impl, n, *tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def _check(bench: Bench, name: str, dtype: str) -> list[Row]:
    """Check the op at a small size, as it is timed, against its definition in float64."""
    case, n, row = CASES[name], bench.sizes.check_tokens, {"op": name, "dtype": dtype, "pass": "check"}
    if why := bench.failed_tests(case.tests):
        return [{**row, "failed": why}]
    tensors = prepared(bench, case, dtype, 2, n)
    exact = [part.detach().double().requires_grad_() for part in tensors]
    try:
        out = call(case, "forward", n, tensors)[0]
        grad = torch.randn(out.shape, dtype=out.dtype, device=out.device)
        got = call(case, "training", n, tensors, grad)
        expected = call(case, "training", n, exact, grad.double(), "eager")
        return [{**row, "failed": disagreement(got, [part.to("cpu") for part in expected])}]
    except Exception as error:  # any failure becomes its result
        return [{**row, "failed": reason(error)}]


def bytes_of(tensors: Sequence[Tensor], out: Tensor, pass_: str) -> int:
    """Inputs read and output written once; in training, both read once more and the inputs' gradients written."""
    into, outof = (sum(t.numel() * t.element_size() for t in part) for part in (tensors, [out]))
    return into + outof if pass_ == "forward" else 3 * into + 2 * outof


def _measure(bench: Bench, name: str, dtype: str, pass_: str, batch: int, n: int) -> list[Row]:
    case, sizes = CASES[name], bench.sizes
    row: Row = {
        "op": name,
        "dtype": dtype,
        "pass": pass_,
        "batch": batch,
        "tokens": n,
        "seconds": None,
        "verdict": None,
    }
    check = bench.rows("ops", op=name, dtype=dtype, **{"pass": "check"})[0]
    fewer = [r for r in bench.rows("ops", op=name, dtype=dtype, batch=batch, **{"pass": pass_}) if r["tokens"] < n]
    if stopped := check["failed"] or foreseen(fewer, n, 1):
        return [{**row, "stopped": stopped}]
    try:
        tensors = prepared(bench, case, dtype, batch, n)
        out = call(case, "forward", n, tensors)[0]
        grad = None if pass_ == "forward" else torch.randn(out.shape, dtype=out.dtype, device=out.device)
        runs = bench.clock({name: partial(call, case, pass_, n, tensors, grad)}, sizes.seconds)[name]
    except torch.OutOfMemoryError as error:
        return [{**row, "stopped": reason(error)}]
    moved = bytes_of(tensors, out, pass_)
    flops = batch * n * case.flops(sizes.dim, sizes.heads) * (1 if pass_ == "forward" else 3)
    tops = multiplied(bench, "tf32" if case.tensor_cores and dtype != "float32" else "float32")
    memory = moved / copied(bench) >= flops / tops
    share = moved / runs.median / copied(bench)
    reached = share if memory else flops / runs.median / tops
    judged = n >= FROM and (memory or case.tensor_cores)
    return [{
        **row, **timing(runs), "stopped": None, "bytes": moved, "flops": flops, "byte_share": share,
        "flop_share": flops / runs.median / tops, "bound": "memory" if memory else "compute",
        "verdict": ("PASS" if reached >= (TARGET if memory else OF_PRODUCTS) else "FAIL") if judged else None,
    }]  # fmt: skip
