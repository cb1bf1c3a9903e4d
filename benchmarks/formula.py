"""Is a loss with weights a plain one at another temperature? python benchmarks/formula.py

Prints the tables of studies/formula.md from records, and draws results/formula.png and pays.png.
The page says what a setting, a gap and noise are.
"""

import itertools
import math
from statistics import mean
from typing import NamedTuple

import common
import numpy as np
from matplotlib import pyplot as plt
from rows import STUDIES

import hardneg
import train
from training import report

SETTINGS = {  # the studies of each, and the one that its noise is taken from
    "CIFAR-10, 10 epochs": ("cifar10-t", "cifar10"),
    "Tiny ImageNet, 10 epochs": ("tiny-t", "tiny"),
    "CIFAR-10, 12 epochs": ("temperature cause cause-t beta hard-debiased objectives cost", "beta"),
    "CIFAR-10, validation split": ("cause-search", "cause"),
    "shapes": ("defaults", "shapes"),
    "shapes, batches of 64": ("shapes-64-search", "shapes-64"),
    "CIFAR-10, 60 epochs": ("long pays-cifar10 pays-decoupled", "long"),
    "Tiny ImageNet, 60 epochs": ("pays-tiny", "tiny"),
}
SHORT, LONG = list(SETTINGS)[:3], list(SETTINGS)[-2:]
KINDS = {  # weights, whether they are held, objective
    ("uniform", False, "nce"): "plain",
    ("uniform", False, "decoupled"): "`decoupled`",
    ("tilted", False, "nce"): "tilted",
    ("tilted", True, "nce"): "tilted, held",
    ("transported", True, "nce"): "`ot`, held",
}
FIGURES = {"linear": "linear", "knn": "kNN"}
DRAWS = 1000
GENERATOR = np.random.default_rng(0)  # one for all settings, so that their noise is not the same


class Row(NamedTuple):
    """Hold what was recorded of a loss in a setting."""

    setting: str
    kind: str
    t: float
    beta: float  # for `ot` t/ε
    tau_plus: float
    sigma: float
    values: dict  # figure: {seed: accuracy, then DRAWS of it with noise}

    def at(self, c: float) -> float:
        """Return the temperature t/(1 + cβ)."""
        return self.t / (1 + c * self.beta)

    def cold(self) -> float:
        """Return t̂: t/(1 + 2β) with the gradient through the weights, else t/(1 + β)."""
        return self.at(2 if self.kind == "tilted" else 1)

    def ratio(self) -> float:
        """Return σ/t̂."""
        return self.sigma / self.cold()

    def gaps(self, figure: str, t: float) -> np.ndarray | None:
        """Return the gap to the plain curve at a temperature, then its draws."""
        curve = CURVES[self.setting]
        logs = [math.log(row.t) for row in curve]
        shares = [np.interp(math.log(t), logs, unit) for unit in np.eye(len(logs))]
        parts = [(x, row.values[figure]) for x, row in zip(shares, curve, strict=True) if x > 0]
        own = self.values[figure]
        seeds = own.keys() & set.intersection(*[set(plain) for _, plain in parts])
        gaps = [own[seed] - sum(x * plain[seed] for x, plain in parts) for seed in seeds]
        return np.mean(gaps, 0) if gaps else None

    def is_reached(self) -> bool:
        """Return whether the plain curve has t and t̂; 0.067 stands for 0.2/3."""
        curve = CURVES[self.setting]
        inside = self.cold() > 0.99 * curve[0].t and self.t < 1.01 * curve[-1].t
        gaps = [self.gaps("knn", of(self)) for of in PLACES.values()]
        return inside and all(gap is not None for gap in gaps)


PLACES = {"t": lambda row: row.t, "t/(1 + β)": lambda row: row.at(1), "t̂": Row.cold}


# ---- Records -----------------------------------------------------------------------------------


