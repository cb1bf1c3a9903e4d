"""Hard-negative contrastive learning in one file, to be copied into projects.
Version 2.0.0, Python ≥ 3.11, torch ≥ 2.10. Copyright 2026 the hardneg authors. MIT licence.

An encoder learns by pulling two views of a sample together and pushing other samples, the
negatives, away. Which ones, and how much, decides how good it gets. Methods answer three questions:

    1. Who could be a negative?       candidates: the rest of the batch, a memory bank, given ones
    2. How much does each one count?  weights w: as if those near the anchor were drawn more often
    3. What is done with them?        objective: nce, each, ppcl, decoupled, simple, triplet

Symbols
    B, V, D     samples, views of each sample, dimensions of an embedding
    A           anchors: V·B, every view of every sample; with `negatives` B, the first views
    a           anchors in a block, as large batches are worked in blocks
    M           positives: V − 1 other views, or P named rows; N columns more if labels make some
    N           columns: V·B times the ranks, or K, the rows of `negatives`
    N_i         candidates of anchor i: its columns that are not masked; N in formulas
    z           embedding, a unit row                        f(x) in [1, 2, 4], v in [3]
    t           temperature, divides cosines                 t in [1], τ in [3, 4]
    s_ij, p_im  logits cos / t of anchor i with candidate j, with its m-th positive
    log w_ij    log of the weight of candidate j, which itself could overflow float32
    tau_plus    τ⁺, the probability that a candidate has the anchor's class                  [1]
    beta        β, the concentration of tilted weights; multiplies s = cos/t                 [1]
    alpha       α, the share of nearest candidates that `top` keeps                          [4]
    epsilon     ε, the entropic regularisation, in the unit of the ground cost               [2]
    margin      η of the triplet loss, in the unit of a squared distance                     [2]

To copy: 1 The loss, 2 Weights, 3 Objectives, 4 Candidates, 5 Transport, 6 Finding, 7 Large batches
and ranks, 8 Numerics and checks. To train with it: 9 Views, 10 Encoders, 11 Generators, 12 Training

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. 2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport. 2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach. 2202.06464; numbered as in its v1
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. 2012.09740
    [5] Wang, Isola. Alignment and Uniformity. 2005.10242    [6] Chen et al. SimCLR. 2002.05709
    [7] Wu et al. Instance Discrimination. 1805.01978        [8] He et al. MoCo. 1911.05722
    [9] Brock et al. BigGAN. 1809.11096    [10] Knight et al. Symmetry Preserving Scaling. 2014
   [11] Gao et al. GradCache. 2101.06983   [12] Yeh et al. DCL. 2110.06848
"""

from __future__ import annotations

# mypy: ignore-errors
import functools
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, NamedTuple, TypedDict, Unpack, get_type_hints, overload

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

__version__ = "2.0.0"
__all__ = ["PRESETS", "PAPERS", "Options", "contrastive_loss", "ContrastiveLoss", "mine", "draw"]
__all__ += ["uniform", "tilted", "hardest", "top", "transported", "sinkhorn", "InvalidArgument"]
__all__ += ["nce", "each", "ppcl", "decoupled", "simple", "triplet", "published", "exact"]
__all__ += ["gather", "unit"]

INF = math.inf

# ---- 1. The loss -------------------------------------------------------------------------------

PRESETS = {  # loss: weights, objective, τ⁺; None is 1 / (N_i + 1)
    "simclr": ("uniform", "nce", 0.0),  # [6]; [4] Eq. 1
    "debiased": ("uniform", "nce", None),  # Chuang et al. 2007.00224; [1] at β = 0
    "hcl": ("tilted", "nce", None),  # [1] Eq. 2
    "ot": ("transported", "nce", 0.0),  # [2] Eq. 5, 8
    "hard": ("top", "nce", 0.0),  # [4] Eq. 9
    "simple": ("uniform", "simple", 0.0),  # [4] Eq. 3; [2] Eq. 9
    "hard-simple": ("top", "simple", 0.0),  # [4] Table 1, HardSimple
    "triplet": ("hardest", "triplet", 0.0),  # [2] IV; [4] Eq. 6
    "ppcl": ("uniform", "ppcl", 0.0),  # [3] Eq. 8
    "supcon": ("uniform", "ppcl", 0.0),  # another name of ppcl
}
# the papers' settings on CIFAR-10, where they name any: ContrastiveLoss("hcl", **PAPERS["hcl"])
PAPERS = {
    "simclr": {"temperature": 0.5},  # [6] App. B.9
    "debiased": {"temperature": 0.5, "tau_plus": 0.1},  # [1] and its code, as the next
    "hcl": {"temperature": 0.5, "tau_plus": 0.1, "beta": 1.0},
    "ot": {"temperature": 0.5, "epsilon": 0.5},  # [2] Table II; its temperature is that of [1]
    "hard": {"temperature": 1.0, "alpha": 0.0819},  # [4] Table 1: 4095 of 49 999
    "hard-simple": {"alpha": 0.0819},
}


class Options(TypedDict, total=False):
    """Options of a loss; a loss ignores those it does not use. DEFAULTS and ALLOWED tell values.

    loss            a row of PRESETS
    weights         of candidates; None: the loss's. Or a function: logits (a, N) of some anchors →
                    log weights, finite or −∞, used as they are, not scaled to mean 1. With τ⁺ and
                    M > 1 it is called again, for positives (a, M). Masked logits are −1e30
    objective       None: the loss's. Or a function: logits (a, M) of positives, logits and log
                    weights (a, N), −1e30 of what does not count → losses (a,), 0 if nothing does
    temperature     t, divides cosines; a 0-d tensor that requires a gradient is learned
    tau_plus        τ⁺ of nce, each, ppcl, decoupled. None: the loss's; of hcl, debiased 1/(N_i + 1)
    beta of tilted; alpha of top; margin of triplet; epsilon and cost of transported; kappa of "exp"
    absolute_margin, relative_margin   drop likely false negatives: cosines over c − absolute_margin
                    or c − relative_margin · |c|, c that of the nearest positive. None: drop none
    normalize       project rows to the unit sphere first; if False, they have to be unit rows
    detach_weights  no gradient through the weights. None: for transported alone, see sinkhorn
    debias          of τ⁺ > 0: "published"; or "exact", of uniform, tilted, top or hardest weights
    reduction       "mean", "sum": of all ranks; "none": each of this rank, to be averaged for DDP
    block_size      anchors in a block, 0 for all at once; None: all up to 2^18 pairs on a CPU, 2^23
                    on a GPU. In blocks memory grows as A + N, results differ by rounding, there is
                    no second derivative, and random functions draw again in the backward pass of
                    "none" losses. Not in blocks: negatives (B, K, D), and functions that learn. The
                    first anchor tells if they learn: its loss must have a gradient in them"""

    # type, default, names or a range [low, high], of ints if high is one; ranges keep masks < FAR
    loss: Annotated[str, "simclr", PRESETS]
    weights: Annotated[str | Callable[[Tensor], Tensor] | None, None, WEIGHTS]
    objective: Annotated[str | Callable[[Tensor, Tensor, Tensor], Tensor] | None, None, OBJECTIVES]
    temperature: Annotated[float | Tensor, 0.1, [1e-6, 1e6]]
    tau_plus: Annotated[float | None, None, [0, 0.999]]  # defaults of these three: in PRESETS
    beta: Annotated[float, 0.5, [0, 1e8]]
    alpha: Annotated[float, 0.3, [1e-9, 1.0]]
    epsilon: Annotated[float, 0.2, [1e-9, 1e9]]
    cost: Annotated[Literal["sqeuclidean", "exp"], "sqeuclidean", ("sqeuclidean", "exp")]
    kappa: Annotated[float, 0.0, [-60, 60.0]]
    margin: Annotated[float, 0.0, [0, 1e9]]
    absolute_margin: Annotated[float | None, None, [-9, 9.0]]
    relative_margin: Annotated[float | None, None, [-9, 9.0]]
    normalize: Annotated[bool, True, (True, False)]
    detach_weights: Annotated[bool | None, None, (True, False)]
    debias: Annotated[Literal["published", "exact"], "published", ("published", "exact")]
    reduction: Annotated[Literal["mean", "sum", "none"], "mean", ("mean", "sum", "none")]
    block_size: Annotated[int | None, None, [0, 2**40]]


class Call(Options, total=False):
    """What a call can be given: options, and what `contrastive_loss` explains."""

    negatives: Tensor | None
    positive_index: Tensor | None
    negative_mask: Tensor | None
    log_weights: Tensor | None
    labels: Tensor | None
    group: distributed.ProcessGroup | None


@overload
def contrastive_loss(
    *views: Tensor, return_stats: Literal[False] = False, **call: Unpack[Call]
) -> Tensor: ...
@overload
def contrastive_loss(
    *views: Tensor, return_stats: Literal[True], **call: Unpack[Call]
) -> tuple[Tensor, dict[str, Tensor]]: ...
def contrastive_loss(
    *views,
    negatives=None,
    positive_index=None,
    negative_mask=None,
    log_weights=None,
    labels=None,
    group=None,
    return_stats=False,
    **options,
):
    """Compute any of the losses, on the views of a batch.
        s_ij = cos(z_i, z_j) / t    log w_ij = weights(s_i)_j    ℓ_i = objective(p_i, s_i, log w_i)

    views           (B, D) each; row i shows sample i. Every row is an anchor, in the order of
                    torch.cat(views); other rows of its sample are its positives, those of others
                    its candidates. A single view has positives by `positive_index`, or else
                    `labels`. The mean leaves out anchors without a positive, no others
    negatives       (K, D), or (B, K, D) with rows for each anchor: the candidates are these rows
                    instead, and the anchors the first view alone
    positive_index  (B,) or (B, P), −1 for none: rows of `negatives` that show the sample, such as
                    arange(B) of views[1]: no candidates; with a single view, its positives
    negative_mask   (A, N) or (N,), True where the candidate may be a negative. Masked rows have to
                    be finite, too; labels still make them positives
    log_weights     (A, N) or (N,), above −1e20, not learned: added to the rule's log weights.
                    Scores of a teacher. Or −log(K q_j) if K candidates are drawn with replacement,
                    j with probability q_j; log q_i − log q_j if the positive, i, is drawn so, too
    labels          (B,), or (B + K,) with negatives (K, D), the last K for those. Samples of one
                    label are no negatives of each other. They are positives in the objective ppcl,
                    and of a single view without `positive_index`. Every number is a label, −1 too
    group           a torch.distributed group: candidates are the views of all ranks, rank r's from
                    r·V·B on. `negatives` (K, D) must be the same on all: see `gather`. All ranks
                    call together, with arguments of one shape, and DDP has to average gradients, of
                    what the loss learns, too: without it they are larger, by the number of ranks
    return_stats    also return a dict, of this process's first 2^20 pairs: `clamped`, share of
                    anchors where nothing is left, or only the floor of `published`; `positive`,
                    `negative`, mean cosines; `spread`, root of the mean variance of an anchor's
                    negative ones; `candidates`, mean N_i; `ess`, (Σw)² / (N_i Σw²). NaN: of none

    Takes floats of 16 bits or more, computes in float32 at least, autocast off. Values are not
    checked on a GPU or in compiled code. Cost: A·N·D; `transported` adds 2·A·N for each step of
    Sinkhorn, and A·N·D, too, above 2^24 pairs if weights are detached. Ref: PRESETS"""
    options = settle(options)
    arguments = {"negatives": negatives, "positive_index": positive_index, "labels": labels}
    arguments |= {"mask": negative_mask, "log_weights": log_weights, "group": group}
    _check_call(options, views, **arguments)
    with torch.autocast(views[0].device.type, enabled=False):
        pairs = _line_up(options, views, **arguments)
        if options["weights"] in COUPLED:
            pairs = pairs._replace(potential=_potential(pairs, group, options))
        value = _evaluate(pairs, group, options)
        if _may_read(value):  # a NaN that is masked may leave the value finite, but no slope
            _check_finite("negatives", negatives)
            _check_finite("log_weights", log_weights)
            for i, view in enumerate(views):
                _check_finite(f"views[{i}]", view)
        if return_stats:
            return value, _statistics(pairs, options)
        return value


contrastive_loss.__doc__ = f"{contrastive_loss.__doc__}\n\n{Options.__doc__}"


