"""Draw: python benchmarks/figures.py curves forces ranks --cifar10 FOLDER

Each figure goes to results/FIGURE.png. curves, curves-effective, long, cause and losses are drawn
from records; forces by itself. histograms, ranks and neighbours read the encoders that a study left
in --out: those of hard-debiased, objectives and neighbours. They embed 2000 test images of FOLDER;
the second view of an image is random as in training. These three, and forces, print a table.
[1], [2] and [4] are the papers in the header of ../hardneg.py.
"""

import argparse
import functools
import math
from pathlib import Path
from statistics import mean

import common
import numpy as np
import tables
import torch
from matplotlib import pyplot as plt
from rows import SHARED
from torch import Tensor

import hardneg
import train
from training import compare, images, report

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
            axis.plot(TEMPERATURES, accuracies(found, loss), ".-", label=loss)
        untrained = next(iter(found.values()))[0]["untrained"]["linear"]
        axis.axhline(untrained, color="k", ls=":", label="untrained")
        axis.set(xscale="log", xlabel="temperature", ylabel="linear readout, %", title=title)
        axis.set_xticks(TEMPERATURES, TEMPERATURES)
    axes[0][0].legend()
    return figure


def accuracies(found: dict, loss: str) -> list[float]:
    """List the linear readout of a loss over the temperature."""
    return [found[f"{loss}-{t}"][0]["linear"] for t in TEMPERATURES]


def effective(options: dict) -> tuple[float, float]:
    """Return the temperatures of a recorded run: of its push at held weights, and of all of it.

    With its gradient `hcl` pushes, to second order, as a plain loss at t / (1 + 2β) does."""
    t = options["temperature"]
    if options["loss"] == "hcl":
        return t / (1 + options["beta"]), t / (1 + 2 * options["beta"])
    if options["loss"] == "ot":
        t = t * options["epsilon"] / (t + options["epsilon"])
    return t, t


def curves_effective():
    """Draw accuracy over t, and beside it over the effective temperatures."""
    titles = "temperature", "effective, weights held", "effective, with the gradient"
    figure, axes = panels(2, 3, (10, 5.5), sharey="row")
    for (name, title), row in zip(BY_T.items(), axes, strict=True):
        found = common.read(name)
        for loss in ("simclr", "hcl", "ot"):
            options = [found[f"{loss}-{t}"][0]["options"] for t in TEMPERATURES]
            held, whole = zip(*map(effective, options), strict=True)
            for axis, places in zip(row, (TEMPERATURES, held, whole), strict=True):
                axis.plot(places, accuracies(found, loss), ".-", label=loss)
        for axis, label in zip(row, titles, strict=True):
            axis.set(xscale="log", xlabel=label)
        row[0].set(ylabel=f"{title}, linear readout, %")
    axes[0][0].legend()
    return figure


def long():
    """Draw what rows gain by kNN over the baseline in the course of the runs.

    Rows at the baseline's temperature are in the left panel."""
    found = common.read("long")
    baseline = compare.baseline_of(found)
    temperatures = {row: some[0]["options"]["temperature"] for row, some in found.items()}
    t = temperatures[baseline]
    figure, axes = panels(1, 2, (9, 3.6), sharey=True)
    for row in [row for row in found if row != baseline]:
        axis = axes[0][int(temperatures[row] != t)]
        epochs, gains = [], []
        for epoch, then in tables.measured(found):
            epochs.append(epoch)
            gains.append(mean(compare.gaps_of(then[row], then[baseline], "knn")))
        axis.plot(epochs, gains, ".-", label=row)
    for axis, title in zip(axes[0], (f"t = {t}", "another t"), strict=True):
        axis.axhline(0, color="k", ls=":", label=f"{baseline}, t = {t}")
        axis.set(title=title, xlabel="epoch", ylabel="gain in kNN, points")
        axis.legend()
    return figure


def cause():
    """Draw the difference that each factor makes, with its interval."""
    figure, [[axis]] = panels(1, 1, (8, 5))
    places = range(0, -len(tables.FACTORS), -1)
    for k, (study, title) in enumerate(tables.SETS.items()):
        axis.plot([], [], f"C{k}o", label=title)
        for place, gap in zip(places, tables.FACTORS.values(), strict=True):
            gaps = tables.gaps_of(study, gap)
            if gaps:
                middle, half = report.interval(gaps)
                axis.errorbar(middle, place - 0.2 * k, xerr=half, fmt=f"C{k}o", capsize=3)
    axis.axvline(0, color="k", lw=0.8)
    axis.set_yticks([place - 0.1 for place in places], list(tables.FACTORS))
    axis.set(xlabel="difference of linear readout, points, 95 % intervals")
    axis.legend()
    return figure


def losses():
    """Draw the losses' time and memory over the batch, peers dashed."""
    found = common.read("losses")
    peers = [name for name in found["differences"] if not name.startswith("old ")]
    sizes = found["sizes"]
    labels = {"seconds": "ms, forward and backward", "memory": "MiB above the inputs"}
    figure, axes = panels(1, 2, (11, 4.5))
    for axis, (measure, label) in zip(axes[0], labels.items(), strict=True):
        for k, name in enumerate(["three products", "simclr", "hcl", "ot", "hard"] + peers):
            rows = [row for row in found["rows"] if row["case"] == name]
            scale = {"seconds": 1000, "memory": 1}[measure]
            points = [scale * row[measure] for row in rows]
            style = "o--" if name in peers else "o-"
            color = plt.cm.tab10(k - 1) if k else "k"
            axis.plot(sizes[: len(points)], points, style, ms=3, color=color, label=name)
        axis.set(xscale="log", yscale="log", xlabel="2B", ylabel=label)
        axis.set_xticks(sizes, sizes)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
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


def histograms(out: Path, pixels: Tensor, labels: Tensor):
    """Draw and compare the cosines of pairs of one class and of different classes: [1], Fig. 3.

    The overlap is the area that two histograms share."""
    lines = [["loss", "cosine, one class", "cosine, different classes", "overlap, %"]]
    figure, axes = panels(1, 2, (8, 3.6))
    for name in ("neither", "debiased", "hard", "both"):
        means, overlaps = [], []
        for seed in range(3):
            z = embeddings(out / "hard-debiased" / f"{name}-{seed}", pixels)
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


RECORDED = {"curves": curves, "curves-effective": curves_effective, "long": long, "cause": cause}
RECORDED |= {"losses": losses, "forces": forces}
OF_ENCODERS = {"histograms": histograms, "ranks": ranks, "neighbours": neighbours}


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
