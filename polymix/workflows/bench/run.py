"""`polymix bench`: every mixer and implementation at every size, timed in turn, saved after each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import torch

from polymix import results as base
from polymix.devices import DTYPES, Dtype, check_device
from polymix.errors import OptionError, PolymixError, check_choice, check_int, check_number
from polymix.files import output_folder
from polymix.limits import LONGEST, check_memory
from polymix.measure.case import PASSES, Pass, Setting, prepare
from polymix.measure.clock import Clock
from polymix.measure.floor import bytes_moved, floor
from polymix.measure.harness import Budget, Contender, Measurement, Stopped, measure
from polymix.measure.machine import manifest
from polymix.measure.memory import MemoryProcess
from polymix.measure.roofline import Ceiling, ceiling
from polymix.measure.shapes import Shape, near_square
from polymix.measure.timing import interleaved
from polymix.mixers import MixerConfig, SoftmaxConfig
from polymix.results import Between, Count, Machine, Progress, empty_parts

Row = dict[str, Any]
Sizes = Annotated[tuple[Count, ...], Between(1)]
Names = Annotated[tuple[str, ...], Between(1)]
Who = tuple[str, str]  # a mixer's label and an implementation
PRODUCTS = {"training": 3}  # forwards in a pass: each product has a gradient for either side


_Pass = TypedDict("_Pass", {"pass": Pass})


class BenchRow(_Pass):
    """A mixer and implementation at one size. Figures are None where `stopped` says why there are none."""

    mixer: Annotated[str, "as it was named on the command line"]
    impl: Annotated[str, "auto, or the implementation that was asked for"]
    tokens: Count
    dim: Count
    batch: Count
    dtype: Dtype
    threads: Count
    clock: Annotated[Clock, "of all times in the row"]
    seconds: Annotated[float | None, "median of runs"]
    low: Annotated[float | None, "10 % quantile of runs"]
    high: Annotated[float | None, "90 % quantile of runs"]
    runs: Annotated[list[float], "every single measurement, seconds a call"]
    floor: Annotated[float | None, "the forward's own products and convolutions run bare, median, seconds"]
    floor_runs: list[float]
    floor_ratio: Annotated[float | None, "seconds / floor; of training, seconds / (3 floor)"]
    attention_ratio: Annotated[float | None, "the fastest softmax of the same group / seconds"]
    flops: Annotated[int | None, "by formula, 2 a multiply-add; of training, three forwards"]
    bytes: Annotated[int | None, "by formula, each input, weight and output moved once; of training, three forwards"]
    flop_share: Annotated[float | None, "flops / seconds / the ceiling's"]
    byte_share: Annotated[float | None, "bytes / seconds / the ceiling's"]
    peak_bytes: Annotated[
        int | None, "most that one call holds at once beyond input and weights, output included, by allocations"
    ]
    resident_bytes: Annotated[int | None, "growth of the peak resident set of a process of its own over one call"]
    output_bytes: int | None
    state_bytes: Annotated[int | None, "of a recurrent state; step alone"]
    stopped: Annotated[str | None, "why there is no measurement here"]


class Content(TypedDict):
    """What results.json of `polymix bench` holds."""

    schema: Literal["polymix.bench/1"]
    finished: Annotated[bool, "false while a run goes on or after it was interrupted"]
    settings: Annotated[Settings, "what was asked for; --resume needs the same"]
    machine: Machine
    ceilings: list[Ceiling]
    rows: list[BenchRow]


class Results(base.Results):
    """The results of one benchmark in one folder."""

    kind: ClassVar[Any] = Content
    command: ClassVar[str] = "polymix bench"


@dataclass(frozen=True)
class Group:
    """The rows that are timed in turn: every mixer and implementation at one size."""

    tokens: int
    dim: int
    batch: int
    dtype: str
    pass_: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Group:
        """The group that a row of results belongs to."""
        return cls(**{field.name: row[field.name.rstrip("_")] for field in fields(cls)})

    def setting(self, device: str) -> Setting:
        """How the harness is told of it."""
        shape = Shape(tokens=self.tokens, dim=self.dim, batch=self.batch, grid=near_square(self.tokens))
        return Setting(shape, self.pass_, device, getattr(torch, self.dtype), self.threads)


@dataclass(frozen=True)
class Settings:
    """Everything that decides what `polymix bench` measures. A run can only be resumed with the same settings."""

    mixers: str
    tokens: Sizes = (256, 1024, 4096, 16384)
    dims: Sizes = (192,)
    batch: Sizes = (1,)
    dtypes: Names = ("float32",)
    passes: Names = ("forward", "training")
    impls: Names = ("auto",)
    threads: Sizes = (2,)
    device: str = "cpu"
    seconds: float = 0.4
    max_seconds: float = 10.0
    max_gib: float = 4.0
    quick: bool = False

    def check(self, mixers: Mapping[str, MixerConfig]) -> None:
        """Find every mistake that can be found before anything is measured."""
        for name in ("tokens", "dims", "batch", "threads", "dtypes", "passes", "impls"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise OptionError(f"--{name}", values, "at least one value, each once", "Separate values by commas.")
            for value in values:
                if name in ("tokens", "dims", "batch", "threads"):
                    check_int(f"--{name}", value, 1)
        longest, widest, most = max(self.tokens), max(self.dims), max(self.batch)
        check_int("--tokens", longest, 1, LONGEST)
        what = f"a call with {most:,} × {longest:,} tokens of {widest:,} channels"
        check_memory("--tokens, --dims, --batch", what, 3 * 4 * most * longest * widest)
        check_memory("--dims", f"a map of {widest:,} channels", 4 * widest**2)
        for dtype in self.dtypes:
            check_choice("--dtypes", dtype, DTYPES)
        for pass_ in self.passes:
            check_choice("--passes", pass_, PASSES)
        for name, usual in (("seconds", 0.4), ("max_seconds", 10), ("max_gib", 4)):
            check_number("--" + name.replace("_", "-"), getattr(self, name), 1e-300, 1e15, "a number above 0", usual)
        for impl in self.impls:
            self._check_impl(impl, mixers)
        check_device(self.device, "--device")
        for dim in self.dims:
            self._check_runs("--dims", dim, mixers, Setting(Shape(tokens=16, dim=dim, grid=(4, 4)), device=self.device))
        for impl in self.impls:
            configs = {label: with_impl(config, impl) for label, config in mixers.items() if impl in config.mixer.impls}
            shape = Shape(tokens=16, dim=min(self.dims), grid=(4, 4))
            self._check_runs("--impls", impl, configs, Setting(shape, device=self.device))

    def _check_runs(self, option: str, value: Any, mixers: Mapping[str, MixerConfig], setting: Setting) -> None:
        """A mixer that cannot be called gets rows that say so, but a value with which none can is a mistake."""
        refused = None
        for config in mixers.values():
            try:
                prepare(config, setting).call()
            except PolymixError as error:
                refused = error
            else:
                return
        if refused:
            raise OptionError(option, value, "one with which a mixer can run here", str(refused))

    def _check_impl(self, impl: str, mixers: Mapping[str, MixerConfig]) -> None:
        """A mixer without the implementation gets rows that say so, but a name that no mixer has is a mistake."""
        refused = None
        for config in mixers.values():
            try:
                with_impl(config, impl)
            except PolymixError as error:
                refused = error
            else:
                return
        if refused:
            raise OptionError("--impls", impl, "an implementation that a mixer has, such as auto", str(refused))

    def groups(self) -> Iterator[Group]:
        """In the order of measuring: the token counts of each setting upwards."""
        for threads, dtype, dim, batch, pass_, tokens in product(
            self.threads, self.dtypes, self.dims, self.batch, self.passes, sorted(self.tokens)
        ):
            yield Group(tokens, dim, batch, dtype, pass_, threads)

    def as_quick(self) -> Settings:
        """The counts up to 1,024 and few rounds: a first look in well under a minute."""
        short = tuple(n for n in self.tokens if n <= 1024) or (min(self.tokens),)
        return replace(self, quick=True, tokens=short, seconds=min(self.seconds, 0.05))

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def with_impl(config: MixerConfig, impl: str) -> MixerConfig:
    """The config with `impl` and no other; "auto" leaves the config as it is."""
    return config if impl == "auto" else config.changed(impl=impl)


def bench(
    settings: Settings, mixers: Mapping[str, MixerConfig], folder: Path, progress: Progress, *, resume: bool = False
) -> Results:
    """Run (or resume) a benchmark of `mixers`, by label, and save its results in `folder`.

    Mistakes in the settings are found before anything is measured. Each finished group of rows is saved before the
    next begins.
    """
    settings.check(mixers)
    device = check_device(settings.device, "--device")
    with output_folder(folder):
        return _bench(settings, mixers, folder, progress, device, resume)


def _bench(
    settings: Settings, mixers: Mapping[str, MixerConfig], folder: Path, progress: Progress, device: str, resume: bool
) -> Results:
    results = Results.open(folder, settings.to_dict(), manifest(device, max(settings.threads)), resume=resume)
    rows = results.content["rows"]
    done = {Group.of(row) for row in rows}
    groups = list(settings.groups())
    advance = progress.start("Measuring", len(groups))
    with MemoryProcess() as process:
        for step, group in enumerate(groups, start=1):
            if group not in done:
                roof = _ceiling(results, group, settings)
                torch.set_num_threads(group.threads)
                torch.manual_seed(0)
                fewer = [row for row in rows if replace(Group.of(row), tokens=group.tokens) == group]
                results.add("rows", measure_group(settings, mixers, group, roof, process, fewer))
            advance(step)
    results.set(finished=True)
    return results


def _ceiling(results: Results, group: Group, settings: Settings) -> Ceiling:
    """The ceiling for the group's type and threads, measured when it is first needed."""
    for known in results.content["ceilings"]:
        if (known["dtype"], known["threads"]) == (group.dtype, group.threads):
            return Ceiling(**known)
    measured = ceiling(group.dtype, group.threads, settings.device, settings.seconds)
    results.add("ceilings", [asdict(measured)])
    return measured


