"""The statements of the five papers, each with the test that holds it or the reason why it is false as printed."""

from __future__ import annotations

from typing import NamedTuple

from .figures import RESULTS, load, table, where


class Statement(NamedTuple):
    """One theorem, lemma or count. tests: as pytest names them. note: what holds, or the counterexample."""

    source: str
    says: str
    holds: bool
    tests: tuple[str, ...]
    note: str = ""


LENS, MIXERS = "tests/lens/", "tests/mixers/"
STATEMENTS = (
    Statement("PADRe, Lemma 1", "The elements of Z_i are homogeneous polynomials of degree i.", True,
              (f"{MIXERS}test_properties.py::test_lemma_1_homogeneity",), "Without biases."),
    Statement("PADRe, Eq. 9 and 10", "Parameters and operations grow linearly with N.", True,
              (f"{MIXERS}test_padre_whole.py::test_cost_grows_linearly_or_as_n_log_n",), "FFT structures: N log N."),
    Statement("PADRe, Section 3.6", "It needs products and sums alone, no exp and no cos.", True,
              (f"{MIXERS}test_claims.py::test_the_graph_of_padre_has_products_and_sums_alone",)),
    Statement("PADRe, Table 1", "SimA, Conv2Former, Castling-ViT and linear mixing are polynomials.", True,
              (f"{LENS}test_as_padre.py::test_exact_forms",
               f"{LENS}test_as_padre.py::test_linear_token_mixing_is_degree_1"),
              "SimA with its norms frozen."),
    Statement("PADRe, Table 1", "Order-N Hyena has degree N.", False,
              (f"{LENS}test_as_padre.py::test_the_form_is_of_the_degree_that_it_says",),
              "The degree is N + 1: order 1 is x¹ ⊙ (h ∗ v), of degree 2."),
    Statement("PADRe, B.3", "Hyena's cost is quasi-linear.", True,
              (f"{MIXERS}test_claims.py::test_the_cost_of_hyena_grows_as_n_log_n",)),
    Statement("PADRe, Lemma 2", "With h_0 = 0, y_t = Σ_n C Ā^(t−n) B̄ x_n.", False,
              (f"{LENS}test_statements.py::test_lemma_2_needs_a_state_before_the_first_token",),
              "h_0 = 0 gives y_0 = 0, the sum gives C B̄ x_0. It holds with h_−1 = 0."),
    Statement("PADRe, B.4", "Mamba is nearly a polynomial.", True,
              (f"{LENS}test_as_padre.py::test_mamba_frozen_at_its_input_is_exact_and_its_linear_decay_errs_by_a_power",),
              "Only for small Δ; the error is reported."),
    Statement("PADRe, A.2", "A rational PADRe costs about twice as much.", True,
              (f"{MIXERS}test_padre_patterns.py::test_a_rational_form_costs_exactly_twice",)),
    Statement("PADRe, A.2", "Quotients approximate more than polynomials do, and have poles.", True,
              (f"{MIXERS}test_padre_patterns.py::test_a_quotient_is_a_peak_that_no_polynomial_comes_near",),
              "One peak, in one dimension."),
    Statement("PADRe, B.6", "Attention is approximated by rational functions of degree (2d + 1) / 2d.", True,
              (f"{LENS}test_as_padre.py::test_softmax_by_taylor",),
              "Of each head; the sum of h heads has degree (2dh + 1) / 2dh."),
    Statement("PADRe, Table 6", "Attention at 4,096 tokens of 192 channels: 1.31 G.", False,
              (f"{LENS}test_statements.py::test_attention_costs_five_times_what_table_6_prints",),
              "4 N D² + 2 N² D is 7.05 G multiply-adds."),
    Statement("PADRe, Table 6", "1.10, 2.28 and 3.27 G for degrees 2, 3 and 4.", True,
              (f"{MIXERS}test_cost.py::test_table_6",)),
    Statement("PoM, Proposition 3.1", "A polynomial mixer is permutation equivariant.", True,
              ("tests/contracts/test_every_mixer_laws.py::test_permutation_equivariance",)),
    Statement("PoM, Eq. 8", "H(X)_t of a block is H of the blocks before it plus the sum over its own tokens.", False,
              (f"{MIXERS}test_properties.py::test_block_causality_by_gradient",),
              "As printed the token at a boundary counts twice: t = K adds token K to H_K. Eq. 7 is what is built."),
    Statement("PoM, Theorem 3.2", "PolyMorphers with learned positions approximate every continuous map.", True,
              (f"{LENS}test_distance.py::test_without_positions_no_order_of_the_tokens_is_nearer",),
              "Tried at two maps, not proved: see below. The proof rests on Lemma 3.3; that of Yun et al., which it "
              "follows, is for p < ∞."),
    Statement("PoM, Lemma 3.3", "For some k any polynomial mixer tells all contexts of R^(d × n) apart.", False,
              (f"{LENS}test_views.py::test_two_contexts_with_the_same_row_exist_at_every_degree",
               f"{LENS}test_views.py::test_the_smallest_degree_and_width_for_the_inputs_tried",
               f"{LENS}test_statements.py::test_the_proof_of_lemma_3_3_has_a_counterexample"),
              "A continuous map of more numbers than a row is never one-to-one. On finitely many inputs it holds for "
              "generic weights. Its proof takes 'not all pairs collide' for the opposite of 'some pair collides': "
              "{2, 4} and {1, 3} have 2 · (2 + 4) = 3 · (1 + 3)."),
    Statement("PoM, Section 1", "MLPs, CNNs and SSMs are no contextual mappings.", False,
              (f"{LENS}test_views.py::test_which_networks_are_none_as_the_introduction_says",),
              "True of MLPs, short kernels and causal SSMs. Mamba both ways and kernels as long as the sequence are "
              "one where PoM is."),
    Statement("PoM, Section 3.4", "Attention has 4 n d² + 2 d n² multiplications.", True,
              (f"{LENS}test_statements.py::test_attention_costs_five_times_what_table_6_prints",)),
    Statement("PoM, Section 3.4", "3 n d D + (k + 1) n D multiplications.", True,
              (f"{MIXERS}test_claims.py::test_the_multiplications_of_pom_as_printed",)),
    Statement("PoM, Eq. 11", "PoM is cheaper than attention from (D (3d + k + 1) − 4d²) / 2d tokens.", True,
              (f"{MIXERS}test_properties.py::test_crossover_as_printed",)),
    Statement("PoM, Section 3.4", "For d from 512 to 1,024 that is over 1,000 tokens (D = 2d, k = 2).", False,
              (f"{MIXERS}test_properties.py::test_crossover_as_printed",),
              "It is d + 3: 515 tokens at d = 512, and over 1,000 from d = 998."),
    Statement("QT-ViT", "The second order of exp is a quadratic kernel: 1 + s + s²/2 = ½ (s + 1)² + ½.", True,
              (f"{MIXERS}test_claims.py::test_full_qt_is_the_taylor_attention_of_based",)),
    Statement("QT-ViT", "The inner product of K_r(x) = vec(x ⊗ x), of d² features, is the squared one.", True,
              (f"{LENS}test_statements.py::test_the_kernel_of_qt_vit_is_exact_and_its_squares_alone_are_not",),
              "The squares alone, d features, approximate it: the products of two channels are missing."),
    Statement("QT-ViT", "Features that are reordered alike for q and k leave the output as it is.", True,
              (f"{MIXERS}test_claims.py::test_qt_does_not_depend_on_the_order_of_the_features",)),
    Statement("Poly-NL, Section 3", "W^[D] has (N C)^(D + 1) weights, 10²¹ for 196 tokens of 1,024.", True,
              (f"{LENS}test_tensor.py::test_weights_are_counted_as_the_paper_does",)),
    Statement("Poly-NL, Eq. 1", "A polynomial layer is Σ_d W^[d] ∏ X + W^[0].", True,
              (f"{LENS}test_polynomial_layer.py::test_a_layer_is_the_module_it_was_fitted_to",)),
    Statement("Poly-NL, Eq. 8", "W^[3] of the non-local block is zero unless c = a and g = e.", True,
              (f"{LENS}test_tensor.py::test_non_local_is_zero_where_c_is_not_a_and_g_is_not_e",)),
    Statement("Poly-NL, Section 4", "The non-local block is a third-order polynomial with low ranks.", True,
              (f"{LENS}test_tensor.py::test_a_factorised_block_has_the_ranks_and_the_sharing_of_its_factors",)),
    Statement("Poly-NL, Section 4", "Its cost grows as N², that of Poly-NL and Poly-SA as N.", True,
              (f"{LENS}test_statements.py::test_the_non_local_block_alone_grows_as_the_square",)),
    Statement("Poly-NL, Section 4", "Poly-NL and Poly-SA reach the triplets of the non-local block.", True,
              (f"{LENS}test_tensor.py::test_the_same_triplets", f"{MIXERS}test_triplets.py::test_the_same_triplets")),
    Statement("Poly-NL, Section 6", "Less than 0.025 % of the position triplets are used at N = 64.", True,
              (f"{MIXERS}test_triplets.py::test_share_of_all_triplets",)),
    Statement("Poly-SA, Section 4", "With one head and a mean it reads the diagonal of K^T V.", True,
              (f"{MIXERS}test_triplets.py::test_poly_sa_with_one_head_and_a_mean_is_a_diagonal_of_attention_s_product",)),
    Statement("Poly-SA, Section 5.2.1", "XCA and linear attention cost less than attention only where C < N.", True,
              (f"{MIXERS}test_claims.py::"
               "test_attention_between_channels_is_cheaper_than_between_tokens_where_these_are_more",),
              "With one head."),
)  # fmt: skip


