"""Print the claims of the papers, and ours, beside what the recorded runs say:
python benchmarks/claims.py

A gain is the mean difference of two rows of a study, paired by seed, ± half the width of Student's
95 % interval: in points of accuracy, or of uniformity. A claim holds where its interval lies above
0. It fails where the interval lies below 0, and is open where the interval includes 0. In bold it
holds or fails with Holm's correction for all differences of the table, too.
"""

import functools
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import cause
import studies
from scipy import stats

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


def of_factors(study, factors):
    """Return a study of CAUSE.md, and what several factors gain in the mean, by seed."""
    return study, cause.mean_gaps(studies.read(study), factors)


def ten_times_the_images():
    """Return what all images gain over a tenth of them after fine-tuning, by seed."""
    everything = rows_of("finetune-all")["SimCLR"]
    tenth = rows_of("finetune-tenth")["SimCLR"]
    return "finetune-all", compare.gaps_of(everything, tenth, "finetuned")


OBJECTIVES = "nce", "nce debiased", "simple", "triplet"
WITH_A_SCALE = "nce", "nce debiased", "triplet"  # `simple` has no temperature without weights


def over_objectives(one, other, objectives=OBJECTIVES):
    """Return what some weights gain over others, in the mean over objectives, by seed."""
    rows = rows_of("objectives")
    gaps = []
    for objective in objectives:
        gaps.append(compare.gaps_of(rows[f"{objective}, {one}"], rows[f"{objective}, {other}"]))
    return "objectives", [mean(of_seed) for of_seed in zip(*gaps, strict=True)]


