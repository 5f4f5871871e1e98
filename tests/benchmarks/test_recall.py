"""benchmarks/recall.py: which learning rate counts."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def row(model, seed, rate, *accuracy):
    return {"task": "recall", "model": model, "seed": seed, "learning_rate": rate, "accuracy": list(accuracy) or None}


def test_one_learning_rate_counts_for_all_seeds_of_a_model(monkeypatch):
    """The better one of each seed alone would be chosen by chance, and the mean too high."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import recall

    rows = [
        row("a", 0, 0.003, 0.9, 0.9), row("a", 1, 0.003, 0.1, 0.1), row("a", 0, 0.001, 0.6, 0.7),
        row("a", 1, 0.001, 0.5, 0.5), row("b", 0, 0.003, 1.0, 0.0), row("b", 0, 0.001), row("a", 2, 0.003),
    ]  # fmt: skip
    recall.mark_best(rows)
    assert [its["best"] for its in rows] == [False, False, True, True, True, False, False]
