"""How well do corrections for false negatives estimate the weighted mean over true negatives?
python benchmarks/debias.py

It simulates anchors, each with 510 candidates of ten classes on the sphere. A tenth of the
candidates has the anchor's class, and all positives have it. The truth is the weighted mean over a
large sample that leaves the anchor's class out. "Eq. 2" is what hardneg.py subtracts, as published
in [1]. "exact" is the estimate that follows from the definitions of [1], see THEOREMS.md.
"""

import math

import common
import torch
from torch import Tensor

import hardneg
from training import report

CLASSES, DIM, CANDIDATES, TAU_PLUS = 10, 32, 510, 0.1
SETTINGS = [(0.25, 0.5, 1.0), (0.64, 0.5, 1.0), (0.64, 0.5, 2.0), (0.64, 0.2, 1.0)]


def exact(pos, neg, w_pos, w, tau_plus: float, t: float) -> tuple[Tensor, Tensor]:
    """Estimate log E_{q⁻}[e^s] from its definition, and tell where nothing is left → (A,), (A,).

        E_{q⁻}[e^s] = (E_p[w e^s] − τ⁺ E_{p⁺}[w e^v]) / (E_p[w] − τ⁺ E_{p⁺}[w])

    pos (A, M) and neg (A, N) are logits. w_pos and w are weights, by one function of the logit.
    The result is at most the largest logit. It is at least the published estimate for w = 1, since
    weights that prefer near candidates only raise a mean. Few positives are a poor sample of p⁺, so
    a difference may not be positive. Then nothing is left, and the result is the lower bound."""
    above = (w * neg.exp()).mean(1) - tau_plus * (w_pos * pos.exp()).mean(1)
    below = w.mean(1) - tau_plus * w_pos.mean(1)
    is_left = (above > 0) & (below > 0)
    least, _ = eq_2(pos, neg, torch.ones_like(pos), torch.ones_like(neg), tau_plus, t)
    rest = (above / below).log().minimum(neg.amax(1)).maximum(least)
    return torch.where(is_left, rest, least), ~is_left


def eq_2(pos, neg, w_pos, w, tau_plus: float, t: float) -> tuple[Tensor, Tensor]:
    """Estimate the same as published, with τ⁺ as the class's share of the weight, whatever w is."""
    mean = (w * neg.exp()).sum(1) / w.sum(1)
    mean_pos = (w_pos * pos.exp()).sum(1) / w_pos.sum(1)
    return hardneg.published(mean.log(), mean_pos.log(), tau_plus * torch.ones_like(mean), t)


# An estimate has a number of positives, τ⁺ and a function. Without τ⁺ nothing is subtracted.
ESTIMATES = {"none": (1, 0.0, exact)}
ESTIMATES |= {f"Eq. 2, M = {m}": (m, TAU_PLUS, eq_2) for m in (1, 16)}
ESTIMATES |= {f"exact, M = {m}": (m, TAU_PLUS, exact) for m in (1, 4, 16)}
# A measure has a number of digits after the point.
MEASURES = {"bias of log E[e^s]": 2, "its root mean square error": 2}
MEASURES |= {"% of anchors: nothing is left": 0}


def samples(centres: Tensor, labels: Tensor, cosine: float, generator) -> Tensor:
    """Draw unit rows whose classes have this mean cosine within, about: (n, D)."""
    noise = torch.randn(labels.shape + (DIM,), generator=generator, dtype=torch.float64)
    own = math.sqrt(cosine) * centres[labels]
    return hardneg.unit(own + math.sqrt((1 - cosine) / DIM) * noise)


def simulate(setting: tuple[float, float, float], anchors: int = 2000) -> list[tuple]:
    """Return each estimate's bias, its root mean square error, and where nothing is left, in %.

    The truth is log E_{q⁻}[e^s] of each anchor, from a large sample of other classes."""
    cosine, t, beta = setting
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, DIM, generator=generator, dtype=torch.float64)
    centres = hardneg.unit(centres)
    labels = torch.randint(CLASSES, (anchors,), generator=generator)
    z = samples(centres, labels, cosine, generator)
    drawn = torch.randint(CLASSES, (100_000,), generator=generator)
    logits = z @ samples(centres, drawn, cosine, generator).T / t
    logits = logits.masked_fill(labels[:, None] == drawn, -torch.inf)
    truth = torch.logsumexp((1 + beta) * logits, 1) - torch.logsumexp(beta * logits, 1)
    drawn = torch.randint(CLASSES, (anchors, CANDIDATES), generator=generator)
    neg = torch.einsum("ad,and->an", z, samples(centres, drawn, cosine, generator)) / t
    positives = samples(centres, labels[:, None].expand(-1, 16), cosine, generator)
    pos = torch.einsum("ad,amd->am", z, positives) / t
    w_pos, w = (beta * pos).exp(), (beta * neg).exp()
    rows = []
    for m, tau_plus, estimate in ESTIMATES.values():
        found, nothing_left = estimate(pos[:, :m], neg, w_pos[:, :m], w, tau_plus, t)
        off = found - truth
        rows.append((off.mean(), off.square().mean().sqrt(), 100 * nothing_left.double().mean()))
    return rows


def main():
    """Print a table for each measure; a row is a cosine within a class, t and β."""
    common.parser_of(__doc__).parse_args()
    found = {setting: simulate(setting) for setting in SETTINGS}
    tables = []
    for k, (title, digits) in enumerate(MEASURES.items()):
        lines = [[title] + list(ESTIMATES)]
        for setting, figures in found.items():
            shown = ", ".join(f"{x:g}" for x in setting)
            lines.append([shown] + [f"{some[k]:z.{digits}f}" for some in figures])
        tables.append(report.markdown(lines))
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
