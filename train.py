"""Train an encoder without labels, and see what it has learned: python train.py --loss hard --alpha 0.3

A progress bar, then a table of how well the features of the raw pixels, of the untrained and of the trained encoder
tell the classes apart; results.json, curves.png and the checkpoint lie in the folder of --out.
"""
import argparse
import json
import math
import os
import pickle
import platform
import sys
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
    group.add_argument("--loss", default="hcl", choices=hardneg.PRESETS, help="a preset of weights and objective")
    group.add_argument("--weights", choices=hardneg.WEIGHTS, help="weights of the negatives, instead of the loss's own")
    group.add_argument("--objective", choices=hardneg.OBJECTIVES,
                       help="what is done with them, instead of the loss's own")
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
    group.add_argument("--size", type=int, metavar="S",
                       help="side in pixels that a folder's images are brought to; None: that of the first one, if it "
                            "is square and at most 96")

    group = parser.add_argument_group("training")
    group.add_argument("--method", default="simclr", choices=("simclr",),
                       help="where the views and candidates come from")
    group.add_argument("--encoder", default="small", choices=("small", "resnet18", "resnet50"), help="the network")
    group.add_argument("--epochs", type=int, default=16, metavar="N", help="times that every image is seen")
    group.add_argument("--batch-size", type=int, default=256, metavar="B", help="images in a batch, at least 2")
    group.add_argument("--lr", type=float, default=8e-3, metavar="LR", help="highest learning rate, of AdamW")
    group.add_argument("--weight-decay", type=float, default=1e-4, metavar="W", help="of AdamW")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of the weights, the order and the views")
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", metavar="D",
                       help="cpu, cuda, …")
    group.add_argument("--out", type=Path, metavar="DIR",
                       help="folder for what comes out; None: runs/DATA-METHOD-LOSS-SEED")
    group.add_argument("--resume", action=flag,
                       help="go on from the last epoch saved in DIR, or begin anew; None: go on with a run of the same "
                            "options that was stopped")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = Path("runs") / f"{Path(args.data).name}-{args.method}-{args.loss}-{args.seed}"
    return args


def main(argv=None):
    args = arguments(argv)
    try:
        run(args)
    except KeyboardInterrupt:
        saved = (args.out / "checkpoint.pt").exists() and not (args.out / "results.json").exists()
        sys.exit(f"\nStopped; {'the same command goes on from the last epoch' if saved else 'no epoch was finished'}.")
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:  # of arguments, data, a loss, a disk
        sys.exit(f"train.py: {error}")


def run(args):
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    options = {name: getattr(args, name) for name in ("weights", "objective", "temperature", "tau_plus", "beta",
                                                      "alpha", "epsilon", "cost", "kappa", "margin")}
    criterion = hardneg.ContrastiveLoss(args.loss, **options)
    schedules, fixed = {}, {"alpha": "--no-lead-in", "beta": "--no-anneal"}
    if args.lead_in and criterion.resolved.weights == "top":
        schedules["alpha"] = lambda progress: hardneg.lead_in(progress, args.alpha)
    if args.anneal and criterion.resolved.weights == "tilted":
        schedules["beta"] = lambda progress: hardneg.annealed_beta(progress, args.beta)
    print(f"reading {args.data} …", flush=True)
    images = hardneg.load(args.data, args.root, args.size, args.fraction).to(device)
    encoder = hardneg.Encoder(args.encoder, size=images.train.shape[-1]).to(device)
    view_options = {"blur": 0.5} if images.train.shape[-1] > 64 else {}  # blurred, small images lose what they show
    training = hardneg.Training(encoder, images, criterion, args.epochs, args.batch_size, args.lr, args.weight_decay,
                                schedules, view_options, args.true_positives, seed=args.seed)
    print(f"{args.data}: {len(images.train)} images to train on, {len(images.test)} to test, "
          f"{len(images.classes)} classes, {images.train.shape[-1]} × {images.train.shape[-1]} pixels, on {device}")
    print(criterion)
    for name, schedule in schedules.items():
        print(f"{name} goes from {schedule(0.0):g} to {schedule(1.0):g} over the run; {fixed[name]} keeps it at "
              f"{getattr(args, name):g}")

    args.out.mkdir(parents=True, exist_ok=True)
    if not os.access(args.out, os.W_OK):
        raise ValueError(f"--out: {args.out} cannot be written to")
    same = {k: v for k, v in vars(args).items() if k not in ("out", "resume", "device", "root")}
    state = restore(args, training, same) or {"history": [], "seconds": 0.0, "before": None}
    if state["before"] is None:
        print("how well the classes can be told by the raw pixels, and by the encoder before it is trained …",
              flush=True)
        state["before"] = {"raw": hardneg.evaluate(None, images), "untrained": hardneg.evaluate(encoder, images)}
    learn(args, training, state, same)
    report(args, state, hardneg.evaluate(encoder, images), len(images.train))


