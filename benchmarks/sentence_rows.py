"""Say what sentences.py compares: rows, the questions between them, and how they are answered.

A gain is the mean difference of two rows, paired by seed, ± half the width of its 95 % interval. It
is over seeds, which vary the pairs of training, or also over twenty groups of test sources.
"""

import math

import common
import torch
from scipy import stats

from training import compare, report

PAIRS = 7680  # of a run, each seen once
THIRD = 2560  # of a run that chooses
FIRST_RATE = 1e-4  # while temperatures are compared
RATES = (5e-5, 2e-4)  # the others
TEMPERATURES = (0.05, 0.02, 0.03, 0.07, 0.1)
FEW = (0.05, 0.03, 0.1)  # for a loss with an option of its own, which has three values
OWN = {"beta": (0.5, 0.2, 1.0), "tau_plus": (1e-4, 1e-5, 1e-3)}
OWN |= {"epsilon": (0.2, 0.1, 0.4), "alpha": (0.3, 0.1, 0.6), "hardness": (5.0, 2.0, 9.0)}

# ---- Rows ----------------------------------------------------------------------------------------

LOSSES = {"simclr": {}, "hcl": {"weights": "tilted"}, "debiased": {"loss": "debiased"}}
LOSSES["held"] = {"weights": "tilted", "detach_weights": True}
LOSSES |= {"ot": {"loss": "ot"}, "hard": {"loss": "hard"}, "all": {}, "own": {}}
# the option that a loss chooses; `all` and `own` say which negatives get hardness
OPTIONS = {"hcl": "beta", "held": "beta", "debiased": "tau_plus", "ot": "epsilon", "hard": "alpha"}
OPTIONS |= {"all": "hardness", "own": "hardness"}
SETTINGS = {"loss": "simclr", "pairs": PAIRS, "random": 0, "mined": 0, "searches": 1}
SETTINGS |= {"margin": None, "like": None}  # like: the row whose choices this one takes
STAGES = {"finding": {"simclr": {}, "random": {"random": 1}, "mined": {"mined": 1}}}
STAGES["finding"] |= {
    "mined, margin": {"mined": 1, "margin": 0.05, "like": "mined"},
    "mined, anew": {"mined": 1, "searches": 2, "like": "mined"},
    "simclr, twice": {"pairs": 2 * PAIRS, "like": "simclr"},
    "mined 4": {"mined": 4},
}
STAGES["weighting"] = {
    "hcl": {"loss": "hcl"},
    "mined, hcl": {"loss": "hcl", "mined": 1},
    "mined, held": {"loss": "held", "mined": 1},
    "mined, debiased": {"loss": "debiased", "mined": 1},
    "held": {"loss": "held"},
}
STAGES["peers"] = {
    "hardness": {"loss": "all"},
    "mined, hardness": {"loss": "own", "mined": 1},
    "simclr, again": {"like": "simclr"},  # on the processor of the rows around it
}
STAGES["others"] = {
    "ot": {"loss": "ot"},
    "mined, ot": {"loss": "ot", "mined": 1},
    "hard": {"loss": "hard"},
    "mined, hard": {"loss": "hard", "mined": 1},
    "mined, twice": {"mined": 1, "pairs": 2 * PAIRS, "like": "mined"},
    "simclr, four times": {"pairs": 4 * PAIRS, "like": "simclr"},
}
QUESTIONS = """
mined − simclr
mined 4 − simclr
mined − random
mined − simclr, twice
mined 4 − mined
mined, margin − mined
mined, anew − mined
hcl − simclr
held − simclr
mined, hcl − mined
mined, held − mined
mined, debiased − mined
hardness − simclr
mined, hardness − mined
simclr, again − simclr
ot − simclr
ot − simclr, again
mined, ot − mined
hard − simclr
mined, hard − mined
mined, twice − simclr, twice
mined 4 − simclr, four times
mined, twice − simclr, four times
"""
QUESTIONS = QUESTIONS.strip().split("\n")
LATER = [f"mined, {loss} − simclr, twice" for loss in ("hcl", "held", "hardness", "ot")]
MAIN = ["mined − simclr", "mined − random", "mined − simclr, twice", "hcl − simclr"]
MAIN += ["mined, hcl − mined", "mined, debiased − mined"]


def settings_of(row: str) -> dict:
    """Return all settings of a row, but for what is chosen."""
    for rows in STAGES.values():
        if row in rows:
            return SETTINGS | rows[row]
    raise SystemExit(f"there is no row {row}")


def values_of(what: str, settings: dict) -> tuple:
    """Return the values of a setting that are tried, seven with those of the others."""
    if what == "temperature":
        return FEW if settings["loss"] in OPTIONS else TEMPERATURES
    if what == "rate":
        return (FIRST_RATE, *RATES)
    return OWN[what]


# ---- Tables --------------------------------------------------------------------------------------


def by_row(runs: list[dict]) -> dict[str, list]:
    """Sort runs: {row: its runs}."""
    rows = {}
    for run in runs:
        rows.setdefault(run["row"], []).append(run)
    return rows


