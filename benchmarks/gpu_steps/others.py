"""Step others: the same work by other people's kernels, if they are available."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpu_steps.bench import DTYPES, Bench, Jobs, Row, foreseen, reason, timing
from gpu_steps.ops import PASSES
from polymix.errors import OptionError
from polymix.measure.case import disagreement
from polymix.ops.pom import pom_pool, pom_scan
from polymix.ops.qt import qt_causal
from polymix.ops.qt.eager import least, quotient

TARGET, UP_TO = 1.5, 4  # times as fast as the PoM authors' kernels, up to this batch
BATCH = (1, 4)
BASED = 16  # channels of a head, the most that flash-linear-attention's Based takes
Pair = Callable[..., Tensor]


def jobs(bench: Bench) -> Jobs:
    pairs: list[tuple[str, str, Pair, Pair]] = []
    if bench.pom is not None:
        pairs += authors(bench.pom)
    if flash() is not None:
        pairs.append(("flash-linear-attention, Based", "qt/test_triton.py", _qt, _based))
    batches = [b for b in BATCH if b in bench.sizes.batch]
    for batch, dtype, pass_, n in product(batches, DTYPES, PASSES, bench.sizes.tokens):
        for name, tests, ours, theirs in pairs:
            if bench.finished(tests):
                row: Row = {"what": name, "dtype": dtype, "pass": pass_, "batch": batch, "tokens": n}
                yield f"{name} {dtype} {pass_} {batch}×{n}", partial(_measure, bench, row, tests, ours, theirs)


def missing(bench: Bench) -> list[str]:
    """What is not compared, and why."""
    absent = [] if bench.pom else ["the PoM authors' kernels: no --pom PATH of a clone of github.com/davidpicard/pom"]
    return absent if flash() else [*absent, "flash-linear-attention: not installed"]


def flash() -> Any:
    """flash-linear-attention's chunked Based; None if it is not installed or cannot be imported."""
    try:
        from fla.ops.based import fused_chunk_based  # type: ignore[import-not-found]
    except Exception:  # an incompatible version of it, or of triton
        return None
    return fused_chunk_based


def _module(clone: Path, file: str) -> ModuleType:
    path = clone / "pom" / file
    if not path.is_file():
        raise OptionError("--pom", clone, f"a clone of github.com/davidpicard/pom, with pom/{file}", "git clone it.")
    spec = importlib.util.spec_from_file_location(f"authors_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # triton looks a kernel's module up there
    spec.loader.exec_module(module)
    return module


@cache
def authors(clone: Path) -> list[tuple[str, str, Pair, Pair]]:
    """Their sums and ours, divided by the same number of tokens."""
    mean = _module(clone, "pom_triton.py").poly_agg_mean_triton
    causal = _module(clone, "pom_triton_causal.py").poly_agg_causal_triton
    return [
        ("PoM authors, mean", "pom/test_triton.py", _mean, lambda h, alpha: mean(h, alpha, alpha.shape[1]).squeeze(1)),
        ("PoM authors, causal", "pom/test_triton.py", _causal, lambda h, alpha: causal(h, alpha, alpha.shape[1])),
    ]


def _mean(h: Tensor, alpha: Tensor) -> Tensor:
    return pom_pool(h, alpha, None, None, None, "clamped_leaky_relu", 1, impl="triton") / h.shape[1]


def _causal(h: Tensor, alpha: Tensor) -> Tensor:
    running = pom_scan(h, alpha, *(None,) * 6, "clamped_leaky_relu", 1, impl="triton")
    return running / torch.arange(1, h.shape[1] + 1, device=h.device)[:, None]


def _qt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, N, h, d), as flash-linear-attention has them."""
    heads_first = (part.transpose(1, 2) for part in (q, k, v))
    weighted, _ = qt_causal(*heads_first, None, None, None, "full", 2, impl="triton")
    seen = torch.arange(1, q.shape[1] + 1, device=q.device)[:, None]
    return quotient(weighted, least(seen, weighted.dtype)).to(q.dtype).transpose(1, 2)


def _based(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash()(q, k, v)


def _tensors(bench: Bench, row: Row) -> list[Tensor]:
    kw = {"device": bench.device, "dtype": getattr(torch, row["dtype"])}
    if row["what"].startswith("PoM"):
        h = torch.randn(row["batch"], row["tokens"], 2 * bench.sizes.dim, **kw)
        made = [h, torch.randn(2 * bench.sizes.dim, 2, **kw)]
    else:
        heads = max(1, bench.sizes.dim // BASED)
        made = [torch.randn(row["batch"], row["tokens"], heads, BASED, **kw) for _ in range(3)]
    return [part.requires_grad_() for part in made]


def _run(function: Pair, tensors: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    if grad is None:
        with torch.no_grad():
            return [function(*tensors)]
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


def _measure(bench: Bench, row: Row, tests: str, ours: Pair, theirs: Pair) -> list[Row]:
    """Our time and theirs in turn, if both compute the same."""
    key = {name: value for name, value in row.items() if name != "tokens"}
    fewer = [r for r in bench.rows("others", **key) if r["tokens"] < row["tokens"]]
    row = {**row, "seconds": None, "theirs": None, "ratio": None, "verdict": None}
    if stopped := bench.failed_tests(tests) or _slow(fewer, row["tokens"]):
        return [{**row, "stopped": stopped}]
    try:
        tensors = _tensors(bench, row)
        out = _run(ours, tensors, None)[0]
        grad = None if row["pass"] == "forward" else torch.randn_like(out)
        pairs = zip(_run(theirs, tensors, grad), _run(ours, tensors, grad), strict=True)
        for got, exact in pairs:
            if (got - exact).abs().max() > 0.02 * exact.abs().max() or got.shape != exact.shape:
                why = disagreement([got], [exact.to("cpu", torch.float64)])
                return [{**row, "stopped": f"they compute something else: {why}"}]
        runs = bench.clock({f: partial(_run, f, tensors, grad) for f in (ours, theirs)}, bench.sizes.seconds)
    except Exception as error:  # any failure becomes its result
        return [{**row, "stopped": reason(error)}]
    ratio = runs[theirs].median / runs[ours].median
    judged = row["what"].startswith("PoM") and row["batch"] <= UP_TO
    verdict = ("PASS" if ratio >= TARGET else "FAIL") if judged else None
    row |= {"theirs": runs[theirs].median, "their_runs": list(runs[theirs].runs), "ratio": ratio, "verdict": verdict}
    return [{**row, **timing(runs[ours]), "stopped": None}]


def _slow(fewer: Sequence[Row], n: int) -> str | None:
    """Theirs are the slower ones where tokens are many."""
    return foreseen([r if r["stopped"] else {**r, "seconds": max(r["seconds"], r["theirs"])} for r in fewer], n, 1)
