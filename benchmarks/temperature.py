"""Run the table of temperatures again: python benchmarks/temperature.py FOLDER

Table 1 of [4], small: four losses at temperatures from 0.07 to 1, on the same 10 000 images of CIFAR-10,
1 000 of each class. The two simple losses act on cosines and have no temperature. FOLDER and reruns are as in
cifar10.py. The results go to temperature.json and two plots.
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. CVPR 2021
"""
import statistics

from matplotlib import pyplot as plt

from cifar10 import HERE, program, run, spread

COMMON = ["--fraction", "0.2", "--epochs", "12", "--batch-size", "128", "--lr", "0.002"]
TEMPERATURES = (0.07, 0.2, 0.3, 0.5, 0.7, 1.0)
LOSSES = {  # loss: its name in [4], options, its temperatures, colour
    "simclr": ("Contrastive", [], TEMPERATURES, "tab:blue"),
    "hard": ("HardContrastive", ["--alpha", "0.1"], TEMPERATURES, "tab:orange"),
    "simple": ("Simple", [], (None,), "tab:gray"),
    "hard-simple": ("HardSimple", ["--alpha", "0.03"], (None,), "tab:green"),
}
RUNS = [(loss, t) for loss, (_, _, temperatures, _) in LOSSES.items() for t in temperatures]


def values(results, loss, temperature, figure):
    """Return one figure of a row, a value for each seed."""
    return [r[figure] for r in results if (r["loss"], r["temperature"]) == (loss, temperature)]


def table(results):
    """Write the Markdown table: mean ± standard deviation over the seeds."""
    lines = ["| loss | t | linear readout % | uniformity | tolerance |", "|---|---|---|---|---|"]
    for loss, t in RUNS:
        cells = [spread(values(results, loss, t, figure), digits)
                 for digits, figure in ((1, "linear"), (2, "uniformity"), (2, "tolerance"))]
        lines.append(f"| {LOSSES[loss][0]} (`{loss}`) | {t or ''} | {' | '.join(cells)} |")
    untrained = statistics.mean(r["untrained"]["linear"] for r in results)
    lines.append(f"| untrained encoder | | {untrained:.1f} | | |")
    lines.append(f"| raw pixels | | {results[0]['raw']['linear']:.1f} | | |")
    return "\n".join(lines)


def plot(results, figure, label):
    """Draw one figure over the temperature; a loss without temperature is a horizontal line."""
    picture, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for loss, (name, _, temperatures, colour) in LOSSES.items():
        points = [values(results, loss, t, figure) for t in temperatures]
        mean = [statistics.mean(point) for point in points]
        deviation = [statistics.stdev(point) if len(point) > 1 else 0.0 for point in points]
        if temperatures == TEMPERATURES:
            axes.errorbar(temperatures, mean, deviation, marker="o", capsize=3, color=colour, label=name)
        else:
            axes.axhline(mean[0], linestyle="--", color=colour, label=f"{name} (no temperature)")
            axes.axhspan(mean[0] - deviation[0], mean[0] + deviation[0], alpha=0.15, color=colour)
    seeds = len({r["seed"] for r in results})
    axes.set(xlabel="temperature", ylabel=label, xticks=TEMPERATURES)
    axes.set_title(f"CIFAR-10, 10 000 images; mean of {seeds} seeds ± standard deviation", fontsize=9)
    axes.legend(fontsize=8)
    picture.savefig(HERE / f"temperature-{'accuracy' if figure == 'linear' else figure}.png", dpi=120)
    plt.close(picture)


def one(data, out, seed, loss, t, threads):
    """Train one loss at one temperature with one seed."""
    options = ["--loss", loss, *LOSSES[loss][1], *COMMON, "--seed", str(seed),
               *(["--temperature", str(t)] if t else [])]
    found = run(data, out / f"{loss}-{t}-{seed}", options, threads)
    return {**found, "data": "CIFAR-10, 10 000 images", "temperature": t}


if __name__ == "__main__":
    results = program(__doc__, "temperature", RUNS, one, table)
    plot(results, "linear", "linear readout, %")
    plot(results, "uniformity", "uniformity (lower is more even)")
