"""Put the shuffled pieces of photographs in place: photographs of scikit-image and scikit-learn, a few minutes.

    polymix train jigsaw --out jigsaw
    polymix train jigsaw --mixer softmax --data photos --set pieces=3 --out jigsaw-attention
    polymix predict jigsaw photo.jpg --out seen

--data takes a folder of photographs. All options: `polymix.tasks.jigsaw.recipe.JigsawRecipe`.
"""

from polymix.tasks.jigsaw.recipe import JigsawRecipe

recipe = JigsawRecipe()
