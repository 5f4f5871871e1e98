"""Models that are wrapped, shared, scripted or read more than a mixer gives: an error of ours, and an unchanged model."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import polymix
from polymix import lens
from polymix.convert.model_recipes import encode
from polymix.convert.saving.files import read, write
from polymix.errors import CapabilityError, PolymixError
from polymix.mixers.fold import Folded
from tests.attacks.command import MODEL, run
from tests.attacks.test_python import X, fails, host
from tests.contracts.mixer_cases import CASES


class ReadsWeights(nn.Module):
    """A block that adds what it reads of the attention weights."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        y, weights = self.attn(x, x, x, need_weights=True)
        return y + weights.sum() * 0


class IgnoresWeights(ReadsWeights):
    def forward(self, x):
        return self.attn(x, x, x, need_weights=True)[0]


@pytest.mark.parametrize("copy", [False, True])
def test_a_model_that_reads_attention_weights_is_refused_where_an_input_shows_it(copy):
    """The next call failed, with an error that named no mixer."""
    model = ReadsWeights().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CapabilityError, match="attention weights") as info:
        polymix.convert(model, "pom", input=X, copy=copy)
    assert "attn" in str(info.value)
    assert isinstance(model.attn, nn.MultiheadAttention)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert polymix.convert(IgnoresWeights(), "pom", input=X).model(X).shape == X.shape


class FullyShardedDataParallel(nn.Module):
    """FSDP1 by its name; the real one needs several processes."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class DTensor(torch.Tensor):
    pass


def sharded():
    model = host()
    layer = model.layers[0].linear1
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(DTensor))
    return model


def uncopyable():
    model = host()
    model.cache = torch.ones(2, requires_grad=True) * 2  # a tensor inside a graph
    return model


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        raise KeyError("boom\nboom")


WRAPPED = {
    "fsdp": lambda: FullyShardedDataParallel(host()), "sharded": sharded, "lazy": lambda: nn.Sequential(host(), nn.LazyLinear(3)),
    "scripted": lambda: torch.jit.script(nn.Linear(8, 8)), "compiled": lambda: torch.compile(host(), backend="eager"), "raises": Raises,
    "meta": lambda: host().to("meta"), "no copy": uncopyable, "part is scripted": lambda: nn.Sequential(host(), torch.jit.script(nn.ReLU())),
}  # fmt: skip
USES = {
    "convert": lambda m, p: polymix.convert(m, "pom"), "convert on an input": lambda m, p: polymix.convert(m, "pom", input=X),
    "convert a copy": lambda m, p: polymix.convert(m, "pom", copy=True),
    "insert": lambda m, p: polymix.insert(m, next((n for n, _ in m.named_modules() if n), ""), "pom", input=X),
    "insert at itself": lambda m, p: polymix.insert(m, "", "pom", input=X),
    "save": lambda m, p: polymix.save_pretrained(m, p / "s"), "optimize": lambda m, p: polymix.optimize(m),
    "degree": lambda m, p: lens.degree(m, shape=(1, 3, 8)), "interactions": lambda m, p: lens.interactions(m, 2, shape=(1, 3, 8)),
    "tensor": lambda m, p: lens.tensor(m, 2, shape=(1, 3, 8)), "receptive field": lambda m, p: lens.receptive_field(m, shape=(1, 3, 8)),
    "equivariance": lambda m, p: lens.equivariance(m, shape=(1, 3, 8)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_models_are_named_before_anything_is_changed(kind, tmp_path):
    """PyTorch's own errors were StopIteration, "mixed torch.Tensor and DTensor", "uninitialized parameter"."""
    rows = []
    for name, use in USES.items():
        model = WRAPPED[kind]()
        before = {key: type(module) for key, module in model.named_modules()}
        accepted = []
        fails(lambda u=use, m=model, a=accepted: a.append(u(m, tmp_path)), rows, name)
        if not accepted:
            assert {key: type(module) for key, module in model.named_modules()} == before, name
    assert not rows


