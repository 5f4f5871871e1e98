"""Models of timm with a mixer in attention's place, in timm's registry: importing this module puts them there.

import timm, polymix.timm

model = timm.create_model("padre2_deit_tiny_patch16_224", num_classes=10, drop_path_rate=0.1)
timm.list_models("padre*")

A name is a mixer of MIXERS, an underscore and a host of HOSTS: `padre3_deit_small_patch16_224`, `qt_vit_b1`,
`poly_sa_xcit_small_12`. With `_matched` at the end, the mixer's width is chosen so that the model has as many
parameters as the host with attention (PoM, Section 4); the option match="parameters" asks for the same.

Two hosts of Poly-SA's Table 3 that timm has not are registered with their own attention: metaformer_s12 and cvt_13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.adapters.libraries import load_library
from polymix.convert.convert import convert
from polymix.convert.drops import naming_drops
from polymix.convert.insert import insert
from polymix.convert.matching import widths
from polymix.convert.plan import config_of, parse_plan, resolve
from polymix.errors import OptionError, check_choice, check_number
from polymix.mixers import MixerConfig

# Our name of a mixer in a model's name: its spelling on the command line.
MIXERS = {
    "padre2": "padre-2", "padre3": "padre-3", "pom": "pom", "qt": "qt", "poly_nl": "poly_nl", "poly_sa": "poly_sa",
    "linear_floor": "linear_floor",
}  # fmt: skip
_SIZES = ("tiny", "small", "base")
_XCIT = ("nano_12", "tiny_12", "small_12", "medium_24")
_EFFICIENT = ("b0", "b1", "b2", "b3", "l1", "l2")
# Our name of a host in a model's name: timm's name of it.
HOSTS = {
    **{f"{family}_{size}_patch16_224": f"{family}_{size}_patch16_224" for family in ("deit", "vit") for size in _SIZES},
    **{f"xcit_{size}": f"xcit_{size}_p16_224" for size in _XCIT},
    **{f"efficientvit_{size}": f"efficientvit_{size}" for size in _EFFICIENT},
    "swin_tiny_patch4_window7_224": "swin_tiny_patch4_window7_224",
}
# Hosts without attention: the module before which x + s · mixer(x) is inserted. Res4 of a ResNet is layer3 (Poly-NL,
# Section 5.1).
INSERTED = {"resnet50": ("resnet50", "layer3.5")}
# EfficientViT with quadratic Taylor attention is QT-ViT.
RENAMED = {f"qt_efficientvit_{size}": f"qt_vit_{size}" for size in _EFFICIENT}
__all__ = ["HOSTS", "INSERTED", "MIXERS", "create", "cvt_13", "metaformer_s12", "names"]


def metaformer_s12(pretrained: bool = False, **options: Any) -> nn.Module:
    """PoolFormer-S12 with attention in its last two stages: the hybrid of the MetaFormer paper (Yu et al. 2022)."""
    layers, metaformer = load_library("timm.layers"), load_library("timm.models.metaformer")
    pooling, attention, groups, norm = metaformer.Pooling, metaformer.Attention, layers.GroupNorm1, layers.LayerNorm
    sizes = {
        "depths": (2, 2, 6, 2), "dims": (64, 128, 320, 512), "token_mixers": (pooling, pooling, attention, attention),
        "norm_layers": (groups, groups, norm, norm), "downsample_norm": None, "mlp_act": nn.GELU, "mlp_bias": True,
        "layer_scale_init_values": 1e-5, "res_scale_init_values": None, "use_mlp_head": False,
    }  # fmt: skip
    options = {
        **options,
        "pretrained_cfg": options.get("pretrained_cfg") or _settings("metaformer_s12", "poolformer_s12"),
    }
    model: nn.Module = metaformer._create_metaformer("metaformer_s12", **{**sizes, **options})
    return model


class Cvt(nn.Module):
    """CvT-13 of transformers as a model of timm: images (B, C, H, W) to logits (B, classes).

    Keys and values have as many tokens as queries (a stride of 1), as Poly-SA has it (Section 5.2.2).
    """

    def __init__(
        self, num_classes: int = 1000, in_chans: int = 3, drop_path_rate: float = 0.0,
        img_size: int | tuple[int, int] = 224,
    ) -> None:  # fmt: skip
        super().__init__()
        transformers = load_library("transformers")
        with torch.device("cpu"):  # it reads values, which the meta device has not
            config = transformers.CvtConfig(
                num_channels=in_chans,
                num_labels=num_classes,
                stride_kv=[1, 1, 1],
                drop_path_rate=[0.0, 0.0, float(drop_path_rate)],
            )
            host = transformers.CvtForImageClassification(config)
        device = torch.get_default_device()
        self.cvt, self.layernorm, self.classifier = (
            part.to(device) for part in (host.cvt, host.layernorm, host.classifier)
        )
        sides = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.grids: dict[str, tuple[int, ...]] = {}  # of the layers of each stage
        geometry = zip(config.patch_sizes, config.patch_stride, config.patch_padding, strict=True)
        for stage, (size, stride, padding) in enumerate(geometry):
            sides = tuple((side + 2 * padding - size) // stride + 1 for side in sides)
            self.grids[f"cvt.encoder.stages.{stage}.*"] = sides

    def forward(self, images: Tensor) -> Tensor:
        """The class token of the last stage, normed, to logits."""
        logits: Tensor = self.classifier(self.layernorm(self.cvt(images).cls_token_value).mean(1))
        return logits


def cvt_13(pretrained: bool = False, **options: Any) -> nn.Module:
    """CvT-13 (Wu et al. 2021) with keys and values at stride 1."""
    told = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # by timm, about weights that are not there
    model: Any = Cvt(**{name: value for name, value in options.items() if name not in told})
    own = {"first_conv": "", "classifier": "classifier"}
    model.pretrained_cfg = model.default_cfg = {**_settings("cvt_13", "deit_tiny_patch16_224"), **own}
    return model


def _settings(name: str, like: str) -> dict[str, Any]:
    """timm's settings of a host of ours, without weights: those of a model that reads pictures alike."""
    settings: dict[str, Any] = load_library("timm").get_pretrained_cfg(like).to_dict()
    return {**settings, "architecture": name, "hf_hub_id": None, "url": ""}


