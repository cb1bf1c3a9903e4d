"""Print and draw what explains a gain: python benchmarks/cause.py

It reads the results that `studies.py cause-search cause cause-t cause-tiny` recorded, prints the
tables of CAUSE.md beside it, and draws results/cause.png and results/curves-effective.png.
"""

from statistics import mean

import studies
from matplotlib import pyplot as plt

from training import compare, report

COLD = studies.EFFECTIVE[0]
GRADIENTS = {  # held weights under `decoupled` push as uniform ones do: these are their control
    "gradient through tilted weights": ("tilted nce", "tilted-held nce"),
    "the same, decoupled": ("tilted decoupled", "uniform decoupled"),
    "gradient through the coupling": ("transported nce", "transported-held nce"),
}
HELD = {
    "tilted weights, held": ("tilted-held nce", "uniform nce"),
    "the coupling, held": ("transported-held nce", "uniform nce"),
}
FACTORS = {  # question: the cell that has it, the same cell without it
    **GRADIENTS,
    "tilted, against a plain loss as cold": ("tilted nce", "uniform decoupled 0.05"),
    "the same, decoupled, as cold": ("tilted decoupled", "uniform decoupled 0.05"),
    **HELD,
    "top, α = 0.3": ("top nce", "uniform nce"),
    "debiasing, τ⁺ = 1/(N + 1)": ("uniform 1/N", "uniform nce"),
    "decoupling": ("uniform decoupled", "uniform nce"),
    "a smaller temperature: 0.045": ("uniform nce 0.045", "uniform nce"),
    "the same, decoupled: 0.05": ("uniform decoupled 0.05", "uniform decoupled"),
    "the same, decoupled: 0.04": ("uniform decoupled 0.04", "uniform decoupled"),
}
SETS = {"cause": "CIFAR-10", "cause-tiny": "Tiny ImageNet"}


def row_of(found, name, t=COLD):
    """Return the runs of a cell, by seed; its name may end in a temperature of its own."""
    if name not in found:
        name = f"{name} {t}"
    return sorted(found.get(name, []), key=lambda run: run["seed"])


def gaps_of(found, one, other, t=COLD, figure="linear"):
    """Return the difference of two cells for each seed."""
    return compare.gaps_of(row_of(found, one, t), row_of(found, other, t), figure)


def mean_gaps(found, factors, figure="linear"):
    """Return the mean of the differences that several factors make, for each seed."""
    known = [cells for cells in factors.values() if row_of(found, cells[0])]
    gaps = [gaps_of(found, *cells, figure=figure) for cells in known]
    return [mean(of_seed) for of_seed in zip(*gaps, strict=True)]


def written(gaps):
    """Write the mean of differences with its interval; in bold if 0 lies outside."""
    middle, half = report.interval(gaps)
    text = f"{middle:+.1f} ± {half:.1f}".replace("-", "−")
    if abs(middle) > half:
        text = f"**{text}**"
    return text


def search_table():
    """Write the design: one run a cell, on the validation split."""
    found = studies.read("cause-search")
    lines = [["weights", *studies.OBJECTIVES, *(f"nce, {t}" for t in studies.EFFECTIVE[1:])]]
    for weights in studies.WEIGHTS:
        cells = [(f"{weights} {objective}", COLD) for objective in studies.OBJECTIVES]
        cells += [(f"{weights} nce", t) for t in studies.EFFECTIVE[1:]]
        accuracies = [row_of(found, *cell)[0]["linear"] for cell in cells]
        lines.append([weights, *(f"{x:.1f}" for x in accuracies)])
    return report.markdown(lines)


def search_factors():
    """Write what each factor changes in the design, paired by cell."""
    found = {tuple(name.split(" ")): runs[0] for name, runs in studies.read("cause-search").items()}
    factors = {  # what changes: weights or the objective, from and to
        "gradient through tilted weights": ("tilted-held", "tilted"),
        "gradient through the coupling": ("transported-held", "transported"),
        "tilted weights, held": ("uniform", "tilted-held"),
        "the coupling, held": ("uniform", "transported-held"),
        "top": ("uniform", "top"),
    }
    for objective in list(studies.OBJECTIVES)[1:]:
        factors[f"{objective} in place of nce"] = ("nce", objective)
    lines = [["factor", "cells", "linear", "kNN"]]
    for factor, (before, after) in factors.items():
        pairs = []
        for cell, run in found.items():
            changed = tuple(after if part == before else part for part in cell)
            if changed != cell and changed in found:
                pairs.append((found[changed], run))
        line = [factor, f"{len(pairs)}"]
        for figure in ("linear", "knn"):
            gaps = [one[figure] - other[figure] for one, other in pairs]
            line.append(written(gaps))
        lines.append(line)
    return report.markdown(lines)


