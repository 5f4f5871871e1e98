"""Time and memory of a Conformer with PoM and with attention, from 5 seconds of speech to 20 minutes.

    python benchmarks/speech_lengths.py benchmarks/results/speech-lengths.json

One recording of noise, 25 tokens a second, the model of the domain `speech`. A training step is forward, the mean
square of the logits and backward: CTC's own table of 20 minutes, the same for every mixer, would be larger than all
else. Times are of one call for recordings of a minute or more, else the median of several, in processor time on one
thread. Memory is the most that PyTorch's tensors hold at once beyond weights and input.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.domains.speech.conformer import Conformer
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.measure import in_turn, manifest
from polymix.measure.timing import peak_memory
from polymix.mixers.spec import parse_mixer
from polymix.train.data.audio import HOP

SECONDS = (5, 30, 60, 300, 1200)
MIXERS = ("pom:degree=3:expand=2", "softmax")
LONG, ROUNDS = 60, 5  # seconds from which a call is made once; calls of shorter ones


def calls(mixer: str, recipe: SpeechRecipe, seconds: int) -> dict[str, Callable[[], Any]]:
    """A training step and an inference on one recording."""
    torch.manual_seed(0)
    model = Conformer(recipe, [parse_mixer(mixer)[1]] * recipe.depth, 30)
    features = torch.randn(1, round(seconds / HOP), recipe.bands)

    def training() -> None:
        model.zero_grad()
        model(features).square().mean().backward()

    def inference() -> None:
        with torch.inference_mode():
            model(features)

    return {"training": training, "inference": inference}


def measure(recipe: SpeechRecipe, seconds: int) -> list[dict[str, Any]]:
    """A row for each mixer; the mixers take turns."""
    by_mixer = {mixer: calls(mixer, recipe, seconds) for mixer in MIXERS}
    rows = {
        mixer: {"mixer": mixer.partition(":")[0], "seconds": seconds, "clock": "processor",
                "tokens": round(seconds / HOP) // recipe.subsample}
        for mixer in MIXERS
    }  # fmt: skip
    for kind in ("training", "inference"):
        contenders = {mixer: both[kind] for mixer, both in by_mixer.items()}
        rounds, warm_up = (1, 0) if seconds >= LONG else (ROUNDS, 1)
        for mixer, timing in in_turn(contenders, rounds, warm_up=warm_up, clock="processor").items():
            rows[mixer][f"{kind}_s"] = timing.median
            rows[mixer][f"{kind}_bytes"] = peak_memory(contenders[mixer])
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", default=",".join(map(str, SECONDS)))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe, rows = SpeechRecipe(dim=options.dim, depth=options.depth), []
    for seconds in map(int, options.seconds.split(",")):
        for row in measure(recipe, seconds):
            rows.append(row)
            print({name: value for name, value in row.items() if name != "clock"}, flush=True)
    settings = {"dim": options.dim, "depth": options.depth, "pom": MIXERS[0], "busy": options.busy}
    save({"machine": manifest("cpu", 1), "settings": settings, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
