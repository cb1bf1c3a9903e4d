"""Hard-negative contrastive learning in one file.

An encoder learns without labels when two views of a sample are pulled together and other samples, its negatives, are
pushed away. Which negatives count, and how much, decides how good the encoder gets. Every method here answers the same
three questions, and the file is those questions in order:

    1. Who could be a negative?         candidates: the other samples of the batch, real or generated, or the rows of a
                                                    bank or a queue
    2. How much does each one count?    weights:    log w_ij = log q(x_j | x_i) / p(x_j), 0 for uniform negatives
    3. What is done with them?          objective:  nce (with debiasing), simple, triplet, ppcl

    from hardneg import ContrastiveLoss
    criterion = ContrastiveLoss("hcl", beta=1.0)
    loss = criterion(encoder(view_1), encoder(view_2))

Symbols
    B, V, D     samples, views of each, dimensions of an embedding
    A           anchors: every view of every sample, V·B (with a memory bank the first views alone, B)
    M           positives of an anchor: the other views of its sample, V − 1
    N           candidates of an anchor: (B − 1)·V in a batch, K with K rows of `negatives`, K − 1 if one is its own
    z           embedding, a unit row                          f(x) in [1, 2, 4], v in [3]; [1] scales it by 1/t
    t           temperature, divides cosines                   t in [1, 2], τ in [3, 4]
    s_ij        logit of anchor i and candidate j: cos(z_i, z_j) / t; −∞ where j is no negative of i
    p_im        logit of anchor i and its m-th positive
    log w_ij    log importance weight; −∞ where s_ij is
    tau_plus    τ⁺, the probability that a candidate shares the anchor's class             [1]
    beta        β, concentration of the tilted negatives       multiplies s = cos/t        [1]
    alpha       α, the share of nearest negatives kept                                     [4]
    epsilon     ε, entropic regularisation, in the unit of the ground cost; kappa its κ    [2]
    margin      η of the triplet loss, in the unit of a squared distance                   [2]

Sections
    1 Similarities   2 Weights      3 Objectives   4 The loss   5 Views
    6 Images         7 Encoders     8 Generators   9 Evaluation   10 Training

Everything stays in the log domain: at β = 1 and t = 0.02 e^{(1+β)/t} is too large for float32, its logarithm never is.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. ICLR 2021. arXiv:2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport for Contrastive
        Representation Learning. IJCNN 2023. arXiv:2111.03169
    [3] Data-efficient Contrastive Learning by Differentiable Hard Sample and Hard Positive Pair Generation.
        Submitted to ICLR 2023
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. CVPR 2021. arXiv:2012.09740
    [5] Wang, Isola. Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere. ICML 2020. arXiv:2005.10242
    [6] Chen, Kornblith, Norouzi, Hinton. A Simple Framework for Contrastive Learning of Visual Representations.
        ICML 2020. arXiv:2002.05709
    [7] Wu, Xiong, Yu, Lin. Unsupervised Feature Learning via Non-Parametric Instance Discrimination. CVPR 2018.
        arXiv:1805.01978
    [8] He, Fan, Wu, Xie, Girshick. Momentum Contrast for Unsupervised Visual Representation Learning. CVPR 2020.
        arXiv:1911.05722
    [9] Brock, Donahue, Simonyan. Large Scale GAN Training for High Fidelity Natural Image Synthesis. ICLR 2019.
        arXiv:1809.11096
   [10] Ho, Vasconcelos. Contrastive Learning with Adversarial Examples. NeurIPS 2020. arXiv:2010.12050
   [11] Gao, Zhang, Han, Callan. Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup. RepL4NLP
        2021. arXiv:2101.06983
"""
import copy
import functools
import math
import numbers
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

INF = math.inf


# ---------------------------------------------------------------------------------------------------------------------
# 1. Similarities: unit rows, and sums of exponentials that survive a row with nothing in it
# ---------------------------------------------------------------------------------------------------------------------

def unit(x):
    """Project rows to the unit sphere: z = x / ‖x‖.

    x (..., D) → (..., D). A zero row stays zero and passes the gradient on unscaled. Rows are divided by their largest
    entry first, so that no square over- or underflows: 1e-30 and 1e30 are as good a length as 1.
    """
    scale = x.detach().abs().amax(-1, keepdim=True)
    x = x / scale.masked_fill(scale < torch.finfo(x.dtype).tiny, 1)
    norm = x.norm(dim=-1, keepdim=True)  # at least 1 by now, but for a zero row
    return x / norm.masked_fill(norm == 0, 1)


def _wide(x):
    """x in float32 at least: sums of half-precision numbers are no sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_sum(x, dim, out=None):
    """log Σ_j e^{x_j}, and its gradient, the shares e^{x_j} / Σ_k e^{x_k}; out=x to have these in place of x.

    Where all of a row is −∞: the lowest finite number, and shares of 0. softmax has by far the quickest of torch's
    exponentials, so the sum is read off its largest share: log Σ_j e^{x_j} = max_j x_j − log max_j share_j.
    """
    lowest = torch.finfo(x.dtype).min
    x = torch.clamp_min(x, lowest, out=out)
    largest = x.amax(dim, keepdim=True)
    shares = torch.softmax(x, dim, out=out)
    log_sum = largest - shares.amax(dim, keepdim=True).log()
    return log_sum.squeeze(dim), shares.mul_((largest > lowest).to(x.dtype))


class _LogSumExp(torch.autograd.Function):
    """`_log_sum` as one step of autograd, which keeps the shares and nothing else."""
    generate_vmap_rule = True

    @staticmethod
    def forward(x, dim):
        return _log_sum(x, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dim = inputs[1]
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, grad_shares):
        shares, = ctx.saved_tensors
        if grad_shares is None:
            return None if grad is None else grad.unsqueeze(ctx.dim) * shares, None
        inner = (grad_shares * shares).sum(ctx.dim, keepdim=True)
        if grad is not None:
            inner = inner - grad.unsqueeze(ctx.dim)
        return (grad_shares - inner) * shares, None

    @staticmethod
    def jvp(ctx, tangent, _):
        shares, = ctx.saved_tensors
        mean = (shares * tangent).sum(ctx.dim, keepdim=True)
        return mean.squeeze(ctx.dim), (tangent - mean) * shares


def _logsumexp(x, dim=-1):
    """log Σ_j e^{x_j}; where all of a row is −∞, the lowest finite number, with gradient zero instead of NaN."""
    return _LogSumExp.apply(x, dim)[0]


def _there(x):
    """1 where x is above −∞, 0 elsewhere. In place, as a comparison that makes a mask takes torch ten times as long."""
    return x.detach().clone().ne_(-INF)


def _finite(x):
    """0 in place of −∞."""
    return x.nan_to_num(nan=math.nan, posinf=INF, neginf=0)


def _count(x):
    """How many of a row are above −∞, (A, 1), in float32 at least: exact up to 2^24 of them."""
    return _wide(_there(x)).sum(-1, keepdim=True)


def _log_count(x):
    """log of how many of a row are above −∞, (A,); the lowest finite number for none, as in `_logsumexp`."""
    return _count(x)[..., 0].log().to(x.dtype).clamp_min(torch.finfo(x.dtype).min)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Weights: how much does each candidate count? logits (A, N) → log weights (A, N), −∞ where the logits are. Weights
#    have mean 1 over the candidates of an anchor (`top`: over those it keeps), which the debiasing builds on
# ---------------------------------------------------------------------------------------------------------------------

def uniform(logits):
    """Every candidate counts the same: log w_ij = 0.

    logits (A, N) → log weights (A, N), −∞ where the logits are.
    Ref: [4] Eq. 1, [1] at β = 0
    """
    logits = logits.detach()
    return logits - logits.clamp_min(torch.finfo(logits.dtype).min)


def tilted(logits, beta=1.0):
    """Candidates count by their similarity: w_ij = e^{β s_ij} / (1/N Σ_k e^{β s_ik}), of mean 1.

    logits (A, N) → log weights (A, N). beta ≥ 0 multiplies s = cos/t. Limits: β = 0 is `uniform`, β → ∞ `hardest`.
    Ref: [1] Eq. 2, with the partition function Z_β estimated from the candidates themselves
    """
    if beta < torch.finfo(logits.dtype).tiny:  # that is 0, and 0 · ∞ is not
        return uniform(logits)
    return _proportional(beta * logits)


def _proportional(scores):
    """log N + log_softmax(scores), where N counts the scores above −∞: weights proportional to e^scores, of mean 1."""
    # numerics: from the largest down, as the sum of large scores is rounded at their size
    scores = scores - scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    return scores + (_count(scores).log().to(scores.dtype) - _logsumexp(scores)[..., None])


def hardest(logits):
    """Only the nearest candidate counts, for all N: w_ij = N where s_ij = max_k s_ik, 0 elsewhere; ties share.

    logits (A, N) → log weights (A, N). The limit β → ∞ of `tilted`: the worst case of [1] Prop. 1.
    Ref: [1] App. A.1, [4] Eq. 6
    """
    logits = logits.detach()
    nearest = (logits - logits.amax(-1, keepdim=True)).eq_(0)  # −∞ − (−∞) is no 0: nothing in a row with no candidate
    share = _count(logits) / _wide(nearest).sum(-1, keepdim=True).clamp_min(1)
    return nearest.log() + share.log().to(logits.dtype)


def top(logits, alpha=0.1, top_k=None):
    """Only the upper α quantile counts: log w_ij = 0 where s_ij ≥ s_i^(α), −∞ below.

    logits (A, N) → log weights (A, N). alpha in (0, 1] is a share of the anchor's own candidates: the threshold
    s_i^(α) is the ⌈αN⌉-th largest (at least the first), and everything at or above it stays, ties too. top_k ≥ 1 is a
    number of candidates instead of a share (all of them where there are fewer).
    These weights have mean α, not 1: the rest is dropped, not handed on. Limits: α = 1 is `uniform`, α → 0 the nearest
    with weight 1 (`hardest` gives it N). Cost: a selection, about as dear as the product that makes the logits.
    Ref: [4] Eq. 8, 9
    """
    index, below = _nearest(logits.detach(), alpha, top_k)
    kept = logits.new_zeros(index.shape).masked_fill(below, -INF)
    return torch.full_like(logits, -INF).scatter(-1, index, kept)


def _nearest(x, alpha, top_k):
    """Where a row's upper α quantile of x is: indices (A, k), and which of these are not in it but fill the row up."""
    def kept(n):  # ⌈αn⌉ in whole numbers, as 0.07 · 100 is above 7 in floating point, or the smaller of n and top_k
        return -(-n * int(alpha * 10**9) // 10**9) if top_k is None else n - (n - top_k) * (n > top_k)

    n = x.shape[-1]
    k = max(1, kept(n))
    short = k - kept(_count(x).long()).clamp_min(1)
    if not _known(short) or short.any():  # one k for all rows: where one keeps fewer, what is −∞ comes to the top
        hidden = x == -INF
        x = x.masked_fill(hidden & (hidden.cumsum(-1, dtype=torch.int32) <= short), INF)
    values, index = x.topk(min(k + 1, n), sorted=False)  # one more, to see whether it ties with the last
    last = values.topk(values.shape[-1] - k + 1, largest=False).values
    threshold = last[..., -1:]
    tied = (last[..., :1] == threshold) & (threshold > -INF)
    if k < n and (not _known(tied) or tied.any()):
        ties = ((x >= threshold).sum(-1, keepdim=True, dtype=torch.int32) * tied).amax().clamp_min(k)
        values, index = x.topk(int(ties) if _known(ties) else n, sorted=False)
    return index, (values < threshold) | values.isinf()


def ground_cost(cosines, cost="sqeuclidean", kappa=0.0):
    """What it costs to couple two unit rows, from their cosine.

    "sqeuclidean": ½‖x − y‖² = 1 − cos        Ref: [2] Eq. 5
    "exp":         exp(‖x − y‖² − κ)          Ref: [2] VII-C
    """
    if cost == "sqeuclidean":
        return 1 - cosines
    return torch.exp(2 - 2 * cosines - kappa)


def sinkhorn(log_kernel, tolerance=None, max_steps=1000):
    """The entropic coupling with uniform marginals: P_ij = exp(f_i + log_kernel_ij + g_j), log_kernel = −C/ε.

    log_kernel (A, N), −∞ where i and j must not be coupled, or a function that gives its blocks of rows in turn, for a
    kernel that is never whole → f (A,), g (N,), error. Rows and columns are scaled in turn: f_i ← −log A −
    logsumexp_j(log_kernel_ij + g_j), then g the same way, until the error is at most `tolerance` (None: 1e-5, in
    float64 1e-12) or after `max_steps`, with a warning the first time. The error is the mass in the wrong rows,
    Σ_i |Σ_j P_ij − 1/A| of a total of 1; the columns are exact. A row or column with nothing allowed carries no mass.
    Differentiable: the gradient runs through every step, and keeps the A·N numbers of each. Cost: 2·A·N a step; 2 to 20
    steps at ε = 0.3, more the smaller ε, and 1/error of them where the coupling must leave an allowed entry empty, as
    it must where half of a batch shares a label; where more do, there is no coupling.
    Ref: [2] Eq. 5, Lemma 3
    """
    blocks = log_kernel if callable(log_kernel) else lambda: [log_kernel]

    def log_sum(x, dim):  # of an x that is needed no more
        return _logsumexp(x, dim) if torch.is_grad_enabled() else _log_sum(x, dim, out=x)[0]

    def scaling(log_sums):  # of the n rows, or columns, that are not empty: −log n, −log of each sum, which they are
        there = log_sums > torch.finfo(log_sums.dtype).min / 2
        return -there.sum().clamp_min(1).to(log_sums.dtype).log(), -log_sums.masked_fill(~there, 0), there

    g = f = 0.0
    for step in range(max_steps + 1):
        row_sums = column_sums = None
        for block in blocks():  # is scaled by rows and then, where it is, summed by columns
            sums = log_sum(block + g, 1)
            row_sums = sums if row_sums is None else torch.cat([row_sums, sums])  # no list, which would scatter memory
            sums = log_sum(block + scaling(sums)[1][:, None], 0)
            column_sums = sums if column_sums is None else torch.logaddexp(column_sums, sums)
        log_a, f_next, rows = scaling(row_sums)
        f_next = f_next + log_a * rows
        error = log_a.exp() * (torch.expm1(f - f_next).abs() * rows).sum()  # row i of P sums to e^{f − f_next} / A
        if tolerance is None:
            tolerance = 1e-12 if error.dtype == torch.float64 else 1e-5
        if step > 0 and (step == max_steps or not _known(error) or error <= tolerance):
            break
        log_b, g, columns = scaling(column_sums)
        f, g = f_next, g + (log_b - log_a) * columns
    if _known(error) and not error <= tolerance:
        _warn_once("sinkhorn", f"Sinkhorn: {float(error.detach()):.1e} of the mass still in the wrong place "
                   f"after {step} steps (tolerance {tolerance:.0e}): raise epsilon, or check that labels leave "
                   "enough candidates")
    return f, g, error


def transported(logits, epsilon=0.3, cost="sqeuclidean", kappa=0.0, temperature=1.0, potential=None):
    """Candidates count by the entropic coupling of anchors and candidates: w_ij = N P*(j | i) ∝ e^{−C_ij/ε + g_j}.

    logits (A, N) → log weights (A, N), of mean 1. `epsilon` is in the unit of the cost, `temperature` is that of the
    logits (costs are of cosines), `potential` g (N,) comes from `sinkhorn`, which is run if it is not given.
    Limits: ε → ∞ is `uniform` (where nothing but each anchor's own sample is forbidden), ε → 0 exact optimal transport;
    with potential 0, that is without marginals, and "sqeuclidean" it is `tilted` at β = t/ε. Rows are taken to be unit.
    Ref: [2] Eq. 5, Lemma 3 (Eq. 7 is printed without the factor e^{g_j})
    """
    cosines = temperature * _finite(logits)  # 0 · ∞ would be the gradient of the temperature
    log_kernel = _log_kernel(cosines, epsilon, cost, kappa) + uniform(logits)
    if potential is None:
        potential = sinkhorn(log_kernel)[1]
    return _proportional(log_kernel + potential)


def _log_kernel(cosines, epsilon, cost, kappa):
    """−C/ε, finite: what is dear is not forbidden."""
    return (ground_cost(cosines, cost, kappa) / -epsilon).clamp_min_(torch.finfo(cosines.dtype).min / 4)


def draw(log_w, k, replacement=False, generator=None):
    """Draw k negatives for each anchor, candidate j with probability w_ij / Σ_k w_ik.

    log_w (A, N) from any of the weights → indices (A, k). Without replacement no candidate comes twice for one anchor.
    generator: a torch.Generator on log_w's device; the same state draws the same indices.
    Raises ValueError where an anchor has too few candidates to draw from.
    """
    enough = 1 if replacement else k
    counted = _LogSumExp.apply(log_w, -1)[1]
    _require(k >= 1, "k", k, "at least 1")
    _require(_known(counted) is False or bool(((counted > 0).sum(-1) >= enough).all()), "k", k,
             "at most the number of candidates whose weight is not 0, for every anchor")
    return torch.multinomial(counted, k, replacement, generator=generator)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Objectives: what is done with the weighted negatives? (pos (A, M), neg (A, N), log w (A, N)) → losses (A,)
#    nce and ppcl act on logits, simple and triplet on cosines
# ---------------------------------------------------------------------------------------------------------------------

def debiased(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None, sums=None):
    """log of the weighted sum of e^s over negatives, less what false negatives are expected to add to it.

    log max( (Σ_j w_j e^{s_j} − N τ⁺ E⁺) / (1 − τ⁺),  N e^{−1/t} ),     E⁺ = Σ_m w⁺_m e^{p_m} / Σ_m w⁺_m

    pos (A, M), neg (A, N) logits, log_w (A, N), log_w_pos (A, M; None: uniform) → (A,). N is Σ_j w_j: the number of
    candidates for weights of mean 1, the number kept for `top`. The floor is that of the authors' code, as no cosine is
    below −1 ([1] Fig. 5 prints it without N). Where it binds, the negatives get no gradient. sums: the logarithms of
    Σ_j w_j e^{s_j} and Σ_j w_j, (A,) each, where they are known already.
    Limits: τ⁺ = 0 is log Σ_j w_j e^{s_j}, without a floor.
    Ref: [1] Eq. 2 and Fig. 5, [2] Eq. 8
    """
    total, log_n = sums or (_logsumexp(neg + log_w), None)
    if tau_plus == 0:
        return total
    log_n = _logsumexp(log_w).detach() if log_n is None else log_n
    log_w_pos = uniform(pos) if log_w_pos is None else log_w_pos
    expected = log_n + math.log(tau_plus) + _pooled(pos + log_w_pos) - _pooled(log_w_pos)
    excess = expected - total  # log of (N τ⁺ E⁺ / Σ w e^s): the difference exists where this is negative
    left = total + torch.log(-torch.expm1(excess.masked_fill(excess >= 0, -1))) - math.log1p(-tau_plus)
    floor = log_n - 1 / temperature
    return torch.where((excess >= 0) | (left < floor), floor, left)


def nce(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None, sums=None):
    """Noise-contrastive estimation: −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + Σ_j w_j e^{s_j}) ), the sum over j `debiased`.

    pos (A, M), neg (A, N) logits, log_w (A, N) → losses (A,), 0 for an anchor with no negative.
    Limits, with one positive and uniform weights: t → 0 of t · nce is half of `triplet` on `hardest` weights at
    margin 0; t → ∞ is log(1 + N) + N/(1 + N)/t · `simple`.
    Ref: [1] Eq. 1, 2, Fig. 5; [2] Eq. 8; [4] Eq. 1, 9
    """
    return -F.logsigmoid(_pooled(pos) - debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos, sums))


