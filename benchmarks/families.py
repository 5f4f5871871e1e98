"""Which families of transformers `polymix.convert` takes: every one is built small, converted and tried.

    python benchmarks/families.py benchmarks/results/families.json
    python benchmarks/families.py out.json --only qwen3,modernbert,whisper

Random weights and two layers: this shows what works, not how well. A family is a type of config that transformers
registers. Each is tried in a process of its own, for 25 seconds at most, with a mixer that reads x (pom) and one of
queries, keys and values (qt). A check that does not apply, such as generation with an encoder, is null.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from saving import save
from torch import Tensor, nn

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.adapters.libraries import examples_of, local_files
from polymix.convert.drops import DROPS
from polymix.convert.tracing import run, tensors
from polymix.errors import PolymixError, one_line
from polymix.measure.machine import manifest

cure_torchvision()
import transformers  # noqa: E402 (torchvision is cured first)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

MIXERS = ("pom", "qt")
SECONDS = 25
WIDTH, HEADS, INNER, TOKENS = 32, 4, 48, 64
# What a small config states, under every name that families have for it; only the names that a config has are set.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "embed_dim", "n_embd", "emb_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), INNER),
    **dict.fromkeys(("ffn_hidden_size", "n_inner", "hidden_dim"), INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "vocab_size"), TOKENS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "top_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), WIDTH // HEADS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_length", "max_seq_len", "context_length", "block_size"), TOKENS),
    "rotary_dim": 4, "image_size": 32, "patch_size": 8, "num_hidden_groups": 1, "max_source_positions": 50,
    "num_mel_bins": 16, "projection_dim": WIDTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def small_config(kind: str) -> Any:
    """A small config of a family; parts with a config of their own are small too."""
    config_class = CONFIG_MAPPING[kind]
    usual = config_class()
    stated, renamed = usual.to_dict(), getattr(config_class, "attribute_map", {})
    options = {name: value for name, value in SMALL.items() if name in stated or name in renamed}
    if getattr(usual, "layer_types", None):  # one of each kind, at least two
        options["layer_types"] = [*dict.fromkeys(usual.layer_types), usual.layer_types[-1]][
            : max(2, len(set(usual.layer_types)))
        ]
        options["num_hidden_layers"] = len(options["layer_types"])
    if getattr(usual, "sliding_window", None) and not getattr(usual, "layer_types", None):
        options["sliding_window"] = None
    if "kv_lora_rank" in stated:  # latent attention has a key for every head
        options |= {"num_key_value_heads": HEADS} if "num_key_value_heads" in stated else {}
    angles = dict(getattr(usual, "rope_parameters", None) or {})
    if "mrope_section" in angles:  # of half a head: time, height, width
        options["rope_parameters"] = {**angles, "mrope_section": [2, 1, 1]}
    if "backbone" in stated and "backbone_config" in stated and kind.endswith("detr"):
        options |= {"backbone": "resnet18", "use_timm_backbone": True, "use_pretrained_backbone": False}
    for name in getattr(usual, "sub_configs", {}):
        part = getattr(usual, name, None)
        if getattr(part, "model_type", "") in CONFIG_MAPPING:
            options[name] = small_config(part.model_type).to_dict()
    for _ in range(len(options)):
        try:
            return config_class(**options)
        except Exception as error:  # a name that means something else in this family: its own value stays
            named = [name for name in options if f"'{name}'" in str(error)]
            options.pop(named[0] if named else "head_dim", None)
    return config_class()


def built(kind: str) -> nn.Module:
    """A small model of a family, with a language head where it has one."""
    config = small_config(kind)
    names = ("SpeechSeq2Seq", "Seq2SeqLM", "CausalLM")
    for auto in (*(getattr(transformers, f"AutoModelFor{name}") for name in names), transformers.AutoModel):
        if type(config) in auto._model_mapping:
            torch.manual_seed(0)
            with local_files():
                model: nn.Module = auto.from_config(config)
            return model.eval()
    raise ValueError("no class of models")


def outputs(model: nn.Module, example: Any) -> Tensor:
    """The first tensor that a model returns; models that draw random numbers draw the same ones."""
    torch.manual_seed(0)
    return next(t for t in tensors(run(model, example)) if t.is_floating_point())


def example_of(model: nn.Module) -> Any:
    """The first input that a model takes. Raises what the last one led to."""
    failure: Exception = ValueError("no input is known")
    for example in examples_of(model):
        try:
            with torch.no_grad():
                outputs(model, example)
            return example
        except Exception as error:
            failure = error
    raise failure


def converted(model: nn.Module, mixer: str, example: Any) -> tuple[polymix.ConversionReport, list[str]]:
    """The conversion, and the parts of attention that had to be named for it."""
    lost: list[str] = []
    while True:
        try:
            return polymix.convert(model, mixer, input=example, drop=lost), lost
        except PolymixError as error:
            asked = [name for name in DROPS if f"{name!r}" in error.cure and name not in lost]
            if not error.argument.endswith("drop") or not asked:
                raise
            lost += asked


def checks(kind: str, mixer: str) -> Iterator[tuple[str, Any]]:
    """What works with one mixer, check by check."""
    model = built(kind)
    example = example_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        theirs = outputs(model, example)
    try:
        own = _generates(model, example)
    except Exception:  # from pictures or codes of sound, say: the host does not generate from this example either
        own = None
    report, lost = converted(model, mixer, example)
    yield "dropped", lost
    layers = [layer for layer in report.layers if layer.now]
    yield "layers", [len(layers), len(report.layers)]
    yield "way", sorted({type(adapter).__name__ for adapter in report.adapters.values()})
    with torch.no_grad():
        ours = outputs(model, example)
    yield "finite", bool(ours.isfinite().all()) and ours.shape == theirs.shape
    yield "trains", _trains(model, example)
    yield "padding", _padding(model, example)
    ordered = all(adapter.causal for adapter in report.adapters.values() if not getattr(adapter, "cross", False))
    yield "generates", _generates(model, example) if ordered and own else None
    with tempfile.TemporaryDirectory() as folder:
        polymix.save_pretrained(model, folder)
        with torch.no_grad():
            yield (
                "loads",
                torch.equal(outputs(polymix.load_pretrained(folder), example), outputs(model.eval(), example)),
            )
    report.undo()
    after = model.state_dict()
    kept = [name for name in before if "running_" not in name and "num_batches" not in name]
    yield "undone", before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in kept)


def _trains(model: nn.Module, example: Any) -> bool:
    """Whether every mixer that is called gets a gradient."""
    called: list[nn.Module] = []
    mixers = [part for part in model.modules() if isinstance(part, polymix.TokenMixer)]
    hooks = [part.register_forward_hook(lambda part, args, output: called.append(part)) for part in mixers]
    model.train()
    torch.manual_seed(0)
    given = [t for t in tensors(run(model, example)) if t.is_floating_point() and t.requires_grad]
    torch.stack([t.float().square().mean() for t in given]).sum().backward()
    grads = [any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in part.parameters()) for part in called]
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    model.eval()
    return all(grads)


def _padding(model: nn.Module, example: Any) -> bool | None:
    """Whether padded ids change nothing in real tokens; None where the model takes no ids, or its host changes too."""
    if set(example) - {"input_ids", "attention_mask"} or "input_ids" not in example:
        return None
    ids = example["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    other = ids.clone()
    other[:, -2:] = 3
    with torch.no_grad():
        first, second = (outputs(model, {"input_ids": its, "attention_mask": mask}) for its in (ids, other))
    if first.ndim < 3 or first.shape[1] != ids.shape[1]:
        return None
    return bool(torch.allclose(first[:, :-2], second[:, :-2], atol=1e-5))


def _generates(model: nn.Module, example: Any) -> bool | None:
    """Whether generation with the cache gives the tokens of generation without."""
    if "input_ids" not in example or not getattr(model, "can_generate", bool)():
        return None
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
    }
    with torch.no_grad():
        one, two = (model.generate(example["input_ids"], use_cache=use, **options) for use in (True, False))
    return torch.equal(one, two)


def row_of(kind: str, mixer: str) -> dict[str, Any]:
    """The row of one family with one mixer: each check, or at which stage it stopped and why."""
    row: dict[str, Any] = {"family": kind, "mixer": mixer}
    try:
        model = built(kind)
        row["model"] = type(model).__name__
        example_of(model)
    except Exception as error:
        why = f"not built here: {type(error).__name__}: {shorten(one_line(error), 160, placeholder=' …')}"
        return {**row, "why": why, "stage": "build"}
    try:
        for name, value in checks(kind, mixer):
            row[name] = value
    except PolymixError as error:
        row |= {"why": one_line(error), "stage": "refused"}
    except Exception as error:
        why = f"{type(error).__name__}: {shorten(one_line(error), 200, placeholder=' …')}"
        row |= {"why": why, "stage": "traceback"}
    return row


def _send_row(kind: str, mixer: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    pipe.send(row_of(kind, mixer))


def row_in_time(kind: str, mixer: str, seconds: float = SECONDS) -> dict[str, Any]:
    """``row_of`` in a process of its own that may take so many seconds.

    It is forked, so it is for a program that has used no threads yet: a child waits forever for those of its parent.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(kind, mixer, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        row = ours.recv() if ours.poll(seconds) else {"why": f"took more than {seconds} s", "stage": "slow"}
    except EOFError:
        row = {"why": "the process ended", "stage": "crash"}
    process.kill()
    process.join()
    return {"family": kind, "mixer": mixer, **row}


def works(row: dict[str, Any]) -> bool:
    """Whether a family converts and all checks that apply hold."""
    names = ("finite", "trains", "padding", "generates", "loads", "undone")
    return "why" not in row and all(row.get(name) is not False for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="types of configs, separated by commas")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    arguments = parser.parse_args()
    kinds = arguments.only.split(",") if arguments.only else sorted(CONFIG_MAPPING.keys())
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.only and arguments.out.exists() else []
    rows = [row for row in rows if row["family"] not in kinds]
    for kind in kinds:
        for mixer in arguments.mixers.split(","):
            row = row_in_time(kind, mixer)
            rows.append(row)
            print(kind, mixer, "works" if works(row) else row, flush=True)
            if row.get("stage") == "build":
                break
    rows.sort(key=lambda row: row["family"])
    content = {"transformers": transformers.__version__, "rows": rows}
    save({**content, "machine": manifest("cpu", 1)}, arguments.out)
    for mixer in arguments.mixers.split(","):
        its = [row for row in rows if row["mixer"] == mixer]
        print(f"{mixer}: {sum(map(works, its))} of {len(its)} work")


if __name__ == "__main__":
    main()
