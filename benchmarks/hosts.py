"""Parameters and multiply-adds of real models before and after conversion, next to the papers' figures.

    python benchmarks/hosts.py benchmarks/results/hosts.json

The models run on the meta device, with one input, under PyTorch's FLOP counter, with unfused attention; CvT on the CPU.
 "Layers" are the attention layers that are converted; their figures are by formula, for all windows of an
image. NOTES says where and why a paper's figures are others.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from saving import save
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import PolymixError
from polymix.train import published

cure_torchvision()
import timm  # noqa: E402
import transformers  # noqa: E402

import polymix.timm  # noqa: E402  # registers metaformer_s12

# The papers' names of our hosts, where they differ.
NAMES = {
    "swin_tiny, windows kept": "swin_tiny_patch4_window7_224", "DETR-R50, encoder": "DETR, resnet50",
    "cvt_13, keys at stride 1": "cvt_13",
}  # fmt: skip
WHAT = {"": "model", "layer_": "layers, parameters of the model", "encoder_": "layers"}  # what a cost is of


def printed(host: str, label: str) -> dict[str, Any] | None:
    """A paper's figures: millions of parameters and 10⁹ multiply-adds of `what`, the model or its layers."""
    mixers = ("softmax", "keep") if label == "attention" else (label, f"padre:degree={label[-1]}")
    for row in published.rows(host=NAMES.get(host, host)):
        prefix = next((prefix for prefix in WHAT if f"{prefix}flops_G" in row.cost), None)
        if prefix is not None and row.mixer in mixers:
            parameters = row.cost.get(f"{prefix}parameters_M", row.cost.get("parameters_M"))
            source = f"{row.paper}, {row.table}"
            return {"parameters": parameters, "multiply_adds": row.cost[f"{prefix}flops_G"],
                    "what": WHAT[prefix], "source": source}  # fmt: skip
    return None


NOTES = {
    "deit_tiny_patch16_224, padre": (
        "PADRe's Table 2 has the parameters of these models, but 1.15 to 1.23 times their multiply-adds in every row: "
        "1.2 for 1.04, 1.7 for 1.38, 4.8 for 4.00, 6.1 for 5.03 and 18.8 for 15.67 G. Its rows for attention agree. "
        "All 2d - 1 token maps would make 1.15, 1.44 and 4.2 G, so they are not the reason, and a layer alone agrees "
        "with Table 6 to 1 %. How Table 2 counts is not said. "
        "Its baselines agree as attention does, but for SimA's: 4.6 G is attention's figure, and 4.36 G what it takes "
        "with the product of keys and values first. Products alone are counted here, so Mamba's scan is not."
    ),
    "deit_tiny_patch16_224": (
        "Poly-SA with a depthwise map: 12 (3 N D² + 9 · 196 D) = 0.266 G and 5.31 M, with N = 197 and D = 192. The "
        "paper prints 0.28 G and 5.4 M, 5 % and 1.6 % more; what it counts beside the maps of its equation is not said."
    ),
    "swin_tiny, windows kept": (
        "At 224² with windows of 7 × 7: 12 layers of 4 N D² for the maps, 1.39 G, and 0.14 G for the products of "
        "queries, keys and values: 1.53 G. The paper's 2.05 G is what the same formula gives at 256² with windows of "
        "8 × 8 (1.81 + 0.24 G), and its 1.60 G for Poly-SA is that without W_o (0.45 G)."
    ),
    "xcit_tiny_12_p16_224": (
        "12 layers of XCA take 4 N D² + 2 N D d each, 0.39 G, with N = 196, D = 192 and d = 48. The paper's 0.57 G is "
        "12 (4 N D² + 2 N² D), attention between tokens, and 2 · 3 · 197 D² for the two class-attention layers; its "
        "0.39 G for Poly-SA is 12 · 4 N D² = 0.35 G and the same class attention, 0.04 G."
    ),
    "metaformer_s12": (
        "PoolFormer-S12 with attention in its last two stages, as printed: 16.5 M and 0.74 G. Poly-SA takes 0.44 G "
        "beside 0.46 G. The 19 M of padre-3 come from its 5 D² per layer for the attention's 4 D², and its kernels."
    ),
    "DETR-R50, encoder": (
        "The self-attention of the 6 encoder layers has 6 · 4 (D² + D) = 1.58 M parameters and takes "
        "6 (4 N D² + 2 N² D) = 3.56 G, with D = 256 and N = 25 · 34 tokens. The paper's 6.1 M cannot be these maps "
        "alone. In both of its rows the operations are 1.66 thousand times the parameters, as for linear maps on "
        "830 tokens with 2 operations for each multiply-add. Which maps it counts is not said."
    ),
}  # fmt: skip


class Host(NamedTuple):
    build: Callable[[], nn.Module]
    given: Callable[[], dict[str, Any]]
    plans: dict[str, Any]  # by label
    options: Mapping[str, Any] = MappingProxyType({})  # of polymix.convert


def vision(name: str, plans: dict[str, Any], **options: Any) -> Host:
    return Host(partial(timm.create_model, name), lambda: {"x": torch.empty(1, 3, 224, 224)}, plans, options)


