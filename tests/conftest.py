import copy
import functools
import gc
import os
import signal
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from polymix import cli
from polymix.compat import cure_torchvision
from polymix.ops import dispatch
from tests.helpers import save_blank

# Workers, the interpreters that tests start and the slow suite use what the first one has compiled and rewritten.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)  # the suite runs in as many processes as there are cores: threads beside them only wait
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so do those of commands, which else take every core
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run without a GPU
    for kind in (torch.cuda, torch.xpu, torch.mtia):  # for a later device it keeps a traceback of every call
        kind.manual_seed_all = lambda seed: None
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what they run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests of Ctrl-C, and the processes that they start
settings.register_profile("polymix", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("polymix")
TO_TRAIN = ("MIN_TOKENS_TO_TRAIN", "MIN_TOKENS_TO_TRAIN_IN_BF16")
THRESHOLDS = {name: getattr(dispatch, name) for name in ("MIN_TOKENS", *TO_TRAIN, "MIN_TOKENS_IN_A_GRAPH")}
MATPLOTLIB = find_spec("matplotlib") is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage is not looked for among what collecting makes and keeps: a million objects, a second each time.

    What lives longer is looked through a tenth as often as by default, for it is mostly the libraries that tests import.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        gc.enable()


@pytest.fixture(autouse=True)
def _blocks_for_few_tokens(monkeypatch):
    """The blocked forms run in every test that records no gradients, and C kernels in graphs, however few the tokens."""
    monkeypatch.setattr(dispatch, "MIN_TOKENS", dict.fromkeys(dispatch.MIN_TOKENS, 0))
    for name in TO_TRAIN:
        monkeypatch.setattr(dispatch, name, {})
    monkeypatch.setattr(dispatch, "MIN_TOKENS_IN_A_GRAPH", {})


@pytest.fixture
def real_thresholds(_blocks_for_few_tokens, monkeypatch):
    """The numbers of tokens from which "auto" takes kernels, as in programs and in processes that a test starts."""
    for name, values in THRESHOLDS.items():
        monkeypatch.setattr(dispatch, name, values)


@functools.cache
def _commands(app=cli._app):
    """The command line, built once in a worker: `main` builds all verbs in each call, which takes more than a refusal."""
    import typer.main

    return typer.main.get_command(app())


@pytest.fixture(autouse=True)
def _commands_are_built_once(monkeypatch):
    monkeypatch.setattr(cli, "_app", _commands)


@pytest.fixture(autouse=True)
def _start():
    """Each test begins with the same random numbers and, whatever a command before it has set, one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _blank_pictures(request, monkeypatch):
    """Figures are saved without being drawn, which takes most of a small training.

    They are drawn in tests with the mark `draws`, which look at them, and in fixtures of wider scope.
    """
    if MATPLOTLIB and "draws" not in request.keywords:
        import matplotlib.figure  # named as text it is looked up anew in every test

        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save_blank)


@pytest.fixture(scope="session")
def torchlib_once():
    """torch.onnx reads the definitions of all operators in every export, half a second; here in the first alone."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another PyTorch, or no onnxscript
        yield
        return
    read = functools.cache(ONNXRegistry.from_torchlib)

    def from_torchlib(**options):
        whole = read(**options)
        own = copy.copy(whole)  # an export adds what its caller translates
        own.functions = {name: [*decompositions] for name, decompositions in whole.functions.items()}
        return own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield


@pytest.fixture
def no_progress_bars():
    """transformers shows none in this test."""
    cure_torchvision()
    logging = pytest.importorskip("transformers", reason="untested: models of transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:
        logging.enable_progress_bar()


@pytest.fixture
def processor(monkeypatch):
    """A function that sets which bf16 products the processor is said to have: AMX and AVX512_BF16."""

    def patch(amx, avx512):
        monkeypatch.setattr("polymix.ops.shared.blocks.AMX", amx)
        monkeypatch.setattr("polymix.ops.shared.blocks.AVX512_BF16", avx512)

    return patch


@pytest.fixture(params=[False, True], ids=["bf16 widened", "bf16 products"])
def bf16_products(request, processor):
    """Whether the processor multiplies bf16 itself: both ways on any machine, since what is detected is patched."""
    processor(request.param, request.param)
    return request.param
