"""Train an encoder without labels and measure what it has learned:
python train.py --loss hard --alpha 0.3

It prints how well pixels and encoders tell the classes apart, and writes report.html, results.json
and checkpoint.pt. From Python: train.run(train.Options(loss="hard", alpha=0.3)). Begin at `run`.
"""

import argparse
import functools
import os
import sys
import time
import warnings
from collections import namedtuple
from pathlib import Path

# threads that wait for work sleep: beside another job, spinning would cost most of the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch
from tqdm import tqdm

import hardneg
from training import baselines, compare, flag_of, report, require, runs
from training.images import KNOWN, VIEWS, Images, read

# What a loss or a method needs to learn something in a short run with the recipe adamw. A loss has
# a row where hardneg's defaults lose more than a point on the shapes.
SMALL = {"batch_size": 64, "lr": 2e-3}
LOSSES = {"simclr": {"temperature": 0.05}, "hard": {"temperature": 0.07}}
LOSSES["hcl"] = {"temperature": 0.3, "beta": 1.0, "tau_plus": 0.1}
LOSSES["hard-simple"] = {"alpha": 0.1, "lead_in": False, "epochs": 28} | SMALL
# on the nearest negative alone all embeddings collapse
LOSSES["triplet"] = {"weights": "top", "alpha": 0.1, "margin": 0.5, "epochs": 16} | SMALL
METHODS = {"simclr": {}, "bank": {"momentum": 0.8, "epochs": 24} | SMALL}
METHODS |= {"queue": {"momentum": 0.9, "epochs": 24} | SMALL, "clae": {}}
METHODS["diffhard"] = {"loss": "ppcl", "momentum": 0.99, "epochs": 6} | SMALL
TABLES = hardneg.RECIPES, LOSSES, METHODS  # later ones win
BEST = hardneg.DEFAULTS
LOGITS = "nce each ppcl decoupled"

# Who takes an option; its default, None if TABLES, the loss or its taker fills it in; its type or
# choices; what it is; what looks at it, if not all; its limits. To add an option, add a row.
Flag = namedtuple("Flag", "taker default kind text of limits", defaults=("", ()))
FLAGS = {
    "loss": Flag("loss", "hcl", hardneg.PRESETS, "weights and objective"),
    "weights": Flag("loss", None, hardneg.WEIGHTS, "of negatives, if not the loss's"),
    "objective": Flag("loss", None, hardneg.OBJECTIVES, "of the loss, if not the loss's"),
    "temperature": Flag("loss", BEST["temperature"], float, "divides cosines", f"tilted {LOGITS}"),
    "tau_plus": Flag("loss", None, float, "share of false negatives [1]", LOGITS),
    "detach_weights": Flag("loss", None, bool, "no gradient through weights", "tilted transported"),
    "beta": Flag("loss", BEST["beta"], float, "concentration on near negatives [1]", "tilted"),
    "epsilon": Flag("loss", BEST["epsilon"], float, "regularisation, in costs [2]", "transported"),
    "cost": Flag("loss", "sqeuclidean", ("sqeuclidean", "exp"), "of the coupling", "transported"),
    "alpha": Flag("loss", BEST["alpha"], float, "share of nearest kept [4]", "top"),
    "margin": Flag("loss", 0.0, float, "a squared distance, at least 0", "triplet"),
    "method": Flag("run", "simclr", METHODS, "where candidates come from; bank [4], diffhard [3]"),
    "momentum": Flag("method", None, float, "of the bank or the slow copy", "bank queue diffhard"),
    "queue_size": Flag("method", 64, int, "earlier keys that are candidates", "queue", (1, 1e9)),
    "bound": Flag("method", 0.005, float, "largest change of a pixel", "clae"),
    "pairs": Flag("method", True, bool, "two images of a latent are positives", "diffhard"),
    "ascent": Flag("method", True, bool, "the generator ascends the loss", "diffhard"),
    "pretrain": Flag("method", 2, int, "epochs of the generator at first", "diffhard"),
    "every": Flag("method", 8, int, "steps of the encoder for one of the generator", "diffhard"),
    "width": Flag("method", 8, int, "channels of the generator; more on a GPU", "diffhard"),
    "latent": Flag("method", 64, int, "dimensions of a latent", "diffhard"),
    "data": Flag("images", "shapes", str, f"{KNOWN} of images"),
    "root": Flag("free", "data", str, "folder of torchvision's sets, which are downloaded to it"),
    "fraction": Flag("images", 1.0, float, "share of each class to train on", "", (1e-9, 1)),
    "validation": Flag("images", False, bool, "to choose settings, test on training images"),
    "size": Flag("images", None, int, "side in pixels; else their own, up to 96", "", (8, 1024)),
    "encoder": Flag("run", "small", ("small", "resnet18", "resnet50"), "the network"),
    "views": Flag("run", "default", VIEWS, "random changes; small [1], coloured [4]"),
    "anneal": Flag("run", False, bool, "lower beta to a fifth in five steps", "tilted"),
    "lead_in": Flag("run", True, bool, "lower the share from 1 to alpha at first", "top"),
    "recipe": Flag("training", "adamw", hardneg.RECIPES, "optimizer and rates; sgd [4], adam [1]"),
    "epochs": Flag("training", None, int, "passes over the images"),
    "batch_size": Flag("training", None, int, "images in a batch, at most"),
    "micro_batch": Flag("training", None, int, "views in one pass, to save memory", "", (2, 1e9)),
    "lr": Flag("training", None, float, "peak learning rate, above 0"),
    "seed": Flag("training", 0, int, "of weights, order and views", "", (0, 1e9)),
    "compile": Flag("free", False, bool, "compile the encoder, for a GPU; the start is slow"),
    "device": Flag("free", "cuda" if torch.cuda.is_available() else "cpu", str, "cpu, cuda:1, …"),
    "out": Flag("free", None, Path, "output folder; if not given runs/DATA-METHOD-LOSS-SEED"),
    "report": Flag("free", True, bool, "end with pictures of what was learned, in OUT/report.html"),
    "overwrite": Flag("free", False, bool, "replace the run in OUT, finished or stopped"),
}
CRITERION = [name for name, flag in FLAGS.items() if flag.taker == "loss"]
FACTS = "loss method data seed epochs device".split()  # of results.json
BRIEF = "loss temperature alpha beta method data encoder epochs batch_size out overwrite".split()


