"""Run the table of generated samples again: python benchmarks/diffhard.py FOLDER

Tables 1 and 3 and Fig. 2 of [3], small: SimCLR, SimCLR-2x, CLAE, CL-GAN, DiffHard and its ablation, on a
tenth and a fifth of CIFAR-10, and a readout of the encoders on other images, the built-in shapes. Every run
sees equally many real images. SimCLR over twice the epochs is the exception: its encoder sees as many images
as DiffHard's. FOLDER and reruns are as in cifar10.py. The results go to diffhard.json.
[3] Wu, Wang, Zeng, Shi, Hu: Synthetic Data Can Also Teach. AAAI 2023
"""
import json

from cifar10 import command, program, run, spread

COMMON = ["--lr", "0.002", "--temperature", "0.2"]
SIZES = {"0.1": (16, 8), "0.2": (8, 4)}  # share of the images: epochs (80 000 images), epochs of pre-training
METHODS = {  # name: options, images in a batch, epochs as a multiple of the others'
    "SimCLR": (["--loss", "simclr"], 128, 1),
    "SimCLR-2x": (["--loss", "simclr"], 256, 1),
    "SimCLR, twice the epochs": (["--loss", "simclr"], 128, 2),
    "CLAE": (["--method", "clae", "--loss", "simclr"], 128, 1),
    "CL-GAN": (["--method", "diffhard", "--no-pairs", "--no-ascent"], 128, 1),
    "G+Hard": (["--method", "diffhard", "--no-pairs"], 128, 1),
    "G+Pos": (["--method", "diffhard", "--no-ascent"], 128, 1),
    "DiffHard": (["--method", "diffhard"], 128, 1),
}
ABLATION = ("G+Hard", "G+Pos")  # on the tenth alone


def cell(results, method, fraction, *keys):
    """Write mean ± standard deviation over the seeds of the figure at these keys; nothing without runs."""
    found = [r for r in results if (r["name"], str(r["options"]["fraction"])) == (method, fraction)]
    for key in keys:
        found = [value[key] for value in found]
    return spread(found) if found else ""


def table(results):
    """Write the Markdown table: the linear readout of each method on each share of the images."""
    def row(name, options, method, *keys):
        found = [cell(results, method, fraction, *keys, "linear") for fraction in SIZES]
        found.append(cell(results, method, "0.1", "transfer", *keys, "linear"))
        return f"| {name} |{options} | {' | '.join(found)} |"

    lines = ["| method | options | 10 % of CIFAR-10 | 20 % | from 10 % to shapes |", "|---|---|---|---|---|"]
    for method, (options, batch, _) in METHODS.items():
        options = options + ["--batch-size", str(batch)] * (batch != 128)
        lines.append(row(method, f" `{' '.join(options)}`", method))
    return "\n".join([*lines, row("untrained encoder", "", "SimCLR", "untrained"),
                      row("raw pixels", "", "SimCLR", "raw")])


def transfer(folder, threads):
    """Read out a run's encoder on the built-in shapes."""
    path = folder / "evaluate-shapes.json"
    if not path.exists():
        command(["--evaluate", folder], threads)
    results = json.loads(path.read_text())
    return {name: results[name] for name in ("data", "linear", "knn", "untrained", "raw")}


def one(data, out, seed, fraction, method, threads):
    """Train one method on one share of the images with one seed."""
    (options, batch, multiple), (epochs, pretrain) = METHODS[method], SIZES[fraction]
    options = [*options, *COMMON, "--fraction", fraction, "--epochs", str(multiple * epochs), "--pretrain",
               str(pretrain), "--batch-size", str(batch), "--seed", str(seed)]
    folder = out / f"{method.replace(', ', '-').replace(' ', '-')}-{fraction}-{seed}"
    found = {**run(data, folder, options, threads), "name": method, "data": "CIFAR-10"}
    return {**found, "transfer": transfer(folder, threads)} if fraction == "0.1" else found


if __name__ == "__main__":
    todo = [(fraction, method) for fraction in SIZES for method in METHODS
            if fraction == "0.1" or method not in ABLATION]
    program(__doc__, "diffhard", todo, one, table)
