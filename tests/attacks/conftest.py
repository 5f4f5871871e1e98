"""A folder with everything that the commands read: a model, a text, a language model."""

import pytest

from tests.attacks.command import MODEL, TEXT


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    from polymix.domains.text.tokenizer import train_tokenizer
    from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM

    folder = tmp_path_factory.mktemp("material")
    (folder / "model.py").write_text(MODEL)
    (folder / "text.txt").write_text(TEXT)
    (folder / "broken.py").write_text("recipe = (")
    (folder / "exits.py").write_text("import sys\nsys.exit(0)")
    (folder / "other.py").write_text("recipe = 3")
    (folder / "unknown.py").write_text(
        "from polymix.domains.text.recipe import TextRecipe\nrecipe = TextRecipe(stepz=3)"
    )
    tokenizer = train_tokenizer([TEXT], 300, 32)
    config = PolymixGPTConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_heads=2, num_layers=1, max_position_embeddings=32
    )
    PolymixGPTForCausalLM(config).save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    return folder
