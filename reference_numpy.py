"""Hard-negative contrastive learning, formula by formula, in plain float64 NumPy.

This file states what the papers state, slowly: one loop or one sum() for each sum sign, so that a reader can
compare every line with the equation in its docstring. The tests compare `hardneg.py` with it, in value and in
gradient. The two files share no code.

    symbol       name here     shape    meaning
    s_ij         neg, logits   (A, N)   cosine of anchor i and candidate j, over t; −∞: not a negative
    p_im         pos           (A, M)   cosine of anchor i and its positive m, over t; −∞: not a positive
    log w_ij     log_w         (A, N)   log importance weight of a candidate; −∞: does not count
    log w⁺_im    log_w_pos     (A, M)   log importance weight of a positive
    N_i, M_i                            number of finite entries in row i
    t, τ         temperature            rows of length 1/t give [1] the logit cos/t²; its code, [4] and this
                                        file have cos/t
    τ⁺           tau_plus               probability that a candidate has the anchor's class
    β, α         beta, alpha            concentration of `tilted`; share of the candidates that `top` keeps
    ε, κ         epsilon, kappa         entropic regularisation; offset of the exponential ground cost
    η            margin                 margin of the triplet loss
    f, v, z      x, y, v, z    (n, D)   embeddings

Gradients are complex steps: ∂f/∂xₖ = Im f(x + i h eₖ) / h has no subtraction, so it is exact to rounding at
h = 1e-30. Functions therefore accept complex input and stay analytic in it: they compare real parts and use
neither conjugate nor modulus. To detach a weight is to drop its imaginary part.

References
    [1] Robinson, Chuang, Sra, Jegelka. Contrastive Learning with Hard Negative Samples. ICLR 2021. 2010.04592
    [2] Jiang, Ishwar, Aeron. Hard Negative Sampling via Regularized Optimal Transport for Contrastive
        Representation Learning. IJCNN 2023. 2111.03169
    [3] Wu, Wang, Zeng, Shi, Hu. Synthetic Data Can Also Teach: Synthesizing Effective Data for Unsupervised
        Visual Representation Learning. AAAI 2023. 2202.06464. Equations are numbered as in its submission,
        Data-efficient Contrastive Learning by Differentiable Hard Sample and Hard Positive Pair Generation
    [4] Wang, Liu. Understanding the Behaviour of Contrastive Loss. CVPR 2021. 2012.09740
    [5] Wang, Isola. Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere. ICML 2020. 2005.10242
   [10] Ho, Vasconcelos. Contrastive Learning with Adversarial Examples. NeurIPS 2020. 2010.12050
"""

import cmath
import math
from fractions import Fraction

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog

INF = math.inf


# ---- Numbers, real or complex ------------------------------------------------------------------------------


