"""Train with several losses and seeds, and say which differences hold."""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

from matplotlib import pyplot as plt

from training import report, require, runs
from training.images import read

BASELINES = "simclr", "SimCLR"


def compare(plan: dict[str, list], train: Callable, out: Path) -> dict:
    """Train what is not done yet of each row, and print and draw what came of it.
    plan: the `train.Options` of a row's runs, one for each seed, as `plan_of` makes them.
    train(options, images, known, bar) trains one of them, and returns its results."""
    everything = sum(plan.values(), [])
    kept = {options.out: runs.finished(options) for options in everything}  # or an error, at once
    found, known = {name: [] for name in plan}, {}
    images = read(everything[0])
    passes = sum(options.passes() for options in everything)
    with runs.bar_of(passes * len(images.train)) as bar:
        for name, options in seed_by_seed(plan):
            bar.set_description(options.out.name)
            if kept[options.out]:
                runs.skip(bar, options.passes() * len(images.train))
            with contextlib.redirect_stdout(io.StringIO()):
                results = train(options, images, known, bar)  # or those that are there
            found[name].append(results)
    if images.classes:
        best_first = sorted(found.items(), key=linear_of_row, reverse=True)
        found = dict(best_first)
        runs.write(out / "compare.png", draw(found).png())
    runs.write_json(out / "compare.json", found)
    print(f"\n{table_of(found)}\n\n{verdict(found)}\nsaved in {out}/")
    return found


def plan_of(rows: list, seeds: int, out: Path) -> dict[str, list]:
    """Plan the runs of a comparison from the `train.Options` of each loss → {loss: its runs}.
    Losses are compared after equally many epochs, in batches of one size, at one rate."""
    require(seeds >= 1, "--seeds", seeds, "at least 1")
    alike = {"epochs": max(row.epochs for row in rows)}
    alike["batch_size"] = min(row.batch_size for row in rows)
    alike["lr"] = min(row.lr for row in rows)
    plan = {}
    for row in rows:
        plan[row.loss] = []
        for seed in range(row.seed, row.seed + seeds):
            own = alike | {"seed": seed, "out": out / f"{row.loss}-{seed}"}
            plan[row.loss].append(row.but(**own))
    return plan


def seed_by_seed(plan: dict[str, list]) -> Iterator[tuple]:
    """Yield the runs of a plan, (name, options): all rows with the first seed come first."""
    for options_of_a_seed in zip(*plan.values(), strict=True):
        yield from zip(plan, options_of_a_seed, strict=True)


def linear_of_row(row: tuple) -> float:
    """Return the mean accuracy of a row, (name, results)."""
    return mean(run["linear"] for run in row[1])


def table_of(found: dict[str, list]) -> str:
    """Write {name: results of each seed} as a Markdown table.
    If one row is `simclr`, the last column has each row's difference to it."""
    some = next(iter(found.values()))
    rows = {f"`{name}`": results for name, results in found.items()}
    rows["untrained encoder"] = [run["untrained"] for run in some]
    rows["raw pixels"] = [some[0]["raw"]]
    lines = report.cells(rows)
    baseline = baseline_of(found)
    judged = len(some) > 1 and some[0]["linear"] is not None  # None: without classes
    if judged and baseline in BASELINES:
        lines[0].append(f"linear, over `{baseline}`")
        gaps = {name: report.gain(gaps_of(found[name], found[baseline])) for name in found}
        gaps[baseline] = ""
        for line, gap in itertools.zip_longest(lines[1:], gaps.values(), fillvalue=""):
            line.append(gap)
    return report.markdown(lines)


def baseline_of(found: dict[str, list]) -> str:
    """Return the row that the others are compared with: SimCLR, or else the first."""
    for name in BASELINES:
        if name in found:
            return name
    return next(iter(found))


def gaps_of(one: list, other: list, figure: str = "linear") -> list[float]:
    """Return the differences of two rows of results, paired by seed.
    A seed that one row lacks, of a stopped study, is left out."""
    of_seed = {run["seed"]: run[figure] for run in other}
    return [run[figure] - of_seed[run["seed"]] for run in one if run["seed"] in of_seed]


def runs_of(rows: dict[str, list]) -> dict[str, list]:
    """Make results of {name: the accuracy with each seed from 0 on}, for `verdict`."""
    found = {}
    for name, values in rows.items():
        found[name] = [{"seed": seed, "linear": value} for seed, value in enumerate(values)]
    return found


def verdict(found: dict[str, list]) -> str:
    """Say which rows differ from the baseline: those whose 95 % interval excludes 0."""
    some = next(iter(found.values()))
    n = len(some)
    if n < 2 or len(found) < 2 or some[0]["linear"] is None:
        return "No difference can be judged: that takes two losses, two seeds and classes."
    baseline = baseline_of(found)
    excluding, including = [], []
    for name in found:
        if name != baseline:
            gaps = gaps_of(found[name], found[baseline])
            middle, half = report.interval(gaps)
            said = excluding if abs(middle) > half else including
            said.append(f"{name} {report.gain(gaps)}")
    text = f"Differences to {baseline}, paired over {n} seeds, with 95 % intervals. "
    text += f"Those that exclude 0: {', '.join(excluding) or 'none'}. "
    return text + f"Those that include 0: {', '.join(including) or 'none'}."


def draw(found: dict[str, list]) -> report.Picture:
    """Draw the linear accuracy of each row, with a point for each seed."""
    figure, axis = plt.subplots(figsize=(9, 2 + 0.5 * len(found)), layout="constrained")
    for name in reversed(found):
        values = [run["linear"] for run in found[name]]
        axis.barh(name, mean(values), alpha=0.6, color="C0")
        axis.plot(values, [name] * len(values), "k.", ms=5)
    best, row = next(iter(found.items()))
    axis.axvline(mean(run["untrained"]["linear"] for run in row), color="k", ls=":")
    title = f"{best} reaches {report.spread([run['linear'] for run in row])} %"
    axis.set(xlabel="linear readout, % of test images", title=title)
    caption = "Bars are means, points seeds, the dotted line the untrained encoder."
    return report.Picture(title, caption, figure)