def restore(args, training, same):
    """The state of the last epoch saved in DIR, to which training is brought; None where the run begins anew.

    Without --resume or --no-resume, a run that was stopped goes on if its options are the same.
    """
    path, results = args.out / "checkpoint.pt", args.out / "results.json"
    if not path.exists() or args.resume is False:
        if args.resume:
            raise ValueError(f"--resume: there is no {path}")
        return begin_anew(path, results)
    try:
        state = torch.load(path, map_location=args.device, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({error}); --no-resume begins anew") from error
    other = [f"--{k.replace('_', '-')} was {v}" for k, v in state["args"].items() if v != same[k]]
    if results.exists() and not args.resume:  # that run was finished
        return begin_anew(path, results)
    if other:
        raise ValueError(f"{path} is of a run with other options: {', '.join(other)}. --no-resume discards it, --out "
                         "names another folder")
    training.load_state_dict(state["training"])
    print(f"resumed after epoch {training.epoch} of {args.epochs} (--no-resume begins anew)")
    return state


def begin_anew(*leftovers):
    for path in leftovers:
        path.unlink(missing_ok=True)


def learn(args, training, state, same):
    """Train to the end, with a progress bar; everything needed to go on is saved after each epoch."""
    if chance := chance_level(training):
        print(f"chance, all similarities equal: {chance}")
    bar = tqdm(total=training.steps, initial=training.epoch * training.batches, unit="step", dynamic_ncols=True)
    sums, start, last = {}, time.perf_counter(), time.perf_counter()
    images = 0
    for progress in training:
        images += progress["images"]
        for name in ("loss", "positive", "negative", "ess", "clamped"):
            sums.setdefault(name, []).append(progress[name])
        bar.update()
        now = time.perf_counter()
        if now - last > 0.2 or progress["step"] == training.steps:
            last = now
            bar.set_postfix_str(f"loss {float(progress['loss']):.3f}, {images / (now - start):.0f} images/s")
        if progress["step"] % training.batches == 0:
            state["history"].append({name: float(torch.stack(values).mean()) for name, values in sums.items()})
            state["seconds"] += time.perf_counter() - start
            save(args.out / "checkpoint.pt", {**state, "args": same, "training": training.state_dict()})
            sums, start, images = {}, time.perf_counter(), 0
    bar.close()


def chance_level(training):
    """What the loss of an encoder that tells nothing apart would be, said as a formula."""
    o, n = training.criterion.resolved, 2 * math.ceil(len(training.images.train) / training.batches) - 2
    if o.objective not in ("nce", "ppcl") or o.weights == "top":
        return None
    return f"log(2B − 1) = log({n + 1}) = {math.log(n + 1):.2f}"


def save(path, state):
    """Write beside, then move: a kill in the middle leaves the last one whole."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def report(args, state, trained, n):
    raw, untrained = state["before"]["raw"], state["before"]["untrained"]
    print(f"\n{'':18}{'linear %':>10}{'kNN %':>10}{'uniformity':>12}{'tolerance':>12}")
    for name, row in (("raw pixels", raw), ("untrained encoder", untrained), ("trained encoder", trained)):
        print(f"{name:18}{row['linear']:10.1f}{row['knn']:10.1f}{row['uniformity']:12.2f}{row['tolerance']:12.2f}")
    short = [{k: round(row[k], 2) for k in ("linear", "knn")} for row in (untrained, raw)]
    results = {"loss": args.loss, "method": args.method, "data": args.data, "seed": args.seed, "epochs": args.epochs,
               "seconds": round(state["seconds"], 1),
               "images_per_second": round(n * args.epochs / state["seconds"], 1),
               **{k: None if math.isnan(v) else round(v, 4) for k, v in trained.items()},
               "untrained": short[0], "raw": short[1],
               "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
               "versions": {"python": platform.python_version(), "torch": torch.__version__,
                            "torchvision": torchvision.__version__}}
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw_curves(args.out / "curves.png", state["history"])
    print(f"{state['seconds']:.0f} s of training, {results['images_per_second']:.0f} images/s; "
          f"results.json, curves.png and checkpoint.pt are in {args.out}/")


def draw_curves(path, history):
    epochs = range(1, len(history) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(epochs, [h["loss"] for h in history])
    left.set(xlabel="epoch", ylabel="loss", title="loss, mean of each epoch")
    right.plot(epochs, [h["positive"] for h in history], label="positives")
    right.plot(epochs, [h["negative"] for h in history], label="negatives")
    right.set(xlabel="epoch", ylabel="mean cosine", title="views of one image, and of others", ylim=(-1.05, 1.05))
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