def _double(x):
    """Return x in float64, or in complex128 if it is complex."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _lists(x):
    """Return x as nested lists: Python's own doubles are as exact as NumPy's, and faster one by one."""
    return _double(x).tolist()


def _exp(z):
    return cmath.exp(z) if isinstance(z, complex) else math.exp(z)


def _log(z):
    return cmath.log(z) if isinstance(z, complex) else math.log(z)


def _sqrt(z):
    return cmath.sqrt(z) if isinstance(z, complex) else math.sqrt(z)


def _finite(*rows):
    """Return the places j at which every row is above −∞."""
    return [j for j in range(len(rows[0])) if all(row[j].real > -INF for row in rows)]


def _largest(values):
    """Return the value with the largest real part, −∞ for no value."""
    return max(values, key=lambda v: v.real, default=-INF)


def _hinge(v):
    """Return max(0, v)."""
    return v if v.real > 0 else 0.0


def _mean(values):
    """Return (1/n) Σ v, 0 for no value."""
    return sum(values) / len(values) if values else 0.0


def _product(x, y):
    """Return x·y = Σ_d x_d y_d."""
    return sum((a * b for a, b in zip(x, y)), 0.0)


def _squared_distance(x, y):
    """Return ‖x − y‖² = Σ_d (x_d − y_d)²."""
    return sum(((a - b) * (a - b) for a, b in zip(x, y)), 0.0)


def _log_sum_exp(values):
    """Return log Σ e^v, −∞ for no value."""
    values = [v for v in values if v.real > -INF]
    if not values:
        return -INF
    shift = _largest(values).real  # numerics: keep exp from overflow
    return shift + _log(sum(_exp(v - shift) for v in values))


def _log1p(z):
    """Return log(1 + z) for Re z ≥ 0, accurate for small z, also for complex z."""
    if not isinstance(z, complex):
        return math.log1p(z)
    x, y = z.real, z.imag
    return complex(
        math.log1p(2 * x + x * x + y * y) / 2, math.atan2(y, 1 + x)
    )  # log modulus, angle


def _log_one_plus_ratio(b, a):
    """Return −log( e^a / (e^a + e^b) ) = log(1 + e^b / e^a); numerics: tiny losses keep their digits."""
    if b.real == -INF:
        return 0.0
    if a.real == -INF:
        return INF
    if b.real > a.real:
        return (b - a) + _log1p(_exp(a - b))
    return _log1p(_exp(b - a))


# ---- 1. Weights: logits (A, N) → log weights (A, N), −∞ where the logits are -------------------------------


def unit(x):
    """Project rows (…, D) to the unit sphere: x_i / √(Σ_d x_id²).

    A zero row stays zero and has gradient zero; in `hardneg.unit` its gradient passes unchanged."""
    shape, out = np.shape(x), []
    for row in _lists(np.reshape(x, (-1, shape[-1]))):
        scale = max((abs(v.real) for v in row), default=0.0)  # numerics: the square of 1e-200 is 0
        if scale > 0:
            row = [v / scale for v in row]
            norm = _sqrt(_product(row, row))  # no conjugate: analytic
            out.append([v / norm for v in row])
        else:
            out.append([0.0] * len(row))
    return np.array(out).reshape(shape)


def _by_row(rule, logits):
    """Apply a rule, finite logits of a row → their log weights, to every row."""
    out = [[-INF] * len(row) for row in logits]
    for i, row in enumerate(_lists(logits)):
        places = _finite(row)
        for j, value in zip(places, rule([row[j] for j in places]) if places else []):
            out[i][j] = value
    return np.array(out).reshape(np.shape(logits))


def _mean_one(scores):
    """Return the logs of weights e^score / ((1/N) Σ e^score), which have mean 1."""
    log_mean = _log_sum_exp(scores) - math.log(len(scores))
    return [score - log_mean for score in scores]


def uniform(logits):
    """Count every candidate the same: log w_ij = 0. Ref: [4] Eq. 1; [1] at β = 0"""
    return _by_row(lambda s: [0.0] * len(s), logits)


def tilted(logits, beta=1.0):
    """Count candidates by their similarity: w_ij = e^{β s_ij} / ((1/N_i) Σ_k e^{β s_ik}). Ref: [1] Eq. 2"""
    return _by_row(lambda s: _mean_one([beta * v for v in s]), logits)


def hardest(logits):
    """Count the nearest candidate alone: w_ij = N_i there, 0 elsewhere; ties share. Limit β → ∞ of `tilted`.

    Ref: [1] Prop. 1; [4] Eq. 6"""

    def rule(s):
        nearest = [v.real == _largest(s).real for v in s]
        return [math.log(len(s) / sum(nearest)) if is_nearest else -INF for is_nearest in nearest]

    return _by_row(rule, logits)


def top(logits, alpha=0.1):
    """Count the upper α quantile alone: w_ij = 1 for s_ij ≥ s_α, the ⌈α N_i⌉-th largest logit, 0 below.

    At least one stays. α is the nearest fraction: ⌈0.07 · 100⌉ is 7, but 8 in floats. Ref: [4] Eq. 8, 9"""

    def rule(s):
        kept = max(1, math.ceil(Fraction(alpha).limit_denominator(10**6) * len(s)))
        threshold = sorted((v.real for v in s), reverse=True)[kept - 1]
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
    """Return −C/ε, cos = temperature · logits; masked entries have cost +∞."""
    return _by_row(
        lambda s: [-ground_cost(temperature * v, cost, kappa) / epsilon for v in s], logits
    )


def _marginals(entries):
    """Return the equations that make the entries (i, j) of P a coupling: matrix and right-hand side.

    Σ_j P_ij = 1/A for every row i that has an entry, Σ_i P_ij = 1/N for every such column j."""
    rows, columns = sorted({i for i, _ in entries}), sorted({j for _, j in entries})
    matrix = [[float(i == row) for i, _ in entries] for row in rows]
    matrix += [[float(j == column) for _, j in entries] for column in columns]
    return matrix, [1 / len(rows)] * len(rows) + [1 / len(columns)] * len(columns)


def usable(allowed):
    """Find the allowed entries (A, N) that carry mass in some coupling with uniform marginals.

    If half of a batch shares a label, its anchors take all candidates of the other half: entries within the
    other half carry none. If there is no coupling, returns `allowed`.

    Maximises Σ z_ij over couplings P and 0 ≤ z_ij ≤ min(P_ij, 1/n), n the number of entries, mass in units of
    1/(A N). The marginals are then whole numbers, so a usable entry has mass 1 or more in some coupling; the
    mean of n such couplings has 1/n or more at every one. The maximum has z = 1/n there, and 0 elsewhere."""
    allowed = np.asarray(allowed, dtype=bool)
    used = allowed.any(axis=1).sum() * allowed.any(axis=0).sum()  # A · N
    if allowed.sum() == used:
        return allowed.copy()
    entries = np.argwhere(allowed).tolist()
    count = len(entries)
    matrix, masses = _marginals(entries)
    twice = [row + row for row in matrix]  # P = z + rest
    result = linprog(
        [-1.0] * count + [0.0] * count,
        A_eq=twice,
        b_eq=[used * mass for mass in masses],
        bounds=[(0, 1 / count)] * count + [(0, None)] * count,
        method="highs",
    )
    if result.status != 0:
        return allowed.copy()
    out = np.zeros_like(allowed)
    out[allowed] = result.x[:count] > 1 / (2 * count)  # row by row, as the entries
    return out


def _log_sum_exp_along(x, axis):
    """Return log Σ e^x along an axis of a matrix without fully masked rows and columns."""
    shift = x.real.max(axis=axis, keepdims=True)  # numerics: keep exp from overflow
    return np.squeeze(shift, axis) + np.log(np.exp(x - shift).sum(axis=axis))


def sinkhorn(log_kernel, tolerance=1e-14, max_steps=100000):
    """Find the coupling P_ij = exp(f_i + log_kernel_ij + g_j) with uniform marginals, by scaling in turn.

        f_i = log a_i − log Σ_j e^{K_ij + g_j}          g_j = log b_j − log Σ_i e^{K_ij + f_i}

    a is uniform over the rows with a finite entry, b over such columns; the others have no mass, f, g = −∞.
    With log_kernel = −C/ε, P minimises [2] Eq. 5; f and g contain the logs of the marginals.

    Returns plan, f, g and error = Σ_i |Σ_j P_ij − a_i| + Σ_j |Σ_i P_ij − b_j|. It stops if the error is below
    `tolerance` and the imaginary part is as settled, or if neither decreases any more: at rounding, or where
    every coupling needs a masked entry. It masks entries that no coupling uses; else it needs 1/error steps.
    Ref: [2] Eq. 5 to 7, Lemma 3"""
    log_kernel = _double(log_kernel)
    log_kernel = np.where(usable(log_kernel.real > -INF), log_kernel, -INF)
    allowed = log_kernel.real > -INF
    rows, columns = np.flatnonzero(allowed.any(axis=1)), np.flatnonzero(allowed.any(axis=0))
    plan = np.zeros_like(log_kernel)
    f_all, g_all = np.full(len(plan), -INF, plan.dtype), np.full(plan.shape[1], -INF, plan.dtype)
    if len(rows) == 0:
        return plan, f_all, g_all, 0.0
    kernel = log_kernel[np.ix_(rows, columns)]
    a, b = 1 / len(rows), 1 / len(columns)
    f, g = np.zeros(len(rows), kernel.dtype), np.zeros(len(columns), kernel.dtype)
    step_size = np.max(np.abs(np.imag(kernel)))  # of the complex step, or 0
    before = INF
    for step in range(max_steps + 1):
        log_row_sums = _log_sum_exp_along(kernel + g[None, :], 1)  # of P, without e^{f_i}
        next_f = np.log(a) - log_row_sums
        if step > 0:  # the columns are exact
            left = np.sum(np.abs(np.exp(f.real + log_row_sums.real) - a))
            if step_size > 0:
                left = max(left, np.max(np.abs(np.imag(next_f - f))) / step_size)
            if (
                left <= tolerance
                or step == max_steps
                or (step % 200 == 0 and left >= before * (1 - 1e-6))
            ):
                break
            before = left if step % 200 == 0 else before
        f = next_f
        g = np.log(b) - _log_sum_exp_along(kernel + f[:, None], 0)
    plan[np.ix_(rows, columns)] = np.exp(f[:, None] + kernel + g[None, :])
    f_all[rows], g_all[columns] = f, g
    error = np.abs(plan.real.sum(1)[rows] - a).sum() + np.abs(plan.real.sum(0)[columns] - b).sum()
    return plan, f_all, g_all, error


def transported(logits, epsilon=0.3, cost="sqeuclidean", kappa=0.0, temperature=1.0):
    """Count candidates by the entropic coupling P* at cost C(cos)/ε: w_ij = N_i P*_ij / Σ_k P*_ik.

    Entries that no coupling uses get log w = −∞. Ref: [2] Eq. 5, 7, 8"""
    shape, log_kernel = np.shape(logits), _log_kernel(logits, epsilon, cost, kappa, temperature)
    counts = (log_kernel.real > -INF).sum(axis=1)  # N_i
    log_kernel = np.where(usable(log_kernel.real > -INF), log_kernel, -INF)
    _, f, g, _ = sinkhorn(log_kernel)
    f, g, log_kernel = f.tolist(), g.tolist(), log_kernel.tolist()
    log_w = [[-INF] * len(row) for row in log_kernel]
    for i in range(len(log_w)):
        places = _finite(log_kernel[i])
        log_plan = [f[i] + log_kernel[i][j] + g[j] for j in places]  # P itself may underflow
        for j, value in zip(places, log_plan):
            log_w[i][j] = math.log(counts[i]) + value - _log_sum_exp(log_plan)
    return np.array(log_w).reshape(shape)


# ---- 2. Objectives: pos (A, M), neg (A, N), log w (A, N) → losses (A,) -------------------------------------
#    nce, ppcl and decoupled act on logits, simple and triplet on cosines


def _weighted_mean(values, log_w):
    """Return Σ w v / Σ w, 0 for no value."""
    w = [_exp(v) for v in log_w]
    return _product(w, values) / sum(w) if w else 0.0


def _debiased_row(pos, neg, log_w, tau_plus, temperature, log_w_pos):
    """Return `debiased` of one anchor, and whether the floor binds."""
    places, positives = _finite(neg, log_w), _finite(pos, log_w_pos)
    if not places:
        return -INF, False
    if tau_plus == 0:
        return _log_sum_exp([neg[j] + log_w[j] for j in places]), False
    shift = max(
        [(neg[j] + log_w[j]).real for j in places] + [pos[m].real for m in positives]
    )  # numerics
    weighted = sum(_exp(neg[j] + log_w[j] - shift) for j in places)
    total = sum(_exp(log_w[j]) for j in places)
    expectation = _weighted_mean(
        [_exp(pos[m] - shift) for m in positives], [log_w_pos[m] for m in positives]
    )
    value = (weighted - total * tau_plus * expectation) / (1 - tau_plus)
    floor = total * _exp(-1 / temperature - shift)  # the paper's, not for the numerics
    if value.real > floor.real:
        return shift + _log(value), False
    return _log(total) - 1 / temperature, True  # the floor itself may underflow


def debiased(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None, return_clamped=False):
    """Compute log max( (Σ_j w_ij e^{s_ij} − W_i τ⁺ E⁺_i) / (1 − τ⁺), W_i e^{−1/t} ), −∞ without candidates.

    W_i = Σ_j w_ij, N_i for weights of mean 1, stands for Q; E⁺_i = Σ_m w⁺_im e^{p_im} / Σ_m w⁺_im. At τ⁺ = 0
    there is no floor. Fig. 5 prints it without W_i, but e^{−1/t} bounds a mean of e^{cos/t}, not a sum.
    W_i τ⁺ E⁺_i is the expected sum over false negatives for uniform weights only, see `exact_tilted`.
    return_clamped: return instead at which anchors the floor binds; e^{s} gets no gradient there.
    Ref: [1] Eq. 2, Fig. 5"""
    log_w_pos = uniform(pos) if log_w_pos is None else log_w_pos
    rows = [
        _debiased_row(p, s, w, tau_plus, temperature, w_pos)
        for p, s, w, w_pos in zip(_lists(pos), _lists(neg), _lists(log_w), _lists(log_w_pos))
    ]
    return np.array([floor_binds if return_clamped else value for value, floor_binds in rows])


def exact_tilted(pos, neg, beta, tau_plus):
    """Compute E_{q⁻}[e^s] from the definition of q_β⁻, for the logits of one anchor: pos (M,), neg (N,).

        E_{q⁻}[e^s] = (E_p e^{(1+β)s} − τ⁺ E_{p⁺} e^{(1+β)v}) / (E_p e^{βs} − τ⁺ E_{p⁺} e^{βv})

    neg is a sample of p, pos of p⁺; by definition q_β⁻ ∝ e^{βs} p⁻ and p = τ⁺ p⁺ + (1 − τ⁺) p⁻. [1] Eq. 2,
    e^`debiased` / N with `tilted` weights, does not follow from this for β > 0: it gives the anchor's class
    the share τ⁺ under q_β, but that share is τ⁺ Z⁺/Z_β, Z⁺ = E_{p⁺} e^{βv}, Z_β = E_p e^{βs}. With a single
    positive as the estimate of p⁺, both differences may be negative. Ref: [1] q_β⁻, defined above Eq. 2"""
    pos, neg = _lists(pos), _lists(neg)

    def difference(power):
        return _mean([_exp(power * s) for s in neg]) - tau_plus * _mean(
            [_exp(power * v) for v in pos]
        )

    return difference(1 + beta) / difference(beta)


def nce(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute −log( Σ_m e^{p_im} / (Σ_m e^{p_im} + e^{debiased_i}) ), 0 without candidates.

    Positives are pooled inside the logarithm, as in Fig. 5; Eq. 2 averages over them outside it.
    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8; [4] Eq. 1 (uniform weights) and 9 (`top`)"""
    negative = debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    return np.array(
        [_log_one_plus_ratio(n, _log_sum_exp(p)) for n, p in zip(negative, _lists(pos))]
    )


