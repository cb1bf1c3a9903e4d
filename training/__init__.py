"""The modules that train.py is made of.

`images` loads the images, and `cache` keeps them decoded. `runs` keeps the folder of a run.
`readouts` measures what was learned, and `report` shows it. `baselines` has further methods of
training. `compare` trains with several losses.
"""

import contextlib
import os
import sys
import warnings

from hardneg import _require as require  # require(valid, name, got, allowed) raises InvalidArgument

__all__ = ["flag_of", "named", "require", "shown", "tidy_output", "write_whole"]

PART, LOCK = ".hardneg-part", ".hardneg-lock"  # endings of names that no other program gives


def flag_of(name, value=None):
    """Write the flag of an option, such as --lead-in, or --no-lead-in for the value False."""
    if value is False:
        name = f"no_{name}"
    return f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def named(path):
    """Name a file in an error of the system that names none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = f"{path}"
        raise


def write_whole(path, pieces):
    """Write pieces to a file. It replaces an older one in one step, once all is on the disk."""
    part = path.with_name(f".{path.name}{PART}")
    try:
        with named(path), open(part, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def shown(text):
    """Write text, such as the name of a folder, without characters that steer a terminal."""
    written = ""
    for letter in str(text):
        if not letter.isprintable():
            letter = ascii(letter).strip("'")
        written += letter
    return written


def tidy_output():
    """Let a warning be its message alone, and replace what the encoding of an output lacks."""

    def message_alone(message, *_, **__):
        return f"{shown(message)}\n"

    warnings.formatwarning = message_alone
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
