"""timm's augmentations of pictures and of batches, where a recipe asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from polymix.convert.adapters.libraries import load_library
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import OptionError
from polymix.train.data.labelled import fitted
from polymix.train.data.sampling import Order, Slices, number


def transforms(recipe: ClassifyRecipe) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """Pictures of Pillow to bytes (3, S, S): for training and for tests. timm's, where the recipe augments or crops.

    Raises MissingExtraError where they need timm, and OptionError for an auto_augment that timm does not know.
    """
    size = recipe.image_size
    if not recipe.looks_again:
        return (partial(fitted, size=size),) * 2
    create_transform = load_library("timm.data.transforms_factory").create_transform
    shared: dict[str, Any] = {"input_size": size, "interpolation": recipe.interpolation, "normalize": False}
    test: Any = create_transform(**shared, is_training=False, crop_pct=recipe.crop)
    if not recipe.augment:
        return test, test
    more: dict[str, Any] = {"auto_augment": recipe.auto_augment, "color_jitter": None, "re_prob": 0.0}
    try:
        training: Any = create_transform(**shared, **more, is_training=True)
    except Exception as error:  # timm asserts, or fails on parts of the string
        got = f"{recipe.auto_augment!r} ({type(error).__name__})"
        raise OptionError("auto_augment", got, "a string of timm such as 'rand-m9-mstd0.5-inc1'", "") from error
    for operation in _operations(training):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = partial(_posterize, operation.aug_fn)
    return training, test


def _operations(transform: Any) -> Iterator[Any]:
    """The operations among which timm's automatic augmentation, where a transform has one, draws."""
    for step in transform.transforms:
        yield from getattr(step, "ops", ())  # RandAugment, AugMix
        yield from chain.from_iterable(getattr(step, "policy", ()))  # AutoAugment


def _posterize(timms: Callable[..., Any], image: Any, bits: int, **more: Any) -> Any:
    """timm 1.0.31 asks for 0 bits at its greatest magnitude, which Pillow 13 refuses; earlier ones made it black."""
    return timms(image, max(bits, 1), **more)


class RepeatedOrder(Order):
    """Each image `repeats` times in a row, by timm's RepeatAugSampler. An epoch still has `size` samples."""

    def __init__(self, size: int, batch: int, seed: int, slices: Slices, repeats: int) -> None:
        super().__init__(size, batch, seed, slices)
        self.repeats = repeats

    def order(self, epoch: int) -> list[int]:
        kind = load_library("timm.data.distributed_sampler").RepeatAugSampler
        sampler = kind(
            range(self.size), num_replicas=1, rank=0, num_repeats=self.repeats, selected_round=0, selected_ratio=1
        )
        sampler.set_epoch(number(self.seed, "order", epoch))
        return list(sampler)


def erasing(recipe: ClassifyRecipe) -> Any:
    """timm's random erasing of a batch; None where the recipe has none."""
    if not recipe.erasing:
        return None
    kind = load_library("timm.data.random_erasing").RandomErasing
    return kind(recipe.erasing, mode="pixel", device=recipe.device)


def mixing(recipe: ClassifyRecipe, classes: int) -> Any:
    """timm's mixup and cutmix of a batch; None where the recipe has neither."""
    if not recipe.mixup and not recipe.cutmix:
        return None
    return load_library("timm.data.mixup").Mixup(
        mixup_alpha=recipe.mixup, cutmix_alpha=recipe.cutmix, switch_prob=recipe.switch,
        label_smoothing=recipe.label_smoothing, num_classes=classes,
    )  # fmt: skip
