"""Train an encoder without labels, and see what it has learned: python train.py --loss hard --alpha 0.3

A progress bar, then a table of how well the features of the raw pixels, of the untrained and of the trained encoder
tell the classes apart; results.json, curves.png and the checkpoint lie in the folder of --out. With --evaluate RUN
nothing is trained: the table is that of the encoder of such a folder on the images of --data.
"""
import argparse
import copy
import datetime
import json
import math
import os
import pickle
import platform
import re
import sys
import textwrap
import time
from pathlib import Path

import matplotlib
import torch
import torchvision
from tqdm import tqdm

import hardneg

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend is chosen first: there may be no screen)


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Papers: [1] HCL, Robinson et al. 2021; [2] HCL-OT, Jiang et al. 2023; [3] DiffHard, 2023; "
               "[4] Wang & Liu 2021. README.md says which loss when.")
    flag = argparse.BooleanOptionalAction

    group = parser.add_argument_group("the loss")
    group.add_argument("--loss", choices=hardneg.PRESETS,
                       help="a preset of weights and objective; None: hcl, with --method diffhard ppcl")
    group.add_argument("--weights", choices=hardneg.WEIGHTS, help="weights of the negatives, instead of the loss's own")
    group.add_argument("--objective", choices=hardneg.OBJECTIVES,
                       help="what is done with them, instead of the loss's own; None, in a game of pairs: ppcl")
    group.add_argument("--temperature", type=float, default=0.3, metavar="t", help="divides cosines, above 0")
    group.add_argument("--margin", type=float, default=0.0, metavar="M",
                       help="of triplet, in the unit of a squared distance, 0 or more")
    group = parser.add_argument_group("debiased and hcl [1]")
    group.add_argument("--tau-plus", type=float, metavar="T",
                       help="probability that a negative is of the anchor's class, in [0, 1); None: the loss's own, "
                            "0.1 for debiased and hcl, 0 for others")
    group.add_argument("--beta", type=float, default=1.0, metavar="B",
                       help="concentration on near negatives, 0 or more")
    group.add_argument("--anneal", action=flag, default=False, help="bring beta down to 0 in five stairs over the run")
    group.add_argument("--true-positives", action=flag, default=False,
                       help="take the second view of another image of the same class: looks at the labels")
    group = parser.add_argument_group("ot [2]")
    group.add_argument("--epsilon", type=float, default=0.3, metavar="E",
                       help="entropic regularisation in the unit of the cost, above 0: the smaller, the harder")
    group.add_argument("--cost", default="sqeuclidean", choices=("sqeuclidean", "exp"),
                       help="ground cost of the coupling")
    group.add_argument("--kappa", type=float, default=0.0, metavar="K", help="κ of the cost exp")
    group = parser.add_argument_group("hard and hard-simple [4]")
    group.add_argument("--alpha", type=float, default=0.1, metavar="A",
                       help="share of nearest negatives kept, in (0, 1]")
    group.add_argument("--top-k", type=int, metavar="K", help="number of nearest negatives kept, instead of a share")
    group.add_argument("--lead-in", action=flag, default=True,
                       help="bring the share down from 1 to alpha over the first half of the run")

    group = parser.add_argument_group("data")
    group.add_argument("--data", default="shapes", metavar="NAME",
                       help=f"shapes (built in), {', '.join(hardneg.TORCHVISION)}, or a folder with a folder of images "
                            "for each class, or with train/ and test/ of that kind in it")
    group.add_argument("--root", default="data", metavar="DIR",
                       help="where torchvision's sets are, or are downloaded to")
    group.add_argument("--fraction", type=float, default=1.0, metavar="F",
                       help="share of each class's training images to use, in (0, 1]; the same ones for every seed")
    group.add_argument("--workers", type=int, metavar="N",
                       help="of a folder: processes that read its images while the encoder trains, for data larger "
                            "than memory; None: all are read once and kept")
    group.add_argument("--size", type=int, metavar="S",
                       help="side in pixels that images are brought to; None: their own, of a folder that of the first "
                            "one if it is square and at most 96")

    group = parser.add_argument_group("training")
    group.add_argument("--method", default="simclr", choices=hardneg.METHODS,
                       help="where the candidates come from: simclr, the batch; bank, a row for every training image "
                            "[4]; queue, earlier batches as a slow copy of the encoder sees them; clae, the batch and "
                            "views perturbed against the encoder; diffhard, the batch and images generated against "
                            "the encoder [3]")
    group.add_argument("--momentum", type=float, metavar="M",
                       help="of the bank's rows, None: 0.5; of the queue's slow encoder and of the slow generator, "
                            "None: 0.99; in [0, 1)")
    group.add_argument("--queue-size", type=int, default=4096, metavar="K",
                       help="embeddings that the queue remembers, fewer than there are images")
    group.add_argument("--bound", type=float, default=0.015, metavar="P",
                       help="of clae: the largest change of a pixel, where 1 is white")
    group.add_argument("--encoder", default="small", choices=("small", "resnet18", "resnet50"), help="the network")
    adamw, sgd = (hardneg.RECIPES[name] for name in ("adamw", "sgd"))

    def settings(name):
        return f"None: the recipe's, {adamw[name]:g} for adamw, {sgd[name]:g} for sgd"

    group.add_argument("--recipe", default="adamw", choices=hardneg.RECIPES,
                       help="adamw, with a warm-up and a cosine; sgd, with momentum 0.9, a tenth of the rate from 80%% "
                            "of the run on, a hundredth from 95%%, as in [4]")
    group.add_argument("--epochs", type=int, metavar="N", help=f"times that every image is seen; {settings('epochs')}")
    group.add_argument("--batch-size", type=int, metavar="B",
                       help=f"images in a batch, at least 2; {settings('batch_size')}")
    group.add_argument("--micro-batch", type=int, metavar="M",
                       help="views that the encoder takes at a time, so that a large batch needs the memory of this "
                            "many, for one more forward pass; None: all at once")
    group.add_argument("--lr", type=float, metavar="LR", help=f"highest learning rate; {settings('lr')}")
    group.add_argument("--weight-decay", type=float, metavar="W", help=f"weight decay; {settings('weight_decay')}")
    group.add_argument("--sync-batchnorm", action=flag, default=False,
                       help="under torchrun, on GPUs: BatchNorm normalises the batch of all ranks, not each share")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of the weights, the order and the views")
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", metavar="D",
                       help="cpu, cuda, …")
    group.add_argument("--out", type=Path, metavar="DIR",
                       help="folder for what comes out; None: runs/DATA-METHOD-LOSS-SEED")
    group.add_argument("--pictures", action=flag, default=False,
                       help="draw what the encoder has learned into DIR; with --resume, of a run that is finished")
    group.add_argument("--resume", action=flag,
                       help="go on from the last epoch saved in DIR, or begin anew; None: go on with a run of the same "
                            "options that was stopped")
    group = parser.add_argument_group("diffhard [3]", "--no-pairs: its G+Hard; --no-ascent: its G+Pos; both: CL-GAN")
    group.add_argument("--pairs", action=flag, default=True,
                       help="two images of each latent, by the generator and its slow follower, are positives")
    group.add_argument("--ascent", action=flag, default=True, help="the generator ascends the encoder's loss")
    group.add_argument("--pretrain", type=int, default=300, metavar="M",
                       help="steps of generator and discriminator before the encoder begins, 0 or more")
    group.add_argument("--every", type=int, default=4, metavar="n",
                       help="steps of the encoder for each of the generator's, at least 1")
    group.add_argument("--width", type=int, default=16, metavar="W",
                       help="channels of generator and discriminator at full size: 16 for a CPU, 64 for a GPU")
    group.add_argument("--latent", type=int, default=64, metavar="L", help="dimensions of a latent")
    group.add_argument("--gan-lr", type=float, default=4e-4, metavar="LR",
                       help="learning rate of generator and discriminator")
    group.add_argument("--ascent-lr", type=float, default=1e-4, metavar="LR",
                       help="highest learning rate of the ascent: the higher, the harder the images, and the less like "
                            "real ones")
    group = parser.add_argument_group("evaluation")
    group.add_argument("--evaluate", type=Path, metavar="RUN",
                       help="train nothing: how well the encoder of this run's folder does on the images of --data")
    args = parser.parse_args(argv)
    if args.loss is None:
        args.loss = "ppcl" if args.method == "diffhard" else "hcl"
    nce = hardneg.PRESETS[args.loss][1] == "nce"
    if args.objective is None and args.method == "diffhard" and args.pairs and nce:  # its weights, on pairs
        args.objective = "ppcl"
    if args.out is None:
        part = "" if args.method != "diffhard" else "-no-pairs" * (not args.pairs) + "-no-ascent" * (not args.ascent)
        args.out = Path("runs") / f"{Path(args.data).name}-{args.method}{part}-{args.loss}-{args.seed}"
    return args


