"""Train and compare, study by study:
python benchmarks/studies.py cifar10-t cifar10 --cifar10 FOLDER

A study is a comparison of train.py: rows of options, which rows.py has, on the same images, for the
same epochs, with the same seeds. Each run is recorded in results/STUDY.json as it ends. A recorded
run is not repeated, and a stopped one goes on in --out. --show prints the tables of the records.
FOLDER holds CIFAR-10 or Tiny ImageNet as images, one folder per class, in train/ and test/.
[3] is the paper in the header of ../hardneg.py.
"""

import copy
import functools
from pathlib import Path

import common
import tables
import torch
from rows import STUDIES
from torch.nn import functional as F
from tqdm import tqdm

import hardneg
import train
from training import compare, images, report, runs


def study(name, folders, out):
    """Train what is not recorded yet of a study, seed by seed, and record each run as it ends."""
    data, plan = plan_of(name, folders, out)
    found = common.read(name) if common.path_of(name).exists() else {}
    done = {(row, run["seed"]) for row, some in found.items() for run in some}
    of_folder, known = None, {}
    for row, options in compare.seed_by_seed(plan):
        if (row, options.seed) in done:
            continue
        of_folder = of_folder or images.read(options)
        run = train.run(options, of_folder, known)
        run["data"] = run["options"]["data"] = data
        if name in MEASURED_AFTER:
            encoder = common.encoder_of(options.out)
            MEASURED_AFTER[name](run, encoder, str(folders[data]))
        found.setdefault(row, []).append(run)
        best_first = sorted(found.items(), key=compare.linear_of_row, reverse=True)
        common.write(name, dict(best_first))


def plan_of(name, folders, out):
    """Return the data of a study, and {row: the options of its runs}, one for each seed."""
    data, seeds, common_words, rows = STUDIES[name]
    first, _, classes = data.partition("-")
    if classes:  # the first classes alone
        folders = {data: first_classes(folders[first], int(classes), out / data)}
    plan = {}
    for row, words in rows.items():
        given = train.parse(f"{common_words} {words}".split())
        given |= {"data": str(folders[data]), "report": False}
        folder = row.replace("/", "-").replace(", ", "-").replace(" ", "-")
        place = str(out / name / folder)
        plan[row] = [train.Options(**given, seed=k, out=f"{place}-{k}") for k in seeds]
    return data, plan


def first_classes(folder, n, out):
    """Make a folder of links to the first n classes of a folder with train/ and test/."""
    for source in sorted((folder / "train").iterdir())[:n]:
        for part in ("train", "test"):
            link = out / part / source.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to((folder / part / source.name).resolve())
    return out


# ---- What is measured after training -----------------------------------------------------------


def transfer(run, encoder, data):
    """Read the encoder of a run out on other images, the shapes: [3], Table 3."""
    run["transfer"] = report.evaluate(encoder, images.load(), ["linear"])["linear"]


def finetune(run, encoder, data):
    """Fine-tune a run's encoder, and the untrained one, on a hundredth of all labels: [3], 1."""
    run["finetuned"] = finetuned(encoder, load(data), run["seed"])
    run["untrained"]["finetuned"] = finetuned_from_scratch(data, run["seed"])


load = functools.cache(images.load)  # reads the images of a folder once


@functools.cache
def finetuned_from_scratch(data, seed):
    """Return the accuracy of an untrained encoder that is fine-tuned."""
    return finetuned(runs.untrained("small", load(data), seed), load(data), seed)


def finetuned(encoder, some, seed):
    """Train a copy of an encoder, and a readout, on a hundredth of the labels → accuracy in %.

    Batches of 64; crops and mirror images; AdamW, whose rates fall to 0 by a cosine."""
    generator = torch.Generator().manual_seed(seed)
    known = (some.train_labels >= 0).nonzero()[:, 0]
    chosen = known[images.share(some.train_labels[known], LABELLED, seed)]
    encoder = copy.deepcopy(encoder).train()
    readout = torch.nn.Linear(encoder.features, len(some.classes))
    torch.nn.init.zeros_(readout.weight)
    torch.nn.init.zeros_(readout.bias)
    parts = [{"params": encoder.backbone.parameters(), "lr": 1e-3}]
    parts += [{"params": readout.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(parts)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in tqdm(range(STEPS), f"fine-tuning on {len(chosen)} labels", leave=False):
        index = chosen[torch.randint(len(chosen), (64,), generator=generator)]
        views = hardneg.view(some.train[index], generator, area=(0.5, 1.0), jitter=0, gray=0)
        loss = F.cross_entropy(readout(encoder(views)[0]), some.train_labels[index])
        common.descend(loss, optimizer)
        schedule.step()
    features, _ = hardneg.embed(encoder, some.test)
    right = readout(features).argmax(1) == some.test_labels
    return round(100 * right.float().mean().item(), 4)


LABELLED, STEPS = 0.01, 500  # of fine-tuning
MEASURED_AFTER = {"games-10": transfer, "finetune-tenth": finetune, "finetune-all": finetune}


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
