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
from collections import namedtuple
from pathlib import Path

# Threads that wait for work sleep. If they span, another job beside this one would slow it down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch
from tqdm import tqdm

import hardneg
from training import baselines, compare, flag_of, ranks, report, require, runs, shown, tidy_output
from training.images import KNOWN, TORCHVISION, VIEWS, Images, read

# What a loss or a method needs to learn something in a short run with the recipe adamw. A loss has
# a row if it loses more than a point on the shapes with hardneg's defaults.
SMALL = {"batch_size": 64, "lr": 2e-3}
LOSSES = {
    "simclr": {"temperature": 0.05},
    "hard": {"temperature": 0.07},
    "hcl": {"temperature": 0.3, "beta": 1.0, "tau_plus": 0.1},
    "hard-simple": {"alpha": 0.1, "lead_in": False, "epochs": 28} | SMALL,
    # on the nearest negative alone all embeddings collapse
    "triplet": {"weights": "top", "alpha": 0.1, "margin": 0.5, "epochs": 16} | SMALL,
}
METHODS = {
    "bank": {"momentum": 0.8, "epochs": 24} | SMALL,
    "queue": {"momentum": 0.9, "epochs": 24} | SMALL,
    "diffhard": {"loss": "ppcl", "momentum": 0.99, "epochs": 6} | SMALL,
}
KINDS = {
    "simclr": hardneg.SimCLR,
    "bank": hardneg.Bank,
    "queue": baselines.Queue,
    "clae": baselines.CLAE,
    "diffhard": hardneg.DiffHard,
}
TABLES = hardneg.RECIPES, LOSSES, METHODS  # a later table overrides an earlier one

# The columns of FLAGS are
#     taker    who takes the option: the loss, the method, the images, the training, the run, or the
#              command. What the command takes may change when a run goes on
#     default  None leaves it to TABLES, to the loss, or to the taker
#     kind     a type, or the choices
#     text     the sentence of --help
#     of       the rules, objectives, methods and data sets that use it; empty if all do
#     limits   least and most, as in hardneg.Options
# To add an option, add a row. Options of the loss get theirs from hardneg.Options.
Flag = namedtuple("Flag", "taker default kind text of limits", defaults=("", None))
# Options of the loss. Margins act within a batch, too. A training needs unit rows and a mean.
CRITERION = [x for x in hardneg.DEFAULTS if x not in ("normalize", "reduction", "block_size")]
STEPS = {"uniform", "hardest", "top"}  # rules without a gradient, which t does not change either
TAKEN = {}  # what each rule and each objective takes
for row, (function, _) in (hardneg.WEIGHTS | hardneg.OBJECTIVES).items():
    TAKEN[row] = hardneg.takes(function)
# what the parameters of a rule or an objective do not tell
USERS = {
    "tau_plus": [row for row in TAKEN if "log_negatives" in TAKEN[row]],
    "temperature": [row for row in TAKEN if row not in STEPS and "t" not in TAKEN[row]],
}
USERS["detach_weights"] = hardneg.WEIGHTS.keys() - STEPS


def of_loss(name):
    """Make the flag of an option of the loss from its entry in hardneg.Options."""
    kind = hardneg.ALLOWED[name]
    if isinstance(kind, list):
        kind = type(kind[1])  # int for whole numbers
    elif True in kind:
        kind = bool
    text = " ".join(hardneg.TEXTS[name].split()).split(". ")[0].rstrip(".")
    users = USERS.get(name, [row for row in TAKEN if name in TAKEN[row]])
    return Flag("loss", hardneg.DEFAULTS[name], kind, text, " ".join(users))


