"""Hard-negative contrastive learning in one file, to be copied into projects.

Version 1.0.0. Copyright 2026 the hardneg authors. MIT licence.

An encoder learns without labels: it pulls two views of a sample together and pushes other samples,
the negatives, away. Which negatives count, and how much, decides how good the encoder gets. Every
method here answers the same three questions, and the file asks them in this order:

    1. Who could be a negative?       candidates: the rest of the batch, a memory bank, given ones
    2. How much does each one count?  weights: candidates are drawn from p, the data's distribution;
                                      weights w ∝ q/p make them count as if drawn from q, which
                                      prefers candidates near the anchor
    3. What is done with them?        objective: nce (and its debiasing), simple, triplet, ppcl, …

    from hardneg import ContrastiveLoss
    criterion = ContrastiveLoss("hcl", beta=1.0)
    loss = criterion(z_1, z_2)                              # embeddings (B, D) of two views

Symbols
    B, V, D     samples, views of each sample, dimensions of an embedding
    A           anchors: V·B, every view of every sample; with `negatives` B, the first views
    M           positives of an anchor: V − 1, the other views of its sample
    N           columns: V·B in a batch, of all ranks; or K, the rows of `negatives`
    N_i         candidates of anchor i: the columns that are not masked; formulas write N for it
    a           anchors in a block, where a large batch is worked in blocks
    z           embedding, a unit row                        f(x) in [1, 2, 4], v in [3]
    t           temperature, divides cosines                 t in [1], τ in [3, 4]
    s_ij        logit of anchor i and candidate j: cos(z_i, z_j) / t; −∞ where j is no negative of i
    p_im        logit of anchor i and its m-th positive
    log w_ij    log importance weight; −∞ where the candidate does not count
    tau_plus    τ⁺, the probability that a candidate has the anchor's class                  [1]
    beta        β, the concentration of tilted weights; multiplies s = cos/t                 [1]
    alpha       α, the share of nearest candidates that `top` keeps                          [4]
    epsilon     ε, the entropic regularisation, in the unit of the ground cost; kappa: its κ [2]
    margin      η of the triplet loss, in the unit of a squared distance                     [2]
A name that ends in _ works in place; by_x is the gradient in x. Sums of e^s stay in the log domain:
e^{(1+β)/t} overflows float32 at β = 1, t = 0.02.

Sections: 1 Weights, 2 Objectives, 3 The loss, 4 Finding, 5 Numerics and checks, 6 Large batches and
ranks. They are the loss. 7 Views, 8 Encoders, 9 Generators, 10 Readouts, 11 Training use it.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. 2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport. 2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach. 2202.06464; numbers as in version 1
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. 2012.09740
    [5] Wang, Isola. Alignment and Uniformity. 2005.10242    [6] Chen et al. SimCLR. 2002.05709
    [7] Wu et al. Instance Discrimination. 1805.01978        [8] He et al. MoCo. 1911.05722
    [9] Brock et al. BigGAN. 1809.11096                     [10] Ho et al. CLAE. 2010.12050
   [11] Gao et al. GradCache. 2101.06983                    [12] Yeh et al. DCL. 2110.06848
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

__version__ = "1.0.0"
__all__ = ["ContrastiveLoss", "contrastive_loss", "gather", "mine"]

INF = math.inf
_NONE = -1e30  # fills the row of an anchor without candidates: finite, as −∞ − (−∞) is NaN
_MASKED = -1e28  # logits and log weights below this do not count
GROUP = 32  # columns that `_largest` looks at together


# ---- 1. Weights: how much does each candidate count? -------------------------------------------
# A rule of weights maps logits (A, N) to log weights (A, N), and −∞ to −∞. For tilted, hardest and
# transported a constant of the row is free: `mean_one` chooses it. A rule sees some rows at a time,
# and only autograd differentiates it: what stands here is what trains, at every batch size. To add
# a rule: a function here, its name in WEIGHTS, its call in `weigh`, its options in Options, RANGES
# and VALUES. Or pass the function itself: contrastive_loss(x, y, weights=my_rule).


def uniform(logits: Tensor) -> Tensor:
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    # 0 for a candidate; −∞, or −1e30, stays where masked. A boolean mask would take much longer
    limit = min(-_MASKED, torch.finfo(logits.dtype).max)  # half precision has no 1e28
    return F.hardshrink(logits.detach(), limit)  # 0 from −limit to limit


def tilted(logits: Tensor, beta: float = 1.0) -> Tensor:
    """Count candidates by their similarity: w_ij ∝ e^{β s_ij}, beta ≥ 0.
    With `mean_one`, w_ij = e^{β s_ij} / (1/N Σ_k e^{β s_ik}).
    Limits: β = 0 is `uniform`, β → ∞ `hardest`. With the weights held, an anchor's candidates get
    gradients in the shares of `uniform` at t/(1 + β).
    Ref: [1] Eq. 2, with Z_β estimated from the candidates"""
    if beta < torch.finfo(logits.dtype).tiny:  # 0, or 0 in this dtype: 0 · (−∞) would be NaN
        return uniform(logits)
    return beta * logits


def hardest(logits: Tensor) -> Tensor:
    """Count the nearest candidate alone: log w_ij = 0 where s_ij = max_k s_ik, −∞ elsewhere.
    With `mean_one` at log_n = log N its weight is N; ties share it. It is `tilted` at β → ∞.
    Ref: [1] Prop. 1, App. A.1; [4] Eq. 6"""
    nearest = logits.amax(-1, keepdim=True)
    return uniform(logits).masked_fill(logits < nearest, -INF)


def top(logits: Tensor, alpha: float = 0.1) -> Tensor:
    """Count the upper α quantile alone: log w_ij = 0 where s_ij ≥ s_i^(α), −∞ below.
    alpha in (0, 1]: the threshold s_i^(α) is the ⌈αN⌉-th largest logit of the anchor's own
    candidates; at least one stays, and ties with the last. For the k nearest, take alpha = k / N.
    The weight of those that are dropped is not redistributed: w is 0 or 1, its mean ⌈αN⌉/N or more.
    Limits: α = 1 is `uniform`, α → 0 keeps the nearest, with weight 1. Ref: [4] Eq. 8, 9"""
    return uniform(logits).masked_fill(logits < _threshold(logits.detach(), alpha), -INF)


def transported(
    logits: Tensor,
    epsilon: float = 0.3,
    cost: str = "sqeuclidean",
    kappa: float = 0.0,
    temperature: float | Tensor = 1.0,
    potential: Tensor | None = None,
) -> Tensor:
    """Count near candidates, but let each candidate have the same total weight over all anchors.
        w_ij ∝ e^{−C_ij/ε + g_j}: the entropic coupling of anchors and candidates
    The total is the same if all anchors have equally many candidates.
    logits (A, N) are of unit rows; epsilon is in the unit of the cost; temperature is that of the
    logits, as costs are of cosines. potential: the g (N,) of `sinkhorn`, which runs if it is None.
    With `mean_one`, w_ij = N P*(j | i).
    Limits: ε → 0 is optimal transport. ε → ∞ is `uniform` if all rows and all columns have equally
    many entries, as in a batch; in a bank with positives they have not. "sqeuclidean" at g = 0 is
    `tilted` at β = t/ε. Ref: [2] Eq. 5, Lemma 3; Eq. 7 omits e^{g_j}"""
    log_kernel = _log_kernel(logits, epsilon, cost, kappa, temperature)
    if potential is None:
        potential = sinkhorn(log_kernel)[1]
    return log_kernel + potential


def _log_kernel(logits, epsilon, cost, kappa, temperature):
    """Compute −C/ε, −∞ where the logits are."""
    # −∞ becomes a finite cosine, as 0 · ∞ is NaN in gradients; `uniform` puts −∞ back
    cosines = temperature * logits.clamp_min(-2 / temperature)
    log_kernel = ground_cost(cosines, cost, kappa) / -epsilon
    # clamp: a very high cost must stay above what counts as masked
    return log_kernel.clamp_min(_MASKED / 10) + uniform(logits)


def ground_cost(cosines: Tensor, cost: str = "sqeuclidean", kappa: float = 0.0) -> Tensor:
    """Compute the cost of coupling two unit rows from their cosine. Ref: [2] Eq. 5, VII-C
    "sqeuclidean": ½‖x − y‖² = 1 − cos; "exp": exp(‖x − y‖² − κ), where κ only scales ε, by e^κ."""
    if cost == "sqeuclidean":
        return 1 - cosines
    return torch.exp(2 - 2 * cosines - kappa)


@torch.compiler.disable  # the number of steps depends on the data
def sinkhorn(
    log_kernel: Tensor | Callable, tolerance: float | None = None, max_steps: int = 1000
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the entropic coupling with uniform marginals: P_ij = exp(f_i + log_kernel_ij + g_j).
    log_kernel: −C/ε (A, N), −∞ where i and j must not be coupled; or a function that returns its
    blocks of rows, for a kernel too large to store → f (A,), g (N,), error.
    It scales rows, f_i ← −log A − log Σ_j e^{log_kernel_ij + g_j}, and columns in turn, until
    error = Σ_i |Σ_j P_ij − 1/A| is at most `tolerance` (None: 1e-5, in float64 1e-12), or warns
    after max_steps. On a GPU the host reads the error after every eighth step, and never while a
    graph is captured: then there are 32 steps. Fully masked rows and columns carry no mass; A and
    N do not count them. Differentiable; autograd stores 2·A·N numbers for each step.
    Cost: 2·A·N per step, which multiplies the error by σ₂², σ₂ the 2nd singular value of √(AN) P: 3
    to 31 steps at ε = 0.3, hundreds for clustered rows at ε = 0.1, about 1/error if the masks force
    an unmasked entry to 0. Ref: [2] Eq. 5, Lemma 3"""
    _require(max_steps >= 1, "max_steps", max_steps, "at least 1")
    f = g = None
    for step in range(max_steps + 1):
        row_sums, column_sums = _log_sums(log_kernel, g)
        row_count = (row_sums > _MASKED).sum().clamp_min(1).to(row_sums.dtype)
        column_count = (column_sums > _MASKED).sum().clamp_min(1).to(row_sums.dtype)
        if step > 0:
            error = torch.expm1(f + row_sums).abs().sum() / row_count  # rows of P sum to e^{…} / A
            if _stops(error, step, max_steps, tolerance):
                break
        f = -row_sums
        g = (row_count / column_count).log() - column_sums
    return f - row_count.log(), g, error


def _log_sums(log_kernel, g):
    """Return the log-sums of rows (A,), and of columns (N,) once every row sums to 1.
    A block may be computed anew whenever it is read, so one pass gives both."""
    blocks = log_kernel() if callable(log_kernel) else [log_kernel]
    row_sums = column_sums = None
    for block in blocks:  # (a, N)
        if g is None:
            g = block.new_zeros(())
        # clamp: −sums stays finite, so −∞ plus it stays −∞
        sums = log_sum(block, g).clamp_min(_MASKED)  # (a,)
        # a list of small tensors would lie between large ones, and keep freed memory from reuse
        row_sums = sums if row_sums is None else torch.cat([row_sums, sums])
        sums = log_sum(block, -sums[:, None], dim=0)  # (N,)
        column_sums = sums if column_sums is None else torch.logaddexp(column_sums, sums)
    return row_sums, column_sums.clamp_min(_MASKED)


def _stops(error, step, max_steps, tolerance):
    """Whether Sinkhorn stops; it warns if it has to stop too early."""
    if not _is_concrete(error):
        return step >= min(32, max_steps)
    if step < max_steps and step % 8 > 0 and not _may_read(error):
        return False
    if tolerance is None:
        tolerance = 1e-12 if error.dtype == torch.float64 else 1e-5
    last = error.item()
    if step == max_steps and last > tolerance:
        message = f"Sinkhorn stopped after {step} steps, above its tolerance {tolerance:.0e}: "
        message += "raise epsilon, or check that labels leave enough candidates"
        warnings.warn(message, stacklevel=4)  # past sinkhorn and torch's wrapper of it
    return step == max_steps or last <= tolerance or math.isnan(last)


def mean_one(log_w: Tensor, log_n: Tensor | float | None = None) -> Tensor:
    """Normalise weights to mean 1 over the candidates of each anchor: log N + log_softmax(log w).
    The sum over N weighted negatives then compares with that over N plain ones, as τ⁺ and its floor
    assume. log_w (A, N), −∞ where a candidate does not count. log_n: log N, (A,) or a number; None:
    N counts the entries above −∞, which for `hardest` is 1. A row of −∞ alone gives NaN."""
    if log_n is None:
        log_n = (log_w > -INF).sum(-1).to(log_w.dtype).log()
    if torch.is_tensor(log_n):
        log_n = log_n[..., None]
    return torch.log_softmax(log_w, -1) + log_n


def weigh(
    logits: Tensor,
    options: Options,
    temperature: float | Tensor,
    log_n: Tensor | float | None = None,
    potential: Tensor | float | None = None,
) -> Tensor:
    """Answer question 2 by the options: logits (A, N) → log weights (A, N).
    `tilted`, `hardest` and `transported` get mean 1: log_n is that of `mean_one`; temperature and
    potential are of `transported`. Weights of a function stay, but −∞ where the logits are."""
    if callable(options.weights):
        log_w = options.weights(logits)
        _check_result("weights", log_w, logits.shape)
        return torch.where(logits < _MASKED, logits.detach(), log_w)
    if options.weights == "uniform":
        return uniform(logits)
    if options.weights == "top":
        return top(logits, options.alpha)
    if options.weights == "tilted":
        log_w = tilted(logits, options.beta)
    elif options.weights == "hardest":
        log_w = hardest(logits)
    elif options.weights == "transported":
        settings = options.epsilon, options.cost, options.kappa
        log_w = transported(logits, *settings, temperature, potential)
    return mean_one(log_w, log_n)


