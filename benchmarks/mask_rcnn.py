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
from polymix.train import published
from polymix.train.data.boxes.detectors import GATES

cure_torchvision()
from torchvision.models.detection import maskrcnn_resnet50_fpn  # noqa: E402

AT = "backbone.body.layer3.5"
BLOCK, PICTURE = (1, 1024, 14, 14), (1, 3, 800, 1088)
# The block, and the name under which Poly-NL's Table 1 prints it, if it is another.
BLOCKS = {
    "Mask R-CNN": "none", "Poly-NL": "poly_nl:reduction=4",
    "Poly-NL, order 2": "poly_nl:reduction=4:order=2", "Poly-NL, orders 2 and 3": "poly_nl:reduction=4:order=2+3",
    "non-local": "non_local:rd_ratio=0.5:projection=false",
    "SE": "se", "GC": "gc", "efficient attention": "efficient:reduction=8:heads=1",
    "TESA": "tesa:reduction=2:bias=false", "TESA, reduction 4": "tesa:reduction=4:bias=false",
    "LatentGNN": "latent_gnn:reduction=8:norm=batch",
}  # fmt: skip
PRINTED_AS = {"tesa:reduction=4:bias=false": "tesa:reduction=2:bias=false"}
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


def printed(mixer: str) -> dict[str, float | None]:
    """What Poly-NL prints: multiply-adds in 10⁹, parameters in millions (Table 1a), box and mask AP (1b and 2a)."""
    layers = published.layers(paper="Poly-NL", mixer=PRINTED_AS.get(mixer, mixer))
    models = published.rows(domain="instances", mixer=mixer)
    cost = layers[0].figures if layers else {}
    precision = models[0].metrics if models else {}
    AP, mask_AP = (None if name not in precision else round(100 * precision[name], 1) for name in ("AP", "mask_AP"))
    return {"block_multiply_adds": cost.get("multiply_adds_G"), "block_parameters": cost.get("parameters_M"),
            "AP": AP, "mask_AP": mask_AP}  # fmt: skip


def row(label: str, mixer: str | None) -> dict[str, Any]:
    """The block's figures, and those of the whole model. A block is built for the size on which it is counted."""
    found: dict[str, Any] = {"block": label, "mixer": mixer, "block_parameters": 0.0, "block_multiply_adds": 0.0}
    with torch.device("meta"):
        model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).eval()
        before = sum(p.numel() for p in model.parameters())
        if mixer is not None:
            report = polymix.insert(model.backbone, AT.removeprefix("backbone."), mixer,
                                    input=torch.empty(1, 3, 224, 224), residual=mixer not in GATES)  # fmt: skip
            found["block_multiply_adds"] = count(report.block, BLOCK)
            report.undo()
            report = polymix.insert(model.backbone, AT.removeprefix("backbone."), mixer, input=torch.empty(PICTURE),
                                    residual=mixer not in GATES)  # fmt: skip
        after = sum(p.numel() for p in model.parameters())
        found |= {"block_parameters": (after - before) / 1e6, "parameters": after / 1e6}
        found["backbone_multiply_adds"] = count(model.backbone, PICTURE)
    return found


def main() -> None:
    rows = []
    for label, mixer in BLOCKS.items():
        line = row(label, None if mixer == "none" else mixer) | {"printed": printed(mixer)}
        rows.append(line)
        print(f"{label}: {line['block_parameters']:.3f} M, {line['block_multiply_adds']:.3f} G, in all "
              f"{line['parameters']:.2f} M, {line['backbone_multiply_adds']:.2f} G", flush=True)  # fmt: skip
    save({"torch": torch.__version__, "rows": rows, "notes": NOTES}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