def names() -> dict[str, tuple[str, str, bool]]:
    """The registered models: by name the mixer, timm's name of the host, and whether parameters are matched."""
    models = {}
    for label, mixer in MIXERS.items():
        for short, host in HOSTS.items():
            name = f"{label}_{short}"
            models[RENAMED.get(name, name)] = (mixer, host, False)
            if mixer in widths():
                models[f"{name}_matched"] = (mixer, host, True)
    # Poly-NL (Table 1) is what the papers insert; the other mixers replace attention.
    return models | {f"poly_nl_{short}": ("poly_nl:reduction=4", host, False) for short, (host, _) in INSERTED.items()}


class StochasticDepth:
    """A forward hook of a residual branch: while training, each sample drops the branch with a probability.

    timm's EfficientViT has no option for it.
    """

    def __init__(self, drop_prob: float) -> None:
        self.drop_prob = drop_prob

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        mask = torch.rand(len(output), *(1,) * (output.ndim - 1), device=output.device) >= self.drop_prob
        return output * mask / (1 - self.drop_prob)


def _drop_branches(model: nn.Module, rate: float) -> None:
    """Stochastic depth in the stages of an EfficientViT: branch i of n at rate · i / n, as by its authors' code."""
    kind, stages = load_library("timm.models.efficientvit_mit").ResidualBlock, model.get_submodule("stages")
    branches: list[Any] = [part for part in stages.modules() if isinstance(part, kind) and part.shortcut is not None]
    for place, block in enumerate(branches, 1):
        block.main.register_forward_hook(StochasticDepth(rate * place / len(branches)))


def dropping(model: nn.Module) -> list[Any]:
    """What drops branches of a model of `create`: timm's modules and our hooks, each with its rate as `drop_prob`."""
    hooks = [hook for part in model.modules() for hook in part._forward_hooks.values()]
    modules = [part for part in model.modules() if type(part).__name__ == "DropPath"]
    return [*modules, *(hook for hook in hooks if isinstance(hook, StochasticDepth))]


