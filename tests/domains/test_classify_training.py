"""The published trainings of classify: every number, timm's parts, and pictures that are decoded when they are used."""

import logging
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from polymix.compat import cure_torchvision
from polymix.domains.classify import data
from polymix.domains.classify.augment import RepeatedOrder, transforms
from polymix.domains.classify.data import MEAN, STD
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.errors import DataError
from polymix.timm import create
from polymix.train.data import images as stored
from polymix.train.data.images import ImageData
from polymix.train.data.labelled import Pictures
from polymix.train.data.sampling import Order, Slices
from polymix.train.in_memory import train_in_memory
from polymix.train.loop import averaged
from polymix.train.run import check_data

cure_torchvision()
timm = pytest.importorskip("timm", reason="untested: the parts of timm in the published trainings")


def said(name, *options):
    recipe = ClassifyRecipe().preset(name)
    return {option: getattr(recipe, option) for option in options}


def test_deit_is_trained_as_published():
    recipe = ClassifyRecipe().preset("deit")
    assert said("deit", "epochs", "batch_size", "optimizer", "weight_decay", "label_smoothing", "auto_augment", "mixup") == {
        "epochs": 300, "batch_size": 1024, "optimizer": "adamw", "weight_decay": 0.05, "label_smoothing": 0.1,
        "auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8,
    }  # fmt: skip
    assert said("deit", "cutmix", "switch", "erasing", "repeats", "drop_path", "ema", "crop", "interpolation") == {
        "cutmix": 1.0, "switch": 0.5, "erasing": 0.25, "repeats": 3, "drop_path": 0.1, "ema": 0.99996, "crop": 0.875,
        "interpolation": "bicubic",
    }  # fmt: skip
    assert recipe.scaled_rate == 5e-4 * 1024 / 512
    assert recipe.changed(batch_size=256).scaled_rate == 5e-4 * 256 / 512
    assert recipe.scaled_rate * recipe.final == pytest.approx(1e-5)
    assert (
        recipe.warmup * recipe.epochs == pytest.approx(5) and recipe.schedule == "cosine" and recipe.image_size == 224
    )
    assert recipe == ClassifyRecipe.paper()


def test_xcit_is_trained_as_deit_for_400_epochs_and_with_six_blocks_on_cifar():
    deit, xcit, cifar = (ClassifyRecipe().preset(name) for name in ("deit", "xcit", "xcit_cifar"))
    assert (xcit.epochs, cifar.epochs, xcit.host_depth, cifar.host_depth) == (400, 400, None, 6)
    assert xcit.warmup * xcit.epochs == pytest.approx(5)
    different = {name for name, value in xcit.to_dict().items() if deit.to_dict()[name] != value}
    assert different == {"host", "epochs", "warmup"}


# microsoft/Swin-Transformer f82860b, config.py, configs/swin_tiny_patch4_window7_224.yaml and the scaling of main.py;
# sail-sg/poolformer a075575, README.md and the defaults of train.py and of models/poolformer.py;
# microsoft/CvT f851e68, experiments/imagenet/cvt/cvt-13-224x224.yaml and lib/dataset/transformas/build.py.
POLY_SA_HOSTS = {
    "swin": {"batch_size": 1024, "scaled_rate": 1e-3, "lowest": 1e-5, "warmup": 20, "clip": 5.0, "drop_path": 0.2,
             "crop": 0.875, "weight_decay": 0.05},
    "metaformer": {"batch_size": 1024, "scaled_rate": 1e-3, "lowest": 1e-5, "warmup": 5, "clip": None,
                   "drop_path": 0.1, "crop": 0.9, "weight_decay": 0.05},
    "cvt": {"batch_size": 2048, "scaled_rate": 2e-3, "lowest": 1e-5, "warmup": 5, "clip": None, "drop_path": 0.1,
            "crop": 0.875, "weight_decay": 0.05},
}  # fmt: skip
# Poly-SA, Table 3: millions of parameters with attention and with Poly-SA.
TABLE_3 = {"swin": (28.3, 26.1), "metaformer": (16.5, 15.4), "cvt": (20.0, 20.0)}


