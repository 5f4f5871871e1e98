"""The option of every training on the scans of the virtual LiDAR."""

from typing import Annotated, Literal

from pydantic import Field

Streets = Annotated[
    Literal["houses", "same", "what"],
    Field(
        description="of the default data: houses, cars in a street of dark houses are trucks, which no point tells"
        " alone; same, those not as bright as the houses are; what, all are cars"
    ),
]