def simple(pos, neg, log_w):
    """Compute −(1/M_i) Σ_m p_im + Σ_j w_ij s_ij / Σ_j w_ij on cosines; no candidates: the second term is 0.

    Ref: [4] Eq. 3 with λ = 1/N; [2] Eq. 9 (BCL)"""
    losses = []
    for p, s, w in zip(_lists(pos), _lists(neg), _lists(log_w)):
        places = _finite(s, w)
        repulsion = _weighted_mean([s[j] for j in places], [w[j] for j in places])
        losses.append(-_mean([p[m] for m in _finite(p)]) + repulsion)
    return np.array(losses)


def triplet(pos, neg, log_w, margin=0.0):
    """Compute (1/M_i) Σ_m Σ_j w_ij max(0, 2 (s_ij − p_im) + η) / Σ_j w_ij on cosines; 0 without candidates.

    On the unit sphere 2 (s − p) = ‖x − x⁺‖² − ‖x − x⁻‖². Ref: [2] IV"""
    losses = []
    for p, s, w in zip(_lists(pos), _lists(neg), _lists(log_w)):
        places = _finite(s, w)
        losses.append(
            _mean(
                [
                    _weighted_mean(
                        [_hinge(2 * (s[j] - p[m]) + margin) for j in places], [w[j] for j in places]
                    )
                    for m in _finite(p)
                ]
            )
        )
    return np.array(losses)