def cell_of(study: str, row: str) -> tuple | None:
    """Return the kind of weights, t, β and τ⁺ of a row; None if the formula is not about it."""
    words = f"{STUDIES[study].common} {STUDIES[study].rows[row]}"
    options = train.Options(**train.parse(words.split()))
    settled = hardneg.resolve({name: getattr(options, name) for name in train.CRITERION})
    parts = tuple(settled[name] for name in ("weights", "detach_weights", "objective"))
    t, tau_plus = settled["temperature"], settled["tau_plus"]
    unusual = options.method != "simclr" or options.anneal or settled["cost"] != "sqeuclidean"
    if unusual or parts not in KINDS or (tau_plus and parts[0] == "uniform"):
        return None
    betas = {"uniform": 0.0, "tilted": settled["beta"], "transported": t / settled["epsilon"]}
    return KINDS[parts], t, betas[parts[0]], tau_plus


def cells_of(studies: str) -> dict[tuple, dict[int, list]]:
    """Read the runs of studies → {cell: {seed: runs}}, by kind and temperature."""
    cells = {}
    for study in studies.split():
        for row in common.read(study).keys() & STUDIES[study].rows.keys():
            of_seed = cells.setdefault(cell_of(study, row), {})
            for run in common.read(study)[row]:
                of_seed.setdefault(run["seed"], []).append(run)
    cells.pop(None, None)
    return dict(sorted(cells.items()))


def noise_of(study: str, figure: str) -> float:
    """Return the standard deviation over seeds of a study's rows, less what all of them share."""
    cells = list(cells_of(study).values())
    table = np.array([[runs[0][figure] for _, runs in sorted(cell.items())] for cell in cells])
    table -= table.mean(0)
    table -= table.mean(1, keepdims=True)
    return math.sqrt((table**2).sum() / math.prod(size - 1 for size in table.shape))


def normal_of(run: dict) -> float:
    """Return σ of normal cosines c of mean 0: their uniformity is log E e^{4c − 4} = 8σ² − 4."""
    return math.sqrt((run["uniformity"] + 4) / 8)


def rows_of(setting: str) -> list[Row]:
    """Read the rows of a setting."""
    studies, study = SETTINGS[setting]
    rows = []
    noise = {figure: noise_of(study, figure) for figure in FIGURES}
    for cell, of_seed in cells_of(studies).items():
        values = {figure: {} for figure in FIGURES}
        for figure, (seed, runs) in itertools.product(FIGURES, sorted(of_seed.items())):
            draws = noise[figure] * GENERATOR.standard_normal(DRAWS)
            values[figure][seed] = mean(run[figure] for run in runs) + np.append(0, draws)
        runs = sum(of_seed.values(), [])
        sigma = mean(run.get("history", [{}])[-1].get("spread", normal_of(run)) for run in runs)
        rows.append(Row(setting, *cell, sigma, values))
    return rows


READ = [row for setting in SETTINGS for row in rows_of(setting)]
CURVES = {name: [row for row in READ if row[:2] == (name, "plain")] for name in SETTINGS}
ROWS = [row for row in READ if row.kind != "plain" and row.is_reached()]
SLOPED = [row for row in ROWS if row.kind == "tilted" and row.setting in SHORT]


# ---- Tables ------------------------------------------------------------------------------------


def distances(settings: list[str]) -> str:
    """Write how far rows are from the plain curve, and how far noise alone would set them."""
    lines = [["setting, weights", "rows"]]
    for title in FIGURES.values():
        lines[0] += [f"{title}: at t", *list(PLACES)[1:], "noise"]
    for kind in dict.fromkeys(row[:2] for row in ROWS if row.setting in settings):
        rows = [row for row in ROWS if row[:2] == kind]
        line = [", ".join(kind), str(len(rows))]
        for figure in FIGURES:
            sizes = [[row.gaps(figure, of(row))[0] for row in rows] for of in PLACES.values()]
            sizes.append([row.gaps(figure, row.cold())[1:].std() for row in rows])
            line += [f"{np.sqrt(np.mean(np.square(some))):.2f}" for some in sizes]
        lines.append(line)
    return report.markdown(lines)


def gains() -> str:
    """Write the mean gap of rows with a like σ/t̂, in short runs."""
    groups = {"with the gradient": SLOPED}
    groups["… and τ⁺ = 0"] = [row for row in SLOPED if row.tau_plus == 0]
    groups["held"] = [row for row in ROWS if row.setting in SHORT and "held" in row.kind]
    lines = [["weights", "σ/t̂", "rows"]]
    for title in FIGURES.values():
        lines[0] += [f"{title}: from t̂", "from t/(1 + β)"]
    for title, (low, high) in itertools.product(groups, ((0, 1.3), (1.3, 2), (2, 5))):
        rows = [row for row in groups[title] if low <= row.ratio() < high]
        line = [title, f"{low} to {high}", str(len(rows))]
        for figure, of in itertools.product(FIGURES, (Row.cold, PLACES["t/(1 + β)"])):
            gaps = np.mean([row.gaps(figure, of(row)) for row in rows], 0)
            line.append(f"{gaps[0]:+.2f} ± {gaps[1:].std():.2f}")
        lines.append(line)
    return report.markdown(lines)


