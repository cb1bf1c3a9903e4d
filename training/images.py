"""Images to train on, uint8 (n, 3, H, W): built-in shapes, torchvision's sets, folders."""

import functools
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS as SUFFIXES
from torchvision.datasets.folder import make_dataset
from torchvision.transforms import functional as T
from tqdm import tqdm

from training import UserError, require

BICUBIC = T.InterpolationMode.BICUBIC


class Images(NamedTuple):
    """Hold a training set and a test set."""

    train: Tensor  # (n, 3, H, W), uint8
    train_labels: Tensor  # (n,), −1 where an image has none
    test: Tensor  # (m, 3, H, W)
    test_labels: Tensor  # (m,)
    classes: list[str]  # their names; empty if there are no classes


def load(
    data: str = "shapes",
    root: str = "data",
    size: int | None = None,
    fraction: float = 1.0,
    workers: int | None = None,
    validation: bool = False,
    seed: int = 0,
) -> Images:
    """Load "shapes", a set of TORCHVISION or a folder of images.
    root        where torchvision's sets are, or are downloaded to
    size        side in pixels; None: their own, in a folder at most 96
    fraction    share of each class to train on, in (0, 1]
    workers     processes that decode the files of a folder
    validation  test on every fifth training image of each class instead, which then is left out of
                training: settings that are chosen on test images would look too good"""
    if data == "shapes":
        images = built_in(size or 32, seed)
    elif data in TORCHVISION:
        images = from_torchvision(data, root, size)
    else:
        return from_folder(Path(data), size, fraction, validation, workers, seed)
    if validation:
        images = hold_out(images)
    kept = share(images.train_labels, fraction, seed)
    train, train_labels = images.train[kept], images.train_labels[kept]
    return images._replace(train=train, train_labels=train_labels)


def read(options) -> Images:
    """Load the images that `train.Options` name, and say what they are."""
    names = ("data", "root", "size", "fraction", "workers", "validation")
    images = load(**{name: getattr(options, name) for name in names})
    tensors = [x.to(options.device) for x in images[:4]]
    images = Images._make(tensors + [images.classes])
    side = images.train.shape[-1]
    kinds = f"{len(images.classes)} classes" if images.classes else "no classes or accuracies"
    text = f"{options.data}: {len(images.train)} images to train on, {len(images.test)} to test, "
    print(text + f"{kinds}, {side} × {side} pixels, on {options.device}", flush=True)
    return images