def measure_group(
    settings: Settings, mixers: Mapping[str, MixerConfig], group: Group, roof: Ceiling, process: MemoryProcess,
    fewer: Sequence[Row],
) -> list[Row]:  # fmt: skip
    """The rows of one group. `fewer` are the rows of the same setting at fewer tokens: they say what to leave out."""
    contenders: dict[Who, Callable[[], Contender]] = {}
    for label, impl in product(mixers, settings.impls):
        shorter = [row for row in fewer if (row["mixer"], row["impl"]) == (label, impl)]
        contenders[label, impl] = partial(_prepare, (label, impl), mixers[label], settings, group, process, shorter)
    measurements = measure(contenders, partial(interleaved, seconds=settings.seconds, device=settings.device))
    attention = [
        its.timing.median
        for (label, _), its in measurements.items()
        if its.timing and isinstance(mixers[label], SoftmaxConfig)
    ]
    rows = []
    for who, its in measurements.items():
        row = {"mixer": who[0], "impl": who[1], **group.to_dict(), **empty_parts(BenchRow)}
        row |= {"clock": "wall", "stopped": its.stopped}
        row |= _figures(its, group, roof)
        if its.timing and attention:
            row["attention_ratio"] = min(attention) / row["seconds"]
        rows.append(row)
    return rows


