"""One sequence on 2 and 4 processes is what one process computes: outputs and all gradients, to 1e-12 in float64.

One group of processes runs all cases, because a start takes longer than all of them.
"""

import datetime
import json
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from polymix import create_mixer
from polymix.errors import CapabilityError, ParallelError, ShapeError
from polymix.parallel import SequenceParallel, parallelize, shard
from tests.processes import fork, statuses

DIM, ROWS = 12, 2
CASES = {
    "pom": ("pom", {}, (False, True)), "pom-rotary": ("pom", {"rotary": "1d"}, (False, True)),
    "pom-2d": ("pom", {"rotary": "2d"}, (False,)), "pom-decay": ("pom", {"decay": 3}, (True,)),
    "qt": ("qt", {"heads": 3}, (False, True)), "linear": ("linear", {"heads": 3}, (False, True)),
    "performer": ("performer", {"heads": 3}, (False, True)), "hydra": ("hydra", {}, (False, True)),
    "poly_nl": ("poly_nl", {}, (False,)), "poly_sa": ("poly_sa", {"heads": 3, "positions": "mean"}, (False,)),
    "poly_sa-learned": ("poly_sa", {"heads": 3, "grid": (24,)}, (False,)),
    "mamba": ("mamba", {"state_size": 3}, (True,)),
    "padre": ("padre", {"degree": 3, "kernel_size": 3}, (False,)),
    "padre-causal": ("padre", {"degree": 3, "causal": True, "kernel_size": 4}, (True,)),
    "padre-2d": ("padre", {"degree": 2, "grid": (8, 3), "kernel_size": 3}, (False,)),
    "conv2former": ("conv2former", {"grid": (8, 3), "kernel_size": 3}, (False,)),
    "local": ("local", {"heads": 3, "window": 4}, (True,)), "linear_floor": ("linear_floor", {}, (False,)),
    "softmax": ("softmax", {"heads": 3}, (False, True)),
    "softmax-rotary": ("softmax", {"heads": 3, "rotary": 1e4}, (False, True)),
    "softmax-relative": ("softmax", {"heads": 3, "grid": (24,), "relative": True}, (False,)),
    "hyena": ("hyena", {"length": 64}, (True,)), "hyena-both": ("hyena", {"length": 64, "bidirectional": True}, (False,)),
}  # fmt: skip
SPLITS = {  # the order, tokens of each process, whether some are padding
    2: (("contiguous", (12, 12), False), ("contiguous", (0, 24), True), ("head_tail", (23, 1), True)),
    4: (("contiguous", (1, 0, 20, 3), True), ("head_tail", (6, 6, 6, 6), False)),
}
GRIDS = {  # of whole rows
    2: (("contiguous", (9, 15), False), ("contiguous", (0, 24), True), ("head_tail", (12, 12), True)),
    4: (("contiguous", (3, 0, 18, 3), True),),
}


def places(lengths, order, rank):
    """The indices of a process's tokens in the whole, written out apart from the code."""
    if order == "contiguous":
        first = sum(lengths[:rank])
        return list(range(first, first + lengths[rank]))
    halves = [(n + 1) // 2 for n in lengths] + [n // 2 for n in reversed(lengths)]
    ends = [sum(halves[: i + 1]) for i in range(len(halves))]
    spans = [list(range(end - half, end)) for end, half in zip(ends, halves, strict=True)]
    return spans[rank] + spans[2 * len(lengths) - 1 - rank]


def errors_of(case, causal, lengths, order, padded, mesh):
    """The largest differences of outputs, gradients of inputs and summed gradients of weights."""
    name, options, _ = CASES[case]
    torch.manual_seed(0)
    mixer = create_mixer(name, DIM, dtype=torch.float64, **options)
    x, goal = torch.randn(2, ROWS, 24, DIM, dtype=torch.float64)
    mask = torch.rand(ROWS, 24) < 0.7 if padded else None
    goal = goal if mask is None else goal * mask[..., None]
    call = {"causal": True} if causal else {}
    call |= {"grid": (8, 3)} if case == "pom-2d" else {}
    whole = x.clone().requires_grad_()
    expected = mixer(whole, mask=mask, **call)
    (expected * goal).sum().backward()
    weights = {key: p.grad.clone() for key, p in mixer.named_parameters() if p.grad is not None}
    mixer.zero_grad()
    parallelize(mixer, mesh, order=order)
    mine = places(lengths, order, mesh.get_local_rank())
    part = x[:, mine].clone().requires_grad_()
    y = mixer(part, mask=None if mask is None else mask[:, mine], **call)
    (y * goal[:, mine]).sum().backward()
    seen = slice(None) if mask is None else mask[:, mine]
    differences = [y[seen] - expected[:, mine][seen], part.grad - whole.grad[:, mine]]
    for key, p in sorted(mixer.named_parameters()):
        total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(total)
        differences.append(total - weights.get(key, torch.zeros_like(p)))
    return max((d.abs().max().item() for d in differences if d.numel()), default=0.0)


def work(rank, world, port, out):
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("cp",))
    report = {}
    for case, (name, _, orders) in CASES.items():
        splits = (GRIDS if case.endswith("2d") or name == "conv2former" else SPLITS)[world]
        unpadded = case in ("poly_sa-learned", "linear_floor")
        for causal in orders:
            for order, lengths, padded in splits:
                key = f"{case} {causal} {order} {lengths} {padded}"
                report[key] = errors_of(case, causal, lengths, order, padded and not unpadded, mesh)
    places_here = shard(torch.arange(24)[None], mesh.get_group(), order="head_tail")[0].tolist()
    report["shard"] = float(places_here != places([24 // world] * world, "head_tail", rank))
    model = torch.nn.ModuleDict({"attn": create_mixer("pom", DIM)})
    mixer = parallelize_module(model, mesh["cp"], {"at*": SequenceParallel()})["attn"]
    try:
        mixer(torch.randn(ROWS, 3, DIM + (rank == 1)))
    except (ShapeError, ParallelError) as error:
        report["raised"] = f"{type(error).__name__} {error}"
    (out / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    if rank == 1:
        raise SystemExit(3)  # it is gone: the others must not wait
    try:
        mixer(torch.randn(ROWS, 3, DIM))
    except ParallelError as error:
        (out / f"{rank}.gone").write_text(str(error))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exact(world, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends = statuses([fork(work, rank, world, port, tmp_path) for rank in range(world)])
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    for rank, report in enumerate(reports):
        raised = report.pop("raised")
        assert raised.startswith("ShapeError" if rank == 1 else "ParallelError"), raised
        assert rank == 1 or "process 1 of" in raised, "which process failed?"
        wrong = {key: value for key, value in report.items() if not value < 1e-12}
        assert not wrong
    assert ends[1] == 3
    for rank in range(world):
        assert rank == 1 or f"process {rank} of {world} waited in vain" in (tmp_path / f"{rank}.gone").read_text()


@pytest.mark.parametrize("options", [{"context": torch.zeros(1, 2, 4)}, {"causal": 2}])
def test_what_is_not_split_is_refused_before_any_communication(options):
    from polymix.parallel.mix import forward

    with pytest.raises(CapabilityError, match="pom on several processes"):
        forward(create_mixer("pom", 4), None, "contiguous", torch.zeros(1, 2, 4), **options)
    with pytest.raises(CapabilityError, match="non_local"):
        parallelize(create_mixer("non_local", 4), None)