def main(argv=None):
    args = arguments(argv)
    try:
        run(args) if args.evaluate is None else transfer(args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except KeyboardInterrupt:
        if args.evaluate:
            sys.exit("\nStopped.")
        saved = (args.out / "checkpoint.pt").exists() and not (args.out / "results.json").exists()
        sys.exit("\nStopped; " + ("the same command goes on from what was saved last." if saved else
                                  "nothing was saved yet."))
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:  # of arguments, data, a loss, a disk
        sys.exit(f"train.py: {error}")


def run(args):
    torch.manual_seed(args.seed)
    group, rank = join(args)
    device = torch.device(args.device)
    options = {name: getattr(args, name) for name in ("weights", "objective", "temperature", "tau_plus", "beta",
                                                      "alpha", "top_k", "epsilon", "cost", "kappa", "margin")}
    criterion = hardneg.ContrastiveLoss(args.loss, **options)
    print(f"reading {args.data} …", flush=True)
    images = first_alone(lambda: hardneg.load(args.data, args.root, args.size, args.fraction, workers=args.workers),
                         group).to(device)
    size = images.train.shape[-1]
    encoder = hardneg.Encoder(args.encoder, size=size).to(device)
    if args.sync_batchnorm:
        if group is None or device.type != "cuda":
            raise ValueError("--sync-batchnorm is for several processes on GPUs: torchrun --nproc-per-node N train.py "
                             "--device cuda")
        encoder = torch.nn.SyncBatchNorm.convert_sync_batchnorm(encoder, group)
    game = None
    if args.method == "diffhard":
        if size < 8 or size & (size - 1):
            raise ValueError(f"--size: the images have {size} pixels a side, a game needs a power of two: --size 32")
        if args.pairs and criterion.resolved.objective != "ppcl":
            raise ValueError(f"--objective is {criterion.resolved.objective}, which knows no pairs: --objective ppcl, "
                             "or --no-pairs")
        game = hardneg.Game(size, args.width, args.latent, args.pairs, args.ascent,
                            0.99 if args.momentum is None else args.momentum, args.pretrain, args.every,
                            lr=args.gan_lr, ascent_lr=args.ascent_lr)
    view_options = {"blur": 0.5} if size > 64 else {}  # blurred, small images lose what they show
    training = hardneg.Training(encoder, images, criterion, args.method, args.momentum, args.queue_size, args.recipe,
                                args.epochs, args.batch_size, args.lr, args.weight_decay, {}, view_options,
                                args.true_positives, seed=args.seed, bound=args.bound, game=game,
                                micro_batch=args.micro_batch, group=group)
    training.schedules = schedules(args, training)
    print(f"{args.data}: {len(images.train)} images to train on, {len(images.test)} to test, "
          f"{len(images.classes)} classes, {size} × {size} pixels, on {device}"
          + (f", {training.ranks} processes" if group else ""))
    print(criterion)
    for name, schedule in training.schedules.items():
        print(f"{name} goes from {schedule(0.0):g} to {schedule(1.0):g} over the run; "
              f"{'--no-anneal' if name == 'beta' else '--no-lead-in'} keeps it at {getattr(args, name):g}")

    same = {k: v for k, v in vars(args).items() if k not in NOT_OF_THE_RUN}
    state = restore(args, training, same)
    if group is not None:
        torch.distributed.barrier()  # all have looked, before the first one tidies up
    if rank > 0:  # one rank writes
        for _ in training:
            pass
        return
    if state is None:
        begin_anew(args.out)
        state = {"history": [], "seconds": 0.0, "before": None, "size": size}
    args.out.mkdir(parents=True, exist_ok=True)
    if not os.access(args.out, os.W_OK):
        raise ValueError(f"--out: {args.out} cannot be written to")
    if state["before"] is None:
        print("how well the classes can be told by the raw pixels, and by the encoder before it is trained …",
              flush=True)
        state["before"] = {"raw": hardneg.evaluate(None, images), "untrained": hardneg.evaluate(encoder, images)}
    learn(args, training, state, same)
    trained = hardneg.evaluate(encoder, images)
    report(args, state, trained, training)
    if args.pictures:
        draw_pictures(args, state, trained, training)


def join(args):
    """torchrun's process group and this process's rank in it; None and 0 where this process is alone."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None, 0
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
    torch.distributed.init_process_group("nccl" if args.device.startswith("cuda") else "gloo",
                                         timeout=datetime.timedelta(minutes=30))  # while the first one evaluates
    rank = torch.distributed.get_rank()
    if rank > 0:
        sys.stdout = open(os.devnull, "w")
    return torch.distributed.group.WORLD, rank


def first_alone(job, group):
    """The first process before all others, so that one downloads and the others find what it has left."""
    if group is None:
        return job()
    if torch.distributed.get_rank() > 0:
        torch.distributed.barrier()
    done = job()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    return done


# options that change no number of a run
NOT_OF_THE_RUN = ("out", "resume", "device", "root", "pictures", "evaluate", "workers")


def transfer(args):
    """The encoder of a run's folder, on other images: only the readout is trained ([3] Tables 3, 4)."""
    if int(os.environ.get("RANK", 0)) > 0:  # of several processes one is enough
        return
    path = args.evaluate / "checkpoint.pt"
    if not path.exists():
        raise ValueError(f"--evaluate: there is no {path}; RUN is the folder of a run, such as {args.out}")
    state = read_checkpoint(path, args.device)
    name, size = state["args"]["encoder"], state.get("size", args.size)
    if size is None:
        raise ValueError(f"--size: {path} does not say the size of its images; name it")
    torch.manual_seed(state["args"]["seed"])  # as in run: the weights that training began with
    encoder = hardneg.Encoder(name, size=size).to(args.device, memory_format=torch.channels_last)
    print(f"reading {args.data} …", flush=True)
    images = hardneg.load(args.data, args.root, size, args.fraction, workers=args.workers).to(args.device)
    print(f"{args.data}: {len(images.train)} images for the readout, {len(images.test)} to test, "
          f"{len(images.classes)} classes, {size} × {size} pixels; {name} of {args.evaluate}, after "
          f"{max(0, state['training']['epoch'])} epochs of training on {state['args']['data']}"
          + ("" if (args.evaluate / "results.json").exists() else ", which is not finished"), flush=True)
    rows = {"raw": hardneg.evaluate(None, images), "untrained": hardneg.evaluate(encoder, images)}
    encoder.load_state_dict(state["training"]["encoder"])
    rows["trained"] = hardneg.evaluate(encoder, images)
    print_table(rows)
    results = {"run": str(args.evaluate), "trained_on": state["args"]["data"], "epochs": state["training"]["epoch"],
               "data": args.data, "fraction": args.fraction, **as_json(rows), "versions": versions()}
    share = f"-{args.fraction:g}" if args.fraction < 1 else ""
    path = args.evaluate / f"evaluate-{re.sub(r'[^A-Za-z0-9_.]+', '-', args.data).strip('-')}{share}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"saved in {path}")


def schedules(args, training):
    """{option of the loss: function of the progress}, for what changes over the run."""
    weights, n = training.criterion.resolved.weights, training.candidates
    if args.anneal and weights == "tilted":
        return {"beta": lambda progress: hardneg.annealed_beta(progress, args.beta)}
    if args.lead_in and weights == "top" and args.top_k:
        share = min(args.top_k, n) / n
        return {"top_k": lambda progress: max(args.top_k, round(n * hardneg.lead_in(progress, share)))}
    if args.lead_in and weights == "top":
        return {"alpha": lambda progress: hardneg.lead_in(progress, args.alpha)}
    return {}


def restore(args, training, same):
    """The state of the last epoch saved in DIR, to which training is brought; None where the run begins anew.

    Without --resume or --no-resume, a run that was stopped goes on if its options are the same.
    """
    path, results = args.out / "checkpoint.pt", args.out / "results.json"
    if not path.exists() or args.resume is False:
        if args.resume:
            raise ValueError(f"--resume: there is no {path}")
        return None
    state = read_checkpoint(path, args.device, "; --no-resume begins anew")
    other = [f"--{k.replace('_', '-')} was {v}" for k, v in state["args"].items() if v != same[k]]
    if results.exists() and not args.resume:  # that run was finished
        return None
    if other:
        raise ValueError(f"{path} is of a run with other options: {', '.join(other)}. --no-resume discards it, --out "
                         "names another folder")
    training.load_state_dict(state["training"])
    place = (f"epoch {training.epoch} of {training.epochs}" if training.epoch >= 0 else
             f"step {training.done} of {training.pretrain} of the pre-training")
    print(f"resumed after {place} (--no-resume begins anew)")
    return state


def read_checkpoint(path, device, advice=""):
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({error}){advice}") from error


def begin_anew(out):
    """Remove what another run has left in the folder, so that all in it is of one."""
    if (out / "results.json").exists():
        print(f"{out} holds a finished run, which this one replaces (--out names another folder)")
    names = ("checkpoint.pt", "results.json", "evaluate-*.json", "curves.png", "pairs-*.png", "separation.png",
             "gradient.png", "uniformity.png", "neighbours.png", "nearest.png", "weights.png", "histograms.png")
    for path in [path for name in names for path in out.glob(name)]:
        path.unlink()


def learn(args, training, state, same):
    """Train to the end, with a progress bar; everything needed to go on is saved after each epoch."""
    if chance := chance_level(training):
        print(f"chance, all similarities equal: {chance}")
    bar = tqdm(total=training.steps, initial=training.done, unit="step", dynamic_ncols=True)
    sums, start, last = {}, time.perf_counter(), time.perf_counter()
    images, epoch = 0, training.epoch
    if epoch == 0 and training.game:
        draw_pairs(args, training)
    for progress in training:
        images += progress["images"]
        for name in progress.keys() & FIGURES:
            sums.setdefault(name, []).append(progress[name])
        bar.update()
        now = time.perf_counter()
        if now - last > 0.2 or progress["step"] == training.steps:
            last = now
            bar.set_postfix_str(f"loss {float(progress['loss']):.3f}, {images / (now - start):.0f} images/s"
                                if "loss" in progress else "generator and discriminator alone")
        if training.epoch > epoch:
            epoch = training.epoch
            state["history"].append({"epoch": epoch, **{name: float(torch.stack(values).mean())
                                                        for name, values in sums.items()}})
            state["seconds"] += time.perf_counter() - start
            if training.game:
                draw_pairs(args, training)
            save(args.out / "checkpoint.pt", {**state, "args": same, "training": training.state_dict()})
            sums, start, images = {}, time.perf_counter(), 0
    bar.close()


FIGURES = {"loss", "positive", "negative", "ess", "clamped", "pair", "d_loss", "g_loss", "diversity"}


def chance_level(training):
    """What the loss of an encoder that tells nothing apart would be, said as a formula."""
    o, n = training.criterion.resolved, training.candidates
    if o.objective not in ("nce", "ppcl") or o.weights == "top":
        return None
    said = "N + 1" if training.bank or training.game else "2B − 1"
    return f"log({said}) = log({n + 1}) = {math.log(n + 1):.2f}"


def save(path, state):
    """Write beside, then move: a kill in the middle leaves the last one whole."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def report(args, state, trained, training):
    rows = {**state["before"], "trained": trained}
    print_table(rows)
    results = {"loss": args.loss, "method": args.method, "data": args.data, "seed": args.seed,
               "epochs": training.epochs, "seconds": round(state["seconds"], 1),
               "images_per_second": round(len(training.images.train) * training.epochs / state["seconds"], 1),
               **as_json(rows), "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
               "versions": versions()}
    if training.game:
        played = [h for h in state["history"] if h["epoch"] > 0]
        results["game"] = {when: {k: round(h[k], 4) for k in sorted(h.keys() & FIGURES)}
                           for when, h in (("first_epoch", played[0]), ("last_epoch", played[-1]))}
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw_curves(args.out / "curves.png", state["history"])
    pairs = ", pairs-*.png" if training.game else ""
    print(f"{state['seconds']:.0f} s of training, {results['images_per_second']:.0f} images/s; "
          f"results.json, curves.png{pairs} and checkpoint.pt are in {args.out}/")


def print_table(rows):
    print(f"\n{'':18}{'linear %':>10}{'kNN %':>10}{'uniformity':>12}{'tolerance':>12}")
    names = {"raw": "raw pixels", "untrained": "untrained encoder", "trained": "trained encoder"}
    for name, row in rows.items():
        print(f"{names[name]:18}{row['linear']:10.1f}{row['knn']:10.1f}{row['uniformity']:12.2f}"
              f"{row['tolerance']:12.2f}")


def as_json(rows):
    """The trained encoder's row, and the accuracies of the others."""
    others = {name: {k: round(rows[name][k], 2) for k in ("linear", "knn")} for name in ("untrained", "raw")}
    return {**{k: None if math.isnan(v) else round(v, 4) for k, v in rows["trained"].items()}, **others}


def versions():
    return {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__}


def draw_curves(path, history):
    panels = [("loss", "loss, mean of each epoch", {"loss": None}),
              ("mean cosine", "views of one image, and of others",
               {"positive": "positives", "negative": "negatives", "pair": "G(z) and G_ema(z)"}),
              ("", "the game, with its pre-training",
               {"d_loss": "loss of D", "g_loss": "loss of G", "diversity": "diversity"})]
    panels = panels[:2 + any("d_loss" in h for h in history)]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained")
    for axis, (unit, title, curves) in zip(axes, panels):
        for name, label in curves.items():
            points = [(h["epoch"], h[name]) for h in history if name in h]
            if points:
                axis.plot(*zip(*points), label=label)
        axis.set(xlabel="epoch", ylabel=unit, title=title)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[1].set(ylim=(-1.05, 1.05))
    for axis in axes[1:]:
        axis.legend()
    game = """ D's loss is 2 where it tells nothing apart, 0 where it tells all apart by a margin; diversity is 1 where
        generated images are as far from one another as real ones. Up to epoch 0 it is the pre-training."""
    save_picture(path, figure, "How the training went, epoch by epoch", f"""The loss falls and the two cosines part
        where the encoder learns to know an image by any view of it.{game if len(panels) > 2 else ""}""")


# Okabe and Ito's colours: they stay apart for colour-blind eyes
INK = {"raw": "#e69f00", "untrained": "#999999", "trained": "#0072b2", "same": "#009e73", "other": "#d55e00"}
LOSS_INK = {"simclr": "#000000", "hcl": "#0072b2", "ot": "#e69f00", "hard": "#d55e00", "simple": "#009e73"}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 120,
         "figure.figsize": (8, 4.8), "figure.constrained_layout.use": True}