FLAGS = {name: of_loss(name) for name in CRITERION}
FLAGS |= {
    "loss": FLAGS["loss"]._replace(default="hcl"),
    "method": Flag(
        "run",
        "simclr",
        KINDS,
        "Negatives are of the batch, of a memory [4], of a queue, attacked, or generated [3]",
    ),
    "momentum": Flag(
        "method", None, float, "How slowly the memory or the slow copy moves", "bank queue diffhard"
    ),
    "queue_size": Flag("method", 64, int, "How many earlier keys it keeps", "queue", [1, 10**9]),
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
    "fraction": Flag("images", 1.0, float, "Share of each class to train on", "", [1e-9, 1.0]),
    "validation": Flag(
        "images",
        False,
        bool,
        "Measure on held-out training images instead of test images, to choose settings",
    ),
    "size": Flag("images", None, int, "Side in pixels (default theirs, up to 96)", "", [8, 1024]),
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
    "micro_batch": Flag("training", None, int, "Views in one pass, to save memory", "", [2, 10**9]),
    "lr": Flag("training", None, float, "Peak learning rate, above 0"),
    "seed": Flag("training", 0, int, "Seed of weights, order and views", "", [0, 10**9]),
    "compile": Flag("command", False, bool, "Compile the encoder, for long runs on a GPU"),
    "device": Flag("command", ranks.DEVICE, str, "cpu, cuda:1, …"),
    "cache": Flag("command", None, Path, "Folder of decoded images (default ~/.cache/hardneg)"),
    "out": Flag("command", None, Path, "Output folder (default runs/DATA-METHOD-LOSS-SEED)"),
    "report": Flag("command", True, bool, "End with pictures, in OUT/report.html"),
    "overwrite": Flag("command", False, bool, "Replace the run in OUT, finished or stopped"),
}
# --help explains these, and --help-all the others, too
FIRST = "loss temperature alpha beta method data epochs out overwrite".split()


def users_of(name):
    """List the losses, rules, objectives, methods and data sets that use an option, if not all."""
    users = set(FLAGS[name].of.split())
    rows = [Options(loss=loss) for loss in hardneg.PRESETS]
    found = [row.loss for row in rows if users & {row.weights, row.objective}]
    for choice in ("weights", "objective"):
        rows = [row for row in hardneg.ALLOWED[choice] if row in users]
        if rows:
            found.append(f"--{choice} {'/'.join(rows)}")
    found += [name for name in [*KINDS, *TORCHVISION] if name in users]
    return ", ".join(found)


class Options(argparse.Namespace):
    """Hold the options of a run. What is not given is what its method, loss and recipe need."""

    def __init__(self, **given):
        given = {name: value for name, value in given.items() if value is not None}
        chosen = {name: flag.default for name, flag in FLAGS.items()} | given
        of_method, of_recipe = METHODS.get(chosen["method"], {}), hardneg.RECIPES[chosen["recipe"]]
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

    def of(self, taker):
        """Return the options that the loss, the method, the images or the training takes."""
        return {name: getattr(self, name) for name, flag in FLAGS.items() if flag.taker == taker}

    def has_effect(self, name):
        """Whether the loss, the method or the data of this run use an option."""
        users = set(FLAGS[name].of.split())
        return not users or bool(users & {self.weights, self.objective, self.method, self.data})

    def criterion(self):
        """Make the loss, by the options that it uses and that differ from hardneg's defaults."""
        weights, objective, _ = hardneg.PRESETS[self.loss]
        usual = hardneg.DEFAULTS | {"loss": "", "weights": weights, "objective": objective}
        given = self.of("loss").items()
        used = {name: x for name, x in given if x != usual[name] and self.has_effect(name)}
        return hardneg.ContrastiveLoss(**used)

    def of_the_run(self):
        """List the options that have to stay the same if the run goes on after a stop."""
        fixed = [name for name in FLAGS if FLAGS[name].taker != "command" and self.has_effect(name)]
        return {name: getattr(self, name) for name in fixed if getattr(self, name) is not None}


def one_of(known, word):
    """Return a choice of the command line, if it is known."""
    if word not in known:
        meant = hardneg.did_you_mean(word, known)
        raise argparse.ArgumentTypeError(f"{word} is not one of {', '.join(known)}{meant}")
    return word