def ppcl(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute −(1/M_i) Σ_m log( e^{p_im} / (Σ_m' e^{p_im'} + e^{debiased_i}) ). Ref: [3] Eq. 8"""
    negative = debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    losses = []
    for n, p in zip(negative, _lists(pos)):
        terms = []
        for m in _finite(p):
            rest = [p[other] for other in _finite(p) if other != m] + [
                n
            ]  # the denominator without e^{p_m}
            terms.append(_log_one_plus_ratio(_log_sum_exp(rest), p[m]))
        losses.append(_mean(terms))
    return np.array(losses)


def decoupled(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """Compute −log( Σ_m e^{p_im} / e^{debiased_i} ), the denominator without positives; no candidates: 0."""
    negative = debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    return np.array(
        [n - _log_sum_exp(p) if n.real > -INF else 0.0 for n, p in zip(negative, _lists(pos))]
    )


# ---- 3. The loss -------------------------------------------------------------------------------------------

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
}


def _who_is_who(views, bank, own, mask, labels, drop_above, objective):
    """Return the cosines of every anchor with its positives (A, M) and its candidates (A, N), else −∞."""
    size, rows = len(views[0]), [row for view in views for row in _lists(view)]
    labels = None if labels is None else np.asarray(labels).tolist()
    candidate_labels = None if labels is None or bank is not None else labels * len(views)
    if bank is not None:
        if np.ndim(bank) == 2 and labels is not None and len(labels) == size + len(bank):
            candidate_labels = labels[size:]
        bank = _lists(bank) if np.ndim(bank) == 3 else [_lists(bank)] * size
    pos, neg = [], []
    for a in range(len(rows) if bank is None else size):
        sample_views = range(a % size, len(rows), size)
        positives = [_product(rows[a], rows[b]) for b in sample_views if b != a]
        candidates, excluded = rows, sample_views
        if bank is not None:
            candidates, excluded = bank[a], [] if own is None else [own[a]]
        negatives = [-INF] * len(candidates)
        for j in range(len(candidates)):
            cosine = _product(rows[a], candidates[j])
            same_label = candidate_labels is not None and candidate_labels[j] == labels[a % size]
            if j not in excluded and same_label and objective == "ppcl":
                positives.append(cosine)
            if j not in excluded and not same_label and (mask is None or mask[a][j]):
                negatives[j] = cosine
        limit = INF if drop_above is None else _largest(positives).real + drop_above
        pos.append(positives)
        neg.append([v if v.real <= limit else -INF for v in negatives])
    width = max(len(row) for row in pos)
    return [row + [-INF] * (width - len(row)) for row in pos], neg


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
    return_stats=False,
):
    """Compute the loss of two or more (B, D) views: the mean, the sum, or one value for each anchor, (A,).

    Every row of every view is an anchor, in the order of the concatenated views. Its positives are the other
    views of its sample, its candidates the views of other samples that do not share its label; under `ppcl`
    those that share it are positives.

    negatives    (K, D) or, for each anchor, (B, K, D): these are the candidates, the anchors the first view,
                 the positives its other views. `transported` takes column k for one and the same candidate
    own          (B,): the row of `negatives` that is no candidate
    mask         (A, N) booleans: True where a candidate counts as a negative
    labels       (B,), then rows of `negatives` share none, or (B + K,), the last K for the rows of (K, D)
    drop_above   drops candidates whose cosine exceeds the anchor's largest positive cosine by more than this
    weights      a name or a function: logits (A, N) → log weights (A, N)
    objective    a name or a function: logits (A, M), (A, N) and log weights (A, N) → losses (A,)
    `detach_weights` holds log w and log w⁺ constant; None: for `transported` alone. `return_stats` adds the
    dict of `statistics`. Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8, 9; [3] Eq. 8; [4] Eq. 1, 3, 9"""
    weights = PRESETS[loss][0] if weights is None else weights
    objective = PRESETS[loss][1] if objective is None else objective
    tau_plus = PRESETS[loss][2] if tau_plus is None else tau_plus
    detach_weights = weights == "transported" if detach_weights is None else detach_weights

    # 1. Who could be a negative?
    views = [unit(view) if normalize else view for view in views]
    bank = unit(negatives) if normalize and negatives is not None else negatives
    pos_cosines, cosines = _who_is_who(views, bank, own, mask, labels, drop_above, objective)
    pos, neg = (
        _by_row(lambda row: [v / temperature for v in row], rows) for rows in (pos_cosines, cosines)
    )

    # 2. How much does each one count?
    coupling = epsilon, cost, kappa, temperature
    rules = {
        "uniform": uniform,
        "tilted": lambda s: tilted(s, beta),
        "hardest": hardest,
        "top": lambda s: top(s, alpha),
        "transported": lambda s: transported(s, *coupling),
    }
    weigh = weigh_positives = weights if callable(weights) else rules[weights]
    if weights == "transported":  # without marginals: w⁺ ∝ e^{−C/ε}
        weigh_positives = lambda p: _by_row(_mean_one, _log_kernel(p, *coupling))
    log_w, log_w_pos = weigh(neg.real if detach_weights else neg), None
    if tau_plus > 0 and pos.shape[1] > 1:  # one positive has the whole weight
        log_w_pos = weigh_positives(pos.real if detach_weights else pos)

    # 3. What is done with them?
    if callable(objective):
        losses = objective(pos, neg, log_w)
    elif objective == "simple":
        losses = simple(pos_cosines, cosines, log_w)
    elif objective == "triplet":
        losses = triplet(pos_cosines, cosines, log_w, margin)
    else:
        function = {"nce": nce, "ppcl": ppcl, "decoupled": decoupled}[objective]
        losses = function(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    value = (
        losses if reduction == "none" else sum(losses) / (len(losses) if reduction == "mean" else 1)
    )
    if not return_stats:
        return value
    floor_binds = [False] * len(pos)
    if objective in ("nce", "ppcl", "decoupled"):
        floor_binds = debiased(
            pos, neg, log_w, tau_plus, temperature, log_w_pos, return_clamped=True
        )
    w = [[math.exp(log_w[i][j].real) for j in _finite(neg[i])] for i in range(len(neg))]
    shares = [sum(row) ** 2 / (len(row) * sum(v**2 for v in row)) for row in w if row]
    figures = {
        "clamped": [float(v) for v in floor_binds],
        "ess": shares,
        "positive": [v.real for row in pos_cosines for v in row if v.real > -INF],
        "negative": [v.real for row in cosines for v in row if v.real > -INF],
    }
    return value, {name: _mean(values) if values else math.nan for name, values in figures.items()}


def statistics(*views, **options):
    """Compute the statistics of a run, a dict, by the options of `contrastive_loss`; nan for an empty mean.

    clamped: the share of anchors at which the floor binds, [1] Fig. 5. ess: the mean over anchors with
    candidates of (Σ_j w_ij)² / (N_i Σ_j w_ij²), 1 for uniform weights, 1/N if one candidate has all weight.
    positive, negative: the mean cosine over all pairs of anchor and positive, of anchor and candidate."""
    return contrastive_loss(*views, **options, return_stats=True)[1]


def annealed_beta(progress, beta, changes=5):
    """Lower β to zero in ℓ equal steps, progress from 0 to 1: β (1 − ⌊ℓ · progress⌋ / ℓ). Ref: [1] App. C"""
    return beta * (1 - math.floor(changes * progress) / changes)


# ---- 4. Banks and games ------------------------------------------------------------------------------------


def bank_update(rows, index, z, momentum):
    """Update row_i ← (m row_i + (1 − m) z̄_i) / ‖·‖, z̄_i the mean of z's rows with index i. Ref: [4] 5.1"""
    rows, z = _lists(rows), _lists(unit(z))
    out = [list(row) for row in rows]
    for i in range(len(rows)):
        mine = [z[b] for b in range(len(index)) if index[b] == i]
        if mine:
            mixed = [
                momentum * rows[i][d] + (1 - momentum) * _mean([row[d] for row in mine])
                for d in range(len(rows[i]))
            ]
            out[i] = unit([mixed])[0].tolist()
    return np.array(out)