@pytest.mark.parametrize("name", POLY_SA_HOSTS)
def test_hosts_of_poly_sa_are_trained_as_their_authors_do(name):
    recipe = ClassifyRecipe().preset(name)
    numbers = {
        **{option: getattr(recipe, option) for option in POLY_SA_HOSTS[name] if option not in ("lowest", "warmup")},
        "lowest": pytest.approx(recipe.scaled_rate * recipe.final), "warmup": pytest.approx(300 * recipe.warmup),
    }  # fmt: skip
    assert numbers == POLY_SA_HOSTS[name]
    deit = ClassifyRecipe().preset("deit").to_dict()
    different = {option for option, value in recipe.to_dict().items() if deit[option] != value}
    assert different <= {
        "host", "mixer", "batch_size", "learning_rate", "learning_rate_for", "final", "warmup", "clip", "drop_path",
        "crop", "repeats", "ema", "ema_rise", "ema_buffers", "evaluate_every", "checkpoint_every",
    }  # fmt: skip
    assert (recipe.repeats, recipe.ema) == (1, 0), "neither repeated augmentation nor averaged weights"


@pytest.mark.parametrize("name", TABLE_3)
def test_hosts_of_poly_sa_have_the_parameters_of_its_table_3(name):
    recipe = ClassifyRecipe().preset(name)
    with torch.device("meta"):
        models = [create(mixer, recipe.host) for mixer in ("keep", recipe.mixer)]
    sizes = [sum(p.numel() for p in model.parameters()) / 1e6 for model in models]
    assert sizes == [pytest.approx(size, abs=0.07) for size in TABLE_3[name]]


def test_resnet_50_is_trained_as_published():
    recipe = ClassifyRecipe().preset("resnet50")
    assert said("resnet50", "optimizer", "momentum", "weight_decay", "batch_size", "epochs", "scaled_rate") == {
        "optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 256, "epochs": 90, "scaled_rate": 0.1,
    }  # fmt: skip
    assert [share * recipe.epochs for share in recipe.milestones] == pytest.approx([30, 60, 80])
    assert (recipe.host, recipe.schedule) == ("resnet50", "steps")
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in create(mixer, "resnet50").parameters()) for mixer in (recipe.mixer, "keep")]
    assert 0.65e6 < sizes[0] - sizes[1] < 0.75e6, (
        "Table 1a prints 0.7 M for the block; without a reduction it has 3.1 M"
    )


def test_efficientvit_is_trained_as_published():
    recipe = ClassifyRecipe().preset("efficientvit")
    assert said("efficientvit", "epochs", "optimizer", "weight_decay", "sizes", "auto_augment", "mixup", "cutmix") == {
        "epochs": 320, "optimizer": "adamw", "weight_decay": 0.1, "sizes": (128, 160, 192, 224),
        "auto_augment": "rand-m3-n1", "mixup": 0.1, "cutmix": 0.1,
    }  # fmt: skip
    assert said("efficientvit", "loss", "label_smoothing", "ema", "clip", "norm_images", "drop_path", "mixer") == {
        "loss": "bce", "label_smoothing": 0.1, "ema": 0.9998, "clip": 2.0, "norm_images": 16_000, "drop_path": 0.05,
        "mixer": "qt",
    }  # fmt: skip
    assert recipe.warmup * recipe.epochs == pytest.approx(20) and recipe.scaled_rate == 2.5e-4 * recipe.batch_size / 128


def host(classes=4, **options):
    """A task, a small model and images for it."""
    recipe = ClassifyRecipe(image_size=8, patch_size=4, dim=8, depth=1, steps=100, batch_size=8, **options)
    rows = torch.randint(256, (16, 3, 8, 8), dtype=torch.uint8)
    images = ImageData.in_memory("rows", tuple(map(str, range(classes))), *((rows, torch.arange(16) % classes),) * 2)
    task = ClassifyTask(recipe)
    return task, task.build(images), images


def test_the_schedules_are_timms():
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler

    for options in (
        {"optimizer": "adamw", "final": 0.01, "warmup": 0.05, "learning_rate": 5e-4, "learning_rate_for": 4},
        {"optimizer": "adamw", "final": 0.01, "warmup": 0.05, "learning_rate": 5e-4, "cosine_from": "start"},
        {"optimizer": "sgd", "schedule": "steps", "milestones": (30 / 90, 60 / 90, 80 / 90), "learning_rate": 0.1, "warmup": 0.0},
    ):  # fmt: skip
        task, model, _ = host(**options)
        ours, rate = task.optimizer(model), task.recipe.scaled_rate
        schedule = task.schedule(ours)
        theirs = create_optimizer_v2(torch.nn.Linear(2, 2), opt=options["optimizer"], lr=rate, momentum=0.9)
        assert type(ours) is type(theirs)
        if options["optimizer"] == "sgd":
            assert all(ours.defaults[name] == theirs.defaults[name] for name in ("momentum", "nesterov", "dampening"))
            other, shift = MultiStepLRScheduler(theirs, [33, 67, 89], decay_rate=0.1, t_in_epochs=False), -1
        else:
            rising = round(0.05 * 100)
            after = options.get("cosine_from") != "start"
            other, shift = CosineLRScheduler(theirs, 100 - rising * after, lr_min=0.01 * rate, warmup_t=rising,
                                             t_in_epochs=False, warmup_prefix=after, warmup_lr_init=0.0), 1  # fmt: skip
        for step in range(99):
            other.step_update(max(0, step + shift))
            expected = theirs.param_groups[0]["lr"]
            assert ours.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9), step
            ours.step()
            schedule.step()


