"""What a mixer's state can recall: a small language model on associative recall, in a few minutes on two cores.

    polymix train recipes/recall.py --out recall
    polymix train recipes/recall.py --set mixers=softmax --set positions=learned --set task=copying --out copying

The data is made, so there is no --data. All options: `polymix.tasks.recall.RecallRecipe` and
`polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.recall import RecallRecipe

recipe = RecallRecipe(mixers=("padre:degree=1:channel=identity:kernel_size=3", "pom"))
