"""Times that are the same on every machine."""

import pytest

from polymix.workflows.search import stages
from tests.workflows.search.helpers import fixed_times


@pytest.fixture(autouse=True)
def times(monkeypatch):
    monkeypatch.setattr(stages, "layer_times", fixed_times)
    monkeypatch.setattr(stages, "busy", lambda: "")
