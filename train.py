"""Train an encoder without labels and measure what it has learned:
python train.py --loss hard --alpha 0.3

It prints how well pixels and encoders tell the classes apart, and writes report.html, results.json
and checkpoint.pt. From Python: train.run(train.Options(loss="hard", alpha=0.3)). Begin at `run`.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

# threads that wait for work sleep: beside another job, spinning would cost most of the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch
from tqdm import tqdm

import hardneg
from training import baselines, compare, flag_of, report, require, runs
from training.images import TORCHVISION, Images, read, shapes

# ---- Options -----------------------------------------------------------------------------------

# What a loss or a method needs to learn something in a short run with the recipe adamw. A loss has
# a row where hardneg's defaults lose more than a point on the shapes.
SMALL = {"batch_size": 64, "lr": 2e-3}
LOSSES = {"simclr": {"temperature": 0.05}, "hard": {"temperature": 0.07}}
LOSSES["hcl"] = {"temperature": 0.3, "beta": 1.0, "tau_plus": 0.1}
LOSSES["hard-simple"] = {"alpha": 0.1, "lead_in": False, "epochs": 28} | SMALL
# on the nearest negative alone all embeddings collapse
LOSSES["triplet"] = {"weights": "top", "alpha": 0.1, "margin": 0.5, "epochs": 16} | SMALL
METHODS = {"simclr": {}, "bank": {"momentum": 0.8, "epochs": 24} | SMALL}
METHODS["queue"] = {"momentum": 0.9, "queue_size": 64, "epochs": 24} | SMALL
METHODS["clae"] = {"bound": 0.005}
METHODS["diffhard"] = dict(loss="ppcl", pairs=True, ascent=True, momentum=0.99, pretrain=2)
METHODS["diffhard"] |= dict(every=8, width=8, latent=64, epochs=6) | SMALL
TABLES = hardneg.RECIPES, LOSSES, METHODS  # later ones win
BEST, OF_LOGITS = hardneg.DEFAULTS, ", ".join(hardneg.OF_LOGITS)
# what hardneg.view does beside its defaults: as the code of [1] does, as [4] says
VIEWS = {"default": {}, "small": {"area": (0.08, 1.0), "blur": 0.5}}
VIEWS["coloured"] = {"jitter": 1.0, "hue": 0.4}
# Name: type or choices, default, what it is. None is filled in: by TABLES, by the loss, by itself.
# Before a colon: the weights and objectives that look at an option; without one, all do.
# To add an option: a line here, and a use of it below.
FLAGS = {
    "loss": (hardneg.PRESETS, "hcl", "weights and objective"),
    "weights": (hardneg.WEIGHTS, None, "of negatives, if not the loss's"),
    "objective": (hardneg.OBJECTIVES, None, "of the loss, if not the loss's"),
    "temperature": (float, BEST["temperature"], f"tilted, {OF_LOGITS}: divides cosines"),
    "tau_plus": (float, None, f"{OF_LOGITS}: share of false negatives [1]"),
    "detach_weights": (bool, None, "tilted, transported: no gradient through weights"),
    "debias": (("published", "exact"), "published", f"{OF_LOGITS}: estimate of debiasing"),
    "beta": (float, BEST["beta"], "tilted: concentration on near negatives [1]"),
    "anneal": (bool, False, "tilted: lower beta to a fifth in five steps over the run"),
    "epsilon": (float, BEST["epsilon"], "transported: regularisation, in units of the cost [2]"),
    "cost": (("sqeuclidean", "exp"), "sqeuclidean", "transported: of the coupling"),
    "kappa": (float, 0.0, "transported: κ of the cost exp"),
    "alpha": (float, BEST["alpha"], "top: share of nearest kept [4]"),
    "lead_in": (bool, True, "top: lower the share from 1 to alpha at first"),
    "margin": (float, 0.0, "triplet: a squared distance, at least 0"),
    "method": (METHODS, "simclr", "candidates of a batch, or bank [4], queue, clae, diffhard [3]"),
    "data": (str, "shapes", f"shapes, {', '.join(TORCHVISION)}, or a folder of images"),
    "root": (str, "data", "folder of torchvision's sets, which are downloaded to it"),
    "fraction": (float, 1.0, "share of each class to train on, in (0, 1]"),
    "validation": (bool, False, "test on every fifth training image, to choose settings"),
    "size": (int, None, "side in pixels; if not given the images', in a folder at most 96"),
    "encoder": (("small", "resnet18", "resnet50"), "small", "the network"),
    "recipe": (hardneg.RECIPES, "adamw", "optimizer and rates; sgd [4], adam [1]"),
    "views": (VIEWS, "default", "random changes; small [1], coloured [4]"),
    "epochs": (int, None, "passes over the images"),
    "batch_size": (int, None, "images in a batch, at most"),
    "micro_batch": (int, None, "views in one pass, to save memory"),
    "lr": (float, None, "peak learning rate, above 0"),
    "compile": (bool, False, "compile the encoder, for a GPU; the start is slow"),
    "seed": (int, 0, "of weights, order and views"),
    "device": (str, "cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda or cuda:1"),
    "out": (Path, None, "output folder; if not given runs/DATA-METHOD-LOSS-SEED"),
    "report": (bool, True, "end with pictures of what was learned, in OUT/report.html"),
    "overwrite": (bool, False, "replace the run in OUT, finished or stopped"),
}
OF_METHODS = {k: type(x) for row in METHODS.values() for k, x in row.items() if k not in FLAGS}
FLAGS |= {k: (kind, None, "of the method, as its class says") for k, kind in OF_METHODS.items()}
LOOK = {name: text.split(": ")[0].split(", ") for name, (*_, text) in FLAGS.items() if ": " in text}
BRIEF = "loss temperature alpha beta method data encoder epochs batch_size out overwrite".split()
CRITERION = [name for name in FLAGS if name in hardneg.DEFAULTS]
OF_TRAINING = "recipe epochs batch_size lr micro_batch seed".split()
FREE = "out device root report overwrite compile".split()  # may change in a run
FACTS = "loss method data seed epochs device".split()  # of results.json
LIMITS = {"fraction": (1e-9, 1), "size": (8, 1024), "micro_batch": (2, 10**9), "seed": (0, 10**9)}


class Options(argparse.Namespace):
    """Hold the options of a run: what is given, else what its method, loss and recipe need."""

    def __init__(self, **given):
        given = {name: value for name, value in given.items() if value is not None}
        chosen = {name: default for name, (_, default, _) in FLAGS.items()} | given
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

    def has_effect(self, name: str) -> bool:
        """Whether the loss and the method of this run look at an option."""
        if name in OF_METHODS:
            return name in METHODS[self.method]
        return name not in LOOK or not {self.weights, self.objective}.isdisjoint(LOOK[name])

    def of_the_run(self) -> dict:
        """List what makes a run what it is: this has to stay when the run goes on."""
        names = [name for name in FLAGS if name not in FREE and self.has_effect(name)]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def parse(argv: list[str]) -> dict:
    """Parse a command line → the options that it gives."""
    # without a usage, a mistake is one line
    parser = argparse.ArgumentParser("train.py", argparse.SUPPRESS, allow_abbrev=False)
    parser.description = __doc__.split("\n\n")[0]
    parser.epilog = "[1] Robinson 2021, [2] Jiang 2023, [3] Wu 2023, [4] Wang & Liu 2021"
    parser.add_argument("--help-all", action="help", help="explain all flags")
    losses = {"choices": hardneg.PRESETS, "metavar": "LOSS"}
    parser.add_argument("--compare", nargs="+", **losses, help="train with each, and compare")
    parser.add_argument("--seeds", type=int, metavar="N", help="of --compare: runs of each loss")
    for name, (kind, default, text) in FLAGS.items():
        more = {"type": kind, "metavar": getattr(kind, "__name__", "").upper()}
        if kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif not isinstance(kind, type):
            more = {"choices": kind}
        if name == "alpha":
            more |= {"nargs": "?"}  # without a number: the default
        known = [] if default is None else [f"{default}"]
        for table in TABLES:
            known += [f"{row[name]} for {of}" for of, row in table.items() if name in row]
        more["help"] = f"{text} ({', '.join(known) or None})".replace("%", "%%")
        if name not in BRIEF and "--help-all" not in argv:
            more["help"] = argparse.SUPPRESS
        parser.add_argument(flag_of(name), default=None, **more)
    given = vars(parser.parse_args(argv))
    return {name: value for name, value in given.items() if value is not None}


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
    criterion = hardneg.ContrastiveLoss(**{name: getattr(options, name) for name in CRITERION})
    encoder = runs.untrained(options.encoder, images, options.seed)
    if options.compile:
        encoder.compile()
    schedules = {}
    if options.anneal and options.weights == "tilted":
        schedules["beta"] = lambda progress: hardneg.annealed_beta(progress, options.beta)
    if options.lead_in and options.weights == "top":
        schedules["alpha"] = lambda progress: hardneg.lead_in(progress, options.alpha)
    method = make_method(options, criterion, encoder, images)
    settings = {name: getattr(options, name) for name in OF_TRAINING}
    training = hardneg.Training(encoder, images.train, method, schedules=schedules, **settings)
    return encoder, training


def make_method(options: Options, criterion, encoder, images: Images) -> hardneg.SimCLR:
    """Make the method of training that the options name."""
    size = images.train.shape[-1]
    blurred = {"blur": 0.5} if size > 64 else {}  # blur hides what small images show
    views = {"view_options": blurred | VIEWS[options.views]}
    own = {name: getattr(options, name) for name in OF_METHODS if options.has_effect(name)}
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
    given = parse(sys.argv[1:] if argv is None else argv)
    try:
        act(given)
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on, without --overwrite.", file=sys.stderr)
        sys.exit(130)
    except (hardneg.InvalidArgument, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)


def act(given: dict) -> None:
    """Check the options of a command, then do what it asks for."""
    losses, seeds = given.pop("compare", None), given.pop("seeds", 3)
    both = losses and "loss" in given
    require(not both, "--loss", given.get("loss"), "left out with --compare")
    rows = [Options(**given | {"loss": loss}) for loss in losses or [given.get("loss")]]
    for name, value in given.items():
        if not any(row.has_effect(name) for row in rows):
            print(f"{flag_of(name, value)} has no effect here")
    for row in rows:
        check(row)
    if losses:
        out = given.get("out", runs.folder_of(rows[0], "compare"))
        compare.compare(compare.plan_of(rows, seeds, out), run, out)
    else:
        run(rows[0])


def check(options: Options) -> None:
    """Find mistakes in the options before anything slow: build the run for four images."""
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError):
        require(False, "--device", options.device, "one that this machine has, such as cpu")
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        fits = value is None or least <= value <= most
        require(fits, flag_of(name), value, f"from {least} to {most}")
    few = shapes(4, classes=2, size=options.size or 32)
    small = options.but(compile=False)
    if options.method == "queue":
        small.queue_size = min(1, options.queue_size)
    build(small, Images(*few, *few, []))


if __name__ == "__main__":
    main()