def ema(w_ema, w, m):
    """Update w_ema ← m w_ema + (1 − m) w, entry by entry. Ref: [3] Eq. 7"""
    return m * _double(w_ema) + (1 - m) * _double(w)


def hinge_discriminator(real, fake):
    """Compute L_D = E_x f_D(−D(x)) + E_z f_D(D(G(z))) of scores, f_D(x) = max(0, 1 + x). Ref: [3] Eq. 5"""
    return _mean([_hinge(1 - v) for v in _lists(real)]) + _mean(
        [_hinge(1 + v) for v in _lists(fake)]
    )


def hinge_generator(fake):
    """Compute L_G = E_z f_G(D(G(z))), f_G(x) = −x. Ref: [3] Eq. 5, which does not print f_G"""
    return _mean([-v for v in _lists(fake)])


def diversity(images, real):
    """Compute Σ_i min_{j ≠ i} ‖x_i − x_j‖ over images, relative to as many real images; not in the papers."""

    def nearest(x):
        x = _lists(np.reshape(x, (len(x), -1)))
        n = range(len(x))
        return _mean(
            [min(math.sqrt(_squared_distance(x[i], x[j])) for j in n if j != i) for i in n]
        )

    return nearest(images) / nearest(real)


def ppcl_sets(raw, latents):
    """List A(i) = I \\ {i} and P(i) for every view i of a multiviewed batch.

    raw[i] is the raw sample of view i, latents[i] the latent that generated it, None for a real sample.
    P(i) = {p in A(i): z_p = z_i} if i is generated, {j(i)}, the other view, if it is real. Ref: [3] Eq. 8"""

    def paired(i, p):
        return raw[p] == raw[i] if latents[i] is None else latents[p] == latents[i]

    others = [[a for a in range(len(raw)) if a != i] for i in range(len(raw))]
    return others, [[p for p in others[i] if paired(i, p)] for i in range(len(raw))]


