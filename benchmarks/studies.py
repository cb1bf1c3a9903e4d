"""Train and compare, study by study:
python benchmarks/studies.py cifar10-t cifar10 --cifar10 FOLDER

A study is a comparison of train.py: rows of options, on the same images, for the same epochs, with
the same seeds. Seed 100 chooses options, seeds 0 to 4 compare the choices. Each run is recorded in
results/STUDY.json as it ends. A recorded run is not repeated, and a stopped one goes on in --out.
--show prints the tables of the records. FOLDER holds CIFAR-10 or Tiny ImageNet as images, one
folder per class, in train/ and test/.
[3] Wu, Wang, Zeng, Shi, Hu: Synthetic Data Can Also Teach. AAAI 2023
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. CVPR 2021
"""

import argparse
import copy
import functools
import json
import statistics
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
import train
from training import compare, images, report, runs, words_of

HERE = Path(__file__).resolve().parent
SEARCH, THREE, FIVE = [100], range(3), range(5)
TEMPERATURES = (0.07, 0.1, 0.2, 0.3, 0.5, 1.0)
LONG = dict(fraction=0.4, epochs=10, lr=0.003)  # 20 000 images of CIFAR-10 or Tiny ImageNet
SHORT = dict(fraction=0.2, epochs=12, batch_size=128, lr=0.002)  # 10 000 images of CIFAR-10


def over_t(losses, temperatures=TEMPERATURES):
    """Make a row for each loss, {loss: its other options}, and each temperature."""
    rows = {}
    for loss, options in losses.items():
        for t in temperatures:
            rows[f"{loss}-{t}"] = dict(loss=loss, temperature=t) | options
    return rows


def search(loss, *settings, **several):
    """Make a row for each setting of a loss; or for each value of one option, several."""
    for name, values in several.items():
        settings = [{name: value} for value in values]
    return {f"{loss}-{k}": {"loss": loss} | setting for k, setting in enumerate(settings)}


def rows_of_defaults():
    """List the settings that the defaults of version 1 were chosen from."""
    one_rate = dict(batch_size=256, lr=0.008)
    rows = search("simclr", temperature=(0.05, 0.07, 0.1, 0.2))
    rows |= search(
        "debiased",
        dict(temperature=0.1, tau_plus=0.001),
        dict(temperature=0.1, tau_plus=0.01),
        dict(temperature=0.2, tau_plus=0.01),
        dict(temperature=0.3, tau_plus=0.1),
    )
    rows |= search(
        "hcl",
        dict(temperature=0.2, beta=0.5, tau_plus=0.01),
        dict(temperature=0.2, beta=1, tau_plus=0.01),
        dict(temperature=0.3, beta=1, tau_plus=0.01),
        dict(temperature=0.3, beta=1, tau_plus=0.1),
    )
    rows |= search("ot", *[dict(temperature=t, epsilon=e) for t in (0.1, 0.2) for e in (0.1, 0.3)])
    rows |= search(
        "hard",
        dict(temperature=0.07, alpha=0.3),
        dict(temperature=0.1, alpha=0.1),
        dict(temperature=0.1, alpha=0.3),
        dict(temperature=0.2, alpha=0.1),
    )
    simple = [dict(alpha=alpha, lead_in=True, epochs=16) for alpha in (0.01, 0.03, 0.1, 0.3)]
    rows |= search("hard-simple", *[row | one_rate for row in simple])
    triplet = [dict(margin=margin, weights="hardest") for margin in (0, 0.2, 0.5, 1)]
    return rows | search("triplet", *[row | one_rate for row in triplet])


def rows_of_beta():
    """List [1], App. C: β annealed, and true positives."""
    rows = {"simclr": dict(loss="simclr")}
    rows["simclr-true"] = dict(loss="simclr", true_positives=True)
    variants = {"": {}, "-annealed": dict(anneal=True), "-true": dict(true_positives=True)}
    for beta in (0.5, 1, 2):
        for name, variant in variants.items():
            rows[f"hcl-{beta}{name}"] = dict(loss="hcl", beta=beta, tau_plus=0.01) | variant
    return rows


