"""Keep a run in a folder, with a lock, a checkpoint and results, and resume it from there."""

import contextlib
import datetime
import io
import json
import platform
from pathlib import Path

import torch

import hardneg
from training import LOCK, flag_of, named, ranks, require, shown, write_whole

CHECKPOINT, RESULTS, PAGE = "checkpoint.pt", "results.json", "report.html"


def folder_of(options, last):
    """Name the output folder of a run of `train.Options`."""
    return Path("runs", f"{shown(Path(options.data).resolve().name)}-{options.method}-{last}")


def write_json(path, content):
    """Write a dict as JSON."""
    text = json.dumps(content, indent=2, default=str)
    write_whole(path, [f"{text}\n".encode()])


def write_results(folder, results):
    """Add the date and the versions that a run used to its results, and write them."""
    results["date"] = datetime.date.today().isoformat()
    results["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    write_json(folder / RESULTS, results)


def save_checkpoint(folder, state):
    """Write all that a run needs to resume."""
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(folder / CHECKPOINT, [content.getbuffer()])


def read_checkpoint(folder, device):
    """Read the checkpoint of a run."""
    return torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)


@contextlib.contextmanager
def alone(folder):
    """Keep other runs out of a folder. The lock ends with the process, however that ends."""
    if not ranks.is_first():
        yield
        return
    require(not folder.is_file(), "--out", f"{folder}, a file", "a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"--out is {folder}, where another run is at work. Wait for it to end,"
            raise hardneg.InvalidArgument(f"{message} or choose another --out.") from error
        except (ImportError, OSError):
            pass  # Windows and some file systems have no locks, so two runs go unnoticed there
        yield


@contextlib.contextmanager
def readable(path):
    """Say in one line that a file is broken, or was not written by a run."""
    try:
        with named(path):
            yield
    except (OSError, hardneg.InvalidArgument):
        raise
    except Exception as error:  # broken files raise exceptions of many types
        message = f"{path} cannot be read ({type(error).__name__}). Choose another --out,"
        raise hardneg.InvalidArgument(f"{message} or replace it by --overwrite.") from error


def finished(options, images):
    """Return the results that a run of these `train.Options` left in their folder.
    Return None if there are none, if they are to be overwritten, or if the report is missing."""
    path = options.out / RESULTS
    undrawn = options.report and not (options.out / PAGE).exists()
    if options.overwrite or undrawn or not path.exists():
        return None
    with readable(path):
        results = json.loads(path.read_text(), parse_constant=int)  # NaN is an error
        require_same(options.out, results["options"], options.of_the_run())
        require_images(options, results["content"], images)
        return results | {"seed": options.seed}


def require_same(folder, was, now):
    """Raise an error if the run in a folder had other options."""
    if Path(was["data"]).resolve() == Path(now["data"]).resolve():  # perhaps written in two ways
        was = was | {"data": now["data"]}
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    if changed:
        flags = ", ".join(f"{flag_of(name)} was {was.get(name)}" for name in changed)
        raise hardneg.InvalidArgument(
            f"--out is {folder}, which has a run of other options, where {flags}. "
            "Use the same options or another --out, or replace the run by --overwrite."
        )


def content_of(images):
    """Describe the images that a run depends on."""
    count, size = len(images.train), images.train.shape[-1]
    return {"count": count, "size": size, "checksums": list(images.checksums)}


def require_images(options, was, images):
    """Raise an error if the run in a folder had other images."""
    now = content_of(images)
    if was != now:
        had = "other pixels or labels"
        if (was["count"], was["size"]) != (now["count"], now["size"]):
            had = f"{was['count']} images of {was['size']} pixels to train on"
            had += f", in place of {now['count']} of {now['size']}"
        raise hardneg.InvalidArgument(
            f"--out is {options.out}, whose run had {had}. Restore its images, choose another "
            "--out, or begin anew by --overwrite."
        )


def restore(training, options, images):
    """Bring a training to where its run stopped, or let a new run begin → the state of the run."""
    if options.overwrite:
        for name in (CHECKPOINT, RESULTS, PAGE):
            (options.out / name).unlink(missing_ok=True)
    if not (options.out / CHECKPOINT).exists():
        for name in (RESULTS, PAGE):
            allowed = f"a folder without {name} of something else, or go with --overwrite"
            require(not (options.out / name).exists(), "--out", options.out, allowed)
        return {"history": [], "seen": [], "seconds": 0.0, "content": content_of(images)}
    with readable(options.out / CHECKPOINT):
        state = read_checkpoint(options.out, options.device)
        require_same(options.out, state["args"], options.of_the_run())
        require_images(options, state["content"], images)
        hardneg._check("seconds", state["seconds"], [0, 1e12])
        for figures in state["history"] + state["seen"]:
            if not all(isinstance(value, int | float) for value in figures.values()):
                raise TypeError("a figure is no number")
        training.load_state_dict(state["training"])
    pretrain = training.method.pretrain
    epochs = f"{pretrain + training.epoch} of {pretrain + training.epochs}"
    print(f"The run is resumed after epoch {epochs}. To begin anew, use --overwrite.")
    return state


def untrained(name, images, seed):
    """Make the encoder that a run with this seed begins with."""
    torch.manual_seed(seed)
    encoder = hardneg.Encoder(name, size=images.train.shape[-1])
    return encoder.to(images.train_labels.device, memory_format=torch.channels_last)