def ppcl_batch(v, raw, latents, temperature):
    """Compute (1/|I|) Σ_{i in I} −1/|P(i)| Σ_{p in P(i)} log( e^{v_i·v_p/τ} / Σ_{a in A(i)} e^{v_i·v_a/τ} ).

    v (|I|, D); v_i·v_a is a cosine. The paper sums over i, this file takes the mean. Ref: [3] Eq. 8"""
    others, positives = ppcl_sets(raw, latents)
    v = _lists(unit(v))
    losses = []
    for i in range(len(v)):
        log_total = _log_sum_exp([_product(v[i], v[a]) / temperature for a in others[i]])
        losses.append(
            -_mean([_product(v[i], v[p]) / temperature - log_total for p in positives[i]])
        )
    return _mean(losses)


# ---- 5. Readouts -------------------------------------------------------------------------------------------


def uniformity(z, t=2.0):
    """Compute log of the mean of e^{−t‖x − y‖²} over ordered pairs of distinct rows. Ref: [5]; [4] Eq. 10"""
    z = _lists(z)
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
    return _log_sum_exp([-t * _squared_distance(z[i], z[j]) for i, j in pairs]) - math.log(
        len(pairs)
    )


def alignment(x, y):
    """Compute the mean of ‖x_i − y_i‖² over rows. Ref: [5], exponent 2"""
    return _mean([_squared_distance(a, b) for a, b in zip(_lists(x), _lists(y))])