def simple(pos, neg, log_w):
    """Difference of means: −1/M Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j.

    pos (A, M), neg (A, N) cosines, log_w (A, N) → losses (A,); no negative leaves −1/M Σ_m cos_m.
    λ of [4] is 1/N here (1/(αN) for `top`): what the limit t → ∞ of `nce` gives, and [2]'s expectation.
    Ref: [4] Eq. 3, [2] Eq. 9 (BCL)
    """
    return _expected(neg, log_w) - _mean(pos)


def triplet(pos, neg, log_w, margin=0.0):
    """Hinge: 1/M Σ_m Σ_j w_j max(0, 2 (cos_j − cos_m) + η) / Σ_j w_j, where 2 (cos_j − cos_m) = ‖z−z_m‖² − ‖z−z_j‖².

    pos (A, M), neg (A, N) cosines, log_w (A, N) → losses (A,). margin η ≥ 0 is in the unit of a squared distance.
    Ref: [2] IV; with `hardest` weights and η = 0, twice the limit t → 0 of t · `nce`, [4] Eq. 6
    """
    hinges = [_expected(F.relu(2 * (neg - p[:, None]) + margin), log_w) for p in pos.unbind(-1)]
    return torch.stack(hinges).mean(0)


def ppcl(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None, sums=None):
    """Partially pseudo-labelled loss: −1/M Σ_m log( e^{p_m} / (Σ_l e^{p_l} + Σ_j w_j e^{s_j}) ).

    pos (A, M; −∞ where an anchor has fewer positives), neg (A, N) logits, log_w (A, N) → losses (A,).
    It is `nce` plus the spread of the positives, logsumexp_m p_m − mean_m p_m, so `nce` itself for one positive.
    Ref: [3] Eq. 8
    """
    return nce(pos, neg, log_w, tau_plus, temperature, log_w_pos, sums) + _pooled(pos) - _mean(pos)


def _pooled(pos):
    """logsumexp over an anchor's positives, of which there is one at least, and mostly no other."""
    return pos[:, 0] if pos.shape[1] == 1 else torch.logsumexp(pos, 1)


def _mean(x):
    """Mean over the entries of a row that are not −∞."""
    return _finite(x).sum(-1) / _count(x)[..., 0]


def _expected(x, log_w):
    """Σ_j w_j x_j / Σ_j w_j, 0 in a row with no candidate."""
    return (_LogSumExp.apply(log_w, -1)[1] * _finite(x)).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# 4. The loss: a registry, one function, its module
# ---------------------------------------------------------------------------------------------------------------------

WEIGHTS = {f.__name__: f for f in (uniform, tilted, hardest, top, transported)}  # (logits, *options) → log weights
OBJECTIVES = {f.__name__: f for f in (nce, simple, triplet, ppcl)}  # (pos, neg, log_w, *options) → losses

PRESETS = {  # loss: (weights, objective, tau_plus)
    "simclr": ("uniform", "nce", 0.0),         # [6], [4] Eq. 1
    "debiased": ("uniform", "nce", 0.1),       # [1] at β = 0
    "hcl": ("tilted", "nce", 0.1),             # [1] Eq. 2
    "ot": ("transported", "nce", 0.0),         # [2] Eq. 5, 8
    "hard": ("top", "nce", 0.0),               # [4] Eq. 9
    "simple": ("uniform", "simple", 0.0),      # [4] Eq. 3, [2] Eq. 9
    "hard-simple": ("top", "simple", 0.0),     # [4] Table 1, HardSimple
    "triplet": ("hardest", "triplet", 0.0),    # [2] IV, [4] Eq. 6
    "ppcl": ("uniform", "ppcl", 0.0),          # [3] Eq. 8
}


def contrastive_loss(*views, loss="simclr", weights=None, objective=None, temperature=0.5, tau_plus=None, beta=1.0,
                     alpha=0.1, top_k=None, epsilon=0.3, cost="sqeuclidean", kappa=0.0, margin=0.0, negatives=None,
                     own=None, labels=None, normalize=True, detach_weights=None, reduction="mean", block_size=None,
                     group=None, return_stats=False):
    """Any of the losses, on two or more views of a batch.

        s_ij = cos(z_i, z_j) / t          log w_ij = weights(s_i)_j          ℓ_i = objective(p_i, s_i, log w_i)

    views            (B, D) each; row i of each is a view of sample i. Every view of a sample is an anchor, in the order
                     of torch.cat(views); its other views are its positives, the views of other samples its candidates
    loss             a row of PRESETS; `weights` and `objective` override its parts, `tau_plus` its τ⁺
    temperature      t > 0, divides cosines; a 0-d tensor that requires a gradient is learned
    tau_plus, beta   τ⁺ in [0, 1), of nce and ppcl; β ≥ 0, of tilted, multiplies cos/t
    alpha, top_k     of top: the share of nearest candidates kept, in (0, 1]; or, if given, their number
    epsilon, cost, kappa   of transported: ε > 0 in the unit of the cost, "sqeuclidean" or "exp", κ of the latter
    margin           η ≥ 0, of triplet, in the unit of a squared distance
    negatives        (K, D): the candidates are these rows instead, the anchors the first view alone, B of them
    own              (B,), with negatives: which of these rows is the sample's own, and so no candidate
    labels           (B,): samples that share a label are never each other's negatives, and under ppcl are positives.
                     With negatives also (B + K,), the last K for its rows; with (B,) those share a label with nobody
    normalize        project rows to the unit sphere first, which copies them; if not, they are taken to be unit rows
                     already
    detach_weights   no gradient through the weights; None: as the authors' code has it, True for transported alone
    reduction        "mean", "sum" or "none", one value per anchor
    block_size       anchors worked at a time; value and gradient do not depend on it. None: chosen, 0: all at once by
                     plain autograd, which keeps A·N numbers for the backward pass and can be differentiated twice
    group            a torch.distributed process group: candidates are the views of every rank's samples (rows of
                     `negatives` are taken to be the same everywhere). All ranks call together, with views of one shape;
                     "mean" and "sum" are those of one process with all samples, and so are parameters' gradients once
                     they are averaged over the ranks, as DistributedDataParallel does
    return_stats     also a dict of 0-d tensors: `clamped`, the share of anchors for which the floor of the debiasing
                     binds; `ess`, the effective number of negatives (Σw)²/Σw² as a share of N; `positive` and
                     `negative`, the mean cosines

    Any floating dtype comes in; the arithmetic and the loss are in float32 at least, autocast off. An option that the
    weights and the objective do not take has no effect. Cost: A·N·D, and of transported 2·A·N for each step of
    Sinkhorn, on each rank for all; above 2^24 pairs also A·N·D, as the cosines are not kept. torch.func and a second
    derivative need block_size=0, and forward mode of transported detach_weights=False.
    ValueError names the argument that is off.
    Ref: PRESETS
    """
    o = _options(loss, weights, objective, temperature, tau_plus, beta, alpha, top_k, epsilon, cost, kappa, margin,
                 detach_weights, reduction, block_size)
    _check_embeddings(views, negatives, own, labels, group)
    with torch.autocast(views[0].device.type, enabled=False):
        anchors, positives, candidates, bar, shared, everyone = _roles(views, negatives, own, labels, normalize, group)
        size = _block_size(anchors, candidates) if block_size is None else block_size
        potential = None
        if o.weights == "transported":  # the coupling is of all anchors at once, so its potential precedes the blocks
            with torch.set_grad_enabled(torch.is_grad_enabled() and not o.detach_weights):
                all_anchors, bar_all = everyone()
                blocks = lambda: (bar_all(_log_kernel(all_anchors[rows] @ candidates.T, epsilon, cost, kappa), rows)
                                  for rows in _slices(len(all_anchors), size))
                # kept where autograd does so anyway, and up to 64 MB; else made anew for each step
                if torch.is_grad_enabled() or len(all_anchors) * len(candidates) <= 2**24:
                    blocks = lambda kept=list(blocks()): kept
                potential = sinkhorn(blocks)[1]

        def rule(rows, *tensors, scratch=None):
            return _losses(o, *tensors, lambda x: bar(x, rows), shared(rows), return_stats, scratch)

        tensors = (anchors, positives, candidates, temperature, potential)
        if size == 0:
            losses, figures = rule(slice(None), *_cosines(*tensors[:3]), temperature, potential)
        elif torch.is_grad_enabled() and any(torch.is_tensor(x) and x.requires_grad for x in tensors):
            losses, figures = _Blockwise.apply(rule, size, reduction, *tensors)
        else:
            losses, figures, _ = _sweep(rule, size, tensors)
        if losses.ndim and reduction != "none":
            losses = losses.mean() if reduction == "mean" else losses.sum()
        if group is not None:
            losses = _of_all_ranks(losses, reduction, group)
            if return_stats:
                figures = {name: _gather(figure.detach().to(losses.dtype), group) for name, figure in figures.items()}
    stats = _summary(figures)
    clamped = stats.get("clamped", 0)
    if _known(clamped) and clamped > 0.5:
        _warn_once("clamped", f"debiasing: the floor binds for {clamped:.0%} of the anchors, and gives their "
                   f"negatives no gradient: raise temperature ({float(temperature):g}) or lower tau_plus "
                   f"({o.tau_plus:g})")
    return (losses, stats) if return_stats else losses


