"""The speeds and sizes that polymix aims at on a CPU, each measured beside its target, in one run.

    python benchmarks/targets.py benchmarks/results/targets.json [--pom CLONE] [--only forward,memory] [--threads 2]

Batch 1, 192 channels, 3 heads where there are heads. Times are medians of calls taken in turn. A target that is not
met is printed as such. CLONE is a checkout of the PoM authors' code, which is compared with where it is given.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import polymix
from polymix.bench import floor, interleaved, manifest, peak_memory
from polymix.bench.measure import once
from polymix.ops.depthwise import depthwise_conv

DIM, HEADS, LENGTH = 192, 3, 4096
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Row(NamedTuple):
    """`value` is to be at most, or at least, `target`."""

    group: str
    what: str
    value: float
    sign: str
    target: float
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.sign == "≤" else self.value >= self.target


def side(n: int) -> tuple[int, int]:
    return (math.isqrt(n), math.isqrt(n))


def mixer(name: str, n: int, dtype: torch.dtype = torch.float32, **options: Any) -> polymix.TokenMixer:
    specs: dict[str, tuple[str, dict[str, Any]]] = {
        "padre-2": ("padre", {"degree": 2, "grid": side(n)}), "padre-3": ("padre", {"degree": 3, "grid": side(n)}),
        "pom": ("pom", {}), "qt": ("qt", {"heads": HEADS}), "poly_nl": ("poly_nl", {}),
        "poly_sa": ("poly_sa", {"heads": HEADS, "grid": side(n)}), "softmax": ("softmax", {"heads": HEADS}),
    }  # fmt: skip
    kind, own = specs[name]
    return polymix.create_mixer(kind, DIM, dtype=dtype, **{**own, **options}).eval()


MIXERS = ("padre-2", "padre-3", "pom", "qt", "poly_sa", "poly_nl")


def tokens(n: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, n, DIM, dtype=dtype)


@torch.inference_mode()
def forward(_: argparse.Namespace) -> Iterator[Row]:
    """Time over the floor."""
    for kind, dtype in TYPES.items():
        calls: dict[Any, Callable[[], Any]] = {}
        x = tokens(LENGTH, dtype)
        for name in MIXERS:
            module = mixer(name, LENGTH, dtype)
            calls[name, "mixer"] = partial(module, x)
            calls[name, "floor"] = floor(module.cost(LENGTH), dtype=dtype)
        times = interleaved(calls, seconds=1.5)
        for name in MIXERS:
            ours, bare = times[name, "mixer"].median, times[name, "floor"].median
            detail = f"{1e3 * ours:.2f} ms over {1e3 * bare:.2f}"
            limit = 1.15 if kind == "float32" else 1.25
            yield Row("forward", f"{name} / floor, {kind}, N = {LENGTH:,}", ours / bare, "≤", limit, detail)


@torch.inference_mode()
def attention(_: argparse.Namespace) -> Iterator[Row]:
    """Attention's time over that of padre-2, folded, and of pom."""
    goals = {"float32": (15, 55, 220, 7.5), "bfloat16": (30, 115, 450, 20)}
    for kind, dtype in TYPES.items():
        *ratios, pom = goals[kind]
        for n, goal in zip((4096, 16384, 65536), ratios, strict=True):
            x = tokens(n, dtype)
            softmax, padre = mixer("softmax", n, dtype), mixer("padre-2", n, dtype).fold()
            calls: dict[str, Callable[[], Any]] = {"padre-2": partial(padre, x)}
            if n == LENGTH:
                calls["pom"] = partial(mixer("pom", n, dtype), x)
            if n < 65536:
                calls["softmax"] = partial(softmax, x)
            times = {name: timing.median for name, timing in interleaved(calls, seconds=1.5).items()}
            base = times["softmax"] if n < 65536 else once(partial(softmax, x), "cpu")
            for name, limit in (("padre-2", goal), ("pom", pom)):
                if name in times:
                    detail = f"{1e3 * base:.1f} ms over {1e3 * times[name]:.2f}"
                    what = f"attention / {name}{' folded' if name == 'padre-2' else ''}, {kind}, N = {n:,}"
                    yield Row("attention", what, base / times[name], "≥", limit, detail)


def step(module: torch.nn.Module, x: torch.Tensor, **call: Any) -> Callable[[], Any]:
    grad = torch.randn_like(module(x, **call))

    def run() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x, **call).backward(grad)

    return run


