"""Crops from a year of satellite images: TSViT with any mixer, by default on made fields.

    polymix train fields --out fields
    polymix train fields --preset paper --data PASTIS --mixer pom --out pastis-pom

--data takes a folder of PASTIS. All options: `polymix.tasks.fields.FieldsRecipe` and `polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.fields import FieldsRecipe

recipe = FieldsRecipe()