def weigh_alike(pos: Tensor, logits: Tensor, log_w: Tensor, options: Options) -> Tensor:
    """Weigh positives by the function of the logit that has weighed the candidates → (A, M).
    log_w (A, N): of the candidates, by `uniform`, `tilted`, `top` or `hardest`."""
    if options.weights == "uniform":
        return uniform(pos)
    heaviest = log_w.amax(-1, keepdim=True)  # the log weight of the nearest candidate
    if options.weights == "tilted":
        nearest = logits.amax(-1, keepdim=True)
        return heaviest + tilted(pos, options.beta) - tilted(nearest, options.beta)
    lowest = logits.masked_fill(log_w == -INF, INF).amin(-1, keepdim=True)  # that counts
    return torch.where(pos < lowest, _NONE, heaviest)  # finite, as −∞ − (−∞) is NaN


# ---- 2. Objectives: what is done with the weighted negatives? ----------------------------------
# pos (A, M), neg (A, N), log w (A, N) → losses (A,). nce, ppcl and decoupled act on logits, simple
# and triplet on cosines. Where log w is −∞, neg does not count. debiasing: options of `debiased`.


def debiased(
    pos: Tensor,
    neg: Tensor,
    log_w: Tensor,
    tau_plus: float = 0.0,
    temperature: float | Tensor = 1.0,
    log_w_pos: Tensor | None = None,
    log_total: Tensor | float | None = None,
    debias: str = "published",
) -> Tensor:
    """Compute the log of the weighted sum of e^s over negatives, less that of false negatives.
        log max( (Σ_j w_j e^{s_j} − W τ E⁺) / (1 − τ),  floor ),
        E⁺ = Σ_m w⁺_m e^{p_m} / Σ_m w⁺_m,     W = Σ_j w_j, which is N for weights of mean 1

    pos, neg are logits; log_w_pos (A, M), None for uniform weights and no pos of −∞ → (A,).
    log_total: log W; None: computed. On a CPU, a warning says if at more than half of the anchors
    nothing is left, or, as published, less than the floor. Limits: τ⁺ = 0 is log Σ_j w_j e^{s_j},
    without a floor.
    "published"  τ = τ⁺, and the floor W e^{−1/t}, as no cosine is below −1: no logit has a gradient
                 there. For uniform weights W τ E⁺ is the expected sum over false negatives; for
                 others the formula does not follow from q's definition. Ref: [1] Eq. 2, Fig. 5
                 (without N)
    "exact"      τ = τ_i of `_log_class_share`: W times the mean over true negatives as q defines
                 it. That mean is at most the largest e^s. The floor, which also stands where
                 τ_i ≥ 1, is the published mean for uniform weights: hard weights raise a mean. It
                 needs positives that are samples of the class, four or more, and t ≥ 0.3.
                 Ref: [1], q_β⁻"""
    settings = tau_plus, temperature, log_w_pos, log_total, debias
    rest, clamped = _debiased(pos, neg, log_w, *settings)
    if _may_read(clamped) and 2 * clamped.sum() > len(clamped):
        message = "debiasing: the floor binds for most anchors: raise temperature or lower tau_plus"
        warnings.warn(message, stacklevel=2)
    return rest


def _debiased(
    pos, neg, log_w, tau_plus, temperature, log_w_pos, log_total=None, debias="published"
):
    """Compute `debiased` (A,), and where nothing is left, or, as published, less than the floor."""
    log_all = log_sum(neg, log_w)
    if tau_plus == 0:
        return log_all, torch.zeros_like(log_all, dtype=torch.bool)
    if log_total is None:
        log_total = log_sum(log_w)
    if log_w_pos is None:
        log_positive = log_sum(pos) - math.log(pos.shape[1])  # log E⁺
    else:
        log_positive = log_sum(pos, log_w_pos) - log_sum(log_w_pos)
    log_tau = math.log(tau_plus)
    log_others = math.log1p(-tau_plus)
    floor = log_total - 1 / temperature
    if debias == "exact":
        plain, plain_pos = uniform(neg), uniform(pos)
        if log_w_pos is None:
            log_w_pos = plain_pos
        log_tau = _log_class_share(pos, neg, log_w, log_w_pos, tau_plus)
        log_others = _log_difference(0, log_tau)
        published, _ = _debiased(pos, neg, plain, tau_plus, temperature, plain_pos)
        floor = published + log_total - log_sum(plain)  # the same mean, with W for N
    log_false = log_total + log_tau + log_positive
    rest = _log_difference(log_all, log_false) - log_others
    nothing_left = log_false >= log_all
    if debias == "exact":
        nothing_left |= log_tau >= 0
        rest = torch.minimum(rest, neg.amax(-1) + log_total).maximum(floor)
    clamped = (nothing_left | (rest < floor)) & (log_all > _MASKED)  # not without negatives
    return torch.where(clamped, floor, rest), clamped


def _log_class_share(pos, neg, log_w, log_w_pos, tau_plus):
    """Compute log τ_i (A,), τ_i the share of all weight that the anchor's class has.
        τ_i = τ⁺ (1/M Σ_m w⁺_m) / (1/N Σ_j w_j),     w⁺ and w by one function of the logit
    At τ_i ≥ 1 nothing is left for other classes: positives are too near, or τ⁺ is too large."""
    log_mean = log_sum(log_w) - log_sum(uniform(neg))
    log_mean_pos = log_sum(log_w_pos) - log_sum(uniform(pos))
    return math.log(tau_plus) + log_mean_pos - log_mean


def _log_difference(x, y):
    """Compute log(e^x − e^y); where nothing is left, a finite number."""
    gap = y - x
    return x + torch.log(-torch.expm1(gap.masked_fill(gap >= 0, -1)))


def nce(pos: Tensor, neg: Tensor, log_w: Tensor, **debiasing) -> Tensor:
    """Compute noise-contrastive estimation: −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + e^{debiased}) ).
    pos, neg are logits; 0 for an anchor without negatives. Several positives are pooled inside the
    logarithm; [1] Eq. 2 averages outside. Limits, for one positive and uniform weights: t → 0 of
    t · nce is half `triplet` on `hardest`; t → ∞ is log(1 + N) + N/(1 + N)/t · `simple`/(1 − τ⁺).
    Ref: [1] Eq. 1, 2, Fig. 5; [2] Eq. 8; [4] Eq. 1, 6, 7, 9"""
    log_negatives = debiased(pos, neg, log_w, **debiasing)
    return -F.logsigmoid(log_sum(pos) - log_negatives)


def simple(pos: Tensor, neg: Tensor, log_w: Tensor) -> Tensor:
    """Compute the difference of means of cosines: −1/M Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j.
    [4] has a factor λ before the sum; here it is 1/N, 1/⌈αN⌉ for `top`, as in the limit t → ∞ of
    `nce`. An anchor without negatives keeps its first term.
    Ref: [4] Eq. 3; [2] Eq. 9 (BCL)"""
    return _weighted_mean(neg, log_w) - pos.mean(-1)


def triplet(pos: Tensor, neg: Tensor, log_w: Tensor, margin: float = 0.0) -> Tensor:
    """Compute the hinge 1/M Σ_m Σ_j w_j max(0, ‖z − z_m‖² − ‖z − z_j‖² + η) / Σ_j w_j.
    pos, neg are cosines: the difference is 2 (cos_j − cos_m).
    Ref: [2] IV; at η = 0 on `hardest` weights it is twice [4] Eq. 6"""
    differences = neg[:, None] - pos[:, :, None]  # (A, M, N)
    hinges = F.relu(2 * differences + margin)
    return _weighted_mean(hinges, log_w[:, None]).mean(1)


def _weighted_mean(x, log_w):
    """Compute Σ_j w_j x_j / Σ_j w_j over the last dimension, 0 without a candidate."""
    w = torch.softmax(log_w.clamp_min(_NONE), -1)  # clamp: a row of −∞ alone would give NaN
    dropped = (log_w < _MASKED) | (x < _MASKED)  # False for NaN, which has to show
    return (w * x.masked_fill(dropped, 0)).sum(-1)


def ppcl(pos: Tensor, neg: Tensor, log_w: Tensor, **debiasing) -> Tensor:
    """Compute the partially pseudo-labelled loss, a mean over positives of log shares.
        −1/M Σ_m log( e^{p_m} / (Σ_l e^{p_l} + e^{debiased}) )
    pos (−∞ for an anchor with fewer positives), neg are logits. It is `nce` + logsumexp_m p_m −
    mean_m p_m: `nce` itself for one positive. Ref: [3] Eq. 8"""
    is_positive = pos > -INF
    mean = pos.masked_fill(~is_positive, 0).sum(-1) / is_positive.sum(-1)
    pooled = nce(pos, neg, log_w, **debiasing)
    return pooled + log_sum(pos) - mean


def decoupled(pos: Tensor, neg: Tensor, log_w: Tensor, **debiasing) -> Tensor:
    """Compute `nce` without positives in the denominator: debiased − log Σ_m e^{p_m}.
    pos, neg are logits; 0 for an anchor without negatives. Unlike in `nce`, an easy positive does
    not shrink the gradient. Let D(t) be this loss with one positive, uniform weights, τ⁺ = 0. Then
    `nce` at τ⁺ = 1/(N + 1) is D(t) + log(1 + 1/N), and D with `tilted` weights instead is
    D(t/(1 + β)) − D(t/β) + log N. Ref: [12] Eq. 6"""
    log_negatives = debiased(pos, neg, log_w, **debiasing)
    return (log_negatives - log_sum(pos)).masked_fill(log_negatives < _MASKED, 0)


# ---- 3. The loss -------------------------------------------------------------------------------

WEIGHTS = ("uniform", "tilted", "hardest", "top", "transported")
OBJECTIVES = ("nce", "simple", "triplet", "ppcl", "decoupled")
ON_COSINES = ("simple", "triplet")  # the other objectives act on logits
DEBIASED = ("nce", "ppcl", "decoupled")  # these have τ⁺
EXACTLY_DEBIASED = ("uniform", "tilted", "hardest", "top")  # their positives have weights, too
PRESETS = {  # loss: weights, objective, tau_plus
    "simclr": ("uniform", "nce", 0.0),  # [6]; [4] Eq. 1
    "debiased": ("uniform", "nce", 0.1),  # [1] at β = 0
    "hcl": ("tilted", "nce", 0.1),  # [1] Eq. 2
    "ot": ("transported", "nce", 0.0),  # [2] Eq. 5, 8
    "hard": ("top", "nce", 0.0),  # [4] Eq. 9
    "simple": ("uniform", "simple", 0.0),  # [4] Eq. 3; [2] Eq. 9
    "hard-simple": ("top", "simple", 0.0),  # [4] Table 1, HardSimple
    "triplet": ("hardest", "triplet", 0.0),  # [2] IV; [4] Eq. 6
    "ppcl": ("uniform", "ppcl", 0.0),  # [3] Eq. 8
    "supcon": ("uniform", "ppcl", 0.0),  # another name of ppcl
}
PER_ANCHOR = ("anchors", "pos", "own", "mask", "labels")  # fields of `_Pairs`


