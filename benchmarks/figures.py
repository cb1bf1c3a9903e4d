"""Draw: python benchmarks/figures.py curves forces ranks --cifar10 FOLDER

Each figure goes to results/FIGURE.png. curves is drawn from records, forces by itself. The others
read the encoders that a study left in --out: histograms those of hard-debiased, histograms-beta of
beta-6, ranks of objectives, weights of cost-course, neighbours those of the study of its name. They
embed 2000 test images of FOLDER; the second view of an image is random as in training. All but
curves and weights print a table.
[1], [2] and [4] are the papers in the header of ../hardneg.py.
"""

import argparse
import functools
import math
from pathlib import Path

import common
import numpy as np
import torch
from matplotlib import pyplot as plt
from rows import SHARED, STUDIES
from torch import Tensor

import hardneg
import train
from training import images, report

TEMPERATURES = [float(t) for t in SHARED["t"]]
BY_T = {"cifar10-t": "CIFAR-10", "tiny-t": "Tiny ImageNet"}
# in `forces`
LOSSES = {"simclr": {}, "hcl": {"beta": 0.5, "tau_plus": 0.01}, "ot": {"epsilon": 0.3}}
LOSSES |= {"hard": {"alpha": 0.3}, "simple": {}}
NEAREST = 10
BATCH = 512  # images, as in [2]
COUPLING = train.Options(loss="ot", temperature=0.2, epsilon=0.3)


def panels(rows: int, columns: int, size: tuple, **shared) -> tuple:
    """Make a figure with panels → figure, panels (rows, columns)."""
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)


# ---- From records ------------------------------------------------------------------------------


def curves():
    """Draw the accuracy of each loss over the temperature, a panel for each study."""
    figure, axes = panels(1, 2, (9, 3.6))
    for axis, (name, title) in zip(axes[0], BY_T.items(), strict=True):
        found = common.read(name)
        for loss in ("simclr", "hard", "hcl", "ot"):
            heights = [found[f"{loss}-{t}"][0]["linear"] for t in TEMPERATURES]
            axis.plot(TEMPERATURES, heights, ".-", label=loss)
        untrained = next(iter(found.values()))[0]["untrained"]["linear"]
        axis.axhline(untrained, color="k", ls=":", label="untrained")
        axis.set(xscale="log", xlabel="temperature", ylabel="linear readout, %", title=title)
        axis.set_xticks(TEMPERATURES, TEMPERATURES)
    axes[0][0].legend()
    return figure


# ---- By itself ---------------------------------------------------------------------------------


def circle(n: int, shift: float) -> Tensor:
    """Return n points evenly on the unit circle, turned by an angle, (n, 2)."""
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n + shift
    return torch.stack([angles.cos(), angles.sin()], 1)


def forces_of(loss: str, t: float, n: int = 500, positive: float = 0.7) -> tuple[Tensor, Tensor]:
    """Return the cosines of n negatives, ascending, and the forces on them.

    A force is the derivative of the loss in a negative's cosine, over that in the positive's. It is
    below 0 where the loss pulls the negative."""
    anchors = circle(n, 0.0)  # a batch, as ot needs one, in which all anchors have the same cosines
    positives = circle(n, math.acos(positive)).requires_grad_()
    negatives = circle(n, 0.5 * math.pi / n).requires_grad_()
    options = LOSSES[loss] | {"loss": loss, "temperature": t}
    options |= {"normalize": False, "reduction": "none"}
    each = hardneg.contrastive_loss(anchors, positives, negatives=negatives, **options)
    pull, push = torch.autograd.grad(each[0], (positives, negatives))
    cosines, order = (negatives @ anchors[0]).detach().sort()
    return cosines, (push @ anchors[0] / (pull[0] @ anchors[0]).abs())[order]


