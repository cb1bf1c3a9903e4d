"""Train an encoder without labels and measure what it has learned:
python train.py --loss hard --alpha 0.3

It prints how well pixels and encoders tell the classes apart, and writes report.html, results.json
and checkpoint.pt. From Python: train.run(train.Options(loss="hard", alpha=0.3)). Begin at `run`.
"""

import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import hardneg
from training import UserError, baselines, command, compare, report, require, runs
from training.command import option
from training.images import KNOWN, TORCHVISION, Images, read

# What a loss or a method needs to learn something in a short run: benchmarks/README.md. A loss has
# a row where hardneg's defaults lose more than a point on the shapes. Epochs, batch size and rate
# are for the recipe adamw. A method's row lists all options that it alone has.
SMALL = {"batch_size": 64, "lr": 2e-3}
LOSS_DEFAULTS = {
    "simclr": {"temperature": 0.05},
    "hcl": {"temperature": 0.3, "beta": 1.0, "tau_plus": 0.1},
    "hard": {"temperature": 0.07},
    "hard-simple": {"alpha": 0.1, "lead_in": False, "epochs": 28} | SMALL,
    # on the nearest negative alone all embeddings collapse
    "triplet": {"weights": "top", "alpha": 0.1, "margin": 0.5, "epochs": 16} | SMALL,
}
GAME = dict(loss="ppcl", pairs=True, ascent=True, momentum=0.99, pretrain=2, every=8, width=8)
METHOD_DEFAULTS = {
    "simclr": {},
    "bank": {"momentum": 0.8, "epochs": 24} | SMALL,
    "queue": {"momentum": 0.9, "queue_size": 64, "epochs": 24} | SMALL,
    "clae": {"bound": 0.005},
    "diffhard": GAME | {"latent": 64, "gan_lr": 4e-4, "ascent_lr": 1e-4, "epochs": 6} | SMALL,
}
# what hardneg.view does beside its defaults: as the code of [1] does, as [4] says
VIEWS = {
    "default": {},
    "small": {"area": (0.08, 1.0), "blur": 0.5},
    "coloured": {"jitter": 1.0, "hue": 0.4},
}
FREE = "out device root report overwrite workers compile".split()  # may change in a run
FACTS = "loss method data seed epochs device".split()  # of results.json
LIMITS = {"fraction": (1e-9, 1), "size": (8, 1024), "micro_batch": (2, 10**9), "workers": (0, 999)}
LIMITS |= {name: (0, 10**9) for name in ("seed", "weight_decay", "gan_lr", "ascent_lr")}
LIMITS["queue_size"] = (1, 10**9)
RECOMMENDED = hardneg.DEFAULTS
# the options that a rule or an objective looks at; tilted multiplies cos/t, two have a gradient
OF_LOGITS = {"temperature", "tau_plus", "debias"}
LOOKS_AT = {
    "uniform": set(),
    "tilted": {"beta", "temperature", "detach_weights"},
    "hardest": set(),
    "top": {"alpha"},
    "transported": {"epsilon", "cost", "kappa", "detach_weights"},
    "nce": OF_LOGITS,
    "ppcl": OF_LOGITS,
    "decoupled": OF_LOGITS,
    "simple": set(),
    "triplet": {"margin"},
}
MISTAKES = UserError, hardneg.InvalidArgument, FloatingPointError, torch.OutOfMemoryError


