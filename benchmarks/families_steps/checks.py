"""What is checked of one model with one mixer, and the row that says so."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import polymix
from polymix.convert.drops import naming_drops
from polymix.convert.tracing import difference, run, tensors
from polymix.errors import PolymixError

from .inputs import inputs_of


def outputs(model: nn.Module, example: Any) -> Tensor:
    """The first tensor that a model returns; models that draw random numbers draw the same ones."""
    torch.manual_seed(0)
    return next(t for t in tensors(run(model, example)) if t.is_floating_point())


def example_of(model: nn.Module) -> Any:
    """The first input that a model takes. Raises what the fullest one led to."""
    failure: Exception | None = None
    for example in inputs_of(model):
        try:
            with torch.no_grad():
                outputs(model, example)
            return example
        except Exception as error:
            failure = failure or error
    raise failure or ValueError("no input is known")


def callable_model(candidates: Iterable[nn.Module]) -> tuple[nn.Module, Any]:
    """The first of the models that can be called, and what with. Raises what the first one led to."""
    failure: Exception | None = None
    try:
        for model in candidates:
            try:
                return model, example_of(model)
            except Exception as error:
                failure = failure or error
    except Exception as error:
        failure = failure or error
    raise failure or ValueError("no class of models")


def converted(
    model: nn.Module, mixer: str, example: Any, of: type | None = None
) -> tuple[polymix.ConversionReport, list[str]]:
    """The conversion, and the parts of attention that had to be named for it.

    of: a class of attention. Where a plan for the whole model leaves it, the plan names one of its layers.
    """
    lost: list[str] = []
    names = [name for name, part in model.named_modules() if of is not None and type(part) is of]

    def convert_by(plan: Any) -> polymix.ConversionReport:
        def convert(drop: tuple[str, ...]) -> polymix.ConversionReport:
            lost[:] = drop
            return polymix.convert(model, plan, input=example, drop=drop)

        return naming_drops(convert)

    report = convert_by(mixer)
    if names and not any(f"{name}.".startswith(f"{layer}.") for name in names for layer in report.adapters):
        report.undo()
        report = convert_by({names[0]: mixer})
    return report, lost


def checks(model: nn.Module, mixer: str, example: Any, of: type | None = None) -> Iterator[tuple[str, Any]]:
    """What works with one mixer, check by check. of: a class of attention that must be among what is converted."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        theirs = outputs(model, example)
    try:
        own = _generates(model, example)
    except Exception:  # from pictures or codes of sound, say: the host does not generate from this example either
        own = None
    report, lost = converted(model, mixer, example, of)
    yield "dropped", lost
    layers = [layer for layer in report.layers if layer.now]
    yield "layers", [len(layers), len(report.layers)]
    yield "way", sorted({type(adapter).__name__ for adapter in report.adapters.values()})
    with torch.no_grad():
        ours = outputs(model, example)
    yield "finite", bool(ours.isfinite().all()) and ours.shape == theirs.shape
    yield "trains", learns(model, example)
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


def same_by_softmax(model: nn.Module, example: Any, of: type | None = None) -> bool | None:
    """Whether softmax mixers with the host's maps give the host's output; None where polymix says that they do not."""
    with torch.no_grad():
        theirs = outputs(model, example)
        try:
            report, lost = converted(model, "softmax", example, of)
        except PolymixError:
            return None
        ours = outputs(model, example)
    said = lost or any(layer.dropped for layer in report.layers)
    report.undo()
    return None if said else difference(ours, theirs) < 1e-3


@torch.no_grad()
def passing_gradients(model: nn.Module) -> nn.Module:
    """A copy of a model whose host lets gradients reach every layer.

    No residual branch is dropped at random, as Swin drops some, and no map is zero, as LeViT's last norms are at first:
    behind either a host's own attention gets no gradient.
    """
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(getattr(part, "drop_prob", None), float):
            vars(part)["drop_prob"] = 0.0
    ours = {
        id(weight) for part in model.modules() if isinstance(part, polymix.TokenMixer) for weight in part.parameters()
    }
    for weight in model.parameters():
        if weight.is_floating_point() and id(weight) not in ours and not weight.any():
            weight.normal_(std=0.02)
    return model


def learns(model: nn.Module, example: Any) -> bool:
    """Whether every mixer that is called gets a gradient, where its host lets one through."""
    model = passing_gradients(model)
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
