"""Associative recall and copying: what a language model must keep of its past, as synthetic data, and their trainer."""

from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.recall.data import Batch, Copying, Recall, Task
from polymix.tasks.recall.training import Learner, Outcome, Recipe, accuracy, state_size, train

__all__ = [
    "IGNORED", "Batch", "Copying", "Learner", "Outcome", "Recall", "Recipe", "Task", "accuracy", "state_size", "train",
]  # fmt: skip
