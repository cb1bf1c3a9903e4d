"""Train and compare, study by study:
python benchmarks/studies.py cifar10-t cifar10 --cifar10 FOLDER

A study is a comparison of train.py: rows of options, on the same images, for the same epochs, with
the same seeds. Seed 100 chooses options, seeds 0 to 4 compare the choices. A run that has its
results in --out is not repeated, and a stopped run goes on. The results go to results/STUDY.json;
--show prints their tables again. FOLDER holds CIFAR-10 or Tiny ImageNet as images, one folder per
class, in train/ and test/.
[3] Wu, Wang, Zeng, Shi, Hu: Synthetic Data Can Also Teach. AAAI 2023
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. CVPR 2021
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train

HERE = Path(__file__).resolve().parent
SEARCH, THREE, FIVE = [100], range(3), range(5)
TEMPERATURES = (0.07, 0.1, 0.2, 0.3, 0.5, 1.0)
LONG = "--fraction 0.4 --epochs 10 --lr 0.003"  # 20 000 images of CIFAR-10 or Tiny ImageNet
SHORT = "--fraction 0.2 --epochs 12 --batch-size 128 --lr 0.002"  # 10 000 images of CIFAR-10


def over_t(losses, temperatures=TEMPERATURES):
    """Make a row for each loss, {loss: its other options}, and each temperature."""
    return {
        f"{loss}-{t}": f"--loss {loss} --temperature {t} {options}"
        for loss, options in losses.items()
        for t in temperatures
    }


def search(loss, *settings):
    """Make a row for each setting of a loss."""
    return {f"{loss}-{k}": f"--loss {loss} {setting}" for k, setting in enumerate(settings)}


CURVE = {
    "simclr": "",
    "hard": "--alpha 0.3",
    "hcl": "--beta 0.5 --tau-plus 0.01",
    "ot": "--epsilon 0.3",
}
GAME = "--method diffhard --width 16 --every 4"
GAMES = {  # [3], Tables 1 and 3, Fig. 2; a run sees 80 000 real images, but for twice the epochs
    "SimCLR": "--loss simclr",
    "SimCLR-2x": "--loss simclr --batch-size 256",
    "CLAE": "--method clae --loss simclr --bound 0.015",
    "CL-GAN": f"{GAME} --no-pairs --no-ascent",
    "G+Hard": f"{GAME} --no-pairs",
    "G+Pos": f"{GAME} --no-ascent",
    "DiffHard": GAME,
}
STUDIES = {  # name: data, seeds, options of all rows, {row: its options}
    "defaults": (
        "shapes",
        SEARCH,
        "",
        {
            **search("simclr", *(f"--temperature {t}" for t in (0.05, 0.07, 0.1, 0.2))),
            **search(
                "debiased",
                "--temperature 0.1 --tau-plus 0.001",
                "--temperature 0.1 --tau-plus 0.01",
                "--temperature 0.2 --tau-plus 0.01",
                "--temperature 0.3 --tau-plus 0.1",
            ),
            **search(
                "hcl",
                "--temperature 0.2 --beta 0.5 --tau-plus 0.01",
                "--temperature 0.2 --beta 1 --tau-plus 0.01",
                "--temperature 0.3 --beta 1 --tau-plus 0.01",
                "--temperature 0.3 --beta 1 --tau-plus 0.1",
            ),
            **search(
                "ot", *(f"--temperature {t} --epsilon {e}" for t in (0.1, 0.2) for e in (0.1, 0.3))
            ),
            **search(
                "hard",
                "--temperature 0.07 --alpha 0.3",
                "--temperature 0.1 --alpha 0.1",
                "--temperature 0.1 --alpha 0.3",
                "--temperature 0.2 --alpha 0.1",
            ),
            **search(
                "hard-simple",
                *(
                    f"--alpha {alpha} --lead-in --epochs 16 --batch-size 256 --lr 0.008"
                    for alpha in (0.01, 0.03, 0.1, 0.3)
                ),
            ),
            **search(
                "triplet",
                *(
                    f"--margin {margin} --weights hardest --batch-size 256 --lr 0.008"
                    for margin in (0, 0.2, 0.5, 1)
                ),
            ),
        },
    ),
    "shapes": (
        "shapes",
        FIVE,
        "",
        {loss: f"--loss {loss}" for loss in ("simclr", "debiased", "hcl", "ot", "hard")},
    ),
    "shapes-64-search": (
        "shapes",
        SEARCH,
        "--batch-size 64 --lr 0.002",
        {
            **search("simclr", "--temperature 0.05", "--temperature 0.1", "--temperature 0.2"),
            **search(
                "hcl",
                *(
                    f"--temperature {t} --beta {beta} --tau-plus {tau}"
                    for t, beta, tau in ((0.1, 0.5, 0.01), (0.2, 0.5, 0.01), (0.3, 1, 0.1))
                ),
            ),
        },
    ),
    "shapes-64": (
        "shapes",
        FIVE,
        "--batch-size 64 --lr 0.002",
        {
            "simclr": "--loss simclr --temperature 0.1",
            "hcl": "--loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0.01",
        },
    ),
    "cifar10": (
        "cifar10",
        FIVE,
        LONG,
        {
            "simclr": "--loss simclr --temperature 0.1",
            "hard": "--loss hard --temperature 0.07 --alpha 0.3",
            "hcl": "--loss hcl --temperature 0.07 --beta 0.5 --tau-plus 0.01",
            "ot": "--loss ot --temperature 0.07 --epsilon 0.3",
        },
    ),
    "cifar10-beta": (
        "cifar10",
        FIVE,
        LONG,
        {
            "simclr": "--loss simclr --temperature 0.1",
            "hcl-2": "--loss hcl --temperature 0.2 --beta 2 --tau-plus 0.01",
        },
    ),
    "cifar10-t": ("cifar10", SEARCH, LONG, over_t(CURVE)),
    "tiny-t": (
        "tiny",
        SEARCH,
        f"{LONG} --size 32",
        over_t({**CURVE, "hcl": "--beta 0.5 --tau-plus 0.0005"}),
    ),
    "tiny": (
        "tiny",
        FIVE,
        f"{LONG} --size 32",
        {
            "simclr": "--loss simclr --temperature 0.1",
            "hard": "--loss hard --temperature 0.1 --alpha 0.3",
            "hcl": "--loss hcl --temperature 0.07 --beta 0.5 --tau-plus 0.0005",
            "ot": "--loss ot --temperature 0.07 --epsilon 0.3",
        },
    ),
    **{
        f"classes-{n}": (
            f"tiny-{n}",
            THREE,
            f"--fraction {share} --size 32 --epochs 40 --lr 0.003",
            {
                "simclr": "--loss simclr --temperature 0.1",
                "hcl": "--loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0",
            },
        )
        for n, share in ((10, 1), (50, 0.2), (200, 0.05))
    },  # 2 500 images of Tiny ImageNet
    "batch": (
        "cifar10",
        THREE,
        "--fraction 0.2 --epochs 12 --lr 0.002",
        {
            f"{loss}-{size}": f"--loss {loss} {options} --batch-size {size}"
            for size in (32, 128, 512)
            for loss, options in (
                ("simclr", "--temperature 0.1"),
                ("hcl", "--temperature 0.2 --beta 0.5 --tau-plus 0.01"),
            )
        },
    ),
    "beta": (
        "cifar10",
        THREE,
        f"{SHORT} --temperature 0.2",
        {  # [1], App. C
            "simclr": "--loss simclr",
            "simclr-true": "--loss simclr --true-positives",
            **{
                f"hcl-{beta}{name}": f"--loss hcl --beta {beta} --tau-plus 0.01 {options}"
                for beta in (0.5, 1, 2)
                for name, options in (
                    ("", ""),
                    ("-annealed", "--anneal"),
                    ("-true", "--true-positives"),
                )
            },
        },
    ),
    "epsilon-tau": (
        "cifar10",
        SEARCH,
        f"{SHORT} --temperature 0.2",
        {  # [2], VII-A
            f"{epsilon}-{tau}": f"--loss ot --epsilon {epsilon} --tau-plus {tau}"
            for epsilon in (0.1, 0.3, 1)
            for tau in (0, 0.01, 0.05)
        },
    ),
    "cost": (
        "cifar10",
        THREE,
        f"{SHORT} --temperature 0.2 --loss ot",
        {  # [2], VII-C, Fig. 1
            "sqeuclidean": "--epsilon 0.3",
            "exp-0": "--epsilon 0.3 --cost exp",
            "exp-2": "--epsilon 0.3 --cost exp --kappa 2",
        },
    ),
    "alpha": (
        "cifar10",
        SEARCH,
        f"{SHORT} --temperature 0.2",
        {f"hard-{alpha}": f"--loss hard --alpha {alpha}" for alpha in (0.01, 0.03, 0.1, 0.3, 1)},
    ),
    "temperature": (
        "cifar10",
        THREE,
        SHORT,
        {  # [4], Table 1
            **over_t({"simclr": "", "hard": "--alpha 0.1"}),
            "simple": "--loss simple",
            "hard-simple": "--loss hard-simple --alpha 0.03 --lead-in",
        },
    ),
    "games-10": (
        "cifar10",
        THREE,
        "--fraction 0.1 --epochs 16 --pretrain 8 --batch-size 128 --lr 0.002 --temperature 0.2",
        {**GAMES, "twice": "--loss simclr --epochs 32"},
    ),
    "games-20": (
        "cifar10",
        THREE,
        "--fraction 0.2 --epochs 8 --pretrain 4 --batch-size 128 --lr 0.002 --temperature 0.2",
        {**GAMES, "twice": "--loss simclr --epochs 16"},
    ),
}


def study(name, folders, out):
    """Train what is not there yet of a study, and record it."""
    data, seeds, common, rows = STUDIES[name]
    rows, first = {row: options.split() for row, options in rows.items()}, data.split("-")[0]
    if first != data:  # the first classes alone
        folders = {data: first_classes(folders[first], int(data.split("-")[1]), out / data)}
    train.compare(
        rows, ["--data", str(folders[data]), "--no-report", *common.split()], seeds, out / name
    )
    found = json.loads((out / name / "compare.json").read_text())
    for row, run in ((row, run) for row, runs in found.items() for run in runs):
        run["data"] = run["options"]["data"] = data
        if name == "games-10":  # [3], Table 3: the encoder's features on other images
            folder = out / name / f"{row}-{run['seed']}"
            train.main(["--evaluate", str(folder)])
            run["transfer"] = json.loads((folder / "evaluate-shapes.json").read_text())["linear"]
    (HERE / "results" / f"{name}.json").write_text(json.dumps(found) + "\n")


def first_classes(folder, n, out):
    """Make a folder of links to the first n classes of a folder with train/ and test/."""
    for source in sorted((folder / "train").iterdir())[:n]:
        for part in ("train", "test"):
            link = out / part / source.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to((folder / part / source.name).resolve())
    return out


def draw_curves(names):
    """Draw the accuracy of each loss over the temperature, a panel for each study.

    The picture goes to results/curves.png."""
    figure, axes = plt.subplots(
        1, len(names), figsize=(9, 3.6), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        found = read(name)
        for loss in CURVE:
            means = [
                statistics.mean(r["linear"] for r in found[f"{loss}-{t}"]) for t in TEMPERATURES
            ]
            axis.plot(TEMPERATURES, means, ".-", label=loss)
        untrained = next(iter(found.values()))[0]["untrained"]["linear"]
        axis.axhline(untrained, color="k", ls=":", label="untrained")
        axis.set(
            xscale="log",
            xticks=TEMPERATURES,
            xticklabels=TEMPERATURES,
            xlabel="temperature",
            ylabel="linear readout, %",
            title="CIFAR-10" if name == "cifar10-t" else "Tiny ImageNet",
        )
    axes[0][0].legend()
    figure.savefig(HERE / "results" / "curves.png", dpi=110)


def read(name):
    """Read the recorded results of a study."""
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def table(name):
    """Write the recorded results as a Markdown table.

    That of a search has a column for each temperature."""
    found, rows = read(name), STUDIES[name][3]
    if STUDIES[name][1] is not SEARCH:
        return train.table_of(found)
    values = {row: f"{found[row][0]['linear']:.1f}" for row in rows}
    if STUDIES[name][0] == "shapes":  # settings of several kinds
        lines = [
            ["settings", "linear %"],
            ["---"] * 2,
            *([f"`{rows[row]}`", x] for row, x in values.items()),
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    lines = {}
    for row, value in values.items():
        loss, _, column = row.rpartition("-")
        lines.setdefault(f"`{loss}`", {})[column] = value
    heading = ["", *next(iter(lines.values()))]
    body = [[loss, *cells.values()] for loss, cells in lines.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, ["---"] * len(heading), *body))


def summary():
    """Write the first table of ../README.md.

    It has the linear readout of each loss on each set of images."""
    names = {"shapes": "shapes", "cifar10": "CIFAR-10", "tiny": "Tiny ImageNet"}
    found = [read(name) for name in names]
    lines = [["loss", *names.values()], ["---"] * (len(names) + 1)]
    for loss in STUDIES["shapes"][3]:
        cells = [[run["linear"] for run in study.get(loss, [])] for study in found]
        lines.append([f"`{loss}`", *(train.spread(values) if values else "" for values in cells)])
    for figure, name in (("untrained", "untrained encoder"), ("raw", "raw pixels")):
        runs = [next(iter(study.values()))[: 1 if figure == "raw" else None] for study in found]
        lines.append(
            [name, *(train.spread([run[figure]["linear"] for run in some]) for some in runs)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    """Run the studies that are named, or show what is recorded of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER")
    parser.add_argument("--tiny", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs", "studies"))
    parser.add_argument(
        "--show", action="store_true", help="print what is recorded, and draw the curves"
    )
    args = parser.parse_args()
    for name in args.studies:
        if args.show:
            print(f"{name}\n{table(name)}\n\n{train.verdict(read(name))}\n")
        else:
            study(name, {"shapes": "shapes", "cifar10": args.cifar10, "tiny": args.tiny}, args.out)
    if curves := [name for name in args.studies if name.endswith("-t")]:
        draw_curves(curves)


if __name__ == "__main__":
    main()