def _losses(o, pos_cosines, cosines, temperature, potential, bar, shared=None, return_stats=False, scratch=None):
    """The three questions, for some of the anchors: losses (a,), and the figures of them that `_summary` adds up.

    pos_cosines (a, M), cosines (a, N). bar(x) makes x (a, N) −∞ where there is no candidate; shared (a, N) is −∞ where
    there is no positive, 0 elsewhere. scratch (a, N) may be overwritten, and if it is given, the cosines too.
    """
    objective, weights = OBJECTIVES[o.objective], WEIGHTS[o.weights]
    o = SimpleNamespace(**{**vars(o), "temperature": temperature, "potential": potential, "log_w_pos": None})
    o.sums, neg, log_w, figures = None, None, None, {}
    pos = pos_cosines / temperature
    if o.objective == "ppcl" and shared is not None:
        pos = torch.cat([pos, cosines / temperature + shared], 1)                           # (a, M + N)
    exponential, differentiable = "sums" in _takes(objective), torch.is_grad_enabled() and not o.detach_weights
    tilt = _tilt(o) if exponential and scratch is not None and not return_stats else None
    if tilt is not None:  # a short cut to the same sums, in place, where weights and objective are exponentials both
        o.sums = _TiltedSum.apply(cosines, bar, *tilt, temperature, o.detach_weights, scratch)
    else:
        # 1. Who could be a negative?
        shut = bar(torch.zeros_like(cosines))  # added after a temperature that may be learned: 0 · ∞ is no gradient
        figures = _cosine_figures(cosines, shut, pos, temperature) if return_stats else {}
        if o.weights == "top":  # the nearest alone, uniformly: the others are left behind here, at k of N the work
            index, below = _nearest(cosines.detach() + shut, o.alpha, o.top_k)
            cosines = cosines.gather(1, index)                                              # (a, k)
            shut = torch.zeros_like(cosines).masked_fill(below, -INF)
        neg = cosines / temperature + shut
        # 2. How much does each one count?
        with torch.set_grad_enabled(differentiable):
            log_w = shut if o.weights == "top" else _apply(weights, o, neg)                 # top: those that are left
        if exponential:
            o.sums = _logsumexp(neg + log_w), _log_count(shut)  # weights add up to the number of those left
    if o.tau_plus > 0 and pos.shape[1] > 1:  # by the same rule, but outside the coupling: there is no potential
        o.potential = 0.0
        with torch.set_grad_enabled(differentiable):
            o.log_w_pos = _apply(weights, o, pos)
    # 3. What is done with them?
    losses = _apply(objective, o, *((pos, neg) if exponential else (pos_cosines, cosines)), log_w)
    with torch.no_grad():
        return losses, figures | _figures(o, pos, neg, log_w, return_stats)


# From here to ContrastiveLoss: how it is carried out, in blocks of anchors; nothing new to learn on a first reading.

def _takes(function):
    """The names of a function's parameters: an option of contrastive_loss reaches every function that names it."""
    return function.__code__.co_varnames[:function.__code__.co_argcount]


def _apply(function, o, *tensors):
    return function(*tensors, **{name: getattr(o, name) for name in _takes(function)[len(tensors):]})


def _roles(views, negatives, own, labels, normalize, group):
    """Who is whose: anchors (A, D), positives (A, M, D), candidates (N, D), and two functions of a slice of the
    anchors: bar(x, rows), which makes x (a, N) −∞, in place, for the candidates that are no negatives, and shared(rows)
    (a, N), −∞ for those that are no positives by their label and 0 for all others. Last a function that gives the
    anchors of all ranks, and their bar."""
    given = views if negatives is None else (*views, negatives)
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in given], torch.float32)
    given = [unit(x.to(dtype)) if normalize else x.to(dtype) for x in given]
    b, v, device = len(views[0]), len(views), views[0].device
    own, labels = (None if x is None else torch.as_tensor(x, device=device) for x in (own, labels))
    # an anchor is barred from its own sample, by columns `own` (A, any number), and from its label, where there are any
    if negatives is None:
        anchors = torch.cat(given)
        positives = torch.stack([anchors.roll(-k * b, 0) for k in range(1, v)], 1)  # the views after one's own, in turn
        candidates = _gather(anchors, group)
        own = torch.arange(_rank(group) * v * b, (_rank(group) + 1) * v * b, device=device).view(v, b).T.repeat(v, 1)
        mine = None if labels is None else labels.repeat(v)
        theirs = None if labels is None else _gather(mine, group)
    else:
        *given, candidates = given
        anchors, positives = given[0], torch.stack(given[1:], 1)
        own = torch.empty(b, 0, dtype=torch.long, device=device) if own is None else own[:, None].long()
        mine, theirs = (None, None) if labels is None or len(labels) == b else labels.split([b, len(labels) - b])

    def bar(x, rows, own=own, mine=mine):
        x.scatter_(1, own[rows], -INF)
        return x if mine is None else x.masked_fill_(mine[rows, None] == theirs, -INF)

    def shared(rows):
        if mine is None:
            return None
        return anchors.new_zeros(len(own[rows]), len(candidates)).masked_fill_(
            mine[rows, None] != theirs, -INF).scatter_(1, own[rows], -INF)

    def everyone():
        all_own, all_labels = _gather(own, group), None if mine is None else _gather(mine, group)
        return _gather(anchors, group), lambda x, rows: bar(x, rows, all_own, all_labels)

    return anchors, positives, candidates, bar, shared, everyone


class _Gather(torch.autograd.Function):
    """The rows of every rank, in the order of the ranks; back comes the sum of what all ranks have for one's own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x, group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group))[_rank(ctx.group)], None


def _gather(x, group):
    return x if group is None else _Gather.apply(x.contiguous(), group)


def _rank(group):
    return 0 if group is None else distributed.get_rank(group)


def _of_all_ranks(losses, reduction, group):
    """The value of one process, and a gradient that is one process's when it is averaged over the ranks."""
    if reduction == "none":
        return losses
    ranks = distributed.get_world_size(group)
    total = losses.detach().clone()
    distributed.all_reduce(total, group=group)
    mine = losses if reduction == "mean" else ranks * losses
    return mine + (total / (ranks if reduction == "mean" else 1) - mine).detach()


@torch.no_grad()
def _cosine_figures(cosines, shut, pos, temperature):
    """Sums of the cosines of positives and of all candidates, and their numbers, a vector (a,) each."""
    n = _count(shut)[:, 0]
    return {"n": n, "any": n > 0, "negative": (cosines * _there(shut)).sum(-1), "pos_n": _count(pos)[:, 0],
            "positive": temperature * _finite(pos).sum(-1)}


def _figures(o, pos, neg, log_w, return_stats):
    """The effective number of negatives, and where the floor binds, a vector (a,) each."""
    figures = {}
    if return_stats or o.tau_plus > 0 and "clamped" not in _warned:
        figures["clamped"] = torch.zeros_like(pos[:, 0])
        if o.tau_plus > 0 and o.sums is not None:
            log_negative, log_n = debiased(pos, neg, log_w, o.tau_plus, o.temperature, o.log_w_pos, o.sums), o.sums[1]
            figures["clamped"] = ((log_negative <= log_n - 1 / o.temperature) & (log_n >= 0)).to(pos.dtype)
    if return_stats:
        figures["effective"] = torch.exp(2 * _logsumexp(log_w) - _logsumexp(2 * log_w)) * (_count(neg)[:, 0] > 0)
    return figures


def _summary(figures):
    """The statistics, from the figures of all anchors."""
    stats = {k: v.float().mean() for k, v in figures.items() if k == "clamped"}
    if "effective" in figures:
        stats["ess"] = (figures["effective"] / figures["n"].clamp_min(1)).sum() / figures["any"].sum()
        stats["positive"] = figures["positive"].sum() / figures["pos_n"].sum()
        stats["negative"] = figures["negative"].sum() / figures["n"].sum()
    return stats


def _cosines(anchors, positives, candidates, out=None):
    """Cosines of the anchors (a, D) with their positives (a, M, D) and with all candidates (N, D): (a, M), (a, N)."""
    return (anchors[:, None] * positives).sum(-1), torch.mm(anchors, candidates.T, out=out)


