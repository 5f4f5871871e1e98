"""Processes that tests start: each is a fork of a server that has imported what they need and runs no other thread.

A fork of the worker itself would have its threads' locks without the threads, and could wait for one for ever.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]

IMPORTED = ["tests.attacks.test_full_disk", "tests.contracts.test_every_task", "tests.train.test_elastic"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(IMPORTED)


def _start(place, environment, function, arguments, options):
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments, **options)


def fork(function, *arguments, **options):
    """A process that will call a function, in this folder and environment. The function has a name in its module."""
    place = os.getcwd()
    os.chdir(ROOT)  # where the server, if it is the first process, finds what it imports
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(place)
    return FORKS.Process(target=_start, args=(place, dict(os.environ), function, arguments, options))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(world):
    """What torchrun tells each of so many processes, in their environment; one alone is started without it."""
    if world == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def die_after(steps, how=signal.SIGKILL):
    """Let a signal end this process, which trains, before the first slice that follows so many steps."""
    from polymix.train.loop import Learner

    own, slices = Learner.forward, itertools.count()

    def forward(self, batch, counts):
        if next(slices) == steps * len(self.task.slices.mine):
            os.kill(os.getpid(), how)
        return own(self, batch, counts)

    Learner.forward = forward


def statuses(processes):
    """The exit statuses of processes that run at once."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:  # also where pytest ends a test that hangs
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def silent():
    """Let this process, and those that it starts, say nothing."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _say(writer, function, arguments):
    silent()
    os.dup2(writer.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    try:
        function(*arguments)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stderr.write(f"raw {type(error).__name__}: {error}\n"[:4000])
        sys.exit(99)


def said(function, *arguments):
    """The exit status of a process that calls a function, and what it wrote to standard error."""
    reader, writer = FORKS.Pipe(duplex=False)
    process = fork(_say, writer, function, arguments)
    process.start()
    writer.close()
    with os.fdopen(os.dup(reader.fileno())) as file:
        text = file.read()
    process.join()
    return process.exitcode, text
