"""Hard-negative contrastive learning, formula by formula, in plain float64 NumPy.

Each sum sign of the papers is one loop or one sum(), so you can compare each line with its
equation. The tests compare `hardneg.py` with this file, in value and gradient.

    symbol    name here      meaning
    s_j       neg            logits of an anchor's candidates: their cosines with the anchor, over t
    p_m       pos            logits of its positives
    w_j       log_w          log importance weights of its candidates, −∞ if one does not count
    w⁺_m      log_w_pos      log importance weights of its positives
    N, M                     how many candidates and positives it has
    t, τ      temperature    a logit is cos/t, as in [4] and the code of [1]; the text of [1] has
                             rows of length 1/t, so its logit is cos/t²
    τ⁺        tau_plus       probability that a candidate has the anchor's class
    β, α      beta, alpha    concentration of `tilted`; share of the candidates that `top` keeps
    ε         epsilon        entropic regularisation of `transported`, in units of its cost
    η         margin         margin of the triplet loss
    f, v, z   x, y, v, z     embeddings (n, D)

Gradients are complex steps, Im f(x + i h e_k) / h. Nothing is subtracted, so at h = 1e-30 they are
exact up to rounding. Losses have to be analytic. So the code compares real parts, and it has
neither a conjugate nor a modulus. A weight without its imaginary part is detached.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. 2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport. 2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach. 2202.06464; numbers as in version 1
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. 2012.09740
    [6] Chen et al. A Simple Framework for Contrastive Learning (SimCLR). 2002.05709
   [12] Yeh et al. Decoupled Contrastive Learning. 2110.06848
"""

import cmath
import inspect
import math
from fractions import Fraction

import numpy as np

INF = math.inf


# ---- Numbers, real or complex --------------------------------------------------------------------
def _double(x):
    """Return x in float64, or in complex128 if it is complex."""
    return np.asarray(x, dtype=np.result_type(np.asarray(x), np.float64))


def _lists(x):
    """Return x as nested lists, which are faster in loops."""
    return _double(x).tolist()


def _exp(z):
    return cmath.exp(z) if isinstance(z, complex) else math.exp(z)


def _log(z):
    return cmath.log(z) if isinstance(z, complex) else math.log(z)


def _places(*rows):
    """Return the places j at which every row is above −∞."""
    return [j for j in range(len(rows[0])) if all(row[j].real > -INF for row in rows)]


def _finite(row):
    """Return the values above −∞."""
    return [v for v in row if v.real > -INF]


def _largest(values):
    """Return the value with the largest real part, or −∞ if there is none."""
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
    # e^v may overflow, so the largest v is subtracted first
    total = sum(_exp(v - shift) for v in values if v.real > -INF)
    return shift + _log(total)


def _log_mean_exp(values):
    """Return log (1/n) Σ e^v, or −∞ if there is no value."""
    return _log_sum_exp(values) - math.log(max(1, len(values)))


def _weighted_mean(values, log_w):
    """Return Σ w v / Σ w, or 0 if there is no value."""
    shift = _largest(log_w).real  # as in _log_sum_exp
    w = [_exp(v - shift) for v in log_w]
    return _product(w, values) / sum(w) if w else 0.0


def _takes(function):
    """Return the parameters of a function by name."""
    return inspect.signature(function).parameters


def _fill_in(function, known):
    """Call a function with what its parameters name."""
    return function(**{name: known[name] for name in _takes(function) if name in known})


