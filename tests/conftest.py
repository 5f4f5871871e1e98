import pytest
import torch
from hypothesis import settings

settings.register_profile("polymix", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("polymix")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
