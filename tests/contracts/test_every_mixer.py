"""What every mixer promises: gradients, types, layouts, hosts, and the ways in which people run a module."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load, save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import polymix
from polymix import errors, lens
from polymix.lens.overview import declared
from polymix.mixers import config_class
from polymix.models import VisionTransformer
from tests.contracts.mixer_cases import CASES, KINDS
from tests.helpers import build, close, slow_but, tokens
from tests.mixers.compiled import graphs

# The graph of a variant teaches little that its mixer's does not: these are traced in every run, one of each mixer in
# slow ones, and all before a release.
TRACED = ("softmax", "padre-2", "padre-causal", "pom", "qt", "poly_nl")
every_case = pytest.mark.parametrize("case", list(CASES))


def traced(cases, quick=TRACED, kinds=KINDS):
    return pytest.mark.parametrize("case", slow_but(quick, cases, kinds))


def make(case, dim=12, dtype=torch.float64):
    name, options = CASES[case]
    return build(name, dim, **options).to(dtype)


@every_case
def test_gradcheck(case):
    """Every parameter and the input, against finite differences in float64."""
    mixer = make(case, dim=6 if "poly_nl" not in case else 4)
    x = 0.5 * tokens(1, 12, mixer.dim).requires_grad_()
    names, values = zip(*mixer.named_parameters(), strict=True)

    def run(x, *parameters):
        return torch.func.functional_call(mixer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


# PyTorch has no second derivative of its own hardsigmoid, which is the gate of timm's effective SE.
NO_SECOND_DERIVATIVE = {"se-effective"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in NO_SECOND_DERIVATIVE])
def test_second_derivatives(case):
    mixer = make(case, dim=6 if "poly_nl" not in case else 4)
    x = 0.5 * tokens(1, 12, mixer.dim).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused CPU attention has no second derivative
        assert torch.autograd.gradgradcheck(mixer, (x,), fast_mode=True)


@every_case
def test_every_parameter_gets_a_gradient(case):
    mixer = make(case)
    mixer(tokens(2, 12, 12)).square().sum().backward()
    for name, p in mixer.named_parameters():
        assert p.grad is not None, f"{name} gets no gradient"
        assert p.grad.any(), f"{name} gets a zero gradient"


@every_case
def test_float32_within_1e4_of_float64(case):
    """At sizes that are awkward on purpose."""
    name, options = CASES[case]
    for n in (1, 63, 100, 257):
        sized = {**options}
        if "grid" in options:
            sized["grid"] = (n, *[1] * (len(options["grid"]) - 1))
        wide = build(name, 60, **sized)
        x = tokens(2, n, 60)
        close(copy.deepcopy(wide).float()(x.float()).double(), wide(x), 1e-4)


# Whose output jumps where rounding swaps two neighbours that are about as near.
JUMPS = {"knn", "knn-max", "knn-mean"}


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_output_and_gradient_are_finite_and_near(case, dtype):
    torch.manual_seed(0)
    name, options = CASES[case]
    mixer = polymix.create_mixer(name, 60, **options)
    x = tokens(2, 12, 60, dtype=torch.float32)
    low, xl = copy.deepcopy(mixer).to(dtype), x.to(dtype).requires_grad_()
    y = low(xl)
    assert y.dtype == dtype
    if case not in JUMPS:
        close(y.float(), mixer(x), 0.05)
    y.float().square().mean().backward()
    assert xl.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in low.parameters())


@every_case
def test_autocast_forward_and_backward(case):
    mixer = make(case, dtype=torch.float32)
    x = tokens(2, 12, 12, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mixer(x)
    close(y.float(), mixer(x), 0.08)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in mixer.parameters())


@every_case
def test_autocast_with_padding(case):
    """Lower precision does not let padding in: what is hidden is as without it, however large, and near float32."""
    mixer, x = make(case, dtype=torch.float32), tokens(2, 12, 12, dtype=torch.float32)
    if "padding" not in mixer.capabilities.masks:
        pytest.skip("untested: the mixer takes no padding")
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 7:] = False
    loud = torch.where(mask[..., None], x, 1e4).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, quiet = mixer(loud, mask=mask), mixer(x.masked_fill(~mask[..., None], 0), mask=mask)
    assert torch.equal(y[mask], quiet[mask]), "what stands at the padding is seen"
    close(y[mask].float(), mixer(x, mask=mask)[mask], 0.08)
    y[mask].float().sum().backward()
    assert loud.grad.isfinite().all() and not loud.grad[~mask].any()


@every_case
def test_layouts_do_not_matter(case):
    """Transposed and sliced inputs give what a contiguous copy gives."""
    mixer, x = make(case), tokens(2, 12, 12)
    y = mixer(x)
    close(mixer(x.transpose(1, 2).contiguous().transpose(1, 2)), y, 1e-12)
    wide = torch.zeros(2, 24, 24, dtype=torch.float64)
    wide[:, ::2, 5:17] = x
    close(mixer(wide[:, ::2, 5:17]), y, 1e-12)


@every_case
def test_batch_entries_do_not_touch_each_other(case):
    mixer, x = make(case), tokens(3, 12, 12)
    close(mixer(x)[1:2], mixer(x[1:2]), 1e-12)


@every_case
def test_same_bits_twice(case):
    mixer, x = make(case, dtype=torch.float32), tokens(2, 12, 12, dtype=torch.float32)
    assert torch.equal(mixer(x), mixer(x))


@every_case
def test_copies_and_files(case):
    mixer, x = make(case), tokens(2, 12, 12)
    y = mixer(x)
    fresh = mixer.config.build(12, dtype=torch.float64)
    fresh.load_state_dict(load(save({k: v.contiguous() for k, v in mixer.state_dict().items()})))
    buffer = io.BytesIO()
    torch.save(mixer.state_dict(), buffer)
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), fresh):
        assert torch.equal(other(x), y)


@every_case
def test_checkpointing_gives_the_same_gradient(case):
    mixer, x = make(case), tokens(2, 12, 12).requires_grad_()
    (plain,) = torch.autograd.grad(mixer(x).square().sum(), x)
    (again,) = torch.autograd.grad(checkpoint(mixer, x, use_reentrant=False).square().sum(), x)
    close(again, plain, 1e-12)


@every_case
def test_device_and_dtype_arguments(case):
    name, options = CASES[case]
    mixer = polymix.create_mixer(name, 12, device="meta", dtype=torch.bfloat16, **options)
    assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in mixer.parameters())


@every_case
def test_dropout_acts_in_training_alone(case):
    name, options = CASES[case]
    mixer = polymix.create_mixer(name, 12, dropout=0.5, **options)
    x = tokens(2, 12, 12, dtype=torch.float32)
    assert (mixer(x) == 0).float().mean() > 0.3
    assert torch.equal(mixer.eval()(x), mixer(x))


@every_case
def test_output_variance_near_attention_s(case):
    """A host trains from the first step: on a ViT's 196 tokens the output is within 2.5 × of what attention gives."""
    name, options = CASES[case]
    if options.get("reduction") == "sum":
        options = {**options, "reduction": "mean"}  # a printed sum grows with N by definition
    if "grid" in options:
        options = {**options, "grid": {2: (14, 14), 3: (2, 7, 14)}[len(options["grid"])]}
    x = tokens(8, 196, 192, dtype=torch.float32)
    with torch.no_grad():
        attention = polymix.create_mixer("softmax", 192)(x).std()
        ratio = (polymix.create_mixer(name, 192, **options)(x).std() / attention).item()
    assert 1 / 2.5 < ratio < 2.5, ratio