def _block_size(anchors, candidates):
    """As many anchors as keep a block's logits near a CPU, or a GPU busy, but enough of them for a quick product."""
    return max(128, 2**(20 if anchors.device.type == "cpu" else 25) // len(candidates))


def _tilt(o):
    """a and b of weights that are exponentials, w_ij ∝ e^{a s_ij + b_j}, and constants; None of any other."""
    if torch.is_tensor(o.temperature) or torch.is_tensor(o.potential) and o.potential.requires_grad:
        return None
    if o.weights == "transported" and o.cost == "sqeuclidean":
        return o.temperature / o.epsilon, o.potential
    return {"uniform": (0.0, None), "tilted": (o.beta, None)}.get(o.weights)


class _TiltedSum(torch.autograd.Function):
    """log Σ_j w_ij e^{s_ij} for weights that are exponentials, w_ij ∝ e^{a s_ij + b_j}, of mean 1; and log n_i.

        total_i = log n_i + LSE_j((1 + a) s_ij + b_j) − LSE_j(a s_ij + b_j),     ∂total_i/∂s_ij = p_ij + a (p_ij − q_ij)

    with the shares p, q of the two sums; p alone where the weights are detached. It is what autograd would make of
    `tilted`, but in the place of the cosines, which q and the gradient take, and of one matrix p instead of a dozen.
    """

    @staticmethod
    def forward(ctx, cosines, bar, a, b, temperature, detach_weights, p):
        def log_sum(factor, out):
            x = torch.mul(cosines, factor / temperature, out=out)
            return _log_sum(x if b is None else x.add_(b), -1, out=out)[0]

        bar(cosines)
        log_n = torch.ne(cosines, -INF, out=p).sum(-1).log().clamp_min(torch.finfo(p.dtype).min)
        # numerics: from the nearest down, as in `_proportional`, and p − q before it is multiplied
        nearest = cosines.amax(-1, keepdim=True).nan_to_num_(neginf=0)
        cosines.sub_(nearest)
        if b is None and a / temperature < torch.finfo(p.dtype).tiny:  # that is 0, and 0 · ∞ is not
            total, ctx.gradient = log_sum(1, cosines), cosines
        else:
            total, ctx.gradient = log_n + (log_sum(1 + a, p) - log_sum(a, cosines)), p
            if not detach_weights:
                ctx.gradient = torch.add(p, torch.sub(p, cosines, out=cosines), alpha=a, out=cosines)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(log_n)
        return total + nearest[:, 0] / temperature, log_n

    @staticmethod
    def backward(ctx, grad, _):
        return ctx.gradient.mul_(grad[:, None] / ctx.temperature), *[None] * 6


def _slices(n, size):
    """Slices of `size` rows that make n; of size 0, one of all."""
    return [slice(start, start + size) for start in range(0, n, size)] if size else [slice(None)]


def _sweep(rule, size, tensors, weight=None, wanted=(False,) * 5):
    """`rule` in blocks of anchors: losses (A,), figures, and for every tensor wanted Σ_i weight_i ∂ℓ_i/∂tensor.

    A block's cosines are one product; autograd runs from them to the losses alone, on a CPU a few rows at a time that
    stay in its cache, and their gradient takes their place: two more products bring it to the embeddings. What is kept
    is of the size of the tensors.
    """
    anchors, positives, candidates, *scalars = (x.detach() if torch.is_tensor(x) else x for x in tensors)
    scalars = [x.requires_grad_(w) if torch.is_tensor(x) else x for x, w in zip(scalars, wanted[3:])]
    into = [torch.zeros_like(x) if w else None for x, w in zip(tensors, wanted)]
    size = min(size, max(1, len(anchors)))
    few = size if anchors.device.type != "cpu" else max(1, min(size, 2**20 // len(candidates)))
    # made once: fresh memory for each block would cost a CPU more than what is done in it
    room, scratch = anchors.new_empty(size, len(candidates)), anchors.new_empty(few, len(candidates))
    losses, figures = anchors.new_empty(len(anchors)), {}
    for block in _slices(len(anchors), size):
        pos, cosines = _cosines(anchors[block], positives[block], candidates, out=room[:len(anchors[block])])
        for inner in _slices(len(pos), few):
            rows = slice(block.start + inner.start, min(block.start + inner.stop, block.stop))
            leaves = [x[inner].detach().requires_grad_(any(wanted[:3])) for x in (pos, cosines)] + scalars
            with torch.set_grad_enabled(weight is not None):
                values, numbers = rule(rows, *leaves, scratch=scratch[:len(leaves[0])])
            losses[rows] = values.detach()
            for name, part in numbers.items():
                figures.setdefault(name, part.new_empty(len(anchors)))[rows] = part
            del numbers
            if weight is None:
                continue
            parts = [None] * 4
            if values.requires_grad:  # not where a learned t is all there is, and has no effect
                asked = [k for k, x in enumerate(leaves) if torch.is_tensor(x) and x.requires_grad]
                found = torch.autograd.grad(values, [leaves[k] for k in asked], weight[rows], allow_unused=True)
                for k, part in zip(asked, found):
                    parts[k] = part
            for x, part in zip((pos, cosines), parts):  # from here on their gradients
                x[inner] = 0 if part is None else part
            for total, part in zip(into[3:], parts[2:]):
                if part is not None:
                    total += part
        if wanted[0]:
            into[0][block] = cosines @ candidates + (pos[:, :, None] * positives[block]).sum(1)
        if wanted[1]:
            into[1][block] = pos[:, :, None] * anchors[block][:, None]
        if wanted[2]:
            into[2].addmm_(cosines.T, anchors[block])
    return losses, figures, into


class _Blockwise(torch.autograd.Function):
    """`_sweep` as one step of autograd: each block's gradient is taken while its similarities are still there.

    A mean or a sum scales it afterwards. With "none" the weight of each anchor is known in the backward pass only, so
    the blocks are worked again there.
    """

    @staticmethod
    def forward(ctx, rule, size, reduction, *tensors):
        ctx.rule, ctx.size, ctx.wanted, ctx.again = rule, size, ctx.needs_input_grad[3:], reduction == "none"
        if ctx.again:
            ctx.constants = [None if torch.is_tensor(x) else x for x in tensors]
            ctx.save_for_backward(*(x if torch.is_tensor(x) else None for x in tensors))
            return _sweep(rule, size, tensors)[:2]
        weight = torch.full_like(tensors[0][:, 0], 1 / len(tensors[0]) if reduction == "mean" else 1)
        losses, figures, gradients = _sweep(rule, size, tensors, weight, ctx.wanted)
        ctx.save_for_backward(*gradients)
        return losses @ weight, figures

    @staticmethod
    def backward(ctx, grad, _):
        if torch.is_grad_enabled():
            raise RuntimeError("this loss can be differentiated twice with block_size=0 alone")
        gradients = ctx.saved_tensors
        if ctx.again:
            tensors = [constant if x is None else x for x, constant in zip(gradients, ctx.constants)]
            with torch.autocast(grad.device.type, enabled=False):
                gradients, grad = _sweep(ctx.rule, ctx.size, tensors, grad, ctx.wanted)[2], 1
        return None, None, None, *(None if g is None else g * grad for g in gradients)


class ContrastiveLoss(nn.Module):
    """`contrastive_loss` as a module: ContrastiveLoss("hcl", beta=0.5)(view_1, view_2).

    Options are those of `contrastive_loss`, and are checked here; given to the call they override (a schedule's alpha,
    a bank's rows, labels). A temperature that is an nn.Parameter is learned.
    """

    def __init__(self, loss="simclr", **options):
        super().__init__()
        defaults = contrastive_loss.__kwdefaults__
        unknown = sorted(options.keys() - defaults.keys())
        if unknown:
            raise TypeError(f"no option {', '.join(unknown)}: there are {', '.join(defaults)}")
        self.options = {"loss": loss, **options}
        given = {**defaults, **self.options}
        self.resolved = _options(*(given[name] for name in _takes(_options)))
        if isinstance(options.get("temperature"), nn.Parameter):
            self.temperature = self.options.pop("temperature")

    def forward(self, *views, **options):
        """The loss of the views, with the module's options and those given here."""
        learned = {"temperature": self.temperature} if hasattr(self, "temperature") else {}
        return contrastive_loss(*views, **{**self.options, **learned, **options})

    def extra_repr(self):
        """The loss, and every option that it takes."""
        o = self.resolved
        used = dict.fromkeys(("temperature", *_takes(WEIGHTS[o.weights]) + _takes(OBJECTIVES[o.objective])))
        shown = {name: getattr(o, name) for name in used if hasattr(o, name)}
        unused = {name for f in (*WEIGHTS.values(), *OBJECTIVES.values()) for name in _takes(f)} - used.keys()
        given = {name: value for name, value in self.options.items() if value is not None and name not in unused}
        shown = {"weights": o.weights, "objective": o.objective, **shown, **given}
        if hasattr(self, "temperature"):
            shown["temperature"] = f"{float(self.temperature.detach()):g}, learned"
        return ", ".join([repr(shown.pop("loss"))] + [f"{name}={value!r}" for name, value in shown.items()])


def _options(loss, weights, objective, temperature, tau_plus, beta, alpha, top_k, epsilon, cost, kappa, margin,
             detach_weights, reduction, block_size):
    """The options, checked, with what the preset leaves open filled in."""
    _require(loss in PRESETS, "loss", loss, f"one of {', '.join(PRESETS)}")
    weights, objective = weights or PRESETS[loss][0], objective or PRESETS[loss][1]
    tau_plus = PRESETS[loss][2] if tau_plus is None else tau_plus
    detach_weights = weights == "transported" if detach_weights is None else detach_weights
    _require(weights in WEIGHTS, "weights", weights, f"one of {', '.join(WEIGHTS)}, or None for the loss's own")
    _require(objective in OBJECTIVES, "objective", objective,
             f"one of {', '.join(OBJECTIVES)}, or None for the loss's own")
    plain = dict(tau_plus=tau_plus, beta=beta, alpha=alpha, epsilon=epsilon, kappa=kappa, margin=margin)
    for name, value in plain.items():
        _require(isinstance(value, numbers.Real), name, repr(value), "a number; only temperature may be learned")
    scalar = isinstance(temperature, numbers.Real) or torch.is_tensor(temperature) and temperature.ndim == 0
    _require(scalar and (not _known(temperature) or 0 < temperature < INF), "temperature", temperature,
             "a number above 0")
    _require(0 <= tau_plus < 1, "tau_plus", tau_plus, "in [0, 1)")
    _require(0 <= beta < INF, "beta", beta, "a number of at least 0")
    _require(0 < alpha <= 1, "alpha", alpha, "in (0, 1]")
    _require(top_k is None or isinstance(top_k, numbers.Integral) and top_k is not True and top_k >= 1, "top_k",
             repr(top_k), "None, or a whole number of at least 1")
    _require(0 < epsilon < INF, "epsilon", epsilon, "a number above 0")
    _require(cost in ("sqeuclidean", "exp"), "cost", cost, "sqeuclidean or exp")
    _require(-INF < kappa < INF, "kappa", kappa, "a finite number")
    _require(0 <= margin < INF, "margin", margin, "a number of at least 0")
    _require(reduction in ("mean", "sum", "none"), "reduction", reduction, "mean, sum or none")
    _require(block_size is None or isinstance(block_size, int) and block_size >= 0, "block_size", block_size,
             "None, 0 or a number of anchors")
    return SimpleNamespace(weights=weights, objective=objective, temperature=temperature, tau_plus=tau_plus, beta=beta,
                           alpha=alpha, top_k=top_k, epsilon=epsilon, cost=cost, kappa=kappa, margin=margin,
                           detach_weights=detach_weights)


def _check_embeddings(views, negatives, own, labels, group):
    for name, x in [("views", x) for x in views] + ([] if negatives is None else [("negatives", negatives)]):
        _require(torch.is_tensor(x), name, type(x).__name__,
                 "tensors, each an argument of its own" if name == "views" else "a tensor")
    shapes = [tuple(x.shape) for x in views]
    _require(len(views) >= 2, "views", shapes, "at least two tensors (B, D)")
    _require(len(set(shapes)) == 1 and len(shapes[0]) == 2 and shapes[0][1] > 0, "views", shapes,
             "tensors (B, D) of one shape")
    _require(all(x.is_floating_point() for x in views), "views", [x.dtype for x in views], "of a floating dtype")
    _require(group is None or isinstance(group, getattr(distributed, "ProcessGroup", ())), "group", repr(group),
             "None or a process group, such as torch.distributed.group.WORLD")
    (b, d), k = shapes[0], 0
    if negatives is None:
        _require(b >= 2 or group is not None, "views", shapes,
                 "of at least 2 samples: with B = 1 there is no negative")
    else:
        k = len(negatives)
        _require(negatives.ndim == 2 and k >= 1 and negatives.shape[1] == d and negatives.is_floating_point(),
                 "negatives", f"{tuple(negatives.shape)} {negatives.dtype}",
                 f"a tensor (K, {d}) of at least 1 row, of a floating dtype")
        _require(b >= 1, "views", shapes, "of at least 1 sample")
    if own is not None:
        own = torch.as_tensor(own)
        _require(negatives is not None, "own", "given", "None where there are no negatives")
        _require(own.shape == (b,) and not (own.is_floating_point() or own.dtype == torch.bool), "own",
                 f"of shape {tuple(own.shape)}, {own.dtype}", f"({b},) whole numbers, one for each sample")
    if labels is not None:
        shape = tuple(torch.as_tensor(labels).shape)
        _require(shape in ((b,), (b + k,)), "labels", f"of shape {shape}", f"({b},), one for each sample"
                 + (f", or ({b + k},), also one for each row of negatives" if k else ""))
    given = {f"views[{i}]": x for i, x in enumerate(views)} | ({} if negatives is None else {"negatives": negatives})
    finite = torch.stack([torch.stack(x.detach().aminmax()).isfinite().all() for x in given.values()]
                         + ([] if own is None else [((own >= 0) & (own < k)).all().to(views[0].device)]))
    if _known(finite) and not finite.all():
        name, x = next(((name, x) for name, x in given.items() if not x.isfinite().all()), (None, None))
        _require(name is not None, "own", "an index outside of negatives", f"in [0, {k})")
        bad = (~x.isfinite()).any(1).sum()
        raise _NotFinite(f"{name} is a tensor with NaN or inf in {bad} of {len(x)} rows; it must be finite")


class _NotFinite(ValueError):
    """Of embeddings, so that a training loop knows it from other errors."""


def _require(fine, name, got, allowed):
    if not fine:
        raise ValueError(f"{name} is {got}; it must be {allowed}")


def _known(x):
    """Whether a value can be read: a meta or a fake tensor has a shape and a device alone."""
    return not torch.is_tensor(x) or not (x.is_meta or hasattr(x, "fake_mode"))


_warned = set()


def _warn_once(key, message):
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, stacklevel=3)


def annealed_beta(progress, beta, changes=5):
    """β brought down to 0 in stairs: β · (1 − ⌊ℓ · progress⌋ / ℓ), with ℓ = changes, over progress in [0, 1].

    Hard negatives early, when they carry the most; uniform ones late, when many of the hardest are of the anchor's
    class.
    Ref: [1] App. C
    """
    return beta * (1 - math.floor(changes * progress) / changes)


def lead_in(progress, alpha, until=0.5):
    """The share kept, brought down from 1 to α geometrically until `until`: α^{min(1, progress / until)}.

    A random encoder's nearest candidates are near by background and colour alone; learning from those only, it stays
    there.
    """
    return alpha ** min(1.0, progress / until)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Views: random crops, flips and colours of a whole batch, on whatever device the images are, with a gradient
# ---------------------------------------------------------------------------------------------------------------------

TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))  # luma, and two axes of chroma


