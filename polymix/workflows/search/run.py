"""`polymix.search`: what it takes, and its checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polymix.convert.plan import KEEP
from polymix.convert.tracing import mode
from polymix.devices import processes
from polymix.errors import OptionError, check_int, check_number, check_seed
from polymix.files import output_folder
from polymix.mixers import MixerConfig
from polymix.mixers.modules import check_module, still
from polymix.mixers.spec import parse_mixer
from polymix.results import RESULTS, Progress
from polymix.workflows.search.answer import Search
from polymix.workflows.search.content import SearchResults
from polymix.workflows.search.damage import KINDS
from polymix.workflows.search.samples import parted
from polymix.workflows.search.stages import Request, Run

MIXERS = ("qt", "pom", "padre:degree=2", "padre:degree=3", KEEP)
RATE = 6e-3  # as `polymix.distill` imitates


def search(
    model: nn.Module,
    data: Any,
    *,
    budget: float = 0.6,
    mixers: Sequence[str] = MIXERS,
    input: Any = None,
    steps: int = 24,
    learning_rate: float = RATE,
    loss: str | None = None,
    forward: Callable[..., Tensor] | None = None,
    seconds: float = 30.0,
    memory: float = 2**30,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Search:
    """Find the plan that changes a model's output least while its layers take a share of the attention's time.

    Every mixer is tried in every layer: its time is measured, and how far the model's output is from the original's
    with this mixer alone, on samples held back. Those near the front learn to do what the attention in their place
    does, on the original model's own activations. The plan with the least sum of damages within the budget is then
    found exactly. On other samples its true damage is compared with the predicted sum, and with fixed rules.

    Args:
        model: with attention, trained. It is left unchanged.
        data: as for `polymix.distill`; labels play no part. At least 64 samples, of which at most half are held back.
        budget: share of the time that the model's attention layers take together at the shape of `input`, which all of
            them, converted or kept, may take afterwards.
        mixers: candidates, as `polymix.create_mixer` names them with options, and "keep": layers may keep attention.
        input: an input of the model at your shape, on which layers are timed. None: a batch of the data.
        steps: of training for each candidate, of a batch each.
        learning_rate: the highest, in these steps.
        loss: "logits": the damage is KL(original ‖ model); "features" or "squares": the squared error of features or
            output as a share of their variance. None: logits, if the model returns such, else features.
        forward: (model, batch) -> logits, or what `loss` says, for other models.
        seconds: for all timings.
        memory: bytes of the original model's outputs that are held; beyond, they are computed again each time.
        seed: of fresh weights, the order of the data, and what is held back.
        out: folder for the results, the plan and checkpoints. resume: continue the search in it, to the same plan.
        progress, say: where bars and lines about the progress go.
    Returns:
        a Search, which prints as tables, and which `polymix.convert` takes as a plan with trained mixers.
    Raises:
        OptionError, CapabilityError, DataError: before any training. A budget that no plan meets is one, as soon as
            times are known; it says the least that one meets.
    """
    configs, keeps = _mixers(mixers)
    check_module(model)
    check_number("budget", budget, 1e-6, math.nextafter(1.0, 2.0), "a share above 0, at most 1", 0.6)
    check_int("steps", steps, 1)
    check_number("learning_rate", learning_rate, 1e-12, math.inf, "a number above 0", RATE)
    check_number("seconds", seconds, 1e-3, math.inf, "a number above 0", 30)
    check_number("memory", memory, 0.0, math.inf, "a number of bytes", 2**30)
    check_seed("seed", seed)
    if loss is not None and loss not in KINDS:
        raise OptionError("loss", repr(loss), ", ".join(map(repr, KINDS)), "Leave it out to let the model decide.")
    if resume and out is None:
        raise OptionError("resume", True, "True with out=, where the results are", "Pass out=.")
    if processes()[1] > 1:
        raise OptionError("torchrun", f"{processes()[1]} processes", "one process", "Start it without torchrun.")
    from polymix.train.data.sampling import isolated_random_state

    folder = None if out is None else Path(out)
    with nullcontext() if folder is None else output_folder(folder, "out"), isolated_random_state(), still(model):
        if folder is not None and not resume and (folder / RESULTS).exists():
            SearchResults.open(folder, {}, {}, resume=False)  # raises
        samples = parted(data, seed, steps)
        with mode(model, False):
            request = Request(
                model=model, samples=samples, mixers=configs, keeps=keeps, budget=budget, steps=steps,
                learning_rate=learning_rate, seed=seed, example=input, loss=loss, forward=forward, seconds=seconds,
                memory=memory, out=folder, resume=resume, progress=progress, say=say,
            )  # fmt: skip
            return Run(request)()


def _mixers(mixers: Sequence[str]) -> tuple[dict[str, MixerConfig], bool]:
    """The candidates by label, and whether a layer may keep its attention."""
    if not isinstance(mixers, (tuple, list)) or not all(isinstance(mixer, str) for mixer in mixers):
        raise OptionError("mixers", repr(mixers), "a sequence of mixers", f"For example {MIXERS}.")
    named = [mixer.strip() for mixer in mixers]
    parsed = [parse_mixer(mixer) for mixer in named if mixer != KEEP]
    configs = dict(parsed)
    if not configs or len(configs) < len(parsed) or any(config.is_attention for config in configs.values()):
        got = ", ".join(named) or "none"
        raise OptionError("mixers", got, f'different mixers, and "{KEEP}" for attention', f"Try {','.join(MIXERS)}.")
    return configs, KEEP in named