# ---- 1. Weights: logits of one anchor → log weights, −∞ for what does not count ------------------
#    A rule weighs logits, of the candidates or of positives. A positive weighs what a candidate at
#    its logit would weigh. What has a default is an option.
def uniform(logits):
    """Count every candidate the same, log w_j = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    return [0.0 for _ in logits]


def tilted(logits, candidates, beta=0.5):
    """Count near candidates more.

        w_j = e^{β s_j} / ((1/N) Σ_k e^{β s_k})

    Ref: [1] Eq. 2"""
    log_partition = _log_mean_exp([beta * s for s in candidates])
    return [beta * v - log_partition for v in logits]


def hardest(logits, candidates):
    """Count the nearest candidate alone. Its weight is N, and all others are 0.
    If several are nearest, they share N. It is the limit β → ∞ of `tilted`.
    Ref: [1] Prop. 1; [4] Eq. 6"""
    nearest = _largest(candidates).real
    ties = sum(s.real == nearest for s in candidates)
    return [math.log(len(candidates) / ties) if v.real >= nearest else -INF for v in logits]


def _quantile(values, alpha):
    """Return the ⌈α n⌉-th largest real part of n values, or the largest if ⌈α n⌉ is 0."""
    # ⌈0.07 · 100⌉ is 7, but floats would give 8
    share = Fraction(alpha).limit_denominator(10**6)
    kept = max(1, math.ceil(share * len(values)))
    return sorted((v.real for v in values), reverse=True)[kept - 1]


def top(logits, candidates, alpha=0.3):
    """Count the upper α quantile alone. A weight is 1 if s_j ≥ s_α, and 0 if not.
    The threshold s_α is the ⌈α N⌉-th largest logit. α is first rounded to a fraction with a
    denominator of at most 10⁶. Ref: [4] Eq. 8, 9"""
    threshold = _quantile(candidates, alpha)
    return [0.0 if v.real >= threshold else -INF for v in logits]


def ground_cost(cosines, cost="sqeuclidean"):
    """Compute the cost of coupling two unit rows x and y from their cosine.

        "sqeuclidean"  ½‖x − y‖² = 1 − x·y        "exp"  exp(‖x − y‖²)

    [2] prints exp(‖x − y‖² − κ), which is the same at ε e^κ. Ref: [2] Eq. 5 and VII-C"""
    costs = {"sqeuclidean": 1 - cosines, "exp": np.exp(2 - 2 * cosines)}
    return costs[cost]


def transported(logits, f, g, temperature, epsilon=0.2, cost="sqeuclidean"):
    """Count candidates by the entropic coupling P* with the cost C(cos)/ε.

        w_ij = N_i P*_ij / Σ_k P*_ik = e^{f_i − C_ij/ε + g_j}

    f is the anchor's, and g has a value for each logit. A positive has no marginal, so its g is 0.
    Ref: [2] Eq. 5, 8, Lemma 3"""
    costs = [ground_cost(temperature * v, cost) for v in logits]
    return [f - c / epsilon + g_j for c, g_j in zip(costs, g, strict=True)]


def sinkhorn(log_kernel, max_steps=100000):
    """Find the coupling P_ij = exp(f_i + K_ij + g_j) of K = log_kernel, and return P and g.
    Rows and columns are scaled in turn.

        f_i = log a_i − log Σ_j e^{K_ij + g_j}          g_j = log b_j − log Σ_i e^{K_ij + f_i}

    The marginal a is uniform over the rows that have a finite entry, and b over such columns. The
    others have no mass. If K is −C/ε, then P minimises [2] Eq. 5. The loop ends when f stands still
    up to rounding, which takes very long if no coupling uses all finite entries.
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


def own_rule(logits, weights):
    """Weigh by a function of an array."""
    return weights(np.array(logits))


RULES = {
    "uniform": uniform,
    "tilted": tilted,
    "hardest": hardest,
    "top": top,
    "transported": transported,
}


def weigh(weights, pos, neg, temperature=1.0, **options):
    """Weigh candidates (A, N) and positives, a list for each anchor, by a rule → log w, log w⁺.
    weights is the name of the rule or a function. Who is no negative of i has −∞ in neg and in log
    w. Without candidates positives have −∞, too."""
    rule = own_rule if callable(weights) else RULES[weights]
    options |= {"weights": weights, "temperature": temperature}

    def by_row(rows, f, g):
        found = []
        for i, row in enumerate(rows):
            places, out = _places(row), [-INF] * len(row)
            known = {"logits": [row[j] for j in places], "candidates": _finite(neg[i])}
            known |= {"f": f[i], "g": [g[j] for j in places]}
            if places and known["candidates"]:
                log_w = _fill_in(rule, options | known)
                for j, value in zip(places, log_w, strict=True):
                    out[j] = value
            found.append(out)
        return found

    zeros = [0.0] * max(map(len, [*pos, *neg]))
    f, g = [0.0] * len(neg), zeros
    if "g" in _takes(rule):
        log_kernel = _double(by_row(neg, f, zeros))
        g = sinkhorn(log_kernel)[1].tolist()
        f = [-_log_mean_exp(_finite(row)) for row in (log_kernel + g).tolist()]
    return by_row(neg, f, g), by_row(pos, f, zeros)


# ---- 2. Objectives: pos, neg, log w of one anchor → its loss -------------------------------------
#    neg has the candidates that count. log_negatives is log N̂, of `published`.
def nce(pos, log_negatives):
    """Compute −log( Σ_m e^{p_m} / (Σ_m e^{p_m} + N̂) ), 0 without candidates.
    Positives are added up inside the logarithm, as in Fig. 5. `each` averages outside.
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8; [4] Eq. 1 (uniform weights) and 9 (`top`)"""
    return _log_sum_exp(pos + [log_negatives]) - _log_sum_exp(pos)


def each(pos, log_negatives):
    """Compute −(1/M) Σ_m log( e^{p_m} / (e^{p_m} + N̂) ). Ref: [1] Eq. 2"""
    return _mean([_log_sum_exp([p, log_negatives]) - p for p in pos])


