"""Load images to train on, as uint8 (n, 3, H, W).

They are the built-in shapes, a set of torchvision's, or a folder of your own.
"""

import contextlib
import functools
import math
import os
import warnings
from collections import namedtuple
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import ImageOps
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import functional as T
from tqdm import tqdm

from hardneg import InvalidArgument
from training import require

BICUBIC = T.InterpolationMode.BICUBIC
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
KNOWN = f"shapes, {', '.join(TORCHVISION)}, or a folder"


class Images(NamedTuple):
    """A training set and a test set."""

    train: Tensor  # (n, 3, H, W), uint8
    train_labels: Tensor  # (n,), −1 where an image has none
    test: Tensor  # (m, 3, H, W)
    test_labels: Tensor  # (m,)
    classes: list[str]  # their names, or empty if there are no classes


def load(
    data: str = "shapes",
    root: str = "data",
    size: int | None = None,
    fraction: float = 1.0,
    validation: bool = False,
    seed: int = 0,
) -> Images:
    """Load "shapes", a set of TORCHVISION or a folder of images.
    The arguments are the options of train.py that have the same names."""
    if data == "shapes":
        size, classes = size or 32, SHAPES
        train = shapes(8000, seed=seed, size=size)
        test = shapes(2000, seed=seed + 10**6, size=size)
    elif data in TORCHVISION:
        train, test, classes = from_torchvision(data, root)
    else:
        require(Path(data).is_dir(), "--data", data, f"{KNOWN} that exists")
        train, test, classes = from_folder(Path(data))
    labels, size = labels_of(train), size or side_of(train)
    chosen = torch.arange(len(labels))
    if validation or test is None:
        held = every_fifth(labels, classes)
        test, tested, chosen = train, chosen[held], chosen[~held]
    else:
        tested = torch.arange(len(labels_of(test)))
    chosen = chosen[share(labels[chosen], fraction, seed)]
    images = Images(*decode(train, chosen, size), *decode(test, tested, size), classes)
    n, m = len(images.train), len(images.test)
    if min(n, m) < 2:
        raise InvalidArgument(
            f"--data is {data}, with {n} readable images to train on and {m} to test. At least 2 "
            "of each are needed. Without test/, every fifth image of a class is for testing."
        )
    return images


def read(options) -> Images:
    """Load the images that `train.Options` name, and print what they are."""
    images = load(root=options.root, **options.of("images"))
    tensors = [x.to(options.device) for x in images[:4]]
    images = Images._make(tensors + [images.classes])
    side = images.train.shape[-1]
    kinds = "without classes, so there are no accuracies"
    if images.classes:
        kinds = f"of {len(images.classes)} classes"
    n, m = len(images.train), len(images.test)
    print(f"{options.data} has {n} images to train on and {m} to test, {kinds}.")
    print(f"All have {side} × {side} pixels and are on {options.device}.", flush=True)
    return images


