"""Tests of hardneg.py, in groups.

`python -m pytest test_hardneg.py -k TestOracle` runs one group.
`BLOCK_SIZE=1 python -m pytest test_hardneg.py` sets the block size of every call without one.

Embeddings are random: similarities tie, and losses have kinks, only where a test wants it.
"""

import contextlib
import copy
import gc
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.optimize import minimize
from scipy.special import logsumexp, rel_entr
from scipy.stats import norm
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import datasets
from torchvision.transforms import functional as transforms

import hardneg
import reference_numpy as oracle
import train
from hardneg import contrastive_loss

if "BLOCK_SIZE" in os.environ:
    hardneg._block_size = lambda *_: int(os.environ["BLOCK_SIZE"])

settings.register_profile(
    "hardneg",
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("hardneg")
pytestmark = pytest.mark.filterwarnings("ignore:Sinkhorn", "ignore:debiasing")

INF = math.inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRESETS = sorted(hardneg.PRESETS)
PAIRS = list(itertools.product(hardneg.WEIGHTS, hardneg.OBJECTIVES))
WEIGHT_OPTIONS = {
    "uniform": {},
    "tilted": {"beta": 1.5},
    "hardest": {},
    "top": {"alpha": 0.35},
    "transported": {"epsilon": 2.0, "cost": "exp", "kappa": 2.0, "temperature": 0.5},
}
SEEDS = {"seed": st.integers(0, 2**32 - 1)}
BATCHES = {**SEEDS, "v": st.integers(2, 4), "b": st.integers(2, 4), "d": st.integers(2, 4)}
SAMPLES = {**SEEDS, "b": st.integers(2, 5)}
MATRICES = {**SEEDS, "a": st.integers(1, 4), "n": st.integers(1, 6)}
BLOCK_SIZES = st.sampled_from([None, 0, 1, 3])
NO_NUMBERS = math.nan, "0.5", torch.ones(2)


def numpy(x):
    return x.detach().double().numpy() if torch.is_tensor(x) else np.asarray(x, dtype=np.float64)


def close(got, want, tolerance, floor=1.0):
    """Assert equal shapes and infinities, and small errors.

    An error may be tolerance · max(floor, largest number).
    """
    got, want = numpy(got), numpy(want)
    assert got.shape == want.shape
    scale = max(floor, np.abs(want[np.isfinite(want)]).max(initial=0))
    with np.errstate(invalid="ignore"):
        off = np.where(got == want, 0, np.abs(got - want))
    assert (off <= tolerance * scale).all(), (
        f"off by {off.max() / scale:.1e}: {got} instead of {want}"
    )


def same(got, want, tolerance):
    """Assert that two pairs of value and gradient are close.

    The scale of gradients is at least 1e-3.
    """
    close(got[0], want[0], tolerance)
    close(got[1], want[1], tolerance, floor=1e-3)


def finite(*values):
    return all(bool(x.isfinite().all()) for x in values)


def rng(seed):
    return np.random.default_rng(seed)


def log_weights(name, logits, **options):
    """Return the log weights of a rule as the loss uses them.

    Those of uniform and top are 0 or −∞; all others have mean 1 over the candidates.
    """
    log_w = getattr(hardneg, name)(logits, **options)
    if name in ("uniform", "top"):
        return log_w
    count = (logits > -INF).sum(-1)
    return hardneg.mean_one(log_w, count.to(logits.dtype).log())


def tilted(logits, beta):
    return hardneg.mean_one(hardneg.tilted(logits, beta))


def transported(logits, *options, **named_options):
    return hardneg.mean_one(hardneg.transported(logits, *options, **named_options))


def normal(seed, *shape):
    return rng(seed).standard_normal(shape)


def negatives_of(x, k, each=0):
    """Take the last K rows as the option `negatives`, for `each` > 0 as (B, each, D)."""
    rows = x[len(x) - k :]
    return {"negatives": rows.reshape(-1, each, x.shape[1]) if each else rows} if k else {}


def tensors(x, v, k=0, dtype=torch.float64, grad=False, each=0):
    """Split rows (V·B + K, D) into a list of V views and, if K > 0, the option `negatives`."""
    x = torch.as_tensor(x).to(dtype)
    parts = [part.clone().requires_grad_(grad) for part in x[: len(x) - k].chunk(v)]
    return parts, {
        name: z.clone().requires_grad_(grad) for name, z in negatives_of(x, k, each).items()
    }


def ours(x, v, k=0, dtype=torch.float64, weight=None, each=0, **options):
    """Compute value and gradient of hardneg; `weight` sums the losses of reduction="none"."""
    views, bank = tensors(x, v, k, dtype, grad=True, each=each)
    value = contrastive_loss(*views, **bank, **options)
    scalar = value if weight is None else value @ torch.as_tensor(weight).to(value.dtype)
    gradients = torch.autograd.grad(scalar, [*views, *bank.values()])
    return value.detach(), torch.cat([gradient.flatten(0, -2) for gradient in gradients])


def theirs(x, v, k=0, weight=None, each=0, **options):
    """Compute value and gradient of the oracle."""

    def loss(rows):
        bank = negatives_of(rows, k, each)
        return oracle.contrastive_loss(*np.split(rows[: len(rows) - k], v), **bank, **options)

    return loss(x), oracle.gradient(loss if weight is None else lambda rows: loss(rows) @ weight, x)


def agree(x, v, k=0, tolerance=1e-10, block_size=None, weight=None, **options):
    same(
        ours(x, v, k, weight=weight, block_size=block_size, **options),
        theirs(x, v, k, weight, **options),
        tolerance,
    )


def feasible(allowed):
    """Return whether a coupling can use every allowed entry.

    Otherwise Sinkhorn's steps converge slowly.
    """
    used = oracle.usable(allowed) == allowed
    return bool(used.all()) and oracle.sinkhorn(np.where(allowed, 0, -INF))[3] < 1e-6


def allowed_pairs(b, v, k=0, labels=None, positive_index=None):
    """Return the mask (A, N) of a batch of V·B anchors, or of B anchors and a bank of K rows."""
    owners = np.arange(b) if labels is None else np.asarray(labels[:b])
    if k == 0:
        return np.tile(owners, v)[:, None] != np.tile(owners, v)
    others = (
        np.asarray(labels[b:]) if labels is not None and len(labels) == b + k else np.full(k, -1)
    )
    allowed = owners[:, None] != others
    if positive_index is not None:
        allowed[np.arange(b), positive_index] = False
    return allowed


def masked_logits(seed, a, n, share=0.3, empty=False):
    """Draw logits (a, n) and mask a share of them.

    No row is masked as a whole, except the first one if `empty`.
    """
    generator = rng(seed)
    logits = generator.uniform(-2, 2, (a, n))
    hidden = generator.random((a, n)) < share
    hidden[np.arange(a), generator.integers(n, size=a)] = False
    logits[hidden] = -INF
    if empty:
        logits[0] = -INF
    return logits


class Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that any operation allocates."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        given, made = (
            [x.untyped_storage() for x in tree_leaves(tree) if torch.is_tensor(x)]
            for tree in ((arguments, options), out)
        )
        known = {storage.data_ptr() for storage in given}
        self.bytes = max(
            [self.bytes, *(new.nbytes() for new in made if new.data_ptr() not in known)]
        )
        return out


# ---- The oracle, limits


class TestOracle:
    """Value and gradient equal the papers' formulas to 1e-10."""

    @pytest.mark.parametrize("loss", PRESETS)
    @given(
        **BATCHES,
        temperature=st.floats(0.2, 2),
        normalize=st.booleans(),
        block_size=BLOCK_SIZES,
        reduction=st.sampled_from(["mean", "sum", "none"]),
    )
    def test_presets(self, loss, seed, v, b, d, normalize, reduction, **options):
        x, weight = normal(seed, v * b, d), normal(seed + 1, v * b) if reduction == "none" else None
        agree(
            x if normalize else oracle.unit(x),
            v,
            loss=loss,
            weight=weight,
            normalize=normalize,
            reduction=reduction,
            **options,
        )

    @pytest.mark.parametrize("weights, objective", PAIRS)
    @given(
        **SAMPLES,
        v=st.integers(2, 3),
        classes=st.sampled_from([None, 2, 4]),
        beta=st.floats(0, 5),
        tau_plus=st.sampled_from([0.0, 0.1, 0.3]),
        alpha=st.floats(0.05, 1),
        epsilon=st.floats(0.2, 2),
        cost=st.sampled_from(["sqeuclidean", "exp"]),
        kappa=st.floats(3, 5),
        margin=st.floats(0, 1),
        detach_weights=st.sampled_from([None, True]),
        block_size=BLOCK_SIZES,
    )
    def test_pairs_in_a_batch(self, weights, objective, seed, v, b, classes, alpha, **options):
        labels = None if classes is None else rng(seed).integers(classes, size=b)
        assume(weights != "transported" or feasible(allowed_pairs(b, v, labels=labels)))
        agree(
            normal(seed, v * b, 3),
            v,
            weights=weights,
            objective=objective,
            labels=labels,
            alpha=round(alpha, 2),
            **options,
        )

    @given(**BATCHES, tau_plus=st.sampled_from([0.0, 0.1]), block_size=BLOCK_SIZES)
    def test_gradient_through_the_coupling(self, seed, v, b, d, **options):
        # Sinkhorn stops when its marginals are right to 1e-12.
        # Its derivative still converges then: hence the tolerance of 1e-7.
        agree(normal(seed, v * b, d), v, loss="ot", detach_weights=False, tolerance=1e-7, **options)

    @pytest.mark.parametrize("loss", ["hard", "hard-simple"])
    @pytest.mark.parametrize("block_size", [0, 1, None])
    def test_quantile_keeps_ties(self, loss, block_size):
        """Equal rows tie at the threshold, and labels leave the last sample more candidates."""
        x = np.repeat(normal(3, 4, 3), 2, axis=0)[[0, 2, 4, 6, 1, 3, 5, 7]]
        for labels, alpha in itertools.product((None, [0, 0, 0, 1]), (0.2, 0.5, 0.9)):
            agree(x, 2, loss=loss, alpha=alpha, labels=labels, block_size=block_size)

    @pytest.mark.parametrize("name", WEIGHT_OPTIONS)
    @given(**MATRICES, tied=st.booleans(), alpha=st.floats(0.01, 1), beta=st.floats(0, 20))
    def test_weights(self, name, seed, a, n, tied, alpha, beta):
        logits = masked_logits(seed, a, n, empty=a > 1 and name != "transported")
        logits = np.round(logits / 2) if tied else logits
        assume(name != "transported" or feasible(logits > -INF))
        options = WEIGHT_OPTIONS | {"top": {"alpha": round(alpha, 2)}, "tilted": {"beta": beta}}
        log_w = getattr(hardneg, name)(torch.tensor(logits), **options[name])
        wanted = getattr(oracle, name)(logits, **options[name])
        assert torch.equal(log_w > -INF, torch.tensor(wanted > -INF))
        used = (logits > -INF).any(1)
        found = log_weights(name, torch.tensor(logits[used]), **options[name])
        close(found, wanted[used], 1e-10)

    @pytest.mark.parametrize(
        "alpha, n, kept", [(0.07, 100, 7), (0.1, 9, 1), (2 / 3, 3, 2), (1 / 6, 60, 10)]
    )
    def test_top_keeps_the_ceiling(self, alpha, n, kept):
        assert (hardneg.top(torch.tensor(normal(n, 1, n)), alpha) == 0).sum() == kept

    @pytest.mark.parametrize("objective", ["debiased", *hardneg.OBJECTIVES])
    @settings(max_examples=30)
    @given(
        **SEEDS,
        weights=st.sampled_from(["uniform", "tilted", "hardest", "top"]),
        a=st.integers(2, 4),
        m=st.integers(1, 3),
        n=st.integers(1, 6),
        tau_plus=st.sampled_from([0, 0.1, 0.4, 0.9]),
        t=st.floats(0.3, 2),
        margin=st.floats(0, 1),
    )
    def test_objectives(self, objective, seed, weights, a, m, n, tau_plus, t, margin):
        pos, neg = normal(seed, a, m), masked_logits(seed, a, n, empty=objective != "debiased")
        if objective == "ppcl":
            pos[1:, 1:][normal(seed + 1, a - 1, m - 1) > 0] = -INF  # anchors with fewer positives
        log_w, log_w_pos = (
            getattr(oracle, weights)(neg, **WEIGHT_OPTIONS[weights]),
            oracle.tilted(pos, 0.7),
        )
        options = {"tau_plus": tau_plus, "temperature": t, "log_w_pos": log_w_pos}
        if objective == "simple":
            options = {}
        elif objective == "triplet":
            options = {"margin": margin}
        wanted = getattr(oracle, objective)(pos, neg, log_w, **options)
        if "log_w_pos" in options:
            options["log_w_pos"] = torch.tensor(log_w_pos)
        got = getattr(hardneg, objective)(*map(torch.tensor, (pos, neg, log_w)), **options)
        close(got, wanted, 1e-10)

    @pytest.mark.parametrize("objective", hardneg.OBJECTIVES)
    @given(
        **SEEDS,
        filling=st.sampled_from([-INF, -1.0, 0.3, 50.0]),
        tau_plus=st.sampled_from([0, 0.1]),
    )
    def test_candidates_without_weight_do_not_count(self, objective, seed, filling, tau_plus):
        pos, neg, log_w = (
            normal(seed, 4, 2),
            normal(seed + 1, 4, 5),
            masked_logits(seed, 4, 5, empty=True),
        )
        options, found = {} if objective in ("simple", "triplet") else {"tau_plus": tau_plus}, []
        for values in (neg, np.where(log_w == -INF, filling, neg)):
            leaf = torch.tensor(values, requires_grad=True)
            losses = getattr(hardneg, objective)(
                torch.tensor(pos), leaf, torch.tensor(log_w), **options
            )
            found.append((losses, torch.autograd.grad(losses.sum(), leaf)[0]))
        same(*found, 1e-12)
        assert (numpy(found[1][1])[log_w == -INF] == 0).all()

    @pytest.mark.parametrize("loss", PRESETS)
    @given(
        **BATCHES,
        k=st.sampled_from([0, 3]),
        labelled=st.booleans(),
        temperature=st.floats(0.1, 2),
        tau_plus=st.sampled_from([None, 0.0, 0.3]),
        block_size=BLOCK_SIZES,
        objective=st.sampled_from([None, "decoupled"]),
    )
    def test_statistics(self, loss, seed, v, b, d, k, labelled, block_size, **options):
        options["loss"] = loss
        if labelled and loss != "ot":
            options["labels"] = rng(seed).integers(2, size=b)
            assume(
                k or len(set(options["labels"])) == 2
            )  # else no anchor has candidates to average over
        views, bank = tensors(normal(seed, v * b + k, d), v, k)
        value, stats = contrastive_loss(
            *views, **bank, **options, block_size=block_size, return_stats=True
        )
        want = oracle.statistics(
            *map(numpy, views), **{n: numpy(z) for n, z in bank.items()}, **options
        )
        assert stats.keys() == want.keys()
        close(torch.stack([stats[name].double() for name in want]), list(want.values()), 1e-6)
        close(value, contrastive_loss(*views, **bank, **options), 1e-12)

    @pytest.mark.parametrize("loss", PRESETS)
    @given(
        **SEEDS,
        k=st.sampled_from([0, 3]),
        t=st.floats(0.2, 1.5),
        size=st.sampled_from([1, 3, None]),
        detach=st.sampled_from([None, False]),
    )
    def test_learned_temperature(self, loss, seed, k, t, size, detach):
        x, options = normal(seed, 8 + k, 3), {"loss": loss, "detach_weights": detach}
        if loss != "ot" and seed % 2:
            negative_mask = rng(seed).random((4, 3) if k else (8, 8)) > 0.5
            negative_mask[0] = False
            options["negative_mask"] = negative_mask

        def gradients(block_size):
            views, bank = tensors(x, 2, k, grad=True)
            leaf = torch.tensor(t, dtype=torch.float64, requires_grad=True)
            value = contrastive_loss(
                *views, **bank, **options, temperature=leaf, block_size=block_size
            )
            return torch.autograd.grad(
                value, [leaf, *views, *bank.values()], materialize_grads=True
            )

        slope = oracle.central_difference(
            lambda s: oracle.contrastive_loss(
                x[:4], x[4:8], negatives=x[8:] if k else None, **options, temperature=float(s)
            ),
            np.array(t),
        )
        close(gradients(0)[0], slope, 1e-7)
        for got, want in zip(gradients(size), gradients(0), strict=True):
            close(got, want, 1e-10)

    @given(**SEEDS, n=st.integers(3, 8), d=st.integers(2, 4), t=st.floats(0.5, 4))
    def test_measures(self, seed, n, d, t):
        (x, y), labels = torch.tensor(normal(seed, 2, n, d)), torch.arange(n) % 2
        z, w = oracle.unit(x.numpy()), oracle.unit(y.numpy())
        close(hardneg.unit(x), z, 1e-14)
        close(hardneg.uniformity(x, t), oracle.uniformity(z, t), 1e-10)
        close(hardneg.alignment(x, y), oracle.alignment(z, w), 1e-10)
        close(hardneg.tolerance(x, labels), oracle.tolerance(z, labels.numpy()), 1e-10)

    @pytest.mark.parametrize("loss", ["hcl", "ppcl", "triplet"])
    def test_complex_step_is_the_central_difference(self, loss):
        def function(rows):
            return oracle.contrastive_loss(*np.split(rows, 2), loss=loss)

        x = normal(7, 8, 3)
        close(oracle.gradient(function, x), oracle.central_difference(function, x), 1e-6)


class TestPublishedCode:
    """Compare with published code: the loss, and the norm and one projection of its gradient.

    Each published function ran once, on the CPU in float64. There `.cuda()` did nothing.
    The functions of hcl and ot got unit rows.

    hcl     joshr17/HCL 7b4647f, image/main.py, criterion: "easy" at β = τ⁺ = 0, else "hard".
            At β = 0 chingyaoc/DCL 7d6345f, main.py, train, gives the same bits.
    ot      rjiang03/HCL-OT 89c8792, main.py, OT_hard, with POT 0.9.7.
            Its default cost ‖x − y‖² is twice the paper's, so our epsilon is half of its own.
            For "exp" the two are equal. Its Sinkhorn stops at 1e-9: hence the tolerance 1e-8.
    simclr, ppcl
            In this order: lightly 1.6.0 NTXentLoss (3 cases), pytorch-metric-learning 2.9.0
            NTXentLoss (1) and SupConLoss (2), info-nce-pytorch 0.1.4 InfoNCE (2).
    CALLS   The same packages in the README's order, and open_clip 3.3.0 and
            sentence-transformers 6.2.0.
    BANK    WangFeng18/UnsupervisedLearningCodes 4f817da, objective.py, without its import of
            sklearn. In this order: PointLoss, HardNegativePointLoss, FlatLoss, HardFlatLoss,
            SingleLoss.
    """

    # A case: loss, views or source of the negatives, samples, t, options; value, norm, projection.
    BATCH = [
        (
            "hcl",
            2,
            4,
            0.5,
            dict(tau_plus=0.0, beta=0.0),
            2.89919106559,
            0.482717240596,
            -0.459201896528,
        ),
        (
            "hcl",
            2,
            9,
            1.0,
            dict(tau_plus=0.1, beta=0.0),
            2.83214016943,
            0.196835401277,
            0.0624100798361,
        ),
        (
            "hcl",
            2,
            7,
            0.5,
            dict(tau_plus=0.0, beta=1.0),
            3.34158709207,
            0.5318910872,
            0.202192192271,
        ),
        (
            "hcl",
            2,
            8,
            0.07,
            dict(tau_plus=0.0, beta=1.0),
            8.60868580947,
            2.74668812975,
            1.46538361581,
        ),
        (
            "hcl",
            2,
            6,
            1.0,
            dict(tau_plus=0.1, beta=1.0),
            2.62203662475,
            0.244370399768,
            0.372077708834,
        ),
        (
            "hcl",
            2,
            13,
            0.7,
            dict(tau_plus=0.2, beta=3.0),
            3.86918594832,
            0.275449260631,
            -0.0390424078791,
        ),
        (
            "hcl",
            2,
            16,
            0.3,
            dict(tau_plus=0.5, beta=0.5),
            3.74084068897,
            0.648599769846,
            0.504520676036,
        ),
        (
            "hcl",
            2,
            32,
            0.5,
            dict(tau_plus=0.1, beta=1.0),
            4.7988127109,
            0.206181325035,
            0.167929728657,
        ),
        ("ot", 2, 4, 0.5, dict(epsilon=0.35), 3.2381149586, 0.533612910803, -0.531052267578),
        ("ot", 2, 6, 0.5, dict(epsilon=0.15), 3.29513930559, 0.517601048352, 0.765431045681),
        ("ot", 2, 8, 0.2, dict(epsilon=0.35), 4.02232603878, 0.850940453518, 0.131778684055),
        (
            "ot",
            2,
            9,
            1.0,
            dict(tau_plus=0.1, epsilon=0.5),
            3.08525305879,
            0.201930211935,
            0.0622784908238,
        ),
        (
            "ot",
            2,
            12,
            0.3,
            dict(tau_plus=0.5, epsilon=0.5),
            4.1684876657,
            0.757028146603,
            -0.932520592425,
        ),
        ("ot", 2, 16, 0.5, dict(epsilon=0.05), 4.27900478931, 0.285184975422, 0.0571579745989),
        (
            "ot",
            2,
            5,
            0.5,
            dict(epsilon=3.0, cost="exp", kappa=1.0),
            2.712199573,
            0.5597104522,
            1.204938736,
        ),
        (
            "ot",
            2,
            7,
            1.0,
            dict(epsilon=2.0, cost="exp", kappa=1.5),
            2.841647908,
            0.2475069402,
            0.1233764028,
        ),
        ("simclr", 2, 6, 0.5, dict(), 2.73001990699, 0.435968623925, 0.709090637495),
        ("simclr", 2, 9, 0.1, dict(), 6.51997871633, 2.06642814593, 0.567165190255),
        ("simclr", "bank", 7, 0.2, dict(), 5.52672203605, 1.27848908268, -0.265588364955),
        ("simclr", 2, 8, 1.0, dict(), 2.67134440416, 0.163524814629, 0.0585711613931),
        ("ppcl", 3, 6, 0.5, dict(), 3.23857356663, 0.250278518668, -0.16162763027),
        (
            "ppcl",
            2,
            6,
            0.1,
            dict(labels=[0, 1, 2, 0, 1, 2]),
            5.41255540882,
            1.77789629419,
            1.18663830712,
        ),
        ("simclr", "keys", 11, 0.1, dict(), 4.87189335538, 1.84499389679, 1.62841498261),
        ("simclr", "bank", 9, 0.5, dict(), 3.89158721069, 0.350686915759, 0.145152705052),
    ]
    BANK = [  # loss, samples, t, k, weight of the own row in its anchor; value, norm, projection
        ("simclr", 5, 0.07, 41, 1, 6.51332611693, 2.55672336183, -0.0968299165182),
        ("simclr", 6, 0.2, 41, 2, 1.89687225638, 0.340015913231, 0.386111959109),
        ("simclr", 8, 0.07, 41, -1, 12.4180668505, 1.53654766771, -2.27943260634),
        ("hard", 4, 0.1, 5, 5, 0.561651425043, 0.231469461099, -0.173917047303),
        ("hard", 9, 0.3, 9, 4, 1.3985288197, 0.100488317721, 0.0294270603123),
        ("hard", 11, 0.3, 10, -4, 6.68062711925, 0.165202633854, 0.0228518669533),
        ("hard", 5, 0.07, 4, -3, 15.5723170296, 0.75835360279, 0.183512909481),
        ("simple", 6, 1, 41, 2, -0.631405195504, 0.0897771502934, 0.117300449586),
        ("hard-simple", 9, 1, 9, 4, -0.289247403881, 0.0345776711435, 0.0188483780541),
        ("hard-simple", 12, 1, 10, -4, 1.29246551674, 0.0410027387429, -0.00339516371578),
        ("triplet", 7, 1, 2, 2, 0.20097283717, 0.106497426062, -0.0304519850591),
    ]
    CALLS = [  # value, norm, projection
        (2.98841832198, 1.08630541418, 0.727559923599),
        (2.83405002174, 1.15381455348, 0.56528918891),
        (2.04514859482, 1.08018365701, 0.778002641582),
        (2.79175843402, 0.933170347727, 0.347625347815),
        (1.17761394216, 0.999321930125, 1.56922649859),
        (2.79175843402, 0.933170347727, 0.347625347815),
        (3.99845144176, 2.92790991494, 2.90986489536),
        (3.17041338841, 0.977547868993, 0.522631071643),
        (4.51519113613, 1.04841234185, 0.447859253384),
        (3.43595912137, 0.558609503361, 0.343165064833),
    ]

    def normal(self, seed, *shape):
        return torch.tensor(np.random.default_rng(seed).standard_normal(shape))

    def check(self, loss, x, direction, expected, tolerance=1e-10):
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        figures = loss.item(), gradient.norm().item(), (gradient * direction).sum().item()
        np.testing.assert_allclose(figures, expected, rtol=tolerance)

    @pytest.mark.parametrize("case", BATCH)
    def test_batch(self, case):
        loss, where, samples, t, options, *expected = case
        x, direction = self.normal(samples, 2, samples * (3 if where == 3 else 2), 8)
        views = x.requires_grad_().split(samples)
        if where == "bank":
            options = {"negatives": self.normal(0, 41, 8)}
        elif where == "keys":  # the second views of the other samples
            options = {"negatives": views[1], "positive_index": torch.arange(samples)}
        value = hardneg.contrastive_loss(*views, loss=loss, temperature=t, **options)
        self.check(value, x, direction, expected, 1e-8 if loss == "ot" else 1e-10)

    def test_calls_of_the_readme(self):
        table = README.split("## Coming from")[1].split("## Which")[0]
        calls = re.findall(r"`(\(?contrastive_loss\(x[^`]*)`", table)
        calls.insert(3, calls[3])  # negatives for all, and for each
        x, y, given, queue, direction = (
            self.normal(k + 1, *shape)
            for k, shape in enumerate([(6, 8), (6, 8), (6, 2, 8), (9, 8), (6, 8)])
        )
        scale = torch.tensor(12.5, dtype=torch.float64, requires_grad=True)
        names = {
            "torch": torch,
            "contrastive_loss": contrastive_loss,
            "x": x.requires_grad_(),
            "y": y,
            "a": 3.0,
            "t": 0.2,
            "scale": scale,
            "queue": queue,
            "i": torch.arange(6),
            "c": torch.arange(6) % 3,
        }
        for k, (call, expected) in enumerate(zip(calls, self.CALLS, strict=True)):
            value = eval(call, names | {"n": queue if k == 3 else given})
            self.check(value, x, direction, expected)
            if "scale" in call:
                close(torch.autograd.grad(value, scale)[0], 0.273304946416, 1e-11)

    @pytest.mark.parametrize("case", BANK)
    def test_bank(self, case):
        """Their k nearest rows include the anchor's own row if it is near.

        Their logarithm adds 1e-7.
        """
        loss, samples, t, k, weight, *expected = case
        x, direction = self.normal(samples, 2, samples, 8)
        bank = F.normalize(self.normal(0, 41, 8))
        positive_index = 3 * torch.arange(samples)
        positives = bank[positive_index]
        # If False, no own row is among the k, so the positive is not in the denominator.
        near = weight > -2
        anchors = x.requires_grad_() + weight * positives
        losses = hardneg.contrastive_loss(
            anchors,
            positives,
            negatives=bank,
            positive_index=positive_index,
            loss=loss,
            temperature=t,
            alpha=(k - near) / 40,
            reduction="none",
        )
        if loss in ("simclr", "hard"):
            losses = -torch.log((torch.exp(-losses) if near else 1 / torch.expm1(losses)) + 1e-7)
        elif loss == "triplet":  # ours compares squared distances, theirs cosines
            losses = losses / 2
        elif near:  # their mean over k includes the positive
            losses = (1 - 1 / k) * losses
        self.check(losses.mean(), x, direction, expected)