class Options(argparse.Namespace):
    """Hold the options of a run: what is given, else what its method, loss and recipe need."""

    def __init__(self, **given):
        given = {name: value for name, value in given.items() if value is not None}
        chosen = {name: flag.default for name, flag in FLAGS.items()} | given
        of_method, of_recipe = METHODS[chosen["method"]], hardneg.RECIPES[chosen["recipe"]]
        loss = (chosen | of_method | given)["loss"]
        chosen["weights"], chosen["objective"], _ = hardneg.PRESETS[loss]
        chosen |= of_recipe | LOSSES.get(loss, {}) | of_method
        if chosen["recipe"] != "adamw":  # the tables suit adamw
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
        """Whether the loss and the method of this run look at an option."""
        looking = FLAGS[name].of.split()
        return not looking or not {self.weights, self.objective, self.method}.isdisjoint(looking)

    def of_the_run(self) -> dict:
        """List what makes a run what it is: this has to stay when the run goes on."""
        fixed = [name for name in FLAGS if FLAGS[name].taker != "free" and self.has_effect(name)]
        return {name: getattr(self, name) for name in fixed if getattr(self, name) is not None}


def parse(argv: list[str]) -> dict:
    """Parse a command line → the options that it gives."""
    parser = argparse.ArgumentParser("train.py", argparse.SUPPRESS, allow_abbrev=False)  # no usage
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "[1] Robinson 2021, [2] Jiang 2023, [3] Wu 2023, [4] Wang & Liu 2021"
    parser.add_argument("--help-all", action="help", help="explain all flags")
    losses = {"choices": hardneg.PRESETS, "metavar": "LOSS"}
    parser.add_argument("--compare", nargs="+", **losses, help="train with each, and compare")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each loss (3)")
    for name, flag in FLAGS.items():
        more = {"type": flag.kind, "metavar": getattr(flag.kind, "__name__", "").upper()}
        if flag.kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif not isinstance(flag.kind, type):
            more = {"choices": flag.kind}
        if name == "alpha":
            more |= {"nargs": "?"}  # without a number: the default
        known = [] if flag.default is None else [f"{flag.default}"]
        for table in TABLES:
            known += [f"{row[name]} for {of}" for of, row in table.items() if name in row]
        looking = f"{', '.join(flag.of.split())}: " if flag.of else ""
        more["help"] = f"{looking}{flag.text} ({', '.join(known) or None})".replace("%", "%%")
        if name not in BRIEF and "--help-all" not in argv:
            more["help"] = argparse.SUPPRESS
        parser.add_argument(flag_of(name), default=None, **more)
    return {name: x for name, x in vars(parser.parse_args(argv)).items() if x is not None}


