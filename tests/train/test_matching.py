"""match_parameters: in every host whose attention is replaced, the mixer has as many parameters as attention had."""

from types import SimpleNamespace

import pytest
import torch

from polymix.errors import OptionError
from polymix.train.registry import recipe_class, task_class
from polymix.train.run import check_recipe

DETR = {"dim": 64, "heads": 4, "depth": 1, "feedforward": 64, "queries": 5, "backbone": "resnet18", "image_size": 64}
HOSTS = {
    "classify": {"dim": 64},
    "detect": {},
    "detect, detr": {"host": "detr", **DETR},
    "jigsaw": {},
    "timeseries": {},
    "video": {},
    "speech": {},
    "depth": {},
    "depth, dpt": {"host": "dpt", "depth": 4},
    "segment": {},
    "segment, segformer": {"host": "segformer", "size": "tiny"},
    "segment, efficientvit": {"host": "efficientvit"},
}


def parameters(name, **options):
    kind = recipe_class(name.partition(",")[0])
    recipe = kind(**HOSTS[name], **options)
    data = SimpleNamespace(classes=range(10), channels=1, variables=("value",), characters="ab", train=(), centre=0.0)
    with torch.device("cpu" if "," in name else "meta"):
        model = task_class(recipe)(recipe).build(data)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", HOSTS)
def test_the_mixer_has_the_parameters_of_attention(name):
    own = "keep" if name in ("segment, segformer", "segment, efficientvit") else "softmax"
    theirs = parameters(name, mixer=own)
    plain = parameters(name, mixer="pom")
    ours = parameters(name, mixer="pom", match_parameters=True)
    assert abs(ours - theirs) < 0.01 * theirs and abs(ours - theirs) < abs(plain - theirs)


def test_a_mixer_without_a_width_and_a_host_without_one_are_refused():
    with pytest.raises(OptionError, match="match"):
        check_recipe(recipe_class("jigsaw")(mixer="poly_nl:reduction=16", match_parameters=True))
    with pytest.raises(OptionError, match="nothing is replaced"):
        recipe_class("segment")(host="segformer", mixer="keep", match_parameters=True)
