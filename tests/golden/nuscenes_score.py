"""Writes nuscenes_score.json: drawn boxes of nuScenes' ten classes, and what nuscenes-devkit says of them.

Run by hand, in an environment of its own, as nuscenes-devkit 1.2.0 needs numpy < 2:

    python -m venv devkit && devkit/bin/pip install nuscenes-devkit==1.2.0
    devkit/bin/python tests/golden/nuscenes_score.py
"""

import json
import math
from pathlib import Path

import numpy

NAMES = ("car", "truck", "bus", "trailer", "construction_vehicle", "pedestrian", "motorcycle", "bicycle",
         "traffic_cone", "barrier")  # fmt: skip
SAMPLES, EACH, DISTANCES = 4, 3, (0.5, 1.0, 2.0, 4.0)
ERRORS = {"ATE": "trans_err", "ASE": "scale_err", "AOE": "orient_err", "AVE": "vel_err", "AAE": "attr_err"}
UNDEFINED = {"traffic_cone": ("AOE", "AVE", "AAE"), "barrier": ("AVE", "AAE")}


def attribute(rng, name):
    if name in ("traffic_cone", "barrier"):
        return ""
    kinds = {"pedestrian": ("pedestrian.moving", "pedestrian.standing"),
             "motorcycle": ("cycle.with_rider", "cycle.without_rider")}  # fmt: skip
    kinds["bicycle"] = kinds["motorcycle"]
    return str(rng.choice(kinds.get(name, ("vehicle.moving", "vehicle.parked"))))


def drawn(rng):
    """Samples of true boxes and predictions: near ones, false ones, and missing ones; no bicycles are found."""
    samples = []
    for _ in range(SAMPLES):
        truths, found = [], []
        for name in NAMES:
            for _ in range(EACH):
                box = [*rng.uniform(-20, 20, 2), rng.uniform(-1, 1), *rng.uniform(0.5, 5, 3), rng.uniform(-3, 3),
                       *rng.uniform(-5, 5, 2)]  # fmt: skip
                velocity_known = rng.random() < 0.9
                true = [round(float(value), 3) for value in box]
                truths.append({"box": true[:7] + (true[7:] if velocity_known else [None, None]), "name": name,
                               "attribute": attribute(rng, name) if rng.random() < 0.9 else ""})  # fmt: skip
                if rng.random() < 0.8 and name != "bicycle":
                    near = numpy.array(box) + rng.normal(0, [0.7, 0.7, 0.2, 0.2, 0.2, 0.2, 0.4, 1, 1])
                    near[3:6] = numpy.maximum(near[3:6], 0.2)
                    found.append((near, name, rng.uniform(0.3, 1)))
                if rng.random() < 0.4:
                    away = numpy.array(box) + rng.normal(0, [6, 6, 1, 0, 0, 0, 2, 3, 3])
                    found.append((away, name, rng.uniform(0, 0.7)))
        samples.append({"truths": truths, "found": [
            {"box": [round(float(value), 3) for value in box], "name": name, "score": round(float(score), 4),
             "attribute": attribute(rng, name)} for box, name, score in found if name != "bicycle"
        ]})  # fmt: skip
    return samples


def judged(samples):
    """The metrics of nuscenes-devkit, with its published configuration."""
    from nuscenes.eval.common.config import config_factory
    from nuscenes.eval.common.data_classes import EvalBoxes
    from nuscenes.eval.common.utils import center_distance
    from nuscenes.eval.detection.algo import accumulate, calc_ap, calc_tp
    from nuscenes.eval.detection.data_classes import DetectionBox, DetectionMetrics

    config = config_factory("detection_cvpr_2019")
    both = []
    for part in ("truths", "found"):
        boxes = EvalBoxes()
        for number, sample in enumerate(samples):
            boxes.add_boxes(str(number), [
                DetectionBox(
                    str(number), tuple(b["box"][:3]), (b["box"][4], b["box"][3], b["box"][5]),
                    (math.cos(b["box"][6] / 2), 0.0, 0.0, math.sin(b["box"][6] / 2)),
                    tuple(math.nan if value is None else value for value in b["box"][7:]), tuple(b["box"][:3]), 1,
                    b["name"], float(b.get("score", -1.0)), b["attribute"])
                for b in sample[part]])  # fmt: skip
        both.append(boxes)
    metrics = DetectionMetrics(config)
    rows = {}
    for name in NAMES:
        rows[name] = {}
        for distance in DISTANCES:
            data = accumulate(*both, name, center_distance, distance)
            rows[name][f"AP {distance} m"] = calc_ap(data, config.min_recall, config.min_precision)
            metrics.add_label_ap(name, distance, rows[name][f"AP {distance} m"])
            if distance == config.dist_th_tp:
                for error, theirs in ERRORS.items():
                    known = error not in UNDEFINED.get(name, ())
                    value = calc_tp(data, config.min_recall, theirs) if known else math.nan
                    metrics.add_label_tp(name, theirs, value)
                    if known:
                        rows[name][error] = value
    scores = {"NDS": metrics.nd_score, "mAP": metrics.mean_ap}
    scores |= {error: metrics.tp_errors[theirs] for error, theirs in ERRORS.items()}
    return {"metrics": scores, "classes": rows}


if __name__ == "__main__":
    samples = drawn(numpy.random.default_rng(0))
    source = "nuscenes-devkit 1.2.0 (Apache-2.0), detection_cvpr_2019, on boxes drawn by nuscenes_score.py"
    content = {"source": source, "samples": samples, "expected": judged(samples)}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content))
    print(json.dumps(content["expected"]["metrics"]))
