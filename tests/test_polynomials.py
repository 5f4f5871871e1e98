"""Whole networks as polynomials: what is fitted and folded, what is refused by name, and what comes back."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymix
from polymix import lens
from polymix.errors import CapabilityError, DataError, InputError, OptionError
from polymix.export import export
from polymix.export.arithmetic import check_onnx
from polymix.polynomials.activations import PolynomialActivation, RationalActivation
from tests.helpers import build


def network(activation=nn.GELU):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), activation(), nn.AvgPool2d(2), nn.Flatten(), nn.BatchNorm1d(64),
        nn.Linear(64, 8), nn.BatchNorm1d(8), activation(), nn.Linear(8, 3),
    )  # fmt: skip
    model(torch.randn(64, 1, 8, 8))  # statistics of the norms
    return model


@pytest.mark.parametrize("degree", [2, 3])
def test_a_network_becomes_a_polynomial_of_the_degree_that_the_lens_finds(degree):
    """Two activations in a row of degree d make d², all batch norms gone."""
    model, x = network(), torch.randn(32, 1, 8, 8)
    report = polymix.polynomialize(model, [x], degree=degree)
    assert report.degree(x[:1]).degree == degree**2
    assert list(report.activations) == ["2", "8"] and list(report.folded) == ["1", "7", "5"]
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    assert report.model is model and "relative error" in str(report)
    assert str(report).splitlines()[0].split() == ["layer", "was", "range", "largest", "error"], "a table, a line each"


def test_undo_gives_the_network_back():
    model, x = network().eval(), torch.randn(32, 1, 8, 8)
    before, weights = model(x).detach(), {key: value.clone() for key, value in model.state_dict().items()}
    report = polymix.polynomialize(model, x)
    assert 0 < report.error < 0.5
    assert float((model(x).detach() - before).norm() / before.norm()) == pytest.approx(report.error, rel=1e-3)
    assert report.undo() is model and torch.equal(model(x), before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with pytest.raises(OptionError, match="undone"):
        report.undo()


def test_the_error_falls_with_the_degree():
    x = torch.randn(32, 1, 8, 8)
    errors = [polymix.polynomialize(network(), x, degree=degree).error for degree in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-2


def test_folded_norms_change_nothing():
    model, x = network(nn.Identity).eval(), torch.randn(8, 1, 8, 8)
    assert polymix.polynomialize(model, x).error < 1e-6


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_a_polynomial_is_its_own_fit(degree):
    """x^degree on [-1, 3] is found to rounding, though no range is symmetric."""

    class Power(nn.Module):
        def forward(self, x):
            return x**degree

    fitted = PolynomialActivation(Power(), -1.0, 3.0, degree).double()
    x = torch.linspace(-1, 3, 50, dtype=torch.float64)
    assert (fitted(x) - x**degree).abs().max() < 1e-5 * 3**degree


def test_learned_coefficients_are_trained():
    model, x = network(), torch.randn(8, 1, 8, 8)
    polymix.polynomialize(model, x, learned=True)
    model(x).square().sum().backward()
    assert model[2].coefficients.grad.isfinite().all() and len(model[2].coefficients) == 4


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.inner(x))


class Quotient(nn.Module):
    def forward(self, x):
        return x / (x * x + 1)


@pytest.mark.parametrize(("layer", "word"), [
    (nn.LayerNorm(4), "1, a LayerNorm"), (Functional(), "1, a Functional that computes relu"), (nn.Softmax(-1), "1, a Softmax"),
    (nn.MultiheadAttention(4, 1), None), (build("softmax", 4), "softmax that is no polynomial"), (build("pom", 4), "pom that is no polynomial"),
    (build("padre", 4, denominator=1), "padre that is no polynomial"), (Quotient(), "1, a Quotient that computes div"),
])  # fmt: skip
def test_what_prevents_it_is_named_and_the_model_stays(layer, word):
    if word is None:
        layer, word = nn.MaxPool1d(2), "1, a MaxPool1d"
    model, x = nn.Sequential(nn.Linear(4, 4), layer, nn.GELU()).float(), torch.randn(2, 6, 4)
    layers = list(model)
    with pytest.raises(CapabilityError, match=word):
        polymix.polynomialize(model, x)
    assert list(model) == layers and model.training


def test_mixers_that_are_polynomials_stay():
    block = polymix.MixerBlock(4, polymix.PadreConfig(kernel_size=3, degree=2), norm=None)
    report = polymix.polynomialize(block, torch.randn(2, 6, 4), degree=3)
    assert lens.degree(block, shape=(1, 6, 4), max_degree=8).degree == 6, str(report)


@pytest.mark.parametrize(("options", "error"), [
    ({"degree": 0}, OptionError), ({"data": []}, DataError), ({"model": nn.GELU()}, OptionError), ({"model": 3}, OptionError),
    ({"degree": True}, OptionError), ({"degree": "2"}, OptionError), ({"degree": 1e9}, OptionError), ({"learned": 1}, OptionError),
    ({"denominator": 5}, OptionError), ({"denominator": 1.0}, OptionError), ({"eps": -1.0}, OptionError), ({"data": iter(())}, DataError),
])  # fmt: skip
def test_bad_arguments(options, error):
    with pytest.raises(error):
        polymix.polynomialize(**{"model": network(), "data": torch.randn(4, 1, 8, 8), **options})


class Normed(nn.Module):
    """As a host writes it: the norm inside, the tokens transposed around it."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def token_host(config):
    """A transformer with batch norms where others have layer norms."""
    torch.manual_seed(0)
    block = polymix.MixerBlock(4, config, norm=None)
    block.norm1, block.norm2 = Normed(4), Normed(4)
    model = nn.Sequential(nn.Linear(3, 4), block, nn.Flatten(), nn.Linear(24, 3))
    model(torch.randn(64, 6, 3))
    return model.eval()


