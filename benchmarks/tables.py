"""Print tables of the recorded runs: python benchmarks/tables.py claims cause

claims judges what README and the front page claim. cause, pays and fade compare rows, as
studies/cause.md and studies/pays.md have them. near and colder put losses with weights beside
plain ones at other t. minimal_pairs shows what given negatives teach. A gain is the mean difference
of two rows, paired by seed, ± half the width of its 95 % interval.
"""

import argparse
import functools
import math
import re
from statistics import mean
from typing import NamedTuple

import common
import numpy as np
import sentence_rows
import torch
from rows import SHARED, STUDIES
from scipy import stats

import hardneg
from training import compare, report

# ---- Differences -------------------------------------------------------------------------------

# A mean has the gaps that it is over. Under `decoupled` held weights push as uniform ones do.
MEANS = {
    "all gradients": [
        "tilted nce 0.067 − tilted-held nce 0.067",
        "tilted decoupled 0.067 − uniform decoupled 0.067",
        "transported nce 0.067 − transported-held nce 0.067",
    ],
    "both held weights": [
        "tilted-held nce 0.067 − uniform nce 0.067",
        "transported-held nce 0.067 − uniform nce 0.067",
    ],
}
for pair in ("coupling − tilted", "tilted − no weights", "coupling − no weights"):
    one, other = pair.split(" − ")
    MEANS[pair] = [f"{o}, {one} − {o}, {other}" for o in ("nce", "nce debiased", "triplet")]


@functools.cache
def rows_of(study: str) -> dict[str, list]:
    """Return {row: its recorded runs, by seed} of a study, of images or of text."""
    found = common.read(study)
    if "runs" in found:
        found = sentence_rows.by_row(found["runs"])
    return {row: sorted(runs, key=lambda run: run["seed"]) for row, runs in found.items()}


def course_of(run: dict) -> dict[str, float]:
    """Return kNN in the course of a run. "epoch 6" is kNN at epoch 6, and "change" what it gains
    from the first measurement to the last."""
    course = {f"epoch {at['epoch']}": at["knn"] for at in run.get("history", []) if "knn" in at}
    if course:
        first, *_, last = course.values()
        course["change"] = last - first
    return course


def row_of(study: str, name: str, figure: str) -> list[dict]:
    """Return a figure of the runs of a row, as {"seed": …, figure: …}.

    The row is of the study, or of the one that its name begins with."""
    if ": " in name:
        study, name = name.split(": ")
    runs = rows_of(study).get(name, [])
    return [{"seed": run["seed"], figure: (course_of(run) | run)[figure]} for run in runs]


def gaps_of(study: str, gap: str, figure: str = "linear") -> list[float]:
    """Return what a gap, "one row − another", is for each seed; none if there are no such runs.

    One of MEANS is the mean over its gaps that are there."""
    gaps = []
    for pair in MEANS.get(gap, [gap]):
        one, other = [row_of(study, name, figure) for name in pair.split(" − ")]
        if one and other:
            gaps.append(compare.gaps_of(one, other, figure))
    return [mean(of_seed) for of_seed in zip(*gaps, strict=True)]


