import pytest

from tests.parallel.group import Group


@pytest.fixture(scope="package")
def two():
    group = Group(2)
    yield group
    group.close()


@pytest.fixture(scope="package")
def four():
    group = Group(4, (2, 2))
    yield group
    group.close()
