"""Hard-negative contrastive learning, formula by formula, in plain float64 NumPy.

The claim: this file says what the papers say and nothing more.  It is slow on purpose: one loop for each sum
sign, so that every line can be held against the equation that its docstring names.  A fast implementation is
tested against it, in value and in gradient.

    symbol        name here    shape      meaning
    s_ij          neg, logits  (A, N)     cosine of anchor i and candidate j, over t; −∞: no negative
    p_im          pos          (A, M)     the same for its positives, −∞: no positive
    log w_ij      log_w        (A, N)     log importance ratio, −∞: does not count
    log w⁺_im     log_w_pos    (A, M)     the same for the positives
    N_i, M_i      count                   how many entries of row i are finite
    t, τ          temperature             [1] has rows on a sphere of radius 1/t and multiplies them, which
                                          is cos/t²; its code, [4] and this file have cos/t
    τ⁺            tau_plus                probability that a candidate has the anchor's class
    β, α, ε, κ, η beta, alpha, epsilon, kappa, margin

Complex numbers.  Every function that a gradient is taken of accepts complex input and is analytic in it: it
compares real parts only, has no conjugate and no modulus.  So Im f(x + i h eₖ) / h is ∂f/∂xₖ without a
subtraction, exact to rounding at h = 1e-30 (`gradient`).  A weight that is held constant ("detached") is one
whose imaginary part is dropped.  `central_difference` is the check that needs no complex numbers.

Sections: 1 rows, 2 weights, 3 objectives, 4 the loss, 5 limits and identities, 6 the game, 7 gradients.

References
[1] Robinson, Chuang, Sra, Jegelka: Contrastive Learning with Hard Negative Samples. ICLR 2021,
    arXiv:2010.04592
[2] Jiang, Ishwar, Aeron: Hard Negative Sampling via Regularized Optimal Transport for Contrastive
    Representation Learning. arXiv:2111.03169
[3] Data-efficient Contrastive Learning by Differentiable Hard Sample and Hard Positive Pair Generation.
    OpenReview, submitted to ICLR 2023
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. CVPR 2021, arXiv:2012.09740
[5] Wang, Isola: Understanding Contrastive Representation Learning through Alignment and Uniformity on the
    Hypersphere. ICML 2020, arXiv:2005.10242
[10] Ho, Vasconcelos: Contrastive Learning with Adversarial Examples. NeurIPS 2020, arXiv:2010.12050
"""
import cmath
import math
from fractions import Fraction

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, maximum_flow


# ------------------------------------------------ 1 rows

def _double(x):
    """x in float64, or in complex128 where it is complex."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _lists(x):
    """The same as nested lists: arithmetic on Python's own doubles is several times as fast, and as exact."""
    return _double(x).tolist()


def _exp(z):
    """e^z of one number."""
    return cmath.exp(z) if isinstance(z, complex) else math.exp(z)


def _log(z):
    """log z of one number."""
    return cmath.log(z) if isinstance(z, complex) else math.log(z)


def _sqrt(z):
    """√z of one number."""
    return cmath.sqrt(z) if isinstance(z, complex) else math.sqrt(z)


def _finite(row):
    """The places of a row that are not −∞."""
    return [j for j in range(len(row)) if row[j].real > -np.inf]


def _log_sum_exp(values):
    """log Σ e^v, −∞ for no value."""
    values = [v for v in values if v.real > -np.inf]
    if not values:
        return -np.inf
    shift = max(v.real for v in values)  # not in the papers: so that exp does not overflow
    total = 0.0
    for v in values:
        total = total + _exp(v - shift)
    return shift + _log(total)


def _log1p(z):
    """log(1 + z) for Re z ≥ 0 that keeps its digits where z is small, also for complex z."""
    if not isinstance(z, complex):
        return math.log1p(z)
    x, y = z.real, z.imag
    return complex(math.log1p(2 * x + x * x + y * y) / 2, math.atan2(y, 1 + x))  # log of modulus, and angle


def _log_one_plus_ratio(b, a):
    """−log(e^a / (e^a + e^b)) = log(1 + e^b/e^a), from a and b.

    The quotient turned over, and once more where b is the larger: so that a loss far below the rounding of 1
    keeps its digits, and a large one does not overflow."""
    if b.real == -np.inf:
        return 0.0
    if a.real == -np.inf:
        return np.inf
    if b.real > a.real:
        return (b - a) + _log1p(_exp(a - b))
    return _log1p(_exp(b - a))


def unit(x):
    """Rows on the unit sphere, x_i / √(Σ_d x_id²); a zero row stays zero (and has gradient zero)."""
    shape, x = np.shape(x), _lists(x)
    out = []
    for row in x:
        scale = max((abs(z.real) for z in row), default=0.0)  # numerics: the square of 1e-200 is 0
        if scale == 0.0:
            out.append([0.0] * len(row))
            continue
        total = 0.0
        for z in row:
            total = total + (z / scale) * (z / scale)  # no conjugate: analytic
        norm = _sqrt(total)
        out.append([z / scale / norm for z in row])
    return np.array(out).reshape(shape)


def _products(x, y):
    """s_ij = Σ_d x_id y_jd, (A, D), (N, D) → (A, N)."""
    x, y = x.tolist(), y.tolist()
    return np.array([[sum((a * b for a, b in zip(row, other)), 0.0) for other in y] for row in x]).reshape(
        len(x), len(y))


# ------------------------------------------------ 2 weights: (A, N) logits → (A, N) log weights

def _rows(rule, logits):
    """rule(list of the N_i finite logits) → their log weights; −∞ where the logit is −∞."""
    shape, logits = np.shape(logits), _lists(logits)
    out = []
    for i in range(len(logits)):
        places = _finite(logits[i])
        row = [-np.inf] * len(logits[i])
        if places:
            for j, value in zip(places, rule([logits[i][j] for j in places])):
                row[j] = value
        out.append(row)
    return np.array(out).reshape(shape)


def uniform(logits):
    """log w_ij = 0: every candidate as it was drawn.  Ref: [4] Eq. 1; [1] at β = 0"""
    return _rows(lambda s: [0.0] * len(s), logits)