def same(*names: str) -> dict[str, Any]:
    return {name: name for name in names}


SA = "poly_sa:head_mixing=depthwise"
FIVE = same("padre-2", "padre-3", "qt", "pom", "poly_nl", "poly_sa")
HOSTS = {
    # with the baselines of PADRe's Table 2, Vision Mamba's mixer among them
    "deit_tiny_patch16_224": vision("deit_tiny_patch16_224", FIVE | {SA: SA} | same(
        "hydra", "efficient", "castling", "relu_linear", "knn", "focused", "mamba:bidirectional=true")),
    "deit_small_patch16_224": vision("deit_small_patch16_224", FIVE | same("sima", "knn", "mamba:bidirectional=true")),
    "deit_base_patch16_224": vision("deit_base_patch16_224", FIVE | same("hydra", "hyena:bidirectional=true")),
    "swin_tiny, windows kept": vision("swin_tiny_patch4_window7_224", FIVE | {SA: SA}, drop=("position_bias",)),
    "swin_tiny, windows merged": vision(
        "swin_tiny_patch4_window7_224", FIVE | {SA: SA}, windows="merge", drop=("position_bias",)
    ),
    "xcit_tiny_12_p16_224": vision("xcit_tiny_12_p16_224", FIVE),
    "metaformer_s12": vision("metaformer_s12", FIVE | {SA: SA}),
    "cvt_13, keys at stride 1": Host(
        lambda: transformers.CvtForImageClassification(transformers.CvtConfig(stride_kv=[1, 1, 1], num_labels=1000)),
        lambda: {"pixel_values": torch.zeros(1, 3, 224, 224)}, FIVE,
        {"input": {"pixel_values": torch.zeros(1, 3, 224, 224)}},
    ),
    "caformer_s18": vision("caformer_s18", FIVE),
    "efficientvit_b1": vision("efficientvit_b1", FIVE),
    "DETR-R50, encoder": Host(
        lambda: transformers.DetrModel(transformers.DetrConfig(use_timm_backbone=True, backbone="resnet50",
                                                               use_pretrained_backbone=False)),
        lambda: {"pixel_values": torch.empty(1, 3, 800, 1088)}, {name: {"encoder.*": name} for name in FIVE},
        {"grid": (25, 34)},
    ),
    "gpt2, 1,024 tokens": Host(
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        lambda: {"input_ids": torch.zeros(1, 1024, dtype=torch.int64), "use_cache": False}, FIVE,
    ),
}  # fmt: skip


def windows(model: nn.Module, layer: str) -> int:
    """In how many windows of an image Swin's layer runs; 1 for other layers."""
    block: Any = model.get_submodule(layer.rpartition(".")[0])
    if not isinstance(getattr(block, "window_size", None), tuple):
        return 1
    return math.prod(-(-side // window) for side, window in zip(block.input_resolution, block.window_size, strict=True))


def count(model: nn.Module, given: dict[str, Any]) -> float | None:
    """Multiply-adds of one call, in 10⁹; None if the model reads values, which the meta device does not have."""
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(**given)
    except (RuntimeError, NotImplementedError) as error:
        print(f"  not counted: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return counter.get_total_flops() / 2e9


def row(name: str, label: str, given: Host, model: nn.Module, layers: Any) -> dict[str, Any]:
    """One row. `layers` are the converted layers' reports, and 0 for before or 1 for after."""
    reports, which = layers
    times = 1 if given.options.get("windows") == "merge" else None
    flops = [(times or windows(model, report.name)) * report.flops[which] for report in reports if report.flops]
    return {
        "host": name, "mixer": label, "parameters": sum(p.numel() for p in model.parameters()) / 1e6,
        "multiply_adds": count(model, given.given()),
        "layer_parameters": sum(report.parameters[which] for report in reports) / 1e6,
        "layer_multiply_adds": sum(flops) / 2e9 if len(flops) == len(reports) else None,
        "printed": printed(name, label), "refused": None,
    }  # fmt: skip


def rows(name: str, host: Host) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with torch.device("cpu" if "input" in host.options else "meta"):  # the grids of CvT are seen in a call
        for label, plan in host.plans.items():
            model = host.build().eval()
            try:
                report = polymix.convert(model, plan, **host.options)
            except PolymixError as error:
                lines.append({"host": name, "mixer": label, "refused": str(error.got)})
                continue
            swapped = [layer for layer in report.layers if layer.now]
            after = row(name, label, host, report.model, (swapped, 1))
            if not any(line["mixer"] == "attention" for line in lines):
                lines.insert(0, row(name, "attention", host, report.undo(), (swapped, 0)))
            lines.append(after)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    lines = []
    for name, host in HOSTS.items():
        for line in rows(name, host):
            lines.append(line)
            figures = line["refused"] or f"{line['parameters']:.2f} M, {line['multiply_adds']} G"
            print(f"{name}, {line['mixer']}: {figures}", flush=True)
    save({"rows": lines, "notes": NOTES}, options.out)


if __name__ == "__main__":
    main()
