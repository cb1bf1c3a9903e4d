"""Train an encoder without labels, and measure what it has learned.

python train.py --loss hard --alpha 0.3
python train.py --compare simclr hcl hard --seeds 3
torchrun --nproc-per-node 2 train.py --data FOLDER        in two processes

It prints how well raw pixels, an untrained and the trained encoder tell the classes apart. It
writes report.html, results.json and checkpoint.pt. From Python you can call
train.run(train.Options(loss="hard", alpha=0.3)). To read this file, begin at `run`.
"""

import argparse
import functools
import os
import sys
import time
import warnings
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

# Threads that wait for work sleep. If they span, another job beside this one would slow it down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch
from tqdm import tqdm

import hardneg
from training import baselines, compare, flag_of, ranks, report, require, runs, shown
from training.images import KNOWN, TORCHVISION, VIEWS, Images, read

# What a loss or a method needs to learn something in a short run with the recipe adamw. A loss has
# a row if it loses more than a point on the shapes with hardneg's defaults.
SMALL = {"batch_size": 64, "lr": 2e-3}
LOSSES = {"simclr": {"temperature": 0.05}, "hard": {"temperature": 0.07}}
LOSSES["hcl"] = {"temperature": 0.3, "beta": 1.0, "tau_plus": 0.1}
LOSSES["hard-simple"] = {"alpha": 0.1, "lead_in": False, "epochs": 28} | SMALL
# on the nearest negative alone all embeddings collapse
LOSSES["triplet"] = {"weights": "top", "alpha": 0.1, "margin": 0.5, "epochs": 16} | SMALL
METHODS = {"simclr": {}, "bank": {"momentum": 0.8, "epochs": 24} | SMALL}
METHODS |= {"queue": {"momentum": 0.9, "epochs": 24} | SMALL, "clae": {}}
METHODS["diffhard"] = {"loss": "ppcl", "momentum": 0.99, "epochs": 6} | SMALL
TABLES = hardneg.RECIPES, LOSSES, METHODS  # a later table overrides an earlier one

# The columns of FLAGS are
#     taker    who takes the option: the loss, the method, the images, the training, the run, or the
#              command. What the command takes may change when a run goes on
#     default  None leaves it to TABLES, to the loss, or to the taker
#     kind     a type, or the choices
#     text     the sentence of --help
#     of       the rules, objectives, methods and data sets that use it; empty if all do
#     limits   least and most
# To add an option, add a row. Options of the loss get theirs from hardneg.Options.
Flag = namedtuple("Flag", "taker default kind text of limits", defaults=("", ()))
CRITERION = """
loss weights objective temperature tau_plus detach_weights beta alpha epsilon cost margin
""".split()
ROWS = hardneg.WEIGHTS | hardneg.OBJECTIVES
DEBIASED = [x for x in ROWS if "log_negatives" in hardneg.takes(ROWS[x][0])]
# what the parameters of a rule or an objective do not tell
USERS = {"temperature": ["tilted", *DEBIASED], "tau_plus": DEBIASED}
USERS["detach_weights"] = ["tilted", "transported"]  # weights of others have no gradient


def of_loss(name: str) -> Flag:
    """Make the flag of an option of the loss from its entry in hardneg.Options."""
    kind = hardneg.ALLOWED[name]
    if isinstance(kind, list):
        kind = float
    elif True in kind:
        kind = bool
    text = " ".join(hardneg.TEXTS[name].split()).split(". ")[0].rstrip(".")
    users = USERS.get(name, [x for x in ROWS if name in hardneg.takes(ROWS[x][0])])
    return Flag("loss", hardneg.DEFAULTS[name], kind, text, " ".join(users))