def cells_table(name):
    """Write the deciding cells of a study."""
    found = studies.read(name)
    columns = ["linear %", "kNN %", "over uniform nce", "t_eff measured", "uniformity", "tolerance"]
    lines = [["cell", *columns]]
    for cell in found:
        runs = row_of(found, cell)
        # of version 1 of hardneg.py; version 2 has another statistic, `spread`
        cold = [run["history"][-1]["temperature_effective"] for run in runs]
        over = ""
        if cell != f"uniform nce {COLD}":
            over = written(gaps_of(found, cell, "uniform nce"))
        line = [cell, *(report.spread([run[x] for run in runs]) for x in ("linear", "knn"))]
        line += [over, f"{mean(cold):.3f}"]
        for figure in ("uniformity", "tolerance"):
            line.append(f"{mean(run[figure] for run in runs):.2f}")
        lines.append(line)
    return report.markdown(lines)


def factors_table():
    """Write what each factor changes, with all else equal."""
    sets = {title: studies.read(name) for name, title in SETS.items()}
    lines = [["factor", "cells"]]
    for title in sets:
        lines[0] += [f"{title}, linear", "kNN"]
    for factor, (one, other) in FACTORS.items():
        line = [factor, f"{one} − {other}"]
        for found in sets.values():
            for figure in ("linear", "knn"):
                known = row_of(found, one) and row_of(found, other)
                text = ""
                if known:
                    text = written(gaps_of(found, one, other, figure=figure))
                line.append(text)
        lines.append(line)
    for title, factors in (("all gradients", GRADIENTS), ("both held weights", HELD)):
        line = [f"{title}, mean", ""]
        for found in sets.values():
            for figure in ("linear", "knn"):
                line.append(written(mean_gaps(found, factors, figure)))
        lines.append(line)
    return report.markdown(lines)


def warm_table():
    """Write what the gradient and the weights change at larger effective temperatures."""
    found = studies.read("cause-t")
    lines = [["t_eff", "gradient through tilted weights, linear", "kNN"]]
    lines[0] += ["tilted weights, held, linear", "kNN"]
    for t in studies.EFFECTIVE[1:]:
        line = [f"{t}"]
        for cells in (("tilted nce", "tilted-held nce"), ("tilted-held nce", "uniform nce")):
            line += [written(gaps_of(found, *cells, t, figure)) for figure in ("linear", "knn")]
        lines.append(line)
    return report.markdown(lines)


def tables():
    """Yield the tables of the page, each with a title."""
    yield "linear readout, %, one run a cell", search_table()
    yield "the same by factor, paired by cell", search_factors()
    for name, title in SETS.items():
        yield f"{title}, five seeds", cells_table(name)
    yield "one factor at a time: points, with 95 % intervals", factors_table()
    yield "at larger effective temperatures, CIFAR-10, three seeds", warm_table()


def draw_factors():
    """Draw the difference that each factor makes, with its interval."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for k, (name, title) in enumerate(SETS.items()):
        found = studies.read(name)
        for place, (one, other) in enumerate(FACTORS.values()):
            if row_of(found, one) and row_of(found, other):
                middle, half = report.interval(gaps_of(found, one, other))
                label = title if place == 0 else None
                options = {"fmt": "o", "color": f"C{k}", "label": label, "capsize": 3}
                axis.errorbar(middle, -place - 0.2 * k, xerr=half, **options)
    axis.axvline(0, color="k", lw=0.8)
    axis.set_yticks([-place - 0.1 for place in range(len(FACTORS))], list(FACTORS))
    axis.set(xlabel="difference of linear readout, points, 95 % intervals")
    axis.legend()
    figure.savefig(studies.HERE / "results" / "cause.png", dpi=110)


def effective(options):
    """Return the temperatures of a recorded run: of its push at held weights, and of all of it.

    With its gradient `hcl` pushes, to second order, as a plain loss at t / (1 + 2β) does."""
    t = options["temperature"]
    if options["loss"] == "hcl":
        return t / (1 + options["beta"]), t / (1 + 2 * options["beta"])
    if options["loss"] == "ot":
        t = t * options["epsilon"] / (t + options["epsilon"])
    return t, t


def draw_curves():
    """Draw accuracy over t, and beside it over the effective temperatures."""
    names = {"cifar10-t": "CIFAR-10", "tiny-t": "Tiny ImageNet"}
    titles = "temperature", "effective, weights held", "effective, with the gradient"
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.5), layout="constrained", sharey="row")
    for (name, title), row in zip(names.items(), axes, strict=True):
        found = studies.read(name)
        for loss in ("simclr", "hcl", "ot"):
            runs = [found[f"{loss}-{t}"][0] for t in studies.TEMPERATURES]
            accuracies = [run["linear"] for run in runs]
            held, whole = zip(*[effective(run["options"]) for run in runs], strict=True)
            for axis, places in zip(row, (studies.TEMPERATURES, held, whole), strict=True):
                axis.plot(places, accuracies, ".-", label=loss)
        for axis, label in zip(row, titles, strict=True):
            axis.set(xscale="log", xlabel=label)
        row[0].set(ylabel=f"{title}, linear readout, %")
    axes[0][0].legend()
    figure.savefig(studies.HERE / "results" / "curves-effective.png", dpi=110)


if __name__ == "__main__":
    for title, table in tables():
        print(f"{title}\n{table}\n")
    draw_factors()
    draw_curves()