# To add an option: a field here (str, number, bool, Path); in FREE if it may change in a run; in
# METHOD_DEFAULTS if it is a method's; in `runs.folder_of` if its runs have folders of their own.
@dataclasses.dataclass
class Options:
    """[1] HCL, Robinson 2021; [2] HCL-OT, Jiang 2023; [3] DiffHard, Wu 2023; [4] Wang & Liu 2021"""

    loss: str = option("hcl", "weights and objective", choices=hardneg.PRESETS, group="loss")
    weights: str = option(None, "of negatives", choices=hardneg.WEIGHTS, otherwise="the loss's")
    objective: str = option(None, "of the loss", choices=hardneg.OBJECTIVES, otherwise="the loss's")
    temperature: float = option(RECOMMENDED["temperature"], "divides cosines, above 0")
    tau_plus: float = option(
        None,
        "false negatives' share [1], in [0, 0.999]",
        otherwise="0, 1/(N + 1) for debiased",
    )
    detach_weights: bool = option(None, "no gradient through weights", otherwise="ot alone")
    debias: str = option("published", "estimate of debiasing", choices=("published", "exact"))
    beta: float = option(RECOMMENDED["beta"], "hcl: concentration on near negatives [1]")
    anneal: bool = option(False, "hcl: lower beta to a fifth in five steps over the run")
    epsilon: float = option(RECOMMENDED["epsilon"], "ot: regularisation, in units of the cost [2]")
    cost: str = option("sqeuclidean", "ot: of the coupling", choices=("sqeuclidean", "exp"))
    kappa: float = option(0.0, "ot: κ of the cost exp")
    alpha: float = option(RECOMMENDED["alpha"], "hard: share of nearest kept [4]", nargs="?")
    lead_in: bool = option(True, "hard: lower the share from 1 to alpha at first")
    margin: float = option(0.0, "triplet: a squared distance, at least 0")
    true_positives: bool = option(False, "second view: another image of the class [1]")
    data: str = option(
        "shapes",
        f"shapes (built in), {', '.join(TORCHVISION)}, or a folder: one folder of images per "
        "class, train/ and test/ that hold such folders, or images alone",
        group="data",
    )
    root: str = option("data", "folder of torchvision's sets, which are downloaded to it")
    fraction: float = option(1.0, "share of each class to train on, in (0, 1]")
    validation: bool = option(False, "test on every fifth training image, to choose settings")
    workers: int = option(None, "processes that decode a folder", otherwise="as many as help")
    size: int = option(None, "side in pixels", otherwise="the images', in a folder at most 96")
    method: str = option(
        "simclr",
        "candidates: simclr, the batch; bank, a row per training image [4]; queue, earlier "
        "batches; clae, adversarial views; diffhard, generated images [3]",
        choices=METHOD_DEFAULTS,
        group="training",
    )
    encoder: str = option("small", "the network", choices=("small", "resnet18", "resnet50"))
    recipe: str = option("adamw", "optimizer and rates; sgd [4], adam [1]", choices=hardneg.RECIPES)
    views: str = option("default", "random changes; small [1], coloured [4]", choices=VIEWS)
    epochs: int = option(None, "passes over the images")
    batch_size: int = option(None, "images in a batch, at most")
    micro_batch: int = option(None, "views in one pass, to save memory", otherwise="all")
    lr: float = option(None, "peak learning rate, above 0")
    weight_decay: float = option(None, "of the encoder")
    compile: bool = option(False, "compile the encoder: a slow start, then faster on a GPU")
    seed: int = option(0, "of weights, order and views")
    device: str = option("cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda or cuda:1")
    out: Path = option(None, "output folder", otherwise="runs/DATA-METHOD-LOSS-SEED")
    report: bool = option(True, "end with pictures of what was learned, in DIR/report.html")
    overwrite: bool = option(False, "replace the run in DIR, finished or stopped")
    momentum: float = option(None, "of the bank's rows, of the slow copy", group="methods")
    queue_size: int = option(None, "earlier embeddings in the queue, fewer than images")
    bound: float = option(None, "clae: largest change of a pixel, in (0, 1)")
    pairs: bool = option(None, "diffhard: images by G and its slow copy are positives; no: G+Hard")
    ascent: bool = option(None, "diffhard: G ascends the loss; no: G+Pos, without pairs CL-GAN")
    pretrain: int = option(None, "diffhard: epochs of the game before the encoder's")
    every: int = option(None, "diffhard: steps of the encoder per step of the generator")
    width: int = option(None, "diffhard: channels at full size: 8 for a CPU, 64 for a GPU")
    latent: int = option(None, "diffhard: dimensions of a latent")
    gan_lr: float = option(None, "diffhard: learning rate of generator and discriminator")
    ascent_lr: float = option(None, "diffhard: peak rate of the ascent: higher is harder")

    def __post_init__(self):
        """Fill in what is None: the default above, of the loss, the method or the recipe."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        fields = dataclasses.fields(self)
        for field in fields:
            value, choices = given.get(field.name), field.metadata.get("choices")
            if value is not None and choices:
                flag, wanted = command.flag_of(field.name), f"one of {', '.join(choices)}"
                require(value in choices, flag, value, wanted)
        # later ones win: the fields' defaults, the recipe, the loss, the method, what is given
        chosen = {field.name: field.metadata["default"] for field in fields}
        method, recipe = (chosen | given)["method"], (chosen | given)["recipe"]
        of_method = METHOD_DEFAULTS[method]
        of_recipe = hardneg.RECIPES[recipe]
        loss = (chosen | of_method | given)["loss"]
        preset = zip(("weights", "objective"), hardneg.PRESETS[loss][:2], strict=True)
        chosen |= of_recipe | dict(preset) | LOSS_DEFAULTS.get(loss, {}) | of_method
        if recipe != "adamw":
            chosen |= of_recipe  # the tables suit adamw
        generates_pairs = of_method.get("pairs") and given.get("pairs", True)
        if generates_pairs and chosen["objective"] == "nce":
            chosen["objective"] = "ppcl"  # nce knows no generated pairs
        for name, value in (chosen | given).items():
            setattr(self, name, value)
        self.out = Path(self.out or runs.folder_of(self, f"{loss}-{self.seed}"))

    def has_effect(self, name: str) -> bool:
        """Whether the loss and the method of this run look at an option."""
        if GROUPS[name] == "methods":
            return name in METHOD_DEFAULTS[self.method]
        name = {"anneal": "beta", "lead_in": "alpha"}.get(name, name)
        if name in ("loss", "weights", "objective") or name not in CRITERION:
            return True
        return name in LOOKS_AT[self.objective] | LOOKS_AT[self.weights]

    def of_the_run(self) -> dict:
        """List what makes a run what it is: this has to stay when the run goes on."""
        names = [name for name in vars(self) if name not in FREE and self.has_effect(name)]
        known = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.data not in KNOWN:  # one folder has many spellings
            known["data"] = Path(self.data).resolve()
        return {name: str(x) if isinstance(x, Path) else x for name, x in known.items()}

    def passes(self) -> int:
        """Count how often a run sees the images."""
        return self.epochs + (self.pretrain if self.has_effect("pretrain") else 0)


GROUPS = command.groups_of(Options)
CRITERION = [name for name in GROUPS if name in hardneg.DEFAULTS]  # loss, weights, objective, …


# ---- One run, from images to a table -----------------------------------------------------------


def run(options: Options, images: Images | None = None, known=None, bar=None) -> dict:
    """Train an encoder, measure it, save what was found → the content of results.json.
    Several runs may share images, the figures that `report.measure` knows, and a progress bar."""
    with runs.alone(options.out):
        results = runs.finished(options)
        if results is not None:
            return report.show_again(options, results, images)
        images = images or read(options)
        encoder, training = build(options, images)
        report.describe(options, training)
        state = runs.restore(training, options)
        if state is None:
            state = runs.begin(options.out, images)
        learn(options, training, state, images, bar)
        results = {name: getattr(options, name) for name in FACTS}
        results["seconds"] = round(state["seconds"], 1)
        results["options"] = options.of_the_run()
        results["history"] = state["history"]
        results |= report.measure(encoder, images, options.encoder, options.seed, known)
        results = report.save_results(options.out / runs.RESULTS, results)
        report.write_pictures(options, results, images)
        return results


def build(options: Options, images: Images) -> tuple:
    """Make the encoder and its training as the options say."""
    criterion = build_criterion(options)
    size, device = images.train.shape[-1], images.train.device
    encoder = runs.untrained(options.encoder, size, device, options.seed)
    if options.compile:
        encoder.compile()
    schedules = {}
    if options.anneal and options.weights == "tilted":
        schedules["beta"] = functools.partial(hardneg.annealed_beta, beta=options.beta)
    if options.lead_in and options.weights == "top":
        schedules["alpha"] = functools.partial(hardneg.lead_in, alpha=options.alpha)
    training = hardneg.Training(
        encoder,
        images.train,
        make_method(options, criterion, encoder, images),
        options.recipe,
        options.epochs,
        options.batch_size,
        options.lr,
        options.weight_decay,
        schedules,
        options.micro_batch,
        seed=options.seed,
    )
    return encoder, training


def build_criterion(options: Options) -> hardneg.ContrastiveLoss:
    """Make the loss as the options say."""
    settings = {name: getattr(options, name) for name in CRITERION}
    return hardneg.ContrastiveLoss(**settings)


def make_method(options: Options, criterion, encoder, images: Images) -> hardneg.SimCLR:
    """Make the method of training that the options name."""
    train, size = images.train, images.train.shape[-1]
    blurred = {"blur": 0.5} if size > 64 else {}  # blur hides what small images show
    views = blurred | VIEWS[options.views]
    if options.true_positives:
        possible = options.method == "simclr" and bool(images.classes)
        wanted = "off: it is for the method simclr and images with classes"
        require(possible, "--true-positives", "on", wanted)
    if options.method == "bank":
        return hardneg.Bank(criterion, encoder, train, options.momentum, views)
    if options.method == "queue":
        wanted = f"below the number of training images, {len(train)}"
        require(options.queue_size < len(train), "--queue-size", options.queue_size, wanted)
        settings = options.queue_size, options.momentum, views
        return baselines.Queue(criterion, encoder, train, *settings)
    if options.method == "clae":
        return baselines.CLAE(criterion, options.bound, views)
    if options.method == "diffhard":
        names = ("width", "latent", "pairs", "ascent", "momentum", "pretrain", "every", "ascent_lr")
        settings = {name: getattr(options, name) for name in names}
        game = hardneg.Game(size, lr=options.gan_lr, **settings)
        return hardneg.DiffHard(criterion, game, views)
    if options.true_positives:
        return baselines.TruePositives(criterion, train, images.train_labels, views)
    return hardneg.SimCLR(criterion, views)


def learn(options: Options, training: hardneg.Training, state: dict, images: Images, bar) -> None:
    """Train to the end with a progress bar.
    After each epoch, and when the user stops the run, save all that the run needs to go on."""
    n, seen = len(training.images), state["seen"]
    start = time.perf_counter() - state["seconds"]
    done = training.method.pretrain + training.epoch
    with runs.bar_of(n * options.passes(), bar) as bar, runs.stoppable() as stop:
        runs.skip(bar, n * done + n * training.step_in_epoch // training.steps_per_epoch)
        for figures in training:
            seen.append(figures)
            shown = bar.update(figures["images"])  # at most once a second
            if shown and "loss" in figures:  # to read it, the host waits for the device
                bar.set_postfix_str(f"loss {float(figures['loss']):.3f}")
            if training.step_in_epoch > 0 and not stop:
                continue
            report.keep_figures(seen)
            if training.step_in_epoch == 0:
                state["history"].append(report.summary(training, seen, images))
                seen.clear()
            state["seconds"] = time.perf_counter() - start
            everything = {"args": options.of_the_run(), "training": training.state_dict()}
            runs.save_checkpoint(options.out, state | everything)
            if stop:
                raise KeyboardInterrupt


# ---- The command -------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Run a command. A user's mistake ends it with a line: exit code 2 for options, 1 for a run."""
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    argv = sys.argv[1:] if argv is None else argv
    tables = hardneg.RECIPES, LOSS_DEFAULTS, METHOD_DEFAULTS
    given = command.parse(argv, __doc__.split("\n\n")[0], Options, tables)
    try:
        act = action_of(given)
    except MISTAKES as error:
        command.Parser().error(str(error))
    try:
        act()
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on, without --overwrite.", file=sys.stderr)
        sys.exit(130)
    except MISTAKES as error:
        sys.exit(f"train.py: {error}")


