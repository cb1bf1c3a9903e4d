"""Train with several losses and seeds, and compare what they learned."""

import itertools
import json
from statistics import mean

from training import ranks, report, require, runs, shown
from training.images import read


def compare(plan, train, out):
    """Train all runs of a plan that are not finished. Print a table of their results.
    plan has a list of `train.Options` for each row. `plan_of` makes it.
    train(options, images, known) trains one run and returns its results."""
    in_order, path = list(seed_by_seed(plan)), out / "compare.json"
    if path.exists() and not in_order[0][1].overwrite:
        with runs.readable(path):
            if not all(isinstance(row, list) for row in json.loads(path.read_text()).values()):
                raise TypeError("it is of something else")
    images = read(in_order[0][1])
    for _, options in in_order:
        runs.finished(options, images)  # raises before anything is trained if a folder is taken
    found, known = {name: [] for name in plan}, {}
    for name, options in in_order:
        print(f"\n{shown(options.out.name)}")
        found[name].append(train(options, images, known))
    if not ranks.is_first():
        return found
    runs.write_json(path, found)
    print(f"\n{table_of(found)}\n")
    if len(found) > 1:
        print("A difference whose interval includes 0 is no evidence of a gain.")
    print(f"The results are in {shown(out)}/")
    return found


def plan_of(rows, seeds, out):
    """Plan the runs of a comparison → {loss: its runs}. rows are `train.Options` of each loss.
    All losses get the same epochs, batch size and learning rate."""
    require(seeds >= 1, "--seeds", seeds, "at least 1")
    alike = {
        "epochs": max(row.epochs for row in rows),
        "batch_size": min(row.batch_size for row in rows),
        "lr": min(row.lr for row in rows),
    }
    plan = {row.loss: [] for row in rows}
    for row in rows:
        for seed in range(row.seed, row.seed + seeds):
            alike |= {"seed": seed, "out": out / f"{row.loss}-{seed}"}
            plan[row.loss].append(row.but(**alike))
    return plan


def seed_by_seed(plan):
    """Yield each run of a plan as (name, options). The first seed of all rows comes first."""
    several = next(iter(plan.values()))
    for k in range(len(several)):
        for name, of_name in plan.items():
            yield name, of_name[k]


def table_of(found):
    """Write {name: results of each seed} as a Markdown table, in the order of linear accuracy.
    With several seeds, the last column has the gain of each row over SimCLR. Without SimCLR it is
    the gain over the first row. Behind ± is half the width of Student's 95 % interval."""
    some = next(iter(found.values()))
    has_classes = some[0]["linear"] is not None
    if has_classes:
        means = {name: mean(run["linear"] for run in results) for name, results in found.items()}
        found = {name: found[name] for name in sorted(means, key=means.get, reverse=True)}
    rows = {f"`{name}`": results for name, results in found.items()}
    rows["untrained encoder"] = [run["untrained"] for run in some]
    rows["raw pixels"] = [some[0]["raw"]]
    lines = report.cells(rows)
    if len(some) > 1 and len(found) > 1 and has_classes:
        baseline = next(name for name in ["simclr", "SimCLR"] + list(found) if name in found)
        lines[0].append(f"linear, over `{baseline}`")
        for line, name in itertools.zip_longest(lines[1:], found):
            gap = ""
            if name not in (None, baseline):
                gap = report.gain(gaps_of(found[name], found[baseline]))
            line.append(gap)
    return report.markdown(lines)


def gaps_of(one, other, figure="linear"):
    """Return the differences of two rows of results, paired by seed.
    A seed that only one row has is left out, as in a study that was stopped."""
    of_seed = {run["seed"]: run[figure] for run in other}
    return [run[figure] - of_seed[run["seed"]] for run in one if run["seed"] in of_seed]
