"""Train an encoder without labels and measure what it has learned:
python train.py --loss hard --alpha 0.3

It prints how well raw pixels, the untrained and the trained encoder tell the classes apart.
It writes report.html, results.json and checkpoint.pt.
Sections: arguments, main and run, images, evaluation and report, pictures.
"""

import argparse
import base64
import collections
import contextlib
import difflib
import functools
import html
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import string
import sys
import time
import warnings
from pathlib import Path
from statistics import mean, stdev

try:
    import fcntl
except ImportError:  # on Windows, two runs in one folder go unnoticed
    fcntl = None
import numpy as np
import torch
import torchvision
from matplotlib import pyplot as plt
from PIL import Image, ImageOps
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS as SUFFIXES
from torchvision.datasets.folder import make_dataset
from torchvision.transforms import functional as T
from tqdm import tqdm

import hardneg

BICUBIC, require = T.InterpolationMode.BICUBIC, hardneg._require
METHODS = ("simclr", "bank", "queue", "clae", "diffhard")
DEFAULTS = {  # of a loss, a method, and a loss or method with a recipe: benchmarks/README.md
    "": {"temperature": 0.1, "alpha": 0.1, "epsilon": 0.3, "margin": 0.0, "lead_in": True},
    "simclr": {"temperature": 0.05},
    "debiased": {"tau_plus": 0.01},
    "hcl": {"temperature": 0.3},
    "ot": {"epsilon": 0.1},
    "hard": {"temperature": 0.07, "alpha": 0.3},
    "hard-simple": {"lead_in": False},
    "triplet": {
        "weights": "top",
        "margin": 0.5,
    },  # the nearest negative alone lets all embeddings collapse
    "bank": {"momentum": 0.8},
    "queue": {"momentum": 0.9},
    "diffhard": {"momentum": 0.99},
    **{
        f"{name} adamw": {"epochs": n, "batch_size": 64, "lr": 2e-3}
        for name, n in (
            ("triplet", 16),
            ("hard-simple", 28),
            ("bank", 24),
            ("queue", 24),
            ("diffhard", 6),
        )
    },
}
LOSS_OPTIONS = "weights objective tau_plus margin temperature beta alpha epsilon cost kappa".split()
FREE = (
    "out resume device root report evaluate workers compare seeds overwrite export command "
    "compile".split()
)
EFFECTS = {  # flags: the weights, objectives and methods on which they act
    "temperature": "tilted nce ppcl decoupled",
    "tau_plus": "nce ppcl decoupled",
    "beta anneal": "tilted",
    "epsilon cost kappa": "transported",
    "alpha lead_in": "top",
    "margin": "triplet",
    "bound": "clae",
    "queue_size": "queue",
    "momentum": "bank queue diffhard",
    "pairs ascent pretrain every width latent gan_lr ascent_lr": "diffhard",
    "seeds": "compare",
}
SHORT_HELP = (
    "loss temperature alpha method data encoder epochs out compare export help help_all".split()
)
FIGURES = (
    "loss",
    "positive",
    "negative",
    "ess",
    "clamped",
    "pair",
    "d_loss",
    "g_loss",
    "diversity",
)
PICTURES = "curves.png", "nearest.png", "map.png", "histograms.png", "pairs.png"


class Parser(argparse.ArgumentParser):
    """Say a mistake in one line, with the nearest word that works, and end with exit code 2."""

    def error(self, message):
        if found := re.search(
            r"choice: '(\S*)' \(choose from (.*)\)|unrecognized arguments: (\S+)", message
        ):
            choice, choices, flag = found.groups()
            words = re.findall(r"[\w-]+", choices) if choices else list(self._option_string_actions)
            near = difflib.get_close_matches(choice or flag, words, 1, 0.5)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"train.py: {message}\n")


def defaults_of_recipes(key):
    """Write the default that each recipe gives an option, for its help."""
    values = (f"{row[key]:g} for {name}" for name, row in hardneg.RECIPES.items())
    return "default: " + ", ".join(values)


def defaults_of_losses(key, other):
    """Write the default that each loss and method gives an option, for its help."""
    values = (f"{row[key]:g} for {name}" for name, row in DEFAULTS.items() if name and key in row)
    return "default: " + ", ".join(values) + other