def tolerance(z, labels):
    """Compute the mean of x·y over ordered pairs of distinct rows that share a label; nan if there is none.

    Eq. 11 prints a mean over all pairs with an indicator inside: at most 0.1 for ten equal classes. Table 1
    has values up to 0.61, so its mean is over the pairs of one label. Ref: [4] Eq. 11"""
    z = _lists(z)
    pairs = [
        (i, j) for i in range(len(z)) for j in range(len(z)) if i != j and labels[i] == labels[j]
    ]
    return _mean([_product(z[i], z[j]) for i, j in pairs]) if pairs else math.nan


def perturbed(x, slope, bound):
    """Compute min(1, max(0, x_k + bound · sign(slope_k))) for every pixel, slope = ∂ℓ/∂x. Ref: after [10]"""
    return np.minimum(1, np.maximum(0, _double(x) + bound * np.sign(slope)))


# ---- 6. Limits and theorems --------------------------------------------------------------------------------


def exact_coupling(cost_matrix):
    """Find the plan of min_P Σ_ij C_ij P_ij with uniform marginals by linear programming.

    +∞ masks an entry; fully masked rows and columns get no mass. Ref: [2] Eq. 5 at ε = 0"""
    cost_matrix = np.asarray(cost_matrix, dtype=np.float64)
    entries = np.argwhere(cost_matrix < INF).tolist()
    matrix, masses = _marginals(entries)
    result = linprog(
        [cost_matrix[i, j] for i, j in entries], A_eq=matrix, b_eq=masses, method="highs"
    )
    if result.status != 0:
        raise ValueError(f"no coupling: {result.message}")
    plan = np.zeros(cost_matrix.shape)
    plan[cost_matrix < INF] = result.x  # row by row, as the entries
    return plan


def assignment_cost(cost_matrix):
    """Compute min over permutations π of (1/n) Σ_i C_{i π(i)}, the cost of `exact_coupling` of a square C."""
    cost_matrix = np.asarray(cost_matrix, dtype=np.float64)
    return _mean([cost_matrix[i, j] for i, j in zip(*linear_sum_assignment(cost_matrix))])


def product_coupling(allowed):
    """Find the limit ε → ∞ of the coupling: P_ij = 1/(A N), the product of the marginals.

    With masked entries the limit is the coupling of largest entropy on the allowed ones. Ref: [2] Eq. 6"""
    allowed = np.asarray(allowed, dtype=bool)
    if allowed.all():
        return np.full(allowed.shape, 1 / allowed.size)
    return sinkhorn(np.where(allowed, 0.0, -INF))[0]


def nce_cold(pos, neg):
    """Compute lim_{τ→0⁺} τ · nce(pos/τ, neg/τ) = max(0, max_j s_ij − s_i⁺) for two views, on cosines.

    pos (A, 1), neg (A, N) → (A,). It is half of `triplet` on the nearest candidate, η = 0. Ref: [4] Eq. 6"""
    return np.array([_hinge(_largest(s) - p) for (p,), s in zip(_lists(pos), _lists(neg))])


def nce_hot(pos, neg, temperature):
    """Compute log(1 + N) − (N/(N+1)) s⁺/τ + (1/(N+1)) Σ_j s_j/τ: nce up to O(1/τ²) for two views, on cosines.

    pos (A, 1), neg (A, N) → (A,). The paper's N counts the positive too; it is N + 1 here. Ref: [4] Eq. 7"""
    out = []
    for (p,), s in zip(_lists(pos), _lists(neg)):
        n = len(_finite(s))
        out.append(
            math.log(1 + n) - (n * p - sum(s[j] for j in _finite(s))) / (n + 1) / temperature
        )
    return np.array(out)


def softmax_gradients(pos, neg, temperature):
    """Compute ∂L/∂s⁺ = −(1/τ) Σ_j P_ij (A,) and ∂L/∂s_j = P_ij/τ (A, N) of nce for two views, on cosines.

    P_ij = e^{s_ij/τ} / (Σ_k e^{s_ik/τ} + e^{s_i⁺/τ}); pos (A, 1), neg (A, N). Ref: [4] Eq. 2, 4"""
    by_pos, by_neg = [], []
    for (p,), s in zip(_lists(pos), _lists(neg)):
        places = _finite(s)
        log_total = _log_sum_exp([s[j] / temperature for j in places] + [p / temperature])
        by_neg.append([0.0] * len(s))
        for j in places:
            by_neg[-1][j] = _exp(s[j] / temperature - log_total) / temperature
        by_pos.append(-sum(by_neg[-1]))
    return np.array(by_pos), np.array(by_neg)