def statements() -> str:
    """Each statement, whether it holds, and the tests."""

    def cell(item: Statement) -> str:
        names = "; ".join(f"`{test.partition('::')[2]}`" for test in item.tests)
        return f"{item.note} {names}".strip()

    head = ("statement", "says", "holds", "how it is known")
    return table(head, ((s.source, s.says, "yes" if s.holds else "**not as printed**", cell(s)) for s in STATEMENTS))


def battery() -> str:
    """Accuracy of each mixer at each function, by depth."""
    content = load("battery.json")
    rows = content["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for depth in sorted({row["depth"] for row in rows}, reverse=True):
        for mixer in dict.fromkeys(row["mixer"] for row in rows if row["depth"] == depth):
            its = {row["task"]: row for row in rows if (row["mixer"], row["depth"]) == (mixer, depth)}
            cells = (f"{100 * its[task]['accuracy']:.1f}" if task in its else "–" for task in tasks)
            lines.append((depth, f"`{mixer}`", *cells))
    same = {row["task"]: row["constant"] for row in rows}
    lines.append(("–", "one constant answer", *(f"{100 * same[task]:.1f}" for task in tasks)))
    took = sum(row["seconds"] for row in rows) / 60
    shown = table(("blocks", "mixer", *tasks), lines)
    return f"{shown}\n\n{len(rows)} trainings, {where(content['machine'])}; {took:.0f} minutes of processor time."


def universality() -> str:
    """d_2 of PolyMorphers of growing size to two maps, with positions and without."""
    if not (RESULTS / "universality.json").exists():
        return "Not measured yet."
    content = load("universality.json")
    kinds = [(name, positions) for name in content["floors"] for positions in (True, False)]
    lines = []
    for size in dict.fromkeys((row["depth"], row["width"]) for row in content["rows"]):
        its = {(r["map"], r["positions"]): r for r in content["rows"] if (r["depth"], r["width"]) == size}
        lines.append((*size, *(f"{its[kind]['d_2']:.3f}" if kind in its else "–" for kind in kinds)))
    heads = (f"{name}, {'with' if positions else 'without'} positions" for name, positions in kinds)
    floor = content["floors"]["ordered"]
    return (
        f"{table(('blocks', 'width', *heads), lines)}\n\nNo equivariant map is closer than {floor:.3f} to the ordered "
        f"one. {where(content['machine'])}."
    )


TABLES = {"statements": statements, "battery": battery, "universality": universality}