def parse(argv):
    """Parse a command line → the options that it gives, as None where it leaves out a number."""
    hidden = argparse.SUPPRESS
    parser = argparse.ArgumentParser(
        "train.py", hidden, argument_default=hidden, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__.split("\n\nIt prints")[0]
    parser.epilog = "[1] Robinson 2021, [2] Jiang 2023, [3] Wu 2023, [4] Wang & Liu 2021"
    parser.add_argument("--help-all", action="help", help="Explain all options")
    first = parser.add_argument_group("most used")
    either = first.add_mutually_exclusive_group()
    losses = {"type": functools.partial(one_of, hardneg.PRESETS), "nargs": "+", "metavar": "LOSS"}
    either.add_argument("--compare", **losses, help="Train with these losses, and compare them")
    several = "Runs of each loss in --compare (default 3)"
    first.add_argument("--seeds", type=int, nargs="?", const=3, help=several)
    groups = dict.fromkeys(FIRST, first) | {"loss": either}
    for name, flag in FLAGS.items():
        if flag.kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif isinstance(flag.kind, type):
            more = {"type": flag.kind, "metavar": flag.kind.__name__.upper()}
        else:
            more = {"type": functools.partial(one_of, flag.kind), "choices": flag.kind}
        known = [x for x in [f"{flag.default}"] if x not in ("None", "False")]
        for table in TABLES:
            known += [f"{row[name]} for {of}" for of, row in table.items() if name in row]
        if known and flag.kind in (int, float):
            more["nargs"] = "?"  # a flag without a number takes the default
        users = f"; for {users_of(name)}" if flag.of else ""
        default = f" (default {', '.join(known)})" if known else ""
        more["help"] = f"{flag.text}{users}{default}".replace("%", "%%")
        if name not in FIRST and "--help-all" not in argv:
            more["help"] = hidden
        title = f"for the {flag.taker}"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups.get(name, groups[title])
        group.add_argument(flag_of(name), **more)
    found, unknown = parser.parse_known_args(argv)
    flags = ["--compare", "--seeds", "--help-all", *map(flag_of, FLAGS)]
    for word in unknown:
        parser.error(f"there is no {word}{hardneg.did_you_mean(word, flags)}")
    return vars(found)


# ---- One run, from images to a table -----------------------------------------------------------


def run(options, images=None, known=None):
    """Train an encoder, measure it, and save what was found → the content of results.json.
    Several runs may share images, and figures that `report.measure` has found before."""
    images = images or read(options)
    results = runs.finished(options, images)
    if results is not None:
        with runs.readable(options.out / runs.RESULTS):
            report.print_table(results, options)
        print(f"This run was finished before. --overwrite replaces {shown(options.out)}.")
        return results
    encoder, training = build(options, images)
    with runs.alone(options.out):  # from here on there is a folder
        state = runs.restore(training, options, images)
        learn(options, training, state, images)
        if not ranks.is_first():
            return {}
        facts = "loss method data seed epochs device".split()
        results = {name: getattr(options, name) for name in facts}
        results |= {"seconds": round(state["seconds"], 1), "history": state["history"]}
        results |= {"options": options.of_the_run(), "content": state["content"]}
        results |= report.measure(encoder, images, options.encoder, options.seed, known)
        runs.write_results(options.out, results)  # it marks the end of the run
        report.print_table(results, options)
        if options.report:
            report.write_page(options, encoder, images, results)
        print(f"The results are in {shown(options.out)}/.")
        return results


def build(options, images):
    """Make the encoder and its training as the options say."""
    encoder = runs.untrained(options.encoder, images, options.seed)
    if options.compile:
        encoder.compile()
    schedules = {}
    if options.anneal and options.has_effect("anneal"):
        schedules["beta"] = functools.partial(hardneg.annealed_beta, beta=options.beta)
    if options.lead_in and options.has_effect("lead_in"):
        schedules["alpha"] = functools.partial(hardneg.lead_in, alpha=options.alpha)
    method = make_method(options, encoder, images)
    settings = options.of("training") | {"group": torch.distributed.group.WORLD}
    return encoder, hardneg.Training(encoder, images.train, method, schedules=schedules, **settings)


def make_method(options, encoder, images):
    """Make the method of training that the options name."""
    size = images.train.shape[-1]
    views = VIEWS[options.views]
    if size > 64:  # it would hide what small images show
        views = {"blur": 0.5} | views
    kind = KINDS[options.method]
    if options.labels and options.has_effect("labels"):
        kind = baselines.labelled(kind, images.train_labels)
    own = {name: x for name, x in options.of("method").items() if options.has_effect(name)}
    given = [options.criterion()]
    if options.method in ("bank", "queue"):
        given += [encoder, images.train]
    if options.method == "diffhard":
        require(size.bit_count() == 1, "--size", size, "a power of two here, such as 32")
        given.append(hardneg.Game(size, **own))
        own = {}
    return kind(*given, **own, view_options=views)


def learn(options, training, state, images):
    """Train to the end with a progress bar, or a line for each epoch where it is no terminal.
    After each epoch, and each minute, save all that the run needs to go on."""
    n, seen = len(training.images), state["seen"]
    saved = time.perf_counter()
    start = saved - state["seconds"]
    done = training.method.pretrain + training.epoch
    total = training.method.pretrain + training.epochs
    first = n * done + n * training.step_in_epoch // training.steps_per_epoch
    with tqdm(total=n * total, initial=first, unit=" images", mininterval=1, disable=None) as bar:
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
                if bar.disable:
                    print(report.line_of(training, state["history"]), file=sys.stderr, flush=True)
            state |= {"seconds": now - start, "args": options.of_the_run()}
            state["training"] = training.state_dict()
            runs.save_checkpoint(options.out, state)
            saved = time.perf_counter()


# ---- The command -------------------------------------------------------------------------------


def main(argv):
    """Run a command. A user's mistake ends it with one line and exit code 2."""
    tidy_output()
    try:
        with ranks.joined():
            act(parse(argv))
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nStopped. The same command without --overwrite goes on.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os._exit(141)
    except (hardneg.InvalidArgument, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        print(f"{ranks.name()}train.py: error: {shown(error)}", file=sys.stderr)
        sys.exit(2)


def act(given):
    """Check the options of a command, then do what it asks for."""
    several = {"compare", "seeds"} & given.keys()
    losses, seeds = given.pop("compare", [given.get("loss")]), given.pop("seeds", 3)
    rows = [Options(**given | {"loss": loss}) for loss in dict.fromkeys(losses)]
    for name, value in given.items():
        if not any(row.has_effect(name) for row in rows):
            print(f"{flag_of(name, value)} has no effect here. It is for {users_of(name)}.")
    for row in rows:
        check(row)
    if several:
        out = given.get("out", runs.folder_of(rows[0], "compare"))
        compare.compare(compare.plan_of(rows, seeds, out), run, out)
    else:
        run(rows[0])


def check(options):
    """Find mistakes in the options before anything slow, by building the run for four images."""
    try:
        torch.zeros(1, device=options.device).item()
    except (RuntimeError, AssertionError):
        require(False, "--device", options.device, "one that this machine has, such as cpu")
    for name, flag in FLAGS.items():
        value = getattr(options, name)
        if flag.limits and value is not None:
            hardneg._check(flag_of(name), value, flag.limits)
    side = options.size or 32
    few = torch.zeros(4 * ranks.COUNT, 3, side, side, dtype=torch.uint8)
    baselines.say_no_effect(options)
    build(options.but(compile=False, queue_size=1, labels=False), Images(few, few, few, few, []))


if __name__ == "__main__":
    main(sys.argv[1:])