def view(images, generator=None, area=(0.2, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5, jitter=0.8, brightness=0.4,
         contrast=0.4, saturation=0.4, hue=0.1, gray=0.2, blur=0.0, sigma=(0.1, 2.0)):
    """One random view of every image: resized crop, flip, colour jitter, grayscale, blur, each drawn for each image.

    images (B, 3, H, W), uint8 or floats in [0, 1] → floats in [0, 1] of the same shape, differentiable in the images.
    generator          a torch.Generator on the images' device; all that is random is one draw, so its state replays a
                       view
    area, ratio        ranges of the crop's share of the image and of its width to height (clipped to the image)
    flip, jitter, gray, blur       probabilities of a mirror image, of the colour jitter, of no colour, of a blur
    brightness, contrast, saturation   factors are drawn from [1 − x, 1 + x]
    hue                turns of the colour circle are drawn from [−x, x]
    sigma              range of the blur's standard deviation, in pixels
    Defaults are [6]'s for images of 32 × 32: colour strength 0.5, no blur, but with area from 0.2 instead of 0.08.
    Colour is one affine map per pixel: in luma and chroma, brightness scales both, contrast both around the mean luma,
    saturation and hue scale and turn chroma. So the four commute, need no random order, and the result is clipped once.
    Ref: [6] App. A; [3] 3.1 for the gradient
    """
    b, _, height, width = images.shape
    x = _floats(images)
    u = torch.rand(b, 13, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype).unbind(1)

    def between(low, high, r):
        return low + (high - low) * r

    # crop and flip: where each pixel of the view comes from, in coordinates from −1 to 1
    share, aspect = between(*area, u[0]), torch.exp(between(math.log(ratio[0]), math.log(ratio[1]), u[1]))
    w, h = (share * aspect).sqrt().clamp_max(1), (share / aspect).sqrt().clamp_max(1)
    zero, mirror = torch.zeros_like(w), 1 - 2 * (u[4] < flip).to(x.dtype)
    theta = torch.stack([w * mirror, zero, (1 - w) * (2 * u[2] - 1), zero, h, (1 - h) * (2 * u[3] - 1)], 1)
    grid = F.affine_grid(theta.view(b, 2, 3), x.shape, align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    # colour: rgb → yiq, turn and scale chroma, → rgb, as one matrix and one offset an image
    on = (u[5] < jitter).to(x.dtype)
    light, sharp, vivid = (1 + on * between(-s, s, r)
                           for s, r in ((brightness, u[6]), (contrast, u[7]), (saturation, u[8])))
    turn, vivid = on * between(-hue, hue, u[9]) * 2 * math.pi, vivid * (u[10] >= gray)
    cos, sin, one = turn.cos() * vivid, turn.sin() * vivid, torch.ones_like(turn)
    chroma = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(b, 3, 3)
    to_yiq = torch.tensor(TO_YIQ, device=x.device)
    to_rgb, to_yiq = torch.linalg.inv(to_yiq).to(x.dtype), to_yiq.to(x.dtype)
    colour = to_rgb @ chroma @ to_yiq
    luma = (x.mean((2, 3)) @ to_yiq[0]) * light
    x = (light * sharp)[:, None, None] * (colour @ x.flatten(2)) + ((1 - sharp) * luma)[:, None, None]
    x = x.view(b, 3, height, width)
    if blur > 0:
        x = _blur(x, between(*sigma, u[11]), u[12] < blur)
    return x.clamp(0, 1)


def _floats(images):
    """Images in [0, 1]."""
    return images / 255 if images.dtype == torch.uint8 else images


def _blur(x, sigma, chosen):
    """Gaussian blur of the chosen images, each with its own standard deviation in pixels, one axis after the other."""
    radius = max(1, x.shape[-1] // 20)  # a kernel a tenth as wide as the image, [6]
    steps = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.softmax(-(steps / sigma[:, None]) ** 2 / 2, 1)
    kernel = torch.where(chosen[:, None], kernel, (steps == 0).to(x.dtype))
    padded = F.pad(x, (radius,) * 4, mode="reflect")
    rows = sum(kernel[:, k, None, None, None] * padded[:, :, k:k + x.shape[2]] for k in range(len(steps)))
    return sum(kernel[:, k, None, None, None] * rows[:, :, :, k:k + x.shape[3]] for k in range(len(steps)))


# ---------------------------------------------------------------------------------------------------------------------
# 6. Images: built in, from torchvision, from a folder; uint8 (n, 3, H, W) on the device
# ---------------------------------------------------------------------------------------------------------------------

class Files(torch.utils.data.Dataset):
    """Image files in place of a tensor uint8 (n, 3, size, size), for data larger than memory: read when needed.

    paths      n files, each resized to `size` and cropped to its middle
    workers    processes that read ahead, at least 0: with none, reading and training wait for each other
    device     where what is read goes
    `len`, `shape`, `device`, `to` and `split` are those of the tensor; files[some] are these files, unread, and with a
    whole number k files[k] is that image. A file that cannot be read is named in a warning, by every process that meets
    it, and the next one that can be stands in for it, under its label.
    """

    def __init__(self, paths, size, workers=0, device="cpu"):
        _require(isinstance(workers, int) and workers >= 0, "workers", repr(workers),
                 "None, to hold all images in memory, or a number of processes")
        self.paths, self.workers, self.device = list(paths), workers, torch.device(device)
        self.shape = torch.Size((len(self.paths), 3, size, size))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if not isinstance(index, numbers.Integral):
            chosen = torch.arange(len(self))[index if isinstance(index, slice) else torch.as_tensor(index).cpu()]
            return Files([self.paths[k] for k in chosen.tolist()], self.shape[-1], self.workers, self.device)
        index = range(len(self))[index]
        for k in range(len(self)):
            path = self.paths[(index + k) % len(self)]
            try:
                return _read_image(path, self.shape[-1])
            except Exception as error:  # a broken file can fail in many ways, which have no exception in common
                _warn_once(path, f"{path} cannot be read as an image ({error}); another one stands in for it")
        raise ValueError("none of the files can be read as an image")

    def to(self, device):
        """The same files, to be read to another device."""
        return Files(self.paths, self.shape[-1], self.workers, device)

    def batches(self, indices):
        """Batch after batch, uint8 on the device, of a list of tensors of indices; the next ones are read meanwhile."""
        loader = torch.utils.data.DataLoader(
            self, batch_sampler=[index.tolist() for index in indices], num_workers=self.workers,
            pin_memory=self.device.type == "cuda", generator=torch.Generator())  # or the seed of all would move on
        for images in loader:
            yield images.to(self.device, non_blocking=True)

    def split(self, size):
        """All of them in turn, `size` at a time."""
        return self.batches(torch.arange(len(self)).split(size))


class Images(NamedTuple):
    """A training and a test set with labels, and the names of the classes."""
    train: torch.Tensor         # (n, 3, H, W) uint8, or Files
    train_labels: torch.Tensor  # (n,)
    test: torch.Tensor          # (m, 3, H, W) uint8, or Files
    test_labels: torch.Tensor   # (m,)
    classes: list

    def to(self, device):
        """The same images on another device."""
        return Images(*(x.to(device) for x in self[:-1]), self.classes)


OUTLINES = {  # name: distance from the centre to the outline in the direction a, at most about 1
    "disc": lambda a: torch.full_like(a, 0.8),
    "ellipse": lambda a: 0.45 / torch.sqrt((0.45 * a.cos()) ** 2 + a.sin() ** 2),
    "triangle": lambda a: _polygon(a, 3) * 1.1,
    "square": lambda a: _polygon(a, 4),
    "star": lambda a: 0.65 + 0.35 * (5 * a).cos(),
    "clover": lambda a: 0.6 + 0.4 * (3 * a).cos(),
    "peanut": lambda a: 0.3 + 0.7 * a.cos() ** 2,
    "heart": lambda a: (2 - 2 * a.sin() + a.sin() * a.cos().abs().sqrt() / (a.sin() + 1.4)) / 3.2,
    "cross": lambda a: 0.32 / torch.minimum(a.cos().abs(), a.sin().abs()).clamp_min(0.32),
    "gear": lambda a: 0.8 + 0.2 * torch.tanh(6 * (8 * a).cos()),
}
CRAYONS = ((0.85, 0.25, 0.2), (0.2, 0.4, 0.85), (0.9, 0.8, 0.3), (0.15, 0.15, 0.15))


def _polygon(a, corners):
    step = 2 * math.pi / corners
    return math.cos(step / 2) / (a.remainder(step) - step / 2).cos()


def shapes(n=8000, classes=10, seed=0, size=32):
    """Images of outlines, made here: each class an outline, all else random (colours, place, size, turn, background).

    n images → uint8 (n, 3, size, size) and labels (n,). Pixels tell nearly nothing of the class, as nothing but the
    form does; still a small network learns it in a minute. classes: 2 to 10. The same seed draws the same images.
    """
    _require(2 <= classes <= len(OUTLINES), "classes", classes, f"2 to {len(OUTLINES)}")
    _require(n >= 1, "n", n, "at least 1")
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)
    labels = torch.arange(n) % classes
    labels = labels[torch.randperm(n, generator=generator)]
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    for some in torch.arange(n).split(2000):
        k = len(some)
        radius, turn = 0.45 + 0.35 * rand(k, 1, 1), 2 * math.pi * rand(k, 1, 1)
        x, y = axis - 0.6 * (rand(k, 1, 1) - 0.5), axis[:, None] - 0.6 * (rand(k, 1, 1) - 0.5)
        angle = torch.atan2(y, x) + turn
        angle = (angle + math.pi).remainder(2 * math.pi) - math.pi
        edge = torch.empty(k, size, size)
        for c, outline in enumerate(list(OUTLINES.values())[:classes]):
            edge[labels[some] == c] = outline(angle[labels[some] == c])
        inside = torch.sigmoid((edge * radius - (x * x + y * y).sqrt()) * size / 2)[:, None]
        first = torch.randint(len(CRAYONS), (k,), generator=generator)
        second = (first + torch.randint(1, len(CRAYONS), (k,), generator=generator)) % len(CRAYONS)  # never the same
        ink, paper = (torch.tensor(CRAYONS)[c][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
                      for c in (first, second))
        light = 0.9 + 0.2 * rand(k, 1, 1, 1)
        picture = light * (paper + (ink - paper) * inside) + 0.05 * torch.randn(k, 3, size, size, generator=generator)
        images[some] = (picture.clamp(0, 1) * 255).to(torch.uint8)
    return images, labels


def load(data="shapes", root="data", size=None, fraction=1.0, seed=0, workers=None):
    """A data set by name, or a folder of images → Images.

    data       "shapes"; a torchvision set: "cifar10", "cifar100", "stl10", "svhn", "fashion-mnist"; or a folder with
               one folder of images per class, either directly (every fifth image of a class is then kept for the test)
               or in train/ and test/ (or val/)
    root       where torchvision's sets are, or are downloaded to
    size       side of the square that images are resized (and a folder's cropped) to; None: their own, for a folder
               that of the first one (the next even number) if it is square and at most 96, else 32, 64 or 96
    fraction   the share of each class's training images that is kept, in (0, 1]: for experiments on how little suffices
    workers    of a folder, processes that read its images while the encoder trains, again in each epoch, so that memory
               need not hold them (see Files); None: all are read now, and kept
    An image file that cannot be read is named in a warning and left out (with workers another one stands in for it);
    hidden folders are not looked at.
    """
    _require(0 < fraction <= 1, "fraction", fraction, "in (0, 1]")
    if data not in ("shapes", *TORCHVISION):
        return _from_folder(Path(data), size, fraction, seed, workers)
    _require(workers is None, "workers", workers, f"None for {data}, which is held in memory; a folder can be streamed")
    if data == "shapes":
        images = Images(*shapes(8000, seed=seed, size=size or 32), *shapes(2000, seed=seed + 10**6, size=size or 32),
                        list(OUTLINES))
    else:
        images = _from_torchvision(data, root)
    keep = _spread(images.train_labels, fraction, seed)
    images = images._replace(train=images.train[keep], train_labels=images.train_labels[keep])
    return images._replace(train=_resized(images.train, size), test=_resized(images.test, size))


TORCHVISION = {  # name: (class in torchvision.datasets, arguments of the training set, of the test set)
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),  # the unlabelled have label −1
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
}


def _resized(images, size):
    """uint8 images (n, 3, H, H) at another size, a few at a time."""
    if size in (None, images.shape[-1]):
        return images
    parts = [F.interpolate(x.float(), (size, size), mode="bicubic", antialias=True) for x in images.split(1000)]
    return torch.cat([x.round().clamp(0, 255).to(torch.uint8) for x in parts])


def _spread(labels, fraction, seed):
    """Indices of a random share of each class, at least one image of it, in their old order."""
    if fraction == 1:
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    kept = []
    for c in labels.unique():
        members = order[labels[order] == c]
        kept.append(members[:max(1, round(fraction * len(members)))])
    return torch.cat(kept).sort().values


def _from_torchvision(name, root):
    from torchvision import datasets
    kind, *parts = TORCHVISION[name]
    found = []
    for arguments in parts:
        try:
            found.append(getattr(datasets, kind)(root, download=True, **arguments))
        except Exception as error:  # no network, no place to write, a broken archive: each with an exception of its own
            raise RuntimeError(f"{name} is not in {root}/ and could not be downloaded ({error}). Put torchvision's "
                               f"files of {kind} there, or name a folder of images") from error
    sets = []
    for part in found:
        x = torch.as_tensor(part.data)
        x = x[:, None].expand(-1, 3, -1, -1) if x.ndim == 3 else x if x.shape[1] == 3 else x.permute(0, 3, 1, 2)
        labels = torch.as_tensor(getattr(part, "targets", getattr(part, "labels", None))).long()
        sets += [x.contiguous(), labels]
    classes = getattr(found[0], "classes", [str(c) for c in range(10)])
    return Images(*sets, list(classes))


def _from_folder(folder, size, fraction, seed, workers):
    from torchvision.datasets import ImageFolder
    _require(folder.is_dir(), "data", folder, f"shapes, {', '.join(TORCHVISION)}, or a folder of images")

    class Folder(ImageFolder):
        """Without what an editor or a notebook leaves in hidden folders."""
        def find_classes(self, directory):
            names = sorted(d.name for d in Path(directory).iterdir() if d.is_dir() and not d.name.startswith("."))
            if len(names) < 2:
                raise FileNotFoundError(f"{directory} needs a folder for each of at least 2 classes, not {names}")
            return names, {name: k for k, name in enumerate(names)}

    train = folder / "train" if (folder / "train").is_dir() else folder
    test = next((folder / name for name in ("test", "val") if train != folder and (folder / name).is_dir()), None)
    try:
        found = [Folder(part) for part in (train, test) if part]
    except FileNotFoundError as error:
        raise ValueError(f"data is {folder}; it must be a folder of images: {error}") from None
    classes = found[0].classes
    _require(found[-1].classes == classes, "data", folder,
             f"a folder whose train/ and test/ hold the same classes, {classes}")
    files = [part.samples for part in found]
    if len(files) == 1:  # no test set: every fifth image of each class is it
        by_class = [[f for f in files[0] if f[1] == c] for c in range(len(classes))]
        files = [[f for group in by_class for k, f in enumerate(group) if (k % 5 == 4) == held]
                 for held in (False, True)]
    keep = _spread(torch.tensor([c for _, c in files[0]]), fraction, seed)
    files[0] = [files[0][k] for k in keep]
    if workers is None:
        train, train_labels, size = _read_images(files[0], size)
        test, test_labels, _ = _read_images(files[1], size)
    else:
        size = size or _read_images(files[0][:1], None)[2]
        _require(size is not None, "size", size, f"given, as {files[0][0][0]} cannot be read")
        train, test = (Files([path for path, _ in part], size, workers) for part in files)
        train_labels, test_labels = (torch.tensor([c for _, c in part], dtype=torch.long) for part in files)
    _require(len(train) >= 2, "data", folder, "a folder with at least 2 readable images to train on")
    _require(len(test) >= 2, "data", folder, "a folder with at least 2 images to test on: in a test/ beside train/, or "
             "every fifth of each class")
    return Images(train, train_labels, test, test_labels, classes)


def _read_images(files, size):
    """Files as one tensor uint8 (n, 3, size, size), labels, the size; what cannot be read is left out."""
    pictures, labels, bad = [], [], []
    for path, label in files:
        try:
            pictures.append(_read_image(path, size))
        except Exception as error:  # a broken file can fail in many ways, which have no exception in common
            bad.append(f"{path} ({error})")
            continue
        labels.append(label)
        size = pictures[0].shape[-1]
    if bad:
        warnings.warn(f"{len(bad)} of {len(files)} files cannot be read as images and were left out: "
                      f"{', '.join(bad[:5])}" + (", …" if len(bad) > 5 else ""))
    return torch.stack(pictures) if pictures else torch.empty(0), torch.tensor(labels, dtype=torch.long), size


def _read_image(path, size):
    """A file as uint8 (3, size, size): the middle of it; size None: as `load` says."""
    from torchvision.datasets.folder import default_loader
    from torchvision.transforms import functional as T
    picture = default_loader(path)
    if size is None:
        side = min(picture.size) // 2 * 2
        size = side if max(picture.size) <= min(96, side + 1) else 32 if side < 64 else 64 if side < 96 else 96
    if picture.size != (size, size):
        picture = T.center_crop(T.resize(picture, size, T.InterpolationMode.BICUBIC), size)
    return T.pil_to_tensor(picture)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Encoders: a backbone and a projection head; the memory of embeddings
# ---------------------------------------------------------------------------------------------------------------------

class Encoder(nn.Module):
    """A backbone that gives features and a two-layer head that gives the embedding for the loss.

    name: "small" (four convolutions, a minute on a CPU), "resnet18" or "resnet50"; dim: of the embedding; size: side of
    the images. Images (B, 3, H, W) in [0, 1] → features (B, self.features), embeddings (B, dim). The features are what
    is kept after training. torchvision's networks get a 3 × 3 first convolution and no max-pooling for images of at
    most 64 pixels.
    Ref: [6] App. B.9 for small images; [1] App. C
    """

    def __init__(self, name="small", dim=128, size=32):
        super().__init__()
        _require(name in ("small", "resnet18", "resnet50"), "encoder", name, "small, resnet18 or resnet50")
        _require(size % 2 == 0 or name != "small", "size", size, "even for the small encoder")
        self.name, self.dim, self.size = name, dim, size
        if name == "small":
            widths, layers = (12, 32, 64, 128, 256), [nn.PixelUnshuffle(2)]  # 2 × 2 pixels at once: half the work
            for before, after, stride in zip(widths, widths[1:], (1, 2, 2, 1)):
                layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after),
                           nn.ReLU(inplace=True)]
            self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.features = widths[-1]
        else:
            from torchvision import models
            self.backbone = getattr(models, name)(weights=None)
            self.features = self.backbone.fc.in_features
            self.backbone.fc = nn.Identity()
            if size <= 64:
                self.backbone.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
                self.backbone.maxpool = nn.Identity()
        hidden = max(self.features, 2 * dim)
        self.head = nn.Sequential(nn.Linear(self.features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim))

    def forward(self, images):
        """Images (B, 3, H, W) in [0, 1] → features (B, self.features), embeddings (B, dim)."""
        features = self.backbone(4 * images - 2)  # about mean 0 and variance 1
        return features, self.head(features)


