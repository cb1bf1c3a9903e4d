"""From a dataclass of options to a command line."""

import argparse
import dataclasses
import difflib
import re
from pathlib import Path

import hardneg

BRIEF = "loss temperature alpha method data validation encoder epochs out overwrite".split()
BRIEF += "compare evaluate finetune export help help_all".split()
METAVARS = {"float": "X", "int": "N", "str": "NAME", "Path": "DIR"}


def option(default: object, text: str, **more) -> dataclasses.Field:
    """Describe an option: its default, what it is, and what add_argument takes beside.
    otherwise: the default in words; group: the title of a group of options, which begins here."""
    return dataclasses.field(default=None, metadata={"default": default, "help": text, **more})


def groups_of(options: type) -> dict[str, str]:
    """Return {option: its group} for a dataclass."""
    groups, group = {}, None
    for field in dataclasses.fields(options):
        group = field.metadata.get("group", group)
        groups[field.name] = group
    return groups


def flag_of(name: str, value: object = None) -> str:
    """Write the flag that gives an option a value."""
    flag = name.replace("_", "-")
    return f"--no-{flag}" if value is False else f"--{flag}"


def words_of(options: dict) -> list[str]:
    """Write options as words of a command line."""
    words = []
    for name, value in options.items():
        words.append(flag_of(name, value))
        if not isinstance(value, bool):
            words.append(str(value))
    return words


class Parser(argparse.ArgumentParser):
    """Say a mistake in one line, with the nearest word that works, and end with exit code 2."""

    def error(self, message):
        pattern = r"choice: '(\S*)' \(choose from (.*)\)|unrecognized arguments: (\S+)"
        found = re.search(pattern, message)
        if found:
            choice, choices, flag = found.groups()
            words = re.findall(r"[\w-]+", choices or " ".join(self._option_string_actions))
            for near in difflib.get_close_matches(choice or flag, words, 1, 0.5):
                message += f"; did you mean {near}?"
        self.exit(2, f"train.py: {message}\n")


def say_idle(given: dict, rows: list, measures: object) -> None:
    """Print the flags of a command that have no effect in any of its runs, `train.Options` each."""
    losses = ", ".join(dict.fromkeys(row.loss for row in rows))
    reason = f"loss {losses}, method {rows[0].method}, data {rows[0].data}"
    for name, value in given.items():
        used = any(row.has_effect(name) for row in rows)
        if measures:
            used = name in ("data", "root", "fraction", "validation", "workers", "device")
            reason = "with --evaluate or --export"
        if not used:
            print(f"{flag_of(name, value)} has no effect here ({reason})")


def add_options(parser: Parser, options: type, tables: tuple) -> None:
    """Add the fields of a dataclass; the tables say where losses and methods differ."""
    for field in dataclasses.fields(options):
        title = field.metadata.get("group")
        if title is not None:
            group = parser.add_argument_group(title)
        own = ("default", "otherwise", "help", "group")
        more = {key: value for key, value in field.metadata.items() if key not in own}
        if field.type is bool:
            more["action"] = argparse.BooleanOptionalAction
        elif "choices" not in more:
            more = {"type": field.type, "metavar": METAVARS[field.type.__name__]} | more
        text = f"{field.metadata['help']}{_defaults(field, tables)}".replace("%", "%%")
        group.add_argument(flag_of(field.name), default=argparse.SUPPRESS, help=text, **more)


def _defaults(field, tables):
    """Write the default of an option, and what losses and methods have instead."""
    default = field.metadata.get("otherwise", field.metadata["default"])
    words = []
    if default is not None and default is not False:
        words.append(f"{default}")
    for table in tables:
        for name, row in table.items():
            if field.name in row:
                words.append(f"{row[field.name]} for {name}")
    if not words:
        return ""
    return f" (default: {', '.join(words)})"


def parse(argv: list[str], about: str, options: type, tables: tuple) -> dict:
    """Parse a command line → the options that it gives, and what else is to be done with runs."""
    parser = Parser(usage="python train.py [flags]", description=about, allow_abbrev=False)
    parser.epilog = options.__doc__
    parser.add_argument("--help-all", action="help", help="explain all flags")
    add_options(parser, options, tables)
    losses = {"choices": hardneg.PRESETS, "metavar": "LOSS"}
    add = parser.add_argument_group("other commands").add_argument
    add("--compare", nargs="+", **losses, help="train with each, and compare")
    add("--seeds", type=int, metavar="N", help="of --compare: runs of each loss (default: 3)")
    add("--evaluate", type=Path, metavar="RUN", help="measure the encoder of RUN on --data")
    text = "of --evaluate: train the encoder too, on this share of the labels"
    add("--finetune", type=float, metavar="SHARE", help=text)
    add("--export", nargs=2, type=Path, metavar=("RUN", "FILE"), help="RUN's encoder to FILE.pt2")
    for action in parser._actions:
        if action.dest not in BRIEF and "--help-all" not in argv:
            action.help = argparse.SUPPRESS
    given = vars(parser.parse_args(argv))
    return {name: value for name, value in given.items() if value is not None}