def share(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Draw a share of each class, at least one image of it → indices, ascending."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = []
    for label in labels.unique():
        members = order[labels[order] == label]
        parts.append(members[: max(1, round(fraction * len(members)))])
    return torch.cat(parts).sort().values


def hold_out(images: Images) -> Images:
    """Take every fifth training image of each class for the test, and none without a label."""
    held = torch.zeros(len(images.train), dtype=torch.bool)
    for label in images.train_labels.unique():
        if images.classes and label < 0:  # no label: of no use in a test
            continue
        members = (images.train_labels == label).nonzero()[:, 0]
        held[members[4::5]] = True
    train, labels = images.train, images.train_labels
    return Images(train[~held], labels[~held], train[held], labels[held], images.classes)


def at_most(images: Images, n: int) -> Images:
    """Take about n training and n test images, an equal share of each class."""
    some = share(images.train_labels.cpu(), min(1, n / len(images.train)), 0)
    others = share(images.test_labels.cpu(), min(1, n / len(images.test)), 0)
    train = images.train[some], images.train_labels[some]
    test = images.test[others], images.test_labels[others]
    return Images._make(train + test + (images.classes,))


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


def built_in(size: int, seed: int) -> Images:
    """Draw 8000 shapes to train on and 2000 to test."""
    train = shapes(8000, seed=seed, size=size)
    test = shapes(2000, seed=seed + 10**6, size=size)
    return Images._make(train + test + (SHAPES,))


def shapes(n: int = 8000, classes: int = 10, seed: int = 0, size: int = 32) -> tuple:
    """Draw n images of outlines → uint8 (n, 3, size, size), labels (n,); a seed repeats its images.
    classes: 2 to 10. Colours, place, scale, rotation and noise are random."""
    require(2 <= classes <= len(SHAPES), "classes", classes, f"2 to {len(SHAPES)}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    labels = (torch.arange(n) % classes)[order]
    images = torch.empty(n, 3, size, size, dtype=torch.uint8)
    for some in torch.arange(n).split(2000):  # to save memory
        images[some] = draw_shapes(labels[some], size, generator)
    return images, labels


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
    inside = torch.sigmoid((edge * radius - distance) * size / 2)[:, None]  # 1, at the edge 0.5
    first = torch.randint(len(CRAYONS), (k,), generator=generator)
    step = torch.randint(1, len(CRAYONS), (k,), generator=generator)
    second = (first + step) % len(CRAYONS)  # another colour
    ink = CRAYONS[first][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
    paper = CRAYONS[second][:, :, None, None] + 0.05 * (rand(k, 3, 1, 1) - 0.5)
    light = 0.9 + 0.2 * rand(k, 1, 1, 1)
    clean = light * (paper + (ink - paper) * inside)  # (k, 3, size, size)
    noisy = clean + 0.05 * torch.randn(k, 3, size, size, generator=generator)
    return (noisy.clamp(0, 1) * 255).to(torch.uint8)


# ---- torchvision's sets ------------------------------------------------------------------------

# name: class in torchvision.datasets, arguments of the training set, arguments of the test set
TORCHVISION = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),  # unlabelled: −1
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
}
KNOWN = ["shapes"] + list(TORCHVISION)  # other names stand for folders


def from_torchvision(name: str, root: str, size: int | None) -> Images:
    """Read one of torchvision's sets from the folder root, or download it."""
    kind, of_train, of_test = TORCHVISION[name]
    try:
        train = getattr(datasets, kind)(root, download=True, **of_train)
        test = getattr(datasets, kind)(root, download=True, **of_test)
    except Exception as error:  # no network, a full disk, a broken archive: of many types
        message = f"{name} is not in {root}/ and could not be downloaded ({error}); put the files "
        message += f"of {kind} there, or name a folder of images"
        raise UserError(message) from error
    classes = getattr(train, "classes", range(10))
    classes = [str(name) for name in classes]
    return Images._make(_pixels(train, size) + _pixels(test, size) + (classes,))


def _pixels(dataset, size):
    """Return the images of one of torchvision's sets, (n, 3, size, size), and their labels."""
    x = torch.as_tensor(dataset.data)
    if x.ndim == 3:  # grey → colour
        x = x[..., None].expand(-1, -1, -1, 3)
    if x.shape[1] != 3:  # channels last
        x = x.permute(0, 3, 1, 2)
    side = size or x.shape[-1]
    parts = [T.resize(some, [side, side], BICUBIC) for some in x.split(1000)]  # to save memory
    labels = dataset.targets if hasattr(dataset, "targets") else dataset.labels
    return torch.cat(parts), torch.as_tensor(labels).long()


# ---- Folders -----------------------------------------------------------------------------------


def from_folder(folder, size, fraction, validation, workers, seed):
    """Read a folder of images as torchvision's ImageFolder does, but nothing hidden.
    It holds a folder of images for each class; or train/ and test/ (or val/) with such folders; or
    images without labels, at any depth. Without test/, it tests on every fifth of a class."""
    parts, classes = [], None
    for source in _sources(folder):
        samples, names = _find_images(source)
        classes = names if classes is None else classes
        wanted = f"a folder of train/'s classes, {classes}, not {names}"
        require(names == classes, "--data", source, wanted)
        parts.append(samples)
    train, test = parts[0], parts[-1]  # a list of (path, label) for each class
    if validation or len(parts) == 1:
        test = [samples[4::5] for samples in train]
        train = [[x for k, x in enumerate(samples) if k % 5 < 4] for samples in train]
    train, test = sum(train, []), sum(test, [])
    if train:
        kept = share(torch.tensor([label for _, label in train]), fraction, seed)
        train = [train[k] for k in kept]
    size = size or _side_of_first(train + test)
    sets = [decode(samples, size, workers) for samples in (train, test)]
    counts = [len(labels) for _, labels in sets]
    got = f"{folder}, with {counts[0]} readable images to train on and {counts[1]} to test"
    wanted = "a folder with 2 of each or more; without test/, every fifth of a class is to test"
    require(min(counts) >= 2, "--data", got, wanted)
    return Images._make(sets[0] + sets[1] + (classes,))


def _sources(folder):
    """List the folders of a data set: that to train on, and that to test, if there is one."""
    if not (folder / "train").is_dir():
        return [folder]
    used = ("train", "test", "val")
    others = [path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    others = sorted(set(others) - set(used))
    if others:
        message = f"folders beside {folder / 'train'} are left out: {', '.join(others)}"
        warnings.warn(message, stacklevel=1)
    tests = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
    return [folder / "train"] + tests[:1]


def _find_images(source):
    """Find the images in a folder → a list of (path, label) for each class, names of classes."""
    names = [path.name for path in source.iterdir() if path.is_dir() and path.name[0] != "."]
    names.sort()
    if len(names) < 2:  # one folder is no choice of classes
        return [_visible(source, "", -1)], []
    loose = [path for path in source.iterdir() if path.suffix.lower() in SUFFIXES]
    if loose:
        message = f"{len(loose)} images beside the folders of classes in {source} are left out"
        warnings.warn(message, stacklevel=1)
    return [_visible(source, name, k) for k, name in enumerate(names)], names


def _visible(source, name, label):
    """List the images of one class, [(path, label)], but nothing hidden."""
    samples = make_dataset(source, {name: label}, SUFFIXES, allow_empty=True)
    require(samples or not name, "--data", source / name, "a folder with images in it")
    paths = [Path(path) for path, _ in samples]
    return [(path, label) for path in paths if "/." not in f"/{path.relative_to(source)}"]


def _side_of_first(samples):
    """Return the side of the first readable image; 32 if there is none."""
    for path, _ in samples:
        image = try_image(path)
        if torch.is_tensor(image):
            return image.shape[-1]
    return 32


def read_image(path: str | Path, size: int) -> Tensor:
    """Read the middle of an image, (3, size, size).
    Size 0 stands for the image's own if it is square and at most 96, else for 32, 64 or 96."""
    with Image.open(path) as picture:
        side = 2 * size or 192
        picture.draft("RGB", (side, side))  # much larger JPEG files are read faster
        picture = ImageOps.exif_transpose(picture)  # as the camera was held
        if picture.mode[0] == "I":  # 16 bits of grey
            picture = Image.fromarray(np.uint8(np.asarray(picture) // 257))
        if picture.has_transparency_data:
            rgba = picture.convert("RGBA")
            white = Image.new("RGBA", rgba.size, "white")
            picture = Image.alpha_composite(white, rgba)
        picture = picture.convert("RGB")
    size = size or _side(picture.size)
    return T.pil_to_tensor(T.center_crop(T.resize(picture, size, BICUBIC), size))


def _side(shape):
    """Choose a side for images of a shape."""
    shorter = min(shape) // 2 * 2  # even, as the small encoder needs it
    if max(shape) <= min(96, shorter + 1):
        return shorter
    if shorter < 64:
        return 32
    return 64 if shorter < 96 else 96


def try_image(path: str | Path, size: int = 0) -> Tensor | str:
    """Read an image, or return the error as text."""
    try:
        return read_image(path, size)
    except Exception as error:  # broken files raise exceptions of many types
        return str(error)


def decode(samples: list, size: int, workers: int | None) -> tuple[Tensor, Tensor]:
    """Decode files, [(path, label)] → images uint8 (n, 3, size, size), labels (n,).
    Broken files are left out, and a warning names them."""
    if workers is None:
        workers = os.cpu_count() if len(samples) > 5000 else 0
    paths = [path for path, _ in samples]
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    files = torch.utils.data.DataLoader(
        paths,
        batch_size=None,
        num_workers=workers,
        generator=torch.Generator(),  # else the loader would draw from the global one
        collate_fn=functools.partial(try_image, size=size),
    )
    labels, broken = [], []
    bar = tqdm(files, "reading", unit=" files", leave=False, delay=2)
    for (path, label), image in zip(samples, bar, strict=True):
        if torch.is_tensor(image):
            images[len(labels)] = image
            labels.append(label)
        else:
            broken.append(f"{path} ({image})")
    if broken:
        some = ", ".join(broken[:5])
        message = f"{len(broken)} of {len(paths)} files cannot be read, such as {some}"
        warnings.warn(message, stacklevel=1)
    return images[: len(labels)], torch.tensor(labels, dtype=torch.long)