class MemoryBank(nn.Module):
    """One unit row for every training image, the moving average of its embeddings: its positive, and all candidates.

        row_i ← m row_i + (1 − m) z_i, back on the unit sphere

    size      rows, one an image; as a queue, the number of embeddings remembered
    dim       of an embedding
    momentum  m in [0, 1); 0 keeps the last embedding alone
    generator of the random directions that the rows begin with
    `rows` (size, dim) float32 is a buffer: it moves with the module, is in its state_dict, and has no gradient. Use:

        z = unit(encoder(view))
        loss = criterion(z, bank.rows[index], negatives=bank.rows, own=index, normalize=False)
        loss.backward(); optimizer.step(); bank.update(index, z)

    normalize=False as the rows are unit already, and to project them would copy the bank.
    Ref: [4] 5.1, after [7]; as a queue [8]
    """

    def __init__(self, size, dim, momentum=0.5, generator=None):
        super().__init__()
        _require(size >= 1, "size", size, "at least 1")
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        self.momentum = momentum
        device = None if generator is None else generator.device
        self.register_buffer("rows", unit(torch.randn(size, dim, generator=generator, device=device)))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.long, device=device))

    @torch.no_grad()
    def update(self, index, z):
        """Move the rows at index (B,) towards their embeddings z (B, D): after the optimiser's step, as the loss has
        been of the rows as they were. An index that comes more than once moves once, towards the mean of its z."""
        z = unit(_wide(z))
        same = (index[:, None] == index).to(z.dtype)
        z = (same @ z) / same.sum(1)[:, None]
        self.rows[index] = unit(self.momentum * self.rows[index] + (1 - self.momentum) * z).to(self.rows.dtype)

    @torch.no_grad()
    def push(self, z):
        """First in, first out: embeddings z (B, D) take the places of the oldest B rows."""
        z = unit(_wide(z))[-len(self.rows):]  # no place twice: which of two rows would stay, is not defined
        self.rows[(self.oldest + torch.arange(len(z), device=z.device)) % len(self.rows)] = z.to(self.rows.dtype)
        self.oldest.copy_((self.oldest + len(z)) % len(self.rows))


@torch.no_grad()
def follow(follower, leader, momentum):
    """Let a network's parameters and running statistics follow another's: θ' ← m θ' + (1 − m) θ.

    Ref: [8]; [3] Eq. 7
    """
    for mine, other in zip(follower.state_dict().values(), leader.state_dict().values()):
        mine.lerp_(other, 1 - momentum) if mine.is_floating_point() else mine.copy_(other)


def _descend(loss, optimizer, what, group=None):
    """One step of an optimizer down a loss, if that is finite, by the gradient's mean over the ranks; outside of
    autocast, which is for the way there."""
    if not loss.isfinite():
        raise FloatingPointError(f"{what} was to be updated, but its loss is {float(loss.detach())}")
    with torch.autocast(loss.device.type, enabled=False):
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            slopes = [p.grad for part in optimizer.param_groups for p in part["params"] if p.grad is not None]
            mean = torch.cat([slope.flatten() for slope in slopes]) / distributed.get_world_size(group)
            distributed.all_reduce(mean, group=group)
            for slope, part in zip(slopes, mean.split([slope.numel() for slope in slopes])):
                slope.copy_(part.view_as(slope))
        optimizer.step()
    torch.clear_autocast_cache()  # else what comes next in a step would see parameters as they were


# ---------------------------------------------------------------------------------------------------------------------
# 8. Generators: hard samples that are made instead of found, by a game against the encoder
# ---------------------------------------------------------------------------------------------------------------------

class _Residual(nn.Module):
    """x → residual(x) + shortcut(x)."""

    def __init__(self, residual, shortcut):
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, x):
        return self.residual(x) + self.shortcut(x)