def draw_pictures(args, state, trained, training):
    """Draw what the encoder has learned, beside what it was before, from at most 2000 test images."""
    images, device, out = training.images, training.images.test.device, args.out
    generator = torch.Generator(device).manual_seed(args.seed)
    some = torch.randperm(len(images.test), generator=generator, device=device)[:2000]
    test, labels, few = images.test[some], images.test_labels[some], slice(512)  # few: about a batch
    test = torch.cat(list(test.split(500)))  # they may be files yet
    torch.manual_seed(args.seed)  # as in run: the weights that training began with
    untrained = hardneg.Encoder(args.encoder, size=test.shape[-1]).to(device)
    encoders = {"untrained": untrained, "trained": training.encoder}
    z = {name: hardneg.embed(encoder, test)[1] for name, encoder in encoders.items()}
    views = [hardneg.view(test[few], generator, **training.view_options) for _ in range(2)]
    pairs = {name: [hardneg.embed(encoder, x)[1] for x in views] for name, encoder in encoders.items()}
    preset = {**training.criterion.options, "weights": None, "objective": None, "tau_plus": None}
    own = " + ".join(filter(None, (args.loss, args.weights, args.objective)))
    losses = {**{name: {**preset, "loss": name} for name in LOSS_INK}, own: training.criterion.options}
    drawn = {"separation.png": (draw_separation, pairs), "gradient.png": (draw_gradient, losses, own),
             "weights.png": (draw_weights, z["trained"][few], losses, own),
             "neighbours.png": (draw_neighbours, z, labels),
             "nearest.png": (draw_nearest, test, labels, z["trained"], images.classes)}
    if 1 < len(labels.unique()) < len(labels):  # there are pairs of one class, and pairs of two
        rows = {**state["before"], "trained": trained}
        drawn |= {"uniformity.png": (draw_uniformity, rows, z["trained"], labels),
                  "histograms.png": (draw_histograms, z, labels)}
    with plt.rc_context(STYLE):
        for name, (draw, *given) in drawn.items():
            draw(out / name, *given)
    print(f"{', '.join(drawn)} are in {out}/, each with a caption")


