"""Language models with any causal mixer a layer, as classes that transformers' Auto classes load once this is imported.

model = PolymixGPTForCausalLM(preset("gppom2-s-hybrid"))
"""

from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError

cure_torchvision()  # before transformers, which imports it
try:
    import transformers
except ImportError as error:
    raise MissingExtraError("transformers", str(error), "pip install 'polymix[text]'") from error

# ruff: noqa: E402
from polymix.models.language.config import PolymixConfig, PolymixGPTConfig, PolymixLlamaConfig
from polymix.models.language.model import (
    PolymixForCausalLM,
    PolymixGPTForCausalLM,
    PolymixGPTModel,
    PolymixLlamaForCausalLM,
    PolymixLlamaModel,
    PolymixModel,
)
from polymix.models.language.presets import PRESETS, matched, parameters, preset

for _config, _model, _language in (
    (PolymixGPTConfig, PolymixGPTModel, PolymixGPTForCausalLM),
    (PolymixLlamaConfig, PolymixLlamaModel, PolymixLlamaForCausalLM),
):
    transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    transformers.AutoModel.register(_config, _model, exist_ok=True)
    transformers.AutoModelForCausalLM.register(_config, _language, exist_ok=True)

__all__ = [
    "PRESETS", "PolymixConfig", "PolymixForCausalLM", "PolymixGPTConfig", "PolymixGPTForCausalLM", "PolymixGPTModel",
    "PolymixLlamaConfig", "PolymixLlamaForCausalLM", "PolymixLlamaModel", "PolymixModel", "matched", "parameters",
    "preset",
]  # fmt: skip
