"""One sequence on 2 and 4 processes is what one process computes: outputs, all gradients and states, to 1e-12 (`power` in pieces: 1e-10).

Mixers, masks, lengths and orders are drawn, in float64.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.parallel import parallelize_module

from polymix import create_mixer, list_mixers, parallelize
from polymix.errors import CapabilityError, MaskError, ParallelError, ShapeError, StateError
from polymix.mixers.registry import mixer_class
from polymix.ops.shared.sequences import apart
from polymix.parallel import SequenceParallel, alone, gather, positions, shard
from tests.helpers import first_of_each, slow_but
from tests.parallel.group import largest, places, summed

DIM, ROWS, TOKENS = 12, 2, 24
CASES = {
    "pom": ("pom", {}, (False, True)), "pom-rotary": ("pom", {"rotary": "1d"}, (False, True)),
    "pom-groups": ("pom", {"groups": 3, "selection_heads": 2, "reduction": "sum"}, (False, True)),
    "pom-2d": ("pom", {"rotary": "2d"}, (False,)),
    "pom-2d-class": ("pom", {"rotary": "2d", "num_prefix_tokens": 3}, (False,)), "pom-decay": ("pom", {"decay": 3}, (True,)),
    "qt": ("qt", {"heads": 3}, (False, True)), "qt-full": ("qt", {"heads": 3, "form": "full"}, (False, True)),
    "power": ("power", {"heads": 3}, (False, True)),
    "power-gate": ("power", {"heads": 3, "gate": True}, (True,)),
    "power-gate-sum": ("power", {"heads": 3, "gate": True, "degree": 3, "normalize": False}, (True,)),
    "linear": ("linear", {"heads": 3}, (False, True)), "performer": ("performer", {"heads": 3}, (False, True)),
    "mala": ("mala", {"heads": 3}, (False, True)), "nala": ("nala", {"heads": 3}, (False, True)),
    "pola": ("pola", {"heads": 3}, (False, True)),
    "hla": ("hla", {"heads": 3}, (False, True)), "hydra": ("hydra", {}, (False, True)), "poly_nl": ("poly_nl", {}, (False,)),
    "poly_sa": ("poly_sa", {"heads": 3, "positions": "mean"}, (False,)),
    "poly_sa-learned": ("poly_sa", {"heads": 3, "grid": (TOKENS,)}, (False,)),
    "poly_sa-class": ("poly_sa", {"heads": 3, "grid": (TOKENS - 1,), "num_prefix_tokens": 1}, (False,)),
    "mamba": ("mamba", {"state_size": 3}, (True,)),
    "padre": ("padre", {"degree": 3, "kernel_size": 3}, (False,)),
    "padre-causal": ("padre", {"degree": 3, "causal": True, "kernel_size": 4}, (True,)),
    "padre-2d": ("padre", {"degree": 2, "grid": (8, 3), "kernel_size": 3}, (False,)),
    "conv2former": ("conv2former", {"grid": (8, 3), "kernel_size": 3}, (False,)),
    "local": ("local", {"heads": 3, "window": 4}, (True,)),
    "local-rotary": ("local", {"heads": 3, "window": 4, "rotary": 1e4}, (True,)),
    "linear_floor": ("linear_floor", {}, (False, True)), "softmax": ("softmax", {"heads": 3}, (False, True, 3)),
    "softmax-rotary": ("softmax", {"heads": 3, "rotary": 1e4}, (False, True)),
    "softmax-relative": ("softmax", {"heads": 3, "grid": (TOKENS,), "relative": True}, (False,)),
    "hyena": ("hyena", {"length": 64}, (True,)), "hyena-both": ("hyena", {"length": 64, "bidirectional": True}, (False,)),
}  # fmt: skip
TRIES = (Phase.explicit, Phase.generate)  # processes start anew after an error: nothing is shrunk
QUICK = first_of_each(CASES, "padre-causal", "pom-decay")
ROWWISE = ("padre-2d", "conv2former")  # whole rows of 3 tokens
PREFILLED = [case for case, (name, _, causal) in CASES.items()
             if True in causal and name not in ("hyena", "softmax")]  # fmt: skip


def mixer_of(case):
    name, options, _ = CASES[case]
    torch.manual_seed(0)
    return create_mixer(name, DIM, dtype=torch.float64, **options)


def drawn(mixer, seed, padded, packed, causal=False):
    """Tokens, goals of their outputs, a mask and segments, where the mixer takes them."""
    generator = torch.Generator().manual_seed(seed)
    x, goal = torch.randn(2, ROWS, TOKENS, DIM, dtype=torch.float64, generator=generator)
    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.7 if padded and mixer.capabilities.has("padding") else None
    segments = None
    if packed and (causal or mixer.capabilities.has("segments")):
        segments = (torch.rand(ROWS, TOKENS, generator=generator) < 0.2).cumsum(1) - 3
        if packed == "mixed":
            segments = torch.randint(-2, 3, (ROWS, TOKENS), generator=generator)
    return x, goal if mask is None else goal * mask[..., None], mask, segments


def parts(tensor, mine):
    return None if tensor is None else tensor[:, mine]


def mixed(mesh, case, causal, order, lengths, seed, padded, packed):
    """The largest differences of outputs, gradients of inputs and summed gradients of weights."""
    mixer = mixer_of(case)
    x, goal, mask, segments = drawn(mixer, seed, padded, packed, causal)
    call = {"causal": causal} if causal else {}
    call |= {"grid": {"pom-2d": (8, 3), "pom-2d-class": (7, 3)}[case]} if "pom-2d" in case else {}
    whole = x.clone().requires_grad_()
    if segments is None or mixer.capabilities.has("segments"):
        expected = mixer(whole, mask=mask, segments=segments, **call)
    else:  # each packed sequence in a row of its own
        rows, real, where = apart(whole, segments, mask)
        expected = mixer(rows, mask=real, causal=True)[where].view_as(whole)
    (expected * goal).sum().backward()
    weights = {key: p.grad.clone() for key, p in mixer.named_parameters() if p.grad is not None}
    mixer.zero_grad()
    parallelize(mixer, mesh, order=order)
    mine = places(lengths, order, mesh.get_rank() % mesh.size())
    part = x[:, mine].clone().requires_grad_()
    y = mixer(part, mask=parts(mask, mine), segments=parts(segments, mine), **call)
    (y * goal[:, mine]).sum().backward()
    seen = slice(None) if mask is None else mask[:, mine]
    pairs = [(y[seen], expected[:, mine][seen]), (part.grad, whole.grad[:, mine])]
    pairs += [(total, weights.get(key, torch.zeros_like(total))) for key, total in summed(mixer).items()]
    assert all(p.grad is not None for key, p in mixer.named_parameters() if key in weights), "DDP waits for gradients"
    return largest(*pairs)


def continued(mesh, case, order, pieces, seed, padded):
    """As `mixed` of a sequence in pieces, each of which is shared; then a step on one process."""
    mixer = mixer_of(case)
    x, goal, mask, _ = drawn(mixer, seed, padded, None)
    whole = x.clone().requires_grad_()
    expected, last = mixer.prefill(whole, mask=mask)
    token = torch.full((ROWS, DIM), 0.5, dtype=torch.float64)
    after, _ = mixer.step(token, last)
    ((expected * goal).sum() + after.sum()).backward()
    weights = {key: p.grad.clone() for key, p in mixer.named_parameters()}
    mixer.zero_grad()
    parallelize(mixer, mesh, order=order)
    part, state, outputs, first, mine = x.clone().requires_grad_(), None, [], 0, []
    for lengths in pieces:
        here = [first + i for i in places(lengths, order, mesh.get_rank() % mesh.size())]
        y, state = mixer.prefill(part[:, here], state, mask=parts(mask, here))
        outputs.append(y)
        mine += here
        first += sum(lengths)
    y = torch.cat(outputs, 1)
    with alone(mixer):
        stepped, _ = mixer.step(token, state)
    ((y * goal[:, mine]).sum() + stepped.sum() / mesh.size()).backward()
    seen = slice(None) if mask is None else mask[:, mine]
    pairs = [(y[seen], expected[:, mine][seen]), (stepped, after), (part.grad[:, mine], whole.grad[:, mine])]
    flat = [torch.utils._pytree.tree_flatten(tuple(s))[0] for s in (state, last)]
    pairs += list(zip(*flat, strict=True))
    pairs += [(total, weights[key]) for key, total in summed(mixer).items()]
    return largest(*((a.double(), b.double()) for a, b in pairs))


@st.composite
def lengths_of(draw, world, unit=1, total=TOKENS):
    """Tokens of each process, in any way, some of them none."""
    ends = sorted(draw(st.lists(st.integers(0, total // unit), min_size=world - 1, max_size=world - 1)))
    return [unit * (b - a) for a, b in zip([0, *ends], [*ends, total // unit], strict=True)]


SPLIT = {"order": st.sampled_from(["contiguous", "head_tail"]), "seed": st.integers(0, 2**16), "padded": st.booleans()}


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
@settings(max_examples=6, phases=TRIES)
@given(data=st.data(), packed=st.sampled_from([None, "packed", "mixed"]), **SPLIT)
def test_two_processes(two, case, data, order, seed, padded, packed):
    check_mixed(two, 2, case, data, order, seed, padded, packed)


@pytest.mark.parametrize(
    "case",
    slow_but(["pom", "mamba"], ["pom", "performer", "pom-decay", "mamba", "local", "padre-2d", "hyena", "softmax"]),
)
@settings(max_examples=3, phases=TRIES)
@given(data=st.data(), packed=st.sampled_from([None, "packed", "mixed"]), **SPLIT)
def test_four_processes(four, case, data, order, seed, padded, packed):
    check_mixed(four, 4, case, data, order, seed, padded, packed)


def check_mixed(group, world, case, data, order, seed, padded, packed):
    causal = data.draw(st.sampled_from(CASES[case][2]))
    lengths = data.draw(lengths_of(world, 3 if case in ROWWISE else 1))
    order = "contiguous" if case in ROWWISE else order
    errors = group.call(mixed_on_all, case, causal, order, lengths, seed, padded, packed)
    assert max(errors) < 1e-12, errors


def mixed_on_all(mesh, *arguments):
    return mixed(mesh if mesh.ndim == 1 else mesh["dp", "cp"]._flatten("all"), *arguments)


@pytest.mark.parametrize("case", slow_but(QUICK, PREFILLED))
@settings(max_examples=5, phases=TRIES)
@given(data=st.data(), **SPLIT)
def test_pieces_then_a_step_on_one_process(two, case, data, order, seed, padded):
    first = data.draw(st.integers(1, TOKENS - 1))
    pieces = [data.draw(lengths_of(2, total=n)) for n in (first, TOKENS - first)]
    errors = two.call(continued, case, order, pieces, seed, padded)
    # A piece may be one token, whose (q · k)² may be tiny: quotients by it lose digits, on one process too.
    assert max(errors) < (1e-10 if CASES[case][0] == "power" else 1e-12), errors


def test_every_mixer_that_declares_how_it_splits_is_tried():
    declared = {name for name in list_mixers() if mixer_class(name).capabilities.sequence}
    assert {name for name, _, _ in CASES.values()} == declared


def layout(mesh, order, lengths):
    mine = places(lengths, order, mesh.get_local_rank())
    x = torch.arange(2.0 * sum(lengths)).view(2, -1)
    part = x[:, mine].requires_grad_()
    whole = gather(part, mesh, order=order)
    (whole * x).sum().backward()
    even = [len(t) for t in torch.arange(sum(lengths)).tensor_split(mesh.size())]
    halves = places(even, order, mesh.get_local_rank())
    good = torch.equal(whole, x) and torch.equal(part.grad, 2 * x[:, mine])
    good &= positions(len(mine), mesh, order=order).tolist() == mine
    return good, shard(x[0], mesh, order=order, dim=0).tolist() == x[0, halves].tolist() or order == "head_tail"


@given(order=SPLIT["order"], lengths=lengths_of(2, total=8))
@settings(max_examples=8, phases=TRIES)
def test_gather_shard_and_positions_agree(two, order, lengths):
    assert two.call(layout, order, lengths) == [(True, True)] * 2


def wrong_arguments(mesh):
    model = torch.nn.ModuleDict({"attn": create_mixer("pom", DIM)})
    mixer, rank, messages = (
        parallelize_module(model, mesh, {"at*": SequenceParallel()})["attn"], mesh.get_local_rank(), [],
    )  # fmt: skip
    x, state = torch.randn(ROWS, 3, DIM), mixer.prefill(torch.randn(ROWS, 3, DIM))[1]
    for call in (
        lambda: mixer(torch.randn(ROWS, 3, DIM + (rank == 1))),
        lambda: mixer(x, mask=torch.ones(ROWS, 3 + (rank == 1), dtype=torch.bool)),
        lambda: mixer(x, segments=torch.ones(ROWS, 3) if rank else torch.ones(ROWS, 3).long()),
        lambda: mixer.prefill(x, state._replace(count=state.total) if rank else state),
    ):
        try:
            call()
        except (ShapeError, MaskError, StateError, ParallelError) as error:
            messages.append(f"{type(error).__name__} {error}")
    return messages


def test_a_wrong_argument_of_one_process_ends_the_call_on_all(two):
    others, own = two.call(wrong_arguments)
    assert [text.split()[0] for text in own] == ["ShapeError", "MaskError", "MaskError", "StateError"]
    assert all(text.startswith("ParallelError") and "process 1 of 2 failed" in text for text in others), others


@pytest.mark.parametrize("options", [{"context": torch.zeros(1, 2, 4)}, {"causal": 2}])
def test_what_is_not_split_is_refused_before_any_communication(options):
    from polymix.parallel.mix import forward

    with pytest.raises(CapabilityError, match="pom on several processes"):
        forward(create_mixer("pom", 4), None, "contiguous", torch.zeros(1, 2, 4), **options)
    with pytest.raises(CapabilityError, match="qt"):
        forward(create_mixer("qt", 4, heads=1), None, "contiguous", torch.zeros(1, 2, 4), segments=torch.zeros(1, 2))


@pytest.mark.parametrize("name", [n for n in list_mixers() if not mixer_class(n).capabilities.sequence])
def test_mixers_that_cannot_be_split_are_refused_by_name(name):
    model = torch.nn.ModuleList([create_mixer("pom", 12)])
    part = torch.nn.Module.__new__(mixer_class(name))
    torch.nn.Module.__init__(part)
    model.append(part)
    with pytest.raises(CapabilityError, match=name):
        parallelize(model, None)
    assert "forward" not in vars(model[0]), "nothing may be changed"


def test_layers_that_mix_tokens_outside_mixers_are_refused_by_name():
    model = torch.nn.ModuleDict({"a": create_mixer("pom", 4), "b": torch.nn.MultiheadAttention(4, 1)})
    with pytest.raises(CapabilityError, match=r"model\.b"):
        parallelize(model, None)
