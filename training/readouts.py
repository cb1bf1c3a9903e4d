"""Measure what an encoder has learned, without changing it.

The functions take features or embeddings, as `hardneg.embed` returns them. Labels are the numbers
of classes. References in brackets are those of hardneg.py.
"""

import math

import torch
from torch.nn import functional as F

import hardneg
from training import require


def knn_accuracy(train, train_labels, test, test_labels, k=200, temperature=0.5):
    """Classify by a vote of the k nearest, each with weight e^{cos/t} → accuracy in percent.
    train is (n, D), test is (m, D), and their labels are (n,) and (m,). If k is above n, all n
    vote. The defaults are those of the code of [1]."""
    check_finite(train=train, test=test)
    labels = train_labels.long()
    no_answers = labels.new_full((len(test), 1), -1)
    index, cosines = hardneg.mine(test.float(), train.float(), k, positives=no_answers, scores=True)
    weights = (cosines / temperature).softmax(1)  # 0 where there are no more rows
    votes = weights.new_zeros(len(test), int(labels.max()) + 1)
    votes.scatter_add_(1, labels[index], weights)
    right = votes.argmax(1) == test_labels
    return 100 * float(right.float().mean())


@torch.inference_mode(False)  # fitting needs gradients, even if the caller turned them off
def linear_readout(train, train_labels, test, test_labels, l2=1e-3):
    """Classify by logistic regression → accuracy in percent.
        min over W, b of mean cross-entropy + l2/2 ‖W‖²

    train is (n, D), test is (m, D), and their labels are (n,) and (m,). Features are standardised
    by the mean and the deviation of the training set. L-BFGS starts from zero and stops when the
    gradient is at most 1e-4, when the loss stands still, or after 200 steps. Nothing is random."""
    check_finite(train=train, test=test)
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

    # autocast caches weights, so it would miss that L-BFGS changes them
    with torch.autocast(x.device.type, enabled=False):
        solver.step(objective)
        right = F.linear((test - mean) / std, weight, bias).argmax(1) == test_labels
    return 100 * float(right.float().mean())


@torch.no_grad()
def uniformity(z, t=2.0):
    """Measure how evenly the rows of z (n, D) cover the unit sphere.
        log E e^{−t ‖x − y‖²}    over all pairs of different rows x, y, projected to the sphere
    Lower is more even. It is 0 if all rows are equal. Ref: [5]; [4] Eq. 10, negated"""
    n = len(z)
    require(n > 1, "z", f"{n} row", "at least two rows")
    # with itself as positive, row i has the loss log Σ_j e^{2t cos_ij} − 2t
    options = {"objective": "decoupled", "temperature": 0.5 / t, "reduction": "none"}
    losses = hardneg.contrastive_loss(z, negatives=z, positive_index=range(n), **options)
    return losses.logsumexp(0) - math.log(n * n - n)


@torch.no_grad()
def tolerance(z, labels):
    """Measure how near the samples of a class are, by the mean cosine of pairs with one label.
    z is (n, D), labels are (n,), and the result is in [−1, 1]. Ref: [4] Eq. 11, but averaged over
    the pairs with one label, as in Table 1 there"""
    check_finite(z=z)
    z, labels = hardneg.unit(z), labels.long()
    counts = labels.bincount().to(z.dtype)
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, labels, z)  # (classes, D)
    cosines = sums.square().sum() - z.square().sum()  # minus pairs of a row and itself
    pairs = (counts * (counts - 1)).sum()
    return cosines / pairs


def check_finite(**given):
    """Raise an error that names the features which have NaN or inf."""
    for name, x in given.items():
        bad = (~x.isfinite()).any(1).sum()
        if bad:
            reason = f"{name} has NaN or inf in {bad} of {len(x)} rows. They have to be finite."
            raise hardneg.NotFinite(f"{reason} If an encoder made them, try a lower lr.")
