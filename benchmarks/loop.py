"""Where the time of training goes: python benchmarks/loop.py

One table, in images per second; every row but the first says which share of another row it reaches, as the median over
rounds of two measurements of one round, taken one after the other.

    encoder alone       forward and backward of the encoder, on views that are there already: what no loop can beat
    training loop       hardneg.Training on images in memory: order, views, encoder, loss, optimizer, bookkeeping
    views               hardneg.view, for a whole batch
    torchvision         the same crops, flips and colours by torchvision's transforms, image after image
    folder, N workers   the training loop on JPEG files that N processes read and resize, 0: the one that trains
    per image           a DataLoader with torchvision's transforms on the same files, two views each, as the papers'
                        code has it, with as many processes as there are cores; the encoder would come on top

On a GPU: --device cuda --encoder resnet18, and --compile for the encoder by torch.compile. Results come to loop.json.
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
from torchvision.transforms.functional import to_pil_image
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import hardneg  # noqa: E402


class PerImage(torch.utils.data.Dataset):
    """Two views of a file by torchvision, as `view` draws them."""
    one = T.Compose([T.RandomResizedCrop(32, scale=(0.2, 1.0)), T.RandomHorizontalFlip(),
                     T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8), T.RandomGrayscale(0.2), T.ToTensor()])

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, k):
        from torchvision.datasets.folder import default_loader
        picture = default_loader(self.paths[k])
        return self.one(picture), self.one(picture)


def rate(step, images, options):
    """Images per second of the steps that fit in a second or so."""
    synchronize(options)
    begin, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - begin < options.seconds:
        step()
        done += images
    synchronize(options)
    return done / (time.perf_counter() - begin)


def synchronize(options):
    if options.device == "cuda":
        torch.cuda.synchronize()


def trainer(images, options):
    """A function that takes one step of a training that does not end."""
    torch.manual_seed(0)
    encoder = hardneg.Encoder(options.encoder, size=32).to(options.device)
    training = hardneg.Training(encoder, images, hardneg.ContrastiveLoss("hcl"), batch_size=options.batch_size,
                                epochs=10**6)
    if options.compile:
        training.encoder.compile()
    steps = iter(training)
    return lambda: next(steps)


def encoder_alone(images, options):
    """A function that does what a training step of the same batch asks of the encoder."""
    encoder = hardneg.Encoder(options.encoder, size=32).to(options.device, memory_format=torch.channels_last).train()
    if options.compile:
        encoder.compile()
    views = torch.cat([hardneg.view(images.train[:options.batch_size])] * 2)
    views = views.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(len(views), encoder.dim, device=options.device)

    def step():
        encoder.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=hardneg._has_bfloat16(views.device)):
            z = encoder(views)[1]
        z.backward(gradient.to(z.dtype))
    return step


def folder_of(images, path, n):
    """n of the images as JPEG files of 64 pixels, which have to be resized."""
    parts = ("train", images.train[:n], images.train_labels), ("test", images.test[:200], images.test_labels)
    for name, part, labels in parts:
        for k, (x, label) in enumerate(zip(hardneg._resized(part, 64).cpu(), labels.tolist())):
            target = path / name / str(label) / f"{k}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(x).save(target, quality=90)


def loader(paths, options):
    """A function that waits for one batch of `per image`."""
    def batches():
        while True:
            yield from torch.utils.data.DataLoader(PerImage(paths), options.batch_size, shuffle=True, drop_last=True,
                                                   num_workers=os.cpu_count() or 1)
    steps = batches()
    return lambda: next(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--encoder", default="small", choices=("small", "resnet18", "resnet50"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--compile", action="store_true", help="the encoder by torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "loop.json")
    options = parser.parse_args()
    images = hardneg.load("shapes").to(options.device)
    batch, b = images.train[:options.batch_size], options.batch_size
    pictures = [to_pil_image(x.cpu()) for x in batch]
    with tempfile.TemporaryDirectory() as path:
        path = Path(path)
        folder_of(images, path, 4000)
        streams = {n: hardneg.load(path, size=32, workers=n).to(options.device) for n in (0, os.cpu_count() or 1)}
        rows = {"encoder alone": encoder_alone(images, options), "training loop": trainer(images, options),
                "views": lambda: [hardneg.view(batch) for _ in range(2)],
                "torchvision": lambda: [[PerImage.one(x) for x in pictures] for _ in range(2)]}
        with_workers = {**{f"folder, {n} workers": lambda stream=stream: trainer(stream, options)
                           for n, stream in streams.items()},
                        "per image": lambda: loader(streams[0].train.paths, options)}
        of = {"training loop": "encoder alone", "views": "torchvision", "per image": "training loop",
              **{f"folder, {n} workers": "training loop" for n in streams}}
        rates = {name: [] for name in (*rows, *with_workers)}
        for step in rows.values():
            step()  # compiled, loaded, allocated
        for _ in tqdm(range(options.rounds)):
            for name, step in rows.items():
                rates[name].append(rate(step, b, options))
            for name, begin in with_workers.items():  # which end with it, and read nothing ahead while others are timed
                step = begin()
                for _ in range(5):  # what was read ahead is used up
                    step()
                rates[name].append(rate(step, b, options))
                del step
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    results = {"date": str(date.today()), "device": hardware, "encoder": options.encoder, "batch_size": b,
               "compile": options.compile, "of": of,
               "rates": {name: [round(x, 1) for x in found] for name, found in rates.items()},
               "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__}}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(heading(results))
    print(table(results))


def heading(results):
    """What was measured, on what."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (f"{results['date']}, {results['device']}, {results['encoder']}{', compiled' * results['compile']}, batches "
            f"of {results['batch_size']} images in two views, {len(results['rates']['views'])} rounds, {versions}")


def table(results):
    """Markdown: medians, and the median share of another row."""
    lines = ["| | images/s | |", "|---|---|---|"]
    for name, found in results["rates"].items():
        other = results["of"].get(name)
        share = "" if other is None else statistics.median(map(truediv, found, results["rates"][other]))
        share = share and f"{share:.2f} × {other}"
        lines.append(f"| {name} | {statistics.median(found):.0f} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
