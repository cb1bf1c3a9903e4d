"""Hard-negative contrastive learning, formula by formula, in plain float64 NumPy.

This file states slowly what the papers state, with one loop or one sum() for each sum sign. So a
reader can compare every line with the equation in its docstring. The tests compare `hardneg.py`
with this file, in value and in gradient. The two files share no code.

    symbol     name here     shape   meaning
    s_ij       neg, logits   (A, N)  cosine of anchor i and candidate j, over t; −∞: not a negative
    p_im       pos           (A, M)  cosine of anchor i and its positive m, over t; −∞: no positive
    log w_ij   log_w         (A, N)  log importance weight of a candidate; −∞: it does not count
    log w⁺_im  log_w_pos     (A, M)  log importance weight of a positive
    N_i, M_i                         number of finite entries in row i
    t, τ       temperature           a logit is cos/t, as in [4] and the code of [1]; in the text of
                                     [1] rows have the length 1/t, so its logit is cos/t²
    τ⁺         tau_plus              probability that a candidate has the anchor's class
    β, α       beta, alpha           concentration of `tilted`; share of the candidates `top` keeps
    ε, κ       epsilon, kappa        entropic regularisation; offset of the exponential ground cost
    η          margin                margin of the triplet loss
    f, v, z    x, y, v, z    (n, D)  embeddings

Gradients are complex steps: ∂f/∂x_k = Im f(x + i h e_k) / h has no subtraction, so it is exact to
rounding at h = 1e-30. For this the losses, and what they call, accept complex input and are
analytic in it: they compare real parts, without conjugate or modulus. A weight without its
imaginary part is detached.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. 2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport for
        Contrastive Representation Learning. IJCNN 2023. 2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach. AAAI 2023. 2202.06464. Equations are
        numbered as in its submission, Data-efficient Contrastive Learning by Differentiable Hard
        Sample and Hard Positive Pair Generation
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. CVPR 2021. 2012.09740
    [5] Wang, Isola. Understanding Contrastive Representation Learning through Alignment and
        Uniformity on the Hypersphere. ICML 2020. 2005.10242
    [6] Chen et al. A Simple Framework for Contrastive Learning (SimCLR). ICML 2020. 2002.05709
   [10] Ho, Vasconcelos. Contrastive Learning with Adversarial Examples. NeurIPS 2020. 2010.12050
   [12] Yeh et al. Decoupled Contrastive Learning. ECCV 2022. 2110.06848
"""

import cmath
import math
from fractions import Fraction
from functools import partial
from itertools import permutations

import numpy as np
from scipy.optimize import brentq, linear_sum_assignment, linprog

INF = math.inf


# ---- Numbers, real or complex --------------------------------------------------------------------
def _double(x):
    """Return x in float64, or in complex128 if it is complex."""
    return np.asarray(x, dtype=np.result_type(np.asarray(x), np.float64))


def _lists(x):
    """Return x as nested lists: Python's own doubles are as exact as NumPy's, faster in loops."""
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


def _squared_distance(x, y):
    """Return ‖x − y‖² = Σ_d (x_d − y_d)²."""
    return sum((a - b) * (a - b) for a, b in zip(x, y, strict=True))


def _log_sum_exp(values):
    """Return log Σ e^v, or −∞ if there is no value."""
    shift = _largest(values).real
    if shift == -INF:
        return -INF
    # Numerics: e^v may overflow, so the largest v is subtracted first and added again at the end.
    total = sum(_exp(v - shift) for v in values if v.real > -INF)
    return shift + _log(total)


# ---- 1. Weights: logits (A, N) → log weights (A, N), −∞ where the logits are ---------------------
def unit(x):
    """Project rows (…, D) to the unit sphere: x_i / √(Σ_d x_id²).
    A zero row stays zero and has gradient zero. In `hardneg.unit` its gradient passes unchanged."""
    shape, out = np.shape(x), []
    for row in _lists(np.reshape(x, (-1, shape[-1]))):
        is_zero = all(v.real == 0 for v in row)
        norm = _product(row, row) ** 0.5  # no conjugate, so it is analytic
        out.append([0.0 if is_zero else v / norm for v in row])
    return np.array(out).reshape(shape)


def _by_row(rule, logits):
    """Apply a rule to every row. A rule takes the finite logits and returns their log weights."""
    logits = _double(logits)
    out = np.full_like(logits, -INF)
    for i, row in enumerate(logits.tolist()):
        places = _finite(row)
        if places:
            out[i, places] = rule([row[j] for j in places])
    return out


def _mean_one(scores):
    """Return the logs of the weights e^score / ((1/N) Σ e^score), which have mean 1."""
    log_mean = _log_sum_exp(scores) - math.log(len(scores))
    return [score - log_mean for score in scores]


def uniform(logits):
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    return np.where(np.real(logits) > -INF, 0.0, -INF)


def tilted(logits, beta=1.0):
    """Count by similarity: w_ij = e^{β s_ij} / ((1/N_i) Σ_k e^{β s_ik}). Ref: [1] Eq. 2"""
    return _by_row(lambda s: _mean_one([beta * v for v in s]), logits)


def hardest(logits):
    """Count the nearest candidate alone: w_ij = N_i there, 0 elsewhere. Those that tie share N_i.
    It is the limit β → ∞ of `tilted`. Ref: [1] Prop. 1; [4] Eq. 6"""

    def rule(s):
        nearest = _largest(s).real
        ties = sum(v.real == nearest for v in s)
        return [math.log(len(s) / ties) if v.real == nearest else -INF for v in s]

    return _by_row(rule, logits)


def _quantile(values, alpha):
    """Return the ⌈α n⌉-th largest real part of n values, at least the largest."""
    share = Fraction(alpha).limit_denominator(10**6)  # ⌈0.07 · 100⌉ is 7, but 8 in floats
    kept = max(1, math.ceil(share * len(values)))
    return sorted((v.real for v in values), reverse=True)[kept - 1]


def top(logits, alpha=0.1):
    """Count the upper α quantile alone: w_ij = 1 for s_ij ≥ s_α, 0 below. At least one stays.
    s_α is the ⌈α N_i⌉-th largest logit. α is read as the nearest fraction. Ref: [4] Eq. 8, 9"""

    def rule(s):
        threshold = _quantile(s, alpha)
        return [0.0 if v.real >= threshold else -INF for v in s]

    return _by_row(rule, logits)