def arguments(argv):
    """Parse the command line, and fill in what it leaves open.

    That is the loss, its temperature, the objective and the output folder."""
    sources = (
        "[1] HCL, Robinson 2021; [2] HCL-OT, Jiang 2023; [3] DiffHard, Wu 2023; [4] Wang & Liu 2021"
    )
    parser = Parser(
        usage="python train.py [flags]",
        description=__doc__.split("\n\n")[0],
        allow_abbrev=False,
        epilog=sources,
    )
    real, whole = {"type": float, "metavar": "X"}, {"type": int, "metavar": "N"}
    yes, no, open_ = (
        {"action": argparse.BooleanOptionalAction, "default": on} for on in (True, False, None)
    )
    parser.add_argument("--help-all", action="help", help="explain all flags")
    add = parser.add_argument_group("loss").add_argument
    add(
        "--loss",
        choices=hardneg.PRESETS,
        help="weights and objective; default: hcl, or ppcl for diffhard",
    )
    add(
        "--weights",
        choices=hardneg.WEIGHTS,
        help="of the negatives; default: of the loss, top for triplet",
    )
    add(
        "--objective",
        choices=hardneg.OBJECTIVES,
        help="default: that of the loss; ppcl for generated pairs",
    )
    tuned = defaults_of_losses("temperature", ", else 0.1")
    add("--temperature", **real, help=f"divides cosines, above 0; {tuned}")
    tuned = defaults_of_losses("tau_plus", ", 0.1 for hcl")
    add("--tau-plus", **real, help=f"share of false negatives [1]; {tuned}")
    add("--beta", **real, default=1.0, help="hcl: concentration on near negatives, at least 0 [1]")
    add("--anneal", **no, help="hcl: lower beta to 0 in five steps over the run")
    add(
        "--epsilon",
        **real,
        help="ot: regularisation, in units of the cost, above 0 [2]; default: 0.1",
    )
    add(
        "--cost",
        default="sqeuclidean",
        choices=("sqeuclidean", "exp"),
        help="ot: cost of the coupling",
    )
    add("--kappa", **real, default=0.0, help="ot: κ of the cost exp")
    tuned = defaults_of_losses("alpha", ", else 0.1")
    add("--alpha", **real, nargs="?", help=f"hard: share of nearest kept [4]; {tuned}")
    add(
        "--lead-in",
        **open_,
        help="lower the share from 1 to alpha at first; default: not for hard-simple",
    )
    add("--margin", **real, help="triplet: a squared distance, at least 0; default: 0.5, or 0")
    add(
        "--true-positives",
        **no,
        help="second view from another image of the class: uses labels [1]",
    )
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        default="shapes",
        metavar="NAME",
        help=f"shapes (built in), {', '.join(TORCHVISION)}, or a folder: one folder of images "
        "per class, train/ and test/ that hold such folders, or images alone",
    )
    add(
        "--root",
        default="data",
        metavar="DIR",
        help="where torchvision's sets are, or are downloaded to",
    )
    add("--fraction", **real, default=1.0, help="share of each class to train on, in (0, 1]")
    add(
        "--workers",
        **whole,
        help="processes that decode a folder; default: all cores, if it is large",
    )
    add(
        "--size",
        **whole,
        help="side of images in pixels; default: their own, in a folder at most 96",
    )
    add = parser.add_argument_group("training").add_argument
    add(
        "--method",
        default="simclr",
        choices=METHODS,
        help="candidates: simclr, the batch; bank, a row per training image [4]; "
        "queue, earlier batches; clae, adversarial views; diffhard, generated images [3]",
    )
    add(
        "--momentum",
        **real,
        help="of the bank's rows (0.8), of the slow copy (queue 0.9, diffhard 0.99)",
    )
    add(
        "--queue-size",
        **whole,
        default=64,
        help="earlier embeddings in the queue, fewer than images",
    )
    add("--bound", **real, default=0.005, help="clae: largest change of a pixel, in (0, 1)")
    add("--encoder", default="small", choices=("small", "resnet18", "resnet50"), help="the network")
    add(
        "--recipe",
        default="adamw",
        choices=hardneg.RECIPES,
        help="adamw: cosine rate; sgd: steps, as [4]",
    )
    of_recipes = defaults_of_recipes("epochs")
    add("--epochs", **whole, help=f"passes over the images; {of_recipes}, 6 to 28 for some")
    of_recipes = defaults_of_recipes("batch_size")
    add("--batch-size", **whole, help=f"images in a batch, at most; {of_recipes}, or 64")
    add(
        "--micro-batch",
        **whole,
        help="views in one pass of the encoder, to save memory; default: a batch",
    )
    of_recipes = defaults_of_recipes("lr")
    add("--lr", "--learning-rate", **real, help=f"peak learning rate; {of_recipes}, or 0.002")
    add("--weight-decay", **real, help=defaults_of_recipes("weight_decay"))
    add("--sync-batchnorm", **no, help="under torchrun, on GPUs: BatchNorm over all processes")
    add(
        "--compile", **no, help="compile the encoder: a slow start, then faster, above all on a GPU"
    )
    add("--seed", **whole, default=0, help="of weights, order and views")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:1",
    )
    add(
        "--out", type=Path, metavar="DIR", help="output folder; default: runs/DATA-METHOD-LOSS-SEED"
    )
    add(
        "--report",
        **yes,
        help="end with pictures of what the encoder has learned, in DIR/report.html",
    )
    add(
        "--resume",
        **open_,
        help="continue the run in DIR, or begin anew; default: continue if stopped",
    )
    add("--overwrite", **no, help="replace a finished run in DIR")
    add(
        "--compare",
        nargs="+",
        metavar="LOSS",
        choices=hardneg.PRESETS,
        help="train with each, and compare",
    )
    add("--seeds", **whole, default=3, help="compare: runs of each loss, from --seed on")
    add(
        "--evaluate",
        type=Path,
        metavar="RUN",
        help="only measure the encoder of the folder RUN on --data",
    )
    add(
        "--export",
        nargs=2,
        type=Path,
        metavar=("RUN", "FILE"),
        help="only write RUN's encoder to FILE.pt2",
    )
    add = parser.add_argument_group("diffhard [3]").add_argument
    add(
        "--pairs",
        **yes,
        help="two images of a latent, by G and its slow copy, are positives; no: G+Hard",
    )
    add(
        "--ascent",
        **yes,
        help="the generator ascends the encoder's loss; no: G+Pos, without pairs CL-GAN",
    )
    add(
        "--pretrain",
        **whole,
        default=2,
        help="epochs of the game before the encoder begins, at least 0",
    )
    add(
        "--every",
        **whole,
        default=8,
        help="steps of the encoder per step of the generator, at least 1",
    )
    add("--width", **whole, default=8, help="channels at full size: 8 for a CPU, 64 for a GPU")
    add("--latent", **whole, default=64, help="dimensions of a latent")
    add("--gan-lr", **real, default=4e-4, help="learning rate of generator and discriminator")
    add(
        "--ascent-lr",
        **real,
        default=1e-4,
        help="peak rate of the ascent: higher makes images harder",
    )

    for action in parser._actions:
        action.help += " (default: %(default)s)" * (
            action.default not in (None, False, argparse.SUPPRESS)
        )
        action.help = (
            action.help if {"--help-all", action.dest} & {*SHORT_HELP, *argv} else argparse.SUPPRESS
        )
    args = parser.parse_args(argv)
    at = (
        argv.index("--compare") if "--compare" in argv else len(argv)
    )  # each of its runs has a command
    args.command = shlex.join(
        ["python", "train.py", *argv[:at], *argv[at + 1 + len(args.compare or ()) :]]
    )
    game = args.method == "diffhard"
    args.loss = args.loss or (args.compare[0] if args.compare else "ppcl" if game else "hcl")
    weights, objective, tau_plus = hardneg.PRESETS[args.loss]
    if args.objective is None:  # nce knows no generated pairs
        args.objective = "ppcl" if game and args.pairs and objective == "nce" else objective
    known = {**hardneg.RECIPES[args.recipe], "weights": weights, "tau_plus": tau_plus}
    for key in (
        "",
        args.loss,
        *[args.method] * (args.method != "simclr"),
        f"{args.loss} {args.recipe}",
        f"{args.method} {args.recipe}",
    ):
        known |= DEFAULTS.get(key, {})
    for name, value in known.items():
        if getattr(args, name, value) is None:
            setattr(args, name, value)
    if args.out is None:
        variant = "-no-pairs" * (game and not args.pairs) + "-no-ascent" * (
            game and not args.ascent
        )
        last = "compare" if args.compare else f"{args.loss}-{args.seed}"
        args.out = Path("runs", f"{Path(args.data).resolve().name}-{args.method}{variant}-{last}")
    return args


def effective(args, name):
    """Tell whether an option has an effect on what the command does."""
    if args.evaluate or args.export:
        return (
            name
            in ("evaluate data root fraction workers device" if args.evaluate else "export").split()
        )
    on = [words.split() for flags, words in EFFECTS.items() if name in flags.split()]
    parts = {args.weights, args.objective, args.method, "compare" if args.compare else None}
    return not on or not parts.isdisjoint(on[0])


def options_of(args):
    """List what makes a run what it is, {option: value}: it must stay when the run goes on."""
    return {
        name: value
        for name, value in vars(args).items()
        if name not in FREE and value is not None and effective(args, name)
    }


# ---- Main and run --------------------------------------------------------------------------------
def report_idle_flags(argv, runs):
    """Print the flags of the command line that have no effect in any of its runs."""
    losses = ", ".join(dict.fromkeys(one.loss for one in runs))
    flags = [word.split("=")[0] for word in argv if word.startswith("--")]
    for flag in flags:
        name = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
        if not any(effective(one, name) for one in runs):
            print(f"{flag} has no effect here (loss {losses}, method {runs[0].method})")


