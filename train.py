"""Train an encoder without labels and measure what it has learned: python train.py --loss hard --alpha 0.3

Prints how well raw pixels, the untrained and the trained encoder tell the classes apart; writes results.json,
curves.png and checkpoint.pt. Sections: arguments, main and run, images, evaluation and results, pictures.
"""
import argparse
import contextlib
import difflib
import io
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torchvision
from matplotlib import pyplot as plt
from torchvision import datasets
from torchvision.transforms import functional as T
from tqdm import tqdm

import hardneg

BICUBIC = T.InterpolationMode.BICUBIC
METHODS = ("simclr", "bank", "queue", "clae", "diffhard")
DEFAULTS = {"temperature": 0.1, "alpha": 0.1, "epsilon": 0.3}  # if nothing else is known
OF_LOSSES = {  # the best of four settings each, on the shapes: benchmarks/defaults.py
    "simclr": {"temperature": 0.05}, "debiased": {"tau_plus": 0.01}, "hcl": {"temperature": 0.3},
    "ot": {"epsilon": 0.1}, "hard": {"temperature": 0.07, "alpha": 0.3}}
OF_METHODS = {"bank": {"momentum": 0.8}}
OF_RECIPES = {("bank", "adamw"): {"epochs": 24, "batch_size": 64, "lr": 2e-3}}
WEIGHT_OPTIONS = ("temperature", "beta", "alpha", "epsilon", "cost", "kappa")
NOT_OF_THE_RUN = ("out", "resume", "device", "root", "pictures", "evaluate", "workers", "compare", "seeds",
                  "overwrite")
FIGURES = ("loss", "positive", "negative", "ess", "clamped", "pair", "d_loss", "g_loss", "diversity")
PICTURES = [f"{name}.png" for name in
            "separation gradient weights neighbours nearest uniformity histograms".split()]


class Parser(argparse.ArgumentParser):
    """Say a mistake in one line, with the nearest word that would work, and end with exit code 2."""
    def error(self, message):
        if found := re.search(r"choice: '(\S*)' \(choose from (.*)\)|unrecognized arguments: (\S+)", message):
            choice, choices, flag = found.groups()
            flags = [word for action in self._actions for word in action.option_strings]
            words = re.findall(r"[\w-]+", choices) if choices else flags
            near = difflib.get_close_matches(choice or flag, words, 1, 0.5)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"train.py: {message}\n")


