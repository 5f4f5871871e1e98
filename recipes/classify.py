"""A small vision transformer on scikit-learn's handwritten digits, in a minute on two cores.

    polymix train recipes/classify.py --out digits
    polymix train recipes/classify.py --data photos --set image_size=64 --set patch_size=8 --mixer padre --out photos

--data takes a folder with one sub-folder of images per class. All options: `polymix.tasks.classify.ImageRecipe` and
`polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.classify import ImageRecipe

recipe = ImageRecipe(mixer="pom")
