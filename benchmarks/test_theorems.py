"""Tests of what the papers prove, and of what THEOREMS.md adds to it.

`python -m pytest benchmarks` runs them. References in brackets are those of ../hardneg.py.
"""

import math
from functools import partial

import debias
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.random import default_rng as rng
from scipy.optimize import brentq, minimize
from scipy.special import rel_entr, softmax
from scipy.stats import norm

import hardneg
import reference_numpy as oracle
from hardneg import contrastive_loss
from test_hardneg import (
    MATRICES,
    PLANS,
    SEEDS,
    TWO_VIEWS,
    at_least,
    close,
    couple,
    exact_coupling,
    feasible,
    infinite,
    judge,
    log_negatives,
    log_weights,
    masked,
    masked_logits,
    normal,
    numpy,
    ours,
    same,
    similarities,
    with_slope,
)
from training import test_pages
from training.readouts import tolerance

pytestmark = pytest.mark.filterwarnings("ignore:Sinkhorn|Debiasing|None of|The first row")
INF = math.inf
SQUARES = {**SEEDS, "n": st.integers(2, 6)}
FEW = {**SEEDS, "tau_plus": st.sampled_from([0.05, 0.1, 0.3]), "t": st.floats(0.3, 2)}


# ---- Helpers
def ball_packing(centres, shares):
    """Compute Σ_c ρ(c) min_{c' ≠ c} ‖v_c − v_c'‖², centres v (C, D), shares ρ (C,). The encoder
    that minimises the worst-case loss maximises it. Ref: [1] Theorem 2, Eq. 5"""
    squares = ((centres[:, None] - centres) ** 2).sum(2) + np.diag([INF] * len(centres))
    return shares @ squares.min(1)


# a standard normal distribution: a sum over these points is exact to e^{−2π²/0.5²}, also if tilted
GRID = np.arange(-16, 16.25, 0.5)
LOG_SHARES = torch.tensor(-(GRID**2) / 2).log_softmax(0)


def shared(rule):
    """Make a rule for candidates on the grid: its weights, times the shares, have the sum 1."""
    return lambda logits: (rule(logits) + LOG_SHARES).log_softmax(-1)


def rows_at(cosines):
    """Make unit rows (…, 2) that have these cosines with (1, 0)."""
    return torch.tensor(np.stack([cosines, np.sqrt(1 - np.square(cosines))], -1))


def derivatives(function, orders):
    """Compute the derivatives of a function of one number at 0, up to this order."""
    u = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value, found = function(u), []
    for _ in range(orders):
        (value,) = torch.autograd.grad(value, u, create_graph=True)
        found.append(float(value.detach()))
    return found


def hardness(x, y, epsilon=None, **options):
    """Compute E_P[cos(x, x⁻)] from hardneg's difference of means. Negatives are uniform if epsilon
    is None."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    weights = {} if epsilon is None else {"weights": "transported", "epsilon": epsilon}
    losses = contrastive_loss(x, y, loss="simple", reduction="none", **weights, **options)
    aligned = (hardneg.unit(x) * hardneg.unit(y)).sum(1)
    return float((losses + (aligned if "negatives" in options else aligned.repeat(2))).mean())


def check_packing(counts, d, most, spread):
    """Minimise L*_∞ over points on the sphere, counts[c] of class c, and return the class centres.
    β grows first, as L*_∞ has kinks; then the steps on L*_∞ shrink. The function asserts a packing
    of mean `most`."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    other = torch.cat([torch.arange(n).roll(1) + sum(counts[:c]) for c, n in enumerate(counts)])
    z = torch.tensor(normal(0, len(labels), d), requires_grad=True)

    def loss(weights, beta=1.0):
        options = {"loss": "simple", "labels": labels, "temperature": 1, "block_size": 0}
        return contrastive_loss(z, z[other], weights=weights, beta=beta, **options)

    optimizer = torch.optim.Adam([z], lr=0.05)
    for step in range(300):
        optimizer.zero_grad()
        loss("tilted", beta=2 * 100 ** (step / 300)).backward()
        optimizer.step()
    for step in range(200):
        z.data = hardneg.unit(z.data)
        (gradient,) = torch.autograd.grad(loss("hardest"), z)
        z.data -= 0.03 * 1e-3 ** (step / 200) * len(labels) * gradient
    classes = [oracle.unit(numpy(z)[labels == c]) for c in range(len(counts))]
    assert max(np.ptp(rows, axis=0).max() for rows in classes) < spread
    centres = oracle.unit(np.array([rows.mean(0) for rows in classes]))
    assert (1 - 1e-3) * most <= ball_packing(centres, np.array(counts) / sum(counts)) <= most + 1e-9
    close(loss("hardest"), -most / 2, 1e-3)
    return centres


def exact_by_loops(pos, neg, log_w_pos, log_w, tau_plus, t):
    """Compute `debias.exact` of one anchor, and add the log of the sum of its weights; −∞ without
    candidates. It follows from q⁻ ∝ w p⁻ and p = τ⁺ p⁺ + (1 − τ⁺) p⁻. Ref: [1], q_β⁻, defined
    above Eq. 2"""
    if not neg:
        return -INF
    exp = oracle._exp

    def means(logits, log_weights):
        both = list(zip(logits, log_weights, strict=True))
        values = [(exp(w + s), exp(w), exp(s)) for s, w in both]
        return [sum(some) / len(both) for some in zip(*values, strict=True)] or [0.0] * 3

    of_all, of_class = means(neg, log_w), means(pos, log_w_pos)
    above, below, plain = (x - tau_plus * y for x, y in zip(of_all, of_class, strict=True))
    least, most = plain / (1 - tau_plus), exp(max(neg, key=np.real))
    least = max(least, math.exp(-1 / t), key=np.real)
    mean = least
    if above.real > 0 and below.real > 0:
        mean = max(min(above / below, most, key=np.real), least, key=np.real)
    return oracle._log(len(neg) * of_all[1] * mean)


