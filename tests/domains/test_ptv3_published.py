"""PTv3 as its authors' code computes it (v3m1), with recorded weights: logits, gradients, curves, fresh weights."""

import pytest
import torch

from polymix.domains.segment3d.curves import hilbert
from polymix.domains.segment3d.data import Scans, Segment3dData
from polymix.domains.segment3d.ptv3 import PTv3
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.domains.segment3d.task import Segment3dTask
from polymix.errors import OptionError
from polymix.mixers import SoftmaxConfig
from tests.helpers import Golden, close, same_gradients

GOLDEN = Golden("hosts/ptv3")
THEIRS = GOLDEN.meta["v3m1"]
PUBLISHED = {"legacy_unpooling": True, "fit_curves": True}


def model(**options):
    host = PTv3(
        SoftmaxConfig(), inputs=THEIRS["in_channels"], classes=3, depths=THEIRS["enc_depths"],
        channels=THEIRS["enc_channels"], heads=THEIRS["enc_num_head"], decoder_depths=THEIRS["dec_depths"],
        decoder_channels=THEIRS["dec_channels"], decoder_heads=THEIRS["dec_num_head"], mlp_ratio=THEIRS["mlp_ratio"],
        window=THEIRS["enc_patch_size"][0], orders=THEIRS["order"], shuffle=False, drop_path=0.0, **options,
    )  # fmt: skip
    host = host.double().train()
    missing, unexpected = host.load_state_dict(GOLDEN.part("v3m1", "state"), strict=False)
    assert not unexpected and all("running" in name or "num_batches" in name for name in missing)
    return host


def logits_of(host):
    inputs = GOLDEN.part("v3m1", "in")
    x = inputs["features"].requires_grad_()
    return x, host(x, inputs["grid"], inputs["offsets"]), inputs["cot"]


def test_it_computes_what_the_authors_code_does():
    host = model(**PUBLISHED)
    x, found, cot = logits_of(host)
    close(found, GOLDEN.part("v3m1", "out")["logits"], 1e-12)
    (found * cot).sum().backward()
    close(x.grad, GOLDEN.part("v3m1", "grad_in")["features"], 1e-11)
    same_gradients(host, GOLDEN.part("v3m1", "grad"), 1e-11)


@pytest.mark.parametrize("left_out", PUBLISHED)
def test_each_option_matters(left_out):
    """Without one of them the logits are others: checkpoints of v3m1 do not fit."""
    logits = logits_of(model(**{**PUBLISHED, left_out: False}))[1]
    theirs = GOLDEN.part("v3m1", "out")["logits"]
    assert (logits - theirs).square().mean().sqrt() > 1e-3 * theirs.square().mean().sqrt()
    with pytest.raises(OptionError, match=left_out):
        PTv3(SoftmaxConfig(), **{left_out: 1})


@pytest.mark.parametrize("depth", [3, 5, 9, 11, 16])
def test_hilberts_codes_are_theirs_at_every_depth(depth):
    curves = GOLDEN.part("v3m1", "curve")
    assert torch.equal(hilbert(curves[f"grid{depth}"], depth), curves[f"hilbert{depth}"])


def test_fitted_curves_pool_down_to_one_voxel_a_cloud():
    """A cloud of fewer levels than there are poolings stays apart from the others of its batch."""
    grid = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0]])
    host = PTv3(SoftmaxConfig(), inputs=2, classes=3, depths=(1, 1, 1, 1), channels=(8,) * 4, heads=(2,) * 4,
                decoder_depths=(1,) * 3, decoder_channels=(8,) * 3, decoder_heads=(2,) * 3, **PUBLISHED).eval()  # fmt: skip
    x = torch.randn(3, 2)
    together = host(x, grid, torch.tensor([0, 2, 3]))
    alone = host(x[2:], grid[2:], torch.tensor([0, 1]))
    torch.testing.assert_close(together[2:], alone)


@pytest.mark.parametrize(("start", "attention"), [("published", 3**-0.5), ("own", 1.0)])
def test_fresh_weights_are_pytorchs_where_the_preset_asks(start, attention):
    """Standard deviations over 1 / √inputs: as published also those of attention are U(±1 / √inputs)."""
    torch.manual_seed(0)
    recipe = Segment3dRecipe(mixer="softmax", host_init=start, channels=(64, 64, 64))
    host = Segment3dTask(recipe).build(Segment3dData("test", ("a", "b"), 4, Scans((), recipe), Scans((), recipe)))
    block = host.encoder[1][0]
    attention_layers = (block.mixer.mixer.qkv.qkv, block.mixer.mixer.proj)
    for layer, share in ((attention_layers[0], attention), (attention_layers[1], attention), (block.mlp[0], 3**-0.5)):
        assert layer.weight.std().item() * 8 == pytest.approx(share, rel=0.05)
    assert all(bool(layer.bias.any()) == (start == "published") for layer in attention_layers)
