"""Parameters and multiply-adds of Mask R-CNN with Poly-NL and the non-local family, next to the paper's figures.

    python benchmarks/mask_rcnn.py benchmarks/results/mask-rcnn.json

Each block is inserted into torchvision's `maskrcnn_resnet50_fpn`, before the last block of Res4, and called on the meta
device under PyTorch's FLOP counter: on 14 × 14 × 1024, the size that Table 1 of Poly-NL counts, and in the backbone
with its feature pyramid on a picture of 800 × 1088. The heads are left out: what they cost depends on the proposals.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.compat import cure_torchvision

cure_torchvision()
from torchvision.models.detection import maskrcnn_resnet50_fpn  # noqa: E402

AT = "backbone.body.layer3.5"
BLOCK, PICTURE = (1, 1024, 14, 14), (1, 3, 800, 1088)
# The block, and what Poly-NL prints: multiply-adds in 10⁹ and parameters in millions (Table 1a), box and mask AP
# (Table 1b; SE and GC: Table 2a).
ROWS: list[tuple[str, str | None, tuple[float | None, float | None], tuple[float, float] | None]] = [
    ("Mask R-CNN", None, (None, None), (37.9, 34.6)),
    ("Poly-NL", "poly_nl:reduction=4", (0.14, 0.7), (39.2, 35.4)),
    ("non-local", "non_local:rd_ratio=0.5:projection=false", (0.47, 2.1), (38.8, 35.4)),
    ("SE", "se", (None, None), (38.1, 34.8)),
    ("GC", "gc", (None, None), (38.8, 35.2)),
    ("efficient attention", "efficient:reduction=8:heads=1", (0.11, 0.5), (38.9, 35.4)),
    ("TESA", "tesa:reduction=2:bias=false", (0.94, 1.0), (39.5, 35.4)),
    ("TESA, reduction 4", "tesa:reduction=4:bias=false", (0.94, 1.0), None),
    ("LatentGNN", "latent_gnn:reduction=8:norm=batch", (0.13, 0.6), (38.9, 35.3)),
]
NOTES = {
    "TESA": (
        "The paper names a channel reduction of 2 (section 5.1.2). What it prints is what a reduction of 4 takes; "
        "AP is printed once."
    ),
    "non-local": (
        "What is printed is that of a block without an output map, with values of all 1,024 channels."
    ),
    "SE": "Inserted as it is, x times its gate (`residual=False`). Neither its cost nor that of GC is printed.",
    "LatentGNN": "With batch norm, as in its authors' code, whose cost the counter does not see.",
}  # fmt: skip


def count(module: nn.Module, size: tuple[int, ...]) -> float:
    """Multiply-adds of a call on a tensor of this size, in 10⁹."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module(torch.empty(size))
    return counter.get_total_flops() / 2e9


def row(label: str, mixer: str | None) -> dict[str, Any]:
    """The block's figures, and those of the whole model. A block is built for the size on which it is counted."""
    found: dict[str, Any] = {"block": label, "mixer": mixer, "block_parameters": 0.0, "block_multiply_adds": 0.0}
    with torch.device("meta"):
        model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).eval()
        before = sum(p.numel() for p in model.parameters())
        if mixer is not None:
            report = polymix.insert(model.backbone, AT.removeprefix("backbone."), mixer,
                                    input=torch.empty(1, 3, 224, 224), residual=mixer != "se")  # fmt: skip
            found["block_multiply_adds"] = count(report.block, BLOCK)
            report.undo()
            report = polymix.insert(model.backbone, AT.removeprefix("backbone."), mixer, input=torch.empty(PICTURE),
                                    residual=mixer != "se")  # fmt: skip
        after = sum(p.numel() for p in model.parameters())
        found |= {"block_parameters": (after - before) / 1e6, "parameters": after / 1e6}
        found["backbone_multiply_adds"] = count(model.backbone, PICTURE)
    return found


def main() -> None:
    rows = []
    for label, mixer, (operations, parameters), precision in ROWS:
        line = row(label, mixer)
        line["printed"] = {"block_multiply_adds": operations, "block_parameters": parameters,
                           "AP": precision and precision[0], "mask_AP": precision and precision[1]}  # fmt: skip
        rows.append(line)
        print(f"{label}: {line['block_parameters']:.3f} M, {line['block_multiply_adds']:.3f} G, in all "
              f"{line['parameters']:.2f} M, {line['backbone_multiply_adds']:.2f} G", flush=True)  # fmt: skip
    save({"torch": torch.__version__, "rows": rows, "notes": NOTES}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
