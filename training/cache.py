"""Keep decoded images in a file that is mapped to memory, so that the next run decodes nothing."""

import hashlib
import json
import math
import os
import shutil
import warnings
import zlib
from pathlib import Path

import torch

from training import LOCK, PART, write_whole

VERSION = 2  # of the file, which has the pixels of all images, and then their facts as JSON


class Rows:
    """Hold some rows of images (n, 3, H, W), and gather a few when they are asked for.
    The images may lie in a file that is larger than the memory. They may be Rows, too."""

    def __init__(self, images, index):
        self.images, self.device = images, images.device
        self.index = index.to(self.device)
        self.shape = (len(index),) + tuple(images.shape[1:])

    def __len__(self):
        return len(self.index)

    def __getitem__(self, k):
        return self.images[self.index[k]]

    def split(self, size):
        for some in self.index.split(size):
            yield self.images[some]

    def to(self, device):
        """Copy all rows to a device, some at a time."""
        return torch.cat([some.to(device) for some in self.split(500)])


def home():
    """Name the folder that keeps decoded images, if the user names none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hardneg")


def kept(folder, files, size, decoded):
    """Map the decoded images of files → uint8 (n, 3, size, size), a list of their facts.
    decoded yields each image and its fact. Its work begins only if the folder does not keep them,
    or if what it keeps is damaged. What cannot be kept gives a warning and None."""
    facts, shape = [VERSION, size], (len(files), 3, size, size)
    try:
        for file in files:
            stat = os.stat(file)
            facts += [os.path.abspath(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        path = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:20]}.images"
        found = mapped(path, shape)
        if found is None:
            write(path, shape, decoded)
            found = mapped(path, shape)
        return found
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        message = f"{folder} cannot keep decoded images ({error}), so they are decoded into memory."
        warnings.warn(f"{message} Choose another --cache, or remove what it keeps.", stacklevel=1)
        return None


def checksum(image):
    """Compute the checksum of an image (3, H, W)."""
    return zlib.crc32(image.contiguous().numpy())


def mapped(path, shape):
    """Map a file → images of a shape, a list of their facts. Return None if it is not there, or if
    its length or one image of about 100 is not as it was written."""
    try:
        content = torch.from_file(f"{path}", size=os.path.getsize(path), dtype=torch.uint8)
        images, facts = content.tensor_split([math.prod(shape)])
        images, facts = images.view(shape), json.loads(facts.numpy().tobytes())
        for k in range(0, len(images), len(images) // 100 + 1):
            if isinstance(facts[k], int) and checksum(images[k]) != facts[k]:
                return None
    except (OSError, ValueError, RuntimeError, LookupError, TypeError):
        return None
    return images, facts


def write(path, shape, decoded):
    """Write images of a shape, and their facts.
    One process at a time writes to a folder. Others wait, and then find what it wrote."""
    import fcntl  # Windows does not have it, so there nothing is kept

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lock ends with the process, however that ends
        if mapped(path, shape) is not None:
            return
        if path.exists():
            print(f"{path} is damaged. It is made anew.", flush=True)
        for stray in path.parent.glob(f".*.images{PART}"):  # its process was killed
            stray.unlink()
        n, free = math.prod(shape), shutil.disk_usage(path.parent).free
        if n > free:
            raise OSError(f"{n / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free")
        print(f"{path} keeps decoded images ({n / 1e6:.0f} MB). Remove it at any time.", flush=True)
        write_whole(path, content_of(decoded))


def content_of(decoded):
    """Yield the pixels of each image, and at the end the facts of all as JSON."""
    facts = []
    for image, fact in decoded:
        yield image.numpy().tobytes()
        facts.append(fact)
    yield json.dumps(facts).encode()
