"""Hard-negative contrastive learning in one file that you can copy into your project.
Version 3.0.0, for Python 3.11 and torch 2.10 or newer. Copyright 2026 the hardneg authors.
You may use it under the MIT licence.

An encoder learns without labels if it pulls two views of a sample together and pushes other samples
away. The other samples are called negatives. Which negatives push, and how strongly each of them
pushes, decides how well the encoder learns. Every loss of this file answers three questions:

    1. Who could be a negative?       candidates: the rest of the batch, a memory bank, given rows
    2. How much does each one count?  weights w: a weight of 2 counts a candidate twice
    3. What is done with them?        objective: nce, each, ppcl, decoupled, simple, triplet

You can combine any weights with any objective. Large batches need little memory. With two views of
8192 samples `simclr` takes 118 MiB. A loss that computes all logits at once takes 3097 MiB.

Symbols
    B, V, D     samples, views of each sample, dimensions of an embedding
    A           anchors: every view of every sample, V·B; with `negatives` the first view alone, B
    a           the anchors of a block; large batches are worked on in blocks
    N           candidates of all anchors, the columns of the matrix of logits: V·B times the number
                of ranks, or K, the number of rows of `negatives`
    N_i         candidates of anchor i: the columns that are not masked in its row; in formulas of
                one anchor N stands for N_i
    M           columns of the matrix of positives (A, M), some of whose entries are masked. The
                table above `_line_up` says which positives there are. In formulas of one anchor M
                counts those that are not masked
    z           embedding, a unit row; papers [1], [2] and [4] write f(x), and [3] writes v
    t           temperature, which divides cosines; [1] writes t, and [3] and [4] write τ
    s_ij        logit of a candidate: the cosine of anchor i and candidate j, over t
    p_im        logit of a positive: the cosine of anchor i and its m-th positive, over t
    log w_ij    log of the weight of candidate j; the weight itself could overflow float32
    tau_plus    τ⁺, the probability that a candidate has the anchor's class                  [1]
    beta        β, how strongly tilted weights prefer near candidates; it multiplies s       [1]
    alpha       α, the share of nearest candidates that `top` keeps                          [4]
    epsilon     ε, the entropic regularisation, in the unit of the ground cost               [2]
    margin      η of the triplet loss, in the unit of a squared distance                     [2]

Sections, and what you can import from them. From 9 on it is about training.
    1 The loss                  PRESETS PAPERS Options contrastive_loss ContrastiveLoss
    2 Weights                   uniform tilted hardest top transported
    3 Objectives                nce each ppcl decoupled simple triplet published
    4 Candidates
    5 Transport                 sinkhorn
    6 Finding                   mine draw
    7 Large batches and ranks   gather
    8 Numerics and checks       unit InvalidArgument NotFinite
    9 Views                     view
   10 Encoders                  Encoder MemoryBank embed uniformity
   11 Generators                Generator Discriminator Game
   12 Training                  SimCLR Bank DiffHard in_micro_batches annealed_beta lead_in
                                RECIPES Training

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

__version__ = "3.0.0"
__all__ = ["PRESETS", "PAPERS", "Options", "contrastive_loss", "ContrastiveLoss", "uniform",
           "tilted", "hardest", "top", "transported", "sinkhorn", "nce", "each", "ppcl",
           "decoupled", "simple", "triplet", "published", "mine", "draw", "gather", "unit",
           "InvalidArgument", "NotFinite"]  # fmt: skip

INF = math.inf

# ---- 1. The loss -------------------------------------------------------------------------------

# loss: weights, objective, τ⁺. A None in this table stands for 1 / (N_i + 1).
# To add a loss, add its row here and in PRESETS of reference_numpy.py. TestContrastiveLoss and most
# other tests go through all rows.
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
# The papers' settings on CIFAR-10, as far as they print them.
# Use them as in ContrastiveLoss("hcl", **PAPERS["hcl"]).
PAPERS = {
    "simclr": {"temperature": 0.5},  # [6] App. B.9
    "debiased": {"temperature": 0.5, "tau_plus": 0.1},  # [1] and its code
    "hcl": {"temperature": 0.5, "tau_plus": 0.1, "beta": 1.0},  # the same
    "ot": {"temperature": 0.5, "epsilon": 0.5},  # [2] Table II, and the temperature of [1]
    "hard": {"temperature": 1.0, "alpha": 0.0819},  # [4] Table 1: 4095 of 49 999
    "hard-simple": {"alpha": 0.0819},
}


class Options(TypedDict, total=False):
    """The options of a loss. A loss ignores the options that it does not use."""

    # To add an option, add its entry: type, default, what is allowed, and sentences for the help.
    # What is allowed are the names of a table, a tuple of strings or of bools, or a range
    # [low, high]. If high is an int, the numbers have to be whole. The name must not be one of the
    # parameters that sections 2 and 3 list, nor one of the four names that `resolve` puts beside
    # the options. An entry can name a table that comes later in this file, such as WEIGHTS. Because
    # of the import from __future__ Python keeps entries as text, and section 8 evaluates them.
    loss: Annotated[str, "simclr", PRESETS, "The loss. It chooses weights and objective."]
    weights: Annotated[
        str | Callable[[Tensor], Tensor] | None,
        None,
        WEIGHTS,
        """How much each candidate counts. By default the loss decides. A function of your own maps
        the logits (a, N) of some anchors to log weights, which may be −∞ and are not scaled to
        mean 1. Debiasing takes a weighted mean over the positives of an anchor. Your function gives
        these weights, too. So if the loss is debiased, and there are several columns of positives,
        it is called a second time, with the logits (a, M) of positives. Logits of what does not
        count are −1e30. Blocks can call the function again in the backward pass, so it has to give
        the same answer then, without random numbers.""",
    ]
    objective: Annotated[
        str | Callable[[Tensor, Tensor, Tensor], Tensor] | None,
        None,
        OBJECTIVES,
        """What is done with the weighted negatives. By default the loss decides. A function of your
        own maps logits (a, M) of positives, and logits and log weights (a, N) of candidates, to
        losses (a,). What does not count is −1e30. If all candidates of an anchor are masked, all
        its logits and log weights of candidates are −1e30. For such an anchor return a finite
        loss, such as 0. Like weights, the function must not draw random numbers.""",
    ]
    temperature: Annotated[
        float | Tensor,
        0.1,
        [1e-6, 1e6],
        """The temperature t, which divides cosines. A tensor of one entry gets its gradient. In a
        ContrastiveLoss give an nn.Parameter to learn it.""",
    ]
    tau_plus: Annotated[
        float | None,
        None,
        [0, 0.999],
        """τ⁺, the probability that a candidate has the anchor's class. By default the loss decides,
        and `hcl` and `debiased` take 1 / (N_i + 1). The objectives `simple` and `triplet`, and
        those of your own, are not debiased.""",
    ]
    beta: Annotated[float, 0.5, [0, 1e8], "β, how strongly near candidates are preferred [1]."]
    alpha: Annotated[float, 0.3, [1e-9, 1.0], "α, the share of nearest candidates to keep [4]."]
    epsilon: Annotated[
        float,
        0.2,
        [1e-9, 1e9],
        """ε, the entropic regularisation of the coupling, in the unit of the cost [2]. The smaller
        it is, the more the nearest candidates get.""",
    ]
    cost: Annotated[
        str,
        "sqeuclidean",
        COSTS,
        """The cost of coupling two rows at a distance d: ½d², or e^{d²}. [2] takes ½d².
        In VII-C it takes e^{d² − κ}, which is "exp" with epsilon multiplied by e^κ.""",
    ]
    margin: Annotated[float, 0.0, [0, 1e9], "η, the margin of the hinge, a squared distance."]
    absolute_margin: Annotated[
        float | None,
        None,
        [-9, 9.0],
        """Drop likely false negatives: candidates of a cosine above c − absolute_margin. c is the
        cosine of the anchor's nearest positive.""",
    ]
    relative_margin: Annotated[
        float | None,
        None,
        [-9, 9.0],
        """Drop likely false negatives: candidates of a cosine above c − relative_margin · |c|. c is
        the cosine of the anchor's nearest positive.""",
    ]
    normalize: Annotated[
        bool,
        True,
        (True, False),
        """Project rows to the unit sphere first. If you turn this off, logits are inner products
        over t. For debiasing, transport, margins, `simple` and `triplet` you must then pass unit
        rows. This is not checked.""",
    ]
    detach_weights: Annotated[
        bool | None,
        None,
        (True, False),
        """Stop the gradient at the weights. By default `transported` does, and the others do not,
        as in the code of their authors.""",
    ]
    reduction: Annotated[
        str,
        "mean",
        ("mean", "sum", "none"),
        """The mean or the sum of the losses of all anchors of all ranks. With "none" you get
        one loss for each anchor of this rank. An anchor without a positive has the loss 0 there,
        and "mean" leaves it out.""",
    ]
    block_size: Annotated[
        int | None,
        None,
        [0, 2**40],
        """How many anchors are worked on at once. With blocks memory grows with A + N instead of
        A·N. 0 turns them off. By default a batch of up to 2^18 pairs, on a GPU 2^23, has no blocks.
        In a larger one a block has up to 2^20 pairs, on a GPU 2^25, but 64 anchors at least. Blocks
        change a result by rounding only. In blocks a loss has no second derivatives. If a function
        of yours has parameters that learn, or under torch.func, all anchors are computed in one go.
        The coupling of `transported` has blocks of its own.""",
    ]


def contrastive_loss(
    *views: Tensor,
    negatives: Tensor | None = None,
    positive_index: Tensor | None = None,
    negative_mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    labels: Tensor | None = None,
    group: distributed.ProcessGroup | None = None,
    return_stats: bool = False,
    **options: Unpack[Options],
):  # the type of the result depends on return_stats, which would need overloads
    """Compute any of the losses on the views of a batch.
        s_ij = cos(z_i, z_j) / t    log w_ij = weights(s_i)_j    ℓ_i = objective(p_i, s_i, log w_i)
    If tau_plus is above 0, debiasing subtracts the false negatives that are to be expected.

    views           (B, D) each. Row i shows sample i. Without `negatives` every row is an anchor,
                    in the order of torch.cat(views). Its positives are the rows of its sample in
                    the other views. Its candidates are the rows of all other samples. The positives
                    of a single view are named by labels or, with `negatives`, by positive_index.
                    The mean leaves out anchors without a positive.
    negatives       (K, D), or (B, K, D) with rows for each anchor. These rows are the candidates in
                    place of the batch, and only the rows of the first view are anchors.
    positive_index  (B,) or (B, P). Entry i names rows of `negatives` that show sample i, and −1
                    names none. For example it is arange(B) if `negatives` is views[1]. The rows
                    that entry i names are never candidates of anchor i. With two or more views the
                    index does no more than that. The positives are the other views. If there is a
                    single view, these rows are its positives.
    negative_mask   (A, N) or (N,), True where a candidate may be a negative. The embeddings of
                    masked candidates have to be finite, too. Labels can still make a masked
                    candidate a positive.
    log_weights     (A, N) or (N,). They are added to the log weights of the rule, get no gradient,
                    have to be finite, and are cut at ±5e19. They can be scores of a teacher. Or
                    they correct for how candidates were drawn. There are two cases.
                    1. K rows of `negatives` were drawn with replacement, row j with the probability
                    q_j. Pass −log(K q_j). Then with uniform weights the sum over the K rows
                    estimates the sum over all rows.
                    2. There are no `negatives`, and the samples of the batch were drawn with
                    unequal probabilities. Let q_j be the probability of the sample in column j,
                    and q⁺_i that of anchor i's positive. The usual logQ correction of a softmax
                    divides e^p by q⁺_i and e^s by q_j. log_weights can change e^s, but not e^p. But
                    `nce` depends only on the ratios e^s / e^p. So pass log q⁺_i − log q_j (A, N),
                    with `nce`. For this all positives of an anchor must have the same q⁺_i. With
                    two or more views they show the anchor's own sample, so q⁺_i is q_i. With one
                    view and labels they are other samples, and must have equal probabilities.
    labels          (B,), or (B + K,) with negatives (K, D), whose labels come last. Samples of one
                    label are not negatives of each other. They are positives of each other in two
                    cases, with the objective ppcl, or for a single view without positive_index.
                    Every number is a label, even −1.
    group           A process group of torch.distributed. The candidates are the views of all ranks.
                    Those of rank r begin in column r·V·B. `negatives` (K, D) must be the same on
                    all ranks, see `gather`. All ranks have to call with the same shapes.
                    DistributedDataParallel has to average the gradients, also those of parameters
                    of the loss. Without DDP, take the mean of each gradient over the ranks.
                    If reduction is "none", you reduce the losses yourself. For their mean, each
                    rank calls backward on the mean of its own losses. In that mean an anchor
                    without a positive counts as a loss of 0, while "mean" leaves it out. For their
                    sum, each of R ranks calls backward on R times the sum of its own losses, as
                    averaging the gradients then divides by R.
    return_stats    Also return a dict of figures, taken from the first 2^20 pairs of this process.
                    "clamped" is the share of anchors whose debiased mean of e^s comes out below
                    e^{−1/t}. A true mean cannot be that small, so e^{−1/t} is used in its place.
                    "positive" and "negative" are mean cosines. "spread" is the root of the
                    mean variance of an anchor's negative cosines. "candidates" is the mean N_i.
                    "ess" is the mean of (Σw)² / (N_i Σw²), the share of candidates that count.
                    A figure is NaN if there is nothing to average.

    Inputs are floats of 16 bits or more. All is computed in float32 or float64, with autocast off.
    On a GPU and in compiled code values are not checked, as that would wait for the device. Time
    grows as A·N·D, and with `transported` also as A·N in each step of Sinkhorn. Sinkhorn stores the
    costs of all pairs if it needs their gradient, or if there are at most 2^24 pairs. Otherwise it
    computes them again in each step, which takes A·N·D.
    From torch.func, you can use grad, jvp and hessian without a group. Then there are no blocks.
    You cannot use vmap over inputs, as their values are read. A hessian works, although it uses
    vmap. That vmap is over directions in which it differentiates, and not over inputs.
    Ref: see PRESETS"""
    options = resolve(options)
    given = negatives, positive_index, labels, negative_mask, log_weights, group  # see `_Anchors`
    _check_call(options, views, given)
    with _autocast_off(views[0].device.type):
        anchors, shared = _line_up(options, views, given)
        if "potential" in takes(options["weight_function"]):
            shared = shared._replace(
                potential=_uncompiled(_couple, anchors, shared, group, options)
            )
        value = _evaluate(anchors, shared, group, options)
        # A NaN in the embedding of a masked candidate can leave the loss finite, and make the
        # gradient NaN. So not the loss but the inputs are checked. These checks come last, so that
        # no rank stops while others wait for it in this call.
        _check_finite("negatives", negatives)
        _check_finite("log_weights", log_weights)
        for i, view in enumerate(views):
            _check_finite(f"views[{i}]", view)
        if return_stats:
            return value, _statistics(anchors, shared, options)
        return value


class _Answers(NamedTuple):
    losses: Tensor  # (a,), 0 where an anchor has no positive
    lacking: list  # three counts of anchors: without a positive, without a candidate, and clamped
    pos: Tensor  # logits (a, M)
    neg: Tensor  # logits (a, N)
    log_w: Tensor  # (a, N)