class TestLimits:
    """Every method becomes another one, or a closed form, at the ends of its parameters."""

    @pytest.mark.parametrize(
        "options, other",
        [
            ({"loss": "hcl", "beta": 0.0, "tau_plus": 0.2}, {"loss": "debiased", "tau_plus": 0.2}),
            ({"loss": "hcl", "beta": 0.0, "tau_plus": 0.0}, {"loss": "simclr"}),
            ({"loss": "debiased", "tau_plus": 0.0}, {"loss": "simclr"}),
            ({"loss": "hard", "alpha": 1.0}, {"loss": "simclr"}),
            ({"loss": "hard-simple", "alpha": 1.0}, {"loss": "simple"}),
            (
                {"loss": "hard", "alpha": 1e-6},
                {"loss": "hard", "alpha": 0.05},
            ),  # both keep one candidate
        ],
    )
    @given(**BATCHES)
    def test_same_loss(self, options, other, seed, v, b, d):
        x = normal(seed, v * b, d)
        same(ours(x, v, **options), ours(x, v, **other), 1e-11)

    @settings(max_examples=30)
    @given(**BATCHES, block_size=BLOCK_SIZES, labelled=st.booleans())
    def test_ppcl_without_labels_is_simclr_for_two_views_alone(
        self, seed, v, b, d, block_size, labelled
    ):
        """With M positives and no shared label PPCL is larger by logsumexp p − mean p ≥ log M."""
        x, labels = normal(seed, v * b, d), rng(seed).permutation(b) if labelled else None
        ppcl = ours(x, v, loss="ppcl", labels=labels, block_size=block_size)
        simclr = ours(x, v, loss="simclr")
        if v == 2:
            same(ppcl, simclr, 1e-11)
        assert ppcl[0] - simclr[0] >= math.log(v - 1) - 1e-12

    @given(**SAMPLES, more=st.integers(1, 3))
    def test_large_epsilon_is_not_uniform_in_a_bank_with_own_rows(self, seed, b, more):
        """Uniform weights would give too much mass to the rows that every anchor may use."""
        allowed = allowed_pairs(b, 2, b + more, positive_index=np.arange(b))
        logits = np.where(allowed, rng(seed).uniform(-1, 1, allowed.shape), -INF)
        weights = numpy(transported(torch.tensor(logits), 1e8).exp())
        close(weights, oracle.product_coupling(allowed) * b * (b + more - 1), 1e-6)
        assert (weights[:, :b][allowed[:, :b]] > 1.01).all() and (weights[:, b:] < 0.99).all()

    @given(**SAMPLES, d=st.integers(2, 4), alpha=st.sampled_from([0.1, 0.4, 1.0]))
    def test_hard_at_high_temperature_is_hard_simple(self, seed, b, d, alpha):
        x, t = normal(seed, 2 * b, d), 1e3
        kept = max(1, math.ceil(round(alpha * 2 * (b - 1), 9)))
        hard, flat = (
            ours(x, 2, loss=loss, alpha=alpha, temperature=t) for loss in ("hard", "hard-simple")
        )
        close(hard[0], math.log(1 + kept) + kept / (1 + kept) / t * flat[0], 2 / t**2)
        close(t * hard[1], kept / (1 + kept) * flat[1], 10 / t)

    @pytest.mark.parametrize("a, n", [(4, 4), (3, 6)])
    @given(**SEEDS)
    def test_small_epsilon_is_optimal_transport(self, a, n, seed):
        """The entropic coupling costs at most ε log N more.

        Its relative entropy is at most log N.
        """
        cost = rng(seed).uniform(0, 2, (a, n))
        kernel = torch.tensor(-cost / 0.05)
        f, g, _ = hardneg.sinkhorn(kernel, tolerance=1e-7, max_steps=4000)
        spent = float((torch.exp(f[:, None] + kernel + g) * torch.tensor(cost)).sum())
        least = float((oracle.exact_coupling(cost) * cost).sum())
        if a == n:
            close(oracle.assignment_cost(cost), least, 1e-9)
        assert least - 1e-6 <= spent <= least + 0.05 * math.log(n) + 1e-6

    @pytest.mark.parametrize("alpha", [1.0, 0.4, 0.1])
    @given(**MATRICES, t=st.floats(0.05, 2))
    def test_gradients_are_softmax_shares(self, alpha, seed, a, n, t):
        """A share of the softmax pushes each candidate, and their sum pulls the positive.

        Ref: [4] Eq. 2, 4, 5, 8.
        """
        pos, neg = rng(seed).uniform(-1, 1, (a, 1)), masked_logits(seed, a, n) / 2
        p, s = torch.tensor(pos, requires_grad=True), torch.tensor(neg, requires_grad=True)
        loss = hardneg.nce(p / t, s / t, hardneg.top(s / t, alpha)).sum()
        by_pos, by_neg = torch.autograd.grad(loss, (p, s))
        kept = np.where(oracle.top(neg, alpha) == 0, neg, -INF)
        want_pos, want_neg = oracle.softmax_gradients(pos, kept, t)
        close(by_pos[:, 0], want_pos, 1e-10)
        close(by_neg, want_neg, 1e-10)
        close(by_neg.sum(1), -by_pos[:, 0], 1e-10)


# ---- Theorems


def similarities(x, y, labels=None):
    """Compute a batch's cosines: pos (2B, 1) and neg (2B, 2B), −∞ where j is no negative of i."""
    z, b = oracle.unit(np.concatenate([x, y])), len(x)
    cosines, places = z @ z.T, np.arange(2 * b)
    return (
        cosines[places, (places + b) % (2 * b)][:, None],
        np.where(allowed_pairs(b, 2, labels=labels), cosines, -INF),
    )


def hardness(x, y, epsilon=None, **options):
    """Compute E_P[cos(x, x⁻)] from hardneg's difference of means.

    Negatives are uniform if epsilon is None.
    """
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    weights = {} if epsilon is None else {"weights": "transported", "epsilon": epsilon}
    losses = contrastive_loss(x, y, loss="simple", reduction="none", **weights, **options)
    aligned = (hardneg.unit(x) * hardneg.unit(y)).sum(1)
    return float((losses + (aligned if "negatives" in options else aligned.repeat(2))).mean())


def some_coupling(seed, allowed):
    """Draw a coupling with uniform marginals on the allowed entries.

    For odd seeds it is an extreme point.
    """
    cost = np.where(allowed, rng(seed).uniform(0, 3, allowed.shape), INF)
    return oracle.exact_coupling(cost) if seed % 2 else oracle.sinkhorn(-cost)[0]


def check_packing(counts, d, most, spread):
    """Minimise L*_∞ over points on the sphere, counts[c] of class c, and return the class centres.

    β grows first, as L*_∞ has kinks; then the steps on L*_∞ shrink.
    The function asserts a packing of mean `most`.
    """
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    other = torch.cat([torch.arange(n).roll(1) + sum(counts[:c]) for c, n in enumerate(counts)])
    z = torch.tensor(normal(0, len(labels), d), requires_grad=True)

    def loss(weights, beta=1.0):
        return contrastive_loss(
            z,
            z[other],
            loss="simple",
            labels=labels,
            temperature=1,
            block_size=0,
            weights=weights,
            beta=beta,
        )

    optimizer = torch.optim.Adam([z], lr=0.05)
    for step in range(300):
        optimizer.zero_grad()
        loss("tilted", beta=2 * 100 ** (step / 300)).backward()
        optimizer.step()
    for step in range(200):
        z.data = hardneg.unit(z.data)
        (gradient,) = torch.autograd.grad(loss("hardest"), z)
        z.data -= 0.03 * 1e-3 ** (step / 200) * len(labels) * gradient
    classes = [oracle.unit(numpy(z)[labels == c]) for c in range(len(counts))]
    assert max(np.ptp(rows, axis=0).max() for rows in classes) < spread
    centres = oracle.unit(np.array([rows.mean(0) for rows in classes]))
    assert (
        (1 - 1e-3) * most
        <= oracle.ball_packing(centres, np.array(counts) / sum(counts))
        <= most + 1e-9
    )
    close(loss("hardest"), -most / 2, 1e-3)
    return centres


class TestTheorems:
    """What the papers prove holds: hardneg computes the loss, the oracle its bound."""

    @pytest.mark.parametrize(
        "beta, exact, published",
        [(0, 1.197, 1.197), (1, 1.708, 2.106), (2, 2.401, 3.265), (4, 4.139, 5.147)],
    )
    def test_eq_2_departs_from_its_definition(self, beta, exact, published):
        """Two classes: cosines N(0.6, 0.2²) with the own one, N(0, 0.3²) with the other."""
        quantiles, tau_plus, t = (np.arange(2000) + 0.5) / 2000, 0.1, 0.5
        own, other = (
            np.clip(norm.ppf(quantiles, *moments), -1, 1) / t for moments in ((0.6, 0.2), (0, 0.3))
        )
        candidates = np.concatenate([own, np.tile(other, 9)])  # p = 0.1 p⁺ + 0.9 p⁻
        tilt = np.exp(beta * candidates) * (np.arange(20000) >= 2000)
        defined = (tilt * np.exp(candidates)).sum() / tilt.sum()
        close(oracle.exact_tilted(own, candidates, beta, tau_plus), defined, 1e-11)
        close(defined, exact, 5e-4)
        pos, neg = own[None], candidates[None]
        eq_2 = oracle.debiased(
            pos, neg, oracle.tilted(neg, beta), tau_plus, t, oracle.tilted(pos, beta)
        )
        close(np.exp(eq_2[0]) / 20000, published, 5e-4)
        pos, neg = torch.tensor(pos), torch.tensor(neg)
        weights = tilted(neg, beta), tau_plus, t, tilted(pos, beta)
        close(hardneg.debiased(pos, neg, *weights), eq_2, 1e-11)
        assert (
            oracle.exact_tilted([2.0], [0.0, 0.5, 1.0, -1.0], 1, 0.1) < 0
        )  # it needs many positives

    # [2] Lemma 2, Theorem 1: without regularisation a constant encoder wins the game
    @given(
        **SEEDS,
        n=st.integers(2, 6),
        d=st.integers(2, 4),
        epsilon=st.sampled_from([0.02, 0.1, 0.5, 2.0]),
    )
    def test_worst_coupling_is_the_identity(self, seed, n, d, epsilon):
        """Its loss is 1 − E x·x⁺ ≥ 0; that of the entropic coupling is at most ε log n lower."""
        x, y = normal(seed, 2, n, d)
        z, aligned = oracle.unit(x), (oracle.unit(x) * oracle.unit(y)).sum(1)
        cost = numpy(hardneg.ground_cost(torch.tensor(z @ z.T)))
        plan = oracle.exact_coupling(cost)
        close((plan * cost).sum(), 0, 1e-9)

        def loss(coupling):
            with np.errstate(divide="ignore"):
                log_w = torch.tensor(np.log(n * n * coupling))
            return float(
                hardneg.simple(torch.tensor(aligned)[:, None], torch.tensor(z @ z.T), log_w).mean()
            )

        worst = loss(plan)
        close(worst, 1 - aligned.mean(), 1e-9)
        assert worst >= 0 and loss(some_coupling(seed, np.ones((n, n), bool))) <= worst + 1e-9
        value = hardness(x, y, epsilon, negatives=torch.tensor(x)) - aligned.mean()
        assert worst - epsilon * math.log(n) - 1e-4 <= value <= worst + 1e-9
        constant = np.ones((n, d))
        close(hardness(constant, constant, epsilon, negatives=torch.tensor(constant)), 1, 1e-12)

    @given(
        **SEEDS,
        n=st.integers(2, 6),
        q=st.floats(0.5, 20),
        t=st.floats(0.2, 2),
        margin=st.floats(0, 1),
    )
    def test_constant_encoder_is_optimal(self, seed, n, q, t, margin):
        """For convex non-decreasing ψ the worst coupling costs at least ψ(0).

        A constant encoder has this cost.
        """

        def worst(z, y, objective):  # one negative at a time
            pos = (z * y).sum(1).repeat_interleave(n)[:, None]
            cost = objective(pos, (z @ z.T).reshape(-1, 1), torch.zeros(n * n, 1, dtype=z.dtype))
            cost = numpy(cost.reshape(n, n))
            return (oracle.exact_coupling(-cost) * cost).sum()

        def nce(pos, neg, log_w):
            return hardneg.nce(pos / t, neg / t, log_w + math.log(q))

        z, y = hardneg.unit(torch.tensor(normal(seed, 2, n, 3)))
        constant = z[:1].expand(n, 3)
        for objective, least in (
            (nce, math.log(1 + q)),
            (partial(hardneg.triplet, margin=margin), margin),
        ):
            assert worst(z, y, objective) >= least - 1e-9
            close(worst(constant, constant, objective), least, 1e-9)

    @given(
        **SEEDS, n=st.integers(2, 6), t=st.floats(0.2, 2), epsilon=st.sampled_from([0.02, 0.1, 0.5])
    )
    def test_constant_encoder_is_not_optimal_with_own_rows_masked(self, seed, n, t, epsilon):
        """Unmasked, the loss of [2] is at least log(1 + N n^{−ε/t}), by Jensen.

        Masked, a simplex wins.
        """
        x, y = torch.tensor(normal(seed, 2, n, 3))
        options = {"loss": "ot", "temperature": t, "epsilon": epsilon}
        value = contrastive_loss(x, y, negatives=x, **options)
        assert value >= math.log(1 + n * n ** (-epsilon / t)) - 1e-4
        constant, simplex = x[:1].expand(n, 3), torch.eye(n, dtype=x.dtype) - 1 / n
        close(
            contrastive_loss(constant, constant, negatives=constant, **options),
            math.log(1 + n),
            1e-12,
        )
        masked = float(contrastive_loss(simplex, simplex, **options))
        close(masked, math.log(1 + (2 * n - 2) * math.exp(-n / (n - 1) / t)), 1e-9)
        assert masked < contrastive_loss(constant, constant, **options)

    # [2] VI: the regularised coupling
    @given(**SAMPLES, epsilon=st.floats(0.1, 2))
    def test_no_anchor_is_coupled_with_its_own_sample(self, seed, b, epsilon):
        """E s is within ε log 2B of the best coupling that avoids own samples."""
        x, y = normal(seed, 2, b, 3)
        neg = similarities(x, y)[1]
        log_w = numpy(hardneg.transported(torch.tensor(neg), epsilon))
        assert ((log_w == -INF) == (neg == -INF)).all()
        cost = np.where(neg > -INF, 1 - neg, INF)
        plan = oracle.exact_coupling(cost)
        most = 1 - (plan[plan > 0] * cost[plan > 0]).sum()
        assert most - epsilon * math.log(2 * b) - 1e-6 <= hardness(x, y, epsilon) <= most + 1e-6

    @given(**SAMPLES, k=st.integers(1, 6), epsilon=st.floats(0.2, 5))
    def test_coupling_is_harder_than_the_product(self, seed, b, k, epsilon):
        """With a bank the product draws independently.

        With masks the product is the coupling of largest entropy.
        """
        (x, y), bank = normal(seed, 2, b, 3), torch.tensor(normal(seed + 1, k, 3))
        assert hardness(x, y, epsilon, negatives=bank) >= hardness(x, y, negatives=bank) - 1e-9
        neg = similarities(x, y)[1]
        even = oracle.product_coupling(neg > -INF)
        close((even * np.where(neg > -INF, neg, 0)).sum(), hardness(x, y), 1e-9)
        assert hardness(x, y, epsilon) >= hardness(x, y) - 1e-9

    @given(**SEEDS, n=st.integers(2, 6), epsilon=st.floats(0.2, 5))
    def test_masked_coupling_may_be_easier_than_the_unmasked_product(self, seed, n, epsilon):
        """Two cases contradict the property as printed.

        They are two points, with E s = s₁₂, and a simplex, with E s = −1/(n − 1).
        """
        for x in (normal(seed, 2, 3), np.eye(n) - 1 / n):
            cosines = oracle.unit(x) @ oracle.unit(x).T
            close(hardness(x, x, epsilon), cosines[0, 1], 1e-9)
            assert (
                hardness(x, x, epsilon)
                < (oracle.product_coupling(np.ones(cosines.shape)) * cosines).sum()
            )

    @given(**SEEDS, b=st.integers(3, 5), k=st.integers(2, 6))
    def test_hardness_decreases_with_epsilon(self, seed, b, k):
        """It decreases to that of uniform negatives, in a batch and with a bank."""
        (x, y), bank = normal(seed, 2, b, 3), torch.tensor(normal(seed + 1, k, 3))
        for options in ({}, {"negatives": bank}):
            values = np.array(
                [hardness(x, y, epsilon, **options) for epsilon in (0.2, 0.4, 1, 3, 10, 1e5)]
            )
            assert (np.diff(values) < 1e-10).all() and values[0] > values[-1]
            close(values[-1], hardness(x, y, **options), 1e-4)

    # [1] Proposition 1: as β grows, tilted weights approach the worst case
    @given(
        **SAMPLES,
        t=st.floats(0.1, 2),
        beta=st.floats(0, 1000),
        eps=st.floats(1e-3, 2),
        classes=st.sampled_from([2, 5]),
    )
    def test_tilted_approaches_the_worst_case(self, seed, b, t, beta, eps, classes):
        """0 ≤ L* − L(q_β) ≤ E_q[M − s] ≤ ε + R P_q(s < M − ε) ≤ ε + R e^{−βε/2}/ρ_ε.

        Also E_q[M − s] ≤ log N / β.
        """
        (x, y), labels = normal(seed, 2, b, 3), np.arange(b) % classes
        losses = partial(
            contrastive_loss,
            *map(torch.tensor, (x, y)),
            loss="hcl",
            tau_plus=0,
            temperature=t,
            labels=labels,
            reduction="none",
        )
        pos, neg = (cosines / t for cosines in similarities(x, y, labels))
        worst, counts = numpy(losses(weights="hardest")), (neg > -INF).sum(1)
        gaps = worst - numpy(losses(beta=beta))
        weights = numpy(tilted(torch.tensor(neg), beta).exp()) / counts[:, None]
        for i in range(2 * b):
            close(worst[i], oracle.worst_case(pos[i : i + 1], neg[i : i + 1], counts[i])[0], 1e-10)
            drop, near, far = oracle.worst_case_bound(neg[i], beta, eps)
            close(weights[i] @ np.where(neg[i] > -INF, neg[i].max() - neg[i], 0), drop, 1e-10)
            assert (
                -1e-10 <= gaps[i] <= drop + 1e-10 and drop <= near + 1e-10 and near <= far + 1e-10
            )
            assert beta * drop <= math.log(counts[i]) + 1e-9

    @pytest.mark.parametrize("middling, far, beta", [(10, 10, 6.0), (0, 100, 2.0)])
    def test_bound_on_far_candidates_needs_both_factors(self, middling, far, beta):
        """P_q(s < M − ε) ≤ e^{−βε/2}/ρ_ε at ε = 1.

        The rows break the bound without its 1/2 or without its ρ_ε.
        """
        logits = np.array([0.0] + [-0.5] * middling + [-1.01] * far)
        q = numpy(tilted(torch.tensor(logits)[None], beta).exp())[0] / len(logits)
        close(q[logits < -1].sum(), oracle.bad_probability(logits, beta, 1), 1e-12)
        assert q[logits < -1].sum() <= oracle.bad_probability_bound(logits, beta, 1)

    @given(**SAMPLES, t=st.floats(0.1, 2))
    def test_loss_increases_with_beta(self, seed, b, t):
        """L(q_β) increases from uniform weights to within log N / β of the worst case."""
        x, y = normal(seed, 2, b, 3)
        losses = partial(
            contrastive_loss, *map(torch.tensor, (x, y)), temperature=t, reduction="none"
        )
        values = [
            numpy(losses(loss="hcl", tau_plus=0, beta=beta))
            for beta in (0, 0.3, 1, 3, 10, 100, 1e4)
        ]
        assert (np.diff(values, axis=0) >= -1e-10).all()
        close(values[0], losses(), 1e-10)
        worst = oracle.worst_case(*(cosines / t for cosines in similarities(x, y)), 2 * b - 2)
        assert (worst - values[-1] <= math.log(2 * b - 2) / 1e4 + 1e-10).all()

    # [1] Theorem 2: minimisers of the worst case
    @given(**BATCHES, t=st.floats(0.2, 2))
    def test_worst_case_is_alignment_plus_separation(self, seed, v, b, d, t):
        """L*_∞ = L_align + L*_unif − 1/t².

        A move of a class onto its most isolated point never increases L*_∞.
        """
        z, labels = (
            oracle.unit(normal(seed, v * b, d)),
            np.repeat(np.arange(b), v),
        )  # b classes of v points
        other = np.arange(v * b).reshape(b, v)[:, np.r_[1:v, 0]].ravel()

        def loss(weights):
            views = torch.tensor(z), torch.tensor(z[other])
            return (
                float(contrastive_loss(*views, loss="simple", labels=labels, weights=weights))
                / t**2
            )

        outside = (
            np.stack([z[labels != c] for c in labels]) / t
        )  # on the paper's sphere of radius 1/t
        x, positives, worst = z / t, z[other] / t, loss("hardest")
        close(
            worst, oracle.l_align(x, positives) + oracle.l_unif_star(x, outside) - 1 / t**2, 1e-10
        )
        close(worst, oracle.l_align(x, positives) - oracle.nearest_distance(x, outside) / 2, 1e-10)
        assert oracle.l_infinity(x, positives, outside) <= worst + 1e-10
        assert loss("uniform") <= oracle.l_infinity(x, positives, outside) + 1e-10  # Jensen
        for c in range(b):
            before, inside = loss("hardest"), z[labels == c]
            z[labels == c] = inside[np.argmin((inside @ z[labels != c].T).max(1))]
            assert loss("hardest") <= before + 1e-10
        close(loss("hardest"), -oracle.ball_packing(z[::v] / t, np.full(b, 1 / b)) / 2, 1e-10)

    @pytest.mark.parametrize(
        "counts, d, most",
        [
            ([2] * 2, 3, 4),  # antipodes
            ([2] * 3, 2, 3),  # C ≤ d + 1, a simplex: 2C/(C − 1)
            ([3] * 4, 3, 8 / 3),
            ([2] * 5, 4, 5 / 2),
            ([2] * 5, 3, 81 / 40),  # a square pyramid of height 9/8, where Tammes has 2
            ([2] * 6, 3, 2),  # octahedron
            ([2] * 8, 3, (16 - 4 * math.sqrt(2)) / 7),  # square antiprism
            ([2] * 12, 3, 2 - 2 / math.sqrt(5)),  # icosahedron
        ],
    )
    def test_minimum_is_a_ball_packing(self, counts, d, most):
        """Gradient descent collapses each class.

        It maximises the mean distance of a class to the nearest other one.
        """
        check_packing(counts, d, most, spread=1e-3)

    @pytest.mark.parametrize("counts", [(2, 1, 1), (14, 3, 3), (6, 1, 1), (9, 1, 1)])
    @pytest.mark.parametrize("d", [2, 3])
    def test_heavy_class_pushes_the_others_together(self, counts, d):
        """Of three classes one has share ρ.

        The angle φ of the others to its antipode has cos φ = ρ / (4 − 4ρ).
        """
        heavy = counts[0] / sum(counts)
        cosine = min(1, max(1 / 2, heavy / (4 - 4 * heavy)))
        most = heavy * (2 + 2 * cosine) + (1 - heavy) * min(2 + 2 * cosine, 4 - 4 * cosine**2)
        centres = check_packing(counts, d, most, spread=3e-3)
        close(-centres[1:] @ centres[0], np.full(2, cosine), 0.02)  # the mean is flat there

    @pytest.mark.parametrize("sides", [6, 7, 12])
    def test_in_a_plane_a_pile_beats_the_polygon(self, sides):
        """With all classes but three at one corner of a square the mean is 6/C.

        A polygon has 4 sin²(π/C).
        """
        angles = torch.arange(sides, dtype=torch.float64) / sides * math.tau
        polygon = torch.stack([angles.cos(), angles.sin()], 1)
        square = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)
        pile = square[torch.arange(sides).clamp_max(3)]
        polygon_mean = 4 * math.sin(math.pi / sides) ** 2
        pile_mean = 6 / sides
        losses = []
        for z, mean in ((polygon, polygon_mean), (pile, pile_mean)):
            loss = float(contrastive_loss(z, z, loss="simple", weights="hardest"))
            close(loss, -mean / 2, 1e-12)
            close(oracle.ball_packing(z.numpy(), np.full(sides, 1 / sides)), mean, 1e-12)
            losses.append(loss)
        assert losses[1] <= losses[0] + 1e-12

    # [2] Lemma 3, Eq. 7: the coupling in closed form
    @given(**MATRICES, epsilon=st.floats(0.2, 5), share=st.sampled_from([0, 0.2]))
    def test_coupling_minimises_the_regularised_cost(self, seed, a, n, epsilon, share):
        """E c + ε KL(P ‖ p p) of another P exceeds that of P* by ε KL(P ‖ P*).

        P* gives the weights.
        """
        cosines = masked_logits(seed, a, n, share) / 2
        allowed = cosines > -INF
        assume(allowed.any(0).all() and feasible(allowed))
        cost, kernel = (
            oracle.ground_cost(cosines),
            -hardneg.ground_cost(torch.tensor(cosines)) / epsilon,
        )
        f, g, _ = map(numpy, hardneg.sinkhorn(kernel))
        u, v = epsilon * (f + math.log(a)), epsilon * (g + math.log(n))
        product = np.full((a, n), 1 / (a * n))
        plan = product * np.exp((u[:, None] + v - cost) / epsilon)

        def objective(p):
            return (p * np.where(allowed, cost, 0)).sum() + epsilon * rel_entr(p, product).sum()

        other = some_coupling(seed, allowed)
        for mixed in (other, 0.9 * plan + 0.1 * other, oracle.product_coupling(allowed)):
            excess = objective(mixed) - objective(plan)
            assert excess >= -1e-10
            close(excess, epsilon * rel_entr(mixed, plan).sum(), 1e-9)
        close(objective(plan), u.mean() + v.mean(), 1e-9)  # the dual value: the duality gap is 0
        weights = numpy(transported(torch.tensor(cosines), epsilon).exp())
        close(weights / allowed.sum(1)[:, None] / a, plan, 1e-10)

    @given(**MATRICES, t=st.floats(0.1, 0.5), epsilon=st.floats(0.05, 5))
    def test_without_marginals_the_minimiser_is_tilted(self, seed, a, n, t, epsilon):
        """E c + ε KL(q ‖ p) of another q exceeds that of q_β by ε KL(q ‖ q_β), β = t/ε."""
        logits = torch.tensor(masked_logits(seed, a, n))
        zero = torch.zeros(n).double()
        log_w = transported(logits, epsilon, temperature=t, potential=zero)
        close(log_w, tilted(logits, t / epsilon), 1e-12)
        for row, weights in zip(numpy(logits), numpy(log_w.exp()), strict=True):
            allowed = row > -INF
            count = allowed.sum()
            cost = oracle.ground_cost(t * row[allowed])
            if count:
                best = weights[allowed] / count
                even = np.full(count, 1 / count)
                q = rng(seed).dirichlet(even)
                relative_entropy = (rel_entr(q, even) - rel_entr(best, even)).sum()
                excess = (q - best) @ cost + epsilon * relative_entropy
                close(excess, epsilon * rel_entr(q, best).sum(), 1e-9)

    # [4] Eq. 6, 7: rates of the limits in the temperature
    @given(**SAMPLES, t=st.floats(1e-3, 10), classes=st.sampled_from([2, 100]))
    def test_low_temperature(self, seed, b, t, classes):
        """0 ≤ τ L − max(0, max_j s_j − s⁺) ≤ τ log(1 + N).

        Equal similarities attain the upper end.
        """
        (x, y), labels = normal(seed, 2, b, 3), rng(seed).integers(classes, size=b)
        pos, neg = similarities(x, y, labels)
        limit, most = oracle.nce_cold(pos, neg), t * np.log(1 + (neg > -INF).sum(1))
        x, y, losses = (
            *map(torch.tensor, (x, y)),
            partial(contrastive_loss, labels=labels, reduction="none"),
        )
        off = t * numpy(losses(x, y, temperature=t)) - limit
        assert (off >= -1e-12).all() and (off <= most + 1e-12).all()
        close(losses(x, y, loss="triplet"), 2 * limit, 1e-12)
        close(t * losses(x[:1].expand(b, 3), x[:1].expand(b, 3), temperature=t), most, 1e-12)

    @given(**SAMPLES, t=st.floats(0.2, 300), classes=st.sampled_from([2, 100]))
    def test_high_temperature(self, seed, b, t, classes):
        """τ² (L − first order) is within R³ / (36 √3 τ) of Var/2.

        A third cumulant is at most R³ / (6 √3).
        """
        (x, y), labels = normal(seed, 2, b, 3), rng(seed).integers(classes, size=b)
        pos, neg = similarities(x, y, labels)
        views = map(torch.tensor, (x, y))
        losses = contrastive_loss(*views, temperature=t, labels=labels, reduction="none")
        scaled = t**2 * (numpy(losses) - oracle.nce_hot(pos, neg, t))
        for i in range(2 * b):
            s = np.append(neg[i, neg[i] > -INF], pos[i])
            assert (
                abs(scaled[i] - s.var() / 2)
                <= np.ptp(s) ** 3 / (36 * math.sqrt(3) * t) + 1e-14 * t**2
            )


