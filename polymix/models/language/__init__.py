"""Language models with any causal mixer in each layer. Once imported, transformers' Auto classes load them.

model = PolymixGPTForCausalLM(preset("gppom2-s-hybrid"))
"""

from polymix.compat import cure_torchvision
from polymix.extras import needs

cure_torchvision()  # before transformers, which imports it
with needs("text"):
    import transformers

# ruff: noqa: E402
from polymix.models.language.config import (
    PRESETS,
    PolymixConfig,
    PolymixGPTConfig,
    PolymixLlamaConfig,
    matched,
    parameters,
    preset,
)
from polymix.models.language.model import (
    PolymixForCausalLM,
    PolymixGPTForCausalLM,
    PolymixGPTModel,
    PolymixLlamaForCausalLM,
    PolymixLlamaModel,
    PolymixModel,
)

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
