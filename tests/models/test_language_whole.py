"""Language models over a million tokens, compiled, and sharded."""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.helpers import jitter, slow_but
from tests.models.tiny import IDS, LEFT, MIXERS, SHAPES, VOCAB, error, fresh, tiny

pytestmark = pytest.mark.slow  # minutes together


def size(cache):
    """Bytes of all states."""
    return sum(t.nbytes for layer in cache.layers for t in tree_leaves(layer.state) if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    ("mixers", "positions"), [("pom", "none"), (["pom", "local:window=64"], "rotary")], ids=["pom", "hybrid"]
)
@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
@torch.no_grad()
def test_long_texts_do_not_make_it_drift(mixers, positions, count):
    model = fresh(mixers, "llama", hidden_size=32, positions=positions, short_conv=3)
    model = jitter(model, scale=0.2).eval()
    ids = torch.randint(VOCAB, (1, count), generator=torch.Generator().manual_seed(1))
    last, sizes = {}, [size(model(ids[:, :1000]).past_key_values)]
    for dtype in (torch.float32, torch.float64):
        cache, run = None, copy.deepcopy(model).to(dtype)
        for chunk in ids.split(16_384, dim=1):
            out = run(chunk, past_key_values=cache, use_cache=True, logits_to_keep=64)
            cache = out.past_key_values
        if dtype == torch.float32:
            sizes.append(size(cache))
        assert cache.get_seq_length() == count
        assert all(t.isfinite().all() for layer in cache.layers for t in tree_leaves(layer.state)
                   if isinstance(t, torch.Tensor))  # fmt: skip
        step = run(ids[:, :1], past_key_values=cache)
        last[dtype] = torch.cat((out.logits, step.logits), 1)
    assert sizes[0] == sizes[1], "the state grew"
    drift = error(last[torch.float32], last[torch.float64])
    assert drift <= 1e-5, f"float32 has drifted by {drift:.1e}"  # measured: 6e-7, which it is after 1,000 too


# -- compiled (aot_eager: the same tracing and symbolic shapes as Inductor, without its C++ compile time)


MINUTES = ("performer", "hyena")  # take them to trace where the length is open: they are compiled for one
TRACED = [  # one of each kind of scan, and of convolution; each mixer by itself is compiled in tests/contracts
    pytest.param(
        name, marks=() if name in ("pom-3", "padre-3", "qt", "mamba", "softmax-pom") else pytest.mark.exhaustive
    )
    for name in MIXERS
]


def compiled(model, **options):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, **options), counter


def learnt(model, run, ids):
    """The loss, the logits and all gradients of a call."""
    model.zero_grad(set_to_none=True)
    out = run(ids, labels=ids)
    out.loss.backward()
    return [out.loss, out.logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", TRACED)
def test_a_compiled_model_learns_in_one_graph_for_any_length(name):
    model = copy.deepcopy(tiny(name, list(SHAPES)[len(name) % 4])).train()
    run, counter = compiled(model, fullgraph=True)
    for n in (12,) if name in MINUTES else (12, 20, 33):
        ids = torch.randint(VOCAB, (2, n))
        if name not in MINUTES:
            torch._dynamo.mark_dynamic(ids, 1)
        for got, expected in zip(learnt(model, run, ids), learnt(model, model, ids), strict=True):
            assert error(got, expected) <= 1e-4 or expected.abs().max() < 1e-6
    assert counter.frame_count == 1, "compiled anew for another length"


@pytest.mark.parametrize("name", TRACED)
def test_a_compiled_forward_with_padding(name):
    model = tiny(name, "llama")
    run, _ = compiled(model, fullgraph=True)
    with torch.no_grad():
        for mask in (LEFT, LEFT.flip(1), torch.ones_like(LEFT)):
            got, expected = (f(IDS, mask, use_cache=False).logits[mask.bool()] for f in (run, model))
            assert error(got, expected) <= 1e-5


@pytest.mark.parametrize("name", slow_but((), ["pom", "pom-local", "softmax", "mamba"], ["pom-local", "softmax"]))
@torch.no_grad()
def test_a_compiled_model_decodes(name):
    """With a cache the graph breaks where its layers are made, which fullgraph would refuse."""
    model = tiny(name, "llama")
    run, counter = compiled(model)
    cache = run(IDS[:, :8]).past_key_values
    for place in range(8, 12):
        got = run(IDS[:, place : place + 1], past_key_values=cache).logits
        assert error(got, model(IDS[:, : place + 1], use_cache=False).logits[:, -1:]) <= 1e-5
    assert counter.frame_count


# -- sharded


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["pom-local", "pom-softmax", "mamba"])
def test_blocks_are_sharded_by_the_wrapping_policy(one_process, name):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, model = (copy.deepcopy(tiny(name, "llama")).train() for _ in range(2))
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert len(wrapped) == model.config.num_layers
    mesh = init_device_mesh("cpu", (1,))
    for module in (*wrapped, model):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for _ in range(2):
        losses = [m(IDS, LEFT, labels=IDS).loss for m in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
