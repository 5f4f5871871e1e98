"""The published trainings of classify: every number, timm's parts, and pictures that are decoded when they are used."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.compat import cure_torchvision
from polymix.errors import DataError
from polymix.models import VisionTransformer
from polymix.tasks import learner as shared
from polymix.tasks.classify import data, learner, published
from polymix.tasks.classify.recipe import ImageRecipe
from polymix.tasks.classify.stream import MEAN, STD, Pictures, transforms
from polymix.tasks.order import Endless
from polymix.tasks.runner import check_data

cure_torchvision()
timm = pytest.importorskip("timm", reason="untested: the parts of timm in the published trainings")


def said(name, *options):
    recipe = ImageRecipe().preset(name)
    return {option: getattr(recipe, option) for option in options}


def test_deit_is_trained_as_published():
    recipe = ImageRecipe().preset("deit")
    assert said("deit", "epochs", "batch_size", "optimizer", "weight_decay", "label_smoothing", "auto_augment", "mixup") == {
        "epochs": 300, "batch_size": 1024, "optimizer": "adamw", "weight_decay": 0.05, "label_smoothing": 0.1,
        "auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8,
    }  # fmt: skip
    assert said("deit", "cutmix", "switch", "erasing", "repeats", "drop_path", "ema", "crop", "interpolation") == {
        "cutmix": 1.0, "switch": 0.5, "erasing": 0.25, "repeats": 3, "drop_path": 0.1, "ema": 0.99996, "crop": 0.875,
        "interpolation": "bicubic",
    }  # fmt: skip
    assert recipe.scaled_rate == 5e-4 * 1024 / 512
    assert recipe.changed(["batch_size=256"]).scaled_rate == 5e-4 * 256 / 512
    assert recipe.scaled_rate * recipe.final == pytest.approx(1e-5)
    assert (
        recipe.warmup * recipe.epochs == pytest.approx(5) and recipe.schedule == "cosine" and recipe.image_size == 224
    )
    assert recipe == ImageRecipe.paper()


def test_xcit_is_trained_as_deit_for_400_epochs_and_with_six_blocks_on_cifar():
    deit, xcit, cifar = (ImageRecipe().preset(name) for name in ("deit", "xcit", "xcit_cifar"))
    assert (xcit.epochs, cifar.epochs, xcit.host_depth, cifar.host_depth) == (400, 400, None, 6)
    assert xcit.warmup * xcit.epochs == pytest.approx(5)
    different = {name for name, value in xcit.to_dict().items() if deit.to_dict()[name] != value}
    assert different == {"host", "epochs", "warmup"}
    accuracies = [published.accuracy(f"xcit_{size}_p16_224", "poly_sa", None, 100, 6)[0]
                  for size in ("nano_12", "tiny_12", "small_12", "medium_24")]  # fmt: skip
    assert accuracies == [0.7127, 0.7556, 0.8121, 0.8070]


def test_resnet_50_is_trained_as_published():
    recipe = ImageRecipe().preset("resnet50")
    assert said("resnet50", "optimizer", "momentum", "weight_decay", "batch_size", "epochs", "scaled_rate") == {
        "optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 256, "epochs": 90, "scaled_rate": 0.1,
    }  # fmt: skip
    assert [share * recipe.epochs for share in recipe.milestones] == pytest.approx([30, 60, 80])
    assert (recipe.mixer, recipe.host, recipe.schedule) == ("poly_nl", "resnet50", "steps")


def test_efficientvit_is_trained_as_published():
    recipe = ImageRecipe().preset("efficientvit")
    assert said("efficientvit", "epochs", "optimizer", "weight_decay", "sizes", "auto_augment", "mixup", "cutmix") == {
        "epochs": 320, "optimizer": "adamw", "weight_decay": 0.1, "sizes": (128, 160, 192, 224),
        "auto_augment": "rand-m3-n1", "mixup": 0.1, "cutmix": 0.1,
    }  # fmt: skip
    assert said("efficientvit", "loss", "label_smoothing", "ema", "clip", "norm_images", "drop_path", "mixer") == {
        "loss": "bce", "label_smoothing": 0.1, "ema": 0.9998, "clip": 2.0, "norm_images": 16_000, "drop_path": 0.05,
        "mixer": "qt",
    }  # fmt: skip
    assert recipe.warmup * recipe.epochs == pytest.approx(20) and recipe.scaled_rate == 2.5e-4 * recipe.batch_size / 128


class Trainer:
    global_rank, world_size, global_step = 0, 1, 0


def host(classes=4, **options):
    recipe = ImageRecipe(image_size=8, patch_size=4, dim=8, depth=1, steps=100, batch_size=8, **options)
    model = VisionTransformer(recipe.with_mixer("pom").mixers_for(["0"])["0"], image_size=8, patch_size=4, dim=8, depth=1,
                              classes=classes)  # fmt: skip
    rows = torch.randint(256, (16, 3, 8, 8), dtype=torch.uint8)
    images = data.ImageData("rows", tuple(map(str, range(classes))), *((rows, torch.arange(16) % classes),) * 2)
    made = learner.Learner(model, recipe, data.ImageSets(images, torch.utils.data.TensorDataset(*images.train)))
    made.trainer = Trainer()
    return made


def test_the_schedules_are_timms():
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler

    for options in (
        {"optimizer": "adamw", "final": 0.01, "warmup": 0.05, "learning_rate": 5e-4, "learning_rate_for": 4},
        {"optimizer": "sgd", "schedule": "steps", "milestones": (30 / 90, 60 / 90, 80 / 90), "learning_rate": 0.1, "warmup": 0.0},
    ):  # fmt: skip
        made = host(**options)
        configured = made.optimizers_and_schedule()
        ours, schedule, rate = configured["optimizer"], configured["lr_scheduler"]["scheduler"], made.recipe.scaled_rate
        theirs = create_optimizer_v2(torch.nn.Linear(2, 2), opt=options["optimizer"], lr=rate, momentum=0.9)
        assert type(ours) is type(theirs)
        if options["optimizer"] == "sgd":
            assert all(ours.defaults[name] == theirs.defaults[name] for name in ("momentum", "nesterov", "dampening"))
            other, shift = MultiStepLRScheduler(theirs, [33, 67, 89], decay_rate=0.1, t_in_epochs=False), -1
        else:
            rising = round(0.05 * 100)
            other, shift = CosineLRScheduler(theirs, 100 - rising, lr_min=0.01 * rate, warmup_t=rising, t_in_epochs=False,
                                             warmup_prefix=True, warmup_lr_init=0.0), 1  # fmt: skip
        for step in range(99):
            other.step_update(max(0, step + shift))
            expected = theirs.param_groups[0]["lr"]
            assert ours.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9), step
            ours.step()
            schedule.step()


def test_averaged_weights_are_timms():
    from timm.utils import ModelEmaV3

    made = host(ema=0.99)
    theirs = ModelEmaV3(made.model, decay=0.99, exclude_buffers=True)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    made._average(made.average, step=100_000)
    theirs.update(made.model)
    for mine, other in zip(made.average.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_repeated_augmentation_is_timms_sampler():
    order = learner.RepeatedOrder(10, 4, 0, lambda: 0, repeats=3).order(5)
    assert len(order) == 10 and order[0] == order[1] == order[2] != order[3] and len(set(order)) == 4
    places = learner.RepeatedOrder(9, 6, 0, lambda: 0, repeats=3)
    batches = iter(places)
    rows = [next(batches) for _ in range(3)]
    assert len({index for batch in rows[:1] for _, index in batch}) == 2
    assert learner.RepeatedOrder(10, 4, 0, lambda: 0, repeats=3).order(6) != order
    assert len(set(Endless(10, 4, 0, lambda: 0).order(5))) == 10
    assert host(repeats=3).order_class is not Endless and host().order_class is Endless


def test_images_are_erased_and_mixed_in_training_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    made = host(mixup=0.8, cutmix=1.0, erasing=1.0, drop_path=0.0)
    seen = []
    made.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    batch = tuple(part[:8] for part in made.data.images.train)
    plain = made.data.images.normalise(batch[0])
    made.model.train()
    first = made.loss(batch)
    assert not torch.equal(seen[-1], plain) and first.isfinite()
    made.model.eval()
    made.loss(batch), made.infer(batch)
    assert torch.equal(seen[-1], plain) and torch.equal(seen[-2], plain)


@pytest.mark.parametrize("loss", ["bce", "cross_entropy"])
def test_the_loss_is_timms(loss):
    from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy

    made = host(loss=loss, label_smoothing=0.1)
    batch = tuple(part[:8] for part in made.data.images.train)
    logits = made.model(made.data.images.normalise(batch[0]))
    expected = (BinaryCrossEntropy if loss == "bce" else LabelSmoothingCrossEntropy)(0.1)(logits, batch[1])
    torch.testing.assert_close(made.loss(batch), expected)


def test_batch_norms_are_estimated_anew_before_each_evaluation():
    made = host()
    object.__setattr__(made.recipe, "norm_images", 12)
    made.model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 4)).eval()
    made.before_measuring(made.model)
    drawn = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:12]
    images = made.data.images.normalise(made.data.images.train[0][drawn])
    torch.testing.assert_close(made.model[0].running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(made.model[0].running_var, images.transpose(0, 1).flatten(1).var(1))
    assert made.model[0].momentum == 0.1 and not made.model[0].training


def test_every_base_learner_prepares_the_weights_that_it_measures():
    assert shared.Learner.before_measuring is not learner.Learner.before_measuring


# Pictures that are decoded when they are used


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for place, name in enumerate(("n02", "n01")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((20, 30, 3), 60 * place + 10 * number + 5 * count, np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    return tmp_path


def test_streamed_pictures_are_those_in_memory(folder):
    options = {"data": str(folder), "image_size": 8, "patch_size": 4}
    memory, stream = (data.load(ImageRecipe(**options, stream=value), folder).images for value in (False, True))
    assert memory.classes == stream.classes == ("n01", "n02")
    ((images, labels),) = stream.test_batches(10)
    assert torch.equal(images, memory.test[0].expand(-1, 3, -1, -1)) and torch.equal(labels, memory.test[1])
    assert stream.counts == memory.counts and stream.majority == memory.majority
    inputs = stream.normalise(images)
    assert inputs[0, :, 0, 0].tolist() == pytest.approx(
        [(images[0, 0, 0, 0].item() - m) / s for m, s in zip(MEAN, STD, strict=True)]
    )


def test_folders_larger_than_memory_are_streamed(folder, monkeypatch):
    monkeypatch.setattr(data, "MAX_BYTES", 100)
    monkeypatch.setattr(data, "load_folder", None)
    loaded = data.load(ImageRecipe(data=str(folder), image_size=8, patch_size=4), folder)
    assert isinstance(loaded, data.StreamedSets) and len(loaded.train) == 6
    one = loaded.train[5]
    assert one[0].shape == (3, 8, 8) and one[1] == 1
    before = loaded.fingerprint()
    (folder / "train" / "n01" / "9.png").write_bytes((folder / "train" / "n01" / "0.png").read_bytes())
    assert data.load(ImageRecipe(data=str(folder), image_size=8, patch_size=4), folder).fingerprint() != before


def test_a_streamed_folder_without_train_and_val_is_split(folder):
    images = data.load(ImageRecipe(data=str(folder / "train"), stream=True), folder).images
    assert images.counts == (4, 2) and sorted(images.held_out.labels.tolist()) == [0, 1]
    assert not set(images.training.files) & set(images.held_out.files)


@pytest.mark.parametrize("stream", [True, False])
def test_broken_pictures_are_skipped_and_named_or_refused(folder, tmp_path, stream, caplog):
    (folder / "train" / "n01" / "1.png").write_bytes(b"no picture")
    (folder / "val" / "n02" / "0.png").write_bytes(b"")
    told = []

    def read(broken):
        recipe = ImageRecipe(data=str(folder), image_size=8, patch_size=4, stream=stream, broken=broken)
        loaded = data.load(recipe, tmp_path, told.append)
        return [label for _, label in loaded.train], sum(len(labels) for _, labels in loaded.images.test_batches(2))

    with caplog.at_level(logging.WARNING):
        labels, tests = read("skip")
    text = caplog.text + "\n".join(told)
    assert text.count("n01/1.png") == text.count("n02/0.png") == 1
    assert len(labels) == (6 if stream else 5) and tests == 3, "another picture takes the place of a streamed one"
    with pytest.raises(DataError, match=r"1\.png"):
        read("refuse")
    problems = check_data(ImageRecipe(data=str(folder)))
    assert len(problems) == 2 and all("png" in problem for problem in problems)


def test_mistakes_in_the_layout_are_one_error_each_and_checked(tmp_path):
    flat = tmp_path / "flat"
    (flat / "train" / "a").mkdir(parents=True)
    (flat / "train" / "b").mkdir()
    for name in ("a", "b"):
        for number in range(2):
            Image.new("RGB", (8, 8)).save(flat / "train" / name / f"{number}.png")

    def wrong(words):
        assert len(data.check(flat)) == 1 and words in data.check(flat)[0]
        for stream in (True, False):
            with pytest.raises(DataError, match=words):
                data.load(ImageRecipe(data=str(flat), stream=stream), flat)

    wrong("without val")
    broken = flat / "train" / "a" / "broken.png"
    broken.write_bytes(b"no picture")
    assert [str(broken) in line for line in data.check(flat)] == [False, True], "train is read without val"
    broken.unlink()
    (flat / "val").mkdir()
    Image.new("RGB", (8, 8)).save(flat / "val" / "ILSVRC2012_val_1.png")
    wrong("without a folder per class")
    for name in ("a", "c"):
        (flat / "val" / name).mkdir()
        Image.new("RGB", (8, 8)).save(flat / "val" / name / "0.png")
    (flat / "val" / "ILSVRC2012_val_1.png").unlink()
    assert len(data.check(flat)) == 2  # b and c
    for stream in (True, False):
        with pytest.raises(DataError, match="b, c in one of"):
            data.load(ImageRecipe(data=str(flat), stream=stream), flat)
    for stream in (True, False):
        with pytest.raises(DataError, match="two or more classes"):
            data.load(ImageRecipe(data=str(flat / "train" / "a"), stream=stream), flat)


def test_cmyk_and_16_bits_keep_their_colours_and_exif_turns(tmp_path):
    red = Image.new("RGB", (40, 20), (220, 20, 30))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    Image.fromarray(np.full((20, 40), 32896, np.uint16)).save(tmp_path / "deep.png")
    turned = Image.new("RGB", (40, 20), (0, 0, 0))
    turned.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    for recipe in (ImageRecipe(), ImageRecipe(crop=0.875), ImageRecipe(augment=True)):
        test = transforms(recipe)[1]
        pictures = Pictures(
            torch.zeros(3), [str(tmp_path / name) for name in ("cmyk.jpg", "deep.png", "turned.jpg")], read=data._open
        )
        colour, grey, upright = (test(pictures[place]) for place in range(3))
        assert (colour.float().mean((1, 2)) - torch.tensor([220.0, 20, 30])).abs().max() < 12
        assert (grey.float() - 128).abs().max() <= 1
        assert upright[0, 0].float().mean() > 200 and upright[0, -1].float().mean() < 55, "EXIF's turn was ignored"
