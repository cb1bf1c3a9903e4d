"""Compare losses on the built-in shapes over five seeds: python benchmarks/shapes.py

Every loss has the defaults of train.py, the best of four settings by defaults.py on another seed, and sees
the same images: `python train.py --compare simclr debiased hcl ot hard --seeds 5`, recorded in shapes.json.
"""
import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402

LOSSES = "simclr", "debiased", "hcl", "ot", "hard"
table = train.table_of


def main():
    """Train what is not there yet, print the comparison and record it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs", "shapes"))
    out = parser.parse_args().out
    train.compare({loss: ["--loss", loss] for loss in LOSSES}, [], range(5), out)
    shutil.copy(out / "compare.json", HERE / "shapes.json")


if __name__ == "__main__":
    main()
