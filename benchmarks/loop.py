"""Measure where the time of training goes: python benchmarks/loop.py

One table, in images per second. A row also gives its share of another row: the median over rounds
of the ratio of two measurements in one round.

    encoder alone       the encoder forward and backward, on views made before: the upper limit of
                        any loop
    training loop       hardneg.Training on images in memory: order, views, encoder, loss, optimizer
    views               hardneg.view, of a whole batch
    torchvision         the same crops, flips and colours by torchvision's transforms, image by
                        image
    decoding, N workers `decode` on JPEG files, once before training, by N processes (0: its own)
    per image           a DataLoader with torchvision's transforms on the same files, two views
                        each, as in the papers' code, with a process per core; without an encoder

On a GPU: --device cuda --encoder resnet18; --compile compiles the encoder. The results go to
loop.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from operator import truediv
from pathlib import Path

import torch
import torchvision
from torchvision import transforms as T
from torchvision.datasets.folder import default_loader
from torchvision.transforms.functional import resize, to_pil_image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
import train
from training.images import Folder, read

HERE = Path(__file__).resolve().parent
BY_TORCHVISION = T.Compose(
    [
        T.RandomResizedCrop(32, scale=(0.2, 1.0)),
        T.RandomHorizontalFlip(),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
        T.RandomGrayscale(0.2),
        T.ToTensor(),
    ]
)
WORKERS = os.cpu_count() or 1


class PerImage(torch.utils.data.Dataset):
    """Files as two views each, by torchvision."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, k):
        picture = default_loader(self.paths[k])
        return BY_TORCHVISION(picture), BY_TORCHVISION(picture)


def rate(step, options):
    """Repeat a step for about options.seconds → images per second."""
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    synchronize()
    begin, steps = time.perf_counter(), 0
    while steps == 0 or time.perf_counter() - begin < options.seconds:
        step()
        steps += 1
    synchronize()
    return steps * options.batch_size / (time.perf_counter() - begin)


def training_of(images, options):
    """Begin a training that does not end."""
    torch.manual_seed(0)
    encoder = hardneg.Encoder(options.encoder, size=32).to(options.device)
    if options.compile:
        encoder.compile()
    method = hardneg.SimCLR(hardneg.ContrastiveLoss("hcl", **hardneg.PAPERS["hcl"]))
    return hardneg.Training(encoder, images, method, epochs=10**6, batch_size=options.batch_size)


def trainer(images, options):
    """Return a function that takes one step of a training."""
    steps = iter(training_of(images, options))
    return lambda: next(steps)


def encoder_alone(images, options):
    """Return a function that does the encoder's part of a training step."""
    training = training_of(images, options)
    encoder = training.encoder.train()
    views = torch.cat([hardneg.view(images[: options.batch_size])] * 2)
    views = views.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(len(views), encoder.head[-1].out_features, device=options.device)

    def step():
        encoder.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=training.bfloat16):
            z = encoder(views)[1]
        z.backward(gradient.to(z.dtype))

    return step


def loader(paths, options):
    """Return a function that waits for one batch of `per image`."""

    def batches():
        while True:
            yield from torch.utils.data.DataLoader(
                PerImage(paths),
                options.batch_size,
                shuffle=True,
                drop_last=True,
                num_workers=WORKERS,
            )

    steps = batches()
    return lambda: next(steps)


def write_folder(images, path, n):
    """Write n images to train on and 200 to test as JPEG files.

    The files have 64 pixels a side, so that reading resizes them."""
    parts = (
        ("train", images.train[:n], images.train_labels[:n]),
        ("test", images.test[:200], images.test_labels[:200]),
    )
    for name, part, labels in parts:
        pictures = resize(part, [64, 64]).cpu()
        for k, (x, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
            target = path / name / str(label) / f"{k}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(x).save(target, quality=90)


def measure(options, path):
    """Time all rows, round after round → {row: rates}, {row: the row that its share is of}."""
    images = read(train.Options(device=options.device))
    write_folder(images, path, options.files)
    files = sorted(map(str, (path / "train").rglob("*.jpg")))
    folder = Folder(path / "train", 32)
    batch = images.train[: options.batch_size]
    pictures = [to_pil_image(x.cpu()) for x in batch]
    steps = {
        "encoder alone": encoder_alone(images.train, options),
        "training loop": trainer(images.train, options),
        "views": lambda: [hardneg.view(batch) for _ in range(2)],
        "torchvision": lambda: [[BY_TORCHVISION(x) for x in pictures] for _ in range(2)],
    }
    decoding = {f"decoding, {n} workers": n for n in sorted({0, WORKERS})}
    of = {"training loop": "encoder alone", "views": "torchvision", "per image": "training loop"}
    rates = {name: [] for name in (*steps, *decoding, "per image")}
    for step in steps.values():
        step()  # warm up: compile, load libraries, allocate
    for _ in tqdm(range(options.rounds)):
        for name, step in steps.items():
            rates[name].append(rate(step, options))
        for name, n in decoding.items():
            start = time.perf_counter()
            for _ in torch.utils.data.DataLoader(folder, batch_size=None, num_workers=n):
                pass
            rates[name].append(len(files) / (time.perf_counter() - start))
        step = loader(files, options)
        for _ in range(5):  # use up the batches read ahead
            step()
        rates["per image"].append(rate(step, options))
        del step  # end the workers, or they slow the next row down
    return {name: [round(x, 1) for x in found] for name, found in rates.items()}, of


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--encoder", default="small", choices=("small", "resnet18", "resnet50"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--files", type=int, default=4000, help="images in the folder")
    parser.add_argument("--compile", action="store_true", help="compile the encoder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "loop.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        rates, of = measure(options, Path(path))
    on_gpu = options.device == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    results = {
        "date": str(date.today()),
        "device": device,
        "encoder": options.encoder,
        "batch_size": options.batch_size,
        "compile": options.compile,
        "of": of,
        "rates": rates,
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(heading(results))
    print(table(results))


def heading(results):
    """Say what was measured, and on what."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    compiled = ", compiled" if results["compile"] else ""
    rounds = len(results["rates"]["views"])
    return (
        f"{results['date']}, {results['device']}, {results['encoder']}{compiled}, "
        f"batches of {results['batch_size']} images in two views, {rounds} rounds, {versions}"
    )


def table(results):
    """Write the Markdown table: medians, and the median share of another row."""
    lines = ["| | images/s | |", "|---|---|---|"]
    for name, found in results["rates"].items():
        share, other = "", results["of"].get(name)
        if other is not None:
            share = (
                f"{statistics.median(map(truediv, found, results['rates'][other])):.2f} × {other}"
            )
        lines.append(f"| {name} | {statistics.median(found):.0f} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
