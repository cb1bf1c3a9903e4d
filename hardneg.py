"""Hard-negative contrastive learning in one file.

An encoder learns without labels: it pulls two views of a sample together and pushes other samples, the
negatives, away. Which negatives count, and how much, decides how good the encoder gets. Every method here
answers the same three questions, and the file asks them in order:

    1. Who could be a negative?         candidates: other samples of the batch, a memory bank, given ones
    2. How much does each one count?    weights:    log w_ij = log(q(x_j|x_i) / p(x_j)): drawn from p, for q
    3. What is done with them?          objective:  nce (with debiasing), simple, triplet, ppcl, decoupled

    from hardneg import ContrastiveLoss
    criterion = ContrastiveLoss("hcl", beta=1.0)
    loss = criterion(encoder(view_1), encoder(view_2))      # embeddings (B, D)

Symbols
    B, V, D     samples, views of each sample, dimensions of an embedding
    A           anchors: V·B, every view of every sample; with `negatives` B, the first view of each
    M           positives of an anchor: V − 1, the other views of its sample
    N           columns: V·B in a batch, or the rows of `negatives`; formulas count the unmasked ones alone
    z           embedding, a unit row                        f(x) in [1, 2, 4], v in [3]
    t           temperature, divides cosines                 t in [1, 2], τ in [3, 4]
    s_ij        logit of anchor i and candidate j: cos(z_i, z_j) / t; −∞ where j is no negative of i
    p_im        logit of anchor i and its m-th positive
    log w_ij    log importance weight; −∞ where s_ij is −∞
    tau_plus    τ⁺, the probability that a candidate has the anchor's class                   [1]
    beta        β, the concentration of tilted weights; multiplies s = cos/t                  [1]
    alpha       α, the share of nearest candidates that `top` keeps                           [4]
    epsilon     ε, the entropic regularisation, in the unit of the ground cost; kappa: its κ  [2]
    margin      η of the triplet loss, in the unit of a squared distance                      [2]
In shape comments, a is the number of anchors in a block. A name that ends in _ works in place.

Sections: 1 Weights, 2 Objectives, 3 The loss, 4 Blocks and ranks, 5 Views, 6 Encoders, 7 Generators,
8 Readouts, 9 Training. Sums of e^s stay in the log domain: e^{(1+β)/t} overflows float32 at β = 1, t = 0.02.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. arXiv:2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport. arXiv:2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach. arXiv:2202.06464; equations of its first form
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. arXiv:2012.09740
    [5] Wang, Isola. Alignment and Uniformity. arXiv:2005.10242    [6] Chen et al. SimCLR. arXiv:2002.05709
    [7] Wu et al. Instance Discrimination. arXiv:1805.01978        [8] He et al. MoCo. arXiv:1911.05722
    [9] Brock et al. BigGAN. arXiv:1809.11096                     [10] Ho et al. CLAE. arXiv:2010.12050
   [11] Gao et al. GradCache. arXiv:2101.06983                   [12] Yeh et al. DCL. arXiv:2110.06848
"""

import copy
import math
import numbers
import warnings

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

INF = math.inf


def _require(valid, name, got, allowed):
    if not valid:
        raise ValueError(f"{name} is {got}; it must be {allowed}")


def _readable(x):  # whether Python may read its values: not on the meta device, nor while compiling
    return not (x.is_meta or hasattr(x, "fake_mode") or torch.compiler.is_compiling())


# ---- 1. Weights: how much does each candidate count? logits (A, N) → log weights (A, N), −∞ where these are.
# The weights of an anchor have mean 1 over its candidates; those of `top`, over the candidates it keeps.


class _Unit(
    torch.autograd.Function
):  # z and ‖x‖, with the gradient (g − z (z·g)) / ‖x‖ in few passes
    @staticmethod
    def forward(x):
        scale = torch.linalg.vector_norm(x, INF, -1, keepdim=True)
        z = x / scale.masked_fill_(
            scale < torch.finfo(x.dtype).tiny, 1
        )  # its squares stay in range
        norm = z.norm(dim=-1, keepdim=True)  # at least 1, or 0 for a zero row
        return z.div_(norm.masked_fill_(norm == 0, 1)), norm * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)  # outputs: so z has second derivatives

    @staticmethod
    def backward(ctx, grad, by_norm):
        z, norm = ctx.saved_tensors
        return torch.addcmul(grad, z, by_norm * norm - (grad * z).sum(-1, keepdim=True)).div_(norm)


def unit(x):
    """Project rows (..., D) to the unit sphere, z = x / ‖x‖. A zero row and its gradient pass unchanged."""
    return _Unit.apply(x)[0]


def _upcast(x):  # to float32 at least: half-precision sums are too inaccurate
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logsumexp(x, dim=-1):
    """Compute log Σ_j e^{x_j}; a fully masked row gives the lowest finite number, and gradient 0, not NaN."""
    x = x.clamp_min(torch.finfo(x.dtype).min)
    return x.squeeze(dim) if x.shape[dim] == 1 else torch.logsumexp(_upcast(x), dim).to(x.dtype)


def _logsumexp_(x, dim, largest=None):
    """Compute `_logsumexp` without a gradient; x becomes the shares e^{x_j} / Σ_k e^{x_k}.
    softmax is one fused pass, so the sum is read off its largest share. largest: amax(x), if it is known."""
    x.clamp_min_(torch.finfo(x.dtype).min)
    largest = x.amax(dim) if largest is None else largest
    return largest - torch.softmax(x, dim, out=x).amax(dim).log()


def _log_count(x):
    """Compute the log of the number of entries above −∞ in every row, (A, 1); −∞ for none."""
    return (
        (x > -INF)
        .sum(-1, keepdim=True)
        .to(torch.promote_types(x.dtype, torch.float32))
        .log()
        .to(x.dtype)
    )


def uniform(logits):
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    return torch.zeros_like(logits).masked_fill(logits == -INF, -INF)


def tilted(logits, beta=1.0):
    """Count candidates by their similarity: w_ij = e^{β s_ij} / (1/N Σ_k e^{β s_ik}), beta ≥ 0.
    Limits: β = 0 is `uniform`, β → ∞ `hardest`. Ref: [1] Eq. 2, with Z_β estimated from the candidates"""
    negligible = beta < torch.finfo(logits.dtype).tiny  # β = 0: avoid 0 · (−∞) = NaN
    return uniform(logits) if negligible else _mean_one(beta * logits)


def _mean_one(scores):
    """Normalise weights e^{scores} to mean 1: log N + log_softmax(scores), N counts the scores above −∞."""
    # numerics: subtract the row maximum first, so that large scores keep their precision
    scores = scores - scores.detach().amax(-1, keepdim=True).clamp_min(
        torch.finfo(scores.dtype).min
    )
    return scores + _log_count(scores) - _logsumexp(scores)[..., None]


def hardest(logits):
    """Count the nearest candidate alone: w_ij = N where s_ij = max_k s_ik, 0 elsewhere; ties share N.
    The limit β → ∞ of `tilted`. Ref: [1] Prop. 1, App. A.1; [4] Eq. 6"""
    nearest = ~(logits < logits.amax(-1, keepdim=True)) & (
        logits != -INF
    )  # written so that NaN stays
    share = _log_count(logits) - _log_count(logits.masked_fill(~nearest, -INF))
    return torch.where(nearest, share, -INF)


def top(logits, alpha=0.1):
    """Count the upper α quantile alone: log w_ij = 0 where s_ij ≥ s_i^(α), −∞ below. Ref: [4] Eq. 8, 9
    alpha in (0, 1]: the threshold s_i^(α) is the ⌈αN⌉-th largest logit of the anchor's own candidates, at
    least the first; ties with it stay. For the k nearest, take alpha = k / N. Dropped weight is not
    redistributed: the mean is α. Limits: α = 1 is `uniform`, α → 0 keeps the nearest, with weight 1."""
    return uniform(logits).masked_fill(logits < _threshold(logits.detach(), alpha), -INF)


def _threshold(x, alpha):
    """Return the ⌈αN⌉-th largest entry of every row, (A, 1); N counts its entries above −∞."""
    # α in billionths: in floating point 0.07 · 100 exceeds 7, and its ceiling would be 8
    kept = (
        ((x > -INF).sum(-1, keepdim=True) * -int(alpha * 10**9))
        .floor_divide(10**9)
        .neg()
        .clamp_min(1)
    )
    return x.topk(int(kept.max()) if _readable(x) else x.shape[-1]).values.gather(-1, kept - 1)


def ground_cost(cosines, cost="sqeuclidean", kappa=0.0):
    """Compute the cost of coupling two unit rows from their cosine. Ref: [2] Eq. 5, VII-C
    "sqeuclidean": ½‖x − y‖² = 1 − cos; "exp": exp(‖x − y‖² − κ)"""
    return 1 - cosines if cost == "sqeuclidean" else torch.exp(2 - 2 * cosines - kappa)


def _log_kernel(cosines, epsilon, cost, kappa):  # −C/ε, clamped: a high cost is no mask
    return (ground_cost(cosines, cost, kappa) / -epsilon).clamp_min(
        torch.finfo(cosines.dtype).min / 4
    )


@torch.compiler.disable  # the number of steps depends on the data
def sinkhorn(log_kernel, tolerance=None, max_steps=1000):
    """Find the entropic coupling with uniform marginals: P_ij = exp(f_i + log_kernel_ij + g_j).
    log_kernel = −C/ε (A, N), −∞ where i and j must not be coupled; or a function that returns its blocks of
    rows, for a kernel too large to store → f (A,), g (N,), error. Scales rows, f_i ← −log A −
    logsumexp_j(log_kernel_ij + g_j), and columns in turn until error = Σ_i |Σ_j P_ij − 1/A| is at most
    `tolerance` (None: 1e-5, in float64 1e-12), or warns after max_steps. Fully masked rows and columns carry
    no mass. Differentiable; autograd stores A·N numbers for each step. Cost: 2·A·N per step; 2 to 20 steps at
    ε = 0.3, more for smaller ε, about 1/error if the masks force an unmasked entry to 0.
    Ref: [2] Eq. 5, Lemma 3"""
    blocks = log_kernel if callable(log_kernel) else lambda: [log_kernel]
    log_sum = _logsumexp if torch.is_grad_enabled() else _logsumexp_
    f = g = 0.0
    for step in range(max_steps + 1):
        row_sums = column_sums = None
        for block in blocks():  # (a, N)
            sums = log_sum(block + g, 1)  # (a,)
            row_sums = sums if row_sums is None else torch.cat([row_sums, sums])
            sums = log_sum(block - sums[:, None], 0)  # (N,)
            column_sums = sums if column_sums is None else torch.logaddexp(column_sums, sums)
        lowest = torch.finfo(sums.dtype).min / 2  # below: fully masked, not counted
        a, n = ((x > lowest).sum().clamp_min(1).to(x.dtype) for x in (row_sums, column_sums))
        error = torch.expm1(f + row_sums).abs().sum() / a  # rows of P sum to e^{f + sum} / A
        limit = (1e-12 if sums.dtype == torch.float64 else 1e-5) if tolerance is None else tolerance
        if step > 0 and (step == max_steps or not _readable(error) or not error > limit):
            break
        f, g = -row_sums, (a / n).log() - column_sums
    if _readable(error) and error > limit:
        warnings.warn(
            f"Sinkhorn stopped after {step} steps, above its tolerance {limit:.0e}: raise epsilon, "
            "or check that labels leave enough candidates",
            stacklevel=2,
        )
    return f - a.log(), g, error


