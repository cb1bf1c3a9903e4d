"""Print tables of the recorded runs: python benchmarks/tables.py claims cause

claims judges what the papers claim, and we. A gain is the mean difference of two rows of a study,
paired by seed, ± half the width of Student's 95 % interval. A claim holds where that lies above 0,
fails where it lies below 0, and is open where it includes 0; in bold it does so with Holm's
correction for all differences of the table, too. The others: cause, the tables of
studies/cause.md; course and course-cost, kNN in the course of the runs of `long` and `cost-course`;
table1, uniformity and tolerance of `tiny-t`, as in Table 1 of [4]; explicit and graphs, of programs
that have gone. The references in brackets are those of ../hardneg.py.
"""

import argparse
import functools
from statistics import mean

import common
from rows import COLD, EFFECTIVE, OBJECTIVES, SEARCHES, STUDIES, WEIGHTS
from scipy import stats

from training import compare, report

# ---- Differences -------------------------------------------------------------------------------

FACTORS = """
gradient through tilted weights: tilted nce − tilted-held nce
the same, decoupled: tilted decoupled − uniform decoupled
gradient through the coupling: transported nce − transported-held nce
tilted, against a plain loss as cold: tilted nce − uniform decoupled 0.05
the same, decoupled, as cold: tilted decoupled − uniform decoupled 0.05
tilted weights, held: tilted-held nce − uniform nce
the coupling, held: transported-held nce − uniform nce
top, α = 0.3: top nce − uniform nce
debiasing, τ⁺ = 1/(N + 1): uniform 1/N − uniform nce
decoupling: uniform decoupled − uniform nce
a smaller temperature: 0.045: uniform nce 0.045 − uniform nce
the same, decoupled: 0.05: uniform decoupled 0.05 − uniform decoupled
the same, decoupled: 0.04: uniform decoupled 0.04 − uniform decoupled
"""  # held weights under `decoupled` push as uniform ones do: these are their control
FACTORS = dict(line.rsplit(": ", 1) for line in FACTORS.strip().split("\n"))
PAIRS = list(FACTORS.values())
SETS = {"cause": "CIFAR-10", "cause-tiny": "Tiny ImageNet"}


def under(objectives: str, pair: str) -> list[str]:
    """Name the same two kinds of weights under each objective."""
    one, other = pair.split(" − ")
    return [f"{objective}, {one} − {objective}, {other}" for objective in objectives.split("/")]


MEANS = {"all gradients": PAIRS[:3], "both held weights": PAIRS[5:7]}
for pair in ("coupling − tilted", "tilted − no weights", "coupling − no weights"):
    MEANS[pair] = under("nce/nce debiased/simple/triplet", pair)
    MEANS[f"{pair}, but simple"] = under("nce/nce debiased/triplet", pair)


@functools.cache
def rows_of(study: str) -> dict[str, list]:
    """Return {row: its recorded runs, by seed} of a study, of images or of text."""
    found = common.read(study)
    if "runs" in found:
        rows = {}
        for run in found["runs"]:
            rows.setdefault(run["row"], []).append(run)
        found = rows
    return {row: sorted(runs, key=lambda run: run["seed"]) for row, runs in found.items()}


def row_of(study: str, name: str, t: float = COLD) -> list:
    """Return the runs of a row, by seed: of its study, or of the one that its name begins with.

    The name of a cell of cause.md may leave out the temperature t."""
    if ": " in name:
        study, name = name.split(": ")
    found = rows_of(study)
    return found.get(name) or found.get(f"{name} {t}", [])


def gaps_of(study: str, gap: str, figure: str = "linear", t: float = COLD) -> list[float]:
    """Return what a gap, "one row − another", is for each seed; none if there are no such runs.

    One of MEANS is the mean over its gaps that are there."""
    gaps = []
    for pair in MEANS.get(gap, [gap]):
        one, other = [row_of(study, name, t) for name in pair.split(" − ")]
        if one:
            gaps.append(compare.gaps_of(one, other, figure))
    return [mean(of_seed) for of_seed in zip(*gaps, strict=True)]


