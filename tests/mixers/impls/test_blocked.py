"""The blocked forms against eager code: lengths, padding, layouts, types."""

import math

import pytest
import torch

from polymix.ops.padre import blocked as blocked_padre
from polymix.ops.shared import blocks as common
from tests.helpers import build, close, poisoned, tokens
from tests.mixers.impls.cases import CASES, both, every_case, length, make, of, padding

MASKED = [case for case in CASES if case.split(":")[0] in ("pom", "qt", "poly_nl") or "mean" in case]
FREE = [case for case in CASES if "grid" not in CASES[case][1]]


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks in few tokens; fresh memory is NaN, so that what nobody writes shows."""
    monkeypatch.setattr(common, "ROWS", 16)
    monkeypatch.setattr(blocked_padre, "MIN_GROUPED_TOKENS", 32)
    monkeypatch.setattr(blocked_padre, "GROUP_SIZES", (4,))
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.mark.usefixtures("small_blocks")
class TestBlocked:
    @every_case
    @pytest.mark.parametrize("batch", [1, 5])
    def test_equals_eager(self, case, batch):
        close(*both(make(case), "blocked", tokens(batch, length(case), 12)), 1e-12)

    @pytest.mark.parametrize("case", FREE)
    @pytest.mark.parametrize("n", [1, 5, 63, 100, 257])
    def test_awkward_lengths(self, case, n):
        """5: several samples a block, and a last block of fewer."""
        close(*both(make(case), "blocked", tokens(5, n, 12)), 1e-12)

    @pytest.mark.parametrize("case", MASKED)
    @pytest.mark.parametrize("batch", [2, 5])
    def test_padding_that_holds_nan(self, case, batch):
        n = length(case)
        mask = padding(batch, n)
        x = tokens(batch, n, 12)
        hidden = x.masked_fill(~mask[..., None], math.nan)
        ours, expected = both(make(case), "blocked", x, mask=mask)
        close(ours, expected, 1e-12)
        with torch.no_grad():
            unseen = of(make(case), "blocked")(hidden, mask=mask)
        close(unseen[mask], expected[mask], 1e-12)

    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("pom", "qt"))])
    @pytest.mark.parametrize("masked", [False, True])
    def test_a_separate_context(self, case, masked):
        x, context = tokens(3, 7, 12), tokens(3, 40, 12, seed=1)
        mask = padding(3, 40) if masked else None
        close(*both(make(case), "blocked", x, context, mask=mask), 1e-12)

    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith("pom")])
    @pytest.mark.parametrize("n", [1, 5, 63, 100, 257])
    def test_causal(self, case, n):
        """Running sums across the blocks, with and without padding."""
        mixer, x, mask = make(case), tokens(3, n, 12), padding(3, n)
        close(*both(mixer, "blocked", x, causal=True), 1e-12)
        ours, expected = both(mixer, "blocked", x, causal=True, mask=mask)
        close(ours, expected, 1e-12)
        with torch.no_grad():
            unseen = of(mixer, "blocked")(x.masked_fill(~mask[..., None], math.nan), causal=True, mask=mask)
        assert torch.allclose(unseen[mask], expected[mask], rtol=1e-10, atol=1e-12)

    @every_case
    def test_layouts(self, case):
        """Transposed, sliced and expanded inputs."""
        n, mixer = length(case), make(case)
        x = tokens(3, n, 12)
        wide = torch.zeros(3, 2 * n, 24, dtype=x.dtype)
        wide[:, ::2, 5:17] = x
        layouts = (x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1),
                   wide[:, ::2, 5:17], x[:1].expand(3, -1, -1))  # fmt: skip
        for layout in layouts:
            before = layout.clone()
            close(*both(mixer, "blocked", layout), 1e-12)
            assert torch.equal(layout, before), "the input was written to"

    @pytest.mark.usefixtures("bf16_products")
    @every_case
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_low_precision(self, case, dtype):
        mixer = make(case).to(dtype)
        x = tokens(2, length(case), 12).to(dtype)
        ours, eager = both(mixer, "blocked", x)
        (exact, _) = both(mixer.double(), "eager", x.double())
        assert ours.dtype == dtype
        error, allowed = ((y.double() - exact).abs().max() / exact.abs().max() for y in (ours, eager))
        if dtype == torch.float32:
            assert error <= 1e-4
        else:
            assert error <= 2 * allowed, f"{error:.1e} > 2 · {allowed:.1e}, what eager code errs in this type"

    @every_case
    def test_same_bits_twice(self, case):
        mixer, x = of(make(case).float(), "blocked"), tokens(2, length(case), 12, dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(mixer(x), mixer(x))

    @pytest.mark.parametrize("masked", [False, True])
    def test_poly_nl_under_large_means(self, masked):
        """Pooled second moments survive a mean 100 times the spread; about zero it would swallow them."""
        mixer = build("poly_nl", 12, bias=False)
        with torch.no_grad():
            mixer.product.weight -= mixer.product.weight.mean(1, keepdim=True)  # rows that do not see the mean
        x = 100 + tokens(2, 64, 12)
        mask = padding(2, 64) if masked else None
        (exact, _) = both(mixer, "eager", x.float().double(), mask=mask)
        (ours, _) = both(mixer.float(), "blocked", x.float(), mask=mask)
        mixed = exact - mixer.alpha.item() * x
        error = (ours.double() - exact).abs().max() / mixed.abs().max()
        assert error < 1e-4, f"{error:.1e}"


def test_an_output_too_large_to_be_kept_is_ordinary_memory():
    """… of which the system was asked for large pages: none of them may reach beyond the output."""
    x = torch.empty(1, 1, (common.MAX_KEPT_BYTES >> 2) + 12345)
    before, after = torch.full((1 << 20,), 3.0), torch.full((1 << 20,), 4.0)
    y = common.output(x).fill_(2.0)
    assert y.shape == x.shape and y.is_contiguous() and (y == 2.0).all()
    assert (before == 3.0).all() and (after == 4.0).all()
