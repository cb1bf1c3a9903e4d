"""Hard-negative contrastive learning, formula by formula, in plain float64 NumPy.

This file states slowly what the papers state. Each sum sign is one loop or one sum(). So you can
compare each line with the equation in its docstring. The tests compare `hardneg.py` with this file,
in value and in gradient. The two files share no code.

    symbol     name here     shape   meaning
    s_ij       neg, logits   (A, N)  cosine of anchor i and candidate j, over t; −∞ if j is not a
                                     negative of i
    p_im       pos           (A, M)  cosine of anchor i and its positive m, over t; −∞ if i has
                                     fewer positives
    log w_ij   log_w         (A, N)  log importance weight of a candidate; −∞ if it does not count
    log w⁺_im  log_w_pos     (A, M)  log importance weight of a positive
    N_i, M_i                         number of finite entries in row i
    t, τ       temperature           a logit is cos/t, as in [4] and the code of [1]; the text of
                                     [1] has rows of length 1/t, so its logit is cos/t²
    τ⁺         tau_plus              probability that a candidate has the anchor's class; a number
                                     for all anchors, or one for each
    β, α       beta, alpha           concentration of `tilted`; share of the candidates `top` keeps
    ε          epsilon               entropic regularisation of `transported`, in units of its cost
    η          margin                margin of the triplet loss
    f, v, z    x, y, v, z    (n, D)  embeddings

Gradients are complex steps. The formula ∂f/∂x_k = Im f(x + i h e_k) / h has no subtraction, so at
h = 1e-30 it is exact up to rounding. It needs losses that take complex numbers and are analytic in
them. So the code compares real parts, and it uses neither a conjugate nor a modulus. A weight that
loses its imaginary part is detached, because no gradient flows through it.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. 2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport. 2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach. 2202.06464; numbers as in version 1
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. 2012.09740
    [6] Chen et al. A Simple Framework for Contrastive Learning (SimCLR). 2002.05709
   [12] Yeh et al. Decoupled Contrastive Learning. 2110.06848
"""

import cmath
import math
from fractions import Fraction

import numpy as np

INF = math.inf


# ---- Numbers, real or complex --------------------------------------------------------------------
def _double(x):
    """Return x in float64, or in complex128 if it is complex."""
    return np.asarray(x, dtype=np.result_type(np.asarray(x), np.float64))


def _lists(x):
    """Return x as nested lists. Python's doubles are as exact as NumPy's, and faster in loops."""
    return _double(x).tolist()


def _exp(z):
    return cmath.exp(z) if isinstance(z, complex) else math.exp(z)


def _log(z):
    return cmath.log(z) if isinstance(z, complex) else math.log(z)


def _finite(*rows):
    """Return the places j at which every row is above −∞."""
    return [j for j in range(len(rows[0])) if all(row[j].real > -INF for row in rows)]


def _together(*arrays):
    """Return an iterator over the rows of several arrays, in lists."""
    return zip(*map(_lists, arrays), strict=True)


def _largest(values):
    """Return the value with the largest real part, or −∞ if there is no value."""
    return max(values, key=lambda v: v.real, default=-INF)


def _hinge(v):
    """Return max(0, v)."""
    return v if v.real > 0 else 0.0


def _mean(values):
    """Return (1/n) Σ v, or 0 if there is no value."""
    return sum(values) / len(values) if values else 0.0


def _product(x, y):
    """Return x·y = Σ_d x_d y_d."""
    return sum(a * b for a, b in zip(x, y, strict=True))


def _log_sum_exp(values):
    """Return log Σ e^v, or −∞ if there is no value."""
    shift = _largest(values).real
    if shift == -INF:
        return -INF
    # e^v may overflow, so the largest v is subtracted first and added again at the end.
    total = sum(_exp(v - shift) for v in values if v.real > -INF)
    return shift + _log(total)


# ---- 1. Weights: logits (A, N) → log weights (A, N), −∞ where the logits are ---------------------
def _by_row(rule, logits):
    """Apply a rule to each row. A rule takes the finite logits and returns their log weights."""
    logits = _double(logits)
    out = np.full_like(logits, -INF)
    for i, row in enumerate(logits.tolist()):
        places = _finite(row)
        if places:
            out[i, places] = rule([row[j] for j in places])
    return out


