"""What train.py is made of: images, methods, readouts, a run's folder and report, comparisons."""


class UserError(Exception):
    """Something that the user can put right: it ends the command with one line."""


def require(valid: bool, name: str, got: object, allowed: str) -> None:
    """Raise a UserError that names an option, what it is and what it may be."""
    if not valid:
        raise UserError(f"{name} is {got}; it must be {allowed}")