def action_of(given: dict) -> Callable:
    """Check the options of a command → what it does."""
    losses, seeds = given.pop("compare", None), given.pop("seeds", None)
    folder, exported = given.pop("evaluate", None), given.pop("export", None)
    labelled = given.pop("finetune", None)
    kinds = [flag for flag in (losses, folder, exported) if flag]
    require(len(kinds) < 2, "the command", "of several kinds", "one of compare, evaluate, export")
    rows = [Options(**given | {"loss": loss}) for loss in losses or [given.get("loss")]]
    options = rows[0]
    if seeds is not None and losses is None:
        print("--seeds has no effect here")
    if labelled is not None:
        require(bool(folder), "--finetune", labelled, "with --evaluate RUN")
        require(0 < labelled <= 1, "--finetune", labelled, "above 0, at most 1")
    command.say_idle(given, rows, folder or exported)
    for row in rows:
        check(row)
    if exported:
        check_run("--export", exported[0])
        require(exported[1].suffix == ".pt2", "--export", exported[1], "a file that ends in .pt2")
        return functools.partial(runs.export, *exported)
    if folder:
        check_run("--evaluate", folder)
        return functools.partial(report.transfer, folder, options, labelled)
    if losses:
        wanted = "left out: --compare names losses"
        require("loss" not in given, "--loss", given.get("loss"), wanted)
        out = given.get("out", runs.folder_of(options, "compare"))
        plan = compare.plan_of(rows, 3 if seeds is None else seeds, out)
        return functools.partial(compare.compare, plan, run, out)
    return functools.partial(run, options)


def check_run(flag: str, folder: Path) -> None:
    """Require that a folder holds a run."""
    require((folder / runs.CHECKPOINT).exists(), flag, folder, "the folder of a run")


def check(options: Options) -> None:
    """Find mistakes in the options before anything slow: build the run for four blank images."""
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        message = f"--device {options.device} cannot be used here; try --device cpu"
        raise UserError(message) from error
    wanted = f"shapes, {', '.join(TORCHVISION)}, or a folder that exists"
    require(options.data in KNOWN or Path(options.data).is_dir(), "--data", options.data, wanted)
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        fits = value is None or least <= value <= most
        require(fits, command.flag_of(name), value, f"from {least} to {most}")
    require(not options.out.is_file(), "--out", options.out, "a folder, not a file")
    size = options.size or 32
    blank = torch.zeros(4, 3, size, size, dtype=torch.uint8, device=options.device)
    labels = torch.arange(4, device=options.device) // 2
    small = dataclasses.replace(options, compile=False, queue_size=1)
    build(small, Images(blank, labels, blank, labels, ["a", "b"]))


if __name__ == "__main__":
    main()