def test_averaged_weights_are_timms():
    from timm.utils import ModelEmaV3

    _, model, _ = host(ema=0.99)
    ours, theirs = averaged(model, 0.99), ModelEmaV3(model, decay=0.99, exclude_buffers=True)
    ours.n_averaged.fill_(100_000)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    ours.update_parameters(model)
    theirs.update(model)
    for mine, other in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_averages_rise_as_deit_and_efficientvit_have_it():
    """DeiT's decay is constant; EfficientViT's rises over some 2,000 steps. Both average statistics too."""
    deit, efficientvit = (ClassifyRecipe().preset(name) for name in ("deit", "efficientvit"))
    for recipe, expected in ((deit, 0.99996), (efficientvit, 0.9998 * (1 - math.exp(-500 / 2000)))):
        norm = nn.BatchNorm1d(1)
        average = averaged(norm, recipe.ema, recipe.ema_rise, recipe.ema_buffers)
        average.n_averaged.fill_(500)
        with torch.no_grad():
            norm.weight.fill_(2.0)
            norm.running_mean.fill_(1.0)
        average.update_parameters(norm)
        assert average.module.weight.item() == pytest.approx(2 - expected, rel=1e-6)
        assert average.module.running_mean.item() == pytest.approx(1 - expected, rel=1e-3)


def test_gradients_are_clipped_by_their_norm_or_number_by_number(monkeypatch):
    """EfficientViT's trainer calls clip_grad_value_: each number is bounded, whatever the others are."""
    assert said("efficientvit", "clip", "clip_by") == {"clip": 2.0, "clip_by": "value"}
    assert said("deit", "clip_by") == {"clip_by": "norm"}
    (task, _, images), bound, seen = host(), 1e-3, []
    own = torch.optim.AdamW.step

    def step(optimizer, closure):
        value = own(optimizer, closure)
        seen.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))
        return value

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for clip, how in ((None, "norm"), (bound, "value"), (bound, "norm")):
        train_in_memory(ClassifyTask(task.recipe.changed(steps=1, clip=clip, clip_by=how)), images)
    whole, numbers, norm = seen
    assert torch.equal(numbers, whole.clamp(-bound, bound)) and (whole.abs() > bound).any()
    torch.testing.assert_close(norm, whole * bound / whole.norm(), rtol=1e-4, atol=0)


def test_efficientvit_starts_and_is_tested_as_published():
    """efficientvit_cls_model.py: trunc_normal@0.02; efficientvit_b1.yaml: test_crop_ratio 0.95."""
    recipe = ClassifyRecipe().preset("efficientvit")
    assert recipe.crop == 0.95 and recipe.host_init == "published" and recipe.decay == "matrices"
    model = ClassifyTask(recipe.changed(host="efficientvit_b0", mixer="keep", image_size=32, sizes=(32,))).build(
        host()[2]
    )
    layers = [
        part for part in model.modules() if isinstance(part, (nn.Conv2d, nn.Linear)) and part.weight.numel() > 2000
    ]
    assert len(layers) > 30 and all(abs(layer.weight.std().item() - 0.02) < 1e-3 for layer in layers)


def test_repeated_augmentation_is_timms_sampler():
    order = RepeatedOrder(10, 4, 0, Slices(), repeats=3).order(5)
    assert len(order) == 10 and order[0] == order[1] == order[2] != order[3] and len(set(order)) == 4
    places = RepeatedOrder(9, 6, 0, Slices(), repeats=3)
    batches = iter(places)
    rows = [next(batches) for _ in range(3)]
    assert len({index for batch in rows[:1] for _, index in batch}) == 2
    assert RepeatedOrder(10, 4, 0, Slices(), repeats=3).order(6) != order
    assert len(set(Order(10, 4, 0, Slices()).order(5))) == 10
    for repeats, kind in ((3, RepeatedOrder), (1, Order)):
        task, _, images = host(repeats=repeats)
        assert type(task.order(images, Slices())) is kind


