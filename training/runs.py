"""The folder of a run: its checkpoint, its lock, and what makes a run the same run."""

import contextlib
import io
import json
import os
import signal
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

import hardneg
from training import UserError, command, require
from training.images import KNOWN, Images

try:
    import fcntl
except ImportError:  # on Windows, two runs in one folder go unnoticed
    fcntl = None

CHECKPOINT, RESULTS = "checkpoint.pt", "results.json"
PICTURES = "curves nearest map histograms pairs".split()
MADE = [CHECKPOINT, RESULTS, "report.html", "evaluate-*.json"]
MADE += [f"{name}.png" for name in PICTURES]


def folder_of(options, last: str) -> Path:
    """Name the output folder of a run of `train.Options`."""
    path, method = Path(options.data).resolve(), options.method
    data = path.name
    if options.data not in KNOWN:  # folders of one name have different places
        data += f"-{zlib.crc32(bytes(path)) % 10**4:04}"
    if options.pairs is False:
        method += "-no-pairs"
    if options.ascent is False:
        method += "-no-ascent"
    if options.validation:
        method += "-validation"
    return Path("runs", f"{data}-{method}-{last}")


# ---- Files that are there whole or not at all --------------------------------------------------


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
        with contextlib.suppress(OSError):
            part.unlink()
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
        raise UserError(f"{path} cannot be read ({reason})") from error
    got = f"without {', '.join(missing)}"
    require(not missing, str(path), got, "a checkpoint of this program")
    return state


# ---- One run in one folder ---------------------------------------------------------------------


def finished(options) -> dict | None:
    """Read the results in the folder of `train.Options`, if there are any to keep.
    They have to be those of the same options. A folder without a run may have no files of a run's
    names, as they are somebody's."""
    path = options.out / RESULTS
    if options.overwrite:
        return None
    if not path.exists():
        made = [file for name in MADE for file in options.out.glob(name)]
        if made and not (options.out / CHECKPOINT).exists():
            wanted = f"a folder without {made[0].name}, which a run writes; --overwrite replaces it"
            raise UserError(f"--out is {options.out}; it must be {wanted}")
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
    flags = [f"{command.flag_of(name)} was {was.get(name)}" for name in changed]
    wanted = f"another folder, or these options: {', '.join(flags)} there; --overwrite replaces it"
    require(not changed, "--out", folder, wanted)


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


def restore(training: hardneg.Training, options) -> dict | None:
    """Bring a training to where its run was stopped → the state of the run; None: it begins.
    options: `train.Options`"""
    stopped = (options.out / CHECKPOINT).exists() and not (options.out / RESULTS).exists()
    if options.overwrite or not stopped:
        return None
    try:
        state = read_checkpoint(options.out, options.device)
    except UserError as error:
        raise UserError(f"{error}; --overwrite replaces it") from error
    require_same(options.out, state["args"], options.of_the_run())
    n = len(training.images)
    was = state.get("images", n)
    wanted = f"as before, with {was} images to train on; --overwrite begins anew"
    require(n == was, "--data", f"{options.data}, with {n}", wanted)
    training.load_state_dict(state["training"])
    done = training.method.pretrain + training.epoch
    print(f"resumed after epoch {done} of {options.passes()} (--overwrite begins anew)")
    return state


def begin(folder: Path, images: Images) -> dict:
    """Remove what an earlier run left → the state of a new one."""
    for name in MADE:
        for path in list(folder.glob(name)):
            print(f"removing {path}, of an earlier run")
            path.unlink()
    n, size = len(images.train), images.train.shape[-1]
    return {"history": [], "seen": [], "seconds": 0.0, "images": n, "size": size}


@contextlib.contextmanager
def stoppable():
    """Collect Ctrl-C and SIGTERM in a list, for a loop that stops between steps.
    The second signal stops at once."""
    asked, before = [], {}

    def ask(number, _):
        asked.append(number)
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- The bar, and what leaves the folder --------------------------------------------------------


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


def untrained(name: str, size: int, device: str, seed: int) -> hardneg.Encoder:
    """Make the encoder that a run with this seed begins with."""
    torch.manual_seed(seed)
    encoder = hardneg.Encoder(name, size=size)
    return encoder.to(device, memory_format=torch.channels_last)


def encoder_of(state: dict, device: str = "cpu") -> hardneg.Encoder:
    """Make the encoder of a checkpoint, as it was trained."""
    encoder = hardneg.Encoder(state["args"]["encoder"], size=state["size"])
    encoder.load_state_dict(state["training"]["encoder"])
    return encoder.to(device, memory_format=torch.channels_last)


def export(folder: Path, path: Path) -> None:
    """Write the encoder of a run as a program for torch.export.load, which needs no other code."""
    state = read_checkpoint(folder, "cpu")
    encoder = encoder_of(state).eval()
    example = torch.zeros(2, 3, state["size"], state["size"])
    any_number = ({0: torch.export.Dim("n")},)
    program = torch.export.export(encoder, (example,), dynamic_shapes=any_number)
    content = io.BytesIO()
    torch.export.save(program, content)
    write(path, content.getbuffer())
    shape = ", ".join(str(side) for side in example.shape[1:])
    print(f"{path}: images (n, {shape}) in [0, 1] → features, embeddings")
