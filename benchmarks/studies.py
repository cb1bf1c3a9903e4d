"""Train and compare, study by study:
python benchmarks/studies.py cifar10-t cifar10 --cifar10 FOLDER

A study is a comparison of train.py: rows of options, which rows.py has, on the same images, for the
same epochs, with the same seeds. Each run is recorded in results/STUDY.json as it ends. A recorded
run is not repeated, and a stopped one goes on in --out. --show prints the tables of the records.
FOLDER holds CIFAR-10 or Tiny ImageNet as images, one folder per class, in train/ and test/.
[3] is the paper in the header of ../hardneg.py.
"""

from pathlib import Path

import common
import tables
from rows import STUDIES

import train
from training import compare, images, report


def study(name, folders, out):
    """Train what is not recorded yet of a study, seed by seed, and record each run as it ends."""
    plan = plan_of(name, folders, out)
    found = common.read(name) if common.path_of(name).exists() else {}
    done = {(row, run["seed"]) for row, some in found.items() for run in some}
    of_folder, known = None, {}
    for row, options in compare.seed_by_seed(plan):
        if (row, options.seed) in done:
            continue
        of_folder = of_folder or images.read(options)
        run = train.run(options, of_folder, known)
        run["data"] = run["options"]["data"] = STUDIES[name].data
        if name == "games-10":  # read out on other images, the shapes: [3], Table 3
            encoder = common.encoder_of(options.out)
            run["transfer"] = report.evaluate(encoder, images.load(), ["linear"])["linear"]
        found.setdefault(row, []).append(run)
        common.write(name, found)


def plan_of(name, folders, out):
    """Return {row: the options of its runs}, one for each seed."""
    data, seeds, common_words, rows = STUDIES[name]
    plan = {}
    for row, words in rows.items():
        given = train.parse(f"{common_words} {words}".split())
        given |= {"data": str(folders[data]), "report": False}
        folder = row.replace("/", "-").replace(", ", "-").replace(" ", "-")
        place = str(out / name / folder)
        plan[row] = [train.Options(**given, seed=k, out=f"{place}-{k}") for k in seeds]
    return plan


def main():
    """Run the studies that are named, or show what is recorded of them."""
    parser = common.parser_of(__doc__)
    parser.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY")
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER")
    parser.add_argument("--tiny", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs", "studies"))
    args = parser.parse_args()
    folders = {"shapes": "shapes", "cifar10": args.cifar10, "tiny": args.tiny}
    for name in args.studies:
        if not args.show:
            study(name, folders, args.out)
        print(f"{name}\n{tables.of_study(name)}\n")


if __name__ == "__main__":
    main()