def answer(anchors, shared, options):
    """Answer the three questions for some anchors. The answers for an anchor use its row alone.
    Section 7 calls this for a whole batch or block after block, and may call it twice.
    `_statistics` calls it, too. So `answer`, and all that it calls, keeps no state, draws no
    numbers, and does not communicate between ranks."""
    # 1. Who could be a negative?
    pos, neg = who(anchors, shared, options)  # logits (a, M), (a, N)
    if shared.plain:
        n = neg.new_full(neg.shape[:1], shared.n - anchors.own.shape[1])  # N_i (a,)
    else:  # count what is not masked, see section 2; this takes a pass over neg
        n = (neg > FAR).sum(1).to(neg.dtype)

    # 2. How much does each one count?
    log_w, log_total, log_w_pos = weigh(pos, neg, n, anchors, shared, options)

    # 3. What is done with them?
    # To add a count to `lacking`, add it wherever this file names `lacking`. The order is that of
    # `_Answers`.
    given = options | {"pos": pos, "neg": neg, "log_w": log_w, "t": shared.t}
    lacking = [0, 0, 0]
    if "log_negatives" in takes(options["objective_function"]):
        log_negatives = log_sum(neg, log_w)  # (a,)
        if options["tau_plus"] != 0:
            log_negatives, clamped = debias(
                log_negatives, log_total, pos, log_w_pos, n, shared.t, options
            )
            lacking[2] = clamped.sum()
        given["log_negatives"] = log_negatives
    losses = _fill_in(options["objective_function"], given)

    # Count what anchors lack. Where a check is skipped, the count is known to be 0.
    if anchors.pos.shape[1] == 0:  # positives come by label or index alone, and may all be masked
        no_positive = pos.amax(1) < FAR  # this pos is that of `who`
        losses = losses.masked_fill(no_positive, 0)
        lacking[0] = no_positive.sum()
    if not shared.plain:
        lacking[1] = (n == 0).sum()
    return _Answers(losses, lacking, pos, neg, log_w)


class ContrastiveLoss(nn.Module):
    """Compute `contrastive_loss` as a module: ContrastiveLoss("hcl", beta=1.0)(view_1, view_2).
    A call can override the options given here. An nn.Parameter as temperature is learned. So are
    the parameters of an nn.Module that you give as weights or objective."""

    def __init__(self, loss: str = "simclr", **options: Unpack[Options]):
        super().__init__()
        self.given = {"loss": loss, **options}
        self.options = resolve(self.given)  # to look at; a call does not use it
        self.learned = [
            name for name, x in self.given.items() if isinstance(x, nn.Parameter | nn.Module)
        ]
        for name in self.learned:
            setattr(self, name, self.given[name])  # so that it is trained, moved and saved

    def forward(self, *views, **call):
        """Compute the loss of the views, with the module's options and those given here."""
        learned = {name: getattr(self, name) for name in self.learned}
        return contrastive_loss(*views, **self.given | learned | call)


# ---- 2. Weights: how much does each candidate count? -------------------------------------------

# The logit or log weight of what does not count. e^MASKED is 0, and unlike −∞ it makes no NaN.
# Everything below FAR counts as masked. With unit rows and options within their limits, what counts
# stays above FAR, and what is masked does not overflow float32. Without normalize, and in functions
# of your own, you see to that.
# Section 4 writes MASKED into the matrix of logits in place, behind autograd's back. To autograd a
# masked logit is still the product of two embeddings, and a gradient that arrives there would move
# them. No gradient arrives if each path from a masked logit to the loss goes through a function
# whose gradient at that entry is exactly 0. There are four kinds of such functions.
#   - a softmax in a row that is not all masked; `log_sum` and `_mean` have one
#   - a masked_fill that makes a new tensor, as autograd records it
#   - a clamp
#   - a softplus or a relu of something far below 0
# In a row that is all masked a softmax does not help, so there an objective needs one of the
# others.
MASKED, FAR = -1e30, -1e20


# A rule maps logits (a, any number) to log weights of the same shape. Its parameters are filled in
# by name. They can be
#     logits      the logits to weigh. They are those of candidates. In a second call, which
#                 debiasing makes, they are those of positives
#     candidates  the logits (a, N) of all candidates of these anchors, for thresholds and sums
#     potential   numbers g_j (N,), one for each candidate, to be added to the log weights. They
#                 make the sum of weights over all anchors equal for all candidates. If a rule has
#                 this parameter, section 5 first calls the rule with g = 0, and finds g from what
#                 it returns. For positives g is 0, too. A g of 0 is the float 0.0, and not a tensor
#     t           the temperature. Take this, not the option `temperature`. A block works on its own
#                 copy of a learned temperature, and t is that copy. A rule that takes the option
#                 uses the original. Section 7 notices this, and computes all anchors in one go. The
#                 result is right, but it takes the memory of A·N numbers
#     and any other option by its name.
# What a rule must do:
#   - The weights of an anchor follow from its own row alone, as blocks hold some rows at a time.
#   - Masked logits are −1e30. Their log weights must be below FAR, so that they stay masked. The
#     rule may have a gradient there, but a finite one, as a softmax multiplies it by 0. If a
#     function or its derivative would overflow at −1e30, clamp the logits first, as `transported`
#     does. No masked logit may enter the weight of another candidate.
#   - Take sums, means and minima over the logits above FAR alone. There may be none, as the whole
#     row of an anchor without candidates is masked.
#   - Do not assume that `logits` are among `candidates`. Those of positives can all be lower or
#     higher.
#   - Values and gradients are finite for cosines t · logits from −1 to 1, and 1e-6 beyond, as
#     rounding can bring cosines there.
#   - A rule that takes the potential must return a symmetric matrix if logits are symmetric and
#     g = 0. `_couple` relies on this. For such a rule detach_weights is True by default, and
#     negatives (B, K, D) are an error.
# To add a rule, write its function with positional parameters, and its row in WEIGHTS. If it has an
# option of its own, write an entry in Options. In reference_numpy.py add its formula for candidates
# to RULES, and that for positives to `weigh_alike`. In test_hardneg.py add its options to
# WEIGHT_OPTIONS. TestContrastiveLoss compares this file with reference_numpy.py, gradients
# included. It fails if the matrix of a rule that takes the potential is not symmetric, or if a
# masked logit gets a gradient. TestRows checks that a rule weighs each row alone, that what is
# masked stays masked, and that a rule whose row says "scaled" never drops all candidates of an
# anchor. For positives of the cosine −1, and a little above 1, it checks that value and gradient
# are finite.


def uniform(logits: Tensor) -> Tensor:
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0
    Masked logits keep their −1e30. So log_w + uniform(logits) is masked wherever the logits are
    masked."""
    # hardshrink(x) is 0 if |x| ≤ 1e20, and else x. It is several times as fast as a boolean mask.
    return F.hardshrink(logits.detach(), lambd=-FAR)


def tilted(logits: Tensor, beta: float) -> Tensor:
    """Count near candidates more: w_ij = e^{β s_ij} / (1/N Σ_k e^{β s_ik}), once it is scaled.
    The function returns β s_ij. `weigh` scales the weights of each anchor to mean 1.
    Limits: β = 0 is `uniform`, β → ∞ is `hardest`. Ref: [1] Eq. 2, whose Z_β is this mean over k"""
    log_w = beta * logits
    if beta < 1e-9:  # below 1e-10, β · MASKED would be above FAR; a limit of 1e-9 is safe
        log_w = log_w + uniform(logits)
    return log_w


def hardest(logits: Tensor, candidates: Tensor | None = None) -> Tensor:
    """Count the nearest candidate alone: log w_ij = 0 where s_ij = max_k s_ik, ties included.
    With weights="hardest" a loss scales the weights to mean 1, so the nearest candidate counts N_i
    times, or shares that with its ties. With weights="top" and a tiny alpha a loss keeps the same
    candidate and does not scale, so it counts once. candidates is as in `top`. Ref: [1] Prop. 1,
    App. A.1; [4] Eq. 6"""
    return top(logits, 1e-9, candidates)  # ⌈1e-9 · N⌉ is 1 up to N = 1e9


def top(logits: Tensor, alpha: float, candidates: Tensor | None = None) -> Tensor:
    """Count the upper α quantile: log w_ij = 0 where s_ij ≥ s_i^(α), the ⌈αN⌉-th largest logit.
    The quantile is that of candidates (a, N). If none are given, it is that of the logits. Ties
    with it are kept.
    alpha is at least 1e-9. To keep the k nearest, pass alpha = k / N. Weights are 0 or 1 and not
    scaled, as [4] takes the plain sum over those that are kept.
    Limits: α = 1 is `uniform`, α → 0 keeps the nearest. Ref: [4] Eq. 8, 9"""
    candidates = (logits if candidates is None else candidates).detach()
    n = (candidates > FAR).sum(-1, keepdim=True)
    # In floats 0.07 · 100 exceeds 7, so its ceiling would be 8. So α is counted in whole
    # billionths. int() rounds α down to them. That makes αN smaller by less than N / 1e9, so by
    # less than 1 if N is below 1e9. For α = k / N the product is then above k − 1 and at most k. So
    # its ceiling is k. Rounded up, 2/3 of N = 3 would be 2.000000001, with the ceiling 3.
    billionths = int(alpha * 1e9)
    kept = (-(-n * billionths // 10**9)).clamp_min(1)  # ⌈αN_i⌉
    fewest, most = 1, -(-candidates.shape[-1] * billionths // 10**9)
    if _may_read(kept):
        fewest, most = map(int, kept.aminmax())
    nearest = candidates.topk(most, sorted=fewest < most).values
    if fewest < most:
        threshold = nearest.gather(-1, kept - 1)
    else:
        threshold = nearest.amin(-1, keepdim=True)  # sorting would take twice as long
    return uniform(logits).masked_fill(logits < threshold, MASKED)


# To add a cost, add its row here. A row has the name of a cost, and a function. The function
# computes the cost from the cosine of two unit rows. d² is ‖x − y‖² = 2 − 2 cos.
# Masked pairs come to it with a cosine of −2. So a cost and its gradient must be finite for cosines
# from −2 to 1 + 1e-6. Divided by the smallest ε it must stay below 1e20, since more would count as
# masked. Ref: [2] Eq. 5, VII-C
COSTS = {
    "sqeuclidean": lambda cosines: 1 - cosines,  # ½d²
    "exp": lambda cosines: torch.exp(2 - 2 * cosines),  # e^{d²}
}


def transported(
    logits: Tensor, potential: Tensor, t: float | Tensor, epsilon: float, cost: str
) -> Tensor:
    """Count near candidates more, but give all candidates the same total weight over all anchors.
    This is exact if all anchors have equally many candidates. Otherwise scaling to mean 1 gives
    anchor i the total N_i, and the totals of the candidates are not equal any more.
        w_ij ∝ e^{−C_ij/ε + g_j}, the entropic coupling; scaled to mean 1, w_ij = N P_ij / Σ_k P_ik
    logits are cosines over t, and potential is the g (N,) that `sinkhorn` finds.
    Limits: ε → 0 is optimal transport. ε → ∞ is `uniform` if all anchors have equally many
    candidates, and all candidates equally many anchors, as in a batch. "sqeuclidean" with g = 0 is
    `tilted` with β = t/ε.
    Ref: [2] Eq. 5, Lemma 3. Its Eq. 7 omits e^{g_j}."""
    # a masked logit becomes a cosine of −2, where costs are finite, and `uniform` masks it again
    cosines = t * logits.clamp_min(-2 / t)
    log_kernel = COSTS[cost](cosines) / -epsilon
    return log_kernel + potential + uniform(logits)


def own_rule(logits, weights):
    """Weigh by a function of the user's, and mask what it returns wherever the logit is masked.
    Unlike our rules, it may mix masked columns into others, or have an infinite gradient at −1e30,
    which a softmax does not stop. So its logits are filled again, by a masked_fill that autograd
    records, see MASKED."""
    try:
        log_w = weights(logits.masked_fill(logits < FAR, MASKED))
        _check_result("weights", log_w, logits.shape)
    except Exception as error:
        error.add_note("weights= gets some anchors at a time. log_weights= takes a matrix.")
        raise
    log_w = log_w.to(logits.dtype).clamp_min(MASKED)  # −∞ is masked, too
    return log_w.masked_fill(logits < FAR, MASKED)


# rule: its function, and a word on the mean of an anchor's weights
#     "one"     it is 1 already
#     "scaled"  `weigh` makes it 1 by a softmax; the rule must not drop all candidates of an anchor,
#               as a softmax over a row of equal −1e30 gives each of them the same share
#     "any"     it can be anything, and `weigh` leaves it
WEIGHTS = {
    "uniform": (uniform, "one"),
    "tilted": (tilted, "scaled"),
    "hardest": (hardest, "scaled"),
    "top": (top, "any"),
    "transported": (transported, "scaled"),
}


def by_rule(logits, candidates, potential, t, options):
    """Weigh logits (a, any number) by the chosen rule. `candidates` are the logits (a, N) of the
    candidates of the same anchors."""
    given = {"logits": logits, "candidates": candidates, "potential": potential, "t": t}
    log_w = _fill_in(options["weight_function"], options | given)
    if options["detach_weights"]:
        return log_w.detach()
    return log_w


def weigh(pos, neg, n, anchors, shared, options):
    """Answer question 2. Return three results:
        log weights (a, N) of candidates
        the log of the sum of these weights (a,), or None if nothing is debiased
        log weights (a, M) of positives, or None if nothing is debiased or there is one positive
    The rule weighs a positive like a candidate with the same logit, and with a potential of 0.
    Weights of positives are not scaled, since `debias` divides them by their sum."""
    log_w = by_rule(neg, neg, shared.potential, shared.t, options)
    if options["weight_mean"] == "scaled" or options["tau_plus"] != 0:
        log_n = n.log().clamp_min(MASKED)  # MASKED for an anchor without candidates
    if options["weight_mean"] == "scaled":
        # the softmax of a row without candidates is not masked, and log_n masks it again
        log_w = torch.log_softmax(log_w, -1) + log_n[:, None]
    if anchors.log_weights is not None:
        log_w = log_w + anchors.log_weights
    if options["tau_plus"] == 0:
        return log_w, None, None
    # The sum is N_i as long as the weights have mean 1. If you add something that changes them
    # after they were scaled, name it in the condition that follows, so their sum is computed.
    log_total = log_n
    if options["weight_mean"] == "any" or anchors.log_weights is not None:
        log_total = log_sum(log_w)
    log_w_pos = None
    if pos.shape[1] > 1:  # the weight of a single one cancels
        log_w_pos = by_rule(pos, neg, 0.0, shared.t, options)
    return log_w, log_total, log_w_pos


def takes(function):
    """List the names of a function's parameters."""
    # A decorator such as torch.no_grad keeps the function in __wrapped__. inspect.signature would
    # take thirty times as long
    code = getattr(function, "__wrapped__", function).__code__
    return code.co_varnames[: code.co_argcount]


def _fill_in(function, given):
    """Call a function with what its parameters name."""
    return function(*[given[name] for name in takes(function)])


# ---- 3. Objectives: what is done with the weighted negatives? ----------------------------------
# An objective maps what is known of some anchors to their losses (a,). Its parameters are filled in
# by name. They can be
#     pos            logits (a, M) of positives, MASKED where there is none
#     log_negatives  the log of Σ_j w_j e^{s_j} (a,), debiased; formulas call the sum "negatives".
#                    It is below FAR for an anchor without negatives. Only the objectives that take
#                    it are debiased. The others ignore tau_plus
#     neg, log_w     logits and log weights (a, N) of candidates, below FAR for what does not count.
#                    What is masked in neg is masked in log_w, too, but a rule can drop more in
#                    log_w alone. So log_w tells what counts
#     t              the temperature; t · logits are cosines
#     and any other option by its name.
# What an objective must do:
#   - The loss of an anchor follows from its own row alone.
#   - Send no gradient to masked logits. Autograd does not know that they were masked, so a gradient
#     there would reach the embeddings, see `_mask_`. An anchor without negatives needs care, as its
#     row is all masked. Its gradient with respect to neg, log_w and log_negatives has to be 0.
#     `nce`, `each` and `ppcl` see to that by a softplus, `decoupled` by a masked_fill, and `simple`
#     and `triplet` by the masked_fill of `_mean`.
#   - Values and gradients are finite without negatives, without positives, and for cosines from −1
#     to 1, and 1e-6 beyond because of rounding.
# To add an objective, write its function and its row in OBJECTIVES, and an entry in Options if it
# has an option of its own. Write its formula in reference_numpy.py, too. TestObjectives,
# TestContrastiveLoss and TestExtremes check these points.


def nce(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute noise-contrastive estimation: −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + negatives) ).
    It is 0 without negatives. Limits for one positive, uniform weights and τ⁺ = 0: as t → 0,
    t · nce becomes half of `triplet` on `hardest` with η = 0. As t → ∞, nce becomes
    log(1 + N) + N / ((1 + N) t) · `simple`.
    Ref: [1] Eq. 1, 2, Fig. 5; [2] Eq. 8; [4] Eq. 1, 6, 7, 9"""
    # softplus(x) is log(1 + e^x). Above the threshold it returns x, which is the same there
    return F.softplus(log_negatives - log_sum(pos), threshold=40)


def each(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute `nce` of each positive alone: −1/M Σ_m log( e^{p_m} / (e^{p_m} + negatives) ).
    Ref: [1] Eq. 2, as printed"""
    losses = F.softplus(log_negatives[:, None] - pos, threshold=40)  # (a, M)
    return _mean(losses, uniform(pos))


