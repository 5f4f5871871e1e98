import pytest
import torch

from polymix.ops.native import build
from tests.helpers import poisoned


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """An element that no program writes is NaN."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture
def fresh_memory_is_nan(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """A cache of its own, and no library found yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    build._library.cache_clear()
    yield tmp_path
    build._library.cache_clear()