def ground_cost(cosines, cost="sqeuclidean", kappa=0.0):
    """Compute the cost of coupling two unit rows from their cosine. Ref: [2] Eq. 5 and VII-C"""
    if cost == "sqeuclidean":
        return 1 - cosines  # ½‖x − y‖²
    if cost == "exp":
        return np.exp(2 - 2 * cosines - kappa)  # exp(‖x − y‖² − κ)
    raise ValueError(f"cost is {cost!r}; it may be 'sqeuclidean' or 'exp'")


def _log_kernel(logits, epsilon, cost, kappa, temperature):
    """Return −C/ε, with cos = temperature · logit. A masked entry has the cost +∞."""
    return _by_row(
        lambda s: [-ground_cost(temperature * v, cost, kappa) / epsilon for v in s], logits
    )


def _marginals(entries):
    """Return the equations that make the entries (i, j) of P a coupling: matrix, right-hand side.
    Σ_j P_ij = 1/A for every row i that has an entry, Σ_i P_ij = 1/N for every such column j."""
    matrix, masses = [], []
    for axis in (0, 1):
        lines = sorted({entry[axis] for entry in entries})
        for line in lines:
            matrix.append([float(entry[axis] == line) for entry in entries])
            masses.append(1 / len(lines))
    return matrix, masses


def usable(allowed):
    """Find the allowed entries (A, N) that carry mass in some coupling with uniform marginals.
    If half of a batch shares a label, its anchors take all candidates of the other half. Then the
    entries within the other half carry no mass. If there is no coupling, `allowed` is returned.
    It maximises Σ z_ij over couplings P and 0 ≤ z_ij ≤ min(P_ij, 1/n), n the number of entries.
    Mass is in units of 1/(A N), so the marginals are whole numbers, and a usable entry has mass 1
    or more in some coupling. The mean of n such couplings has mass 1/n or more at each of them. So
    the maximum has z = 1/n at the usable entries, and 0 elsewhere."""
    allowed = np.asarray(allowed, dtype=bool)
    used = allowed.any(axis=1).sum() * allowed.any(axis=0).sum()  # A · N
    if allowed.sum() == used:
        return allowed.copy()
    count = allowed.sum()
    matrix, masses = _marginals(np.argwhere(allowed).tolist())
    twice = np.hstack([matrix, matrix])  # P = z + rest
    bounds = [(0, 1 / count)] * count + [(0, None)] * count
    objective = np.repeat([-1.0, 0.0], count)
    result = linprog(objective, A_eq=twice, b_eq=used * np.array(masses), bounds=bounds)
    if result.status != 0:
        return allowed.copy()
    out = np.zeros_like(allowed)
    out[allowed] = result.x[:count] > 1 / (2 * count)  # row by row, as the entries are
    return out


def _log_sum_exp_along(x, axis):
    """Return log Σ e^x along an axis of a matrix that has a finite entry in each row and column."""
    shift = x.real.max(axis=axis, keepdims=True)  # numerics: as in _log_sum_exp
    return np.squeeze(shift, axis) + np.log(np.exp(x - shift).sum(axis=axis))


def _scale_in_turn(kernel, a, b, tolerance, max_steps):
    """Return f and g of `sinkhorn`, for a matrix with a finite entry in each row and column."""
    f, g = [np.zeros(size, kernel.dtype) for size in kernel.shape]
    imaginary = np.max(np.abs(np.imag(kernel)))  # of the complex step; 0 if the kernel is real
    earlier_error = INF
    for step in range(max_steps + 1):
        log_row_sums = _log_sum_exp_along(kernel + g[None, :], axis=1)  # of P, without e^{f_i}
        next_f = np.log(a) - log_row_sums
        if step > 0:  # g was computed last, so the columns are exact and the rows show the error
            error = np.sum(np.abs(np.exp(f.real + log_row_sums.real) - a))
            if imaginary > 0:
                change = np.max(np.abs(np.imag(next_f - f)))
                error = max(error, change / imaginary)
            stuck = step % 200 == 0 and error >= earlier_error * (1 - 1e-6)
            if error <= tolerance or stuck or step == max_steps:
                break
            if step % 200 == 0:
                earlier_error = error
        f = next_f
        g = np.log(b) - _log_sum_exp_along(kernel + f[:, None], axis=0)
    return f, g


def sinkhorn(log_kernel, tolerance=1e-14, max_steps=100000):
    """Find the coupling P_ij = exp(f_i + K_ij + g_j), K = log_kernel, by scaling it in turn.

        f_i = log a_i − log Σ_j e^{K_ij + g_j}          g_j = log b_j − log Σ_i e^{K_ij + f_i}

    The marginals are uniform: a over the rows with a finite entry, b over such columns. The other
    rows and columns have no mass; there f and g are −∞. With K = −C/ε, P minimises [2] Eq. 5.
    Returns the plan, f, g and error = Σ_i |Σ_j P_ij − a_i| + Σ_j |Σ_i P_ij − b_j|. It stops if the
    error is below `tolerance` and the imaginary part is as settled. It also stops if neither
    decreases any more: at rounding, or where every coupling needs a masked entry. Entries that no
    coupling uses are masked first, or it would need 1/error steps.
    Ref: [2] Eq. 5, 6, Lemma 3; Eq. 7 omits e^{g_j}"""
    log_kernel = _double(log_kernel)
    allowed = usable(log_kernel.real > -INF)
    rows = np.flatnonzero(allowed.any(axis=1))
    columns = np.flatnonzero(allowed.any(axis=0))
    block = np.ix_(rows, columns)
    plan = np.zeros_like(log_kernel)
    f_all = np.full(plan.shape[0], -INF, plan.dtype)
    g_all = np.full(plan.shape[1], -INF, plan.dtype)
    if len(rows) == 0:
        return plan, f_all, g_all, 0.0
    kernel = np.where(allowed, log_kernel, -INF)[block]
    a, b = 1 / len(rows), 1 / len(columns)
    f, g = _scale_in_turn(kernel, a, b, tolerance, max_steps)
    plan[block] = np.exp(f[:, None] + kernel + g[None, :])
    f_all[rows], g_all[columns] = f, g
    row_error = np.abs(plan.real.sum(axis=1)[rows] - a).sum()
    column_error = np.abs(plan.real.sum(axis=0)[columns] - b).sum()
    return plan, f_all, g_all, row_error + column_error


