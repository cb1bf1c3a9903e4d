"""Readouts: what an encoder has learned, in numbers; none of them changes it.

They take features or embeddings, as `hardneg.embed` returns them, and labels that are numbers of
classes. References in brackets are those of hardneg.py.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

import hardneg


def knn_accuracy(train, train_labels, test, test_labels, k=200, temperature=0.5) -> float:
    """Classify by a vote of the k nearest, each with weight e^{cos/t} → accuracy in percent.
    train (n, D), test (m, D), labels (n,), (m,). A k above n takes all n.
    The defaults are those of [1]'s code."""
    train = hardneg.unit(train.float())
    members = F.one_hot(train_labels.long())  # (n, classes)
    right = 0
    parts = zip(hardneg.unit(test.float()).split(1000), test_labels.split(1000), strict=True)
    for rows, labels in parts:
        with torch.autocast(train.device.type, enabled=False):  # 16 bits are too few
            cosines = rows @ train.T
        cosines, index = cosines.topk(min(k, len(train)))  # (1000, k)
        weights = ((cosines - cosines[:, :1]) / temperature).exp()  # the nearest has 1: no overflow
        votes = weights[..., None] * members[index]  # (1000, k, classes)
        right += (votes.sum(1).argmax(1) == labels).sum()
    return 100 * float(right) / len(test)


@torch.inference_mode(False)  # it needs gradients, even where its caller wants none
def linear_readout(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, l2: float = 1e-3
) -> float:
    """Classify by logistic regression, mean cross-entropy + l2/2 ‖W‖² → accuracy in percent.
    train (n, D), test (m, D), labels (n,), (m,). The training set standardises the features.
    Nothing is random: L-BFGS solves the convex problem from zero, until the gradient is at most
    1e-4, the loss stands still, or 200 steps are done."""
    mean, std = train.mean(0), train.std(0)
    constant = std <= 1e-5 * train.abs().amax(0)
    std = std.masked_fill(constant, math.inf)  # a constant feature becomes 0
    x = ((train - mean) / std).detach()
    labels = train_labels.long().clone()
    classes = int(labels.max()) + 1
    weight = x.new_zeros(classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    settings = {"max_iter": 200, "tolerance_grad": 1e-4, "history_size": 20}
    solver = torch.optim.LBFGS([weight, bias], line_search_fn="strong_wolfe", **settings)

    def objective():
        solver.zero_grad()
        value = F.cross_entropy(F.linear(x, weight, bias), labels)
        value = value + l2 / 2 * weight.square().sum()
        value.backward()
        return value.detach()

    with torch.autocast(x.device.type, enabled=False):  # it would not see that weights move
        solver.step(objective)
        right = F.linear((test - mean) / std, weight, bias).argmax(1) == test_labels
    return 100 * float(right.float().mean())


@torch.no_grad()
def tolerance(z: Tensor, labels: Tensor) -> Tensor:
    """Measure how near samples of a class are: the mean cosine of pairs that share a label.
    z (n, D), labels (n,) → in [−1, 1]. Ref: [4] Eq. 11, over pairs of one label, as its Table 1"""
    z = hardneg.unit(z)
    members = F.one_hot(labels.long()).to(z.dtype)  # (n, classes)
    with torch.autocast(z.device.type, enabled=False):
        sums = members.T @ z  # (classes, D)
    counts = members.sum(0)
    cosines = sums.square().sum() - z.square().sum()  # ‖Σ z‖² sums all pairs, equal rows too
    pairs = (counts * (counts - 1)).sum()
    return cosines / pairs
