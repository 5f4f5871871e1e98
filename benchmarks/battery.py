"""Which functions of two and three tokens a mixer learns: copying, composition, comparison, Match-3 and sorting.

    python benchmarks/battery.py benchmarks/results/battery.json [--only "pom;softmax"] [--depths 2,1] [--steps 1200]

Each model is a table of tokens and of places, one or two blocks and a linear head, and is trained on fresh random
sequences. Every token has an answer; the accuracy is that over the tokens of 1,024 other sequences. Run the same
command again to continue an interrupted run. One thread; the seconds are processor time.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from saving import read, save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polymix import MixerBlock
from polymix.measure import manifest
from polymix.measure.clock import Stopwatch
from polymix.mixers.spec import parse_mixer

MIXERS = (
    "softmax", "padre-2", "padre-3", "padre-3:kernel_size=23", "pom", "qt", "poly_nl", "poly_sa", "power", "hla",
    "gated_delta", "linear", "linear_floor",
)  # fmt: skip
DIM, BATCH, RATE, TESTS = 48, 64, 3e-3, 1024
EVERY, ENOUGH = 200, 0.995  # a training whose accuracy is that high ends


def match_2(x: Tensor) -> Tensor:
    """Is there another token like this one?"""
    return ((x[:, :, None] == x[:, None]).sum(2) > 1).long()


def match_3(x: Tensor) -> Tensor:
    """Are there two other tokens with which this one adds up to 0 modulo 8?"""
    n = x.shape[1]
    sums = (x[:, :, None, None] + x[:, None, :, None] + x[:, None, None]) % 8
    i = torch.arange(n)
    apart = (i[:, None, None] != i[None, :, None]) & (i[:, None, None] != i) & (i[:, None] < i)
    return ((sums == 0) & apart).flatten(2).any(2).long()


# name: (tokens, symbols, answers, function of tokens (B, N))
TASKS: dict[str, tuple[int, int, int, Callable[[Tensor], Tensor]]] = {
    "copying": (12, 16, 16, lambda x: x.roll(3, 1)),
    "reversing": (12, 16, 16, lambda x: x.flip(1)),
    "composition": (12, 12, 12, lambda x: x.gather(1, x)),
    "comparison": (12, 16, 2, match_2),
    "match-3": (5, 8, 2, match_3),
    "sorting": (12, 16, 16, lambda x: x.sort(1).values),
}


class Model(nn.Module):
    """Token and place, `depth` blocks, a linear head."""

    def __init__(self, mixer: str, depth: int, tokens: int, symbols: int, answers: int) -> None:
        super().__init__()
        spec = f"{mixer}:grid={tokens}" if mixer == "poly_sa" else mixer
        config = parse_mixer(spec, standalone=True)[1]
        self.token = nn.Embedding(symbols, DIM)
        self.place = nn.Parameter(torch.randn(tokens, DIM))
        self.blocks = nn.Sequential(*(MixerBlock(DIM, config, mlp_ratio=2) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, answers))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(x) + self.place))


def run(task: str, mixer: str, depth: int, steps: int, seed: int = 0) -> dict[str, Any]:
    tokens, symbols, answers, function = TASKS[task]
    torch.manual_seed(seed)
    model = Model(mixer, depth, tokens, symbols, answers)
    random = torch.Generator().manual_seed(seed)
    held = torch.randint(symbols, (TESTS, tokens), generator=random)
    goal = function(held)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    watch, accuracy = Stopwatch("processor"), 0.0
    for step in range(1, steps + 1):
        x = torch.randint(symbols, (BATCH, tokens), generator=random)
        loss = cross_entropy(model(x).flatten(0, 1), function(x).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVERY == 0 or step == steps:
            with torch.no_grad():
                accuracy = float((model(held).argmax(-1) == goal).float().mean())
            if accuracy >= ENOUGH:
                break
    constant = goal.flatten().bincount().max().item() / goal.numel()
    return {
        "task": task, "mixer": mixer, "depth": depth, "accuracy": accuracy, "constant": constant, "steps": step,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": watch.seconds(), "clock": "processor",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="mixers to run, separated by ;")
    parser.add_argument("--depths", default="2,1", help="numbers of blocks, in this order")
    parser.add_argument("--steps", type=int, default=1200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = {"dim": DIM, "batch": BATCH, "learning_rate": RATE, "steps": arguments.steps}
    content = read(arguments.out, {"machine": manifest("cpu", 1), **setting, "rows": []})
    if any(content[key] != value for key, value in setting.items()):
        parser.error(f"{arguments.out} is of another setting: name another file")
    there = {(row["task"], row["mixer"], row["depth"]) for row in content["rows"]}
    mixers = arguments.only.split(";") if arguments.only else MIXERS
    for depth in map(int, arguments.depths.split(",")):
        for mixer in mixers:
            for task in TASKS:
                if (task, mixer, depth) in there:
                    continue
                row = run(task, mixer, depth, arguments.steps)
                content["rows"].append(row)
                save(content, arguments.out)
                print(f"{task:12}{mixer:25}{depth}  {row['accuracy']:.1%}  {row['steps']} steps, "
                      f"{row['seconds']:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
