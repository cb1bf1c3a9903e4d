"""The README's CIFAR-10 table, run again: python benchmarks/cifar10.py FOLDER

FOLDER holds CIFAR-10 as images, one folder a class, in train/ and test/. Each method is trained with three seeds on
20 000 images (2 000 of each class, the same for all); readout and kNN are of the features of these and of the test
images. A run whose results are there is not run again, so a kill costs the runs that were under way. The options of
each method were chosen on seed 100, which is none of the three. Results come to benchmarks/cifar10.json.
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

COMMON = ["--fraction", "0.4", "--epochs", "10", "--lr", "0.003"]
METHODS = {
    "simclr": ["--temperature", "0.2"],
    "debiased": ["--temperature", "0.2", "--tau-plus", "0.02"],
    "hcl": ["--temperature", "0.2", "--beta", "0.5", "--tau-plus", "0.01"],
    "ot": ["--temperature", "0.2", "--epsilon", "0.5"],
    "hard": ["--temperature", "0.2", "--alpha", "0.3"],
    "hard-simple": ["--alpha", "0.03"],
}


def run(data, folder, options, threads):
    """The results of train.py with these options; they are taken from the folder if they are there."""
    options = ["--data", data, *options, "--out", str(folder)]
    if not (folder / "results.json").exists():
        log = subprocess.run([sys.executable, HERE.parent / "train.py", *options], capture_output=True, text=True,
                             env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        if log.returncode:
            raise RuntimeError(f"{folder}: {log.stderr[-500:]}")
    results = json.loads((folder / "results.json").read_text())
    wanted = json.loads(json.dumps(vars(train.arguments(options)), default=str))
    if any(results["options"].get(k, v) != v for k, v in wanted.items() if k not in ("data", "out", "device")):
        raise RuntimeError(f"{folder} holds a run of other options: remove it, or name another --out")
    print(f"{folder.name:24} {results['linear']:.2f} %", flush=True)
    results["options"] = {k: v for k, v in results["options"].items() if k not in ("data", "root", "out")}
    return results


def in_parallel(job, todo, jobs):
    """Some at a time, each with its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda some: job(*some, threads), todo))


def arguments(doc, out):
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("data", help="CIFAR-10 as a folder of images")
    parser.add_argument("--out", type=Path, default=Path(out), help="where the runs go")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the cores")
    return parser.parse_args()


def spread(values, digits=1):
    """Mean ± standard deviation, of one value without the latter."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def table(results):
    """Markdown rows, the best first: mean ± standard deviation over the seeds."""
    def cell(rows, name):
        return spread([row[name] for row in rows])

    groups = {method: [r for r in results if r["loss"] == method] for method in METHODS}
    raw = results[0]["raw"]
    lines = ["| loss | options | linear readout % | kNN % |", "|---|---|---|---|"]
    for method, rows in sorted(groups.items(), key=lambda item: -statistics.mean(r["linear"] for r in item[1])):
        lines.append(f"| `{method}` | `{' '.join(METHODS[method])}` | {cell(rows, 'linear')} | {cell(rows, 'knn')} |")
    untrained = [r["untrained"] for r in results if r["loss"] == next(iter(METHODS))]
    lines.append(f"| untrained encoder | | {cell(untrained, 'linear')} | {cell(untrained, 'knn')} |")
    lines.append(f"| raw pixels | | {raw['linear']:.1f} | {raw['knn']:.1f} |")
    return "\n".join(lines)


def main():
    args = arguments(__doc__, "runs/cifar10")

    def one(method, seed, threads):
        options = ["--loss", method, *METHODS[method], *COMMON, "--seed", str(seed)]
        return {**run(args.data, args.out / f"{method}-{seed}", options, threads), "data": "CIFAR-10, 20 000 images"}

    results = in_parallel(one, [(method, seed) for seed in range(args.seeds) for method in METHODS], args.jobs)
    (HERE / "cifar10.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