def rows_of_batch():
    """List two losses at three sizes of a batch."""
    rows = {}
    for size in (32, 128, 512):
        rows[f"simclr-{size}"] = SIMCLR | dict(batch_size=size)
        hcl = dict(loss="hcl", temperature=0.2, beta=0.5, tau_plus=0.01)
        rows[f"hcl-{size}"] = hcl | dict(batch_size=size)
    return rows


def rows_of_cause(temperatures, weights, objectives):
    """Make a row for each way of weighting, objective and effective temperature.

    At the same t_eff all weights spread the push over the negatives alike, up to their gradient."""
    rows = {}
    for t in temperatures:
        for weight in weights:
            for objective in objectives:
                cell = cell_of(weight, t) | OBJECTIVES[objective]
                rows[f"{weight} {objective} {t}"] = dict(loss="simclr") | cell
    return rows


def cell_of(weights, t):
    """Return the options of a row of WEIGHTS at the effective temperature t.

    It is temperature / (1 + β) for tilted, and temperature · ε / (temperature + ε) for transported.
    """
    if weights == "uniform":
        return dict(temperature=t)
    if weights == "top":
        return dict(weights="top", alpha=0.3, lead_in=False, temperature=OF_TOP[t])
    name, _, held = weights.partition("-")
    cell = dict(weights=name, temperature=round(1.5 * t, 4), detach_weights=bool(held))
    if name == "tilted":
        return cell | dict(beta=0.5)
    return cell | dict(epsilon=round(3 * t, 4))


def rows_of_objectives():
    """List [2], Tables I to IV: three objectives under three kinds of weights, and debiased."""
    kinds = {
        "no weights": dict(weights="uniform"),
        "tilted": dict(weights="tilted", beta=1),
        "coupling": dict(weights="transported", epsilon=0.3),
    }
    objectives = {"nce": "simclr", "simple": "simple", "triplet": "triplet"}
    rows = {}
    for objective, loss in objectives.items():
        for kind, weights in kinds.items():
            rows[f"{objective}, {kind}"] = dict(loss=loss) | weights
    for kind, weights in kinds.items():
        rows[f"nce debiased, {kind}"] = dict(loss="simclr", tau_plus=0.01) | weights
    return rows