def ppcl(pos, log_negatives):
    """Compute −(1/M) Σ_m log( e^{p_m} / (Σ_l e^{p_l} + N̂) ). Ref: [3] Eq. 8"""
    log_denominator = _log_sum_exp(pos + [log_negatives])
    return _mean([log_denominator - p for p in pos])


def decoupled(pos, log_negatives):
    """Compute −log( Σ_m e^{p_m} / N̂ ), 0 without candidates.
    Unlike `nce` it has no positives in the denominator. Ref: [12] Eq. 6"""
    return log_negatives - _log_sum_exp(pos) if log_negatives.real > -INF else 0.0


def simple(pos, neg, log_w, temperature):
    """Compute −(1/M) Σ_m cos_m + Σ_j w_j cos_j / Σ_j w_j, where cos is t s.
    Without candidates the second term is 0. Ref: [4] Eq. 3 with λ = 1/N; [2] Eq. 9 (BCL)"""
    return temperature * (-_mean(pos) + _weighted_mean(neg, log_w))


def triplet(pos, neg, log_w, temperature, margin=0.0):
    """Compute (1/M) Σ_m Σ_j w_j max(0, 2 (cos_j − cos_m) + η) / Σ_j w_j, 0 without candidates.
    On the unit sphere 2 (cos_j − cos_m) = ‖x − x_m‖² − ‖x − x_j‖². Ref: [2] IV"""
    means = []
    for p in pos:
        hinges = [_hinge(2 * temperature * (s - p) + margin) for s in neg]
        means.append(_weighted_mean(hinges, log_w))
    return _mean(means)


def published(pos, neg, log_w, log_w_pos, tau_plus, temperature):
    """Compute the log of the debiased sum over negatives, −∞ without candidates, and whether the
    floor binds.

        log max( (Σ_j w_j e^{s_j} − W τ⁺ E⁺) / (1 − τ⁺), W e^{−1/t} )
        E⁺ = Σ_m w⁺_m e^{p_m} / Σ_m w⁺_m        W = Σ_j w_j

    E⁺ is the plain mean if all w⁺_m are 0. W stands for the Q of [1], and is N for weights of mean
    1. For uniform weights alone W τ⁺ E⁺ is the expected sum over false negatives. Fig. 5 prints the
    floor without W, but e^{−1/t} bounds a mean of e^{cos/t}, not a sum. At τ⁺ = 0 there is no
    floor. Ref: [1] Eq. 2, Fig. 5"""
    if not neg:
        return -INF, False
    terms = [s + w for s, w in zip(neg, log_w, strict=True)]
    if tau_plus == 0:
        return _log_sum_exp(terms), False
    places = _places(log_w_pos)
    if not places:  # if no positive has a weight, all count the same
        places, log_w_pos = _places(pos), [0.0] * len(pos)
    shift = _largest(terms + [pos[m] for m in places]).real  # as in _log_sum_exp
    weighted = sum(_exp(term - shift) for term in terms)
    total = sum(_exp(w) for w in log_w)
    own_class = [_exp(pos[m] - shift) for m in places]
    expectation = _weighted_mean(own_class, [log_w_pos[m] for m in places])
    value = (weighted - total * tau_plus * expectation) / (1 - tau_plus)
    floor = total * _exp(-1 / temperature - shift)  # this floor is in the paper
    if value.real > floor.real:
        return shift + _log(value), False
    return _log(total) - 1 / temperature, True  # this is log floor, but floor may underflow


OBJECTIVES = {  # objective: its function, and whether samples of one label are positives in it
    "nce": (nce, False),
    "each": (each, False),
    "ppcl": (ppcl, True),
    "decoupled": (decoupled, False),
    "simple": (simple, False),
    "triplet": (triplet, False),
}


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
# If τ⁺ is not given, it is 1/(N + 1) for these losses, and 0 for the others.
HAVE_TAU = ("debiased", "hcl")


def options_of(*functions):
    """Return the options that functions take, with their defaults."""
    parameters = [p for function in functions for p in _takes(function).values()]
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def unit(x):
    """Project rows (…, D) to the unit sphere.

        x_i / √(Σ_d x_id²)

    A zero row stays zero, and so does its gradient, which passes unchanged in `hardneg.unit`."""
    shape, out = np.shape(x), []
    for row in _lists(np.reshape(x, (-1, shape[-1]))):
        is_zero = all(v.real == 0 for v in row)
        norm = _product(row, row) ** 0.5
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


def who(views, bank, positive_index, negative_mask, labels, margins, by_label):
    """Answer question 1: the cosines of every anchor with its positives, a list for each, and with
    the candidates (A, N), −∞ for who is no negative of it."""
    size, is_single = len(views[0]), len(views) == 1
    rows = _lists(np.concatenate(views))
    labels = [] if labels is None else list(labels)
    by_label = by_label or is_single and positive_index is None
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
        pos.append(positives)
        neg.append([cosine if cosine.real <= limit else -INF for cosine in negatives])
    return pos, neg