def test_images_are_erased_and_mixed_in_training_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    task, model, images = host(mixup=0.8, cutmix=1.0, erasing=1.0, drop_path=0.0)
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    batch = images.train.images[:8], images.train.labels[:8]
    plain = images.normalise(batch[0])
    model.train()
    first = task.loss(model, batch)
    assert not torch.equal(seen[-1], plain) and first.isfinite()
    model.eval()
    task.loss(model, batch), task.infer(model, batch)
    assert torch.equal(seen[-1], plain) and torch.equal(seen[-2], plain)


@pytest.mark.parametrize("loss", ["bce", "cross_entropy"])
def test_the_loss_is_timms(loss):
    from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy

    task, model, images = host(loss=loss, label_smoothing=0.1)
    batch = images.train.images[:8], images.train.labels[:8]
    logits = model(images.normalise(batch[0]))
    expected = (BinaryCrossEntropy if loss == "bce" else LabelSmoothingCrossEntropy)(0.1)(logits, batch[1])
    torch.testing.assert_close(task.loss(model, batch), expected)


def test_batch_norms_are_estimated_anew_before_each_evaluation():
    task = ClassifyTask(ClassifyRecipe(host="resnet50", norm_images=12))
    images = host()[2]
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(192, 4)).eval()
    with torch.no_grad():
        task.prepare(model, images, 1)
    drawn = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:12]
    inputs = images.normalise(images.train.images[drawn])
    torch.testing.assert_close(model[0].running_mean, inputs.mean((0, 2, 3)))
    torch.testing.assert_close(model[0].running_var, inputs.transpose(0, 1).flatten(1).var(1))
    assert model[0].momentum == 0.1 and not model[0].training


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
    memory, stream = (data.load(ClassifyRecipe(**options, stream=value)) for value in (False, True))
    assert memory.classes == stream.classes == ("n01", "n02")
    ((images, labels),) = stream.test.batches(10)
    assert torch.equal(images, memory.test.images.expand(-1, 3, -1, -1)) and torch.equal(labels, memory.test.labels)
    assert stream.counts == memory.counts and stream.majority == memory.majority
    inputs = stream.normalise(images)
    assert inputs[0, :, 0, 0].tolist() == pytest.approx(
        [(images[0, 0, 0, 0].item() - m) / s for m, s in zip(MEAN, STD, strict=True)]
    )


def test_folders_larger_than_memory_are_streamed(folder, monkeypatch):
    monkeypatch.setattr(stored, "MAX_BYTES", 100)
    monkeypatch.setattr(data, "load_folder", None)
    loaded = data.load(ClassifyRecipe(data=str(folder), image_size=8, patch_size=4))
    assert loaded.streamed and len(loaded.train) == 6
    one = loaded.train[5]
    assert one[0].shape == (3, 8, 8) and one[1] == 1
    before = loaded.fingerprint()
    (folder / "train" / "n01" / "9.png").write_bytes((folder / "train" / "n01" / "0.png").read_bytes())
    assert data.load(ClassifyRecipe(data=str(folder), image_size=8, patch_size=4)).fingerprint() != before


def test_pictures_of_a_folder_beyond_memory_are_learned(tmp_path, monkeypatch):
    for place, name in enumerate(("red", "blue")):
        (tmp_path / name).mkdir()
        for number in range(10):
            shade = ((200, 10 + number, 0), (0, 10 + number, 200))[place]
            Image.new("RGB", (20, 12), shade).save(tmp_path / name / f"{number}.png")
    (tmp_path / "red" / "broken.png").write_bytes(b"not a picture")
    recipe = ClassifyRecipe(data=str(tmp_path), image_size=8, epochs=8, learning_rate=1e-2, batch_size=4)
    whole = data.load(recipe)
    monkeypatch.setattr(stored, "MAX_BYTES", 100)
    images = data.load(recipe)
    assert images.streamed and not whole.streamed
    assert images.classes == whole.classes and images.channels == 3 and sum(whole.counts) == 20
    decoded = [sorted((int(label), picture.flatten().tolist()) for part in (each.train, each.test)
                      for pictures, labels in part.batches(3) for picture, label in zip(pictures, labels, strict=True))
               for each in (images, whole)]  # fmt: skip
    assert decoded[0] == decoded[1]
    task = ClassifyTask(recipe)
    trained = train_in_memory(task, images, lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2)))
    details = trained.details(task, images)
    assert details["metrics"]["accuracy"] == 1 and details["predictions"] == details["labels"]
    assert images.thumbnail(0).startswith(b"\x89PNG")


def test_a_streamed_folder_without_train_and_val_is_split(folder):
    images = data.load(ClassifyRecipe(data=str(folder / "train"), stream=True))
    assert images.counts == (4, 2) and sorted(images.test.labels.tolist()) == [0, 1]
    assert not set(images.train.pictures.files) & set(images.test.pictures.files)


