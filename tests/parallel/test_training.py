"""A model whose sequences are shared trains as on one process: with the engines of torch, in pieces, with dropout."""

import itertools
import json
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from polymix import MixerBlock, create_mixer, parallelize
from polymix.errors import CapabilityError, OptionError, ParallelError
from polymix.parallel import alone, guard, mean_loss, shard, stream
from polymix.parallel.collectives import store_of_all
from tests.contracts.mixer_cases import CASES as VARIANTS
from tests.helpers import slow_but
from tests.parallel.group import join, largest, places
from tests.processes import fork, free_port, statuses

DIM, BATCH, TOKENS = 8, 4, 12
LENGTHS = {"uneven": (9, 3), "empty": (12, 0)}


class Tagger(nn.Module):
    """Blocks with mixers, and a class for each token."""

    def __init__(self, *mixers, checkpointed=False, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        built = [create_mixer(name, DIM, **options) for name, options in mixers]
        self.blocks = nn.ModuleList(MixerBlock(DIM, mixer, dropout=dropout) for mixer in built)
        self.head, self.checkpointed = nn.Linear(DIM, 3), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, causal=True) if self.checkpointed else block(x, causal=True)
        return self.head(x)


MIXERS = ("pom", {}), ("local", {"heads": 2, "window": 4}), ("softmax", {"heads": 2}), ("mamba", {"state_size": 2})


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (BATCH, TOKENS), generator=generator)
    labels[0, :5] = -100  # ignored: the processes have different numbers of tokens
    return x, labels


def summed_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def trained(mesh, kind, lengths):
    """The largest difference of gradients, and of the loss, from one process's on the whole batch."""
    flat = mesh["dp", "cp"]._flatten("all")
    x, labels = data()
    model = Tagger(*MIXERS, checkpointed=kind == "checkpoint").double()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        whole = summed_loss(model(x), labels) / (labels >= 0).sum()
    whole.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    parallelize(model, mesh["cp"])
    run = model
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=flat)
        fully_shard(model, mesh=flat)
    elif kind == "compile":
        run = torch.compile(model, backend="aot_eager")
    if kind != "fsdp":
        run = DistributedDataParallel(run, process_group=flat.get_group())
    mine = places(lengths, "contiguous", mesh.get_local_rank("cp"))
    row = mesh.get_local_rank("dp")
    micro = [slice(2 * row, 2 * row + 1), slice(2 * row + 1, 2 * row + 2)] if kind == "accumulate" else [
        slice(2 * row, 2 * row + 2)]  # fmt: skip
    loss, tokens = 0.0, (labels >= 0).sum() / 4  # of a process, on average
    for place, rows in enumerate(micro):
        part, goal = x[rows][:, mine], labels[rows][:, mine]
        with (
            run.no_sync() if place + 1 < len(micro) else torch.enable_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
        ):
            total = summed_loss(run(part), goal)
        if kind == "accumulate":  # one count for both
            total = total / tokens
        else:
            total = mean_loss(total, (goal >= 0).sum(), flat, averaged=True)
            loss = total.item()
        total.backward()
    grads = {name: p.grad.full_tensor() if kind == "fsdp" else p.grad for name, p in model.named_parameters()}
    pairs = [(grads[name], grad) for name, grad in expected.items()]
    return largest(*pairs), 0.0 if kind == "accumulate" else abs(loss - whole.item())


KINDS = ("ddp", "fsdp", "accumulate", "checkpoint", "autocast", "compile")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", slow_but(KINDS[:-1], KINDS))
def test_engines(four, kind, lengths):
    bound = 3e-2 if kind == "autocast" else 1e-12
    for differences in four.call(trained, kind, LENGTHS[lengths]):
        assert max(differences) < bound, differences


def recurrent():
    return Tagger(
        ("pom", {"rotary": "1d"}), ("local", {"heads": 2, "window": 4}), ("mamba", {"state_size": 2})
    ).double()


