"""Load images to train on, as uint8 (n, 3, H, W).

They are the built-in shapes, a set of torchvision's, or a folder of your own.
"""

import contextlib
import functools
import math
import os
import re
import statistics
import warnings
import zlib
from collections import namedtuple
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import functional as T
from tqdm import tqdm

from hardneg import InvalidArgument
from training import cache, ranks, require, shown
from training.cache import Rows

Drawn = namedtuple("Drawn", "images targets")  # the built-in shapes, which are decoded already
# A row has a class of torchvision.datasets, and its arguments for training images and test images.
TORCHVISION = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),  # some have label −1
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
}
# Options of hardneg.view, if they differ from its defaults. "small" is as in the code of [1], and
# "coloured" as in [4].
VIEWS = {"default": {}, "small": {"area": (0.08, 1.0), "blur": 0.5}}
VIEWS["coloured"] = {"jitter": 1.0, "hue": 0.4}
ENDINGS = Image.registered_extensions()  # of names: the format
# What Pillow decodes by itself. For others it may start a program, such as Ghostscript for EPS.
FORMATS = "AVIF BMP DIB GIF ICO JPEG JPEG2000 MPO PCX PNG PPM SGI TGA TIFF WEBP".split()
FORMATS = sorted(Image.OPEN.keys() & FORMATS)
# A folder is that of a split if its name has one of these words, in upper or lower case. If there
# are several to test on, the first in this order is taken.
TRAIN = ["train", "training"]
TEST = ["test", "testing", "val", "valid", "validation", "dev"]
KNOWN = f"shapes, {', '.join(TORCHVISION)}, or a folder"


class Images(NamedTuple):
    """A training set and a test set."""

    train: Tensor | Rows  # (n, 3, H, W), uint8
    train_labels: Tensor  # (n,), −1 where an image has none
    test: Tensor | Rows  # (m, 3, H, W)
    test_labels: Tensor  # (m,)
    classes: list[str]  # their names, or empty if there are no classes
    split: str = ""  # a sentence on what is for testing
    checksums: tuple = ()  # of the content and labels of both


def load(
    data="shapes",
    root="data",
    size=None,
    fraction=1.0,
    validation=False,
    seed=0,
    kept=None,
):
    """Load "shapes", a set of TORCHVISION or a folder of images.
    The arguments are the options of train.py that have the same names. kept is --cache. Without it
    all is decoded into memory."""
    split = "The data set has test images of its own."
    if data == "shapes":
        size, classes = size or 32, SHAPES
        train = shapes(8000, seed=seed, size=size)
        test = shapes(2000, seed=seed + 10**6, size=size)
    elif data in TORCHVISION:
        train, test, classes = from_torchvision(data, root)
    else:
        require(Path(data).is_dir(), "--data", data, f"{KNOWN} that exists")
        train, test, classes, split = from_folder(Path(data))
    labels, size = labels_of(train), size or side_of(train)
    chosen = torch.arange(len(labels))
    if validation or test is None:
        split = "Every fifth image to train on is held out for testing."
        held = every_fifth(labels)
        test, tested, chosen = train, chosen[held], chosen[~held]
    else:
        tested = torch.arange(len(labels_of(test)))
    chosen = chosen[share(labels[chosen], fraction, seed)]
    *train, of_train = take(train, chosen, size, kept)
    *test, of_test = take(test, tested, size, kept)
    images = Images(*train, *test, classes, split, (of_train, of_test))
    n, m = len(images.train), len(images.test)
    if min(n, m) < 2:
        raise InvalidArgument(
            f"--data is {data}, with {n} readable images to train on and {m} to test. At least 2 "
            "of each are needed. Without test/, every fifth image of a class is for testing."
        )
    return images


def read(options):
    """Load the images that `train.Options` name, and print what they are."""
    kept = options.cache or cache.home()
    with ranks.first_before_others():  # it may download and decode
        images = load(root=options.root, kept=kept, **options.of("images"))
    device, names = torch.device(options.device), ["train_labels", "test_labels"]
    if fits(images, device):
        names += ["train", "test"]
    images = images._replace(**{name: getattr(images, name).to(device) for name in names})
    n, m, side = len(images.train), len(images.test), images.train.shape[-1]
    kinds = "without classes, as it has fewer than two folders of images, so without accuracies"
    if images.classes:
        kinds = f"of {len(images.classes)} classes ({some(images.classes)})"
    print(
        f"{shown(options.data)} has {n} images to train on and {m} to test, {kinds}. "
        f"All have {side} × {side} pixels and are on {images.train.device}. {images.split}",
        flush=True,
    )
    return images


def fits(images, device):
    """Whether images may move to a device. On a GPU they fill at most a third of its memory."""
    if device.type == "cuda":
        third = torch.cuda.get_device_properties(device).total_memory / 3
        return math.prod(images.train.shape) + math.prod(images.test.shape) <= third
    return device.type != "cpu"