FIXED = [case for case in CASES if {"grid", "decay"} & {*CASES[case][1]}]  # whose length is not free


@traced(FIXED)
def test_export(case):
    mixer, x = make(case, dtype=torch.float32).eval(), tokens(2, 12, 12, dtype=torch.float32)
    program = torch.export.export(mixer, (x,))
    close(program.module()(x), mixer(x), 1e-5)


@traced([case for case in CASES if case not in FIXED])
def test_export_with_a_dynamic_length(case):
    mixer = make(case, dtype=torch.float32).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(mixer, (tokens(2, 12, 12, dtype=torch.float32),), dynamic_shapes=({1: length},))
    x = tokens(2, 29, 12, dtype=torch.float32)
    close(program.module()(x), mixer(x), 1e-5)


@traced(CASES, TRACED[:2])
def test_compile_without_breaks(case):
    """Forward and backward; one graph for every length where the mixer takes any."""
    mixer, free = make(case, dtype=torch.float32), "grid" not in CASES[case][1]
    lengths = (13, 29, 40) if free else (12,)  # 13: not the width, which a first trace would tie to it
    if mixer.name in ("gated_delta", "kda"):  # the graph of a single chunk, of 16 tokens, is one of its own
        lengths = (29, 53, 40)
    calls = [(tokens(2, n, 12, dtype=torch.float32).requires_grad_(), {}) for n in lengths]
    assert len(set(graphs(mixer, calls, any_length=free))) == 1, "a new length must not compile again"


