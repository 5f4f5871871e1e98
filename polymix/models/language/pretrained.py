"""What all the models are to transformers: their init, saving, and what the library must know of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from polymix.mixers import SoftmaxMixer
from polymix.models.language.block import LanguageBlock, Mlp, SwiGLU
from polymix.models.language.config import PolymixConfig
from polymix.models.language.fill import fill, missing
from polymix.models.language.layer import CausalLayer, mixers_of

AUTO = "polymix_auto"  # the module that a saved folder names for who loads it without importing us


class PolymixPreTrainedModel(PreTrainedModel):
    """Init, saving, and what the library must know of the models."""

    config_class: Any = PolymixConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LanguageBlock"]  # noqa: RUF012  # FSDP and accelerate wrap these
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = False

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]
        """Whether a cache cannot give tokens back, as assisted generation asks."""
        return not all(isinstance(mixer, SoftmaxMixer) for mixer in mixers_of(self))

    def _init_weights(self, module: nn.Module) -> None:
        """Mixers have initialised themselves; those that were made without storage, for a checkpoint, are filled."""
        if isinstance(module, CausalLayer):
            fill(module)
        elif isinstance(module, (nn.Embedding, Mlp, SwiGLU)) or module is getattr(self, "lm_head", None):
            for part in module.modules():
                if isinstance(part, (nn.Embedding, nn.Linear)):
                    shrink = (2 * self.config.num_layers) ** -0.5 if part is getattr(module, "down", None) else 1.0
                    self._normal(part, self.config.initializer_range * shrink)
        elif isinstance(module, LanguageBlock):
            self._ones(module.norm1)
            self._ones(module.norm2)
        elif module is getattr(self, "norm", None):
            self._ones(module)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: else the library shows `_init_weights` no module that has all its own parameters in its parts."""
        return False

    @staticmethod
    def _normal(part: nn.Module, std: float) -> None:
        for name, tensor in missing(part):
            nn.init.zeros_(tensor) if name == "bias" else nn.init.normal_(tensor, std=std)

    @staticmethod
    def _ones(norm: nn.Module) -> None:
        for name, tensor in missing(norm):
            nn.init.constant_(tensor, float(name != "bias"))

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:  # type: ignore[override]
        """As in transformers. The folder says which mixers the layers have now, and loads with `trust_remote_code`
        where polymix.models.language has not been imported."""
        names = type(self).__name__.removesuffix("ForCausalLM").removesuffix("Model")
        self.config.mixers = [mixer.config.to_dict() for mixer in mixers_of(self)]
        self.config.auto_map = {
            "AutoConfig": f"{AUTO}.{names}Config", "AutoModel": f"{AUTO}.{names}Model",
            "AutoModelForCausalLM": f"{AUTO}.{names}ForCausalLM",
        }  # fmt: skip
        saved = super().save_pretrained(save_directory, **options)
        text = f"from polymix.models.language import {names}Config, {names}ForCausalLM, {names}Model  # noqa: F401\n"
        (Path(save_directory) / f"{AUTO}.py").write_text(text, "utf-8")
        return saved