class TestTheorems:
    """What the papers prove holds here, and what none says of temperature and τ⁺.
    A statement that does not hold as printed has a test that shows where it fails."""

    # cosines with the own class and with the other
    ATOMS = np.array([0.9]), np.array([0.2])
    PLACES = (np.arange(2000) + 0.5) / 2000
    NORMALS = norm.ppf(PLACES, 0.6, 0.2).clip(-1, 1), norm.ppf(PLACES, 0, 0.3).clip(-1, 1)
    SUMS = [(ATOMS, 0, 1.492, 1.492), (ATOMS, 1, 1.492, 2.558), (ATOMS, 2, 1.492, 4.258)]
    SUMS += [(ATOMS, 16, 1.492, 6.050)]
    SUMS += [(NORMALS, 0, 1.197, 1.197), (NORMALS, 1, 1.708, 2.106)]
    SUMS += [(NORMALS, 2, 2.401, 3.265), (NORMALS, 4, 4.139, 5.147)]

    @pytest.mark.parametrize("classes, beta, truth, published", SUMS)
    def test_eq_2_departs_from_its_definition(self, classes, beta, truth, published):
        """[1] Prop. 1 is of q_β⁻: on two atoms its mean stays e^{0.4}; that of Eq. 2 does not."""
        tau_plus, t = 0.1, 0.5
        own, other = (cosines / t for cosines in classes)
        candidates = np.concatenate([own, np.tile(other, 9)])  # p = 0.1 p⁺ + 0.9 p⁻
        defined = np.exp((1 + beta) * other).sum() / np.exp(beta * other).sum()
        close(defined, truth, 5e-4)
        pos, neg = torch.tensor(own[None]), torch.tensor(candidates[None])
        given = pos, neg, (beta * pos).exp(), (beta * neg).exp(), tau_plus, t
        exact_digits = 1e-5 if beta == 16 else 1e-11  # at β = 16 ten digits cancel
        close(debias.exact(*given)[0].exp(), [defined], exact_digits)
        eq_2 = debias.eq_2(*given)[0]
        close(eq_2.exp(), [published], 5e-4)
        log_w = log_weights("tilted", neg, beta=beta)
        found = log_negatives(pos, neg, log_w, tau_plus, t, weights="tilted", beta=beta)
        close(found - math.log(len(candidates)), eq_2, 1e-11)

    @pytest.mark.parametrize("classes", [2, 5])
    @given(
        **TWO_VIEWS,
        t=st.floats(0.1, 2),
        beta=st.floats(0, 1000),
        more=st.floats(0, 10),
        eps=st.floats(1e-3, 2),
    )
    def test_tilted_approaches_the_worst_case(self, classes, seed, b, t, beta, more, eps):
        """Prop. 1: 0 ≤ L* − L(q_β) ≤ E_q[M − s] ≤ ε + R P_q(s < M − ε) ≤ ε + R e^{−βε/2}/ρ_ε.
        L(q_β) rises with β. The paper has 2 for R, the range of cosines. Its logits, cos/t²,
        have the range 2/t²."""
        (x, y), labels = normal(seed, 2, b, 3), np.arange(b) % classes
        options = {"loss": "hcl", "tau_plus": 0, "temperature": t, "labels": labels}
        views = torch.tensor(x), torch.tensor(y)
        losses = partial(contrastive_loss, *views, reduction="none", **options)
        pos, neg = (cosines / t for cosines in similarities(x, y, labels))
        worst, tilted = numpy(losses(weights="hardest")), numpy(losses(beta=beta))
        assert (numpy(losses(beta=beta + more)) >= tilted - 1e-10).all()
        counts = (neg > -INF).sum(1)
        close(worst, np.logaddexp(0, np.log(counts) + neg.max(1) - pos[:, 0]), 1e-10)
        weights = numpy(log_weights("tilted", torch.tensor(neg), beta=beta).exp())
        for i in range(2 * b):
            allowed = neg[i] > -INF
            logits = neg[i, allowed]
            q = weights[i, allowed] / counts[i]
            close(q, softmax(beta * logits), 1e-10)
            below = logits.max() - logits
            drop = q @ below
            share = (below <= eps / 2).mean()
            near = eps + below.max() * q[below > eps].sum()
            far = eps + below.max() * math.exp(-beta * eps / 2) / share
            ordered = np.array([0, worst[i] - tilted[i], drop, near, far])
            assert (np.diff(ordered) >= -1e-10).all()
            assert beta * drop <= math.log(counts[i]) + 1e-9  # E_q[M − s] ≤ log N / β

    @given(
        **SQUARES,
        q=st.floats(0.5, 20),
        t=st.floats(0.2, 2),
        margin=st.floats(0, 1),
        epsilon=st.sampled_from([0.02, 0.1, 0.5, 2.0]),
    )
    def test_constant_encoder_is_optimal(self, seed, n, q, t, margin, epsilon):
        """For convex non-decreasing ψ the worst coupling costs at least ψ(0). A constant encoder
        has this cost. For `simple` the identity is the worst, of the cost 1 − E x·x⁺, and the
        entropic coupling costs at most ε log n less."""

        def worst(z, y, objective):  # one negative at a time
            pos = (z * y).sum(1).repeat_interleave(n)[:, None]
            cost = objective(pos, (z @ z.T).reshape(-1, 1), torch.zeros(n * n, 1, dtype=z.dtype))
            cost = numpy(cost.reshape(n, n))
            return (exact_coupling(-cost) * cost).sum()

        def nce(pos, neg, log_w):
            return hardneg.nce(pos / t, hardneg.log_sum(neg / t, log_w + math.log(q)))

        z, y = hardneg.unit(torch.tensor(normal(seed, 2, n, 3)))
        constant = z[:1].expand(n, 3)
        hinge = partial(hardneg.triplet, margin=margin)
        for objective, least in ((hardneg.simple, 0.0), (nce, math.log(1 + q)), (hinge, margin)):
            assert worst(z, y, objective) >= least - 1e-9
            close(worst(constant, constant, objective), least, 1e-9)
        aligned = float((z * y).sum(1).mean())
        most = worst(z, y, hardneg.simple)
        close(most, 1 - aligned, 1e-9)
        value = hardness(z, y, epsilon, negatives=z) - aligned
        assert most - epsilon * math.log(n) - 1e-4 <= value <= most + 1e-9

    @given(**SQUARES, t=st.floats(0.2, 2), epsilon=st.sampled_from([0.02, 0.1, 0.5]))
    def test_constant_encoder_is_not_optimal_with_own_rows_masked(self, seed, n, t, epsilon):
        """Unmasked, the loss of [2] is at least log(1 + N n^{−ε/t}), by Jensen. Masked, a simplex
        wins."""
        x, y = torch.tensor(normal(seed, 2, n, 3))
        options = {"loss": "ot", "temperature": t, "epsilon": epsilon}
        value = contrastive_loss(x, y, negatives=x, **options)
        assert value >= math.log(1 + n * n ** (-epsilon / t)) - 1e-4
        constant, simplex = x[:1].expand(n, 3), torch.eye(n, dtype=x.dtype) - 1 / n
        unmasked = contrastive_loss(constant, constant, negatives=constant, **options)
        close(unmasked, math.log(1 + n), 1e-12)
        masked = float(contrastive_loss(simplex, simplex, **options))
        close(masked, math.log(1 + (2 * n - 2) * math.exp(-n / (n - 1) / t)), 1e-9)
        assert masked < contrastive_loss(constant, constant, **options)

    @given(**SEEDS, n=st.integers(2, 6), epsilon=st.floats(0.2, 5))
    def test_masked_coupling_may_be_easier_than_the_unmasked_product(self, seed, n, epsilon):
        """Two cases contradict the property as printed. They are two points, with E s = s₁₂, and a
        simplex, with E s = −1/(n − 1)."""
        for x in (normal(seed, 2, 3), np.eye(n) - 1 / n):
            cosines = oracle.unit(x) @ oracle.unit(x).T
            close(hardness(x, x, epsilon), cosines[0, 1], 1e-9)
            assert hardness(x, x, epsilon) < cosines.mean()

    @given(**SEEDS, b=st.integers(3, 5), k=st.integers(2, 6))
    def test_hardness_decreases_with_epsilon(self, seed, b, k):
        """It decreases to that of uniform negatives, in a batch and with a bank. In a batch they
        are the coupling of largest entropy."""
        (x, y), bank = normal(seed, 2, b, 3), torch.tensor(normal(seed + 1, k, 3))
        cosines = similarities(x, y)[1]
        even = oracle.sinkhorn(np.where(cosines > -INF, 0.0, -INF))[0]
        close((even * np.where(cosines > -INF, cosines, 0)).sum(), hardness(x, y), 1e-9)
        for options in ({}, {"negatives": bank}):
            values = [hardness(x, y, epsilon, **options) for epsilon in (0.2, 0.4, 1, 3, 10, 1e5)]
            assert (np.diff(values) < 1e-10).all() and values[0] > values[-1]
            close(values[-1], hardness(x, y, **options), 1e-4)

    # antipodes; simplices, C ≤ d + 1, of 2C/(C − 1)
    PACKINGS = [([2] * 2, 3, 4), ([2] * 3, 2, 3), ([3] * 4, 3, 8 / 3), ([2] * 5, 4, 5 / 2)]
    # a square pyramid of height 9/8, where Tammes has 2; an octahedron
    PACKINGS += [([2] * 5, 3, 81 / 40), ([2] * 6, 3, 2)]
    # a square antiprism; an icosahedron
    PACKINGS += [([2] * 8, 3, (16 - 4 * math.sqrt(2)) / 7), ([2] * 12, 3, 2 - 2 / math.sqrt(5))]

    @pytest.mark.parametrize("counts, d, most", PACKINGS)
    def test_minimum_is_a_ball_packing(self, counts, d, most):
        """Gradient descent collapses each class. It maximises the mean distance of a class to the
        nearest other one."""
        check_packing(counts, d, most, spread=1e-3)

    @pytest.mark.parametrize("counts", [(2, 1, 1), (14, 3, 3), (6, 1, 1), (9, 1, 1)])
    def test_heavy_class_pushes_the_others_together(self, counts):
        """Of three classes one has share ρ. For the angle φ of the others to its antipode
        cos φ = ρ / (4 − 4ρ)."""
        heavy = counts[0] / sum(counts)
        cosine = min(1, max(1 / 2, heavy / (4 - 4 * heavy)))
        most = heavy * (2 + 2 * cosine) + (1 - heavy) * min(2 + 2 * cosine, 4 - 4 * cosine**2)
        centres = check_packing(counts, 3, most, spread=3e-3)
        close(-centres[1:] @ centres[0], np.full(2, cosine), 0.02)  # the mean is flat there

    @given(**PLANS)
    def test_coupling_minimises_the_regularised_cost(self, seed, a, n, epsilon, share):
        """[2] Lemma 3: E c + ε KL(P ‖ p p) of another P exceeds that of P* by ε KL(P ‖ P*)."""
        cosines = masked_logits(seed, a, n, share) / 2
        allowed = cosines > -INF
        assume(allowed.any(0).all() and feasible(allowed))
        cost = oracle.ground_cost(cosines)
        kernel = -hardneg.COSTS["sqeuclidean"](torch.tensor(cosines)) / epsilon
        f, g, _ = map(numpy, couple(kernel))
        u, v = epsilon * (f + math.log(a)), epsilon * (g + math.log(n))
        product = np.full((a, n), 1 / (a * n))
        plan = product * np.exp((u[:, None] + v - cost) / epsilon)

        def objective(p):
            return (p * np.where(allowed, cost, 0)).sum() + epsilon * rel_entr(p, product).sum()

        drawn = np.where(allowed, rng(seed).uniform(0, 3, allowed.shape), INF)
        extreme = exact_coupling(drawn)
        for mixed in (extreme, 0.9 * plan + 0.1 * extreme, oracle.sinkhorn(-drawn)[0]):
            excess = objective(mixed) - objective(plan)
            assert excess >= -1e-10
            close(excess, epsilon * rel_entr(mixed, plan).sum(), 1e-9)
        close(objective(plan), u.mean() + v.mean(), 1e-9)  # the dual value: the duality gap is 0
        log_w = log_weights("transported", torch.tensor(cosines), epsilon=epsilon)
        weights = numpy(log_w.exp())
        close(weights / allowed.sum(1)[:, None] / a, plan, 1e-10)

    @given(**MATRICES, t=st.floats(0.1, 0.5), epsilon=st.floats(0.05, 5))
    def test_without_marginals_the_minimiser_is_tilted(self, seed, a, n, t, epsilon):
        """E c + ε KL(q ‖ p) of another q exceeds that of q_β by ε KL(q ‖ q_β), β = t/ε."""
        logits = torch.tensor(masked_logits(seed, a, n))
        log_w = log_weights("tilted", logits, beta=t / epsilon)
        for row, weights in zip(numpy(logits), numpy(log_w.exp()), strict=True):
            allowed = row > -INF
            count = allowed.sum()
            cost = oracle.ground_cost(t * row[allowed])
            best, even = weights[allowed] / count, np.full(count, 1 / count)
            q = rng(seed).dirichlet(even)
            relative_entropy = (rel_entr(q, even) - rel_entr(best, even)).sum()
            excess = (q - best) @ cost + epsilon * relative_entropy
            close(excess, epsilon * rel_entr(q, best).sum(), 1e-9)

    @pytest.mark.parametrize("weights", ["uniform", "tilted", "transported", "hardest"])
    @given(**TWO_VIEWS, t=st.floats(0.3, 2), beta=st.floats(0, 3), epsilon=st.floats(0.3, 3))
    def test_debiasing_by_one_candidate_is_decoupling(self, weights, seed, b, t, beta, epsilon):
        """nce at τ⁺ = 1/(N + 1) = decoupled at τ⁺ = 0, + log(1 + 1/N), where no floor binds."""
        x, n = normal(seed, 2 * b, 3), 2 * b - 2
        options = {"temperature": t, "weights": weights, "beta": beta, "epsilon": epsilon}
        x = np.concatenate([x[:b], x[:b] + 0.1 * x[b:]])  # a far positive would bind the floor
        x[b:] *= -1  # here the positive is the farthest: e^p is small
        value, slope = ours(x, 2, tau_plus=1 / (n + 1), **options)
        wanted, wanted_slope = ours(x, 2, objective="decoupled", tau_plus=0.0, **options)
        close(value, wanted + math.log(1 + 1 / n), 1e-12)
        close(slope, wanted_slope, 1e-12)

    @given(**SEEDS, tau_plus=st.floats(0, 0.5), t=st.floats(0.3, 2), n=st.integers(1, 60))
    def test_the_pull_on_a_positive_is_between_1_and_kappa(self, seed, tau_plus, t, n):
        """∂ nce / ∂(−p) = (e^G + κ e^p) / (e^p + e^G), with κ = N τ⁺ / (1 − τ⁺)."""
        neg = torch.tensor(rng(seed).uniform(-1, 1, (1, n))) / t
        pos = (neg.min(1, keepdim=True).values - 0.1).requires_grad_()  # no floor binds
        log_w = torch.zeros_like(neg)
        debiasing = {"tau_plus": tau_plus, "t": t}
        (slope,) = torch.autograd.grad(judge("nce", pos, neg, log_w, **debiasing).sum(), pos)
        rest = log_negatives(pos, neg, log_w, **debiasing)[0].exp()
        kappa = n * tau_plus / (1 - tau_plus)
        close(-slope, (rest + kappa * pos.exp()) / (pos.exp() + rest), 1e-12)
        assert min(1, kappa) - 1e-12 <= -slope <= max(1, kappa) + 1e-12

    @given(**TWO_VIEWS, t=st.floats(0.1, 2), beta=st.floats(0.1, 5))
    def test_hcl_is_a_difference_of_two_decoupled_losses(self, seed, b, t, beta):
        """L_hcl(t, β) = L(t/(1 + β)) − L(t/β) + log N; detached, its slope is L's / (1 + β)."""
        x = normal(seed, 2 * b, 3)
        plain = {"objective": "decoupled", "tau_plus": 0.0}
        tilted = plain | {"temperature": t, "weights": "tilted", "beta": beta}
        value, slope = ours(x, 2, **tilted)
        hot, hot_slope = ours(x, 2, temperature=t / beta, **plain)
        cold, cold_slope = ours(x, 2, temperature=t / (1 + beta), **plain)
        close(value, cold - hot + math.log(2 * b - 2), 1e-12)
        close(slope, cold_slope - hot_slope, 1e-12)
        close(ours(x, 2, detach_weights=True, **tilted)[1], cold_slope / (1 + beta), 1e-12)

    @given(**TWO_VIEWS, t=st.floats(0.3, 2), beta=st.floats(0, 5))
    def test_hcl_is_a_mean_of_differences_of_means(self, seed, b, t, beta):
        """decoupled with tilted weights, − log N, is ∫ simple / t at b, for b in [β, β + 1]. So is
        its gradient, and each anchor's loss lies between those at the two ends."""
        x = normal(seed, 2 * b, 3)
        tilted = {"temperature": t, "weights": "tilted"}
        value, slope = ours(x, 2, objective="decoupled", beta=beta, **tilted)
        nodes, shares = np.polynomial.legendre.leggauss(30)  # on [−1, 1], where their sum is 2
        means, slopes = 0, 0
        for node, share in zip(nodes, shares, strict=True):
            found = ours(x, 2, objective="simple", beta=beta + (1 + node) / 2, **tilted)
            means, slopes = means + share / 2 * found[0] / t, slopes + share / 2 * found[1] / t
        close(value - math.log(2 * b - 2), means, 1e-10)
        close(slope, slopes, 1e-10)
        losses = partial(contrastive_loss, *torch.tensor(x).chunk(2), reduction="none", **tilted)
        middle = losses(objective="decoupled", beta=beta) - math.log(2 * b - 2)
        low, high = (losses(objective="simple", beta=end) / t for end in (beta, beta + 1))
        assert (low <= middle + 1e-12).all() and (middle <= high + 1e-12).all()

    NORMAL = {"mean": st.floats(-0.03, 0.03), "spread": st.floats(0.005, 0.06)}

    @given(**NORMAL, positive=st.floats(-1, 1), t=st.floats(0.03, 1), beta=st.floats(0, 1))
    def test_on_normal_cosines_hcl_is_a_colder_plain_loss(self, mean, spread, positive, t, beta):
        """L_hcl(t, β) = L(t̂) / (1 + 2β), t̂ = t / (1 + 2β), both of sums with total weight 1."""
        rows, view = rows_at(mean + spread * GRID), rows_at(np.array([positive]))
        plain, tilted = shared(hardneg.uniform), shared(partial(hardneg.tilted, beta=beta))

        def loss(t, weights):
            anchor = rows_at(np.ones(1))
            options = {"objective": "decoupled", "temperature": t, "weights": weights}
            return contrastive_loss(anchor, view, negatives=rows, **options)

        colder = 1 + 2 * beta
        value = loss(t, tilted)
        close(value, loss(t / colder, plain) / colder, 1e-10)
        close(value, (mean - positive) / t + colder * (spread / t) ** 2 / 2, 1e-10)

    @given(**SEEDS, n=st.integers(2, 20), beta=st.floats(0, 4))
    def test_hcl_damps_the_cumulants_of_a_colder_loss(self, seed, n, beta):
        """The n-th, of L(t̂) / (1 + 2β), by d_n = ((1 + β)^n − β^n) / (1 + 2β)^{n − 1}."""
        cosines = torch.tensor(rng(seed).uniform(-1, 1, (1, n)))
        pos, colder = torch.zeros(1, 1, dtype=torch.float64), 1 + 2 * beta

        def of_hcl(u):  # u = 1/t
            log_w = log_weights("tilted", u * cosines, beta=beta)
            return judge("decoupled", pos, u * cosines, log_w).sum()

        def of_plain(u):
            s = colder * u * cosines
            return judge("decoupled", pos, s, hardneg.uniform(s)).sum() / colder

        orders = np.arange(1, 5)
        damping = ((1 + beta) ** orders - beta**orders) / colder ** (orders - 1.0)
        plain = np.array(derivatives(of_plain, 4))
        close(derivatives(of_hcl, 4), damping * plain, 1e-10)
        centred = numpy(cosines) - numpy(cosines).mean()
        variance = (centred**2).mean()
        cumulants = [cosines.mean(), variance, (centred**3).mean()]
        cumulants += [(centred**4).mean() - 3 * variance**2]
        close(plain, cumulants * colder ** (orders - 1.0), 1e-10)
        close(damping[:2], [1, 1], 1e-12)
        least = orders / 2.0 ** (orders - 1)
        assert (damping[2:] >= least[2:] - 1e-12).all() and (damping[2:] <= 1 + 1e-12).all()

    def test_the_series_of_cumulants_has_a_radius_of_the_root_of_log_n(self):
        """Of 510 normal logits. κ_n / n! are coefficients of log Σ m_n b^n / n!, of moments m_n."""
        draws = normal(0, 200, 510)
        moments = [(draws**n).mean(1) / math.factorial(n) for n in range(61)]
        terms = [0 * moments[0]]
        for n in range(1, 61):
            known = sum(k * terms[k] * moments[n - k] for k in range(1, n))
            terms.append(moments[n] - known / n)
        roots = [np.abs(terms[n]) ** (1 / n) for n in range(50, 61)]
        assert (1 / np.max(roots, 0)).mean() == pytest.approx(math.sqrt(math.log(510)), rel=0.05)

    def test_many_candidates_are_needed_where_it_is_cold(self):
        """Of 510 normal logits the sum is normal up to (1 + 2β) σ of about √(2 log 510) = 3.5."""
        beta, n, pos = 0.5, 510, torch.zeros(500, 1, dtype=torch.float64)
        draws, gaps = torch.tensor(normal(0, 500, n)), []
        for spread in (1.0, 1.75, 3.5):  # (1 + 2β) σ is twice that
            s = spread * draws
            hcl = judge("decoupled", pos, s, log_weights("tilted", s, beta=beta)) - math.log(n)
            plain = (judge("decoupled", pos, 2 * s, hardneg.uniform(s)) - math.log(n)) / 2
            gaps.append([float(x.mean()) / spread**2 - 1 for x in (hcl, plain)])
            frozen = s.amax(1) - math.log(n) / 2  # if the largest alone makes up the sum
            assert (plain >= frozen).all()
        assert np.abs(gaps[0]).max() < 0.03  # a hundredth of what they measure, and noise
        assert -0.1 < gaps[1][0] and gaps[1][1] < gaps[1][0] - 0.03
        assert gaps[2][0] < -0.2 and gaps[2][1] < -0.3
        assert float((plain - frozen).mean()) < 0.2 * float(plain.mean())

    @pytest.mark.parametrize("objective", ["nce", "decoupled"])
    @given(**SEEDS, n=st.integers(2, 12), spread=st.floats(0.1, 4), beta=st.floats(0.05, 4))
    def test_far_negatives_are_pulled(self, objective, seed, n, spread, beta):
        """With its gradient HCL pulls j iff e^{s_j} < β/(1 + β) E_q e^s; held, it pushes all."""
        s = torch.tensor(spread * normal(seed, 1, n), requires_grad=True)
        pos = torch.tensor(normal(seed + 1, 1, 1), requires_grad=True)
        log_w = log_weights("tilted", s, beta=beta)
        push, pull = torch.autograd.grad(judge(objective, pos, s, log_w).sum(), (s, pos))
        q, harder = (torch.softmax(b * s, 1) for b in (beta, 1 + beta))
        close(push / -pull, (1 + beta) * harder - beta * q, 1e-10)
        close(push.sum(), -pull.sum(), 1e-10)
        neutral = beta / (1 + beta) * (q * s.exp()).sum()
        clear = (s.exp() / neutral - 1).abs() > 1e-6
        assert ((push < 0) == (s.exp() < neutral))[clear].all()
        _, held = with_slope(judge(objective, pos, s, log_w.detach()), s)
        assert (held > 0).all()

    @pytest.mark.parametrize("spread, pulls", [(1.0, 0.055), (1.5, 0.144), (2.0, 0.217)])
    def test_colder_losses_pull_more(self, spread, pulls):
        """In all, over the pull on the positive: 510 normal logits, β = 0.5."""
        s = torch.tensor(spread * normal(0, 2000, 510), requires_grad=True)
        pos = torch.zeros(2000, 1, dtype=torch.float64)
        _, push = with_slope(judge("decoupled", pos, s, log_weights("tilted", s, beta=0.5)), s)
        close(-push.clamp_max(0).sum(1).mean(), pulls, 0.003)

    @given(**SEEDS, n=st.integers(2, 12), spread=st.floats(0.1, 3), beta=st.floats(0.05, 4))
    def test_a_negative_alone_settles_at_the_neutral_point(self, seed, n, spread, beta):
        """There (1 + β) B e^s + e^{(1 + β) s} = β A, with A, B = Σ e^{(1 + β) s}, Σ e^{β s}."""
        others, pos = spread * normal(seed, n - 1), torch.zeros(1, 1, dtype=torch.float64)
        a, b = (np.exp(k * others).sum() for k in (1 + beta, beta))

        def sign(x):
            return (1 + beta) * b * math.exp(x) + math.exp((1 + beta) * x) - beta * a

        settled = brentq(sign, -50, 50, xtol=1e-14)
        for off in (-0.1, 0.0, 0.1):
            s = torch.tensor([[settled + off, *others]], requires_grad=True)
            log_w = log_weights("tilted", s, beta=beta)
            slope = with_slope(judge("decoupled", pos, s, log_w), s)[1][0, 0]
            assert abs(slope) < 1e-10 if off == 0 else slope * off > 0

    @given(**MATRICES, t=st.floats(0.1, 2), beta=st.floats(0, 5), epsilon=st.floats(0.1, 3))
    def test_weights_are_another_temperature(self, seed, a, n, t, beta, epsilon):
        """The push on negatives has simclr's shares at t/(1 + β); for ot, at tε/(t + ε)."""
        cosines = masked_logits(seed, a, n) / 2
        neg, pos = torch.tensor(cosines / t), torch.zeros(a, 1, dtype=torch.float64)
        by_ot = hardneg.transported(masked(neg), torch.zeros(n), t, epsilon, "sqeuclidean")
        by_hcl = log_weights("tilted", neg, beta=beta)
        effective = (by_hcl, t / (1 + beta)), (by_ot, t * epsilon / (t + epsilon))
        for log_w, t_effective in effective:
            s = neg.clone().requires_grad_()
            (push,) = torch.autograd.grad(judge("nce", pos, s, log_w).sum(), s)
            shares = push / push.sum(1, keepdim=True)
            close(shares, torch.softmax(torch.tensor(cosines / t_effective), 1), 1e-12)

    LEVELS = [(0.5, 0, 9), (0.2, 0, 15), (0.1, 0, 20), (1, 0.5, 9)]

    @pytest.mark.parametrize("t, beta, kept", LEVELS)
    def test_temperature_is_a_water_level(self, t, beta, kept):
        """Normal features of view-correlation λ_k, of energies a_k: at best a_k = t̂ (λ_k − ν)₊."""
        correlations = torch.linspace(0.95, 0.05, 20, dtype=torch.float64)
        sizes = torch.tensor(normal(0, 8, 20)).square()  # z_k² / a_k of a few anchors
        sizes = sizes / sizes.mean(0)

        def loss(energies):
            a = torch.tensor(energies, requires_grad=True)
            pos = (a * correlations).sum().expand(8, 1) / t  # its mean
            deviations = (sizes @ a.square()).sqrt() / t  # of an anchor's products with others
            neg = deviations[:, None] * torch.tensor(GRID)
            log_w = shared(partial(hardneg.tilted, beta=beta))(neg)
            value = t * judge("decoupled", pos, neg, log_w).mean()
            return [numpy(x) for x in with_slope(value, a)]

        even, total = np.full(20, 1 / 20), {"type": "eq", "fun": lambda a: a.sum() - 1}
        total["jac"] = np.ones_like
        settings = {"ftol": 1e-15, "maxiter": 500}
        options = {"jac": True, "bounds": [(0, 1)] * 20, "constraints": total, "options": settings}
        found, colder = minimize(loss, even, method="SLSQP", **options).x, t / (1 + 2 * beta)
        best = numpy(correlations)[:kept]
        level = (best.sum() - 1 / colder) / kept
        assert best[-1] > level and (kept == 20 or correlations[kept] <= level)
        close(found, colder * np.maximum(0, numpy(correlations) - level), 1e-6)

    @given(**MATRICES, kappa=st.floats(-2, 4), epsilon=st.floats(0.3, 3))
    def test_kappa_is_epsilon_in_another_unit(self, seed, a, n, kappa, epsilon):
        """The cost exp(‖x − y‖² − κ) of [2] at ε is the cost exp(‖x − y‖²) at ε e^κ."""
        cosines = masked_logits(seed, a, n) / 2
        printed = -np.exp(2 - 2 * cosines - kappa) / epsilon
        coupled = masked(cosines), torch.zeros(n, dtype=torch.float64), 1.0
        found = hardneg.transported(*coupled, epsilon * math.exp(kappa), "exp")
        close(infinite(found), np.where(cosines > -INF, printed, -INF), 1e-12)

    @given(**SEEDS, n=st.integers(2, 20), t=st.floats(0.1, 3))
    def test_entropy_of_the_push_rises_with_the_temperature(self, seed, n, t):
        """dH(r)/dt = Var_r(s) / t³, with r the softmax of s/t. Ref: [4] Eq. 5"""
        rows, view = (rows_at(rng(seed + k).uniform(-1, 1, size)) for k, size in enumerate((n, 1)))
        s = numpy(rows[:, 0])
        temperature = torch.tensor(t, dtype=torch.float64, requires_grad=True)
        anchor = rows_at(np.ones(1))
        options = {"negatives": rows.requires_grad_(), "normalize": False, "block_size": 0}
        value = contrastive_loss(anchor, view, temperature=temperature, **options)
        (push,) = torch.autograd.grad(value, rows, create_graph=True)
        shares = push[:, 0] / push[:, 0].sum()
        entropy = -(shares * shares.log()).sum()
        (slope,) = torch.autograd.grad(entropy, temperature)
        r = numpy(shares)
        close(slope, ((r * s * s).sum() - (r * s).sum() ** 2) / t**3, 1e-10)

    @pytest.mark.parametrize("classes, rate", [(4, 0.0905), (16, 0.756)])
    def test_means_are_slow_for_pairs_alone(self, classes, rate):
        """The error falls by the largest |μ (1 − μ)| / 2, below 1/8 for classes of eight samples.
        In classes of two μ nears −1. Means stop halving the error there, and rows and columns in
        turn multiply it by the largest μ²."""
        x = np.tile(normal(0, classes, 16), (32 // classes, 1)) + 0.1 * normal(1, 32, 16)
        kernel = torch.tensor((similarities(x, x + 0.2 * normal(2, 32, 16))[1] - 1) / 0.2)
        exact, g, _ = couple(kernel, 1e-14)
        scaled = len(kernel) * numpy((exact[:, None] + kernel + g).exp())
        step = -(scaled - scaled @ scaled) / 2
        if classes == 16:
            step = scaled @ scaled - 1 / len(scaled)  # less its part for a constant
        close(np.abs(np.linalg.eigvalsh(step)).max(), rate, 1e-3)
        steps = round(math.log(1e-4) / math.log(rate))
        errors = [couple(kernel, 1e-16, 2 * steps + k)[2] for k in (0, 1)]
        assert float(errors[1] / errors[0]) == pytest.approx(rate, rel=0.1)

    @pytest.mark.parametrize("classes", [2, 4])
    @given(**SEEDS, size=st.integers(2, 8), spread=st.floats(0, 2))
    def test_aligned_classes_are_told_apart_by_the_nearest_mean(self, classes, seed, size, spread):
        """The talk to [1]: P(another class mean is nearer) ≤ 4 L_align/Δ², Δ their least distance.
        L_align = E ‖f − f⁺‖²/2 over independent pairs of a class, by Markov's inequality; over
        pairs of two samples it is 1 − `tolerance`. Of two classes the error is at most
        1 − √(1 − ε) ≤ ε ≤ (L*_∞ + 2) / 2, ε = 1 − Δ²/4."""
        centres = normal(seed, classes, 1, 3)
        centres[1] = -centres[0]
        f = oracle.unit(centres + spread * normal(seed + 1, classes, size, 3))
        z, labels = torch.tensor(f.reshape(-1, 3)), torch.arange(classes).repeat_interleave(size)
        means, apart = f.mean(1), 1 - float(tolerance(z, labels))
        align = (1 - 1 / size) * apart  # a pair may be one sample twice
        close(align, 1 - (means**2).sum(1).mean(), 1e-12)
        distances = ((f[:, :, None] - means) ** 2).sum(-1)  # (classes, size, classes)
        error = (distances.argmin(-1) != np.arange(classes)[:, None]).mean()
        gaps = ((means[:, None] - means) ** 2).sum(-1) + np.diag([INF] * classes)
        assert error <= 4 * align / gaps.min() + 1e-12
        options = {"loss": "simple", "weights": "hardest", "labels": labels}
        worst = float(contrastive_loss(z, **options))
        of_others = (z @ z.T).masked_fill(labels[:, None] == labels, -INF)
        close(worst, apart - 1 + of_others.amax(1).mean(), 1e-12)
        if classes == 2:
            epsilon = 1 - gaps.min() / 4
            close(epsilon, align + (f.mean((0, 1)) ** 2).sum(), 1e-12)
            assert error - 1e-12 <= 1 - math.sqrt(1 - epsilon) <= epsilon + 1e-12
            assert epsilon <= (worst + 2) / 2 + 1e-12


class TestExactDebiasing:
    """The estimate that follows from q⁻ ∝ w p⁻, which a recipe of the tutorial has, too."""

    def test_nothing_is_left_where_positives_are_views(self):
        """Views are too near for samples of a class, which would have more than all weight."""
        x = normal(0, 20, 8)
        pos, neg = (torch.tensor(cosines) / 0.2 for cosines in similarities(x, x + 0.01))
        assert debias.exact(pos, neg, pos.exp(), neg.exp(), 0.1, 0.2)[1].float().mean() > 0.9

    @at_least(30)
    @given(**FEW, m=st.integers(1, 4), n=st.integers(1, 8), beta=st.floats(0, 9))
    def test_is_that_by_loops(self, seed, m, n, beta, t, tau_plus):
        """It is that by loops, and Eq. 2 with the share τ_i = τ⁺ E⁺[w] / E[w] if nothing binds."""
        pos, neg = (torch.tensor(rng(seed + k).uniform(-1, 1, (3, k))) / t for k in (m, n))
        of_both = (beta * pos).exp(), (beta * neg).exp()
        found, nothing_left = debias.exact(pos, neg, *of_both, tau_plus, t)
        rows = zip(*(x.tolist() for x in (pos, neg, beta * pos, beta * neg)), strict=True)
        by_loops = np.array([exact_by_loops(*row, tau_plus, t) for row in rows])
        close(found + of_both[1].sum(1).log(), by_loops, 1e-10)
        floor, _ = debias.eq_2(pos, neg, pos * 0 + 1, neg * 0 + 1, tau_plus, t)
        assert (found[nothing_left] == floor[nothing_left]).all()
        inside = (floor < found) & (found < neg.amax(1))
        shares = tau_plus * of_both[0].mean(1) / of_both[1].mean(1)
        by_share, _ = debias.eq_2(pos, neg, *of_both, shares, t)
        close(by_share[inside], found[inside], 1e-9)

    HIDDEN = {"k": st.integers(2, 9), "hidden": st.sampled_from([0, 0.4, 0.9])}

    @at_least(30)
    @given(**FEW, **HIDDEN, m=st.integers(1, 5), beta=st.floats(0, 9))
    def test_the_recipe_is_the_oracles(self, seed, m, k, hidden, beta, t, tau_plus):
        """Value and gradient, also of anchors without a positive, a candidate or both."""
        x, random = normal(seed, 4 + k, 3), rng(seed)
        index, mask = random.integers(-1, k, (4, m)), random.random((4, k)) >= hidden
        index[0] = -1
        if hidden == 0.9:
            mask[:2] = False
        masks = {"positive_index": torch.tensor(index), "negative_mask": torch.tensor(mask)}

        def by_loops(pos, neg):
            (log_w,), (log_w_pos,) = oracle.weigh("tilted", [pos], [neg], beta=beta)
            return oracle.nce(pos, exact_by_loops(pos, neg, log_w_pos, log_w, tau_plus, t))

        def loss(rows):
            options = {"negatives": rows[4:], "temperature": t, "objective": by_loops}
            return oracle.contrastive_loss(rows[:4], **options, **masks)

        recipe, _ = test_pages.TestRecipes.run("Exact debiasing")
        torch.set_default_dtype(torch.float32)  # the page sets float64
        recipe |= {"tau_plus": tau_plus, "beta": beta, "warm": t}
        inputs = torch.tensor(x, requires_grad=True)
        options = {"negatives": inputs[4:], "temperature": t, "objective": recipe["exact"]}
        value = contrastive_loss(inputs[:4], **options, **masks)
        same(with_slope(value, inputs), (loss(x), oracle.gradient(loss, x)), 1e-10)
