"""A tiny LLaVA with a mixer in place of all its attention, which learns to say what is in a picture.

    pip install transformers
    python examples/captions.py pom

A picture of 24 × 24 pixels with noise shows one square of 8 × 8. Its caption has three words: colour, row and column.
The mixer is in the image encoder and, in causal order, in the language model; one without causal order, such as
linear_floor, is in the image encoder alone, which these pictures do not need. By chance one of 27 captions is right.
The test has pictures that the training has not seen.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

import polymix
from polymix.compat import cure_torchvision
from polymix.measure import Stopwatch

WORDS = ("red", "green", "blue", "top", "middle", "bottom", "left", "centre", "right")
IMAGE = len(WORDS)  # the token that stands for a part of the picture
START = IMAGE + 1
PARTS = 9  # squares of 8 × 8 pixels
NOISE = 0.3


def build() -> Any:
    """LLaVA with fresh weights: two layers for pictures, two for text."""
    cure_torchvision()
    import transformers

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=24, patch_size=8, projection_dim=48)
    text = transformers.LlamaConfig(
        **sizes, vocab_size=START + 1, num_key_value_heads=4, bos_token_id=START, eos_token_id=START
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures (count, 3, 24, 24) and captions (count, 3), places in WORDS."""
    colour, row, column = (torch.randint(3, (count,), generator=generator) for _ in range(3))
    pictures = NOISE * torch.randn(count, 3, 24, 24, generator=generator)
    for picture, c, r, q in zip(pictures, colour.tolist(), row.tolist(), column.tolist(), strict=True):
        picture[c, 8 * r : 8 * r + 8, 8 * q : 8 * q + 8] += 1
    return pictures, torch.stack((colour, 3 + row, 6 + column), 1)


def question(count: int) -> Tensor:
    """What comes before a caption: the picture, and the start of a text."""
    return torch.tensor([[*[IMAGE] * PARTS, START]]).expand(count, -1)


def train(model: Any, steps: int, generator: torch.Generator) -> float:
    """Train on new pictures in each step; returns the last loss.

    The rate rises and falls: at a constant one some trainings forget all late on, by the rounding of the processor.
    """
    rate = 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    model.train()
    loss = 0.0
    for _ in range(steps):
        pictures, captions = draw(32, generator)
        asked = question(len(pictures))
        ids = torch.cat((asked, captions), 1)
        labels = torch.cat((torch.full_like(asked, -100), captions), 1)  # the caption alone is learned
        found = model(input_ids=ids, pixel_values=pictures, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss = found.item()
    return loss


@torch.no_grad()
def right(model: Any, pictures: Tensor, captions: Tensor) -> float:
    """The share of pictures whose whole caption is written as it should be, word by word."""
    asked = question(len(pictures))
    written = model.eval().generate(
        input_ids=asked, attention_mask=torch.ones_like(asked), pixel_values=pictures, max_new_tokens=3,
        min_new_tokens=3, do_sample=False, pad_token_id=START,
    )  # fmt: skip
    return (written[:, -3:] == captions).all(1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixer", help="such as pom, qt or padre; keep: attention")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, watch = build(), Stopwatch("processor")
    if options.mixer != "keep":
        print(polymix.convert(model, options.mixer, init="fresh"))
    loss = train(model, options.steps, torch.Generator().manual_seed(options.seed))
    pictures, captions = draw(200, torch.Generator().manual_seed(1000 + options.seed))
    share = right(model, pictures, captions)
    print(f"{options.mixer}: loss {loss:.3f}, {share:.1%} of 200 captions right, {watch.seconds():.0f} s")
    print("The first picture:", " ".join(WORDS[word] for word in captions[0]))


if __name__ == "__main__":
    main()
