"""The README's section on temperature, run again: python benchmarks/temperature.py FOLDER

Table 1 of [4], small: the contrastive, the hard contrastive, the simple and the hard simple loss over temperatures
from 0.07 to 1. FOLDER holds CIFAR-10 as images, one folder a class, in train/ and test/; 10 000 of them are trained on,
1 000 of each class, the same for all. The simple losses act on cosines and have no temperature.
A run whose results are there is not run again, and one that was stopped goes on from its last epoch. Out come
benchmarks/temperature.json, the table of accuracy, uniformity and tolerance, and two plots beside it.
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. CVPR 2021
"""
import json
import statistics

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from cifar10 import HERE, arguments, in_parallel, run, spread  # noqa: E402

COMMON = ["--fraction", "0.2", "--epochs", "12", "--batch-size", "128", "--lr", "0.002"]
TEMPERATURES = (0.07, 0.2, 0.3, 0.5, 0.7, 1.0)
LOSSES = {  # loss: (its name in [4], options, whether it has a temperature, colour)
    "simclr": ("Contrastive", [], True, "tab:blue"),
    "hard": ("HardContrastive", ["--alpha", "0.1"], True, "tab:orange"),
    "simple": ("Simple", [], False, "tab:gray"),
    "hard-simple": ("HardSimple", ["--alpha", "0.03"], False, "tab:green"),
}
FIGURES = ("linear", "uniformity", "tolerance")
RUNS = [(loss, t) for loss, (_, _, hot, _) in LOSSES.items() for t in (TEMPERATURES if hot else (None,))]


def values(results, loss, temperature, figure):
    """One figure of a row's runs, a value for each seed."""
    return [r[figure] for r in results if (r["loss"], r["temperature"]) == (loss, temperature)]


def table(results):
    """Markdown rows: mean ± standard deviation over the seeds."""
    lines = ["| loss | t | linear readout % | uniformity | tolerance |", "|---|---|---|---|---|"]
    for loss, t in RUNS:
        cells = [spread(values(results, loss, t, figure), digits) for digits, figure in zip((1, 2, 2), FIGURES)]
        lines.append(f"| {LOSSES[loss][0]} (`{loss}`) | {t or ''} | {' | '.join(cells)} |")
    before = results[0]
    lines.append(f"| untrained encoder | | {statistics.mean(r['untrained']['linear'] for r in results):.1f} | | |")
    lines.append(f"| raw pixels | | {before['raw']['linear']:.1f} | | |")
    return "\n".join(lines)


def plot(results, figure, label, path):
    """One figure over the temperature; a loss without one is a level line."""
    picture, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for loss, (name, _, hot, colour) in LOSSES.items():
        points = [values(results, loss, t, figure) for t in (TEMPERATURES if hot else (None,))]
        mean = [statistics.mean(point) for point in points]
        deviation = [statistics.stdev(point) if len(point) > 1 else 0.0 for point in points]
        if hot:
            axes.errorbar(TEMPERATURES, mean, deviation, marker="o", capsize=3, color=colour, label=name)
        else:
            axes.axhline(mean[0], linestyle="--", color=colour, label=f"{name} (no temperature)")
            axes.axhspan(mean[0] - deviation[0], mean[0] + deviation[0], alpha=0.15, color=colour)
    seeds = len({r["seed"] for r in results})
    axes.set(xlabel="temperature", ylabel=label, xticks=TEMPERATURES,
             title=f"CIFAR-10, 10 000 images; mean of {seeds} seeds ± standard deviation")
    axes.title.set_fontsize(9)
    axes.legend(fontsize=8)
    picture.savefig(path, dpi=120)
    plt.close(picture)


def main():
    args = arguments(__doc__, "runs/temperature")

    def one(loss, t, seed, threads):
        options = ["--loss", loss, *LOSSES[loss][1], *COMMON, "--seed", str(seed),
                   *(["--temperature", str(t)] if t else [])]
        found = run(args.data, args.out / f"{loss}-{t}-{seed}", options, threads)
        return {**found, "data": "CIFAR-10, 10 000 images", "temperature": t}

    results = in_parallel(one, [(loss, t, seed) for seed in range(args.seeds) for loss, t in RUNS], args.jobs)
    (HERE / "temperature.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, "linear", "linear readout, %", HERE / "temperature-accuracy.png")
    plot(results, "uniformity", "uniformity (lower is more even)", HERE / "temperature-uniformity.png")
    print(table(results))


if __name__ == "__main__":
    main()