def tilted(logits, beta):
    """w_ij = e^{β s_ij} / ((1/N_i) Σ_k e^{β s_ik}), the ratio q_β/p with its partition function estimated.

    Ref: [1] Eq. 2 and the two lines under it"""
    def rule(s):
        log_partition = _log_sum_exp([beta * v for v in s]) - math.log(len(s))
        return [beta * v - log_partition for v in s]
    return _rows(rule, logits)


def hardest(logits):
    """w_ij = N_i on the nearest candidate, 0 elsewhere; ties share equally: the limit β → ∞ of `tilted`.

    Ref: [1] Prop. 1; [4] Eq. 6"""
    def rule(s):
        nearest = max(v.real for v in s)
        ties = sum(1 for v in s if v.real == nearest)
        return [math.log(len(s) / ties) if v.real == nearest else -np.inf for v in s]
    return _rows(rule, logits)


def top(logits, alpha, top_k=None):
    """w_ij = 1 for s_ij ≥ s_α, 0 below; s_α is the ⌈α N_i⌉-th largest (at least the first) of the row, or the
    top_k-th (the last, where there are fewer).

    ⌈α N⌉ is exact: α is the fraction next to it, so 0.07 of 100 is 7 and 2/3 of 3 is 2 (in floats 0.07·100 > 7).
    Ref: [4] Eq. 8, 9"""
    def rule(s):
        kept = max(1, math.ceil(Fraction(alpha).limit_denominator(10**6) * len(s)))
        if top_k is not None:
            kept = min(top_k, len(s))
        threshold = sorted((v.real for v in s), reverse=True)[kept - 1]
        return [0.0 if v.real >= threshold else -np.inf for v in s]
    return _rows(rule, logits)


def ground_cost(cosines, cost="sqeuclidean", kappa=0.0):
    """½‖x − y‖² = 1 − cos, or exp(‖x − y‖² − κ) = exp(2 − 2 cos − κ), of unit rows.

    Ref: [2] VI-A, Eq. 5 and VII-C"""
    if cost == "sqeuclidean":
        return 1 - cosines
    if cost == "exp":
        return np.exp(2 - 2 * cosines - kappa)
    raise ValueError(f"cost is {cost!r}; it may be 'sqeuclidean' or 'exp'")


def usable(allowed):
    """(A, N) booleans: the allowed entries that carry mass in some coupling with uniform marginals.

    Uniform over the rows and columns that have an allowed entry.  An example of one that carries none: when
    half of a batch shares a label, its anchors take up all candidates outside, and the others get none there.
    Where there is no coupling at all (more than half share a label), `allowed` comes back as it is.

    In whole units: N leave each row, A arrive in each column.  Given one such flow, an entry can carry mass
    if it closes a cycle: from rows to columns along allowed entries, back along those that carry flow."""
    allowed = np.asarray(allowed, dtype=bool)
    rows, columns = np.flatnonzero(allowed.any(axis=1)), np.flatnonzero(allowed.any(axis=0))
    if allowed[np.ix_(rows, columns)].all():
        return allowed.copy()
    count, width = len(rows), len(columns)
    source, sink = count + width, count + width + 1
    capacity = np.zeros((count + width + 2,) * 2, dtype=np.int32)
    for i in range(count):
        capacity[source, i] = width
        for j in range(width):
            capacity[i, count + j] = count * width * allowed[rows[i], columns[j]]
    for j in range(width):
        capacity[count + j, sink] = count
    result = maximum_flow(csr_matrix(capacity), source, sink)
    if result.flow_value < count * width:
        return allowed.copy()
    flow = result.flow.toarray()
    steps = np.zeros((count + width,) * 2, dtype=np.int32)
    for i in range(count):
        for j in range(width):
            steps[i, count + j] = allowed[rows[i], columns[j]]
            steps[count + j, i] = flow[i, count + j] > 0
    _, cycle = connected_components(csr_matrix(steps), directed=True, connection="strong")
    out = np.zeros_like(allowed)
    for i in range(count):
        for j in range(width):
            out[rows[i], columns[j]] = allowed[rows[i], columns[j]] and cycle[i] == cycle[count + j]
    return out


def _log_sum_exp_along(x, axis):
    """log Σ e^x along an axis of a matrix that has a finite entry in every row and column."""
    shift = x.real.max(axis=axis, keepdims=True)  # so that exp does not overflow
    return np.squeeze(shift, axis) + np.log(np.exp(x - shift).sum(axis=axis))


def sinkhorn(log_kernel, tolerance=1e-14, max_steps=100000):
    """The coupling P_ij = exp(f_i + log_kernel_ij + g_j) with uniform marginals, by alternating them.

    f_i = log a_i − log Σ_j e^{K_ij + g_j},  g_j = log b_j − log Σ_i e^{K_ij + f_i}.  a is uniform over the
    rows that have a finite entry, b over such columns, total mass 1; the others have no mass and f, g = −∞.
    With log_kernel = −C/ε this is the minimiser of [2] Eq. 5: f and g take up the log of the marginals.

    → plan, f, g, error = Σ_i|Σ_j P_ij − a_i| + Σ_j|Σ_i P_ij − b_j|.  Stops where the error is below
    `tolerance` and, for a complex kernel, the imaginary part has settled as well as that; or where neither
    falls any more: at rounding, or with a large error where every coupling needs a forbidden entry.  Entries
    that no coupling uses are forbidden beforehand: the plan is the same, and would take 1/error steps else.

    Ref: [2] Eq. 5 to 7, Lemma 3"""
    log_kernel = _double(log_kernel)
    allowed = usable(log_kernel.real > -np.inf)
    log_kernel = np.where(allowed, log_kernel, -np.inf)
    rows, columns = np.flatnonzero(allowed.any(axis=1)), np.flatnonzero(allowed.any(axis=0))
    plan = np.zeros_like(log_kernel)
    f_all = np.full(log_kernel.shape[0], -np.inf, log_kernel.dtype)
    g_all = np.full(log_kernel.shape[1], -np.inf, log_kernel.dtype)
    if len(rows) == 0:
        return plan, f_all, g_all, 0.0
    kernel = log_kernel[np.ix_(rows, columns)]
    a, b = 1 / len(rows), 1 / len(columns)
    f, g = np.zeros(len(rows), kernel.dtype), np.zeros(len(columns), kernel.dtype)
    unit_of_imaginary = np.max(np.abs(kernel.imag)) if np.iscomplexobj(kernel) else 0.0
    before = np.inf
    for step in range(max_steps + 1):
        log_row_sums = _log_sum_exp_along(kernel + g[None, :], 1)  # row sums of P, without e^{f_i}
        new_f = np.log(a) - log_row_sums
        if step > 0:  # the columns have just been made right: what is left is the error of the rows
            left = np.sum(np.abs(np.exp(f.real + log_row_sums.real) - a))
            if unit_of_imaginary > 0:
                left = max(left, np.max(np.abs((new_f - f).imag)) / unit_of_imaginary)
            if left <= tolerance:
                break
            if step % 200 == 0:
                if left >= before * (1 - 1e-6):
                    break
                before = left
            if step == max_steps:
                break
        f = new_f
        g = np.log(b) - _log_sum_exp_along(kernel + f[:, None], 0)
    plan[np.ix_(rows, columns)] = np.exp(f[:, None] + kernel + g[None, :])
    f_all[rows], g_all[columns] = f, g
    error = 0.0
    for i in rows:
        error += abs(sum(plan[i, j].real for j in columns) - a)
    for j in columns:
        error += abs(sum(plan[i, j].real for i in rows) - b)
    return plan, f_all, g_all, error


