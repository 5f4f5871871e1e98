"""DSVT: its sets held to slow definitions, its sizes to the published ones, its parts to plain PyTorch."""

import math

import pytest
import torch
from torch import nn

from polymix.domains.detect3d.center_head import center_losses, center_targets, decode, peak_radius
from polymix.domains.detect3d.center_point import CenterPoint
from polymix.domains.detect3d.dsvt import DSVT, AttentionPool, SetMixer, cut_sets, windows_of
from polymix.domains.detect3d.extent import Extent
from polymix.domains.detect3d.nuscenes import CLASSES
from polymix.domains.detect3d.pillars import PillarEncoder, scatter_map
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.rotated import circle_nms, corners, overlap_from_above, rotated_nms
from polymix.domains.detect3d.task import Detect3dTask
from polymix.errors import OptionError, ShapeError
from polymix.mixers import LinearFloorConfig, PadreConfig, PomConfig, QtConfig, SoftmaxConfig
from polymix.mixers.spec import parse_mixer
from tests.domains.test_center_head import data_of

SMALL = {"dim": 8, "heads": 2, "hidden": 16, "shape": (24, 24, 1), "set_size": 5, "blocks": (2,),
         "windows": (((6, 6, 1), (6, 6, 1)),), "shift": (3, 3)}  # fmt: skip
TINY = {"inputs": 4, "groups": (1, 1), "space": (-6, -6, -2, 6, 6, 2), "voxel": (0.5, 0.5, 4.0), "encoder": (8, 8),
        "dsvt": {name: SMALL[name] for name in ("heads", "hidden", "set_size", "windows", "shift")} | {"blocks": (1,)},
        "depths": (0, 0), "strides": (1, 2), "channels": (8, 8), "out": 8, "stride": 1, "head_dim": 8}  # fmt: skip


