"""Calls a second beside busy processes, by threads and by how long libgomp's threads spin before they sleep.

    python benchmarks/busy.py benchmarks/results/busy.json --tries 2

A thread that waits for another one spins; if that other one was descheduled, the spinning keeps it from running. Each
row is one process with its own GOMP_SPINCOUNT or OMP_WAIT_POLICY, which libgomp reads when PyTorch loads it. It runs
every case first alone and then beside processes that do nothing but spin, which this script starts and ends. Every run
adds its tries to those in the file, so that several short runs make the table. The clock is the wall's: what a busy
machine takes from a program is not in its processor time. A row beside which other programs computed is left out.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from saving import read, save

from polymix.measure import manifest
from polymix.measure.clock import now

BUSY = 3  # processes beside
MOST = 0.1  # cores that other programs may have taken from a row that counts
SECONDS = 1.0  # of a case
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    **{f"{count:,}": {"GOMP_SPINCOUNT": str(count)} for count in (100, 1_000, 3_000, 5_000, 10_000, 30_000)},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
ROWS = [*((2, name) for name in SETTINGS), (1, "default")]


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


def one_row(threads: int, setting: str) -> tuple[dict[str, dict[str, float]], float]:
    """Calls a second of every case, quiet and busy; and the cores that other programs took during the quiet part."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": str(threads), **SETTINGS[setting]}
    command = [sys.executable, __file__, "--serve", str(threads)]
    with subprocess.Popen(command, env=environment, text=True, stdin=-1, stdout=-1) as process:
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "ready\n", "the process of a row did not start"
            rates, others = {}, 0.0
            for state, count in (("quiet", 0), ("busy", BUSY)):
                with spinning(count):
                    start, spent = now(), machine_seconds()
                    process.stdin.write("\n")
                    process.stdin.flush()
                    own, *numbers = map(float, process.stdout.readline().split())
                    rates[state] = dict(zip(CASES, numbers, strict=True))
                    if state == "quiet":
                        others = (machine_seconds() - spent - own) / (now() - start)
        finally:
            process.kill()
    return rates, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--tries", type=int, default=1, help="times that every row is measured and added")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=[*SETTINGS], help="how threads wait, by name")
    parser.add_argument("--serve", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    content = read(options.out, {"machine": manifest("cpu", 2), "busy": BUSY, "clock": "wall", "rows": []})
    for _ in range(options.tries):
        for threads, setting in (row for row in ROWS if row[1] in options.only):
            rates, others = one_row(threads, setting)
            if others < MOST:
                content["rows"].append({"threads": threads, "setting": setting, "others": others, **rates})
                save(content, options.out)
            cells = "".join(f"{rates['quiet'][case]:9.1f}{rates['busy'][case]:8.1f}" for case in CASES)
            print(f"{threads} {setting:8}{cells}  others {others:.2f}{' left out' * (others >= MOST)}", flush=True)


if __name__ == "__main__":
    main()