def transported(logits, epsilon=0.3, cost="sqeuclidean", kappa=0.0, temperature=1.0):
    """Count candidates by the entropic coupling P* at cost C(cos)/ε: w_ij = N_i P*_ij / Σ_k P*_ik.
    Entries that no coupling uses get log w = −∞. Ref: [2] Eq. 5, 8, Lemma 3"""
    log_kernel = _log_kernel(logits, epsilon, cost, kappa, temperature)
    allowed = log_kernel.real > -INF
    log_kernel = np.where(usable(allowed), log_kernel, -INF)
    _, f, g, _ = sinkhorn(log_kernel)
    log_w = f[:, None] + log_kernel + g[None, :]  # log P; P itself may underflow
    for i in np.flatnonzero(allowed.any(axis=1)):
        log_row_sum = _log_sum_exp(log_w[i].tolist())
        log_w[i] += math.log(allowed[i].sum()) - log_row_sum
    return np.where(log_w.real > -INF, log_w, -INF)


# ---- 2. Objectives: pos (A, M), neg (A, N), log w (A, N) → losses (A,) ---------------------------
#    nce, ppcl and decoupled act on logits, simple and triplet on cosines
def _weighted_mean(values, log_w):
    """Return Σ w v / Σ w, or 0 if there is no value."""
    w = [_exp(v) for v in log_w]
    return _product(w, values) / sum(w) if w else 0.0


def _debiased_row(pos, neg, log_w, tau_plus, temperature, log_w_pos):
    """Return `debiased` of one anchor, and whether the floor binds."""
    places = _finite(neg, log_w)
    positives = _finite(pos, log_w_pos)
    if not places:
        return -INF, False
    terms = [neg[j] + log_w[j] for j in places]
    if tau_plus == 0:
        return _log_sum_exp(terms), False
    shift = _largest(terms + [pos[m] for m in positives]).real  # numerics: as in _log_sum_exp
    weighted = sum(_exp(term - shift) for term in terms)
    total = sum(_exp(log_w[j]) for j in places)
    own_class = [_exp(pos[m] - shift) for m in positives]
    expectation = _weighted_mean(own_class, [log_w_pos[m] for m in positives])
    value = (weighted - total * tau_plus * expectation) / (1 - tau_plus)
    floor = total * _exp(-1 / temperature - shift)  # the paper's, not for the numerics
    if value.real > floor.real:
        return shift + _log(value), False
    return _log(total) - 1 / temperature, True  # written out, because `floor` may underflow


def _class_shares(pos, neg, log_w, tau_plus, log_w_pos):
    """List τ_i = τ⁺ (1/M_i Σ_m w⁺_im) / (1/N_i Σ_j w_ij) of the anchors with candidates.
    For `tilted` weights it is τ⁺ Z⁺/Z_β, the share of the anchor's class under q_β."""
    shares = []
    for p, s, w, w_pos in _together(pos, neg, log_w, log_w_pos):
        if _finite(s):
            mean = sum(_exp(v) for v in w) / len(_finite(s))
            mean_pos = sum(_exp(v) for v in w_pos) / len(_finite(p))
            shares.append(tau_plus * mean_pos / mean)
    return shares


def _exact_row(pos, neg, log_w, tau_plus, temperature, log_w_pos):
    """Return `debiased` of one anchor with debias="exact", and whether it is not defined."""
    places = _finite(neg, log_w)
    if not places:
        return -INF, False
    positives = _finite(pos, log_w_pos)
    n, m = len(_finite(neg)), len(_finite(pos))
    total = sum(_exp(log_w[j]) for j in places)
    shift = _largest(neg + pos).real  # numerics: as in _log_sum_exp
    above = sum(_exp(log_w[j] + neg[j] - shift) for j in places) / n
    above -= tau_plus * sum(_exp(log_w_pos[k] + pos[k] - shift) for k in positives) / m
    below = total / n
    below -= tau_plus * sum(_exp(log_w_pos[k]) for k in positives) / m
    plain, _ = _debiased_row(pos, neg, [0.0] * len(neg), tau_plus, temperature, [0.0] * len(pos))
    floor = plain - math.log(n) + _log(total)
    if above.real <= 0 or below.real <= 0:
        return floor, True
    value = _log(total) + shift + _log(above / below)
    cap = _log(total) + _largest(neg)
    if value.real > cap.real:
        value = cap
    return _largest([floor, value]), False


def debiased(
    pos,
    neg,
    log_w,
    tau_plus=0.0,
    temperature=1.0,
    log_w_pos=None,
    debias="published",
    return_clamped=False,
):
    """Compute the log of the debiased sum over negatives, −∞ without candidates:

        log max( (Σ_j w_ij e^{s_ij} − W_i τ⁺ E⁺_i) / (1 − τ⁺), W_i e^{−1/t} )

    E⁺_i = Σ_m w⁺_im e^{p_im} / Σ_m w⁺_im. W_i = Σ_j w_ij stands for Q; it is N_i for weights of
    mean 1. At τ⁺ = 0 there is no floor. Fig. 5 prints the floor without W_i, but e^{−1/t} bounds a
    mean of e^{cos/t}, not a sum. W_i τ⁺ E⁺_i is the expected sum over false negatives only if the
    weights are uniform. Ref: [1] Eq. 2, Fig. 5. With debias="exact" it is W_i times

        E_{q⁻}[e^s] = (E_p[w e^s] − τ⁺ E_{p⁺}[w e^v]) / (E_p[w] − τ⁺ E_{p⁺}[w])

    which follows from q⁻ ∝ w p⁻ and p = τ⁺ p⁺ + (1 − τ⁺) p⁻; w and w⁺ are one function of s and v.
    It is kept between two bounds: at most max e^s, at least the published mean for w = 1. Where a
    difference is not positive, as few positives are a bad estimate of p⁺, it is the lower bound.
    Ref: [1], q_β⁻, defined above Eq. 2.
    return_clamped: at which anchors the published floor binds, or a difference is not positive."""
    if log_w_pos is None:
        log_w_pos = uniform(pos)
    row = _exact_row if debias == "exact" and tau_plus > 0 else _debiased_row
    out = []
    for p, s, w, w_pos in _together(pos, neg, log_w, log_w_pos):
        value, floor_binds = row(p, s, w, tau_plus, temperature, w_pos)
        out.append(floor_binds if return_clamped else value)
    return np.array(out)