class _Answers(NamedTuple):
    losses: Tensor  # (a,), 0 where an anchor has no positive
    tally: Tensor  # (3,), how many have a positive, have a candidate, are clamped: no gradient
    pos: Tensor  # logits (a, M)
    neg: Tensor  # logits (a, N)
    log_w: Tensor  # (a, N)
    clamped: Tensor  # (a,), True where debiasing leaves nothing, or `published` is at its floor


def answer(pairs: _Pairs, options: Options) -> _Answers:
    """Answer the three questions for some anchors, each alone. A loss may run this twice: see 7."""
    # 1. Who could be a negative?
    pos, neg, n = _who(pairs, options)  # logits (a, M), (a, N); N_i (a,)
    log_n = n.clamp_min(1).log()

    # 2. How much does each one count?
    through_weights = torch.is_grad_enabled() and not options["detach_weights"]
    with torch.set_grad_enabled(through_weights):
        log_w, log_w_pos = weigh(pos, neg, n, pairs, options)  # (a, N); (a, M), 0 if it cancels

    # 3. What is done with them?
    objective, t = options["objective"], pairs.t
    clamped = torch.zeros_like(pos[:, 0], dtype=torch.bool)
    if callable(objective):
        dropped = torch.minimum(neg, log_w) < FAR  # filled, as no slope may be there: see `_mask_`
        kept, log_w_kept = neg.masked_fill(dropped, MASKED), log_w.masked_fill(dropped, MASKED)
        losses = objective(pos.masked_fill(pos < FAR, MASKED), kept, log_w_kept)
    elif objective == "simple":
        losses = simple(t * pos, t * neg, log_w)
    elif objective == "triplet":
        losses = triplet(t * pos, t * neg, log_w, options["margin"])
    else:
        log_negatives = log_sum(neg, log_w)  # (a,)
        if options["tau_plus"] != 0:  # None, too: `_debiased` takes 1 / (N_i + 1)
            found = _debiased(log_negatives, pos, neg, log_w, log_w_pos, log_n, pairs, options)
            log_negatives, clamped = found
        losses = OF_LOGITS[objective](pos, log_negatives)
    _check_result("objective", losses, neg.shape[:1])
    no_positive = pos.amax(1) < FAR
    losses = losses.masked_fill(no_positive, 0)
    tally = torch.stack([~no_positive, n > 0, clamped]).sum(1).to(losses)
    return _Answers(losses, tally, pos, neg, log_w, clamped)


class ContrastiveLoss(nn.Module):
    """Compute `contrastive_loss` as a module: ContrastiveLoss("hcl", beta=1.0)(view_1, view_2).
    Options of a call override those given here. An nn.Parameter as temperature is learned, and so
    are the parameters of an nn.Module as weights or objective."""

    def __init__(self, loss: str = "simclr", **options: Unpack[Options]):
        super().__init__()
        self.given = {"loss": loss, **options}
        self.options = settle(self.given)  # to look at: `forward` settles all that is given anew
        may_learn = nn.Parameter, nn.Module
        self.learned = [name for name in self.given if isinstance(self.given[name], may_learn)]
        for name in self.learned:
            setattr(self, name, self.given[name])  # so that it is trained, moved and saved

    def forward(self, *views, **call):
        """Compute the loss of the views, with the module's options and those given here."""
        learned = {name: getattr(self, name) for name in self.learned}
        return contrastive_loss(*views, **self.given | learned | call)


ContrastiveLoss.__doc__ = f"{ContrastiveLoss.__doc__}\n\n{Options.__doc__}"


# ---- 2. Weights: how much does each candidate count? -------------------------------------------
# A rule maps logits (a, N) to new log weights (a, N); no row may depend on another. What is masked
# has to stay so: fill x < FAR with 0 first, with MASKED last. Values and slopes have to be finite,
# for cosines t · x to ±(1 + 1e-6). `by_rule` weighs x, candidates or positives; thresholds and sums
# are of logits, the row's candidates. Positives have no column, so potential is 0.0 there.
# To add one: its function, its branch in `by_rule`, its option in Options, and the function's name
#     in WEIGHTS, or in FIT_FOR_EXACT if a weight depends on its row alone and never falls as the
#     logit grows; in SCALED_TO_MEAN_ONE, too, for mean 1: it has to leave each row a candidate.

FIT_FOR_EXACT = ("uniform", "tilted", "hardest", "top")  # tilted as β ≥ 0
WEIGHTS = FIT_FOR_EXACT + ("transported",)
MATRIX_HINT = "a matrix of your own for all anchors goes in log_weights="
SCALED_TO_MEAN_ONE = ("tilted", "hardest", "transported")  # by `weigh`
COUPLED = ("transported",)  # these add a potential, last; before it they are `_couple`'s kernel

# The logit or log weight of what does not count: e^MASKED is 0, and unlike −∞ it makes no NaN. What
# is below FAR counts as masked; the ranges in Options have to keep it there, finite in float32.
MASKED, FAR = -1e30, -1e20


def uniform(logits: Tensor) -> Tensor:
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0
    What is masked stays masked: adding uniform(logits) to x ≤ 0 masks x where logits are masked."""
    # 0 from −1e20 to 1e20, the logit beyond; a boolean mask and a fill take several times as long
    return F.hardshrink(logits.detach(), lambd=-FAR)


def tilted(logits: Tensor, beta: float) -> Tensor:
    """Count near candidates more: w_ij = e^{β s_ij} / (1/N Σ_k e^{β s_ik}), after scaling.
    Limits: β = 0 is `uniform`, β → ∞ `hardest`. Ref: [1] Eq. 2, Z_β estimated from candidates"""
    log_w = beta * logits
    if beta < 1e-9:  # β · MASKED would not stay below FAR
        log_w = log_w.masked_fill(logits < FAR, MASKED)
    return log_w


def hardest(logits: Tensor, x: Tensor | None = None) -> Tensor:
    """Count the nearest candidate alone: log w_ij = 0 where s_ij = max_k s_ik, ties included.
    In a loss it counts N_i times, as the weights are scaled to mean 1; in `top` it counts once.
    x (A, any number): logits to weigh by this threshold. Ref: [1] Prop. 1, App. A.1; [4] Eq. 6"""
    return top(logits, 1e-9, x)  # ⌈1e-9 · N⌉ is 1 up to N = 1e9


def top(logits: Tensor, alpha: float, x: Tensor | None = None) -> Tensor:
    """Count the upper α quantile: log w_ij = 0 where s_ij ≥ s_i^(α), the ⌈αN⌉-th largest logit.
    Ties with it are kept; alpha = k / N keeps the k nearest. x: as in `hardest`. Weights are 0 or
    1: [4] sums these. Limits: α = 1 is `uniform`, α → 0 keeps the nearest. Ref: [4] Eq. 8, 9"""
    # whole numbers, rounded down: 0.07 · 100 exceeds 7, and its ceiling would be 8
    billionths = int(alpha * 1e9)
    most = -(-logits.shape[-1] * billionths // 10**9)
    n = (logits > FAR).sum(-1, keepdim=True)
    kept = (-(-n * billionths // 10**9)).clamp_min(1)
    if most > 1:
        nearest = logits.detach().topk(most).values
    else:
        nearest = logits.detach().amax(-1, keepdim=True)  # the same, and faster
    threshold = nearest.gather(-1, kept - 1)
    x = logits if x is None else x
    return uniform(x).masked_fill(x < threshold, MASKED)


def by_rule(logits, x, potential, t, options):
    """Weigh logits x (A, any number); `hardest` and `top` find their threshold in logits (A, N)."""
    rule = options["weights"]
    if rule == "uniform":
        return uniform(x)
    if rule == "tilted":
        return tilted(x, options["beta"])
    if rule == "hardest":
        return hardest(logits, x)
    if rule == "top":
        return top(logits, options["alpha"], x)
    if rule == "transported":
        epsilon, cost, kappa = options["epsilon"], options["cost"], options["kappa"]
        return transported(x, potential, t, epsilon, cost, kappa)
    try:
        log_w = rule(x.masked_fill(x < FAR, MASKED))  # a copy, without a slope where masked
    except Exception as error:
        error.add_note(f"weights got logits {tuple(x.shape)} of some anchors; {MATRIX_HINT}")
        raise
    _check_result("weights", log_w, x.shape)
    return log_w.masked_fill(x < FAR, MASKED).clamp_min(MASKED)  # −∞ is masked, too


def weigh(pos, neg, n, pairs, options):
    """Answer question 2: log weights of candidates (A, N), and of positives (A, M) for debiasing.
    Tilted, hardest and transported weights are scaled to mean 1 over the N_i candidates, so they
    sum to N_i, as uniform ones do, before log_weights come in. A positive is weighed as a candidate
    of its logit, at potential 0, and scaled alike; in "published" a single one's cancels and is 0.
    To cap or bend weights: both, after `scale`; and in `_debiased` change `of_mean_one`."""
    scores = by_rule(neg, neg, pairs.potential, pairs.t, options)  # (A, N)
    log_w, log_w_pos = scores, uniform(pos)
    if options["weights"] in SCALED_TO_MEAN_ONE:
        log_w = torch.log_softmax(scores, -1) + n.log().clamp_min(MASKED)[:, None]
    if options["tau_plus"] != 0 and (pos.shape[1] > 1 or options["debias"] != "published"):
        # scaling added one number to a row: read it at the heaviest, as −1e30 rounds it away
        scale = log_w.amax(-1, keepdim=True) - scores.amax(-1, keepdim=True)
        log_w_pos = by_rule(neg, pos, 0.0, pairs.t, options) + scale  # (A, M)
    if pairs.log_weights is not None:
        log_w = log_w + pairs.log_weights
    return log_w, log_w_pos


# ---- 3. Objectives: what is done with the weighted negatives? ----------------------------------
# pos: logits (A, M) of positives; labels add a column for each candidate, MASKED where it is none.
# neg: logits (A, N) of candidates. log_negatives (A,): the log of their weighted sum of e^s,
# debiased, "negatives" in formulas. Without any it is below FAR: a loss is flat in it there.
# Without a positive all pos are MASKED. Value and slope have to be finite, there and for cosines to
# ±(1 + 1e-6). `simple`, `triplet` get t · logits, masked ones too, and have no τ⁺. No row may
# depend on another: take the `_weighted_mean`, of f(neg, pos) with what is masked filled.
# To add one of (pos, log_negatives): its row in OF_LOGITS, and it has τ⁺; of (pos, neg, log_w): its
# name in OBJECTIVES, its branch in `answer`. An option stands in Options, and for the first kind in
# a branch after debiasing. If labels make positives: as "ppcl" in `_line_up`.


def nce(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute noise-contrastive estimation: −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + negatives) ).
    0 without negatives. Limits for one positive, uniform weights, τ⁺ = 0: t → 0 of t · nce is half
    `triplet` on `hardest` at η = 0; t → ∞ is log(1 + N) + N/(1 + N)/t · `simple`.
    Ref: [1] Eq. 1, 2, Fig. 5; [2] Eq. 8; [4] Eq. 1, 6, 7, 9"""
    return -F.logsigmoid(log_sum(pos) - log_negatives)


