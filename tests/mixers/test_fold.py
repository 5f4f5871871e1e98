"""`fold`: the same numbers from fewer products, never from stale ones, and nothing else changes."""

import copy
import io
import pickle

import pytest
import torch

import polymix
from tests.helpers import build, close, tokens

B_1 = ("B_1 D_1",)
CASES = {  # name, options, what folds
    "padre-2": ("padre", {"grid": (3, 4), "kernel_size": 3}, B_1),
    "padre-2, full": ("padre", {"grid": (3, 4), "kernel_size": 3, "preset": "full"}, ()),
    "padre-3": ("padre", {"degree": 3, "kernel_size": 3}, B_1),
    "padre-3, W and L": ("padre", {"degree": 3, "kernel_size": 3, "weight": "channel", "constant": "channel"}, B_1),
    "padre-3, term 1": ("padre", {"degree": 3, "kernel_size": 3, "terms": (1, 3)}, ()),
    "padre-4, no bias": ("padre", {"degree": 4, "kernel_size": 3, "terms": (4,), "bias": False}, B_1),
    "padre, causal": ("padre", {"degree": 3, "kernel_size": 3, "causal": True}, B_1),
    "padre, prefix": ("padre", {"grid": (2, 5), "kernel_size": 3, "num_prefix_tokens": 2}, B_1),
    "padre, quotient": ("padre", {"degree": 2, "kernel_size": 3, "denominator": 2, "terms": (2,)}, B_1),
    "padre, chebyshev": ("padre", {"degree": 2, "kernel_size": 3, "basis": "chebyshev"}, B_1),
    "padre, chebyshev 3": ("padre", {"degree": 3, "kernel_size": 3, "basis": "chebyshev"}, ()),
    "padre, resized": ("padre", {"grid": (12,), "kernel_size": 3, "out_tokens": 5, "out_dim": 6}, B_1),
    "padre, some dense": ("padre", {"degree": 3, "kernel_size": 3, "B": ("dense", "diagonal", "dense")}, B_1),
    "padre, no D": ("padre", {"kernel_size": 3, "D": "identity"}, ()),
    "padre, rms": ("padre", {"kernel_size": 3, "normalize": "rms"}, ()),
    "padre, heads": ("padre", {"kernel_size": 3, "heads": 2}, ()),
    "padre-1": ("padre", {"degree": 1, "kernel_size": 3}, ()),
    "poly_nl": ("poly_nl", {}, ()),
    "poly_nl-2": ("poly_nl", {"reduction": 2, "alpha_inside": False}, ("W_3 W_out",)),
    "poly_nl-2, inside": ("poly_nl", {"reduction": 2}, ()),
    "poly_nl-4, order 2": (
        "poly_nl",
        {"reduction": 4, "order": 2, "bias": False, "alpha_inside": False},
        ("W_3 W_out",),
    ),
    "poly_nl-2, both": ("poly_nl", {"reduction": 2, "order": "2+3"}, ()),
    "pom": ("pom", {}, ()),
    "softmax": ("softmax", {}, ()),
}
FOLDED = [case for case, (_, _, folds) in CASES.items() if folds]
every_case = pytest.mark.parametrize("case", list(CASES))
folded = pytest.mark.parametrize("case", FOLDED)
BOTH = [
    case
    for case in FOLDED
    if case not in ("padre, prefix", "padre, quotient", "padre, chebyshev", "padre, some dense", "poly_nl-4, order 2")
]
MASK = torch.tensor([[True] * 9 + [False] * 3, [False] * 12])


def make(case, **changes):
    name, options, _ = CASES[case]
    return build(name, 12, **options, **changes)


def pair(case, **changes):
    return make(case, **changes), make(case, **changes).fold()


@every_case
@torch.no_grad()
def test_what_folds_and_back(case):
    plain, mixer = pair(case)
    assert mixer.folded == CASES[case][2]
    x, before = tokens(2, 12, 12), plain.state_dict()
    close(mixer(x), plain(x), 1e-12)
    assert list(mixer.state_dict()) == list(before) and all(
        torch.equal(mixer.state_dict()[k], before[k]) for k in before
    )
    assert mixer.unfold() is mixer
    assert mixer.folded == () and torch.equal(mixer(x), plain(x))


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("impl", ["eager", "blocked"])
@torch.no_grad()
def test_each_implementation_uses_what_is_folded(case, impl):
    plain, mixer = pair(case, impl=impl)
    x = tokens(2, 12, 12)
    expected = plain(x)
    close(mixer(x), expected, 1e-12)
    mixer.merged()[CASES[case][2][0]][0].zero_()
    assert not torch.allclose(mixer(x), expected), "the folded product is not what ran"


@folded
@torch.no_grad()
def test_masks_prefills_and_steps(case):
    plain, mixer = pair(case)
    x = tokens(2, 12, 12)
    close(mixer(x, mask=MASK), plain(x, mask=MASK), 1e-12)
    if mixer.capabilities.recurrent:
        for model in (plain, mixer):
            y, state = model.prefill(x[:, :7])
            last, _ = model.step(x[:, 7], state)
            model.outputs = (y, last)
        for ours, expected in zip(mixer.outputs, plain.outputs, strict=True):
            close(ours, expected, 1e-12)