# ---- One run, from images to a table -----------------------------------------------------------


def run(options: Options, images: Images | None = None, known: dict | None = None) -> dict:
    """Train an encoder, measure it, save what was found → the content of results.json.
    Several runs may share images, and the figures that `report.measure` knows."""
    with runs.alone(options.out):
        results = runs.finished(options)
        if results is not None:
            report.print_table(results)
            print(f"finished before, in {options.out}; --overwrite replaces it")
            return results
        images = images or read(options)
        settings = options.of_the_run()
        print(", ".join(f"{name} {settings[name]}" for name in CRITERION if name in settings))
        encoder, training = build(options, images)
        state = runs.restore(training, options)
        learn(options, training, state, images)
        results = {name: getattr(options, name) for name in FACTS}
        results |= {"seconds": round(state["seconds"], 1), "options": settings}
        results["history"] = state["history"]
        results |= report.measure(encoder, images, options.encoder, options.seed, known)
        report.print_table(results)
        if options.report:
            report.write_page(options, encoder, images, results)
        results["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__}
        runs.write_json(options.out / runs.RESULTS, results)  # last: the run is at its end
        print(f"saved in {options.out}/")
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
    settings = options.of("training")
    training = hardneg.Training(encoder, images.train, method, schedules=schedules, **settings)
    return encoder, training


def make_method(options: Options, criterion, encoder, images: Images) -> hardneg.SimCLR:
    """Make the method of training that the options name."""
    size = images.train.shape[-1]
    blurred = {"blur": 0.5} if size > 64 else {}  # blur hides what small images show
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
            seen.append(figures)
            shown = bar.update(figures["images"])  # at most once a second
            if shown and "loss" in figures:  # to read it, the host waits for the device
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
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    try:
        act(parse(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on, without --overwrite.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os._exit(141)
    except (hardneg.InvalidArgument, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)


def act(given: dict) -> None:
    """Check the options of a command, then do what it asks for."""
    several, both = {"compare", "seeds"} & given.keys(), {"compare", "loss"} <= given.keys()
    require(not both, "--loss", given.get("loss"), "left out with --compare")
    losses, seeds = given.pop("compare", [given.get("loss")]), given.pop("seeds", 3)
    rows = [Options(**given | {"loss": loss}) for loss in dict.fromkeys(losses)]
    for name, value in given.items():
        if not any(row.has_effect(name) for row in rows):
            print(f"{flag_of(name, value)} has no effect here")
    for row in rows:
        check(row)
    if several:
        out = given.get("out", runs.folder_of(rows[0], "compare"))
        compare.compare(compare.plan_of(rows, seeds, out), run, out)
    else:
        run(rows[0])


def check(options: Options) -> None:
    """Find mistakes in the options before anything slow: build the run for four images."""
    try:
        torch.zeros(1, device=options.device).item()
    except (RuntimeError, AssertionError):
        require(False, "--device", options.device, "one that this machine has, such as cpu")
    for name in [name for name, flag in FLAGS.items() if flag.limits]:
        value, (least, most) = getattr(options, name), FLAGS[name].limits
        fits = value is None or least <= value <= most
        require(fits, flag_of(name), value, f"from {least:g} to {most:g}")
    few = torch.zeros(4, 3, options.size or 32, options.size or 32, dtype=torch.uint8)
    build(options.but(compile=False, queue_size=1), Images(few, None, few, None, []))


if __name__ == "__main__":
    main()