def each(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute `nce` of each positive alone: −1/M Σ_m log( e^{p_m} / (e^{p_m} + negatives) ).
    Ref: [1] Eq. 2, as printed"""
    losses = -F.logsigmoid(pos - log_negatives[:, None])  # (A, M)
    return _mean_over_positives(losses, pos)


def ppcl(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute the partially pseudo-labelled loss −1/M Σ_m log(e^{p_m}/(Σ_l e^{p_l} + negatives)).
    It is `nce` + logsumexp_m p_m − mean_m p_m: `nce` itself for one positive. Ref: [3] Eq. 8"""
    return nce(pos, log_negatives) + log_sum(pos) - _mean_over_positives(pos, pos)


def decoupled(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute `nce` without positives in the denominator: log negatives − log Σ_m e^{p_m}.
    0 without negatives. Unlike `nce`, a near positive has the full gradient. For one positive,
    weights of mean 1, and no floor that binds, this at τ⁺ = 0, plus log(1 + 1/N), is `nce` at
    τ⁺ = 1/(N + 1). Ref: [12] Eq. 6"""
    return (log_negatives - log_sum(pos)).masked_fill(log_negatives < FAR, 0)


def simple(pos: Tensor, neg: Tensor, log_w: Tensor) -> Tensor:
    """Compute the difference of means of cosines: −1/M Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j.
    λ of [4] is 1/N, 1/⌈αN⌉ for `top`. Without negatives the sum is 0. Ref: [4] Eq. 3; [2] Eq. 9"""
    return _weighted_mean(neg, log_w) - _mean_over_positives(pos, pos)


def triplet(pos: Tensor, neg: Tensor, log_w: Tensor, margin: float) -> Tensor:
    """Compute the hinge 1/M Σ_m Σ_j w_j max(0, ‖z − z_m‖² − ‖z − z_j‖² + η) / Σ_j w_j.
    The difference is 2 (cos_j − cos_m). Memory: A·M·N, so A·N² if labels make positives.
    Ref: [2] IV; at η = 0 on `hardest` twice [4] Eq. 6"""
    differences = neg[:, None] - pos[:, :, None]  # (A, M, N)
    hinges = F.relu(2 * differences + margin)
    return _mean_over_positives(_weighted_mean(hinges, log_w[:, None]), pos)


def _weighted_mean(x, log_w):
    """Compute Σ_j w_j x_j / Σ_j w_j over the last dimension; 0 where nothing has a weight."""
    nothing = log_w.amax(-1) < FAR
    return (torch.softmax(log_w, -1) * x).sum(-1).masked_fill(nothing, 0)


def _mean_over_positives(x, pos):
    is_positive = pos > FAR
    return torch.where(is_positive, x, 0).sum(1) / is_positive.sum(1).clamp_min(1)


OF_LOGITS = {"nce": nce, "each": each, "ppcl": ppcl, "decoupled": decoupled}  # these have τ⁺
OBJECTIVES = (*OF_LOGITS, "simple", "triplet")

# A share τ⁺ of candidates is of the anchor's class: false negatives. Positives show their e^s, so
# that part of the weighted mean of e^s can be subtracted. If weights prefer the near, its share is
# another, τ_i: `exact`. E = Σ_j w_j e^{s_j} / W, W = Σ_j w_j, E⁺ = Σ_m w⁺_m e^{p_m} / Σ_m w⁺_m.
# To add one: Options, `_debiased` with `weigh`, `settle`, `_check_call`; a finite slope at E = 0.


def published(log_mean, log_mean_pos, tau_plus, t):
    """Subtract the expected false negatives, with the share τ⁺, whatever the weights.
        log max( (E − τ⁺ E⁺) / (1 − τ⁺),  e^{−1/t} )
    log_mean: log E; log_mean_pos: log E⁺; tau_plus: τ⁺; (A,) each → (A,), and where the floor
    holds: as no cosine is below −1, no less can be left. There it has a gradient in t alone.
    Ref: [1] Eq. 2; Fig. 5, whose floor is of a sum and lacks the factor N"""
    floor = -1 / t
    rest, nothing_left = _subtract(log_mean, log_mean_pos, tau_plus.log())
    clamped = nothing_left | (rest < floor)
    return torch.where(clamped, floor, rest), clamped


def exact(log_mean, log_mean_pos, log_share, least, most):
    """Subtract the expected false negatives with their share τ_i of the weight.
        log( (E − τ_i E⁺) / (1 − τ_i) ),    at least `least`, at most `most`
    log_share: log τ_i of `class_share`, an estimate; least: the published mean for uniform weights,
    which is below that for hard ones; most: the largest logit; (A,) each → (A,), and where nothing
    is left; there, and where least > most, the result is least. One e^p dominates E⁺ at a small t:
    use it at t ≥ 0.3, with four or more positives, samples of the class. Ref: [1], q_β⁻"""
    rest, nothing_left = _subtract(log_mean, log_mean_pos, log_share)
    rest = torch.minimum(rest, most).maximum(least)
    return torch.where(nothing_left, least, rest), nothing_left


def class_share(pos, log_w_pos, log_mean_w, tau_plus):
    """Compute log τ_i (A,), τ_i the class's share of q ∝ w p, where p = τ⁺ p⁺ + (1 − τ⁺) p⁻.
        τ_i = τ⁺ (1/M Σ_m w⁺_m) / (W / N),     w⁺ and w by one function of the logit
    At τ_i ≥ 1 nothing is left for other classes: positives are too near, or τ⁺ is too large."""
    m = (pos > FAR).sum(1).clamp_min(1).to(pos.dtype)
    return tau_plus.log() + log_sum(log_w_pos) - m.log() - log_mean_w


def _subtract(log_mean, log_mean_pos, log_share):
    """Compute log( (E − τ E⁺) / (1 − τ) ), and where nothing is left."""
    log_false = log_share + log_mean_pos
    rest = _log_difference(log_mean, log_false) - _log_difference(0, log_share)
    return rest, (log_false >= log_mean) | (log_share >= 0)


def _log_difference(x, y):
    """Compute log(e^x − e^y); where nothing is left, a finite number."""
    gap = y - x
    return x + torch.log(-torch.expm1(gap.masked_fill(gap >= 0, -1)))


def _log_mean_pos(pos, log_w_pos):
    """Compute log E⁺, by weights; the plain mean if no positive has a weight."""
    # absent positives get 2 · MASKED: so those present share equally if `top` gives them all MASKED
    shares = torch.log_softmax(log_w_pos + uniform(pos), -1)
    return log_sum(pos, shares)


def _debiased(log_all, pos, neg, log_w, log_w_pos, log_n, pairs, options):
    """Debias log_all = log Σ_j w_j e^{s_j} → the log of what is left (A,), where it is clamped."""
    share = options["tau_plus"]
    tau_plus = 1 / (1 + log_n.exp()) if share is None else torch.full_like(log_n, share)  # (A,)
    of_mean_one = options["weights"] in ("uniform", *SCALED_TO_MEAN_ONE)
    of_mean_one = of_mean_one and pairs.log_weights is None
    log_total = log_n if of_mean_one else log_sum(log_w)  # log W
    log_mean, log_mean_pos = log_all - log_total, _log_mean_pos(pos, log_w_pos)
    if options["debias"] == "published":  # log_w_pos of a single positive is 0 here, not its weight
        rest, clamped = published(log_mean, log_mean_pos, tau_plus, pairs.t)
    elif options["debias"] == "exact":
        plain, plain_pos = log_sum(neg) - log_n, _log_mean_pos(pos, uniform(pos))
        least, _ = published(plain, plain_pos, tau_plus, pairs.t)
        log_share = class_share(pos, log_w_pos, log_total - log_n, tau_plus)
        rest, clamped = exact(log_mean, log_mean_pos, log_share, least, neg.amax(-1))
    has_negatives = log_all > FAR
    return torch.where(has_negatives, rest + log_total, log_all), clamped & has_negatives


# ---- 4. Candidates: who could be a negative of each anchor? ------------------------------------


class _Pairs(NamedTuple):
    """What is known of anchors, candidates and their pairs. `_line_up` fills it for all anchors.
    To add a field, or an option that masks or weighs; if it
        has a row for each anchor: name it in PER_ANCHOR: blocks cut it, the coupling gathers it
        has one for each column: `_line_up` gathers a batch's
        has a gradient: a tensor in every call, in MAY_LEARN; in `weigh` see detach_weights
        masks: each row alone, in `_mask_`, and in its `plain`
        masks i for j, but not j for i: in `symmetric` of `_couple`
        weighs: in `of_mean_one` of `_debiased`; refused for "exact" by `_check_call`
        is for rules: given in each call of `by_rule`
        scales logits: in t, as all take t · logits for cosines
        shifts positives, or all of a row: at an objective's call; to shift a candidate, weigh it
        is an argument: in Call, `contrastive_loss` and its checks, `_check_call`, `_line_up`"""

    anchors: Tensor  # (A, D)
    candidates: Tensor  # (N, D), or (A, N, D) where each anchor has its own
    pos_cosines: Tensor  # (A, M), of anchors and positives
    own: Tensor  # (A, any number), columns of its sample, each once, or −1: never candidates
    t: Tensor  # ()
    potential: Tensor  # (N,) of a coupling; else () NaN, to show where one is missing
    mask: Tensor | None = None  # (A, N), True where a candidate may be a negative
    log_weights: Tensor | None = None  # (A, N)
    labels: Tensor | None = None  # (A,)
    candidate_labels: Tensor | None = None  # (N,)
    by_index: bool = False  # columns `own` are the positives, as of a single view
    by_label: bool = False  # candidates of an anchor's label are its positives
    symmetric: bool = False  # the logits of all anchors are their own transpose: of a batch alone

    def of(self, rows: slice) -> _Pairs:
        taken = {}
        for name in PER_ANCHOR:
            if getattr(self, name) is not None:
                taken[name] = getattr(self, name)[rows]
        if self.candidates.ndim == 3:
            taken["candidates"] = self.candidates[rows]
        return self._replace(**taken)


PER_ANCHOR = ("anchors", "pos_cosines", "own", "mask", "log_weights", "labels")
MAY_LEARN = ("anchors", "pos_cosines", "candidates", "t", "potential")


def _line_up(options, views, negatives, positive_index, labels, mask, log_weights, group):
    """Arrange the arguments of a call as anchors, candidates, and what is known of their pairs."""
    project = unit if options["normalize"] else _upcast
    z, b, v = project(torch.cat(views)), len(views[0]), len(views)  # (V·B, D)
    device, known = z.device, {"symmetric": negatives is None}
    if negatives is None:  # a batch: all views are anchors, and candidates of each other
        anchors, candidates = z, gather(z, group)
        # row i + k·B, counted around the end, shows the sample of row i, k views later
        positives = [z.roll(-k * b, 0) for k in range(1, v)]
        first = 0 if group is None else distributed.get_rank(group) * len(z)
        columns = first + torch.arange(len(z), device=device)
        own = columns.view(v, b).T.repeat(v, 1)  # (A, V): row i + k·B has i, i + B, …
    else:
        anchors, *positives = z.split(b)
        candidates = project(negatives.to(z.dtype))
        own = torch.full((b, 1), -1, device=device)  # no candidate shows an anchor's sample
    if positive_index is not None:
        own = torch.as_tensor(positive_index, device=device).long().view(b, -1)  # (B, P)
        own, order = own.sort(1)
        repeated = own[:, 1:] == own[:, :-1]
        own[:, 1:].masked_fill_(repeated, -1)  # counts once
        own = own.scatter(1, order, own)
        known["by_index"] = v == 1
    cosines = anchors[:, :0]  # of a single view, whose positives `_who` reads off the logits
    if v > 1:
        cosines = torch.stack([(anchors * x).sum(1) for x in positives], 1)  # (A, M)
    t = options["temperature"]
    t = t.to(z) if torch.is_tensor(t) else z.new_full((), t)  # its gradient needs more than 16 bits
    if labels is not None:
        labels = torch.as_tensor(labels, device=device)
        labels, of_rows = labels[:b], labels[b:]  # of_rows: of negatives
        if negatives is None:
            labels = labels.repeat(v)
            of_rows = gather(labels, group)
        known |= {"labels": labels, "candidate_labels": of_rows}
        unnamed = v == 1 and positive_index is None
        known["by_label"] = unnamed or options["objective"] == "ppcl"
    if mask is not None:
        known["mask"] = torch.as_tensor(mask, device=device).expand(len(anchors), -1)
    if log_weights is not None:
        known["log_weights"] = log_weights.detach().to(z).expand(len(anchors), -1)
    return _Pairs(anchors, candidates, cosines, own, t, z.new_full((), math.nan), **known)


def _who(pairs, options):
    """Answer question 1: logits of positives (a, M) and of candidates (a, N), and N_i (a,)."""
    anchors, pos = pairs.anchors / pairs.t, pairs.pos_cosines / pairs.t  # t · logits are cosines
    if pairs.candidates.ndim == 2:
        neg = anchors @ pairs.candidates.T  # (a, N)
    else:
        neg = torch.einsum("ad,and->an", anchors, pairs.candidates)
    if pairs.by_index:
        rows = torch.arange(len(neg), device=neg.device)[:, None]
        named = neg[rows, pairs.own.clamp_min(0)]  # (a, P); neg.gather would save neg for autograd
        pos = named.masked_fill(pairs.own < 0, MASKED)
    if pairs.by_label:
        of_label = neg.masked_fill(pairs.labels[:, None] != pairs.candidate_labels, MASKED)
        _drop_(of_label, pairs.own)
        pos = torch.cat([pos, of_label], 1)  # (a, M + N)
    return pos, neg, _mask_(neg, pos, pairs, options)  # last: positives were read off neg


@torch.no_grad()
def _mask_(neg, pos, pairs, options):
    """Mask the logits (a, N) of what is no negative, in place → N_i (a,), how many are left.
    Nothing before may save neg (neg.square() would raise). Autograd does not know what is masked:
    a slope in a logit masked here or by `_drop_` would reach the embeddings. A softmax has none
    there; other readers fill it first. This is called again, so it must not be random."""
    _drop_(neg, pairs.own)
    margins = options["absolute_margin"], options["relative_margin"]
    plain = pairs.mask is None and pairs.labels is None and margins == (None, None)
    if pairs.mask is not None:
        neg.masked_fill_(~pairs.mask, MASKED)
    if pairs.labels is not None:
        neg.masked_fill_(pairs.labels[:, None] == pairs.candidate_labels, MASKED)
    if margins != (None, None):
        limit = _limit(pairs.t * pos.amax(1, keepdim=True), margins)  # amax skips absent ones
        neg.masked_fill_(neg > limit / pairs.t, MASKED)
    if plain:  # saves a pass over the matrix
        n = neg.shape[1] - (pairs.own >= 0).sum(1)
    else:
        n = (neg > FAR).sum(1)
    return n.to(neg.dtype)


@torch.no_grad()
def _drop_(x, own):
    """Mask the columns own (A, any number) of each row of x, in place; −1 names none."""
    values = x.new_full(own.shape, MASKED).masked_fill(own < 0, INF)  # min(x, INF) is x
    x.scatter_reduce_(1, own.clamp_min(0), values, "amin")


def _limit(nearest, margins):
    absolute, relative = margins
    limit = torch.full_like(nearest, INF)
    if absolute is not None:
        limit = nearest - absolute
    if relative is not None:
        limit = torch.minimum(limit, nearest - relative * nearest.abs())
    return limit.masked_fill(nearest < FAR, INF)  # without a positive all may be negatives


@torch.no_grad()
def _statistics(pairs, options):
    some = pairs.of(slice(0, max(1, 2**20 // pairs.candidates.shape[-2])))
    found = answer(some, options)
    is_positive, is_negative = found.pos > FAR, found.neg > FAR
    n = is_negative.sum(1)
    cosines = (pairs.t * found.neg).masked_fill(~is_negative, 0)
    mean = cosines.sum(1) / n.clamp_min(1)
    variance = cosines.square().sum(1) / n.clamp_min(1) - mean.square()
    log_size = 2 * log_sum(found.log_w) - log_sum(2 * found.log_w)
    return {
        "clamped": found.clamped.to(mean.dtype).mean(),
        "ess": _mean_where(found.log_w.amax(1) > FAR, log_size.exp() / n.clamp_min(1)),
        "positive": _mean_where(is_positive, pairs.t * found.pos),
        "negative": cosines.sum() / n.sum(),
        "spread": _mean_where(n > 0, variance).clamp_min(0).sqrt(),
        "candidates": n.to(mean.dtype).mean(),
    }


def _mean_where(counts, x):
    return torch.where(counts, x, 0).sum() / counts.sum()


# ---- 5. Transport: weights that share out every candidate equally ------------------------------
# To add a cost of a cosine: Options, `ground_cost`. It has to be finite from −2 to 1 + 1e-6, and so
# has its slope.


def ground_cost(cosines: Tensor, cost: str, kappa: float) -> Tensor:
    """Compute the cost of coupling unit rows of a cosine, −2 if masked. Ref: [2] Eq. 5, VII-C
    "sqeuclidean": ½‖x − y‖² = 1 − cos; "exp": exp(‖x − y‖² − κ), where κ only scales ε, by e^κ."""
    _check_option("cost", cost)
    if cost == "sqeuclidean":
        return 1 - cosines
    if cost == "exp":
        return torch.exp(2 - 2 * cosines - kappa)


def transported(
    logits: Tensor, potential: Tensor, t: float | Tensor, epsilon: float, cost: str, kappa: float
) -> Tensor:
    """Count near candidates, but let each have the same total over anchors, if all N_i are equal.
        w_ij ∝ e^{−C_ij/ε + g_j}: the entropic coupling; with mean 1, w_ij = N P*(j | i)
    logits (A, N): cosines over t; potential: the g (N,) of `sinkhorn`. Limits: ε → 0 is optimal
    transport; ε → ∞ is `uniform` if all rows and columns have equally many entries, as in a batch;
    "sqeuclidean" with g = 0 is `tilted`, β = t/ε. Ref: [2] Eq. 5, Lemma 3; Eq. 7 omits e^{g_j}"""
    # a masked logit becomes a cosine of −2, where costs must be finite; `uniform` masks it again
    cosines = t * logits.clamp_min(-2 / t)
    log_kernel = ground_cost(cosines, cost, kappa) / -epsilon
    return log_kernel.clamp_min(FAR / 10) + potential + uniform(logits)  # a high cost is no mask


def sinkhorn(
    log_kernel: Callable[[], Iterable[Tensor]],
    symmetric: bool = False,
    tolerance: float | None = None,
    max_steps: int = 2000,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the entropic coupling with uniform marginals: P_ij = exp(f_i + log_kernel_ij + g_j).
    log_kernel() is called at each step and gives −C/ε (A, N) in blocks of rows, MASKED where i and
    j must not be coupled → f (A,), g (N,), error. A gradient through all steps stores 2·A·N each.

    A step sets f_i = −log Σ_j e^{log_kernel_ij + g_j}, so that rows sum to 1, then g, so that
    columns sum to A/N; the end divides by A. Here A and N leave out what is all masked. If the
    kernel is its transpose, `symmetric`, a step ends with the mean, f = g = (f + g) / 2 [10]: fewer
    are needed; for other kernels that does not converge. It stops at an error Σ_i |Σ_j P_ij − 1/A|
    of `tolerance` (None: 1e-5, in float64 1e-12), or with a warning after max_steps.

    Rate: a step multiplies the error by up to μ², μ the second singular value of √(AN) P, near 1
    where rows cluster. A symmetric step multiplies it along each eigenvector of A·P, of eigenvalue
    μ, by (μ² − μ)/2: by at most 1/8 for μ ≥ −0.2. Masked P_ij may take 1/error steps. [2] Eq. 5"""
    _check_number("max_steps", max_steps, 1)
    f = g = None
    for step in range(max_steps + 1):
        row_sums, column_sums = _log_sums(log_kernel(), g)
        n_rows = (row_sums > FAR).sum().clamp_min(1).to(row_sums.dtype)
        n_columns = (column_sums > FAR).sum().clamp_min(1)
        if step > 0:  # f and g are of the step before: e^{f + row_sums} should be 1
            off = torch.expm1(f + row_sums).masked_fill(row_sums < FAR, 0)
            error = off.abs().sum() / n_rows
            if _stops(error, step, max_steps, tolerance):
                break
        f = -_zero_if_masked(row_sums)  # the f by which `_log_sums` weighed columns
        g = (n_rows / n_columns).log() - _zero_if_masked(column_sums)
        if symmetric:
            f = g = (f + g) / 2
    return f - n_rows.log(), g, error


def _log_sums(blocks, g):
    """Compute log-sums of rows (A,), given g, and of columns (N,), given f = −those of the rows."""
    row_sums = column_sums = None
    for block in blocks:  # (a, N)
        sums = log_sum(block, g)  # (a,)
        row_sums = sums if row_sums is None else torch.cat([row_sums, sums])
        sums = log_sum(block, -_zero_if_masked(sums)[:, None], dim=0)  # (N,)
        column_sums = sums if column_sums is None else torch.logaddexp(column_sums, sums)
    return row_sums, column_sums


def _zero_if_masked(x):
    return x.masked_fill(x < FAR, 0)


def _stops(error, step, max_steps, tolerance):
    """Whether Sinkhorn stops, at max_steps always. All ranks see the same rows, so stop alike."""
    if step % 8 > 0 and step < max_steps and not _may_read(error):  # a GPU is asked seldom
        return False
    if tolerance is None:
        tolerance = 1e-12 if error.dtype == torch.float64 else 1e-5
    converged = not error.item() > tolerance  # or NaN: no step mends it
    if step == max_steps and not converged:
        advice = "raise epsilon, check labels, or that the kernel is symmetric"
        _warn(f"Sinkhorn stopped after {step} steps, above {tolerance:.0e}: {advice}")
    return converged or step == max_steps


def _potential(pairs, group, options):
    """Find the potential g (N,) of the coupling of the candidates with the anchors of all ranks."""
    pairs = pairs._replace(log_weights=None)  # these come after the coupling
    gathered = {name: gather(getattr(pairs, name), group) for name in PER_ANCHOR}
    with torch.set_grad_enabled(torch.is_grad_enabled() and not options["detach_weights"]):
        return _uncompiled(_couple, pairs._replace(**gathered), options)


def _couple(pairs, options):
    """Couple anchors and candidates: question 1 as in `answer`, then Sinkhorn on −C/ε → g (N,)."""

    def kernel_of(rows):
        some = pairs.of(rows)
        neg = _who(some, options)[1]
        return by_rule(neg, neg, 0.0, some.t, options)  # −C/ε

    margins = options["absolute_margin"], options["relative_margin"]
    symmetric = pairs.symmetric and pairs.mask is None and margins == (None, None)
    a, n = len(pairs.anchors), len(pairs.candidates)
    blocks = _slices(a, max(1, 2**20 // n))  # 4 MB each: they fit into a cache
    if torch.is_grad_enabled() or a * n <= 2**24:  # 64 MB in all
        stored = [kernel_of(rows) for rows in blocks]
        return sinkhorn(lambda: stored, symmetric)[1]
    return sinkhorn(lambda: map(kernel_of, blocks), symmetric)[1]  # again in each step


# ---- 6. Finding: which samples to take as negatives --------------------------------------------


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
    scores: bool = False,
):  # a type would need overloads
    """Find the k nearest documents of each query that are no positives: hard negatives.
    queries (n, D), documents (N, D), any floats → document rows (n, k), nearest first; −1 for none.

    positives       (n,), or (n, P) padded with −1: rows of own documents, not taken; None: row i
    labels          (N,): documents with the label of a query's own one are not taken
    absolute_margin, relative_margin   as in `contrastive_loss`, c that of the nearest own document
    skip            of those that are left, leave out so many of the nearest
    scores          also return the cosines (n, k), −∞ for none
    To train on them, embed them again, with a gradient, and mask −1: negative_mask=rows >= 0.
    Cost: n·N·D, and memory of unit documents and of a block of cosines: 64 MB, or 128 rows"""
    _check_tensor("queries", queries, "floating", ("n", "D"))
    _check_tensor("documents", documents, "floating", ("N", queries.shape[1]))
    _check_number("k", k, 1)
    _check_number("skip", skip, 0)
    n, size, device = len(queries), len(documents), queries.device
    margins = absolute_margin, relative_margin
    if positives is None:
        _require(n <= size, "documents", f"{size} rows", f"at least {n}: row i is query i's own")
        positives = torch.arange(n, device=device)
    positives = torch.as_tensor(positives, device=device)
    _check_tensor("positives", positives, "whole", (n,), (n, "P"))
    _check_rows("positives", positives, size)
    positives = positives.view(n, -1)
    _check_tensor("labels", labels, None, (size,))
    if labels is not None:
        labels = torch.as_tensor(labels, device=device)
    with torch.autocast(device.type, enabled=False):
        queries = unit(queries)
        documents = unit(documents).to(queries.dtype)
        if _may_read(queries):
            _check_finite("queries", queries)
            _check_finite("documents", documents)
        rows_at_once = min(n, max(128, 2**24 // size))
        matrix = queries.new_empty(rows_at_once, size)  # reused: fresh memory is slow
        found = torch.full((n, k), -1, device=device)
        found_cosines = queries.new_full((n, k), -INF)
        for rows in _slices(n, rows_at_once):
            own = positives[rows]  # (a, P); margins and labels need all documents at once
            cosines = matrix[: len(own)]  # (a, N)
            torch.mm(queries[rows], documents.T, out=cosines)
            if margins != (None, None):  # first: the next two mask own cosines, which it reads
                of_own = cosines.gather(1, own.clamp_min(0)).masked_fill(own < 0, -INF)
                limit = _limit(of_own.amax(1, keepdim=True), margins)
                cosines.masked_fill_(cosines > limit, MASKED)
            if labels is not None:
                for column in own.unbind(1):  # (a,)
                    of_label = labels[column.clamp_min(0), None] == labels
                    cosines.masked_fill_(of_label & (column >= 0)[:, None], MASKED)
            _drop_(cosines, own)
            top_k = cosines.topk(min(k + skip, size))
            nearest, index = top_k.values[:, skip:], top_k.indices[:, skip:]
            width, absent = nearest.shape[1], nearest < FAR
            found[rows, :width] = index.masked_fill(absent, -1)
            found_cosines[rows, :width] = nearest.masked_fill(absent, -INF)
    return (found, found_cosines) if scores else found


def draw(log_w: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw k distinct negatives for each anchor, each time j of those left with probability ∝ w_ij.
    log_w (A, N), −∞ if not to be drawn, k or more others → indices; negatives=rows[draw(log_w, k)].
    By tilted(logits, β), own rows −1e30, it prefers hard ones: then give a loss uniform weights."""
    _check_tensor("log_w", log_w, "floating", ("A", "N"))
    _check_number("k", k, 1)
    log_w = _upcast(log_w)
    if _may_read(log_w):
        most = (log_w > FAR).sum(-1).amin().item()
        _require(not log_w.isnan().any(), "log_w", "NaN", "a number, or −∞")
        _require(k <= most, "k", k, f"at most {most}: a row has no more of weight above 0")
    # the largest of log w_j − log(exponential noise) is j with probability w_j / Σ_l w_l
    noise = torch.empty_like(log_w).exponential_(generator=generator)
    noise = noise.log().clamp_min(-99)  # clamp: −∞ − log 0 would be NaN
    return (log_w - noise).topk(k).indices


# ---- 7. Large batches and ranks: the same numbers in linear memory, over processes -------------
# Skip this on a first reading. The logits of a large batch do not fit into memory, so `answer` gets
# blocks of anchors. It must not count its calls, or communicate between ranks, as it is called by
#     _evaluate      for all anchors, if there are no blocks
#     _run_blocks    for a block, with its gradient; for "none" without, and again in backward, with
#     _in_blocks     for the first anchor, to see if functions or options learn; if so, for all
#     _statistics    for the first 2^20 pairs, without a gradient


def _evaluate(pairs, group, options):
    """Compute the losses of all anchors, (A,), or their mean or sum over all ranks."""
    size = _block_size(pairs, options)
    if size > 0:
        # a sum already, or (A,): what changes single losses belongs in `answer`
        value, tally = _uncompiled(_in_blocks, pairs, options, size)
    else:
        found = answer(pairs, options)
        value, tally = found.losses, found.tally
    if _may_read(tally):
        _warn_of(tally.tolist(), len(pairs.anchors), options)
    if options["reduction"] == "none":
        return value
    value, count = value.sum(), tally[0]  # of anchors with a positive; below, of all ranks
    if group is not None:
        value, count = _over_ranks(value, count, group)
    return {"sum": value, "mean": value / count.masked_fill(count == 0, 1)}[options["reduction"]]


def _warn_of(tally, a, options):
    """Warn if none of a anchors has a positive, or a candidate, or debiasing leaves most nothing.
    By the default τ⁺ the floor marks solved anchors, so only a given one warns."""
    for what, count in zip(("positive", "candidate"), tally[:2], strict=True):
        if count == 0:
            _warn(f"none of {a} anchors has a {what}: check labels, masks and positive_index")
    if options["tau_plus"] and 2 * tally[2] > a:
        _warn("debiasing leaves most anchors nothing: raise temperature or lower tau_plus")


def _block_size(pairs, options):
    """Choose the anchors in a block, for a CPU's cache or to keep a GPU busy; 0: all at once."""
    if pairs.candidates.ndim == 3:
        return 0  # `_run_blocks` would add a block's slope to all rows, and save little memory
    if options["block_size"] is not None:
        return options["block_size"]
    columns = len(pairs.candidates)
    at_once = 2**18 if pairs.anchors.device.type == "cpu" else 2**23
    if len(pairs.anchors) * columns <= at_once:
        return 0
    return max(64, 4 * at_once // columns)  # few blocks; 4 MB in float32 on a CPU


def _slices(n, size):
    return [slice(start, start + size) for start in range(0, n, size)]


def _in_blocks(pairs, options, size):
    """Compute the losses of all anchors (A,), or their sum, and their tally, a block at a time."""
    learned = []
    if torch.is_grad_enabled():
        alone = {name: getattr(pairs, name).detach() for name in MAY_LEARN}
        first = answer(pairs._replace(**alone).of(slice(0, 1)), options)
        if first.losses.requires_grad:  # functions or options learn, which `_InBlocks` cannot see
            found = answer(pairs, options)
            return found.losses, found.tally
        learned = [name for name in MAY_LEARN if getattr(pairs, name).requires_grad]
    tensors = [getattr(pairs, name) for name in learned]
    return _InBlocks.apply(pairs, options, size, learned, *tensors)


class _InBlocks(torch.autograd.Function):
    """Know the gradient of the losses in memory of the embeddings' size. That of a sum is computed
    forward, and multiplied by a number backward. For others blocks run again, backward."""

    @staticmethod
    def forward(ctx, pairs, options, size, learned, *tensors):
        run = functools.partial(_run_blocks, pairs, options, size, learned)
        if options["reduction"] not in ("mean", "sum") or not learned:
            value, tally, _ = run(None)  # (A,)
            # all that is read again is saved: autograd tells if it was changed in place by then
            ctx.save_for_backward(*filter(torch.is_tensor, pairs))
            ctx.run = run
        else:
            losses, tally, slopes = run(torch.ones_like(pairs.anchors[:, 0]))
            value = losses.sum()
            ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(tally)
        return value, tally

    @staticmethod
    def backward(ctx, grad_value, _):
        if torch.is_grad_enabled():  # under create_graph=True alone
            raise RuntimeError("to differentiate this loss twice, give it block_size=0")
        saved = ctx.saved_tensors
        if grad_value.ndim == 0:
            slopes = [grad_value * slope for slope in saved]
        else:
            with torch.autocast(grad_value.device.type, enabled=False):  # a caller's may be on
                *_, slopes = ctx.run(grad_value)
        return None, None, None, None, *slopes


def _run_blocks(pairs, options, size, learned, grad_losses):
    """Compute losses (A,), tally, and slopes of what is learned; without grad_losses (A,) all 0."""
    losses = torch.empty_like(pairs.anchors[:, 0])  # one: a small one a block would split memory
    tally = losses.new_zeros(3)
    slopes = [torch.zeros_like(getattr(pairs, name)) for name in learned]
    for rows in _slices(len(losses), size):
        some = pairs.of(rows)
        leaves = {name: getattr(some, name).detach().requires_grad_() for name in learned}
        with torch.set_grad_enabled(grad_losses is not None):
            found = answer(some._replace(**leaves), options)
        losses[rows] = found.losses.detach()
        tally += found.tally
        if grad_losses is not None and found.losses.requires_grad:
            wanted, grads = list(leaves.values()), grad_losses[rows]
            parts = torch.autograd.grad(found.losses, wanted, grads, materialize_grads=True)
            for name, slope, part in zip(learned, slopes, parts, strict=True):
                place = rows if name in PER_ANCHOR else ...  # all of it
                slope[place] += part
    return losses, tally, slopes


def _uncompiled(function, *arguments):
    """Call a function as it is, in compiled code too: there it is a break of the graph."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)  # here, as it takes seconds to import
    return function(*arguments)


def _over_ranks(value, count, group):
    """Sum over ranks. `gather` gives a rank's rows the gradients of the parts of all ranks, and DDP
    then divides by their number: so a part has its gradient times this number."""
    totals = torch.stack([value.detach(), count])
    distributed.all_reduce(totals, group=group)
    part = distributed.get_world_size(group) * value
    return totals[0] + (part - part.detach()), totals[1]


class _Gather(torch.autograd.Function):
    """Its backward pass communicates: all ranks have to gather the same tensors in the same order,
    with a gradient on all of them or on none, whatever their data are."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ranks = distributed.get_world_size(group)
        everything = x.new_empty(ranks * len(x), *x.shape[1:])
        distributed.all_gather(list(everything.chunk(ranks)), x, group)
        return everything

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
    To share rows: group=group, negatives=gather(rows, group), positive_index=rank * len(rows) + i,
    where i (B,) are this rank's rows that show its samples. All ranks need equally many rows."""
    if group is None or x is None:
        return x
    return _Gather.apply(x.contiguous(), group)


# ---- 8. Numerics and checks --------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """Project rows (..., D) to the unit sphere: z = x / ‖x‖, in float32 at least. A zero row stays
    0, and its gradient passes unchanged. Squares of entries must not overflow, nor all vanish."""
    x = _upcast(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, 1)


def _upcast(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_sum(x: Tensor, y: Tensor | None = None, dim: int = -1) -> Tensor:
    """Compute log Σ_j e^{x_j + y_j} of finite numbers; that of a single x is x."""
    if y is None:
        if x.shape[dim] == 1:
            return x.squeeze(dim)
        y = x.new_zeros(())
    return _LogSum.apply(x, y, dim)[0]


class _LogSum(torch.autograd.Function):
    """Compute log Σ e^{x + y} and the shares e^{x + y} / Σ, faster than torch.logsumexp."""

    @staticmethod
    def forward(x, y, dim):
        total = x + y
        largest = total.amax(dim)
        # softmax is one fused pass, in place, and its largest share is 1 / Σ e^{total − largest}
        shares = torch.softmax(total, dim, out=total)
        return largest - shares.amax(dim).log(), shares

    @staticmethod
    def setup_context(ctx, inputs, output):  # torch.func wants it apart from `forward`
        x, y, ctx.dim = inputs
        ctx.shapes = x.shape, y.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])  # an output, so that it has second derivatives

    @staticmethod
    def backward(ctx, grad_sum, grad_shares):
        (shares,) = ctx.saved_tensors
        slope = 0 if grad_sum is None else grad_sum.unsqueeze(ctx.dim)
        if grad_shares is not None:
            slope = slope + grad_shares - (grad_shares * shares).sum(ctx.dim, keepdim=True)
        grad_total = shares * slope
        return *(grad_total.sum_to_size(shape) for shape in ctx.shapes), None


def _may_read(x):
    """Whether the host may read values: on a CPU, where that is free. A GPU would be waited for."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class InvalidArgument(ValueError):
    """An argument is not what it may be."""


class _NotFinite(InvalidArgument, FloatingPointError):
    """An argument has NaN or inf."""


def _require(valid, name, got, allowed):
    if not valid:
        raise InvalidArgument(f"{name} is {got}; it must be {allowed}")


def _warn(message):
    """Warn at the line that called this file, past torch's wrappers."""
    frame, level = sys._getframe(), 1
    inside = frame.f_code.co_filename, torch.__path__[0]
    while frame and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


torch.empty(31 * 2**20, dtype=torch.uint8)  # freed, so that glibc reuses memory: faster blocks
DEFAULTS, ALLOWED = {}, {}  # of options
for _name, _hint in get_type_hints(Options, include_extras=True).items():
    DEFAULTS[_name], ALLOWED[_name] = _hint.__metadata__


def settle(given: Options) -> Options:
    """Check the options of a call, and decide what is left open."""
    loss = given.get("loss", DEFAULTS["loss"])
    _check_option("loss", loss)
    of_loss = zip(("weights", "objective", "tau_plus"), PRESETS[loss], strict=True)
    options = DEFAULTS | dict(of_loss)
    for name, value in given.items():
        if name not in DEFAULTS:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(DEFAULTS)}")
        _check_option(name, value)
        if value is not None:  # None: the loss's. tau_plus may stay None, which is 1 / (N_i + 1)
            options[name] = value
    weights, objective = options["weights"], options["objective"]
    has_tau_plus = objective in tuple(OF_LOGITS)  # a function may have no hash
    if not has_tau_plus:
        options["tau_plus"] = 0.0
    if options["detach_weights"] is None:
        options["detach_weights"] = weights in COUPLED
    if options["debias"] != "published":
        fits = weights in FIT_FOR_EXACT and has_tau_plus
        _require(fits, "debias", repr(options["debias"]), f"'published' for {weights}, {objective}")
    return options


def _check_option(name, value):
    allowed = ALLOWED[name]
    if callable(value) and name in ("weights", "objective"):
        named = value in [globals().get(x) for x in allowed]  # a name means more: mean 1, τ⁺
        _require(not named, name, repr(value), "its name in quotes")
        return
    if value is None and DEFAULTS[name] is None:
        return
    if name == "temperature" and torch.is_tensor(value) and value.ndim == 0:  # may be learned
        value = value.item() if _may_read(value) else 1.0
    if isinstance(allowed, list):
        kind = numbers.Integral if isinstance(allowed[1], int) else numbers.Real
        _check_number(name, value, *allowed, kind)
    else:
        known = isinstance(value, (str, bool)) and value in allowed
        _require(known, name, repr(value), f"one of {', '.join(map(str, allowed))}")


def _check_number(name, value, low, high=INF, kind=numbers.Integral):
    if not (isinstance(value, kind) and low <= value <= high):
        words = "a whole number" if kind is numbers.Integral else "a number"
        # only here: compiled code has no repr of a number that varies
        _require(False, name, repr(value), f"{words} from {low:g} to {high:g}")


def _check_call(options, views, negatives, positive_index, labels, mask, log_weights, group):
    several = "two or more floating tensors (B, D) of one shape; labels go in labels="
    alone = "; or one, with labels=, or with negatives= and positive_index="
    named = len(views) == 1 and (labels is not None or positive_index is not None)
    _require(len(views) >= 2 or named, "views", f"{len(views)} given", several + alone)
    for i, view in enumerate(views):
        fits = _fits(view, "floating", ("B", "D")) and view.shape == views[0].shape
        _require(fits, f"views[{i}]", _describe(view), f"one of {several}")
    fits = group is None or isinstance(group, distributed.ProcessGroup)
    _require(fits, "group", group, "a torch.distributed process group")
    b, d = views[0].shape
    a = rows = b
    if negatives is None:
        a = n = b * len(views)
        if group is not None:
            n *= distributed.get_world_size(group)
        _require(n > len(views), "views", "of one sample", "of two or more: one has no negative")
        _require(positive_index is None, "positive_index", "given", "None without negatives")
    else:
        _check_tensor("negatives", negatives, "floating", ("K", d), (b, "K", d))
        n = negatives.shape[-2]
        rows = b + n
        rule, shared = options["weights"], negatives.ndim == 2
        wanted = "another rule: with negatives (B, K, D) anchors share no candidate"
        _require(shared or rule not in COUPLED, "weights", rule, wanted)
        _require(shared or labels is None, "labels", "given", "None with negatives (B, K, D)")
        if shared and _may_read(negatives):
            _check_shared(negatives, group)
            unnamed = positive_index is None and mask is None and labels is None
            if len(views) > 1 and unnamed and (negatives == views[1][0]).all(1).any():
                _warn("views[1] has rows of negatives, too: name them in positive_index=")
    _check_tensor("positive_index", positive_index, "whole", (b,), (b, "P"))
    _check_rows("positive_index", positive_index, n)
    _check_tensor("negative_mask", mask, "boolean", (a, n), (n,))
    _check_tensor("log_weights", log_weights, "floating", (a, n), (n,))
    fits = log_weights is None or options["debias"] == "published"
    _require(fits, "log_weights", "given", "None unless debias is 'published'")
    _check_tensor("labels", labels, None, (rows,))


def _check_tensor(name, x, kind, *shapes):
    if x is None:
        return
    if kind != "floating" and not torch.is_tensor(x):  # labels, say, may be a list
        x = torch.as_tensor(x)
    fits = any(_fits(x, kind, shape) for shape in shapes)
    sizes = [f"({', '.join(map(str, shape))})" for shape in shapes]
    words = f"{kind} tensor" if kind else "tensor"
    _require(fits, name, _describe(x), f"a {words} {' or '.join(sizes)}")


def _fits(x, kind, shape):
    """Whether x is a tensor of a kind and a shape, where a letter is any length above 0."""
    if not torch.is_tensor(x) or x.ndim != len(shape):
        return False
    is_kind = {"floating": x.is_floating_point(), "boolean": x.dtype == torch.bool}
    is_kind["whole"] = not any(is_kind.values())
    if kind is not None and not is_kind[kind]:
        return False
    sizes = zip(x.shape, shape, strict=True)
    return all(a == b or (isinstance(b, str) and a > 0) for a, b in sizes)


def _check_rows(name, index, n):
    if index is None or torch.is_tensor(index) and not _may_read(index):
        return
    rows = torch.as_tensor(index, device="cpu").flatten().tolist()
    low, high = min(rows), max(rows)
    _require(low >= -1 and high < n, name, f"from {low} to {high}", f"from −1 to {n - 1}")


def _check_shared(negatives, group):
    sums = gather(negatives.detach().sum(dtype=torch.float64)[None], group)  # of each rank
    same = torch.allclose(sums, sums[0], equal_nan=True)
    _require(same, "negatives", "another on each rank", "of all ranks: gather(negatives, group)")


def _check_result(name, result, shape):
    if not torch.is_tensor(result) or result.shape != shape:
        wanted = f"one to a tensor {tuple(shape)}, of some anchors; {MATRIX_HINT}"
        _require(False, name, f"a function to {_describe(result)}", wanted)


def _check_finite(name, x):
    # a finite sum says that all are finite, much faster; but a sum can also overflow
    if x is not None and not x.sum().isfinite() and not x.isfinite().all():
        raise _NotFinite(f"{name} is not finite: it has NaN or inf; it must be finite")


def _describe(x):
    if torch.is_tensor(x):
        return f"{x.dtype} {tuple(x.shape)}"
    return type(x).__name__


# ================================================================================================
# Above is the loss: copy that much for a training loop of your own. Below, encoders are trained.

import copy
from collections.abc import Iterator, Mapping
from itertools import pairwise

from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

__all__ += ["view", "Encoder", "MemoryBank", "embed", "uniformity", "Generator", "Discriminator"]
__all__ += ["Game", "SimCLR", "Bank", "DiffHard", "Training", "RECIPES", "in_micro_batches"]
__all__ += ["annealed_beta", "lead_in"]
# ---- 9. Views: random crops, flips and colours of a whole batch, on its device, with a gradient

# A view draws one number in [0, 1) for each of these names. To add a transformation, add the names
# that it needs. Then every seed gives other views.
DRAWS = "area ratio x y flip jitter brightness contrast saturation hue gray sigma blur".split()


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

    images       (B, 3, H, W), bytes or floats in [0, 1].
    generator    A generator on the images' device. In the same state it repeats the views.
    area         The range of the crop's area, as a share of the image.
    ratio        The range of the crop's width / height, as a multiple of the image's. A side that
                 would be longer than the image's is cut to it.
    flip         The probability of a mirror image.
    jitter       The probability of colour jitter, which changes brightness, contrast, saturation
                 and hue.
    brightness   The factor of brightness is drawn from [1 − brightness, 1 + brightness].
    contrast     The factor of contrast is drawn in the same way.
    saturation   The factor of saturation is drawn in the same way.
    hue          The colour circle turns by an angle drawn from [−hue, hue]. 1 is a full turn.
    gray         The probability of an image without colour.
    blur         The probability of a blur.
    sigma        The range of the blur's standard deviation, in pixels.

    The views are float32 or float64, in [0, 1], with a gradient in the images. The defaults are
    those of [6] for 32 × 32 images, but area starts at 0.2 instead of 0.08. One affine map of luma
    and chroma makes all changes of colour, so they have no order. Ref: [6] App. A; [3] 3.1"""
    _check_tensor("images", images, None, ("B", 3, "H", "W"))
    x = _floats(images)
    size = len(x), len(DRAWS)
    draws = torch.rand(size, generator=generator, device=x.device, dtype=torch.float32)
    draws = dict(zip(DRAWS, draws.to(x.dtype).unbind(1), strict=True))  # each is (B,)
    with torch.autocast(x.device.type, enabled=False):  # places of pixels need more than 16 bits
        x = _crop(x, draws, area, ratio, flip)
        x = _recolour(x, draws, jitter, brightness, contrast, saturation, hue, gray)
        if blur > 0:
            x = _blur(x, _between(draws["sigma"], sigma), draws["blur"] < blur)
    return x.clamp(0, 1)


def _crop(x, draws, area, ratio, flip):
    share = _between(draws["area"], area)
    aspect = _between(draws["ratio"], (math.log(ratio[0]), math.log(ratio[1]))).exp()
    width = (share * aspect).sqrt().clamp_max(1)  # 1 is the whole image
    height = (share / aspect).sqrt().clamp_max(1)
    center_x = (1 - width) * (2 * draws["x"] - 1)  # coordinates go from −1 to 1
    center_y = (1 - height) * (2 * draws["y"] - 1)
    mirror = 1 - 2 * (draws["flip"] < flip).to(x.dtype)  # −1 for a mirror image
    zero = torch.zeros_like(width)
    theta = torch.stack([width * mirror, zero, center_x, zero, height, center_y], 1)
    grid = F.affine_grid(theta.view(-1, 2, 3), x.shape, align_corners=False)  # (B, H, W, 2)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _recolour(x, draws, jitter, brightness, contrast, saturation, hue, gray):
    """Change colours in YIQ, where Y is luma and (I, Q) is chroma.
    Chroma is scaled and turned. Then all of the image is scaled about its mean luma. For each image
    this is one 3 × 3 matrix and one offset."""
    changed = (draws["jitter"] < jitter).to(x.dtype)  # 1 or 0
    light = 1 + changed * _between(draws["brightness"], (-brightness, brightness))
    spread = 1 + changed * _between(draws["contrast"], (-contrast, contrast))
    colour = 1 + changed * _between(draws["saturation"], (-saturation, saturation))
    colour = colour * (draws["gray"] >= gray)
    angle = changed * _between(draws["hue"], (-hue, hue)) * 2 * math.pi
    cos = angle.cos() * colour
    sin = angle.sin() * colour
    one, zero = torch.ones_like(cos), torch.zeros_like(cos)
    chroma = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
    to_yiq, to_rgb = _colour_maps(x.device, x.dtype)
    mean_luma = (x.mean((2, 3)) @ to_yiq[0]) * light  # (B,), and contrast does not change it
    pixels = (to_rgb @ chroma @ to_yiq) @ x.flatten(2)  # (B, 3, H·W)
    pixels = (light * spread)[:, None, None] * pixels + ((1 - spread) * mean_luma)[:, None, None]
    return pixels.view_as(x)


def _floats(images):
    """Return bytes as floats in [0, 1], and floats of 16 bits as float32."""
    if not images.is_floating_point():
        return images / 255
    return _upcast(images)


def _between(draw, ends):
    low, high = ends
    return low + (high - low) * draw


@functools.lru_cache
def _colour_maps(device, dtype):
    """Return matrices (3, 3) from RGB to YIQ and back.
    They are cached, because a GPU would wait for each copy from the CPU."""
    rows = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
    with torch.inference_mode(False):  # training cannot use a tensor made in inference mode
        to_yiq = torch.tensor(rows, device=device, dtype=torch.float32)
        return to_yiq.to(dtype), torch.linalg.inv(to_yiq).to(dtype)


def _blur(x, deviation, chosen):
    height, width = x.shape[2:]
    radius = max(1, min(height, width) // 20)  # the kernel is a tenth as wide as the image [6]
    steps = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.softmax(-((steps / deviation[:, None]) ** 2) / 2, 1)  # (B, 2·radius + 1)
    kernel = torch.where(chosen[:, None], kernel, (steps == 0).to(x.dtype))
    weights = kernel[:, :, None, None, None].unbind(1)  # (B, 1, 1, 1) each
    x = F.pad(x, (radius,) * 4, mode="reflect")
    x = sum(weight * x[:, :, k : k + height] for k, weight in enumerate(weights))
    return sum(weight * x[:, :, :, k : k + width] for k, weight in enumerate(weights))


# ---- 10. Encoders: a backbone and a projection head, a memory of embeddings, an optimizer's step


class Encoder(nn.Module):
    """Map images (B, 3, H, W) in [0, 1] to features (B, self.features) and embeddings (B, dim).

    name    "small" has four convolutions. "resnet18" and "resnet50" are those of torchvision.
    dim     The dimension of the embeddings.
    size    The side H = W of the images, which must be even for "small". Up to 64 pixels a resnet
            has a first convolution of 3 × 3 pixels and no max-pooling.

    Embeddings are not normalised. After training, use the features. Ref: [6] App. B.9; [1] C"""

    def __init__(self, name: str = "small", dim: int = 128, size: int = 32):
        super().__init__()
        known = name in ("small", "resnet18", "resnet50")
        _require(known, "name", name, "small, resnet18 or resnet50")
        if name == "small":
            _require(size % 2 == 0, "size", size, "even for the small encoder")
            layers = [nn.PixelUnshuffle(2)]  # 2 × 2 pixels become one, which halves the work
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
        features = self.backbone(4 * images - 2)  # pixels have about mean 0 and variance 1 now
        return features, self.head(features)


class MemoryBank(nn.Module):
    """Remember a unit row for each sample, and move it towards each new embedding of the sample.
        row_i ← u / ‖u‖    where u = m row_i + (1 − m) z_i

    rows        (K, D), the first rows. They become a buffer, which has no gradient.
    momentum    m, in [0, 1).

    Ref: [4] 5.1; [8]"""

    def __init__(self, rows: Tensor, momentum: float = 0.5):
        super().__init__()
        _check_number("momentum", momentum, 0, 1 - 1e-9, numbers.Real)
        self.momentum = momentum
        self.register_buffer("rows", unit(rows.detach()))

    @torch.no_grad()
    def update(self, index: Tensor, z: Tensor) -> None:
        """Move the rows at index (B,) towards embeddings z (B, D). No row may be named twice."""
        _check_tensor("z", z, "floating", (len(index), self.rows.shape[1]))
        moved = self.momentum * self.rows[index] + (1 - self.momentum) * unit(z)
        self.rows[index] = unit(moved).to(self.rows.dtype)


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, momentum: float) -> None:
    """Move the parameters and buffers θ' of a follower towards those of a leader, θ.
        θ' ← m θ' + (1 − m) θ

    momentum is m, in [0, 1]. Both networks have the same layers. Buffers of whole numbers, such as
    the count of batches in BatchNorm, are copied. Ref: [8]; [3] Eq. 7"""
    leaders = leader.state_dict()
    for name, value in follower.state_dict().items():
        if value.is_floating_point():
            value.lerp_(leaders[name], 1 - momentum)
        else:
            value.copy_(leaders[name])


def _descend(loss, optimizer, name, read=False):
    """Take a step of an optimizer. A loss that is not finite raises FloatingPointError.
    On a GPU this is checked only if `read` is true, because the host has to wait for the loss."""
    if (read or _may_read(loss)) and not loss.isfinite():
        raise FloatingPointError(f"The loss of the {name} is {loss.item()}.")
    with torch.autocast(loss.device.type, enabled=False):  # autocast is for forward passes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.clear_autocast_cache()  # the cache has the weights from before this step


@torch.no_grad()
def embed(encoder: nn.Module, images: Tensor, batch_size: int = 500) -> tuple:
    """Embed images without augmentation → float32 features (n, F) and unit embeddings (n, D).
    images are (n, 3, H, W), on any device. A copy of the encoder runs in eval mode. The results
    have no gradient."""
    encoder = copy.deepcopy(encoder).eval()
    weight = next(encoder.parameters())  # it has the encoder's device and dtype
    parts = images.split(batch_size)
    outputs = [encoder(_floats(part.to(weight.device)).to(weight.dtype)) for part in parts]
    features, z = zip(*outputs, strict=True)
    return torch.cat(features).float(), unit(torch.cat(z).float())


@torch.no_grad()
def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """Measure how evenly the rows of z (n, D) cover the unit sphere.
        log E e^{−t ‖x − y‖²}    over all pairs of different rows x, y, projected to the sphere

    A lower value means that the rows are spread more evenly. It is 0 if all rows are equal, and −4t
    for two opposite rows. Time grows as n² D, memory as n²/2. Ref: [5]; [4] Eq. 10, negated"""
    exponents = -t * F.pdist(unit(z)).square()
    return exponents.logsumexp(0) - math.log(len(exponents))


# ---- 11. Generators: hard samples that are made instead of found, by a game against the encoder


class _Residual(nn.Module):
    def __init__(self, residual, shortcut):
        super().__init__()
        self.residual = nn.Sequential(*residual)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x):
        return self.residual(x) + self.shortcut(x)


def _conv(before, after, kernel=3):
    return spectral_norm(nn.Conv2d(before, after, kernel, padding=kernel // 2))


def _up(before, after):
    double = nn.Upsample(scale_factor=2)
    residual = [nn.BatchNorm2d(before), nn.ReLU(), double, _conv(before, after)]
    residual += [nn.BatchNorm2d(after), nn.ReLU(), _conv(after, after)]
    return _Residual(residual, [_conv(before, after, 1), double])


def _down(before, after, first=False, last=False):
    """Make the block of [9] Fig. 15(c), which halves the side of an image unless it is the last.
    A ReLU in front of the first block would lose all pixels below 0, so there is none."""
    pool = nn.Identity() if last else nn.AvgPool2d(2)
    residual = [_conv(before, after), nn.ReLU(), _conv(after, after), pool]
    if not first:
        residual.insert(0, nn.ReLU())
    return _Residual(residual, [pool, _conv(before, after, 1)])


def _widths(size, width):
    """List the numbers of channels at the sides size, size / 2, …, 4.
    They double from width to at most four times width."""
    valid = size >= 8 and size.bit_count() == 1
    _require(valid, "size", size, "a power of two of at least 8, such as 32")
    _check_number("width", width, 1)
    return [width * min(2**k, 4) for k in range(size.bit_length() - 2)]


class Generator(nn.Module):
    """Map latents (B, latent) from N(0, I) to images (B, 3, size, size) in [0, 1], float32.

    size      The side of the images, a power of two of at least 8.
    width     The number of channels at full size.
    latent    The dimension of a latent.

    Residual blocks double the side from 4 up to size. Weights are spectrally normalised. Ref: [9]
    Fig. 15; [3] 4"""

    def __init__(self, size: int = 32, width: int = 16, latent: int = 64):
        super().__init__()
        _check_number("latent", latent, 1)
        self.latent = latent
        widths = _widths(size, width)[::-1]
        self.first = spectral_norm(nn.Linear(latent, 16 * widths[0]))
        blocks = [_up(before, after) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks, nn.BatchNorm2d(width), nn.ReLU(), _conv(width, 3))

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return _upcast(self.blocks(x)).sigmoid()


class Discriminator(nn.Module):
    """Score how real images (B, 3, size, size) in [0, 1] look → (B,), float32.
    A higher score means more real. size and width are those of `Generator`. Residual blocks halve
    the side down to 4. Ref: [9] Fig. 15"""

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


class Game(nn.Module):
    """Play against an encoder, with a generator G and a discriminator D.
    G makes images that are hard for the encoder, and D keeps them looking real. G_ema is a moving
    average of G.

    size, width, latent    See `Generator`.
    pairs         If true, a latent z gives two images, G(z) and G_ema(z). They are positives of
                  each other. If false, it gives G(z) alone.
    ascent        If true, G also ascends the encoder's loss. If false, G plays against D alone.
                  Without pairs and ascent this is "CL-GAN" in [3].
    momentum      m of G_ema, in [0, 1).
    pretrain      How many epochs G and D train alone before the encoder begins.
    every         How many steps the encoder takes for each step of the game.
    batch_size    How many images a step of D takes of each kind, real and generated. At least 2.
    lr            The learning rate of Adam for the losses of `imitate`.
    ascent_lr     The learning rate of Adam for the ascent.

    The state_dict has the networks, the optimizers and `taken`, the number of steps that the
    encoder took. The defaults suit a CPU. Ref: [3] 3.1, 3.2"""

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
        _check_number("momentum", momentum, 0, 1 - 1e-9, numbers.Real)
        _check_number("pretrain", pretrain, 0)
        _check_number("every", every, 1)
        _check_number("batch_size", batch_size, 2)
        self.pairs, self.ascent, self.momentum = pairs, ascent, momentum
        self.pretrain, self.every, self.batch_size = pretrain, every, batch_size
        self.taken = 0  # how many steps the encoder took
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
        """Generate n images → images (n, 3, size, size) in [0, 1], the index (n,) of their latents.
        With pairs they are G(z_k) and G_ema(z_k) of n // 2 latents, so an odd n gives one image
        fewer. Without pairs they are G(z_k) of n latents. Only G gets a gradient. Ref: [3] Eq. 6"""
        z = self.latents(n // 2 if self.pairs else n, generator)
        index = torch.arange(len(z), device=z.device)
        if not self.pairs:
            return self.G(z), index
        return torch.cat([self.G(z), self.G_ema(z)]), index.repeat(2)

    def imitate(
        self, images: Tensor, generator: torch.Generator | None = None, read: bool = False
    ) -> dict:
        """Let D take a step to tell real images x from generated ones, then G a step to deceive D.
            d_loss = E max(0, 1 − D(x)) + E max(0, 1 + D(G(z)))    g_loss = −E D(G(z))

        images    Real images (B, 3, size, size). The first batch_size of them are used.
        read      Check on a GPU, too, that both losses are finite. The host has to wait for that.

        The result is a dict of d_loss and g_loss. A loss that is not finite raises
        FloatingPointError. Ref: [3] Eq. 5, with g_loss from [9], as [3] does not name its f_G"""
        images = _floats(images[: self.batch_size])
        fake = self.G(self.latents(len(images), generator))
        if images.shape != fake.shape:
            raise InvalidArgument(
                f"images has shape {tuple(images.shape)}, but the generator makes "
                f"{tuple(fake.shape)}. Give the game the size of the images."
            )
        d_loss = F.relu(1 - self.D(images)).mean() + F.relu(1 + self.D(fake.detach())).mean()
        _descend(d_loss, self.optimizers["D"], "discriminator", read=read)
        self.D.requires_grad_(False)  # D passes the gradient on to G, and needs none itself
        g_loss = -self.D(fake).mean()
        self.D.requires_grad_(True)
        _descend(g_loss, self.optimizers["G"], "generator", read=read)
        return {"d_loss": d_loss.detach(), "g_loss": g_loss.detach()}

    def follow(self) -> None:
        """Move G_ema towards G. Ref: [3] Eq. 7"""
        follow(self.G_ema, self.G, self.momentum)
        # The singular vectors of spectral norms are averages now, so they are shorter than 1.
        # Computing a weight takes a power iteration, which gives the vectors length 1 again.
        for module in self.G_ema.modules():
            if hasattr(module, "parametrizations"):
                module.parametrizations.weight()

    def get_extra_state(self):
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return states | {"taken": self.taken}

    def set_extra_state(self, state):
        self.taken = state["taken"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


# ---- 12. Training: methods, and one loop that trains an encoder by any of them

# A method is a SimCLR, or a subclass with more state. For each batch the loop calls `step`, moves
# the encoder down the loss, and then calls `after_step`:
#     step(encoder, images, index, generator, **options) → loss, figures
#     after_step() → figures or None
# index (B,) has the places of the images in the training set. Figures are a dict of numbers to
# report. While a method trains alone, before the encoder begins, encoder and loss are None.


class SimCLR(nn.Module):
    """Contrast two random views of each image with the views of the other images in the batch.
    criterion is a ContrastiveLoss. view_options are options of `view`. Ref: [6] Algorithm 1"""

    pretrain = 0  # how many epochs the method trains alone before the encoder begins
    scheduled = []  # optimizers of the method whose learning rates follow the recipe

    def __init__(self, criterion: nn.Module, view_options: dict | None = None):
        super().__init__()
        self.criterion = criterion
        self.view_options = view_options or {}

    def embed_views(
        self, encoder: Callable, generator: torch.Generator | None, *images: Tensor
    ) -> tuple:
        """Embed a random view of every image in one pass → (B, D) for each batch of images."""
        views = torch.cat([view(x, generator, **self.view_options) for x in images])
        z = encoder(views.contiguous(memory_format=torch.channels_last))[1]
        return z.chunk(len(images))

    def contrast(self, *z: Tensor, return_stats: bool = False, **options) -> tuple:
        """Compute the loss of embeddings → loss, statistics (empty without return_stats)."""
        result = self.criterion(*z, return_stats=return_stats, **options)
        if return_stats:
            return result
        return result, {}

    def step(self, encoder: Callable, images: Tensor, index: Tensor, generator, **options) -> tuple:
        """Compute the loss of a batch → loss, figures."""
        z, other = self.embed_views(encoder, generator, images, images)
        return self.contrast(z, other, **options)

    def after_step(self) -> dict | None:
        """Update what the method owns, once the encoder has moved → figures or None."""


class Bank(SimCLR):
    """Contrast one view of each image with the image's row of a memory bank.
    The candidates are all other rows. images are the whole training set, and momentum is that of
    the bank. The bank starts from embeddings by the given encoder. An untrained encoder maps all
    images near one point, so their mean is subtracted. Ref: [4] Eq. 1, where the bank replaces g"""

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

    def step(self, encoder, images, index, generator, **options):
        z = unit(self.embed_views(encoder, generator, images)[0])
        self.seen = index, z.detach()  # for `after_step`
        given = {"negatives": self.bank.rows, "positive_index": index, "normalize": False}
        return self.contrast(z, **given, **options)

    def after_step(self):
        index, z = self.seen
        self.bank.update(index, z)


class DiffHard(SimCLR):
    """Play the min-max game, in which the encoder descends a loss and a generator ascends it.
    A batch has real and generated images. The game takes its turn every few steps of the encoder.

    criterion    Its objective has to be ppcl, unless the game makes no pairs.
    game         A Game of the size of the images. The figures are those of `Game.imitate`.

    Ref: [3] Algorithm 1"""

    def __init__(self, criterion: nn.Module, game: Game, view_options: dict | None = None):
        super().__init__(criterion, view_options)
        objective = criterion.options["objective"]
        if game.pairs and objective != "ppcl":
            raise InvalidArgument(
                f"objective is {objective}, which does not use the generated pairs as positives. "
                "Use ppcl, or a game without pairs."
            )
        self.game = game
        self.pretrain = game.pretrain
        self.scheduled = [game.optimizers["ascent"]]

    def step(self, encoder, images, index, generator, return_stats=False, **options):
        game = self.game.train()
        real = _floats(images)
        is_turn = encoder is None or game.taken % game.every == 0
        ascends = is_turn and game.ascent and encoder is not None
        self.turn = None
        if is_turn:
            self.turn = ascends, real, generator, return_stats  # for `after_step`
        if encoder is None:
            return None, {}
        game.taken += 1
        # Step 1. A batch has N real images and N generated ones, in N/2 pairs. Each has two views.
        with torch.set_grad_enabled(ascends):
            generated, latent = game.sample(len(images), generator)  # Eq. 6
        batch = torch.cat([generated, real])  # (2N, 3, H, W)
        alone = len(latent) + torch.arange(len(images), device=latent.device)
        options["labels"] = torch.cat([latent, alone])  # (2N,): a pair has one label
        z, other = self.embed_views(encoder, generator, batch, batch)
        # Step 2. The loop descends this loss to train the encoder. Its gradient reaches G, too.
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)  # Eq. 4, 8
        game.optimizers["ascent"].zero_grad()  # so that G gets the gradient of this loss alone
        return loss, figures

    def after_step(self):
        if self.turn is None:
            return None
        # Step 3. In its turn the game moves.
        ascends, real, generator, read = self.turn
        if ascends:
            self.game.optimizers["ascent"].step()  # Eq. 4
        self.game.follow()  # Eq. 7
        return self.game.imitate(real, generator, read)  # Eq. 5


def in_micro_batches(encoder: Callable, micro_batch: int) -> Callable:
    """Save memory by embedding `micro_batch` samples at a time → a function in the encoder's place.
    Call it with tensors, dicts of tensors and keywords, whose rows are samples. The backward pass
    embeds the samples again, with the same randomness. The gradient is exact. But BatchNorm in
    training mode normalises each micro-batch by itself, and updates its statistics twice. If you
    use DistributedDataParallel, call this function inside the module that you wrap. Ref: [11]"""
    _check_number("micro_batch", micro_batch, 1)

    def in_parts(*inputs, **named):
        # tree_flatten opens dicts, but not what a tokenizer returns
        inputs = [dict(x) if isinstance(x, Mapping) else x for x in inputs]
        leaves, structure = tree_flatten((inputs, named))
        sizes = {len(x) for x in leaves if torch.is_tensor(x) and x.ndim > 0}
        if len(sizes) != 1:
            found = f"{sorted(sizes)} rows" if sizes else "no tensors"
            raise InvalidArgument(f"All inputs must have equally many rows. They have {found}.")
        parts = []
        for rows in _slices(sizes.pop(), micro_batch):
            some = [x[rows] if torch.is_tensor(x) and x.ndim > 0 else x for x in leaves]
            few, more = tree_unflatten(some, structure)
            parts.append(checkpoint(encoder, *few, use_reentrant=False, **more))
        return tree_map(lambda *x: torch.cat(x) if torch.is_tensor(x[0]) else x[0], *parts)

    return in_parts


def annealed_beta(progress: float, beta: float, changes: int = 5) -> float:
    """Lower β over a run from β to β/ℓ, in ℓ equal steps.
        β · (1 − ⌊ℓ · progress⌋ / ℓ)    with ℓ = changes, for a progress in [0, 1)

    Hard negatives matter early in a run. Later many of the hardest ones have the anchor's class.
    Ref: [1] App. C"""
    return beta * (1 - int(changes * progress) / changes)


def lead_in(progress: float, alpha: float, until: float = 0.5) -> float:
    """Lower the share of candidates that `top` keeps from 1 to α, and reach α at progress `until`.
        α^{min(1, progress / until)}    for a progress in [0, 1]

    Before training, the nearest candidates are those of a similar background and colour. They teach
    little."""
    return alpha ** min(1.0, progress / until)


def _warm_up_and_cosine(progress, step):
    """Multiply a linear rise over a tenth of the run by a cosine from 1 to 0.
    step is the progress that one step makes. Adding it keeps the first rate above 0."""
    warm_up = min(10 * (progress + step), 1)
    return warm_up * (1 + math.cos(math.pi * progress)) / 2


def _two_falls(progress, step):
    """Lower the rate to a tenth after 160 of 200 epochs, to a hundredth after 190. Ref: [4] 5.1"""
    return 0.1 ** ((progress >= 0.8) + (progress >= 0.95))


# Each recipe has a row in both tables.
RECIPES = {
    "adamw": {"epochs": 16, "batch_size": 256, "lr": 8e-3, "weight_decay": 1e-4},
    "sgd": {"epochs": 200, "batch_size": 128, "lr": 0.03, "weight_decay": 5e-4},
    "adam": {"epochs": 400, "batch_size": 256, "lr": 1e-3, "weight_decay": 1e-6},
}
OPTIMIZERS = {  # the second entry multiplies lr at a progress in [0, 1]
    "adamw": (torch.optim.AdamW, _warm_up_and_cosine),
    "sgd": (functools.partial(torch.optim.SGD, momentum=0.9), _two_falls),
    "adam": (torch.optim.Adam, lambda progress, step: 1.0),  # [1] App. C, [2] VII-A
}


class Training:
    """Train an Encoder: `for figures in Training(encoder, images, SimCLR(criterion)): ...`

    images         uint8 (n, 3, H, W), on the encoder's device. To save its memory they may be on
                   the CPU.
    method         A SimCLR, Bank or DiffHard, or a method of your own.
    recipe         A row of RECIPES.
    schedules      Functions that give options of the loss from the progress in [0, 1], such as
                   {"alpha": lambda p: lead_in(p, 0.1)}.
    micro_batch    How many images the encoder takes at a time. By default it takes all.
    bfloat16       Whether a step uses autocast to bfloat16. By default it does if the hardware
                   computes in bfloat16.
    seed           The seed of order, views and latents. The same seed repeats the run, on a GPU up
                   to rounding.
    settings       epochs, batch_size, lr, weight_decay. They replace those of the recipe. Batches
                   are of nearly one size, about batch_size images.

    Each step yields a dict of "epoch", "step", "steps", "loss", the number of "images", and the
    scheduled options. Every tenth of an epoch it has the statistics of the loss, too. Epochs below
    0 are the pre-training of the method, and have no "loss". A loss that is not finite raises
    FloatingPointError, but on a GPU only in steps with statistics. Training runs in one process.
    For several, write a loop with DistributedDataParallel, and give the loss its group."""

    parts = ("encoder", "method", "optimizer")  # what has a state

    def __init__(
        self,
        encoder: nn.Module,
        images: Tensor,
        method: SimCLR,
        recipe: str = "adamw",
        schedules: dict | None = None,
        micro_batch: int | None = None,
        bfloat16: bool | None = None,
        seed: int = 0,
        **settings: float,
    ):
        _require(recipe in RECIPES, "recipe", recipe, f"one of {', '.join(RECIPES)}")
        self.recipe = RECIPES[recipe] | settings
        unknown = settings.keys() - RECIPES[recipe]
        if unknown:
            known = ", ".join(RECIPES[recipe])
            raise InvalidArgument(f"There is no setting {unknown.pop()}. Settings are {known}.")
        self.encoder = encoder.to(memory_format=torch.channels_last)
        self.device = next(encoder.parameters()).device
        self.method = method.to(self.device)
        self.images, self.schedules = images, schedules or {}
        self.micro_batch, self.seed = micro_batch, seed
        self.bfloat16 = _has_bfloat16(self.device) if bfloat16 is None else bfloat16
        _check_number("images", len(images), 2)
        _check_number("epochs", self.recipe["epochs"], 1)
        _check_number("batch_size", self.recipe["batch_size"], 2)
        _check_number("lr", self.recipe["lr"], 1e-12, 1e6, numbers.Real)
        batches = math.ceil(len(images) / self.recipe["batch_size"])
        self.steps_per_epoch = min(batches, len(images) // 2)  # a batch has two images or more
        self.epochs = self.recipe["epochs"]
        self.steps = (method.pretrain + self.epochs) * self.steps_per_epoch
        self.epoch, self.step_in_epoch = -method.pretrain, 0  # of the next step
        groups = [
            {"params": encoder.parameters(), "weight_decay": self.recipe["weight_decay"]},
            {"params": method.criterion.parameters(), "weight_decay": 0},
        ]
        fused = self.device.type != "cpu"  # one kernel updates all parameters
        optimizer, self.rate = OPTIMIZERS[recipe]
        self.optimizer = optimizer(groups, self.recipe["lr"], fused=fused)

    def __iter__(self) -> Iterator[dict]:
        while self.epoch < self.epochs:
            seed = self.seed * 100_003 + self.epoch
            order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
            batches = order.to(self.images.device).tensor_split(self.steps_per_epoch)
            for index in batches[self.step_in_epoch :]:
                position = self.epoch * self.steps_per_epoch + self.step_in_epoch
                step = self.method.pretrain * self.steps_per_epoch + position + 1
                place = {"epoch": self.epoch, "step": step, "steps": self.steps}
                try:
                    figures = self._step(index, position)
                except FloatingPointError as error:
                    message = f"Training stopped at step {step} of {self.steps}. {error}"
                    raise FloatingPointError(f"{message} A lower lr may help.") from error
                self.epoch, self.step_in_epoch = divmod(position + 1, self.steps_per_epoch)
                yield figures | place

    def _step(self, index, position):
        encoder_steps = self.epochs * self.steps_per_epoch
        progress = max(0, position) / encoder_steps  # positions below 0 are in the pre-training
        rate = self.rate(progress, 1 / encoder_steps)
        for optimizer in [self.optimizer] + self.method.scheduled:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * rate
        options = {name: schedule(progress) for name, schedule in self.schedules.items()}
        read = 10 * self.step_in_epoch % self.steps_per_epoch < 10  # every tenth of an epoch
        images = self.images[index]
        if self.device.type == "cuda" and images.device.type == "cpu":
            images = images.pin_memory()  # so the host does not wait for the copy
        images = images.to(self.device, non_blocking=True)
        index = index.to(self.device, non_blocking=True)
        encoder = None
        if self.epoch >= 0:
            encoder = self.encoder.train()
            if self.micro_batch is not None:
                encoder = in_micro_batches(encoder, self.micro_batch)
        # Each step has a seed of its own, so that a resumed run repeats the step.
        seed = self.seed * 10**9 + position
        generator = torch.Generator(self.device).manual_seed(seed)
        asked = options | {"return_stats": read}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            loss, figures = self.method.step(encoder, images, index, generator, **asked)
            if encoder is not None:
                _descend(loss, self.optimizer, "encoder", read)
                figures = {"loss": loss.detach()} | figures | options
            figures |= self.method.after_step() or {}
        return figures | {"images": len(index)}

    def state_dict(self) -> dict:
        """Return all that a run needs to resume.
        Its tensors are not copies, so the next step changes them. Save or deepcopy them before."""
        parts = {name: getattr(self, name).state_dict() for name in self.parts}
        return parts | {"epoch": self.epoch, "step_in_epoch": self.step_in_epoch}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.step_in_epoch = state["epoch"], state["step_in_epoch"]
        for name in self.parts:
            getattr(self, name).load_state_dict(state[name])


def _has_bfloat16(device):
    """Whether the hardware computes in bfloat16. Emulating that would be slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.10 does not have it
    return capabilities().get("avx512_bf16", False)