def test_distilling_brings_back_what_a_low_degree_lost_and_undo_brings_back_every_weight():
    """All layers learn from the network that was; those that both have in common are restored by undo."""
    model, x = network().eval(), torch.randn(256, 1, 8, 8)
    before, weights = model(x).detach(), {key: value.clone() for key, value in model.state_dict().items()}
    data = list(zip(x.split(16), before.argmax(-1).split(16), strict=True))
    report = polymix.polynomialize(model, x, degree=2, learned=True)
    fit = float((model(x) - before).detach().norm())
    done = polymix.distill(report, data, epochs=6, labels=0, learning_rate=3e-3, rest_rate=1.0)
    assert float((model(x) - before).detach().norm()) < 0.7 * fit
    assert done.imitation == () and len(done.fine_tuning) == 6 and report.kept == "distilled"
    assert report.degree(x[:1]).degree == 4  # it is as much of a polynomial as it was
    assert report.undo() is model and torch.equal(model(x), before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with pytest.raises(OptionError, match=r"`report`.*undone"):
        polymix.distill(report, data)


def test_options_for_mixers_are_refused_for_a_polynomial():
    x = torch.randn(16, 1, 8, 8)
    report = polymix.polynomialize(network(), x)
    for option in ({"imitate_epochs": 2}, {"lora": 1}, {"progressive": 1}, {"blocks": 0.1}, {"piece": 4}):
        with pytest.raises(OptionError, match=f"`{next(iter(option))}`.*without new mixers"):
            polymix.distill(report, [x], **option)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "x"), [
    (network, torch.randn(4, 1, 8, 8)),
    (lambda: token_host(polymix.PadreConfig(kernel_size=3, degree=2)), torch.randn(4, 6, 3)),
    (lambda: token_host(polymix.PolyNlConfig()), torch.randn(4, 6, 3)),
])  # fmt: skip
def test_its_onnx_file_has_sums_and_products_alone_and_its_numbers(tmp_path, host, x):
    """`export` runs the file by onnxruntime, at three sizes of batch; the network itself is refused."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"untested: ONNX files, for which {package} is needed")
    model = host().eval()
    export(model, x, tmp_path / "before")
    with pytest.raises(CapabilityError, match=r"of type (BatchNormalization|Gelu|Erf)"):
        check_onnx(tmp_path / "before" / "onnx" / "model.onnx")
    polymix.polynomialize(model, x)
    files = export(model, x, tmp_path / "after")["files"]
    assert len(files) == 3 and all(0 <= entry["error"] < 1e-5 for entry in files)
    assert {"Gemm", "Mul", "Add"} <= check_onnx(tmp_path / "after" / "onnx" / "model.onnx")


def normed(layer, channels):
    """A layer and a batch norm behind it, with statistics that change something."""
    norm = nn.BatchNorm1d(channels)
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))
    norm.running_var.fill_(3.0)
    return nn.Sequential(layer, norm).eval()


class Beside(nn.Module):
    """The output of a layer with its batch norm, and that of the layer beside it."""

    def __init__(self, whole):
        super().__init__()
        self.layers, self.whole = normed(nn.Conv1d(4, 4, 1), 4), whole

    def forward(self, x):
        first = self.layers[0](x)
        return first + (self.layers(x) if self.whole else self.layers[1](first))


TWICE = nn.Linear(4, 4)


@pytest.mark.parametrize(("model", "shape"), [
    (normed(nn.Linear(4, 4), 4), (3, 4, 4)), (normed(nn.Linear(4, 4), 5), (3, 5, 4)),  # tokens are the channels
    (Beside(True).eval(), (2, 4, 6)), (Beside(False).eval(), (2, 4, 6)),
    (nn.Sequential(*normed(TWICE, 4), *normed(TWICE, 4)).eval(), (3, 4)),
    (nn.Sequential(*[nn.Linear(4, 4), normed(TWICE, 4)[1]] * 2).eval(), (3, 4)),
])  # fmt: skip
def test_a_norm_whose_layer_is_used_elsewhere_too_changes_nothing(model, shape):
    """It was folded into the layer all the same: the outputs were others, without a word."""
    assert polymix.polynomialize(model, torch.randn(shape)).error < 1e-6


def test_a_shared_activation_is_replaced_wherever_it_stands():
    shared = nn.GELU()
    model, x = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared), torch.randn(8, 4)
    report = polymix.polynomialize(model, x)
    assert not any(isinstance(part, nn.GELU) for part in model)
    report.undo()
    assert model[1] is shared and model[3] is shared


def test_undo_gives_the_mode_of_each_layer_back():
    """A frozen norm inside a model in training stays frozen, and the rest trains on."""
    model = network().train()
    model[1].eval()
    before = {part: part.training for part in model.modules()}
    polymix.polynomialize(model, torch.randn(4, 1, 8, 8)).undo()
    assert {part: part.training for part in model.modules()} == before and model.training


def test_weights_bring_the_range_of_their_polynomial():
    one, other, x = network().eval(), network().eval(), torch.randn(32, 1, 8, 8)
    for model, scale in ((one, 1.0), (other, 5.0)):
        polymix.polynomialize(model, scale * x)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), one(x))


@pytest.mark.parametrize("data", [
    None, 3, [()], torch.zeros(0, 4), [torch.ones(2, 4), torch.zeros(0, 4)], torch.full((2, 4), float("nan")),
    torch.full((2, 4), 3e38), torch.ones(2, 5), torch.ones(2, 4).double(), torch.ones(2, 4).long(), {"x": torch.ones(2, 4)},
    torch.ones(2, 4, device="meta"), torch.ones(2, 4).to_sparse(), [torch.ones(2, 4), torch.full((2, 4), float("nan"))], "text",
])  # fmt: skip
def test_data_that_give_no_range_are_refused(data):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    nn.init.constant_(model[0].weight, 2.0)
    with pytest.raises((DataError, InputError), match="`data`"):
        polymix.polynomialize(model, data)
    assert isinstance(model[1], nn.GELU) and model.training


class Rounding(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def forward(self, x):
        return self.rule(x)


@pytest.mark.parametrize("rule", [lambda x: x * x.long(), lambda x: x.div(2, rounding_mode="floor")])
def test_numbers_that_are_rounded_are_no_polynomial(rule):
    with pytest.raises(CapabilityError, match="Rounding"):
        polymix.polynomialize(Rounding(rule), torch.randn(2, 4))


def test_a_compiled_or_a_parallel_model_is_changed_inside():
    for wrap in (lambda model: torch.compile(model, backend="eager"), nn.DataParallel):
        model, x = network().eval(), torch.randn(4, 1, 8, 8)
        before, report = model(x).detach(), polymix.polynomialize(wrap(model), x)
        assert float((model(x).detach() - before).norm() / before.norm()) == pytest.approx(report.error, rel=1e-3)


def test_quotients_fit_better_and_have_no_pole_whatever_their_numbers():
    """N / (R² + ε) of degree 3 over 2 is nearer to GELU than the polynomial of degree 3, and finite on all of R."""
    plain, fitted = PolynomialActivation(nn.GELU(), -4, 6, 3), RationalActivation(nn.GELU(), -4, 6, 3)
    x = torch.linspace(-4, 6, 500)
    assert fitted.error < 0.3 * plain.error
    assert float((fitted(x) - F.gelu(x)).abs().max()) == pytest.approx(fitted.error, rel=1e-2)
    assert fitted(torch.tensor(60.0)) < 120, "it grows as its degrees' difference does, and a cubic would be at 2,000"
    for seed in range(20):
        torch.manual_seed(seed)
        nn.init.normal_(fitted.denominators)
        t = torch.linspace(-50, 50, 10_001)
        assert fitted(t).isfinite().all() and fitted._divisor(t).min() >= 1e-3


def test_without_eps_it_is_a_plain_quotient_and_may_have_a_pole():
    """Of an odd degree it has one for sure: the study of them would compare nothing if ε stayed."""
    fitted = RationalActivation(nn.GELU(), -4, 6, 3, eps=0)
    at = -float(fitted.denominators[0] / fitted.denominators[1])  # R(t) = 0
    near = (torch.tensor([at - 1e-3, at + 1e-3]) - fitted.shift) / fitted.scale
    ends = fitted(near) * torch.tensor([-1.0, 1.0])
    assert ends.min() * ends.max() > 0, "the sign changes there"
    assert repr(fitted).startswith("RationalActivation(degree 3 over 1")


@pytest.mark.parametrize("width", [1, 3])
def test_the_lens_certifies_a_quotient(width):
    """A sum of n quotients of degree 3 over 2 is one of 2n + 1 over 2n."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 2)), torch.randn(64, 4)
    report = polymix.polynomialize(model, x, denominator=1)
    assert isinstance(model[1], RationalActivation)
    found = report.degree(x[:1])
    assert found.degree is None and found.rational == (2 * width + 1, 2 * width)
    assert lens.degree(model[1], shape=(1, 2)).rational == (3, 2)
    assert isinstance(report.undo()[1], nn.GELU)


