"""Images out of noise: SiT with any mixer, by default on handwritten digits of 8 × 8 pixels.

    polymix train images --out images
    polymix train images --set conditional=True --out images-by-class
    polymix train images --preset paper --data ImageNet --set vae=sd-vae-ft-ema --mixer pom --out sipom

--data takes a folder of pictures. All options: `polymix.tasks.images.ImagesRecipe` and
`polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.images import ImagesRecipe

recipe = ImagesRecipe()
