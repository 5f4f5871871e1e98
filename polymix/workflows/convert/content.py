"""What results.json of `polymix convert` holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict


class ConvertContent(TypedDict):
    """From the start. Measurements and notes come when it has finished."""

    schema: Literal["polymix.convert/1"]
    finished: bool
    settings: dict[str, Any]
    machine: Annotated[dict[str, Any], "empty before the measurements: the model does not depend on it"]
    plan: Annotated[dict[str, Any] | None, "layer -> its mixer's options, or keep"]
