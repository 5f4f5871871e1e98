"""Where results go."""

import json
from pathlib import Path
from typing import Any


def save(content: Any, path: Path) -> None:
    """As JSON, written beside its place and renamed, so that what was there is never lost."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    part.replace(path)