def gaps(runs: list[dict], question: str, figure: str = "mrr") -> list[float]:
    """Return the differences of the two rows of a question, paired by seed."""
    one, other = [by_row(runs).get(row, []) for row in question.split(" − ")]
    return compare.gaps_of(one, other, figure)


def unclear(runs: list[dict]) -> list[str]:
    """List the rows that need more seeds: the interval has 0, its middle is above half a point."""
    rows = []
    for question in QUESTIONS:
        found = gaps(runs, question)
        if len(found) >= 3:
            middle, half = report.interval(found)
            if 0.5 < abs(middle) <= half:
                rows += question.split(" − ")
    return list(dict.fromkeys(rows))


def standing(chances: dict[str, float]) -> set[str]:
    """Return the names whose probability, if there is nothing, stands after Holm's correction."""
    stand = set()
    for place, name in enumerate(sorted(chances, key=chances.get)):
        if chances[name] > 0.05 / (len(chances) - place):
            break
        stand.add(name)
    return stand


def by_holm(runs: list[dict]) -> dict[str, str]:
    """Say which main differences are not 0, with Holm's correction → {question: "yes" or "no"}.

    It is empty while one of them lacks seeds."""
    found = {question: gaps(runs, question) for question in MAIN}
    if min(map(len, found.values())) < 3:
        return {}
    stand = standing({name: stats.ttest_1samp(some, 0).pvalue for name, some in found.items()})
    return {name: "yes" if name in stand else "no" for name in MAIN}


def by_group(runs: list[dict], question: str) -> torch.Tensor:
    """Return the differences of a question in MRR, (seeds, groups of test sources)."""
    one, other = [by_row(runs).get(row, []) for row in question.split(" − ")]
    of_seed = {run["seed"]: torch.tensor(run["by_group"]) for run in other}
    both = [run for run in one if run["seed"] in of_seed]
    return torch.stack([torch.tensor(run["by_group"]) - of_seed[run["seed"]] for run in both])


def over_seeds_and_sources(gaps: torch.Tensor) -> tuple[float, float, float]:
    """Estimate the mean of gaps (seeds, groups of sources), where both vary.

    Return the mean, half of its 95 % interval, and the probability of a mean so far from 0 if there
    is none. The variance of a mean over crossed factors is that over seeds and that over groups,
    less that of what is left, which both contain. Satterthwaite's formula has its degrees of
    freedom. It is never smaller than the variance over seeds alone."""
    seeds, groups = gaps.shape
    mean = gaps.mean()
    of_seeds, of_groups = gaps.mean(1), gaps.mean(0)
    rest = gaps - of_seeds[:, None] - of_groups + mean
    freedom = [seeds - 1, groups - 1, (seeds - 1) * (groups - 1)]
    parts = [of_seeds.var() / seeds, of_groups.var() / groups]
    parts.append(rest.square().sum() / freedom[2] / gaps.numel())
    variance = parts[0] + parts[1] - parts[2]
    degrees = variance**2 / sum(part**2 / n for part, n in zip(parts, freedom, strict=True))
    if variance < parts[0]:
        variance, degrees = parts[0], torch.tensor(float(freedom[0]))
    error = math.sqrt(variance)
    chance = 2 * stats.t.sf(abs(mean.item()) / error, degrees.item())
    return mean.item(), stats.t.ppf(0.975, degrees.item()) * error, chance


def table(record: str) -> str:
    """Write the rows of a record, and then their differences. Each of them needs three seeds.

    Times are relative to `simclr, twice` of the seed. They are those of finding alone, as the other
    rows ran on other machines."""
    found = common.read(record)
    runs = found["runs"]
    names = ["mrr", "r1", "r10", "same_source"]
    lines = [["row", "n", "t", "rate", "option", "MRR", "R@1", "R@10", "same source", "time"]]
    before = [f"{found['before'][name]:.1f}" for name in names]
    lines.append(["not fine-tuned", "", "", "", "", *before, ""])
    of_seed = {run["seed"]: run["seconds"] for run in by_row(runs).get("simclr, twice", [])}
    for row, some in by_row(runs).items():
        if len(some) < 3:
            continue
        settings = some[0]["settings"]
        own = settings.get(OPTIONS.get(settings["loss"]), "")
        line = [f"`{row}`", str(len(some))]
        line += [str(x) for x in (settings["temperature"], settings["rate"], own)]
        line += [report.spread([run[name] for run in some]) for name in names]
        time = ""
        if row in STAGES["finding"]:
            time = report.spread([run["seconds"] / of_seed[run["seed"]] for run in some])
        lines.append([*line, time])
    holm = by_holm(runs)
    measures = ["MRR", "over seeds and sources", "R@10", "same source"]
    differences = [["difference", "n", *measures, "holds with Holm"]]
    for question in QUESTIONS + LATER:
        of_seeds = gaps(runs, question)
        if len(of_seeds) >= 3:
            line = [question, str(len(of_seeds)), report.gain(of_seeds)]
            middle, half, _ = over_seeds_and_sources(by_group(runs, question))
            line.append(f"{middle:+.1f} ± {half:.1f}")
            line += [report.gain(gaps(runs, question, name)) for name in ("r10", "same_source")]
            differences.append(line + [holm.get(question, "")])
    return f"{report.markdown(lines)}\n\n{report.markdown(differences)}"