def share(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Draw a share of each class, and at least one image of it → their indices in order."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = [order[:0]]
    for label in labels.unique():
        members = order[labels[order] == label]
        parts.append(members[: max(1, round(fraction * len(members)))])
    return torch.cat(parts).sort().values


def every_fifth(labels: Tensor, classes: list) -> Tensor:
    """Mark every fifth image of each class.
    If there are classes, images without a label are not marked, as they cannot test anything."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        if label >= 0 or not classes:
            members = (labels == label).nonzero()[:, 0]
            held[members[4::5]] = True
    return held


def at_most(images: Images, n: int) -> Images:
    """Take about n training and n test images, an equal share of each class."""
    some = share(images.train_labels.cpu(), min(1, n / len(images.train)), 0)
    others = share(images.test_labels.cpu(), min(1, n / len(images.test)), 0)
    train = images.train[some], images.train_labels[some]
    return Images(*train, images.test[others], images.test_labels[others], images.classes)


# ---- The built-in images: an outline is a class ------------------------------------------------

SHAPES = "disc ellipse triangle square star clover peanut heart cross gear".split()


def outlines(a: Tensor) -> Iterator[Tensor]:
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


def polygon(a: Tensor, corners: int) -> Tensor:
    """Return the distance from the centre to the outline of a regular polygon in direction a."""
    half = math.pi / corners  # half the angle of a side
    from_middle = a.remainder(2 * math.pi / corners) - half
    return math.cos(half) / from_middle.cos()


CRAYONS = torch.tensor([[0.85, 0.25, 0.2], [0.2, 0.4, 0.85], [0.9, 0.8, 0.3], [0.15, 0.15, 0.15]])


def shapes(n: int = 8000, classes: int = 10, seed: int = 0, size: int = 32) -> Drawn:
    """Draw n images of outlines → uint8 (n, 3, size, size), labels (n,).
    There are 2 to 10 classes. Colours, place, scale, rotation and noise are random. A seed repeats
    its images."""
    require(2 <= classes <= len(SHAPES), "classes", classes, f"2 to {len(SHAPES)}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    labels = (torch.arange(n) % classes)[order]
    images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    for some in torch.arange(n).split(2000):  # to save memory
        images[some] = draw_shapes(labels[some], size, generator)
    return Drawn(images, labels)


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
    ink = CRAYONS[first][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
    paper = CRAYONS[second][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
    light = 0.9 + 0.2 * rand(k, 1, 1, 1)
    clean = light * (paper + (ink - paper) * inside)  # (k, 3, size, size)
    noisy = clean + 0.05 * torch.randn(k, 3, size, size, generator=generator)
    return (noisy.clamp(0, 1) * 255).to(torch.uint8)


# ---- torchvision's sets, and folders -------------------------------------------------------------


def from_torchvision(name: str, root: str) -> tuple:
    """Open one of torchvision's sets in the folder root, or download it there → sets, classes."""
    kind, of_train, of_test = TORCHVISION[name]
    try:
        train = getattr(datasets, kind)(root, download=True, **of_train)
        test = getattr(datasets, kind)(root, download=True, **of_test)
    except Exception as error:  # errors of the network, the disk and the archive differ in type
        message = f"{name} is not in {root}/ and cannot be downloaded ({error})."
        raise InvalidArgument(f"{message} Put it there, or say by --root where it is.") from error
    return train, test, [str(name) for name in getattr(train, "classes", range(10))]


class Folder(datasets.ImageFolder):
    """List the images of a folder, at any depth.
    Each folder in it is a class. If it has fewer than two folders, there are no classes."""

    def __init__(self, root: Path):
        super().__init__(root, is_valid_file=self.is_image, allow_empty=True)

    def find_classes(self, directory):
        names = [path.name for path in Path(directory).iterdir() if path.is_dir()]
        names = sorted(name for name in names if name[0] != ".")
        if len(names) < 2:  # one class alone cannot be told from others
            return [], {"": -1}
        return names, {name: k for k, name in enumerate(names)}

    def is_image(self, path):
        within = Path(path).relative_to(self.root)
        hidden = any(part[0] == "." for part in within.parts)
        return path.lower().endswith(IMG_EXTENSIONS) and not hidden


def from_folder(folder: Path) -> tuple:
    """Find the images of a folder, or of train/ and test/ (or val/) in it → sets, classes.
    Without test/ and val/, the set to test on is None."""
    places = []
    if (folder / "train").is_dir():
        places = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
        folder = folder / "train"
    train = Folder(folder)
    for name, k in train.class_to_idx.items():
        if k >= 0 and k not in train.targets:
            raise InvalidArgument(
                f"--data has no images in {folder / name}. Add some, or remove this folder."
            )
    if not places:
        return train, None, train.classes
    test = Folder(places[0])
    if test.classes != train.classes:
        raise InvalidArgument(
            f"--data needs the same classes in train/ and {places[0].name}/. "
            f"They are {train.classes} and {test.classes}."
        )
    return train, test, train.classes


def side_of(dataset) -> int:
    """Return the shorter side of the first readable image, as an even number of at most 96.
    If no image is readable, return 32."""
    for k in range(len(dataset)):
        with contextlib.suppress(Exception):  # broken files raise exceptions of many types
            picture, _ = dataset[k]
            return min(96, min(picture.size) // 2 * 2)
    return 32


def labels_of(dataset) -> Tensor:
    """Return the labels of a set. torchvision calls them targets or labels."""
    labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    return torch.as_tensor(labels, dtype=torch.long)


def decode(dataset, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Decode some images of a set as squares → uint8 (n, 3, size, size), labels (n,).
    Files that cannot be read are left out, with a warning that names some."""
    if isinstance(dataset, Drawn):
        return dataset.images[index], dataset.targets[index]

    def item(k):
        try:
            picture, label = dataset[k]
            picture = ImageOps.exif_transpose(picture).convert("RGB")  # the right way up
            picture = T.center_crop(T.resize(picture, size, BICUBIC), size)
            return T.pil_to_tensor(picture), label
        except Exception as error:  # broken files raise exceptions of many types
            return None, f"{dataset.imgs[k][0]} ({error})"

    images = torch.empty(len(index), 3, size, size, dtype=torch.uint8)
    labels, broken = [], []
    with ThreadPool(os.cpu_count()) as pool:  # decoding releases Python's lock, so threads help
        items = pool.imap(item, index.tolist(), chunksize=32)
        bar = tqdm(items, "reading", len(index), unit=" images", leave=False, delay=2)
        for image, label in bar:
            if image is None:
                broken.append(label)
            else:
                images[len(labels)] = image
                labels.append(label)
    if broken:
        some = ", ".join(broken[:5])
        message = f"{len(broken)} of {len(index)} files cannot be read and are left out"
        warnings.warn(f"{message}, for example {some}.", stacklevel=1)
    return images[: len(labels)], torch.tensor(labels, dtype=torch.long)