def _mean_one(scores):
    """Return the logs of the weights e^score / ((1/N) Σ e^score), whose mean is 1."""
    log_mean = _log_sum_exp(scores) - math.log(len(scores))
    return [score - log_mean for score in scores]


def uniform(logits):
    """Count every candidate the same, log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    return np.where(np.real(logits) > -INF, 0.0, -INF)


def tilted(logits, beta=0.5):
    """Count near candidates more.

        w_ij = e^{β s_ij} / ((1/N_i) Σ_k e^{β s_ik})

    Ref: [1] Eq. 2"""
    return _by_row(lambda s: _mean_one([beta * v for v in s]), logits)


def hardest(logits):
    """Count the nearest candidate alone. Its weight is N_i, and all others are 0.
    If several are nearest, they share N_i. This is the limit β → ∞ of `tilted`.
    Ref: [1] Prop. 1; [4] Eq. 6"""

    def rule(s):
        nearest = _largest(s).real
        ties = sum(v.real == nearest for v in s)
        return [math.log(len(s) / ties) if v.real == nearest else -INF for v in s]

    return _by_row(rule, logits)


def _quantile(values, alpha):
    """Return the ⌈α n⌉-th largest real part of n values, or the largest if ⌈α n⌉ is 0."""
    # ⌈0.07 · 100⌉ is 7, but floats would give 8
    share = Fraction(alpha).limit_denominator(10**6)
    kept = max(1, math.ceil(share * len(values)))
    return sorted((v.real for v in values), reverse=True)[kept - 1]


def top(logits, alpha=0.3):
    """Count the upper α quantile alone. A weight is 1 if s_ij ≥ s_α, and 0 if not.
    The threshold s_α is the ⌈α N_i⌉-th largest logit, so at least one candidate counts. α is first
    rounded to a fraction with a denominator of at most 10⁶. Ref: [4] Eq. 8, 9"""

    def rule(s):
        threshold = _quantile(s, alpha)
        return [0.0 if v.real >= threshold else -INF for v in s]

    return _by_row(rule, logits)


def ground_cost(cosines, cost="sqeuclidean"):
    """Compute the cost of coupling two unit rows x and y from their cosine.

        "sqeuclidean"  ½‖x − y‖² = 1 − x·y        "exp"  exp(‖x − y‖²)

    In [2] the second one is exp(‖x − y‖² − κ), where κ only rescales ε. For the coupling of [2] at
    κ and ε, take ε e^κ here. Ref: [2] Eq. 5 and VII-C"""
    costs = {"sqeuclidean": 1 - cosines, "exp": np.exp(2 - 2 * cosines)}
    return costs[cost]


def _log_kernel(logits, epsilon, cost, temperature):
    """Return −C/ε, where the cosine is temperature · logit. A masked entry has the cost +∞."""
    return _by_row(lambda s: [-ground_cost(temperature * v, cost) / epsilon for v in s], logits)


def transported(logits, epsilon=0.2, cost="sqeuclidean", temperature=1.0):
    """Count candidates by the entropic coupling P* with the cost C(cos)/ε.

        w_ij = N_i P*_ij / Σ_k P*_ik

    Ref: [2] Eq. 5, 8, Lemma 3"""
    log_kernel = _log_kernel(logits, epsilon, cost, temperature)
    _, g = sinkhorn(log_kernel)
    return _by_row(_mean_one, log_kernel + g[None, :])  # e^{f_i} cancels in P_ij / Σ_k P_ik


def sinkhorn(log_kernel, max_steps=100000):
    """Find the coupling P_ij = exp(f_i + K_ij + g_j) of K = log_kernel, and return P and g.
    Rows and columns are scaled in turn.

        f_i = log a_i − log Σ_j e^{K_ij + g_j}          g_j = log b_j − log Σ_i e^{K_ij + f_i}

    The marginal a is uniform over the rows that have a finite entry, and b over such columns. All
    other rows and columns have no mass. If K is −C/ε, then P minimises [2] Eq. 5. The loop ends
    when f stands still up to rounding. It takes very long if no coupling uses all finite entries.
    Ref: [2] Eq. 5, 6, Lemma 3; Eq. 7 omits e^{g_j}"""
    log_kernel = _double(log_kernel)
    allowed = log_kernel.real > -INF
    plan, g_all = np.zeros_like(log_kernel), np.zeros_like(log_kernel[0])
    if not allowed.any():
        return plan, g_all
    rows, columns = np.flatnonzero(allowed.any(axis=1)), np.flatnonzero(allowed.any(axis=0))
    kernel = log_kernel[np.ix_(rows, columns)]

    def log_sums(x, axis):
        shift = x.real.max(axis=axis, keepdims=True)  # as in _log_sum_exp
        return np.squeeze(shift, axis) + np.log(np.exp(x - shift).sum(axis=axis))

    imaginary = np.abs(kernel.imag).max() or 1.0  # the complex step has to stand still, too
    rounding = 1e-14 * (1 + np.abs(kernel[np.isfinite(kernel)]).max())
    f, g = np.full(len(rows), INF), np.zeros(len(columns))
    for _ in range(max_steps):
        before = f
        f = -math.log(len(rows)) - log_sums(kernel + g[None, :], axis=1)
        g = -math.log(len(columns)) - log_sums(kernel + f[:, None], axis=0)
        change = f - before
        if max(np.abs(change.real).max(), np.abs(change.imag).max() / imaginary) <= rounding:
            break
    plan[np.ix_(rows, columns)] = np.exp(f[:, None] + kernel + g[None, :])
    g_all[columns] = g
    return plan, g_all


def weigh_alike(weights, pos, neg, beta=0.5, alpha=0.3, coupling=None):
    """Weigh each positive as a candidate with the same logit would be → log w⁺ (A, M).
    weights is the name of a rule or a function. `tilted` has e^{β p_im} / Z_β, where Z_β is the
    mean over the candidates. `top` and `hardest` compare with the candidates' threshold.
    `transported` has e^{−C/ε} up to a factor, since positives have no marginal. Its options are in
    coupling."""
    if callable(weights):
        return np.where(np.real(pos) > -INF, weights(pos), -INF)
    if weights == "transported":
        return _log_kernel(pos, **coupling)
    out = np.full_like(_double(pos), -INF)
    for i, (p, s) in enumerate(_together(pos, neg)):
        s = [s[j] for j in _finite(s)]
        for m in _finite(p) if s else []:  # without candidates there is nothing to weigh
            out[i, m] = 0.0
            if weights == "tilted":
                log_partition = _log_sum_exp([beta * v for v in s]) - math.log(len(s))
                out[i, m] = beta * p[m] - log_partition
            if weights == "top" and p[m].real < _quantile(s, alpha):
                out[i, m] = -INF
            if weights == "hardest":
                nearest = _largest(s).real
                heaviest = math.log(len(s) / sum(v.real == nearest for v in s))
                out[i, m] = heaviest if p[m].real >= nearest else -INF
    return out


# ---- 2. Objectives: pos (A, M), neg (A, N), log w (A, N) → losses (A,) ---------------------------
#    The first four and published act on logits. simple and triplet act on cosines.
#    **debiasing holds the arguments of published after log_w. In formulas, published_i is the
#    value of published for anchor i.
def nce(pos, neg, log_w, **debiasing):
    """Compute −log( Σ_m e^{p_im} / (Σ_m e^{p_im} + e^{published_i}) ), 0 without candidates.
    Positives are added up inside the logarithm, as in Fig. 5. `each` averages outside.
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8; [4] Eq. 1 (uniform weights) and 9 (`top`)"""
    negative = published(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        losses.append(_log_sum_exp(p + [n]) - _log_sum_exp(p))
    return np.array(losses)


def each(pos, neg, log_w, **debiasing):
    """Compute −(1/M_i) Σ_m log( e^{p_im} / (e^{p_im} + e^{published_i}) ). Ref: [1] Eq. 2"""
    negative = published(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        losses.append(_mean([_log_sum_exp([p[m], n]) - p[m] for m in _finite(p)]))
    return np.array(losses)


def ppcl(pos, neg, log_w, **debiasing):
    """Compute −(1/M_i) Σ_m log( e^{p_im} / (Σ_m' e^{p_im'} + e^{published_i}) ). Ref: [3] Eq. 8"""
    negative = published(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        log_denominator = _log_sum_exp(p + [n])
        losses.append(_mean([log_denominator - p[m] for m in _finite(p)]))
    return np.array(losses)


def decoupled(pos, neg, log_w, **debiasing):
    """Compute −log( Σ_m e^{p_im} / e^{published_i} ), 0 without candidates.
    Unlike `nce` it has no positives in the denominator. Ref: [12] Eq. 6"""
    negative = published(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        losses.append(n - _log_sum_exp(p) if n.real > -INF else 0.0)
    return np.array(losses)


def _weighted_mean(values, log_w):
    """Return Σ w v / Σ w, or 0 if there is no value."""
    shift = _largest(log_w).real  # as in _log_sum_exp
    w = [_exp(v - shift) for v in log_w]
    return _product(w, values) / sum(w) if w else 0.0


def simple(pos, neg, log_w):
    """Compute −(1/M_i) Σ_m p_im + Σ_j w_ij s_ij / Σ_j w_ij on cosines.
    Without candidates the second term is 0. Ref: [4] Eq. 3 with λ = 1/N; [2] Eq. 9 (BCL)"""
    losses = []
    for p, s, w in _together(pos, neg, log_w):
        places = _finite(s, w)
        attraction = _mean([p[m] for m in _finite(p)])
        repulsion = _weighted_mean([s[j] for j in places], [w[j] for j in places])
        losses.append(-attraction + repulsion)
    return np.array(losses)


def triplet(pos, neg, log_w, margin=0.0):
    """Compute (1/M_i) Σ_m Σ_j w_ij max(0, 2 (s_ij − p_im) + η) / Σ_j w_ij on cosines.
    It is 0 without candidates. On the unit sphere 2 (s − p) = ‖x − x⁺‖² − ‖x − x⁻‖². Ref: [2] IV"""
    losses = []
    for p, s, w in _together(pos, neg, log_w):
        places = _finite(s, w)
        means = []
        for m in _finite(p):
            hinges = [_hinge(2 * (s[j] - p[m]) + margin) for j in places]
            means.append(_weighted_mean(hinges, [w[j] for j in places]))
        losses.append(_mean(means))
    return np.array(losses)


def _published_row(pos, neg, log_w, log_w_pos, tau_plus, temperature):
    """Return `published` of one anchor, and whether the floor binds."""
    places = _finite(neg, log_w)
    if not places:
        return -INF, False
    terms = [neg[j] + log_w[j] for j in places]
    if tau_plus == 0:
        return _log_sum_exp(terms), False
    positives = _finite(pos, log_w_pos)
    if not positives:  # if no positive has a weight, all count the same
        positives, log_w_pos = _finite(pos), [0.0] * len(pos)
    shift = _largest(terms + [pos[m] for m in positives]).real  # as in _log_sum_exp
    weighted = sum(_exp(term - shift) for term in terms)
    total = sum(_exp(log_w[j]) for j in places)
    own_class = [_exp(pos[m] - shift) for m in positives]
    expectation = _weighted_mean(own_class, [log_w_pos[m] for m in positives])
    value = (weighted - total * tau_plus * expectation) / (1 - tau_plus)
    floor = total * _exp(-1 / temperature - shift)  # this floor is in the paper
    if value.real > floor.real:
        return shift + _log(value), False
    return _log(total) - 1 / temperature, True  # this is log floor, but floor may underflow


def published(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None, return_clamped=False):
    """Compute the log of the debiased sum over negatives, −∞ without candidates.

        log max( (Σ_j w_ij e^{s_ij} − W_i τ⁺ E⁺_i) / (1 − τ⁺), W_i e^{−1/t} )
        E⁺_i = Σ_m w⁺_im e^{p_im} / Σ_m w⁺_im        W_i = Σ_j w_ij

    E⁺_i is the plain mean if all w⁺_im are 0. W_i stands for the Q of [1], and is N_i for weights
    of mean 1. W_i τ⁺ E⁺_i is the expected sum over false negatives if the weights are uniform. For
    other weights it is not. Fig. 5 prints the floor without W_i, but e^{−1/t} bounds a mean of
    e^{cos/t}, not a sum. At τ⁺ = 0 there is no floor. With return_clamped the result tells at which
    anchors the floor binds instead. Ref: [1] Eq. 2, Fig. 5"""
    taus = np.broadcast_to(tau_plus, len(pos))
    log_w_pos = uniform(pos) if log_w_pos is None else log_w_pos
    anchors = _together(pos, neg, log_w, log_w_pos, taus)
    found = [_published_row(*anchor, temperature) for anchor in anchors]
    return np.array([row[int(return_clamped)] for row in found])


# ---- 3. The loss ---------------------------------------------------------------------------------

PRESETS = {  # loss: (weights, objective)
    "simclr": ("uniform", "nce"),
    "debiased": ("uniform", "nce"),
    "hcl": ("tilted", "nce"),
    "ot": ("transported", "nce"),
    "hard": ("top", "nce"),
    "simple": ("uniform", "simple"),
    "hard-simple": ("top", "simple"),
    "triplet": ("hardest", "triplet"),
    "ppcl": ("uniform", "ppcl"),
    "supcon": ("uniform", "ppcl"),
}
# If τ⁺ is not given, it is 1/(N_i + 1) for these losses, and 0 for the others.
HAVE_TAU = ("debiased", "hcl")
RULES = {rule.__name__: rule for rule in (uniform, tilted, hardest, top, transported)}
# These objectives have τ⁺.
DEBIASED = {"nce": nce, "each": each, "ppcl": ppcl, "decoupled": decoupled}


def unit(x):
    """Project rows (…, D) to the unit sphere.

        x_i / √(Σ_d x_id²)

    A zero row stays zero. Its gradient is zero here, but passes unchanged in `hardneg.unit`."""
    shape, out = np.shape(x), []
    for row in _lists(np.reshape(x, (-1, shape[-1]))):
        is_zero = all(v.real == 0 for v in row)
        norm = _product(row, row) ** 0.5  # without a conjugate this is analytic
        out.append([0.0 if is_zero else v / norm for v in row])
    return np.array(out).reshape(shape)


def _limit(positives, absolute_margin, relative_margin):
    """Return the largest cosine that a negative may have, from the cosines of the positives."""
    nearest, limit = _largest(positives).real, INF
    if nearest == -INF:
        return INF
    if absolute_margin is not None:
        limit = min(limit, nearest - absolute_margin)
    if relative_margin is not None:
        limit = min(limit, nearest - relative_margin * abs(nearest))
    return limit


def _own_rows(positive_index, a):
    """Return the rows of the bank that show the sample of anchor a."""
    named = [] if positive_index is None else np.ravel(positive_index[a])
    return sorted({j for j in named if j >= 0})


def _who_is_who(views, bank, positive_index, negative_mask, labels, margins, objective):
    """Return the cosines of anchors with positives (A, M) and candidates (A, N), −∞ if none."""
    size, is_single = len(views[0]), len(views) == 1
    rows = _lists(np.concatenate(views))
    labels = [] if labels is None else list(labels)
    by_label = objective == "ppcl" or is_single and positive_index is None
    by_label = by_label and len(labels) > 0
    candidates, candidate_labels = [rows] * len(rows), labels * len(views)
    if bank is not None:
        each_has = np.broadcast_to(bank, (size, *np.shape(bank)[-2:]))  # (B, K, D)
        candidates, candidate_labels = _lists(each_has), labels[size:]
    pos, neg = [], []
    for a in range(len(candidates)):
        own_views = range(a % size, len(rows), size)
        excluded = own_views if bank is None else _own_rows(positive_index, a)
        positives = [_product(rows[a], rows[b]) for b in own_views if b != a]
        if is_single and bank is not None:
            positives = [_product(rows[a], candidates[a][j]) for j in excluded]
        negatives = [-INF] * len(candidates[a])
        for j, candidate in enumerate(candidates[a]):
            same_label = j < len(candidate_labels) and candidate_labels[j] == labels[a % size]
            is_masked = negative_mask is not None and not negative_mask[a][j]
            if j in excluded:
                continue
            if same_label and by_label:
                positives.append(_product(rows[a], candidate))
            elif not same_label and not is_masked:
                negatives[j] = _product(rows[a], candidate)
        limit = _limit(positives, *margins)
        for j, cosine in enumerate(negatives):
            if cosine.real > limit:
                negatives[j] = -INF
        pos.append(positives)
        neg.append(negatives)
    width = max(1, *(len(row) for row in pos))
    return [row + [-INF] * (width - len(row)) for row in pos], neg


def _losses(objective, pos_cosines, cosines, pos, neg, log_w, margin, debiasing):
    """Return the losses (A,) by the name of an objective, or by a function."""
    if callable(objective):
        return objective(pos, neg, log_w)
    if objective == "simple":
        return simple(pos_cosines, cosines, log_w)
    if objective == "triplet":
        return triplet(pos_cosines, cosines, log_w, margin)
    return DEBIASED[objective](pos, neg, log_w, **debiasing)


def _mean_or_nan(values):
    """Return the mean of the real parts of values, or nan if there is none."""
    return _mean([v.real for v in values]) if values else math.nan


def _statistics(objective, pos_cosines, cosines, pos, neg, log_w, debiasing):
    """Compute the statistics that `hardneg.contrastive_loss` returns, nan where there is no value.
    Over the anchors with candidates, ess is the mean of (Σ_j w_ij)² / (N_i Σ_j w_ij²), and spread²
    is the mean of (1/N_i) Σ_j (cos_ij − mean_i)²."""
    clamped = [0.0] * len(pos)
    if objective in DEBIASED:
        clamped = _lists(published(pos, neg, log_w, **debiasing, return_clamped=True))
    counts, effective, variances = [], [], []
    for s, log_weights in _together(cosines, log_w):
        places = _finite(s)
        counts.append(len(places))
        if places:
            w = [math.exp(log_weights[j].real) for j in places]
            effective.append(sum(w) ** 2 / (len(w) * _product(w, w)))
            c = [s[j].real for j in places]
            variances.append(_mean([(v - _mean(c)) ** 2 for v in c]))
    return {
        "clamped": _mean_or_nan(clamped),
        "ess": _mean_or_nan(effective),
        "positive": _mean_or_nan([row[m] for row in pos_cosines for m in _finite(row)]),
        "negative": _mean_or_nan([row[j] for row in cosines for j in _finite(row)]),
        "spread": math.sqrt(_mean_or_nan(variances)),
        "candidates": _mean(counts),
    }


def contrastive_loss(
    *views,
    loss="simclr",
    weights=None,
    objective=None,
    temperature=0.1,
    tau_plus=None,
    beta=0.5,
    alpha=0.3,
    epsilon=0.2,
    cost="sqeuclidean",
    margin=0.0,
    negatives=None,
    positive_index=None,
    negative_mask=None,
    log_weights=None,
    labels=None,
    absolute_margin=None,
    relative_margin=None,
    normalize=True,
    detach_weights=None,
    reduction="mean",
    return_stats=False,
):
    """Compute the loss of (B, D) views. It is the mean, the sum, or all values (A,).
    The arguments are those of `hardneg.contrastive_loss`, with two differences. negative_mask is
    (A, N). For `transported`, column k of negatives (B, K, D) is the same candidate for all
    anchors. An anchor without a positive has the loss 0, and the mean leaves it out.
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8, 9; [3] Eq. 8; [4] Eq. 1, 3, 9"""
    preset_weights, preset_objective = PRESETS[loss]
    weights = weights or preset_weights
    objective = objective or preset_objective
    if detach_weights is None:
        detach_weights = weights == "transported"

    # 1. Who could be a negative?
    if normalize:
        views = [unit(view) for view in views]
    if normalize and negatives is not None:
        negatives = unit(negatives)
    margins = absolute_margin, relative_margin
    pos_cosines, cosines = _who_is_who(
        views, negatives, positive_index, negative_mask, labels, margins, objective
    )
    pos = _double([[v / temperature for v in row] for row in pos_cosines])
    neg = _double([[v / temperature for v in row] for row in cosines])
    if tau_plus is None:
        tau_plus = [1 / (len(_finite(row)) + 1) if loss in HAVE_TAU else 0.0 for row in cosines]
    if objective not in DEBIASED:
        tau_plus = 0.0

    # 2. How much does each one count?
    coupling = {"epsilon": epsilon, "cost": cost, "temperature": temperature}
    options = {"tilted": {"beta": beta}, "top": {"alpha": alpha}, "transported": coupling}
    seen, seen_pos = neg, pos
    if detach_weights:
        seen, seen_pos = neg.real, pos.real
    rule = weights if callable(weights) else RULES[weights]
    log_w = rule(seen, **options.get(weights, {}))
    if log_weights is not None:
        log_w = log_w + np.asarray(log_weights)
    log_w_pos = uniform(seen_pos)
    if np.any(tau_plus) and pos.shape[1] > 1:  # the weight of a single positive cancels
        log_w_pos = weigh_alike(weights, seen_pos, seen, beta, alpha, coupling)

    # 3. What is done with them?
    debiasing = {"tau_plus": tau_plus, "temperature": temperature, "log_w_pos": log_w_pos}
    losses = _losses(objective, pos_cosines, cosines, pos, neg, log_w, margin, debiasing)
    has_positive = [bool(_finite(row)) for row in pos]
    losses = np.where(has_positive, losses, 0)
    value = {"none": losses, "sum": sum(losses), "mean": sum(losses) / max(1, sum(has_positive))}
    value = value[reduction]
    if return_stats:
        return value, _statistics(objective, pos_cosines, cosines, pos, neg, log_w, debiasing)
    return value


# ---- 4. The papers' equations for two plain views ------------------------------------------------
#    x, y (B, D) are unit rows. The anchors i are the rows f_1 … f_2B = x_1 … x_B, y_1 … y_B. The
#    positive p is the other view of i. The negatives k are the other N = 2(B − 1) rows.
def _cosines(x, y):
    """Yield f_i·f_p, and the list of all f_i·f_k, for every anchor i."""
    f = _lists(x) + _lists(y)
    for i in range(len(f)):
        p = (i + len(x)) % len(f)
        negatives = [_product(f[i], f[k]) for k in range(len(f)) if k not in (i, p)]
        yield _product(f[i], f[p]), negatives


def simclr_eq(x, y, temperature):
    """Compute the mean over i of −log( e^{f_i·f_p/τ} / (Σ_k e^{f_i·f_k/τ} + e^{f_i·f_p/τ}) ).
    [4] takes the negatives from one view, [6] from both, as here. Ref: [4] Eq. 1; [6] Eq. 1"""
    losses = []
    for s_p, s in _cosines(x, y):
        positive = _exp(s_p / temperature)
        negative = sum(_exp(v / temperature) for v in s)
        losses.append(-_log(positive / (negative + positive)))
    return _mean(losses)


def hcl_eq2(x, y, temperature, beta, tau_plus):
    """Compute E_i −log( e^{s_p} / (e^{s_p} + (Q/τ⁻) (E_{q_β} e^{s_k} − τ⁺ E_{q_β⁺} e^{s_p})) ).

        E_{q_β} e^{s_k} = (1/N) Σ_k e^{(β+1) s_k} / Z_β        Z_β = (1/N) Σ_k e^{β s_k}

    Here s_k = f_i·f_k/t, τ⁻ = 1 − τ⁺ and Q = N. E_{q_β⁺} is the same mean over the one positive.
    The term with Q is at least N e^{−1/t}, as in the authors' code. Eq. 2 has no such floor, and
    the floor that Fig. 5 prints is e^{−1/t}. Ref: [1] Eq. 2 and the two below it, Fig. 5"""
    losses = []
    for s_p, s in _cosines(x, y):
        s_p, s, n = s_p / temperature, [v / temperature for v in s], len(s)
        partition = sum(_exp(beta * v) for v in s) / n
        expectation = sum(_exp((beta + 1) * v) / partition for v in s) / n
        own_class = _exp((beta + 1) * s_p) / _exp(beta * s_p)
        negative = n / (1 - tau_plus) * (expectation - tau_plus * own_class)
        negative = _largest([negative, n * math.exp(-1 / temperature)])
        losses.append(-_log(_exp(s_p) / (_exp(s_p) + negative)))
    return _mean(losses)


def ot_eq5(x, y, temperature, epsilon):
    """Compute the mean over i of log(1 + o E_{P*(k|i)} e^{f_i·f_k/t} / e^{f_i·f_p/t}), with o = N.

        P* = argmin_P Σ_ik P_ik C_ik + ε KL(P ‖ product of marginals)        C_ik = ½ ‖f_i − f_k‖²

    C_ik is ∞ if i and k show one sample. The marginals are uniform. The minimiser has the form
    P*_ik = u_i e^{−C_ik/ε} v_k. The loop scales rows and columns in turn, without logarithms, so it
    needs ε of 0.2 or more, and B ≥ 2. No gradient flows through P*, as in the published code.
    Ref: [2] Eq. 5, 8, Lemma 3"""
    f = _lists(x) + _lists(y)
    n = len(f)
    kernel = np.zeros((n, n))
    for i in range(n):
        for k in range(n):
            if i % len(x) != k % len(x):
                squares = [(a - b) ** 2 for a, b in zip(f[i], f[k], strict=True)]
                cost = sum(squares).real / 2  # the real part alone, so that P* is a constant
                kernel[i, k] = math.exp(-cost / epsilon)
    v, error = np.ones(n), INF
    while error > 1e-13:
        u = 1 / n / (kernel @ v)
        v = 1 / n / (kernel.T @ u)
        error = np.abs(u * (kernel @ v) - 1 / n).sum()
    losses = []
    for i in range(n):
        p = (i + len(x)) % n
        s = [_product(f[i], row) / temperature for row in f]
        plan = u[i] * kernel[i] * v  # this is 0 at i and p
        expectation = _product(plan / plan.sum(), [_exp(logit) for logit in s])
        losses.append(_log(1 + (n - 2) * expectation / _exp(s[p])))
    return _mean(losses)


def hard_eq9(x, y, temperature, alpha):
    """Compute the mean over i of −log( e^{s_p/τ} / (Σ_{s_k ≥ s_α} e^{s_k/τ} + e^{s_p/τ}) ).
    Here s_k = f_i·f_k. The upper α quantile s_α is the ⌈α N⌉-th largest s_k. Ref: [4] Eq. 8, 9"""
    losses = []
    for s_p, s in _cosines(x, y):
        quantile = _quantile(s, alpha)
        negative = sum(_exp(v / temperature) for v in s if v.real >= quantile)
        positive = _exp(s_p / temperature)
        losses.append(-_log(positive / (negative + positive)))
    return _mean(losses)


def ppcl_eq8(v, raw, latents, temperature):
    """Compute (1/|I|) Σ_i −1/|P(i)| Σ_{p ∈ P(i)} log( e^{v_i·v_p/τ} / Σ_{a ∈ A(i)} e^{v_i·v_a/τ} )
    for rows v (|I|, D) of a multiviewed batch I. raw[i] is the raw sample of view i. latents[i] is
    the latent that generated it, or None if it is real. A(i) = I \\ {i}. If i is generated, P(i) is
    {p in A(i): z_p = z_i}. If it is real, P(i) is {j(i)}, the other view. v_i·v_a is a cosine. The
    paper has no factor 1/|I|. Ref: [3] Eq. 8"""
    v = _lists(unit(v))
    losses = []
    for i in range(len(v)):
        others = [a for a in range(len(v)) if a != i]
        positives = [p for p in others if latents[p] == latents[i]]
        if latents[i] is None:
            positives = [p for p in others if raw[p] == raw[i]]
        log_total = _log_sum_exp([_product(v[i], v[a]) / temperature for a in others])
        losses.append(_mean([log_total - _product(v[i], v[p]) / temperature for p in positives]))
    return _mean(losses)


# ---- 5. Gradients --------------------------------------------------------------------------------
def gradient(function, x):
    """Compute the gradient ∂f/∂x_k = Im f(x + i h e_k) / h entry by entry, exact up to rounding."""
    h = 1e-30
    out = np.zeros(np.shape(x))
    for place in np.ndindex(np.shape(x)):
        direction = np.zeros(np.shape(x))
        direction[place] = 1
        out[place] = np.imag(function(x + 1j * h * direction)) / h
    return out
