"""The README's section on generated samples, run again: python benchmarks/diffhard.py FOLDER

Table 1 of [3], small: SimCLR, SimCLR-2x, CLAE, CL-GAN and DiffHard on a tenth and on a fifth of CIFAR-10, each at an
equal number of real images seen, the ablation of Fig. 2, and Table 3: what the encoders are worth on other images, here
the built-in shapes. FOLDER holds CIFAR-10 as images, one folder a class, in train/ and test/. SimCLR-2x has twice the
real batch, and so as many images in a step as DiffHard; as it then takes half the steps, SimCLR over twice the epochs
is there as well, which costs the encoder what DiffHard costs it.
A run whose results are there is not run again, and one that was stopped goes on from its last epoch. Out come
benchmarks/diffhard.json and the table.
[3] Data-efficient Contrastive Learning by Differentiable Hard Sample and Hard Positive Pair Generation, 2023
"""
import json
import os
import subprocess
import sys

from cifar10 import HERE, arguments, in_parallel, run, spread

COMMON = ["--lr", "0.002", "--temperature", "0.2"]
SIZES = {"0.1": 16, "0.2": 8}  # fraction of the images: epochs, so that 80 000 of them are seen
METHODS = {  # name: (options, images in a batch, epochs as a multiple of the others')
    "SimCLR": (["--loss", "simclr"], 128, 1),
    "SimCLR-2x": (["--loss", "simclr"], 256, 1),
    "SimCLR, twice the epochs": (["--loss", "simclr"], 128, 2),
    "CLAE": (["--method", "clae", "--loss", "simclr"], 128, 1),
    "CL-GAN": (["--method", "diffhard", "--no-pairs", "--no-ascent"], 128, 1),
    "G+Hard": (["--method", "diffhard", "--no-pairs"], 128, 1),
    "G+Pos": (["--method", "diffhard", "--no-ascent"], 128, 1),
    "DiffHard": (["--method", "diffhard"], 128, 1),
}
ABLATION = ("G+Hard", "G+Pos")  # on the smaller set alone


def cell(results, method, fraction, *names):
    """Mean ± standard deviation over the seeds of one figure of a result, named by its keys."""
    values = []
    for value in (r for r in results if (r["name"], str(r["options"]["fraction"])) == (method, fraction)):
        for name in names:
            value = value[name]
        values.append(value)
    return spread(values) if values else ""


def table(results):
    """Markdown rows: linear readout of each method on each share of the images."""
    lines = ["| method | options | 10 % of CIFAR-10 | 20 % | from 10 % to shapes |", "|---|---|---|---|---|"]
    for method, (options, batch, epochs) in METHODS.items():
        options = options + ["--batch-size", str(batch)] * (batch != 128)
        found = [cell(results, method, fraction, "linear") for fraction in SIZES]
        found.append(cell(results, method, "0.1", "transfer", "linear"))
        lines.append(f"| {method} | `{' '.join(options)}` | {' | '.join(found)} |")
    for name, key in (("untrained encoder", "untrained"), ("raw pixels", "raw")):
        found = [cell(results, "SimCLR", fraction, key, "linear") for fraction in SIZES]
        found.append(cell(results, "SimCLR", "0.1", "transfer", key, "linear"))
        lines.append(f"| {name} | | {' | '.join(found)} |")
    return "\n".join(lines)


def transfer(folder, threads):
    """Linear readout and kNN of a run's encoder on the built-in shapes."""
    path = folder / "evaluate-shapes.json"
    if not path.exists():
        subprocess.run([sys.executable, HERE.parent / "train.py", "--evaluate", folder], check=True,
                       capture_output=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    results = json.loads(path.read_text())
    return {name: results[name] for name in ("data", "linear", "knn", "untrained", "raw")}


def main():
    args = arguments(__doc__, "runs/diffhard")

    def one(seed, fraction, method, threads):
        options, batch, epochs = METHODS[method]
        options = [*options, *COMMON, "--fraction", fraction, "--epochs", str(epochs * SIZES[fraction]),
                   "--batch-size", str(batch), "--seed", str(seed)]
        folder = args.out / f"{method.replace(', ', '-').replace(' ', '-')}-{fraction}-{seed}"
        found = {**run(args.data, folder, options, threads), "name": method, "data": "CIFAR-10"}
        return {**found, "transfer": transfer(folder, threads)} if fraction == "0.1" else found

    todo = [(seed, fraction, method) for seed in range(args.seeds) for fraction in SIZES for method in METHODS
            if fraction == "0.1" or method not in ABLATION]
    results = in_parallel(one, todo, args.jobs)
    (HERE / "diffhard.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
