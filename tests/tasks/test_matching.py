"""match_parameters: in every host whose attention is replaced, the mixer has as many parameters as attention had."""

from types import SimpleNamespace

import pytest
import torch

from polymix.errors import OptionError
from polymix.tasks import runner
from polymix.tasks.classify import model as classify
from polymix.tasks.classify.recipe import ImageRecipe
from polymix.tasks.detect import model as detect
from polymix.tasks.detect.recipe import DetectRecipe
from polymix.tasks.jigsaw import model as jigsaw
from polymix.tasks.jigsaw.recipe import JigsawRecipe
from polymix.tasks.segment import model as segment
from polymix.tasks.segment.recipe import SegmentRecipe

DETR = ("dim=64", "heads=4", "depth=1", "feedforward=64", "queries=5", "backbone=resnet18", "image_size=64")
HOSTS = {
    "classify": (classify, ImageRecipe, ("dim=64",)),
    "detect": (detect, DetectRecipe, ()),
    "detect, detr": (detect, DetectRecipe, ("host=detr", *DETR)),
    "jigsaw": (jigsaw, JigsawRecipe, ()),
    "segment": (segment, SegmentRecipe, ()),
    "segment, segformer": (segment, SegmentRecipe, ("host=segformer", "size=tiny")),
    "segment, efficientvit": (segment, SegmentRecipe, ("host=efficientvit",)),
}


def parameters(name, *words):
    module, recipe, options = HOSTS[name]
    recipe = recipe().changed([*options, *words])
    if module is classify:
        model = classify._build(recipe, 1, 10, device="meta")
    else:
        with torch.device("cpu" if "," in name else "meta"):
            model = module.build(recipe, SimpleNamespace(classes=range(10)))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", HOSTS)
def test_the_mixer_has_the_parameters_of_attention(name):
    own = "keep" if name in ("segment, segformer", "segment, efficientvit") else "softmax"
    theirs = parameters(name, f"mixer={own}")
    plain = parameters(name, "mixer=pom")
    ours = parameters(name, "mixer=pom", "match_parameters=True")
    assert abs(ours - theirs) < 0.01 * theirs and abs(ours - theirs) < abs(plain - theirs)


def test_a_mixer_without_a_width_and_a_host_without_one_are_refused():
    with pytest.raises(OptionError, match="match"):
        runner.check_recipe(JigsawRecipe(mixer="poly_nl:reduction=16", match_parameters=True))
    with pytest.raises(OptionError, match="nothing is replaced"):
        SegmentRecipe(host="segformer", mixer="keep", match_parameters=True)