def ppcl(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute the partially pseudo-labelled loss −1/M Σ_m log(e^{p_m}/(Σ_l e^{p_l} + negatives)).
    It is `nce` + logsumexp_m p_m − mean_m p_m, so it is `nce` for one positive. Ref: [3] Eq. 8"""
    return nce(pos, log_negatives) + log_sum(pos) - _mean(pos, uniform(pos))


def decoupled(pos: Tensor, log_negatives: Tensor) -> Tensor:
    """Compute `nce` without positives in the denominator: log negatives − log Σ_m e^{p_m}.
    It is 0 without negatives. Unlike in `nce`, a near positive keeps its full gradient. For one
    positive and weights of mean 1,
        decoupled at τ⁺ = 0, plus log(1 + 1/N)  =  nce at τ⁺ = 1/(N + 1)
    This does not hold where debiasing takes its floor, see `published`.
    Ref: [12] Eq. 6"""
    return (log_negatives - log_sum(pos)).masked_fill(log_negatives < FAR, 0)


def simple(pos: Tensor, neg: Tensor, log_w: Tensor, t: float | Tensor = 1.0) -> Tensor:
    """Compute the difference of mean cosines: −1/M Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j.
    Without negatives the second sum is 0. [4] multiplies the plain sum over negatives by λ. As a
    mean is taken here, λ is 1/N, and 1/⌈αN⌉ with `top`.
    Ref: [4] Eq. 3; [2] Eq. 9"""
    return t * (_mean(neg, log_w) - _mean(pos, uniform(pos)))


def triplet(
    pos: Tensor, neg: Tensor, log_w: Tensor, margin: float, t: float | Tensor = 1.0
) -> Tensor:
    """Compute the hinge 1/M Σ_m Σ_j w_j max(0, ‖z − z_m‖² − ‖z − z_j‖² + η) / Σ_j w_j.
    The difference of the distances is 2 (cos_j − cos_m). A block of anchors takes memory of a·M·N,
    or of a·N² if labels make positives.
    Ref: [2] IV. At η = 0 on `hardest` it is twice [4] Eq. 6."""
    differences = t * neg[:, None] - t * pos[:, :, None]  # (a, M, N)
    hinges = F.relu(2 * differences + margin)
    return _mean(_mean(hinges, log_w[:, None]), uniform(pos))


def own_objective(pos, neg, log_w, objective):
    """Judge by a function of the user's.
    Its arguments are filled again, for the reason that `own_rule` has."""
    dropped = torch.minimum(neg, log_w) < FAR
    neg, log_w = neg.masked_fill(dropped, MASKED), log_w.masked_fill(dropped, MASKED)
    losses = objective(pos.masked_fill(pos < FAR, MASKED), neg, log_w)
    _check_result("objective", losses, neg.shape[:1])
    return losses.to(neg.dtype)


def _mean(x, log_w):
    """Compute Σ_j w_j x_j / Σ_j w_j over the last dimension. It is 0 where nothing has a weight.
    log_w = uniform(pos) gives the mean over the positives that are present."""
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

# Debiasing. A share τ⁺ of the candidates has the anchor's class, so these are false negatives.
# Their mean of e^s is about that of the positives, and so can be subtracted. In formulas
#     E  = Σ_j w_j e^{s_j} / Σ_j w_j         over the candidates of an anchor
#     E⁺ = Σ_m w⁺_m e^{p_m} / Σ_m w⁺_m       over its positives, weighed by the same rule
# What is left of E is (E − τ⁺ E⁺) / (1 − τ⁺). It may be too little, or negative, as E and E⁺ are
# means over few samples. So `published` has a floor. Then `debias` adds log_total, which is the log
# of Σ_j w_j. In the code log E is log_negatives − log_total.
# Some anchors have no negatives. They have no candidates, or a rule drops them all. In both cases
# log_total is below FAR. Nothing tests log E, as it does not tell this. Without candidates
# log_negatives is −2e30, the sum of a masked logit and a masked log weight, and log_total is −1e30.
# So log E is −1e30. If a rule drops all candidates, log_negatives and log_total are both about
# −1e30. Their difference log E is a mere rounding error of either sign, of up to 1e23. That does no
# harm, as `published` makes a finite number with a finite gradient of any log E.
# These cases come up.
#     anchor                   log E     log E⁺   `published` returns   log_total   their sum
#     ordinary                 finite    finite   what is left          finite      finite
#     with too little left     finite    finite   the floor             finite      finite
#     without positives        finite    −1e30    what is left          finite      finite
#     without candidates       −1e30     finite   the floor             −1e30       below FAR
#     all dropped by a rule    noise     finite   something finite      −1e30       below FAR
#     without either           −1e30     −1e30    the floor             −1e30       below FAR
# `debias` returns the sum. In the last three rows it is below FAR, so the anchor counts as one
# without negatives. If you change `debias`, keep adding log_total after `published`. Without
# positives `answer` makes the loss 0.
# TestDebiased, TestExtremes and TestFunctions go through these cases, with gradients.


def published(log_mean, log_mean_pos, tau_plus, t):
    """Subtract the false negatives that are expected, and return the log of what is left.
        log max( (E − τ⁺ E⁺) / (1 − τ⁺),  e^{−1/t} )
    log_mean is log E, log_mean_pos is log E⁺, and tau_plus is a tensor, all (a,). The results are
    the log of what is left (a,), and a boolean tensor (a,) that is True where the floor applies.
    The floor is the e^s of the cosine −1, and no mean can be below it. Where it applies, the result
    has a gradient in t alone. Ref: [1] Eq. 2. The code in Fig. 5 of [1] bounds the sum of N terms
    by e^{−1/t}. That is too low by the factor N, as a sum of N terms is at least N e^{−1/t}."""
    log_false = tau_plus.log() + log_mean_pos
    nothing_left = log_false >= log_mean
    # Where nothing is left, the log below would get a number of at most 0. The NaN of its gradient
    # would pass through torch.where. So the gap is set to −1 there.
    gap = (log_false - log_mean).masked_fill(nothing_left, -1)
    # log E + log[ (1 − τ⁺E⁺/E) / (1 − τ⁺) ]. Numerator and denominator are multiplied by −1 here,
    # since expm1(gap) is τ⁺E⁺/E − 1
    rest = log_mean + torch.log(torch.expm1(gap) / (tau_plus - 1))
    floor = -1 / t
    clamped = nothing_left | (rest < floor)
    return torch.where(clamped, floor, rest), clamped


def debias(log_negatives, log_total, pos, log_w_pos, n, t, options):
    """Debias log_negatives (a,). log_total (a,) is the log of the sum of weights. The results are
    the debiased log_negatives (a,), and a boolean tensor (a,). It is True where the floor of
    `published` applies and the anchor has negatives."""
    if log_w_pos is None:
        log_mean_pos = log_sum(pos)  # log E⁺, of a single positive
    else:
        # All positives can be below the threshold that `top` takes from candidates. Then each has
        # a log weight of −1e30. Absent positives have that, too, and would get the same share. So
        # uniform(pos) lowers theirs to −2e30. Then their share is 0, and the others share equally.
        shares = torch.log_softmax(log_w_pos + uniform(pos), -1)
        log_mean_pos = log_sum(pos, shares)
    tau_plus = options["tau_plus"]
    # an anchor without candidates has a τ⁺ of 1/2, since 1 would make NaN
    tau_plus = 1 / (1 + n.clamp_min(1)) if tau_plus is None else torch.full_like(n, tau_plus)
    log_mean, clamped = published(log_negatives - log_total, log_mean_pos, tau_plus, t)
    return log_mean + log_total, clamped & (log_negatives > FAR)


# ---- 4. Candidates: who could be a negative of each anchor? ------------------------------------
# For two views of three samples, a1 a2 a3 and b1 b2 b3, the logits of a batch are this matrix. A
# row is an anchor and a column is a candidate. The columns of the anchor's own sample are masked
# (−), and `own` lists these columns. The logit of its positive is kept apart, in `pos`.
#              a1  a2  a3  b1  b2  b3     pos
#         a1   −   s   s   −   s   s      a1·b1
#         a2   s   −   s   s   −   s      a2·b2
#         …
#         b3   s   s   −   s   s   −      b3·a3
# If `negatives` are given, they are the columns, and the rows are a1 a2 a3.
#     To add an argument with a row for each anchor, see `_Anchors`.
#     To add an argument with an entry for each sample, see `_Shared`.
#     To add a source of positives, see the comments below `who`.
#     To add an option that masks, see the table above `_mask_`.
# TestContrastiveLoss and TestNamedPositives compare losses and gradients with reference_numpy.py,
# under random masks, labels, margins and indices.


class _Anchors(NamedTuple):
    """What is known of each anchor. Every tensor has a row for each, so blocks can cut them all.
    A new argument with a row for each anchor needs a field here. Append the argument to the tuple
    `given` in `contrastive_loss`. Unpack it in `_check_call`, and check it there. Unpack it in
    `_line_up`, and fill the field there. If it masks, see `_mask_`, too. New fields go last and
    default to None, as `mine` fills the first ones by position. `_couple` gathers each field over
    ranks. So the new field must have the same shape on all ranks, or be None on all. Add a variant
    to VARIANTS of test_hardneg.py, so that TestGather compares it.
    The field `own` lists the columns of the anchor's own sample. `plain`, a field of `_Shared`,
    says that `answer` knows N_i without counting. `own` has four sources. For each source the table
    says what the entries of a row of `own` are like, and whether `plain` can be True.
        source               each once        −1 occurs   `who` reads positives there   `plain`
        batch                yes              no          no                            can be True
        negatives, no index  there are none   no          no                            can be True
        positive_index       yes, except −1   yes         yes, if V is 1                is False
        `mine`               not ensured      yes         yes                           is False
    In a batch the columns of the positives are in `own`, too, but their logits come from `pos`.
    For positive_index `_each_once` makes entries differ. Otherwise one could be a positive twice.
    In `mine` that does no harm, as only the largest of the positives is used there.
    A new source with `plain` True must have no entry twice and no −1, as `answer` then takes N
    minus the width of `own` for N_i."""

    scaled: Tensor  # (A, D), embeddings over t, whose products with candidates are logits
    pos: Tensor  # (A, V − 1), logits of the positives in other views. No entry of this field may be
    #              MASKED. If it has a column, `answer` assumes that every anchor has a positive.
    #              `who` returns a wider matrix, also called pos. That has these columns, or for a
    #              single view the positives by index, and then the positives by label. Columns that
    #              `who` adds may be MASKED
    own: Tensor  # (A, any number), columns that show the anchor's own sample, or −1 for none. They
    #              are never candidates. If positives_by_index is True, they are its positives
    negatives: Tensor | None = None  # (A, K, D), if each anchor has candidates of its own
    mask: Tensor | None = None  # (A, N), True where a candidate may be a negative
    log_weights: Tensor | None = None  # (A, N)
    labels: Tensor | None = None  # (A,)

    def of(self, rows):
        return self._make(None if x is None else x[rows] for x in self)

    def blocks(self, size):
        """Cut into blocks of `size` anchors."""
        return [self.of(slice(i, i + size)) for i in range(0, len(self.scaled), size)]


class _Shared(NamedTuple):
    """What all anchors share. A shared tensor that requires a gradient should be a field here. If
    `_run_blocks` finds one that is not a field, it gives up blocks, and the whole batch is computed
    in one go. In one process this only takes memory. Over ranks see the rules of section 7.
    A new argument with an entry for each sample, (B,), or (B + K,) with `negatives`, needs two new
    fields. One is in `_Anchors`, like `labels`, and one here, like `candidate_labels`.
        in                     the field of `_Anchors` has           the field of `_Shared` has
        a batch                its B entries, once for each view     `gather` of that field
        a call with negatives  its first B entries, of the anchors   its last K entries
    Let `_check_call` check the argument, and let `_check_negatives` refuse it for (B, K, D). Add it
    to VARIANTS of test_hardneg.py, and to DRAWN of TestContrastiveLoss. New fields go last, and
    have a default."""

    t: Tensor | float  # (), if it is a tensor
    n: int  # N
    candidates: Tensor | None = None  # (N, D), if anchors do not have candidates of their own
    candidate_labels: Tensor | None = None  # (N,)
    potential: Tensor | None = None  # (N,), if candidates and anchors are coupled
    positives_by_index: bool = False  # the columns `own` are the positives
    positives_by_label: bool = False  # candidates of the anchor's label are positives
    batch: bool = False  # True if no `negatives` are given. Then the anchors of all ranks are the
    #                      candidates, which `_couple` relies on, and `own` has no −1
    plain: bool = False  # every anchor has a candidate, only `own` is masked, and `own` has no −1


# What `_line_up` makes of each kind of call, for the anchors of a sample. 2+ is two or more.
#     line   views   negatives   and                 `own`                     positives
#     1      2+      no          labels or nothing   columns of the sample     the other views
#     2      1       no          labels              column of the sample      others of its label
#     3      1       yes         labels              no columns                rows of its label
#     4      2+      yes         labels or nothing   no columns                the other views
#     5      2+      yes         positive_index      rows that it names        the other views
#     6      1       yes         positive_index      rows that it names        these rows
# A row of `negatives` is a column of the matrix. Lines 5 and 6 may have labels, too.
# If labels are given, the objective ppcl takes as positives all columns that have the sample's
# label and are not in `own`. Lines 2 and 3 have these already. In lines 1, 4, 5 and 6 they are
# added. Candidates in `own` are masked. If there are labels, those of the sample's label are
# masked, too.


def _line_up(options, views, given):
    """Arrange the arguments of a call as anchors, and what they share."""
    negatives, positive_index, labels, mask, log_weights, group = given
    project = unit if options["normalize"] else _upcast
    b, v = len(views[0]), len(views)
    n_anchors = v * b  # in a batch
    z = project(torch.cat(views))  # (A, D)
    t = options["temperature"]
    if torch.is_tensor(t):
        t = t.to(z).view(())  # so that the gradient of a t of 16 bits is summed in 32

    # In a batch all views are anchors, and candidates of each other. If negatives are given, the
    # first view alone has anchors. positive_index says which of the negatives show the anchor's
    # own sample. The others are candidates.
    in_batch = negatives is None
    if in_batch:
        anchors, candidates = z / t, gather(z, group)
        positives = [z.roll(-k * b, 0) for k in range(1, v)]  # of the view k places further on
        # Row i of `own` has the columns i, i + B, i + 2·B, … modulo A. For two views of three
        # samples these are the rows 0 3, 1 4, 2 5, 3 0, 4 1, 5 2. Row i takes every third entry of
        # 0 1 2 3 4 5 0 1 2 3 4 5, beginning with entry i.
        columns = torch.arange(2 * n_anchors, device=z.device) % n_anchors
        own = columns.as_strided((n_anchors, v), (1, b))  # (A, V)
        if group is not None:
            own = own + distributed.get_rank(group) * n_anchors
    else:
        anchors, *positives = z.split(b)
        anchors, candidates = anchors / t, project(negatives.to(z.dtype))
        own = z.new_empty(b, 0, dtype=torch.long)
    if positive_index is not None:
        own = _each_once(torch.as_tensor(positive_index, device=z.device).long().view(b, -1))
    products = [(anchors * x).sum(1, keepdim=True) for x in positives]  # (A, 1) each
    # (A, V − 1). Two views have one product, which needs no copy. A single view has no positive
    # yet, and anchors[:, :0] makes this (A, 0).
    pos = products[0] if v == 2 else torch.cat([anchors[:, :0]] + products, 1)

    # What is known of pairs
    candidate_labels = None
    if labels is not None:
        all_labels = torch.as_tensor(labels, device=z.device)
        labels = all_labels[:b].repeat(len(anchors) // b)
        candidate_labels = gather(labels, group) if in_batch else all_labels[b:]
    if mask is not None:
        mask = torch.as_tensor(mask, device=z.device).expand(len(anchors), -1)
    if log_weights is not None:
        # a log weight below FAR would mask a candidate, and one near 1e30 would unmask a masked one
        log_weights = log_weights.detach().to(z).clamp(FAR / 2, -FAR / 2)
        log_weights = log_weights.expand(len(anchors), -1)
    of_each = None
    n = candidates.shape[-2]
    if candidates.ndim == 3:
        of_each, candidates = candidates, None

    # A single view has positives by index, or else by label
    by_index = v == 1 and positive_index is not None
    by_label = labels is not None and (options["by_label"] or (v == 1 and not by_index))
    # If `plain` is True, `answer` takes N − own.shape[1] for N_i, and does not look at the matrix.
    # So whatever else masks is named here, see the table above `_mask_`.
    plain = mask is None and labels is None and positive_index is None
    plain = plain and b > 1 and not _has_margin(options)
    is_shared = plain and not in_batch and of_each is None
    # views[1] exists here. A single view needs labels or positive_index, and either makes `plain`
    # False.
    if is_shared and _may_read(z) and (negatives == views[1][0]).all(-1).any():
        _warn("The first row of views[1] is in negatives, too. Name it in positive_index=.")
    known = _Anchors(anchors, pos, own, of_each, mask, log_weights, labels)
    return known, _Shared(
        t,
        n,
        candidates,
        candidate_labels,
        positives_by_index=by_index,
        positives_by_label=by_label,
        batch=in_batch,
        plain=plain,
    )


def _each_once(index):
    """Keep one of equal entries in each row of index (B, P). The others become −1."""
    ordered, order = index.sort(1)
    ordered[:, 1:].masked_fill_(ordered.diff(dim=1) == 0, -1)
    return ordered.scatter(1, order, ordered)  # in the order that was given


def who(anchors, shared, options):
    """Answer question 1: logits of positives (a, M) and of candidates (a, N), MASKED if they do not
    count."""
    if anchors.negatives is None:
        neg = anchors.scaled @ shared.candidates.T  # (a, N)
    else:
        neg = torch.einsum("ad,and->an", anchors.scaled, anchors.negatives)
    pos = anchors.pos
    if shared.positives_by_index:
        rows = torch.arange(len(neg), device=neg.device)[:, None]
        # Not neg.gather. That saves neg for its backward pass, which would then fail, as `_mask_`
        # changes neg in place. Indexing and masked_fill do not save it.
        pos = neg[rows, anchors.own]  # (a, P)
        pos = pos.masked_fill(anchors.own < 0, MASKED)
    if shared.positives_by_label:
        of_label = neg.masked_fill(anchors.labels[:, None] != shared.candidate_labels, MASKED)
        # `_drop_` takes the anchor's own sample out of `of_label`, unseen by autograd. Even so
        # these entries get no gradient. Objectives weigh positives by a softmax, where the share of
        # these is 0. If no positive is left, `answer` makes the loss 0.
        with torch.no_grad():
            _drop_(of_label, anchors.own, shared.batch)
        pos = torch.cat([pos, of_label], 1)  # (a, M), now with N columns more
    _mask_(neg, pos, anchors, shared, options)  # last, as pos was taken from neg
    return pos, neg


# There is no recipe for another source of candidates. Candidates are either the batch or the rows
# of `negatives`. This choice decides what `own`, `plain`, `batch` and N are. It also decides where
# labels of candidates come from, and which columns show an anchor's own sample. To have both in one
# loss, pass both as `negatives`. Name the rows of the anchor's own sample in positive_index. Then
# the first view alone has anchors. For anchors of the other view, call the loss again.
#
# To add a source of positives, give `_Shared` a flag, as the two sources in `who` have. Set it in
# `_line_up`. Take the positives in `who`, before `_mask_`, by an operation that does not save neg.
# A positive must not be a candidate as well. So mask it, as the paragraph after this one says. Nor
# may it come from two sources, as it would count twice. `_check_call` refuses a single view that
# has neither labels nor positive_index. If your source can give such a view its positives, name it
# in `named` of `_check_call`. Add a line to the table above `_line_up`. Then add the source to
# `_who_is_who` of reference_numpy.py, and to DRAWN of TestContrastiveLoss.
#
# The table below has all that masks, and says which of two flags it makes False. To add an option
# that masks, mask in `_mask_`, and add a row here. Always name the option in `plain` of `_line_up`.
# If it can mask i for j, but not j for i, name it in `symmetric` of `_couple`, too. Then add it to
# DRAWN of TestContrastiveLoss, and to `_who_is_who` of reference_numpy.py. If you forget `plain`,
# N_i is wrong, and with the new entry in DRAWN the tests fail. If you forget `symmetric`, Sinkhorn
# does not converge, and warns of it. TestNamedPositives has a batch that is masked one way, as a
# model for a test of yours.
#                       makes `plain` False   makes `symmetric` False
#     own, in a batch   no                    no
#     negative_mask     yes                   yes
#     labels            yes                   no
#     margins           yes                   yes
#     positive_index    yes                   yes, as it needs `negatives`, and `batch` is False
# log_weights do not mask.


@torch.no_grad()
def _mask_(neg, pos, anchors, shared, options):
    """Mask the logits (a, N) of what is no negative, in place.
    Autograd does not record this change. It is safe under two rules. First, no operation before
    this may have saved neg for its backward pass, as neg.square() would. That raises an error in
    the backward pass. Second, no gradient may arrive at a masked logit, see MASKED. If one does,
    only tests tell you. TestContrastiveLoss tries all entries of WEIGHTS and OBJECTIVES."""
    _drop_(neg, anchors.own, shared.batch)
    if anchors.mask is not None:
        neg.masked_fill_(~anchors.mask, MASKED)
    if anchors.labels is not None:
        neg.masked_fill_(anchors.labels[:, None] == shared.candidate_labels, MASKED)
    if _has_margin(options):
        limit = _limit(shared.t * pos.amax(1, keepdim=True), options)  # amax skips absent ones
        neg.masked_fill_(neg > limit / shared.t, MASKED)


def _drop_(x, own, batch):
    """Mask the columns own (a, any number) of each row of x, in place. −1 changes nothing."""
    if batch:  # there is no −1
        return x.scatter_(1, own, MASKED)
    values = x.new_full(own.shape, MASKED).masked_fill(own < 0, INF)  # min(x, INF) is x
    x.scatter_reduce_(1, own.clamp_min(0), values, "amin")


def _has_margin(options):
    return options["absolute_margin"] is not None or options["relative_margin"] is not None


def _limit(nearest, options):
    """Compute the largest cosine that a negative may have, from that of the nearest positive."""
    limit = torch.full_like(nearest, INF)
    for name, scale in {"absolute_margin": 1, "relative_margin": nearest.abs()}.items():
        if options[name] is not None:
            limit = torch.minimum(limit, nearest - options[name] * scale)
    return limit.masked_fill(nearest < FAR, INF)  # without a positive all may be negatives


@torch.no_grad()
def _statistics(anchors, shared, options):
    """Compute the figures of return_stats. TestStatistics checks them."""
    some = anchors.of(slice(max(1, 2**20 // shared.n)))
    found = answer(some, shared, options)
    n = (found.neg > FAR).sum(1).to(found.neg.dtype)
    # NaN stands for what is absent, which nanmean leaves out
    positive = torch.where(found.pos > FAR, shared.t * found.pos, math.nan)
    negative = torch.where(found.neg > FAR, shared.t * found.neg, math.nan)
    deviation = negative - negative.nanmean(1, keepdim=True)
    log_size = 2 * log_sum(found.log_w) - log_sum(2 * found.log_w)  # log (Σw)² / Σw²
    size = torch.where(found.log_w.amax(1) > FAR, log_size.exp(), math.nan)
    return {
        "clamped": found.lacking[2] / n.new_full((), len(n)),  # a tensor, even if lacking has a 0
        "ess": (size / n).nanmean(),
        "positive": positive.nanmean(),
        "negative": negative.nanmean(),
        "spread": deviation.square().nanmean(1).nanmean().sqrt(),
        "candidates": n.mean(),
    }


# ---- 5. Transport: the coupling that gives each candidate the same total weight ----------------
# A coupling P is a table of how much weight each pair of an anchor and a candidate has. Each anchor
# has the same total, and so has each candidate. These totals are the marginals. So no candidate can
# be the hard negative of all anchors, as it could if each anchor chose alone. Near pairs get more
# weight, since their cost C is low. The coupling is e^{f_i − C_ij/ε + g_j} for some f and g, which
# are called potentials. Finding them is the work of this section.
# Sinkhorn scales the rows and the columns of a matrix K = e^{−C/ε} in turn. It ends when all rows
# have the same sum, and all columns have the same sum. On a small matrix it would be
#     g = torch.zeros(N)
#     for _ in range(steps):
#         f = -torch.logsumexp(log_kernel + g, 1)                   # now rows sum to 1
#         g = log(A / N) - torch.logsumexp(log_kernel + f[:, None], 0)   # now columns sum to A / N
#     plan = torch.exp(f[:, None] + log_kernel + g) / A
# Here the matrix comes in blocks of rows, so that a large one need not be stored.
# TestSinkhorn checks the totals under random masks, and bounds the number of steps. TestGather
# checks that all ranks find one plan.


def sinkhorn(
    log_kernel: Callable[[], Iterable[Tensor]],
    symmetric: bool = False,
    tolerance: float | None = None,
    max_steps: int = 2000,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the entropic coupling with uniform marginals: P_ij = exp(f_i + log_kernel_ij + g_j).
    log_kernel is a function that each step calls. It returns −C/ε (A, N), cut into blocks of rows
    (a, N), as a list, say. Entries that must not be coupled are −1e30. The results are f (A,),
    g (N,) and the error.
    If the kernel has a gradient, each step keeps 2·A·N numbers in memory.

    Rows and columns whose entries are all masked get no share of P, and do not count in A and N.
    Sinkhorn stops when the error Σ_i |Σ_j P_ij − 1/A| is at most `tolerance`. By default that is
    1e-5, and 1e-12 in float64. After max_steps it stops with a warning.

    If the kernel is its own transpose, pass symmetric=True. Then each step ends with the mean
    f = g = (f + g) / 2 [10]. This usually takes fewer steps than symmetric=False. An
    exception is a mask that splits the samples into two groups, and lets each sample be coupled
    with the other group alone. There symmetric=True takes about a third more steps. If the kernel
    is not symmetric, the mean does not converge.

    Embeddings in tight clusters take many steps with symmetric=False, and mostly few with True. A
    mask can force the weight of an allowed pair to 0. Suppose anchor 1 may have candidate 1 alone,
    and their totals in the coupling are equal. Then nothing of candidate 1 is left for other
    anchors. Such masks take many steps, too.
    Ref: [2] Eq. 5"""
    # benchmarks/THEOREMS.md says how fast it converges, and why.
    _check_number("max_steps", max_steps, 1)
    f = g = None
    # A pass through the loop begins with the f and g of the pass before, the old ones. It
    #   - computes log_rows, the log of Σ_j e^{g_j − C_ij/ε} with the old g,
    #   - computes log_columns in the same way, with −log_rows as f,
    #   - checks the old f and g, whose row totals are e^{f + log_rows},
    #   - and, unless these are right, replaces f and g by the new ones.
    # So log_rows checks the old f and g, and gives the new f. A check takes no pass of its own.
    # Here rows sum to 1 and columns to A / N, as in the sketch above.
    for step in range(max_steps + 1):
        log_rows, log_columns = _log_sums(log_kernel(), g)
        n_rows = (log_rows > FAR).sum().clamp_min(1).to(log_rows.dtype)
        n_columns = (log_columns > FAR).sum().clamp_min(1)
        # For the right f and g, e^{f + log_rows} is 1. It is enough to look at the totals of rows.
        # With symmetric=False those of columns have no error after a step. With symmetric=True they
        # have the same error as those of rows, as f = g.
        if step > 0:
            off = torch.expm1(f + log_rows).masked_fill(log_rows < FAR, 0)
            error = off.abs().sum() / n_rows
            if _stops(error, step, max_steps, tolerance):
                break
        # `_log_sums` has computed log_columns with this same −log_rows. Change both together
        f = -_zero_if_masked(log_rows)
        g = (n_rows / n_columns).log() - _zero_if_masked(log_columns)
        if symmetric:
            f = g = (f + g) / 2
    return f - n_rows.log(), g, error  # this is the division by A in the sketch above


def _log_sums(blocks, g):
    """Compute r_i = log Σ_j e^{g_j − C_ij/ε} for each row (A,). Then set f_i = −r_i, and compute
    log Σ_i e^{f_i − C_ij/ε} for each column (N,). A block has rows of −C/ε."""
    log_rows, log_columns = [], None
    for block in blocks:  # (a, N)
        sums = log_sum(block, g)  # (a,)
        log_rows.append(sums)
        sums = log_sum(block, -_zero_if_masked(sums)[:, None], dim=0)  # (N,)
        log_columns = sums if log_columns is None else torch.logaddexp(log_columns, sums)
    return torch.cat(log_rows), log_columns


def _zero_if_masked(x):
    return x.masked_fill(x < FAR, 0)


def _stops(error, step, max_steps, tolerance):
    """Whether Sinkhorn stops here. All ranks couple the same rows in the same blocks. So they have
    the same error, and stop at the same step. Even if rounding differed, nothing would hang, as
    the loop does not communicate. Only g would differ a little. On a GPU the error is read only in
    every eighth step and in the last one, since the host waits for it."""
    if step % 8 and step < max_steps and not _may_read(error):
        return False
    if tolerance is None:
        tolerance = 1e-12 if error.dtype == torch.float64 else 1e-5
    converged = not error.item() > tolerance  # a NaN stops, too, as no step would remove it
    if step == max_steps and not converged:
        _warn(
            f"Sinkhorn stopped after {step} steps with an error above {tolerance:.0e}. Raise "
            "epsilon, or check labels and masks. With symmetric=True the kernel must be symmetric."
        )
    return converged or step == max_steps


def _couple(anchors, shared, group, options):
    """Couple the anchors of all ranks with the candidates → the potential g (N,) of candidates."""
    # Below, `gather` is called for each field. The table above `_over_ranks` says which of
    # these calls run a backward pass. TestGather tries weights with a gradient and without, with
    # blocks and without.
    anchors = _Anchors._make(gather(x, group) for x in anchors)

    def kernel_of(some):
        neg = who(some, shared, options)[1]
        return by_rule(neg, neg, 0.0, shared.t, options)  # −C/ε, as the potential is 0

    # A rule that takes the potential must turn symmetric logits into a symmetric result, see
    # section 2. The table above `_mask_` has what can mask i for j, but not j for i.
    symmetric = shared.batch and anchors.mask is None and not _has_margin(options)
    size = max(1, _pairs_in_a_block(anchors) // shared.n)
    kernel = functools.partial(map, kernel_of, anchors.blocks(size))
    has_gradient = torch.is_grad_enabled() and not options["detach_weights"]
    with torch.set_grad_enabled(has_gradient):
        if has_gradient or len(anchors.scaled) * shared.n <= 2**24:  # 64 MB in float32
            kernel = functools.partial(iter, list(kernel()))  # stored
        return sinkhorn(kernel, symmetric)[1]  # each step computes the kernel, if it is not stored


# ---- 6. Finding: which samples to take as negatives --------------------------------------------
# The tests are TestMine and TestDraw. training/test_ranks.py compares `mine` over ranks.


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
    group: distributed.ProcessGroup | None = None,
):  # the type of the result depends on scores, which would need overloads
    """Find the k documents nearest to each query that do not answer it: hard negatives.
    queries (n, D), documents (N, D), any floats → indices of documents (n, k), nearest first. −1
    stands for none.

    positives       (n,), or (n, P) padded with −1. Rows of the documents that answer a query. They
                    are not taken. None: document i answers query i.
    labels          (N,). A document with the label of an answer is not taken.
    absolute_margin, relative_margin   as in `contrastive_loss`, measured from the nearest document
                    that answers the query
    skip            How many of the nearest documents to leave out. Answers are left out anyway, and
                    are not counted.
    scores          also return the cosines (n, k), −∞ for none
    normalize       compare by cosines. With False it compares by inner products, and `scores`
                    returns these.
    group           A process group of torch.distributed, whose ranks share the work. All of them
                    pass the same arguments. Each rank answers a share of the queries, and all ranks
                    get the results of all queries.
    To train on rows = mine(…), embed the texts or images of these documents again, with a gradient.
    Pass these embeddings (n, k, D) as negatives=, and rows >= 0 as negative_mask=.
    Time grows as n·N·D. Memory holds unit documents and a block of cosines, of 16 MB in float32 or
    of 64 rows, whichever is more."""
    n, size, device = len(queries), len(documents), queries.device
    _check_tensor("queries", queries, "float", ("n", "D"))
    _check_tensor("documents", documents, "float", ("N", queries.shape[1]))
    _check_number("k", k, 1)
    _check_number("skip", skip, 0)
    _check_index("positives", positives, size, n)
    if positives is None:
        if n > size:
            raise InvalidArgument(f"documents has {size} rows for {n} queries. Give positives=.")
        positives = range(n)
    positives = torch.as_tensor(positives, device=device).long().view(n, -1)
    _check_tensor("labels", labels, "", (size,))

    with _autocast_off(device.type):
        project = unit if normalize else _upcast
        queries = project(queries)
        documents = project(documents).to(queries.dtype)
        _check_finite("queries", queries)
        _check_finite("documents", documents)
        # This is question 1 of a loss, at t = 1. Queries are cut into blocks. Documents are not, as
        # any of them may be the nearest answer, from which margins are measured.
        anchors = _Anchors(queries, queries[:, :0], positives)
        if group is not None:
            anchors = anchors.of(_share(n, group))
        shared = _Shared(1.0, size, documents, positives_by_index=True)
        options = resolve({"absolute_margin": absolute_margin, "relative_margin": relative_margin})
        # one tensor for all blocks, as many small ones would fragment the memory that blocks reuse
        nearest = queries.new_full((len(anchors.scaled), k + skip), -INF)
        index = nearest.long()
        rows = max(64, 2**22 // size)
        parts = anchors.blocks(rows), nearest.split(rows), index.split(rows)
        for some, values, places in zip(*parts, strict=True):
            cosines = who(some, shared, options)[1]  # (a, N)
            if labels is not None:
                # A query has the labels of its answers, which can be several. So `who` cannot mask
                # them, as it takes one label for each anchor.
                labels = torch.as_tensor(labels, device=device)
                for column in some.own.unbind(1):  # (a,)
                    of_label = labels[column, None] == labels
                    cosines.masked_fill_(of_label & (column >= 0)[:, None], MASKED)
            values[:, :size], places[:, :size] = cosines.topk(min(k + skip, size))
    nearest, index = (gather(x, group)[:n, skip:] for x in (nearest, index))
    index = index.masked_fill(nearest < FAR, -1)  # where nothing was found it has any number
    nearest = nearest.masked_fill(nearest < FAR, -INF)
    if scores:
        return index, nearest
    return index


def draw(log_w: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw k distinct negatives for each anchor, one after the other. Among those that are left,
    candidate j is drawn with a probability proportional to w_ij.
    log_w (A, N), at most −1e20 for what must not be drawn → indices (A, k), for
    negatives=rows[indices].
    To prefer hard negatives, set the logits of the anchor's own sample to −1e30, and pass
    log_w = tilted(logits, β). Use uniform weights in the loss, since hard ones are drawn more
    often already. A row with fewer than k negatives is an error, but a GPU does not look for it."""
    _check_tensor("log_w", log_w, "float", ("A", "N"))
    _check_number("k", k, 1)
    log_w = _upcast(log_w)
    if _may_read(log_w):
        if log_w.isnan().any():
            raise NotFinite("log_w has NaN.")
        fewest = (log_w > FAR).sum(-1).amin()
        if k > fewest:
            raise InvalidArgument(f"k is {k}, but a row of log_w has {fewest} above −1e20.")
    # the largest of log w_j − log(exponential noise) is that of j with probability w_j / Σ_l w_l
    noise = torch.empty_like(log_w).exponential_(generator=generator)
    noise = noise.log().clamp_min(-99)  # without the clamp −∞ − log 0 would be NaN
    return (log_w - noise).topk(k).indices


# ---- 7. Large batches and ranks: the same numbers in linear memory, over processes -------------
# The logits of a large batch do not fit into memory. So they are computed for a block of anchors at
# a time. While the matrix of a block is there, its gradient is computed as well, and added to the
# gradient of the embeddings. Then the matrix is dropped. Later, when autograd asks for the gradient
# of the loss, it gets what was kept. With "none" every anchor has a loss of its own. How the caller
# will weigh these is not known yet. So the backward pass computes the blocks again. If you change
# this section, TestLargeBatches compares blocks with the whole batch, measures their memory, and
# compiles them. It also differentiates losses by torch.func. TestGather compares ranks with one
# process.
#     _evaluate    calls `answer` for the whole batch, or calls `_in_blocks`
#     _in_blocks   chooses how the gradient of blocks is found, and attaches it to the result
#     _run_blocks  goes through the blocks, for losses alone, or for their gradient as well
# What a change has to keep with several ranks stands above `_over_ranks`.


def _evaluate(anchors, shared, group, options):
    """Compute the losses of all anchors, (A,), or their mean or sum over all ranks.
    If you add a term for each anchor, add it in `answer`. Here value can be a sum already."""
    n_anchors = len(anchors.scaled)
    size = _block_size(anchors, shared, options)
    if size > 0:
        value, lacking = _uncompiled(_in_blocks, anchors, shared, options, size)
    else:
        value, lacking = answer(anchors, shared, options)[:2]
    if _may_read(value):
        _warn_of(lacking, n_anchors, options)
    if group is not None:
        # A function of the user's may leave a field unused on one rank. The backward pass of the
        # field's `gather` would not run there, and other ranks would wait for it. So add 0, which
        # is the sum of an empty slice of each field. With that all fields are in the graph.
        for x in _learned(anchors + shared):
            value = value + x.flatten()[:0].sum()
    if options["reduction"] == "none":
        return value
    # In blocks value is a sum already, and sum() leaves it as it is. count is the number of anchors
    # with a positive. To divide a mean by another number, such as a sum of weights of anchors, let
    # it take the place of count here.
    value, count = value.sum(), n_anchors - lacking[0]
    if group is not None:
        value, count = _over_ranks(value, count, group)
    if options["reduction"] == "mean":
        value = value / (count + (count == 0))  # 0 if no anchor has a positive
    # If you add a term that is one number x, such as a penalty, add it to value here. With "none"
    # there can be no such term, as the losses were returned above. With a group of R ranks add
    # `_over_ranks(x, 0, group)[0] / R` instead. Its value is the mean of x over ranks. Once DDP has
    # averaged the gradients of ranks, they are those of this mean, too.
    return value


def _warn_of(lacking, n, options):
    """Warn if no anchor has a positive or a candidate, or if debiasing leaves most of them nothing.
    The third warning is left out for the default τ⁺, as trained anchors normally reach the
    floor."""
    no_positive, no_candidate, clamped = lacking
    if no_positive == n:
        _warn(f"None of {n} anchors has a positive. Check labels and positive_index.")
    if no_candidate == n:
        _warn(f"None of {n} anchors has a candidate. Check labels, masks and positive_index.")
    if options["tau_plus"] and 2 * clamped > n:
        _warn("Debiasing takes its floor for most anchors. Raise temperature or lower tau_plus.")


def _block_size(anchors, shared, options):
    """Choose the number of anchors in a block. 0 takes all at once."""
    if torch._C._are_functorch_transforms_active():  # torch.func cannot pass through blocks
        return 0
    if options["block_size"] is not None:
        return options["block_size"]
    pairs = _pairs_in_a_block(anchors)
    # Any number would give the same result up to rounding. A small batch is faster without blocks.
    # As a single block, 2^14 pairs take 1.3 times as long as without blocks, and 2^18 pairs 1.1.
    if len(anchors.scaled) * shared.n <= pairs / 4:
        return 0
    return max(64, pairs // shared.n)


def _pairs_in_a_block(anchors):
    """Choose how many pairs are worked on at once. 4 MB in float32 fit into a CPU's cache. A GPU
    needs more, as each block costs it a launch of every operation."""
    return 2**20 if anchors.scaled.device.type == "cpu" else 2**25


def _in_blocks(anchors, shared, options, size):
    """Compute losses block by block → losses (A,) or their sum, and what anchors lack.
    The gradient comes in three ways.
        a function of the user's learns   `answer` takes all anchors at once, as without blocks
        reduction is mean or sum          the gradient was found while the matrix of a block was
                                          in memory, and is kept for the backward pass
        reduction is "none"               the backward pass computes each block again"""
    run = functools.partial(_run_blocks, anchors, shared, options, size)
    summed = options["reduction"] != "none"
    ones = torch.ones_like(anchors.scaled[:, 0])
    found = run(ones if summed and torch.is_grad_enabled() else None)
    if found is None:
        return answer(anchors, shared, options)[:2]
    value, lacking, gradients = found
    inputs = _learned(anchors + shared)  # gradient k belongs to input k, see `_learned`
    if summed:
        return _Attach.apply(value.sum(), _times, gradients, *inputs), lacking
    # `run` will not return None, as it did not do so just now, for the same blocks.
    tensors = [x for x in anchors + shared if torch.is_tensor(x)]
    return _Attach.apply(value, lambda grad, _: run(grad)[2], tensors, *inputs), lacking


def _run_blocks(anchors, shared, options, size, grad_losses):
    """Compute losses (A,), what anchors lack, and the gradients of grad_losses · losses, by blocks.
    Each loss is multiplied by its entry of grad_losses (A,) before it is differentiated. For a sum
    these are ones. A mean is divided later, in `_evaluate`. If grad_losses is None, no gradients
    are computed. A function of the user's can have parameters that learn. Their gradient would be
    missing here, so then the result is None. This function is called in four ways.
        reduction      pass                grad_losses      grad mode in the loop   what is used
        any            forward, no_grad    None             off                     losses, lacking
        mean or sum    forward             ones             on                      all
        "none"         forward             None             on                      losses, lacking
        "none"         backward            from autograd    on                      gradients"""
    # one tensor for all blocks, as many small ones would fragment the memory that blocks reuse
    losses, lacking = torch.empty_like(anchors.scaled[:, 0]), [0, 0, 0]
    of_anchors = [torch.zeros_like(x) for x in _learned(anchors)]
    # The caller may have turned autocast on before the backward pass.
    off = _autocast_off(losses.device.type)
    # A forward pass keeps the caller's grad mode. For "none" it computes no gradient, but must not
    # turn the mode off, as `_leaves` reads the graph. In a backward pass autograd has turned the
    # mode off, but the gradient of grad_losses · losses needs it on.
    with torch.set_grad_enabled(torch.is_grad_enabled() or grad_losses is not None), off:
        # The tensors of `everyone` are leaves that all blocks share. Compute nothing from them
        # before the loop. Otherwise all blocks would share the graph of what you computed, and the
        # first backward pass would free it.
        everyone = _copy(shared)
        for start in range(0, len(losses), size):
            rows = slice(start, start + size)
            some = _copy(anchors.of(rows))
            found = answer(some, everyone, options)
            # The graph must end in the copies alone. Another leaf is a parameter that is hidden in
            # a function of the user's. Its gradient would be missing in the result. Look for it
            # before the backward pass, which would add to the parameter's gradient. If only a
            # later block uses the parameter, earlier blocks have run their backward passes by then.
            # Their gradients are in copies, and are dropped with these. TestFunctions has such
            # functions, with parameters that only the losses of some anchors depend on.
            if not _leaves(found.losses.grad_fn) <= {id(x) for x in some + everyone}:
                return None
            losses[rows] = found.losses.detach()
            lacking = [a + b for a, b in zip(lacking, found.lacking, strict=True)]
            if grad_losses is not None and found.losses.requires_grad:
                found.losses.backward(grad_losses[rows])
                for gradient, x in zip(of_anchors, _learned(some), strict=True):
                    gradient[rows] = 0 if x.grad is None else x.grad
    # in the order of `_learned(anchors + shared)`; a shared one is None if no block used it
    return losses, lacking, of_anchors + [x.grad for x in _learned(everyone)]


def _copy(part):
    """Copy anchors, or what they share. Tensors with a gradient begin a graph of their own."""
    return part._make(
        x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in part
    )


def _learned(part):
    """List the tensors that get a gradient, in the order of the fields. `_in_blocks` lists inputs
    by this, and `_run_blocks` lists their gradients, so both have the same order."""
    return [x for x in part if torch.is_tensor(x) and x.requires_grad]


def _leaves(node):
    """Find the ids of the leaf tensors to which the graph of a node sends a gradient."""
    seen, new = {None}, {node}
    while new := new - seen:
        seen |= new
        new = {before for node in new for before, _ in node.next_functions}
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


class _Attach(torch.autograd.Function):
    """Attach inputs to a value. In the backward pass find(grad, tensors) returns a gradient or None
    for each of the inputs, in their order. `_in_blocks` uses it in two ways.
        reduction     find                        tensors
        mean or sum   `_times`                    the gradients, which are known
        "none"        computes the blocks again   all tensors of the blocks. `find` has them
                                                  already, and ignores this argument. Saving
                                                  them lets autograd raise an error if the
                                                  caller changes one of them in place"""

    @staticmethod
    def forward(ctx, value, find, tensors, *inputs):
        ctx.find = find
        ctx.save_for_backward(*tensors)
        return value.clone()  # so that the caller may change it in place

    @staticmethod
    def backward(ctx, grad):
        _only_once()
        return None, None, None, *ctx.find(grad, ctx.saved_tensors)


def _times(grad, gradients):
    """Multiply known gradients of a sum by that of the sum. Those that are None stay None."""
    return [None if x is None else grad * x for x in gradients]


def _only_once():
    """Stop a backward pass that would itself be differentiated."""
    if torch.is_grad_enabled():  # in a backward pass only create_graph=True enables gradients
        raise RuntimeError(
            "A loss in blocks or over ranks cannot be differentiated twice. In one process give it "
            "block_size=0."
        )


def _uncompiled(function, *arguments):
    """Call a function without compiling it. In compiled code this is a graph break, on purpose.
    Blocks call backward() and look at the graph, and Sinkhorn reads a value to stop."""
    if torch.compiler.is_compiling():
        function = torch.compiler.disable(function)  # as a decorator it would slow down the import
    return function(*arguments)


# Ranks. If your change only computes with tensors that `answer` gets already, you can skip this
# text. After any other change run TestGather.
#     To add a term of the loss, see the comments in `_evaluate`.
#     To add a reduction, see the last paragraph of this text.
#     To add a check, see the head of section 8.
#     To add a tensor that requires a gradient, see the paragraph below the table of `gather`.
# With a group there are two rules.
#   - In a call of the loss, three things communicate. They are the checks of section 8 on a CPU,
#     the calls of `gather` in `_line_up` and `_couple`, and `_over_ranks` unless reduction is
#     "none". All ranks use the same options, and reach these in the same order.
#   - In the backward pass of a loss `gather` alone communicates. Each call of `gather` has a
#     backward pass of its own. All ranks must run it, or none. If they did not agree, some would
#     wait forever, and TestGather would stop after five minutes. So decide for each call whether
#     all ranks run it, or no rank.
#       No rank runs it if the tensor has no gradient, or if you use the result only under no_grad.
#       All ranks run it if the result is a field of the `_Anchors` or the `_Shared` that
#       `_evaluate` gets, or if such a field is computed from it. A function of the user's may
#       ignore a field. So `_evaluate` adds an empty slice of each of these fields to the loss.
#     `_evaluate` gets the anchors of its own rank. `_couple` gathers copies of their fields, and
#     these copies stay in `_couple`. All that leaves it is the field `potential`, which is computed
#     from the copy of `scaled`. So the slice of `potential` makes all ranks run the backward pass
#     for that copy. For the other copies no rank runs it, and the table says why.
#
# This table has all calls of `gather` that concern a loss. It leaves out checks, whose calls have
# no gradient.
#     `gather` of               in            its backward pass runs
#     candidates                `_line_up`    on all ranks, as they are a field
#     rows for `negatives`      user's code   on all ranks, as candidates are computed from them
#     labels of candidates      `_line_up`    never, as they have no gradient
#     `scaled`                  `_couple`     on all ranks, as the field `potential` is computed
#                                             from it; never if weights are detached, as then the
#                                             potential has no gradient
#     `pos`                     `_couple`     never, as `_mask_` reads it under no_grad, and
#                                             `kernel_of` drops the pos of `who`
#     `negatives`               `_couple`     never, as `_check_negatives` refuses (B, K, D)
#     other fields              `_couple`     never, as they have no gradient
#
# To add a tensor that requires a gradient, make it a field of `_Anchors` or `_Shared`. If it has a
# row for each candidate, gather it in `_line_up`, and add a line to this table. If it has a row for
# each anchor, `_couple` gathers it, as it gathers all fields of `_Anchors`. `kernel_of` there must
# use it on all ranks, or on none. Say which in a line of this table. Then add a variant to the
# tests, in which the tensor has a gradient. If a field has no variant, TestGather names it and
# fails. If a tensor is not gathered, its variant fails.
#
# Losses over ranks may be compiled. If a new argument is gathered, pass it in the compiled case of
# TestGather as well. Code that communicates needs no `_uncompiled`, unless it reads values.
# TestGather runs on CPUs alone. On a GPU the checks of section 8 do not communicate. All else
# communicates in the same way. If you have two GPUs, compare the losses of train.py under torchrun
# with those of one process.
#
# The order of calls. You may call `gather` in any order that is the same on all ranks. All gathered
# tensors with a gradient have to be on one device. Then the backward passes of `gather` run in
# the reverse order of the calls, on all ranks. This is why. Each operation of the forward pass
# makes a node. A node can run once the nodes of all operations that used its result have run. These
# operations came later. Of the nodes that can run, autograd takes the one that was made last. So it
# goes through the forward pass in reverse. TestGather checks this. One kind of node does not wait
# for its turn. It adds up the gradient of a parameter, and runs as soon as it can. It does not
# change the order of the others.
#   - One rank may give up blocks while others keep them. Then the nodes between the backward passes
#     of `gather` differ from rank to rank. But none of them communicates. Nor does the backward()
#     of `_run_blocks`, as its graph ends at copies.
#   - A SyncBatchNorm in the encoder communicates. It is an operation like others. With micro_batch,
#     see section 12, each part of a batch is embedded again in its own backward pass. There it
#     communicates again, in the same order on all ranks.
#   - DDP sends the gradient of a parameter once it is complete. That is as soon as the backward
#     pass has gone through the operation that used the parameter first in the forward pass. All
#     ranks have to use the same parameters, those of a user's function included.
#   - Compiled code has an order of its own. All ranks have the same, as they compile the same code.
#
# How does the gradient of R ranks become that of one process? Let L_r be the sum of the losses of
# the anchors of rank r.
#   - The loss of all ranks is Σ_r L_r. For a mean it is divided by the number of all anchors that
#     have a positive. Each rank returns this loss.
#   - The embeddings of a rank are in the losses of all ranks, as candidates. `gather` sums their
#     gradients over ranks in its backward pass.
#   - DDP, or `_average` in section 10, then takes the mean over ranks. This divides by R. To undo
#     that, `_over_ranks` gives the backward pass R · L_r.
#   - With "none" the caller takes the mean of the losses of his own rank. The mean of R such means
#     is the mean over all anchors already, so nothing is multiplied. Anchors without a positive
#     count there, with a loss of 0.
#
# A new term of the loss has to keep to this. TestGather compares gradients of several ranks with
# one process. A new reduction that is a multiple of a sum goes into the end of `_evaluate`. One
# that is not, such as a maximum, cannot be added, as blocks return sums, and as anchors without a
# positive have a loss of 0. Users who want a maximum take "none", and reduce the losses themselves.


def _over_ranks(value, count, group):
    """Sum a value L_r and a count over ranks. The gradient is that of R · L_r, for R ranks, as
    explained above."""
    totals = torch.stack([value.detach(), torch.zeros_like(value) + count])
    distributed.all_reduce(totals, group=group)
    scaled = distributed.get_world_size(group) * value
    return totals[0] + (scaled - scaled.detach()), totals[1]  # the gradient is that of `scaled`


class _Gather(torch.autograd.Function):
    """Concatenate rows over ranks, and sum their gradient over ranks in the backward pass. Both
    passes communicate, see the rules above. In each call the tensors of all ranks have the same
    shape and the same requires_grad."""

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
        ranks, rank = distributed.get_world_size(ctx.group), distributed.get_rank(ctx.group)
        return grad.chunk(ranks)[rank], None


def gather(x: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    """Concatenate the rows of all ranks, in their order. The gradient is summed over ranks.
    To use rows of all ranks as negatives, call contrastive_loss with group=group,
    negatives=gather(rows, group) and positive_index=rank * len(rows) + i. Here i (B,)
    says which rows of this rank show its samples, so rows[i[b]] shows sample b. Where none does,
    let positive_index be −1. All ranks need equally many rows."""
    if group is None or x is None:
        return x
    return _Gather.apply(x.contiguous(), group)


def _share(n, group):
    """List the rows of n that this rank works on. If the ranks do not divide n, the first rows come
    again at the end. Then all ranks get equally many. So `gather(results, group)[:n]` has the
    results of all rows."""
    ranks = distributed.get_world_size(group)
    rows = torch.arange(-(-n // ranks) * ranks) % n
    return rows.chunk(ranks)[distributed.get_rank(group)]


# ---- 8. Numerics and checks --------------------------------------------------------------------
# Compiled code checks shapes and options, too. It does not check values, and neither does a GPU, as
# the host must not wait for it. So read no value without `_may_read`. In sections 1 to 8 Sinkhorn
# alone is an exception, see `_stops`. TestLargeBatches compiles losses, TestReadyForAGPU counts
# what the host reads, and TestInvalidArguments has the errors. With ranks, a check that fails on
# one rank alone leaves the others waiting in their next `gather`. They wait until the launcher ends
# them. For most arguments we accept that. Two checks look for what is likely to differ between
# ranks. First `_check_ranks` compares the number and the shape of the views, and looks for NaN and
# inf. Then `_check_negatives` compares rows (K, D) that all ranks have to share. A check that
# communicates must run on all ranks. So it may depend on the device, on which arguments are given
# and on how many dimensions they have, but not on values.


def unit(x: Tensor) -> Tensor:
    """Project rows (..., D) to the unit sphere: z = x / ‖x‖, in float32 or float64.
    A zero row stays 0, and its gradient passes unchanged. The squares of entries must not overflow.
    In a row that is not 0, at least one square must not underflow."""
    x = _upcast(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / (norm + (norm == 0))


def _autocast_off(device):
    """Turn autocast off, if it is on. Turning it off where it is off would take time, too."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _upcast(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_sum(x: Tensor, y: Tensor | None = None, dim: int = -1) -> Tensor:
    """Compute log Σ_j e^{x_j + y_j} of finite numbers. That of a single x is x itself."""
    if y is None:
        if x.shape[dim] == 1:
            return x.squeeze(dim)
        y = x.new_zeros(())
    if torch._C._are_functorch_transforms_active():  # torch.func cannot pass through _LogSum
        return torch.logsumexp(x + y, dim)
    return _LogSum.apply(x, y, dim)[0]


class _LogSum(torch.autograd.Function):
    """Compute log Σ e^{x + y} and the shares e^{x + y} / Σ, faster than torch.logsumexp.
    TestLargeBatches differentiates it twice."""

    @staticmethod
    def forward(ctx, x, y, dim):
        total = x + y
        largest = total.amax(dim)
        # softmax is one fused pass, in place. Its largest share is 1 / Σ e^{total − largest}, so
        # log Σ e^total is largest − log(largest share).
        shares = torch.softmax(total, dim, out=total)
        ctx.dim, ctx.shapes = dim, (x.shape, y.shape)
        ctx.set_materialize_grads(False)
        # To differentiate the backward pass, autograd must know how the shares depend on x. It
        # knows this of a tensor that forward returns, but not of one that is only saved. So the
        # shares are returned. No caller uses them.
        ctx.save_for_backward(shares)
        return largest - shares.amax(dim).log(), shares

    @staticmethod
    def backward(ctx, grad_sum, grad_shares):
        (shares,) = ctx.saved_tensors
        gradient = 0 if grad_sum is None else grad_sum.unsqueeze(ctx.dim)
        if grad_shares is not None:
            gradient = gradient + grad_shares - (grad_shares * shares).sum(ctx.dim, keepdim=True)
        grad_total = shares * gradient
        return *(grad_total.sum_to_size(shape) for shape in ctx.shapes), None


def _may_read(x):
    """Whether the host may read values. On a CPU that is free. For a GPU it would have to wait."""
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


# Allocate 31 MiB, and free them at once. From then on glibc keeps freed memory up to that size, and
# uses it again. Otherwise it would return the matrix of each block to the operating system. Large
# losses would then take up to 1.24 times as long. The most that glibc allows is 32 MiB. If float64
# is torch's default dtype, these are 62 MiB, which is above that limit and has no effect. No result
# depends on it.
torch.empty(31 * 2**18, device="cpu")

DEFAULTS, ALLOWED, TEXTS = {}, {}, {}  # of options
for _name, _hint in get_type_hints(Options, include_extras=True).items():
    DEFAULTS[_name], ALLOWED[_name], TEXTS[_name] = _hint.__metadata__


def _words_of(allowed):
    """Say in words what an option may be."""
    if not isinstance(allowed, list):
        return f"one of {', '.join(map(str, allowed))}"
    low, high = allowed
    kind = "a whole number" if isinstance(high, int) else "a number"
    return f"{kind} from {low:g} to {high:.9g}"


def _explained():
    """Explain all options, for `help`."""
    entries = ["Options"]
    for name, text in TEXTS.items():
        indented = inspect.cleandoc(text).replace("\n", "\n    ")
        entries.append(f"{name} = {DEFAULTS[name]!r}, {_words_of(ALLOWED[name])}\n    {indented}")
    return "\n".join(entries)


contrastive_loss.__doc__ = f"{inspect.getdoc(contrastive_loss)}\n\n{_explained()}"
ContrastiveLoss.__doc__ = f"{inspect.getdoc(ContrastiveLoss)}\n\n{_explained()}"


def resolve(given):
    """Check the options of a call, and fill in those that are left open. Add four entries that are
    no options. They are `weight_function` and `weight_mean`, from the row of WEIGHTS, and
    `objective_function` and `by_label`, from the row of OBJECTIVES."""
    options = DEFAULTS | given
    for name, value in given.items():
        if name not in DEFAULTS:
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, DEFAULTS)}")
        if value is not None or DEFAULTS[name] is not None:
            _check_option(name, value)
    of_loss = PRESETS[options["loss"]]
    for name, value in zip(("weights", "objective", "tau_plus"), of_loss, strict=True):
        if options[name] is None:
            options[name] = value
    weights, objective = options["weights"], options["objective"]
    row = (own_rule, "any") if callable(weights) else WEIGHTS[weights]
    options["weight_function"], options["weight_mean"] = row
    row = (own_objective, False) if callable(objective) else OBJECTIVES[objective]
    options["objective_function"], options["by_label"] = row
    if "log_negatives" not in takes(options["objective_function"]):
        options["tau_plus"] = 0.0  # the others are not debiased
    if options["detach_weights"] is None:
        options["detach_weights"] = "potential" in takes(options["weight_function"])
    return options


def did_you_mean(name, known):
    """Name what was perhaps meant."""
    similar = difflib.get_close_matches(str(name), map(str, known), 1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def _check_option(name, value):
    allowed = ALLOWED[name]
    if isinstance(allowed, list):
        if name == "temperature" and torch.is_tensor(value) and value.numel() == 1:
            value = value.item() if _may_read(value) else 1.0
        _check_number(name, value, allowed[0], allowed[1])
    elif callable(value) and name in ("weights", "objective"):
        return
    elif not (isinstance(value, str | bool) and value in allowed):
        _require(False, name, _describe(value), _words_of(allowed) + did_you_mean(value, allowed))


def _check_number(name, value, low, high=10**18):
    """Check a number in [low, high]. It has to be whole if high is an int."""
    kind = numbers.Integral if isinstance(high, int) else numbers.Real
    if not (isinstance(value, kind) and low <= value <= high):
        # described only if it fails, as torch.compile cannot trace repr() of a number that varies
        _require(False, name, _describe(value), _words_of([low, high]))


def _check_call(options, views, given):
    """Check that the arguments of a call fit together."""
    negatives, positive_index, labels, mask, log_weights, group = given
    named = labels is not None or positive_index is not None
    if len(views) < 2 and not (views and named):
        raise InvalidArgument(
            f"views has length {len(views)}. Give two or more (B, D), or one with labels=, or one "
            "with negatives= and positive_index=."
        )
    shape = "B", "D"
    for i, view in enumerate(views):
        _check_tensor(
            f"views[{i}]", view, "float", shape, hint="; labels go in labels=", required=True
        )
        shape = view.shape
    is_group = group is None or isinstance(group, distributed.ProcessGroup)
    _require(is_group, "group", repr(group), "a process group of torch.distributed")
    if group is not None and _may_read(views[0]):
        _check_ranks(views, group)
    b, k = len(views[0]), 0
    if negatives is None:
        n_anchors = b * len(views)
        n = n_anchors if group is None else n_anchors * distributed.get_world_size(group)
        if positive_index is not None:
            raise InvalidArgument("positive_index names rows of negatives, but there are none.")
    else:
        n_anchors = b
        n = k = _check_negatives(negatives, views, options, labels, group)
    _check_tensor(
        "labels", labels, "", (b + k,), hint=f" for {b} samples and {k} rows of negatives"
    )
    _check_index("positive_index", positive_index, n, b)
    _check_tensor("negative_mask", mask, "bool", (n_anchors, n), (n,))
    _check_tensor("log_weights", log_weights, "float", (n_anchors, n), (n,))


def _check_ranks(views, group):
    """Compare shapes over ranks, and look for NaN and inf. With unlike shapes ranks would wait."""
    here = [len(views), *views[0].shape]
    finite = all(view.isfinite().all() for view in views)
    everywhere = gather(torch.tensor([here + [finite]]), group).tolist()
    for rank, (*there, finite) in enumerate(everywhere):
        if there != here:
            raise InvalidArgument(
                f"views differ between ranks. Rank {rank} has {there} views, rows and dimensions, "
                f"and this one has {here}."
            )
        if not finite:
            raise NotFinite(f"views of rank {rank} have NaN or inf.")


def _check_negatives(negatives, views, options, labels, group):
    """Check negatives (K, D) or (B, K, D) → K."""
    b, d = views[0].shape
    _check_tensor("negatives", negatives, "float", ("K", d), (b, "K", d))
    if negatives.ndim == 3:
        if labels is not None or "potential" in takes(options["weight_function"]):
            raise InvalidArgument(
                "With negatives (B, K, D) anchors share no candidates. So labels must be None, and "
                "weights must not couple anchors by their candidates, as 'transported' does."
            )
    elif group is not None and _may_read(negatives):
        # This communicates, see the head of section 8. Rows with nearly the same sum pass, such as
        # the same rows in another order. We accept that.
        sums = gather(negatives.detach().sum(dtype=torch.float64)[None], group)  # of each rank
        if not torch.allclose(sums, sums[0], equal_nan=True):
            raise InvalidArgument(
                "negatives differs between ranks. Every rank must pass the same rows, for example "
                "gather(negatives, group)."
            )
    return negatives.shape[-2]


def _check_tensor(name, x, kind, *shapes, hint="", required=False):
    """Check a tensor. If it is not required, None passes. A list also passes then, but not for the
    kind "float". kind is "float", "int", "bool", or "" for any. A shape has lengths, or letters for
    any length above 0. The hint ends the message of an error."""
    if x is None and not required:
        return
    if kind != "float" and not required:  # an index, say, may be a list
        try:
            x = torch.as_tensor(x)
        except Exception:  # the list may have words, say, or lists of unequal lengths
            pass
    fits = torch.is_tensor(x) and any(_is_like(x.shape, shape) for shape in shapes)
    if not (fits and kind in str(x.dtype)):
        sizes = " or ".join(f"({', '.join(map(str, shape))})" for shape in shapes)
        kinds = f" of {kind}s" if kind else ""
        _require(False, name, _describe(x), f"a tensor {sizes}{kinds}{hint}")


def _is_like(shape, wanted):
    return len(shape) == len(wanted) and all(
        a == b or isinstance(b, str) and a for a, b in zip(shape, wanted, strict=True)
    )


def _check_index(name, index, n, length):
    """Check that an index (length,) or (length, P) names rows from 0 to n − 1, or none by −1."""
    _check_tensor(name, index, "int", (length,), (length, "P"))
    if index is None or (torch.is_tensor(index) and not _may_read(index)):
        return
    low, high = map(int, torch.as_tensor(index, device="cpu").aminmax())
    if low < -1 or high >= n:
        raise InvalidArgument(f"{name} has rows from {low} to {high}. It can have −1 to {n - 1}.")


def _check_result(name, result, shape):
    if not torch.is_tensor(result) or result.shape != shape:
        raise InvalidArgument(
            f"{name} returned {_describe(result)}. It must return a tensor {tuple(shape)}, with a "
            "row for each anchor that it is given."
        )


def _check_finite(name, x):
    """Check a tensor, if it is given and can be read."""
    if x is None or not _may_read(x):
        return
    # If the sum is finite, so are all entries. Looking at the sum alone takes a fraction of the
    # time. If it is not finite, it may only have overflowed, so each entry is looked at.
    if math.isfinite(x.detach().sum().item()) or x.isfinite().all():
        return
    raise NotFinite(f"{name} has NaN or inf.")


def _describe(x):
    if torch.is_tensor(x):
        return f"{x.dtype} {tuple(x.shape)}"
    return repr(x)[:60]


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
# TestViews compares each step with a reference.
# A view draws one number in [0, 1) for each of these names. To add a transformation, add the names
# that it needs. After that a seed no longer gives the views that it gave before.
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
    _check_tensor("images", images, "", ("B", 3, "H", "W"), required=True)
    x = _floats(images)
    draws = _drawn(torch.rand, len(x), len(DRAWS), generator, x.device)
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
    # theta maps places in the view, from −1 to 1, to places in the image
    theta = torch.stack([width * mirror, zero, center_x, zero, height, center_y], 1)
    grid = F.affine_grid(theta.view(-1, 2, 3), x.shape, align_corners=False)  # (B, H, W, 2)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _recolour(x, draws, jitter, brightness, contrast, saturation, hue, gray):
    """Change colours in YIQ, where Y is luma and (I, Q) is chroma.
    Chroma is scaled and turned. Then the image is multiplied by `light`, and its distance from its
    mean luma by `spread`. For each image this is one 3 × 3 matrix and one offset."""
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
    mean_luma = (x.mean((2, 3)) @ to_yiq[0]) * light  # (B,), around which contrast spreads
    pixels = (to_rgb @ chroma @ to_yiq) @ x.flatten(2)  # (B, 3, H·W)
    pixels = (light * spread)[:, None, None] * pixels + ((1 - spread) * mean_luma)[:, None, None]
    return pixels.view_as(x)


class _OfRank(torch.Generator):
    """A generator of one of several ranks. All ranks give theirs the same seed."""

    rank, ranks = 0, 1


def _drawn(function, n, width, generator, device):
    """Draw numbers (n, width) for the n samples of this rank.
    Each rank draws those of the whole batch. Rank r of R keeps rows r, r + R, r + 2·R, …
    `Training` takes images in the same way. So it can promise the same run for any number of
    ranks. Its help names the exceptions."""
    rank, ranks = 0, 1
    if isinstance(generator, _OfRank):
        rank, ranks = generator.rank, generator.ranks
    size = n * ranks, width
    drawn = function(size, generator=generator, device=device, dtype=torch.float32)
    return drawn[rank::ranks]


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
# The tests are TestEncoder, TestMemoryBank and TestWrappers. The last one has `embed`, `follow` and
# `uniformity`, too. TestTraining has the steps of optimizers, and training/test_ranks.py tests
# `group`.


class Encoder(nn.Module):
    """Map images (B, 3, H, W) in [0, 1] to features (B, self.features) and embeddings (B, dim).

    name    "small" has four convolutions. "resnet18" and "resnet50" are those of torchvision.
    dim     The dimension of the embeddings.
    size    The side H = W of the images, which must be even for "small". Up to 64 pixels a resnet
            has a first convolution of 3 × 3 pixels and no max-pooling.

    Embeddings are not normalised. After training, use the features. Ref: [6] App. B.9; [1] C"""

    def __init__(self, name: str = "small", dim: int = 128, size: int = 32):
        super().__init__()
        names = "small", "resnet18", "resnet50"
        _require(name in names, "name", name, f"one of {', '.join(names)}")
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

    rows        (K, D), the rows to begin with. They become a buffer, which has no gradient.
    momentum    m, in [0, 1).

    Ref: [4] 5.1; [7]"""

    def __init__(self, rows: Tensor, momentum: float = 0.5):
        super().__init__()
        _check_number("momentum", momentum, 0, 1 - 1e-9)
        self.momentum = momentum
        self.register_buffer("rows", unit(rows.detach()))

    @torch.no_grad()
    def update(self, index: Tensor, z: Tensor) -> None:
        """Move the rows at index (B,) towards embeddings z (B, D). No row may be named twice."""
        _check_tensor("z", z, "float", (len(index), self.rows.shape[1]))
        moved = self.momentum * self.rows[index] + (1 - self.momentum) * unit(z)
        self.rows[index] = unit(moved).to(self.rows.dtype)


@torch.no_grad()
def follow(follower: nn.Module, leader: nn.Module, momentum: float) -> None:
    """Move the parameters and buffers θ' of a follower towards those of a leader, θ.
        θ' ← m θ' + (1 − m) θ

    momentum is m, in [0, 1]. Both networks have the same layers. Either may be of another dtype, on
    another device, or wrapped by torch.compile, DataParallel or DistributedDataParallel. Keep the
    follower in float32, because small steps vanish in 16 bits. Buffers of whole numbers, such as
    the count of batches in BatchNorm, are copied. Ref: [8]; [3] Eq. 7"""
    leaders = _unwrapped(leader).state_dict()
    followers = _unwrapped(follower).state_dict(keep_vars=True)
    # Layers can share a tensor, which must move once. With keep_vars=True state_dict gives the
    # tensors themselves, so as keys of a dict they occur once.
    names = {x: name for name, x in followers.items()}
    for value, name in names.items():
        target = leaders.get(name)
        _check_tensor(f"leader's {name}", target, "", value.shape, required=True)
        if value.is_floating_point():
            value.lerp_(target.to(value), 1 - momentum)
        else:
            value.copy_(target)


def _unwrapped(network):
    """Return the network that torch.compile, or training on many devices, has wrapped."""
    while type(network).__name__ in "DataParallel DistributedDataParallel OptimizedModule".split():
        (network,) = network.children()
    return network


@torch.no_grad()
def _average(tensors, group):
    """Replace float32 tensors by their means over the ranks.
    They are sent as one vector, so all ranks must pass the same list. If these are gradients, a
    parameter that has one must have one on every rank."""
    if group is None or not tensors:
        return
    flat = torch.cat([x.flatten() for x in tensors])
    distributed.all_reduce(flat, group=group)
    flat /= distributed.get_world_size(group)
    parts = flat.split([x.numel() for x in tensors])
    for x, mean in zip(tensors, parts, strict=True):
        x.copy_(mean.view_as(x))


def _running(network):
    """List the running statistics of BatchNorm."""
    return [
        x for name, x in network.named_buffers() if name.endswith(("running_mean", "running_var"))
    ]


def _gradients(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]


def _descend(loss, optimizer, name, read=False, group=None):
    """Take a step of an optimizer. A loss that is not finite raises FloatingPointError.
    On a GPU this is checked only if `read` is true, because the host has to wait for the loss. If
    one rank alone raises here, the others wait in `_average` until torchrun stops them."""
    if (read or _may_read(loss)) and not loss.isfinite():
        raise FloatingPointError(f"The loss of the {name} is {loss.item()}.")
    with torch.autocast(loss.device.type, enabled=False):  # autocast is for forward passes
        optimizer.zero_grad()
        loss.backward()
        _average(_gradients(optimizer), group)
        optimizer.step()
    torch.clear_autocast_cache()  # the cache has the weights from before this step


@torch.no_grad()
def embed(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = 200,
    group: distributed.ProcessGroup | None = None,
) -> tuple:
    """Embed images without augmentation → float32 features (n, F) and unit embeddings (n, D).
    images are (n, 3, H, W), on any device. Any object will do that has len(images), and
    images.split(m), which yields tensors (m, 3, H, W). With a group it also needs images[index],
    which returns such an object. A copy of the encoder, without wrappers, runs in eval mode. The
    results have no gradient. With a group all ranks pass the same images. Each rank embeds a share
    of them, and gets the embeddings of all."""
    if group is not None:
        n = len(images)
        outputs = embed(encoder, images[_share(n, group)], batch_size)
        return tuple(gather(x, group)[:n] for x in outputs)
    encoder = _unwrapped(encoder)
    groups = [getattr(part, "process_group", None) for part in encoder.modules()]
    # The process groups of SyncBatchNorm cannot be copied. deepcopy uses what is in this dict as it
    # is, and does not copy it.
    shared = {id(x): x for x in groups}
    encoder = copy.deepcopy(encoder, shared).eval()
    weight = next(encoder.parameters())  # it has the encoder's device and dtype
    outputs = [
        encoder(_floats(part.to(weight.device)).to(weight.dtype))
        for part in images.split(batch_size)
    ]
    features, z = zip(*outputs, strict=True)
    return torch.cat(features).float(), unit(torch.cat(z).float())


@torch.no_grad()
def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """Measure how evenly the rows of z (n, D) cover the unit sphere.
        log E e^{−t ‖x − y‖²}    over all pairs of different rows x, y, projected to the sphere

    A lower value means that the rows are spread more evenly. It is 0 if all rows are equal, and −4t
    for two opposite rows. Time grows as n² D. Large n are worked on in blocks, so that memory grows
    as n D. Ref: [5]; [4] Eq. 10, negated"""
    _check_tensor("z", z, "float", ("n", "D"))
    n = len(z)
    _require(n > 1, "z", f"{n} row", "at least two rows")
    _check_finite("z", z)
    # Row i is its own positive, and all other rows are its candidates. So its loss is
    # log Σ_j e^{2t cos_ij} − 2t = log Σ_j e^{−t ‖z_i − z_j‖²}.
    losses = contrastive_loss(
        z,
        objective="decoupled",
        negatives=z,
        positive_index=range(n),
        temperature=0.5 / t,
        reduction="none",
    )
    return losses.logsumexp(0) - math.log(n * n - n)


# ---- 11. Generators: hard samples that are made instead of found, by a game against the encoder
# All networks stay in train mode. There each forward pass changes the state of spectral norms and
# of BatchNorm. So if you reorder, add or drop a pass, a seed gives another run. TestGame writes
# Algorithm 1 of [3] in a few lines. It compares a whole step with these lines. It covers the
# ascent, the follower, and the turn of G and D. It also tests shapes, channels and spectral norms
# of the networks.


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
    The first block gets pixels from −1 to 1. A ReLU in front of it would lose all that are below 0,
    so there is none."""
    pool = nn.Identity() if last else nn.AvgPool2d(2)
    residual = [_conv(before, after), nn.ReLU(), _conv(after, after), pool]
    if not first:
        residual.insert(0, nn.ReLU())
    return _Residual(residual, [pool, _conv(before, after, 1)])


def _widths(size, width):
    """List numbers of channels, which double from width to at most four times width.
    There is one for each of the sides size, size / 2, …, 4."""
    _check_number("size", size, 8)
    _require(size.bit_count() == 1, "size", size, "a power of two, such as 32")
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
    """Score the realism of images (B, 3, size, size) in [0, 1] → (B,), float32.
    A higher score means more real. size and width are those of `Generator`. Residual blocks halve
    the side down to 4. Ref: [9] Fig. 15"""

    def __init__(self, size: int = 32, width: int = 16):
        super().__init__()
        widths = _widths(size, width)
        # For size 32 and width w the channels go 3 → w → 2w → 4w → 4w, and the sides 16, 8, 4, 4.
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
        _check_number("momentum", momentum, 0, 1 - 1e-9)
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
        # "G" and "ascent" move the same parameters, and so share their gradients, see `DiffHard`
        betas = (0.0, 0.999)
        self.optimizers = {
            "G": torch.optim.Adam(self.G.parameters(), lr, betas),
            "D": torch.optim.Adam(self.D.parameters(), lr, betas),
            "ascent": torch.optim.Adam(self.G.parameters(), ascent_lr, betas, maximize=True),
        }

    def latents(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw latents (n, latent) from N(0, I)."""
        bias = self.G.first.bias  # it has the device and dtype of G
        return _drawn(torch.randn, n, self.G.latent, generator, bias.device).to(bias.dtype)

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
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        read: bool = False,
        group: distributed.ProcessGroup | None = None,
    ) -> dict:
        """Let D take a step to tell real images x from generated ones, then G a step to deceive D.
            d_loss = E max(0, 1 − D(x)) + E max(0, 1 + D(G(z)))    g_loss = −E D(G(z))

        images    Real images (B, 3, size, size). The first batch_size of them are used. With a
                  group each rank uses its first batch_size // ranks, but one at least.
        read      Check on a GPU, too, that both losses are finite. The host has to wait for that.

        The result is a dict of d_loss and g_loss. A loss that is not finite raises
        FloatingPointError. Ref: [3] Eq. 5, which has a function f_G that [3] does not define. So
        g_loss is that of [9]"""
        ranks = 1 if group is None else distributed.get_world_size(group)
        images = _floats(images[: max(1, self.batch_size // ranks)])
        fake = self.G(self.latents(len(images), generator))
        if images.shape != fake.shape:
            raise InvalidArgument(
                f"images has shape {tuple(images.shape)}, but the generator makes "
                f"{tuple(fake.shape)}. Give the game the size of the images."
            )
        d_loss = F.relu(1 - self.D(images)).mean() + F.relu(1 + self.D(fake.detach())).mean()
        _descend(d_loss, self.optimizers["D"], "discriminator", read, group)
        self.D.requires_grad_(False)  # D passes the gradient on to G, and needs none itself
        g_loss = -self.D(fake).mean()
        self.D.requires_grad_(True)
        _descend(g_loss, self.optimizers["G"], "generator", read, group)
        return {"d_loss": d_loss.detach(), "g_loss": g_loss.detach()}

    def follow(self) -> None:
        """Move G_ema towards G. Ref: [3] Eq. 7"""
        follow(self.G_ema, self.G, self.momentum)
        # The singular vectors of spectral norms are averages now, so they are shorter than 1.
        # Computing a weight in train mode takes a power iteration, which gives the vectors length 1
        # again.
        for module in self.G_ema.train().modules():
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
# The tests are TestBank, TestMicroBatches, TestSchedules and TestTraining. TestGame has DiffHard,
# and training/test_ranks.py tests `group`.

# A method is a SimCLR, or a subclass with more state. It has two calls:
#     step(encoder, images, index, generator, **options) → loss, figures
#     after_step() → figures or None
# index (B,) has the places of the images in the training set. Figures are a dict of numbers to
# report.
# What the loop does:
#   - For each batch it calls `step`, moves the encoder down the loss, and then calls `after_step`.
#   - It trains the encoder and the parameters of the method's criterion, and nothing else.
#   - It gives `step` two kinds of **options. return_stats asks for figures, and the others are
#     options of the loss that `schedules` set for this step.
#   - It reads the method's `pretrain` and `scheduled`, and sets its `group`.
#   - While the method trains alone, before the encoder begins, encoder and loss are None.
# What a method must do:
#   - If it has parameters besides those of its criterion, it has optimizers for them. Their
#     gradients are filled by the backward pass of the loop, or by one that the method runs itself.
#     Before that pass it clears them. After it, it averages these gradients over ranks, and steps
#     its optimizers, as DiffHard does.
#   - In bfloat16 a forward pass keeps 16-bit copies of the weights that it used. After a step of an
#     optimizer they are out of date, and later passes would still use them. So after such a step
#     call torch.clear_autocast_cache(). `_descend` does so, too.
#   - It saves these optimizers and its counters by get_extra_state, as Game does. What `step` keeps
#     for `after_step` need not be saved, as a run is saved after both.
#   - It draws numbers for samples by `_drawn`. All ranks have the same seed, so otherwise they
#     would draw the same numbers for different samples.
#   - It sees to it that whatever it changes is equal on all ranks in the end. The loop does so for
#     the gradients of its own optimizer, and for BatchNorm. Vectors of spectral norms stay equal if
#     all ranks have equal weights and make equally many passes in train mode.
# To test a method of this file, add it to METHODS in test_hardneg.py, and to METHODS in
# training/test_training.py, which the tests over ranks use, too.
# If you change the order in which a step draws numbers, a seed gives another run. TestTraining
# checks that a resumed run is the same to the last bit. training/test_ranks.py checks that a run
# over ranks is the same up to rounding.


class SimCLR(nn.Module):
    """Contrast two random views of each image with the views of the other images in the batch.
    criterion is a ContrastiveLoss. view_options are options of `view`. Ref: [6] Algorithm 1"""

    group = None  # of ranks that share each batch, set by `Training`
    pretrain = 0  # how many epochs the method trains alone before the encoder begins
    scheduled = []  # optimizers of the method whose learning rates follow the recipe. While the
    #                 method trains alone, they have the rate of the recipe's first step

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
        if self.group is not None:
            options["group"] = self.group
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
    The candidates are all other rows. images are the whole training set, as `embed` takes it.
    momentum is that of the bank. The bank starts from embeddings by the given encoder. An untrained
    encoder maps all images near one point, so the mean of these embeddings is subtracted. Ref: [4]
    Eq. 1, with the bank in place of second views"""

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
        index, z = (gather(x, self.group) for x in self.seen)
        self.bank.update(index, z)


class DiffHard(SimCLR):
    """Play the min-max game, in which the encoder descends a loss and a generator ascends it.
    A batch has real and generated images. The game takes its turn every few steps of the encoder.

    criterion    Its objective has to be ppcl, unless the game makes no pairs.
    game         A Game of the size of the images.

    The figures are those of the loss. In a turn of the game those of `Game.imitate` are added.
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

    # What each kind of step does with the gradients of G, from left to right. Between the clearing
    # at the end of `step` and ascent.step() in `after_step`, only the backward pass of the loop may
    # reach G. Steps without a turn clear as well, though only a turn that ascends needs it.
    # TestGame has all kinds, and begins with gradients that are not 0.
    #     kind                   `step`       the loop                           `after_step`
    #     without a turn         clears       nothing                            nothing
    #     turn that ascends      clears       fills, by the encoder's loss       ascends; imitates
    #     turn without ascent    clears       nothing                            imitates
    #     the game alone         nothing      nothing                            imitates
    # Before it imitates, `after_step` lets G_ema follow G, which changes no gradient.
    # `imitate` clears the gradients of G, fills them with those of G's own loss, and descends.
    # Numbers are drawn in this order, for latents, for views, and for latents of `imitate`.
    def step(self, encoder, images, index, generator, return_stats=False, **options):
        game = self.game.train()
        real = _floats(images)
        is_turn = encoder is None or game.taken % game.every == 0
        ascends = is_turn and game.ascent and encoder is not None
        self.turn = is_turn and (ascends, real, generator, return_stats)  # for `after_step`
        if encoder is None:
            return None, {}
        game.taken += 1
        # Step 1. A batch has real images and about as many generated ones, each in two views.
        with torch.set_grad_enabled(ascends):
            generated, pair = game.sample(len(images), generator)  # Eq. 6
        batch = torch.cat([generated, real])  # (about 2B, 3, H, W)
        alone = len(pair) + torch.arange(len(images), device=pair.device)
        labels = torch.cat([pair, alone])  # a generated pair shares one
        if self.group is not None:  # other ranks have other pairs
            labels = labels + len(labels) * distributed.get_rank(self.group)
        options["labels"] = labels
        z, other = self.embed_views(encoder, generator, batch, batch)
        # Step 2. The loop descends this loss to train the encoder. In a turn that ascends, its
        # gradient reaches G, too.
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)  # Eq. 4, 8
        game.optimizers["ascent"].zero_grad()  # so that G gets the gradient of this loss alone
        return loss, figures

    def after_step(self):
        if not self.turn:
            return None
        # Step 3. In its turn the game moves.
        ascends, real, generator, read = self.turn
        if ascends:
            ascent = self.game.optimizers["ascent"]
            # Average G's gradients over ranks, as those of the encoder are. `_over_ranks` gave the
            # backward pass R times the loss of this rank, so the mean is that of the whole batch.
            _average(_gradients(ascent), self.group)
            ascent.step()  # Eq. 4
            torch.clear_autocast_cache()
        self.game.follow()  # Eq. 7
        return self.game.imitate(real, generator, read, self.group)  # Eq. 5


def in_micro_batches(encoder: Callable, micro_batch: int) -> Callable:
    """Return a function to call in place of the encoder. It embeds about `micro_batch` samples at a
    time, which saves memory. Its arguments, by position or by keyword, are tensors or dicts of
    tensors, whose rows are samples. The samples are split evenly. BatchNorm may refuse one sample.
    So if micro_batch is 2 or more, every part has at least two, unless the whole batch is one
    sample. With 2 an odd batch has one part of three samples. With 1 every part is one sample,
    which suits encoders without BatchNorm.
    The backward pass embeds the samples again, with the same randomness. The gradient is exact. But
    BatchNorm in training mode normalises each micro-batch by itself, and updates its statistics
    twice. With DistributedDataParallel, do not pass a wrapped encoder. Write a module whose
    forward calls the returned function, and wrap that module in DistributedDataParallel.
    Ref: [11]"""
    _check_number("micro_batch", micro_batch, 1)

    def in_parts(*inputs, **named):
        # tree_flatten opens dicts, but not what a tokenizer returns
        opened = tree_map(lambda x: dict(x) if isinstance(x, Mapping) else x, (inputs, named))
        leaves, structure = tree_flatten(opened)
        sizes = {len(x) for x in leaves if torch.is_tensor(x) and x.ndim > 0}
        if len(sizes) != 1:
            found = f"{sorted(sizes)} rows" if sizes else "no tensors"
            raise InvalidArgument(f"All inputs must have equally many rows. They have {found}.")
        n = sizes.pop()
        # at most n / 2 parts, so that each has two samples, unless micro_batch is 1
        count = max(1, min(math.ceil(n / micro_batch), n // min(micro_batch, 2)))
        columns = [  # for each input its parts
            x.tensor_split(count) if torch.is_tensor(x) and x.ndim > 0 else [x] * count
            for x in leaves
        ]
        parts = []
        for some in zip(*columns, strict=True):
            few, keywords = tree_unflatten(some, structure)
            parts.append(checkpoint(encoder, *few, use_reentrant=False, **keywords))
        return tree_map(lambda *x: torch.cat(x) if torch.is_tensor(x[0]) else x[0], *parts)

    return in_parts


def annealed_beta(progress: float, beta: float, changes: int = 5) -> float:
    """Lower β over a run from β to β/ℓ, in ℓ stages of equal length.
        β · (1 − ⌊ℓ · progress⌋ / ℓ)    with ℓ = changes, for a progress in [0, 1)

    Hard negatives matter early in a run. Later many of the hardest ones have the anchor's class.
    Ref: [1] App. C"""
    return beta * (1 - int(changes * progress) / changes)


def lead_in(progress: float, alpha: float, until: float = 0.5) -> float:
    """Lower the share of candidates that `top` keeps from 1 to α, and reach α at progress `until`.
        α^{min(1, progress / until)}    for a progress in [0, 1], and until > 0

    Before training, the nearest candidates are those of a similar background and colour. They teach
    little. So hardness rises here, while `annealed_beta` lowers it."""
    return alpha ** min(1.0, progress / until)


def _warm_up_and_cosine(progress, step):
    """Multiply a linear rise over a tenth of the run by a cosine from 1 to 0.
    step is the progress that one step makes. Adding it keeps the first rate above 0."""
    warm_up = min(10 * (progress + step), 1)
    return warm_up * (1 + math.cos(math.pi * progress)) / 2


def _two_falls(progress, step):
    """Lower the rate to a tenth after 160 of 200 epochs, to a hundredth after 190. Ref: [4] 5.1"""
    return 0.1 ** ((progress >= 0.8) + (progress >= 0.95))


# Each recipe has a row in RECIPES, with these four settings, and one in OPTIMIZERS.
RECIPES = {
    "adamw": {"epochs": 16, "batch_size": 256, "lr": 8e-3, "weight_decay": 1e-4},
    "sgd": {"epochs": 200, "batch_size": 128, "lr": 0.03, "weight_decay": 5e-4},
    "adam": {"epochs": 400, "batch_size": 256, "lr": 1e-3, "weight_decay": 1e-6},
}
# recipe: two functions. The first one gets groups of parameters, lr and fused=, and makes the
# optimizer. The second one gets the progress in [0, 1), and that of one step, and returns the
# factor of lr.
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, _warm_up_and_cosine),
    "sgd": (functools.partial(torch.optim.SGD, momentum=0.9), _two_falls),
    "adam": (torch.optim.Adam, lambda progress, step: 1.0),  # [1] App. C, [2] VII-A
}


class Training:
    """Train an Encoder: `for figures in Training(encoder, images, SimCLR(criterion)): ...`

    encoder        Its weights become float32, in place. torch.compile and DataParallel may wrap it.
    images         uint8 (n, 3, H, W), on the encoder's device. To save memory of the device they
                   may be on the CPU. You can also pass an object with len(images) and
                   images.device, if images[index] is a tensor of the rows at an index (B,).
    method         A SimCLR, Bank or DiffHard, or a method of your own.
    recipe         A row of RECIPES.
    schedules      Functions that give options of the loss from the progress in [0, 1), such as
                   {"alpha": lambda p: lead_in(p, 0.1)}.
    micro_batch    How many images the encoder takes at a time. By default it takes all.
    bfloat16       Whether a step uses autocast to bfloat16. By default it does if torch says that
                   the hardware computes in bfloat16. On a CPU torch 2.10 does not say it, so
                   there the default is off.
    seed           The seed of order, views and latents. The same seed repeats the run, on a GPU up
                   to rounding. If the encoder draws numbers itself, as in dropout, seed torch, too.
    group          A process group of torch.distributed, whose ranks share each batch. All ranks
                   have the same images, and encoders and methods with the same weights. Training
                   keeps these weights equal. If ranks divide each batch evenly, any number of them
                   makes the same run up to rounding. But three things differ. First, BatchNorm can
                   see other images. On a CPU it sees the images of its own rank alone, and with
                   micro_batch one part of these. On a GPU it becomes SyncBatchNorm, which sees the
                   images of all ranks. With micro_batch it sees a part of these images at a time.
                   Second, an encoder that draws numbers itself, as in dropout, draws others. Third,
                   DiffHard differs if the share of a rank is odd, or if ranks do not divide the
                   batch of the game. If ranks cannot share evenly, a batch can have a few images
                   more or fewer than in one process. An epoch then leaves out up to ranks − 1
                   images, other ones each time.
    settings       epochs, batch_size, lr, weight_decay. They replace those of the recipe. Batches
                   are of nearly one size, about batch_size images.

    Each step yields a dict of "epoch", "step", "steps", "loss", the number of "images", the
    scheduled options, and figures of the method. Every tenth of an epoch it has the statistics of
    the loss, too. Epochs below 0 are the pre-training of the method, and have no "loss" and no
    scheduled options. A loss that is not finite raises FloatingPointError, but on a GPU only in
    steps with statistics."""

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
        group: distributed.ProcessGroup | None = None,
        **settings: float,
    ):
        _require(recipe in RECIPES, "recipe", recipe, f"one of {', '.join(RECIPES)}")
        self.recipe = RECIPES[recipe] | settings
        unknown = settings.keys() - RECIPES[recipe]
        if unknown:
            known = ", ".join(RECIPES[recipe])
            raise InvalidArgument(f"There is no setting {unknown.pop()}. Settings are {known}.")
        # DistributedDataParallel mixes gradients up if the memory format changes after it is made
        _require(
            not hasattr(encoder, "reducer"),
            "encoder",
            "a DistributedDataParallel",
            "the module that it wraps",
        )
        self.encoder = encoder.to(torch.float32, memory_format=torch.channels_last)
        self.device = next(encoder.parameters()).device
        self.method = method.to(self.device)
        self.group = method.group = group
        self.rank, self.ranks = 0, 1
        if group is not None:
            self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
            if self.device.type != "cpu":
                # in place, with the same parameters, so that optimizers stay valid
                nn.SyncBatchNorm.convert_sync_batchnorm(self.encoder, group)
                nn.SyncBatchNorm.convert_sync_batchnorm(self.method, group)
        self.images, self.schedules = images, schedules or {}
        self.micro_batch, self.seed = micro_batch, seed
        self.bfloat16 = _has_bfloat16(self.device) if bfloat16 is None else bfloat16
        least = 2 * self.ranks  # BatchNorm may refuse one image on a rank
        _check_number("len(images)", len(images), least)
        _check_number("epochs", self.recipe["epochs"], 1)
        _check_number("batch_size", self.recipe["batch_size"], least)
        _check_number("lr", self.recipe["lr"], 1e-12, 1e6)
        batches = math.ceil(len(images) / self.recipe["batch_size"])
        self.steps_per_epoch = min(batches, len(images) // least)
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
            shared = len(order) // self.ranks * self.ranks
            # Images are dealt out to ranks, as `_drawn` deals out random numbers. If the order is
            # 5 3 0 4 1 2, the three batches of one process are 5 3, 0 4 and 1 2. Of two ranks one
            # has 5, 0 and 1, and the other 3, 4 and 2. If you change this slice, change the slice
            # in `_drawn` in the same way.
            order = order[self.rank : shared : self.ranks].to(self.images.device)
            for index in order.tensor_split(self.steps_per_epoch)[self.step_in_epoch :]:
                # position is below 0 while the method trains alone. `_step` makes a seed of it, and
                # torch allows seeds below 0.
                position = self.epoch * self.steps_per_epoch + self.step_in_epoch
                step = self.method.pretrain * self.steps_per_epoch + position + 1
                place = {"epoch": self.epoch, "step": step, "steps": self.steps}
                try:
                    figures = self._step(index, position)
                except FloatingPointError as error:
                    raise FloatingPointError(
                        f"Training stopped at step {step} of {self.steps}. {error} "
                        "A lower lr may help."
                    ) from error
                # Move on after `_step`, which reads the old numbers. Move on before the yield, so
                # that the caller may then save the new ones.
                self.epoch, self.step_in_epoch = divmod(position + 1, self.steps_per_epoch)
                yield figures | place

    def _step(self, index, position):
        encoder_steps = self.epochs * self.steps_per_epoch
        progress = max(0, position) / encoder_steps  # positions below 0 are in the pre-training
        rate = self.rate(progress, 1 / encoder_steps)
        for optimizer in [self.optimizer] + self.method.scheduled:
            for group in optimizer.param_groups:
                # kept in the group, so that it is saved with the optimizer
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * rate
        options = {name: schedule(progress) for name, schedule in self.schedules.items()}
        # Every tenth of an epoch figures are computed, and on a GPU losses are checked, too.
        read = 10 * self.step_in_epoch % self.steps_per_epoch < 10
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
        generator = _OfRank(self.device).manual_seed(self.seed * 10**9 + position)
        generator.rank, generator.ranks = self.rank, self.ranks
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            loss, figures = self.method.step(
                encoder, images, index, generator, return_stats=read, **options
            )
            if encoder is not None:
                # DiffHard relies on the backward pass being here, between `step` and `after_step`
                _descend(loss, self.optimizer, "encoder", read, self.group)
                figures = {"loss": loss.detach()} | figures | options
            figures |= self.method.after_step() or {}
            if self.group is not None:  # so that after each step all ranks have the same state
                for network in (self.encoder, self.method):
                    _average(_running(network), self.group)
        return figures | {"images": len(index) * self.ranks}

    def state_dict(self) -> dict:
        """Return all that a run needs to resume, by a Training made with the same arguments.
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
