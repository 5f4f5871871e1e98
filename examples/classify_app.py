"""A web page that classifies pictures with a model of `polymix train`, by Gradio.

    pip install gradio
    polymix train classify --data photos --out photos-pom
    python examples/classify_app.py photos-pom

The page is served on this machine alone: http://127.0.0.1:7860. Nothing is sent anywhere.
"""

import os
import sys
from pathlib import Path
from typing import Any

from polymix.domains.classify.classifier import Classifier
from polymix.errors import PolymixError


def build(folder: str | Path) -> Any:
    """The page for the model in a folder."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio

    classifier = Classifier(folder)
    return gradio.Interface(
        fn=classifier,
        inputs=gradio.Image(type="filepath", label="Picture"),
        outputs=gradio.Label(num_top_classes=min(5, len(classifier.classes)), label="Class"),
        title=f"{Path(folder).name}: {len(classifier.classes)} classes",
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python examples/classify_app.py FOLDER")
    try:
        app = build(sys.argv[1])
    except PolymixError as error:
        sys.exit(str(error))
    app.launch(server_name="127.0.0.1", share=False)
