import pytest


@pytest.fixture(autouse=True)
def _exports_are_quick(torchlib_once):
    """Every test here exports."""
