"""Find digits on photographs and their masks, by Mask R-CNN with Poly-NL in its backbone.

    polymix train instances --out masks
    polymix train instances --set mixer=non_local --out non_local
    polymix train instances --data stardist-….whl --set image_size=128 --out nuclei
    polymix train instances --data coco --set backbone=resnet50 --set image_size=512 --set steps=20000 --out coco

--data takes a folder in COCO's layout, or the wheel of stardist, whose nuclei it reads. All options:
`polymix.tasks.instances.recipe.InstancesRecipe`, `polymix.tasks.boxes.options.PicturesRecipe` and
`polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.instances.recipe import InstancesRecipe

recipe = InstancesRecipe()
