"""`polymix bench --parallel`: time and bytes of one layer whose sequence processes share, beside one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from polymix import results as base
from polymix.errors import CapabilityError, OptionError, ParallelError, PolymixError, check_int
from polymix.files import output_folder
from polymix.measure.clock import Clock
from polymix.measure.machine import manifest
from polymix.measure.timing import once, repeated
from polymix.mixers import MixerConfig, SoftmaxConfig
from polymix.parallel import shard
from polymix.parallel.collectives import Processes
from polymix.parallel.cost import ATTENTION, Sent, attention_bytes, mixer_bytes
from polymix.parallel.style import SequenceParallel
from polymix.results import Count, Machine, Progress
from polymix.workflows.bench.attention import all_to_all, ring

ALONE = "one process"
MOST = 16  # processes: more than a machine that bench is for has cores
Row = dict[str, Any]


class ParallelRow(TypedDict):
    """A mixer's layer, forward and backward, at one size. Figures are None where `stopped` says why there are none."""

    mixer: Annotated[str, "as it was named on the command line"]
    way: Annotated[str, "one process; how the mixer splits; or ring or all-to-all, of attention"]
    processes: Count
    causal: bool
    tokens: Annotated[int, "of the whole sequence"]
    dim: Count
    batch: Count
    clock: Annotated[Clock, "of all times in the row, those of the first process"]
    seconds: Annotated[float | None, "median of runs, forward and backward"]
    low: Annotated[float | None, "10 % quantile of runs"]
    high: Annotated[float | None, "90 % quantile of runs"]
    runs: list[float]
    sent_forward: Annotated[int | None, "bytes that the busiest process sends, counted at the collectives"]
    sent_backward: int | None
    model_forward: Annotated[float | None, "the same by formula, without lengths and errors, on which calls agree"]
    model_backward: float | None
    stopped: Annotated[str | None, "why there is no measurement here"]


class ParallelContent(TypedDict):
    """What results.json of `polymix bench --parallel` holds."""

    schema: Literal["polymix.bench-parallel/1"]
    finished: Annotated[bool, "false while a run goes on or after it was interrupted"]
    settings: Annotated[ParallelSettings, "what was asked for"]
    machine: Machine
    rows: list[ParallelRow]


class ParallelResults(base.Results):
    """The results of one such benchmark in one folder."""

    kind: ClassVar[Any] = ParallelContent
    command: ClassVar[str] = "polymix bench --parallel"


@dataclass(frozen=True)
class ParallelSettings:
    """What is measured: every mixer at every size, in float32, each process on one thread."""

    mixers: str
    processes: int
    tokens: tuple[Count, ...]
    dim: int
    batch: int
    seconds: float
    max_seconds: float
    max_gib: float

    def check(self) -> None:
        """Raise OptionError for what cannot be measured."""
        check_int("--parallel", self.processes, 2, MOST)
        for count in (*self.tokens, self.dim, self.batch):
            check_int("--tokens, --dims, --batch", count, 1)
        if not dist.is_available():
            raise OptionError("--parallel", self.processes, "a PyTorch with torch.distributed", "Install another one.")


Case = tuple[str, str, int]  # a mixer's label, the way, and tokens


