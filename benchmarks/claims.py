"""Print the claims of the papers, and ours, beside what the recorded runs say:
python benchmarks/claims.py

A gain is the mean difference of two rows of a study, paired by seed, ± half the width of Student's
95 % interval: in points of accuracy, or of uniformity. A claim holds where its interval lies above
0. It fails where the interval lies below 0, and is open where the interval includes 0.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import cause
import studies

from training import compare, report


class Gap(NamedTuple):
    """Name two rows of a study, and the figure that is compared."""

    study: str
    one: str
    other: str
    figure: str = "linear"


class Claim(NamedTuple):
    """Hold a claim, its source, and the differences that judge it.

    A difference has a name. It is a gap, or a function that returns a study and its differences."""

    text: str
    source: str
    gaps: dict[str, Gap | Callable]


def gradients(name):
    """Return a study of CAUSE.md, and what the gradient through the weights gains, by seed."""
    return name, cause.mean_gaps(studies.read(name), cause.GRADIENTS)


TINY = "Tiny ImageNet"
CLAIMS = [
    Claim(
        "hard negatives gain on CIFAR-10",
        "[1], [2]",
        {
            "`hcl`, β = 2": Gap("cifar10-beta", "hcl-2", "simclr"),
            "`hcl`, β = 0.5": Gap("cifar10", "hcl", "simclr"),
            "`ot`": Gap("cifar10", "ot", "simclr"),
            "`hard`": Gap("cifar10", "hard", "simclr"),
        },
    ),
    Claim(
        "… on Tiny ImageNet",
        "[2]",
        {
            "`hcl`": Gap("tiny", "hcl", "simclr"),
            "`ot`": Gap("tiny", "ot", "simclr"),
            "`hard`": Gap("tiny", "hard", "simclr"),
        },
    ),
    Claim("… on the shapes", "here", {"`hcl`": Gap("shapes-64", "hcl", "simclr")}),
    Claim(
        "what gains is the gradient through the weights",
        "here",
        {
            "CIFAR-10": functools.partial(gradients, "cause"),
            TINY: functools.partial(gradients, "cause-tiny"),
        },
    ),
    Claim("a larger β gains more", "[1]", {"β = 2 over 0.5": Gap("beta", "hcl-2", "hcl-0.5")}),
    Claim("annealing β helps", "[1]", {"at β = 2": Gap("beta", "hcl-2-annealed", "hcl-2")}),
    Claim("true positives help", "[1]", {"`simclr`": Gap("beta", "simclr-true", "simclr")}),
    Claim(
        "debiasing adds to hard weights", "[1]", {"t = 0.5": Gap("hard-debiased", "both", "hard")}
    ),
    Claim(
        "transport beats `hcl`",
        "[2]",
        {"CIFAR-10": Gap("cifar10", "ot", "hcl"), TINY: Gap("tiny", "ot", "hcl")},
    ),
    Claim("the cost `exp` is better", "[2]", {"κ = 0": Gap("cost", "exp-0", "sqeuclidean")}),
    Claim(
        "`simclr` is less uniform at a larger t",
        "[4]",
        {"t = 1 over 0.2": Gap("temperature", "simclr-1.0", "simclr-0.2", "uniformity")},
    ),
    Claim(
        "… and less uniform than `hard`",
        "[4]",
        {"t = 1": Gap("temperature", "simclr-1.0", "hard-1.0", "uniformity")},
    ),
    Claim(
        "`hard` is ahead at a large t",
        "[4]",
        {"t = 1": Gap("temperature", "hard-1.0", "simclr-1.0")},
    ),
    Claim(
        "`hard` prefers a large t",
        "[4]",
        {"t = 1 over 0.2": Gap("temperature", "hard-1.0", "hard-0.2")},
    ),
    Claim(
        "`simple` is far behind",
        "[4]",
        {"`simclr` over it": Gap("temperature", "simclr-0.2", "simple")},
    ),
    Claim(
        "generated samples help where images are few",
        "[3]",
        {
            "a tenth": Gap("games-10", "DiffHard", "SimCLR"),
            "a fifth": Gap("games-20", "DiffHard", "SimCLR"),
        },
    ),
    Claim(
        "… more than real images would",
        "[3]",
        {"a tenth": Gap("games-10", "DiffHard", "twice")},
    ),
    Claim(
        "finding negatives gains, on text",
        "the field",
        {"mined": Gap("code_search", "mined", "simclr", "mrr")},
    ),
    Claim(
        "… weighting them gains",
        "here",
        {"`hcl`": Gap("code_search", "hcl", "simclr", "mrr")},
    ),
    Claim(
        "given doubles teach one word's difference",
        "the field",
        {"accuracy": Gap("minimal_pairs", "+ swapped", "in-batch", "all")},
    ),
]


def rows_of(study):
    """Return {row: its recorded runs, by seed} of a study, of images or of text."""
    found = studies.read(study)
    if "runs" in found:
        rows = {}
        for run in found["runs"]:
            rows.setdefault(run["row"], []).append(run)
        found = rows
    return {row: sorted(runs, key=lambda run: run["seed"]) for row, runs in found.items()}


def differences(gap):
    """Return the name of a study, and the differences that a gap of a claim asks for."""
    if callable(gap):
        return gap()
    rows = rows_of(gap.study)
    return gap.study, compare.gaps_of(rows[gap.one], rows[gap.other], gap.figure)


def judgement(gaps):
    """Say whether a claim holds, by the interval of its differences."""
    middle, half = report.interval(gaps)
    if abs(middle) <= half:
        return "open"
    return "holds" if middle > 0 else "fails"


def table():
    """Write the claims as a Markdown table, a line for each difference."""
    lines = [["claim", "whose", "compared", "gain", "n", "does it hold here?", "study"]]
    for claim in CLAIMS:
        text, source = claim.text, claim.source
        for compared, gap in claim.gaps.items():
            study, gaps = differences(gap)
            cells = [report.gain(gaps), str(len(gaps)), judgement(gaps), f"`{study}`"]
            lines.append([text, source, compared, *cells])
            text = source = ""
    return report.markdown(lines)


if __name__ == "__main__":
    print(table())