def nearest() -> str:
    """Write the c for which the plain curve at t/(1 + cβ) is nearest to these rows."""
    grid, texts = np.arange(0, 5, 0.05), []
    for figure, title in FIGURES.items():
        gaps = np.array([[row.gaps(figure, row.at(c)) for row in SLOPED] for c in grid])
        best = grid[np.square(gaps).sum(1).argmin(0)]
        low, high = np.percentile(best[1:], (2.5, 97.5))
        texts.append(f"{title} {best[0]:.1f}, {low:.1f} to {high:.1f}")
    return f"c: {'; '.join(texts)}"


# ---- Picture -----------------------------------------------------------------------------------


def draw():
    """Draw accuracies, less the best of the plain curve, over three temperatures; gaps over σ/t̂."""
    figure, axes = plt.subplots(2, 4, figsize=(12, 6), layout="constrained")
    marks = {"tilted": "o", "tilted, held": "s", "`ot`, held": "^"}
    for (*line, last), (name, title) in zip(axes, FIGURES.items(), strict=True):
        for color, setting in zip("C0 C1 C4 k".split(), SHORT + LONG[:1], strict=True):
            ts = [row.t for row in CURVES[setting]]
            plain = [mean(x[0] for x in row.values[name].values()) for row in CURVES[setting]]
            plain = np.array(plain) - max(plain)
            rows = [row for row in ROWS if row.setting == setting and row.kind in marks]
            for axis, (place, of) in zip(line, PLACES.items(), strict=True):
                axis.plot(ts, plain, color=color, label=setting)
                axis.set(xscale="log", xlabel=place)
                for row in rows:
                    height = np.interp(math.log(of(row)), np.log(ts), plain)
                    gap = row.gaps(name, of(row))[0]
                    axis.plot(of(row), height + gap, marks[row.kind], color=color, ms=4)
            for row in rows:
                gap = row.gaps(name, row.cold())[0]
                last.plot(row.ratio(), gap, marks[row.kind], color=color, ms=4)
        line[0].set(ylabel=f"{title}, less the best plain one")
        line[1].sharey(line[0])
        line[2].sharey(line[0])
        last.set(xlabel="σ/t̂", ylabel="gap at t̂")
        last.axhline(0, color="k", lw=0.8)
    for kind, mark in marks.items():
        last.plot([], [], f"k{mark}", label=kind.replace("`", ""))
    line[0].legend(fontsize=7)
    last.legend(fontsize=7)
    return figure


def draw_long():
    """Draw linear readout over t after 60 epochs: a dot a run, a line through the means."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, setting in zip(axes, LONG, strict=True):
        for color, kind in zip("k C2 C0 C1 C4".split(), KINDS.values(), strict=True):
            rows = [row for row in READ if row[:2] == (setting, kind) and not row.tau_plus]
            runs = {row.t: [x[0] for x in row.values["linear"].values()] for row in rows}
            for t, values in runs.items():
                axis.plot([t] * len(values), values, ".", color=color)
            means = [mean(values) for values in runs.values()]
            axis.plot(list(runs), means, color=color, label=kind.replace("`", ""))
        axis.set(xscale="log", xlabel="t", ylabel="linear readout, %", title=setting)
        axis.set_xticks([0.07, 0.1, 0.2, 0.4], [0.07, 0.1, 0.2, 0.4])
        axis.minorticks_off()
    axes[0].legend()
    return figure


def main():
    """Print the tables, and draw."""
    print(f"{distances(list(SETTINGS)[:-2])}\n\n{distances(LONG)}\n\n{gains()}\n\n{nearest()}")
    draw().savefig(common.RESULTS / "formula.png", dpi=110)
    draw_long().savefig(common.RESULTS / "pays.png", dpi=110)


if __name__ == "__main__":
    main()
