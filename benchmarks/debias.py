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
    options = hardneg.Options(weights="tilted", beta=beta)
    log_w = hardneg.weigh(neg, options, t)
    log_w_pos = hardneg.weigh_alike(pos, neg, log_w, options)
    rows = []
    for _, m, tau_plus, debias in ESTIMATES:
        given = {"tau_plus": tau_plus, "temperature": t, "debias": debias}
        given |= {"log_w_pos": log_w_pos[:, :m]}
        log_sum = hardneg.debiased(pos[:, :m], neg, log_w, **given)
        clamped = hardneg.debiased(pos[:, :m], neg, log_w, return_clamped=True, **given)
        off = log_sum - math.log(CANDIDATES) - truth
        rows.append((off.mean(), off.square().mean().sqrt(), 100 * clamped.double().mean()))
    return rows


def train(options, seed, steps=1000, batch=64, positives=4):
    """Train an encoder of noisy classes, positives drawn from the class; return its figures."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    centres = torch.randn(CLASSES, DIMENSIONS, generator=generator)

    def inputs(labels):
        noise = torch.randn(len(labels), DIMENSIONS, generator=generator)
        return centres[labels] + 1.5 * noise

    encoder = torch.nn.Sequential(
        torch.nn.Linear(DIMENSIONS, 128), torch.nn.ReLU(), torch.nn.Linear(128, DIMENSIONS)
    )
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    for _ in range(steps):
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        views = [encoder(inputs(labels)) for _ in range(1 + positives)]
        given = {"labels": labels} if options.get("true_labels") else {}
        settings = {name: x for name, x in options.items() if name != "true_labels"}
        loss = hardneg.contrastive_loss(*views, **given, **settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    labels = torch.arange(CLASSES).repeat_interleave(200)
    with torch.no_grad():
        z = F.normalize(encoder(inputs(labels)), dim=1)
        other = F.normalize(encoder(inputs(labels)), dim=1)
    accuracy = hardneg.linear_readout(z, labels, other, labels)
    return accuracy, hardneg.uniformity(z).item(), hardneg.tolerance(z, labels).item()


def spread(values):
    values = torch.tensor(values)
    return f"{values.mean():.2f} ± {values.std():.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="of the second table")
    seeds = parser.parse_args().seeds
    names = [name for name, *_ in ESTIMATES]
    found = {setting: simulate(*setting) for setting in SETTINGS}
    titles = ["bias of log E[e^s]", "its root mean square error", "% of anchors: nothing is left"]
    for k, title in enumerate(titles):
        print(f"| {title} |", " | ".join(names), "|")
        print("|---" * (1 + len(names)) + "|")
        for setting, figures in found.items():
            cells = [f"{some[k]:.{0 if k == 2 else 2}f}" for some in figures]
            print(f"| {', '.join(map(str, setting))} |", " | ".join(cells), "|")
        print()
    plain = {"loss": "hcl", "temperature": 0.5, "beta": 1.0}
    rows = {
        "none": plain | {"tau_plus": 0.0},
        "Eq. 2": plain | {"tau_plus": 0.1},
        "exact": plain | {"tau_plus": 0.1, "debias": "exact"},
        "labels: no false negatives": plain | {"tau_plus": 0.0, "true_labels": True},
    }
    print(f"\nAn encoder trained with four positives of the class, n = {seeds} seeds\n")
    print("| correction | linear % | uniformity | tolerance |\n|---|---|---|---|")
    for name, options in rows.items():
        figures = zip(*(train(options, seed) for seed in range(seeds)), strict=True)
        print(f"| {name} |", " | ".join(spread(values) for values in figures), "|")


if __name__ == "__main__":
    main()
