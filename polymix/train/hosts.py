"""Hosts of other libraries: those that polymix.timm names with their mixer, such as qt_vit_b1; mixers put into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polymix.train.recipe import Recipe, wrong

if TYPE_CHECKING:  # recipes import this file, and need no PyTorch
    from torch import nn


def registered(host: Any) -> tuple[str, str, bool] | None:
    """The mixer, timm's name of the host and whether parameters are matched, of a name of polymix.timm; else None."""
    if not isinstance(host, str):
        return None
    from polymix.timm import names  # which needs timm

    return names().get(host)


def with_its_mixer(options: dict[str, Any], option: str, found: tuple[str, str, bool]) -> dict[str, Any]:
    """The options of a recipe whose `option` names a host of polymix.timm: with timm's name of it, and its mixer."""
    mixer, host, _ = found
    if options.get("mixer", mixer) != mixer:
        got = f"{options['mixer']!r} with {option}={options[option]}"
        raise wrong("mixer", got, repr(mixer), f"Use {option}={host} for another mixer.")
    return {**options, "mixer": mixer, option: host}


def put_mixers(model: nn.Module, recipe: Recipe, example: Any, match_parameters: bool) -> None:
    """Put the recipe's mixer, with fresh weights, in place of a model's attention, where its plan says.

    example: an input of the model, by which tokens and grids are found.
    """
    from polymix.convert.convert import convert
    from polymix.convert.plan import config_of

    training = model.training
    model.eval()  # one image is no batch to normalise by
    mixer, match = config_of(recipe.mixer, "mixer"), "parameters" if match_parameters else None
    convert(model, mixer if recipe.plan is None else recipe.plan, mixer=mixer, input=example, init="fresh", match=match)
    model.train(training)