def written(gaps: list[float]) -> str:
    """Write the mean of differences with its interval; in bold if 0 lies outside."""
    middle, half = report.interval(gaps)
    text = report.gain(gaps).replace("-", "−")
    return f"**{text}**" if abs(middle) > half else text


def spread_of(runs: list, figure: str) -> str:
    """Write the mean of runs ± their standard deviation; nothing where no run has the figure."""
    values = [run[figure] for run in runs if figure in run]
    return report.spread(values) if values else ""


def both_written(study: str, gap: str, t: float = COLD) -> list[str]:
    """Write a gap by linear readout and by kNN; nothing where there are no such runs."""
    found = [gaps_of(study, gap, figure, t) for figure in ("linear", "knn")]
    return [written(gaps) if gaps else "" for gaps in found]


# ---- Studies -----------------------------------------------------------------------------------


def of_study(name: str) -> str:
    """Write the recorded results of a study as a Markdown table.

    That of a search has a column for each temperature."""
    if name == "cause-search":
        return design()
    found, rows = common.read(name), STUDIES[name].rows
    if STUDIES[name].seeds != [100]:
        return compare.table_of(found)
    values = {row: f"{found[row][0]['linear']:.1f}" for row in rows}
    if STUDIES[name].data == "shapes":  # settings of several kinds
        lines = [[f"`{rows[row]}`", value] for row, value in values.items()]
        return report.markdown([["settings", "linear %"]] + lines)
    return by_column(values)


def by_column(values: dict[str, str]) -> str:
    """Write {row-column: cell} as a Markdown table."""
    lines = {}
    for name, value in values.items():
        row, _, column = name.rpartition("-")
        lines.setdefault(f"`{row}`", {})[column] = value
    columns = list(next(iter(lines.values())))
    body = [[row] + [cells[column] for column in columns] for row, cells in lines.items()]
    return report.markdown([[""] + columns] + body)


def table1() -> str:
    """Write uniformity and tolerance over the temperature as two Markdown tables: [4], Table 1."""
    found, tables = common.read("tiny-t").items(), []
    for figure in ("uniformity", "tolerance"):
        tables.append(by_column({row: f"{runs[0][figure]:.2f}" for row, runs in found}))
    return "\n\n".join(tables)


def course(name: str = "long") -> str:
    """Write kNN in the course of the runs as a Markdown table, a line for each measurement.

    The first column of figures is the baseline's, the others what their rows gain over it."""
    found = common.read(name)
    baseline = compare.baseline_of(found)
    others = [row for row in found if row != baseline]
    lines = [["epoch", f"`{baseline}`, kNN %"] + [f"`{row}`, gain" for row in others]]
    for epoch, then in measured(found):
        line = [str(epoch), spread_of(then[baseline], "knn")]
        lines.append(line + [gain_in(then, row, "knn", baseline) for row in others])
    return report.markdown(lines)


def measured(found: dict) -> list:
    """List what was measured in the course of the runs: epoch, {row: figures with their seed}."""
    course = {}
    for row, some in found.items():
        for run in some:
            for entry in run["history"]:
                if "knn" in entry:
                    then = course.setdefault(entry["epoch"], {})
                    then.setdefault(row, []).append({"seed": run["seed"]} | entry)
    return list(course.items())


# ---- Text --------------------------------------------------------------------------------------

OF_PAIRS = {"all": "two-way", "words": "words balanced", "blind": "blind balanced"}
OF_PAIRS |= {"other": "other document", "mrr": "MRR"}