@folded
def test_recorded_gradients_are_those_of_the_unfolded(case):
    plain, mixer = pair(case)
    grads = []
    for model in (plain, mixer):
        x = tokens(2, 12, 12).requires_grad_()
        y = model(x)
        grads.append((y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), "the same bits: nothing folded runs"


@folded
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_frozen_weights_still_pass_gradients_to_the_input(case, mode):
    """However it was folded: what an inference mode made cannot be saved for a backward."""
    plain, mixer = (make(case, impl="eager").requires_grad_(False) for _ in range(2))
    with mode():
        mixer.fold()
    grads = []
    for model in (plain, mixer):
        x = tokens(2, 12, 12).requires_grad_()
        grads.append(torch.autograd.grad(model(x).square().sum(), x)[0])
    close(grads[1], grads[0], 1e-12)


def by_optimizer(mixer, name):
    optimizer = getattr(torch.optim, name)(mixer.parameters(), lr=1e-5)
    mixer(tokens(2, 12, 12)).square().sum().backward()
    optimizer.step()


def in_place(mixer):
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(1.5)


def by_another_tensor(mixer):
    for p in mixer.parameters():
        p.data = 1.5 * p.data


def there_and_back(mixer):
    """Types lose digits on the way, and memory freed by one comes back as another's."""
    mixer.bfloat16().double()


def swapped(mixer):
    for part in mixer.modules():
        for name, p in list(part._parameters.items()):
            if p is not None:
                setattr(part, name, torch.nn.Parameter(1.5 * p.detach()))


CHANGES = {
    "SGD": lambda mixer: by_optimizer(mixer, "SGD"),
    "AdamW": lambda mixer: by_optimizer(mixer, "AdamW"),
    "in place": in_place,
    "load_state_dict": lambda mixer: mixer.load_state_dict({k: 1.5 * v for k, v in mixer.state_dict().items()}),
    "load_state_dict, assigned": lambda mixer: mixer.load_state_dict(
        {k: 1.5 * v for k, v in mixer.state_dict().items()}, assign=True
    ),
    "data": by_another_tensor,
    "to": lambda mixer: mixer.to(torch.float32),
    "to and back": there_and_back,
    "new parameters": swapped,
}


@pytest.mark.parametrize("case", ["padre-2", "poly_nl-2"])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_weight_that_changed_is_noticed(case, change, mode):
    mixer = make(case).fold()
    for _ in range(3):
        CHANGES[change](mixer)
        x = tokens(2, 12, 12).to(next(mixer.parameters()).dtype)
        with mode():
            ours = mixer(x)
            close(ours, copy.deepcopy(mixer).unfold()(x), 1e-5 if change == "to" else 1e-12)


@pytest.mark.parametrize("case", ["padre-2", "poly_nl-2"])
def test_weights_given_to_the_call_are_used(case):
    """One by one, where freed memory is used again, and all at once under vmap."""
    plain, mixer = pair(case)
    x, call = tokens(2, 12, 12), torch.func.functional_call
    weights = {name: p.detach() for name, p in mixer.named_parameters()}
    with torch.no_grad():
        for scale in (1.0, 1.5, 0.5, 0.7):
            close(call(mixer, {k: scale * p for k, p in weights.items()}, (x,)),
                  call(plain, {k: scale * p for k, p in weights.items()}, (x,)), 1e-12)  # fmt: skip
    stacked = {name: torch.stack((p, 1.5 * p)) for name, p in weights.items()}
    ours, expected = (torch.func.vmap(lambda w, m=m: call(m, w, (x,)))(stacked) for m in (mixer, plain))
    close(ours, expected, 1e-12)
    ours, expected = (torch.func.grad(lambda w, m=m: call(m, w, (x,)).square().sum())(weights) for m in (mixer, plain))
    for name in weights:
        close(ours[name], expected[name], 1e-12)


@pytest.mark.parametrize("case", ["padre-2", "poly_nl-2"])
@torch.inference_mode()
def test_weights_made_under_inference_mode(case):
    """They count no changes; a folded mixer must not take that for no change."""
    mixer = make(case).fold()
    x = tokens(2, 12, 12)
    mixer(x)
    for p in mixer.parameters():
        p.mul_(1.5)
    close(mixer(x), copy.deepcopy(mixer).unfold()(x), 1e-12)


@folded
@torch.no_grad()
def test_copies_and_files(case):
    mixer, x = make(case).fold(), tokens(2, 12, 12)
    y = mixer(x)
    buffer = io.BytesIO()
    torch.save(mixer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), y) and other.folded == mixer.folded
        in_place(other)
        close(other(x), copy.deepcopy(other).unfold()(x), 1e-12)
        assert torch.equal(mixer(x), y), "a copy shares nothing with what it was made of"


@pytest.mark.parametrize("case", ["padre-2", "padre-3", "poly_nl-2"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_and_exported(case, mode):
    plain, mixer = pair(case)
    x = tokens(2, 12, 12)
    torch._dynamo.reset()
    with mode():
        compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
        close(compiled(x), plain(x), 1e-12)
        in_place(mixer), in_place(plain)
        close(compiled(x), plain(x), 1e-12)
    with torch.no_grad():
        close(torch.export.export(mixer, (x,)).module()(x), plain(x), 1e-12)


def test_fold_reaches_no_part_of_a_model_by_itself():
    model = torch.nn.Sequential(make("padre-2"), make("poly_nl-2").fold())
    assert [part.folded for part in model] == [(), ("W_3 W_out",)]
    assert isinstance(polymix.create_mixer("qt", 12).fold(), polymix.QtMixer)
