"""The folder of a run: its checkpoint, its lock, and what makes a run the same run."""

import contextlib
import io
import json
import os
from pathlib import Path

import torch

import hardneg
from training import flag_of, require
from training.images import Images

try:
    import fcntl
except ImportError:  # on Windows, two runs in one folder go unnoticed
    fcntl = None

CHECKPOINT, RESULTS, PAGE, LOCK = "checkpoint.pt", "results.json", "report.html", ".lock"


def folder_of(options, last: str) -> Path:
    """Name the output folder of a run of `train.Options`."""
    return Path("runs", f"{Path(options.data).resolve().name}-{options.method}-{last}")


def write(path: Path, content: bytes) -> None:
    """Write a file; one of this name is replaced in one step, once the new one is on the disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict) -> None:
    """Write a dict as JSON."""
    write(path, (json.dumps(content, indent=2, default=str) + "\n").encode())


def save_checkpoint(folder: Path, state: dict) -> None:
    """Write all that a run needs to go on."""
    content = io.BytesIO()
    torch.save(state, content)
    write(folder / CHECKPOINT, content.getbuffer())


def read_checkpoint(folder: Path, device: str) -> dict:
    """Read the checkpoint of a run."""
    return torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)


@contextlib.contextmanager
def alone(folder: Path):
    """Keep other runs out of a folder; the lock goes with the process, however it ends.
    A run that leaves nothing takes away the folders that it made."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            require(False, "--out", folder, "free; another run is at work there")
        except OSError:  # a file system without locks: two runs in one folder go unnoticed
            pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # others may use the folders by now
                if os.listdir(folder) == [LOCK]:
                    os.remove(folder / LOCK)
                    for path in made:
                        path.rmdir()


@contextlib.contextmanager
def readable(path: Path):
    """Say in one line that a file is broken, or is not of such a run."""
    try:
        yield
    except (OSError, hardneg.InvalidArgument):
        raise
    except Exception as error:  # broken files raise exceptions of many types
        message = f"{path} cannot be read ({type(error).__name__}); --overwrite replaces it"
        raise hardneg.InvalidArgument(message) from error


def finished(options) -> dict | None:
    """Read the results of the same options in the folder of `train.Options`, if any are to keep."""
    path = options.out / RESULTS
    if options.overwrite or not path.exists():
        return None
    with readable(path):
        results = json.loads(path.read_text())
        require_same(options.out, results["options"], options.of_the_run())
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
    with readable(options.out / CHECKPOINT):
        state = read_checkpoint(options.out, options.device)
        require_same(options.out, state["args"], options.of_the_run())
        wanted = f"as before, with {state['images']} images to train on; --overwrite begins anew"
        require(n == state["images"], "--data", f"{options.data}, with {n}", wanted)
        training.load_state_dict(state["training"])
    pretrain = training.method.pretrain
    epochs = f"{pretrain + training.epoch} of {pretrain + training.epochs}"
    print(f"resumed after epoch {epochs} (--overwrite begins anew)")
    return state


def untrained(name: str, images: Images, seed: int) -> hardneg.Encoder:
    """Make the encoder that a run with this seed begins with."""
    torch.manual_seed(seed)
    encoder = hardneg.Encoder(name, size=images.train.shape[-1])
    return encoder.to(images.train.device, memory_format=torch.channels_last)