def arguments(argv=None):
    """Parse the command line; fill in the loss, its temperature, the objective and the output folder."""
    parser = Parser(
        description=__doc__.split("\n")[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="[1] HCL, Robinson 2021; [2] HCL-OT, Jiang 2023; [3] DiffHard, Wu 2023; [4] Wang & Liu 2021")
    real, whole = {"type": float, "metavar": "X"}, {"type": int, "metavar": "N"}
    yes, no, open_ = ({"action": argparse.BooleanOptionalAction, "default": on} for on in (True, False, None))
    own = lambda key: "None: " + ", ".join(f"{row[key]:g} for {r}" for r, row in hardneg.RECIPES.items())
    add = parser.add_argument_group("loss").add_argument
    add("--loss", choices=hardneg.PRESETS, help="weights and objective; None: hcl, or ppcl for diffhard")
    add("--weights", choices=hardneg.WEIGHTS, help="weights of the negatives; None: those of the loss")
    add("--objective", choices=hardneg.OBJECTIVES, help="None: that of the loss; ppcl for generated pairs")
    tuned = lambda key, other: "None: " + ", ".join(
        f"{row[key]:g} for {name}" for name, row in (OF_LOSSES | OF_METHODS).items() if key in row) + other
    add("--temperature", **real, help=f"divides cosines, above 0; {tuned('temperature', ', else 0.1')}")
    add("--tau-plus", **real, help=f"false negatives, in [0, 1) [1]; {tuned('tau_plus', ', 0.1 for hcl')}")
    add("--beta", **real, default=1.0, help="hcl: concentration on near negatives, at least 0 [1]")
    add("--anneal", **no, help="hcl: lower beta to 0 in five steps over the run")
    add("--epsilon", **real, help="ot: regularisation, in units of the cost, above 0 [2]; None: 0.1")
    add("--cost", default="sqeuclidean", choices=("sqeuclidean", "exp"), help="ot: cost of the coupling")
    add("--kappa", **real, default=0.0, help="ot: κ of the cost exp")
    add("--alpha", **real, nargs="?", help=f"share kept, in (0, 1] [4]; {tuned('alpha', ', else 0.1')}")
    add("--lead-in", **yes, help="hard: lower the share from 1 to alpha over the first half of the run")
    add("--margin", **real, default=0.0, help="triplet: a squared distance, at least 0")
    add("--true-positives", **no, help="second view from another image of the class: uses labels [1]")
    add = parser.add_argument_group("data").add_argument
    add("--data", default="shapes", metavar="NAME", help=f"shapes (built in), {', '.join(TORCHVISION)}, or a "
        "folder: one folder of images per class, train/ and test/ that hold such folders, or images alone")
    add("--root", default="data", metavar="DIR", help="where torchvision's sets are, or are downloaded to")
    add("--fraction", **real, default=1.0, help="share of each class to train on, in (0, 1]")
    add("--workers", **whole, help="processes that read a folder during training; None: read it once")
    add("--size", **whole, help="side of images in pixels; None: their own, in a folder at most 96")
    add = parser.add_argument_group("training").add_argument
    add("--method", default="simclr", choices=METHODS, help="candidates: simclr, the batch; bank, a row per "
        "training image [4]; queue, earlier batches; clae, adversarial views; diffhard, generated images [3]")
    add("--momentum", **real, help="of the bank's rows (None: 0.8), of slow copies (None: 0.99), in [0, 1)")
    add("--queue-size", **whole, default=4096, help="embeddings in the queue, fewer than training images")
    add("--bound", **real, default=0.015, help="clae: largest change of a pixel, in (0, 1)")
    add("--encoder", default="small", choices=("small", "resnet18", "resnet50"), help="the network")
    add("--recipe", default="adamw", choices=hardneg.RECIPES, help="adamw: cosine rate; sgd: steps, as [4]")
    add("--epochs", **whole, help=f"passes over the images; {own('epochs')}, 24 for bank")
    add("--batch-size", **whole, help=f"images in a batch, at least 2; {own('batch_size')}, 64 for bank")
    add("--micro-batch", **whole, help="views in one pass of the encoder, to save memory; None: a batch")
    add("--lr", **real, help=f"peak learning rate; {own('lr')}, 0.002 for bank")
    add("--weight-decay", **real, help=own("weight_decay"))
    add("--sync-batchnorm", **no, help="under torchrun, on GPUs: BatchNorm over all processes")
    add("--seed", **whole, default=0, help="of weights, order and views")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:1")
    add("--out", type=Path, metavar="DIR", help="output folder; None: runs/DATA-METHOD-LOSS-SEED")
    add("--pictures", **no, help="also draw what the encoder has learned")
    add("--resume", **open_, help="continue the run in DIR, or begin anew; None: continue if it was stopped")
    add("--overwrite", **no, help="replace a finished run in DIR")
    add("--compare", nargs="+", metavar="LOSS", choices=hardneg.PRESETS,
        help="train with each of these losses, other options alike, and say which differences hold")
    add("--seeds", **whole, default=3, help="compare: runs of each loss, from --seed on")
    add("--evaluate", type=Path, metavar="RUN", help="only measure the encoder of the folder RUN on --data")
    add = parser.add_argument_group("diffhard [3]").add_argument
    add("--pairs", **yes, help="two images of a latent, by G and its slow copy, are positives; no: G+Hard")
    add("--ascent", **yes, help="the generator ascends the encoder's loss; no: G+Pos, without pairs CL-GAN")
    add("--pretrain", **whole, default=10, help="epochs of the game before the encoder begins, at least 0")
    add("--every", **whole, default=4, help="steps of the encoder per step of the generator, at least 1")
    add("--width", **whole, default=16, help="channels at full size: 16 for a CPU, 64 for a GPU")
    add("--latent", **whole, default=64, help="dimensions of a latent")
    add("--gan-lr", **real, default=4e-4, help="learning rate of generator and discriminator")
    add("--ascent-lr", **real, default=1e-4, help="peak rate of the ascent: higher makes images harder")

    args = parser.parse_args(argv)
    game = args.method == "diffhard"
    args.loss = args.loss or (args.compare[0] if args.compare else "ppcl" if game else "hcl")
    if game and args.pairs and args.objective is None and hardneg.PRESETS[args.loss][1] == "nce":
        args.objective = "ppcl"  # nce knows no generated pairs
    for name, value in {**DEFAULTS, **OF_LOSSES.get(args.loss, {}), **OF_METHODS.get(args.method, {}),
                        **OF_RECIPES.get((args.method, args.recipe), {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.out is None:
        variant = "-no-pairs" * (game and not args.pairs) + "-no-ascent" * (game and not args.ascent)
        last = "compare" if args.compare else f"{args.loss}-{args.seed}"
        args.out = Path("runs", f"{Path(args.data).name}-{args.method}{variant}-{last}")
    return args


def require(fine, name, got, allowed):
    """Raise a ValueError that names an argument, what it is and what it may be."""
    if not fine:
        raise ValueError(f"{name} is {got}; it must be {allowed}")


# ---- Main and run ------------------------------------------------------------------------------------------
def main(argv=None):
    """Run the command; an error in options, data or disk ends it with one line and exit code 1."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    try:
        if args.compare:
            rows = {loss: ["--loss", loss] for loss in args.compare}
            compare(rows, argv, range(args.seed, args.seed + args.seeds), args.out)
        else:
            run(args) if args.evaluate is None else transfer(args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except KeyboardInterrupt:
        sys.exit("\nStopped; the same command goes on from the last saved epoch, if there is one.")
    except (ValueError, ArithmeticError, RuntimeError, OSError, AssertionError) as error:
        sys.exit(f"train.py: {error}")


def run(args, images=None, known=None, bar=None):
    """Train an encoder as the options say, measure it and save the results.

    One of several runs is given its images, the known rows of raw pixels and untrained encoders, a bar."""
    group, rank = join(args)
    finished = (args.out / "results.json").exists() and not args.overwrite and args.resume is None
    require(not finished, "--out", args.out, "another folder: this run is finished; --overwrite replaces it")
    names = (*WEIGHT_OPTIONS, "weights", "objective", "tau_plus", "margin")
    criterion = hardneg.ContrastiveLoss(args.loss, **{name: getattr(args, name) for name in names})
    if rank > 0:
        torch.distributed.barrier()  # the first process downloads, then the others find the files
    images = images or read(args, args.size)
    if group and rank == 0:
        torch.distributed.barrier()
    encoder = untrained(args.encoder, images, args.seed)
    if args.sync_batchnorm:
        encoder = torch.nn.SyncBatchNorm.convert_sync_batchnorm(encoder, group)
    schedules = {}
    if args.anneal and criterion.weights == "tilted":
        schedules["beta"] = lambda progress: hardneg.annealed_beta(progress, args.beta)
    if args.lead_in and criterion.weights == "top":
        schedules["alpha"] = lambda progress: hardneg.lead_in(progress, args.alpha)
    training = hardneg.Training(
        encoder, images.train, make_method(args, criterion, encoder, images), args.recipe, args.epochs,
        args.batch_size, args.lr, args.weight_decay, schedules, args.micro_batch, group=group, seed=args.seed)
    print(criterion, f"on {training.ranks} processes" if group else "")
    for name, schedule in schedules.items():
        part = "first half of the run" if name == "alpha" else "run"
        print(f"{name} goes from {schedule(0.0):g} to {schedule(1.0):g} over the {part}")
    if criterion.objective in ("nce", "ppcl") and criterion.weights != "top":
        n, views = len(images.train), 2 * -(-len(images.train) // training.batches)
        n = {"bank": n - 1, "queue": args.queue_size, "diffhard": 2 * views - 2}.get(args.method, views - 2)
        print(f"chance, all similarities equal: log(N + 1) = log({n + 1}) = {math.log(n + 1):.2f}")
    same = {name: value for name, value in vars(args).items() if name not in NOT_OF_THE_RUN}
    state = restore(args, training, same)
    if group:
        torch.distributed.barrier()  # every process has read the checkpoint before one removes it
    if rank > 0:  # the first process alone measures and writes
        for _ in training:
            pass
        return
    args.out.mkdir(parents=True, exist_ok=True)
    require(os.access(args.out, os.W_OK), "--out", args.out, "a folder that can be written to")
    if state is None:
        print("measuring the raw pixels and the untrained encoder …", flush=True)
        known, own = {} if known is None else known, (args.encoder, args.seed)
        known["raw"] = known.get("raw") or evaluate(None, images)
        known[own] = known.get(own) or evaluate(encoder, images)
        state = {"history": [], "seconds": 0.0, "size": images.train.shape[-1],
                 "before": {"raw": known["raw"], "untrained": known[own]}}
        for name in ("checkpoint.pt", "results.json", "evaluate-*", "curves.png", "pairs-*", *PICTURES):
            for path in list(args.out.glob(name)):
                print(f"removing {path}, of an earlier run")
                path.unlink()
    learn(args, training, state, same, bar)
    rows = {**state["before"], "trained": evaluate(encoder, images)}
    draw_curves(args.out / "curves.png", state["history"])
    report(args.out / "results.json", rows, {
        **{name: getattr(args, name) for name in ("loss", "method", "data", "seed")},
        "epochs": training.epochs, "seconds": round(state["seconds"], 1),
        "images_per_second": round(len(images.train) * training.epochs / state["seconds"], 1),
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}})
    if args.pictures:
        draw_pictures(args, training, images, rows)


def join(args):
    """Join torchrun's processes → process group, rank; None, 0 for a process on its own."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
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
    print(f"reading {args.data} …", flush=True)
    images = load(args.data, args.root, size, args.fraction, workers=args.workers).to(args.device)
    size = images.train.shape[-1]
    classes = f"{len(images.classes)} classes" if images.classes else "no classes: no accuracies"
    print(f"{args.data}: {len(images.train)} images to train on, {len(images.test)} to test, "
          f"{classes}, {size} × {size} pixels, on {args.device}", flush=True)
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
    momentum = 0.99 if args.momentum is None else args.momentum
    require(args.method == "simclr" and images.classes or not args.true_positives, "true_positives", "on",
            "off, but for simclr on images with classes")
    partners = (train, images.train_labels) if args.true_positives else None
    game = lambda: hardneg.Game(
        size, args.width, args.latent, args.pairs, args.ascent, momentum, args.pretrain, args.every,
        lr=args.gan_lr, ascent_lr=args.ascent_lr)
    return {
        "simclr": lambda: hardneg.SimCLR(criterion, views, partners),
        "bank": lambda: hardneg.Bank(criterion, encoder, train, momentum, views),
        "queue": lambda: hardneg.Queue(criterion, encoder, train, args.queue_size, momentum, views),
        "clae": lambda: hardneg.CLAE(criterion, args.bound, views),
        "diffhard": lambda: hardneg.DiffHard(criterion, game(), views),
    }[args.method]()


def restore(args, training, same):
    """Bring the training to the last saved epoch → the state of the run; None if the run begins anew."""
    stopped = (args.out / "checkpoint.pt").exists() and not (args.out / "results.json").exists()
    if args.overwrite or args.resume is False or args.resume is None and not stopped:
        return None
    state = read_checkpoint(args.out, args.device)
    other = [f"--{k.replace('_', '-')} was {v}" for k, v in state["args"].items() if v != same.get(k)]
    require(not other, "--out", args.out, f"another folder, or --no-resume discards the run in it: {other}")
    training.load_state_dict(state["training"])
    print(f"resumed after epoch {training.epoch} of {training.epochs} (--no-resume begins anew)")
    return state


def read_checkpoint(folder, device):
    """Read the checkpoint of a run; ValueError if it is missing or broken."""
    try:
        return torch.load(folder / "checkpoint.pt", map_location=device, weights_only=True)
    except Exception as error:  # broken files raise exceptions of many types
        raise ValueError(f"no checkpoint in {folder} can be read ({error}); try --no-resume") from error


def learn(args, training, state, same, bar=None):
    """Train to the end with a progress bar; after each epoch save all that is needed to continue."""
    path, n, pretrain = args.out / "checkpoint.pt", len(training.images), training.method.pretrain
    epoch, seen, start = training.epoch, [], time.perf_counter()
    total, own = n * (pretrain + training.epochs), bar is None
    with tqdm(total=total, unit=" images") if own else contextlib.nullcontext(bar) as bar:
        bar.update(n * (pretrain + epoch))
        bar.unpause()  # what was done before says nothing of the speed
        for progress in training:
            seen.append(progress)
            if bar.update(progress["images"]) and "loss" in progress:  # sometimes: it waits for the device
                bar.set_postfix_str(f"loss {float(progress['loss']):.3f}")
            if training.epoch == epoch:
                continue
            epoch = training.epoch
            values = {name: [float(step[name]) for step in seen if name in step] for name in FIGURES}
            means = {name: sum(some) / len(some) for name, some in values.items() if some}
            state["history"].append({"epoch": epoch, **means})
            state["seconds"] += time.perf_counter() - start
            if args.method == "diffhard":
                draw_pairs(args, training)
            torch.save({**state, "args": same, "training": training.state_dict()}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)  # a kill leaves the old file or the new one, whole
            seen, start = [], time.perf_counter()


def compare(rows, argv, seeds, out):
    """Train with the options of each row, {name: options}, and each seed; print, draw and save the results.

    argv: options of all. A run that has its results in out is not repeated; a stopped one goes on."""
    plan = {(name, seed): arguments([*argv, *options, "--seed", f"{seed}", "--out", f"{out / name}-{seed}"])
            for seed in seeds for name, options in rows.items()}
    first, known, found = next(iter(plan.values())), {}, {name: [] for name in rows}
    images = read(first, first.size)
    epochs = [(args.epochs or hardneg.RECIPES[args.recipe]["epochs"])
              + args.pretrain * (args.method == "diffhard") for args in plan.values()]
    with tqdm(total=len(images.train) * sum(epochs), unit=" images") as bar:
        for n, ((name, _), args) in zip(epochs, plan.items()):
            bar.set_description(args.out.name)
            if (args.out / "results.json").exists():
                bar.update(len(images.train) * n)
            else:
                with contextlib.redirect_stdout(io.StringIO()):
                    run(args, images, known, bar)
            results = json.loads((args.out / "results.json").read_text())
            wanted = json.loads(json.dumps(vars(args), default=str))
            other = [f"--{k.replace('_', '-')} {v}" for k, v in results["options"].items()
                     if k not in NOT_OF_THE_RUN and v != wanted.get(k)]
            require(not other, "--out", out, f"another folder: {args.out} has a run with {', '.join(other)}")
            results["options"] = {k: v for k, v in results["options"].items() if k not in ("root", "out")}
            found[name].append(results)  # without paths, so that it can be published
    (out / "compare.json").write_text(json.dumps(found, indent=1) + "\n")
    draw_comparison(out / "compare.png", found)
    print(f"\n{table_of(found)}\n\n{verdict(found)}\nsaved in {out}/: compare.json, compare.png, all runs")


def spread(values, digits=1):
    """Write mean ± standard deviation; the mean alone for one value."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def by_accuracy(found):
    """Sort the names of {name: results of each seed}, the best first."""
    return sorted(found, key=lambda name: -statistics.mean(r["linear"] or 0 for r in found[name]))


def table_of(found):
    """Write {name: results of each seed} as a Markdown table of means ± standard deviations."""
    some = next(iter(found.values()))
    shown = {figure: digits for figure, (_, _, digits) in COLUMNS.items() if some[0][figure] is not None}
    rows = {f"`{name}`": found[name] for name in by_accuracy(found)}
    if "linear" in shown:
        rows |= {"untrained encoder": [r["untrained"] for r in some], "raw pixels": [some[0]["raw"]]}
    lines = [["", *(COLUMNS[figure][0] for figure in shown)], ["---"] * (len(shown) + 1)]
    lines += [[name, *(spread([r[figure] for r in results], digits) if figure in results[0] else ""
                       for figure, digits in shown.items())] for name, results in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def difference(one, other, figure="linear"):
    """Return the mean difference of two lists of results, paired by seed, and its standard error."""
    gaps = [a[figure] - b[figure] for a, b in zip(one, other)]
    return statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf


def verdict(found):
    """Say which differences of linear accuracy exceed twice their standard error."""
    order = by_accuracy(found)
    n = len(found[order[0]])
    if n < 2 or found[order[0]][0]["linear"] is None:
        return "No difference can be judged: that takes labels and at least two seeds."
    held, others = [], []
    for name, other in itertools.combinations(order, 2):
        gap, error = difference(found[name], found[other])
        (held if gap > 2 * error else others).append(f"{name} − {other} {gap:.1f} ± {error:.1f}")
    return (f"Differences over {n} seeds, paired, ± standard error. They exceed twice the error: "
            f"{', '.join(held) or 'none'}. They do not: {', '.join(others) or 'none'}.")


def transfer(args):
    """Measure the encoder of a run on other images: only the readout is trained. Ref: [3] Tables 3, 4"""
    state = read_checkpoint(args.evaluate, args.device)
    was, epochs = state["args"], max(0, state["training"]["epoch"])
    print(f"{was['encoder']} of {args.evaluate}, after {epochs} epochs of training on {was['data']}")
    images = read(args, state["size"])
    encoder = untrained(was["encoder"], images, was["seed"])
    rows = {"raw": evaluate(None, images), "untrained": evaluate(encoder, images)}
    encoder.load_state_dict(state["training"]["encoder"])
    rows["trained"] = evaluate(encoder, images)
    name = Path(args.data).name + f"-{args.fraction:g}" * (args.fraction < 1)
    facts = {"run": str(args.evaluate), "trained_on": was["data"], "epochs": epochs, "data": args.data}
    report(args.evaluate / f"evaluate-{name}.json", rows, {**facts, "fraction": args.fraction})


# ---- Images: uint8 (n, 3, H, W) ----------------------------------------------------------------------------
class Images(NamedTuple):
    """Hold a training set and a test set with labels, and the names of the classes."""
    train: torch.Tensor         # (n, 3, H, W) uint8, or Files
    train_labels: torch.Tensor  # (n,), −1 where there is no label
    test: torch.Tensor          # (m, 3, H, W) uint8, or Files
    test_labels: torch.Tensor   # (m,)
    classes: list               # of names, empty for images without labels

    def to(self, device):
        """Return the same images on another device."""
        return Images(*(x.to(device) for x in self[:-1]), self.classes)


def load(data="shapes", root="data", size=None, fraction=1.0, seed=0, workers=None):
    """Load "shapes", a set of TORCHVISION (in root, or downloaded to it) or a folder of images → Images.

    A folder holds one folder of images per class (every fifth image is for the test), or train/ and test/ (or
    val/) of this kind. One without folders of classes holds images without labels, at any depth. size: side
    in pixels; None: their own, in a folder at most 96. fraction: share of each class to train on, in (0, 1].
    workers: processes that read a folder in training; None: read it once."""
    require(0 < fraction <= 1, "fraction", fraction, "in (0, 1]")
    if data not in ("shapes", *TORCHVISION):
        return from_folder(Path(data), size, fraction, seed, workers)
    require(workers is None, "workers", workers, f"None for {data}; only a folder is read by workers")
    if data == "shapes":
        sets = [*shapes(8000, seed=seed, size=size or 32), *shapes(2000, seed=seed + 10**6, size=size or 32)]
        images = Images(*sets, list(OUTLINES))
    else:
        images = from_torchvision(data, root, size)
    keep = share(images.train_labels, fraction, seed)
    return images._replace(train=images.train[keep], train_labels=images.train_labels[keep])


def share(labels, fraction, seed):
    """Draw a share of each class, at least one image of it → indices, ascending."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    classes = [order[labels[order] == c] for c in labels.unique()]
    return torch.cat([some[:max(1, round(fraction * len(some)))] for some in classes]).sort().values


polygon = lambda a, n: math.cos(math.pi / n) / (a.remainder(2 * math.pi / n) - math.pi / n).cos()
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

    classes: 2 to 10. The outline is the class; colours, place, scale, rotation and noise are random."""
    require(2 <= classes <= len(OUTLINES), "classes", classes, f"2 to {len(OUTLINES)}")
    require(n >= 1, "n", n, "at least 1")
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)
    labels = (torch.arange(n) % classes)[torch.randperm(n, generator=generator)]
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    for some in torch.arange(n).split(2000):
        k = len(some)
        radius, turn = 0.45 + 0.35 * rand(k, 1, 1), 2 * math.pi * rand(k, 1, 1)
        x, y = axis - 0.6 * (rand(k, 1, 1) - 0.5), axis[:, None] - 0.6 * (rand(k, 1, 1) - 0.5)
        angle = (torch.atan2(y, x) + turn + math.pi).remainder(2 * math.pi) - math.pi   # (k, size, size)
        edge = torch.empty(k, size, size)
        for c, outline in enumerate(list(OUTLINES.values())[:classes]):
            edge[labels[some] == c] = outline(angle[labels[some] == c])
        inside = torch.sigmoid((edge * radius - (x * x + y * y).sqrt()) * size / 2)[:, None]
        first = torch.randint(len(CRAYONS), (k,), generator=generator)
        second = (first + torch.randint(1, len(CRAYONS), (k,), generator=generator)) % len(CRAYONS)  # another
        ink, paper = (CRAYONS[c][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5) for c in (first, second))
        clean = (0.9 + 0.2 * rand(k, 1, 1, 1)) * (paper + (ink - paper) * inside)       # (k, 3, size, size)
        noisy = clean + 0.05 * torch.randn(k, 3, size, size, generator=generator)
        images[some] = (noisy.clamp(0, 1) * 255).to(torch.uint8)
    return images, labels


TORCHVISION = {  # name: class in torchvision.datasets, arguments of the training set, of the test set
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),  # label −1 of the unlabelled
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
}


def from_torchvision(name, root, size):
    """Read one of torchvision's sets from the folder root, or download it → Images."""
    kind, *parts = TORCHVISION[name]
    try:
        found = [getattr(datasets, kind)(root, download=True, **part) for part in parts]
    except Exception as error:  # no network, a full disk, a broken archive: exceptions of many types
        raise RuntimeError(f"{name} is not in {root}/ and could not be downloaded ({error}). Put the files "
                           f"of torchvision's {kind} there, or name a folder of images") from error
    sets = []
    for part in found:
        x, labels = torch.as_tensor(part.data), part.targets if hasattr(part, "targets") else part.labels
        x = x[..., None].expand(-1, -1, -1, 3) if x.ndim == 3 else x                    # grey → colour
        x = x if x.shape[1] == 3 else x.permute(0, 3, 1, 2)
        if size is not None:  # by the thousand, to save memory
            x = torch.cat([T.resize(some, [size, size], BICUBIC) for some in x.split(1000)])
        sets += [x.contiguous(), torch.as_tensor(labels).long()]
    return Images(*sets, [str(c) for c in getattr(found[0], "classes", range(10))])


def from_folder(folder, size, fraction, seed, workers):
    """Read a folder of images as torchvision's ImageFolder does, but without hidden folders → Images."""
    require(folder.is_dir(), "data", folder, f"shapes, {', '.join(TORCHVISION)}, or a folder of images")
    sources = [folder / name for name in ("train", "test", "val") if (folder / name).is_dir()][:2]
    parts, classes, sets = [], None, []
    for source in sources if (folder / "train").is_dir() else [folder]:
        names = sorted(path.name for path in source.iterdir() if path.is_dir() and path.name[0] != ".")
        names = names if len(names) > 1 else []  # one folder is no choice of classes
        classes = names if classes is None else classes
        require(names == classes, "data", source, f"a folder of train/'s classes, {classes}, not {names}")
        parts.append([datasets.folder.make_dataset(source, {name: k}, datasets.folder.IMG_EXTENSIONS)
                      for k, name in enumerate(names)] or [unlabelled(source)])
    if len(parts) == 1:  # no test set: hold out every fifth image of each class
        parts.append([samples[4::5] for samples in parts[0]])
        parts[0] = [[s for k, s in enumerate(samples) if k % 5 < 4] for samples in parts[0]]
    train, test = (sum(part, []) for part in parts)  # [(path, label)]
    keep = share(torch.tensor([label for _, label in train]), fraction, seed) if train else []
    for samples in ([train[k] for k in keep], test):
        require(len(samples) >= 2, "data", folder, "a folder of at least 2 images to train on, and 2 to test")
        paths, labels = [path for path, _ in samples], torch.tensor([label for _, label in samples])
        size = size or Files(paths, 0)[0].shape[-1]  # of the first image that can be read
        images = Files(paths, size, workers)
        sets += [images, labels] if workers is not None else images.read(labels)
    return Images(*sets, classes)


def unlabelled(folder):
    """List the images at any depth of a folder, but not in hidden folders → [(path, −1)]."""
    paths = [path for path in sorted(folder.rglob("*"))
             if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return [(str(path), -1) for path in paths if path.suffix.lower() in datasets.folder.IMG_EXTENSIONS]


def read_image(path, size):
    """Read the middle of an image, (3, size, size); size 0: its own if square and ≤ 96, else 32, 64 or 96."""
    picture = datasets.folder.default_loader(path)
    if size == 0:
        s = min(picture.size) // 2 * 2
        size = s if max(picture.size) <= min(96, s + 1) else 32 if s < 64 else 64 if s < 96 else 96
    if picture.size != (size, size):
        picture = T.center_crop(T.resize(picture, size, BICUBIC), size)
    return T.pil_to_tensor(picture)


class Files(torch.utils.data.Dataset):
    """Stand in for a tensor uint8 (n, 3, size, size): image files that worker processes read when needed.

    `len`, `shape`, `device`, `to`, `split` are those of the tensor. files[indices] are these files, unread;
    files[k] with an int is image k. The next readable file replaces a broken one, which a warning names."""

    def __init__(self, paths, size, workers=None, device="cpu"):
        require(workers is None or workers in range(1000), "workers", workers, "None or 0, 1, 2, … processes")
        self.paths, self.workers, self.device, self.broken = list(paths), workers, torch.device(device), {}
        self.shape = torch.Size((len(self.paths), 3, size, size))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if not isinstance(index, int):
            chosen = torch.arange(len(self))[index.cpu() if torch.is_tensor(index) else index]
            return Files([self.paths[k] for k in chosen.tolist()], self.shape[-1], self.workers, self.device)
        index = range(len(self))[index]
        for path in (self.paths[(index + k) % len(self)] for k in range(len(self))):
            try:
                return read_image(path, self.shape[-1])
            except Exception as error:  # broken files raise exceptions of many types
                if self.workers is not None and path not in self.broken:
                    warnings.warn(f"{path} cannot be read as an image ({error}); the next one replaces it")
                self.broken[path] = error
        raise ValueError(f"data is {self.paths[0]} and others; none of the files can be read as an image")

    def to(self, device):
        return Files(self.paths, self.shape[-1], self.workers, device)

    def split(self, size):
        return self.batches(torch.arange(len(self)).split(size))

    def batches(self, indices):
        """Yield the images of each index tensor in turn, uint8 on the device; workers read ahead."""
        for images in torch.utils.data.DataLoader(
                self, batch_sampler=[index.tolist() for index in indices], num_workers=self.workers or 0,
                pin_memory=self.device.type == "cuda", generator=torch.Generator()):  # keeps the global seed
            yield images.to(self.device, non_blocking=True)

    def read(self, labels):
        """Read all files now, without the broken ones → images, labels; a warning names five of those."""
        images = torch.cat(list(self.split(500)))
        if self.broken:
            named = ", ".join(f"{path} ({error})" for path, error in list(self.broken.items())[:5])
            warnings.warn(f"{len(self.broken)} of {len(self)} files cannot be read and are left out: {named}")
        good = torch.tensor([path not in self.broken for path in self.paths])
        return images[good], labels[good]


# ---- Evaluation and results --------------------------------------------------------------------------------
COLUMNS = {"linear": ("linear %", 10, 1), "knn": ("kNN %", 10, 1), "uniformity": ("uniformity", 12, 2),
           "tolerance": ("tolerance", 12, 2)}  # heading, width, digits
READOUT = 100_000  # the most training images of a readout: their features must fit into memory


def evaluate(encoder, images):
    """Measure an encoder, or for None the pixels, averaged to 32 × 32; accuracies are in percent."""
    labelled = (images.train_labels >= (0 if images.classes else -1)).nonzero()[:, 0]
    fraction = min(1, READOUT / max(1, len(labelled)))
    some = labelled[share(images.train_labels[labelled].cpu(), fraction, 0).to(labelled.device)]
    pool = torch.nn.AdaptiveAvgPool2d(min(32, images.test.shape[-1]))
    pixels = lambda x: torch.cat([pool(part / 255).flatten(1) for part in x.split(500)])
    (train, _), (test, z) = (hardneg.embed(encoder, x) if encoder else 2 * [pixels(x)]
                             for x in (images.train[some], images.test))
    sets, figures = (train, images.train_labels[some], test, images.test_labels), {}
    if images.classes:
        figures = {"linear": hardneg.linear_readout(*sets), "knn": hardneg.knn_accuracy(*sets),
                   "tolerance": float(hardneg.tolerance(z, images.test_labels))}
    return {**dict.fromkeys(("linear", "knn", "tolerance"), math.nan), **figures,
            "uniformity": float(hardneg.uniformity(z))}


def report(path, rows, facts):
    """Print the table of raw pixels, untrained and trained encoder; write it and the facts as JSON."""
    shown = {name: c for name, c in COLUMNS.items() if not math.isnan(rows["trained"][name])}
    print(f"\n{'':18}" + "".join(f"{heading:>{width}}" for heading, width, _ in shown.values()))
    for name, row in rows.items():
        cells = "".join(f"{row[k]:{width}.{digits}f}" for k, (_, width, digits) in shown.items())
        print(f"{'raw pixels' if name == 'raw' else f'{name} encoder':18}{cells}")
    number = lambda value, digits: None if math.isnan(value) else round(value, digits)
    trained = {name: number(v, 4) for name, v in rows["trained"].items()}
    others = {name: {k: number(rows[name][k], 2) for k in ("linear", "knn")} for name in ("untrained", "raw")}
    versions = {"python": sys.version.split()[0]} | {m.__name__: m.__version__ for m in (torch, torchvision)}
    path.write_text(json.dumps({**facts, **trained, **others, "versions": versions}, indent=2) + "\n")
    print(f"saved in {path}")


# ---- Pictures ----------------------------------------------------------------------------------------------
plt.switch_backend("Agg")  # needs no screen
plt.style.use("tableau-colorblind10")


def draw(path, title, caption, panels, own=None, **look):
    """Draw panels side by side, {title: {name: (x, y)} or an image (3, H, W)}; the line of `own` is thick."""
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 5.5), squeeze=False, layout="constrained")
    for axis, (name, content) in zip(axes[0], panels.items()):
        if torch.is_tensor(content):
            axis.imshow(content.permute(1, 2, 0).cpu())
            axis.axis("off")
            continue
        for label, (x, y) in content.items():
            axis.plot(x, y, ".-", label=label, ms=12 * (len(x) < 20), linewidth=1 + 3 * (label == own))
        axis.set(title=name, **look)
        axis.legend()
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel(caption, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_curves(path, history):
    """Draw the figures of each epoch; up to epoch 0, the networks of a game train alone."""
    panels = {"losses": {}, "cosines and shares": {}}
    for name in FIGURES:
        if points := [(h["epoch"], h[name]) for h in history if name in h]:
            panels["losses" if "loss" in name else "cosines and shares"][name] = tuple(zip(*points))
    losses = panels["losses"]["loss"][1]
    title = f"The loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
    caption = "As the encoder learns, views of one image (positive) and of others (negative) part."
    draw(path, title, caption, panels, xlabel="epoch")


def draw_comparison(path, found):
    """Draw the linear accuracy of each row, with a point for each seed."""
    if next(iter(found.values()))[0]["linear"] is None:
        return
    order = by_accuracy(found)[::-1]
    figure, axis = plt.subplots(figsize=(9, 2 + 0.5 * len(order)), layout="constrained")
    for place, name in enumerate(order):
        values = [r["linear"] for r in found[name]]
        axis.barh(place, statistics.mean(values), color="C0", alpha=0.6)
        axis.plot(values, [place] * len(values), "k.", ms=5)
    axis.axvline(statistics.mean(r["untrained"]["linear"] for r in found[order[0]]), color="k", ls=":")
    axis.set(yticks=range(len(order)), yticklabels=order, xlabel="linear readout, % of test images")
    figure.suptitle(f"{order[-1]} reaches {spread([r['linear'] for r in found[order[-1]]])} %", weight="bold")
    figure.supxlabel("Bars are means, points seeds, the dotted line the untrained encoder.", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_pairs(args, training, n=42):
    """Draw images of the same latents by the generator and its slow copy, at three times of a game."""
    when = {0: "start", training.epochs // 2: "middle", training.epochs: "end"}.get(training.epoch)
    if when is None:
        return
    game = training.method.game.eval()  # so that drawing changes nothing
    z = game.latents(n, torch.Generator(training.images.device).manual_seed(args.seed))
    with torch.no_grad():
        images = [game.G(z), game.G_ema(z)]
    one, other = (hardneg.embed(training.encoder, x)[1] for x in images)
    title = f"Generated images at the {when}: mean cosine of a pair {(one * other).sum(1).mean():.2f}"
    caption = "Side by side, images of one latent by the generator and by its slow copy, six pairs in a row."
    sheet = torchvision.utils.make_grid(torch.stack(images, 1).flatten(0, 1), 12, pad_value=1.0)
    draw(args.out / f"pairs-{when}.png", title, caption, {"": sheet})


def draw_pictures(args, training, images, rows):
    """Draw what the encoder has learned, from at most 2000 test images."""
    out, method, device = args.out, training.method, images.test.device
    generator = torch.Generator(device).manual_seed(args.seed)
    some = torch.randperm(len(images.test), generator=generator, device=device)[:2000]
    test, labels = torch.cat(list(images.test[some].split(500))), images.test_labels[some]
    encoders = {"untrained": untrained(args.encoder, images, args.seed), "trained": training.encoder}
    embed = lambda x: {name: hardneg.embed(encoder, x)[1] for name, encoder in encoders.items()}
    z, views = embed(test), [hardneg.view(test[:512], generator, **method.view_options) for _ in range(2)]
    options = {name: getattr(args, name) for name in WEIGHT_OPTIONS}
    losses = {name: hardneg.ContrastiveLoss(name, **options) for name in "simclr hcl ot hard simple".split()}
    losses[args.loss] = method.criterion
    draw_separation(out, *map(embed, views))
    draw_gradient(args, losses)
    draw_weights(args, losses, z["trained"][:512])
    draw_nearest(out, z["trained"], labels, test)
    if images.classes:
        draw_neighbours(out, z, labels)
        draw_uniformity(out, rows)
        draw_histograms(out, z, labels)
    print(f"{', '.join(name for name in PICTURES if (out / name).exists())} are in {out}/")


def draw_separation(out, one, other):
    """Draw cosines of a view with the other view of its image and with its nearest others. Ref: [4] Fig. 8"""
    lines, ahead = {}, {}
    for name, z in one.items():
        nearest = (z @ z.T).fill_diagonal_(-1).sort(descending=True).values[:, :10]
        cosines = torch.cat([(z * other[name]).sum(1, keepdim=True), nearest], 1).cpu()
        lines[name] = range(cosines.shape[1]), cosines.mean(0)
        ahead[name] = f"{100 * (cosines[:, 0] > cosines[:, 1]).float().mean():.0f} %"
    title = f"{ahead['trained']} of views have their other view nearest (untrained: {ahead['untrained']})"
    caption = f"{len(z)} test images. The step from 0, the other view, to 1, the nearest other image, counts."
    draw(out / "separation.png", title, caption, {"": lines}, xlabel="rank", ylabel="mean cosine")


def draw_gradient(args, losses, n=500, positive=0.7):
    """Draw the force on a negative by its cosine, over the force on the positive. Ref: [4] Fig. 3"""
    lines, share, angles = {}, {}, 2 * math.pi * torch.arange(n) / n
    circle = lambda shift: torch.stack([(angles + shift).cos(), (angles + shift).sin()], 1)     # (n, 2)
    anchors = circle(0.0)  # a batch, as ot needs one, in which all anchors have the same cosines
    for name, criterion in losses.items():
        positives, negatives = (circle(x).requires_grad_() for x in (math.acos(positive), 0.5 * math.pi / n))
        loss = criterion(anchors, positives, negatives=negatives, normalize=False, reduction="none")[0]
        pull, push = torch.autograd.grad(loss, (positives, negatives))
        cosines, order = (negatives @ anchors[0]).detach().sort()
        force = (push @ anchors[0] / (pull[0] @ anchors[0]).abs())[order].nan_to_num()
        lines[name] = cosines, force
        share[name] = f"{100 * force[-n // 10:].sum() / force.clamp_min(0).sum().clamp_min(1e-9):.0f} %"
    title = f"{args.loss}: {share[args.loss]} of the force on the nearest tenth (simclr: {share['simclr']})"
    caption = f"{n} negatives on a circle, a positive at {positive}. A line ends where it pulls negatives."
    draw(args.out / "gradient.png", title, caption, {"": lines}, args.loss, yscale="log",
         ylim=(1e-6, 2), xlabel="cosine of the negative", ylabel="force, over that on the positive")


def draw_weights(args, losses, z):
    """Draw the weight of a candidate by its rank. Ref: [2] Fig. 4"""
    logits, lines = (z @ z.T / args.temperature).fill_diagonal_(-math.inf), {}
    for name, criterion in losses.items():
        options = {option: getattr(args, option) for option in WEIGHT_OPTIONS}
        log_w = hardneg.weigh(criterion.weights, logits, **options)
        by_rank = log_w.gather(1, logits.argsort(descending=True))[:, :-1]
        lines[name] = range(1, len(z)), by_rank.exp().mean(0).cpu()
    weight = lines[args.loss][1]
    title = f"{args.loss} weighs the nearest candidate {weight[0]:.2g}, the farthest {weight[-1]:.2g}"
    caption = "hcl weighs for each anchor alone, ot balances the candidates, hard drops all but the nearest."
    draw(args.out / "weights.png", title, caption, {"": lines}, args.loss, xscale="log",
         xlabel="rank of the candidate", ylabel="mean weight")


def draw_neighbours(out, z, labels):
    """Draw the share of the nearest neighbours that are of the anchor's class. Ref: [2] Fig. 5"""
    lines, ranks, k = {}, torch.arange(1, len(labels)), min(10, len(labels) - 1)
    for name, x in z.items():
        order = (x @ x.T).fill_diagonal_(-math.inf).argsort(descending=True)[:, :-1]
        same = (labels[order] == labels[:, None]).float().mean(0).cpu()
        lines[name] = ranks, 100 * same.cumsum(0) / ranks
    share = lines["trained"][1]
    title = f"{share[k - 1]:.0f} % of the {k} nearest neighbours share the class (chance: {share[-1]:.0f} %)"
    caption = "High on the left: the encoder has found classes, but the nearest negatives are false ones."
    draw(out / "neighbours.png", title, caption, {"": lines}, xscale="log",
         xlabel="number of nearest neighbours", ylabel="% that share the anchor's class")


def draw_nearest(out, z, labels, test, rows=8, columns=8):
    """Draw an image of each class and its nearest test images. Ref: [2] Fig. 2"""
    anchors = torch.stack([(labels == c).nonzero()[0, 0] for c in labels.unique()[:rows]])
    anchors = anchors if len(anchors) > 1 else torch.arange(min(rows, len(z)), device=z.device)  # no classes
    shown = (z[anchors] @ z.T).topk(min(columns + 1, len(z))).indices  # the image itself comes first
    same = labels[shown] == labels[anchors, None]
    faded = 0.7 + 0.3 * test[shown] / 255
    sheet = torch.where(same[..., None, None, None], test[shown] / 255, faded).flatten(0, 1)
    title = f"{same[:, 1:].sum()} of these {same[:, 1:].numel()} neighbours are of the image's class"
    caption = "Left, a test image of each class, then those nearest to it. Pale ones are of another class."
    if len(labels.unique()) == 1:
        title, caption = "The neighbours of some test images", "Left, a test image, then those nearest to it."
    draw(out / "nearest.png", title, caption,
         {"": torchvision.utils.make_grid(sheet, shown.shape[1], pad_value=1.0)})


def draw_uniformity(out, rows):
    """Draw uniformity and tolerance of pixels, untrained and trained encoder. Ref: [4] Eq. 10, 11"""
    points = {name: ([rows[name]["uniformity"]], [rows[name]["tolerance"]]) for name in sorted(rows)[::-1]}
    title = "Training led to uniformity {uniformity:.2f}, tolerance {tolerance:.2f}".format(**rows["trained"])
    caption = "Best is the upper right: embeddings spread over the sphere, but a class stays together."
    draw(out / "uniformity.png", title, caption, {"": points},
         xlim=(0.2, -4.2), ylim=(-0.2, 1.1), xlabel="uniformity (right: even)", ylabel="tolerance")


def draw_histograms(out, z, labels, bins=100):
    """Draw the cosines of pairs of one class and of different classes. Ref: [1] App. B"""
    pairs, x = torch.ones(len(labels), len(labels)).triu(1) > 0, torch.linspace(-1, 1, bins)
    same, panels, overlap = (labels[:, None] == labels).cpu()[pairs], {}, {}
    for name, part in z.items():
        cosines = (part @ part.T).cpu()[pairs].clamp(-1, 1)
        one, two = (c.histc(bins, -1, 1) / len(c) for c in (cosines[same], cosines[~same]))
        panels[f"{name} encoder"] = {"one class": (x, one), "different classes": (x, two)}
        overlap[name] = f"{100 * torch.minimum(one, two).sum():.0f} %"
    title = f"Same and different classes overlap by {overlap['trained']} (untrained: {overlap['untrained']})"
    caption = "On the right, pairs of different classes are hard negatives, pairs of one class false ones."
    draw(out / "histograms.png", title, caption, panels, xlabel="cosine", ylabel="share", xticks=(-1, 0, 1))


if __name__ == "__main__":
    main()