def some(names):
    """Name the first three."""
    text = ", ".join(map(str, names[:3]))
    if len(names) > 3:
        text += ", …"
    return text


def share(labels, fraction, seed):
    """Draw a share of each class, and at least one image of it → their indices in order."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = [order[:0]]
    for label in labels.unique():
        members = order[labels[order] == label]
        parts.append(members[: max(1, round(fraction * len(members)))])
    return torch.cat(parts).sort().values


def every_fifth(labels):
    """Mark every fifth image of each class.
    Images without a label are marked only if no image has one, as they can test little."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        if label >= 0 or labels.max() < 0:
            members = (labels == label).nonzero()[:, 0]
            held[members[4::5]] = True
    return held


def even(labels, n):
    """Draw about n images, or all if they are fewer, an equal share of each class."""
    return share(labels.cpu(), min(1, n / len(labels)), 0)


def at_most(images, n):
    """Take about n training and n test images, an equal share of each class."""
    train, test = even(images.train_labels, n), even(images.test_labels, n)
    few = {"train": Rows(images.train, train), "train_labels": images.train_labels[train]}
    few |= {"test": Rows(images.test, test), "test_labels": images.test_labels[test]}
    return images._replace(**few)


# ---- The built-in images: an outline is a class ------------------------------------------------

SHAPES = "disc ellipse triangle square star clover peanut heart cross gear".split()


def outlines(a):
    """Yield the distance from the centre to each outline in direction a, at most about 1."""
    cos, sin = a.cos(), a.sin()
    yield torch.full_like(a, 0.8)
    yield 0.45 / torch.sqrt((0.45 * cos) ** 2 + sin**2)
    yield polygon(a, 3) * 1.1
    yield polygon(a, 4)
    yield 0.65 + 0.35 * (5 * a).cos()
    yield 0.6 + 0.4 * (3 * a).cos()
    yield 0.3 + 0.7 * cos**2
    yield (2 - 2 * sin + sin * cos.abs().sqrt() / (sin + 1.4)) / 3.2
    yield 0.32 / torch.minimum(cos.abs(), sin.abs()).clamp_min(0.32)
    yield 0.8 + 0.2 * torch.tanh(6 * (8 * a).cos())


def polygon(a, corners):
    """Return the distance from the centre to the outline of a regular polygon in direction a."""
    half = math.pi / corners  # half the angle of a side
    from_middle = a.remainder(2 * half) - half
    return math.cos(half) / from_middle.cos()


CRAYONS = [[0.85, 0.25, 0.2], [0.2, 0.4, 0.85], [0.9, 0.8, 0.3], [0.15, 0.15, 0.15]]
CRAYONS = torch.tensor(CRAYONS)[:, :, None, None]


def shapes(n=8000, seed=0, size=32):
    """Draw n images of outlines → uint8 (n, 3, size, size), labels (n,).
    Colours, place, scale, rotation and noise are random. A seed repeats its images."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(n, generator=generator) % len(SHAPES)
    parts = [draw_shapes(part, size, generator) for part in labels.split(2000)]  # to save memory
    return Drawn(torch.cat(parts), labels)


def draw_shapes(labels, size, generator):
    """Draw one image for each label → uint8 (k, 3, size, size)."""
    k = len(labels)
    rand = functools.partial(torch.rand, generator=generator)
    axis = (torch.arange(size) + 0.5) / size * 2 - 1  # of pixels, from −1 to 1
    radius = 0.45 + 0.35 * rand(k, 1, 1)
    turn = 2 * math.pi * rand(k, 1, 1)
    x = axis - 0.6 * (rand(k, 1, 1) - 0.5)
    y = axis[:, None] - 0.6 * (rand(k, 1, 1) - 0.5)
    angle = torch.atan2(y, x) + turn + math.pi
    angle = angle.remainder(2 * math.pi) - math.pi  # (k, size, size)
    edge = torch.empty(k, size, size)
    for label, outline in enumerate(outlines(angle)):
        edge[labels == label] = outline[labels == label]
    distance = (x * x + y * y).sqrt()
    inside = torch.sigmoid((edge * radius - distance) * size / 2)[:, None]  # 0.5 at the edge
    first = torch.randint(len(CRAYONS), (k,), generator=generator)
    step = torch.randint(1, len(CRAYONS), (k,), generator=generator)
    second = (first + step) % len(CRAYONS)  # another colour
    ink = CRAYONS[first] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
    paper = CRAYONS[second] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
    light = 0.9 + 0.2 * rand(k, 1, 1, 1)
    clean = light * (paper + (ink - paper) * inside)  # (k, 3, size, size)
    noisy = clean + 0.05 * torch.randn(k, 3, size, size, generator=generator)
    return (noisy.clamp(0, 1) * 255).to(torch.uint8)


# ---- torchvision's sets, and folders -------------------------------------------------------------


def from_torchvision(name, root):
    """Open one of torchvision's sets in the folder root, or download it there → sets, classes."""
    kind, *parts = TORCHVISION[name]
    try:
        train, test = (getattr(datasets, kind)(root, download=True, **part) for part in parts)
    except Exception as error:  # errors of the network, the disk and the archive differ in type
        message = f"{name} is not in {root}/ and cannot be downloaded ({error})."
        raise InvalidArgument(f"{message} Put it there, or say by --root where it is.") from error
    return train, test, [str(name) for name in getattr(train, "classes", range(10))]


