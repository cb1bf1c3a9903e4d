"""Hard-negative contrastive learning in one file that you can copy into your project.
Version 3.0.0, for Python 3.11 and torch 2.5 or newer. torch.compile needs torch 2.10.
Copyright 2026 the hardneg authors. You may use it under the MIT licence.

An encoder learns without labels if it pulls two views of a sample together and pushes other
samples, the negatives, away. Every loss of this file answers three questions:

    1. Who could be a negative?       candidates: the rest of the batch, a memory bank, given rows
    2. How much does each one count?  weights w: a weight of 2 counts a candidate twice
    3. What is done with them?        objective: nce, each, ppcl, decoupled, simple, triplet

Any weights go with any objective. Large batches are worked on in blocks of anchors, so memory grows
with their number and not with its square.

Symbols
    B, V, D     samples, views of each sample, dimensions of an embedding
    A, a        anchors, all V·B views, or with `negatives` the first B, and those of a block
    N, N_i      candidates, the columns of the matrix of logits, and those that anchor i may use
    M           positives of an anchor
    t           temperature, which divides cosines; [3] and [4] write τ
    s_ij, p_im  logits: the cosine of anchor i with candidate j, or with its m-th positive, over t
    log w_ij    log of the weight of candidate j; the weight itself could overflow float32
    tau_plus    τ⁺, the probability that a candidate has the anchor's class                  [1]
    beta        β, how strongly tilted weights prefer near candidates; it multiplies s       [1]
    alpha       α, the share of nearest candidates that `top` keeps                          [4]
    epsilon     ε, the entropic regularisation, in the unit of the ground cost               [2]
    margin      η of the triplet loss, in the unit of a squared distance                     [2]

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

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple, TypedDict, Unpack, get_type_hints

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__version__ = "3.0.0"
__all__ = """
PRESETS PAPERS Options contrastive_loss ContrastiveLoss uniform tilted hardest top transported
sinkhorn nce each ppcl decoupled simple triplet published mine draw gather unit InvalidArgument
NotFinite
""".split()

INF = math.inf
# The logit or log weight of what does not count, and the limit below which one counts as masked.
# e^MASKED is 0, while −∞ would make NaN.
MASKED, FAR = -1e30, -1e20

# ---- 1. The loss -------------------------------------------------------------------------------

# loss: weights, objective, τ⁺, where None stands for 1 / (N_i + 1)
PRESETS = {
    "simclr": ("uniform", "nce", 0.0),  # [6]; [4] Eq. 1
    "debiased": ("uniform", "nce", None),  # Chuang et al. 2007.00224; [1] at β = 0
    "hcl": ("tilted", "nce", None),  # [1] Eq. 2; with tau_plus = 0 it is HN-NCE, 2301.02280
    "ot": ("transported", "nce", 0.0),  # [2] Eq. 5, 8
    "hard": ("top", "nce", 0.0),  # [4] Eq. 9
    "simple": ("uniform", "simple", 0.0),  # [4] Eq. 3; [2] Eq. 9
    "hard-simple": ("top", "simple", 0.0),  # [4] Table 1, HardSimple
    "triplet": ("hardest", "triplet", 0.0),  # [2] IV; [4] Eq. 6
    "ppcl": ("uniform", "ppcl", 0.0),  # [3] Eq. 8
    "supcon": ("uniform", "ppcl", 0.0),  # another name of ppcl
}
# what the papers print for CIFAR-10: ContrastiveLoss("hcl", **PAPERS["hcl"])
PAPERS = {
    "simclr": {"temperature": 0.5},  # [6] App. B.9
    "debiased": {"temperature": 0.5, "tau_plus": 0.1},  # [1] and its code
    "hcl": {"temperature": 0.5, "tau_plus": 0.1, "beta": 1.0},  # the same
    "ot": {"temperature": 0.5, "epsilon": 0.5},  # [2] Table II, and the temperature of [1]
    "hard": {"temperature": 1.0, "alpha": 0.0819},  # [4] Table 1: 4095 of 49 999
    "hard-simple": {"alpha": 0.0819},
}


class Options(TypedDict, total=False):
    """Options of a loss: type, default, what is allowed, and the help. What is allowed is one of
    some names, or a range [low, high] where an int as high asks for whole numbers."""

    weights: Annotated[
        str | Callable[[Tensor], Tensor] | None,
        None,
        WEIGHTS,
        """How much each candidate counts. By default the loss decides. A function of your own maps
        logits (a, N) to log weights, which may be −∞ and are not scaled to mean 1. A debiased loss
        also calls it with the logits (a, M) of several positives.""",
    ]
    objective: Annotated[
        str | Callable[[Tensor, Tensor, Tensor], Tensor] | None,
        None,
        OBJECTIVES,
        """What is done with the negatives. By default the loss decides. A function of your own maps
        logits (a, M) of positives, and logits and log weights (a, N) of candidates, to losses (a,).
        What does not count is −1e30.""",
    ]
    temperature: Annotated[
        float | Tensor,
        0.1,
        [1e-6, 1e6],
        "The temperature t, which divides cosines. A tensor of one entry gets its gradient.",
    ]
    tau_plus: Annotated[
        float | None,
        None,
        [0, 0.999],
        """τ⁺, the probability that a candidate has the anchor's class. By default the loss decides,
        and `hcl` and `debiased` take 1 / (N_i + 1), as if the positive alone had it. `simple`,
        `triplet` and objectives of your own are not debiased.""",
    ]
    beta: Annotated[float, 0.5, [0, 1e8], "β, how strongly near candidates are preferred [1]."]
    alpha: Annotated[float, 0.3, [1e-9, 1.0], "α, the share of nearest candidates to keep [4]."]
    epsilon: Annotated[float, 0.2, [1e-9, 1e9], "ε, the entropic regularisation, in costs [2]."]
    cost: Annotated[str, "sqeuclidean", COSTS, "The cost at a distance d, ½d² or e^{d²} [2]."]
    margin: Annotated[float, 0.0, [0, 1e9], "η, the margin of the hinge, a squared distance."]
    absolute_margin: Annotated[
        float | None, None, [-9, 9.0], "Drop cosines above p − this, p the nearest positive's."
    ]
    relative_margin: Annotated[float | None, None, [-9, 9.0], "Drop cosines above p − this · |p|."]
    normalize: Annotated[
        bool,
        True,
        (True, False),
        """Project rows to the unit sphere first. Without it logits are inner products over t.
        Debiasing, transport, margins, `simple` and `triplet` then need unit rows, unchecked.""",
    ]
    detach_weights: Annotated[
        bool | None, None, (True, False), "Stop their gradient. By default `transported` does."
    ]
    reduction: Annotated[
        str,
        "mean",
        ("mean", "sum", "none"),
        """The mean or the sum over all anchors of all ranks, or with "none" the losses of this
        rank's anchors. An anchor without a positive has the loss 0, and "mean" leaves it out. With
        "none" a function of yours is called twice, and may not draw random numbers.""",
    ]
    block_size: Annotated[
        int | None,
        None,
        [0, 2**40],
        """How many anchors are worked on at once, where 0 is all. By default blocks have 2^20
        pairs, on a GPU 2^25, and what has up to a quarter of that is not cut. Blocks change a
        result by rounding only. They have no second derivatives.""",
    ]


def contrastive_loss(
    *views: Tensor,
    loss: str = "simclr",
    negatives: Tensor | None = None,
    positive_index: Tensor | None = None,
    negative_mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    labels: Tensor | None = None,
    group: distributed.ProcessGroup | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
):
    """Compute any of the losses on the views of a batch.
        s_ij = cos(z_i, z_j) / t    log w_ij = weights(s_i)_j    ℓ_i = objective(p_i, s_i, log w_i)

    views           (B, D) each, of any floats. Row i shows sample i. Every row is an anchor, in the
                    order of torch.cat(views). Its positives are the sample's rows in the other
                    views, and its candidates are the rows of all other samples. A single view needs
                    labels, or negatives and positive_index, to say what its positives are.
    negatives       (K, D), or (B, K, D) with rows for each anchor: the candidates in place of the
                    batch. Then the rows of the first view alone are anchors.
    positive_index  (B,) or (B, P): rows of `negatives` that show sample i. −1 names none. They are
                    never its candidates, and they are the positives of a single view.
    negative_mask   (A, N) or (N,), True where a candidate may be a negative.
    log_weights     (A, N) or (N,), added to the log weights, without a gradient, cut at ±5e19. If
                    the K rows of negatives were drawn with probabilities q_j, with replacement,
                    pass −log(K q_j).
    labels          (B,), or (B + K,) with negatives (K, D), whose labels come last. Samples of one
                    label are not negatives of each other. They are positives of each other in
                    `ppcl`, and for a single view without positive_index.
    group           A process group of torch.distributed. Candidates are the views of all ranks, in
                    their order. All ranks call with the same shapes and options, and with the same
                    negatives (K, D), see `gather`. The gradients are right once they are averaged
                    over ranks, as DistributedDataParallel does. With "none" take the mean of this
                    rank's losses.
    return_stats    Also return a dict of figures of this process's first 2^20 pairs: mean cosines
                    "positive" and "negative", "spread", the root of the mean variance of an
                    anchor's negative cosines, "candidates", the mean N_i, "ess", the mean of
                    (Σw)² / (N_i Σw²), the share of candidates that count, and "clamped", the share
                    of anchors whose debiased mean of e^s takes its floor. NaN is a mean of nothing.

    All is computed in float32 or float64. Values are checked on a CPU alone, and not in compiled
    code. torch.func can differentiate it, without blocks."""
    options = resolve({"loss": loss} | options)
    given = negatives, positive_index, labels, negative_mask, log_weights, group
    _check_call(options, views, *given)
    with _autocast_off(views[0].device.type):
        batch = _line_up(options, views, *given)
        value = _evaluate(batch, group, options)
        return (value, _statistics(batch, options)) if return_stats else value


def answer(batch, options):
    """Answer the three questions for some anchors, each from its own row alone → losses (a,), the
    counts for `_warn_of`, and the logits and log weights that led there."""
    pos, neg, n = who(batch, options)
    log_w = weigh(batch, neg, n, options)
    known = options | {"pos": pos, "neg": neg, "log_w": log_w, "t": batch.t}
    counts = [0, n.sum(), 0]
    if "log_negatives" in takes(options["objective_function"]):
        known["log_negatives"], counts[2] = add_up(batch, pos, neg, log_w, n, options)
    losses = fill_in(options["objective_function"], known)
    if batch.pos.shape[1] == 0:  # without another view
        no_positive = pos.amax(1) < FAR
        losses, counts[0] = losses.masked_fill(no_positive, 0), no_positive.sum()
    return losses, counts, (pos, neg, log_w)


class ContrastiveLoss(nn.Module):
    """Compute `contrastive_loss` as a module: ContrastiveLoss("hcl", beta=1.0)(view_1, view_2).
    A call can override the options given here. A temperature that is an nn.Parameter is learned.
    So is an nn.Module as weights or objective, in 2 GiB at 2B = 16 384 on a CPU."""

    def __init__(self, loss: str = "simclr", **options: Unpack[Options]):
        super().__init__()
        self.given = {"loss": loss, **options}
        self.options = resolve(self.given)
        learns = (nn.Parameter, nn.Module)
        self.learned = [name for name, x in self.given.items() if isinstance(x, learns)]
        for name in self.learned:
            setattr(self, name, self.given[name])

    def extra_repr(self):
        """Write the options given here, but for modules, which torch shows."""
        words = []
        for name, value in self.given.items():
            if torch.is_tensor(value):
                value = f"{value.item():.4g}"
            elif isinstance(value, str):
                value = f'"{value}"'
            if not isinstance(value, nn.Module):
                words.append(f"{name}={getattr(value, '__name__', value)}")
        return ", ".join(words).removeprefix("loss=")

    def forward(self, *views, **call):
        """Compute the loss of the views, with the module's options and those given here."""
        learned = {name: getattr(self, name) for name in self.learned}
        return contrastive_loss(*views, **self.given | learned | call)


