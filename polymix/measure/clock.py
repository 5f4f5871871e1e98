"""The one clock: all times that polymix measures, prints or writes are read here.

Two clocks, and every row of results names its own:

wall        seconds that pass, as a user waits for them
processor   seconds in which this process computes, of all its threads together, children not included. Other work on
            the machine hardly changes it. It is comparable with `wall` on one thread only, and knows nothing of a GPU.
"""

from __future__ import annotations

import time
from typing import Literal, get_args

from polymix.errors import OptionError, check_choice

Clock = Literal["wall", "processor"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)


def now(clock: Clock = "wall") -> float:
    """Seconds since a moment that is fixed for this process."""
    return time.process_time() if clock == "processor" else time.perf_counter()


def check_clock(clock: Clock, *, device: str = "cpu", threads: int = 1, argument: str = "clock") -> None:
    """Check that a clock is one of the two, and that times by it mean what a reader takes them to mean.

    Raises:
        OptionError: another clock; or processor time of a GPU, which it does not count, or of several threads, whose
            times it adds.
    """
    check_choice(argument, clock, CLOCKS)
    if clock == "processor" and (threads != 1 or not device.startswith("cpu")):
        got = f"processor time with {threads} threads on {device}"
        raise OptionError(argument, got, "one thread on a CPU, as it adds the times of all threads", "Use wall.")


class Stopwatch:
    """Seconds since it was made or restarted: for rates, budgets and what happens once.

        watch = Stopwatch()
        train(batch)
        speed = len(batch) / watch.seconds()

    A call that can be repeated is better timed by `polymix.measure.repeated` or `in_turn`.

    Args:
        clock: "wall" or "processor".
        device: on CUDA, a reading first waits until the device has done what it was given; "cpu" waits for nothing.
    Raises:
        OptionError: the clock is another one, or "processor" with a GPU.
    """

    def __init__(self, clock: Clock = "wall", device: str = "cpu") -> None:
        check_clock(clock, device=device)
        self.clock, self.device = clock, device
        synchronize(device)
        self._start = now(clock)

    def seconds(self) -> float:
        """Seconds since the start. The watch goes on."""
        synchronize(self.device)
        return now(self.clock) - self._start

    def restart(self) -> float:
        """The same, and start again from 0 at this moment: laps without a gap."""
        synchronize(self.device)
        moment = now(self.clock)
        lap, self._start = moment - self._start, moment
        return lap


def synchronize(device: str) -> None:
    """Wait until a CUDA device has done what it was given; other devices work while the call runs."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
