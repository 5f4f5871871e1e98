"""The cost model says what is counted at the collectives, in both passes, on 2 and 4 processes."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from polymix import create_mixer
from polymix.errors import CapabilityError, OptionError
from polymix.parallel import parallelize
from polymix.parallel.collectives import Processes
from polymix.parallel.cost import attention_bytes, mixer_bytes
from tests.processes import fork, free_port, statuses

DIM, ROWS, TOKENS = 12, 2, 24
CASES = {
    "pom": ("pom", {"expand": 2}, False, None), "pom-causal": ("pom", {}, True, None),
    "pom-decay": ("pom", {"decay": 3}, True, None), "qt": ("qt", {"heads": 3}, False, None),
    "qt-causal": ("qt", {"heads": 3}, True, None), "linear": ("linear", {"heads": 3}, True, None),
    "performer": ("performer", {"heads": 3}, False, None), "hydra": ("hydra", {}, True, None),
    "poly_nl": ("poly_nl", {}, False, None), "poly_sa": ("poly_sa", {"heads": 3, "positions": "mean"}, False, None),
    "mamba": ("mamba", {"state_size": 3}, True, None), "local": ("local", {"heads": 3, "window": 4}, True, None),
    "hla": ("hla", {"heads": 3}, False, None), "hla-causal": ("hla", {"heads": 3}, True, None),
    "power-gate": ("power", {"heads": 3, "gate": True}, True, None),
    "local-far": ("local", {"heads": 3, "window": 16}, True, None),  # beyond the nearest process
    "padre": ("padre", {"degree": 3, "kernel_size": 3}, False, None),
    "padre-causal": ("padre", {"degree": 2, "causal": True, "kernel_size": 4}, True, None),
    "padre-2d": ("padre", {"degree": 2, "grid": (8, 3), "kernel_size": 3}, False, (8, 3)),
    "softmax": ("softmax", {"heads": 3}, False, None), "hyena": ("hyena", {"length": 64}, True, None), "linear_floor": ("linear_floor", {}, False, None),
    "linear_floor-causal": ("linear_floor", {}, True, None),
}  # fmt: skip


def made(case):
    name, options, causal, grid = CASES[case]
    return create_mixer(name, DIM, **options), causal, grid


def work(rank, world, port, out):
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("cp",))
    agree, agreed = Processes.agree, []

    def counted(self, *arguments):
        before = self.sent
        rows = agree(self, *arguments)
        agreed.append(self.sent - before)
        return rows

    Processes.agree = counted
    report = {}
    for case in CASES:
        mixer, causal, _ = made(case)
        processes = parallelize(mixer, mesh).forward.args[1]
        x = torch.randn(ROWS, TOKENS // world, DIM, requires_grad=True)
        y = mixer(x, **({"causal": True} if causal else {}))
        forward = processes.sent - agreed[-1]
        y.sum().backward()
        report[case] = [forward, processes.sent - agreed[-1] - forward]
    (out / f"{rank}.json").write_text(json.dumps(report))


@pytest.mark.skipif(not dist.is_available(), reason="untested: bytes between processes, for torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_counted(world, tmp_path):
    port = free_port()
    assert statuses([fork(work, rank, world, port, tmp_path) for rank in range(world)]) == [0] * world
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    for case in CASES:
        mixer, causal, grid = made(case)
        forward, backward = mixer_bytes(mixer, world, TOKENS, batch=ROWS, causal=causal, grid=grid)
        counted = [max(report[case][which] for report in reports) for which in (0, 1)]
        # an odd number of bytes is cut in a ring's parts
        assert counted == pytest.approx([forward, backward], abs=8), case


def test_a_state_costs_the_same_at_any_length_and_attention_does_not():
    """Where sequence parallelism pays: a thousand times the tokens, the same bytes."""
    pom, padre = create_mixer("pom", DIM), create_mixer("padre", DIM, kernel_size=3)
    for mixer in (pom, padre):
        assert mixer_bytes(mixer, 8, 2**12) == mixer_bytes(mixer, 8, 2**22)
    for kind in ("ring", "all-to-all"):
        assert attention_bytes(kind, DIM, 8, 2**22).forward == 2**10 * attention_bytes(kind, DIM, 8, 2**12).forward
    assert mixer_bytes(pom, 1, 64).forward == 0, "one process sent something to itself"


def test_what_has_no_parts_is_refused():
    with pytest.raises(CapabilityError, match="several processes"):
        mixer_bytes(create_mixer("xca", DIM), 2, 8)
    with pytest.raises(OptionError, match="ring"):
        attention_bytes("star", DIM, 2, 8)