def count(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def voxels(n=120, shape=(24, 24, 1), clouds=2):
    torch.manual_seed(0)
    columns = [torch.randint(side, (n,)) for side in (clouds, *shape)]
    pairs = torch.stack(columns, 1).unique(dim=0)
    return pairs[:, 1:], pairs[:, 0]


def test_the_published_sizes():
    """PADRe's Table 4 counts 1.1 M: layers and norms, without the positions."""
    with torch.device("meta"):
        nuscenes, waymo, pillars = (DSVT.preset(name) for name in ("nuscenes", "waymo", "waymo-pillars"))
    assert all(model.legacy_positions for model in (nuscenes, waymo, pillars))
    layer = 4 * (128 * 128 + 128) + (128 * 256 + 256) + (256 * 128 + 128) + 3 * 256
    position = (2 * 128 + 128) + 256 + (128 * 128 + 128)
    assert count(nuscenes.stages, nuscenes.norms) == 8 * layer + 4 * 256 == 1_062_912
    assert count(nuscenes.positions) == 8 * position == 137_216
    assert (nuscenes.set_size, nuscenes.shape, nuscenes.shift) == (90, (360, 360, 1), (15, 15, 0))
    assert waymo.heights == [32, 8, 2, 1] and len(waymo.pools) == 3 and waymo.set_size == 48
    assert [p.stages[0][0][0].mixer.mixer.dim for p in (waymo, pillars)] == [192, 192]
    assert len(pillars.stages[0]) == 4 and pillars.windows[0] == ((12, 12, 1), (24, 24, 1))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shift", [(0, 0, 0), (3, 3, 0)])
def test_sets_are_those_of_equation_3(axis, shift):
    """Window by window: sorted along the axis, ⌈n / K⌉ sets, slot k of set j holds voxel ⌊(jK + k) n / (SK)⌋."""
    places, cloud = voxels(300)
    window, K = (6, 6, 1), 5
    which, inside = windows_of(places, cloud, window, shift)
    parts = cut_sets(which, inside, window, K, axis)
    slow = set()
    moved = places + torch.tensor(shift)
    groups = {}
    for v, (place, c) in enumerate(zip(moved.tolist(), cloud.tolist(), strict=True)):
        groups.setdefault((c, place[0] // 6, place[1] // 6), []).append(v)
    for members in groups.values():
        members.sort(key=lambda v: (moved[v, axis].item(), moved[v, 1 - axis].item()))
        n, sets = len(members), math.ceil(len(members) / K)
        for j in range(sets):
            slow.add(tuple(members[(j * K + k) * n // (sets * K)] for k in range(K)))
    assert {tuple(row) for row in parts.voxels.tolist()} == slow and len(slow) == len(parts.voxels)
    real = parts.voxels[parts.real]
    assert sorted(real.tolist()) == list(range(len(places))), "each voxel in one set, once"
    assert torch.equal(parts.voxels.flatten()[parts.slot], torch.arange(len(places)))
    sizes = parts.real.sum(1)
    assert len(sizes.unique()) > 1 and not parts.real.all(), "some slots repeat"


def test_attention_in_sets_is_that_of_pytorch():
    """Queries and keys with positions, values without, repeats hidden by the key mask: nn.MultiheadAttention."""
    places, cloud = voxels()
    sets = cut_sets(*windows_of(places, cloud, (6, 6, 1), (0, 0, 0)), (6, 6, 1), 5, 1)
    mine = SetMixer(8, SoftmaxConfig(heads=2), 5).double()
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(mine.mixer.qkv.qkv.weight)
        theirs.in_proj_bias.copy_(mine.mixer.qkv.qkv.bias)
        theirs.out_proj.weight.copy_(mine.mixer.proj.weight)
        theirs.out_proj.bias.copy_(mine.mixer.proj.bias)
    x, p = torch.randn(2, len(places), 8, dtype=torch.float64)
    keys, values = (x + p)[sets.voxels], x[sets.voxels]
    expected = torch.full_like(x, math.nan)
    expected[sets.voxels[sets.real]] = theirs(keys, keys, values, key_padding_mask=~sets.real)[0][sets.real]
    torch.testing.assert_close(mine(x, p, sets), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mixer", [PadreConfig(), PomConfig(), QtConfig()])
def test_repeats_are_hidden_from_mixers(mixer):
    """Other numbers in the repeats change nothing: PADRe's convolution sees zeros there."""
    torch.manual_seed(0)
    places, cloud = voxels()
    sets = cut_sets(*windows_of(places, cloud, (6, 6, 1), (0, 0, 0)), (6, 6, 1), 5, 0)
    module = SetMixer(8, mixer.for_heads(2), 5).double()
    x, p = torch.randn(2, len(places), 8, dtype=torch.float64)
    strange = torch.cat((x, 7 * torch.ones(1, 8, dtype=torch.float64)))
    other = sets._replace(voxels=sets.voxels.masked_fill(~sets.real, len(x)))
    moved = module(strange, torch.cat((p, p[:1])), other)
    torch.testing.assert_close(module(x, p, sets), moved, atol=1e-12, rtol=0)


def test_which_mixers_fit():
    for name in ("linear_floor", "mamba", "poly_nl"):
        SetMixer(8, parse_mixer(name)[1], 5)
    with pytest.raises(OptionError, match="hide padding"):
        SetMixer(8, parse_mixer("poly_sa")[1], 5)
    floor = SetMixer(8, LinearFloorConfig(), 5).double()
    places, cloud = voxels()
    sets = cut_sets(*windows_of(places, cloud, (6, 6, 1), (0, 0, 0)), (6, 6, 1), 5, 0)
    x, p = torch.randn(2, len(places), 8, dtype=torch.float64)
    torch.testing.assert_close(floor(x, p, sets), floor.mixer((x + p)[None])[0])


def test_clouds_do_not_meet_and_sets_move_on():
    """A change in one cloud leaves the other as it was; two blocks reach beyond the windows of one."""
    places, cloud = voxels(300)
    model = DSVT(SoftmaxConfig(), **SMALL).eval()
    x = torch.randn(len(places), 8)
    other = x + torch.where(cloud[:, None] == 0, 1.0, 0.0)
    with torch.no_grad():
        a, b = model(x, places, cloud)[0], model(other, places, cloud)[0]
        assert torch.equal(a[cloud == 1], b[cloud == 1]) and not torch.equal(a[cloud == 0], b[cloud == 0])
        first = (cloud == 0).nonzero()[0, 0]
        moved = x.clone()
        moved[first] += 1
        changed = (model(moved, places, cloud)[0] != a).any(1)
    inside = (places // 6 == places[first] // 6).all(1)
    assert (changed & ~inside).any() and not changed[cloud == 1].any()


@pytest.mark.parametrize("mixer", [PadreConfig(), PomConfig()])
def test_matched_layers_have_the_parameters_of_attention(mixer):
    def parameters(config, **options):
        with torch.device("meta"):
            return sum(p.numel() for p in DSVT.preset("nuscenes", config, **options).parameters())

    attention = parameters(SoftmaxConfig())
    assert parameters(mixer) != pytest.approx(attention, rel=1e-2)
    assert parameters(mixer, match_parameters=True) == pytest.approx(attention, rel=1e-3)
    tiny = Detect3dRecipe.tiny().changed(mixer="padre", match_parameters=True)
    layer = Detect3dTask(tiny).build(data_of(CLASSES)).dsvt.stages[0][0][0]
    assert layer.mlp[0].out_features != tiny.hidden


def test_shift_and_legacy_positions():
    """The second block's windows are shifted; with legacy positions the layers of a block differ in their places."""
    places, cloud = voxels()
    torch.manual_seed(0)
    model = DSVT(SoftmaxConfig(), **SMALL).eval()
    old = DSVT(SoftmaxConfig(), **SMALL, legacy_positions=True).eval()
    old.load_state_dict(model.state_dict())
    x = torch.randn(len(places), 8)
    assert not torch.allclose(model(x, places, cloud)[0], old(x, places, cloud)[0])
    plain, shifted = (model._arranged(places, cloud, 0, part) for part in (False, True))
    assert torch.equal(plain[1], places[:, :2] % 6 - 3.0)
    assert torch.equal(shifted[1], (places[:, :2] + 3) % 6 - 3.0)


def test_voxels_are_pooled_to_the_ground():
    places, cloud = voxels(200, (12, 12, 8))
    model = DSVT(SoftmaxConfig(), dim=8, heads=2, hidden=16, shape=(12, 12, 8), set_size=5, blocks=(1, 1, 1),
                 windows=(((6, 6, 8), (12, 12, 8)), ((6, 6, 2), (12, 12, 2)), ((6, 6, 1), (12, 12, 1))),
                 shift=(3, 3), pools=(4, 2))  # fmt: skip
    y, ground, owner = model(torch.randn(len(places), 8), places, cloud)
    expected = torch.cat((cloud[:, None], places[:, :2]), 1).unique(dim=0)
    assert torch.equal(torch.cat((owner[:, None], ground[:, :2]), 1), expected) and not ground[:, 2].any()
    assert y.shape == (len(ground), 8)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    pool = AttentionPool(8, 2, 3).double()
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    q = x.amax(1, keepdim=True)
    torch.testing.assert_close(pool(x), pool.norm(q + pool.attention(q, x + pool.places, values=x))[:, 0])


@pytest.mark.parametrize(("changes", "named"), [
    ({"pools": (2,)}, "pools"), ({"shape": (24, 24, 4)}, "pools"), ({"windows": (((6, 6), (6, 6)),)}, "windows"),
    ({"blocks": (2, 2)}, "pools"), ({"set_size": 0}, "set_size"), ({"shift": (3,)}, "shift"),
    ({"mixer": [SoftmaxConfig()] * 3}, "mixer"), ({"legacy_positions": 1}, "legacy_positions"),
])  # fmt: skip
def test_options_out_of_range(changes, named):
    with pytest.raises(OptionError, match=f"`{named}`"):
        DSVT(**{**SMALL, **changes})


def test_inputs_that_do_not_fit():
    model, x = DSVT(**SMALL), torch.randn(2, 8)
    cloud = torch.zeros(2, dtype=torch.int64)
    for places, said in (([[1, 1, 0]] * 2, "twice"), ([[1, 1, 0], [24, 0, 0]], "24, 0, 0"), ([[1, 1, 0]], "whole")):
        with pytest.raises(ShapeError, match=said):
            model(x, torch.tensor(places), cloud)


def test_features_of_pillars():
    """A slow loop over pillars: mean, centre, PointNet with the maximum, points outside left out."""
    torch.manual_seed(0)
    extent = Extent.of((-6, -6, -2, 6, 6, 2), (0.5, 0.5, 4.0))
    encoder = PillarEncoder(4, extent, (8, 6)).double().eval()
    points = torch.rand(300, 4, dtype=torch.float64) * 14 - 7
    points[:150, :2] = points[:150, :2] / 7
    cloud = (torch.arange(300) % 2 == 1).long()
    features, places, owner = encoder(points, cloud)
    groups = {}
    for place in range(300):
        cell = [math.floor((points[place, i].item() + 6) / 0.5) for i in (0, 1)]
        if all(0 <= c < 24 for c in cell) and -2 <= points[place, 2] < 2:
            groups.setdefault((int(cloud[place]), *cell), []).append(place)
    assert [tuple(row) for row in torch.cat((owner[:, None], places[:, :2]), 1).tolist()] == sorted(groups)
    assert max(map(len, groups.values())) > 2
    first, second = encoder.layers
    for row, ((_, cx, cy), members) in zip(features, sorted(groups.items()), strict=True):
        mine = points[members]
        centre = torch.tensor([(cx + 0.5) * 0.5 - 6, (cy + 0.5) * 0.5 - 6, 0.0], dtype=torch.float64)
        x = torch.cat((mine, mine[:, :3] - mine[:, :3].mean(0), mine[:, :3] - centre), 1)
        x = first.norm(first.linear(x)).relu()
        x = torch.cat((x, x.amax(0).expand_as(x)), 1)
        torch.testing.assert_close(row, second.norm(second.linear(x)).relu().amax(0), atol=1e-12, rtol=0)
    flat = scatter_map(features, places, owner, 2, extent.shape)
    assert flat.shape == (2, 6, 24, 24)
    assert torch.equal(flat[owner[5], :, places[5, 1], places[5, 0]], features[5])
    for bad, said in ((points * math.nan, "finite"), (points + 100, "Widen"), (points[:, :3], "clouds")):
        with pytest.raises(ShapeError, match=said):
            encoder(bad, cloud)


@pytest.mark.parametrize("seed", range(5))
def test_overlaps_of_turned_boxes(seed):
    """Against the share of a fine grid of points that lie in both; and known cases exactly."""
    torch.manual_seed(seed)
    a, b = torch.rand(2, 4, 7) * torch.tensor([2, 2, 1, 3, 2, 1, 6.3]) + torch.tensor([0, 0, 0, 1, 1, 1, 0])
    side = torch.linspace(-4, 7, 700)
    points = torch.cartesian_prod(side, side)

    def inside(box):
        gap = points - box[:2]
        along = gap @ torch.stack((box[6].cos(), box[6].sin()))
        across = gap @ torch.stack((-box[6].sin(), box[6].cos()))
        return (along.abs() <= box[3] / 2) & (across.abs() <= box[4] / 2)

    slow = [[((one := inside(p)) & (two := inside(q))).sum() / (one | two).sum() for q in b] for p in a]
    torch.testing.assert_close(overlap_from_above(a, b).float(), torch.tensor(slow), atol=0.01, rtol=0)
    torch.testing.assert_close(overlap_from_above(a, a).diagonal(), torch.ones(4).double())
    unit = torch.tensor(
        [[0, 0, 0, 2, 2, 1, 0.0], [1, 0, 0, 2, 2, 1, 0], [0, 0, 0, 2, 2, 1, math.pi / 2], [9, 9, 0, 1, 1, 1, 0]]
    )
    expected = torch.tensor([1, 1 / 3, 1, 0]).double()
    torch.testing.assert_close(overlap_from_above(unit[:1], unit)[0], expected, atol=1e-6, rtol=0)


def test_nms_keeps_the_best():
    boxes = torch.tensor(
        [[0, 0, 0, 4, 2, 1, 0.0], [0.5, 0, 0, 4, 2, 1, 0], [0, 1.5, 0, 4, 2, 1, 0], [9, 0, 0, 4, 2, 1, 0]]
    )
    scores = torch.tensor([0.5, 0.9, 0.4, 0.1])
    assert rotated_nms(boxes, scores, 0.2).tolist() == [1, 2, 3]
    assert rotated_nms(boxes, scores, 0.1).tolist() == [1, 3]
    assert circle_nms(boxes, scores, 0.4).tolist() == [1, 0, 2, 3] and circle_nms(boxes, scores, 1.0).tolist() == [
        1,
        2,
        3,
    ]
    box = corners(torch.tensor([[1.0, 2, 3, 4, 2, 6, math.pi / 2]]))[0]
    torch.testing.assert_close(box[0], torch.tensor([0.0, 4, 0]), atol=1e-6, rtol=0)
    assert (box[4:, 2] == 6).all()


@pytest.mark.parametrize(("length", "width"), [(20.0, 9.0), (3.0, 3.0)])
def test_a_peak_is_as_wide_as_the_overlap_allows(length, width):
    """At the radius the worst of the three moves overlaps by 0.1, and no move by less."""
    r = peak_radius(length, width)

    def iou(x1, y1, x2, y2):
        both = max(0, min(x2, length) - max(x1, 0)) * max(0, min(y2, width) - max(y1, 0))
        return both / ((x2 - x1) * (y2 - y1) + length * width - both)

    moves = (iou(r, r, length + r, width + r), iou(r, r, length - r, width - r), iou(-r, -r, length + r, width + r))
    assert min(moves) == pytest.approx(0.1)


def test_what_the_head_should_say_is_decoded_to_the_same_boxes():
    extent = Extent.of((-6, -6, -2, 6, 6, 2), (0.5, 0.5, 4.0))
    boxes = torch.tensor([[1.3, -2.2, 0.5, 4.2, 1.8, 1.5, 2.0, 1.0, -2.0], [-3.1, 4.0, -0.5, 0.6, 0.6, 1.7, -1.0, 0, 0],
                          [1.4, -2.1, 0.4, 4.0, 1.8, 1.5, 2.0, 1.0, -2.0], [40.0, 0, 0, 1, 1, 1, 0, 0, 0]])  # fmt: skip
    labels = torch.tensor([0, 1, 0, 0])
    targets = [center_targets(boxes[:2], labels[:2], 2, extent, 1), center_targets(boxes, labels, 2, extent, 1)]
    assert [len(target[1]) for target in targets] == [2, 3], "the box outside is left out"
    heat, cells, numbers, _ = targets[0]
    said = torch.zeros(1, 2, 10, 576)
    said[0, 0, :, cells[0]], said[0, 1, :, cells[1]] = numbers[0], numbers[1]
    found = {"heat": torch.logit(heat.clamp(1e-6, 1 - 1e-6))[None], "boxes": said.unflatten(3, (24, 24))}
    (row,) = decode(found, (0, 1), extent, 1, least=0.99)
    order = row["labels"].argsort()
    torch.testing.assert_close(row["boxes"][order], boxes[:2], atol=1e-5, rtol=0)
    perfect = center_losses(found, targets[:1], (0, 1)).sum()
    assert 0 < perfect < 0.2 < center_losses({**found, "boxes": found["boxes"] + 1}, targets[:1], (0, 1)).sum()
    unknown = (*targets[0][:2], targets[0][2].clone(), targets[0][3])
    unknown[2][:, 8:] = math.nan
    assert center_losses({**found, "boxes": found["boxes"] * 1}, [unknown], (0, 1)).isfinite().all()


def test_the_detector_learns_and_refuses():
    torch.manual_seed(0)
    model = CenterPoint(PomConfig(), **TINY)
    points, offsets = torch.rand(80, 4) * 10 - 5, torch.tensor([0, 50, 80])
    boxes = torch.tensor([[1.3, -2.2, 0.5, 4.2, 1.8, 1.5, 2.0, 1.0, -2.0]])
    targets = [center_targets(boxes, torch.tensor([1]), 2, model.extent, model.stride)] * 2
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = center_losses(model(points, offsets), targets, model.head.group_of).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None for p in model.parameters())
    (row, _) = decode(
        model.eval()(points, offsets), model.head.group_of, model.extent, 1, least=0.0, most=3, nms="circle"
    )
    assert row["boxes"].shape == (3, 9)
    with pytest.raises(ShapeError, match="offsets"):
        model(points, torch.tensor([0, 50]))
    for changes, named in (({"space": (-6, -6, -2, 6.25, 6, 2)}, "voxel"), ({"stride": 3}, "stride"),
                           ({"space": (-6.25, -6, -2, 6.25, 6, 2)}, "space"), ({"groups": ()}, "groups")):  # fmt: skip
        with pytest.raises(OptionError, match=f"`{named}`"):
            CenterPoint(**{**TINY, **changes})
