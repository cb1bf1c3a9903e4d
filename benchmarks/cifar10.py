"""Run the README's table again: python benchmarks/cifar10.py FOLDER

FOLDER holds CIFAR-10, one folder of images per class, in train/ and test/. Each loss trains with three seeds
on the same 20 000 images, 2 000 of each class. Its options were chosen on seed 100. A run that has results is
not repeated, and a stopped run goes on from its last epoch. The results go to cifar10.json.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402
from train import spread  # noqa: E402

COMMON = ["--fraction", "0.4", "--epochs", "10", "--lr", "0.003"]
METHODS = {
    "simclr": ["--temperature", "0.2"],
    "debiased": ["--temperature", "0.2", "--tau-plus", "0.02"],
    "hcl": ["--temperature", "0.2", "--beta", "0.5", "--tau-plus", "0.01"],
    "ot": ["--temperature", "0.2", "--epsilon", "0.5"],
    "hard": ["--temperature", "0.2", "--alpha", "0.3"],
    "hard-simple": ["--alpha", "0.03"],
}


# ---- Shared with temperature.py and diffhard.py ----------------------------------------------------------
def command(options, threads):
    """Run train.py in a process of its own; RuntimeError with the end of its messages if it fails."""
    log = subprocess.run([sys.executable, HERE.parent / "train.py", *options], capture_output=True, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    if log.returncode:
        raise RuntimeError(f"{' '.join(map(str, options))}: {log.stderr[-500:]}")


def run(data, folder, options, threads):
    """Train with these options, unless the folder has the results → results without paths."""
    options = ["--data", data, *options, "--out", str(folder)]
    if not (folder / "results.json").exists():
        command(options, threads)
    results = json.loads((folder / "results.json").read_text())
    wanted = json.loads(json.dumps(vars(train.arguments(options)), default=str))
    if any(results["options"].get(name, value) != value for name, value in wanted.items()
           if name not in ("data", *train.NOT_OF_THE_RUN)):
        raise RuntimeError(f"{folder} holds a run with other options: remove it, or name another --out")
    print(f"{folder.name:24} {results['linear']:.2f} %", flush=True)
    results["options"] = {k: v for k, v in results["options"].items() if k not in ("data", "root", "out")}
    return results


def program(doc, name, todo, one, table):
    """Run one(data, folder, seed, *what, threads) for each seed and what in todo; save and print it."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("data", help="CIFAR-10 as a folder of images")
    parser.add_argument("--out", type=Path, default=Path("runs", name), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the cores")
    args = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [(seed, *what) for seed in range(args.seeds) for what in todo]
        results = list(pool.map(lambda what: one(args.data, args.out, *what, threads), runs))
    (HERE / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return results


# ---- The table -------------------------------------------------------------------------------------------
def table(results):
    """Write the Markdown table, the best loss first."""
    def row(name, options, some):
        cells = [spread([result[figure] for result in some]) for figure in ("linear", "knn")]
        return f"| {name} |{options} | {' | '.join(cells)} |"

    groups = {loss: [r for r in results if r["loss"] == loss] for loss in METHODS}
    groups = sorted(groups.items(), key=lambda item: -statistics.mean(r["linear"] for r in item[1]))
    lines = ["| loss | options | linear readout % | kNN % |", "|---|---|---|---|"]
    lines += [row(f"`{loss}`", f" `{' '.join(METHODS[loss])}`", some) for loss, some in groups]
    lines.append(row("untrained encoder", "", [r["untrained"] for r in results if r["loss"] == "simclr"]))
    lines.append(row("raw pixels", "", [results[0]["raw"]]))
    return "\n".join(lines)


def one(data, out, seed, loss, threads):
    """Train one loss with one seed."""
    options = ["--loss", loss, *METHODS[loss], *COMMON, "--seed", str(seed)]
    return {**run(data, out / f"{loss}-{seed}", options, threads), "data": "CIFAR-10, 20 000 images"}


if __name__ == "__main__":
    program(__doc__, "cifar10", [(loss,) for loss in METHODS], one, table)