def main(argv=None):
    """Run the command.

    An error ends it with one line, and exit code 2 if it is in the options, else 1."""
    argv = sys.argv[1:] if argv is None else argv
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    args = arguments(argv)
    runs = [arguments([*argv, "--loss", loss]) for loss in args.compare or [args.loss]]
    # losses are compared after equally many epochs, in batches of one size, at one rate
    epochs, size, lr = (
        [getattr(one, name) for one in runs] for name in ("epochs", "batch_size", "lr")
    )
    alike = f"--epochs {max(epochs)} --batch-size {min(size)} --lr {min(lr)}".split()
    rows = {one.loss: ["--loss", one.loss, *alike] for one in runs}
    report_idle_flags(argv, runs)
    try:
        for one in runs:
            check(one)
    except (ValueError, RuntimeError) as error:
        Parser().error(str(error))
    try:
        if args.export:
            export(*args.export)
        elif args.evaluate:
            transfer(args)
        elif args.compare:
            compare(rows, argv, range(args.seed, args.seed + args.seeds), args.out)
        else:
            run(args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except KeyboardInterrupt:
        anew = " without --overwrite or --no-resume" * (args.overwrite or args.resume is False)
        print(f"\nStopped; the same command{anew} goes on from there.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, ArithmeticError, RuntimeError, OSError, AssertionError) as error:
        sys.exit(f"train.py: {error}")


def check(args):
    """Find mistakes in the options before anything slow: build the run for four blank images."""
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device} cannot be used here; try --device cpu") from error
    require(
        args.data in ("shapes", *TORCHVISION) or Path(args.data).is_dir(),
        "--data",
        args.data,
        f"shapes, {', '.join(TORCHVISION)}, or a folder that exists",
    )
    run, file = args.export or (None, None)
    resumed = args.out if args.resume and not args.compare else None
    for flag, folder in (
        ("--resume, so --out", resumed),
        ("--evaluate", args.evaluate),
        ("--export", run),
    ):
        require(
            not folder or (folder / "checkpoint.pt").exists(), flag, folder, "the folder of a run"
        )
    require(file is None or file.suffix == ".pt2", "--export", file, "a file that ends in .pt2")
    single = args.compare or args.evaluate or run
    require(
        not single or not torch.distributed.is_torchelastic_launched(),
        "the launcher",
        "torchrun",
        "python for --compare, --evaluate and --export",
    )
    require(0 < args.fraction <= 1, "--fraction", args.fraction, "in (0, 1]")
    require(
        args.size is None or 8 <= args.size <= 1024, "--size", args.size, "from 8 to 1024 pixels"
    )
    require(
        args.micro_batch is None or args.micro_batch > 0,
        "--micro-batch",
        args.micro_batch,
        "at least 1",
    )
    require(args.seeds >= 1, "--seeds", args.seeds, "at least 1")
    size = args.size or 32
    images = torch.zeros(4, 3, size, size, dtype=torch.uint8, device=args.device)
    labels = torch.arange(4, device=args.device) // 2
    changed = {"queue_size": min(args.queue_size, 1), "sync_batchnorm": False, "compile": False}
    build(
        argparse.Namespace(**{**vars(args), **changed}),
        Images(images, labels, images, labels, ["a", "b"]),
    )
    finished = (args.out / "results.json").exists() and not (args.overwrite or single)
    require(
        not finished or args.resume,
        "--out",
        args.out,
        "another folder, as the run in it is finished; --overwrite replaces it",
    )


def build(args, images, group=None):
    """Make the encoder and its training as the options say."""
    criterion = hardneg.ContrastiveLoss(
        args.loss, **{name: getattr(args, name) for name in LOSS_OPTIONS}
    )
    encoder = untrained(args.encoder, images, args.seed)
    if args.sync_batchnorm:
        encoder = torch.nn.SyncBatchNorm.convert_sync_batchnorm(encoder, group)
    if args.compile:
        encoder.compile()
    anneal = (
        {"beta": lambda progress: hardneg.annealed_beta(progress, args.beta)} if args.anneal else {}
    )
    lead_in = (
        {"alpha": lambda progress: hardneg.lead_in(progress, args.alpha)} if args.lead_in else {}
    )
    schedules = {"tilted": anneal, "top": lead_in}.get(args.weights, {})
    return encoder, hardneg.Training(
        encoder,
        images.train,
        make_method(args, criterion, encoder, images),
        args.recipe,
        args.epochs,
        args.batch_size,
        args.lr,
        args.weight_decay,
        schedules,
        args.micro_batch,
        group=group,
        seed=args.seed,
    )


def run(args, images=None, known=None, bar=None):
    """Train an encoder, measure it and save the results.

    Several runs share the images, the known figures and the bar that they are given."""
    group, rank = join(args)
    if rank > 0:
        torch.distributed.barrier()  # the first process downloads, then the others find the files
    images = images or read(args, args.size)
    if group and rank == 0:
        torch.distributed.barrier()
    encoder, training = build(args, images, group)
    describe(args, training)
    with alone(args.out) if rank == 0 else contextlib.nullcontext():
        state = restore(args, training)
        if group:
            # every process reads the checkpoint before one removes it
            torch.distributed.barrier()
        if rank > 0:  # the first process alone measures and writes
            for _ in training:
                pass
            return
        state = state or begin(args, images)
        learn(args, training, state, images, bar)
        rows = measure(images, {} if known is None else known, args.encoder, args.seed, encoder)
        draw_curves(args.out / "curves.png", state["history"])
        facts = {
            name: getattr(args, name) for name in "loss method data seed epochs device".split()
        } | {"seconds": round(state["seconds"], 1), "options": options_of(args)}
        if args.report:
            draw_pictures(args, training, images)
            write_page(args, rows, facts)
        save_results(args.out / "results.json", rows, facts)


def describe(args, training):
    """Print the loss with its effective options, its schedules, and its value at chance."""
    known = [f"{name} {x}" for name, x in options_of(args).items() if name in LOSS_OPTIONS]
    print(
        f"loss {args.loss}: {', '.join(known)}"
        + f", on {training.ranks} processes" * (training.ranks > 1)
    )
    for name, schedule in training.schedules.items():
        print(
            f"{name} goes from {schedule(0.0):g} to {schedule(1.0):g}"
            + " by halftime" * (name == "alpha")
        )
    if args.objective in ("nce", "ppcl"):
        n, views = len(training.images), 2 * -(-len(training.images) // training.steps_per_epoch)
        n = {
            "bank": n - 1,
            "queue": args.queue_size + views // 2 - 1,
            "diffhard": 2 * views - 2,
        }.get(args.method, views - 2)
        n = math.ceil(n * args.alpha) if args.weights == "top" else n
        print(f"chance, all similarities equal: log(N + 1) = log({n + 1}) = {math.log(n + 1):.2f}")


@contextlib.contextmanager
def alone(folder):
    """Keep other runs out of a folder; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"--out is {folder}, where another run is at work; name another"
            ) from None
        yield


def begin(args, images):
    """Remove what an earlier run left → the state of a new one."""
    for name in ("checkpoint.pt", "results.json", "report.html", "evaluate-*.json", *PICTURES):
        for path in list(args.out.glob(name)):
            print(f"removing {path}, of an earlier run")
            path.unlink()
    return {"history": [], "seen": [], "seconds": 0.0, "size": images.train.shape[-1]}


def measure(images, known, name, seed, encoder):
    """Measure raw pixels, the untrained encoder of a seed and the trained one.

    The dict `known` keeps the figures of the first two for other runs."""
    print("measuring the encoder, its untrained state and raw pixels …", flush=True)
    start = name, seed
    if not known.get("raw"):
        known["raw"] = evaluate(None, images)
    if not known.get(start):
        known[start] = evaluate(untrained(name, images, seed), images)
    return {
        "raw pixels": [known["raw"]],
        "untrained encoder": [known[start]],
        "trained encoder": [evaluate(encoder, images)],
    }


def join(args):
    """Join torchrun's processes → process group, rank; None, 0 for a process on its own."""
    if not torch.distributed.is_torchelastic_launched():
        return None, 0
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    torch.distributed.init_process_group("nccl" if "cuda" in args.device else "gloo")
    if torch.distributed.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")
    return torch.distributed.group.WORLD, torch.distributed.get_rank()


def read(args, size):
    """Read the images that the options name, and say what they are."""
    *images, classes = load(args.data, args.root, size, args.fraction, workers=args.workers)
    images = Images(*(x.to(args.device) for x in images), classes)
    size, kinds = (
        images.train.shape[-1],
        f"{len(classes)} classes" if classes else "no classes or accuracies",
    )
    print(
        f"{args.data}: {len(images.train)} images to train on, {len(images.test)} to test, "
        f"{kinds}, {size} × {size} pixels, on {args.device}",
        flush=True,
    )
    return images


def untrained(name, images, seed):
    """Make the encoder that a run with this seed begins with."""
    torch.manual_seed(seed)
    encoder = hardneg.Encoder(name, size=images.train.shape[-1])
    return encoder.to(images.train.device, memory_format=torch.channels_last)


def make_method(args, criterion, encoder, images):
    """Make the method of training that the options name."""
    train, size = images.train, images.train.shape[-1]
    views = {"blur": 0.5} if size > 64 else {}  # blur hides what small images show
    fine = args.method != "queue" or args.queue_size < max(2, len(train))
    require(
        fine, "--queue-size", args.queue_size, f"below the number of training images, {len(train)}"
    )
    require(
        args.method == "simclr" and images.classes or not args.true_positives,
        "--true-positives",
        "on",
        "off: it is for the method simclr and images with classes",
    )
    partners = (train, images.train_labels) if args.true_positives else None
    return {
        "simclr": lambda: hardneg.SimCLR(criterion, views, partners),
        "bank": lambda: hardneg.Bank(criterion, encoder, train, args.momentum, views),
        "queue": lambda: hardneg.Queue(
            criterion, encoder, train, args.queue_size, args.momentum, views
        ),
        "clae": lambda: hardneg.CLAE(criterion, args.bound, views),
        "diffhard": lambda: hardneg.DiffHard(
            criterion,
            hardneg.Game(
                size,
                args.width,
                args.latent,
                args.pairs,
                args.ascent,
                args.momentum,
                args.pretrain,
                args.every,
                lr=args.gan_lr,
                ascent_lr=args.ascent_lr,
            ),
            views,
        ),
    }[args.method]()


def restore(args, training):
    """Bring the training to where it was stopped → the state of the run.

    The state is None if the run begins anew."""
    stopped = (args.out / "checkpoint.pt").exists() and not (args.out / "results.json").exists()
    if args.overwrite or args.resume is False or args.resume is None and not stopped:
        return None
    try:
        state = read_checkpoint(args.out, args.device)
        require_same(args.out, state["args"], options_of(args))
        training.load_state_dict(state["training"])
    except ValueError as error:
        raise ValueError(f"{error}; --no-resume begins anew") from error
    print(f"resumed after epoch {training.epoch} of {training.epochs} (--no-resume begins anew)")
    return state


def require_same(folder, was, now):
    """Require that the run in a folder has these options."""
    other = [
        f"--{k.replace('_', '-')} was {was.get(k)}"
        for k in {**was, **now}
        if was.get(k) != now.get(k)
    ]
    require(
        not other,
        "--out",
        folder,
        f"another folder: {', '.join(other)} there; --overwrite replaces it",
    )


def read_checkpoint(folder, device):
    """Read the checkpoint of a run; ValueError if it is missing, broken or of another program."""
    path = folder / "checkpoint.pt"
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        foreign = [name for name in ("args", "training", "size", "seen") if name not in state]
    except Exception as error:  # broken files raise exceptions of many types
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())[:100]})") from error
    require(not foreign, path, f"without {', '.join(foreign)}", "a checkpoint of this program")
    return state


