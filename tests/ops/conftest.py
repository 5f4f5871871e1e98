import pytest
import torch

from polymix.ops.native import build
from tests.helpers import poisoned


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """Fill torch.empty with NaN, so that elements that no program writes stay NaN."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture
def fresh_memory_is_nan(monkeypatch):
    """Fill all memory that torch allocates with NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """An empty cache folder for the library, which is not loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    build._library.cache_clear()
    yield tmp_path
    build._library.cache_clear()