def training(_: argparse.Namespace) -> Iterator[Row]:
    """Forward and backward over three forward floors."""
    for n, batch in ((196, 16), (LENGTH, 1)):
        calls: dict[Any, Callable[[], Any]] = {}
        for name in MIXERS:
            module = mixer(name, n).train()
            calls[name, "step"] = step(module, tokens(n, batch=batch).requires_grad_())
            calls[name, "floor"] = floor(module.cost(n), batch=batch)
        times = interleaved(calls, seconds=1.5)
        for name in MIXERS:
            ours, bare = times[name, "step"].median, times[name, "floor"].median
            detail = f"{1e3 * ours:.2f} ms over 3 × {1e3 * bare:.2f}"
            yield Row("training", f"{name}, step / 3 floors, N = {n:,} × {batch}", ours / bare / 3, "≤", 1.5, detail)


def depthwise(_: argparse.Namespace) -> Iterator[Row]:
    """An 11×11 convolution with its backward over the forward alone."""
    for size, batch in ((8, 64), (14, 16), (64, 1)):
        x = torch.randn(batch, size * size, DIM, requires_grad=True)
        weight = torch.randn(DIM, 1, 11, 11, requires_grad=True)
        grad = torch.randn_like(x)

        def both(x: Any = x, weight: Any = weight, grad: Any = grad, size: int = size) -> None:
            x.grad = weight.grad = None
            depthwise_conv(x, weight, (size, size)).backward(grad)

        def alone(x: Any = x, weight: Any = weight, size: int = size) -> None:
            with torch.no_grad():
                depthwise_conv(x, weight, (size, size))

        times = interleaved({"both": both, "alone": alone}, seconds=1.5)
        ratio = times["both"].median / times["alone"].median
        detail = f"{1e3 * times['both'].median:.2f} ms over {1e3 * times['alone'].median:.2f}"
        what = f"depthwise 11×11, forward + backward / forward, {size}² × {batch}"
        yield Row("depthwise", what, ratio, "≤", 3.5, detail)


@torch.inference_mode()
def memory(_: argparse.Namespace) -> Iterator[Row]:
    """Peak beyond input, output and weights, MiB."""
    n = 16384
    x = tokens(n)
    for name in MIXERS:
        module = mixer(name, n)
        peak = peak_memory(partial(module, x)) - x.nbytes
        largest = max(_largest(op) for op in module.cost(n).ops) * 4
        limit = 2 * n * DIM * 4 * int(name[-1]) if name.startswith("padre") else largest
        yield Row("memory", f"{name}, peak of a forward, N = {n:,}, MiB", peak / 2**20, "≤", limit / 2**20)


def _largest(op: Any) -> int:
    """Numbers in the largest output of an op."""
    if op.kind == "linear":
        return op.shape[0] * op.shape[2]
    if op.kind == "matmul":
        batch, m, k, n = op.shape
        return batch * max(m * k, k * n, m * n)
    return math.prod(op.shape) * op.dim


@torch.inference_mode()
def decoding(_: argparse.Namespace) -> Iterator[Row]:
    """The time of a step after a million tokens over that after a thousand, and the state's size."""
    for name, options in (("pom", {}), ("qt", {}), ("padre-2", {"causal": True, "grid": None})):
        module = mixer(name, LENGTH, **options)
        states: dict[int, Any] = {}
        for count in (1_000, 1_000_000):
            state = None
            for start in range(0, count, 20_000):
                _, state = module.prefill(tokens(min(20_000, count - start)), state)
            states[count] = state
        token = torch.randn(1, DIM)
        calls = {count: partial(module.step, token, state) for count, state in states.items()}
        times = interleaved(calls, seconds=2)
        sizes = [sum(part.nbytes for part in flat(state)) for state in states.values()]
        detail = f"{1e6 * times[1_000].median:.0f} and {1e6 * times[1_000_000].median:.0f} µs; state {sizes} bytes"
        ratio = times[1_000_000].median / times[1_000].median
        yield Row("decoding", f"{name}, step after 1,000,000 / after 1,000 tokens", ratio, "≤", 1.05, detail)
        yield Row("decoding", f"{name}, state after 1,000,000 / after 1,000 tokens", sizes[1] / sizes[0], "≤", 1.0)


