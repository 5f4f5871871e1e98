"""Which models `polymix.convert` takes: every family of transformers, and of timm and diffusers, built small and tried.

    python benchmarks/families.py benchmarks/results/families.json
    python benchmarks/families.py out.json --only qwen3,modernbert,whisper
    python benchmarks/families.py out.json --library timm

Random weights and two layers: this shows what works, not how well. A family is a type of config that transformers
registers, a class of attention over tokens of timm, or a transformer or U-Net of diffusers; all are found in the
libraries, and `left_out` says which classes named attention are none. Each is tried in a process of its own
with a mixer that reads x (pom) and one of queries, keys and values (qt), for 40 seconds of processor time each. A check
that does not apply, such as generation with an encoder, is null. Rows of other families stay in the file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import resource
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from families_steps import diffusers_models, timm_attention, transformers_families
from families_steps.checks import callable_model, checks, same_by_softmax
from saving import save
from torch import nn

import polymix
from polymix.errors import PolymixError, one_line
from polymix.measure.machine import manifest

LIBRARIES = {"transformers": transformers_families, "timm": timm_attention, "diffusers": diffusers_models}
MIXERS = ("pom", "qt")
SECONDS = 40


def built(kind: str, library: str = "transformers") -> nn.Module:
    """A small model of a family, which can be called."""
    return callable_model(LIBRARIES[library].candidates(kind))[0]


def rows_of(kind: str, mixers: Iterable[str], library: str) -> Iterator[dict[str, Any]]:
    """The row of one family with each mixer: each check, or at which stage it stopped and why."""
    for mixer in mixers:
        row: dict[str, Any] = {"library": library, "family": kind, "mixer": mixer}
        try:
            model, example = callable_model(LIBRARIES[library].candidates(kind))
            row["model"] = type(model).__name__
        except Exception as error:
            why = f"not built here: {type(error).__name__}: {shorten(one_line(error), 160, placeholder=' …')}"
            yield {**row, "why": why, "stage": "build"}
            return
        of = LIBRARIES[library].attention_class(kind)
        try:
            for name, value in checks(model, mixer, example, of):
                row[name] = value
            if mixer == MIXERS[-1]:  # once for a family
                row["softmax"] = same_by_softmax(model, example, of)
        except PolymixError as error:
            row |= {"why": one_line(error), "stage": "refused"}
        except Exception as error:
            why = f"{type(error).__name__}: {shorten(one_line(error), 200, placeholder=' …')}"
            row |= {"why": why, "stage": "traceback"}
        yield row


def row_of(kind: str, mixer: str, library: str = "transformers") -> dict[str, Any]:
    """The row of one family with one mixer."""
    return next(rows_of(kind, [mixer], library))


def import_once() -> None:
    """Import what every row needs before the processes are forked, which would each do it again."""
    model, example = callable_model(transformers_families.candidates("gpt2"))
    polymix.convert(model, "qt", input=example)
    _ = model.generate, polymix.save_pretrained, polymix.load_pretrained


def _send_rows(kind: str, mixers: list[str], library: str, seconds: int, pipe: Any) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds * len(mixers)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    warnings.simplefilter("ignore")
    transformers_families.transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for row in rows_of(kind, mixers, library):
        pipe.send(row)


def rows_in_time(kind: str, mixers: list[str], library: str, seconds: int = SECONDS) -> Iterator[dict[str, Any]]:
    """``rows_of`` in a process of its own that may take so many seconds of processor time for each mixer.

    It is forked, so it is for a program that has used no threads yet: a child waits forever for those of its parent.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(kind, mixers, library, seconds, theirs), daemon=True)
    process.start()
    theirs.close()
    left = list(mixers)
    with suppress(EOFError):
        while left:
            row = ours.recv()
            left = [] if row.get("stage") == "build" else left[1:]
            yield row
    process.join()
    late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
    why = (
        {"why": f"took more than {seconds} s", "stage": "slow"}
        if late
        else {"why": "the process ended", "stage": "crash"}
    )
    for mixer in left:
        yield {"library": library, "family": kind, "mixer": mixer, **why}


def works(row: dict[str, Any]) -> bool:
    """Whether a family converts and all checks that apply hold."""
    names = ("finite", "trains", "padding", "generates", "loads", "undone", "softmax")
    return "why" not in row and all(row.get(name) is not False for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--library", choices=LIBRARIES, help="all by default")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--untried", action="store_true", help="only families without a row in the file")
    arguments = parser.parse_args()
    only = arguments.only.split(",") if arguments.only else None
    libraries = [arguments.library] if arguments.library else list(LIBRARIES)
    families = [(name, kind) for name in libraries for kind in LIBRARIES[name].kinds() if only is None or kind in only]
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    tried = {(row["library"], row["family"]) for row in rows}
    families = [family for family in families if not (arguments.untried and family in tried)]
    import_once()
    left_out = {name: LIBRARIES[name].left_out() for name in LIBRARIES}
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    for library, kind in families:
        rows = [row for row in rows if (row["library"], row["family"]) != (library, kind)]
        for row in rows_in_time(kind, arguments.mixers.split(","), library):
            rows.append(row)
            print(library, kind, row["mixer"], "works" if works(row) else row, flush=True)
        rows.sort(key=lambda row: (list(LIBRARIES).index(row["library"]), row["family"]))
        content = {"versions": versions, "left_out": left_out, "rows": rows, "machine": manifest("cpu", 1)}
        save(content, arguments.out)
    for library in libraries:
        for mixer in arguments.mixers.split(","):
            its = [row for row in rows if row["mixer"] == mixer and row["library"] == library]
            print(f"{library}, {mixer}: {sum(map(works, its))} of {len(its)} work")


if __name__ == "__main__":
    main()
