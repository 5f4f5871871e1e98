"""The table of the papers' statements: its tests exist, and the counterexamples are some."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import polymix
from tests.helpers import tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("_tables.statements").STATEMENTS
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_every_statement_names_a_test_that_exists(rows):
    for row in rows:
        assert row.tests, row.source
        for name in row.tests:
            file, _, function = name.partition("::")
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), name
        assert row.holds or row.note, f"{row.source}: a false statement without its counterexample"


def test_lemma_2_needs_a_state_before_the_first_token():
    """h_t = A h_{t-1} + B x_t with h_0 = 0 has y_0 = 0; Eq. 56 says C B x_0 (PADRe, Lemma 2)."""
    A, B, C, x = 0.5, 2.0, 3.0, [1.0, 4.0, 5.0]
    sums = [sum(C * A ** (t - n) * B * x[n] for n in range(t + 1)) for t in range(3)]
    h, before = [0.0], 0.0
    for t in range(1, 3):
        h.append(A * h[-1] + B * x[t])
    assert [C * value for value in h] != sums
    for t in range(3):
        before = A * before + B * x[t]
        assert C * before == sums[t], "with h_-1 = 0"


def test_the_proof_of_lemma_3_3_has_a_counterexample():
    """x Σ x_i = x' Σ x'_i for sets without a common element (PoM, Eq. 15 at k = 1); at k = 2 too, of real numbers."""
    assert 2 * (2 + 4) == 3 * (1 + 3)
    other = (3 * (3**2 + 1) / 2 - 2**2) ** 0.5
    assert 2 * (2**2 + other**2) == pytest.approx(3 * (3**2 + 1)) and other not in (1, 3)


def test_attention_costs_five_times_what_table_6_prints():
    attention = polymix.create_mixer("softmax", 192, heads=3).cost(4096).multiply_adds
    assert attention == 4 * 4096 * 192**2 + 2 * 4096**2 * 192
    assert 5 < attention / 1.31e9 < 5.5


def test_the_kernel_of_qt_vit_is_exact_and_its_squares_alone_are_not():
    """vec(q ⊗ q) · vec(k ⊗ k) = (q · k)²; Σ q_i² k_i² lacks the products of two channels."""
    q, k = tokens(4, seed=1), tokens(4, seed=2)
    assert float(torch.kron(q, q) @ torch.kron(k, k)) == pytest.approx(float(q @ k) ** 2)
    assert abs(float((q * q) @ (k * k)) - float(q @ k) ** 2) > 1e-2


def test_the_non_local_block_alone_grows_as_the_square():
    """Twice the tokens cost Poly-NL and Poly-SA twice as much, and the non-local block 2 N² (C_g + C_θ) more."""

    def more(name, n, **options):
        mixer = polymix.create_mixer(name, 8, device="meta", **options)
        return mixer.cost(2 * n).multiply_adds - 2 * mixer.cost(n).multiply_adds

    for n in (64, 1024):
        assert more("poly_nl", n) == more("poly_sa", n, positions="mean") == 0
        assert more("non_local", n) == 2 * n**2 * (8 + 8)
