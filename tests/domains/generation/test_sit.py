"""SiT: the published sizes, both matchings, the start, classes, other sizes of images and errors."""

import pytest
import torch

from polymix.domains.generation.sit import SiT
from polymix.errors import OptionError, ShapeError
from polymix.mixers.spec import parse_mixer

SMALL = {"image_size": 8, "patch": 2, "channels": 3, "classes": 4, "dim": 16, "depth": 2, "heads": 2}


def model(mixer="softmax", **options):
    torch.manual_seed(0)
    return SiT(parse_mixer(mixer)[1], **{**SMALL, **options}).eval()


def opened(mixer="softmax", **options):
    """A model whose modulations and head are random, so that every part shows in its output."""
    host = model(mixer, **options)
    for parameter in host.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return host


def inputs(side=8, batch=3):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, side, side, generator=draw), torch.rand(batch, generator=draw)


def count(host):
    return sum(p.numel() for p in host.parameters())


@pytest.mark.parametrize(("size", "parameters"), [("L", 458_102_816), ("XL", 675_129_632)])
def test_it_has_the_published_parameters(size, parameters):
    with torch.device("meta"):
        host = SiT.of_size(size, double_output=True)
    assert count(host) + host.position.numel() == parameters, "the published counts include the fixed positions"


@pytest.mark.parametrize(
    ("mixer", "match", "off"), [("pom", "mlp", 32.5), ("padre", "mlp", 32.5), ("pom", "expand", 60)]
)
def test_both_matchings_give_every_block_the_parameters_of_attention(mixer, match, off):
    sizes = {"dim": 32, "heads": 4}
    attention, plain, matched = (
        count(model(*arguments, **sizes, **options).blocks[0])
        for arguments, options in (((), {}), ((mixer,), {}), ((mixer,), {"match_parameters": match}))
    )
    assert plain != attention and abs(matched - attention) <= off, "half a hidden unit or half a channel"


def test_a_block_starts_as_the_identity_unless_its_gates_are_open():
    images, times = inputs()
    tokens, condition = torch.randn(2, 16, 16), torch.randn(2, 16)
    shut, open_ = model().blocks[0], model(gate_start=1.0).blocks[0]
    assert torch.equal(shut(tokens, condition), tokens)
    assert not torch.allclose(open_(tokens, condition), tokens)
    assert not model()(images, times).any(), "the last layer starts at zero"


@pytest.mark.parametrize("mixer", ["softmax", "pom", "padre", "qt", "linear_floor"])
def test_each_mixer_sees_image_time_and_class(mixer):
    host = opened(mixer)
    images, times = inputs()
    labels = torch.tensor([0, 1, 2])
    out = host(images, times, labels)
    assert out.shape == images.shape
    assert not torch.allclose(host(images, times * 0.5, labels), out)
    assert not torch.allclose(host(images, times, labels + 1), out)
    assert torch.equal(host(images, times), host(images, times, torch.full((3,), 4))), "without classes: none"
    changed = images.clone()
    changed[:, :, 0, 0] += 1
    moved = (host(changed, times, labels) - out)[:, :, 4:, 4:].abs().max() > 1e-6
    assert moved == (mixer != "linear_floor"), "only a mixer moves content between patches"


def test_a_hybrid_is_a_list():
    host = opened()
    configs = [parse_mixer("pom")[1], parse_mixer("softmax")[1]]
    hybrid = SiT(configs, **SMALL)
    assert [type(block.mixer) for block in hybrid.blocks][1] is type(host.blocks[0].mixer)
    assert type(hybrid.blocks[0].mixer) is not type(hybrid.blocks[1].mixer)
    again = SiT(**hybrid.options)
    again.load_state_dict(hybrid.state_dict())


def test_patches_come_back_where_they_were():
    host = opened("linear_floor")
    images, times = inputs()
    changed = images.clone()
    changed[:, :, 2:4, 6:8] += 1
    moved = (host(changed, times) - host(images, times)).abs().sum((0, 1)) > 1e-6
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[2:4, 6:8] = True
    assert torch.equal(moved, expected)


@pytest.mark.parametrize("mixer", ["softmax", "pom"])
def test_larger_images_interpolate_the_positions(mixer):
    host = opened(mixer, position_scale=0.5)
    images, times = inputs(16)
    assert host(images, times).shape == images.shape
    fine = host._positions((8, 8)).view(4, 2, 4, 2, 16)
    assert torch.allclose(fine.mean((1, 3)).flatten(0, 1), host.position, atol=0.05), "four places around each old one"
    assert torch.allclose(host.position.square().mean().sqrt(), torch.tensor(0.5 * 0.5**0.5))


def test_training_drops_classes_for_none():
    host = opened(class_dropout=0.5).train()
    images, times = inputs(batch=1)
    images, times = images.expand(64, -1, -1, -1), times.expand(64)
    torch.manual_seed(0)
    out = host(images, times, torch.ones(64, dtype=torch.long))
    none = host.eval()(images[:1], times[:1])
    dropped = sum(torch.allclose(each, none[0], atol=1e-5) for each in out)
    assert 16 < dropped < 48


def test_errors_name_the_argument():
    images, times = inputs()
    wrong = [
        (OptionError, "labels", lambda: model()(images, times, torch.tensor([0, 1, 5]))),
        (OptionError, "labels", lambda: model(classes=0)(images, times, torch.tensor([0, 1, 2]))),
        (OptionError, "labels", lambda: model(class_dropout=0.0)(images, times)),
        (ShapeError, "labels", lambda: model()(images, times, torch.tensor([0, 1]))),
        (ShapeError, "times", lambda: model()(images, times[:2])),
        (ShapeError, "images", lambda: model()(images[:, :2], times)),
        (OptionError, "mixer", lambda: SiT([parse_mixer("pom")[1]], **SMALL)),
        (OptionError, "match_parameters", lambda: model("padre", match_parameters="expand")),
        (OptionError, "image_size", lambda: model(image_size=7)),
        (OptionError, "size", lambda: SiT.of_size("M")),
    ]
    for kind, argument, call in wrong:
        with pytest.raises(kind) as error:
            call()
        assert error.value.argument == argument
