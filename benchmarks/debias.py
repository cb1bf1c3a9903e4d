"""How well do three corrections for false negatives estimate the weighted mean over true negatives?

    python benchmarks/debias.py            two tables, two minutes on two cores

The first table simulates: anchors and 510 candidates of ten classes on the sphere, a tenth of the
candidates of the anchor's class, positives that are other samples of that class. The truth leaves
the anchor's class out of a million candidates. The second table trains a small encoder on such
classes, with positives of the class, and reads it out.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
from training import readouts, report

CLASSES, DIMENSIONS, CANDIDATES = 10, 32, 510
SETTINGS = [(0.25, 0.5, 1.0), (0.64, 0.5, 1.0), (0.64, 0.5, 2.0), (0.64, 0.2, 1.0)]
ESTIMATES = [  # name, positives, tau_plus, debias
    ("none", 1, 0.0, "published"),
    ("Eq. 2, M = 1", 1, 0.1, "published"),
    ("Eq. 2, M = 16", 16, 0.1, "published"),
    ("exact, M = 1", 1, 0.1, "exact"),
    ("exact, M = 4", 4, 0.1, "exact"),
    ("exact, M = 16", 16, 0.1, "exact"),
]
MEASURES = {  # and the digits after the point
    "bias of log E[e^s]": 2,
    "its root mean square error": 2,
    "% of anchors: nothing is left": 0,
}
HCL = {"loss": "hcl", "temperature": 0.5, "beta": 1.0}
CORRECTIONS = {
    "none": HCL | {"tau_plus": 0.0},
    "Eq. 2": HCL | {"tau_plus": 0.1},
    "exact": HCL | {"tau_plus": 0.1, "debias": "exact"},
    "labels: no false negatives": HCL | {"tau_plus": 0.0, "true_labels": True},
}


def samples(centres, labels, cosine, generator):
    """Draw unit rows whose classes have this mean cosine within, about: (n, D)."""
    noise = torch.randn(*labels.shape, DIMENSIONS, generator=generator, dtype=torch.float64)
    own = math.sqrt(cosine) * centres[labels]
    return hardneg.unit(own + math.sqrt((1 - cosine) / DIMENSIONS) * noise)


def log_mean_over_others(anchors, labels, centres, cosine, t, beta, generator):
    """Compute log E_{q⁻}[e^s] of each anchor from a large sample of other classes."""
    count = 100_000
    drawn = torch.randint(CLASSES, (count,), generator=generator)
    logits = anchors @ samples(centres, drawn, cosine, generator).T / t
    logits = logits.masked_fill(labels[:, None] == drawn, -torch.inf)
    return torch.logsumexp((1 + beta) * logits, 1) - torch.logsumexp(beta * logits, 1)


def simulate(cosine, t, beta, anchors=2000, seed=0):
    """Return bias and root mean square error of each estimate, and its share of clamped anchors."""
    generator = torch.Generator().manual_seed(seed)
    centres = hardneg.unit(
        torch.randn(CLASSES, DIMENSIONS, generator=generator, dtype=torch.float64)
    )
    labels = torch.randint(CLASSES, (anchors,), generator=generator)
    z = samples(centres, labels, cosine, generator)
    truth = log_mean_over_others(z, labels, centres, cosine, t, beta, generator)
    drawn = torch.randint(CLASSES, (anchors, CANDIDATES), generator=generator)
    neg = torch.einsum("ad,and->an", z, samples(centres, drawn, cosine, generator)) / t
    positives = samples(centres, labels[:, None].expand(-1, 16), cosine, generator)
    pos = torch.einsum("ad,amd->am", z, positives) / t
    log_n = torch.tensor(math.log(CANDIDATES))
    rows = []
    for _, m, tau_plus, debias in ESTIMATES:
        given = {"weights": "tilted", "beta": beta, "tau_plus": tau_plus, "debias": debias}
        options = hardneg.settle(given)
        some = pos[:, :m]
        log_w, log_w_pos = hardneg.weigh(some, neg, log_n, torch.zeros(()), t, options)
        found = hardneg._log_negatives(some, neg, log_w, log_w_pos, log_n, t, options)
        log_sum, clamped, _ = found
        off = log_sum - math.log(CANDIDATES) - truth
        rows.append((off.mean(), off.square().mean().sqrt(), 100 * clamped.double().mean()))
    return rows


def noisy(labels, centres, generator):
    """Draw a noisy sample of each label's class: (n, D)."""
    noise = torch.randn(len(labels), DIMENSIONS, generator=generator)
    return centres[labels] + 1.5 * noise


def train(options, seed, steps=1000, batch=64, positives=4):
    """Train an encoder of noisy classes, positives drawn from the class; return its figures."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    centres = torch.randn(CLASSES, DIMENSIONS, generator=generator)
    encoder = torch.nn.Sequential(
        torch.nn.Linear(DIMENSIONS, 128), torch.nn.ReLU(), torch.nn.Linear(128, DIMENSIONS)
    )
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    for _ in range(steps):
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        views = [encoder(noisy(labels, centres, generator)) for _ in range(1 + positives)]
        given = {"labels": labels} if options.get("true_labels") else {}
        settings = {name: x for name, x in options.items() if name != "true_labels"}
        loss = hardneg.contrastive_loss(*views, **given, **settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    labels = torch.arange(CLASSES).repeat_interleave(200)
    with torch.no_grad():
        z = F.normalize(encoder(noisy(labels, centres, generator)), dim=1)
        other = F.normalize(encoder(noisy(labels, centres, generator)), dim=1)
    accuracy = readouts.linear_readout(z, labels, other, labels)
    return accuracy, hardneg.uniformity(z).item(), readouts.tolerance(z, labels).item()


def simulated():
    """Write a table for each measure; a row is a cosine within a class, t and β."""
    found = {setting: simulate(*setting) for setting in SETTINGS}
    tables = []
    for k, (title, digits) in enumerate(MEASURES.items()):
        lines = [[title, *(name for name, *_ in ESTIMATES)]]
        for setting, figures in found.items():
            cells = [f"{some[k]:.{digits}f}" for some in figures]
            lines.append([", ".join(map(str, setting)), *cells])
        tables.append(report.markdown(lines))
    return "\n\n".join(tables)


def trained(seeds):
    """Write the table of the encoders trained with each correction."""
    lines = [["correction", "linear %", "uniformity", "tolerance"]]
    for name, options in CORRECTIONS.items():
        of_seeds = [train(options, seed) for seed in range(seeds)]
        lines.append([name, *(report.spread(values, 2) for values in zip(*of_seeds, strict=True))])
    return report.markdown(lines)


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="of the second table")
    seeds = parser.parse_args().seeds
    print(simulated())
    print(f"\nAn encoder trained with four positives of the class, n = {seeds} seeds\n")
    print(trained(seeds))


if __name__ == "__main__":
    main()