def draw_pairs(args, training, columns=12):
    """Images of the same latents by G and by its follower, when the game starts, in its middle and at its end."""
    when = {training.epochs: "end", training.epochs // 2: "middle", 0: "start"}.get(training.epoch)
    if when is None:
        return
    game, device = training.game, training.images.train.device
    z = game.latents(2 * columns, torch.Generator(device).manual_seed(args.seed))  # the same for every picture
    with torch.no_grad():  # of copies, so that to look changes nothing
        made = [copy.deepcopy(G).train()(z) for G in (game.G, game.G_ema)]
    cosine = (hardneg.embed(training.encoder, made[0])[1] * hardneg.embed(training.encoder, made[1])[1]).sum(1).mean()
    apart = (made[0] - made[1]).abs().mean()
    rows = torch.stack([x.unflatten(0, (2, columns)) for x in made], 1).flatten(0, 1)       # G, G_ema, G, G_ema
    sheet = torch.cat([torch.cat(list(row), 2) for row in rows], 1).permute(1, 2, 0)
    role = ("the encoder learns to take the two for one" if game.pairs else
            "in this run the encoder sees the upper ones alone, as images of their own")
    still = ", of an encoder that is not trained yet and finds everything alike" if when == "start" else ""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(9, 4.2))
        axis.imshow(sheet.cpu().numpy())
        side = made[0].shape[-1]
        axis.set_yticks([side * (k + 0.5) for k in range(4)], ["G(z)", "G_ema(z)"] * 2)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.axhline(2 * side - 0.5, color="white", linewidth=4)
        save_picture(args.out / f"pairs-{when}.png", figure,
                     f"Generated {'pairs' if game.pairs else 'images'} at the {when} of the game: mean cosine "
                     f"{cosine:.2f}", f"""
            {2 * columns} latents, the same in every such picture, after {training.epoch} of {training.epochs} epochs:
            above, the image by the generator, below, that by its slow follower; {role}. The cosine is of their
            embeddings, not augmented{still}; their pixels, from 0 to 1, differ by {apart:.3f} on average.""")


