"""What hardneg.py has to keep, in groups; python -m pytest test_hardneg.py -k TestOracle runs one of them.

    TestOracle       every loss and every piece of it, value and gradient, against reference_numpy.py
    TestLimits       every method where it turns into another one
    TestTheorems     what the papers prove, run: couplings, worst cases, ball packings, rates
    TestInvariants   what must not change a loss, and what a gradient must add up to
    TestEdges        small, extreme and wrong input
    TestDevices      an accelerator, by tensors that have a device and no data
    TestDraw, TestSchedules, TestSinkhorn
    TestViews, TestImages, TestEncoders, TestMemoryBank
    TestGame         the generator's game against the encoder: Eq. 2 to 10 of its paper, and a run of it
    TestEvaluation, TestTraining, TestMicroBatches
    TestRanks        several processes, which make one
    TestCommandLine  train.py, mistakes and Ctrl-C included
    TestReadme       what the README says

Rows come from seeds, so that ties between similarities, where some of the losses have a kink, do not
happen by chance.

BLOCK_SIZE=1 python -m pytest test_hardneg.py runs all of it with blocks of one anchor wherever a test
leaves block_size open; 3 and 0, plain autograd, have to pass as well.
"""
import contextlib
import copy
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import datasets
from torchvision.transforms import functional as transforms

import hardneg
import reference_numpy as oracle
import train

HERE = Path(__file__).resolve().parent

if "BLOCK_SIZE" in os.environ:
    hardneg._block_size = lambda *_: int(os.environ["BLOCK_SIZE"])
BLOCKS = 64 if os.environ.get("BLOCK_SIZE") == "0" else None  # for what is said of blocks alone

