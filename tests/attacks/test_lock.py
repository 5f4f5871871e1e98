"""One process writes a folder: another one is refused in a line, whatever the verb, and leaves everything as it is."""

import errno
import os
import signal
from unittest.mock import patch

import pytest

from polymix.errors import OptionError
from polymix.files import LOCK, output_folder
from tests.attacks.command import run, tree
from tests.attacks.test_disk import VERBS as WRITERS
from tests.processes import FORKS, fork

EXPORT = ["export", "--mixer", "pom", "--dim", "8", "--tokens", "4", "--target", "onnx"]
VERBS = {**WRITERS, "export": [*EXPORT, "--threads", "1"]}


def held(folder, renamed, pipe):
    with output_folder(folder, renamed=renamed):
        pipe.send("ready")
        pipe.poll(None)


class Holder:
    """Another process that writes into a folder. A pipe, unlike an event, does not wait for a process that is dead."""

    def __init__(self, folder, renamed=False):
        self.pipe, self.theirs = FORKS.Pipe()
        self.process = fork(held, folder, renamed, self.theirs)

    def __enter__(self):
        self.process.start()
        self.theirs.close()
        assert self.pipe.recv() == "ready"
        return self

    def __exit__(self, *error):
        if self.process.is_alive():
            self.pipe.send("done")
        self.process.join()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_a_second_process_is_refused(material, tmp_path, monkeypatch, verb, resume):
    if resume and verb in ("lens", "export"):
        pytest.skip("untested: the verb has no --resume")
    monkeypatch.chdir(material)
    out = tmp_path / "new"
    with Holder(out, renamed=verb == "export"):
        before = tree(tmp_path)
        outcome = run([*VERBS[verb], "--out", str(out), *["--resume"] * resume])
        assert outcome.refused and "another process of polymix" in outcome.err and str(out) in outcome.err, outcome
        assert tree(tmp_path) == before
    assert not [*tmp_path.iterdir()], "the folder and its lock go with the process that made them"


def test_distill_and_predict_and_train_lock_their_folder(tmp_path):
    """By their source: each writes inside of `output_folder`."""
    import inspect

    from polymix.domains.generation.latents import write_cache
    from polymix.train.distill import distill
    from polymix.train.run import train
    from polymix.train.saved import SavedRun

    for function in (distill, train, SavedRun.predict, write_cache):
        assert "output_folder(" in inspect.getsource(function), function


def test_a_killed_process_leaves_no_lock_behind(tmp_path):
    with Holder(tmp_path / "new") as holder:
        os.kill(holder.process.pid, signal.SIGKILL)
        holder.process.join()
        with output_folder(tmp_path / "new") as folder:
            assert [path.name for path in folder.iterdir()] == [LOCK]
    assert not (tmp_path / "new" / LOCK).exists()


def test_a_worker_that_outlives_its_process_holds_no_lock(tmp_path):
    worker = 0
    try:
        with output_folder(tmp_path / "new") as folder:
            (folder / "file").write_text("x")
            worker = os.fork()  # it computes nothing, so no lock of another thread can stop it
            if not worker:
                signal.pause()
                os._exit(0)
        with output_folder(tmp_path / "new"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_folder_that_stays_empty_goes_and_one_of_the_users_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    for place in ("a/b/c", "mine", "mine/deep"):
        with pytest.raises(KeyError), output_folder(tmp_path / place):
            raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and not [*(tmp_path / "mine").iterdir()]


def test_a_thread_may_lock_again_and_another_may_not(tmp_path):
    import threading

    errors = []

    def other():
        with pytest.raises(OptionError, match="another process"), output_folder(tmp_path / "new"):
            pass
        errors.append("refused")

    with output_folder(tmp_path / "new"), output_folder(tmp_path / "new") as folder:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert (folder / LOCK).exists()
    assert errors == ["refused"]


def test_of_the_processes_of_torchrun_the_first_one_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with output_folder(tmp_path / "new"):
        monkeypatch.setenv("RANK", "1")
        with output_folder(tmp_path / "new") as folder:
            assert folder == tmp_path / "new"


def test_a_file_system_without_locks_refuses_nothing(tmp_path):
    with patch("polymix.files._lock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        for _ in range(2):
            with output_folder(tmp_path / "new") as folder:
                assert folder.is_dir()