WEIGHTS = ["uniform", "tilted", "tilted-held", "transported", "transported-held", "top"]
OF_TOP = {0.067: 0.067, 0.133: 0.14, 0.267: 0.35}  # found by trial
OBJECTIVES = {  # N = 252; at 1 / (N + 1) debiasing is decoupling where no floor binds
    "nce": {},
    "1/N": dict(tau_plus=round(1 / 253, 6)),
    "5/N": dict(tau_plus=round(5 / 253, 6)),
    "decoupled": dict(objective="decoupled"),
}
EFFECTIVE = 0.067, 0.133, 0.267
COLDER = 0.05, 0.04  # 0.05 is t / (1 + 2β): tilted weights with their gradient push so, about
HELD_OR_NOT = ["uniform", "tilted-held", "tilted"]
SIMCLR = dict(loss="simclr", temperature=0.1)
CURVE = {
    "simclr": {},
    "hard": dict(alpha=0.3),
    "hcl": dict(beta=0.5, tau_plus=0.01),
    "ot": dict(epsilon=0.3),
}
TINY_HCL = dict(loss="hcl", temperature=0.07, beta=0.5, tau_plus=0.0005)
GAME = dict(method="diffhard", width=16, every=4)
GAMES = {  # [3], Tables 1 and 3, Fig. 2; a run sees 80 000 real images, but for twice the epochs
    "SimCLR": dict(loss="simclr"),
    "SimCLR-2x": dict(loss="simclr", batch_size=256),
    "CLAE": dict(method="clae", loss="simclr", bound=0.015),
    "CL-GAN": GAME | dict(pairs=False, ascent=False),
    "G+Hard": GAME | dict(pairs=False),
    "G+Pos": GAME | dict(ascent=False),
    "DiffHard": GAME,
}
GAMES_10 = dict(fraction=0.1, epochs=16, pretrain=8)
GAMES_20 = dict(fraction=0.2, epochs=8, pretrain=4)
OF_GAMES = dict(batch_size=128, lr=0.002, temperature=0.2)
SMALL = dict(batch_size=64, lr=0.002)
AT_02 = SHORT | dict(temperature=0.2)
STUDIES = {  # name: data, seeds, options of all rows, {row: its options}
    "defaults": ("shapes", SEARCH, {}, rows_of_defaults()),
    "shapes": (
        "shapes",
        FIVE,
        {},
        {  # the best of `defaults`
            "simclr": dict(loss="simclr", temperature=0.05),
            "debiased": dict(loss="debiased", temperature=0.1, tau_plus=0.01),
            "hcl": dict(loss="hcl", temperature=0.3, beta=1, tau_plus=0.1),
            "ot": dict(loss="ot", temperature=0.1, epsilon=0.1),
            "hard": dict(loss="hard", temperature=0.07, alpha=0.3),
        },
    ),
    "shapes-64-search": (
        "shapes",
        SEARCH,
        SMALL,
        search("simclr", temperature=(0.05, 0.1, 0.2))
        | search(
            "hcl",
            dict(temperature=0.1, beta=0.5, tau_plus=0.01),
            dict(temperature=0.2, beta=0.5, tau_plus=0.01),
            dict(temperature=0.3, beta=1, tau_plus=0.1),
        ),
    ),
    "shapes-64": (
        "shapes",
        FIVE,
        SMALL,
        {"simclr": SIMCLR, "hcl": dict(loss="hcl", temperature=0.1, beta=0.5, tau_plus=0.01)},
    ),
    "cifar10": (
        "cifar10",
        FIVE,
        LONG,
        {
            "simclr": SIMCLR,
            "hard": dict(loss="hard", temperature=0.07, alpha=0.3),
            "hcl": dict(loss="hcl", temperature=0.07, beta=0.5, tau_plus=0.01),
            "ot": dict(loss="ot", temperature=0.07, epsilon=0.3),
        },
    ),
    "cifar10-beta": (
        "cifar10",
        FIVE,
        LONG,
        {"simclr": SIMCLR, "hcl-2": dict(loss="hcl", temperature=0.2, beta=2, tau_plus=0.01)},
    ),
    "cifar10-t": ("cifar10", SEARCH, LONG, over_t(CURVE)),
    "tiny-t": (
        "tiny",
        SEARCH,
        LONG | dict(size=32),
        over_t(CURVE | {"hcl": dict(beta=0.5, tau_plus=0.0005)}),
    ),
    "tiny": (
        "tiny",
        FIVE,
        LONG | dict(size=32),
        {
            "simclr": SIMCLR,
            "hard": dict(loss="hard", temperature=0.1, alpha=0.3),
            "hcl": TINY_HCL,
            "ot": dict(loss="ot", temperature=0.07, epsilon=0.3),
        },
    ),
    "batch": ("cifar10", THREE, dict(fraction=0.2, epochs=12, lr=0.002), rows_of_batch()),
    "beta": ("cifar10", THREE, AT_02, rows_of_beta()),
    "epsilon-tau": (  # [2], VII-A
        "cifar10",
        SEARCH,
        AT_02,
        {
            f"{epsilon}-{tau}": dict(loss="ot", epsilon=epsilon, tau_plus=tau)
            for epsilon in (0.1, 0.3, 1)
            for tau in (0, 0.01, 0.05)
        },
    ),
    "cost": (  # [2], VII-C, Fig. 1
        "cifar10",
        THREE,
        AT_02 | dict(loss="ot"),
        {
            "sqeuclidean": dict(epsilon=0.3),
            "exp-0": dict(epsilon=0.3, cost="exp"),
            "exp-2": dict(epsilon=0.3, cost="exp", kappa=2),
        },
    ),
    "alpha": (
        "cifar10",
        SEARCH,
        AT_02,
        {f"hard-{alpha}": dict(loss="hard", alpha=alpha) for alpha in (0.01, 0.03, 0.1, 0.3, 1)},
    ),
    "temperature": (  # [4], Table 1
        "cifar10",
        THREE,
        SHORT,
        over_t({"simclr": {}, "hard": dict(alpha=0.1)})
        | {"simple": dict(loss="simple")}
        | {"hard-simple": dict(loss="hard-simple", alpha=0.03, lead_in=True)},
    ),
    "hard-debiased": (  # [1], Fig. 2 right, at the settings of [1]
        "cifar10",
        THREE,
        SHORT | dict(temperature=0.5),
        {
            "neither": dict(loss="simclr"),
            "debiased": dict(loss="debiased", tau_plus=0.1),
            "hard": dict(loss="hcl", beta=1, tau_plus=0),
            "both": dict(loss="hcl", beta=1, tau_plus=0.1),
        },
    ),
    "objectives": ("cifar10", THREE, AT_02 | dict(margin=0.5), rows_of_objectives()),
    "neighbours": ("cifar10", [0], SHORT, over_t({"simclr": {}})),  # [4], Fig. 8
    "cause-search": (
        "cifar10",
        SEARCH,
        SHORT | dict(fraction=0.25, validation=True),
        rows_of_cause(EFFECTIVE, WEIGHTS, ["nce"])
        | rows_of_cause(EFFECTIVE[:1], WEIGHTS, OBJECTIVES),
    ),
    "cause": (
        "cifar10",
        FIVE,
        SHORT,
        rows_of_cause(EFFECTIVE[:1], WEIGHTS, ["nce"])
        | rows_of_cause(EFFECTIVE[:1], ["uniform"], ["1/N", "decoupled"])
        | rows_of_cause(EFFECTIVE[:1], ["tilted"], ["decoupled"])
        | rows_of_cause([0.045], ["uniform"], ["nce"])
        | rows_of_cause(COLDER, ["uniform"], ["decoupled"]),
    ),
    "cause-t": ("cifar10", THREE, SHORT, rows_of_cause(EFFECTIVE[1:], HELD_OR_NOT, ["nce"])),
    "cause-tiny": (
        "tiny",
        FIVE,
        dict(fraction=0.4, size=32, epochs=6, batch_size=128, lr=0.002),
        rows_of_cause(EFFECTIVE[:1], WEIGHTS, ["nce"])
        | rows_of_cause(EFFECTIVE[:1], ["uniform"], ["decoupled"])
        | rows_of_cause(COLDER[:1], ["uniform"], ["decoupled"]),
    ),
    "games-10": (
        "cifar10",
        THREE,
        GAMES_10 | OF_GAMES,
        GAMES | {"twice": dict(loss="simclr", epochs=32)},
    ),
    "games-20": (
        "cifar10",
        THREE,
        GAMES_20 | OF_GAMES,
        GAMES | {"twice": dict(loss="simclr", epochs=16)},
    ),
    "long": (  # all images, for 15 times as many steps as in cifar10
        "cifar10",
        THREE,
        dict(epochs=60, batch_size=256, lr=0.003),
        {
            "simclr": SIMCLR,
            "tilted": SIMCLR | dict(weights="tilted", beta=0.5),  # the best of `cause`
            "hcl": dict(loss="hcl", temperature=0.07, beta=0.5, tau_plus=0.01),
            "ot": dict(loss="ot", temperature=0.07, epsilon=0.3),
            # the controls of `tilted`: its weights held, and a plain loss at its effective t
            "tilted-held": SIMCLR | dict(weights="tilted", beta=0.5, detach_weights=True),
            "simclr 0.067": dict(loss="simclr", temperature=0.067),
            "hcl 0.1": dict(loss="hcl", temperature=0.1, beta=0.5, tau_plus=1 / 510),  # README's
            "hcl 0.2": dict(loss="hcl", temperature=0.2, beta=2, tau_plus=0.01),  # of cifar10-beta
        },
    ),
    "pays-cifar10": (  # studies/pays.md
        "cifar10",
        FIVE,
        dict(epochs=60, batch_size=256, lr=0.003, loss="simclr"),
        {
            "simclr 0.2": dict(temperature=0.2),
            "tilted 0.2": dict(temperature=0.2, weights="tilted", beta=0.5),
            "simclr 0.1": dict(temperature=0.1),
            "simclr 0.4": dict(temperature=0.4),
            "tilted 0.4": dict(temperature=0.4, weights="tilted", beta=0.5),
            "decoupled 0.067": dict(temperature=0.067, objective="decoupled"),
        },
    ),
    "pays-tiny": (
        "tiny",
        FIVE,
        dict(size=32, epochs=60, batch_size=256, lr=0.003, loss="simclr"),
        {
            "simclr 0.1": dict(temperature=0.1),
            "tilted 0.1": dict(temperature=0.1, weights="tilted", beta=0.5),
            "simclr 0.2": dict(temperature=0.2),
            "tilted 0.2": dict(temperature=0.2, weights="tilted", beta=0.5),
        },
    ),
    "finetune-tenth": (  # [3], 1: a run sees 100 000 images, as in the next
        "cifar10",
        THREE,
        OF_GAMES | dict(fraction=0.1, epochs=20, pretrain=8),
        {"SimCLR": dict(loss="simclr"), "DiffHard": GAME},
    ),
    "finetune-all": ("cifar10", THREE, OF_GAMES | dict(epochs=2), {"SimCLR": dict(loss="simclr")}),
}
for classes, share in ((10, 1), (50, 0.2), (200, 0.05)):  # 2 500 images of Tiny ImageNet
    STUDIES[f"classes-{classes}"] = (
        f"tiny-{classes}",
        THREE,
        dict(fraction=share, size=32, epochs=40, lr=0.003),
        {"simclr": SIMCLR, "hcl": dict(loss="hcl", temperature=0.1, beta=0.5, tau_plus=0)},
    )