def write(path, content):
    """Write a file whole or not at all.

    The content is text, or a function that writes to a file object."""
    part = path.with_name(f"{path.name}.part")
    whole = io.BytesIO()
    if callable(content):
        content(whole)
    else:
        whole.write(content.encode())
    try:
        with open(part, "wb") as file:
            file.write(whole.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def stoppable(active):
    """Collect Ctrl-C and SIGTERM in a list, for a loop that stops between steps.

    The second signal stops at once."""
    asked = []
    watched = (signal.SIGINT, signal.SIGTERM) if active else ()
    before = {n: signal.getsignal(n) for n in watched}
    for number in before:
        signal.signal(number, lambda n, _: (asked.append(n), signal.signal(n, before[n])))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def learn(args, training, state, images, bar=None):
    """Train to the end with a progress bar.

    After each epoch, and when the user stops the run, save all that the run needs to go on."""
    n, seen, before = len(training.images), state["seen"], state["seconds"] - time.perf_counter()
    few, epochs = at_most(images, 1000), training.method.pretrain + training.epochs
    with (
        tqdm(total=n * epochs, unit=" images", mininterval=1)
        if bar is None
        else contextlib.nullcontext(bar) as bar,
        stoppable(training.ranks == 1) as stop,
    ):
        bar.update(
            n * (training.method.pretrain + training.epoch)
            + n * training.step_in_epoch // training.steps_per_epoch
        )
        bar.unpause()  # what was done before says nothing of the speed
        for progress in training:
            seen.append(progress)
            shown = bar.update(progress["images"])  # at most once a second
            if shown and "loss" in progress:  # to read it, the host waits for the device
                bar.set_postfix_str(f"loss {float(progress['loss']):.3f}")
            if training.step_in_epoch > 0 and not stop:
                continue
            seen[:] = [
                {name: float(step[name]) for name in FIGURES if name in step} for step in seen
            ]
            if training.step_in_epoch == 0:
                means = {
                    name: mean(x) for name in FIGURES if (x := [k[name] for k in seen if name in k])
                }
                if training.epoch % -(-training.epochs // 10) == 0 and images.classes:
                    means |= evaluate(training.encoder, few, ("knn",))
                state["history"].append({"epoch": training.epoch, **means})
                seen.clear()
            state["seconds"] = before + time.perf_counter()
            everything = {**state, "args": options_of(args), "training": training.state_dict()}
            save_everything = functools.partial(torch.save, everything)
            write(args.out / "checkpoint.pt", save_everything)
            if stop:
                raise KeyboardInterrupt


def compare(rows, argv, seeds, out):
    """Train what is not done yet of each row, {name: its options}, with each seed.

    The options of argv are those of all rows."""
    plan = {
        (name, seed): arguments(
            [*argv, *options, "--seed", f"{seed}", "--out", f"{out / name}-{seed}"]
        )
        for seed in seeds
        for name, options in rows.items()
    }
    first, known, found = next(iter(plan.values())), {}, {name: [] for name in rows}
    images = read(first, first.size)

    def work(args):
        """Count the images that a run sees."""
        pretrain = args.pretrain if args.method == "diffhard" else 0
        return len(images.train) * (args.epochs + pretrain)

    with tqdm(total=sum(map(work, plan.values())), unit=" images", mininterval=1) as bar:
        for (name, _), args in plan.items():
            bar.set_description(args.out.name)
            if (args.out / "results.json").exists() and not args.overwrite:
                bar.update(work(args))
            else:
                with contextlib.redirect_stdout(io.StringIO()):
                    run(args, images, known, bar)
            results = json.loads((args.out / "results.json").read_text())
            require_same(args.out, results["options"], options_of(args))
            found[name].append(results)
    found = dict(sorted(found.items(), key=lambda row: -mean(r["linear"] or 0 for r in row[1])))
    write(out / "compare.json", json.dumps(found, indent=1) + "\n")
    if images.classes:
        draw_comparison(out / "compare.png", found)
    print(f"\n{table_of(found)}\n\n{verdict(found)}\nsaved in {out}/")


def spread(values, digits=1):
    """Write mean ± standard deviation; the mean alone for one value."""
    return f"{mean(values):.{digits}f}" + (
        f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    )


def table_of(found):
    """Write {name: results of each seed} as a Markdown table."""
    rows, some = {f"`{name}`": runs for name, runs in found.items()}, next(iter(found.values()))
    rows |= {"untrained encoder": [r["untrained"] for r in some], "raw pixels": [some[0]["raw"]]}
    heading, *lines = cells(rows)
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (heading, ["---"] * len(heading), *lines)
    )


def difference(one, other, figure="linear"):
    """Return the mean difference of two lists of results and its standard error.

    Results are paired by seed. A seed that one list lacks, of a stopped benchmark, is left out."""
    gaps = [a[figure] - b[figure] for a, b in zip(one, other, strict=False)]
    error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    return mean(gaps), error


def verdict(found):
    """Say which differences of linear accuracy exceed twice their standard error."""
    n, some = len(next(iter(found.values()))), next(iter(found.values()))
    if n < 2 or len(found) < 2 or some[0]["linear"] is None:
        return (
            "No difference can be judged: that takes two losses, two seeds and images with classes."
        )
    said = {True: [], False: []}
    for name, other in itertools.combinations(found, 2):
        gap, error = difference(found[name], found[other])
        said[abs(gap) > 2 * error].append(f"{name} − {other} {gap:.1f} ± {error:.1f}")
    odds = {2: 30, 3: 18, 4: 14, 5: 12}.get(n, 10)  # Student's t beyond 2, in percent
    return (
        f"Differences over {n} seeds, paired, ± standard error. They exceed twice the error: "
        f"{', '.join(said[True]) or 'none'}. They do not: {', '.join(said[False]) or 'none'}. "
        f"Of differences that are none, {odds} % exceed it."
    )


def transfer(args):
    """Measure the encoder of a run on other images: only the readout is trained.

    Ref: [3] Tables 3, 4"""
    state = read_checkpoint(args.evaluate, args.device)
    was, epochs = state["args"], max(0, state["training"]["epoch"])
    print(
        f"{was['encoder']} of {args.evaluate}, after {epochs} epochs of training on {was['data']}"
    )
    images = read(args, state["size"])
    encoder = untrained(was["encoder"], images, was["seed"])
    encoder.load_state_dict(state["training"]["encoder"])
    rows = measure(images, {}, was["encoder"], was["seed"], encoder)
    name = Path(args.data).resolve().name + f"-{args.fraction:g}" * (args.fraction < 1)
    save_results(
        args.evaluate / f"evaluate-{name}.json",
        rows,
        {
            "run": args.evaluate,
            "trained_on": was["data"],
            "epochs": epochs,
            "data": args.data,
            "fraction": args.fraction,
        },
    )


def export(run, path):
    """Write the encoder of a run as a program for torch.export.load.

    The program needs no code of this project."""
    state = read_checkpoint(run, "cpu")
    encoder = hardneg.Encoder(state["args"]["encoder"], size=state["size"])
    encoder.load_state_dict(state["training"]["encoder"])
    example = torch.zeros(2, 3, state["size"], state["size"])
    program = torch.export.export(
        encoder.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    write(path, lambda file: torch.export.save(program, file))
    shape = ", ".join(map(str, example.shape[1:]))
    print(f"{path}: images (n, {shape}) in [0, 1] → features, embeddings")


# ---- Images: uint8 (n, 3, H, W) ------------------------------------------------------------------
# images uint8 (n, 3, H, W), labels (n,), −1 where an image has none, names of classes, if any
Images = collections.namedtuple("Images", "train train_labels test test_labels classes")


def load(data="shapes", root="data", size=None, fraction=1.0, seed=0, workers=None):
    """Load "shapes", a set of TORCHVISION or a folder of images → Images.

    A set of TORCHVISION is in root, or is downloaded to it. A folder holds one folder of images per
    class (every fifth image is for the test), or train/ and test/ (or val/) of this kind, or images
    without labels, at any depth.
    size: side in pixels; None: their own, at most 96.
    fraction: share of each class to train on, in (0, 1].
    workers: processes that decode files."""
    if data not in ("shapes", *TORCHVISION):
        return from_folder(Path(data), size, fraction, seed, workers)
    if data == "shapes":
        sets = [
            *shapes(8000, seed=seed, size=size or 32),
            *shapes(2000, seed=seed + 10**6, size=size or 32),
        ]
        images = Images(*sets, list(OUTLINES))
    else:
        images = from_torchvision(data, root, size)
    keep = share(images.train_labels, fraction, seed)
    return images._replace(train=images.train[keep], train_labels=images.train_labels[keep])


def share(labels, fraction, seed):
    """Draw a share of each class, at least one image of it → indices, ascending."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    classes = [order[labels[order] == c] for c in labels.unique()]
    return (
        torch.cat([some[: max(1, round(fraction * len(some)))] for some in classes]).sort().values
    )


def polygon(a, n):
    """Return the distance from the centre to the outline of a regular n-gon in direction a."""
    half = math.pi / n  # half the angle of a side
    from_middle = a.remainder(2 * math.pi / n) - half
    return math.cos(half) / from_middle.cos()


OUTLINES = {  # class: distance from the centre to the outline in direction a, at most about 1
    "disc": lambda a: torch.full_like(a, 0.8),
    "ellipse": lambda a: 0.45 / torch.sqrt((0.45 * a.cos()) ** 2 + a.sin() ** 2),
    "triangle": lambda a: polygon(a, 3) * 1.1,
    "square": lambda a: polygon(a, 4),
    "star": lambda a: 0.65 + 0.35 * (5 * a).cos(),
    "clover": lambda a: 0.6 + 0.4 * (3 * a).cos(),
    "peanut": lambda a: 0.3 + 0.7 * a.cos() ** 2,
    "heart": lambda a: (2 - 2 * a.sin() + a.sin() * a.cos().abs().sqrt() / (a.sin() + 1.4)) / 3.2,
    "cross": lambda a: 0.32 / torch.minimum(a.cos().abs(), a.sin().abs()).clamp_min(0.32),
    "gear": lambda a: 0.8 + 0.2 * torch.tanh(6 * (8 * a).cos()),
}
CRAYONS = torch.tensor([[0.85, 0.25, 0.2], [0.2, 0.4, 0.85], [0.9, 0.8, 0.3], [0.15, 0.15, 0.15]])


def shapes(n=8000, classes=10, seed=0, size=32):
    """Draw n images of outlines → uint8 (n, 3, size, size), labels (n,); a seed repeats its images.

    classes: 2 to 10.
    The outline is the class. Colours, place, scale, rotation and noise are random."""
    require(2 <= classes <= len(OUTLINES), "classes", classes, f"2 to {len(OUTLINES)}")
    generator = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.rand, generator=generator)
    labels = (torch.arange(n) % classes)[torch.randperm(n, generator=generator)]
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    for some in torch.arange(n).split(2000):
        k = len(some)
        radius, turn = 0.45 + 0.35 * rand(k, 1, 1), 2 * math.pi * rand(k, 1, 1)
        x, y = axis - 0.6 * (rand(k, 1, 1) - 0.5), axis[:, None] - 0.6 * (rand(k, 1, 1) - 0.5)
        angle = (torch.atan2(y, x) + turn + math.pi).remainder(
            2 * math.pi
        ) - math.pi  # (k, size, size)
        edge = torch.empty(k, size, size)
        for c, outline in enumerate(list(OUTLINES.values())[:classes]):
            edge[labels[some] == c] = outline(angle[labels[some] == c])
        inside = torch.sigmoid((edge * radius - (x * x + y * y).sqrt()) * size / 2)[:, None]
        first = torch.randint(len(CRAYONS), (k,), generator=generator)
        second = (first + torch.randint(1, len(CRAYONS), (k,), generator=generator)) % len(
            CRAYONS
        )  # another
        ink, paper = (
            CRAYONS[c][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5) for c in (first, second)
        )
        clean = (0.9 + 0.2 * rand(k, 1, 1, 1)) * (
            paper + (ink - paper) * inside
        )  # (k, 3, size, size)
        noisy = clean + 0.05 * torch.randn(k, 3, size, size, generator=generator)
        images[some] = (noisy.clamp(0, 1) * 255).to(torch.uint8)
    return images, labels


# name: class in torchvision.datasets, arguments of the training set, arguments of the test set
TORCHVISION = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    # the unlabelled images have the label −1
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
}


def from_torchvision(name, root, size):
    """Read one of torchvision's sets from the folder root, or download it → Images."""
    kind, *parts = TORCHVISION[name]
    try:
        found = [getattr(datasets, kind)(root, download=True, **part) for part in parts]
    except (
        Exception
    ) as error:  # no network, a full disk, a broken archive: exceptions of many types
        raise RuntimeError(
            f"{name} is not in {root}/ and could not be downloaded ({error}); put the files "
            f"of {kind} there, or name a folder of images"
        ) from error
    sets = []
    for part in found:
        x, labels = (
            torch.as_tensor(part.data),
            part.targets if hasattr(part, "targets") else part.labels,
        )
        x = x[..., None].expand(-1, -1, -1, 3) if x.ndim == 3 else x  # grey → colour
        x = x if x.shape[1] == 3 else x.permute(0, 3, 1, 2)
        side = size or x.shape[-1]  # by the thousand, to save memory
        x = torch.cat([T.resize(some, [side, side], BICUBIC) for some in x.split(1000)])
        sets += [x, torch.as_tensor(labels).long()]
    return Images(*sets, [str(c) for c in getattr(found[0], "classes", range(10))])


def warn_of_loose_images(source):
    """Warn of images that lie beside the folders of classes."""
    loose = [path for path in source.iterdir() if path.suffix.lower() in SUFFIXES]
    if loose:
        message = f"{len(loose)} images beside the folders of classes in {source} are left out"
        warnings.warn(message, stacklevel=1)


def find_images(source, name, label):
    """List the images, [(path, label)], of one class in a folder, but nothing hidden.

    The class has the folder `name`; "" stands for all images, and there may be none."""
    samples = make_dataset(source, {name: label}, SUFFIXES, allow_empty=not name)
    places = [Path(path).relative_to(source).as_posix() for path, _ in samples]
    shown = ["/." not in f"/{place}" for place in places]
    return list(itertools.compress(samples, shown))


def from_folder(folder, size, fraction, seed, workers):
    """Read a folder of images as torchvision's ImageFolder does, but nothing hidden → Images."""
    sources = [folder / name for name in ("train", "test", "val") if (folder / name).is_dir()][:2]
    parts, classes, sets = [], None, []
    for source in sources if (folder / "train").is_dir() else [folder]:
        names = sorted(
            path.name for path in source.iterdir() if path.is_dir() and path.name[0] != "."
        )
        names = names if len(names) > 1 else []  # one folder is no choice of classes
        if names:
            warn_of_loose_images(source)
        classes = names if classes is None else classes
        require(
            names == classes,
            "--data",
            source,
            f"a folder of train/'s classes, {classes}, not {names}",
        )
        kinds = {name: k for k, name in enumerate(names)} or {"": -1}
        parts.append([find_images(source, name, k) for name, k in kinds.items()])
    if len(parts) == 1:  # no test set: hold out every fifth image of each class
        parts.append([samples[4::5] for samples in parts[0]])
        parts[0] = [[s for k, s in enumerate(samples) if k % 5 < 4] for samples in parts[0]]
    train, test = (sum(part, []) for part in parts)  # [(path, label)]
    keep = share(torch.tensor([label for _, label in train]), fraction, seed) if train else []
    for samples in ([train[k] for k in keep], test):
        paths, labels = [path for path, _ in samples], torch.tensor([label for _, label in samples])
        sizes = (image.shape[-1] for image in map(try_image, paths) if torch.is_tensor(image))
        size = size or next(sizes, 32)  # that of the first image
        images, whole = decode(paths, size, workers)
        require(
            len(whole) >= 2,
            "--data",
            folder,
            "one with 2 readable images to train on and 2 to test",
        )
        sets += [images, labels[whole]]
    return Images(*sets, classes)


def read_image(path, size):
    """Read the middle of an image, (3, size, size).

    Size 0 stands for the image's own if it is square and at most 96, else for 32, 64 or 96."""
    with Image.open(path) as picture:
        picture.draft("RGB", (2 * size or 192,) * 2)  # much larger JPEG files are read faster
        picture = ImageOps.exif_transpose(picture)  # as the camera was held
        if picture.mode[0] == "I":  # 16 bits of grey
            picture = Image.fromarray(np.uint8(np.asarray(picture) // 257))
        if picture.has_transparency_data:
            rgba = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        picture = picture.convert("RGB")
    if size == 0:
        s = min(picture.size) // 2 * 2
        size = s if max(picture.size) <= min(96, s + 1) else 32 if s < 64 else 64 if s < 96 else 96
    return T.pil_to_tensor(T.center_crop(T.resize(picture, size, BICUBIC), size))


def try_image(path, size=0):
    """Read an image, or return the error as text."""
    try:
        return read_image(path, size)
    except Exception as error:  # broken files raise exceptions of many types
        return str(error)


def decode(paths, size, workers):
    """Decode files → images uint8 (n, 3, size, size), and the places of those among the paths.

    A warning names broken files."""
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    whole, broken = [], []
    workers = workers if workers is not None else os.cpu_count() if len(paths) > 5000 else 0
    files = torch.utils.data.DataLoader(
        paths,
        None,
        num_workers=workers,
        generator=torch.Generator(),
        collate_fn=functools.partial(try_image, size=size),
    )
    for k, image in enumerate(tqdm(files, "reading", unit=" files", leave=False, delay=2)):
        if torch.is_tensor(image):
            images[len(whole)] = image
            whole.append(k)
        else:
            broken.append(f"{paths[k]} ({image})")
    if broken:
        some = ", ".join(broken[:5])
        message = f"{len(broken)} of {len(paths)} files cannot be read, such as {some}"
        warnings.warn(message, stacklevel=1)
    return images[: len(whole)], whole


# ---- Evaluation and report -----------------------------------------------------------------------
COLUMNS = {
    "linear": "linear %",
    "knn": "kNN %",
    "uniformity": "uniformity",
    "tolerance": "tolerance",
}
READOUT = 100_000  # the most training images of a readout: their features must fit into memory
PAGE = string.Template("""<!doctype html>\
<html lang="en"><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: auto; padding: 1rem; \
color: #222 }
h1, h2 { font-size: 1.2rem; margin: 2rem 0 0 } img { width: 100% } div { overflow-x: auto }
td { padding: .1rem .8rem .1rem 0; white-space: nowrap } \
pre { white-space: pre-wrap; background: #eee }
</style><h1>$title</h1><p>$summary</p><div><table>$table</table></div>
<p>Test accuracy of logistic regression on frozen features (linear) and of a vote of the 200 \
nearest (kNN).
Uniformity: about −4 evenly over the sphere, 0 in one point. Tolerance: the mean cosine within a \
class.</p>
$pictures<h2>The command that repeats this run</h2><pre>$command</pre>
<h2>Options</h2><div><table>$options</table></div></html>
""")


def at_most(images, n):
    """Take about n training and n test images, an equal share of each class."""
    x, labels, y, others, classes = images
    some, rest = (share(part.cpu(), min(1, n / len(part)), 0) for part in (labels, others))
    return Images(x[some], labels[some], y[rest], others[rest], classes)


def evaluate(encoder, images, figures=tuple(COLUMNS)):
    """Measure an encoder, or for None the pixels, averaged to 32 × 32.

    Accuracies are in percent."""
    labelled = (images.train_labels >= (0 if images.classes else -1)).nonzero()[:, 0]
    fraction = min(1, READOUT / max(1, len(labelled)))
    some = labelled.cpu()[share(images.train_labels[labelled].cpu(), fraction, 0)]
    pool = torch.nn.AdaptiveAvgPool2d(min(32, images.test.shape[-1]))

    def features(x):
        """Return features and embeddings of images; for pixels, both are the pixels."""
        if encoder:
            return hardneg.embed(encoder, x)
        pixels = torch.cat([pool(part / 255).flatten(1) for part in x.split(500)])
        return pixels, pixels

    train, _ = features(images.train[some])
    test, z = features(images.test)
    sets = train, images.train_labels[some], test, images.test_labels
    known = {
        "uniformity": lambda: hardneg.uniformity(z),
        "tolerance": lambda: hardneg.tolerance(z, sets[3]),
        "linear": lambda: hardneg.linear_readout(*sets),
        "knn": lambda: hardneg.knn_accuracy(*sets),
    }
    possible = figures if images.classes else ("uniformity",)
    return {name: round(float(known[name]()), 4) if name in possible else None for name in figures}


def cells(rows):
    """Write {name: figures of each run} as lists of strings, without empty columns.

    The heading comes first."""
    shown = [k for k in COLUMNS if next(iter(rows.values()))[0].get(k) is not None]
    lines = [
        [
            name,
            *(
                spread([run[k] for run in runs], 1 if "%" in COLUMNS[k] else 2)
                if k in runs[0]
                else ""
                for k in shown
            ),
        ]
        for name, runs in rows.items()
    ]
    return [["", *(COLUMNS[k] for k in shown)], *lines]


def save_results(path, rows, facts):
    """Print the table of raw pixels, untrained and trained encoder.

    Write it and the facts as JSON."""
    print(
        "",
        *(f"{name:18}" + "".join(f"{x:>12}" for x in line) for name, *line in cells(rows)),
        sep="\n",
    )
    raw, untrained, trained = (runs[0] for runs in rows.values())
    versions = {"python": sys.version.split()[0]} | {
        m.__name__: m.__version__ for m in (torch, torchvision)
    }
    if trained["linear"] and trained["linear"] <= max(untrained["linear"], raw["linear"]):
        print("Nothing learned that helps: train longer, on more images, or with a lower --lr.")
    results = {**facts, **trained, "untrained": untrained, "raw": raw, "versions": versions}
    write(path, json.dumps(results, indent=2, default=str) + "\n")
    print(f"saved in {path}")


def html_text(x):
    """Write anything as text of a page."""
    return html.escape(str(x))


def html_table(lines):
    """Write lines of cells as the rows of a table in a page."""
    rows = ("".join(f"<td>{html_text(cell)}" for cell in line) for line in lines)
    return "".join(f"<tr>{row}" for row in rows)


def write_page(args, rows, facts):
    """Write report.html: the table, the pictures with captions, the command and the options."""
    pictures = ""
    for path in (args.out / name for name in PICTURES):
        if path.exists():
            with Image.open(path) as image:
                title, caption = image.text["Title"], image.text["Description"]
            data = base64.b64encode(path.read_bytes()).decode()
            pictures += (
                f"<h2>{html_text(title)}</h2><p>{html_text(caption)}</p>"
                f'<img alt="{html_text(title)}" src="data:image/png;base64,{data}">\n'
            )
    summary = (
        f"{args.method}, {facts['epochs']} epochs in {facts['seconds']:.0f} s, seed {args.seed}"
    )
    write(
        args.out / "report.html",
        PAGE.substitute(
            title=html_text(f"{args.loss} on {Path(args.data).name}"),
            summary=html_text(summary),
            table=html_table(cells(rows)),
            pictures=pictures,
            command=html_text(args.command),
            options=html_table(facts["options"].items()),
        ),
    )
    print(f"pictures and options in {args.out / 'report.html'}")


# ---- Pictures ------------------------------------------------------------------------------------
plt.switch_backend("Agg")  # needs no screen
plt.style.use("tableau-colorblind10")


def save(figure, path, title, caption):
    """Save a figure with its title and caption, which are text in the PNG file, for the report."""
    text = {"Title": title, "Description": caption}
    write(path, lambda file: figure.savefig(file, format="png", dpi=120, metadata=text))
    plt.close(figure)


def draw(path, title, caption, panels, **look):
    """Draw panels of lines side by side, {title: {name: (x, y)}}."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6, 3.2), squeeze=False, layout="constrained"
    )
    for axis, (name, content) in zip(axes[0], panels.items(), strict=True):
        for label, (x, y) in content.items():
            axis.plot(
                np.asarray(x), np.asarray(y), ".-", label=label, ms=12 * (len(x) < 20), linewidth=1
            )
        axis.set(title=name, **look)
        axis.legend(fontsize="small")
    save(figure, path, title, caption)


def draw_curves(path, history):
    """Draw the figures of each epoch; up to epoch 0, the networks of a game train alone."""
    panels = {"losses": {}, "cosines and shares": {}, "kNN %": {}}
    for name in (*FIGURES, "knn"):
        if points := [(h["epoch"], h[name]) for h in history if name in h]:
            panel = (
                "losses" if "loss" in name else "kNN %" if name == "knn" else "cosines and shares"
            )
            panels[panel][name] = tuple(zip(*points, strict=True))
    losses = panels["losses"]["loss"][1]
    title = f"The loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
    caption = (
        "Cosines of views of one image (positive) and of others (negative) part during training. "
        "ess: effective share of negatives; clamped: share of anchors at the floor of debiasing."
    )
    draw(
        path,
        title,
        caption,
        {name: lines for name, lines in panels.items() if lines},
        xlabel="epoch",
    )


def draw_comparison(path, found):
    """Draw the linear accuracy of each row, with a point for each seed."""
    best, values = (
        next(iter(found)),
        {name: [r["linear"] for r in found[name]] for name in reversed(found)},
    )
    figure, axis = plt.subplots(figsize=(9, 2 + 0.5 * len(values)), layout="constrained")
    axis.barh(list(values), list(map(mean, values.values())), alpha=0.6)
    points = [(x, name) for name, some in values.items() for x in some]
    accuracies, names = zip(*points, strict=True)
    axis.plot(accuracies, names, "k.", ms=5)
    axis.axvline(mean(r["untrained"]["linear"] for r in found[best]), color="k", ls=":")
    axis.set(
        xlabel="linear readout, % of test images", title=f"{best} reaches {spread(values[best])} %"
    )
    save(
        figure,
        path,
        "Comparison",
        "Bars are means, points seeds, the dotted line the untrained encoder.",
    )


def draw_pairs(args, training, n=42):
    """Draw images of the same latents by the generator and its slow copy, at the end of a game."""
    game = training.method.game.eval()
    z = game.latents(n, torch.Generator(args.device).manual_seed(args.seed))
    with torch.no_grad():
        images = [game.G(z), game.G_ema(z)]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    sheet = torchvision.utils.make_grid(torch.stack(images, 1).flatten(0, 1), 12, pad_value=1.0)
    axis.imshow(sheet.permute(1, 2, 0).cpu().numpy())
    axis.axis("off")
    save(
        figure,
        args.out / "pairs.png",
        "Generated images",
        "Each pair: a latent by G and by its slow copy.",
    )


def draw_pictures(args, training, images):
    """Draw what the encoder has learned, from some 2000 test images."""
    _, _, test, labels, classes = at_most(images, 2000)
    encoders = {
        "untrained": untrained(args.encoder, images, args.seed),
        "trained": training.encoder,
    }
    z = {name: hardneg.embed(encoder, test)[1] for name, encoder in encoders.items()}
    draw_nearest(args, z, labels, test)
    draw_map(args.out, z["trained"][::2], labels[::2], classes)
    if classes:
        draw_histograms(args.out, z, labels)
    if args.method == "diffhard":
        draw_pairs(args, training)


def draw_nearest(args, embeddings, labels, test, columns=7):
    """Draw images with their nearest others and their weights, before and after training.

    Ref: [2] Fig. 2, 3"""
    chosen = [(labels == c).nonzero()[0, 0] for c in labels.unique()[:4]]
    chosen = chosen if len(chosen) > 1 else range(min(4, len(labels)))  # no classes
    figure, axes = plt.subplots(
        2 * len(chosen),
        columns + 1,
        figsize=(6, 2 * len(chosen)),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.axis("off")
    options = hardneg.Options(args.loss, **{name: getattr(args, name) for name in LOSS_OPTIONS})
    for turn, (name, z) in enumerate(embeddings.items()):
        logits = (z @ z.T / args.temperature).fill_diagonal_(-math.inf)
        log_w = hardneg.weigh(logits, options, args.temperature)
        for row, anchor in enumerate(map(int, chosen)):
            nearest = logits[anchor].topk(min(columns, len(z) - 1)).indices.tolist()
            # where images are few, the last panels of a row stay empty
            for axis, k in zip(axes[2 * row + turn], (anchor, *nearest), strict=False):
                false = k != anchor and bool(labels[k] == labels[anchor] >= 0)
                axis.imshow(test[k].permute(1, 2, 0).cpu().numpy())
                axis.set_title(
                    name if k == anchor else f"{log_w[anchor, k].exp():.2g}",
                    fontsize=8,
                    color="C1" if false else "k",
                )
    caption = (
        "Left, an image; beside it its nearest others, the hardest negatives, with their weights."
        + " Orange: of the image's class, so a false negative." * bool(labels.max() >= 0)
    )
    save(
        figure,
        args.out / "nearest.png",
        "The hardest negatives, before and after training",
        caption,
    )


def draw_map(out, z, labels, classes, neighbours=15, steps=300):
    """Draw embeddings in the plane so that neighbours stay neighbours.

    This is t-SNE on the neighbours' graph."""
    near = (z @ z.T).fill_diagonal_(-math.inf).topk(min(neighbours, len(z) - 1)).indices
    p = torch.zeros(len(z), len(z), device=z.device).scatter_(1, near, 1.0)
    p, z = (p + p.T) / p.sum() / 2, z - z.mean(0)
    x = (5 * len(z) ** 0.5 * torch.pca_lowrank(z, 2)[0]).requires_grad_()
    optimizer = torch.optim.Adam([x], 0.5)
    for _ in range(steps):
        log_q = -torch.log1p(torch.cdist(x, x).square()).fill_diagonal_(math.inf)
        loss = log_q.flatten().logsumexp(0) - (p * log_q.masked_fill(log_q == -math.inf, 0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    figure, axis = plt.subplots(figsize=(6, 4.5), layout="constrained")
    x = x.detach().cpu().numpy()
    axis.scatter(*x.T, s=6, color="0.9")  # more classes than colours
    for c, name in enumerate(classes[:10] or [""]):
        axis.scatter(*x[(labels == (c if classes else -1)).cpu()].T, s=6, label=name)
    axis.axis("off")
    if classes:
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), markerscale=2)
    save(
        figure,
        out / "map.png",
        f"A map of {len(x)} test images",
        "Each point is an image, near those that the encoder finds alike."
        + " An island of one colour is a class that is found." * bool(classes),
    )


def draw_histograms(out, z, labels, bins=100):
    """Draw the cosines of pairs of one class and of different classes. Ref: [1] App. B"""
    pairs, x = torch.ones(len(labels), len(labels)).triu(1) > 0, torch.linspace(-1, 1, bins)
    same, panels, overlap = (labels[:, None] == labels).cpu()[pairs], {}, {}
    for name, part in z.items():
        cosines = (part @ part.T).cpu()[pairs].clamp(-1, 1)
        one, two = (c.histc(bins, -1, 1) / len(c) for c in (cosines[same], cosines[~same]))
        panels[f"{name} encoder"] = {"one class": (x, one), "different classes": (x, two)}
        overlap[name] = f"{100 * torch.minimum(one, two).sum():.0f} %"
    after, before = overlap["trained"], overlap["untrained"]
    title = f"Same and different classes overlap by {after} (untrained: {before})"
    caption = (
        "On the right, pairs of different classes are hard negatives, "
        "pairs of one class false ones."
    )
    draw(
        out / "histograms.png",
        title,
        caption,
        panels,
        xlabel="cosine",
        ylabel="share",
        xticks=(-1, 0, 1),
    )


if __name__ == "__main__":
    main()