# A line has what it is about, in one cell or more, its study, and the rows that are compared.
CAUSE = """
gradient through tilted weights | tilted nce 0.067 − tilted-held nce 0.067
the same, decoupled | tilted decoupled 0.067 − uniform decoupled 0.067
gradient through the coupling | transported nce 0.067 − transported-held nce 0.067
mean of these | all gradients
weights, against a plain loss as cold | tilted nce 0.067 − uniform decoupled 0.05
the same, decoupled | tilted decoupled 0.067 − uniform decoupled 0.05
tilted weights, held | tilted-held nce 0.067 − uniform nce 0.067
the coupling, held | transported-held nce 0.067 − uniform nce 0.067
mean of both | both held weights
the nearest 0.3 alone | top nce 0.067 − uniform nce 0.067
debiasing, τ⁺ = 1/(N + 1) | uniform 1/N 0.067 − uniform nce 0.067
decoupling | uniform decoupled 0.067 − uniform nce 0.067
a colder plain loss | uniform nce 0.045 − uniform nce 0.067
the same, decoupled | uniform decoupled 0.05 − uniform decoupled 0.067
"""
PAYS = """
CIFAR-10: a warmer t | +0.2 to +0.7 | pays-cifar10 | simclr 0.2 − simclr 0.1
CIFAR-10: best, and matched | −0.3 to +0.3, 0 to +0.4 | pays-cifar10 | tilted 0.2 − simclr 0.1
CIFAR-10: matched | 0 to +0.4 | pays-cifar10 | tilted 0.4 − simclr 0.2
CIFAR-10: weights, same t |  | pays-cifar10 | tilted 0.2 − simclr 0.2
CIFAR-10: weights, same t |  | pays-cifar10 | tilted 0.4 − simclr 0.4
CIFAR-10: is it the positive? | −0.2 to +0.4 | pays-decoupled | \
decoupled 0.1 − pays-cifar10: simclr 0.1
CIFAR-10: is it the positive? | 0 to +0.4 | pays-cifar10 | \
tilted 0.2 − pays-decoupled: decoupled 0.1
CIFAR-10: rate 0.006, n = 3 |  | pays-rates | tilted 0.2 at 0.006 − simclr 0.1 at 0.006
Tiny ImageNet: a warmer t | −0.5 to 0 | pays-tiny | simclr 0.2 − simclr 0.1
Tiny ImageNet: best | +0.6 to +1.2 | pays-tiny | tilted 0.1 − simclr 0.1
Tiny ImageNet: matched |  | pays-tiny | tilted 0.2 − simclr 0.1
Tiny ImageNet: weights, same t |  | pays-tiny | tilted 0.2 − simclr 0.2
"""
FADE = """
Tiny ImageNet: a colder t | pays-tiny | simclr 0.1 − simclr 0.2
Tiny ImageNet: weights | pays-tiny | tilted 0.2 − simclr 0.2
Tiny ImageNet: weights | pays-tiny | tilted 0.1 − simclr 0.1
CIFAR-10: a colder t | pays-cifar10 | simclr 0.1 − simclr 0.4
CIFAR-10: weights | pays-cifar10 | tilted 0.2 − simclr 0.2
CIFAR-10: weights | pays-cifar10 | tilted 0.4 − simclr 0.4
CIFAR-10: weights, n = 3 | long | tilted − simclr
CIFAR-10: weights, n = 3 | long | hcl 0.1 − simclr
CIFAR-10: the same, over a colder loss | long | hcl 0.1 − simclr 0.067
"""


def differences(heading: str, text: str, figures: list[str], studies: tuple = ()) -> str:
    """Write a table of differences: a line for each of the text, a column for each figure.

    The differences are of the studies given, or else of the one that the line names."""
    lines = [heading.split(" | ")]
    for line in text.strip().split("\n"):
        *cells, gap = [cell.strip() for cell in line.split(" | ")]
        some = studies or [cells.pop()]
        cells.append(re.sub(r"[\w-]+: ", "", gap))
        for study in some:
            for figure in figures:
                gaps = gaps_of(study, gap, figure)
                cells.append(report.gain(gaps) if gaps else "")
        lines.append(cells)
    return report.markdown(lines)


# ---- Claims ------------------------------------------------------------------------------------

OF_TEXT = "sentences", "equal_time"  # studies whose gains vary with the test sources, too
# setting | its page | study | rows compared at equal steps | and at equal time
CLAIMS = """
Tiny ImageNet, 20 000 images, 10 epochs: `hcl`, τ⁺ = 0.0005 | short-runs | tiny | hcl − simclr |
Tiny ImageNet, 50 000 images, 60 epochs: `hcl`, τ⁺ = 0 | pays | pays-tiny | tilted 0.1 − simclr 0.1|
CIFAR-10, 20 000 images, 10 epochs: `hcl`, τ⁺ = 0.01 | short-runs | cifar10 | hcl − simclr |
CIFAR-10, 50 000 images, 60 epochs: `hcl`, τ⁺ = 0 | pays | pays-cifar10 | tilted 0.2 − simclr 0.1 |
CIFAR-10, 5 000 images: DiffHard | generated | games-10 | DiffHard − SimCLR | DiffHard − twice
Text search: one mined document | sentences | sentences | mined − simclr | mined − simclr, twice
Text search: four mined | sentences | sentences | mined 4 − simclr | mined 4 − simclr, four times
Text search, new seeds: one mined, `ot` | equal-time | equal_time | | mined, ot − simclr, twice; \
mined, ot − simclr, 256
"""