def study(name, folders, out):
    """Train what is not recorded yet of a study, seed by seed, and record each run as it ends."""
    data, plan = plan_of(name, folders, out)
    record = HERE / "results" / f"{name}.json"
    found = read(name) if record.exists() else {}
    done = {(row, run["seed"]) for row, some in found.items() for run in some}
    of_folder, known = None, {}
    for row, options in compare.seed_by_seed(plan):
        if (row, options.seed) in done:
            continue
        of_folder = of_folder or images.read(options)
        run = train.run(options, of_folder, known)
        run["data"] = run["options"]["data"] = data
        if name in MEASURED_AFTER:
            measure_after = MEASURED_AFTER[name]
            encoder = runs.encoder_of(runs.read_checkpoint(options.out, "cpu"))
            measure_after(run, encoder, str(folders[data]))
        found.setdefault(row, []).append(run)
        best_first = sorted(found.items(), key=compare.linear_of_row, reverse=True)
        record.write_text(json.dumps(dict(best_first)) + "\n")
    print(f"{table(name)}\n\n{compare.verdict(read(name))}")


def transfer(run, encoder, data):
    """Read the encoder of a run out on other images, the shapes: [3], Table 3."""
    run["transfer"] = report.evaluate(encoder, images.load(), ["linear"])["linear"]