@pytest.mark.parametrize("stream", [True, False])
def test_broken_pictures_are_skipped_and_named_or_refused(folder, tmp_path, stream, caplog):
    (folder / "train" / "n01" / "1.png").write_bytes(b"no picture")
    (folder / "val" / "n02" / "0.png").write_bytes(b"")
    texts = []

    def read(broken):
        recipe = ClassifyRecipe(data=str(folder), image_size=8, patch_size=4, stream=stream, broken=broken)
        loaded = data.load(recipe, texts.append)
        return [label for _, label in loaded.train], sum(len(labels) for _, labels in loaded.test.batches(2))

    with caplog.at_level(logging.WARNING):
        labels, tests = read("skip")
    text = caplog.text + "\n".join(texts)
    assert text.count("n01/1.png") == text.count("n02/0.png") == 1
    assert len(labels) == (6 if stream else 5) and tests == 3, "another picture takes the place of a streamed one"
    with pytest.raises(DataError, match=r"1\.png"):
        read("refuse")
    problems = check_data(ClassifyRecipe(data=str(folder)))
    assert len(problems) == 2 and all("png" in problem for problem in problems)


def test_mistakes_in_the_layout_are_one_error_each_and_checked(tmp_path):
    flat = tmp_path / "flat"
    (flat / "train" / "a").mkdir(parents=True)
    (flat / "train" / "b").mkdir()
    for name in ("a", "b"):
        for number in range(2):
            Image.new("RGB", (8, 8)).save(flat / "train" / name / f"{number}.png")

    def wrong(words):
        assert len(data.list_problems(flat)) == 1 and words in data.list_problems(flat)[0]
        for stream in (True, False):
            with pytest.raises(DataError, match=words):
                data.load(ClassifyRecipe(data=str(flat), stream=stream))

    wrong("without val")
    broken = flat / "train" / "a" / "broken.png"
    broken.write_bytes(b"no picture")
    assert [str(broken) in line for line in data.list_problems(flat)] == [False, True], "train is read without val"
    broken.unlink()
    (flat / "val").mkdir()
    Image.new("RGB", (8, 8)).save(flat / "val" / "ILSVRC2012_val_1.png")
    wrong("without a folder per class")
    for name in ("a", "c"):
        (flat / "val" / name).mkdir()
        Image.new("RGB", (8, 8)).save(flat / "val" / name / "0.png")
    (flat / "val" / "ILSVRC2012_val_1.png").unlink()
    assert len(data.list_problems(flat)) == 2  # b and c
    for stream in (True, False):
        with pytest.raises(DataError, match="b, c in one of"):
            data.load(ClassifyRecipe(data=str(flat), stream=stream))
    for stream in (True, False):
        with pytest.raises(DataError, match="two or more classes"):
            data.load(ClassifyRecipe(data=str(flat / "train" / "a"), stream=stream))


def test_cmyk_and_16_bits_keep_their_colours_and_exif_turns(tmp_path):
    red = Image.new("RGB", (40, 20), (220, 20, 30))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    Image.fromarray(np.full((20, 40), 32896, np.uint16)).save(tmp_path / "deep.png")
    turned = Image.new("RGB", (40, 20), (0, 0, 0))
    turned.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    for recipe in (ClassifyRecipe(), ClassifyRecipe(crop=0.875), ClassifyRecipe(augment=True)):
        test = transforms(recipe)[1]
        pictures = Pictures(torch.zeros(3), [str(tmp_path / name) for name in ("cmyk.jpg", "deep.png", "turned.jpg")])
        colour, grey, upright = (test(pictures[place]) for place in range(3))
        assert (colour.float().mean((1, 2)) - torch.tensor([220.0, 20, 30])).abs().max() < 12
        assert (grey.float() - 128).abs().max() <= 1
        assert upright[0, 0].float().mean() > 200 and upright[0, -1].float().mean() < 55, "EXIF's turn was ignored"


@pytest.mark.parametrize("policy", ["rand-m10-n9", "rand-m10-n9-inc1", "original-mstd0.5", "v0-mstd0.5", "augmix-m10"])
def test_the_strongest_augmentation_leaves_a_picture(policy):
    """timm's rand-m9-mstd0.5-inc1 draws its greatest magnitude once in forty pictures: a long training meets it."""
    ramp = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))
    recipe = ClassifyRecipe(augment=True, auto_augment=policy, image_size=64)
    for _ in range(40):
        assert transforms(recipe)[0](ramp).shape == (3, 64, 64)