def search(record: str = "code_search") -> str:
    """Write how well documents are found.

    Gains are differences of MRR to `simclr`. Times are multiples of that of `simclr`."""
    lines = [["row", "t", "rate", "MRR", "R@1", "R@10", "same file", "gain in MRR", "n", "time"]]
    measures = "mrr", "r1", "r10", "same_file"
    floor = common.read(record)["bm25"]
    figures = [f"{floor[name]:.1f}" for name in measures]
    lines.append(["BM25", "", ""] + figures + ["", "", ""])
    found = rows_of(record)
    seconds = {row: mean(run["seconds"] for run in runs) for row, runs in found.items()}
    for row in [row for row in SEARCHES if row in found]:
        runs, settings = found[row], found[row][0]["settings"]
        line = [row] + [str(settings[what] or "") for what in ("temperature", "rate")]
        line += [spread_of(runs, name) for name in measures]
        line += [gain_in(found, row, "mrr"), str(len(runs))]
        lines.append(line + [f"{seconds[row] / seconds['simclr']:.1f}"])
    return report.markdown(lines)


def gain_in(found: dict, row: str, figure: str, baseline: str = "simclr") -> str:
    """Write what a row gains over the baseline, paired by seed; nothing for the baseline."""
    if row == baseline:
        return ""
    return report.gain(compare.gaps_of(found[row], found[baseline], figure))


def pairs(record: str = "minimal_pairs") -> str:
    """Write what minimal pairs teach: figures, and gains over the same encoder in-batch."""
    figures = [[""] + list(OF_PAIRS.values()) + ["n", "seconds"]]
    gains = [["over in-batch"] + list(OF_PAIRS.values()) + ["n"]]
    found = rows_of(record)
    for row, runs in found.items():
        line = [row] + [spread_of(runs, name) for name in OF_PAIRS]
        seconds = mean(run["seconds"] for run in runs)
        figures.append(line + [str(len(runs)), f"{seconds:.0f}"])
        baseline = "bag, in-batch" if row.startswith("bag") else "in-batch"
        if "+" in row:
            line = [gain_in(found, row, name, baseline) for name in OF_PAIRS]
            gains.append([row] + line + [str(len(runs))])
    return f"{report.markdown(figures)}\n\n{report.markdown(gains)}"


# ---- Programs that have gone --------------------------------------------------------------------


def kept(name: str) -> str:
    """Write a record of a program that has gone, {row: {title: values}}."""
    found = common.read(name)
    titles = list(next(iter(found.values())))
    lines = [[""] + titles]
    for row, values in found.items():
        lines.append([row] + [report.spread(values[title]) for title in titles])
    return report.markdown(lines)


# ---- studies/cause.md --------------------------------------------------------------------------


def design() -> str:
    """Write the design: one run a cell, on the validation split."""
    columns = [(objective, COLD) for objective in OBJECTIVES]
    columns += [("nce", t) for t in EFFECTIVE[1:]]
    lines = [["weights"] + list(OBJECTIVES) + [f"nce, {t}" for t in EFFECTIVE[1:]]]
    for weights in WEIGHTS:
        runs = [row_of("cause-search", f"{weights} {name}", t)[0] for name, t in columns]
        lines.append([weights] + [f"{run['linear']:.1f}" for run in runs])
    return report.markdown(lines)


def cells(study: str) -> str:
    """Write the deciding cells of a study."""
    lines = [["cell", "linear %", "kNN %", "over uniform nce", "t_eff measured"]]
    lines[0] += ["uniformity", "tolerance"]
    for cell in common.read(study):
        runs = row_of(study, cell)
        # of version 1 of hardneg.py; version 2 has another statistic, `spread`
        cold = [run["history"][-1]["temperature_effective"] for run in runs]
        line = [cell] + [spread_of(runs, figure) for figure in ("linear", "knn")]
        over = written(gaps_of(study, f"{cell} − uniform nce"))
        line += ["" if cell == f"uniform nce {COLD}" else over, f"{mean(cold):.3f}"]
        line += [f"{mean(run[x] for run in runs):.2f}" for x in ("uniformity", "tolerance")]
        lines.append(line)
    return report.markdown(lines)


