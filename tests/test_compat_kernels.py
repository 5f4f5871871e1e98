"""nms and roi_align for a torchvision whose compiled operators do not load: equal to its own definitions."""

import sys

import pytest
import torch

from polymix import compat, torchvision_operators

compat.cure_torchvision()
torchvision = pytest.importorskip("torchvision", reason="untested: nms and roi_align, without torchvision")


def definition(*arguments):
    """torchvision's roi_align in Python, before torch.compile, in float64: beyond the edge it loses digits."""
    function = sys.modules["torchvision.ops.roi_align"]._roi_align
    x, boxes, *rest = arguments
    return getattr(function, "__wrapped__", function)(x.double(), boxes.double(), *rest)


def rois(count, images, generator):
    """Boxes inside the image, across its edge and outside it; the last three are a point, a line and inverted."""
    corner = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 70 - 10
    boxes = torch.cat((corner, corner + torch.rand(count, 2, generator=generator, dtype=torch.float64) * 50), 1)
    boxes[0] = torch.tensor([500.0, 400.0, 520.0, 440.0])
    boxes[-3:] = torch.tensor([[9.0, 9, 9, 9], [3, 4, 20, 4], [30, 30, 12, 18]])
    places = torch.randint(images, (count, 1), generator=generator)
    return torch.cat((places.double(), boxes), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ratio", [-1, 0, 1, 3])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_is_torchvisions_definition(aligned, ratio, dtype, monkeypatch):
    monkeypatch.setattr(torchvision_operators, "_MAX_CORNERS", 1000)  # several parts
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 17, 23, generator=g, dtype=dtype, requires_grad=True)
    for scale in (1.0, 0.25):
        boxes = rois(12, 3, g).to(dtype)
        ours, theirs = (f(x, boxes, scale, 7, 5, ratio, aligned) for f in (torch.ops.torchvision.roi_align, definition))
        assert ours.dtype == dtype and (ours - theirs).abs().max() < 1e-5
        # The gradient of torchvision's definition is NaN where it divides by a side of 0.
        keep = ((boxes[:, 3:] - boxes[:, 1:3]) > 0).all(1) | (ratio > 0)
        weight = torch.randn(ours.shape, generator=g, dtype=dtype)
        (mine,) = torch.autograd.grad((ours * weight)[keep].sum(), x, retain_graph=True)
        theirs = definition(x, boxes[keep], scale, 7, 5, ratio, aligned)
        (theirs,) = torch.autograd.grad((theirs * weight[keep]).sum(), x)
        assert (mine - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())
        assert torch.autograd.grad(ours.sum(), x)[0].isfinite().all()


def test_roi_align_of_few_cells_and_no_boxes():
    x = torch.randn(1, 2, 1, 2)
    boxes = torch.tensor([[0, 0.1, 0.0, 1.9, 1.0]])
    assert (
        torchvision_operators.roi_align(x, boxes, 1.0, 2, 2, 4, True) - definition(x, boxes, 1.0, 2, 2, 4, True)
    ).abs().max() < 1e-6
    assert torchvision_operators.roi_align(x, boxes[:0], 1.0, 3, 2, -1, True).shape == (0, 2, 3, 2)
    half = torchvision_operators.roi_align(x.bfloat16(), boxes.bfloat16(), 1.0, 2, 2, 2, True)
    assert half.dtype == torch.bfloat16


def test_roi_align_gradcheck():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, 6, 5, generator=g, dtype=torch.float64, requires_grad=True)
    boxes = torch.tensor([[0, -1.0, 0, 4, 3], [1, 1, 1, 3.5, 9]], dtype=torch.float64)
    for ratio in (0, 2):
        assert torch.autograd.gradcheck(
            lambda x, r=ratio: torchvision_operators.roi_align(x, boxes, 0.7, 2, 3, r, True), x
        )


def greedy(boxes, scores, threshold):
    """Non-maximum suppression as it is defined: the best box first, without those that overlap it."""
    order, kept = scores.argsort(descending=True, stable=True).tolist(), []
    overlaps = torchvision.ops.box_iou(boxes, boxes)
    while order:
        best = order.pop(0)
        kept.append(best)
        order = [other for other in order if not overlaps[best, other].double() > threshold]
    return kept


@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_nms_is_greedy(count, threshold):
    g = torch.Generator().manual_seed(count)
    corner = torch.rand(count, 2, generator=g) * 100
    boxes = torch.cat((corner, corner + torch.rand(count, 2, generator=g) * 30), 1)
    scores = (torch.rand(count, generator=g) * 50).round()  # many are equal
    assert torchvision.ops.nms(boxes, scores, threshold).tolist() == greedy(boxes, scores, threshold)


def test_nms_of_a_chain_in_which_every_second_box_is_dropped():
    boxes = torch.tensor([[3.0 * i, 0, 3.0 * i + 10, 10] for i in range(600)])
    scores = torch.arange(600, 0, -1).float()
    assert torchvision.ops.nms(boxes, scores, 0.5).tolist() == list(range(0, 600, 2))
    labels = torch.arange(600) % 2
    assert len(torchvision.ops.batched_nms(boxes, scores, labels, 0.5)) == 600
    with pytest.raises((ValueError, RuntimeError), match=r"nms|boxes"):
        torch.ops.torchvision.nms(boxes[0], scores, 0.5)


def detectors():
    from torchvision.models import resnet18
    from torchvision.models.detection import FCOS, MaskRCNN, RetinaNet
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

    sizes = {"min_size": 64, "max_size": 64}

    def backbone():
        return _resnet_fpn_extractor(resnet18(weights=None), 5)

    yield MaskRCNN(backbone(), 2, box_batch_size_per_image=8, rpn_pre_nms_top_n_train=20, rpn_post_nms_top_n_train=10,
                   rpn_pre_nms_top_n_test=20, rpn_post_nms_top_n_test=10, **sizes)  # fmt: skip
    yield RetinaNet(backbone(), 2, topk_candidates=20, **sizes)
    yield FCOS(backbone(), 2, topk_candidates=20, **sizes)


@pytest.mark.slow
def test_torchvisions_detectors_train_and_predict():
    torch.manual_seed(0)
    image = torch.rand(3, 64, 64)
    mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
    mask[:, 8:40, 10:50] = 1
    target = {"boxes": torch.tensor([[10.0, 8, 50, 40]]), "labels": torch.tensor([1]), "masks": mask}
    for model in detectors():
        loss = sum(model.train()([image], [target]).values())
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        with torch.no_grad():
            (found,) = model.eval()([image])
        assert {"boxes", "labels", "scores"} <= set(found)
