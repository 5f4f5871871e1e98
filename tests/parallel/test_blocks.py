"""Blocks whose tokens two processes share give what one process computes, to 1e-12 in float64: outputs and gradients."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from polymix.errors import CapabilityError, OptionError
from polymix.mixers.spec import parse_mixer
from polymix.models import VisionTransformer
from polymix.parallel.blocks import split_blocks
from tests.processes import fork, free_port, statuses

MIXERS = ("pom", "qt", "padre:kernel_size=3", "conv2former:kernel_size=3", "poly_nl", "linear_floor")


def host(spec, **options):
    torch.manual_seed(0)
    mixer = parse_mixer(spec)[1]
    return VisionTransformer(mixer, image_size=(20, 12), patch_size=4, dim=8, depth=2, classes=3, **options).double()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def work(rank, world, port, out):
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("cp",))
    report = {}
    for spec in MIXERS:
        x = torch.randn(2, 3, 20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        whole, shared = host(spec), host(spec)
        expected = whole(x)
        expected.square().sum().backward()
        split_blocks(list(shared.blocks), mesh)
        lengths = []
        shared.blocks[1].register_forward_pre_hook(lambda block, arguments: lengths.append(arguments[0].shape[1]))  # noqa: B023
        y = shared(x)
        (y.square().sum() / world).backward()
        differences, mine = [y - expected], gradients(shared)
        for name, gradient in gradients(whole).items():
            total = mine[name].clone()
            dist.all_reduce(total)
            differences.append(total - gradient)
        rows = 3 * (3 - rank) if spec.startswith(("padre", "conv2former")) else 8 - rank
        report[spec] = max(d.abs().max().item() for d in differences) + abs(lengths[0] - rows)
    try:
        split_blocks(list(host("padre", class_token=True).blocks), mesh)
    except CapabilityError as error:
        report["refused"] = str(error)
    (out / f"{rank}.json").write_text(json.dumps(report))


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="untested: two processes, for torch.distributed")
def test_shared_blocks_are_exact(tmp_path):
    port = free_port()
    assert statuses([fork(work, rank, 2, port, tmp_path) for rank in range(2)]) == [0, 0]
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "padre" in report.pop("refused")
        assert not {spec: value for spec, value in report.items() if not value < 1e-12}, "15 tokens, 5 rows of 3"


def test_a_model_without_blocks_is_refused():
    from polymix.domains.classify.recipe import ClassifyRecipe
    from polymix.domains.classify.task import ClassifyTask

    with pytest.raises(OptionError, match="blocks"):
        ClassifyTask(ClassifyRecipe(sequence_parallel=2)).shared_blocks(torch.nn.Linear(2, 2))