def transported(
    logits, epsilon=0.3, cost="sqeuclidean", kappa=0.0, temperature=1.0, potential=None
):
    """Count candidates by their entropic coupling with the anchors: w_ij = N P*(j | i) ∝ e^{−C_ij/ε + g_j}.
    logits (A, N) of unit rows; epsilon in the unit of the cost; temperature of the logits, as costs are of
    cosines; potential g (N,) of `sinkhorn`, which runs if it is None. Limits: ε → 0 is optimal transport;
    ε → ∞ is `uniform` if all rows and all columns have equally many entries, as in a batch (not with `own` in
    a bank); "sqeuclidean" at g = 0 is `tilted` at β = t/ε. Ref: [2] Eq. 5, Lemma 3; Eq. 7 omits e^{g_j}"""
    cosines = temperature * logits.masked_fill(
        logits == -INF, 0
    )  # else t's gradient would be 0 · ∞
    log_kernel = _log_kernel(cosines, epsilon, cost, kappa) + uniform(logits)
    return _mean_one(log_kernel + (sinkhorn(log_kernel)[1] if potential is None else potential))


def draw(log_w, k, replacement=False, generator=None):
    """Draw k negatives for every anchor, candidate j with probability w_ij / Σ_l w_il.
    log_w (A, N) → indices (A, k), distinct unless with replacement. generator: on log_w's device."""
    shares = torch.exp(log_w - _logsumexp(log_w)[..., None])
    enough = not _readable(shares) or bool(
        ((shares > 0).sum(-1) >= (1 if replacement else k)).all()
    )
    _require(
        k >= 1 and enough,
        "k",
        k,
        "at least 1, and at most the number of candidates of weight above 0",
    )
    return torch.multinomial(shares, k, replacement, generator=generator)


# ---- 2. Objectives: what is done with the weighted negatives? pos (A, M), neg, log w (A, N) → losses (A,).
# nce, ppcl and decoupled act on logits, simple and triplet on cosines. Where log w is −∞, neg does not count.


