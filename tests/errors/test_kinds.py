"""The errors themselves: they pickle, are what Python calls them, and read as sentences."""

import inspect
import pickle

import pytest

from polymix import errors
from polymix.errors import CapabilityError, MaskError, OptionError, ShapeError, StateError, UnknownNameError
from tests.errors.helpers import says

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PolymixError)]


OTHERS = (errors.MissingExtraError, errors.UnknownOptionError)  # with sentences of their own; see test_missing


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OTHERS])
def test_errors_pickle(kind):
    """They come back whole from a data loader's worker or another rank."""
    error = kind("mask", (2, 3), "a boolean tensor", "Compare first.")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert str(other) == str(error) == "`mask`: expected a boolean tensor, got (2, 3). Compare first."
    assert vars(other) == vars(error)


def test_an_unknown_option_pickles_and_says_which_there_are():
    error = errors.UnknownOptionError("lengths", "length, tokens")
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) == "`lengths` is an unknown option. Choose from length, tokens. Check the spelling."
    assert type(other) is errors.UnknownOptionError and vars(other) == vars(error)


def test_errors_are_also_what_python_calls_them():
    bases = {
        OptionError: ValueError, ShapeError: ValueError, MaskError: ValueError, StateError: ValueError,
        CapabilityError: NotImplementedError, UnknownNameError: LookupError, errors.MissingExtraError: ImportError,
        errors.InputError: RuntimeError, errors.DataError: ValueError, errors.ResultsError: ValueError,
        errors.ParityError: ArithmeticError, errors.DivergedError: OptionError,
        errors.IdleOptionError: OptionError,
        errors.UnknownOptionError: OptionError, errors.ParallelError: RuntimeError,
    }  # fmt: skip
    assert set(bases) | {errors.PolymixError} == set(KINDS)
    for kind, base in bases.items():
        assert issubclass(kind, base)


def test_an_unknown_option_is_not_expected():
    error = errors.UnknownOptionError("bogus", "the options of pom: degree")
    other = pickle.loads(pickle.dumps(error))
    assert vars(other) == vars(error) and str(other) == str(error)
    assert str(error) == "`bogus` is an unknown option. Choose from the options of pom: degree. Check the spelling."


def test_an_error_without_a_cure_ends_with_what_is_allowed():
    assert str(OptionError("a", 1, "2")) == "`a`: expected 2, got 1."


def test_check_int_knows_both_ends():
    errors.check_int("k", 3, 1, 3)
    says(lambda: errors.check_int("k", 4, 1, 3), OptionError, "k", "4", "from 1 to 3", "k=1")