def _mean_or_nan(values):
    """Return the mean of the real parts of values, or nan if there is none."""
    return _mean([v.real for v in values]) if values else math.nan


def _statistics(pos, neg, log_w, clamped):
    """Compute the statistics that `hardneg.contrastive_loss` returns, nan where there is no value.
    pos and neg are cosines. spread² is the mean of (1/N_i) Σ_j (cos_ij − mean_i)² over the anchors
    with candidates, and ess that of (Σ_j w_ij)² / (N_i Σ_j w_ij²) over those with a weight."""
    effective, variances, counts = [], [], []
    for row, log_weights in zip(neg, log_w, strict=True):
        c = [v.real for v in _finite(row)]
        w = [math.exp(v.real) for v in log_weights]
        counts.append(len(c))
        if sum(w) > 0:
            effective.append(sum(w) ** 2 / (len(c) * _product(w, w)))
        if c:
            variances.append(_mean([(v - _mean(c)) ** 2 for v in c]))
    return {
        "clamped": _mean_or_nan(clamped),
        "ess": _mean_or_nan(effective),
        "positive": _mean_or_nan([v for row in pos for v in row]),
        "negative": _mean_or_nan([v for row in neg for v in _finite(row)]),
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
    negatives=None,
    positive_index=None,
    negative_mask=None,
    log_weights=0.0,
    labels=None,
    absolute_margin=None,
    relative_margin=None,
    normalize=True,
    detach_weights=None,
    reduction="mean",
    return_stats=False,
    **options,
):
    """Compute the loss of (B, D) views. It is the mean, the sum, or all values (A,).
    The arguments are those of `hardneg.contrastive_loss`, where negative_mask is (A, N). Rules and
    objectives get the options that they name. An anchor without a positive has the loss 0, and the
    mean leaves it out.
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8, 9; [3] Eq. 8; [4] Eq. 1, 3, 9"""
    weights, objective = weights or PRESETS[loss][0], objective or PRESETS[loss][1]
    judge, by_label = OBJECTIVES.get(objective, (objective, False))
    unknown = options.keys() - options_of(*RULES.values(), *(row[0] for row in OBJECTIVES.values()))
    if unknown:
        raise TypeError(f"there is no option {unknown}")
    if detach_weights is None:
        detach_weights = weights == "transported"

    # 1. Who could be a negative?
    if normalize:
        views = [unit(view) for view in views]
    if normalize and negatives is not None:
        negatives = unit(negatives)
    masks = positive_index, negative_mask, labels, (absolute_margin, relative_margin)
    pos_cosines, cosines = who(views, negatives, *masks, by_label)
    pos = [[v / temperature for v in row] for row in pos_cosines]
    neg = [[v / temperature for v in row] for row in cosines]

    # 2. How much does each one count?
    seen_pos, seen = pos, neg
    if detach_weights:
        seen_pos, seen = ([[v.real for v in row] for row in rows] for rows in (pos, neg))
    log_w, log_w_pos = weigh(weights, seen_pos, seen, temperature, **options)
    log_w = (_double(log_w) + log_weights).tolist()

    # 3. What is done with them?
    losses, clamped = [], []
    for i, p in enumerate(pos):
        places = _places(log_w[i])
        known = {"temperature": temperature, "pos": p, "log_w_pos": log_w_pos[i]} | options
        known |= {"neg": [neg[i][j] for j in places], "log_w": [log_w[i][j] for j in places]}
        known["tau_plus"] = tau_plus
        if tau_plus is None:
            known["tau_plus"] = 1 / (len(_finite(neg[i])) + 1) if loss in HAVE_TAU else 0.0
        known["log_negatives"], is_clamped = _fill_in(published, known)
        clamped.append(is_clamped and "log_negatives" in _takes(judge))
        losses.append(_fill_in(judge, known) if p else 0.0)
    has_positive = sum(bool(p) for p in pos)
    value = {
        "none": np.array(losses),
        "sum": sum(losses),
        "mean": sum(losses) / max(1, has_positive),
    }
    value = value[reduction]
    if return_stats:
        return value, _statistics(pos_cosines, cosines, log_w, clamped)
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
    Fig. 5 prints e^{−1/t}. Ref: [1] Eq. 2 and the two below it, Fig. 5"""
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

    C_ik is ∞ if i and k show one sample. The minimiser is P*_ik = u_i e^{−C_ik/ε} v_k with uniform
    marginals. Without logarithms the loop needs ε of 0.2 or more, and B ≥ 2. No gradient flows
    through P*, as in the published code.
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
    Here s_k = f_i·f_k, and s_α is the ⌈α N⌉-th largest of them. Ref: [4] Eq. 8, 9"""
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
