"""Print the commands for the papers' headlines, in the papers' own settings:
python benchmarks/papers.py

What it prints stands in README.md beside it. A command is train.py's, with encoder, optimizer,
rate, epochs, batch, temperature and views as the paper says, or else as its authors' code has them.
The arithmetic is that of the encoder, forward and backward, over all epochs.
[1] to [4] are the papers in the header of ../hardneg.py.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
import train
from training import report

PER_HOUR = 40e12 * 3600  # operations, at 40 TFLOP/s
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000, "TINY": 100_000}
# [1] App. C and its code; [2] VII-A keeps that
ROBINSON = "--encoder resnet50 --recipe adam --views small --temperature 0.5"
# [4] 5.1; the momentum of the bank is that of the code which it follows
WANG = (
    "--data cifar10 --encoder resnet18 --recipe sgd --views coloured --method bank --momentum 0.5"
)
# [3] 4 names neither optimizer nor temperature: those of train.py, and 0.5
WU = "--data cifar10 --encoder resnet18 --batch-size 256 --epochs 300 --temperature 0.5"
GAME = "--method diffhard --width 64 --latent 128"


class Headline(NamedTuple):
    """A figure of a paper, and the command that would repeat it."""

    source: str
    claim: str
    figure: str
    words: str


def robinson(data, words):
    """Write a command in the setting of [1]."""
    size = " --size 32" if data in ("stl10", "TINY") else ""
    return f"--data {data}{size} {ROBINSON} {words}"


BASELINE, HCL = "--loss simclr", "--loss hcl --beta 1 --tau-plus 0.1"
HEADLINES = [
    Headline("[1] 4", "STL10, `simclr`", "", robinson("stl10", BASELINE)),
    Headline("[1] 4", "STL10, `hcl`", "+7.3", robinson("stl10", HCL)),
    Headline("[1] 4", "CIFAR-100, `simclr`", "", robinson("cifar100", BASELINE)),
    Headline("[1] 4", "CIFAR-100, `hcl`", "+3", robinson("cifar100", HCL)),
    Headline(
        "[2] Table II",
        "CIFAR-10, `ot`",
        "91.2",
        robinson("cifar10", "--batch-size 512 --loss ot --epsilon 0.5"),
    ),
    Headline(
        "[2] Table II",
        "CIFAR-10, `ot` debiased",
        "91.8",
        robinson("cifar10", "--batch-size 512 --loss ot --epsilon 0.7 --tau-plus 0.1"),
    ),
    Headline(
        "[2] Table III",
        "CIFAR-100, `ot`",
        "69.1",
        robinson("cifar100", "--batch-size 512 --loss ot --epsilon 0.7"),
    ),
    Headline(
        "[2] Table IV",
        "Tiny ImageNet, `ot`",
        "56.3",
        robinson("TINY", "--batch-size 512 --loss ot --epsilon 0.5"),
    ),
    Headline("[3] Table 1", "10 % of CIFAR-10, SimCLR", "76.05", f"{WU} --fraction 0.1 {BASELINE}"),
    Headline("[3] Table 1", "10 % of CIFAR-10, DiffHard", "80.94", f"{WU} --fraction 0.1 {GAME}"),
    Headline(
        "[4] Table 1", "CIFAR-10, contrastive", "83.27", f"{WANG} {BASELINE} --temperature 0.3"
    ),
    Headline(
        "[4] Table 1",
        "CIFAR-10, hard, 4095 of 49 999",
        "84.19",
        f"{WANG} --loss hard --alpha 0.0819 --temperature 1 --no-lead-in",
    ),
    Headline(
        "[4] Table 1",
        "CIFAR-10, simple on the same",
        "84.84",
        f"{WANG} --loss hard-simple --alpha 0.0819",
    ),
]


def options_of(headline):
    """Return the `train.Options` of a headline's command."""
    return train.Options(**train.parse(headline.words.split()))


def operations(options):
    """Count the encoder's operations in a run: three times those of its forward passes."""
    size = options.size or 32
    with torch.device("meta"):
        encoder, image = hardneg.Encoder(options.encoder, size=size), torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        encoder.eval()(image)
    views = {"simclr": 2, "bank": 1, "diffhard": 4}[options.method]
    images = IMAGES[options.data] * options.fraction
    return 3 * counter.get_total_flops() * views * images * options.epochs


def table():
    """Write the headlines as a Markdown table."""
    lines = [["paper", "what", "paper's figure", "here", "hours", "`python train.py` …"]]
    for headline in HEADLINES:
        hours = operations(options_of(headline)) / PER_HOUR
        figure = headline.figure or "the baseline of the next"
        cells = [headline.source, headline.claim, figure, "not run here", f"{hours:.2g}"]
        lines.append([*cells, f"`{headline.words}`"])
    return report.markdown(lines)


if __name__ == "__main__":
    print(table())