FLAGS = {name: of_loss(name) for name in CRITERION}
FLAGS["loss"] = FLAGS["loss"]._replace(default="hcl")
FLAGS |= {
    "method": Flag(
        "run",
        "simclr",
        METHODS,
        "Where negatives come from: the batch, a memory of all images [4], a queue of earlier "
        "batches, an attack (clae), or a generator (diffhard [3])",
    ),
    "momentum": Flag(
        "method", None, float, "How slowly the memory or the slow copy moves", "bank queue diffhard"
    ),
    "queue_size": Flag("method", 64, int, "How many earlier keys it keeps", "queue", (1, 1e9)),
    "bound": Flag("method", 0.005, float, "Largest change of a pixel by the attack", "clae"),
    "pairs": Flag("method", True, bool, "Make two images of a latent positives", "diffhard"),
    "ascent": Flag("method", True, bool, "Let the generator ascend the loss", "diffhard"),
    "pretrain": Flag("method", 2, int, "Epochs of the generator alone at first", "diffhard"),
    "every": Flag("method", 8, int, "Steps of the encoder for one of the generator", "diffhard"),
    "width": Flag("method", 8, int, "Channels of the generator; try more on a GPU", "diffhard"),
    "latent": Flag("method", 64, int, "Dimensions of a latent", "diffhard"),
    "data": Flag("images", "shapes", str, f"Images: {KNOWN}"),
    "root": Flag(
        "command", "data", str, "Folder to which torchvision downloads", " ".join(TORCHVISION)
    ),
    "fraction": Flag("images", 1.0, float, "Share of each class to train on", "", (1e-9, 1)),
    "validation": Flag(
        "images",
        False,
        bool,
        "Measure on held-out training images instead of test images, to choose settings",
    ),
    "size": Flag("images", None, int, "Side in pixels (default theirs, up to 96)", "", (8, 1024)),
    "encoder": Flag("run", "small", ("small", "resnet18", "resnet50"), "The network"),
    "views": Flag("run", "default", VIEWS, "Random changes of an image; small [1], coloured [4]"),
    "labels": Flag(
        "run", None, bool, "Give the loss the classes of the images", "simclr bank clae"
    ),
    "anneal": Flag("run", False, bool, "Lower beta to a fifth in five steps", "tilted"),
    "lead_in": Flag("run", True, bool, "Lower the share to keep from 1 to alpha at first", "top"),
    "recipe": Flag("training", "adamw", hardneg.RECIPES, "Optimizer and rates; sgd [4], adam [1]"),
    "epochs": Flag("training", None, int, "Passes over the images"),
    "batch_size": Flag("training", None, int, "Images in a batch, at most"),
    "micro_batch": Flag("training", None, int, "Views in one pass, to save memory", "", (2, 1e9)),
    "lr": Flag("training", None, float, "Peak learning rate, above 0"),
    "seed": Flag("training", 0, int, "Seed of weights, order and views", "", (0, 1e9)),
    "compile": Flag("command", False, bool, "Compile the encoder, for long runs on a GPU"),
    "device": Flag("command", ranks.DEVICE, str, "cpu, cuda:1, …"),
    "cache": Flag("command", None, Path, "Folder of decoded images (default ~/.cache/hardneg)"),
    "out": Flag("command", None, Path, "Output folder (default runs/DATA-METHOD-LOSS-SEED)"),
    "report": Flag("command", True, bool, "End with pictures, in OUT/report.html"),
    "overwrite": Flag("command", False, bool, "Replace the run in OUT, finished or stopped"),
}
FACTS = "loss method data seed epochs device".split()  # of results.json
# --help explains these, and --help-all the others, too
FIRST = "loss temperature alpha beta method data epochs out overwrite".split()


def users_of(name: str) -> str:
    """List the losses, methods and data sets that use an option, or nothing if all do."""
    users = FLAGS[name].of.split()
    found = []
    for loss, row in hardneg.PRESETS.items():
        own = LOSSES.get(loss, {}).get("weights")  # in place of those of the preset
        if {own, row[0], row[1]} & set(users):
            found.append(loss)
    found += [name for name in [*METHODS, *TORCHVISION] if name in users]
    return ", ".join(found)


class Options(argparse.Namespace):
    """Hold the options of a run. What is not given is what its method, loss and recipe need."""

    def __init__(self, **given):
        given = {name: value for name, value in given.items() if value is not None}
        chosen = {name: flag.default for name, flag in FLAGS.items()} | given
        of_method, of_recipe = METHODS[chosen["method"]], hardneg.RECIPES[chosen["recipe"]]
        loss = (chosen | of_method | given)["loss"]
        chosen["weights"], chosen["objective"], _ = hardneg.PRESETS[loss]
        chosen |= of_recipe | LOSSES.get(loss, {}) | of_method
        if chosen["recipe"] != "adamw":  # the other tables were made for adamw
            chosen |= of_recipe
        super().__init__(**chosen | given)
        self.out = Path(self.out or runs.folder_of(self, f"{loss}-{self.seed}"))

    def but(self, **changes):
        """Return these options with some changed."""
        return Options(**vars(self) | changes)

    def of(self, taker: str) -> dict:
        """Return the options that the loss, the method, the images or the training takes."""
        return {name: getattr(self, name) for name, flag in FLAGS.items() if flag.taker == taker}

    def has_effect(self, name: str) -> bool:
        """Whether the loss, the method or the data of this run use an option."""
        users = FLAGS[name].of.split()
        chosen = {self.weights, self.objective, self.method, self.data}
        return not users or not chosen.isdisjoint(users)

    def of_the_run(self) -> dict:
        """List the options that have to stay the same if the run goes on after a stop."""
        fixed = [name for name in FLAGS if FLAGS[name].taker != "command" and self.has_effect(name)]
        return {name: getattr(self, name) for name in fixed if getattr(self, name) is not None}


