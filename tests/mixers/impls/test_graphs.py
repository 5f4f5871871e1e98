"""What "auto" puts into a graph: C kernels as nodes under torch.compile, plain PyTorch in exported programs."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import polymix
from polymix.errors import ShapeError
from polymix.ops.native.library import why_not
from tests.helpers import close, tokens

native = pytest.mark.skipif(why_not() is not None, reason=f"untested: kernels in C as nodes of graphs: {why_not()}")
MIXERS = ("padre", "pom", "qt", "poly_sa", "poly_nl")
MANY, FEWER = 1030, 40


@pytest.fixture(autouse=True)
def thresholds(real_thresholds):
    """The real ones: the other tests run kernels for any number of tokens."""
    torch._dynamo.reset()


def make(name):
    torch.manual_seed(0)
    return polymix.create_mixer(name, 16, **({"positions": "mean"} if name == "poly_sa" else {})).eval()


def some(n=MANY):
    return tokens(1, n, 16, dtype=torch.float32)


def operators(graph):
    """The names of our operators among the graph's nodes."""
    return {str(node.target) for node in graph.graph.nodes if str(node.target).startswith("polymix.")}


def compiled(function):
    """The compiled function, and the set of our operators in its graphs, which fills when it runs."""
    inside = set()

    def keep(graph, _):
        inside.update(operators(graph))
        return make_boxed_func(graph.forward)

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)), inside


@native
@pytest.mark.parametrize("name", MIXERS)
def test_many_tokens_are_a_node_with_the_same_result(name):
    mixer, x = make(name), some()
    run, found = compiled(mixer)
    with torch.no_grad():
        close(run(x), mixer(x), 1e-5)
    assert found, "auto left the kernel out, though it is faster than the compiled code"


@native
@pytest.mark.parametrize("name", MIXERS)
def test_the_backward_is_a_node_too(name):
    mixer, x = make(name), some().requires_grad_()
    run, found = compiled(mixer)
    (ours,), (plain,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (run, mixer))
    close(ours, plain, 1e-4)
    assert any("backward" in name for name in found)


@native
def test_few_tokens_stay_with_the_compiler_and_one_graph_serves_all_of_either_kind():
    mixer = make("pom")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(mixer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        counts = []
        for n in (FEWER, FEWER + 7, MANY, MANY + 9, FEWER + 3):
            close(run(some(n)), mixer(some(n)), 1e-5)
            counts.append(counter.frame_count)
        assert counts == [1, 1, 2, 2, 2], "expected one graph for few tokens and one for many"
        few, inside = compiled(mixer)
        few(some(FEWER))
    assert not inside


@pytest.mark.parametrize("name", ["padre", "pom"])
def test_an_exported_program_needs_no_polymix(name):
    mixer, x = make(name), some()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(mixer, (x,), dynamic_shapes=({1: length},))
    assert not operators(program.graph_module), "the program would not run where polymix is missing"
    close(program.module()(some(FEWER)), mixer(some(FEWER)), 1e-5)


@pytest.mark.parametrize("name", ["padre", "pom"])
def test_a_graph_without_the_kernels_is_plain_pytorch(name, monkeypatch):
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    mixer, x = make(name), some()
    run, found = compiled(mixer)
    with torch.no_grad():
        close(run(x), mixer(x), 1e-5)
    assert not found


@pytest.mark.parametrize("name", ["padre", "pom"])
def test_a_graph_under_torch_func_is_plain_pytorch(name):
    mixer, x = make(name), some()
    run, found = compiled(torch.func.vmap(lambda x: mixer(x)))
    with torch.no_grad():
        close(run(x[None])[0], mixer(x), 1e-5)
    assert not found, "a kernel cannot run on the tensors of torch.func"


@native
@pytest.mark.parametrize("name", MIXERS)
def test_a_graph_under_autocast_has_the_kernel_and_its_dtypes(name, monkeypatch):
    for unit in ("AMX", "AVX512_BF16"):
        monkeypatch.setattr(f"polymix.ops.shared.blocks.{unit}", False)
    mixer, x = make(name), some()
    run, found = compiled(mixer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = run(x), mixer(x)
        assert y.dtype == expected.dtype
        close(y.float(), expected.float(), 0.02)
        y.float().square().mean().backward()
    assert found, "the kernel was left out"
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixer.parameters())


@native
def test_explain_tells_what_a_compiled_model_runs():
    mixer = make("poly_nl")
    model = torch.nn.Sequential(mixer, make("poly_nl"))
    model[1].compile(backend="eager")
    with torch.no_grad():
        for n, whole, parts in ((MANY, "native", ["native", "native"]), (300, "eager", ["native", "eager"])):
            (choice,) = polymix.explain(torch.compile(mixer, backend="eager"), some(n))
            assert (choice.layer, choice.impl) == ("", whole)
            assert [c.impl for c in polymix.explain(model, some(n))] == parts
            assert polymix.explain(mixer, some(n))[0].impl == "native", "the choice for a graph outlived the call"
        with pytest.raises(ShapeError):
            polymix.explain(torch.compile(mixer, backend="eager"), some()[..., :3])
        assert polymix.explain(mixer, some(300))[0].impl == "native", "a failed call left the choice for a graph"
