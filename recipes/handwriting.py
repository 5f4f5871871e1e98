"""HTR-VT reads cheques in pen-plotter script whose amount stands twice and is blotted once.

    polymix train handwriting --mixer pom --out cheques
    polymix train handwriting --data IAM --preset paper --mixer pom --plan 1:1 --out iam

All options: `polymix.tasks.handwriting.HandwritingRecipe` and `polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.handwriting import HandwritingRecipe

recipe = HandwritingRecipe()