# ---- Invariants, edges, errors, gradients, devices, draws, couplings


class TestInvariants:
    """A loss depends on neither order, rotation, scale nor block size."""

    @pytest.mark.parametrize("loss", PRESETS)
    @given(**BATCHES)
    def test_order_of_samples_and_views(self, loss, seed, v, b, d):
        views, generator = tensors(normal(seed, v * b, d), v)[0], rng(seed)
        order, turn = torch.tensor(generator.permutation(b)), torch.tensor(generator.permutation(v))
        losses = contrastive_loss(*views, loss=loss, reduction="none").view(v, b)
        moved = contrastive_loss(*[views[i][order] for i in turn], loss=loss, reduction="none")
        close(moved.view(v, b), losses[turn][:, order], 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    @given(**BATCHES, k=st.sampled_from([0, 3]))
    def test_rotation_and_scale(self, loss, seed, v, b, d, k):
        x = normal(seed, v * b + k, d)
        rotation, lengths = (
            np.linalg.qr(normal(seed + 1, d, d))[0],
            np.exp(normal(seed + 2, v * b + k, 1)),
        )
        value, gradient = ours(x, v, k, loss=loss)
        same(ours(x @ rotation, v, k, loss=loss), (value, numpy(gradient) @ rotation), 1e-9)
        same(ours(x * lengths, v, k, loss=loss), (value, numpy(gradient) / lengths), 1e-9)
        close((numpy(gradient) * x).sum(1), np.zeros(v * b + k), 1e-10)  # tangent to the sphere


def corners():
    """Return degenerate batches by name, two views stacked in one array."""
    x = normal(5, 8, 3)
    return {
        "two samples": x[:4],
        "opposite": np.concatenate([x[:4], -x[:4]]),
        "tiny": x * 1e-30,
        "huge": x * 1e30,
        "one zero row": x * (np.arange(8) != 2)[:, None],
        "all zero": np.zeros((8, 3)),
        "one dimension": x[:, :1],
        "all equal": x[[0] * 8],
        "two points": np.stack([x[0], -x[0]] * 4),
    }


def ends_of(low, high):
    return st.sampled_from([low, high]) | st.floats(low, high)


class TestNegatives:
    """Any candidate may be given, masked or dropped, and any function may weigh it."""

    @pytest.mark.parametrize(
        "weights, objective, where",
        [
            (*pair, where)
            for pair in PAIRS
            for where in ("batch", "bank", "each")
            if pair[0] != "transported" or where != "each"
        ],
    )  # there no candidate is shared
    @given(
        **SAMPLES,
        v=st.integers(2, 3),
        k=st.integers(1, 5),
        hidden=st.just(0) | st.floats(0, 0.8),
        absolute_margin=st.sampled_from([None, 3, 0.4, -0.2]),
        relative_margin=st.sampled_from([None, 0.05, 0.5]),
        labelled=st.booleans(),
        block_size=BLOCK_SIZES,
        owned=st.booleans(),
        tau_plus=st.sampled_from([0, 0.1]),
        detach_weights=st.sampled_from([None, 1]),
    )
    def test_masks(
        self, weights, objective, where, seed, v, b, k, hidden, owned, labelled, **options
    ):
        """The last anchor may lose all its candidates.

        An absolute margin of 3 drops those of every anchor.
        One sample will do if there are others to contrast it with.
        """
        b = max(1, b - 1) if where != "batch" else b
        rows, each = {"batch": (0, 0), "bank": (k, 0), "each": (b * k, k)}[where]
        a, n = (b, k) if rows else (v * b, v * b)
        x = normal(seed, v * b + rows, 3)
        negative_mask = rng(seed).random((a, n)) >= hidden
        negative_mask[-1] &= seed % 3 > 0
        labels = rng(seed).integers(3, size=b + k * (where == "bank"))
        positive_index = rng(seed).integers(k, size=b)
        options |= {
            "weights": weights,
            "objective": objective,
            "negative_mask": negative_mask,
            "positive_index": positive_index if owned and rows else None,
            "labels": labels if labelled else None,
        }
        if weights == "transported":
            views = np.split(oracle.unit(x[: v * b]), v)
            bank = oracle.unit(x[v * b :]) if rows else None
            _, left = oracle._who_is_who(
                views,
                bank,
                options["positive_index"],
                options["negative_mask"],
                options["labels"],
                options["absolute_margin"],
                options["relative_margin"],
                objective,
            )
            assume(feasible(np.array(left) > -INF))
        agree(x, v, rows, each=each, **options)

    @pytest.mark.parametrize("weights", ["uniform", "tilted", "hardest", "top"])
    @pytest.mark.parametrize("objective", hardneg.OBJECTIVES)
    @given(
        **SEEDS,
        v=st.integers(2, 3),
        k=st.sampled_from([0, 4]),
        t=st.floats(0.2, 1),
        size=BLOCK_SIZES,
        detach_weights=st.booleans(),
        tau_plus=st.sampled_from([0.0, 0.1]),
    )
    def test_functions(self, weights, objective, seed, v, k, t, size, detach_weights, tau_plus):
        """A function that does what a name does gives its numbers; both kinds see logits."""
        x = normal(seed, 4 * v + k, 3)
        options = dict(detach_weights=detach_weights, temperature=t, tau_plus=tau_plus)

        def weigh(logits):
            return log_weights(weights, logits, **WEIGHT_OPTIONS[weights])

        def judge(pos, neg, log_w):
            if objective in ("simple", "triplet"):
                return getattr(hardneg, objective)(t * pos, t * neg, log_w)
            log_w_pos = weigh(pos.detach() if detach_weights else pos)
            debiasing = {"tau_plus": tau_plus, "temperature": t, "log_w_pos": log_w_pos}
            return getattr(hardneg, objective)(pos, neg, log_w, **debiasing)

        named = {**options, **WEIGHT_OPTIONS[weights], "weights": weights, "objective": objective}
        for one, other in ((weigh, objective), (weights, judge), (weigh, judge)):
            own = {**named, "weights": one, "objective": other}
            same(ours(x, v, k, block_size=size, **own), ours(x, v, k, **named), 1e-10)
        if k:  # in plain operations, for both
            options |= dict(
                weights=lambda s: 3 * s, objective=lambda p, s, w: (s + w)[:, -1] - p[:, 0]
            )
            agree(x, v, k, block_size=size, **options)

    @pytest.mark.parametrize("part", ["weights", "objective"])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_functions_may_have_parameters_and_be_random(self, part, reduction):
        x, learned = (
            torch.tensor(normal(1, 2, 6, 3)),
            nn.Parameter(torch.tensor(0.7, dtype=torch.float64)),
        )

        def function(*logits):
            noise = torch.randn(len(logits[0]), dtype=torch.float64)
            if part == "weights":
                return learned * logits[0].clamp_min(-9) + noise[:, None]
            return (
                learned * (torch.logsumexp(torch.cat(logits[:2], 1), 1) - logits[0][:, 0]) * noise
            )

        slopes = []
        for size in (0, 4):
            torch.manual_seed(0)
            value = contrastive_loss(*x, **{part: function}, reduction=reduction, block_size=size)
            slopes += torch.autograd.grad(value.sum(), learned)
        close(*slopes, 1e-12)

    @pytest.mark.parametrize("objective", ["nce", "decoupled"])
    @pytest.mark.parametrize("tau_plus", [0.0, 0.1])
    def test_a_function_does_not_count_for_anchors_without_candidates(self, objective, tau_plus):
        def falling(logits):
            return -logits

        def steep(logits):
            return logits.clamp_min(-1e15).square() / 10

        x, y = torch.tensor(normal(2, 2, 4, 3))
        for weights in (falling, steep):
            options = {"weights": weights, "objective": objective, "tau_plus": tau_plus}
            assert contrastive_loss(x, y, labels=[0] * 4, **options) == 0

    def test_a_forgotten_mask_comes_back(self):
        x, y = torch.tensor(normal(2, 2, 5, 3))
        for function, named in (
            (torch.zeros_like, "uniform"),
            (lambda s: s.clamp_min(-9), "tilted"),
        ):
            got = contrastive_loss(
                x,
                y,
                weights=function,
                objective=lambda p, s, w: hardneg.nce(
                    p, s, w - torch.logsumexp(w, 1, keepdim=True) + math.log(8)
                ),
            )
            close(got, contrastive_loss(x, y, weights=named), 1e-12)

    @pytest.mark.parametrize("loss, k", [("hcl", 0), ("ot", 0), ("hard", 5)])
    def test_compiled(self, loss, k):
        """Encoder and loss compile together, in one graph; Sinkhorn is one operator of it."""
        encoder, (x, y, bank) = (
            nn.Linear(3, 4),
            (torch.tensor(normal(1, n, 3)).float() for n in (6, 6, 5)),
        )
        criterion = hardneg.ContrastiveLoss(
            loss, temperature=nn.Parameter(torch.tensor(0.4)), epsilon=0.5
        )

        def step(x, y, bank):
            return criterion(encoder(x), encoder(y), **{"negatives": encoder(bank)} if k else {})

        def outcome(function):
            return (value := function(x, y, bank)), torch.autograd.grad(value, encoder.weight)[0]

        torch._dynamo.reset()
        same(outcome(torch.compile(step, backend="aot_eager")), outcome(step), 1e-6)
        torch._dynamo.reset()
        assert torch._dynamo.explain(step)(x, y, bank).graph_break_count == 0

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size", [None, 0, 3])
    def test_torch_func(self, loss, block_size):
        views, t = torch.tensor(normal(3, 2, 6, 3)), torch.tensor(0.4, dtype=torch.float64)

        def function(views, t):
            return contrastive_loss(*views, loss=loss, temperature=t, block_size=block_size)

        leaves = views.clone().requires_grad_(), t.clone().requires_grad_()
        want = torch.autograd.grad(function(*leaves), leaves, materialize_grads=True)
        found = torch.func.grad(function, (0, 1))(views, t)
        for got, right in zip(found, want, strict=True):
            close(got, right, 1e-12)
        for batched in (
            torch.vmap(function, (0, None)),
            torch.vmap(torch.func.grad(function), (0, None)),
        ):
            with pytest.raises(ValueError, match="^views is .* vmap"):
                batched(views[None], t)


class TestEdges:
    """Extreme and degenerate input gives finite and accurate losses, in every dtype."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("corner", corners())
    def test_degenerate_batches(self, corner, loss):
        x = corners()[corner]
        for dtype, t, size in itertools.product(
            (torch.float32, torch.float64), (0.01, 0.5), (0, 3)
        ):
            assert finite(*ours(x, 2, dtype=dtype, loss=loss, temperature=t, block_size=size))
        ties = corner in ("all equal", "two points", "one dimension")  # rounding breaks them
        if not ties or loss not in ("hard", "hard-simple", "triplet"):
            value, want = (
                ours(x, 2, loss=loss)[0],
                oracle.contrastive_loss(*np.split(x, 2), loss=loss),
            )
            close(value, want, 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    def test_zero_row_has_a_finite_gradient(self, loss):
        x, others = corners()["one zero row"], np.arange(8) != 2
        x[0, 1:] = 0  # unit norm once divided by its largest entry
        (value, gradient), (want, wanted) = ours(x, 2, loss=loss), theirs(x, 2, loss=loss)
        assert finite(gradient)
        same((value, gradient[others]), (want, wanted[others]), 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size", [None, 0, 3])
    def test_anchors_without_negatives(self, loss, block_size):
        x, options = normal(6, 11, 3), {"loss": loss, "block_size": block_size}
        for k in (0, 3):
            value, gradient = ours(x[: 8 + k], 2, k, labels=torch.zeros(4 + k), **options)
            assert finite(value, gradient)
            assert hardneg.PRESETS[loss][1] != "nce" or value == 0 and (gradient == 0).all()
        labels = [0, 1, 1, 1, 1, 1, 1]  # the first anchor alone has negatives
        agree(x, 2, 3, labels=labels, reduction="none", weight=np.ones(4), **options)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction, weight", [("mean", None), ("none", np.ones(4))])
    @pytest.mark.parametrize("each", [0, 2])
    def test_dtypes(self, dtype, loss, reduction, weight, each):
        k = 4 * each or 2
        x = torch.tensor(normal(9, 8 + k, 3)).to(dtype).double().numpy()
        options = {"loss": loss, "reduction": reduction, "weight": weight}
        if each:
            options |= {"each": 2, "negative_mask": np.arange(8).reshape(4, 2) > 2}
            options["loss"] = "hcl" if loss == "ot" else loss
        value, gradient = ours(x, 2, k, dtype, **options)
        assert value.dtype == torch.promote_types(dtype, torch.float32) and gradient.dtype == dtype
        want, wanted = theirs(x, 2, k, **options)
        close(value, want, 1e-10 if dtype == torch.float64 else 1e-4)
        close(
            gradient,
            wanted,
            {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-4),
            floor=1e-2,
        )

    @pytest.mark.parametrize("loss", PRESETS)
    def test_mixed_dtypes(self, loss):
        rows = torch.tensor(normal(9, 12, 3)).chunk(3)
        dtypes = torch.float16, torch.bfloat16, torch.float64
        parts = [x.to(dtype).requires_grad_() for x, dtype in zip(rows, dtypes, strict=True)]
        value = contrastive_loss(*parts[:2], negatives=parts[2], loss=loss)
        assert value.dtype == torch.float64 and finite(value)
        assert [g.dtype for g in torch.autograd.grad(value, parts)] == [
            part.dtype for part in parts
        ]
        assert contrastive_loss(*parts[:2], loss=loss).dtype == torch.float32

    @pytest.mark.parametrize(
        "weights, loss", [*((None, loss) for loss in PRESETS), ("tilted", "ppcl")]
    )
    @given(
        **SEEDS,
        temperature=ends_of(0.005, 10),
        beta=ends_of(0, 100),
        tau_plus=ends_of(1e-6, 0.99),
        epsilon=ends_of(0.005, 100),
        alpha=ends_of(1e-6, 1),
        near=st.booleans(),
        block_size=BLOCK_SIZES,
    )
    def test_float32_is_finite_over_all_ranges(self, weights, loss, seed, near, **options):
        x = normal(seed, 8, 3)
        x = x[:1] + 1e-4 * x if near else x
        assert finite(*ours(x, 2, dtype=torch.float32, weights=weights, loss=loss, **options))

    @pytest.mark.parametrize(
        "beta, t", [(1, 0.5), (100, 0.1), (1e4, 0.1), (1e8, 0.5), (2e-38, 1e9)]
    )
    @pytest.mark.parametrize("crowded", [False, True])
    def test_tilted_weights_are_accurate_in_float32(self, beta, t, crowded):
        """Blocks differentiate tilted sums in closed form, where β multiplies rounding errors."""
        x = normal(8, 64, 8)
        x = x[:1] + 0.05 * x if crowded else x
        options, errors = dict(loss="hcl", beta=beta, temperature=t, tau_plus=0.0), []
        exact = ours(x, 2, block_size=0, **options)
        for block_size in (0, 16):
            found = ours(x, 2, dtype=torch.float32, block_size=block_size, **options)
            pairs = zip(found, exact, strict=True)
            relative = [(got - right).norm() / right.norm() for got, right in pairs]
            errors.append(torch.stack(relative))
        assert errors[0][0] < 1e-6 and (errors[1] <= 4 * errors[0] + 1e-6).all(), errors

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.float16, 1e-2)])
    @given(**SEEDS)
    def test_accuracy_at_low_temperature(self, loss, dtype, tolerance, seed):
        x = normal(seed, 10, 8)
        x[1:4], x[6:9] = x[:1] + 0.02 * x[1:4], x[5:6] + 0.02 * x[6:9]  # near-duplicate negatives
        x = torch.tensor(x).to(dtype)
        options = {"loss": loss, "temperature": 0.02, "beta": 8.0, "epsilon": 1}
        found = ours(x, 2, dtype=dtype, **options)
        exact = ours(x, 2, **options)
        for got, want in zip(found, exact, strict=True):
            close(got, want, tolerance)

    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
    @pytest.mark.parametrize("beta", [0.0, 1e-320, 1e-40])
    @pytest.mark.parametrize("block_size", [0, 3])
    def test_beta_too_small_for_the_dtype_is_zero(self, dtype, tolerance, beta, block_size):
        x, options = normal(7, 8, 3), {"loss": "hcl", "beta": beta, "block_size": block_size}
        same(ours(x, 2, dtype=dtype, **options), theirs(x, 2, loss="debiased"), tolerance)

    def test_epsilon_or_cost_beyond_the_dtype(self):
        """t/ε underflows while the potentials still count; costs that overflow are all equal."""
        x, options = (
            normal(9, 16, 4),
            dict(loss="ot", labels=[0, 1, 0, 2, 3, 0, 1, 4], epsilon=1e38),
        )
        close(ours(x, 2, dtype=torch.float32, **options)[0], theirs(x, 2, **options)[0], 1e-5)
        close(
            ours(x, 2, dtype=torch.float32, loss="ot", cost="exp", kappa=-200.0)[0],
            theirs(x, 2)[0],
            1e-5,
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_counts_are_exact_in_half_precision(self, dtype):
        logits = torch.tensor(normal(10, 2, 300)).to(dtype)
        logits[:, :3] = -INF
        kept, wanted = ((hardneg.top(x, alpha=0.5) == 0).sum(1) for x in (logits, logits.double()))
        assert (kept == wanted).all()
        for weights in (hardneg.hardest, hardneg.tilted, hardneg.uniform):
            log_w = weights(torch.zeros(1, 70000, dtype=dtype))
            assert log_w.dtype == dtype and log_w.abs().max() < 0.1

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction, weight", [("mean", None), ("none", np.ones(10))])
    @pytest.mark.parametrize("block_size", [0, 3])
    def test_autocast_changes_nothing(self, loss, reduction, weight, block_size):
        x, options = (
            normal(8, 10, 4),
            {"loss": loss, "reduction": reduction, "block_size": block_size},
        )
        views = tensors(x, 2, dtype=torch.float32, grad=True)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = contrastive_loss(*views, **options)
        gradient = torch.cat(torch.autograd.grad(value.sum(), views))
        same((value, gradient), ours(x, 2, 0, torch.float32, weight, **options), 1e-6)

    def test_warnings_come_once(self):
        """No coupling exists if more than half of the samples share a label.

        The floor binds for close views at low t.
        """
        x, floor = torch.tensor(normal(17, 4, 3)), {"loss": "debiased", "tau_plus": 0.5}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            contrastive_loss(x, x[[1, 2, 3, 0]], **floor, temperature=0.1)  # views far apart
            for t, epsilon in ((0.1, 0.005), (0.11, 0.006)):
                contrastive_loss(x, x, loss="ot", epsilon=epsilon, labels=[0, 0, 0, 1])
                contrastive_loss(x, x, **floor, temperature=t)
        assert sorted(str(warning.message)[:8] for warning in caught) == ["Sinkhorn", "debiasin"]
        assert (
            contrastive_loss(x, x, **floor, temperature=0.1, return_stats=True)[1]["clamped"] > 0.5
        )


class TestErrors:
    """Invalid input raises a ValueError that names the argument; NaN never passes silently."""

    @pytest.mark.parametrize(
        "name, values",
        [
            ("loss", ["infonce"]),
            ("weights", ["heavy", torch.ones(2)]),
            ("objective", ["contrast", 1]),
            ("cost", ["cosine", max]),
            ("absolute_margin", [INF, *NO_NUMBERS]),
            ("relative_margin", [INF, *NO_NUMBERS]),
            ("reduction", ["max"]),
            ("block_size", [-1]),
            ("tau_plus", [-0.1, 1.0, 2, *NO_NUMBERS]),
            ("temperature", [0, -1.0, INF, torch.tensor(-0.5), *NO_NUMBERS]),
            ("beta", [-1, INF, *NO_NUMBERS]),
            ("kappa", [INF, *NO_NUMBERS]),
            ("margin", [-1, INF, *NO_NUMBERS]),
            ("alpha", [0, 1.1, *NO_NUMBERS]),
            ("epsilon", [0, -1, INF, *NO_NUMBERS]),
        ],
    )
    def test_options(self, name, values):
        x = torch.tensor(normal(1, 4, 3))
        for value in values:
            option = {name: value}
            calls = (
                partial(contrastive_loss, x, x, **option),
                partial(hardneg.ContrastiveLoss, **option),
                partial(hardneg.ContrastiveLoss("ot"), x, x, **option),
            )
            for call in calls:
                with pytest.raises(ValueError, match=rf"^{name} is ") as caught:
                    call()
                assert "it must be" in str(caught.value)
                assert torch.is_tensor(value) or str(value) in str(caught.value)

    @pytest.mark.parametrize(
        "views",
        [
            *(
                list(map(torch.ones, shapes))
                for shapes in ([], [(4, 3)], [(4, 3), (5, 3)], [(4, 3), (4, 2)])
            ),
            *([torch.ones(shape)] * 2 for shape in ((1, 3), (0, 3), (4,), (4, 3, 1), (3, 0))),
            *(
                [view, torch.ones(3, 2)]
                for view in ([1.0], np.ones((3, 2)), (torch.ones(3, 2),) * 2)
            ),
            *(
                [torch.ones(3, 2).to(dtype)] * 2
                for dtype in (torch.long, torch.bool, torch.complex64)
            ),
        ],
    )
    def test_views(self, views):
        with pytest.raises(ValueError, match="^views is "):
            contrastive_loss(*views)

    @pytest.mark.parametrize(
        "name, value, k",
        [
            *(("labels", torch.zeros(shape), 0) for shape in (3, 8, (4, 2), ())),
            ("labels", torch.zeros(5), 2),
            *(
                ("negatives", rows, 0)
                for rows in (
                    torch.ones(2, 4),
                    torch.ones(3),
                    torch.ones(0, 3),
                    [[1.0] * 3],
                    torch.ones(2, 3, dtype=torch.long),
                )
            ),
            ("positive_index", [0, 1, 2, 3], 0),
            *(
                ("positive_index", index, 5)
                for index in ([0, 1, 2], [0, 1, 2, 5], [0, -1, 0, 0], [0.0, 1.0, 2.0, 3.0])
            ),
            *(
                ("negatives", torch.ones(shape), 0)
                for shape in ((3, 2, 3), (4, 2, 2), (4, 0, 3), (1, 4, 2, 3))
            ),
            ("positive_index", [0, 1, 2, 0], (4, 2)),
            ("labels", torch.zeros(12), (4, 2)),
            ("weights", "transported", (4, 2)),
            ("negative_mask", torch.ones(8, 8), 0),
            *(("negative_mask", torch.ones(4, 8).bool(), k) for k in (0, 7, (4, 2))),
        ],
    )
    def test_tensors(self, name, value, k):
        bank = (
            {"negatives": torch.ones(k, 3) if isinstance(k, int) else torch.ones(*k, 3)}
            if k
            else {}
        )
        with pytest.raises(ValueError, match=rf"^{name} is "):
            contrastive_loss(*torch.ones(2, 4, 3), **bank | {name: value})

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("value", [math.nan, INF, -INF])
    @pytest.mark.parametrize(
        "place, name", [(0, r"views\[0\]"), (5, r"views\[1\]"), (9, "negatives")]
    )
    def test_embeddings_are_finite(self, loss, value, place, name):
        x = torch.tensor(normal(2, 10, 3))
        x[place, 1] = value
        with pytest.raises(ValueError, match=rf"^{name} is "):
            contrastive_loss(x[:4], x[4:8], negatives=x[8:], loss=loss)

    @pytest.mark.parametrize("objective", hardneg.OBJECTIVES)
    def test_nan_of_one_anchor_stays_with_it(self, objective):
        neg = torch.tensor([[0.1, math.nan], [0.1, 0.2]])
        losses = getattr(hardneg, objective)(torch.tensor([[0.5], [0.0]]), neg, torch.zeros(2, 2))
        assert losses.isnan().tolist() == [True, False]


class TestGradients:
    """Gradients follow autograd's rules, and a loss in blocks stores no matrix of all pairs."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_block_size_zero_allows_second_derivatives(self, loss, reduction):
        x = torch.tensor(normal(12, 4, 3), requires_grad=True)

        def function(z, **options):
            return contrastive_loss(*z.chunk(2), loss=loss, **options).sum()

        whole = partial(function, reduction=reduction, block_size=0, detach_weights=False)
        assert torch.autograd.gradgradcheck(whole, x)  # its differences see the weights too
        with pytest.raises(RuntimeError, match="block_size=0"):
            torch.autograd.grad(function(x, block_size=3, reduction="mean"), x, create_graph=True)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size", [0, 3])
    def test_gradient_of_some_inputs(self, loss, block_size):
        x, options = normal(14, 12, 3), {"loss": loss, "block_size": block_size}
        value, gradient = ours(x, 2, 4, **options)
        for wanted in itertools.product([False, True], repeat=3):
            chunks = torch.tensor(x).chunk(3)
            parts = [
                part.clone().requires_grad_(wants)
                for part, wants in zip(chunks, wanted, strict=True)
            ]
            found = contrastive_loss(*parts[:2], negatives=parts[2], **options)
            close(found, value, 1e-12)
            assert found.requires_grad == any(wanted)
            if any(wanted):
                got = torch.autograd.grad(found, [part for part in parts if part.requires_grad])
                close(torch.cat(got), gradient[np.repeat(wanted, 4)], 1e-12)
        for context in (torch.no_grad, torch.inference_mode):
            views, bank = tensors(x, 2, 4)
            with context():
                found = contrastive_loss(*views, **bank, **options)
            close(found, value, 1e-12)
            assert not found.requires_grad

    @pytest.mark.parametrize("block_size", [0, 3])
    def test_changes_in_place_are_detected(self, block_size):
        x, y, bank = torch.tensor(normal(16, 3, 4, 3))
        loss = contrastive_loss(
            x.requires_grad_(),
            y,
            negatives=bank,
            normalize=False,
            reduction="none",
            block_size=block_size,
        )
        bank.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_memory_is_linear(self, loss, reduction):
        """What autograd saves has the size of the embeddings.

        So does every tensor that outlives the call.
        """
        views, saved = tensors(normal(18, 32, 4), 2, grad=True)[0], []

        class Box:
            def __init__(self, x):
                self.x = x.detach()
                saved.append(weakref.ref(self))  # the graph alone keeps the box alive

        def kept(block_size):
            saved.clear()
            before = {id(x) for x in gc.get_objects() if type(x) is torch.Tensor}
            with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.x):
                value = contrastive_loss(
                    *views, loss=loss, reduction=reduction, block_size=block_size
                )
            alive = [value, *(box().x for box in saved if box() is not None)]
            alive += [
                x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before
            ]
            return max(x.untyped_storage().nbytes() // x.element_size() for x in alive)

        assert kept(0) >= 32**2 and kept(8) <= 32 * 4

    @pytest.mark.parametrize("loss", ["ot", "hcl", "hard"])
    def test_no_matrix_of_all_pairs(self, monkeypatch, loss):
        """Not even ot does, although its coupling is of all anchors at once.

        Called as plain Python, the operators show their tensors; they compute the gradient too.
        """
        for name in ("_blocks", "_couple_detached"):
            monkeypatch.setattr(hardneg, name, getattr(hardneg, name)._init_fn)
        views = tensors(normal(18, 4200, 3), 2, dtype=torch.float32)[0]
        with Largest() as largest:
            contrastive_loss(*views, loss=loss, epsilon=1.0, block_size=128)
        assert 128 * 4200 * 4 <= largest.bytes <= 4200 * 4200 * 4 / 8


class TestModule:
    """`ContrastiveLoss` holds options and a temperature.

    A call may override the options, and the temperature may be learned.
    """

    def test_options(self):
        x, y = torch.tensor(normal(3, 2, 4, 3))
        with pytest.raises(TypeError, match=r"^ContrastiveLoss\(\) has no option 'temprature'"):
            hardneg.ContrastiveLoss("hcl", temprature=0.1)
        with pytest.raises(
            TypeError, match=r"^contrastive_loss\(\) has no option 'own'.*positive_"
        ):
            contrastive_loss(x, y, own=torch.arange(4))
        with pytest.raises(ValueError, match="^views is .*torch.int64"):
            contrastive_loss(x.long(), y.long())
        module = hardneg.ContrastiveLoss("hcl", beta=2.0, temperature=0.3)
        for beta, options in ((2.0, {}), (0.5, {"beta": 0.5})):
            want = contrastive_loss(x, y, loss="hcl", beta=beta, temperature=0.3)
            close(module(x, y, **options), want, 1e-12)
        assert (module.weights, module.objective, module.tau_plus) == hardneg.PRESETS["hcl"]
        for shown in (
            "ContrastiveLoss('hcl'",
            "beta=2.0",
            "temperature=0.3",
            "tau_plus=0.1",
            "tilted",
        ):
            assert shown in repr(module)
        assert not module.state_dict()

    def test_learned_temperature_is_a_parameter(self):
        x, y = torch.tensor(normal(3, 2, 4, 3))
        learned = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
        module = hardneg.ContrastiveLoss("hcl", temperature=learned)
        assert (
            list(module.parameters()) == [learned]
            and "learned" in repr(module)
            and "0.4" in repr(module)
        )
        module.load_state_dict({"temperature": torch.tensor(0.75, dtype=torch.float64)})
        close(module(x, y), contrastive_loss(x, y, loss="hcl", temperature=0.75), 1e-12)
        nn.utils.parametrize.register_parametrization(module, "temperature", nn.Softplus())
        want = contrastive_loss(x, y, loss="hcl", temperature=module.temperature.item())
        close(module(x, y), want, 1e-12)

    @pytest.mark.parametrize("frozen, loss", [(True, "hcl"), (False, "simple"), (False, "triplet")])
    @pytest.mark.parametrize("block_size", [0, 3])
    def test_gradient_of_the_temperature(self, frozen, loss, block_size):
        """The encoder may be frozen; losses on cosines do not depend on the temperature."""
        learned, views = (
            nn.Parameter(torch.tensor(0.5)),
            tensors(normal(1, 8, 3), 2, grad=not frozen)[0],
        )
        hardneg.ContrastiveLoss(loss, temperature=learned, block_size=block_size)(*views).backward()
        assert (learned.grad is not None and learned.grad != 0) == (loss == "hcl")

    @pytest.mark.parametrize("block_size", [0, 4])
    def test_temperature_of_16_bits(self, block_size):
        views, slopes = torch.tensor(normal(1, 2, 200, 3)).float(), []
        for dtype in (torch.float16, torch.float32):
            t = nn.Parameter(torch.tensor(0.0625, dtype=dtype))
            contrastive_loss(*views, temperature=t, block_size=block_size).backward()
            slopes.append(t.grad)
        assert slopes[0].dtype == torch.float16 and abs(slopes[0].float() / slopes[1] - 1) < 1e-3

    def test_subclasses_of_tensor(self):
        views, named = torch.tensor(normal(3, 2, 8, 3)), type("Named", (torch.Tensor,), {})
        value = contrastive_loss(*(view.as_subclass(named) for view in views), loss="ot")
        close(value, contrastive_loss(*views, loss="ot"), 1e-12)


class TestDevices:
    """Tensors are made on the device of the embeddings; the default device, meta, would raise."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("k", [0, 5])
    @pytest.mark.parametrize("block_size", [None, 0, 3])
    def test_loss(self, loss, k, block_size):
        x = torch.tensor(normal(20, 8 + k, 3), device=DEVICE, requires_grad=True)
        options = {"negatives": x[8:], "positive_index": [0, 1, 2, 3]} if k else {}
        for labels, reduction in itertools.product((None, [0, 1, 2, 3]), ("mean", "none")):
            with torch.device("meta"):
                value, stats = contrastive_loss(
                    x[:4],
                    x[4:8],
                    **options,
                    loss=loss,
                    labels=labels,
                    reduction=reduction,
                    block_size=block_size,
                    return_stats=True,
                )
                value.sum().backward()
            assert {y.device.type for y in (value, *stats.values())} == {DEVICE}


class TestDraw:
    """Indices have the frequencies of their weights, and a generator's state replays them."""

    @pytest.mark.parametrize("weights", hardneg.WEIGHTS)
    @given(**SEEDS, replacement=st.booleans(), constant=st.sampled_from([0, 1000]))
    def test_frequencies(self, weights, seed, replacement, constant):
        logits = masked_logits(seed, 3, 6, share=0 if weights == "transported" else 0.3)
        log_w = (
            getattr(hardneg, weights)(torch.tensor(logits), **WEIGHT_OPTIONS[weights]) + constant
        )
        draws, generator = 20000, torch.Generator().manual_seed(seed)
        oracle_log_w = getattr(oracle, weights)(logits, **WEIGHT_OPTIONS[weights])
        for row, wanted in zip(log_w, np.exp(oracle_log_w), strict=True):
            index = hardneg.draw(row.expand(draws, -1), 1, replacement, generator)
            expected = draws * wanted / wanted.sum()
            off = np.bincount(index.flatten().numpy(), minlength=6) - expected
            assert (off[expected == 0] == 0).all()
            assert (
                off[expected > 0] ** 2 / expected[expected > 0]
            ).sum() < 50  # χ² of 5 degrees: 1e-9

    @given(**MATRICES, replacement=st.booleans())
    def test_replay_and_no_repeats(self, seed, a, n, replacement):
        log_w = hardneg.uniform(torch.tensor(masked_logits(seed, a, n))).repeat(50, 1)
        counts, generator = (log_w > -INF).sum(1), torch.Generator().manual_seed(3)
        k = 5 if replacement else int(counts.min())
        index, following = (hardneg.draw(log_w, k, replacement, generator) for _ in range(2))
        assert index.shape == (50 * a, k) and index.dtype == torch.long
        assert (log_w.gather(1, index) > -INF).all() and (
            (index != following).any() or counts.max() == 1
        )
        assert replacement or all(len(set(row)) == k for row in index.tolist())
        assert (hardneg.draw(log_w, k, replacement, generator.manual_seed(3)) == index).all()

    @pytest.mark.parametrize(
        "row, k, replacement",
        [
            ([0, -INF, 0], 3, False),
            ([0, 0, 0], 4, False),
            ([-INF] * 3, 1, False),
            ([-INF] * 3, 1, True),
            ([0, 0, 0], 0, True),
        ],
    )
    def test_too_few_candidates(self, row, k, replacement):
        with pytest.raises(ValueError, match="^k is "):
            hardneg.draw(torch.tensor([[0.0] * 3, row]), k, replacement)


class TestSchedules:
    """β decreases in the paper's stairs, and α geometrically."""

    # [1] App. C, β = 1 and five changes. A case: the progress where a stair starts, and its height.
    STAIRS = [(0.0, 1.0), (0.2, 0.8), (0.4, 0.6), (0.6, 0.4), (0.8, 0.2)]

    @pytest.mark.parametrize("start, height", STAIRS)
    @given(share=ends_of(0, 0.999))
    def test_stairs_of_the_paper(self, start, height, share):
        progress = start + 0.2 * share
        close(hardneg.annealed_beta(progress, 1.0, changes=5), height, 1e-12)
        close(hardneg.annealed_beta(progress, 1.0), height, 1e-12)
        close(hardneg.annealed_beta(1.0, 1.0), 0, 1e-12)

    @given(share=ends_of(0.001, 0.999), beta=st.floats(0, 100), changes=st.integers(1, 20))
    def test_stairs_are_even(self, share, beta, changes):
        """They are equally long and equally high, from β to zero."""
        found = [
            hardneg.annealed_beta((stair + share) / changes, beta, changes)
            for stair in range(changes)
        ]
        heights = np.linspace(beta, 0, changes + 1)
        close(found, heights[:-1], 1e-12)
        close(hardneg.annealed_beta(0.0, beta, changes), beta, 1e-12)
        close(hardneg.annealed_beta(1.0, beta, changes), 0, 1e-12)

    @given(
        one=ends_of(0, 1),
        other=ends_of(0, 1),
        beta=st.floats(0, 100),
        changes=st.integers(1, 20),
    )
    def test_beta_never_increases(self, one, other, beta, changes):
        early, late = sorted((one, other))
        first = hardneg.annealed_beta(early, beta, changes)
        last = hardneg.annealed_beta(late, beta, changes)
        assert beta >= first >= last >= 0

    @given(progress=ends_of(0, 1), alpha=st.floats(0.01, 1), until=st.floats(0.05, 1))
    def test_alpha(self, progress, alpha, until):
        share = hardneg.lead_in(progress, alpha, until)
        close(share, math.exp(math.log(alpha) * min(1, progress / until)), 1e-12)
        assert 0 < share <= 1
        assert hardneg.lead_in(0.0, alpha, until) == 1


class TestSinkhorn:
    """The coupling has uniform marginals, respects its masks, and reports its own error."""

    @pytest.mark.parametrize("cost", ["sqeuclidean", "exp"])
    @given(
        **MATRICES,
        epsilon=st.floats(0.2, 5),
        share=st.sampled_from([0, 0.2]),
        empty=st.booleans(),
        size=st.integers(1, 6),
    )
    def test_plan(self, cost, seed, a, n, epsilon, share, empty, size):
        """Fully masked rows and columns carry no mass, and blocks of rows change nothing."""
        cosines = masked_logits(seed, a, n, share, empty and a > 1) / 2
        allowed = cosines > -INF
        assume(feasible(allowed))
        costs = hardneg.ground_cost(torch.tensor(cosines), cost, 2.0)
        close(costs[torch.tensor(allowed)], oracle.ground_cost(cosines[allowed], cost, 2.0), 1e-12)
        kernel = -costs / max(epsilon, 1.0 if cost == "exp" else 0.2)
        before = kernel.clone()
        for function in (kernel, lambda: iter(kernel.split(size))):
            f, g, error = hardneg.sinkhorn(function)
            assert error <= 1e-12 and finite(f, g) and torch.equal(kernel, before)
            plan = torch.exp(f[:, None] + kernel + g)
            close(plan, oracle.sinkhorn(numpy(kernel))[0], 1e-10)
            for dim in (0, 1):
                close(plan.sum(dim), allowed.any(dim) / allowed.any(dim).sum(), 1e-11)

    @pytest.mark.filterwarnings("error")
    def test_nothing_allowed_is_no_error(self):
        f, g, error = hardneg.sinkhorn(torch.full((3, 4), -INF, dtype=torch.float64))
        assert error == 0 and finite(f, g)

    @pytest.mark.parametrize("tolerance, steps", [(None, 1000), (0.01, 1000), (0.0, 2)])
    @pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
    @given(**MATRICES)
    def test_error_is_that_of_the_plan(self, dtype, rounding, tolerance, steps, seed, a, n):
        kernel = torch.tensor(rng(seed).uniform(-5, 0, (a, n)), dtype=dtype)
        used = a - (a > 1 and seed % 2)  # rows; the others are fully masked
        kernel[used:] = -INF
        f, g, error = hardneg.sinkhorn(kernel, tolerance, steps)
        assert f.dtype == g.dtype == error.dtype == dtype
        plan = torch.exp(f[:, None] + kernel + g).double()
        close(plan.sum(0), np.full(n, 1 / n), rounding)
        close((plan.sum(1)[:used] - 1 / used).abs().sum(), error, rounding)
        assert steps < 1000 or error <= (
            tolerance or {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        )

    def test_says_that_it_has_not_converged(self):
        with pytest.warns(UserWarning, match="^Sinkhorn.*epsilon"):
            hardneg.sinkhorn(torch.tensor(rng(0).uniform(-6, 0, (5, 5))), 0.0, max_steps=2)

    def test_a_cost_of_any_size_has_finite_gradients(self):
        """κ is ε in another unit: κ and ε e^{−κ} give the numbers of 0 and ε."""
        x, y = torch.tensor(normal(1, 2, 5, 3))
        found = []
        for kappa in (0.0, -60.0):
            t = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
            options = {"cost": "exp", "kappa": kappa, "epsilon": 3 * math.exp(-kappa)}
            options |= {"loss": "ot", "detach_weights": False, "labels": [0, 0, 1, 2, 3]}
            value = contrastive_loss(x, y, temperature=t, **options)
            found.append((value, torch.autograd.grad(value, t)[0]))
        same(*found, 1e-6)

    @given(**SEEDS)
    def test_exact_rows_do_not_stop_the_first_step(self, seed):
        kernel = torch.tensor(normal(seed, 3, 4)).log_softmax(1) - math.log(3)
        f, g, _ = hardneg.sinkhorn(kernel)
        close(torch.exp(f[:, None] + kernel + g).sum(0), np.full(4, 0.25), 1e-11)


# ---- Views, images, encoders, memory

HERE = Path(__file__).resolve().parent
METHODS = train.METHODS
PLAIN = {
    "area": (1, 1),
    "ratio": (1, 1),
    "flip": 0,
    "jitter": 0,
    "gray": 0,
}  # a view that changes nothing


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_images(n=4, size=16, dtype=torch.float64):
    return torch.rand(n, 3, size, size, generator=seeded(0), dtype=dtype)


def weights_of(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def moved(module, before):
    return not all(torch.equal(x, y) for x, y in zip(module.parameters(), before, strict=True))


def tensors_of(state):
    return [x for x in tree_leaves(state) if torch.is_tensor(x)]


def equal_states(one, other):
    return all(torch.equal(x, y) for x, y in zip(tensors_of(one), tensors_of(other), strict=True))


class TestViews:
    """Each transformation is torchvision's or does what its name says.

    A generator's state replays a view.
    """

    @pytest.mark.parametrize(
        "option, wanted, tolerance",
        [
            ({}, lambda x: x, 1e-6),
            ({"flip": 1}, lambda x: x.flip(3), 1e-6),
            ({"gray": 1}, lambda x: transforms.rgb_to_grayscale(x, 3), 1e-3),
            ({"blur": 1, "sigma": (1.5, 1.5)}, lambda x: transforms.gaussian_blur(x, 7, 1.5), 1e-6),
        ],
    )
    def test_one_transformation(self, option, wanted, tolerance):
        x = random_images(size=64)
        close(hardneg.view(x, **PLAIN | option), wanted(x), tolerance)

    @pytest.mark.parametrize("option", ["brightness", "contrast", "saturation"])
    def test_factors_of_colour(self, option):
        """A view does not tell its factor, but one factor has to explain all pixels of an image."""
        adjust = getattr(transforms, f"adjust_{option}")
        x = random_images(20) * 0.3 + 0.2
        strength = {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0, option: 0.4}
        views = hardneg.view(x, seeded(1), **PLAIN | {"jitter": 1}, **strength)
        changes = []
        for one, out in zip(x, views, strict=True):
            away = adjust(one, 1.3) - one  # linear in the factor
            changes.append(float(((out - one) * away).sum() / away.square().sum()) * 0.3)
            close(out, adjust(one, 1 + changes[-1]), 1e-3)
        assert -0.401 < min(changes) < -0.25 and 0.25 < max(changes) < 0.401

    def test_hue_turns_chroma_and_keeps_luma(self):
        x, still = random_images(20) * 0.3 + 0.35, {"brightness": 0, "contrast": 0, "saturation": 0}
        seen = hardneg.view(x, seeded(2), **PLAIN | {"jitter": 1}, **still, hue=0.1)
        yiq = torch.tensor(
            [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
        )
        (luma, *before), (new, *after) = (
            torch.einsum("kc,bchw->kbhw", yiq.double(), y) for y in (x, seen)
        )
        close(new, luma, 1e-6)
        before, after = torch.complex(*before), torch.complex(*after)
        turns = (after * before.conj()).sum((1, 2)) / before.abs().square().sum((1, 2))
        close((after - turns[:, None, None] * before).abs(), np.zeros((20, 16, 16)), 1e-6)
        close(turns.abs(), np.ones(20), 1e-5)
        angles = turns.angle() / (2 * math.pi)
        assert -0.101 < angles.min() < -0.06 and 0.06 < angles.max() < 0.101

    def test_crop(self):
        """An image of its own coordinates shows where a crop was cut."""
        axis = ((torch.arange(64) + 0.5) / 64).double().expand(64, 64)
        x = torch.stack([axis, axis.T, 0 * axis]).expand(200, 3, 64, 64)
        seen = hardneg.view(x, seeded(3), **PLAIN | {"area": (0.2, 0.5), "ratio": (3 / 4, 4 / 3)})[
            :, :2
        ]
        sides = (seen.amax((2, 3)) - seen.amin((2, 3))) * 64 / 63  # (200, 2)
        place = (seen.mean((2, 3)) - 0.5) / (
            0.5 - sides / 2
        )  # −1 and 1 where the crop touches a border
        for x, low, high in (
            (sides.prod(1), 0.2, 0.5),
            (sides[:, 0] / sides[:, 1], 3 / 4, 4 / 3),
            (place[:, 0], -1, 1),
            (place[:, 1], -1, 1),
        ):
            assert low - 0.02 < x.min() < low + 0.1 and high - 0.1 < x.max() < high + 0.02
        assert abs(np.corrcoef(place.T)[0, 1]) < 0.2

    @pytest.mark.parametrize("option", ["flip", "gray", "jitter", "blur"])
    def test_probabilities(self, option):
        x = random_images(1).expand(1000, -1, -1, -1)
        seen = hardneg.view(x, seeded(1), **PLAIN | {option: 0.3}, sigma=(1, 2))
        assert 0.25 < ((seen - x).abs().amax((1, 2, 3)) > 1e-3).double().mean() < 0.35

    def test_each_image_has_its_own_view_and_a_generator_replays_them(self):
        x = (random_images(1).expand(8, -1, -1, -1) * 255).to(torch.uint8)
        seen, again, other = (hardneg.view(x, seeded(seed), blur=0.5) for seed in (4, 4, 5))
        assert torch.equal(seen, again) and not torch.equal(seen, other)
        assert len(seen.flatten(1).unique(dim=0)) == 8 and 0 <= seen.min() and seen.max() <= 1
        close(seen, hardneg.view(x / 255, seeded(4), blur=0.5), 1e-6)
        for dtype in (torch.float16, torch.bfloat16):
            coarse = (x / 255).to(dtype)
            plain = hardneg.view(coarse, **PLAIN)  # computed in float32, on any processor
            assert plain.dtype == torch.float32
            close(plain, coarse, 1e-6)


def write_images(folder, per_class=6, classes=("cat", "dog"), size=(20, 20)):
    """Write constant images as PNG files; all pixels of image k of class c are 40 c + k."""
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(per_class):
            pixels = torch.full((3, *size), 40 * c + k, dtype=torch.uint8)
            transforms.to_pil_image(pixels).save(folder / name / f"{k}.png")


@pytest.fixture(scope="module")
def few():
    """A small training set and test set of the built-in images, with four classes."""
    sets = [
        *train.shapes(240, classes=4, seed=1, size=16),
        *train.shapes(120, classes=4, seed=2, size=16),
    ]
    return train.Images(*sets, ["a", "b", "c", "d"])


class TestImages:
    """The built-in set, torchvision's formats, and folders.

    Folders are large or incomplete, or have broken files.
    """

    def test_shapes(self):
        one, two, other = (train.shapes(50, seed=seed) for seed in (3, 3, 4))
        assert (
            equal_states(one, two)
            and not equal_states(one, other)
            and one[0].shape == (50, 3, 32, 32)
        )
        assert one[1].bincount().tolist() == [5] * 10 and train.shapes(7, size=48)[0].shape == (
            7,
            3,
            48,
            48,
        )

    @pytest.mark.parametrize(
        "part, test", [("train", "test"), ("train", "val"), ("train", ""), (".", "")]
    )
    def test_folders(self, tmp_path, part, test):
        """Without a test set, every fifth image of a class is held out.

        Hidden folders are no classes.
        """
        write_images(tmp_path / part, per_class=10)
        (tmp_path / part / ".hidden").mkdir()
        Image.new("L", (9, 9)).save(tmp_path / part / "loose.png")
        if test:
            write_images(tmp_path / test, per_class=2)
        with pytest.warns(UserWarning, match=r"^1 images beside"):
            images, ten = train.load(tmp_path), set(range(10))
        assert images.classes == ["cat", "dog"]
        for x, labels, kept in (
            (images.train, images.train_labels, ten if test else ten - {4, 9}),
            (images.test, images.test_labels, {0, 1} if test else {4, 9}),
        ):
            assert x.shape[1:] == (3, 20, 20) and x.dtype == torch.uint8
            assert x[:, 0, 0, 0].tolist() == [40 * c + k for c in (0, 1) for k in sorted(kept)]
            assert labels.tolist() == [0] * len(kept) + [1] * len(kept)

    @pytest.mark.parametrize(
        "size, side",
        [
            ((20, 20), 20),
            ((21, 21), 20),
            ((20, 21), 20),
            ((97, 97), 96),
            ((50, 70), 32),
            ((70, 90), 64),
            ((120, 100), 96),
        ],
    )
    def test_sides(self, tmp_path, size, side):
        """Small square images keep their side.

        Others get the largest of 32, 64 and 96 that they have.
        """
        write_images(tmp_path, size=size)
        assert train.load(tmp_path).train.shape == (10, 3, side, side)
        assert train.load(tmp_path, size=24).test.shape == (2, 3, 24, 24)
        pixels = torch.arange(60, dtype=torch.uint8).expand(3, 20, 60)
        transforms.to_pil_image(pixels).save(tmp_path / "oblong.png")
        assert torch.equal(train.read_image(tmp_path / "oblong.png", 20), pixels[:, :, 20:40])

    @pytest.mark.filterwarnings("ignore:.*cannot be read")
    def test_broken_files(self, tmp_path):
        """They are left out, and a warning names them."""
        for part in ("train", "test"):
            write_images(tmp_path / part)
        for name in ("cat/0", "cat/2", "dog/5"):
            (tmp_path / "train" / f"{name}.png").write_bytes(b"no image")
        with pytest.warns(UserWarning, match=r"3 of 12 .*cat.0\.png"):
            images = train.load(tmp_path)
        assert images.train[:, 0, 0, 0].tolist() == [1, 3, 4, 5, 40, 41, 42, 43, 44]
        assert images.train_labels.tolist() == [0] * 4 + [1] * 5
        seed, again = torch.get_rng_state(), train.load(tmp_path, workers=2)
        assert equal_states(images, again) and torch.equal(torch.get_rng_state(), seed)
        for path in (tmp_path / "test").rglob("*.png"):
            path.write_bytes(b"")
        with pytest.raises(ValueError, match="^--data .*readable"):
            train.load(tmp_path)

    @pytest.mark.parametrize(
        "mode, colour, seen",
        [
            ("L", 99, [99] * 3),
            ("1", 1, [255] * 3),
            ("P", 0, [0, 0, 0]),
            ("LA", (9, 0), [255] * 3),
            ("CMYK", (0,) * 4, [255] * 3),
            ("RGBA", (9, 9, 9, 0), [255] * 3),
            ("RGBA", (9, 8, 7, 255), [9, 8, 7]),
            ("I;16", 257 * 130, [130] * 3),
        ],
    )
    def test_modes(self, tmp_path, mode, colour, seen):
        """Transparent pixels are white, 16 bits of grey are scaled."""
        path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
        Image.new(mode, (8, 8), colour).save(path)
        assert train.read_image(path, 8)[:, 3, 3].tolist() == seen

    def test_a_photograph_is_turned_as_the_camera_was(self, tmp_path):
        picture, exif = Image.new("RGB", (40, 20)), Image.Exif()
        picture.paste("white", (0, 0, 20, 20))
        exif[0x0112] = 6  # turn it by a quarter, clockwise
        picture.save(tmp_path / "x.png", exif=exif)
        x = train.read_image(tmp_path / "x.png", 20)
        assert x[:, :9].min() == 255 and x[:, 11:].max() == 0

    def test_fraction_of_each_class(self, tmp_path):
        write_images(tmp_path, per_class=10)
        one, two, other, least = (
            train.load(tmp_path, fraction=share, seed=seed)
            for share, seed in ((0.4, 0), (0.4, 0), (0.4, 1), (0.001, 0))
        )
        rows = [images.train for images in (one, two, other)]
        assert (
            torch.equal(rows[0], rows[1])
            and not torch.equal(rows[0], rows[2])
            and len(least.train) == 2
        )
        assert one.train_labels.bincount().tolist() == [3, 3] and len(one.test) == 4

    @pytest.mark.parametrize(
        "prepare",
        [
            lambda p: None,
            lambda p: (p / "cat").mkdir(),
            lambda p: write_images(p, per_class=1),
            lambda p: (write_images(p / "train"), write_images(p / "test", classes=("cat", "cow"))),
        ],
    )
    def test_unusable_folders_are_named(self, tmp_path, prepare):
        prepare(tmp_path)
        with pytest.raises(ValueError, match=f"^--data is {tmp_path}"):
            train.load(tmp_path)

    @pytest.mark.parametrize(
        "kind, part, layout, target",
        [
            ("CIFAR10", "train", "bhwc", "targets"),
            ("STL10", "split", "bchw", "labels"),
            ("SVHN", "split", "bchw", "labels"),
            ("FashionMNIST", "train", "bhw", "targets"),
        ],
    )
    def test_torchvisions_formats(self, monkeypatch, kind, part, layout, target):
        """Stand-ins hold data as torchvision's classes do: channels last, first, or none."""
        x = torch.tensor(
            rng(1).integers(0, 256, (7, 1 if layout == "bhw" else 3, 28, 28), np.uint8)
        )
        x = x.expand(7, 3, 28, 28)
        data = {"bhwc": x.permute(0, 2, 3, 1), "bchw": x, "bhw": x[:, 0]}[layout].numpy()
        labels, name = [0, 1, -1, 1, 0, 1, 0], kind.lower().replace("nm", "n-m")

        def stand_in(root, download, **which):
            some = slice(0, 5) if which[part] in (True, "train", "train+unlabeled") else slice(5, 7)
            return SimpleNamespace(data=data[some], **{target: labels[some]})

        monkeypatch.setattr(datasets, kind, stand_in)
        resized = transforms.resize(
            x, [64, 64], transforms.InterpolationMode.BICUBIC, antialias=True
        )
        for size, wanted in ((None, x), (28, x), (64, resized)):
            images = train.load(name, size=size)
            assert len(images.train) == 5 and torch.equal(
                torch.cat([images.train, images.test]), wanted
            )
            assert torch.cat([images.train_labels, images.test_labels]).tolist() == labels
        monkeypatch.setattr(datasets, kind, lambda *_, **__: open("no-such-file"))
        with pytest.raises(RuntimeError, match=f"{name} is not in here.*no-such-file"):
            train.load(name, root="here")


class TestEncoders:
    """Features and embeddings have the right shapes; the first layer depends on the image size."""

    @pytest.mark.parametrize(
        "name, size, features", [("small", 32, 256), ("resnet18", 64, 512), ("resnet50", 96, 2048)]
    )
    def test_shapes(self, name, size, features):
        encoder = hardneg.Encoder(name, dim=16, size=size).eval()
        found, z = encoder(torch.rand(2, 3, size, size))
        assert found.shape == (2, features) == (2, encoder.features) and z.shape == (2, 16)
        close(z, encoder.head(found), 1e-5)
        if name != "small":
            stem = (
                encoder.backbone.conv1.kernel_size[0],
                isinstance(encoder.backbone.maxpool, nn.MaxPool2d),
            )
            assert stem == ((3, False) if size <= 64 else (7, True))


class TestMemoryBank:
    """A bank remembers every image, and a queue remembers the last embeddings.

    A slow network follows a fast one.
    """

    @given(
        **SEEDS,
        n=st.integers(1, 8),
        b=st.integers(1, 6),
        momentum=st.floats(0, 0.99),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
    )
    def test_update(self, seed, n, b, momentum, dtype):
        """Also where an index comes more than once."""
        index, z = (
            rng(seed).integers(n, size=b),
            torch.tensor(normal(seed, b, 3)).to(dtype).requires_grad_(),
        )
        rows = normal(seed + 1, n, 3)
        bank = hardneg.MemoryBank(torch.tensor(rows, requires_grad=True), momentum)
        bank.update(torch.tensor(index), z)
        close(bank.rows, oracle.bank_update(oracle.unit(rows), index, numpy(z), momentum), 1e-6)
        assert not bank.rows.requires_grad and bank.rows.dtype == torch.float64

    @settings(max_examples=40)
    @given(size=st.integers(1, 5), batches=st.lists(st.integers(1, 6), min_size=2, max_size=6))
    def test_queue_holds_the_last_embeddings(self, size, batches):
        """Batches may be larger than the queue; a state saved in between changes nothing."""
        queue, angles = hardneg.MemoryBank(torch.ones(size, 2)), torch.arange(sum(batches)) / 100
        keys = torch.stack([angles.cos(), angles.sin()], 1)
        for some in keys.split(batches):
            other = hardneg.MemoryBank(torch.ones(size, 2))
            other.load_state_dict(queue.state_dict())
            queue = other
            queue.push(3 * some)
        assert ((queue.rows @ keys[-size:].T).amax(0) > 1 - 1e-5).all()

    @pytest.mark.parametrize("loss", ["hard", "hcl"])
    def test_a_step_does_not_copy_the_bank(self, loss):
        """Its largest tensor has the size of the logits, A × K, not of the bank, K × D."""
        images, encoder = torch.zeros(4000, 3, 8, 8, dtype=torch.uint8), Pixels()
        bank = hardneg.Bank(hardneg.ContrastiveLoss(loss, tau_plus=0.0), encoder, images)
        with Largest() as largest:
            bank.step(encoder, images[:8], torch.arange(8), None, return_stats=True)[0].backward()
            bank.after_step()
        assert largest.bytes <= 8 * 4000 * 8 < bank.bank.rows.nbytes / 10

    def test_follow(self):
        leader, follower = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
        leader(torch.tensor(normal(1, 5, 2)).float())
        before = copy.deepcopy(follower.state_dict())
        hardneg.follow(follower, leader, 0.9)
        states = before, follower.state_dict(), leader.state_dict()
        for old, x, new in zip(*(state.values() for state in states), strict=True):
            mean = oracle.ema(numpy(old), numpy(new), 0.9)
            close(x, mean if x.is_floating_point() else new, 1e-6)


# ---- Generators


def tiny_game(size=8, **options):
    torch.manual_seed(0)
    return hardneg.Game(
        **dict(size=size, width=2, latent=4, pretrain=1, every=2, batch_size=8) | options
    )


def settled(game):
    """Make a game a fixed function: float64, eval mode, spectral norms that have converged."""
    with torch.no_grad():
        for _ in range(30):
            game.D(game.G(game.latents(32)))
    game.G_ema.load_state_dict(game.G.state_dict())
    draw = game.latents
    game.double().eval()
    game.latents = lambda *arguments: draw(*arguments).double()
    game.train = lambda: game
    return game


def play(game, encoder, real, lr=0.0, seed=3, turn=True, **options):
    """Take one step of DiffHard with plain gradient descent for the encoder → loss, figures."""
    criterion = hardneg.ContrastiveLoss("ppcl" if game.pairs else "simclr")
    method = hardneg.DiffHard(criterion, game, {"blur": 0.5})
    method.taken = 0 if turn else 1
    loss, figures = method.step(encoder, real, None, seeded(seed), **options)
    hardneg._descend(loss, torch.optim.SGD(encoder.parameters(), lr), "encoder")
    return loss.detach(), figures | (method.after_step() or {})


def by_hand(game, encoder, real, seed=3):
    """Compute the loss of the same latents and views, and the cosine.

    The loss is the one of Step 1 of [3]'s Algorithm 1.
    """
    generator, each = seeded(seed), 2 if game.pairs else 1
    z = game.latents(len(real) // each, generator)
    batch = torch.cat([*(network(z) for network in (game.G, game.G_ema)[:each]), real])
    rows = encoder(torch.cat([hardneg.view(batch, generator, blur=0.5) for _ in range(2)]))[1]
    loss = contrastive_loss(
        *rows.chunk(2),
        loss="ppcl" if game.pairs else "simclr",
        labels=[*range(len(z))] * each + [*range(100, 100 + len(real))],
    )
    one, other = hardneg.unit(rows[: 2 * len(z)].detach()).chunk(2)
    return loss, (one * other).sum(1).mean()


class Pixels(nn.Module):
    """Embed an image as its pixels, times a factor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x, self.scale * x.flatten(1)


def small_encoder(dtype=torch.float32):
    torch.manual_seed(1)
    return hardneg.Encoder(dim=8, size=8).to(dtype)


@pytest.mark.filterwarnings("ignore:the generator has collapsed")
class TestGame:
    """Generators against the encoder: the loss, who moves by which gradient, and whole runs."""

    @settings(max_examples=30)
    @given(
        **SEEDS,
        pairs=st.integers(0, 3),
        real=st.integers(1, 4),
        t=st.floats(0.2, 2),
        size=BLOCK_SIZES,
    )
    def test_ppcl_is_the_papers(self, seed, pairs, real, t, size):
        """[3] Eq. 8 with both sets written out.

        A generated anchor has three positives, and a real one has one.
        """
        assume(pairs + real > 1)
        labels = [*range(pairs), *range(pairs), *range(pairs, pairs + real)]
        raw, latents = [*range(len(labels))] * 2, [k if k < pairs else None for k in labels] * 2
        x, wanted = normal(seed, len(raw), 3), lambda rows: oracle.ppcl_batch(rows, raw, latents, t)
        same(
            ours(x, 2, loss="ppcl", labels=labels, temperature=t, block_size=size),
            (wanted(x), oracle.gradient(wanted, x)),
            1e-10,
        )
        assert [len(p) for p in oracle.ppcl_sets(raw, latents)[1]] == [
            1 if z is None else 3 for z in latents
        ]

    @pytest.mark.parametrize("name, inputs", [("hinge_discriminator", 2), ("hinge_generator", 1)])
    @given(**SEEDS, b=st.integers(1, 5))
    def test_hinge_losses(self, name, inputs, seed, b):
        scores = normal(seed, 2, b)[:inputs] * 2

        def loss(rows):
            return getattr(oracle, name)(*rows)

        x = torch.tensor(scores, requires_grad=True)
        value = getattr(hardneg, name)(*x)
        (gradient,) = torch.autograd.grad(value, x)
        same((value, gradient), (loss(scores), oracle.gradient(loss, scores)), 1e-12)

    @settings(max_examples=10)
    @given(**SEEDS, n=st.sampled_from([2, 3, 7, 30]))
    def test_diversity(self, seed, n):
        x = rng(seed).random((2, n, 3, 4, 4))
        for dtype, tolerance in (
            (torch.float64, 1e-6),
            (torch.float32, 1e-3),
            (torch.float16, 0.02),
        ):
            close(hardneg.diversity(*torch.tensor(x).to(dtype)), oracle.diversity(*x), tolerance)
        images = random_images(64, dtype=torch.float32)  # above 25 rows, cdist rounds
        assert hardneg.diversity(images[:1].expand(64, -1, -1, -1), images) < 0.01

    @pytest.mark.parametrize("size, width, latent", [(8, 2, 3), (32, 2, 1), (64, 3, 5)])
    def test_networks(self, size, width, latent):
        """Images in [0, 1] and one score each, in float32; widths double up to four times."""
        game = hardneg.Game(size, width, latent)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                images = game.G(4 * game.latents(3))
                scores = game.D(images)
            assert images.shape == (3, 3, size, size) and scores.shape == (3,)
            assert images.dtype == scores.dtype == torch.float32 and len(images.unique()) > 260
            assert 0 <= images.min() and images.max() <= 1 and images.std() > 0.01
        channels = [m.out_channels for m in game.D.modules() if isinstance(m, nn.Conv2d)]
        assert channels[0] == width == game.G.blocks[-1].in_channels
        assert max(channels) == width * min(4, size // 4)
        first, *others = [isinstance(block.residual[0], nn.ReLU) for block in game.D.blocks[:-1]]
        assert not first and all(others)  # a ReLU would cut off half of the image
        close(game.latents(20000, seeded(1)).T.cov().view(latent, latent), np.eye(latent), 0.05)

    def test_weights_have_spectral_norm_one(self, few):
        """Once the estimates of the singular vectors have settled, on any processor."""
        game = tiny_game(16, width=4, pretrain=40, lr=1e-3)
        finish(begin(few.train, "diffhard", method_options={"game": game}), until=120)
        estimates = {k: x for k, x in game.G_ema.named_buffers() if k.endswith(("._u", "._v"))}
        for estimate in estimates.values():  # of the follower: averages have a norm below 1
            close(estimate.norm(), 1, 1e-5)
        with torch.no_grad():
            for _ in range(100):
                for network in (game.G, game.G_ema):
                    images = network(game.latents(2))
                game.D(images)
        layers = [m for m in game.eval().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        weights = [layer.weight.detach().flatten(1) for layer in layers]
        norms = [float(torch.linalg.svdvals(weight)[0]) for weight in weights]
        assert len(estimates) == 16 and len(norms) == 8 + 8 + 10
        assert all(0.99 < norm < 1.01 for norm in norms), norms

    @pytest.mark.parametrize("n, pairs", [(6, True), (5, True), (3, False)])
    @pytest.mark.parametrize("turn", [True, False])
    def test_a_step_takes_the_loss_of_generated_and_real_images(self, n, pairs, turn):
        """An odd number of images has one generated image fewer, as they come in pairs."""
        game, encoder, images = (
            settled(tiny_game(pairs=pairs)),
            Pixels().double(),
            random_images(n, 8),
        )
        with torch.no_grad():
            game.G_ema.first.bias.add_(torch.linspace(-1, 1, 64))  # the two generators differ
        loss, cosine = by_hand(game, encoder, images)
        found, figures = play(game, encoder, images, turn=turn, return_stats=True)
        close(found, loss, 1e-12)
        assert ("d_loss" in figures) == turn and ("pair" in figures) == pairs
        close(figures.get("pair", cosine), cosine, 1e-12)

    @pytest.mark.parametrize(
        "options, turn, movers",
        [
            ({}, True, "EGDF"),
            ({}, False, "E"),
            ({"pairs": False}, True, "EGDF"),
            ({"lr": 0.0}, True, "EGF"),
            ({"ascent": False}, True, "EGD"),
            ({"lr": 0.0, "ascent": False}, True, "E"),
        ],
    )
    def test_who_moves(self, options, turn, movers):
        """Encoder, generator, discriminator and follower, in a turn of the generator or not."""
        game, encoder = tiny_game(momentum=0.5, **options), small_encoder()
        parts = {"E": encoder, "G": game.G, "D": game.D, "F": game.G_ema}
        before = {name: weights_of(part) for name, part in parts.items()}
        play(game, encoder, random_images(8, 8, torch.float32), lr=0.1, turn=turn)
        assert "".join(name for name, part in parts.items() if moved(part, before[name])) == movers
        assert all(p.grad is None and not p.requires_grad for p in game.G_ema.parameters())
        assert all(p.requires_grad for p in game.D.parameters())

    def test_the_encoder_descends_what_the_generator_ascends(self):
        """To first order by η|g|² and, for Adam's first step, by η Σ g²/(|g| + 1e-8)."""
        game = settled(tiny_game(lr=0.0, ascent_lr=1e-6, momentum=1 - 1e-12))
        encoder, real = small_encoder(torch.float64), random_images(8, 8)
        game.imitate(real, seeded(1))  # leaves gradients behind, which must not count
        before, count = by_hand(game, encoder, real)[0], len(list(encoder.parameters()))
        slopes = torch.autograd.grad(before, [*encoder.parameters(), *game.G.parameters()])
        descent = -1e-5 * float(sum(g.square().sum() for g in slopes[:count]))
        ascent = 1e-6 * float(sum((g.square() / (g.abs() + 1e-8)).sum() for g in slopes[count:]))
        start = copy.deepcopy(encoder.state_dict())
        for lr, turn, wanted in ((1e-5, False, descent), (1.0, True, ascent)):
            play(game, encoder, real, lr=lr, turn=turn)
            if turn:
                encoder.load_state_dict(start)  # the encoder's step does not change the generator's
            change = float((by_hand(game, encoder, real)[0] - before).detach())
            assert change == pytest.approx(wanted, rel=0.02)
            encoder.load_state_dict(start)

    def test_the_follower_follows_after_the_ascent_and_before_imitate(self):
        """Eq. 4, then Eq. 7, then Eq. 5."""
        one, two = (tiny_game(momentum=0.7, ascent_lr=0.01, lr=lr) for lr in (0.0, 1e-2))
        for p in (*one.G_ema.parameters(), *two.G_ema.parameters()):
            p.add_(0.1)
        before = weights_of(one.G_ema)
        for game in (one, two):
            play(game, Pixels(), random_images(8, 8, torch.float32))
        networks = one.G_ema.parameters(), one.G.parameters()
        for old, mine, leader in zip(before, *networks, strict=True):
            close(mine, oracle.ema(numpy(old), numpy(leader), 0.7), 1e-6)
        assert not moved(one.G_ema, weights_of(two.G_ema)) and moved(one.G, weights_of(two.G))

    def test_imitate_moves_the_discriminator_and_then_the_generator(self):
        """Each takes one step of Adam on Eq. 5.

        The generator's step is against the discriminator that has moved.
        """
        game, images = settled(tiny_game(lr=0.01)), random_images(12, 8)
        other = copy.deepcopy(game)
        figures = game.imitate(images, seeded(5))
        real, z = images[:8], torch.randn(8, 4, generator=seeded(5)).double()
        close(figures["diversity"], oracle.diversity(numpy(other.G(z)), numpy(real)), 1e-6)
        losses = {
            "d_loss": lambda: hardneg.hinge_discriminator(
                other.D(real), other.D(other.G(z).detach())
            ),
            "g_loss": lambda: hardneg.hinge_generator(other.D(other.G(z))),
        }
        for network, (name, loss) in zip((other.D, other.G), losses.items(), strict=True):
            optimizer = torch.optim.Adam(network.parameters(), 0.01, betas=(0.0, 0.999))
            value = loss()
            close(figures[name], value, 1e-10)
            value.backward()
            optimizer.step()
        for p, q in zip(game.parameters(), other.parameters(), strict=True):
            close(p, q, 1e-10)
        assert not any(figure.requires_grad for figure in figures.values())

    @pytest.mark.parametrize("broken", ["encoder", "discriminator", "generator"])
    def test_a_loss_that_is_not_finite_moves_nothing(self, monkeypatch, broken):
        game, encoder, real = tiny_game(), small_encoder(), random_images(8, 8, torch.float32)
        parts = [encoder, game.G] + [game.D] * (broken != "generator")
        before = [weights_of(part) for part in parts]
        monkeypatch.setattr(
            hardneg.ContrastiveLoss, "forward", lambda self, *z, **_: z[0].sum() * INF
        )
        if broken != "encoder":
            monkeypatch.setattr(hardneg, f"hinge_{broken}", lambda *scores: scores[0].sum() * INF)
        with pytest.raises(
            FloatingPointError, match=f"^the loss of the {broken} is (inf|-inf|nan)"
        ):
            play(game, encoder, real, lr=0.1) if broken == "encoder" else game.imitate(
                real, seeded(1)
            )
        assert not any(moved(part, old) for part, old in zip(parts, before, strict=True))

    @pytest.mark.parametrize("pretrain", [0, 1, 3])
    def test_pre_training_and_turns(self, few, pretrain):
        """Epochs of the game alone have no loss.

        Later the game moves in every second step, across epochs.
        The rate of the ascent goes like the encoder's.
        """
        game, steps, climbed = (
            tiny_game(16, pretrain=pretrain, ascent_lr=0.002, lr=0.003),
            3 * pretrain,
            [],
        )
        training, rate = (
            begin(few.train, "diffhard", method_options={"game": game}),
            lambda x: x.param_groups[0]["lr"],
        )
        optimizer, ascend, rates = game.optimizers["ascent"], game.optimizers["ascent"].step, []
        optimizer.step = lambda: climbed.append(rate(optimizer) / 0.002) or ascend()
        before, first = weights_of(game), weights_of(training.encoder)
        assert (training.epoch, training.steps) == (-pretrain, steps + 6)
        for k, figures in enumerate(training):
            assert (figures["step"], figures["steps"], figures["images"]) == (k + 1, steps + 6, 80)
            assert (
                figures["epoch"] == k // 3 - pretrain and training.epoch == (k + 1) // 3 - pretrain
            )
            turn = k < steps or (k - steps) % 2 == 0
            assert moved(game, before) == turn == ("d_loss" in figures)
            assert ("loss" in figures) == moved(training.encoder, first) == (k >= steps)
            before = weights_of(game)
            rates += [rate(training.optimizer) / 3e-3] * (k >= steps and turn)
        assert k + 1 == training.steps and len(climbed) == 3 and rates[0] != rates[-1]
        close(climbed, rates, 1e-12)
        assert {rate(game.optimizers[name]) for name in "GD"} == {0.003}

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        "diversity, d_loss, warns", [(0.3, 0.1, 0), (0.2, 0.1, 1), (0.3, 0.005, 1)]
    )
    def test_warnings(self, diversity, d_loss, warns):
        """They come once the encoder has begun."""
        method, images = (
            hardneg.DiffHard(hardneg.ContrastiveLoss("ppcl"), tiny_game()),
            random_images(4, 8),
        )
        method.game.imitate = lambda *_: {"diversity": diversity, "d_loss": d_loss}
        assert method.step(None, images, None, seeded(1)) == (None, {}) and method.after_step()
        method.step(Pixels(), images, None, seeded(1))[0].backward()
        with (
            pytest.warns(UserWarning, match="^the generator") if warns else contextlib.nullcontext()
        ):
            method.after_step()


# ---- Readouts and training


class TestReadouts:
    """Accuracies are those of plain loops and of another solver; measuring changes nothing."""

    def test_embedding_leaves_the_encoder_as_it_was(self, few):
        encoder = hardneg.Encoder()
        encoder.head.eval()
        before = copy.deepcopy(encoder.state_dict())
        found = hardneg.embed(encoder, few.train[:50], batch_size=20)
        assert equal_states(encoder.state_dict(), before) and not any(
            x.requires_grad for x in found
        )
        assert encoder.training and encoder.backbone.training and not encoder.head.training
        features, z = encoder.eval()(few.train[:50] / 255)
        close(torch.cat(found, 1), torch.cat([features, z / z.norm(dim=1, keepdim=True)], 1), 1e-5)

    @settings(max_examples=5)
    @given(**SEEDS, k=st.sampled_from([1, 7, 100]))
    def test_knn(self, seed, k):
        x, y, labels = (
            normal(seed, 30, 4),
            normal(seed + 1, 1030, 4),
            rng(seed).integers(3, size=1060),
        )
        right = 0
        cosines = oracle.unit(y) @ oracle.unit(x).T
        for row, label in zip(cosines, labels[30:], strict=True):
            votes = np.zeros(3)
            for j in sorted(range(30), key=lambda j: -row[j])[:k]:
                votes[labels[j]] += np.exp(row[j] / 0.5)
            right += votes.argmax() == label
        found = hardneg.knn_accuracy(*map(torch.as_tensor, (x, labels[:30], y, labels[30:])), k=k)
        assert found == pytest.approx(100 * right / 1030, abs=0.11)  # float32 may turn one vote

    def test_linear_readout_is_scipys(self):
        """The class is in a small difference of features.

        It takes large weights, against the penalty.
        """
        labels, x = rng(1).integers(3, size=1200), normal(1, 1200, 40)
        x[:, 1] = x[:, 0] + 0.1 * x[:, 1] + 0.2 * (labels - 1)
        scaled = (x - x[:200].mean(0)) / x[:200].std(0, ddof=1)

        def scores(flat, rows):
            weight, bias = flat[:120].reshape(3, 40), flat[120:]
            return scaled[rows] @ weight.T + bias

        def objective(flat):
            some = scores(flat, slice(200))
            fit = np.mean(logsumexp(some, axis=1) - some[np.arange(200), labels[:200]])
            return fit + 1e-3 / 2 * (flat[:120] ** 2).sum()

        best = minimize(objective, np.zeros(123), tol=1e-9).x
        wanted = 100 * np.mean(scores(best, slice(200, None)).argmax(1) == labels[200:])
        dull = np.where(np.arange(1200) < 200, 0.1, normal(4, 1200))[
            :, None
        ]  # constant in training: no part
        for rows in (x, 1e3 * x + 5, np.concatenate([x, dull], 1)):
            sets = map(torch.as_tensor, (rows[:200], labels[:200], rows[200:], labels[200:]))
            assert hardneg.linear_readout(*sets) == pytest.approx(
                wanted, abs=0.31
            )  # a few are on the border

    def test_measures_of_many_rows(self):
        """More than one block of them, in half precision."""
        z, labels, others = (
            torch.tensor(normal(5, 2100, 4)) + 1,
            torch.arange(2100) % 3,
            torch.eye(2100) == 0,
        )
        cosines = hardneg.unit(z) @ hardneg.unit(z).T
        close(hardneg.uniformity(z.half()), (-4 * (1 - cosines[others])).exp().mean().log(), 1e-3)
        same_class = (labels[:, None] == labels) & others
        close(hardneg.tolerance(z.half(), labels.int()), cosines[same_class].mean(), 1e-3)

    def test_evaluate(self, few, monkeypatch):
        """Images without a label do not count.

        Of very many images an even share counts, and pixels are averaged.
        """
        encoder, hidden = hardneg.Encoder(size=16), few.train_labels.clone()
        hidden[:40] = -1
        rest = few._replace(train=few.train[40:], train_labels=few.train_labels[40:])
        for network in (None, encoder):
            found = train.evaluate(network, few._replace(train_labels=hidden))
            assert found == train.evaluate(network, rest)
        (x, _), (y, z) = (hardneg.embed(encoder, part) for part in (rest.train, few.test))
        close(found["knn"], hardneg.knn_accuracy(x, rest.train_labels, y, few.test_labels), 1e-4)
        close(found["tolerance"], hardneg.tolerance(z, few.test_labels), 1e-4)
        seen, times = [], lambda x, k: x.repeat_interleave(k, 2).repeat_interleave(k, 3)
        monkeypatch.setattr(hardneg, "linear_readout", lambda *sets: seen.extend(sets) or 0.0)
        monkeypatch.setattr(train, "READOUT", 100)
        train.evaluate(None, few._replace(train=times(few.train, 4), test=times(few.test, 4)))
        assert seen[1].bincount().tolist() == [25] * 4 and seen[0].shape == (100, 3 * 32 * 32)
        close(seen[2], times(few.test, 2).flatten(1) / 255, 1e-6)


def make(name, criterion, encoder, images, **method_options):
    """Make a method of training by its name."""
    if name == "diffhard":
        game = tiny_game(images.shape[-1])
        return hardneg.DiffHard(criterion, **{"game": game} | method_options)
    if name == "bank":
        return hardneg.Bank(criterion, encoder, images, **method_options)
    if name == "queue":
        return hardneg.Queue(criterion, encoder, images, **{"size": 100} | method_options)
    return {"simclr": hardneg.SimCLR, "clae": hardneg.CLAE}[name](criterion, **method_options)


def begin(images, name="simclr", loss="simclr", init=0, method_options=None, **options):
    """Make a training that has not begun."""
    torch.manual_seed(init)
    encoder = hardneg.Encoder(dim=16, size=images.shape[-1])
    criterion = hardneg.ContrastiveLoss(loss, objective="ppcl" if name == "diffhard" else None)
    options = dict(epochs=2, batch_size=80, lr=3e-3, bfloat16=False) | options
    method = make(name, criterion, encoder, images, **method_options or {})
    return hardneg.Training(encoder, images, method, **options)


def finish(training, until=None):
    """Run a training to its end or to a step → the figures of all steps."""
    limit = range(until or training.steps)
    return [figures for figures, _ in zip(training, limit, strict=False)]


def spy(training):
    """Record the arguments of each step of a training's method → the list."""
    asked, step = [], training.method.step
    training.method.step = lambda *given, **options: asked.append(given) or step(*given, **options)
    return asked


@pytest.mark.filterwarnings("ignore:the generator has collapsed")
class TestTraining:
    """Runs learn, repeat by seed, resume to the same bits, and stop when the loss diverges."""

    @pytest.mark.parametrize(
        "name, epochs, gap", [("simclr", 10, 0.5), ("bank", 12, 0.3), ("queue", 10, 0.1)]
    )
    def test_learns(self, few, name, epochs, gap):
        seen = finish(begin(few.train, name, epochs=epochs))
        assert seen[-3]["positive"] > seen[-3]["negative"] + gap
        assert name != "simclr" or seen[-1]["loss"] < seen[0]["loss"] - 0.5

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.parametrize("loss", PRESETS)
    def test_every_loss_takes_a_step(self, few, loss, name):
        training = begin(few.train[:80], name, loss, batch_size=40)
        before = weights_of(training.encoder)
        assert finish(training, until=3)[-1]["loss"].isfinite() and moved(training.encoder, before)
        assert finite(*training.encoder.parameters())

    @pytest.mark.parametrize("name", METHODS)
    def test_everything_is_on_the_device_of_the_images(self, few, name):
        """A tensor on the default device, meta, would raise."""
        images, labels = few.train[:40].to(DEVICE), few.train_labels[:40].to(DEVICE)
        method_options = {"game": tiny_game(16, every=1)} if name == "diffhard" else {}
        training = begin(images, name, method_options=method_options)
        method, encoder = training.method.to(DEVICE), training.encoder.to(DEVICE)
        arguments = encoder, images, torch.arange(40, device=DEVICE), torch.Generator(DEVICE)
        for device in (DEVICE, "meta"):  # Adam makes its state in a first step
            with torch.device(device):
                loss, figures = method.step(*arguments, return_stats=True)
                loss.backward()
                x, z = hardneg.embed(encoder, images)
                figures |= method.after_step() or {}
                figures |= {"u": hardneg.uniformity(z), "t": hardneg.tolerance(z, labels)}
                for accuracy in (hardneg.linear_readout, hardneg.knn_accuracy):
                    assert accuracy(x, labels, x, labels) > 25
        assert {x.device.type for x in (loss, *figures.values())} == {DEVICE}

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.parametrize("recipe", hardneg.RECIPES)
    def test_resumes_to_the_same_bits(self, few, name, recipe, tmp_path):
        """From the end of an epoch and between: encoder, optimizers, memories, the game."""
        whole, seen = begin(few.train, name, recipe=recipe), []
        for figures in whole:
            seen.append(figures)
            if len(seen) in (1, whole.steps_per_epoch, whole.steps_per_epoch + 2):
                torch.save(whole.state_dict(), tmp_path / f"{len(seen)}.pt")
        for path in tmp_path.iterdir():
            second = begin(few.train, name, recipe=recipe, init=1)
            second.load_state_dict(torch.load(path, weights_only=True))
            assert finish(second) == seen[int(path.stem) :]
            assert equal_states(whole.state_dict(), second.state_dict())
        assert set(whole.state_dict()) == {
            "epoch",
            "step_in_epoch",
            "generator",
            "encoder",
            "method",
            "optimizer",
        }

    @pytest.mark.parametrize("n, size, sizes", [(240, 70, [60] * 4), (5, 2, [3, 2]), (7, 99, [7])])
    def test_an_epoch_has_each_image_once(self, few, n, size, sizes):
        """In batches of nearly one size, never of one image; epochs and seeds differ in order."""
        orders = []
        for seed in (5, 5, 6):
            training = begin(few.train[:n], batch_size=size, seed=seed)
            asked = spy(training)
            assert [figures["images"] for figures in training] == 2 * sizes
            assert all(torch.equal(images, few.train[index]) for _, images, index, _ in asked)
            one, two = torch.cat([given[2] for given in asked]).split(n)
            assert set(one.tolist()) == set(two.tolist()) == set(range(n)) and not torch.equal(
                one, two
            )
            orders.append(one.tolist())
        assert orders[0] == orders[1] != orders[2]

    def test_schedules_and_statistics(self, few):
        """A schedule's option reaches the loss; statistics come every tenth of an epoch."""

        def schedule(progress):
            return hardneg.lead_in(progress, 0.1)

        seen = finish(begin(few.train, loss="hard", schedules={"alpha": schedule}, batch_size=8))
        assert [p["alpha"] for p in seen] == [schedule(k / 60) for k in range(60)]
        told = {k: float(p["ess"]) for k, p in enumerate(seen) if "ess" in p}
        assert told == pytest.approx(
            {k: math.ceil(14 * seen[k]["alpha"]) / 14 for k in range(0, 60, 3)}
        )

    def test_recipes(self, few):
        """adamw climbs for a tenth and falls by a cosine.

        sgd falls to a tenth at 80 % and again at 95 %.
        """
        place = np.arange(100) / 100
        rates = {
            "sgd": [1] * 80 + [0.1] * 15 + [0.01] * 5,
            "adamw": np.minimum((place + 0.01) * 10, 1) * (1 + np.cos(np.pi * place)) / 2,
        }
        for name, wanted in rates.items():
            training = begin(few.train[:2], recipe=name, epochs=100, lr=1e-6)
            close([1e6 * training.optimizer.param_groups[0]["lr"] for _ in training], wanted, 1e-12)
        learned = nn.Parameter(torch.tensor(0.4))
        method = hardneg.SimCLR(hardneg.ContrastiveLoss("hcl", temperature=learned))
        training = hardneg.Training(
            hardneg.Encoder(size=16), few.train, method, recipe="sgd", lr=0.5
        )
        encoder, criterion = training.optimizer.param_groups
        assert (encoder["lr"], encoder["momentum"], encoder["weight_decay"]) == (0.5, 0.9, 5e-4)
        assert (training.epochs, training.steps_per_epoch, criterion["weight_decay"]) == (200, 2, 0)
        assert finish(training, until=1) and learned != 0.4

    def test_bank_holds_the_embeddings_of_each_image(self, few, monkeypatch):
        """The momentum is 0 and the views are plain.

        At first the rows are the untrained encoder's embeddings, less their mean.
        """
        monkeypatch.setattr(hardneg, "view", lambda images, *_, **__: images / 255)
        training = begin(few.train, "bank", method_options={"momentum": 0.0})
        said, positives = {}, []
        bank, update = training.method.bank, training.method.bank.update
        z = hardneg.embed(training.encoder, few.train)[1]
        close(bank.rows, hardneg.unit(z - z.mean(0)), 1e-5)  # near one point: rounding counts
        bank.update = lambda index, z: (
            positives.append((bank.rows[index] * z).sum(1).mean()),
            said.update(zip(index.tolist(), z, strict=True)),
            update(index, z),
        )
        seen = finish(training)
        close(bank.rows, torch.stack([said[i] for i in range(240)]), 1e-6)
        close([p["positive"] for p in seen], positives, 1e-5)  # rows before their update

    def test_queue_holds_embeddings_of_the_slow_encoder(self, few, monkeypatch):
        """In eval mode; they enter after the step, and then the slow encoder follows."""
        monkeypatch.setattr(hardneg, "view", lambda images, *_, **__: images / 255)
        training = begin(few.train, "queue", method_options={"momentum": 0.5}, epochs=1)
        method, encoder, asked = training.method, training.encoder, spy(training)
        rows, slow = method.queue.rows.clone(), copy.deepcopy(encoder)
        cosines = rows @ hardneg.embed(encoder, few.train)[1].T
        assert (
            cosines.amax(1).min() > 0.99999 and len(cosines.argmax(1).unique()) == len(rows) == 100
        )
        for figures in training:
            keys = hardneg.embed(slow, asked[-1][1])[1]
            kept = torch.cat([rows[80:], keys]) if figures["step"] == 1 else keys
            assert (method.queue.rows @ kept.T).amax(0).min() > 0.99999
            hardneg.follow(slow, encoder, 0.5)
            assert equal_states(slow.state_dict(), method.slow.state_dict())
        assert not any(p.requires_grad for p in method.slow.parameters())
        rows = begin(few.train[:30], "queue").method.queue.rows  # more rows than images
        assert len(rows) == 100 and len((rows @ rows.T > 0.99999).unique(dim=0)) == 30

    def test_true_positives(self, few, monkeypatch):
        """The second view is of another image of the class.

        If there is none, it is of the image itself.
        """
        seen, labels = [], few.train_labels[:60].clone()
        labels[:2] = torch.tensor([-1, 9])  # no label; alone in its class
        places = torch.arange(60).to(torch.uint8)[:, None, None, None].expand(-1, 3, 16, 16)
        monkeypatch.setattr(
            hardneg, "view", lambda x, *_, **__: seen.append(x[:, 0, 0, 0].long()) or x / 255
        )
        partners = {"partners": (places, labels)}
        finish(begin(places, method_options=partners, batch_size=30, epochs=20))
        for first, second in zip(seen[::2], seen[1::2], strict=True):
            assert torch.equal(labels[first], labels[second])
            assert torch.equal(first == second, first < 2)
        assert len(torch.cat(seen[1::2]).unique()) == 60

    @pytest.mark.parametrize("name, step", [("simclr", 1), ("diffhard", 4)])
    def test_a_loss_that_is_not_finite_stops_the_run(self, few, name, step):
        training = begin(few.train, name)
        next(training.encoder.parameters()).data.fill_(math.nan)
        with pytest.raises(
            FloatingPointError, match=rf"^step {step} of {training.steps}: .*NaN.*lr"
        ):
            finish(training)

    @pytest.mark.parametrize("bound", [1e-3, 0.1])
    def test_clae_moves_the_second_view_against_the_encoder(self, bound):
        """The view moves by the bound along the sign of the loss's slope, and within [0, 1].

        The slope here is a central difference.
        """
        torch.manual_seed(0)
        layer, seen = nn.Linear(48, 3).double(), []
        layer.weight.data[:, :16] = 0  # blind to one colour: no slope, no change

        def encoder(x):
            seen.append(x)
            return x, torch.tanh(layer(x.flatten(1)))

        images = random_images(3, 4)
        method = hardneg.CLAE(hardneg.ContrastiveLoss(), bound, {"jitter": 0.5})
        loss, stats = method.step(
            encoder, images, None, seeded(4), return_stats=True, temperature=0.7
        )

        def said(x, y):
            z = encoder(torch.cat([x, torch.as_tensor(y)]))[1].chunk(2)
            return contrastive_loss(*z, temperature=0.7, return_stats=True)

        generator, (views, harder) = seeded(4), seen[:2]
        first, second = (hardneg.view(images, generator, jitter=0.5) for _ in range(2))
        assert torch.equal(views, torch.cat([first, second])) and not harder.requires_grad
        with torch.no_grad():
            slope = oracle.central_difference(lambda y: float(said(first, y)[0]), numpy(second))
        assert (
            np.abs(slope[:, 1:]).min() > 1e-8
            and ((harder - second)[:, 1:].abs() < bound - 1e-9).any()
        )
        close(harder, oracle.perturbed(numpy(second), slope, bound), 1e-12)
        (clean, wanted), (hard, _) = said(first, second), said(first, harder)
        close(stats["positive"], wanted["positive"], 1e-12)
        same(
            *((x, torch.autograd.grad(x, layer.weight)[0]) for x in (loss, (clean + hard) / 2)),
            1e-10,
        )
        assert hard > clean

    @pytest.mark.parametrize("name", METHODS)
    def test_bfloat16(self, few, name):
        """Autocast is for the encoder's forward pass.

        Parameters, figures and losses stay in float32.
        """
        training = begin(few.train, name, epochs=1, bfloat16=True)
        figures = tensors_of(finish(training))
        assert {x.dtype for x in (*figures, *training.encoder.parameters())} == {torch.float32}
        assert len(figures) >= 7 and finite(*figures, *training.encoder.parameters())
        layer, x = nn.Linear(2, 1), torch.ones(1, 2)
        with torch.autocast(
            "cpu", torch.bfloat16
        ):  # it caches weights, which must not outlive a step
            before = layer(x)
            hardneg._descend(
                before.float().sum(), torch.optim.SGD(layer.parameters(), 10.0), "layer"
            )
            assert (before - layer(x)).item() == pytest.approx(30, rel=0.02)  # 10 of each parameter

    @pytest.mark.parametrize(
        "call, invalid",
        [
            (
                lambda x, **o: finish(begin(x, **o), 1),
                {
                    "epochs": [0],
                    "batch_size": [1],
                    "lr": [0, math.nan],
                    "recipe": ["lars"],
                    "micro_batch": [0],
                },
            ),
            (lambda x, **o: begin(x, "bank", method_options=o), {"momentum": [-0.1, 1.0]}),
            (
                lambda x, **o: begin(x, "queue", method_options=o),
                {"momentum": [-0.1, 1.0], "size": [0]},
            ),
            (lambda x, **o: begin(x, "clae", method_options=o), {"bound": [0.0, 1.0]}),
            (
                lambda x, **o: tiny_game(**o),
                {
                    "size": [4, 24],
                    "width": [0],
                    "latent": [0],
                    "momentum": [-0.1, 1.0],
                    "pretrain": [-1],
                    "every": [0],
                    "batch_size": [1],
                },
            ),
            (lambda x, images: begin(x[:images]), {"images": [1]}),
            (lambda x, images: tiny_game().imitate(images), {"images": [random_images(4, 16)]}),
            (
                lambda x, objective: hardneg.DiffHard(
                    hardneg.ContrastiveLoss(objective=objective), tiny_game()
                ),
                {"objective": ["nce"]},
            ),
            (lambda x, size: hardneg.Encoder(size=size), {"size": [33]}),
            (lambda x, encoder: hardneg.Encoder(encoder), {"encoder": ["large"]}),
            (lambda x, classes: train.shapes(classes=classes), {"classes": [1, 11]}),
        ],
    )
    def test_invalid_arguments_are_named(self, few, call, invalid):
        for name, value in ((name, value) for name, values in invalid.items() for value in values):
            with pytest.raises(ValueError, match=f"^{name} is .*; it must be "):
                call(few.train, **{name: value})


# ---- The papers' equations, what is read, and what a GPU needs


class TestPapersEquations:
    """Two plain views give the numbers of the equations as the papers print them."""

    @pytest.mark.parametrize("loss", ["simclr", "hcl", "ot", "hard"])
    @given(
        **SAMPLES,
        d=st.integers(2, 4),
        t=st.floats(0.2, 2),
        beta=st.floats(0, 3),
        tau_plus=st.sampled_from([0.0, 0.1, 0.3]),
        epsilon=st.floats(0.3, 2),
        alpha=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
        block_size=BLOCK_SIZES,
    )
    def test_equations(self, loss, seed, b, d, t, beta, tau_plus, epsilon, alpha, block_size):
        x = normal(seed, 2 * b, d)
        options = {"block_size": block_size, "temperature": t}
        if loss == "simclr":
            equation = partial(oracle.simclr_eq, temperature=t)
        elif loss == "hcl":
            equation = partial(oracle.hcl_eq2, temperature=t, beta=beta, tau_plus=tau_plus)
            options |= {"beta": beta, "tau_plus": tau_plus}
        elif loss == "ot":
            equation = partial(oracle.ot_eq5, temperature=t, epsilon=epsilon)
            options |= {"epsilon": epsilon}
        else:
            equation = partial(oracle.hard_eq9, temperature=t, alpha=alpha)
            options |= {"alpha": alpha}

        def printed(rows):
            return equation(*np.split(oracle.unit(rows), 2))

        wanted = printed(x), oracle.gradient(printed, x)
        same(ours(x, 2, loss=loss, **options), wanted, 1e-9 if loss == "ot" else 1e-10)


EDITS = [  # the part that is edited, and options of a call that uses it
    ("uniform", {"loss": "simclr"}),
    ("tilted", {"loss": "hcl"}),
    ("hardest", {"weights": "hardest"}),
    ("top", {"loss": "hard"}),
    ("transported", {"loss": "ot", "detach_weights": False}),
    ("transported", {"loss": "ot"}),
    ("mean_one", {"loss": "ot", "tau_plus": 0.01}),
    ("sinkhorn", {"loss": "ot"}),
    ("debiased", {"loss": "debiased", "tau_plus": 0.01}),
    ("nce", {"loss": "simclr"}),
    ("simple", {"loss": "hard-simple"}),
    ("triplet", {"loss": "triplet", "margin": 0.5}),
    ("ppcl", {"loss": "ppcl"}),
    ("decoupled", {"objective": "decoupled"}),
    ("answer", {"loss": "hcl"}),
]


def edited(name, function):
    """Return the function of a name with another result, as a reader may edit it."""

    def edit(*arguments, **options):
        result = function(*arguments, **options)
        if name == "sinkhorn":
            f, g, error = result
            return f, g + torch.linspace(0, 1, len(g)), error
        if name == "answer":
            return result._replace(losses=2 * result.losses)
        if name in ("uniform", "tilted", "hardest", "top", "transported"):
            return 0.3 * arguments[0]  # its logits
        return 0.7 * result

    return edit


class TestWhatIsReadRuns:
    """Whoever edits a rule, an objective or a question changes what is trained, at every size."""

    @pytest.mark.parametrize(
        "name, options, samples, reduction",
        [(*edit, samples, "mean") for edit in EDITS for samples in (128, 2048)]
        + [(*edit, 128, "none") for edit in EDITS]
        + [("tilted", {"loss": "hcl"}, 2048, "none")],
    )
    def test_an_edit_changes_the_gradient(self, monkeypatch, name, options, samples, reduction):
        torch.manual_seed(0)
        x, y = torch.randn(2, samples, 4)
        x.requires_grad_()

        def gradient():
            value = contrastive_loss(x, y, reduction=reduction, **options)
            return torch.autograd.grad(value.sum(), x)[0]

        before = gradient()
        close(gradient(), before, 1e-6, floor=1e-9)
        monkeypatch.setattr(hardneg, name, edited(name, getattr(hardneg, name)))
        change = (gradient() - before).norm() / before.norm()
        assert change > 1e-3

    @pytest.mark.parametrize("path", ["evaluation", "statistics", "compiled", "compiled blocks"])
    def test_an_edit_reaches_every_path(self, monkeypatch, path):
        torch.manual_seed(0)
        x, y = torch.randn(2, 8, 4)

        def outcome():
            torch._dynamo.reset()
            if path == "evaluation":
                with torch.no_grad():
                    return contrastive_loss(x, y, loss="hcl", block_size=3)
            if path == "statistics":
                return contrastive_loss(x, y, loss="hcl", return_stats=True)[1]["ess"]
            size = 3 if path == "compiled blocks" else 0
            function = partial(contrastive_loss, loss="hcl", block_size=size)
            return torch.compile(function, backend="eager")(x, y)

        before = outcome()
        monkeypatch.setattr(hardneg, "tilted", edited("tilted", hardneg.tilted))
        assert abs(outcome() - before) > 1e-3

    @pytest.mark.parametrize("loss", PRESETS)
    def test_an_ordinary_batch_is_differentiated_twice(self, loss):
        x = torch.tensor(normal(12, 4, 3), requires_grad=True)

        def function(z):
            return contrastive_loss(*z.chunk(2), loss=loss, detach_weights=False)

        assert torch.autograd.gradgradcheck(function, x)


class Operations(TorchDispatchMode):
    """Count the operations of a call that compute something, and what the host reads."""

    # views, and questions about types, start no kernel
    FREE = set(
        "view expand t transpose unsqueeze squeeze slice select detach alias unbind permute "
        "as_strided _unsafe_view split chunk promote_types".split()
    )
    READS = {"_local_scalar_dense", "nonzero", "item", "masked_select"}

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*arguments, **(options or {}))

    def computed(self):
        return sum(count for name, count in self.counts.items() if name not in self.FREE)

    def read(self):
        return sum(count for name, count in self.counts.items() if name in self.READS)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let no value be read, as if tensors were on a GPU, and show what happens inside operators."""
    monkeypatch.setattr(hardneg, "_may_read", lambda x: False)
    monkeypatch.setitem(hardneg.STEPS_PER_READ, "cpu", 8)
    for name in ("_blocks", "_couple_detached"):
        monkeypatch.setattr(hardneg, name, getattr(hardneg, name)._init_fn)


class TestReadyForAGPU:
    """Nothing that a GPU would wait for, few operations, and nothing on another device."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("samples", [128, 512])
    def test_the_host_reads_nothing(self, as_on_a_gpu, monkeypatch, loss, samples):
        """Of Sinkhorn it reads one number for every eight steps."""
        steps = [0]
        has_converged = hardneg._has_converged

        def spy(error, step, *options):
            steps.append(step)
            return has_converged(error, step, *options)

        monkeypatch.setattr(hardneg, "_has_converged", spy)
        x, y = (torch.randn(samples, 16, requires_grad=samples == 128) for _ in range(2))
        with Operations() as operations:  # blocks compute their gradient with the loss
            value, _ = contrastive_loss(x, y, loss=loss, epsilon=0.1, return_stats=True)
            if samples == 128:
                value.backward()
        assert operations.read() == max(steps) / 8 == (max(steps) + 7) // 8
        assert (max(steps) >= 8) == (loss == "ot")

    @pytest.mark.parametrize(
        "loss, most", [("simclr", 70), ("debiased", 100), ("hcl", 110), ("hard", 90), ("ot", 400)]
    )
    def test_a_small_batch_takes_few_operations(self, as_on_a_gpu, monkeypatch, loss, most):
        x, y = (torch.randn(128, 128, requires_grad=True) for _ in range(2))
        with Operations() as operations:
            contrastive_loss(x, y, loss=loss).backward()
        assert 30 < operations.computed() <= most

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("k", [0, 5])
    def test_tensors_are_made_on_the_device(self, loss, k):
        """Fake tensors say that they are on a GPU; an operation on two devices raises."""
        with FakeTensorMode():
            x = torch.randn(4, 3, device="cuda", requires_grad=True)
            options = {"labels": [0, 1, 1, 2]}
            if k:
                options = {"negatives": torch.randn(k, 3, device="cuda"), "positive_index": [0] * 4}
            for size, reduction in itertools.product((0, 3), ("mean", "none")):
                options |= {"loss": loss, "block_size": size, "reduction": reduction}
                value = contrastive_loss(x, x, **options)
                assert value.device.type == "cuda" and value.requires_grad
                with torch.no_grad():
                    _, stats = contrastive_loss(x, x, return_stats=True, **options)
                assert {figure.device.type for figure in stats.values()} == {"cuda"}

    def test_while_a_graph_is_captured_sinkhorn_takes_a_fixed_number_of_steps(self, monkeypatch):
        monkeypatch.setattr(hardneg, "_is_concrete", lambda x: False)
        kernel = torch.tensor(normal(0, 6, 6))
        with Operations() as operations:
            f, g, _ = hardneg.sinkhorn(kernel)
        assert operations.read() == 0
        plan = torch.exp(f[:, None] + kernel + g)
        close(plan, oracle.sinkhorn(numpy(kernel))[0], 1e-6)

    @pytest.mark.parametrize("loss", ["hcl", "ot", "hard"])
    def test_compiled_code_has_linear_memory(self, loss):
        """A large batch stays one operator of the graph, with the numbers of eager code."""
        x, y = (torch.tensor(normal(k, 600, 4)).requires_grad_() for k in range(2))

        def outcome(function):
            value = function(x, y)
            return value, torch.autograd.grad(value, x)[0]

        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph

        function = partial(contrastive_loss, loss=loss)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        same(outcome(compiled), outcome(function), 1e-12)
        nodes = list(graphs[0].graph.nodes)
        assert any("blocks" in str(node.target) for node in nodes)
        made = [x for node in nodes for x in tree_leaves(node.meta.get("example_value"))]
        sizes = [x.numel() for x in made if torch.is_tensor(x)]
        assert 1200 * 4 <= max(sizes) < 1200 * 1200 / 10

    @pytest.mark.parametrize("name", METHODS)
    def test_a_step_of_training_reads_nothing(self, few, as_on_a_gpu, monkeypatch, name):
        """Steps with statistics, and the optimizers themselves, may read."""
        training = begin(few.train, name, batch_size=8, epochs=1, lr=1e-3)
        operations, step = Operations(), type(training)._step
        reads = []

        def spy(self, *arguments):
            operations.counts = {}
            with operations:
                figures = step(self, *arguments)
            if "ess" not in figures and "loss" in figures:
                reads.append(operations.read())
            return figures

        monkeypatch.setattr(hardneg.Training, "_step", spy)
        for optimizer in [training.optimizer, *optimizers_of(training.method)]:
            monkeypatch.setattr(optimizer, "step", paused(operations, optimizer.step))
        finish(training)
        assert len(reads) > 10 and set(reads) == {0}


def optimizers_of(method):
    return method.game.optimizers.values() if hasattr(method, "game") else ()


def paused(operations, step):
    """Let an optimizer's step go uncounted."""

    def uncounted(*arguments, **options):
        before = dict(operations.counts)
        result = step(*arguments, **options)
        operations.counts = before
        return result

    return uncounted


class TestCorners:
    """Details that deliberate faults have shown to need a test of their own."""

    def test_labels_of_own_negatives(self):
        with pytest.raises(ValueError, match=r"^labels is "):
            contrastive_loss(
                *torch.ones(2, 4, 3), negatives=torch.ones(4, 2, 3), labels=torch.zeros(6)
            )

    def test_statistics_are_of_the_first_pairs(self):
        x, y = torch.tensor(normal(0, 2, 1000, 4)).unbind()
        _, stats = contrastive_loss(x, y, return_stats=True)
        first = 2**20 // 2000
        close(stats["positive"], F.cosine_similarity(x, y)[:first].mean(), 1e-12)

    def test_an_unknown_device_is_read_after_every_eighth_step(self, monkeypatch):
        monkeypatch.setattr(hardneg, "STEPS_PER_READ", {})
        kernel, looks = torch.tensor(normal(0, 6, 5)), []
        hardneg.sinkhorn(lambda: looks.append(0) or [kernel])
        assert len(looks) > 8 and len(looks) % 8 == 1  # the first look is at step 0

    def test_while_a_graph_is_captured_sinkhorn_takes_32_steps(self, monkeypatch):
        monkeypatch.setattr(hardneg, "_is_concrete", lambda x: False)
        kernel, looks = torch.tensor(normal(0, 6, 6)), []
        hardneg.sinkhorn(lambda: looks.append(0) or [kernel])
        assert len(looks) == 33

    @pytest.mark.parametrize("name", ["bank", "queue"])
    def test_the_own_row_is_no_candidate(self, few, monkeypatch, name):
        """The loss is that of rows for each anchor, from which its own one is left out."""
        monkeypatch.setattr(hardneg, "view", lambda images, *_, **__: images / 255)
        training = begin(
            few.train[:30], name, method_options={"size": 7} if name == "queue" else {}
        )
        method, encoder, index = training.method, training.encoder.eval(), torch.arange(8) + 3
        loss, _ = method.step(encoder, few.train[index], index, torch.Generator())
        z = hardneg.embed(encoder, few.train[index])[1]
        if name == "bank":
            own, rows = index, method.bank.rows
        else:
            own, rows = torch.arange(8), torch.cat([z, method.queue.rows])
        others = torch.stack([rows[torch.arange(len(rows)) != i] for i in own])
        close(loss, contrastive_loss(z, rows[own], negatives=others), 1e-5)

    def test_aspects_are_even_on_a_logarithmic_scale(self):
        axis = ((torch.arange(64) + 0.5) / 64).double().expand(64, 64)
        x = torch.stack([axis, axis.T, 0 * axis]).expand(400, 3, 64, 64)
        seen = hardneg.view(x, seeded(3), **PLAIN | {"area": (0.05, 0.05), "ratio": (1 / 4, 4)})
        sides = (seen.amax((2, 3)) - seen.amin((2, 3)))[:, :2]
        assert abs((sides[:, 0] / sides[:, 1]).log().mean()) < 0.2

    def test_positive_index_is_no_mask(self):
        with pytest.raises(ValueError, match=r"^positive_index is "):
            contrastive_loss(
                *torch.ones(2, 4, 3), negatives=torch.ones(5, 3), positive_index=[True, False] * 2
            )

    @given(**SEEDS, m=st.integers(1, 4))
    def test_without_log_weights_positives_count_the_same(self, seed, m):
        x = 0.3 * torch.tensor(normal(seed, 3, m + 5))
        pos, neg, log_w = x[:, :m], x[:, m:] + 3, torch.zeros(3, 5).double()
        given_ones = hardneg.debiased(
            pos, neg, log_w, 0.1, 0.5, log_w_pos=torch.zeros(3, m).double()
        )
        close(hardneg.debiased(pos, neg, log_w, 0.1, 0.5), given_ones, 1e-12)

    def test_an_anchor_without_candidates_is_one_of_those_not_clamped(self):
        x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        mask = torch.ones(4, 4).bool()
        mask[0] = False
        options = {"loss": "debiased", "tau_plus": 0.9, "negative_mask": mask}
        _, stats = contrastive_loss(x, x, return_stats=True, **options)
        close(stats["clamped"], 3 / 4, 1e-6)

    def test_nan_stops_it(self):
        looks = []
        hardneg.sinkhorn(lambda: looks.append(0) or [torch.full((3, 3), math.nan)])
        assert len(looks) <= 9

    def test_a_call_has_the_last_word_on_the_temperature(self):
        x, y = torch.tensor(normal(0, 2, 4, 3)).unbind()
        for module in (
            hardneg.ContrastiveLoss(),
            hardneg.ContrastiveLoss(temperature=nn.Parameter(torch.tensor(0.5))),
        ):
            close(module(x, y, temperature=0.1), contrastive_loss(x, y, temperature=0.1), 1e-12)

    def test_a_relative_margin_alone_drops_candidates(self):
        x, y = torch.tensor(normal(0, 2, 6, 2)).unbind()
        p = F.cosine_similarity(x, y).repeat(2)[:, None]
        z = hardneg.unit(torch.cat([x, y]))
        mask = z @ z.T <= p - 0.1 * p.abs()
        want = contrastive_loss(x, y, negative_mask=mask)
        close(contrastive_loss(x, y, relative_margin=0.1), want, 1e-12)
        assert not torch.equal(want, contrastive_loss(x, y))

    def test_tau_plus_of_zero_overrides_a_preset(self):
        x, y = torch.tensor(normal(0, 2, 4, 3)).unbind()
        close(contrastive_loss(x, y, loss="debiased", tau_plus=0), contrastive_loss(x, y), 1e-12)
        assert hardneg.ContrastiveLoss("hcl", tau_plus=0.0).tau_plus == 0

    def test_the_floor_of_a_temperature_of_16_bits(self):
        t, x = torch.tensor(0.3, dtype=torch.bfloat16), torch.eye(4)
        options = {"loss": "debiased", "tau_plus": 0.9}  # the floor binds
        want = contrastive_loss(x, x, temperature=float(t), **options)
        close(contrastive_loss(x, x, temperature=t, **options), want, 1e-6, floor=1e-3)

    def test_blocks_of_a_large_batch_are_small(self, monkeypatch):
        """A dispatch mode sees inside an operator only if it is called as plain Python."""
        monkeypatch.setattr(hardneg, "_blocks", hardneg._blocks._init_fn)
        x = torch.randn(2000, 4)
        for grad in (False, True):
            with torch.set_grad_enabled(grad), Largest() as largest:
                contrastive_loss(x, x)
            assert 2**20 < largest.bytes <= 5 * 2**20

    def test_a_huge_kernel_is_computed_again(self, monkeypatch):
        """Sinkhorn stores at most 2^24 numbers."""
        calls, kernel = [], hardneg._log_kernel

        def counted(*arguments):
            calls.append(0)
            return kernel(*arguments)

        monkeypatch.setattr(hardneg, "_log_kernel", counted)
        x, y = torch.tensor(normal(0, 2, 2100, 4), dtype=torch.float32).unbind()
        contrastive_loss(x, y, loss="ot", epsilon=1.0)
        blocks = math.ceil(4200 / (2**20 // 4200))
        assert len(calls) > 2 * blocks and len(calls) % blocks == 0  # each step, then the losses

    @pytest.mark.parametrize("easy, warns", [(1, False), (2, False), (3, True)])
    def test_warns_if_the_floor_binds_for_more_than_half(self, easy, warns):
        neg = torch.tensor([[-2.0, -2.0]] * easy + [[2.0, 2.0]] * (4 - easy))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            hardneg.debiased(torch.ones(4, 1), neg, torch.zeros(4, 2), 0.1, 0.5)
        assert len(said) == warns

    @pytest.mark.parametrize("recipe", hardneg.RECIPES)
    def test_the_criterion_has_no_weight_decay(self, few, recipe):
        groups = begin(few.train, recipe=recipe).optimizer.param_groups
        assert [part["weight_decay"] for part in groups][1:] == [0]


class TestCopies:
    """The file is copied: two copies live in one program, and take their own names with them."""

    def test_operators_take_every_option_of_a_block(self):
        """An option that is missing there would have its default in large batches alone."""
        elsewhere = {"loss", "temperature", "normalize", "reduction", "block_size"}
        taken = re.findall(r"(\w+)(?=,|$)", hardneg.VALUES)
        assert {*taken, *elsewhere} == {*hardneg.SETTINGS}

    def test_two_copies_in_one_program(self, tmp_path, monkeypatch):
        source = (HERE / "hardneg.py").read_text()
        assert source.count("return beta * logits") == 1
        (tmp_path / "other_hardneg.py").write_text(source.replace("beta * logits", "0 * logits"))
        monkeypatch.syspath_prepend(tmp_path)
        other = importlib.import_module("other_hardneg")
        x, y = torch.tensor(normal(0, 2, 6, 3), requires_grad=True)
        options = {"loss": "hcl", "block_size": 3}
        values = [module.contrastive_loss(x, y, **options) for module in (hardneg, other, hardneg)]
        assert values[0] == values[2] != values[1]

    def test_a_star_import_takes_what_is_listed(self):
        names = {}
        exec("from hardneg import *", names)
        assert set(hardneg.__all__) == names.keys() - {"__builtins__"}
        assert not {"top", "draw", "view", "simple"} & names.keys()

    def test_the_header_says_what_it_is(self):
        header = hardneg.__doc__.split("Symbols")[0]
        version = re.search('version = "(.*)"', (HERE / "pyproject.toml").read_text())[1]
        assert hardneg.__version__ == version and f"Version {version}" in header
        assert "MIT licence" in header and "Copyright" in header


# ---- Micro-batches and ranks


class Plain(nn.Module):
    """Embed images of 8 × 8 pixels in float64 without BatchNorm.

    `seen` are the sizes of its batches.
    """

    def __init__(self, *before):
        super().__init__()
        torch.manual_seed(0)
        layers = *before, nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6)
        self.layers, self.seen = nn.Sequential(*layers).double(), []

    def forward(self, x):
        self.seen.append(len(x))
        return x.mean((2, 3)), self.layers(x.double())


class TestMicroBatches:
    """A large batch may pass a few images at a time, in less memory.

    It has the loss and the gradients of one pass.
    """

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.parametrize("size", [1, 3, 100])
    def test_gradients(self, name, size):
        """Of the encoder and of the generator."""
        found, images, network = [], random_images(7, 8), Plain()
        for encoder in (network, hardneg.in_micro_batches(network, size)):
            game = settled(tiny_game())  # it seeds, too
            method_options = {"game": game} if name == "diffhard" else {}
            criterion = hardneg.ContrastiveLoss("ppcl", temperature=0.2)
            method = make(name, criterion, network, images, **method_options)
            network.seen.clear()
            loss, _ = method.step(encoder, images, torch.arange(7), seeded(3))
            parameters = [*network.parameters()]
            if name == "diffhard":
                parameters += game.G.parameters()
            found.append([loss, *torch.autograd.grad(loss, parameters)])
        for one, two in zip(*found, strict=True):
            close(two, one, 1e-10, floor=1e-6)
        assert max(network.seen) <= max(
            size, 7 * (name == "queue")
        )  # the slow encoder needs no gradient

    def test_randomness_is_replayed(self):
        network, x, found = Plain(nn.Dropout(0.5)), random_images(6, 8), []
        for encoder in (
            hardneg.in_micro_batches(network, 2),
            lambda x: (None, torch.cat([network(some)[1] for some in x.split(2)])),
        ):
            torch.manual_seed(1)
            loss = contrastive_loss(*encoder(x)[1].chunk(2))
            torch.rand(100)
            found.append((loss, torch.autograd.grad(loss, network.layers[1].weight)[0]))
        same(*found, 1e-12)

    def test_only_views_are_stored(self):
        network, x = Plain(), random_images(24, 8)

        def stored_by(encoder):
            sizes = []

            def pack(tensor):
                sizes.append(tensor.nbytes)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                embeddings = encoder(x)[1]
                embeddings.sum().backward()
            return sizes

        kept = {24: stored_by(network), 2: stored_by(hardneg.in_micro_batches(network, 2))}
        assert sum(kept[2]) == x.nbytes < 0.25 * sum(kept[24])
        assert network.seen == [24] + 24 * [2]  # forward and backward

    def test_in_training(self, few):
        training, sizes = begin(few.train, micro_batch=50), []
        training.encoder.backbone.register_forward_pre_hook(
            lambda module, x: sizes.append(len(x[0]))
        )
        assert finish(training) and max(sizes) == 50
        layer, x = nn.Linear(3, 2), torch.randn(5, 3)
        close(
            hardneg.in_micro_batches(layer, 2)(x), layer(x), 1e-6
        )  # an encoder of embeddings alone


RANKS = """
import sys
import torch
import test_hardneg

torch.distributed.init_process_group("gloo")
group = torch.distributed.group.WORLD
found = test_hardneg.losses_of(group), test_hardneg.runs_of(group)
if torch.distributed.get_rank() == 0:
    torch.save(found, sys.argv[1])
torch.distributed.barrier()  # gloo may abort a process that leaves first
torch.distributed.destroy_process_group()
"""
VARIANTS = [
    {},
    {"block_size": 0},
    {"reduction": "sum"},
    {"labels": [0, 1, 0, 2, 3, 2]},
    {"negatives": True},
    {"detach_weights": False},
    {"tau_plus": 0.05, "temperature": 0.7},
    {"absolute_margin": -0.3},
    {"negative_mask": True},
    {"each": True},
]
ALONE = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE),
}  # threads would wait for each other
TINY = "--epochs 2 --fraction 0.02 --batch-size 40 --size 8 --device cpu".split()


def losses_of(group):
    """Compute every preset and variant on a rank's share of six samples.

    Return losses, mean gradients and statistics in one list.
    """
    x, bank, found = torch.tensor(normal(0, 18, 5)), torch.tensor(normal(1, 7, 4)), []
    share = (
        slice(6) if group is None else [slice(3), slice(3, 6)][torch.distributed.get_rank(group)]
    )
    for loss, (k, variant) in itertools.product(PRESETS, enumerate(VARIANTS)):
        torch.manual_seed(0)
        encoder, options = nn.Linear(5, 4).double(), dict(variant)
        if "labels" in options:
            options["labels"] = options["labels"][share]
        if "negatives" in options:
            options["negatives"] = bank
        if options.pop("each", False):
            options["negatives"] = torch.stack([bank[:6], -bank[1:]], 1)[share]
            options["weights"] = "tilted" if loss == "ot" else None
        if "negative_mask" in options:  # of pairs of samples
            order = torch.arange(6) if group is None else torch.arange(6).view(2, 3)
            columns = torch.cat(
                [part.repeat(2 + k % 2) for part in order.view(-1, 6 // (2 if group else 1))]
            )
            allowed = torch.tensor(normal(2, 6, 6)) > -0.5
            rows = torch.arange(6)[share].repeat(2 + k % 2)
            options["negative_mask"] = allowed[rows][:, columns]
        views = [encoder(view[share]) for view in x.chunk(3)][: 2 + k % 2]
        value, stats = contrastive_loss(
            *views, loss=loss, return_stats=True, group=group, **options
        )
        found += [*with_gradient(value, encoder.weight, group), *stats.values()]
    images, texts, given = (encoder(rows[share]) for rows in x.chunk(3))
    place = torch.arange(len(images)) + (
        0 if group is None else 3 * torch.distributed.get_rank(group)
    )
    for one, other in ((images, texts), (texts, images)):  # CLIP
        rows = hardneg.gather(other, group)
        value = contrastive_loss(one, other, negatives=rows, positive_index=place, group=group)
        found += with_gradient(value, encoder.weight, group)
    each = contrastive_loss(images, texts, reduction="none", group=group)  # of the own anchors
    found.append(each.detach().view(2, -1)[:, :3])  # those of the first rank
    rows = hardneg.gather(torch.stack([texts, given], 1), group).flatten(0, 1)  # a ranking loss
    value = contrastive_loss(
        images, texts, negatives=rows, positive_index=2 * place, loss="ot", group=group
    )
    return found + with_gradient(value, encoder.weight, group)


def with_gradient(value, weight, group):
    """Return a loss and its gradient, the mean over ranks."""
    (gradient,) = torch.autograd.grad(value, weight, retain_graph=True)
    if group is not None:
        torch.distributed.all_reduce(gradient)
        gradient /= 2
    return [value.detach(), gradient]


def runs_of(group):
    """Train with every method for several processes → the state and the figures."""
    found, view, images = [], hardneg.view, train.shapes(25, seed=1, size=8)[0]
    hardneg.view = lambda images, *_, **__: images / 255  # each rank draws its own views
    for name in ("simclr", "bank", "queue", "clae"):
        encoder = Plain()
        method = make(name, hardneg.ContrastiveLoss("hcl", tau_plus=0.01), encoder, images)
        if group is not None:
            encoder.layers[0].bias.data += torch.distributed.get_rank(
                group
            )  # all begin as the first
        training = hardneg.Training(
            encoder,
            images[:24],
            method,
            "sgd",
            epochs=2,
            batch_size=12,
            lr=0.1,
            bfloat16=False,
            group=group,
        )
        seen = [(p["loss"], p["positive"], torch.tensor(p["images"])) for p in training]
        found += tensors_of(
            ({**training.state_dict(), "generator": None}, seen)
        )  # a rank has its own
    hardneg.view = view
    return found


def torchrun(*words):
    """Run a script as two processes → what it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *words,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ALONE)
    assert run.returncode == 0, run.stderr
    return run.stdout


class TestRanks:
    """Two processes, each with its share of the samples, do what one process does.

    The one process has all samples.
    """

    def test_two_processes_are_one(self, tmp_path):
        (tmp_path / "ranks.py").write_text(RANKS)
        torchrun(tmp_path / "ranks.py", tmp_path / "found.pt")
        founds = torch.load(tmp_path / "found.pt")
        wanted = losses_of(None), runs_of(None)
        tolerances = 1e-8, 1e-10
        for found, want, tolerance in zip(founds, wanted, tolerances, strict=True):
            for one, two in zip(found, want, strict=True):
                close(one, two, tolerance if one.dtype == torch.float64 else 1e-6)

    def test_one_rank_writes(self, tmp_path):
        """All of them resume from what it has saved."""
        results, path = [], tmp_path / "results.json"
        for expected in ("2 processes", "resumed after epoch 2 of 2"):
            said = torchrun(HERE / "train.py", *TINY, "--no-report", "--out", tmp_path)
            assert said.count("\ntrained encoder") == 1 and expected in said
            results.append(numbers_of(path))
            path.unlink()
        assert results[0] == results[1]

    def test_a_game_is_for_one_process(self, few, tmp_path):
        torch.distributed.init_process_group(
            "gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
        )
        with pytest.raises(ValueError, match="^group is"):
            begin(few.train, "diffhard", group=torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()


# ---- The command line and the README


@pytest.fixture
def small_shapes(monkeypatch):
    """Give train.py a tenth of its built-in images."""
    whole = train.shapes
    monkeypatch.setattr(train, "shapes", lambda n, **options: whole(n // 10, **options))


def quit_with(arguments, capsys, say=None):
    """Run train.py, which has to end with an error → its exit code or message, and its stderr."""
    with pytest.raises(SystemExit) as stop:
        train.main([str(word) for word in arguments])
    said = capsys.readouterr()
    if say is not None:
        say.append(said.out)
    return f"{stop.value.code} {said.err}"


def numbers_of(path):
    results = json.loads(path.read_text())
    return [
        results[name] for name in ("linear", "knn", "uniformity", "tolerance", "untrained", "raw")
    ]


def run_train(*arguments):
    """Run train.py in this process → the numbers of results.json, and checkpoint.pt."""
    train.main([str(word) for word in ("--no-report", *arguments)])
    out = Path(arguments[arguments.index("--out") + 1])
    return numbers_of(out / "results.json"), torch.load(out / "checkpoint.pt", weights_only=True)


def stop_before(monkeypatch, step, number=signal.SIGINT):
    """Let Ctrl-C, or another signal, come before a step of the next training."""
    calls, whole = itertools.count(1), hardneg.Training._step

    def interrupt(self, *arguments):
        if next(calls) == step:
            monkeypatch.setattr(hardneg.Training, "_step", whole)
            signal.raise_signal(number)
        return whole(self, *arguments)

    monkeypatch.setattr(hardneg.Training, "_step", interrupt)


def times_of(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}


SMALL = [
    "--epochs",
    "2",
    "--fraction",
    "0.1",
    "--batch-size",
    "40",
]  # 80 images, two steps an epoch
COMMANDS = {
    "simclr": ["--loss", "hcl", "--anneal"],
    "bank": ["--loss", "hard-simple", "--alpha", "0.1"],
    "queue": ["--recipe", "sgd", "--queue-size", "50"],
    "clae": ["--bound", "0.01"],
    "diffhard": ["--pretrain", "2", "--every", "1", "--width", "2", "--latent", "4"],
}


@pytest.mark.filterwarnings("ignore:the generator has collapsed")
class TestCommandLine:
    """train.py as a person uses it, with mistakes and Ctrl-C."""

    def test_a_whole_run(self, tmp_path):
        command = [sys.executable, HERE / "train.py", "--loss", "hard", "--alpha", "0.3", *TINY]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ALONE)
        assert run.returncode == 0 and "images/s" in run.stderr, run.stderr  # the bar
        for text in (
            "\nraw pixels",
            "\nuntrained encoder",
            "\ntrained encoder",
            "alpha goes from 1 to 0.3",
        ):
            assert text in run.stdout
        out = tmp_path / "runs" / "shapes-simclr-hard-0"
        results = json.loads((out / "results.json").read_text())
        assert results.keys() == set(
            "loss method data seed epochs device seconds options "
            "linear knn uniformity tolerance untrained raw versions".split()
        )
        assert (results["loss"], results["options"]["alpha"], results["epochs"]) == ("hard", 0.3, 2)
        assert results["raw"].keys() == results["untrained"].keys() == train.COLUMNS.keys()
        assert set(times_of(out)) == {
            "checkpoint.pt",
            "results.json",
            "report.html",
            "curves.png",
            "nearest.png",
            "map.png",
            "histograms.png",
        }
        page = (out / "report.html").read_text()
        assert 'src="http' not in page and page.count("data:image/png;base64,") == 4
        for text in (
            "hard on shapes",
            "trained encoder",
            "--alpha 0.3",
            "alpha<td>0.3",
            "false negative",
        ):
            assert text in page

    def test_images_without_classes(self, tmp_path, capsys):
        """They lie at any depth; what needs labels is left out."""
        write_images(tmp_path / "images" / "all", 10, ("a", "b"), (8, 8))
        train.main(
            ["--data", f"{tmp_path / 'images'}", "--epochs", "2", "--out", f"{tmp_path / 'run'}"]
        )
        said = capsys.readouterr().out
        assert "16 images to train on, 4 to test, no classes" in said and "%" not in said
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["linear"] is results["tolerance"] is results["raw"]["knn"] is None
        assert results["uniformity"] < 0 and not (tmp_path / "run" / "histograms.png").exists()
        command = ["--data", tmp_path / "images", "--true-positives", "--out", tmp_path / "two"]
        assert "--true-positives is" in quit_with(command, capsys)

    def test_compare(self, tmp_path, small_shapes, capsys):
        """Runs are those of train.py alone; finished ones are kept."""
        words = [
            *"--size 8 --epochs 1 --batch-size 20 --no-report --out".split(),
            str(tmp_path / "all"),
        ]
        command = ["--compare", "simclr", "hcl", "--seeds", "2", *words]
        train.main(command)
        table, files = capsys.readouterr().out, sorted((tmp_path / "all").glob("*-?/results.json"))
        assert "| `hcl` |" in table and "exceed twice" in table
        assert (tmp_path / "all" / "compare.png").stat().st_size > 10000
        assert [path.parent.name for path in files] == ["hcl-0", "hcl-1", "simclr-0", "simclr-1"]
        train.main(["--loss", "hcl", "--seed", "1", *words[:7], "--out", str(tmp_path / "one")])
        assert numbers_of(files[1]) == numbers_of(tmp_path / "one" / "results.json")
        times = [path.stat().st_mtime_ns for path in files]
        train.main(command)
        assert [path.stat().st_mtime_ns for path in files] == times
        assert "--epochs was 1" in quit_with([*command, "--epochs", "2"], capsys)

    def test_compare_trains_all_losses_equally_long(self, monkeypatch):
        seen = []
        monkeypatch.setattr(
            train,
            "compare",
            lambda rows, argv, *_: seen.extend(
                (args.epochs, args.batch_size, args.lr, args.command)
                for args in (train.arguments([*argv, *options]) for options in rows.values())
            ),
        )
        for words in ("simclr hard-simple", "simclr hcl", "simclr hard-simple --epochs 3"):
            train.main(["--compare", *words.split()])
        wanted = [(28, 64, 2e-3)] * 2 + [(16, 256, 8e-3)] * 2 + [(3, 64, 2e-3)] * 2
        assert [some[:3] for some in seen] == wanted
        assert seen[0][3] == "python train.py --loss simclr --epochs 28 --batch-size 64 --lr 0.002"

    def test_differences_that_hold(self):
        found = {
            name: [{"linear": v} for v in values]
            for name, values in {
                "b": (12.0, 22.0, 32.5),
                "c": (9.0, 23.0, 30.5),
                "a": (10.0, 20.0, 30.0),
            }.items()
        }
        gap, error = train.difference(found["b"], found["a"])
        close(gap, np.mean([2, 2, 2.5]), 1e-12)
        close(error, np.std([2, 2, 2.5], ddof=1) / 3**0.5, 1e-12)
        assert re.search("b − a 2.2 ± 0.2. They do not: .*b − c .*c − a", train.verdict(found))
        assert train.verdict({"a": found["a"][:1]}).startswith("No difference")

    def test_defaults(self):
        args = train.arguments(["--alpha", "--beta", "2", "--no-lead-in"])
        assert (args.alpha, args.beta, args.lead_in, args.loss) == (0.1, 2.0, False, "hcl")
        own = {  # temperature, alpha, epsilon, margin, lead-in, tau_plus, where a loss has its own
            "simclr": (0.05, 0.1, 0.3, 0.0, True, 0.0),
            "debiased": (0.1, 0.1, 0.3, 0.0, True, 0.01),
            "hcl": (0.3, 0.1, 0.3, 0.0, True, 0.1),
            "ot": (0.1, 0.1, 0.1, 0.0, True, 0.0),
            "hard": (0.07, 0.3, 0.3, 0.0, True, 0.0),
            "hard-simple": (0.1, 0.1, 0.3, 0.0, False, 0.0),
            "triplet": (0.1, 0.1, 0.3, 0.5, True, 0.0),
        }
        for loss in PRESETS:
            args = train.arguments(["--loss", loss])
            found = args.temperature, args.alpha, args.epsilon, args.margin
            found += args.lead_in, args.tau_plus
            assert found == own.get(loss, (0.1, 0.1, 0.3, 0.0, True, 0.0))
        bank = train.arguments(["--method", "bank", "--loss", "hard", "--lr", "1"])
        assert (bank.lr, bank.batch_size, bank.epochs, bank.momentum) == (1, 64, 24, 0.8)
        assert train.arguments(["--method", "queue"]).momentum == 0.9
        assert train.arguments(["--method", "queue", "--loss", "simclr"]).temperature == 0.05
        assert train.arguments(["--loss", "triplet"]).weights == "top"
        assert train.arguments(["--loss", "triplet", "--recipe", "sgd"]).batch_size == 128
        assert train.arguments(["--method", "bank", "--recipe", "sgd"]).lr == 0.03
        assert train.arguments(["--loss", "hcl", "--temperature", "2"]).temperature == 2
        games = [
            train.arguments(["--method", "diffhard", *flags])
            for flags in (
                [],
                ["--no-pairs"],
                ["--no-ascent"],
                ["--no-pairs", "--no-ascent"],
                ["--loss", "hcl"],
            )
        ]
        assert (games[0].loss, games[0].temperature, games[-1].objective) == ("ppcl", 0.1, "ppcl")
        assert len({args.out for args in games}) == 5  # they do not overwrite each other

    @pytest.mark.parametrize(
        "words, wanted",
        [
            (
                "--loss ot --cost exp --kappa 2 --weights tilted"
                " --objective triplet --margin .2 --tau-plus .4",
                {
                    "weights": "tilted",
                    "objective": "triplet",
                    "tau_plus": 0.0,  # triplet has none
                    "temperature": 0.1,
                    "options": {"cost": "exp", "kappa": 2.0, "margin": 0.2},
                },
            ),
            (
                "--loss hcl --beta 2 --epsilon .7",
                {"schedules": {}, "options": {"beta": 2, "epsilon": 0.7}},
            ),
            ("--anneal --beta 2", {"schedules.beta": [2, 0]}),
            ("--loss hard --no-lead-in", {"schedules": {}}),
            ("--loss hard --alpha .2", {"schedules.alpha": [1, 0.2], "options": {"alpha": 0.2}}),
            ("--true-positives", {"partners.0.shape": (80, 3, 32, 32)}),
            ("--method bank --momentum .3", {"bank.momentum": 0.3}),
            ("--method bank", {"bank.momentum": 0.8}),
            (
                "--method queue --momentum .7 --queue-size 30"
                " --size 16 --recipe sgd --weight-decay .25",
                {
                    "momentum": 0.7,
                    "queue.rows.shape": (30, 128),
                    "encoder.size": 16,
                    "view_options": {},
                    "epochs": 2,
                    "steps_per_epoch": 2,
                    "recipe": {"lr": 0.03, "weight_decay": 0.25},
                },
            ),
            (
                "--method clae --bound .2 --lr .5 --seed 3 --micro-batch 20"
                " --encoder resnet18 --size 96",
                {
                    "bound": 0.2,
                    "recipe": {"lr": 0.5, "weight_decay": 1e-4},
                    "seed": 3,
                    "micro_batch": 20,
                    "encoder.name": "resnet18",
                    "encoder.size": 96,
                    "view_options": {"blur": 0.5},
                },
            ),
            (
                "--method diffhard --no-pairs --no-ascent --momentum .8"
                " --pretrain 7 --every 3 --width 5 --latent 6",
                {
                    "game.pairs": False,
                    "game.ascent": False,
                    "game.momentum": 0.8,
                    "pretrain": 7,
                    "game.every": 3,
                    "game.size": 32,
                    "game.G.latent": 6,
                    "game.G.blocks.3.num_features": 5,
                },
            ),
            (
                "--method diffhard --gan-lr .1 --ascent-lr .2",
                {
                    "game.pairs": True,
                    "game.ascent": True,
                    "game.optimizers.G.defaults": {"lr": 0.1},
                    "game.optimizers.D.defaults": {"lr": 0.1},
                    "game.optimizers.ascent.defaults": {"lr": 0.2},
                },
            ),
        ],
    )
    def test_options_reach_the_training(
        self, words, wanted, tmp_path, small_shapes, monkeypatch, capsys
    ):
        """Attributes of the training, its method or its criterion, or some entries of a dict."""
        made = []
        monkeypatch.setattr(hardneg.Training, "__iter__", lambda self: made.append(self) or 1 / 0)
        quit_with([*words.split(), *SMALL, "--out", tmp_path], capsys)
        for path, value in wanted.items():
            places = made[0], made[0].method, made[0].method.criterion
            x = next(x for x in places if hasattr(x, path.split(".")[0]))
            for name in path.split("."):
                x = (
                    x[int(name)]
                    if name.isdigit()
                    else x[name]
                    if isinstance(x, dict)
                    else getattr(x, name)
                )
            x = [x(0.0), x(1.0)] if path.startswith("schedules.") else x
            assert value.items() <= x.items() if value and isinstance(x, dict) else x == value, path

    @pytest.mark.parametrize("loss", PRESETS)
    def test_every_loss(self, loss, tmp_path, small_shapes, capsys):
        numbers, checkpoint = run_train("--loss", loss, *SMALL, "--out", tmp_path)
        assert math.isfinite(numbers[0] + checkpoint["history"][-1]["loss"])
        assert ("chance" in capsys.readouterr().out) == (
            hardneg.PRESETS[loss][1] in ("nce", "ppcl")
        )

    @pytest.mark.parametrize("method", METHODS)
    def test_chance(self, method, tmp_path, small_shapes, monkeypatch, capsys):
        """It is the loss of an encoder that embeds all images alike."""

        def alike(self, x):
            features = x.flatten(1)
            return features, 1 + 0 * (self.head[2].bias + features[:, :1])

        monkeypatch.setattr(hardneg.Encoder, "forward", alike)
        command = [
            "--method",
            method,
            *COMMANDS[method],
            *SMALL,
            "--loss",
            "ppcl",
            "--out",
            tmp_path,
        ]
        (loss,) = {
            round(epoch["loss"], 4)
            for epoch in run_train(*command)[1]["history"]
            if "loss" in epoch
        }
        (chance,) = re.findall(r"log\((\d+)\)", capsys.readouterr().out)
        assert loss == round(math.log(int(chance)), 4)

    @pytest.mark.parametrize("method", METHODS)
    def test_stopped_and_continued(self, method, tmp_path, small_shapes, monkeypatch, capsys):
        """A run that Ctrl-C stops within its second epoch ends as one that is not stopped.

        The two are equal to the bit.
        """
        command = ["--method", method, *COMMANDS[method], *SMALL, "--out"]
        whole, wanted = run_train(*command, tmp_path / "whole")
        stop_before(monkeypatch, step=3)
        assert "the same command goes on" in quit_with(
            [*command, tmp_path / "cut", "--no-report"], capsys
        )
        cut, found = run_train(*command, tmp_path / "cut")
        assert (
            f"resumed after epoch {-1 if method == 'diffhard' else 1} of 2"
            in capsys.readouterr().out
        )
        assert (
            equal_states(found["training"], wanted["training"])
            and found["history"] == wanted["history"]
        )
        assert cut == whole and (tmp_path / "cut" / "curves.png").stat().st_size > 10000

    def test_when_a_run_continues(self, tmp_path, small_shapes, monkeypatch, capsys):
        command, out = [*SMALL, "--out", tmp_path / "run"], tmp_path / "run"
        stop_before(monkeypatch, step=1, number=signal.SIGTERM)
        quit_with([*command, "--no-report"], capsys)
        whole, _ = run_train(*command)
        assert "resumed after epoch 0" in capsys.readouterr().out
        assert "--loss was hcl" in quit_with([*command, "--loss", "ot", "--resume"], capsys)
        (out / "results.json").unlink()  # as if it had been stopped while it was measured
        assert "--epochs was 2" in quit_with([*command, "--epochs", "3"], capsys)
        assert run_train(*command)[0] == whole
        assert "resumed after epoch 2 of 2" in capsys.readouterr().out
        for name in ("evaluate-other.json", "mine.png"):
            (out / name).touch()
        kept = times_of(out)
        for other in (["--seed", "1"], ["--no-resume"]):
            assert "--overwrite" in quit_with(
                [*command, *other], capsys
            )  # the first run is finished
        assert times_of(out) == kept
        run_train(*command, "--seed", "1", "--overwrite")
        assert "resumed" not in capsys.readouterr().out
        assert set(times_of(out)) == {"checkpoint.pt", "curves.png", "results.json", "mine.png"}
        (out / "results.json").unlink()
        path, foreign = out / "checkpoint.pt", io.BytesIO()
        torch.save({"weights": torch.ones(3)}, foreign)
        for broken in (b"", path.read_bytes()[:-1000], b"PK" + bytes(99), foreign.getvalue()):
            path.write_bytes(broken)
            kept, said = times_of(out), quit_with(command, capsys)
            assert f"{path}" in said and "--no-resume" in said and "\n" not in said
            assert times_of(out) == kept and path.read_bytes() == broken
        assert run_train(*command, "--no-resume")[0] == whole

    def test_a_full_disk_leaves_no_half_file(self, tmp_path, small_shapes, monkeypatch, capsys):
        command, calls, sync = [*SMALL, "--out", tmp_path], itertools.count(), os.fsync

        def full(handle):  # the first checkpoint fits, the second does not
            if next(calls):
                raise OSError(28, "No space left on device")
            sync(handle)

        monkeypatch.setattr(os, "fsync", full)
        said = quit_with(command, capsys)
        assert f"{tmp_path / 'checkpoint.pt'} cannot be written" in said and "No space left" in said
        assert set(times_of(tmp_path)) == {"checkpoint.pt"}
        monkeypatch.setattr(os, "fsync", sync)
        run_train(*command)
        assert "resumed after epoch 1 of 2" in capsys.readouterr().out

    def test_two_runs_do_not_share_a_folder(self, tmp_path, small_shapes, capsys):
        with train.alone(tmp_path):
            kept = times_of(tmp_path)
            assert "another run is at work" in quit_with([*SMALL, "--out", tmp_path], capsys)
            assert times_of(tmp_path).keys() == kept.keys()
        run_train(*SMALL, "--out", tmp_path)

    def test_killed(self, tmp_path, method="diffhard"):
        """A run that is killed at random times ends as one that is not; no half file is left."""
        command = [
            sys.executable,
            HERE / "train.py",
            "--method",
            method,
            *COMMANDS[method],
            *SMALL,
            "--size",
            "8",
            "--no-report",
            "--out",
        ]
        alone = subprocess.Popen([*command, tmp_path / "whole"], env=ALONE)
        for seconds in (6, None):
            with subprocess.Popen([*command, tmp_path / "cut"], env=ALONE) as run:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(seconds)
                run.kill()
            for path in (tmp_path / "cut").glob("*.pt"):
                torch.load(path, weights_only=True)
        assert alone.wait() == 0
        cut, whole = (numbers_of(tmp_path / name / "results.json") for name in ("cut", "whole"))
        assert cut == whole

    def test_export(self, tmp_path, small_shapes, capsys):
        """The exported program embeds any number of images as the encoder does."""
        _, checkpoint = run_train(*SMALL, "--out", tmp_path)
        train.main(["--export", f"{tmp_path}", f"{tmp_path / 'encoder.pt2'}"])
        assert "(n, 3, 32, 32) in [0, 1] → features, embeddings" in capsys.readouterr().out
        encoder = hardneg.Encoder("small")
        encoder.load_state_dict(checkpoint["training"]["encoder"])
        program = torch.export.load(tmp_path / "encoder.pt2").module()
        for n in (1, 7):
            images = random_images(n, 32).float() / 255
            for found, wanted in zip(program(images), encoder.eval()(images), strict=True):
                close(found, wanted, 1e-6)

    def test_evaluate_measures_a_run_on_other_images(self, tmp_path, small_shapes, capsys):
        run, other = tmp_path / "run", tmp_path / "other"
        numbers, _ = run_train(*SMALL, "--seed", "2", "--out", run)
        train.main(["--evaluate", str(run), "--fraction", "0.1"])
        assert "of training on shapes" in capsys.readouterr().out
        assert numbers_of(run / "evaluate-shapes-0.1.json") == numbers
        write_images(other, per_class=10, size=(48, 48))
        for options in ([], ["--workers", "2", "--alpha", "0.2"]):
            train.main(["--evaluate", str(run), "--data", str(other), *options])
            said = capsys.readouterr().out
            assert "32 × 32 pixels" in said and bool(options) == ("--alpha has no effect" in said)
        results = json.loads((run / "evaluate-other.json").read_text())
        assert (results["trained_on"], results["epochs"], results["data"]) == (
            "shapes",
            2,
            str(other),
        )
        assert f"--evaluate is {tmp_path}; it must" in quit_with(["--evaluate", tmp_path], capsys)

    def test_a_map_keeps_clusters_apart(self, tmp_path, monkeypatch):
        figures = []
        monkeypatch.setattr(train, "save", lambda figure, *_: figures.append(figure))
        labels = torch.arange(120) % 3
        z = hardneg.unit(torch.eye(6)[labels] + 0.1 * torch.randn(120, 6, generator=seeded(0)))
        train.draw_map(tmp_path, z, labels, ["a", "b", "c"], 5)
        a, b, c = (points.get_offsets().data for points in figures[0].axes[0].collections[1:])
        for one, other in ((a, b), (b, c), (c, a)):
            apart = np.linalg.norm(one.mean(0) - other.mean(0))
            widths = [np.linalg.norm(x - x.mean(0), axis=1).mean() for x in (one, other)]
            assert 2 * max(widths) < apart < 30 * min(widths)

    def test_the_encoder_is_compiled_on_demand(self, tmp_path, small_shapes, monkeypatch):
        compiled = []
        monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
        run_train(*SMALL, "--out", tmp_path / "plain")
        assert not compiled
        run_train(*SMALL, "--compile", "--out", tmp_path / "compiled")
        assert [type(module) for module in compiled] == [hardneg.Encoder]

    def test_help(self, capsys):
        """That of the flags that matter first fits two screens."""
        for flag, least, most in (("--help", 30, 60), ("--help-all", 80, 200)):
            with pytest.raises(SystemExit) as stop:
                train.main([flag])
            assert (
                stop.value.code in (0, None)
                and least < len(capsys.readouterr().out.splitlines()) < most
            )

    @pytest.mark.parametrize(
        "words, said",
        [
            ("--loss simclr --beta 2", "--beta has no effect"),
            ("--loss hcl --alpha .3", "--alpha has no effect"),
            ("--margin 1", "--margin"),
            ("--loss triplet --temperature 1", "--temperature"),
            ("--bound .1", "--bound"),
            ("--queue-size 9", "--queue-size"),
            ("--no-pairs", "--no-pairs"),
            ("--momentum .5", "--momentum"),
            ("--loss simple --weights tilted --temperature 1", ""),
            ("--compare hcl hard --alpha .3", ""),
            ("--compare hcl ot --alpha .3", "--alpha"),
            ("--loss ppcl --tau-plus .1", ""),
            ("--seeds 2", "--seeds has no effect"),
        ],
    )
    def test_flags_without_effect_are_said(self, words, said, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(train, "read", lambda *_: 1 / 0)
        quit_with([*words.split(), "--out", tmp_path], capsys, say=(found := []))
        assert bool(said) == ("no effect" in found[0]) and said in found[0]

    @pytest.mark.parametrize(
        "words, complaint",
        [
            ("--loss hrad", "did you mean hard?"),
            ("--tempreature 1", "did you mean --temperature?"),
            ("--los hcl", "did you mean --loss?"),
            ("--alpha much", "--alpha"),
            ("--lr nan", "lr is nan"),
            ("--lr 0", "lr is 0"),
            ("--lr -1", "lr is -1"),
            ("--epochs 0", "epochs is 0"),
            ("--epochs 1.5", "--epochs"),
            ("--epochs many", "--epochs"),
            ("--batch-size 1", "batch_size is 1"),
            ("--micro-batch 0", "--micro-batch is 0"),
            ("--temperature 0", "temperature is 0"),
            ("--temperature nan", "temperature is nan"),
            ("--tau-plus 1", "tau_plus is 1"),
            ("--beta -1", "beta is -1"),
            ("--alpha 0", "alpha is 0"),
            ("--alpha 1.1", "alpha is 1.1"),
            ("--epsilon 0", "epsilon is 0"),
            ("--margin -1", "margin is -1"),
            ("--kappa inf", "kappa is inf"),
            ("--cost l1", "--cost"),
            ("--weights hard", "--weights"),
            ("--objective infonce", "--objective"),
            ("--method moco", "--method"),
            ("--encoder resnet", "mean resnet"),
            ("--recipe adam", "did you mean adamw?"),
            ("--fraction 0", "--fraction is 0"),
            ("--fraction 2", "--fraction"),
            ("--size 4", "--size is 4"),
            ("--method bank --momentum 1", "momentum is 1"),
            ("--method queue --queue-size 0", "size is 0"),
            ("--method clae --bound 1", "bound is 1"),
            ("--method diffhard --size 24", "size is 24"),
            ("--method diffhard --width 0", "width is 0"),
            ("--method diffhard --pretrain -1", "pretrain is -1"),
            ("--method diffhard --every 0", "every is 0"),
            ("--method diffhard --objective simple", "objective is simple"),
            ("--seeds 0", "--seeds is 0"),
            ("--device abacus", "try --device cpu"),
            ("--device cuda:77", "try --device cpu"),
            ("--compare", "--compare"),
            ("--method bank --true-positives", "--true-positives is on"),
            ("hard", "unrecognized"),
            ("--data no/such/folder", "--data is no/such/folder"),
            ("--resume --out no-such-run", "no-such-run"),
            ("--evaluate no-such-run", "no-such-run"),
            ("--export no-such-run x.pt2", "no-such-run"),
            ("--export no-such-run", "--export"),
        ],
    )
    def test_mistakes_are_named(self, words, complaint, tmp_path, monkeypatch, capsys):
        """In one line and before anything is read; with exit code 2."""
        monkeypatch.chdir(tmp_path)  # runs/ may hold a finished run
        monkeypatch.setattr(train, "read", lambda *_: 1 / 0)
        said = quit_with(words.split(), capsys)
        assert said.startswith("2 train.py: ") and complaint in said and said.count("\n") == 1
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "words, complaint",
        [
            (f"--out {__file__}/run", "/run"),
            ("--method queue --queue-size 800", "--queue-size is 800"),
            ("--data .", "--data is ."),
        ],
    )
    def test_what_the_data_shows(
        self, words, complaint, tmp_path, monkeypatch, capsys, small_shapes
    ):
        monkeypatch.chdir(tmp_path)
        said = quit_with(words.split(), capsys)
        assert said.startswith("train.py: ") and complaint in said and "\n" not in said


README, MORE = ((HERE / folder / "README.md").read_text() for folder in (".", "benchmarks"))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


class TestReadme:
    """Commands run, snippets print what they say, tables are of the recorded runs."""

    def test_snippets_print_what_their_comments_say(self, tmp_path):
        """In a folder with hardneg.py alone, and torch alone; importing it prints nothing."""
        shutil.copy(HERE / "hardneg.py", tmp_path)
        encoder, some, runs = hardneg.Encoder("small").eval(), torch.rand(2, 3, 32, 32), {}
        program = torch.export.export(
            encoder, (some,), dynamic_shapes=({0: torch.export.Dim("n")},)
        )
        torch.export.save(program, tmp_path / "encoder.pt2")
        for code in blocks("python"):
            hidden = dict.fromkeys(("torchvision", "numpy", "scipy", "tqdm", "matplotlib", "PIL"))
            if "lightning" not in code or importlib.util.find_spec("lightning"):
                hidden = {} if "lightning" in code else hidden
                words = "-W", "ignore", "-c", f"import sys; sys.modules.update({hidden})\n{code}"
                runs[code] = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=ALONE,
                )
        for code, run in runs.items():
            (out, error), comments = run.communicate(), re.findall(r"#\s*(.*)", code)
            lines = out.strip().splitlines()
            assert lines and all(any(x.startswith(line) for x in comments) for line in lines), (
                error or lines
            )

    @pytest.mark.parametrize(
        "options",
        sorted(
            {
                *re.findall(r"train\.py([^#&\n]*)", "".join(blocks("sh"))),
                *re.findall(r"\| `(--.*?)` \|", README + MORE),
            }
        ),
    )
    def test_commands_parse(self, options):
        assert train.arguments(options.split())

    def test_set_up_commands_are_those_of_ci(self):
        commands, ci = "".join(blocks("sh")), (HERE / ".ci" / "run").read_text()
        for command in (
            "python3 -m venv .venv",
            "-r requirements.txt",
            ".venv/bin/python -m pytest -q",
        ):
            assert command in commands and command in ci

    @pytest.mark.parametrize(
        "path", sorted((HERE / "benchmarks").rglob("*.json")), ids=lambda x: x.stem
    )
    def test_tables_are_of_the_recorded_runs(self, path, monkeypatch):
        """All rows are shown, and no others below the same header.

        The text says what the differences are.
        """
        monkeypatch.syspath_prepend(str(HERE / "benchmarks"))
        results, own = json.loads(path.read_text()), ("graphs", "explicit")
        study = path.parent.name == "results" and path.stem not in own
        program = importlib.import_module("studies" if study else path.stem)
        for table in program.table(path.stem if study else results).split("\n\n"):
            header, rows = table.strip().split("\n", 1)
            blocks_of = re.findall(
                rf"^{re.escape(header)}\n((?:\|.*\n?)*)", README + "\n" + MORE, re.M
            )
            assert (
                study
                and rows in "\n".join(blocks_of)
                or {row for part in blocks_of for row in part.splitlines()}
                == set(rows.splitlines())
            )
        assert not hasattr(program, "heading") or program.heading(results) in README + MORE
        if study:
            assert program.summary() in README
            assert len({len(runs) for runs in results.values()}) == 1
            seeds = program.STUDIES[path.stem][1]
            assert all(run["seed"] in seeds for runs in results.values() for run in runs)

    def test_links_lead_to_files(self):
        for folder, page in ((HERE, README), (HERE / "benchmarks", MORE)):
            for link in re.findall(r"\]\(([^)#]+)", page):
                assert link.startswith("https://") or (folder / link).stat().st_size > 1000, link

    def test_the_map_has_every_public_name_and_preset(self):
        """Rows of the table of sections begin with their number.

        Every public name has a docstring.
        """
        rows = "\n".join(re.findall(r"^\| \d.*", README, re.M))
        public = {
            name: x
            for name, x in vars(hardneg).items()
            if getattr(x, "__module__", "") == "hardneg" and name[0] != "_"
        }
        assert len(public) > 40 and all(x.__doc__ for x in public.values())
        names = *public, "PRESETS", "WEIGHTS", "OBJECTIVES", "RECIPES"
        assert not [name for name in names if f"`{name}`" not in rows]
        assert not [loss for loss in PRESETS if f"| `{loss}` |" not in README]
