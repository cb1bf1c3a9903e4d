"""The modules that train.py is made of.

`images` loads the images, and `cache` keeps them decoded. `runs` keeps the folder of a run.
`readouts` measures what was learned, and `report` shows it. `baselines` has further methods of
training. `compare` trains with several losses.
"""

import os

from hardneg import _require as require  # require(valid, name, got, allowed) raises InvalidArgument

__all__ = ["flag_of", "require", "shown", "write_whole"]


def flag_of(name, value=None):
    """Write the flag of an option, such as --lead-in, or --no-lead-in for the value False."""
    if value is False:
        name = f"no_{name}"
    return f"--{name.replace('_', '-')}"


def write_whole(path, pieces):
    """Write pieces to a file. It replaces an older one in one step, once all is on the disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
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
