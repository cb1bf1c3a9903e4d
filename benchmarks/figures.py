"""Draw figures of the papers from trained encoders:
python benchmarks/figures.py histograms ranks neighbours --cifar10 FOLDER

A figure reads the runs of a study: histograms of hard-debiased, ranks of objectives, neighbours of
neighbours. It prints a table, and writes results/FIGURE.png. Test images are embedded, 2000 of
them; the second view of an image is random as in training.
[1] Robinson, Chuang, Sra, Jegelka: Contrastive Learning with Hard Negative Samples. App. B, Fig. 3
[2] Jiang, Ishwar, Aeron: Hard Negative Sampling via Regularized Optimal Transport. Fig. 4, 5
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. Fig. 8
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
import train
from training import images, report, runs

HERE = Path(__file__).resolve().parent
OF_DEBIASING = "neither", "debiased", "hard", "both"
OF_COUPLING = "nce-no-weights", "nce-coupling"
TEMPERATURES = 0.07, 0.1, 0.2, 0.3, 0.5, 1.0
NEAREST = 10
BATCH = 512  # images, as in [2]
COUPLING = train.Options(loss="ot", temperature=0.2, epsilon=0.3)


def embeddings(folder, pixels):
    """Embed images by the encoder of a run → unit rows."""
    encoder = runs.encoder_of(runs.read_checkpoint(folder, "cpu"))
    return hardneg.unit(hardneg.embed(encoder, pixels)[1])


def cosines_by_class(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines of unit rows: of all pairs of one class, of all of different classes."""
    pairs = torch.ones(len(labels), len(labels), dtype=torch.bool).triu(1)
    cosines = (z @ z.T).cpu()[pairs]
    same = (labels[:, None] == labels).cpu()[pairs]
    return cosines[same], cosines[~same]


def histogram(cosines: Tensor, bins: int = 100) -> tuple:
    """Count cosines → the places of the bins from −1 to 1, and the share of each."""
    counts = cosines.clamp(-1, 1).histc(bins, -1, 1)  # rounding leaves some beyond 1
    return torch.linspace(-1, 1, bins).numpy(), (counts / len(cosines)).numpy()


def overlap(one: Tensor, other: Tensor) -> float:
    """Return the area that the histograms of two samples of cosines share, from 0 to 1."""
    return float(np.minimum(histogram(one)[1], histogram(other)[1]).sum())


def histograms(folder, pixels, labels):
    """Draw and compare the cosines of pairs of one class and of different classes: [1], Fig. 3."""
    lines = [["loss", "cosine, one class", "cosine, different classes", "overlap, %"]]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for name in OF_DEBIASING:
        of_seeds = [
            cosines_by_class(embeddings(folder / f"{name}-{seed}", pixels), labels)
            for seed in range(3)
        ]
        line = [name]
        for kind in range(2):
            line.append(report.spread([found[kind].mean().item() for found in of_seeds], 2))
        line.append(report.spread([100 * overlap(*found) for found in of_seeds]))
        lines.append(line)
        for axis, cosines in zip(axes, of_seeds[0], strict=True):
            axis.plot(*histogram(cosines), label=name)
    for axis, title in zip(axes, ("pairs of one class", "pairs of different classes"), strict=True):
        axis.set(title=title, xlabel="cosine", ylabel="share of pairs")
    axes[0].legend()
    figure.savefig(HERE / "results" / "histograms.png", dpi=110)
    print(report.markdown(lines))


def ranks(folder, pixels, labels):
    """Draw the coupling's weights, and the share of one class, by rank: [2], Fig. 4, 5."""
    some, of_some = pixels[:BATCH], labels[:BATCH]
    torch.manual_seed(0)
    z_of = {"untrained": hardneg.embed(hardneg.Encoder(), some)[1]}
    z_of |= {name: embeddings(folder / f"{name}-0", some) for name in OF_COUPLING}
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    places = torch.arange(1, BATCH)
    lines = [
        ["encoder", "of one class, %: nearest 10", "middle 10", "farthest 10", "weight: nearest"]
    ]
    lines[0] += ["nearest 10", "farthest 10"]
    for name, z in z_of.items():
        cosines = (z @ z.T).fill_diagonal_(-torch.inf)
        order = cosines.argsort(1, descending=True)[:, :-1]  # (512, 511), without the anchor
        weights = report.weights_of(z, COUPLING).gather(1, order).mean(0)
        alike = 100 * (of_some[order] == of_some[:, None]).float().mean(0)
        smooth = alike.unfold(0, 20, 1).mean(1)
        axes[0].plot(places.numpy(), weights.numpy(), label=name)
        axes[1].plot(range(10, 10 + len(smooth)), smooth.numpy(), label=name)
        middle = slice(BATCH // 2 - 5, BATCH // 2 + 5)
        shares = [alike[:10].mean(), alike[middle].mean(), alike[-10:].mean()]
        heights = [weights[0], weights[:10].mean(), weights[-10:].mean()]
        lines.append([name] + [f"{x:.1f}" for x in shares] + [f"{x:.2f}" for x in heights])
    axes[0].set(
        title="weight of the coupling", xlabel="rank of the negative", ylabel="times the mean"
    )
    axes[1].set(title="of the anchor's class", xlabel="rank of the negative", ylabel="% of anchors")
    axes[1].legend()
    figure.savefig(HERE / "results" / "ranks.png", dpi=110)
    print(report.markdown(lines))


def neighbours(folder, pixels):
    """Draw the cosine of the positive and of the nearest negatives over t: [4], Fig. 8."""
    generator = torch.Generator().manual_seed(0)
    views = [hardneg.view(pixels, generator) for _ in range(2)]
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    names = ["positive", "nearest", "tenth", "gap"]
    lines = [["t", *names]]
    rows = []
    for t in TEMPERATURES:
        one, other = (embeddings(folder / f"simclr-{t}-0", x) for x in views)
        positive = (one * other).sum(1).mean().item()
        cosines = (one @ other.T).fill_diagonal_(-1)
        nearest = cosines.topk(NEAREST).values.mean(0).tolist()
        rows.append([positive, *nearest])
        figures = positive, nearest[0], nearest[-1], positive - nearest[0]
        lines.append([f"{t}", *(f"{x:.2f}" for x in figures)])
    for k, values in enumerate(zip(*rows, strict=True)):
        color = "C0" if k == 0 else "C1"
        label = {0: "positive", 1: f"{NEAREST} nearest negatives"}.get(k)
        axis.plot(TEMPERATURES, values, ".-", color=color, label=label)
    axis.set(xscale="log", xlabel="temperature", ylabel="mean cosine")
    axis.set_xticks(TEMPERATURES, [str(t) for t in TEMPERATURES])
    axis.legend()
    figure.savefig(HERE / "results" / "neighbours.png", dpi=110)
    print(report.markdown(lines))


def main():
    """Read the runs, print the tables and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=("histograms", "ranks", "neighbours"))
    parser.add_argument("--cifar10", metavar="FOLDER", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs", "studies"))
    args = parser.parse_args()
    everything = images.read(train.Options(data=args.cifar10, fraction=0.001))
    some = images.at_most(everything, 2000)
    order = torch.randperm(len(some.test), generator=torch.Generator().manual_seed(0))
    pixels, labels = some.test[order], some.test_labels[order]
    if "histograms" in args.figures:
        histograms(args.out / "hard-debiased", pixels, labels)
    if "ranks" in args.figures:
        ranks(args.out / "objectives", pixels, labels)
    if "neighbours" in args.figures:
        neighbours(args.out / "neighbours", pixels)


if __name__ == "__main__":
    main()