def weigh_alike(weights, pos, neg, beta=1.0, alpha=0.1):
    """Weigh positives by the function of the logit that weighs the candidates: log w⁺ (A, M)."""
    out = []
    for p, s in _together(pos, neg):
        s = [s[j] for j in _finite(s)]
        if not s:
            out.append([0.0] * len(p))
            continue
        threshold, heaviest = -INF, 0.0
        if weights == "top":
            threshold = _quantile(s, alpha)
        if weights == "hardest":
            threshold = _largest(s).real
            heaviest = math.log(len(s) / sum(v.real == threshold for v in s))
        row = [heaviest if v.real >= threshold else -INF for v in p]
        if weights == "tilted":
            log_mean = _log_sum_exp([beta * v for v in s]) - math.log(len(s))
            row = [beta * v - log_mean for v in p]
        out.append(row)
    return np.where(np.real(pos) > -INF, _double(out), -INF)


def nce(pos, neg, log_w, **debiasing):
    """Compute −log( Σ_m e^{p_im} / (Σ_m e^{p_im} + e^{debiased_i}) ), 0 without candidates.
    Positives are pooled inside the logarithm, as in Fig. 5. Eq. 2 averages over them outside it.
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8; [4] Eq. 1 (uniform weights) and 9 (`top`)"""
    negative = debiased(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        losses.append(_log_sum_exp(p + [n]) - _log_sum_exp(p))
    return np.array(losses)


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


def ppcl(pos, neg, log_w, **debiasing):
    """Compute −(1/M_i) Σ_m log( e^{p_im} / (Σ_m' e^{p_im'} + e^{debiased_i}) ). Ref: [3] Eq. 8"""
    negative = debiased(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        log_denominator = _log_sum_exp(p + [n])
        losses.append(_mean([log_denominator - p[m] for m in _finite(p)]))
    return np.array(losses)


def decoupled(pos, neg, log_w, **debiasing):
    """Compute −log( Σ_m e^{p_im} / e^{debiased_i} ), without positives in the denominator.
    It is 0 without candidates. Ref: [12] Eq. 6"""
    negative = debiased(pos, neg, log_w, **debiasing)
    losses = []
    for n, p in _together(negative, pos):
        losses.append(n - _log_sum_exp(p) if n.real > -INF else 0.0)
    return np.array(losses)


# ---- 3. The loss ---------------------------------------------------------------------------------

PRESETS = {  # loss: (weights, objective, tau_plus)
    "simclr": ("uniform", "nce", 0.0),
    "debiased": ("uniform", "nce", 0.1),
    "hcl": ("tilted", "nce", 0.1),
    "ot": ("transported", "nce", 0.0),
    "hard": ("top", "nce", 0.0),
    "simple": ("uniform", "simple", 0.0),
    "hard-simple": ("top", "simple", 0.0),
    "triplet": ("hardest", "triplet", 0.0),
    "ppcl": ("uniform", "ppcl", 0.0),
    "supcon": ("uniform", "ppcl", 0.0),
}
RULES = {rule.__name__: rule for rule in (uniform, tilted, hardest, top, transported)}
DEBIASED = {"nce": nce, "ppcl": ppcl, "decoupled": decoupled}  # objectives that have τ⁺


def _limit(positives, absolute_margin, relative_margin):
    """Return the largest cosine that a negative may have, from the cosines of the positives."""
    nearest = _largest(positives).real
    limit = INF
    if absolute_margin is not None:
        limit = min(limit, nearest - absolute_margin)
    if relative_margin is not None:
        limit = min(limit, nearest - relative_margin * abs(nearest))
    return limit


def _who_is_who(
    views, bank, positive_index, negative_mask, labels, margins, margin_columns, objective
):
    """Return the cosines of anchors with positives (A, M) and with candidates (A, N), else −∞."""
    size = len(views[0])
    rows = _lists(np.concatenate(views))
    labels = [] if labels is None else list(labels)
    candidates, candidate_labels = [rows] * len(rows), labels * len(views)
    if bank is not None:
        each = np.broadcast_to(bank, (size, *np.shape(bank)[-2:]))  # (B, K, D)
        candidates, candidate_labels = _lists(each), labels[size:]
    pos, neg = [], []
    for a in range(len(candidates)):
        own_views = excluded = range(a % size, len(rows), size)
        if bank is not None:
            excluded = [] if positive_index is None else [positive_index[a]]
        positives = [_product(rows[a], rows[b]) for b in own_views if b != a]
        negatives = [-INF] * len(candidates[a])
        for j, candidate in enumerate(candidates[a]):
            same_label = j < len(candidate_labels) and candidate_labels[j] == labels[a % size]
            is_masked = negative_mask is not None and not negative_mask[a][j]
            if j in excluded:
                continue
            if same_label and objective == "ppcl":
                positives.append(_product(rows[a], candidate))
            elif not same_label and not is_masked:
                negatives[j] = _product(rows[a], candidate)
        limit = _limit(positives, *margins)
        for j, cosine in enumerate(negatives[:margin_columns]):
            if cosine.real > limit:
                negatives[j] = -INF
        pos.append(positives)
        neg.append(negatives)
    width = max(len(row) for row in pos)
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


def _real_mean(rows):
    """Return the mean of the real parts of all finite entries, or nan if there is none."""
    values = [row[j].real for row in rows for j in _finite(row)]
    return _mean(values) if values else math.nan


def _entropy(row):
    """Return −Σ_j r_j log r_j, r_j = e^{x_j} / Σ_k e^{x_k}."""
    x = [row[j].real for j in _finite(row)]
    log_total = _log_sum_exp(x)
    return sum(math.exp(v - log_total) * (log_total - v) for v in x)


def _log_effective_temperature(cosines, log_push):
    """Return log t, within ±10, at which softmax(cos/t) has the entropy of e^log_push."""
    wanted = _entropy(log_push)

    def excess(log_t):
        return _entropy([v / math.exp(log_t) for v in cosines]) - wanted

    if excess(10) < 0:
        return 10.0
    return brentq(excess, -10, 10) if excess(-10) < 0 else -10.0


def _statistics(objective, pos_cosines, cosines, pos, neg, log_w, debiasing):
    """Compute the statistics of a loss, a dict.
    clamped    the share of anchors at which the published floor binds, [1] Fig. 5, or exact
               debiasing leaves nothing
    ess        the mean over anchors with candidates of (Σ_j w_ij)² / (N_i Σ_j w_ij²): 1 for uniform
               weights, 1/N if one candidate has all weight
    positive, negative: the mean cosine of anchors with positives, with candidates; nan if none
    temperature_effective: the t of `simclr` whose push on the negatives has the same entropy, a
    geometric mean over anchors; all hinges of `triplet` count as active
    share: with exact debiasing, the mean τ_i"""
    clamped = [0.0] * len(pos)
    if objective in DEBIASED:
        clamped = _lists(debiased(pos, neg, log_w, **debiasing, return_clamped=True))
    effective = []
    for s, log_weights in _together(neg, log_w):
        w = [math.exp(log_weights[j].real) for j in _finite(s)]
        if w:
            effective.append(sum(w) ** 2 / (len(w) * _product(w, w)))
    rows = {"clamped": [clamped], "ess": [effective], "positive": pos_cosines, "negative": cosines}
    push = neg + log_w
    if objective in ("simple", "triplet"):
        push = log_w
    if debiasing["debias"] == "exact" and debiasing["tau_plus"] > 0:
        settings = debiasing["tau_plus"], debiasing["log_w_pos"]
        rows["share"] = [_class_shares(pos, neg, log_w, *settings)]
    figures = {name: _real_mean(values) for name, values in rows.items()}
    log_t = [_log_effective_temperature(*pair) for pair in _together(cosines, push)]
    geometric_mean = math.exp(_mean([x for x, s in zip(log_t, cosines, strict=True) if _finite(s)]))
    return figures | {"temperature_effective": geometric_mean}


def _rule(weights, options):
    """Return the function of logits that `weights` names, with its options."""
    if callable(weights):
        return weights
    return partial(RULES[weights], **options.get(weights, {}))


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
    positive_index=None,
    negative_mask=None,
    labels=None,
    absolute_margin=None,
    relative_margin=None,
    margin_columns=None,
    normalize=True,
    detach_weights=None,
    debias="published",
    reduction="mean",
    return_stats=False,
):
    """Compute the loss of two or more (B, D) views: the mean, the sum, or all values (A,).
    Every row of every view is an anchor, in the order of the concatenated views. Its positives are
    the other views of its sample, its candidates the views of samples that do not share its label.
    Under `ppcl` the views that share its label are positives.

    negatives        (K, D), or for each anchor its own, (B, K, D): the candidates. Then the first
                     view has the anchors, the others the positives. `transported` takes column k
                     of (B, K, D) for one and the same candidate
    positive_index   (B,): the row of `negatives` that is the anchor's own sample, no candidate
    negative_mask    (A, N) booleans: True where a candidate counts as a negative
    labels           (B,); with negatives (K, D), labels of the samples and then of these
                     rows: (B + K,)
    absolute_margin  drops candidates whose cosine is above p − absolute_margin, p the anchor's
                     largest positive cosine
    relative_margin  drops candidates whose cosine is above p − relative_margin · |p|
    margin_columns   how many of the first candidates the margins may drop; None: all
    weights          a name or a function: logits (A, N) → log weights (A, N)
    objective        a name or a function: logits (A, M), (A, N), log weights (A, N) → losses (A,)
    detach_weights   holds log w and log w⁺ constant; None: for `transported` alone
    return_stats     adds the dict of `_statistics`
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8, 9; [3] Eq. 8; [4] Eq. 1, 3, 9"""
    preset_weights, preset_objective, preset_tau_plus = PRESETS[loss]
    weights = weights or preset_weights
    objective = objective or preset_objective
    if tau_plus is None:
        tau_plus = preset_tau_plus
    if detach_weights is None:
        detach_weights = weights == "transported"

    # 1. Who could be a negative?
    if normalize:
        views = [unit(view) for view in views]
    if normalize and negatives is not None:
        negatives = unit(negatives)
    margins = absolute_margin, relative_margin
    pos_cosines, cosines = _who_is_who(
        views, negatives, positive_index, negative_mask, labels, margins, margin_columns, objective
    )
    pos = _double([[v / temperature for v in row] for row in pos_cosines])
    neg = _double([[v / temperature for v in row] for row in cosines])

    # 2. How much does each one count?
    coupling = {"epsilon": epsilon, "cost": cost, "kappa": kappa, "temperature": temperature}
    options = {"tilted": {"beta": beta}, "top": {"alpha": alpha}, "transported": coupling}
    weigh = _rule(weights, options)
    seen, seen_pos = neg, pos
    if detach_weights:
        seen, seen_pos = neg.real, pos.real
    log_w = weigh(seen)
    if debias == "exact":
        log_w_pos = weigh_alike(weights, seen_pos, seen, beta, alpha)
    elif tau_plus == 0 or pos.shape[1] == 1:  # a mean of one, or none
        log_w_pos = uniform(seen_pos)
    elif weights == "transported":  # positives have no marginals: w⁺ ∝ e^{−C/ε}
        log_w_pos = _by_row(_mean_one, _log_kernel(seen_pos, **coupling))
    else:
        log_w_pos = weigh(seen_pos)

    # 3. What is done with them?
    debiasing = {"tau_plus": tau_plus, "temperature": temperature}
    debiasing |= {"log_w_pos": log_w_pos, "debias": debias}
    losses = _losses(objective, pos_cosines, cosines, pos, neg, log_w, margin, debiasing)
    value = {"none": losses, "sum": sum(losses), "mean": sum(losses) / len(losses)}[reduction]
    if return_stats:
        return value, _statistics(objective, pos_cosines, cosines, pos, neg, log_w, debiasing)
    return value


def mine(
    queries,
    documents,
    k,
    skip=0,
    positives=None,
    absolute_margin=None,
    relative_margin=None,
    labels=None,
):
    """List the k nearest documents of each query that are negatives, −1 where fewer are left.
    Nearest first, of equals the first one, without the first `skip`. positives[i] is the document
    of query i (None: i); those of its label, or above the margins, are no negatives."""
    queries, documents = _lists(unit(queries)), _lists(unit(documents))
    found = []
    for i, query in enumerate(queries):
        own = i if positives is None else positives[i]
        cosines = [_product(query, document) for document in documents]
        limit = _limit([cosines[own]], absolute_margin, relative_margin)
        left = []
        for j, cosine in enumerate(cosines):
            same_label = labels is not None and labels[j] == labels[own]
            if j != own and not same_label and cosine <= limit:
                left.append((-cosine, j))
        nearest = [j for _, j in sorted(left)][skip : skip + k]
        found.append(nearest + [-1] * (k - len(nearest)))
    return np.array(found)


# ---- 4. The papers' equations for two plain views ------------------------------------------------
#    x, y (B, D) are unit rows. The anchors i are the rows f_1 … f_2B = x_1 … x_B, y_1 … y_B. The
#    positive p is the other view of i. The negatives k are the other N = 2(B − 1) rows.
def simclr_eq(x, y, temperature):
    """Compute the mean over i of −log( e^{f_i·f_p/τ} / (Σ_k e^{f_i·f_k/τ} + e^{f_i·f_p/τ}) ).
    [4] takes the negatives from one view, [6] from both, as here. Ref: [4] Eq. 1; [6] Eq. 1"""
    f = _lists(x) + _lists(y)
    losses = []
    for i in range(len(f)):
        p = (i + len(x)) % len(f)
        negatives = [k for k in range(len(f)) if k not in (i, p)]
        positive = _exp(_product(f[i], f[p]) / temperature)
        negative = sum(_exp(_product(f[i], f[k]) / temperature) for k in negatives)
        losses.append(-_log(positive / (negative + positive)))
    return _mean(losses)


def hcl_eq2(x, y, temperature, beta, tau_plus):
    """Compute E_i −log( e^{s_p} / (e^{s_p} + (Q/τ⁻) (E_{q_β} e^{s_k} − τ⁺ E_{q_β⁺} e^{s_p})) ).

        E_{q_β} e^{s_k} = (1/N) Σ_k e^{(β+1) s_k} / Z_β        Z_β = (1/N) Σ_k e^{β s_k}

    s_k = f_i·f_k/t, τ⁻ = 1 − τ⁺, Q = N. E_{q_β⁺} is the same over the one positive. The term with Q
    is at least N e^{−1/t}. Eq. 2 has no such floor. Fig. 5 prints it as e^{−1/t}; the authors' code
    has it as here. Ref: [1] Eq. 2 and the two below it, Fig. 5"""
    f = _lists(x) + _lists(y)
    n = len(f) - 2
    losses = []
    for i in range(len(f)):
        p = (i + len(x)) % len(f)
        s = [_product(f[i], row) / temperature for row in f]
        negatives = [k for k in range(len(f)) if k not in (i, p)]
        partition = sum(_exp(beta * s[k]) for k in negatives) / n
        expectation = sum(_exp((beta + 1) * s[k]) / partition for k in negatives) / n
        own_class = _exp((beta + 1) * s[p]) / _exp(beta * s[p])
        negative = n / (1 - tau_plus) * (expectation - tau_plus * own_class)
        negative = _largest([negative, n * math.exp(-1 / temperature)])
        losses.append(-_log(_exp(s[p]) / (_exp(s[p]) + negative)))
    return _mean(losses)


def ot_eq5(x, y, temperature, epsilon):
    """Compute the mean over i of log(1 + o E_{P*(k|i)} e^{f_i·f_k/t} / e^{f_i·f_p/t}), with o = N.

        P* = argmin_P Σ_ik P_ik C_ik + ε KL(P ‖ product of marginals)        C_ik = ½ ‖f_i − f_k‖²

    C_ik is ∞ for i and k of one sample. The marginals are uniform. P*_ik = u_i e^{−C_ik/ε} v_k. The
    loop scales rows and columns in turn, in the plain domain: it needs ε of 0.2 or more, and B ≥ 2.
    P* is a constant for gradients, as in the published code. Ref: [2] Eq. 5, 8, Lemma 3"""
    f = _lists(x) + _lists(y)
    n = len(f)
    kernel = np.zeros((n, n))
    for i in range(n):
        for k in range(n):
            if i % len(x) != k % len(x):
                cost = _squared_distance(f[i], f[k]).real / 2  # its real part: P* is a constant
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
        plan = u[i] * kernel[i] * v  # 0 at i and p
        expectation = _product(plan / plan.sum(), [_exp(logit) for logit in s])
        losses.append(_log(1 + (n - 2) * expectation / _exp(s[p])))
    return _mean(losses)


def hard_eq9(x, y, temperature, alpha):
    """Compute the mean over i of −log( e^{s_p/τ} / (Σ_{s_k ≥ s_α} e^{s_k/τ} + e^{s_p/τ}) ).
    s_k = f_i·f_k. s_α is the upper α quantile: the ⌈α N⌉-th largest s_k. Ref: [4] Eq. 8, 9"""
    f = _lists(x) + _lists(y)
    losses = []
    for i in range(len(f)):
        p = (i + len(x)) % len(f)
        s = [_product(f[i], f[k]) for k in range(len(f)) if k not in (i, p)]
        quantile = _quantile(s, alpha)
        negative = sum(_exp(v / temperature) for v in s if v.real >= quantile)
        positive = _exp(_product(f[i], f[p]) / temperature)
        losses.append(-_log(positive / (negative + positive)))
    return _mean(losses)


# ---- 5. Banks and games --------------------------------------------------------------------------
def bank_update(rows, index, z, momentum):
    """Update row_i ← (m row_i + (1 − m) z_b) / ‖·‖ for i = index_b. Ref: [4] 5.1"""
    out, z = _double(rows).copy(), unit(z)
    for b, i in enumerate(index):
        out[i] = unit(momentum * out[i] + (1 - momentum) * z[b])
    return out


def ema(w_ema, w, m):
    """Update w_ema ← m w_ema + (1 − m) w, entry by entry. Ref: [3] Eq. 7"""
    return m * _double(w_ema) + (1 - m) * _double(w)


def hinge_discriminator(real, fake):
    """Compute L_D = E_x f_D(−D(x)) + E_z f_D(D(G(z))), f_D(x) = max(0, 1 + x). Ref: [3] Eq. 5"""
    on_real = _mean([_hinge(1 - v) for v in _lists(real)])
    return on_real + _mean([_hinge(1 + v) for v in _lists(fake)])


def hinge_generator(fake):
    """Compute L_G = E_z f_G(D(G(z))), f_G(x) = −x. Ref: [3] Eq. 5, which does not print f_G"""
    return _mean([-v for v in _lists(fake)])


def _nearest_squares(x):
    """Return min_{j ≠ i} ‖x_i − x_j‖² for every row i of a list."""
    out = []
    for i in range(len(x)):
        out.append(min(_squared_distance(x[i], x[j]) for j in range(len(x)) if j != i))
    return out


def diversity(images, real):
    """Compute Σ_i min_{j ≠ i} ‖x_i − x_j‖, relative to as many real images; not in the papers."""
    of_images = _nearest_squares(_lists(np.reshape(images, (len(images), -1))))
    of_real = _nearest_squares(_lists(np.reshape(real, (len(real), -1))))
    return np.sqrt(of_images).mean() / np.sqrt(of_real).mean()


def ppcl_sets(raw, latents):
    """List A(i) = I \\ {i} and P(i) for every view i of a multiviewed batch.
    raw[i] is the raw sample of view i, latents[i] the latent that generated it, None if it is real.
    If i is generated, P(i) = {p in A(i): z_p = z_i}. If it is real, P(i) = {j(i)}, the other view.
    Ref: [3] Eq. 8"""
    others, positives = [], []
    for i in range(len(raw)):
        others.append([a for a in range(len(raw)) if a != i])
        if latents[i] is None:
            positives.append([p for p in others[i] if raw[p] == raw[i]])
        else:
            positives.append([p for p in others[i] if latents[p] == latents[i]])
    return others, positives


def ppcl_batch(v, raw, latents, temperature):
    """Compute (1/|I|) Σ_i −1/|P(i)| Σ_{p ∈ P(i)} log( e^{v_i·v_p/τ} / Σ_{a ∈ A(i)} e^{v_i·v_a/τ} )
    for rows v (|I|, D). v_i·v_a is a cosine. The paper has no factor 1/|I|. Ref: [3] Eq. 8"""
    others, positives = ppcl_sets(raw, latents)
    v = _lists(unit(v))
    losses = []
    for i in range(len(v)):
        log_total = _log_sum_exp([_product(v[i], v[a]) / temperature for a in others[i]])
        logits = [_product(v[i], v[p]) / temperature for p in positives[i]]
        losses.append(-_mean([logit - log_total for logit in logits]))
    return _mean(losses)


# ---- 6. Readouts ---------------------------------------------------------------------------------
def uniformity(z, t=2.0):
    """Compute log E e^{−t‖x − y‖²} over ordered pairs of distinct rows. Ref: [5]; [4] Eq. 10"""
    z = _lists(z)
    pairs = permutations(range(len(z)), 2)
    exponents = [-t * _squared_distance(z[i], z[j]) for i, j in pairs]
    return _log_sum_exp(exponents) - math.log(len(exponents))


def alignment(x, y):
    """Compute the mean of ‖x_i − y_i‖² over rows. Ref: [5], exponent 2"""
    return _mean([_squared_distance(a, b) for a, b in _together(x, y)])


def tolerance(z, labels):
    """Compute the mean of x·y over ordered pairs of distinct rows that share a label.
    Without such a pair it is nan. Eq. 11 prints a mean over all pairs with an indicator inside: at
    most 0.1 for ten equal classes. Table 1 has values up to 0.61, so its mean is over the pairs of
    one label. Ref: [4] Eq. 11"""
    z = _lists(z)
    pairs = permutations(range(len(z)), 2)
    products = [_product(z[i], z[j]) for i, j in pairs if labels[i] == labels[j]]
    return _mean(products) if products else math.nan


def perturbed(x, slope, bound):
    """Compute min(1, max(0, x_k + bound · sign(slope_k))), with slope = ∂ℓ/∂x. Ref: after [10]"""
    return np.clip(_double(x) + bound * np.sign(slope), 0, 1)


# ---- 7. Limits and theorems ----------------------------------------------------------------------
def exact_coupling(cost_matrix):
    """Find the plan of min_P Σ_ij C_ij P_ij with uniform marginals by linear programming.
    +∞ masks an entry. Fully masked rows and columns get no mass. Ref: [2] Eq. 5 at ε = 0"""
    cost_matrix = np.asarray(cost_matrix, dtype=np.float64)
    allowed = cost_matrix < INF
    matrix, masses = _marginals(np.argwhere(allowed).tolist())
    result = linprog(cost_matrix[allowed], A_eq=matrix, b_eq=masses)
    if result.status != 0:
        raise ValueError(f"no coupling: {result.message}")
    plan = np.zeros(cost_matrix.shape)
    plan[allowed] = result.x  # row by row, as the entries are
    return plan


def assignment_cost(cost_matrix):
    """Compute min_π (1/n) Σ_i C_{i π(i)} over permutations: cost of `exact_coupling`, C square."""
    rows, columns = linear_sum_assignment(cost_matrix)
    return _mean(_double(cost_matrix)[rows, columns].tolist())


def product_coupling(allowed):
    """Find the limit ε → ∞ of the coupling: P_ij = 1/(A N), the product of the marginals.
    With masked entries the limit is the allowed coupling of largest entropy. Ref: [2] Eq. 6"""
    return sinkhorn(np.where(allowed, 0.0, -INF))[0]


def nce_cold(pos, neg):
    """Compute lim_{τ→0⁺} τ · nce(pos/τ, neg/τ) = max(0, max_j s_ij − s_i⁺) on cosines, two views.
    pos (A, 1), neg (A, N) → (A,). It is half of `triplet` on `hardest`, η = 0. Ref: [4] Eq. 6"""
    return np.array([_hinge(_largest(s) - p) for (p,), s in _together(pos, neg)])


def nce_hot(pos, neg, temperature):
    """Compute log(1 + N) − (N/(N+1)) s⁺/τ + (1/(N+1)) Σ_j s_j/τ: nce up to O(1/τ²), on cosines.
    pos (A, 1), neg (A, N) → (A,). The paper's N counts the positive too: N + 1. Ref: [4] Eq. 7"""
    out = []
    for (p,), s in _together(pos, neg):
        places = _finite(s)
        n = len(places)
        push = sum(s[j] for j in places)
        out.append(math.log(1 + n) - (n * p - push) / (n + 1) / temperature)
    return np.array(out)


def softmax_gradients(pos, neg, temperature):
    """Compute ∂L/∂s⁺ = −(1/τ) Σ_j P_ij (A,) and ∂L/∂s_j = P_ij/τ (A, N) of nce for two views.
    P_ij = e^{s_ij/τ} / (Σ_k e^{s_ik/τ} + e^{s_i⁺/τ}), cosines (A, 1), (A, N). Ref: [4] Eq. 2, 4"""
    by_pos, by_neg = [], []
    for (p,), s in _together(pos, neg):
        places = _finite(s)
        log_total = _log_sum_exp([s[j] / temperature for j in places] + [p / temperature])
        slopes = [0.0] * len(s)
        for j in places:
            slopes[j] = _exp(s[j] / temperature - log_total) / temperature
        by_neg.append(slopes)
        by_pos.append(-sum(slopes))
    return np.array(by_pos), np.array(by_neg)


def worst_case(pos, neg, Q):
    """Compute L* = −log( e^p / (e^p + Q e^{max_j s_j}) ) from logits (A, 1), (A, N) → (A,).
    It is the limit β → ∞ of nce on `tilted` weights of sum Q. Ref: [1] Prop. 1, App. A.1"""
    losses = []
    for (p,), s in _together(pos, neg):
        worst = math.log(Q) + _largest(s)
        losses.append(_log_sum_exp([p, worst]) - p)
    return np.array(losses)


def bad_probability(logits_row, beta, eps):
    """Compute q_β{s < M − ε}, M = max_j s_j, q_β(j) = e^{β s_j} / Σ_k e^{β s_k}. Ref: [1] A.1"""
    s = [v for v in _lists(logits_row) if v > -INF]
    log_partition = _log_sum_exp([beta * v for v in s])
    return sum(math.exp(beta * v - log_partition) for v in s if v < max(s) - eps)


def bad_probability_bound(logits_row, beta, eps):
    """Compute e^{−β ε/2} / ρ_ε ≥ `bad_probability`, ρ_ε the share of s ≥ M − ε/2. Ref: [1] A.1"""
    s = [v for v in _lists(logits_row) if v > -INF]
    share = _mean([v >= max(s) - eps / 2 for v in s])
    return math.exp(-beta * eps / 2) / share


def worst_case_bound(logits_row, beta, eps):
    """Compute the three sides of E_{q_β}[M − s] ≤ ε + R P_{q_β}(s < M − ε) ≤ ε + R e^{−β ε/2}/ρ_ε.
    R = M − min_j s_j. The paper has 2 for R, which is the range of cosines. Its logits, cos/t²,
    have the range 2/t². Ref: [1] App. A.1"""
    s = [v for v in _lists(logits_row) if v > -INF]
    gaps = [max(s) - v for v in s]
    gap = _weighted_mean(gaps, [-beta * v for v in gaps])
    by_probability = eps + max(gaps) * bad_probability(logits_row, beta, eps)
    by_bound = eps + max(gaps) * bad_probability_bound(logits_row, beta, eps)
    return gap, by_probability, by_bound


def l_infinity(x, positives, negatives):
    """Compute L_∞ = E[ −log( e^{f·f⁺} / E_q e^{f·f⁻} ) ], rows on a sphere of radius 1/t.
    x, positives (A, D), negatives (A, K, D). Ref: [1] Eq. 4 and 6"""
    terms = []
    for f, positive, sample in _together(x, positives, negatives):
        log_sum = _log_sum_exp([_product(f, y) for y in sample])
        terms.append(log_sum - math.log(len(sample)) - _product(f, positive))
    return _mean(terms)


def l_unif_star(x, negatives):
    """Compute sup_q E log E_q e^{f·f⁻} = E max f·f⁻ = 1/t² − E min ‖f − f⁻‖²/2. Ref: [1] Eq. 8"""
    rows = _together(x, negatives)
    return _mean([_largest([_product(f, y) for y in sample]) for f, sample in rows])


def nearest_distance(x, negatives):
    """Compute E_x min ‖f − f⁻‖². Eq. 8 prints x⁺ under min; it runs over x⁻. Ref: [1] Eq. 8"""
    rows = _together(x, negatives)
    return _mean([min(_squared_distance(f, y) for y in sample) for f, sample in rows])


def ball_packing(centres, shares):
    """Compute Σ_c ρ(c) min_{c' ≠ c} ‖v_c − v_c'‖², centres v (C, D), shares ρ (C,).
    The encoder that minimises the worst-case loss maximises it: so Theorem 2. Its interpretation
    calls this Tammes' problem, but that one is about the smallest distance, not the mean.
    Ref: [1] Theorem 2, Eq. 5"""
    return _product(shares, _nearest_squares(_lists(centres)))


# ---- 8. Gradients --------------------------------------------------------------------------------
def _directions(x):
    """Yield the place of every entry of x, and the unit vector of that entry."""
    for place in np.ndindex(np.shape(x)):
        direction = np.zeros(np.shape(x))
        direction[place] = 1
        yield place, direction


def gradient(function, x):
    """Compute ∂f/∂x_k = Im f(x + i h e_k) / h by entry: the complex step, exact to rounding."""
    h = 1e-30
    out = np.zeros(np.shape(x))
    for place, direction in _directions(x):
        out[place] = np.imag(function(x + 1j * h * direction)) / h
    return out


def central_difference(function, x):
    """Compute ∂f/∂x_k ≈ (f(x + h e_k) − f(x − h e_k)) / 2h; its error is O(h²) + rounding / h."""
    h = 1e-6
    out = np.zeros(np.shape(x))
    for place, direction in _directions(x):
        rise = function(x + h * direction) - function(x - h * direction)
        out[place] = rise / (2 * h)
    return out
