"""Associative recall and copying: what a language model can keep of its past, and how it learns to.

`polymix train recipes/recall.py` trains by a `RecallRecipe`; `train` trains a model that you build, by a `Schedule`.
"""

from polymix.renamed import renamed
from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.recall.data import Batch, Copying, Recall, Task
from polymix.tasks.recall.learner import Outcome, Trial, train
from polymix.tasks.recall.metrics import accuracy, state_size
from polymix.tasks.recall.recipe import RecallRecipe, Schedule

__getattr__ = renamed(__name__, Recipe="Schedule", Learner="Trial")

__all__ = [
    "IGNORED", "Batch", "Copying", "Outcome", "Recall", "RecallRecipe", "Schedule", "Task", "Trial", "accuracy",
    "state_size", "train",
]  # fmt: skip