def save_picture(path, figure, title, caption):
    """Save with a title above and a caption below the axes, both part of the picture."""
    title, caption = (re.sub(r"-(?=\d)", "−", " ".join(text.split())).replace(" %", "\N{NO-BREAK SPACE}%")
                      for text in (title, caption))
    figure.suptitle(textwrap.fill(title, round(9.5 * figure.get_figwidth())), fontsize=12, fontweight="bold")
    figure.supxlabel(textwrap.fill(caption, round(14.5 * figure.get_figwidth())), x=0.02, ha="left", fontsize=9,
                     color="#444444", linespacing=1.4)
    figure.savefig(path)
    plt.close(figure)


def draw_separation(path, pairs):
    """Cosines of the positives and of the nearest negatives, in their order ([4] Fig. 8)."""
    figure, axes = plt.subplots(1, 2)
    ahead, k = {}, min(10, len(pairs["trained"][0]) - 1)
    for axis, (name, (z, positives)) in zip(axes, pairs.items()):
        positive, nearest = hardneg.local_separation(z, positives, k)
        ahead[name] = 100 * float((positive > nearest[:, 0]).float().mean())
        columns = torch.cat([positive[:, None], nearest], 1).cpu()
        boxes = axis.boxplot(columns.numpy(), positions=range(k + 1), widths=0.7, whis=(5, 95), showfliers=False,
                             patch_artist=True, medianprops={"color": "white", "linewidth": 1.5})
        for box, ink in zip(boxes["boxes"], [INK["same"]] + [INK[name]] * k):
            box.set(facecolor=ink, edgecolor=ink)
        axis.set_xticks(range(k + 1), ["same\nimage", *range(1, k + 1)])
        axis.set(title=f"{name} encoder", xlabel="and the nearest others, in order")
    axes[0].set_ylabel("cosine")
    save_picture(path, figure, f"{ahead['trained']:.0f} % of the positives are nearer than every negative "
                 f"(untrained: {ahead['untrained']:.0f} %)", f"""
        Two random views of {len(z)} test images: the positive is the other view of an image, the negatives are views of
        others. Boxes hold the middle half, whiskers 90 %. What counts is how far the green box is above the others,
        not its height. Medians, trained: {columns[:, 0].median():.2f} and, of the nearest,
        {columns[:, 1].median():.2f}.""")


