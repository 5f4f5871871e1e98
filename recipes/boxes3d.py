"""Where are the cars and persons around a vehicle? DSVT with any mixer, by default on drives of a made LiDAR.

    polymix train boxes3d --out streets
    polymix train boxes3d --mixer softmax --out attention
    polymix train boxes3d --data nuscenes --preset paper --mixer padre --out nuscenes-padre

--data takes the folder of nuScenes or of KITTI's detection set. All options: `polymix.tasks.boxes3d.Boxes3dRecipe` and
`polymix.tasks.recipe.TaskRecipe`.
"""

from polymix.tasks.boxes3d import Boxes3dRecipe

recipe = Boxes3dRecipe()
