"""The data of instance segmentation: see `polymix.tasks.boxes.data`. Every object needs a mask."""

from polymix.tasks.boxes.data import (
    LAYOUTS as LAYOUTS,
)
from polymix.tasks.boxes.data import (
    DetectionData as DetectionData,
)
from polymix.tasks.boxes.data import (
    check as check,
)
from polymix.tasks.boxes.data import (
    for_evaluation as for_evaluation,
)
from polymix.tasks.boxes.data import (
    from_summary as from_summary,
)
from polymix.tasks.boxes.data import (
    load as load,
)
from polymix.tasks.boxes.data import (
    made as made,
)