def rank_axis(axis, **names):
    """A logarithmic axis of ranks, in plain numbers."""
    axis.set(xscale="log", **names)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")


def draw_losses(axis, x, curves, own, **legend):
    """A line for each loss, that of the run's own thick, below the others."""
    for name, curve in curves.items():
        look = {"linewidth": 4, "zorder": 1, "alpha": 0.7} if name == own else {"linewidth": 1.5}
        axis.plot(x, curve.cpu().numpy(), color=LOSS_INK.get(name, "#cc79a7"), **look,
                  label=f"{name} (this run)" if name == own else name, marker="o" if (curve > 0).sum() == 1 else "",
                  markevery=[int(curve.argmax())])
    axis.legend(**legend)


def draw_gradient(path, losses, own, n=500, positive=0.7):
    """How hard a negative is moved, by its cosine ([4] Fig. 3)."""
    cosines = torch.linspace(-1, 1, n)
    # "ot" asks for a batch: here every anchor, and every candidate, has the same cosines, so that none is near to all
    batch = torch.stack([cosines.roll(k) for k in range(n)])
    ratios = {name: hardneg.gradient_ratio(batch, torch.full((n,), positive), **options)[0].nan_to_num()
              for name, options in losses.items()}
    share = {name: 100 * float(r[-n // 10:].sum() / r.clamp_min(0).sum().clamp_min(1e-9)) for name, r in ratios.items()}
    figure, axis = plt.subplots()
    draw_losses(axis, cosines.numpy(), ratios, own, loc="upper left")
    axis.axvline(positive, color="#999999", linestyle=":", linewidth=1)
    axis.text(positive, 2e-6, "positive ", ha="right", color="#777777")
    axis.set(xlabel="cosine of the negative with the anchor", ylabel="force on it, as a share of that on the positive",
             yscale="log", ylim=(1e-6, 2))
    pulled = cosines[ratios["hcl"] < 0]
    pull = f"""hcl begins at {pulled[-1]:.2f}: its gradient also runs through the weights, and pulls what is farther
               instead of pushing it.""" if len(pulled) else ""
    save_picture(path, figure, f"{own} spends {share[own]:.0f} % of its force on the nearest tenth "
                 f"(simclr: {share['simclr']:.0f} %)", f"""
        {n} negatives with cosines spread evenly over [−1, 1], and a positive at {positive}, for losses with this run's
        options. The steeper a line, the more the hard negatives count. {pull}""")


def draw_weights(path, z, losses, own):
    """How much the candidates of an anchor count, from the nearest to the farthest ([2] Fig. 4)."""
    weights = {name: hardneg.weights_by_rank(z, **losses[name])[1].mean(0)
               for name in dict.fromkeys(("ot", "hcl", "hard", own))}
    exponential = ((2 * hardneg.neighbours(z)[0]).softmax(1) * (len(z) - 1)).mean(0)
    figure, axis = plt.subplots()
    axis.plot(range(1, len(z)), exponential.cpu().numpy(), color="#777777", linestyle="--", label="exp(2 cos)")
    draw_losses(axis, range(1, len(z)), weights, own)
    rank_axis(axis, xlabel="rank of the candidate, from the nearest", ylabel="weight, mean over the anchors")
    save_picture(path, figure, f"{own} gives the nearest candidate the weight {weights[own][0]:.2g}, the farthest "
                 f"{weights[own][-1]:.2g}", f"""
        {len(z)} test images, each an anchor with all others as candidates, embedded by the trained encoder. simclr's
        weights are 1. hcl looks at each anchor alone; ot shares weights out over a batch, so that every candidate
        counts as much in total; hard drops all but the nearest. exp(2 cos), of mean 1, is hcl at β = 1, t = 0.5.""")


def draw_neighbours(path, z, labels):
    """How many of the anchors have a nearest neighbour of their class, by its rank ([2] Fig. 5)."""
    n, (_, members) = len(labels), labels.unique(return_counts=True)
    chance, k = 100 * float((members * (members - 1)).sum()) / (n * (n - 1)), min(10, n - 1)
    starts = (1.25 ** torch.arange(80)).long().unique()  # a point for 1, 2, 3, 4, 5, 6 and 7, 8 and 9, … neighbours
    starts = starts[starts < n]
    figure, axis = plt.subplots()
    for name, x in z.items():
        share = 100 * hardneg.same_class_by_rank(x, labels).cpu() / n
        axis.plot(starts.numpy(), [float(part.mean()) for part in share.tensor_split((starts[1:] - 1).tolist())], "o-",
                  color=INK[name], label=f"{name} encoder: {share[:k].mean():.0f} % of the nearest {k}")
    axis.axhline(chance, color="black", linestyle="--", linewidth=1, label=f"chance: {chance:.0f} %")
    rank_axis(axis, xlabel="rank of the neighbour, from the nearest", ylabel="% of the anchors that are of its class",
              ylim=(0, None))
    axis.legend()
    save_picture(path, figure, f"{share[:k].mean():.0f} % of the {k} nearest neighbours are of the anchor's class "
                 f"(chance: {chance:.0f} %)", f"""
        {n} test images, each with all others in the order of their cosines; a point is the mean of the ranks up to the
        next. High on the left, the encoder has found the classes. But it is also where hard negatives push: what is of
        the anchor's class there, is a false negative.""")


def draw_nearest(path, test, labels, z, classes, rows=8, columns=8):
    """An image of each class, and the test images that are nearest to it by their embeddings ([2] Fig. 2)."""
    index = hardneg.neighbours(z, min(columns, len(test) - 1))[1]
    anchors = torch.stack([(labels == c).nonzero()[0, 0] for c in labels.unique()[:rows]])
    same = (labels[index] == labels[:, None])[anchors].cpu()
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.73 * len(anchors)))
    for row, anchor in enumerate(anchors):
        axis.text(-0.15, row + 0.43, classes[labels[anchor]][:20], ha="right", va="center")
        axis.text(index.shape[1] + 1.35, row + 0.43, f"{same[row].sum()} of {index.shape[1]}", va="center")
        for column, k in enumerate([anchor, *index[anchor]]):
            left = column + 0.3 * (column > 0)
            axis.imshow(test[k].permute(1, 2, 0).cpu().numpy(), extent=(left, left + 0.86, row + 0.86, row))
            if column:
                ink = INK["same" if same[row, column - 1] else "other"]
                axis.add_patch(plt.Rectangle((left, row), 0.86, 0.86, fill=False, edgecolor=ink, linewidth=3))
    axis.set(xlim=(-0.1, index.shape[1] + 1.3), ylim=(len(anchors), -0.1))
    axis.axis("off")
    save_picture(path, figure, f"{same.sum()} of these {same.numel()} neighbours are of the image's class", f"""
        Left, a test image of each class; beside it its neighbours, nearest first, among the other {len(test) - 1}, by
        the cosine of the trained encoder's embeddings. In a green frame, of the same class; in an orange one, of
        another. What these share with the image is what the encoder goes by.""")


def draw_uniformity(path, rows, z, labels):
    """Uniformity against tolerance of the pixels, of the untrained and of the trained encoder ([4] Eq. 10, 11)."""
    classes = torch.nn.functional.one_hot(labels).float()
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z)
    ideals = {"all at one point": torch.ones_like(z), "scattered at random": noise,
              "one point for each class": classes - 1 / classes.shape[1]}
    figure, axis = plt.subplots()
    for name, x in ideals.items():
        place = float(hardneg.uniformity(x)), float(hardneg.tolerance(x, labels))
        axis.plot(*place, "+", color="#777777", markersize=9)
        axis.annotate(name, place, (0, 9 if place[1] > 0.5 else -19), textcoords="offset points", ha="center",
                      color="#777777")
    for name, row in rows.items():
        place = row["uniformity"], row["tolerance"]
        axis.plot(*place, "o", color=INK[name], markersize=11)
        below = {"xytext": (0, -20), "ha": "center"} if name != "trained" else {"xytext": (10, -5)}
        axis.annotate("raw pixels" if name == "raw" else name, place, textcoords="offset points", color=INK[name],
                      fontweight="bold", **below)
    axis.set(xlabel="uniformity (the farther right, the more even)", xlim=(0.6, -4.6), ylim=(-0.25, 1.2),
             ylabel="tolerance (the higher, the closer a class)")
    moved = [f"{name} from {rows['untrained'][name]:.2f} to {rows['trained'][name]:.2f}"
             for name in ("uniformity", "tolerance")]
    save_picture(path, figure, f"Training took {', '.join(moved)}", """
        Neither alone is good: nothing is more tolerant than to map all images to one point, and nothing more even than
        to scatter them at random (marked +, for these test images). Best is the upper right: one point for each class.
        Smaller temperatures and harder negatives go to the right, at the cost of height.""")