def transported(logits, epsilon=0.3, cost="sqeuclidean", kappa=0.0, temperature=1.0):
    """w_ij = N_i P*_ij / Σ_k P*_ik, P* the entropic coupling of anchors and candidates at cost C(cos)/ε.

    cos = temperature · logits; the entries that are no negatives have cost +∞.  log w is also −∞ where P* has
    to be 0 (`usable`).
    Ref: [2] Eq. 5, 7, 8"""
    shape, logits = np.shape(logits), _lists(logits)
    log_kernel = []
    for i in range(len(logits)):
        places = _finite(logits[i])
        log_kernel.append([-np.inf] * len(logits[i]))
        for j in places:
            log_kernel[i][j] = -ground_cost(temperature * logits[i][j], cost, kappa) / epsilon
    log_kernel = np.array(log_kernel).reshape(shape)
    _, f, g, _ = sinkhorn(log_kernel)
    log_kernel = np.where(usable(log_kernel.real > -np.inf), log_kernel, -np.inf).tolist()
    f, g = f.tolist(), g.tolist()

    log_w = []
    for i in range(len(logits)):
        places = _finite(log_kernel[i])
        log_plan = [f[i] + log_kernel[i][j] + g[j] for j in places]  # from the potentials: P may underflow
        log_row_sum = _log_sum_exp(log_plan)
        log_w.append([-np.inf] * len(logits[i]))
        for j, value in zip(places, log_plan):
            log_w[i][j] = math.log(len(_finite(logits[i]))) + value - log_row_sum
    return np.array(log_w).reshape(shape)


# ------------------------------------------------ 3 objectives: (A, M), (A, N), (A, N) → (A,)

def _debiased_row(pos, neg, log_w, tau_plus, temperature, log_w_pos):
    """One anchor of `debiased`: the log, and whether the floor holds."""
    places = [j for j in _finite(neg) if log_w[j].real > -np.inf]
    if not places:
        return -np.inf, False
    if tau_plus == 0:
        return _log_sum_exp([neg[j] + log_w[j] for j in places]), False
    positives = [m for m in _finite(pos) if log_w_pos[m].real > -np.inf]
    # e^{−shift} is taken out of every term, for the numerics
    shift = max([(neg[j] + log_w[j]).real for j in places] + [pos[m].real for m in positives])
    shift_pos = max([log_w_pos[m].real for m in positives], default=0.0)
    weighted = total = 0.0
    for j in places:
        weighted = weighted + _exp(neg[j] + log_w[j] - shift)
        total = total + _exp(log_w[j])
    upper = lower = 0.0
    for m in positives:
        upper = upper + _exp(log_w_pos[m] - shift_pos) * _exp(pos[m] - shift)
        lower = lower + _exp(log_w_pos[m] - shift_pos)
    expectation = upper / lower if positives else 0.0  # E⁺: of e^{p} under q_β⁺
    value = (weighted - total * tau_plus * expectation) / (1 - tau_plus)
    floor = total * _exp(-1 / temperature - shift)
    if value.real > floor.real:
        return shift + _log(value), False
    return _log(total) - 1 / temperature, True  # the paper's floor, its log written out: it may underflow


def _debiased_rows(pos, neg, log_w, tau_plus, temperature, log_w_pos):
    pos, neg, log_w = _lists(pos), _lists(neg), _lists(log_w)
    log_w_pos = uniform(pos) if log_w_pos is None else _lists(log_w_pos)
    return [_debiased_row(pos[i], neg[i], log_w[i], tau_plus, temperature, log_w_pos[i])
            for i in range(len(pos))]