def test_a_denominator_lets_quotients_be():
    padre = polymix.create_mixer("padre", dim=4, denominator=1)
    assert polymix.polynomialize(nn.Sequential(padre), torch.randn(2, 6, 4), denominator=1).error == 0
    assert (
        polymix.polynomialize(nn.Sequential(nn.Linear(4, 4), Quotient()), torch.randn(2, 4), denominator=1).error == 0
    )
    for layer in (build("softmax", 4).float(), nn.LayerNorm(4)):
        with pytest.raises(CapabilityError, match="0, a"):
            polymix.polynomialize(nn.Sequential(layer), torch.randn(2, 6, 4), denominator=1)


def test_learned_quotients_are_distilled_without_a_pole():
    model, x = network().eval(), torch.randn(64, 1, 8, 8)
    report = polymix.polynomialize(model, x, denominator=1, learned=True)
    before = model[2].denominators.detach().clone()
    polymix.distill(report, [x[:32], x[32:]], epochs=2, labels=0, rest_rate=1.0, keep="last")
    assert not torch.equal(model[2].denominators, before)
    assert model[2](torch.linspace(-1e3, 1e3, 10_001)).isfinite().all()


@pytest.mark.slow
def test_the_file_of_quotients_divides_and_the_check_says_so(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"untested: ONNX files, for which {package} is needed")
    model, x = network().eval(), torch.randn(4, 1, 8, 8)
    polymix.polynomialize(model, x, denominator=1)
    assert all(0 <= entry["error"] < 1e-5 for entry in export(model, x, tmp_path / "out")["files"])
    with pytest.raises(CapabilityError, match="of type Div"):
        check_onnx(tmp_path / "out" / "onnx" / "model.onnx")