class Claim(NamedTuple):
    """Hold a gain, half of its interval, the chance of it if there is none, and the seeds."""

    over: str
    middle: float
    half: float
    chance: float
    n: int

    def __str__(self):
        return f"{self.middle:+.1f} ± {self.half:.1f}"

    def verdict(self, stands: bool) -> str:
        """Say whether there is a gain. It is sure if it stands after Holm's correction."""
        if self.chance > 0.05:
            return "we cannot tell"
        if self.middle > 0:
            return "yes" if stands else "probably"
        return "no" if stands else "probably not"


def judge(study: str, pair: str) -> Claim:
    """Compare two rows, over seeds, and on text over test sources, too."""
    over = pair.split(" − ")[1]
    if study in OF_TEXT:
        gaps = sentence_rows.by_group(common.read(study)["runs"], pair)
        return Claim(over, *sentence_rows.over_seeds_and_sources(gaps), len(gaps))
    gaps = gaps_of(study, pair)
    return Claim(over, *report.interval(gaps), stats.ttest_1samp(gaps, 0).pvalue, len(gaps))


def judged() -> list[tuple]:
    """List the lines of CLAIMS: setting, page, study, claims at equal steps and at equal time."""
    found = []
    for line in CLAIMS.strip().split("\n"):
        setting, page, study, *both = [cell.strip() for cell in line.split("|")]
        of_pairs = [[judge(study, pair) for pair in cell.split("; ") if pair] for cell in both]
        found.append((setting, page, study, *of_pairs))
    return found


def claims(pages: str = "studies/") -> str:
    """Write the claims as a Markdown table, which links to the pages in a folder."""
    lines = [["setting", "`simclr`, accuracy or MRR", "gain, same steps", "gain, same time", "n"]]
    found = judged()
    every = [claim for *_, steps, time in found for claim in steps + time]
    stand = sentence_rows.standing({claim: claim.chance for claim in every})
    for setting, page, study, *both in found:
        first = sum(both, [])[0]  # the level is that of its control
        figure = "mrr" if study in OF_TEXT else "linear"
        level = mean(run[figure] for run in rows_of(study)[first.over])
        cells = []
        for some in both:
            texts = [f"{claim}, {claim.verdict(claim in stand)}" for claim in some]
            for k in range(1, len(some)):
                control = some[k].over.replace("simclr, ", "batches of ")
                texts[k] = f"over {control} {texts[k]}"
            cells.append("; ".join(texts))
        cells[1] = cells[1] or "the same"  # as weights take hardly any time
        lines.append([f"[{setting}]({pages}{page}.md)", f"{level:.1f}", *cells, str(first.n)])
    return report.markdown(lines)


# ---- Studies of images -------------------------------------------------------------------------


def of_study(name: str, figure: str = "linear") -> str:
    """Write the recorded results of a study as a Markdown table.

    That of a search has a column for each temperature."""
    found = common.read(name)
    if STUDIES[name].seeds != [100]:
        return compare.table_of(found)
    lines = [["", *SHARED["t"]]]
    for loss in ("simclr", "hard", "hcl", "ot"):
        runs = [found[f"{loss}-{t}"][0] for t in SHARED["t"]]
        lines.append([f"`{loss}`"] + [f"{run[figure]:.1f}" for run in runs])
    return report.markdown(lines)


def near() -> str:
    """Write how far losses with weights are from `simclr` at three temperatures.

    It is the root of the mean square over the temperatures of a search, in points. The accuracy of
    `simclr` between its temperatures is a straight line over log t. `ot` is t/ε as β: its weights
    are held, so it has no third temperature."""
    lines = [["images", "loss", "at t", "at t/(1 + β)", "at t/(1 + 2β)", "rows"]]
    ts = [float(t) for t in SHARED["t"]]
    for study, images in (("cifar10-t", "CIFAR-10"), ("tiny-t", "Tiny ImageNet")):
        found = common.read(study)
        heights = {
            loss: np.array([found[f"{loss}-{t}"][0]["linear"] for t in ts])
            for loss in ("simclr", "hcl", "ot")
        }
        for loss, sharpest in (("hcl", 2), ("ot", 1)):
            betas = [0.5 if loss == "hcl" else t / 0.3 for t in ts]
            coldest = [t / (1 + sharpest * beta) for t, beta in zip(ts, betas, strict=True)]
            reached = [k for k in range(len(ts)) if coldest[k] > 0.99 * ts[0]]
            line = [images, f"`{loss}`"]
            for c in range(sharpest + 1):
                at = [math.log(ts[k] / (1 + c * betas[k])) for k in reached]
                plain = np.interp(at, np.log(ts), heights["simclr"])
                gaps = heights[loss][reached] - plain
                line.append(f"{math.sqrt(np.mean(gaps**2)):.2f}")
            lines.append(line + [""] * (2 - sharpest) + [str(len(reached))])
    return report.markdown(lines)