def _conv(before, after, kernel=3):
    return spectral_norm(nn.Conv2d(before, after, kernel, padding=kernel // 2))


def _up(before, after):
    """A block that doubles the side: [9] Fig. 15(b), without class labels."""
    residual = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU(), nn.Upsample(scale_factor=2), _conv(before, after),
                             nn.BatchNorm2d(after), nn.ReLU(), _conv(after, after))
    return _Residual(residual, nn.Sequential(_conv(before, after, 1), nn.Upsample(scale_factor=2)))


def _down(before, after, first):
    """A block that halves the side: [9] Fig. 15(c). The first, which sees the image, has no ReLU before it."""
    residual = nn.Sequential(*[nn.ReLU()] * (not first), _conv(before, after), nn.ReLU(), _conv(after, after),
                             nn.AvgPool2d(2))
    return _Residual(residual, nn.Sequential(nn.AvgPool2d(2), _conv(before, after, 1)))


def _widths(size, width):
    """Channels at the sides size, size / 2, …, 4: doubled with each halving, up to four times the width."""
    _require(size >= 8 and size & (size - 1) == 0, "size", size, "a power of two of at least 8, such as 32 or 64")
    _require(width >= 1, "width", width, "at least 1")
    return [width * min(2**k, 4) for k in range(size.bit_length() - 2)]


class Generator(nn.Module):
    """G: latents (B, latent), drawn from N(0, I) → images (B, 3, size, size) in [0, 1], float32.

    size: a power of two of at least 8; width: channels at full size, 16 for a CPU, 64 for a GPU; latent: dimensions of
    a latent. Residual blocks that double the side, from 4 × 4 on, every weight spectrally normalised.
    Ref: [9] Fig. 15, unconditional, with neither attention nor a share of the latent for every block; [3] 4
    """

    def __init__(self, size=32, width=16, latent=64):
        super().__init__()
        _require(latent >= 1, "latent", latent, "at least 1")
        self.latent, widths = latent, _widths(size, width)[::-1]
        self.first = spectral_norm(nn.Linear(latent, 16 * widths[0]))
        blocks = [_up(before, after) for before, after in zip(widths, widths[1:])]
        self.blocks = nn.Sequential(*blocks, nn.BatchNorm2d(width), nn.ReLU(), _conv(width, 3))

    def forward(self, z):
        """Latents (B, latent) → images (B, 3, size, size) in [0, 1]."""
        x = self.first(z).view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return torch.sigmoid(_wide(self.blocks(x)))


class Discriminator(nn.Module):
    """D: images (B, 3, size, size) in [0, 1] → scores (B,), float32, the higher, the more real they look.

    size and width as of `Generator`: residual blocks that halve the side down to 4 × 4, every weight spectrally
    normalised.
    Ref: [9] Fig. 15
    """

    def __init__(self, size=32, width=16):
        super().__init__()
        widths = [3, *_widths(size, width)]
        blocks = [_down(before, after, not k) for k, (before, after) in enumerate(zip(widths, widths[1:-1]))]
        last = nn.Sequential(nn.ReLU(), _conv(widths[-2], widths[-1]), nn.ReLU(), _conv(widths[-1], widths[-1]))
        self.blocks = nn.Sequential(*blocks, _Residual(last, _conv(widths[-2], widths[-1], 1)), nn.ReLU())
        self.last = spectral_norm(nn.Linear(widths[-1], 1))

    def forward(self, images):
        """Images (B, 3, size, size) in [0, 1] → scores (B,)."""
        x = self.blocks((2 * images - 1).contiguous(memory_format=torch.channels_last))
        with torch.autocast(x.device.type, enabled=False):
            return self.last(_wide(x).sum((2, 3)))[:, 0]


def hinge_discriminator(real, fake):
    """L_D = E f_D(−D(x)) + E f_D(D(G(z))), f_D(x) = max(0, 1 + x): 0 where D tells all apart by a margin of 1.

    real, fake: scores (B,) → a scalar. Its gradient is 0 for a score that is beyond the margin.
    Ref: [3] Eq. 5
    """
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def hinge_generator(fake):
    """L_G = E f_G(D(G(z))), f_G(x) = −x.

    fake: scores (B,) → a scalar.
    Ref: [3] Eq. 5, which leaves f_G open; this is the one of [9] and of the hinge loss's authors
    """
    return -fake.mean()


def diversity(images, real):
    """How far images are from one another, as a share of what real ones are: means of the distance to the nearest.

    images, real (B, 3, H, W) in [0, 1], at least 2 of each, as many → a scalar; 0 where every image has a double.
    """
    def nearest(x):
        distances = torch.cdist(x.flatten(1), x.flatten(1))
        return distances.fill_diagonal_(INF).amin(1).mean()

    return nearest(_wide(images)) / nearest(_wide(real))


class Game(nn.Module):
    """The encoder's opponent in the min-max game: G makes samples that are hard for it, D keeps them looking real.

    size, width, latent   of `Generator` and `Discriminator`
    pairs       a latent gives two images, G(z) and G_ema(z), one another's positives; if not, G(z) alone
    ascent      G ascends the encoder's loss; if not, it is trained against D alone. Neither pairs nor ascent: "CL-GAN"
    momentum    m of G_ema, in [0, 1)
    pretrain    steps that G and D take before the encoder begins
    every       n: steps of the encoder for each of the generator's
    batch_size  images of each kind in a step of D, at most as many as the encoder's batch
    lr, ascent_lr   Adam's learning rates, of the hinge losses and of the ascent
    Its state_dict holds G, G_ema, D and their three optimizers. Under autocast the convolutions alone are in half
    precision: parameters, images, scores and losses are float32. [3] prints none of these numbers; they are for short
    runs on a CPU.
    Ref: [3] 3.1, 3.2
    """

    def __init__(self, size=32, width=16, latent=64, pairs=True, ascent=True, momentum=0.99, pretrain=300, every=4,
                 batch_size=64, lr=4e-4, ascent_lr=1e-4):
        super().__init__()
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        _require(pretrain >= 0, "pretrain", pretrain, "at least 0")
        _require(every >= 1, "every", every, "at least 1")
        _require(batch_size >= 2, "batch_size", batch_size, "at least 2")
        self.pairs, self.ascent, self.momentum, self.pretrain = pairs, ascent, momentum, pretrain
        self.size, self.every, self.batch_size, self.ascent_lr = size, every, batch_size, ascent_lr
        self.G, self.D = Generator(size, width, latent), Discriminator(size, width)
        self.G_ema = copy.deepcopy(self.G).requires_grad_(False)
        self.to(memory_format=torch.channels_last)
        adam = functools.partial(torch.optim.Adam, betas=(0.0, 0.999))  # [9] App. C
        self.optimizers = {"G": adam(self.G.parameters(), lr), "D": adam(self.D.parameters(), lr),
                           "ascent": adam(self.G.parameters(), ascent_lr, maximize=True)}

    def latents(self, n, generator=None):
        """Latents (n, latent) from N(0, I)."""
        device = self.G.first.bias.device
        return torch.randn(n, self.G.latent, generator=generator, device=device)

    def sample(self, n, generator=None):
        """n generated images, and which latent each is of: in pairs G(z_k), G_ema(z_k) of n/2 latents, or n of G alone.

        → images (n, 3, size, size) in [0, 1], with G's gradient but none of G_ema; index (n,). An odd n loses one.
        Ref: [3] Eq. 6
        """
        z = self.latents(n // 2 if self.pairs else n, generator)
        index = torch.arange(len(z), device=z.device)
        if not self.pairs:
            return self.G(z), index
        with torch.no_grad():
            followers = self.G_ema(z)
        return torch.cat([self.G(z), followers]), index.repeat(2)

    def real(self, images):
        """Real images, uint8 or in [0, 1], as floats in [0, 1]; ValueError where they are not of the game's size."""
        _require(images.shape[1:] == (3, self.size, self.size), "images", f"of shape {tuple(images.shape)}",
                 f"(B, 3, {self.size}, {self.size}) in a game of this size")
        return _floats(images)

    def imitate(self, images, generator=None):
        """A step of D on real and generated images, and one of G against it.

        images (B, 3, size, size), real → figures {"d_loss", "g_loss", "diversity"}.
        Ref: [3] Eq. 5
        """
        images = self.real(images[:self.batch_size])
        fake = self.G(self.latents(len(images), generator))
        d_loss = hinge_discriminator(self.D(images), self.D(fake.detach()))
        _descend(d_loss, self.optimizers["D"], "the discriminator")
        g_loss = hinge_generator(self.D.requires_grad_(False)(fake))  # D only passes the gradient on
        _descend(g_loss, self.optimizers["G"], "the generator")
        self.D.requires_grad_(True)
        return {"d_loss": d_loss.detach(), "g_loss": g_loss.detach(), "diversity": diversity(fake.detach(), images)}

    def follow(self):
        """Let G_ema follow G, and its spectral norms follow its own weights, which the average of G's do not.

        Ref: [3] Eq. 7
        """
        follow(self.G_ema, self.G, self.momentum)
        for module in self.G_ema.modules():
            if is_parametrized(module):
                module.weight  # to look at it is one step of its power iteration

    def get_extra_state(self):
        """The optimizers' states, for state_dict."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def set_extra_state(self, state):
        """What get_extra_state gave."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


# ---------------------------------------------------------------------------------------------------------------------
# 9. Evaluation: what has been learned, by numbers; nothing here changes the encoder
# ---------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def embed(encoder, images, batch_size=500):
    """Features and unit embeddings of images, without augmentation: (n, features), (n, dim), float32.

    The encoder is in eval mode meanwhile and comes back as it was: no gradient, no BatchNorm buffer changes.
    """
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    out = [encoder(part / 255 if part.dtype == torch.uint8 else part) for part in images.split(batch_size)]
    for module, mode in modes.items():
        module.training = mode
    return torch.cat([f for f, _ in out]).float(), unit(torch.cat([z for _, z in out]).float())


def knn_accuracy(train, train_labels, test, test_labels, k=200, temperature=0.5):
    """Weighted nearest neighbours: each of the k nearest by cosine votes for its label with e^{cos/t}. In percent.

    train (n, D), test (m, D), labels (n,), (m,). k is at most n. k and t are those of [1]'s code.
    """
    train, k = unit(train.float()), min(k, len(train))
    votes_of = F.one_hot(train_labels)
    right = 0
    for x, y in zip(unit(test.float()).split(1000), test_labels.split(1000)):
        cosines, index = (x @ train.T).topk(k)
        votes = (cosines / temperature).exp()[..., None] * votes_of[index]
        right += (votes.sum(1).argmax(1) == y).sum()
    return 100 * float(right) / len(test)


def linear_readout(train, train_labels, test, test_labels, l2=1e-3, max_steps=200):
    """Accuracy of logistic regression on fixed features, in percent: mean cross-entropy + l2/2 ‖W‖².

    train (n, D), test (m, D), labels (n,), (m,). Features are standardised by the training set. The problem is convex,
    and L-BFGS solves it from zero until no entry of the gradient is above 1e-4 (or max_steps): no learning rate, no
    chance.
    """
    train, test = train.detach(), test.detach()
    mean, std = train.mean(0), train.std(0)
    std = std.masked_fill(std <= 1e-5 * train.abs().amax(0), INF)  # a constant feature tells nothing: 0 from here on
    x, classes = (train - mean) / std, int(train_labels.max()) + 1
    w, bias = x.new_zeros(classes, x.shape[1]).requires_grad_(), x.new_zeros(classes).requires_grad_()
    solver = torch.optim.LBFGS([w, bias], max_iter=max_steps, tolerance_grad=1e-4, tolerance_change=1e-9,
                               history_size=20, line_search_fn="strong_wolfe")

    def objective():
        solver.zero_grad()
        value = F.cross_entropy(F.linear(x, w, bias), train_labels) + l2 / 2 * w.square().sum()
        value.backward()
        return value.detach()

    solver.step(objective)
    right = F.linear((test - mean) / std, w, bias).argmax(1) == test_labels
    return 100 * float(right.float().mean())


@torch.no_grad()
def uniformity(z, t=2.0):
    """How evenly embeddings cover the sphere: log E e^{−t ‖x − y‖²} over pairs of different rows; lower is more even.

    z (n, D) → 0-d tensor, from −4t (two antipodes) to 0 (all in one point). Figures in [4] show its negative.
    Ref: [5]; [4] Eq. 10
    """
    z, n = unit(_wide(z)), len(z)
    _require(n >= 2, "z", tuple(z.shape), "at least 2 rows")
    rows = []
    for start in range(0, n, 1000):
        exponents = -t * (2 - 2 * z[start:start + 1000] @ z.T)
        exponents[torch.arange(len(exponents)), torch.arange(start, start + len(exponents))] = -INF  # not with itself
        rows.append(exponents.logsumexp(1))
    return torch.cat(rows).logsumexp(0) - math.log(n) - math.log(n - 1)


@torch.no_grad()
def alignment(x, y):
    """How near the views of a sample are: E ‖x_i − y_i‖² over rows of two views, from 0 (the same) to 4 (opposite).

    Ref: [5]; half of it, over t², is L_align of [1] App. A.2
    """
    return (unit(_wide(x)) - unit(_wide(y))).square().sum(1).mean()


@torch.no_grad()
def tolerance(z, labels):
    """How near samples of one class are: the mean cosine over pairs of different rows that share a label, in [−1, 1].

    z (n, D), labels (n,) → 0-d tensor. The mean is over pairs that share a label, as the values in [4] Table 1 are.
    Ref: [4] Eq. 11
    """
    z = unit(_wide(z))
    members = F.one_hot(labels.long()).to(z.dtype)                              # (n, classes)
    sums, counts = members.T @ z, members.sum(0)
    # ‖Σ z‖² counts each pair, and itself
    return (sums.square().sum() - z.square().sum()) / (counts * (counts - 1)).sum()


@torch.no_grad()
def neighbours(z, k=None):
    """The k nearest other rows of every row (None: all), from the nearest on: cosines (n, k), indices (n, k).

    z (n, D). A row is never its own neighbour, its duplicates are. k is at most n − 1. Cost: n² cosines.
    """
    _require(k is None or k >= 1, "k", k, "None, or at least 1")
    z = unit(_wide(z))
    return tuple((z @ z.T).fill_diagonal_(-INF).topk(len(z) - 1 if k is None else min(k, len(z) - 1)))


@torch.no_grad()
def local_separation(z, positives, k=10):
    """How far positives stand out: cosines (n,) with the positives, and (n, k) with the k nearest other rows.

    z (n, D), positives (n, D): embeddings of two views. Small temperatures push the nearest away, and the positives
    with them.
    Ref: [4] Fig. 8
    """
    return (unit(_wide(z)) * unit(_wide(positives))).sum(1), neighbours(z, k)[0]


@torch.no_grad()
def same_class_by_rank(z, labels):
    """Of how many rows the i-th nearest other row has the same label: counts (n − 1,).

    z (n, D), labels (n,). The first are the false negatives that hard negatives push away.
    Ref: [2] Fig. 5
    """
    return (labels[neighbours(z)[1]] == labels[:, None]).sum(0)


@torch.no_grad()
def cosine_histograms(z, labels, bins=50):
    """Densities of the cosines of pairs that share a label, and of those that do not: edges (bins + 1,), same, other.

    z (n, D), labels (n,) → each density (bins,) integrates to 1 over [−1, 1], and is NaN where there is no such pair.
    The less they overlap, the better.
    Ref: [1] App. B
    """
    z = unit(_wide(z))
    pairs = torch.ones(len(z), len(z), dtype=torch.bool, device=z.device).triu(1)
    cosines, same = (z @ z.T)[pairs].clamp(-1, 1), (labels[:, None] == labels)[pairs]
    counts = [cosines[there].histc(bins, -1, 1) for there in (same, ~same)]
    return torch.linspace(-1, 1, bins + 1, device=z.device), *(c / c.sum() * bins / 2 for c in counts)


@torch.no_grad()
def weights_by_rank(z, loss="ot", **options):
    """How much the candidates of every row count, the nearest first: cosines (n, n − 1) and weights w (n, n − 1).

    z (n, D): embeddings, each row an anchor, all others its candidates; options: the temperature and those of the
    weights. For "ot" w is (n − 1) P*(x⁻ | x).
    Ref: [2] Fig. 4
    """
    o = ContrastiveLoss(loss, **options).resolved
    z = unit(_wide(z))
    logits = (z @ z.T / o.temperature).fill_diagonal_(-INF)
    log_w = _apply(WEIGHTS[o.weights], SimpleNamespace(**vars(o), potential=None), logits)
    logits, order = logits.sort(descending=True)
    return o.temperature * logits[:, :-1], log_w.gather(1, order)[:, :-1].exp()


def gradient_ratio(cosines, positive, loss="simclr", **options):
    """How hard each negative is pushed, as a share of the pull on the positive: r_ij = ∂ℓ_i/∂cos_ij / |∂ℓ_i/∂cos_i⁺|.

    cosines (A, N) of candidates, positive (A,); loss and options as of `contrastive_loss` → (A, N). A row adds up to 1,
    as no preset's loss changes when all cosines of an anchor do by the same; to 0 where the floor of the debiasing
    holds. `tilted` weights take a gradient too, and so pull far negatives: r < 0. "ot" couples the anchors given, and
    for one alone is uniform. NaN where the positive is not pulled, as by an inactive triplet.
    Ref: [4] Eq. 5, 8, Fig. 3
    """
    o = ContrastiveLoss(loss, **options).resolved
    cosines, positive = (_wide(x).detach().requires_grad_() for x in (cosines, positive))
    with torch.enable_grad():
        losses, _ = _losses(o, positive[:, None], cosines, o.temperature, None, lambda x: x)
        push, pull = torch.autograd.grad(losses.sum(), (cosines, positive))
    return push / pull[:, None].abs()


READOUT = 100_000  # training images that `evaluate` takes at most


def evaluate(encoder, images):
    """Linear readout and kNN accuracy of the features in percent; uniformity and tolerance of the test set's
    embeddings.

    encoder: an Encoder, or None for the pixels themselves (averaged to 32 × 32 where there are more). → dict of floats.
    Training images without a label (−1) are left out; of more than READOUT a share of each class is taken, as many:
    their features have to fit into memory.
    """
    labels = images.train_labels
    some = (labels >= 0).nonzero()[:, 0]
    some = some[_spread(labels[some].cpu(), min(1, READOUT / max(1, len(some))), 0).to(some.device)]
    train, labels = images.train[some], labels[some]
    if encoder is None:
        train, test = (torch.cat([F.adaptive_avg_pool2d(part / 255, min(32, x.shape[-1])).flatten(1)
                                  for part in x.split(500)]) for x in (train, images.test))
        z = unit(test)
    else:
        (train, _), (test, z) = embed(encoder, train), embed(encoder, images.test)
    sets = train, labels, test, images.test_labels
    return {"linear": linear_readout(*sets), "knn": knn_accuracy(*sets), "uniformity": float(uniformity(z)),
            "tolerance": float(tolerance(z, images.test_labels))}


# ---------------------------------------------------------------------------------------------------------------------
# 10. Training: one loop, and one short step for each method
# ---------------------------------------------------------------------------------------------------------------------

def simclr_step(encoder, images, criterion, generator, partners=None, view_options=None, **options):
    """Two random views of each image, one pass through the encoder, the loss: SimCLR with any of the losses.

    images (B, 3, H, W) → what the criterion returns: the loss, and with return_stats=True its statistics. partners
    (B, 3, H, W): images whose views are the positives instead, "true positives" where they are of the same class.
    options: of the loss, for this step.
    Ref: [6] Algorithm 1; [1] Fig. 2 for partners
    """
    others = images if partners is None else partners
    z = _embed_views(encoder, torch.cat([view(x, generator, **view_options or {}) for x in (images, others)]))
    return criterion(*z.chunk(2), **options)


def bank_step(encoder, images, index, bank, criterion, generator, view_options=None, **options):
    """One random view of each image; its row of the bank is the positive, all other rows are the candidates.

    images (B, 3, H, W), index (B,) their rows → what the criterion returns, and the embeddings z (B, D) for
    bank.update(index, z).
    Ref: [4] Eq. 1 with g from the memory bank
    """
    z = unit(_wide(_embed_views(encoder, view(images, generator, **view_options or {}))))
    return criterion(z, bank.rows[index], negatives=bank.rows, own=index, normalize=False, **options), z.detach()


def queue_step(encoder, key_encoder, images, queue, criterion, generator, view_options=None, **options):
    """Two random views, one for the encoder and one for its slow follower; candidates are the follower's embeddings of
    earlier batches.

    images (B, 3, H, W) → what the criterion returns, and the keys (B, D) for queue.push(keys).
    Ref: [8] Algorithm 1. The follower is in eval mode: with batch statistics it could tell keys of this batch by them
    """
    queries, keys = (view(images, generator, **view_options or {}) for _ in range(2))
    with torch.no_grad():
        keys = unit(_wide(_embed_views(key_encoder.eval(), keys)))
    z = unit(_wide(_embed_views(encoder, queries)))
    return criterion(z, keys, negatives=queue.rows, normalize=False, **options), keys


def clae_step(encoder, images, criterion, generator, bound=0.015, view_options=None, return_stats=False, **options):
    """Two random views of each image, and the second once more, moved against the encoder: the mean of both losses.

        x' = x + bound · sign ∂ℓ/∂x, within [0, 1]

    images (B, 3, H, W); bound: the largest change of a pixel, where 1 is white (half of [10]'s ε, whose images lie in
    [−1, 1]) → what the criterion returns, the statistics of the views as they were drawn.
    Ref: after [10], which perturbs the first view against itself, and keeps BatchNorm statistics apart for such views
    """
    first, second = (view(images, generator, **view_options or {}) for _ in range(2))
    second.requires_grad_()
    z = _embed_views(encoder, torch.cat([first, second])).chunk(2)
    loss = criterion(*z, return_stats=return_stats, **options)
    loss, stats = loss if return_stats else (loss, {})
    with torch.autocast(loss.device.type, enabled=False):
        gradient, = torch.autograd.grad(loss, second, retain_graph=True)
    harder = (second + bound * gradient.sign()).clamp(0, 1).detach()
    loss = (loss + criterion(z[0], _embed_views(encoder, harder), **options)) / 2
    return (loss, stats) if return_stats else loss


def diffhard_step(encoder, optimizer, game, images, criterion, generator, turn=True, view_options=None,
                  return_stats=False, **options):
    """One iteration of the game: the encoder descends and, when it is the generator's turn, that ascends the same loss.

    encoder: images → (features, embeddings), as Encoder; images (N, 3, H, W), real; criterion: PPCL, as
    ContrastiveLoss("ppcl"); turn: whether the generator moves too → the loss, and figures: with return_stats those of
    the criterion and "pair", the mean cosine of G(z) and G_ema(z); in the generator's turn those of `Game.imitate`.
    Ref: [3] Algorithm 1. Both gradients of Eq. 4 are of one forward pass
    """
    # Step 1: form the batch: N generated images in N/2 pairs, N real ones, and two views of each
    real = game.real(images)
    with torch.set_grad_enabled(turn and game.ascent):
        generated, latent = game.sample(len(real), generator)                                # Eq. 6
    batch = torch.cat([generated, real])
    labels = torch.cat([latent, len(latent) + torch.arange(len(real), device=real.device)])  # a real one has its own
    z = _embed_views(encoder, torch.cat([view(batch, generator, **view_options or {}) for _ in range(2)]))
    # Step 2: train the main model
    loss = criterion(*z.chunk(2), labels=labels, return_stats=return_stats, **options)       # Eq. 8
    loss, figures = loss if return_stats else (loss, {})
    game.optimizers["ascent"].zero_grad()
    _descend(loss, optimizer, "the encoder")                                                 # Eq. 4, θ
    # Step 3: in every n iterations, update the generator
    if turn:
        if game.ascent:
            game.optimizers["ascent"].step()                                                 # Eq. 4, w
        game.follow()                                                                        # Eq. 7
        figures = {**figures, **game.imitate(real, generator)}                               # Eq. 5
    if return_stats and game.pairs:
        one, other = unit(_wide(z[:len(generated)].detach())).chunk(2)
        figures = {**figures, "pair": (one * other).sum(-1).mean()}
    return loss.detach(), figures


def _embed_views(encoder, views):
    return encoder(views.contiguous(memory_format=torch.channels_last))[1]


def in_micro_batches(encoder, size):
    """An encoder that takes a large batch `size` images at a time, in the memory of `size` images: gradient caching.

    encoder: a module that returns embeddings, or a tuple as Encoder does; size ≥ 1 → a function that does the same, to
    be called in its place, or given to any of the steps as their encoder. On the way there nothing but views and
    embeddings is kept; on the way back each micro-batch is embedded again, from the same views and with the same
    randomness, and passes its share of the loss's gradient on. So the loss sees all negatives of the large batch, for
    one more forward pass. Limits: the gradient is that of one pass to rounding, but for BatchNorm in training mode,
    which normalises each micro-batch by itself, and whose running statistics move twice.
    Ref: [11]
    """
    _require(size >= 1, "micro_batch", size, "at least 1")

    def embed(images):
        parts = [checkpoint(encoder, some, use_reentrant=False) for some in images.split(size)]
        return torch.cat(parts) if torch.is_tensor(parts[0]) else tuple(torch.cat(part) for part in zip(*parts))

    return embed


RECIPES = {  # name: how parameters are moved, and with which settings where none are given
    "adamw": {"optimizer": lambda parameters, lr, decay: torch.optim.AdamW(parameters, lr, weight_decay=decay),
              # the rate climbs for the first tenth of the run and falls to 0 by a cosine
              "rate": lambda progress, step: min(10 * (progress + step), 1) * (1 + math.cos(math.pi * progress)) / 2,
              "epochs": 16, "batch_size": 256, "lr": 8e-3, "weight_decay": 1e-4},
    "sgd": {"optimizer": lambda parameters, lr, decay: torch.optim.SGD(parameters, lr, 0.9, weight_decay=decay),
            # a tenth after 160 of 200 epochs, a hundredth after 190                                      [4] 5.1
            "rate": lambda progress, step: 0.1 ** ((progress >= 0.8) + (progress >= 0.95)),
            "epochs": 200, "batch_size": 128, "lr": 0.03, "weight_decay": 5e-4},
}


METHODS = ("simclr", "bank", "queue", "clae", "diffhard")


class Training:
    """The loop: `for progress in Training(encoder, images, criterion): ...` trains the encoder, step by step.

    encoder          an Encoder, trained where it is
    images           an Images on the encoder's device, or with Files; only true_positives looks at the labels
    criterion        a ContrastiveLoss
    method           one of METHODS: the step, and where its candidates come from
    momentum         of the bank's rows (None: 0.5), of the queue's slow encoder (None: 0.99)
    queue_size       embeddings that the queue remembers, fewer than there are images: an older view of the anchor's own
                     image among them is a false negative
    bound            of clae, the largest change of a pixel
    game             of diffhard, a Game (None: one of the images' size)
    micro_batch      images that the encoder takes at a time, so that a large batch needs the memory of this many; None:
                     all of its views at once
    recipe           a row of RECIPES: the optimizer, how its rate goes, and what the next four are where they are None
    epochs, batch_size   every epoch goes through all images once, in batches of nearly one size, at most batch_size
    lr, weight_decay     the highest learning rate, and weight decay
    schedules        {option of the loss: function of the progress in [0, 1]}, such as
                     {"alpha": lambda p: lead_in(p, 0.1)}
    view_options     options of `view`
    true_positives   the second view is of another image of the same class, at random; of simclr alone
    bfloat16         autocast for the encoder; None: where the hardware has it
    group            a torch.distributed process group: each rank takes its share of every batch, and the run is that of
                     one process, but that BatchNorm normalises each share by itself (SyncBatchNorm does not) and that
                     at most ranks − 1 images of a batch are left out. All ranks begin with the weights of the first
    seed             of order, views and latents: on one machine the same seed gives the same run; on a GPU up to
                     rounding, as it sums gradients of views in any order

    A step yields {"epoch", "step", "steps", "images", "loss"} and the scheduled options; every tenth of an epoch also
    the statistics {"clamped", "ess", "positive", "negative"}, and those of `diffhard_step`. Figures are 0-d tensors on
    the device. A game's pre-training comes first, in steps without a "loss" and epochs below 0. A loss that is not
    finite stops the run with a FloatingPointError, and a generator that collapses is warned of.
    After an epoch's last step state_dict() holds all that load_state_dict() needs to continue to the same end.
    """

    def __init__(self, encoder, images, criterion, method="simclr", momentum=None, queue_size=4096, recipe="adamw",
                 epochs=None, batch_size=None, lr=None, weight_decay=None, schedules=None, view_options=None,
                 true_positives=False, bfloat16=None, seed=0, bound=0.015, game=None, micro_batch=None,
                 group=None):
        n, device = len(images.train), images.train.device
        _require(n >= 2, "images", n, "at least 2 to train on: one alone has no negatives")
        _require(method in METHODS, "method", method, f"one of {', '.join(METHODS)}")
        _require(recipe in RECIPES, "recipe", recipe, f"one of {', '.join(RECIPES)}")
        _require(method == "simclr" or not true_positives, "true_positives", True, f"False for the method {method}")
        given = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay}
        self.recipe = {**RECIPES[recipe], **{k: v for k, v in given.items() if v is not None}}
        epochs, batch_size, lr = self.recipe["epochs"], self.recipe["batch_size"], self.recipe["lr"]
        _require(epochs >= 1, "epochs", epochs, "at least 1")
        _require(batch_size >= 2, "batch_size", batch_size, "at least 2")
        _require(0 < lr < INF, "lr", lr, "a number above 0")
        self.encoder, self.images, self.criterion = encoder.to(memory_format=torch.channels_last), images, criterion
        self.method, self.epoch, self.epochs, self.seed = method, 0, epochs, seed
        self.batch_size = min(batch_size, n)
        self.batches = min(-(-n // self.batch_size), n // 2)  # none of a single image, not even if batch_size is 2
        self.schedules, self.view_options, self.true_positives = schedules or {}, view_options, true_positives
        self.bfloat16 = _has_bfloat16(device) if bfloat16 is None else bfloat16
        _require(micro_batch is None or micro_batch >= 1, "micro_batch", micro_batch, "None, or at least 1")
        self.micro_batch, self.generator = micro_batch, torch.Generator(device).manual_seed(seed)
        self.bank = self.key_encoder = self.game = None
        self.group, self.rank = group, _rank(group)
        self.ranks = 1 if group is None else distributed.get_world_size(group)
        _require(n // self.batches >= self.ranks, "batch_size", f"{self.batch_size} for {self.ranks} ranks",
                 "at least an image for each")
        _require(group is None or method != "diffhard", "method", method,
                 "another one where there are several processes: a game is played by one")
        if group is not None:
            for x in encoder.state_dict().values():
                first = x.clone(memory_format=torch.contiguous_format)
                distributed.broadcast(first, distributed.get_global_rank(group, 0), group=group)
                x.copy_(first)
        if method == "bank":
            self.bank = MemoryBank(n, encoder.dim, 0.5 if momentum is None else momentum, self.generator)
        if method == "queue":
            _require(isinstance(queue_size, int) and queue_size >= 1, "queue_size", queue_size,
                     "a whole number of at least 1")
            self.bank = MemoryBank(queue_size, encoder.dim, 0, self.generator)
            self.key_encoder, self.momentum = copy.deepcopy(encoder), 0.99 if momentum is None else momentum
            _require(0 <= self.momentum < 1, "momentum", momentum, "in [0, 1)")
        if method == "clae":
            _require(0 < bound < 1, "bound", bound, "in (0, 1)")
            self.bound = bound
        if method == "diffhard":
            self.game = (Game(images.train.shape[-1]) if game is None else game).to(device)
            self.game.set_extra_state(self.game.get_extra_state())  # Adam's moments go where their parameters are
            _require(self.game.size == images.train.shape[-1], "game", f"for images of {self.game.size} pixels",
                     f"for images of {images.train.shape[-1]}")
            _require(criterion.resolved.objective == "ppcl" or not self.game.pairs, "criterion",
                     f"of objective {criterion.resolved.objective}",
                     "of objective ppcl for pairs to be positives; or the game without pairs")
            self.epoch = -self.pretrain // self.batches  # rounded away from 0
        parameters = [{"params": encoder.parameters()}, {"params": criterion.parameters(), "weight_decay": 0}]
        self.optimizer = self.recipe["optimizer"](parameters, lr, self.recipe["weight_decay"])

    @property
    def pretrain(self):
        """Steps that a game takes before the encoder begins."""
        return 0 if self.game is None else self.game.pretrain

    @property
    def steps(self):
        """Steps of the whole run, the pre-training with them."""
        return self.pretrain + self.epochs * self.batches

    @property
    def done(self):
        """Steps of the epochs that are done."""
        return max(0, self.pretrain + self.epoch * self.batches)

    @property
    def candidates(self):
        """N, the candidates of an anchor (of one of a real image, in a game)."""
        batch = -(-len(self.images.train) // self.batches) // self.ranks * self.ranks
        if self.game is not None:
            return 2 * (batch + batch // (1 + self.game.pairs) * (1 + self.game.pairs)) - 2
        if self.bank is None:
            return 2 * batch - 2
        return len(self.bank.rows) - (self.method == "bank")

    def __iter__(self):
        n, device = len(self.images.train), self.images.train.device
        if self.epoch == 0 and self.bank is not None:  # what the untrained encoder says: random rows would teach noise
            self.bank.rows.copy_(self._first_rows())
        while self.epoch < self.epochs:
            # what is random in an epoch is its own: it resumes
            self.generator.manual_seed(self.seed * 100_003 + self.epoch)
            order = torch.randperm(n, generator=self.generator, device=device)
            partners = self._partners() if self.true_positives else None
            epoch, first = self.epoch, self.epoch * self.batches
            if self.group is not None:  # from here on each rank has its own views
                self.generator.manual_seed((self.seed * 100_003 + self.epoch) * self.ranks + self.rank)
            indices = [index[:len(index) // self.ranks * self.ranks].chunk(self.ranks)[self.rank]
                       for index in order.tensor_split(self.batches)]
            skipped = max(0, -self.pretrain - first)  # the first epoch of the pre-training is the shorter one
            indices = indices[skipped:]
            seconds = [None] * len(indices) if partners is None else self._read([partners[i] for i in indices])
            for step, (index, images, others) in enumerate(zip(indices, self._read(indices), seconds), first + skipped):
                place = self.pretrain + step + 1
                try:
                    figures = self._pretrain_step(images) if step < 0 else self._step(step, index, images, others)
                except (_NotFinite, FloatingPointError) as error:
                    what = "the encoder was to be updated, but " if isinstance(error, _NotFinite) else ""
                    rates = f"lr ({self.recipe['lr']:g})" + " or a rate of the game" * (self.game is not None)
                    raise FloatingPointError(f"step {place} of {self.steps}: {what}{error}. Is {rates} too "
                                             "high?") from error
                if step >= 0:
                    self._watch(place, figures)
                self.epoch += step + 1 == first + self.batches
                yield {"epoch": epoch, "step": place, "steps": self.steps, "images": len(index) * self.ranks,
                       **figures}

    def _first_rows(self):
        images, k = self.images.train, len(self.bank.rows)
        if self.method == "bank":
            return embed(self.encoder, images)[1]
        some = torch.randperm(len(images), generator=self.generator, device=images.device)[:k]
        return embed(self.encoder, images[some])[1][torch.arange(k, device=images.device) % len(some)]

    def _read(self, indices):
        """Batch after batch the images of these indices."""
        train = self.images.train
        return train.batches(indices) if isinstance(train, Files) else (train[index] for index in indices)

    def _step(self, step, index, images, others):
        """Move the encoder, and what goes with the method."""
        total = self.epochs * self.batches
        progress = step / total
        rate = self.recipe["rate"](progress, 1 / total)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe["lr"] * rate
        if self.game is not None:  # else the generator would win in the end, when the encoder hardly moves
            self.game.optimizers["ascent"].param_groups[0]["lr"] = self.game.ascent_lr * rate
        scheduled = {name: schedule(progress) for name, schedule in self.schedules.items()}
        wanted = step % self.batches % max(1, self.batches // 10) == 0
        options = {"view_options": self.view_options, "return_stats": wanted, "group": self.group, **scheduled}
        network, given = self.encoder.train(), (self.criterion, self.generator)
        if self.micro_batch is not None:
            network = in_micro_batches(network, self.micro_batch)
        with torch.autocast(index.device.type, torch.bfloat16, enabled=self.bfloat16):
            if self.method == "simclr":
                loss = simclr_step(network, images, *given, others, **options)
            elif self.method == "clae":
                loss = clae_step(network, images, *given, self.bound, **options)
            elif self.method == "bank":
                loss, z = bank_step(network, images, index, self.bank, *given, **options)
            elif self.method == "queue":
                loss, z = queue_step(network, self.key_encoder, images, self.bank, *given, **options)
            else:
                turn = step % self.game.every == 0
                loss, stats = diffhard_step(network, self.optimizer, self.game.train(), images, *given, turn, **options)
        if self.method != "diffhard":
            loss, stats = loss if wanted else (loss, {})
            _descend(loss, self.optimizer, "the encoder", self.group)
        if self.method == "bank":
            self.bank.update(_gather(index, self.group), _gather(z, self.group))
        if self.method == "queue":
            self.bank.push(_gather(z, self.group))
            follow(self.key_encoder, self.encoder, self.momentum)
        return {"loss": loss.detach(), **stats, **scheduled}

    def _pretrain_step(self, images):
        """Move the generators and the discriminator alone."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bfloat16):
            figures = self.game.train().imitate(images, self.generator)
        self.game.follow()
        return figures

    def _watch(self, step, figures):
        """Say so where a game has gone wrong; but once, as every look at a figure waits for the device."""
        if "diversity" in figures and "collapse" not in _warned and figures["diversity"] < 0.25:
            _warn_once("collapse", f"step {step} of {self.steps}: the generator has collapsed: its images are "
                       f"{float(figures['diversity']):.0%} as far from one another as real ones are. Lower the game's "
                       "ascent_lr or lr (train.py: --ascent-lr, --gan-lr), or raise pretrain")
        if "d_loss" in figures and "d_loss" not in _warned and figures["d_loss"] < 0.01:
            _warn_once("d_loss", f"step {step} of {self.steps}: the discriminator's loss is "
                       f"{float(figures['d_loss']):.3f}: it tells all images apart, so the generated ones are far "
                       "from real ones. Lower ascent_lr, or raise every")

    def _partners(self):
        """For every image the index of another one of its class; its own where there is none, or no label."""
        labels = self.images.train_labels
        partners = torch.arange(len(labels), device=labels.device)
        for c in labels[labels >= 0].unique():
            members = (labels == c).nonzero()[:, 0]
            members = members[torch.randperm(len(members), generator=self.generator, device=labels.device)]
            partners[members] = members.roll(1)
        return partners

    def state_dict(self):
        """All that a run needs to go on from the end of an epoch."""
        return {"epoch": self.epoch, **{name: part.state_dict() for name, part in self._parts().items()}}

    def load_state_dict(self, state):
        """Go on from such a state."""
        self.epoch = state["epoch"]
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self):
        parts = {"encoder": self.encoder, "criterion": self.criterion, "optimizer": self.optimizer, "bank": self.bank,
                 "key_encoder": self.key_encoder, "game": self.game}
        return {name: part for name, part in parts.items() if part is not None}


def _has_bfloat16(device):
    """Whether the hardware has bfloat16: where it is emulated, it is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
