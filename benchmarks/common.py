"""What the programs of this folder share: their flags and their records."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

import hardneg
from training import runs, write_whole

RESULTS = Path(__file__).resolve().parent / "results"


def parser_of(about: str) -> argparse.ArgumentParser:
    """Make a parser of a program's flags, from its docstring; --show prints what is recorded."""
    parser = argparse.ArgumentParser(description=about.split("\n\n")[0])
    parser.add_argument("--show", action="store_true", help="print the record, measure nothing")
    return parser


def read(name: str) -> dict:
    """Read a record, by its name."""
    return json.loads(path_of(name).read_text())


def write(name: str, content: dict) -> None:
    """Write a record in one move: whoever stops the program leaves the old one or the new."""
    write_whole(path_of(name), [f"{json.dumps(content)}\n".encode()])


def path_of(name: str) -> Path:
    """Return the file of a record."""
    return RESULTS / f"{name}.json"


def encoder_of(folder: Path) -> hardneg.Encoder:
    """Read the trained encoder of a run."""
    state = runs.read_checkpoint(folder, "cpu")
    encoder = hardneg.Encoder(state["args"]["encoder"], size=state["content"]["size"])
    encoder.load_state_dict(state["training"]["encoder"])
    return encoder.to(memory_format=torch.channels_last)


def descend(loss, optimizer) -> None:
    """Take a step of an optimizer."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Record:
    """Keep what is measured, on disk after each measurement, and measure nothing twice."""

    def __init__(self, name: str, corpus: dict):
        self.name = name
        about = {key: corpus[key] for key in ("pairs", "sha256", "versions")}
        self.found = {"corpus": about, "choices": {}, "runs": []}
        if path_of(name).exists():
            self.found = read(name)
        if self.found["corpus"]["sha256"] != about["sha256"]:
            raise SystemExit(f"{name} is of another corpus. Name another record with --record.")

    def choose(self, what: str, name: str, values: tuple, measure: Callable) -> float:
        """Return the value of a setting that has the best measure, an MRR on validation files."""
        tried = self.found["choices"].setdefault(what, {}).setdefault(name, {})
        for value in values:
            if str(value) not in tried:
                tried[str(value)] = measure(value)
                write(self.name, self.found)
        return float(max(tried, key=tried.get))

    def once(self, row: str, settings: dict, seed: int, measure: Callable) -> None:
        """Record what a row measures with a seed, unless that is recorded already."""
        about = {"row": row, "seed": seed, "settings": settings}
        if any(about.items() <= run.items() for run in self.found["runs"]):
            return
        self.found["runs"].append(about | measure())
        write(self.name, self.found)
