"""Find faces, by RetinaNet with Poly-NL in its backbone.

    polymix train faces --out faces
    polymix train faces --mixer none --out without
    polymix train faces --data WIDER --preset wider --out wider

The default data are faces of scikit-image pasted into photographs. --data takes a folder in WIDER FACE's layout. All
options: `polymix.tasks.faces.recipe.FacesRecipe` and `polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.faces.recipe import FacesRecipe

recipe = FacesRecipe()