class Folder:
    """Open the images at some paths in a folder.
    Each folder in it is a class. If it has fewer than two folders, there are no classes."""

    def __init__(self, root, paths):
        n = len(root.parts)  # by parts, as pathlib's own ways take seconds for many files
        tops = {path: path.parts[n] for path in paths if path.parts[:n] == root.parts}
        names = sorted({top for path, top in tops.items() if path.name != top})
        if len(names) == 1:  # one class alone cannot be told from others
            names = []
        labels = {name: k for k, name in enumerate(names)}
        self.classes = [shown(name) for name in names]
        self.imgs = [path for path, top in tops.items() if top in labels or not names]
        self.targets = [labels.get(tops[path], -1) for path in self.imgs]

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, k):
        return Image.open(self.imgs[k], formats=FORMATS), self.targets[k]


def find(folder, home, seen, left_out):
    """List the files in a folder, at any depth, that Pillow may open.
    left_out gets the reason for each of the others. Links to what is read anyway, in the folder
    home, are not followed, nor those to a folder that was seen before."""
    paths = []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if name[0] == ".":
            left_out[path] = "are hidden"
        elif path.is_dir():
            real = path.resolve()
            if real in seen or (path.is_symlink() and real.is_relative_to(home)):
                left_out[path] = "are links to what is read elsewhere"
                continue
            seen.add(real)
            inner = find(path, home, seen, left_out)
            if not inner:
                left_out[path] = "have no images"
            paths += inner
        elif path.is_file() and ENDINGS.get(path.suffix.lower()) in FORMATS:
            paths.append(path)
        else:
            left_out[path] = "do not end as names of images do"
    return paths


def words_of_split(names):
    """Find the names that have a word of TRAIN + TEST → {name: its word}, in the order of words."""
    found = {}
    for word in TRAIN + TEST:
        for name in names:
            if word in re.findall("[a-z]+", name.lower()):
                found.setdefault(name, word)
    return found


def places_of(folder, paths):
    """Find the folder to train on and the one to test on, if there are any, by their names.
    Otherwise the folder itself is the only place. What could be either is an error."""
    inner = {}  # {folder: the names of all folders in it}
    for path in paths:
        parts = path.parts[len(folder.parts) :]
        if len(parts) > 1:
            inner.setdefault(parts[0], set()).update(parts[1:-1])
    outer = words_of_split(inner)
    named, others = list(outer), sorted(inner.keys() - outer)
    to_train = sum(word in TRAIN for word in outer.values())
    if to_train == 1 and not others:
        return [folder / name for name in named[:2]]
    deeper = words_of_split([name for names in inner.values() for name in names])
    if {word in TRAIN for word in deeper.values()} == {True, False}:
        raise InvalidArgument(
            f"--data is {folder}, where {some(sorted(deeper))} lie deeper, which may be parts of a "
            "split. Expected is the folder that has them, with a folder for each class in them."
        )
    are_flat = not any(inner[name] for name in named)  # so they have no classes
    if not named or (others and are_flat and to_train in (0, len(named))):
        return [folder]
    raise InvalidArgument(
        f"--data is {folder}, where {some(named)} may be classes or parts of a split, with "
        f"{some(others) or 'nothing'} beside them. Expected is one folder to train on, and others "
        "to test on, such as train/ and test/. If these are classes, give them other names. "
        "Otherwise move the rest away."
    )


def from_folder(folder):
    """Find the images of a folder, or of folders such as train/ and test/ in it.
    → sets, classes, a sentence on the split. Without a folder to test on, that set is None."""
    left_out, home = {}, folder.resolve()
    paths = find(folder, home, set(home.parents), left_out)
    places = places_of(folder, paths)
    sets = [Folder(place, paths) for place in places]
    beside = dict.fromkeys(paths, "lie beside the folders that are read")
    for path in (path for part in sets for path in part.imgs):
        del beside[path]
    left_out |= beside
    for reason in sorted(set(left_out.values())):
        names = [path.relative_to(folder) for path, why in left_out.items() if why == reason]
        message = f"In {folder}, {len(names)} files or folders are left out, as they {reason}"
        warnings.warn(f"{message}, for example {some(names)}.", stacklevel=1)
    train, test = (sets + [None])[:2]
    names = " and ".join(f"{place.name}/" for place in places)
    if test is not None and test.classes != train.classes:
        raise InvalidArgument(
            f"--data needs the same classes in {names}. Only one of them has "
            f"{some(sorted(set(train.classes) ^ set(test.classes)))}. Add or remove these folders."
        )
    return train, test, train.classes, f"The split is that of {names}."


