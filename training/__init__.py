"""What train.py is made of: images, methods, readouts, a run's folder and report, comparisons."""

import hardneg


def require(valid: bool, name: str, got: object, allowed: str) -> None:
    """Raise an error that names an option, what it is and what it may be."""
    if not valid:
        raise hardneg.InvalidArgument(f"{name} is {got}; it must be {allowed}")


def flag_of(name: str, value: object = None) -> str:
    """Write the flag that gives an option a value."""
    if value is False:
        name = f"no_{name}"
    return f"--{name.replace('_', '-')}"