def one_of(known: Iterable[str], word: str) -> str:
    """Return a choice of the command line, if it is known."""
    if word not in known:
        meant = hardneg.did_you_mean(word, known)
        raise argparse.ArgumentTypeError(f"{word} is not one of {', '.join(known)}{meant}")
    return word


def parse(argv: list[str]) -> dict:
    """Parse a command line → the options that it gives."""
    parser = argparse.ArgumentParser("train.py", argparse.SUPPRESS, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__.split("\n\nIt prints")[0]
    parser.epilog = "[1] Robinson 2021, [2] Jiang 2023, [3] Wu 2023, [4] Wang & Liu 2021"
    parser.add_argument("--help-all", action="help", help="Explain all options")
    first = parser.add_argument_group("most used")
    either = first.add_mutually_exclusive_group()
    losses = {"type": functools.partial(one_of, hardneg.PRESETS), "nargs": "+", "metavar": "LOSS"}
    either.add_argument("--compare", **losses, help="Train with these losses, and compare them")
    first.add_argument("--seeds", type=int, help="Runs of each loss in --compare (default 3)")
    groups = dict.fromkeys(FIRST, first) | {"loss": either}
    for name, flag in FLAGS.items():
        if flag.kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif isinstance(flag.kind, type):
            more = {"type": flag.kind, "metavar": flag.kind.__name__.upper()}
        else:
            more = {"type": functools.partial(one_of, flag.kind), "choices": flag.kind}
        known = [] if flag.default in (None, False) else [f"{flag.default}"]
        for table in TABLES:
            known += [f"{row[name]} for {of}" for of, row in table.items() if name in row]
        users = f"; used by {users_of(name)}" if flag.of else ""
        default = f" (default {', '.join(known)})" if known else ""
        more["help"] = f"{flag.text}{users}{default}".replace("%", "%%")
        if name not in FIRST and "--help-all" not in argv:
            more["help"] = argparse.SUPPRESS
        title = f"for the {flag.taker}"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups.get(name, groups[title])
        group.add_argument(flag_of(name), default=None, **more)
    found, unknown = parser.parse_known_args(argv)
    flags = ["--compare", "--seeds", "--help-all", *map(flag_of, FLAGS)]
    for word in unknown:
        parser.error(f"there is no {word}{hardneg.did_you_mean(word, flags)}")
    return {name: x for name, x in vars(found).items() if x is not None}


# ---- One run, from images to a table -----------------------------------------------------------


def run(options: Options, images: Images | None = None, known: dict | None = None) -> dict:
    """Train an encoder, measure it, and save what was found → the content of results.json.
    Several runs may share images, and figures that `report.measure` has found before."""
    results = runs.finished(options)
    if results is not None:
        report.print_table(results)
        print(f"This run was finished before. --overwrite replaces {shown(options.out)}.")
        return results
    images = images or read(options)
    settings = options.of_the_run()
    print(", ".join(f"{name} {settings[name]}" for name in CRITERION if name in settings))
    encoder, training = build(options, images)
    with runs.alone(options.out):  # from here on there is a folder
        state = runs.restore(training, options, images)
        learn(options, training, state, images)
        if not ranks.is_first():
            return {}
        results = {name: getattr(options, name) for name in FACTS}
        seconds = round(state["seconds"], 1)
        results |= {"seconds": seconds, "options": settings, "history": state["history"]}
        results |= report.measure(encoder, images, options.encoder, options.seed, known)
        runs.write_results(options.out, results)  # it marks the end of the run
        report.print_table(results)
        if options.report:
            report.write_page(options, encoder, images, results)
        print(f"The results are in {shown(options.out)}/.")
        return results


def build(options: Options, images: Images) -> tuple:
    """Make the encoder and its training as the options say."""
    criterion = hardneg.ContrastiveLoss(**options.of("loss"))
    encoder = runs.untrained(options.encoder, images, options.seed)
    if options.compile:
        encoder.compile()
    schedules = {}
    if options.anneal and options.weights == "tilted":
        schedules["beta"] = functools.partial(hardneg.annealed_beta, beta=options.beta)
    if options.lead_in and options.weights == "top":
        schedules["alpha"] = functools.partial(hardneg.lead_in, alpha=options.alpha)
    method = make_method(options, criterion, encoder, images)
    settings = options.of("training") | {"group": torch.distributed.group.WORLD}
    if options.labels and options.has_effect("labels"):
        baselines.give_labels(method, images.train_labels)
    return encoder, hardneg.Training(encoder, images.train, method, schedules=schedules, **settings)


def make_method(options: Options, criterion, encoder, images: Images) -> hardneg.SimCLR:
    """Make the method of training that the options name."""
    size = images.train.shape[-1]
    blurred = {"blur": 0.5} if size > 64 else {}  # it would hide what small images show
    views = {"view_options": blurred | VIEWS[options.views]}
    own = {name: x for name, x in options.of("method").items() if options.has_effect(name)}
    if options.method == "bank":
        return hardneg.Bank(criterion, encoder, images.train, **own, **views)
    if options.method == "queue":
        return baselines.Queue(criterion, encoder, images.train, **own, **views)
    if options.method == "clae":
        return baselines.CLAE(criterion, **own, **views)
    if options.method == "diffhard":
        return hardneg.DiffHard(criterion, hardneg.Game(size, **own), **views)
    return hardneg.SimCLR(criterion, **views)


def learn(options: Options, training: hardneg.Training, state: dict, images: Images) -> None:
    """Train to the end with a progress bar.
    After each epoch, and each minute, save all that the run needs to go on."""
    n, seen = len(training.images), state["seen"]
    saved = time.perf_counter()
    start = saved - state["seconds"]
    done = training.method.pretrain + training.epoch
    total = training.method.pretrain + training.epochs
    first = n * done + n * training.step_in_epoch // training.steps_per_epoch
    with tqdm(total=n * total, initial=first, unit=" images", mininterval=1) as bar:
        for figures in training:
            if not ranks.is_first():
                continue
            seen.append(figures)
            shown = bar.update(figures["images"])  # at most once a second
            if shown and "loss" in figures:  # seldom, as reading it waits for the device
                bar.set_postfix_str(f"loss {float(figures['loss']):.3f}")
            now = time.perf_counter()
            if training.step_in_epoch > 0 and now - saved < 60:
                continue
            report.keep_figures(seen)
            if training.step_in_epoch == 0:
                state["history"].append(report.summary(training, seen, images))
                seen.clear()
            state["seconds"] = now - start
            state |= {"args": options.of_the_run(), "training": training.state_dict()}
            runs.save_checkpoint(options.out, state)
            saved = time.perf_counter()


# ---- The command -------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Run a command. A user's mistake ends it with one line and exit code 2."""
    warnings.formatwarning = lambda message, *_, **__: f"{shown(message)}\n"
    try:
        with ranks.joined():
            act(parse(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nStopped. The same command without --overwrite goes on.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os._exit(141)
    except (hardneg.InvalidArgument, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        if ranks.is_first():
            print(f"train.py: error: {shown(error)}", file=sys.stderr)
        sys.exit(2)


def act(given: dict) -> None:
    """Check the options of a command, then do what it asks for."""
    several = {"compare", "seeds"} & given.keys()
    losses, seeds = given.pop("compare", [given.get("loss")]), given.pop("seeds", 3)
    rows = [Options(**given | {"loss": loss}) for loss in dict.fromkeys(losses)]
    for name, value in given.items():
        if not any(row.has_effect(name) for row in rows):
            losses = ", ".join(row.loss for row in rows)
            chosen = f"--data {shown(rows[0].data)}, --method {rows[0].method} and --loss {losses}"
            flag = flag_of(name, value)
            print(f"{flag} has no effect with {chosen}. It is for {users_of(name)}.")
    for row in rows:
        check(row)
    if several:
        out = given.get("out", runs.folder_of(rows[0], "compare"))
        compare.compare(compare.plan_of(rows, seeds, out), run, out)
    else:
        run(rows[0])


def check(options: Options) -> None:
    """Find mistakes in the options before anything slow, by building the run for four images."""
    try:
        torch.zeros(1, device=options.device).item()
    except (RuntimeError, AssertionError):
        require(False, "--device", options.device, "one that this machine has, such as cpu")
    for name, flag in FLAGS.items():
        value = getattr(options, name)
        if flag.limits and value is not None:
            least, most = flag.limits
            require(least <= value <= most, flag_of(name), value, f"from {least:g} to {most:g}")
    side = options.size or 32
    few = torch.zeros(4 * ranks.COUNT, 3, side, side, dtype=torch.uint8)
    baselines.say_no_effect(options)
    build(options.but(compile=False, queue_size=1, labels=False), Images(few, few, few, few, []))


if __name__ == "__main__":
    main()
