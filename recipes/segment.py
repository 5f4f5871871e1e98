"""Which digit does each pixel belong to? A small encoder over squares of 8 × 8 pixels, with any mixer.

    polymix train segment --out digits
    polymix train segment --data ADEChallengeData2016 --preset paper --mixer pom --out ade-pom
    polymix train segment --data cityscapes --set host=efficientvit --set crop=512 --mixer qt --out streets

--data takes a folder in the layout of ADE20K, Cityscapes or VOC, or pictures and label maps of equal names. All
options: `polymix.tasks.segment.SegmentRecipe` and `polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.segment import SegmentRecipe

recipe = SegmentRecipe()
