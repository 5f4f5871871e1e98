"""Classification as a task: the model, the loss, the optimizer, and timm's mixing and erasing of images."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from polymix.convert.adapters.libraries import load_library
from polymix.domains.classify import data as reading
from polymix.domains.classify import metrics as measuring
from polymix.domains.classify.augment import RepeatedOrder, erasing, mixing, transforms
from polymix.domains.classify.recipe import SCENE, ClassifyRecipe
from polymix.errors import CapabilityError, OptionError
from polymix.limits import check_memory
from polymix.mixers import MixerConfig
from polymix.models import VisionTransformer
from polymix.numbers import percent, plural
from polymix.train.data import classified
from polymix.train.data.images import ImageData, load_digits
from polymix.train.data.sampling import Order, Seeded, Slices, isolated_random_state, number
from polymix.train.initial import WEIGHTS, start_as_normal
from polymix.train.optimizers import decay_groups, warmup_and_falls
from polymix.train.published import published
from polymix.train.recipe import ATTENTION, KEEP
from polymix.train.task import Metric, Process, Task

SPLITS = {"ImageNet": "validation", "CIFAR-100": "test"}  # of published figures
NORM_BATCH = 100  # images at once where batch norms are estimated


class ClassifyTask(Task[ClassifyRecipe, ImageData]):
    """A model (B, C, H, W) -> (B, classes).

    A training batch is normalised, parts of it are erased, it is resized to one of the recipe's sizes, and its images
    are mixed in pairs with their labels. Each part is off by default.
    """

    name = "classify"
    metrics = (
        Metric("accuracy", "higher", "%"), Metric("top_5", "higher", "%"), Metric("val_loss", "lower"),
        Metric("loss", "lower"), Metric("majority", "higher", "%"),
    )  # fmt: skip
    layouts = reading.LAYOUTS
    unit = "images"
    fresh = ("head", "classifier", "fc")  # of our model, and of the hosts of timm
    predicts: ClassVar[bool] = True
    answers: ClassVar[bool] = True
    splits = "blocks"

    def __init__(self, recipe: ClassifyRecipe, *arguments: Any) -> None:
        super().__init__(recipe, *arguments)
        self.data: ImageData | None = None  # by which the present model's inputs are normalised
        self.erase: Any = None
        self.mix: Any = None
        self.binary: Any = None
        self.drops: tuple[nn.Module | None, list[tuple[Any, float]]] = (None, [])  # of the present model, at full rate

    # Before anything is computed

    def check(self) -> None:
        """Raise what `build` and the transforms would raise about the recipe, before any image is read."""
        recipe = self.recipe
        if recipe.data is None and recipe.default_data == "scenes" and recipe.image_size != SCENE:
            allowed, cure = f"{SCENE}, the size of the scenes", "Digits have any size."
            raise OptionError("image_size", recipe.image_size, allowed, cure)
        side = recipe.image_size
        check_memory("image_size", f"an image of {side} × {side} pixels", 4 * 3 * side**2)
        transforms(recipe)
        if recipe.host is None:
            self.check_shared(self._model(3, 2, device="meta"))
            tokens = (side // recipe.patch_size) ** 2
            # Attention is fused; the activations in training are at least these.
            size, what = 4 * tokens * recipe.dim * recipe.depth * recipe.part_size, f"a training on {tokens:,} tokens"
            check_memory("image_size", what, size, cure="Use smaller images or larger patches.")
            return
        with torch.device("meta"):
            try:
                model = self._model(3, 2).eval()
            except TypeError as error:  # of timm, for an option that the host does not take
                got = f"{recipe.host} with {error}"
                cure = "Choose another host, or leave drop_path and host_depth out."
                raise OptionError("host", got, "a host that takes these options", cure) from error
            except CapabilityError:  # a layer that is read from a call needs numbers
                with torch.device("cpu"), isolated_random_state():
                    model = self._model(3, 2).eval()
            self._check_sizes(model)
            self.check_shared(model)

    def _check_sizes(self, model: nn.Module) -> None:
        """OptionError unless a host takes images of all the recipe's sizes."""
        recipe = self.recipe
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
        patch = first.stride[0] if first.stride == first.kernel_size else 1
        for side in dict.fromkeys((recipe.image_size, *(recipe.sizes or ()))):
            name = "sizes" if side != recipe.image_size else "image_size"
            if side % patch:  # timm leaves the rest of the image out
                raise OptionError(name, f"{side} for {recipe.host}", f"a multiple of its patches of {patch}", "")
            try:
                with torch.no_grad():
                    model(torch.zeros(1, 3, side, side, device=next(model.parameters()).device))
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error):  # XCiT reads values, which the meta device has not
                    raise OptionError(name, f"{side} for {recipe.host}: {error}", "another size", "") from error
            except (AssertionError, ValueError) as error:
                got = f"{side} for {recipe.host} with {recipe.mixer}: {error}"
                raise OptionError(name, got, "a size that the host can take", "Try 224, without sizes.") from error

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(source, self.recipe.layout, self.recipe.allow_pickle)

    def load(self, folder: Path) -> ImageData:
        return reading.load(self.recipe, self.say)

    # The model

    def build(self, data: ImageData) -> nn.Module:
        self._use(data)
        model = self._model(data.channels, len(data.classes))
        if self.recipe.host_init == "published" and (self.recipe.host or "").startswith("efficientvit"):
            start_as_normal(model)  # timm starts its other hosts as published
        return model

    def _use(self, data: ImageData) -> None:
        """Normalise by these data's statistics, and mix their classes."""
        if self.data is data:
            return
        self.data, recipe = data, self.recipe
        self.erase, self.mix = erasing(recipe), mixing(recipe, len(data.classes))
        self.binary = None
        if recipe.loss == "bce":
            self.binary = load_library("timm.loss").BinaryCrossEntropy(recipe.label_smoothing)

    def _model(self, channels: int, classes: int, **options: Any) -> nn.Module:
        recipe = self.recipe
        if recipe.host is None:
            return VisionTransformer(self._mixers(), **self._options(channels, classes), **options)
        from polymix.timm import create

        return create(recipe.mixer, recipe.host, **self._host_options(channels, classes))

    def _mixers(self) -> list[MixerConfig]:
        """The mixer of each block of our own model, with as many parameters as attention where the recipe asks."""
        recipe = self.recipe
        mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None).values()
        return [mixer if recipe.heads is None else mixer.for_heads(recipe.heads) for mixer in mixers]

    def _options(self, channels: int, classes: int) -> dict[str, Any]:
        names = ("image_size", "patch_size", "dim", "depth", "mlp_ratio", "class_token")
        return {name: getattr(self.recipe, name) for name in names} | {"channels": channels, "classes": classes}

    def _host_options(self, channels: int, classes: int) -> dict[str, Any]:
        recipe = self.recipe
        options = {
            "num_classes": classes, "in_chans": channels, "img_size": recipe.image_size,
            "match": "parameters" if recipe.match_parameters else None, "drop_path_rate": recipe.drop_path,
            "depth": recipe.host_depth, "plan": recipe.plan,
        }  # fmt: skip
        return {name: value for name, value in options.items() if value is not None}

    def grid(self) -> tuple[int, int] | None:
        side = self.recipe.image_size // self.recipe.patch_size
        return (side, side) if self.recipe.host is None else None

    def at_grid(self, data: ImageData, grid: tuple[int, int], **options: Any) -> tuple[nn.Module, Tensor]:
        size = (grid[0] * self.recipe.patch_size, grid[1] * self.recipe.patch_size)
        words = {**self._options(data.channels, len(data.classes)), "image_size": size, **options}
        return VisionTransformer(self._mixers(), **words), torch.randn(1, data.channels, *size, **options)

    # How it learns

    def advance(self, model: nn.Module, step: int) -> None:
        """Set the rates of dropped branches, where they rise."""
        recipe = self.recipe
        if not recipe.drop_path_rises:
            return
        if self.drops[0] is not model:
            from polymix.timm import dropping

            self.drops = (model, [(part, part.drop_prob) for part in dropping(model)])
        rising = round(recipe.warmup * recipe.steps)
        share = max(0, step - rising) / max(1, recipe.steps - rising)
        for part, rate in self.drops[1]:
            part.drop_prob = rate * share

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        x, targets = self._inputs(images), labels
        if model.training:
            x = self._resized(x)
            if self.erase is not None:
                x = self.erase(x)
            if self.mix is not None:
                x, targets = self._mixed(x, labels)
        logits = model(x)
        if self.binary is not None:
            loss: Tensor = self.binary(logits, targets.to(logits.dtype) if targets.ndim == 2 else targets)
            return loss
        smoothing = 0.0 if targets.ndim == 2 else self.recipe.label_smoothing  # mixed labels are smooth already
        return cross_entropy(logits, targets, label_smoothing=smoothing)

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(self._inputs(batch[0]))

    def _inputs(self, images: Tensor) -> Tensor:
        if self.data is None:
            raise TypeError("the data, by which images are normalised, are not known: call build or batches with them")
        return self.data.normalise(images)

    def _resized(self, x: Tensor) -> Tensor:
        """A batch with one of the recipe's sizes, drawn for each batch."""
        sizes = self.recipe.sizes
        if not sizes:
            return x
        side = sizes[int(torch.randint(len(sizes), ()))]
        return x if side == x.shape[-1] else interpolate(x, size=side, mode="bicubic", antialias=True)

    def _mixed(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if len(x) % 2:
            got = f"{self.recipe.batch_size}, of which a process gets {len(x)} at once"
            raise OptionError("batch_size", got, "an even number with mixup or cutmix", "They are mixed in pairs.")
        mixed: tuple[Tensor, Tensor] = self.mix(x, labels)
        return mixed

    def batches(self, data: ImageData, slices: Slices) -> Iterator[Any]:
        self._use(data)
        if data.streamed:
            yield from super().batches(data, slices)
        images, labels = data.train.images, data.train.labels
        for rows in self.order(data, slices):  # nothing is drawn at random: seeding each sample would take longer
            places = torch.tensor([place for _, place in rows])
            yield images[places], labels[places]

    def order(self, data: ImageData, slices: Slices) -> Order:
        recipe = self.recipe
        if recipe.repeats == 1:
            return super().order(data, slices)
        return RepeatedOrder(len(data.train), recipe.batch_size, recipe.seed, slices, recipe.repeats)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW or SGD at the rate for this batch size."""
        recipe = self.recipe
        groups, rate = decay_groups(model, recipe), recipe.scaled_rate
        if recipe.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=recipe.momentum, nesterov=recipe.momentum > 0)
        return torch.optim.AdamW(groups, lr=rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        recipe = self.recipe
        if recipe.schedule == "cosine":
            return super().schedule(optimizer)
        return LambdaLR(optimizer, warmup_and_falls(recipe.steps, recipe.warmup, recipe.milestones))

    def prepare(self, model: nn.Module, data: ImageData, step: int) -> None:
        """Estimate the batch norms anew, from the same training images whatever the seed of the training."""
        norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        count = min(self.recipe.norm_images, len(data.train))
        if not norms or not count:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all batches
            norm.train()
        samples = Seeded(data.train, number(self.recipe.seed, "norms"))
        drawn = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:count]
        device = next(model.parameters()).device
        for part in drawn.split(NORM_BATCH):
            if len(part) > 1 or count == 1:
                images = torch.stack([samples[int(place), int(place)][0] for place in part])
                model(data.normalise(images.to(device)))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()

    # What is said of it

    def measure(self, model: nn.Module, data: ImageData, process: Process) -> dict[str, float]:
        """Accuracy (top-1), top_5 from six classes on, and mean cross-entropy on the test images."""
        return classified.measure(*measuring.answers(model, data, self.recipe, process))

    def details(self, model: nn.Module, data: ImageData, process: Process) -> dict[str, Any]:
        """`scores` on the test images, and in "predictions" and "labels" each one's answer and class, by number."""
        logits, labels = measuring.answers(model, data, self.recipe, process)
        each = {"predictions": logits.argmax(1).tolist(), "labels": labels.tolist()}
        return {**classified.scores(logits, labels, data.classes), **each}

    def draw(self, model: nn.Module, data: ImageData, folder: Path) -> list[Path]:
        logits, labels = measuring.answers(model, data, self.recipe, Process())
        return measuring.draw(logits, labels, data, folder)

    def describe(self, data: ImageData) -> str:
        recipe, (training, test), (largest, share) = self.recipe, data.counts, data.majority
        names = ", ".join(data.classes[:12]) + " …" * (len(data.classes) > 12)
        skipped = f" {len(data.skipped)} unreadable files were skipped." if data.skipped else ""
        return (
            f"{recipe.mixer} in {recipe.host or 'a vision transformer'}, on {data.name}: {training:,} training images "
            f"and {test:,} test images of {plural(len(data.classes), 'class')} ({names}), {data.image_size} × "
            f"{data.image_size} pixels. Always answering with the largest class, {largest}, would be right for "
            f"{percent(share)} of the test images.{skipped}"
        )

    def host_name(self, model: nn.Module) -> str:
        return self.recipe.host or "VisionTransformer"

    def published(self) -> dict[str, Any] | None:
        """The top-1 accuracy that a paper reports for this host and mixer on these data; None where no paper has it."""
        recipe, data = self.recipe, None if self.data is None else reading.benchmark(self.data)
        if recipe.host is None or recipe.match_parameters or data is None:
            return None
        host = recipe.host if recipe.host_depth is None else f"{recipe.host}, {recipe.host_depth} blocks"
        mixer = ATTENTION if recipe.mixer == KEEP and recipe.host.startswith("deit_") else recipe.mixer_name
        return published(self.name, data=data, split=SPLITS[data], host=host, mixer=mixer)

    def usage(self, data: ImageData, folder: Path) -> list[str]:
        recipe, sizes = self.recipe, (data.channels, len(data.classes))
        if recipe.host is None and (recipe.match_parameters or recipe.plan or recipe.heads):
            return ["from polymix.train.saved import SavedRun", "", f"model = SavedRun.of({str(folder)!r}).load()"]
        options = self._options(*sizes) if recipe.host is None else self._host_options(*sizes)
        words = ", ".join(f"{name}={value!r}" for name, value in options.items())
        if recipe.host is None:
            lines = ["from polymix.mixers.spec import parse_mixer", "from polymix.models import VisionTransformer"]
            model = f"VisionTransformer(parse_mixer({recipe.mixer!r})[1], {words})"
        else:
            lines = ["from polymix.timm import create"]
            model = f"create({recipe.mixer!r}, {recipe.host!r}, {words})"
        load = f"model.load_state_dict(torch.load({str(folder / WEIGHTS)!r}))"
        return ["import torch", *lines, "", f"model = {model}", load]

    def next_commands(self, data: ImageData, folder: Path) -> list[tuple[str, str]]:
        command = "polymix compare" + (f" --data {shlex.quote(self.recipe.data)}" if self.recipe.data else "")
        return [("Compare all mixers on these images:", command)]

    def drawn(self, summary: Mapping[str, Any]) -> Tensor | None:
        recipe = self.recipe
        if recipe.stream or recipe.looks_again or summary["channels"] != 1:
            return None
        images = load_digits() if recipe.data is None else reading.load(recipe, self.say)
        return None if images.streamed else images.train.images  # streamed: too many to measure

    # What is left, and what it is good for

    def from_summary(self, summary: Mapping[str, Any]) -> ImageData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> ImageData:
        """The images of the recipe as a trained model knows them; at most `limit`, drawn by a fixed seed."""
        return reading.load(self.recipe, self.say).known_as(summary).restricted(whole, limit)

    def predict(
        self, model: nn.Module, data: ImageData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process)
