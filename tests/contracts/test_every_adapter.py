"""What every library's adapters must do, on the models of `library_cases.py`: a new library is a row there."""

import sys

import pytest
import torch

import polymix
from polymix.convert.adapters.libraries import LIBRARIES, library_of
from tests.contracts.library_cases import HOSTS
from tests.convert.checks import accounts, answer, identical, keeps_form, same_as_host, stirred, trains, undoes


@pytest.fixture(params=HOSTS)
def host(request):
    torch.manual_seed(0)
    case = HOSTS[request.param]
    return case, case.build().eval(), case.inputs()


def test_every_library_has_a_row():
    assert set(HOSTS) == set(LIBRARIES)


def test_softmax_with_the_same_weights_gives_the_same_output(host):
    _, model, inputs = host
    same_as_host(model, inputs)


def test_a_conversion_keeps_the_form_learns_and_is_undone(host):
    _, model, inputs = host
    report = polymix.convert(stirred(model), "pom")
    keeps_form(model, report, inputs)
    trains(report, inputs)
    accounts(report)
    undoes(model, "qt", inputs)


def test_an_input_matches_the_statistics(host):
    """With an input every layer has an error and a scale, and its output the attention's size."""
    _, model, inputs = host
    report = polymix.convert(model, "pom", input=inputs)
    assert all(layer.error is not None and layer.scale is not None for layer in report.layers)
    assert all(t.isfinite().all() for t in answer(report.model, inputs))


def test_a_saved_model_comes_back(host, tmp_path):
    case, model, inputs = host
    report = polymix.convert(model, "1:1", mixer="pom")
    expected = answer(report.model, inputs)
    polymix.save_pretrained(report.model, tmp_path, host=case.recipe)
    loaded = polymix.load_pretrained(tmp_path, trust=case.recipe is not None)
    identical(answer(loaded, inputs), expected)


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_table_names_what_is_there(name):
    """Adapters load without their library, and read and build recipes; a class of models is found by its path."""
    adapters = LIBRARIES[name].load_adapters()
    assert callable(adapters.read_recipes) and callable(adapters.build_model)
    model = HOSTS[name].build()
    assert library_of(type(model)) == name and name in sys.modules
