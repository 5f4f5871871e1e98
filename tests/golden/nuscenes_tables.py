"""Opens the default data of detect3d with nuscenes-devkit, and compares what both read. Nothing is written.

Run by hand, in two environments, as nuscenes-devkit 1.2.0 needs numpy < 2:

    python tests/golden/nuscenes_tables.py write synthetic
    python -m venv devkit && devkit/bin/pip install nuscenes-devkit==1.2.0
    devkit/bin/python tests/golden/nuscenes_tables.py synthetic
"""

import json
import sys
from pathlib import Path

import numpy

SWEEPS = 3


def write(folder):
    """The default data of 6 drives, and in ours.json what polymix reads: a sample, the splits and the classes."""
    from polymix.domains.detect3d import nuscenes
    from polymix.domains.detect3d.synthetic import synthetic
    from polymix.domains.segment3d import lidarseg
    from polymix.train.data.scans.nuscenes_tables import published_split

    synthetic(folder, 0, 4, 2, SWEEPS)
    frame = nuscenes.frame_at(folder / "samples/LIDAR_TOP/scene-0000-0-0.pcd.bin", SWEEPS, {})
    scenes = {f"scene-{number:04d}" for number in range(1, 1111)}
    ours = {"points": frame.points().tolist(), "boxes": frame.objects.boxes.tolist(), "classes": lidarseg.CATEGORIES}
    ours |= {name: published_split(f"v1.0-{name}", scenes)["val"] for name in ("trainval", "mini")}
    (folder / "ours.json").write_text(json.dumps(ours))


def compare(folder):
    from nuscenes import NuScenes
    from nuscenes.eval.lidarseg.utils import LidarsegClassMapper
    from nuscenes.utils import splits
    from nuscenes.utils.data_classes import LidarPointCloud
    from pyquaternion import Quaternion

    ours = json.loads((folder / "ours.json").read_text())
    points, boxes = numpy.array(ours["points"]), numpy.array(ours["boxes"])
    tables = NuScenes(version="v1.0-synthetic", dataroot=str(folder), verbose=True)
    sample, mount = tables.sample[0], tables.calibrated_sensor[0]
    options = {"nsweeps": SWEEPS, "min_distance": 0}
    cloud, ages = LidarPointCloud.from_file_multisweep(tables, sample, "LIDAR_TOP", "LIDAR_TOP", **options)
    cloud.rotate(Quaternion(mount["rotation"]).rotation_matrix)
    cloud.translate(numpy.array(mount["translation"]))
    gaps = [abs(cloud.points[:3].T - points[:, :3]).max(), abs(ages[0] - points[:, 4]).max()]
    print(f"{len(points):,} points: at most {gaps[0]:.1e} m and {gaps[1]:.1e} s apart")
    data = tables.get("sample_data", sample["data"]["LIDAR_TOP"])
    ego, worst = tables.get("ego_pose", data["ego_pose_token"]), 0.0
    back = Quaternion(ego["rotation"]).inverse
    for mine, token in zip(boxes, sample["anns"], strict=True):
        box, speed = tables.get_box(token), back.rotate(tables.box_velocity(token))
        box.translate(-numpy.array(ego["translation"]))
        box.rotate(back)
        turn = (box.orientation.yaw_pitch_roll[0] - mine[6] + numpy.pi) % (2 * numpy.pi) - numpy.pi
        assert numpy.array_equal(numpy.isnan(speed[:2]), numpy.isnan(mine[7:]))
        gaps = [
            *(box.center - mine[:3]),
            *(box.wlh[[1, 0, 2]] - mine[3:6]),
            turn,
            *numpy.nan_to_num(speed[:2] - mine[7:]),
        ]
        worst = max(worst, numpy.abs(gaps).max())
    print(f"{len(boxes)} boxes: at most {worst:.1e} apart in metres, radians and m/s")
    assert ours["trainval"] == sorted(splits.val) and ours["mini"] == sorted(splits.mini_val)
    mapper = LidarsegClassMapper(tables)
    coarse, numbers = mapper.get_fine2coarse(), mapper.get_coarse2idx()
    assert all(numbers[coarse[row["name"]]] - 1 == ours["classes"].get(row["name"], -1) for row in tables.category)
    print("The splits and the 16 classes are the devkit's.")
    tables.get_sample_lidarseg_stats(sample["token"])


if __name__ == "__main__":
    write(Path(sys.argv[2])) if sys.argv[1] == "write" else compare(Path(sys.argv[1]))
