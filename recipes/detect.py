"""Find the digit that stands at the top left among four others on a photograph.

    polymix train detect --out digits
    polymix train detect --set question=what --set mixer=pom --out what
    polymix train detect --data coco --set image_size=256 --set steps=20000 --out coco

--data takes a folder in COCO's or VOC's layout. All options: `polymix.tasks.detect.recipe.DetectRecipe` and
`polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.detect.recipe import DetectRecipe

recipe = DetectRecipe()
