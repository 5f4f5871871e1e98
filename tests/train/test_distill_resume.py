"""`polymix.distill` interrupted, resumed, refused, and on several processes: always the same weights."""

import functools
import multiprocessing
import random
import signal
import threading
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import polymix
from polymix.errors import DataError, OptionError, ResultsError
from polymix.train.data.sampling import Slices
from polymix.train.distill import distill, fit, stages
from polymix.train.distill.order import Every, epochs_of, share_of
from tests.train.distilled import BATCHES, Stateful, X, Y, bits, converted, differing, former, loader, same

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together

TWICE = {"imitate_epochs": 2, "epochs": 2}
STOPS = [("imitation", 0), ("imitation", 1), ("fine-tuning", 0), ("fine-tuning", 1)]


class Noisy(Dataset):
    """Augments by every source of random numbers that there is."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        import numpy as np

        return X[i] + 0.1 * torch.randn(1, 8, 8) + random.random() + float(np.random.rand()), Y[i]


def shuffled():
    return loader()


def with_generator():
    return loader(generator=torch.Generator().manual_seed(3))


def by_sampler():
    return loader(shuffle=False, sampler=RandomSampler(X, generator=torch.Generator().manual_seed(4)))


def noisy():
    return DataLoader(Noisy(), 8, shuffle=True)


def noisy_in_workers():
    return DataLoader(Noisy(), 8, shuffle=True, num_workers=1, persistent_workers=True)


def stateful():
    torch.manual_seed(0)
    return converted(Stateful().eval(), polymix.PomConfig(dropout=0.3))


def stopped(monkeypatch, stage, epoch, run, error=KeyboardInterrupt):
    """A run that is interrupted in the middle of an epoch of a stage."""
    kind = {"imitation": stages.Imitation, "fine-tuning": stages.FineTuning}[stage]
    own, batches = kind.loss, []

    def stop(self, model, batch):
        batches.append(batch)
        if self.slices.step + len(batches) == epoch * self.epoch_steps + 3:
            raise error
        return own(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "loss", stop)
        with pytest.raises(error) if isinstance(error, type) else nullcontext():
            run()


@functools.cache  # no fixture of the module, which would be made before those that decide what runs
def uninterrupted():
    report = stateful()
    return report, distill(report, shuffled(), val=BATCHES, **TWICE)


@pytest.fixture
def whole():
    return uninterrupted()


@pytest.mark.parametrize(("stage", "epoch"), STOPS)
def test_a_resumed_run_has_the_same_bits(whole, monkeypatch, tmp_path, stage, epoch):
    """Shuffled data, dropout, batch statistics; the second run is of another process, with other random numbers."""
    options = {"val": BATCHES, "out": tmp_path, **TWICE}
    report = stateful()
    stopped(monkeypatch, stage, epoch, lambda: distill(report, shuffled(), **options))
    assert not report.undone and report.model.attention is report.adapters["attention"], (
        "Ctrl-C left attention in place"
    )
    torch.manual_seed(77)
    random.seed(77)
    report = stateful()
    assert distill(report, shuffled(), resume=True, **options) == whole[1], "other losses or accuracies"
    same(report, whole[0])


def test_a_resumed_run_may_go_on_in_the_same_process(whole, monkeypatch, tmp_path):
    report = stateful()
    host = former(report)
    options = {"val": BATCHES, "out": tmp_path, **TWICE}
    stopped(monkeypatch, "fine-tuning", 1, lambda: distill(report, shuffled(), **options))
    distill(report, shuffled(), resume=True, **options)
    same(report, whole[0])
    assert not differing(bits(host), bits(report.undo())), "the model before is not the one that came first"


@pytest.mark.parametrize("data", [with_generator, by_sampler, noisy, noisy_in_workers], ids=lambda make: make.__name__)
def test_the_order_of_the_data_does_not_depend_on_what_ran_before(monkeypatch, tmp_path, data):
    expected, resumed = converted(), converted()
    distill(expected, data(), imitate_epochs=0, epochs=2)
    run = {"out": tmp_path, "imitate_epochs": 0, "epochs": 2}
    stopped(monkeypatch, "fine-tuning", 1, lambda: distill(converted(), data(), **run))
    random.seed(1)
    torch.manual_seed(99)
    distill(resumed, data(), resume=True, **run)
    same(expected, resumed)


def test_epochs_differ_and_seeds_decide():
    """Else the above would hold of data that are never shuffled."""
    orders = []
    for seed, step in ((0, 0), (0, 8), (1, 0), (0, 0)):
        orders.append(torch.cat([y for _, y in islice(epochs_of(loader(), seed, Slices(step)), 8)]).tolist())
    assert orders[0] == orders[3] and orders[0] != orders[1] and orders[0] != orders[2] != orders[1]


def test_samplers_of_one_s_own_are_told_the_epoch():
    messages = []

    class Own(RandomSampler):
        def set_epoch(self, epoch):
            messages.append(epoch)

    distill(converted(), loader(shuffle=False, sampler=Own(X)), imitate_epochs=0, epochs=3)
    assert sorted(set(messages)) == [0, 1, 2]


def test_a_finished_run_is_not_run_again(whole, monkeypatch, tmp_path):
    first, again = stateful(), stateful()
    distill(first, shuffled(), val=BATCHES, out=tmp_path, **TWICE)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ckpt")}
    assert sorted(path.relative_to(tmp_path).as_posix() for path in times) == [
        "fine-tuning/last.ckpt",
        "imitation/last.ckpt",
    ]
    monkeypatch.setattr(fit, "fit", lambda *a, **k: pytest.fail("it trained again"))
    assert distill(again, shuffled(), val=BATCHES, out=tmp_path, resume=True, **TWICE) == whole[1]
    same(first, again)
    same(again, whole[0])
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ckpt")}


def test_nothing_to_resume_is_a_beginning(whole, tmp_path):
    report = stateful()
    distill(report, shuffled(), val=BATCHES, out=tmp_path / "new", resume=True, **TWICE)
    same(report, whole[0])
    assert not list(tmp_path.rglob("*.part"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    distill(converted(), BATCHES, out=out, imitate_epochs=1, epochs=1)
    return out


def copied(finished, tmp_path):
    for stage in ("imitation", "fine-tuning"):
        (tmp_path / stage).mkdir(parents=True)
        (tmp_path / stage / "last.ckpt").write_bytes((finished / stage / "last.ckpt").read_bytes())
    return tmp_path


def test_a_checkpoint_is_not_overwritten_unasked(finished, tmp_path):
    out = copied(finished, tmp_path)
    (out / "imitation" / "last.ckpt").unlink()
    report = converted()
    before = bits(report.model)
    with pytest.raises(ResultsError, match=r"`out`: .*got .*fine-tuning.*resume=True"):
        distill(report, BATCHES, out=out, imitate_epochs=1, epochs=1)
    assert not differing(before, bits(report.model)), "stage 1 was trained before stage 2's folder was looked at"


@pytest.mark.parametrize("damage", [
    lambda whole: b"", lambda whole: whole[: len(whole) // 2], lambda whole: whole[:-1], lambda whole: b"PK" + whole[2:200],
], ids=["empty", "half", "last byte", "head"])  # fmt: skip
def test_a_damaged_checkpoint_is_told(finished, tmp_path, damage):
    file = copied(finished, tmp_path) / "imitation" / "last.ckpt"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ResultsError, match=r"`resume`: .*got .*last\.ckpt, which cannot be read.*Delete it"):
        distill(converted(), BATCHES, out=tmp_path, resume=True, imitate_epochs=1, epochs=1)


def test_a_foreign_checkpoint_is_told_and_no_code_of_it_runs(finished, tmp_path):
    class Evil:
        def __reduce__(self):
            return pytest.fail, ("code of a checkpoint was run",)

    for content in ({"state_dict": {}, "epoch": 0}, {"polymix": Evil()}, [1]):
        file = copied(finished, tmp_path / str(len(list(tmp_path.iterdir())))) / "imitation" / "last.ckpt"
        torch.save(content, file)
        with pytest.raises(ResultsError, match="cannot be read"):
            distill(converted(), BATCHES, out=file.parents[1], resume=True, imitate_epochs=1, epochs=1)


@pytest.mark.parametrize(("options", "match"), [
    ({"imitate_epochs": 2}, "expected .*epochs=2.*got .*epochs=1"), ({"epochs": 2}, "expected .*epochs=2.*got .*epochs=1"),
    ({"seed": 1}, "expected .*seed=1.*got .*seed=0"), ({"imitate_lr": 1e-3}, "expected .*imitate_lr=0.001.*got .*imitate_lr=0.006"),
    ({"learning_rate": 1e-3}, "learning_rate=0.0005"), ({"rest_rate": 1.0}, "rest_rate=0.1"), ({"keep": "last"}, "keep=best"), ({"weight_decay": 0.0}, "weight_decay=0.05"),
    ({"labels": 0.5}, "expected .*labels=0.5.*got .*labels=1.0"), ({"teacher": 0.0}, "teacher=1.0"),
    ({"temperature": 1.0}, "temperature=2.0"), ({"precision": "bfloat16"}, "precision=float32"),
    ({"data": BATCHES[:4]}, "expected .*batches=4.*got .*batches=8"),
    ({"report": lambda: converted(plan="pom")}, r"blocks\.0\.mixer={'name': 'padre'"),
    ({"report": lambda: converted(plan={"blocks.0.mixer": polymix.PadreConfig(kernel_size=3, dropout=0.1)})}, r"expected .*blocks\.1\.mixer=None"),
    ({"report": lambda: converted(polymix.models.VisionTransformer(
        polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=2, classes=5, channels=1, mlp_ratio=2,
    ))}, r"expected .*model\.head\.weight=\(5, 16\).*got .*head\.weight=\(4, 16\)"),
])  # fmt: skip
def test_another_run_s_checkpoint_is_told_with_what_differs(finished, options, match):
    arguments = {"report": converted, "data": BATCHES, "imitate_epochs": 1, "epochs": 1, **options}
    with pytest.raises(ResultsError, match=match):
        distill(arguments.pop("report")(), arguments.pop("data"), out=finished, resume=True, **arguments)


def test_a_number_that_is_not_finite_leaves_the_last_good_checkpoint(monkeypatch, tmp_path):
    """… from which a run with better data goes on as if nothing had happened."""
    own, steps = stages.FineTuning.loss, []

    def broken(self, model, batch):
        steps.append(batch)
        return own(self, model, batch) * (torch.nan if len(steps) > 13 else 1)

    expected, report = converted(), converted()
    distill(expected, BATCHES, imitate_epochs=0, epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr(stages.FineTuning, "loss", broken)
        with pytest.raises(OptionError, match="epoch 2"):
            distill(report, BATCHES, out=tmp_path, imitate_epochs=0, epochs=2)
    report = converted()
    distill(report, BATCHES, out=tmp_path, resume=True, imitate_epochs=0, epochs=2)
    same(report, expected)


def test_a_full_disk_leaves_the_checkpoint_before_whole(monkeypatch, tmp_path):
    report, expected = converted(), converted()
    distill(expected, BATCHES, imitate_epochs=0, epochs=2)
    saves, own = [], torch.save

    def full(content, file):
        saves.append(file)
        if len(saves) == 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        own(content, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space"):
            distill(report, BATCHES, out=tmp_path, imitate_epochs=0, epochs=2)
    assert [path.name for path in (tmp_path / "fine-tuning").iterdir()] == ["last.ckpt"], "a part of a file was left"
    assert torch.load(tmp_path / "fine-tuning" / "last.ckpt", weights_only=True)["step"] == 8
    report = converted()
    distill(report, BATCHES, out=tmp_path, resume=True, imitate_epochs=0, epochs=2)
    same(report, expected)


def test_a_stage_that_is_done_is_kept_when_the_next_is_asked_for_later(tmp_path):
    expected, report = converted(), converted()
    distill(expected, BATCHES, imitate_epochs=1, epochs=1)
    distill(converted(), BATCHES, out=tmp_path, imitate_epochs=1, epochs=0)
    distill(report, BATCHES, out=tmp_path, resume=True, imitate_epochs=1, epochs=1)
    same(report, expected)


# Interrupts


def test_an_interrupt_is_answered_and_the_next_is_heard(monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    stopped(monkeypatch, "imitation", 0, lambda: distill(converted(), BATCHES, **TWICE))
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_thread_may_train():
    """Only the main thread may set what answers a signal."""
    done = []
    thread = threading.Thread(target=lambda: done.append(distill(converted(), BATCHES, imitate_epochs=1, epochs=0)))
    thread.start()
    thread.join()
    assert done


# Several processes

forks = "fork" in multiprocessing.get_all_start_methods() and torch.distributed.is_available()
two = pytest.mark.skipif(not forks, reason="untested: two processes, which need fork and torch.distributed")


def test_every_process_has_its_part_and_as_many_batches():
    def batches(rank, world, data=None, count=2):
        return list(islice(epochs_of(loader() if data is None else data, 0, Slices(0, world, rank, world)), count))

    parts = [[y.tolist() for _, y in batches(rank, 3)] for rank in range(3)]
    one = [y.tolist() for _, y in batches(0, 1, count=8)]
    assert [part[i] for i in range(2) for part in parts] == one[:6], "not the order of one process"
    assert [len(Every(BATCHES, rank, 3)) for rank in range(3)] == [2, 2, 2]
    loaded = []

    class Counted(TensorDataset):
        def __getitem__(self, i):
            loaded.append(i)
            return super().__getitem__(i)

    assert len(list(share_of(DataLoader(Counted(X, Y), 8), 1, 4))) == 2
    assert sorted(loaded) == [*range(8, 16), *range(40, 48)], "a process loaded what it had no use for"

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(8))

        def __len__(self):
            return 8

    shares = [torch.cat(batches(rank, 2, DataLoader(Stream(), 2))).tolist() for rank in (0, 1)]
    assert shares == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_stream_without_a_length_is_told():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(BATCHES)

    with pytest.raises(DataError, match="DataLoader without a length"):
        distill(converted(), DataLoader(Stream()), **TWICE)


@two
def test_two_processes_learn_as_one_with_their_batches_together(tmp_path):
    """And the weights, statistics and losses come back into this process's model; the folder can be resumed."""
    pairs = [(torch.cat((a, c)), torch.cat((b, d))) for (a, b), (c, d) in zip(BATCHES[::2], BATCHES[1::2], strict=True)]
    one, two, again = (converted(plan=polymix.PomConfig()) for _ in range(3))
    how = {"imitate_epochs": 0, "epochs": 2, "keep": "last"}  # else other samples are held back of other batches
    expected = distill(one, pairs, **how)
    both = {"devices": 2, "out": tmp_path, **how}
    done = distill(two, BATCHES, **both)
    for name, value in bits(one.model).items():
        torch.testing.assert_close(bits(two.model)[name], value, rtol=1e-4, atol=1e-6, msg=f"{name} is another")
    assert done.fine_tuning == pytest.approx(expected.fine_tuning, rel=1e-4)
    distill(again, BATCHES, resume=True, **both)
    same(two, again)


@two
def test_two_processes_imitate():
    report = converted(plan="pom")
    before = {name: bits(part) for name, part in report.adapters.items()}
    done = distill(report, loader(), devices=2, imitate_epochs=3, epochs=0, imitate_lr=1e-2)
    assert done.imitation[2] < done.imitation[0]
    assert all(differing(before[name], bits(part)) == set(before[name]) for name, part in report.adapters.items())
