"""A small hybrid language model on the prose of Python's own library, in a few minutes on two cores.

    polymix train recipes/text.py --out text-model
    polymix train recipes/text.py --data books --set steps=5000 --set mixers=softmax --out books-softmax

All options: `polymix.tasks.text.TextRecipe` and `polymix.tasks.recipe.TaskRecipe`. Other names that --set takes are
options of the model, such as num_layers.
"""

from polymix.tasks.text import TextRecipe

recipe = TextRecipe(
    model="gpt",
    options={
        "mixers": ["pom:decay=8", "local"],
        "positions": "none",
        "num_layers": 4,
        "hidden_size": 192,
        "num_heads": 3,
    },
    context=256,
    batch_size=8,
    steps=300,
    learning_rate=2e-3,
)
