"""Kernels under autocast: in the dtype that PyTorch's own products take there, and no less exact."""

import pytest
import torch

from polymix.errors import CapabilityError
from polymix.ops.native.library import why_not
from tests.helpers import close, tokens
from tests.mixers.impls.cases import every_case, length, main, make, of

native = pytest.mark.skipif(why_not() is not None, reason=f"untested: kernels in C under autocast: {why_not()}")
REFUSED = (
    "padre: 3-D", "padre: dilated", "padre: causal, dilated", "padre: 2-D dilated", "pom: one gate", "pom: clamped",
    "qt: full 0", "qt: full 1", "qt: full 2",
)  # fmt: skip


def run(mixer, x, dtype=torch.bfloat16):
    """The output under autocast, and the gradients of x and of all weights."""
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        y = mixer(leaf)
    wrt = {"x": leaf, **dict(mixer.named_parameters())}
    # Not of the plain sum, whose gradient some outputs' constant sum hides
    slopes = torch.autograd.grad((y.double() * torch.linspace(-1, 1, y.shape[-1])).sum(), list(wrt.values()))
    return y, dict(zip(wrt, slopes, strict=True))


def errs_no_more_than_pytorch(case, impl):
    mixer = make(case).float()
    x = tokens(2, length(case), 12, dtype=torch.float32)
    exact, exact_slopes = run(of(make(case), "eager"), x.double(), None)
    plain, plain_slopes = run(of(mixer, "eager"), x)
    y, slopes = run(of(mixer, impl), x)
    assert y.dtype == plain.dtype, "the next layer gets another dtype than without the kernel"
    assert all(slope.dtype == torch.float32 for slope in slopes.values())

    def error(found, of):
        return ((found.double() - of).norm() / of.norm().clamp_min(1e-6)).item()

    assert error(y, exact) <= 2 * error(plain, exact) + 4e-3
    for name, slope in slopes.items():
        expected = exact_slopes[name]
        assert error(slope, expected) <= 2 * error(plain_slopes[name], expected) + 2e-2, name


@native
@every_case
def test_c_kernels_err_no_more_than_pytorch(case):
    if case not in REFUSED:
        errs_no_more_than_pytorch(case, "native")
        return
    with pytest.raises(CapabilityError, match="impl"), torch.autocast("cpu", dtype=torch.bfloat16):
        of(make(case).float(), "native")(tokens(2, length(case), 12, dtype=torch.float32))


@main
def test_gpu_kernels_err_no_more_than_pytorch(case):
    pytest.importorskip("triton", reason="untested: GPU kernels under autocast")
    errs_no_more_than_pytorch(case, "triton")


@native
@main
def test_auto_takes_the_kernel_with_and_without_gradients(case, monkeypatch):
    for unit in ("AMX", "AVX512_BF16"):  # kernels built by an old compiler lack these products, and auto leaves them
        monkeypatch.setattr(f"polymix.ops.shared.blocks.{unit}", False)
    mixer, x = make(case).float(), tokens(2, 35, 12, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = of(mixer, "native")(x)
        assert torch.equal(mixer(x), expected)
        with torch.inference_mode():
            assert torch.equal(mixer(x), expected), "without gradients, autocast was ignored or the kernel left out"


@native
@main
def test_what_autocast_to_float16_and_float64_tokens_get(case):
    mixer, x = make(case), tokens(2, 35, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        low = mixer.float()(x.float())
        assert torch.equal(low, of(mixer, "eager")(x.float())), "the C kernels have no float16"
    mixer, x = make(case), tokens(2, 35, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(mixer(x), of(mixer, "eager")(x), 1e-12)


@pytest.mark.parametrize("case", ["pom: 2", "qt: compact 2", "padre: causal"])
def test_decoding_is_in_the_dtype_of_the_forward(case):
    """Kernels for one token are called without PyTorch's dispatcher: none may compute in float32 under autocast."""
    mixer, x = make(case).float().eval(), tokens(2, 9, 12, dtype=torch.float32)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = mixer(x, causal=True) if "causal" not in case else mixer(x)
        _, state = mixer.prefill(x[:, :8])
        last, _ = mixer.step(x[:, 8:], state)
    assert last.dtype == whole.dtype
    close(last.float(), whole[:, 8:].float(), 0.05)