def factors() -> str:
    """Write what each factor changes, with all else equal."""
    lines = [["factor", "cells"]]
    for title in SETS.values():
        lines[0] += [f"{title}, linear", "kNN"]
    shown = [(factor, gap, gap) for factor, gap in FACTORS.items()]
    shown += [(f"{gap}, mean", "", gap) for gap in ("all gradients", "both held weights")]
    for factor, rows, gap in shown:
        line = [factor, rows]
        for study in SETS:
            line += both_written(study, gap)
        lines.append(line)
    return report.markdown(lines)


def cause() -> str:
    """Write the tables of cause.md, each below a title."""
    tables = {"linear readout, %, one run a cell": design()}
    for name, title in SETS.items():
        tables[f"{title}, five seeds"] = cells(name)
    tables["one factor at a time: points, with 95 % intervals"] = factors()
    return "\n\n".join(f"{title}\n{table}" for title, table in tables.items())


# ---- Claims ------------------------------------------------------------------------------------

# whose; what is compared, in which study, which rows, and by which figure if not linear readout
CLAIMS = """
hard negatives gain on CIFAR-10 | [1], [2]
    `hcl`, β = 2 | cifar10-beta | hcl-2 − simclr
    `hcl`, β = 0.5 | cifar10 | hcl − simclr
    `hcl` by kNN | cifar10 | hcl − simclr | knn
    `ot` | cifar10 | ot − simclr
    `hard` | cifar10 | hard − simclr
… on Tiny ImageNet | [2]
    `hcl` | tiny | hcl − simclr
    `ot` | tiny | ot − simclr
    `hard` | tiny | hard − simclr
… on the shapes | here
    `hcl` | shapes | hcl − simclr
    `hcl`, small batches | shapes-64 | hcl − simclr
… after 60 epochs on all of CIFAR-10 | [1], [2]
    `hcl`, t = 0.07 | long | hcl − simclr
    `ot`, t = 0.07 | long | ot − simclr
    `hcl`, t = 0.1 | long | hcl 0.1 − simclr
    tilted weights, t = 0.1 | long | tilted − simclr
… over a plain loss as cold: a registered study of 60 epochs | here
    CIFAR-10, t = 0.2 over 0.1 | pays-cifar10 | tilted 0.2 − simclr 0.1
    CIFAR-10, t = 0.4 over 0.2 | pays-cifar10 | tilted 0.4 − simclr 0.2
    Tiny ImageNet, t = 0.2 over 0.1 | pays-tiny | tilted 0.2 − simclr 0.1
… and the best row over the best plain one | here
    Tiny ImageNet, both at t = 0.1 | pays-tiny | tilted 0.1 − simclr 0.1
the gradient through the weights gains | here
    CIFAR-10 | cause | all gradients
    Tiny ImageNet | cause-tiny | all gradients
    CIFAR-10, 60 epochs | long | tilted − tilted-held
… more than a plain loss as cold | here
    CIFAR-10 | cause | tilted nce − uniform decoupled 0.05
    Tiny ImageNet | cause-tiny | tilted nce − uniform decoupled 0.05
held weights gain | [2]
    CIFAR-10 | cause | both held weights
    Tiny ImageNet | cause-tiny | both held weights
    CIFAR-10, 60 epochs | long | tilted-held − simclr 0.067
a larger β gains more | [1]
    β = 2 over 0.5 | beta | hcl-2 − hcl-0.5
annealing β helps | [1]
    at β = 2 | beta | hcl-2-annealed − hcl-2
true positives help | [1]
    `simclr` | beta | simclr-true − simclr
    `hcl`, β = 1 | beta | hcl-1-true − hcl-1
debiasing adds to hard weights | [1]
    t = 0.5 | hard-debiased | both − hard
transport gains over `hcl`; [2] has them level | a question
    CIFAR-10 | cifar10 | ot − hcl
    Tiny ImageNet | tiny | ot − hcl
    CIFAR-10, four objectives | objectives | coupling − tilted
weights gain, in the mean over four objectives | [2]
    tilted | objectives | tilted − no weights
    the coupling | objectives | coupling − no weights
the cost `exp` is better | [2]
    ε = 0.3 | cost | exp-0 − sqeuclidean
`simclr` is less uniform at a larger t | [4]
    t = 1 over 0.2 | temperature | simclr-1.0 − simclr-0.2 | uniformity
… and less uniform than `hard` | [4]
    t = 1 | temperature | simclr-1.0 − hard-1.0 | uniformity
`hard` is ahead at a large t | [4]
    t = 1 | temperature | hard-1.0 − simclr-1.0
`hard` prefers a large t | [4]
    t = 1 over 0.2 | temperature | hard-1.0 − hard-0.2
`simple` is far behind | [4]
    `simclr` over it | temperature | simclr-0.2 − simple
generated samples help where images are few | [3]
    a tenth | games-10 | DiffHard − SimCLR
    a fifth | games-20 | DiffHard − SimCLR
    a tenth, fine-tuned | finetune-tenth | DiffHard − SimCLR | finetuned
few images cost accuracy, fine-tuned | [3]
    all over a tenth | finetune-all | SimCLR − finetune-tenth: SimCLR | finetuned
generated samples gain more than as many real ones | a question
    a tenth | games-10 | DiffHard − twice
    a fifth | games-20 | DiffHard − twice
finding negatives gains, on text | the field
    mined | code_search | mined − simclr | mrr
    mined, `debiased` | code_search | mined, debiased − simclr | mrr
    mined, over random | code_search | mined − random | mrr
weighting negatives gains, on text | [1]
    `hcl` | code_search | hcl − simclr | mrr
    `hcl` on mined ones | code_search | mined, hcl − mined | mrr
given doubles teach one word's difference | the field
    accuracy | minimal_pairs | + swapped − in-batch | all
"""


