"""What the tests of `polymix.distill` share: small hosts, batches, and how models are compared."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polymix
from polymix.models import VisionTransformer

X = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = (X.mean((1, 2, 3)) > 0).long() + 2 * (X[:, 0, :4].mean((1, 2)) > 0).long()
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 64, 8)]
ONCE = {"imitate_epochs": 1, "epochs": 1}


class Stateful(nn.Module):
    """Attention between parts that have a state, or behave otherwise in training."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = self.drop(self.norm(x.flatten(1))).unflatten(1, (4, 16))
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def vit(mixer=None, **options):
    torch.manual_seed(0)
    kw = {
        "image_size": 8,
        "patch_size": 2,
        "dim": 16,
        "depth": 2,
        "classes": 4,
        "channels": 1,
        "mlp_ratio": 2,
        **options,
    }
    return VisionTransformer(mixer or polymix.SoftmaxConfig(heads=2), **kw).eval()


def converted(host=None, plan=None, **options):
    """A report on a converted copy, the same at each call."""
    torch.manual_seed(1)
    plan = plan or polymix.PadreConfig(kernel_size=3, dropout=0.1)
    return polymix.convert(vit() if host is None else host, plan, input=X[:8], copy=True, **options)


def loader(**options):
    return DataLoader(TensorDataset(X, Y), 8, **{"shuffle": True, **options})


def bits(model):
    """Copies of all parameters and buffers."""
    parts = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone() for name, value in parts}


def differing(before, after):
    """Names of what has other bits now."""
    assert list(before) == list(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


def same(a, b):
    """Two runs gave the same weights and statistics; buffers that are not to be saved tell how many steps were run here."""
    assert not differing(a.model.state_dict(), b.model.state_dict())


def state(model):
    """Which part trains, and which parameter asks for gradients."""
    return {n: m.training for n, m in model.named_modules()}, {n: p.requires_grad for n, p in model.named_parameters()}


def former(report):
    """A copy of the model as it was before its conversion."""
    host = copy.deepcopy(report.undo())
    report.redo()
    return host