def bench_parallel(
    settings: ParallelSettings, mixers: Mapping[str, MixerConfig], folder: Path, progress: Progress
) -> ParallelResults:
    """Measure every mixer, and attention by ring and all-to-all, on one process and on several over loopback."""
    settings.check()
    cases = [(label, way, tokens) for tokens in sorted(settings.tokens) for label, config in mixers.items()
             for way in (ALONE, *(ATTENTION if isinstance(config, SoftmaxConfig) else ()), "shared")]  # fmt: skip
    asked = {**asdict(settings), "tokens": list(settings.tokens)}
    with output_folder(folder):
        results = ParallelResults.open(folder, asked, manifest("cpu", 1), resume=False)
        advance = progress.start("Measuring", len(cases))
        store = TCPStore("127.0.0.1", 0, settings.processes + 1, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        rows: Any = context.Queue()
        workers = [
            context.Process(target=_work, args=(rank, store.port, settings, dict(mixers), cases, rows), daemon=True)
            for rank in range(settings.processes)
        ]
        for worker in workers:
            worker.start()
        try:
            for step in range(len(cases)):
                results.add("rows", [_next(rows, workers)])
                advance(step + 1)
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
        results.set(finished=True)
    return results


def _next(rows: Any, workers: list[Any]) -> Row:
    """The next row. Raises ParallelError where a process has ended before it."""
    from queue import Empty

    while True:
        try:
            row: Row = rows.get(timeout=1)
            return row
        except Empty:
            for rank, worker in enumerate(workers):
                if worker.exitcode:
                    got = f"process {rank}, which ended with status {worker.exitcode}"
                    raise ParallelError(
                        "--parallel", got, "processes that measure", "Is there enough memory?"
                    ) from None


def _work(
    rank: int, port: int, settings: ParallelSettings, mixers: Mapping[str, MixerConfig], cases: list[Case], rows: Any
) -> None:
    """One of the processes; the first one reports."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, settings.processes + 1, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.processes)
    slow: set[tuple[str, str]] = set()  # what was over the budget with fewer tokens
    for label, way, tokens in cases:
        row: Row = dict.fromkeys(ParallelRow.__annotations__)
        row |= {"mixer": label, "way": way, "processes": 1 if way == ALONE else settings.processes, "tokens": tokens,
                "causal": False, "dim": settings.dim, "batch": settings.batch, "clock": "wall", "runs": []}  # fmt: skip
        try:
            if (label, way) in slow:
                raise OptionError("--max-seconds", "fewer tokens took longer", f"{settings.max_seconds} s", "")
            _measure(row, mixers[label], settings)
        except PolymixError as error:
            row["stopped"] = str(error)
        if row["seconds"] is not None and row["seconds"] > settings.max_seconds:
            slow.add((label, way))
        if rank == 0:
            rows.put(row)
    dist.barrier()
    rows.close()
    rows.join_thread()


def _measure(row: Row, config: MixerConfig, settings: ParallelSettings) -> None:
    """Fill in a row. All processes call this alike."""
    torch.manual_seed(0)
    way, tokens, group = row["way"], row["tokens"], dist.group.WORLD
    row["causal"] = causal = config.causal_by_build or config.mixer.capabilities.sequence == "scan"
    config = config.for_heads(max(1, settings.dim // 64)).for_grid((tokens,))
    mixer: Any = (config.for_order() if causal else config).build(settings.dim)
    x = torch.randn(settings.batch, tokens, settings.dim)
    processes = Processes(group)  # type: ignore[arg-type]
    run: Callable[[Tensor], Tensor] = partial(mixer, causal=True) if causal else mixer
    if way == ALONE:
        model = Sent(0, 0)
    elif way == "shared":
        model = mixer_bytes(mixer, settings.processes, tokens, batch=settings.batch, causal=causal)
        row["way"] = mixer.capabilities.sequence
        SequenceParallel()._apply(mixer, _mesh(settings.processes))
        run = partial(mixer, causal=True) if causal else mixer
        processes = mixer.forward.args[1]
    else:
        if way == "ring":
            held = 3 * 4 * settings.batch * mixer.config.heads * (tokens // settings.processes) * tokens
            if held > settings.max_gib * 2**30:
                raise CapabilityError("--max-gib", f"{held / 2**30:.1f} GiB of scores", f"{settings.max_gib} GiB", "")
        model = attention_bytes(way, settings.dim, settings.processes, tokens, batch=settings.batch)
        run = partial(ring if way == "ring" else all_to_all, mixer, processes)
    x = (x if way == ALONE else shard(x, group)).requires_grad_()  # type: ignore[arg-type]

    def call() -> None:
        run(x).sum().backward()

    before = processes.sent
    y = run(x)
    forward = processes.sent - before
    y.sum().backward()
    sent = torch.tensor([forward, processes.sent - before - forward, 0])
    once(call)
    sent[2] = int(1e6 * once(call))
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    rounds = max(3, min(50, int(settings.seconds / (int(sent[2]) / 1e6 + 1e-6))))
    mine = way != ALONE or dist.get_rank() == 0  # one process computes by itself
    timing = repeated(call, seconds=0, least=rounds, most=rounds) if mine else None
    dist.barrier()
    if timing is None:
        return
    row |= {"seconds": timing.median, "low": timing.low, "high": timing.high, "runs": list(timing.runs),
            "sent_forward": int(sent[0]), "sent_backward": int(sent[1]), "model_forward": float(model.forward),
            "model_backward": float(model.backward)}  # fmt: skip


def _mesh(processes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (processes,))


HEADINGS = ("mixer", "way", "tokens", "ms", "× one process", "kB sent", "by the model")


def table(rows: list[Row]) -> list[list[str]]:
    """The rows as text: times of forward and backward, and the bytes of both."""
    alone = {(row["mixer"], row["tokens"]): row["seconds"] for row in rows if row["way"] == ALONE}
    lines = []
    for row in rows:
        first = [row["mixer"] + (" causal" if row["causal"] else ""), row["way"], f"{row['tokens']:,}"]
        if row["seconds"] is None:
            lines.append([*first, "stopped", "–", "–", "–"])
            continue
        base_time = alone.get((row["mixer"], row["tokens"]))
        ratio = f"{row['seconds'] / base_time:.2f}" if base_time else "–"
        sent, model = (row[f"{who}_forward"] + row[f"{who}_backward"] for who in ("sent", "model"))
        lines.append([*first, f"{1e3 * row['seconds']:.1f}", ratio, f"{sent / 1e3:,.1f}", f"{model / 1e3:,.1f}"])
    return lines
