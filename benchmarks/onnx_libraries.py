"""Whole models of every library with adapters as ONNX: with their own attention, and converted.

    pip install -c constraints.txt ".[vision,text,detection,diffusion,export]"
    python benchmarks/onnx_libraries.py benchmarks/results/export/libraries.json

Small models with random weights, perturbed so that no layer is zero. Each is compared with PyTorch for several batch
sizes. The file is written after each model; the same command continues.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from saving import save
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.drops import naming_drops
from polymix.errors import PolymixError

MIXERS = ("keep", "pom", "padre", "qt", "poly_nl")
PACKAGES = ("torch", "timm", "transformers", "torchvision", "diffusers", "onnx", "onnxruntime")


def image(side: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, side, side)


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(40, (2, 9))}


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), 2)


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **options)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=3)


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], num_classes=3)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=2,
                                intermediate_size=24))  # fmt: skip


def transformers_vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=24,
                              image_size=32, patch_size=8))  # fmt: skip


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=2, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=4,
    )  # fmt: skip


def dit_inputs() -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(2, 2, 8, 8), "timestep": torch.tensor([1, 5]),
            "class_labels": torch.tensor([0, 1])}  # fmt: skip


def deit() -> nn.Module:
    return timm_model("deit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2)


def timm_swin() -> nn.Module:
    return timm_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2)
    )


def own_vit() -> nn.Module:
    from polymix.models import VisionTransformer

    return VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=16, patch_size=4, dim=16, depth=2, classes=3)


MODELS: dict[tuple[str, str], tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    ("torch.nn", "TransformerEncoder"): (encoder, lambda: torch.randn(2, 7, 16)),
    ("timm", "deit_tiny"): (deit, lambda: image(32)),
    ("timm", "swin_tiny"): (timm_swin, lambda: image(32)),
    ("transformers", "BertModel"): (bert, tokens),
    ("transformers", "ViTModel"): (transformers_vit, lambda: {"pixel_values": image(32)}),
    ("torchvision", "VisionTransformer"): (torchvision_vit, lambda: image(32)),
    ("torchvision", "SwinTransformer"): (torchvision_swin, lambda: image(32)),
    ("diffusers", "DiTTransformer2DModel"): (dit, dit_inputs),
    ("polymix", "VisionTransformer"): (own_vit, lambda: image(16)),
}  # fmt: skip


def attempt(build: Callable[[], nn.Module], inputs: Callable[[], Any], mixer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build().eval()
    try:
        if mixer != "keep":
            model = naming_drops(partial(polymix.convert, model, mixer)).model.eval()
        with torch.no_grad():
            for parameter in model.parameters():  # a head of zeros would hide every error
                parameter += 0.05 * torch.randn_like(parameter)
        with TemporaryDirectory() as folder:
            content = polymix.export.export(model, inputs(), Path(folder) / "out")
    except PolymixError as refused:
        return {"works": False, "reason": str(refused)}
    return {"works": True, "error": max(entry["error"] for entry in content["files"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cure_torchvision()
    content: dict[str, Any] = {"rows": []}
    if options.out.exists():
        content = json.loads(options.out.read_text("utf-8"))
    content["versions"] = {name: version(name) for name in PACKAGES}
    done = {(row["library"], row["model"], row["mixer"]) for row in content["rows"]}
    for (library, name), (build, inputs) in MODELS.items():
        for mixer in MIXERS:
            if (library, name, mixer) not in done:
                row = {"library": library, "model": name, "mixer": mixer, **attempt(build, inputs, mixer)}
                content["rows"].append(row)
                save(content, options.out)
                print(row, flush=True)


if __name__ == "__main__":
    main()