def finetune(run, encoder, data):
    """Fine-tune a run's encoder, and the untrained one, on a hundredth of all labels: [3], 1."""
    run["finetuned"] = finetuned(encoder, everything_of(data), run["seed"])
    run["untrained"]["finetuned"] = finetuned_from_scratch(data, run["seed"])


@functools.cache
def everything_of(data):
    """Read all images of a folder, once."""
    return images.load(data)


@functools.cache
def finetuned_from_scratch(data, seed):
    """Return the accuracy of an untrained encoder that is fine-tuned."""
    of_folder = everything_of(data)
    return finetuned(runs.untrained("small", of_folder, seed), of_folder, seed)


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
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    features, _ = hardneg.embed(encoder, some.test)
    right = readout(features).argmax(1) == some.test_labels
    return round(100 * right.float().mean().item(), 4)


LABELLED, STEPS = 0.01, 500  # of fine-tuning
MEASURED_AFTER = {"games-10": transfer, "finetune-tenth": finetune, "finetune-all": finetune}


def plan_of(name, folders, out):
    """Return the data of a study, and {row: the options of its runs}, one for each seed."""
    data, seeds, common, rows = STUDIES[name]
    first = data.split("-")[0]
    if first != data:  # the first classes alone
        folders = {data: first_classes(folders[first], int(data.split("-")[1]), out / data)}
    common = {"data": str(folders[data]), "report": False} | common
    plan = {}
    for row, own in rows.items():
        folder = row.replace("/", "-").replace(", ", "-").replace(" ", "-")
        places = {seed: out / name / f"{folder}-{seed}" for seed in seeds}
        own = common | own
        plan[row] = [train.Options(**own, seed=seed, out=places[seed]) for seed in seeds]
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
        return compare.table_of(found)
    values = {row: f"{found[row][0]['linear']:.1f}" for row in rows}
    if STUDIES[name][0] == "shapes":  # settings of several kinds
        lines = [["settings", "linear %"]]
        for row, value in values.items():
            lines.append([f"`{' '.join(words_of(rows[row]))}`", value])
        return report.markdown(lines)
    return by_column(values)