def test_hooks_stay_and_a_layer_that_has_some_is_not_folded():
    """They were gone with the layer that they stood at: what watches a network saw nothing any more."""
    model, x, seen = network().eval(), torch.randn(4, 1, 8, 8), []
    handles = [model[place].register_forward_hook(lambda *_, place=place: seen.append(place)) for place in (0, 2, 5)]
    report = polymix.polynomialize(model, x)
    assert report.folded["1"] != "folded into 0" and report.error < 0.5
    seen.clear()
    model(x)
    assert seen == [0, 2, 5]
    handles[1].remove()
    report.undo()(x)
    assert seen == [0, 2, 5, 0, 5]


class Standardised(nn.Conv2d):
    """As timm's: the weight that counts is made in the forward."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


def test_a_layer_that_makes_its_weight_is_not_folded():
    """The norm went into the weight before it was made: other outputs, without a word."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Standardised(1, 4, 3), nn.BatchNorm2d(4)), torch.randn(16, 1, 8, 8)
    model(3 * x + 1)
    assert polymix.polynomialize(model, x).error < 1e-6


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.activation = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()

    def forward(self, x):
        return self.activation(input=self.norm(input=self.layer(input=x)))


def test_layers_may_be_called_with_their_argument_by_name():
    assert 0 < polymix.polynomialize(Named(), torch.randn(8, 4)).error < 0.2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_fit_is_as_exact_as_the_network(dtype):
    """A fit in float32 left a float64 network with seven digits; one in bfloat16 would keep three."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype), torch.randn(8, 4, dtype=dtype)
    polymix.polynomialize(model, x)
    assert model[1].coefficients.dtype == torch.promote_types(dtype, torch.float32) and model(x).dtype == dtype


class Broken(nn.Module):
    def forward(self, x):
        return x * float("nan")


def test_a_network_without_finite_outputs_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), Broken())
    with pytest.raises(DataError, match="output is not finite"):
        polymix.polynomialize(model, torch.ones(2, 4))
    assert isinstance(model[1], nn.GELU) and model.training


def test_a_polynomial_is_one_already():
    """The second report has nothing to undo, and the first still does."""
    model, x = network().eval(), torch.randn(4, 1, 8, 8)
    before, first = model(x).detach(), polymix.polynomialize(model, x)
    second = polymix.polynomialize(model, x, degree=5)
    assert not second.activations and second.error < 1e-6
    second.undo()
    assert torch.equal(first.undo()(x), before)