def colder() -> str:
    """Write how far the push of `hcl` on negatives is from that of `simclr`, in total variation.

    There are 510 normal logits of deviation σ, and 2000 anchors."""
    random = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 510, generator=random, dtype=torch.float64)
    spreads = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
    lines = [["β", "`simclr` at", *(f"σ = {spread}" for spread in spreads)]]
    for beta in (0.5, 1.0):
        for c, t in enumerate(("t", "t/(1 + β)", "t/(1 + 2β)")):
            line = [str(beta), t]
            for spread in spreads:
                s = (spread * draws).requires_grad_()
                log_shares = hardneg.tilted(s, beta).log_softmax(1)
                (push,) = torch.autograd.grad((s + log_shares).logsumexp(1).sum(), s)
                plain = ((1 + c * beta) * s.detach()).softmax(1)
                line.append(f"{(push - plain).abs().sum(1).mean() / 2:.2f}")
            lines.append(line)
    return report.markdown(lines)


# ---- Text --------------------------------------------------------------------------------------


def spread_of(runs: list, figure: str) -> str:
    """Write the mean of runs ± their standard deviation; nothing where no run has the figure."""
    values = [run[figure] for run in runs if figure in run]
    return report.spread(values) if values else ""


def gain_in(found: dict, row: str, figure: str, baseline: str = "simclr") -> str:
    """Write what a row gains over the baseline, paired by seed; nothing for the baseline."""
    if row == baseline:
        return ""
    return report.gain(compare.gaps_of(found[row], found[baseline], figure))


def search() -> str:
    """Write how well documents are found. Gains and times are over `simclr`."""
    lines = [["row", "t", "rate", "MRR", "R@1", "R@10", "same file", "gain in MRR", "time"]]
    measures = "mrr", "r1", "r10", "same_file"
    floor = common.read("code_search")["bm25"]
    lines.append(["BM25", "", ""] + [f"{floor[name]:.1f}" for name in measures] + ["", ""])
    found = rows_of("code_search")
    seconds = {row: mean(run["seconds"] for run in runs) for row, runs in found.items()}
    for row, runs in found.items():
        settings = runs[0]["settings"]
        line = [row] + [str(settings[what] or "") for what in ("temperature", "rate")]
        line += [spread_of(runs, name) for name in measures]
        lines.append([*line, gain_in(found, row, "mrr"), f"{seconds[row] / seconds['simclr']:.1f}"])
    return report.markdown(lines)


def pairs() -> str:
    """Write what minimal pairs teach: figures, and what the rows with a + gain in-batch."""
    titles = {"all": "two-way", "words": "words balanced", "blind": "blind balanced", "mrr": "MRR"}
    lines = [["", *titles.values(), "two-way, over in-batch"]]
    found = rows_of("minimal_pairs")
    for row, runs in found.items():
        baseline = "bag, in-batch" if row.startswith("bag") else "in-batch"
        gain = gain_in(found, row, "all", baseline) if "+" in row else ""
        lines.append([row] + [spread_of(runs, name) for name in titles] + [gain])
    return report.markdown(lines)


OF_CAUSE = "factor | compared | CIFAR-10, linear | kNN | Tiny ImageNet, linear | kNN"
OF_PAYS = "question | predicted | compared | linear | kNN"
OF_FADE = "gain of | compared | epoch 6 | epoch 60 | change"
BOTH = ["linear", "knn"]
TABLES = {"claims": claims, "near": near, "colder": colder}
TABLES |= {"code_search": search, "minimal_pairs": pairs}
TABLES["cause"] = lambda: differences(OF_CAUSE, CAUSE, BOTH, ("cause", "cause-tiny"))
TABLES["pays"] = lambda: differences(OF_PAYS, PAYS, BOTH)
TABLES["fade"] = lambda: differences(OF_FADE, FADE, ["epoch 6", "epoch 60", "change"])


def main():
    """Print the tables that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tables", nargs="+", choices=TABLES)
    for name in parser.parse_args().tables:
        print(f"{TABLES[name]()}\n")


if __name__ == "__main__":
    main()
