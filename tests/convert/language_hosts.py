"""Small GPT-2 and Llama models, and the tokens and masks that the tests of their conversion use."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from tests.convert import checks

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: transformers is not installed")

VOCAB, BATCH, TOKENS = 61, 3, 9
RECURRENT = ("padre", "pom", "qt", "linear")
CACHED = (
    *((mixer, {}) for mixer in RECURRENT), ("1:1", {"mixer": "pom"}), ({"*.1.*": "qt"}, {}), ("pom:rotary=1d", {})
)  # fmt: skip


def gpt2(**changes):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=16, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=None, pad_token_id=0, **{"n_layer": 2, **changes},
    )  # fmt: skip
    return checks.stirred(transformers.GPT2LMHeadModel(config), scale=0.3).eval()


def llama(**changes):
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.LlamaConfig(**{**options, **changes})
    return checks.stirred(transformers.LlamaForCausalLM(config), scale=0.3).eval()


HOSTS = {"gpt2": gpt2, "llama": llama}
IDS = torch.randint(1, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones(BATCH, TOKENS, dtype=torch.long)
LEFT[0, :3] = LEFT[2, :5] = 0
RIGHT = LEFT.flip(1)
HOLES = RIGHT * (torch.arange(TOKENS) % 4 != 2)
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])


def given(**options):
    return {"input_ids": IDS, "use_cache": False, **options}


def real(mask):
    return lambda output: output.logits[mask.bool()]


def logits(output):
    return output.logits


def converted(host, plan, **options):
    return polymix.convert(host(), plan, **options).model.eval()


def checkpointing(model):
    """By its name from transformers 5 on, or before."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def generate(model, mask=LEFT, ids=IDS, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False, **options)
