"""The option of every training on the scans of the virtual LiDAR."""

from typing import Annotated, Literal

from pydantic import Field

Streets = Annotated[
    Literal["same", "what"],
    Field(
        description="of the default data: same, cars as bright as the street's houses are cars and others trucks, which"
        " no point tells alone; what, all are cars"
    ),
]