@traced(CASES, TRACED[:2], TRACED)
def test_compile_under_autocast_without_breaks_or_warnings(case, recwarn):
    """PyTorch warns of "silent incorrectness" where a trace meets a cached function, as the choice of kernels had one."""
    mixer, free = make(case, dtype=torch.float32), "grid" not in CASES[case][1]
    x = tokens(2, 13 if free else 12, 12, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graphs(mixer, [(x, {})], any_length=free, tolerance=0.05)
    assert not [str(warning.message) for warning in recwarn if "incorrect" in str(warning.message)]


# A bias that shifts all logits of a query alike: the softmax cancels it, and what is left of its gradient is rounding.
IDLE = {"non_local": "layer.p.bias", "gc": "layer.conv_attn.bias"}


def gradients(mixer, x, weight, parts):
    mixer.zero_grad()
    for part in parts:
        (mixer(x[part]) * weight[part]).sum().backward()
    return {name: p.grad.clone() for name, p in mixer.named_parameters() if p.grad is not None}


@every_case
def test_two_halves_make_the_gradient_of_the_whole(case):
    """Gradients accumulated over the two halves of a batch are those of the whole batch."""
    name, options = CASES[case]
    mixer, x, weight = build(name, 12, **options), tokens(4, 12, 12), tokens(4, 12, 12, seed=5)
    whole = gradients(mixer, x, weight, [slice(0, 4)])
    halves = gradients(mixer, x, weight, [slice(0, 2), slice(2, 4)])
    largest = max(grad.norm() for grad in whole.values())
    assert whole.keys() == halves.keys()
    for parameter, grad in whole.items():
        if parameter == IDLE.get(case):
            assert max(grad.norm(), halves[parameter].norm()) < 1e-14 * largest, "more than rounding"
        else:
            assert (grad - halves[parameter]).norm() <= 1e-10 * grad.norm(), parameter


# A causal mixer leaves a class token in front nothing to see.
NO_CLASS_TOKEN = {"gated_delta", "kda", "hyena", "mamba", "local"}


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("name", polymix.list_mixers())
def test_forward_and_backward_in_a_host(name, class_token):
    """It goes into the vision transformer in attention's place, or says why it cannot."""

    def host():
        return VisionTransformer(config_class(name)(), image_size=8, patch_size=2, dim=12, depth=2, classes=3,
                                 channels=1, class_token=class_token)  # fmt: skip

    if class_token and name in NO_CLASS_TOKEN:
        with pytest.raises(errors.OptionError, match="class"):
            host()
        return
    model = host()
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("case", slow_but(KINDS, CASES))
def test_its_degree_is_what_it_declares(case):
    name, options = CASES[case]
    if case == "qt-scales":
        options = {**options, "heads": 1}  # with three heads, the quotient is of a higher degree than the lens tries
    mixer = build(name, 12, **options)
    says, found = declared(mixer), lens.degree(mixer, lines=1)  # almost no line hides a term
    assert (found.degree, found.rational) == (says.degree, says.rational), found.explain()
    if says.degree is not None:
        assert found.homogeneous == says.homogeneous, found.explain()