def side_of(dataset):
    """Return the median of the shorter sides of some readable images, even and from 8 to 96.
    If no image is readable, return 32."""
    sides, n = [], len(dataset)
    for k in range(0, n, n // 200 + 1):  # at most 200
        with contextlib.suppress(Exception):  # broken files raise exceptions of many types
            picture, _ = dataset[k]
            with picture:
                sides.append(min(picture.size))
    median = statistics.median_low(sides or [32])
    return min(96, max(8, median // 2 * 2))


def labels_of(dataset):
    """Return the labels of a set. torchvision calls them targets or labels."""
    labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    return torch.as_tensor(labels).long()


def colours_of(picture):
    """Convert a picture to RGB of 8 bits, the right way up.
    Deeper pixels are scaled by their depth, and floats from [0, 1]. What is transparent shows
    white. Of several frames the first is taken."""
    upright = ImageOps.exif_transpose(picture)
    if picture.mode[0] in "IF":  # I is 32 bits, I;16 is 16 bits, and F is floats
        bits_of_tiff = getattr(picture, "tag_v2", {}).get(258, (16,))
        most = 2 ** bits_of_tiff[0] - 1
        if picture.mode == "F":
            most = 1
        pixels = np.asarray(upright) / most
        is_known = most < 2**16 and 0 <= pixels.min() <= pixels.max() <= 1
        if not is_known:
            raise ValueError("its pixels must be of 8 or 16 bits, or floats from 0 to 1")
        upright = Image.fromarray((255 * pixels).round().astype(np.uint8))
    if upright.has_transparency_data:
        paper = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(paper, upright.convert("RGBA"))
    return upright.convert("RGB")


def take(dataset, index, size, kept):
    """Take some images of a set as squares → uint8 (n, 3, size, size), labels (n,), a checksum.
    If a folder may keep them, all files of the set are decoded, but only once. Files that cannot be
    read are left out, with a warning that names some."""
    labels = labels_of(dataset)[index]
    if isinstance(dataset, Drawn):
        images = dataset.images[index]
        return images, labels, zlib.crc32(images.numpy(), zlib.crc32(labels.numpy()))
    found = None
    if kept is not None and isinstance(dataset, Folder) and dataset.imgs:
        decoded = decode(dataset, torch.arange(len(dataset)), size)  # nothing yet
        found = cache.kept(kept, dataset.imgs, size, decoded)
    if found is not None:
        images, facts = Rows(found[0], index), [found[1][k] for k in index.tolist()]
    else:
        images, facts = torch.empty(len(index), 3, size, size, dtype=torch.uint8), []
        for image, fact in decode(dataset, index, size):
            images[len(facts)] = image
            facts.append(fact)
    broken = [fact for fact in facts if isinstance(fact, str)]
    if broken:
        message = f"{len(broken)} of {len(index)} files cannot be read and are left out"
        again = "" if found is None else " To try them again, remove what --cache keeps."
        warnings.warn(f"{message}, for example {some(broken)}.{again}", stacklevel=1)
        readable = torch.tensor([isinstance(fact, int) for fact in facts])
        images, labels = Rows(images, readable.nonzero()[:, 0]), labels[readable]
        facts = [fact for fact in facts if isinstance(fact, int)]
    return images, labels, zlib.crc32(repr([facts, labels.tolist()]).encode())


def decode(dataset, index, size):
    """Decode images of a set, and yield each as a square with its fact.
    A fact is the checksum of an image. If it cannot be read, the fact says why, and it is black."""

    def item(k):
        try:
            picture, _ = dataset[k]
            with picture:
                square = ImageOps.fit(colours_of(picture), (size, size))
            image = T.pil_to_tensor(square)
            return image, cache.checksum(image)
        except Exception as error:  # broken files raise exceptions of many types
            return torch.zeros(3, size, size, dtype=torch.uint8), f"{dataset.imgs[k]} ({error})"

    bar = tqdm(None, "reading", len(index), unit=" images", leave=False, delay=2, disable=None)
    with ThreadPool() as pool, bar:  # decoding releases Python's lock
        for few in index.split(512):  # so that no more wait in memory
            yield from pool.map(item, few.tolist())
            bar.update(len(few))