def debiased(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """log max( (Σ_j w_ij e^{s_ij} − W_i τ⁺ E⁺_i) / (1 − τ⁺), W_i e^{−1/t} ), (A,); −∞ without a candidate.

    W_i = Σ_j w_ij, which is N_i for weights of mean one; E⁺_i = Σ_m w⁺_im e^{p_im} / Σ_m w⁺_im.  At τ⁺ = 0
    there is no floor: log Σ_j w_ij e^{s_ij}.  W_i stands for Q of the paper.  The floor in the paper's
    pseudocode lacks W_i; a mean of e^{cos/t} is at least e^{−1/t}, so a sum is at least W_i times that.

    Ref: [1] Eq. 2, Fig. 5"""
    return np.array([row[0] for row in _debiased_rows(pos, neg, log_w, tau_plus, temperature, log_w_pos)])


def clamped(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """(A,) booleans: the floor of `debiased` holds, and no gradient reaches the negatives by way of e^{s}.

    Ref: [1] Fig. 5"""
    rows = _debiased_rows(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    return np.array([row[1] for row in rows], dtype=bool)


def nce(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """−log( Σ_m e^{p_im} / (Σ_m e^{p_im} + e^{debiased_i}) ); 0 without a candidate.

    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8; [4] Eq. 1 (uniform weights) and 9 (`top`)"""
    pos = _lists(pos)
    negative = debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    return np.array([_log_one_plus_ratio(negative[i], _log_sum_exp(pos[i])) for i in range(len(pos))])


def _mean_over_positives(pos_row, term):
    """(1/M_i) Σ_m term(p_im), 0 for no positive."""
    places = _finite(pos_row)
    total = 0.0
    for m in places:
        total = total + term(pos_row[m])
    return total / len(places) if places else 0.0


def _weighted_mean(neg_row, log_w_row, term):
    """Σ_j w_ij term(s_ij) / Σ_j w_ij, 0 for no candidate."""
    upper = lower = 0.0
    places = [j for j in _finite(neg_row) if log_w_row[j].real > -np.inf]
    for j in places:
        upper = upper + _exp(log_w_row[j]) * term(neg_row[j])
        lower = lower + _exp(log_w_row[j])
    return upper / lower if places else 0.0


def simple(pos, neg, log_w):
    """−(1/M_i) Σ_m p_im + Σ_j w_ij s_ij / Σ_j w_ij, on cosines; the second term is 0 without a candidate.

    Ref: [4] Eq. 3 with λ = 1/N; [2] Eq. 9 (BCL)"""
    pos, neg, log_w = _lists(pos), _lists(neg), _lists(log_w)
    losses = []
    for i in range(len(pos)):
        attraction = _mean_over_positives(pos[i], lambda p: p)
        repulsion = _weighted_mean(neg[i], log_w[i], lambda s: s)
        losses.append(-attraction + repulsion)
    return np.array(losses)


def triplet(pos, neg, log_w, margin=0.0):
    """(1/M_i) Σ_m Σ_j w_ij max(0, 2 (s_ij − p_im) + η) / Σ_j w_ij, on cosines; 0 without a candidate.

    2 (s − p) = ‖x − x⁺‖² − ‖x − x⁻‖² on the unit sphere.  Ref: [2] IV"""
    pos, neg, log_w = _lists(pos), _lists(neg), _lists(log_w)

    def hinge(v):
        return v if v.real > 0 else 0.0

    losses = []
    for i in range(len(pos)):
        losses.append(_mean_over_positives(pos[i], lambda p: _weighted_mean(
            neg[i], log_w[i], lambda s: hinge(2 * (s - p) + margin))))
    return np.array(losses)


def ppcl(pos, neg, log_w, tau_plus=0.0, temperature=1.0, log_w_pos=None):
    """−(1/M_i) Σ_m log( e^{p_im} / (Σ_m' e^{p_im'} + e^{debiased_i}) ).

    The mean of logs where `nce` has the log of a sum; the same at M = 1.  Ref: [3] Eq. 8"""
    pos = _lists(pos)
    negative = debiased(pos, neg, log_w, tau_plus, temperature, log_w_pos)
    losses = []
    for i in range(len(pos)):
        places = _finite(pos[i])
        total = 0.0
        for m in places:
            rest = [pos[i][other] for other in places if other != m] + [negative[i]]  # all but e^{p_m} itself
            total = total + _log_one_plus_ratio(_log_sum_exp(rest), pos[i][m])
        losses.append(total / len(places) if places else 0.0)
    return np.array(losses)


# ------------------------------------------------ 4 the loss

PRESETS = {  # loss: weights, objective, τ⁺
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


def _who_is_who(views, negatives, own, labels, objective):
    """Anchor rows, candidate rows, and for each anchor the lists of its positives and of its candidates.

    A positive or a candidate is ("view", row of the concatenated views) or ("bank", row of the bank)."""
    count, size = len(views), len(views[0])
    anchors = range(size) if negatives is not None else range(count * size)
    label = (lambda sample: None) if labels is None else (lambda sample: labels[sample])
    bank_label = (lambda k: None)
    if negatives is not None and labels is not None and len(labels) == size + len(negatives):
        bank_label = (lambda k: labels[size + k])
    positives, candidates = [], []
    for a in anchors:
        view, sample = a // size, a % size
        mine = [("view", ((view + step) % count) * size + sample) for step in range(1, count)]
        others = []
        if negatives is not None:
            offered = [("bank", k, bank_label(k)) for k in range(len(negatives)) if own is None or k != own[a]]
        else:
            offered = [("view", b, label(b % size)) for b in range(count * size) if b % size != sample]
        for kind, row, its_label in offered:
            if its_label is not None and its_label == label(sample):
                if objective == "ppcl":
                    mine.append((kind, row))
            else:
                others.append((kind, row))
        positives.append(mine)
        candidates.append(others)
    return positives, candidates


def _parts(views, loss, weights, objective, temperature, tau_plus, beta, alpha, top_k, epsilon, cost, kappa,
           negatives, own, labels, normalize, detach_weights):
    """Everything that a loss and its statistics need, by name."""
    weights = PRESETS[loss][0] if weights is None else weights
    objective = PRESETS[loss][1] if objective is None else objective
    tau_plus = PRESETS[loss][2] if tau_plus is None else tau_plus
    detach_weights = weights == "transported" if detach_weights is None else detach_weights
    views = [unit(view) if normalize else _double(view) for view in views]
    bank = None if negatives is None else unit(negatives) if normalize else _double(negatives)
    labels = None if labels is None else np.asarray(labels).tolist()
    positives, candidates = _who_is_who(views, bank, own, labels, objective)

    rows = np.concatenate(views)
    anchors = views[0] if bank is not None else rows
    width = len(views) - 1 + (len(rows) if bank is None else len(bank)) * (objective == "ppcl")
    offered = rows if bank is None else bank
    products, own_products = _products(anchors, offered), _products(anchors, rows)
    dtype = products.dtype if np.iscomplexobj(products) else own_products.dtype
    pos = np.full((len(anchors), width), -np.inf, dtype)  # cosines
    neg = np.full((len(anchors), len(offered)), -np.inf, dtype)
    pos_logits, neg_logits = pos.copy(), neg.copy()
    for i in range(len(anchors)):
        for m, (kind, row) in enumerate(positives[i]):
            pos[i, m] = own_products[i, row] if kind == "view" else products[i, row]
            pos_logits[i, m] = pos[i, m] / temperature
        for kind, row in candidates[i]:
            neg[i, row] = products[i, row]
            neg_logits[i, row] = neg[i, row] / temperature

    def tilt_by_cost(s):  # w⁺ ∝ e^{−C/ε}, of mean one
        logs = [-ground_cost(temperature * v, cost, kappa) / epsilon for v in s]
        log_total = _log_sum_exp(logs)
        return [v - log_total + math.log(len(s)) for v in logs]

    def rule(logits, positive):
        logits = logits.real if detach_weights else logits
        if weights == "uniform":
            return uniform(logits)
        if weights == "tilted":
            return tilted(logits, beta)
        if weights == "hardest":
            return hardest(logits)
        if weights == "top":
            return top(logits, alpha, top_k)
        if weights == "transported" and not positive:
            return transported(logits, epsilon, cost, kappa, temperature)
        if weights == "transported":  # the exponential of the cost, without potentials
            return _rows(tilt_by_cost, logits)
        raise ValueError(f"weights is {weights!r}")

    return {"objective": objective, "tau_plus": tau_plus, "pos": pos, "neg": neg, "pos_logits": pos_logits,
            "neg_logits": neg_logits, "log_w": rule(neg_logits, False), "log_w_pos": rule(pos_logits, True)}


def contrastive_loss(*views, loss="simclr", weights=None, objective=None, temperature=0.5, tau_plus=None,
                     beta=1.0, alpha=0.1, top_k=None, epsilon=0.3, cost="sqeuclidean", kappa=0.0, margin=0.0,
                     negatives=None, own=None, labels=None, normalize=True, detach_weights=None, reduction="mean"):
    """The loss of two or more (B, D) views: mean, sum, or (A,) one for each anchor.

    In the batch every row of every view is an anchor, in the order of the concatenated views; its positives
    are its sample's other views, its candidates the views of other samples that do not share its label.  With
    `negatives` (K, D) the anchors are the first view, its positives its other views, the candidates the K
    rows, without the one at own[i]; labels may then be (B + K,), the last K those of the bank; with (B,) the
    bank shares none.  Under
    "ppcl" a candidate that shares the anchor's label is a positive.  Weights come from logits = cos/t; `nce`
    and `ppcl` act on logits, `simple` and `triplet` on cosines.  `detach_weights` holds both log w and log w⁺
    constant; None: for `transported` alone.

    Ref: [1] Eq. 2, Fig. 5; [2] Eq. 8, 9; [3] Eq. 8; [4] Eq. 1, 3, 9"""
    part = _parts(views, loss, weights, objective, temperature, tau_plus, beta, alpha, top_k, epsilon, cost, kappa,
                  negatives, own, labels, normalize, detach_weights)
    if part["objective"] in ("nce", "ppcl"):
        function = nce if part["objective"] == "nce" else ppcl
        losses = function(part["pos_logits"], part["neg_logits"], part["log_w"], part["tau_plus"],
                          temperature, part["log_w_pos"])
    elif part["objective"] == "simple":
        losses = simple(part["pos"], part["neg"], part["log_w"])
    elif part["objective"] == "triplet":
        losses = triplet(part["pos"], part["neg"], part["log_w"], margin)
    else:
        raise ValueError(f"objective is {part['objective']!r}")
    if reduction == "none":
        return losses
    return sum(losses) / len(losses) if reduction == "mean" else sum(losses)


def statistics(*views, loss="simclr", weights=None, objective=None, temperature=0.5, tau_plus=None, beta=1.0,
               alpha=0.1, top_k=None, epsilon=0.3, cost="sqeuclidean", kappa=0.0, margin=0.0, negatives=None,
               own=None, labels=None,
               normalize=True, detach_weights=None, reduction="mean"):
    """What a run should watch, as a dict; a mean over nothing is nan.

    clamped: the share of anchors whose floor holds, [1] Fig. 5.  ess: the mean over the anchors that have
    candidates of (Σ_j w_ij)² / (N_i Σ_j w_ij²), 1 for uniform weights, 1/N for one candidate alone.
    positive, negative: the mean cosine of all pairs of anchor and positive, of anchor and candidate."""
    part = _parts(views, loss, weights, objective, temperature, tau_plus, beta, alpha, top_k, epsilon, cost, kappa,
                  negatives, own, labels, normalize, detach_weights)
    anchors = len(part["pos"])
    held = np.zeros(anchors, dtype=bool)
    if part["objective"] in ("nce", "ppcl"):
        held = clamped(part["pos_logits"], part["neg_logits"], part["log_w"], part["tau_plus"], temperature,
                       part["log_w_pos"])
    shares, positive, negative = [], [], []
    for i in range(anchors):
        places = _finite(part["neg"][i])
        w = [math.exp(part["log_w"][i, j].real) for j in places]
        if places:
            shares.append(sum(w) ** 2 / (len(w) * sum(v ** 2 for v in w)))
        positive += [part["pos"][i, m].real for m in _finite(part["pos"][i])]
        negative += [part["neg"][i, j].real for j in places]

    def mean(values):
        return float(sum(values) / len(values)) if values else float("nan")
    return {"clamped": mean([float(v) for v in held]), "ess": mean(shares), "positive": mean(positive),
            "negative": mean(negative)}


# ------------------------------------------------ 5 limits and identities

def exact_coupling(cost_matrix):
    """The plan of min_P Σ_ij C_ij P_ij with uniform marginals, by linear programming: ε → 0 of `sinkhorn`.

    +∞ forbids an entry; rows and columns that have no other get no mass.  Ref: [2] Eq. 5 at ε = 0"""
    cost_matrix = np.asarray(cost_matrix, dtype=np.float64)
    entries = [(i, j) for i in range(cost_matrix.shape[0]) for j in range(cost_matrix.shape[1])
               if cost_matrix[i, j] < np.inf]
    rows, columns = sorted({i for i, _ in entries}), sorted({j for _, j in entries})
    equations, masses = [], []
    for row in rows:
        equations.append([1.0 if i == row else 0.0 for i, _ in entries])
        masses.append(1 / len(rows))
    for column in columns:
        equations.append([1.0 if j == column else 0.0 for _, j in entries])
        masses.append(1 / len(columns))
    result = linprog([cost_matrix[i, j] for i, j in entries], A_eq=equations, b_eq=masses, bounds=(0, None),
                     method="highs")
    if result.status != 0:
        raise ValueError(f"no coupling: {result.message}")
    plan = np.zeros(cost_matrix.shape)
    for (i, j), mass in zip(entries, result.x):
        plan[i, j] = mass
    return plan


def assignment_cost(cost_matrix):
    """min over permutations π of (1/n) Σ_i C_{i π(i)}, the cost of `exact_coupling` of a square matrix.

    A linear program over doubly stochastic matrices has a permutation among its solutions (Birkhoff)."""
    cost_matrix = np.asarray(cost_matrix, dtype=np.float64)
    rows, columns = linear_sum_assignment(cost_matrix)
    return sum(cost_matrix[i, j] for i, j in zip(rows, columns)) / len(cost_matrix)


def product_coupling(allowed):
    """The limit ε → ∞ of the coupling: P_ij = 1/(A N), the product of the marginals.

    Where entries are forbidden the product does not avoid them; the limit is then the coupling of largest
    entropy on the allowed ones.  Ref: [2] Eq. 6 and what follows"""
    allowed = np.asarray(allowed, dtype=bool)
    if allowed.all():
        return np.full(allowed.shape, 1 / allowed.size)
    log_mask = np.full(allowed.shape, -np.inf)
    log_mask[allowed] = 0.0
    return sinkhorn(log_mask)[0]


def nce_cold(pos, neg):
    """lim_{τ→0⁺} τ · nce(pos/τ, neg/τ) = max(0, max_j s_ij − s_i⁺), cosines (A, 1) and (A, N) → (A,).

    Half of `triplet` on the nearest candidate at margin 0.  Ref: [4] Eq. 6"""
    pos, neg = _lists(pos), _lists(neg)
    out = []
    for i in range(len(pos)):
        gaps = [neg[i][j] - pos[i][0] for j in _finite(neg[i])]
        largest = max(gaps, key=lambda v: v.real, default=0.0)
        out.append(largest if largest.real > 0 else 0.0)
    return np.array(out)


def nce_hot(pos, neg, temperature):
    """log(1 + N) − (N/(N+1)) s⁺/τ + (1/(N+1)) Σ_j s_j/τ, nce up to O(1/τ²), cosines (A, 1), (A, N).

    N of the paper counts the positive too and is N + 1 here.  Ref: [4] Eq. 7"""
    pos, neg = _lists(pos), _lists(neg)
    out = []
    for i in range(len(pos)):
        places = _finite(neg[i])
        count, total = len(places), 0.0
        for j in places:
            total = total + neg[i][j]
        out.append(_log(1 + count) - count / (count + 1) * pos[i][0] / temperature
                   + total / (count + 1) / temperature)
    return np.array(out)


def worst_case(pos, neg, Q):
    """L* of one anchor: −log( e^{p} / (e^{p} + Q e^{max_j s_j}) ), logits (A, 1) and (A, N) → (A,).

    The limit β → ∞ of nce on `tilted` weights, with Q the sum of the weights.  Ref: [1] Prop. 1, App. A.1"""
    pos, neg = _lists(pos), _lists(neg)
    out = []
    for i in range(len(pos)):
        largest = max([neg[i][j] for j in _finite(neg[i])], key=lambda v: v.real, default=-np.inf)
        out.append(_log_one_plus_ratio(_log(Q) + largest, pos[i][0]))
    return np.array(out)


def bad_probability(logits_row, beta, eps):
    """q_β{ s < M − ε }, M = max_j s_j, q_β(j) = e^{β s_j} / Σ_k e^{β s_k}.  Ref: [1] App. A.1"""
    s = [v for v in _lists(logits_row) if v.real > -np.inf]
    largest = max(v.real for v in s)
    log_partition = _log_sum_exp([beta * v for v in s])
    total = 0.0
    for v in s:
        if v.real < largest - eps:
            total = total + _exp(beta * v - log_partition)
    return total


def bad_probability_bound(logits_row, beta, eps):
    """e^{−β ε/2} / ρ_ε, ρ_ε the share of logits ≥ M − ε/2: at least `bad_probability`.  Ref: [1] App. A.1"""
    s = [v.real for v in _lists(logits_row) if v.real > -np.inf]
    largest = max(s)
    share = sum(1 for v in s if v >= largest - eps / 2) / len(s)
    return _exp(-beta * eps / 2) / share


def worst_case_bound(logits_row, beta, eps):
    """E_{q_β}[M − s] ≤ ε + R P_{q_β}(s < M − ε) ≤ ε + R e^{−β ε/2}/ρ_ε, R = M − min_j s_j.

    Returns the three of them.  The paper has 2 for R, which holds for cosines; on a sphere of radius 1/t the
    range goes up to 2/t².  Ref: [1] App. A.1"""
    s = [v.real for v in _lists(logits_row) if v.real > -np.inf]
    largest, spread = max(s), max(s) - min(s)
    log_partition = _log_sum_exp([beta * v for v in s])
    gap = 0.0
    for v in s:
        gap += _exp(beta * v - log_partition) * (largest - v)
    return (gap, eps + spread * bad_probability(logits_row, beta, eps),
            eps + spread * bad_probability_bound(logits_row, beta, eps))


def _zeros_like(rows):
    return [[0.0] * len(row) for row in rows]


def softmax_gradients(pos, neg, temperature):
    """∂L/∂s⁺ = −(1/τ) Σ_j P_ij (A,) and ∂L/∂s_j = P_ij/τ (A, N), of nce at M = 1 on cosines (A, 1), (A, N).

    P_ij = e^{s_ij/τ} / (Σ_k e^{s_ik/τ} + e^{s_i⁺/τ}).  Ref: [4] Eq. 2, 4"""
    pos, neg = _lists(pos), _lists(neg)
    by_pos, by_neg = [], _zeros_like(neg)
    for i in range(len(pos)):
        places = _finite(neg[i])
        log_total = _log_sum_exp([neg[i][j] / temperature for j in places] + [pos[i][0] / temperature])
        total = 0.0
        for j in places:
            probability = _exp(neg[i][j] / temperature - log_total)
            by_neg[i][j] = probability / temperature
            total = total + probability
        by_pos.append(-total / temperature)
    return np.array(by_pos), np.array(by_neg)


def gradient_ratio(neg, temperature):
    """r_ij = |∂L/∂s_ij| / |∂L/∂s_i⁺| = e^{s_ij/τ} / Σ_k e^{s_ik/τ}, cosines (A, N).  Ref: [4] Eq. 5"""
    return hard_gradient_ratio(neg, temperature, 1)


def hard_gradient_ratio(neg, temperature, alpha):
    """r_ij = e^{s_ij/τ} / Σ_{s_ik ≥ s_α} e^{s_ik/τ} for s_ij ≥ s_α, 0 below, cosines.  Ref: [4] Eq. 8"""
    neg = _lists(neg)
    kept = top(neg, alpha)
    out = _zeros_like(neg)
    for i in range(len(neg)):
        places = _finite(kept[i])
        log_total = _log_sum_exp([neg[i][j] / temperature for j in places])
        for j in places:
            out[i][j] = _exp(neg[i][j] / temperature - log_total)
    return np.array(out)


def _squared_distance(x, y):
    total = 0.0
    for a, b in zip(x, y):
        total = total + (a - b) * (a - b)
    return total


def _product(x, y):
    total = 0.0
    for a, b in zip(x, y):
        total = total + a * b
    return total


def uniformity(z, t=2.0):
    """log of the mean of e^{−t‖x − y‖²} over ordered pairs of distinct rows.  Ref: [5]; [4] Eq. 10"""
    z = _lists(z)
    pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
    return _log_sum_exp([-t * _squared_distance(z[i], z[j]) for i, j in pairs]) - _log(len(pairs))


def alignment(x, y):
    """The mean of ‖x_i − y_i‖² over rows.  Ref: [5], exponent 2"""
    x, y = _lists(x), _lists(y)
    total = 0.0
    for i in range(len(x)):
        total = total + _squared_distance(x[i], y[i])
    return total / len(x)


def tolerance(z, labels):
    """The mean of x·y over ordered pairs of distinct rows that share a label; nan where there is none.

    As printed, the mean is over all pairs with an indicator inside.  With ten equal classes it could not pass
    0.1, and Table 1 of the paper has values up to 0.61: its mean is over the pairs of one label.
    Ref: [4] Eq. 11"""
    z = _lists(z)
    total, pairs = 0.0, 0
    for i in range(len(z)):
        for j in range(len(z)):
            if i != j and labels[i] == labels[j]:
                total = total + _product(z[i], z[j])
                pairs += 1
    return total / pairs if pairs else float("nan")


def neighbours(z, k=None):
    """The k largest z_i·z_j of every row over j ≠ i, in descending order, and their j: (n, k), (n, k)."""
    z = _lists(z)
    cosines, indices = [], []
    for i in range(len(z)):
        others = sorted(((_product(z[i], z[j]), j) for j in range(len(z)) if j != i), key=lambda pair: -pair[0])
        others = others if k is None else others[:k]
        cosines.append([value for value, _ in others])
        indices.append([j for _, j in others])
    return np.array(cosines), np.array(indices)


def local_separation(z, positives, k=10):
    """s_ii = z_i·z_i⁺ (n,), and the k largest s_ij (n, k).  Ref: [4] Fig. 8"""
    nearest = neighbours(z, k)[0]
    z, positives = _lists(z), _lists(positives)
    return np.array([_product(z[i], positives[i]) for i in range(len(z))]), nearest


def same_class_by_rank(z, labels):
    """For each rank, the number of rows whose neighbour of that rank has their label, (n − 1,).  Ref: [2] Fig. 5"""
    indices = neighbours(z)[1]
    counts = [0] * (len(z) - 1)
    for i in range(len(z)):
        for rank in range(len(z) - 1):
            counts[rank] += int(labels[indices[i][rank]] == labels[i])
    return np.array(counts)


def cosine_histograms(z, labels, bins=50):
    """Edges, and the densities over [−1, 1] of z_i·z_j for i < j of one label, and of two.  Ref: [1] App. B"""
    z = _lists(z)
    counts = [[0] * bins, [0] * bins]
    for i in range(len(z)):
        for j in range(i + 1, len(z)):
            place = min(int((_product(z[i], z[j]) + 1) / 2 * bins), bins - 1)  # the last bin holds 1 itself
            counts[0 if labels[i] == labels[j] else 1][place] += 1
    return (np.linspace(-1, 1, bins + 1),
            *(np.array([c / sum(row) * bins / 2 if sum(row) else np.nan for c in row]) for row in counts))


def bank_update(rows, index, z, momentum):
    """row_i ← (m row_i + (1 − m) z̄_i) / ‖·‖, z̄_i the mean of the embeddings that came for row i.  Ref: [4] 5.1"""
    rows, z = _lists(rows), _lists(unit(z))
    out = [list(row) for row in rows]
    for i in range(len(rows)):
        mine = [z[b] for b in range(len(index)) if index[b] == i]
        if mine:
            means = [sum(row[d] for row in mine) / len(mine) for d in range(len(rows[i]))]
            out[i] = [momentum * rows[i][d] + (1 - momentum) * means[d] for d in range(len(means))]
            out[i] = unit([out[i]])[0].tolist()
    return np.array(out)


def _negatives_of(negatives, i):
    """The (K, D) sample of q(· ; x_i): one for all anchors, or (A, K, D) one for each."""
    return negatives[i] if np.ndim(negatives) == 3 else negatives


def l_infinity(x, positives, negatives):
    """L_∞ = E[ −log( e^{f·f⁺} / E_q e^{f·f⁻} ) ], rows on a sphere of radius 1/t.

    (A, D), (A, D) and (K, D) or (A, K, D); it is l_align + l_unif − 1/t².  Ref: [1] Eq. 4 and 6"""
    x, positives, negatives = _lists(x), _lists(positives), _lists(negatives)
    total = 0.0
    for i in range(len(x)):
        sample = _negatives_of(negatives, i)
        log_mean = _log_sum_exp([_product(x[i], y) for y in sample]) - _log(len(sample))
        total = total - (_product(x[i], positives[i]) - log_mean)
    return total / len(x)


def l_align(x, positives):
    """E ‖f − f⁺‖² / 2 = 1/t² − E f·f⁺.  Ref: [1] App. A.2, Eq. 7"""
    return alignment(x, positives) / 2


def l_unif(x, negatives):
    """E_x log E_q e^{f·f⁻}.  Ref: [1] App. A.2"""
    x, negatives = _lists(x), _lists(negatives)
    total = 0.0
    for i in range(len(x)):
        sample = _negatives_of(negatives, i)
        total = total + _log_sum_exp([_product(x[i], y) for y in sample]) - _log(len(sample))
    return total / len(x)


def l_unif_star(x, negatives):
    """sup_q l_unif = E_x max f·f⁻ = 1/t² − E_x min ‖f − f⁻‖²/2.  Ref: [1] App. A.2, Eq. 8"""
    x, negatives = _lists(x), _lists(negatives)
    total = 0.0
    for i in range(len(x)):
        total = total + max([_product(x[i], y) for y in _negatives_of(negatives, i)], key=lambda v: v.real)
    return total / len(x)


def nearest_distance(x, negatives):
    """E_x min ‖f − f⁻‖².  (Eq. 8 prints x⁺ under this infimum; it runs over x⁻.)  Ref: [1] Eq. 8"""
    x, negatives = _lists(x), _lists(negatives)
    total = 0.0
    for i in range(len(x)):
        total = total + min([_squared_distance(x[i], y) for y in _negatives_of(negatives, i)],
                            key=lambda v: v.real)
    return total / len(x)


def ball_packing(centres, shares):
    """Σ_c ρ(c) min_{c' ≠ c} ‖v_c − v_c'‖², (C, D) and (C,): what the worst case maximises.  Ref: [1] Eq. 5"""
    centres = _lists(centres)
    total = 0.0
    for c in range(len(centres)):
        distances = [_squared_distance(centres[c], centres[d]) for d in range(len(centres)) if d != c]
        total = total + shares[c] * min(distances, key=lambda v: v.real)
    return total


def annealed_beta(progress, beta, changes):
    """β (1 − ⌊ℓ · progress⌋ / ℓ): β comes down to zero in ℓ equal steps as progress goes from 0 to 1.

    Ref: [1] App. C"""
    return beta * (1 - math.floor(changes * progress) / changes)


# ------------------------------------------------ 6 the game

def ppcl_sets(raw, latents):
    """A(i) = I \\ {i} and P(i) for every view i of a multiviewed batch, as lists.

    raw[i]: the raw sample that view i is of; latents[i]: the latent that this one was generated from, None for
    a real one.  P(i) = {p in A(i): z_p = z_i} for a generated i, {j(i)}, its sample's other view, for a real one.

    Ref: [3] Eq. 8"""
    views = range(len(raw))
    others, positives = [], []
    for i in views:
        others.append([a for a in views if a != i])
        if latents[i] is None:
            positives.append([a for a in others[i] if raw[a] == raw[i]])
        else:
            positives.append([a for a in others[i] if latents[a] is not None and latents[a] == latents[i]])
    return others, positives


def ppcl_batch(v, raw, latents, temperature):
    """(1/|I|) Σ_{i in I} −1/|P(i)| Σ_{p in P(i)} log( e^{v_i·v_p/τ} / Σ_{a in A(i)} e^{v_i·v_a/τ} ), v (4N, D).

    v_i·v_a is a cosine.  The paper has the sum over i, this file the mean; else as printed.  Ref: [3] Eq. 8"""
    others, positives = ppcl_sets(raw, latents)
    v = _lists(unit(v))
    total = 0.0
    for i in range(len(v)):
        log_total = _log_sum_exp([_product(v[i], v[a]) / temperature for a in others[i]])
        inner = 0.0
        for p in positives[i]:
            inner = inner + (_product(v[i], v[p]) / temperature - log_total)
        total = total + -1 / len(positives[i]) * inner
    return total / len(v)


def _hinge(x):
    """f_D(x) = max(0, 1 + x).  Ref: [3] Eq. 5"""
    return 1 + x if (1 + x).real > 0 else 0.0


def hinge_discriminator(real, fake):
    """L_D = E_x f_D(−D(x)) + E_z f_D(D(G(z))), from the scores D(x) and D(G(z)).  Ref: [3] Eq. 5"""
    real, fake = _lists(real), _lists(fake)
    on_real = on_fake = 0.0
    for score in real:
        on_real = on_real + _hinge(-score)
    for score in fake:
        on_fake = on_fake + _hinge(score)
    return on_real / len(real) + on_fake / len(fake)


def hinge_generator(fake):
    """L_G = E_z f_G(D(G(z))), f_G(x) = −x.  Ref: [3] Eq. 5, which does not print f_G"""
    fake = _lists(fake)
    total = 0.0
    for score in fake:
        total = total + -score
    return total / len(fake)


def ema(w_ema, w, m):
    """w_ema ← m w_ema + (1 − m) w, entry by entry.  Ref: [3] Eq. 7"""
    w_ema, w = _double(w_ema), _double(w)
    out = np.zeros(w.shape)
    for place in np.ndindex(*w.shape):
        out[place] = m * w_ema[place] + (1 - m) * w[place]
    return out


def diversity(images, real):
    """Σ_i min_{j ≠ i} ‖x_i − x_j‖ over the images, divided by the same of as many real ones; not in the papers."""
    def nearest(x):
        x = _lists(np.reshape(x, (len(x), -1)))
        total = 0.0
        for i in range(len(x)):
            total += min(math.sqrt(_squared_distance(x[i], x[j])) for j in range(len(x)) if j != i)
        return total / len(x)
    return nearest(images) / nearest(real)


def perturbed(x, slope, bound):
    """min(1, max(0, x_k + bound · sign(slope_k))) for each pixel, slope = ∂ℓ/∂x.  Ref: after [10]"""
    x, slope = _double(x), _double(slope)
    out = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        sign = 1 if slope[place] > 0 else -1 if slope[place] < 0 else 0
        out[place] = min(1.0, max(0.0, x[place] + bound * sign))
    return out


# ------------------------------------------------ 7 gradients

def gradient(function, x, step=1e-30):
    """∂f/∂x_k = Im f(x + i h e_k) / h for each entry of x: the complex step, exact to rounding."""
    x = np.asarray(x, dtype=np.float64)
    out = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        moved = x.astype(np.complex128)
        moved[place] = complex(x[place], step)
        out[place] = np.imag(function(moved)) / step
    return out


def central_difference(function, x, step=1e-6):
    """∂f/∂x_k ≈ (f(x + h e_k) − f(x − h e_k)) / 2h for each entry of x, off by O(h²) and by rounding / h."""
    x = np.asarray(x, dtype=np.float64)
    out = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        above, below = x.copy(), x.copy()
        above[place] += step
        below[place] -= step
        out[place] = (function(above) - function(below)) / (2 * step)
    return out