def in_pieces(mesh, checkpointed):
    """Truncated backpropagation over three pieces, and a token decoded after them: apart from one process."""
    x, _ = data()
    goal, last = torch.randn((*x.shape[:2], 3), generator=torch.Generator().manual_seed(2)).double(), x[:, :1]
    model = recurrent()
    with stream(model) as pieces:
        for part in (slice(0, 5), slice(5, 6), slice(6, TOKENS)):
            (model(x[:, part]) * goal[:, part]).sum().backward()
    with stream(model, pieces.states), torch.no_grad():
        expected = model(last)
    weights = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert torch.equal(expected[:, 0].isfinite(), torch.ones_like(expected[:, 0], dtype=torch.bool))
    model.zero_grad()
    model.checkpointed = checkpointed
    parallelize(model, mesh)
    with stream(model) as pieces:
        for part in (slice(0, 5), slice(5, 6), slice(6, TOKENS)):
            own, own_goal = shard(x[:, part], mesh), shard(goal[:, part], mesh)
            (model(own) * own_goal).sum().backward()
    with alone(model), stream(model, pieces.states), torch.no_grad():
        decoded = model(last)
    totals = {}
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        totals[name] = p.grad
    return largest((decoded, expected), *((totals[name], grad) for name, grad in weights.items()))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_in_pieces_that_are_shared(two, checkpointed):
    assert max(two.call(in_pieces, checkpointed)) < 1e-12


def test_a_stream_is_the_whole_sequence():
    model, (x, _) = recurrent(), data()
    whole = x.clone().requires_grad_()
    model(whole).sum().backward()
    weights = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with stream(model, truncated=False) as pieces:
        y = torch.cat([model(part) for part in x.split([5, 1, 6], dim=1)], 1)
        y.sum().backward()
    assert largest((y, model(x)), *((p.grad, w) for p, w in zip(model.parameters(), weights, strict=True))) < 1e-12
    assert set(pieces.states) == {f"blocks.{i}.mixer" for i in range(3)}
    assert not any("forward" in vars(block.mixer) for block in model.blocks), "the model is as it was"


def test_what_has_no_stream_is_refused():
    with pytest.raises(CapabilityError, match="softmax"), stream(Tagger(*MIXERS)):
        pass
    with pytest.raises(OptionError, match="mixers"), stream(nn.Linear(2, 2)):
        pass
    pom = create_mixer("pom", DIM)
    with stream(pom), pytest.raises(CapabilityError, match="causal"):
        pom(torch.zeros(1, 2, DIM))


@pytest.mark.parametrize("case", VARIANTS)
def test_every_mixer_streams_exactly_or_is_refused_by_name(case):
    name, options = VARIANTS[case]
    torch.manual_seed(0)
    mixer, x = create_mixer(name, 12, dtype=torch.float64, **options), torch.randn(2, TOKENS, 12, dtype=torch.float64)
    if not mixer.capabilities.recurrent:
        with pytest.raises(CapabilityError, match=f"a stream of pieces, which this {name} cannot do"), stream(mixer):
            pass
        return
    whole = mixer(x, causal=True)
    with stream(mixer):
        y = torch.cat([mixer(part, causal=True) for part in x.split([5, 1, 6], dim=1)], 1)
    assert largest((y, whole)) < 1e-12


def shared_stream(mesh):
    model = Tagger(("pom", {}), ("hyena", {"filter": "explicit", "length": 8}))
    with stream(model):  # on one process
        model(torch.zeros(1, 2, DIM))
    with stream(parallelize(model, mesh)):
        pass


def test_a_stream_of_shared_pieces_refuses_hyena_before_any_compute(two):
    said = two.call(caught, shared_stream)
    assert all("prefill of a hyena on several processes, which hands on no state" in text for text in said), said


def caught(mesh, work):
    try:
        work(mesh)
    except CapabilityError as error:
        return str(error)


