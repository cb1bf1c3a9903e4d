"""The folder of a run: its checkpoint, its lock, and what makes a run the same run."""

import contextlib
import io
import json
import os
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

import hardneg
from training import UserError, flag_of, require
from training.images import KNOWN, Images

try:
    import fcntl
except ImportError:  # on Windows, two runs in one folder go unnoticed
    fcntl = None

CHECKPOINT, RESULTS, PAGE = "checkpoint.pt", "results.json", "report.html"


def folder_of(options, last: str) -> Path:
    """Name the output folder of a run of `train.Options`."""
    path, method = Path(options.data).resolve(), options.method
    data = path.name
    if options.data not in KNOWN:  # folders of one name have different places
        data += f"-{zlib.crc32(bytes(path)) % 10**4:04}"
    for name, value in (("pairs", False), ("ascent", False), ("validation", True)):
        if getattr(options, name) is value:
            method += flag_of(name, value)[1:]
    return Path("runs", f"{data}-{method}-{last}")


def write(path: Path, content: bytes) -> None:
    """Write a file; one of this name is replaced in one step, once the new one is on the disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, content: dict) -> None:
    """Write a dict as JSON."""
    write(path, (json.dumps(content, indent=2, default=str) + "\n").encode())


def save_checkpoint(folder: Path, state: dict) -> None:
    """Write all that a run needs to go on."""
    content = io.BytesIO()
    torch.save(state, content)
    write(folder / CHECKPOINT, content.getbuffer())


def read_checkpoint(folder: Path, device: str) -> dict:
    """Read the checkpoint of a run; UserError if it is missing, broken or of another program."""
    path = folder / CHECKPOINT
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        missing = [name for name in ("args", "training", "size", "seen") if name not in state]
    except Exception as error:  # broken files raise exceptions of many types
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path} cannot be read ({reason}); --overwrite replaces it") from error
    got = f"without {', '.join(missing)}"
    require(not missing, str(path), got, "a checkpoint of this program; --overwrite replaces it")
    return state


@contextlib.contextmanager
def alone(folder: Path):
    """Keep other runs out of a folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"--out is {folder}, which cannot be used: {error.strerror}") from error
    with lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"--out is {folder}, where another run is at work; name another"
            raise UserError(message) from None
        except OSError:  # a file system without locks: two runs in one folder go unnoticed
            pass
        yield


def finished(options) -> dict | None:
    """Read the results in the folder of `train.Options`, if there are any to keep.
    They have to be those of the same options."""
    path = options.out / RESULTS
    if options.overwrite or not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
        was = results["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); --overwrite replaces it") from error
    require_same(options.out, was, options.of_the_run())
    return results


def require_same(folder: Path, was: dict, now: dict) -> None:
    """Require that the run in a folder has the same options."""
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    flags = [f"{flag_of(name)} was {was.get(name)}" for name in changed]
    wanted = f"another folder, or these options: {', '.join(flags)} there; --overwrite replaces it"
    require(not changed, "--out", folder, wanted)


def restore(training: hardneg.Training, options) -> dict:
    """Bring a training to where its run was stopped, or let it begin → the state of the run."""
    n, size = len(training.images), training.images.shape[-1]
    if options.overwrite:
        for name in (CHECKPOINT, RESULTS, PAGE):
            (options.out / name).unlink(missing_ok=True)
    if not (options.out / CHECKPOINT).exists():
        return {"history": [], "seen": [], "seconds": 0.0, "images": n, "size": size}
    state = read_checkpoint(options.out, options.device)
    require_same(options.out, state["args"], options.of_the_run())
    wanted = f"as before, with {state['images']} images to train on; --overwrite begins anew"
    require(n == state["images"], "--data", f"{options.data}, with {n}", wanted)
    training.load_state_dict(state["training"])
    done = training.method.pretrain + training.epoch
    print(f"resumed after epoch {done} of {options.passes()} (--overwrite begins anew)")
    return state


def bar_of(total: int, bar: tqdm | None = None) -> contextlib.AbstractContextManager:
    """Open a progress bar of images; one that is given stays open."""
    if bar is not None:
        return contextlib.nullcontext(bar)
    return tqdm(total=total, unit=" images", mininterval=1)


def skip(bar: tqdm, n: int) -> None:
    """Move a bar past work that was done before; the speed that it shows leaves this out."""
    bar.initial += n
    bar.update(n)
    bar.unpause()


def untrained(name: str, images: Images, seed: int) -> hardneg.Encoder:
    """Make the encoder that a run with this seed begins with."""
    torch.manual_seed(seed)
    encoder = hardneg.Encoder(name, size=images.train.shape[-1])
    return encoder.to(images.train.device, memory_format=torch.channels_last)


def encoder_of(state: dict, device: str = "cpu") -> hardneg.Encoder:
    """Make the encoder of a checkpoint, as it was trained."""
    encoder = hardneg.Encoder(state["args"]["encoder"], size=state["size"])
    encoder.load_state_dict(state["training"]["encoder"])
    return encoder.to(device, memory_format=torch.channels_last)
