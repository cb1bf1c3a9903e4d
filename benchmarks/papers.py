"""Print the commands for the papers' headlines, in the papers' own settings:
python benchmarks/papers.py

What it prints stands in studies/papers.md. A command is train.py's, with encoder, optimizer,
rate, epochs, batch, temperature and views as the paper says, or else as its authors' code has them.
[2] VII-A keeps the settings of [1], App. C. The momentum of [4]'s bank is that of the code which it
follows. [3] names neither optimizer nor temperature: those of train.py, and 0.5. The arithmetic is
that of the encoder, forward and backward, over all epochs.
[1] to [4] are the papers in the header of ../hardneg.py.
"""

import common
import torch
from torch.utils.flop_counter import FlopCounterMode

import hardneg
import train
from training import report

PER_HOUR = 40e12 * 3600  # operations, at 40 TFLOP/s
IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "stl10": 105_000, "TINY": 100_000}
SETTINGS = {  # of [1], of [4] 5.1, of [3] 4
    "ROBINSON": "--encoder resnet50 --recipe adam --views small --temperature 0.5",
    "WANG": "--data cifar10 --encoder resnet18 --recipe sgd --views coloured --method bank",
    "WU": "--data cifar10 --encoder resnet18 --batch-size 256 --epochs 300 --temperature 0.5",
    "OT": "--batch-size 512 --loss ot --epsilon",
    "HARD": "--loss hard --alpha 0.0819",
}
SETTINGS["WANG"] += " --momentum 0.5"
SETTINGS["WU"] += " --fraction 0.1"
# the paper; the figure; what of; the command
HEADLINES = """
[1] 4 | STL10, `simclr` | | --data stl10 --size 32 {ROBINSON} --loss simclr
[1] 4 | STL10, `hcl` | +7.3 | --data stl10 --size 32 {ROBINSON} --loss hcl --beta 1 --tau-plus 0.1
[1] 4 | CIFAR-100, `simclr` | | --data cifar100 {ROBINSON} --loss simclr
[1] 4 | CIFAR-100, `hcl` | +3 | --data cifar100 {ROBINSON} --loss hcl --beta 1 --tau-plus 0.1
[2] Table II | CIFAR-10, `ot` | 91.2 | --data cifar10 {ROBINSON} {OT} 0.5
[2] Table II | CIFAR-10, `ot` debiased | 91.8 | --data cifar10 {ROBINSON} {OT} 0.7 --tau-plus 0.1
[2] Table III | CIFAR-100, `ot` | 69.1 | --data cifar100 {ROBINSON} {OT} 0.7
[2] Table IV | Tiny ImageNet, `ot` | 56.3 | --data TINY --size 32 {ROBINSON} {OT} 0.5
[3] Table 1 | 10 % of CIFAR-10, SimCLR | 76.05 | {WU} --loss simclr
[3] Table 1 | 10 % of CIFAR-10, DiffHard | 80.94 | {WU} --method diffhard --width 64 --latent 128
[4] Table 1 | CIFAR-10, contrastive | 83.27 | {WANG} --loss simclr --temperature 0.3
[4] Table 1 | CIFAR-10, hard, 4095 of 49 999 | 84.19 | {WANG} {HARD} --temperature 1 --no-lead-in
[4] Table 1 | CIFAR-10, simple on the same | 84.84 | {WANG} --loss hard-simple --alpha 0.0819
"""
HEADLINES = HEADLINES.strip().format(**SETTINGS).split("\n")


def options_of(headline: str) -> train.Options:
    """Return the options of a headline's command."""
    _, _, words = headline.rpartition("|")
    return train.Options(**train.parse(words.split()))


def operations(options: train.Options) -> float:
    """Count the encoder's operations in a run: three times those of its forward passes."""
    size = options.size or 32
    with torch.device("meta"):
        encoder, image = hardneg.Encoder(options.encoder, size=size), torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        encoder.eval()(image)
    views = {"simclr": 2, "bank": 1, "diffhard": 4}[options.method]
    images = IMAGES[options.data] * options.fraction
    return 3 * counter.get_total_flops() * views * images * options.epochs


def table() -> str:
    """Write the headlines as a Markdown table."""
    lines = [["paper", "what", "paper's figure", "here", "hours", "`python train.py` …"]]
    for headline in HEADLINES:
        paper, what, figure, words = [cell.strip() for cell in headline.split("|")]
        hours = operations(options_of(headline)) / PER_HOUR
        figure = figure or "the baseline of the next"
        lines.append([paper, what, figure, "not run here", f"{hours:.2g}", f"`{words}`"])
    return report.markdown(lines)


def main():
    """Print the table."""
    common.parser_of(__doc__).parse_args()
    print(table())


if __name__ == "__main__":
    main()
