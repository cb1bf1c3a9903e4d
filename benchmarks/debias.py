"""How well do corrections for false negatives estimate the weighted mean over true negatives?
python benchmarks/debias.py

The first tables simulate anchors and 510 candidates of ten classes on the sphere, a tenth of the
candidates of the anchor's class, positives that are other samples of that class. The truth leaves
the anchor's class out of a large sample. The last one trains a small encoder on such classes, with
four positives of the class, and reads it out. They take two minutes on two cores.
"""

import argparse
import math
from types import SimpleNamespace

import common
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hardneg
from training import readouts, report

CLASSES, DIM, CANDIDATES, BATCH = 10, 32, 510, 64
SETTINGS = [(0.25, 0.5, 1.0), (0.64, 0.5, 1.0), (0.64, 0.5, 2.0), (0.64, 0.2, 1.0)]
HCL = {"loss": "hcl", "temperature": 0.5, "beta": 1.0}
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
    log_n = torch.full((anchors,), math.log(CANDIDATES))
    pairs = SimpleNamespace(t=t, potential=None, log_weights=None)
    rows = []
    for m, given in ESTIMATES.values():
        options = hardneg.settle({"weights": "tilted", "beta": beta} | given)
        some = pos[:, :m]
        log_w, log_w_pos = hardneg.weigh(some, neg, log_n, pairs, options)
        log_all = hardneg.log_sum(neg, log_w)
        given = some, neg, log_w, log_w_pos, log_n, pairs, options
        log_sum, clamped = hardneg._debiased(log_all, *given)
        off = log_sum - math.log(CANDIDATES) - truth
        rows.append((off.mean(), off.square().mean().sqrt(), 100 * clamped.double().mean()))
    return rows


def learn(options: dict, use_labels: bool, seed: int, steps: int = 1000) -> list[float]:
    """Train an encoder of noisy classes, four positives drawn from the class → its figures."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=generator)
    encoder = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, DIM))
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)

    def embed(labels):
        noise = torch.randn(len(labels), DIM, generator=generator)
        return encoder(centres[labels] + 1.5 * noise)

    for _ in range(steps):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        views = [embed(labels) for _ in range(5)]
        given = HCL | options | {"labels": labels if use_labels else None}
        common.descend(hardneg.contrastive_loss(*views, **given), optimizer)
    labels = torch.arange(CLASSES).repeat_interleave(200)
    with torch.no_grad():
        z, other = [F.normalize(embed(labels), dim=1) for _ in range(2)]
    accuracy = readouts.linear_readout(z, labels, other, labels)
    return [accuracy, hardneg.uniformity(z).item(), readouts.tolerance(z, labels).item()]


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


def trained(seeds: int) -> str:
    """Write the table of the encoders trained with each correction."""
    lines = [["correction", "linear %", "uniformity", "tolerance"]]
    rows = {"none": NONE, "Eq. 2": EQ_2, "exact": EXACT, "labels: no false negatives": NONE}
    for row, options in rows.items():
        of_seeds = [learn(options, row.startswith("labels"), seed) for seed in range(seeds)]
        columns = torch.tensor(of_seeds, dtype=torch.float64).T.tolist()
        lines.append([row] + [report.spread(some, 2) for some in columns])
    return report.markdown(lines)


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="of the last table")
    args = parser.parse_args()
    print(f"{simulated()}\n\n{trained(args.seeds)}")


if __name__ == "__main__":
    main()
