"""Keep decoded images in a file that is mapped to memory, so that the next run decodes nothing."""

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path

import torch

from training import write_whole

VERSION = 1  # of the file, which has the pixels of all images, and then their facts as JSON


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
    decoded yields each image and its fact. Its work begins only if the folder does not keep them.
    What cannot be kept gives a warning and None."""
    facts, n = [VERSION, size], len(files) * 3 * size**2
    try:
        for file in files:
            stat = os.stat(file)
            facts += [os.path.abspath(file), stat.st_size, stat.st_mtime_ns]
        path = folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:20]}.images"
        if not path.exists():
            write(path, n, decoded)
        content = torch.from_file(str(path), size=os.path.getsize(path), dtype=torch.uint8)
        pixels, facts = content.tensor_split([n])
        return pixels.view(-1, 3, size, size), json.loads(facts.numpy().tobytes())
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        message = f"{folder} cannot keep decoded images ({error}), so they are decoded into memory."
        warnings.warn(f"{message} Choose another --cache, or remove what it keeps.", stacklevel=1)
        return None


def write(path, n, decoded):
    """Write n bytes of images, and their facts.
    One process at a time writes to a folder. Others wait, and then find what it wrote."""
    import fcntl  # Windows does not have it, so there nothing is kept

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lock ends with the process, however that ends
        if path.exists():
            return
        for stray in path.parent.glob("*.part"):  # its process was killed
            stray.unlink()
        free = shutil.disk_usage(path.parent).free
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