def test_optimizing_while_other_threads_call():
    """A call that found its packed forward half taken away read a weight that was not there."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), polymix.create_mixer("pom", 64)).eval()
    x, errors, stop = torch.randn(1, 4, 64), [], threading.Event()
    with torch.no_grad():
        right = model(x)

    def call():
        with torch.no_grad():
            while not stop.is_set():
                try:
                    torch.testing.assert_close(model(x), right, rtol=1e-4, atol=1e-4)
                except Exception as error:
                    errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(60):
        polymix.optimize(model, enabled=i % 2 == 0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[:2]


def test_merged_maps_are_never_found_half_made():
    """Another thread that calls the model while the first call merges must not find no maps."""
    folded, parameters = Folded(), [nn.Parameter(torch.ones(2))]
    maps = {"weight": (torch.ones(2), None)}
    inside = []

    def merge():
        inside.append(folded.maps(lambda: maps, parameters))  # what another thread gets meanwhile
        return maps

    assert folded.maps(merge, parameters) == maps
    assert inside == [maps]


@pytest.mark.parametrize("options", [{}, {"input": X}, {"init": "fresh"}, {"match": "parameters"}])
def test_converting_and_undoing_leaves_spectral_norm_as_it_was(options):
    """In training, reading such a weight is a step of its power iteration."""
    model = IgnoresWeights().train()
    for layer in (model.attn.out_proj,):
        spectral_norm(layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = polymix.convert(model, "pom", **options).undo().state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert model.attn.out_proj.parametrizations.weight.training


@pytest.mark.parametrize("attribute", ["forward", "train", "__class__", "_modules"])
def test_a_saved_folder_cannot_replace_what_a_module_does(tmp_path, attribute):
    """An adapter whose `forward` is a text loaded, and failed in the call."""
    polymix.save_pretrained(polymix.convert(host(), "pom").model, tmp_path, host="tests.attacks.test_python:host")
    content, tensors = read(tmp_path)
    for name in [name for name, _ in polymix.convert(host(), "pom").model.named_modules()]:
        write(tmp_path, {**content, "attributes": encode({name: {attribute: "x"}})}, dict(tensors))
        with pytest.raises(PolymixError):
            polymix.load_pretrained(tmp_path, trust=True)


@pytest.mark.parametrize("case", [*CASES, "non_local norm"])
def test_every_mixer_trains_on_a_single_token(case):
    """A BatchNorm of one value has no variance; of a batch whose padding leaves one token, neither."""
    name, options = ("non_local", {"norm": "batch"}) if case == "non_local norm" else CASES[case]
    options = {key: value for key, value in options.items() if key != "grid"} | (
        {"grid": (1, 1)} if "grid" in options else {}
    )
    try:
        mixer = polymix.create_mixer(name, 12, **options).train()
        x = torch.randn(1, 1, 12, requires_grad=True)
        y = mixer(x, *(x,) * mixer.contexts) if mixer.needs_context else mixer(x)
    except PolymixError:  # an axis too many, or too few tokens for its structure
        return
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    if mixer.capabilities.has("padding") and not mixer.config.placed:
        for real in ([True, False, False], [False, False, False]):
            assert mixer(torch.randn(1, 3, 12), mask=torch.tensor([real])).isfinite().all()


def test_equal_models_save_equal_files(tmp_path):
    """The library writes the entries of a header in random order."""
    model, files = polymix.convert(host(), "pom").model, set()
    for i in range(8):
        polymix.save_pretrained(
            model, tmp_path / str(i), host="tests.attacks.test_python:host", metadata={"ä": "\u2028"}
        )
        files.add((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert len(files) == 1
    again = polymix.load_pretrained(tmp_path / "0", trust=True)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_equal_conversions_save_equal_files(tmp_path, monkeypatch):
    """The header of the file held measured times, so that no checksum could be compared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    files = []
    for name in ("a", "b"):
        outcome = run(
            ["convert", "--model", "model.py:build", "--plan", "pom", "--seconds", "0.01", "--out", name], work=()
        )
        assert outcome.status == 0, outcome
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
