"""What does each point of a street belong to? PTv3 with any mixer, by default on scans of a made LiDAR.

    polymix train points --out streets
    polymix train points --set cpe=True --out with-convolutions
    polymix train points --data SemanticKITTI/dataset --preset paper --mixer pom --out kitti-pom

--data takes a folder in the layout of SemanticKITTI, nuScenes-lidarseg or Pointcept. All options:
`polymix.tasks.points.PointsRecipe` and `polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.points import PointsRecipe

recipe = PointsRecipe()
