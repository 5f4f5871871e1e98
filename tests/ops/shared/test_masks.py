"""Index ranges, dense masks and positions against loops over the definition."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from polymix.ops.shared.masks import compact, cross_ranges, dense_mask, positions, visible_ranges
from tests.helpers import real_positions, visible

CPU = torch.device("cpu")
HUGE = 2**63 - 1
IDS = st.sampled_from([0, 1, 2, -1, -7, 2**31, -(2**40), HUGE, -HUGE - 1])


@st.composite
def sequences(draw, ids=IDS):
    """(ids (B, N), mask (B, N) or None, causal)."""
    batch, n = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = st.lists(st.lists(ids, min_size=n, max_size=n), min_size=batch, max_size=batch)
    bits = st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=batch, max_size=batch)
    mask = draw(st.none() | bits)
    causal = draw(st.sampled_from([0, 1, 2, 3, 5, 100, 2**40]))
    return torch.tensor(draw(rows)), None if mask is None else torch.tensor(mask), causal


def spread(ranges, rows):
    """What each query sees according to the ranges, (B, M, N) in the original order."""
    batch, n = ranges.order.shape
    out = torch.zeros(batch, rows, n, dtype=torch.bool)
    for b in range(batch):
        for i in range(rows):
            out[b, i, ranges.order[b, ranges.start[b, i] : ranges.stop[b, i]]] = True
    return out


def unsorted(ranges, seen):
    """The rows of `seen`, moved from sorted order back to the original order."""
    out = torch.empty_like(seen)
    for b in range(len(seen)):
        out[b, ranges.order[b]] = seen[b]
    return out


@given(case=sequences())
def test_visible_ranges(case):
    """Ranges and padding mask together give exactly what the definition gives."""
    ids, mask, causal = case
    batch, n = ids.shape
    ranges = visible_ranges(ids, mask, causal)
    assert torch.equal(ranges.order.sort(1).values, torch.arange(n).expand(batch, n)), "the order must be a permutation"
    seen = unsorted(ranges, spread(ranges, n))
    if mask is not None:
        seen &= mask[:, None, :]
    assert torch.equal(seen, visible(batch, n, n, mask=mask, causal=causal, segments=ids))


@given(case=sequences())
def test_range_positions_count_the_real_tokens_of_a_segment(case):
    ids, mask, causal = case
    n = ids.shape[1]
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    naive = [real_positions(*rows, n) for rows in zip(real.tolist(), ids.tolist(), strict=True)]
    assert visible_ranges(ids, mask, causal).position.tolist() == naive
    assert positions(n, mask, ids, CPU).tolist() == naive


@given(case=sequences(ids=st.just(0)))
def test_positions_without_segments(case):
    ids, mask, _ = case
    n = ids.shape[1]
    if mask is None:
        assert positions(n, None, None, CPU).tolist() == list(range(n))
    else:
        assert positions(n, mask, None, CPU).tolist() == [real_positions(row, [0] * n, n) for row in mask.tolist()]


@given(queries=sequences(), context=sequences())
def test_cross_ranges(queries, context):
    rows, columns = queries[0], context[0]
    batch = min(len(rows), len(columns))
    rows, columns = rows[:batch], columns[:batch]
    seen = spread(cross_ranges(rows, columns), rows.shape[1])
    assert torch.equal(seen, visible(batch, rows.shape[1], columns.shape[1], segments=(rows, columns)))


@given(case=sequences(), packed=st.booleans(), dense=st.booleans(), seed=st.integers(0, 99))
def test_dense_mask(case, packed, dense, seed):
    """Any combination of mask, causality and segments; None only if everything is visible."""
    ids, mask, causal = case
    batch, n = ids.shape
    if dense:
        mask = torch.rand(batch, n, n, generator=torch.Generator().manual_seed(seed)) > 0.5
    see = {"mask": mask, "causal": causal, "segments": ids if packed else None}
    ours = dense_mask(n, n, see["mask"], causal, see["segments"], CPU)
    naive = visible(batch, n, n, **see)
    if ours is None:
        assert naive.all()
    else:
        assert torch.equal(ours.expand(batch, n, n), naive)


@given(queries=sequences(), context=sequences())
def test_dense_mask_of_a_context(queries, context):
    rows, (columns, mask, _) = queries[0], context
    batch = min(len(rows), len(columns))
    rows, columns, mask = rows[:batch], columns[:batch], None if mask is None else mask[:batch]
    m, n = rows.shape[1], columns.shape[1]
    ours = dense_mask(m, n, mask, 0, (rows, columns), CPU)
    assert torch.equal(ours.expand(batch, m, n), visible(batch, m, n, mask=mask, segments=(rows, columns)))


@given(case=sequences())
def test_the_type_of_the_ids_does_not_matter(case):
    ids, mask, causal = case
    small = ids.clamp(-100, 100)
    wide = visible_ranges(small, mask, causal)
    for dtype in (torch.int8, torch.int16, torch.int32):
        for ours, theirs in zip(visible_ranges(small.to(dtype), mask, causal), wide, strict=True):
            assert torch.equal(ours, theirs)


@given(case=sequences())
def test_compact(case):
    """Real tokens first, then all others, both in their original order."""
    _, mask, _ = case
    if mask is None:
        return
    for order, row in zip(compact(mask).tolist(), mask.tolist(), strict=True):
        real = [i for i, takes_part in enumerate(row) if takes_part]
        assert order == real + [i for i in range(len(row)) if i not in real]


def test_by_hand():
    """Two packed segments, the second in blocks of two, with a masked token."""
    ids = torch.tensor([[7, 7, 3, 3, 3, 3]])
    mask = torch.tensor([[True, True, True, False, True, True]])
    assert positions(6, mask, ids, CPU).tolist() == [[0, 1, 0, 0, 1, 2]]
    seen = dense_mask(6, 6, mask, 2, ids, CPU)[0].int().tolist()
    assert seen == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 1],
    ]