TINY = "Tiny ImageNet"
CLAIMS = [
    Claim(
        "hard negatives gain on CIFAR-10",
        "[1], [2]",
        {
            "`hcl`, β = 2": Gap("cifar10-beta", "hcl-2", "simclr"),
            "`hcl`, β = 0.5": Gap("cifar10", "hcl", "simclr"),
            "`hcl` by kNN": Gap("cifar10", "hcl", "simclr", "knn"),
            "`ot`": Gap("cifar10", "ot", "simclr"),
            "`ot` by kNN": Gap("cifar10", "ot", "simclr", "knn"),
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
    Claim(
        "… on the shapes",
        "here",
        {
            "`hcl`": Gap("shapes", "hcl", "simclr"),
            "`ot`": Gap("shapes", "ot", "simclr"),
            "`hard`": Gap("shapes", "hard", "simclr"),
            "`debiased`": Gap("shapes", "debiased", "simclr"),
            "`hcl`, small batches": Gap("shapes-64", "hcl", "simclr"),
        },
    ),
    Claim(
        "… after 60 epochs on all of CIFAR-10",
        "[1], [2]",
        {
            "`hcl`, t = 0.07": Gap("long", "hcl", "simclr"),
            "`ot`, t = 0.07": Gap("long", "ot", "simclr"),
            "`hcl`, t = 0.1": Gap("long", "hcl 0.1", "simclr"),
            "`hcl`, t = 0.2, β = 2": Gap("long", "hcl 0.2", "simclr"),
            "tilted weights, t = 0.1": Gap("long", "tilted", "simclr"),
            "tilted weights by kNN": Gap("long", "tilted", "simclr", "knn"),
        },
    ),
    Claim(
        "the gradient through the weights gains",
        "here",
        {
            "CIFAR-10": functools.partial(of_factors, "cause", cause.GRADIENTS),
            TINY: functools.partial(of_factors, "cause-tiny", cause.GRADIENTS),
            "CIFAR-10, 60 epochs": Gap("long", "tilted", "tilted-held"),
        },
    ),
    Claim(
        "… more than a plain loss as cold",
        "here",
        {
            "CIFAR-10": Gap("cause", "tilted nce 0.067", "uniform decoupled 0.05"),
            TINY: Gap("cause-tiny", "tilted nce 0.067", "uniform decoupled 0.05"),
        },
    ),
    Claim(
        "held weights gain",
        "[2]",
        {
            "CIFAR-10": functools.partial(of_factors, "cause", cause.HELD),
            TINY: functools.partial(of_factors, "cause-tiny", cause.HELD),
            "CIFAR-10, 60 epochs": Gap("long", "tilted-held", "simclr 0.067"),
        },
    ),
    Claim("a larger β gains more", "[1]", {"β = 2 over 0.5": Gap("beta", "hcl-2", "hcl-0.5")}),
    Claim("annealing β helps", "[1]", {"at β = 2": Gap("beta", "hcl-2-annealed", "hcl-2")}),
    Claim(
        "true positives help",
        "[1]",
        {
            "`simclr`": Gap("beta", "simclr-true", "simclr"),
            "`hcl`, β = 1": Gap("beta", "hcl-1-true", "hcl-1"),
        },
    ),
    Claim(
        "debiasing adds to hard weights", "[1]", {"t = 0.5": Gap("hard-debiased", "both", "hard")}
    ),
    Claim(
        "transport gains over `hcl`; [2] has them level",
        "a question",
        {
            "CIFAR-10": Gap("cifar10", "ot", "hcl"),
            TINY: Gap("tiny", "ot", "hcl"),
            "CIFAR-10, four objectives": functools.partial(over_objectives, "coupling", "tilted"),
        },
    ),
    Claim(
        "weights gain, in the mean over four objectives",
        "[2]",
        {
            "tilted": functools.partial(over_objectives, "tilted", "no weights"),
            "the coupling": functools.partial(over_objectives, "coupling", "no weights"),
            "tilted, without `simple`": functools.partial(
                over_objectives, "tilted", "no weights", WITH_A_SCALE
            ),
            "the coupling, without `simple`": functools.partial(
                over_objectives, "coupling", "no weights", WITH_A_SCALE
            ),
        },
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
            "a tenth, fine-tuned": Gap("finetune-tenth", "DiffHard", "SimCLR", "finetuned"),
        },
    ),
    Claim(
        "few images cost accuracy, fine-tuned",
        "[3]",
        {"all over a tenth": ten_times_the_images},
    ),
    Claim(
        "generated samples gain more than as many real ones",
        "a question",
        {
            "a tenth": Gap("games-10", "DiffHard", "twice"),
            "a fifth": Gap("games-20", "DiffHard", "twice"),
        },
    ),
    Claim(
        "finding negatives gains, on text",
        "the field",
        {
            "mined": Gap("code_search", "mined", "simclr", "mrr"),
            "mined, `debiased`": Gap("code_search", "mined, debiased", "simclr", "mrr"),
            "mined, over random": Gap("code_search", "mined", "random", "mrr"),
            "random": Gap("code_search", "random", "simclr", "mrr"),
        },
    ),
    Claim(
        "weighting negatives gains, on text",
        "[1]",
        {
            "`hcl`": Gap("code_search", "hcl", "simclr", "mrr"),
            "`hcl` on mined ones": Gap("code_search", "mined, hcl", "mined", "mrr"),
        },
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


def corrected(samples, level=0.05):
    """Return which samples of differences are not around 0, corrected for their number by Holm."""
    chances = [stats.ttest_1samp(gaps, 0).pvalue for gaps in samples]
    order = sorted(range(len(samples)), key=chances.__getitem__)
    remain = set()
    for place, k in enumerate(order):
        if chances[k] > level / (len(samples) - place):
            break
        remain.add(k)
    return remain


def table():
    """Write the claims as a Markdown table, a line for each difference."""
    compared = [differences(gap) for claim in CLAIMS for gap in claim.gaps.values()]
    remain = corrected([gaps for _, gaps in compared])
    lines = [["claim", "whose", "compared", "gain", "n", "does it hold here?", "study"]]
    for claim in CLAIMS:
        text, source = claim.text, claim.source
        for name, gap in claim.gaps.items():
            place = len(lines) - 1
            study, gaps = compared[place]
            judged = judgement(gaps)
            if place in remain:
                judged = f"**{judged}**"
            digits = 2 if getattr(gap, "figure", "") == "uniformity" else 1
            cells = [report.gain(gaps, digits), str(len(gaps)), judged, f"`{study}`"]
            lines.append([text, source, name, *cells])
            text = source = ""
    return report.markdown(lines)


if __name__ == "__main__":
    print(table())