def debiased(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute the log of the weighted sum of e^s over negatives, minus a correction for false negatives.
        log max( (Σ_j w_j e^{s_j} − N τ⁺ E⁺) / (1 − τ⁺),  N e^{−1/t} ),     E⁺ = Σ_m w⁺_m e^{p_m} / Σ_m w⁺_m
    pos, neg are logits, log_w_pos (A, M; None: uniform), N = Σ_j w_j → (A,). The floor is the paper's, as no
    cosine is below −1. Where it binds, neither term has a gradient; a warning says if it binds for most
    anchors. For uniform weights the correction is the expected sum over false negatives. For β > 0 it is the
    published one, but does not follow from q_β: there the anchor's class has the share τ⁺ Z⁺/Z_β, not τ⁺.
    Limits: τ⁺ = 0 is log Σ_j w_j e^{s_j}, without a floor. Ref: [1] Eq. 2, Fig. 5 (without N); [2] Eq. 8"""
    total = _logsumexp(neg + log_w)
    if tau_plus == 0:
        return total
    log_n = _logsumexp(log_w)
    log_w_pos = uniform(pos) if log_w_pos is None else log_w_pos
    log_mean = (
        _logsumexp(pos + log_w_pos) - _logsumexp(log_w_pos) if pos.shape[1] > 1 else pos[:, 0]
    )
    correction = log_n + math.log(tau_plus) + log_mean
    excess = correction - total  # below 0 if the difference is positive
    left = (
        total + torch.log(-torch.expm1(excess.masked_fill(excess >= 0, -1))) - math.log1p(-tau_plus)
    )
    floor = log_n - 1 / temperature
    clamped = (excess >= 0) | (left < floor)
    if _readable(clamped) and 2 * (clamped & (log_n > torch.finfo(log_n.dtype).min)).sum() > len(
        clamped
    ):
        warnings.warn(
            "debiasing: the floor binds for most anchors, whose negatives get no gradient: raise "
            "temperature or lower tau_plus",
            stacklevel=2,
        )
    return torch.where(clamped, floor, left)


def nce(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute noise-contrastive estimation: −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + e^{debiased}) ).
    pos, neg are logits; 0 for an anchor without negatives. Several positives are pooled inside the logarithm;
    [1] Eq. 2 averages over them outside it. Limits, for one positive and uniform weights: t → 0 of t · nce is
    half of `triplet` on `hardest` weights; t → ∞ is log(1 + N) + N/(1 + N)/t · `simple`.
    Ref: [1] Eq. 1, 2, Fig. 5; [2] Eq. 8; [4] Eq. 1, 6, 7, 9"""
    return -F.logsigmoid(
        _logsumexp(pos) - debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    )


def simple(pos, neg, log_w):
    """Compute the difference of means of cosines: −1/M Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j.
    λ of [4] is 1/N here, 1/(αN) for `top`, as in the limit t → ∞ of `nce`. Ref: [4] Eq. 3; [2] Eq. 9 (BCL)"""
    return _weighted_mean(neg, log_w) - pos.mean(-1)


def triplet(pos, neg, log_w, margin=0.0):
    """Compute the hinge 1/M Σ_m Σ_j w_j max(0, ‖z − z_m‖² − ‖z − z_j‖² + η) / Σ_j w_j.
    pos, neg are cosines: the difference is 2 (cos_j − cos_m). Ref: [2] IV; at η = 0 on `hardest` weights
    it is twice [4] Eq. 6"""
    hinges = F.relu(2 * (neg[:, None] - pos[:, :, None]) + margin)  # (A, M, N)
    return _weighted_mean(hinges, log_w[:, None]).mean(1)


def _weighted_mean(x, log_w):
    """Compute Σ_j w_j x_j / Σ_j w_j, 0 in a fully masked row."""
    return (torch.exp(log_w - _logsumexp(log_w)[..., None]) * x.masked_fill(log_w == -INF, 0)).sum(
        -1
    )


def ppcl(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute the partially pseudo-labelled loss: −1/M Σ_m log( e^{p_m} / (Σ_l e^{p_l} + e^{debiased}) ).
    pos (−∞ for an anchor with fewer positives), neg are logits. It is `nce` + logsumexp_m p_m − mean_m p_m:
    `nce` itself for one positive. Ref: [3] Eq. 8"""
    mean = pos.masked_fill(pos == -INF, 0).sum(-1) / (pos > -INF).sum(-1)
    return nce(pos, neg, log_w, tau_plus, temperature, log_w_pos) + _logsumexp(pos) - mean


def decoupled(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute `nce` without positives in the denominator: debiased − log Σ_m e^{p_m}; 0 without negatives.
    pos, neg are logits. Unlike in `nce`, an easy positive does not shrink the gradient. Ref: [12] Eq. 6"""
    loss = debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos) - _logsumexp(pos)
    return loss.masked_fill(loss < torch.finfo(loss.dtype).min / 2, 0)  # fully masked rows


# ---- 3. The loss: a registry, one function, its module

WEIGHTS = "uniform", "tilted", "hardest", "top", "transported"
OBJECTIVES = {
    "nce": nce,
    "simple": simple,
    "triplet": triplet,
    "ppcl": ppcl,
    "decoupled": decoupled,
}
PRESETS = {  # loss: (weights, objective, tau_plus)
    "simclr": ("uniform", "nce", 0.0),  # [6]; [4] Eq. 1
    "debiased": ("uniform", "nce", 0.1),  # [1] at β = 0
    "hcl": ("tilted", "nce", 0.1),  # [1] Eq. 2
    "ot": ("transported", "nce", 0.0),  # [2] Eq. 5, 8
    "hard": ("top", "nce", 0.0),  # [4] Eq. 9
    "simple": ("uniform", "simple", 0.0),  # [4] Eq. 3; [2] Eq. 9
    "hard-simple": ("top", "simple", 0.0),  # [4] Table 1, HardSimple
    "triplet": ("hardest", "triplet", 0.0),  # [2] IV; [4] Eq. 6
    "ppcl": ("uniform", "ppcl", 0.0),  # [3] Eq. 8
}


def weigh(
    weights,
    logits,
    beta=1.0,
    alpha=0.1,
    epsilon=0.3,
    cost="sqeuclidean",
    kappa=0.0,
    temperature=0.5,
    potential=None,
):
    """Answer question 2 by a name of WEIGHTS or a function: logits (A, N) → log weights (A, N)."""
    rules = {
        "uniform": lambda: uniform(logits),
        "tilted": lambda: tilted(logits, beta),
        "hardest": lambda: hardest(logits),
        "top": lambda: top(logits, alpha),
        "transported": lambda: transported(logits, epsilon, cost, kappa, temperature, potential),
    }
    return (
        weights(logits).masked_fill(logits == -INF, -INF) if callable(weights) else rules[weights]()
    )


def contrastive_loss(
    *views,
    loss="simclr",
    weights=None,
    objective=None,
    temperature=0.5,
    tau_plus=None,
    beta=1.0,
    alpha=0.1,
    epsilon=0.3,
    cost="sqeuclidean",
    kappa=0.0,
    margin=0.0,
    negatives=None,
    own=None,
    mask=None,
    labels=None,
    drop_above=None,
    normalize=True,
    detach_weights=None,
    reduction="mean",
    block_size=None,
    group=None,
    return_stats=False,
):
    """Compute any of the losses, on two or more views of a batch.
        s_ij = cos(z_i, z_j) / t         log w_ij = weights(s_i)_j         ℓ_i = objective(p_i, s_i, log w_i)
    views           (B, D) each; row i of each is a view of sample i. Each view is an anchor, in the order of
                    torch.cat(views); its sample's other views are its positives, the rest its candidates
    loss            a row of PRESETS; `weights`, `objective` and `tau_plus` override its parts
    weights         of WEIGHTS, or a function: logits (a, N), −∞ for no candidate → log weights (a, N)
    objective       of OBJECTIVES, or a function: logits (a, M), (a, N), log weights (a, N) → losses (a,)
    temperature     t > 0, divides cosines; a 0-d tensor that requires a gradient is learned
    tau_plus, beta  τ⁺ in [0, 1), of nce, ppcl, decoupled, not of functions; β ≥ 0, of tilted: times cos/t
    alpha, margin   of top: the share of nearest candidates kept, in (0, 1]; η ≥ 0 of triplet
    epsilon, cost, kappa   of transported: ε > 0 in the unit of the cost, "sqeuclidean" or "exp", κ of "exp"
    negatives       (K, D): the candidates are these rows instead, the anchors the first view alone; or
                    (B, K, D), rows for each anchor. For both those of the batch and given ones, pass (K, D):
                    negatives=torch.cat([y, given.flatten(0, 1)]), own=torch.arange(B) for the views x, y
    own             (B,), with negatives: the row that is the sample's own, and so no candidate
    mask            boolean (A, N), True where a candidate may be a negative: for ragged or filtered ones
    drop_above      drop likely false negatives: cosines above the anchor's largest positive one plus this
    labels          (B,): samples that share a label are never each other's negatives; under ppcl they are
                    positives. With negatives: (B + K,), the last K for its rows; (B,) then has no effect
    normalize       project rows to the unit sphere first; if False, rows must already have unit norm
    detach_weights  no gradient through the weights; None: as the authors' code, True for transported alone
    reduction       "mean", "sum" or "none", one value for each anchor
    block_size      anchors in a block; it changes results by rounding alone. None: chosen; 0, and in compiled
                    code and torch.func: all at once, by autograd: A·N numbers, but differentiable twice
    group           a torch.distributed process group: candidates are the views of every rank; `negatives`
                    are as passed, see `gather`. All ranks call together, with views of one shape. "mean",
                    "sum", and gradients averaged over the ranks, are those of one process
    return_stats    also return a dict, of the first 2^20 pairs: `clamped`, the share of anchors at the floor
                    of debiasing; `ess`, (Σw)²/Σw² as a share of N; `positive`, `negative`, mean cosines
    Takes any floating dtype; computes in float32 at least, with autocast off. Ignores options that weights
    and objective do not have. Raises ValueError that names the invalid argument.
    Cost: A·N·D; `transported` adds 2·A·N for each step of Sinkhorn. Ref: PRESETS"""
    weights, objective, tau_plus, detach_weights = _resolve(
        loss,
        weights,
        objective,
        temperature,
        tau_plus,
        beta,
        alpha,
        epsilon,
        cost,
        kappa,
        margin,
        drop_above,
        detach_weights,
        reduction,
        block_size,
    )
    _check_shapes(views, negatives, own, mask, labels, group, weights)
    with torch.autocast(views[0].device.type, enabled=False):
        pairs = _Pairs(
            views, negatives, own, mask, labels, drop_above, normalize, objective == "ppcl", group
        )
        if torch.is_tensor(temperature):  # as the embeddings: 16 bits are too few for its gradient
            temperature = temperature.to(pairs.anchors)
        g, through_weights = None, torch.is_grad_enabled() and not detach_weights
        if weights == "transported":  # the coupling is of all anchors: it comes before the blocks
            with torch.set_grad_enabled(through_weights):
                g = _potential(pairs, group, epsilon, cost, kappa)  # (N,)

        def weights_of(logits, t, g):
            with torch.set_grad_enabled(through_weights):
                return weigh(
                    weights, logits, beta, alpha, epsilon, cost, kappa, temperature=t, potential=g
                )

        def losses_of(rows, pos_cosines, cosines, t, g):  # of some anchors: (a, M), (a, N)
            # 1. Who could be a negative?
            excluded = pairs.exclude_(
                torch.zeros_like(cosines), rows, pos_cosines, cosines
            )  # (a, N), 0 or −∞
            # 2. How much does each one count?
            log_w = weights_of(cosines / t + excluded, t, g)  # (a, N)
            # 3. What is done with them?
            return conclude(
                *pairs.with_labelled(pos_cosines, cosines, rows), cosines, log_w, t
            )  # (a,)

        def conclude(pos_cosines, pos_mask, cosines, log_w, t):
            if objective == "simple":
                return simple(pos_cosines, cosines, log_w)
            if objective == "triplet":
                return triplet(pos_cosines, cosines, log_w, margin)
            pos, neg, log_w_pos = pos_cosines / t + pos_mask, cosines / t, None  # log_w masks neg
            if callable(objective):
                return objective(pos, neg.masked_fill(log_w == -INF, -INF), log_w)
            if tau_plus > 0 and pos.shape[1] > 1:
                log_w_pos = weights_of(pos, t, 0.0)  # weigh the positives by the same rule
            return OBJECTIVES[objective](pos, neg, log_w, tau_plus, t, log_w_pos)

        shortcut, debiases = None, objective in ("nce", "ppcl", "decoupled")
        if debiases and not pairs.labelled:
            shortcut = _shortcut(weights, beta, alpha, epsilon, cost, detach_weights, g)
        size = _block_size(pairs, shortcut) if block_size is None else block_size
        free = callable(weights) or callable(objective)
        value = _evaluate(
            losses_of, conclude, shortcut, pairs, temperature, g, size, reduction, free
        )
        if group is not None and reduction != "none":  # ranks will average gradients
            total, ranks = value.detach().clone(), distributed.get_world_size(group)
            distributed.all_reduce(total, group=group)
            value, total = (value, total / ranks) if reduction == "mean" else (ranks * value, total)
            value = value + (total - value).detach()
        stats = return_stats and _statistics(
            pairs, weights_of, temperature, g, tau_plus * debiases, group
        )
        if _readable(value) and not value.isfinite().all():
            _check_finite(views, negatives)
        return (value, stats) if return_stats else value


class _Pairs:
    """Identify anchors (A, D), positives (A, M, D) and candidates (N, D) or (A, N, D). Columns `own` (A, any
    number) hold the anchor's own sample. Candidates of its label are excluded, or positives if `labelled`."""

    def __init__(
        self, views, negatives, own, mask, labels, drop_above, normalize, supervised, group
    ):
        b, v, device = len(views[0]), len(views), views[0].device
        dtype = torch.float32
        for x in views if negatives is None else (*views, negatives):
            dtype = torch.promote_types(dtype, x.dtype)
        project = unit if normalize else torch.Tensor.contiguous
        z = project(torch.cat([x.to(dtype) for x in views]))  # (V·B, D)
        own, mask, labels = (
            None if x is None else torch.as_tensor(x, device=device) for x in (own, mask, labels)
        )
        self.mask, self.drop_above = mask, drop_above
        self.label = self.other_label = None  # (A,) and (N,)
        if negatives is None:
            self.anchors, self.candidates = z, gather(z, group)
            self.positives = torch.stack([z.roll(-k * b, 0) for k in range(1, v)], 1)
            first = 0 if group is None else distributed.get_rank(group) * len(z)
            self.own = (
                (first + torch.arange(v * b, device=device)).view(v, b).T.repeat(v, 1)
            )  # (A, V)
            if labels is not None:
                self.label, self.other_label = labels.repeat(v), gather(labels.repeat(v), group)
        else:
            self.anchors, self.candidates = z[:b], project(negatives.to(dtype))
            self.positives = z[b:].view(v - 1, b, -1).transpose(0, 1)
            self.own = z.new_empty(b, 0, dtype=torch.long) if own is None else own[:, None].long()
            if labels is not None and len(labels) > b:
                self.label, self.other_label = labels[:b], labels[b:]
        self.labelled = supervised and self.label is not None

    def exclude_(self, x, rows, pos_cosines, cosines):
        """Write −∞ into x (a, N) where the candidate is no negative of the anchor. x may be the cosines."""
        if self.drop_above is not None:
            pos_cosines, pos_mask = self.with_labelled(pos_cosines, cosines, rows)
            x.masked_fill_(
                cosines > (pos_cosines + pos_mask).amax(1, keepdim=True) + self.drop_above, -INF
            )
        if self.mask is not None:
            x.masked_fill_(~self.mask[rows], -INF)
        if self.label is not None:
            x.masked_fill_(self.label[rows, None] == self.other_label, -INF)
        return x.scatter_(1, self.own[rows], -INF)

    def with_labelled(self, pos_cosines, cosines, rows):
        """Add candidates that share the anchor's label to its positives: cosines and mask, (a, M + N)."""
        if not self.labelled:
            return pos_cosines, torch.zeros_like(pos_cosines)
        unshared = (self.label[rows, None] != self.other_label).scatter(1, self.own[rows], True)
        mask = F.pad(
            torch.zeros_like(cosines).masked_fill(unshared, -INF), (pos_cosines.shape[1], 0)
        )
        return torch.cat([pos_cosines, cosines], 1), mask


@torch.no_grad()
def _statistics(pairs, weights_of, t, g, tau_plus, group):
    rows = slice(0, max(1, 2**20 // pairs.candidates.shape[-2]))
    pos_cosines, cosines = (
        _dot(pairs.anchors[rows], x) for x in (pairs.positives[rows], _part(pairs.candidates, rows))
    )
    mask = pairs.exclude_(torch.zeros_like(cosines), rows, pos_cosines, cosines)  # (a, N)
    pos_cosines, pos_mask = pairs.with_labelled(pos_cosines, cosines, rows)  # (a, M)
    log_w, pos = weights_of(cosines / t + mask, t, g), pos_cosines / t + pos_mask
    n, log_n = (mask == 0).sum(1), _logsumexp(log_w)  # (a,)
    effective = torch.exp(2 * log_n - _logsumexp(2 * log_w)) / n
    log_w_pos = weights_of(pos, t, 0.0) if tau_plus > 0 and pos.shape[1] > 1 else None  # (a, M)
    total = debiased(pos, cosines / t, log_w, tau_plus, t, log_w_pos)
    clamped = (total <= log_n - 1 / t) & (n > 0) & (tau_plus > 0)
    parts = clamped.to(log_n), effective[n > 0], pos_cosines[pos_mask == 0], cosines[mask == 0]
    sums = torch.stack([x.sum() for x in parts] + [x.new_full((), x.numel()) for x in parts])
    if group is not None:
        distributed.all_reduce(sums, group=group)
    return dict(zip(("clamped", "ess", "positive", "negative"), sums[:4] / sums[4:]))


class ContrastiveLoss(nn.Module):
    """Compute `contrastive_loss` as a module: ContrastiveLoss("hcl", beta=0.5)(view_1, view_2).
    Options of a call override those given here. An nn.Parameter as temperature is learned."""

    def __init__(self, loss="simclr", **options):
        super().__init__()
        self.given, self.options = (
            options,
            {**contrastive_loss.__kwdefaults__, "loss": loss, **options},
        )
        self.weights, self.objective, self.tau_plus, _ = _resolve(**self.options)
        self.temperature = self.options.pop("temperature")  # a number, or this module's parameter

    def forward(self, *views, **options):
        """Compute the loss of the views, with the module's options and those given here."""
        return contrastive_loss(
            *views, **{**self.options, "temperature": self.temperature, **options}
        )

    def extra_repr(self):
        """Show the loss, its parts and the options given."""
        shown = {
            name: getattr(self, name) for name in ("weights", "objective", "tau_plus")
        } | self.given
        shown["temperature"] = t.item() if torch.is_tensor(t := self.temperature) else t
        shown = ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)
        return f"{self.options['loss']!r}, {shown}" + ", learned" * isinstance(
            self.temperature, nn.Parameter
        )


def _resolve(
    loss,
    weights,
    objective,
    temperature,
    tau_plus,
    beta,
    alpha,
    epsilon,
    cost,
    kappa,
    margin,
    drop_above,
    detach_weights,
    reduction,
    block_size,
    negatives=None,
    own=None,
    mask=None,
    labels=None,
    normalize=True,
    group=None,
    return_stats=False,
):
    """Check the options, and decide what is left open; the last seven only pass by."""
    _require(loss in PRESETS, "loss", repr(loss), f"one of {', '.join(PRESETS)}")
    weights, objective, tau_plus = (
        preset if given is None else given
        for given, preset in zip((weights, objective, tau_plus), PRESETS[loss])
    )
    for name, value, allowed in (
        ("weights", weights, WEIGHTS),
        ("objective", objective, OBJECTIVES),
        ("cost", cost, ("sqeuclidean", "exp")),
        ("reduction", reduction, ("mean", "sum", "none")),
    ):
        free = name in ("weights", "objective")  # a function will do
        _require(
            isinstance(value, str) and value in allowed or free and callable(value),
            name,
            repr(value),
            f"one of {', '.join(allowed)}" + " or a function" * free,
        )
    if torch.is_tensor(temperature) and temperature.ndim == 0:
        temperature = float(temperature.detach()) if _readable(temperature) else 1.0
    for name, value, valid, allowed in (
        ("temperature", temperature, lambda x: 0 < x < INF, "above 0"),
        ("tau_plus", tau_plus, lambda x: 0 <= x < 1, "in [0, 1)"),
        ("beta", beta, lambda x: 0 <= x < INF, "of at least 0"),
        ("alpha", alpha, lambda x: 0 < x <= 1, "in (0, 1]"),
        ("epsilon", epsilon, lambda x: 0 < x < INF, "above 0"),
        ("kappa", kappa, lambda x: -INF < x < INF, "that is finite"),
        ("margin", margin, lambda x: 0 <= x < INF, "of at least 0"),
        (
            "drop_above",
            0 if drop_above is None else drop_above,
            lambda x: -INF < x < INF,
            "that is finite",
        ),
        ("block_size", block_size or 0, lambda x: x >= 0 and x % 1 == 0, "of anchors, or None"),
    ):
        _require(
            isinstance(value, numbers.Real) and valid(value),
            name,
            repr(value),
            f"a number {allowed}",
        )
    return (
        weights,
        objective,
        tau_plus,
        detach_weights or detach_weights is None and weights == "transported",
    )


def _check_shapes(views, negatives, own, mask, labels, group, weights):
    """Check that views, negatives, own, mask and labels fit together."""
    shapes = [
        tuple(x.shape) if torch.is_tensor(x) and x.is_floating_point() else str(type(x))
        for x in views
    ]
    _require(
        len(views) >= 2 and len(set(shapes)) == 1 and len(shapes[0]) == 2 and shapes[0][1] > 0,
        "views",
        shapes,
        "at least two floating tensors (B, D) of one shape, each an argument of its own",
    )
    batched = torch._C._are_functorch_transforms_active() and any(
        "BatchedTensor" in repr(x) for x in views
    )
    _require(
        not batched, "views", "batched by vmap", "plain tensors: call the loss once for each batch"
    )
    (b, d), given = shapes[0], negatives is not None
    _require(
        b >= 2 or b == 1 and (given or group is not None),
        "views",
        shapes,
        "of 2 samples or more: one has no negative",
    )
    a, n = (
        b * len(views),
        b * len(views) * (1 if group is None else distributed.get_world_size(group)),
    )
    if given:
        valid = (
            torch.is_tensor(negatives)
            and negatives.is_floating_point()
            and 0 not in negatives.shape
        )
        shape = tuple(getattr(negatives, "shape", ()))
        _require(
            valid and len(shape) in (2, 3) and shape in ((shape[0], d), (b, shape[1], d)),
            "negatives",
            f"{type(negatives).__name__} {shape}",
            f"a floating tensor (K, {d}) or ({b}, K, {d})",
        )
        a, n = b, shape[-2]
        _require(
            len(shape) == 2 or weights != "transported",
            "weights",
            repr(weights),
            "another rule with "
            "negatives (B, K, D): as anchors share no candidate, their only coupling is uniform",
        )
    if own is not None:
        own = torch.as_tensor(own)
        whole = (
            own.shape == (b,) and not own.is_floating_point() and own.dtype != torch.bool and given
        )
        _require(
            whole and (not _readable(own) or bool(((own >= 0) & (own < n)).all())),
            "own",
            f"{own.dtype} {tuple(own.shape)}",
            f"with negatives, ({b},) whole numbers in [0, K)",
        )
    if mask is not None:
        mask = torch.as_tensor(mask)
        _require(
            mask.dtype == torch.bool and mask.shape == (a, n),
            "mask",
            f"{mask.dtype} {tuple(mask.shape)}",
            f"boolean ({a}, {n}): of each anchor and candidate",
        )
    shape = None if labels is None else tuple(torch.as_tensor(labels).shape)
    _require(
        shape in (None, (b,)) or given and negatives.ndim == 2 and shape == (b + n,),
        "labels",
        f"of shape {shape}",
        f"({b},), or with negatives (K, D) also ({b} + K,)",
    )


class _NotFinite(ValueError):
    "Embeddings have NaN or inf: a training loop tells this from other errors."


def _check_finite(views, negatives):
    for name, x in [(f"views[{i}]", x) for i, x in enumerate(views)] + [("negatives", negatives)]:
        if x is not None and not x.isfinite().all():
            raise _NotFinite(f"{name} is not free of NaN and inf; it must be finite")


def annealed_beta(progress, beta, changes=5):
    """Lower β to 0 in steps over progress in [0, 1]: β · (1 − ⌊ℓ · progress⌋ / ℓ), with ℓ = changes.
    Hard negatives matter early; late, many of the hardest have the anchor's class. Ref: [1] App. C"""
    return beta * (1 - math.floor(changes * progress) / changes)


def lead_in(progress, alpha, until=0.5):
    """Lower the share kept from 1 to α, geometrically, until `until`: α^{min(1, progress / until)}.
    The nearest candidates of a random encoder share background and colour: alone they teach little else."""
    return alpha ** min(1.0, progress / until)


# ---- 4. Blocks and ranks: the same numbers in linear memory, over processes. Skip it on a first reading.
# The cosines of a large batch do not fit into memory, so the anchors are worked in blocks. A block's
# cosines are one product, and `losses_of` gives its losses. Their gradient takes the memory of the cosines,
# and two more products carry it to the embeddings. The shortcut: nce, ppcl and decoupled see negatives only
# as Σ_j w_j e^{s_j} and Σ_j w_j, so for weights that are exponentials an anchor's candidates merge into one.


def _evaluate(losses_of, conclude, shortcut, pairs, t, g, size, reduction, free):
    """Compute the losses of all anchors, (A,), or their mean or sum; free: by functions of the caller."""

    def block(rows, anchors, positives, candidates, t, g):
        pos_cosines, cosines = (
            _dot(anchors[rows], x) for x in (positives[rows], _part(candidates, rows))
        )
        return losses_of(rows, pos_cosines, cosines, t, g)

    tensors = pairs.anchors, pairs.positives, pairs.candidates, t, g
    size = (
        0 if torch._C._are_functorch_transforms_active() else size
    )  # torch.func needs plain autograd
    blocks = _slices(len(pairs.anchors), size)
    stored = size == 0 or not torch.is_grad_enabled()
    if not stored and reduction != "none" and not free:
        weight = 1 / len(pairs.anchors) if reduction == "mean" else 1.0
        return _InBlocks.apply(
            losses_of, conclude, shortcut, pairs.exclude_, blocks, weight, *tensors
        )
    # "none" has no weights yet, and only autograd sees a function's parameters: compute the block again
    losses = torch.cat(
        [
            block(rows, *tensors)
            if stored
            else checkpoint(block, rows, *tensors, use_reentrant=False, preserve_rng_state=free)
            for rows in blocks
        ]
    )
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _block_size(pairs, shortcut):
    """Choose the anchors in a block, to stay in a CPU's cache or keep a GPU busy; 0: all at once."""
    n = pairs.candidates.shape[-2]
    if torch.compiler.is_compiling() or shortcut is None and len(pairs.anchors) * n <= 2**19:
        return 0  # plain autograd is faster for small batches
    return max(
        128 if shortcut else 64, 2 ** (20 if pairs.anchors.device.type == "cpu" else 25) // n
    )


def _slices(n, size):
    return [slice(start, start + size) for start in range(0, n, size)] if size else [slice(None)]


def _part(
    candidates, rows
):  # the candidates of some anchors: (N, D), or of each its own, (a, N, D)
    return candidates if candidates.ndim == 2 else candidates[rows]


def _dot(anchors, others, out=None):  # (a, D) with (N, D) or (a, N, D) → (a, N)
    if others.ndim == 2:
        return torch.mm(anchors, others.T, out=out)
    return torch.bmm(others, anchors[:, :, None], out=None if out is None else out[:, :, None])[
        :, :, 0
    ]


def _to_anchors(by_dot, others):  # its gradient in the anchors, (a, D)
    return by_dot @ others if others.ndim == 2 else torch.bmm(by_dot[:, None], others)[:, 0]


class _InBlocks(torch.autograd.Function):
    """Compute weight · Σ_i ℓ_i together with its gradient, and store nothing of a block's size."""

    @staticmethod
    def forward(ctx, losses_of, conclude, shortcut, exclude_, blocks, weight, *tensors):
        anchors, positives, candidates, t, g = (
            x.detach() if torch.is_tensor(x) else x for x in tensors
        )
        wanted, ctx.weight, value, shared = (
            ctx.needs_input_grad[6:],
            weight,
            0.0,
            candidates.ndim == 2,
        )
        slopes = [
            None if not want else torch.empty_like(x) if x.ndim == 3 else torch.zeros_like(x)
            for x, want in zip(tensors, wanted)
        ]  # rows for each anchor are written, others summed
        # preallocated: allocating per block costs more than the arithmetic
        matrices = anchors.new_empty(2, len(anchors[blocks[0]]), candidates.shape[-2])
        for rows in blocks:
            block, others = anchors[rows], _part(candidates, rows)  # (a, D), (N, D) or (a, N, D)
            cosines, scratch = matrices[:, : len(block)]  # (a, N)
            pos_cosines, _ = (
                _dot(block, positives[rows]),
                _dot(block, others, out=cosines),
            )  # (a, M)
            if shortcut is None:
                total, by_pos, by_cosines, by_t, by_g = _differentiate(
                    lambda *leaves: losses_of(rows, *leaves), pos_cosines, cosines, t, g
                )
            else:
                exclude_(cosines, rows, pos_cosines, cosines)
                mean, log_n = _merge_(cosines, scratch, t, g, **shortcut)  # (a,) each
                total, by_pos, by_mean, by_t = _differentiate(
                    lambda pos, mean, t: conclude(pos, 0.0, (t * mean)[:, None], log_n[:, None], t),
                    pos_cosines,
                    mean,
                    t,
                )  # it divides by t
                by_cosines = cosines.mul_((by_mean / t)[:, None])  # (a, N)
            value = value + total
            by_anchor = (
                _to_anchors(by_cosines, others) if wanted[0] or wanted[3] else None
            )  # (a, D)
            if wanted[0]:
                slopes[0][rows] = by_anchor + _to_anchors(by_pos, positives[rows])
            if wanted[1]:
                torch.mul(by_pos[:, :, None], block[:, None], out=slopes[1][rows])  # (a, M, D)
            if wanted[2] and shared:
                slopes[2].addmm_(by_cosines.T, block)  # (N, D)
            elif wanted[2]:
                torch.mul(by_cosines[:, :, None], block[:, None], out=slopes[2][rows])  # (a, N, D)
            if wanted[3]:  # `mean` is a function of cos/t: t ∂/∂t = −Σ_j cos_j ∂/∂cos_j
                slopes[3] += by_t if shortcut is None else by_t - (by_anchor * block).sum() / t
            if wanted[4]:
                slopes[4] += by_g
        ctx.save_for_backward(*slopes)
        return weight * value

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("to differentiate this loss twice, give it block_size=0")
        grad = ctx.weight * grad
        return *[None] * 6, *(None if x is None else x * grad for x in ctx.saved_tensors)


def _differentiate(function, *leaves):
    """Return the sum of function(*leaves), and its gradient in every leaf; None for one that is a number."""
    leaves = [x.detach().requires_grad_() if torch.is_tensor(x) else x for x in leaves]
    with torch.enable_grad():
        total = function(*leaves).sum()
    tensors = [x for x in leaves if torch.is_tensor(x)]
    slopes = iter(torch.autograd.grad(total, tensors, materialize_grads=True))
    return total.detach(), *(next(slopes) if torch.is_tensor(x) else None for x in leaves)


def _shortcut(weights, beta, alpha, epsilon, cost, detach_weights, g):
    """Write weights as exponentials, w_ij ∝ e^{c s_ij + g_j}, of all candidates or the nearest α; or None."""
    plain = (
        weights in ("uniform", "tilted", "top")
        or weights == "transported"
        and cost == "sqeuclidean"
    )
    if not plain or g is not None and not detach_weights:
        return None
    c = beta if weights == "tilted" and beta > 1e-30 else 0.0  # β = 0: avoid 0 · (−∞) = NaN
    alpha = alpha if weights == "top" else 1.0
    return {"c": c, "epsilon": epsilon, "alpha": alpha, "detached": detach_weights}


def _merge_(cosines, scratch, t, g, c, epsilon, alpha, detached):
    """Merge the candidates of each anchor into one: the log of the weighted mean of e^s, and log n, (a,).
        mean_i = LSE_j((1 + c) s_ij + g_j) − LSE_j(c s_ij + g_j),     ∂mean_i/∂s_ij = p_ij + c (p_ij − q_ij)
    p, q are the shares of the two sums; the gradient is p alone if the weights are detached. It takes the
    place of the cosines (a, N), −∞ for excluded candidates. scratch (a, N) is overwritten."""
    if alpha < 1:
        cosines.masked_fill_(cosines < _threshold(cosines, alpha), -INF)
    log_n = (
        torch.ne(cosines, -INF, out=scratch).sum(-1).log().clamp_min(torch.finfo(cosines.dtype).min)
    )
    nearest = cosines.amax(-1, keepdim=True)  # numerics: subtract the row maximum first
    cosines.sub_(nearest.masked_fill_(nearest == -INF, 0))
    c = c if g is None else t / epsilon  # a potential: transported weights
    if g is None and c == 0:
        mean = _logsumexp_(cosines.mul_(1 / t), -1) - log_n
    else:
        p, q = torch.mul(cosines, (1 + c) / t, out=scratch), cosines.mul_(c / t)
        if g is not None:
            p += g
            q += g
        mean = _logsumexp_(p, -1, 0 if g is None else None) - _logsumexp_(
            q, -1, 0 if g is None else None
        )
        torch.lerp(q, p, 1.0 if detached else 1 + c, out=cosines)
    return mean + nearest[:, 0] / t, log_n


def _potential(pairs, group, epsilon, cost, kappa):
    """Compute the potential g (N,) of the coupling of the candidates with the anchors of all ranks."""
    everyone = copy.copy(pairs)
    for name in ("anchors", "positives", "own", "mask", "label"):
        setattr(everyone, name, gather(getattr(pairs, name), group))
    a, n = len(everyone.anchors), len(everyone.candidates)

    def blocks():
        for rows in _slices(a, max(1, 2**20 // n)):
            pos_cosines, cosines = (
                _dot(everyone.anchors[rows], x)  # (a, M), (a, N)
                for x in (everyone.positives[rows], everyone.candidates)
            )
            yield everyone.exclude_(
                _log_kernel(cosines, epsilon, cost, kappa), rows, pos_cosines, cosines
            )

    kernel = list(blocks()) if torch.is_grad_enabled() or a * n <= 2**24 else None  # in each step
    return sinkhorn(lambda: kernel or blocks())[1]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rank, ctx.ranks = (
            group,
            distributed.get_rank(group),
            distributed.get_world_size(group),
        )
        parts = [torch.empty_like(x) for _ in range(ctx.ranks)]
        distributed.all_gather(parts, x, group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.ranks)[ctx.rank], None


def gather(x, group):
    """Concatenate the rows of every rank, in the order of the ranks; the gradient is summed over all.
    With negatives=gather(y, group), own=rank * len(y) + torch.arange(len(y)), a rank's rows y are candidates
    everywhere; the mean over ranks of their gradients is that of one process. Without a group: x itself."""
    return x if group is None or x is None else _Gather.apply(x.contiguous(), group)


# ---- 5. Views: random crops, flips and colours of a whole batch, on the images' device, with a gradient


def view(
    images,
    generator=None,
    area=(0.2, 1.0),
    ratio=(3 / 4, 4 / 3),
    flip=0.5,
    jitter=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    gray=0.2,
    blur=0.0,
    sigma=(0.1, 2.0),
):
    """Draw one random view of every image: resized crop, flip, colour jitter, grayscale, blur.
    images (B, 3, H, W), uint8 or floats in [0, 1] → floats in [0, 1] of the same shape, differentiable.
    generator    on the images' device; a view is one draw, so the generator's state replays it
    area, ratio  ranges of the crop's share of the image and of its aspect (clipped to the image)
    flip, jitter, gray, blur          probabilities of a mirror image, colour jitter, no colour, a blur
    brightness, contrast, saturation  x: factors are drawn from [1 − x, 1 + x]
    hue, sigma   turns of the colour circle, from [−x, x]; range of the blur's standard deviation in pixels
    Defaults are [6]'s for 32 × 32 images, but area starts at 0.2, not 0.08. Colour is one affine map of luma
    and chroma, so its parts commute and the result is clipped once. Ref: [6] App. A; [3] 3.1"""
    x, (b, _, height, width) = _floats(images), images.shape
    u = (
        torch.rand(b, 13, generator=generator, device=x.device, dtype=torch.float32)
        .to(x.dtype)
        .unbind(1)
    )
    between = lambda low, high, r: low + (high - low) * r  # noqa: E731
    # crop and flip: where each pixel of the view comes from, in coordinates from −1 to 1
    share, aspect = (
        between(*area, u[0]),
        torch.exp(between(math.log(ratio[0]), math.log(ratio[1]), u[1])),
    )
    w, h = (share * aspect).sqrt().clamp_max(1), (share / aspect).sqrt().clamp_max(1)
    zero, mirror = torch.zeros_like(w), 1 - 2 * (u[4] < flip).to(x.dtype)
    theta = torch.stack(
        [w * mirror, zero, (1 - w) * (2 * u[2] - 1), zero, h, (1 - h) * (2 * u[3] - 1)], 1
    )
    grid = F.affine_grid(theta.view(b, 2, 3), x.shape, align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    # colour: rgb → yiq, scale and turn chroma, → rgb, as one matrix and one offset for each image
    on = (u[5] < jitter).to(x.dtype)
    light, strong, vivid = (
        1 + on * between(-s, s, r)
        for s, r in ((brightness, u[6]), (contrast, u[7]), (saturation, u[8]))
    )
    turn, vivid = on * between(-hue, hue, u[9]) * 2 * math.pi, vivid * (u[10] >= gray)
    cos, sin, one = turn.cos() * vivid, turn.sin() * vivid, torch.ones_like(turn)
    chroma = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(b, 3, 3)
    to_yiq = torch.tensor(
        [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]],
        device=x.device,
    )  # luma, and two axes of chroma
    to_rgb, to_yiq = torch.linalg.inv(to_yiq).to(x.dtype), to_yiq.to(x.dtype)
    luma = (x.mean((2, 3)) @ to_yiq[0]) * light  # (B,)
    x = (to_rgb @ chroma @ to_yiq) @ x.flatten(2)  # (B, 3, H·W)
    x = (light * strong)[:, None, None] * x + ((1 - strong) * luma)[:, None, None]
    x = x.view(b, 3, height, width)
    return (_blur(x, between(*sigma, u[11]), u[12] < blur) if blur > 0 else x).clamp(0, 1)


def _floats(images):
    return images / 255 if images.dtype == torch.uint8 else images


def _blur(x, sigma, chosen):
    """Blur the chosen images, each with its own standard deviation in pixels, one axis after the other."""
    radius = max(1, x.shape[-1] // 20)  # a kernel a tenth as wide as the image: [6]
    steps = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.softmax(-((steps / sigma[:, None]) ** 2) / 2, 1)
    kernel = torch.where(chosen[:, None], kernel, (steps == 0).to(x.dtype))[:, :, None, None, None]
    padded = F.pad(x, (radius,) * 4, mode="reflect")
    rows = sum(kernel[:, k] * padded[:, :, k : k + x.shape[2]] for k in range(len(steps)))
    return sum(kernel[:, k] * rows[:, :, :, k : k + x.shape[3]] for k in range(len(steps)))


# ---- 6. Encoders: a backbone and a projection head; the memory of embeddings; one step of an optimizer


class Encoder(nn.Module):
    """Map images (B, 3, H, W) in [0, 1] to features (B, self.features), and these to embeddings (B, dim).
    name: "small" (four convolutions, for a CPU), "resnet18" or "resnet50"; dim: of the embedding;
    size: side of the images. After training, use the features. For images of at most 64 pixels torchvision's
    networks get a 3 × 3 first convolution and no max-pooling. Ref: [6] App. B.9; [1] App. C"""

    def __init__(self, name="small", dim=128, size=32):
        super().__init__()
        _require(
            name in ("small", "resnet18", "resnet50"),
            "encoder",
            name,
            "small, resnet18 or resnet50",
        )
        _require(size % 2 == 0 or name != "small", "size", size, "even for the small encoder")
        self.name, self.dim, self.size = name, dim, size
        if name == "small":
            layers = [nn.PixelUnshuffle(2)]  # 2 × 2 pixels at once: half the work
            for before, after, stride in ((12, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 1)):
                layers += [
                    nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(inplace=True),
                ]
            self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.features = 256
        else:
            from torchvision import models

            self.backbone = getattr(models, name)(weights=None)
            self.features, self.backbone.fc = self.backbone.fc.in_features, nn.Identity()
            if size <= 64:
                self.backbone.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
                self.backbone.maxpool = nn.Identity()
        hidden = max(self.features, 2 * dim)
        self.head = nn.Sequential(
            nn.Linear(self.features, hidden), nn.ReLU(True), nn.Linear(hidden, dim)
        )

    def forward(self, images):
        features = self.backbone(4 * images - 2)  # about mean 0 and variance 1
        return features, self.head(features)


class MemoryBank(nn.Module):
    """Remember one unit row for every training image: row_i ← m row_i + (1 − m) z_i, back on the unit sphere.
    rows: the first ones (K, D), such as the untrained encoder's embeddings; random rows would be noise.
    momentum: m in [0, 1). The buffer `rows` has no gradient. `Bank.step` and `Queue.step` show its use, as a
    bank with `update`, as a queue of the last K embeddings with `push`. Ref: [4] 5.1; [8]"""

    def __init__(self, rows, momentum=0.5):
        super().__init__()
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        self.momentum = momentum
        self.register_buffer("rows", unit(_upcast(rows.detach())))
        self.register_buffer("oldest", torch.zeros((), dtype=torch.long, device=rows.device))

    @torch.no_grad()
    def update(self, index, z):
        """Move the rows at index (B,) towards their embeddings z (B, D), after the optimizer's step.
        An index that comes more than once moves its row once, towards the mean of its embeddings."""
        z = unit(_upcast(z))
        same = (index[:, None] == index).to(z.dtype)
        with torch.autocast(z.device.type, enabled=False):
            z = (same @ z) / same.sum(1)[:, None]
        moved = self.momentum * self.rows[index] + (1 - self.momentum) * z
        self.rows[index] = unit(moved).to(self.rows.dtype)

    @torch.no_grad()
    def push(self, z):
        """Replace the oldest B rows by embeddings z (B, D): first in, first out."""
        z = unit(_upcast(z))[-len(self.rows) :]  # two new rows for one place would be ambiguous
        places = (self.oldest + torch.arange(len(z), device=z.device)) % len(self.rows)
        self.rows[places] = z.to(self.rows.dtype)
        self.oldest.copy_((self.oldest + len(z)) % len(self.rows))


@torch.no_grad()
def follow(follower, leader, momentum):
    """Move parameters and buffers towards another network's: θ' ← m θ' + (1 − m) θ. Ref: [8]; [3] Eq. 7"""
    for mine, other in zip(follower.state_dict().values(), leader.state_dict().values()):
        mine.lerp_(other, 1 - momentum) if mine.is_floating_point() else mine.copy_(other)


def _descend(loss, optimizer, name, group=None):
    """Step an optimizer, gradients averaged over ranks; raise if the loss of `name` is not finite."""
    if not loss.isfinite():
        raise FloatingPointError(f"the loss of the {name} is {float(loss.detach())}")
    with torch.autocast(loss.device.type, enabled=False):  # autocast is for forward passes
        optimizer.zero_grad()
        loss.backward()
        for parameter in (p for part in optimizer.param_groups for p in part["params"]):
            if group is not None and parameter.grad is not None:
                distributed.all_reduce(parameter.grad, group=group)
                parameter.grad /= distributed.get_world_size(group)
        optimizer.step()
    torch.clear_autocast_cache()  # it caches weights; later calls need new ones


# ---- 7. Generators: hard samples that are made instead of found, by a game against the encoder


class _Residual(nn.Module):
    """Add a shortcut: x → residual(x) + shortcut(x)."""

    def __init__(self, residual, shortcut):
        super().__init__()
        self.residual, self.shortcut = nn.Sequential(*residual), nn.Sequential(*shortcut)

    def forward(self, x):
        return self.residual(x) + self.shortcut(x)


def _conv(before, after, kernel=3):
    return spectral_norm(nn.Conv2d(before, after, kernel, padding=kernel // 2))


def _up(before, after):
    """Double the side: [9] Fig. 15(b), without class labels."""
    return _Residual(
        [
            nn.BatchNorm2d(before),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            _conv(before, after),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            _conv(after, after),
        ],
        [_conv(before, after, 1), nn.Upsample(scale_factor=2)],
    )


def _down(before, after, first=False, pool=nn.AvgPool2d(2)):
    """Halve the side: [9] Fig. 15(c). The first block sees the image and has no ReLU before it."""
    return _Residual(
        [*[nn.ReLU()] * (not first), _conv(before, after), nn.ReLU(), _conv(after, after), pool],
        [pool, _conv(before, after, 1)],
    )


def _widths(
    size, width
):  # channels at the sides size, size / 2, …, 4: doubled, up to four times width
    _require(
        size >= 8 and size & (size - 1) == 0,
        "size",
        size,
        "a power of two of at least 8, such as 32",
    )
    _require(width >= 1, "width", width, "at least 1")
    return [width * min(2**k, 4) for k in range(size.bit_length() - 2)]


class Generator(nn.Module):
    """Map latents (B, latent) from N(0, I) to images (B, 3, size, size) in [0, 1], float32.
    size: a power of two, at least 8; width: channels at full size, 16 for a CPU, 64 for a GPU. Residual
    blocks double the side from 4 × 4 on; weights are spectrally normalised. Ref: [9] Fig. 15; [3] 4"""

    def __init__(self, size=32, width=16, latent=64):
        super().__init__()
        _require(latent >= 1, "latent", latent, "at least 1")
        self.latent, widths = latent, _widths(size, width)[::-1]
        self.first = spectral_norm(nn.Linear(latent, 16 * widths[0]))
        blocks = [*map(_up, widths, widths[1:]), nn.BatchNorm2d(width), nn.ReLU(), _conv(width, 3)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, z):
        x = self.first(z).view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return torch.sigmoid(_upcast(self.blocks(x)))


class Discriminator(nn.Module):
    """Score images (B, 3, size, size) in [0, 1] → (B,), float32: the higher, the more real they look.
    size and width as of `Generator`: residual blocks halve the side down to 4 × 4. Ref: [9] Fig. 15"""

    def __init__(self, size=32, width=16):
        super().__init__()
        widths = [3, *_widths(size, width)]
        blocks = [
            _down(before, after, not k)
            for k, (before, after) in enumerate(zip(widths, widths[1:-1]))
        ]
        blocks.append(_down(widths[-2], widths[-1], pool=nn.Identity()))
        self.blocks, self.last = (
            nn.Sequential(*blocks, nn.ReLU()),
            spectral_norm(nn.Linear(widths[-1], 1)),
        )

    def forward(self, images):
        x = self.blocks((2 * images - 1).contiguous(memory_format=torch.channels_last))
        with torch.autocast(x.device.type, enabled=False):
            return self.last(_upcast(x).sum((2, 3)))[:, 0]


def hinge_discriminator(real, fake):
    """Compute L_D = E max(0, 1 − D(x)) + E max(0, 1 + D(G(z))) from scores (B,). Ref: [3] Eq. 5"""
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def hinge_generator(fake):
    """Compute L_G = −E D(G(z)) from scores (B,). Ref: [3] Eq. 5, which leaves f_G open; −x is that of [9]"""
    return -fake.mean()


def diversity(images, real):
    """Divide mean distances to the nearest other image: 1 is as diverse as the real ones, 0 all alike."""
    one, other = (
        torch.cdist(x, x).fill_diagonal_(INF).amin(1).mean()
        for x in (_upcast(images.detach()).flatten(1), _upcast(real.detach()).flatten(1))
    )
    return one / other


class Game(nn.Module):
    """Play against the encoder: G makes samples that are hard for it, D keeps them looking real.
    pairs       a latent gives two images, G(z) and G_ema(z), each other's positives; if False, G(z) alone
    ascent      G ascends the encoder's loss; if False, it plays against D alone. Both False: "CL-GAN"
    momentum    m of G_ema, in [0, 1)
    pretrain    epochs of G and D alone before the encoder begins
    every, batch_size  encoder's steps for each of the generator's; images of each kind in a step of D
    lr, ascent_lr   Adam's learning rates, of the hinge losses and of the ascent
    Its state_dict holds networks and optimizers. The numbers suit short runs on a CPU. Ref: [3] 3.1, 3.2"""

    def __init__(
        self,
        size=32,
        width=16,
        latent=64,
        pairs=True,
        ascent=True,
        momentum=0.99,
        pretrain=10,
        every=4,
        batch_size=64,
        lr=4e-4,
        ascent_lr=1e-4,
    ):
        super().__init__()
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        for name, x, least in (
            ("pretrain", pretrain, 0),
            ("every", every, 1),
            ("batch_size", batch_size, 2),
        ):
            _require(x >= least, name, x, f"at least {least}")
        self.pairs, self.ascent, self.momentum, self.pretrain = pairs, ascent, momentum, pretrain
        self.size, self.every, self.batch_size = size, every, batch_size
        self.G, self.D = Generator(size, width, latent), Discriminator(size, width)
        self.G_ema = copy.deepcopy(self.G).requires_grad_(False)
        self.to(memory_format=torch.channels_last)
        self.optimizers = {
            name: torch.optim.Adam(
                network.parameters(), rate, betas=(0.0, 0.999), maximize=name == "ascent"
            )
            for name, network, rate in (
                ("G", self.G, lr),
                ("D", self.D, lr),
                ("ascent", self.G, ascent_lr),
            )
        }

    def latents(self, n, generator=None):
        """Draw latents (n, latent) from N(0, I)."""
        return torch.randn(n, self.G.latent, generator=generator, device=self.G.first.bias.device)

    def sample(self, n, generator=None):
        """Generate n images: pairs G(z_k), G_ema(z_k) of n // 2 latents, or n images of G alone.
        → images (n, 3, size, size) in [0, 1], with G's gradient and none of G_ema; the index of each image's
        latent (n,). Pairs of an odd n lose one image. Ref: [3] Eq. 6"""
        z = self.latents(n // 2 if self.pairs else n, generator)
        index = torch.arange(len(z), device=z.device)
        if not self.pairs:
            return self.G(z), index
        with torch.no_grad():
            followers = self.G_ema(z)
        return torch.cat([self.G(z), followers]), index.repeat(2)

    def imitate(self, images, generator=None):
        """Step D on real images (B, 3, size, size) and generated ones, and step G against it.
        → figures {"d_loss", "g_loss", "diversity"}. Ref: [3] Eq. 5"""
        images = _floats(images[: self.batch_size])
        _require(
            images.shape[2:] == (self.size, self.size),
            "images",
            f"of shape {tuple(images.shape)}",
            f"(B, 3, {self.size}, {self.size}) in a game of this size",
        )
        fake = self.G(self.latents(len(images), generator))
        d_loss = hinge_discriminator(self.D(images), self.D(fake.detach()))
        _descend(d_loss, self.optimizers["D"], "discriminator")
        g_loss = hinge_generator(
            self.D.requires_grad_(False)(fake)
        )  # D only passes the gradient on
        _descend(g_loss, self.optimizers["G"], "generator")
        self.D.requires_grad_(True)
        figures = {"d_loss": d_loss, "g_loss": g_loss, "diversity": diversity(fake, images)}
        return {name: figure.detach() for name, figure in figures.items()}

    def follow(self):
        """Let G_ema follow G. Ref: [3] Eq. 7"""
        follow(self.G_ema, self.G, self.momentum)
        for module in filter(is_parametrized, self.G_ema.modules()):
            module.weight  # reading it is a power iteration; averaged singular vectors need one

    def get_extra_state(self):  # for state_dict
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def set_extra_state(self, state):
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


# ---- 8. Readouts: what an encoder has learned, in numbers; none of them changes it


@torch.no_grad()
def embed(encoder, images, batch_size=500):
    """Embed images without augmentation: features (n, features) and unit embeddings (n, dim), float32.
    The encoder works in eval mode and returns to its own: no gradient, and no BatchNorm buffer changes."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    device = next(encoder.parameters()).device
    features, z = zip(*(encoder(_floats(part.to(device))) for part in images.split(batch_size)))
    for module, mode in modes.items():
        module.training = mode
    return torch.cat(features).float(), unit(torch.cat(z).float())


def knn_accuracy(train, train_labels, test, test_labels, k=200, temperature=0.5):
    """Classify by a vote of the k nearest by cosine, each with weight e^{cos/t}; accuracy in percent.
    train (n, D), test (m, D), labels (n,), (m,). k is at most n. k and t are those of [1]'s code."""
    train, k, right = unit(train.float()), min(k, len(train)), 0
    for x, y in zip(unit(test.float()).split(1000), test_labels.split(1000)):
        cosines, index = (x @ train.T).topk(k)  # (1000, k)
        votes = (cosines / temperature).exp()[..., None] * F.one_hot(train_labels)[index]
        right += (votes.sum(1).argmax(1) == y).sum()
    return 100 * float(right) / len(test)


def linear_readout(train, train_labels, test, test_labels, l2=1e-3, max_steps=200):
    """Classify by logistic regression on fixed features, mean cross-entropy + l2/2 ‖W‖²; accuracy in percent.
    train (n, D), test (m, D), labels (n,), (m,). The training set standardises the features. L-BFGS solves
    the convex problem from zero to a gradient of at most 1e-4, or max_steps: nothing is random."""
    train, test = train.detach(), test.detach()
    mean, std = train.mean(0), train.std(0)
    std = std.masked_fill(std <= 1e-5 * train.abs().amax(0), INF)  # a constant feature becomes 0
    x, classes = (train - mean) / std, int(train_labels.max()) + 1
    w, bias = (
        x.new_zeros(classes, x.shape[1]).requires_grad_(),
        x.new_zeros(classes).requires_grad_(),
    )
    solver = torch.optim.LBFGS(
        [w, bias],
        max_iter=max_steps,
        tolerance_grad=1e-4,
        tolerance_change=1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

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
    """Measure how evenly embeddings cover the sphere: log E e^{−t ‖x − y‖²} over pairs of different rows.
    z (n, D) → from −4t (two antipodes) to 0 (one point). [4] plots its negative. Ref: [5]; [4] Eq. 10"""
    z, n, sums = unit(_upcast(z)), len(z), []
    for rows in _slices(n, 1000):
        exponents = -t * (2 - 2 * z[rows] @ z.T)
        exponents[:, rows].fill_diagonal_(-INF)  # no row pairs with itself
        sums.append(exponents.logsumexp(1))
    return torch.cat(sums).logsumexp(0) - math.log(n) - math.log(n - 1)


@torch.no_grad()
def alignment(x, y):
    """Measure how near two views are: E ‖x_i − y_i‖², from 0 (equal) to 4 (opposite). Ref: [5]"""
    return (unit(_upcast(x)) - unit(_upcast(y))).square().sum(1).mean()


@torch.no_grad()
def tolerance(z, labels):
    """Measure how near samples of one class are: the mean cosine of different rows that share a label.
    z (n, D), labels (n,) → in [−1, 1]. Ref: [4] Eq. 11, over pairs of one label, as in its Table 1"""
    z = unit(_upcast(z))
    members = F.one_hot(labels.long()).to(z.dtype)  # (n, classes)
    sums, counts = members.T @ z, members.sum(0)
    return (sums.square().sum() - z.square().sum()) / (
        counts * (counts - 1)
    ).sum()  # ‖Σ z‖²: all pairs


# ---- 9. Training: methods, and one loop. A method has two calls:
#     step(encoder, images, index, generator, **options) → loss, figures
# images (B, 3, H, W) and their places in the training set, index (B,); options go to the criterion. In a
# method's pre-training encoder and loss are None. Once the encoder has moved: after_step() → figures.


class SimCLR(nn.Module):
    """Contrast two random views of each image with those of the batch.
    criterion: a ContrastiveLoss; view_options: of `view`; partners: (images, labels) of the training set, for
    a second view of another image of the same class, "true positives". Ref: [6] Algorithm 1; [1] Fig. 2"""

    pretrain = 0  # epochs before the encoder begins
    follows = ()  # optimizers on the encoder's schedule

    def __init__(self, criterion, view_options=None, partners=None):
        super().__init__()
        self.criterion, self.view_options, self.partners = criterion, view_options or {}, partners

    def embed_views(self, encoder, generator, *images):
        """Embed a random view of each of several batches of images, in one pass → (B, D) for each."""
        views = torch.cat([view(x, generator, **self.view_options) for x in images])
        return encoder(views.contiguous(memory_format=torch.channels_last))[1].chunk(len(images))

    def contrast(self, *z, return_stats=False, **options):
        """Compute the loss of embeddings, and a dict of its statistics."""
        result = self.criterion(*z, return_stats=return_stats, **options)
        return result if return_stats else (result, {})

    def step(self, encoder, images, index, generator, **options):
        """Compute the loss of a batch, and figures."""
        others = images if self.partners is None else self.others_of_class(index, generator)
        return self.contrast(*self.embed_views(encoder, generator, images, others), **options)

    def after_step(self):
        """Update what the method owns, and return figures or None."""

    def others_of_class(self, index, generator):
        """Draw for each image another one of its class; itself if there is none, or without a label (−1)."""
        images, labels = self.partners
        same = ((labels == labels[index, None]) & (labels >= 0)).float()  # (B, n)
        other = torch.multinomial(same.scatter_(1, index[:, None], 1e-9), 1, generator=generator)[
            :, 0
        ]
        return images[other.to(images.device)].to(other.device)


class Bank(SimCLR):
    """Contrast one view of each image with its row of a memory bank; all other rows are the candidates.
    images: the training set. Its embeddings less their mean are the first rows, as an untrained encoder maps
    all images near one point. Ref: [4] Eq. 1, with the bank for its g"""

    def __init__(self, criterion, encoder, images, momentum=0.5, view_options=None):
        super().__init__(criterion, view_options)
        self.bank = MemoryBank((z := embed(encoder, images)[1]) - z.mean(0), momentum)

    def step(self, encoder, images, index, generator, group=None, **options):
        z = unit(_upcast(self.embed_views(encoder, generator, images)[0]))
        self.news = gather(index, group), gather(z.detach(), group)
        return self.contrast(
            z,
            self.bank.rows[index],
            negatives=self.bank.rows,
            own=index,
            normalize=False,
            group=group,
            **options,
        )

    def after_step(self):
        self.bank.update(*self.news)


class Queue(SimCLR):
    """Contrast a view with one embedded by a slow copy of the encoder; candidates are the copy's embeddings
    of this batch and earlier ones. size: how many earlier ones, fewer than there are images, as an older view
    of the anchor's image is a false negative. momentum: of the copy, in [0, 1). Ref: [8] Algorithm 1, but the
    copy is in eval mode, and this batch's keys are candidates: without them, age would give negatives away"""

    def __init__(self, criterion, encoder, images, size=4096, momentum=0.99, view_options=None):
        super().__init__(criterion, view_options)
        _require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        self.slow, self.momentum = copy.deepcopy(encoder).requires_grad_(False).eval(), momentum
        self.leader = (encoder,)  # in a tuple: it is no part of this module
        _require(isinstance(size, int) and size >= 1, "size", size, "a whole number of at least 1")
        some = torch.arange(size, device=images.device) * len(images) // size  # evenly spread
        self.queue = MemoryBank(embed(encoder, images[some])[1])

    def step(self, encoder, images, index, generator, group=None, **options):
        z = unit(_upcast(self.embed_views(encoder, generator, images)[0]))
        with torch.no_grad():
            keys = unit(_upcast(self.embed_views(self.slow, generator, images)[0]))
        self.news, rank = gather(keys, group), 0 if group is None else distributed.get_rank(group)
        own = rank * len(keys) + torch.arange(len(keys), device=keys.device)
        return self.contrast(
            z,
            keys,
            negatives=torch.cat([self.news, self.queue.rows]),
            own=own,
            normalize=False,
            group=group,
            **options,
        )

    def after_step(self):
        self.queue.push(self.news)
        follow(self.slow, self.leader[0], self.momentum)


class CLAE(SimCLR):
    """Contrast two views, and the first with the second moved against the encoder: the mean of both losses.
    x' = x + bound · sign ∂ℓ/∂x, within [0, 1]; bound: the largest change of a pixel, half of [10]'s ε.
    Ref: after [10], which moves the first view against itself and keeps separate BatchNorm statistics"""

    def __init__(self, criterion, bound=0.015, view_options=None):
        super().__init__(criterion, view_options)
        _require(0 < bound < 1, "bound", bound, "in (0, 1)")
        self.bound = bound

    def step(self, encoder, images, index, generator, return_stats=False, **options):
        first, second = (view(images, generator, **self.view_options) for _ in range(2))
        views = torch.cat([first, second.requires_grad_()]).contiguous(
            memory_format=torch.channels_last
        )
        z = encoder(views)[1].chunk(2)
        loss, figures = self.contrast(*z, return_stats=return_stats, **options)
        with torch.autocast(loss.device.type, enabled=False):
            (slope,) = torch.autograd.grad(loss, second, retain_graph=True)
        harder = (second + self.bound * slope.sign()).clamp(0, 1).detach()
        harder = encoder(harder.contiguous(memory_format=torch.channels_last))[1]
        return (loss + self.contrast(z[0], harder, **options)[0]) / 2, figures


class DiffHard(SimCLR):
    """Play the min-max game: the encoder descends a loss that, every few steps, the generator ascends.
    criterion: of objective ppcl, unless the game has no pairs; game: a Game for images of this size. Figures:
    "pair", the mean cosine of G(z) and G_ema(z), and those of `Game.imitate`. Ref: [3] Algorithm 1"""

    def __init__(self, criterion, game, view_options=None):
        super().__init__(criterion, view_options)
        _require(
            criterion.objective == "ppcl" or not game.pairs,
            "objective",
            criterion.objective,
            "ppcl, for pairs to be positives; or the game without pairs",
        )
        self.game, self.pretrain, self.follows = game, game.pretrain, (game.optimizers["ascent"],)
        self.register_buffer("taken", torch.zeros((), dtype=torch.long))

    def step(self, encoder, images, index, generator, return_stats=False, **options):
        game, self.early = self.game.train(), encoder is None
        self.real, self.generator = _floats(images), generator
        if self.early:
            return None, {}
        self.turn = int(self.taken) % game.every == 0
        self.taken += 1
        # Step 1: form the batch: N generated images in N/2 pairs, N real ones, and two views of each
        with torch.set_grad_enabled(self.turn and game.ascent):
            generated, latent = game.sample(len(images), generator)  # Eq. 6
        batch = torch.cat([generated, self.real])  # (2N, 3, H, W)
        labels = torch.cat([latent, len(latent) + torch.arange(len(images), device=latent.device)])
        z = self.embed_views(encoder, generator, batch, batch)
        # Step 2: train the main model: the loop descends this loss, whose gradient reaches G as well
        loss, figures = self.contrast(
            *z, labels=labels, return_stats=return_stats, **options
        )  # Eq. 4, 8
        game.optimizers["ascent"].zero_grad()
        if return_stats and game.pairs:
            figures["pair"] = F.cosine_similarity(
                *_upcast(z[0].detach()[: len(generated)]).chunk(2)
            ).mean()
        return loss, figures

    def after_step(self):
        # Step 3: every few iterations, update the generator
        if not (self.early or self.turn):
            return None
        if self.game.ascent and not self.early:
            self.game.optimizers["ascent"].step()  # Eq. 4
        self.game.follow()  # Eq. 7
        figures = self.game.imitate(self.real, self.generator)  # Eq. 5
        if not self.early and (figures["diversity"] < 0.25 or figures["d_loss"] < 0.01):
            warnings.warn(
                "the generator has collapsed, or the discriminator tells all its images from real "
                "ones: lower the game's ascent_lr or lr, or raise pretrain or every"
            )
        return figures


def in_micro_batches(encoder, size):
    """Make an encoder take a large batch `size` images at a time, in the memory of `size` images.
    encoder: a module that returns embeddings, or a tuple as Encoder does → a function to call in its place.
    The backward pass embeds each micro-batch again, with the same randomness. The gradient is exact, but
    BatchNorm in training mode normalises each micro-batch alone and moves its statistics twice. Ref: [11]"""
    _require(size >= 1, "micro_batch", size, "at least 1")

    def in_parts(images):
        parts = [checkpoint(encoder, some, use_reentrant=False) for some in images.split(size)]
        return torch.cat(parts) if torch.is_tensor(parts[0]) else tuple(map(torch.cat, zip(*parts)))

    return in_parts


RECIPES = {  # name: optimizer, its rate over the progress p in [0, 1], and the settings if none are given
    "adamw": {
        "optimizer": torch.optim.AdamW,
        "options": {},
        "epochs": 16,
        "batch_size": 256,
        "lr": 8e-3,
        "weight_decay": 1e-4,  # linear warm-up over a tenth of the run, cosine decay to 0
        "rate": lambda p, step: min(10 * (p + step), 1) * (1 + math.cos(math.pi * p)) / 2,
    },
    "sgd": {
        "optimizer": torch.optim.SGD,
        "options": {"momentum": 0.9},
        "epochs": 200,
        "batch_size": 128,
        "lr": 0.03,
        "weight_decay": 5e-4,  # a tenth after 160 epochs, a hundredth after 190: [4] 5.1
        "rate": lambda p, step: 0.1 ** ((p >= 0.8) + (p >= 0.95)),
    },
}


class Training:
    """Train an encoder, step by step: `for figures in Training(encoder, images, SimCLR(criterion)): ...`
    encoder, images  an Encoder, and uint8 images (n, 3, H, W), on its device or, to save memory, another
    method           SimCLR, Bank, Queue, CLAE or DiffHard
    recipe           a row of RECIPES; epochs, batch_size (the largest), lr and weight_decay override it
    schedules        {option of the loss: function of the progress}: {"alpha": lambda p: lead_in(p, 0.1)}
    micro_batch, bfloat16   images that the encoder takes at a time; its autocast, None: if the hardware can
    group            a torch.distributed process group: each rank takes its share of every batch. The loss is
                     that of one process, but for BatchNorm; at most ranks − 1 images of a batch are left out
    seed             of order, views and latents; it repeats the run (on a GPU up to rounding)
    A step yields {"epoch", "step", "steps", "images", "loss"}, scheduled options, and every tenth of an epoch
    statistics; epochs below 0 are the pre-training, without a loss. FloatingPointError if a loss is not
    finite. After a step (with a group, an epoch) state_dict() holds all that load_state_dict() needs."""

    def __init__(
        self,
        encoder,
        images,
        method,
        recipe="adamw",
        epochs=None,
        batch_size=None,
        lr=None,
        weight_decay=None,
        schedules=None,
        micro_batch=None,
        bfloat16=None,
        group=None,
        seed=0,
    ):
        _require(recipe in RECIPES, "recipe", recipe, f"one of {', '.join(RECIPES)}")
        given = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay}
        self.recipe = {**RECIPES[recipe], **{name: x for name, x in given.items() if x is not None}}
        self.epochs, size, lr = self.recipe["epochs"], self.recipe["batch_size"], self.recipe["lr"]
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.ranks = 1 if group is None else distributed.get_world_size(group)
        n, self.device = len(images), next(encoder.parameters()).device
        _require(
            n >= max(2, self.ranks), "images", n, "at least 2 to train on, and one for each rank"
        )
        _require(self.epochs >= 1, "epochs", self.epochs, "at least 1")
        _require(size >= max(2, self.ranks), "batch_size", size, f"at least {max(2, self.ranks)}")
        _require(0 < lr < INF, "lr", lr, "a number above 0")
        _require(
            group is None or not method.follows, "group", "given", "None: one process plays a game"
        )
        self.batches = min(-(-n // min(size, n)), n // max(2, self.ranks))  # of nearly one size
        method.to(self.device)
        for x in (
            (*encoder.state_dict().values(), *method.state_dict().values())
            if group is not None
            else ()
        ):
            distributed.broadcast(x, distributed.get_global_rank(group, 0), group=group)
        self.encoder, self.method = encoder.to(memory_format=torch.channels_last), method
        self.images, self.seed, self.group, self.epoch, self.done = (
            images,
            seed,
            group,
            -method.pretrain,
            0,
        )
        self.steps, self.schedules = (method.pretrain + self.epochs) * self.batches, schedules or {}
        self.micro_batch, self.generator = micro_batch, torch.Generator(self.device)
        cpu = getattr(torch.cpu, "get_capabilities", dict)() if self.device.type == "cpu" else {}
        native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if self.device.type == "cuda"
            else bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
        )
        self.bfloat16 = native if bfloat16 is None else bfloat16  # emulation would be slow
        parts = [
            {"params": encoder.parameters(), "weight_decay": self.recipe["weight_decay"]},
            {"params": method.criterion.parameters(), "weight_decay": 0},
        ]
        self.optimizer = self.recipe["optimizer"](parts, lr, **self.recipe["options"])

    def __iter__(self):
        while self.epoch < self.epochs:
            seed = self.seed * 100_003 + self.epoch  # of seed and epoch: a resumed run repeats it
            order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
            if self.done == 0:
                self.generator.manual_seed(seed * self.ranks + self.rank)
            shares = [
                index[: len(index) // self.ranks * self.ranks].chunk(self.ranks)[self.rank]
                for index in order.to(self.device).tensor_split(self.batches)[self.done :]
            ]
            for index in shares:
                epoch, step = (
                    self.epoch,
                    (self.method.pretrain + self.epoch) * self.batches + self.done + 1,
                )
                try:
                    images = self.images[index.to(self.images.device)].to(
                        self.device, non_blocking=True
                    )
                    figures = self._step(index, images)
                except (_NotFinite, FloatingPointError) as error:
                    raise FloatingPointError(
                        f"step {step} of {self.steps}: {error}; lower lr?"
                    ) from error
                self.epoch, self.done = divmod(epoch * self.batches + self.done + 1, self.batches)
                yield figures | {"epoch": epoch, "step": step, "steps": self.steps}

    def _step(self, index, images):
        total, begun = self.epochs * self.batches, self.epoch >= 0
        progress = max(0, self.epoch * self.batches + self.done) / total
        rate = self.recipe["rate"](progress, 1 / total)
        for part in (
            part for x in (self.optimizer, *self.method.follows) for part in x.param_groups
        ):
            part["lr"] = part.setdefault("initial_lr", part["lr"]) * rate
        scheduled = {name: schedule(progress) for name, schedule in self.schedules.items()}
        encoder = self.encoder.train() if begun else None
        if begun and self.micro_batch is not None:
            encoder = in_micro_batches(encoder, self.micro_batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            loss, figures = self.method.step(
                encoder,
                images,
                index,
                self.generator,
                group=self.group,
                return_stats=10 * self.done % self.batches < 10,
                **scheduled,
            )
            if begun:
                _descend(loss, self.optimizer, "encoder", self.group)
                figures = {"loss": loss.detach(), **figures, **scheduled}
            return {
                "images": len(index) * self.ranks,
                **figures,
                **(self.method.after_step() or {}),
            }

    def state_dict(self):
        """Return all that a run needs to go on."""
        return {
            "epoch": self.epoch,
            "done": self.done,
            "generator": self.generator.get_state(),
            **{
                name: getattr(self, name).state_dict()
                for name in ("encoder", "method", "optimizer")
            },
        }

    def load_state_dict(self, state):
        """Go on from such a state."""
        self.epoch, self.done = state["epoch"], state["done"]
        self.generator.set_state(state["generator"].cpu())
        for name in ("encoder", "method", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
