"""TSViT: the published sizes, where its pixels go, padded dates, windows of other sizes and memory."""

import pytest
import torch

from polymix.domains.satellite.tsvit import TSViT
from polymix.errors import OptionError, ShapeError
from polymix.mixers.spec import parse_mixer

SMALL = {"classes": 3, "bands": 2, "image_size": 6, "patch": 2, "dim": 8, "heads": 2, "temporal_depth": 1,
         "spatial_depth": 1}  # fmt: skip


def series(batch=2, dates=4, side=6):
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, dates, 2, side, side, generator=draw)
    return images, torch.randint(366, (batch, dates), generator=draw)


def model(mixer="softmax", **options):
    torch.manual_seed(0)
    return TSViT(parse_mixer(mixer)[1], **{**SMALL, **options}).eval()


@pytest.mark.parametrize(("dim", "count"), [(128, 1_657_476), (64, 435_524)])
def test_it_has_the_published_parameters(dim, count):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in TSViT(dim=dim).parameters()) == count


@pytest.mark.parametrize("mixer", ["pom", "qt", "padre"])
def test_match_parameters_gives_every_block_those_of_attention(mixer):
    options = {"dim": 32, "heads": 4, "temporal_depth": 1, "spatial_depth": 1}
    attention, plain, matched = (
        [sum(p.numel() for p in block.parameters()) for block in (*host.temporal, *host.spatial)]
        for host in (model(**options), model(mixer, **options), model(mixer, match_parameters=True, **options))
    )
    for place in range(2):
        assert plain[place] != attention[place] and abs(matched[place] - attention[place]) <= 32.5, "half a hidden unit"
    images, days = series()
    assert model(mixer, match_parameters=True, **options)(images, days).shape == (2, 3, 6, 6)


def test_padre_carries_dates_to_the_class_tokens_because_they_are_prefix_tokens():
    """Its convolution reaches a few tokens: as tokens of the line, the class tokens would see the first dates alone."""
    images, days = series(1, 20)
    other = images.clone()
    other[:, -1] += 1
    host = model("padre:kernel_size=3")
    assert host.temporal[0].mixer.config.num_prefix_tokens == 3
    assert (host(images, days) - host(other, days)).abs().max() > 1e-4, "the last date"
    line = parse_mixer("padre:kernel_size=3")[1].for_grid((1,)).build(8)
    tokens = torch.randn(1, 23, 8)
    changed = tokens.clone()
    changed[:, -1] += 1
    assert torch.equal(line(tokens)[:, :3], line(changed)[:, :3]), "without prefix tokens it would reach them"


def test_days_start_as_sines_of_the_year_or_at_random():
    weight = model(days="sines", dim=9, heads=3).day.weight.t()
    assert weight.shape == (366, 9) and torch.equal(weight[1, 5:], torch.full((4,), 0.5)), "cosines of 1 January"
    assert not weight[0].any(), "no date"
    near, far = (weight[100] @ weight[day] for day in (101, 283))
    assert near > 0.9 * weight[100] @ weight[100] and far < near
    torch.testing.assert_close(weight[2, 0], 0.5 * torch.tensor(2 * torch.pi / 366).sin())
    other = model(dim=9, heads=3).day.weight
    assert other.abs().max() <= 366**-0.5 and not torch.equal(other, weight.t())
    with pytest.raises(OptionError, match="days"):
        model(days="sinus")


def test_a_pixel_s_logits_lie_at_the_pixel():
    """Without spatial mixing the logits of a patch depend on the pixels of that patch alone."""
    host = model(spatial_depth=0)
    images, days = series()
    other = images.clone()
    other[:, :, :, 2:4, 4:6] += 1
    changed = (host(images, days) != host(other, days)).any(1)[0]
    expected = torch.zeros(6, 6, dtype=torch.bool)
    expected[2:4, 4:6] = True
    assert torch.equal(changed, expected)


def test_the_legacy_layout_writes_patches_one_after_another():
    images, days = series()
    right, legacy = model()(images, days), model(legacy_layout=True)(images, days)
    first = right[:, :, :2, :2].flatten(2)
    assert torch.equal(legacy[:, :, 0, :4], first), "the first patch stands in the first row"
    assert not torch.equal(legacy, right)
    assert torch.equal(legacy.flatten(2).sort().values, right.flatten(2).sort().values)


@pytest.mark.parametrize("mixer", ["softmax", "pom", "qt", "padre-2", "poly_nl"])
def test_padded_dates_take_no_part_unless_asked(mixer):
    images, days = series()
    present = torch.ones(2, 4, dtype=torch.bool)
    present[0, 2:] = False
    other = images.clone()
    other[0, 2:] = 7.0
    host = model(mixer)
    assert torch.allclose(host(images, days, present), host(other, days, present), atol=1e-5)
    published = model(mixer, mask_padding=False)
    assert not torch.allclose(published(images, days, present)[0], published(other, days, present)[0], atol=1e-3)


def test_linear_floor_sees_no_date():
    images, days = series()
    host = model("linear_floor")
    assert torch.equal(host(images, days), host(images + 1, days.flip(1)))


@pytest.mark.parametrize("mixer", ["softmax", "pom", "padre-2"])
def test_larger_images_than_at_build_and_chunks(mixer):
    images, days = series(side=10)
    host = model(mixer)
    with torch.no_grad():
        whole = host(images, days)
        host.chunk = 6
        assert whole.shape == (2, 3, 10, 10) and torch.allclose(host(images, days), whole, atol=1e-5)


def test_what_does_not_fit_is_told():
    images, days = series()
    with pytest.raises(ShapeError, match="images"):
        model()(images[..., :5], days)
    with pytest.raises(ShapeError, match="days"):
        model()(images, days[:, :2])
    with pytest.raises(OptionError, match="patch"):
        model(patch=4)
    with pytest.raises(OptionError, match="mixer"):
        TSViT([parse_mixer("pom")[1]], **SMALL)