# ---- 2. Weights: how much does each candidate count? -------------------------------------------
# A rule maps logits (a, any) to log weights. What is masked stays masked, and does not matter to
# other entries. A rule names what it needs: `candidates`, the logits (a, N), if others can be
# weighed, the `potential` (N,) of `sinkhorn`, t, and options.


def uniform(logits: Tensor) -> Tensor:
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    return F.hardshrink(logits.detach(), lambd=-FAR)  # 0, or MASKED where it is MASKED


def tilted(logits: Tensor, beta: float) -> Tensor:
    """Count near candidates more: log w_ij = β s_ij, later scaled to weights of mean 1.
    Limits: β = 0 is `uniform`, β → ∞ is `hardest`. Ref: [1] Eq. 2, whose Z_β is the mean weight"""
    log_w = beta * logits
    if beta < 1e-9:  # β · MASKED would not count as masked
        return log_w + uniform(logits)
    return log_w


def hardest(logits: Tensor, candidates: Tensor | None = None) -> Tensor:
    """Count the nearest candidate alone, ties included. Ref: [1] Prop. 1, App. A.1; [4] Eq. 6"""
    return top(logits, 1e-9, candidates)


def top(logits: Tensor, alpha: float, candidates: Tensor | None = None) -> Tensor:
    """Count the ⌈αN⌉ nearest of the candidates (a, N), or of the logits, ties included. Weights are
    0 or 1 and not scaled, as [4] takes a sum. Limit: α = 1 is `uniform`. Ref: [4] Eq. 8, 9"""
    candidates = (logits if candidates is None else candidates).detach()
    billionths = int(alpha * 1e9)  # 0.07 · 100 exceeds 7 in floats
    kept = -(-(candidates > FAR).sum(-1, keepdim=True) * billionths // 10**9)  # ⌈αN_i⌉
    most, are_equal = -(-candidates.shape[-1] * billionths // 10**9), False
    if _may_read(kept):
        most = max(1, kept.max().item())
        are_equal = kept.min().item() == most
    nearest = candidates.topk(most, sorted=not are_equal).values
    if are_equal:  # sorting would take twice as long
        threshold = nearest.amin(-1, keepdim=True)
    else:
        threshold = nearest.gather(-1, (kept - 1).clamp_min(0))
    return uniform(logits).masked_fill(logits < threshold, MASKED)


# From the cosine of two unit rows, for which d² = 2 − 2 cos. Ref: [2] Eq. 5, VII-C, whose
# e^{d² − κ} is "exp" with epsilon multiplied by e^κ
COSTS = {
    "sqeuclidean": lambda cosines: 1 - cosines,  # ½d²
    "exp": lambda cosines: torch.exp(2 - 2 * cosines),  # e^{d²}
}


def transported(
    logits: Tensor, potential: Tensor, t: float | Tensor, epsilon: float, cost: str
) -> Tensor:
    """Count near candidates more, but give all of them the same total over the anchors:
    w_ij ∝ e^{−C_ij/ε + g_j}, with the potential g (N,) of `sinkhorn`, later scaled to mean 1.
    Limits: ε → 0 is optimal transport. "sqeuclidean" with g = 0 is `tilted` with β = t/ε.
    Ref: [2] Eq. 5, Lemma 3; its Eq. 7 omits e^{g_j}"""
    cosines = t * logits.clamp_min(-2 / t)  # e^{d²} of what is masked would overflow
    return COSTS[cost](cosines) / -epsilon + potential + uniform(logits)


def own_rule(logits, weights):
    """Weigh by a function of the user's."""
    try:
        log_w = weights(logits)
        _check_tensor("what weights returned", log_w, "", logits.shape, required=True)
    except Exception as error:
        error.add_note("weights= gets some anchors at a time. log_weights= takes a matrix.")
        raise
    return log_w.to(logits.dtype).clamp_min(MASKED).masked_fill(logits < FAR, MASKED)


# rule: its function, and the mean of an anchor's weights: "one" already, to be "scaled" to one by a
# softmax, or "any". A rule of "any" may keep no candidate. The anchor has no negatives then.
WEIGHTS = {
    "uniform": (uniform, "one"),
    "tilted": (tilted, "scaled"),
    "hardest": (hardest, "scaled"),
    "top": (top, "any"),
    "transported": (transported, "scaled"),
}


def takes(function):
    """List the names of a function's parameters."""
    code = getattr(function, "__wrapped__", function).__code__
    return code.co_varnames[: code.co_argcount]


def fill_in(function, given):
    """Call a function with what its parameters name."""
    return function(*[given[name] for name in takes(function)])


def by_rule(logits, candidates, potential, t, options):
    """Weigh logits (a, any) by the chosen rule, where those of the candidates are (a, N)."""
    given = {"logits": logits, "candidates": candidates, "potential": potential, "t": t}
    log_w = fill_in(options["weight_function"], options | given)
    return log_w.detach() if options["detach_weights"] else log_w


def weigh(batch, neg, n, options):
    """Answer question 2: log weights (a, N)."""
    log_w = by_rule(neg, neg, batch.potential, batch.t, options)
    if options["weight_mean"] == "scaled":
        log_w = torch.log_softmax(log_w, -1) + n.log().clamp_min(MASKED)[:, None]
    return log_w if batch.log_weights is None else log_w + batch.log_weights


# ---- 3. Objectives: what is done with the weighted negatives? ----------------------------------
# An objective maps logits `pos` (a, M) of positives, and logits `neg` and log weights `log_w`
# (a, N) of candidates, MASKED for what does not count, to losses (a,). `log_negatives` (a,) is
# log Σ_j w_j e^{s_j}, debiased, far below 0 without negatives. An objective names what it needs of
# these, t and options.


def nce(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute noise-contrastive estimation: −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + negatives) ).
    Limits for one positive, uniform weights and τ⁺ = 0: as t → 0, t · nce becomes half of `triplet`
    on `hardest` with η = 0. As t → ∞, nce becomes log(1 + N) + N / ((1 + N) t) · `simple`.
    Ref: [1] Eq. 1, 2, Fig. 5; [2] Eq. 8; [4] Eq. 1, 6, 7, 9"""
    return F.softplus(log_negatives - log_sum(pos), threshold=40)


def each(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute `nce` of each positive alone: −1/M Σ_m log( e^{p_m} / (e^{p_m} + negatives) ).
    Ref: [1] Eq. 2, as printed"""
    return _mean(F.softplus(log_negatives[:, None] - pos, threshold=40), uniform(pos))


def ppcl(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute the partially pseudo-labelled loss −1/M Σ_m log(e^{p_m}/(Σ_l e^{p_l} + negatives)).
    It is `nce` for one positive. Ref: [3] Eq. 8"""
    return nce(pos, log_negatives) + log_sum(pos) - _mean(pos, uniform(pos))


def decoupled(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute `nce` without positives in the denominator: log negatives − log Σ_m e^{p_m}, or 0
    without negatives. Ref: [12] Eq. 6"""
    return (log_negatives - log_sum(pos)).masked_fill(log_negatives < FAR, 0)


def simple(pos: Tensor, neg: Tensor, log_w: Tensor, t: float | Tensor = 1.0) -> Tensor:
    """Compute the difference of mean cosines: −1/M Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j.
    Ref: [4] Eq. 3, whose λ is 1 / N here; [2] Eq. 9"""
    return t * (_mean(neg, log_w) - _mean(pos, uniform(pos)))


def triplet(
    pos: Tensor, neg: Tensor, log_w: Tensor, margin: float, t: float | Tensor = 1.0
) -> Tensor:
    """Compute the hinge 1/M Σ_m Σ_j w_j max(0, ‖z − z_m‖² − ‖z − z_j‖² + η) / Σ_j w_j, in memory of
    a·M·N. Ref: [2] IV. At η = 0 on `hardest` it is twice [4] Eq. 6."""
    differences = t * neg[:, None] - t * pos[:, :, None]  # (a, M, N), of cosines
    hinges = F.relu(2 * differences + margin)
    return _mean(_mean(hinges, log_w[:, None]), uniform(pos))


def own_objective(pos, neg, log_w, objective):
    """Judge by a function of the user's."""
    dropped = torch.minimum(neg, log_w) < FAR  # by a mask or by the rule
    losses = objective(pos, neg.masked_fill(dropped, MASKED), log_w.masked_fill(dropped, MASKED))
    _check_tensor("what objective returned", losses, "", neg.shape[:1], required=True)
    return losses.to(neg.dtype)


def _mean(x, log_w):
    """Compute Σ_j w_j x_j / Σ_j w_j over the last dimension, 0 where nothing has a weight."""
    nothing = log_w.amax(-1) < FAR
    return (torch.softmax(log_w, -1) * x).sum(-1).masked_fill(nothing, 0)


OBJECTIVES = {  # objective: its function, and whether samples of one label are positives in it
    "nce": (nce, False),
    "each": (each, False),
    "ppcl": (ppcl, True),
    "decoupled": (decoupled, False),
    "simple": (simple, False),
    "triplet": (triplet, False),
}


def published(log_mean, log_mean_pos, tau_plus, t):
    """Subtract the expected false negatives → the log of what is left (a,), and where (a,) that is
    the floor, the e^s of the cosine −1, as no mean is below it:
        log max( (E − τ⁺ E⁺) / (1 − τ⁺),  e^{−1/t} )
    E is the mean of e^s over candidates, E⁺ over positives. All but t are tensors (a,).
    Ref: [1] Eq. 2. Its code in Fig. 5 bounds a sum of N terms by e^{−1/t}, N times too low"""
    gap = tau_plus.log() + log_mean_pos - log_mean  # log of τ⁺E⁺/E
    nothing_left = gap >= 0
    gap = gap.masked_fill(nothing_left, -1)  # the log below would have a gradient of NaN
    rest = log_mean + torch.log(torch.expm1(gap) / (tau_plus - 1))
    floor = -1 / t
    clamped = nothing_left | (rest < floor)
    return torch.where(clamped, floor, rest), clamped


def mean_positive(pos, neg, t, options):
    """Compute log E⁺ (a,). [1] weighs a positive as a candidate at its logit, of potential 0."""
    if pos.shape[1] == 1:
        return log_sum(pos)
    # if the rule drops all of them, they count the same
    log_w = by_rule(pos, neg, 0.0, t, options) + uniform(pos)
    return log_sum(pos, torch.log_softmax(log_w, -1))


def add_up(batch, pos, neg, log_w, n, options):
    """Compute log Σ_j w_j e^{s_j} (a,), debiased if the loss is, and how many anchors take the
    floor. Where all is masked, so is the result."""
    log_negatives, tau_plus = log_sum(neg, log_w), options["tau_plus"]
    if tau_plus == 0:
        return log_negatives, 0
    if tau_plus is None:
        tau_plus = 1 / (1 + n.clamp_min(1))
    else:
        tau_plus = torch.full_like(n, tau_plus)
    if options["weight_mean"] == "any" or batch.log_weights is not None:
        log_total = log_sum(log_w)  # log Σ_j w_j
    else:
        log_total = n.log().clamp_min(MASKED)
    log_mean_pos = mean_positive(pos, neg, batch.t, options)
    log_mean, clamped = published(log_negatives - log_total, log_mean_pos, tau_plus, batch.t)
    return log_mean + log_total, (clamped & (log_negatives > FAR)).sum()


# ---- 4. Candidates: who could be a negative of each anchor? ------------------------------------
# Of two views of three samples, rows are anchors, columns candidates, − the own sample, masked.
#              a1  a2  a3  b1  b2  b3     pos
#         a1   −   s   s   −   s   s      a1·b1
#         b3   s   s   −   s   s   −      b3·a3


class _Batch(NamedTuple):
    """All tensors of a call. The first eight have a row for each anchor."""

    scaled: Tensor  # (A, D), embeddings over t, whose products with candidates are logits
    pos: Tensor  # (A, V − 1), logits of the other views
    own: Tensor  # (A, V), columns of the own sample; (A, 0) with `negatives`
    named: Tensor | None = None  # (A, P), positive_index, −1 for none
    negatives: Tensor | None = None  # (A, K, D), if each anchor has candidates of its own
    mask: Tensor | None = None  # (A, N)
    log_weights: Tensor | None = None  # (A, N)
    labels: Tensor | None = None  # (A,)

    candidates: Tensor | None = None  # (N, D), if they are shared
    candidate_labels: Tensor | None = None  # (N,)
    potential: Tensor | None = None  # (N,), of the coupling
    t: Tensor | float = 1.0

    def n(self):
        """Return N."""
        return len(self.candidates) if self.negatives is None else self.negatives.shape[1]

    def blocks(self, n_anchors, size):
        """Cut into blocks of `size` anchors."""
        n_blocks = -(-n_anchors // size)
        columns = [[None] * n_blocks if x is None else x.split(size) for x in self[:8]]
        return [_Batch._make(rows + self[8:]) for rows in zip(*columns, strict=True)]

    def gathered(self, group):
        """Gather the anchors of all ranks."""
        return _Batch._make(tuple(gather(x, group) for x in self[:8]) + self[8:])


def _line_up(options, views, negatives, positive_index, labels, mask, log_weights, group):
    """Arrange the arguments of a call as a batch of this rank's anchors."""
    b, v, in_batch = len(views[0]), len(views), negatives is None
    project = unit if options["normalize"] else _upcast
    z, t = project(torch.cat(views)), options["temperature"]  # (V·B, D)
    if torch.is_tensor(t):
        t = t.to(z).view(())
    tensor = functools.partial(torch.as_tensor, device=z.device)

    scaled = z / t
    pos = [(scaled * z.roll(-k * b, 0)).sum(1, keepdim=True) for k in range(1, v)]
    pos = pos[0] if v == 2 else torch.cat([z[:, :0]] + pos, 1)
    known = {"t": t}
    if in_batch:
        known["candidates"] = gather(z, group)
        first = len(z) * _rank(group)
        columns = torch.arange(first, first + len(z), device=z.device).view(v, b)
        own = columns.T.expand(v, b, v).reshape(-1, v)
    else:  # the first view alone has anchors
        kind = "candidates" if negatives.ndim == 2 else "negatives"
        known[kind] = project(negatives.to(z.dtype))
        scaled, pos = scaled[:b], pos[:b]
        own = torch.empty(b, 0, dtype=torch.long, device=z.device)
    if positive_index is not None:
        known["named"] = _each_once(tensor(positive_index).long().view(b, -1))
    if labels is not None:
        labels = tensor(labels)
        known["labels"] = labels[:b].repeat(len(scaled) // b)
        known["candidate_labels"] = gather(known["labels"], group) if in_batch else labels[b:]
    if mask is not None:
        known["mask"] = tensor(mask).expand(len(scaled), -1)
    batch = _Batch(scaled, pos, own, **known)
    if "potential" in takes(options["weight_function"]):
        potential = _uncompiled(_couple, batch.gathered(group), options)
        batch = batch._replace(potential=potential)
    if log_weights is not None:  # one below FAR would mask, and one near 1e30 would unmask
        log_weights = log_weights.detach().to(z).clamp(FAR / 2, -FAR / 2)
        batch = batch._replace(log_weights=log_weights.expand(len(scaled), -1))
    return batch


def _each_once(index):
    """Keep one of equal entries in each row of index (B, P). The others become −1."""
    index = index.sort(1).values
    index[:, 1:].masked_fill_(index.diff(dim=1) == 0, -1)
    return index


def who(batch, options):
    """Answer question 1: logits of positives (a, M) and of candidates (a, N), MASKED if they do not
    count, and N_i (a,)."""
    if batch.negatives is None:
        neg = batch.scaled @ batch.candidates.T
    else:
        neg = torch.einsum("ad,and->an", batch.scaled, batch.negatives)
    neg = unmasked = neg.scatter_(1, batch.own, MASKED)
    pos, (a, n) = batch.pos, neg.shape
    if batch.named is not None:
        none = batch.named < 0
        if pos.shape[1] == 0:
            pos = neg.gather(1, batch.named.clamp_min(0)).masked_fill(none, MASKED)
        columns = none.new_zeros(a, n + 1)  # one more, for none
        columns.scatter_(1, batch.named.masked_fill(none, n), True)
        neg = neg.masked_fill(columns[:, :n], MASKED)
    if batch.labels is not None:
        same = batch.labels[:, None] == batch.candidate_labels
        if pos.shape[1] == 0 or options["by_label"]:
            pos = torch.cat([pos, torch.where(same, neg, MASKED)], 1)
        neg = neg.masked_fill(same, MASKED)
    if batch.mask is not None:
        neg = torch.where(batch.mask, neg, MASKED)
    if options["absolute_margin"] is not None or options["relative_margin"] is not None:
        limit = _limit(batch.t * pos.detach().amax(1, keepdim=True), options)
        neg = neg.masked_fill(neg.detach() > limit / batch.t, MASKED)
    if neg is unmasked:
        n_i = neg.new_full((a,), n - batch.own.shape[1])
    else:
        n_i = (neg > FAR).sum(1).to(neg.dtype)
    return pos, neg, n_i


def _limit(nearest, options):
    """Compute the largest cosine that a negative may have, from that of the nearest positive."""
    limit = torch.full_like(nearest, INF)
    if options["absolute_margin"] is not None:
        limit = nearest - options["absolute_margin"]
    if options["relative_margin"] is not None:
        limit = torch.minimum(limit, nearest - options["relative_margin"] * nearest.abs())
    return limit.masked_fill(nearest < FAR, INF)  # without a positive all may be


@torch.no_grad()
def _statistics(batch, options):
    """Compute the figures of return_stats."""
    some = batch.blocks(len(batch.scaled), max(1, 2**20 // batch.n()))[0]
    _, counts, (pos, neg, log_w) = answer(some, options)
    n = (neg > FAR).sum(1).to(neg.dtype)
    pos = torch.where(pos > FAR, batch.t * pos, math.nan)
    neg = torch.where(neg > FAR, batch.t * neg, math.nan)
    deviation = neg - neg.nanmean(1, keepdim=True)
    size = (2 * log_sum(log_w) - log_sum(2 * log_w)).exp()  # (Σw)² / Σw²
    return {
        "clamped": counts[2] / n.new_tensor(len(n)),
        "ess": (size / n).masked_fill(log_w.amax(1) < FAR, math.nan).nanmean(),
        "positive": pos.nanmean(),
        "negative": neg.nanmean(),
        "spread": deviation.square().nanmean(1).nanmean().sqrt(),
        "candidates": n.mean(),
    }


# ---- 5. Transport: the coupling that gives each candidate the same total weight ----------------


def sinkhorn(
    log_kernel: Callable[[], Iterable[Tensor]],
    tolerance: float | None = None,
    max_steps: int = 2000,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the entropic coupling with uniform marginals: P_ij = exp(f_i + log_kernel_ij + g_j), so
    that Σ_j P_ij = 1/A and Σ_i P_ij = 1/N. log_kernel is called in each step, and returns −C/ε
    (A, N) in blocks of rows (a, N), −1e30 for what must not be coupled. Rows and columns that are
    all masked do not count in A and N. Returns f (A,), g (N,) and the error.

    It stops at an error Σ_i |Σ_j P_ij − 1/A| of at most tolerance, by default 1e-5, or 1e-12 in
    float64, or after max_steps with a warning. A step takes the mean of f and g while that halves
    the error [10], as they are equal for a kernel that is its own transpose. Ref: [2] Eq. 5"""
    _check("max_steps", max_steps, 1)
    f, g, half, error = None, None, 0.5, INF
    for step in range(max_steps + 1):
        log_rows, log_columns = _log_sums(log_kernel(), g)
        if step == 0:
            counts = [(x > FAR).sum().clamp_min(1).to(x.dtype) for x in (log_rows, log_columns)]
            n_rows, n_columns = counts
            log_ratio = (n_rows / n_columns).log()
        else:  # the sums of rows tell the error of the last step
            off = torch.expm1(f + log_rows).masked_fill(log_rows < FAR, 0)
            before, error = error, off.abs().sum() / n_rows
            half = half * (2 * error < before)
            if _stops(error, step, max_steps, tolerance):
                break
        f, g = -_filled(log_rows), log_ratio - _filled(log_columns)
        if len(f) == len(g):
            change = half * (g - f)
            f, g = f + change, g - change
    return f - n_rows.log(), g, error


def _log_sums(blocks, g):
    """Compute log Σ_j e^{K_ij + g_j} (A,), and log Σ_i e^{K_ij} (N,) of rows scaled to sum 1."""
    log_rows, log_columns = [], None
    for block in blocks:
        log_rows.append(log_sum(block, g))  # (a,)
        log_sums = log_sum(block, -_filled(log_rows[-1])[:, None], dim=0)  # (N,)
        if log_columns is not None:
            log_sums = torch.logaddexp(log_columns, log_sums)
        log_columns = log_sums
    return torch.cat(log_rows), log_columns


def _filled(x):
    return x.masked_fill(x < FAR, 0)


def _stops(error, step, max_steps, tolerance):
    """Whether Sinkhorn stops here. A GPU is waited for in every eighth step alone."""
    if step % 8 and step < max_steps and not _may_read(error):
        return False
    if tolerance is None:
        tolerance = 1e-12 if error.dtype == torch.float64 else 1e-5
    error = error.item()
    if math.isnan(error):
        raise NotFinite("log_kernel has NaN or inf.")
    if error > tolerance and step == max_steps:
        _warn(f"Sinkhorn stopped at step {step}, its error above {tolerance:.0e}. Raise epsilon.")
    return error <= tolerance or step == max_steps


def _couple(batch, options):
    """Couple the anchors of all ranks with the candidates → the potential g (N,) of candidates."""
    n_anchors, n = len(batch.scaled), batch.n()

    def kernel():
        for some in batch.blocks(n_anchors, max(1, _pairs_in_a_block(batch) // n)):
            neg = who(some, options)[1]
            yield by_rule(neg, neg, 0.0, batch.t, options)

    differentiated = torch.is_grad_enabled() and not options["detach_weights"]
    with torch.set_grad_enabled(differentiated):
        if differentiated or n_anchors * n <= 2**24:
            stored = list(kernel())
            return sinkhorn(lambda: stored)[1]
        return sinkhorn(kernel)[1]


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
    normalize: bool = True,
):
    """Find the k documents nearest to each query that do not answer it: hard negatives.
    queries (n, D), documents (N, D), any floats → indices of documents (n, k), nearest first, −1
    for none. To train on them, embed these documents with a gradient, and pass the embeddings
    (n, k, D) as negatives= and indices >= 0 as negative_mask=.

    positives       (n,), or (n, P) padded with −1. Rows of the documents that answer a query, and
                    are not taken. By default document i answers query i.
    labels          (N,). A document with the label of an answer is not taken.
    absolute_margin, relative_margin   as in `contrastive_loss`
    skip            how many of the nearest documents to leave out, beside the answers
    scores          also return the cosines (n, k), −∞ for none
    normalize       compare by cosines, or else by inner products
    Time grows as n·N·D. Memory holds unit documents and a block of cosines of 16 MB or 64 rows."""
    n, size = len(queries), len(documents)
    _check_tensor("queries", queries, "float", ("n", "D"))
    _check_tensor("documents", documents, "float", ("N", queries.shape[1]))
    _check("k", k, 1)
    _check("skip", skip, 0)
    _check_index("positives", positives, size, n)
    _check_tensor("labels", labels, "", (size,))
    if positives is None:
        if n > size:
            raise InvalidArgument(f"documents has {size} rows for {n} queries. Give positives=.")
        positives = range(n)
    options = resolve({"absolute_margin": absolute_margin, "relative_margin": relative_margin})
    tensor = functools.partial(torch.as_tensor, device=queries.device)
    positives = tensor(positives).long().view(n, -1)
    with _autocast_off(queries.device.type):
        _check_finite("queries", queries)
        _check_finite("documents", documents)
        project = unit if normalize else _upcast
        queries = project(queries)
        documents = project(documents).to(queries.dtype)
        batch = _Batch(queries, queries[:, :0], positives[:, :0], positives, candidates=documents)
        nearest, index = [], []
        for some in batch.blocks(n, max(64, 2**22 // size)):
            cosines = who(some, options)[1]  # (a, N)
            if labels is not None:  # those of all answers, which can be several
                for column in some.named.unbind(1):
                    of_label = tensor(labels)[column, None] == tensor(labels)
                    cosines.masked_fill_(of_label & (column >= 0)[:, None], MASKED)
            found = F.pad(cosines, (0, k + skip), value=MASKED).topk(k + skip)
            nearest.append(found.values[:, skip:])
            index.append(found.indices[:, skip:])
    nearest, index = torch.cat(nearest), torch.cat(index)
    _check_finite("a product of queries and documents", nearest)
    index = index.masked_fill(nearest < FAR, -1)
    return (index, nearest.masked_fill(nearest < FAR, -INF)) if scores else index


def draw(log_w: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw k distinct negatives for each anchor, one after the other, candidate j of those left
    with a probability proportional to w_ij. log_w (A, N), at most −1e20 for what must not be drawn
    → indices (A, k), for negatives=rows[indices]. To prefer hard negatives pass tilted(logits, β),
    with −1e30 for the own sample, and use uniform weights in the loss."""
    _check_tensor("log_w", log_w, "float", ("A", "N"))
    _check("k", k, 1)
    log_w = _upcast(log_w)
    if _may_read(log_w):
        if log_w.isnan().any():
            raise NotFinite("log_w has NaN.")
        fewest = (log_w > FAR).sum(-1).amin()
        if k > fewest:
            raise InvalidArgument(f"k is {k}, but a row of log_w has {fewest} above −1e20.")
    # the largest of log w_j − log(exponential noise) is that of j with probability w_j / Σ_l w_l
    noise = torch.empty_like(log_w).exponential_(generator=generator).log()
    return (log_w - noise.clamp_min(-99)).topk(k).indices  # −∞ − log 0 would be NaN


# ---- 7. Large batches and ranks: the same numbers in linear memory, over processes -------------


def _evaluate(batch, group, options):
    """Compute the losses of all anchors, (A,), or their mean or sum over all ranks."""
    size = _block_size(batch, options)
    if size > 0:
        value, counts = _uncompiled(_in_blocks, batch, options, size)
    else:
        value, counts, _ = answer(batch, options)
    if _may_read(value):
        _warn_of(counts, len(batch.scaled), options)
    if group is not None:  # else a rank without a gradient would skip the backward pass of `gather`
        for x in (batch.candidates, batch.potential):
            if x is not None:
                value = value + x[:0].sum()
    if options["reduction"] == "none":
        return value
    value, count = value.sum(), len(batch.scaled) - counts[0]
    if group is not None:  # the gradient is multiplied by R, as averaging it over ranks divides
        totals = torch.stack([value.detach(), value.new_zeros(()) + count])
        distributed.all_reduce(totals, group=group)
        scaled = distributed.get_world_size(group) * value
        value, count = totals[0] + (scaled - scaled.detach()), totals[1]
    if options["reduction"] == "mean":
        return value / (count + (count == 0))
    return value


def _warn_of(counts, n, options):
    """Warn of what is unlikely to be meant. At the default τ⁺ the floor is usual after training."""
    no_positive, candidates, clamped = map(int, counts)
    if no_positive == n:
        _warn(f"None of {n} anchors has a positive. Check labels and positive_index.")
    if candidates == 0:
        _warn(f"None of {n} anchors has a candidate. Check labels, masks and positive_index.")
    if options["tau_plus"] and 2 * clamped > n:
        _warn("Debiasing takes its floor for most anchors. Raise temperature or lower tau_plus.")


def _pairs_in_a_block(batch):
    """4 MB fit into a CPU's cache. On a GPU each block costs launches."""
    return 2**20 if batch.scaled.device.type == "cpu" else 2**25


def _block_size(batch, options):
    """Choose the number of anchors in a block. 0 takes all at once."""
    if torch._C._are_functorch_transforms_active():  # torch.func cannot pass through blocks
        return 0
    if options["block_size"] is not None:
        return options["block_size"]
    pairs, n = _pairs_in_a_block(batch), batch.n()
    return 0 if len(batch.scaled) * n <= pairs / 4 else max(64, pairs // n)


def _in_blocks(batch, options, size):
    """Compute losses (A,), or their sum, and counts, with the matrix of one block in memory. The
    gradient of a sum is computed with it. For losses the backward pass sweeps again."""
    ones = torch.ones_like(batch.scaled[:, 0])
    summed = options["reduction"] != "none"
    grad = ones if summed and torch.is_grad_enabled() else None
    swept = _sweep(options, size, batch, grad)
    if swept is None:
        losses, counts = [], [0, 0, 0]
        for some in batch.blocks(len(ones), size):
            value, more, _ = checkpoint(answer, some, options, use_reentrant=False)
            losses.append(value)
            counts = [a + b for a, b in zip(counts, more, strict=True)]
        return torch.cat(losses), counts
    losses, counts, gradients = swept

    def gradients_for(grad):
        if summed:
            return [None if x is None else grad * x for x in gradients]
        return _sweep(options, size, batch, grad)[2]

    value = losses.sum() if summed else losses
    return _Attach.apply(value, gradients_for, *batch), counts


class _Attach(torch.autograd.Function):
    """Let a value depend on a batch. gradients_for(grad) lists the gradients of grad · value."""

    @staticmethod
    def forward(ctx, value, gradients_for, *batch):
        ctx.gradients_for = gradients_for
        ctx.save_for_backward(*filter(torch.is_tensor, batch))
        return value.clone()  # the caller may change it in place

    @staticmethod
    def backward(ctx, grad):
        _only_once()
        _ = ctx.saved_tensors  # an error if one was changed in place
        return None, None, *ctx.gradients_for(grad)


def _sweep(options, size, batch, grad):
    """Compute losses (A,), counts, and the gradients of grad · losses, block by block, or None if a
    function of the user's learns something, whose gradient would be missing. Blocks fill parts of
    whole tensors, as small ones would fragment the memory of matrices."""
    losses, counts = torch.zeros_like(batch.scaled[:, 0]), [0, 0, 0]
    weights = losses if grad is None else grad  # not read without a gradient
    learned = [grad is not None and torch.is_tensor(x) and x.requires_grad for x in batch]
    gradients = [torch.zeros_like(x) if y else None for x, y in zip(batch, learned, strict=True)]
    blocks = batch.blocks(len(losses), size)
    parts = _Batch._make(gradients).blocks(len(losses), size)
    rows = zip(blocks, parts, losses.split(size), weights.split(size), strict=True)
    with torch.enable_grad(), _autocast_off(losses.device.type):
        for block, part, loss, weight in rows:
            leaves = _Batch._make(map(_leaf, block, part))
            value, more, _ = answer(leaves, options)
            if not _leaves_of(value) <= {id(x) for x in leaves}:
                return None
            loss.copy_(value.detach())
            counts = [a + b for a, b in zip(counts, more, strict=True)]
            if value.requires_grad:
                value.backward(weight)
    return losses, counts, gradients


def _leaves_of(x):
    """List the ids of the leaves of the graph of x."""
    seen, new = {None}, {x.grad_fn}
    while new := new - seen:
        seen |= new
        new = {before for node in new for before, _ in node.next_functions}
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _leaf(x, gradient):
    """Begin a graph at x, whose backward pass adds to `gradient`."""
    if torch.is_tensor(x):
        x = x.detach()
    if gradient is not None:
        x.requires_grad_().grad = gradient
    return x


def _only_once():
    """Stop a backward pass that would itself be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError("Blocks and ranks have no second derivatives. Try block_size=0.")


def _uncompiled(function, *arguments):
    """Call a function uncompiled, as blocks call backward() and Sinkhorn reads a value."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)
    return function(*arguments)


class _Gather(torch.autograd.Function):
    """Concatenate rows over ranks, and sum their gradient over ranks in the backward pass."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, x, group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        _only_once()
        grad = grad.clone().contiguous()
        distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(distributed.get_world_size(ctx.group))[_rank(ctx.group)], None


def gather(x: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """Concatenate the rows of all ranks, equally many, in their order. The gradient is summed.
    To use them as negatives, call contrastive_loss with group=group, negatives=gather(rows, group)
    and positive_index=rank * len(rows) + i, where rows[i[b]] shows sample b."""
    if group is None or x is None:
        return x
    return _Gather.apply(x.contiguous(), group)


def _rank(group):
    return 0 if group is None else distributed.get_rank(group)


# ---- 8. Numerics and checks --------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """Project rows (..., D) to the unit sphere, in float32 or float64. A zero row stays 0, and its
    gradient passes unchanged. On a CPU squares that overflow or underflow are an error."""
    x = _upcast(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if _may_read(norm) and len(x):
        low, high = norm.detach().aminmax()
        if high == INF or (not low and (x * (norm == 0)).any()):
            raise NotFinite("Squares of a row overflow or underflow. Divide by its largest entry.")
    return x / (norm + (norm == 0))


def _autocast_off(device):
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _upcast(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_sum(x: Tensor, y: Tensor | None = None, dim: int = -1) -> Tensor:
    """Compute log Σ_j e^{x_j + y_j} of finite numbers."""
    if y is not None:
        x = x + y
    elif x.shape[dim] == 1:
        return x.squeeze(dim)
    if torch._C._are_functorch_transforms_active():  # torch.func cannot pass through _LogSum
        return torch.logsumexp(x, dim)
    return _LogSum.apply(x, dim, y is not None and x.requires_grad)[0]


class _LogSum(torch.autograd.Function):
    """Compute log Σ e^x twice as fast as torch.logsumexp, from the shares e^x / Σ. They are a
    result, too, so that autograd knows how the gradient depends on x. They may overwrite x."""

    @staticmethod
    def forward(ctx, x, dim, overwrite):
        largest = x.amax(dim)
        shares = torch.softmax(x, dim, out=x.detach() if overwrite else None)
        ctx.dim = dim
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(shares)
        return largest - shares.amax(dim).log(), shares  # the largest share is e^{max x} / Σ

    @staticmethod
    def backward(ctx, grad, grad_shares):
        (shares,) = ctx.saved_tensors
        gradient = 0 if grad is None else grad.unsqueeze(ctx.dim)
        if grad_shares is not None:
            mean = (grad_shares * shares).sum(ctx.dim, keepdim=True)
            gradient = gradient + grad_shares - mean
        return shares * gradient, None, None


def _may_read(x):
    """Whether the host may read values. For a GPU it would have to wait."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class InvalidArgument(ValueError):
    """Say which argument has a value that is not allowed, and what is allowed."""


class NotFinite(InvalidArgument, FloatingPointError):
    """Say which argument has NaN or inf."""


def _require(valid, name, got, allowed):
    if not valid:
        raise InvalidArgument(f"{name} is {got}; it must be {allowed}")


def _warn(message):
    """Warn at the line that called this file, past torch's wrappers."""
    frame, level = sys._getframe(), 1
    while frame and frame.f_code.co_filename.startswith((__file__, torch.__path__[0])):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# Once glibc has freed 31 MiB in one piece, it keeps what blocks free, which is thrice as fast.
torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")

DEFAULTS = {"loss": "simclr"}
ALLOWED = {"loss": PRESETS}
TEXTS = {"loss": "The loss. It chooses weights and objective."}
for _name, _hint in get_type_hints(Options, include_extras=True).items():
    DEFAULTS[_name], ALLOWED[_name], TEXTS[_name] = _hint.__metadata__


def _words_of(allowed):
    if not isinstance(allowed, list):
        return f"one of {', '.join(map(str, allowed))}"
    low, high = allowed
    kind = "a whole number" if isinstance(high, int) else "a number"
    return f"{kind} from {low:g} to {high:.9g}"


for _documented in (contrastive_loss, ContrastiveLoss):
    _entries = [inspect.getdoc(_documented), "", "Options"]
    for _name, _text in TEXTS.items():
        _text = inspect.cleandoc(_text).replace("\n", "\n    ")
        _entries.append(f"{_name} = {DEFAULTS[_name]!r}, {_words_of(ALLOWED[_name])}\n    {_text}")
    _documented.__doc__ = "\n".join(_entries)


def resolve(given):
    """Check the options of a call, fill in those that are left open, and add what the rows of
    WEIGHTS and OBJECTIVES say."""
    for name, value in given.items():
        if name not in DEFAULTS:
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, DEFAULTS)}")
        if name == "temperature" and torch.is_tensor(value) and value.numel() == 1:
            if not _may_read(value):
                continue
            value = value.item()
        own = callable(value) and name in ("weights", "objective")
        if not own and value is not DEFAULTS[name]:
            _check(name, value, ALLOWED[name])
    options = DEFAULTS | given
    of_loss = zip(("weights", "objective", "tau_plus"), PRESETS[options["loss"]], strict=True)
    options |= {name: value for name, value in of_loss if options[name] is None}
    row = WEIGHTS.get(options["weights"], (own_rule, "any"))
    options["weight_function"], options["weight_mean"] = row
    row = OBJECTIVES.get(options["objective"], (own_objective, False))
    options["objective_function"], options["by_label"] = row
    if "log_negatives" not in takes(options["objective_function"]):
        options["tau_plus"] = 0.0  # the others are not debiased
    if options["detach_weights"] is None:
        options["detach_weights"] = "potential" in takes(options["weight_function"])
    return options


def did_you_mean(name, known):
    """Name what was perhaps meant."""
    for similar in difflib.get_close_matches(str(name).lower(), map(str, known), 1):
        return f"; did you mean {similar!r}?"
    return ""


def _check(name, value, allowed):
    """Check that a value is one of some names; in a range [low, high], and whole if high is an int;
    or a whole number of at least `allowed`."""
    if isinstance(allowed, int):
        allowed = [allowed, 10**18]
    if isinstance(allowed, list):
        kind = numbers.Integral if isinstance(allowed[1], int) else numbers.Real
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        valid = is_number and allowed[0] <= value <= allowed[1]
    else:
        valid = isinstance(value, str | bool) and value in allowed
    if not valid:  # torch.compile cannot trace repr()
        words = _words_of(allowed)
        if not isinstance(allowed, list):
            words += did_you_mean(value, allowed)
        _require(False, name, _describe(value), words)


def _check_call(options, views, negatives, positive_index, labels, mask, log_weights, group):
    """Check that the arguments of a call fit together."""
    shape, hint = ("B", "D"), "; give views one by one, as in *x.unbind(1), and labels by labels="
    for i, view in enumerate(views):
        _check_tensor(f"views[{i}]", view, "float", shape, hint=hint, required=True)
        if view.device != views[0].device:
            raise InvalidArgument(f"views[{i}] is on {view.device}, views[0] on {views[0].device}.")
        shape = view.shape
    if len(views) < 2 and (not views or labels is positive_index is None):
        needs = "two or more (B, D), one with labels=, or one with negatives= and positive_index="
        raise InvalidArgument(f"views has length {len(views)}. Give {needs}.")
    ranks = 1
    if group is not None:
        _require(hasattr(group, "rank"), "group", _describe(group), "a process group")
        ranks = distributed.get_world_size(group)
        if _may_read(views[0]):
            _check_ranks(views, group)
    b, k = len(views[0]), 0
    n_anchors = n = b * len(views)
    if negatives is None:
        n *= ranks
        if positive_index is not None:
            raise InvalidArgument("positive_index names rows of negatives, but there are none.")
    else:
        _check_negatives(negatives, views, options, labels, group)
        shared = positive_index is labels is mask is None and negatives.ndim == 2
        if shared and _may_read(negatives) and (negatives == views[1][0]).all(-1).any():
            _warn("The first row of views[1] is in negatives, too. Name it in positive_index=.")
        n_anchors, n, k = b, negatives.shape[-2], negatives.shape[-2]
    hint = f" for {b} samples and {k} rows of negatives"
    _check_tensor("labels", labels, "", (b + k,), hint=hint)
    _check_index("positive_index", positive_index, n, b)
    _check_tensor("negative_mask", mask, "bool", (n_anchors, n), (n,))
    _check_tensor("log_weights", log_weights, "float", (n_anchors, n), (n,))
    _check_finite("log_weights", log_weights)
    _check_finite("negatives", negatives)
    for i, view in enumerate(views):
        _check_finite(f"views[{i}]", view)


def _check_ranks(views, group):
    """Compare shapes over ranks, as they would wait, and look for NaN and inf."""
    b, d = views[0].shape
    here = [len(views), b, d, all(x.isfinite().all() for x in views)]
    for rank, there in enumerate(gather(torch.tensor([here]), group).tolist()):
        if there[:3] != here[:3]:
            text = f"{there[:3]} views, rows, dimensions on rank {rank}, and {here[:3]} here"
            raise InvalidArgument(f"views differ between ranks: {text}.")
        if not there[3]:
            raise NotFinite(f"views of rank {rank} have NaN or inf.")


def _check_negatives(negatives, views, options, labels, group):
    """Check negatives (K, D) or (B, K, D)."""
    b, d = views[0].shape
    _check_tensor("negatives", negatives, "float", ("K", d), (b, "K", d))
    coupled = "potential" in takes(options["weight_function"])
    if negatives.ndim == 3 and (labels is not None or coupled):
        raise InvalidArgument("Give negatives (B, K, D) no labels and no weights 'transported'.")
    if negatives.ndim == 2 and group is not None and _may_read(negatives):
        sums = gather(negatives.detach().sum(dtype=torch.float64)[None], group)
        if not torch.allclose(sums, sums[0], equal_nan=True):
            raise InvalidArgument("negatives differs between ranks. Pass gather(negatives, group).")


def _check_tensor(name, x, kind, *shapes, hint="", required=False):
    """Check a tensor of "float", "int", "bool" or any kind "". None passes, and a list if it is not
    of floats, unless one is required. A shape has lengths, or letters for any above 0."""
    if x is None and not required:
        return
    if kind != "float" and not required:
        with contextlib.suppress(Exception):  # a list may have words, or lists of unequal lengths
            x = torch.as_tensor(x)
    fits = torch.is_tensor(x) and any(_fits(x, shape) for shape in shapes)
    if not (fits and kind in str(x.dtype)):
        sizes = " or ".join(f"({', '.join(map(str, shape))})" for shape in shapes)
        kinds = f" of {kind}s" if kind else ""
        _require(False, name, _describe(x), f"a tensor {sizes}{kinds}{hint}")


def _fits(x, shape):
    lengths = zip(x.shape, shape, strict=False)
    same = all(a == b or (isinstance(b, str) and a > 0) for a, b in lengths)
    return same and x.ndim == len(shape)


def _check_index(name, index, n, length):
    """Check that an index (length,) or (length, P) names rows from 0 to n − 1, or none by −1."""
    _check_tensor(name, index, "int", (length,), (length, "P"))
    if index is None or torch.is_tensor(index) and not _may_read(index):
        return
    low, high = map(int, torch.as_tensor(index, device="cpu").aminmax())
    if low < -1 or high >= n:
        raise InvalidArgument(f"{name} has rows from {low} to {high}. It can have −1 to {n - 1}.")


def _check_finite(name, x):
    """Check a tensor, if it is given and can be read."""
    if x is None or not _may_read(x):
        return
    # looking at the sum takes a fraction of the time, but it can overflow
    if not (math.isfinite(x.detach().sum()) or x.isfinite().all()):
        raise NotFinite(f"{name} has NaN or inf.")


def _describe(x):
    if torch.is_tensor(x):
        return f"{x.dtype} {tuple(x.shape)}" + ", which is empty" * (not x.numel())
    return repr(x)[:60]


# Above is the loss: copy that much for a training loop of your own. Below, encoders are trained.

import copy
from collections.abc import Iterator, Mapping
from itertools import pairwise

from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ += """
view Encoder MemoryBank embed Generator Discriminator Game SimCLR Bank DiffHard Training
RECIPES in_micro_batches annealed_beta lead_in follow
""".split()

# ---- 9. Views: random crops, flips and colours of a whole batch, on its device, with a gradient

YIQ = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]  # from RGB


def view(
    images: Tensor,
    generator: torch.Generator | None = None,
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
) -> Tensor:
    """Draw one random view of every image → float32 or float64 in [0, 1], with a gradient.

    images              (B, 3, H, W), bytes or floats in [0, 1], on the device of the generator.
    area, ratio         Ranges of the crop's share of the image, and of its width / height as a
                        multiple of the image's.
    flip, gray, blur    Probabilities of a mirror image, of no colour, and of a blur.
    jitter              The probability of other colours. Brightness, contrast and saturation change
                        by factors in [1 − x, 1 + x], and chroma turns by up to hue, of a full turn.
    sigma               The range of the blur's standard deviation, in pixels.
    Ref: [6] App. A for 32 × 32 images, where area starts at 0.08; [3] 3.1"""
    _check_tensor("images", images, "", ("B", 3, "H", "W"), required=True)
    with torch.autocast(images.device.type, enabled=False):  # 16 bits are too few for coordinates
        x = _floats(images)
        noise = x.new_empty(len(x), 13, dtype=torch.float32)
        random = iter(noise.uniform_(generator=generator).unbind(1))

        def drawn(limits=(0, 1)):
            low, high = limits
            return low + (high - low) * next(random).to(x.dtype)  # (B,)

        # crop and flip: coordinates go from −1 to 1
        share, aspect = drawn(area), drawn([math.log(x) for x in ratio]).exp()
        width, height = (side.sqrt().clamp_max(1) for side in (share * aspect, share / aspect))
        x_center, y_center = (1 - width) * drawn((-1, 1)), (1 - height) * drawn((-1, 1))
        width, zero = torch.where(drawn() < flip, -width, width), torch.zeros_like(width)
        theta = torch.stack([width, zero, x_center, zero, height, y_center], 1).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.shape, align_corners=False)  # (B, H, W, 2)
        x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

        # colours: in YIQ, scale and turn chroma, which is IQ; then change brightness and contrast
        changed = (drawn() < jitter).to(x.dtype)  # 1 or 0
        ranges = brightness, contrast, saturation
        light, spread, colour = (1 + changed * drawn((-most, most)) for most in ranges)
        angle = changed * drawn((-hue, hue)) * 2 * math.pi
        colour = colour * (drawn() >= gray)
        cos, sin, one = angle.cos() * colour, angle.sin() * colour, torch.ones_like(angle)
        chroma = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
        yiq = torch.tensor(YIQ, dtype=torch.float32, device="cpu")
        to_yiq, to_rgb = (m.to(x, non_blocking=True) for m in (yiq, yiq.inverse()))
        luma = (x.mean((2, 3)) @ to_yiq[0]) * light  # the mean of an image
        gain, offset = (light * spread)[:, None, None], ((1 - spread) * luma)[:, None, None]
        x = (gain * ((to_rgb @ chroma @ to_yiq) @ x.flatten(2)) + offset).view_as(x)

        if blur > 0:
            radius = max(1, min(x.shape[2:]) // 20)  # the kernel is a tenth as wide as the image
            steps = torch.arange(-radius, radius + 1, device=x.device)
            deviation = drawn(sigma).clamp_min(1e-3)[:, None]  # at 0 the kernel would be NaN
            kernel = torch.softmax(-((steps / deviation) ** 2) / 2, 1)
            kernel = torch.where((drawn() < blur)[:, None], kernel, (steps == 0).to(x.dtype))
            x = F.pad(x, (radius,) * 4, mode="reflect")
            for dim in (2, 3):
                side, weights = x.shape[dim] - 2 * radius, kernel[:, :, None, None, None].unbind(1)
                x = sum(w * x.narrow(dim, k, side) for k, w in enumerate(weights))
    return x.clamp(0, 1)


def _floats(images):
    """Convert bytes, or floats in [0, 1], to floats in [0, 1]."""
    most = 1 if images.is_floating_point() else 255
    if _may_read(images):
        low, high = map(float, images.detach().aminmax())
        fits = -0.001 <= low <= high <= 1.001 * most  # rounding may leave [0, 1]
        _require(fits, "images", f"from {low:g} to {high:g}", "bytes, or floats from 0 to 1")
    return _upcast(images) / most


# ---- 10. Encoders: a backbone and a projection head, a memory of embeddings, an optimizer's step


class Encoder(nn.Module):
    """Map images (B, 3, size, size) in [0, 1] to features (B, self.features), which to use after
    training, and embeddings (B, dim), not normalised. Ref: [6] App. B.9; [1] C"""

    def __init__(self, name: str = "small", dim: int = 128, size: int = 32):
        super().__init__()
        _check("name", name, ("small", "resnet18", "resnet50"))
        if name == "small":
            _require(size % 2 == 0, "size", size, "even for the small encoder")
            layers = [nn.PixelUnshuffle(2)]  # 2 × 2 pixels become one, which halves the work
            for before, after, stride in ((12, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 1)):
                layers.append(nn.Conv2d(before, after, 3, stride, padding=1, bias=False))
                layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.features = 256
        else:
            from torchvision import models

            self.backbone = getattr(models, name)()
            self.features = self.backbone.fc.in_features
            self.backbone.fc = nn.Identity()
            if size <= 64:  # small images begin without stride
                self.backbone.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
                self.backbone.maxpool = nn.Identity()
        hidden = max(self.features, 2 * dim)
        layers = nn.Linear(self.features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim)
        self.head = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> tuple:
        features = self.backbone(4 * images - 2)  # pixels have about mean 0 and variance 1 now
        return features, self.head(features)


class MemoryBank(nn.Module):
    """Remember a unit row for each sample, and move it towards each new embedding of the sample.
        row_i ← u / ‖u‖    where u = m row_i + (1 − m) z_i
    rows (K, D) are those to begin with. momentum is m, in [0, 1). Ref: [4] 5.1; [7]"""

    def __init__(self, rows: Tensor, momentum: float = 0.5):
        super().__init__()
        _check("momentum", momentum, [0, 1 - 1e-9])
        _check_finite("rows", rows)
        self.momentum = momentum
        self.register_buffer("rows", unit(rows.detach()))

    @torch.no_grad()
    def update(self, index: Tensor, z: Tensor) -> None:
        """Move the rows at index (B,), all different, towards embeddings z (B, D)."""
        _check_tensor("z", z, "float", (len(index), self.rows.shape[1]))
        _check_finite("z", z)
        moved = self.momentum * self.rows[index] + (1 - self.momentum) * unit(z)
        self.rows[index] = unit(moved).to(self.rows.dtype)


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, momentum: float) -> None:
    """Move the parameters and buffers θ' of a follower towards those of a leader, θ.
        θ' ← m θ' + (1 − m) θ    for a momentum m in [0, 1]. Whole numbers are copied
    The networks may differ in dtype, device and wrappers. Ref: [8]; [3] Eq. 7"""
    _check("momentum", momentum, [0, 1.0])
    leader, follower = _unwrapped(leader), _unwrapped(follower)
    leaders = dict(leader.named_parameters()) | dict(leader.named_buffers())
    followers = dict(follower.named_parameters()) | dict(follower.named_buffers())
    for name, x in followers.items():
        _check_tensor(f"leader's {name}", leaders.get(name), "", x.shape, required=True)
        if x.is_floating_point():
            x.lerp_(leaders[name].to(x), 1 - momentum)
        else:
            x.copy_(leaders[name])


def _unwrapped(network):
    while type(network).__name__ in "DataParallel DistributedDataParallel OptimizedModule".split():
        (network,) = network.children()
    return network


def _descend(loss, optimizer, name, read=False, group=None):
    """Take a step down a loss, which must be finite. On a GPU only `read` checks, and waits."""
    if loss.ndim:
        raise InvalidArgument('The loss must be one number. Use reduction="mean".')
    if (read or _may_read(loss)) and not loss.isfinite():
        raise FloatingPointError(f"The loss of the {name} is {loss.item()}.")
    optimizer.zero_grad()
    with torch.autocast(loss.device.type, enabled=False):  # autocast is for forward passes
        loss.backward()
    _move(optimizer, group)


def _move(optimizer, group):
    """Take a step along gradients, averaged over ranks."""
    parameters = [p for row in optimizer.param_groups for p in row["params"]]
    _average([p.grad for p in parameters if p.grad is not None], group)
    optimizer.step()
    torch.clear_autocast_cache()  # it has copies of the weights from before this step


@torch.no_grad()
def _average(tensors, group):
    if group and tensors:
        mean = torch.cat([x.flatten() for x in tensors]) / group.size()
        distributed.all_reduce(mean, group=group)
        for x, part in zip(tensors, mean.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))


@torch.no_grad()
def embed(encoder: nn.Module, images: Tensor, batch_size: int = 200) -> tuple:
    """Embed images in eval mode → float32 features (n, F) and unit embeddings (n, D), no gradient.
    images are (n, 3, H, W) on any device, or an object with len(images) and images.split(m)."""
    encoder = _unwrapped(encoder)
    modes = {part: part.training for part in encoder.modules()}
    weight = next(encoder.parameters())  # it has the encoder's device and dtype
    try:
        encoder.eval()
        parts = (_floats(x.to(weight.device)) for x in images.split(batch_size))
        outputs = [encoder(x.to(weight.dtype)) for x in parts]
    finally:
        for part, mode in modes.items():
            part.training = mode
    features, z = map(torch.cat, zip(*outputs, strict=True))
    return features.float(), unit(z.float())


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


# all networks stay in train mode, so running statistics would not be used
_norm = functools.partial(nn.BatchNorm2d, track_running_stats=False)


def _up(before, after):
    double = nn.Upsample(scale_factor=2)
    first = _norm(before), nn.ReLU(), double, _conv(before, after)
    second = _norm(after), nn.ReLU(), _conv(after, after)
    return _Residual(first + second, [_conv(before, after, 1), double])


def _down(before, after, relu=nn.ReLU, pool=nn.AvgPool2d):
    residual = [relu(), _conv(before, after), nn.ReLU(), _conv(after, after), pool(2)]
    return _Residual(residual, [pool(2), _conv(before, after, 1)])


def _widths(size, width):
    """List numbers of channels for the sides size, size / 2, …, 4: width, 2·width, 4·width, …"""
    _check("size", size, 8)
    _require(size.bit_count() == 1, "size", size, "a power of two, such as 32")
    _check("width", width, 1)
    return [width * min(2**k, 4) for k in range(size.bit_length() - 2)]


class Generator(nn.Module):
    """Map latents (B, latent) from N(0, I) to images (B, 3, size, size) in [0, 1], float32.
    size is a power of two. At full size there are `width` channels. Ref: [9] Fig. 15; [3] 4"""

    def __init__(self, size: int = 32, width: int = 16, latent: int = 64):
        super().__init__()
        _check("latent", latent, 1)
        self.latent = latent
        widths = _widths(size, width)[::-1]
        self.first = spectral_norm(nn.Linear(latent, 16 * widths[0]))
        blocks = [_up(before, after) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks, _norm(width), nn.ReLU(), _conv(width, 3))

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return _upcast(self.blocks(x)).sigmoid()


class Discriminator(nn.Module):
    """Score the realism of images (B, 3, size, size) in [0, 1] → (B,), float32.
    size and width are those of `Generator`. Ref: [9] Fig. 15"""

    def __init__(self, size: int = 32, width: int = 16):
        super().__init__()
        widths = _widths(size, width)
        blocks = [_down(3, width, relu=nn.Identity)]  # a ReLU would cut off dark pixels
        blocks += [_down(before, after) for before, after in pairwise(widths[:-1])]
        blocks += [_down(widths[-2], widths[-1], pool=nn.Identity), nn.ReLU()]
        self.blocks = nn.Sequential(*blocks)
        self.last = spectral_norm(nn.Linear(widths[-1], 1))

    def forward(self, images: Tensor) -> Tensor:
        x = _upcast(self.blocks(2 * images - 1)).sum((2, 3))  # (B, channels)
        with torch.autocast(x.device.type, enabled=False):
            return self.last(x)[:, 0]


class Game(nn.Module):
    """Play against an encoder, with a generator G, which makes images that are hard for it, a
    discriminator D, which keeps them looking real, and G_ema, a moving average of G. Ref: [3] 3.1

    size, width, latent    See `Generator`.
    pairs         Whether a latent z gives two positives, G(z) and G_ema(z), or G(z) alone.
    ascent        Whether G also ascends the encoder's loss. Without both it is "CL-GAN" in [3].
    momentum      m of G_ema, in [0, 1).
    pretrain      Epochs in which G and D train alone before the encoder begins.
    every         Steps of the encoder for each step of the game.
    batch_size    How many real images, and generated ones, each rank takes in a step of D.
    lr            The learning rate of Adam in `imitate`. ascent_lr is that of the ascent."""

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
        _check("momentum", momentum, [0, 1 - 1e-9])
        _check("pretrain", pretrain, 0)
        _check("every", every, 1)
        _check("batch_size", batch_size, 2)
        self.pairs, self.ascent, self.momentum = pairs, ascent, momentum
        self.pretrain, self.every, self.batch_size = pretrain, every, batch_size
        self.taken = 0  # how many steps the encoder took
        self.G, self.D = Generator(size, width, latent), Discriminator(size, width)
        self.G_ema = copy.deepcopy(self.G).requires_grad_(False)
        self.to(memory_format=torch.channels_last)
        adam = functools.partial(torch.optim.Adam, betas=(0.0, 0.999))
        self.optimizers = {"G": adam(self.G.parameters(), lr), "D": adam(self.D.parameters(), lr)}
        self.optimizers["ascent"] = adam(self.G.parameters(), ascent_lr, maximize=True)

    def latents(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw latents (n, latent) from N(0, I)."""
        return self.G.first.bias.new_empty(n, self.G.latent).normal_(generator=generator)

    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple:
        """Generate n images → images (n, 3, size, size), and the index (n,) of their latents.
        With pairs an odd n gives one image fewer. Only G gets a gradient. Ref: [3] Eq. 6"""
        z = self.latents(n // 2 if self.pairs else n, generator)
        index = torch.arange(len(z), device=z.device)
        if not self.pairs:
            return self.G(z), index
        return torch.cat([self.G(z), self.G_ema(z)]), index.repeat(2)

    def imitate(self, images: Tensor, generator=None, read=False, group=None) -> dict:
        """Let D take a step to tell real images x from generated ones, then G a step to deceive D.
            d_loss = E max(0, 1 − D(x)) + E max(0, 1 + D(G(z)))    g_loss = −E D(G(z))

        `read` checks on a GPU, too, that both are finite. Ref: [3] Eq. 5, and [9] for g_loss"""
        images = _floats(images[: self.batch_size])
        fake = self.G(self.latents(len(images), generator))
        if images.shape != fake.shape:
            shapes = f"shape {tuple(images.shape)}, but the generator makes {tuple(fake.shape)}"
            raise InvalidArgument(f"images has {shapes}. Give the game the size of the images.")
        d_loss = F.relu(1 - self.D(images)).mean() + F.relu(1 + self.D(fake.detach())).mean()
        _descend(d_loss, self.optimizers["D"], "discriminator", read, group)
        g_loss = -self.D(fake).mean()
        _descend(g_loss, self.optimizers["G"], "generator", read, group)
        return {"d_loss": d_loss.detach(), "g_loss": g_loss.detach()}

    def follow(self) -> None:
        """Move G_ema towards G. Ref: [3] Eq. 7"""
        follow(self.G_ema, self.G, self.momentum)
        for module in self.G_ema.train().modules():
            if hasattr(module, "parametrizations"):
                module.parametrizations.weight()  # renews its buffers, which averaging shortened

    def get_extra_state(self):
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return states | {"taken": self.taken}

    def set_extra_state(self, state):
        self.taken = state["taken"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])


# ---- 12. Training: methods, and one loop that trains an encoder by any of them


class SimCLR(nn.Module):
    """Contrast two random views of each image with the views of the other images in the batch.
    criterion is a ContrastiveLoss. view_options are options of `view`. A method of your own is
    another `step`. Ref: [6] Algorithm 1"""

    group, rank = None, 0  # `Training` sets both
    pretrain = 0  # epochs of `pretrain_step` before the encoder begins
    scheduled = []  # optimizers whose rates follow the recipe

    def __init__(self, criterion: nn.Module, view_options: dict | None = None):
        super().__init__()
        self.criterion = criterion
        self.view_options = view_options or {}

    def embed_views(self, encoder: Callable, generator, *images: Tensor) -> tuple:
        """Embed a random view of every image in one pass → (B, D) for each batch of images."""
        views = torch.cat([view(x, generator, **self.view_options) for x in images])
        return encoder(views.contiguous(memory_format=torch.channels_last))[1].chunk(len(images))

    def contrast(self, *z: Tensor, return_stats: bool = False, **options) -> tuple:
        """Compute the loss of embeddings → loss, statistics (empty without return_stats)."""
        result = self.criterion(*z, group=self.group, return_stats=return_stats, **options)
        return result if return_stats else (result, {})

    def step(self, encoder: Callable, images: Tensor, index: Tensor, generator, descend, **options):
        """Move the encoder once, by descend(loss) → figures to report. index (B,) has the places of
        the images in the training set. options are return_stats, and those of the loss."""
        z, other = self.embed_views(encoder, generator, images, images)
        loss, figures = self.contrast(z, other, **options)
        descend(loss)
        return figures


class Bank(SimCLR):
    """Contrast one view of each image with its row in a memory bank. Its negatives are other rows.
    images are the whole training set, as `embed` takes it. Ref: [4] Eq. 1, without second views"""

    def __init__(self, criterion, encoder, images: Tensor, momentum=0.5, view_options=None):
        super().__init__(criterion, view_options)
        z = embed(encoder, images)[1]
        self.bank = MemoryBank(z - z.mean(0), momentum)  # untrained, all z are near one point

    def step(self, encoder, images, index, generator, descend, **options):
        z = unit(self.embed_views(encoder, generator, images)[0])
        options |= {"negatives": self.bank.rows, "positive_index": index, "normalize": False}
        loss, figures = self.contrast(z, **options)
        descend(loss)
        self.bank.update(gather(index, self.group), gather(z.detach(), self.group))
        return figures


class DiffHard(SimCLR):
    """Play the min-max game, in which the encoder descends a loss and a generator ascends it.
    The game makes images of the training set's size, and the objective is ppcl if it makes pairs.
    Ref: [3] Algorithm 1"""

    def __init__(self, criterion, game: Game, view_options=None):
        super().__init__(criterion, view_options)
        objective = criterion.options["objective"]
        if game.pairs and objective != "ppcl":
            raise InvalidArgument(f"objective is {objective}. For pairs it must be ppcl.")
        self.game, self.pretrain = game, game.pretrain
        self.scheduled = [game.optimizers["ascent"]]

    def pretrain_step(self, images, generator, read):
        """Let G and D take a step without the encoder → figures."""
        self.game.train().follow()  # Eq. 7
        return self.game.imitate(images, generator, read, self.group)  # Eq. 5

    def step(self, encoder, images, index, generator, descend, return_stats=False, **options):
        game, ascent = self.game.train(), self.game.optimizers["ascent"]
        is_turn = game.taken % game.every == 0
        ascends = is_turn and game.ascent
        game.taken += 1
        with torch.set_grad_enabled(ascends):
            generated, pair = game.sample(len(images), generator)  # Eq. 6
        batch = torch.cat([generated, _floats(images)])
        alone = len(pair) + torch.arange(len(images), device=pair.device)
        options["labels"] = torch.cat([pair, alone]) + len(batch) * self.rank  # a pair shares one
        z, other = self.embed_views(encoder, generator, batch, batch)
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)  # Eq. 8
        ascent.zero_grad()
        descend(loss)  # Eq. 4: if G ascends, its gradient is in this backward pass, too
        if ascends:
            _move(ascent, self.group)
        if is_turn:
            figures |= self.pretrain_step(images, generator, return_stats)
        return figures


def in_micro_batches(encoder: Callable, micro_batch: int) -> Callable:
    """Return a function that embeds about `micro_batch` samples at a time, which saves memory.
    Its arguments are tensors or dicts of tensors, whose rows are samples. The backward pass embeds
    them again, with the same randomness. The gradient is exact, but BatchNorm sees one part at a
    time, twice. With DistributedDataParallel, wrap a module that calls this function. Ref: [11]"""
    _check("micro_batch", micro_batch, 1)

    def in_parts(*inputs, **named):
        # what a tokenizer returns is a Mapping, but no dict
        given = tree_map(lambda x: dict(x) if isinstance(x, Mapping) else x, (inputs, named))
        leaves, structure = tree_flatten(given)
        sizes = {len(x) for x in leaves if torch.is_tensor(x)}
        if len(sizes) != 1:
            raise InvalidArgument(f"All inputs must have equally many rows, not {sorted(sizes)}.")
        n = sizes.pop()  # BatchNorm needs two samples in a part
        count = max(1, min(math.ceil(n / micro_batch), n // min(micro_batch, 2)))
        columns = [x.tensor_split(count) if torch.is_tensor(x) else [x] * count for x in leaves]
        parts = []
        for row in zip(*columns, strict=True):
            few, keywords = tree_unflatten(row, structure)
            parts.append(checkpoint(encoder, *few, use_reentrant=False, **keywords))

        def join(*few):
            if few[0] is None:
                return None
            if not torch.is_tensor(few[0]) or sum(map(len, few)) != n:
                raise InvalidArgument("An encoder must return a row for each sample, in tensors.")
            return torch.cat(few)

        return tree_map(join, *parts)

    return in_parts


def annealed_beta(progress: float, beta: float, changes: int = 5) -> float:
    """Lower β over a run, as later many of the hardest negatives have the anchor's class.
    β · (1 − ⌊ℓ · progress⌋ / ℓ)    with ℓ = changes. Ref: [1] App. C"""
    return beta * (1 - int(changes * progress) / changes)


def lead_in(progress: float, alpha: float, until: float = 0.5) -> float:
    """Lower the share that `top` keeps from 1 to α, as at first near candidates teach little.
    α^{min(1, progress / until)}    for a progress in [0, 1)"""
    return alpha ** min(1.0, progress / until)


def _warm_up_and_cosine(progress, step):
    return min(10 * (progress + step), 1) * (1 + math.cos(math.pi * progress)) / 2


RECIPES = {
    "adamw": {"epochs": 16, "batch_size": 256, "lr": 8e-3, "weight_decay": 1e-4},
    "sgd": {"epochs": 200, "batch_size": 128, "lr": 0.03, "weight_decay": 5e-4},
    "adam": {"epochs": 400, "batch_size": 256, "lr": 1e-3, "weight_decay": 1e-6},
}
SGD = functools.partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS = {  # and factors of lr, from the progress in [0, 1) and that of one step
    "adamw": (torch.optim.AdamW, _warm_up_and_cosine),
    "sgd": (SGD, lambda progress, _: 0.1 ** ((progress >= 0.8) + (progress >= 0.95))),  # [4] 5.1
    "adam": (torch.optim.Adam, lambda progress, _: 1.0),  # [1] App. C, [2] VII-A
}


class Training:
    """Train an Encoder: `for figures in Training(encoder, images, SimCLR(criterion)): ...`

    encoder        Its weights become float32, in place. torch.compile and DataParallel may wrap it.
    images         uint8 (n, 3, H, W), or an object with len(images), .device and images[index].
    schedules      Options of the loss by the progress, as in {"alpha": lambda p: lead_in(p, 0.1)}.
    micro_batch    How many images the encoder takes at a time. By default it takes all.
    bfloat16       Whether to use autocast. By default if torch says that the hardware has it.
    seed           The seed of order, views and latents. It repeats the run.
    group          Ranks of torch.distributed that share each batch. All begin with equal encoders
                   and methods, and stay equal. On a GPU BatchNorm becomes SyncBatchNorm.
    settings       epochs, batch_size (about, of all ranks), lr, weight_decay.

    Each step yields a dict of "epoch", "step", "steps", "images" and figures of the method, and
    from epoch 0 on "loss" and scheduled options. Every tenth of an epoch they include statistics. A
    loss that is not finite raises FloatingPointError, on a GPU in those steps alone."""

    parts = ("encoder", "method", "optimizer")  # what has a state

    def __init__(
        self,
        encoder: nn.Module,
        images: Tensor,
        method: SimCLR,
        recipe="adamw",
        schedules=None,
        micro_batch=None,
        bfloat16=None,
        seed=0,
        group=None,
        **settings,
    ):
        _check("recipe", recipe, RECIPES)
        for name in settings:
            _check("a setting", name, RECIPES[recipe])
        settings = RECIPES[recipe] | settings
        if hasattr(encoder, "reducer"):
            raise InvalidArgument("encoder must be the module that DistributedDataParallel wraps.")
        self.encoder = encoder.to(torch.float32, memory_format=torch.channels_last)
        self.device = next(encoder.parameters()).device
        self.method = method.to(self.device, torch.float32)
        self.rank, self.ranks = (group.rank(), group.size()) if group else (0, 1)
        if group and self.device.type != "cpu":
            nn.SyncBatchNorm.convert_sync_batchnorm(self.encoder, group)  # in place
        self.group, method.group, method.rank = group, group, self.rank
        self.images, self.micro_batch, self.seed = images, micro_batch, seed
        self.schedules = schedules or {}
        self.bfloat16 = _has_bfloat16(self.device) if bfloat16 is None else bfloat16
        least = 2 * self.ranks  # BatchNorm may refuse one image on a rank
        _check("len(images)", len(images), least)
        for name, allowed in {"epochs": 1, "batch_size": least, "lr": [1e-12, 1e6]}.items():
            _check(name, settings[name], allowed)
        batches = math.ceil(len(images) / settings["batch_size"])
        self.epochs, self.steps_per_epoch = settings["epochs"], min(batches, len(images) // least)
        self.steps = (method.pretrain + self.epochs) * self.steps_per_epoch
        self.epoch, self.step_in_epoch = -method.pretrain, 0  # of the next step
        groups = [
            {"params": encoder.parameters(), "weight_decay": settings["weight_decay"]},
            {"params": method.criterion.parameters(), "weight_decay": 0},
        ]
        optimizer, self.rate = OPTIMIZERS[recipe]
        self.optimizer = optimizer(groups, settings["lr"], fused=self.device.type != "cpu")

    def __iter__(self) -> Iterator[dict]:
        while self.epoch < self.epochs:
            shuffle = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
            order = torch.randperm(len(self.images), generator=shuffle, device="cpu").to(
                self.images.device
            )
            own = order[self.rank : len(order) // self.ranks * self.ranks : self.ranks]
            for index in own.tensor_split(self.steps_per_epoch)[self.step_in_epoch :]:
                position = self.epoch * self.steps_per_epoch + self.step_in_epoch
                step = self.method.pretrain * self.steps_per_epoch + position + 1
                place = {"epoch": self.epoch, "step": step, "steps": self.steps}
                try:
                    figures = self._step(index, position) | place
                except FloatingPointError as error:
                    where = f"Training stopped at step {step} of {self.steps}."
                    raise FloatingPointError(f"{where} {error} A lower lr may help.") from error
                self.epoch, self.step_in_epoch = divmod(position + 1, self.steps_per_epoch)
                yield figures

    def _step(self, index, position):
        encoder_steps = self.epochs * self.steps_per_epoch
        progress = max(0, position) / encoder_steps
        rate = self.rate(progress, 1 / encoder_steps)
        for optimizer in [self.optimizer] + self.method.scheduled:
            for row in optimizer.param_groups:
                row["lr"] = row.setdefault("initial_lr", row["lr"]) * rate
        options = {name: schedule(progress) for name, schedule in self.schedules.items()}
        read = 10 * self.step_in_epoch % self.steps_per_epoch < 10  # every tenth of an epoch
        batch = self.images[index], index
        images, index = (x.to(self.device, non_blocking=True) for x in batch)
        seed = (self.seed + 1000 * self.rank) * 10**9 + position  # of each rank and step its own
        generator = torch.Generator(self.device).manual_seed(seed)
        figures = {}

        def descend(loss):
            _descend(loss, self.optimizer, "encoder", read, self.group)
            _average([x for x in self.encoder.buffers() if x.is_floating_point()], self.group)
            figures["loss"] = loss.detach()

        encoder = self.encoder.train()
        if self.micro_batch is not None:
            encoder = in_micro_batches(encoder, self.micro_batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            if self.epoch < 0:
                figures |= self.method.pretrain_step(images, generator, read)
            else:
                given = encoder, images, index, generator, descend
                figures |= self.method.step(*given, return_stats=read, **options) | options
        return figures | {"images": len(index) * self.ranks}

    def state_dict(self) -> dict:
        """Return what a Training of the same arguments needs to resume, as tensors in use."""
        parts = {name: getattr(self, name).state_dict() for name in self.parts}
        parts |= {"epoch": self.epoch, "step_in_epoch": self.step_in_epoch}
        return parts | {"steps_per_epoch": self.steps_per_epoch}

    def load_state_dict(self, state: dict) -> None:
        steps = self.steps_per_epoch
        limits = {"steps_per_epoch": [steps, steps], "step_in_epoch": [0, steps - 1]}
        limits["epoch"] = [-self.method.pretrain, self.epochs]
        for name, allowed in limits.items():
            _check(name, state[name], allowed)
            setattr(self, name, state[name])
        for name in self.parts:
            getattr(self, name).load_state_dict(state[name])


def _has_bfloat16(device):
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16", False)