def contrastive_loss(
    *views: Tensor,
    negatives: Tensor | None = None,
    positive_index: Tensor | None = None,
    negative_mask: Tensor | None = None,
    labels: Tensor | None = None,
    group: distributed.ProcessGroup | None = None,
    return_stats: bool = False,
    **options,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Compute any of the losses, on two or more views of a batch.
        s_ij = cos(z_i, z_j) / t    log w_ij = weights(s_i)_j    ℓ_i = objective(p_i, s_i, log w_i)

    views           (B, D) each; row i of each shows sample i. Each row is an anchor, in the order
                    of torch.cat(views). The other rows of its sample are its positives, the rows of
                    other samples its candidates
    negatives       (K, D): the candidates are these rows instead, and the anchors the first view
                    alone; or (B, K, D), rows for each anchor
    positive_index  (B,), with negatives: the row that shows the sample's own positive, and so is no
                    candidate: torch.arange(B) for views x, y and negatives=torch.cat([y, given])
    negative_mask   boolean (A, N), or (N,) for all anchors; True where the candidate may be a
                    negative: for ragged or filtered ones. Masked rows have to be finite, too
    labels          (B,): samples that share a label are never each other's negatives; under ppcl
                    they are positives. Every number is a label: none says "unknown". With
                    negatives (K, D): (B + K,), the last K of its rows
    group           a torch.distributed process group: the candidates are the views of every rank;
                    `negatives` are as passed, see `gather`. All ranks call together, with views of
                    one shape. The value is that of one process on all views, and so is the gradient
                    once DDP has averaged it
    return_stats    also return a dict, of the first 2^20 pairs: `clamped`, the share of anchors
                    where debiasing leaves nothing, or, as published, less than its floor; `ess`,
                    (Σw)²/Σw² as a share of N; `positive` and `negative`, mean cosines;
                    `temperature_effective`, the t at which `simclr` would spread its gradient over
                    an anchor's negatives with the same entropy as this loss, the weights held
                    and all hinges of `triplet` active: a geometric mean over ⌊2^14/N⌋ anchors, at
                    least one; with exact debiasing `share`, the mean τ_i

    The options are the fields of `Options`, with these defaults:

    loss="simclr"   a row of PRESETS; `weights`, `objective` and `tau_plus` override its parts
    weights         of WEIGHTS, or a function: logits (a, N), −∞ for no candidate → log weights;
                    with τ⁺ > 0 and several positives it is called on their logits (a, M), too.
                    Where its gradient is not finite at −∞, it has to clamp the logits first
    objective       of OBJECTIVES, or a function: logits (a, M), (a, N), log weights (a, N) → (a,);
                    an anchor without candidates has a row of −1e30
    tau_plus        τ⁺ in [0, 1), of nce, ppcl and decoupled; a function as objective ignores it
    temperature=0.5  t > 0, divides cosines; a 0-d tensor that requires a gradient is learned. Its
                    value is checked on a CPU, but neither on a GPU nor in compiled code
    beta=1.0        β ≥ 0, of tilted; multiplies cos/t
    alpha=0.1       of top: the share of nearest candidates kept, in (0, 1]
    epsilon=0.3, cost="sqeuclidean", kappa=0.0   of transported: ε > 0 in the unit of the cost,
                    "sqeuclidean" or "exp", κ of "exp"
    margin=0.0      η ≥ 0 of triplet
    absolute_margin, relative_margin   drop likely false negatives: a candidate stays if its cosine
                    is at most c − absolute_margin and at most c − relative_margin · |c|, c the
                    anchor's largest positive cosine; None: all stay
    margin_columns  how many of the first rows of `negatives` the margins look at; the others,
                    picked by hand, stay. None: all
    normalize=True  project rows to the unit sphere first; if False, they must have unit norm
    detach_weights  True: no gradient through the weights. None: True for transported, as in the
                    authors' code, else False
    debias="published"   how the false negatives of τ⁺ are subtracted, see `debiased`; "exact" for
                    weights uniform, tilted, top or hardest
    reduction="mean"  "mean", "sum", or "none": one value for each anchor
    block_size      anchors in a block; it changes results by rounding alone. None: an ordinary
                    batch (2^18 pairs on a CPU, 2^24 on a GPU) at once, a larger one in blocks, in
                    memory that grows like A + N, and not to be differentiated twice. 0, and always
                    for negatives (B, K, D): at once. For "none" and for functions a backward pass
                    computes each block again

    Takes floats of 16 bits or more; computes in float32 at least, with autocast off. Ignores
    options that weights and objective do not have. Raises ValueError that names the invalid
    argument, on a CPU also for embeddings that are not finite.
    Cost: A·N·D; `transported` adds 2·A·N for each step of Sinkhorn. Ref: PRESETS"""
    options = _options_of("contrastive_loss", options)
    _check_tensors(views, negatives, positive_index, negative_mask, labels, group, options)
    with torch.autocast(views[0].device.type, enabled=False):
        pairs = _pair(views, negatives, positive_index, negative_mask, labels, group, options)
        potential = None
        if options.weights == "transported":  # the coupling is of all anchors: before the blocks
            potential = _potential(pairs, group, options)
        value = _evaluate(pairs, options, potential)
        if group is not None and options.reduction != "none":
            value = _as_one_process(value, options.reduction, group)
        if _may_read(value):  # also if the value is finite: a masked NaN shows in the gradient
            _check_finite(views, negatives)
        if return_stats:
            return value, _statistics(pairs, options, potential, group)
        return value


class _Pairs(NamedTuple):
    """Hold the anchors, and who could be a negative of each."""

    anchors: Tensor  # (A, D), divided by t where the objective acts on logits
    candidates: Tensor  # (N, D), or (A, N, D) where each anchor has its own
    pos: Tensor  # (A, M), products of anchors and positives
    own: Tensor  # (A, any number), columns that show the anchor's own sample
    mask: Tensor | None  # (A, N), True where a candidate may be a negative
    labels: Tensor | None  # (A,)
    candidate_labels: Tensor | None  # (N,)
    t: float | Tensor

    def of(self, rows: slice) -> _Pairs:
        """Take some anchors."""
        names = list(PER_ANCHOR)
        if self.candidates.ndim == 3:
            names.append("candidates")
        taken = {name: getattr(self, name) for name in names}
        return self._replace(**{name: x if x is None else x[rows] for name, x in taken.items()})

    def products(self, out: Tensor | None = None) -> Tensor:
        """Multiply anchors (a, D) with their candidates (N, D) or (a, N, D) → (a, N).
        out: memory for the products with candidates (N, D)."""
        if self.candidates.ndim == 2:
            return torch.mm(self.anchors, self.candidates.T, out=out)
        return torch.einsum("ad,and->an", self.anchors, self.candidates)


class _Answers(NamedTuple):
    """Hold what the three questions give, for some anchors."""

    losses: Tensor  # (a,)
    pos: Tensor  # (a, M), logits, or cosines of simple and triplet; −∞ where there is no positive
    neg: Tensor  # (a, N), the same; −∞ where the candidate is no negative
    log_w: Tensor  # (a, N)
    debiasing: dict  # options of `debiased`


def answer(pairs: _Pairs, neg: Tensor, options: Options, potential: Tensor | None) -> _Answers:
    """Answer the three questions for some anchors. Every call of the loss, of any size, runs this.
    neg (a, N): their products with the candidates. In it, those of no negatives become −∞."""
    # 1. Who could be a negative?
    pos, log_n = _who_(neg, pairs, options)  # (a, M); (a,), or one number for all anchors

    # 2. How much does each one count?
    t, log_w_pos = pairs.t, None
    through_weights = torch.is_grad_enabled() and not options.detach_weights
    with torch.set_grad_enabled(through_weights):
        logits = _logits(neg, t, options)
        log_w = weigh(logits, options, t, log_n, potential)
        if options.debias == "exact":
            log_w_pos = weigh_alike(pos, logits, log_w, options)
        elif options.tau_plus > 0 and pos.shape[1] > 1:  # the positives, by the same rule
            log_w_pos = weigh(pos, options, t, potential=0.0)  # they are no columns of a coupling

    # 3. What is done with them?
    if options.weights == "top" or callable(options.weights):
        log_n = None  # the weights are not of mean 1: their sum is not N
    debiasing = {"tau_plus": options.tau_plus, "temperature": t, "debias": options.debias}
    debiasing |= {"log_w_pos": log_w_pos, "log_total": log_n}
    losses = _judge(pos, neg, log_w, debiasing, options)
    return _Answers(losses, pos, neg, log_w, debiasing)


def _who_(neg, pairs, options):
    """Answer question 1: mask the products (a, N) → those with positives (a, M), and log N_i."""
    pos = pairs.pos
    if options.objective == "ppcl" and pairs.labels is not None:
        pos = _add_labelled(pos, neg, pairs)
    return pos, _exclude_(neg, pos, pairs, options)


def _logits(neg, t, options):
    """Divide cosines by t for a rule that looks at more than their order."""
    if options.objective not in ON_COSINES or options.weights in ("uniform", "hardest", "top"):
        return neg
    is_candidate = neg > _MASKED
    logits = neg.masked_fill(~is_candidate, 0) / t  # t's gradient would be 0 · ∞
    return torch.where(is_candidate, logits, neg)


def _judge(pos, neg, log_w, debiasing, options):
    """Answer question 3 by the options: the losses (a,) of the objective."""
    if callable(options.objective):
        losses = options.objective(pos, neg.masked_fill(log_w == -INF, -INF), log_w)
        _check_result("objective", losses, neg.shape[:1])
        return losses
    if options.objective == "simple":
        return simple(pos, neg, log_w)
    if options.objective == "triplet":
        return triplet(pos, neg, log_w, options.margin)
    objective = {"nce": nce, "ppcl": ppcl, "decoupled": decoupled}[options.objective]
    return objective(pos, neg, log_w, **debiasing)


def _pair(views, negatives, positive_index, negative_mask, labels, group, options):
    """Line up the anchors of a batch, their positives and their candidates."""
    dtypes = [view.dtype for view in views]
    if negatives is not None:
        dtypes.append(negatives.dtype)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    z = torch.cat(views).to(dtype)  # (V·B, D)
    if options.normalize:
        z = unit(z)
    t = options.temperature
    if torch.is_tensor(t):  # as the embeddings: 16 bits are too few for its gradient
        t = t.to(z)
    if labels is not None:
        labels = torch.as_tensor(labels, device=z.device)
    if negatives is None:
        lined_up = _line_up_batch(z, len(views), labels, group)
    else:
        negatives = negatives.to(dtype)
        if options.normalize:
            negatives = unit(negatives)
        lined_up = _line_up_given(z, len(views), negatives, positive_index, labels)
    anchors, positives, candidates, own, labels, candidate_labels = lined_up
    if negative_mask is not None:
        mask = torch.as_tensor(negative_mask, device=z.device)
        negative_mask = mask.expand(len(anchors), -1)
    if options.objective not in ON_COSINES:
        anchors = anchors / t  # a learned t gets gradients here and in `answer`
    pos = torch.einsum("ad,amd->am", anchors, positives)
    return _Pairs(anchors, candidates, pos, own, negative_mask, labels, candidate_labels, t)


def _line_up_batch(z, v, labels, group):
    """Take all rows of v views, z (V·B, D), as anchors, and those of all ranks as candidates."""
    b = len(z) // v
    # row i + k·B, counted around the end, shows the sample of row i, k views later
    positives = torch.stack([z.roll(-k * b, 0) for k in range(1, v)], 1)  # (A, M, D)
    first = 0 if group is None else distributed.get_rank(group) * len(z)
    columns = torch.arange(first, first + len(z), device=z.device)
    own = columns.view(v, b).T.repeat(v, 1)  # (A, V)
    if labels is not None:
        labels = labels.repeat(v)
    return z, positives, gather(z, group), own, labels, gather(labels, group)


def _line_up_given(z, v, negatives, positive_index, labels):
    """Take the rows of the first view as anchors, and given rows as candidates."""
    b = len(z) // v
    positives = z[b:].view(v - 1, b, -1).transpose(0, 1)  # (A, M, D)
    own = torch.empty(b, 0, dtype=torch.long, device=z.device)
    if positive_index is not None:
        own = torch.as_tensor(positive_index, device=z.device).long()[:, None]
    if labels is None:
        return z[:b], positives, negatives, own, None, None
    return z[:b], positives, negatives, own, labels[:b], labels[b:]


def _add_labelled(pos, neg, pairs):
    """Add candidates of the anchor's label to its positives: (a, M + N), −∞ for the others."""
    others = pairs.labels[:, None] != pairs.candidate_labels
    others.scatter_(1, pairs.own, True)
    return torch.cat([pos, neg.masked_fill(others, -INF)], 1)


@torch.no_grad()
def _exclude_(neg, pos, pairs, options):
    """Write −∞ into products (a, N) where the candidate is no negative; return log N_i.
    No gradient is stopped by this: where neg is −∞, its gradient is 0. An anchor without candidates
    gets a row of _NONE."""
    neg.scatter_(1, pairs.own, -INF)
    count = neg.shape[1] - pairs.own.shape[1]
    filters = [pairs.mask, pairs.labels, options.absolute_margin, options.relative_margin]
    if count > 0 and all(x is None for x in filters):
        return math.log(count)
    if pairs.mask is not None:
        neg.masked_fill_(~pairs.mask, -INF)
    if pairs.labels is not None:
        neg.masked_fill_(pairs.labels[:, None] == pairs.candidate_labels, -INF)
    margins = options.absolute_margin, options.relative_margin
    if margins != (None, None):
        t = 1 if options.objective in ON_COSINES else pairs.t
        filtered = neg[:, : options.margin_columns]
        limit = _limit(pos.amax(1, keepdim=True), *margins, t)
        filtered.masked_fill_(filtered > limit, -INF)
    counts = (neg > -INF).sum(1)
    neg.masked_fill_((counts == 0)[:, None], _NONE)
    return counts.to(neg.dtype).log().clamp_min(_NONE)


class ContrastiveLoss(nn.Module):
    """Compute `contrastive_loss` as a module: ContrastiveLoss("hcl", beta=0.5)(view_1, view_2).

    Options of a call override those given here. An nn.Parameter as temperature is learned, and so
    are the parameters of an nn.Module as weights or objective. In other libraries, ContrastiveLoss
    is the loss of pairs with a margin by Hadsell et al."""

    def __init__(self, loss: str = "simclr", **options):
        super().__init__()
        self.given = {"loss": loss, **options}
        settings = {name: x for name, x in self.given.items() if name not in PER_CALL}
        # A call takes `given` and the temperature. The others are to be read; of an nn.Module, the
        # parameters are this module's, too.
        self.options = _options_of("ContrastiveLoss", settings)
        self.temperature = self.options.temperature  # a number, or this module's parameter
        self.weights = self.options.weights
        self.objective = self.options.objective

    def forward(self, *views: Tensor, **options) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of the views, with the module's options and those given here."""
        settings = {**self.given, "temperature": self.temperature, **options}
        return contrastive_loss(*views, **settings)

    def extra_repr(self) -> str:
        """Show the loss, its parts and the options given."""
        parts = {name: getattr(self.options, name) for name in ("weights", "objective", "tau_plus")}
        shown = self.given | parts | {"temperature": self.temperature}
        if torch.is_tensor(self.temperature):
            shown["temperature"] = f"{self.temperature.item():g}, learned"
        words = [repr(shown.pop("loss"))]
        words += [f"{name}={value}" for name, value in shown.items()]
        return ", ".join(words)


@torch.no_grad()
def _statistics(pairs, options, potential, group):
    """Describe the first 2^20 pairs of anchor and candidate: see `contrastive_loss`."""
    some = pairs.of(slice(0, max(1, 2**20 // pairs.candidates.shape[-2])))
    _, pos, neg, log_w, debiasing = answer(some, some.products(), options, potential)
    t, log_push = pairs.t, neg + log_w  # of each negative, up to a constant of the anchor
    if options.objective in ON_COSINES:
        t, log_push = 1, log_w
    is_negative, is_positive = neg > _MASKED, pos > -INF
    n = is_negative.sum(1)
    effective = torch.exp(2 * log_sum(log_w) - log_sum(2 * log_w)) / n.clamp_min(1)
    _, clamped = _debiased(pos, neg, log_w, **debiasing)
    parts = {  # values, and where they count
        "clamped": (clamped, torch.ones_like(clamped)),
        "ess": (effective, n > 0),
        "positive": (pos * t, is_positive),
        "negative": (neg * t, is_negative),
    }
    few = slice(0, max(1, 2**14 // neg.shape[1]))
    log_t = _log_effective_temperature((neg * t)[few], log_push[few])
    parts["temperature_effective"] = (log_t, n[few] > 0)
    if options.debias == "exact" and options.tau_plus > 0:
        log_share = _log_class_share(pos, neg, log_w, debiasing["log_w_pos"], options.tau_plus)
        parts["share"] = (log_share.exp(), n > 0)
    sums = [torch.where(counts, x, 0).sum() for x, counts in parts.values()]
    sums += [counts.sum() for _, counts in parts.values()]
    sums = torch.stack([x.to(neg.dtype) for x in sums])
    if group is not None:
        distributed.all_reduce(sums, group=group)
    values, counts = sums.chunk(2)
    figures = dict(zip(parts, values / counts, strict=True))
    figures["temperature_effective"].exp_()  # a geometric mean
    return figures


def _log_effective_temperature(cosines, log_push):
    """Find the log of the t at which softmax(cos/t) has the entropy of the push of each anchor.
    The entropy rises with t, so bisection finds it, between e^−10 and e^10."""
    wanted = _entropy(log_push)
    low, high = torch.full_like(wanted, -10), torch.full_like(wanted, 10)
    for _ in range(30):
        middle = (low + high) / 2
        too_low = _entropy(cosines / middle.exp()[:, None]) < wanted
        low = torch.where(too_low, middle, low)
        high = torch.where(too_low, high, middle)
    return middle


def _entropy(x):
    return torch.special.entr(torch.softmax(x, -1)).sum(-1)


# ---- 4. Finding: which samples to take as negatives --------------------------------------------


@torch.no_grad()
def mine(
    queries: Tensor,
    documents: Tensor,
    k: int,
    skip: int = 0,
    positives: Tensor | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """Find the k nearest documents of each query that are no positives: hard negatives.
    queries (n, D), documents (N, D), of any floating dtype, on one device → rows of documents
    (n, k), nearest first, of ones with equal cosines the first; −1 where fewer are left.

    positives       (n,): the row of each query's own document, which is not taken; None: row i
    labels          (N,): documents with the label of the query's own document are not taken
    absolute_margin, relative_margin    leave out likely false negatives, as in `contrastive_loss`:
                    c is the cosine of the query's own document. 0.05 is a common relative one
    skip            how many of the nearest that are left to leave out as well

    To train on them, embed them again, with a gradient, and mask the places of −1:
        rows = mine(all_x, all_y, k)[batch]                                      # (B, k)
        y_found = encoder(documents[rows.clamp_min(0)])                          # (B, k, D)
        contrastive_loss(x, y, negatives=y_found, negative_mask=rows >= 0)
    Cost: n·N·D, and the memory of unit documents and of a block of cosines: 64 MB, or 128 rows if
    these are more"""
    got = _describe(queries), _describe(documents)
    matrices = all(torch.is_tensor(x) and x.ndim == 2 for x in (queries, documents))
    fits = matrices and queries.shape[1] == documents.shape[1]
    _require(fits, "queries, documents", got, "tensors (n, D), (N, D)")
    for name, value, least in (("k", k, 1), ("skip", skip, 0)):
        fits = isinstance(value, numbers.Integral) and value >= least
        _require(fits, name, value, f"a whole number of at least {least}")
    n, size, device = len(queries), len(documents), queries.device
    _require(size > 0, "documents", "of no rows", "of at least one")
    if positives is None:
        _require(n <= size, "documents", f"{size} rows", f"at least {n}: row i is query i's own")
        positives = torch.arange(n, device=device)
    positives = torch.as_tensor(positives, device=device)
    _require(positives.shape == (n,), "positives", _describe(positives), f"({n},)")
    _check_rows("positives", positives, size)
    if labels is not None:
        labels = torch.as_tensor(labels, device=device)
        fits = labels.shape == (size,)
        _require(fits, "labels", _describe(labels), f"({size},), of the documents")
    found = []
    dtype = torch.promote_types(queries.dtype, documents.dtype)
    with torch.autocast(device.type, enabled=False):
        queries, documents = unit(queries.to(dtype)), unit(documents.to(dtype))
        for name, x in (("queries", queries), ("documents", documents)):
            _require(not _may_read(x) or x.isfinite().all(), name, "not finite", "finite")
        rows_at_once = min(n, max(128, 2**24 // size))
        # preallocate: fresh memory for each block would cost as much as its selection
        matrix = queries.new_full((rows_at_once, size + -size % GROUP), -INF)
        for rows in _slices(n, rows_at_once):
            own = positives[rows, None]
            padded = matrix[: len(own)]
            cosines = padded[:, :size]  # (a, N)
            cosines.addmm_(queries[rows], documents.T, beta=0)
            if absolute_margin is not None or relative_margin is not None:
                limit = _limit(cosines.gather(1, own), absolute_margin, relative_margin)
                cosines.masked_fill_(cosines > limit, -INF)
            if labels is not None:
                cosines.masked_fill_(labels[own] == labels, -INF)
            cosines.scatter_(1, own, -INF)
            nearest, index = _largest(padded, k + skip)
            found.append(index.masked_fill(nearest == -INF, -1)[:, skip:])
    index = torch.cat(found)
    return F.pad(index, (0, k - index.shape[1]), value=-1)


def _largest(x, k):
    """Return the k largest entries of each row and their columns, of equal entries the first.
    They stand in the k groups of columns with the largest maxima, so only these are sorted."""
    if x.shape[1] <= GROUP * k:
        values, columns = x.sort(dim=1, descending=True, stable=True)
        return values[:, :k], columns[:, :k]
    if x.shape[1] % GROUP > 0:
        x = F.pad(x, (0, -x.shape[1] % GROUP), value=-INF)
    groups = x.unflatten(1, (-1, GROUP))
    chosen = _largest(groups.amax(2), k)[1].sort(1).values  # (a, k)
    members = groups.gather(1, chosen[:, :, None].expand(-1, -1, GROUP))  # (a, k, GROUP)
    values, places = _largest(members.flatten(1), k)
    return values, GROUP * chosen.gather(1, places // GROUP) + places % GROUP


def _limit(nearest_positive, absolute_margin, relative_margin, t=1):
    """Return the largest cosine, or logit, that the margins allow a negative to have."""
    limit = torch.full_like(nearest_positive, INF)
    if absolute_margin is not None:
        limit = nearest_positive - absolute_margin / t
    if relative_margin is not None:
        relative = nearest_positive - relative_margin * nearest_positive.abs()
        limit = torch.minimum(limit, relative)
    return limit


def group_batches(index: Tensor, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Order samples so that near ones come in one batch, where they are hard negatives.
    index (n, k): neighbours of each sample, other samples as `mine` finds them → order (n,), to be
    cut into batches. It is one group after another, in random order: a random sample, and the
    nearest of its neighbours that are in no group yet, up to size. The CPU does this"""
    _require(size >= 1, "size", size, "at least 1")
    neighbours = index.tolist()
    free, groups = set(range(len(neighbours))), []
    for i in torch.randperm(len(neighbours), generator=generator).tolist():
        if i in free:
            near = dict.fromkeys([i, *neighbours[i]])  # each once
            group = [j for j in near if j in free][:size]
            free.difference_update(group)
            groups.append(torch.tensor(group))
    order = torch.randperm(len(groups), generator=generator).tolist()
    return torch.cat([groups[k] for k in order])


def draw(log_w: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw k different negatives for every anchor, each time candidate j with a probability ∝ w_ij.
    log_w (A, N), up to a constant of each row → indices (A, k): rows[draw(log_w, k)] are
    `negatives` (A, k, D). generator: on log_w's device. Raises ValueError, on a CPU, if a row has
    too few candidates."""
    _require(log_w.is_floating_point(), "log_w", _describe(log_w), "floating: log weights")
    log_w, enough = _upcast(log_w), True
    if _may_read(log_w):
        enough = k <= (log_w > -INF).sum(-1).amin()
    allowed = "at least 1, and at most the number of candidates of weight above 0"
    _require(k >= 1 and enough, "k", k, allowed)
    # the largest of log w_j − log(exponential noise) is j with probability w_j / Σ_l w_l
    noise = torch.empty_like(log_w).exponential_(generator=generator)
    noise = noise.log().clamp_min(-99)  # clamp: −∞ − log 0 would be NaN
    return (log_w - noise).topk(k).indices


# ---- 5. Numerics and checks --------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """Project rows (..., D) to the unit sphere: z = x / ‖x‖.
    Half precision becomes float32. A zero row stays 0, and its gradient passes unchanged. Squares
    of entries must not overflow."""
    x = _upcast(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1)


class _LogSum(torch.autograd.Function):
    """Compute log Σ e^{x + y} along a dimension, and the shares e^{x + y} / Σ e^{x + y}.
    Like torch.logsumexp(x + y), but in fewer passes, and without NaN for a fully masked row."""

    @staticmethod
    def forward(x, y, dim):
        total = x + y
        # one finite entry: a fully masked row then gives the lowest number, and no NaN
        total.select(dim, 0).clamp_min_(torch.finfo(total.dtype).min)
        largest = total.amax(dim)
        # softmax is one fused pass, and its largest share is 1 / Σ e^{total − largest}
        shares = torch.softmax(total, dim, out=total)
        return largest - shares.amax(dim).log(), shares

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.dim = inputs
        ctx.shapes = x.shape, y.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])  # an output, so that it has second derivatives

    @staticmethod
    def backward(ctx, by_sum, by_shares):
        (shares,) = ctx.saved_tensors
        slope = 0 if by_sum is None else by_sum.unsqueeze(ctx.dim)
        if by_shares is not None:
            slope = slope + by_shares - (by_shares * shares).sum(ctx.dim, keepdim=True)
        by_total = shares * slope
        by_x, by_y = (by_total.sum_to_size(shape) for shape in ctx.shapes)
        return by_x, by_y, None


def log_sum(x: Tensor, y: Tensor | None = None, dim: int = -1) -> Tensor:
    """Compute log Σ_j e^{x_j + y_j}, in float32 at least.
    A fully masked row gives the lowest number; one of a single x gives x."""
    x = _upcast(x)
    if y is None:
        if x.shape[dim] == 1:
            return x.squeeze(dim)
        y = x.new_zeros(())
    return _LogSum.apply(x, _upcast(y), dim)[0]


def _upcast(x):
    """Convert to float32 at least: half-precision sums are too inaccurate."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _threshold(x, alpha):
    """Return the ⌈αN⌉-th largest entry of every row, (A, 1); N counts its entries above −∞."""
    billionths = int(alpha * 10**9)  # in floating point 0.07 · 100 exceeds 7, its ceiling is 8

    def kept_of(count):
        return (count * billionths + 10**9 - 1) // 10**9

    most = max(1, kept_of(x.shape[-1]))
    kept = kept_of((x > -INF).sum(-1, keepdim=True)).clamp_min(1)
    return x.topk(most).values.gather(-1, kept - 1)


def _is_concrete(x):
    """Whether a tensor has values that the host can read: not while compiling or capturing."""
    if torch.compiler.is_compiling() or x.is_meta or hasattr(x, "fake_mode"):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _may_read(x):
    """Whether the host may read values: on a CPU, where that is free. A GPU would be waited for."""
    return x.device.type == "cpu" and _is_concrete(x)


def _check_result(name, result, shape):
    fits = torch.is_tensor(result) and result.shape == shape
    _require(fits, name, f"a function to {_describe(result)}", f"one to a tensor {tuple(shape)}")


class InvalidArgument(ValueError):
    """An argument is not what it may be."""


class _NotFinite(InvalidArgument):
    """Embeddings have NaN or inf: a training loop tells this from other errors."""


def _require(valid, name, got, allowed):
    if not valid:
        raise InvalidArgument(f"{name} is {got}; it must be {allowed}")


def _check_finite(views, negatives):
    named = {f"views[{i}]": view for i, view in enumerate(views)}
    if negatives is not None:
        named["negatives"] = negatives
    for name, x in named.items():
        # a finite sum says that all are finite, much faster; but a sum can also overflow
        if not x.sum().isfinite() and not x.isfinite().all():
            raise _NotFinite(f"{name} is not finite: it has NaN or inf; it must be finite")


@dataclasses.dataclass
class Options:
    """Hold the settings of a loss: the default of each, and its range. See `contrastive_loss`."""

    loss: str = "simclr"
    weights: str | Callable | None = None  # None: that of the loss, as for the next two
    objective: str | Callable | None = None
    tau_plus: float | None = None
    temperature: float | Tensor = 0.5
    beta: float = 1.0
    alpha: float = 0.1
    epsilon: float = 0.3
    cost: str = "sqeuclidean"
    kappa: float = 0.0
    margin: float = 0.0
    absolute_margin: float | None = None
    relative_margin: float | None = None
    margin_columns: int | None = None
    normalize: bool = True
    detach_weights: bool | None = None
    debias: str = "published"
    reduction: str = "mean"
    block_size: int | None = None

    def __post_init__(self):
        self._check_name("loss", PRESETS)
        parts = zip(("weights", "objective", "tau_plus"), PRESETS[self.loss], strict=True)
        for name, value in parts:
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.detach_weights is None:
            self.detach_weights = isinstance(self.weights, str) and self.weights == "transported"
        for name, allowed in CHOICES.items():
            self._check_name(name, allowed)
        for name, (low, high, allowed) in RANGES.items():
            self._check_number(name, low, high, allowed)
        for name in ("block_size", "margin_columns"):
            value = getattr(self, name)
            counts = value is None or isinstance(value, numbers.Integral) and value >= 0
            _require(counts, name, repr(value), "a whole number of at least 0, or None")
        if self.objective not in DEBIASED:
            self.tau_plus = 0.0
        known = self.objective in DEBIASED and self.weights in EXACTLY_DEBIASED
        allowed = f"'published'; 'exact' is for weights {', '.join(EXACTLY_DEBIASED)}, "
        allowed += f"objectives {', '.join(DEBIASED)}"
        _require(self.debias == "published" or known, "debias", repr(self.debias), allowed)

    def _check_name(self, name, allowed):
        value, wanted = getattr(self, name), f"one of {', '.join(allowed)}"
        known = isinstance(value, str) and value in allowed
        if name in ("weights", "objective"):
            known, wanted = known or callable(value), f"{wanted}, or a function"
        _require(known, name, repr(value), wanted)

    def _check_number(self, name, low, high, allowed):
        value = getattr(self, name)
        if value is None and name in ("absolute_margin", "relative_margin"):
            return
        if name == "temperature" and torch.is_tensor(value) and value.ndim == 0:
            value = value.item() if _may_read(value) else 1.0
        if not (isinstance(value, numbers.Real) and low <= value < high):
            # only here: compiled code has no repr of a number that varies
            _require(False, name, repr(value), f"a number {allowed}")


LEAST = math.ulp(0.0)  # the smallest number above 0
FINITE = (math.nextafter(-INF, 0), INF, "that is finite")
CHOICES = {
    "weights": WEIGHTS,
    "objective": OBJECTIVES,
    "cost": ("sqeuclidean", "exp"),
    "debias": ("published", "exact"),
    "reduction": ("mean", "sum", "none"),
}
RANGES = {  # option: from, below, in words
    "temperature": (LEAST, INF, "above 0, or a tensor without dimensions"),
    "tau_plus": (0, 1, "in [0, 1)"),
    "beta": (0, 3e8, "in [0, 3e8)"),  # its product with _NONE stays finite
    "alpha": (LEAST, math.nextafter(1, 2), "in (0, 1]"),
    "epsilon": (1e-37, INF, "of at least 1e-37"),  # above 0 in float32, too
    "kappa": FINITE,
    "margin": (0, INF, "of at least 0"),
    "absolute_margin": FINITE,
    "relative_margin": FINITE,
}
SETTINGS = [field.name for field in dataclasses.fields(Options)]
PER_CALL = "negatives positive_index negative_mask labels group return_stats".split()


def _options_of(caller, given):
    """Check the options of a call, and decide what is left open."""
    for name in given:
        if name not in SETTINGS:
            known = ", ".join(SETTINGS + PER_CALL)
            raise TypeError(f"{caller}() has no option {name!r}; it has {known}")
    return Options(**given)


def _check_tensors(views, negatives, positive_index, negative_mask, labels, group, options):
    """Check that views, negatives, positive_index, negative_mask and labels fit together."""
    b, d = _check_views(views, negatives, group)
    if options.margin_columns is not None:
        _require(negatives is not None, "margin_columns", "given", "None without negatives")
    ranks = 1
    if group is not None:
        known = isinstance(group, distributed.ProcessGroup)
        _require(known, "group", repr(group), "None or a torch.distributed process group")
        ranks = distributed.get_world_size(group)
    a, n = b * len(views), ranks * b * len(views)
    shared = True
    if negatives is not None:
        _check_negatives(negatives, b, d, options.weights)
        a, n, shared = b, negatives.shape[-2], negatives.ndim == 2
    if positive_index is not None:
        index = torch.as_tensor(positive_index)
        whole = not (index.is_floating_point() or index.dtype == torch.bool)
        fits = negatives is not None and index.shape == (b,) and whole
        allowed = f"({b},) whole numbers, rows of negatives="
        _require(fits, "positive_index", _describe(index), allowed)
        _check_rows("positive_index", index, n)
    if negative_mask is not None:
        mask = torch.as_tensor(negative_mask)
        fits = mask.dtype == torch.bool and mask.shape in ((a, n), (n,))
        allowed = f"boolean ({a}, {n}), of each anchor and candidate, or ({n},)"
        _require(fits, "negative_mask", _describe(mask), allowed)
    if labels is not None:
        shape = tuple(torch.as_tensor(labels).shape)
        wanted, allowed = (b,), f"({b},)"
        if negatives is not None:
            wanted = (b + n,)
            allowed = f"({b} + {n},): of the samples, then of the rows of negatives (K, D)"
        _require(shared, "labels", "given", "None with negatives (B, K, D)")
        _require(shape == wanted, "labels", f"of shape {shape}", allowed)


def _check_rows(name, index, n):
    """Check, on a CPU, that numbers of rows lie between 0 and n − 1."""
    if _may_read(index) and len(index) > 0:
        low, high = index.min().item(), index.max().item()
        _require(low >= 0 and high < n, name, f"from {low} to {high}", f"from 0 to {n - 1}")


def _check_views(views, negatives, group):
    """Check the views → B, D."""
    got = [_describe(view) for view in views]
    tensors = all(torch.is_tensor(view) and view.is_floating_point() for view in views)
    fits = tensors and len(views) >= 2 and len({view.shape for view in views}) == 1
    fits = fits and views[0].ndim == 2 and views[0].shape[1] > 0
    wanted = "at least two floating tensors (B, D) of one shape, each an argument of its own"
    _require(fits, "views", got, wanted)
    b, d = views[0].shape
    least = 2 if negatives is None and group is None else 1
    _require(b >= least, "views", got, "of 2 samples or more: one has no negative")
    return b, d


def _check_negatives(negatives, b, d, weights):
    fits = torch.is_tensor(negatives) and negatives.is_floating_point()
    fits = fits and negatives.numel() > 0 and negatives.ndim in (2, 3)
    fits = fits and negatives.shape[-1] == d and (negatives.ndim == 2 or len(negatives) == b)
    wanted = f"a floating tensor (K, {d}) or ({b}, K, {d})"
    _require(fits, "negatives", _describe(negatives), wanted)
    wanted = "another rule: with negatives (B, K, D) anchors share no candidate"
    _require(negatives.ndim == 2 or weights != "transported", "weights", repr(weights), wanted)


def _describe(x):
    if torch.is_tensor(x):
        return f"{x.dtype} {tuple(x.shape)}"
    return type(x).__name__


# ---- 6. Large batches and ranks: the same numbers in linear memory, over processes -------------
# Skip this on a first reading. The products of a large batch do not fit into memory, so `answer`
# gets some anchors at a time, and the gradient of each block is computed as soon as its losses are.


def _evaluate(pairs, options, potential):
    """Compute the losses of all anchors, (A,), or their mean or sum."""
    size = _block_size(pairs, options)
    if pairs.candidates.ndim == 3:
        size = 0  # these rows take D times the memory of their products: blocks would save little
    blocks = _slices(len(pairs.anchors), size)
    own_function = callable(options.weights) or callable(options.objective)
    if size > 0 and torch.is_grad_enabled() and options.reduction != "none" and not own_function:
        total = _in_blocks(pairs, options, potential, size)
        return total / len(pairs.anchors) if options.reduction == "mean" else total

    def losses_of(rows, potential, *tensors):
        some = _Pairs._make(tensors).of(rows)
        return answer(some, some.products(), options, potential).losses

    if size > 0 and torch.is_grad_enabled():
        # "none": the gradient of each loss is known in the backward pass alone, and only autograd
        # sees the parameters of a function: so the backward pass computes each block again
        again = {"use_reentrant": False, "preserve_rng_state": own_function}
        losses_of = functools.partial(checkpoint, losses_of, **again)
    parts = [losses_of(rows, potential, *pairs) for rows in blocks]
    losses = torch.cat(parts)
    if options.reduction == "none":
        return losses
    return losses.mean() if options.reduction == "mean" else losses.sum()


def _block_size(pairs, options):
    """Choose the anchors in a block, for a CPU's cache or to keep a GPU busy; 0: all at once."""
    if torch._C._are_functorch_transforms_active():  # torch.func needs plain autograd
        return 0
    if options.block_size is not None:
        return options.block_size
    on_cpu, columns = pairs.anchors.device.type == "cpu", pairs.candidates.shape[-2]
    if len(pairs.anchors) * columns <= (2**18 if on_cpu else 2**24):
        return 0
    return max(64, (2**20 if on_cpu else 2**25) // columns)


def _slices(n, size):
    if size == 0:
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, n, size)]


# Fresh pages of memory would cost more than the arithmetic of a block. glibc keeps freed memory for
# the next block, up to twice the largest piece ever freed: this one, freed at once, makes it 62 MB.
torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")

# What both operators take: the tensors of `_Pairs`, and every option of a rule or an objective.
TENSORS = (
    "Tensor anchors, Tensor candidates, Tensor pos, Tensor own, Tensor? mask, Tensor? labels, "
    "Tensor? candidate_labels, Tensor t"
)
VALUES = (
    "str weights, str objective, float tau_plus, float beta, float alpha, float epsilon, str cost, "
    "float kappa, float margin, float? absolute_margin, float? relative_margin, "
    "int? margin_columns, bool detach_weights, str debias"
)
NAMESPACE = __name__.replace(".", "_")  # a project may hold several copies of this file


def _operands(pairs, options):
    """Return the tensors and the values of options that an operator takes."""
    names = [word.split()[-1] for word in VALUES.split(", ")]
    values = {name: getattr(options, name) for name in names}
    if not torch.is_tensor(pairs.t):
        pairs = pairs._replace(t=pairs.anchors.new_full((), pairs.t))
    return pairs, values


def _in_blocks(pairs, options, potential, size):
    """Compute Σ_i ℓ_i; what is stored for its gradient has the size of the embeddings."""
    tensors, values = _operands(pairs, options)
    if potential is None:
        potential = tensors.t.new_zeros(())  # not used
    learns = pairs.candidates.requires_grad
    return _blocks(*tensors, potential, size=size, learns_candidates=learns, **values)[0]


@torch.library.custom_op(
    f"{NAMESPACE}::blocks",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor potential, *, SymInt size, bool learns_candidates, {VALUES})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _blocks(*tensors, size, learns_candidates, **values):
    """Compute Σ_i ℓ_i block by block, and its gradients in the five tensors that have one.
    An operator of its own: compiled code calls it, and need not unroll its blocks."""
    pairs, potential, options = _Pairs._make(tensors[:-1]), tensors[-1], Options(**values)
    anchors, candidates = pairs.anchors, pairs.candidates
    by_anchors, by_candidates = torch.empty_like(anchors), torch.zeros_like(candidates)
    by_pos, by_t = torch.empty_like(pairs.pos), torch.zeros_like(pairs.t)
    by_potential, total = torch.zeros_like(potential), torch.zeros_like(pairs.t)
    # preallocate: fresh memory for each block would cost more than its arithmetic
    matrix = anchors.new_empty(min(size, len(anchors)), len(candidates))
    for rows in _slices(len(anchors), size):
        some = pairs.of(rows)
        neg = some.products(matrix[: len(some.anchors)])  # (a, N)
        value, slopes = _differentiate(some, neg, options, potential)
        by_neg, by_pos[rows] = slopes["neg"], slopes["pos"]
        total += value
        by_t += slopes["t"]
        by_potential += slopes["potential"]
        torch.mm(by_neg, candidates, out=by_anchors[rows])
        if learns_candidates:
            by_candidates.addmm_(by_neg.T, some.anchors)
    return total, by_anchors, by_candidates, by_pos, by_t, by_potential


def _differentiate(some, neg, options, potential):
    """Return the sum of the losses of some anchors, and its gradient by the names of its inputs."""
    with torch.inference_mode(False), torch.enable_grad():  # an operator begins without autograd
        leaves = {"neg": neg, "pos": some.pos, "t": some.t, "potential": potential}
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        some = some._replace(pos=leaves["pos"], t=leaves["t"])
        value = answer(some, leaves["neg"], options, leaves["potential"]).losses.sum()
        slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return value.detach(), dict(zip(leaves, slopes, strict=True))


@_blocks.register_fake
def _(anchors, candidates, pos, own, mask, labels, candidate_labels, t, potential, **_):
    return tuple(torch.empty_like(x) for x in (t, anchors, candidates, pos, t, potential))


def _keep_gradients(ctx, inputs, keyword_only_inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, by_total, *_):
    if torch.is_grad_enabled():  # under create_graph=True alone
        raise RuntimeError("to differentiate this loss twice, give it block_size=0")
    slopes = [by_total * slope for slope in ctx.saved_tensors]
    by_anchors, by_candidates, by_pos, by_t, by_potential = slopes
    return by_anchors, by_candidates, by_pos, None, None, None, None, by_t, by_potential


_blocks.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def _potential(pairs, group, options):
    """Find the potential g (N,) of the coupling of the candidates with the anchors of all ranks."""
    gathered = {name: gather(getattr(pairs, name), group) for name in PER_ANCHOR}
    everyone = pairs._replace(**gathered)
    if torch.is_grad_enabled() and not options.detach_weights:
        return _couple(everyone, options)
    tensors, values = _operands(everyone, options)
    if callable(options.objective):
        values["objective"] = "nce"  # a function acts on logits, too
    detached = [None if x is None else x.detach() for x in tensors]
    return _couple_detached(*detached, **values)


def _couple(pairs, options):
    """Couple anchors and candidates: question 1 as in `answer`, then Sinkhorn on −C/ε → g (N,)."""

    def log_kernel(rows):
        some = pairs.of(rows)
        neg = some.products()
        _who_(neg, some, options)  # masks neg
        logits = _logits(neg, pairs.t, options)
        return _log_kernel(logits, options.epsilon, options.cost, options.kappa, pairs.t)

    a, n = len(pairs.anchors), len(pairs.candidates)
    blocks = _slices(a, max(1, 2**20 // n))
    if torch.is_grad_enabled() or a * n <= 2**24:
        stored = [log_kernel(rows) for rows in blocks]
        return sinkhorn(lambda: stored)[1]
    return sinkhorn(lambda: map(log_kernel, blocks))[1]  # again in each step


@torch.library.custom_op(
    f"{NAMESPACE}::couple_detached", mutates_args=(), schema=f"({TENSORS}, *, {VALUES}) -> Tensor"
)
def _couple_detached(*tensors, **values):
    with torch.no_grad():
        return _couple(_Pairs._make(tensors), Options(**values))


@_couple_detached.register_fake
def _(anchors, candidates, *_, **__):
    return anchors.new_empty(len(candidates))


def _as_one_process(value, reduction, group):
    """Return the loss over all ranks, with a gradient that is right once DDP has averaged it.
    `gather` sums gradients over ranks, and DDP divides by the number of ranks. That is right for a
    mean. A sum would come out too small by this number, so it is multiplied by it first."""
    ranks = distributed.get_world_size(group)
    total = value.detach().clone()
    distributed.all_reduce(total, group=group)
    if reduction == "mean":
        total = total / ranks
    else:
        value = ranks * value
    return value + (total - value).detach()  # the value of total, the gradient of value


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x, group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # under create_graph=True alone
            raise RuntimeError("a loss over ranks cannot be differentiated twice")
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        ranks, rank = distributed.get_world_size(ctx.group), distributed.get_rank(ctx.group)
        return grad.chunk(ranks)[rank], None


def gather(x: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """Concatenate the rows of all ranks, in their order; the gradient is summed over them.
    With negatives=gather(rows, group), positive_index=rank * len(rows) + i, the rows of each rank
    are candidates everywhere; i (B,) are the places in this rank's rows that show its samples. The
    mean over ranks of the gradients is that of one process. All ranks need equally many rows.
    Without a group: x itself."""
    if group is None or x is None:
        return x
    return _Gather.apply(x.contiguous(), group)


# ================================================================================================
# Above is the loss: copy that much for a training loop of your own. Below, encoders are trained.

__all__ += ["Encoder", "MemoryBank", "Game", "SimCLR", "Bank", "Queue", "CLAE", "DiffHard"]
__all__ += ["Training", "annealed_beta", "lead_in", "in_micro_batches"]
# ---- 7. Views: random crops, flips and colours of a whole batch, on its device, with a gradient


def view(
    images: Tensor,
    generator: torch.Generator | None = None,
    area: tuple = (0.2, 1.0),
    ratio: tuple = (3 / 4, 4 / 3),
    flip: float = 0.5,
    jitter: float = 0.8,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
    gray: float = 0.2,
    blur: float = 0.0,
    sigma: tuple = (0.1, 2.0),
) -> Tensor:
    """Draw one random view of every image: a resized crop, a flip, colour jitter, grayscale, blur.
    images (B, 3, H, W), bytes or floats in [0, 1] → floats in [0, 1] of the same shape, float64 for
    float64 and float32 for all others. The view has a gradient in the images.
    generator    on the images' device; a view is one draw, so the generator's state replays it
    area         range of the crop's share of the image
    ratio        range of the crop's width / height, each as a share of the image's; the crop is
                 clipped to the image
    flip, jitter, gray, blur    probabilities of a mirror image, colour jitter, no colour, a blur
    brightness, contrast, saturation    x: each factor is drawn from [1 − x, 1 + x]
    hue          x: the turn of the colour circle is drawn from [−x, x], 1 is a full turn
    sigma        range of the blur's standard deviation, in pixels
    Defaults are those of [6] for 32 × 32 images, but area starts at 0.2, not 0.08. Colour is one
    affine map of luma and chroma, so its parts commute and the result is clipped once.
    Ref: [6] App. A; [3] 3.1"""
    fits = images.ndim == 4 and images.shape[1] == 3
    _require(fits, "images", _describe(images), "(B, 3, H, W)")
    x = _floats(images)
    draws = torch.rand(len(x), 13, generator=generator, device=x.device, dtype=torch.float32)
    draws = draws.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):  # 16 bits cannot tell pixels apart
        x = _crop(x, draws[:, :5], area, ratio, flip)
        changes = jitter, brightness, contrast, saturation, hue, gray
        x = _recolour(x, draws[:, 5:11], *changes)
        if blur > 0:
            x = _blur(x, _between(draws[:, 11], *sigma), draws[:, 12] < blur)
    return x.clamp(0, 1)


def _crop(x, draws, area, ratio, flip):
    """Cut a crop out of each image, and resize and mirror it: say where each pixel comes from."""
    for_area, for_ratio, for_x, for_y, for_flip = draws.unbind(1)  # (B,) each
    share = _between(for_area, *area)
    aspect = _between(for_ratio, math.log(ratio[0]), math.log(ratio[1])).exp()
    width = (share * aspect).sqrt().clamp_max(1)  # 1 is the whole image
    height = (share / aspect).sqrt().clamp_max(1)
    center_x = (1 - width) * (2 * for_x - 1)  # coordinates go from −1 to 1
    center_y = (1 - height) * (2 * for_y - 1)
    mirror = 1 - 2 * (for_flip < flip).to(x.dtype)  # −1 for a mirror image
    zero = torch.zeros_like(width)
    theta = torch.stack([width * mirror, zero, center_x, zero, height, center_y], 1)
    grid = F.affine_grid(theta.view(-1, 2, 3), x.shape, align_corners=False)  # (B, H, W, 2)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _recolour(x, draws, jitter, brightness, contrast, saturation, hue, gray):
    """Go from rgb to yiq, scale and turn chroma, and go back: a matrix and an offset an image."""
    for_jitter, for_light, for_contrast, for_colour, for_hue, for_gray = draws.unbind(1)
    changed = (for_jitter < jitter).to(x.dtype)  # 1 or 0
    light = 1 + changed * _between(for_light, -brightness, brightness)
    spread = 1 + changed * _between(for_contrast, -contrast, contrast)
    colour = 1 + changed * _between(for_colour, -saturation, saturation)
    colour = colour * (for_gray >= gray)
    angle = changed * _between(for_hue, -hue, hue) * 2 * math.pi
    cos = angle.cos() * colour
    sin = angle.sin() * colour
    one, zero = torch.ones_like(cos), torch.zeros_like(cos)
    chroma = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
    to_yiq, to_rgb = _colour_maps(x.device, x.dtype)
    mean_luma = (x.mean((2, 3)) @ to_yiq[0]) * light  # (B,): contrast keeps it
    pixels = (to_rgb @ chroma @ to_yiq) @ x.flatten(2)  # (B, 3, H·W)
    pixels = (light * spread)[:, None, None] * pixels + ((1 - spread) * mean_luma)[:, None, None]
    return pixels.view_as(x)


def _floats(images):  # half precision is too coarse for the coordinates of pixels
    if not images.is_floating_point():
        return images / 255
    return _upcast(images)


def _between(draw, low, high):
    return low + (high - low) * draw


@functools.lru_cache
def _colour_maps(device, dtype):
    """Make two maps (3, 3): from rgb to luma and two axes of chroma, and back.
    Each device and dtype gets them once, as a copy to a device makes the host wait."""
    rows = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
    with torch.inference_mode(False):  # tensors made in inference mode could not serve training
        to_yiq = torch.tensor(rows, device=device, dtype=torch.float32)
        return to_yiq.to(dtype), torch.linalg.inv(to_yiq).to(dtype)


def _blur(x, deviation, chosen):
    """Blur the chosen images, each with its own deviation in pixels, one axis after the other."""
    height, width = x.shape[2:]
    radius = max(1, min(height, width) // 20)  # a kernel a tenth as wide as the image: [6]
    steps = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.softmax(-((steps / deviation[:, None]) ** 2) / 2, 1)  # (B, 2·radius + 1)
    kernel = torch.where(chosen[:, None], kernel, (steps == 0).to(x.dtype))
    weights = kernel[:, :, None, None, None].unbind(1)  # (B, 1, 1, 1) each
    x = F.pad(x, (radius,) * 4, mode="reflect")
    x = sum(weight * x[:, :, k : k + height] for k, weight in enumerate(weights))
    return sum(weight * x[:, :, :, k : k + width] for k, weight in enumerate(weights))


# ---- 8. Encoders: a backbone and a projection head; the memory of embeddings; an optimizer's step


class Encoder(nn.Module):
    """Map images (B, 3, H, W) in [0, 1] to features (B, self.features) and embeddings (B, dim).
    name: "small" (four convolutions, for a CPU), "resnet18" or "resnet50" (these need torchvision);
    dim: of the embeddings; size: H = W in pixels, an even number for "small". Embeddings are not
    normalised. After training, use the features. For images of at most 64 pixels, torchvision's
    networks get a 3 × 3 first convolution and no max-pooling. Ref: [6] App. B.9; [1] App. C"""

    def __init__(self, name: str = "small", dim: int = 128, size: int = 32):
        super().__init__()
        self.name, self.dim, self.size = name, dim, size
        known = ("small", "resnet18", "resnet50")
        _require(name in known, "name", name, "small, resnet18 or resnet50")
        if name == "small":
            _require(size % 2 == 0, "size", size, "even for the small encoder")
            layers = [nn.PixelUnshuffle(2)]  # 2 × 2 pixels at once: half the work
            for before, after, stride in ((12, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 1)):
                convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.features = 256
        else:
            from torchvision import models

            self.backbone = getattr(models, name)()
            self.features = self.backbone.fc.in_features
            self.backbone.fc = nn.Identity()
            if size <= 64:
                self.backbone.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
                self.backbone.maxpool = nn.Identity()
        hidden = max(self.features, 2 * dim)
        first, last = nn.Linear(self.features, hidden), nn.Linear(hidden, dim)
        self.head = nn.Sequential(first, nn.ReLU(inplace=True), last)

    def forward(self, images: Tensor) -> tuple:
        features = self.backbone(4 * images - 2)  # about mean 0 and variance 1
        return features, self.head(features)


class MemoryBank(nn.Module):
    """Remember unit rows: row_i ← m row_i + (1 − m) z_i, projected back to the unit sphere.
    rows: the initial ones (K, D), such as the untrained encoder's embeddings; random rows would be
    noise. momentum: m in [0, 1). The buffer `rows` has no gradient. Ref: [4] 5.1; [8]"""

    def __init__(self, rows: Tensor, momentum: float = 0.5):
        super().__init__()
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        self.momentum = momentum
        self.register_buffer("rows", unit(rows.detach()))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.long, device=rows.device))

    @torch.no_grad()
    def update(self, index: Tensor, z: Tensor) -> None:
        """Move the rows at index (B,), each at most once, towards embeddings z (B, D)."""
        self._check(z)
        _require(index.shape == (len(z),), "index", _describe(index), f"({len(z)},), as z has rows")
        moved = self.momentum * self.rows[index] + (1 - self.momentum) * unit(z)
        self.rows[index] = unit(moved).to(self.rows.dtype)

    @torch.no_grad()
    def push(self, z: Tensor) -> None:
        """Replace the oldest B rows by embeddings z (B, D): first in, first out."""
        self._check(z)
        size = len(self.rows)
        z = unit(z)[-size:]  # two new rows for one place would be ambiguous
        places = (self.oldest + torch.arange(len(z), device=z.device)) % size
        self.rows[places] = z.to(self.rows.dtype)
        self.oldest.add_(len(z)).remainder_(size)

    def _check(self, z):
        d = self.rows.shape[1]
        _require(z.ndim == 2 and z.shape[1] == d, "z", _describe(z), f"(B, {d})")


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, momentum: float) -> None:
    """Move parameters and buffers towards another network's: θ' ← m θ' + (1 − m) θ.
    Both networks have the same layers. Integers are copied. Ref: [8]; [3] Eq. 7"""
    leaders = leader.state_dict()
    for name, value in follower.state_dict().items():
        if value.is_floating_point():
            value.lerp_(leaders[name], 1 - momentum)
        else:
            value.copy_(leaders[name])


def _descend(loss, optimizer, name, group=None, read=False):
    """Step an optimizer, gradients averaged over ranks.
    FloatingPointError if the loss of `name` is not finite. To read it, the host waits for a GPU: so
    on a GPU only steps with `read` check it."""
    if (read or _may_read(loss)) and not loss.isfinite():
        raise FloatingPointError(f"the loss of the {name} is {loss.item()}")
    with torch.autocast(loss.device.type, enabled=False):  # autocast is for forward passes
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            _average_gradients(optimizer, group)
        optimizer.step()
    torch.clear_autocast_cache()  # it holds the weights of before; later calls need the new ones


def _average_gradients(optimizer, group):
    """Average gradients over ranks, all in one tensor: one long message is faster than many."""
    gradients = []
    for part in optimizer.param_groups:
        gradients += [x.grad for x in part["params"] if x.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat, group=group)
    flat /= distributed.get_world_size(group)
    means = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


# ---- 9. Generators: hard samples that are made instead of found, by a game against the encoder


class _Residual(nn.Module):
    """Add a shortcut: x → residual(x) + shortcut(x)."""

    def __init__(self, residual, shortcut):
        super().__init__()
        self.residual = nn.Sequential(*residual)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x):
        return self.residual(x) + self.shortcut(x)


def _conv(before, after, kernel=3):
    return spectral_norm(nn.Conv2d(before, after, kernel, padding=kernel // 2))


def _up(before, after):
    """Double the side: [9] Fig. 15(b), without class labels."""
    double = nn.Upsample(scale_factor=2)
    residual = [nn.BatchNorm2d(before), nn.ReLU(), double, _conv(before, after)]
    residual += [nn.BatchNorm2d(after), nn.ReLU(), _conv(after, after)]
    return _Residual(residual, [_conv(before, after, 1), double])


def _down(before, after, first=False, last=False):
    """Halve the side, but not in the last block: [9] Fig. 15(c).
    The first block sees the image, and a ReLU before it would cut off half of the image."""
    pool = nn.Identity() if last else nn.AvgPool2d(2)
    residual = [_conv(before, after), nn.ReLU(), _conv(after, after), pool]
    if not first:
        residual.insert(0, nn.ReLU())
    return _Residual(residual, [pool, _conv(before, after, 1)])


def _widths(size, width):
    """List the channels at the sides size, size / 2, …, 4: doubled, up to four times width."""
    valid = size >= 8 and size.bit_count() == 1
    _require(valid, "size", size, "a power of two of at least 8, such as 32")
    _require(width >= 1, "width", width, "at least 1")
    return [width * min(2**k, 4) for k in range(size.bit_length() - 2)]


class Generator(nn.Module):
    """Map latents (B, latent) from N(0, I) to images (B, 3, size, size) in [0, 1], float32.
    size: a power of two, at least 8; width: channels at full size, 16 for a CPU, 64 for a GPU.
    Residual blocks double the side from 4 × 4 on. Weights are spectrally normalised.
    Ref: [9] Fig. 15; [3] 4"""

    def __init__(self, size: int = 32, width: int = 16, latent: int = 64):
        super().__init__()
        _require(latent >= 1, "latent", latent, "at least 1")
        self.latent = latent
        widths = _widths(size, width)[::-1]
        self.first = spectral_norm(nn.Linear(latent, 16 * widths[0]))
        blocks = [_up(before, after) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks, nn.BatchNorm2d(width), nn.ReLU(), _conv(width, 3))

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return _upcast(self.blocks(x)).sigmoid()


class Discriminator(nn.Module):
    """Score images (B, 3, size, size) in [0, 1] → (B,), float32: a higher score looks more real.
    size and width as of `Generator`. Residual blocks halve the side to 4 × 4. Ref: [9] Fig. 15"""

    def __init__(self, size: int = 32, width: int = 16):
        super().__init__()
        widths = _widths(size, width)
        blocks = [_down(3, widths[0], first=True)]
        blocks += [_down(before, after) for before, after in pairwise(widths[:-1])]
        blocks.append(_down(widths[-2], widths[-1], last=True))
        self.blocks = nn.Sequential(*blocks, nn.ReLU())
        self.last = spectral_norm(nn.Linear(widths[-1], 1))

    def forward(self, images: Tensor) -> Tensor:
        x = _upcast(self.blocks(2 * images - 1)).sum((2, 3))  # (B, channels)
        with torch.autocast(x.device.type, enabled=False):
            return self.last(x)[:, 0]


def hinge_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Compute L_D = E max(0, 1 − D(x)) + E max(0, 1 + D(G(z))) from scores (B,). Ref: [3] Eq. 5"""
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def hinge_generator(fake: Tensor) -> Tensor:
    """Compute L_G = −E D(G(z)) from scores (B,). Ref: [3] Eq. 5 leaves f_G open; −x as in [9]"""
    return -fake.mean()


def diversity(images: Tensor, real: Tensor) -> Tensor:
    """Compare distances to the nearest other image: the mean of generated ones / that of real ones.
    images, real (B, 3, H, W), B ≥ 2. 1: as diverse as the real ones; 0: all alike. Cost: B² 3HW"""
    return _mean_nearest_distance(images) / _mean_nearest_distance(real)


def _mean_nearest_distance(images):
    rows = _upcast(images.detach()).flatten(1)
    distances = torch.cdist(rows, rows).fill_diagonal_(INF)
    return distances.amin(1).mean()


class Game(nn.Module):
    """Play against the encoder: G makes samples that are hard for it, D keeps them looking real.
    pairs       a latent gives two images, G(z) and G_ema(z), each other's positives. False: one
    ascent      G ascends the encoder's loss. False: it plays against D alone; without pairs, too,
                this is [3]'s "CL-GAN"
    momentum    m of G_ema, in [0, 1)
    pretrain    epochs of G and D alone before the encoder begins
    every       encoder's steps for each of the generator's
    batch_size  images of each kind in a step of D, at least 2
    lr          learning rate of Adam for the hinge losses; ascent_lr: for the ascent
    Its state_dict holds networks, optimizers and `taken`. The numbers suit short runs on a CPU.
    Ref: [3] 3.1, 3.2"""

    def __init__(
        self,
        size: int = 32,
        width: int = 16,
        latent: int = 64,
        pairs: bool = True,
        ascent: bool = True,
        momentum: float = 0.99,
        pretrain: int = 10,
        every: int = 4,
        batch_size: int = 64,
        lr: float = 4e-4,
        ascent_lr: float = 1e-4,
    ):
        super().__init__()
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        _require(pretrain >= 0, "pretrain", pretrain, "at least 0")
        _require(every >= 1, "every", every, "at least 1")
        _require(batch_size >= 2, "batch_size", batch_size, "at least 2")
        self.size, self.pairs, self.ascent, self.momentum = size, pairs, ascent, momentum
        self.pretrain, self.every, self.batch_size = pretrain, every, batch_size
        self.taken = 0  # steps of the encoder
        self.G = Generator(size, width, latent)
        self.D = Discriminator(size, width)
        self.G_ema = copy.deepcopy(self.G).requires_grad_(False)
        self.to(memory_format=torch.channels_last)
        betas = (0.0, 0.999)
        self.optimizers = {
            "G": torch.optim.Adam(self.G.parameters(), lr, betas),
            "D": torch.optim.Adam(self.D.parameters(), lr, betas),
            "ascent": torch.optim.Adam(self.G.parameters(), ascent_lr, betas, maximize=True),
        }

    def latents(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw latents (n, latent) from N(0, I)."""
        device = self.G.first.bias.device
        return torch.randn(n, self.G.latent, generator=generator, device=device)

    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple:
        """Generate n images: pairs G(z_k), G_ema(z_k) of n // 2 latents, or n images of G alone.
        → images (n, 3, size, size) in [0, 1], with a gradient in G and none in G_ema; the index of
        each image's latent (n,). Pairs of an odd n have one image fewer. Ref: [3] Eq. 6"""
        z = self.latents(n // 2 if self.pairs else n, generator)
        index = torch.arange(len(z), device=z.device)
        if not self.pairs:
            return self.G(z), index
        return torch.cat([self.G(z), self.G_ema(z)]), index.repeat(2)

    def imitate(
        self, images: Tensor, generator: torch.Generator | None = None, read: bool = False
    ) -> dict:
        """Step D on real images (B, 3, size, size) and generated ones, then step G against it.
        → figures {"d_loss", "g_loss", "diversity"}. read: as in `_descend`. Ref: [3] Eq. 5"""
        images = _floats(images[: self.batch_size])
        fake = self.G(self.latents(len(images), generator))
        shape = f"of shape {tuple(images.shape)}"
        _require(images.shape == fake.shape, "images", shape, f"of shape {tuple(fake.shape)}")
        d_loss = hinge_discriminator(self.D(images), self.D(fake.detach()))
        _descend(d_loss, self.optimizers["D"], "discriminator", read=read)
        self.D.requires_grad_(False)  # D only passes the gradient on
        g_loss = hinge_generator(self.D(fake))
        self.D.requires_grad_(True)
        _descend(g_loss, self.optimizers["G"], "generator", read=read)
        figures = {"d_loss": d_loss.detach(), "g_loss": g_loss.detach()}
        return figures | {"diversity": diversity(fake, images)}

    def follow(self) -> None:
        """Let G_ema follow G. Ref: [3] Eq. 7"""
        follow(self.G_ema, self.G, self.momentum)
        for module in self.G_ema.modules():
            if is_parametrized(module):
                _ = module.weight  # a read is a power iteration; averaged singular vectors need one

    def get_extra_state(self):
        """Return what state_dict() holds beside the networks."""
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return states | {"taken": self.taken}

    def set_extra_state(self, state):
        """Load such a state; load_state_dict() calls it."""
        self.taken = state["taken"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


# ---- 10. Readouts: what an encoder has learned, in numbers; none of them changes it


def _check_labels(name, labels):
    """Check that labels are classes: 0, 1, …"""
    if len(labels) > 0 and labels.min() < 0:
        _require(False, name, f"from {int(labels.min())} on", "at least 0: numbers of classes")


@torch.no_grad()
def embed(encoder: nn.Module, images: Tensor, batch_size: int = 500) -> tuple:
    """Embed images without augmentation → float32 features (n, F) and unit embeddings (n, D).
    images (n, 3, H, W), on any device. The encoder works in eval mode and returns to its own modes:
    there is no gradient, and no BatchNorm buffer changes."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    weight = next(encoder.parameters())  # of the encoder's device and dtype
    try:
        parts = images.split(batch_size)
        outputs = [encoder(_floats(part.to(weight.device)).to(weight.dtype)) for part in parts]
    finally:
        for module, mode in modes.items():
            module.training = mode
    features, z = zip(*outputs, strict=True)
    return torch.cat(features).float(), unit(torch.cat(z).float())


def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    k: int = 200,
    temperature: float = 0.5,
) -> float:
    """Classify by a vote of the k nearest, each with weight e^{cos/t} → accuracy in percent.
    train (n, D), test (m, D), labels (n,), (m,). A k above n takes all n.
    The defaults are those of [1]'s code."""
    _check_labels("train_labels", train_labels)
    train = unit(train.float())
    members = F.one_hot(train_labels.long())  # (n, classes)
    right = 0
    parts = zip(unit(test.float()).split(1000), test_labels.split(1000), strict=True)
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
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    l2: float = 1e-3,
) -> float:
    """Classify by logistic regression, mean cross-entropy + l2/2 ‖W‖² → accuracy in percent.
    train (n, D), test (m, D), labels (n,), (m,). The training set standardises the features.
    Nothing is random: L-BFGS solves the convex problem from zero, until the gradient is at most
    1e-4, the loss stands still, or 200 steps are done."""
    _check_labels("train_labels", train_labels)
    mean, std = train.mean(0), train.std(0)
    constant = std <= 1e-5 * train.abs().amax(0)
    std = std.masked_fill(constant, INF)  # a constant feature becomes 0
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
def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """Measure how evenly embeddings cover the sphere: log E e^{−t ‖x − y‖²} over different rows.
    z (n, D) → from −4t (two antipodes) to 0 (one point). Cost: n² D. [4] plots its negative.
    Ref: [5]; [4] Eq. 10"""
    z, n = unit(z), len(z)
    _require(n >= 2, "z", _describe(z), "(n, D) of at least two rows")
    sums = []
    for k, rows in enumerate(z.split(1000)):
        with torch.autocast(z.device.type, enabled=False):
            exponents = -t * (2 - 2 * rows @ z.T)  # (1000, n)
        exponents.diagonal(1000 * k).fill_(-INF)  # no row pairs with itself
        sums.append(exponents.logsumexp(1))
    return torch.cat(sums).logsumexp(0) - math.log(n) - math.log(n - 1)


@torch.no_grad()
def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Measure how near two views are: E ‖x_i − y_i‖², from 0 (equal) to 4 (opposite). Ref: [5]"""
    return (unit(x) - unit(y)).square().sum(1).mean()


@torch.no_grad()
def tolerance(z: Tensor, labels: Tensor) -> Tensor:
    """Measure how near samples of a class are: the mean cosine of pairs that share a label.
    z (n, D), labels (n,) → in [−1, 1]. Ref: [4] Eq. 11, over pairs of one label, as its Table 1"""
    _check_labels("labels", labels)
    z = unit(z)
    members = F.one_hot(labels.long()).to(z.dtype)  # (n, classes)
    with torch.autocast(z.device.type, enabled=False):
        sums = members.T @ z  # (classes, D)
    counts = members.sum(0)
    cosines = sums.square().sum() - z.square().sum()  # ‖Σ z‖² sums all pairs, equal rows too
    pairs = (counts * (counts - 1)).sum()
    return cosines / pairs


# ---- 11. Training: methods, and one loop. A method is an object with its own state and two calls:
#     step(encoder, images, index, generator, **options) → loss, figures
#     after_step() → figures, once the encoder has moved
# images (B, 3, H, W) and their places in the training set, index (B,); options go to the criterion.
# In a method's pre-training, encoder and loss are None.


class SimCLR(nn.Module):
    """Contrast two random views of each image with those of the batch.
    criterion: a ContrastiveLoss; view_options: of `view`; partners: (images, labels) of the whole
    training set: the second view then shows another image of the same class, a "true positive".
    Ref: [6] Algorithm 1; [1] Fig. 2"""

    pretrain = 0  # epochs before the encoder begins
    scheduled = ()  # further optimizers, at rates by the recipe

    def __init__(
        self, criterion: nn.Module, view_options: dict | None = None, partners: tuple | None = None
    ):
        super().__init__()
        self.criterion = criterion
        self.view_options = view_options or {}
        self.partners = partners

    def embed_views(
        self, encoder: Callable, generator: torch.Generator | None, *images: Tensor
    ) -> tuple:
        """Embed a random view of each of several batches of images, in one pass → (B, D) each."""
        views = torch.cat([view(x, generator, **self.view_options) for x in images])
        z = encoder(views.contiguous(memory_format=torch.channels_last))[1]
        return z.chunk(len(images))

    def contrast(self, *z: Tensor, return_stats: bool = False, **options) -> tuple:
        """Compute the loss of embeddings, and its statistics, if asked for."""
        result = self.criterion(*z, return_stats=return_stats, **options)
        if return_stats:
            return result
        return result, {}

    def step(self, encoder: Callable, images: Tensor, index: Tensor, generator, **options) -> tuple:
        """Compute the loss of a batch, and figures."""
        others = images
        if self.partners is not None:
            others = self.others_of_class(index, generator)
        z, other = self.embed_views(encoder, generator, images, others)
        return self.contrast(z, other, **options)

    def after_step(self) -> dict | None:
        """Update what the method owns, and return figures or None."""

    def others_of_class(self, index: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw for each image another one of its class; itself if there is none, or no label (−1).
        Partners on another device than the index make the host wait."""
        images, labels = self.partners
        labels = labels.to(index.device)
        same = (labels == labels[index, None]) & (labels >= 0)  # (B, n)
        log_w = torch.where(same, 0.0, -INF).scatter_(1, index[:, None], -20.0)
        other = draw(log_w, 1, generator)[:, 0]
        return images[other.to(images.device)].to(other.device)


class Bank(SimCLR):
    """Contrast one view of each image with its row of a memory bank; all other rows are candidates.
    images: the training set. An untrained encoder maps all images near one point. So the first rows
    are its embeddings less their mean. Ref: [4] Eq. 1, with the bank for its g"""

    def __init__(
        self,
        criterion: nn.Module,
        encoder: nn.Module,
        images: Tensor,
        momentum: float = 0.5,
        view_options: dict | None = None,
    ):
        super().__init__(criterion, view_options)
        z = embed(encoder, images)[1]
        self.bank = MemoryBank(z - z.mean(0), momentum)

    def step(self, encoder, images, index, generator, group=None, **options):
        z = unit(self.embed_views(encoder, generator, images)[0])
        self.seen_index, self.seen_z = gather(index, group), gather(z.detach(), group)
        rows = self.bank.rows
        given = {"negatives": rows, "positive_index": index, "normalize": False}
        return self.contrast(z, rows[index], group=group, **given, **options)

    def after_step(self):
        self.bank.update(self.seen_index, self.seen_z)


class Queue(SimCLR):
    """Contrast a view with a key, embedded by a slow copy of the encoder; keys are the candidates.
    size: how many keys of earlier batches are candidates. Take fewer than there are images, as an
    older key of the anchor's image is a false negative. momentum: of the copy, in [0, 1).
    Ref: [8] Algorithm 1, but the copy is in eval mode, and this batch's keys are candidates, too:
    without them, their age would tell negatives from positives."""

    def __init__(
        self,
        criterion: nn.Module,
        encoder: nn.Module,
        images: Tensor,
        size: int = 4096,
        momentum: float = 0.99,
        view_options: dict | None = None,
    ):
        super().__init__(criterion, view_options)
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        _require(size >= 1, "size", size, "a whole number of at least 1")
        self.momentum = momentum
        self.slow = copy.deepcopy(encoder).requires_grad_(False).eval()
        self.leader = (encoder,)  # in a tuple: it is no part of this module
        first = torch.arange(size, device=images.device) * len(images) // size  # evenly spread
        self.queue = MemoryBank(embed(encoder, images[first])[1])

    def step(self, encoder, images, index, generator, group=None, **options):
        z = unit(self.embed_views(encoder, generator, images)[0])
        keys = unit(self.embed_views(self.slow, generator, images)[0])  # no gradient
        self.keys = gather(keys, group)
        place = torch.arange(len(keys), device=keys.device)
        if group is not None:
            place += distributed.get_rank(group) * len(keys)
        candidates = torch.cat([self.keys, self.queue.rows])
        given = {"negatives": candidates, "positive_index": place, "normalize": False}
        return self.contrast(z, keys, group=group, **given, **options)

    def after_step(self):
        self.queue.push(self.keys)
        follow(self.slow, self.leader[0], self.momentum)


class CLAE(SimCLR):
    """Contrast two views, and the first with a harder second one: the mean of both losses.
    The second view moves against the encoder: x' = x + bound · sign ∂ℓ/∂x, within [0, 1].
    bound: the largest change of a pixel, half of [10]'s ε.
    Ref: after [10], which moves the first view against itself and keeps two BatchNorm statistics"""

    def __init__(
        self, criterion: nn.Module, bound: float = 0.015, view_options: dict | None = None
    ):
        super().__init__(criterion, view_options)
        _require(0 < bound < 1, "bound", bound, "in (0, 1)")
        self.bound = bound

    def step(self, encoder, images, index, generator, return_stats=False, **options):
        first = view(images, generator, **self.view_options)
        second = view(images, generator, **self.view_options).requires_grad_()
        z, other = encoder(torch.cat([first, second]))[1].chunk(2)
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)
        with torch.autocast(loss.device.type, enabled=False):
            (slope,) = torch.autograd.grad(loss, second, retain_graph=True)
        harder = (second + self.bound * slope.sign()).clamp(0, 1).detach()
        harder_loss, _ = self.contrast(z, encoder(harder)[1], **options)
        return (loss + harder_loss) / 2, figures


class DiffHard(SimCLR):
    """Play the min-max game: the encoder descends a loss that G, every few steps, ascends.
    criterion: of objective ppcl, unless the game has no pairs; game: a Game for images of one size.
    Figures: "pair", the mean cosine of G(z) and G_ema(z), and those of `Game.imitate`.
    Ref: [3] Algorithm 1"""

    def __init__(self, criterion: nn.Module, game: Game, view_options: dict | None = None):
        super().__init__(criterion, view_options)
        objective = criterion.options.objective
        wanted = "ppcl, for pairs to be positives; or no pairs"
        _require(objective == "ppcl" or not game.pairs, "objective", objective, wanted)
        self.game = game
        self.pretrain = game.pretrain
        self.scheduled = (game.optimizers["ascent"],)

    def step(self, encoder, images, index, generator, return_stats=False, **options):
        game = self.game.train()
        self.real = _floats(images)
        self.generator = generator
        self.read = return_stats
        self.pretraining = encoder is None
        self.game_moves = self.pretraining or game.taken % game.every == 0
        if self.pretraining:
            return None, {}
        game.taken += 1
        # Step 1: form the batch: N generated images in N/2 pairs, N real ones; two views of each
        with torch.set_grad_enabled(self.game_moves and game.ascent):
            generated, latent = game.sample(len(images), generator)  # Eq. 6
        batch = torch.cat([generated, self.real])  # (2N, 3, H, W)
        alone = len(latent) + torch.arange(len(images), device=latent.device)
        options["labels"] = torch.cat([latent, alone])  # (2N,)
        z, other = self.embed_views(encoder, generator, batch, batch)
        # Step 2: train the main model: the loop descends this loss; its gradient reaches G as well
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)  # Eq. 4, 8
        game.optimizers["ascent"].zero_grad()
        if return_stats and game.pairs:
            leaders, followers = _upcast(z.detach()[: len(generated)]).chunk(2)
            figures["pair"] = F.cosine_similarity(leaders, followers).mean()
        return loss, figures

    def after_step(self):
        # Step 3: every few iterations, update the generator
        if not self.game_moves:
            return None
        if self.game.ascent and not self.pretraining:
            self.game.optimizers["ascent"].step()  # Eq. 4
        self.game.follow()  # Eq. 7
        figures = self.game.imitate(self.real, self.generator, self.read)  # Eq. 5
        looks = not self.pretraining and (self.read or _may_read(self.real))
        if looks and (figures["diversity"] < 0.25 or figures["d_loss"] < 0.01):
            message = "the generator has collapsed, or the discriminator tells all its images from "
            message += "real ones: lower the game's ascent_lr or lr, or raise pretrain or every"
            warnings.warn(message, stacklevel=2)
        return figures


def in_micro_batches(encoder: nn.Module, micro_batch: int) -> Callable:
    """Make an encoder take a large batch a few images at a time, `micro_batch`, in their memory.
    encoder: a module that returns embeddings, or a tuple as Encoder does → a function to call in
    its place. The backward pass embeds each micro-batch again, with the same randomness. The
    gradient is exact, but BatchNorm in training mode normalises each micro-batch alone and moves
    its statistics twice. Ref: [11]"""
    _require(micro_batch >= 1, "micro_batch", micro_batch, "at least 1")

    def in_parts(images):
        some = images.split(micro_batch)
        parts = [checkpoint(encoder, part, use_reentrant=False) for part in some]
        if torch.is_tensor(parts[0]):
            return torch.cat(parts)
        return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))

    return in_parts


def annealed_beta(progress: float, beta: float, changes: int = 5) -> float:
    """Lower β in ℓ = changes steps over progress in [0, 1): β · (1 − ⌊ℓ · progress⌋ / ℓ), to β/ℓ.
    Hard negatives matter early; late, many of the hardest share the anchor's class. Ref: [1] C"""
    return beta * (1 - math.floor(changes * progress) / changes)


def lead_in(progress: float, alpha: float, until: float = 0.5) -> float:
    """Lower the share kept from 1 to α, geometrically, until `until`: α^{min(1, progress / until)}.
    The nearest candidates of a random encoder share background and colour: alone, they teach
    little else."""
    return alpha ** min(1.0, progress / until)


def _warm_up_and_cosine(progress, step):
    """Multiply a linear rise over a tenth of the run by a cosine from 1 to 0. step: 1 / steps."""
    warm_up = min(10 * (progress + step), 1)
    return warm_up * (1 + math.cos(math.pi * progress)) / 2


def _two_falls(progress, step):
    """Fall to a tenth after 160 of 200 epochs, and to a hundredth after 190: [4] 5.1."""
    falls = (progress >= 0.8) + (progress >= 0.95)
    return 0.1**falls


def _constant(progress, step):
    return 1.0


RECIPES = {  # settings if none are given
    "adamw": {"epochs": 16, "batch_size": 256, "lr": 8e-3, "weight_decay": 1e-4},
    "sgd": {"epochs": 200, "batch_size": 128, "lr": 0.03, "weight_decay": 5e-4},
    "adam": {"epochs": 400, "batch_size": 256, "lr": 1e-3, "weight_decay": 1e-6},
}
OPTIMIZERS = {  # of the same recipes, and how their rate goes over the progress in [0, 1]
    "adamw": (torch.optim.AdamW, _warm_up_and_cosine),
    "sgd": (functools.partial(torch.optim.SGD, momentum=0.9), _two_falls),
    "adam": (torch.optim.Adam, _constant),  # [1] App. C, [2] VII-A
}


class Training:
    """Train an encoder: `for figures in Training(encoder, images, SimCLR(criterion)): ...`
    encoder      an Encoder
    images       uint8 (n, 3, H, W), on the encoder's device or, to save its memory, on the CPU
    method       SimCLR, Bank, Queue, CLAE or DiffHard
    recipe       a row of RECIPES; epochs, batch_size, lr and weight_decay override it. Batches have
                 at most batch_size images, but at least two: of 5 images, 3 and 2 for batch_size 2
    schedules    options of the loss by progress, such as {"alpha": lambda p: lead_in(p, 0.1)}
    micro_batch  images that the encoder takes at a time; None: all
    bfloat16     autocast of the encoder; None: if the hardware computes in bfloat16
    group        a torch.distributed process group: each rank takes its share of every batch. The
                 loss is that of one process, but for BatchNorm. Up to ranks − 1 images of a batch
                 are left out
    seed         of order, views and latents: the same seed repeats the run, on a GPU up to rounding
    A step yields {"epoch", "step", "steps", "images", "loss"} and scheduled options; every tenth
    of an epoch, statistics, too. Epochs below 0 are the pre-training, without a loss.
    FloatingPointError if a loss is not finite; on a GPU only steps with statistics look.
    After a step (with a group, an epoch) state_dict() holds all that load_state_dict() needs."""

    def __init__(
        self,
        encoder: nn.Module,
        images: Tensor,
        method: SimCLR,
        recipe: str = "adamw",
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        schedules: dict | None = None,
        micro_batch: int | None = None,
        bfloat16: bool | None = None,
        group: distributed.ProcessGroup | None = None,
        seed: int = 0,
    ):
        _require(recipe in RECIPES, "recipe", recipe, f"one of {', '.join(RECIPES)}")
        given = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay}
        self.recipe = RECIPES[recipe] | {k: x for k, x in given.items() if x is not None}
        self.epochs = self.recipe["epochs"]
        self.encoder = encoder.to(memory_format=torch.channels_last)
        self.device = next(encoder.parameters()).device
        self.method = method.to(self.device)
        self.images = images
        self.schedules = schedules or {}
        self.micro_batch, self.group, self.seed = micro_batch, group, seed
        self.generator = torch.Generator(self.device)
        self.bfloat16 = _has_bfloat16(self.device) if bfloat16 is None else bfloat16
        self.rank, self.ranks = 0, 1
        if group is not None:
            _require(not method.scheduled, "group", "given", "None: one process plays a game")
            self.rank = distributed.get_rank(group)
            self.ranks = distributed.get_world_size(group)
            for module in (encoder, method):  # all ranks begin as the first
                for value in module.state_dict().values():
                    distributed.broadcast(value, group=group, group_src=0)
        n, size, lr = len(images), self.recipe["batch_size"], self.recipe["lr"]
        least = max(2, self.ranks)
        _require(n >= least, "images", n, "at least 2 to train on, and one for each rank")
        for name, value, low in (("epochs", self.epochs, 1), ("batch_size", size, least)):
            fits = isinstance(value, numbers.Integral) and value >= low
            _require(fits, name, value, f"a whole number of at least {low}")
        _require(0 < lr < INF, "lr", lr, "a number above 0")
        self.steps_per_epoch = min(math.ceil(n / size), n // least)  # batches of nearly one size
        self.steps = (method.pretrain + self.epochs) * self.steps_per_epoch
        self.epoch = -method.pretrain  # of the next step
        self.step_in_epoch = 0
        parts = [
            {"params": encoder.parameters(), "weight_decay": self.recipe["weight_decay"]},
            {"params": method.criterion.parameters(), "weight_decay": 0},
        ]
        optimizer, self.rate = OPTIMIZERS[recipe]
        fused = self.device.type != "cpu"  # one launch for all parameters
        self.optimizer = optimizer(parts, lr, fused=fused)

    def __iter__(self) -> Iterator[dict]:
        while self.epoch < self.epochs:
            seed = self._seed_of_epoch()
            if self.step_in_epoch == 0:
                self.generator.manual_seed(seed * self.ranks + self.rank)
            order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
            batches = order.to(self.images.device).tensor_split(self.steps_per_epoch)
            for index in batches[self.step_in_epoch :]:
                position = self.epoch * self.steps_per_epoch + self.step_in_epoch
                step = self.method.pretrain * self.steps_per_epoch + position + 1
                place = {"epoch": self.epoch, "step": step, "steps": self.steps}
                try:
                    figures = self._step(index, position)
                except (_NotFinite, FloatingPointError) as error:
                    message = f"step {step} of {self.steps}: {error}; lower lr?"
                    raise FloatingPointError(message) from error
                self.epoch, self.step_in_epoch = divmod(position + 1, self.steps_per_epoch)
                yield figures | place

    def _step(self, index, position):
        """Take a step with this rank's share of the images at index → figures."""
        encoder_steps = self.epochs * self.steps_per_epoch
        progress = max(0, position) / encoder_steps  # a position below 0 is in the pre-training
        rate = self.rate(progress, 1 / encoder_steps)
        for optimizer in (self.optimizer, *self.method.scheduled):
            for part in optimizer.param_groups:
                part.setdefault("initial_lr", part["lr"])
                part["lr"] = part["initial_lr"] * rate
        options = {name: schedule(progress) for name, schedule in self.schedules.items()}
        read = 10 * self.step_in_epoch % self.steps_per_epoch < 10  # every tenth of an epoch
        share = len(index) // self.ranks  # the same number for each rank
        index = index[self.rank * share : (self.rank + 1) * share]
        images = self.images[index]
        if self.device.type == "cuda" and images.device.type == "cpu":
            images = images.pin_memory()  # else the host would wait for the copy
        encoder = None
        if self.epoch >= 0:
            encoder = self.encoder.train()
            if self.micro_batch is not None:
                encoder = in_micro_batches(encoder, self.micro_batch)
        images = images.to(self.device, non_blocking=True)
        index = index.to(self.device, non_blocking=True)
        asked = options | {"group": self.group, "return_stats": read}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            loss, figures = self.method.step(encoder, images, index, self.generator, **asked)
            if encoder is not None:
                _descend(loss, self.optimizer, "encoder", self.group, read)
                figures = {"loss": loss.detach()} | figures | options
            figures |= self.method.after_step() or {}
        return figures | {"images": share * self.ranks}

    def _seed_of_epoch(self):
        """Return a seed of this run and epoch, so that a resumed run repeats it."""
        return self.seed * 100_003 + self.epoch

    def state_dict(self) -> dict:
        """Return all that a run needs to go on: tensors that train on, so save or deepcopy them."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "generator": self.generator.get_state(),
            "encoder": self.encoder.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from such a state."""
        self.epoch = state["epoch"]
        self.step_in_epoch = state["step_in_epoch"]
        saved = state["generator"].cpu()
        if saved.shape == self.generator.get_state().shape:
            self.generator.set_state(saved)
        else:  # saved on another kind of device
            self.generator.manual_seed(self._seed_of_epoch() * self.ranks + self.rank)
        self.encoder.load_state_dict(state["encoder"])
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])


def _has_bfloat16(device):
    """Whether a device computes in bfloat16 itself: emulation would be slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)  # newer than torch 2.10
    return capabilities().get("avx512_bf16", False)