def create(
    mixer: str,
    host: str,
    *,
    match: str | None = None,
    img_size: int | tuple[int, int] | None = None,
    plan: str | None = None,
    **options: Any,
) -> nn.Module:
    """A model of timm with fresh weights and a mixer in place of its attention, in training mode.

    Args:
        mixer: a mixer's name and options, such as "padre:degree=3". "keep" leaves the host as it is.
        host: timm's name of the model: "deit_tiny_patch16_224", "efficientvit_b1". In "resnet50" the mixer is inserted
            as a residual block before the last block of Res4.
        plan: which layers get the mixer, as `polymix.convert` takes it, such as "1:1"; None: all of them.
        match: "parameters" chooses the mixer's width so that the parameters are as many as attention's. None: no.
        img_size: (H, W) or a side, in pixels. None: the host's own. A mixer with positions fixes it.
        options: of `timm.create_model`, such as num_classes, in_chans, drop_path_rate, depth.
    Raises:
        OptionError: an unknown host, or pretrained weights, of which there are none. As `polymix.convert`.
    """
    timm = load_library("timm")
    check_choice("match", match, (None, "parameters"))
    if options.pop("pretrained", False):
        got, cure = f"True for {host} with {mixer}", "Train it (polymix train classify), or convert a pretrained host."
        raise OptionError("pretrained", got, "False: there are no published weights", cure)
    if not timm.is_model(host):
        cure = "timm.list_models() lists them."
        raise OptionError("host", repr(host), "the name of a model of timm", cure)
    sides = None if img_size is None else (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    branches = options.pop("drop_path_rate", None) if host.startswith(("efficientvit_b", "efficientvit_l")) else None
    check_number("drop_path_rate", branches or 0.0, 0.0, 1.0, "a share below 1", 0.1)
    config = None if mixer == "keep" else config_of(mixer, "mixer")
    model = _fresh(host, sides, options)
    if sides is not None:
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (model.pretrained_cfg["input_size"][0], *sides)}
    at = dict(INSERTED.values()).get(host)
    if plan is not None and (config is None or at is not None):
        got = f"{plan!r} for {host} with {mixer}"
        raise OptionError("plan", got, "None: no attention is replaced", "Leave plan out.")
    if config is not None and at is not None:
        if match is not None:
            cure = "Leave match out: an inserted block replaces no attention."
            raise OptionError("match", repr(match), f"None for {host}, which has no attention", cure)
        insert(model, at, config)
    elif config is not None and isinstance(model, Cvt):
        _convert_cvt(model, plan, config, match)
    elif config is not None:
        whole = config if plan is None else plan  # an untrained host has no biases to lose
        naming_drops(partial(convert, model, whole, mixer=config, match=match, init="fresh"))
    if branches:
        _drop_branches(model, branches)
    return model


def _fresh(host: str, sides: tuple[int, ...] | None, options: Mapping[str, Any]) -> Any:
    """A host of timm with fresh weights, for images of `sides` pixels.

    Hosts without the option img_size are not built for a size; theirs must be halved five times without a rest.
    """
    options = dict(options) if sides is None else {**options, "img_size": sides}
    while True:
        try:
            return load_library("timm").create_model(host, pretrained=False, **options)
        except TypeError as error:
            unknown = next((name for name in options if f"'{name}'" in str(error)), "")
            idle = unknown == "drop_path_rate" and not options[unknown]  # nothing is to be dropped
            if unknown == "img_size" and any(side % 32 for side in options[unknown]):
                got, cure = str(options[unknown]), f"{host} halves an image five times."
                raise OptionError(unknown, got, "a multiple of 32", cure) from error
            if unknown != "img_size" and not idle:
                raise
            del options[unknown]


def _convert_cvt(model: Cvt, plan: str | None, config: MixerConfig, match: str | None) -> None:
    """The mixer in each layer that the plan names, stage by stage, as each stage has a grid of its own."""
    layers = [name for name, part in model.named_modules() if type(part).__name__ == "CvtAttention"]
    chosen = dict.fromkeys(layers, config) if plan is None else resolve(parse_plan(plan), layers, config)
    for stage, grid in model.grids.items():
        mixers = {name: mixer for name, mixer in chosen.items() if mixer is not None and fnmatchcase(name, stage)}
        if mixers:
            convert(model, mixers, grid=grid, match=match, init="fresh")


def _entrypoint(name: str, mixer: str, host: str, matched: bool) -> Callable[..., nn.Module]:
    def build(
        pretrained: bool = False, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None,
        cache_dir: Any = None, **options: Any,
    ) -> nn.Module:  # fmt: skip
        asked = options.pop("match", None)
        match = "parameters" if matched and asked is None else asked
        model: Any = create(mixer, host, pretrained=pretrained, match=match, **options)
        overlay = pretrained_cfg_overlay or {}
        own = {"architecture": name, "polymix_host": host, "hf_hub_id": None, "url": ""}
        model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **overlay, **own}
        return model

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{host} of timm with {mixer} in attention's place{', parameters matched' if matched else ''}."
    return build


for _host in (metaformer_s12, cvt_13):
    if not load_library("timm").is_model(_host.__name__):
        load_library("timm.models").register_model(_host)
for _name, _of in names().items():
    if not load_library("timm").is_model(_name):
        load_library("timm.models").register_model(_entrypoint(_name, *_of))