def flat(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [tensor for part in state for tensor in flat(part)]


@torch.inference_mode()
def slope(_: argparse.Namespace) -> Iterator[Row]:
    """Of log time against log N, least squares over 1,024 … 65,536 tokens."""
    counts = [1024, 4096, 16384, 65536]
    for name in MIXERS:
        calls = {n: partial(mixer(name, n), tokens(n)) for n in counts}
        times = interleaved(calls, seconds=1)
        x, y = torch.tensor(counts).log(), torch.tensor([times[n].median for n in counts]).log()
        value = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        detail = ", ".join(f"{1e3 * times[n].median:.2f}" for n in counts) + " ms"
        yield Row("slope", f"{name}, log time / log N, 1,024 … 65,536", value.item(), "≤", 1.05, detail)


def authors(given: argparse.Namespace) -> Iterator[Row]:
    """The PoM authors' module over ours, with their weights."""
    if given.pom is None:
        print("authors: not compared, --pom was not given", file=sys.stderr)
        return
    sys.path.insert(0, given.pom)
    from pom.pom import PoM

    theirs = PoM(DIM, 2, 2, 1, 1, bias=True)
    ours = polymix.PoM.from_reference(theirs.state_dict(), degree=2, expand=2)
    n = LENGTH
    x = tokens(n).requires_grad_()
    past = torch.ones(1, n, n).tril()
    torch.testing.assert_close(ours(x[:, :64]), theirs(x[:, :64]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours(x[:, :64], causal=True), theirs(x[:, :64], mask=past[:, :64, :64]), rtol=1e-4, atol=1e-5
    )
    calls: dict[Any, Callable[[], Any]] = {}
    with torch.inference_mode():
        calls["theirs", "forward"], calls["ours", "forward"] = lambda: theirs(x), lambda: ours(x)
        calls["theirs", "causal"], calls["ours", "causal"] = lambda: theirs(x, mask=past), lambda: ours(x, causal=True)
        times = interleaved(calls, seconds=1.5)
    calls = {("theirs", "forward + backward"): step(theirs, x), ("ours", "forward + backward"): step(ours, x)}
    times |= interleaved(calls, seconds=1.5)
    for what, goal in (("forward", 2.2), ("forward + backward", 2.2), ("causal", 8)):
        a, b = times["theirs", what].median, times["ours", what].median
        detail = f"{1e3 * a:.1f} ms over {1e3 * b:.2f}"
        yield Row("authors", f"pom authors' code / ours, {what}, N = {n:,}", a / b, "≥", goal, detail)


PASSES = {  # kinds of operators, by what they spend
    "products": ("mm", "bmm", "addmm", "baddbmm", "mkldnn_convolution", "mkldnn_linear"),
    "functions": ("gelu", "sigmoid", "exp"),
}


@torch.inference_mode()
def split(_: argparse.Namespace) -> Iterator[Row]:
    """Where a forward spends its time: products and convolutions as they run in it, functions, other passes.

    The products' share is what would be left over the floor if every pass between them cost nothing.
    """
    for name in MIXERS:
        module, x = mixer(name, LENGTH), tokens(LENGTH)
        bare = floor(module.cost(LENGTH))
        times = interleaved({"mixer": partial(module, x), "floor": bare}, seconds=1.5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(20):
                module(x)
        spent: dict[str, float] = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
        parts = {
            kind: sum(time for key, time in spent.items() if key.removeprefix("aten::").rstrip("_") in keys)
            for kind, keys in PASSES.items()
        }
        parts["other passes"] = sum(spent.values()) - sum(parts.values())
        shares = {kind: time / sum(spent.values()) for kind, time in parts.items()}
        ratio = times["mixer"].median / times["floor"].median
        detail = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()) + f"; in all {ratio:.2f} floors"
        yield Row(
            "split",
            f"{name}, its products alone / floor, N = {LENGTH:,}",
            shares["products"] * ratio,
            "≤",
            1.15,
            detail,
        )


GROUPS = {f.__name__: f for f in (forward, attention, authors, training, depthwise, memory, decoding, slope, split)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pom", help="a checkout of the PoM authors' code")
    parser.add_argument("--only", help=f"of {', '.join(GROUPS)}, by commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"--only: {', '.join(unknown)}; allowed: {', '.join(GROUPS)}")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in chosen:
        for row in GROUPS[name](given):
            rows.append(row)
            verdict = "met    " if row.met else "NOT MET"
            print(f"{verdict} {row.what}: {row.value:.3g} ({row.sign} {row.target:.3g}) {row.detail}", flush=True)
        content = {"machine": manifest("cpu", given.threads), "rows": [{**r._asdict(), "met": r.met} for r in rows]}
        part = given.out.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        part.replace(given.out)


if __name__ == "__main__":
    main()
