"""DSVT as its authors' code computes it, with recorded weights: pillars, pooled voxels, and its fresh weights."""

import pytest
import torch
from torch import nn

from polymix.domains.detect3d.dsvt import DSVT
from polymix.domains.detect3d.extent import Extent
from polymix.domains.detect3d.nuscenes import CLASSES
from polymix.domains.detect3d.pillars import GroundBackbone, PillarEncoder, scatter_map
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.task import Detect3dTask
from polymix.mixers import PomConfig, SoftmaxConfig
from tests.domains.test_center_head import data_of
from tests.helpers import Golden, close, same_gradients

GOLDEN = Golden("hosts/dsvt")


def model(case, legacy_positions):
    theirs = GOLDEN.meta[case]
    pairs = [(tuple(side), tuple(a * b for a, b in zip(side, theirs["hybrid"], strict=True)))
             for side in theirs["windows"]]  # fmt: skip
    host = DSVT(
        SoftmaxConfig(), dim=8, heads=theirs["heads"], hidden=12, shape=theirs["shape"],
        set_size=theirs["set_info"][0][0], blocks=[count for _, count in theirs["set_info"]], windows=pairs,
        shift=theirs["shifts"][0][1][:2], pools=[stride[2] for stride in theirs["strides"]],
        legacy_positions=legacy_positions,
    ).double().train()  # fmt: skip
    missing, unexpected = host.load_state_dict(GOLDEN.part(case, "state"), strict=False)
    assert not unexpected and all("running" in name or "num_batches" in name for name in missing)
    return host


@pytest.mark.parametrize("case", list(GOLDEN.meta))
def test_it_computes_what_the_authors_code_does(case):
    """Four blocks of plain and shifted windows; and three stages of voxels, which pooling brings to the ground."""
    inputs, theirs, host = GOLDEN.part(case, "in"), GOLDEN.part(case, "out"), model(case, legacy_positions=True)
    x = inputs["x"].requires_grad_()
    y, places, cloud = host(x, inputs["places"].long(), inputs["cloud"].long())
    key = [
        torch.cat((c[:, None], p), 1).long().tolist() for c, p in ((cloud, places), (theirs["cloud"], theirs["places"]))
    ]
    order = [key[0].index(row) for row in key[1]]
    assert sorted(order) == list(range(len(y)))
    close(y[order], theirs["y"], 1e-12)
    (y[order] * inputs["cot"]).sum().backward()
    close(x.grad, GOLDEN.part(case, "grad_in")["x"], 1e-10)
    same_gradients(host, GOLDEN.part(case, "grad"), 1e-9)


def test_positions_of_the_windows_of_the_sets_are_another_model():
    inputs = GOLDEN.part("pillars", "in")
    arguments = inputs["x"], inputs["places"].long(), inputs["cloud"].long()
    ours = model("pillars", legacy_positions=False)(*arguments)[0]
    theirs = GOLDEN.part("pillars", "out")["y"]
    assert (ours - theirs).norm() > 0.05 * theirs.norm()
    tiny = Detect3dRecipe.tiny()
    for chosen in (True, False):
        built = Detect3dTask(tiny.changed(legacy_positions=chosen)).build(data_of(CLASSES))
        assert built.dsvt.legacy_positions == chosen
    assert Detect3dRecipe.paper().legacy_positions, "as published"


def test_fresh_matrices_are_xaviers_where_the_preset_asks():
    """The authors' `_reset_parameters`; mixers other than attention, biases and norms stay as they were."""
    options = {"dim": 64, "heads": 2, "hidden": 128, "shape": (24, 24, 4), "blocks": (1, 1), "shift": (3, 3),
               "windows": (((6, 6, 4), (6, 6, 4)), ((6, 6, 1), (6, 6, 1))), "pools": (4,)}  # fmt: skip
    torch.manual_seed(0)
    host = DSVT([SoftmaxConfig(), PomConfig()] * 2, **options)
    before = {name: value.clone() for name, value in host.state_dict().items()}
    host.start_as_published()
    layer, pom = host.stages[0][0]
    matrices = (layer.mixer.mixer.qkv.qkv.weight, layer.mixer.mixer.proj.weight, layer.mlp[0].weight,
                pom.mlp[2].weight, host.positions[0][0][0][3].weight, host.pools[0].attention.qkv.qkv.weight,
                host.pools[0].places)  # fmt: skip
    for matrix in matrices:
        assert matrix.std().item() == pytest.approx((2 / sum(matrix.shape)) ** 0.5, rel=0.1)
    after = host.state_dict()
    small = [name for name, value in before.items() if value.ndim < 2 or name.startswith("stages.0.0.1.mixer")]
    assert all(torch.equal(before[name], after[name]) for name in small) and len(small) > 40


def test_pillars_and_the_network_over_the_ground_are_the_published_ones():
    """Points to learned features, to a map, to the input of the head: DynPillarVFE and BaseBEVResBackbone."""
    golden = Golden("hosts/pillars")
    theirs, inputs = golden.meta["pillars"], golden.part("pillars", "in")
    extent = Extent.of(theirs["space"], theirs["voxel"])
    sizes = [theirs[name] for name in ("depths", "strides", "channels", "out", "stride")]
    host = nn.ModuleDict({"encoder": PillarEncoder(5, extent, theirs["encoder"]), "ground": GroundBackbone(6, *sizes)})
    missing, unexpected = host.double().load_state_dict(golden.part("pillars", "state"), strict=False)
    assert not unexpected and all("running" in name or "num_batches" in name for name in missing)
    points = inputs["points"].requires_grad_()
    x, places, cloud = host["encoder"](points, inputs["cloud"])
    assert torch.equal(places.int(), golden.part("pillars", "out")["places"])
    y = host["ground"](scatter_map(x, places, cloud, 2, extent.shape))
    close(y, golden.part("pillars", "out")["map"], 1e-12)
    (y * inputs["cot"]).sum().backward()
    close(points.grad, golden.part("pillars", "grad_in")["points"], 1e-10)
    same_gradients(host, golden.part("pillars", "grad"), 1e-9)
