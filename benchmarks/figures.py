"""Draw pictures of the records: python benchmarks/figures.py gains curves pays

Each goes to results/FIGURE.png.
"""

import argparse
from statistics import mean

import common
import sentence_rows
import tables
from matplotlib import pyplot as plt
from rows import SHARED

TEMPERATURES = [float(t) for t in SHARED["t"]]
COLORS = {"simclr": "black", "hard": "tab:orange", "hcl": "crimson", "ot": "tab:blue"}
# the rows of `pays`, and how their names begin
KINDS = {"simclr ": "black", "tilted ": "crimson", "decoupled ": "tab:blue"}


def curves():
    """Draw the accuracy of each loss over the temperature, a panel for each study."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    studies = {"cifar10-t": "CIFAR-10", "tiny-t": "Tiny ImageNet"}
    for axis, (name, title) in zip(axes, studies.items(), strict=True):
        found = common.read(name)
        for loss in ("simclr", "hard", "ot", "hcl"):  # the last is drawn above the others
            heights = [found[f"{loss}-{t}"][0]["linear"] for t in TEMPERATURES]
            width = 2.5 if loss == "hcl" else 1.5
            axis.plot(TEMPERATURES, heights, ".-", label=loss, color=COLORS[loss], lw=width)
        untrained = next(iter(found.values()))[0]["untrained"]["linear"]
        axis.axhline(untrained, color="gray", ls=":", label="untrained")
        axis.set(xscale="log", xlabel="temperature", ylabel="linear readout, %", title=title)
        axis.set_xticks(TEMPERATURES, TEMPERATURES)
    axes[0].legend()
    return figure


def pays():
    """Draw linear readout over t after 60 epochs: a dot a run, a line through the means."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    sets = {"CIFAR-10": ("pays-cifar10", "pays-decoupled"), "Tiny ImageNet": ("pays-tiny",)}
    for axis, (title, studies) in zip(axes, sets.items(), strict=True):
        rows = {row: runs for study in studies for row, runs in common.read(study).items()}
        if title == "CIFAR-10":  # of three seeds each
            long = common.read("long")
            rows |= {"tilted 0.1": long["tilted"], "simclr 0.067": long["simclr 0.067"]}
        for kind, color in KINDS.items():
            some = {float(row.split()[1]): rows[row] for row in rows if row.startswith(kind)}
            heights = {t: [run["linear"] for run in some[t]] for t in sorted(some)}
            for t, values in heights.items():
                axis.plot([t] * len(values), values, ".", color=color)
            if heights:
                means = [mean(values) for values in heights.values()]
                axis.plot(list(heights), means, color=color, label=kind)
        axis.set(xscale="log", xlabel="t", ylabel="linear readout, %", title=title)
        axis.set_xticks([0.07, 0.1, 0.2, 0.4], [0.07, 0.1, 0.2, 0.4])
        axis.minorticks_off()
    axes[1].legend(*axes[0].get_legend_handles_labels())
    return figure


def gains():
    """Draw what the front page compares."""
    rows = {}
    for setting, *_, steps, time in tables.judged():
        rows |= {f"{setting}, over {claim.over}": claim for claim in steps + time}
    return intervals(rows, "gain in points (grey if unclear)")


def sentences():
    """Draw the questions of the study of sentences."""
    rows = {x: tables.judge("sentences", x) for x in sentence_rows.QUESTIONS}
    return intervals(rows, "difference in MRR, in points (grey if unclear)")


def intervals(rows, label):
    """Draw {name: claim} as means with their 95 % intervals, in grey if they have 0."""
    figure, axis = plt.subplots(figsize=(9, 0.5 + 0.33 * len(rows)), layout="constrained")
    for place, claim in enumerate(rows.values()):
        color = "crimson" if abs(claim.middle) > claim.half else "tab:gray"
        axis.errorbar(claim.middle, place, xerr=claim.half, fmt="o", color=color, capsize=4, lw=2)
    axis.axvline(0, color="black", lw=1)
    axis.set_yticks(range(len(rows)), [name.replace("`", "") for name in rows])
    axis.invert_yaxis()
    axis.set_xlabel(label)
    return figure


FIGURES = {"gains": gains, "sentences": sentences, "curves": curves, "pays": pays}


def main():
    """Draw the figures that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=FIGURES)
    for name in parser.parse_args().figures:
        FIGURES[name]().savefig(common.RESULTS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
