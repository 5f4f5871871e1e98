"""What measures drawn images: the Fréchet distance against its closed form, precision and recall, and the judge."""

import pytest
import torch

from polymix.domains.generation.quality import Judge, frechet_distance, precision_and_recall, train_judge


def normal(count, dim, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(values, mean, scale):
    """Features whose sample mean and covariance are exactly `mean` and `scale` scaleᵀ."""
    centred = values - values.mean(0)
    white = centred @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(centred.T))).T
    return white @ scale.T + mean


def test_the_distance_is_that_of_two_normals():
    """For covariances that commute it is |μ₁ − μ₂|² + Σ (σ₁ − σ₂)²."""
    one, two = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 0.1, 0.5]).double()
    first = exact(normal(500, 3), torch.zeros(3).double(), one.diag())
    second = exact(normal(400, 3, 1), torch.tensor([1.0, 0.0, -2.0]).double(), two.diag())
    assert frechet_distance(first, second) == pytest.approx(5 + (one - two).square().sum().item(), rel=1e-9)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-9)


def test_the_distance_of_covariances_that_do_not_commute():
    """Against tr (S₁ S₂)^½ by the eigenvalues of the product."""
    mix = normal(3, 3, 4)
    first, second = exact(normal(90, 3), torch.zeros(3).double(), mix), exact(normal(80, 3, 1), mix[0], mix.T @ mix)
    a, b = mix @ mix.T, mix.T @ mix @ mix.T @ mix
    root = torch.linalg.eigvals(a @ b).real.clamp_min(0).sqrt().sum()
    expected = mix[0].square().sum() + a.trace() + b.trace() - 2 * root
    assert frechet_distance(first, second) == pytest.approx(expected.item(), rel=1e-6)


def test_fewer_images_than_features():
    assert frechet_distance(normal(5, 64), normal(6, 64, 1)) > 0


def test_precision_and_recall_of_sets_whose_answer_is_plain():
    real = normal(200, 2)
    assert precision_and_recall(real, real) == (1.0, 1.0)
    assert precision_and_recall(real, real + 100) == (0.0, 0.0)
    few = real[:1].repeat(200, 1) + 1e-3 * normal(200, 2, 1)
    precision, recall = precision_and_recall(real, few)
    assert precision == 1.0 and recall < 0.05, "one image again and again: all are good, and they cover little"


def bars(count, seed):
    """Images of 8 × 8 with a bright row (class 0) or column (class 1), and noise."""
    draw = torch.Generator().manual_seed(seed)
    images = 0.1 * torch.randn(count, 1, 8, 8, generator=draw)
    labels = torch.arange(count) % 2
    for image, label, place in zip(images, labels, torch.randint(8, (count,), generator=draw), strict=True):
        image[0].select(int(label), int(place)).add_(1)
    return torch.utils.data.TensorDataset(images, labels)


@pytest.mark.parametrize("classes", [2, 1])
def test_a_judge_learns_and_is_kept(tmp_path, classes):
    """Without classes it learns how far an image was turned, of which a bar tells half."""
    said = []
    arguments = (bars(200, 0), bars(40, 1), (1, 8, 8), classes, 30, tmp_path / "judge.pt", said.append)
    judge, accuracy = train_judge(*arguments)
    assert accuracy > (0.7 if classes == 2 else 0.2) and len(said) == 1
    again, same = train_judge(*arguments)
    assert len(said) == 1 and same == accuracy, "read, not trained again"
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(judge.features(images), again.features(images))
    train_judge(*arguments[:4], 1, *arguments[5:])
    assert len(said) == 2, "other steps make another judge"


@pytest.mark.parametrize("size", [1, 2, 8, 28, 64, 256])
def test_a_judge_takes_any_size(size):
    judge = Judge(3, size, 10)
    assert judge.features(torch.zeros(2, 3, size, size)).shape == (2, 64)
    assert judge(torch.zeros(2, 3, size, size)).shape == (2, 10)
