"""Files of saved models: foreign and damaged ones, full disks, interrupted writes, missing libraries."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import polymix
from polymix.convert import Adapter, AttentionSpec, register_adapter
from polymix.convert.adapters import libraries
from polymix.convert.saving import files
from polymix.errors import MissingExtraError, OptionError, ResultsError, UnknownNameError
from tests.convert.saving_cases import library, own, rewrite, round_trip, safetensors, said, timm_vit
from tests.helpers import tokens

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together


def test_files_that_are_none_of_ours(tmp_path):
    polymix.save_pretrained(polymix.convert(own(), "pom").model, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()

    def refused(error, match, content=None):
        if content is not None:
            (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(error, match=match) as caught:
            polymix.load_pretrained(tmp_path)
        assert caught.value.cure, "an error without a cure"

    for part in (whole[: len(whole) // 2], whole[:100], whole[:4], b"", b"not a file of weights at all", whole[:-1]):
        refused(ResultsError, "cut off", part)
    safetensors.save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    refused(ResultsError, "without polymix's config")
    (tmp_path / "model.safetensors").write_bytes(whole)
    changes = {
        "format 2": lambda content, _: content.update(format=2),
        "format None": lambda content, _: content.pop("format"),
        "builds no model": lambda content, _: content.pop("layers"),
        "nosuch": lambda content, _: content["layers"].update(nosuch=content["layers"]["blocks.0.mixer"]),
        r"head\.bias is \(3,\) instead of \(4,\)": lambda _, weights: weights.update({"head.bias": torch.ones(4)}),
        "head.bias is .* instead of missing": lambda _, weights: weights.pop("head.bias"),
        "other is missing instead of": lambda _, weights: weights.update(other=torch.ones(1)),
    }
    for match, change in changes.items():
        (tmp_path / "model.safetensors").write_bytes(whole)
        rewrite(tmp_path, change)
        refused(ResultsError, match)
    (tmp_path / "model.safetensors").unlink()
    refused(ResultsError, "without model.safetensors")


def test_folders_that_are_none(tmp_path):
    (tmp_path / "file").touch()
    for folder, word in ((tmp_path / "file", "a file"), (tmp_path / "none", "not there")):
        with pytest.raises(OptionError, match=word):
            polymix.load_pretrained(folder)
    with pytest.raises(OptionError, match="a file"):
        polymix.save_pretrained(own(), tmp_path / "file")
    with pytest.raises(OptionError, match=r"metadata.*JSON"):
        polymix.save_pretrained(own(), tmp_path / "new", metadata={"a": torch.ones(1)})
    with pytest.raises(OptionError, match="on meta"):
        polymix.save_pretrained(own().to("meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_adapter_or_a_mixer_that_is_not_registered(tmp_path):
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x):
            return self.proj(x)

    @register_adapter(Lone)
    class LoneAdapter(Adapter):
        @classmethod
        def describe(cls, module, host):
            return AttentionSpec(dim=16, heads=2)

        def forward(self, x):
            return self.mix(x)

    globals()["lone"] = lambda: nn.Sequential(Lone())
    model = polymix.convert(nn.Sequential(Lone()), "pom").model
    loaded = round_trip(model, tmp_path, host={"call": "tests.convert.test_save_files:lone"}, trust=True)
    x = tokens(2, 5, 16, dtype=torch.float32)
    assert torch.equal(loaded(x), model.eval()(x))
    rewrite(tmp_path, lambda content, _: content["layers"]["0"].update(adapter="OtherAdapter"))
    with pytest.raises(OptionError, match=r"OtherAdapter.*register_adapter"):
        polymix.load_pretrained(tmp_path, trust=True)
    polymix.save_pretrained(loaded, tmp_path)
    rewrite(tmp_path, lambda content, _: content["layers"]["0"]["mixer"].update(name="mine"))
    with pytest.raises(UnknownNameError, match=r"mine.*polymix\.register"):
        polymix.load_pretrained(tmp_path, trust=True)


def disk_full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fails", ["save_file", "fsync", "replace"])
def test_a_disk_that_fills_leaves_the_old_file_whole(tmp_path, monkeypatch, fails):
    old = own()
    polymix.save_pretrained(old, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(tensors, file, metadata):
        Path(file).write_bytes(b"half of a file")
        disk_full()

    module, broken = (safetensors, half) if fails == "save_file" else (os, disk_full)
    with monkeypatch.context() as patch:
        patch.setattr(module, fails, broken)
        with pytest.raises(OSError, match="No space left"):
            polymix.save_pretrained(own(depth=1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before, "the old model is not whole"
    assert torch.equal(polymix.load_pretrained(tmp_path).position, old.position)


def test_a_write_that_fails_for_real_leaves_the_old_file_whole(saved):
    """In the fresh process, which may write no more than 40 kB to a file when it saves a larger model."""
    folder, before, failure = saved[2]
    if failure is None:
        pytest.skip("untested: a full disk, which needs POSIX limits")
    assert "File too large" in failure
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "not whole, or a part was left"


def test_a_kill_before_the_rename_leaves_the_old_model(tmp_path, monkeypatch):
    """What a killed process leaves lies under a hidden name, and neither load nor the next save minds it."""
    old, new = own(), own(depth=1)
    polymix.save_pretrained(old, tmp_path)

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # the dead do not tidy up
        with pytest.raises(Killed):
            polymix.save_pretrained(new, tmp_path)
    (stray,) = [path for path in tmp_path.iterdir() if path.name not in ("config.json", "model.safetensors")]
    assert stray.name.startswith(".") and stray.suffix != ".safetensors"
    assert torch.equal(polymix.load_pretrained(tmp_path).position, old.position)
    assert len(round_trip(new, tmp_path).blocks) == 1


def test_a_kill_between_the_two_files_is_the_new_model(tmp_path, monkeypatch):
    """The weights carry the config: one rename commits both."""
    polymix.save_pretrained(own(), tmp_path)
    real = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda a, b: real(a, b) if Path(b).name == files.WEIGHTS else disk_full())
        with pytest.raises(OSError, match="No space left"):
            polymix.save_pretrained(own(depth=1), tmp_path)
    assert len(said(tmp_path)["layers"]) == 0 and said(tmp_path)["host"]["kwargs"]["depth"] == 2
    assert len(polymix.load_pretrained(tmp_path).blocks) == 1


def test_what_a_hub_takes(tmp_path):
    """huggingface_hub's own view of the files, without the network."""
    hub = library("huggingface_hub")
    polymix.save_pretrained(polymix.convert(own(), "pom").model, tmp_path)
    for path in tmp_path.iterdir():
        hub.CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=str(path))
    loaded = hub.load_state_dict_from_file(tmp_path / "model.safetensors")
    assert set(loaded) <= set(polymix.load_pretrained(tmp_path).state_dict())


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingExtraError, match="pip install safetensors"):
        polymix.save_pretrained(own(), tmp_path)
    with pytest.raises(MissingExtraError, match=r"pip install"):
        polymix.load_pretrained(tmp_path)


def test_without_the_library_of_a_model(tmp_path, monkeypatch):
    library("timm")
    polymix.save_pretrained(timm_vit(), tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"timm.*\.\[vision\]"):
        polymix.load_pretrained(tmp_path)


def test_every_library_that_can_be_read_is_on_the_list():
    assert set(libraries.LIBRARIES) == {"timm", "torchvision", "transformers", "diffusers", "torch", "polymix"}
