"""Published figures: each row is whole, and stands beside a run only where everything is the paper's."""

import pytest

from polymix.mixers.spec import parse_mixer
from polymix.train.published import cells, claims, layers, of, of_mixer, papers, published, rows
from polymix.train.registry import OWN_RECIPES


def test_every_row_is_whole_and_comes_once():
    seen = set()
    for row in rows():
        figures = {**row.metrics, **row.cost}
        assert row.domain in OWN_RECIPES and figures and all(type(value) in (int, float) for value in figures.values())
        place = (row.paper, row.table, row.data, row.split, row.host, row.mixer)
        assert place not in seen, f"{place} twice"
        seen.add(place)
        spec = row.mixer.partition(" (")[0]
        assert spec in ("keep", "none") or parse_mixer(spec)


@pytest.mark.parametrize("change", [
    {}, {"data": "PASTIS24"}, {"split": "fold 2"}, {"host": "ViT"}, {"mixer": "pom:degree=3"}, {"mixer": "pom (1:1)"},
], ids=str)  # fmt: skip
def test_a_figure_is_shown_only_where_all_is_the_paper_s(change):
    case = {"data": "PASTIS", "split": "fold 1", "host": "TSViT", "mixer": "pom", **change}
    figures = published("satellite", **case)
    assert (figures is None) == bool(change)
    if figures:
        assert figures["miou"] == 0.646 and figures["source"] == "PoM, Table 3: PASTIS, fold 1"


@pytest.mark.parametrize(("host", "mixer", "accuracy"), [
    ("deit_tiny_patch16_224", "padre:degree=4", 0.769), ("deit_tiny_patch16_224", "hydra", 0.683),
    ("deit_base_patch16_224", "hydra", 0.764), ("deit_tiny_patch16_224", "knn", 0.73), ("deit_small_patch16_224", "knn", 0.801),
    ("deit_tiny_patch16_224", "focused", 0.741), ("deit_tiny_patch16_224", "castling", 0.708),
    ("deit_tiny_patch16_224", "relu_linear", 0.729), ("deit_tiny_patch16_224", "efficient", 0.702),
    ("deit_small_patch16_224", "sima", 0.798), ("deit_base_patch16_224", "hyena:bidirectional=true", 0.785),
    ("resnet50", "poly_nl:reduction=4:order=2+3", 0.7657), ("resnet50", "prodpoly:decomposition=product", 0.7624),
    ("swin_tiny_patch4_window7_224", "poly_sa:head_mixing=depthwise", 0.8066), ("xcit_tiny_12_p16_224", "poly_sa", 0.7521),
    ("deit_tiny_patch16_224", "padre:preset=paper", 0.745), ("deit_tiny_patch16_224", "padre:preset=equations", None),
    ("deit_tiny_patch16_224", "mamba:bidirectional=true", None),  # Vision Mamba is no DeiT
])  # fmt: skip
def test_the_mixers_of_the_papers_tables(host, mixer, accuracy):
    figures = published("classify", data="ImageNet", split="validation", host=host, mixer=mixer)
    assert (figures or {}).get("accuracy") == accuracy


def test_costs_stand_beside_no_run():
    figures = published("handwriting", data="LAM", split="basic", host="HTR-VT", mixer="pom")
    assert set(figures) == {"cer", "wer", "source"}, "lines a second are those of the paper's GPU"


def test_every_layer_is_whole_and_comes_once():
    for layer in layers():
        parse_mixer(layer.mixer)
    places = [(layer.table, layer.tokens, layer.channels, layer.mixer) for layer in layers()]
    assert len(places) == len(set(places))


def test_figures_that_are_printed_twice_are_the_same():
    seen = {}
    for row in rows():
        for name, value in row.metrics.items():
            place = (row.paper, row.data, row.split, row.host, row.mixer, name)
            assert seen.setdefault(place, value) == value, f"{place}: {row.table} has another figure"


def test_nothing_is_left_out_of_what_a_paper_prints():
    entries = [entry for paper in papers() for entry in of(paper)]
    assert len(entries) == len(cells(entries)) == len(rows()) + len(layers()) + len(claims())
    assert {"PADRe", "PoM", "Poly-NL", "Poly-SA"} <= set(papers())
    assert {row.table for row in of("SiT-L/2")} == {"Table 5"} and not of("padre")


def test_a_mixer_has_the_rows_of_its_options():
    tables = {(row.table, row.host) for row in of_mixer(parse_mixer("padre-4")[1])}
    assert tables == {("Table 5", "deit_tiny_patch16_224")}
    assert not of_mixer(parse_mixer("padre-4:kernel_size=5")[1])
