"""Calls a second beside busy processes, by threads and by how long OpenMP's threads spin before they sleep.

    python benchmarks/busy.py benchmarks/results/busy.json --tries 2 [--libiomp FILE]
    python benchmarks/busy.py benchmarks/results/busy.json --compare

A thread that waits for another one spins; if that other one was descheduled, the spinning keeps it from running. Each
row is one process with its own GOMP_SPINCOUNT or OMP_WAIT_POLICY, which libgomp reads when PyTorch loads it. It runs
every case first alone and then beside processes that do nothing but spin, which this script starts and ends. Every run
adds its tries to those in the file, so that several short runs make the table. The clock is the wall's: what a busy
machine takes from a program is not in its processor time. A row beside which other programs computed is left out.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import torch
from saving import read, save

from polymix.measure import manifest
from polymix.measure.clock import now
from polymix.threads import is_busy

BUSY = 3  # processes beside
MOST = 0.1  # cores that other programs may have taken from a row that counts
SECONDS = 1.0  # of a case
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "LD_PRELOAD")
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    **{f"{count:,}": {"GOMP_SPINCOUNT": str(count)} for count in (100, 300, 1_000, 3_000, 10_000, 30_000)},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
LIBIOMP = {"libiomp": {}, "libiomp 1": {"KMP_BLOCKTIME": "1"}, "libiomp 0": {"KMP_BLOCKTIME": "0"}}
ROWS = [*((2, name) for name in (*SETTINGS, *LIBIOMP)), (1, "default")]
COMPARE = {  # how `polymix compare --quick` is run: its arguments, and what the user has set
    "as the commands set it": ((), {}),
    "PyTorch's default": ((), {"GOMP_SPINCOUNT": "300000"}),
    "one thread": (("--threads", "1"), {}),
}


def training() -> Callable[[], object]:
    """A step of a small vision transformer: 16 × 64 tokens."""
    from polymix import MixerBlock, PomConfig

    model = torch.nn.Sequential(MixerBlock(64, PomConfig()), MixerBlock(64, PomConfig()))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def inference() -> Callable[[], object]:
    """deit_tiny's size: 12 blocks of softmax attention on 196 tokens, in plain PyTorch."""
    from polymix import MixerBlock, SoftmaxConfig

    model = torch.nn.Sequential(*(MixerBlock(192, SoftmaxConfig(heads=3)) for _ in range(12))).eval()
    x = torch.randn(1, 196, 192)
    return lambda: model(x)


def language() -> Callable[[], object]:
    """A token of a language model with states: many small products, one after another."""
    from polymix import create_mixer

    mixers = [create_mixer("pom", 192).eval() for _ in range(6)]
    x = torch.randn(1, 64, 192)
    head = torch.nn.Linear(192, 8_000)
    states = [mixer.prefill(x)[1] for mixer in mixers]

    def token() -> None:
        y = x[:, 0]
        for place, mixer in enumerate(mixers):
            y, states[place] = mixer.step(y, states[place])
        head(y)

    return token


def kernels() -> Callable[[], object]:
    """PADRe by the C kernels and their threads, 1,024 tokens."""
    from polymix import PadreConfig

    mixer = PadreConfig().for_grid((32, 32)).build(192).eval()
    x = torch.randn(1, 1024, 192)
    return lambda: mixer(x)


CASES = {"training": training, "inference": inference, "language": language, "kernels": kernels}


def serve(threads: int) -> None:
    """A row's process: build the cases, then print calls a second of all of them for each line that comes in."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    calls = {name: build() for name, build in CASES.items()}
    print("ready", flush=True)
    for _ in sys.stdin:
        rates, used = [], now("processor")
        for name, call in calls.items():
            with torch.inference_mode(name != "training"):
                call()
                start, count = now(), 0
                while now() - start < SECONDS:
                    call()
                    count += 1
                rates.append(count / (now() - start))
        print(now("processor") - used, *rates, flush=True)


@contextmanager
def spinning(count: int):  # type: ignore[no-untyped-def]
    """So many processes that do nothing but spin."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def machine_seconds() -> float:
    """Seconds in which the machine's cores have computed, for all programs."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Processor time of the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def clean(**variables: str) -> dict[str, str]:
    """The environment with these variables, and nothing else that says how threads wait."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables


def one_row(threads: int, variables: dict[str, str]) -> tuple[dict[str, dict[str, float]], float]:
    """Calls a second of every case, quiet and busy; and the cores that other programs took, of the two the more."""
    environment = clean(OMP_NUM_THREADS=str(threads), **variables)
    command = [sys.executable, __file__, "--serve", str(threads)]
    with subprocess.Popen(command, env=environment, text=True, stdin=-1, stdout=-1) as process:
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "ready\n", "the process of a row did not start"
            rates, others = {}, []
            for state in ("quiet", "busy"):
                start, spent, spun = now(), machine_seconds(), children_seconds()
                with spinning(BUSY * (state == "busy")):
                    process.stdin.write("\n")
                    process.stdin.flush()
                    own, *numbers = map(float, process.stdout.readline().split())
                rates[state] = dict(zip(CASES, numbers, strict=True))
                own += children_seconds() - spun
                others.append((machine_seconds() - spent - own) / (now() - start))
        finally:
            process.kill()
    return rates, max(others)


def measure_rows(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Add a try of every row, and save after each."""
    for threads, setting in (row for row in ROWS if row[1] in options.only):
        what = {"threads": threads, "setting": setting}
        if setting in LIBIOMP and not options.libiomp.is_file():
            content["rows"] = [row for row in content["rows"] if row.get("absent") is None or what != {**row, **what}]
            content["rows"].append({**what, "absent": "pip install --no-deps intel-openmp"})
            save(content, options.out)
            print(
                f"{threads} {setting}: {options.libiomp} is not there; pip install --no-deps intel-openmp", flush=True
            )
            continue
        preloaded = {"LD_PRELOAD": str(options.libiomp.resolve()), **LIBIOMP[setting]} if setting in LIBIOMP else None
        rates, others = one_row(threads, preloaded or SETTINGS[setting])
        if others < MOST:
            content["rows"].append({**what, "others": others, **rates})
            save(content, options.out)
        cells = "".join(f"{rates['quiet'][case]:9.1f}{rates['busy'][case]:8.1f}" for case in CASES)
        print(f"{threads} {setting:10}{cells}  others {others:.2f}{' left out' * (others >= MOST)}", flush=True)


def measure_compare(how: str, state: str, limit: float) -> dict[str, Any]:
    """The seconds of one `polymix compare --quick`, quiet or busy, and the cores that other programs took."""
    arguments, variables = COMPARE[how]
    environment = clean(**variables)
    environment.pop("OMP_NUM_THREADS", None)  # the command finds its threads itself
    begun, spent, own = now(), machine_seconds(), children_seconds()
    with tempfile.TemporaryDirectory() as out, spinning(BUSY * (state == "busy")):
        while is_busy() != (state == "busy"):  # the load is of the last minute
            sleep(1)
        start = now()
        command = [sys.executable, "-m", "polymix", "compare", "--quick", "--out", f"{out}/compare", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        seconds = now() - start
    if status > 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    others = (machine_seconds() - spent - (children_seconds() - own)) / (now() - begun)
    return {"how": how, "state": state, "seconds": seconds, "ended": status == 0, "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--tries", type=int, default=1, help="times that every row is measured and added")
    names = [*SETTINGS, *LIBIOMP]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="how threads wait, by name")
    parser.add_argument("--libiomp", type=Path, default=Path(sys.prefix, "lib/libiomp5.so"), help="Intel's OpenMP")
    parser.add_argument("--compare", nargs="*", choices=COMPARE, metavar="HOW", help=f"some of {', '.join(COMPARE)}")
    parser.add_argument(
        "--states", nargs="+", choices=("quiet", "busy"), default=("quiet", "busy"), help="of --compare"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="of --compare: seconds after which it is stopped")
    parser.add_argument("--serve", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    new = {"machine": manifest("cpu", 2), "busy": BUSY, "clock": "wall", "rows": [], "compare": []}
    content = read(options.out, new)
    if options.compare is None:
        for _ in range(options.tries):
            measure_rows(content, options)
        return
    for how, state in ((how, state) for how in options.compare or COMPARE for state in options.states):
        row = measure_compare(how, state, options.limit)
        print(row, flush=True)
        content["compare"].append(row)
        save(content, options.out)


if __name__ == "__main__":
    main()
