"""How far predicted depths are from the truth, pictures of both, and clouds of points to turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.depth.data import DepthData, intrinsics_of, rays_of
from polymix.domains.depth.layouts import View, list_folders
from polymix.domains.depth.recipe import DepthRecipe
from polymix.errors import DataError
from polymix.files import output_names
from polymix.train.data.arrays import write_array
from polymix.train.data.cameras import directions
from polymix.train.data.drawing import draw_maps
from polymix.train.data.pictures import middle, middle_part, read_header, read_picture, resized
from polymix.train.data.problems import Problems
from polymix.train.data.scans.page import OWN, Colouring, Pages, Scene
from polymix.train.data.splits import spread
from polymix.train.task import Process

CLOSE = 1.25  # ratio of two depths below which they are close: δ₁
DRAWN = 5  # views of a picture
EYE = (0.9, -2.0, 0.7)  # from where a cloud is first seen: behind the camera, to its right and above it
Maps = Mapping[str, Tensor]  # bytes (3, H, W) as "picture"; depths (H, W) by other names


def depths_of(model: nn.Module, pictures: Tensor, rays: Tensor, recipe: DepthRecipe, process: Process) -> Tensor:
    """Bytes (B, K, 3, H, W) and rays -> depths (B, K, H, W), not below `min_depth` nor above `max_depth`."""
    log_depth = model(pictures.to(process.device).float() / 127.5 - 1, rays.to(process.device))
    return log_depth.float().exp().cpu().clamp(recipe.min_depth, recipe.max_depth)


def aligned(predicted: Tensor, truth: Tensor, recipe: DepthRecipe) -> Tensor:
    """A prediction (H, W), with align="median" times median truth / median prediction where there is a truth."""
    known = truth > 0
    if recipe.align == "none" or not known.any():
        return predicted
    return predicted * (truth[known].median() / predicted[known].median())


def scores(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """The metrics of one view (H, W) over the pixels with a truth t above 0; p is the prediction.

        abs_rel = mean |p − t| / t      rmse = √(mean (p − t)²)      delta_1 = share of max(p / t, t / p) < 1.25
        si_log = √(mean d² − (mean d)²),  d = log p − log t

    Source: Eigen et al. 2014, Section 4.1.
    """
    p, t = predicted[truth > 0].double(), truth[truth > 0].double()
    return {
        "abs_rel": ((p - t).abs() / t).mean().item(), "rmse": (p - t).square().mean().sqrt().item(),
        "delta_1": (torch.maximum(p / t, t / p) < CLOSE).double().mean().item(),
        "si_log": (p / t).log().std(correction=0).item(),
    }  # fmt: skip


def measure(model: nn.Module, data: DepthData, recipe: DepthRecipe, process: Process) -> dict[str, float]:
    """The means of `scores` over the test views that have a pixel with a truth. Raises DataError: there is none."""
    rows = []
    for places in torch.arange(len(data.test)).split(recipe.part_size):
        pictures, truth, rays = (torch.stack(part) for part in zip(*(data.test[int(k)] for k in places), strict=True))
        predicted = depths_of(model, pictures, rays, recipe, process)
        pairs = zip(predicted.flatten(0, 1), truth.flatten(0, 1), strict=True)
        rows += [scores(aligned(p, t, recipe), t) for p, t in pairs if (t > 0).any()]
    if not rows:
        got = f"{data.name} without a true depth in the middle of a test picture"
        raise DataError("data", got, "true depths", "Change height and width.")
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def draw(model: nn.Module, data: DepthData, recipe: DepthRecipe, folder: Path, pages: Pages) -> list[Path]:
    """depth.png: some test pictures, their true and their predicted depth; cloud.html: the first as points to turn."""
    rows: list[Maps] = []
    places = spread(len(data.test), DRAWN)
    for pictures, truth, rays in (data.test[place] for place in places):
        predicted = depths_of(model, pictures[None], rays[None], recipe, Process())[0, 0]
        rows.append({"picture": pictures[0], "truth": truth[0], "prediction": aligned(predicted, truth[0], recipe)})
    draw_maps(folder / "depth.png", rows)
    cloud = cloud_of(rows[0], data.test.scenes[places[0]][0], recipe)
    return [folder / "depth.png", *pages.write(folder / "cloud.html", cloud, "A test picture")]


def cloud_of(maps: Maps, view: View, recipe: DepthRecipe) -> Scene:
    """The points of the depths of a view, in the colours of its picture: to the right, ahead, up.

    Where its camera is not known, the focal length is the width of the picture.
    """
    width, height = float(recipe.width), float(recipe.height)
    intrinsics = torch.tensor([[width, 0, width / 2], [0, width, height / 2], [0, 0, 1]])
    if view.intrinsics is not None and view.intrinsics.is_file():
        intrinsics = intrinsics_of(view, recipe)
    depths = {name: depth.flatten() for name, depth in reversed([*maps.items()]) if name != "picture"}
    right, down, ahead = directions(intrinsics, *maps["picture"].shape[1:]).unbind(1)
    points = [(torch.stack((right, ahead, -down), 1) * depth[:, None])[depth > 0] for depth in depths.values()]
    owners = torch.cat([torch.full((len(part),), place) for place, part in enumerate(points)]).numpy()
    colours = torch.cat([maps["picture"].flatten(1).T[depth > 0] for depth in depths.values()])
    colourings = {name: Colouring(owners, {place: (name, OWN)}) for place, name in enumerate(depths)}
    return Scene(torch.cat(points).numpy(), colourings, colours=colours.numpy(), eye=EYE)


def predict(
    model: nn.Module, recipe: DepthRecipe, files: Sequence[Path], folder: Path, process: Process, pages: Pages
) -> list[dict[str, Any]]:
    """The depth of picture files, or with K cameras of folders as the layout `folders` has them, without depth.

    For each: NAME-depth.npy, float32 of the picture's size (with K cameras, K of them) with 0 beside the middle that
    the model sees, a picture, and a page in which the points of the first view turn (None without plotly).
    """
    results = []
    for file, name in zip(files, output_names(files), strict=True):
        views = _views(file, recipe)
        pixels = [read_picture(view.picture) for view in views]
        pictures = torch.stack([middle(part, recipe.height, recipe.width) for part in pixels])
        predicted = depths_of(model, pictures[None], rays_of(views, recipe)[None], recipe, process)[0]
        whole = [torch.zeros(part.shape[1:]) for part in pixels]
        for depth, part in zip(predicted, whole, strict=True):
            seen = part[middle_part(part.shape, depth.shape)]
            seen.copy_(resized(depth[None], *seen.shape)[0])
        array = whole[0] if recipe.cameras == 1 else torch.stack(whole)
        write_array(folder / f"{name}-depth.npy", array.numpy())
        rows = [{"picture": part, "prediction": depth} for part, depth in zip(pictures, predicted, strict=True)]
        draw_maps(folder / f"{name}.png", rows)
        page = pages.write(folder / f"{name}.html", cloud_of(rows[0], views[0], recipe), file.name)
        results.append({"file": str(file), "nearest": predicted.min().item(), "median": predicted.median().item(),
                        "farthest": predicted.max().item(), "depth": f"{name}-depth.npy", "picture": f"{name}.png",
                        "page": page[0].name if page else None})  # fmt: skip
    return results


def _views(file: Path, recipe: DepthRecipe) -> tuple[View, ...]:
    """What `predict` reads of a picture, or of a folder with as many pictures as there are cameras."""
    problems = Problems()
    views = [View(file, file, "")] if recipe.cameras == 1 else [*list_folders(file, problems, with_depth=False)]
    problems.settle()
    if len(views) != recipe.cameras:
        allowed = f"a folder with {recipe.cameras} in images, and their poses"
        raise DataError("files", f"{file} with {len(views)} pictures", allowed, "Sort them so.")
    return tuple(view._replace(size=read_header(view.picture)[:2]) for view in views)