settings.register_profile("hardneg", max_examples=15, deadline=None, derandomize=True, print_blob=True,
                          database=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
settings.load_profile("hardneg")

INF = math.inf
PRESETS = sorted(hardneg.PRESETS)
PAIRS = [(w, o) for w in hardneg.WEIGHTS for o in hardneg.OBJECTIVES]
SEEDS = st.integers(0, 2**32 - 1)
SIZES = {"v": st.integers(2, 4), "b": st.integers(2, 4), "d": st.integers(2, 4)}


@pytest.fixture
def fresh_warnings(monkeypatch):
    """As if nothing had been warned of before."""
    monkeypatch.setattr(hardneg, "_warned", set())


def numpy(x):
    return x.detach().double().numpy() if torch.is_tensor(x) else np.asarray(x, dtype=np.float64)


def close(got, want, tolerance, floor=1.0):
    """One shape, −∞ in the same places, elsewhere within `tolerance` of the largest number, or of floor."""
    got, want = numpy(got), numpy(want)
    assert got.shape == want.shape
    scale = max(floor, np.abs(want[np.isfinite(want)]).max(initial=0))
    with np.errstate(invalid="ignore"):
        off = np.where(got == want, 0, np.abs(got - want))
    assert (off <= tolerance * scale).all(), f"off by {off.max() / scale:.1e}: {got} instead of {want}"


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def tensors(x, v, k=0, dtype=torch.float64, grad=False):
    """Rows (V·B + K, D) as V views and, where K > 0, the bank: list of views, options."""
    x = torch.as_tensor(x).to(dtype)
    parts = [part.clone().requires_grad_(grad) for part in x[:len(x) - k].chunk(v)]
    return parts, {"negatives": x[len(x) - k:].clone().requires_grad_(grad)} if k else {}


def ours(x, v, k=0, dtype=torch.float64, weight=None, **options):
    """Value and gradient with respect to all rows by hardneg; `weight` adds up losses not reduced."""
    views, bank = tensors(x, v, k, dtype, grad=True)
    value = hardneg.contrastive_loss(*views, **bank, **options)
    leaves = [*views, *bank.values()]
    scalar = value if weight is None else value @ torch.as_tensor(weight).to(value.dtype)
    return value.detach(), torch.cat(torch.autograd.grad(scalar, leaves))


def theirs(x, v, k=0, weight=None, **options):
    """The same by the oracle."""
    def loss(rows):
        views = np.split(rows[:len(rows) - k], v)
        return oracle.contrastive_loss(*views, **({"negatives": rows[len(rows) - k:]} if k else {}),
                                       **options)
    return loss(x), oracle.gradient(loss if weight is None else lambda rows: loss(rows) @ weight, x)


def agree(x, v, k=0, tolerance=1e-10, dtype=torch.float64, block_size=None, weight=None, **options):
    value, gradient = ours(x, v, k, dtype, weight, block_size=block_size, **options)
    wanted_value, wanted_gradient = theirs(x, v, k, weight, **options)
    close(value, wanted_value, tolerance)
    close(gradient, wanted_gradient, tolerance, floor=1e-3)


def couples(b, v, k, labels, own=None):
    """Whether a coupling exists that uses every allowed entry: else no number of Sinkhorn steps is enough."""
    owners = np.arange(b) if labels is None else np.asarray(labels[:b])
    if k:
        others = np.asarray(labels[b:]) if labels is not None and len(labels) == b + k else np.full(k, -1)
        allowed = owners[:, None] != others
        if own is not None:
            allowed[np.arange(b), own] = False
    else:
        allowed = np.tile(owners, v)[:, None] != np.tile(owners, v)
    kernel = np.where(allowed, 0, -INF)
    return bool((oracle.usable(allowed) == allowed).all()) and oracle.sinkhorn(kernel)[3] < 1e-6


def masked_logits(seed, a, n, share=0.3, empty=False):
    """Logits (a, n), a share of them −∞ but never a whole row, other than the first if `empty`."""
    rng = np.random.default_rng(seed)
    logits = rng.uniform(-2, 2, (a, n))
    hidden = rng.random((a, n)) < share
    hidden[np.arange(a), rng.integers(n, size=a)] = False
    logits[hidden] = -INF
    if empty:
        logits[0] = -INF
    return logits


# What the weights take in the tests of pieces, and what the losses do
WEIGHT_OPTIONS = {"uniform": {}, "tilted": {"beta": 1.5}, "hardest": {}, "top": {"alpha": 0.35},
                  "transported": {"epsilon": 0.4, "temperature": 0.5}}


# ------------------------------------------------------------------------------------------------------------
# The oracle
# ------------------------------------------------------------------------------------------------------------

class TestOracle:
    """Value and gradient as the papers' formulas have them: to 1e-10 in float64, to 1e-4 in float32."""

    @pytest.mark.parametrize("loss", PRESETS)
    @settings(max_examples=10)
    @given(seed=SEEDS, **SIZES, t=st.floats(0.2, 2), block_size=st.sampled_from([None, 0, 1, 3]))
    def test_preset(self, loss, seed, v, b, d, t, block_size):
        x = normal(seed, v * b, d)
        agree(x, v, loss=loss, temperature=t, block_size=block_size)

    @pytest.mark.parametrize("loss", PRESETS)
    @settings(max_examples=6)
    @given(seed=SEEDS, **SIZES)
    def test_preset_in_float32(self, loss, seed, v, b, d):
        agree(normal(seed, v * b, d).astype(np.float32), v, loss=loss, dtype=torch.float32, tolerance=1e-4)

    @pytest.mark.parametrize("weights, objective", PAIRS)
    @settings(max_examples=5)
    @given(seed=SEEDS, **SIZES, tau_plus=st.sampled_from([0.0, 0.1, 0.3]), beta=st.floats(0, 5),
           alpha=st.floats(0.05, 1),
           epsilon=st.floats(0.2, 2), margin=st.floats(0, 1))
    def test_every_pair(self, weights, objective, seed, v, b, d, tau_plus, beta, alpha, epsilon, margin):
        agree(normal(seed, v * b, d), v, weights=weights, objective=objective, tau_plus=tau_plus, beta=beta,
              alpha=round(alpha, 2), epsilon=epsilon, margin=margin)

    @pytest.mark.parametrize("weights, objective", PAIRS)
    @settings(max_examples=4)
    @given(seed=SEEDS, v=st.integers(2, 3), b=st.integers(2, 4), d=st.integers(2, 4), k=st.integers(1, 6),
           detach=st.sampled_from([None, True]), tau_plus=st.sampled_from([0.0, 0.2]),
           labelled=st.sampled_from("nbk"), owned=st.booleans(), block_size=st.sampled_from([None, 0, 1]))
    def test_bank(self, weights, objective, seed, v, b, d, k, detach, tau_plus, labelled, owned, block_size):
        rng, labels = np.random.default_rng(seed), {"n": None, "b": b, "k": b + k}[labelled]
        if labels is not None:
            labels = rng.integers(3, size=labels)
        own = rng.integers(k, size=b) if owned else None
        assume(weights != "transported" or couples(b, v, k, labels, own))
        agree(normal(seed, v * b + k, d), v, k, weights=weights, objective=objective, detach_weights=detach,
              own=own, labels=labels, tau_plus=tau_plus, block_size=block_size)

    @settings(max_examples=30)
    @given(seed=SEEDS, loss=st.sampled_from(["hard", "hard-simple"]), b=st.integers(2, 5), k=st.integers(0, 9),
           top_k=st.integers(1, 12), block_size=st.sampled_from([None, 0, 1, 3]))
    def test_top_by_count(self, seed, loss, b, k, top_k, block_size):
        agree(normal(seed, 2 * b + k, 3), 2, k, loss=loss, top_k=top_k, block_size=block_size)

    @pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
    @pytest.mark.parametrize("block_size", [0, 1, None])
    def test_the_share_is_of_ones_own_candidates(self, alpha, block_size):
        """Labels leave some anchors fewer candidates than others: 4 or 6 of 10, and a share of those stays."""
        labels = [0, 0, 0, 1, 1]
        agree(normal(5, 10, 3), 2, loss="hard", alpha=alpha, labels=labels, block_size=block_size)
        logits = masked_logits(6, 5, 9, share=0.5)
        close(hardneg.top(torch.tensor(logits), alpha), oracle.top(logits, alpha), 0)

    @pytest.mark.parametrize("loss", ["hard", "hard-simple"])
    @pytest.mark.parametrize("block_size", [0, 1, None])
    def test_ties_of_the_threshold_stay(self, loss, block_size):
        """Rows that come twice tie; a row that labels leave few candidates keeps a share of those."""
        x = np.repeat(normal(3, 4, 3), 2, axis=0)[[0, 2, 4, 6, 1, 3, 5, 7]]
        for labels in (None, [0, 0, 0, 1]):
            for alpha in (0.2, 0.5, 0.9):
                agree(x, 2, loss=loss, alpha=alpha, labels=labels, block_size=block_size)

    @pytest.mark.parametrize("weights, objective", PAIRS)
    @settings(max_examples=4)
    @given(seed=SEEDS, v=st.integers(2, 3), b=st.integers(3, 5), classes=st.integers(2, 4),
           block_size=st.sampled_from([None, 0, 1, 3]))
    def test_labels(self, weights, objective, seed, v, b, classes, block_size):
        labels = np.random.default_rng(seed).integers(classes, size=b)
        assume(weights != "transported" or couples(b, v, 0, labels))
        agree(normal(seed, v * b, 3), v, weights=weights, objective=objective, labels=labels,
              block_size=block_size)

    @pytest.mark.parametrize("detach", [True, False])
    @pytest.mark.parametrize("weights", hardneg.WEIGHTS)
    @settings(max_examples=5)
    @given(seed=SEEDS, **SIZES, tau_plus=st.sampled_from([0.0, 0.1]))
    def test_detached_weights(self, weights, detach, seed, v, b, d, tau_plus):
        # Unrolled Sinkhorn stops when the marginals are right to 1e-12; its derivative is still settling then
        tolerance = 1e-7 if weights == "transported" and not detach else 1e-10
        agree(normal(seed, v * b, d), v, weights=weights, objective="nce", detach_weights=detach,
              tau_plus=tau_plus,
              tolerance=tolerance)

    @pytest.mark.parametrize("cost, epsilon",
                             [("sqeuclidean", 0.2), ("sqeuclidean", 1.0), ("exp", 1.0), ("exp", 5.0)])
    @settings(max_examples=5)
    @given(seed=SEEDS, **SIZES, kappa=st.floats(2, 4), tau_plus=st.sampled_from([0.0, 0.1]))
    def test_ground_costs(self, cost, epsilon, seed, v, b, d, kappa, tau_plus):
        agree(normal(seed, v * b, d), v, loss="ot", cost=cost, epsilon=epsilon, kappa=kappa,
              tau_plus=tau_plus)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("block_size", [None, 0, 1, 3])
    @pytest.mark.parametrize("normalize", [True, False])
    @settings(max_examples=3)
    @given(seed=SEEDS, loss=st.sampled_from(PRESETS))
    def test_reductions_and_blocks(self, reduction, block_size, normalize, seed, loss):
        x, weight = normal(seed, 8, 3), normal(seed + 1, 8) if reduction == "none" else None
        # Rows as they are can be long: half of them keeps the cost of a coupling within ε
        agree(x if normalize else x / 2, 2, loss=loss, reduction=reduction, block_size=block_size,
              normalize=normalize,
              weight=weight)

    @settings(max_examples=15)
    @given(seed=SEEDS, a=st.integers(1, 4), n=st.integers(1, 6), name=st.sampled_from(sorted(WEIGHT_OPTIONS)),
           alpha=st.floats(0.01, 1), beta=st.floats(0, 20))
    def test_weights(self, seed, a, n, name, alpha, beta):
        options = WEIGHT_OPTIONS[name] | {"top": {"alpha": round(alpha, 2)},
                                          "tilted": {"beta": beta}}.get(name, {})
        logits = masked_logits(seed, a, n, empty=a > 1 and name != "transported")
        allowed = logits > -INF
        assume(name != "transported" or (oracle.usable(allowed) == allowed).all()
               and oracle.sinkhorn(np.where(allowed, 0, -INF))[3] < 1e-6)
        close(getattr(hardneg, name)(torch.tensor(logits), **options),
              getattr(oracle, name)(logits, **options), 1e-10)

    @pytest.mark.parametrize("alpha, n, kept",
                             [(0.07, 100, 7), (0.1, 10, 1), (0.3, 10, 3), (0.01, 10, 1), (0.55, 3, 2),
                              (2 / 3, 3, 2), (1 / 6, 510, 85), (5 / 6, 60, 50)])
    def test_top_keeps_the_ceiling(self, alpha, n, kept):
        logits = torch.tensor(normal(n, 1, n))
        assert (hardneg.top(logits, alpha) == 0).sum() == kept
        close(hardneg.top(logits, alpha), oracle.top(logits.numpy(), alpha), 0)

    def test_ties_stay_together(self):
        logits = torch.tensor([[1., 3., 3., 2., 3., -INF], [1., 1., -INF, 1., 1., 1.]], dtype=torch.float64)
        for name, options in (("hardest", {}), ("top", {"alpha": 0.2}), ("tilted", {"beta": 2.0})):
            close(getattr(hardneg, name)(logits, **options), getattr(oracle, name)(logits.numpy(), **options),
                  1e-14)

    @pytest.mark.parametrize("weights", ["uniform", "tilted", "hardest", "top"])
    @pytest.mark.parametrize("objective", sorted(hardneg.OBJECTIVES))
    @settings(max_examples=8)
    @given(seed=SEEDS, a=st.integers(2, 4), m=st.integers(1, 3), n=st.integers(1, 6),
           tau_plus=st.sampled_from([0, 0.1, 0.4]),
           t=st.floats(0.3, 2), margin=st.floats(0, 1))
    def test_objectives(self, weights, objective, seed, a, m, n, tau_plus, t, margin):
        pos, neg = normal(seed, a, m), masked_logits(seed, a, n, empty=True)
        if objective == "ppcl":
            pos[1:, 1:][normal(seed + 1, a - 1, m - 1) > 0] = -INF  # anchors with fewer positives
        log_w = getattr(oracle, weights)(neg, **WEIGHT_OPTIONS[weights])
        options = {"margin": margin} if objective == "triplet" else {}
        if objective in ("nce", "ppcl"):
            options = {"tau_plus": tau_plus, "temperature": t, "log_w_pos": oracle.tilted(pos, 0.7)}
        mine = {name: torch.tensor(x) if name == "log_w_pos" else x for name, x in options.items()}
        got = getattr(hardneg, objective)(*map(torch.tensor, (pos, neg, log_w)), **mine)
        close(got, getattr(oracle, objective)(pos, neg, log_w, **options), 1e-10)

    @settings(max_examples=25)
    @given(seed=SEEDS, a=st.integers(1, 4), m=st.integers(1, 3), n=st.integers(1, 6),
           tau_plus=st.floats(0, 0.9),
           t=st.floats(0.3, 2))
    def test_debiased(self, seed, a, m, n, tau_plus, t):
        pos, neg = normal(seed, a, m), masked_logits(seed, a, n)
        log_w, log_w_pos = oracle.tilted(neg, 0.5), oracle.tilted(pos, 0.5)
        got = hardneg.debiased(*map(torch.tensor, (pos, neg, log_w)), tau_plus, t, torch.tensor(log_w_pos))
        close(got, oracle.debiased(pos, neg, log_w, tau_plus, t, log_w_pos), 1e-10)

    @settings(max_examples=15)
    @given(seed=SEEDS, n=st.integers(3, 8), d=st.integers(2, 4), t=st.floats(0.5, 4))
    def test_measures(self, seed, n, d, t):
        x, y, labels = normal(seed, n, d), normal(seed + 1, n, d), np.arange(n) % 2
        unit_x, unit_y = oracle.unit(x), oracle.unit(y)
        x, y = torch.tensor(x), torch.tensor(y)
        close(hardneg.unit(x), unit_x, 1e-14)
        close(hardneg.uniformity(x, t), oracle.uniformity(unit_x, t), 1e-10)
        close(hardneg.alignment(x, y), oracle.alignment(unit_x, unit_y), 1e-10)
        close(hardneg.tolerance(x, torch.tensor(labels)), oracle.tolerance(unit_x, labels), 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    @settings(max_examples=6)
    @given(seed=SEEDS, v=st.integers(2, 3), b=st.integers(2, 4), k=st.sampled_from([0, 0, 3]),
           t=st.floats(0.1, 2),
           tau_plus=st.sampled_from([None, 0.0, 0.3]), block_size=st.sampled_from([None, 0, 1, 3]))
    def test_statistics(self, loss, seed, v, b, k, t, tau_plus, block_size):
        x, options = normal(seed, v * b + k, 3), {"loss": loss, "temperature": t, "tau_plus": tau_plus}
        views, bank = tensors(x, v, k)
        value, stats = hardneg.contrastive_loss(*views, **bank, **options, block_size=block_size,
                                                return_stats=True)
        want = oracle.statistics(*map(numpy, views), **{n: numpy(z) for n, z in bank.items()}, **options)
        assert stats.keys() == want.keys()
        close(torch.stack([stats[name].double() for name in want]), np.array(list(want.values())), 1e-6)
        close(value, hardneg.contrastive_loss(*views, **bank, **options), 1e-12)

    def test_statistics_with_labels(self):
        x, options = normal(3, 10, 3), {"loss": "hcl", "labels": np.array([0, 0, 1, 1, 2])}
        stats = hardneg.contrastive_loss(*tensors(x, 2)[0], **options, return_stats=True)[1]
        want = oracle.statistics(*np.split(x, 2), **options)
        close(torch.stack([stats[name].double() for name in want]), np.array(list(want.values())), 1e-6)

    @pytest.mark.parametrize("loss", ["hcl", "ppcl", "triplet"])
    def test_complex_step_is_the_central_difference(self, loss):
        x = normal(7, 8, 3)
        def function(rows):
            return oracle.contrastive_loss(*np.split(rows, 2), loss=loss)
        close(oracle.gradient(function, x), oracle.central_difference(function, x), 1e-6)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size", [None, 0, 3])
    def test_learned_temperature(self, loss, block_size):
        # `ot` through its weights: a difference of values cannot hold them constant
        views, detach = tensors(normal(11, 8, 3), 2, grad=True)[0], False if loss == "ot" else None
        options = {"loss": loss, "detach_weights": detach}
        t = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        value = hardneg.contrastive_loss(*views, **options, temperature=t, block_size=block_size)
        gradient, = torch.autograd.grad(value, t, allow_unused=True)
        slope = oracle.central_difference(
            lambda s: oracle.contrastive_loss(*map(numpy, views), **options, temperature=float(s)),
                                          np.array(0.5))
        close(0.0 if gradient is None else gradient, slope, 1e-7)


# ------------------------------------------------------------------------------------------------------------
# Limits
# ------------------------------------------------------------------------------------------------------------

class TestLimits:
    """Every method turns into another one, or into a closed form, at the ends of its parameters."""

    @pytest.mark.parametrize("options, other", [
        ({"loss": "hcl", "beta": 0.0, "tau_plus": 0.2}, {"loss": "debiased", "tau_plus": 0.2}),
        ({"loss": "hcl", "beta": 0.0, "tau_plus": 0.0}, {"loss": "simclr"}),
        ({"loss": "debiased", "tau_plus": 0.0}, {"loss": "simclr"}),
        ({"loss": "hard", "alpha": 1.0}, {"loss": "simclr"}),
        ({"loss": "hard-simple", "alpha": 1.0}, {"loss": "simple"}),
        ({"loss": "hard", "alpha": 1e-6}, {"loss": "hard", "alpha": 0.05}),  # both keep one
    ])
    @settings(max_examples=8)
    @given(seed=SEEDS, **SIZES)
    def test_same_loss(self, options, other, seed, v, b, d):
        x = normal(seed, v * b, d)
        for got, want in zip(ours(x, v, **options), ours(x, v, **other)):
            close(got, want, 1e-12)

    @settings(max_examples=30)
    @given(seed=SEEDS, b=st.integers(2, 5), d=st.integers(2, 4), block_size=st.sampled_from([None, 0, 3]),
           labelled=st.booleans())
    def test_ppcl_with_nothing_generated_is_simclr(self, seed, b, d, block_size, labelled):
        """Without labels, and where no two samples share one."""
        x, labels = normal(seed, 2 * b, d), np.random.default_rng(seed).permutation(b) if labelled else None
        for got, want in zip(ours(x, 2, loss="ppcl", labels=labels, block_size=block_size), ours(x, 2, loss="simclr")):
            close(got, want, 1e-12)

    @given(seed=SEEDS, b=st.integers(2, 5), d=st.integers(2, 4))
    def test_large_epsilon_is_simclr(self, seed, b, d):
        x, epsilon = normal(seed, 2 * b, d), 1e4
        # log w is at most 4 · 2/ε from 0
        close(ours(x, 2, loss="ot", epsilon=epsilon)[0], ours(x, 2, loss="simclr")[0], 8 / epsilon)

    @given(seed=SEEDS, a=st.integers(1, 4), n=st.integers(2, 6))
    def test_large_beta_is_hardest(self, seed, a, n):
        logits = masked_logits(seed, a, n)
        ordered = np.sort(logits, axis=1)
        assume((ordered[:, -1] - ordered[:, -2] > 0.01).all())
        logits = torch.tensor(logits)
        close(hardneg.tilted(logits, 1e4).exp(), hardneg.hardest(logits).exp(), 1e-12)

    @given(seed=SEEDS, b=st.integers(2, 5), d=st.integers(2, 4), alpha=st.sampled_from([0.1, 0.4, 1.0]))
    def test_hot_hard_is_hard_simple(self, seed, b, d, alpha):
        x, t = normal(seed, 2 * b, d), 1e3
        kept = max(1, math.ceil(round(alpha * 2 * (b - 1), 9)))
        hard = ours(x, 2, loss="hard", alpha=alpha, temperature=t)
        flat = ours(x, 2, loss="hard-simple", alpha=alpha)
        close(hard[0], math.log(1 + kept) + kept / (1 + kept) / t * flat[0], 2 / t**2)
        close(t * hard[1], kept / (1 + kept) * flat[1], 10 / t)

    @pytest.mark.parametrize("a, n", [(4, 4), (5, 5), (3, 6)])
    @settings(max_examples=4)
    @given(seed=SEEDS)
    def test_small_epsilon_is_optimal_transport(self, a, n, seed):
        cost = np.random.default_rng(seed).uniform(0, 2, (a, n))
        kernel = torch.tensor(-cost / 0.05)
        f, g, _ = hardneg.sinkhorn(kernel, tolerance=1e-7, max_steps=4000)
        spent = float((torch.exp(f[:, None] + kernel + g) * torch.tensor(cost)).sum())
        least = float((oracle.exact_coupling(cost) * cost).sum())
        if a == n:
            close(oracle.assignment_cost(cost), least, 1e-9)
        assert least - 1e-6 <= spent <= least + 0.05 * math.log(n) + 1e-6  # ε times the most entropy there is

    @pytest.mark.parametrize("alpha", [1.0, 0.4, 0.1])
    @given(seed=SEEDS, a=st.integers(1, 4), n=st.integers(1, 6), t=st.floats(0.1, 2))
    def test_softmax_gradients(self, alpha, seed, a, n, t):
        pos, neg = np.random.default_rng(seed).uniform(-1, 1, (a, 1)), masked_logits(seed, a, n) / 2
        p, s = torch.tensor(pos, requires_grad=True), torch.tensor(neg, requires_grad=True)
        loss = hardneg.nce(p / t, s / t, hardneg.top(s / t, alpha)).sum()
        by_pos, by_neg = torch.autograd.grad(loss, (p, s))
        ratio = numpy(by_neg) / np.abs(numpy(by_pos))
        close(ratio, oracle.hard_gradient_ratio(neg, t, alpha), 1e-10)
        if alpha == 1:
            close(ratio, oracle.gradient_ratio(neg, t), 1e-10)
            for got, want in zip((by_pos[:, 0], by_neg), oracle.softmax_gradients(pos, neg, t)):
                close(got, want, 1e-10)


# ------------------------------------------------------------------------------------------------------------
# Theorems
# ------------------------------------------------------------------------------------------------------------

def similarities(x, y, labels=None):
    """Cosines of a batch of two views by the oracle: pos (2B, 1), neg (2B, 2B), −∞ where no negative."""
    z, b = oracle.unit(np.concatenate([x, y])), len(x)
    cosines, places = z @ z.T, np.arange(2 * b)
    owners = np.tile(np.arange(b) if labels is None else labels, 2)
    return (cosines[places, (places + b) % (2 * b)][:, None],
            np.where(owners[:, None] == owners, -INF, cosines))


def hardness(x, y, epsilon=None, **options):
    """E_P[cos(x, x⁻)] under the coupling at ε, or uniform negatives, read off hardneg's difference of means."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    weights = {} if epsilon is None else {"weights": "transported", "epsilon": epsilon}
    losses = hardneg.contrastive_loss(x, y, loss="simple", reduction="none", **weights, **options)
    aligned = (hardneg.unit(x) * hardneg.unit(y)).sum(1)
    return float((losses + (aligned if "negatives" in options else aligned.repeat(2))).mean())


def relative_entropy(p, q):
    """KL(p ‖ q) = Σ p log(p/q), where 0 log 0 = 0."""
    p, q = p[p > 0], q[p > 0]
    return float((p * np.log(p / q)).sum())


def some_coupling(seed, allowed):
    """A coupling with uniform marginals on the allowed entries, an extreme point half of the time."""
    cost = np.where(allowed, np.random.default_rng(seed).uniform(0, 3, allowed.shape), INF)
    return oracle.exact_coupling(cost) if seed % 2 else oracle.sinkhorn(-cost)[0]


def descend(counts, d, seed=0, smooth=300, sharp=200):
    """Points of len(counts) classes on the sphere brought to a minimum of L*_∞, counts[c] of class c.

    The loss has a kink wherever two classes are equally near, and at a minimum most are: β is brought up first, and
    the steps on the worst case itself shrink. → its value, how far points of a class are apart, centres, shares."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    other = torch.cat([torch.arange(n).roll(1) + sum(counts[:c]) for c, n in enumerate(counts)])
    z = torch.tensor(normal(seed, len(labels), d), requires_grad=True)

    def loss(**options):
        return hardneg.contrastive_loss(z, z[other], loss="simple", labels=labels, temperature=1, block_size=0,
                                        **options)
    optimizer = torch.optim.Adam([z], lr=0.05)
    for step in range(smooth):
        optimizer.zero_grad()
        loss(weights="tilted", beta=2 * 100**(step / smooth)).backward()
        optimizer.step()
    for step in range(sharp):
        with torch.no_grad():
            z.copy_(hardneg.unit(z))
        gradient, = torch.autograd.grad(loss(weights="hardest"), z)
        with torch.no_grad():
            z -= 0.03 * 1e-3**(step / sharp) * len(labels) * gradient
    classes = [oracle.unit(numpy(z)[labels == c]) for c in range(len(counts))]
    return (float(loss(weights="hardest").detach()), max(np.ptp(rows, axis=0).max() for rows in classes),
            oracle.unit(np.array([rows.mean(0) for rows in classes])), np.array(counts) / sum(counts))


class TestTheorems:
    """What the papers prove about these losses, run: the loss by hardneg, what it must be by the oracle."""

    # [2] Lemma 2 and Theorem 1: without regularisation the game is won by an encoder that is constant

    @pytest.mark.filterwarnings("ignore:Sinkhorn")
    @given(seed=SEEDS, n=st.integers(2, 6), d=st.integers(2, 4), epsilon=st.sampled_from([0.02, 0.1, 0.5, 2.0]))
    def test_worst_coupling_is_with_oneself(self, seed, n, d, epsilon):
        """The worst coupling of rows with themselves has E x·x⁻ = 1, so E v = 1 − E x·x⁺ ≥ 0; at ε > 0 it is at most
        ε log n below, because coupling each row with itself has relative entropy log n."""
        x, y = normal(seed, n, d), normal(seed + 1, n, d)
        z, aligned = oracle.unit(x), (oracle.unit(x) * oracle.unit(y)).sum(1)
        cost = numpy(hardneg.ground_cost(torch.tensor(z @ z.T)))
        plan = oracle.exact_coupling(cost)
        close((plan * cost).sum(), 0, 1e-9)
        with np.errstate(divide="ignore"):
            log_w = np.log(n * n * plan)
        pieces = torch.tensor(aligned)[:, None], torch.tensor(z @ z.T)
        worst = float(hardneg.simple(*pieces, torch.tensor(log_w)).mean())
        close(worst, 1 - aligned.mean(), 1e-9)
        assert worst >= 0
        other = n * n * some_coupling(seed, np.ones((n, n), bool))
        with np.errstate(divide="ignore"):
            assert float(hardneg.simple(*pieces, torch.tensor(np.log(other))).mean()) <= worst + 1e-9
        value = hardness(x, y, epsilon, negatives=torch.tensor(x)) - aligned.mean()
        assert worst - epsilon * math.log(n) - 1e-4 <= value <= worst + 1e-9
        constant = np.ones((n, d))
        close(hardness(constant, constant, epsilon, negatives=torch.tensor(constant)) - 1, 0, 1e-12)

    @given(seed=SEEDS, n=st.integers(2, 6), q=st.floats(0.5, 20), t=st.floats(0.2, 2), margin=st.floats(0, 1))
    def test_no_encoder_beats_a_constant(self, seed, n, q, t, margin):
        """For a convex non-decreasing ψ the worst coupling costs at least ψ(0): log(1 + Q) of nce, η of the triplet
        loss; under a constant encoder every coupling costs that."""
        def worst(z, y, objective, *options):  # one negative at a time, as they are drawn
            pos = (z * y).sum(1).repeat(n).reshape(n, n).T.reshape(-1, 1)
            cost = objective(pos, (z @ z.T).reshape(-1, 1), torch.zeros(n * n, 1, dtype=z.dtype), *options)
            cost = numpy(cost.reshape(n, n))
            return (oracle.exact_coupling(-cost) * cost).sum()

        def nce(pos, neg, log_w):
            return hardneg.nce(pos / t, neg / t, log_w + math.log(q))

        z, y = (hardneg.unit(torch.tensor(normal(seed + k, n, 3))) for k in range(2))
        constant = z[:1].expand(n, 3)
        for objective, least in ((nce, math.log(1 + q)), (hardneg.triplet, margin)):
            options = (margin,) if objective is hardneg.triplet else ()
            assert worst(z, y, objective, *options) >= least - 1e-9
            close(worst(constant, constant, objective, *options), least, 1e-9)

    @pytest.mark.filterwarnings("ignore:Sinkhorn")
    @given(seed=SEEDS, n=st.integers(2, 6), t=st.floats(0.2, 2), epsilon=st.sampled_from([0.02, 0.1, 0.5]))
    def test_nor_does_one_at_small_epsilon(self, seed, n, t, epsilon):
        """Where a row may be its own negative the loss of [2] is at least log(1 + N n^{−ε/t}), by Jensen twice. It is
        log(1 + N) for a constant encoder, and less than that where a row may not and the rows are a simplex."""
        x, y = (torch.tensor(normal(seed + k, n, 3)) for k in range(2))
        options = {"loss": "ot", "temperature": t, "epsilon": epsilon}
        value = hardneg.contrastive_loss(x, y, negatives=x, **options)
        assert value >= math.log(1 + n * n ** (-epsilon / t)) - 1e-4
        constant, simplex = x[:1].expand(n, 3), torch.eye(n, dtype=x.dtype) - 1 / n
        close(hardneg.contrastive_loss(constant, constant, negatives=constant, **options), math.log(1 + n), 1e-12)
        within = float(hardneg.contrastive_loss(simplex, simplex, **options))
        close(within, math.log(1 + (2 * n - 2) * math.exp(-n / (n - 1) / t)), 1e-9)
        assert within < math.log(1 + 2 * n - 2)

    # [2] VI: what the regularised coupling has instead

    @pytest.mark.filterwarnings("ignore:Sinkhorn")
    @given(seed=SEEDS, b=st.integers(2, 5), epsilon=st.floats(0.1, 2))
    def test_no_row_is_coupled_with_itself(self, seed, b, epsilon):
        """Own views have no weight, so E s stays below that of the best coupling that avoids them, by ε log 2B at
        most: with them it would go to 1."""
        x, y = normal(seed, b, 3), normal(seed + 1, b, 3)
        neg = similarities(x, y)[1]
        log_w = numpy(hardneg.transported(torch.tensor(neg), epsilon))
        assert ((log_w == -INF) == (neg == -INF)).all()
        cost = np.where(neg > -INF, 1 - neg, INF)
        plan = oracle.exact_coupling(cost)
        least = 1 - (plan[plan > 0] * cost[plan > 0]).sum()
        assert least - epsilon * math.log(2 * b) - 1e-6 <= hardness(x, y, epsilon) <= least + 1e-6

    @given(seed=SEEDS, b=st.integers(2, 5), k=st.integers(1, 6), epsilon=st.floats(0.2, 5))
    def test_harder_than_the_product_coupling(self, seed, b, k, epsilon):
        """E s is at least that of independent draws from a bank, as printed; where own views are forbidden, at least
        that of the coupling of largest entropy that avoids them, which is uniform over the others."""
        x, y, bank = normal(seed, b, 3), normal(seed + 1, b, 3), torch.tensor(normal(seed + 2, k, 3))
        assert hardness(x, y, epsilon, negatives=bank) >= hardness(x, y, negatives=bank) - 1e-9
        neg = similarities(x, y)[1]
        even = oracle.product_coupling(neg > -INF)
        close((even * np.where(neg > -INF, neg, 0)).sum(), hardness(x, y), 1e-9)
        assert hardness(x, y, epsilon) >= hardness(x, y) - 1e-9

    @given(seed=SEEDS, n=st.integers(2, 6), epsilon=st.floats(0.2, 5))
    def test_not_harder_than_a_product_with_itself(self, seed, n, epsilon):
        """Counterexamples to the property as printed. Of two points each must be coupled with the other, E s = s₁₂; the
        product of the marginals has each with itself half of the time, (1 + s₁₂)/2. Of a simplex of any size E s is
        −1/(n − 1), the product's 0."""
        for x in (normal(seed, 2, 3), np.eye(n) - 1 / n):
            cosines = oracle.unit(x) @ oracle.unit(x).T
            product = (oracle.product_coupling(np.ones(cosines.shape, bool)) * cosines).sum()
            close(hardness(x, x, epsilon), cosines[0, 1], 1e-9)
            assert hardness(x, x, epsilon) < product

    @given(seed=SEEDS, b=st.integers(3, 5), k=st.integers(2, 6))
    def test_hardness_falls_with_epsilon(self, seed, b, k):
        """E s falls as ε grows, down to that of uniform negatives, in a batch and with a bank."""
        x, y, bank = normal(seed, b, 3), normal(seed + 1, b, 3), torch.tensor(normal(seed + 2, k, 3))
        for options in ({}, {"negatives": bank}):
            values = np.array([hardness(x, y, epsilon, **options) for epsilon in (0.2, 0.4, 1.0, 3.0, 10.0, 1e5)])
            assert (np.diff(values) < 1e-10).all() and values[0] > values[-1]
            close(values[-1], hardness(x, y, **options), 1e-4)

    # [1] Proposition 1: as β grows, tilted weights go to the worst case

    @given(seed=SEEDS, b=st.integers(2, 5), t=st.floats(0.1, 2), beta=st.floats(0, 1000), eps=st.floats(1e-3, 2),
           classes=st.sampled_from([2, 5]))
    def test_tilted_is_near_the_worst_case(self, seed, b, t, beta, eps, classes):
        """For each anchor 0 ≤ L* − L(q_β) ≤ E_q[M − s] ≤ ε + R P_q(s < M − ε) ≤ ε + R e^{−βε/2}/ρ_ε at every β and ε
        (the logarithm's slope, then Jensen), and E_q[M − s] ≤ log N / β: it goes to 0, without a gap between
        the nearest two."""
        x, y, labels = normal(seed, b, 3), normal(seed + 1, b, 3), np.arange(b) % classes

        def losses(**options):
            return numpy(hardneg.contrastive_loss(torch.tensor(x), torch.tensor(y), loss="hcl", tau_plus=0,
                                                  temperature=t, labels=labels, reduction="none", **options))
        pos, neg = (cosines / t for cosines in similarities(x, y, labels))
        worst, counts = losses(weights="hardest"), (neg > -INF).sum(1)
        gaps = worst - losses(beta=beta)
        weights = numpy(hardneg.tilted(torch.tensor(neg), beta).exp()) / counts[:, None]
        for i in range(2 * b):
            close(worst[i], oracle.worst_case(pos[i:i + 1], neg[i:i + 1], counts[i])[0], 1e-10)
            drop, near, far = oracle.worst_case_bound(neg[i], beta, eps)
            close(weights[i] @ np.where(neg[i] > -INF, neg[i].max() - neg[i], 0), drop, 1e-10)
            assert -1e-10 <= gaps[i] <= drop + 1e-10 and drop <= near + 1e-10 and near <= far + 1e-10
            assert beta * drop <= math.log(counts[i]) + 1e-9

    @pytest.mark.parametrize("middling, far, beta", [(10, 10, 6.0), (0, 100, 2.0)])
    def test_bound_on_the_far(self, middling, far, beta):
        """P_q(s < M − ε) ≤ e^{−βε/2}/ρ_ε at ε = 1 on rows that would break it with all of ε in the exponent (the first)
        and without ρ_ε (the second)."""
        logits = np.array([0.0] + [-0.5] * middling + [-1.01] * far)
        q = numpy(hardneg.tilted(torch.tensor(logits)[None], beta).exp())[0] / len(logits)
        close(q[logits < -1].sum(), oracle.bad_probability(logits, beta, 1), 1e-12)
        assert q[logits < -1].sum() <= oracle.bad_probability_bound(logits, beta, 1)

    @given(seed=SEEDS, b=st.integers(2, 5), t=st.floats(0.1, 2))
    def test_and_nearer_as_beta_grows(self, seed, b, t):
        """L(q_β) rises with β, from uniform weights to the worst case: they differ by log N / β at most."""
        x, y = (torch.tensor(normal(seed + k, b, 3)) for k in range(2))
        options = {"temperature": t, "reduction": "none"}
        betas = (0, 0.3, 1, 3, 10, 100, 1e4)
        values = [hardneg.contrastive_loss(x, y, loss="hcl", tau_plus=0, beta=beta, **options) for beta in betas]
        assert (torch.stack(values).diff(dim=0) >= -1e-10).all()
        close(values[0], hardneg.contrastive_loss(x, y, **options), 1e-10)
        worst = oracle.worst_case(*(cosines / t for cosines in similarities(numpy(x), numpy(y))), 2 * b - 2)
        assert (worst - numpy(values[-1]) <= math.log(2 * b - 2) / 1e4 + 1e-10).all()

    # [1] Theorem 2: what minimises the worst case

    @given(seed=SEEDS, classes=st.integers(2, 4), each=st.integers(2, 3), d=st.integers(2, 4), t=st.floats(0.2, 2))
    def test_worst_case_is_alignment_and_separation(self, seed, classes, each, d, t):
        """L*_∞ is L_align + L*_unif − 1/t², the most that L_∞ is under any negatives; to move every class, one after
        another, onto that point of it which is farthest from the others never makes it larger."""
        labels = np.repeat(np.arange(classes), each)
        z = oracle.unit(normal(seed, len(labels), d))
        other = np.arange(len(z)).reshape(classes, each)[:, np.r_[1:each, 0]].ravel()

        def loss(rows, **options):
            rows = torch.tensor(rows)
            return float(hardneg.contrastive_loss(rows, rows[other], loss="simple", labels=labels, **options)) / t**2
        outside = np.stack([z[labels != c] for c in labels]) / t  # on the paper's sphere of radius 1/t
        x, positives, worst = z / t, z[other] / t, loss(z, weights="hardest")
        close(worst, oracle.l_align(x, positives) + oracle.l_unif_star(x, outside) - 1 / t**2, 1e-10)
        close(worst, oracle.l_align(x, positives) - oracle.nearest_distance(x, outside) / 2, 1e-10)
        assert oracle.l_infinity(x, positives, outside) <= worst + 1e-10
        assert loss(z) <= oracle.l_infinity(x, positives, outside) + 1e-10  # Jensen
        for c in range(classes):
            before, inside = loss(z, weights="hardest"), z[labels == c]
            z[labels == c] = inside[np.argmin((inside @ z[labels != c].T).max(1))]
            assert loss(z, weights="hardest") <= before + 1e-10
        shares, centres = np.full(classes, 1 / classes), z[::each] / t
        close(loss(z, weights="hardest"), -oracle.ball_packing(centres, shares) / 2, 1e-10)

    @pytest.mark.parametrize("counts, d, most", [
        ([2] * 2, 3, 4),                             # antipodes
        ([2] * 3, 2, 3),                             # C ≤ d + 1, a simplex: 2C/(C − 1)
        ([3] * 4, 3, 8 / 3),
        ([2] * 5, 4, 5 / 2),
        ([2] * 5, 3, 81 / 40),                       # a square pyramid of height 9/8
        ([2] * 6, 3, 2),                             # octahedron
        ([2] * 8, 3, (16 - 4 * math.sqrt(2)) / 7),   # square antiprism
        ([2] * 12, 3, 2 - 2 / math.sqrt(5)),         # icosahedron
    ])
    def test_minimum_is_a_ball_packing(self, counts, d, most):
        """Gradient descent on L*_∞ brings points of a class together and classes as far from their nearest as they
        can be on average. That is Tammes' problem, the least distance, in these cases but one: for five classes in
        three dimensions the pyramid has 81/40, and nobody keeps five points farther apart than √2."""
        value, spread, centres, shares = descend(counts, d)
        packing = oracle.ball_packing(centres, shares)
        assert spread < 1e-3
        assert (1 - 1e-3) * most <= packing <= most + 1e-9
        close(value, -most / 2, 1e-3)

    @pytest.mark.parametrize("counts", [(2, 1, 1), (14, 3, 3), (6, 1, 1), (9, 1, 1)])
    @pytest.mark.parametrize("d", [2, 3])
    def test_heavy_class_pushes_the_others_together(self, counts, d):
        """Three classes, one of share ρ: the others are at an angle φ from its antipode. cos φ is ρ / (4 − 4ρ) from
        ρ = 2/3, where they are a simplex still, to ρ = 4/5, from where they coincide."""
        heavy = counts[0] / sum(counts)
        cosine = min(1, max(1 / 2, heavy / (4 - 4 * heavy)))
        most = heavy * (2 + 2 * cosine) + (1 - heavy) * min(2 + 2 * cosine, 4 - 4 * cosine**2)
        value, spread, centres, shares = descend(counts, d)
        assert spread < 3e-3
        assert (1 - 1e-3) * most <= oracle.ball_packing(centres, shares) <= most + 1e-9
        close(value, -most / 2, 1e-3)
        close(-centres[1:] @ centres[0], np.full(2, cosine), 0.02)  # 4 (1 − ρ) 0.02² of the packing: it is flat there

    @pytest.mark.parametrize("sides", [6, 7, 12])
    def test_many_classes_in_a_plane_are_better_off_in_a_pile(self, sides):
        """The mean, not the least distance: at the corners of a square, all classes but three at one of them, it is
        6/C; for a regular polygon 4 sin²(π/C), the same at six classes and less from seven on."""
        angles = torch.arange(sides, dtype=torch.float64) / sides * math.tau
        polygon = torch.stack([angles.cos(), angles.sin()], 1)
        square = torch.tensor([[1., 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)
        pile = square[torch.arange(sides).clamp_max(3)]

        def loss(z):
            return float(hardneg.contrastive_loss(z, z, loss="simple", weights="hardest"))
        for z in (polygon, pile):
            close(loss(z), -oracle.ball_packing(z.numpy(), np.full(sides, 1 / sides)) / 2, 1e-12)
        close(loss(pile), -3 / sides, 1e-12)
        close(loss(polygon), -2 * math.sin(math.pi / sides)**2, 1e-12)
        assert loss(pile) < loss(polygon) + (1e-12 if sides == 6 else 0)

    # [2] Lemma 3, Eq. 7: the coupling in closed form

    @given(seed=SEEDS, a=st.integers(1, 5), n=st.integers(1, 6), epsilon=st.floats(0.2, 5),
           share=st.sampled_from([0, 0.2]))
    def test_coupling_is_the_minimiser(self, seed, a, n, epsilon, share):
        """P* = p(x) p(x⁻) e^{(u + v − c)/ε} has the marginals p, and E c + ε KL(P ‖ p p) of any other coupling P is
        larger by ε KL(P ‖ P*). The weights are its conditionals, and weigh all candidates alike on the whole."""
        cosines = masked_logits(seed, a, n, share) / 2
        allowed = cosines > -INF
        assume(allowed.any(0).all() and (oracle.usable(allowed) == allowed).all())
        assume(oracle.sinkhorn(np.where(allowed, 0, -INF))[3] < 1e-6)
        cost, kernel = oracle.ground_cost(cosines), -hardneg.ground_cost(torch.tensor(cosines)) / epsilon
        f, g, _ = map(numpy, hardneg.sinkhorn(kernel))  # cost ∞ where forbidden
        u, v, product = epsilon * (f + math.log(a)), epsilon * (g + math.log(n)), np.full((a, n), 1 / (a * n))
        plan = product * np.exp((u[:, None] + v - cost) / epsilon)
        close(plan.sum(1), np.full(a, 1 / a), 1e-11)
        close(plan.sum(0), np.full(n, 1 / n), 1e-11)

        def objective(p):
            return (p * np.where(allowed, cost, 0)).sum() + epsilon * relative_entropy(p, product)
        other = some_coupling(seed, allowed)
        for mixed in (other, 0.9 * plan + 0.1 * other, oracle.product_coupling(allowed)):
            excess = objective(mixed) - objective(plan)
            assert excess >= -1e-10
            close(excess, epsilon * relative_entropy(mixed, plan), 1e-9)
        close(objective(plan), u.mean() + v.mean(), 1e-9)  # the dual problem's value: there is no gap
        weights = numpy(hardneg.transported(torch.tensor(cosines), epsilon).exp())
        counts = allowed.sum(1)[:, None]
        close(weights / counts / a, plan, 1e-10)
        close((weights / counts).sum(0), np.full(n, a / n), 1e-10)

    @given(seed=SEEDS, a=st.integers(1, 4), n=st.integers(1, 6), t=st.floats(0.1, 2), epsilon=st.floats(0.05, 5))
    def test_without_marginals_it_is_tilted(self, seed, a, n, t, epsilon):
        """With nothing asked of the marginals the minimiser is q_β at β = t/ε: any other q has an E c + ε KL(q ‖ p)
        that is larger by ε KL(q ‖ q_β)."""
        logits = torch.tensor(masked_logits(seed, a, n, empty=a > 1))
        log_w = hardneg.transported(logits, epsilon, temperature=t, potential=torch.zeros(n, dtype=torch.float64))
        close(log_w, hardneg.tilted(logits, t / epsilon), 1e-12)
        for i, places in enumerate(numpy(logits) > -INF):
            if places.any():
                cost = oracle.ground_cost(t * numpy(logits)[i, places])
                best, product = numpy(log_w.exp())[i, places] / places.sum(), np.full(places.sum(), 1 / places.sum())
                q = np.random.default_rng(seed).dirichlet(product)
                excess = (q - best) @ cost + epsilon * (relative_entropy(q, product) - relative_entropy(best, product))
                close(excess, epsilon * relative_entropy(q, best), 1e-9)

    # [4] Eq. 6, 7: the ends of the temperature, and how fast they are reached

    @given(seed=SEEDS, b=st.integers(2, 5), t=st.floats(1e-3, 10), classes=st.sampled_from([2, 100]))
    def test_cold(self, seed, b, t, classes):
        """0 ≤ τ L − max(0, max_j s_j − s⁺) ≤ τ log(1 + N) at every τ, and the upper end is reached where all
        similarities are equal. The limit is half of the triplet loss on the nearest."""
        x, y = normal(seed, b, 3), normal(seed + 1, b, 3)
        labels = np.random.default_rng(seed).integers(classes, size=b)
        pos, neg = similarities(x, y, labels)
        limit, counts = oracle.nce_cold(pos, neg), (neg > -INF).sum(1)
        x, y = torch.tensor(x), torch.tensor(y)
        options = {"labels": labels, "reduction": "none"}
        off = t * numpy(hardneg.contrastive_loss(x, y, temperature=t, **options)) - limit
        assert (off >= -1e-12).all() and (off <= t * np.log(1 + counts) + 1e-12).all()
        close(hardneg.contrastive_loss(x, y, loss="triplet", **options), 2 * limit, 1e-12)
        constant = torch.ones(b, 3, dtype=torch.float64)
        close(t * hardneg.contrastive_loss(constant, constant, temperature=t, **options), t * np.log(1 + counts), 1e-12)

    @given(seed=SEEDS, b=st.integers(2, 5), t=st.floats(0.2, 300), classes=st.sampled_from([2, 100]))
    def test_hot(self, seed, b, t, classes):
        """τ² (L − [log(1 + N) − N/(N + 1) s⁺/τ + Σ_j s_j/((N + 1) τ)]) is Var/2 up to R³ / (36 √3 τ) at every τ, with
        Var and R the variance and the range of the N + 1 similarities: a third cumulant is at most R³ / (6 √3)."""
        x, y = normal(seed, b, 3), normal(seed + 1, b, 3)
        labels = np.random.default_rng(seed).integers(classes, size=b)
        pos, neg = similarities(x, y, labels)
        losses = hardneg.contrastive_loss(torch.tensor(x), torch.tensor(y), temperature=t, labels=labels,
                                          reduction="none")
        scaled = t**2 * (numpy(losses) - oracle.nce_hot(pos, neg, t))
        for i in range(2 * b):
            s = np.append(neg[i, neg[i] > -INF], pos[i])
            assert abs(scaled[i] - s.var() / 2) <= np.ptp(s)**3 / (36 * math.sqrt(3) * t) + 1e-14 * t**2


# ------------------------------------------------------------------------------------------------------------
# Invariants
# ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("loss", PRESETS)
class TestInvariants:
    """What must not change a loss does not, for every preset."""

    @settings(max_examples=6)
    @given(seed=SEEDS, **SIZES)
    def test_permuted_samples(self, loss, seed, v, b, d):
        views = tensors(normal(seed, v * b, d), v)[0]
        order = torch.tensor(np.random.default_rng(seed).permutation(b))
        losses = hardneg.contrastive_loss(*views, loss=loss, reduction="none").view(v, b)
        permuted = hardneg.contrastive_loss(*[x[order] for x in views], loss=loss, reduction="none")
        close(permuted.view(v, b), losses[:, order], 1e-10)

    @settings(max_examples=6)
    @given(seed=SEEDS, **SIZES)
    def test_swapped_views(self, loss, seed, v, b, d):
        views = tensors(normal(seed, v * b, d), v)[0]
        losses = hardneg.contrastive_loss(*views, loss=loss, reduction="none").view(v, b)
        close(hardneg.contrastive_loss(*views[::-1], loss=loss, reduction="none").view(v, b), losses.flip(0),
              1e-10)

    @settings(max_examples=6)
    @given(seed=SEEDS, **SIZES, k=st.sampled_from([0, 3]))
    def test_rotation_and_scale(self, loss, seed, v, b, d, k):
        x = normal(seed, v * b + k, d)
        rotation = np.linalg.qr(normal(seed + 1, d, d))[0]
        lengths = np.exp(normal(seed + 2, v * b + k, 1))
        value, gradient = ours(x, v, k, loss=loss)
        rotated_value, rotated_gradient = ours(x @ rotation, v, k, loss=loss)
        close(rotated_value, value, 1e-10)
        close(rotated_gradient, numpy(gradient) @ rotation, 1e-9, floor=1e-3)
        scaled_value, scaled_gradient = ours(x * lengths, v, k, loss=loss)
        close(scaled_value, value, 1e-10)
        close(numpy(scaled_gradient) * lengths, gradient, 1e-9, floor=1e-3)
        close((numpy(gradient) * x).sum(1), np.zeros(v * b + k), 1e-10)  # along the sphere

    @settings(max_examples=6)
    @given(seed=SEEDS, **SIZES, k=st.sampled_from([0, 3]), size=st.integers(1, 5),
           reduction=st.sampled_from(["mean", "none"]))
    def test_block_size(self, loss, seed, v, b, d, k, size, reduction):
        x = normal(seed, v * b + k, d)
        weight = normal(seed, b if k else v * b) if reduction == "none" else None
        want = ours(x, v, k, weight=weight, loss=loss, reduction=reduction, block_size=0)
        for got, expected in zip(ours(x, v, k, weight=weight, loss=loss, reduction=reduction,
                                      block_size=size), want):
            close(got, expected, 1e-12)

    @settings(max_examples=6)
    @given(seed=SEEDS, b=st.integers(2, 4), size=st.sampled_from([None, 0, 3]))
    def test_reductions_add_up(self, loss, seed, b, size):
        views = tensors(normal(seed, 2 * b, 3), 2)[0]
        mean, total, each = (hardneg.contrastive_loss(*views, loss=loss, reduction=r, block_size=size)
                             for r in ("mean", "sum", "none"))
        assert mean.shape == total.shape == () and each.shape == (2 * b,)
        close(each.sum(), total, 1e-12)
        close(each.mean(), mean, 1e-12)


class TestInvariantsOfPieces:
    """What weights, couplings and gradients add up to."""

    @pytest.mark.parametrize("name", sorted(set(WEIGHT_OPTIONS) - {"top"}))
    @given(seed=SEEDS, a=st.integers(2, 4), n=st.integers(2, 6))
    def test_weights_have_mean_one(self, name, seed, a, n):
        logits = masked_logits(seed, a, n, share=0.15)
        assume(name != "transported" or (oracle.usable(logits > -INF) == (logits > -INF)).all())
        log_w = getattr(hardneg, name)(torch.tensor(logits), **WEIGHT_OPTIONS[name])
        close(log_w.exp().sum(1), (logits > -INF).sum(1), 1e-12)
        assert (numpy(log_w)[logits == -INF] == -INF).all()

    @given(seed=SEEDS, a=st.integers(1, 5), n=st.integers(1, 6), epsilon=st.floats(0.2, 2))
    def test_transported_has_uniform_columns(self, seed, a, n, epsilon):
        w = hardneg.transported(torch.tensor(masked_logits(seed, a, n, share=0)), epsilon).exp()
        close(w.mean(0), np.ones(n), 1e-10)

    @pytest.mark.parametrize("alpha", [1.0, 0.4])
    @given(seed=SEEDS, a=st.integers(1, 4), n=st.integers(1, 6), t=st.floats(0.05, 2))
    def test_pull_equals_push(self, alpha, seed, a, n, t):
        pos = torch.tensor(normal(seed, a, 1), requires_grad=True)
        neg = torch.tensor(masked_logits(seed, a, n), requires_grad=True)
        loss = hardneg.nce(pos / t, neg / t, hardneg.top(neg / t, alpha)).sum()
        by_pos, by_neg = torch.autograd.grad(loss, (pos, neg))
        assert (by_neg >= 0).all() and (by_pos <= 0).all()
        close(by_neg.sum(1), -by_pos[:, 0], 1e-12)

    @given(seed=SEEDS, a=st.integers(1, 4), m=st.integers(1, 3), n=st.integers(1, 6),
           constant=st.floats(-50, 50))
    def test_constant_on_every_logit(self, seed, a, m, n, constant):
        pos, neg = torch.tensor(normal(seed, a, m)), torch.tensor(masked_logits(seed, a, n, empty=a > 1))
        log_w = hardneg.tilted(neg, 1.5)
        close(hardneg.tilted(neg + constant, 1.5), log_w, 1e-10)
        close(hardneg.nce(pos + constant, neg + constant, log_w), hardneg.nce(pos, neg, log_w), 1e-10)


# ------------------------------------------------------------------------------------------------------------
# Edges
# ------------------------------------------------------------------------------------------------------------

def corners():
    """Batches at the edge of what there can be, two views in one array, by name."""
    x = normal(5, 8, 3)
    return {"two samples": x[:4], "all rows equal": np.tile(x[:1], (8, 1)),
            "opposite": np.concatenate([x[:4], -x[:4]]),
            "two points": np.stack([x[0], -x[0]] * 4), "one zero row": x * (np.arange(8) != 2)[:, None],
            "all zero": np.zeros((8, 3)), "tiny": x * 1e-30, "huge": x * 1e30, "one dimension": x[:, :1]}


def finite(*values):
    return all(bool(x.isfinite().all()) for x in values)


@pytest.mark.filterwarnings("ignore:Sinkhorn", "ignore:debiasing")
class TestEdges:
    """Small, extreme and wrong input: finite where allowed, else a ValueError that names what is off."""

    @pytest.mark.parametrize("loss", PRESETS)
    def test_rows_of_one_entry(self, loss):
        """Already unit rows once they are divided by their largest entry: the length takes no gradient all the same."""
        x = np.concatenate([np.diag([3.0, -0.5, 2.0, 1.0]), normal(6, 4, 4)])
        agree(x, 2, loss=loss)
        assert (ours(x, 2, loss=loss)[1] * torch.tensor(x)).sum(1).abs().max() < 1e-12

    @pytest.mark.parametrize("beta, t", [(1.0, 0.5), (100.0, 0.1), (1e4, 0.1), (1e6, 0.5), (1e8, 0.5), (2e-38, 1e9)])
    @pytest.mark.parametrize("crowded", [False, True])
    def test_blocks_are_as_exact_in_float32(self, beta, t, crowded):
        """Whatever the tilt: blocks have a derivation of their own, and β multiplies what it rounds."""
        x = normal(8, 64, 8)
        x = x[:1] + 0.05 * x if crowded else x
        options = dict(loss="hcl", beta=beta, temperature=t, tau_plus=0.0)
        want, wanted = ours(x, 2, block_size=0, **options)
        errors = []
        for block_size in (0, 16):
            value, gradient = ours(x, 2, dtype=torch.float32, block_size=block_size, **options)
            errors.append((float((value - want).abs() / want), float((gradient - wanted).norm() / wanted.norm())))
        assert all(new <= 4 * old + 1e-6 for old, new in zip(*errors)), errors

    def test_hardly_any_transport_with_labels(self):
        """ε so large that a = t/ε is nothing in float32: the potentials still count."""
        x, options = normal(9, 16, 4), dict(loss="ot", labels=[0, 1, 0, 2, 3, 0, 1, 4], epsilon=1e38)
        close(ours(x, 2, dtype=torch.float32, **options)[0], theirs(x, 2, **options)[0], 1e-5)

    @pytest.mark.parametrize("objective", ["simple", "triplet"])
    def test_nan_is_not_hidden(self, objective):
        neg = torch.tensor([[0.1, math.nan], [0.1, 0.2]])
        losses = hardneg.OBJECTIVES[objective](torch.tensor([[0.5], [0.0]]), neg, torch.zeros(2, 2))
        assert losses[0].isnan() and losses[1].isfinite()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_counts_are_whole_in_half_precision(self, dtype):
        logits = torch.tensor(normal(10, 2, 300)).to(dtype)
        logits[:, :3] = -INF
        assert (hardneg.top(logits, alpha=0.5) == 0).sum(1).tolist() == (hardneg.top(logits.double(), alpha=0.5) == 0
                                                                         ).sum(1).tolist()
        for weights in (hardneg.hardest, hardneg.tilted, hardneg.uniform):
            log_w = weights(torch.zeros(1, 70000, dtype=dtype))
            assert log_w.dtype == dtype and log_w.abs().max() < 0.1

    @pytest.mark.parametrize("loss", PRESETS)
    def test_torch_func(self, loss):
        """The Hessian by forward over reverse mode is that by reverse over reverse."""
        x = normal(11, 6, 2)
        f = lambda z: hardneg.contrastive_loss(*z.chunk(2), loss=loss, block_size=0, detach_weights=False)
        close(torch.func.hessian(f)(torch.tensor(x)), torch.autograd.functional.hessian(f, torch.tensor(x)), 1e-10)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("beta", [0.0, 1e-320, 1e-40])
    @pytest.mark.parametrize("block_size", [None, 0])
    def test_no_tilt(self, dtype, beta, block_size):
        """β next to 0, and below what the dtype holds: 0 · ∞ is not 0."""
        x = normal(7, 8, 3)
        for got, want in zip(ours(x, 2, dtype=dtype, loss="hcl", beta=beta, block_size=block_size),
                             theirs(x, 2, loss="debiased")):
            close(got, want, 1e-10 if dtype == torch.float64 else 1e-5)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("corner", corners())
    @pytest.mark.parametrize("block_size", [None, 0])
    def test_corners_are_finite(self, corner, loss, block_size):
        for dtype in (torch.float32, torch.float64):
            for temperature in (0.01, 0.5):
                assert finite(*ours(corners()[corner], 2, dtype=dtype, loss=loss, temperature=temperature,
                                    block_size=block_size))

    # ties: by rounding
    @pytest.mark.parametrize("loss", sorted(set(PRESETS) - {"hard", "hard-simple", "triplet"}))
    @pytest.mark.parametrize("corner",
                             sorted(set(corners()) - {"all rows equal", "two points", "one dimension"}))
    def test_corners_are_right(self, corner, loss):
        x = corners()[corner]
        want = oracle.contrastive_loss(*np.split(x, 2), loss=loss, temperature=1.0)
        close(ours(x, 2, loss=loss, temperature=1.0)[0], want, 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size", [None, 0, 3])
    def test_no_negatives_at_all(self, loss, block_size):
        x, labels = normal(6, 8, 3), torch.zeros(4)
        for k in (0, 2):
            some = torch.zeros(4 + k)
            value, gradient = ours(x[:8] if not k else normal(6, 8 + k, 3), 2, k, loss=loss, labels=some,
                                   block_size=block_size)
            assert finite(value, gradient)
            if hardneg.PRESETS[loss][1] == "nce":
                assert value == 0 and (gradient == 0).all()
        losses = hardneg.contrastive_loss(*tensors(x, 2)[0], loss=loss, labels=labels, reduction="none",
                                          block_size=0)
        assert losses.shape == (8,) and finite(losses)

    @pytest.mark.parametrize("loss", PRESETS)
    def test_one_anchor_without_negatives(self, loss):
        # K = 3 of label 1: only the first has negatives
        x, labels = normal(6, 11, 3), torch.tensor([0, 1, 1, 1, 1, 1, 1])
        value, gradient = ours(x, 2, 3, loss=loss, labels=labels, reduction="none", weight=np.ones(4))
        assert finite(value, gradient)
        want, wanted = theirs(x, 2, 3, loss=loss, labels=labels.tolist(), reduction="none", weight=np.ones(4))
        close(value, want, 1e-10)
        close(gradient, wanted, 1e-10, floor=1e-3)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_dtypes(self, dtype, loss, reduction):
        x = torch.tensor(normal(9, 10, 3)).to(dtype).double().numpy()
        weight = np.ones(8 if reduction == "mean" else 4)[:4]
        options = {"loss": loss, "reduction": reduction}
        value, gradient = ours(x, 2, 2, dtype, weight=weight if reduction == "none" else None, **options)
        assert value.dtype == torch.promote_types(dtype, torch.float32) and gradient.dtype == dtype
        want, wanted = theirs(x, 2, 2, weight=weight if reduction == "none" else None, **options)
        close(value, want, 1e-10 if dtype == torch.float64 else 1e-4)
        close(gradient, wanted, {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-4), floor=1e-2)

    @pytest.mark.parametrize("loss", PRESETS)
    def test_mixed_dtypes(self, loss):
        views, bank = tensors(normal(9, 11, 3), 2, 3)
        views = [views[0].half().requires_grad_(), views[1].bfloat16().requires_grad_()]
        bank = bank["negatives"].requires_grad_()
        value = hardneg.contrastive_loss(*views, negatives=bank, loss=loss)
        gradients = torch.autograd.grad(value, [*views, bank], allow_unused=True)
        assert value.dtype == torch.float64 and finite(value)
        assert [g.dtype for g in gradients] == [torch.float16, torch.bfloat16, torch.float64]
        assert hardneg.contrastive_loss(*views, loss=loss).dtype == torch.float32

    @pytest.mark.parametrize("loss", PRESETS)
    @settings(max_examples=6)
    @given(seed=SEEDS, t=st.floats(0.005, 10), beta=st.floats(0, 100), tau_plus=st.floats(0, 0.5),
           epsilon=st.floats(0.005, 100), alpha=st.floats(0, 1, exclude_min=True), near=st.booleans(),
           size=st.sampled_from([None, 0]))
    def test_finite_in_float32(self, loss, seed, t, beta, tau_plus, epsilon, alpha, near, size):
        x = normal(seed, 8, 3)
        x = x[:1] + 1e-4 * x if near else x
        assert finite(*ours(x, 2, dtype=torch.float32, loss=loss, temperature=t, beta=beta, tau_plus=tau_plus,
                            epsilon=epsilon, alpha=alpha, block_size=size))

    def test_the_ends_of_the_ranges_are_finite(self):
        x = normal(4, 8, 3)
        for loss in ("hcl", "ppcl"):
            for t in (0.005, 10):
                for beta in (0, 100):
                    for tau_plus in (0.0, 1e-6, 0.5, 0.99):
                        assert finite(*ours(x, 2, dtype=torch.float32, loss=loss, weights="tilted",
                                            temperature=t, beta=beta,
                                            tau_plus=tau_plus))

    @given(seed=SEEDS)
    def test_cold_and_concentrated_in_float32(self, seed):
        x = normal(seed, 10, 8)
        x[1:4], x[6:9] = x[:1] + 0.02 * x[1:4], x[5:6] + 0.02 * x[6:9]  # near-duplicate negatives
        x, options = x.astype(np.float32), {"loss": "hcl", "temperature": 0.02, "beta": 8.0}
        for got, want in zip(ours(x, 2, dtype=torch.float32, **options), ours(x, 2, **options)):
            close(got, want, 1e-3)

    @given(seed=SEEDS, loss=st.sampled_from(PRESETS))
    def test_cold_in_float16(self, seed, loss):
        x = normal(seed, 8, 4).astype(np.float16)
        got = ours(x, 2, dtype=torch.float16, loss=loss, temperature=0.05)[0]
        close(got, ours(x, 2, loss=loss, temperature=0.05)[0], 1e-3)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("block_size", [None, 0])
    def test_autocast_changes_nothing(self, loss, reduction, block_size):
        x, weight = normal(8, 10, 4).astype(np.float32), None if reduction == "mean" else np.ones(10)
        options = {"loss": loss, "reduction": reduction, "block_size": block_size}
        views = tensors(x, 2, dtype=torch.float32, grad=True)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = hardneg.contrastive_loss(*views, **options)
        gradient = torch.cat(torch.autograd.grad(value.sum(), views))  # outside, as PyTorch asks for
        for got, want in zip((value, gradient), ours(x, 2, 0, torch.float32, weight, **options)):
            close(got, want, 1e-6)

    @pytest.mark.parametrize("name, options", [
        ("loss", {"loss": "infonce"}), ("weights", {"weights": "heavy"}),
                                               ("objective", {"objective": "contrast"}),
        *[("temperature", {"temperature": t})
          for t in (0, -1.0, math.nan, INF, torch.ones(2), torch.tensor(-0.5))],
        *[("tau_plus", {"tau_plus": tau}) for tau in (-0.1, 1.0, 2, math.nan)],
        *[("beta", {"beta": beta}) for beta in (-1, INF, math.nan)],
        *[("alpha", {"alpha": alpha}) for alpha in (0, -0.1, 1.1, math.nan)],
        *[("top_k", {"top_k": top_k}) for top_k in (0, -1, 0.5, 3.0, True)],
        *[("epsilon", {"epsilon": epsilon}) for epsilon in (0, -1, INF, math.nan)],
        ("cost", {"cost": "cosine"}), ("kappa", {"kappa": math.nan}), ("kappa", {"kappa": INF}),
        *[("margin", {"margin": margin}) for margin in (-0.1, INF, math.nan)],
        ("reduction", {"reduction": "max"}), ("block_size", {"block_size": -1}),
    ])
    def test_wrong_option(self, name, options):
        x = torch.tensor(normal(1, 4, 3))
        value = next(iter(options.values()))
        for call in (lambda: hardneg.contrastive_loss(x, x, **options),
                     lambda: hardneg.ContrastiveLoss(**options),
                     lambda: hardneg.ContrastiveLoss("ot")(x, x, **options)):
            with pytest.raises(ValueError, match=rf"^{name} is ") as caught:
                call()
            assert "it must be" in str(caught.value)
            assert torch.is_tensor(value) or str(value) in str(caught.value)

    @pytest.mark.parametrize("name, views, options", [
        ("views", [(1, 3), (1, 3)], {}), ("views", [(4, 3), (5, 3)], {}), ("views", [(4, 3), (4, 2)], {}),
        ("views", [(4, 3)], {}), ("views", [], {}), ("views", [(4,), (4,)], {}),
        ("views", [(4, 3, 1), (4, 3, 1)], {}), ("views", [(0, 3), (0, 3)], {}),
        ("labels", [(4, 3), (4, 3)], {"labels": torch.zeros(3)}),
        ("labels", [(4, 3), (4, 3)], {"labels": torch.zeros(8)}),
        ("labels", [(4, 3), (4, 3)], {"labels": torch.zeros(5), "negatives": torch.ones(2, 3)}),
        ("negatives", [(4, 3), (4, 3)], {"negatives": torch.ones(2, 4)}),
        ("negatives", [(4, 3), (4, 3)], {"negatives": torch.ones(3)}),
        ("negatives", [(4, 3), (4, 3)], {"negatives": torch.ones(0, 3)}),
        ("negatives", [(4, 3), (4, 3)], {"negatives": torch.ones(2, 3, dtype=torch.long)}),
        ("labels", [(4, 3), (4, 3)], {"labels": torch.zeros(4, 2)}),
        ("labels", [(4, 3), (4, 3)], {"labels": torch.tensor(1)}),
    ])
    def test_wrong_shapes(self, name, views, options):
        with pytest.raises(ValueError, match=rf"^{name} is "):
            hardneg.contrastive_loss(*[torch.ones(shape) for shape in views], **options)

    @pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool, torch.complex64])
    def test_wrong_dtype(self, dtype):
        with pytest.raises(ValueError, match=r"^views is .*floating"):
            hardneg.contrastive_loss(torch.ones(4, 3, dtype=dtype), torch.ones(4, 3))

    @pytest.mark.parametrize("value", [math.nan, INF, -INF])
    @pytest.mark.parametrize("place, name", [(0, r"views\[0\]"), (5, r"views\[1\]"), (9, "negatives")])
    def test_not_finite(self, value, place, name):
        x = torch.tensor(normal(2, 10, 3))
        x[place, 1] = value
        with pytest.raises(ValueError, match=rf"^{name} is .* in 1 of "):
            hardneg.contrastive_loss(x[:4], x[4:8], negatives=x[8:])

    def test_bank_allows_a_batch_of_one(self):
        agree(normal(2, 5, 3), 2, 3, loss="hcl")

    def test_module(self):
        x, y = torch.tensor(normal(3, 8, 3)).chunk(2)
        with pytest.raises(TypeError, match="temprature"):
            hardneg.ContrastiveLoss("hcl", temprature=0.1)
        module = hardneg.ContrastiveLoss("hcl", beta=2.0, temperature=0.3)
        close(module(x, y),
              oracle.contrastive_loss(x.numpy(), y.numpy(), loss="hcl", beta=2.0, temperature=0.3), 1e-10)
        close(module(x, y, beta=0.5),
              oracle.contrastive_loss(x.numpy(), y.numpy(), loss="hcl", temperature=0.3, beta=0.5),
              1e-10)
        for shown in ("ContrastiveLoss('hcl'", "beta=2.0", "temperature=0.3", "tau_plus=0.1", "tilted",
                      "nce"):
            assert shown in repr(module)
        assert not list(module.parameters()) and not list(module.buffers())
        assert "alpha=0.25" in repr(hardneg.ContrastiveLoss("hard", alpha=0.25))

    def test_learned_temperature_is_a_parameter(self):
        learned = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
        module = hardneg.ContrastiveLoss("hcl", temperature=learned)
        parameter, = module.parameters()
        x, y = torch.tensor(normal(3, 8, 3)).chunk(2)
        assert parameter is learned and "learned" in repr(module) and "0.4" in repr(module)
        module(x, y).backward()
        assert parameter.grad.abs() > 0
        for t in (0.4, 0.75):
            module.load_state_dict({"temperature": torch.tensor(t, dtype=torch.float64)})
            want = oracle.contrastive_loss(x.numpy(), y.numpy(), loss="hcl", temperature=t)
            close(module(x, y), want, 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_differentiated_twice(self, loss, reduction):
        views = tensors(normal(12, 4, 3), 2, grad=True)[0]
        assert torch.autograd.gradgradcheck(
            lambda *z: hardneg.contrastive_loss(*z, loss=loss, block_size=0, reduction=reduction,
                                                detach_weights=False),
            views)  # detached weights are no function of the rows that differences could be taken of
        value = hardneg.contrastive_loss(*views, loss=loss, reduction=reduction, block_size=BLOCKS).sum()
        with pytest.raises(RuntimeError, match="block_size=0"):
            torch.autograd.grad(value, views, create_graph=True)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size", [None, 0, 3])
    def test_no_gradient_wanted(self, loss, block_size):
        views = tensors(normal(13, 8, 3), 2, grad=True)[0]
        with torch.no_grad():
            value = hardneg.contrastive_loss(*views, loss=loss, block_size=block_size)
        assert not value.requires_grad
        plain = hardneg.contrastive_loss(*[x.detach() for x in views], loss=loss, block_size=block_size)
        assert not plain.requires_grad
        close(plain, value, 1e-14)

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("wanted", [0, 1, 2])
    def test_gradient_for_one_input_alone(self, loss, wanted):
        inputs = torch.tensor(normal(14, 9, 3)).chunk(3)
        full = [x.clone().requires_grad_() for x in inputs]
        want = torch.autograd.grad(hardneg.contrastive_loss(*full[:2], negatives=full[2], loss=loss),
                                   full)[wanted]
        alone = [x.clone().requires_grad_(k == wanted) for k, x in enumerate(inputs)]
        value = hardneg.contrastive_loss(*alone[:2], negatives=alone[2], loss=loss)
        close(torch.autograd.grad(value, alone[wanted])[0], want, 1e-12)

    def test_backward_twice_with_retain_graph(self):
        views = tensors(normal(15, 8, 3), 2, grad=True)[0]
        value = 3 * hardneg.contrastive_loss(*views, loss="hcl")
        first = torch.autograd.grad(value, views, retain_graph=True)
        for got, want in zip(torch.autograd.grad(value, views), first):
            close(got, want, 0)

    @pytest.mark.filterwarnings("error")
    def test_sinkhorn_warns_once(self, fresh_warnings):
        views = tensors(normal(16, 8, 3), 2)[0]
        # more than half share a label: no coupling
        options = {"loss": "ot", "epsilon": 0.005, "labels": [0, 0, 0, 1]}
        with torch.no_grad():
            with pytest.warns(UserWarning, match="Sinkhorn.*epsilon"):
                hardneg.contrastive_loss(*views, **options)
            hardneg.contrastive_loss(*views, **options)

    @pytest.mark.filterwarnings("error")
    def test_clamping_warns_once(self, fresh_warnings):
        x = torch.tensor(normal(17, 4, 3))
        options = {"loss": "debiased", "tau_plus": 0.5, "temperature": 0.1}
        with torch.no_grad():
            # views of a sample are far apart: no floor
            hardneg.contrastive_loss(x, x[[1, 2, 3, 0]], **options)
            with pytest.warns(UserWarning, match="floor.*temperature.*tau_plus"):
                stats = hardneg.contrastive_loss(x, x, **options, return_stats=True)[1]
            hardneg.contrastive_loss(x, x, **options)
        assert stats["clamped"] > 0.5

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_memory_is_linear(self, loss, reduction):
        b, d = 16, 4
        views = tensors(normal(18, 2 * b, d), 2, grad=True)[0]
        assert max(kept_for_backward(views, loss=loss, reduction=reduction, block_size=0)) >= (2 * b)**2
        assert max(kept_for_backward(views, loss=loss, reduction=reduction, block_size=BLOCKS)) <= 2 * b * d

    @pytest.mark.parametrize("loss", ["ot", "hcl", "hard"])
    def test_no_matrix_of_all_pairs(self, loss):
        """Nor on the way, for ot neither, whose coupling is of all anchors at once."""
        views = [x.float().requires_grad_() for x in tensors(normal(18, 4200, 3), 2)[0]]
        with Largest() as largest:
            hardneg.contrastive_loss(*views, loss=loss, epsilon=1.0, block_size=BLOCKS).backward()
        assert largest.bytes <= 4200 * 4200 * 4 / 8


def kept_for_backward(views, **options):
    """Sizes of the tensors alive because of a loss: what autograd saved, and what Python came to hold."""
    class Saved:
        def __init__(self, x):
            self.x = x
    saved = []

    def pack(x):
        box = Saved(x.detach())
        saved.append(weakref.ref(box))  # the graph alone keeps the box
        return box
    before = {id(x) for x in gc.get_objects() if type(x) is torch.Tensor}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.x):
        loss = hardneg.contrastive_loss(*views, **options)
    kept = [box().x for box in saved if box() is not None]
    kept += [x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before]
    return [x.untyped_storage().nbytes() // x.element_size() for x in [loss, *kept]]


    @pytest.mark.parametrize("loss", ["simple", "triplet", "hcl"])
    def test_only_the_temperature_wants_a_gradient(self, loss):
        """As when a head is frozen; a loss on cosines does not even depend on it."""
        x, y = torch.tensor(normal(1, 2, 4, 3))
        learned = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        found = hardneg.ContrastiveLoss(loss, temperature=learned)(x, y)
        found.backward()
        assert found.isfinite() and (learned.grad != 0) == (loss == "hcl")

    @pytest.mark.parametrize("name", ["beta", "tau_plus", "alpha", "epsilon", "kappa", "margin", "temperature"])
    @pytest.mark.parametrize("value", ["0.5", torch.ones(2)])
    def test_options_are_numbers(self, name, value):
        with pytest.raises(ValueError, match=name):
            hardneg.ContrastiveLoss(**{name: value})

    def test_parametrized_temperature(self):
        """The usual way to keep a learned temperature positive."""
        x, y = torch.tensor(normal(2, 2, 4, 3))
        module = hardneg.ContrastiveLoss("simclr",
                                         temperature=nn.Parameter(torch.tensor(-0.2, dtype=torch.float64).abs()))
        nn.utils.parametrize.register_parametrization(module, "temperature", nn.Softplus())
        want = hardneg.contrastive_loss(x, y, temperature=module.temperature.item())
        close(module(x, y), want, 1e-12)
        with pytest.raises(ValueError, match="temperature"):
            hardneg.ContrastiveLoss(temperature=nn.Parameter(torch.tensor(-1.0)))

    def test_subclass_of_tensor_is_a_tensor(self):
        class Named(torch.Tensor):
            pass

        x, y = torch.tensor(normal(3, 2, 8, 3))
        named = [part.as_subclass(Named) for part in (x, y)]
        options = {"loss": "ot", "epsilon": 0.05}
        close(hardneg.contrastive_loss(*named, **options), hardneg.contrastive_loss(x, y, **options), 1e-12)
        named[0][2, 1] = math.nan
        with pytest.raises(ValueError, match="NaN"):
            hardneg.contrastive_loss(*named)

    @pytest.mark.parametrize("block_size", [None, 0])
    def test_what_was_changed_in_place_is_not_differentiated(self, block_size):
        x, y, bank = (torch.tensor(normal(k, 4, 3), requires_grad=k < 2) for k in range(3))
        loss = hardneg.contrastive_loss(x, y, negatives=bank, normalize=False, reduction="none", block_size=block_size)
        bank.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_backward_once(self, reduction):
        x, y = (torch.tensor(part, requires_grad=True) for part in normal(5, 2, 4, 3))
        loss = hardneg.contrastive_loss(x, y, normalize=False, reduction=reduction).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def test_cost_beyond_the_dtype(self):
        """Every cost as large as can be: nothing tells the candidates apart, and the plan is that of equal costs."""
        x, y = torch.tensor(normal(6, 2, 4, 3), dtype=torch.float32)
        close(hardneg.contrastive_loss(x, y, loss="ot", cost="exp", kappa=-200.0), hardneg.contrastive_loss(x, y), 1e-5)

    @pytest.mark.parametrize("views, name", [
        (([1.0], [2.0]), "views"), ((torch.ones(3, 2).numpy(),) * 2, "views"), (((torch.ones(3, 2),) * 2,), "views"),
        ((torch.ones(3, 0),) * 2, "views")])
    def test_what_is_no_embedding(self, views, name):
        with pytest.raises(ValueError, match=name):
            hardneg.contrastive_loss(*views)


# ------------------------------------------------------------------------------------------------------------
# Devices
# ------------------------------------------------------------------------------------------------------------

class Devices(TorchDispatchMode):
    """Remembers the device of every tensor with a dimension that comes into being."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        self.seen |= {x.device.type for x in tree_leaves(out) if torch.is_tensor(x) and x.ndim}
        return out


class TestDevices:
    """Everything stays on the device of the embeddings, as fake tensors tell without an accelerator."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("extra", ["", "labels", "bank", "bank labels", "none", "float16", "no_grad"])
    @pytest.mark.parametrize("block_size", [None, 0])
    def test_loss(self, loss, extra, block_size):
        with FakeTensorMode(), torch.set_grad_enabled(extra != "no_grad"):
            dtype = torch.float16 if extra == "float16" else torch.float32
            views = [torch.empty(4, 3, device="cuda", dtype=dtype) for _ in range(2)]
            options = {"loss": loss, "block_size": block_size}
            options["reduction"] = "none" if extra == "none" else "mean"
            if "labels" in extra:
                options["labels"] = torch.zeros(7 if "bank" in extra else 4, dtype=torch.long, device="cuda")
            if "bank" in extra:
                options["negatives"] = torch.empty(3, 3, device="cuda")
            with Devices() as devices:
                out, stats = hardneg.contrastive_loss(*views, **options, return_stats=True)
        assert out.device.type == "cuda" and out.dtype == torch.float32
        assert all(x.device.type == "cuda" for x in stats.values())
        assert devices.seen == {"cuda"}

    @pytest.mark.parametrize("weights", hardneg.WEIGHTS)
    def test_draw(self, weights):
        with FakeTensorMode(), Devices() as devices:
            log_w = hardneg.WEIGHTS[weights](torch.empty(4, 5, device="cuda"))
            index = hardneg.draw(log_w, 2)
        assert index.device.type == "cuda" and index.shape == (4, 2) and devices.seen == {"cuda"}

    @pytest.mark.parametrize("method", ["simclr", "clae", "diffhard"])
    def test_steps(self, method, monkeypatch):
        """With the gradients, which fake tensors of another device cannot have without it: on the device meta."""
        def descend(loss, optimizer, what):  # as _descend, without a look at the loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        monkeypatch.setattr(hardneg, "_descend", descend)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # it knows no meta
        with torch.device("meta"):
            encoder, game, images = hardneg.Encoder(size=8, dim=4), hardneg.Game(8, 2, 4), torch.empty(4, 3, 8, 8)
        criterion, optimizer = hardneg.ContrastiveLoss("ppcl"), torch.optim.SGD(encoder.parameters())
        with Devices() as devices:
            if method == "diffhard":
                loss, figures = hardneg.diffhard_step(encoder, optimizer, game, images, criterion, None,
                                                      return_stats=True)
                assert set(figures) == {"clamped", "ess", "positive", "negative", "pair", "d_loss", "g_loss",
                                        "diversity"}
            else:
                step = {"simclr": hardneg.simclr_step, "clae": hardneg.clae_step}[method]
                loss, figures = step(encoder, images, criterion, None, return_stats=True)
                descend(loss, optimizer, "")
        assert devices.seen == {"meta"} and {x.device.type for x in (loss, *figures.values())} == {"meta"}

    def test_measures(self):
        with FakeTensorMode(), Devices() as devices:
            z = torch.empty(4, 3, device="cuda")
            out = [hardneg.uniformity(z), hardneg.alignment(z, z)]
        assert {x.device.type for x in out} == {"cuda"}


# ------------------------------------------------------------------------------------------------------------
# Draws, schedules, couplings
# ------------------------------------------------------------------------------------------------------------

class TestDraw:
    """Indices come as often as their weights say, not twice where they must not, again from one state."""

    @pytest.mark.parametrize("weights", ["uniform", "tilted", "top", "transported", "hardest"])
    @settings(max_examples=4)
    @given(seed=SEEDS, replacement=st.booleans())
    def test_frequencies(self, weights, seed, replacement):
        # without −∞: a coupling has to exist
        logits = masked_logits(seed, 3, 6, share=0 if weights == "transported" else 0.3)
        log_w = hardneg.WEIGHTS[weights](torch.tensor(logits),
                                         **{} if weights == "uniform" else WEIGHT_OPTIONS[weights])
        draws, generator = 20000, torch.Generator().manual_seed(seed % 2**31)
        for row, wanted in zip(log_w, np.exp(getattr(oracle, weights)(logits, **WEIGHT_OPTIONS[weights]))):
            index = hardneg.draw(row.expand(draws, -1), 1, replacement, generator)
            expected = draws * wanted / wanted.sum()
            off = np.bincount(index.flatten().numpy(), minlength=6) - expected
            assert (off[expected == 0] == 0).all()
            assert (off[expected > 0]**2 / expected[expected > 0]).sum() < 50  # χ² of 5 degrees: 1e-9

    @given(seed=SEEDS, a=st.integers(1, 5), n=st.integers(1, 6), replacement=st.booleans())
    def test_replay_and_no_repeats(self, seed, a, n, replacement):
        logits = masked_logits(seed, a, n)
        k = 5 if replacement else int((logits > -INF).sum(1).min())
        log_w = hardneg.tilted(torch.tensor(logits), 2.0)
        generator = torch.Generator().manual_seed(3)
        state = generator.get_state()
        index = hardneg.draw(log_w, k, replacement, generator)
        assert index.shape == (a, k) and index.dtype == torch.long
        assert (log_w.gather(1, index) > -INF).all()
        assert replacement or all(len(set(row)) == k for row in index.tolist())
        after = hardneg.draw(log_w, k, replacement, generator)
        assert after.shape == index.shape
        generator.set_state(state)
        assert (hardneg.draw(log_w, k, replacement, generator) == index).all()

    def test_the_state_moves_on(self):
        log_w, generator = torch.zeros(50, 10), torch.Generator().manual_seed(0)
        first = hardneg.draw(log_w, 3, generator=generator)
        assert (first != hardneg.draw(log_w, 3, generator=generator)).any()

    @pytest.mark.parametrize("row, k, replacement", [
        ([0., -INF, 0.], 3, False), ([0., 0., 0.], 4, False), ([-INF, -INF, -INF], 1, False),
        ([-INF, -INF, -INF], 1, True), ([0., 0., 0.], 0, True)])
    def test_too_few(self, row, k, replacement):
        with pytest.raises(ValueError, match="^k is "):
            hardneg.draw(torch.tensor([[0., 0., 0.], row]), k, replacement)

    def test_unnormalised_weights_do(self):
        log_w = torch.tensor([[1000., 1000., -1000.]]).expand(500, -1)
        assert set(hardneg.draw(log_w, 1,
                                generator=torch.Generator().manual_seed(0)).flatten().tolist()) == {0, 1}


class TestSchedules:
    """β goes down in the paper's stairs, α geometrically, both from and to the ends they name."""

    @given(progress=st.floats(0, 1), beta=st.floats(0, 100), changes=st.integers(1, 20))
    def test_annealed_beta(self, progress, beta, changes):
        close(hardneg.annealed_beta(progress, beta, changes), oracle.annealed_beta(progress, beta, changes),
              1e-12)

    def test_stairs(self):
        values = [hardneg.annealed_beta((k + 0.5) / 50, 2.0) for k in range(50)]
        close(sorted(set(values), reverse=True), [2.0, 1.6, 1.2, 0.8, 0.4], 1e-12)
        assert values == sorted(values, reverse=True) and hardneg.annealed_beta(1.0, 2.0) == 0
        assert all(values.count(v) == 10 for v in values)

    @given(alpha=st.floats(0.01, 1), until=st.floats(0.05, 1), places=st.lists(st.floats(0, 1), min_size=2))
    def test_lead_in(self, alpha, until, places):
        assert hardneg.lead_in(0.0, alpha, until) == 1
        for place in (until, 1.0):
            close(hardneg.lead_in(place, alpha, until), alpha, 1e-12)
        close(hardneg.lead_in(until / 2, alpha, until), math.sqrt(alpha), 1e-12)
        values = [hardneg.lead_in(p, alpha, until) for p in sorted(places)]
        # an alpha the loss takes
        assert values == sorted(values, reverse=True) and all(0 < v <= 1 for v in values)


class TestSinkhorn:
    """The coupling has uniform marginals, no mass where it must not, and is as far off as it says."""

    @pytest.mark.parametrize("cost", ["sqeuclidean", "exp"])
    @given(seed=SEEDS, a=st.integers(1, 6), n=st.integers(1, 6), epsilon=st.floats(0.2, 5),
           share=st.sampled_from([0, 0.2]))
    def test_plan(self, cost, seed, a, n, epsilon, share):
        cosines = masked_logits(seed, a, n, share) / 2
        allowed = cosines > -INF
        assume(allowed.any(0).all() and (oracle.usable(allowed) == allowed).all())
        assume(oracle.sinkhorn(np.where(allowed, 0, -INF))[3] < 1e-6)
        price = hardneg.ground_cost(torch.tensor(cosines), cost, 2.0)  # ∞ where forbidden
        close(price[torch.tensor(allowed)], oracle.ground_cost(cosines[allowed], cost, 2.0), 1e-12)
        kernel = numpy(-price) / max(epsilon, 1.0 if cost == "exp" else 0.2)
        f, g, error = hardneg.sinkhorn(torch.tensor(kernel))
        plan = torch.exp(f[:, None] + torch.tensor(kernel) + g)
        close(plan, oracle.sinkhorn(kernel)[0], 1e-10)
        assert error <= 1e-12 and (numpy(plan)[~allowed] == 0).all()
        close(plan.sum(0), np.full(n, 1 / n), 1e-12)
        close(plan.sum(1), np.full(a, 1 / a), 1e-12)

    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
    @given(seed=SEEDS, a=st.integers(1, 6), n=st.integers(1, 6))
    def test_tolerance(self, dtype, tolerance, seed, a, n):
        kernel = torch.tensor(np.random.default_rng(seed).uniform(-5, 0, (a, n)), dtype=dtype)
        f, g, error = hardneg.sinkhorn(kernel)
        plan = torch.exp(f[:, None] + kernel + g).double()
        assert f.dtype == g.dtype == error.dtype == dtype and error <= tolerance
        close((plan.sum(1) - 1 / a).abs().sum(), error, 1e-12 if dtype == torch.float64 else 1e-6)
        close(plan.sum(0), np.full(n, 1 / n), 1e-12 if dtype == torch.float64 else 1e-6)

    @pytest.mark.filterwarnings("ignore:Sinkhorn")
    @pytest.mark.parametrize("tolerance, max_steps",
                             [(1e-1, 1000), (1e-3, 1000), (1e-6, 1000), (0.0, 1), (0.0, 2), (0.0, 5)])
    @given(seed=SEEDS, a=st.integers(2, 5), n=st.integers(2, 5))
    def test_error_is_that_of_the_plan(self, tolerance, max_steps, seed, a, n):
        kernel = torch.tensor(np.random.default_rng(seed).uniform(-8, 0, (a, n)))
        f, g, error = hardneg.sinkhorn(kernel, tolerance, max_steps)
        plan = torch.exp(f[:, None] + kernel + g)
        close(plan.sum(0), np.full(n, 1 / n), 1e-12)
        close((plan.sum(1) - 1 / a).abs().sum(), error, 1e-12)
        assert error <= tolerance or max_steps < 1000

    @pytest.mark.parametrize("size", [1, 2, 3, 7])
    def test_blocks_of_rows_are_the_matrix(self, size):
        """Also where a block, a row or a column has nothing allowed; a caller's matrix is left as it is."""
        kernel = torch.tensor(normal(2, 7, 5))
        kernel[3], kernel[4, :3], kernel[:, 1] = -INF, -INF, -INF
        given = kernel.clone()
        want = hardneg.sinkhorn(kernel)
        for got, wanted in zip(hardneg.sinkhorn(lambda: iter(kernel.split(size))), want):
            close(got, wanted, 1e-12)
        close(torch.exp(want[0][:, None] + kernel + want[1]), oracle.sinkhorn(kernel.numpy())[0], 1e-11)
        assert torch.equal(kernel, given)

    @pytest.mark.filterwarnings("ignore:Sinkhorn")
    @given(seed=SEEDS)
    def test_right_rows_are_not_enough(self, seed):
        # Rows that sum to 1/A from the start: the columns have to be made right all the same
        kernel = torch.tensor(normal(seed, 3, 4)).log_softmax(1) - math.log(3)
        f, g, _ = hardneg.sinkhorn(kernel)
        plan = torch.exp(f[:, None] + kernel + g)
        close(plan.sum(0), np.full(4, 0.25), 1e-11)
        close(plan.sum(1), np.full(3, 1 / 3), 1e-11)

    def test_rows_and_columns_with_nothing_allowed(self):
        kernel = torch.tensor(normal(1, 4, 5))
        kernel[2], kernel[:, 3] = -INF, -INF
        f, g, error = hardneg.sinkhorn(kernel)
        plan = torch.exp(f[:, None] + kernel + g)
        assert error <= 1e-12 and finite(f, g)
        close(plan, oracle.sinkhorn(kernel.numpy())[0], 1e-12)

    @pytest.mark.filterwarnings("error")
    def test_nothing_allowed(self, fresh_warnings):
        f, g, error = hardneg.sinkhorn(torch.full((3, 4), -INF, dtype=torch.float64))  # labels all equal: no warning
        assert error == 0 and finite(f, g)

    @pytest.mark.filterwarnings("error")
    def test_stops_early(self, fresh_warnings):
        kernel = torch.tensor(np.random.default_rng(0).uniform(-6, 0, (5, 5)))
        plans = []
        for tolerance in (1e-1, 1e-2, 1e-4):
            f, g, _ = hardneg.sinkhorn(kernel, tolerance, max_steps=200)  # enough: no warning
            plans.append(torch.exp(f[:, None] + kernel + g))
        errors = [float((p.sum(1) - 0.2).abs().sum()) for p in plans]
        assert errors[0] > errors[1] > errors[2] > 0  # no step more than asked for
        with pytest.warns(UserWarning, match="after 2 steps"):
            hardneg.sinkhorn(kernel, 0.0, max_steps=2)

    @given(seed=SEEDS, a=st.integers(2, 4), n=st.integers(2, 4))
    def test_gradient_runs_through_every_step(self, seed, a, n):
        x, w = np.random.default_rng(seed).uniform(-3, 0, (a, n)), normal(seed + 1, a, n)
        kernel = torch.tensor(x, requires_grad=True)
        f, g, _ = hardneg.sinkhorn(kernel)
        value = (torch.exp(f[:, None] + kernel + g) * torch.tensor(w)).sum()
        gradient, = torch.autograd.grad(value, kernel)
        # 1e-7: the derivative of the steps settles after their value does, which is when they stop
        close(gradient, oracle.gradient(lambda k: (oracle.sinkhorn(k)[0] * w).sum(), x), 1e-7)


# --------------------------------------------------------------------------------------------------
# Views, images, encoders, evaluation, training, the command line, the README
# --------------------------------------------------------------------------------------------------

PLAIN = dict(area=(1, 1), ratio=(1, 1), flip=0, jitter=0, gray=0)  # a view that changes nothing


def pictures(n=4, size=16, dtype=torch.float64, seed=0):
    return torch.rand(n, 3, size, size, generator=seeded(seed), dtype=dtype)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def luma(x):
    return 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]


class TestViews:
    """The batched views against what each transformation is, and torchvision's where it has the same."""

    def test_nothing_asked_nothing_done(self):
        x = pictures()
        torch.testing.assert_close(hardneg.view(x, **PLAIN), x, rtol=0, atol=1e-6)

    def test_flip_mirrors(self):
        x = pictures()
        torch.testing.assert_close(hardneg.view(x, **PLAIN | {"flip": 1}), x.flip(3), rtol=0, atol=1e-6)

    def test_gray_is_torchvisions(self):
        x = pictures()
        torch.testing.assert_close(hardneg.view(x, **PLAIN | {"gray": 1}), transforms.rgb_to_grayscale(x, 3),
                                   rtol=0, atol=1e-3)

    def test_blur_is_torchvisions(self):
        x = pictures(size=32)
        blurred = hardneg.view(x, **PLAIN, blur=1, sigma=(0.8, 0.8))
        torch.testing.assert_close(blurred, transforms.gaussian_blur(x, 3, 0.8), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("option, torchvisions", [
        ("brightness", transforms.adjust_brightness), ("contrast", transforms.adjust_contrast),
        ("saturation", transforms.adjust_saturation)])
    def test_colour_factors_are_torchvisions(self, option, torchvisions):
        """The factor is drawn, so it is read off the view: of all factors, one must explain every pixel."""
        x = pictures(n=3) * 0.3 + 0.2  # far from 0 and 1, so that nothing is clipped, and from a mean of a half
        strength = dict(brightness=0, contrast=0, saturation=0, hue=0) | {option: 0.4}
        seen = hardneg.view(x, seeded(1), **PLAIN | {"jitter": 1}, **strength)
        factors = []
        for one, out in zip(x, seen):
            away = torchvisions(one, 1.3) - one  # linear in the factor: f(1 + δ) = x + δ/0.3 (f(1.3) − x)
            delta = float(((out - one) * away).sum() / away.square().sum()) * 0.3
            factors.append(delta)
            torch.testing.assert_close(out, torchvisions(one, 1 + delta), rtol=0, atol=1e-3)
        assert len(set(factors)) == 3 and max(map(abs, factors)) <= 0.4 and max(map(abs, factors)) > 0.05

    def test_hue_turns_chroma_and_keeps_luma(self):
        x = pictures() * 0.3 + 0.35
        seen = hardneg.view(x, seeded(2), **PLAIN | {"jitter": 1}, brightness=0, contrast=0, saturation=0, hue=0.1)
        torch.testing.assert_close(luma(seen), luma(x), rtol=0, atol=1e-3)
        yiq = torch.tensor(hardneg.TO_YIQ, dtype=x.dtype)
        before, after = (torch.einsum("kc,bchw->bkhw", yiq, y)[:, 1:] for y in (x, seen))
        torch.testing.assert_close(before.norm(dim=1), after.norm(dim=1), rtol=1e-3, atol=1e-3)
        assert (after - before).abs().amax((1, 2, 3)).min() > 1e-3  # each image was turned

    def test_crop_is_where_and_as_large_as_asked(self):
        """On a picture of its own coordinates, a crop shows which part of it was cut out."""
        axis = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
        x = torch.stack([axis.expand(64, 64), axis[:, None].expand(64, 64), torch.zeros(64, 64)]).expand(200, 3, 64, 64)
        seen = hardneg.view(x, seeded(3), **PLAIN | {"area": (0.2, 0.5), "ratio": (3 / 4, 4 / 3)})
        width, height = ((seen[:, k].amax((1, 2)) - seen[:, k].amin((1, 2))) * 64 / 63 for k in (0, 1))
        share, ratio = width * height, width / height
        assert share.min() > 0.19 and share.max() < 0.51 and share.std() > 0.05
        assert ratio.min() > 0.74 and ratio.max() < 1.36 and ratio.std() > 0.1
        centre = seen[:, :2].mean((2, 3))
        assert centre.std(0).min() > 0.05 and centre.min() > 0.2 and centre.max() < 0.8

    def test_every_image_has_its_own_draw_and_a_generator_replays_it(self):
        x = pictures(1).expand(8, -1, -1, -1)
        seen = hardneg.view(x, seeded(4))
        assert len({tuple(v.flatten().tolist()) for v in seen}) == 8
        assert torch.equal(seen, hardneg.view(x, seeded(4)))
        assert not torch.equal(seen, hardneg.view(x, seeded(5)))

    def test_bytes_and_range(self):
        x = (pictures(8) * 255).to(torch.uint8)
        seen = hardneg.view(x, seeded(6), blur=0.5)
        assert seen.dtype == torch.float32 and seen.shape == x.shape and 0 <= seen.min() and seen.max() <= 1
        torch.testing.assert_close(hardneg.view(x, seeded(6)), hardneg.view(x / 255, seeded(6)))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        x = pictures(4)
        close(hardneg.view(x.to(dtype), **PLAIN), x, 0.01)

    def test_gradient_in_the_image(self):
        x = (pictures(2, 6) * 0.2 + 0.4).requires_grad_()
        calm = dict(brightness=0.1, contrast=0.1, saturation=0.1, hue=0.05)  # so that nothing is clipped, a kink
        assert torch.autograd.gradcheck(lambda x: hardneg.view(x, seeded(7), blur=0.5, **calm), x, atol=1e-6)

    def test_stays_on_its_device(self):
        with FakeTensorMode():
            x = torch.empty(4, 3, 32, 32, dtype=torch.uint8, device="cuda")
            assert hardneg.view(x, blur=0.5).device.type == "cuda"


@pytest.fixture(scope="module")
def few():
    """A handful of the built-in images."""
    train, labels = hardneg.shapes(240, classes=4, seed=1)
    return hardneg.Images(train, labels, *hardneg.shapes(120, classes=4, seed=2), ["a", "b", "c", "d"])


def write_images(folder, per_class=6, classes=("cat", "dog"), size=(20, 20)):
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(per_class):
            pixels = torch.full((3, *size), 40 * c + k, dtype=torch.uint8)
            transforms.to_pil_image(pixels).save(folder / name / f"{k}.png")


class TestImages:
    """The built-in set, torchvision's formats, folders in every state."""

    def test_shapes_repeat_by_seed(self):
        one, two, other = hardneg.shapes(50, seed=3), hardneg.shapes(50, seed=3), hardneg.shapes(50, seed=4)
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and not torch.equal(one[0], other[0])
        assert one[0].shape == (50, 3, 32, 32) and one[0].dtype == torch.uint8
        assert one[1].bincount().tolist() == [5] * 10
        assert hardneg.shapes(7, classes=3, size=48)[0].shape == (7, 3, 48, 48)

    @pytest.mark.parametrize("arguments, name", [((5, 1), "classes"), ((5, 11), "classes"), ((0,), "n")])
    def test_shapes_names_what_is_off(self, arguments, name):
        with pytest.raises(ValueError, match=name):
            hardneg.shapes(*arguments)

    def test_folder_with_train_and_test(self, tmp_path):
        write_images(tmp_path / "train")
        write_images(tmp_path / "test", per_class=2)
        images = hardneg.load(str(tmp_path))
        assert images.train.shape == (12, 3, 20, 20) and images.test.shape == (4, 3, 20, 20)
        assert images.classes == ["cat", "dog"] and images.train_labels.tolist() == [0] * 6 + [1] * 6
        assert images.train[7].unique().tolist() == [41]

    def test_folder_without_a_test_set_keeps_every_fifth(self, tmp_path):
        write_images(tmp_path, per_class=10)
        images = hardneg.load(str(tmp_path))
        assert len(images.train) == 16 and images.test[:, 0, 0, 0].tolist() == [4, 9, 44, 49]

    def test_folder_with_train_alone_and_hidden_folders(self, tmp_path):
        write_images(tmp_path / "train", per_class=10)
        (tmp_path / "train" / ".checkpoints").mkdir()
        images = hardneg.load(str(tmp_path))
        assert images.classes == ["cat", "dog"] and len(images.train) == 16 and len(images.test) == 4

    def test_folder_of_any_size(self, tmp_path):
        write_images(tmp_path, size=(50, 70))
        assert hardneg.load(str(tmp_path)).train.shape[2:] == (32, 32)
        assert hardneg.load(str(tmp_path), size=24).train.shape[2:] == (24, 24)

    def test_corrupt_file_is_named_and_left_out(self, tmp_path):
        write_images(tmp_path)
        (tmp_path / "cat" / "0.png").write_bytes(b"no image at all")
        with pytest.warns(UserWarning, match=r"1 of .*cat.0\.png"):
            images = hardneg.load(str(tmp_path))
        assert len(images.train) + len(images.test) == 11

    @pytest.mark.parametrize("workers", [0, 2])
    def test_streamed_folder_is_the_one_in_memory(self, tmp_path, workers):
        write_images(tmp_path, per_class=10, size=(30, 34))
        kept, files = hardneg.load(tmp_path), hardneg.load(tmp_path, workers=workers)
        for one, other, labels, others in ((kept.train, files.train, kept.train_labels, files.train_labels),
                                           (kept.test, files.test, kept.test_labels, files.test_labels)):
            assert isinstance(other, hardneg.Files) and other.shape == one.shape and len(other) == len(one)
            assert torch.equal(torch.cat(list(other.split(3))), one) and torch.equal(labels, others)
        some = torch.tensor([5, 0, 5, 11])
        halves = some.split(2)
        assert [x.tolist() for x in files.train.batches(halves)] == [kept.train[i].tolist() for i in halves]
        for index in (some, slice(2, 9, 3), kept.train_labels == 1):
            part = files.train[index]
            assert part.workers == workers and torch.equal(torch.cat(list(part.split(50))), kept.train[index])
        assert torch.equal(files.train[7], kept.train[7]) and torch.equal(files.train[-1], kept.train[-1])
        assert len(list(files.test)) == len(kept.test)
        assert files.to("meta").train.device.type == "meta"
        for encoder in (None, hardneg.Encoder(size=32)):
            wanted, found = (hardneg.evaluate(encoder, images) for images in (kept, files))
            assert wanted == pytest.approx(found, nan_ok=True)

    def test_streaming_moves_no_seed(self, tmp_path):
        write_images(tmp_path)
        files = hardneg.load(tmp_path, workers=0).train
        before = torch.random.get_rng_state()
        list(files.split(2))
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.filterwarnings("ignore:.*cannot be read")
    def test_streamed_corrupt_file_is_replaced_by_the_next(self, tmp_path, fresh_warnings):
        write_images(tmp_path / "train")
        write_images(tmp_path / "test")
        (tmp_path / "train" / "cat" / "2.png").write_bytes(b"no image at all")
        (tmp_path / "train" / "dog" / "5.png").write_bytes(b"")  # the last: the first stands in for it
        files = hardneg.load(tmp_path, workers=0)
        with pytest.warns(UserWarning, match=r"cat.2\.png cannot be read") as said:
            first, again = ([int(x[0, 0, 0]) for x in files.train.split(1) for x in x] for _ in range(2))
        assert first == again == [0, 1, 3, 3, 4, 5, 40, 41, 42, 43, 44, 0] and len(said) == 2
        for path in (tmp_path / "train").glob("*/*.png"):
            path.write_bytes(b"")
        with pytest.raises(ValueError, match="none of the files"):
            files.train[0]
        with pytest.raises(ValueError, match="size.*0.png cannot be read"):
            hardneg.load(tmp_path, workers=0)

    @pytest.mark.parametrize("data, workers", [("shapes", 2), (None, -1), (None, 1.5)])
    def test_workers_that_cannot_be(self, tmp_path, data, workers):
        write_images(tmp_path)
        with pytest.raises(ValueError, match="workers"):
            hardneg.load(data or tmp_path, workers=workers)

    def test_readout_of_a_share(self, few, monkeypatch):
        """Of more images than `evaluate` takes, an even share."""
        asked = []
        monkeypatch.setattr(hardneg, "linear_readout", lambda train, labels, *_: asked.append(labels) or 0.0)
        monkeypatch.setattr(hardneg, "READOUT", 100)
        hardneg.evaluate(None, few)
        assert asked[0].bincount().tolist() == [25] * 4

    @pytest.mark.parametrize("prepare", [
        lambda p: None,
        lambda p: (p / "cat").mkdir(),
        lambda p: write_images(p, per_class=1, classes=("cat",)),
        lambda p: (write_images(p / "train"), write_images(p / "test", classes=("cat", "cow"))),
    ])
    def test_unusable_folder_is_named(self, tmp_path, prepare):
        prepare(tmp_path)
        with pytest.raises(ValueError, match=str(tmp_path)):
            hardneg.load(str(tmp_path))

    def test_unknown_name_lists_the_known(self):
        with pytest.raises(ValueError, match="no-such-set.*cifar10"):
            hardneg.load("no-such-set")

    def test_fraction_of_each_class(self, tmp_path):
        write_images(tmp_path / "train", per_class=10)
        write_images(tmp_path / "test", per_class=2)
        images = hardneg.load(str(tmp_path), fraction=0.3)
        assert images.train_labels.bincount().tolist() == [3, 3] and len(images.test) == 4
        assert torch.equal(images.train, hardneg.load(str(tmp_path), fraction=0.3).train)
        with pytest.raises(ValueError, match="fraction"):
            hardneg.load("shapes", fraction=0)

    @pytest.mark.parametrize("name, kind, data, labels", [
        ("cifar10", "CIFAR10", np.arange(6 * 32 * 32 * 3, dtype=np.uint8).reshape(6, 32, 32, 3), [0, 1, 2, 0, 1, 2]),
        ("stl10", "STL10", np.zeros((6, 3, 96, 96), np.uint8), np.array([0, 1, -1, -1, 0, 1])),
        ("svhn", "SVHN", np.zeros((6, 3, 32, 32), np.uint8), np.array([0, 1, 2, 0, 1, 2])),
        ("fashion-mnist", "FashionMNIST", torch.zeros(6, 28, 28, dtype=torch.uint8), torch.tensor([0, 1, 2, 0, 1, 2])),
    ])
    def test_torchvisions_formats(self, monkeypatch, name, kind, data, labels):
        """Stand-ins that hold their data as torchvision's classes do."""
        attribute = "labels" if kind in ("STL10", "SVHN") else "targets"
        monkeypatch.setattr(datasets, kind,
                            lambda root, download, **which: SimpleNamespace(data=data, **{attribute: labels}))
        images = hardneg.load(name)
        assert images.train.shape[:2] == (6, 3) and images.train.dtype == torch.uint8
        assert images.train_labels.tolist() == list(labels)
        if name == "cifar10":
            assert torch.equal(images.train[1], torch.as_tensor(data[1]).permute(2, 0, 1))

    @pytest.mark.parametrize("kind, side", [("STL10", 96), ("SVHN", 32)])
    def test_another_size_is_torchvisions_bicubic(self, monkeypatch, kind, side):
        """Of the training and of the test set; its own size changes nothing."""
        data = np.random.default_rng(1).integers(0, 256, (7, 3, side, side), np.uint8)
        monkeypatch.setattr(datasets, kind, lambda root, download, split: SimpleNamespace(
            data=data[:5] if "train" in split else data[5:], labels=np.zeros(5 if "train" in split else 2)))
        images = hardneg.load(kind.lower(), size=64)
        wanted = transforms.resize(torch.tensor(data), [64, 64], transforms.InterpolationMode.BICUBIC, antialias=True)
        found = torch.cat([images.train, images.test])
        assert found.dtype == torch.uint8 and found.shape == (7, 3, 64, 64) and len(images.train) == 5
        assert (found.int() - wanted.int()).abs().max() <= 1
        for size in (None, side):
            images = hardneg.load(kind.lower(), size=size)
            assert torch.equal(torch.cat([images.train, images.test]), torch.tensor(data))

    def test_resized_by_parts_and_within_bytes(self):
        """As in one piece, and an overshoot at an edge does not wrap around."""
        x = (255 * torch.arange(2).repeat(16)).to(torch.uint8).repeat_interleave(2)[:32].expand(1001, 3, 32, 32)
        seen = hardneg._resized(x, 48)
        assert len(seen) == 1001 and (seen == seen[:1]).all()
        wanted = transforms.resize(x[:1], [48, 48], transforms.InterpolationMode.BICUBIC, antialias=True)
        assert (seen[0].int() - wanted[0].int()).abs().max() <= 1

    def test_shapes_of_another_size(self, small_shapes):
        images = hardneg.load("shapes", size=64)
        assert images.train.shape == (800, 3, 64, 64) and images.test.shape == (200, 3, 64, 64)
        assert torch.equal(images.train[:5], hardneg.shapes(8000, size=64)[0][:5])  # drawn, and not enlarged

    def test_download_that_fails_says_where_to_put_the_files(self, monkeypatch):
        def fail(*_, **__):
            raise OSError("no route to host")
        monkeypatch.setattr(datasets, "SVHN", fail)
        with pytest.raises(RuntimeError, match="svhn is not in here.*no route to host"):
            hardneg.load("svhn", root="here")


class TestEncoders:
    """Shapes, the stem for small images, errors."""

    @pytest.mark.parametrize("name, features", [("small", 256), ("resnet18", 512), ("resnet50", 2048)])
    def test_features_and_embedding(self, name, features):
        encoder = hardneg.Encoder(name, dim=16).eval()
        found, z = encoder(torch.rand(2, 3, 32, 32))
        assert found.shape == (2, features) == (2, encoder.features) and z.shape == (2, 16)

    def test_stem_by_size(self):
        assert hardneg.Encoder("resnet18", size=32).backbone.conv1.kernel_size == (3, 3)
        assert hardneg.Encoder("resnet18", size=96).backbone.conv1.kernel_size == (7, 7)

    @pytest.mark.parametrize("arguments, name", [(("large",), "encoder"), (("small", 8, 33), "size")])
    def test_names_what_is_off(self, arguments, name):
        with pytest.raises(ValueError, match=name):
            hardneg.Encoder(*arguments)


class TestMemoryBank:
    """What a bank keeps of every image, a queue of every batch, and a slow encoder of a quick one."""

    @settings(max_examples=15)
    @given(seed=SEEDS, n=st.integers(1, 8), b=st.integers(1, 6), d=st.integers(1, 4), momentum=st.floats(0, 0.99))
    def test_update(self, seed, n, b, d, momentum):
        """Batches of any size; an index that comes more than once counts with the mean of its embeddings."""
        rng = np.random.default_rng(seed)
        index, z = rng.integers(n, size=b), rng.standard_normal((b, d))
        bank = hardneg.MemoryBank(n, d, momentum, torch.Generator().manual_seed(seed % 100)).double()
        rows = numpy(bank.rows).copy()
        bank.update(torch.tensor(index), torch.tensor(z))
        close(bank.rows, oracle.bank_update(rows, index, z, momentum), 1e-6)
        assert not bank.rows.requires_grad

    def test_rows_are_unit_and_repeat_by_generator(self):
        one, two = (hardneg.MemoryBank(50, 8, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(one.rows, two.rows)
        close(one.rows.norm(dim=1), np.ones(50), 1e-6)
        one.update(torch.tensor([3]), torch.zeros(1, 8))  # an embedding that is zero changes nothing
        close(one.rows, two.rows, 1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_embeddings_of_any_dtype(self, dtype):
        bank = hardneg.MemoryBank(4, 3, 0)
        bank.update(torch.tensor([1]), torch.eye(3, dtype=dtype)[:1])
        bank.push(torch.eye(3, dtype=dtype)[2:])
        assert bank.rows[1].tolist() == [1, 0, 0] and bank.rows[0].tolist() == [0, 0, 1]

    def test_momentum_0_keeps_the_last(self):
        bank, z = hardneg.MemoryBank(4, 2, 0), torch.tensor([[0., 2.]])
        bank.update(torch.tensor([2]), z.half())
        assert bank.rows[2].tolist() == [0, 1] and bank.rows.dtype == torch.float32

    @settings(max_examples=40)
    @given(size=st.integers(1, 5), batches=st.lists(st.integers(1, 6), min_size=2, max_size=6))
    def test_queue_holds_the_last_ones(self, size, batches):
        """Batches of any size, larger than the queue too, and a state that was saved in between."""
        queue = hardneg.MemoryBank(size, 2, 0)
        angles = torch.arange(sum(batches)) / 100
        all_keys = torch.stack([angles.cos(), angles.sin()], 1)
        for keys in all_keys.split(batches):
            other = hardneg.MemoryBank(size, 2, 0)
            other.load_state_dict(queue.state_dict())
            queue = other
            queue.push(3 * keys)
        kept = {tuple(row) for row in queue.rows.mul(1000).round().int().tolist()}
        assert {tuple(row) for row in all_keys[-size:].mul(1000).round().int().tolist()} <= kept

    def test_state_survives(self, tmp_path):
        bank = hardneg.MemoryBank(5, 3)
        bank.push(torch.eye(3))
        torch.save(bank.state_dict(), tmp_path / "bank.pt")
        other = hardneg.MemoryBank(5, 3)
        other.load_state_dict(torch.load(tmp_path / "bank.pt", weights_only=True))
        assert torch.equal(other.rows, bank.rows) and other.oldest == 3

    @pytest.mark.parametrize("arguments, name",
                             [((0, 2), "size"), ((3, 2, 1.0), "momentum"), ((3, 2, -0.1), "momentum")])
    def test_names_what_is_off(self, arguments, name):
        with pytest.raises(ValueError, match=name):
            hardneg.MemoryBank(*arguments)

    @pytest.mark.parametrize("loss", PRESETS)
    def test_own_row_is_no_candidate(self, loss):
        """As if the bank had been given without it."""
        bank, z = hardneg.MemoryBank(30, 8), hardneg.unit(torch.tensor(normal(3, 1, 8)).float())
        other = torch.arange(30) != 4
        options = dict(loss=loss, normalize=False, tau_plus=0.01)
        close(hardneg.contrastive_loss(z, bank.rows[[4]], negatives=bank.rows, own=torch.tensor([4]), **options),
              hardneg.contrastive_loss(z, bank.rows[[4]], negatives=bank.rows[other], **options), 1e-6)

    @pytest.mark.parametrize("own", [[0, 1, 2], [0, 5], [-1, 0], [0.0, 1.0]])
    def test_own_names_what_is_off(self, own):
        with pytest.raises(ValueError, match="own"):
            hardneg.contrastive_loss(torch.eye(2), torch.eye(2), negatives=torch.eye(5)[:, :2] + 1, own=own)
        with pytest.raises(ValueError, match="own"):
            hardneg.contrastive_loss(torch.eye(2), torch.eye(2), own=[0, 1])

    def test_no_second_copy_of_the_bank(self):
        """The largest that a step makes is of the logits' size, A × K, and not of the bank's, K × D."""
        bank, layer = hardneg.MemoryBank(4000, 256), nn.Linear(192, 256)
        images, index = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.arange(8)
        for loss in ("hard", "hcl"):
            with Largest() as largest:
                hardneg.bank_step(lambda x: (x, layer(x.flatten(1))), images, index, bank,
                                  hardneg.ContrastiveLoss(loss, tau_plus=0.0), None, return_stats=True)[0][0].backward()
            assert largest.bytes <= 8 * 4000 * 8 < bank.rows.numel() * 4 / 10

    def test_follow(self):
        """Parameters and running statistics, by m; no gradient; the leader is left as it is."""
        leader, follower = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
        leader(torch.tensor(normal(1, 5, 2)).float())
        before = {name: x.clone() for name, x in follower.state_dict().items()}
        hardneg.follow(follower, leader, 0.9)
        for name, x in follower.state_dict().items():
            wanted = leader.state_dict()[name]
            close(x, 0.9 * before[name] + 0.1 * wanted if x.is_floating_point() else wanted, 1e-6)
        assert follower[1].num_batches_tracked == 1


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""
    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((arguments, options)) if torch.is_tensor(x)}
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


TINY_GAME = dict(width=2, latent=4, pretrain=3, every=2, batch_size=8)


def tiny_game(size=8, **settings):
    torch.manual_seed(0)
    return hardneg.Game(**TINY_GAME | {"size": size} | settings)


def quiet(game):
    """In float64 and with spectral norms that have settled and stand still: the same function at every call."""
    with torch.no_grad():
        for _ in range(30):
            game.D(game.G(game.latents(32)))
    game.G_ema.load_state_dict(game.G.state_dict())
    draw = game.latents
    game.latents = lambda *arguments: draw(*arguments).double()
    return game.double().eval()


def held(module):
    """A copy of its parameters."""
    return [p.detach().clone() for p in module.parameters()]


def same(module, before):
    return all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def play(game, encoder, real, lr=0.0, seed=3, criterion=None, **options):
    """One diffhard_step, with plain gradient descent for the encoder."""
    optimizer = torch.optim.SGD(encoder.parameters(), lr)
    return hardneg.diffhard_step(encoder, optimizer, game, real, criterion or hardneg.ContrastiveLoss("ppcl"),
                                 seeded(seed), **options)


def by_hand(game, encoder, real, seed=3):
    """The loss of the same latents and views, as Step 1 of Algorithm 1 says."""
    generator = seeded(seed)
    z = game.latents(len(real) // 2, generator)
    batch = torch.cat([game.G(z), game.G_ema(z), real])
    first, second = (hardneg.view(batch, generator) for _ in range(2))
    labels = [*range(len(z)), *range(len(z)), *range(len(z), len(z) + len(real))]
    rows = encoder(torch.cat([first, second]))[1]
    return hardneg.contrastive_loss(*rows.chunk(2), loss="ppcl", labels=torch.tensor(labels))


class Pixels(nn.Module):
    """An encoder that sees every pixel alike."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x, self.scale * x.flatten(1)


@pytest.fixture(scope="module")
def fewer():
    """Sixty of the built-in images, of 8 × 8 pixels."""
    train, labels = hardneg.shapes(60, classes=4, seed=1, size=8)
    return hardneg.Images(train, labels, *hardneg.shapes(20, classes=4, seed=2, size=8), ["a", "b", "c", "d"])


class TestGame:
    """Generators against the encoder: the loss, who is moved by which of its gradients, and the run of a game."""

    # the loss, and what D and G_ema are moved by

    @settings(max_examples=30)
    @given(seed=SEEDS, pairs=st.integers(0, 3), real=st.integers(1, 4), d=st.integers(2, 3), t=st.floats(0.2, 2),
           block_size=st.sampled_from([None, 0, 1, 3]))
    def test_ppcl_is_the_papers(self, seed, pairs, real, d, t, block_size):
        """As Eq. 8 has it, over all views and with both sets written out, in value and gradient."""
        assume(pairs + real > 1)
        labels = [*range(pairs), *range(pairs), *range(pairs, pairs + real)]
        raw, latents = [*range(len(labels))] * 2, [k if k < pairs else None for k in labels] * 2
        x = normal(seed, len(raw), d)
        value, gradient = ours(x, 2, loss="ppcl", labels=labels, temperature=t, block_size=block_size)
        close(value, oracle.ppcl_batch(x, raw, latents, t), 1e-10)
        close(gradient, oracle.gradient(lambda rows: oracle.ppcl_batch(rows, raw, latents, t), x), 1e-10, floor=1e-3)
        others, positives = oracle.ppcl_sets(raw, latents)
        assert [len(p) for p in positives] == [1 if z is None else 3 for z in latents]
        assert all(len(a) == len(raw) - 1 and set(p) <= set(a) for a, p in zip(others, positives))

    @given(seed=SEEDS, pairs=st.integers(1, 3), real=st.integers(1, 3))
    def test_each_anchor_has_three_positives_or_one(self, seed, pairs, real):
        """On orthogonal rows, a loss pulls an anchor to its positives alone, to each by a share."""
        count = 2 * pairs + real
        labels = [*range(pairs), *range(pairs), *range(pairs, pairs + real)]
        x = np.random.default_rng(seed).permutation(np.eye(2 * count))
        for i in range(2 * count):
            pulled = -numpy(ours(x, 2, loss="ppcl", labels=labels, reduction="none",
                                 weight=np.eye(2 * count)[i])[1]) @ x[i]
            pulled[i] = 0
            assert (pulled > 1e-9).sum() == (3 if i % count < 2 * pairs else 1)

    @settings(max_examples=30)
    @given(seed=SEEDS, b=st.integers(1, 5))
    def test_hinge_losses(self, seed, b):
        real, fake = 2 * normal(seed, 2, b)
        for name, scores in (("hinge_discriminator", (real, fake)), ("hinge_generator", (fake,))):
            given = [torch.tensor(s, requires_grad=True) for s in scores]
            value = getattr(hardneg, name)(*given)
            close(value, getattr(oracle, name)(*scores), 1e-12)
            for k, got in enumerate(torch.autograd.grad(value, given)):
                close(got, oracle.gradient(lambda s: getattr(oracle, name)(*scores[:k], s, *scores[k + 1:]), scores[k]),
                      1e-12)

    @pytest.mark.parametrize("real, fake, loss, slopes", [(0.99, -0.99, 0.02, (-1, 1)), (1.01, -1.01, 0.0, (0, 0)),
                                                          (-3.0, 3.0, 8.0, (-1, 1)), (5.0, 0.0, 1.0, (0, 1))])
    def test_hinge_on_both_sides_of_its_kinks(self, real, fake, loss, slopes):
        """Beyond a margin of 1 there is nothing left to learn."""
        scores = [torch.tensor([s], dtype=torch.float64, requires_grad=True) for s in (real, fake)]
        value = hardneg.hinge_discriminator(*scores)
        close(value, loss, 1e-12)
        assert tuple(float(g) for g in torch.autograd.grad(value, scores)) == slopes

    @settings(max_examples=10)
    @given(seed=SEEDS, n=st.sampled_from([2, 3, 7, 30]))
    def test_diversity(self, seed, n):
        x, real = np.random.default_rng(seed).random((2, n, 3, 4, 4))
        images, others = torch.tensor(x), torch.tensor(real)
        close(hardneg.diversity(images, others), oracle.diversity(x, real), 1e-6)
        close(hardneg.diversity(images.float(), others.float()), oracle.diversity(x, real), 1e-3)
        assert hardneg.diversity(others, others) == 1
        doubles = torch.cat([images, images])
        close(hardneg.diversity(doubles, torch.cat([others, others.flip(3)])), 0, 1e-3)
        close(hardneg.diversity(0.5 * images, images), 0.5, 1e-6)

    def test_diversity_of_larger_images(self):
        """Where distances come from a matrix product, which rounds: doubles are still next to nothing apart."""
        x = pictures(64, 32, torch.float32)
        assert hardneg.diversity(x[:1].expand(64, -1, -1, -1), x) < 0.01

    # G and D

    @pytest.mark.parametrize("size, width, latent", [(8, 2, 3), (32, 2, 1), (64, 1, 5)])
    def test_images_and_scores(self, size, width, latent):
        game = hardneg.Game(size, width, latent)
        images, scores = game.G(4 * game.latents(3)), game.D(pictures(3, size, torch.float32))
        assert images.shape == (3, 3, size, size) and images.dtype == torch.float32 and scores.shape == (3,)
        assert 0 <= images.min() and images.max() <= 1 and images.std() > 0.01
        assert game.latents(7).shape == (7, latent)

    def test_widths_double_up_to_four_times(self):
        convolutions = [m for m in hardneg.Discriminator(64, 3).modules() if isinstance(m, nn.Conv2d)]
        assert max(m.out_channels for m in convolutions) == 12 and convolutions[0].out_channels == 3
        assert hardneg.Generator(64, 3).blocks[-1].in_channels == 3

    @pytest.mark.parametrize("width", [2, 3])
    def test_nothing_of_an_image_is_cut_off(self, width):
        """The first block sees it before any ReLU; the others begin with one."""
        blocks = hardneg.Discriminator(16, width).blocks
        assert [isinstance(block.residual[0], nn.ReLU) for block in blocks[:3]] == [False, True, True]

    def test_latents_are_standard_normal_and_repeat_by_generator(self):
        z = tiny_game().latents(20000, seeded(1))
        close(z.mean(0), np.zeros(4), 0.03)
        close(z.T.cov(), np.eye(4), 0.05)
        assert torch.equal(z, tiny_game().latents(20000, seeded(1)))

    @pytest.mark.parametrize("make", [lambda: hardneg.Generator(16, 3, 5), lambda: hardneg.Discriminator(16, 3)])
    def test_every_weight_has_norm_one(self, make):
        """The largest singular value, that of a convolution's weight as a matrix, after enough forward passes."""
        torch.manual_seed(0)
        network = make()
        layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        with torch.no_grad():
            for layer in layers:
                layer.parametrizations.weight.original.mul_(3)
            for k in range(200):
                network(torch.randn(2, 5) if isinstance(network, hardneg.Generator) else pictures(2, 16, torch.float32))
        network.eval()
        assert len(layers) == (8 if isinstance(network, hardneg.Generator) else 10)
        for layer in layers:
            close(torch.linalg.svdvals(layer.weight.flatten(1))[0], 1, 0.01)

    def test_float32_under_autocast(self):
        game = tiny_game()
        with torch.autocast("cpu", torch.bfloat16):
            images = game.G(game.latents(3))
            scores = game.D(images)
        assert images.dtype == scores.dtype == torch.float32 and len(images.unique()) > 260  # more than bfloat16 has

    @pytest.mark.parametrize("make, name", [
        (lambda: hardneg.Generator(4), "size"), (lambda: hardneg.Generator(24), "size"),
        (lambda: hardneg.Generator(8, 0), "width"), (lambda: hardneg.Generator(8, 2, 0), "latent"),
        (lambda: hardneg.Discriminator(28), "size"), (lambda: hardneg.Discriminator(8, 0), "width"),
        (lambda: tiny_game(momentum=1.0), "momentum"), (lambda: tiny_game(momentum=-0.1), "momentum"),
        (lambda: tiny_game(pretrain=-1), "pretrain"), (lambda: tiny_game(every=0), "every"),
        (lambda: tiny_game(batch_size=1), "batch_size"), (lambda: tiny_game(12), "size")])
    def test_names_what_is_off(self, make, name):
        with pytest.raises(ValueError, match=f"^{name} is"):
            make()

    def test_a_copy_is_another_game(self):
        """Its optimizers move its own networks, and none of the first."""
        game = tiny_game()
        other, before = copy.deepcopy(game), held(game)
        other.imitate(pictures(8, 8, torch.float32), seeded(1))
        assert same(game, before) and not same(other.G, held(game.G)) and not same(other.D, held(game.D))
        hardneg.follow(other.G_ema, other.G, 0.5)
        assert same(game, before) and not same(other.G_ema, held(game.G_ema))

    # one step

    @pytest.mark.parametrize("n, pairs, labels", [(6, True, [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
                                                  (5, True, [0, 1, 0, 1, 2, 3, 4, 5, 6]),
                                                  (3, False, [0, 1, 2, 3, 4, 5])])
    @pytest.mark.parametrize("turn", [True, False])
    def test_what_the_criterion_is_given(self, monkeypatch, n, pairs, labels, turn):
        """Two views of G(z), of G_ema(z) and of the real images, labelled by latent, a real one by itself."""
        game, encoder, real = tiny_game(pairs=pairs), Pixels(), (255 * pictures(n, 8)).to(torch.uint8)
        game.eval()
        with torch.no_grad():
            game.G_ema.first.bias.add_(torch.linspace(-1, 1, 64))  # so that it shows which of the two an image is of
        asked, told = [], []

        def view(images, generator, **options):
            asked.append((images, generator.get_state(), options))
            return images ** len(asked)

        def criterion(*views, labels, return_stats, **options):
            told.append((views, labels.tolist(), return_stats, options))
            return views[0].square().sum(), {"negative": 1}

        monkeypatch.setattr(hardneg, "view", view)
        z = game.latents(n // 2 if pairs else n, seeded(3))
        batch = torch.cat([game.G(z), *[game.G_ema(z)] * pairs, real / 255])
        figures = play(game, encoder, real, criterion=criterion, turn=turn, return_stats=True, temperature=0.1,
                       view_options={"flip": 1})[1]
        (views, found, *rest), = told
        assert [*map(found.index, found)] == [*map(labels.index, labels)]  # the same up to names
        assert rest == [True, {"temperature": 0.1}] and figures["negative"] == 1
        close(torch.cat(views), torch.cat([batch, batch ** 2]).flatten(1), 1e-6)
        assert [a[2] for a in asked] == [{"flip": 1}] * 2 and torch.equal(asked[0][0], asked[1][0])
        assert asked[0][0].requires_grad == turn
        assert ("pair" in figures) == pairs and ("d_loss" in figures) == turn
        if pairs:
            one, other = hardneg.unit(batch.flatten(1))[:2 * len(z)].chunk(2)
            close(figures["pair"], (one * other).sum(1).mean(), 1e-6)
        assert not any(f.requires_grad for f in figures.values() if torch.is_tensor(f))

    def test_no_gradient_for_the_follower(self):
        """Not even for one that would take it."""
        game = tiny_game()
        images, index = game.requires_grad_(True).sample(7, seeded(1))
        assert images.shape == (6, 3, 8, 8) and index.tolist() == [0, 1, 2, 0, 1, 2]
        images.sum().backward()
        assert all(p.grad is None for p in game.G_ema.parameters())
        assert all(p.grad is not None for p in game.G.parameters())
        images, index = tiny_game(pairs=False).sample(7, seeded(1))
        assert images.shape == (7, 3, 8, 8) and index.tolist() == [0, 1, 2, 3, 4, 5, 6]

    def test_who_is_moved_in_a_turn(self):
        game, encoder, real = tiny_game(momentum=0.9), hardneg.Encoder(dim=8), pictures(8, 8, torch.float32)
        before, slopes = [held(n) for n in (game.G, game.G_ema, game.D, encoder)], []
        ascend = game.optimizers["ascent"].step
        game.optimizers["ascent"].step = lambda: (slopes.extend(p.grad.clone() for p in game.G.parameters()), ascend())
        play(game, encoder, real, lr=0.1)
        assert len(slopes) == len(before[0]) and max(float(g.abs().max()) for g in slopes) > 0
        assert not any(same(n, b) for n, b in zip((game.G, game.G_ema, game.D, encoder), before))
        assert all(not p.requires_grad and p.grad is None for p in game.G_ema.parameters())

    @pytest.mark.parametrize("options, turn", [({}, False), ({"ascent": False}, False), ({"pairs": False}, False),
                                               ({"ascent": False, "lr": 0.0}, True)])
    def test_who_is_not(self, options, turn):
        """Out of turn nobody but the encoder; without ascent nobody by the encoder's loss."""
        game, encoder, real = tiny_game(**options), hardneg.Encoder(dim=8), pictures(8, 8, torch.float32)
        before, first = [held(n) for n in (game.G, game.G_ema, game.D)], held(encoder)
        made, sample = [], game.sample
        game.sample = lambda *arguments: made.append(sample(*arguments)) or made[-1]
        game.optimizers["ascent"].step = lambda: pytest.fail("an ascent")
        for seed in range(2):
            play(game, encoder, real, lr=0.1, seed=seed, turn=turn)
        assert same(game.G, before[0]) and same(game.D, before[2]) and not same(encoder, first)
        assert len(made) == 2 and not any(images.requires_grad for images, _ in made)
        if turn:  # a mean of equals is one but for rounding
            assert all(torch.allclose(p, b) for p, b in zip(game.G_ema.parameters(), before[1]))
        else:
            assert same(game.G_ema, before[1]) and all(p.grad is None for p in game.parameters())

    def test_slopes_of_one_turn_are_not_added_to_the_next(self):
        one, two = tiny_game(lr=0.0, ascent_lr=0.01).eval(), tiny_game(lr=0.0, ascent_lr=0.0).eval()
        encoder, real = Pixels(), pictures(8, 8, torch.float32)
        play(two, encoder, real, seed=1)
        two.optimizers["ascent"].state.clear()
        two.optimizers["ascent"].param_groups[0]["lr"] = 0.01
        for game in (one, two):
            play(game, encoder, real, seed=2)
        assert same(one, held(two)) and not same(one, held(tiny_game()))

    def test_the_generator_does_not_reach_the_encoder_within_a_step(self):
        """Nor the encoder's step the generator: both gradients are of one forward pass."""
        real, after = pictures(8, 8, torch.float32), []
        for lr, settings in ((0.1, {}), (0.1, {"turn": False}), (0.0, {})):
            torch.manual_seed(1)
            game, encoder = tiny_game(), hardneg.Encoder(dim=8)
            play(game, encoder, real, lr=lr, **settings)
            after.append((encoder, game))
        assert same(after[0][0], held(after[1][0])) and not same(after[0][0], held(after[2][0]))
        assert same(after[0][1], held(after[2][1])) and not same(after[0][1], held(after[1][1]))

    @pytest.mark.parametrize("turn", [True, False])
    def test_the_encoder_takes_one_step(self, turn):
        """θ − η ∂L/∂θ, of the loss that is returned."""
        game, encoder, real = quiet(tiny_game()), hardneg.Encoder(dim=8).double(), pictures(8, 8)
        loss = by_hand(game, encoder, real)
        wanted = [p - 0.1 * g for p, g in
                  zip(encoder.parameters(), torch.autograd.grad(loss, list(encoder.parameters())))]
        found, _ = play(game, encoder, real, lr=0.1, turn=turn)
        close(found, loss, 1e-12)
        assert not found.requires_grad
        for p, w in zip(encoder.parameters(), wanted):
            close(p, w, 1e-10)

    def test_the_encoder_descends_what_the_generator_ascends(self):
        """To first order by η|g|² and, for Adam's first step, by η Σ g²/(|g| + 1e-8)."""
        game, encoder = quiet(tiny_game(lr=0.0, ascent_lr=1e-6, momentum=1 - 1e-12)), hardneg.Encoder(dim=8).double()
        real = pictures(8, 8)
        before = by_hand(game, encoder, real)

        def change():
            return float((by_hand(game, encoder, real) - before).detach())

        slopes = torch.autograd.grad(before, list(encoder.parameters()) + list(game.G.parameters()))
        of_encoder, of_generator = slopes[:len(list(encoder.parameters()))], slopes[len(list(encoder.parameters())):]
        start = copy.deepcopy(encoder.state_dict())
        play(game, encoder, real, lr=1e-5, turn=False)
        assert change() == pytest.approx(-1e-5 * float(sum(g.square().sum() for g in of_encoder)), rel=0.02)
        encoder.load_state_dict(start)
        play(game, encoder, real, lr=0.0)
        wanted = 1e-6 * float(sum((g.square() / (g.abs() + 1e-8)).sum() for g in of_generator))
        assert wanted > 0 and change() == pytest.approx(wanted, rel=0.02)

    def test_gradient_through_views_and_encoder_to_the_generator(self):
        """In random directions, against central differences: of G's parameters, and of the latents."""
        game, encoder, real = quiet(tiny_game()), hardneg.Encoder(dim=8).double(), pictures(6, 8)
        encoder.backbone.eval()
        rng = seeded(7)
        slopes = torch.autograd.grad(by_hand(game, encoder, real), list(game.G.parameters()))
        start, step = held(game.G), 1e-6
        for _ in range(4):
            direction = [torch.randn(p.shape, generator=rng, dtype=p.dtype) for p in start]
            values = []
            for sign in (1, -1):
                for p, s, d in zip(game.G.parameters(), start, direction):
                    p.data = s + sign * step * d
                values.append(float(by_hand(game, encoder, real).detach()))
            wanted = (values[0] - values[1]) / (2 * step)
            assert float(sum((g * d).sum() for g, d in zip(slopes, direction))) == pytest.approx(wanted, rel=1e-4)
        for p, s in zip(game.G.parameters(), start):
            p.data = s
        z = torch.randn(3, 4, generator=rng, dtype=torch.float64)

        def loss(z):
            game.latents = lambda n, generator: torch.as_tensor(z)
            return by_hand(game, encoder, real)

        slope, = torch.autograd.grad(loss(z.requires_grad_()), z)
        with torch.no_grad():
            close(slope, oracle.central_difference(lambda x: float(loss(x)), numpy(z)), 1e-5, floor=1e-2)

    def test_the_follower_follows_what_has_ascended(self):
        """Eq. 7 comes after Eq. 4 and before Eq. 5, which does not touch it any more."""
        after = {}
        for lr in (0.0, 1e-2):
            game, encoder = tiny_game(momentum=0.7, ascent_lr=0.01, lr=lr), Pixels()
            for p in game.G_ema.parameters():
                p.add_(0.1)
            before = held(game.G_ema)
            play(game, encoder, pictures(8, 8, torch.float32))
            after[lr] = game
        for old, mine, leader in zip(before, after[0.0].G_ema.parameters(), after[0.0].G.parameters()):
            close(mine, oracle.ema(numpy(old), numpy(leader), 0.7), 1e-6)
        assert same(after[0.0].G_ema, held(after[1e-2].G_ema)) and not same(after[0.0].G, held(after[1e-2].G))

    def test_imitate_moves_first_one_and_then_the_other(self):
        """A step of Adam for D on Eq. 5, fakes held fixed, and then one for G against the D that has moved."""
        game, images = quiet(tiny_game(lr=0.01)), pictures(12, 8)
        other = copy.deepcopy(game)
        figures = game.imitate(images, seeded(5))
        real, z = images[:8], torch.randn(8, 4, generator=seeded(5)).double()
        d_loss = oracle.hinge_discriminator(*(numpy(other.D(x)) for x in (real, other.G(z))))
        close(figures["d_loss"], d_loss, 1e-10)
        close(figures["diversity"], oracle.diversity(numpy(other.G(z)), numpy(real)), 1e-6)
        adam = [torch.optim.Adam(n.parameters(), 0.01, betas=(0.0, 0.999)) for n in (other.D, other.G)]
        fake = other.G(z).detach()
        ((1 - other.D(real)).clamp(min=0).mean() + (1 + other.D(fake)).clamp(min=0).mean()).backward()
        adam[0].step()
        g_loss = -other.D(other.G(z)).mean()
        close(figures["g_loss"], g_loss, 1e-10)
        g_loss.backward()
        adam[1].step()
        for p, q in zip(game.parameters(), other.parameters()):
            close(p, q, 1e-10)
        assert not any(f.requires_grad for f in figures.values())

    def test_the_discriminator_is_moved_by_imitate_alone(self, monkeypatch):
        game, encoder, real = tiny_game(), hardneg.Encoder(dim=8), pictures(8, 8, torch.float32)
        before, given = held(game.D), []
        monkeypatch.setattr(game, "imitate", lambda images, generator: given.append(images) or {"d_loss": 0})
        figures = play(game, encoder, (255 * real).to(torch.uint8))[1]
        assert same(game.D, before) and all(p.grad is None for p in game.D.parameters()) and figures["d_loss"] == 0
        close(given[0], real, 1 / 255)

    @pytest.mark.parametrize("ascent", [True, False])
    def test_pairs_grow_less_similar_as_the_game_goes_on(self, ascent):
        """For an encoder that stands still: G moves away from G_ema, in what the encoder makes of them."""
        game = quiet(tiny_game(ascent=ascent, lr=0.0, ascent_lr=0.003, momentum=1 - 1e-12))
        torch.manual_seed(1)
        encoder, z, real = hardneg.Encoder(dim=8).double(), torch.randn(32, 4).double(), pictures(16, 8)
        cosines, losses = [], []
        for step in range(16):
            if step in (0, 5, 15):
                with torch.no_grad():
                    one, other = (hardneg.unit(encoder(n(z))[1]) for n in (game.G, game.G_ema))
                cosines.append(float((one * other).sum(1).mean()))
            losses.append(float(play(game, encoder, real, seed=step % 5)[0]))  # the same views again
        if ascent:
            assert cosines[0] == pytest.approx(1) and cosines[1] < 0.95 and cosines[2] < cosines[1] - 0.1, cosines
            assert np.mean(losses[10:15]) > np.mean(losses[:5]) + 0.04, losses
        else:
            assert cosines == pytest.approx([1, 1, 1], abs=1e-9)

    @pytest.mark.parametrize("broken, what", [("encoder", "the encoder"), ("d", "the discriminator"),
                                              ("g", "the generator")])
    def test_nobody_is_moved_by_what_is_not_finite(self, monkeypatch, broken, what):
        game, encoder, real = tiny_game(), hardneg.Encoder(dim=8), pictures(8, 8, torch.float32)
        criterion = None
        if broken == "encoder":
            criterion = lambda *views, labels, return_stats: views[0].sum() * INF
        else:
            name = {"d": "hinge_discriminator", "g": "hinge_generator"}[broken]
            monkeypatch.setattr(hardneg, name, lambda *scores: scores[0].sum() * math.nan)
        before, d = [held(n) for n in (encoder, game.G)], held(game.D)
        with pytest.raises(FloatingPointError, match=f"^{what} was to be updated, but its loss is (inf|-inf|nan)"):
            if broken == "encoder":
                play(game, encoder, real, lr=0.1, criterion=criterion)
            else:
                game.imitate(real, seeded(1))
        assert same(encoder, before[0]) and same(game.G, before[1]) and same(game.D, d) == (broken != "g")

    # a run

    def test_pretraining_comes_first(self, fewer):
        """In steps of whole epochs, of which the first is cut; the encoder is not touched by them."""
        encoder, seen, training = trained(fewer, "ppcl", method="diffhard", batch_size=20, game=tiny_game(pretrain=4))
        assert [p["step"] for p in seen] == list(range(1, 11)) and {p["steps"] for p in seen} == {10}
        assert [p["epoch"] for p in seen] == [-2, -1, -1, -1, 0, 0, 0, 1, 1, 1] and {p["images"] for p in seen} == {20}
        assert ["loss" in p for p in seen] == [False] * 4 + [True] * 6 and training.done == training.steps == 10
        assert all({"d_loss", "g_loss", "diversity"} <= p.keys() for p in seen[:4])
        untouched = held(begun(fewer).encoder)
        encoder, seen, training = trained(fewer, "ppcl", method="diffhard", batch_size=20, until=4,
                                          game=tiny_game(pretrain=4, momentum=0.5))
        assert same(encoder, untouched) and training.done == 4 and training.epoch == 0
        first = tiny_game()
        assert not any(same(n, held(m)) for n, m in zip((training.game.G, training.game.G_ema, training.game.D),
                                                        (first.G, first.G_ema, first.D)))

    @pytest.mark.parametrize("pretrain, epochs", [(0, [0, 0, 0]), (1, [-1, 0, 0, 0]), (3, [-1] * 3 + [0] * 3),
                                                  (7, [-3, -2, -2, -2, -1, -1, -1, 0, 0, 0])])
    def test_pretraining_of_any_length(self, fewer, pretrain, epochs):
        _, seen, training = trained(fewer, "ppcl", method="diffhard", batch_size=20, epochs=1,
                                    game=tiny_game(pretrain=pretrain))
        assert [p["epoch"] for p in seen] == epochs and ["loss" in p for p in seen] == [e >= 0 for e in epochs]
        assert [p["step"] for p in seen] == list(range(1, pretrain + 4)) and training.pretrain == pretrain

    @pytest.mark.parametrize("until, epoch, done", [(1, -1, 1), (4, 0, 4), (7, 1, 7)])
    def test_resumes_from_anywhere(self, fewer, until, epoch, done, tmp_path):
        """From within the pre-training, its end, and the game: networks, their statistics, all optimizers."""
        settings = dict(loss="ppcl", method="diffhard", batch_size=20)
        _, seen, whole = trained(fewer, **settings, game=tiny_game(pretrain=4))
        _, _, first = trained(fewer, until=until, **settings, game=tiny_game(pretrain=4))
        assert first.epoch == epoch and first.done == done
        torch.save(first.state_dict(), tmp_path / "state.pt")
        game = tiny_game(pretrain=4)
        with torch.no_grad():
            for p in game.parameters():
                p.add_(1)
        second = begun(fewer, init=1, **settings, game=game)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        again = list(second)
        assert [p["step"] for p in again] == list(range(until + 1, 11))
        for one, two in zip(seen[until:], again):
            assert one.keys() == two.keys() and all(one[name] == two[name] for name in one)
        one, two = ([x for x in tree_leaves(t.state_dict()) if torch.is_tensor(x)] for t in (whole, second))
        assert len(one) == len(two) > 150 and all(torch.equal(x, y) for x, y in zip(one, two))

    def test_turns_of_the_generator(self, fewer, monkeypatch):
        """Every third step of the game from its first on, and in the pre-training none by the encoder's loss."""
        game, climbed = tiny_game(pretrain=2, every=3), []
        ascend = game.optimizers["ascent"].step
        monkeypatch.setattr(game.optimizers["ascent"], "step", lambda: climbed.append(1) or ascend())
        training = begun(fewer, "ppcl", method="diffhard", batch_size=12, epochs=2, game=game)
        moved, before = [], [held(n) for n in (game.G, game.G_ema, game.D)]
        for progress in training:
            moved.append([not same(n, b) for n, b in zip((game.G, game.G_ema, game.D), before)])
            before = [held(n) for n in (game.G, game.G_ema, game.D)]
            turn = progress["step"] <= 2 or (progress["step"] - 3) % 3 == 0
            assert moved[-1] == [turn] * 3 and ("d_loss" in progress) == turn
        assert len(moved) == 12 and len(climbed) == 4

    @pytest.mark.parametrize("recipe", hardneg.RECIPES)
    def test_rate_of_the_ascent_is_the_recipes(self, fewer, recipe):
        game = tiny_game(ascent_lr=0.002, lr=0.003)
        training = begun(fewer, "ppcl", method="diffhard", batch_size=20, epochs=4, lr=0.5e-3, recipe=recipe, game=game)
        rates = []
        for progress in training:
            groups = {name: o.param_groups[0] for name, o in game.optimizers.items()}
            rates.append((groups["ascent"]["lr"] / 0.002, training.optimizer.param_groups[0]["lr"] / 0.5e-3))
            assert groups["G"]["lr"] == groups["D"]["lr"] == 0.003 and groups["ascent"]["maximize"]
        close(*np.array(rates[3:]).T, 1e-12)
        assert rates[3][0] != rates[-1][0] and rates[0][0] == 1

    @pytest.mark.parametrize("pairs, ascent", [(True, True), (True, False), (False, True), (False, False)])
    def test_ablations(self, fewer, pairs, ascent):
        game = tiny_game(pairs=pairs, ascent=ascent, lr=0.0, pretrain=0)
        before = held(game.G)
        encoder, seen, training = trained(fewer, "ppcl", method="diffhard", batch_size=20, game=game)
        assert ("pair" in seen[0]) == pairs and same(game.G, before) == (not ascent) and seen[-1]["loss"].isfinite()
        assert not same(encoder, held(begun(fewer).encoder))

    @pytest.mark.parametrize("n, batch_size, images, candidates", [(60, 20, [20] * 3, (78, 78)),
                                                                   (45, 15, [15] * 3, (56, 58)),
                                                                   (11, 4, [4, 4, 3], (14, 14)),
                                                                   (5, 5, [5], (16, 18))])
    @pytest.mark.parametrize("pairs", [True, False])
    def test_batches_of_any_size(self, fewer, monkeypatch, n, batch_size, images, candidates, pairs):
        """An odd batch loses a generated image; candidates are those of a real anchor, as the loss sees them."""
        found, forward = [], hardneg.ContrastiveLoss.forward

        def spied(self, *views, labels, **options):
            found.append(2 * int((labels != labels[-1]).sum()))
            return forward(self, *views, labels=labels, **options)

        monkeypatch.setattr(hardneg.ContrastiveLoss, "forward", spied)
        some = fewer._replace(train=fewer.train[:n], train_labels=fewer.train_labels[:n])
        _, seen, training = trained(some, "ppcl", method="diffhard", epochs=1, batch_size=batch_size,
                                    game=tiny_game(pretrain=1, pairs=pairs, every=1))
        assert [p["images"] for p in seen] == images[-1:] + images and all(p["loss"].isfinite() for p in seen[1:])
        assert training.candidates == candidates[not pairs] == found[0]

    def test_warns_of_a_collapse_and_of_a_sure_discriminator(self, fewer, monkeypatch, fresh_warnings):
        """Once, with the step, and not before the encoder begins."""
        game = tiny_game(pretrain=4)
        make = game.G.forward
        monkeypatch.setattr(game.G, "forward", lambda z: 0.5 + 0 * make(z))
        monkeypatch.setattr(hardneg, "hinge_discriminator", lambda real, fake: 0 * (real.sum() + fake.sum()))
        run = iter(begun(fewer, "ppcl", method="diffhard", batch_size=20, game=game))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                figures = next(run)
        assert figures["diversity"] < 0.01 and figures["d_loss"] == 0
        with pytest.warns(UserWarning) as said:
            assert len(list(run)) == 6
        texts = [str(w.message) for w in said if "step" in str(w.message)]
        assert len(texts) == 2 and all(t.startswith("step 5 of 10: ") for t in texts)
        assert "collapsed" in texts[0] and "0% as far" in texts[0] and "discriminator's loss is 0.000" in texts[1]

    def test_warns_of_nothing_else(self, fewer, fresh_warnings):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _, seen, _ = trained(fewer, "ppcl", method="diffhard", batch_size=20)
        assert min(p["diversity"] for p in seen if "diversity" in p) > 0.1

    @pytest.mark.parametrize("pretrain, network, message", [
        (4, "D", r"^step 1 of 10: the discriminator was to be updated, but its loss is nan"),
        (4, "G", r"^step 1 of 10: the discriminator was to be updated, but its loss is nan"),
        (0, "D", r"^step 1 of 6: the discriminator was to be updated, but its loss is nan"),
        (0, "G", r"^step 1 of 6: the encoder was to be updated, but .*NaN.* or a rate of the game"),
        (4, "encoder", r"^step 5 of 10: the encoder was to be updated, but .*NaN")])
    def test_breaks_with_its_step(self, fewer, pretrain, network, message):
        training = begun(fewer, "ppcl", method="diffhard", batch_size=20, game=tiny_game(pretrain=pretrain))
        part = training.encoder if network == "encoder" else getattr(training.game, network)
        with torch.no_grad():
            next(part.parameters()).fill_(math.nan)
        with pytest.raises(FloatingPointError, match=message):
            list(training)

    def test_a_loss_that_is_not_finite_is_not_descended(self, fewer, monkeypatch):
        """Of the other methods too."""
        training = begun(fewer, batch_size=20)
        before = held(training.encoder)
        monkeypatch.setattr(hardneg, "contrastive_loss", lambda *views, **_: (views[0].sum() * INF, {}))
        with pytest.raises(FloatingPointError, match=r"^step 1 of 6: the encoder was to be updated, but its loss is"):
            next(iter(training))
        assert same(training.encoder, before)

    @pytest.mark.parametrize("method", ["clae", "diffhard"])
    def test_in_bfloat16(self, fewer, method):
        """Autocast is for the way there: parameters, scores, figures and losses stay in float32."""
        encoder, seen, training = trained(fewer, "ppcl", method=method, batch_size=20, epochs=1, bfloat16=True)
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in encoder.parameters())
        figures = [f for p in seen for f in p.values() if torch.is_tensor(f)]
        assert len(figures) >= 15 and all(f.dtype == torch.float32 and f.isfinite() and f.ndim == 0 for f in figures)

    @pytest.mark.parametrize("settings, message", [
        (dict(game=hardneg.Game(16, 1, 2)), "^game is for images of 16 pixels; it must be for images of 8"),
        (dict(options={"objective": "nce"}), "^criterion is of objective nce; it must be of objective ppcl")])
    def test_training_names_what_is_off(self, fewer, settings, message):
        with pytest.raises(ValueError, match=message):
            begun(fewer, "ppcl", method="diffhard", **settings)

    def test_images_of_another_size_are_named(self):
        game, encoder = tiny_game(), Pixels()
        for use in (lambda: game.imitate(pictures(4, 16)), lambda: play(game, encoder, pictures(4, 16))):
            with pytest.raises(ValueError, match=r"^images is of shape \(4, 3, 16, 16\); it must be \(B, 3, 8, 8\)"):
                use()

    def test_without_pairs_any_objective_will_do(self, fewer):
        _, seen, _ = trained(fewer, options={"objective": "simple"}, method="diffhard", game=tiny_game(pairs=False),
                             epochs=1)
        assert seen[-1]["loss"].isfinite()

    def test_the_followers_weights_have_norm_one_too(self, fewer):
        """Also while it is not used: power iterations of G's weights, averaged, would not be of the average."""
        game = tiny_game(width=4, pretrain=60, momentum=0.99, lr=0.01)
        trained(fewer, method="diffhard", game=game, until=60)
        game.eval()
        layers = [m for m in game.G_ema.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        norms = [float(torch.linalg.svdvals(layer.weight.detach().flatten(1))[0]) for layer in layers]
        assert len(norms) == 5 and all(0.99 < norm < 1.02 for norm in norms), norms

    @pytest.mark.parametrize("pretrain", [0, 3])
    def test_a_game_that_was_looked_at_goes_on(self, fewer, pretrain):
        """G in eval mode would stand still in part."""
        one, other = tiny_game(pretrain=pretrain), tiny_game(pretrain=pretrain).eval()
        for game in (one, other):
            trained(fewer, method="diffhard", game=game)
        assert other.G.training and other.D.training and same(other, held(one))

    def test_a_step_under_autocast_is_seen_at_once(self):
        """Autocast keeps parameters in bfloat16 as they were when they were first used."""
        layer, x = nn.Linear(2, 1), torch.ones(1, 2)
        optimizer = torch.optim.SGD(layer.parameters(), 10.0)
        with torch.autocast("cpu", torch.bfloat16):
            before = layer(x)
            hardneg._descend(before.float().sum(), optimizer, "it")
            assert float((before - layer(x)).detach()) == pytest.approx(30, rel=0.02)  # 2 weights, a bias: −10 each

    def test_a_game_of_the_images_size_is_made(self, fewer):
        training = hardneg.Training(hardneg.Encoder(dim=16), fewer, hardneg.ContrastiveLoss("ppcl"), "diffhard")
        assert training.game.size == 8 and training.game.G(training.game.latents(2)).shape == (2, 3, 8, 8)
        assert begun(fewer, game=tiny_game()).game is None  # of no other method


class TestEvaluation:
    """Readouts against loops and another solver; nothing evaluated is changed by it."""

    def test_embedding_leaves_the_encoder_as_it_was(self, few):
        encoder = hardneg.Encoder()
        encoder.head.eval()
        before = {name: x.clone() for name, x in encoder.state_dict().items()}
        features, z = hardneg.embed(encoder, few.train[:50], batch_size=20)
        assert features.shape == (50, 256) and not features.requires_grad
        torch.testing.assert_close(z.norm(dim=1), torch.ones(50))
        assert all(torch.equal(x, before[name]) for name, x in encoder.state_dict().items())
        assert encoder.training and encoder.backbone.training and not encoder.head.training
        torch.testing.assert_close(features, hardneg.embed(encoder, few.train[:50], batch_size=50)[0])

    def test_knn_against_a_loop(self):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(30, 4)), rng.normal(size=(20, 4))
        x_labels, y_labels = rng.integers(3, size=30), rng.integers(3, size=20)
        right = 0
        for i in range(20):
            cosines = [y[i] @ x[j] / np.linalg.norm(y[i]) / np.linalg.norm(x[j]) for j in range(30)]
            votes = np.zeros(3)
            for j in sorted(range(30), key=lambda j: -cosines[j])[:7]:
                votes[x_labels[j]] += np.exp(cosines[j] / 0.5)
            right += votes.argmax() == y_labels[i]
        found = hardneg.knn_accuracy(*map(torch.as_tensor, (x, x_labels, y, y_labels)), k=7)
        assert found == pytest.approx(100 * right / 20)

    def test_readout_against_scipy(self):
        """The class shows in the small difference of two features, so that it takes large weights, which the penalty
        is about."""
        rng = np.random.default_rng(1)
        labels = rng.integers(3, size=1200)
        x = rng.normal(size=(1200, 40))
        x[:, 1] = x[:, 0] + 0.1 * x[:, 1] + 0.2 * (labels - 1)
        train, test = slice(0, 200), slice(200, 1200)
        scaled = (x - x[train].mean(0)) / x[train].std(0, ddof=1)

        def objective(flat):
            w, bias = flat[:120].reshape(3, 40), flat[120:]
            scores = scaled[train] @ w.T + bias
            fit = np.mean(logsumexp(scores, axis=1) - scores[np.arange(200), labels[train]])
            return fit + 1e-3 / 2 * (w ** 2).sum()

        best = minimize(objective, np.zeros(123), tol=1e-9).x
        expected = 100 * np.mean((scaled[test] @ best[:120].reshape(3, 40).T + best[120:]).argmax(1) == labels[test])
        sets = [torch.as_tensor(s) for s in (x[train], labels[train], x[test], labels[test])]
        found = hardneg.linear_readout(*sets)
        assert found == pytest.approx(expected, abs=0.31)  # a few of the thousand are on the border
        assert found == hardneg.linear_readout(*sets)
        moved = hardneg.linear_readout(sets[0] * 1e3 + 5, sets[1], sets[2] * 1e3 + 5, sets[3])
        assert moved == pytest.approx(found, abs=0.31)

    @pytest.mark.parametrize("constant", [0.0, 0.1, 3.7])
    def test_readout_ignores_what_was_constant(self, constant):
        """A feature that never moved in training must not speak in the test, where it does."""
        x, labels = torch.tensor(normal(3, 200, 4), dtype=torch.float32), torch.arange(200) % 2
        x[:, 0] += 4 * labels
        dull = torch.full((200, 1), constant)
        dull[100:] += torch.tensor(normal(4, 100, 1), dtype=torch.float32)
        clean, more = ((f[:100].requires_grad_(), labels[:100], f[100:], labels[100:])
                       for f in (x, torch.cat([x, dull], 1)))
        assert hardneg.linear_readout(*clean) == hardneg.linear_readout(*more) > 90

    @settings(max_examples=10)
    @given(seed=SEEDS, n=st.integers(3, 12), d=st.integers(2, 4), k=st.integers(1, 2))
    def test_neighbours_and_pairs(self, seed, n, d, k):
        x, labels = normal(seed, 2 * n, d), np.random.default_rng(seed).integers(2, size=n)
        z, positives = np.split(oracle.unit(x), 2)
        raw, others, tags = torch.tensor(3 * x[:n]), torch.tensor(x[n:]), torch.tensor(labels)
        for count in (None, k):
            got, wanted = hardneg.neighbours(raw, count), oracle.neighbours(z, count)
            close(got[0], wanted[0], 1e-12)
            assert (numpy(got[1]) == wanted[1]).all()
        for got, wanted in zip(hardneg.local_separation(raw, others, k), oracle.local_separation(z, positives, k)):
            close(got, wanted, 1e-12)
        close(hardneg.same_class_by_rank(raw, tags), oracle.same_class_by_rank(z, labels), 0)
        assume(0 < (labels[:, None] == labels)[np.triu_indices(n, 1)].sum() < n * (n - 1) / 2)
        edges, *densities = hardneg.cosine_histograms(raw, tags, 10)
        wanted_edges, *wanted = oracle.cosine_histograms(z, labels, 10)
        close(edges, wanted_edges, 1e-6)
        close(torch.stack(densities), np.array(wanted), 1e-6)

    def test_duplicates_are_neighbours_and_oneself_is_not(self):
        cosines, indices = hardneg.neighbours(torch.tensor([[1., 0.], [2., 0.], [0., 1.]]))
        assert torch.equal(cosines, torch.tensor([[1., 0.], [1., 0.], [0., 0.]]))
        assert indices[:2, 0].tolist() == [1, 0]

    @pytest.mark.parametrize("loss", PRESETS)
    def test_weights_by_rank(self, loss):
        x, options = normal(7, 9, 3), dict(temperature=0.4, beta=2.0, alpha=0.3, epsilon=0.5)
        cosines, weights = hardneg.weights_by_rank(torch.tensor(x), loss, **options)
        wanted, order = oracle.neighbours(oracle.unit(x))
        close(cosines, wanted, 1e-12)
        logits = np.where(np.eye(9) > 0, -INF, oracle.unit(x) @ oracle.unit(x).T / 0.4)
        rule = getattr(oracle, oracle.PRESETS[loss][0])
        takes = rule.__code__.co_varnames[:rule.__code__.co_argcount]
        log_w = rule(logits, **{name: value for name, value in options.items() if name in takes})
        close(weights, np.exp(np.take_along_axis(log_w, order, 1)), 1e-10)

    @pytest.mark.parametrize("alpha", [None, 0.3])
    @settings(max_examples=5)
    @given(seed=SEEDS, a=st.integers(1, 3), n=st.integers(2, 8), t=st.floats(0.1, 2))
    def test_gradient_ratio(self, alpha, seed, a, n, t):
        cosines = np.random.default_rng(seed).uniform(-1, 1, (a, n + 1))
        loss, options = ("simclr", {}) if alpha is None else ("hard", {"alpha": alpha})
        got = hardneg.gradient_ratio(torch.tensor(cosines[:, 1:]), torch.tensor(cosines[:, 0]), loss, temperature=t,
                                     **options)
        close(got, oracle.hard_gradient_ratio(cosines[:, 1:], t, alpha or 1), 1e-10)

    def test_gradient_ratio_of_the_others(self):
        cosines, positive = torch.linspace(-1, 1, 20).double()[None], torch.tensor([0.5]).double()
        ratio = lambda loss, **options: hardneg.gradient_ratio(cosines, positive, loss, **options)[0]
        close(ratio("simple"), np.full(20, 1 / 20), 1e-12)                           # hardness means nothing to it
        close(ratio("triplet"), np.eye(20)[19], 1e-12)                               # and everything to this one
        assert ratio("hcl", tau_plus=0.0, beta=2.0)[-1] > ratio("simclr")[-1]
        close(ratio("hcl", tau_plus=0.0, detach_weights=True).sum(), 1.0, 1e-12)
        assert ratio("hcl", tau_plus=0.0)[0] < 0 < ratio("hcl", tau_plus=0.0)[-1]    # the far ones are pulled
        for loss in PRESETS:
            close(ratio(loss).sum(), 1.0, 1e-12)
        close(ratio("ot"), ratio("simclr"), 1e-12)                                   # all must be coupled with it
        batch = torch.stack([cosines[0].roll(k) for k in range(20)])                 # here nobody is near to everybody
        among = hardneg.gradient_ratio(batch, positive.expand(20), "ot", temperature=0.5, epsilon=0.4)[0]
        close(among, torch.softmax(cosines[0] * (1 / 0.5 + 1 / 0.4), 0), 1e-10)

    def test_figures_of_half_precision(self):
        z, labels = torch.tensor(normal(5, 3000, 4)), torch.arange(3000) % 3
        for figure, rest in ((hardneg.tolerance, (labels.int(),)), (hardneg.uniformity, ())):
            close(figure((z + 1).half(), *rest), figure(z + 1, *rest), 1e-3)

    def test_unlabelled_images_are_left_out(self, few):
        hidden = few.train_labels.clone()
        hidden[:40] = -1
        found = hardneg.evaluate(None, few._replace(train_labels=hidden))
        expected = hardneg.evaluate(None, few._replace(train=few.train[40:], train_labels=few.train_labels[40:]))
        assert found == expected


def begun(images, loss="simclr", options=None, init=0, **settings):
    """A training before its first step; of a game, a small one."""
    torch.manual_seed(init)
    settings = dict(epochs=2, batch_size=80, lr=3e-3, bfloat16=False) | settings
    options = options or {}
    if settings.get("method") == "diffhard":
        options = dict(objective="ppcl") | options
        if "game" not in settings:
            settings["game"] = tiny_game(images.train.shape[-1])
    return hardneg.Training(hardneg.Encoder(dim=16), images, hardneg.ContrastiveLoss(loss, **options), **settings)


def trained(images, loss="simclr", options=None, until=None, **settings):
    """An encoder after some steps, the last progress, the training."""
    training, seen = begun(images, loss, options, **settings), []
    for progress in training:
        seen.append(progress)
        if progress["step"] == until:
            break
    return training.encoder, seen, training


def same_weights(one, other):
    return all(torch.equal(x, y) for x, y in zip(one.state_dict().values(), other.state_dict().values()))


class TestTraining:
    """A run that must learn, that repeats, that can be continued, that says when it breaks."""

    def test_learns(self, few):
        _, seen, _ = trained(few, epochs=10)
        assert seen[0]["loss"] < math.log(159) and seen[-1]["loss"] < seen[0]["loss"] - 0.5  # chance is log(159) = 5.07
        assert seen[-1]["positive"] > seen[-1]["negative"] + 0.6

    @pytest.mark.parametrize("method", hardneg.METHODS)
    @pytest.mark.parametrize("loss", hardneg.PRESETS)
    def test_every_loss_takes_a_step(self, few, loss, method):
        until = 2 + TINY_GAME["pretrain"] * (method == "diffhard")
        encoder, seen, _ = trained(few, loss, until=until, method=method, batch_size=40)
        assert seen[-1]["loss"].isfinite() and all(p.isfinite().all() for p in encoder.parameters())

    @pytest.mark.parametrize("options", [dict(method="simclr", true_positives=True), dict(method="bank"),
                                         dict(method="queue", queue_size=8), dict(method="diffhard")])
    def test_from_files_as_from_memory(self, tmp_path, options):
        """To the same weights, to the bit, with processes that read ahead and without."""
        write_images(tmp_path, per_class=10)
        ends = [trained(hardneg.load(tmp_path, size=32, workers=workers), epochs=2, batch_size=6, **options)[0]
                for workers in (None, 0, 2)]
        assert same_weights(*ends[:2]) and same_weights(*ends[1:])

    def test_repeats_by_seed(self, few):
        one, two, other = (trained(few, seed=seed)[0] for seed in (5, 5, 6))
        assert same_weights(one, two) and not same_weights(one, other)

    @pytest.mark.parametrize("method", hardneg.METHODS)
    @pytest.mark.parametrize("recipe", hardneg.RECIPES)
    def test_resumes_to_the_same_end(self, few, method, recipe, tmp_path):
        settings = dict(epochs=2, method=method, recipe=recipe, queue_size=100)
        whole, _, _ = trained(few, **settings)
        _, _, first = trained(few, until=3, **settings)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = begun(few, init=1, **settings)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        steps = [progress["step"] for progress in second]
        assert steps == [4, 5, 6, 7, 8, 9][:second.steps - 3] and same_weights(whole, second.encoder)

    def test_every_image_once_an_epoch_in_batches_of_one_size(self, few):
        _, seen, _ = trained(few, epochs=1, batch_size=70)
        assert [p["images"] for p in seen] == [60] * 4
        _, seen, _ = trained(few._replace(train=few.train[:5], train_labels=few.train_labels[:5]), epochs=1,
                             batch_size=2)
        assert [p["images"] for p in seen] == [3, 2]  # never a batch of one, which has no negatives

    def test_schedules_reach_the_loss(self, few):
        _, seen, _ = trained(few, "hard", epochs=2, schedules={"alpha": lambda p: hardneg.lead_in(p, 0.1)})
        assert [round(p["alpha"], 3) for p in seen] == [1.0, 0.464, 0.215, 0.1, 0.1, 0.1]
        shares = [float(p["ess"]) for p in seen]  # the share kept is the effective number of equal weights
        assert shares == pytest.approx([p["alpha"] for p in seen], abs=0.01)

    def test_bank_holds_what_the_encoder_said(self, few, monkeypatch):
        """After an epoch with momentum 0 and views that change nothing, row i is the embedding of image i as it was."""
        monkeypatch.setattr(hardneg, "view", lambda images, *_, **__: images / 255)
        said, positives = {}, []

        def bank_step(encoder, images, index, bank, *others, **options):
            rows = bank.rows[index]
            out = step(encoder, images, index, bank, *others, **options)
            said.update(zip(index.tolist(), out[1]))
            positives.append((rows * out[1]).sum(1).mean())
            return out

        step = hardneg.bank_step
        monkeypatch.setattr(hardneg, "bank_step", bank_step)
        _, seen, training = trained(few, method="bank", momentum=0.0, epochs=2)
        close(training.bank.rows, torch.stack([said[i] for i in range(240)]), 1e-6)
        close(torch.stack([p["positive"] for p in seen]), torch.stack(positives), 1e-5)  # the rows before their update

    def test_bank_learns(self, few):
        _, seen, training = trained(few, method="bank", epochs=12)
        assert training.candidates == 239
        assert seen[-3]["positive"] > seen[-3]["negative"] + 0.3

    def test_queue_learns_and_its_slow_encoder_follows(self, few):
        encoder, seen, training = trained(few, method="queue", queue_size=130, momentum=0.5, epochs=10)
        assert training.candidates == 130 and training.bank.oldest == 10 * 240 % 130
        assert seen[0]["positive"] < seen[0]["negative"] + 0.02 and seen[-3]["positive"] > seen[-3]["negative"] + 0.1
        last, slow = (torch.cat([p.flatten() for p in e.parameters()]) for e in (encoder, training.key_encoder))
        first = torch.cat([p.flatten() for p in trained(few, until=1)[0].parameters()])
        assert 0 < (last - slow).norm() < 0.2 * (last - first).norm()
        assert all(p.grad is None for p in training.key_encoder.parameters())

    def test_rates_of_the_recipes(self, few):
        """adamw climbs for a tenth and falls by a cosine; sgd has a tenth of its rate from 80 % on, a hundredth from
        95 %."""
        rates = {}
        for name in hardneg.RECIPES:
            training = hardneg.Training(hardneg.Encoder(dim=16), few, hardneg.ContrastiveLoss(), recipe=name,
                                        epochs=100, batch_size=240, lr=1.0)
            training._step = lambda step, *_, t=training: {"rate": t.recipe["rate"](step / t.steps, 1 / t.steps)}
            rates[name] = np.array([seen["rate"] for seen in training])
        assert (np.unique(rates["sgd"].round(6)) == [0.01, 0.1, 1]).all()
        assert [(rates["sgd"] == rate).sum() for rate in (1, 0.1)] == [80, 15]
        assert rates["adamw"].argmax() == 9 and rates["adamw"][0] == pytest.approx(0.1, rel=0.01)
        close(rates["adamw"][10:], (1 + np.cos(np.pi * np.arange(10, 100) / 100)) / 2, 1e-12)

    def test_recipe_sets_what_is_not_given(self, few):
        training = hardneg.Training(hardneg.Encoder(dim=16), few, hardneg.ContrastiveLoss(), recipe="sgd", lr=0.5)
        group = training.optimizer.param_groups[0]
        assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.9, 5e-4)
        assert (training.epochs, training.batch_size) == (200, 128)

    def test_true_positives_are_others_of_the_class(self, few):
        partners = trained(few, until=1, true_positives=True)[2]._partners()
        assert torch.equal(few.train_labels[partners], few.train_labels)
        assert (partners != torch.arange(240)).all() and len(partners.unique()) == 240

    def test_true_positives_are_what_the_loss_sees(self, few, monkeypatch):
        """With views that change nothing, the positive is an image of the class and not the anchor's own."""
        monkeypatch.setattr(hardneg, "view", lambda images, *_, **__: images / 255)
        own = trained(few, until=1)[1][0]["positive"]
        others = trained(few, until=1, true_positives=True)[1][0]["positive"]
        assert own > 0.9999 and others < 0.9999

    def test_breaks_with_its_step(self, few):
        encoder, _, training = trained(few, until=1)
        next(encoder.parameters()).data.fill_(float("nan"))
        with pytest.raises(FloatingPointError, match=r"step 1 of 6.*NaN.*lr"):
            next(iter(training))

    @pytest.mark.parametrize("bound", [1e-3, 0.1])
    def test_clae_moves_the_second_view_against_the_encoder(self, bound):
        """By ± bound along the sign of the loss's slope, which is taken by central differences, and within [0, 1]."""
        torch.manual_seed(0)
        layer, images = nn.Linear(48, 3).double(), pictures(3, 4).clamp(0.05, 0.95).round(decimals=1)
        seen, sloped, criterion = [], [], hardneg.ContrastiveLoss(temperature=0.2)

        def encoder(x):
            seen.append(x.detach().clone())
            sloped.append(x.requires_grad)
            return x, torch.tanh(layer(x.flatten(1)))

        loss, stats = hardneg.clae_step(encoder, images, criterion, seeded(4), bound, {"jitter": 0.5},
                                        return_stats=True, temperature=0.7)
        assert all(p.grad is None for p in layer.parameters()) and sloped == [True, False]
        (first, second), harder = seen[0].chunk(2), seen[1]
        generator = seeded(4)
        views = [hardneg.view(images, generator, jitter=0.5) for _ in range(2)]
        assert torch.equal(first, views[0]) and torch.equal(second, views[1])

        def said(x, y):
            z = torch.tanh(layer(torch.cat([x, torch.as_tensor(y)]).flatten(1)))
            return hardneg.contrastive_loss(*z.chunk(2), temperature=0.7)

        with torch.no_grad():
            slope = oracle.central_difference(lambda y: float(said(first, y)), numpy(second))
            close(harder, oracle.perturbed(numpy(second), np.where(np.abs(slope) > 1e-8, slope, 0), bound), 1e-12)
            clean, hard = said(first, second), said(first, harder)
        assert 0 <= harder.min() and harder.max() <= 1 and np.abs(slope).min() > 1e-8
        assert ((harder - second).abs() < bound - 1e-9).any()  # something was clipped
        close(loss, (clean + hard) / 2, 1e-12)
        want = torch.autograd.grad((said(first, second) + said(first, harder)) / 2, list(layer.parameters()))
        for got, wanted in zip(torch.autograd.grad(loss, list(layer.parameters())), want):
            close(got, wanted, 1e-10)
        close(stats["positive"], hardneg.contrastive_loss(
            *torch.tanh(layer(torch.cat(views).flatten(1))).chunk(2), return_stats=True)[1]["positive"], 1e-12)
        if bound < 0.01:  # to first order every pixel adds its slope
            assert float(hard - clean) == pytest.approx(float(((harder - second).numpy() * slope).sum()), rel=0.02)
        assert hard > clean

    def test_clae_is_at_a_standstill_where_the_loss_is_flat(self):
        """The sign of 0 is 0: an encoder that is blind to some pixels has them left alone."""
        seen = []

        def encoder(x):
            seen.append(x.detach())
            return x, x[:, 0].flatten(1)

        loss = hardneg.clae_step(encoder, pictures(3, 4), hardneg.ContrastiveLoss(), seeded(4), 0.02)
        second, harder = seen[0].chunk(2)[1], seen[1]
        assert torch.equal(second[:, 1:], harder[:, 1:]) and not torch.equal(second[:, 0], harder[:, 0])
        assert loss.ndim == 0

    def test_clae_in_training(self, few, monkeypatch):
        """With the bound that was given, uint8 images, and statistics when they are wanted."""
        given, step = [], hardneg.clae_step
        monkeypatch.setattr(hardneg, "clae_step", lambda *arguments, **options: given.append(
            (arguments[4], options["return_stats"])) or step(*arguments, **options))
        encoder, seen, training = trained(few, method="clae", bound=0.2, batch_size=20, epochs=1)
        assert given == [(0.2, True)] * 12 and training.candidates == 38 and "ess" in seen[0]
        assert not same_weights(encoder, begun(few).encoder)

    @pytest.mark.parametrize("settings, name", [(dict(epochs=0), "epochs"), (dict(batch_size=1), "batch_size"),
                                                (dict(lr=0), "lr"), (dict(method="moco"), "method"),
                                                (dict(recipe="lars"), "recipe"),
                                                (dict(method="bank", momentum=1.0), "momentum"),
                                                (dict(method="queue", momentum=1.0), "momentum"),
                                                (dict(method="queue", queue_size=0), "queue_size"),
                                                (dict(method="clae", bound=0.0), "bound"),
                                                (dict(method="clae", bound=1.0), "bound"),
                                                (dict(method="diffhard", true_positives=True), "true_positives"),
                                                (dict(method="bank", true_positives=True), "true_positives")])
    def test_names_what_is_off(self, few, settings, name):
        with pytest.raises(ValueError, match=name):
            trained(few, **settings)

    def test_one_image_is_not_enough(self, few):
        with pytest.raises(ValueError, match="images is 1"):
            trained(few._replace(train=few.train[:1], train_labels=few.train_labels[:1]))

    def test_import_prints_nothing(self):
        run = subprocess.run([sys.executable, "-c", "import hardneg"], cwd=HERE, capture_output=True, text=True,
                             check=True)
        assert run.stdout == run.stderr == ""

    def test_torch_alone_is_enough_for_the_losses(self):
        """As in a project that has nothing else: every other package is made impossible to import."""
        code = """if True:
            import sys
            for name in ("torchvision", "numpy", "scipy", "tqdm", "matplotlib", "PIL", "reference_numpy"):
                sys.modules[name] = None
            import torch
            from hardneg import ContrastiveLoss
            print(ContrastiveLoss("ot")(torch.eye(4), torch.eye(4)).item() > 0)"""
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=HERE, capture_output=True, text=True)
        assert run.stdout.strip() == "True", run.stderr


TINY = ["--epochs", "2", "--fraction", "0.02", "--batch-size", "40"]


@pytest.fixture
def small_shapes(monkeypatch):
    """train.py on a few of its images: what is tested is the program, not what it learns."""
    whole = hardneg.shapes
    monkeypatch.setattr(hardneg, "shapes", lambda n, **options: whole(n // 10, **options))


def quit_with(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(arguments)
    return f"{stop.value.code} {capsys.readouterr().err}"


def plain_network(*before):
    """Images of 8 × 8 → features, embeddings, in float64 and without BatchNorm."""
    torch.manual_seed(0)
    layers = nn.Sequential(*before, nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6)).double()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.seen = layers, []

        def forward(self, x):
            self.seen.append(len(x))
            return x.mean((2, 3)), self.layers(x)

    return Network()


def slopes(method, network, encoder):
    """The loss of one step of a method, and its gradient with regard to all that it reaches."""
    images, criterion, generator = pictures(7, 8), hardneg.ContrastiveLoss("ppcl", temperature=0.2), seeded(3)
    if method == "diffhard":
        game = quiet(tiny_game(ascent_lr=0.0))
        game.imitate = lambda *_: {}
        optimizer = torch.optim.SGD(network.parameters(), 0.0)
        loss, _ = hardneg.diffhard_step(encoder, optimizer, game, images, criterion, generator)
        return [loss, *(p.grad for p in (*network.parameters(), *game.G.parameters()))]
    bank = SimpleNamespace(rows=hardneg.unit(torch.tensor(normal(1, 9, 6))))
    if method == "bank":
        loss, _ = hardneg.bank_step(encoder, images, torch.arange(7), bank, criterion, generator)
    elif method == "queue":
        loss, _ = hardneg.queue_step(encoder, network, images, bank, criterion, generator)
    else:
        step = {"simclr": hardneg.simclr_step, "clae": hardneg.clae_step}[method]
        loss = step(encoder, images, criterion, generator)
    return [loss, *torch.autograd.grad(loss, list(network.parameters()))]


class TestMicroBatches:
    """A large batch a few images at a time: the loss and the gradients of one pass, in less memory."""

    @pytest.mark.parametrize("method", hardneg.METHODS)
    @pytest.mark.parametrize("size", [1, 3, 100])
    def test_gradients_are_those_of_one_pass(self, method, size):
        network = plain_network()
        whole = slopes(method, network, network)
        network.seen.clear()
        parts = slopes(method, network, hardneg.in_micro_batches(network, size))
        assert len(whole) == len(parts) and max(network.seen) <= max(size, 7 * (method == "queue"))
        for one, two in zip(whole, parts):
            close(two, one, 1e-10, floor=1e-6)

    def test_randomness_is_replayed(self):
        """The way back goes through the same dropout."""
        network, x = plain_network(nn.Dropout(0.5)), pictures(6, 8)
        embed, rows = hardneg.in_micro_batches(network, 2), []
        for encoder in (embed, lambda x: (None, torch.cat([network(some)[1] for some in x.split(2)]))):
            torch.manual_seed(1)
            z = encoder(x)[1]
            loss = hardneg.contrastive_loss(*z.chunk(2))
            torch.rand(100)
            rows.append([loss, *torch.autograd.grad(loss, list(network.parameters()))])
        for one, two in zip(*rows):
            close(one, two, 1e-12)

    def test_nothing_is_kept_but_views(self):
        """Bytes that wait for the way back."""
        network, x, kept = plain_network(), pictures(24, 8), {}
        for size in (24, 2):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(size, []).append(t.nbytes) or t,
                                                          lambda t: t):
                (hardneg.in_micro_batches(network, size) if size < 24 else network)(x)[1].sum().backward()
        assert sum(kept[2]) == x.nbytes < 0.25 * sum(kept[24])
        assert network.seen == [24] + 24 * [2]

    def test_batchnorm_sees_each_micro_batch_by_itself_and_twice(self):
        network, x = plain_network(nn.BatchNorm2d(3)), pictures(6, 8)
        hardneg.in_micro_batches(network, 3)(x)[1].sum().backward()
        mean = np.zeros(3)
        for some in (x[:3], x[3:], x[3:], x[:3]):  # there and back
            mean = 0.9 * mean + 0.1 * numpy(some.mean((0, 2, 3)))
        close(network.layers[0].running_mean, mean, 1e-12)

    @pytest.mark.parametrize("method", ["simclr", "diffhard"])
    def test_in_training(self, few, monkeypatch, method):
        seen, forward = [], hardneg.Encoder.forward
        monkeypatch.setattr(hardneg.Encoder, "forward", lambda self, x: seen.append(len(x)) or forward(self, x))
        encoder, progress, _ = trained(few, method=method, micro_batch=50, epochs=3,
                                       **dict(game=tiny_game(32, pretrain=0)) if method == "diffhard" else {})
        assert max(seen) == 50 and not same_weights(encoder, hardneg.Encoder(dim=16))
        assert progress[-1]["loss"] < progress[0]["loss"]
        with pytest.raises(ValueError, match="^micro_batch is 0"):
            trained(few, micro_batch=0)


RANKS = """
import sys
import torch
from torch import distributed, multiprocessing

sys.path.insert(0, {here!r})
import hardneg
import test_hardneg


def work(rank, ranks, meeting, out):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    try:
        found = getattr(test_hardneg, {what!r})(rank, ranks, distributed.group.WORLD)
        if rank == 0:
            torch.save(found, out)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    ranks, meeting, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    multiprocessing.start_processes(work, (ranks, meeting, out), ranks, start_method="fork")
"""
VARIANTS = [{}, {"block_size": 0}, {"reduction": "sum"}, {"labels": [0, 1, 0, 2, 3, 2]}, {"negatives": True},
            {"detach_weights": False}, {"tau_plus": 0.05, "temperature": 0.7}]


def losses_of(rank, ranks, group):
    """For every preset, variant and number of views: the loss, an encoder's gradient averaged over the ranks, figures.

    Of rank `rank` of `ranks`, each with its share of six samples.
    """
    x, bank = (torch.tensor(normal(seed, n, d)) for seed, n, d in ((0, 18, 5), (1, 7, 4)))
    share = slice(6 // ranks * rank, 6 // ranks * (rank + 1))
    found = {}
    for loss in PRESETS:
        for k, variant in enumerate(VARIANTS):
            torch.manual_seed(0)
            encoder, options = nn.Linear(5, 4).double(), dict(variant)
            if "labels" in options:
                options["labels"] = torch.tensor(options["labels"])[share]
            if "negatives" in options:
                options["negatives"] = bank
            views = [encoder(view[share]) for view in x.chunk(3)][:2 + k % 2]
            value, stats = hardneg.contrastive_loss(*views, loss=loss, return_stats=True, group=group, **options)
            value.backward()
            gradient = torch.cat([p.grad.flatten() for p in encoder.parameters()])
            if group is not None:
                torch.distributed.all_reduce(gradient)
            found[loss, k] = (value.detach(), gradient / ranks, stats)
    return found


def runs_of(rank, ranks, group):
    """For every method that several processes can share: the encoder after two epochs, the bank, the losses."""
    found, view = {}, hardneg.view
    hardneg.view = lambda images, *_, **__: images / 255  # views would be others on other ranks
    try:
        for method in ("simclr", "bank", "queue", "clae"):
            encoder = plain_network()
            encoder.dim, forward = 6, encoder.forward
            encoder.forward = lambda x, forward=forward: forward(x.double())
            with torch.no_grad():
                encoder.layers[0].bias.add_(rank)  # they begin with the weights of the first
            images, labels = hardneg.shapes(24, seed=1, size=8)
            training = hardneg.Training(encoder, hardneg.Images(images, labels, images, labels, []),
                                        hardneg.ContrastiveLoss("hcl", tau_plus=0.01), method, queue_size=20, epochs=2,
                                        batch_size=12, lr=0.1, recipe="sgd", bfloat16=False, group=group)
            seen = [(p["loss"], p["positive"], torch.tensor(p["images"]), torch.tensor(training.candidates))
                    for p in training]
            found[method] = [*encoder.layers.parameters(), *map(torch.stack, seen)]
            if training.bank is not None:
                found[method].append(training.bank.rows)
    finally:
        hardneg.view = view
    return found


class TestRanks:
    """Several processes, each with its share of the samples: what one with all of them would do."""

    def of(self, what, ranks, folder):
        """What the first of some processes has found."""
        script, out = folder / "ranks.py", folder / "found.pt"
        script.write_text(RANKS.format(here=str(HERE), what=what))
        run = subprocess.run([sys.executable, script, str(ranks), f"file://{folder / 'meeting'}", out],
                             capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return torch.load(out)

    def test_runs_are_those_of_one_process(self, tmp_path):
        found, wanted = self.of("runs_of", 2, tmp_path), runs_of(0, 1, None)
        assert found.keys() == wanted.keys()
        for method, tensors in wanted.items():
            for one, two in zip(found[method], tensors, strict=True):
                close(one, two, 1e-10)

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_loss_and_gradients_are_those_of_one_process(self, ranks, tmp_path):
        found, wanted = self.of("losses_of", ranks, tmp_path), losses_of(0, 1, None)
        assert found.keys() == wanted.keys() and len(found) == len(PRESETS) * len(VARIANTS)
        for key, (value, gradient, stats) in wanted.items():
            close(found[key][0], value, 1e-9)
            close(found[key][1], gradient, 1e-8 if key[0] == "ot" else 1e-10, floor=1e-3)
            for name, figure in stats.items():
                close(found[key][2][name], figure, 1e-6)


    def launched(self, script, *arguments):
        """torchrun with two processes."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                   script, *arguments]
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        return subprocess.run(command, capture_output=True, text=True, timeout=150, env=alone)

    def test_one_rank_writes(self, tmp_path):
        command = [*TINY, "--device", "cpu", "--out", str(tmp_path / "run")]
        run = self.launched(HERE / "train.py", *command)
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("\ntrained encoder") == 1 and "2 processes" in run.stdout
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["epochs"] == 2 and (tmp_path / "run" / "curves.png").exists()
        (tmp_path / "run" / "results.json").unlink()
        run = self.launched(HERE / "train.py", *command)  # all of them go on from what one has saved
        assert "resumed after epoch 2 of 2" in run.stdout and (tmp_path / "run" / "results.json").exists()
        again = json.loads((tmp_path / "run" / "results.json").read_text())
        assert again["linear"] == results["linear"]

    def test_a_rank_that_dies_ends_the_others(self, tmp_path):
        script = tmp_path / "dies.py"
        script.write_text("import os, hardneg, train\n"
                          "step = hardneg.Training._step\n"
                          "def dies(self, number, *others):\n"
                          "    if self.rank == 1 and number == 1:\n"
                          "        os._exit(7)\n"
                          "    return step(self, number, *others)\n"
                          "hardneg.Training._step = dies\n"
                          "train.main()\n")
        run = self.launched(script, *TINY, "--device", "cpu", "--out", str(tmp_path / "run"))
        assert run.returncode != 0 and "exitcode" in run.stderr and "7" in run.stderr
        assert not (tmp_path / "run" / "results.json").exists()

    def test_names_what_is_off(self):
        with pytest.raises(ValueError, match="^group is 'all'"):
            hardneg.contrastive_loss(torch.eye(2), torch.eye(2), group="all")
        with pytest.raises(SystemExit, match="--sync-batchnorm is for several processes"):
            train.main(["--sync-batchnorm", "--epochs", "1"])


GAME_FLAGS = ["--pretrain", "3", "--every", "1", "--width", "2", "--latent", "4"]


class TestCommandLine:
    """train.py as a person uses it, mistakes and Ctrl-C included."""

    def test_a_whole_run(self, tmp_path):
        command = [sys.executable, "train.py", "--loss", "hard", "--alpha", "0.3", *TINY,
                   "--out", str(tmp_path / "run")]
        # threads that wait for each other on a busy machine take minutes
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env=alone)
        assert run.returncode == 0, run.stderr
        assert "raw pixels" in run.stdout and "untrained encoder" in run.stdout and "trained encoder" in run.stdout
        assert "images/s" in run.stderr  # the bar
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert set(results) == {"loss", "method", "data", "seed", "epochs", "seconds", "images_per_second", "linear",
                                "knn", "uniformity", "tolerance", "untrained", "raw", "options", "versions"}
        assert results["loss"] == "hard" and results["options"]["alpha"] == 0.3 and results["epochs"] == 2
        assert set(results["raw"]) == set(results["untrained"]) == {"linear", "knn"} and 0 < results["linear"] <= 100
        assert (tmp_path / "run" / "curves.png").stat().st_size > 5000

    def test_streams_a_folder(self, tmp_path, capsys):
        """--workers changes no number, and a run that was begun with others goes on."""
        write_images(tmp_path / "images", per_class=10)
        command = ["--data", str(tmp_path / "images"), "--size", "32", "--batch-size", "8", "--epochs", "2",
                   "--pictures"]
        for name, options in (("kept", []), ("streamed", ["--workers", "2"])):
            train.main([*command, *options, "--out", str(tmp_path / name)])
        one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("kept", "streamed"))
        assert all(one[name] == two[name] for name in ("linear", "knn", "uniformity", "raw", "untrained"))
        train.main(["--evaluate", str(tmp_path / "kept"), "--data", str(tmp_path / "images"), "--workers", "0"])
        assert "workers is 2; it must be None for shapes" in quit_with(["--workers", "2"], capsys)

    @pytest.mark.parametrize("loss", hardneg.PRESETS)
    def test_every_loss_has_its_command(self, loss, tmp_path, small_shapes, capsys):
        train.main(["--loss", loss, "--epochs", "1", "--fraction", "0.1", "--batch-size", "40", "--out", str(tmp_path)])
        out = capsys.readouterr().out
        assert "trained encoder" in out and \
            ("log(2B − 1)" in out) == (loss in ("simclr", "debiased", "hcl", "ot", "ppcl"))

    @pytest.mark.parametrize("method", [["--method", "bank", "--loss", "hard-simple", "--top-k", "9"],
                                        ["--method", "queue", "--recipe", "sgd", "--queue-size", "50"],
                                        ["--method", "clae", "--bound", "0.01"],
                                        ["--method", "diffhard", "--loss", "hcl", *GAME_FLAGS]])
    def test_other_methods_killed_and_resumed(self, method, tmp_path, small_shapes, monkeypatch, capsys):
        command = [*method, "--epochs", "2", "--fraction", "0.1", "--batch-size", "40"]
        train.main([*command, "--out", str(tmp_path / "whole")])
        said = capsys.readouterr().out
        assert {"bank": "top_k goes from 79 to 9", "queue": "log(N + 1) = log(51)", "clae": "log(2B − 1) = log(79)",
                "diffhard": "log(N + 1) = log(159)"}[method[1]] in said
        step = hardneg.Training._step

        def interrupted(self, number, *arguments):
            if number == 2:  # the first of the second epoch
                monkeypatch.undo()
                raise KeyboardInterrupt
            return step(self, number, *arguments)

        monkeypatch.setattr(hardneg.Training, "_step", interrupted)
        quit_with([*command, "--out", str(tmp_path / "cut")], capsys)
        monkeypatch.setattr(hardneg, "shapes", lambda n, whole=hardneg.shapes, **options: whole(n // 10, **options))
        train.main([*command, "--out", str(tmp_path / "cut")])
        assert "resumed after epoch 1 of 2" in capsys.readouterr().out
        whole, cut = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut"))
        assert all(whole[k] == cut[k] for k in ("linear", "knn", "uniformity", "tolerance", "untrained", "raw"))

    def test_a_game_killed_in_its_pre_training(self, tmp_path, small_shapes, monkeypatch, capsys):
        command = ["--method", "diffhard", "--epochs", "2", "--fraction", "0.1", "--batch-size", "40", *GAME_FLAGS]
        train.main([*command, "--out", str(tmp_path / "whole")])
        step = hardneg.Training._pretrain_step
        calls = []

        def interrupted(self, index):
            calls.append(index)
            if len(calls) == 3:  # of three, where an epoch has two, so that the first had one
                raise KeyboardInterrupt
            return step(self, index)

        monkeypatch.setattr(hardneg.Training, "_pretrain_step", interrupted)
        assert "the same command goes on" in quit_with([*command, "--out", str(tmp_path / "cut")], capsys)
        monkeypatch.setattr(hardneg.Training, "_pretrain_step", step)
        train.main([*command, "--out", str(tmp_path / "cut")])
        assert "resumed after step 1 of 3 of the pre-training" in capsys.readouterr().out
        whole, cut = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut"))
        assert all(whole[k] == cut[k] for k in ("linear", "knn", "uniformity", "tolerance", "game"))
        assert set(whole["game"]) == {"first_epoch", "last_epoch"} and "diversity" in whole["game"]["last_epoch"]
        for folder in ("whole", "cut"):
            pictures = [tmp_path / folder / f"pairs-{when}.png" for when in ("start", "middle", "end")]
            assert all(picture.stat().st_size > 10000 for picture in pictures)

    def test_evaluate_a_run_on_other_images(self, tmp_path, small_shapes, capsys):
        train.main(["--epochs", "1", "--fraction", "0.2", "--batch-size", "40", "--out", str(tmp_path / "run")])
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        capsys.readouterr()
        train.main(["--evaluate", str(tmp_path / "run"), "--fraction", "0.2"])  # on the same: the same
        assert "of training on shapes" in capsys.readouterr().out
        again = json.loads((tmp_path / "run" / "evaluate-shapes-0.2.json").read_text())
        assert all(again[k] == results[k] for k in ("linear", "knn", "uniformity", "tolerance", "untrained", "raw"))
        write_images(tmp_path / "other", per_class=10, size=(48, 48))
        train.main(["--evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "other")])
        said = capsys.readouterr().out
        assert "32 × 32 pixels" in said and "trained encoder" in said and "not finished" not in said
        path, = (tmp_path / "run").glob("evaluate-*other.json")
        other = json.loads(path.read_text())
        assert other["trained_on"] == "shapes" and other["epochs"] == 1 and other["data"] == str(tmp_path / "other")
        assert "--evaluate: there is no" in quit_with(["--evaluate", str(tmp_path)], capsys)

    def test_pictures_of_a_finished_run(self, tmp_path, small_shapes, capsys):
        command = ["--epochs", "1", "--fraction", "0.1", "--batch-size", "40", "--out", str(tmp_path)]
        train.main(command)
        assert list(tmp_path.glob("*.png")) == [tmp_path / "curves.png"]
        train.main([*command, "--pictures", "--resume"])
        said = capsys.readouterr().out
        assert "resumed after epoch 1 of 1" in said
        for name in ("separation", "gradient", "uniformity", "neighbours", "nearest", "weights", "histograms"):
            assert f"{name}.png" in said and (tmp_path / f"{name}.png").stat().st_size > 10000

    def test_killed_and_resumed_it_ends_the_same(self, tmp_path, small_shapes, monkeypatch, capsys):
        command = ["--epochs", "3", "--fraction", "0.1", "--batch-size", "40"]
        train.main([*command, "--out", str(tmp_path / "whole")])
        step, calls = hardneg.Training._step, []

        def interrupted(self, *arguments):
            calls.append(arguments)
            if len(calls) == 4:  # in the middle of the second epoch of two steps
                raise KeyboardInterrupt
            return step(self, *arguments)

        monkeypatch.setattr(hardneg.Training, "_step", interrupted)
        assert "the same command goes on" in quit_with([*command, "--out", str(tmp_path / "cut")], capsys)
        train.main([*command, "--out", str(tmp_path / "cut")])
        assert "resumed after epoch 1 of 3" in capsys.readouterr().out
        whole, cut = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "cut"))
        assert all(whole[k] == cut[k] for k in ("linear", "knn", "uniformity", "tolerance", "untrained", "raw"))
        complaint = quit_with([*command, "--loss", "ot", "--out", str(tmp_path / "cut"), "--resume"], capsys)
        assert "--loss was hcl" in complaint
        (tmp_path / "cut" / "results.json").unlink()  # as if it had been stopped while it was read out
        train.main([*command, "--out", str(tmp_path / "cut")])
        assert "resumed after epoch 3 of 3" in capsys.readouterr().out
        (tmp_path / "cut" / "results.json").unlink()
        assert "--epochs was 3" in quit_with([*command, "--epochs", "2", "--out", str(tmp_path / "cut")], capsys)
        (tmp_path / "cut" / "checkpoint.pt").write_bytes(b"")
        assert "--no-resume" in quit_with([*command, "--out", str(tmp_path / "cut")], capsys)
        train.main([*command, "--out", str(tmp_path / "cut"), "--no-resume"])
        train.main(["--evaluate", str(tmp_path / "cut"), "--fraction", "0.1"])
        assert len(list((tmp_path / "cut").glob("evaluate-*.json"))) == 1
        (tmp_path / "cut" / "mine.png").touch()
        capsys.readouterr()
        train.main([*command, "--out", str(tmp_path / "cut")])  # that run is finished: another one begins
        said = capsys.readouterr().out
        assert "resumed after" not in said and "holds a finished run, which this one replaces" in said
        assert (tmp_path / "cut" / "mine.png").exists() and not list((tmp_path / "cut").glob("evaluate-*.json"))

    @pytest.mark.parametrize("arguments, complaint", [
        (["--loss", "hcI"], "invalid choice: 'hcI'"), (["--alpha", "much"], "--alpha"),
        (["--alpha", "0"], "alpha is 0"), (["--temperature", "-1"], "temperature is -1"),
        (["--fraction", "2"], "fraction is 2"), (["--epochs", "0"], "epochs is 0"),
        (["--data", "no/such/folder"], "data is no/such/folder"), (["--batch-size", "1"], "batch_size is 1"),
        (["--resume", "--out", "no-such-run"], "--resume: there is no"), (["--beta", "1", "--lr", "nan"], "lr is nan"),
        (["--top-k", "0"], "top_k is 0"), (["--method", "bank", "--momentum", "1"], "momentum is 1"),
        (["--method", "bank", "--true-positives"], "true_positives is True"),
        (["--method", "diffhard", "--every", "0"], "every is 0"), (["--method", "clae", "--bound", "0"], "bound is 0"),
        (["--method", "diffhard", "--width", "0"], "width is 0"),
        (["--method", "diffhard", "--size", "40"], "--size: the images have 40 pixels"),
        (["--method", "diffhard", "--loss", "simple"], "--objective is simple"),
        (["--device", "abacus"], "abacus"), (["--out", "train.py/run"], "train.py/run")])
    def test_mistakes_are_named(self, arguments, complaint, capsys, small_shapes):
        assert complaint in quit_with(arguments, capsys)
        assert not (HERE / "no-such-run").exists()

    def test_folder_of_one_image_and_empty_folder(self, tmp_path, capsys):
        assert str(tmp_path) in quit_with(["--data", str(tmp_path)], capsys)
        write_images(tmp_path, per_class=1, classes=("cat",))
        assert str(tmp_path) in quit_with(["--data", str(tmp_path)], capsys)

    def test_numbers_without_a_point(self):
        args = train.arguments(["--beta", "1", "--alpha", "1", "--temperature", "1"])
        assert (args.beta, args.alpha, args.temperature) == (1.0, 1.0, 1.0)
        assert train.arguments(["--no-lead-in"]).lead_in is False


README = (HERE / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


class TestReadme:
    """What the README says is so."""

    @pytest.mark.parametrize("code", blocks("python"))
    def test_python_prints_what_its_comment_says(self, code, tmp_path):
        """In an empty folder with hardneg.py alone."""
        shutil.copy(HERE / "hardneg.py", tmp_path)
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        said = re.findall(r"print\(.*?#\s*(.*)|^# (\{.*)", code, re.M)
        assert run.stdout.strip() and any(run.stdout.strip() in "".join(s) for s in said), (run.stdout, said)

    @pytest.mark.parametrize("line", [line for code in blocks("sh") for line in code.splitlines()
                                      if line.startswith("python ")])
    def test_commands_parse(self, line):
        words = line.split("#")[0].split()
        assert words[:2] == ["python", "train.py"] and train.arguments(words[2:])

    def test_set_up_commands_are_those_of_ci(self):
        setup = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "
        assert [code.strip() for code in blocks("sh")][:2] == [setup + "train.py", setup + "-m pytest -q"]
        assert ".venv/bin/python -m pytest -q" in (HERE / ".ci" / "run").read_text()

    def test_tables_are_of_the_recorded_runs(self, monkeypatch):
        monkeypatch.syspath_prepend(str(HERE / "benchmarks"))
        import cifar10
        import diffhard
        import loop
        import losses
        import temperature
        results = json.loads((HERE / "benchmarks" / "cifar10.json").read_text())
        assert cifar10.table(results) in README
        assert {(r["loss"], r["seed"]) for r in results} == {(m, s) for m in cifar10.METHODS for s in (0, 1, 2)}
        results = json.loads((HERE / "benchmarks" / "temperature.json").read_text())
        assert temperature.table(results) in README
        assert {(r["loss"], r["temperature"], r["seed"]) for r in results} == \
            {(*run, seed) for run in temperature.RUNS for seed in (0, 1, 2)}
        results = json.loads((HERE / "benchmarks" / "diffhard.json").read_text())
        assert diffhard.table(results) in README
        assert {(r["name"], str(r["options"]["fraction"]), r["seed"]) for r in results} == \
            {(method, fraction, seed) for method in diffhard.METHODS for fraction in diffhard.SIZES
             for seed in (0, 1, 2) if fraction == "0.1" or method not in diffhard.ABLATION}
        said = (HERE / "benchmarks" / "README.md").read_text()
        for program in (losses, loop):
            results = json.loads((HERE / "benchmarks" / f"{program.__name__}.json").read_text())
            assert program.heading(results) in said and program.table(results) in said
        for picture in re.findall(r"\]\((benchmarks/.*?png)\)", README):
            assert (HERE / picture).stat().st_size > 5000

    def test_every_public_name_is_documented(self):
        public = [x for name, x in vars(hardneg).items()
                  if not name.startswith("_") and getattr(x, "__module__", "") == "hardneg" and callable(x)]
        assert len(public) > 30 and not [x.__name__ for x in public if not x.__doc__]

    def test_presets_have_a_row_each(self):
        assert all(f"| `{loss}` |" in README for loss in hardneg.PRESETS)