def geometry(name):
    """Write uniformity and tolerance over the temperature as two Markdown tables: [4], Table 1."""
    tables = []
    for figure in ("uniformity", "tolerance"):
        found = read(name).items()
        tables.append(by_column({row: f"{runs[0][figure]:.2f}" for row, runs in found}))
    return "\n\n".join(tables)


def by_column(values):
    """Write {row-column: cell} as a Markdown table."""
    lines = {}
    for name, value in values.items():
        row, _, column = name.rpartition("-")
        lines.setdefault(f"`{row}`", {})[column] = value
    columns = list(next(iter(lines.values())))
    body = [[row, *(cells[column] for column in columns)] for row, cells in lines.items()]
    return report.markdown([["", *columns], *body])


def progress(name):
    """Write kNN in the course of the runs as a Markdown table, a line for each measurement.

    The first column of figures is the baseline's, the others what their rows gain over it."""
    found = read(name)
    baseline = compare.baseline_of(found)
    others = [row for row in found if row != baseline]
    lines = [["epoch", f"`{baseline}`, kNN %", *(f"`{row}`, gain" for row in others)]]
    for epoch, then in measured(found):
        line = [str(epoch), report.spread([run["knn"] for run in then[baseline]])]
        for row in others:
            line.append(report.gain(compare.gaps_of(then[row], then[baseline], "knn")))
        lines.append(line)
    return report.markdown(lines)


def draw_progress(name):
    """Draw what rows gain by kNN over the baseline in the course of the runs.

    Rows at the baseline's temperature are in the left panel. The picture goes to
    results/NAME.png."""
    found = read(name)
    baseline = compare.baseline_of(found)
    t = temperature_of(found[baseline])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for row in found:
        left = temperature_of(found[row]) == t
        axis = axes[0] if left else axes[1]
        epochs, gains = [], []
        for epoch, then in measured(found):
            epochs.append(epoch)
            gains.append(statistics.mean(compare.gaps_of(then[row], then[baseline], "knn")))
        if row != baseline:
            axis.plot(epochs, gains, ".-", label=row)
    for axis, title in zip(axes, (f"t = {t}", "another t"), strict=True):
        axis.axhline(0, color="k", ls=":", label=f"{baseline}, t = {t}")
        axis.set(title=title, xlabel="epoch", ylabel="gain in kNN, points")
        axis.legend()
    figure.savefig(HERE / "results" / f"{name}.png", dpi=110)


def temperature_of(some):
    """Return the temperature that the runs of a row have."""
    return some[0]["options"]["temperature"]


def measured(found):
    """List what was measured in the course of the runs: epoch, {row: figures with their seed}."""
    course = {}
    for row, some in found.items():
        for run in some:
            for entry in run["history"]:
                if "knn" in entry:
                    then = course.setdefault(entry["epoch"], {})
                    then.setdefault(row, []).append({"seed": run["seed"]} | entry)
    return list(course.items())


def summary():
    """Write the first table of ../README.md.

    It has the linear readout of each loss on each set of images."""
    names = {"shapes": "shapes", "cifar10": "CIFAR-10", "tiny": "Tiny ImageNet"}
    found = [read(name) for name in names]
    lines = [["loss", *names.values()]]
    for loss in STUDIES["shapes"][3]:
        cells = [[run["linear"] for run in study.get(loss, [])] for study in found]
        lines.append([f"`{loss}`", *(report.spread(values) if values else "" for values in cells)])
    for figure, name in (("untrained", "untrained encoder"), ("raw", "raw pixels")):
        runs = [next(iter(study.values()))[: 1 if figure == "raw" else None] for study in found]
        lines.append(
            [name, *(report.spread([run[figure]["linear"] for run in some]) for some in runs)]
        )
    return report.markdown(lines)


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
            print(f"{name}\n{table(name)}\n\n{compare.verdict(read(name))}\n")
        else:
            study(name, {"shapes": "shapes", "cifar10": args.cifar10, "tiny": args.tiny}, args.out)
    if curves := [name for name in args.studies if name.endswith("-t")]:
        draw_curves(curves)
    if "long" in args.studies:
        draw_progress("long")


if __name__ == "__main__":
    main()