def judgement(gaps: list[float]) -> str:
    """Say whether a claim holds, by the interval of its differences."""
    middle, half = report.interval(gaps)
    if abs(middle) <= half:
        return "open"
    return "holds" if middle > 0 else "fails"


def corrected(samples: list, level: float = 0.05) -> set[int]:
    """Return which samples of differences are not around 0, corrected for their number by Holm."""
    chances = [stats.ttest_1samp(gaps, 0).pvalue for gaps in samples]
    order = sorted(range(len(samples)), key=chances.__getitem__)
    remain = set()
    for place, k in enumerate(order):
        if chances[k] > level / (len(samples) - place):
            break
        remain.add(k)
    return remain


def claims() -> str:
    """Write the claims as a Markdown table, a line for each difference."""
    lines, samples, claim = [], [], []
    for text in CLAIMS.strip().split("\n"):
        parts = text.strip().split(" | ")
        if len(parts) == 2:
            claim = parts
            continue
        name, study, gap, figure = [*parts, "linear"][:4]
        gaps = gaps_of(study, gap, figure)
        digits = 2 if figure == "uniformity" else 1
        cells = [report.gain(gaps, digits), str(len(gaps)), judgement(gaps), f"`{study}`"]
        lines.append(claim + [name] + cells)
        samples.append(gaps)
        claim = ["", ""]  # is said once
    for k in corrected(samples):
        lines[k][5] = f"**{lines[k][5]}**"
    heading = ["claim", "whose", "compared", "gain", "n", "does it hold here?", "study"]
    return report.markdown([heading] + lines)


TABLES = {"claims": claims, "cause": cause, "course": course, "table1": table1}
TABLES |= {name: functools.partial(kept, name) for name in ("explicit", "graphs")}
TABLES["course-cost"] = functools.partial(course, "cost-course")


def main():
    """Print the tables that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tables", nargs="+", choices=TABLES)
    for name in parser.parse_args().tables:
        print(f"{TABLES[name]()}\n")


if __name__ == "__main__":
    main()
