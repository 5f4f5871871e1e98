"""Any value of a results.json replaced by another: what reads it refuses the file, or goes on; it never fails raw."""

import io
import json
import os
import pickle
import shutil
import zlib

import pytest
import torch

from polymix.cli import main
from tests.attacks.command import run, stop
from tests.attacks.data_sets import ODD, _places
from tests.attacks.test_files import COMMANDS, place, runs  # noqa: F401  # fixtures
from tests.attacks.test_full_disk import train
from tests.helpers import blank_pictures

PART = 101  # of the values, those of the quick test
READERS = {
    **{verb: (command[-1], [*command, "--resume"]) for verb, command in COMMANDS.items()},
    "evaluate": ("seen", ["evaluate", "seen", "--threads", "1"]),
    "predict": ("seen", ["predict", "seen", "S2.npy", "--out", "new", "--threads", "1"]),
    "evaluate text": ("trained", ["evaluate", "trained", "--limit", "64", "--threads", "1"]),
    "export": ("seen", ["export", "--model", "seen", "--out", "new", "--threads", "1"]),
    "init": ("seen", [*train("satellite", "new"), "--init", "seen"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A training of a domain that predicts files, and one of its files."""
    folder = tmp_path_factory.mktemp("seen")
    with pytest.MonkeyPatch.context() as patch, blank_pictures():
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stop:
            main(train("satellite", "seen"))
    assert not stop.value.code
    shutil.copy(next(folder.glob("seen/data/*/DATA_S2/*.npy")), folder / "S2.npy")
    return folder


def attacked(reader, place, part):  # noqa: F811
    folder, command = READERS[reader]
    path, wrong = place / folder / "results.json", []
    content = json.loads(path.read_text())
    for keys in _places(content, ()):
        for label, value in ODD.items():
            name = f"{'.'.join(map(str, keys))} as {label}"
            if zlib.crc32(name.encode()) % part or keys[0] == "evaluations":  # which nothing reads
                continue
            other = json.loads(json.dumps(content))
            inner = other
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value
            path.write_text(json.dumps(other))
            try:
                outcome = run(command)
                fine = outcome.refused or outcome.status in (0, "reached")
            except Exception as error:
                outcome, fine = repr(error)[:300], False
            if not fine or (getattr(outcome, "refused", False) and (place / "new").exists()):
                wrong.append((name, outcome))
            shutil.rmtree(place / "new", ignore_errors=True)
    assert not wrong


@pytest.fixture
def there(place, seen):  # noqa: F811
    shutil.copytree(seen, place, dirs_exist_ok=True)
    return place


@pytest.mark.parametrize("reader", ["evaluate", "predict", "init", "export"])
def test_weights_that_are_damaged(there, reader):
    """One line before any preparation, without PyTorch's advice on unsafe files, and nothing is left behind."""
    path, command = there / "seen" / "model.pt", READERS[reader][1]
    whole, before = path.read_bytes(), sorted(there.iterdir())
    code = io.BytesIO()
    torch.save({"head": print}, code)
    for content in (b"", bytes(64), b"x", whole[: len(whole) // 2], whole[:-3], pickle.dumps(print), code.getvalue()):
        path.write_bytes(content)
        outcome = run(command)
        assert outcome.refused and "model.pt" in outcome.err and not outcome.out, outcome
        assert "weights_only" not in outcome.err and "PyTorch" not in outcome.err and sorted(there.iterdir()) == before
    path.unlink()
    os.mkfifo(path)
    outcome = run(command)
    assert outcome.refused and "no regular file" in outcome.err, outcome


def test_a_damaged_judge_is_trained_again(tmp_path):
    from polymix.domains.generation.quality import train_judge

    images = [(torch.full((1, 4, 4), number / 8), number % 2) for number in range(8)]
    file, said = tmp_path / "judge.pt", []

    def judge():
        said.clear()
        return train_judge(images, images, (1, 4, 4), 2, 1, file, said.append)[1]

    accuracy = judge()
    whole = file.read_bytes()
    for content in (b"", b"x", whole[:-9], pickle.dumps(print), pickle.dumps([1])):
        file.write_bytes(content)
        assert judge() == accuracy and said, "trained again"
    assert judge() == accuracy and not said, "a whole one is read"


@pytest.mark.parametrize("reader", [
    pytest.param(name, marks=pytest.mark.slow if name in ("compare", "convert", "export", "init") else ()) for name in READERS
])  # fmt: skip
def test_some_values(there, reader):
    attacked(reader, there, PART)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reader", READERS)
def test_every_value(there, reader, monkeypatch):
    """All of them; one in four where the command takes a second. An export, which takes several, is not written."""
    monkeypatch.setattr("polymix.workflows.export.export_graphs", stop)
    attacked(reader, there, 4 if reader == "compare" else 1)


@pytest.mark.exhaustive
def test_exports_are_written_whole_or_not_at_all(there):
    """With one in sixteen of the values."""
    attacked("export", there, 16)