def draw_histograms(path, z, labels):
    """Densities of the cosines of pairs of one class, and of pairs of different classes ([1] App. B)."""
    figure, axes = plt.subplots(1, 2)
    overlap, bins = {}, min(200, max(20, len(labels) // 10))
    for axis, (name, x) in zip(axes, z.items()):
        edges, same, other = (part.cpu() for part in hardneg.cosine_histograms(x, labels, bins))
        both = torch.minimum(same, other)
        overlap[name] = 200 / bins * float(both.sum())
        axis.stairs(both.numpy(), edges.numpy(), fill=True, color="#dddddd", label="overlap of the two")
        axis.stairs(same.numpy(), edges.numpy(), color=INK["same"], linewidth=1.5, label="pairs of one class")
        axis.stairs(other.numpy(), edges.numpy(), color=INK["other"], linewidth=1.5, label="pairs of different classes")
        axis.set(title=f"{name} encoder: {overlap[name]:.0f} %", xlabel="cosine", xticks=(-1, -0.5, 0, 0.5, 1))
    axes[0].set_ylabel("density")
    axes[0].legend(loc="upper left")
    near, far = (float((part * (edges[1:] + edges[:-1])).sum()) / bins for part in (same, other))
    save_picture(path, figure, f"One class and different classes overlap by {overlap['trained']:.0f} % "
                 f"(untrained: {overlap['untrained']:.0f} %)", f"""
        Cosines of all pairs of {len(labels)} test images. The grey area is 100 % where a cosine says nothing about the
        class, 0 % where a threshold says all. Trained, the mean is {near:.2f} for pairs of one class, {far:.2f} for
        others. Pairs of different classes on the right are hard negatives, pairs of one class there are false ones.""")


if __name__ == "__main__":
    main()
