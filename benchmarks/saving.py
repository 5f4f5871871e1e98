"""How the scripts save their results."""

import json
from pathlib import Path
from typing import Any

from polymix.files import write_whole


def save(content: Any, path: Path) -> None:
    """Write JSON whole or not at all."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
