"""Compare mined negatives with plain training of the same time: python benchmarks/equal_time.py

studies/equal-time.md says what is asked, and what was decided before the first run. Encoder, texts
and steps are those of sentences.py, which also says what to install. A run is recorded as it ends,
in results/equal_time.json, and is not repeated. So stop it when you like, and start it again.
"""

import itertools
import math
import subprocess
from pathlib import Path

import common
import descriptions
import torch
from sentence_rows import PAIRS, SETTINGS, by_row
from sentences import SEARCH, Run, evaluate, machine, read_encoder
from torch import Tensor

from training import report

SEEDS = range(10, 15)  # no other run has them
TRIALS = [*itertools.product((0.03, 0.05), (1e-4, 2e-4))]  # temperature and rate
ROWS = {
    "mined, ot": {"mined": 1, "loss": "ot", "epsilon": 0.1},
    "simclr, twice": {"pairs": 2 * PAIRS},
    "simclr, 256": {"pairs": 2 * PAIRS, "batch": 256},
    "mined 4": {"mined": 4},
    "simclr, four times": {"pairs": 4 * PAIRS},
}
QUESTIONS = ["mined, ot − simclr, twice", "mined, ot − simclr, 256", "mined 4 − simclr, four times"]


def over_seeds_and_sources(gaps: Tensor) -> tuple[float, float, float]:
    """Estimate the mean of gaps (seeds, groups of sources), where both vary.

    Return the mean, half of its 95 % interval, and the probability of a mean so far from 0 if there
    is none. The variance of a mean over crossed factors is that over seeds and that over groups,
    less that of what is left, which both contain. Satterthwaite's formula has its degrees of
    freedom. It is never smaller than the variance over seeds alone."""
    from scipy import stats

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


class Study:
    """Go through the registered plan, and record what is measured."""

    def __init__(self, parts: dict, record: common.Record, folder: Path):
        self.parts, self.record, self.folder = parts, record, folder

    def train(self, row: str, temperature: float, rate: float, seed: int, part: str) -> dict:
        """Train a row → its settings, and what it measures on a part."""
        settings = SETTINGS | ROWS[row] | {"temperature": temperature, "rate": rate}
        about = {"row": row, "seed": seed, "settings": settings}
        print(about, flush=True)
        model = read_encoder(self.folder)
        run = Run(model, self.parts["train"], settings, seed)
        run.train()
        about |= {"seconds": run.seconds, "commit": commit()} | machine()
        return about | evaluate(model, self.parts[part])

    def keep(self, kind: str, row: str, pair: tuple, seed: int, part: str) -> dict:
        """Return a run from the record, or make it and record it."""
        for run in self.record.found[kind]:
            settings = run["settings"]
            found = run["row"], (settings["temperature"], settings["rate"]), run["seed"]
            if found == (row, pair, seed):
                return run
        run = self.train(row, *pair, seed, part)
        self.record.found[kind].append(run)
        common.write(self.record.name, self.record.found)
        return run

    def choose(self, row: str) -> tuple[float, float]:
        """Choose temperature and rate of a row, by four runs of full length."""
        trials = [self.keep("trials", row, pair, SEARCH, "validation") for pair in TRIALS]
        best = max(trials, key=lambda run: run["mrr"])
        return best["settings"]["temperature"], best["settings"]["rate"]

    def go(self) -> None:
        """Answer the first two questions, and then the third."""
        names = list(ROWS)
        for some in (names[:3], names[3:]):
            chosen = {row: self.choose(row) for row in some}
            for seed in SEEDS:
                for row in some:
                    self.keep("runs", row, chosen[row], seed, "test")


def table(found: dict) -> str:
    """Write trials and runs, and the differences over seeds and sources."""
    names = ["mrr", "r1", "r10", "seconds"]
    lines = [["row", "seed", "t", "rate", *names]]
    for run in found["trials"] + found["runs"]:
        settings = [str(run["settings"][name]) for name in ("temperature", "rate")]
        measured = [f"{run[name]:.1f}" for name in names]
        lines.append([f"`{run['row']}`", str(run["seed"]), *settings, *measured])
    differences = [["difference", "n", "MRR", "p"]]
    rows = by_row(found["runs"])
    for question in QUESTIONS:
        one, other = [rows.get(row, []) for row in question.split(" − ")]
        of_seed = {run["seed"]: torch.tensor(run["by_group"]) for run in other}
        pairs = [run for run in one if run["seed"] in of_seed]
        if len(pairs) > 1:
            gaps = [torch.tensor(run["by_group"]) - of_seed[run["seed"]] for run in pairs]
            mean, half, chance = over_seeds_and_sources(torch.stack(gaps))
            middle = f"{mean:+.1f} ± {half:.1f}"
            differences.append([question, str(len(pairs)), middle, f"{chance:.4f}"])
    return f"{report.markdown(lines)}\n\n{report.markdown(differences)}"


def commit() -> str:
    """Name the commit of the code."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main():
    """Run what is not recorded yet, and print the table."""
    parser = common.parser_of(__doc__)
    parser.add_argument("--lists", type=Path, default=descriptions.LISTS, help="apt's lists")
    parser.add_argument("--model", type=Path, help="folder of the encoder, if not the package's")
    args = parser.parse_args()
    if not args.show:
        torch.set_num_threads(1)
        folder = args.model or descriptions.model_folder()
        corpus = descriptions.load(args.lists, folder)
        record = common.Record("equal_time", corpus.about)
        record.found.setdefault("trials", [])
        Study(corpus.parts, record, folder).go()
    print(table(common.read("equal_time")))


if __name__ == "__main__":
    main()