def dropped(mesh):
    model = parallelize(Tagger(("pom", {"dropout": 0.5}), dropout=0.5), mesh).train()
    torch.manual_seed(5)
    kept = nn.Dropout(0.5)
    kept_apart = parallelize(nn.ModuleList([create_mixer("pom", DIM), kept]), mesh)[1](torch.ones(64))
    model(torch.ones(1, 3 + 5 * mesh.get_local_rank(), DIM))
    return kept_apart.tolist(), torch.rand(()).item()


def test_dropout_draws_apart_and_all_else_alike(two):
    (first, common), (second, other) = two.call(dropped)
    assert first != second, "tokens of two processes would share their dropout"
    assert common == other, "depths of samples, drawn next, would differ"


def language(mesh, mixers):
    from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM

    torch.manual_seed(0)
    config = PolymixGPTConfig(vocab_size=11, hidden_size=DIM, num_layers=len(mixers), num_heads=2, mixers=mixers,
                              max_position_embeddings=32)  # fmt: skip
    model = PolymixGPTForCausalLM(config).double().train()
    ids, worst = torch.randint(11, (2, TOKENS)), 0.0
    packed, place = torch.tensor([0] * 3 + [1] * 7 + [2] * 2).expand(2, -1), torch.arange(TOKENS).expand(2, -1)
    for order, segments in itertools.product(("contiguous", "head_tail"), (None, packed)):
        with alone(model):
            expected = model(ids, position_ids=place, segment_ids=segments).logits
        parallelize(model, mesh, order=order)
        part = [None if t is None else shard(t, mesh, order=order) for t in (ids, place, segments, expected)]
        worst = max(worst, largest((model(part[0], position_ids=part[1], segment_ids=part[2]).logits, part[3])))
    return worst


@pytest.mark.parametrize("mixers", [
    ["pom", "softmax"], ["qt", "local"], ["mamba", "hyena:filter=explicit:length=8", "padre:causal=true"],
    ["linear", "hla", "power", "performer"]])  # fmt: skip
def test_language_models_also_of_packed_sequences(two, mixers):
    assert max(two.call(language, mixers)) < 1e-12


def left_in_the_store(mesh):
    store = store_of_all()
    store.set(f"test/{mesh.get_local_rank()}", "here")
    dist.barrier()
    return store.check(["test/0", "test/1"])


def test_processes_leave_each_other_errors_in_the_store(two):
    said = "guard takes torch's store from a private call; see `store_of_all` for the public one"
    assert hasattr(dist.distributed_c10d, "_get_default_store"), said
    assert two.call(left_in_the_store) == [True, True], said


def fails(rank, world, port, out, how):
    """What the processes say, and after how many seconds, if process 1 raises, is gone or does not come."""
    mesh = join(rank, world, port, timeout=4)
    mixer = parallelize(create_mixer("pom", DIM), mesh)
    mixer(torch.randn(1, 3, DIM))
    start = time.monotonic()
    try:
        with guard(mesh):
            if rank == 1 and how == "raises":
                raise ValueError("no such token")
            if rank == 1 and how == "gone":
                raise SystemExit(3)
            if rank == 1:
                time.sleep(20)
            mixer(torch.randn(1, 3, DIM))
    except (ParallelError, ValueError) as error:
        (out / f"{rank}").write_text(json.dumps([f"{type(error).__name__}: {error}", time.monotonic() - start]))


@pytest.mark.parametrize(("how", "said"), [
    ("raises", "process 1 of 3 failed: ValueError: no such token"),
    pytest.param("gone", "process 1 did not come", marks=pytest.mark.slow),
    pytest.param("late", "process 1 did not come", marks=pytest.mark.slow)])  # fmt: skip
def test_one_process_that_fails_ends_all_with_its_name(tmp_path, how, said):
    port = free_port()
    statuses([fork(fails, rank, 3, port, tmp_path, how) for rank in range(3)])
    for rank in (0, 2):
        text, _ = json.loads((tmp_path / f"{rank}").read_text())
        assert text.startswith("ParallelError") and said in text, text