def worst_case(pos, neg, Q):
    """Compute L* = −log( e^{p} / (e^{p} + Q e^{max_j s_j}) ) of every anchor, logits (A, 1), (A, N) → (A,).

    The limit β → ∞ of nce on `tilted` weights, Q the sum of the weights. Ref: [1] Prop. 1, App. A.1"""
    return np.array(
        [
            _log_one_plus_ratio(math.log(Q) + _largest(s), p)
            for (p,), s in zip(_lists(pos), _lists(neg))
        ]
    )


def bad_probability(logits_row, beta, eps):
    """Compute q_β{ s < M − ε }, M = max_j s_j, q_β(j) = e^{β s_j} / Σ_k e^{β s_k}. Ref: [1] App. A.1"""
    s = [v for v in _lists(logits_row) if v > -INF]
    log_partition = _log_sum_exp([beta * v for v in s])
    return sum(math.exp(beta * v - log_partition) for v in s if v < max(s) - eps)


def bad_probability_bound(logits_row, beta, eps):
    """Compute e^{−β ε/2} / ρ_ε ≥ `bad_probability`, ρ_ε the share of logits ≥ M − ε/2. Ref: [1] App. A.1"""
    s = [v for v in _lists(logits_row) if v > -INF]
    return math.exp(-beta * eps / 2) / _mean([v >= max(s) - eps / 2 for v in s])


def worst_case_bound(logits_row, beta, eps):
    """Compute the three sides of E_{q_β}[M − s] ≤ ε + R P_{q_β}(s < M − ε) ≤ ε + R e^{−β ε/2}/ρ_ε.

    R = M − min_j s_j. The paper has 2 for R, the range of cosines; its logits, cos/t², have the range 2/t².
    Ref: [1] App. A.1"""
    s = [v for v in _lists(logits_row) if v > -INF]
    spread = max(s) - min(s)
    gap = _weighted_mean([max(s) - v for v in s], [beta * (v - max(s)) for v in s])
    return (
        gap,
        eps + spread * bad_probability(logits_row, beta, eps),
        eps + spread * bad_probability_bound(logits_row, beta, eps),
    )


def _pairs_of(x, negatives):
    """Return (x_i, its negatives) for every i; negatives (K, D) for all i, or (A, K, D) for each."""
    x, shared, negatives = _lists(x), np.ndim(negatives) == 2, _lists(negatives)
    return [(x[i], negatives if shared else negatives[i]) for i in range(len(x))]


def l_infinity(x, positives, negatives):
    """Compute L_∞ = E[ −log( e^{f·f⁺} / E_q e^{f·f⁻} ) ], rows on a sphere of radius 1/t.

    x, positives (A, D), negatives (K, D) or (A, K, D). Ref: [1] Eq. 4 and 6"""
    terms = []
    for (f, sample), positive in zip(_pairs_of(x, negatives), _lists(positives)):
        log_mean = _log_sum_exp([_product(f, y) for y in sample]) - math.log(len(sample))
        terms.append(log_mean - _product(f, positive))
    return _mean(terms)


def l_align(x, positives):
    """Compute E ‖f − f⁺‖² / 2 = 1/t² − E f·f⁺. Ref: [1] App. A.2, Eq. 7"""
    return alignment(x, positives) / 2


def l_unif_star(x, negatives):
    """Compute sup_q E_x log E_q e^{f·f⁻} = E_x max f·f⁻ = 1/t² − E_x min ‖f − f⁻‖²/2. Ref: [1] Eq. 8"""
    return _mean(
        [_largest([_product(f, y) for y in sample]) for f, sample in _pairs_of(x, negatives)]
    )


def nearest_distance(x, negatives):
    """Compute E_x min ‖f − f⁻‖². Eq. 8 prints x⁺ under this infimum; it runs over x⁻. Ref: [1] Eq. 8"""
    return _mean(
        [min(_squared_distance(f, y) for y in sample) for f, sample in _pairs_of(x, negatives)]
    )


def ball_packing(centres, shares):
    """Compute Σ_c ρ(c) min_{c' ≠ c} ‖v_c − v_c'‖², centres (C, D), shares (C,): the worst case maximises it.

    Theorem 2 states this problem. Its interpretation calls it Tammes' problem, which is about the smallest
    distance, not the mean. Ref: [1] Theorem 2, Eq. 5"""
    v = _lists(centres)
    return sum(
        shares[c] * min(_squared_distance(v[c], v[d]) for d in range(len(v)) if d != c)
        for c in range(len(v))
    )


# ---- 7. Gradients ------------------------------------------------------------------------------------------


def _by_entry(slope, x):
    """Return slope(x, e_k) for every entry k of x, e_k the unit vector of that entry."""
    x = np.asarray(x, dtype=np.float64)
    out = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        direction = np.zeros(x.shape)
        direction[place] = 1
        out[place] = slope(x, direction)
    return out


def gradient(function, x, step=1e-30):
    """Compute ∂f/∂x_k = Im f(x + i h e_k) / h for every entry of x: the complex step, exact to rounding."""
    return _by_entry(lambda x, e: np.imag(function(x + 1j * step * e)) / step, x)


def central_difference(function, x, step=1e-6):
    """Compute ∂f/∂x_k ≈ (f(x + h e_k) − f(x − h e_k)) / 2h for every entry; error O(h²) + rounding / h."""
    return _by_entry(lambda x, e: (function(x + step * e) - function(x - step * e)) / (2 * step), x)
