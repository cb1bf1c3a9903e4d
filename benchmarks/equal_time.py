"""Compare mined negatives with plain training of the same time: python benchmarks/equal_time.py

studies/equal-time.md says what is asked, and what was decided before the first run. sentences.py
says what to install. A run is recorded as it ends, and is not repeated.
"""

import itertools
import subprocess
from pathlib import Path

import common
import descriptions
import tables
import torch
from sentence_rows import PAIRS, SETTINGS, by_row, gaps, standing
from sentences import BATCH, SEARCH, Run, evaluate, machine, read_encoder

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
    """Write what each row has and measures, its trials, and the differences of the questions."""
    names = {"mrr": "MRR", "r1": "R@1", "r10": "R@10"}
    about = ["pairs", "batch", "candidates", "minutes", "trials", "t", "rate", "n"]
    lines = [["row", *about, *names.values()]]
    trials = [["MRR of trials", *(f"t = {t}, rate {rate}" for t, rate in TRIALS)]]
    tried = by_row(found["trials"])
    for row, runs in by_row(found["runs"]).items():
        settings = runs[0]["settings"]
        batch = settings.get("batch", BATCH)
        seen = settings["pairs"], batch, batch * (1 + settings["mined"])
        minutes = report.spread([run["seconds"] / 60 for run in runs])
        tuned = len(tried[row]), settings["temperature"], settings["rate"], len(runs)
        measured = [report.spread([run[name] for run in runs]) for name in names]
        lines.append([f"`{row}`", *map(str, [*seen, minutes, *tuned]), *measured])
        of_pair = {(x["settings"]["temperature"], x["settings"]["rate"]): x for x in tried[row]}
        trials.append([f"`{row}`", *(f"{of_pair[pair]['mrr']:.1f}" for pair in TRIALS)])
    differences = [["difference", "n", *names.values(), "p of MRR", "shown"]]
    asked = [question for question in QUESTIONS if gaps(found["runs"], question)]
    gains = {question: tables.judge("equal_time", question) for question in asked}
    stand = standing({question: gain.chance for question, gain in gains.items()})
    for question, gain in gains.items():
        others = [report.gain(gaps(found["runs"], question, name)) for name in ("r1", "r10")]
        shown = "yes" if question in stand and gain.middle > 0 else "no"
        line = [question, str(gain.n), str(gain), *others]
        differences.append([*line, f"{gain.chance:.4f}", shown])
    return "\n\n".join(map(report.markdown, (lines, trials, differences)))


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