def forces():
    """Draw how hard each loss pushes a negative, by its cosine: [4], Fig. 3.

    Print the share of the push that the nearest tenth gets."""
    temperatures = 0.1, 0.3, 1.0
    figure, axes = panels(1, len(temperatures), (10, 3.4), sharey=True)
    lines = [["loss"] + [f"t = {t}" for t in temperatures]]
    for loss in LOSSES:
        line = [loss]
        for axis, t in zip(axes[0], temperatures, strict=True):
            cosines, force = forces_of(loss, t)
            push = force.clamp_min(0)
            nearest = push[-len(push) // 10 :]  # cosines ascend
            line.append(f"{100 * float(nearest.sum() / push.sum()):.0f}")
            axis.plot(cosines, force, label=loss)
            axis.set(title=f"t = {t}", yscale="log", ylim=(1e-6, 1))
            axis.set(xlabel="cosine of the negative")
        lines.append(line)
    print(report.markdown(lines))
    axes[0][0].set_ylabel("force, over that on the positive")
    axes[0][0].legend()
    return figure


# ---- From encoders -----------------------------------------------------------------------------


@functools.cache
def sample(folder: str) -> tuple[Tensor, Tensor]:
    """Read 2000 test images of a folder, in random order → images, labels."""
    some = images.at_most(images.read(train.Options(data=folder, fraction=0.001)), 2000)
    order = torch.randperm(len(some.test), generator=torch.Generator().manual_seed(0))
    return some.test[order], some.test_labels[order]


def embeddings(folder: Path, pixels: Tensor) -> Tensor:
    """Embed images by the encoder of a run → unit rows."""
    encoder = common.encoder_of(folder)
    return hardneg.unit(hardneg.embed(encoder, pixels)[1])


def cosines_by_class(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of unit rows: of all pairs of one class, of all of different classes."""
    pairs = torch.ones(len(labels), len(labels), dtype=torch.bool).triu(1)
    cosines = (z @ z.T)[pairs]
    same = (labels[:, None] == labels)[pairs]
    return cosines[same], cosines[~same]


def histogram(cosines: Tensor, bins: int = 100) -> np.ndarray:
    """Count cosines → the share of each bin from −1 to 1."""
    counts = cosines.clamp(-1, 1).histc(bins, -1, 1)  # rounding leaves some beyond 1
    return (counts / len(cosines)).numpy()


def histograms(study: str, out: Path, pixels: Tensor, labels: Tensor):
    """Draw and compare the cosines of pairs of one class and of different classes: [1], Fig. 3, 4.

    The overlap is the area that two histograms share."""
    lines = [["row", "cosine, one class", "cosine, different classes", "overlap, %"]]
    figure, axes = panels(1, 2, (8, 3.6))
    for name in STUDIES[study].rows:
        means, overlaps = [], []
        for seed in STUDIES[study].seeds:
            z = embeddings(out / study / f"{name}-{seed}", pixels)
            found = cosines_by_class(z, labels)
            one, other = [histogram(cosines) for cosines in found]
            means.append([cosines.mean().item() for cosines in found])
            overlaps.append(100 * float(np.minimum(one, other).sum()))
            if seed == 0:
                axes[0][0].plot(np.linspace(-1, 1, len(one)), one, label=name)
                axes[0][1].plot(np.linspace(-1, 1, len(one)), other, label=name)
        line = [report.spread(some, 2) for some in zip(*means, strict=True)]
        lines.append([name] + line + [report.spread(overlaps)])
    for axis, title in zip(axes[0], ("one class", "different classes"), strict=True):
        axis.set(title=f"pairs of {title}", xlabel="cosine", ylabel="share of pairs")
    axes[0][0].legend()
    print(report.markdown(lines))
    return figure


def ranks(out: Path, pixels: Tensor, labels: Tensor):
    """Draw the coupling's weights, and the share of one class, by rank: [2], Fig. 4, 5."""
    some, of_some = pixels[:BATCH], labels[:BATCH]
    torch.manual_seed(0)
    z_of = {"untrained": hardneg.embed(hardneg.Encoder(), some)[1]}
    for name in ("nce-no-weights", "nce-coupling"):
        z_of[name] = embeddings(out / "objectives" / f"{name}-0", some)
    figure, axes = panels(1, 2, (8, 3.6))
    lines = [["encoder", "of one class, %: nearest 10", "middle 10", "farthest 10"]]
    lines[0] += ["weight: nearest", "nearest 10", "farthest 10"]
    for name, z in z_of.items():
        cosines = (z @ z.T).fill_diagonal_(-torch.inf)
        order = cosines.argsort(1, descending=True)[:, :-1]  # (512, 511), without the anchor
        weights = report.weights_of(z, COUPLING).gather(1, order).mean(0)
        alike = 100 * (of_some[order] == of_some[:, None]).float().mean(0)
        smooth = alike.unfold(0, 20, 1).mean(1)
        axes[0][0].plot(range(1, BATCH), weights.numpy(), label=name)
        axes[0][1].plot(range(10, 10 + len(smooth)), smooth.numpy(), label=name)
        middle = slice(BATCH // 2 - 5, BATCH // 2 + 5)
        shares = [alike[:10].mean(), alike[middle].mean(), alike[-10:].mean()]
        heights = [weights[0], weights[:10].mean(), weights[-10:].mean()]
        lines.append([name] + [f"{x:.1f}" for x in shares] + [f"{x:.2f}" for x in heights])
    axes[0][0].set(title="weight of the coupling", ylabel="times the mean")
    axes[0][1].set(title="of the anchor's class", ylabel="% of anchors")
    for axis in axes[0]:
        axis.set(xlabel="rank of the negative")
    axes[0][1].legend()
    print(report.markdown(lines))
    return figure


def weights(out: Path, pixels: Tensor, labels: Tensor):
    """Draw a map of embeddings, in which an anchor's weights are sizes: [2], Fig. 6.

    It is the plane where the classes' means are farthest apart."""
    z = embeddings(out / "cost-course" / "sqeuclidean-0", pixels)
    means = torch.stack([z[labels == label].mean(0) for label in labels.unique()])
    _, _, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
    x, y = (z @ directions[:2].T).T
    sizes = report.weights_of(z, COUPLING)
    figure, axes = panels(1, 2, (9, 4.5), sharex=True, sharey=True)
    for anchor, axis in enumerate(axes[0]):
        axis.scatter(x, y, 4 * sizes[anchor], labels, cmap="tab10", alpha=0.5, lw=0)
        axis.plot(x[anchor], y[anchor], "k*", ms=12)
        axis.set(xticks=[], yticks=[], title=f"weights of anchor {anchor}")
    return figure


def neighbours(out: Path, pixels: Tensor, labels: Tensor):
    """Draw the cosine of the positive and of the nearest negatives over t: [4], Fig. 8."""
    generator = torch.Generator().manual_seed(0)
    views = [hardneg.view(pixels, generator) for _ in range(2)]
    lines, rows = [["t", "positive", "nearest", "tenth", "gap"]], []
    for t in TEMPERATURES:
        one, other = [embeddings(out / "neighbours" / f"simclr-{t}-0", x) for x in views]
        positive = (one * other).sum(1).mean().item()
        cosines = (one @ other.T).fill_diagonal_(-1)
        nearest = cosines.topk(NEAREST).values.mean(0).tolist()
        rows.append([positive] + nearest)
        shown = [positive, nearest[0], nearest[-1], positive - nearest[0]]
        lines.append([f"{t}"] + [f"{x:.2f}" for x in shown])
    figure, [[axis]] = panels(1, 1, (6, 3.6))
    values = np.array(rows)
    axis.plot(TEMPERATURES, values[:, 1:], ".-", color="C1")
    axis.plot([], [], ".-", color="C1", label=f"{NEAREST} nearest negatives")
    axis.plot(TEMPERATURES, values[:, 0], ".-", color="C0", label="positive")
    axis.set(xscale="log", xlabel="temperature", ylabel="mean cosine")
    axis.set_xticks(TEMPERATURES, TEMPERATURES)
    axis.legend()
    print(report.markdown(lines))
    return figure


RECORDED = {"curves": curves, "forces": forces}
OF_ENCODERS = {"histograms": functools.partial(histograms, "hard-debiased")}
OF_ENCODERS |= {"histograms-beta": functools.partial(histograms, "beta-6")}
OF_ENCODERS |= {"ranks": ranks, "neighbours": neighbours, "weights": weights}


def main():
    """Draw the figures that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=RECORDED | OF_ENCODERS)
    parser.add_argument("--cifar10", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs", "studies"))
    args = parser.parse_args()
    for name in args.figures:
        if name in RECORDED:
            figure = RECORDED[name]()
        else:
            figure = OF_ENCODERS[name](args.out, *sample(args.cifar10))
        figure.savefig(common.RESULTS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
