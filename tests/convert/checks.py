"""What the tests of all adapters check, on tiny real instances of the libraries' own classes.

`inputs` is what `convert` takes as `input`: a tensor, a tuple of arguments, or a dict of keyword arguments. Models should
have no dropout: they are compared in training too. `of` picks from an output what is compared, such as real tokens alone.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from copy import deepcopy

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves

import polymix
from tests.helpers import close, jitter

MIXERS = ("padre", "pom", "qt", "poly_sa", "poly_nl")
SAME = 1e-5  # relative to the largest entry


def whole(output):
    return output


def call(model, inputs):
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))


def tensors(output):
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def answer(model, inputs, of=whole):
    """The tensors of the output, in evaluation and without gradients."""
    with torch.no_grad():
        return tensors(of(call(model.eval(), inputs)))


def stirred(model, scale=0.1):
    """A copy with every parameter away from its init: a zero bias, a layer scale of 1e-5 would hide mistakes."""
    return jitter(deepcopy(model), scale=scale)


def near(got, expected, tol=SAME):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        close(a.float(), b.float(), tol)


def identical(got, expected):
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def same_as_host(model, inputs, *, plan="softmax", of=whole, tol=SAME, **options):
    """Softmax mixers with the host's weights give the host's output: layout, masks, scale, class token, windows.
    Returns the report."""
    model = stirred(model).eval()
    expected = answer(model, inputs, of)
    report = polymix.convert(model, plan, copy=True, **options)
    assert any(layer.now for layer in report.layers)
    assert not any(layer.dropped for layer in report.layers if layer.now == "softmax"), "some weights got lost"
    near(answer(report.model, inputs, of), expected, tol)
    return report


def keeps_form(model, report, inputs):
    """Types, structure, shapes and dtypes of the output are the host's."""
    with torch.no_grad():
        before, after = call(model.eval(), inputs), call(report.model.eval(), inputs)
    (before, form), (after, now) = tree_flatten(before), tree_flatten(after)
    assert form == now
    for a, b in zip(after, before, strict=True):
        assert type(a) is type(b)
        assert not isinstance(a, torch.Tensor) or (a.shape == b.shape and a.dtype == b.dtype)


def gradients(model, inputs):
    """Of a loss in which every output plays a part, by name."""
    model.train().zero_grad()
    torch.manual_seed(0)  # a host may drop labels at random
    generator = torch.Generator().manual_seed(0)
    outputs = [t for t in tensors(call(model, inputs)) if t.requires_grad]
    assert outputs, "no output depends on a parameter"
    sum((t * torch.randn(t.shape, generator=generator).to(t)).sum() for t in outputs).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def trains(report, inputs):
    """Every parameter of every mixer gets a gradient, and the loss depends on it.

    A head that reads the class token alone leaves out what the last padre does between the tokens of the grid, which the
    class token sees by their mean.
    """
    grads = gradients(report.model, inputs)
    ours = [
        f"{name}.{key}" if name else key
        for name, part in report.adapters.items()
        for key in dict(part.named_parameters())
    ]
    assert ours
    assert not [key for key in ours if grads[key] is None], "no gradient"
    assert not [key for key in ours if not grads[key].isfinite().all()], "a gradient that is not finite"
    last, adapter = list(report.adapters.items())[-1]
    beside = f"{last}.mixer.A." if adapter.prefix else "none"
    idle = [key for key in ours if not grads[key].any() and not (key.startswith(beside) and ".inner." in key)]
    assert not idle, f"the loss does not depend on {idle}"


def accounts(report):
    """Every mixer parameter is inherited or fresh; every parameter of the attention, or part of it, used or dropped."""
    for layer in report.layers:
        if layer.now is None:
            continue
        ours = {key.removeprefix("mixer.") for key, _ in report.adapters[layer.name].named_parameters()}
        assert set(layer.inherited) | set(layer.fresh) == ours and not set(layer.inherited) & set(layer.fresh)
        used = {key for keys in layer.inherited.values() for key in keys}
        assert not used & set(layer.dropped) and all(layer.dropped.values())
        theirs = {key for key, _ in report.attentions[layer.name].named_parameters()}
        assert {key.partition("[")[0] for key in used | set(layer.dropped)} >= theirs, "a parameter without an account"


def converts(model, plan, inputs, **options):
    """A stirred copy of the model converts, answers as before in form, learns, and its weights are accounted for."""
    report = polymix.convert(stirred(model), plan, **options)
    assert any(layer.now for layer in report.layers)
    keeps_form(model, report, inputs)
    trains(report, inputs)
    accounts(report)
    return report


def survives(model, inputs, *, fullgraph=True, backend="eager", of=whole):
    """Deepcopy, a saved and loaded state dict, bfloat16 under autocast, and torch.compile change no answer."""
    expected = answer(model, inputs, of)
    twin = deepcopy(model)
    identical(answer(twin, inputs, of), expected)
    loads(model, jitter(twin))
    identical(answer(twin, inputs, of), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halved = answer(model, inputs, of)
    for a, b in zip(halved, expected, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert (a.float() - b).norm() <= 0.1 * b.norm(), "far off under autocast"
    if backend:
        torch._dynamo.reset()
        near(answer(torch.compile(model, fullgraph=fullgraph, backend=backend), inputs, of), expected)


def loads(model, twin):
    """The state dict, through a file, into a model of the same form."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True), strict=True)


def ignores(model, inputs, others, *, of=whole):
    """What was changed between the inputs, padding say, plays no part in the answer."""
    near(answer(model, others, of), answer(model, inputs, of))


def checkpoints(report, inputs, enable):
    """Gradients with the host's own checkpointing, which `enable(model)` turns on, are those without."""
    expected = gradients(report.model, inputs)
    expected = {name: None if grad is None else grad.clone() for name, grad in expected.items()}
    enable(report.model)
    grads = gradients(report.model, inputs)
    for name, grad in expected.items():
        assert (grad is None) == (grads[name] is None)
        if grad is not None:
            torch.testing.assert_close(grads[name], grad)


def snapshot(model):
    """What must not change: the modules and their mode, the tensors and their bits, plain attributes."""
    modules = [(name, id(module), module.training) for name, module in model.named_modules()]
    plain = {
        f"{name}.{key}": value for name, module in model.named_modules() for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, tuple))
    }  # fmt: skip
    return modules, plain, {key: (t.data_ptr(), t.clone()) for key, t in model.state_dict().items()}


def unchanged(before, after):
    assert before[0] == after[0] and before[1] == after[1] and list(before[2]) == list(after[2])
    for (place, bits), (now, others) in zip(before[2].values(), after[2].values(), strict=True):
        assert place == now and torch.equal(bits, others)


def undoes(model, plan, inputs, **options):
    """Converted in place and undone, the model is the same modules, bits and answers; a second undo raises."""
    expected, before = answer(model, inputs), snapshot(model)
    report = polymix.convert(model, plan, **options)
    call(report.model, inputs)
    assert report.undo() is model
    unchanged(before, snapshot(model))
    identical(answer(model, inputs), expected)
    with pytest.raises(polymix.errors.OptionError, match="undone already"):
        report.undo()


def refuses(model, plan, error, match, **options):
    """The conversion raises before anything is changed."""
    before = snapshot(model)
    with pytest.raises(error, match=match) as caught:
        polymix.convert(model, plan, **options)
    unchanged(before, snapshot(model))
    return caught.value