def _prepare(
    who: Who, config: MixerConfig, settings: Settings, group: Group, process: MemoryProcess, shorter: Sequence[Row]
) -> Contender:
    """The mixer, once another process has found that it runs, is correct and stays within the budget."""
    budget = Budget(seconds=settings.max_seconds, bytes=int(settings.max_gib * 2**30))
    last = max(shorter, key=lambda row: row["tokens"], default=None)
    if last is not None and last["stopped"]:
        raise Stopped(last["stopped"])
    budget.check_before(group.tokens, (last["tokens"], last["seconds"]) if last else None)
    config, setting = with_impl(config, who[1]), group.setting(settings.device)
    memory = process.measure(config, setting, check_numbers=group.tokens == min(settings.tokens))
    budget.check_after(group.tokens, memory.seconds, memory.peak_bytes)
    if memory.failed:
        raise Stopped(memory.failed)
    case = prepare(config, setting)
    if group.pass_ == "step":
        return Contender(case.call, figures={"memory": memory})
    cost, times = case.mixer.cost(group.tokens, dtype=setting.dtype), PRODUCTS.get(group.pass_, 1)
    bare = floor(cost, batch=group.batch, device=settings.device, dtype=setting.dtype)
    flops, moved = times * group.batch * cost.flops, times * bytes_moved(cost, group.batch)
    return Contender(case.call, bare, who[0], {"memory": memory, "flops": flops, "bytes": moved})


def _figures(its: Measurement, group: Group, roof: Ceiling) -> Row:
    """What a row has of a measurement."""
    if its.timing is None:
        return {}
    memory, flops, moved = its.figures["memory"], its.figures.get("flops"), its.figures.get("bytes")
    seconds, bare = its.timing.median, its.floor
    return {
        "seconds": seconds,
        "low": its.timing.low,
        "high": its.timing.high,
        "runs": list(its.timing.runs),
        "floor": bare.median if bare else None,
        "floor_runs": list(bare.runs) if bare else [],
        "floor_ratio": seconds / (PRODUCTS.get(group.pass_, 1) * bare.median) if bare else None,
        "flops": flops,
        "bytes": moved,
        "flop_share": flops / seconds / roof.flops_per_second if flops else None,
        "byte_share": moved / seconds / roof.bytes_per_second if moved else None,
        "peak_bytes": memory.peak_bytes,
        "resident_bytes": memory.resident_bytes,
        "output_bytes": memory.output_bytes,
        "state_bytes": memory.state_bytes,
    }
