"""Choosing an implementation: the order of preference, the reasons, the log, and the errors."""

import logging

import pytest
import torch

import polymix
from polymix.errors import CapabilityError
from polymix.ops import dispatch
from polymix.ops.dispatch import KERNELS, choose, recording
from tests.helpers import tokens

X = torch.zeros(2, 3)


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())


def chosen(impl="auto", *tensors, **unsupported):
    """The choice for an op; `unsupported` gives each kernel's reason, or None."""
    with recording() as choices:
        name = choose("op", impl, tensors or (X,), unsupported)
    assert [choice.impl for choice in choices] == [name]
    return choices[0]


def test_auto_takes_the_first_supported_kernel():
    assert chosen(blocked=None, triton=None).impl == "blocked", "without a GPU, auto must not use the interpreter"
    assert "triton needs a GPU" in chosen(blocked=None, triton=None).why
    assert chosen(blocked="is too odd", triton=None).impl == "eager"
    assert chosen(blocked="is too odd", triton="is too even").why == "triton is too even; blocked is too odd"
    assert chosen().why == "the only implementation"
    assert chosen("eager", blocked=None).why == chosen("blocked", blocked=None).why == "requested by name"
    assert "float32 on cpu" in chosen(blocked=None).why


@pytest.mark.parametrize("impl", KERNELS)
def test_an_unsupported_request_raises_and_is_not_recorded(impl):
    with recording() as choices:
        for unsupported, why in (({}, "does not implement op"), ({impl: "is too odd"}, "is too odd")):
            with pytest.raises(CapabilityError, match=f"'{impl}' for op: {impl} {why}") as caught:
                choose("op", impl, (X,), unsupported)
            assert "eager" in caught.value.allowed
    assert choices == []


def test_blocked_is_not_chosen_if_any_tensor_needs_a_gradient():
    leaf = torch.zeros(2, requires_grad=True)
    assert chosen("auto", X, leaf, blocked=None).impl == "eager"
    with torch.no_grad():
        assert chosen("auto", X, leaf, blocked=None).impl == "blocked"
    with torch.inference_mode():
        assert chosen("auto", X, leaf, blocked=None).impl == "blocked"
    assert chosen("auto", X, leaf.detach(), blocked=None).impl == "blocked"


class Odd(torch.Tensor):
    pass


def test_transforms_and_tensor_subclasses_rule_out_all_kernels():
    odd = X.as_subclass(Odd)
    for x in (odd, torch.nn.Parameter(X.clone(), requires_grad=False)):
        assert chosen("auto", x, blocked=None, triton=None).impl == ("eager" if x is odd else "blocked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in chosen(blocked=None).why
    assert chosen("auto", torch.zeros(2, 3, device="meta"), blocked=None, triton=None).impl == "eager"

    def inside(x):
        assert chosen("auto", x, blocked=None, triton=None).impl == "eager"
        return x.sum()

    torch.func.vmap(inside)(X)
    torch.func.grad(inside)(X[0])
    torch.func.jvp(inside, (X,), (X,))


def test_meta_and_fake_tensors_run_eager_code():
    mixer = polymix.create_mixer("pom", 8, device="meta")
    with torch.no_grad():
        assert mixer(torch.zeros(2, 5, 8, device="meta")).shape == (2, 5, 8)
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        assert polymix.create_mixer("pom", 8)(torch.zeros(2, 5, 8)).shape == (2, 5, 8)


def test_recordings_nest_and_end(caplog):
    with recording() as outer:
        choose("first", "auto", (X,), {})
        with recording() as inner:
            choose("second", "auto", (X,), {})
        choose("third", "auto", (X,), {})
    choose("fourth", "auto", (X,), {})
    assert [choice.op for choice in outer] == ["first", "third"]
    assert [choice.op for choice in inner] == ["second"]


def test_auto_logs_each_choice_once(caplog, monkeypatch):
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    caplog.set_level(logging.INFO, "polymix")
    mixer, x = polymix.create_mixer("pom", 8), tokens(2, 5, 8, dtype=torch.float32)
    for _ in range(3):
        mixer(x)
        with torch.inference_mode():
            mixer(x)
    messages = [record.getMessage() for record in caplog.records if record.name == "polymix"]
    assert len(messages) == 2, "each choice must be logged once, not on every call"
    assert messages[0].startswith("pom runs eager: ") and "no backward" in messages[0]
    assert messages[1].startswith("pom runs blocked: ") and "needs a GPU" in messages[1]
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_nothing_is_logged_while_a_graph_is_traced(caplog):
    caplog.set_level(logging.INFO, "polymix")
    mixer, x = polymix.create_mixer("pom", 8), tokens(2, 5, 8, dtype=torch.float32)
    torch._dynamo.reset()
    with recording() as choices, torch.no_grad():
        torch.compile(mixer, fullgraph=True, backend="eager")(x)
    assert not choices and not [r for r in caplog.records if r.name == "polymix"]


@pytest.mark.parametrize(("amx", "avx512"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["pom", "poly_nl"])
def test_a_graph_in_bf16_is_whole_on_every_processor(processor, name, amx, avx512):
    """Dynamo does not trace into what asks the processor: a compiled mixer in bf16 would break into pieces."""
    processor(amx=amx, avx512=avx512)
    mixer, x = polymix.create_mixer(name, 8).bfloat16(), tokens(2, 5, 8, dtype=torch.bfloat16)
    torch._dynamo.reset()
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            assert torch.compile(mixer, fullgraph=True, backend="eager")(x).dtype == torch.bfloat16
