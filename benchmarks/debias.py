"""How well do corrections for false negatives estimate the weighted mean over true negatives?
python benchmarks/debias.py

It simulates anchors and 510 candidates of ten classes on the sphere, a tenth of the candidates of
the anchor's class, positives that are other samples of that class. The truth leaves the anchor's
class out of a large sample.
"""

import math
from types import SimpleNamespace

import common
import torch
from torch import Tensor

import hardneg
from training import report

CLASSES, DIM, CANDIDATES = 10, 32, 510
SETTINGS = [(0.25, 0.5, 1.0), (0.64, 0.5, 1.0), (0.64, 0.5, 2.0), (0.64, 0.2, 1.0)]
NONE = {"tau_plus": 0.0}
EQ_2 = {"tau_plus": 0.1}
EXACT = {"tau_plus": 0.1, "debias": "exact"}
# name: positives, options
ESTIMATES = {"none": (1, NONE), "Eq. 2, M = 1": (1, EQ_2), "Eq. 2, M = 16": (16, EQ_2)}
ESTIMATES |= {f"exact, M = {m}": (m, EXACT) for m in (1, 4, 16)}
# and the digits after the point
MEASURES = {"bias of log E[e^s]": 2, "its root mean square error": 2}
MEASURES["% of anchors: nothing is left"] = 0


def samples(centres: Tensor, labels: Tensor, cosine: float, generator) -> Tensor:
    """Draw unit rows whose classes have this mean cosine within, about: (n, D)."""
    noise = torch.randn(labels.shape + (DIM,), generator=generator, dtype=torch.float64)
    own = math.sqrt(cosine) * centres[labels]
    return hardneg.unit(own + math.sqrt((1 - cosine) / DIM) * noise)


def simulate(setting: tuple[float, float, float], anchors: int = 2000) -> list[tuple]:
    """Return each estimate's bias, root mean square error, and share of clamped anchors.

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
    n = torch.full((anchors,), float(CANDIDATES))
    pairs = SimpleNamespace(t=t, potential=None, log_weights=None)
    rows = []
    for m, given in ESTIMATES.values():
        options = hardneg.settle({"weights": "tilted", "beta": beta} | given)
        some = pos[:, :m]
        log_w, log_w_pos = hardneg.weigh(some, neg, n, pairs, options)
        log_all = hardneg.log_sum(neg, log_w)
        given = some, neg, log_w, log_w_pos, n.log(), pairs, options
        log_sum, clamped = hardneg._debiased(log_all, *given)
        off = log_sum - math.log(CANDIDATES) - truth
        rows.append((off.mean(), off.square().mean().sqrt(), 100 * clamped.double().mean()))
    return rows


def simulated() -> str:
    """Write a table for each measure; a row is a cosine within a class, t and β."""
    found = {setting: simulate(setting) for setting in SETTINGS}
    tables = []
    for k, (title, digits) in enumerate(MEASURES.items()):
        lines = [[title] + list(ESTIMATES)]
        for setting, figures in found.items():
            shown = ", ".join(f"{x:g}" for x in setting)
            lines.append([shown] + [f"{some[k]:z.{digits}f}" for some in figures])
        tables.append(report.markdown(lines))
    return "\n\n".join(tables)


def main():
    """Print the tables."""
    common.parser_of(__doc__).parse_args()
    print(simulated())


if __name__ == "__main__":
    main()
